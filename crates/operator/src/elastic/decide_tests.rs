//! The decision on made-up jobs. Each job trains by a simple rule: a step takes the workers' part and then the part of
//! the slowest server.

use super::*;
use crate::elastic::apply::ResizeOutcome;
use crate::elastic::run::next_scale;
use crate::elastic::snapshot::WaitingGang;
use crate::state::workload::{WorkloadKey, WorkloadKind};
use gainshare_kube_api::names::NamespacedName;
use gainshare_kube_api::tasks::TaskScale;
use jiff::Timestamp;

const GIB: u64 = 1 << 30;
const INTERVAL_S: f64 = 30.0;

/// A cluster of one node and its jobs.
struct TestCluster {
    sizes: SizeDecider,
    snapshot: ElasticSnapshot,
    now_s: f64,
    /// CPU seconds that a step costs each server, and all workers together.
    servers_cost_s: Vec<f64>,
    workers_cost_s: f64,
    steps: f64,
}

fn bounds(count: u32, max: u32, milli: u64) -> RoleBounds {
    RoleBounds { count, min: count.min(1), max, milli, bytes: GIB }
}

fn task(role: Role, index: u32, milli: u64) -> RunningTask {
    RunningTask {
        task: TaskId::new(role, index),
        pod_uid: format!("{}-{index}", role.lower()).into(),
        node: "n".into(),
        milli,
        allowed_milli: (10, 16_000),
        memory_bytes: Some(GIB),
        memory_used_bytes: GIB / 4,
        cpu_s: 0.0,
    }
}

/// Two servers and two workers of one core each; `max` workers.
fn cluster(free_milli: u64, servers_cost_s: [f64; 2], workers_cost_s: f64, max: u32) -> TestCluster {
    let tasks = vec![
        task(Role::Ps, 0, 1000),
        task(Role::Ps, 1, 1000),
        task(Role::Worker, 0, 1000),
        task(Role::Worker, 1, 1000),
    ];
    let servers = RoleBounds { min: 2, ..bounds(2, 2, 1000) };
    let job = RunningJob {
        key: WorkloadKey::new(WorkloadKind::TaskJob, NamespacedName::new("team", "job")),
        uid: "job".into(),
        epoch: 1,
        created: Timestamp::UNIX_EPOCH,
        is_async: false,
        due_in_s: None,
        tasks,
        servers,
        workers: RoleBounds { min: 1, ..bounds(2, max, 1000) },
        step: Some(0),
        total: Some(1_000_000),
    };
    let snapshot = ElasticSnapshot {
        free: [("n".into(), (free_milli, 64 * GIB))].into(),
        running: vec![job],
        ..ElasticSnapshot::default()
    };
    TestCluster {
        sizes: SizeDecider::new(Elastic::default()),
        snapshot,
        now_s: 0.0,
        servers_cost_s: servers_cost_s.to_vec(),
        workers_cost_s,
        steps: 0.0,
    }
}

impl TestCluster {
    fn job(&mut self) -> &mut RunningJob {
        &mut self.snapshot.running[0]
    }

    fn speed(&self) -> f64 {
        let job = &self.snapshot.running[0];
        let cores = |task: &RunningTask| task.milli as f64 / 1000.0;
        let workers: Vec<f64> = job.tasks.iter().filter(|t| t.task.role == Role::Worker).map(cores).collect();
        let slowest = workers.iter().copied().fold(f64::INFINITY, f64::min);
        let serve = job.tasks.iter().filter(|t| t.task.role == Role::Ps);
        let serve = serve.map(|t| self.servers_cost_s[t.task.index as usize] / cores(t)).fold(0.0, f64::max);
        1.0 / (self.workers_cost_s / (workers.len() as f64 * slowest) + serve)
    }

    /// Lets one interval pass and decides.
    fn pass(&mut self) -> Vec<ScaleDecision> {
        let steps = self.speed() * INTERVAL_S;
        let (servers, workers_cost_s) = (self.servers_cost_s.clone(), self.workers_cost_s);
        self.steps += steps;
        let step = self.steps as u64;
        let job = self.job();
        job.step = Some(step);
        let workers = job.tasks.iter().filter(|t| t.task.role == Role::Worker).count() as f64;
        for task in &mut job.tasks {
            let cost_s = match task.task.role {
                Role::Ps => servers[task.task.index as usize],
                _ => workers_cost_s / workers,
            };
            task.cpu_s += cost_s * steps;
        }
        self.now_s += INTERVAL_S + 1.0;
        self.sizes.decide(&self.snapshot, Time::from_secs_f64(self.now_s))
    }

