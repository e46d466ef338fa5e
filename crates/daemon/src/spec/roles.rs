//! Jobs of several tasks on one machine: parameter servers, workers, a chief.
//!
//! **How.** A job names how many processes each role has. The supervisor starts `gainshare tasks`, which starts one
//! process for each task and gives each the addresses of all others in `TF_CONFIG`, as Kubeflow's operator does. All
//! tasks are one job: they begin together, share the job's limits and end together. The daemon divides the job's share
//! among them (`driver::task_shares`).

use gainshare_limits::RuntimeKind;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A job of more tasks than this on one machine is a mistake more often than a wish.
const MAX_TASKS: u32 = 256;

/// What a task does in its job. The order is that of starting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Role {
    /// Holds a part of the parameters, and never ends by itself.
    Ps,
    /// Computes gradients.
    Worker,
    /// Leads the training and reports; without one, the first worker does.
    Chief,
    /// Measures checkpoints; no other task speaks to it.
    Evaluator,
}

impl Role {
    pub const ALL: [Role; 4] = [Role::Ps, Role::Worker, Role::Chief, Role::Evaluator];

    /// As `TF_CONFIG` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Role::Ps => "ps",
            Role::Worker => "worker",
            Role::Chief => "chief",
            Role::Evaluator => "evaluator",
        }
    }
}

impl TryFrom<String> for Role {
    type Error = String;

    /// Manifests write roles in any letter case, and an older name of the chief.
    fn try_from(text: String) -> Result<Role, String> {
        let lower = text.to_ascii_lowercase();
        let name = if lower == "master" { "chief" } else { &lower };
        let found = Role::ALL.into_iter().find(|role| role.name() == name);
        found.ok_or_else(|| format!("there is no role `{text}`: use chief, ps, worker or evaluator"))
    }
}

impl From<Role> for String {
    fn from(role: Role) -> String {
        role.name().to_owned()
    }
}

/// The tasks of one role.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "RoleForm")]
pub struct RoleSpec {
    pub replicas: u32,
    /// Instead of the job's command.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Added to the job's environment.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// What follows when a task fails. `None`: it is started again, and with a server all tasks are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart: Option<RestartPolicy>,
    /// Of workers: a failed one is ignored, and tasks get the sparse `TF_CONFIG`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dynamic: bool,
    /// Of workers without a chief: the job ends when all have ended well, and not with the first one.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
}

impl RoleSpec {
    pub fn of_count(replicas: u32) -> RoleSpec {
        RoleSpec { replicas, command: Vec::new(), env: BTreeMap::new(), restart: None, dynamic: false, all: false }
    }
}

/// What follows when a task fails, in the words of Kubeflow's TFJob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartPolicy {
    /// The task is started again. A task that has ended well is not, unlike in a cluster.
    Always,
    OnFailure,
    /// The job fails.
    Never,
    /// The job fails with codes 1 to 127. With a larger one the task is started again.
    ExitCode,
}

impl RestartPolicy {
    /// Whether a task that ended with this code, which is not 0, fails the job.
    pub fn is_final(self, code: u8) -> bool {
        match self {
            RestartPolicy::Always | RestartPolicy::OnFailure => false,
            RestartPolicy::Never => true,
            RestartPolicy::ExitCode => code <= 127,
        }
    }
}

/// A role is a number, or a table.
#[derive(Deserialize)]
#[serde(untagged, expecting = "write the number of its tasks, or a table with `replicas`")]
enum RoleForm {
    Count(u32),
    Table(RoleTable),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RoleTable {
    #[serde(default = "one")]
    replicas: u32,
    #[serde(default)]
    command: Vec<String>,
    #[serde(default)]
    env: BTreeMap<String, String>,
    #[serde(default)]
    restart: Option<RestartPolicy>,
    #[serde(default)]
    dynamic: bool,
    #[serde(default)]
    all: bool,
}

fn one() -> u32 {
    1
}

impl From<RoleForm> for RoleSpec {
    fn from(form: RoleForm) -> RoleSpec {
        match form {
            RoleForm::Count(replicas) => RoleSpec::of_count(replicas),
            RoleForm::Table(RoleTable { replicas, command, env, restart, dynamic, all }) => {
                RoleSpec { replicas, command, env, restart, dynamic, all }
            }
        }
    }
}

/// One process of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Task {
    pub role: Role,
    pub index: u32,
}

impl Task {
    /// The name of its control group and of its file of output: `ps-0`.
    pub fn group_name(self) -> String {
        format!("{}-{}", self.role.name(), self.index)
    }
}

impl std::fmt::Display for Task {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.role.name(), self.index)
    }
}

/// The roles of a job; none: the job is one process.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Roles(pub BTreeMap<Role, RoleSpec>);

