//! Tests of [`super`]: a cluster in which time passes, and orders are carried out or not.

use super::*;
use crate::placement::snapshot::{JobReport, NodeSnapshot};
use crate::state::clock::AgentClock;
use crate::state::workload::WorkloadKind;
use gainshare_core::model::Time;
use gainshare_core::policy::Preset;
use gainshare_core::signal::{Outlook, Signal, TimedValue};
use gainshare_core::view::{Deadline, Ends, FinishView, Marks, Phase, WorkLeft};
use gainshare_kube_api::fixtures::job_policy;
use gainshare_kube_api::immovable::ImmovableReason;
use gainshare_kube_api::wire;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A cluster in which time passes and orders can be carried out.
struct Lab {
    decision: Placements,
    snapshot: ClusterSnapshot,
}

fn node(cores: f64) -> NodeSnapshot {
    NodeSnapshot {
        cores,
        speed: 1.0,
        memory_bytes: 64 << 30,
        free_milli: (cores * 1000.0) as u64,
        free_bytes: 64 << 30,
        open: true,
        heard: true,
    }
}

impl Lab {
    fn new(nodes: &[(&str, f64)]) -> Lab {
        let nodes = nodes.iter().map(|(name, cores)| ((*name).into(), node(*cores))).collect();
        Lab {
            decision: Placements::default(),
            snapshot: ClusterSnapshot { now: Time::from_secs_f64(1e6), nodes, jobs: vec![] },
        }
    }

    fn at(&self) -> jiff::Timestamp {
        jiff::Timestamp::from_microsecond(self.snapshot.now.0 as i64).unwrap()
    }

    fn wait(&mut self, name: &str, policy: JobPolicy) -> &mut JobFacts {
        let facts = JobFacts {
            uid: name.into(),
            kind: WorkloadKind::TrainingJob,
            namespace: "team".to_owned(),
            name: name.to_owned(),
            owner: "team".to_owned(),
            arrived: self.at(),
            policy,
            state: JobState::Waiting,
            movable: Ok(()),
            pod_uid: None,
            cpu_request_milli: 500,
            memory_request_bytes: 1 << 30,
            tried: vec![],
            move_cost_s: None,
            marks: Marks::default(),
        };
        self.snapshot.jobs.push((Arc::new(facts), None));
        self.job(name).0
    }

    fn run(&mut self, name: &str, policy: JobPolicy, node: &str) -> &mut JobFacts {
        let state = JobState::Running { node: node.into(), epoch: 1, since: self.at() };
        let facts = self.wait(name, policy);
        (facts.state, facts.pod_uid) = (state, Some(format!("{name}-1").into()));
        facts
    }

    fn job(&mut self, name: &str) -> (&mut JobFacts, &mut Option<JobReport>) {
        let (facts, report) = self.snapshot.jobs.iter_mut().find(|(facts, _)| facts.name == name).unwrap();
        (Arc::make_mut(facts), report)
    }

    /// Seconds pass, and each of these jobs reports: name, value, step of a hundred, node-seconds
    /// consumed in all.
    fn pass(&mut self, seconds: f64, reports: &[(&str, f64, u64, f64)]) -> Vec<(JobUid, NodeName, OrderKind)> {
        self.snapshot.now = self.snapshot.now + Span::from_secs_f64(seconds);
        let now = self.snapshot.now;
        for (name, value, step, consumed) in reports {
            let job = self.job(name).1.get_or_insert_default();
            let report = TimedValue { value: *value, at: now };
            job.signal = Signal {
                reports: job.signal.reports + 1,
                first: job.signal.first.or(Some(report)),
                last: Some(report),
                longest_gap: Span::from_secs_f64(seconds),
                step: Some(*step),
                total: Some(100),
                outlook: Some(Outlook {
                    at: *step as f64,
                    flat_at: 100.0,
                    gain_left: 0.5,
                    scale: 0.0,
                    scale_spread: 0.0,
                }),
                ..Signal::default()
            };
            job.consumed_node_s.cpu = *consumed;
        }
        let orders = self.decision.decide(&self.snapshot);
        orders.into_iter().map(|order| (order.uid, order.node, order.kind)).collect()
    }

