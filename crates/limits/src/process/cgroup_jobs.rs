//! Jobs in cgroups: targets of a plan as limits of groups.
//!
//! The mode decides which of the group's files carry the CPU share; memory and block I/O are the same in all
//! modes. A new job gets the average weight of the other jobs until the first plan that has a target for it.
//!
//! In `cores` mode jobs get whole cores (`cores`), and cores that a job leaves unused are lent (`lending`). The jobs
//! that borrow yield wherever another job wants the same core.

use super::config::{Config, JobGroup};
use super::identity::Identity;
use super::traffic::Traffic;
use crate::cgroup::file::BUFFER_BYTES;
use crate::cgroup::limits::{self, EnforcementReport, GroupLimits, KernelFeatures, Setting, WriteRecord};
use crate::cgroup::{BaseGroup, Controller, CpuList, Group, Hierarchy};
use crate::cores::{CoreSet, deal, weights};
use crate::lending::{CoreUse, lend};
use crate::machine::page_bytes;
use crate::{AppliedLimits, Capacity, Counters, JobHandle, LimitMode, RuntimeError};
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::JobId;
use gainshare_core::plan::Target;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The largest part of the memory that is protected from reclaim for all jobs together. The rest of the
/// machine needs memory, too.
const MAX_SPARED: f64 = 0.75;

/// A limit this close to 1 is no limit.
const WHOLE: f64 = 1.0 - 1e-6;

/// How old memory and bytes may be where only the CPU time matters.
const REST_AGE: Duration = Duration::from_secs(10);

/// How the files of a group are made to hold their values.
pub(super) type Enforce = fn(&Group, &[Setting], &mut WriteRecord, Instant) -> Result<EnforcementReport, RuntimeError>;

pub(super) struct CgroupJobs {
    base: BaseGroup,
    config: Config,
    mode: LimitMode,
    features: KernelFeatures,
    jobs: BTreeMap<String, CgroupJob>,
    notes: Vec<String>,
    traffic: Traffic,
    scratch: Box<[u8; BUFFER_BYTES]>,
}

struct CgroupJob {
    group: Group,
    /// Unknown until the job has started.
    leader: Option<Identity>,
    writes: WriteRecord,
    wanted: GroupLimits,
    /// The memory limit of the plan, before the working set was taken into account.
    memory_asked_bytes: Option<u64>,
    /// What the job was dealt last, in `cores` mode.
    cores: CoreSet,
    core_use: CoreUse,
    /// The last reading of all counters.
    last_read: Option<(Instant, Counters)>,
}

/// The cores of one job in `cores` mode.
struct DealtCores {
    set: CoreSet,
    borrowed: CpuList,
    /// The part of the whole that the job's cores are.
    weight: f64,
}

impl DealtCores {
    fn all(&self) -> CpuList {
        self.set.all().iter().chain(self.borrowed.iter()).collect()
    }

    /// Threads that run at once.
    fn team(&self) -> u32 {
        let own: CpuList = self.set.own.iter().chain(self.borrowed.iter()).collect();
        own.len().max(1) as u32
    }

    fn note(&self) -> String {
        let CoreSet { own, shared } = &self.set;
        let mut text = match own.is_empty() {
            true => format!("whole cores by share: less than one core, shares cores {shared}"),
            false => format!("whole cores by share: {} of its own ({own})", own.len()),
        };
        if !own.is_empty() && !shared.is_empty() {
            text += &format!(", shares core {shared}");
        }
        if !self.borrowed.is_empty() {
            text += &format!(", borrows {} while their jobs leave them unused", self.borrowed);
        }
        text
    }
}

impl std::fmt::Debug for CgroupJobs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CgroupJobs").field("base", &self.base).field("jobs", &self.jobs.keys()).finish_non_exhaustive()
    }
}

impl CgroupJob {
    fn new(group: Group, leader: Option<Identity>, writes: WriteRecord, wanted: GroupLimits) -> CgroupJob {
        let (cores, core_use) = (CoreSet::default(), CoreUse::default());
        CgroupJob { group, leader, writes, wanted, memory_asked_bytes: None, cores, core_use, last_read: None }
    }
}

