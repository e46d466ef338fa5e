//! Which gang starts next and where its tasks go, on made-up nodes and requests.

use super::*;
use crate::state::workload::{WorkloadKey, WorkloadKind};
use gainshare_kube_api::names::NamespacedName;
use gainshare_kube_api::tasks::Role;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

fn room(name: &str, cores: u64) -> NodeRoom {
    NodeRoom { name: name.into(), ..sized((cores * 1000, cores << 30)) }
}

fn sized(size: (u64, u64)) -> NodeRoom {
    NodeRoom {
        name: NodeName::default(),
        free: size,
        size,
        free_devices: Devices::new(),
        all_devices: Devices::new(),
        open: true,
    }
}

fn need(role: Role, index: u32, cores: u64) -> TaskNeed {
    TaskNeed { task: TaskId { role, index }, requests: (cores * 1000, 1 << 20), devices: None, traffic: None }
}

fn request(name: &str, since_s: i64, needs: Vec<TaskNeed>) -> RoomRequest {
    RoomRequest {
        key: WorkloadKey::new(WorkloadKind::TaskJob, NamespacedName::new("team", name)),
        uid: name.into(),
        class: Class::Gang,
        priority: 0,
        queue: None,
        since: Timestamp::from_second(since_s).unwrap(),
        needs,
        optional: Vec::new(),
        avoid: Vec::new(),
        nodes: None,
    }
}

fn chosen(rooms: &[NodeRoom], requests: &[RoomRequest], now_s: i64) -> Option<String> {
    let chosen = choose(rooms, requests.to_vec(), QueueShares::default(), Timestamp::from_second(now_s).unwrap(), 1);
    chosen.into_iter().next().map(|(request, _)| String::from(request.uid))
}

#[test]
fn fewest_nodes_first() {
    let rooms = [room("small", 4), room("large", 16), room("middle", 8)];
    let two = [need(Role::Ps, 0, 2), need(Role::Worker, 0, 2)];
    let placement = pack(&rooms, &two, None).unwrap();
    assert!(placement.values().all(|node| node == "small"), "the smallest node that holds all: {placement:?}");
    let four: Vec<TaskNeed> = (0..4).map(|index| need(Role::Worker, index, 5)).collect();
    let nodes: BTreeSet<NodeName> = pack(&rooms, &four, None).unwrap().into_values().collect();
    assert_eq!(nodes, ["large", "middle"].map(NodeName::from).into());
}

#[test]
fn servers_run_beside_workers() {
    let rooms = [room("a", 6), room("b", 6)];
    let mut needs: Vec<TaskNeed> = (0..2).map(|index| need(Role::Ps, index, 1)).collect();
    needs.extend((0..4).map(|index| need(Role::Worker, index, 2)));
    let placement = pack(&rooms, &needs, None).unwrap();
    let number =
        |node: &str, role: Role| placement.iter().filter(|(task, there)| *there == node && task.role == role).count();
    let pairs: usize = ["a", "b"].map(|node| number(node, Role::Ps) * number(node, Role::Worker)).iter().sum();
    assert_eq!(pairs, 4, "as many pairs as these nodes allow talk without the network: {placement:?}");
}

/// One server exchanges most: it sits beside more workers than the other one, on equal and on unequal nodes.
#[test]
fn measured_traffic_decides_which_server_sits_beside_more_workers() {
    for rooms in [[room("a", 3), room("b", 3)], [room("a", 4), room("b", 3)]] {
        let workers = if rooms[0].free == rooms[1].free { 4 } else { 5 };
        let mut nodes_of_hot = BTreeSet::new();
        for hot in 0..2 {
            let traffic = |need: TaskNeed| {
                let is_hot = need.task == TaskId::new(Role::Ps, hot);
                TaskNeed { traffic: Some(if is_hot { 50_000_000 } else { 1_000_000 }), ..need }
            };
            let mut needs: Vec<TaskNeed> = (0..2).map(|index| traffic(need(Role::Ps, index, 1))).collect();
            needs.extend((0..workers).map(|index| traffic(need(Role::Worker, index, 1))));
            let placement = pack(&rooms, &needs, None).unwrap();
            let node = |role, index| placement[&TaskId::new(role, index)].clone();
            let beside = |server| (0..workers).filter(|w| node(Role::Worker, *w) == node(Role::Ps, server)).count();
            assert!(beside(hot) >= beside(1 - hot), "{placement:?}");
            nodes_of_hot.insert((node(Role::Ps, 0), node(Role::Ps, 1)));
        }
        assert_eq!(nodes_of_hot.len(), 2, "the two servers change places with their traffic");
    }
}

