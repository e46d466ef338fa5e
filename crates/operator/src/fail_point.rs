//! *Fail points* end the process before or after an action (`GAINSHARE_FAIL_AT=after-delete`), so that a test can
//! kill the operator at every step of a move, and around every write about a pod's share. With `stop-` before the name
//! (`GAINSHARE_FAIL_AT=stop-before-stopped`) the process stands still there once, until a test continues it.

use nix::sys::signal::{Signal, raise};
use std::sync::atomic::{AtomicBool, Ordering};

/// The exit code of a process that ended at a fail point.
pub const FAIL_POINT_EXIT: i32 = 86;

/// A process stands still at a fail point at most once.
static HAS_STOPPED: AtomicBool = AtomicBool::new(false);

/// Where to end the process, if anywhere: `before-` or `after-` and the name of an action, of a journal step, or of a
/// write about shares.
#[derive(Debug, Clone, Default)]
pub struct FailPoint(Option<String>);

impl FailPoint {
    pub fn at(name: Option<String>) -> FailPoint {
        FailPoint(name)
    }

    pub(crate) fn reach(&self, when: &str, action: &str) {
        let Some(name) = self.0.as_deref() else { return };
        let stop = name.strip_prefix("stop-");
        let point = stop.unwrap_or(name);
        if point.strip_prefix(when).and_then(|rest| rest.strip_prefix('-')) != Some(action) {
            return;
        }
        if stop.is_none() {
            tracing::error!(name, "fail point reached: the process ends");
            std::process::exit(FAIL_POINT_EXIT);
        }
        if !HAS_STOPPED.swap(true, Ordering::Relaxed) {
            tracing::error!(name, "fail point reached: the process stands still");
            if let Err(error) = raise(Signal::SIGSTOP) {
                tracing::error!(%error, "the process cannot stand still");
            }
        }
    }
}
