//! Jobs that are containers: those we start, and those that asked for it by a label.
//!
//! The engine's events come from a thread that passes them on; a container that is new to us
//! becomes a job of its own, one that carries our job's number is that job. Requests to the engine
//! run on other threads; their results come back as tasks. Original limits are journaled before the first
//! change.

mod description;
mod requests;

pub(super) use requests::release_leftover;

use super::docker_link::DockerLink;
use super::intake::new_record;
use super::jobs::PendingEnd;
use super::observe::{bounded_end_s, earliest_end_s};
use super::start::{drop_environment, keep_limits, keep_record, read_environment};
use super::{Driver, DriverHandle};
use crate::clock::unix_s;
use crate::error::Refusal;
use crate::fail;
use crate::journal::Batch;
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
use requests::{container_row, launch};
use std::time::Duration;

/// Time between two attempts to reach an engine that does not answer.
const CONNECT_PACE: Span = Span::from_secs(5);

/// The engine records a container's start a moment after its first process began to write.
const START_SLACK_NS: u64 = 1_000_000_000;

/// How long a container's end may wait for the rest of its output.
const LAST_OUTPUT: Duration = Duration::from_secs(2);

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
        self.handle.off_thread("docker-connect", connect, |driver, result| driver.docker_connected(result));
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
                    self.fact(Some(id), Change::note(note));
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
        spec.name = Some(self.jobs.free_name(&spec.label()));
        let mut record = new_record(self.next_id()?, spec, false, self.clock.moment());
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

    /// The limits to put back, in the journal and, should that be lost, in the job's folder.
    fn add_container_limit(&mut self, id: JobId, original: OriginalLimits) {
        let row = container_row(&self.config, id, original);
        keep_limits(&self.paths, &row);
        self.store.add_limit(row);
    }

    fn container_taken(&mut self, id: JobId, container: &str, result: Result<OriginalLimits, RuntimeError>) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        job.is_busy = false;
        let (is_live, is_new) = (job.record.is_live(), job.record.state != JobState::Running);
        let error = match result {
            Ok(original) => {
                self.add_container_limit(id, original);
                None
            }
            Err(e) => Some(e),
        };
        if !is_live {
            let handle = JobHandle { job: id, key: container.to_owned() };
            return self.runtimes.docker.iter().for_each(|docker| docker.release(id, handle.clone()));
        }
        if is_new {
            fail::point("container-before-journal");
            let change = Change::Started { leader: None, container: Some(container.into()), notes: Vec::new() };
            self.fact(Some(id), change);
        }
        let _ = self.save();
        if is_new {
            if let Some(job) = self.jobs.get(&id) {
                keep_record(&self.paths, &job.record);
            }
            fail::point("container-after-journal");
            drop_environment(&self.paths, id);
            self.follow(id);
        }
        if let (Some(docker), Some(job)) = (&self.runtimes.docker, self.jobs.get_mut(&id)) {
            docker.begin_pumping(job, container, &self.paths.job(id.0));
        }
        if is_new {
            self.job_changed(id);
        }
        match error {
            None => self.apply_to(RuntimeKind::Docker, true),
            // A short one may be over before we could examine it.
            Some(RuntimeError::Gone { .. }) => {
                return self.runtimes.docker.iter().for_each(|docker| docker.read_exit_code(id, container));
            }
            Some(e) => {
                tracing::warn!(job = %id, "{e}");
                self.fact(Some(id), Change::note(format!("its limits cannot be changed: {e}")));
            }
        }
        if let Some(job) = self.jobs.get(&id).filter(|j| j.record.stop_requested) {
            self.runtimes.signal_stop(job, self.clock.now());
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
                driver.add_container_limit(id, original);
            }
            driver.applied(RuntimeKind::Docker, generation, results);
            let again = driver.runtimes.docker.as_mut().is_some_and(|docker| {
                docker.is_applying = false;
                std::mem::take(&mut docker.apply_again)
            });
            if again {
                driver.apply_to(RuntimeKind::Docker, true);
            }
        });
    }

    /// Journals the start of a container of our own and has it started.
    pub(super) fn admit_container(&mut self, id: JobId) -> Result<(), Refusal> {
        let engine = self.runtimes.docker()?.engine().clone();
        let record = &self.jobs[&id].record;
        let values = read_environment(&self.paths, record)?.spec.env;
        let order = StartOrder {
            attempt: record.attempt + 1,
            dir: self.paths.job(id.0).display().to_string(),
            env: self.picture().start_env(&self.push_access, record, &values),
            ..StartOrder::default()
        };
        let change = Change::Admitted { order, group: None };
        let at = self.clock.moment();
        let mut record = record.clone();
        record.take(at, &change);
        keep_record(&self.paths, &record);
        let batch = Batch { changes: vec![(at, Some(id), change)], records: vec![record.clone()], ..Batch::default() };
        self.save_with(batch)?;
        if let Some(job) = self.jobs.get_mut(&id) {
            job.record = record;
        }
        let record = &self.jobs[&id].record;
        let (spec, attempt) = (container_spec(&self.paths.state, record, values), record.attempt);
        launch(&self.handle, engine, spec, id, attempt);
        self.job_changed(id);
        Ok(())
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

    /// The job's end is recorded when the rest of its output was copied.
    fn container_ended(&mut self, id: JobId, exit_code: Option<i64>, oom_killed: bool) {
        let Some(job) = self.jobs.get_mut(&id) else { return };
        if std::mem::replace(&mut job.is_ending, true) {
            return;
        }
        let pump = job.pump.clone();
        let known =
            self.runtimes.docker.as_ref().map(|docker| docker.engine().clone()).zip(job.record.container.clone());
        let wait = move || {
            // The daemon may have been away when it ended.
            let ended_s = known.and_then(|(engine, container)| engine.ended_s(&container).ok().flatten());
            if let Some(pump) = pump {
                pump.wait_for_end(LAST_OUTPUT);
            }
            ended_s
        };
        self.handle.off_thread("container-output", wait, move |driver, ended_s| {
            driver.container_over(id, exit_code, oom_killed, ended_s);
        });
    }

    fn container_over(&mut self, id: JobId, exit_code: Option<i64>, oom_killed: bool, ended_s: Option<f64>) {
        let Some(job) = self.jobs.get(&id) else { return };
        let why = oom_killed.then(|| "the kernel killed it for want of memory".to_owned());
        let state = match (job.record.stop_requested, exit_code) {
            (true, _) => job.record.stopped_state(),
            (_, Some(0)) => JobState::Done,
            (_, Some(_)) => JobState::Failed,
            (_, None) => JobState::Lost,
        };
        let exit_code = exit_code.and_then(|c| i32::try_from(c).ok());
        let ended_s = ended_s.and_then(|ended_s| bounded_end_s(ended_s, earliest_end_s(&job.record), unix_s()));
        self.begin_end(id, PendingEnd { state, exit_code, signal: None, why, ended_s, replies: Vec::new() });
    }

    /// After a restart, a lapse, or a lost engine: takes charge again, or reads how the container ended.
    pub(super) fn find_container_again(&mut self, id: JobId) {
        let record = self.jobs[&id].record.clone();
        let Ok(engine) = self.runtimes.docker().map(|d| d.engine().clone()) else { return };
        match (record.container, record.state) {
            (Some(container), _) => self.take_container(id, &container),
            // It was about to start. If the engine has it already, it is found by its name.
            (None, JobState::Starting) => match read_environment(&self.paths, &self.jobs[&id].record) {
                Ok(file) => {
                    let spec = container_spec(&self.paths.state, &self.jobs[&id].record, file.spec.env);
                    launch(&self.handle, engine, spec, id, record.attempt);
                }
                Err(e) => self.end(id, JobState::Failed, None, None, Some(e.message)),
            },
            (None, _) => {}
        }
    }
}
