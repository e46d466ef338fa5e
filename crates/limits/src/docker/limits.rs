//! From targets to what `docker update` can set, and back to what was there before. Pure: no engine is asked here.
//!
//! **Problem.** The engine takes limits as a handful of numbers, reads zero as "leave as it is", and so cannot be told
//! to unset what was never set. Weights mean different things on cgroup v1, on v2, and on v2 with a newer `runc`.
//!
//! **Approach.** A container's limits are a map from [`Knob`] to [`Value`], as the engine reports them, with "never
//! set" replaced by the value that has the same effect ([`Machine::effective`]). Wanted, found and original values then
//! compare and subtract like any maps, and putting back is writing the originals.
//!
//! | knob | from | never set equals |
//! |---|---|---|
//! | `cpu-shares` | share of the CPU; the mean container keeps the default weight | 1024 (v1), weight 100 (v2) |
//! | `cpu-quota`, `cpus` | limit of the CPU, quota mode; never above what the container was created with | −1: none |
//! | `cpuset-cpus` | whole cores, cores mode | all CPUs |
//! | `memory-reservation` | limit of memory, not below use: v1 soft limit, v2 `memory.low` | none (v1), 6 MiB (v2) |
//! | `blkio-weight` | share of block I/O, relative to the mean | what the kernel's scheduler starts with |
//!
//! The hard memory limit is never written, so that no container can be killed by us for using memory.
//!
//! **Why `cpu-quota` and not `cpus`.** Once set, the engine can never unset `cpus` (zero is "leave", and it must be
//! positive), while a quota of −1 is unlimited. A container that was *created* with `cpus` refuses a quota; there
//! `cpus` itself is changed, and the original exists.

use crate::Mode;
use bollard::models::{ContainerUpdateBody, HostConfig};
use gainshare_core::plan::Target;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Something `docker update` can set, named as its option is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Knob {
    CpuShares,
    CpuQuota,
    /// In billionths of a CPU.
    Cpus,
    CpusetCpus,
    MemoryReservation,
    BlkioWeight,
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Knob::CpuShares => "cpu-shares",
            Knob::CpuQuota => "cpu-quota",
            Knob::Cpus => "cpus",
            Knob::CpusetCpus => "cpuset-cpus",
            Knob::MemoryReservation => "memory-reservation",
            Knob::BlkioWeight => "blkio-weight",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    Number(i64),
    List(String),
}

impl Value {
    fn number(&self) -> i64 {
        match self {
            Value::Number(n) => *n,
            Value::List(_) => 0,
        }
    }

    fn is_unset(&self) -> bool {
        match self {
            Value::Number(n) => *n == 0,
            Value::List(list) => list.is_empty(),
        }
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Number(n) => n.fmt(f),
            Value::List(list) => list.fmt(f),
        }
    }
}

pub type Values = BTreeMap<Knob, Value>;

/// The engine refuses a smaller soft limit.
const LEAST_RESERVATION_BYTES: u64 = 6 << 20;
/// Soft limits move in steps of this size, so that a slowly growing working set does not cause a write with every plan.
const RESERVATION_STEP_BYTES: u64 = 64 << 20;
/// The engine's own period; it is never changed, because a container with a period of its own refuses `docker update
/// --cpus` for ever.
const PERIOD_US: f64 = 100_000.0;
/// The kernel's smallest quota.
const LEAST_QUOTA_US: i64 = 1_000;

/// How the engine's `cpu-shares` become the kernel's weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum WeightScale {
    /// cgroup v1: they are the weight.
    Shares,
    /// cgroup v2 as `runc` did it until 2025: 2…262144 onto 1…10000 by a straight line, so the default of 1024 came out
    /// as 39.
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
    pub(super) fn seen(shares: i64, weight: f64) -> WeightScale {
        let off = |scale: WeightScale| (scale.weight(shares).ln() - weight.max(1.0).ln()).abs();
        if off(WeightScale::Curved) < off(WeightScale::Linear) { WeightScale::Curved } else { WeightScale::Linear }
    }
}

/// What the limits of all containers are relative to.
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

/// What one container should have.
pub(super) struct Wish<'a> {
    pub(super) target: &'a Target,
    /// Its share of the CPU and of block I/O, divided by the mean of all containers.
    pub(super) relative_cpu: f64,
    pub(super) relative_block: f64,
    /// The CPUs dealt to it, in cores mode.
    pub(super) cpus: Option<String>,
    pub(super) working_set_bytes: u64,
    /// The container's hard memory limit, zero for none.
    pub(super) hard_memory_bytes: i64,
    /// What it had before us, as the engine reported it, of what may be changed.
    pub(super) original: &'a Values,
}

impl Machine {
    /// The container's values with "never set" replaced by what has the same effect.
    pub(super) fn effective(&self, values: &Values) -> Values {
        values.iter().filter_map(|(&knob, value)| Some((knob, self.effective_one(knob, value)?))).collect()
    }

