//! Tests of [`super`] on a node of folders: logs and control groups as a kubelet writes them, and a clock that the
//! test moves.

use super::*;
use gainshare_core::policy::{Aim, Preset};
use gainshare_kube_api::aim::AimKind;
use gainshare_kube_api::fixtures::{pod_on_node, share_policy};
use gainshare_kube_api::resize::Amounts;
use gainshare_kube_api::share_reason::ShareReason;
use gainshare_kube_api::wire::{CollectorKind, ResizeObstacle};
use std::io::Write;

#[path = "gpu_tests.rs"]
mod gpu;

const SECOND: u64 = 1_000_000;
/// 2026-11-15T12:00:00Z
const NOON_NS: u64 = 1_794_744_000_000_000_000;

struct World {
    dir: tempfile::TempDir,
    node: Node,
    /// Microseconds.
    clock: u64,
    pods: Vec<PodOnNode>,
    cpu_ns: BTreeMap<String, u64>,
}

impl World {
    fn new() -> World {
        let dir = tempfile::tempdir().unwrap();
        for tree in ["logs", "cgroup/cpu,cpuacct/kubepods/burstable", "cgroup/memory"] {
            std::fs::create_dir_all(dir.path().join(tree)).unwrap();
        }
        let clock = 1000 * SECOND;
        let node = World::start(&dir, clock);
        World { dir, node, clock, pods: Vec::new(), cpu_ns: BTreeMap::new() }
    }

    /// A node with pods of these names, which the operator's list has.
    fn with(names: &[&str]) -> World {
        let mut world = World::new();
        names.iter().for_each(|name| world.add(name));
        world.list();
        world
    }

    fn start(dir: &tempfile::TempDir, clock: u64) -> Node {
        let groups = PodGroups::at(&dir.path().join("cgroup")).unwrap();
        let machine = Capacity { cores: 2.0, memory_bytes: 4 << 30 };
        let volumes = Volumes::at(Some(dir.path().join("pods")));
        let processes = HostProcesses::at(Some(dir.path().join("proc")));
        Node::new(&dir.path().join("logs"), volumes, groups, processes, machine, moment(clock))
    }

    fn now(&self) -> Moment {
        moment(self.clock)
    }

    /// A pod that requests a core, selected by a FlowCon policy with an interval of 2 s.
    fn add(&mut self, name: &str) {
        let uid = format!("uid-{name}");
        std::fs::create_dir_all(self.dir.path().join(format!("logs/team_{name}_{uid}/main"))).unwrap();
        std::fs::create_dir_all(self.group(&uid)).unwrap();
        self.burn(name, 0.0);
        let original = Resources {
            requests: Amounts { cpu_milli: Some(1000), memory_bytes: Some(64 << 20) },
            limits: Amounts::default(),
        };
        let mut pod = pod_on_node(name, original);
        pod.started_ms = Some(self.now().unix_ns / 1_000_000);
        (pod.settings.alpha, pod.settings.interval_ms) = (Some(0.05), Some(2000));
        self.pods.push(pod);
    }

    fn group(&self, uid: &str) -> PathBuf {
        self.dir.path().join(format!("cgroup/cpu,cpuacct/kubepods/burstable/pod{uid}"))
    }

    fn list(&mut self) {
        self.node.set_pods(moment(self.clock), self.pods.clone());
    }

    fn burn(&mut self, name: &str, cpu_s: f64) {
        let used = self.cpu_ns.entry(name.to_owned()).or_default();
        *used += (cpu_s * 1e9) as u64;
        let used = *used;
        std::fs::write(self.group(&format!("uid-{name}")).join("cpuacct.usage"), used.to_string()).unwrap();
    }

    fn print(&self, name: &str, text: &str) {
        self.print_into(name, "0.log", text);
    }

    fn print_into(&self, name: &str, file: &str, text: &str) {
        let path = self.dir.path().join(format!("logs/team_{name}_uid-{name}/main/{file}"));
        let mut file = std::fs::OpenOptions::new().append(true).create(true).open(path).unwrap();
        let stamp = jiff::Timestamp::from_nanosecond(i128::from(self.now().unix_ns)).unwrap();
        writeln!(file, "{stamp} stdout F {text}").unwrap();
    }

    /// Half a second passes; then the node makes a step.
    fn tick(&mut self) -> StepReport {
        self.clock += SECOND / 2;
        let now = self.now();
        self.node.step(now, None)
    }