    /// The controller does what it was report: the job runs on the node as another attempt.
    fn carry_out(&mut self, name: &str, node: &str) {
        let since = self.at();
        let (facts, report) = self.job(name);
        let epoch = if let JobState::Running { epoch, .. } = facts.state { epoch + 1 } else { 1 };
        facts.state = JobState::Running { node: node.into(), epoch, since };
        facts.pod_uid = Some(format!("{name}-{epoch}").into());
        *report = None;
    }
}

fn order(job: &str, node: &str, kind: OrderKind) -> (JobUid, NodeName, OrderKind) {
    (job.into(), node.into(), kind)
}

#[test]
fn waiting_jobs_are_spread_and_two_passes_never_give_the_same_room_away_twice() {
    let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
    lab.wait("one", job_policy(Preset::Specon));
    assert_eq!(lab.pass(1.0, &[]), [order("one", "a", OrderKind::Place)]);
    // The controller has not done it yet; the next to come goes to the other node, and nothing is
    // said twice.
    lab.wait("two", job_policy(Preset::Specon));
    assert_eq!(lab.pass(1.0, &[]), [order("two", "b", OrderKind::Place)]);
    assert_eq!(lab.pass(1.0, &[]), []);
    lab.carry_out("one", "a");
    lab.carry_out("two", "b");
    assert_eq!(lab.pass(1.0, &[]), []);
    // An order without effect is given again after a while.
    lab.wait("three", job_policy(Preset::Specon));
    assert_eq!(lab.pass(1.0, &[]).len(), 1);
    assert_eq!(lab.pass(10.0, &[]).len(), 0);
    assert_eq!(lab.pass(10.0, &[]).len(), 1);
}

#[test]
fn an_order_to_a_node_that_was_closed_meanwhile_is_replaced_at_once() {
    let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
    lab.wait("one", job_policy(Preset::Specon));
    assert_eq!(lab.pass(1.0, &[]), [order("one", "a", OrderKind::Place)]);
    lab.snapshot.nodes.get_mut("a").unwrap().open = false;
    assert_eq!(lab.pass(1.0, &[]), [order("one", "b", OrderKind::Place)]);
    lab.job("one").0.state = JobState::Moving;
    lab.snapshot.nodes.get_mut("b").unwrap().open = false;
    assert_eq!(lab.pass(1.0, &[]), [], "it is on its way");
}

#[test]
fn no_job_is_sent_to_a_node_that_is_silent_closed_or_full() {
    for spoil in [
        (|n: &mut NodeSnapshot| n.heard = false) as fn(&mut NodeSnapshot),
        |n| n.open = false,
        |n| n.free_milli = 499,
        |n| n.free_bytes = 1 << 29,
    ] {
        for policy in [job_policy(Preset::Specon), job_policy(Preset::Flowcon2), job_policy(Preset::Gainshare)] {
            let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
            spoil(lab.snapshot.nodes.get_mut("a").unwrap());
            lab.run("old", policy, "b");
            lab.wait("new", policy);
            assert_eq!(lab.pass(1.0, &[]), [order("new", "b", OrderKind::Place)]);
        }
    }
}

#[test]
fn the_cluster_scheduler_keeps_jobs_that_want_no_policy() {
    let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
    lab.wait("one", job_policy(Preset::Na));
    assert_eq!(lab.pass(1.0, &[]), []);
}

/// Two jobs that grow and one that slackens on `a`; the third asks to leave in the fourth run.
fn specon_story(lab: &mut Lab, runs: usize) -> Vec<(usize, JobUid, NodeName, OrderKind)> {
    let mut orders = vec![];
    for run in 0..runs {
        let grows = 1.0 + 0.1 * run as f64;
        let slackens = 1.0 + 0.01 * (1.0 - 0.5f64.powi(run as i32));
        let step = run as u64 + 1;
        let used = 3.0 * step as f64;
        let reports = [("one", grows, step, used), ("two", grows, step, used), ("three", slackens, step, used)];
        orders.extend(lab.pass(30.0, &reports).into_iter().map(|(job, node, kind)| (run, job, node, kind)));
    }
    orders
}

