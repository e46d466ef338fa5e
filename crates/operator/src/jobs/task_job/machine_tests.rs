//! The machine against a small cluster: pods are made, opened, run and end, and the status is written back.

use super::*;
use crate::jobs::pods::PodFault;
use crate::jobs::progress::TaskProgress;
use crate::jobs::task_job::gang::Placement;
use crate::jobs::task_job::off;
use crate::state::snapshot::{Exit, NodeState, Nodes};
use gainshare_kube_api::deadline::NodesNeeded;
use gainshare_kube_api::names::ATTEMPT_FINALIZER;
use gainshare_kube_api::tasks::TaskScale;
use gainshare_kube_api::tfjob::TfJob;
use gainshare_kube_api::training_job::TrainingJob;
use serde_json::{Value, json};

#[path = "machine_size_tests.rs"]
mod sizes;

struct Bed {
    job: TaskJobSnapshot,
    pods: Vec<PodSnapshot>,
    now: Timestamp,
    /// Room for the gang.
    has_room: bool,
    never_fits: bool,
    scale: Option<TaskScale>,
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

fn tfjob(spec: Value) -> Bed {
    let job = json!({"apiVersion": "kubeflow.org/v1", "kind": "TFJob", "metadata": meta(), "spec": spec});
    let job: TfJob = serde_json::from_value(job).unwrap();
    Bed::new(TaskJobSnapshot::of_tfjob(&job).unwrap())
}

fn training(spec: Value) -> Bed {
    let job = json!({"apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "metadata": meta(), "spec": spec});
    let job: TrainingJob = serde_json::from_value(job).unwrap();
    Bed::new(TaskJobSnapshot::of_training_job(&job).unwrap())
}

/// One server and two workers.
fn small(more: Value) -> Bed {
    let mut spec = json!({"replicaSpecs": {
        "PS": {"template": template()}, "Worker": {"replicas": 2, "template": template()},
    }});
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    training(spec)
}

impl Bed {
    fn new(job: TaskJobSnapshot) -> Bed {
        let now = Timestamp::from_second(1_000_000).unwrap();
        Bed {
            job,
            pods: vec![],
            now,
            has_room: true,
            never_fits: false,
            scale: None,
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
            .then(|| ready.into_iter().map(|task| (task, "n".to_owned())).collect())
    }

    fn step(&self) -> Step {
        let grant = self.grant();
        let nodes: Nodes = [("n".to_owned(), NodeState::Ready)].into();
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
                    uid: format!("{task}/{}", self.pods_made),
                    job: "dist".to_owned(),
                    owner: Some("u".to_owned()),
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

    fn pod_mut(&mut self, uid: &str) -> &mut PodSnapshot {
        self.pods.iter_mut().find(|pod| pod.uid == uid).unwrap()
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
    }

    fn start(mut self) -> Bed {
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
    let mut bed = small(json!({}));
    bed.has_room = false;
    let actions = bed.settle();
    assert_eq!((opened(&actions), bed.names().len()), (0, 3), "pods wait behind their gates");
    assert!(bed.pods.iter().all(|pod| pod.gated));
    assert!(bed.job.status.message.contains("room for all of its 3 tasks"), "{}", bed.job.status.message);
    assert!(bed.step().wake.is_some());
    bed.has_room = true;
    let actions = bed.settle();
    assert_eq!(opened(&actions), 3);
    assert_eq!(bed.journal().nodes.len(), 3);
    bed.run();
    bed.settle();
    assert_eq!(bed.state(), State::Running);
    assert_eq!(bed.job.status.replicas["Worker"].active, 2);
    assert!(bed.job.status.message.starts_with("3 of 3 tasks run"), "{}", bed.job.status.message);
    assert!(bed.job.status.start_time.is_some());
}

#[test]
fn a_grant_for_a_part_of_the_gang_is_not_taken() {
    let mut bed = small(json!({}));
    bed.has_room = false;
    bed.settle();
    let part: Placement = [(TaskId::new(Role::Ps, 0), "n".to_owned())].into();
    let nodes = Nodes::new();
    let next = step(&Snapshot {
        now: bed.now,
        job: &bed.job,
        pods: &bed.pods,
        nodes: &nodes,
        grant: Some(&part),
        never_fits: false,
        scale: None,
        nodes_needed: None,
        progress: TaskProgress::default(),
        fault: None,
    });
    assert_eq!(next.actions, []);
}

#[test]
fn a_worker_that_dies_is_replaced_alone() {
    let mut bed = small(json!({})).start();
    let server = bed.task("ps-0").uid.clone();
    bed.end("worker-1", 1);
    bed.settle();
    assert_eq!(bed.names(), ["ps-0", "worker-0"], "there is a pause after a failure");
    bed.wait(3);
    bed.settle();
    bed.run();
    bed.settle();
    assert_eq!((bed.names().len(), bed.journal().epoch, bed.journal().failures), (3, 1, 1));
    assert_eq!((bed.state(), &bed.task("ps-0").uid), (State::Running, &server));
}

#[test]
fn a_server_that_dies_restarts_the_whole_job() {
    let mut bed = small(json!({})).start();
    bed.end("ps-0", 137);
    bed.settle();
    assert_eq!((bed.names().len(), bed.journal().epoch, bed.state()), (0, 2, State::Restarting));
    bed.wait(3);
    bed.settle();
    bed.run();
    bed.settle();
    assert_eq!((bed.state(), bed.names().len(), bed.journal().failures), (State::Running, 3, 1));
    assert!(bed.pods.iter().all(|pod| pod.epoch == 2));
}

#[test]
fn a_failure_is_counted_once() {
    let mut bed = small(json!({"runPolicy": {"backoffLimit": 2}})).start();
    for failures in 1..=2 {
        bed.end("worker-0", 1);
        bed.settle();
        assert_eq!(bed.journal().failures, failures);
        bed.wait(400);
        bed.settle();
        bed.run();
        bed.settle();
        assert_eq!(bed.state(), State::Running);
    }
    bed.end("worker-0", 1);
    bed.settle();
    assert_eq!(bed.state(), State::Failed);
    assert!(bed.job.status.message.contains("backoffLimit (2)"), "{}", bed.job.status.message);
}

#[test]
fn a_deleted_pod_is_no_failure_and_no_success() {
    let mut bed = small(json!({"runPolicy": {"backoffLimit": 0}})).start();
    let now = bed.now;
    let pod = bed.task("worker-0");
    *pod = PodSnapshot { deleted: Some((now, now)), ..ended(pod, 0, now) };
    bed.settle();
    bed.run();
    bed.settle();
    assert_eq!((bed.state(), bed.journal().failures, bed.names().len()), (State::Running, 0, 3));
}

#[test]
fn success_stops_the_servers_and_keeps_their_pods() {
    let roles =
        json!({"Chief": {"template": template()}, "PS": {"template": template()}, "Worker": {"template": template()}});
    let mut bed = tfjob(json!({"tfReplicaSpecs": roles})).start();
    bed.end("chief-0", 0);
    let actions = bed.settle();
    assert_eq!(bed.state(), State::Succeeded);
    assert_eq!(actions.iter().filter(|action| matches!(action, Action::End { .. })).count(), 2);
    assert_eq!(bed.names().len(), 3, "pods stay for their logs");
    assert!(bed.pods.iter().all(|pod| !pod.has_finalizer && !pod.running));
    assert_eq!((bed.services_deleted, bed.journal().cleaned), (1, true));
    assert_eq!(bed.job.status.conditions.last().unwrap().type_, "Succeeded");
    assert_eq!(bed.step(), Step::default(), "nothing is repeated");
}

#[test]
fn clean_pod_policies_are_followed() {
    for (policy, left, running) in [("None", 2, 1), ("Running", 2, 0), ("All", 0, 0)] {
        let roles = json!({"PS": {"template": template()}, "Worker": {"template": template()}});
        let mut bed = tfjob(json!({"tfReplicaSpecs": roles, "runPolicy": {"cleanPodPolicy": policy}})).start();
        bed.end("worker-0", 0);
        bed.settle();
        assert_eq!(bed.state(), State::Succeeded);
        let alive = bed.pods.iter().filter(|pod| pod.running).count();
        assert_eq!((bed.names().len(), alive), (left, running), "{policy}");
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
        let mut bed = tfjob(json!({"tfReplicaSpecs": {"Worker": worker}})).start();
        bed.end("worker-1", code);
        bed.settle();
        bed.state()
    };
    assert_eq!(with("Never", 137), State::Failed);
    assert_eq!((with("ExitCode", 1), with("ExitCode", 127)), (State::Failed, State::Failed));
    assert_eq!((with("ExitCode", 128), with("ExitCode", 137)), (State::Running, State::Running));
}

#[test]
fn failed_dynamic_workers_are_ignored() {
    let roles = json!({"PS": {"template": template()}, "Worker": {"replicas": 2, "template": template()}});
    let mut bed = tfjob(json!({"tfReplicaSpecs": roles, "enableDynamicWorker": true})).start();
    bed.end("worker-1", 1);
    bed.settle();
    assert_eq!((bed.state(), bed.job.status.replicas["Worker"].failed), (State::Running, 1));
}

#[test]
fn no_pod_while_suspended() {
    let mut bed = small(json!({"suspend": true}));
    bed.settle();
    assert_eq!((bed.names().len(), bed.state()), (0, State::Suspended));
    bed.job.spec.as_mut().unwrap().options.suspend = false;
    let mut bed = bed.start();
    bed.job.spec.as_mut().unwrap().options.suspend = true;
    bed.settle();
    assert_eq!((bed.names().len(), bed.state(), &bed.job.status.start_time), (0, State::Suspended, &None));
    bed.job.spec.as_mut().unwrap().options.suspend = false;
    let bed = bed.start();
    assert_eq!(bed.journal().failures, 0);
}

#[test]
fn a_gang_that_finds_no_room_is_taken_back() {
    let mut bed = small(json!({}));
    bed.settle();
    let since = bed.now;
    let pod = bed.task("worker-1");
    (pod.node, pod.unschedulable) = (None, Some((since, "0/1 nodes".to_owned())));
    bed.run();
    bed.settle();
    assert_eq!(bed.journal().epoch, 1, "it may find room yet");
    bed.wait(11);
    bed.has_room = false;
    bed.settle();
    let journal = bed.journal();
    assert_eq!((journal.epoch, journal.admitted, journal.failures), (2, false, 0));
    assert_eq!(journal.tried, ["n"]);
    assert!(bed.pods.iter().all(|pod| pod.gated), "no part of the gang holds room");
}

#[test]
fn growth_waits_behind_its_gate_and_the_job_runs() {
    let mut bed =
        training(json!({"replicaSpecs": {"Worker": {"replicas": 3, "minReplicas": 1, "template": template()}}}));
    bed.settle();
    bed.run();
    for name in ["worker-1", "worker-2"] {
        let pod = bed.task(name);
        *pod = PodSnapshot { gated: true, node: None, running: false, phase: Phase::Pending, ..pod.clone() };
    }
    bed.has_room = false;
    bed.job.status.journal.nodes.retain(|task, _| task == "worker-0");
    bed.settle();
    assert_eq!(bed.state(), State::Running);
    assert!(bed.job.status.message.starts_with("1 of 3 tasks run"), "{}", bed.job.status.message);
}

#[test]
fn what_cannot_run_fails_with_its_reason() {
    let mut bed =
        small(json!({"replicaSpecs": {"Worker": {"minReplicas": 3, "maxReplicas": 1, "template": template()}}}));
    bed.settle();
    assert_eq!((bed.state(), bed.names().len()), (State::Failed, 0));
    assert!(bed.job.status.message.contains("exchange them"), "{}", bed.job.status.message);
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
    let mut bed = small(json!({"runPolicy": {"activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 10}})).start();
    assert!(bed.step().wake.is_some());
    bed.wait(61);
    bed.settle();
    assert!(bed.state() == State::Failed && bed.job.status.message.contains("activeDeadlineSeconds"));
    bed.wait(11);
    bed.settle();
    assert!(bed.job.deleting && bed.gone);
}

#[test]
fn progress_is_published_while_the_job_runs() {
    let roles = json!({"Chief": {"template": template()}, "PS": {"template": template()}});
    for mut bed in [tfjob(json!({"tfReplicaSpecs": roles})), training(json!({"replicaSpecs": roles}))] {
        bed.settle();
        bed.run();
        let done_ms = (bed.now + SignedDuration::from_secs(4800)).as_millisecond().unsigned_abs();
        bed.progress = TaskProgress { percent: Some(40), done_ms: Some(done_ms) };
        bed.settle();
        let published = |bed: &Bed| (bed.job.status.progress.clone(), bed.job.status.time_left.clone());
        assert_eq!(published(&bed), (Some("40%".to_owned()), Some("1h20m".to_owned())));
        bed.progress.percent = Some(42);
        bed.wait(60);
        assert_eq!(bed.settle(), [], "small changes are not written");
        bed.end("chief-0", 0);
        bed.settle();
        assert_eq!((bed.state(), published(&bed)), (State::Succeeded, (Some("100%".to_owned()), None)));
    }
}

#[test]
fn a_deleted_job_goes_after_its_pods() {
    let mut bed = small(json!({})).start();
    bed.job.deleting = true;
    let actions = bed.settle_until_gone();
    assert!(bed.gone && bed.pods.is_empty(), "{actions:?}");
}

impl Bed {
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
    assert_eq!(bed.settle(), [], "nobody has deleted it");
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
    let mut bed = small(json!({"managedBy": "example.com/other"}));
    assert_eq!(bed.settle(), []);
}
