//! The process runtime on a machine with cgroup rights.
//!
//! Each mode says which of the group's files carry the CPU share; memory and block I/O are alike in all of them. A
//! job that is new weighs as much as its neighbours do on average until the first plan that knows it.

use super::cores::deal;
use super::traffic::Traffic;
use super::{Config, Identity, JobGroup, page_bytes};
use crate::cgroup::file::BUFFER_BYTES;
use crate::cgroup::limits::{self, Ledger, Terrain, Wanted};
use crate::cgroup::{Base, Controller, CpuList, Group, Hierarchy};
use crate::{Capacity, Counters, Handle, InForce, Mode, RuntimeError};
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::JobId;
use gainshare_core::plan::Target;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::time::Instant;

/// How much of the memory reclaim may be asked to spare for all jobs together. The rest of the machine needs some, too.
const MOST_SPARED: f64 = 0.75;

/// A limit this close to the whole is no limit.
const WHOLE: f64 = 1.0 - 1e-6;

pub(super) struct Grouped {
    base: Base,
    config: Config,
    terrain: Terrain,
    jobs: BTreeMap<String, Job>,
    notes: Vec<String>,
    traffic: Traffic,
    scratch: Box<[u8; BUFFER_BYTES]>,
}

struct Job {
    group: Group,
    /// Unknown until the job has started.
    leader: Option<Identity>,
    ledger: Ledger,
    wanted: Wanted,
    /// What was asked for memory, before the working set had its say.
    memory_asked_bytes: Option<u64>,
}

impl std::fmt::Debug for Grouped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grouped").field("base", &self.base).field("jobs", &self.jobs.keys()).finish_non_exhaustive()
    }
}

pub(super) fn restore(record: &JobGroup) -> Result<(), RuntimeError> {
    let Some(version) = record.version else { return Ok(()) };
    let group = match Group::reopen(&record.handle.key, version, &record.dirs) {
        Err(RuntimeError::Gone { .. }) => return Ok(()),
        other => other?,
    };
    let candidates = ["io.bfq.weight", "io.weight", "blkio.bfq.weight", "blkio.weight"];
    let terrain = Terrain {
        version,
        all_cpus: group.parent_cpus().unwrap_or_default(),
        block_weight_file: candidates.into_iter().find(|file| group.has(file)),
        page_bytes: page_bytes(),
    };
    put_defaults(&group, &terrain, &mut Ledger::default())
}

/// Leaves the group as a new one would be. Somebody else's value is nothing to fight about when leaving.
fn put_defaults(group: &Group, terrain: &Terrain, ledger: &mut Ledger) -> Result<(), RuntimeError> {
    match limits::enforce(group, &limits::settings(terrain, &Wanted::default()), ledger, Instant::now()) {
        Ok(_) | Err(RuntimeError::Gone { .. } | RuntimeError::Contested { .. }) => Ok(()),
        Err(other) => Err(other),
    }
}

impl Grouped {
    pub(super) fn open(hierarchy: Hierarchy, config: Config) -> Result<Grouped, RuntimeError> {
        let base = Base::open(hierarchy, &config.base)?;
        let terrain = Terrain {
            version: base.version(),
            all_cpus: base.cpus().iter().copied().collect(),
            block_weight_file: base.block_weight_file(),
            page_bytes: page_bytes(),
        };
        let mut notes: Vec<String> = base.block_note().map(str::to_owned).into_iter().collect();
        let mut traffic = Traffic::default();
        notes.push(match traffic.probe() {
            Ok(()) => "network use is counted (TCP) but not limited".into(),
            Err(why) => why,
        });
        for (controller, note) in [
            (Controller::Memory, "memory is neither counted nor limited: no memory controller here"),
            (Controller::CpuSet, "whole cores cannot be given: no cpuset controller here"),
            (Controller::Pids, "a fork bomb is not contained: no pids controller here"),
        ] {
            if !base.has(controller) {
                notes.push(note.into());
            }
        }
        Ok(Grouped {
            base,
            config,
            terrain,
            jobs: BTreeMap::new(),
            notes,
            traffic,
            scratch: Box::new([0; BUFFER_BYTES]),
        })
    }

    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    pub(super) fn capacity(&self) -> Capacity {
        self.base.capacity()
    }

