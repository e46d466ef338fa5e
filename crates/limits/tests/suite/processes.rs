//! Real processes for the tests of the process runtime: a [`Fixture`] starts jobs as the daemon does and
//! removes every group it made.

use super::suite::Subject;
use gainshare_core::model::JobId;
use gainshare_limits::cgroup::{CpuList, Group, Hierarchy};
use gainshare_limits::process::{Config, Identity, JobGroup, ProcessRuntime, start};
use gainshare_limits::{JobHandle, LimitMode, Runtime};
use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

/// Uses a whole CPU and needs nothing but a shell.
pub(crate) const BUSY: &str = "while :; do :; done";

/// Outlasts every test.
pub(crate) const WAITING: &str = "exec sleep 3600";

pub(crate) struct Fixture {
    pub(crate) runtime: ProcessRuntime,
    pub(crate) config: Config,
    pub(crate) jobs: BTreeMap<String, (Child, JobGroup)>,
    next: u64,
}

impl Fixture {
    /// A runtime with a base group of its own on this machine's real hierarchy.
    pub(crate) fn new(mode: LimitMode) -> Fixture {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let config = Config { mode, ..Config::new(format!("gainshare-test-{}-{n}", std::process::id())) };
        let hierarchy = Hierarchy::detect().expect("these tests need the right to make cgroups (root)");
        let runtime = ProcessRuntime::on(hierarchy, config.clone()).expect("a base group");
        Fixture { runtime, config, jobs: BTreeMap::new(), next: 0 }
    }

    /// Starts `script` in a shell as a job; on `cpu`, if given.
    pub(crate) fn start(&mut self, script: &str, cpu: Option<u32>) -> JobHandle {
        self.start_program(&["sh", "-c", script], cpu)
    }

    pub(crate) fn start_program(&mut self, words: &[&str], cpu: Option<u32>) -> JobHandle {
        self.next += 1;
        let name = format!("job-{}", self.next);
        let group = self.runtime.prepare(JobId(self.next), &name).expect("prepare");
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).stdin(Stdio::null());
        let cpus = cpu.map(|cpu| CpuList::new(vec![cpu]));
        start::enter(&mut command, &group.procs_files, cpus.as_ref()).expect("enter");
        let child = command.spawn().expect("start");
        let leader = Identity::of(child.id() as i32).expect("the child's identity");
        self.runtime.started(&group.handle, leader).expect("started");
        let handle = group.handle.clone();
        self.jobs.insert(name, (child, group));
        handle
    }

    pub(crate) fn record(&self, job: &JobHandle) -> &JobGroup {
        &self.jobs[&job.key].1
    }

    pub(crate) fn leader(&self, job: &JobHandle) -> Identity {
        Identity::of(self.jobs[&job.key].0.id() as i32).expect("the leader runs")
    }

    pub(crate) fn pid(&self, job: &JobHandle) -> i32 {
        self.jobs[&job.key].0.id() as i32
    }

    /// The job's group, opened beside the runtime.
    pub(crate) fn group(&self, job: &JobHandle) -> Group {
        let record = self.record(job);
        Group::reopen(&job.key, record.version.expect("a cgroup"), &record.dirs).expect("the group is there")
    }
}

impl Subject for Fixture {
    fn runtime(&mut self) -> &mut dyn Runtime {
        &mut self.runtime
    }

    fn start_busy(&mut self) -> JobHandle {
        self.start(BUSY, Some(0))
    }

    fn start_waiting(&mut self) -> JobHandle {
        self.start(WAITING, Some(0))
    }

    fn end(&mut self, job: &JobHandle) {
        if let Some((child, _)) = self.jobs.get_mut(&job.key) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn limits_outside(&mut self, job: &JobHandle) -> Vec<(String, String)> {
        let group = self.group(job);
        [
            "cpu.shares",
            "cpu.cfs_quota_us",
            "cpu.cfs_period_us",
            "cpu.weight",
            "cpu.max",
            "cpuset.cpus",
            "cpu.idle",
            "memory.soft_limit_in_bytes",
            "memory.high",
            "memory.low",
            "blkio.bfq.weight",
            "blkio.weight",
            "io.weight",
            "io.bfq.weight",
            "pids.max",
        ]
        .iter()
        .filter_map(|name| {
            Some((name.to_string(), group.get(name).ok()?.lines().next().unwrap_or_default().to_owned()))
        })
        .collect()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        let handles: Vec<JobHandle> = self.jobs.values().map(|(_, group)| group.handle.clone()).collect();
        for (child, group) in self.jobs.values_mut() {
            let _ = child.kill();
            let _ = child.wait();
            // Processes that the leader left behind are killed too.
            if let Ok(group) = Group::reopen("job", group.version.expect("a cgroup"), &group.dirs) {
                let _ = group.kill();
            }
        }
        for handle in handles {
            let _ = self.runtime.release(&handle);
        }
        self.runtime.close();
    }
}
