//! What the API shows: jobs, explanations, plans, samples, health.

use super::decide::why;
use super::gpu::{is_asked, why_never_stopped};
use super::gpu_memory::{GpuMemoryNeed, memory_note};
use super::inside::{inside_note, rhythm_info, why_uncaught};
use super::reports::Reports;
use super::runtimes::kind_name;
use super::view::Picture;
use super::{Driver, Job};
use crate::clock::{Moment, rfc3339};
use crate::error::Refusal;
use crate::metrics::Metrics;
use crate::pulse::{Pulses, STUCK_AFTER};
use crate::types::*;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_core::plan::Plan;
use gainshare_core::policy::Preset;
use gainshare_core::replay::RecordedDecision;
use gainshare_core::signal::length;
use gainshare_limits::RuntimeKind;
use std::sync::Arc;
use std::time::Duration;

/// Counters are read again for a table if they are older than this.
const FRESH: Span = Span::from_secs(1);

impl Driver {
    /// The picture with counters that are not old: those of one job, or of all.
    pub(crate) fn fresh_picture(&mut self, id: Option<JobId>) -> Picture<'_> {
        let now = self.now();
        let is_old = |j: &Job| j.progress.meter.read_at().is_none_or(|at| now.since(at) >= FRESH);
        let is_wanted = |j: &&mut Job| id.is_none_or(|id| j.record.id == id) && is_old(j);
        for job in self.jobs.values_mut().filter(is_wanted) {
            self.runtimes.read_usage(&self.config, job, now);
        }
        self.picture()
    }

    pub(crate) fn samples(&mut self, id: JobId, since_s: f64) -> Result<SampleList, Refusal> {
        // What the disk does not have yet belongs to the history too.
        self.store.flush(id);
        let _ = self.save();
        let job = self.jobs.job(id)?;
        let origin = job.record.started.unwrap_or(job.record.submitted);
        let after = if since_s > 0.0 { origin.time + Span::from_secs_f64(since_s) } else { Time::ZERO };
        let stored = self.store.journal.samples(id, after)?;
        let job = self.jobs.job(id)?;
        Ok(SampleList {
            metric: job.progress.metric.clone(),
            origin_s: origin.unix_s,
            samples: stored
                .into_iter()
                .map(|s| SampleInfo { time_s: s.time.since(origin.time).as_secs_f64(), step: s.step, value: s.value })
                .collect(),
        })
    }

    /// The last plans, newest first.
    pub(crate) fn plans(&self, last: usize) -> Result<Vec<PlanInfo>, Refusal> {
        if last <= self.plans.recent.len() {
            return Ok(self.plans.recent.iter().take(last).cloned().collect());
        }
        let kept = self.store.journal.plans(last)?;
        Ok(kept.iter().map(|(at, plan)| self.picture().plan_info(*at, plan)).collect())
    }

    pub(crate) fn health(&self) -> Health {
        let capacity = self.runtimes.capacity();
        let note = |kind: RuntimeKind| {
            self.runtimes.notes.iter().filter(move |(k, _)| *k == kind).map(|(_, n)| n.clone()).collect()
        };
        let mut problems: Vec<String> = self.problems.values().cloned().collect();
        let loops = loop_reports(&self.pulses);
        problems.extend(loops.iter().filter(|l| l.is_stuck).map(|l| format!("the loop {} is stuck", l.name)));
        Health {
            status: if problems.is_empty() { "ok" } else { "degraded" }.into(),
            problems,
            loops,
            pid: std::process::id(),
            epoch: self.store.journal.epoch(),
            uptime_s: self.now().since(self.timeline.began).as_secs_f64(),
            policy: preset_name(self.config.policy),
            aim: self.config.aim_name(),
            mode: self.runtimes.mode(&self.config).name().into(),
            slots: self.config.slots,
            cores: self.runtimes.cores(&self.config),
            memory_bytes: capacity.memory_bytes,
            live_jobs: self.jobs.live_count(),
            state_dir: self.paths.state.display().to_string(),
            listen: self.push_access.listen.map(|a| a.to_string()),
            runtimes: self
                .runtimes
                .kinds()
                .into_iter()
                .map(|kind| RuntimeInfo { kind: kind_name(kind).into(), notes: note(kind) })
                .collect(),
        }
    }
}

