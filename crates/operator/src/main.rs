//! The program `gainshare-operator`: reads its command line and runs the operator of a cluster.

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};
use gainshare_core::model::Span;
use gainshare_core::policy::{Elastic, MoveRule, Policy, ScaleRule, Specon};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::tfjob::{TFJOB_API_VERSION, TfJob, to_training_job};
use gainshare_kube_api::training_job::TrainingJob;
use gainshare_operator::{Config, FailPoint, ScalerConfig, inside};
use gainshare_page::Orders;
use kube::CustomResourceExt;
use serde_json::Value;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::prelude::*;

/// The largest weight of a queue.
const MOST_WEIGHT: u32 = 1_000_000;

/// Runs the operator of a Kubernetes cluster: watches pods and policies, and resizes on behalf of the node agents
#[derive(Debug, Parser)]
#[command(name = "gainshare-operator", version, max_term_width = 110)]
#[command(args_conflicts_with_subcommands = true)]
#[command(after_help = "Example:\n  gainshare operator --namespace gainshare-system --authority /run/gainshare")]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    operator: OperatorArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the custom resource definitions for a cluster
    #[command(after_help = "Example:\n  gainshare crd | kubectl apply -f -")]
    Crd {
        /// Print the definition of Kubeflow's TFJob instead
        #[arg(long)]
        tfjobs: bool,
    },
    /// Wait until asked to end: the command of pods that stand for needed nodes
    #[command(hide = true)]
    Pause,
    /// Put the library inside jobs into the volumes of a pod: the command of the container that the webhook adds
    #[command(hide = true)]
    Inside {
        /// The folder for the library
        #[arg(long, value_name = "DIR")]
        library: PathBuf,
        /// The file for the page
        #[arg(long, value_name = "FILE")]
        page: PathBuf,
        /// The team at the start; 0: as many threads as the program wants
        #[arg(long, value_name = "NUMBER", default_value_t = 0)]
        team: u32,
        /// The pool of OpenBLAS may become larger than it was at the start
        #[arg(long)]
        blas_may_grow: bool,
    },
    /// Print TFJobs as TrainingJobs, for clusters where Kubeflow owns the kind TFJob
    #[command(after_help = "Example:\n  gainshare-operator convert tfjob.yaml | kubectl apply -f -")]
    Convert {
        /// A file with one or several TFJobs in YAML (`-` for standard input)
        file: PathBuf,
    },
}