    /// The seconds pass; every pod uses an equal part and reports the values of `loss`.
    fn live(&mut self, seconds: u64, loss: impl Fn(&str, f64) -> f64) {
        let names: Vec<String> = self.pods.iter().map(|p| p.name.clone()).collect();
        for _ in 0..seconds * 2 {
            for name in &names {
                self.burn(name, 1.0 / names.len() as f64);
                let age_s = self.clock as f64 / SECOND as f64 - 1000.0;
                self.print(name, &format!("step {} loss: {}", (age_s * 2.0) as u64, loss(name, age_s)));
            }
            self.tick();
        }
    }

    /// A second passes, in which these pods use `cpu_s` evenly; then each reports the step.
    fn train(&mut self, step: u64, cpu_s: [(&str, f64); 2]) {
        for _ in 0..2 {
            cpu_s.iter().for_each(|(name, cpu_s)| self.burn(name, cpu_s / 2.0));
            self.tick();
        }
        for (name, _) in cpu_s {
            self.print(name, &format!("step {step}/40 loss: {}", loss("grows", step as f64)));
        }
    }

    fn requested(&self) -> BTreeMap<PodUid, u64> {
        self.node.resizes().iter().map(|r| (r.uid.clone(), r.to.requests.cpu_milli.unwrap())).collect()
    }

    /// An operator with a fast API server reports these outcomes.
    fn answer(&mut self, state: impl Fn(&Resize) -> OutcomeState) {
        let resizes = self.node.resizes();
        let outcomes: Vec<Outcome> =
            resizes.iter().map(|r| Outcome { uid: r.uid.clone(), generation: r.generation, state: state(r) }).collect();
        self.node.record_outcomes(Time(self.clock), &outcomes);
        for (resize, outcome) in resizes.iter().zip(&outcomes) {
            if outcome.state == OutcomeState::Done {
                let pod = self.pods.iter_mut().find(|p| p.uid == resize.uid).unwrap();
                pod.now = resize.to.over(pod.now);
            }
        }
        self.list();
    }

    fn state(&self, name: &str) -> JobReport {
        self.node.states().into_iter().find(|s| s.uid.as_str() == format!("uid-{name}")).unwrap()
    }
}

fn moment(clock: u64) -> Moment {
    Moment { time: Time(clock), unix_ns: NOON_NS + clock * 1000 }
}

/// `flat` has converged; all other jobs improve quickly.
fn loss(name: &str, age_s: f64) -> f64 {
    if name == "flat" { 0.5 } else { 10.0 * (-age_s / 20.0).exp() }
}

#[test]
fn the_job_that_grows_gets_what_the_flat_one_does_not_need() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    let requested = w.requested();
    // The growth of one is zero: it keeps the floor of 1/(β·n) = a quarter of the pool of two cores.
    assert!(requested["uid-flat"] <= 510 && requested["uid-grows"] >= 1490, "{requested:?}");
    assert!(requested.values().sum::<u64>() <= 2000, "{requested:?}");
    let flat = w.state("flat");
    assert_eq!((flat.category, flat.growth), (gainshare_kube_api::wire::ReportedCategory::Converged, Some(0.0)));
    assert_eq!(w.state("grows").category, gainshare_kube_api::wire::ReportedCategory::Growing);
    assert_eq!(w.state("grows").progress.metric.as_deref(), Some("loss"));
    // The decrease comes first.
    assert_eq!(w.node.resizes()[0].uid, "uid-flat");
    assert_eq!(w.node.beat().converged, 1);
    assert!(w.node.beat().cpu_used_cores > 1.5);
}

#[test]
fn an_unsound_plan_resizes_no_pod_and_is_counted() {
    let mut w = World::with(&["flat", "grows"]);
    w.node.policies.values_mut().for_each(|state| state.decider.break_plans());
    let mut rejected = 0;
    for _ in 0..14 {
        for name in ["flat", "grows"] {
            w.burn(name, 0.5);
            let age_s = w.clock as f64 / SECOND as f64 - 1000.0;
            w.print(name, &format!("step {} loss: {}", (age_s * 2.0) as u64, loss(name, age_s)));
        }
        let step = w.tick();
        assert_eq!(step.plans, step.plans_rejected);
        rejected += step.plans_rejected;
    }
    assert!(rejected >= 3, "{rejected} plans were rejected");
    assert!(w.requested().is_empty(), "{:?}", w.requested());
    assert!(w.state("flat").share.is_none() && w.node.jobs["uid-flat"].verdict.is_none());
    assert!(matches!(w.node.last_decision(&"uid-flat".into()), Err(RecordError::Undecided { .. })));
}

