//! How a waiting job begins: its group, its environment, its supervisor.
//!
//! The order of steps matters: the group is made, the order to start is journaled, and only then is
//! it acted on. After a crash at any point in between, the next daemon finds either a waiting job and an
//! empty group, or a starting job and all it needs to go on. The supervisor is started again only
//! if none of this attempt announced that it forks (see [`crate::jobdir`]).

use super::inside::start_inside;
use super::page::JobPage;
use super::runtimes::{allowed_cpus, kind_name};
use super::view::Picture;
use super::{Driver, PushAccess};
use crate::config::DaemonConfig;
use crate::error::{Refusal, disk_refusal};
use crate::fail;
use crate::jobdir;
use crate::journal::{Batch, LimitRow};
use crate::launch::{detach, program};
use crate::paths::Paths;
use crate::record::{Change, JobRecord};
use crate::spec::StartKind;
use crate::types::{JobState, StartOrder, StartVar, SuperviseFile};
use gainshare_core::model::JobId;
use gainshare_core::teams::TeamUse;
use gainshare_limits::gpu::GpuUse;
use gainshare_limits::process::{JobGroup, start};
use gainshare_limits::{Runtime, RuntimeKind};
use serde::Serialize;
use std::collections::BTreeMap;
use std::process::{Child, Command, ExitStatus};

/// The supervisors that this daemon started and that have not ended.
#[derive(Default)]
pub(super) struct Supervisors(Vec<(JobId, Child)>);

impl Supervisors {
    /// Completes spec.json and starts the supervisor; the error is what the job's owner reads.
    pub(super) fn start(
        &mut self,
        config: &DaemonConfig,
        paths: &Paths,
        record: &JobRecord,
        order: &StartOrder,
    ) -> Result<(), String> {
        let id = record.id;
        let mut file = read_environment(paths, record).map_err(|e| e.message)?;
        file.order = order.clone();
        file.socket = paths.socket().display().to_string();
        let dir = paths.job(id.0);
        jobdir::write_json(&dir, jobdir::SPEC, &file)
            .map_err(|e| format!("cannot write {}: {e}", dir.join(jobdir::SPEC).display()))?;
        let program = program(config);
        let mut command = Command::new(&program);
        command.arg("supervise").arg(&dir).arg("--attempt").arg(order.attempt.to_string());
        detach(&mut command);
        let child = command.spawn().map_err(|e| format!("cannot start its supervisor {}: {e}", program.display()))?;
        self.0.push((id, child));
        Ok(())
    }

    /// Collects supervisors that ended.
    pub(super) fn reap(&mut self) -> Vec<(JobId, ExitStatus)> {
        let mut ended = Vec::new();
        self.0.retain_mut(|(id, child)| match child.try_wait() {
            Ok(None) => true,
            Ok(Some(status)) => {
                ended.push((*id, status));
                false
            }
            Err(_) => false,
        });
        ended
    }
}

impl PushAccess {
    /// Where a job that reports by itself finds the daemon. The token is in a file, because these variables
    /// are shown.
    fn env(&self, paths: &Paths, record: &JobRecord) -> Vec<StartVar> {
        // A container's loopback is its own.
        let Some(address) = self.listen.filter(|_| record.spec.runtime == RuntimeKind::Process) else {
            return Vec::new();
        };
        let id = record.id.0;
        let (dir, name) = (paths.job(id), "push-token");
        let file = dir.join(name);
        let token = self.token.for_push(id);
        if let Err(e) = jobdir::write_unsynced(&dir, name, token.text().as_bytes()) {
            tracing::warn!(job = %record.id, "cannot write {}: {e}", file.display());
            return Vec::new();
        }
        let (url, file) = (format!("http://{address}/v1/jobs/{id}/push"), file.display().to_string());
        let var =
            |name: &str, value: &str, why: &str| StartVar { name: name.into(), value: value.into(), why: why.into() };
        vec![
            var("GAINSHARE_PUSH_URL", &url, "where the job may report by itself"),
            var("GAINSHARE_PUSH_TOKEN_FILE", &file, "the bearer token that goes with it"),
            var("KUBEFLOW_TRAINER_SERVER_URL", &url, "frameworks that know Kubeflow Trainer report by themselves"),
            var("KUBEFLOW_TRAINER_SERVER_TOKEN", &file, "the file with the bearer token that goes with it"),
        ]
    }
}

impl Picture<'_> {
    /// What a tuned start adds to the environment: never what the user has set, nor what would take
    /// precedence over it. `values` are the job's own variables with their values.
    pub(super) fn start_env(
        &self,
        push_access: &PushAccess,
        record: &JobRecord,
        values: &BTreeMap<String, String>,
    ) -> Vec<StartVar> {
        if record.spec.start == StartKind::Plain {
            return Vec::new();
        }
        let user = |name: &str| -> Option<String> {
            if let Some(value) = values.get(name) {
                return Some(value.clone());
            }
            // Of the environment only names are known here. Flags of XLA may ask for several
            // devices, which want their threads.
            let set = record.env_names.iter().any(|n| n == name);
            set.then(
                || if name == "XLA_FLAGS" { "--xla_force_host_platform_device_count".into() } else { String::new() },
            )
        };
        let others = self.jobs.values().filter(|j| j.record.holds_slot()).count();
        let waiting = self.jobs.values().filter(|j| j.record.state == JobState::Queued && j.record.id != record.id);
        let free = self.config.slots.map_or(usize::MAX, |s| s.saturating_sub(others + 1));
        let expected = (others + 1 + waiting.count().min(free)).max(self.config.expect.unwrap_or(1));
        let roles = &record.spec.roles;
        let mut tuned =
            start::tuned_env(user, self.runtimes.cores(self.config), expected.saturating_mul(roles.computing_tasks()));
        // The page of a job has one size of teams; processes that compute beside each other keep pools of a fixed size.
        let inside = match roles.is_empty() {
            true => start_inside(
                self.config,
                self.paths,
                self.runtimes.cores(self.config),
                record,
                |name| user(name).is_some(),
                &mut tuned,
                expected,
            ),
            false => Vec::new(),
        };
        let tuned = tuned.into_iter().map(|t| StartVar { name: t.name.into(), value: t.value, why: t.why.into() });
        push_access
            .env(self.paths, record)
            .into_iter()
            .filter(|v| user(&v.name).is_none())
            .chain(inside)
            .chain(tuned)
            .collect()
    }
}

