//! The Docker runtime: containers that opted in, and containers we start, share the machine by our targets.
//!
//! **Problem.** Training containers of a Docker host should get what their progress earns while they run, with nothing but the engine's
//! own interface, and must be left exactly as they were when we let go.
//!
//! **Approach.** [`Engine`] is the connection: it reports which containers come and go ([`Engine::events`]), follows their output
//! ([`Engine::follow_logs`]), starts, stops and removes containers of our own and makes images without a registry. [`DockerRuntime`] carries out plans:
//! [`DockerRuntime::adopt`] remembers a container's limits (the [`Original`], for the caller's journal) and from then on targets are applied through the
//! engine's live update. What was changed is read back from the engine. Before the next change the kernel's own files are compared with how we left them; a
//! difference means that somebody else writes too: the job is reported as contested and left alone for a while, longer each time.
//!
//! **Terms.** A handle's key is the container's full id. A *life* is one start of a container: a restarted one has the same id and
//! counts as another job, which must be adopted again.
//!
//! **Properties.** Only adopted containers are ever written to. A value in force is not written again, and an older plan is refused. The hard memory
//! limit is never touched. Restoring is possible from the [`Original`] alone, by another process and also for a container that has stopped,
//! whose limits the engine would otherwise apply at its next start. An engine that restarts is simply asked again.

mod containers;
mod engine;
mod events;
mod image;
pub mod labels;
mod limits;
mod logs;
mod usage;

pub use containers::{Bind, ContainerSpec, Network};
pub use engine::{Engine, default_socket};
pub use events::{Adopt, ContainerInfo, DockerEvent};
pub use image::LOCAL_IMAGE;
pub use limits::{Knob, Value, Values};
pub use logs::{LogChunk, LogCursor};

use crate::{Capacity, Counters, Handle, InForce, Mode, Runtime, RuntimeError, RuntimeKind};
use bollard::models::ContainerInspectResponse;
use bollard::query_parameters::StatsOptions;
use futures_util::StreamExt;
use gainshare_core::model::{JobId, PerResource, Resource};
use gainshare_core::plan::Target;
use limits::{Machine, WeightScale, Wish, difference, managed, update_body, values_of};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};
use usage::Place;

/// A container's limits as they were before the first change: all that is needed to put them back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    pub id: String,
    /// Those the mode may change, as the engine reports them, where zero is "never set".
    pub values: Values,
}

/// How many containers are updated at the same time. The engine spends most of an update waiting for its container runtime.
const AT_ONCE: usize = 8;
/// How long a contested container is left alone, first and at most.
const BACK_OFF_FIRST: Duration = Duration::from_secs(2);
const BACK_OFF_LAST: Duration = Duration::from_secs(120);

/// Carries out targets on containers. See the module documentation.
pub struct DockerRuntime {
    engine: Engine,
    mode: Mode,
    machine: Machine,
    tracked: BTreeMap<String, Tracked>,
}

struct Tracked {
    job: JobId,
    name: String,
    original: Original,
    started_at: String,
    /// `None` where the engine's containers are not processes of this machine.
    place: Option<Place>,
    hard_memory_bytes: i64,
    generation: u64,
    /// What the engine has in force, as last read back.
    found: Values,
    /// What the kernel has in force, as read after our last write.
    kernel: Vec<(String, String)>,
    /// What we set and the engine silently dropped: not tried again.
    refused: Values,
    contest: Option<Contest>,
}

struct Contest {
    what: String,
    wanted: String,
    found: String,
    until: Instant,
    back_off: Duration,
}

impl DockerRuntime {
    /// Connects to the engine behind `socket`.
    pub fn connect(socket: &Path, mode: Mode) -> Result<DockerRuntime, RuntimeError> {
        DockerRuntime::new(Engine::connect(socket)?, mode)
    }

