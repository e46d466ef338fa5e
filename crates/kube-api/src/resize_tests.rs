//! Tests of [`super`]: hand-worked cases, then the properties over random pods.

use super::*;
use crate::fixtures::pod_on_node;
use crate::wire::ResizeObstacle;
use proptest::prelude::*;

const GIB: u64 = 1 << 30;

fn amounts(cpu_milli: Option<u64>, memory_bytes: Option<u64>) -> Amounts {
    Amounts { cpu_milli, memory_bytes }
}

fn pod(class: QosClass, requests: Amounts, limits: Amounts) -> PodOnNode {
    PodOnNode { class, ..pod_on_node("p", Resources { requests, limits }) }
}

fn changes(pods: &[(&PodOnNode, f64)]) -> Vec<(usize, Resources)> {
    super::changes(pods, 0)
}

#[test]
fn room_lets_pods_grow_beyond_what_they_requested() {
    let pods = [(&open(), 0.75), (&open(), 0.25)];
    assert_eq!(cpu(&super::changes(&pods, 600)), [(1, 400), (0, 1200)]);
    assert_eq!(cpu(&super::changes(&pods, 0)), [(1, 250), (0, 750)]);
}

/// Burstable, 500m requested, no CPU limit.
fn open() -> PodOnNode {
    pod(QosClass::Burstable, amounts(Some(500), Some(GIB)), amounts(None, None))
}

fn guaranteed(cpu: u64) -> PodOnNode {
    pod(QosClass::Guaranteed, amounts(Some(cpu), Some(GIB)), amounts(Some(cpu), Some(GIB)))
}

fn cpu(changes: &[(usize, Resources)]) -> Vec<(usize, u64)> {
    changes.iter().map(|(i, to)| (*i, to.requests.cpu_milli.unwrap())).collect()
}

#[test]
fn three_pods_share_what_they_requested() {
    let pods = [open(), open(), open()];
    let plan = changes(&[(&pods[0], 0.2), (&pods[1], 0.2), (&pods[2], 0.6)]);
    // The pool is 1500m; decreases come first.
    assert_eq!(cpu(&plan), [(0, 300), (1, 300), (2, 900)]);
    assert!(plan.iter().all(|(_, to)| to.limits == Amounts::default() && to.requests.memory_bytes.is_none()));
}

#[test]
fn a_burstable_pod_keeps_its_limit_and_stays_below_it() {
    let mut capped = open();
    capped.now.limits.cpu_milli = Some(800);
    capped.original = capped.now;
    let plan = changes(&[(&capped, 0.9), (&open(), 0.1)]);
    // 900m would be its part; 800m is its limit; the rest goes to the other.
    assert_eq!(cpu(&plan), [(1, 200), (0, 800)]);
}

#[test]
fn quota_mode_moves_the_limit_in_proportion() {
    let mut capped = pod(QosClass::Burstable, amounts(Some(500), None), amounts(Some(1000), None));
    capped.settings.mode = Mode::Quota;
    let to = shape(&capped, 250);
    assert_eq!((to.requests.cpu_milli, to.limits.cpu_milli), (Some(250), Some(500)));
    let mut uncapped = open();
    uncapped.settings.mode = Mode::Quota;
    assert_eq!(shape(&uncapped, 250).limits.cpu_milli, None, "a limit that was not there could not be removed again");
}

#[test]
fn guaranteed_pods_move_request_and_limit_together() {
    let to = shape(&guaranteed(1000), 1300);
    assert_eq!((to.requests.cpu_milli, to.limits.cpu_milli), (Some(1300), Some(1300)));
    assert_eq!(vet(&guaranteed(1000), &to), Ok(()));
}

#[test]
fn a_burstable_pod_does_not_become_guaranteed_by_accident() {
    let near = pod(QosClass::Burstable, amounts(Some(500), Some(GIB)), amounts(Some(800), Some(GIB)));
    let to = shape(&near, 800);
    assert_eq!(to.requests.cpu_milli, Some(799));
    let exact = Resources { requests: amounts(Some(800), None), limits: Amounts::default() };
    assert_eq!(vet(&near, &exact), Err(Refusal::Class { from: QosClass::Burstable }));
}

