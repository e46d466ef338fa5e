//! Sharing without cgroup rights: scheduling priority where it can be restored, else stop and continue.
//! Feature `fallback`.
//!
//! **Problem.** On many machines a user may not make cgroups. Plain `nice` does not help: an ordinary user
//! can lower a job's priority but never raise it again, and where the kernel groups sessions for scheduling
//! (*autogroups*) it has no effect between sessions at all.
//!
//! **Approach.** Each job has a session of its own. If the kernel schedules by session, the priority of the
//! session is a weight, and an ordinary user may restore it: that is used in `weight` mode. Everywhere else,
//! and for hard caps, the job's process groups are stopped and continued in slices of a fifth of a second
//! ([`duty`]). `cores` mode binds threads to CPUs, which needs no right at all. Stopping and priorities are
//! left to the [`keeper`], a process that releases every job when the daemon is gone.
//!
//! **What it cannot do**, and its notes name: limit memory and I/O, contain a process that leaves the session
//! and loses its parent, or be as exact as the kernel. A job that stops itself is continued.
//!
//! **Properties.** No job is stopped while the daemon is dead. A pid that was reused is not touched. Use only
//! ever grows.

mod duty;
pub mod keeper;
mod link;
mod pacer;
mod table;

pub use pacer::{PacedJob, Pacer, continue_group};

use super::config::{Config, JobGroup};
use super::identity::{Identity, ProcessStat, ticks_per_second};
use super::traffic::Traffic;
use crate::cores::{CoreSet, deal};
use crate::cpus::CpuList;
use crate::{AppliedLimits, Capacity, Counters, JobHandle, LimitMode, RuntimeError, machine};
use duty::{JobDemand, Window};
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::JobId;
use gainshare_core::plan::Target;
use keeper::PERIOD_US;
use link::KeeperLink;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use table::ProcessTable;

/// One step of priority is a factor of 1.25 in weight; 19 steps are the most.
const NICE_STEP: f64 = 1.25;

#[derive(Debug)]
pub(super) struct FallbackJobs {
    config: Config,
    mode: LimitMode,
    capacity: Capacity,
    cpus: Vec<u32>,
    /// Whether the kernel schedules sessions, so that their priority is a weight.
    by_session: bool,
    link: Option<KeeperLink>,
    jobs: BTreeMap<String, FallbackJob>,
    table: ProcessTable,
    traffic: Traffic,
    notes: Vec<String>,
    ticks_per_second: u64,
}

#[derive(Debug)]
struct FallbackJob {
    /// Unknown until the job has started.
    leader: Option<Identity>,
    target: Option<Target>,
    window: Window,
    nice: i32,
    cpus: Option<CpuList>,
    /// The same, own and shared ones apart.
    cores: Option<CoreSet>,
    demand_cores: f64,
    /// When `used` was last taken for the demand, and what it was.
    measured: Option<(Instant, u64)>,
    used: Counters,
    members: Vec<(i32, ProcessStat)>,
}

impl FallbackJobs {
    /// `why` names the missing right.
    pub(super) fn open(config: Config, why: &str) -> FallbackJobs {
        let cpus: Vec<u32> = machine::own_affinity().iter().collect();
        let cores = std::thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
        // Without cgroups no core can be lent, so that whole cores are a choice of the user only.
        let mode = config.mode;
        let by_session = mode == LimitMode::Weight && sessions_are_scheduled();
        let link = config.keeper.as_ref().and_then(|command| KeeperLink::start(command).ok());
        let mut notes = vec![format!("no cgroups: {why}")];
        notes.push(match (&link, mode) {
            (_, LimitMode::Cores) => {
                "CPUs are given by binding the job's threads to them; jobs on the same CPU compete freely".into()
            }
            (None, _) => {
                "the CPU is not shared by plan: the keeper, which stops and continues jobs, does not run".into()
            }
            _ if by_session => "the CPU is shared by scheduling priority, in steps of a quarter".into(),
            _ => "the CPU is shared by stopping and continuing the job's processes in slices of a fifth of a second"
                .into(),
        });
        notes.push("memory and I/O are counted but not limited".into());
        let mut traffic = Traffic::default();
        notes.extend(traffic.probe().err());
        FallbackJobs {
            capacity: Capacity { cores, memory_bytes: machine::memory_bytes(Path::new(machine::ROOT)) },
            ticks_per_second: ticks_per_second(),
            config,
            mode,
            cpus,
            by_session,
            link,
            jobs: BTreeMap::new(),
            table: ProcessTable::default(),
            traffic,
            notes,
        }
    }

