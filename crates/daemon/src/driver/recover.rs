//! Recovery: jobs that an earlier daemon left, a lapse of the lease, and the proper end of the daemon.

use super::decide::decision;
use super::reports::Progress;
use super::runtimes::kind_name;
use super::start::limit_row;
use super::{Driver, Job};
use crate::clock::Moment;
use crate::journal::Batch;
use crate::record::{Change, JobRecord};
use crate::restore::restore;
use crate::types::{Event, JobState, StopRequest};
use gainshare_core::check::check_again;
use gainshare_core::decider::Decider;
use gainshare_core::model::{JobId, Span};
use gainshare_core::plan::Plan;
use gainshare_limits::{RuntimeError, RuntimeKind};

/// Ended jobs that are remembered, and for how long.
const JOBS_KEPT: usize = 1000;
const KEPT_FOR: Span = Span::from_secs(30 * 86_400);

impl Driver {
    /// Takes over what the journal knows: ended jobs as history, live ones by finding them again.
    pub(super) fn restore(&mut self, jobs: Vec<(JobRecord, Option<String>)>, plans: Vec<(Moment, Plan)>) {
        let now = self.now();
        for (record, position) in jobs {
            let mut job = Job::new(record, now);
            if let Some(progress) = position.and_then(|p| serde_json::from_str::<Progress>(&p).ok()) {
                job.progress = progress;
            }
            for (at, plan) in &plans {
                if let Some(verdict) = plan.verdicts.get(&job.record.id) {
                    if job.decisions.len() == 5 {
                        job.decisions.pop_front();
                    }
                    job.decisions.push_back(decision(*at, plan.generation, verdict));
                    job.verdict = Some(verdict.clone());
                }
            }
            self.jobs.insert(job.record.id, job);
        }
        for (at, plan) in &plans {
            let info = self.plan_info(*at, plan);
            self.plans.recent.push_front(info);
        }
        // A daemon may have died between the record of a start or an end and this.
        for id in self.jobs.ids(|j| !matches!(j.record.state, JobState::Queued | JobState::Starting)) {
            self.drop_environment(id);
        }
        let held = self.jobs.holding_slots();
        for id in &held {
            self.begin_watching(*id);
            self.find_again(*id);
        }
        self.release_leftovers();
        if let Some(process) = &mut self.runtimes.process {
            process.sweep();
        }
        // Rows of jobs that a daemon released at its end are gone; they must be back before a limit is.
        let _ = self.save();
        // The last plan may have been journaled but not applied: applying it again makes the limits the new ones.
        if let Some((_, plan)) = plans.last() {
            let view = self.view();
            match check_again(&view, plan.clone()) {
                Ok(plan) => {
                    self.plans.current = Some(plan);
                    self.apply();
                }
                Err(unsound) => {
                    let list: Vec<String> = unsound.violations.iter().map(ToString::to_string).collect();
                    tracing::error!(
                        generation = plan.generation,
                        "the last plan is not applied again: {}",
                        list.join("; ")
                    );
                }
            }
            // The same holds for its starts, which control believes to have happened.
            let waits = |id: &JobId| self.jobs.get(id).is_some_and(|j| j.record.state == JobState::Queued);
            self.plans.starts = plan.starts.iter().map(|s| s.job).filter(waits).collect();
        }
        let _ = self.save();
        if !held.is_empty() {
            let live = self.jobs.live_count();
            tracing::info!("found {live} live job(s) of {} that were running", held.len());
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
                self.release_leftover_container(row);
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
                if self.read_start(id) || self.read_exit(id) || record.attached || self.is_supervised(id) {
                    return;
                }
                if self.may_have_begun(id) {
                    let now = self.now();
                    return self.resolve_interrupted_start(id, now);
                }
                // The supervisor was never started or died before it forked. Should it only be
                // slow, the lock in the job's directory lets one of the two go on, never both.
                if let Some(order) = &record.order
                    && let Err(why) = self.spawn_supervisor(id, order)
                {
                    self.end(id, JobState::Failed, None, None, Some(why));
                }
            }
            JobState::Running => {
                self.adopt_process(id);
                // It may have ended while no daemon was there.
                let alive = record.leader.is_some_and(|l| l.is_alive());
                if !alive {
                    self.read_exit(id);
                }
            }
            _ => {}
        }
    }

    fn adopt_process(&mut self, id: JobId) {
        let record = &self.jobs[&id].record;
        let (Some(group), Some(leader)) = (record.group.clone(), record.leader) else { return };
        let Some(process) = &mut self.runtimes.process else { return };
        match process.adopt(&group, leader) {
            Ok(()) | Err(RuntimeError::Gone { .. }) => {}
            Err(e) => tracing::warn!(job = %id, "cannot be taken over: {e}"),
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
                (RuntimeKind::Process, JobState::Running) => self.adopt_process(id),
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

    /// Forgets the oldest ended jobs.
    pub(super) fn forget_old(&mut self) {
        let now = self.now();
        let mut ended: Vec<(gainshare_core::model::Time, JobId)> = self
            .jobs
            .values()
            .filter(|j| !j.record.is_live())
            .map(|j| (j.record.ended.map_or(j.record.submitted.time, |m| m.time), j.record.id))
            .collect();
        ended.sort();
        let surplus = ended.len().saturating_sub(JOBS_KEPT);
        let old = ended.iter().take_while(|(at, _)| now.since(*at) > KEPT_FOR).count();
        for (_, id) in ended.into_iter().take(surplus.max(old)) {
            if self.forget(id).is_err() {
                return;
            }
        }
    }

    pub(super) fn end_when_idle(&mut self) {
        let now = self.now();
        if self.jobs.live_count() > 0 {
            self.timeline.idle_since = now;
        }
        if let Some(idle) = self.config.idle_exit
            && now.since(self.timeline.idle_since).as_secs_f64() >= idle.as_secs_f64()
            && self.timeline.ending.is_none()
        {
            tracing::info!("no job for {} s: ending", idle.as_secs());
            self.shut_down(Default::default());
        }
    }

    /// Whether the loop may end: at once, or when the jobs that were asked to stop have ended.
    pub(super) fn is_over(&self) -> bool {
        let Some(ending) = self.timeline.ending else { return false };
        let patience = Span::from_secs_f64(StopRequest::default().grace_s + 10.0);
        !ending.stop_jobs
            || self.jobs.values().all(|j| !j.record.is_live())
            || self.now().since(ending.since) > patience
    }

    /// Puts every limit back and leaves the jobs to their supervisors.
    pub(super) fn close(mut self) {
        let mut containers = Vec::new();
        for id in self.jobs.holding_slots() {
            self.read_report(id, false);
            let job = &self.jobs[&id];
            match job.record.spec.runtime {
                RuntimeKind::Docker => containers.extend(job.handle()),
                RuntimeKind::Process => self.release_limits(id),
            }
        }
        if !containers.is_empty() {
            self.release_all_containers(containers);
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
        self.emit(Event::ShuttingDown);
    }
}
