//! The rule against small worlds whose true speed is known.

use super::*;
use crate::check::check;
use crate::decider::Decider;
use crate::policies::Preset;
use crate::policy::Policy;
use crate::tasks::{RoleSpec, TaskView, TrainingMode};
use crate::view::NodeView;

const GIB: u64 = 1 << 30;

/// The truth about one job: CPU time of a step, and what else a step takes.
#[derive(Clone)]
struct TrueJob {
    /// CPU seconds of all workers for one step.
    work: f64,
    /// CPU seconds of all servers for the gradient of one worker.
    push: f64,
    /// Load of each server; sums to 1.
    loads: Vec<f64>,
    overhead_s: f64,
    /// Cores that one worker can use.
    usable: f64,
}

fn group(servers: (u32, f64), workers: (u32, u32, f64)) -> TaskGroup {
    let spec = |count, max, cores| RoleSpec {
        count,
        min: 1,
        max,
        cores,
        memory_bytes: GIB,
        least_cores: 0.25,
        max_cores: 16.0,
    };
    TaskGroup {
        mode: TrainingMode::Sync,
        servers: RoleSpec { min: servers.0, ..spec(servers.0, servers.0, servers.1) },
        workers: spec(workers.0, workers.1, workers.2),
        tasks: vec![],
        steps: 0.0,
        steps_left: Some(1e6),
        traffic: vec![],
    }
}

struct World {
    decider: Decider,
    view: View,
    truth: BTreeMap<JobId, TrueJob>,
}

impl World {
    fn new(cores: &[f64]) -> World {
        let node = |(i, cores): (usize, &f64)| NodeView {
            id: NodeId(i as u32),
            cores: *cores,
            speed: 1.0,
            memory_bytes: 64 * GIB,
            slots: None,
            idle_node_s: None,
        };
        let view = View { now: Time::ZERO, nodes: cores.iter().enumerate().map(node).collect(), jobs: vec![] };
        World { decider: Decider::new(Policy::from(Preset::Operator)), view, truth: BTreeMap::new() }
    }

    fn add(&mut self, id: u64, group: TaskGroup, truth: TrueJob) {
        let (id, arrived) = (JobId(id), self.view.now);
        self.view.jobs.push(JobView { id, arrived, tasks: Some(group), ..JobView::default() });
        self.truth.insert(id, truth);
    }

    fn group(&self, id: u64) -> &TaskGroup {
        self.view.job(JobId(id)).unwrap().tasks.as_ref().unwrap()
    }

    fn cores(&self, id: u64, role: TaskRole) -> Vec<f64> {
        self.group(id).of_role(role).map(|task| task.cores).collect()
    }

    fn runs(&self, id: u64) -> bool {
        !self.group(id).tasks.is_empty()
    }

    fn speed(&self, id: u64) -> f64 {
        let truth = &self.truth[&JobId(id)];
        let workers = self.cores(id, TaskRole::Worker);
        let count = workers.len() as f64;
        let slowest = workers.iter().fold(f64::INFINITY, |a, b| a.min(*b)).min(truth.usable);
        let servers = self.cores(id, TaskRole::Server);
        let serve = truth.loads.iter().zip(servers).map(|(l, c)| l * truth.push * count / c).fold(0.0, f64::max);
        1.0 / (truth.work / (count * slowest) + serve + truth.overhead_s)
    }

