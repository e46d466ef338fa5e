//! `gainshare demo`: three real training jobs on this machine, once under each policy, with the same start.
//!
//! **What it shows.** The fixed schedule of the FlowCon thesis: a variational auto-encoder first, a
//! classifier later, a short classifier last, each by its built-in trainer, scaled to about 40 s a round.
//! Each round is the product itself: a daemon of its own in temporary folders, jobs submitted to it, real
//! processes under real limits.
//!
//! **How it stays comparable.** All jobs are bound to the same core (`--cores` for more), so that they
//! compete on a machine of any size; how many steps make a second is measured once, before the first round;
//! the trainers are seeded, so every round does exactly the same work. Only the policy differs.

mod outcome;
mod report;
mod round;
mod schedule;
mod screen;

use anyhow::{Context, Result};
use gainshare_core::policy::Preset;
use gainshare_figures::file::{self, Drawing};
use gainshare_figures::terminal::Printer;
use std::path::PathBuf;

/// Watch three training jobs share this machine: with equal shares (`na`), under FlowCon, and under our own policy.
///
/// Needs nothing but this program: the trainers are built in. Takes about a minute for each policy and
/// writes a report with pictures. Example: `gainshare demo`, or for scripts `gainshare demo -o json`.
#[derive(Debug, Clone, clap::Args)]
pub struct DemoArgs {
    /// Policies to compare, each in a round of its own; the others are compared with the first.
    #[arg(long, value_delimiter = ',', default_value = "na,flowcon,gainshare", value_name = "NAMES")]
    #[arg(value_parser = crate::values::policy_for_real_jobs())]
    policy: Vec<Preset>,
    /// About how long one round takes, in seconds.
    #[arg(long, default_value_t = 40.0, value_name = "S", value_parser = seconds)]
    seconds: f64,
    /// How many cores the jobs share.
    #[arg(long, default_value_t = 1, value_name = "N")]
    cores: usize,
    /// Where the report goes.
    #[arg(long, default_value = "gainshare-demo.html", value_name = "FILE")]
    report: PathBuf,
    /// Write the picture of all rounds into this file, as .svg
    #[arg(long, value_name = "FILE")]
    figure: Option<PathBuf>,
    /// Write no report.
    #[arg(long, conflicts_with = "report")]
    no_report: bool,
    /// FlowCon's threshold: growth below it counts as flat.
    #[arg(long, default_value_t = 0.05)]
    alpha: f64,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if (10.0..=3600.0).contains(&s) => Ok(s),
        _ => Err("give a number of seconds between 10 and 3600".to_owned()),
    }
}

/// Runs every round and prints when each job finished.
pub fn demo(args: &DemoArgs, out: &Printer) -> Result<u8> {
    file::check(args.figure.as_deref(), false)?;
    if !args.no_report {
        // A report that cannot be written is an error now, not after three minutes.
        std::fs::File::create(&args.report).with_context(|| {
            format!("cannot write the report to {}: choose another --report", args.report.display())
        })?;
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let jobs = schedule::calibrate(args.seconds)?;
        let mut rounds = Vec::new();
        for policy in &args.policy {
            let settings =
                round::Settings { policy: *policy, cores: args.cores, alpha: args.alpha, length_s: args.seconds };
            let title = format!("round {} of {}: {}", rounds.len() + 1, args.policy.len(), policy.name());
            match round::play(&settings, &jobs, &title).await? {
                Some(outcome) => rounds.push(outcome),
                None => return Ok(130),
            }
        }
        if !args.no_report {
            std::fs::write(&args.report, report::html(&rounds, args.cores))
                .with_context(|| format!("cannot write the report to {}", args.report.display()))?;
        }
        if let Some(path) = &args.figure {
            file::write(path, &Drawing { svg: Some(&report::picture(&rounds)), page: None })?;
        }
        if out.is_json() {
            out.json(&outcome::json(&rounds))?;
        } else {
            out.text(&outcome::table(&rounds))?;
            if !args.no_report {
                out.text(&format!("\nReport with pictures: {}\n", args.report.display()))?;
            }
        }
        Ok(0)
    })
}
