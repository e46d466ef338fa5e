//! One adopted container: its original limits, the limits written to it, and whether another program writes them too.
//!
//! **Approach.** After each write the engine's and the kernel's values are kept. A value that later differs
//! is a foreign write: the container is *contested* and left alone, first for [`FIRST_PAUSE`], then twice as
//! long each time. A value that another program set through the engine becomes the original, because that
//! program expects it after the release.

use super::engine::Engine;
use super::limits::{EngineLimit, LimitValue, LimitValues, OriginalLimits, values_of};
use super::usage::{ContainerGroup, StatsFollower, files_of};
use crate::{AppliedLimits, Counters, RuntimeError};
use bollard::models::ContainerInspectResponse;
use gainshare_core::backoff::Backoff;
use gainshare_core::model::JobId;
use std::time::{Duration, Instant};

/// How long a contested container is left alone, first and at most.
const FIRST_PAUSE: Duration = Duration::from_secs(2);
const LONGEST_PAUSE: Duration = Duration::from_secs(120);
/// How long a request that was not answered may still take effect.
const LATE: Duration = Duration::from_secs(120);

pub(super) struct AdoptedContainer {
    pub(super) job: JobId,
    pub(super) original: OriginalLimits,
    pub(super) generation: u64,
    /// The container's hard memory limit, zero for none.
    pub(super) hard_memory_bytes: i64,
    /// What the engine has in force, as last read back.
    pub(super) found: LimitValues,
    /// Values that the engine silently dropped: not tried again.
    pub(super) refused: LimitValues,
    /// Values of requests without an answer, and until when they may still take effect: an engine that hangs
    /// does so later.
    unanswered: Vec<(EngineLimit, LimitValue)>,
    unanswered_until: Instant,
    /// What the kernel has in force, as read after our last write.
    kernel: Vec<(String, String)>,
    name: String,
    /// Which life of the container this is.
    life: String,
    source: Source,
    contest: Option<Contest>,
    contest_pauses: Backoff,
}

/// Where a container's use and its limits are read.
enum Source {
    Kernel(ContainerGroup),
    /// The engine's containers are not processes of this machine.
    Engine(StatsFollower),
}

/// A foreign write, and until when the container is left alone for it.
struct Contest {
    setting: String,
    wanted: String,
    found: String,
    until: Instant,
}

impl AdoptedContainer {
    /// `group` is the container's cgroup, if it can be read from here.
    pub(super) fn new(
        engine: &Engine,
        job: JobId,
        original: OriginalLimits,
        container: &ContainerInspectResponse,
        group: Option<ContainerGroup>,
    ) -> AdoptedContainer {
        let host = container.host_config.clone().unwrap_or_default();
        let source = match group {
            Some(group) => Source::Kernel(group),
            None => Source::Engine(StatsFollower::start(engine, &original.id)),
        };
        let mut adopted = AdoptedContainer {
            job,
            name: container.name.as_deref().unwrap_or(&original.id).trim_start_matches('/').to_owned(),
            original,
            generation: 0,
            hard_memory_bytes: host.memory.unwrap_or(0),
            found: values_of(&host),
            refused: LimitValues::new(),
            unanswered: Vec::new(),
            unanswered_until: Instant::now(),
            kernel: Vec::new(),
            life: life_of(container),
            source,
            contest: None,
            contest_pauses: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
        };
        adopted.kernel = adopted.kernel_settings();
        adopted
    }

    fn gone(&self) -> RuntimeError {
        RuntimeError::Gone { key: self.original.id.clone() }
    }

    /// Whether this life of the container goes on; `None` where only the engine knows.
    pub(super) fn is_alive(&self) -> Option<bool> {
        match &self.source {
            Source::Kernel(group) => Some(group.is_alive()),
            Source::Engine(_) => None,
        }
    }

    /// Whether the engine describes a running container in the adopted life.
    pub(super) fn is_described_alive(&self, container: &ContainerInspectResponse) -> bool {
        let is_running = container.state.as_ref().is_some_and(|state| state.running == Some(true));
        is_running && life_of(container) == self.life
    }

    pub(super) fn read(&mut self) -> Result<Counters, RuntimeError> {
        match &mut self.source {
            Source::Kernel(group) if !group.is_alive() => Err(self.gone()),
            Source::Kernel(group) => group.read(),
            Source::Engine(follower) => follower.read().ok_or_else(|| RuntimeError::Docker {
                what: format!("no statistics of container {} yet", self.name),
                remedy: "They come once a second while the engine answers",
            }),
        }
    }

    fn kernel_settings(&self) -> Vec<(String, String)> {
        match &self.source {
            Source::Kernel(group) => group.settings(),
            Source::Engine(_) => Vec::new(),
        }
    }

    pub(super) fn weight_and_shares(&self) -> Option<(f64, i64)> {
        weight_and_shares(&self.kernel, &self.found)
    }

    /// A file of the kernel that no longer holds what it held after our last write: its name, what it held
    /// and what it holds. Limits that are not ours to set may change as they like.
    pub(super) fn foreign_write(&mut self) -> Option<(String, String, String)> {
        let now = self.kernel_settings();
        let is_ours = |file: &str| self.original.values.keys().any(|&limit| files_of(limit).contains(&file));
        let mut changed = self.kernel.iter().zip(&now).filter(|(left, found)| left != found && is_ours(&left.0));
        let foreign = changed.next().map(|((file, left), (_, found))| (file.clone(), left.clone(), found.clone()));
        self.kernel = now;
        foreign
    }

