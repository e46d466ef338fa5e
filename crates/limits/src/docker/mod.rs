//! The Docker runtime: containers that opted in, and containers we start, share the machine by our targets.
//!
//! **Problem.** Training containers of a Docker host should get what their progress earns while they run, with nothing
//! but the engine's own interface, and must be left exactly as they were when we let go.
//!
//! **Approach.** [`Engine`] is the connection: it reports which containers come and go ([`Engine::events`]), follows
//! their output ([`Engine::follow_logs`]), starts, stops and removes containers of our own and makes images without a
//! registry. [`DockerRuntime`] carries out plans: [`DockerRuntime::adopt`] remembers a container's limits (the
//! [`Original`], for the caller's journal) and from then on targets are applied through the engine's live update. What
//! was changed is read back from the engine. Before the next change the kernel's own files are compared with how we
//! left them; a difference means that somebody else writes too: the job is reported as contested and left alone for a
//! while, longer each time.
//!
//! **Terms.** A handle's key is the container's full id. A *life* is one start of a container: a restarted one has the
//! same id and counts as another job, which must be adopted again.
//!
//! **Properties.** Only adopted containers are ever written to. A value in force is not written again, and an older
//! plan is refused. The hard memory limit is never touched. Restoring is possible from the [`Original`] alone, by
//! another process and also for a container that has stopped, whose limits the engine would otherwise apply at its next
//! start. An engine that restarts is simply asked again.

mod containers;
mod engine;
mod events;
mod find;
mod image;
pub mod labels;
mod limits;
mod logs;
mod tracked;
mod usage;

pub use containers::{Bind, ContainerSpec, Network};
pub use engine::{Engine, default_socket};
pub use events::{Adopt, ContainerInfo, DockerEvent};
pub use find::ContainerSnapshot;
pub use image::LOCAL_IMAGE;
pub use limits::{Knob, Value, Values};
pub use logs::{LogChunk, LogCursor};

use crate::cgroup::CpuList;
use crate::process::cores::deal;
use crate::{Capacity, Counters, Handle, InForce, Mode, Runtime, RuntimeError, RuntimeKind};
use bollard::models::ContainerInspectResponse;
use futures_util::StreamExt;
use gainshare_core::model::{JobId, PerResource, Resource};
use gainshare_core::plan::Target;
use limits::{Machine, WeightScale, Wish, difference, managed, update_body, values_of};
use serde::{Deserialize, Serialize};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Instant;
use tracked::Tracked;
use usage::Place;

/// A container's limits as they were before the first change: all that is needed to put them back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    pub id: String,
    /// Those the mode may change, as the engine reports them, where zero is "never set".
    pub values: Values,
}

/// How many containers are updated at the same time. The engine spends most of an update waiting for its container
/// runtime.
const AT_ONCE: usize = 8;

/// Carries out targets on containers. See the module documentation.
pub struct DockerRuntime {
    engine: Engine,
    mode: Mode,
    machine: Machine,
    tracked: BTreeMap<String, Tracked>,
    /// Whether to look for the containers' cgroups on this machine.
    look_here: bool,
}

impl DockerRuntime {
    /// Connects to the engine behind `socket`.
    pub fn connect(socket: &Path, mode: Mode) -> Result<DockerRuntime, RuntimeError> {
        DockerRuntime::new(Engine::connect(socket)?, mode)
    }

    pub fn new(engine: Engine, mode: Mode) -> Result<DockerRuntime, RuntimeError> {
        let info = engine.wait(engine.info())?;
        let online = fs::read_to_string("/sys/devices/system/cpu/online").map(|list| list.trim().to_owned());
        let all_cpus = online.ok().filter(|list| CpuList::parse(list).is_some_and(|l| l.len() == info.cores as usize));
        let machine = Machine {
            cores: info.cores,
            memory_bytes: info.memory_bytes,
            cgroup_v2: info.cgroup_v2,
            weights: if info.cgroup_v2 { WeightScale::Linear } else { WeightScale::Shares },
            all_cpus: all_cpus.unwrap_or_else(|| (0..info.cores).collect::<CpuList>().to_string()),
            block_weight: None,
        };
        Ok(DockerRuntime { engine, mode, machine, tracked: BTreeMap::new(), look_here: true })
    }