#[test]
fn the_gain_policy_lets_the_shorter_job_go_first() {
    let mut w = World::new();
    w.add("long");
    w.add("short");
    for pod in &mut w.pods {
        pod.settings.policy = share_policy(Preset::Gainshare);
        (pod.settings.alpha, pod.settings.interval_ms) = (None, None);
    }
    w.list();
    for step in 1..=30_u64 {
        for _ in 0..2 {
            ["long", "short"].iter().for_each(|name| w.burn(name, 0.5));
            w.tick();
        }
        for (name, total) in [("long", 4000), ("short", 60)] {
            w.print(name, &format!("step {step}/{total} loss: {}", 10.0 * (-(step as f64) / 20.0).exp()));
        }
        w.answer(|_| OutcomeState::Done);
    }
    let (long, short) = (w.state("long"), w.state("short"));
    let share = |state: &JobReport| state.share.expect("it was decided");
    assert!(share(&short) > share(&long) + 0.1 && share(&short) + share(&long) <= 1.0 + 1e-9, "{short:?} {long:?}");
    let milli = |name: &str| w.pods.iter().find(|pod| pod.name == name).unwrap().now.requests.cpu_milli.unwrap();
    assert!(
        milli("short") > milli("long") + 200 && milli("short") + milli("long") <= 2000,
        "{} {}",
        milli("short"),
        milli("long")
    );
    let decided =
        |job: &JobReport| if let Some(ShareReason::Decided(reason)) = job.cause { Some(reason) } else { None };
    assert!(matches!(decided(&short), Some(Reason::Gaining { ahead: 0, .. })), "{short:?}");
    assert!(matches!(decided(&long), Some(Reason::Gaining { ahead: 1, .. })), "{long:?}");
    // The decision is one that can be made again.
    let record = w.node.last_decision(&"uid-short".into()).unwrap().decision.record().unwrap();
    assert_eq!(record.replay().unwrap().differences, []);
}

#[test]
fn a_job_may_write_its_progress_into_a_volume() {
    let mut w = World::new();
    w.add("flat");
    w.add("grows");
    let settings = &mut w.pods[1].settings;
    (settings.collector, settings.path) = (CollectorKind::File, Some("run/metrics.csv".into()));
    w.list();
    w.live(2, loss);
    // Its output is not read, and the file does not exist yet.
    assert_eq!(w.state("grows").progress.value, None);
    assert!(w.state("grows").reason.contains("none of its volumes has run/metrics.csv yet"), "{:?}", w.state("grows"));
    let folder = w.dir.path().join("pods/uid-grows/volumes/kubernetes.io~empty-dir/out/run");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("metrics.csv"), "step,val_loss\n").unwrap();
    for step in 1..=20 {
        let mut file = std::fs::OpenOptions::new().append(true).open(folder.join("metrics.csv")).unwrap();
        writeln!(file, "{step},{}", 10.0 - 0.3 * f64::from(step)).unwrap();
        w.burn("grows", 0.5);
        w.burn("flat", 0.5);
        w.print("flat", &format!("step {step} loss: 0.5"));
        w.tick();
    }
    let grows = w.state("grows");
    assert_eq!((grows.progress.metric.as_deref(), grows.progress.step), (Some("val_loss"), Some(20)));
    assert_eq!(grows.category, gainshare_kube_api::wire::ReportedCategory::Growing);
    assert!(w.requested()["uid-grows"] >= 1490, "{:?}", w.requested());
}

#[test]
fn accepted_resizes_are_not_sent_again_and_small_changes_are_not_sent() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    w.answer(|_| OutcomeState::Done);
    assert!(w.requested().is_empty());
    w.live(10, loss);
    assert!(w.requested().is_empty(), "{:?}", w.requested());
}

#[test]
fn pods_are_classified_at_once_and_resized_when_their_kubelet_is_ready() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    w.answer(|_| OutcomeState::Done);
    w.live(2, loss);
    w.add("new");
    w.list();
    // The new pod takes part in decisions at once. Its resize, and those of the pods that lose a part, are sent
    // when the kubelet is ready for it.
    w.tick();
    assert!(w.node.jobs["uid-new"].verdict.is_some());
    w.tick();
    assert!(w.requested().is_empty() && w.state("new").share.is_none(), "{:?}", w.requested());
    w.tick();
    assert!(w.requested().contains_key("uid-grows"), "{:?}", w.requested());
    assert!(w.state("new").share.is_some());
    // A pod that changes all the time does not delay the other pods.
    w.answer(|_| OutcomeState::Done);
    w.add("newer");
    for i in 0..10 {
        w.pods[2].noted = i;
        w.list();
        assert!(w.requested().is_empty() || i > 7, "after {i} ticks: {:?}", w.requested());
        w.tick();
    }
    assert!(!w.requested().is_empty());
}