    /// Lets time pass, then decides and carries the plan out. Returns the plan's reasons by job.
    fn pass(&mut self, seconds: u64) -> BTreeMap<JobId, TaskReason> {
        self.view.now = self.view.now + Span::from_secs(seconds);
        let speeds: BTreeMap<JobId, f64> =
            self.view.jobs.iter().filter(|j| self.runs(j.id.0)).map(|j| (j.id, self.speed(j.id.0))).collect();
        for job in &mut self.view.jobs {
            let (Some(speed), Some(group)) = (speeds.get(&job.id), &mut job.tasks) else { continue };
            let (truth, steps) = (&self.truth[&job.id], speed * seconds as f64);
            group.steps += steps;
            let workers = group.of_role(TaskRole::Worker).count() as f64;
            for task in &mut group.tasks {
                task.cpu_s += steps
                    * match task.id.role {
                        TaskRole::Server => truth.loads[task.id.index as usize] * truth.push * workers,
                        TaskRole::Worker => truth.work / workers,
                    };
            }
        }
        let Some(decision) = self.decider.decide(self.view.clone()).decision() else { return BTreeMap::new() };
        let now = self.view.now;
        for (id, plan) in &decision.plan.tasks {
            let job = self.view.jobs.iter_mut().find(|job| job.id == *id).unwrap();
            let node = plan.tasks[0].node;
            if job.phase == Phase::Waiting {
                job.phase = Phase::Running { node, since: now, attempt: 1 };
            }
            let group = job.tasks.as_mut().unwrap();
            let old = std::mem::take(&mut group.tasks);
            for target in &plan.tasks {
                let before = old.iter().find(|task| task.id == target.id).copied();
                let fresh = TaskView {
                    id: target.id,
                    node: target.node,
                    cores: 0.0,
                    memory_bytes: 0,
                    cpu_s: 0.0,
                    memory_used_bytes: GIB / 4,
                    traffic_bytes: 0.0,
                };
                let (cores, memory_bytes) = (target.cores, target.memory_bytes);
                group.tasks.push(TaskView { cores, memory_bytes, ..before.unwrap_or(fresh) });
            }
        }
        decision.plan.tasks.iter().map(|(id, plan)| (*id, plan.why)).collect()
    }

    fn run(&mut self, intervals: usize) -> Vec<TaskReason> {
        (0..intervals).filter_map(|_| self.pass(30).remove(&JobId(1))).collect()
    }
}

/// A job whose workers and servers are equal.
fn even(work: f64, push: f64, servers: usize) -> TrueJob {
    TrueJob { work, push, loads: vec![1.0 / servers as f64; servers], overhead_s: 0.01, usable: 16.0 }
}

#[test]
fn too_little_cpu() {
    let mut world = World::new(&[32.0]);
    world.add(1, group((1, 1.0), (2, 2, 0.5)), even(4.0, 0.01, 1));
    world.pass(1);
    let before = world.speed(1);
    let reasons = world.run(12);
    assert!(reasons.contains(&TaskReason::WorkersStarved), "{reasons:?}");
    assert!(world.cores(1, TaskRole::Worker).iter().all(|c| *c >= 4.0), "{:?}", world.group(1).tasks);
    assert!(world.speed(1) > 5.0 * before);
}

#[test]
fn few_servers_many_workers() {
    let mut world = World::new(&[16.0]);
    world.add(1, group((1, 0.5), (6, 6, 1.0)), even(0.6, 0.2, 1));
    world.pass(1);
    let before = world.speed(1);
    let reasons = world.run(10);
    assert!(reasons.contains(&TaskReason::ServersStarved), "{reasons:?}");
    assert!(world.cores(1, TaskRole::Server)[0] >= 2.0, "{:?}", world.group(1).tasks);
    assert!(world.speed(1) > 2.5 * before, "{before} {}", world.speed(1));
}

#[test]
fn too_much_everywhere() {
    let mut world = World::new(&[64.0]);
    // Each worker can use one core of its eight; the server is nearly idle.
    let truth = TrueJob { usable: 1.0, ..even(2.0, 0.01, 1) };
    world.add(1, group((1, 8.0), (2, 2, 8.0)), truth);
    world.pass(1);
    let before = world.speed(1);
    let reasons = world.run(16);
    assert!(reasons.contains(&TaskReason::OverProvisioned), "{reasons:?}");
    let cores: f64 = world.group(1).tasks.iter().map(|task| task.cores).sum();
    assert!(cores <= 12.0, "24 cores at the start, {cores} now");
    assert!(world.speed(1) > 0.9 * before, "{before} {}", world.speed(1));
}

#[test]
fn one_hot_server_among_equals() {
    let mut world = World::new(&[16.0]);
    let truth = TrueJob { loads: vec![0.2, 0.6, 0.2], ..even(0.4, 0.3, 3) };
    world.add(1, group((3, 0.5), (4, 4, 1.0)), truth);
    world.pass(1);
    let before = world.speed(1);
    let reasons = world.run(10);
    assert!(reasons.contains(&TaskReason::HotServer { index: 1 }), "{reasons:?}");
    let servers = world.cores(1, TaskRole::Server);
    assert!(servers[1] >= 2.0 * servers[0], "{servers:?}");
    assert!(world.speed(1) > 1.5 * before, "{before} {}", world.speed(1));
}

