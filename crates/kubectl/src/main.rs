//! `kubectl gainshare`: what the cluster shares and why, for everybody with a kubeconfig.
//!
//! kubectl finds its plugins by their names: `kubectl-gainshare` in the PATH. The plugin only
//! reads: pods, policies and namespaces, with the rights of the user. Everything it shows is on
//! those objects, except the records of `explain --dump` ([`dump`]).

mod dump;
mod training;

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand, ValueHint};
use dump::Decider;
use gainshare_figures::terminal::{self, Colour, Format, Printer, Side, Table};
use gainshare_kube_api::aim::AimKind;
use gainshare_kube_api::decision_record::SYSTEM_NAMESPACE;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::gpu_pacing::GpuPacing;
use gainshare_kube_api::names::{self, NodeName, PodUid};
use gainshare_kube_api::pod_note::{PendingReason, PodNote};
use gainshare_kube_api::resources::Resources;
use gainshare_kube_api::select::{self, PolicyFacts};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::share_reason::ShareReason;
use gainshare_kube_api::wire::{ReportedCategory, ResizeObstacle};
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Which training pods share their nodes, how much each has, and why
#[derive(Debug, Parser)]
#[command(name = "kubectl gainshare", version, max_term_width = 110)]
pub struct PluginCli {
    #[command(subcommand)]
    command: PluginCommand,
}

#[derive(Debug, Args)]
struct ClusterArgs {
    /// The namespace to read [default: that of your context]
    #[arg(short, long, value_name = "NAME")]
    namespace: Option<String>,
    /// The context of your kubeconfig to use
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The kubeconfig to use [default: as kubectl finds it]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Print tables for people, or JSON for programs
    #[arg(short, long, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    output: Format,
}

#[derive(Debug, Subcommand)]
enum PluginCommand {
    /// List the pods that share
    Ps {
        #[command(flatten)]
        at: ClusterArgs,
        /// In all namespaces
        #[arg(short = 'A', long)]
        all_namespaces: bool,
    },
    /// Explain why a pod has what it has, or why a TrainingJob moved or stayed
    #[command(
        after_help = "Example:\n  kubectl gainshare explain vae\n  kubectl gainshare explain vae --dump decision.json"
    )]
    Explain {
        /// The pod's or TrainingJob's name
        name: String,
        /// Write the last decision about it, with all it depended on, to this file (`-` for standard
        /// output), for `gainshare replay`
        ///
        /// The decision comes from the node agent of the pod's node (its share) or from the operator (where
        /// a TrainingJob or Job runs). This needs the right to forward ports to their pods: `get` and
        /// `create` on `pods/portforward`, and `list` on `pods`, in the namespace of the installation.
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        dump: Option<PathBuf>,
        /// The namespace in which Gainshare is installed, for --dump
        #[arg(long, value_name = "NAME", default_value = SYSTEM_NAMESPACE)]
        system_namespace: String,
        #[command(flatten)]
        at: ClusterArgs,
    },
    /// Show where TrainingJobs ran, moves included
    Gantt {
        #[command(flatten)]
        at: ClusterArgs,
        /// In all namespaces
        #[arg(short = 'A', long)]
        all_namespaces: bool,
        /// Draw the chart into this file, as .svg
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        figure: Option<PathBuf>,
    },
    /// Show what each node shares, every two seconds
    Top {
        #[command(flatten)]
        at: ClusterArgs,
        /// In all namespaces
        #[arg(short = 'A', long)]
        all_namespaces: bool,
        /// Print once and end
        #[arg(long)]
        once: bool,
    },
}

/// Time between two pictures of `top`.
const TOP_EVERY: Duration = Duration::from_secs(2);

