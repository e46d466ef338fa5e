//! Fail points: places at which a test of another crate makes this process end.
//!
//! This crate reads no variables. A program that has fail points names a function with [`call_at_points`], and the
//! function is called with the name of each point that is reached. Without it a point costs one load.

use std::sync::OnceLock;

static FUNCTION: OnceLock<fn(&'static str)> = OnceLock::new();

/// From now on `function` is called at each point. Only the first call counts.
pub fn call_at_points(function: fn(&'static str)) {
    let _ = FUNCTION.set(function);
}

pub(crate) fn point(name: &'static str) {
    if let Some(function) = FUNCTION.get() {
        function(name);
    }
}
