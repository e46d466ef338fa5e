//! The control plane fails while jobs move and pods are shared: the API server or etcd is away, the leader stands still
//! while a second operator waits.
//!
//! A watcher reads from the kernel which attempts live: never two of one job. No job is lost, and none starts before
//! its checkpoint. Every move ends on its target. The sizes
//! of shared pods are read from the kernel while the API server is away: they stay as they are. When the API server
//! answers again, the policy is changed, and everything agrees with it within [`AGREED_WITHIN_S`]. After an outage of
//! more than [`SHORT_OUTAGE`] the kubelets and the scheduler pause by themselves, for up to [`PAUSE_S`]; then only the
//! operator's own part is judged by [`AGREED_WITHIN_S`].
//!
//! An outage lasts 5 s, or the seconds in `GAINSHARE_OUTAGE_S` (360 is longer than the lease of any part).

use crate::common::shared_pods::{SHARED, equal_shares};
use crate::common::training::{COUNTS, Operator, SYNC_PORT, job};
use crate::common::{FaultTally, SYSTEM, Scenarios, TestBed, eventually, text, within, within_a_minute};
use crate::invariants::{Watch, alive};
use gainshare_kube_api::names::JOB_LABEL;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A standby takes over this long after the leader's last sign of life.
const LEASE: Duration = Duration::from_secs(15);

/// Everything agrees again this long after the API server's first answer. It is the bound of the fault list, and one of
/// the few times that a test asserts.
const AGREED_WITHIN_S: f64 = 30.0;

/// After an outage of at most this length, the kubelets read from the API server again within seconds.
const SHORT_OUTAGE: Duration = Duration::from_secs(10);

/// The longest time for which a kubelet pauses before it asks an API server again that did not answer: 30 s, and up to
/// as much again at random.
const PAUSE_S: f64 = 60.0;

/// Patience for everything after an outage.
const PATIENCE: Duration = Duration::from_secs(150);

/// What is compared for this long has settled.
const SETTLED: Duration = Duration::from_secs(5);

/// The kubelet carries out a resize within this time.
const RESIZED_WITHIN: Duration = Duration::from_secs(2);

fn outage() -> Duration {
    let seconds = std::env::var("GAINSHARE_OUTAGE_S").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(5))
}

fn other(node: &str) -> &'static str {
    if node == "left" { "right" } else { "left" }
}

/// What must not change about a job that stays: its pod and its container. Its size may follow the policy again once
/// the API server is back.
fn pod_of(bed: &TestBed, name: &str) -> Value {
    let job = bed.job(name);
    let pod = bed.get("pod", job["status"]["attempt"]["pod"].as_str().unwrap_or_default());
    let container = &pod["status"]["containerStatuses"][0];
    json!({
        "pod": pod["metadata"]["name"], "uid": pod["metadata"]["uid"], "deleted": pod["metadata"]["deletionTimestamp"],
        "container": container["containerID"], "restarts": container["restartCount"],
    })
}

/// Suspends the policy or ends that. A suspended policy leaves the pods their own sizes.
fn set_suspend(bed: &TestBed, suspend: bool) {
    let patch = json!({"spec": {"suspend": suspend}}).to_string();
    let args = ["patch", "sharepolicy", "training", "-n", "team", "--type=merge", "-p", &patch];
    eventually("a change of the policy", || bed.output("kubectl", &args, "").status.success().then_some(()));
}

/// The sizes of the shared pods, as they are asked for and as the kubelet has put them into force, and what must never
/// change about them.
fn sizes(bed: &TestBed) -> Vec<Value> {
    let size = |(name, _): &(&str, &str)| {
        let pod = bed.find("pod", name).unwrap_or_default();
        let container = &pod["status"]["containerStatuses"][0];
        json!({
            "uid": pod["metadata"]["uid"], "deleted": pod["metadata"]["deletionTimestamp"],
            "cpu": pod["spec"]["containers"][0]["resources"]["requests"]["cpu"],
            "cpuInForce": container["resources"]["requests"]["cpu"],
            "container": container["containerID"], "restarts": container["restartCount"],
        })
    };
    SHARED.iter().map(size).collect()
}

fn until_sizes(bed: &TestBed, what: &str, expected: &[Value]) {
    let mut last = Vec::new();
    let found = within(PATIENCE, || {
        last = sizes(bed);
        (last == expected).then_some(())
    });
    assert!(found.is_some(), "{what}: {last:#?}\ninstead of {expected:#?}\n{}", bed.operator_log());
}

