//! Which task this process is, and where the others are: from options or from `TF_CONFIG`.
//!
//! `TF_CONFIG` is what TensorFlow's tools put into the environment of each task:
//!
//! ```text
//! {"cluster":{"chief":["h:2222"],"ps":["p0:2222","p1:2222"],"worker":["w0:2222"]},"task":{"type":"worker","index":0}}
//! ```
//!
//! In the *sparse* form, for jobs whose number of workers changes, a worker sees all servers but only itself among
//! the workers (`"worker":{"1":"w1:2222"}`), and a server sees only itself. Such a server learns the number of
//! servers from the first worker that greets it.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::PsArgs;

/// More servers than this are a mistake in the configuration.
const MAX_SERVERS: usize = 1024;
const DEFAULT_PORT: u16 = 2222;

/// What a process of a parameter-server job does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Role {
    /// Holds a part of the parameters
    Server,
    /// Computes gradients
    Worker,
    /// Computes gradients and reports
    Chief,
}

/// This process among the tasks of its job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Task {
    pub(crate) role: Role,
    pub(crate) index: u32,
    /// Addresses of all servers; empty for a server that does not know the others.
    pub(crate) servers: Vec<String>,
    /// Where a server listens.
    pub(crate) listen: String,
    /// Workers, the chief included, that the first step waits for.
    pub(crate) expected_workers: u32,
    /// Whether this task prints progress.
    pub(crate) reports: bool,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    #[error("TF_CONFIG is not what TensorFlow's tools write ({0}); unset it or give --role and --servers")]
    Config(serde_json::Error),
    #[error("the role `{0}` of TF_CONFIG is not supported here; chief, master, ps and worker are")]
    UnknownRole(String),
    #[error("no role: give --role, or run the program where TF_CONFIG is set")]
    NoRole,
    #[error("no servers: give --servers HOST:PORT,..., or run the program where TF_CONFIG lists them")]
    NoServers,
    #[error("server {index} is not one of {count} servers; give --index and --servers that fit")]
    Index { index: u32, count: usize },
    #[error("{0} servers are more than the {MAX_SERVERS} that are possible")]
    TooMany(usize),
}

#[derive(Debug, Default, Deserialize)]
struct TfConfig {
    /// Kubeflow's training operator gives the sparse form a name of its own.
    #[serde(default, alias = "sparseCluster")]
    cluster: BTreeMap<String, Hosts>,
    #[serde(default)]
    task: TfTask,
}

#[derive(Debug, Default, Deserialize)]
struct TfTask {
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    index: u32,
}

/// The hosts of a role: all of them, or some by their numbers.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Hosts {
    All(Vec<String>),
    Some(BTreeMap<String, String>),
    None(()),
}

impl Hosts {
    fn list(&self) -> Vec<String> {
        match self {
            Hosts::All(hosts) => hosts.clone(),
            Hosts::Some(hosts) => hosts.values().cloned().collect(),
            Hosts::None(()) => vec![],
        }
    }
}

impl Task {
    /// Options come before `TF_CONFIG`.
    pub(crate) fn find(args: &PsArgs, config: Option<&str>) -> Result<Task, TaskError> {
        let config: TfConfig = match config {
            Some(text) => serde_json::from_str(text).map_err(TaskError::Config)?,
            None => TfConfig::default(),
        };
        let hosts = |names: &[&str]| -> Vec<String> {
            let of_role = |(role, hosts): (&String, &Hosts)| {
                names.iter().any(|name| role.eq_ignore_ascii_case(name)).then(|| hosts.list())
            };
            config.cluster.iter().filter_map(of_role).flatten().collect()
        };
        let role = match (args.role, config.task.kind.to_ascii_lowercase().as_str()) {
            (Some(role), _) => role,
            (None, "ps") => Role::Server,
            (None, "worker") => Role::Worker,
            (None, "chief" | "master") => Role::Chief,
            (None, "") => return Err(TaskError::NoRole),
            (None, other) => return Err(TaskError::UnknownRole(other.to_owned())),
        };
        let index = args.index.unwrap_or(config.task.index);
        let is_sparse = !config.cluster.is_empty()
            && (config.cluster.values().any(|hosts| matches!(hosts, Hosts::Some(_)))
                || (role == Role::Server && !config.cluster.keys().any(|name| name.eq_ignore_ascii_case("worker"))));
        let listed = if args.servers.is_empty() { hosts(&["ps"]) } else { args.servers.clone() };
        if listed.len() > MAX_SERVERS {
            return Err(TaskError::TooMany(listed.len()));
        }
        let own = if is_sparse { listed.first() } else { listed.get(index as usize) }.cloned();
        let knows_all = !is_sparse || role != Role::Server || !args.servers.is_empty();
        let servers = if knows_all { listed } else { vec![] };
        if role != Role::Server && servers.is_empty() {
            return Err(TaskError::NoServers);
        }
        if role == Role::Server && !servers.is_empty() && index as usize >= servers.len() {
            return Err(TaskError::Index { index, count: servers.len() });
        }
        let listen = match (&args.listen, own) {
            (Some(listen), _) => listen.clone(),
            (None, Some(own)) if !args.servers.is_empty() => own,
            // A name of TF_CONFIG may be that of a Service, which is no address of this machine.
            (None, Some(own)) => {
                let port = own.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(DEFAULT_PORT);
                format!("0.0.0.0:{port}")
            }
            (None, None) => format!("127.0.0.1:{DEFAULT_PORT}"),
        };
        let chiefs = hosts(&["chief", "master"]).len();
        let listed_workers = if is_sparse { 0 } else { hosts(&["worker"]).len() + chiefs };
        let expected_workers = args.workers.unwrap_or(listed_workers as u32).max(1);
        let reports = role == Role::Chief || (role == Role::Worker && index == 0 && chiefs == 0);
        Ok(Task { role, index, servers, listen, expected_workers, reports })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: PsArgs,
    }

