//! Plans on containers: adopt, compare, update through the engine, read back, restore.

use super::adopted::{self, AdoptedContainer};
use super::engine::{self, Engine};
use super::limits::{
    EngineLimit, LimitRequest, LimitValue, LimitValues, Machine, OriginalLimits, WeightScale, difference, managed,
    update_body, values_of,
};
use super::usage::ContainerGroup;
use crate::cores::{deal, split};
use crate::cpus::CpuList;
use crate::machine::ROOT;
use crate::{AppliedLimits, Capacity, Counters, JobHandle, LimitMode, Runtime, RuntimeError, RuntimeKind};
use bollard::models::ContainerInspectResponse;
use futures_util::StreamExt;
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::{JobId, PerResource, Resource};
use gainshare_core::plan::Target;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// How many containers are updated at the same time. The engine spends most of an update in its container runtime.
const AT_ONCE: usize = 8;

/// Writes the targets of a plan to containers. See the documentation of the module `docker`.
pub struct DockerRuntime {
    engine: Engine,
    mode: LimitMode,
    machine: Machine,
    adopted: BTreeMap<String, AdoptedContainer>,
    /// The directory below which the `proc` and `sys` of the engine's machine lie.
    root: PathBuf,
}

impl DockerRuntime {
    /// Connects to the engine behind `socket`.
    pub fn connect(socket: &Path, mode: LimitMode) -> Result<DockerRuntime, RuntimeError> {
        DockerRuntime::connect_at(socket, mode, Path::new(ROOT))
    }

    /// The same with the `proc` and `sys` of the engine's machine below `root`. Where the containers' cgroups
    /// are not found there (an engine in a virtual machine), containers are observed through the engine
    /// alone.
    pub fn connect_at(socket: &Path, mode: LimitMode, root: &Path) -> Result<DockerRuntime, RuntimeError> {
        let engine = Engine::connect(socket)?;
        let info = engine.wait(engine.info())?;
        let online = fs::read_to_string(root.join("sys/devices/system/cpu/online")).map(|list| list.trim().to_owned());
        let all_cpus = online.ok().filter(|list| CpuList::parse(list).is_some_and(|l| l.len() == info.cores as usize));
        let machine = Machine {
            cores: info.cores,
            memory_bytes: info.memory_bytes,
            cgroup_v2: info.cgroup_v2,
            weights: if info.cgroup_v2 { WeightScale::Linear } else { WeightScale::Shares },
            all_cpus: all_cpus.unwrap_or_else(|| (0..info.cores).collect::<CpuList>().to_string()),
            block_weight: None,
        };
        Ok(DockerRuntime { engine, mode, machine, adopted: BTreeMap::new(), root: root.to_owned() })
    }

    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Adopts a running container and returns its original limits, which the caller should store before the
    /// first plan is applied. After a restart of the caller, `known` is what was stored then.
    pub fn adopt(
        &mut self,
        job: JobId,
        id: &str,
        known: Option<OriginalLimits>,
    ) -> Result<(JobHandle, OriginalLimits), RuntimeError> {
        let container = self.engine.wait(self.engine.inspect(id))?;
        let id = container.id.clone().unwrap_or_else(|| id.to_owned());
        let state = container.state.clone().unwrap_or_default();
        if state.running != Some(true) {
            return Err(RuntimeError::Gone { key: id });
        }
        let host = container.host_config.clone().unwrap_or_default();
        // Limits that were written in an earlier life and not restored are still in force; its originals are
        // those of this life too. A known original may also be from another mode: then the first plan
        // restores what that mode changed.
        let earlier = known.filter(|known| known.id == id);
        let earlier = earlier.or_else(|| self.adopted.get(&id).map(|adopted| adopted.original.clone()));
        let mut original = OriginalLimits { id: id.clone(), values: managed(self.mode, &values_of(&host)) };
        original.values.extend(earlier.into_iter().flat_map(|earlier| earlier.values));
        let host_network = host.network_mode.as_deref() == Some("host");
        let group = state.pid.and_then(|pid| ContainerGroup::find(&self.root, pid, &id, host_network));
        if let Some(group) = &group {
            self.machine.block_weight = group.default_block_weight();
        }
        let adopted = AdoptedContainer::new(&self.engine, job, original.clone(), &container, group);
        self.adopted.insert(id.clone(), adopted);
        Ok((JobHandle { job, key: id }, original))
    }

    /// The limits that `release` will restore. They change when another program sets the container's limits:
    /// store them again after `ForeignWrite`.
    pub fn original(&self, job: &JobHandle) -> Option<&OriginalLimits> {
        self.adopted.get(&job.key).filter(|adopted| adopted.job == job.job).map(|adopted| &adopted.original)
    }

