//! Targets as values of `docker update`, and the way back to the original values. Pure: no engine is asked here.
//!
//! **Problem.** The engine takes limits as a handful of numbers, reads zero as "leave as it is", and so
//! cannot unset what was never set. Weights mean different things on cgroup v1, on v2, and on v2 with a newer
//! `runc`.
//!
//! **Approach.** A container's limits are a map from [`EngineLimit`] to [`LimitValue`], as the engine reports
//! them, with "never set" replaced by the value that has the same effect ([`Machine::effective`]).
//! GroupLimits, found and original values then compare and subtract like any maps, and putting back is
//! writing the originals.
//!
//! | limit | from | never set equals |
//! |---|---|---|
//! | `cpu-shares` | share of the CPU; the mean container keeps the default weight | 1024 (v1), weight 100 (v2) |
//! | `cpu-quota`, `cpus` | limit of the CPU, quota mode; never above what the container was created with | −1: none |
//! | `cpuset-cpus` | whole cores, cores mode | all CPUs |
//! | `memory-reservation` | limit of memory, not below use: v1 soft limit, v2 `memory.low` | none (v1), 6 MiB (v2) |
//! | `blkio-weight` | share of block I/O, relative to the mean | what the kernel's scheduler starts with |
//!
//! The hard memory limit is never written, so that no limit of ours can kill a container for using memory.
//!
//! **Why `cpu-quota` and not `cpus`.** Once set, the engine can never unset `cpus` (zero is "leave", and it must be
//! positive), while a quota of −1 is unlimited. A container that was *created* with `cpus` refuses a quota; there
//! `cpus` itself is changed, and the original exists.

use crate::LimitMode;
use bollard::models::{ContainerUpdateBody, HostConfig};
use gainshare_core::plan::Target;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Something `docker update` can set, named as its option is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineLimit {
    CpuShares,
    CpuQuota,
    /// In billionths of a CPU.
    Cpus,
    CpusetCpus,
    MemoryReservation,
    BlkioWeight,
}

impl fmt::Display for EngineLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineLimit::CpuShares => "cpu-shares",
            EngineLimit::CpuQuota => "cpu-quota",
            EngineLimit::Cpus => "cpus",
            EngineLimit::CpusetCpus => "cpuset-cpus",
            EngineLimit::MemoryReservation => "memory-reservation",
            EngineLimit::BlkioWeight => "blkio-weight",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LimitValue {
    Number(i64),
    List(String),
}

impl LimitValue {
    fn number(&self) -> i64 {
        match self {
            LimitValue::Number(n) => *n,
            LimitValue::List(_) => 0,
        }
    }

    fn is_unset(&self) -> bool {
        match self {
            LimitValue::Number(n) => *n == 0,
            LimitValue::List(list) => list.is_empty(),
        }
    }
}

impl fmt::Display for LimitValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitValue::Number(n) => n.fmt(f),
            LimitValue::List(list) => list.fmt(f),
        }
    }
}

pub type LimitValues = BTreeMap<EngineLimit, LimitValue>;

/// A container's limits as they were before the first change: all that is needed to restore them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OriginalLimits {
    pub id: String,
    /// The limits that the mode may change, as the engine reports them, where zero is "never set".
    pub values: LimitValues,
}

/// The engine refuses a smaller soft limit.
const MIN_RESERVATION_BYTES: u64 = 6 << 20;
/// Soft limits move in steps of this size, so that a slowly growing working set does not cause a write with
/// every plan.
const RESERVATION_STEP_BYTES: u64 = 64 << 20;
/// Quotas are whole hundredths of a core, of the engine's own period of 100 ms. (The period is never changed, because a
/// container with another one refuses `docker update --cpus` from then on.) systemd keeps quotas in whole hundredths:
/// with Docker's systemd driver a reload of systemd would replace a finer quota by the next hundredth, which looks like
/// a write of another program. One hundredth is also the kernel's smallest quota.
const QUOTA_STEP_US: i64 = 1_000;

/// How the engine's `cpu-shares` become the kernel's weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum WeightScale {
    /// cgroup v1: they are the weight.
    Shares,
    /// cgroup v2 as `runc` did it until 2025: 2…262144 onto 1…10000 by a straight line, so the default of
    /// 1024 came out as 39.
    Linear,
    /// cgroup v2 since `runc` 1.3.2: a curve through (2, 1), (1024, 100), (262144, 10000).
    Curved,
}

