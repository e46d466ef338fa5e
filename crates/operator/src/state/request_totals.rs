//! What pods request of their nodes.

use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{JOB_LABEL, NodeName, PLACEHOLDER_LABEL};
use gainshare_kube_api::quantity::total;

/// What pods of training jobs, and all others, request: thousandths of a core, and bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RequestTotals {
    pub(crate) jobs: (u64, u64),
    pub(crate) others: (u64, u64),
}

impl RequestTotals {
    pub(super) fn with(self, other: RequestTotals, put: fn(u64, u64) -> u64) -> RequestTotals {
        let both = |a: (u64, u64), b: (u64, u64)| (put(a.0, b.0), put(a.1, b.1));
        RequestTotals { jobs: both(self.jobs, other.jobs), others: both(self.others, other.others) }
    }
}

/// What a pod that holds a part of a node requests of it. Placeholders count as nothing, because they give way. The
/// label of a placeholder counts in the operator's own namespace only: tenants can write it elsewhere.
pub(super) fn requests_of<'a>(pod: &'a PodFacts, own_namespace: &str) -> Option<(&'a NodeName, RequestTotals)> {
    let gives_way = pod.namespace == own_namespace && pod.labels.contains_key(PLACEHOLDER_LABEL);
    let node = pod.node.as_ref().filter(|_| pod.holds_node && !gives_way)?;
    let requests = || pod.containers.iter().map(|container| container.resources.requests);
    let milli = total(requests().filter_map(|asked| asked.cpu_milli));
    let bytes = total(requests().filter_map(|asked| asked.memory_bytes));
    let mut asked = RequestTotals::default();
    *(if pod.labels.contains_key(JOB_LABEL) { &mut asked.jobs } else { &mut asked.others }) = (milli, bytes);
    Some((node, asked))
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_kube_api::facts::ContainerFacts;

    #[test]
    fn only_placeholders_of_the_operators_namespace_count_as_nothing() {
        let mut container = ContainerFacts::default();
        container.resources.requests.cpu_milli = Some(3000);
        let pod = |namespace: &str| PodFacts {
            namespace: namespace.to_owned(),
            node: Some("n".into()),
            holds_node: true,
            labels: [(PLACEHOLDER_LABEL.to_owned(), "a".to_owned())].into(),
            containers: vec![container.clone()],
            ..PodFacts::default()
        };
        assert_eq!(requests_of(&pod("system"), "system"), None);
        let counted = RequestTotals { others: (3000, 0), ..RequestTotals::default() };
        assert_eq!(requests_of(&pod("team"), "system"), Some((&"n".into(), counted)), "a tenant wrote the label");
    }
}