    pub fn new(engine: Engine, mode: Mode) -> Result<DockerRuntime, RuntimeError> {
        let info = engine.wait(engine.info())?;
        let online = fs::read_to_string("/sys/devices/system/cpu/online").map(|list| list.trim().to_owned());
        let machine = Machine {
            cores: info.cores,
            memory_bytes: info.memory_bytes,
            cgroup_v2: info.cgroup_v2,
            weights: if info.cgroup_v2 { WeightScale::Linear } else { WeightScale::Shares },
            all_cpus: online.unwrap_or_else(|_| format!("0-{}", info.cores - 1)),
            block_weight: None,
        };
        Ok(DockerRuntime { engine, mode, machine, tracked: BTreeMap::new() })
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Takes charge of a running container and returns its limits before us, which the caller should store before the first plan is applied. After
    /// a restart of the caller, `known` is what was stored then.
    pub fn adopt(&mut self, job: JobId, id: &str, known: Option<Original>) -> Result<(Handle, Original), RuntimeError> {
        let container = self.engine.wait(self.engine.inspect(id))?;
        let id = container.id.clone().unwrap_or_else(|| id.to_owned());
        let state = container.state.clone().unwrap_or_default();
        if state.running != Some(true) {
            return Err(RuntimeError::Gone { key: id });
        }
        let host = container.host_config.clone().unwrap_or_default();
        let found = values_of(&host);
        // What an earlier life was given by us and not yet relieved of is still there; its original is this one's too. A known original may also be from
        // another mode: then what that mode changed is put back by the first plan.
        let earlier = known.filter(|known| known.id == id);
        let earlier = earlier.or_else(|| self.tracked.get(&id).map(|tracked| tracked.original.clone()));
        let mut original = Original { id: id.clone(), values: managed(self.mode, &found) };
        original.values.extend(earlier.into_iter().flat_map(|earlier| earlier.values));
        let place = state.pid.and_then(|pid| Place::find(pid, &id, host.network_mode.as_deref() == Some("host")));
        if let Some(place) = &place {
            self.machine.block_weight = place.default_block_weight();
        }
        let tracked = Tracked {
            job,
            name: container.name.as_deref().unwrap_or(&id).trim_start_matches('/').to_owned(),
            original: original.clone(),
            started_at: state.started_at.unwrap_or_default(),
            kernel: place.as_ref().map(Place::settings).unwrap_or_default(),
            place,
            hard_memory_bytes: host.memory.unwrap_or(0),
            generation: 0,
            found,
            refused: Values::new(),
            contest: None,
        };
        self.tracked.insert(id.clone(), tracked);
        Ok((Handle { job, key: id }, original))
    }

    /// Puts back what an adopted container had before us, without having adopted it: for whoever cleans up after a daemon. Harmless if the
    /// container is gone.
    pub fn restore(&mut self, original: &Original) -> Result<(), RuntimeError> {
        let container = match self.engine.wait(self.engine.inspect(&original.id)) {
            Ok(container) => container,
            Err(RuntimeError::Gone { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let found = values_of(&container.host_config.unwrap_or_default());
        if self.machine.cgroup_v2 {
            let place = container.state.and_then(|s| Place::find(s.pid?, &original.id, false));
            self.learn_scale(place.as_ref(), &found);
        }
        let change = difference(&self.machine.effective(&original.values), &self.machine.effective(&found));
        match self.engine.wait(update(&self.engine, &original.id, &change)) {
            Err(RuntimeError::Gone { .. }) => Ok(()),
            result => result,
        }
    }

    /// On cgroup v2 the kernel's weight tells by which rule the engine translated the shares.
    fn learn_scale(&mut self, place: Option<&Place>, found: &Values) {
        let Some(Value::Number(shares @ 2..)) = found.get(&Knob::CpuShares) else { return };
        let kernel = place.map(Place::settings).unwrap_or_default();
        let weight = kernel.iter().find(|(name, _)| name == "cpu.weight").and_then(|(_, text)| text.parse().ok());
        if let Some(weight) = weight {
            self.machine.weights = WeightScale::seen(*shares, weight);
        }
    }

    /// The tracked container of a handle, if the handle means its present life.
    fn tracked(&self, job: &Handle) -> Result<&Tracked, RuntimeError> {
        match self.tracked.get(&job.key) {
            Some(tracked) if tracked.job == job.job => Ok(tracked),
            Some(_) => Err(RuntimeError::Gone { key: job.key.clone() }),
            None => Err(RuntimeError::Unsupported(format!("container {} was not adopted: adopt it first", job.key))),
        }
    }

    /// What each container should have, beside notes on what cannot be had.
    fn wanted(&self, wanted: &[(Handle, Target)]) -> Vec<Result<(Values, Vec<String>), RuntimeError>> {
        let mean = PerResource::from_fn(|resource| {
            wanted.iter().map(|(_, target)| target.share.get(resource).get()).sum::<f64>() / wanted.len() as f64
        });
        let relative = |target: &Target, resource: Resource| {
            let mean = *mean.get(resource);
            if mean > 0.0 { target.share.get(resource).get() / mean } else { 1.0 }
        };
        let one = |(job, target): &(Handle, Target)| {
            let tracked = self.tracked(job)?;
            let working_set_bytes = match &tracked.place {
                Some(place) => place.read().map_or(0, |counters| counters.memory_bytes),
                None => 0,
            };
            let wish = Wish {
                target,
                relative_cpu: relative(target, Resource::Cpu),
                relative_block: relative(target, Resource::BlockIo),
                cpus: None,
                working_set_bytes,
                hard_memory_bytes: tracked.hard_memory_bytes,
                original: &tracked.original.values,
            };
            Ok(self.machine.wanted(self.mode, &wish))
        };
        wanted.iter().map(one).collect()
    }

    /// Decides what to write to one container: nothing, or the difference, or the reason why it is not to be touched.
    fn prepare(&mut self, generation: u64, job: &Handle, wanted: &Values) -> Result<Values, RuntimeError> {
        let known = self.tracked(job)?.generation;
        if generation < known {
            return Err(RuntimeError::OldGeneration { key: job.key.clone(), given: generation, known });
        }
        let tracked = self.tracked.get_mut(&job.key).expect("looked up above");
        if tracked.place.as_ref().is_some_and(|place| !place.is_alive()) {
            return Err(RuntimeError::Gone { key: job.key.clone() });
        }
        if let Some((file, left, found)) = tracked.foreign_write() {
            let container = self.engine.wait(self.engine.inspect(&job.key))?;
            tracked.take_in(values_of(&container.host_config.unwrap_or_default()), &Values::new());
            // If it was not done through the engine, the engine must be made to write again what it believes to be in force.
            tracked.found.retain(|knob, _| !usage::files_of(*knob).contains(&file.as_str()));
            tracked.contested(file, left, found);
        }
        tracked.still_contested(&job.key)?;
        tracked.generation = generation;
        let mut change = difference(wanted, &self.machine.effective(&tracked.found));
        change.retain(|knob, value| tracked.refused.get(knob) != Some(value));
        Ok(change)
    }

    /// Takes in what the engine says after a write (or instead of one, where the kernel's files cannot be read).
    fn conclude(
        &mut self,
        job: &Handle,
        change: &Values,
        container: ContainerInspectResponse,
        mut notes: Vec<String>,
    ) -> Result<InForce, RuntimeError> {
        let tracked = self.tracked.get_mut(&job.key).expect("prepared before");
        let state = container.state.unwrap_or_default();
        if state.running != Some(true) || state.started_at.as_deref() != Some(tracked.started_at.as_str()) {
            return Err(RuntimeError::Gone { key: job.key.clone() });
        }
        tracked.kernel = tracked.place.as_ref().map(Place::settings).unwrap_or_default();
        let now = values_of(&container.host_config.unwrap_or_default());
        let ignored = tracked.take_in(now, change);
        tracked.still_contested(&job.key)?;
        notes.extend(ignored.iter().map(|knob| format!("{knob} stays as it is: the engine ignores it on this kernel")));
        Ok(tracked.in_force(notes))
    }
}

impl Runtime for DockerRuntime {
    fn kind(&self) -> RuntimeKind {
        RuntimeKind::Docker
    }

    fn capacity(&self) -> Capacity {
        Capacity { cores: f64::from(self.machine.cores), memory_bytes: self.machine.memory_bytes }
    }

    fn apply(&mut self, generation: u64, wanted: &[(Handle, Target)]) -> Vec<Result<InForce, RuntimeError>> {
        let mut results = self.apply_once(generation, wanted);
        // The first weight ever written on cgroup v2 shows the engine's scale; if it is not the assumed one, the weights are set anew.
        let assumed = self.machine.weights;
        if let Some(tracked) =
            wanted.iter().find_map(|(job, _)| self.tracked.get(&job.key)).filter(|_| self.machine.cgroup_v2)
        {
            let (place, found) = (tracked.place.clone(), tracked.found.clone());
            self.learn_scale(place.as_ref(), &found);
        }
        if self.machine.weights != assumed {
            results = self.apply_once(generation, wanted);
        }
        results
    }

    fn read(&mut self, job: &Handle) -> Result<Counters, RuntimeError> {
        let gone = || RuntimeError::Gone { key: job.key.clone() };
        match &self.tracked(job)?.place {
            Some(place) => place.read().map_err(|source| match place.is_alive() {
                true => RuntimeError::Io { action: "read the cgroup of", path: job.key.clone(), source, hint: "" },
                false => gone(),
            }),
            None => {
                let options = StatsOptions { stream: false, one_shot: true };
                let docker = self.engine.docker.clone();
                let stats =
                    self.engine.wait(async { std::pin::pin!(docker.stats(&job.key, Some(options))).next().await });
                match stats {
                    Some(Ok(stats)) => Ok(usage::from_stats(&stats)),
                    Some(Err(error)) if !engine::is_missing(&error) => {
                        Err(engine::failed(&self.engine.socket, "read statistics", error))
                    }
                    _ => Err(gone()),
                }
            }
        }
    }

    fn is_alive(&mut self, job: &Handle) -> Result<bool, RuntimeError> {
        let tracked = match self.tracked(job) {
            Ok(tracked) => tracked,
            Err(RuntimeError::Gone { .. }) => return Ok(false),
            Err(error) => return Err(error),
        };
        if let Some(place) = &tracked.place {
            return Ok(place.is_alive());
        }
        match self.engine.wait(self.engine.inspect(&job.key)) {
            Ok(container) => {
                let state = container.state.unwrap_or_default();
                Ok(state.running == Some(true) && state.started_at.as_deref() == Some(tracked.started_at.as_str()))
            }
            Err(RuntimeError::Gone { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn release(&mut self, job: &Handle) -> Result<(), RuntimeError> {
        let original = match self.tracked(job) {
            Ok(tracked) => tracked.original.clone(),
            // Not ours, or a later life of the container, which keeps what it has.
            Err(_) => return Ok(()),
        };
        self.restore(&original)?;
        self.tracked.remove(&job.key);
        Ok(())
    }
}

impl DockerRuntime {
    fn apply_once(&mut self, generation: u64, wanted: &[(Handle, Target)]) -> Vec<Result<InForce, RuntimeError>> {
        let prepared: Vec<_> = self
            .wanted(wanted)
            .into_iter()
            .zip(wanted)
            .map(|(values, (job, _))| {
                let (values, notes) = values?;
                Ok((self.prepare(generation, job, &values)?, notes))
            })
            .collect();
        let engine = self.engine.clone();
        // One unanswered request is enough to know that the others would wait in vain.
        let hung = Cell::new(false);
        let write = async |job: &Handle, change: &Values, must_ask: bool| {
            if change.is_empty() && !must_ask {
                return Ok(None);
            }
            if hung.get() {
                return Err(engine::hung(&engine.socket));
            }
            let asked = Instant::now();
            let answer = async {
                update(&engine, &job.key, change).await?;
                engine.inspect(&job.key).await
            };
            let answer = answer.await;
            hung.set(hung.get() || asked.elapsed() >= engine::REQUEST_TIMEOUT);
            answer.map(Some)
        };
        let write = &write;
        let answers: Vec<Option<Result<Option<ContainerInspectResponse>, RuntimeError>>> = engine.wait(async {
            let calls = prepared.iter().zip(wanted).map(|(prepared, (job, _))| {
                let must_ask = self.tracked.get(&job.key).is_some_and(|tracked| tracked.place.is_none());
                async move {
                    match prepared {
                        Ok((change, _)) => Some(write(job, change, must_ask).await),
                        Err(_) => None,
                    }
                }
            });
            futures_util::stream::iter(calls).buffered(AT_ONCE).collect().await
        });
        let outcomes = prepared.into_iter().zip(answers).zip(wanted);
        outcomes
            .map(|((prepared, answer), (job, _))| {
                let (change, notes) = prepared?;
                match answer.transpose()?.flatten() {
                    Some(container) => self.conclude(job, &change, container, notes),
                    None => Ok(self.tracked[&job.key].in_force(notes)),
                }
            })
            .collect()
    }
}

impl Tracked {
    /// A file of the kernel that no longer holds what it held after our last write: its name, what it held and what it holds.
    fn foreign_write(&mut self) -> Option<(String, String, String)> {
        let now = self.place.as_ref()?.settings();
        let is_ours = |file: &str| self.original.values.keys().any(|knob| usage::files_of(*knob).contains(&file));
        let mut changed = self.kernel.iter().zip(&now).filter(|(left, found)| left != found && is_ours(&left.0));
        let foreign = changed.next().map(|((file, left), (_, found))| (file.clone(), left.clone(), found.clone()));
        self.kernel = now;
        foreign
    }

    /// Compares what the engine has in force with what it had and what we just wrote. Returns what it ignored of that. What others wrote is contested, and it
    /// is what they will want to have when we let go.
    fn take_in(&mut self, now: Values, written: &Values) -> Vec<Knob> {
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
        // One foreign change is seen in the engine and in the kernel, and often in several values: that is one contest.
        let back_off = match &self.contest {
            Some(last) if now < last.until => return,
            Some(last) if now < last.until + BACK_OFF_LAST => (last.back_off * 2).min(BACK_OFF_LAST),
            _ => BACK_OFF_FIRST,
        };
        tracing::warn!(container = self.name, what, wanted, found, "something else writes this limit too; backing off");
        self.contest = Some(Contest { what, wanted, found, until: now + back_off, back_off });
    }

    fn still_contested(&self, key: &str) -> Result<(), RuntimeError> {
        match &self.contest {
            Some(contest) if Instant::now() < contest.until => Err(contest.error(key)),
            _ => Ok(()),
        }
    }

    fn in_force(&self, notes: Vec<String>) -> InForce {
        let settings = match self.place {
            Some(_) => self.kernel.clone(),
            None => self.found.iter().map(|(knob, value)| (knob.to_string(), value.to_string())).collect(),
        };
        InForce { settings, notes }
    }
}

impl Contest {
    fn error(&self, key: &str) -> RuntimeError {
        RuntimeError::Contested {
            key: key.to_owned(),
            what: self.what.clone(),
            wanted: self.wanted.clone(),
            found: self.found.clone(),
        }
    }
}

async fn update(engine: &Engine, id: &str, change: &Values) -> Result<(), RuntimeError> {
    if change.is_empty() {
        return Ok(());
    }
    match engine.docker.update_container(id, update_body(change)).await {
        Ok(()) => Ok(()),
        Err(error) if engine::is_missing(&error) => Err(RuntimeError::Gone { key: id.to_owned() }),
        Err(error) => Err(engine::failed(&engine.socket, &format!("update container {}", engine::short(id)), error)),
    }
}