impl Picture<'_> {
    /// The last decision that was about `job`, or the last of all: with all that is needed to make its plan again.
    pub(crate) fn recorded_decision(&self, job: Option<JobId>) -> Result<Arc<RecordedDecision>, Refusal> {
        let none = |what: String| Refusal::new(ErrorCode::NotFound, what);
        match job {
            None => self
                .plans
                .last_record
                .clone()
                .ok_or_else(|| none("nothing has been decided since the daemon started".into())),
            Some(id) => {
                let job = self.jobs.job(id)?;
                job.record_of_decision.clone().ok_or_else(|| {
                    let name = &job.record.name;
                    none(format!(
                        "no decision about `{name}` is kept: it has ended, or nothing was decided about it since the daemon started"
                    ))
                })
            }
        }
    }

    /// The last decision about `job` on its GPU, with all that is needed to make its plan again.
    pub(crate) fn recorded_gpu_decision(&self, job: JobId) -> Result<RecordedDecision, Refusal> {
        self.gpus.recorded_decision(self.jobs.job(job)?)
    }

    pub(crate) fn find(&self, text: &str) -> Result<JobId, Refusal> {
        self.jobs.find(text)
    }

    pub(crate) fn is_live(&self, id: JobId) -> bool {
        self.jobs.is_live(id)
    }

    pub(crate) fn live_jobs(&self) -> usize {
        self.jobs.live_count()
    }

    pub(crate) fn list(&self, all: bool) -> Vec<JobInfo> {
        self.jobs.values().filter(|j| all || j.record.is_live()).map(|j| self.info(j)).collect()
    }

    pub(crate) fn show(&self, id: JobId) -> Result<JobInfo, Refusal> {
        Ok(self.info(self.jobs.job(id)?))
    }

    pub(crate) fn explain(&self, id: JobId) -> Result<Explanation, Refusal> {
        let job = self.jobs.job(id)?;
        let live = job.record.is_live();
        let verdict = job.verdict.as_ref();
        let target = verdict.and_then(|v| v.target);
        let neighbours = self
            .jobs
            .values()
            .filter(|j| j.record.id != id && j.record.holds_slot())
            .map(|j| {
                let v = j.verdict.as_ref();
                Neighbour {
                    id: j.record.id.0,
                    name: j.record.name.clone(),
                    share: v.and_then(|v| v.target).map(|t| t.share.cpu.get()),
                    category: v.map(|v| v.category.name().to_owned()),
                    growth: v.and_then(|v| v.growth.cpu),
                }
            })
            .collect();
        let in_force = job.in_force.clone().unwrap_or(gainshare_limits::AppliedLimits {
            settings: vec![],
            notes: vec![],
            team: None,
        });
        let mut notes = job.record.order.as_ref().map(|o| o.notes.clone()).unwrap_or_default();
        notes.extend(self.own_notes(job));
        notes.extend(in_force.notes.iter().chain(&job.apply_error).cloned());
        notes.extend(
            self.runtimes.notes.iter().filter(|(kind, _)| *kind == job.record.spec.runtime).map(|(_, n)| n.clone()),
        );
        notes.extend(inside_note(self.config, self.paths, self.runtimes.cores(self.config), job));
        let why_uncaught = why_uncaught(self.config, self.paths, job);
        notes.extend(job.gpu.note(why_uncaught).filter(|_| live));
        notes.extend(self.why_not_stopped(job, why_uncaught).filter(|_| live));
        notes.extend(memory_note(&job.gpu, self.gpus.meter.recent_gpus(self.now), self.now).filter(|_| live));
        notes.extend(self.gpu_problem(job).filter(|_| live));
        notes.extend(job.task_shares.note(&job.record.spec.roles).filter(|_| live));
        notes.extend(job.reports.as_ref().and_then(Reports::folder_note));
        notes.sort();
        notes.dedup();
        Ok(Explanation {
            job: self.info(job),
            policy: self.config.policy.name().to_owned(),
            aim: self.config.aim_name(),
            share: target.filter(|_| live).map(|t| t.share.into()),
            limit: target.filter(|_| live).map(|t| t.limit.into()),
            in_force: in_force
                .settings
                .into_iter()
                .filter(|_| live)
                .map(|(name, value)| Setting { name, value })
                .collect(),
            growth: verdict.map(|v| v.growth.into()).unwrap_or_default(),
            category: target.and(verdict).map(|v| v.category.name().to_owned()),
            neighbours: if live { neighbours } else { Vec::new() },
            metric: metric(job),
            metric_notes: metric_notes(job),
            start_env: job.record.order.as_ref().map(|o| o.env.clone()).unwrap_or_default(),
            notes,
            decisions: job.decisions.iter().rev().cloned().collect(),
        })
    }

    /// Why a job whose launches are not caught is not paced on its GPU at all.
    fn why_not_stopped(&self, job: &Job, why_uncaught: &str) -> Option<String> {
        let is_shown = job.gpu.is_shown(self.now);
        if job.record.state != JobState::Running || (job.gpu.gpu != 0 && !job.gpu.is_uncaught) {
            return None;
        }
        if !is_asked(job, self.config) {
            return is_shown.then(|| "GPU: not paced; start the job with --gpu, and its work follows its share".into());
        }
        let never = why_never_stopped(job, self.config, self.runtimes.stops_jobs());
        let places = job.gpu.measured.as_ref().map_or(0, |measured| measured.places.len());
        let why = match (is_shown, never, self.gpus.pacer_problem.as_deref()) {
            (true, None, _) if places > 1 => "it is on several GPUs",
            (true, never, problem) => never.or(problem)?,
            // Its first launch may still come.
            (false, ..) if job.has_inside() => return None,
            (false, ..) => "the driver shows it on no GPU",
        };
        Some(format!("GPU: not paced: its launches are not caught ({why_uncaught}), and {why}"))
    }

    /// Why nothing is measured of a job that was started for a GPU.
    fn gpu_problem(&self, job: &Job) -> Option<String> {
        let why = self
            .gpus
            .meter
            .problem
            .as_ref()
            .filter(|_| is_asked(job, self.config) || GpuMemoryNeed::of(job).is_some())?;
        Some(format!("GPU memory is not measured: {why}"))
    }

    /// Brings the gauges up to date before they are read.
    pub(crate) fn set_gauges(&self, metrics: &Metrics) {
        metrics.set_jobs(self.jobs.values().filter(|j| j.record.is_live()).map(|j| self.info(j)));
        let count = |state| self.jobs.values().filter(|j| j.record.state == state).count();
        for state in JobState::ALL {
            metrics.set_state(state, count(state));
        }
    }

    /// The notes of a job's record. That a miss is predicted is none of them while the job is in time.
    fn own_notes(&self, job: &Job) -> Vec<String> {
        let has_miss = self.forecasts.deadline_info(job, self.now).is_some_and(|deadline| deadline.miss.is_some());
        if has_miss { job.record.notes.clone() } else { job.record.notes_without_miss() }
    }

    pub(super) fn info(&self, job: &Job) -> JobInfo {
        let r = &job.record;
        let live = r.is_live();
        let running = r.state == JobState::Running;
        let verdict = job.verdict.as_ref().filter(|_| live);
        let target = verdict.and_then(|v| v.target);
        let seconds = |m: Option<Moment>| m.map(|m| m.unix_s);
        let text = |m: Option<Moment>| m.map(|m| rfc3339(m.unix_s));
        let elapsed = r.started.map(|s| r.ended.map_or(self.now, |e| e.time).since(s.time).as_secs_f64());
        let mut notes = self.own_notes(job);
        notes.extend(job.apply_error.iter().filter(|_| live).cloned());
        notes.extend(job.reports.as_ref().and_then(Reports::folder_note));
        JobInfo {
            id: r.id.0,
            name: r.name.clone(),
            state: r.state,
            attempt: r.attempt,
            runtime: kind_name(r.spec.runtime).into(),
            command: r.spec.command.clone(),
            cwd: r.spec.cwd.as_ref().map(|c| c.display().to_string()),
            env_names: r.spec.env_names(),
            owner: r.owner.clone(),
            priority: r.spec.priority,
            after: r.spec.after.clone(),
            attached: r.attached,
            dir: self.paths.job(r.id.0).display().to_string(),
            submitted_at: rfc3339(r.submitted.unix_s),
            submitted_s: r.submitted.unix_s,
            started_at: text(r.started),
            started_s: seconds(r.started),
            ended_at: text(r.ended),
            ended_s: seconds(r.ended),
            elapsed_s: elapsed,
            exit_code: r.exit_code,
            signal: r.signal,
            pid: r.leader.map(|l| l.pid),
            share: target.map(|t| t.share.cpu.get()),
            limit: target.map(|t| t.limit.cpu.get()),
            category: target.and(verdict).map(|v| v.category.name().to_owned()),
            growth: verdict.and_then(|v| v.growth.cpu),
            metric: metric(job),
            rhythm: if running { rhythm_info(job, self.now) } else { None },
            eta_s: if running { self.eta_s(job) } else { None },
            done: if r.is_live() { self.forecasts.forecast(job, self.now) } else { None },
            deadline: self.forecasts.deadline_info(job, self.now),
            cpu_cores: job.progress.meter.cores().filter(|_| running),
            whole_cores: job.in_force.as_ref().and_then(|limits| limits.team).filter(|_| running),
            team: Some(job.team).filter(|&team| team > 0 && running && job.has_inside()),
            gpu_share: job.gpu.share.filter(|_| running),
            gpu_time_s: Some(job.gpu.used_s).filter(|used_s| *used_s > 0.0),
            gpu_memory_bytes: job.gpu.memory_bytes(self.now).filter(|_| running),
            gpu_memory_peak_bytes: job.progress.gpu_peak_bytes,
            memory_bytes: job.progress.meter.memory_bytes().filter(|_| running),
            reason: self.why(job),
            notes,
        }
    }

    /// As predicted; before there is a prediction, at the pace so far, or at that of the rhythm. `None` unless the job
    /// says how many steps there are, or an earlier run does.
    fn eta_s(&self, job: &Job) -> Option<f64> {
        if let Some(done) = self.forecasts.forecast(job, self.now) {
            return Some((done.at_s - self.clock.moment().unix_s).max(0.0));
        }
        let signal = job.progress.tracker.signal();
        let (step, total) = match (job.progress.course, signal.step) {
            (Some(course), _) => (course.step, course.total?),
            (None, Some(step)) => (step, signal.total?),
            (None, None) => {
                let rhythm = rhythm_info(job, self.now).filter(|rhythm| rhythm.stalled_s.is_none())?;
                return Some(rhythm.total?.saturating_sub(rhythm.steps) as f64 / rhythm.steps_per_s);
            }
        };
        let since = job.record.started?.time;
        let at = signal.last.map_or(job.last_read, |last| last.at);
        let pace = step as f64 / at.since(since).as_secs_f64();
        let left = total.saturating_sub(step) as f64 / pace - self.now.since(at).as_secs_f64();
        (pace > 0.0 && left.is_finite()).then_some(left.max(0.0))
    }

    /// Why the job is where it is.
    pub(super) fn why(&self, job: &Job) -> Option<ReasonInfo> {
        if let Some(text) = &job.record.why {
            return Some(ReasonInfo { why: job.record.state.name().to_owned(), text: text.clone() });
        }
        if !job.record.is_live() {
            return None;
        }
        let without_room = self.gpus.without_room.get(&job.record.id);
        if let Some(text) = without_room.filter(|_| job.record.state == JobState::Queued) {
            return Some(ReasonInfo { why: WAITS_FOR_GPU_MEMORY.to_owned(), text: text.clone() });
        }
        let mut reason = why(job.verdict.as_ref()?);
        if let Some(other) = job.record.after.iter().find(|id| self.jobs.get(id).is_some_and(|j| j.record.is_live()))
            && job.record.state == JobState::Queued
        {
            // Control knows jobs by number; users know them by name.
            reason.text = format!("waits for {} to end", self.jobs[other].record.name);
        }
        Some(reason)
    }

    pub(super) fn plan_info(&self, at: Moment, plan: &Plan) -> PlanInfo {
        let jobs = plan.verdicts.iter().map(|(id, v)| {
            let job = self.jobs.get(id);
            PlanJob {
                id: id.0,
                name: job.map_or_else(|| id.to_string(), |j| j.record.name.clone()),
                share: v.target.map(|t| t.share.cpu.get()),
                limit: v.target.map(|t| t.limit.cpu.get()),
                growth: v.growth.cpu,
                category: v.category.name().to_owned(),
                reason: why(v),
                error: job.and_then(|j| j.apply_error.clone()),
            }
        });
        PlanInfo {
            generation: plan.generation,
            at: rfc3339(at.unix_s),
            at_s: at.unix_s,
            starts: plan.starts.iter().map(|s| s.job.0).collect(),
            jobs: jobs.collect(),
        }
    }
}

