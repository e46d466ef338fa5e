//! The machine against a small cluster: pods are made, opened, run and end, and the status is written back.

use super::*;
use crate::jobs::pods::PodFault;
use crate::jobs::progress::TaskProgress;
use crate::jobs::task_job::gang::Placement;
use crate::jobs::task_job::off;
use crate::state::snapshot::{Exit, NodeState, Nodes};
use gainshare_core::invariants::{Invariants, Observation};
use gainshare_kube_api::deadline::{Deadline, DeadlineState, Forecast, NodesNeeded};
use gainshare_kube_api::names::ATTEMPT_FINALIZER;
use gainshare_kube_api::tasks::{TaskScale, TaskTraffic};
use gainshare_kube_api::tfjob::TfJob;
use gainshare_kube_api::training_job::TrainingJob;
use serde_json::{Value, json};

#[path = "machine_crash_tests.rs"]
mod machine_crash_tests;
#[path = "machine_size_tests.rs"]
mod sizes;

struct TestCluster {
    job: TaskJobSnapshot,
    pods: Vec<PodSnapshot>,
    now: Timestamp,
    /// Room for the gang.
    has_room: bool,
    never_fits: bool,
    scale: Option<TaskScale>,
    traffic: Option<TaskTraffic>,
    nodes_needed: Option<NodesNeeded>,
    progress: TaskProgress,
    fault: Option<PodFault>,
    services_deleted: u32,
    pods_made: u32,
    gone: bool,
    /// Pods stay in our copy although the API server has removed them.
    keeps_removed: bool,
    /// Sharing is switched off.
    is_off: bool,
}

/// The status as it is read after it was written: what the object has no field for is lost.
fn through_the_object(status: &TaskJobStatus, kind: WorkloadKind) -> TaskJobStatus {
    let (value, roles) = (status.to_value(kind, 1), json!({"Worker": {"template": template()}}));
    if kind == WorkloadKind::TfJob {
        let job = json!({"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": meta(),
            "spec": {"tfReplicaSpecs": roles}, "status": value});
        return TaskJobSnapshot::of_tfjob(&serde_json::from_value(job).unwrap()).unwrap().status;
    }
    let job = json!({"apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "metadata": meta(),
        "spec": {"replicaSpecs": roles}, "status": value});
    TaskJobSnapshot::of_training_job(&serde_json::from_value(job).unwrap()).unwrap().status
}

fn template() -> Value {
    json!({"spec": {"containers": [{"name": "tensorflow", "image": "i"}]}})
}

fn meta() -> Value {
    json!({"name": "dist", "namespace": "team", "uid": "u"})
}

fn tfjob(spec: Value) -> TestCluster {
    let job = json!({"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": meta(), "spec": spec});
    let job: TfJob = serde_json::from_value(job).unwrap();
    TestCluster::new(TaskJobSnapshot::of_tfjob(&job).unwrap())
}