fn crowded() -> Lab {
    let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
    for name in ["one", "two", "three"] {
        lab.run(name, job_policy(Preset::Specon), "a");
    }
    lab
}

#[test]
fn a_converged_job_leaves_those_that_grow_and_only_once() {
    let mut lab = crowded();
    let orders = specon_story(&mut lab, 8);
    assert_eq!(orders.len(), 1, "{orders:?}");
    assert_eq!((orders[0].1.as_str(), orders[0].2.as_str(), orders[0].3), ("three", "b", OrderKind::Move));
    let categories: BTreeMap<JobUid, wire::ReportedCategory> = lab
        .decision
        .take_judgements()
        .into_iter()
        .filter_map(|(uid, judgement)| Some((uid, judgement.category?)))
        .collect();
    assert_eq!(
        (categories["one"], categories["three"]),
        (wire::ReportedCategory::Growing, wire::ReportedCategory::Converged)
    );
    // The move was not carried out (the controller could not): it is not asked for again, because
    // the algorithm deals with each job once.
    assert_eq!(specon_story(&mut lab, 8), []);
}

#[test]
fn jobs_that_cannot_move_or_whose_agent_is_silent_are_left_alone() {
    let mut lab = crowded();
    lab.job("three").0.movable = Err(ImmovableReason::NoCheckpoint);
    assert_eq!(specon_story(&mut lab, 8), []);
    let mut lab = crowded();
    lab.snapshot.nodes.get_mut("a").unwrap().heard = false;
    assert_eq!(specon_story(&mut lab, 8), []);
}

impl Lab {
    /// What the controller stores: the marks of this job, as the decision has published them.
    fn store_marks(&mut self) {
        for (uid, judgement) in self.decision.take_judgements() {
            self.job(&uid).0.marks = judgement.marks;
        }
    }

    /// The operator is another one: it knows only what is on the jobs.
    fn restart(&mut self) {
        self.decision = Placements::default();
    }
}

#[test]
fn a_moved_job_is_not_moved_again_after_its_absence_and_a_restart_of_the_operator() {
    let mut lab = crowded();
    assert_eq!(specon_story(&mut lab, 8).len(), 1);
    lab.store_marks();
    let marks = lab.job("three").0.marks;
    assert!(marks.settled.is_some() && !marks.rebalanced && lab.job("one").0.marks.is_empty());
    // The move takes 90 s, so that the job is out of the view, and another operator begins meanwhile.
    lab.job("three").0.state = JobState::Moving;
    for _ in 0..3 {
        assert_eq!(lab.pass(15.0, &[]), []);
    }
    lab.restart();
    for _ in 0..3 {
        assert_eq!(lab.pass(15.0, &[]), []);
    }
    // It ends up where it was, beside the same jobs: without the mark it would ask again.
    lab.carry_out("three", "a");
    assert_eq!(specon_story(&mut lab, 12), []);
    lab.store_marks();
    assert_eq!(lab.job("three").0.marks, marks, "the time of the first decision stays");
    lab.job("three").0.marks = Marks::default();
    lab.restart();
    assert_eq!(specon_story(&mut lab, 12).len(), 1, "the mark was what held it");
}

#[test]
fn a_mark_outlasts_the_silence_of_a_node_agent() {
    let mut lab = crowded();
    // With this one the rule goes on.
    lab.run("four", job_policy(Preset::Specon), "b");
    assert_eq!(specon_story(&mut lab, 8).len(), 1);
    lab.snapshot.nodes.get_mut("a").unwrap().heard = false;
    // Longer than the rule itself keeps anything about a job that is out of view.
    for _ in 0..50 {
        assert_eq!(lab.pass(3600.0, &[]), []);
    }
    lab.snapshot.nodes.get_mut("a").unwrap().heard = true;
    assert_eq!(specon_story(&mut lab, 12), []);
}

