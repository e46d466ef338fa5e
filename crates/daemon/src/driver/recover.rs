//! Recovery: jobs that an earlier daemon left, a lapse of the lease, and the proper end of the daemon.

use super::decide::decision;
use super::docker::release_leftover;
use super::gpu::why_never_stopped;
use super::observe::{is_supervised, may_have_begun};
use super::reports::Progress;
use super::runtimes::kind_name;
use super::start::{drop_environment, keep_missing_record, limit_row};
use super::{Driver, Job, Timeline};
use crate::clock::Moment;
use crate::journal::Batch;
use crate::record::{Change, JobRecord};
use crate::restore::restore;
use crate::types::{Event, JobState, StopRequest};
use gainshare_core::check::check_again;
use gainshare_core::decider::Decider;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::plan::Plan;
use gainshare_limits::RuntimeKind;
use gainshare_limits::process::continue_group;
use std::collections::BTreeSet;
use std::time::Duration;

impl Timeline {
    pub(super) fn new(now: Time) -> Timeline {
        Timeline { began: now, next_beat: now, idle_since: now, ending: None, failure: None }
    }

    /// Whether no job was there for as long as the daemon waits for one. `live` is the number of live jobs.
    pub(super) fn is_idle(&mut self, live: usize, patience: Option<Duration>, now: Time) -> bool {
        if live > 0 {
            self.idle_since = now;
        }
        let idle_s = now.since(self.idle_since).as_secs_f64();
        self.ending.is_none() && patience.is_some_and(|patience| idle_s >= patience.as_secs_f64())
    }

    /// Whether the loop may end: at once, or when the jobs that were asked to stop have ended.
    pub(super) fn is_over(&self, live: usize, now: Time) -> bool {
        let Some(ending) = self.ending else { return false };
        let patience = Span::from_secs_f64(StopRequest::default().grace_s + 10.0);
        !ending.stop_jobs || live == 0 || now.since(ending.since) > patience
    }
}

impl Driver {
    /// Takes over what the journal knows: ended jobs as history, live ones by finding them again.
    pub(super) fn restore(&mut self, jobs: Vec<(JobRecord, Option<String>)>, plans: Vec<(Moment, Plan)>) {
        let now = self.now();
        for (record, position) in jobs {
            self.restore_job(Job::new(record, now), position, &plans);
        }
        self.complete_records();
        for (at, plan) in &plans {
            let info = self.picture().plan_info(*at, plan);
            self.plans.recent.push_front(info);
        }
        let held = self.jobs.holding_slots();
        for id in &held {
            self.follow(*id);
            self.find_again(*id);
        }
        self.fail_dependants();
        self.release_leftovers();
        if let Some(process) = &mut self.runtimes.process {
            process.sweep();
        }
        // Rows of jobs that a daemon released at its end are gone; they must be back before a limit is.
        let _ = self.save();
        if let Some((_, plan)) = plans.last() {
            self.restore_plan(plan);
        }
        let _ = self.save();
        if !held.is_empty() {
            let live = self.jobs.live_count();
            tracing::info!("found {live} live job(s) of {} that were running", held.len());
        }
    }

    /// Enters a job with its last reports and the decisions about it.
    fn restore_job(&mut self, mut job: Job, position: Option<String>, plans: &[(Moment, Plan)]) {
        if let Some(progress) = position.and_then(|p| serde_json::from_str::<Progress>(&p).ok()) {
            job.progress = progress;
        }
        if job.record.is_live()
            && let Err(e) = self.store.replay_samples(&mut job)
        {
            tracing::warn!(job = %job.record.id, "its last reports are not counted: {}", e.message);
        }
        for (at, plan) in plans {
            if let Some(verdict) = plan.verdicts.get(&job.record.id) {
                job.add_decision(decision(*at, plan.generation, verdict));
                job.verdict = Some(verdict.clone());
            }
        }
        self.jobs.insert(job.record.id, job);
    }

