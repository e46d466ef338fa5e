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
    /// The sum of all lines `fault: injected=… violations=… recovery_s=…`; of the times, the largest. The
    /// harness prints the name of a test without an end of line, so the words may begin within a line.
    pub(super) fn of(printed: &str) -> Option<Numbers> {
        let mut sum: Option<Numbers> = None;
        for line in printed.lines().filter_map(|line| Some(line.split_once("fault: ")?.1)) {
            let value = |name: &str| {
                let mut words = line.split_whitespace().filter_map(|word| word.split_once('='));
                words.find(|(key, _)| *key == name).map(|(_, value)| value)
            };
            let count = |name: &str| value(name).and_then(|text| text.parse::<u64>().ok());
            let Some(injected) = count("injected") else { continue };
            let recovery_s = value("recovery_s").and_then(|text| text.parse::<f64>().ok());
            let before = sum.unwrap_or(Numbers { injected: 0, violations: 0, recovery_s: None });
            sum = Some(Numbers {
                injected: before.injected.saturating_add(injected),
                violations: before.violations.saturating_add(count("violations").unwrap_or(0)),
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
    #[serde(skip_serializing_if = "Option::is_none")]
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
        self.violations += numbers.violations + u64::from(!passed);
        self.recovery_s = longest(self.recovery_s, numbers.recovery_s);
        self.tests_passed += u32::from(passed);
        self.check();
    }

    pub(super) fn leave_out(&mut self, test: &str, reason: &str) {
        self.not_run.push(format!("{test}: {reason}"));
        self.check();
    }

    fn check(&mut self) {
        self.state = match (self.violations, self.tests_passed, self.not_run.is_empty()) {
            (1.., _, _) => "violated",
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

/// How many rows did not hold, and how many were not run or only in part.
pub(super) fn count(reports: &[RowReport]) -> (usize, usize) {
    let failed = reports.iter().filter(|report| report.state == "violated").count();
    (failed, reports.iter().filter(|report| ["not run", "partly run"].contains(&report.state)).count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_of_a_test_are_summed() {
        let printed = "test a ... fault: injected=3 violations=0 recovery_s=0.5\nnoise\n\
                       fault: injected=2 violations=1 recovery_s=0.2\nfault: nonsense\n";
        assert_eq!(Numbers::of(printed), Some(Numbers { injected: 5, violations: 1, recovery_s: Some(0.5) }));
        assert_eq!(Numbers::of("ok"), None);
    }

    #[test]
    fn what_was_not_run_is_never_held() {
        let mut report = RowReport::new("a");
        assert_eq!(report.state, "not run");
        report.leave_out("x", "needs Docker");
        assert_eq!(report.state, "not run");
        report.add(true, None);
        assert_eq!((report.state, report.injected), ("partly run", 1));
        report.add(false, Numbers::of("fault: injected=7 violations=0"));
        assert_eq!((report.state, report.injected, report.violations), ("violated", 8, 1));
        assert_eq!(count(&[report, RowReport::new("b")]), (1, 1));
    }
}