/// What the kubelet and the policy agree on: the pods' own sizes, and their sizes under the policy.
struct Sizes {
    own: Vec<Value>,
    shared: Vec<Value>,
}

/// Makes the shared pods and the policy, and waits for their sizes. An operator must lead.
fn share_pods(bed: &TestBed) -> Sizes {
    bed.make_shared_pods();
    let in_force = |size: &Value, own: &str| size["cpuInForce"] == size["cpu"] && size["cpu"] == own;
    let have_own = || Some(sizes(bed)).filter(|all| all.iter().zip(SHARED).all(|(one, (_, own))| in_force(one, own)));
    let own = eventually("the pods' own sizes", have_own);
    bed.apply(equal_shares());
    let is_shared = || {
        let now = sizes(bed);
        let changed = |(one, (_, own)): (&Value, (&str, &str))| one["cpuInForce"] == one["cpu"] && one["cpu"] != own;
        let is_changed = now.iter().zip(SHARED).all(changed);
        is_changed.then_some(now)
    };
    let settled = || {
        let first = is_shared()?;
        std::thread::sleep(SETTLED);
        (is_shared().as_ref() == Some(&first)).then_some(first)
    };
    let Some(shared) = within_a_minute(settled) else {
        panic!("the pods are not shared: {:#?}\n{}", sizes(bed), bed.operator_log());
    };
    println!("own sizes: {own:?}\nsizes under the policy: {shared:?}");
    Sizes { own, shared }
}

/// What `xtask testbed status` says.
fn testbed_status(bed: &TestBed) -> Value {
    let output = bed.testbed(&["status", "-o", "json"]);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {}", text(&output.stdout)))
}

/// The files with the CPU weights of pods on the node `left`, in either version of control groups.
fn weight_files(bed: &TestBed, pods: &[Value]) -> Vec<PathBuf> {
    let status = testbed_status(bed);
    let left = status["nodes"].as_array().into_iter().flatten().find(|node| node["name"] == "left");
    let root = left.and_then(|node| node["cgroup_root"].as_str()).unwrap_or_else(|| panic!("no node: {status:#}"));
    let file = |pod: &Value| {
        let pod = format!("kubepods/burstable/pod{}", pod["uid"].as_str().unwrap_or_default());
        let mounts = ["/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup"];
        let folders = mounts.map(|mount| Path::new(mount).join(root.trim_start_matches('/')).join(&pod));
        let mut files = folders.iter().flat_map(|folder| [folder.join("cpu.shares"), folder.join("cpu.weight")]);
        files.find(|file| file.is_file()).unwrap_or_else(|| panic!("no control group of a pod in {folders:?}"))
    };
    pods.iter().map(file).collect()
}

fn weights(files: &[PathBuf]) -> Vec<String> {
    let read = |file: &PathBuf| std::fs::read_to_string(file).unwrap_or_else(|error| error.to_string());
    files.iter().map(read).collect()
}

/// The uids of all pods but those of the job that moves.
fn pod_uids(bed: &TestBed) -> Vec<String> {
    let pods: Value = serde_json::from_str(&bed.kubectl(&["get", "pods", "-A", "-o", "json"])).unwrap();
    let stays = |pod: &&Value| pod["metadata"]["labels"][JOB_LABEL] != "steady";
    let name = |pod: &Value| {
        let (meta, phase) = (&pod["metadata"], &pod["status"]["phase"]);
        format!("{}/{} {} {} {}", meta["namespace"], meta["name"], meta["uid"], meta["deletionTimestamp"], phase)
    };
    let mut uids: Vec<String> = pods["items"].as_array().into_iter().flatten().filter(stays).map(name).collect();
    uids.sort();
    uids
}

/// How a part of the control plane goes away.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Absence {
    /// SIGKILL, and a new process later.
    Killed,
    /// SIGSTOP, and SIGCONT later: connections stay open, and no answer comes.
    Stopped,
}

/// A part of the control plane that is away, and comes back with [`Away::end`] or when the value is dropped.
struct Away<'a> {
    bed: &'a TestBed,
    part: &'a str,
    /// Of a part that stands still.
    stopped: Option<Pid>,
    is_over: bool,
}