#[derive(Debug, Args)]
pub struct OperatorArgs {
    /// The namespace it runs in
    #[arg(long, env = "POD_NAMESPACE", default_value = "gainshare-system", value_name = "NAME")]
    pub namespace: String,
    /// The operator's pod, which gets a label while it leads
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pub pod_name: Option<String>,
    /// Where node agents and admission reviews connect, with TLS
    #[arg(long, default_value = "0.0.0.0:8443", value_name = "ADDRESS")]
    pub listen: SocketAddr,
    /// Where health and metrics are served, as plain HTTP
    #[arg(long, default_value = "0.0.0.0:8080", value_name = "ADDRESS")]
    pub plain_listen: SocketAddr,
    /// Where recorded decisions are served for `kubectl gainshare explain --dump`, as plain HTTP without a
    /// token: a loopback address of the operator's own pod [default: nowhere]
    #[arg(long, value_name = "ADDRESS")]
    pub record_listen: Option<SocketAddr>,
    /// The operator's Service, whose names the certificate has
    #[arg(long, default_value = "gainshare-operator", value_name = "NAME")]
    pub service: String,
    /// Further names and addresses for the certificate
    #[arg(long, value_name = "NAME")]
    pub server_name: Vec<String>,
    /// The ServiceAccount of the node agents
    #[arg(long, default_value = "gainshare-agent", value_name = "NAME")]
    pub agent_account: String,
    /// The Lease that decides which replica leads
    #[arg(long, default_value = "gainshare-operator", value_name = "NAME")]
    pub lease: String,
    /// The ConfigMap in which its certificate is published
    #[arg(long, default_value = "gainshare-operator", value_name = "NAME")]
    pub config_map: String,
    /// The MutatingWebhookConfiguration in which the certificate is published, too
    #[arg(long, value_name = "NAME")]
    pub webhook: Option<String>,
    /// The image from which pods get the library inside jobs, in namespaces that ask for it; it contains this program
    #[arg(long, value_name = "IMAGE")]
    pub inside_image: Option<String>,
    /// Folders in which its certificate authority may be kept, the first that has one or can be written
    #[arg(long, value_name = "DIR")]
    pub authority: Vec<PathBuf>,
    /// SpeCon's interval: the time between two decisions about jobs of that policy
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "30s")]
    pub specon_interval: Duration,
    /// SpeCon's alpha: a change of the loss below it, by its first value, counts as slow
    #[arg(long, value_name = "PART", default_value_t = Specon::default().alpha)]
    pub specon_alpha: f64,
    /// How long tasks of the policy operator are measured before their sizes change
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "30s")]
    pub elastic_interval: Duration,
    /// A queue of distributed jobs and its weight, such as research=3; may be given again
    #[arg(long, value_name = "NAME=WEIGHT", value_parser = parse_queue)]
    pub queue: Vec<(String, u32)>,
    /// Run Kubeflow's TFJobs, too: the cluster has that kind, and no other operator runs them
    #[arg(long)]
    pub tfjobs: bool,
    /// Ask for nodes that deadlines need: by pods that find no place, which cluster-autoscaler, Karpenter or
    /// Cluster API answer with new nodes
    #[arg(long, requires = "scaler_image")]
    pub scaler: bool,
    /// The image of those pods, which contains this program
    #[arg(long, value_name = "IMAGE")]
    pub scaler_image: Option<String>,
    /// The PriorityClass of those pods
    #[arg(long, value_name = "NAME", default_value = "gainshare-placeholder")]
    pub scaler_priority_class: String,
    /// How many nodes are asked for at a time, at most
    #[arg(long, value_name = "NUMBER", default_value_t = 10)]
    pub scaler_max_nodes: usize,
    /// Restore every pod's own resources, release training jobs, and end; for an uninstall
    #[arg(long)]
    pub release: bool,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    match cli.command {
        Some(Command::Crd { tfjobs }) => print_definitions(tfjobs),
        Some(Command::Convert { file }) => convert(&file),
        Some(Command::Pause) => pause(),
        Some(Command::Inside { library, page, team, blas_may_grow }) => {
            place_library(&library, &page, &Orders { team, blas_may_grow, ..Orders::default() });
            Ok(())
        }
        None => run_operator(&cli.operator),
    }
}

/// A pod whose library cannot be put in place starts without it, so this is no failure.
fn place_library(library: &Path, page: &Path, orders: &Orders) {
    let placed = inside::own_library().and_then(|own| inside::place(&own, library, page, orders));
    if let Err(error) = placed {
        let folder = library.display();
        eprintln!("the library cannot be put into {folder}, so threads will not follow the share: {error}");
    }
}

fn pause() -> Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the asynchronous runtime")?.block_on(async {
        end()?.await;
        Ok(())
    })
}

/// Resolves when the process is asked to end.
fn end() -> Result<impl Future<Output = ()>> {
    let mut term = signal(SignalKind::terminate())?;
    let mut int = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = term.recv() => {}
            _ = int.recv() => {}
        }
    })
}

fn print_definitions(tfjobs: bool) -> Result<()> {
    let definitions = if tfjobs {
        let mut definition = TfJob::crd();
        // People's jobs outlive an uninstall of the chart.
        let keep = ("helm.sh/resource-policy".to_owned(), "keep".to_owned());
        definition.metadata.annotations = Some([keep].into());
        vec![definition]
    } else {
        vec![SharePolicy::crd(), TrainingJob::crd()]
    };
    for definition in definitions {
        print!("---\n{}", serde_saphyr::to_string(&definition)?);
    }
    Ok(())
}