#[test]
fn a_failure_is_tried_again_and_only_the_newest_target_counts() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    let before = w.node.resizes();
    w.answer(|_| OutcomeState::Failed { why: "the API server is away".into() });
    assert!(w.requested().is_empty());
    w.tick();
    assert_eq!(w.node.resizes(), before);
    // The outcome of an older target changes nothing.
    let stale = Outcome { uid: "uid-flat".into(), generation: 0, state: OutcomeState::Done };
    w.node.record_outcomes(Time(w.clock), &[stale]);
    assert_eq!(w.node.resizes(), before);
}

#[test]
fn a_refusal_is_not_repeated_every_interval() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    w.answer(|_| OutcomeState::Refused { why: "quota".into() });
    let mut times = 0;
    for _ in 0..60 {
        w.live(1, loss);
        times += u32::from(!w.requested().is_empty());
        w.answer(|_| OutcomeState::Refused { why: "quota".into() });
    }
    assert!(times <= 12, "requested {times} times in a minute");
}

#[test]
fn a_new_agent_keeps_resized_pods_until_it_has_measured() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    w.answer(|_| OutcomeState::Done);
    w.node = World::start(&w.dir, w.clock);
    w.list();
    w.tick();
    // The history was read again.
    assert!(w.state("grows").progress.step.is_some_and(|s| s > 10));
    assert!(w.requested().is_empty(), "{:?}", w.requested());
    w.live(3, loss);
    assert!(w.requested().is_empty(), "{:?}", w.requested());
    w.live(5, loss);
    // It has decided the same, so there is nothing to resize.
    assert_eq!(w.state("flat").category, gainshare_kube_api::wire::ReportedCategory::Converged);
    assert!(w.requested().is_empty(), "{:?}", w.requested());
}

#[test]
fn a_pod_that_never_reports_gets_an_equal_share() {
    let mut w = World::with(&["silent", "grows"]);
    for _ in 0..130 {
        w.burn("silent", 0.5);
        w.burn("grows", 0.5);
        let age_s = w.clock as f64 / SECOND as f64 - 1000.0;
        w.print("silent", "a line without a metric");
        w.print("grows", &format!("step {} loss: {}", age_s as u64, 10.0 - 0.2 * age_s));
        w.tick();
        w.tick();
        w.answer(|_| OutcomeState::Done);
    }
    let silent = w.state("silent");
    assert!(matches!(silent.cause, Some(ShareReason::Decided(Reason::NoSignal { .. }))), "{:?}", silent.cause);
    assert_eq!(silent.share, Some(0.5));
}

#[test]
fn a_flood_of_output_delays_no_other_policy() {
    let mut w = World::new();
    w.add("flat");
    w.add("grows");
    w.add("flood");
    w.pods[2].policy = "other".into();
    w.list();
    let line = "x".repeat(8000);
    for _ in 0..14 {
        // More than one step reads, so that the agent is always behind.
        (0..400).for_each(|_| w.print("flood", &line));
        for name in ["flat", "grows"] {
            w.burn(name, 0.5);
            let age_s = w.clock as f64 / SECOND as f64 - 1000.0;
            w.print(name, &format!("step {} loss: {}", (age_s * 2.0) as u64, loss(name, age_s)));
        }
        assert!(w.tick().more, "the flood is larger than what one step reads");
    }
    let requested = w.requested();
    assert!(requested["uid-flat"] <= 510 && requested["uid-grows"] >= 1490, "{requested:?}");
}

/// The pattern comes from an annotation of the pod. Its matching costs much, and the output is made for it.
#[test]
fn a_costly_pattern_leaves_the_other_pods_their_turn() {
    let mut w = World::new();
    w.add("flat");
    w.add("grows");
    w.add("bomb");
    // Each byte may begin a match, and the end of a match is rare and no constant text, so that the whole line is
    // searched. The repetitions are as many as an accepted pattern can have.
    let bomb = |length: usize| format!("(?P<value>1[01]{{{length}}})[a-z]");
    let is_accepted = |length: &usize| gainshare_progress::Pattern::new(&bomb(*length), "loss").is_ok();
    let length = (1..2000).take_while(is_accepted).last().unwrap();
    w.pods[2].settings.pattern = Some(bomb(length));
    w.pods[2].policy = "other".into();
    w.list();
    // Equal lines would cost little. A generator of Marsaglia's (xorshift) makes them.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut digit = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        if random & 1 == 0 { '0' } else { '1' }
    };
    for _ in 0..14 {
        for _ in 0..400 {
            let line: String = (0..990).map(|_| digit()).collect();
            w.print("bomb", &line);
        }
        for name in ["flat", "grows"] {
            w.burn(name, 0.5);
            let age_s = w.clock as f64 / SECOND as f64 - 1000.0;
            w.print(name, &format!("step {} loss: {}", (age_s * 2.0) as u64, loss(name, age_s)));
        }
        w.tick();
    }
    let (flat, grows) = (w.state("flat"), w.state("grows"));
    assert_eq!((flat.progress.step, grows.progress.step), (Some(13), Some(13)), "every report of the others is read");
    let requested = w.requested();
    assert!(requested["uid-flat"] <= 510 && requested["uid-grows"] >= 1490, "{requested:?}");
    // The pattern rested, and the pod says so.
    let bomb = w.state("bomb");
    assert!(bomb.reason.contains("simpler pattern"), "{bomb:?}");
    println!("fault: injected={} violations=0", 14 * 400);
}