    fn effective_one(&self, knob: Knob, value: &Value) -> Option<Value> {
        if !value.is_unset() {
            return Some(value.clone());
        }
        match knob {
            Knob::CpuShares => Some(Value::Number(self.weights.shares(1.0))),
            Knob::CpuQuota => Some(Value::Number(-1)),
            // A container without `cpus` is limited by its quota, if at all.
            Knob::Cpus => None,
            Knob::CpusetCpus => Some(Value::List(self.all_cpus.clone())),
            // On v2 minus one would become `memory.low=max`, the strongest protection instead of none.
            Knob::MemoryReservation if self.cgroup_v2 => Some(Value::Number(LEAST_RESERVATION_BYTES as i64)),
            Knob::MemoryReservation => Some(Value::Number(-1)),
            Knob::BlkioWeight => self.block_weight.map(Value::Number),
        }
    }

    /// What to set for a container, and what cannot be set and why. Everything not set by the mode is what it was
    /// before us.
    pub(super) fn wanted(&self, mode: Mode, wish: &Wish<'_>) -> (Values, Vec<String>) {
        let mut notes = Vec::new();
        let mut wanted = self.effective(wish.original);
        if mode != Mode::Quota {
            wanted.insert(Knob::CpuShares, Value::Number(self.weights.shares(wish.relative_cpu)));
        } else if let Some((knob, value)) = self.quota(wish) {
            wanted.insert(knob, value);
        }
        match wish.original.get(&Knob::CpusetCpus) {
            Some(pinned) if mode == Mode::Cores && !pinned.is_unset() => {
                notes.push(format!("its owner pinned it to CPUs {pinned}: left there, only weighted"));
            }
            _ => {
                let cpus = wish.cpus.iter().map(|cpus| (Knob::CpusetCpus, Value::List(cpus.clone())));
                wanted.extend(cpus);
            }
        }
        if let Some(bytes) = self.reservation(wish) {
            wanted.insert(Knob::MemoryReservation, Value::Number(bytes));
        }
        match self.block_weight {
            Some(neutral) => {
                let weight = (neutral as f64 * wish.relative_block).round().clamp(10.0, 1000.0);
                wanted.insert(Knob::BlkioWeight, Value::Number(weight as i64));
            }
            // Nobody asked for a difference.
            None if (wish.relative_block - 1.0).abs() < 0.01 => {}
            None => notes
                .push("block I/O is not limited: this kernel has no block I/O weight the engine can set".to_owned()),
        }
        if wish.target.limit.net_io.get() < 1.0 {
            notes.push("network I/O is observed, not limited: the engine has no such limit".to_owned());
        }
        (wanted, notes)
    }

    /// The hard cap of quota mode; `None` leaves what the container came with.
    fn quota(&self, wish: &Wish<'_>) -> Option<(Knob, Value)> {
        let limit = wish.target.limit.cpu.get();
        if limit >= 1.0 {
            return None;
        }
        let cores = limit * f64::from(self.cores);
        let original = |knob| wish.original.get(&knob).map_or(0, Value::number);
        let nano = original(Knob::Cpus);
        if nano > 0 {
            // Hundredths of a CPU: the engine's own resolution.
            let cpus = ((cores * 100.0).round().max(1.0) as i64) * 10_000_000;
            return Some((Knob::Cpus, Value::Number(cpus.min(nano))));
        }
        let quota = ((cores * PERIOD_US).round() as i64).max(LEAST_QUOTA_US);
        let before = original(Knob::CpuQuota);
        Some((Knob::CpuQuota, Value::Number(if before > 0 { quota.min(before) } else { quota })))
    }

    /// The soft memory limit; `None` leaves what the container came with.
    fn reservation(&self, wish: &Wish<'_>) -> Option<i64> {
        let limit = wish.target.limit.memory.get();
        if limit >= 1.0 {
            return None;
        }
        let wanted = (limit * self.memory_bytes as f64) as u64;
        let bytes = wanted.max(wish.working_set_bytes).max(LEAST_RESERVATION_BYTES);
        let bytes = i64::try_from(bytes.next_multiple_of(RESERVATION_STEP_BYTES)).unwrap_or(i64::MAX);
        // The engine refuses a soft limit above the hard one.
        Some(if wish.hard_memory_bytes > 0 { bytes.min(wish.hard_memory_bytes) } else { bytes })
    }
}

/// The limits in an engine's description of a container.
pub(super) fn values_of(host: &HostConfig) -> Values {
    let number = |n: Option<i64>| Value::Number(n.unwrap_or(0));
    BTreeMap::from([
        (Knob::CpuShares, number(host.cpu_shares)),
        (Knob::CpuQuota, number(host.cpu_quota)),
        (Knob::Cpus, number(host.nano_cpus)),
        (Knob::CpusetCpus, Value::List(host.cpuset_cpus.clone().unwrap_or_default())),
        (Knob::MemoryReservation, number(host.memory_reservation)),
        (Knob::BlkioWeight, number(host.blkio_weight.map(i64::from))),
    ])
}