/// Prints the TFJobs of a file as TrainingJobs; remarks go to standard error.
fn convert(file: &Path) -> Result<()> {
    let shown = file.display();
    let text = if file == Path::new("-") {
        std::io::read_to_string(std::io::stdin()).context("cannot read standard input")?
    } else {
        std::fs::read_to_string(file).with_context(|| format!("cannot read {shown}"))?
    };
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(&text).with_context(|| format!("{shown} cannot be read as YAML"))?;
    let (jobs, others) = tfjobs(documents).with_context(|| format!("{shown} has a TFJob that cannot be read"))?;
    others.iter().for_each(|kind| eprintln!("{shown}: an object of kind {kind} is left out: it is no TFJob"));
    anyhow::ensure!(!jobs.is_empty(), "{shown} has no TFJob of kubeflow.org/v1");
    for job in jobs {
        let name = job.metadata.name.clone().unwrap_or_default();
        let (converted, notes) = to_training_job(&job).with_context(|| format!("TFJob {name} cannot run"))?;
        notes.iter().for_each(|note| eprintln!("{name}: {note}"));
        print!("---\n{}", serde_saphyr::to_string(&converted)?);
    }
    Ok(())
}

/// The TFJobs of these documents, also of lists as `kubectl get tfjobs -o yaml` prints them, and the kinds of all
/// other objects.
fn tfjobs(documents: Vec<Value>) -> Result<(Vec<TfJob>, Vec<String>)> {
    let (mut jobs, mut others) = (Vec::new(), Vec::new());
    for document in documents {
        let objects = match document["items"].as_array() {
            Some(items) if document["kind"].as_str().is_some_and(|kind| kind.ends_with("List")) => items.clone(),
            _ => vec![document],
        };
        for object in objects.into_iter().filter(|object| !object.is_null()) {
            if object["kind"] == "TFJob" && object["apiVersion"] == TFJOB_API_VERSION {
                let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
                jobs.push(serde_json::from_value(object).with_context(|| format!("TFJob {name}"))?);
            } else {
                others.push(object["kind"].as_str().unwrap_or("(none)").chars().take(63).collect());
            }
        }
    }
    Ok((jobs, others))
}

fn parse_duration(text: &str) -> Result<Duration, jiff::Error> {
    text.parse::<jiff::SignedDuration>().and_then(Duration::try_from)
}

fn parse_queue(text: &str) -> Result<(String, u32), String> {
    let (name, weight) = text.split_once('=').unwrap_or((text, "1"));
    match weight.parse() {
        Ok(weight @ 1..=MOST_WEIGHT) if !name.is_empty() => Ok((name.to_owned(), weight)),
        _ => Err(format!("write NAME=WEIGHT, such as research=3: the weight is a number from 1 to {MOST_WEIGHT}")),
    }
}

/// Logs go to standard error, which the cluster keeps. `GAINSHARE_LOG` sets the level.
fn start_logging(default_filter: &str) {
    let chosen: Option<Targets> = std::env::var("GAINSHARE_LOG").ok().and_then(|text| text.parse().ok());
    let filter = chosen.unwrap_or_else(|| default_filter.parse().expect("the default is well formed"));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_ansi(false);
    tracing_subscriber::registry().with(lines.with_filter(filter)).init();
}

fn run_operator(args: &OperatorArgs) -> Result<()> {
    start_logging("info,kube_client=off,kube_runtime=error");
    let runtime = tokio::runtime::Runtime::new().context("cannot start the asynchronous runtime")?;
    runtime.block_on(run(args))
}

async fn run(args: &OperatorArgs) -> Result<()> {
    let config = config(args);
    let scale = ScaleRule::Elastic(config.elastic);
    Policy { moves: MoveRule::Specon(config.specon), scale, ..Policy::equal() }.validate()?;
    let client = gainshare_operator::client().await?;
    if args.release {
        let count = gainshare_operator::release(&config, &client).await?;
        println!("every pod has its own resources ({count} pods were restored)");
        return Ok(());
    }
    gainshare_operator::run(config, client, end()?).await?;
    Ok(())
}