#[test]
fn traffic_that_is_not_known_is_assumed_and_nonsense_is_bounded() {
    let server = |index, traffic| TaskNeed { traffic, ..need(Role::Ps, index, 1) };
    let other = |role, index, traffic| TaskNeed { traffic, ..need(role, index, 1) };
    let none = [server(0, None), server(1, None), other(Role::Worker, 0, None)];
    assert_eq!(traffic(&none), [1.0, 1.0, 0.0]);
    assert_eq!(traffic(&[server(0, Some(0)), other(Role::Worker, 0, Some(0))]), [1.0, 0.0]);
    let some = [
        server(0, Some(300)),
        server(1, None),
        other(Role::Chief, 0, Some(100)),
        other(Role::Worker, 0, None),
        other(Role::Evaluator, 0, Some(999)),
    ];
    assert_eq!(traffic(&some), [300.0, 300.0, 100.0, 100.0, 0.0]);
    assert_eq!(traffic(&[server(0, Some(u64::MAX)), server(1, Some(2))]), [MOST_BYTES_S as f64, 2.0]);
}

#[test]
fn all_or_nothing() {
    let rooms = [room("a", 2), room("b", 2)];
    let three: Vec<TaskNeed> = (0..3).map(|index| need(Role::Worker, index, 2)).collect();
    assert_eq!(pack(&rooms, &three, None), None);
    assert_eq!(chosen(&rooms, &[request("large", 0, three)], 1), None);
}

#[test]
fn the_line_goes_by_class_then_priority_then_age() {
    let rooms = [room("a", 4)];
    let one = || vec![need(Role::Worker, 0, 1)];
    let old = request("old", 0, one());
    let young = request("young", 5, one());
    assert_eq!(chosen(&rooms, &[young.clone(), old.clone()], 9).as_deref(), Some("old"));
    let urgent = RoomRequest { priority: 7, ..young };
    assert_eq!(chosen(&rooms, &[old.clone(), urgent.clone()], 9).as_deref(), Some("young"));
    let growth = RoomRequest { class: Class::Growth, priority: 99, ..request("grows", 0, one()) };
    assert_eq!(chosen(&rooms, &[growth, old.clone()], 9).as_deref(), Some("old"));
    let large = request("large", 0, (0..2).map(|index| need(Role::Worker, index, 4)).collect());
    let two = [room("a", 4), NodeRoom { free: (0, 0), ..room("b", 4) }];
    let growth = RoomRequest { class: Class::Growth, ..request("grows", 0, one()) };
    assert_eq!(chosen(&two, &[growth.clone(), large], 9), None, "no job grows while another one waits");
    assert_eq!(chosen(&two, &[growth], 9).as_deref(), Some("grows"));
    let replaced = RoomRequest { class: Class::Replacement, ..request("replaced", 8, one()) };
    assert_eq!(chosen(&rooms, &[urgent, old, replaced], 9).as_deref(), Some("replaced"));
}

#[test]
fn no_job_overtakes_a_starving_one() {
    let mut rooms = [room("a", 4), room("b", 4)];
    rooms[0].free = (1000, 1 << 30);
    let large = request("large", 0, (0..2).map(|index| need(Role::Worker, index, 4)).collect());
    let small = request("small", 10, vec![need(Role::Worker, 0, 1)]);
    let impossible = request("impossible", 0, vec![need(Role::Worker, 0, 64)]);
    assert_eq!(chosen(&rooms, &[large.clone(), small.clone()], 60).as_deref(), Some("small"));
    assert_eq!(chosen(&rooms, &[large, small.clone()], 301), None, "room is kept for the large one");
    assert_eq!(chosen(&rooms, &[impossible, small], 301).as_deref(), Some("small"), "no room helps the other one");
}

#[test]
fn optional_tasks_take_what_is_left() {
    let rooms = [room("a", 3)];
    let mut elastic = request("elastic", 0, vec![need(Role::Worker, 0, 2)]);
    elastic.optional = vec![need(Role::Worker, 1, 2), need(Role::Worker, 2, 1)];
    let (_, placement) = choose(&rooms, vec![elastic], QueueShares::default(), Timestamp::UNIX_EPOCH, 1).pop().unwrap();
    assert_eq!(placement.keys().map(|task| task.index).collect::<Vec<_>>(), [0, 2]);
}

