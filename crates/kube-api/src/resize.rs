//! From shares to resources, and which changes of a pod are allowed. Pure functions: the node agent
//! plans with them, and the operator checks with them.
//!
//! **Problem.** A decision says "this job should have 62 % of what the jobs of this node have".
//! Kubernetes knows requests, which become CPU weights, and limits, which become hard caps. It
//! refuses a resize that would change a pod's QoS class, remove a value, or leave a LimitRange.
//!
//! **How.** The *pool* is what the selected pods of one policy requested on this node before our
//! first change. Shares divide the pool, so no pod outside the policy loses anything. While deadlines
//! are promised, the pool also has a part of what no pod of the node requests (*room*). [`divide`]
//! splits the pool by shares within each pod's bounds. [`shape`] turns a pod's part into requests
//! and limits by its class. A Burstable pod's request moves and its limit stays; in `quota` mode
//! the limit moves in proportion. A Guaranteed pod's request and limit move together, as the class
//! demands. [`changes`] leaves out changes that are not worth a write and puts decreases before
//! increases, so that the node is never promised twice. [`vet`] is written independently of the
//! planning code and refuses every change that breaks a rule.
//!
//! **Properties**, each a test of that name: `conservation` (parts never sum to more than the pool,
//! unless the least parts already do), `floor_respected`, `class_kept`, `idempotent`,
//! `downs_first`, `growth_fits`, `permutation_invariant`, `plans_pass_the_vet`, `no_numbers_panic`.
//!
//! **Units.** CPU in thousandths of a core, memory in bytes.

pub use crate::resources::{Amounts, Bounds, LEAST_CPU_MILLI, Range, Resources};

use crate::quantity::total;
use crate::wire::{Mode, PodOnNode, QosClass};

/// A request is written only if it moves by more than this part of what it is, or if another pod needs
/// the room. Kernel weights below that are not felt.
pub const DEADBAND: f64 = 0.05;

/// A memory request is this much larger than the working set: it is read seconds before the kubelet
/// acts on it.
pub const MEMORY_HEADROOM: f64 = 1.2;

/// Memory requests are whole multiples of this, so that a wobbling working set does not make a
/// write each time.
const MEMORY_STEP_BYTES: u64 = 16 << 20;

/// Enough to bring any interval of doubles down to neighbours that round alike.
const HALVINGS: usize = 128;

/// One pod's claim on a pool.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PoolClaim {
    /// The pod's share, 0 to 1; shares need not sum to one.
    pub share: f64,
    pub min: u64,
    pub max: u64,
}

/// Splits `pool` in proportion to shares, each part within its claim's bounds; what one cannot take
/// goes to the others.
///
/// Parts sum to at most the pool, unless the least parts alone exceed it: then everyone gets the
/// least part. Parts are whole, rounded down, so up to one unit per claim is left.
pub fn divide(pool: u64, claims: &[PoolClaim]) -> Vec<u64> {
    let share = |claim: &PoolClaim| if claim.share.is_finite() { claim.share.clamp(0.0, 1.0) } else { 0.0 };
    // No pod has a share (all are zero or unreadable): equal parts.
    let equal = claims.iter().all(|claim| share(claim) <= 0.0);
    let share = |claim: &PoolClaim| if equal { 1.0 } else { share(claim) };
    // One factor for all: the largest at which the parts, each cut to its bounds, still fit the
    // pool. The sum of whole parts only grows with the factor, so halving finds it, and it does not
    // depend on the order of the claims.
    let part = |claim: &PoolClaim, factor: f64| {
        let max = claim.max.max(claim.min);
        ((factor * share(claim)).clamp(claim.min as f64, max as f64).floor() as u64).clamp(claim.min, max)
    };
    let fits =
        |factor: f64| claims.iter().map(|claim| u128::from(part(claim, factor))).sum::<u128>() <= u128::from(pool);
    let least = claims.iter().map(share).filter(|share| *share > 0.0).fold(1.0, f64::min);
    let (mut low, mut high) = (0.0, 2.0 * pool as f64 / least);
    for _ in 0..HALVINGS {
        let middle = (low + high) / 2.0;
        if fits(middle) { low = middle } else { high = middle }
    }
    claims.iter().map(|claim| part(claim, low)).collect()
}

