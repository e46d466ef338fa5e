//! Prints the deadline experiment: `cargo run --release -p gainshare-sim --example qos -- SEEDS FIRST`.

use gainshare_sim::engine::{Record, run};
use gainshare_sim::paper::SEEDS;
use gainshare_sim::paper::qos::{Conditions, Regime, policies, run as experiment};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let seeds: u64 = std::env::args().nth(1).map_or(Ok(SEEDS), |s| s.parse())?;
    let first_seed: u64 = std::env::args().nth(2).map_or(Ok(0), |s| s.parse())?;
    let report = experiment(Conditions { first_seed, ..Conditions::of(seeds) }, &|_, _| ())?;
    for (title, table) in report.tables() {
        println!("{title}\n{}", table.text());
    }
    // Which deadlines were missed although there was enough of everything.
    for (name, policy, told) in policies().into_iter().filter(|(name, ..)| name.starts_with("qos")) {
        for seed in first_seed..first_seed + seeds {
            let world = Regime::Enough.world(seed, told);
            let outcome = run(&world, &policy, Record::default())?;
            for (job, spec) in outcome.jobs.iter().zip(&world.jobs).filter(|(j, _)| j.met() == Some(false)) {
                let left_s = spec.deadline.map_or(0.0, |d| d.at.since(spec.arrival).as_secs_f64());
                let (took_s, alone_s) = (job.completion_s(), job.alone_s);
                println!("{name}, seed {seed}: {} took {took_s:.1} of {left_s:.1} s, alone {alone_s:.1}", job.name);
            }
        }
    }
    Ok(())
}
