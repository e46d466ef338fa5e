//! What the pods and Services of a task contain: names, labels, and the environment by which the tasks of a job find
//! each other.
//!
//! **How.** Every task has a headless Service of its own name (`JOB-role-index`), so that its address stays the same
//! when its pod is replaced. The name resolves before the pod is ready, because a task may become ready only when it
//! has found the others. TensorFlow reads the addresses from `TF_CONFIG`; PyTorch's elastic launcher (`torchrun`) reads
//! the meeting point from variables that begin with `PET_`. The host of the meeting point is the host name of its pod:
//! `torchrun` serves it on the machine whose host name is the same.
//!
//! **Two forms of `TF_CONFIG`.** The full form lists all tasks. The sparse form is for jobs whose workers come and
//! go: a worker knows itself and all servers, a server knows itself only.

use crate::names::{API_VERSION, EPOCH_LABEL, INDEX_LABEL, JOB_LABEL, JobUid, KUBEFLOW_PREFIX, ROLE_LABEL};
use crate::tasks::{PORT_NAME, Role, TaskId, TaskJobSpec};
use crate::tfjob::TFJOB_API_VERSION;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// The port where `torchrun` meets, if a role declares none.
const RENDEZVOUS_BACKEND: &str = "c10d";

/// One job, as far as its tasks' objects depend on it.
#[derive(Debug, Clone, Copy)]
pub struct TaskJobRef<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    pub uid: &'a JobUid,
    pub epoch: u32,
    pub spec: &'a TaskJobSpec,
    /// How many tasks of each role are wanted.
    pub counts: &'a BTreeMap<Role, u32>,
    /// The cluster's domain, such as `cluster.local`, if host names are to contain it.
    pub cluster_domain: Option<&'a str>,
}