/// What the pods of one policy on one node requested together before our first change.
pub fn pool_milli<'a>(pods: impl IntoIterator<Item = &'a PodOnNode>) -> u64 {
    total(pods.into_iter().filter(|pod| pod.blocked.is_none()).filter_map(|pod| pod.original.requests.cpu_milli))
}

/// A pod's claim at a share of `pool`: bounds, floor and the rules of its class in numbers.
pub fn claim(pod: &PodOnNode, pool: u64, share: f64) -> PoolClaim {
    let floor = (pool as f64 * pod.settings.floor.clamp(0.0, 1.0)).floor() as u64;
    let range = pod.allowed.cpu_milli;
    let mut max = range.max;
    if pod.class != QosClass::Guaranteed
        && let Some(limit) = movable_limit(pod).or(pod.now.limits.cpu_milli)
    {
        max = max.min(limit);
    }
    let mut min = range.min.max(LEAST_CPU_MILLI).max(floor);
    if let (Some(ratio), Some(limit), true) =
        (pod.allowed.cpu_ratio_milli, pod.now.limits.cpu_milli, moves_request_only(pod))
    {
        min = min.max(limit.saturating_mul(1000).div_ceil(ratio.max(1)));
    }
    PoolClaim { share, min: min.min(max), max }
}

/// How far the limit itself may rise, where it moves with the request.
fn movable_limit(pod: &PodOnNode) -> Option<u64> {
    (!moves_request_only(pod)).then_some(pod.allowed.cpu_milli.max)
}

fn moves_request_only(pod: &PodOnNode) -> bool {
    pod.class != QosClass::Guaranteed && (pod.settings.mode == Mode::Weight || pod.original.limits.cpu_milli.is_none())
}

/// The requests and limits that give a pod `cpu_milli`, keeping its class. Memory is absent: it
/// does not change.
pub fn shape(pod: &PodOnNode, cpu_milli: u64) -> Resources {
    let Some(original) = pod.original.requests.cpu_milli else { return Resources::default() };
    let cpu = pod.allowed.cpu_milli.clamp(cpu_milli.max(LEAST_CPU_MILLI));
    let (request, limit) = if pod.class == QosClass::Guaranteed {
        (cpu, Some(cpu))
    } else if moves_request_only(pod) {
        (pod.now.limits.cpu_milli.map_or(cpu, |limit| cpu.min(limit)), None)
    } else {
        let whole = pod.original.limits.cpu_milli.unwrap_or(original);
        let scaled = (whole as f64 * cpu as f64 / original.max(1) as f64).round() as u64;
        (cpu, Some(pod.allowed.cpu_milli.clamp(scaled.max(cpu))))
    };
    let mut to = Resources {
        requests: Amounts { cpu_milli: Some(request), memory_bytes: None },
        limits: Amounts { cpu_milli: limit, memory_bytes: None },
    };
    // A Burstable pod whose only container has all requests equal to its limits would become
    // Guaranteed, which the API server refuses.
    if pod.class == QosClass::Burstable && to.over(pod.now).is_guaranteed() {
        match limit {
            Some(limit) if limit < u64::MAX && pod.allowed.cpu_milli.contains(limit + 1) => {
                to.limits.cpu_milli = Some(limit + 1);
            }
            _ => to.requests.cpu_milli = Some(request.saturating_sub(1)),
        }
    }
    to
}

/// The memory request that follows a working set: above it by the headroom, within bounds, never
/// above the limit. `None` for a Guaranteed pod: its limit would have to follow, and a limit that
/// shrinks can kill.
pub fn memory_request(pod: &PodOnNode, working_set_bytes: u64) -> Option<u64> {
    if !pod.settings.memory || pod.class != QosClass::Burstable || pod.now.requests.memory_bytes.is_none() {
        return None;
    }
    let wanted = (working_set_bytes as f64 * MEMORY_HEADROOM) as u64;
    let stepped = wanted.div_ceil(MEMORY_STEP_BYTES).max(1).saturating_mul(MEMORY_STEP_BYTES);
    let bounded = pod.allowed.memory_bytes.clamp(stepped).min(pod.now.limits.memory_bytes.unwrap_or(u64::MAX));
    (bounded >= working_set_bytes.min(pod.now.limits.memory_bytes.unwrap_or(u64::MAX))).then_some(bounded)
}

