//! From outcomes to figures: how long each job took, its part of a node over time, and where it ran.

use crate::outcome::Outcome;
use crate::world::World;
use gainshare_core::plan::MoveReason;
use gainshare_figures::{Bar, BarChart, Gantt, Group, LineChart, Row, Series, Shape};

/// A figure and what it shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    pub caption: String,
    pub svg: String,
}

/// Completion time of every job under several policies, one run of each.
pub fn completions(title: &str, runs: &[(&str, &Outcome)]) -> Figure {
    let jobs = runs.first().map_or(0, |(_, o)| o.jobs.len());
    let group = |j: usize| Group {
        label: if jobs > 12 { format!("{}", j + 1) } else { runs[0].1.jobs[j].name.clone() },
        values: runs.iter().map(|(_, o)| o.jobs[j].completion_s()).collect(),
    };
    let chart = BarChart {
        title: title.to_owned(),
        y_label: "completion time, s".into(),
        names: runs.iter().map(|(n, _)| (*n).to_owned()).collect(),
        groups: (0..jobs).map(group).collect(),
    };
    Figure { caption: "Completion time of each job in one run (seed 0).".into(), svg: chart.svg() }
}

/// What part of one node each job used over time.
pub fn shares(title: &str, world: &World, outcome: &Outcome, node: usize) -> Figure {
    let here = |j: &usize| outcome.jobs[*j].stays.iter().any(|s| s.node == node);
    let series = (0..world.jobs.len()).filter(here).map(|j| {
        let mut points = outcome.courses[j].share.clone();
        points.insert(0, (world.jobs[j].arrival.as_secs_f64(), 0.0));
        Series::new(world.jobs[j].name.clone(), points)
    });
    let chart = LineChart {
        title: title.to_owned(),
        x_label: "seconds".into(),
        y_label: format!("part of {}", world.nodes[node].name),
        shape: Shape::Stacked,
        y_from_zero: true,
        marks: vec![],
        series: series.collect(),
    };
    Figure { caption: "CPU used by each job, stacked.".into(), svg: chart.svg() }
}

/// Loss of each job over time, relative to its first report.
pub fn losses(title: &str, world: &World, outcome: &Outcome) -> Figure {
    let series = world.jobs.iter().zip(&outcome.courses).map(|(job, course)| {
        let scale = course.loss.first().map_or(1.0, |p| p.1.abs().max(f64::MIN_POSITIVE));
        Series::new(job.name.clone(), course.loss.iter().map(|(t, l)| (*t, l / scale)).collect())
    });
    let chart = LineChart {
        title: title.to_owned(),
        x_label: "seconds".into(),
        y_label: "loss, relative to the first report".into(),
        shape: Shape::Line,
        y_from_zero: true,
        marks: vec![],
        series: series.collect(),
    };
    Figure { caption: "Loss of each job as it reported it.".into(), svg: chart.svg() }
}

/// Where each job ran: bars marked -M were moved for slow growth, -R to rebalance, as in the thesis's Figure
/// 6.22; our own moves likewise, by gain and home.
pub fn gantt(title: &str, world: &World, outcome: &Outcome) -> Figure {
    let mut rows: Vec<Row> = world.nodes.iter().map(|n| Row { label: n.name.clone(), bars: vec![] }).collect();
    for (j, job) in outcome.jobs.iter().enumerate() {
        let moves: Vec<_> = outcome.migrations.iter().filter(|m| m.job == j).collect();
        for (i, stay) in job.stays.iter().enumerate() {
            let mark = match i.checked_sub(1).and_then(|k| moves.get(k)).map(|m| m.why) {
                Some(MoveReason::SlowGrowth | MoveReason::Gain | MoveReason::Deadline) => "-M",
                Some(MoveReason::Rebalance | MoveReason::Owed) => "-R",
                None => "",
            };
            rows[stay.node].bars.push(Bar {
                from: stay.from.as_secs_f64(),
                to: stay.to.as_secs_f64(),
                label: format!("{}{mark}", world.jobs[j].name),
                tone: j,
            });
        }
    }
    let chart = Gantt { title: title.to_owned(), x_label: "seconds".into(), rows };
    Figure {
        caption: "Where each job ran. -M: moved, under SpeCon because it had converged beside growing jobs, under gainshare to a node that had \
                  run empty; -R: moved to rebalance, under gainshare home."
            .into(),
        svg: chart.svg(),
    }
}