impl Roles {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn validate(&self, runtime: RuntimeKind) -> Result<(), String> {
        if self.is_empty() {
            return Ok(());
        }
        if runtime != RuntimeKind::Process {
            return Err("roles are for jobs that run as processes; remove `roles` or `runtime`".into());
        }
        let count = |role| self.0.get(&role).map_or(0, |spec| spec.replicas);
        if let Some((role, _)) = self.0.iter().find(|(_, spec)| spec.replicas == 0) {
            return Err(format!("role {} has no tasks; remove it, or give it replicas", role.name()));
        }
        if count(Role::Chief) > 1 {
            return Err(format!("it has {} chiefs; one leads, so give it one", count(Role::Chief)));
        }
        if count(Role::Chief) + count(Role::Worker) == 0 {
            return Err("it has no chief and no worker, so nothing would train; add one".into());
        }
        let total = self.0.values().fold(0u32, |sum, spec| sum.saturating_add(spec.replicas));
        if total > MAX_TASKS {
            return Err(format!("it has {total} tasks; at most {MAX_TASKS} are possible on one machine"));
        }
        if let Some((role, _)) = self.0.iter().find(|(role, spec)| **role != Role::Worker && (spec.dynamic || spec.all))
        {
            return Err(format!("`dynamic` and `all` are for workers; remove them from role {}", role.name()));
        }
        if self.0.values().flat_map(|spec| &spec.command).any(|word| word.contains('\0')) {
            return Err("the command of a role contains a NUL byte; remove it".into());
        }
        Ok(())
    }

    /// All tasks in the order of starting.
    pub fn tasks(&self) -> Vec<Task> {
        self.0.iter().flat_map(|(role, spec)| (0..spec.replicas).map(|index| Task { role: *role, index })).collect()
    }

    /// The task whose output is the job's, and whose end is the job's end.
    pub fn reporter(&self) -> Task {
        let role = if self.0.contains_key(&Role::Chief) { Role::Chief } else { Role::Worker };
        Task { role, index: 0 }
    }

    /// How many processes compute at the same time: what thread pools are sized by.
    pub fn computing_tasks(&self) -> usize {
        let computes = |(role, _): &(&Role, &RoleSpec)| !matches!(role, Role::Ps);
        self.0.iter().filter(computes).map(|(_, spec)| spec.replicas as usize).sum::<usize>().max(1)
    }

    fn workers(&self) -> Option<&RoleSpec> {
        self.0.get(&Role::Worker)
    }

    /// Whether failed workers are ignored.
    pub fn is_dynamic(&self) -> bool {
        self.workers().is_some_and(|workers| workers.dynamic)
    }

    /// Whether the job ends well only when all workers have.
    pub fn needs_all_workers(&self) -> bool {
        !self.0.contains_key(&Role::Chief) && self.workers().is_some_and(|workers| workers.all)
    }

