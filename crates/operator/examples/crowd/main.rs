//! A crowd of agents for `cargo xtask bench kube`: what does one operator cost in a large cluster,
//! and does it keep up?
//!
//! **How.** `crowd prepare` fills a cluster of make-believe nodes with pods that a policy selects,
//! and gets for every node the token its agent would have: made by the API server for a pod on that
//! node. `crowd play` is then all those agents in one process. Each has a connection of its own and
//! speaks the real [`wire`](gainshare_kube_api::wire) over TLS, through the same code as the real
//! agent; only what it says about its jobs is made up.
//!
//! **What is measured.** *First pass*: every agent says for the first time where its jobs stand, so
//! every pod's note must be written. *Busy*: some jobs change their category and shares move, the
//! others go on. *News*: every policy changes; how long until each agent has its new list? *Idle*:
//! jobs go on and nothing changes, so nothing may be written. Writes are counted by the API server,
//! not by the operator.
//!
//! `crowd fill`, `crowd moves`, `crowd come` and `crowd return` are the same for `cargo xtask bench
//! kube-move`: training jobs instead of pods, see [`fill`] and [`moves`]. `crowd tasks` and `crowd
//! tasks-return` are those of `cargo xtask bench tasks --cluster`, see [`tasks`].

mod connection;
mod fill;
mod log;
mod measure;
mod moves;
mod play;
mod prepare;
mod tasks;

use gainshare_kube_api::names::NodeName;
use serde::Deserialize;
use std::path::PathBuf;

/// The command's input: one JSON object.
#[derive(Debug, Clone, Deserialize)]
struct Plan {
    nodes: usize,
    pods_per_node: usize,
    namespaces: usize,
    /// The operator's namespace.
    system: String,
    /// Where tokens and the operator's certificate are kept between the two commands.
    folder: PathBuf,
    /// The operator's addresses, and its process.
    #[serde(default)]
    operator: String,
    #[serde(default)]
    metrics: String,
    #[serde(default)]
    operator_pid: u32,
    /// How long the busy and the idle phase last.
    #[serde(default)]
    busy_s: u64,
    #[serde(default)]
    idle_s: u64,
    /// How often an agent tells how far its jobs are.
    #[serde(default)]
    tell_every_s: u64,
    /// Training jobs: how many run already, how many come at once, and how many of those that run
    /// stop growing.
    #[serde(default)]
    running: usize,
    #[serde(default)]
    coming: usize,
    #[serde(default)]
    converging: usize,
    /// The operator's log of its passes.
    #[serde(default)]
    log: PathBuf,
}

impl Plan {
    fn node(&self, index: usize) -> NodeName {
        format!("kwok-{index}").into()
    }

    /// All pods of a node belong to one namespace, and to one policy.
    fn namespace_of(&self, node: usize) -> String {
        format!("team-{}", node % self.namespaces)
    }

    fn token_file(&self, node: usize) -> PathBuf {
        self.folder.join(format!("token-{node}"))
    }

    fn pods(&self) -> usize {
        self.nodes * self.pods_per_node
    }
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

#[tokio::main]
async fn main() -> Result<()> {
    let usage = "crowd prepare|play|fill|moves|come|return|tasks|tasks-return PLAN.json: called by `cargo xtask bench`";
    let mut words = std::env::args().skip(1);
    let (Some(what), Some(file)) = (words.next(), words.next()) else { return Err(usage.into()) };
    let plan: Plan = serde_json::from_slice(&std::fs::read(&file)?)?;
    let mut config = kube::Config::infer().await?;
    config.default_retry = false;
    let client = kube::Client::try_from(config)?;
    let figures = match what.as_str() {
        "prepare" => prepare::run(&plan, &client).await?,
        "play" => play::run(&plan, &client).await?,
        "fill" => fill::run(&plan, &client).await?,
        "moves" => moves::run(&plan, &client).await?,
        "come" => moves::come(&plan, &client, "late").await.map(|()| serde_json::Value::Null)?,
        "return" => moves::after_return(&plan, &client).await?,
        "tasks" => tasks::run(&plan, &client).await?,
        "tasks-return" => tasks::after_return(&plan, &client).await?,
        _ => return Err(usage.into()),
    };
    println!("{figures}");
    Ok(())
}