#[test]
fn nodes_that_refused_are_avoided() {
    let rooms = [room("a", 4), room("b", 4)];
    let mut job = request("job", 0, vec![need(Role::Worker, 0, 1)]);
    job.avoid = vec!["a".into()];
    let (_, placement) = choose(&rooms, vec![job], QueueShares::default(), Timestamp::UNIX_EPOCH, 1).pop().unwrap();
    assert_eq!(placement.into_values().collect::<Vec<_>>(), ["b"]);
}

#[test]
fn one_pass_takes_all_that_fit_in_the_order_of_the_line() {
    let rooms = [room("a", 4), room("b", 4)];
    let job = |name: &str, since_s, cores| request(name, since_s, vec![need(Role::Worker, 0, cores)]);
    let line = [job("first", 0, 3), job("large", 1, 5), job("second", 2, 3), job("third", 3, 3), job("small", 4, 1)];
    let names = |most| {
        let chosen = choose(&rooms, line.to_vec(), QueueShares::default(), Timestamp::from_second(9).unwrap(), most);
        chosen.into_iter().map(|(request, _)| String::from(request.uid)).collect::<Vec<_>>()
    };
    assert_eq!(names(10), ["first", "second", "small"], "what one job takes is not free for those behind it");
    assert_eq!(names(2), ["first", "second"]);
    let growth = RoomRequest { class: Class::Growth, ..job("grows", 0, 1) };
    let mut all = line.to_vec();
    all.truncate(1);
    all.push(growth);
    let chosen = choose(&rooms, all, QueueShares::default(), Timestamp::from_second(9).unwrap(), 10);
    assert_eq!(chosen.len(), 2, "a job may grow in the pass in which the last gang starts");
}

/// The sets of nodes that servers and workers may use.
fn role_nodes(servers: &[&str], workers: &[&str]) -> RoleNodes {
    let set = |names: &[&str]| Arc::new(names.iter().map(|name| (*name).into()).collect::<BTreeSet<_>>());
    [(Role::Ps, set(servers)), (Role::Worker, set(workers))].into()
}

/// Workers that need GPUs on tainted nodes, servers that tolerate nothing: as people run them.
#[test]
fn roles_go_to_nodes_that_meet_their_demands() {
    let gpu = |count: u64| -> Devices { [("nvidia.com/gpu".to_owned(), count)].into() };
    let with = |name: &str, cores, count| NodeRoom {
        open: false,
        free_devices: gpu(count),
        all_devices: gpu(count),
        ..room(name, cores)
    };
    let rooms = [room("plain", 8), with("gpu-a", 8, 2), with("gpu-b", 8, 1)];
    let mut needs = vec![need(Role::Ps, 0, 1)];
    needs.extend((0..3).map(|index| TaskNeed { devices: Some(Arc::new(gpu(1))), ..need(Role::Worker, index, 1) }));
    let mut job = request("job", 0, needs.clone());
    assert_eq!(chosen(&rooms, std::slice::from_ref(&job), 1), None, "without demands, closed nodes are not used");
    job.nodes = Some(role_nodes(&["plain"], &["gpu-a", "gpu-b"]));
    let (_, placement) =
        choose(&rooms, vec![job.clone()], QueueShares::default(), Timestamp::UNIX_EPOCH, 1).pop().unwrap();
    let number = |node: &str| placement.values().filter(|one| *one == node).count();
    assert_eq!((number("plain"), number("gpu-a"), number("gpu-b")), (1, 2, 1), "{placement:?}");
    // Two jobs that need all GPUs never hold a part of them each.
    let second = RoomRequest { uid: "second".into(), ..job.clone() };
    let both = choose(&rooms, vec![job.clone(), second], QueueShares::default(), Timestamp::UNIX_EPOCH, 9);
    assert_eq!(both.len(), 1);
    job.needs.push(TaskNeed { devices: Some(Arc::new(gpu(1))), ..need(Role::Worker, 3, 1) });
    assert!(!fits_empty(&rooms, &job.needs, job.nodes.as_ref()), "there are three GPUs");
}

