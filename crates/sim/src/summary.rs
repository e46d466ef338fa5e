//! What a comparison comes to: one line for each policy, medians over seeds and their spread.

use crate::outcome::Outcome;
use crate::study::{median, quantile};
use gainshare_figures::Table;
use serde::Serialize;
use std::collections::BTreeMap;

/// One policy against the baseline, over all seeds. Times in seconds; medians unless the name says otherwise.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    pub mean_completion_s: f64,
    /// The middle 80 % of the mean completion time over seeds.
    pub mean_completion_spread_s: [f64; 2],
    pub makespan_s: f64,
    pub makespan_spread_s: [f64; 2],
    /// The part of all jobs that end sooner than under the baseline.
    pub faster_share: f64,
    /// How much longer the worst-off job takes than under the baseline: 0.15 is 15 %.
    pub worst_slowdown: f64,
    /// The same in the worst tenth of the seeds, and in the worst seed of all.
    pub worst_slowdown_p90: f64,
    pub worst_slowdown_max: f64,
    /// As above, but the median over seeds is taken for each job first: how much the worst-off of them
    /// typically loses.
    pub worst_job_median_slowdown: f64,
    /// How much sooner the best-off job ends: 0.4 is 40 %.
    pub best_speedup: f64,
    /// Mean time until jobs have made 90 % of their loss reduction.
    pub mean_to_90_percent_s: f64,
    /// The same under a shorter name.
    pub time_to_90: f64,
    /// Mean over jobs of (time taken) / (time alone on the best node).
    pub stretch: f64,
    pub migrations: f64,
    /// The part of all deadlines that were met, where jobs have deadlines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadlines_met: Option<f64>,
    /// How much of the reserved CPU was used, 0…1.
    pub utilisation: f64,
}

/// A difference of less than this (relative) is not "faster": rounding to microseconds and reports at
/// slightly other moments.
const SAME: f64 = 1e-3;

/// Sums up each policy against the first.
pub fn summarise(names: &[String], outcomes: &[Vec<Outcome>]) -> BTreeMap<String, Summary> {
    let base = &outcomes[0];
    names.iter().cloned().zip(outcomes.iter().map(|of| summary(of, base))).collect()
}

fn summary(of: &[Outcome], base: &[Outcome]) -> Summary {
    let each = |f: &dyn Fn(&Outcome) -> f64| -> Vec<f64> { of.iter().map(f).collect() };
    let ratios: Vec<Vec<f64>> = of
        .iter()
        .zip(base)
        .map(|(o, b)| o.completions_s().zip(b.completions_s()).map(|(x, y)| x / y).collect())
        .collect();
    let over = |f: &dyn Fn(&[f64]) -> f64| -> f64 { median(&ratios.iter().map(|r| f(r)).collect::<Vec<_>>()) };
    let spread = |v: &[f64]| [quantile(v, 0.1), quantile(v, 0.9)];
    let worst: Vec<f64> = ratios.iter().map(|r| r.iter().copied().fold(f64::MIN, f64::max) - 1.0).collect();
    let to_90 = median(&each(&|o| o.mean_quality_s(0.9)));
    let (means, spans) = (each(&Outcome::mean_completion_s), each(&Outcome::makespan_s));
    Summary {
        mean_completion_s: median(&means),
        mean_completion_spread_s: spread(&means),
        makespan_s: median(&spans),
        makespan_spread_s: spread(&spans),
        faster_share: over(&|r| r.iter().filter(|x| **x < 1.0 - SAME).count() as f64 / r.len().max(1) as f64),
        worst_slowdown: median(&worst),
        worst_slowdown_p90: quantile(&worst, 0.9),
        worst_slowdown_max: quantile(&worst, 1.0),
        worst_job_median_slowdown: worst_typical(&ratios),
        best_speedup: over(&|r| 1.0 - r.iter().copied().fold(f64::MAX, f64::min)),
        mean_to_90_percent_s: to_90,
        time_to_90: to_90,
        stretch: median(&each(&|o| {
            o.jobs.iter().map(|j| j.completion_s() / j.alone_s).sum::<f64>() / o.jobs.len().max(1) as f64
        })),
        migrations: median(&each(&|o| o.migrations.len() as f64)),
        deadlines_met: of
            .first()
            .and_then(Outcome::deadlines_met)
            .map(|_| of.iter().filter_map(Outcome::deadlines_met).sum::<f64>() / of.len().max(1) as f64),
        utilisation: median(&each(&Outcome::utilisation)),
    }
}

/// The largest, over jobs, of the median over seeds of (time taken / time under the baseline) − 1.
fn worst_typical(ratios: &[Vec<f64>]) -> f64 {
    let jobs = ratios.iter().map(Vec::len).min().unwrap_or(0);
    let typical = |j: usize| median(&ratios.iter().map(|r| r[j]).collect::<Vec<_>>()) - 1.0;
    (0..jobs).map(typical).fold(f64::NEG_INFINITY, f64::max)
}

/// The summaries as a table, policies in the order given.
pub fn table(names: &[String], summaries: &BTreeMap<String, Summary>) -> Table {
    let deadlines = names.iter().any(|n| summaries[n].deadlines_met.is_some());
    let head = [
        "policy",
        "mean completion",
        "80 % of seeds",
        "makespan",
        "faster",
        "worst job",
        "90th percentile",
        "best job",
        "to 90 %",
        "stretch",
    ];
    let row = |name: &String| {
        let s = &summaries[name];
        let [low, high] = s.mean_completion_spread_s;
        let mut cells = vec![
            name.clone(),
            format!("{:.1} s", s.mean_completion_s),
            format!("{low:.0}–{high:.0}"),
            format!("{:.1} s", s.makespan_s),
            format!("{:.0} %", s.faster_share * 100.0),
            format!("{:+.1} %", s.worst_slowdown * 100.0),
            format!("{:+.1} %", s.worst_slowdown_p90 * 100.0),
            format!("{:+.1} %", -s.best_speedup * 100.0),
            format!("{:.1} s", s.mean_to_90_percent_s),
            format!("{:.2}", s.stretch),
        ];
        if let Some(met) = s.deadlines_met {
            cells.push(format!("{:.0} %", met * 100.0));
        }
        cells
    };
    let mut head = head.map(String::from).to_vec();
    if deadlines {
        head.push("deadlines met".into());
    }
    Table { head, rows: names.iter().map(row).collect() }
}
