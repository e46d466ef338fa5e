//! The numbers of a row and how they are printed.

use serde::Serialize;

/// What one test printed about its faults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Numbers {
    injected: u64,
    violations: u64,
    recovery_s: Option<f64>,
}

impl Numbers {
    /// The sum of all lines `fault: injected=… violations=… recovery_s=…` that concern this row; of the times, the
    /// largest. A test that serves several rows names the row in the line (`fault: row=… injected=…`), and lines of
    /// other rows add nothing. `None` if there is no line at all. The harness prints the name of a test without an
    /// end of line, so the words may begin within a line.
    pub(super) fn of(printed: &str, row: &str) -> Option<Numbers> {
        let mut sum: Option<Numbers> = None;
        for line in printed.lines().filter_map(|line| Some(line.split_once("fault: ")?.1)) {
            let value = |name: &str| {
                let mut words = line.split_whitespace().filter_map(|word| word.split_once('='));
                words.find(|(key, _)| *key == name).map(|(_, value)| value)
            };
            let count = |name: &str| value(name).and_then(|text| text.parse::<u64>().ok());
            let (Some(injected), Some(violations)) = (count("injected"), count("violations")) else { continue };
            let before = sum.unwrap_or(Numbers { injected: 0, violations: 0, recovery_s: None });
            if value("row").is_some_and(|named| named != row) {
                sum = Some(before);
                continue;
            }
            let recovery_s = value("recovery_s").and_then(|text| text.parse::<f64>().ok());
            sum = Some(Numbers {
                injected: before.injected.saturating_add(injected),
                violations: before.violations.saturating_add(violations),
                recovery_s: longest(before.recovery_s, recovery_s),
            });
        }
        sum
    }
}

fn longest(a: Option<f64>, b: Option<f64>) -> Option<f64> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.max(b)),
        (a, b) => a.or(b),
    }
}

/// What became of a row.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct RowReport {
    row: String,
    /// `held`, `violated`, `partly run` or `not run`.
    state: &'static str,
    injected: u64,
    violations: u64,
    /// Null where a time has no meaning.
    recovery_s: Option<f64>,
    tests_passed: u32,
    /// Tests that were not run, each with the reason.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    not_run: Vec<String>,
}

impl RowReport {
    pub(super) fn new(row: &str) -> RowReport {
        RowReport {
            row: row.to_owned(),
            state: "not run",
            injected: 0,
            violations: 0,
            recovery_s: None,
            tests_passed: 0,
            not_run: Vec::new(),
        }
    }

    pub(super) fn add(&mut self, passed: bool, numbers: Option<Numbers>) {
        let numbers = numbers.unwrap_or(Numbers { injected: 1, violations: 0, recovery_s: None });
        self.injected += numbers.injected;
        // A test that fails because of the violations that it has counted adds none.
        self.violations += numbers.violations.max(u64::from(!passed));
        self.recovery_s = longest(self.recovery_s, numbers.recovery_s);
        self.tests_passed += u32::from(passed);
        self.check();
    }

    pub(super) fn leave_out(&mut self, test: &str, reason: &str) {
        self.not_run.push(format!("{test}: {reason}"));
        self.check();
    }

    fn check(&mut self) {
        self.state = match (self.violations, self.injected, self.not_run.is_empty()) {
            (1.., _, _) => "violated",
            // Tests that passed without an injection show nothing.
            (0, 0, _) => "not run",
            (0, _, true) => "held",
            (0, _, false) => "partly run",
        };
    }

    pub(super) fn line(&self) -> String {
        let recovery = self.recovery_s.map_or(String::new(), |s| format!(", recovery {s:.1} s"));
        let mut text = format!(
            "{:<10} {:<18} injected {}, violations {}{recovery}",
            self.state, self.row, self.injected, self.violations
        );
        for reason in &self.not_run {
            text += &format!("\n           not run: {reason}");
        }
        text
    }
}

/// How many rows held, how many did not, and how many were not run or only in part.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) held: usize,
    pub(super) failed: usize,
    pub(super) left_out: usize,
}

pub(super) fn count(reports: &[RowReport]) -> Counts {
    let of = |states: &[&str]| reports.iter().filter(|report| states.contains(&report.state)).count();
    Counts { held: of(&["held"]), failed: of(&["violated"]), left_out: of(&["not run", "partly run"]) }
}

/// The names of the rows in which nothing was injected, or of which a test was not run.
pub(super) fn incomplete(reports: &[RowReport]) -> Vec<&str> {
    let is_incomplete = |report: &&RowReport| report.injected == 0 || !report.not_run.is_empty();
    reports.iter().filter(is_incomplete).map(|report| report.row.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_a_test_are_summed() {
        let printed = "test a ... fault: injected=3 violations=0 recovery_s=0.5\nnoise\n\
                       fault: injected=2 violations=1 recovery_s=0.2\nfault: nonsense\nfault: injected=5\n";
        assert_eq!(Numbers::of(printed, "a"), Some(Numbers { injected: 5, violations: 1, recovery_s: Some(0.5) }));
        assert_eq!(Numbers::of("ok", "a"), None);
    }

    #[test]
    fn a_line_that_names_a_row_counts_in_that_row_only() {
        let printed = "fault: row=a injected=3 violations=0 recovery_s=0.5\nfault: row=b injected=2 violations=1\n";
        assert_eq!(Numbers::of(printed, "a"), Some(Numbers { injected: 3, violations: 0, recovery_s: Some(0.5) }));
        assert_eq!(Numbers::of(printed, "b"), Some(Numbers { injected: 2, violations: 1, recovery_s: None }));
        assert_eq!(Numbers::of(printed, "c"), Some(Numbers { injected: 0, violations: 0, recovery_s: None }));
    }

    #[test]
    fn what_was_not_run_is_never_held() {
        let mut report = RowReport::new("a");
        assert_eq!(report.state, "not run");
        report.leave_out("x", "needs Docker");
        assert_eq!(report.state, "not run");
        report.add(true, None);
        assert_eq!((report.state, report.injected), ("partly run", 1));
        assert_eq!(incomplete(std::slice::from_ref(&report)), ["a"]);
        report.add(false, Numbers::of("fault: injected=7 violations=0", "a"));
        assert_eq!((report.state, report.injected, report.violations), ("violated", 8, 1));
        let mut held = RowReport::new("c");
        held.add(true, None);
        let reports = [report, RowReport::new("b"), held];
        assert_eq!(count(&reports), Counts { held: 1, failed: 1, left_out: 1 });
        assert_eq!(incomplete(&reports), ["a", "b"]);
    }

    #[test]
    fn a_violation_counts_once() {
        let mut report = RowReport::new("a");
        report.add(false, Numbers::of("fault: injected=7 violations=2", "a"));
        assert_eq!((report.injected, report.violations), (7, 2));
        report.add(false, None);
        assert_eq!((report.injected, report.violations), (8, 3));
    }

    #[test]
    fn a_test_that_injected_nothing_shows_nothing() {
        let mut report = RowReport::new("a");
        report.add(true, Numbers::of("fault: injected=0 violations=0", "a"));
        assert_eq!((report.state, incomplete(&[report.clone()])), ("not run", vec!["a"]));
        let text = serde_json::to_string(&report).unwrap();
        assert!(text.contains("\"recovery_s\":null"), "{text}");
    }
}