fn specon(args: &OperatorArgs) -> Specon {
    let interval = Span(args.specon_interval.as_micros() as u64);
    Specon { alpha: args.specon_alpha, interval, ..Specon::default() }
}

fn elastic(args: &OperatorArgs) -> Elastic {
    Elastic { interval: Span(args.elastic_interval.as_micros() as u64), ..Elastic::default() }
}

/// Where the process ends, for tests that need an operator that dies at a known step. Release builds have no
/// fail points, unless the feature `fail-points` is on.
fn fail_point() -> FailPoint {
    if cfg!(any(debug_assertions, feature = "fail-points")) {
        FailPoint::at(std::env::var("GAINSHARE_FAIL_AT").ok())
    } else {
        FailPoint::default()
    }
}

fn config(args: &OperatorArgs) -> Config {
    let (service, namespace) = (&args.service, &args.namespace);
    let mut server_names = vec![
        format!("{service}.{namespace}.svc"),
        format!("{service}.{namespace}.svc.cluster.local"),
        format!("{service}.{namespace}"),
        service.clone(),
    ];
    server_names.extend(args.server_name.iter().cloned());
    Config {
        namespace: namespace.clone(),
        pod_name: args.pod_name.clone(),
        listen: args.listen,
        plain_listen: args.plain_listen,
        record_listen: args.record_listen,
        server_names,
        agent_account: args.agent_account.clone(),
        lease: args.lease.clone(),
        config_map: args.config_map.clone(),
        webhook: args.webhook.clone(),
        inside_image: args.inside_image.clone(),
        authority_folders: args.authority.clone(),
        fail_at: fail_point(),
        specon: specon(args),
        elastic: elastic(args),
        queues: args.queue.iter().cloned().collect(),
        tfjobs: args.tfjobs,
        scaler: args.scaler_image.clone().filter(|_| args.scaler).map(|image| ScalerConfig {
            image,
            priority_class: args.scaler_priority_class.clone(),
            most_nodes: args.scaler_max_nodes,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_are_read_and_mistakes_are_answered_with_the_form() {
        assert_eq!(parse_queue("research=3"), Ok(("research".to_owned(), 3)));
        assert_eq!(parse_queue("nightly"), Ok(("nightly".to_owned(), 1)));
        for wrong in ["", "=3", "a=0", "a=-1", "a=x", "a=1000001", "a=1=2"] {
            assert!(parse_queue(wrong).is_err_and(|answer| answer.contains("NAME=WEIGHT")), "{wrong}");
        }
    }
    /// A file as people have it: several documents, a ConfigMap beside the job, a list as kubectl prints it.
    #[test]
    fn convert_finds_the_tfjobs_of_a_file() {
        let job = |name: &str| {
            format!(
                "apiVersion: kubeflow.org/v1\nkind: TFJob\nmetadata: {{name: {name}}}\nspec: {{tfReplicaSpecs: {{}}}}\n"
            )
        };
        let list = r#"{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "kubeflow.org/v1", "kind": "TFJob",
            "metadata": {"name": "listed"}, "spec": {"tfReplicaSpecs": {}}}]}"#;
        let text = format!("---\n{}---\nkind: ConfigMap\napiVersion: v1\n---\n{list}\n---\n{}", job("a"), job("b"));
        let (jobs, others) = tfjobs(serde_saphyr::from_multiple(&text).unwrap()).unwrap();
        let names: Vec<&str> = jobs.iter().filter_map(|job| job.metadata.name.as_deref()).collect();
        assert_eq!((names, others), (vec!["a", "listed", "b"], vec!["ConfigMap".to_owned()]));
        let wrong = job("wrong").replace("{}", "[]");
        let said = tfjobs(serde_saphyr::from_multiple(&wrong).unwrap()).unwrap_err().to_string();
        assert!(said.contains("TFJob wrong"), "{said}");
    }
}