impl<'a> Away<'a> {
    fn begin(bed: &'a TestBed, part: &'a str, absence: Absence) -> Away<'a> {
        let mut stopped = None;
        if absence == Absence::Killed {
            let killed = bed.testbed(&["kill", part]);
            assert!(killed.status.success(), "{}", text(&killed.stderr));
        } else {
            let program = testbed_status(bed)["programs"][part].clone();
            assert_eq!(program["alive"], true, "{part}: {program}");
            let pid = Pid::from_raw(program["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()).unwrap());
            kill(pid, Signal::SIGSTOP).unwrap();
            stopped = Some(pid);
        }
        Away { bed, part, stopped, is_over: false }
    }

    fn end(&mut self) -> Result<(), String> {
        if std::mem::replace(&mut self.is_over, true) {
            return Ok(());
        }
        if let Some(pid) = self.stopped {
            return kill(pid, Signal::SIGCONT).map_err(|error| error.to_string());
        }
        let started = self.bed.testbed(&["start", self.part]);
        if started.status.success() { Ok(()) } else { Err(text(&started.stderr)) }
    }
}

impl Drop for Away<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("{} does not come back: {error}", self.part);
        }
    }
}

/// What the operator itself asks for: the requests of the shared pods. The kubelet puts them into force.
fn requests(sizes: &[Value]) -> Vec<&Value> {
    sizes.iter().map(|size| &size["cpu"]).collect()
}

/// A part of the control plane goes away in a move and comes back after the outage. The policy is changed at the
/// first answer. Recovery is the time from that answer until the job runs on its target and the pods agree with the
/// policy.
fn is_away(bed: &TestBed, (part, absence): (&str, Absence), expected: &Sizes, tally: &mut FaultTally) {
    let _operator = Operator::start(bed, None);
    let from = bed.until("steady", "Running", None)["status"]["attempt"]["node"].as_str().unwrap().to_owned();
    // An earlier scenario that failed may have left it suspended.
    set_suspend(bed, false);
    until_sizes(bed, "sizes before the outage", &expected.shared);
    let quiet = pod_of(bed, "quiet");
    assert!(quiet["container"].is_string(), "{quiet:#}");
    let uids = pod_uids(bed);
    let files = weight_files(bed, &expected.shared);
    let quiet_files = weight_files(bed, std::slice::from_ref(&quiet));
    let before = weights(&files);
    bed.send_to("steady", other(&from));
    std::thread::sleep(Duration::from_millis(500));

    let mut away = Away::begin(bed, part, absence);
    tally.inject(1);
    let changes = changes_in_outage((&files, &before), &quiet_files);
    let living = alive(bed.name);
    away.end().unwrap_or_else(|error| panic!("{part} does not come back: {error}"));
    tally.demand(changes.is_empty(), || format!("pods were resized without {part}, from {before:?}: {changes:?}"));
    let lives = living.get("quiet").is_some_and(|pods| pods.len() == 1);
    tally.demand(lives, || format!("a job that should stay has ended without {part}: {living:?}"));

    let recovery = recover(bed, expected, other(&from), &format!("{part} {absence:?}"));
    tally.recover(recovery.all_s);
    let late = |what: &str, took_s: f64, bound_s: f64| {
        format!("{what} {took_s:.1} s after {part} answered again; the bound is {bound_s} s")
    };
    let asked_s = recovery.asked_s;
    tally.demand(asked_s <= AGREED_WITHIN_S, || late("the policy was followed", asked_s, AGREED_WITHIN_S));
    let bound_s = if outage() <= SHORT_OUTAGE { AGREED_WITHIN_S } else { AGREED_WITHIN_S + PAUSE_S };
    tally.demand(recovery.all_s <= bound_s, || late("all agreed", recovery.all_s, bound_s));
    let epoch = &bed.job("quiet")["status"]["attempt"]["epoch"];
    tally.demand(*epoch == 1, || format!("a job that should stay was started again: {epoch}"));
    let quiet_after = pod_of(bed, "quiet");
    tally.demand(quiet_after == quiet, || {
        format!("a job that should stay has changed: {quiet:#}, then {quiet_after:#}")
    });
    let uids_after = pod_uids(bed);
    tally.demand(uids_after == uids, || format!("a pod was evicted or made again: {uids:#?}, then {uids_after:#?}"));
    set_suspend(bed, false);
    until_sizes(bed, "sizes after the outage", &expected.shared);
}

