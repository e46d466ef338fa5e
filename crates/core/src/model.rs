//! The nouns everything else speaks in: identities, time, resources, shares.
//!
//! Identities are numbers that a driver hands out once (a journal's row, a simulator's index);
//! names belong to the drivers, which keep them for people. Time is an integer count of
//! microseconds from an origin the driver chooses, so that a simulator and a daemon add and compare
//! it exactly alike. A [`Share`] is a fraction of one node, always finite and within 0…1.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::{Add, Sub};

/// One training job, for as long as its driver remembers it. Attempts of a job share its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub u64);

/// One machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

/// The owner of a set of jobs: a Unix user, a namespace. Progress moves shares only within one
/// owner's part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OwnerId(pub u32);

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "job-{}", self.0)
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "node-{}", self.0)
    }
}

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner-{}", self.0)
    }
}

/// A point in time: microseconds since the driver's origin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Time(pub u64);

/// A length of time in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Span(pub u64);

impl Time {
    pub const ZERO: Time = Time(0);

    pub fn from_secs_f64(s: f64) -> Time {
        Time(Span::from_secs_f64(s).0)
    }

    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// The time since `earlier`, or nothing if `earlier` is in fact later: clocks of different
    /// sources may disagree.
    pub fn since(self, earlier: Time) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Span {
    pub const ZERO: Span = Span(0);

    pub const fn from_secs(s: u64) -> Span {
        Span(s * 1_000_000)
    }

    pub const fn from_millis(ms: u64) -> Span {
        Span(ms * 1_000)
    }

    /// Rounds to the nearest microsecond; what is negative or not a number becomes zero, what is
    /// too large the largest span.
    pub fn from_secs_f64(s: f64) -> Span {
        Span((s * 1e6).round() as u64)
    }

    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

impl Add<Span> for Time {
    type Output = Time;
    fn add(self, span: Span) -> Time {
        Time(self.0.saturating_add(span.0))
    }
}

impl Sub<Span> for Time {
    type Output = Time;
    fn sub(self, span: Span) -> Time {
        Time(self.0.saturating_sub(span.0))
    }
}

/// The four resources of the papers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resource {
    Cpu,
    Memory,
    BlockIo,
    NetIo,
}

impl Resource {
    pub const ALL: [Resource; 4] = [Resource::Cpu, Resource::Memory, Resource::BlockIo, Resource::NetIo];
}

/// One value for each resource.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PerResource<T> {
    pub cpu: T,
    pub memory: T,
    pub block_io: T,
    pub net_io: T,
}

impl<T> PerResource<T> {
    /// Asks `f` once for each resource.
    pub fn from_fn(mut f: impl FnMut(Resource) -> T) -> Self {
        PerResource {
            cpu: f(Resource::Cpu),
            memory: f(Resource::Memory),
            block_io: f(Resource::BlockIo),
            net_io: f(Resource::NetIo),
        }
    }

    pub fn get(&self, r: Resource) -> &T {
        match r {
            Resource::Cpu => &self.cpu,
            Resource::Memory => &self.memory,
            Resource::BlockIo => &self.block_io,
            Resource::NetIo => &self.net_io,
        }
    }

    pub fn get_mut(&mut self, r: Resource) -> &mut T {
        match r {
            Resource::Cpu => &mut self.cpu,
            Resource::Memory => &mut self.memory,
            Resource::BlockIo => &mut self.block_io,
            Resource::NetIo => &mut self.net_io,
        }
    }
}

/// A fraction of one node's capacity of some resource: finite, 0…1.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Share(f64);

impl Share {
    pub const ZERO: Share = Share(0.0);
    pub const FULL: Share = Share(1.0);

    /// Clamps into 0…1. What is not a number becomes zero, so that no NaN ever leaves a decision.
    pub fn clamped(x: f64) -> Share {
        if x.is_nan() { Share::ZERO } else { Share(x.clamp(0.0, 1.0)) }
    }

    /// An equal part among `n` (the whole if `n` is 0).
    pub fn equal(n: usize) -> Share {
        Share(1.0 / n.max(1) as f64)
    }

    pub fn get(self) -> f64 {
        self.0
    }
}

impl From<Share> for f64 {
    fn from(s: Share) -> f64 {
        s.0
    }
}

impl TryFrom<f64> for Share {
    type Error = String;
    fn try_from(x: f64) -> Result<Share, String> {
        if (0.0..=1.0).contains(&x) { Ok(Share(x)) } else { Err(format!("a share lies between 0 and 1, not {x}")) }
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.1}%", self.0 * 100.0)
    }
}
