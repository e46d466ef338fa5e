//! Whether the operator decides about a large cluster of training jobs in time, in front of a real API server.
//!
//! Every node is simulated by kwok, every job and pod is an object in the API server, and the operator is
//! the released program with the chart's rights. Most jobs run from the start, with the journal that an
//! earlier operator would have left (`crates/operator/examples/crowd/fill.rs` describes how and why): a
//! control plane on two cores takes an hour to start 50,000 jobs one by one. The other jobs arrive in a
//! burst and go the whole way.
//!
//! The promises are about the operator itself: a pass over the whole cluster under a second, and 700
//! placements in a second of deciding. Both are judged by the processor time of the deciding thread,
//! because the API server, etcd, kwok and all node agents share the machine with it. The duration of passes
//! is printed too, and half of them must stay under a second as well.

use super::kube::{Bench, SYSTEM, part, verdict};
use anyhow::{Result, ensure};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many simulated nodes.
    #[arg(long, default_value_t = 5000)]
    nodes: u32,
    /// How many training jobs, all together.
    #[arg(long, default_value_t = 50_000)]
    jobs: u32,
    /// How many of them arrive at once while the others run, and as many again while no operator runs.
    #[arg(long, default_value_t = 1000)]
    burst: u32,
    /// How many of them stop growing, so that SpeCon moves them.
    #[arg(long, default_value_t = 100)]
    moves: u32,
    #[arg(long, default_value_t = 10)]
    namespaces: u32,
    /// How long jobs only go on.
    #[arg(long = "idle", default_value_t = 60, value_name = "SECONDS")]
    idle_s: u64,
    /// How often a node agent reports the progress of its jobs; real ones report every 2 s, which is too
    /// much beside a cluster on one machine.
    #[arg(long = "tell-every", default_value_t = 20, value_name = "SECONDS")]
    tell_every_s: u64,
}

/// The longest allowed pass over the whole cluster.
const LONGEST_PASS_MS: f64 = 1000.0;
/// The least number of placements in a second of deciding.
const LEAST_DECISIONS: f64 = 700.0;
/// Memory that the operator may use.
const MOST_RSS_MIB: f64 = 2048.0;

pub(crate) fn run(args: &Args) -> Result<Value> {
    ensure!(
        args.nodes >= 50 && args.namespaces > 0,
        "there must be 50 nodes, one of them with few jobs, and a namespace"
    );
    let running = args.jobs.saturating_sub(2 * args.burst);
    ensure!(running >= 4 * args.nodes, "--jobs must leave four jobs for every node beside twice --burst");
    ensure!(args.moves < args.nodes / 2, "--moves needs as many nodes and more: one job of a node stops growing");
    let mut bench = Bench::up("bench-move", args.nodes)?;
    let mut plan = json!({
        "nodes": args.nodes, "pods_per_node": 0, "namespaces": args.namespaces, "system": SYSTEM, "folder": bench.folder(),
        "idle_s": args.idle_s, "tell_every_s": args.tell_every_s, "running": running, "coming": args.burst,
        "converging": args.moves, "log": bench.log(),
    });
    eprintln!("bench: filling {} nodes with {running} training jobs", args.nodes);
    let filled = bench.crowd("fill", &plan)?;
    eprintln!("bench: {filled}");
    // The thesis's interval of 30 s would only make the wait for the first move longer.
    let quick = ["--specon-interval", "10s"];
    bench.start_operator(&mut plan, &quick)?;
    let moved = bench.crowd("moves", &plan)?;
    eprintln!("bench: {moved}");
    bench.kill_operator();
    bench.crowd("come", &plan)?;
    bench.start_operator(&mut plan, &quick)?;
    let returned = bench.crowd("return", &plan)?;
    let decisions = returned.pointer("/all_passes/largest_pass/orders_per_s_of_processor").and_then(Value::as_f64);
    let allowed = json!({
        "longest_pass": part(&moved, "/all_passes/processor/max_ms", LONGEST_PASS_MS),
        "longest_pass_after_a_crash": part(&returned, "/all_passes/processor/max_ms", LONGEST_PASS_MS),
        "half_of_the_passes_on_the_shared_machine": part(&moved, "/all_passes/whole/median_ms", LONGEST_PASS_MS),
        "decisions_a_second": decisions.map(|rate| LEAST_DECISIONS / rate),
        "operator_peak_rss": part(&moved, "/operator_peak_rss_mib", MOST_RSS_MIB),
        "writes_when_idle": part(&moved, "/idle/writes_a_minute", 0.5),
    });
    verdict(json!({"fill": filled, "measured": moved, "after_a_crash": returned, "of_what_is_allowed": allowed}))
}