    pub(super) fn prepare(&mut self, job: JobId, name: &str) -> Result<JobGroup, RuntimeError> {
        if self.jobs.contains_key(name) {
            return Err(RuntimeError::Unsupported(format!("a job's group is already called {name}: use another name")));
        }
        let group = self.base.create(name)?;
        let wanted = Wanted {
            cpu_share: (self.config.mode != Mode::Quota).then(|| self.average_share()),
            most_tasks: self.config.most_tasks,
            ..Wanted::default()
        };
        let mut ledger = Ledger::default();
        if let Err(error) =
            limits::enforce(&group, &limits::settings(&self.terrain, &wanted), &mut ledger, Instant::now())
        {
            let _ = group.remove();
            return Err(error);
        }
        let record = JobGroup {
            handle: Handle { job, key: name.to_owned() },
            version: Some(group.version()),
            dirs: group.dirs().to_vec(),
            procs_files: group.procs_files(),
        };
        self.jobs.insert(name.to_owned(), Job { group, leader: None, ledger, wanted, memory_asked_bytes: None });
        self.base.weigh_for(self.jobs.len());
        Ok(record)
    }

    /// What a job weighs that no plan knows yet.
    fn average_share(&self) -> f64 {
        let shares: Vec<f64> = self.jobs.values().filter_map(|j| j.wanted.cpu_share).collect();
        if shares.is_empty() { 1.0 } else { shares.iter().sum::<f64>() / shares.len() as f64 }
    }

    pub(super) fn started(&mut self, handle: &Handle, leader: Identity) -> Result<(), RuntimeError> {
        self.job_mut(handle)?.leader = Some(leader);
        Ok(())
    }

    pub(super) fn adopt(&mut self, record: &JobGroup, leader: Identity) -> Result<(), RuntimeError> {
        let key = &record.handle.key;
        let gone = || RuntimeError::Gone { key: key.clone() };
        let version = record.version.ok_or_else(gone)?;
        let group = Group::reopen(key, version, &record.dirs)?;
        if !group.is_populated()? {
            group.remove()?;
            return Err(gone());
        }
        let ledger = Ledger::adopt(&group, &self.terrain);
        let job = Job { group, leader: Some(leader), ledger, wanted: Wanted::default(), memory_asked_bytes: None };
        self.jobs.insert(key.clone(), job);
        self.base.weigh_for(self.jobs.len());
        Ok(())
    }