#[test]
fn blocked_pods_neither_move_nor_count() {
    let mut still = open();
    still.blocked = Some(ResizeObstacle { reason: "RestartContainer".into(), message: "it would restart".into() });
    let plan = changes(&[(&still, 0.5), (&open(), 0.25), (&open(), 0.25)]);
    assert_eq!(cpu(&plan), [], "the two others have equal parts of their own 1000m already");
    assert!(vet(&still, &Resources::default()).is_err());
}

#[test]
fn what_is_refused() {
    let request = |milli| Resources { requests: amounts(Some(milli), None), limits: Amounts::default() };
    let mut bounded = open();
    bounded.allowed.cpu_milli = Range { min: 100, max: 900 };
    assert!(matches!(vet(&bounded, &request(50)), Err(Refusal::OutOfBounds { min: 100, max: 900, .. })));
    assert!(matches!(vet(&bounded, &request(901)), Err(Refusal::OutOfBounds { .. })));
    assert_eq!(vet(&bounded, &request(900)), Ok(()));
    let limit = Resources { requests: Amounts::default(), limits: amounts(Some(1000), None) };
    assert!(matches!(vet(&open(), &limit), Err(Refusal::Added { what: "a CPU limit" })));
    let lowered = Resources { requests: Amounts::default(), limits: amounts(None, Some(GIB / 2)) };
    assert!(matches!(vet(&guaranteed(500), &lowered), Err(Refusal::MemoryLimitLowered { .. })));
    assert!(matches!(vet(&guaranteed(500), &request(400)), Err(Refusal::Class { from: QosClass::Guaranteed })));
    assert!(matches!(vet(&guaranteed(500), &request(600)), Err(Refusal::AboveLimit { .. })));
    let best_effort = pod(QosClass::BestEffort, Amounts::default(), Amounts::default());
    assert!(vet(&best_effort, &request(100)).is_err());
    let mut ratio = pod(QosClass::Burstable, amounts(Some(500), None), amounts(Some(1000), None));
    ratio.allowed.cpu_ratio_milli = Some(2000);
    assert!(matches!(vet(&ratio, &request(400)), Err(Refusal::Ratio { allowed_milli: 2000 })));
    assert_eq!(claim(&ratio, 1000, 0.0).min, 500, "the plan knows the ratio too");
}

#[test]
fn memory_follows_the_working_set() {
    let mut burstable = pod(QosClass::Burstable, amounts(Some(500), Some(4 * GIB)), amounts(None, Some(8 * GIB)));
    assert_eq!(memory_request(&burstable, GIB), None, "only if the policy says so");
    burstable.settings.memory = true;
    let request = memory_request(&burstable, GIB).unwrap();
    assert!(request > GIB && request < 13 * GIB / 10, "{request}");
    assert_eq!(memory_request(&burstable, 8 * GIB), Some(8 * GIB), "the limit is the end");
    burstable.allowed.memory_bytes.max = GIB / 2;
    assert_eq!(memory_request(&burstable, GIB), None, "rather no change than a request below use");
    let mut fixed = guaranteed(500);
    fixed.settings.memory = true;
    assert_eq!(memory_request(&fixed, GIB), None);
}

#[test]
fn small_moves_are_not_worth_a_write() {
    let now = Resources { requests: amounts(Some(1000), None), limits: Amounts::default() };
    let to = |milli| Resources { requests: amounts(Some(milli), None), limits: Amounts::default() };
    assert!(!is_worthwhile(&now, &to(1050)) && !is_worthwhile(&now, &to(950)));
    assert!(is_worthwhile(&now, &to(1051)) && is_worthwhile(&now, &to(949)));
    assert!(!is_worthwhile(&now, &Resources::default()));
}

/// [`open`], which has been resized.
fn resized(cpu_milli: u64) -> PodOnNode {
    let mut pod = open();
    pod.now.requests.cpu_milli = Some(cpu_milli);
    pod
}

#[test]
fn a_pod_a_little_above_its_part_is_lowered_where_another_one_grows() {
    // Parts of 500m, 450m and 550m; with 520m left to the first one they would be 1520m of 1500m.
    let pods = [resized(520), resized(500), resized(480)];
    let shares = [1.0 / 3.0, 0.3, 1.1 / 3.0];
    let with_shares = |pods: &[PodOnNode]| cpu(&changes(&pods.iter().zip(shares).collect::<Vec<_>>()));
    let plan = with_shares(&pods);
    assert_eq!(plan.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [0, 1, 2], "{plan:?}");
    assert!(plan.iter().map(|(_, milli)| milli).sum::<u64>() <= 1500, "{plan:?}");
    assert_eq!(with_shares(&[resized(490), resized(500), resized(480)]).len(), 2, "there is room without the first");
    assert_eq!(with_shares(&[resized(520), resized(450), resized(550)]), [], "no pod grows");
}