impl TaskJobRef<'_> {
    /// The address of a task, without its port.
    pub fn host(&self, task: TaskId) -> String {
        let host = format!("{}.{}.svc", task.object_name(self.name), self.namespace);
        match self.cluster_domain.filter(|domain| !domain.is_empty()) {
            Some(domain) => format!("{host}.{domain}"),
            None => host,
        }
    }

    fn address(&self, task: TaskId) -> Option<String> {
        let port = self.spec.roles.get(&task.role)?.port;
        Some(format!("{}:{port}", self.host(task)))
    }

    fn addresses(&self, role: Role) -> Vec<String> {
        let count = self.counts.get(&role).copied().unwrap_or(0);
        (0..count).filter_map(|index| self.address(TaskId { role, index })).collect()
    }

    /// `TF_CONFIG` of a task; `None` if the job has one task only.
    pub fn tf_config(&self, task: TaskId) -> Option<String> {
        if self.counts.values().fold(0, |sum: u32, count| sum.saturating_add(*count)) == 1 {
            return None;
        }
        let place = json!({"type": task.role.lower(), "index": task.index});
        let config = if self.spec.is_elastic() {
            let own = self.address(task);
            let (workers, servers) = match task.role {
                Role::Ps => (Map::new(), own.into_iter().collect()),
                Role::Worker => {
                    let worker = own.map(|own| (task.index.to_string(), json!(own)));
                    (worker.into_iter().collect(), self.addresses(Role::Ps))
                }
                _ => (Map::new(), Vec::new()),
            };
            json!({"sparseCluster": {"worker": workers, "ps": servers}, "task": place})
        } else {
            // An evaluator is no member of the cluster that trains.
            let members = self.counts.keys().filter(|role| **role != Role::Evaluator);
            let cluster: Map<String, Value> =
                members.map(|role| (role.lower().to_owned(), json!(self.addresses(*role)))).collect();
            json!({"cluster": cluster, "task": place, "environment": "cloud"})
        };
        Some(config.to_string())
    }

    /// The variables that `torchrun` reads, for a chief or a worker of a job without servers.
    pub fn torch_variables(&self, task: TaskId) -> Vec<(&'static str, String)> {
        let is_member = task.role.is_chief() || task.role == Role::Worker;
        if !is_member || self.spec.roles.contains_key(&Role::Ps) || self.spec.options.is_tfjob {
            return Vec::new();
        }
        let members = || self.spec.roles.iter().filter(|(role, _)| role.is_chief() || **role == Role::Worker);
        let least: u32 = members().map(|(_, role)| role.min).sum();
        let most: u32 = members().map(|(_, role)| role.max).sum();
        let first = TaskId { role: self.spec.chief().unwrap_or(Role::Worker), index: 0 };
        let Some(port) = self.spec.roles.get(&first.role).map(|role| role.port) else { return Vec::new() };
        let meeting_point = format!("{}:{port}", first.object_name(self.name));
        let nodes = if least == most { most.to_string() } else { format!("{least}:{most}") };
        vec![
            ("PET_NNODES", nodes),
            ("PET_RDZV_BACKEND", RENDEZVOUS_BACKEND.to_owned()),
            ("PET_RDZV_ENDPOINT", meeting_point),
            // Members of an earlier attempt must not join this one.
            ("PET_RDZV_ID", format!("{}-{}", self.name, self.epoch)),
        ]
    }

    /// The labels of a task's Service; its pod has these and the epoch.
    pub fn labels(&self, task: TaskId) -> BTreeMap<String, String> {
        let mut labels: BTreeMap<String, String> = [
            (JOB_LABEL, self.name.to_owned()),
            (ROLE_LABEL, task.role.lower().to_owned()),
            (INDEX_LABEL, task.index.to_string()),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        if self.spec.options.is_tfjob {
            let mut put = |key: &str, value: &str| labels.insert(format!("{KUBEFLOW_PREFIX}{key}"), value.to_owned());
            put("operator-name", "tfjob-controller");
            put("job-name", self.name);
            put("replica-type", task.role.lower());
            put("replica-index", &task.index.to_string());
            if self.spec.is_leading_task(task) {
                put("job-role", "master");
            }
        }
        labels
    }

    /// The labels of a task's pod.
    pub fn pod_labels(&self, task: TaskId) -> BTreeMap<String, String> {
        let mut labels = self.labels(task);
        labels.insert(EPOCH_LABEL.to_owned(), self.epoch.to_string());
        labels
    }

    /// The selector of a role's pods, as `kubectl get pods -l` takes it.
    pub fn selector(&self, role: Role) -> String {
        if self.spec.options.is_tfjob {
            return format!(
                "{KUBEFLOW_PREFIX}job-name={},{KUBEFLOW_PREFIX}operator-name=tfjob-controller,{KUBEFLOW_PREFIX}replica-type={}",
                self.name,
                role.lower()
            );
        }
        format!("{JOB_LABEL}={},{ROLE_LABEL}={}", self.name, role.lower())
    }

    /// The reference to the job on everything that it owns.
    pub fn owner(&self) -> Value {
        let (api_version, kind) =
            if self.spec.options.is_tfjob { (TFJOB_API_VERSION, "TFJob") } else { (API_VERSION, "TrainingJob") };
        json!({
            "apiVersion": api_version, "kind": kind, "name": self.name, "uid": self.uid,
            "controller": true, "blockOwnerDeletion": true,
        })
    }

    /// The headless Service of a task.
    pub fn service(&self, task: TaskId) -> Value {
        let port = self.spec.roles.get(&task.role).map_or(crate::tasks::DEFAULT_PORT, |role| role.port);
        json!({
            "apiVersion": "v1", "kind": "Service",
            "metadata": {
                "name": task.object_name(self.name), "namespace": self.namespace, "labels": self.labels(task),
                "ownerReferences": [self.owner()],
            },
            "spec": {
                "clusterIP": "None", "publishNotReadyAddresses": true, "selector": self.labels(task),
                "ports": [{"name": PORT_NAME, "port": port, "targetPort": port}],
            },
        })
    }
}

#[cfg(test)]
#[path = "task_objects_tests.rs"]
mod tests;
