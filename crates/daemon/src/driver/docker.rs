//! Jobs that are containers: those we start, and those that opted in by label.
//!
//! The engine's events come from a thread that passes them on; a container that is new to us becomes a job of its own, one that carries
//! our job's number is that job. A container's output is copied into the job's output.log by a thread of its own ([`Pump`]), so that reports,
//! `logs` and restarts work as for a process. Original limits are journaled before the first change.

use super::jobs::kind_name;
use super::{Driver, DriverHandle, Job};
use crate::api::types::{JobState, StartOrder};
use crate::error::Refusal;
use crate::guard::ContainerOriginal;
use crate::journal::{Batch, LimitRow};
use crate::record::{Change, JobRecord};
use crate::spec::{JobSpec, parse_mount};
use gainshare_core::model::{JobId, Span};
use gainshare_limits::docker::{
    AdoptionRule, Bind, ContainerInfo, ContainerSpec, DockerEvent, Engine, LogCursor, OriginalLimits, labels,
};
use gainshare_limits::{RuntimeError, RuntimeKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An engine that does not answer at the start is tried again so often.
const ENGINE_PACE: Span = Span::from_secs(5);

/// As a supervisor does it.
const LOG_ROTATED_AT: u64 = 64 << 20;

/// The engine notes a container's start a moment after its first process began to write.
const START_SLACK_NS: u64 = 1_000_000_000;

/// How long a container's end may wait for the rest of its output.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// How far a container's output was copied: the engine's cursor and the number of bytes written before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Copied {
    cursor: LogCursor,
    bytes: u64,
}

/// Copies one container's output into its job's output.log.
#[derive(Debug)]
pub(super) struct Pump {
    copied: Arc<Mutex<Copied>>,
    ended: Arc<Mutex<bool>>,
}

impl Pump {
    /// Goes on after `from`. Bytes that the file has beyond it were copied by a daemon that died before it could note so; the engine
    /// hands out the same bytes again, and they are skipped.
    fn start(engine: &Engine, container: &str, dir: &Path, from: Copied) -> std::io::Result<Pump> {
        let mut file = OpenOptions::new().create(true).append(true).open(dir.join("output.log"))?;
        let mut length = file.metadata()?.len();
        let base: u64 =
            std::fs::read_to_string(dir.join("output.base")).ok().and_then(|t| t.trim().parse().ok()).unwrap_or(0);
        let mut total = base + length;
        let mut skip = total.saturating_sub(from.bytes);
        let mut chunks = engine.follow_logs(container, from.cursor);
        let pump = Pump { copied: Arc::new(Mutex::new(from)), ended: Arc::new(Mutex::new(false)) };
        let (copied, ended, dir) = (pump.copied.clone(), pump.ended.clone(), dir.to_path_buf());
        let work = move || {
            while let Some(chunk) = chunks.blocking_recv() {
                let known = skip.min(chunk.bytes.len() as u64) as usize;
                skip -= known as u64;
                let fresh = &chunk.bytes[known..];
                if length >= LOG_ROTATED_AT
                    && let Ok(next) = rotate(&dir, total)
                {
                    file = next;
                    length = 0;
                }
                // A full disk loses log, not the job.
                if file.write_all(fresh).is_ok() {
                    length += fresh.len() as u64;
                    total += fresh.len() as u64;
                }
                if skip == 0 {
                    *copied.lock().unwrap_or_else(|e| e.into_inner()) = Copied { cursor: chunk.cursor, bytes: total };
                }
            }
            *ended.lock().unwrap_or_else(|e| e.into_inner()) = true;
        };
        std::thread::Builder::new().name("container-log".into()).stack_size(256 << 10).spawn(work)?;
        Ok(pump)
    }

    pub(super) fn copied(&self) -> Copied {
        *self.copied.lock().unwrap_or_else(|e| e.into_inner())
    }