/// One pod, for people and programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Row {
    namespace: String,
    pod: String,
    #[serde(skip)]
    uid: PodUid,
    node: Option<NodeName>,
    owner: String,
    /// Empty if the namespace's label stands for a policy.
    policy: String,
    /// What the policy makes as early as possible, where its author chose that.
    #[serde(skip_serializing_if = "Option::is_none")]
    aim: Option<AimKind>,
    container: String,
    category: Option<ReportedCategory>,
    /// Improvement per second and part of the node's CPU, when the category or the share last
    /// changed.
    growth: Option<f64>,
    /// Of what the pods of its policy on its node requested together.
    share_percent: Option<u32>,
    reason: String,
    /// The reason as a value, where the note has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<ShareReason>,
    original: Resources,
    now: Resources,
    blocked: Option<ResizeObstacle>,
    pending: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pending_reason: Option<PendingReason>,
    /// The containers that load the library by which threads follow the share, where it was added.
    #[serde(skip_serializing_if = "Option::is_none")]
    inside: Option<String>,
    /// Whether its GPU work is paced, if it asks for that.
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<GpuPacing>,
}

fn main() -> ExitCode {
    match plugin(PluginCli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => terminal::report_error("kubectl-gainshare", Format::Table, &error, None),
    }
}

fn plugin(cli: PluginCli) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("cannot start a runtime")?;
    runtime.block_on(async {
        match cli.command {
            PluginCommand::Ps { at, all_namespaces } => {
                let cluster = Cluster::connect(&at, all_namespaces).await?;
                ps(&cluster.rows().await?, all_namespaces, &Printer::new(at.output))?;
            }
            PluginCommand::Explain { name, at, dump: Some(file), system_namespace } => {
                let cluster = Cluster::connect(&at, false).await?;
                dump_decision(&cluster, &name, &system_namespace, &file, &Printer::new(at.output)).await?;
            }
            PluginCommand::Explain { name, at, dump: None, .. } => {
                let cluster = Cluster::connect(&at, false).await?;
                let (rows, out) = (cluster.rows().await?, Printer::new(at.output));
                if let Some(row) = rows.iter().find(|r| r.pod == name) {
                    explain(row, &out)?;
                } else if !training::explain(&cluster.client, cluster.namespace(), &name, &out).await? {
                    bail!(cluster.why_not(&name).await?);
                }
            }
            PluginCommand::Gantt { at, all_namespaces, figure } => {
                let cluster = Cluster::connect(&at, all_namespaces).await?;
                let out = Printer::new(at.output);
                training::gantt(&cluster.client, cluster.namespace.as_deref(), figure.as_deref(), &out).await?;
            }
            PluginCommand::Top { at, all_namespaces, once } => {
                let cluster = Cluster::connect(&at, all_namespaces).await?;
                let out = Printer::new(at.output);
                loop {
                    let text = top(&cluster.rows().await?, &out)?;
                    if once || out.is_json() {
                        out.text(&text)?;
                        break;
                    }
                    // Home, the picture, and whatever was below it wiped out.
                    out.text(&format!("\x1b[H\x1b[2J{text}"))?;
                    tokio::time::sleep(TOP_EVERY).await;
                }
            }
        }
        Ok(())
    })
}

/// Writes the last decision about a pod or job into a file.
async fn dump_decision(cluster: &Cluster, name: &str, system: &str, file: &Path, out: &Printer) -> Result<()> {
    let (decider, uid) = if let Some(row) = cluster.rows().await?.iter().find(|row| row.pod == name) {
        if let Some(blocked) = &row.blocked {
            bail!("the pod {name} is not resized, so nothing is decided about it: {}", blocked.message);
        }
        let node = row.node.clone().with_context(|| format!("the pod {name} has no node yet"))?;
        (Decider::Agent { node }, row.uid.clone().into())
    } else if let Some(uid) = training::uid(&cluster.client, cluster.namespace(), name).await {
        (Decider::Operator, uid)
    } else {
        bail!(cluster.why_not(name).await?);
    };
    let record = dump::fetch(&cluster.client, system, &decider, &uid).await;
    let record = record.with_context(|| format!("no decision about {name} was written"))?;
    if file == Path::new("-") {
        return Ok(out.text(&format!("{}\n", String::from_utf8_lossy(&record.json)))?);
    }
    std::fs::write(file, &record.json).with_context(|| format!("cannot write {}", file.display()))?;
    if out.is_json() {
        return Ok(out.json(&json!({ "name": name, "job": record.job, "file": file }))?);
    }
    Ok(out.text(&format!("{name} is {} in {}\n", record.job, file.display()))?)
}