impl WeightScale {
    /// The `cpu-shares` that give a container `relative` times the kernel's default weight.
    fn shares(self, relative: f64) -> i64 {
        let weight = (relative * 100.0).clamp(1.0, 10_000.0);
        let shares = match self {
            WeightScale::Shares => relative * 1024.0,
            WeightScale::Linear => 2.0 + ((weight - 1.0) * 262_142.0 / 9_999.0).ceil(),
            // The inverse of log10(weight) = (l² + 125 l) / 612 − 7/34 with l = log2(shares).
            WeightScale::Curved => {
                let c = 612.0 * (weight.log10() + 7.0 / 34.0);
                ((125.0f64.powi(2) + 4.0 * c).sqrt() / 2.0 - 62.5).exp2()
            }
        };
        (shares.round() as i64).clamp(2, 262_144)
    }

    fn weight(self, shares: i64) -> f64 {
        let shares = shares as f64;
        match self {
            WeightScale::Shares => shares,
            WeightScale::Linear => 1.0 + ((shares - 2.0) * 9_999.0 / 262_142.0).floor(),
            WeightScale::Curved => {
                let l = shares.log2();
                10f64.powf((l * l + 125.0 * l) / 612.0 - 7.0 / 34.0).ceil()
            }
        }
    }

    /// Which of the two v2 scales turned `shares` into `weight`.
    pub(super) fn infer(shares: i64, weight: f64) -> WeightScale {
        let off = |scale: WeightScale| (scale.weight(shares).ln() - weight.max(1.0).ln()).abs();
        if off(WeightScale::Curved) < off(WeightScale::Linear) { WeightScale::Curved } else { WeightScale::Linear }
    }
}

/// The machine that the limits of all containers are relative to.
#[derive(Debug, Clone)]
pub(super) struct Machine {
    pub(super) cores: u32,
    pub(super) memory_bytes: u64,
    pub(super) cgroup_v2: bool,
    pub(super) weights: WeightScale,
    /// All CPUs, as the kernel writes a list.
    pub(super) all_cpus: String,
    /// The weight a container's block I/O starts with; `None` where the kernel has no such weight.
    pub(super) block_weight: Option<i64>,
}

/// What the limits of one container are computed from.
pub(super) struct LimitRequest<'a> {
    pub(super) target: &'a Target,
    /// The container's share of the CPU and of block I/O, divided by the mean of all containers.
    pub(super) relative_cpu: f64,
    pub(super) relative_block: f64,
    /// The CPUs dealt to it, in cores mode.
    pub(super) cpus: Option<String>,
    pub(super) working_set_bytes: u64,
    /// The container's hard memory limit, zero for none.
    pub(super) hard_memory_bytes: i64,
    /// The original values of the limits that may be changed, as the engine reported them.
    pub(super) original: &'a LimitValues,
}

impl Machine {
    /// The container's values with "never set" replaced by what has the same effect.
    pub(super) fn effective(&self, values: &LimitValues) -> LimitValues {
        values.iter().filter_map(|(&limit, value)| Some((limit, self.effective_one(limit, value)?))).collect()
    }

    fn effective_one(&self, limit: EngineLimit, value: &LimitValue) -> Option<LimitValue> {
        if !value.is_unset() {
            return Some(value.clone());
        }
        match limit {
            EngineLimit::CpuShares => Some(LimitValue::Number(self.weights.shares(1.0))),
            EngineLimit::CpuQuota => Some(LimitValue::Number(-1)),
            // A container without `cpus` is limited by its quota, if at all.
            EngineLimit::Cpus => None,
            EngineLimit::CpusetCpus => Some(LimitValue::List(self.all_cpus.clone())),
            // On v2 minus one would become `memory.low=max`, the strongest protection instead of none.
            EngineLimit::MemoryReservation if self.cgroup_v2 => Some(LimitValue::Number(MIN_RESERVATION_BYTES as i64)),
            EngineLimit::MemoryReservation => Some(LimitValue::Number(-1)),
            EngineLimit::BlkioWeight => self.block_weight.map(LimitValue::Number),
        }
    }

