//! What the operator costs in a large cluster, and whether it keeps up.
//!
//! A test bed of simulated nodes holds the pods. The operator is the released program with the rights that
//! the chart gives it and no others. One process plays all node agents (`crates/operator/examples/crowd`),
//! with real tokens over real TLS. Every threshold is printed as the ratio of the measured value to the
//! allowed value: above 1 it is broken, and the command fails.

use crate::programs::Programs;
use crate::sh;
use crate::testbed::{Spec, Testbed};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many simulated nodes.
    #[arg(long, default_value_t = 1000)]
    nodes: u32,
    /// How many pods that a policy selects, all nodes together.
    #[arg(long, default_value_t = 10_000)]
    pods: u32,
    /// In how many namespaces, each with a policy.
    #[arg(long, default_value_t = 10)]
    namespaces: u32,
    /// How long some jobs change all the time.
    #[arg(long = "busy", default_value_t = 60, value_name = "SECONDS")]
    busy_s: u64,
    /// How long jobs only go on, and nothing may be written.
    #[arg(long = "idle", default_value_t = 60, value_name = "SECONDS")]
    idle_s: u64,
    /// How often a node agent reports the progress of its jobs; real ones report every 10 s.
    #[arg(long = "tell-every", default_value_t = 5, value_name = "SECONDS")]
    tell_every_s: u64,
}

pub(super) const SYSTEM: &str = "gainshare-system";

/// Memory that the operator may use.
const MOST_RSS_MIB: f64 = 1024.0;
/// 99 % of the node agents' requests that wait for nothing are answered within this time.
const LONGEST_SYNC_MS: f64 = 1000.0;
/// Everything is written within this time after the last change, and every node agent has reported within
/// this time after the operator's return: the same half minute as after any fault.
const LONGEST_LAG_S: f64 = 30.0;
/// A changed policy reaches every node agent within this time.
const LONGEST_NEWS_MS: f64 = 10_000.0;

pub(crate) fn run(args: &Args) -> Result<Value> {
    ensure!(args.nodes > 0 && args.namespaces > 0, "there must be a node and a namespace");
    ensure!(args.pods >= args.nodes, "every node needs a pod: --pods must not be below --nodes");
    let mut bench = Bench::up("bench", args.nodes)?;
    let mut plan = json!({
        "nodes": args.nodes, "pods_per_node": args.pods / args.nodes, "namespaces": args.namespaces, "system": SYSTEM,
        "folder": bench.folder(), "busy_s": args.busy_s, "idle_s": args.idle_s, "tell_every_s": args.tell_every_s,
    });
    eprintln!("bench: filling {} nodes with {} pods", args.nodes, args.pods);
    let prepared = bench.crowd("prepare", &plan)?;
    bench.start_operator(&mut plan, &[])?;
    let played = bench.crowd("play", &plan)?;
    verdict(json!({"prepare": prepared, "measured": played, "of_what_is_allowed": allowed_parts(&played)}))
}

/// The figures, or an error that names what is above what is allowed.
pub(super) fn verdict(figures: Value) -> Result<Value> {
    let broken: Vec<String> = figures["of_what_is_allowed"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, ratio)| ratio.as_f64().is_none_or(|ratio| ratio > 1.0))
        .map(|(name, ratio)| format!("{name} ({ratio})"))
        .collect();
    if !broken.is_empty() {
        eprintln!("{figures:#}");
    }
    ensure!(broken.is_empty(), "more than is allowed: {}", broken.join(", "));
    Ok(figures)
}

/// What was measured there, as a part of what is allowed.
pub(super) fn part(figures: &Value, pointer: &str, allowed: f64) -> Option<f64> {
    let measured = figures.pointer(pointer).and_then(Value::as_f64)?;
    Some((measured / allowed * 1000.0).round() / 1000.0)
}

/// What was measured as parts of what is allowed.
fn allowed_parts(played: &Value) -> Value {
    let part = |pointer: &str, allowed: f64| part(played, pointer, allowed);
    json!({
        "operator_peak_rss": part("/operator_peak_rss_mib", MOST_RSS_MIB),
        // A thousand handshakes and reviews of tokens in the same moment, which real agents spread over some seconds.
        "last_agent_heard_at_the_start": part("/first_pass/told_s", LONGEST_LAG_S),
        "sync_p99_when_busy": part("/busy/sync/p99_ms", LONGEST_SYNC_MS),
        "sync_p99_when_idle": part("/idle/sync/p99_ms", LONGEST_SYNC_MS),
        "last_write_after_the_last_change": part("/busy/last_write_after_s", LONGEST_LAG_S),
        "news_at_the_last_agent": part("/news/agent_knows/max_ms", LONGEST_NEWS_MS),
        // A write that conflicts with another one (the kubelet's status, for example) is repeated: one in twenty.
        "pod_writes_per_change_first": part("/first_pass/pod_writes_per_change", 1.05),
        "pod_writes_per_change_busy": part("/busy/pod_writes_per_change", 1.05),
        // Allowed is nothing: the value is 0, or above 1.
        "writes_when_idle": part("/idle/pod_and_policy_writes", 0.5),
    })
}

