//! Runs one experiment of the papers: `cargo run --release -p gainshare-sim --example paper -- NAME [seeds]`.

fn main() {
    let mut args = std::env::args().skip(1);
    let name = args.next().unwrap_or_default();
    let seeds = args.next().and_then(|s| s.parse().ok()).unwrap_or(gainshare_sim::paper::SEEDS);
    let experiment = match gainshare_sim::paper::find(&name) {
        Ok(experiment) => experiment,
        Err(why) => return eprintln!("{why}"),
    };
    match experiment.run(seeds, &|_, _| ()) {
        Ok(report) => {
            for (title, table) in report.tables() {
                println!("{title}\n{}", table.text());
            }
        }
        Err(why) => eprintln!("{why}"),
    }
}