    pub(super) fn notes(&self) -> &[String] {
        &self.notes
    }

    pub(super) fn mode(&self) -> LimitMode {
        self.mode
    }

    /// Whether the CPU is shared by stopping and continuing jobs.
    pub(super) fn stops_jobs(&self) -> bool {
        self.link.is_some() && !self.by_session && self.mode != LimitMode::Cores
    }

    pub(super) fn capacity(&self) -> Capacity {
        self.capacity
    }

    pub(super) fn prepare(&mut self, job: JobId, name: &str) -> Result<JobGroup, RuntimeError> {
        if self.jobs.contains_key(name) {
            return Err(RuntimeError::Unsupported(format!("a job is already called {name}: use another name")));
        }
        self.jobs.insert(name.to_owned(), self.new_job(None));
        Ok(JobGroup {
            handle: JobHandle { job, key: name.to_owned() },
            version: None,
            dirs: Vec::new(),
            procs_files: Vec::new(),
        })
    }

    fn new_job(&self, leader: Option<Identity>) -> FallbackJob {
        FallbackJob {
            leader,
            target: None,
            window: Window::ALWAYS,
            nice: 0,
            cpus: None,
            cores: None,
            // A job that was not measured yet counts as one that uses every core.
            demand_cores: self.capacity.cores,
            measured: None,
            used: Counters::default(),
            members: Vec::new(),
        }
    }

    pub(super) fn started(&mut self, handle: &JobHandle, leader: Identity) -> Result<(), RuntimeError> {
        self.job_mut(handle)?.leader = Some(leader);
        Ok(())
    }

    pub(super) fn adopt(&mut self, record: &JobGroup, leader: Identity) -> Result<(), RuntimeError> {
        let key = &record.handle.key;
        self.jobs.insert(key.clone(), self.new_job(Some(leader)));
        if self.is_alive(&record.handle)? {
            return Ok(());
        }
        self.jobs.remove(key);
        Err(RuntimeError::Gone { key: key.clone() })
    }

