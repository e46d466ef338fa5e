//! What the tasks of running jobs send and receive: smoothed, and written to the job's status for its next placement.
//!
//! **Problem.** The best place of a server depends on how much it exchanges with which workers. That is not known
//! before the job has run, and numbers of a few seconds say little.
//!
//! **How.** Node agents report bytes per second of each task. [`TrafficBook`] keeps a mean that forgets in about
//! [`MEMORY_S`]. The roles say which tasks talk: workers with servers. So the pair of a server and a worker gets the
//! product of both totals over the sum of the workers (`core::policies::elastic::affinity`), and only totals are kept.
//!
//! **Writes.** A job's traffic is written when all its tasks have been measured for [`SETTLED_S`], and again when the
//! part of a task in its role has changed by [`WORTH_PART`], [`REWRITE_S`] after the last write at the earliest.
//!
//! **Properties**, each a test: `traffic_is_written_once_it_is_known`, `small_changes_are_not_written`,
//! `a_task_that_is_not_measured_holds_the_write_back`, `nonsense_of_an_agent_is_bounded`.

use crate::jobs::task_job::line;
use crate::state::lead::Leader;
use crate::state::workload::WorkloadKey;
use gainshare_kube_api::names::JobUid;
use gainshare_kube_api::tasks::{Role, TaskId, TaskTraffic};
use gainshare_kube_api::training_job::State;
use std::collections::{BTreeMap, BTreeSet};

/// How long a pass of the book is apart from the next.
pub(super) const PASS_EVERY_S: f64 = 5.0;
/// The mean forgets what is older than about this.
const MEMORY_S: f64 = 60.0;
/// A task is known after this time.
const SETTLED_S: f64 = 30.0;
/// Between two writes for one job.
const REWRITE_S: f64 = 300.0;
/// A change of a task's part in the traffic of its role that is worth a write.
const WORTH_PART: f64 = 0.1;
/// Servers that exchange less than this together say nothing: it is the noise of connections.
const LEAST_BYTES_S: f64 = 10_000.0;

/// A running job, and what is reported about each of its tasks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ReportedJob {
    pub(super) key: WorkloadKey,
    pub(super) uid: JobUid,
    pub(super) epoch: u32,
    /// Bytes per second; `None` for a task of which nothing is reported.
    pub(super) tasks: BTreeMap<TaskId, Option<f64>>,
    /// What its status says already.
    pub(super) written: TaskTraffic,
}

#[derive(Debug, Default)]
pub(super) struct TrafficBook {
    /// By uid and epoch: each attempt is measured by itself.
    jobs: BTreeMap<(JobUid, u32), MeasuredJob>,
    passed_s: Option<f64>,
}

#[derive(Debug, Default)]
struct MeasuredJob {
    tasks: BTreeMap<TaskId, Mean>,
    written_s: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
struct Mean {
    bytes_s: f64,
    since_s: f64,
    at_s: f64,
}

impl Mean {
    fn add(&mut self, bytes_s: f64, now_s: f64) {
        let weight = 1.0 - (-(now_s - self.at_s).max(0.0) / MEMORY_S).exp();
        // At first all that was measured counts alike.
        let age_s = (now_s - self.since_s).max(PASS_EVERY_S);
        let weight = weight.max(PASS_EVERY_S.min(now_s - self.at_s).max(0.0) / age_s).clamp(0.0, 1.0);
        self.bytes_s += weight * (bytes_s - self.bytes_s);
        self.at_s = now_s;
    }
}

impl TrafficBook {
    /// Whether the reports are to be read again.
    pub(super) fn is_due(&self, now_s: f64) -> bool {
        self.passed_s.is_none_or(|passed| now_s - passed >= PASS_EVERY_S)
    }