struct Cluster {
    client: Client,
    /// `None`: all of them.
    namespace: Option<String>,
}

impl Cluster {
    async fn connect(at: &ClusterArgs, all_namespaces: bool) -> Result<Cluster> {
        let options = KubeConfigOptions { context: at.context.clone(), ..KubeConfigOptions::default() };
        let config = match &at.kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path)
                    .with_context(|| format!("cannot read the kubeconfig {}", path.display()))?;
                Config::from_custom_kubeconfig(file, &options).await
            }
            None => Config::from_kubeconfig(&options).await,
        };
        let config = config.context("no cluster: set KUBECONFIG, or give --kubeconfig and --context")?;
        let namespace = at.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).context("cannot use this kubeconfig")?;
        Ok(Cluster { client, namespace: (!all_namespaces).then_some(namespace) })
    }

    fn namespace(&self) -> &str {
        self.namespace.as_deref().unwrap_or_default()
    }

    async fn rows(&self) -> Result<Vec<Row>> {
        let all = ListParams::default();
        let (pods, policies): (Api<Pod>, Api<SharePolicy>) = match &self.namespace {
            Some(ns) => (Api::namespaced(self.client.clone(), ns), Api::namespaced(self.client.clone(), ns)),
            None => (Api::all(self.client.clone()), Api::all(self.client.clone())),
        };
        let policies = policies
            .list(&all)
            .await
            .context("cannot list SharePolicies: is Gainshare installed, and may you read them?")?;
        let policies: Vec<PolicyFacts> = policies.iter().filter_map(PolicyFacts::of).collect();
        let pods = pods.list(&all).await.context("cannot list pods")?;
        let pods: Vec<PodFacts> = pods.iter().filter_map(PodFacts::of).filter(|p| p.running).collect();
        Ok(rows(&pods, &policies, &self.labelled_namespaces().await))
    }

    /// The labels of namespaces, as far as the user may read them.
    async fn labelled_namespaces(&self) -> BTreeMap<String, BTreeMap<String, String>> {
        let api: Api<Namespace> = Api::all(self.client.clone());
        let found = match &self.namespace {
            Some(name) => api.get(name).await.map(|ns| vec![ns]),
            None => api.list(&ListParams::default().labels(names::SHARE_LABEL)).await.map(|list| list.items),
        };
        let labels = |ns: Namespace| Some((ns.metadata.name?, ns.metadata.labels.unwrap_or_default()));
        found.unwrap_or_default().into_iter().filter_map(labels).collect()
    }

    /// Why a pod is not among those that share.
    async fn why_not(&self, name: &str) -> Result<String> {
        let namespace = self.namespace.clone().unwrap_or_default();
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &namespace);
        let pod = pods.get_opt(name).await.context("cannot read the pod")?;
        Ok(match pod.as_ref().and_then(PodFacts::of) {
            None => {
                format!(
                    "there is no pod and no TrainingJob {name} in the namespace {namespace}: `kubectl gainshare ps -A` lists what shares"
                )
            }
            Some(pod) if !pod.running => format!("the pod {name} does not run, so there is nothing to share"),
            Some(_) => format!(
                "no SharePolicy selects the pod {name}: write one with a selector or targetRef that fits it, or label the namespace with \
                 `kubectl label namespace {namespace} {}=enabled`",
                names::SHARE_LABEL
            ),
        })
    }
}