/// Waits for the end of the outage. Returns the changes that pods have had meanwhile: of the shared ones with their
/// values before the outage, and of those that should stay.
fn changes_in_outage((files, before): (&[PathBuf], &[String]), quiet_files: &[PathBuf]) -> Vec<String> {
    let began = Instant::now();
    let (mut changes, mut quiet_before) = (Vec::new(), None);
    while began.elapsed() < outage() {
        std::thread::sleep(Duration::from_millis(200));
        let (now, quiet_now) = (weights(files), weights(quiet_files));
        if now != before {
            changes.push(format!("{:.1} s: {now:?}", began.elapsed().as_secs_f64()));
        }
        // The kubelet may still carry out a resize of the job that was asked for a moment before.
        if began.elapsed() > RESIZED_WITHIN && *quiet_before.get_or_insert(quiet_now.clone()) != quiet_now {
            changes.push(format!("{:.1} s: quiet {quiet_now:?}", began.elapsed().as_secs_f64()));
        }
    }
    changes
}

/// Seconds from the first answer of the part that was away.
struct Recovery {
    /// Until the operator had asked for the sizes of the new policy.
    asked_s: f64,
    /// Until the sizes were in force and the job ran on its target.
    all_s: f64,
}

/// Changes the policy at the first answer, and waits until the pods agree with it and the job has moved to `target`.
fn recover(bed: &TestBed, expected: &Sizes, target: &str, outage: &str) -> Recovery {
    let is_back = || {
        let answer = bed.output("kubectl", &["get", "trainingjob", "steady", "-n", "team", "-o", "name"], "");
        answer.status.success().then_some(())
    };
    assert!(within(PATIENCE, is_back).is_some(), "no answer after {outage}");
    let answered = Instant::now();
    set_suspend(bed, true);
    let is_asked_for = within(PATIENCE, || (requests(&sizes(bed)) == requests(&expected.own)).then_some(()));
    assert!(is_asked_for.is_some(), "the policy is not followed: {:#?}\n{}", sizes(bed), bed.operator_log());
    let asked_s = answered.elapsed().as_secs_f64();
    until_sizes(bed, "the policy after the outage", &expected.own);
    let agreed_s = answered.elapsed().as_secs_f64();
    let runs = || {
        let status = &bed.job("steady")["status"];
        (status["state"] == "Running" && status["attempt"]["node"] == target).then_some(())
    };
    let is_moved = within(PATIENCE, runs).is_some();
    assert!(is_moved, "the move does not end: {:#}\n{}", bed.job("steady")["status"], bed.operator_log());
    let all_s = answered.elapsed().as_secs_f64();
    println!(
        "{outage}: sizes asked for after {asked_s:.1} s, in force after {agreed_s:.1} s, all agrees after {all_s:.1} s"
    );
    Recovery { asked_s, all_s }
}

/// The operator that leads; empty before the first operator has made the lease.
fn holder(bed: &TestBed) -> String {
    let lease = ["get", "lease", "gainshare-operator", "-n", SYSTEM, "--ignore-not-found"];
    bed.kubectl(&[&lease[..], &["-o", "jsonpath={.spec.holderIdentity}"]].concat())
}

/// What a controller of jobs writes about the jobs and their pods. Notes about shares and progress follow the node
/// agents' reports, so they are left out.
fn written(bed: &TestBed) -> Vec<Value> {
    let read = |name: &str| {
        let job = bed.job(name);
        let mut status = job["status"].clone();
        if let Some(fields) = status.as_object_mut() {
            for reported in ["category", "sharePercent", "progress", "finish"] {
                fields.remove(reported);
            }
        }
        let pod = bed.find("pod", status["attempt"]["pod"].as_str().unwrap_or_default()).unwrap_or_default();
        let meta = &pod["metadata"];
        json!({
            "job": name, "uid": job["metadata"]["uid"], "finalizers": job["metadata"]["finalizers"], "status": status,
            "pod": meta["uid"], "deleted": meta["deletionTimestamp"], "podFinalizers": meta["finalizers"],
            "labels": meta["labels"], "node": pod["spec"]["nodeName"], "gates": pod["spec"]["schedulingGates"],
            "phase": pod["status"]["phase"],
        })
    };
    ["steady", "quiet"].into_iter().map(read).collect()
}

/// How many writes about jobs and pods the API server has refused because they were decided on an old version.
fn refused_writes(bed: &TestBed) -> u64 {
    let metrics = bed.kubectl(&["get", "--raw", "/metrics"]);
    let is_counted = |line: &&str| {
        let about = |resource: &str| line.contains(&format!("resource=\"{resource}\""));
        line.starts_with("apiserver_request_total{")
            && line.contains("code=\"409\"")
            && (about("trainingjobs") || about("pods"))
    };
    let count = |line: &str| line.rsplit_once(' ')?.1.parse::<f64>().ok();
    metrics.lines().filter(is_counted).filter_map(count).sum::<f64>() as u64
}

