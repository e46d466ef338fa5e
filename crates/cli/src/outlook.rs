//! When jobs will be done, and what their owners are shown about deadlines.

use crate::notice::notice;
use gainshare_core::forecast::{Certainty, Prospect};
use gainshare_daemon::api::types::{DeadlineState, JobInfo};
use gainshare_daemon::deadline;
use gainshare_figures::terminal::{Colour, optional, printable, seconds};

/// What is printed about a job whose program has not ended well here yet.
const FIRST_WORD: &str = "whether the deadline can be kept is known after the first reports";

/// When the job will be done, with half the width of the interval, and how its deadline stands.
pub fn done(job: &JobInfo) -> (String, Colour) {
    let live = !job.state.is_final();
    let when = match &job.done {
        Some(done) if live => {
            format!("at {}", deadline::local_within(done.at_s, 0.5 * (done.latest_s - done.earliest_s)))
        }
        _ => optional(job.eta_s.filter(|_| live), |s| format!("in {}", seconds(s))),
    };
    match &job.deadline {
        None => (when, Colour::Plain),
        Some(due) => {
            let prospect = due.prospect(job.done.as_ref());
            let colour = match prospect {
                Prospect::Late | Prospect::Missed => Colour::Red,
                Prospect::Met | Prospect::InTime(Certainty::Sure) => Colour::Green,
                Prospect::InTime(_) => Colour::Yellow,
                Prospect::Unknown => Colour::Plain,
            };
            (format!("{when}, due {}: {prospect}", deadline::local(due.at_s)), colour)
        }
    }
}

/// How a deadline stands, as far as its owner needs to know.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outlook {
    OnTime,
    AtRisk,
    /// Nothing can be predicted yet.
    Unknown,
}

impl Outlook {
    /// What the answer to the submission of a job says of its deadline, if earlier runs of its program are known.
    pub fn at_submission(job: &JobInfo) -> Option<Outlook> {
        prediction(job, None, false).map(|(outlook, _)| outlook)
    }
}

/// Prints of jobs that were just submitted whether they will meet their deadlines, or when that will be known.
pub fn print(jobs: &[JobInfo]) {
    let mut unknown = Vec::new();
    for job in jobs.iter().filter(|job| job.deadline.is_some()) {
        match prediction(job, None, false) {
            Some((_, text)) => notice!("{}: {}", job.name, printable(&text)),
            None => unknown.push(job.name.as_str()),
        }
    }
    if !unknown.is_empty() {
        notice!("{}: {}", unknown.join(", "), FIRST_WORD);
    }
}

/// What to print now: nothing if `last`, which was printed before, still holds. `is_overdue`: the owner has waited
/// long enough for a first answer.
pub fn prediction(job: &JobInfo, last: Option<Outlook>, is_overdue: bool) -> Option<(Outlook, String)> {
    let deadline = job.deadline.as_ref()?;
    let outlook = match deadline.state {
        DeadlineState::OnTime if job.done.is_some() => Outlook::OnTime,
        DeadlineState::AtRisk | DeadlineState::Missed => Outlook::AtRisk,
        // An earlier answer stands until there is another one.
        _ if last.is_none() && is_overdue => Outlook::Unknown,
        _ => return None,
    };
    if last == Some(outlook) {
        return None;
    }
    let text = match outlook {
        Outlook::OnTime => {
            let basis = job.done.as_ref().and_then(|done| done.basis.as_ref());
            format!("done {}{}", done(job).0, basis.map_or_else(String::new, |basis| format!(" (by {basis})")))
        }
        // The daemon predicts the miss after the decision, so it may be missing at this moment.
        Outlook::AtRisk => deadline.miss.as_ref()?.to_string(),
        Outlook::Unknown => {
            "whether it meets its deadline is not known yet: its output names no number of steps; if it \
                          stops at a value, start it with --target NAME=VALUE"
                .to_owned()
        }
    };
    Some((outlook, text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_daemon::api::types::{MissCause, PredictedMiss};
    use serde_json::json;

    fn job(state: &str, has_end: bool, miss: Option<&PredictedMiss>) -> JobInfo {
        let done = json!({"at": "", "at_s": 1e9, "earliest_s": 1e9, "latest_s": 1e9,
            "basis": "3 earlier runs of this program"});
        let no_resources: Vec<String> = vec![];
        serde_json::from_value(json!({
            "id": 1, "name": "a", "state": "running", "attempt": 1, "runtime": "process", "command": ["a"],
            "env_names": no_resources, "owner": "me", "priority": 0, "after": no_resources, "attached": true,
            "dir": "", "submitted_at": "", "submitted_s": 0.0, "notes": no_resources,
            "done": if has_end { done } else { json!(null) },
            "deadline": {"at": "", "at_s": 2e9, "tolerance_s": 0.0, "state": state, "miss": miss},
        }))
        .expect("a job")
    }

    #[test]
    fn an_interval_that_reaches_beyond_the_deadline_is_not_on_time_for_certain() {
        let shown = |at_s: f64, latest_s: f64, tolerance_s: f64| {
            let mut job = job("on-time", true, None);
            let end = job.done.as_mut().expect("it has one");
            (end.at_s, end.latest_s) = (at_s, latest_s);
            job.deadline.as_mut().expect("it has one").tolerance_s = tolerance_s;
            let (text, colour) = done(&job);
            (text.rsplit_once(": ").expect("words follow").1.to_owned(), colour)
        };
        assert_eq!(shown(1.9e9, 2e9, 0.0), ("on time".to_owned(), Colour::Green));
        assert_eq!(shown(1.9e9, 2.1e9, 0.0), ("probably on time".to_owned(), Colour::Yellow));
        assert_eq!(shown(2.05e9, 2.1e9, 0.0), ("may be missed".to_owned(), Colour::Yellow));
        assert_eq!(shown(1.9e9, 2.1e9, 2e8).0, "on time", "so much lateness is tolerated");
    }

    #[test]
    fn what_earlier_runs_say_is_printed_with_their_number_and_not_again() {
        let (outlook, text) = prediction(&job("on-time", true, None), None, false).expect("it is known");
        assert_eq!(outlook, Outlook::OnTime);
        assert!(
            text.starts_with("done at ") && text.ends_with("on time (by 3 earlier runs of this program)"),
            "{text}"
        );
        assert_eq!(prediction(&job("on-time", true, None), Some(Outlook::OnTime), false), None);
        let miss = PredictedMiss { deadline_s: 2e9, cause: MissCause::NoTimeLeft };
        let late = job("late", true, Some(&miss));
        assert_eq!(prediction(&late, None, false), Some((Outlook::AtRisk, miss.to_string())));
        assert_eq!(Outlook::at_submission(&late), Some(Outlook::AtRisk));
        let mut told_only = job("late", true, None);
        told_only.notes.push(miss.to_string());
        assert_eq!(prediction(&told_only, None, false), None, "a sentence is never read back");
        assert_eq!(Outlook::at_submission(&job("unknown", false, None)), None, "the first reports will show it");
    }
}