/// The part of a container's limits that this mode may change. The others stay its owner's, also while we are in
/// charge.
pub(super) fn managed(mode: Mode, values: &Values) -> Values {
    let has_cpus = values.get(&Knob::Cpus).is_some_and(|v| !v.is_unset());
    let is_managed = |knob: Knob| match knob {
        Knob::CpuShares => mode != Mode::Quota,
        Knob::CpuQuota => mode == Mode::Quota && !has_cpus,
        Knob::Cpus => mode == Mode::Quota && has_cpus,
        Knob::CpusetCpus => mode == Mode::Cores,
        Knob::MemoryReservation | Knob::BlkioWeight => true,
    };
    values.iter().filter(|&(&knob, _)| is_managed(knob)).map(|(k, v)| (*k, v.clone())).collect()
}

/// Those of `wanted` that `found` has otherwise.
pub(super) fn difference(wanted: &Values, found: &Values) -> Values {
    wanted.iter().filter(|&(knob, value)| found.get(knob) != Some(value)).map(|(k, v)| (*k, v.clone())).collect()
}

/// A request that sets exactly `values`.
pub(super) fn update_body(values: &Values) -> ContainerUpdateBody {
    let number = |knob| values.get(&knob).map(Value::number);
    ContainerUpdateBody {
        cpu_shares: number(Knob::CpuShares),
        cpu_quota: number(Knob::CpuQuota),
        nano_cpus: number(Knob::Cpus),
        cpuset_cpus: values.get(&Knob::CpusetCpus).map(Value::to_string),
        memory_reservation: number(Knob::MemoryReservation),
        blkio_weight: number(Knob::BlkioWeight).and_then(|n| u16::try_from(n).ok()),
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

    fn wish<'a>(target: &'a Target, original: &'a Values) -> Wish<'a> {
        Wish {
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
            for mode in [Mode::Weight, Mode::Quota, Mode::Cores] {
                let part = managed(mode, &original);
                let (wanted, _) = machine.wanted(mode, &wish(&Target::FREE, &part));
                assert_eq!(difference(&wanted, &machine.effective(&original)), Values::new(), "{mode:?}");
            }
        }
    }

    #[test]
    fn quota_uses_the_knob_the_container_accepts_and_never_exceeds_its_own_cap() {
        let half = target(0.5, 1.0);
        let m = machine(false);
        let plain = managed(Mode::Quota, &values_of(&HostConfig::default()));
        assert_eq!(m.wanted(Mode::Quota, &wish(&half, &plain)).0[&Knob::CpuQuota], Value::Number(400_000));
        let capped = managed(Mode::Quota, &values_of(&HostConfig { cpu_quota: Some(150_000), ..Default::default() }));
        assert_eq!(m.wanted(Mode::Quota, &wish(&half, &capped)).0[&Knob::CpuQuota], Value::Number(150_000));
        let nano =
            managed(Mode::Quota, &values_of(&HostConfig { nano_cpus: Some(6_000_000_000), ..Default::default() }));
        let (wanted, _) = m.wanted(Mode::Quota, &wish(&half, &nano));
        assert_eq!(wanted[&Knob::Cpus], Value::Number(4_000_000_000));
        let change = difference(&wanted, &m.effective(&nano));
        assert_eq!(change.keys().collect::<Vec<_>>(), [&Knob::Cpus], "a quota would be refused");
    }

    #[test]
    fn soft_memory_never_below_use_nor_above_the_hard_limit() {
        let tight = target(1.0, 0.1);
        let plain = values_of(&HostConfig::default());
        let m = machine(false);
        let mut w = wish(&tight, &plain);
        assert_eq!(m.reservation(&w), Some(((32 * GIB / 10).next_multiple_of(64 << 20)) as i64));
        w.working_set_bytes = 20 * GIB + 1;
        assert_eq!(m.reservation(&w), Some((20 * GIB + (64 << 20)) as i64));
        w.hard_memory_bytes = 20 * GIB as i64;
        assert_eq!(m.reservation(&w), Some(20 * GIB as i64));
    }

    #[test]
    fn both_scales_of_v2_hit_the_kernels_default_and_are_told_apart() {
        assert_eq!(WeightScale::Linear.weight(1024), 39.0);
        assert_eq!(WeightScale::Curved.weight(1024), 100.0);
        assert_eq!(WeightScale::Linear.weight(WeightScale::Linear.shares(1.0)), 100.0);
        assert_eq!(WeightScale::Curved.weight(WeightScale::Curved.shares(1.0)), 100.0);
        assert_eq!(WeightScale::seen(1024, 39.0), WeightScale::Linear);
        assert_eq!(WeightScale::seen(1024, 100.0), WeightScale::Curved);
    }

    #[test]
    fn values_survive_the_journal() {
        let values =
            values_of(&HostConfig { cpuset_cpus: Some("0-3".into()), cpu_shares: Some(7), ..Default::default() });
        let text = serde_json::to_string(&values).unwrap();
        assert_eq!(serde_json::from_str::<Values>(&text).unwrap(), values, "{text}");
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

        /// Whatever is asked for, the engine is never handed a value it refuses.
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
            for mode in [Mode::Weight, Mode::Quota, Mode::Cores] {
                let part = managed(mode, &original);
                let mut w = wish(&t, &part);
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