    /// Carries out what was decided, as if every request were granted.
    fn carry_out(&mut self, decisions: &[ScaleDecision]) {
        for decision in decisions {
            for resize in &decision.resizes {
                let free = self.snapshot.free.get_mut("n").unwrap();
                free.0 = (free.0 + resize.from_milli).checked_sub(resize.to_milli).expect("the node holds it");
                let job = &mut self.snapshot.running[0];
                let task = job.tasks.iter_mut().find(|task| task.pod_uid == resize.pod_uid).unwrap();
                task.milli = resize.to_milli;
                task.memory_bytes = resize.memory_bytes.or(task.memory_bytes);
            }
            if let Some((_, to)) = decision.workers {
                let pattern = self.snapshot.running[0].tasks.last().unwrap().milli;
                let job = &mut self.snapshot.running[0];
                job.tasks.retain(|task| task.task.role != Role::Worker || task.task.index < to);
                for index in job.tasks.iter().filter(|t| t.task.role == Role::Worker).count() as u32..to {
                    job.tasks.push(task(Role::Worker, index, pattern));
                    self.snapshot.free.get_mut("n").unwrap().0 -= pattern;
                }
            }
        }
    }

    /// Passes until something is to change.
    fn next_change(&mut self) -> ScaleDecision {
        for _ in 0..8 {
            let decisions = self.pass();
            if let Some(found) = decisions.iter().find(|d| d.workers.is_some() || !d.resizes.is_empty()) {
                return found.clone();
            }
        }
        panic!("nothing changes");
    }
}

#[test]
fn a_hot_server_grows_alone() {
    // Server 1 has nearly all of the work.
    let mut cluster = cluster(8000, [0.01, 0.5], 0.05, 2);
    let before = cluster.speed();
    let change = cluster.next_change();
    assert_eq!(change.why, TaskReason::HotServer { index: 1 });
    let [resize] = &change.resizes[..] else { panic!("{change:?}") };
    assert_eq!((resize.task, resize.from_milli, resize.to_milli), (TaskId::new(Role::Ps, 1), 1000, 2000));
    cluster.carry_out(&[change]);
    assert!(cluster.speed() > 1.5 * before);
}

#[test]
fn deadlines_are_in_the_view() {
    let mut cluster = cluster(8000, [0.1, 0.1], 0.5, 2);
    let mut deadline = |due_in_s: Option<f64>| {
        cluster.job().due_in_s = due_in_s;
        cluster.sizes.view(&cluster.snapshot, Time::from_secs_f64(10.0)).jobs[0].deadline
    };
    assert_eq!(deadline(None), None);
    assert_eq!(deadline(Some(50.0)), Some(Deadline::strict(Time::from_secs_f64(60.0))));
    assert_eq!(deadline(Some(-1e9)), Some(Deadline::strict(Time::ZERO)), "one that has passed");
}

#[test]
fn nothing_is_decided_twice() {
    let mut cluster = cluster(0, [0.1, 0.1], 0.5, 2);
    for _ in 0..6 {
        let decisions = cluster.pass();
        assert!(
            decisions.iter().all(|d| d.workers.is_none() && d.resizes.is_empty()),
            "there is no room: {decisions:?}"
        );
        let again = cluster.sizes.decide(&cluster.snapshot, Time::from_secs_f64(cluster.now_s + 0.5));
        assert_eq!(again, [], "nothing is due");
    }
}

fn gang(milli: u64) -> WaitingGang {
    WaitingGang {
        uid: "other".into(),
        created: Timestamp::UNIX_EPOCH,
        priority: 0,
        servers: RoleBounds { min: 1, ..bounds(1, 1, milli) },
        workers: RoleBounds { min: 1, ..bounds(1, 1, milli) },
        traffic: Vec::new(),
    }
}