#[test]
fn no_more_pods_are_lowered_than_growth_needs() {
    // Parts of 1000m and three times 500m: 20m are missing, which the second pod alone gives.
    let mut large = resized(900);
    large.original.requests.cpu_milli = Some(1000);
    let others = [resized(520), resized(515), resized(485)];
    let pods: Vec<(&PodOnNode, f64)> = [(&large, 0.4)].into_iter().chain(others.iter().map(|pod| (pod, 0.2))).collect();
    let plan = cpu(&changes(&pods));
    assert_eq!(plan.iter().map(|(i, _)| *i).collect::<Vec<_>>(), [1, 0], "{plan:?}");
}

#[test]
fn nonsense_shares_give_equal_parts() {
    let pods = [open(), open()];
    for share in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
        assert_eq!(cpu(&changes(&[(&pods[0], share), (&pods[1], share)])), [], "{share}");
    }
}

fn any_pod() -> impl Strategy<Value = PodOnNode> {
    let numbers = (10u64..4000, 0u64..4000, 1u64..8, 0u64..3);
    (numbers, 0u8..4, any::<bool>(), 0.0f64..0.3, 0u64..300).prop_map(
        |((request, extra, gib, more), kind, quota, floor, min)| {
            let memory = gib * GIB;
            let mut pod = match kind {
                0 => guaranteed(request),
                1 => pod(QosClass::Burstable, amounts(Some(request), Some(memory)), amounts(None, None)),
                2 => pod(QosClass::Burstable, amounts(Some(request), None), amounts(Some(request + extra), None)),
                _ => pod(
                    QosClass::Burstable,
                    amounts(Some(request), Some(memory)),
                    amounts(Some(request + extra + 1), Some(memory + more * GIB)),
                ),
            };
            pod.settings.mode = if quota { Mode::Quota } else { Mode::Weight };
            pod.settings.floor = floor;
            pod.allowed.cpu_milli = Range { min: min.min(request).max(1), max: 8000 };
            pod
        },
    )
}

fn any_shares() -> impl Strategy<Value = Vec<(PodOnNode, f64)>> {
    prop::collection::vec((any_pod(), 0.0f64..1.0), 1..12)
}

fn refs(pods: &[(PodOnNode, f64)]) -> Vec<(&PodOnNode, f64)> {
    pods.iter().map(|(pod, share)| (pod, *share)).collect()
}