    fn wait_for_the_end(&self) {
        let begun = std::time::Instant::now();
        while !*self.ended.lock().unwrap_or_else(|e| e.into_inner()) && begun.elapsed() < LAST_OUTPUT {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn rotate(dir: &Path, total: u64) -> std::io::Result<std::fs::File> {
    std::fs::write(dir.join("output.base"), total.to_string())?;
    std::fs::rename(dir.join("output.log"), dir.join("output.log.1"))?;
    OpenOptions::new().create(true).append(true).open(dir.join("output.log"))
}

/// Passes the engine's events on to the driver.
fn follow(engine: &Engine, adopt: AdoptionRule, handle: DriverHandle) {
    let mut events = engine.events(adopt);
    let work = move || {
        while let Some(event) = events.blocking_recv() {
            handle.tell(move |driver| driver.docker_event(event));
        }
    };
    if let Err(e) = std::thread::Builder::new().name("docker-events".into()).stack_size(256 << 10).spawn(work) {
        tracing::error!("cannot follow the Docker engine: {e}");
    }
}

impl Driver {
    /// Connects to the engine if it is wanted and not there yet.
    pub(super) fn look_for_docker(&mut self) {
        let now = self.now();
        if !self.config.runtime.contains(&RuntimeKind::Docker)
            || self.runtimes.docker.is_some()
            || now < self.next_engine
        {
            return;
        }
        self.next_engine = now + ENGINE_PACE;
        match self.runtimes.open_docker(&self.config) {
            Ok(engine) => {
                self.problems.remove("docker");
                let adopt = if self.config.docker_all { AdoptionRule::All } else { AdoptionRule::OptedIn };
                follow(&engine, adopt, self.handle.clone());
                let held = |j: &&Job| j.record.holds_slot() && j.record.spec.runtime == RuntimeKind::Docker;
                let held: Vec<JobId> = self.jobs.values().filter(held).map(|j| j.record.id).collect();
                for id in held {
                    self.find_container_again(id);
                }
                self.wants_decision = true;
            }
            Err(e) => {
                if self.problems.insert("docker", e.to_string()).is_none() {
                    tracing::warn!("{e}");
                }
            }
        }
    }

    fn docker_event(&mut self, event: DockerEvent) {
        match event {
            DockerEvent::Appeared(info) => self.container_appeared(info),
            DockerEvent::Died { id, exit_code, oom_killed } => {
                let job = self.jobs.values().find(|j| j.record.is_live() && j.record.container.as_ref() == Some(&id));
                if let Some(job) = job.map(|j| j.record.id) {
                    self.container_ended(job, exit_code, oom_killed);
                }
            }
            DockerEvent::Oom { id } => {
                let note = "the kernel killed one of its processes for want of memory".to_owned();
                let job = self.jobs.values().find(|j| j.record.is_live() && j.record.container.as_ref() == Some(&id));
                if let Some(id) = job.filter(|j| !j.record.notes.contains(&note)).map(|j| j.record.id) {
                    self.fact(Some(id), Change::Noted { note });
                }
            }
            DockerEvent::EngineLost { why } => {
                tracing::warn!("the Docker engine does not answer: {why}");
                self.problems.insert("docker", format!("the Docker engine does not answer: {why}"));
            }
            DockerEvent::EngineBack => {
                self.problems.remove("docker");
            }
        }
    }

    /// A container runs: one we know already, one we started, or a new job.
    fn container_appeared(&mut self, info: ContainerInfo) {
        if self
            .jobs
            .values()
            .any(|j| j.record.state == JobState::Running && j.record.container.as_ref() == Some(&info.id))
        {
            return;
        }
        if let Some(own) = info.labels.get(labels::JOB) {
            // Numbers of another daemon mean other jobs: the container's name tells whose it is.
            let ours = own.parse().ok().map(JobId).filter(|id| {
                self.jobs.get(id).is_some_and(|j| {
                    j.record.state == JobState::Starting && container_name(&self.paths.state, &j.record) == info.name
                })
            });
            if let Some(id) = ours {
                return self.container_started(id, &info.id);
            }
            if info.name.starts_with("gainshare-") {
                return;
            }
        }
        if self.ending.is_none()
            && let Err(e) = self.adopt_container(&info)
        {
            tracing::warn!("container {} cannot be adopted: {e}", info.name);
        }
    }

    /// Makes a job of somebody's container.
    fn adopt_container(&mut self, info: &ContainerInfo) -> Result<(), Refusal> {
        let label = |name: &str| info.labels.get(name).cloned();
        let number = |name: &str| label(name).and_then(|t| t.parse::<f64>().ok()).filter(|x| (0.0..=1.0).contains(x));
        let mut spec = JobSpec::new(Vec::new());
        spec.runtime = RuntimeKind::Docker;
        spec.image = Some(info.image.clone());
        spec.name = Some(self.free_name(&label(labels::NAME).unwrap_or_else(|| info.name.clone())));
        spec.owner = label(labels::OWNER);
        spec.floor = number(labels::FLOOR).unwrap_or(0.0);
        spec.max = number(labels::MAX).filter(|max| *max > 0.0 && *max >= spec.floor).unwrap_or(1.0);
        spec.metric.name = label(labels::METRIC);
        let mut record = self.new_record(self.journal.next_id()?, spec, false);
        record.adopted = true;
        self.enter(vec![record.clone()], BTreeMap::new())?;
        // What it wrote before it became our job belongs to it, from its last start on.
        if let Some(job) = self.jobs.get_mut(&record.id) {
            job.progress.copied.cursor = LogCursor::since_ns(info.started_ns.saturating_sub(START_SLACK_NS));
        }
        self.container_started(record.id, &info.id);
        Ok(())
    }

    /// A name for a container's job that no live job has.
    fn free_name(&self, wanted: &str) -> String {
        let mut name: String = wanted
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
            .take(50)
            .collect();
        if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || name.chars().all(|c| c.is_ascii_digit()) {
            name = format!("c-{name}");
        }
        let taken = |n: &str| self.jobs.values().any(|j| j.record.is_live() && j.record.name == n);
        let numbered = (2..).map(|n| format!("{name}-{n}"));
        std::iter::once(name.clone()).chain(numbered).find(|n| !taken(n)).unwrap_or(name)
    }

    /// Takes charge of a running container: its original limits are on disk before any limit is changed.
    fn container_started(&mut self, id: JobId, container: &str) {
        let charge = self.take_charge(id, container);
        self.fact(Some(id), Change::Started { leader: None, container: Some(container.into()), notes: Vec::new() });
        let _ = self.save();
        self.begin_watching(id);
        self.begin_pumping(id, container);
        self.job_changed(id);
        match charge {
            Ok(()) => {}
            // A short one may be over before we could look.
            Err(RuntimeError::Gone { .. }) => return self.learn_the_end(id, container),
            Err(e) => {
                tracing::warn!(job = %id, "{e}");
                self.fact(Some(id), Change::Noted { note: format!("its limits cannot be changed: {e}") });
            }
        }
        if self.jobs.get(&id).is_some_and(|j| j.record.stop_requested) {
            self.signal_stop(id);
        }
    }

    fn take_charge(&mut self, id: JobId, container: &str) -> Result<(), RuntimeError> {
        let rows = self.journal.limits().unwrap_or_default();
        let known = rows.iter().find(|row| row.key == container);
        let known = known.and_then(|row| serde_json::from_str::<ContainerOriginal>(&row.original).ok());
        let docker = self.runtimes.docker()?;
        let (_, original) = docker.adopt(id, container, known.map(|k| k.original))?;
        let row = self.container_row(id, original);
        self.unsaved.limits.push(row);
        Ok(())
    }

    fn container_row(&self, job: JobId, original: OriginalLimits) -> LimitRow {
        let key = original.id.clone();
        let kept = ContainerOriginal { original, socket: self.config.docker_socket.clone() };
        let original = serde_json::to_string(&kept).unwrap_or_default();
        LimitRow { key, job, runtime: kind_name(RuntimeKind::Docker).into(), original }
    }

    /// What will be put back changes when somebody else sets a container's limits.
    pub(super) fn note_originals(&mut self) {
        let mut rows = Vec::new();
        for job in self.jobs.values().filter(|j| j.apply_error.is_some()) {
            let Some(handle) = job.handle().filter(|_| job.record.spec.runtime == RuntimeKind::Docker) else {
                continue;
            };
            if let Some(original) = self.runtimes.docker.as_ref().and_then(|d| d.original(&handle)) {
                rows.push(self.container_row(job.record.id, original.clone()));
            }
        }
        self.unsaved.limits.extend(rows);
    }

    fn begin_pumping(&mut self, id: JobId, container: &str) {
        let dir = self.paths.job(id.0);
        let (Ok(docker), Some(job)) = (self.runtimes.docker(), self.jobs.get_mut(&id)) else { return };
        match Pump::start(docker.engine(), container, &dir, job.progress.copied) {
            Ok(pump) => job.pump = Some(pump),
            Err(e) => tracing::warn!(job = %id, "its output cannot be followed: {e}"),
        }
    }

    /// Starts a container of our own. The engine may take long, so this happens on another thread.
    pub(super) fn admit_container(&mut self, id: JobId) -> Result<(), Refusal> {
        let engine = self.runtimes.docker()?.engine().clone();
        let record = &self.jobs[&id].record;
        let order = StartOrder {
            attempt: record.attempt + 1,
            dir: self.paths.job(id.0).display().to_string(),
            env: self.start_env(record),
            ..StartOrder::default()
        };
        let change = Change::Admitted { order, group: None };
        let at = self.clock.moment();
        let mut record = record.clone();
        record.take(at, &change);
        let batch = Batch { changes: vec![(at, Some(id), change)], records: vec![record.clone()], ..Batch::default() };
        self.save_with(batch)?;
        if let Some(job) = self.jobs.get_mut(&id) {
            job.record = record;
        }
        self.launch(id, engine);
        self.job_changed(id);
        Ok(())
    }

    fn launch(&mut self, id: JobId, engine: Engine) {
        let record = &self.jobs[&id].record;
        let (spec, attempt) = (container_spec(&self.paths.state, record), record.attempt);
        let handle = self.handle.clone();
        let work = move || {
            let result = engine.create_and_start(&spec);
            handle.tell(move |driver| driver.launched(id, attempt, result));
        };
        if let Err(e) = std::thread::Builder::new().name("container-start".into()).spawn(work) {
            self.end(id, JobState::Failed, None, None, Some(format!("cannot start a thread: {e}")));
        }
    }

    fn launched(&mut self, id: JobId, attempt: u32, result: Result<String, RuntimeError>) {
        let waits = |j: &Job| j.record.state == JobState::Starting && j.record.attempt == attempt;
        if !self.jobs.get(&id).is_some_and(waits) {
            // The event of its start was faster, or the job was stopped meanwhile.
            return;
        }
        match result {
            Ok(container) => self.container_started(id, &container),
            Err(e) => self.end(id, JobState::Failed, None, None, Some(e.to_string())),
        }
    }

    pub(super) fn stop_container(&mut self, id: JobId) -> Result<(), RuntimeError> {
        let now = self.now();
        let Some(job) = self.jobs.get(&id) else { return Ok(()) };
        let Some(container) = job.record.container.clone() else { return Ok(()) };
        let grace = job.kill_at.map_or(0.0, |at| at.since(now).as_secs_f64());
        self.runtimes.docker()?.engine().stop(&container, Duration::from_secs_f64(grace))
    }

    fn container_ended(&mut self, id: JobId, exit_code: Option<i64>, oom_killed: bool) {
        let Some(job) = self.jobs.get(&id) else { return };
        if let Some(pump) = &job.pump {
            pump.wait_for_the_end();
        }
        let job = &self.jobs[&id];
        let why = oom_killed.then(|| "the kernel killed it for want of memory".to_owned());
        let state = match (job.record.stop_requested, exit_code) {
            (true, _) => JobState::Stopped,
            (_, Some(0)) => JobState::Done,
            (_, Some(_)) => JobState::Failed,
            (_, None) => JobState::Lost,
        };
        let (adopted, container) = (job.record.adopted, job.record.container.clone());
        self.end(id, state, exit_code.map(|c| c as i32), None, why);
        if let (false, Some(container), Ok(docker)) = (adopted, container, self.runtimes.docker()) {
            let engine = docker.engine().clone();
            // Its output is copied and its exit code known: nothing is left to keep it for.
            let remove = move || {
                if let Err(e) = engine.remove(&container) {
                    tracing::warn!("{e}");
                }
            };
            let _ = std::thread::Builder::new().name("container-remove".into()).spawn(remove);
        }
    }

    /// A container that no longer runs: the engine knows how it ended, unless it was removed.
    fn learn_the_end(&mut self, id: JobId, container: &str) {
        let code = self.runtimes.docker().and_then(|d| d.engine().exit_code(container));
        self.container_ended(id, code.ok().flatten(), false);
    }

    /// After a restart: takes charge again, or learns how it ended.
    pub(super) fn find_container_again(&mut self, id: JobId) {
        let record = self.jobs[&id].record.clone();
        let Ok(engine) = self.runtimes.docker().map(|d| d.engine().clone()) else { return };
        let Some(container) = record.container else {
            // It was about to start. If the engine has it, its appearance is reported; the name keeps it from being started twice.
            if record.state == JobState::Starting {
                self.launch(id, engine);
            }
            return;
        };
        match self.take_charge(id, &container) {
            Ok(()) => self.begin_pumping(id, &container),
            Err(RuntimeError::Gone { .. }) => {
                self.begin_pumping(id, &container);
                self.learn_the_end(id, &container);
            }
            Err(e) => tracing::warn!(job = %id, "{e}"),
        }
    }
}

impl Driver {
    /// After a lapse: the limits we knew are not in force any more.
    pub(super) fn take_charge_again(&mut self, id: JobId) {
        let Some(container) = self.jobs.get(&id).and_then(|j| j.record.container.clone()) else { return };
        if let Err(e) = self.take_charge(id, &container) {
            tracing::warn!(job = %id, "{e}");
        }
    }
}

/// One container for each attempt of a job of a daemon: the engine refuses a second of the name.
fn container_name(state_dir: &Path, record: &JobRecord) -> String {
    let base = super::runtimes::base_name(state_dir);
    format!("{base}-{}-{}", record.id.0, record.attempt)
}

fn container_spec(state_dir: &Path, record: &JobRecord) -> ContainerSpec {
    let spec = &record.spec;
    let mut env = BTreeMap::new();
    env.extend(record.order.iter().flat_map(|o| &o.env).map(|v| (v.name.clone(), v.value.clone())));
    env.extend(spec.env.clone());
    // The job's directory is where the job file says, inside as outside, so that the same file runs under both runtimes.
    let mut binds: Vec<Bind> = spec
        .cwd
        .iter()
        .filter(|cwd| cwd.parent().is_some())
        .map(|cwd| Bind { host: cwd.clone(), container: cwd.clone(), read_only: false })
        .collect();
    binds.extend(spec.mounts.iter().filter_map(|m| parse_mount(m)).map(|(host, inside, read_only)| Bind {
        host: PathBuf::from(host),
        container: PathBuf::from(inside),
        read_only,
    }));
    let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
    ContainerSpec {
        name: container_name(state_dir, record),
        image: spec.image.clone().unwrap_or_default(),
        command: spec.command.clone(),
        clear_entrypoint: !spec.command.is_empty(),
        env,
        workdir: spec.cwd.clone().filter(|cwd| cwd.parent().is_some()),
        binds,
        labels: BTreeMap::from([
            (labels::JOB.to_owned(), record.id.0.to_string()),
            (labels::ATTEMPT.to_owned(), record.attempt.to_string()),
            (labels::NAME.to_owned(), record.name.clone()),
        ]),
        // What it writes should belong to whoever asked for it.
        user: (!uid.is_root()).then(|| format!("{uid}:{gid}")),
        init: true,
        ..ContainerSpec::default()
    }
}
