//! The conformance suite: what every runtime must do, checked against real jobs.
//!
//! A runtime's test gives a [`Subject`] that can start and end real jobs under it, and calls
//! [`run_all`] or the checks one by one. Every check starts its own jobs and ends them. Each
//! message of a failed check begins with the name of its property.
//!
//! CPU time is compared between jobs that compete for the same CPU, over a stretch of CPU time,
//! never with the wall clock: other programs on the machine slow all of the jobs alike.

#![allow(dead_code, reason = "each runtime's test uses the checks that can apply to it")]

use gainshare_core::check::CheckedTarget;
use gainshare_core::fixtures::checked_target;
use gainshare_core::model::{PerResource, Share};
use gainshare_core::plan::Target;
use gainshare_limits::process::ProcessRuntime;
use gainshare_limits::{AppliedLimits, JobHandle, Runtime, RuntimeError};
use std::time::{Duration, Instant};

/// A runtime under test, and the jobs to test it with.
pub(crate) trait Subject {
    fn runtime(&mut self) -> &mut dyn Runtime;

    /// Starts a job that keeps one CPU busy: CPU 0, for all jobs alike, so that they compete.
    fn start_busy(&mut self) -> JobHandle;

    /// Starts a job that waits, for checks in which no CPU time counts: a busy one would take it from the runtime, and
    /// an emulated machine has little.
    fn start_waiting(&mut self) -> JobHandle {
        self.start_busy()
    }

    /// Ends the job by force, and returns when it has ended.
    fn end(&mut self, job: &JobHandle);

    /// The job's limits as the kernel or the engine has them, read around the runtime.
    fn limits_outside(&mut self, job: &JobHandle) -> Vec<(String, String)>;

    /// The limits that the runtime reports, under the names it reports them by, read around the
    /// runtime.
    fn reported_outside(&mut self, job: &JobHandle) -> Vec<(String, String)> {
        self.limits_outside(job)
    }
}

/// A target with the same share of every resource, and the limit as given.
pub(crate) fn target(limit: f64, share: f64) -> CheckedTarget {
    checked_target(Target {
        limit: PerResource::from_fn(|_| Share::clamped(limit)),
        share: PerResource::from_fn(|_| Share::clamped(share)),
    })
}

/// No limits.
pub(crate) fn free() -> CheckedTarget {
    checked_target(Target::FREE)
}

/// A target for the CPU alone: memory, block and network I/O stay free.
pub(crate) fn cpu_target(limit: f64, share: f64) -> CheckedTarget {
    let mut target = Target::FREE;
    target.limit.cpu = Share::clamped(limit);
    target.share.cpu = Share::clamped(share);
    checked_target(target)
}

pub(crate) fn run_all(subject: &mut dyn Subject) {
    applied_limits_read_back(subject);
    the_same_plan_again_changes_nothing(subject);
    an_older_plan_is_refused(subject);
    release_restores_what_was(subject);
    counters_only_grow(subject);
    the_end_of_a_job_is_reported(subject);
    the_cpu_is_split_by_share(subject);
}

/// The values a runtime reports are the ones the kernel has.
pub(crate) fn applied_limits_read_back(subject: &mut dyn Subject) {
    let job = subject.start_waiting();
    let done =
        apply_one(subject, 10, &job, target(0.5, 0.25)).expect("applied_limits_read_back: a fresh job takes limits");
    assert!(!done.is_empty(), "applied_limits_read_back: nothing is reported as in force");
    let outside = subject.reported_outside(&job);
    for (name, value) in &done {
        let found = outside.iter().find(|(n, _)| n == name).map(|(_, found)| found);
        assert_eq!(found, Some(value), "applied_limits_read_back: {name} among {outside:?}");
    }
    finish(subject, &job);
}

