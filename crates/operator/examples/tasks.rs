//! Prints what distributed jobs cost the operator, for `cargo xtask bench tasks`: `tasks JOBS NODES`.

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [jobs, nodes] = words.as_slice() else { return Err("usage: tasks JOBS NODES".into()) };
    println!("{}", gainshare_operator::rehearsal::rehearse(jobs.parse()?, nodes.parse()?)?);
    Ok(())
}
