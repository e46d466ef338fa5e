//! Where recorded decisions are served inside a cluster, and how a request names the job.
//!
//! **Problem.** A share is decided by the node agent of the pod's node; where a job runs is decided by the
//! operator. Both keep their last decisions. A user who wants to replay one must reach the right process.
//!
//! **How.** Each of the two listens on the loopback interface of its own pod and answers `GET`
//! [`RECORD_PATH`]`?uid=UID` with a `RecordedDecision` of the core as JSON. The loopback interface of a pod
//! is reached by a port-forward through the API server only, so the rights of the cluster
//! (`pods/portforward`) decide which users get a record.
//!
//! **Terms.** *UID*: of the pod for a node agent; of the TrainingJob or Job for the operator. A record
//! contains numbers only. The header [`JOB_HEADER`] of the answer says which number the job has in it.

/// The port on the loopback interface of the pods of node agents and operator.
pub const RECORD_PORT: u16 = 9811;

/// The path of the request; its query is `uid=UID`.
pub const RECORD_PATH: &str = "/decision";

/// The header with the job's number in the record, such as `job-3`.
pub const JOB_HEADER: &str = "gainshare-job";

/// Labels of the pods of node agents, as the chart sets them.
pub const AGENT_SELECTOR: &str = "app.kubernetes.io/name=gainshare,app.kubernetes.io/component=agent";

/// Labels of the pods of the operator, as the chart sets them. The leader has [`crate::names::LEADER_LABEL`]
/// too.
pub const OPERATOR_SELECTOR: &str = "app.kubernetes.io/name=gainshare,app.kubernetes.io/component=operator";

/// The namespace of the installation, unless the user names another one.
pub const SYSTEM_NAMESPACE: &str = "gainshare-system";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chart_uses_this_port_and_these_labels() {
        for (file, selector) in [("agent.yaml", AGENT_SELECTOR), ("operator.yaml", OPERATOR_SELECTOR)] {
            let path = format!("{}/../../deploy/chart/templates/{file}", env!("CARGO_MANIFEST_DIR"));
            let template = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
            assert!(template.contains(&format!("--record-listen=127.0.0.1:{RECORD_PORT}\n")), "{file}");
            assert!(!template.contains("hostNetwork"), "{file}: the loopback interface would be the node's");
            for label in selector.split(',') {
                assert!(template.contains(&label.replace('=', ": ")), "{file}: {label}");
            }
        }
    }
}