    /// The variables by which a task finds the others: those of TensorFlow, and without servers those of `torchrun`.
    /// `addresses` are those of [`Roles::tasks`], in its order.
    pub fn variables(&self, task: Task, addresses: &[String]) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if self.tasks().len() > 1 {
            variables.push(("TF_CONFIG", self.tf_config(task, addresses)));
        }
        let is_member = matches!(task.role, Role::Chief | Role::Worker);
        if is_member && !self.0.contains_key(&Role::Ps) {
            let all = self.tasks();
            let members = all.iter().filter(|other| matches!(other.role, Role::Chief | Role::Worker)).count();
            let first = all.iter().position(|other| *other == self.reporter()).and_then(|at| addresses.get(at));
            if let Some(address) = first {
                variables.push(("PET_NNODES", members.to_string()));
                variables.push(("PET_RDZV_BACKEND", "c10d".to_owned()));
                variables.push(("PET_RDZV_ENDPOINT", address.clone()));
                // The address is new when all tasks start again, so no member of an earlier start can join.
                variables.push(("PET_RDZV_ID", address.clone()));
            }
        }
        variables
    }

    /// What a task learns about itself and the others, as TensorFlow reads it.
    fn tf_config(&self, task: Task, addresses: &[String]) -> String {
        let all = self.tasks();
        let members = || all.iter().zip(addresses);
        let place = serde_json::json!({"type": task.role.name(), "index": task.index});
        if self.is_dynamic() {
            // The sparse form: a worker knows itself and all servers, a server knows itself.
            let own = |role| task.role == role;
            let servers: Vec<&String> = members()
                .filter(|(other, _)| other.role == Role::Ps && (own(Role::Worker) || **other == task))
                .map(|(_, address)| address)
                .collect();
            let workers: BTreeMap<String, &String> = members()
                .filter(|(other, _)| own(Role::Worker) && **other == task)
                .map(|(other, address)| (other.index.to_string(), address))
                .collect();
            let cluster = serde_json::json!({"ps": servers, "worker": workers});
            return serde_json::json!({"sparseCluster": cluster, "task": place}).to_string();
        }
        let mut cluster: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        // The evaluator is no part of the cluster.
        for (other, address) in members().filter(|(other, _)| other.role != Role::Evaluator) {
            cluster.entry(other.role.name()).or_default().push(address);
        }
        serde_json::json!({"cluster": cluster, "task": place, "environment": "cloud"}).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn roles(json: serde_json::Value) -> Result<Roles, String> {
        serde_json::from_value(json).map_err(|e| e.to_string())
    }

    #[test]
    fn roles_are_numbers_or_tables_in_any_letter_case() {
        let read =
            roles(serde_json::json!({"Worker": 2, "PS": {"command": ["serve"]}, "Master": {"replicas": 1}})).unwrap();
        let names: Vec<String> = read.tasks().iter().map(Task::to_string).collect();
        assert_eq!(names, ["ps 0", "worker 0", "worker 1", "chief 0"]);
        assert_eq!((read.reporter().role, read.computing_tasks()), (Role::Chief, 3));
        assert_eq!(read.0[&Role::Ps].command, ["serve"]);
        let again: Roles = serde_json::from_str(&serde_json::to_string(&read).unwrap()).unwrap();
        assert_eq!(again, read);
        assert!(roles(serde_json::json!({"boss": 1})).unwrap_err().contains("use chief, ps, worker or evaluator"));
    }

    #[test]
    fn roles_that_cannot_run_are_refused_with_the_remedy() {
        for (json, word) in [
            (serde_json::json!({"ps": 2}), "no chief and no worker"),
            (serde_json::json!({"worker": 0}), "has no tasks"),
            (serde_json::json!({"chief": 2}), "one leads"),
            (serde_json::json!({"worker": 300}), "at most 256"),
            (serde_json::json!({"worker": 1, "ps": {"dynamic": true}}), "are for workers"),
            (serde_json::json!({"worker": u32::MAX, "ps": u32::MAX}), "at most 256"),
        ] {
            let why = roles(json.clone()).unwrap().validate(RuntimeKind::Process).unwrap_err();
            assert!(why.contains(word), "{json}: {why}");
        }
        let one = roles(serde_json::json!({"worker": 1})).unwrap();
        assert!(one.validate(RuntimeKind::Docker).unwrap_err().contains("as processes"));
        assert_eq!(
            (one.validate(RuntimeKind::Process), Roles::default().validate(RuntimeKind::Docker)),
            (Ok(()), Ok(()))
        );
    }

    #[test]
    fn tf_config_names_all_tasks_but_the_evaluator() {
        let read = roles(serde_json::json!({"worker": 2, "ps": 1, "evaluator": 1})).unwrap();
        let addresses: Vec<String> = (1..=4).map(|port| format!("127.0.0.1:{port}")).collect();
        let config = |read: &Roles, role, index| -> serde_json::Value {
            let all = read.variables(Task { role, index }, &addresses);
            assert_eq!(all.len(), 1, "servers and torchrun do not go together");
            serde_json::from_str(&all[0].1).unwrap()
        };
        assert_eq!(
            config(&read, Role::Worker, 1),
            serde_json::json!({
                "cluster": {"ps": ["127.0.0.1:1"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]},
                "task": {"type": "worker", "index": 1}, "environment": "cloud",
            })
        );
        let dynamic = roles(serde_json::json!({"worker": {"replicas": 2, "dynamic": true}, "ps": 2})).unwrap();
        assert_eq!(
            config(&dynamic, Role::Worker, 1),
            serde_json::json!({
                "sparseCluster": {"ps": ["127.0.0.1:1", "127.0.0.1:2"], "worker": {"1": "127.0.0.1:4"}},
                "task": {"type": "worker", "index": 1},
            })
        );
        assert_eq!(
            config(&dynamic, Role::Ps, 1),
            serde_json::json!({
                "sparseCluster": {"ps": ["127.0.0.1:2"], "worker": {}}, "task": {"type": "ps", "index": 1},
            })
        );
    }

    #[test]
    fn a_job_without_servers_gets_the_variables_of_torchrun() {
        let addresses: Vec<String> = (1..=3).map(|port| format!("127.0.0.1:{port}")).collect();
        let read = roles(serde_json::json!({"worker": 2, "evaluator": 1})).unwrap();
        let variables = |role, index| read.variables(Task { role, index }, &addresses);
        let of_worker: BTreeMap<&str, String> = variables(Role::Worker, 1).into_iter().collect();
        assert_eq!((of_worker["PET_NNODES"].as_str(), of_worker["PET_RDZV_BACKEND"].as_str()), ("2", "c10d"));
        assert_eq!(of_worker["PET_RDZV_ENDPOINT"], "127.0.0.1:1", "the first worker");
        assert_eq!(variables(Role::Evaluator, 0).len(), 1, "an evaluator does not train");
        let one = roles(serde_json::json!({"worker": 1})).unwrap();
        let names: Vec<&str> = one.variables(one.reporter(), &addresses).into_iter().map(|(name, _)| name).collect();
        assert!(!names.contains(&"TF_CONFIG"), "one task has no others to know: {names:?}");
    }
}