proptest! {
    #[test]
    fn conservation(pool in 0u64..100_000, claims in prop::collection::vec((0.0f64..1.0, 0u64..500, 0u64..20_000), 1..20)) {
        let claims: Vec<PoolClaim> = claims.into_iter().map(|(share, min, max)| PoolClaim { share, min, max }).collect();
        let parts = divide(pool, &claims);
        let least: u64 = claims.iter().map(|c| c.min).sum();
        prop_assert!(parts.iter().sum::<u64>() <= pool.max(least));
        // Nothing is wasted either, beyond rounding, unless everyone has all it may.
        let most: u64 = claims.iter().map(|c| c.max.max(c.min)).sum();
        let wanted = claims.iter().any(|c| c.share > 0.0);
        let idle = claims.iter().any(|c| c.share == 0.0);
        prop_assert!(!wanted || idle || parts.iter().sum::<u64>() + claims.len() as u64 >= pool.min(most));
    }

    #[test]
    fn floor_respected(pods in any_shares()) {
        let pool = pool_milli(pods.iter().map(|(pod, _)| pod));
        for (pod, share) in &pods {
            let claim = claim(pod, pool, *share);
            let parts = divide(pool, &[claim]);
            prop_assert!(claim.min <= claim.max && parts[0] >= claim.min.min(pool.max(claim.min)));
        }
    }

    #[test]
    fn permutation_invariant(pool in 1u64..100_000, claims in prop::collection::vec((0.001f64..1.0, 0u64..500, 500u64..20_000), 1..10)) {
        let claims: Vec<PoolClaim> = claims.into_iter().map(|(share, min, max)| PoolClaim { share, min, max }).collect();
        let mut turned = claims.clone();
        turned.reverse();
        let mut parts = divide(pool, &turned);
        parts.reverse();
        // Sums of floats differ in the last bit with the order, which can move a rounding by one.
        prop_assert!(divide(pool, &claims).iter().zip(&parts).all(|(a, b)| a.abs_diff(*b) <= 1));
    }

    #[test]
    fn plans_pass_the_vet(pods in any_shares()) {
        for (i, to) in changes(&refs(&pods)) {
            prop_assert_eq!(vet(&pods[i].0, &to), Ok(()), "{:?} to {:?}", pods[i].0.now, to);
        }
    }

    #[test]
    fn class_kept(pods in any_shares()) {
        for (i, to) in changes(&refs(&pods)) {
            let after = to.over(pods[i].0.now);
            prop_assert_eq!(after.is_guaranteed(), pods[i].0.class == QosClass::Guaranteed);
        }
    }

    #[test]
    fn idempotent(mut pods in any_shares()) {
        for (i, to) in changes(&refs(&pods)) {
            pods[i].0.now = to.over(pods[i].0.now);
        }
        prop_assert_eq!(changes(&refs(&pods)), vec![]);
    }

    #[test]
    fn downs_first(pods in any_shares()) {
        let plan = changes(&refs(&pods));
        let ups: Vec<bool> = plan.iter().map(|(i, to)| is_up(&pods[*i].0.now, to)).collect();
        prop_assert!(ups.is_sorted(), "{:?}", ups);
    }

    #[test]
    fn growth_fits(pods in prop::collection::vec((100u64..4000, 0.9f64..1.1, 0.01f64..1.0), 1..12)) {
        let resized = |(request, factor, share): (u64, f64, f64)| {
            let mut pod = pod(QosClass::Burstable, amounts(Some(request), Some(GIB)), amounts(None, None));
            pod.now.requests.cpu_milli = Some((request as f64 * factor) as u64);
            (pod, share)
        };
        let mut pods: Vec<(PodOnNode, f64)> = pods.into_iter().map(resized).collect();
        let plan = changes(&refs(&pods));
        let grows = plan.iter().any(|(i, to)| is_up(&pods[*i].0.now, to));
        for (i, to) in plan {
            pods[i].0.now = to.over(pods[i].0.now);
        }
        let sum: u64 = pods.iter().filter_map(|(pod, _)| pod.now.requests.cpu_milli).sum();
        prop_assert!(!grows || sum <= pool_milli(pods.iter().map(|(pod, _)| pod)));
    }

    /// Numbers come from tenants and from node agents.
    #[test]
    fn no_numbers_panic(
        numbers in prop::collection::vec(prop::option::of(prop_oneof![Just(u64::MAX), Just(0), any::<u64>()]), 12),
        class in 0u8..3,
        quota_mode in any::<bool>(),
        share in prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(0.0), Just(5e-324), any::<f64>()],
    ) {
        let n = |i: usize| numbers[i];
        let class = [QosClass::Guaranteed, QosClass::Burstable, QosClass::BestEffort][usize::from(class)];
        let mut pod = pod(class, amounts(n(0), n(1)), amounts(n(2), n(3)));
        pod.now = Resources { requests: amounts(n(4), n(5)), limits: amounts(n(6), n(7)) };
        pod.allowed.cpu_milli = Range { min: n(8).unwrap_or(0), max: n(9).unwrap_or(u64::MAX) };
        pod.allowed.cpu_ratio_milli = n(10);
        pod.settings.floor = share;
        pod.settings.memory = true;
        if quota_mode {
            pod.settings.mode = Mode::Quota;
        }
        let pods = [(&pod, share), (&pod, 0.5), (&pod, 1.0)];
        for (i, to) in changes(&pods) {
            let _ = (vet(pods[i].0, &to), is_worthwhile(&pod.now, &to), is_up(&pod.now, &to));
        }
        let anything = Resources { requests: amounts(n(9), n(10)), limits: amounts(n(11), n(8)) };
        let _ = (vet(&pod, &anything), memory_request(&pod, n(11).unwrap_or(u64::MAX)));
    }
}
