//! What distributed jobs cost the operator, measured without an API server: `cargo xtask bench tasks`.
//!
//! **Problem.** A cluster may hold a thousand jobs of eight tasks. The operator must decide about all of them in less
//! than a second of processor time, and must write nothing where nothing has changed.
//!
//! **How.** The objects of a made-up cluster are in memory. The code that decides is the operator's own: the line of
//! jobs that wait, the state machine of each job, and the decision about the sizes of tasks. Actions change the objects
//! as an API server, a scheduler and kubelets would, and pods run at once. Only the deciding is timed.
//!
//! **Units.** Seconds of processor time of this thread (`_cpu_s`).

use crate::elastic::SizeRehearsal;
use crate::jobs::progress::TaskProgress;
use crate::jobs::task_job::action::Action;
use crate::jobs::task_job::{GangQueue, JobTurn, next_step, pod, template_fault};
use crate::state::lead::Leader;
use crate::state::metrics::Metrics;
use crate::state::snapshot::Nodes;
use crate::state::task_job::TaskJobSnapshot;
use crate::state::workload::{WorkloadKey, WorkloadKind};
use gainshare_kube_api::bounds::NodeFacts;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{JOB_FINALIZER, NamespacedName, NodeName, PodUid};
use gainshare_kube_api::training_job::{State, TrainingJob};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// A job that has not settled after this number of steps never will.
const MOST_STEPS: usize = 50;
/// All jobs run after fewer rounds than this.
const MOST_ROUNDS: usize = 500;
/// The time between two rounds.
const ROUND: SignedDuration = SignedDuration::from_millis(200);
/// Decisions about the sizes of tasks that are timed, and the time between two of them.
const SIZE_PASSES: u64 = 5;
const SIZE_PASS_S: u64 = 31;
/// A node of the made-up cluster holds two jobs of two servers and six workers, and has a core left. So a full cluster
/// has room in many places, and none for a worker of two cores.
const NODE_CORES: f64 = 29.0;

/// Why the rehearsal cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RehearsalError {
    #[error("a made-up object cannot be read: {0}")]
    Object(#[from] serde_json::Error),
    #[error("there is no processor clock: {0}")]
    Clock(#[from] nix::Error),
    #[error("the job {0} does not settle: its steps never end")]
    Unsettled(String),
    #[error("{waiting} of {jobs} jobs do not run after {MOST_ROUNDS} rounds")]
    NotRunning { waiting: usize, jobs: usize },
}

/// Measures this number of jobs of eight tasks on this number of nodes.
pub fn rehearse(jobs: usize, nodes: usize) -> Result<Value, RehearsalError> {
    let mut cluster = Cluster::new(nodes);
    // All jobs wait: no node takes pods yet.
    cluster.open_nodes(nodes, 0)?;
    cluster.add_jobs("job", jobs)?;
    cluster.reconcile_all()?;
    let writes_before_start = cluster.writes;
    let waiting = cluster.pass_figures()?;
    cluster.open_nodes(nodes, nodes)?;
    let line_pass = cluster.line_pass()?;
    let rounds = cluster.run_until_all_run()?;
    let started = json!({
        "rounds": rounds,
        "decisions_cpu_s": rounded(cluster.decided_cpu_s),
        "writes_per_job": rounded(cluster.writes as f64 / jobs.max(1) as f64),
        "writes_per_job_until_the_gang_waits": rounded(writes_before_start as f64 / jobs.max(1) as f64),
    });
    let running = cluster.pass_figures()?;
    let sizes = cluster.size_passes()?;
    cluster.reconcile_all()?;
    let reported = cluster.pass_figures()?;
    // As many jobs again, and no room for any of them.
    let used = cluster.used_nodes();
    cluster.open_nodes(nodes, used)?;
    cluster.add_jobs("late", jobs)?;
    cluster.reconcile_all()?;
    let full = cluster.pass_figures()?;
    let full_line_pass = cluster.line_pass()?;
    Ok(json!({
        "jobs": jobs, "tasks_per_job": 8, "nodes": nodes,
        "all_wait": waiting,
        "line_pass_with_room_cpu_s": line_pass,
        "start": started,
        "all_run": running,
        "sizes": sizes,
        "all_run_and_report": reported,
        "full_and_as_many_wait": full,
        "line_pass_without_room_cpu_s": full_line_pass,
    }))
}

/// The objects of the cluster, and the operator's state.
struct Cluster {
    leader: Arc<Leader>,
    line: GangQueue,
    objects: BTreeMap<WorkloadKey, TrainingJob>,
    pods: BTreeMap<PodUid, Value>,
    nodes: usize,
    version: u64,
    now: Timestamp,
    writes: u64,
    decided_cpu_s: f64,
}

fn node_name(index: usize) -> NodeName {
    format!("node-{index:04}").into()
}

fn rounded(value: f64) -> f64 {
    (value * 1e4).round() / 1e4
}

fn cpu_s() -> Result<f64, RehearsalError> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?;
    Ok(time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9)
}

