//! One adopted container: what it had, what we gave it, and whether somebody else writes its limits too.
//!
//! **Approach.** After each write the engine's and the kernel's values are remembered. A value that later differs was
//! written by somebody else: the container is *contested* and left alone, first for [`BACK_OFF_FIRST`], then twice as
//! long each time. What others set through the engine becomes the original, because it is what they will want to have
//! when we let go.

use super::engine::Engine;
use super::limits::{Knob, Value, Values, values_of};
use super::usage::{Followed, Place, files_of};
use super::{Original, life_of};
use crate::{Counters, InForce, RuntimeError};
use bollard::models::ContainerInspectResponse;
use gainshare_core::model::JobId;
use std::time::{Duration, Instant};

/// How long a contested container is left alone, first and at most.
const BACK_OFF_FIRST: Duration = Duration::from_secs(2);
const BACK_OFF_LAST: Duration = Duration::from_secs(120);
/// How long a request that was not answered may still take effect.
const LATE: Duration = Duration::from_secs(120);

pub(super) struct Tracked {
    pub(super) job: JobId,
    pub(super) original: Original,
    pub(super) generation: u64,
    /// The container's hard memory limit, zero for none.
    pub(super) hard_memory_bytes: i64,
    /// What the engine has in force, as last read back.
    pub(super) found: Values,
    /// What we set and the engine silently dropped: not tried again.
    pub(super) refused: Values,
    /// What we asked for without getting an answer, and until when it may still come into force: an engine that hangs
    /// does it later.
    unanswered: Vec<(Knob, Value)>,
    unanswered_until: Instant,
    /// What the kernel has in force, as read after our last write.
    kernel: Vec<(String, String)>,
    name: String,
    /// Which life of the container this is.
    life: String,
    source: Source,
    contest: Option<Contest>,
}

/// Where a container's use and its limits are seen.
enum Source {
    Kernel(Place),
    /// The engine's containers are not processes of this machine.
    Engine(Followed),
}

struct Contest {
    what: String,
    wanted: String,
    found: String,
    until: Instant,
    back_off: Duration,
}

impl Tracked {
    /// `place` is where the kernel shows the container, if it does.
    pub(super) fn new(
        engine: &Engine,
        job: JobId,
        original: Original,
        container: &ContainerInspectResponse,
        place: Option<Place>,
    ) -> Tracked {
        let host = container.host_config.clone().unwrap_or_default();
        let source = match place {
            Some(place) => Source::Kernel(place),
            None => Source::Engine(Followed::start(engine, &original.id)),
        };
        let mut tracked = Tracked {
            job,
            name: container.name.as_deref().unwrap_or(&original.id).trim_start_matches('/').to_owned(),
            original,
            generation: 0,
            hard_memory_bytes: host.memory.unwrap_or(0),
            found: values_of(&host),
            refused: Values::new(),
            unanswered: Vec::new(),
            unanswered_until: Instant::now(),
            kernel: Vec::new(),
            life: life_of(container),
            source,
            contest: None,
        };
        tracked.kernel = tracked.kernel_settings();
        tracked
    }

    fn gone(&self) -> RuntimeError {
        RuntimeError::Gone { key: self.original.id.clone() }
    }

    /// Whether this life of the container goes on; `None` where only the engine can tell.
    pub(super) fn is_alive(&self) -> Option<bool> {
        match &self.source {
            Source::Kernel(place) => Some(place.is_alive()),
            Source::Engine(_) => None,
        }
    }

    /// Whether the engine's description is of a running container in the life we know.
    pub(super) fn is_described_alive(&self, container: &ContainerInspectResponse) -> bool {
        let is_running = container.state.as_ref().is_some_and(|state| state.running == Some(true));
        is_running && life_of(container) == self.life
    }

    pub(super) fn read(&mut self) -> Result<Counters, RuntimeError> {
        match &mut self.source {
            Source::Kernel(place) if !place.is_alive() => Err(self.gone()),
            Source::Kernel(place) => place.read(),
            Source::Engine(followed) => followed.read().ok_or_else(|| RuntimeError::Docker {
                what: format!("no statistics of container {} yet", self.name),
                remedy: "They come once a second while the engine answers",
            }),
        }
    }

    fn kernel_settings(&self) -> Vec<(String, String)> {
        match &self.source {
            Source::Kernel(place) => place.settings(),
            Source::Engine(_) => Vec::new(),
        }
    }

    pub(super) fn weight_and_shares(&self) -> Option<(f64, i64)> {
        weight_and_shares(&self.kernel, &self.found)
    }

    /// A file of the kernel that no longer holds what it held after our last write: its name, what it held and what it
    /// holds. Limits that are not ours to set may change as they like.
    pub(super) fn foreign_write(&mut self) -> Option<(String, String, String)> {
        let now = self.kernel_settings();
        let is_ours = |file: &str| self.original.values.keys().any(|&knob| files_of(knob).contains(&file));
        let mut changed = self.kernel.iter().zip(&now).filter(|(left, found)| left != found && is_ours(&left.0));
        let foreign = changed.next().map(|((file, left), (_, found))| (file.clone(), left.clone(), found.clone()));
        self.kernel = now;
        foreign
    }

