//! Jobs that are containers: those we start, and those that asked for it by a label.
//!
//! The engine's events come from a thread that passes them on; a container that is new to us
//! becomes a job of its own, one that carries our job's number is that job. Requests to the engine
//! run on other threads; their results come back as tasks. Original limits are journaled before the first
//! change.

mod description;

use super::docker_link::DockerLink;
use super::pump::Pump;
use super::runtimes::kind_name;
use super::{Driver, DriverHandle};
use crate::error::Refusal;
use crate::fail;
use crate::journal::{Batch, LimitRow};
use crate::record::Change;
use crate::restore::ContainerOriginal;
use crate::types::{JobState, StartOrder};
use description::{Recovery, adopted_spec, container_spec, is_container_of, recovery};
use gainshare_core::check::CheckedTarget;
use gainshare_core::model::{JobId, Span};
use gainshare_limits::docker::{
    AdoptionRule, ContainerInfo, ContainerSpec, DockerEvent, DockerRuntime, Engine, LogCursor, OriginalLimits,
    default_socket, labels,
};
use gainshare_limits::{JobHandle, Runtime, RuntimeError, RuntimeKind};
use std::collections::BTreeMap;
use std::time::Duration;

/// Time between two attempts to reach an engine that does not answer.
const CONNECT_PACE: Span = Span::from_secs(5);

/// The engine records a container's start a moment after its first process began to write.
const START_SLACK_NS: u64 = 1_000_000_000;

/// How long a container's end may wait for the rest of its output.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

/// How long the engine may take to put limits back when the daemon ends.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

/// How often, and with which pauses, an engine that does not answer is asked how a container ended.
const EXIT_CODE_TRIES: usize = 24;
const EXIT_CODE_PACE: Duration = Duration::from_secs(5);

/// Passes the engine's events on to the driver.
fn follow(engine: &Engine, adopt: AdoptionRule, handle: DriverHandle) -> std::io::Result<()> {
    let mut events = engine.events(adopt);
    // The follower reconnects by itself, so its end is unexpected.
    let sentinel = handle.sentinel("the thread of the Docker events");
    let work = move || {
        let _sentinel = sentinel;
        while let Some(event) = events.blocking_recv() {
            handle.send(move |driver| driver.docker_event(event));
        }
    };
    std::thread::Builder::new().name("docker-events".into()).stack_size(256 << 10).spawn(work).map(drop)
}

/// Starts a container, or takes the one of this name that an earlier daemon started for the same attempt.
fn start_or_take(engine: &Engine, spec: &ContainerSpec) -> Result<String, RuntimeError> {
    let error = match engine.create_and_start(spec) {
        Ok(id) => return Ok(id),
        Err(error) => error,
    };
    match engine.find(&spec.name) {
        Ok(Some(found)) => match recovery(&found, spec) {
            Recovery::Take => Ok(found.id),
            Recovery::StartAgain => {
                engine.remove(&found.id)?;
                engine.create_and_start(spec)
            }
            Recovery::Leave => Err(error),
        },
        _ => Err(error),
    }
}

impl Driver {
    /// Connects to the engine if the configuration asks for it and it is not connected yet.
    pub(super) fn connect_docker(&mut self) {
        let now = self.now();
        let runtimes = &mut self.runtimes;
        if !self.config.runtime.contains(&RuntimeKind::Docker)
            || runtimes.docker.is_some()
            || runtimes.is_connecting
            || now < runtimes.next_connect
        {
            return;
        }
        runtimes.is_connecting = true;
        runtimes.next_connect = now + CONNECT_PACE;
        let socket = self.config.docker_socket.clone().unwrap_or_else(default_socket);
        let mode = self.config.mode;
        let connect = move || DockerRuntime::connect(&socket, mode);
        self.off_thread("docker-connect", connect, |driver, result| driver.docker_connected(result));
    }

    /// Whether a job that needs the engine should wait for it rather than fail.
    pub(super) fn is_connecting_docker(&self) -> bool {
        self.runtimes.docker.is_none() && self.runtimes.is_connecting
    }