fn training(spec: Value) -> TestCluster {
    let job = json!({"apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "metadata": meta(), "spec": spec});
    let job: TrainingJob = serde_json::from_value(job).unwrap();
    TestCluster::new(TaskJobSnapshot::of_training_job(&job).unwrap())
}

/// One server and two workers.
fn small(more: Value) -> TestCluster {
    let mut spec = json!({"replicaSpecs": {
        "PS": {"template": template()}, "Worker": {"replicas": 2, "template": template()},
    }});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    training(spec)
}

impl TestCluster {
    fn new(job: TaskJobSnapshot) -> TestCluster {
        let now = Timestamp::from_second(1_000_000).unwrap();
        TestCluster {
            job,
            pods: vec![],
            now,
            has_room: true,
            never_fits: false,
            scale: None,
            traffic: None,
            nodes_needed: None,
            progress: TaskProgress::default(),
            fault: None,
            services_deleted: 0,
            pods_made: 0,
            gone: false,
            keeps_removed: false,
            is_off: false,
        }
    }

    /// The pods of each task that run.
    fn observe(&self) -> Observation {
        let mut observation = Observation::default();
        let running = self.pods.iter().filter(|pod| pod.running).filter_map(|pod| Some((pod.task?, &pod.uid)));
        running.for_each(|(task, uid)| observation.add_live(&task.object_name("dist"), uid, None));
        observation
    }

    fn journal(&self) -> &gainshare_kube_api::tasks::TaskJournal {
        &self.job.status.journal
    }

    fn state(&self) -> State {
        self.journal().state
    }

    /// What the line would answer.
    fn grant(&self) -> Option<Placement> {
        let spec = self.job.spec.as_ref().ok()?;
        let gated = self.pods.iter().filter(|pod| pod.gated && pod.epoch == self.journal().epoch);
        let ready: BTreeSet<TaskId> = gated.filter_map(|pod| pod.task).collect();
        let is_whole = self.journal().admitted || spec.gang().iter().all(|task| ready.contains(task));
        (self.has_room && is_whole && !ready.is_empty())
            .then(|| ready.into_iter().map(|task| (task, "n".into())).collect())
    }

    fn step(&self) -> Step {
        let grant = self.grant();
        let nodes: Nodes = [("n".into(), NodeState::Ready)].into();
        if self.is_off {
            return off::step(&Snapshot::without_orders(self.now, &self.job, &self.pods, &nodes));
        }
        step(&Snapshot {
            now: self.now,
            job: &self.job,
            pods: &self.pods,
            nodes: &nodes,
            grant: grant.as_ref(),
            never_fits: self.never_fits,
            scale: self.scale.as_ref(),
            traffic: self.traffic.as_ref(),
            nodes_needed: self.nodes_needed.as_ref(),
            progress: self.progress,
            fault: self.fault.as_ref(),
        })
    }

    /// Runs steps until nothing is left to do, and answers all actions.
    fn settle(&mut self) -> Vec<Action> {
        let mut all = Vec::new();
        for _ in 0..50 {
            let next = self.step();
            if next.actions.is_empty() || self.gone {
                return all;
            }
            for action in next.actions {
                self.act(&action);
                all.push(action);
            }
        }
        panic!("it does not settle: {:?} {:?}", self.step(), self.job.status);
    }

    fn act(&mut self, action: &Action) {
        match action {
            Action::Write(_, status) => self.job.status = through_the_object(status, self.job.key.kind),
            Action::Hold => self.job.has_finalizer = true,
            Action::Release => self.gone = true,
            Action::DeleteJob => self.job.deleting = true,
            Action::Create(task) => {
                assert!(self.pods.iter().all(|pod| pod.task != Some(*task)), "{task} lives twice");
                self.pods_made += 1;
                self.pods.push(PodSnapshot {
                    namespace: "team".to_owned(),
                    name: task.object_name("dist"),
                    uid: format!("{task}/{}", self.pods_made).into(),
                    job: "dist".to_owned(),
                    owner: Some("u".into()),
                    epoch: self.journal().epoch,
                    task: Some(*task),
                    gated: true,
                    has_finalizer: !ATTEMPT_FINALIZER.is_empty(),
                    ..PodSnapshot::default()
                });
            }
            Action::Open { uid, node, .. } => {
                assert!(self.journal().admitted, "a gate opens before the gang is admitted");
                let pod = self.pod_mut(uid);
                (pod.gated, pod.node) = (false, Some(node.clone()));
            }
            Action::Delete { uid, .. } => {
                let (now, until) = (self.now, self.now + SignedDuration::from_secs(30));
                let pod = self.pod_mut(uid);
                pod.deleted = Some((now, until));
                if pod.running {
                    *pod = ended(pod, 143, now);
                } else if pod.node.is_some() && pod.exit.is_none() {
                    pod.phase = Phase::Failed;
                }
                if !pod.has_finalizer && !pod.running {
                    let uid = pod.uid.clone();
                    self.pods.retain(|pod| pod.uid != uid);
                }
            }
            Action::End { uid, .. } => {
                let now = self.now;
                let pod = self.pod_mut(uid);
                *pod = PodSnapshot { ending: true, ..ended(pod, 143, now) };
            }
            Action::LetGo { uid, .. } => {
                let keeps_removed = self.keeps_removed;
                let pod = self.pod_mut(uid);
                pod.has_finalizer = false;
                if pod.deleted.is_some() && !keeps_removed {
                    let uid = pod.uid.clone();
                    self.pods.retain(|pod| pod.uid != uid);
                }
            }
            Action::DeleteServices => self.services_deleted += 1,
        }
    }

    fn pod_mut(&mut self, uid: &PodUid) -> &mut PodSnapshot {
        self.pods.iter_mut().find(|pod| pod.uid == *uid).unwrap()
    }

    fn task(&mut self, name: &str) -> &mut PodSnapshot {
        let task = TaskId::parse(name);
        self.pods.iter_mut().find(|pod| pod.task == task).unwrap_or_else(|| panic!("no pod of {name}"))
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<String> = self.pods.iter().filter_map(|pod| pod.task).map(|task| task.to_string()).collect();
        names.sort();
        names
    }

    /// Every opened pod runs.
    fn run(&mut self) {
        for pod in self.pods.iter_mut().filter(|pod| pod.node.is_some() && pod.exit.is_none() && pod.deleted.is_none())
        {
            (pod.running, pod.phase) = (true, Phase::Running);
        }
        assert_eq!(Invariants::default().check(&self.observe()), []);
    }

    fn start(mut self) -> TestCluster {
        self.settle();
        self.run();
        self.settle();
        assert_eq!(self.state(), State::Running, "{}", self.job.status.message);
        self
    }

    fn end(&mut self, name: &str, code: i32) {
        let now = self.now;
        let pod = self.task(name);
        *pod = ended(pod, code, now);
    }

    /// Another client deletes the task's pod: a drain, for instance.
    fn drain(&mut self, name: &str) {
        let (now, until) = (self.now, self.now + SignedDuration::from_secs(30));
        self.task(name).deleted = Some((now, until));
    }

    fn wait(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
    }
}

fn ended(pod: &PodSnapshot, code: i32, at: Timestamp) -> PodSnapshot {
    let phase = if code == 0 { Phase::Succeeded } else { Phase::Failed };
    let exit = Some(Exit { code, finished: at, ..Exit::default() });
    PodSnapshot { running: false, phase, exit, ..pod.clone() }
}

fn opened(actions: &[Action]) -> usize {
    actions.iter().filter(|action| matches!(action, Action::Open { .. })).count()
}

#[test]
fn no_gate_opens_before_the_whole_gang_has_a_node() {
    let mut cluster = small(json!({}));
    cluster.has_room = false;
    let actions = cluster.settle();
    assert_eq!((opened(&actions), cluster.names().len()), (0, 3), "pods wait behind their gates");
    assert!(cluster.pods.iter().all(|pod| pod.gated));
    assert!(cluster.job.status.message.contains("room for all of its 3 tasks"), "{}", cluster.job.status.message);
    assert!(cluster.step().wake.is_some());
    cluster.has_room = true;
    let actions = cluster.settle();
    assert_eq!(opened(&actions), 3);
    assert_eq!(cluster.journal().nodes.len(), 3);
    cluster.run();
    cluster.settle();
    assert_eq!(cluster.state(), State::Running);
    assert_eq!(cluster.job.status.replicas["Worker"].active, 2);
    assert!(cluster.job.status.message.starts_with("3 of 3 tasks run"), "{}", cluster.job.status.message);
    assert!(cluster.job.status.start_time.is_some());
}

#[test]
fn a_grant_for_a_part_of_the_gang_is_not_taken() {
    let mut cluster = small(json!({}));
    cluster.has_room = false;
    cluster.settle();
    let part: Placement = [(TaskId::new(Role::Ps, 0), "n".into())].into();
    let nodes = Nodes::new();
    let next = step(&Snapshot {
        now: cluster.now,
        job: &cluster.job,
        pods: &cluster.pods,
        nodes: &nodes,
        grant: Some(&part),
        never_fits: false,
        scale: None,
        traffic: None,
        nodes_needed: None,
        progress: TaskProgress::default(),
        fault: None,
    });
    assert_eq!(next.actions, []);
}

#[test]
fn a_worker_that_dies_is_replaced_alone() {
    let mut cluster = small(json!({})).start();
    let server = cluster.task("ps-0").uid.clone();
    cluster.end("worker-1", 1);
    cluster.settle();
    assert_eq!(cluster.names(), ["ps-0", "worker-0"], "there is a pause after a failure");
    cluster.wait(3);
    cluster.settle();
    cluster.run();
    cluster.settle();
    assert_eq!((cluster.names().len(), cluster.journal().epoch, cluster.journal().failures), (3, 1, 1));
    assert_eq!((cluster.state(), &cluster.task("ps-0").uid), (State::Running, &server));
}

#[test]
fn a_server_that_dies_restarts_the_whole_job() {
    let mut cluster = small(json!({})).start();
    cluster.end("ps-0", 137);
    cluster.settle();
    assert_eq!((cluster.names().len(), cluster.journal().epoch, cluster.state()), (0, 2, State::Restarting));
    cluster.wait(3);
    cluster.settle();
    cluster.run();
    cluster.settle();
    assert_eq!((cluster.state(), cluster.names().len(), cluster.journal().failures), (State::Running, 3, 1));
    assert!(cluster.pods.iter().all(|pod| pod.epoch == 2));
}

/// Node agents report some seconds late: the last steps of an attempt are known while its pods end.
#[test]
fn steps_reported_while_the_tasks_end_are_counted() {
    let mut cluster = small(json!({})).start();
    let at = |step: u64| TaskProgress { step: Some(step), ..TaskProgress::default() };
    cluster.progress = at(230);
    cluster.keeps_removed = true;
    cluster.end("ps-0", 137);
    cluster.settle();
    assert_eq!(cluster.journal().reached_step, Some(230));
    cluster.progress = at(250);
    cluster.settle();
    assert_eq!(cluster.journal().reached_step, Some(250));
    assert_eq!(cluster.settle(), [], "it is written once");
}

/// What a restart of all tasks costs is on record.
#[test]
fn steps_that_a_restart_costs_are_published() {
    let mut cluster = small(json!({})).start();
    let at = |step: u64| TaskProgress { step: Some(step), ..TaskProgress::default() };
    cluster.progress = at(250);
    cluster.end("ps-0", 137);
    let actions = cluster.settle();
    let names_the_step = |action: &Action| matches!(action, Action::Write(JournalStep::Stopping, status) if status.message.ends_with("after step 250"));
    assert!(actions.iter().any(names_the_step), "{actions:?}");
    // Tasks of the new attempt have reported nothing at first.
    cluster.progress = TaskProgress::default();
    cluster.wait(3);
    cluster.settle();
    cluster.run();
    cluster.settle();
    assert_eq!((cluster.state(), cluster.journal().steps_lost), (State::Running, 0));
    // The job is beyond the step already when the operator hears of it.
    cluster.progress = TaskProgress { first_step: Some(210), ..at(260) };
    cluster.settle();
    assert_eq!((cluster.journal().steps_lost, cluster.journal().reached_step), (40, None));
    assert!(cluster.job.status.message.contains("40 steps were lost"), "{}", cluster.job.status.message);
    cluster.progress = at(300);
    assert_eq!(cluster.settle(), [], "it is counted once");
}

#[test]
fn a_failure_is_counted_once() {
    let mut cluster = small(json!({"runPolicy": {"backoffLimit": 2}})).start();
    for failures in 1..=2 {
        cluster.end("worker-0", 1);
        cluster.settle();
        assert_eq!(cluster.journal().failures, failures);
        cluster.wait(400);
        cluster.settle();
        cluster.run();
        cluster.settle();
        assert_eq!(cluster.state(), State::Running);
    }
    cluster.end("worker-0", 1);
    cluster.settle();
    assert_eq!(cluster.state(), State::Failed);
    assert!(cluster.job.status.message.contains("backoffLimit (2)"), "{}", cluster.job.status.message);
}

#[test]
fn a_deleted_pod_is_no_failure_and_no_success() {
    let mut cluster = small(json!({"runPolicy": {"backoffLimit": 0}})).start();
    let now = cluster.now;
    let pod = cluster.task("worker-0");
    *pod = PodSnapshot { deleted: Some((now, now)), ..ended(pod, 0, now) };
    cluster.settle();
    cluster.run();
    cluster.settle();
    assert_eq!((cluster.state(), cluster.journal().failures, cluster.names().len()), (State::Running, 0, 3));
}

#[test]
fn success_stops_the_servers_and_keeps_their_pods() {
    let roles =
        json!({"Chief": {"template": template()}, "PS": {"template": template()}, "Worker": {"template": template()}});
    let mut cluster = tfjob(json!({"tfReplicaSpecs": roles})).start();
    cluster.end("chief-0", 0);
    let actions = cluster.settle();
    assert_eq!(cluster.state(), State::Succeeded);
    assert_eq!(actions.iter().filter(|action| matches!(action, Action::End { .. })).count(), 2);
    assert_eq!(cluster.names().len(), 3, "pods stay for their logs");
    assert!(cluster.pods.iter().all(|pod| !pod.has_finalizer && !pod.running));
    assert_eq!((cluster.services_deleted, cluster.journal().cleaned), (1, true));
    assert_eq!(cluster.job.status.conditions.last().unwrap().type_, "Succeeded");
    for (role, counts) in &cluster.job.status.replicas {
        assert_eq!((counts.active, counts.succeeded, counts.failed), (0, 1, 0), "{role}");
    }
    assert_eq!(cluster.step(), Step::default(), "nothing is repeated");
}

#[test]
fn no_task_of_a_failed_job_counts_as_active() {
    let roles = json!({"PS": {"template": template()}, "Worker": {"template": template()}});
    let mut cluster = tfjob(json!({"tfReplicaSpecs": roles})).start();
    cluster.end("worker-0", 1);
    cluster.settle();
    let counts = |role: &str| (cluster.job.status.replicas[role].active, cluster.job.status.replicas[role].failed);
    assert_eq!((cluster.state(), counts("PS"), counts("Worker")), (State::Failed, (0, 0), (0, 1)));
}

/// Tools that know the training operator wait for these conditions.
#[test]
fn a_replaced_task_of_a_tfjob_shows_as_restarting() {
    let roles = json!({
        "PS": {"template": template()},
        "Worker": {"replicas": 2, "restartPolicy": "ExitCode", "template": template()},
    });
    let mut cluster = tfjob(json!({"tfReplicaSpecs": roles})).start();
    let last = |cluster: &TestCluster| cluster.job.status.conditions.last().unwrap().type_.clone();
    assert_eq!(last(&cluster), "Running");
    cluster.end("worker-1", 137);
    cluster.settle();
    assert_eq!((cluster.state(), last(&cluster)), (State::Running, "Restarting".to_owned()));
    assert!(cluster.job.status.conditions.iter().all(|known| known.type_ != "Running"));
    cluster.wait(3);
    cluster.settle();
    assert_eq!(last(&cluster), "Restarting", "the new pod does not run yet");
    cluster.run();
    cluster.settle();
    assert_eq!((cluster.state(), last(&cluster), cluster.names().len()), (State::Running, "Running".to_owned(), 3));
    // A pod that was deleted did not fail.
    cluster.drain("worker-0");
    cluster.end("worker-0", 143);
    cluster.settle();
    assert_eq!(last(&cluster), "Running");
}

/// The number of dynamic workers follows the manifest while the job runs.
#[test]
fn dynamic_workers_follow_an_edit_of_the_tfjob() {
    let with = |workers: u32| {
        let roles = json!({"PS": {"template": template()}, "Worker": {"replicas": workers, "template": template()}});
        tfjob(json!({"tfReplicaSpecs": roles, "enableDynamicWorker": true}))
    };
    let mut cluster = with(1).start();
    for (workers, tasks) in [(3, 4), (2, 3)] {
        cluster.job.spec = with(workers).job.spec;
        cluster.settle();
        cluster.run();
        cluster.settle();
        assert_eq!((cluster.names().len(), cluster.state(), cluster.journal().epoch), (tasks, State::Running, 1));
        assert!(cluster.pods.iter().all(|pod| pod.running), "{:?}", cluster.names());
    }
}

#[test]
fn clean_pod_policies_are_followed() {
    for (policy, left, running) in [("None", 2, 1), ("Running", 2, 0), ("All", 0, 0)] {
        let roles = json!({"PS": {"template": template()}, "Worker": {"template": template()}});
        let mut cluster = tfjob(json!({"tfReplicaSpecs": roles, "runPolicy": {"cleanPodPolicy": policy}})).start();
        cluster.end("worker-0", 0);
        cluster.settle();
        assert_eq!(cluster.state(), State::Succeeded);
        let alive = cluster.pods.iter().filter(|pod| pod.running).count();
        assert_eq!((cluster.names().len(), alive), (left, running), "{policy}");
    }
}

#[test]
fn success_policies_are_followed() {
    let roles = || json!({"Worker": {"replicas": 2, "template": template()}});
    let mut first = tfjob(json!({"tfReplicaSpecs": roles()})).start();
    first.end("worker-1", 0);
    first.settle();
    assert_eq!(first.state(), State::Running);
    first.end("worker-0", 0);
    first.settle();
    assert_eq!(first.state(), State::Succeeded);
    let mut all = tfjob(json!({"tfReplicaSpecs": roles(), "successPolicy": "AllWorkers"})).start();
    all.end("worker-0", 0);
    all.settle();
    assert_eq!(all.state(), State::Running);
    all.end("worker-1", 0);
    all.settle();
    assert_eq!(all.state(), State::Succeeded);
}

#[test]
fn exit_codes_decide_where_the_policy_says_so() {
    let with = |policy: &str, code: i32| {
        let worker = json!({"replicas": 2, "restartPolicy": policy, "template": template()});
        let mut cluster = tfjob(json!({"tfReplicaSpecs": {"Worker": worker}})).start();
        cluster.end("worker-1", code);
        cluster.settle();
        cluster.state()
    };
    assert_eq!(with("Never", 137), State::Failed);
    assert_eq!((with("ExitCode", 1), with("ExitCode", 127)), (State::Failed, State::Failed));
    assert_eq!((with("ExitCode", 128), with("ExitCode", 137)), (State::Running, State::Running));
}

#[test]
fn failed_dynamic_workers_are_ignored() {
    let roles = json!({"PS": {"template": template()}, "Worker": {"replicas": 2, "template": template()}});
    let mut cluster = tfjob(json!({"tfReplicaSpecs": roles, "enableDynamicWorker": true})).start();
    cluster.end("worker-1", 1);
    cluster.settle();
    assert_eq!((cluster.state(), cluster.job.status.replicas["Worker"].failed), (State::Running, 1));
}

#[test]
fn no_pod_while_suspended() {
    let mut cluster = small(json!({"suspend": true}));
    cluster.settle();
    assert_eq!((cluster.names().len(), cluster.state()), (0, State::Suspended));
    cluster.job.spec.as_mut().unwrap().options.suspend = false;
    let mut cluster = cluster.start();
    cluster.job.spec.as_mut().unwrap().options.suspend = true;
    cluster.settle();
    assert_eq!((cluster.names().len(), cluster.state(), &cluster.job.status.start_time), (0, State::Suspended, &None));
    cluster.job.spec.as_mut().unwrap().options.suspend = false;
    let cluster = cluster.start();
    assert_eq!(cluster.journal().failures, 0);
}

#[test]
fn a_gang_that_finds_no_room_is_taken_back() {
    let mut cluster = small(json!({}));
    cluster.settle();
    let since = cluster.now;
    let pod = cluster.task("worker-1");
    (pod.node, pod.unschedulable) = (None, Some((since, "0/1 nodes".to_owned())));
    cluster.run();
    cluster.settle();
    assert_eq!(cluster.journal().epoch, 1, "it may find room yet");
    cluster.wait(11);
    cluster.has_room = false;
    cluster.settle();
    let journal = cluster.journal();
    assert_eq!((journal.epoch, journal.admitted, journal.failures), (2, false, 0));
    assert_eq!(journal.tried, ["n"]);
    assert!(cluster.pods.iter().all(|pod| pod.gated), "no part of the gang holds room");
}

#[test]
fn growth_waits_behind_its_gate_and_the_job_runs() {
    let mut cluster =
        training(json!({"replicaSpecs": {"Worker": {"replicas": 3, "minReplicas": 1, "template": template()}}}));
    cluster.settle();
    cluster.run();
    for name in ["worker-1", "worker-2"] {
        let pod = cluster.task(name);
        *pod = PodSnapshot { gated: true, node: None, running: false, phase: Phase::Pending, ..pod.clone() };
    }
    cluster.has_room = false;
    cluster.job.status.journal.nodes.retain(|task, _| task == "worker-0");
    cluster.settle();
    assert_eq!(cluster.state(), State::Running);
    assert!(cluster.job.status.message.starts_with("1 of 3 tasks run"), "{}", cluster.job.status.message);
}

#[test]
fn what_cannot_run_fails_with_its_reason() {
    let mut cluster =
        small(json!({"replicaSpecs": {"Worker": {"minReplicas": 3, "maxReplicas": 1, "template": template()}}}));
    cluster.settle();
    assert_eq!((cluster.state(), cluster.names().len()), (State::Failed, 0));
    assert!(cluster.job.status.message.contains("exchange them"), "{}", cluster.job.status.message);
    let mut refused = small(json!({}));
    refused.fault = Some(PodFault { for_good: true, message: "PS: use a claim".to_owned() });
    refused.settle();
    assert!(refused.state() == State::Failed && refused.job.status.message.contains("use a claim"));
    let mut large = small(json!({}));
    (large.has_room, large.never_fits) = (false, true);
    large.settle();
    assert_eq!(large.state(), State::Waiting, "it is reported, not refused");
    assert!(large.job.status.message.contains("could ever hold"), "{}", large.job.status.message);
}

#[test]
fn deadlines_and_times_to_live_are_followed() {
    let mut cluster = small(json!({"runPolicy": {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 10}})).start();
    assert!(cluster.step().wake.is_some());
    cluster.wait(61);
    cluster.settle();
    assert!(cluster.state() == State::Failed && cluster.job.status.message.contains("activeDeadlineSeconds"));
    cluster.wait(11);
    cluster.settle();
    assert!(cluster.job.deleting && cluster.gone);
}

#[test]
fn progress_is_published_while_the_job_runs() {
    let roles = json!({"Chief": {"template": template()}, "PS": {"template": template()}});
    for mut cluster in [tfjob(json!({"tfReplicaSpecs": roles})), training(json!({"replicaSpecs": roles}))] {
        cluster.settle();
        cluster.run();
        let done_ms = (cluster.now + SignedDuration::from_secs(4800)).as_millisecond().unsigned_abs();
        let forecast = Some(Forecast { done_ms, earliest_ms: done_ms, latest_ms: done_ms });
        cluster.progress = TaskProgress { percent: Some(40), forecast, ..TaskProgress::default() };
        cluster.settle();
        let published =
            |cluster: &TestCluster| (cluster.job.status.progress.clone(), cluster.job.status.time_left.clone());
        assert_eq!(published(&cluster), (Some("40%".to_owned()), Some("1h20m".to_owned())));
        cluster.progress.percent = Some(42);
        cluster.wait(60);
        assert_eq!(cluster.settle(), [], "small changes are not written");
        cluster.end("chief-0", 0);
        cluster.settle();
        assert_eq!((cluster.state(), published(&cluster)), (State::Succeeded, (Some("100%".to_owned()), None)));
    }
}

#[test]
fn a_deleted_job_goes_after_its_pods() {
    let mut cluster = small(json!({})).start();
    cluster.job.deleting = true;
    let actions = cluster.settle_until_gone();
    assert!(cluster.gone && cluster.pods.is_empty(), "{actions:?}");
}

impl TestCluster {
    fn settle_until_gone(&mut self) -> Vec<Action> {
        let mut all = Vec::new();
        while !self.gone && all.len() < 100 {
            for action in self.step().actions {
                self.act(&action);
                all.push(action);
            }
        }
        all
    }
}

#[test]
fn drained_tasks_go_while_sharing_is_off_and_nothing_is_made() {
    let mut bed = small(json!({})).start();
    bed.is_off = true;
    assert_eq!(bed.settle(), [], "a job that runs goes on");
    bed.drain("worker-1");
    assert_eq!(bed.settle(), [], "it has not ended yet");
    bed.wait(1);
    bed.end("worker-1", 143);
    let actions = bed.settle();
    let is_write = |action: &Action| matches!(action, Action::Write(JournalStep::Stopping, _));
    assert!(matches!(&actions[..], [first, Action::LetGo { .. }] if is_write(first)), "{actions:?}");
    assert_eq!((bed.names(), bed.journal().failures), (vec!["ps-0".to_owned(), "worker-0".to_owned()], 0));
    // A lost server restarts all tasks, but not before sharing is on again.
    bed.drain("ps-0");
    bed.end("ps-0", 143);
    bed.settle();
    assert_eq!((bed.names(), bed.task("worker-0").running), (vec!["worker-0".to_owned()], true));
    bed.is_off = false;
    bed.settle();
    bed.run();
    bed.settle();
    assert_eq!((bed.state(), bed.names().len(), bed.journal().epoch), (State::Running, 3, 2));
}

#[test]
fn an_end_is_on_record_before_its_pod_goes_while_sharing_is_off() {
    let roles = json!({"Chief": {"template": template()}, "PS": {"template": template()}});
    let mut bed = tfjob(json!({"tfReplicaSpecs": roles})).start();
    bed.is_off = true;
    bed.end("chief-0", 0);
    assert_eq!(bed.settle(), [], "no program has deleted it");
    bed.wait(1);
    bed.drain("chief-0");
    bed.settle();
    assert_eq!((bed.state(), bed.names()), (State::Succeeded, vec!["ps-0".to_owned()]));
    assert!(bed.task("ps-0").running, "nothing is stopped while sharing is off");
    bed.is_off = false;
    bed.settle();
    assert!(!bed.task("ps-0").running);
}

#[test]
fn a_deleted_job_goes_while_sharing_is_off() {
    let mut bed = small(json!({})).start();
    (bed.is_off, bed.job.deleting) = (true, true);
    let actions = bed.settle_until_gone();
    assert!(bed.gone && bed.pods.is_empty(), "{actions:?}");
}

#[test]
fn a_pod_that_is_deleted_before_it_has_a_node_is_replaced() {
    let mut bed = small(json!({}));
    bed.settle();
    let (since, uid) = (bed.now, bed.task("worker-1").uid.clone());
    let pod = bed.task("worker-1");
    (pod.node, pod.unschedulable) = (None, Some((since, "0/1 nodes".to_owned())));
    bed.drain("worker-1");
    bed.settle();
    assert!(bed.names().len() == 3 && bed.task("worker-1").uid != uid);
}

#[test]
fn jobs_of_others_are_left_alone() {
    let mut cluster = small(json!({"managedBy": "example.com/other"}));
    assert_eq!(cluster.settle(), []);
}