impl Driver {
    /// Lets a waiting job begin: the group is made, the order journaled, and the supervisor started or told.
    pub(super) fn admit(&mut self, id: JobId) -> Result<(), Refusal> {
        let Some(job) = self.jobs.get(&id) else { return Ok(()) };
        if job.record.state != JobState::Queued {
            return Ok(());
        }
        if job.record.spec.runtime == RuntimeKind::Docker {
            return self.admit_container(id);
        }
        let attempt = job.record.attempt + 1;
        let file = read_environment(&self.paths, &job.record)?;
        let mut order =
            StartOrder { attempt, dir: self.paths.job(id.0).display().to_string(), ..StartOrder::default() };
        order.env = self.picture().start_env(&self.push_access, &self.jobs[&id].record, &file.spec.env);
        let process = self.runtimes.process()?;
        let group = process.prepare(id, &format!("job-{}-{attempt}", id.0))?;
        order.procs_files = group.procs_files.iter().map(|p| p.display().to_string()).collect();
        order.cpus = allowed_cpus(&self.config);
        let limits = vec![limit_row(&group)];
        let handle = group.handle.clone();
        let change = Change::Admitted { order: order.clone(), group: Some(group) };
        let at = self.clock.moment();
        let mut record = self.jobs[&id].record.clone();
        record.take(at, &change);
        keep_record(&self.paths, &record);
        fail::point("admit-before-journal");
        let batch =
            Batch { changes: vec![(at, Some(id), change)], records: vec![record.clone()], limits, ..Batch::default() };
        if let Err(e) = self.save_with(batch) {
            if let Ok(process) = self.runtimes.process() {
                let _ = process.release(&handle);
            }
            return Err(e);
        }
        fail::point("admit-before-spawn");
        let attached = record.attached;
        let now = self.now();
        if let Some(job) = self.jobs.get_mut(&id) {
            job.record = record;
            job.heard = now;
            job.page = JobPage::Unknown;
            (job.team, job.team_use) = (0, TeamUse::default());
            job.gpu = GpuUse::default();
        }
        self.follow(id);
        let record = &self.jobs[&id].record;
        if !attached && let Err(why) = self.supervisors.start(&self.config, &self.paths, record, &order) {
            self.end(id, JobState::Failed, None, None, Some(why));
        }
        fail::point("admit-after-spawn");
        self.job_changed(id);
        Ok(())
    }
}

/// The job as it was submitted, with the values of its environment. An attached supervisor has them itself.
pub(super) fn read_environment(paths: &Paths, record: &JobRecord) -> Result<SuperviseFile, Refusal> {
    let id = record.id;
    if record.attached {
        return Ok(SuperviseFile {
            id: id.0,
            name: record.name.clone(),
            spec: record.spec.clone(),
            base_env: BTreeMap::new(),
            order: StartOrder::default(),
            socket: String::new(),
        });
    }
    let dir = paths.job(id.0);
    jobdir::read_spec(&dir).map_err(|e| disk_refusal("read", &dir.join(jobdir::SPEC), e))
}

/// The job has started or ended: the values of its environment are not needed any more.
pub(super) fn drop_environment(paths: &Paths, id: JobId) {
    let path = paths.job(id.0).join(jobdir::SPEC);
    match std::fs::remove_file(&path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            tracing::warn!(job = %id, "cannot remove {}: {e}", path.display());
        }
        _ => {}
    }
}

/// Writes what a daemon needs to find the job again without its journal.
pub(super) fn keep_record(paths: &Paths, record: &JobRecord) {
    keep(paths, record.id, jobdir::RECORD, record);
}

/// Writes what a daemon needs to put a container's limits back without its journal.
pub(super) fn keep_limits(paths: &Paths, row: &LimitRow) {
    keep(paths, row.job, jobdir::LIMITS, row);
}

fn keep(paths: &Paths, id: JobId, name: &str, value: &impl Serialize) {
    let dir = paths.job(id.0);
    let written = serde_json::to_vec(value).map_err(std::io::Error::from);
    if let Err(e) = written.and_then(|bytes| jobdir::write_unsynced(&dir, name, &bytes)) {
        tracing::warn!(job = %id, "cannot write {}: {e}", dir.join(name).display());
    }
}

/// [`keep_record`] for a job of a daemon that kept none.
pub(super) fn keep_missing_record(paths: &Paths, record: &JobRecord) {
    let dir = paths.job(record.id.0);
    if dir.is_dir() && dir.join(jobdir::RECORD).symlink_metadata().is_err() {
        keep_record(paths, record);
    }
}

/// What the guard needs to put a process job's limits back.
pub(super) fn limit_row(group: &JobGroup) -> LimitRow {
    LimitRow {
        key: group.handle.key.clone(),
        job: group.handle.job,
        runtime: kind_name(RuntimeKind::Process).into(),
        original: serde_json::to_string(group).unwrap_or_default(),
    }
}