    /// The limits of a container, and notes on what cannot be limited and why. Limits that the mode does not
    /// set keep their original values.
    pub(super) fn wanted(&self, mode: LimitMode, request: &LimitRequest<'_>) -> (LimitValues, Vec<String>) {
        let mut notes = Vec::new();
        let mut wanted = self.effective(request.original);
        if mode != LimitMode::Quota {
            wanted.insert(EngineLimit::CpuShares, LimitValue::Number(self.weights.shares(request.relative_cpu)));
        } else if let Some((limit, value)) = self.quota(request) {
            wanted.insert(limit, value);
        }
        match request.original.get(&EngineLimit::CpusetCpus) {
            Some(pinned) if mode == LimitMode::Cores && !pinned.is_unset() => {
                notes.push(format!("its owner pinned it to CPUs {pinned}: left there, only weighted"));
            }
            _ => {
                let cpus = request.cpus.iter().map(|cpus| (EngineLimit::CpusetCpus, LimitValue::List(cpus.clone())));
                wanted.extend(cpus);
            }
        }
        if let Some(bytes) = self.reservation(request) {
            wanted.insert(EngineLimit::MemoryReservation, LimitValue::Number(bytes));
        }
        match self.block_weight {
            Some(neutral) => {
                let weight = (neutral as f64 * request.relative_block).round().clamp(10.0, 1000.0);
                wanted.insert(EngineLimit::BlkioWeight, LimitValue::Number(weight as i64));
            }
            // The plan does not ask for a difference.
            None if (request.relative_block - 1.0).abs() < 0.01 => {}
            None => notes
                .push("block I/O is not limited: this kernel has no block I/O weight the engine can set".to_owned()),
        }
        if request.target.limit.net_io.get() < 1.0 {
            notes.push("network I/O is observed, not limited: the engine has no such limit".to_owned());
        }
        (wanted, notes)
    }

    /// The hard cap of quota mode; `None` leaves what the container came with.
    fn quota(&self, request: &LimitRequest<'_>) -> Option<(EngineLimit, LimitValue)> {
        let limit = request.target.limit.cpu.get();
        if limit >= 1.0 {
            return None;
        }
        let cores = limit * f64::from(self.cores);
        let original = |limit| request.original.get(&limit).map_or(0, LimitValue::number);
        let nano = original(EngineLimit::Cpus);
        if nano > 0 {
            // Hundredths of a CPU: the engine's own resolution.
            let cpus = ((cores * 100.0).round().max(1.0) as i64).saturating_mul(10_000_000);
            return Some((EngineLimit::Cpus, LimitValue::Number(cpus.min(nano))));
        }
        let quota = ((cores * 100.0).round() as i64).saturating_mul(QUOTA_STEP_US).max(QUOTA_STEP_US);
        let before = original(EngineLimit::CpuQuota);
        Some((EngineLimit::CpuQuota, LimitValue::Number(if before > 0 { quota.min(before) } else { quota })))
    }

    /// The soft memory limit; `None` leaves what the container came with.
    fn reservation(&self, request: &LimitRequest<'_>) -> Option<i64> {
        let limit = request.target.limit.memory.get();
        if limit >= 1.0 {
            return None;
        }
        let wanted = (limit * self.memory_bytes as f64) as u64;
        let bytes = wanted.max(request.working_set_bytes).max(MIN_RESERVATION_BYTES);
        let bytes = bytes.checked_next_multiple_of(RESERVATION_STEP_BYTES).and_then(|b| i64::try_from(b).ok());
        let bytes = bytes.unwrap_or(i64::MAX);
        // The engine refuses a soft limit above the hard one.
        Some(if request.hard_memory_bytes > 0 { bytes.min(request.hard_memory_bytes) } else { bytes })
    }
}

/// The limits in an engine's description of a container.
pub(super) fn values_of(host: &HostConfig) -> LimitValues {
    let number = |n: Option<i64>| LimitValue::Number(n.unwrap_or(0));
    BTreeMap::from([
        (EngineLimit::CpuShares, number(host.cpu_shares)),
        (EngineLimit::CpuQuota, number(host.cpu_quota)),
        (EngineLimit::Cpus, number(host.nano_cpus)),
        (EngineLimit::CpusetCpus, LimitValue::List(host.cpuset_cpus.clone().unwrap_or_default())),
        (EngineLimit::MemoryReservation, number(host.memory_reservation)),
        (EngineLimit::BlkioWeight, number(host.blkio_weight.map(i64::from))),
    ])
}