/// One of two equal servers is slow, as if its node were: one change brings it back to what its author requested.
#[test]
fn a_server_with_less_than_its_equals_returns_to_its_request_at_once() {
    let mut world = World::new(&[16.0]);
    world.add(1, group((2, 1.5), (1, 1, 2.0)), even(0.2, 0.3, 2));
    world.pass(1);
    world.view.jobs[0].tasks.as_mut().unwrap().tasks[1].cores = 0.3;
    let (before, mut reasons) = (world.speed(1), vec![]);
    while world.cores(1, TaskRole::Server)[1] < 0.31 && reasons.len() < 10 {
        reasons.extend(world.pass(30).remove(&JobId(1)));
    }
    assert_eq!(reasons.last(), Some(&TaskReason::HotServer { index: 1 }), "{reasons:?}");
    assert!(
        world.cores(1, TaskRole::Server).iter().all(|cores| (cores - 1.5).abs() < 1e-9),
        "{:?}",
        world.group(1).tasks
    );
    assert!(world.speed(1) > 1.5 * before, "{before} {}", world.speed(1));
}

#[test]
fn pending_jobs_come_before_growth() {
    let mut world = World::new(&[8.0]);
    world.add(1, group((1, 1.0), (3, 6, 1.0)), even(8.0, 0.01, 1));
    world.pass(1);
    world.run(6);
    let grown: f64 = world.group(1).tasks.iter().map(|task| task.cores).sum();
    assert!(grown >= 7.0, "{grown}");
    // A job that needs half the node comes: the first returns what it has beyond its request, and both run.
    world.add(2, group((1, 1.0), (3, 3, 1.0)), even(8.0, 0.01, 1));
    let reasons = world.pass(1);
    assert_eq!(reasons[&JobId(1)], TaskReason::GivesBack);
    assert_eq!(reasons[&JobId(2)], TaskReason::Started);
    let cores = |id| world.group(id).tasks.iter().map(|task| task.cores).sum::<f64>();
    assert!((cores(1) - 4.0).abs() < 1e-6 && (cores(2) - 4.0).abs() < 1e-6, "{} {}", cores(1), cores(2));
    // A third does not fit beside two requests: it waits, and nothing grows meanwhile.
    world.add(3, group((1, 1.0), (3, 3, 1.0)), even(8.0, 0.01, 1));
    world.run(4);
    assert!(!world.runs(3));
    assert!(world.group(1).tasks.iter().map(|task| task.cores).sum::<f64>() <= 4.0 + 1e-6);
}

#[test]
fn growth_is_given_back() {
    let mut world = World::new(&[8.0]);
    world.add(1, group((1, 1.0), (1, 7, 1.0)), even(8.0, 0.01, 1));
    world.pass(1);
    world.run(6);
    world.add(2, group((1, 1.0), (2, 2, 1.0)), even(8.0, 0.01, 1));
    world.pass(1);
    assert!(world.runs(2));
    world.view.jobs.retain(|job| job.id != JobId(2));
    let reasons = world.run(6);
    assert!(reasons.contains(&TaskReason::WorkersStarved), "the first job grows again: {reasons:?}");
}

impl World {
    /// Gives a job this many steps to do, and as much time for them as `factor` times what they take now.
    fn set_deadline(&mut self, id: u64, steps: f64, factor: f64) {
        let at = self.view.now + Span::from_secs_f64(factor * steps / self.speed(id));
        let job = self.view.jobs.iter_mut().find(|job| job.id == JobId(id)).unwrap();
        job.deadline = Some(crate::view::Deadline::strict(at));
        job.tasks.as_mut().unwrap().steps_left = Some(steps);
    }

    fn total_cores(&self, id: u64) -> f64 {
        self.group(id).tasks.iter().map(|task| task.cores).sum()
    }
}