    fn job_mut(&mut self, handle: &Handle) -> Result<&mut Job, RuntimeError> {
        self.jobs.get_mut(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })
    }

    pub(super) fn apply(&mut self, wanted: &[(Handle, CheckedTarget)]) -> Vec<Result<InForce, RuntimeError>> {
        let dealt = self.deal_cores(wanted);
        let results: Vec<_> =
            wanted.iter().zip(dealt).map(|((handle, target), cpus)| self.apply_one(handle, target, cpus)).collect();
        let spared: u64 = self.jobs.values().map(|j| j.wanted.memory_spared_bytes).fold(0, u64::saturating_add);
        self.base.protect_memory(spared.min((self.capacity().memory_bytes as f64 * MOST_SPARED) as u64));
        results
    }

    /// In `cores` mode, each job's cores; else nothing for anybody.
    fn deal_cores(&self, wanted: &[(Handle, CheckedTarget)]) -> Vec<Option<CpuList>> {
        if self.config.mode != Mode::Cores || !self.base.has(Controller::CpuSet) {
            return vec![None; wanted.len()];
        }
        // Only those that are there: a core must not be kept for the dead.
        let live: Vec<usize> = (0..wanted.len()).filter(|&i| self.jobs.contains_key(&wanted[i].0.key)).collect();
        let claims: Vec<f64> = live.iter().map(|&i| wanted[i].1.share.cpu.get()).collect();
        let held: Vec<CpuList> =
            live.iter().map(|&i| self.jobs[&wanted[i].0.key].wanted.cpus.clone().unwrap_or_default()).collect();
        let mut dealt = vec![None; wanted.len()];
        for (&i, cpus) in live.iter().zip(deal(self.base.cpus(), &claims, &held)) {
            dealt[i] = Some(cpus).filter(|c| !c.is_empty());
        }
        dealt
    }

    fn apply_one(&mut self, handle: &Handle, target: &Target, cpus: Option<CpuList>) -> Result<InForce, RuntimeError> {
        let capacity = self.base.capacity();
        let mode = self.config.mode;
        let most_tasks = self.config.most_tasks;
        let working_set_bytes = match target.limit.memory.get() < WHOLE && self.base.has(Controller::Memory) {
            true => self.read(handle)?.memory_bytes,
            false => 0,
        };
        let terrain = self.terrain.clone();
        let notes = self.notes.clone();
        let job = self.job_mut(handle)?;
        let below_whole = |limit: f64| (limit < WHOLE).then_some(limit);
        let asked = below_whole(target.limit.memory.get()).map(|l| (l * capacity.memory_bytes as f64) as u64);
        job.memory_asked_bytes = asked;
        job.wanted = Wanted {
            cpu_share: (mode != Mode::Quota).then(|| target.share.cpu.get()),
            cpu_cap_cores: match mode {
                Mode::Quota => below_whole(target.limit.cpu.get()).map(|l| l * capacity.cores),
                Mode::Weight | Mode::Cores => None,
            },
            cpus,
            memory_limit_bytes: asked.map(|asked| limits::memory_limit_bytes(asked, working_set_bytes)),
            memory_spared_bytes: asked.map_or(0, |_| (target.share.memory.get() * capacity.memory_bytes as f64) as u64),
            block_share: Some(target.share.block_io.get()),
            most_tasks,
        };
        let settings = limits::settings(&terrain, &job.wanted);
        match limits::enforce(&job.group, &settings, &mut job.ledger, Instant::now()) {
            Ok(done) => Ok(InForce { settings: done.in_force, notes: [notes, done.notes].concat() }),
            Err(RuntimeError::Io { action, path, source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                // The likely cause: a quota above us became smaller than what we ask for. The next plan sees the new
                // capacity.
                self.base.refresh();
                Err(RuntimeError::Io {
                    action,
                    path,
                    source,
                    hint: "; a limit above this group may have changed: asking anew",
                })
            }
            Err(other) => Err(other),
        }
    }

    pub(super) fn read(&mut self, handle: &Handle) -> Result<Counters, RuntimeError> {
        let terrain = self.terrain.clone();
        let job = self.jobs.get_mut(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })?;
        let mut counters = job.group.usage(&mut self.scratch)?;
        counters.net_bytes = self.traffic.of(&handle.key, Instant::now(), || job.group.pids());
        // A job that grows must not be slowed by a limit that was fitting a moment ago: v2 throttles hard above
        // memory.high.
        if let (Some(asked), Some(limit)) = (job.memory_asked_bytes, job.wanted.memory_limit_bytes)
            && limits::memory_limit_is_near(limit, counters.memory_bytes)
        {
            job.wanted.memory_limit_bytes = Some(limits::memory_limit_bytes(asked, counters.memory_bytes));
            let mut settings = limits::settings(&terrain, &job.wanted);
            settings.retain(|s| matches!(s.file, "memory.high" | "memory.soft_limit_in_bytes"));
            // A contested limit is reported by the next apply.
            let _ = limits::enforce(&job.group, &settings, &mut job.ledger, Instant::now());
        }
        Ok(counters)
    }

    pub(super) fn is_alive(&mut self, handle: &Handle) -> Result<bool, RuntimeError> {
        let job = self.job_mut(handle)?;
        if job.group.is_gone() {
            return Err(RuntimeError::Gone { key: handle.key.clone() });
        }
        // A job that is prepared but not started has nobody in its group yet.
        Ok(job.leader.is_none() || job.group.is_populated()?)
    }

    pub(super) fn release(&mut self, handle: &Handle) -> Result<(), RuntimeError> {
        let Some(mut job) = self.jobs.remove(&handle.key) else { return Ok(()) };
        self.traffic.forget(&handle.key);
        self.base.weigh_for(self.jobs.len());
        if job.group.is_gone() || job.group.remove()? {
            return Ok(());
        }
        put_defaults(&job.group, &self.terrain, &mut job.ledger)
    }

    pub(super) fn terminate(&mut self, handle: &Handle) -> Result<(), RuntimeError> {
        let job = self.job_mut(handle)?;
        let to_group = job.leader.filter(|leader| !leader.was_reused() && leader.pid > 1);
        let members = job.group.pids();
        if let Some(leader) = to_group
            && killpg(Pid::from_raw(leader.pid), Signal::SIGTERM).is_ok()
        {
            return Ok(());
        }
        for pid in members {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        Ok(())
    }

    pub(super) fn kill(&mut self, handle: &Handle) -> Result<bool, RuntimeError> {
        self.job_mut(handle)?.group.kill()
    }

    pub(super) fn sweep(&mut self) {
        for name in self.base.group_names() {
            if !self.jobs.contains_key(&name) {
                self.base.remove_if_empty(&name);
            }
        }
    }

    pub(super) fn close(&mut self) {
        self.sweep();
        for job in self.jobs.values() {
            let _ = job.group.remove();
        }
        self.base.remove();
    }
}