/// Whether going from `now` to `to` is worth a write.
pub fn is_worthwhile(now: &Resources, to: &Resources) -> bool {
    let moved = |now: Option<u64>, to: Option<u64>| match (now, to) {
        (_, None) => false,
        (None, Some(_)) => true,
        (Some(now), Some(to)) => now.abs_diff(to) as f64 > now as f64 * DEADBAND,
    };
    moved(now.requests.cpu_milli, to.requests.cpu_milli)
        || moved(now.limits.cpu_milli, to.limits.cpu_milli)
        || moved(now.requests.memory_bytes, to.requests.memory_bytes)
        || moved(now.limits.memory_bytes, to.limits.memory_bytes)
}

/// The changes that give the pods of one policy on one node these shares, decreases first. A pod
/// that has its share (nearly) already, or cannot be resized, is left out. A pod that is a little above
/// its share is lowered all the same if another one could not grow otherwise. The answer holds
/// indices into `pods`.
///
/// `room_milli` is by how much the pods may together exceed what they requested, because deadlines
/// need it.
pub fn changes(pods: &[(&PodOnNode, f64)], room_milli: u64) -> Vec<(usize, Resources)> {
    let pool = pool_milli(pods.iter().map(|(pod, _)| *pod)).saturating_add(room_milli);
    let movable: Vec<usize> = (0..pods.len()).filter(|&i| pods[i].0.blocked.is_none()).collect();
    let claims: Vec<PoolClaim> = movable.iter().map(|&i| claim(pods[i].0, pool, pods[i].1)).collect();
    let planned = movable.iter().zip(divide(pool, &claims)).map(|(&i, part)| (i, shape(pods[i].0, part)));
    let (mut wanted, small): (Vec<_>, Vec<_>) = planned.partition(|(i, to)| is_worthwhile(&pods[*i].0.now, to));
    let needed = decreases_for_growth(pods, pool, &wanted, small);
    wanted.extend(needed);
    wanted.sort_by_key(|(i, to)| (is_up(&pods[*i].0.now, to), *i));
    wanted
}

/// The small changes without which the increases among `wanted` would not fit the pool: the largest decreases, as many
/// as are needed. A pod that stays a little above its part must not keep another one from its growth.
fn decreases_for_growth(
    pods: &[(&PodOnNode, f64)],
    pool: u64,
    wanted: &[(usize, Resources)],
    small: Vec<(usize, Resources)>,
) -> Vec<(usize, Resources)> {
    let now_milli = |i: usize| pods[i].0.now.requests.cpu_milli.unwrap_or(0);
    let to_milli = |(i, to): &(usize, Resources)| to.requests.cpu_milli.unwrap_or_else(|| now_milli(*i));
    if wanted.iter().all(|change| to_milli(change) <= now_milli(change.0)) {
        return Vec::new();
    }
    let sum = total(wanted.iter().map(to_milli).chain(small.iter().map(|(i, _)| now_milli(*i))));
    let mut excess = sum.saturating_sub(pool);
    let decrease = |change: &(usize, Resources)| now_milli(change.0).saturating_sub(to_milli(change));
    let mut decreases: Vec<_> = small.into_iter().filter(|change| decrease(change) > 0).collect();
    decreases.sort_by_key(|change| (std::cmp::Reverse(decrease(change)), change.0));
    let is_needed = |change: &(usize, Resources)| {
        let is_needed = excess > 0;
        excess = excess.saturating_sub(decrease(change));
        is_needed
    };
    decreases.into_iter().take_while(is_needed).collect()
}

/// Whether a change lowers the CPU request. Such a change is carried out however small it is: it is requested only
/// where another pod needs the room.
pub fn lowers_cpu(now: &Resources, to: &Resources) -> bool {
    matches!((now.requests.cpu_milli, to.requests.cpu_milli), (Some(now), Some(to)) if to < now)
}

/// Whether a change asks for more CPU or memory than before: those come after the decreases.
pub fn is_up(now: &Resources, to: &Resources) -> bool {
    let more = |now: Option<u64>, to: Option<u64>| to.is_some_and(|to| to > now.unwrap_or(0));
    more(now.requests.cpu_milli, to.requests.cpu_milli) || more(now.requests.memory_bytes, to.requests.memory_bytes)
}

