//! Prints how well ends are predicted after a tenth of each run: `cargo run --release -p gainshare-sim --example
//! forecast -- [SEEDS]`.

use gainshare_core::policy::Preset;
use gainshare_sim::engine::SimError;
use gainshare_sim::forecast::{Accuracy, ForecastScore, Kind, score};

fn main() -> Result<(), SimError> {
    let seeds = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(6u64);
    println!(
        "{:<8}{:<11}{:<13}{:>6}{:>9}{:>9}{:>9}{:>9}{:>12}",
        "world", "policy", "jobs", "count", "median", "90th", "inside", "bias", "kept share"
    );
    let mut all: Vec<ForecastScore> = vec![];
    let only = std::env::args().nth(2);
    for kind in Kind::ALL.into_iter().filter(|k| only.as_ref().is_none_or(|name| name == k.name())) {
        for (name, preset) in [("na", Preset::Na), ("qos", Preset::Qos), ("gainshare", Preset::Gainshare)] {
            let mut scores = vec![];
            for seed in 0..seeds {
                scores.extend(score(&kind.world(seed), preset)?);
            }
            print(kind.name(), name, &scores);
            all.extend(scores);
        }
    }
    print("all", "", &all);
    Ok(())
}

fn print(world: &str, policy: &str, scores: &[ForecastScore]) {
    let undisturbed: Vec<ForecastScore> = scores.iter().copied().filter(|j| j.is_undisturbed).collect();
    for (which, jobs) in [("all", scores), ("undisturbed", &undisturbed[..])] {
        let a = Accuracy::of(jobs.iter());
        let percent = |x: f64| format!("{:.1} %", 100.0 * x);
        println!(
            "{world:<8}{policy:<11}{which:<13}{:>6}{:>9}{:>9}{:>9}{:>9}{:>12}",
            a.jobs,
            percent(a.median_error),
            percent(a.ninetieth_error),
            percent(a.inside),
            percent(a.bias),
            percent(a.kept_share_median_error)
        );
    }
}