impl Cluster {
    fn new(nodes: usize) -> Cluster {
        let leader = Arc::new(Leader::new(Arc::new(Metrics::new()), 1));
        let now = Timestamp::now();
        let (objects, pods) = (BTreeMap::new(), BTreeMap::new());
        let line = GangQueue::default();
        Cluster { leader, line, objects, pods, nodes, version: 1, now, writes: 0, decided_cpu_s: 0.0 }
    }

    /// The number of nodes, from the first on, that take pods. The others do not.
    fn open_nodes(&mut self, all: usize, open: usize) -> Result<(), RehearsalError> {
        for index in 0..all {
            let size = json!({"cpu": NODE_CORES.to_string(), "memory": "256Gi", "pods": "110"});
            let node: Node = serde_json::from_value(json!({
                "metadata": {"name": node_name(index)}, "spec": {"unschedulable": index >= open},
                "status": {"allocatable": size, "conditions": [{"type": "Ready", "status": "True"}]},
            }))?;
            self.leader.change(|world| world.put_node(&node_name(index), NodeFacts::of(&node)));
        }
        self.tick();
        Ok(())
    }

    fn add_jobs(&mut self, prefix: &str, count: usize) -> Result<(), RehearsalError> {
        let template = |cores: u32| {
            json!({"spec": {"containers": [{
                "name": "tensorflow", "image": "example/ranking:1", "command": ["python3", "train.py"],
                "env": [{"name": "EPOCHS", "value": "40"}],
                "resources": {"requests": {"cpu": cores.to_string(), "memory": "4Gi"}},
            }]}})
        };
        for index in 0..count {
            let name = format!("{prefix}-{index}");
            let object: TrainingJob = serde_json::from_value(json!({
                "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
                "metadata": {
                    "name": name, "namespace": "team", "uid": format!("uid-{name}"), "generation": 1,
                    "creationTimestamp": self.now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
                },
                "spec": {"policy": "operator", "replicaSpecs": {
                    "PS": {"replicas": 2, "template": template(1)},
                    "Worker": {"replicas": 6, "minReplicas": 6, "maxReplicas": 8, "template": template(2)},
                }},
            }))?;
            let key = WorkloadKey::new(WorkloadKind::TaskJob, NamespacedName::new("team", &name));
            self.put_job(&key, object);
        }
        Ok(())
    }

    fn next_version(&mut self) -> String {
        self.version += 1;
        self.version.to_string()
    }

    fn put_job(&mut self, key: &WorkloadKey, mut object: TrainingJob) {
        object.metadata.resource_version = Some(self.next_version());
        if let Some(job) = TaskJobSnapshot::of_training_job(&object) {
            self.leader.change(|world| world.jobs.put_task_job(job));
        }
        self.objects.insert(key.clone(), object);
    }

    fn put_pod(&mut self, uid: &PodUid, mut pod: Value) -> Result<(), RehearsalError> {
        pod["metadata"]["resourceVersion"] = json!(self.next_version());
        let object = serde_json::from_value(pod.clone())?;
        self.leader.change(|world| PodFacts::of(&object).into_iter().for_each(|facts| world.put_pod(facts)));
        self.pods.insert(uid.clone(), pod);
        Ok(())
    }

    fn tick(&mut self) {
        self.now = self.now.saturating_add(ROUND).unwrap_or(self.now);
    }