#[test]
fn roles_with_different_demands_still_sit_together_where_they_can() {
    let rooms = [room("a", 16), room("ssd", 16)];
    let needs = [need(Role::Ps, 0, 1), need(Role::Worker, 0, 2), need(Role::Worker, 1, 2)];
    let placement = pack(&rooms, &needs, Some(&role_nodes(&["a", "ssd"], &["ssd"]))).unwrap();
    assert!(placement.values().all(|node| node == "ssd"), "the server beside its workers: {placement:?}");
    assert_eq!(pack(&rooms, &needs, Some(&role_nodes(&["a"], &[]))), None, "no node meets the workers' demands");
}

/// Numbers that look random, the same for the same seed.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// Jobs that contend for a cluster that holds about three of them, with other sizes, ages, priorities, queues and
/// running times for each seed. All run, none with a part of its tasks, and no node ever holds more than it has.
#[test]
fn a_hundred_contending_jobs_all_run() {
    for seed in 0..20 {
        let mut numbers = Numbers(seed);
        let turns = QueueShares::new(&[("a".to_owned(), 1 + seed as u32), ("b".to_owned(), 2)].into());
        let mut rooms = vec![room("a", 7), room("b", 6), room("c", 5)];
        let mut waiting: Vec<RoomRequest> = (0..100)
            .map(|n| {
                let (workers, cores) = (1 + numbers.below(4) as u32, 1 + numbers.below(2));
                let mut needs = vec![need(Role::Ps, 0, 1)];
                needs.extend((0..workers).map(|index| need(Role::Worker, index, cores)));
                let queue = ["a", "b", ""][numbers.below(3) as usize].to_owned();
                let priority = numbers.below(3) as i32;
                RoomRequest { priority, queue: Some(queue), ..request(&format!("job-{n}"), n, needs) }
            })
            .collect();
        let mut running: Vec<(i64, RoomRequest, Placement)> = Vec::new();
        let mut now_s = 100;
        while !waiting.is_empty() {
            now_s += 1;
            assert!(now_s < 5000, "seed {seed}: {} jobs never ran", waiting.len());
            for (request, placement) in
                choose(&rooms, waiting.clone(), turns.clone(), Timestamp::from_second(now_s).unwrap(), 100)
            {
                assert_eq!(placement.len(), request.needs.len(), "seed {seed}: a part of {} starts", request.uid);
                for need in &request.needs {
                    let there = rooms.iter_mut().find(|room| room.name == placement[&need.task]).unwrap();
                    there.free.0 = there.free.0.checked_sub(need.requests.0).expect("the node holds it");
                    there.free.1 = there.free.1.checked_sub(need.requests.1).expect("the node holds it");
                }
                waiting.retain(|one| one.uid != request.uid);
                running.push((now_s + 1 + numbers.below(9) as i64, request, placement));
            }
            assert!(!running.is_empty(), "seed {seed}: nothing runs and nothing starts");
            let (over, still): (Vec<_>, Vec<_>) = running.into_iter().partition(|(end_s, ..)| *end_s <= now_s);
            running = still;
            for (_, request, placement) in over {
                for need in &request.needs {
                    let there = rooms.iter_mut().find(|room| room.name == placement[&need.task]).unwrap();
                    there.free = (there.free.0 + need.requests.0, there.free.1 + need.requests.1);
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn never_more_than_free(
        free in prop::collection::vec((0..9000_u64, 0..9_u64), 0..6),
        tasks in prop::collection::vec((0..4000_u64, 0..4_u64), 1..9),
    ) {
        let rooms: Vec<NodeRoom> = free.iter().enumerate().map(|(i, free)| NodeRoom { name: i.to_string().into(), ..sized(*free) }).collect();
        let needs: Vec<TaskNeed> = tasks.iter().zip(0..).map(|(requests, index)| {
            let role = if index % 3 == 0 { Role::Ps } else { Role::Worker };
            TaskNeed { task: TaskId { role, index }, requests: *requests, devices: None, traffic: None }
        }).collect();
        if let Some(placement) = pack(&rooms, &needs, None) {
            prop_assert_eq!(placement.len(), needs.len());
            for room in &rooms {
                let there = || needs.iter().filter(|need| placement[&need.task] == room.name);
                prop_assert!(there().map(|need| need.requests.0).sum::<u64>() <= room.free.0);
                prop_assert!(there().map(|need| need.requests.1).sum::<u64>() <= room.free.1);
            }
        }
    }
}
