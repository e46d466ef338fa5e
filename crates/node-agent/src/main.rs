//! The program `gainshare-node-agent`: reads its command line and runs the agent of one node of a cluster.

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum, ValueHint};
use gainshare_node_agent::{AgentConfig, run};
use std::net::SocketAddr;
use std::path::PathBuf;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// Reads the pods of one node of a cluster, and decides how they share it
///
/// Runs on every node, as part of the chart. It reads the logs and control groups of pods that a
/// SharePolicy selects. It resizes nothing itself: it asks the operator for resizes. It needs no rights at
/// the API server.
#[derive(Debug, Parser)]
#[command(name = "gainshare-node-agent", version, max_term_width = 110)]
#[command(
    after_help = "Example:\n  gainshare agent --operator https://gainshare-operator:8443 --ca ca.crt --token-file token --node worker-1"
)]
struct AgentArgs {
    /// What runs the jobs of this node
    #[arg(long, value_enum, default_value_t = NodeRuntime::Kubernetes)]
    runtime: NodeRuntime,
    /// Where the operator listens for node agents
    #[arg(long, alias = "manager", value_name = "URL", env = "GAINSHARE_OPERATOR")]
    operator: String,
    /// The certificate authority of the operator; read again when it changes
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    ca: PathBuf,
    /// The agent's ServiceAccount token, made for the audience gainshare-operator; read again for every request
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    token_file: PathBuf,
    /// This node's name in the cluster
    #[arg(long, value_name = "NAME", env = "NODE_NAME")]
    node: String,
    /// Where the host's /var/log/pods is mounted
    #[arg(long, value_name = "DIR", default_value = "/var/log/pods", value_hint = ValueHint::DirPath)]
    pod_logs: PathBuf,
    /// Where the host's /var/lib/kubelet/pods is mounted, for jobs that write their progress into a volume;
    /// Secrets that pods mount lie there, too, and are not opened
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pod_volumes: Option<PathBuf>,
    /// Where the host's /var/lib/kubelet/pods is mounted for writing, for pods with the library inside: their threads
    /// follow their shares; nothing but their pages is written
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pod_pages: Option<PathBuf>,
    /// Where the host's /sys/fs/cgroup is mounted
    #[arg(long, value_name = "DIR", default_value = "/sys/fs/cgroup", value_hint = ValueHint::DirPath)]
    cgroup_root: PathBuf,
    /// Where the host's /proc is mounted, to measure what tasks of distributed jobs send and receive
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    host_proc: Option<PathBuf>,
    /// Where health and metrics are served, as plain HTTP
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9810")]
    listen: SocketAddr,
    /// Where recorded decisions are served for `kubectl gainshare explain --dump`, as plain HTTP without a
    /// token: a loopback address of the agent's own pod [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    record_listen: Option<SocketAddr>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NodeRuntime {
    Kubernetes,
}

/// Logs go to standard error, which the cluster keeps. `GAINSHARE_LOG` sets the level.
fn start_logging(default_filter: &str) {
    let chosen: Option<Targets> = std::env::var("GAINSHARE_LOG").ok().and_then(|text| text.parse().ok());
    let filter = chosen.unwrap_or_else(|| default_filter.parse().expect("the default is well formed"));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
}

fn main() -> Result<()> {
    let args = AgentArgs::parse();
    let NodeRuntime::Kubernetes = args.runtime;
    start_logging("info");
    let config = AgentConfig {
        node: args.node.as_str().into(),
        operator: args.operator.clone(),
        ca_file: args.ca.clone(),
        token_file: args.token_file.clone(),
        logs: args.pod_logs.clone(),
        volumes: args.pod_volumes.clone(),
        pages: args.pod_pages.clone(),
        cgroups: args.cgroup_root.clone(),
        processes: args.host_proc.clone(),
        listen: args.listen,
        record_listen: args.record_listen,
    };
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?;
    runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
        let stop = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        run(config, stop).await?;
        Ok(())
    })
}