/// Applies the definitions, accounts and rights of the chart. Without a kubelet its node agents and
/// operator do not start.
fn install(testbed: &Testbed) -> Result<()> {
    let chart = sh::root().join("deploy/chart");
    let rendered = sh::output(
        Command::new(testbed.bin().join("helm"))
            .args(["template", "gainshare"])
            .arg(chart)
            .args(["--namespace", SYSTEM, "--kube-version", "1.35.0", "--include-crds", "--no-hooks"])
            .args(["--set", "agent.nodeSelector.played=elsewhere", "--set", "webhook.enabled=false"]),
    )?;
    sh::output(testbed.kubectl().args(["create", "namespace", SYSTEM]))?;
    let mut apply = testbed.kubectl();
    let mut apply =
        apply.args(["apply", "-n", SYSTEM, "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()?;
    apply.stdin.take().context("the input is piped")?.write_all(rendered.as_bytes())?;
    ensure!(apply.wait()?.success(), "the chart could not be applied: see above");
    let wait = ["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"];
    sh::output(testbed.kubectl().args(wait)).map(drop)
}

/// A test bed of simulated nodes with what the chart installs, and the programs that run beside it.
pub(super) struct Bench {
    testbed: Testbed,
    programs: Programs,
    folder: tempfile::TempDir,
    operator: Option<Child>,
}

impl Bench {
    pub(super) fn up(name: &str, nodes: u32) -> Result<Bench> {
        // Together, so that the dependencies are built once for both.
        let programs = Programs::build_with(&["--example", "crowd"])?;
        let spec = Spec { kwok_nodes: nodes, ..Spec::new(name, &[])? };
        let testbed = Testbed::up(&spec)?;
        install(&testbed)?;
        let folder = tempfile::Builder::new().prefix("gainshare-bench-").tempdir()?;
        Ok(Bench { testbed, programs, folder, operator: None })
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs one task of the crowd and returns the figures it prints.
    pub(super) fn crowd(&self, what: &str, plan: &Value) -> Result<Value> {
        let file = self.folder.path().join("plan.json");
        std::fs::write(&file, plan.to_string())?;
        let output = Command::new(self.programs.folder().join("examples/crowd"))
            .arg(what)
            .arg(&file)
            .env("KUBECONFIG", self.testbed.kubeconfig())
            .stderr(Stdio::inherit())
            .output()
            .with_context(|| format!("cannot start the crowd in {}", self.programs.folder().display()))?;
        if !output.status.success() {
            let log = std::fs::read_to_string(self.log()).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(10)..].join("\n");
            anyhow::bail!("the crowd could not {what}: {}. The operator's last lines:\n{last}", output.status);
        }
        serde_json::from_slice(&output.stdout).context("the crowd printed no JSON")
    }

    pub(super) fn log(&self) -> PathBuf {
        self.folder.path().join("operator.log")
    }

    /// Starts the operator with the token of its own account, and writes its addresses into the plan.
    pub(super) fn start_operator(&mut self, plan: &mut Value, args: &[&str]) -> Result<()> {
        let token = sh::output(self.testbed.kubectl().args([
            "create",
            "token",
            "gainshare-operator",
            "-n",
            SYSTEM,
            "--duration=2h",
        ]))?;
        let view = ["config", "view", "--raw", "--minify", "-o", "json"];
        let mut config: Value = serde_json::from_str(&sh::output(self.testbed.kubectl().args(view))?)?;
        config["users"][0]["user"] = json!({"token": token.trim()});
        let kubeconfig = self.folder.path().join("operator.kubeconfig");
        std::fs::write(&kubeconfig, config.to_string())?;
        let (secure, plain) = (free_port()?, free_port()?);
        let log = std::fs::File::create(self.log())?;
        let operator = self
            .programs
            .command("gainshare-operator")
            .args(["--namespace", SYSTEM, "--server-name", "127.0.0.1"])
            .args(args)
            .args(["--listen", &format!("127.0.0.1:{secure}"), "--plain-listen", &format!("127.0.0.1:{plain}")])
            .arg("--authority")
            .arg(self.folder.path())
            .env("KUBECONFIG", &kubeconfig)
            .env("GAINSHARE_LOG", "info,gainshare_operator::placement=debug")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start gainshare-operator")?;
        plan["operator"] = json!(format!("https://127.0.0.1:{secure}"));
        plan["metrics"] = json!(format!("127.0.0.1:{plain}"));
        plan["operator_pid"] = json!(operator.id());
        self.operator = Some(operator);
        Ok(())
    }
}

impl Bench {
    /// Kills the operator as a crash would.
    pub(super) fn kill_operator(&mut self) {
        if let Some(mut operator) = self.operator.take() {
            // An operator that has ended already needs no signal.
            let _ = operator.kill();
            let _ = operator.wait();
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.kill_operator();
    }
}

/// A port that is free at the moment.
fn free_port() -> Result<u16> {
    Ok(std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