#[test]
fn a_settled_job_is_still_rebalanced_by_the_next_operator_and_only_once() {
    let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
    let settled = Marks { settled: Some(Time::from_secs_f64(9e5)), ..Marks::default() };
    for name in ["one", "two"] {
        let facts = lab.run(name, job_policy(Preset::Specon), "a");
        facts.marks = settled;
        // It was moved before, for whatever reason.
        facts.move_cost_s = Some(2.0);
    }
    let orders = lab.pass(30.0, &[]);
    assert_eq!(orders, [order("one", "b", OrderKind::Move)]);
    lab.store_marks();
    assert_eq!(lab.job("one").0.marks, Marks { rebalanced: true, ..settled });
    lab.restart();
    lab.carry_out("two", "b");
    lab.carry_out("one", "b");
    // `a` is empty now: the other one may go there, the one that was moved may not.
    assert_eq!(lab.pass(30.0, &[]), [order("two", "a", OrderKind::Move)]);
}

/// Steps take a node-second each; `one` and `two` share node `a`, and `b` is empty.
fn gain_story(lab: &mut Lab, passes: u64) -> Vec<(JobUid, NodeName, OrderKind)> {
    let mut orders = vec![];
    for i in 1..=passes {
        let value = 1.0 / (1.0 + i as f64);
        let used = i as f64;
        orders.extend(lab.pass(2.0, &[("one", value, i, used), ("two", value, i, used)]));
    }
    orders
}

#[test]
fn an_empty_node_takes_a_job_if_that_is_worth_what_moving_was_measured_to_cost() {
    let shared = || {
        let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
        lab.run("one", job_policy(Preset::Gainshare), "a");
        lab.run("two", job_policy(Preset::Gainshare), "a");
        lab
    };
    let mut lab = shared();
    let orders = gain_story(&mut lab, 8);
    assert_eq!(orders.len(), 1, "{orders:?}");
    assert_eq!((orders[0].1.as_str(), orders[0].2), ("b", OrderKind::Move));
    // About ninety node-seconds are left of each: a move that costs a minute gains less than three
    // times that.
    let mut lab = shared();
    lab.job("one").0.move_cost_s = Some(60.0);
    assert_eq!(gain_story(&mut lab, 8), []);
}

impl Lab {
    /// The node agent says how the deadline of a job stands, which is due in `due_s` seconds.
    fn stands(&mut self, name: &str, ends: Ends, due_s: f64, work_core_s: f64) {
        let now = self.snapshot.now;
        let report = self.job(name).1.get_or_insert_default();
        let left = WorkLeft { work_core_s, serial_s: 0.0, usable_cores: 4.0, spread: 0.1 };
        report.deadline = Some(Deadline::strict(now + Span::from_secs_f64(due_s)));
        report.finish = Some(FinishView { ends, left });
        report.signal.reports += 1;
        report.signal.last = Some(TimedValue { value: 1.0, at: now });
    }

    /// `late` misses its deadline beside `kept` on node `a`, for this many seconds.
    fn late_for(&mut self, seconds: u32) -> Vec<(JobUid, NodeName, OrderKind)> {
        let mut orders = vec![];
        for second in 0..seconds {
            let left_s = 200.0 - f64::from(second);
            self.stands("late", Ends::Late, left_s, 300.0);
            self.stands("kept", Ends::InTime, left_s, 300.0);
            orders.extend(self.pass(1.0, &[]));
        }
        orders
    }
}

/// Two jobs of the policy `gainshare` on `a`, of which one is late, and an empty node `b`.
fn late_on_a() -> Lab {
    let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
    for name in ["late", "kept"] {
        lab.run(name, job_policy(Preset::Gainshare), "a");
    }
    lab
}