    /// Decides, with the engine's values, whether a changed file of the kernel is a late effect of our own
    /// request or a foreign write.
    pub(super) fn classify(&mut self, foreign: (String, String, String), container: &ContainerInspectResponse) {
        let (file, left, found) = foreign;
        self.compare(values_of(&container.host_config.clone().unwrap_or_default()), &LimitValues::new());
        let is_late = |(&limit, value): (&EngineLimit, &LimitValue)| {
            files_of(limit).contains(&file.as_str()) && self.is_ours(limit, value)
        };
        if self.found.iter().any(is_late) {
            return;
        }
        // A foreign write around the engine: forget the engine's value, so that the next plan makes the
        // engine write it again.
        self.found.retain(|&limit, _| !files_of(limit).contains(&file.as_str()));
        self.begin_contest(file, left, found);
    }

    /// Keeps the values of a request that was not answered.
    pub(super) fn record_unanswered(&mut self, written: &LimitValues) {
        self.unanswered.retain(|_| Instant::now() < self.unanswered_until);
        self.unanswered.extend(written.iter().map(|(&limit, value)| (limit, value.clone())));
        self.unanswered_until = Instant::now() + LATE;
    }

    /// Whether a value belongs to a request that was not answered.
    fn is_ours(&self, limit: EngineLimit, value: &LimitValue) -> bool {
        Instant::now() < self.unanswered_until && self.unanswered.iter().any(|(k, v)| *k == limit && v == value)
    }

    /// Reads the engine's answer after `written` was set (nothing, where the kernel's files cannot be read)
    /// and returns the limits in force.
    pub(super) fn record_answer(
        &mut self,
        written: &LimitValues,
        container: &ContainerInspectResponse,
        mut notes: Vec<String>,
    ) -> Result<AppliedLimits, RuntimeError> {
        if !self.is_described_alive(container) {
            return Err(self.gone());
        }
        self.kernel = self.kernel_settings();
        let ignored = self.compare(values_of(&container.host_config.clone().unwrap_or_default()), written);
        self.check_contest()?;
        notes.extend(
            ignored.iter().map(|limit| format!("{limit} stays as it is: the engine ignores it on this kernel")),
        );
        Ok(self.applied(notes))
    }

    /// Compares the engine's values with the earlier ones and with `written`. Returns the written limits that
    /// the engine ignored.
    fn compare(&mut self, now: LimitValues, written: &LimitValues) -> Vec<EngineLimit> {
        let before = std::mem::replace(&mut self.found, now.clone());
        let mut ignored = Vec::new();
        for (limit, found) in now {
            let Some(had) = before.get(&limit).filter(|_| self.original.values.contains_key(&limit)) else { continue };
            match written.get(&limit) {
                Some(value) if *value == found => {}
                Some(value) if *had == found => {
                    self.refused.insert(limit, value.clone());
                    ignored.push(limit);
                }
                None if *had == found => {}
                _ if self.is_ours(limit, &found) => {}
                expected => {
                    self.begin_contest(limit.to_string(), expected.unwrap_or(had).to_string(), found.to_string());
                    self.original.values.insert(limit, found);
                }
            }
        }
        ignored
    }

    fn begin_contest(&mut self, setting: String, wanted: String, found: String) {
        let now = Instant::now();
        match &self.contest {
            // One foreign change shows in the engine and in the kernel, and often in several values: that is
            // one contest.
            Some(last) if now < last.until => return,
            Some(last) if now < last.until + LONGEST_PAUSE => {}
            _ => self.contest_pauses.reset(),
        }
        tracing::warn!(
            container = self.name,
            setting,
            wanted,
            found,
            "another program writes this limit too; backing off"
        );
        self.contest = Some(Contest { setting, wanted, found, until: now + self.contest_pauses.next_pause() });
    }

    /// An error while the container is left alone after a foreign write.
    pub(super) fn check_contest(&self) -> Result<(), RuntimeError> {
        match &self.contest {
            Some(contest) if Instant::now() < contest.until => Err(RuntimeError::ForeignWrite {
                key: self.original.id.clone(),
                setting: contest.setting.clone(),
                wanted: contest.wanted.clone(),
                found: contest.found.clone(),
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn applied(&self, notes: Vec<String>) -> AppliedLimits {
        let settings = match &self.source {
            Source::Kernel(_) => self.kernel.clone(),
            Source::Engine(_) => {
                self.found.iter().map(|(limit, value)| (limit.to_string(), value.to_string())).collect()
            }
        };
        AppliedLimits { settings, notes, team: None }
    }
}

/// The `cpu.weight` of the kernel and the `cpu-shares` it was made from, on cgroup v2.
pub(super) fn weight_and_shares(kernel: &[(String, String)], found: &LimitValues) -> Option<(f64, i64)> {
    let (_, weight) = kernel.iter().find(|(name, _)| name == "cpu.weight")?;
    match found.get(&EngineLimit::CpuShares)? {
        LimitValue::Number(shares @ 2..) => Some((weight.parse().ok()?, *shares)),
        _ => None,
    }
}

/// The time of its start tells one life of a container from the next.
fn life_of(container: &ContainerInspectResponse) -> String {
    container.state.as_ref().and_then(|state| state.started_at.clone()).unwrap_or_default()
}
