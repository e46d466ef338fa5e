//! Tests of [`super`].

use super::*;
use crate::fixtures::{facts, manifest};
use crate::resources::Amounts;
use serde_json::{Value, json};

fn range(limits: Value) -> RangeFacts {
    RangeFacts::of(&serde_json::from_value(json!({"spec": {"limits": limits}})).unwrap())
}

fn cpu(request: u64) -> Resources {
    Resources { requests: Amounts { cpu_milli: Some(request), memory_bytes: None }, limits: Amounts::default() }
}

#[test]
fn the_narrowest_of_all_ranges_and_the_node() {
    let pod = facts(&manifest());
    let node = NodeFacts { cpu_milli: Some(4000), memory_bytes: Some(8 << 30), ..NodeFacts::default() };
    let wide = range(json!([{"type": "Container", "min": {"cpu": "100m"}, "max": {"cpu": "3"}}]));
    let narrow = range(
        json!([{"type": "Container", "max": {"cpu": "2500m", "memory": "4Gi"}, "maxLimitRequestRatio": {"cpu": "3"}}]),
    );
    let found = bounds(&pod, "main", &cpu(500), [&wide, &narrow], Some(&node));
    assert_eq!(found.cpu_milli, Range { min: 100, max: 2500 });
    assert_eq!(found.memory_bytes.max, 4 << 30);
    assert_eq!(found.cpu_ratio_milli, Some(3000));
    let free = bounds(&pod, "main", &cpu(500), [], Some(&node));
    assert_eq!(free.cpu_milli, Range { min: LEAST_CPU_MILLI, max: 4000 });
}

#[test]
fn an_authors_own_value_is_always_allowed() {
    let pod = facts(&manifest());
    let later = range(json!([{"type": "Container", "max": {"cpu": "300m"}}]));
    assert_eq!(bounds(&pod, "main", &cpu(500), [&later], None).cpu_milli.max, 500);
    let tiny = bounds(&pod, "main", &cpu(5), [], None);
    assert_eq!(tiny.cpu_milli.min, 5);
}

#[test]
fn a_pods_other_containers_take_from_the_pods_range() {
    let mut two = manifest();
    let side = json!({"name": "side", "resources": {"requests": {"cpu": "200m"}}});
    two["spec"]["containers"].as_array_mut().unwrap().push(side);
    let whole = range(json!([{"type": "Pod", "max": {"cpu": "1"}}]));
    assert_eq!(bounds(&facts(&two), "main", &cpu(500), [&whole], None).cpu_milli.max, 800);
}

#[test]
fn quotas_stop_increases_only() {
    let quota: ResourceQuota = serde_json::from_value(json!({
        "metadata": {"name": "team-quota"},
        "status": {"hard": {"requests.cpu": "2", "pods": "10"}, "used": {"requests.cpu": "1900m", "pods": "3"}},
    }))
    .unwrap();
    let quota = QuotaFacts::of(&quota);
    assert!(over_quota([&quota], &cpu(500), &cpu(600)).is_ok());
    assert!(over_quota([&quota], &cpu(500), &cpu(10)).is_ok());
    let refusal = over_quota([&quota], &cpu(500), &cpu(601)).unwrap_err().to_string();
    assert!(refusal.contains("team-quota") && refusal.contains("requests.cpu"), "{refusal}");
}
