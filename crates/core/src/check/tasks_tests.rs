//! For each promise about tasks a plan that breaks it, and the plan at the border that still keeps it.

use super::*;
use crate::fixtures::node;
use crate::model::Time;
use crate::plan::{Reason, Standing, Verdict};
use crate::signal::Category;
use crate::tasks::{RoleSpec, TaskId, TaskReason, TaskTarget, TaskView, TrainingMode};

const GIB: u64 = 1 << 30;

fn spec(count: u32, min: u32, max: u32) -> RoleSpec {
    RoleSpec { count, min, max, cores: 1.0, memory_bytes: GIB, least_cores: 0.5, max_cores: 4.0 }
}

fn task(id: TaskId, node: u32) -> TaskView {
    let (cores, memory_bytes) = (1.0, GIB);
    let memory_used_bytes = GIB / 2;
    TaskView { id, node: NodeId(node), cores, memory_bytes, cpu_s: 0.0, memory_used_bytes, traffic_bytes: 0.0 }
}

fn group(tasks: Vec<TaskView>) -> TaskGroup {
    let (servers, workers) = (spec(1, 1, 1), spec(2, 1, 3));
    TaskGroup { mode: TrainingMode::Sync, servers, workers, tasks, steps: 0.0, steps_left: None, traffic: vec![] }
}

/// Job 1 runs a server and two workers on node 0; job 2 waits for the same tasks and is given none. Nodes have 4 cores
/// and 8 GiB.
fn world() -> (View, Plan) {
    let tasks = vec![task(TaskId::server(0), 0), task(TaskId::worker(0), 0), task(TaskId::worker(1), 0)];
    let targets = tasks.iter().map(TaskTarget::of).collect();
    let runs = JobView { tasks: Some(group(tasks)), ..crate::fixtures::running(1, 0) };
    let waits = JobView { id: JobId(2), tasks: Some(group(vec![])), ..JobView::default() };
    let verdict = Verdict {
        target: None,
        growth: Default::default(),
        category: Category::Growing,
        reason: Reason::NotYetMeasured,
        standing: Standing::New,
        least: crate::model::Share::ZERO,
    };
    let view = View { now: Time(5), nodes: vec![node(0), node(1)], jobs: vec![runs, waits] };
    let verdicts = [(JobId(1), verdict.clone()), (JobId(2), verdict)].into();
    let tasks = [(JobId(1), TaskPlan { tasks: targets, why: TaskReason::Settled })].into();
    (view, Plan { generation: 1, at: Time(5), verdicts, tasks, ..Plan::default() })
}

fn tasks_of(plan: &mut Plan, job: u64) -> &mut Vec<TaskTarget> {
    let entry = plan.tasks.entry(JobId(job));
    &mut entry.or_insert(TaskPlan { tasks: vec![], why: TaskReason::Started }).tasks
}

fn group_of(view: &mut View, job: usize) -> &mut TaskGroup {
    view.jobs[job].tasks.as_mut().expect("a job of tasks")
}

/// What is found after `change`.
fn found(change: impl FnOnce(&mut View, &mut Plan)) -> Vec<Violation> {
    let (mut view, mut plan) = world();
    change(&mut view, &mut plan);
    super::super::violations(&view, &plan)
}

/// Gives job 2 a server and this number of workers on node 1.
fn start(plan: &mut Plan, workers: u32) {
    let mut targets = vec![TaskTarget::of(&task(TaskId::server(0), 1))];
    targets.extend((0..workers).map(|index| TaskTarget::of(&task(TaskId::worker(index), 1))));
    *tasks_of(plan, 2) = targets;
}

#[test]
fn a_sound_plan_passes() {
    assert_eq!(found(|_, _| {}), []);
    assert_eq!(found(|_, plan| start(plan, 2)), []);
}

#[test]
fn a_job_starts_with_all_servers_and_enough_workers() {
    let count = |servers, workers| Violation::TaskCount { job: JobId(2), servers, workers };
    assert_eq!(found(|_, plan| start(plan, 0)), [count(1, 0)]);
    assert_eq!(found(|_, plan| start(plan, 1)), [], "the smallest number");
    assert_eq!(found(|_, plan| start(plan, 3)), [], "the largest number");
    let too_many = found(|view, plan| {
        view.nodes[1].cores = 9.0;
        start(plan, 4);
    });
    assert_eq!(too_many, [count(1, 4)]);
    let no_server = found(|_, plan| {
        start(plan, 2);
        tasks_of(plan, 2).remove(0);
    });
    assert_eq!(no_server, [count(0, 2)]);
}

#[test]
fn a_job_that_waits_for_another_is_not_started() {
    let early = found(|view, plan| {
        view.jobs[1].waits_for = vec![JobId(1)];
        start(plan, 2);
    });
    assert_eq!(early, [Violation::TooEarly(JobId(2))]);
    let goes_on = found(|view, _| view.jobs[0].waits_for = vec![JobId(2)]);
    assert_eq!(goes_on, [], "a job that runs is not stopped for it");
}