    fn job_mut(&mut self, handle: &JobHandle) -> Result<&mut FallbackJob, RuntimeError> {
        self.jobs.get_mut(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })
    }

    pub(super) fn apply(&mut self, wanted: &[(JobHandle, CheckedTarget)]) -> Vec<Result<AppliedLimits, RuntimeError>> {
        for (handle, target) in wanted {
            if let Some(job) = self.jobs.get_mut(&handle.key) {
                job.target = Some(**target);
            }
        }
        self.scan();
        self.deal_cores();
        self.rebalance();
        wanted.iter().map(|(handle, _)| self.in_force(handle)).collect()
    }

    fn in_force(&self, handle: &JobHandle) -> Result<AppliedLimits, RuntimeError> {
        let gone = || RuntimeError::Gone { key: handle.key.clone() };
        let job = self.jobs.get(&handle.key).filter(|job| !job.is_over()).ok_or_else(gone)?;
        let mut settings = Vec::new();
        if self.by_session {
            settings.push(("autogroup.nice".into(), job.nice.to_string()));
        } else if self.mode != LimitMode::Cores {
            settings.push(("duty-cycle".into(), format!("{:.0}%", job.window.on * 100.0)));
        }
        if let Some(cpus) = &job.cpus {
            settings.push(("affinity".into(), cpus.to_string()));
        }
        let team = job.cores.as_ref().map(|set| set.own.len().max(1) as u32);
        Ok(AppliedLimits { settings, notes: self.notes.clone(), team })
    }

    /// Takes stock of all jobs' processes.
    fn scan(&mut self) {
        let now = Instant::now();
        self.table.scan(now);
        self.update_members(now);
    }

    fn update_members(&mut self, now: Instant) {
        let leaders: Vec<i32> = self.jobs.values().filter_map(|j| Some(j.leader?.pid)).collect();
        let mut members = self.table.members(&leaders);
        for job in self.jobs.values_mut() {
            let Some(leader) = job.leader else { continue };
            let mine = members.remove(&leader.pid).unwrap_or_default();
            // A session whose number now belongs to a process that started at another time is not ours.
            let reused = mine.iter().any(|(pid, stat)| *pid == leader.pid && stat.start_ticks != leader.start_ticks);
            job.members = if reused { Vec::new() } else { mine };
            job.count(self.ticks_per_second);
            job.measure(now, self.capacity.cores);
        }
    }

    /// Computes when each job may run, and sends it to the keeper.
    fn rebalance(&mut self) {
        let cores = self.capacity.cores;
        let by_session = self.by_session;
        let mode = self.mode;
        let mut live: Vec<&mut FallbackJob> =
            self.jobs.values_mut().filter(|j| j.target.is_some() && !j.is_over()).collect();
        let share = |job: &FallbackJob| job.target.map_or(1.0, |t| t.share.cpu.get());
        if by_session {
            let largest = live.iter().map(|j| share(j)).fold(0.0, f64::max);
            for job in &mut live {
                job.nice = nice_for(share(job), largest);
            }
        } else if mode != LimitMode::Cores {
            let cap = |job: &FallbackJob| match (mode, job.target) {
                (LimitMode::Quota, Some(target)) if target.limit.cpu.get() < 1.0 => target.limit.cpu.get() * cores,
                _ => f64::INFINITY,
            };
            let demands: Vec<JobDemand> = live
                .iter()
                // With caps the shares do not count.
                .map(|j| JobDemand {
                    share: if mode == LimitMode::Quota { 1.0 } else { share(j) },
                    cap_cores: cap(j),
                    demand_cores: j.demand_cores,
                })
                .collect();
            for (job, window) in live.iter_mut().zip(duty::windows(cores, &demands)) {
                job.window = window;
            }
        }
        self.send_to_keeper();
    }

    fn send_to_keeper(&mut self) {
        let Some(link) = &mut self.link else { return };
        let lines: Vec<(String, String)> = self
            .jobs
            .iter()
            .filter(|(_, job)| job.target.is_some() && !job.is_over())
            .map(|(key, job)| (key.clone(), job.line(key)))
            .collect();
        if link.send(&lines).is_ok() {
            return;
        }
        // The keeper is dead. The jobs it had stopped must run, before anything else.
        for job in self.jobs.values() {
            job.groups().into_iter().for_each(|leader| signal_group(&leader, Signal::SIGCONT));
        }
        let command = self.config.keeper.as_deref().unwrap_or_default();
        match KeeperLink::start(command) {
            Ok(new) => {
                *link = new;
                let _ = link.send(&lines);
            }
            Err(error) => {
                self.notes.push(format!(
                    "the keeper cannot be started again ({error}): the CPU is not shared by plan any more"
                ));
                self.link = None;
                self.jobs.values_mut().for_each(|job| job.window = Window::ALWAYS);
            }
        }
    }

    fn deal_cores(&mut self) {
        if self.mode != LimitMode::Cores {
            return;
        }
        let keys: Vec<String> =
            self.jobs.iter().filter(|(_, j)| j.target.is_some() && !j.is_over()).map(|(key, _)| key.clone()).collect();
        let claims: Vec<f64> = keys.iter().map(|k| self.jobs[k].target.map_or(1.0, |t| t.share.cpu.get())).collect();
        let held: Vec<CoreSet> = keys.iter().map(|k| self.jobs[k].cores.clone().unwrap_or_default()).collect();
        for (key, set) in keys.iter().zip(deal(&self.cpus, &claims, &held)) {
            let job = self.jobs.get_mut(key).expect("the key is from the map");
            let cpus = set.all();
            bind(&job.members, &cpus);
            job.cpus = Some(cpus);
            job.cores = Some(set);
        }
    }

    pub(super) fn read(&mut self, handle: &JobHandle) -> Result<Counters, RuntimeError> {
        self.job_mut(handle)?;
        let now = Instant::now();
        if self.table.refresh(now) {
            self.update_members(now);
            // Threads started since the last plan are bound too, demands have changed, and the keeper needs a
            // heartbeat.
            for job in self.jobs.values().filter(|j| j.cpus.is_some()) {
                bind(&job.members, job.cpus.as_ref().expect("just filtered"));
            }
            self.rebalance();
        }
        let job = self.jobs.get(&handle.key).ok_or_else(|| RuntimeError::Gone { key: handle.key.clone() })?;
        let members = || job.members.iter().map(|(pid, _)| *pid).collect();
        Ok(Counters { net_bytes: self.traffic.job_bytes(&handle.key, now, members), ..job.used })
    }

    pub(super) fn is_alive(&mut self, handle: &JobHandle) -> Result<bool, RuntimeError> {
        let leader = self.job_mut(handle)?.leader;
        let Some(leader) = leader else { return Ok(true) };
        if leader.is_alive() {
            return Ok(true);
        }
        let now = Instant::now();
        if self.table.refresh(now) || self.job_mut(handle)?.members.iter().all(|(pid, _)| *pid == leader.pid) {
            self.scan();
        }
        Ok(!self.job_mut(handle)?.members.is_empty())
    }

    pub(super) fn release(&mut self, handle: &JobHandle) -> Result<(), RuntimeError> {
        let Some(job) = self.jobs.remove(&handle.key) else { return Ok(()) };
        self.traffic.forget(&handle.key);
        if let Some(link) = &mut self.link {
            let _ = link.free(&handle.key);
        }
        if job.cpus.is_some() {
            bind(&job.members, &self.cpus.iter().copied().collect());
        }
        Ok(())
    }

    pub(super) fn terminate(&mut self, handle: &JobHandle) -> Result<(), RuntimeError> {
        self.scan();
        let job = self.job_mut(handle)?;
        job.target = None;
        let groups = job.groups();
        // A stopped process handles SIGTERM only once it runs again, and needs CPU time to save.
        if let Some(link) = &mut self.link {
            let _ = link.free(&handle.key);
        }
        for leader in groups {
            signal_group(&leader, Signal::SIGTERM);
            signal_group(&leader, Signal::SIGCONT);
        }
        Ok(())
    }

    pub(super) fn kill_once(&mut self, handle: &JobHandle) -> Result<bool, RuntimeError> {
        self.job_mut(handle)?;
        self.scan();
        let members = &self.job_mut(handle)?.members;
        for (pid, _) in members {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        Ok(members.is_empty())
    }
}