#[test]
fn no_job_grows_while_a_gang_waits() {
    let mut cluster = cluster(8000, [0.01, 0.5], 0.05, 2);
    // It would need more than there is, and nothing that was added could be returned.
    cluster.snapshot.waiting = vec![gang(6000)];
    for _ in 0..5 {
        let decisions = cluster.pass();
        assert!(decisions.iter().all(|d| d.workers.is_none() && d.resizes.is_empty()), "{decisions:?}");
    }
    cluster.snapshot.waiting.clear();
    assert_eq!(cluster.next_change().why, TaskReason::HotServer { index: 1 });
}

#[test]
fn growth_is_returned_to_a_gang_that_waits() {
    let mut cluster = cluster(1000, [0.01, 0.5], 0.05, 2);
    let growth = cluster.next_change();
    cluster.carry_out(&[growth]);
    assert_eq!((cluster.job().tasks[1].milli, cluster.snapshot.free["n"].0), (2000, 0));
    cluster.snapshot.waiting = vec![gang(500)];
    let returned = cluster.next_change();
    assert_eq!(returned.why, TaskReason::GivesBack);
    assert_eq!((returned.resizes[0].from_milli, returned.resizes[0].to_milli), (2000, 1000));
}

#[test]
fn workers_stay_within_the_bounds() {
    // One core is all that a worker may have, so only their number can grow.
    let mut cluster = cluster(8000, [0.01, 0.01], 2.0, 3);
    cluster.job().tasks.iter_mut().for_each(|task| task.allowed_milli.1 = 1000);
    let change = cluster.next_change();
    assert_eq!((change.why, change.workers), (TaskReason::WorkersStarved, Some((2, 3))));
    cluster.carry_out(&[change]);
    for _ in 0..6 {
        let decisions = cluster.pass();
        assert!(decisions.iter().all(|d| d.workers.is_none_or(|(_, to)| to <= 3)), "{decisions:?}");
        cluster.carry_out(&decisions);
    }
}

#[test]
fn memory_is_raised_before_it_runs_out() {
    let mut cluster = cluster(0, [0.1, 0.1], 0.5, 2);
    cluster.job().tasks[0].memory_used_bytes = GIB / 10 * 9;
    let change = cluster.next_change();
    assert_eq!(change.why, TaskReason::MemoryShort);
    assert!(change.resizes[0].memory_bytes.is_some_and(|bytes| bytes > GIB), "{change:?}");
    // A task without a memory setting keeps none: a resize cannot add one.
    cluster.job().tasks.iter_mut().for_each(|task| task.memory_bytes = None);
    let decisions = cluster.pass();
    assert!(decisions.iter().all(|decision| decision.resizes.is_empty()), "{decisions:?}");
}

#[test]
fn nonsense_stops_nothing() {
    let mut cluster = cluster(8000, [0.01, 0.5], 0.05, 2);
    let mut bad = cluster.snapshot.running[0].clone();
    bad.uid = "bad".into();
    (bad.step, bad.total, bad.epoch) = (Some(u64::MAX), Some(0), u32::MAX);
    for (at, task) in bad.tasks.iter_mut().enumerate() {
        task.pod_uid = format!("bad-{at}").into();
        task.cpu_s = [f64::NAN, f64::INFINITY, -1.0, 1e300][at % 4];
        (task.milli, task.memory_bytes, task.memory_used_bytes) = (u64::MAX, Some(0), u64::MAX);
        task.node = "nowhere".into();
        task.allowed_milli = (u64::MAX, 0);
    }
    cluster.snapshot.running.push(bad);
    let mut empty = cluster.snapshot.running[0].clone();
    (empty.uid, empty.tasks) = ("empty".into(), Vec::new());
    cluster.snapshot.running.push(empty);
    cluster.snapshot.waiting =
        vec![WaitingGang { servers: RoleBounds::default(), workers: RoleBounds::default(), ..gang(0) }];
    for _ in 0..3 {
        cluster.pass();
    }
    cluster.snapshot.running.truncate(1);
    cluster.snapshot.waiting.clear();
    assert_eq!(cluster.next_change().why, TaskReason::HotServer { index: 1 }, "the other job is decided on");
}

