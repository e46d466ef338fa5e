//! Programs and what their finished runs say of the next one.
//!
//! **Problem.** Before its first reports a job shows nothing from which its length follows. A user who gave a deadline
//! wants to know at once whether it can be kept.
//!
//! **How.** Commands of one [`Shape`] run the same program. Of the newest finished runs, those of the very same command
//! count, or, where there are none, those of the same program. The run of middle length stands for all of them. How far
//! the others are from it is the error of the prediction. `history.rs` finds the runs.
//!
//! **Terms and units.** The length of a run is its time alone on the machine, in seconds.
//!
//! **Properties.** `the_run_of_middle_length_stands_for_all`.

use gainshare_core::signal::Signal;
use gainshare_core::signal::speed::Pace;
use gainshare_progress::RunLength;

/// The relative error of a prediction that rests on one run: two runs of a program differ about this much in speed.
const ONE_RUN: f64 = 0.1;

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
    pub(super) steps: u64,
    pub(super) pace: Pace,
}

impl PastRun {
    fn length_s(&self) -> f64 {
        self.steps as f64 * self.pace.step_s(1.0)
    }
}

/// What finished runs say of the next one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PastRuns {
    /// The run of middle length, which stands for all of them.
    pub(super) middle: PastRun,
    count: usize,
    /// Whether the runs had the very same command.
    pub(super) is_same_command: bool,
}

impl PastRuns {
    /// `None` without any run.
    pub(super) fn of(mut runs: Vec<PastRun>, is_same_command: bool) -> Option<PastRuns> {
        runs.sort_by(|a, b| a.length_s().total_cmp(&b.length_s()));
        let (count, shortest_s) = (runs.len(), runs.first()?.length_s());
        let longest_s = runs.last()?.length_s();
        let mut middle = runs.swap_remove(count / 2);
        let spread = 0.5 * (longest_s - shortest_s) / middle.length_s().max(f64::MIN_POSITIVE);
        let least = if count == 1 { ONE_RUN } else { 0.0 };
        middle.pace.error = middle.pace.error.max(spread).max(least);
        Some(PastRuns { middle, count, is_same_command })
    }

    /// The signal of a job that has not begun, on a machine of which the part `available` is left to jobs.
    pub(super) fn signal(&self, available: f64) -> Signal {
        let pace = Some(self.middle.pace.with_available(available));
        Signal { total: Some(self.middle.steps), pace, ..Signal::default() }
    }

    /// What a prediction rests on, such as `3 earlier runs of this program`.
    pub(super) fn basis(&self) -> String {
        let what = if self.is_same_command { "command" } else { "program" };
        match self.count {
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
    fn the_run_of_middle_length_stands_for_all() {
        let run = |name: &str, steps: u64, step_s: f64| PastRun {
            name: name.into(),
            steps,
            pace: Pace::from_law(0.0, step_s, 1.0),
        };
        assert_eq!(PastRuns::of(vec![], true), None);
        let one = PastRuns::of(vec![run("only", 100, 1.0)], true).expect("there is a run");
        assert_eq!((one.basis().as_str(), one.middle.pace.error), ("1 earlier run of this command", ONE_RUN));
        let runs = vec![run("long", 100, 1.3), run("short", 100, 0.9), run("middle", 200, 0.5)];
        let three = PastRuns::of(runs, false).expect("there are runs");
        assert_eq!((three.middle.name.as_str(), three.basis().as_str()), ("middle", "3 earlier runs of this program"));
        assert!((three.middle.pace.error - 0.2).abs() < 1e-9, "{three:?}");
        // Half of the machine is available: steps take twice as long.
        let signal = three.signal(0.5);
        assert_eq!((signal.total, signal.pace.map(|pace| pace.step_s(1.0))), (Some(200), Some(1.0)));
    }
}
