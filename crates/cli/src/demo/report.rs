//! The report of a demo: one HTML page with the table and the pictures, nothing to load from elsewhere.

use super::outcome::{JobOutcome, Outcome, comparison};
use gainshare_figures::{Bar, Gantt, LineChart, Page, Panel, Panels, Row, Series, Shape};

pub(super) fn html(rounds: &[Outcome], cores: usize) -> String {
    let mut page = Page::new("Gainshare demo").text(&format!(
        "Three training jobs with real gradients share {cores} core(s) of this machine, once under each policy, with the same start and \
         the same work. Completion counts from a job's arrival; \"to 90 %\" is the time until it had made nine tenths of its loss reduction. \
         `gainshare demo` makes this page."
    ));
    page = page.table(&comparison(rounds));
    let each = |draw: &dyn Fn(&Outcome) -> String| rounds.iter().map(draw).collect::<Vec<_>>();
    page.figure(&picture(rounds))
        .beside(&each(&|round| chart(round, "loss, relative to its first", "relative loss", Shape::Line, relative)))
        .beside(&each(&gantt))
        .html()
}

/// The whole demo in one picture: the share of each job over time, one panel for each policy.
pub(super) fn picture(rounds: &[Outcome]) -> String {
    let panel = |round: &Outcome| Panel {
        name: round.policy.to_owned(),
        shares: round.jobs.iter().map(shares_until_the_end).collect(),
        ends: round.jobs.iter().map(|j| (j.ended_s, format!("{}: {:.1} s", j.name, j.completion_s()))).collect(),
    };
    Panels {
        title: "Shares of the CPU under each policy, and when each job was done".to_owned(),
        x_label: "seconds since the start of the round; times count from a job's arrival".to_owned(),
        panels: rounds.iter().map(panel).collect(),
    }
    .svg()
}

fn shares_until_the_end(job: &JobOutcome) -> Series {
    let points = job.shares.iter().copied().chain([(job.ended_s, 0.0)]).collect();
    Series::new(job.name.clone(), points)
}

fn relative(job: &JobOutcome) -> Vec<(f64, f64)> {
    let first = job.losses.first().map_or(1.0, |(_, v)| v.abs().max(f64::MIN_POSITIVE));
    job.losses.iter().map(|(t, v)| (*t, v / first)).collect()
}

fn chart(
    round: &Outcome,
    title: &str,
    y_label: &str,
    shape: Shape,
    points: impl Fn(&JobOutcome) -> Vec<(f64, f64)>,
) -> String {
    LineChart {
        title: format!("{}: {title}", round.policy),
        x_label: "seconds since the start of the round".to_owned(),
        y_label: y_label.to_owned(),
        shape,
        y_from_zero: true,
        marks: round.jobs.iter().map(|j| (j.arrived_s, j.name.clone())).collect(),
        series: round.jobs.iter().map(|j| Series::new(j.name.clone(), points(j))).collect(),
    }
    .svg()
}

fn gantt(round: &Outcome) -> String {
    let row = |(tone, job): (usize, &JobOutcome)| Row {
        label: job.name.clone(),
        bars: vec![Bar { from: job.arrived_s, to: job.ended_s, label: format!("{:.1} s", job.completion_s()), tone }],
    };
    Gantt {
        title: format!("{}: when each job ran", round.policy),
        x_label: "seconds since the start of the round".to_owned(),
        rows: round.jobs.iter().enumerate().map(row).collect(),
    }
    .svg()
}
