//! What distributed jobs cost the operator: a thousand jobs of eight tasks on a thousand nodes.
//!
//! There are two forms. Without `--cluster` the cluster is in the memory of one process
//! (`crates/operator/src/rehearsal.rs`), and the code that decides is the operator's own: only the deciding is
//! measured. With `--cluster` the nodes are simulated by kwok, every job, pod and Service is an object in a real
//! API server, and the operator is the released program with the chart's rights
//! (`crates/operator/examples/crowd/tasks.rs`): the processor time is that of the whole program, and the API server
//! counts the writes.
//!
//! Every threshold is printed as the ratio of the measured value to the allowed value: above 1 it is broken, and the
//! command fails.

use super::kube::{Bench, SYSTEM, part, verdict};
use crate::sh;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many jobs of two servers and six workers [default: 1000; with --short 200].
    #[arg(long)]
    jobs: Option<u32>,
    /// Fewer jobs, and shorter times in which nothing changes: some minutes with --cluster.
    #[arg(long)]
    short: bool,
    /// How many nodes; each holds two jobs [default: 1000; with --cluster half of --jobs].
    #[arg(long)]
    nodes: Option<u32>,
    /// In front of a real API server with simulated nodes, and not in one process. Needs root.
    #[arg(long)]
    cluster: bool,
    /// How many jobs come later and find no room, with --cluster [default: a tenth of --jobs].
    #[arg(long)]
    late: Option<u32>,
    /// How long nothing changes, with --cluster [default: 60; with --short 15].
    #[arg(long = "idle", value_name = "SECONDS")]
    idle_s: Option<u64>,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Sizes {
    jobs: u32,
    nodes: u32,
    late: u32,
    idle_s: u64,
}

impl Args {
    fn sizes(&self) -> Result<Sizes> {
        let jobs = self.jobs.unwrap_or(if self.short { 200 } else { 1000 });
        ensure!(jobs > 0, "there must be a job");
        let half = jobs.div_ceil(2);
        let nodes = self.nodes.unwrap_or(if self.cluster { half } else { NODES.max(half) });
        ensure!(nodes >= half, "a node holds two jobs: --nodes must be at least half of --jobs");
        let late = self.late.unwrap_or(jobs.div_ceil(10));
        let idle_s = self.idle_s.unwrap_or(if self.short { 15 } else { 60 });
        Ok(Sizes { jobs, nodes, late, idle_s })
    }
}

/// The nodes of the form without a cluster.
const NODES: u32 = 1000;
/// The number of namespaces that the jobs of the form with a cluster are in.
const NAMESPACES: u32 = 10;
/// Processor time that a pass over all jobs may take.
const LONGEST_PASS_S: f64 = 1.0;

pub(crate) fn run(args: &Args) -> Result<Value> {
    let sizes = args.sizes()?;
    if args.cluster { in_cluster(sizes) } else { in_process(sizes.jobs, sizes.nodes) }
}

fn in_process(jobs: u32, nodes: u32) -> Result<Value> {
    let mut measure = sh::cargo();
    measure.args(["run", "--release", "--quiet", "--package", "gainshare-operator", "--example", "tasks", "--"]);
    let printed = sh::output(measure.args([jobs.to_string(), nodes.to_string()]))?;
    let measured: Value =
        serde_json::from_str(&printed).with_context(|| format!("the rehearsal printed no JSON: {printed}"))?;
    verdict(json!({"measured": measured, "of_what_is_allowed": allowed_parts(&measured)}))
}

fn in_cluster(sizes: Sizes) -> Result<Value> {
    let Sizes { jobs, nodes, late, idle_s } = sizes;
    let mut bench = Bench::up("bench-tasks", nodes)?;
    let mut plan = json!({
        "nodes": nodes, "pods_per_node": 0, "namespaces": NAMESPACES, "system": SYSTEM, "folder": bench.folder(),
        "idle_s": idle_s, "running": jobs, "coming": late, "log": bench.log(),
    });
    bench.start_operator(&mut plan, &[])?;
    let measured = bench.crowd("tasks", &plan)?;
    eprintln!("bench: {measured}");
    bench.kill_operator();
    bench.start_operator(&mut plan, &[])?;
    let returned = bench.crowd("tasks-return", &plan)?;
    let allowed = cluster_parts(&measured, &returned);
    verdict(json!({"measured": measured, "after_a_crash": returned, "of_what_is_allowed": allowed}))
}