pub(crate) fn the_same_plan_again_changes_nothing(subject: &mut dyn Subject) {
    let job = subject.start_waiting();
    let wanted = cpu_target(0.5, 0.25);
    let first = apply_one(subject, 20, &job, wanted).expect("the_same_plan_again_changes_nothing: first time");
    let again = apply_one(subject, 20, &job, wanted).expect("the_same_plan_again_changes_nothing: second time");
    assert_eq!(first, again, "the_same_plan_again_changes_nothing");
    finish(subject, &job);
}

pub(crate) fn an_older_plan_is_refused(subject: &mut dyn Subject) {
    let job = subject.start_waiting();
    apply_one(subject, 31, &job, cpu_target(0.5, 0.25)).expect("an_older_plan_is_refused: the newer plan");
    let before = subject.limits_outside(&job);
    match apply_one(subject, 30, &job, cpu_target(1.0, 1.0)) {
        Err(RuntimeError::OldGeneration { given: 30, known: 31, .. }) => {}
        other => panic!("an_older_plan_is_refused: {other:?}"),
    }
    assert_eq!(before, subject.limits_outside(&job), "an_older_plan_is_refused: yet something was written");
    finish(subject, &job);
}

pub(crate) fn release_restores_what_was(subject: &mut dyn Subject) {
    let job = subject.start_waiting();
    apply_one(subject, 40, &job, free()).expect("release_restores_what_was: no limits");
    retried(|| subject.runtime().release(&job)).expect("release_restores_what_was: first release");
    let original = subject.limits_outside(&job);
    subject.end(&job);

    let job = subject.start_waiting();
    apply_one(subject, 41, &job, target(0.3, 0.2)).expect("release_restores_what_was: some limits");
    assert_ne!(original, subject.limits_outside(&job), "release_restores_what_was: the limits changed nothing");
    retried(|| subject.runtime().release(&job)).expect("release_restores_what_was: release");
    assert_eq!(original, subject.limits_outside(&job), "release_restores_what_was");
    retried(|| subject.runtime().release(&job)).expect("release_restores_what_was: a second release does nothing");
    subject.end(&job);
}

pub(crate) fn counters_only_grow(subject: &mut dyn Subject) {
    let job = subject.start_busy();
    let first = subject.runtime().read(&job).expect("counters_only_grow: read");
    let grew = wait_until(Duration::from_secs(10), || {
        let now = subject.runtime().read(&job).expect("counters_only_grow: read");
        assert!(now.cpu_ns >= first.cpu_ns, "counters_only_grow: CPU time went back");
        assert!(now.block_bytes >= first.block_bytes, "counters_only_grow: block I/O went back");
        now.cpu_ns > first.cpu_ns + 50_000_000 && now.memory_bytes > 0
    });
    assert!(grew, "counters_only_grow: a busy job used no CPU or holds no memory: {:?}", subject.runtime().read(&job));
    finish(subject, &job);
}

pub(crate) fn the_end_of_a_job_is_reported(subject: &mut dyn Subject) {
    let job = subject.start_waiting();
    assert!(
        subject.runtime().is_alive(&job).expect("the_end_of_a_job_is_reported: alive"),
        "the_end_of_a_job_is_reported: too early"
    );
    subject.end(&job);
    let reported = wait_until(Duration::from_secs(5), || {
        matches!(subject.runtime().is_alive(&job), Ok(false) | Err(RuntimeError::Gone { .. }))
    });
    assert!(reported, "the_end_of_a_job_is_reported: still reported as alive");
    retried(|| subject.runtime().release(&job))
        .expect("the_end_of_a_job_is_reported: releasing what is gone is harmless");
    let after = apply_one(subject, 50, &job, free());
    assert!(
        matches!(after, Err(RuntimeError::Gone { .. })),
        "the_end_of_a_job_is_reported: a plan for an ended job: {after:?}"
    );
}

