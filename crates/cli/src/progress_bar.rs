//! A bar on standard error that shows how many of many equal steps are done, and estimates the time left.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Width of the bar itself, in columns.
const WIDTH: usize = 40;
/// Drawing more often costs time and shows nothing new.
const DRAW_EVERY: Duration = Duration::from_millis(100);

pub struct ProgressBar {
    /// What the steps are called.
    unit: &'static str,
    shown: bool,
    began: Instant,
    /// When it was last drawn. Runs report from several threads.
    drawn: Mutex<Option<Instant>>,
}

impl ProgressBar {
    /// A bar that draws only if `shown`.
    pub fn new(unit: &'static str, shown: bool) -> ProgressBar {
        ProgressBar { unit, shown, began: Instant::now(), drawn: Mutex::new(None) }
    }

    /// `done` of `total` steps are done.
    pub fn set(&self, done: usize, total: usize) {
        let mut drawn = self.drawn.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.shown || drawn.is_some_and(|at| at.elapsed() < DRAW_EVERY) {
            return;
        }
        *drawn = Some(Instant::now());
        // A terminal that is gone needs no bar.
        let _ = write!(std::io::stderr(), "\r\x1b[2K{}", line(done, total, self.unit, self.began.elapsed()));
    }

    /// Removes the bar from the terminal.
    pub fn clear(&self) {
        if self.drawn.lock().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            let _ = write!(std::io::stderr(), "\r\x1b[2K");
        }
    }
}

fn line(done: usize, total: usize, unit: &str, elapsed: Duration) -> String {
    let full = (WIDTH * done).checked_div(total).unwrap_or(0).min(WIDTH);
    let bar = format!("{}{}", "█".repeat(full), "░".repeat(WIDTH - full));
    let left = match done {
        0 => String::new(),
        done => {
            let left_s = elapsed.as_secs_f64() / done as f64 * total.saturating_sub(done) as f64;
            format!("  {left_s:.0} s left")
        }
    };
    format!("{bar} {done}/{total} {unit}{left}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_shows_the_part_that_is_done_and_the_time_left() {
        let half = line(10, 20, "runs", Duration::from_secs(5));
        assert!(half.ends_with(" 10/20 runs  5 s left"), "{half}");
        assert_eq!(half.chars().filter(|c| *c == '█').count(), WIDTH / 2);
        assert!(line(0, 20, "runs", Duration::ZERO).ends_with(" 0/20 runs"));
        assert!(line(0, 0, "runs", Duration::ZERO).contains("0/0"), "nothing to do is no division by zero");
    }
}