#[test]
fn counters_only_grow_and_go_on_between_reports() {
    let mut counter = Counter::default();
    let mut at = |now_s: f64, reported: f64| counter.value(reported, now_s);
    assert_eq!([at(10.0, 5.0), at(12.0, 9.0)], [5.0, 9.0]);
    assert_eq!([at(13.0, 9.0), at(14.0, 13.0)], [11.0, 13.0], "it goes on with two a second");
    assert_eq!([at(20.0, 13.0), at(30.0, f64::NAN)], [19.0, 19.0], "for three seconds");
    // A node agent that starts again counts from zero.
    assert_eq!(at(40.0, 2.0), 19.0);
    assert_eq!(at(41.0, 9.0), 22.0);
}

#[test]
fn the_chief_is_the_first_worker() {
    let mut cluster = cluster(8000, [0.01, 0.01], 2.0, 4);
    cluster.job().tasks[2].task = TaskId::new(Role::Chief, 0);
    cluster.job().tasks[3].task = TaskId::new(Role::Worker, 0);
    let job = cluster.job().clone();
    let ids: Vec<CoreTask> = job.tasks.iter().map(|task| core_task(&job, task.task)).collect();
    assert_eq!(ids, [CoreTask::server(0), CoreTask::server(1), CoreTask::worker(0), CoreTask::worker(1)]);
}

#[test]
fn what_is_published_names_the_cause_and_the_last_change() {
    let resize = TaskResize {
        task: TaskId::new(Role::Ps, 1),
        pod_uid: "p".into(),
        node: "n".into(),
        from_milli: 300,
        to_milli: 600,
        memory_bytes: None,
    };
    let why = TaskReason::HotServer { index: 1 };
    let decision = ScaleDecision { uid: "u".into(), why, workers: Some((2, 3)), resizes: vec![resize] };
    let done = [("p".into(), ResizeOutcome::Done)].into();
    let now = Timestamp::from_nanosecond(7_123_456_789).unwrap();
    let scale = next_scale(TaskScale::default(), &decision, &done, now);
    let read: TaskScale = serde_json::from_value(serde_json::json!(scale)).unwrap();
    assert_eq!(read, scale, "what is read back is what was written");
    assert_eq!((scale.workers, scale.cause.as_str()), (Some(3), "hot-server"));
    assert!(scale.last_change.contains("ps-1: 0.30 to 0.60 cores, workers 2 to 3"), "{}", scale.last_change);
    let settled = ScaleDecision { why: TaskReason::Settled, workers: None, resizes: Vec::new(), ..decision.clone() };
    let after = next_scale(scale.clone(), &settled, &BTreeMap::new(), Timestamp::MAX);
    assert_eq!((after.cause.as_str(), &after.last_change, after.workers), ("settled", &scale.last_change, Some(3)));
    assert_eq!(next_scale(after.clone(), &settled, &BTreeMap::new(), Timestamp::MAX), after, "nothing is written");
    let refused = [("p".into(), ResizeOutcome::Refused("the quota is used up".to_owned()))].into();
    let kept = next_scale(TaskScale::default(), &ScaleDecision { workers: None, ..decision }, &refused, now);
    assert!(kept.message.contains("quota") && kept.changed_at.is_none(), "{kept:?}");
}

#[test]
fn an_unsound_plan_changes_no_task_and_is_counted() {
    let mut cluster = cluster(8000, [0.01, 0.5], 0.05, 2);
    cluster.sizes.decider.break_plans();
    for _ in 0..8 {
        assert_eq!(cluster.pass(), []);
    }
    assert!(cluster.sizes.rejected > 0);
    let record = cluster.sizes.records()["job"].clone();
    assert_eq!(record.err(), Some(RecordError::Undecided), "a plan that was not carried out is not a decision");
}

#[test]
fn the_last_decision_about_the_sizes_of_a_job_replays() {
    let mut cluster = cluster(8000, [0.01, 0.5], 0.05, 2);
    let change = cluster.next_change();
    let JobDecision { job, decision } = cluster.sizes.records()["job"].clone().expect("it is recorded");
    let record = decision.record().expect("it is recorded");
    assert_eq!(record.plan.tasks[&job].why, change.why);
    assert_eq!(record.replay().unwrap().differences, []);
    let text = serde_json::to_string(&record).unwrap();
    assert!(!text.contains("\"n\"") && !text.contains("team"), "a record contains no names: {text}");
}