/// Puts a job's limits back to the kernel's defaults without a runtime: for the guard, after the daemon died.
/// Does nothing if the job is gone.
pub fn restore(record: &JobGroup) -> Result<(), RuntimeError> {
    let Some(version) = record.version else { return Ok(()) };
    let group = match Group::reopen(&record.handle.key, version, &record.dirs) {
        Err(RuntimeError::Gone { .. }) => return Ok(()),
        other => other?,
    };
    let candidates = ["io.bfq.weight", "io.weight", "blkio.bfq.weight", "blkio.weight"];
    let features = KernelFeatures {
        version,
        all_cpus: group.parent_cpus().unwrap_or_default(),
        has_cpu_idle: group.has("cpu.idle"),
        block_weight_file: candidates.into_iter().find(|file| group.has(file)),
        page_bytes: page_bytes(),
    };
    put_defaults(&group, &features, &mut WriteRecord::default())
}

/// Writes the values of a new group. A foreign value is left alone: the group is about to be released.
fn put_defaults(group: &Group, features: &KernelFeatures, writes: &mut WriteRecord) -> Result<(), RuntimeError> {
    match limits::enforce(group, &limits::settings(features, &GroupLimits::default()), writes, Instant::now()) {
        Ok(_) | Err(RuntimeError::Gone { .. } | RuntimeError::ForeignWrite { .. }) => Ok(()),
        Err(other) => Err(other),
    }
}

impl CgroupJobs {
    pub(super) fn open(hierarchy: Hierarchy, config: Config) -> Result<CgroupJobs, RuntimeError> {
        let base = BaseGroup::open(hierarchy, &config.base)?;
        let features = KernelFeatures {
            version: base.version(),
            all_cpus: base.cpus().iter().copied().collect(),
            has_cpu_idle: base.has_cpu_idle(),
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
        let mode = config.mode;
        Ok(CgroupJobs {
            base,
            config,
            mode,
            features,
            jobs: BTreeMap::new(),
            notes,
            traffic,
            scratch: Box::new([0; BUFFER_BYTES]),
        })
    }

    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    pub(super) fn mode(&self) -> LimitMode {
        self.mode
    }

    pub(super) fn capacity(&self) -> Capacity {
        self.base.capacity()
    }

    pub(super) fn prepare(&mut self, job: JobId, name: &str) -> Result<JobGroup, RuntimeError> {
        if self.jobs.contains_key(name) {
            return Err(RuntimeError::Unsupported(format!("a job's group is already called {name}: use another name")));
        }
        let group = self.base.create(name)?;
        let wanted = GroupLimits {
            cpu_share: (self.mode != LimitMode::Quota).then(|| self.average_share()),
            max_tasks: self.config.max_tasks,
            ..GroupLimits::default()
        };
        let mut writes = WriteRecord::default();
        if let Err(error) =
            limits::enforce(&group, &limits::settings(&self.features, &wanted), &mut writes, Instant::now())
        {
            let _ = group.remove();
            return Err(error);
        }
        let record = JobGroup {
            handle: JobHandle { job, key: name.to_owned() },
            version: Some(group.version()),
            dirs: group.dirs().to_vec(),
            procs_files: group.procs_files(),
        };
        self.jobs.insert(name.to_owned(), CgroupJob::new(group, None, writes, wanted));
        self.base.set_weight_for(self.jobs.len());
        Ok(record)
    }

    /// The weight of a job that no plan has a target for yet.
    fn average_share(&self) -> f64 {
        let shares: Vec<f64> = self.jobs.values().filter_map(|j| j.wanted.cpu_share).collect();
        if shares.is_empty() { 1.0 } else { shares.iter().sum::<f64>() / shares.len() as f64 }
    }

    pub(super) fn started(&mut self, handle: &JobHandle, leader: Identity) -> Result<(), RuntimeError> {
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
        let writes = WriteRecord::adopt(&group, &self.features);
        let job = CgroupJob::new(group, Some(leader), writes, GroupLimits::default());
        self.jobs.insert(key.clone(), job);
        self.base.set_weight_for(self.jobs.len());
        Ok(())
    }

    fn job_mut(&mut self, handle: &JobHandle) -> Result<&mut CgroupJob, RuntimeError> {
        self.jobs.get_mut(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })
    }