/// Two jobs that both want all of one CPU get it three to one.
pub(crate) fn the_cpu_is_split_by_share(subject: &mut dyn Subject) {
    let (large, small) = (subject.start_busy(), subject.start_busy());
    let wanted = [(large.clone(), cpu_target(0.75, 0.75)), (small.clone(), cpu_target(0.25, 0.25))];
    for result in apply(subject, 60, &wanted) {
        result.expect("the_cpu_is_split_by_share: apply");
    }
    let ratio = cpu_ratio(subject.runtime(), &large, &small);
    assert!((2.0..4.5).contains(&ratio), "the_cpu_is_split_by_share: 3 to 1 became {ratio:.2} to 1");
    finish(subject, &large);
    finish(subject, &small);
}

/// CPU time of one job over that of another while the two together use [`CPU_STRETCH_NS`].
pub(crate) fn cpu_ratio(runtime: &mut dyn Runtime, one: &JobHandle, other: &JobHandle) -> f64 {
    let mut used = || [one, other].map(|job| runtime.read(job).expect("cpu_ratio: read").cpu_ns);
    let before = used();
    let mut grown = [0; 2];
    let enough = wait_until(PATIENCE, || {
        let now = used();
        grown = [now[0] - before[0], now[1] - before[1]];
        grown[0] + grown[1] >= CPU_STRETCH_NS
    });
    assert!(enough, "cpu_ratio: two busy jobs used only {grown:?} ns of CPU in {PATIENCE:?}");
    grown[0] as f64 / grown[1].max(1) as f64
}

/// Long against the scheduler's slices and the clock ticks in which the fallback counts.
const CPU_STRETCH_NS: u64 = 3_000_000_000;

/// How long a job on a busy machine may take to use that much.
const PATIENCE: Duration = Duration::from_secs(90);

/// Applies a plan. On a slow machine an engine may not answer in time; then the plan is applied again, as the daemon
/// does with the next one.
fn apply(
    subject: &mut dyn Subject,
    generation: u64,
    wanted: &[(JobHandle, CheckedTarget)],
) -> Vec<Result<AppliedLimits, RuntimeError>> {
    let mut results = subject.runtime().apply(generation, wanted);
    for _ in 0..LATE_ANSWERS {
        if results.iter().all(|result| !matches!(result, Err(RuntimeError::Docker { .. }))) {
            break;
        }
        results = subject.runtime().apply(generation, wanted);
    }
    results
}

/// Asks again where an engine on a slow machine did not answer in time.
pub(crate) fn retried<T>(mut ask: impl FnMut() -> Result<T, RuntimeError>) -> Result<T, RuntimeError> {
    for _ in 0..LATE_ANSWERS {
        match ask() {
            Err(RuntimeError::Docker { .. }) => {}
            answer => return answer,
        }
    }
    ask()
}

/// How often an engine may answer too late to one request.
const LATE_ANSWERS: usize = 5;

fn apply_one(
    subject: &mut dyn Subject,
    generation: u64,
    job: &JobHandle,
    wanted: CheckedTarget,
) -> Result<Vec<(String, String)>, RuntimeError> {
    let mut results = apply(subject, generation, &[(job.clone(), wanted)]);
    assert_eq!(results.len(), 1, "one result for each job");
    results.remove(0).map(|in_force| in_force.settings)
}

/// Terminates a job as the daemon does, without ever waiting inside the runtime: SIGTERM, then
/// SIGKILL after `grace` until no process is left.
pub(crate) fn stop(runtime: &mut ProcessRuntime, job: &JobHandle, grace: Duration) -> bool {
    runtime.terminate(job).expect("terminate");
    let ended = wait_until(grace, || !runtime.is_alive(job).expect("is_alive"));
    ended || wait_until(Duration::from_secs(10), || runtime.kill_once(job).expect("kill_once"))
}

fn finish(subject: &mut dyn Subject, job: &JobHandle) {
    subject.end(job);
    retried(|| subject.runtime().release(job)).expect("release");
}

pub(crate) fn wait_until(patience: Duration, mut done: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < patience {
        if done() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    done()
}