/// What was measured in front of an API server, as parts of what is allowed.
fn cluster_parts(measured: &Value, returned: &Value) -> Value {
    let pass = |pointer: &str| part(measured, pointer, LONGEST_PASS_S);
    // Allowed is nothing: the value is 0, or above 1.
    let writes = |figures: &Value, pointer: &str| part(figures, pointer, 0.5);
    json!({
        "reconcile_of_all": pass("/touch/reconcile_of_all_cpu_s"),
        // The operator reads the cluster once a second: what it uses in a second is the cost of such a pass.
        "pass_while_all_run": pass("/idle/cores"),
        "pass_in_a_full_cluster": pass("/full/cores"),
        "writes_while_all_run": writes(measured, "/idle/writes"),
        "writes_after_a_touch": writes(measured, "/touch/writes"),
        "writes_in_a_full_cluster": writes(measured, "/full/writes"),
        "writes_after_a_crash": writes(returned, "/until_it_is_quiet/writes"),
    })
}

/// What was measured as parts of what is allowed.
fn allowed_parts(measured: &Value) -> Value {
    let pass = |pointer: &str| part(measured, pointer, LONGEST_PASS_S);
    // Allowed is nothing: the value is 0, or above 1.
    let writes = |phase: &str| part(measured, &format!("/{phase}/writes"), 0.5);
    json!({
        "line_pass_with_room": pass("/line_pass_with_room_cpu_s"),
        "line_pass_without_room": pass("/line_pass_without_room_cpu_s"),
        "reconcile_of_all_while_all_wait": pass("/all_wait/reconcile_of_all_cpu_s"),
        "reconcile_of_all_while_all_run": pass("/all_run/reconcile_of_all_cpu_s"),
        "reconcile_of_all_in_a_full_cluster": pass("/full_and_as_many_wait/reconcile_of_all_cpu_s"),
        "decision_about_sizes": pass("/sizes/decision_cpu_s"),
        "writes_while_all_wait": writes("all_wait"),
        "writes_while_all_run": writes("all_run"),
        "writes_while_all_run_and_report": writes("all_run_and_report"),
        "writes_in_a_full_cluster": writes("full_and_as_many_wait"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_short_form_has_fewer_jobs() {
        let args = |short| Args { jobs: None, short, nodes: None, cluster: true, late: None, idle_s: None };
        assert_eq!(args(true).sizes().unwrap(), Sizes { jobs: 200, nodes: 100, late: 20, idle_s: 15 });
        assert_eq!(args(false).sizes().unwrap(), Sizes { jobs: 1000, nodes: 500, late: 100, idle_s: 60 });
        assert!(Args { nodes: Some(1), ..args(true) }.sizes().is_err(), "a node holds two jobs");
    }

    #[test]
    fn a_slow_pass_and_a_needless_write_are_above_one() {
        let phase = |cpu_s: f64, writes: u64| json!({"reconcile_of_all_cpu_s": cpu_s, "writes": writes});
        let parts = allowed_parts(&json!({
            "line_pass_with_room_cpu_s": 1.5, "line_pass_without_room_cpu_s": 0.5, "sizes": {"decision_cpu_s": 0.25},
            "all_wait": phase(0.1, 0), "all_run": phase(0.2, 1), "all_run_and_report": phase(0.1, 0),
            "full_and_as_many_wait": phase(0.1, 0),
        }));
        assert_eq!((&parts["line_pass_with_room"], &parts["decision_about_sizes"]), (&json!(1.5), &json!(0.25)));
        assert_eq!((&parts["writes_while_all_run"], &parts["writes_while_all_wait"]), (&json!(2.0), &json!(0.0)));
        assert!(
            allowed_parts(&json!({}))["decision_about_sizes"].is_null(),
            "a figure that is missing is not passed over"
        );
    }

    #[test]
    fn a_write_of_the_next_operator_is_above_one() {
        let measured = json!({"idle": {"cores": 0.25, "writes": 0.0}, "touch": {"reconcile_of_all_cpu_s": 2.0}});
        let parts = cluster_parts(&measured, &json!({"until_it_is_quiet": {"writes": 1.0}}));
        assert_eq!((&parts["pass_while_all_run"], &parts["reconcile_of_all"]), (&json!(0.25), &json!(2.0)));
        assert_eq!((&parts["writes_while_all_run"], &parts["writes_after_a_crash"]), (&json!(0.0), &json!(2.0)));
        assert!(parts["writes_after_a_touch"].is_null(), "a figure that is missing is not passed over");
    }
}