/// Why a change must not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{0}")]
    Blocked(String),
    #[error("{what} cannot be added by a resize, because it could not be removed again: set it in the pod's template")]
    Added { what: &'static str },
    #[error(
        "{what} of {value} is outside what is allowed here ({min} to {max}): see the namespace's LimitRange and the node's size"
    )]
    OutOfBounds { what: &'static str, value: u64, min: u64, max: u64 },
    #[error("a {what} request of {request} would exceed its limit of {limit}")]
    AboveLimit { what: &'static str, request: u64, limit: u64 },
    #[error("it would change the pod's QoS class from {from:?}, which Kubernetes forbids")]
    Class { from: QosClass },
    #[error("a memory limit is never lowered, because that can kill the pod: {from} to {to}")]
    MemoryLimitLowered { from: u64, to: u64 },
    #[error(
        "the CPU limit would be more than {allowed_milli}/1000 of the request: see maxLimitRequestRatio in the namespace's LimitRange"
    )]
    Ratio { allowed_milli: u64 },
    #[error(
        "{asked} more {what} than the pods of the policy had on this node together ({pool}): lower another pod first"
    )]
    Pool { what: &'static str, asked: u64, pool: u64 },
    #[error(
        "quota {quota} has only {left} of {what} left, {asked} more was asked for: raise the quota or let another pod end"
    )]
    Quota { quota: String, what: String, left: u64, asked: u64 },
}

/// Checks one change on its own, independently of how it was planned.
pub fn vet(pod: &PodOnNode, to: &Resources) -> Result<(), Refusal> {
    if let Some(blocked) = &pod.blocked {
        return Err(Refusal::Blocked(blocked.message.clone()));
    }
    let now = pod.now;
    for (what, before, after) in [
        ("a CPU request", now.requests.cpu_milli, to.requests.cpu_milli),
        ("a CPU limit", now.limits.cpu_milli, to.limits.cpu_milli),
        ("a memory request", now.requests.memory_bytes, to.requests.memory_bytes),
        ("a memory limit", now.limits.memory_bytes, to.limits.memory_bytes),
    ] {
        if before.is_none() && after.is_some() {
            return Err(Refusal::Added { what });
        }
    }
    for (what, range, value) in [
        ("a CPU request", pod.allowed.cpu_milli, to.requests.cpu_milli),
        ("a CPU limit", pod.allowed.cpu_milli, to.limits.cpu_milli),
        ("a memory request", pod.allowed.memory_bytes, to.requests.memory_bytes),
    ] {
        if let Some(value) = value
            && !range.contains(value)
        {
            return Err(Refusal::OutOfBounds { what, value, min: range.min, max: range.max });
        }
    }
    if let (Some(from), Some(to)) = (now.limits.memory_bytes, to.limits.memory_bytes)
        && to < from
    {
        return Err(Refusal::MemoryLimitLowered { from, to });
    }
    let after = to.over(now);
    for (what, request, limit) in [
        ("CPU", after.requests.cpu_milli, after.limits.cpu_milli),
        ("memory", after.requests.memory_bytes, after.limits.memory_bytes),
    ] {
        if let (Some(request), Some(limit)) = (request, limit)
            && request > limit
        {
            return Err(Refusal::AboveLimit { what, request, limit });
        }
    }
    if let (Some(allowed_milli), Some(request), Some(limit)) =
        (pod.allowed.cpu_ratio_milli, after.requests.cpu_milli, after.limits.cpu_milli)
        && u128::from(limit) * 1000 > u128::from(request) * u128::from(allowed_milli)
    {
        return Err(Refusal::Ratio { allowed_milli });
    }
    let kept = match pod.class {
        QosClass::Guaranteed => after.is_guaranteed(),
        // Other containers may keep the pod Burstable; this check does not rely on them.
        QosClass::Burstable => !after.is_guaranteed() || now.is_guaranteed(),
        QosClass::BestEffort => false,
    };
    if kept { Ok(()) } else { Err(Refusal::Class { from: pod.class }) }
}

#[cfg(test)]
#[path = "resize_tests.rs"]
mod tests;