    /// Every file is read with [`limits::enforce`], those whose values change with [`limits::enforce_changes`].
    pub(super) fn apply(
        &mut self,
        wanted: &[(JobHandle, CheckedTarget)],
        enforce: Enforce,
    ) -> Vec<Result<AppliedLimits, RuntimeError>> {
        let dealt = self.deal_cores(wanted);
        let one = |((handle, target), cores): (&(JobHandle, CheckedTarget), _)| {
            self.apply_one(handle, target, cores, enforce)
        };
        let results: Vec<_> = wanted.iter().zip(dealt).map(one).collect();
        let spared: u64 = self.jobs.values().map(|j| j.wanted.memory_spared_bytes).fold(0, u64::saturating_add);
        self.base.protect_memory(spared.min((self.capacity().memory_bytes as f64 * MAX_SPARED) as u64));
        results
    }

    /// In `cores` mode, the cores of each job; else `None` for all.
    fn deal_cores(&mut self, wanted: &[(JobHandle, CheckedTarget)]) -> Vec<Option<DealtCores>> {
        if self.mode != LimitMode::Cores || !self.base.has(Controller::CpuSet) {
            return wanted.iter().map(|_| None).collect();
        }
        let is_usable = |cpu: &u32| self.config.cpus.as_ref().is_none_or(|cpus| cpus.contains(*cpu));
        let cores: Vec<u32> = self.base.cpus().iter().copied().filter(is_usable).collect();
        let now = Instant::now();
        // Only jobs that still exist: no core is kept for an ended job.
        let mut live: Vec<(f64, CgroupJob)> = Vec::new();
        for (handle, target) in wanted {
            if let Some(mut job) = self.jobs.remove(&handle.key) {
                if let Ok(cpu_ns) = job.group.cpu_ns(&mut self.scratch) {
                    job.core_use.record(now, cpu_ns);
                }
                live.push((target.share.cpu.get(), job));
            }
        }
        let claims: Vec<f64> = live.iter().map(|(claim, _)| *claim).collect();
        let held: Vec<CoreSet> = live.iter().map(|(_, job)| job.cores.clone()).collect();
        let sets = deal(&cores, &claims, &held);
        let weights = weights(cores.len(), &claims, &sets);
        let mut uses: Vec<&mut CoreUse> = live.iter_mut().map(|(_, job)| &mut job.core_use).collect();
        let borrowed = lend(&cores, &sets, &claims, &mut uses, now);
        let mut dealt: BTreeMap<String, DealtCores> = BTreeMap::new();
        for ((((_, mut job), set), borrowed), weight) in live.into_iter().zip(sets).zip(borrowed).zip(weights) {
            let key = job.group.key().to_owned();
            job.cores = set.clone();
            dealt.insert(key.clone(), DealtCores { set, borrowed, weight });
            self.jobs.insert(key, job);
        }
        wanted.iter().map(|(handle, _)| dealt.remove(&handle.key).filter(|d| !d.all().is_empty())).collect()
    }

