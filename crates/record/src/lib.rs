//! Recorded decisions, and policies with their memories, as JSON.
//!
//! **Problem.** A recorded decision contains nearly every type of the core. The code that reads and writes its JSON is
//! generic, so each crate that asks for it compiles it again, and it is larger than most of these crates.
//!
//! **How.** The functions here are not generic. They are compiled once, at the level of small programs: nothing waits
//! for them.

use gainshare_core::decider::Decider;
use gainshare_core::replay::RecordedDecision;
use serde_json::Result;

/// A recorded decision as JSON, for `gainshare replay`.
#[inline(never)]
pub fn to_json(record: &RecordedDecision) -> Result<String> {
    serde_json::to_string(record)
}

/// Reads what [`to_json`] wrote.
#[inline(never)]
pub fn from_json(json: &str) -> Result<RecordedDecision> {
    serde_json::from_str(json)
}

/// A policy with its memory as JSON, for a journal.
#[inline(never)]
pub fn decider_to_json(decider: &Decider) -> Result<String> {
    serde_json::to_string(decider)
}

/// Reads what [`decider_to_json`] wrote.
#[inline(never)]
pub fn decider_from_json(json: &str) -> Result<Decider> {
    serde_json::from_str(json)
}