    fn docker_connected(&mut self, result: Result<DockerRuntime, RuntimeError>) {
        self.runtimes.is_connecting = false;
        let docker = match result {
            Ok(docker) => docker,
            Err(e) => {
                if self.problems.insert("docker", e.to_string()).is_none() {
                    tracing::warn!("{e}");
                }
                return;
            }
        };
        self.problems.remove("docker");
        let adopt = if self.config.docker_all { AdoptionRule::All } else { AdoptionRule::OptedIn };
        let engine = docker.engine().clone();
        let link = DockerLink::start(docker, self.handle.clone(), self.pulses.register("docker"));
        match link.and_then(|link| follow(&engine, adopt, self.handle.clone()).map(|()| link)) {
            Ok(link) => self.runtimes.docker = Some(link),
            Err(e) => return tracing::error!("cannot start a thread for the Docker engine: {e}"),
        }
        let is_held = |j: &super::Job| j.record.holds_slot() && j.record.spec.runtime == RuntimeKind::Docker;
        for id in self.jobs.ids(is_held) {
            self.find_container_again(id);
        }
        self.plans.is_wanted = true;
    }

    fn docker_event(&mut self, event: DockerEvent) {
        match event {
            DockerEvent::Appeared(info) => self.container_appeared(info),
            DockerEvent::Died { id, exit_code, oom_killed } => {
                if let Some(job) = self.jobs.by_container(&id).map(|j| j.record.id) {
                    self.container_ended(job, exit_code, oom_killed);
                }
            }
            DockerEvent::Oom { id } => {
                let note = "the kernel killed one of its processes for want of memory".to_owned();
                let job = self.jobs.by_container(&id).filter(|j| !j.record.notes.contains(&note));
                if let Some(id) = job.map(|j| j.record.id) {
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
        if self.jobs.by_container(&info.id).is_some_and(|j| j.record.state == JobState::Running) {
            return;
        }
        if let Some(own) = info.labels.get(labels::JOB) {
            // Numbers of another daemon or of another journal mean other jobs.
            let ours = own.parse().ok().map(JobId).filter(|id| {
                self.jobs.get(id).is_some_and(|j| {
                    j.record.state == JobState::Starting && is_container_of(&info, &self.paths.state, &j.record)
                })
            });
            if let Some(id) = ours {
                return self.take_container(id, &info.id);
            }
            if info.name.starts_with("gainshare-") {
                return;
            }
        }
        if self.timeline.ending.is_none()
            && let Err(e) = self.adopt_container(&info)
        {
            tracing::warn!("container {} cannot be adopted: {e}", info.name);
        }
    }

    /// Makes a job of a container that was not started by us.
    fn adopt_container(&mut self, info: &ContainerInfo) -> Result<(), Refusal> {
        let (mut spec, notes) = adopted_spec(info, self.config.docker_trust_labels);
        spec.name = Some(self.free_name(&spec.label()));
        let mut record = self.new_record(self.store.journal.next_id()?, spec, false);
        record.adopted = true;
        record.notes = notes;
        let id = record.id;
        self.enter(vec![record], Vec::new())?;
        // What it wrote before it became our job belongs to it, from its last start on.
        if let Some(job) = self.jobs.get_mut(&id) {
            job.progress.copied.cursor = LogCursor::since_ns(info.started_ns.saturating_sub(START_SLACK_NS));
        }
        self.take_container(id, &info.id);
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
        let is_taken = |n: &str| self.jobs.values().any(|j| j.record.is_live() && j.record.name == n);
        let numbered = (2..).map(|n| format!("{name}-{n}"));
        std::iter::once(name.clone()).chain(numbered).find(|n| !is_taken(n)).unwrap_or(name)
    }

    /// Takes charge of a running container: its original limits are read now and on disk before any limit is changed.
    fn take_container(&mut self, id: JobId, container: &str) {
        let known = self.store.journal.limit(container).unwrap_or_default();
        let known = known.and_then(|row| serde_json::from_str::<ContainerOriginal>(&row.original).ok());
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(docker) = &self.runtimes.docker else { return };
        if std::mem::replace(&mut job.is_busy, true) {
            return;
        }
        let (key, container) = (container.to_owned(), container.to_owned());
        let adopt = move |docker: &mut DockerRuntime| {
            docker.adopt(id, &key, known.map(|k| k.original)).map(|(_, original)| original)
        };
        docker.run(adopt, move |driver, result| driver.container_taken(id, &container, result));
    }

    fn container_taken(&mut self, id: JobId, container: &str, result: Result<OriginalLimits, RuntimeError>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.is_busy = false;
        let (is_live, is_new) = (job.record.is_live(), job.record.state != JobState::Running);
        let error = match result {
            Ok(original) => {
                let row = self.container_row(id, original);
                self.store.add_limit(row);
                None
            }
            Err(e) => Some(e),
        };
        if !is_live {
            return self.release_container(id, JobHandle { job: id, key: container.to_owned() });
        }
        if is_new {
            fail::point("container-before-journal");
            let change = Change::Started { leader: None, container: Some(container.into()), notes: Vec::new() };
            self.fact(Some(id), change);
        }
        let _ = self.save();
        if is_new {
            fail::point("container-after-journal");
            self.drop_environment(id);
            self.begin_watching(id);
        }
        self.begin_pumping(id, container);
        if is_new {
            self.job_changed(id);
        }
        match error {
            None => self.apply_to(RuntimeKind::Docker),
            // A short one may be over before we could examine it.
            Some(RuntimeError::Gone { .. }) => return self.read_exit_code(id, container),
            Some(e) => {
                tracing::warn!(job = %id, "{e}");
                self.fact(Some(id), Change::Noted { note: format!("its limits cannot be changed: {e}") });
            }
        }
        if self.jobs.get(&id).is_some_and(|j| j.record.stop_requested) {
            self.signal_stop(id);
        }
    }

    fn container_row(&self, job: JobId, original: OriginalLimits) -> LimitRow {
        let key = original.id.clone();
        let kept = ContainerOriginal { original, socket: self.config.docker_socket.clone() };
        let original = serde_json::to_string(&kept).unwrap_or_default();
        LimitRow { key, job, runtime: kind_name(RuntimeKind::Docker).into(), original }
    }

    fn begin_pumping(&mut self, id: JobId, container: &str) {
        let dir = self.paths.job(id.0);
        let (Some(docker), Some(job)) = (&self.runtimes.docker, self.jobs.get_mut(&id)) else { return };
        if job.pump.is_some() {
            return;
        }
        match Pump::start(docker.engine(), container, &dir, job.progress.copied) {
            Ok(pump) => job.pump = Some(pump),
            Err(e) => tracing::warn!(job = %id, "its output cannot be followed: {e}"),
        }
    }

    /// Writes limits on the runtime's thread. While the engine is busy with the last ones, the newest targets wait.
    pub(super) fn apply_to_containers(&mut self, generation: u64, wanted: Vec<(JobId, JobHandle, CheckedTarget)>) {
        let Some(docker) = &mut self.runtimes.docker else { return };
        if docker.is_applying {
            docker.apply_again = true;
            return;
        }
        docker.is_applying = true;
        let has_lapsed = self.lease.lapse_check();
        let apply = move |docker: &mut DockerRuntime| {
            if has_lapsed() {
                return (Vec::new(), Vec::new());
            }
            let targets: Vec<(JobHandle, CheckedTarget)> = wanted.iter().map(|(_, h, t)| (h.clone(), *t)).collect();
            let results = docker.apply(generation, &targets);
            // What will be put back changes when another program sets a container's limits.
            let is_failed = |result: &Result<_, _>| matches!(result, Err(e) if !matches!(e, RuntimeError::Gone { .. }));
            let failed = wanted.iter().zip(&results).filter(|(_, result)| is_failed(result));
            let originals: Vec<(JobId, OriginalLimits)> =
                failed.filter_map(|((id, handle, _), _)| Some((*id, docker.original(handle)?.clone()))).collect();
            let ids = wanted.into_iter().map(|(id, _, _)| id);
            (ids.zip(results).collect::<Vec<_>>(), originals)
        };
        docker.run(apply, move |driver, (results, originals)| {
            for (id, original) in originals {
                let row = driver.container_row(id, original);
                driver.store.add_limit(row);
            }
            driver.applied(RuntimeKind::Docker, generation, results);
            let again = driver.runtimes.docker.as_mut().is_some_and(|docker| {
                docker.is_applying = false;
                std::mem::take(&mut docker.apply_again)
            });
            if again {
                driver.apply_to(RuntimeKind::Docker);
            }
        });
    }

    /// Reads what all containers used so far. Decisions see the counters of the last reading, which
    /// is at most about a second old.
    pub(super) fn read_container_usage(&mut self) {
        let is_running = |j: &super::Job| {
            j.record.state == JobState::Running && j.record.spec.runtime == RuntimeKind::Docker && !j.is_busy
        };
        let handles: Vec<JobHandle> =
            self.jobs.values().filter(|j| is_running(j)).filter_map(super::Job::handle).collect();
        let Some(docker) = self.runtimes.docker.as_mut().filter(|d| !d.is_reading && !handles.is_empty()) else {
            return;
        };
        docker.is_reading = true;
        let read = move |docker: &mut DockerRuntime| {
            handles.iter().filter_map(|h| Some((h.job, docker.read(h).ok()?))).collect::<Vec<_>>()
        };
        docker.run(read, |driver, counters| {
            let (now, whole) = (driver.now(), driver.whole());
            for (id, counters) in counters {
                if let Some(job) = driver.jobs.get_mut(&id) {
                    job.progress.meter.record(now, counters, &whole);
                }
            }
            if let Some(docker) = &mut driver.runtimes.docker {
                docker.is_reading = false;
            }
        });
    }

    /// Puts a container's limits back.
    pub(super) fn release_container(&mut self, id: JobId, handle: JobHandle) {
        let Some(docker) = &self.runtimes.docker else { return };
        let key = handle.key.clone();
        docker
            .run(move |docker| docker.release(&handle), move |driver, result| driver.limits_released(id, key, result));
    }

    /// Puts the limits of all containers back before the daemon ends.
    pub(super) fn release_all_containers(&mut self, handles: Vec<JobHandle>) {
        let Some(docker) = &self.runtimes.docker else { return };
        let release = move |docker: &mut DockerRuntime| {
            handles.into_iter().map(|h| (h.job, docker.release(&h), h.key)).collect::<Vec<_>>()
        };
        match docker.run_within(RELEASE_LIMIT, release) {
            Some(results) => {
                for (id, result, key) in results {
                    self.limits_released(id, key, result);
                }
            }
            None => tracing::error!("the Docker engine is too slow: limits of containers were not put back"),
        }
    }

    /// Starts a container of our own. The engine may take long, so this happens on another thread.
    pub(super) fn admit_container(&mut self, id: JobId) -> Result<(), Refusal> {
        let engine = self.runtimes.docker()?.engine().clone();
        let values = self.read_environment(id)?.spec.env;
        let record = &self.jobs[&id].record;
        let order = StartOrder {
            attempt: record.attempt + 1,
            dir: self.paths.job(id.0).display().to_string(),
            env: self.start_env(record, &values),
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
        self.launch_container(id, engine, values);
        self.job_changed(id);
        Ok(())
    }

    fn launch_container(&mut self, id: JobId, engine: Engine, values: BTreeMap<String, String>) {
        let record = &self.jobs[&id].record;
        let (spec, attempt) = (container_spec(&self.paths.state, record, values), record.attempt);
        self.off_thread(
            "container-start",
            move || start_or_take(&engine, &spec),
            move |driver, result| driver.container_launched(id, attempt, result),
        );
    }

    fn container_launched(&mut self, id: JobId, attempt: u32, result: Result<String, RuntimeError>) {
        let is_waiting = |j: &super::Job| j.record.state == JobState::Starting && j.record.attempt == attempt;
        if !self.jobs.get(&id).is_some_and(is_waiting) {
            // The event of its start was faster, or the job was stopped meanwhile.
            return;
        }
        match result {
            Ok(container) => self.take_container(id, &container),
            Err(e) => self.end(id, JobState::Failed, None, None, Some(e.to_string())),
        }
    }

    pub(super) fn stop_container(&mut self, id: JobId) -> Result<(), RuntimeError> {
        let now = self.now();
        let Some(job) = self.jobs.get(&id) else { return Ok(()) };
        let Some(container) = job.record.container.clone() else { return Ok(()) };
        let grace = Duration::from_secs_f64(job.kill_at.map_or(0.0, |at| at.since(now).as_secs_f64()));
        let engine = self.runtimes.docker()?.engine().clone();
        self.off_thread(
            "container-stop",
            move || engine.stop(&container, grace),
            move |_, result| {
                if let Err(e) = result {
                    tracing::warn!(job = %id, "{e}");
                }
            },
        );
        Ok(())
    }

    /// The job's end is recorded when the rest of its output was copied.
    fn container_ended(&mut self, id: JobId, exit_code: Option<i64>, oom_killed: bool) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if std::mem::replace(&mut job.is_ending, true) {
            return;
        }
        let pump = job.pump.clone();
        let wait = move || {
            if let Some(pump) = pump {
                pump.wait_for_end(LAST_OUTPUT);
            }
        };
        self.off_thread("container-output", wait, move |driver, ()| driver.container_over(id, exit_code, oom_killed));
    }

    fn container_over(&mut self, id: JobId, exit_code: Option<i64>, oom_killed: bool) {
        let Some(job) = self.jobs.get(&id) else { return };
        let why = oom_killed.then(|| "the kernel killed it for want of memory".to_owned());
        let state = match (job.record.stop_requested, exit_code) {
            (true, _) => JobState::Stopped,
            (_, Some(0)) => JobState::Done,
            (_, Some(_)) => JobState::Failed,
            (_, None) => JobState::Lost,
        };
        self.end(id, state, exit_code.and_then(|c| i32::try_from(c).ok()), None, why);
    }

    /// Removes the container of a job whose end is recorded, if we started it.
    pub(super) fn remove_container(&mut self, id: JobId) {
        let Some(job) = self.jobs.get(&id) else { return };
        let (is_adopted, container) = (job.record.adopted, job.record.container.clone());
        if let (false, Some(container), Ok(docker)) = (is_adopted, container, self.runtimes.docker()) {
            let engine = docker.engine().clone();
            // Its output is copied and its exit code known: nothing is left to keep it for.
            self.off_thread(
                "container-remove",
                move || engine.remove(&container),
                |_, result| {
                    if let Err(e) = result {
                        tracing::warn!("{e}");
                    }
                },
            );
        }
    }

    /// A container that no longer runs: the engine knows how it ended, unless it was removed.
    fn read_exit_code(&mut self, id: JobId, container: &str) {
        let Ok(engine) = self.runtimes.docker().map(|d| d.engine().clone()) else { return };
        let container = container.to_owned();
        let read = move || {
            for _ in 0..EXIT_CODE_TRIES {
                match engine.exit_code(&container) {
                    Ok(code) => return code,
                    Err(RuntimeError::Gone { .. }) => return None,
                    Err(e) => tracing::warn!(job = %id, "how it ended is not known yet: {e}"),
                }
                std::thread::sleep(EXIT_CODE_PACE);
            }
            None
        };
        self.off_thread("container-exit", read, move |driver, code| driver.container_ended(id, code, false));
    }

    /// After a restart, a lapse, or a lost engine: takes charge again, or reads how the container ended.
    pub(super) fn find_container_again(&mut self, id: JobId) {
        let record = self.jobs[&id].record.clone();
        let Ok(engine) = self.runtimes.docker().map(|d| d.engine().clone()) else { return };
        match (record.container, record.state) {
            (Some(container), _) => self.take_container(id, &container),
            // It was about to start. If the engine has it already, it is found by its name.
            (None, JobState::Starting) => match self.read_environment(id) {
                Ok(file) => self.launch_container(id, engine, file.spec.env),
                Err(e) => self.end(id, JobState::Failed, None, None, Some(e.message)),
            },
            (None, _) => {}
        }
    }

    /// Puts limits back of a container that is no job any more, from the journal's row.
    pub(super) fn release_leftover_container(&mut self, row: LimitRow) {
        let restore = move || {
            let result = crate::restore::restore(&row);
            (row, result)
        };
        self.off_thread("container-restore", restore, |driver, (row, result)| match result {
            Ok(()) => driver.store.remove_limit(row.key),
            Err(e) => tracing::warn!(job = %row.job, "limits could not be put back: {e}"),
        });
    }

    /// [`DriverHandle::off_thread`]; a machine without threads to spare is a failure of the daemon.
    pub(super) fn off_thread<T: Send + 'static>(
        &mut self,
        name: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Driver, T) + Send + 'static,
    ) {
        if let Err(e) = self.handle.off_thread(name, work, then) {
            tracing::error!("cannot start the thread {name}: {e}");
            self.part_ended(name);
        }
    }
}
