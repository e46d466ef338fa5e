//! Programs and what their finished runs say of the next one.
//!
//! **Problem.** Before its first reports a job shows nothing from which its length follows. A user who gave a deadline
//! wants to know at once whether it can be kept.
//!
//! **How.** Commands of one [`Shape`] run the same program. Of the newest finished runs, those of the very same command
//! count, or, where there are none, those of the same program. Together they say how many steps the next run makes and
//! how long each takes; where they differ, the prediction is wide ([`gainshare_core::signal::past`]). People are
//! told the name of the run of middle length. `history.rs` finds the runs.
//!
//! **Terms and units.** The length of a run is its time alone on the machine, in seconds.
//!
//! **Properties.** `runs_are_named_by_the_one_of_middle_length`.

use gainshare_core::signal::past::expected_pace;
use gainshare_core::signal::speed::Pace;
use gainshare_core::signal::{FinishedRun, Signal};
use gainshare_progress::RunLength;

/// What two commands of one program have in common: the same words, numbers apart, and the same length of the run where
/// the command names one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Shape {
    words: Vec<String>,
    length: RunLength,
}

impl Shape {
    pub(super) fn of(command: &[String]) -> Shape {
        Shape { words: command.iter().map(|word| blank_number(word)).collect(), length: RunLength::read(command, None) }
    }

    /// A container that brings its own command is known by its image alone, which says too little.
    pub(super) fn is_unknown(&self) -> bool {
        self.words.is_empty()
    }
}

/// The word with its number, or the number after its `=`, left out.
fn blank_number(word: &str) -> String {
    let is_number = |text: &str| text.parse::<f64>().is_ok();
    match word.split_once('=') {
        _ if is_number(word) => "#".to_owned(),
        Some((name, value)) if is_number(value) => format!("{name}=#"),
        _ => word.to_owned(),
    }
}

/// One finished run whose speed was measured.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PastRun {
    pub(super) name: String,
    pub(super) run: FinishedRun,
    pub(super) pace: Pace,
}

impl PastRun {
    fn length_s(&self) -> f64 {
        self.run.steps.unwrap_or(1) as f64 * self.pace.step_s(1.0)
    }
}

/// What finished runs say of the next one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PastRuns {
    /// The name of the run of middle length.
    pub(super) like: String,
    /// The newest last. They say how many steps the next one makes.
    pub(super) runs: Vec<FinishedRun>,
    /// How long its steps take.
    pub(super) pace: Pace,
    /// Whether the runs had the very same command.
    pub(super) is_same_command: bool,
}

impl PastRuns {
    /// The newest of these runs comes first. `None` without any run.
    pub(super) fn of(mut newest: Vec<PastRun>, is_same_command: bool) -> Option<PastRuns> {
        newest.reverse();
        let runs = newest.iter().map(|past| past.run).collect();
        let pace = expected_pace(&newest.iter().map(|past| past.pace).collect::<Vec<_>>())?;
        newest.sort_by(|a, b| a.length_s().total_cmp(&b.length_s()));
        let like = newest.swap_remove(newest.len() / 2).name;
        Some(PastRuns { like, runs, pace, is_same_command })
    }

    /// What is shown of the speed of a job that has not begun, where the part `available` is left to jobs.
    pub(super) fn signal(&self, available: f64) -> Signal {
        Signal { pace: Some(self.pace.with_available(available)), ..Signal::default() }
    }

    /// What a prediction rests on, such as `3 earlier runs of this program`.
    pub(super) fn basis(&self) -> String {
        let what = if self.is_same_command { "command" } else { "program" };
        match self.runs.len() {
            1 => format!("1 earlier run of this {what}"),
            count => format!("{count} earlier runs of this {what}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alike(a: &str, b: &str) -> bool {
        let shape = |text: &str| Shape::of(&text.split(' ').map(str::to_owned).collect::<Vec<_>>());
        shape(a) == shape(b)
    }

    #[test]
    fn runs_of_a_sweep_are_alike_and_runs_of_other_lengths_are_not() {
        assert!(alike("python t.py --lr 0.1 --epochs 5", "python t.py --lr 0.01 --epochs 5"));
        assert!(alike("python t.py lr=0.1", "python t.py lr=1e-3"));
        assert!(!alike("python t.py --lr 0.1 --epochs 5", "python t.py --lr 0.1 --epochs 50"));
        assert!(!alike("python t.py --model small", "python t.py --model large"));
        assert!(!alike("python t.py", "python other.py"));
    }

    #[test]
    fn runs_are_named_by_the_one_of_middle_length() {
        let run = |name: &str, steps: u64, step_s: f64| PastRun {
            name: name.into(),
            run: FinishedRun { steps: Some(steps), claimed: None, claimed_by: None, core_s: 1.0 },
            pace: Pace::from_law(0.0, step_s, 1.0),
        };
        assert_eq!(PastRuns::of(vec![], true), None);
        let one = PastRuns::of(vec![run("only", 100, 1.0)], true).expect("there is a run");
        assert_eq!(one.basis(), "1 earlier run of this command");
        let runs = vec![run("long", 100, 1.3), run("short", 100, 0.9), run("middle", 200, 0.5)];
        let three = PastRuns::of(runs, false).expect("there are runs");
        assert_eq!((three.like.as_str(), three.basis().as_str()), ("middle", "3 earlier runs of this program"));
        assert_eq!(three.runs.iter().map(|run| run.steps).collect::<Vec<_>>(), [Some(200), Some(100), Some(100)]);
        // Half of the machine is available: steps take twice as long.
        let pace = |available| one.signal(available).pace.expect("it is known").step_s(1.0);
        assert!((pace(1.0) - 1.0).abs() < 1e-9 && (pace(0.5) - 2.0).abs() < 1e-9);
    }
}