impl FallbackJob {
    /// None of its processes runs any more; a job that has not started is not over.
    fn is_over(&self) -> bool {
        self.leader.is_some_and(|leader| self.members.is_empty() && !leader.is_alive())
    }

    /// The leaders of the process groups the job's processes are in, its own first.
    fn groups(&self) -> Vec<Identity> {
        self.leader.map_or_else(Vec::new, |leader| groups(leader, &self.members))
    }

    fn line(&self, key: &str) -> String {
        keeper_line(key, PERIOD_US, self.window, self.nice, &self.groups())
    }

    /// Adds up use. A child that ends leaves its use to the parent that waits for it; what is lost otherwise must not
    /// make a counter go back.
    fn count(&mut self, ticks_per_second: u64) {
        let ticks_of = |s: &ProcessStat| s.cpu_ticks.saturating_add(s.children_cpu_ticks);
        let ticks = self.members.iter().map(|(_, s)| ticks_of(s)).fold(0, u64::saturating_add);
        self.used.cpu_ns = self.used.cpu_ns.max(ticks.saturating_mul(1_000_000_000 / ticks_per_second.max(1)));
        self.used.memory_bytes =
            self.members.iter().filter_map(|(pid, _)| private_bytes(*pid)).fold(0, u64::saturating_add);
        let block = self.members.iter().filter_map(|(pid, _)| block_bytes(*pid)).reduce(u64::saturating_add);
        self.used.block_bytes = self.used.block_bytes.max(block);
    }