/// When each loop of the daemon last came round. Asks no loop, so it answers even if one is stuck.
pub(crate) fn loop_reports(pulses: &Pulses) -> Vec<LoopReport> {
    let report = |(name, age): (&str, Duration)| LoopReport {
        name: name.to_owned(),
        age_s: age.as_secs_f64(),
        is_stuck: age > STUCK_AFTER,
    };
    pulses.report().into_iter().map(report).collect()
}

fn preset_name(preset: Preset) -> String {
    preset.name().to_owned()
}

fn metric(job: &Job) -> Option<MetricInfo> {
    let signal = job.progress.tracker.signal();
    Some(MetricInfo {
        name: job.progress.metric.clone()?,
        value: signal.last?.value,
        step: signal.step.or(job.progress.course.map(|c| c.step)),
        total: signal.total.or(job.progress.course.and_then(|c| c.total)),
        total_from: signal.claimed_by.map(|source| source.name().to_owned()),
        total_trust: signal.total.map(|_| length::trust(&signal, &job.history, job.claim_record())),
        source: job.progress.source.clone().unwrap_or_default(),
    })
}

fn metric_notes(job: &Job) -> Vec<String> {
    let mut notes = Vec::new();
    let Some(reports) = &job.reports else { return notes };
    let c = reports.counters();
    let refused = job.progress.tracker.refused();
    for (count, what) in [
        (c.bad_values + refused, "values were not finite or absurdly large and were not used"),
        (c.long_lines, "lines were too long to be a report"),
        (c.dropped_readings, "readings were dropped: too many at once"),
        (c.flooded_lines, "lines were not read because the job prints too fast"),
        (c.bad_records, "records of event files were damaged"),
        (c.restarts, "times a file was replaced or truncated"),
        (c.failures, "times a source could not be read"),
        (c.rested_lines, "lines were not matched because the pattern had used up its CPU time"),
        (c.panics, "faults inside a collector: its progress is not read any more"),
    ] {
        if count > 0 {
            notes.push(format!("{count} {what}"));
        }
    }
    if job.progress.metric.is_none() {
        let name = &job.record.spec.metric.name;
        notes.push(match name {
            Some(name) => format!("`{name}` was not seen yet: is that its name in what the job prints or writes?"),
            None => "no loss or accuracy was recognised yet: name one with --metric or [metric]".into(),
        });
    }
    notes
}