#[test]
fn a_late_job_moves_by_the_same_order_as_any_other_and_once_also_after_a_restart() {
    let mut lab = late_on_a();
    assert_eq!(lab.late_for(10), [], "a miss must last");
    assert!(lab.decision.needing_nodes().is_empty(), "it has not been looked at");
    assert_eq!(lab.late_for(5), [order("late", "b", OrderKind::Move)]);
    assert_eq!(lab.decision.jobs["late"].order.as_ref().unwrap().0.reason, PlacementReason::Deadline);
    assert!(lab.decision.recorded[&job_policy(Preset::Gainshare)].record().is_some());
    let judgements: Vec<_> = lab.decision.judgements.clone();
    assert!(matches!(&judgements[..], [(uid, judgement)] if uid == "late" && judgement.category.is_none()));
    lab.store_marks();
    let marks = lab.job("late").0.marks;
    assert!(marks.for_deadline.is_some() && lab.job("kept").0.marks.is_empty());
    // The controller could not carry the order out: the job is late where it was.
    assert_eq!(lab.late_for(60), []);
    assert!(lab.decision.needing_nodes().is_empty(), "it would not move to a further node");
    lab.restart();
    assert_eq!(lab.late_for(60), []);
    lab.job("late").0.marks = Marks::default();
    lab.restart();
    assert_eq!(lab.late_for(30).len(), 1, "the mark was what held it");
}

#[test]
fn a_job_that_costs_too_much_to_move_must_stay_or_finds_no_room_is_not_moved_for_its_deadline() {
    let spoilt: [fn(&mut Lab); 5] = [
        |lab| lab.job("late").0.movable = Err(ImmovableReason::NoCheckpoint),
        |lab| lab.job("late").0.move_cost_s = Some(150.0),
        |lab| lab.snapshot.nodes.get_mut("b").unwrap().open = false,
        |lab| lab.snapshot.nodes.get_mut("b").unwrap().heard = false,
        |lab| lab.snapshot.nodes.get_mut("b").unwrap().free_milli = 499,
    ];
    for spoil in spoilt {
        let mut lab = late_on_a();
        spoil(&mut lab);
        assert_eq!(lab.late_for(40), []);
        // A further node would help only a job that may move.
        let needing: Vec<JobUid> = lab.decision.needing_nodes().into_iter().collect();
        assert_eq!(needing, if lab.job("late").0.movable.is_ok() { vec!["late"] } else { vec![] });
    }
    // SpeCon takes no notice of deadlines.
    let mut lab = Lab::new(&[("a", 4.0), ("b", 4.0)]);
    for name in ["late", "kept"] {
        lab.run(name, job_policy(Preset::Specon), "a");
    }
    assert!(lab.late_for(20).is_empty());
}

#[test]
fn what_a_policy_keeps_for_the_jobs_of_a_node_is_not_given_to_a_late_job() {
    // The late job needs 0.45 of the other node.
    let orders = |floor: f64| {
        let mut lab = late_on_a();
        lab.run("resident", job_policy(Preset::Gainshare), "b");
        lab.job("resident").1.get_or_insert_default().floor = Some(floor);
        lab.late_for(20)
    };
    assert_eq!(orders(0.3), [order("late", "b", OrderKind::Move)]);
    assert_eq!(orders(0.6), []);
}

#[test]
fn a_job_on_its_way_to_a_node_keeps_others_from_it() {
    let mut lab = late_on_a();
    lab.snapshot.nodes.insert("c".into(), node(4.0));
    lab.run("second", job_policy(Preset::Gainshare), "c");
    assert_eq!(lab.late_for(11), [order("late", "b", OrderKind::Move)]);
    // Another one is late on the third node. What the first needs on `b` is not known before it reports there.
    lab.job("late").0.state = JobState::Moving;
    lab.job("late").1.take();
    for _ in 0..20 {
        lab.stands("second", Ends::Late, 150.0, 300.0);
        assert_eq!(lab.pass(1.0, &[]), []);
    }
    lab.carry_out("late", "b");
    for _ in 0..20 {
        lab.stands("second", Ends::Late, 150.0, 300.0);
        assert_eq!(lab.pass(1.0, &[]), []);
    }
}

