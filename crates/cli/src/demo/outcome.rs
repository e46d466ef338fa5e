//! The results of a round: times, curves, and how they compare.

use gainshare_figures::Table;
use serde_json::{Value, json};

/// One job of one round. Times count from the start of the round unless said otherwise.
#[derive(Debug, Clone, Default)]
pub(super) struct JobOutcome {
    pub(super) name: String,
    pub(super) arrived_s: f64,
    pub(super) ended_s: f64,
    /// (time, loss)
    pub(super) losses: Vec<(f64, f64)>,
    /// (time, part of the CPU the last decision gave it)
    pub(super) shares: Vec<(f64, f64)>,
}

impl JobOutcome {
    /// From arrival to end.
    pub(super) fn completion_s(&self) -> f64 {
        self.ended_s - self.arrived_s
    }

    /// From arrival until nine tenths of its whole improvement were made.
    pub(super) fn t90_s(&self) -> Option<f64> {
        let (_, first) = self.losses.first()?;
        let (_, last) = self.losses.last()?;
        let wanted = first - 0.9 * (first - last);
        let reached = self.losses.iter().find(|(_, loss)| *loss <= wanted)?;
        Some(reached.0 - self.arrived_s)
    }
}

/// One round.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    pub(super) policy: &'static str,
    pub(super) jobs: Vec<JobOutcome>,
}

impl Outcome {
    pub(super) fn makespan_s(&self) -> f64 {
        self.jobs.iter().map(|j| j.ended_s).fold(0.0, f64::max)
    }
}

/// For scripts.
pub(super) fn json(rounds: &[Outcome]) -> Value {
    let round = |r: &Outcome| {
        let jobs = r.jobs.iter().map(|j| {
            json!({
                "name": j.name,
                "arrived_s": j.arrived_s,
                "completion_s": j.completion_s(),
                "t90_s": j.t90_s(),
            })
        });
        json!({"policy": r.policy, "makespan_s": r.makespan_s(), "jobs": jobs.collect::<Vec<_>>()})
    };
    json!({"rounds": rounds.iter().map(round).collect::<Vec<_>>()})
}

/// `now` against `before` as a change in percent.
fn change(now: f64, before: f64) -> String {
    format!("{:+.1} %", (now / before - 1.0) * 100.0)
}

/// One row for each job and one for the makespan; the first round is what the others are held against.
pub(super) fn comparison(rounds: &[Outcome]) -> Table {
    let mut head = vec!["job".to_owned(), "arrived".to_owned()];
    for (i, r) in rounds.iter().enumerate() {
        head.push(format!("{} done after", r.policy));
        if i > 0 {
            head.push("change".to_owned());
        }
        head.push(format!("{} to 90 %", r.policy));
    }
    let Some(base) = rounds.first() else { return Table { head, rows: vec![] } };
    let seconds = |s: f64| format!("{s:.1} s");
    let mut rows = Vec::new();
    for (j, job) in base.jobs.iter().enumerate() {
        let mut row = vec![job.name.clone(), seconds(job.arrived_s)];
        for (i, r) in rounds.iter().enumerate() {
            row.push(seconds(r.jobs[j].completion_s()));
            if i > 0 {
                row.push(change(r.jobs[j].completion_s(), job.completion_s()));
            }
            row.push(r.jobs[j].t90_s().map_or("–".to_owned(), seconds));
        }
        rows.push(row);
    }
    let mut last = vec!["makespan".to_owned(), String::new()];
    for (i, r) in rounds.iter().enumerate() {
        last.push(seconds(r.makespan_s()));
        if i > 0 {
            last.push(change(r.makespan_s(), base.makespan_s()));
        }
        last.push(String::new());
    }
    rows.push(last);
    Table { head, rows }
}

pub(super) fn table(rounds: &[Outcome]) -> String {
    format!("\n{}", comparison(rounds).text())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(arrived_s: f64, ended_s: f64) -> JobOutcome {
        let losses = vec![(arrived_s + 1.0, 10.0), (arrived_s + 2.0, 3.0), (arrived_s + 3.0, 0.9), (ended_s, 0.0)];
        JobOutcome { name: "vae".into(), arrived_s, ended_s, losses, shares: vec![] }
    }

    #[test]
    fn times_count_from_arrival() {
        let job = job(5.0, 30.0);
        assert_eq!(job.completion_s(), 25.0);
        // From 10 down to 0: nine tenths are done at 1 or below, which is 3 s after arrival.
        assert_eq!(job.t90_s(), Some(3.0));
        assert_eq!(JobOutcome::default().t90_s(), None);
    }

    #[test]
    fn rounds_are_held_against_the_first() {
        let rounds = [
            Outcome { policy: "na", jobs: vec![job(0.0, 40.0)] },
            Outcome { policy: "flowcon", jobs: vec![job(0.0, 30.0)] },
        ];
        let text = table(&rounds);
        assert!(text.contains("-25.0 %"), "{text}");
        assert_eq!(json(&rounds)["rounds"][1]["jobs"][0]["completion_s"], 30.0);
    }
}
