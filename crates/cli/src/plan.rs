//! `plan`: what would become of jobs if they were submitted now.

use crate::args::PlanArgs;
use crate::link::Link;
use anyhow::Result;
use gainshare_daemon::api::types::PlanAnswer;
use gainshare_daemon::deadline;
use gainshare_daemon::spec;
use gainshare_figures::terminal::{Printer, printable};
use serde_json::json;

pub fn plan(args: &PlanArgs, link: &Link, out: &Printer) -> Result<u8> {
    let mut jobs = Vec::new();
    for file in &args.files {
        jobs.extend(spec::load(file)?);
    }
    jobs.iter_mut().for_each(|job| args.finish.apply(job));
    let mut jobs = spec::prepare(jobs)?;
    let now = deadline::now();
    jobs.iter_mut().try_for_each(|job| job.resolve(&now))?;
    // The values of the environment are no part of the question.
    jobs.iter_mut().for_each(|job| job.hide_env_values());
    let answers = match link.ensure_if_used()? {
        true => link.call(link.client.plan(jobs))?,
        // Nothing was ever run here, so no daemon knows more.
        false => jobs.iter().map(PlanAnswer::without_runs).collect(),
    };
    if out.is_json() {
        out.json(&json!({"jobs": answers}))?;
    } else {
        // The times are those of this process's time zone, which may be another one than the daemon's.
        let lines: String = answers.iter().map(|a| format!("{}: {}\n", a.name, printable(&a.sentence()))).collect();
        out.text(&lines)?;
    }
    Ok(0)
}