    /// Runs the steps of one job until there is nothing to do. Answers the number of writes.
    fn reconcile(&mut self, key: &WorkloadKey) -> Result<u64, RehearsalError> {
        let before = self.writes;
        for _ in 0..MOST_STEPS {
            let began_s = cpu_s()?;
            let known = self.leader.read(|world| Some((world.jobs.task_job(key)?.clone(), world.pods_of_job(key))));
            let Some((job, pods)) = known else { return Ok(0) };
            let nodes: Nodes = self.leader.read(|world| {
                let names = pods.iter().filter_map(|pod| pod.node.clone());
                names.filter_map(|name| Some((name.clone(), world.nodes().state(&name)?))).collect()
            });
            let fault = template_fault(&job);
            let progress = TaskProgress::read(&self.leader.agents.lock(), &job, &pods);
            let turn = JobTurn { now: self.now, job: &job, pods: &pods, nodes: &nodes, progress };
            let step = next_step(&self.leader, &self.line, &turn, fault.as_ref());
            self.decided_cpu_s += cpu_s()? - began_s;
            if step.actions.is_empty() {
                return Ok(self.writes - before);
            }
            for action in &step.actions {
                self.writes += 1;
                self.act(&job, action)?;
            }
        }
        Err(RehearsalError::Unsettled(key.to_string()))
    }

    /// Changes the objects as the API server, the scheduler and the kubelets would.
    fn act(&mut self, job: &TaskJobSnapshot, action: &Action) -> Result<(), RehearsalError> {
        match action {
            Action::Write(_, status) => {
                let Some(mut object) = self.objects.get(&job.key).cloned() else { return Ok(()) };
                object.status = Some(serde_json::from_value(status.to_value(job.key.kind, job.generation))?);
                self.put_job(&job.key, object);
            }
            Action::Hold => {
                let Some(mut object) = self.objects.get(&job.key).cloned() else { return Ok(()) };
                object.metadata.finalizers = Some(vec![JOB_FINALIZER.to_owned()]);
                self.put_job(&job.key, object);
            }
            Action::Create(task) => {
                let Ok(spec) = &job.spec else { return Ok(()) };
                let counts = job.wanted();
                let Some(mut made) = pod::build(&pod::reference(job, spec, &counts, None), *task) else {
                    return Ok(());
                };
                let uid = PodUid::from(format!("{}-{task}-{}", job.uid, job.status.journal.epoch));
                made["metadata"]["uid"] = json!(uid);
                made["metadata"]["creationTimestamp"] = json!(self.seconds());
                made["status"] = json!({"phase": "Pending"});
                self.put_pod(&uid, made)?;
            }
            Action::Open { uid, node, .. } => {
                let Some(mut opened) = self.pods.get(uid).cloned() else { return Ok(()) };
                opened["spec"]["schedulingGates"] = json!([]);
                opened["spec"]["nodeName"] = json!(node);
                opened["status"] = json!({"phase": "Running", "containerStatuses": [{
                    "name": "tensorflow", "image": "example/ranking:1", "imageID": "", "ready": true,
                    "restartCount": 0, "state": {"running": {"startedAt": self.seconds()}},
                }]});
                self.put_pod(uid, opened)?;
            }
            // No job of a rehearsal ends.
            _ => {}
        }
        Ok(())
    }

    fn seconds(&self) -> String {
        self.now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
    }

    fn reconcile_all(&mut self) -> Result<u64, RehearsalError> {
        self.tick();
        let keys: Vec<WorkloadKey> = self.objects.keys().cloned().collect();
        let mut writes = 0;
        for key in &keys {
            writes += self.reconcile(key)?;
        }
        Ok(writes)
    }

    /// One reconcile of all jobs while nothing changes: its processor time, and what it writes.
    fn pass_figures(&mut self) -> Result<Value, RehearsalError> {
        let before = std::mem::replace(&mut self.decided_cpu_s, 0.0);
        let writes = self.reconcile_all()?;
        let took_s = std::mem::replace(&mut self.decided_cpu_s, before);
        Ok(json!({"jobs": self.objects.len(), "reconcile_of_all_cpu_s": rounded(took_s), "writes": writes}))
    }

    /// One pass of the line over all jobs that wait.
    fn line_pass(&mut self) -> Result<f64, RehearsalError> {
        self.tick();
        let waits = |job: &&Arc<TaskJobSnapshot>| !job.status.journal.admitted;
        let Some(job) = self.leader.read(|world| world.jobs.task_jobs().find(waits).cloned()) else { return Ok(0.0) };
        let began_s = cpu_s()?;
        self.line.ask(&self.leader, &job, self.now);
        Ok(rounded(cpu_s()? - began_s))
    }