    fn apply_one(
        &mut self,
        handle: &JobHandle,
        target: &Target,
        cores: Option<DealtCores>,
        enforce: Enforce,
    ) -> Result<AppliedLimits, RuntimeError> {
        let capacity = self.base.capacity();
        let mode = self.mode;
        let max_tasks = self.config.max_tasks;
        let working_set_bytes = match target.limit.memory.get() < WHOLE && self.base.has(Controller::Memory) {
            true => self.read(handle)?.memory_bytes,
            false => 0,
        };
        let mut notes = self.notes.clone();
        notes.extend(cores.as_ref().map(DealtCores::note));
        let team = cores.as_ref().map(DealtCores::team);
        let share = cores.as_ref().map_or(target.share.cpu.get(), |cores| cores.weight);
        let job = self.jobs.get_mut(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })?;
        let below_whole = |limit: f64| (limit < WHOLE).then_some(limit);
        let asked = below_whole(target.limit.memory.get()).map(|l| (l * capacity.memory_bytes as f64) as u64);
        job.memory_asked_bytes = asked;
        job.wanted = GroupLimits {
            cpu_share: (mode != LimitMode::Quota).then_some(share),
            cpu_cap_cores: match mode {
                LimitMode::Quota => below_whole(target.limit.cpu.get()).map(|l| l * capacity.cores),
                LimitMode::Weight | LimitMode::Cores => None,
            },
            yields: cores.as_ref().is_some_and(|cores| !cores.borrowed.is_empty()),
            cpus: cores.map(|cores| cores.all()),
            memory_limit_bytes: asked.map(|asked| limits::memory_limit_bytes(asked, working_set_bytes)),
            memory_spared_bytes: asked.map_or(0, |_| (target.share.memory.get() * capacity.memory_bytes as f64) as u64),
            block_share: Some(target.share.block_io.get()),
            max_tasks,
        };
        let settings = limits::settings(&self.features, &job.wanted);
        match enforce(&job.group, &settings, &mut job.writes, Instant::now()) {
            Ok(report) => {
                notes.extend(report.notes);
                Ok(AppliedLimits { settings: report.in_force, notes, team })
            }
            Err(RuntimeError::Io { action, path, source, .. }) if source.raw_os_error() == Some(libc::EINVAL) => {
                // The likely cause: a quota above the base became smaller than the wanted one. The next plan
                // sees the new capacity.
                self.base.refresh();
                Err(RuntimeError::Io {
                    action,
                    path,
                    source,
                    hint: "; a limit above this group may have changed: reading it again",
                })
            }
            Err(other) => Err(other),
        }
    }

    /// What the job used, with the memory and the bytes of a reading that is at most [`REST_AGE`] old. Of a job whose
    /// memory is limited all is read: the limit may have to grow.
    pub(super) fn read_cpu(&mut self, handle: &JobHandle) -> Result<Counters, RuntimeError> {
        let job = self.jobs.get_mut(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })?;
        match job.last_read {
            Some((at, counters)) if job.memory_asked_bytes.is_none() && at.elapsed() < REST_AGE => {
                let cpu_ns = job.group.cpu_ns(&mut self.scratch)?;
                Ok(Counters { cpu_ns, ..counters })
            }
            _ => self.read(handle),
        }
    }

    pub(super) fn read(&mut self, handle: &JobHandle) -> Result<Counters, RuntimeError> {
        let job = self.jobs.get_mut(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })?;
        let mut counters = job.group.usage(&mut self.scratch)?;
        counters.net_bytes = self.traffic.job_bytes(&handle.key, Instant::now(), || job.group.pids());
        // A job that grows must not be slowed by a limit that was large enough a moment ago: v2 throttles
        // hard above memory.high.
        if let (Some(asked), Some(limit)) = (job.memory_asked_bytes, job.wanted.memory_limit_bytes)
            && limits::memory_limit_is_near(limit, counters.memory_bytes)
        {
            job.wanted.memory_limit_bytes = Some(limits::memory_limit_bytes(asked, counters.memory_bytes));
            let mut settings = limits::settings(&self.features, &job.wanted);
            settings.retain(|s| matches!(s.file, "memory.high" | "memory.soft_limit_in_bytes"));
            // A foreign write is reported by the next apply.
            let _ = limits::enforce(&job.group, &settings, &mut job.writes, Instant::now());
        }
        job.last_read = Some((Instant::now(), counters));
        Ok(counters)
    }

    pub(super) fn is_alive(&mut self, handle: &JobHandle) -> Result<bool, RuntimeError> {
        let job = self.job_mut(handle)?;
        if job.group.is_gone() {
            return Err(RuntimeError::Gone { key: handle.key.clone() });
        }
        // A job that is prepared but not started has no process in its group yet.
        Ok(job.leader.is_none() || job.group.is_populated()?)
    }

    pub(super) fn release(&mut self, handle: &JobHandle) -> Result<(), RuntimeError> {
        let Some(mut job) = self.jobs.remove(&handle.key) else { return Ok(()) };
        self.traffic.forget(&handle.key);
        self.base.set_weight_for(self.jobs.len());
        if job.group.is_gone() || job.group.remove()? {
            return Ok(());
        }
        put_defaults(&job.group, &self.features, &mut job.writes)
    }

    pub(super) fn terminate(&mut self, handle: &JobHandle) -> Result<(), RuntimeError> {
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

    pub(super) fn kill_once(&mut self, handle: &JobHandle) -> Result<bool, RuntimeError> {
        self.job_mut(handle)?.group.kill_once()
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