#[test]
fn blocked_pods_are_reported_and_left_out() {
    let mut w = World::new();
    w.add("flat");
    w.add("grows");
    w.add("best-effort");
    w.pods[2].blocked = Some(ResizeObstacle { reason: "BestEffort".into(), message: "it requests nothing".into() });
    w.list();
    w.live(7, loss);
    let blocked = ShareReason::Blocked { obstacle: "BestEffort".into(), message: "it requests nothing".into() };
    assert_eq!(w.state("best-effort").cause, Some(blocked));
    assert_eq!(w.state("best-effort").reason, "it requests nothing");
    assert_eq!(w.state("best-effort").share, None);
    assert!(!w.requested().contains_key("uid-best-effort"));
    assert!(w.requested().values().sum::<u64>() <= 2000);
}

#[test]
fn pods_that_vanish_are_dropped_and_a_restart_begins_a_new_curve() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(3, loss);
    w.print_into("grows", "1.log", "step 1 loss: 9.0");
    w.clock += SECOND;
    w.tick();
    let again = w.state("grows");
    assert_eq!((again.progress.step, again.progress.value), (Some(1), Some(9.0)));
    w.pods.remove(0);
    w.list();
    w.tick();
    assert_eq!(w.node.states().len(), 1);
    assert!(!w.requested().contains_key("uid-flat"));
    w.pods.clear();
    w.list();
    assert!(w.tick().plans == 0 && w.node.states().is_empty() && w.node.due().is_none());
}

#[test]
fn another_writer_is_detected_and_resizes_get_rarer() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    w.answer(|_| OutcomeState::Done);
    let mut writes = 0;
    for _ in 0..120 {
        for pod in &mut w.pods {
            pod.now = pod.original;
        }
        w.list();
        w.live(1, loss);
        writes += u32::from(!w.requested().is_empty());
        let resizes = w.node.resizes();
        let done = |r: &Resize| Outcome { uid: r.uid.clone(), generation: r.generation, state: OutcomeState::Done };
        let outcomes: Vec<Outcome> = resizes.iter().map(done).collect();
        w.node.record_outcomes(Time(w.clock), &outcomes);
    }
    assert!(writes <= 15, "{writes} writes in two minutes");
}

#[test]
fn the_effect_is_read_from_the_kernels_files() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(7, loss);
    let requested = w.requested();
    w.answer(|_| OutcomeState::Done);
    assert!(w.node.awaits_effect(Time(w.clock)));
    for (uid, milli) in requested {
        std::fs::write(w.group(&uid).join("cpu.shares"), (milli * 1024 / 1000).to_string()).unwrap();
    }
    assert_eq!(w.tick().effects_s.len(), 2);
    assert!(!w.node.awaits_effect(Time(w.clock)));
    assert!(w.tick().effects_s.is_empty());
}

#[test]
fn a_wall_clock_that_jumps_expires_nothing() {
    let mut w = World::with(&["flat", "grows"]);
    w.live(5, loss);
    for jump in [3_600_000_000_000i64, -3_600_000_000_000] {
        let unix_ns = w.now().unix_ns.checked_add_signed(jump).unwrap();
        w.clock += SECOND / 2;
        w.node.step(Moment { time: Time(w.clock), unix_ns }, None);
        assert_eq!(w.node.states().len(), 2);
        assert!(w.node.states().iter().all(|s| !s.reason.contains("silent")));
    }
}