/// The pods that share, in order.
fn rows(
    pods: &[PodFacts],
    policies: &[PolicyFacts],
    namespaces: &BTreeMap<String, BTreeMap<String, String>>,
) -> Vec<Row> {
    let mut rows: Vec<Row> = pods
        .iter()
        .filter_map(|pod| {
            let policy = select::choose(policies.iter().filter(|p| p.namespace == pod.namespace), pod);
            let labelled = namespaces.get(&pod.namespace).is_some_and(|labels| select::by_namespace(labels, pod));
            let by_job = select::by_job(pod);
            if policy.is_none() && !labelled && by_job.is_none() {
                return None;
            }
            let (policy, spec) = match (policy, by_job) {
                (Some(policy), _) => (policy.name.clone(), policy.spec.clone()),
                (None, Some(job)) => (job.name, job.spec),
                (None, None) => Default::default(),
            };
            let container = select::container_name(&spec, pod);
            let now = pod.container(&container).map(|c| c.resources).unwrap_or_default();
            let original = pod.originals().and_then(|o| Some(o.containers.get(&container)?.resources())).unwrap_or(now);
            let note = PodNote::carried(pod).unwrap_or_default();
            Some(Row {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                uid: pod.uid.clone(),
                node: pod.node.clone(),
                owner: select::owner_name(pod),
                policy,
                aim: note.aim,
                blocked: pod.blocked(&container),
                container,
                category: note.category,
                growth: note.growth,
                share_percent: note.share_percent,
                reason: note.reason,
                cause: note.cause,
                original,
                now,
                pending: note.pending,
                pending_reason: note.pending_reason,
                inside: pod.notes.get(names::INSIDE_ANNOTATION).cloned(),
                gpu: note.gpu,
            })
        })
        .collect();
    rows.sort_by(|a, b| (&a.namespace, &a.node, &a.policy, &a.pod).cmp(&(&b.namespace, &b.node, &b.policy, &b.pod)));
    rows
}

fn ps(rows: &[Row], all_namespaces: bool, out: &Printer) -> Result<()> {
    if out.is_json() {
        return Ok(out.json(&rows)?);
    }
    if rows.is_empty() {
        let text = "No running pod shares here. Write a SharePolicy, or label the namespace with gainshare.dev/share=enabled.\n";
        return Ok(out.text(text)?);
    }
    let mut columns = vec![
        ("POD", Side::Left),
        ("POLICY", Side::Left),
        ("NODE", Side::Left),
        ("CATEGORY", Side::Left),
        ("SHARE", Side::Right),
        ("CPU", Side::Right),
        ("ORIGINAL", Side::Right),
        ("NOTE", Side::Left),
    ];
    if all_namespaces {
        columns.insert(0, ("NAMESPACE", Side::Left));
    }
    let mut table = Table::new(&columns);
    for row in rows {
        let (category, colour) = category(row);
        let plain = |text: &str| (text.to_owned(), Colour::Plain);
        let mut cells = vec![
            (row.pod.clone(), Colour::Bold),
            plain(policy_name(row)),
            plain(row.node.as_deref().unwrap_or("-")),
            (category.to_owned(), colour),
            plain(&row.share_percent.map_or("-".into(), |s| format!("{s}%"))),
            plain(&milli(row.now.requests.cpu_milli)),
            plain(&milli(row.original.requests.cpu_milli)),
            (note(row), if row.blocked.is_some() { Colour::Yellow } else { Colour::Dim }),
        ];
        if all_namespaces {
            cells.insert(0, plain(&row.namespace));
        }
        table.row(cells);
    }
    Ok(out.text(&table.render(out, 0))?)
}