#[test]
fn a_job_that_will_be_late_grows_first() {
    // One core is free. The first job has far more to do, so a core would save it more time.
    let world = |factor| {
        let mut world = World::new(&[5.0]);
        world.add(1, group((1, 1.0), (1, 1, 1.0)), even(8.0, 0.01, 1));
        world.add(2, group((1, 1.0), (1, 1, 1.0)), even(8.0, 0.01, 1));
        world.pass(1);
        world.set_deadline(2, 1000.0, factor);
        world.run(3);
        (world.total_cores(1), world.total_cores(2))
    };
    let (first, second) = world(2.0);
    assert!(first > 2.5 && second < 2.1, "in time: {first} {second}");
    let (first, second) = world(0.7);
    assert!(first < 2.1 && second > 2.5, "late: {first} {second}");
}

#[test]
fn jobs_in_time_return_what_a_late_job_needs() {
    for is_spare in [true, false] {
        let mut world = World::new(&[5.0]);
        world.add(1, group((1, 1.0), (1, 1, 1.0)), even(8.0, 0.01, 1));
        world.add(2, group((1, 1.0), (1, 1, 1.0)), even(8.0, 0.01, 1));
        world.pass(1);
        // The first job grows into all that is free.
        world.view.jobs[0].tasks.as_mut().unwrap().steps_left = Some(1e9);
        world.run(6);
        let (grown, before) = (world.total_cores(1), world.total_cores(2));
        assert!(grown > 2.5 && before < 2.1, "{grown} {before}");
        // The second job has a deadline that it will miss. The first one has none, or would miss its own.
        world.set_deadline(2, 1000.0, 0.7);
        if !is_spare {
            world.set_deadline(1, 1e6, 1.1);
        }
        let reasons = world.run(12);
        let after = world.total_cores(2);
        assert_eq!(reasons.contains(&TaskReason::GivesBack), is_spare, "{reasons:?}");
        assert_eq!(after > before + 0.5, is_spare, "{before} {after} {reasons:?}");
    }
}

#[test]
fn never_below_what_keeps_a_job_alive() {
    let mut world = World::new(&[64.0]);
    // A job that does nothing at all.
    world.add(1, group((1, 4.0), (3, 3, 4.0)), even(1e-6, 1e-6, 1));
    world.pass(1);
    world.run(60);
    assert!(world.group(1).tasks.iter().all(|task| task.cores >= 0.25 - 1e-9), "{:?}", world.group(1).tasks);
    assert_eq!(world.cores(1, TaskRole::Worker).len(), 3);
}

#[test]
fn no_thrash() {
    let mut world = World::new(&[32.0]);
    // Workers can use one core: what the model promises of more is not true.
    let truth = TrueJob { usable: 1.0, ..even(2.0, 0.02, 2) };
    world.add(1, group((2, 0.5), (2, 2, 1.0)), truth);
    world.pass(1);
    let mut changes = 0;
    for _ in 0..60 {
        let before = world.group(1).tasks.iter().map(|task| task.cores).collect::<Vec<_>>();
        world.pass(30);
        changes += usize::from(before != world.group(1).tasks.iter().map(|task| task.cores).collect::<Vec<_>>());
    }
    assert!(changes <= 16, "{changes} changes in 60 intervals");
    let settled: Vec<_> = world.run(8);
    assert!(settled.iter().filter(|why| **why == TaskReason::Settled).count() >= 6, "{settled:?}");
}

#[test]
fn memory_is_raised_before_it_runs_out() {
    let mut world = World::new(&[8.0]);
    world.add(1, group((1, 1.0), (1, 1, 1.0)), even(1.0, 0.01, 1));
    world.pass(1);
    world.view.jobs[0].tasks.as_mut().unwrap().tasks[0].memory_used_bytes = GIB * 9 / 10;
    let reasons = world.pass(30);
    assert_eq!(reasons[&JobId(1)], TaskReason::MemoryShort);
    let server = world.group(1).tasks[0];
    assert!(server.memory_bytes >= server.memory_used_bytes * 3 / 2 - 1, "{server:?}");
    // The node has no more than it has.
    world.view.nodes[0].memory_bytes = 2 * GIB + GIB / 2;
    world.view.jobs[0].tasks.as_mut().unwrap().tasks[0].memory_used_bytes = server.memory_bytes;
    world.pass(30);
    let sum: u64 = world.group(1).tasks.iter().map(|task| task.memory_bytes).sum();
    assert!(sum <= 2 * GIB + GIB / 2, "{sum}");
}