/// The part of a container's limits that this mode may change. The others stay as the container's owner set them.
pub(super) fn managed(mode: LimitMode, values: &LimitValues) -> LimitValues {
    let has_cpus = values.get(&EngineLimit::Cpus).is_some_and(|v| !v.is_unset());
    let is_managed = |limit: EngineLimit| match limit {
        EngineLimit::CpuShares => mode != LimitMode::Quota,
        EngineLimit::CpuQuota => mode == LimitMode::Quota && !has_cpus,
        EngineLimit::Cpus => mode == LimitMode::Quota && has_cpus,
        EngineLimit::CpusetCpus => mode == LimitMode::Cores,
        EngineLimit::MemoryReservation | EngineLimit::BlkioWeight => true,
    };
    values.iter().filter(|&(&limit, _)| is_managed(limit)).map(|(k, v)| (*k, v.clone())).collect()
}

/// The values of `wanted` that differ from those in `found`.
pub(super) fn difference(wanted: &LimitValues, found: &LimitValues) -> LimitValues {
    wanted.iter().filter(|&(limit, value)| found.get(limit) != Some(value)).map(|(k, v)| (*k, v.clone())).collect()
}

/// A request that sets exactly `values`.
pub(super) fn update_body(values: &LimitValues) -> ContainerUpdateBody {
    let number = |limit| values.get(&limit).map(LimitValue::number);
    ContainerUpdateBody {
        cpu_shares: number(EngineLimit::CpuShares),
        cpu_quota: number(EngineLimit::CpuQuota),
        nano_cpus: number(EngineLimit::Cpus),
        cpuset_cpus: values.get(&EngineLimit::CpusetCpus).map(LimitValue::to_string),
        memory_reservation: number(EngineLimit::MemoryReservation),
        blkio_weight: number(EngineLimit::BlkioWeight).and_then(|n| u16::try_from(n).ok()),
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_core::model::{PerResource, Share};
    use proptest::prelude::*;

    const GIB: u64 = 1 << 30;

    fn machine(cgroup_v2: bool) -> Machine {
        Machine {
            cores: 8,
            memory_bytes: 32 * GIB,
            cgroup_v2,
            weights: if cgroup_v2 { WeightScale::Linear } else { WeightScale::Shares },
            all_cpus: "0-7".to_owned(),
            block_weight: None,
        }
    }

    fn target(cpu: f64, memory: f64) -> Target {
        let part = PerResource {
            cpu: Share::clamped(cpu),
            memory: Share::clamped(memory),
            block_io: Share::FULL,
            net_io: Share::FULL,
        };
        Target { limit: part, share: part }
    }

    fn request<'a>(target: &'a Target, original: &'a LimitValues) -> LimitRequest<'a> {
        LimitRequest {
            target,
            relative_cpu: 1.0,
            relative_block: 1.0,
            cpus: None,
            working_set_bytes: 0,
            hard_memory_bytes: 0,
            original,
        }
    }

    #[test]
    fn free_containers_keep_what_they_came_with() {
        let host =
            HostConfig { cpuset_cpus: Some("1".into()), memory_reservation: Some(9 << 20), ..Default::default() };
        let original = values_of(&host);
        for machine in [machine(false), machine(true)] {
            for mode in [LimitMode::Weight, LimitMode::Quota, LimitMode::Cores] {
                let part = managed(mode, &original);
                let (wanted, _) = machine.wanted(mode, &request(&Target::FREE, &part));
                assert_eq!(difference(&wanted, &machine.effective(&original)), LimitValues::new(), "{mode:?}");
            }
        }
    }

    #[test]
    fn quota_uses_the_limit_the_container_accepts_and_never_exceeds_its_own_cap() {
        let half = target(0.5, 1.0);
        let m = machine(false);
        let plain = managed(LimitMode::Quota, &values_of(&HostConfig::default()));
        assert_eq!(
            m.wanted(LimitMode::Quota, &request(&half, &plain)).0[&EngineLimit::CpuQuota],
            LimitValue::Number(400_000)
        );
        let third = target(1.0 / 3.0, 1.0);
        assert_eq!(
            m.wanted(LimitMode::Quota, &request(&third, &plain)).0[&EngineLimit::CpuQuota],
            LimitValue::Number(267_000),
            "systemd keeps whole hundredths of a core"
        );
        let capped =
            managed(LimitMode::Quota, &values_of(&HostConfig { cpu_quota: Some(150_000), ..Default::default() }));
        assert_eq!(
            m.wanted(LimitMode::Quota, &request(&half, &capped)).0[&EngineLimit::CpuQuota],
            LimitValue::Number(150_000)
        );
        let nano =
            managed(LimitMode::Quota, &values_of(&HostConfig { nano_cpus: Some(6_000_000_000), ..Default::default() }));
        let (wanted, _) = m.wanted(LimitMode::Quota, &request(&half, &nano));
        assert_eq!(wanted[&EngineLimit::Cpus], LimitValue::Number(4_000_000_000));
        let change = difference(&wanted, &m.effective(&nano));
        assert_eq!(change.keys().collect::<Vec<_>>(), [&EngineLimit::Cpus], "a quota would be refused");
    }

    #[test]
    fn soft_memory_never_below_use_nor_above_the_hard_limit() {
        let tight = target(1.0, 0.1);
        let plain = values_of(&HostConfig::default());
        let m = machine(false);
        let mut w = request(&tight, &plain);
        assert_eq!(m.reservation(&w), Some(((32 * GIB / 10).next_multiple_of(64 << 20)) as i64));
        w.working_set_bytes = 20 * GIB + 1;
        assert_eq!(m.reservation(&w), Some((20 * GIB + (64 << 20)) as i64));
        w.working_set_bytes = u64::MAX;
        assert_eq!(m.reservation(&w), Some(i64::MAX), "no overflow");
        w.hard_memory_bytes = 20 * GIB as i64;
        assert_eq!(m.reservation(&w), Some(20 * GIB as i64));
    }

    #[test]
    fn both_scales_of_v2_hit_the_kernels_default_and_are_distinguished() {
        assert_eq!(WeightScale::Linear.weight(1024), 39.0);
        assert_eq!(WeightScale::Curved.weight(1024), 100.0);
        assert_eq!(WeightScale::Linear.weight(WeightScale::Linear.shares(1.0)), 100.0);
        assert_eq!(WeightScale::Curved.weight(WeightScale::Curved.shares(1.0)), 100.0);
        assert_eq!(WeightScale::infer(1024, 39.0), WeightScale::Linear);
        assert_eq!(WeightScale::infer(1024, 100.0), WeightScale::Curved);
    }

    #[test]
    fn values_survive_the_journal() {
        let values =
            values_of(&HostConfig { cpuset_cpus: Some("0-3".into()), cpu_shares: Some(7), ..Default::default() });
        let text = serde_json::to_string(&values).unwrap();
        assert_eq!(serde_json::from_str::<LimitValues>(&text).unwrap(), values, "{text}");
    }

    proptest! {
        /// The kernel's weights stand in the ratio that was asked for, within rounding, whatever the scale.
        #[test]
        fn weights_keep_their_ratio(a in 0.2f64..5.0, b in 0.2f64..5.0) {
            for scale in [WeightScale::Shares, WeightScale::Linear, WeightScale::Curved] {
                let got = scale.weight(scale.shares(a)) / scale.weight(scale.shares(b));
                prop_assert!((got / (a / b)).ln().abs() < 0.12, "{scale:?}: {got} for {}", a / b);
            }
        }

        /// For any target, the engine is never handed a value that it refuses.
        #[test]
        fn wanted_values_are_in_the_engines_range(
            cpu in 0.0f64..=1.0,
            memory in 0.0f64..=1.0,
            relative in 0.0f64..100.0,
            v2: bool,
            nano in 0i64..16_000_000_000,
        ) {
            let t = target(cpu, memory);
            let original = values_of(&HostConfig { nano_cpus: Some(nano), ..Default::default() });
            let mut m = machine(v2);
            m.block_weight = Some(500);
            for mode in [LimitMode::Weight, LimitMode::Quota, LimitMode::Cores] {
                let part = managed(mode, &original);
                let mut w = request(&t, &part);
                (w.relative_cpu, w.relative_block) = (relative, relative);
                let body = update_body(&m.wanted(mode, &w).0);
                prop_assert!(body.cpu_shares.is_none_or(|n| (2..=262_144).contains(&n)));
                prop_assert!((10..=1000).contains(&body.blkio_weight.unwrap()));
                prop_assert!(body.cpu_quota.is_none_or(|n| n == -1 || (n >= 1_000 && nano == 0)));
                prop_assert!(body.nano_cpus.is_none_or(|n| n > 0 && nano > 0));
                prop_assert!(body.memory.is_none() && body.memory_swap.is_none());
            }
        }
    }
}