#[test]
fn the_last_decision_about_a_pod_replays() {
    let mut world = World::with(&["flat", "grows"]);
    let none = world.node.last_decision(&"uid-flat".into()).unwrap_err();
    assert_eq!(none, RecordError::Undecided { pod: "team/flat".into() });
    world.live(10, |name, age_s| if name == "flat" { 1.0 } else { 100.0 - age_s });
    let JobDecision { job, decision } = world.node.last_decision(&"uid-grows".into()).unwrap();
    let record = decision.record().unwrap();
    assert!(record.view.jobs.iter().any(|view| view.id == job));
    assert_eq!(record.replay().unwrap().differences, []);
    let back = gainshare_record::from_json(&gainshare_record::to_json(&record).unwrap()).unwrap();
    assert_eq!(back, record);
    assert_eq!(back.replay().unwrap().differences, []);

    // A pod that came after the last decision is not in it.
    world.add("late");
    world.list();
    assert!(matches!(world.node.last_decision(&"uid-late".into()), Err(RecordError::Undecided { .. })));
    world.pods[0].blocked = Some(ResizeObstacle { reason: "BestEffort".into(), message: "it requests no CPU".into() });
    world.list();
    let blocked = world.node.last_decision(&"uid-flat".into()).unwrap_err().to_string();
    assert!(blocked.contains("it requests no CPU"), "{blocked}");
    assert!(matches!(world.node.last_decision(&"uid-other".into()), Err(RecordError::NotShared { .. })));
}

/// Two pods of `qos` that make one step per second with half of the node; `due` has a deadline in `due_s`, for its 40
/// steps.
fn with_deadline(due_s: u64, seconds: u64) -> World {
    let mut w = World::new();
    w.add("other");
    w.add("due");
    for pod in &mut w.pods {
        pod.settings.policy = share_policy(Preset::Qos);
    }
    let now_ms = w.now().unix_ns / 1_000_000;
    w.pods[1].deadline = Some(gainshare_kube_api::deadline::Deadline { at_ms: now_ms + due_s * 1000, tolerance_ms: 0 });
    w.list();
    for second in 1..=seconds {
        w.train(second, [("other", 1.0), ("due", 1.0)]);
    }
    w
}

#[test]
fn a_late_pod_gets_what_its_deadline_needs() {
    // With half of the node it would take 40 s; 28 s are left after 6.
    let w = with_deadline(34, 6);
    let due = w.state("due");
    assert_eq!(due.deadline_state, Some(gainshare_kube_api::deadline::DeadlineState::OnTime), "{due:?}");
    assert!(due.forecast.is_some() && due.share.is_some_and(|share| share > 0.55), "{due:?}");
    assert!(w.requested()["uid-due"] > 1100 && w.requested().values().sum::<u64>() <= 2000, "{:?}", w.requested());
}

/// Steps that take twice as long while another pod starts are neither a change of the cost nor a pause.
#[test]
fn the_start_of_another_pod_changes_no_pace() {
    let mut w = with_deadline(60, 12);
    let pace = |w: &World| w.node.jobs["uid-due"].pace.pace().expect("it is measured").step_s(0.5);
    let before = pace(&w);
    w.add("new");
    w.list();
    for step in 13..=14 {
        (0..2).for_each(|_| w.train(step - 1, [("other", 1.0), ("due", 1.0)]));
        w.print("due", &format!("step {step}/40 loss: {}", loss("grows", step as f64)));
    }
    (15..=17).for_each(|step| w.train(step, [("other", 1.0), ("due", 1.0)]));
    let after = pace(&w);
    assert!((after / before - 1.0).abs() < 0.03, "{before} became {after}");
}

#[test]
fn the_operator_learns_what_a_followed_job_has_left_to_do() {
    let mut w = with_deadline(34, 6);
    assert!(w.state("due").signal.is_none(), "no other pods are followed");
    w.pods[1].follow = true;
    w.list();
    w.train(7, [("other", 1.0), ("due", 1.0)]);
    let left = w.state("due").signal.and_then(|signal| signal.left).expect("its pace and its length are known");
    // 33 steps are left, each of half a node-second.
    assert!((10.0..25.0).contains(&(left.parallel_node_s + left.serial_s)), "{left:?}");
}

#[test]
fn a_deadline_that_cannot_be_met_is_reported_at_once_and_harms_no_other_pod() {
    let w = with_deadline(8, 4);
    let due = w.state("due");
    assert_eq!(due.deadline_state, Some(gainshare_kube_api::deadline::DeadlineState::AtRisk), "{due:?}");
    assert!(due.forecast.is_some() && due.share.is_some_and(|share| share < 0.5), "{due:?}");
}