/// The leader stands still in a move for three times its lease, immediately before it writes that the job has stopped.
/// The standby takes over and ends the move. Then the former leader runs on, with a write of an old view in its hands:
/// the API server refuses that write, or the former leader notices that it leads no more and does not send it.
fn stands_still(bed: &TestBed, tally: &mut FaultTally) {
    let first = Operator::start(bed, Some("stop-before-stopped"));
    let leads = eventually("a leader", || Some(holder(bed)).filter(|holder| !holder.is_empty()));
    let _standby = Operator::standby_at(bed, &bed.address(SYNC_PORT + 1));
    let from = bed.until("steady", "Running", None)["status"]["attempt"]["node"].as_str().unwrap().to_owned();
    bed.send_to("steady", other(&from));
    let stands = within_a_minute(|| first.is_stopped().then_some(()));
    assert!(stands.is_some(), "the leader did not reach its write\n{}", bed.operator_log());
    tally.inject(1);
    let began = Instant::now();
    let epoch_before = bed.job("steady")["status"]["attempt"]["epoch"].as_u64();
    eventually("another leader", || Some(holder(bed)).filter(|now| !now.is_empty() && *now != leads));
    bed.serve_at(SYNC_PORT + 1);
    bed.until("steady", "Running", Some(other(&from)));
    let took_s = began.elapsed().as_secs_f64();
    tally.recover(took_s);
    let after = bed.job("steady")["status"].clone();
    assert!(after["attempt"]["epoch"].as_u64() > epoch_before, "the standby made no attempt of its own: {after:#}");
    std::thread::sleep((LEASE * 3).saturating_sub(began.elapsed()));
    // The new leader writes nothing about jobs that stay, so every later write is one of the former leader.
    let settled = || {
        let first = written(bed);
        std::thread::sleep(SETTLED);
        (written(bed) == first).then_some(first)
    };
    let Some(before) = within_a_minute(settled) else {
        panic!("the jobs do not settle: {:?}\n{}", written(bed), bed.operator_log());
    };
    let refused_before = refused_writes(bed);
    first.signal(Signal::SIGCONT);
    let mut effects = Vec::new();
    for _ in 0..20 {
        std::thread::sleep(Duration::from_millis(250));
        let holds = holder(bed);
        tally.demand(holds != leads, || format!("the former leader took the lease back: {holds}"));
        let now = written(bed);
        if now != before {
            effects.push(now);
        }
    }
    assert!(!first.is_stopped(), "the former leader did not run again");
    let refused = refused_writes(bed).saturating_sub(refused_before);
    println!("the standby ended the move after {took_s:.1} s");
    println!("the former leader: {refused} old writes were refused, {} took effect", effects.len());
    tally.demand(effects.is_empty(), || {
        format!("a write of the former leader took effect: {before:#?}, then {effects:#?}")
    });
    let now = bed.job("steady")["status"].clone();
    let is_same = (&now["attempt"], &now["moves"]) == (&after["attempt"], &after["moves"]);
    tally.demand(is_same, || format!("the job is not as the new leader left it: {after:#}, then {now:#}"));
}

#[test]
#[ignore = "needs root and a test bed"]
fn the_control_plane_fails_while_jobs_move() {
    let mut bed = TestBed::with_training("outages", &["left", "right"]);
    bed.start_agents();
    let bed = bed;
    let watch = Watch::begin(&bed);
    let mut scenarios = Scenarios::default();
    let mut outages = FaultTally::of("control-plane-away");
    let mut leaders = FaultTally::of("two-operators");
    let operator = Operator::start(&bed, None);
    for name in ["steady", "quiet"] {
        bed.apply(job(name, COUNTS, serde_json::json!({})));
        bed.until(name, "Running", Some("left"));
    }
    let sizes = share_pods(&bed);
    drop(operator);
    for (part, absence) in [
        ("kube-apiserver", Absence::Killed),
        ("kube-apiserver", Absence::Stopped),
        ("etcd", Absence::Killed),
        ("etcd", Absence::Stopped),
    ] {
        scenarios.run_counted(&format!("{part} is away: {absence:?}"), &mut outages, |tally| {
            is_away(&bed, (part, absence), &sizes, tally);
        });
    }
    scenarios.run_counted("the leader stands still", &mut leaders, |tally| stands_still(&bed, tally));
    let watched = watch.end(&bed, &["steady", "quiet"]);
    for tally in [&mut outages, &mut leaders] {
        scenarios.run_counted("the invariants held all the time", tally, |tally| watched.report(tally));
        tally.print();
    }
    scenarios.finish();
}