    fn find(options: &[&str], config: Option<&str>) -> Result<Task, TaskError> {
        let words = ["program", "gru"].iter().chain(options).copied();
        Task::find(&Cli::parse_from(words).args, config)
    }

    /// As Kubeflow's training operator and ours write it for jobs whose number of workers changes.
    #[test]
    fn the_sparse_form_is_read_under_its_own_name() {
        let worker = r#"{"sparseCluster":{"ps":["p0:2222","p1:2222"],"worker":{"1":"w1:2222"}},
            "task":{"type":"worker","index":1}}"#;
        let task = find(&[], Some(worker)).unwrap();
        assert_eq!((task.role, task.index, task.servers.len(), task.reports), (Role::Worker, 1, 2, false));
        let server = r#"{"sparseCluster":{"ps":["p1:2222"],"worker":{}},"task":{"type":"ps","index":1}}"#;
        let task = find(&[], Some(server)).unwrap();
        assert_eq!((task.role, task.index, task.listen.as_str()), (Role::Server, 1, "0.0.0.0:2222"));
    }

    const FULL: &str = r#"{"cluster":{"chief":["c:2222"],"ps":["p0:2222","p1:2223"],"worker":["w0:2222","w1:2222"]},
        "task":{"type":"TASK","index":1},"environment":"cloud"}"#;

    #[test]
    fn the_full_form_names_role_addresses_and_the_gang() {
        let server = find(&[], Some(&FULL.replace("TASK", "ps"))).unwrap();
        assert_eq!((server.role, server.index, server.expected_workers), (Role::Server, 1, 3));
        assert_eq!((server.listen.as_str(), server.servers.len()), ("0.0.0.0:2223", 2));
        let worker = find(&[], Some(&FULL.replace("TASK", "Worker"))).unwrap();
        assert_eq!((worker.role, worker.reports), (Role::Worker, false));
        assert_eq!(worker.servers, ["p0:2222", "p1:2223"]);
        let master = find(&[], Some(&FULL.replace("TASK", "master"))).unwrap();
        assert_eq!((master.role, master.reports), (Role::Chief, true));
    }

    #[test]
    fn in_the_sparse_form_a_worker_sees_all_servers_and_a_server_only_itself() {
        let worker =
            r#"{"cluster":{"worker":{"1":"w1:2222"},"ps":["p0:1","p1:2"]},"task":{"type":"worker","index":1}}"#;
        let worker = find(&[], Some(worker)).unwrap();
        assert_eq!((worker.index, worker.servers.len(), worker.expected_workers), (1, 2, 1));
        for workers in [r#""worker":{},"#, "", r#""worker":null,"#] {
            let server = format!(r#"{{"cluster":{{{workers}"ps":["p1:77"]}},"task":{{"type":"ps","index":1}}}}"#);
            // A role without hosts is written as an empty map, as null or not at all.
            if workers.contains("null") {
                assert!(find(&[], Some(&server)).is_err(), "null and one server: the full form, index 1 does not fit");
                continue;
            }
            let server = find(&[], Some(&server)).unwrap();
            assert_eq!((server.index, server.servers.len(), server.listen.as_str()), (1, 0, "0.0.0.0:77"));
        }
    }

    #[test]
    fn options_come_before_the_environment() {
        let task = find(&["--role", "worker", "--index", "0", "--servers", "a:1,b:2"], Some(FULL)).unwrap();
        assert_eq!((task.role, task.index, task.servers), (Role::Worker, 0, vec!["a:1".to_owned(), "b:2".to_owned()]));
        let server = find(&["--role", "server", "--index", "1", "--servers", "a:1,b:2"], None).unwrap();
        assert_eq!((server.listen.as_str(), server.expected_workers), ("b:2", 1));
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        for (options, config, expected) in [
            (&[][..], None, "--role"),
            (&["--role", "worker"], None, "--servers"),
            (&["--role", "server", "--index", "2", "--servers", "a:1,b:2"], None, "server 2"),
            (&[], Some("{"), "TF_CONFIG"),
            (&[], Some(r#"{"cluster":{"ps":5},"task":{"type":"ps"}}"#), "TF_CONFIG"),
            (&[], Some(r#"{"task":{"type":"evaluator"}}"#), "evaluator"),
        ] {
            let error = find(options, config).unwrap_err().to_string();
            assert!(error.contains(expected), "{options:?} {config:?}: {error}");
        }
    }
}
