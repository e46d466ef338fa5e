//! From shares to resources, and what may be asked of a pod at all. Pure functions.
use serde::{Deserialize, Serialize};

/// Requests and limits of one container. Absent: the container has none.
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

/// Between which values each resource may move, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    pub cpu_milli: Range,
    pub memory_bytes: Range,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Range {
    pub min: u64,
    pub max: u64,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { cpu_milli: Range { min: 10, max: u64::MAX }, memory_bytes: Range { min: 0, max: u64::MAX } }
    }
}