#[test]
fn reports_and_use_go_on_over_a_move() {
    let mut lab = Lab::new(&[("a", 4.0), ("b", 8.0)]);
    lab.run("one", job_policy(Preset::Gainshare), "a");
    lab.pass(2.0, &[("one", 1.0, 1, 10.0)]);
    lab.pass(2.0, &[("one", 0.5, 2, 12.0)]);
    lab.carry_out("one", "b");
    lab.pass(2.0, &[]);
    let known = &lab.decision.jobs["one"];
    assert_eq!((known.all().signal.reports, known.all().signal.first.unwrap().value), (2, 1.0));
    // Twelve node-seconds of four cores are six of eight.
    assert_eq!(known.all().consumed_node_s.cpu, 6.0);
    lab.pass(2.0, &[("one", 0.4, 3, 1.0)]);
    let all = lab.decision.jobs["one"].all();
    assert_eq!((all.signal.reports, all.signal.last.unwrap().value, all.consumed_node_s.cpu), (3, 0.4, 7.0));
}

#[test]
fn a_moving_job_takes_room_where_it_goes_but_not_for_ever() {
    let mut lab = crowded();
    let orders = specon_story(&mut lab, 4);
    assert_eq!(orders.len(), 1);
    lab.job("three").0.state = JobState::Moving;
    lab.wait("four", job_policy(Preset::Specon));
    // `a` has two, `b` is about to have one.
    assert_eq!(lab.pass(1.0, &[]), [order("four", "b", OrderKind::Place)]);
    let third = |lab: &Lab| lab.snapshot.jobs[2].0.uid.clone();
    let phase =
        |lab: &Lab| lab.decision.job_view(&lab.decision.jobs[&third(lab)], lab.snapshot.now).map(|view| view.phase);
    assert!(matches!(phase(&lab), Some(Phase::Running { .. })));
    lab.snapshot.now = lab.snapshot.now + Span::from_secs(120);
    lab.pass(1.0, &[]);
    assert_eq!(phase(&lab), None);
}

#[test]
fn an_agents_moments_are_placed_by_its_quickest_message() {
    let began = Instant::now();
    let slow = AgentClock::of(1_000_000, began + Duration::from_millis(900));
    let quick = AgentClock::of(3_000_000, began + Duration::from_millis(2_010));
    let best = slow.quicker(quick);
    assert_eq!(best.at(3_000_000), began + Duration::from_millis(2_010));
    assert_eq!(
        quick.quicker(AgentClock::of(4_000_000, began + Duration::from_secs(9))).at(3_000_000),
        began + Duration::from_millis(2_010)
    );
    assert_eq!(best.at(2_000_000), began + Duration::from_millis(1_010));
}

#[test]
fn the_cost_of_moves_is_bounded_and_an_owner_counts_once() {
    let costs = |by_owner: &[(&str, &[f64])]| {
        let mut by_owner = by_owner.iter().map(|(owner, costs)| ((*owner).to_owned(), costs.to_vec())).collect();
        moving_cost_s(&mut by_owner)
    };
    assert_eq!(costs(&[]), None);
    assert_eq!(costs(&[("a", &[4.0]), ("b", &[5.0]), ("forger", &[1e9; 100])]), Some(5.0));
    assert_eq!(costs(&[("forger", &[0.0, -5.0])]), Some(1.0));
    assert_eq!(costs(&[("forger", &[1e300])]), Some(600.0));
}

#[test]
fn an_unsound_plan_places_and_moves_no_job_and_is_counted() {
    let mut lab = crowded();
    lab.wait("four", job_policy(Preset::Specon));
    let mut decider = Decider::new(rules(job_policy(Preset::Specon), Specon::default()));
    decider.break_plans();
    lab.decision.deciders.insert(job_policy(Preset::Specon), decider);
    assert_eq!(specon_story(&mut lab, 8), []);
    assert!(lab.decision.rejected >= 8, "{} plans were rejected", lab.decision.rejected);
    assert!(lab.decision.recorded.is_empty() && lab.decision.take_judgements().is_empty());
}