    /// Restores the original limits of a container that this runtime has not adopted: for the guard, after
    /// the daemon died. Does nothing if the container is gone.
    pub fn restore(&mut self, original: &OriginalLimits) -> Result<(), RuntimeError> {
        let container = match self.engine.wait(self.engine.inspect(&original.id)) {
            Ok(container) => container,
            Err(RuntimeError::Gone { .. }) => return Ok(()),
            Err(error) => return Err(error),
        };
        let found = values_of(&container.host_config.clone().unwrap_or_default());
        let pid = container.state.as_ref().and_then(|state| state.pid).filter(|_| self.machine.cgroup_v2);
        if let Some(group) = pid.and_then(|pid| ContainerGroup::find(&self.root, pid, &original.id, true)) {
            self.learn_scale(adopted::weight_and_shares(&group.settings(), &found));
        }
        let change = difference(&self.machine.effective(&original.values), &self.machine.effective(&found));
        match self.engine.wait(update(&self.engine, &original.id, &change)) {
            Err(RuntimeError::Gone { .. }) => Ok(()),
            result => result,
        }
    }

    /// A weight of cgroup v2 and the shares it was made from show by which rule the engine translates. `true`
    /// if it is another rule than assumed.
    fn learn_scale(&mut self, sample: Option<(f64, i64)>) -> bool {
        let scale = sample.map_or(self.machine.weights, |(weight, shares)| WeightScale::infer(shares, weight));
        std::mem::replace(&mut self.machine.weights, scale) != scale
    }

    /// The adopted container of a handle, if the handle names its present life.
    fn adopted(&mut self, job: &JobHandle) -> Result<&mut AdoptedContainer, RuntimeError> {
        let gone = || RuntimeError::Gone { key: job.key.clone() };
        if self.adopted.get(&job.key).is_some_and(|adopted| adopted.job == job.job) {
            return self.adopted.get_mut(&job.key).ok_or_else(gone);
        }
        // The handle names another life, or the container was never adopted or was released. Gone unless it
        // still runs.
        let container = self.engine.wait(self.engine.inspect(&job.key))?;
        match container.state.unwrap_or_default().running {
            Some(true) if !self.adopted.contains_key(&job.key) => {
                Err(RuntimeError::Unsupported(format!("container {} was not adopted: adopt it first", job.key)))
            }
            _ => Err(gone()),
        }
    }

    /// The limits of each container, and notes on what cannot be limited.
    fn wanted(
        &mut self,
        wanted: &[(JobHandle, CheckedTarget)],
    ) -> Vec<Result<(LimitValues, Vec<String>), RuntimeError>> {
        let mean = PerResource::from_fn(|resource| {
            wanted.iter().map(|(_, target)| target.share.get(resource).get()).sum::<f64>() / wanted.len() as f64
        });
        let relative = |target: &Target, resource: Resource| {
            let mean = *mean.get(resource);
            if mean > 0.0 { target.share.get(resource).get() / mean } else { 1.0 }
        };
        let dealt = self.deal_cores(wanted);
        let (machine, mode) = (self.machine.clone(), self.mode);
        let one = |((job, target), cpus): (&(JobHandle, CheckedTarget), Option<CpuList>)| {
            let adopted = self.adopted(job)?;
            let request = LimitRequest {
                target,
                relative_cpu: relative(target, Resource::Cpu),
                relative_block: relative(target, Resource::BlockIo),
                cpus: cpus.map(|cpus| cpus.to_string()),
                // Read only if it is needed: it is the most expensive part of a plan that changes nothing.
                working_set_bytes: match target.limit.memory.get() < 1.0 {
                    true => adopted.read()?.memory_bytes,
                    false => 0,
                },
                hard_memory_bytes: adopted.hard_memory_bytes,
                original: &adopted.original.values,
            };
            Ok(machine.wanted(mode, &request))
        };
        wanted.iter().zip(dealt).map(one).collect()
    }

    /// Whole cores for each container, in cores mode. Containers that their owner pinned get none.
    fn deal_cores(&self, wanted: &[(JobHandle, CheckedTarget)]) -> Vec<Option<CpuList>> {
        let mut dealt = vec![None; wanted.len()];
        if self.mode != LimitMode::Cores {
            return dealt;
        }
        let cpus_in = |values: &LimitValues| match values.get(&EngineLimit::CpusetCpus) {
            Some(LimitValue::List(list)) => CpuList::parse(list).unwrap_or_default(),
            _ => CpuList::default(),
        };
        let is_ours = |(_, (job, _)): &(usize, &(JobHandle, CheckedTarget))| {
            self.adopted.get(&job.key).is_some_and(|adopted| cpus_in(&adopted.original.values).is_empty())
        };
        let ours: Vec<(usize, &(JobHandle, CheckedTarget))> = wanted.iter().enumerate().filter(is_ours).collect();
        let claims: Vec<f64> = ours.iter().map(|(_, (_, target))| target.share.cpu.get()).collect();
        let found: Vec<CpuList> = ours.iter().map(|(_, (job, _))| cpus_in(&self.adopted[&job.key].found)).collect();
        let all: Vec<u32> = CpuList::parse(&self.machine.all_cpus).unwrap_or_default().iter().collect();
        for ((i, _), cpus) in ours.iter().zip(deal(&all, &claims, &split(&found, all.len()))) {
            dealt[*i] = Some(cpus.all()).filter(|cpus| !cpus.is_empty());
        }
        dealt
    }