    /// Finds out from the engine what it means that a file of the kernel does not hold what we left there.
    pub(super) fn explain(&mut self, foreign: (String, String, String), container: &ContainerInspectResponse) {
        let (file, left, found) = foreign;
        self.compare(values_of(&container.host_config.clone().unwrap_or_default()), &Values::new());
        let is_late =
            |(&knob, value): (&Knob, &Value)| files_of(knob).contains(&file.as_str()) && self.is_ours(knob, value);
        if self.found.iter().any(is_late) {
            return;
        }
        // If it was not done through the engine, the engine must be made to write again what it believes to be in
        // force.
        self.found.retain(|&knob, _| !files_of(knob).contains(&file.as_str()));
        self.contested(file, left, found);
    }

    /// Remembers a request that was not answered.
    pub(super) fn not_answered(&mut self, written: &Values) {
        self.unanswered.retain(|_| Instant::now() < self.unanswered_until);
        self.unanswered.extend(written.iter().map(|(&knob, value)| (knob, value.clone())));
        self.unanswered_until = Instant::now() + LATE;
    }

    /// Whether a value is one that we asked for without getting an answer.
    fn is_ours(&self, knob: Knob, value: &Value) -> bool {
        Instant::now() < self.unanswered_until && self.unanswered.iter().any(|(k, v)| *k == knob && v == value)
    }

    /// Takes in what the engine says after we set `written` (or nothing, where the kernel's files cannot be seen) and
    /// returns what is in force.
    pub(super) fn take_in(
        &mut self,
        written: &Values,
        container: &ContainerInspectResponse,
        mut notes: Vec<String>,
    ) -> Result<InForce, RuntimeError> {
        if !self.is_described_alive(container) {
            return Err(self.gone());
        }
        self.kernel = self.kernel_settings();
        let ignored = self.compare(values_of(&container.host_config.clone().unwrap_or_default()), written);
        self.still_contested()?;
        notes.extend(ignored.iter().map(|knob| format!("{knob} stays as it is: the engine ignores it on this kernel")));
        Ok(self.in_force(notes))
    }

    /// Compares what the engine has in force with what it had and what we just wrote. Returns what it ignored of that.
    fn compare(&mut self, now: Values, written: &Values) -> Vec<Knob> {
        let before = std::mem::replace(&mut self.found, now.clone());
        let mut ignored = Vec::new();
        for (knob, found) in now {
            let Some(had) = before.get(&knob).filter(|_| self.original.values.contains_key(&knob)) else { continue };
            match written.get(&knob) {
                Some(value) if *value == found => {}
                Some(value) if *had == found => {
                    self.refused.insert(knob, value.clone());
                    ignored.push(knob);
                }
                None if *had == found => {}
                _ if self.is_ours(knob, &found) => {}
                expected => {
                    self.contested(knob.to_string(), expected.unwrap_or(had).to_string(), found.to_string());
                    self.original.values.insert(knob, found);
                }
            }
        }
        ignored
    }

    fn contested(&mut self, what: String, wanted: String, found: String) {
        let now = Instant::now();
        let back_off = match &self.contest {
            // One foreign change is seen in the engine and in the kernel, and often in several values: that is one
            // contest.
            Some(last) if now < last.until => return,
            Some(last) if now < last.until + BACK_OFF_LAST => (last.back_off * 2).min(BACK_OFF_LAST),
            _ => BACK_OFF_FIRST,
        };
        tracing::warn!(container = self.name, what, wanted, found, "something else writes this limit too; backing off");
        self.contest = Some(Contest { what, wanted, found, until: now + back_off, back_off });
    }

    pub(super) fn still_contested(&self) -> Result<(), RuntimeError> {
        match &self.contest {
            Some(contest) if Instant::now() < contest.until => Err(RuntimeError::Contested {
                key: self.original.id.clone(),
                what: contest.what.clone(),
                wanted: contest.wanted.clone(),
                found: contest.found.clone(),
            }),
            _ => Ok(()),
        }
    }

    pub(super) fn in_force(&self, notes: Vec<String>) -> InForce {
        let settings = match &self.source {
            Source::Kernel(_) => self.kernel.clone(),
            Source::Engine(_) => self.found.iter().map(|(knob, value)| (knob.to_string(), value.to_string())).collect(),
        };
        InForce { settings, notes }
    }
}

/// The `cpu.weight` of the kernel and the `cpu-shares` it was made from, on cgroup v2.
pub(super) fn weight_and_shares(kernel: &[(String, String)], found: &Values) -> Option<(f64, i64)> {
    let (_, weight) = kernel.iter().find(|(name, _)| name == "cpu.weight")?;
    match found.get(&Knob::CpuShares)? {
        Value::Number(shares @ 2..) => Some((weight.parse().ok()?, *shares)),
        _ => None,
    }
}
