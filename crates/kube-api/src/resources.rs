//! Requests, limits and their bounds, as numbers.
//!
//! **Units.** CPU in thousandths of a core, memory in bytes. An absent amount means that the
//! container has no such request or limit; in a change it means that the value stays.

use serde::{Deserialize, Serialize};

/// The least CPU request we set. The kernel turns it into almost its least weight, and it is enough
/// for a heartbeat.
pub const LEAST_CPU_MILLI: u64 = 10;

/// Requests and limits of one container. Absent: the container has none (or, in a change: it
/// stays).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Resources {
    #[serde(default)]
    pub requests: Amounts,
    #[serde(default)]
    pub limits: Amounts,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Amounts {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_milli: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

impl Amounts {
    fn over(self, base: Amounts) -> Amounts {
        Amounts { cpu_milli: self.cpu_milli.or(base.cpu_milli), memory_bytes: self.memory_bytes.or(base.memory_bytes) }
    }
}

impl Resources {
    /// The values of `self` where they are given, those of `base` elsewhere.
    pub fn over(self, base: Resources) -> Resources {
        Resources { requests: self.requests.over(base.requests), limits: self.limits.over(base.limits) }
    }

    /// Whether this container alone would make its pod Guaranteed.
    pub fn is_guaranteed(&self) -> bool {
        let same = |a: Option<u64>, b: Option<u64>| a.is_some_and(|a| a > 0) && a == b;
        same(self.requests.cpu_milli, self.limits.cpu_milli)
            && same(self.requests.memory_bytes, self.limits.memory_bytes)
    }
}

/// Between which values each resource may move, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    pub cpu_milli: Range,
    pub memory_bytes: Range,
    /// The largest `limit / request` a LimitRange allows for CPU, in thousandths; absent: any.
    #[serde(default)]
    pub cpu_ratio_milli: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    pub min: u64,
    pub max: u64,
}

impl Range {
    pub(crate) fn clamp(self, value: u64) -> u64 {
        value.min(self.max).max(self.min)
    }

    pub(crate) fn contains(self, value: u64) -> bool {
        (self.min..=self.max).contains(&value)
    }
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds {
            cpu_milli: Range { min: LEAST_CPU_MILLI, max: u64::MAX },
            memory_bytes: Range { min: 0, max: u64::MAX },
            cpu_ratio_milli: None,
        }
    }
}