#[test]
fn the_aim_of_the_settings_is_the_aim_of_the_policy() {
    let mut settings = pod_on_node("a", Resources::default()).settings;
    settings.policy = share_policy(Preset::Gainshare);
    let aim = |settings: &Settings| policy_of(settings).aim();
    assert_eq!(aim(&settings), Some(Aim::Finish));
    settings.aim = Some(AimKind::Quality);
    assert_eq!(aim(&settings), Some(Aim::Quality));
    settings.policy = share_policy(Preset::Flowcon);
    assert_eq!(aim(&settings), None, "it has none");
}

/// A job that names no number of steps stops at a value: its end is where its curve meets the value.
#[test]
fn a_target_takes_the_place_of_a_number_of_steps() {
    let end = |target: Option<f64>| {
        let mut w = World::new();
        w.add("stops");
        w.pods[0].settings.policy = share_policy(Preset::Qos);
        w.pods[0].settings.target = target;
        let now_ms = w.now().unix_ns / 1_000_000;
        let deadline = gainshare_kube_api::deadline::Deadline { at_ms: now_ms + 600_000, tolerance_ms: 0 };
        w.pods[0].deadline = Some(deadline);
        w.list();
        for step in 1..=60_u64 {
            w.burn("stops", 1.0);
            w.tick();
            w.print("stops", &format!("step {step} loss: {}", 2.0 * (-(step as f64) / 40.0).exp()));
        }
        (w.state("stops").deadline_state, w.state("stops").forecast.map(|f| f.done_ms.saturating_sub(now_ms) / 1000))
    };
    assert_eq!(end(None), (Some(gainshare_kube_api::deadline::DeadlineState::Unknown), None));
    // The value is reached after 148 steps, two a second so far; with the whole node it takes less.
    let (deadline_state, done_s) = end(Some(0.05));
    assert_eq!(deadline_state, Some(gainshare_kube_api::deadline::DeadlineState::OnTime));
    assert!(done_s.is_some_and(|s| (45..110).contains(&s)), "{done_s:?}");
}

#[test]
fn finished_runs_of_the_program_say_how_long_the_next_one_is() {
    let mut w = World::with(&["first"]);
    w.live(4, loss);
    w.print("first", "step 80 loss: 0.1");
    w.pods.clear();
    w.list();
    let finished = w.node.finished();
    assert_eq!(
        (finished.len(), finished[0].uid.as_str(), finished[0].steps),
        (1, "uid-first", 80),
        "its last line counts"
    );

    let deadline_state = |earlier_steps: Vec<u64>| {
        let mut w = World::new();
        w.add("second");
        w.pods[0].settings.policy = share_policy(Preset::Qos);
        let now_ms = w.now().unix_ns / 1_000_000;
        let deadline = gainshare_kube_api::deadline::Deadline { at_ms: now_ms + 30_000, tolerance_ms: 0 };
        (w.pods[0].deadline, w.pods[0].earlier_steps) = (Some(deadline), earlier_steps);
        w.list();
        // Two steps a second.
        w.live(6, loss);
        w.state("second").deadline_state
    };
    use gainshare_kube_api::deadline::DeadlineState;
    assert_eq!(deadline_state(vec![]), Some(DeadlineState::Unknown));
    assert_eq!(deadline_state(vec![30, 30]), Some(DeadlineState::OnTime));
    assert_eq!(deadline_state(vec![900, 900]), Some(DeadlineState::AtRisk));
}

#[test]
fn the_team_follows_the_request() {
    use gainshare_page::{Orders, decode, encode};
    let mut w = World::new();
    w.node.machine.cores = 16.0;
    let page = |uid: &str| format!("pods/{uid}/volumes/kubernetes.io~empty-dir/gainshare-page/page");
    for name in ["a", "b"] {
        w.add(name);
        let page = w.dir.path().join(page(&format!("uid-{name}")));
        std::fs::create_dir_all(page.parent().unwrap()).unwrap();
        std::fs::write(page, encode(&Orders::default(), 1)).unwrap();
    }
    // A pod without the library has its part of the node, too.
    w.add("other");
    w.node.teams = Teams::at(&w.dir.path().join("pods")).unwrap();
    w.list();
    let bytes = |w: &World, name: &str| std::fs::read(w.dir.path().join(page(&format!("uid-{name}")))).unwrap();
    let team = |w: &World, name: &str| decode(&bytes(w, name).try_into().unwrap()).unwrap().team;
    w.tick();
    let thirds = [team(&w, "a"), team(&w, "b")];
    assert!(thirds.iter().all(|team| [5, 6].contains(team)), "{thirds:?}");
    let request = |w: &mut World, name: &str, cpu_milli: u64, limit_milli: Option<u64>| {
        let pod = w.pods.iter_mut().find(|pod| pod.name == name).unwrap();
        (pod.now.requests.cpu_milli, pod.now.limits.cpu_milli) = (Some(cpu_milli), limit_milli);
    };
    request(&mut w, "a", 2250, None);
    request(&mut w, "b", 500, None);
    request(&mut w, "other", 250, None);
    w.list();
    w.tick();
    assert_eq!([team(&w, "a"), team(&w, "b")], [12, 3]);
    request(&mut w, "a", 2250, Some(3500));
    w.list();
    (0..2).for_each(|_| drop(w.tick()));
    assert_eq!(team(&w, "a"), 4, "the cores of its limit");
    // A pod that is not shared any more keeps its page, and the heartbeat ends.
    let before = bytes(&w, "a");
    w.pods.retain(|pod| pod.name != "a");
    w.list();
    let others = bytes(&w, "b");
    (0..4).for_each(|_| drop(w.tick()));
    assert_eq!(bytes(&w, "a"), before);
    assert_ne!(bytes(&w, "b"), others, "the heartbeat of the others goes on");
}