fn explain(row: &Row, out: &Printer) -> Result<()> {
    if out.is_json() {
        return Ok(out.json(row)?);
    }
    let resources = |r: &Resources| {
        let limit = r.limits.cpu_milli.map_or(String::new(), |l| format!(", limit {}", milli(Some(l))));
        let memory = r.requests.memory_bytes.map_or(String::new(), |b| format!("; memory {} MiB", b >> 20));
        format!("CPU request {}{limit}{memory}", milli(r.requests.cpu_milli))
    };
    let mut text = format!("{}\n", out.paint(&format!("{}/{}", row.namespace, row.pod), Colour::Bold));
    let mut line = |name: &str, value: &str| text.push_str(&format!("  {name:<11} {value}\n"));
    line("made by", &row.owner);
    line("container", &row.container);
    line("node", row.node.as_deref().unwrap_or("-"));
    line("policy", policy_name(row));
    if let Some(aim) = row.aim {
        line("aim", &aim.text());
    }
    match &row.blocked {
        Some(blocked) => line("left alone", &format!("{}: {}", blocked.reason, blocked.message)),
        None => {
            line("category", category(row).0);
            line(
                "growth",
                &row.growth.map_or("not measured yet".into(), |g| format!("{g} per second and part of the CPU")),
            );
            let share = row.share_percent.map_or("not decided yet".into(), |s| {
                format!("{s}% of what the pods of this policy on this node requested together")
            });
            line("share", &share);
            line("why", if row.reason.is_empty() { "its node agent has not reported yet" } else { &row.reason });
        }
    }
    line("original", &resources(&row.original));
    line("now", &resources(&row.now));
    if let Some(pending) = &row.pending {
        line("pending", pending);
    }
    let threads = match row.inside.as_deref() {
        Some(inside) if inside != "disabled" => format!("follow the share: {inside}"),
        _ => "do not follow the share: the pod was started without the library".to_owned(),
    };
    line("threads", &threads);
    if let Some(gpu) = row.gpu {
        line("GPU", &gpu.to_string());
    }
    Ok(out.text(&text)?)
}

/// What the pods of one policy on one node share.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Pool {
    node: String,
    namespace: String,
    policy: String,
    pool_milli: u64,
    now_milli: u64,
    growing: u32,
    watching: u32,
    converged: u32,
    undecided: u32,
    blocked: u32,
}

fn pools(rows: &[Row]) -> Vec<Pool> {
    let mut pools: BTreeMap<(&str, &str, &str), Pool> = BTreeMap::new();
    for row in rows {
        let node = row.node.as_deref().unwrap_or("-");
        let pool = pools.entry((node, &row.namespace, &row.policy)).or_insert_with(|| Pool {
            node: node.to_owned(),
            namespace: row.namespace.clone(),
            policy: row.policy.clone(),
            ..Pool::default()
        });
        if row.blocked.is_some() {
            pool.blocked += 1;
            continue;
        }
        pool.pool_milli = pool.pool_milli.saturating_add(row.original.requests.cpu_milli.unwrap_or(0));
        pool.now_milli = pool.now_milli.saturating_add(row.now.requests.cpu_milli.unwrap_or(0));
        match row.category {
            Some(ReportedCategory::Growing) => pool.growing += 1,
            Some(ReportedCategory::Watching) => pool.watching += 1,
            Some(ReportedCategory::Converged) => pool.converged += 1,
            None => pool.undecided += 1,
        }
    }
    pools.into_values().collect()
}

fn top(rows: &[Row], out: &Printer) -> Result<String> {
    let pools = pools(rows);
    if out.is_json() {
        return Ok(serde_json::to_string(&pools)? + "\n");
    }
    let columns = [
        ("NODE", Side::Left),
        ("NAMESPACE", Side::Left),
        ("POLICY", Side::Left),
        ("POOL", Side::Right),
        ("NOW", Side::Right),
        ("GROWING", Side::Right),
        ("WATCHING", Side::Right),
        ("CONVERGED", Side::Right),
        ("UNDECIDED", Side::Right),
        ("BLOCKED", Side::Right),
    ];
    let mut table = Table::new(&columns);
    for pool in &pools {
        let counts = [pool.growing, pool.watching, pool.converged, pool.undecided, pool.blocked];
        let name = if pool.policy.is_empty() { "(namespace)" } else { &pool.policy };
        let mut cells = vec![pool.node.clone(), pool.namespace.clone(), name.to_owned()];
        cells.extend([milli(Some(pool.pool_milli)), milli(Some(pool.now_milli))]);
        cells.extend(counts.map(|n| n.to_string()));
        table.row(cells.into_iter().map(|c| (c, Colour::Plain)).collect());
    }
    Ok(table.render(out, 0))
}

fn policy_name(row: &Row) -> &str {
    if row.policy.is_empty() { "(namespace)" } else { &row.policy }
}