    /// Takes in what is reported. Answers the traffic of the jobs whose status is to change.
    pub(super) fn take(&mut self, jobs: &[ReportedJob], now_s: f64) -> Vec<(WorkloadKey, JobUid, TaskTraffic)> {
        self.passed_s = Some(now_s);
        let alive: BTreeSet<(&JobUid, u32)> = jobs.iter().map(|job| (&job.uid, job.epoch)).collect();
        self.jobs.retain(|(uid, epoch), _| alive.contains(&(uid, *epoch)));
        let mut changes = Vec::new();
        for job in jobs {
            let measured = self.jobs.entry((job.uid.clone(), job.epoch)).or_default();
            measured.tasks.retain(|task, _| job.tasks.contains_key(task));
            for (task, bytes_s) in &job.tasks {
                let Some(bytes_s) = bytes_s.filter(|bytes_s| bytes_s.is_finite()) else { continue };
                let first = Mean { bytes_s, since_s: now_s, at_s: now_s };
                measured.tasks.entry(*task).or_insert(first).add(bytes_s, now_s);
            }
            if let Some(traffic) = measured.news(job, now_s) {
                measured.written_s = Some(now_s);
                changes.push((job.key.clone(), job.uid.clone(), traffic));
            }
        }
        changes
    }
}

impl MeasuredJob {
    /// The traffic that is to be written, if it is known and says more than what was written before.
    fn news(&self, job: &ReportedJob, now_s: f64) -> Option<TaskTraffic> {
        let is_known = |task: &TaskId| self.tasks.get(task).is_some_and(|mean| now_s - mean.since_s >= SETTLED_S);
        if !job.tasks.keys().all(is_known) {
            return None;
        }
        let of_role = |role: Role| self.tasks.iter().filter(move |(task, _)| task.role == role);
        if of_role(Role::Ps).map(|(_, mean)| mean.bytes_s).sum::<f64>() < LEAST_BYTES_S {
            return None;
        }
        let all: TaskTraffic =
            self.tasks.iter().map(|(task, mean)| (task.to_string(), rounded(mean.bytes_s))).collect();
        let is_early = self.written_s.is_some_and(|at| now_s - at < REWRITE_S);
        (!is_early && says_more(&job.written, &all)).then_some(all)
    }
}

/// Two digits are enough for a placement, and change less often.
fn rounded(bytes_s: f64) -> u64 {
    let whole = bytes_s.clamp(0.0, 1e15) as u64;
    let unit = 10_u64.pow(whole.checked_ilog10().unwrap_or(0).saturating_sub(1));
    (whole + unit / 2) / unit * unit
}

/// Whether the part of a task in its role differs enough from what was written, or a task is new.
fn says_more(written: &TaskTraffic, now: &TaskTraffic) -> bool {
    let role = |name: &str| TaskId::parse(name).map(|task| task.role == Role::Ps);
    let part = |all: &TaskTraffic, name: &str| {
        let same = all.iter().filter(|(other, _)| role(other) == role(name));
        let sum = same.fold(0_u64, |sum, (_, bytes_s)| sum.saturating_add(*bytes_s));
        all.get(name).map(|bytes_s| if sum == 0 { 0.0 } else { *bytes_s as f64 / sum as f64 })
    };
    now.keys().any(|name| match (part(written, name), part(now, name)) {
        (Some(before), Some(after)) => (before - after).abs() >= WORTH_PART,
        _ => true,
    })
}

/// Reads what node agents report, and passes what is new to the jobs' own state machines.
pub(super) fn pass(leader: &Leader, book: &mut TrafficBook, now_s: f64) {
    if !book.is_due(now_s) {
        return;
    }
    let jobs = read(leader);
    let alive: BTreeSet<&JobUid> = jobs.iter().map(|job| &job.uid).collect();
    leader.traffic_orders.lock().retain(|uid, _| alive.contains(uid));
    for (key, uid, traffic) in book.take(&jobs, now_s) {
        leader.traffic_orders.lock().insert(uid, traffic);
        leader.change(|world| world.jobs.mark(key));
    }
}

/// The running jobs with servers. Tasks that do not run are left out; an evaluator talks to no server.
fn read(leader: &Leader) -> Vec<ReportedJob> {
    leader.read(|world| {
        let agents = leader.agents.lock();
        let mut all = Vec::new();
        for job in world.jobs.task_jobs() {
            let journal = &job.status.journal;
            let has_servers = job.spec.as_ref().is_ok_and(|spec| spec.roles.contains_key(&Role::Ps));
            let runs = journal.state == State::Running && journal.admitted && !journal.restarting && !job.deleting;
            if !runs || !has_servers || job.is_foreign {
                continue;
            }
            let mut tasks = BTreeMap::new();
            for (task, (pod, attempt)) in line::current(world, job) {
                if attempt.running && task.role != Role::Evaluator {
                    let reported = agents.job(&pod.uid).and_then(|report| report.signal?.traffic);
                    tasks.insert(task, reported.map(|traffic| traffic.received_bytes_s + traffic.sent_bytes_s));
                }
            }
            let written = journal.traffic.clone();
            all.push(ReportedJob { key: job.key.clone(), uid: job.uid.clone(), epoch: journal.epoch, tasks, written });
        }
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::workload::WorkloadKind;
    use gainshare_kube_api::names::NamespacedName;

    fn job(rates: &[(Role, u32, Option<f64>)]) -> ReportedJob {
        ReportedJob {
            key: WorkloadKey::new(WorkloadKind::TaskJob, NamespacedName::new("team", "a")),
            uid: "u".into(),
            epoch: 1,
            tasks: rates.iter().map(|(role, index, rate)| (TaskId::new(*role, *index), *rate)).collect(),
            written: TaskTraffic::new(),
        }
    }

    /// The seconds pass; what is to be written is written at once.
    fn live(book: &mut TrafficBook, job: &mut ReportedJob, from_s: u64, to_s: u64) -> Vec<TaskTraffic> {
        let mut all = Vec::new();
        for second in (from_s..to_s).step_by(PASS_EVERY_S as usize) {
            for (_, _, traffic) in book.take(std::slice::from_ref(job), second as f64) {
                job.written = traffic.clone();
                all.push(traffic);
            }
        }
        all
    }

    #[test]
    fn traffic_is_written_once_it_is_known() {
        let mut book = TrafficBook::default();
        let mut job = job(&[
            (Role::Ps, 0, Some(9.04e6)),
            (Role::Ps, 1, Some(1.0e6)),
            (Role::Worker, 0, Some(5.02e6)),
            (Role::Chief, 0, Some(5.02e6)),
        ]);
        assert_eq!(live(&mut book, &mut job, 0, 30), [], "too early");
        let written = live(&mut book, &mut job, 30, 2000);
        let named = [("ps-0", 9_000_000), ("ps-1", 1_000_000), ("worker-0", 5_000_000), ("chief-0", 5_000_000)];
        assert_eq!(written, [named.map(|(name, bytes_s)| (name.to_owned(), bytes_s)).into()]);
        job.epoch = 2;
        assert_eq!(live(&mut book, &mut job, 2000, 2400), [], "a new attempt that is as before changes nothing");
    }

    #[test]
    fn small_changes_are_not_written() {
        let mut book = TrafficBook::default();
        let mut measured = job(&[(Role::Ps, 0, Some(5e6)), (Role::Ps, 1, Some(5e6)), (Role::Worker, 0, Some(1e7))]);
        assert_eq!(live(&mut book, &mut measured, 0, 100).len(), 1);
        // All is twice as fast, and one server is a little above the other.
        measured.tasks =
            job(&[(Role::Ps, 0, Some(1.1e7)), (Role::Ps, 1, Some(9e6)), (Role::Worker, 0, Some(2e7))]).tasks;
        assert_eq!(live(&mut book, &mut measured, 100, 3000).len(), 0);
        measured.tasks.insert(TaskId::new(Role::Ps, 0), Some(5e7));
        let again = live(&mut book, &mut measured, 3000, 6000);
        assert!((1..=3).contains(&again.len()) && again.last().unwrap()["ps-0"] > 30_000_000, "{again:?}");
    }

    #[test]
    fn a_task_that_is_not_measured_holds_the_write_back() {
        let mut book = TrafficBook::default();
        let mut part = job(&[(Role::Ps, 0, Some(5e6)), (Role::Worker, 0, None)]);
        assert_eq!(live(&mut book, &mut part, 0, 1000), []);
        let (mut book, mut idle) =
            (TrafficBook::default(), job(&[(Role::Ps, 0, Some(50.0)), (Role::Worker, 0, Some(50.0))]));
        assert_eq!(live(&mut book, &mut idle, 0, 1000), [], "a job that exchanges nothing");
    }

    #[test]
    fn nonsense_of_an_agent_is_bounded() {
        let mut book = TrafficBook::default();
        let mut odd = job(&[(Role::Ps, 0, Some(1e12)), (Role::Ps, 1, Some(f64::NAN)), (Role::Worker, 0, Some(-1.0))]);
        assert_eq!(live(&mut book, &mut odd, 0, 100), []);
        odd.tasks.insert(TaskId::new(Role::Ps, 1), Some(f64::MAX));
        let written = live(&mut book, &mut odd, 100, 1000);
        assert!(
            written.iter().flat_map(BTreeMap::values).all(|bytes_s| *bytes_s <= 1_000_000_000_000_000),
            "{written:?}"
        );
        assert_eq!((rounded(0.0), rounded(7.9), rounded(1949.0), rounded(-5.0)), (0, 7, 1900, 0));
    }

    /// One loud second is no traffic: the mean forgets it.
    #[test]
    fn the_mean_follows_slowly() {
        let mut book = TrafficBook::default();
        let mut steady = job(&[(Role::Ps, 0, Some(1e6)), (Role::Ps, 1, Some(1e6)), (Role::Worker, 0, Some(2e6))]);
        live(&mut book, &mut steady, 0, 600);
        steady.tasks.insert(TaskId::new(Role::Ps, 0), Some(2e6));
        book.take(std::slice::from_ref(&steady), 600.0);
        let mean = book.jobs[&("u".into(), 1)].tasks[&TaskId::new(Role::Ps, 0)].bytes_s;
        assert!((1.0e6..1.15e6).contains(&mean), "{mean}");
    }
}