/// Only pods that the operator marks are measured, and the operator gets bytes per second.
#[test]
fn the_operator_learns_what_a_task_sends_and_receives() {
    let mut w = World::new();
    for name in ["task", "other"] {
        w.add(name);
        let pod = w.pods.last_mut().unwrap();
        (pod.follow, pod.traffic) = (true, name == "task");
    }
    w.list();
    for second in 0..12u64 {
        for (pid, name) in [(41, "task"), (42, "other")] {
            let folder = w.dir.path().join(format!("proc/{pid}"));
            std::fs::create_dir_all(folder.join("net")).unwrap();
            std::fs::write(folder.join("cgroup"), format!("3:cpu:/kubepods/burstable/poduid-{name}/c\n")).unwrap();
            let line = format!("h\nh\n eth0: {} 0 0 0 0 0 0 0 {} 0\n", 5000 * second, 700 * second);
            std::fs::write(folder.join("net/dev"), line).unwrap();
        }
        w.tick();
        w.tick();
    }
    let traffic = w.state("task").signal.unwrap().traffic.expect("measured");
    assert!((traffic.received_bytes_s - 5000.0).abs() < 1500.0, "{traffic:?}");
    assert!((traffic.sent_bytes_s - 700.0).abs() < 300.0, "{traffic:?}");
    assert_eq!(w.state("other").signal.unwrap().traffic, None);
}

#[test]
fn a_node_with_a_quota_that_is_used_up_has_no_cpu_to_spare() {
    let mut w = World::new();
    let node = w.dir.path().join("cgroup/cpu,cpuacct/kubepods");
    let write = |file: &str, text: String| std::fs::write(node.join(file), text).unwrap();
    write("cpu.cfs_quota_us", "100000".to_owned());
    write("cpu.cfs_period_us", "100000".to_owned());
    w.add("small");
    w.list();
    let (mut periods, mut throttled, mut idle_s) = (0_u64, 0_u64, 0.0);
    let mut is_scarce_after = |throttled_of_five: u64| {
        for _ in 0..4 {
            // The pod uses little, and the rest of the machine is idle.
            w.burn("small", 0.1);
            (periods, throttled, idle_s) = (periods + 5, throttled + throttled_of_five, idle_s + 0.5);
            write("cpu.stat", format!("nr_periods {periods}\nnr_throttled {throttled}\n"));
            w.clock += SECOND / 2;
            let now = w.now();
            w.node.step(now, Some(idle_s));
        }
        w.node.is_scarce
    };
    assert_eq!([0, 4, 0].map(&mut is_scarce_after), [false, true, false]);
}

/// Shares divide what the pods of a policy requested together. A pod alone under its policy has all of that, and on a
/// node that other pods keep busy it may be a hundredth of the node.
#[test]
fn a_small_pod_on_a_busy_node_may_be_able_to_use_more() {
    let usable = |request_milli: u64| {
        let mut w = World::new();
        w.add("small");
        let pod = &mut w.pods[0];
        (pod.settings.policy, pod.follow) = (share_policy(Preset::Qos), true);
        pod.original.requests.cpu_milli = Some(request_milli);
        pod.now = pod.original;
        w.list();
        for step in 1..=20 {
            for _ in 0..2 {
                // A fortieth of the two cores.
                w.burn("small", 0.025);
                w.tick();
            }
            w.print("small", &format!("step {step}/40 loss: {}", loss("grows", step as f64)));
        }
        w.state("small").signal.and_then(|signal| signal.left).expect("its pace and its length are known").usable
    };
    assert_eq!(usable(100), 1.0);
    assert!(usable(1000) < 0.1, "a job that uses so little of what it requested waits for something else");
}
