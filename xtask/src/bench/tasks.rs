//! What distributed jobs cost the operator: a thousand jobs of eight tasks on a thousand nodes.
//!
//! The cluster is in the memory of one process (`crates/operator/src/rehearsal.rs`), and the code that decides is the
//! operator's own. Every threshold is printed as the ratio of the measured value to the allowed value: above 1 it is
//! broken, and the command fails.

use super::kube::{part, verdict};
use crate::sh;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How many jobs of two servers and six workers.
    #[arg(long, default_value_t = 1000)]
    jobs: u32,
    /// How many nodes; each holds two jobs.
    #[arg(long, default_value_t = 1000)]
    nodes: u32,
}

/// Processor time that a pass over all jobs may take.
const LONGEST_PASS_S: f64 = 1.0;

pub(crate) fn run(args: &Args) -> Result<Value> {
    ensure!(args.jobs > 0, "there must be a job");
    ensure!(args.nodes >= args.jobs.div_ceil(2), "a node holds two jobs: --nodes must be at least half of --jobs");
    let mut measure = sh::cargo();
    measure.args(["run", "--release", "--quiet", "--package", "gainshare-operator", "--example", "tasks", "--"]);
    let printed = sh::output(measure.args([args.jobs.to_string(), args.nodes.to_string()]))?;
    let measured: Value =
        serde_json::from_str(&printed).with_context(|| format!("the rehearsal printed no JSON: {printed}"))?;
    verdict(json!({"measured": measured, "of_what_is_allowed": judge(&measured)}))
}

/// What was measured as parts of what is allowed.
fn judge(measured: &Value) -> Value {
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
    fn a_slow_pass_and_a_needless_write_are_above_one() {
        let phase = |cpu_s: f64, writes: u64| json!({"reconcile_of_all_cpu_s": cpu_s, "writes": writes});
        let judged = judge(&json!({
            "line_pass_with_room_cpu_s": 1.5, "line_pass_without_room_cpu_s": 0.5, "sizes": {"decision_cpu_s": 0.25},
            "all_wait": phase(0.1, 0), "all_run": phase(0.2, 1), "all_run_and_report": phase(0.1, 0),
            "full_and_as_many_wait": phase(0.1, 0),
        }));
        assert_eq!((&judged["line_pass_with_room"], &judged["decision_about_sizes"]), (&json!(1.5), &json!(0.25)));
        assert_eq!((&judged["writes_while_all_run"], &judged["writes_while_all_wait"]), (&json!(2.0), &json!(0.0)));
        assert!(judge(&json!({}))["decision_about_sizes"].is_null(), "a figure that is missing is not passed over");
    }
}