    /// Finds what a job needs beside its record, and completes what an earlier daemon left undone in its folder.
    fn complete_records(&mut self) {
        for id in self.jobs.ids(|j| j.record.state == JobState::Queued) {
            self.jobs.find_gpu_memory(id);
        }
        let cores = self.runtimes.cores(&self.config);
        for id in self.jobs.live() {
            self.jobs.find_past_runs(id, cores);
        }
        // A daemon may have died between the record of a start or an end and this.
        for id in self.jobs.ids(|j| !matches!(j.record.state, JobState::Queued | JobState::Starting)) {
            drop_environment(&self.paths, id);
        }
        // Earlier versions kept no records in folders.
        for job in self.jobs.values().filter(|job| job.record.state != JobState::Queued) {
            keep_missing_record(&self.paths, &job.record);
        }
    }

    /// The last plan may have been journaled but not applied: applying it again makes the limits the new ones. The same
    /// holds for its starts, which control believes to have happened.
    fn restore_plan(&mut self, plan: &Plan) {
        match check_again(&self.view(), plan.clone()) {
            Ok(plan) => {
                self.plans.current = Some(plan);
                self.apply();
            }
            Err(unsound) => {
                let list: Vec<String> = unsound.violations.iter().map(ToString::to_string).collect();
                let list = list.join("; ");
                tracing::error!(generation = plan.generation, "the last plan is not applied again: {list}");
            }
        }
        let waits = |id: &JobId| self.jobs.get(id).is_some_and(|j| j.record.state == JobState::Queued);
        self.plans.starts = plan.starts.iter().map(|s| s.job).filter(waits).collect();
    }

    /// Ends jobs that wait for one that did not end well, whose daemon died before it could do that.
    fn fail_dependants(&mut self) {
        let failed = |j: &Job| j.record.state.is_final() && j.record.state != JobState::Done;
        let awaited: BTreeSet<JobId> = self
            .jobs
            .values()
            .filter(|j| j.record.state == JobState::Queued)
            .flat_map(|j| j.record.after.iter().copied())
            .filter(|id| self.jobs.get(id).is_some_and(failed))
            .collect();
        for id in awaited {
            for (dependant, why) in self.jobs.dependants(id) {
                self.end(dependant, JobState::Failed, None, None, Some(why));
            }
        }
    }

    /// Puts limits back of jobs that ended just before their daemon died.
    fn release_leftovers(&mut self) {
        let rows = match self.store.journal.limits() {
            Ok(rows) => rows,
            Err(e) => return tracing::warn!("{e}"),
        };
        for row in rows {
            if self.jobs.get(&row.job).is_some_and(|j| j.record.holds_slot()) {
                continue;
            }
            if row.runtime == kind_name(RuntimeKind::Docker) {
                release_leftover(&self.handle, row);
                continue;
            }
            match restore(&row) {
                Ok(()) => self.store.remove_limit(row.key),
                Err(e) => tracing::warn!(job = %row.job, "limits could not be put back: {e}"),
            }
        }
    }