    /// Reconciles all jobs until all run. Answers the number of rounds.
    fn run_until_all_run(&mut self) -> Result<usize, RehearsalError> {
        let jobs = self.objects.len();
        let runs = |job: &&Arc<TaskJobSnapshot>| job.status.journal.state == State::Running;
        for round in 1..=MOST_ROUNDS {
            self.reconcile_all()?;
            if self.leader.read(|world| world.jobs.task_jobs().filter(runs).count()) == jobs {
                return Ok(round);
            }
        }
        let running = self.leader.read(|world| world.jobs.task_jobs().filter(runs).count());
        Err(RehearsalError::NotRunning { waiting: jobs - running, jobs })
    }

    /// How many nodes, from the first one on, have pods.
    fn used_nodes(&self) -> usize {
        (0..self.nodes)
            .rev()
            .find(|index| self.leader.read(|world| world.requested(&node_name(*index)).jobs.0 > 0))
            .map_or(0, |last| last + 1)
    }

    /// Decisions about the sizes of the tasks of all jobs, with reports of all node agents. Nothing is carried out.
    fn size_passes(&mut self) -> Result<Value, RehearsalError> {
        let mut sizes = SizeRehearsal::default();
        let (mut longest_s, mut decisions): (f64, usize) = (0.0, 0);
        for pass in 1..=SIZE_PASSES {
            self.report(pass)?;
            let began_s = cpu_s()?;
            let decided = sizes.pass(&self.leader, self.now, (pass * SIZE_PASS_S) as f64);
            longest_s = longest_s.max(cpu_s()? - began_s);
            decisions = decisions.max(decided);
        }
        let began_s = cpu_s()?;
        sizes.pass(&self.leader, self.now, (SIZE_PASSES * SIZE_PASS_S) as f64 + 1.0);
        let quiet_s = cpu_s()? - began_s;
        Ok(json!({
            "decision_cpu_s": rounded(longest_s), "jobs_decided": decisions,
            "pass_without_decision_cpu_s": rounded(quiet_s),
        }))
    }

    /// Every node agent reports its pods, which have trained a little more.
    fn report(&mut self, seq: u64) -> Result<(), RehearsalError> {
        let mut of_node: BTreeMap<NodeName, Vec<Value>> = BTreeMap::new();
        for (uid, pod) in &self.pods {
            let Some(node) = pod["spec"]["nodeName"].as_str() else { continue };
            let is_server = uid.contains("-ps-");
            let used_s = (seq * SIZE_PASS_S) as f64 * if is_server { 0.9 } else { 1.5 } / NODE_CORES;
            let step = seq * SIZE_PASS_S * 20;
            of_node.entry(node.into()).or_default().push(json!({
                "uid": uid, "container": "tensorflow", "category": "growing",
                "progress": if is_server { json!({}) } else { json!({"step": step, "total": 100_000}) },
                "signal": {"reports": seq, "step": if is_server { None } else { Some(step) }, "total": 100_000,
                    "consumed_cpu": used_s, "consumed_memory": 0.0, "memory_used_bytes": 1_u64 << 30},
            }));
        }
        for (node, jobs) in of_node {
            let sync = serde_json::from_value(json!({
                "node": node, "epoch": 1, "seq": seq, "jobs": jobs, "beat": {"cores": NODE_CORES},
            }))?;
            self.leader.agents.lock().receive(&sync, Instant::now(), |_| true);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_written_while_nothing_changes() {
        let figures = rehearse(20, 20).unwrap();
        for phase in ["all_wait", "all_run", "all_run_and_report", "full_and_as_many_wait"] {
            assert_eq!(figures[phase]["writes"], 0, "{phase}: {figures:#}");
        }
        assert!(figures["sizes"]["jobs_decided"].as_u64().unwrap() > 0, "{figures:#}");
        // The finalizer, the plan, eight pods, the message; the nodes, eight gates, the state.
        assert!(figures["start"]["writes_per_job"].as_f64().unwrap() < 24.0, "{figures:#}");
    }
}