fn category(row: &Row) -> (&'static str, Colour) {
    match (&row.blocked, row.category) {
        (Some(_), _) => ("-", Colour::Dim),
        (None, None) => ("-", Colour::Dim),
        (None, Some(c @ ReportedCategory::Growing)) => (c.name(), Colour::Green),
        (None, Some(c @ ReportedCategory::Watching)) => (c.name(), Colour::Yellow),
        (None, Some(c @ ReportedCategory::Converged)) => (c.name(), Colour::Blue),
    }
}

fn note(row: &Row) -> String {
    let note = match (&row.blocked, &row.pending) {
        (Some(blocked), _) => &blocked.message,
        (None, Some(pending)) => pending,
        (None, None) => &row.reason,
    };
    match row.gpu {
        Some(GpuPacing::Paced { percent }) => format!("{note}; GPU work paced to {percent}%"),
        _ => note.clone(),
    }
}

fn milli(milli: Option<u64>) -> String {
    milli.map_or("-".into(), |m| format!("{m}m"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(name: &str, labels: serde_json::Value, cpu: Option<&str>, annotations: serde_json::Value) -> PodFacts {
        let resources = cpu.map_or(json!({}), |cpu| json!({ "requests": { "cpu": cpu } }));
        let pod = json!({
            "metadata": {
                "name": name, "namespace": "team", "uid": format!("uid-{name}"), "labels": labels, "annotations": annotations,
            },
            "spec": { "nodeName": "n1", "containers": [{ "name": "main", "resources": resources }] },
            "status": { "phase": "Running", "qosClass": if cpu.is_some() { "Burstable" } else { "BestEffort" } },
        });
        PodFacts::of(&serde_json::from_value(pod).unwrap()).unwrap()
    }

    fn policy() -> PolicyFacts {
        let policy = json!({
            "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
            "metadata": { "name": "p", "namespace": "team" },
            "spec": { "selector": { "matchLabels": { "app": "train" } } },
        });
        PolicyFacts::of(&serde_json::from_value(policy).unwrap()).unwrap()
    }

    #[test]
    fn rows_say_what_the_objects_say() {
        let note = r#"{"policy":"p","category":"converged","sharePercent":20,"reason":"makes room",
            "gpu":{"state":"paced","percent":15}}"#;
        let was = r#"{"uid":"uid-a","containers":{"main":{"requests":{"cpu":"500m"}}}}"#;
        let notes = json!({ names::STATUS_ANNOTATION: note, names::ORIGINAL_ANNOTATION: was });
        let pods = [
            pod("a", json!({ "app": "train" }), Some("200m"), notes),
            pod("b", json!({ "app": "train" }), None, json!({})),
            pod("c", json!({ "app": "web" }), Some("100m"), json!({})),
        ];
        let rows = rows(&pods, &[policy()], &BTreeMap::new());
        assert_eq!(rows.iter().map(|r| r.pod.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        let a = &rows[0];
        assert_eq!((a.category, a.share_percent), (Some(ReportedCategory::Converged), Some(20)));
        assert_eq!(super::note(a), "makes room; GPU work paced to 15%");
        assert_eq!((a.now.requests.cpu_milli, a.original.requests.cpu_milli), (Some(200), Some(500)));
        assert_eq!(rows[1].blocked.as_ref().unwrap().reason, "BestEffort");
        let pools = pools(&rows);
        assert_eq!((pools[0].pool_milli, pools[0].now_milli), (500, 200));
        assert_eq!((pools[0].converged, pools[0].blocked), (1, 1));
    }

    #[test]
    fn a_labelled_namespace_stands_for_a_policy() {
        let pods = [pod("c", json!({}), Some("100m"), json!({}))];
        let label = BTreeMap::from([(names::SHARE_LABEL.to_owned(), "enabled".to_owned())]);
        let namespaces = BTreeMap::from([("team".to_owned(), label)]);
        let found = rows(&pods, &[], &namespaces);
        assert_eq!((found[0].policy.as_str(), policy_name(&found[0])), ("", "(namespace)"));
        assert!(rows(&pods, &[], &BTreeMap::new()).is_empty());
    }
}
