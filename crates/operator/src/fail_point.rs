//! *Fail points* end the process before or after an action (`GAINSHARE_FAIL_AT=after-delete`), so that a test can
//! kill the operator at every step of a move, and around every write about a pod's share.

/// The exit code of a process that ended at a fail point.
pub const FAIL_POINT_EXIT: i32 = 86;

/// Where to end the process, if anywhere: `before-` or `after-` and the name of an action, of a journal step, or of a
/// write about shares.
#[derive(Debug, Clone, Default)]
pub struct FailPoint(Option<String>);

impl FailPoint {
    pub fn at(name: Option<String>) -> FailPoint {
        FailPoint(name)
    }

    pub(crate) fn reach(&self, when: &str, action: &str) {
        if let Some(name) = &self.0
            && name.strip_prefix(when).and_then(|rest| rest.strip_prefix('-')) == Some(action)
        {
            tracing::error!(name, "fail point reached: the process ends");
            std::process::exit(FAIL_POINT_EXIT);
        }
    }
}
