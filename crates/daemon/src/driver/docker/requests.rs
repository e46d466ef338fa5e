//! Requests to the engine about single containers. They run on other threads, and their results come back as tasks.

use super::super::docker_link::DockerLink;
use super::super::handle::DriverHandle;
use super::super::jobs::{Job, JobTable};
use super::super::pump::Pump;
use super::super::runtimes::kind_name;
use super::start_or_take;
use crate::config::DaemonConfig;
use crate::journal::LimitRow;
use crate::restore::ContainerOriginal;
use crate::types::JobState;
use gainshare_core::model::{JobId, Span};
use gainshare_limits::docker::{ContainerSpec, DockerRuntime, Engine, OriginalLimits};
use gainshare_limits::{JobHandle, Runtime, RuntimeError, RuntimeKind};
use std::path::Path;
use std::time::Duration;

/// How long the engine may take to put limits back when the daemon ends.
const RELEASE_LIMIT: Duration = Duration::from_secs(10);

/// Time after which a request to stop a container that the engine did not take is sent again.
const STOP_PACE: Span = Span::from_secs(1);

/// How often, and with which pauses, an engine that does not answer is asked how a container ended.
const EXIT_CODE_TRIES: usize = 24;
const EXIT_CODE_PACE: Duration = Duration::from_secs(5);

impl DockerLink {
    /// Copies a container's output into its job's folder from now on.
    pub(super) fn begin_pumping(&self, job: &mut Job, container: &str, dir: &Path) {
        if job.pump.is_some() {
            return;
        }
        match Pump::start(self.engine(), container, dir, job.progress.copied) {
            Ok(pump) => job.pump = Some(pump),
            Err(e) => tracing::warn!(job = %job.record.id, "its output cannot be followed: {e}"),
        }
    }

    /// Reads what all containers used so far. Decisions see the counters of the last reading, which
    /// is at most about a second old.
    pub(in crate::driver) fn read_usage(&mut self, jobs: &JobTable) {
        let is_running = |j: &&Job| {
            j.record.state == JobState::Running && j.record.spec.runtime == RuntimeKind::Docker && !j.is_busy
        };
        let handles: Vec<JobHandle> = jobs.values().filter(is_running).filter_map(Job::handle).collect();
        if self.is_reading || handles.is_empty() {
            return;
        }
        self.is_reading = true;
        let read = move |docker: &mut DockerRuntime| {
            handles.iter().filter_map(|h| Some((h.job, docker.read(h).ok()?))).collect::<Vec<_>>()
        };
        self.run(read, |driver, counters| {
            let (now, whole) = (driver.now(), driver.runtimes.whole(&driver.config));
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
    pub(in crate::driver) fn release(&self, id: JobId, handle: JobHandle) {
        let key = handle.key.clone();
        self.run(move |docker| docker.release(&handle), move |driver, result| driver.limits_released(id, key, result));
    }

    /// Puts the limits of all containers back before the daemon ends: the result of each, with its key.
    pub(in crate::driver) fn release_all(
        &self,
        handles: Vec<JobHandle>,
    ) -> Vec<(JobId, Result<(), RuntimeError>, String)> {
        let release = move |docker: &mut DockerRuntime| {
            handles.into_iter().map(|h| (h.job, docker.release(&h), h.key)).collect::<Vec<_>>()
        };
        self.run_within(RELEASE_LIMIT, release).unwrap_or_else(|| {
            tracing::error!("the Docker engine is too slow: limits of containers were not put back");
            Vec::new()
        })
    }

    /// Asks a container to stop, and ends it after the grace.
    pub(in crate::driver) fn stop(&self, id: JobId, container: String, grace: Duration) {
        let engine = self.engine().clone();
        self.handle().off_thread(
            "container-stop",
            move || engine.stop(&container, grace),
            move |driver, result| {
                let Err(e) = result else { return };
                tracing::warn!(job = %id, "{e}");
                let again_at = driver.now() + STOP_PACE;
                // The end of a container that is gone comes as an event.
                if !matches!(e, RuntimeError::Gone { .. })
                    && let Some(job) = driver.jobs.get_mut(&id)
                {
                    job.stop_again_at = Some(again_at);
                }
            },
        );
    }

    /// Removes a container whose job's end is recorded.
    pub(in crate::driver) fn remove(&self, container: String) {
        let engine = self.engine().clone();
        // Its output is copied and its exit code known: nothing is left to keep it for.
        self.handle().off_thread(
            "container-remove",
            move || engine.remove(&container),
            |_, result| {
                if let Err(e) = result {
                    tracing::warn!("{e}");
                }
            },
        );
    }

    /// A container that no longer runs: the engine knows how it ended, unless it was removed.
    pub(super) fn read_exit_code(&self, id: JobId, container: &str) {
        let engine = self.engine().clone();
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
        self.handle().off_thread("container-exit", read, move |driver, code| driver.container_ended(id, code, false));
    }
}

impl JobTable {
    /// A name for a container's job that no live job has.
    pub(super) fn free_name(&self, wanted: &str) -> String {
        let mut name: String = wanted
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' })
            .take(50)
            .collect();
        if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) || name.chars().all(|c| c.is_ascii_digit()) {
            name = format!("c-{name}");
        }
        let is_taken = |n: &str| self.values().any(|j| j.record.is_live() && j.record.name == n);
        let numbered = (2..).map(|n| format!("{name}-{n}"));
        std::iter::once(name.clone()).chain(numbered).find(|n| !is_taken(n)).unwrap_or(name)
    }
}

/// Starts a container of our own. The engine may take long, so this happens on another thread.
pub(super) fn launch(handle: &DriverHandle, engine: Engine, spec: ContainerSpec, id: JobId, attempt: u32) {
    handle.off_thread(
        "container-start",
        move || start_or_take(&engine, &spec),
        move |driver, result| driver.container_launched(id, attempt, result),
    );
}

/// Puts limits back of a container that is no job any more, from the journal's row.
pub(in crate::driver) fn release_leftover(handle: &DriverHandle, row: LimitRow) {
    let restore = move || {
        let result = crate::restore::restore(&row);
        (row, result)
    };
    handle.off_thread("container-restore", restore, |driver, (row, result)| match result {
        Ok(()) => driver.store.remove_limit(row.key),
        Err(e) => tracing::warn!(job = %row.job, "limits could not be put back: {e}"),
    });
}

/// What the guard needs to put a container's limits back.
pub(super) fn container_row(config: &DaemonConfig, job: JobId, original: OriginalLimits) -> LimitRow {
    let key = original.id.clone();
    let kept = ContainerOriginal { original, socket: config.docker_socket.clone() };
    let original = serde_json::to_string(&kept).unwrap_or_default();
    LimitRow { key, job, runtime: kind_name(RuntimeKind::Docker).into(), original }
}