#[test]
fn a_running_job_keeps_its_servers_and_may_change_its_workers() {
    let count = |servers, workers| Violation::TaskCount { job: JobId(1), servers, workers };
    assert_eq!(found(|_, plan| tasks_of(plan, 1).retain(|target| target.id != TaskId::server(0))), [count(0, 2)]);
    assert_eq!(found(|_, plan| tasks_of(plan, 1).truncate(2)), [], "one worker is the smallest number");
    assert_eq!(found(|_, plan| tasks_of(plan, 1).truncate(1)), [count(1, 0)]);
    let grown = found(|_, plan| tasks_of(plan, 1).push(TaskTarget::of(&task(TaskId::worker(2), 0))));
    assert_eq!(grown, []);
    let too_many = found(|_, plan| {
        tasks_of(plan, 1).extend([2, 3].map(|index| TaskTarget::of(&task(TaskId::worker(index), 1))));
    });
    assert_eq!(too_many, [count(1, 4)]);
    let lost_workers = found(|view, plan| {
        group_of(view, 0).tasks.truncate(1);
        tasks_of(plan, 1).truncate(1);
    });
    assert_eq!(lost_workers, [], "workers that died already are not counted against the plan");
    let has_more = found(|view, _| group_of(view, 0).workers.max = 1);
    assert_eq!(has_more, [], "nor are those that the owner allows no longer");
    assert_eq!(found(|_, plan| drop(plan.tasks.remove(&JobId(1)))), [Violation::NoTarget(JobId(1))]);
}

#[test]
fn tasks_are_known_sorted_and_stay_where_they_are() {
    assert_eq!(found(|_, plan| tasks_of(plan, 1).swap(1, 2)), [Violation::TaskOrder(JobId(1))]);
    let twice = found(|_, plan| {
        let worker = tasks_of(plan, 1)[2];
        tasks_of(plan, 1).push(worker);
    });
    assert_eq!(twice, [Violation::TaskOrder(JobId(1))]);
    let moved = found(|_, plan| tasks_of(plan, 1)[2].node = NodeId(1));
    assert_eq!(moved, [Violation::TaskMoved { job: JobId(1), task: TaskId::worker(1) }]);
    let unknown = found(|_, plan| {
        start(plan, 1);
        tasks_of(plan, 2)[1].node = NodeId(9);
    });
    assert_eq!(unknown, [Violation::UnknownNode { job: JobId(2), node: NodeId(9) }]);
    let foreign = found(|view, _| view.jobs[0].tasks = None);
    assert!(foreign.contains(&Violation::UnknownJob(JobId(1))), "a job without tasks: {foreign:?}");
}

#[test]
fn no_task_is_starved() {
    let with = |cores: f64| found(|_, plan| tasks_of(plan, 1)[1].cores = cores);
    let starved = |cores| [Violation::TaskStarved { job: JobId(1), task: TaskId::worker(0), cores }];
    assert_eq!(with(0.5), []);
    assert_eq!(with(0.5 - TOLERANCE), [], "what rounding explains");
    assert_eq!(with(0.4), starved(0.4));
    assert_eq!(with(0.5 - 2.0 * TOLERANCE), starved(0.5 - 2.0 * TOLERANCE));
    assert!(matches!(with(f64::NAN)[..], [Violation::TaskStarved { .. }]));
    let kept = found(|view, plan| {
        group_of(view, 0).tasks[1].cores = 0.2;
        tasks_of(plan, 1)[1].cores = 0.2;
    });
    assert_eq!(kept, [], "a task that has less already may keep it");
    let none = found(|view, plan| {
        group_of(view, 0).workers.least_cores = 0.0;
        tasks_of(plan, 1)[1].cores = 0.0;
    });
    assert_eq!(none, starved(0.0), "no task lives without CPU");
}

#[test]
fn memory_in_use_is_kept() {
    let with = |bytes: u64| found(|_, plan| tasks_of(plan, 1)[1].memory_bytes = bytes);
    assert_eq!(with(GIB / 2), []);
    assert_eq!(with(GIB / 2 - 1), [Violation::TaskMemoryShort { job: JobId(1), task: TaskId::worker(0) }]);
    let over = found(|view, _| group_of(view, 0).tasks[1].memory_used_bytes = 2 * GIB);
    assert_eq!(over, [], "a task may keep the limit that it has exceeded");
}

#[test]
fn tasks_fit_their_node() {
    let cores = |cores: f64| found(|_, plan| tasks_of(plan, 1)[0].cores = cores);
    assert_eq!(cores(2.0), [], "a full node");
    assert_eq!(cores(2.0 + TOLERANCE), [], "what rounding explains");
    assert_eq!(cores(2.5), [Violation::TaskCores { node: NodeId(0), cores: 4.5, of: 4.0 }]);
    let memory = |bytes: u64| found(|_, plan| tasks_of(plan, 1)[0].memory_bytes = bytes);
    assert_eq!(memory(6 * GIB), [], "a full node");
    let over = Violation::TaskMemory { node: NodeId(0), bytes: 8 * GIB + 1, of: 8 * GIB };
    assert_eq!(memory(6 * GIB + 1), [over]);
}

/// A node that is overfull already cannot be mended at once. It must not get worse, and what runs on other nodes does
/// not excuse it.
#[test]
fn an_overfull_node_does_not_get_worse() {
    let overfull = |cores: f64, gib: u64, more_cores: f64, more_bytes: u64| {
        found(|view, plan| {
            view.nodes[0].cores = cores;
            view.nodes[0].memory_bytes = gib * GIB;
            // On the other node much more is in use.
            group_of(view, 1).tasks =
                vec![TaskView { cores: 9.0, memory_bytes: 9 * GIB, ..task(TaskId::server(0), 1) }];
            tasks_of(plan, 1)[0].cores += more_cores;
            tasks_of(plan, 1)[0].memory_bytes += more_bytes;
        })
    };
    assert_eq!(overfull(2.0, 2, 0.0, 0), []);
    assert_eq!(overfull(2.0, 2, 0.25, 0), [Violation::TaskCores { node: NodeId(0), cores: 3.25, of: 2.0 }]);
    let bytes = 3 * GIB + 1;
    assert_eq!(overfull(2.0, 2, 0.0, 1), [Violation::TaskMemory { node: NodeId(0), bytes, of: 2 * GIB }]);
}
