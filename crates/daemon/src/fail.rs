//! Fail points: places where a test makes the daemon die as if by `kill -9`.
//!
//! `GAINSHARE_FAIL=POINT` aborts the process when it reaches that point for the first time, `POINT:N` at the Nth. Without the variable a
//! point costs one load. They are always compiled in, so that what is tested is what is shipped.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Every point there is; tests go through all of them.
pub const POINTS: &[&str] = &[
    "submit-before-journal",
    "submit-before-reply",
    "admit-before-journal",
    "admit-before-spawn",
    "admit-after-spawn",
    "started-before-journal",
    "started-before-reply",
    "plan-before-journal",
    "plan-before-apply",
    "plan-after-apply",
    "samples-before-journal",
    "samples-after-journal",
    "ended-before-journal",
    "ended-before-release",
    "ended-after-release",
];

struct Armed {
    point: String,
    left: AtomicU64,
}

static ARMED: OnceLock<Option<Armed>> = OnceLock::new();

/// Dies here, if a test wants it.
pub(crate) fn point(name: &'static str) {
    debug_assert!(POINTS.contains(&name), "{name} is missing in POINTS");
    let armed = ARMED.get_or_init(|| {
        let wanted = std::env::var("GAINSHARE_FAIL").ok()?;
        let (point, count) = wanted.split_once(':').unwrap_or((&wanted, "1"));
        Some(Armed { point: point.to_owned(), left: AtomicU64::new(count.parse().unwrap_or(1)) })
    });
    if let Some(armed) = armed
        && armed.point == name
        && armed.left.fetch_sub(1, Ordering::Relaxed) == 1
    {
        // No unwinding, no destructors, no flushing: as close to `kill -9` as a process can come by itself.
        nix::sys::signal::kill(nix::unistd::Pid::this(), nix::sys::signal::Signal::SIGKILL).ok();
        std::process::abort();
    }
}