/// The kernel does not wait for the next interval.
#[test]
fn a_task_short_of_memory_makes_a_decision_due() {
    let mut world = World::new(&[8.0]);
    world.add(1, group((1, 1.0), (1, 1, 1.0)), even(1.0, 0.01, 1));
    world.pass(1);
    world.pass(1);
    assert!(world.pass(6).is_empty(), "nothing is due");
    world.view.jobs[0].tasks.as_mut().unwrap().tasks[0].memory_used_bytes = GIB * 9 / 10;
    assert_eq!(world.pass(1).get(&JobId(1)), Some(&TaskReason::MemoryShort));
    assert!(world.group(1).tasks[0].memory_bytes > GIB);
    // Memory that no node has is asked for now and then, not all the time.
    let limits: u64 = world.group(1).tasks.iter().map(|task| task.memory_bytes).sum();
    world.view.nodes[0].memory_bytes = limits;
    let server = &mut world.view.jobs[0].tasks.as_mut().unwrap().tasks[0];
    server.memory_used_bytes = server.memory_bytes;
    let decisions = (0..20).filter(|_| !world.pass(1).is_empty()).count();
    assert!((1..=5).contains(&decisions), "{decisions} decisions in 20 s");
}

/// Two jobs that would each get half of what they need never both hold a part.
#[test]
fn all_tasks_start_or_none() {
    let mut world = World::new(&[4.0, 4.0]);
    for id in 1..=5 {
        world.add(id, group((1, 1.0), (5, 5, 1.0)), even(1.0, 0.01, 1));
        world.view.jobs.last_mut().unwrap().tasks.as_mut().unwrap().workers.min = 5;
    }
    world.pass(1);
    assert_eq!((1..=5).map(|id| world.group(id).tasks.len()).collect::<Vec<_>>(), [6, 0, 0, 0, 0]);
    let decision = Decider::new(Policy::from(Preset::Operator)).decide(world.view.clone()).decision().unwrap();
    assert_eq!(decision.plan.verdicts[&JobId(2)].reason, Reason::WaitsForTasks { cores: 6.0 });
}

/// The check notices what the rule must never do.
#[test]
fn unsound_plans_of_tasks_are_refused() {
    let mut world = World::new(&[8.0, 8.0]);
    world.add(1, group((1, 1.0), (2, 3, 1.0)), even(1.0, 0.01, 1));
    world.pass(1);
    world.pass(30);
    let decision = Decider::new(Policy::from(Preset::Operator)).decide(world.view.clone()).decision().unwrap();
    let sound = decision.plan.as_plan().clone();
    assert!(check(&world.view, sound.clone()).is_ok());
    let breaks = |change: &dyn Fn(&mut Vec<TaskTarget>)| {
        let mut plan = sound.clone();
        change(&mut plan.tasks.get_mut(&JobId(1)).unwrap().tasks);
        check(&world.view, plan).is_err()
    };
    assert!(breaks(&|tasks| tasks[0].cores = 100.0), "more cores than the node has");
    assert!(breaks(&|tasks| tasks[0].cores = 0.01), "less than keeps it alive");
    assert!(breaks(&|tasks| tasks[0].cores = f64::NAN));
    assert!(breaks(&|tasks| tasks[1].node = NodeId(1 - tasks[1].node.0)), "a running task moves");
    assert!(breaks(&|tasks| tasks[0].memory_bytes = 1));
    assert!(breaks(&|tasks| tasks[0].memory_bytes = 1 << 50));
    assert!(breaks(&|tasks| tasks.retain(|task| task.id.role != TaskRole::Server)), "a server is removed");
    assert!(breaks(&|tasks| tasks.truncate(1)), "no worker is left");
    assert!(breaks(&|tasks| tasks[2].id = tasks[1].id), "one task twice");
    assert!(breaks(&|tasks| {
        for index in 2..6 {
            let last = *tasks.last().unwrap();
            tasks.push(TaskTarget { id: TaskId::worker(index), ..last });
        }
    }));
    let mut none = sound.clone();
    none.tasks.clear();
    assert!(check(&world.view, none).is_err(), "a running job without a plan");
}