    /// How many cores it uses while it may run.
    fn measure(&mut self, now: Instant, cores: f64) {
        let Some((then, before)) = self.measured else {
            self.measured = Some((now, self.used.cpu_ns));
            return;
        };
        let may_run_s = now.saturating_duration_since(then).as_secs_f64() * self.window.on;
        // Clock ticks are coarse: a shorter time would be noise.
        if may_run_s < 0.3 {
            return;
        }
        let now_cores = (self.used.cpu_ns.saturating_sub(before) as f64 / 1e9 / may_run_s).clamp(0.05, cores);
        // Up at once, down slowly: a pause to read data does not lower the demand much.
        self.demand_cores = now_cores.max(0.6 * self.demand_cores + 0.4 * now_cores);
        self.measured = Some((now, self.used.cpu_ns));
    }
}

/// The leaders of the process groups that a job's processes are in, that of its own leader first.
fn groups(leader: Identity, members: &[(i32, ProcessStat)]) -> Vec<Identity> {
    let mut groups = vec![leader];
    for (_, stat) in members {
        if !groups.iter().any(|g| g.pid == stat.group) {
            let start_ticks = members.iter().find(|(pid, _)| *pid == stat.group).map(|(_, s)| s.start_ticks);
            groups.extend(start_ticks.map(|start_ticks| Identity { pid: stat.group, start_ticks }));
        }
    }
    groups[1..].sort();
    groups
}

/// The line by which the keeper holds a job.
fn keeper_line(key: &str, period_us: u64, window: Window, nice: i32, groups: &[Identity]) -> String {
    let us = |fraction: f64| (fraction * period_us as f64).round() as u64;
    let mut line = format!("set {key} {} {} {nice} {period_us}", us(window.offset), us(window.on));
    for group in groups {
        line.push_str(&format!(" {}:{}", group.pid, group.start_ticks));
    }
    line
}

fn nice_for(share: f64, largest: f64) -> i32 {
    if share <= 0.0 {
        return 19;
    }
    ((largest / share).ln() / NICE_STEP.ln()).round().clamp(0.0, 19.0) as i32
}

fn signal_group(leader: &Identity, which: Signal) {
    if leader.pid > 1 && !leader.was_reused() {
        let _ = killpg(Pid::from_raw(leader.pid), which);
    }
}

/// Memory the process does not share with others, so that workers that were forked are not counted twice.
fn private_bytes(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let mut fields = text.split_ascii_whitespace().skip(1).map(|f| f.parse::<u64>().ok());
    let (resident, shared) = (fields.next()??, fields.next()??);
    Some(resident.saturating_sub(shared).saturating_mul(machine::page_bytes()))
}

fn block_bytes(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name)?.trim().parse::<u64>().ok());
    Some(field("read_bytes:")?.saturating_add(field("write_bytes:")?))
}

/// Binds every thread of the processes to `cpus`.
fn bind(members: &[(i32, ProcessStat)], cpus: &CpuList) {
    let mut mask = nix::sched::CpuSet::new();
    cpus.iter().for_each(|cpu| _ = mask.set(cpu as usize));
    for (pid, _) in members {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
        for thread in threads.flatten() {
            if let Some(id) = thread.file_name().to_str().and_then(|name| name.parse().ok()) {
                let _ = nix::sched::sched_setaffinity(Pid::from_raw(id), &mask);
            }
        }
    }
}

/// Whether the kernel makes a scheduling group of each session, and this process is where that counts: only
/// tasks in the topmost cpu cgroup are grouped that way. In a container another group may look like the
/// topmost one, so the files that only the topmost group has (or lacks) are checked.
fn sessions_are_scheduled() -> bool {
    let enabled = std::fs::read_to_string("/proc/sys/kernel/sched_autogroup_enabled").is_ok_and(|t| t.trim() == "1");
    enabled && crate::cgroup::in_topmost_cpu_group(Path::new(machine::ROOT))
}