    /// Sees containers only through the engine, as with an engine on another machine.
    #[doc(hidden)]
    pub fn from_afar(mut self) -> DockerRuntime {
        self.look_here = false;
        self
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Takes charge of a running container and returns its limits before us, which the caller should store before the
    /// first plan is applied. After a restart of the caller, `known` is what was stored then.
    pub fn adopt(&mut self, job: JobId, id: &str, known: Option<Original>) -> Result<(Handle, Original), RuntimeError> {
        let container = self.engine.wait(self.engine.inspect(id))?;
        let id = container.id.clone().unwrap_or_else(|| id.to_owned());
        let state = container.state.clone().unwrap_or_default();
        if state.running != Some(true) {
            return Err(RuntimeError::Gone { key: id });
        }
        let host = container.host_config.clone().unwrap_or_default();
        // What an earlier life was given by us and not yet relieved of is still there; its original is this one's too.
        // A known original may also be from another mode: then what that mode changed is put back by the first plan.
        let earlier = known.filter(|known| known.id == id);
        let earlier = earlier.or_else(|| self.tracked.get(&id).map(|tracked| tracked.original.clone()));
        let mut original = Original { id: id.clone(), values: managed(self.mode, &values_of(&host)) };
        original.values.extend(earlier.into_iter().flat_map(|earlier| earlier.values));
        let place = state.pid.filter(|_| self.look_here);
        let place = place.and_then(|pid| Place::find(pid, &id, host.network_mode.as_deref() == Some("host")));
        if let Some(place) = &place {
            self.machine.block_weight = place.default_block_weight();
        }
        let tracked = Tracked::new(&self.engine, job, original.clone(), &container, place);
        self.tracked.insert(id.clone(), tracked);
        Ok((Handle { job, key: id }, original))
    }

    /// What will be put back for an adopted container. It changes when somebody else sets its limits: store it anew
    /// after a plan was contested.
    pub fn original(&self, job: &Handle) -> Option<&Original> {
        self.tracked.get(&job.key).filter(|tracked| tracked.job == job.job).map(|tracked| &tracked.original)
    }

    /// Puts back what an adopted container had before us, without having adopted it: for whoever cleans up after a
    /// daemon. Harmless if the container is gone.
    pub fn restore(&mut self, original: &Original) -> Result<(), RuntimeError> {
        let container = match self.engine.wait(self.engine.inspect(&original.id)) {
            Ok(container) => container,
            Err(RuntimeError::Gone { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let found = values_of(&container.host_config.clone().unwrap_or_default());
        let pid = container.state.as_ref().and_then(|state| state.pid).filter(|_| self.machine.cgroup_v2);
        if let Some(place) = pid.and_then(|pid| Place::find(pid, &original.id, true)) {
            self.learn_scale(tracked::weight_and_shares(&place.settings(), &found));
        }
        let change = difference(&self.machine.effective(&original.values), &self.machine.effective(&found));
        match self.engine.wait(update(&self.engine, &original.id, &change)) {
            Err(RuntimeError::Gone { .. }) => Ok(()),
            result => result,
        }
    }

    /// A weight of cgroup v2 and the shares it was made from show by which rule the engine translates. Says whether it
    /// is another one than assumed.
    fn learn_scale(&mut self, seen: Option<(f64, i64)>) -> bool {
        let scale = seen.map_or(self.machine.weights, |(weight, shares)| WeightScale::seen(shares, weight));
        std::mem::replace(&mut self.machine.weights, scale) != scale
    }

    /// The tracked container of a handle, if the handle means its present life.
    fn tracked(&mut self, job: &Handle) -> Result<&mut Tracked, RuntimeError> {
        let gone = || RuntimeError::Gone { key: job.key.clone() };
        if self.tracked.get(&job.key).is_some_and(|tracked| tracked.job == job.job) {
            return self.tracked.get_mut(&job.key).ok_or_else(gone);
        }
        // Another life, or never adopted, or let go: the last two differ by whether it still runs.
        let container = self.engine.wait(self.engine.inspect(&job.key))?;
        match container.state.unwrap_or_default().running {
            Some(true) if !self.tracked.contains_key(&job.key) => {
                Err(RuntimeError::Unsupported(format!("container {} was not adopted: adopt it first", job.key)))
            }
            _ => Err(gone()),
        }
    }

    /// What each container should have, beside notes on what cannot be had.
    fn wanted(&mut self, wanted: &[(Handle, Target)]) -> Vec<Result<(Values, Vec<String>), RuntimeError>> {
        let mean = PerResource::from_fn(|resource| {
            wanted.iter().map(|(_, target)| target.share.get(resource).get()).sum::<f64>() / wanted.len() as f64
        });
        let relative = |target: &Target, resource: Resource| {
            let mean = *mean.get(resource);
            if mean > 0.0 { target.share.get(resource).get() / mean } else { 1.0 }
        };
        let dealt = self.deal_cores(wanted);
        let (machine, mode) = (self.machine.clone(), self.mode);
        let one = |((job, target), cpus): (&(Handle, Target), Option<CpuList>)| {
            let tracked = self.tracked(job)?;
            let wish = Wish {
                target,
                relative_cpu: relative(target, Resource::Cpu),
                relative_block: relative(target, Resource::BlockIo),
                cpus: cpus.map(|cpus| cpus.to_string()),
                // Read only if it matters: it is the dearest part of a plan that changes nothing.
                working_set_bytes: match target.limit.memory.get() < 1.0 {
                    true => tracked.read()?.memory_bytes,
                    false => 0,
                },
                hard_memory_bytes: tracked.hard_memory_bytes,
                original: &tracked.original.values,
            };
            Ok(machine.wanted(mode, &wish))
        };
        wanted.iter().zip(dealt).map(one).collect()
    }

    /// Whole cores for each container, in cores mode. Those whose owner pinned them get none of ours.
    fn deal_cores(&self, wanted: &[(Handle, Target)]) -> Vec<Option<CpuList>> {
        let mut dealt = vec![None; wanted.len()];
        if self.mode != Mode::Cores {
            return dealt;
        }
        let cpus_in = |values: &Values| match values.get(&Knob::CpusetCpus) {
            Some(Value::List(list)) => CpuList::parse(list).unwrap_or_default(),
            _ => CpuList::default(),
        };
        let is_ours = |(_, (job, _)): &(usize, &(Handle, Target))| {
            self.tracked.get(&job.key).is_some_and(|tracked| cpus_in(&tracked.original.values).is_empty())
        };
        let ours: Vec<(usize, &(Handle, Target))> = wanted.iter().enumerate().filter(is_ours).collect();
        let claims: Vec<f64> = ours.iter().map(|(_, (_, target))| target.share.cpu.get()).collect();
        let held: Vec<CpuList> = ours.iter().map(|(_, (job, _))| cpus_in(&self.tracked[&job.key].found)).collect();
        let all: Vec<u32> = CpuList::parse(&self.machine.all_cpus).unwrap_or_default().iter().collect();
        for ((i, _), cpus) in ours.iter().zip(deal(&all, &claims, &held)) {
            dealt[*i] = Some(cpus).filter(|cpus| !cpus.is_empty());
        }
        dealt
    }

    /// Decides what to write to one container: nothing, or the difference, or the reason why it is not to be touched.
    fn prepare(&mut self, generation: u64, job: &Handle, wanted: &Values) -> Result<Values, RuntimeError> {
        let (engine, machine) = (self.engine.clone(), self.machine.clone());
        let tracked = self.tracked(job)?;
        let known = tracked.generation;
        if generation < known {
            return Err(RuntimeError::OldGeneration { key: job.key.clone(), given: generation, known });
        }
        if tracked.is_alive() == Some(false) {
            return Err(RuntimeError::Gone { key: job.key.clone() });
        }
        if let Some(foreign) = tracked.foreign_write() {
            let container = engine.wait(engine.inspect(&job.key))?;
            tracked.explain(foreign, &container);
        }
        tracked.still_contested()?;
        tracked.generation = generation;
        let mut change = difference(wanted, &machine.effective(&tracked.found));
        change.retain(|knob, value| tracked.refused.get(knob) != Some(value));
        Ok(change)
    }

    fn apply_once(&mut self, generation: u64, wanted: &[(Handle, Target)]) -> Vec<Result<InForce, RuntimeError>> {
        let values = self.wanted(wanted);
        let prepare = |(values, (job, _)): (Result<_, _>, &(Handle, Target))| {
            let (values, notes) = values?;
            Ok((self.prepare(generation, job, &values)?, notes))
        };
        let prepared: Vec<Result<(Values, Vec<String>), RuntimeError>> =
            values.into_iter().zip(wanted).map(prepare).collect();
        let engine = self.engine.clone();
        // One unanswered request is enough to know that the others would wait in vain.
        let is_hung = Cell::new(false);
        let write = async |job: &Handle, change: &Values, must_ask: bool| {
            if change.is_empty() && !must_ask {
                return Ok(None);
            }
            if is_hung.get() {
                return Err(engine::hung(&engine.socket));
            }
            let asked = Instant::now();
            let answer = match update(&engine, &job.key, change).await {
                Ok(()) => engine.inspect(&job.key).await.map(Some),
                Err(error) => Err(error),
            };
            is_hung.set(is_hung.get() || asked.elapsed() >= engine::REQUEST_TIMEOUT);
            answer
        };
        let write = &write;
        let answers: Vec<Result<Option<ContainerInspectResponse>, RuntimeError>> = engine.wait(async {
            let calls = prepared.iter().zip(wanted).map(|(prepared, (job, _))| {
                let must_ask = self.tracked.get(&job.key).is_some_and(|tracked| tracked.is_alive().is_none());
                async move {
                    match prepared {
                        Ok((change, _)) => write(job, change, must_ask).await,
                        Err(_) => Ok(None),
                    }
                }
            });
            futures_util::stream::iter(calls).buffered(AT_ONCE).collect().await
        });
        let conclude = |((prepared, answer), (job, _)): ((Result<_, _>, Result<_, _>), &(Handle, Target))| {
            let (change, notes) = prepared?;
            let tracked = self.tracked(job)?;
            match answer {
                Ok(Some(container)) => tracked.take_in(&change, &container, notes),
                Ok(None) => Ok(tracked.in_force(notes)),
                Err(error) => {
                    tracked.not_answered(&change);
                    Err(error)
                }
            }
        };
        prepared.into_iter().zip(answers).zip(wanted).map(conclude).collect()
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
        let results = self.apply_once(generation, wanted);
        // Weights that were written by the wrong rule are written once more.
        match self.learn_scale(self.tracked.values().find_map(Tracked::weight_and_shares)) {
            true => self.apply_once(generation, wanted),
            false => results,
        }
    }

    fn read(&mut self, job: &Handle) -> Result<Counters, RuntimeError> {
        self.tracked(job)?.read()
    }

    fn is_alive(&mut self, job: &Handle) -> Result<bool, RuntimeError> {
        let is_alive = match self.tracked(job) {
            Ok(tracked) => tracked.is_alive(),
            Err(RuntimeError::Gone { .. }) => Some(false),
            Err(error) => return Err(error),
        };
        if let Some(is_alive) = is_alive {
            return Ok(is_alive);
        }
        match self.engine.wait(self.engine.inspect(&job.key)) {
            Ok(container) => Ok(self.tracked(job)?.is_described_alive(&container)),
            Err(RuntimeError::Gone { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn release(&mut self, job: &Handle) -> Result<(), RuntimeError> {
        // Not ours, or a later life of the container: it keeps what it has.
        let ours = self.tracked.get(&job.key).filter(|tracked| tracked.job == job.job);
        if let Some(original) = ours.map(|tracked| tracked.original.clone()) {
            self.restore(&original)?;
            self.tracked.remove(&job.key);
        }
        Ok(())
    }
}

/// What tells one start of a container from the next.
fn life_of(container: &ContainerInspectResponse) -> String {
    container.state.as_ref().and_then(|state| state.started_at.clone()).unwrap_or_default()
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