    /// What to write to one container (perhaps nothing), or the reason why nothing may be written.
    fn prepare(&mut self, generation: u64, job: &JobHandle, wanted: &LimitValues) -> Result<LimitValues, RuntimeError> {
        let (engine, machine) = (self.engine.clone(), self.machine.clone());
        let adopted = self.adopted(job)?;
        let known = adopted.generation;
        if generation < known {
            return Err(RuntimeError::OldGeneration { key: job.key.clone(), given: generation, known });
        }
        if adopted.is_alive() == Some(false) {
            return Err(RuntimeError::Gone { key: job.key.clone() });
        }
        if let Some(foreign) = adopted.foreign_write() {
            let container = engine.wait(engine.inspect(&job.key))?;
            adopted.classify(foreign, &container);
        }
        adopted.check_contest()?;
        adopted.generation = generation;
        let mut change = difference(wanted, &machine.effective(&adopted.found));
        change.retain(|limit, value| adopted.refused.get(limit) != Some(value));
        Ok(change)
    }

    fn apply_once(
        &mut self,
        generation: u64,
        wanted: &[(JobHandle, CheckedTarget)],
    ) -> Vec<Result<AppliedLimits, RuntimeError>> {
        let values = self.wanted(wanted);
        let prepare = |(values, (job, _)): (Result<_, _>, &(JobHandle, CheckedTarget))| {
            let (values, notes) = values?;
            Ok((self.prepare(generation, job, &values)?, notes))
        };
        let prepared: Vec<Result<(LimitValues, Vec<String>), RuntimeError>> =
            values.into_iter().zip(wanted).map(prepare).collect();
        let engine = self.engine.clone();
        // After one unanswered request the others would wait in vain.
        let is_hung = Cell::new(false);
        let write = async |job: &JobHandle, change: &LimitValues, must_ask: bool| {
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
                let must_ask = self.adopted.get(&job.key).is_some_and(|adopted| adopted.is_alive().is_none());
                async move {
                    match prepared {
                        Ok((change, _)) => write(job, change, must_ask).await,
                        Err(_) => Ok(None),
                    }
                }
            });
            futures_util::stream::iter(calls).buffered(AT_ONCE).collect().await
        });
        let conclude = |((prepared, answer), (job, _)): ((Result<_, _>, Result<_, _>), &(JobHandle, CheckedTarget))| {
            let (change, notes) = prepared?;
            let adopted = self.adopted(job)?;
            match answer {
                Ok(Some(container)) => adopted.record_answer(&change, &container, notes),
                Ok(None) => Ok(adopted.applied(notes)),
                Err(error) => {
                    adopted.record_unanswered(&change);
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

    fn apply(
        &mut self,
        generation: u64,
        wanted: &[(JobHandle, CheckedTarget)],
    ) -> Vec<Result<AppliedLimits, RuntimeError>> {
        let results = self.apply_once(generation, wanted);
        // Weights that were written by the wrong rule are written once more.
        match self.learn_scale(self.adopted.values().find_map(AdoptedContainer::weight_and_shares)) {
            true => self.apply_once(generation, wanted),
            false => results,
        }
    }

    fn read(&mut self, job: &JobHandle) -> Result<Counters, RuntimeError> {
        self.adopted(job)?.read()
    }

    fn is_alive(&mut self, job: &JobHandle) -> Result<bool, RuntimeError> {
        let is_alive = match self.adopted(job) {
            Ok(adopted) => adopted.is_alive(),
            Err(RuntimeError::Gone { .. }) => Some(false),
            Err(error) => return Err(error),
        };
        if let Some(is_alive) = is_alive {
            return Ok(is_alive);
        }
        match self.engine.wait(self.engine.inspect(&job.key)) {
            Ok(container) => Ok(self.adopted(job)?.is_described_alive(&container)),
            Err(RuntimeError::Gone { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn release(&mut self, job: &JobHandle) -> Result<(), RuntimeError> {
        // A container that was not adopted, or a later life of it, keeps its limits.
        let ours = self.adopted.get(&job.key).filter(|adopted| adopted.job == job.job);
        if let Some(original) = ours.map(|adopted| adopted.original.clone()) {
            self.restore(&original)?;
            self.adopted.remove(&job.key);
        }
        Ok(())
    }
}

async fn update(engine: &Engine, id: &str, change: &LimitValues) -> Result<(), RuntimeError> {
    if change.is_empty() {
        return Ok(());
    }
    match engine.docker.update_container(id, update_body(change)).await {
        Ok(()) => Ok(()),
        Err(error) if engine::is_missing(&error) => Err(RuntimeError::Gone { key: id.to_owned() }),
        Err(error) => Err(engine::failed(&engine.socket, &format!("update container {}", engine::short(id)), error)),
    }
}