    /// Finds one job again that was running or about to.
    fn find_again(&mut self, id: JobId) {
        let record = self.jobs[&id].record.clone();
        if record.spec.runtime == RuntimeKind::Docker {
            return self.find_container_again(id);
        }
        let Some(group) = record.group.clone() else { return };
        self.store.add_limit(limit_row(&group));
        match record.state {
            JobState::Starting => {
                // Its group is empty or not yet known to be otherwise; making it again is harmless.
                if let Some(process) = &mut self.runtimes.process
                    && let Err(e) = process.prepare(id, &group.handle.key)
                {
                    tracing::warn!(job = %id, "{e}");
                }
                if self.read_start(id) || self.read_exit(id) || record.attached || is_supervised(&self.paths, id) {
                    return;
                }
                if may_have_begun(&self.paths, &record) {
                    let now = self.now();
                    return self.resolve_interrupted_start(id, now);
                }
                // The supervisor was never started or died before it forked. Should it only be
                // slow, the lock in the job's directory lets one of the two go on, never both.
                if let Some(order) = &record.order
                    && let Err(why) = self.supervisors.start(&self.config, &self.paths, &record, order)
                {
                    self.end(id, JobState::Failed, None, None, Some(why));
                }
            }
            JobState::Running => {
                self.runtimes.adopt_process(&self.jobs[&id].record);
                // The last daemon and its keeper may have been killed at once while the job was stopped.
                let may_be_stopped =
                    why_never_stopped(&self.jobs[&id], &self.config, self.runtimes.stops_jobs()).is_none();
                record.leader.iter().filter(|_| may_be_stopped).for_each(continue_group);
                // It may have ended while no daemon was there.
                let alive = record.leader.is_some_and(|l| l.is_alive());
                if !alive {
                    self.read_exit(id);
                }
            }
            _ => {}
        }
    }

    /// The guard put limits back while this daemon stood still: the limits that it believes to be
    /// in force are not. A new epoch begins, and everything is decided again.
    pub(super) fn recover_from_lapse(&mut self) {
        let lapsed = self.store.journal.epoch();
        let epoch = match self.store.journal.next_epoch() {
            Ok(epoch) => epoch,
            Err(e) => return tracing::error!("the lease lapsed and no new epoch can be begun: {e}"),
        };
        tracing::warn!(
            "the daemon stood still for longer than its lease; limits were put back; deciding again under epoch {epoch}"
        );
        self.lease.set_epoch(epoch);
        self.fact(None, Change::Lapsed { epoch: lapsed });
        if let Err(e) = self.runtimes.open_process(&self.config, &self.paths) {
            tracing::error!("{e}");
        }
        for id in self.jobs.holding_slots() {
            let (state, kind) = (self.jobs[&id].record.state, self.jobs[&id].record.spec.runtime);
            match (kind, state) {
                (RuntimeKind::Docker, _) => self.find_container_again(id),
                (RuntimeKind::Process, JobState::Running) => self.runtimes.adopt_process(&self.jobs[&id].record),
                (RuntimeKind::Process, _) => {
                    let key = self.jobs[&id].record.group.as_ref().map(|g| g.handle.key.clone());
                    if let (Some(process), Some(key)) = (&mut self.runtimes.process, key) {
                        let _ = process.prepare(id, &key);
                    }
                }
            }
        }
        let generation = self.plans.last_record.as_ref().map_or(0, |record| record.plan.generation);
        let policy = self.control.policy().clone();
        self.control = Decider::new(policy);
        self.control.continue_from(generation);
        self.plans.current = None;
        for job in self.jobs.values_mut() {
            job.verdict = None;
        }
        self.plans.is_wanted = true;
    }

    /// Puts every limit back and leaves the jobs to their supervisors.
    pub(super) fn close(mut self) {
        let mut containers = Vec::new();
        for id in self.jobs.holding_slots() {
            self.follower().read(id, false);
            let job = &self.jobs[&id];
            match job.record.spec.runtime {
                RuntimeKind::Docker => containers.extend(job.handle()),
                RuntimeKind::Process => self.release_limits(id),
            }
        }
        if let Some(docker) = self.runtimes.docker.as_ref().filter(|_| !containers.is_empty()) {
            for (id, result, key) in docker.release_all(containers) {
                self.limits_released(id, key, result);
            }
        }
        if let Some(process) = &mut self.runtimes.process {
            process.close();
        }
        let at = self.clock.moment();
        self.store.flush_all();
        let closed = self.save_with(Batch { changes: vec![(at, None, Change::Closed)], ..Batch::default() });
        if let Err(e) = closed {
            tracing::error!("{e}");
        }
        self.lease.end();
        self.inbox.emit(Event::ShuttingDown);
    }
}
