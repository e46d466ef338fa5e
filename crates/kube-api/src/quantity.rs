//! Kubernetes quantities ("500m", "1.5", "2Gi") as the whole numbers we count in, and back.
//!
//! The library parses the grammar. This module adds two rules. A quantity is rounded up, as the API
//! server does, so that a container never gets less than its author wrote. A quantity that no
//! machine can have (negative, not a number, too large) is absent.
//!
//! **Property.** `sums_never_overflow`: quantities come from tenants, so every sum of them
//! saturates ([`total`]).

use crate::resources::{Amounts, Resources};
use k8s_openapi::api::core::v1::{PodTemplateSpec, ResourceRequirements};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube_quantity::ParsedQuantity;
use std::collections::BTreeMap;

/// More thousandths of a core than any cluster has (a billion cores): a larger quantity is a
/// mistake.
const LARGEST_CPU_MILLI: f64 = 1e12;

/// More bytes than any machine has (8 PiB, the largest count that a double holds exactly): a larger
/// quantity is a mistake.
const LARGEST_BYTES: f64 = 9_007_199_254_740_992.0;

fn units(quantity: &Quantity, per_unit: f64, largest: f64) -> Option<u64> {
    let parsed = ParsedQuantity::try_from(quantity).ok()?.to_bytes_f64()?;
    let scaled = parsed * per_unit;
    // One part in a million is what a float may have added: it must not round a whole number up.
    let whole = (scaled - 1e-6).ceil();
    (0.0..largest).contains(&scaled).then_some(whole.max(0.0) as u64)
}

/// Thousandths of a core.
pub fn cpu_milli(quantity: &Quantity) -> Option<u64> {
    units(quantity, 1000.0, LARGEST_CPU_MILLI)
}

/// Bytes, or any other count.
pub fn whole(quantity: &Quantity) -> Option<u64> {
    units(quantity, 1.0, LARGEST_BYTES)
}

/// The sum, or the largest number if the sum is larger still.
pub fn total(values: impl IntoIterator<Item = u64>) -> u64 {
    values.into_iter().fold(0, u64::saturating_add)
}

/// What the containers of a pod template request together: thousandths of a core, and bytes. A
/// container without a request counts with its limit, as the API server does it.
pub fn template_requests(template: &PodTemplateSpec) -> (u64, u64) {
    let containers = || template.spec.iter().flat_map(|spec| &spec.containers);
    let requested = |pick: fn(&Amounts) -> Option<u64>| {
        total(containers().map(|container| {
            let resources = resources(container.resources.as_ref());
            pick(&resources.requests).or(pick(&resources.limits)).unwrap_or(0)
        }))
    };
    (requested(|amounts| amounts.cpu_milli), requested(|amounts| amounts.memory_bytes))
}

fn amounts(map: Option<&BTreeMap<String, Quantity>>) -> Amounts {
    let get = |name: &str| map.and_then(|map| map.get(name));
    Amounts { cpu_milli: get("cpu").and_then(cpu_milli), memory_bytes: get("memory").and_then(whole) }
}

/// What a container asks for.
pub fn resources(requirements: Option<&ResourceRequirements>) -> Resources {
    Resources {
        requests: amounts(requirements.and_then(|r| r.requests.as_ref())),
        limits: amounts(requirements.and_then(|r| r.limits.as_ref())),
    }
}

fn write_amounts(amounts: Amounts) -> Option<BTreeMap<String, Quantity>> {
    let cpu = amounts.cpu_milli.map(|milli| ("cpu".to_owned(), Quantity(format!("{milli}m"))));
    let memory = amounts.memory_bytes.map(|bytes| ("memory".to_owned(), Quantity(bytes.to_string())));
    let map: BTreeMap<String, Quantity> = cpu.into_iter().chain(memory).collect();
    (!map.is_empty()).then_some(map)
}

/// The same, for a patch: absent values are not in it.
pub fn write(resources: Resources) -> ResourceRequirements {
    ResourceRequirements {
        requests: write_amounts(resources.requests),
        limits: write_amounts(resources.limits),
        claims: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn quantity(text: &str) -> Quantity {
        Quantity(text.to_owned())
    }

    #[test]
    fn as_kubernetes_reads_them() {
        for (text, milli) in [
            ("500m", 500),
            ("1", 1000),
            ("1.5", 1500),
            ("0.1", 100),
            ("2k", 2_000_000),
            ("1e1", 10_000),
            ("100u", 1),
            ("0", 0),
        ] {
            assert_eq!(cpu_milli(&quantity(text)), Some(milli), "{text}");
        }
        for (text, bytes) in [
            ("1Gi", 1 << 30),
            ("1G", 1_000_000_000),
            ("512Mi", 512 << 20),
            ("1.5Gi", 3 << 29),
            ("128974848", 128_974_848),
            ("1e3", 1000),
        ] {
            assert_eq!(whole(&quantity(text)), Some(bytes), "{text}");
        }
    }

    #[test]
    fn nonsense_is_absent() {
        for text in ["", "abc", "-1", "1 Gi", "1Xi", "NaN", "9e99", "999999999999999"] {
            assert_eq!(cpu_milli(&quantity(text)), None, "{text:?}");
        }
        assert_eq!(whole(&quantity("999999999999999999")), None);
        assert_eq!(whole(&quantity("6Ti")), Some(6 << 40), "large machines exist");
    }

    #[test]
    fn sums_never_overflow() {
        assert_eq!(total([u64::MAX, 1, u64::MAX]), u64::MAX);
        let container = |name: usize| serde_json::json!({"name": name.to_string(), "resources": {"requests": {"cpu": "999999999", "memory": "7Pi"}}});
        let containers: Vec<serde_json::Value> = (0..3000).map(container).collect();
        let template = serde_json::json!({"spec": {"containers": containers}});
        let template: PodTemplateSpec = serde_json::from_value(template).unwrap();
        assert_eq!(template_requests(&template), (3000 * 999_999_999_000, u64::MAX));
    }

    proptest! {
        #[test]
        fn round_trip(cpu in 1u64..1_000_000, memory in 1u64..(1 << 50)) {
            let amounts = Amounts { cpu_milli: Some(cpu), memory_bytes: Some(memory) };
            let there = Resources { requests: amounts, limits: amounts };
            prop_assert_eq!(resources(Some(&write(there))), there);
        }

        #[test]
        fn never_panics(text in "\\PC{0,12}") {
            let _ = (cpu_milli(&quantity(&text)), whole(&quantity(&text)));
        }
    }
}
