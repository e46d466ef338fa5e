//! Fail points: places where a test makes a process die as if by `kill -9`, or makes the disk slow.
//!
//! `GAINSHARE_FAIL=POINT` aborts the process when it reaches that point for the first time,
//! `POINT:N` at the Nth. A supervisor inherits the daemon's variables, so its points work the same
//! way. `GAINSHARE_SLOW_COMMIT_MS=N` makes every commit of the journal N milliseconds slower, as a
//! slow disk does. `GAINSHARE_END_PART=PART` makes a part of the daemon end as if by a fault in it,
//! `GAINSHARE_PANIC_ON=TEXT` makes the collector panic that reads this text, and `GAINSHARE_MAX_TASKS=N` limits each
//! job to N tasks, so that a fork bomb of a test is small. Without the variables a point costs one load.
//!
//! Release builds do not read the variables, unless the feature `fail-points` is on. Tests switch it
//! on by their dev-dependencies.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The daemon's points on the path of a process job; tests go through all of them.
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

/// The daemon's points within the writing of one limit. The crate of limits calls them.
pub const LIMIT_POINTS: &[&str] = &["limit-before-write", "limit-after-write"];

/// The guard's points while it puts limits back.
pub const GUARD_POINTS: &[&str] = &["guard-before-restore", "guard-after-one-restore", "guard-before-restored"];

/// The daemon's points on the path of a container.
pub const DOCKER_POINTS: &[&str] = &["container-before-journal", "container-after-journal"];

/// The supervisor's points around the fork.
pub const SUPERVISOR_POINTS: &[&str] = &["supervise-before-fork", "supervise-before-started"];

/// Whether this build reads the variables.
const ENABLED: bool = cfg!(any(debug_assertions, feature = "fail-points"));

struct ArmedPoint {
    point: String,
    left: AtomicU64,
}

static ARMED: OnceLock<Option<ArmedPoint>> = OnceLock::new();
static SLOW_COMMIT: OnceLock<Option<Duration>> = OnceLock::new();
static PANIC_ON: OnceLock<Option<String>> = OnceLock::new();

/// Dies here, if a test asks for it.
pub fn point(name: &'static str) {
    debug_assert!(
        [POINTS, LIMIT_POINTS, GUARD_POINTS, DOCKER_POINTS, SUPERVISOR_POINTS].iter().any(|list| list.contains(&name)),
        "{name} is in no list of points"
    );
    if !ENABLED {
        return;
    }
    let armed = ARMED.get_or_init(|| {
        let wanted = std::env::var("GAINSHARE_FAIL").ok()?;
        let (point, count) = wanted.split_once(':').unwrap_or((&wanted, "1"));
        Some(ArmedPoint { point: point.to_owned(), left: AtomicU64::new(count.parse().unwrap_or(1)) })
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

/// Makes the points within the writing of a limit work in this process.
pub(crate) fn watch_limits() {
    if ENABLED {
        gainshare_limits::fail::call_at_points(point);
    }
}

/// Whether a test asks for the unexpected end of this part of the daemon.
pub(crate) fn ends_part(part: &str) -> bool {
    ENABLED && std::env::var("GAINSHARE_END_PART").is_ok_and(|wanted| wanted == part)
}

/// The largest number of tasks of one job, if a test asks for a small one.
pub(crate) fn max_tasks() -> Option<u32> {
    let wanted = std::env::var("GAINSHARE_MAX_TASKS").ok().filter(|_| ENABLED);
    wanted.and_then(|text| text.parse().ok())
}

/// Panics inside a collector, if a test asks for it and the job's output contains the test's text.
pub(crate) fn panic_on(output: &[u8]) {
    if !ENABLED {
        return;
    }
    let wanted = PANIC_ON.get_or_init(|| std::env::var("GAINSHARE_PANIC_ON").ok().filter(|text| !text.is_empty()));
    if let Some(text) = wanted {
        assert!(!output.windows(text.len()).any(|window| window == text.as_bytes()), "the panic that a test asked for");
    }
}

/// Sleeps as long as a slow disk would, if a test asks for it.
pub(crate) fn slow_commit() {
    if !ENABLED {
        return;
    }
    let pause = SLOW_COMMIT.get_or_init(|| {
        let ms = std::env::var("GAINSHARE_SLOW_COMMIT_MS").ok()?.parse().ok()?;
        Some(Duration::from_millis(ms))
    });
    if let Some(pause) = pause {
        std::thread::sleep(*pause);
    }
}
