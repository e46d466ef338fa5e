//! Shares as values of the kernel's files.
//!
//! **Problem.** A share is a fraction of the node. The kernel wants weights (v1 `cpu.shares` 2…262144 with 1024 as
//! the default, v2 `cpu.weight` 1…10000 with 100), quotas in microseconds of a period, lists of CPUs, bytes,
//! block-I/O weights in yet other ranges.
//!
//! **Approach.** [`settings`] is a pure function from [`GroupLimits`] to file names and values, each value
//! written exactly as the kernel prints it, so that reading back is a comparison of text.
//! `GroupLimits::default()` gives the kernel's own defaults: that is how limits are taken back. [`enforce`]
//! writes, reads back and detects foreign writes. **A new limit of the kernel** is a field of [`GroupLimits`]
//! and its lines in [`settings`].
//!
//! **Terms.** CPU shares are fractions of the node (0…1); *cores* are CPUs' worth of time; memory is in bytes.
//!
//! **Properties.** `ratios_kept`: weights keep the ratio of shares of one percent or more within 1 %.
//! `memory_never_below_use`: a memory limit is never below the working set plus headroom. `defaults_restore`: the
//! default values are those of a new group. An equal value is not written again.

use super::group::Group;
use super::hierarchy::{Controller, Version};
use crate::cpus::CpuList;
use crate::{RuntimeError, fail};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub const MAX_SHARES_V1: u64 = 262_144;
pub const MIN_SHARES_V1: u64 = 2;
pub const DEFAULT_SHARES_V1: u64 = 1024;
pub const MAX_WEIGHT_V2: u64 = 10_000;
pub const DEFAULT_WEIGHT_V2: u64 = 100;
/// The whole node as a v1 weight: the same as v2's largest weight in v1's unit, so that both versions schedule alike.
const WHOLE_SHARES_V1: f64 = 102_400.0;

/// The kernel's default. Longer periods stall a job's threads longer, shorter ones cost more.
pub const PERIOD_US: u64 = 100_000;
/// The kernel takes no quota below a millisecond.
const MIN_QUOTA_US: u64 = 1_000;

/// bfq's weights, both versions, go from 1 to 1000; the default of all block weights is 100, except v1's old
/// `blkio.weight`, where it is 500.
const MAX_BFQ_WEIGHT: f64 = 1_000.0;
const DEFAULT_BLOCK_WEIGHT: u64 = 100;

/// Between a memory limit and the working set there is always this much, plus an eighth of the working set.
const HEADROOM_BYTES: u64 = 64 << 20;

/// The limits of one group. The default is that of a new group: no limit at all.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GroupLimits {
    /// Weight, as a fraction of the node. `None`: the kernel's default weight.
    pub cpu_share: Option<f64>,
    /// Hard cap in cores.
    pub cpu_cap_cores: Option<f64>,
    /// The kernel runs the threads of every other group first (`cpu.idle`); where it cannot, the group has the
    /// smallest weight.
    pub yields: bool,
    /// Only these CPUs.
    pub cpus: Option<CpuList>,
    /// Soft memory limit, already checked against use by [`memory_limit_bytes`].
    pub memory_limit_bytes: Option<u64>,
    /// Memory that reclaim should spare; v2 only.
    pub memory_spared_bytes: u64,
    pub block_share: Option<f64>,
    /// The largest number of processes and threads.
    pub max_tasks: Option<u32>,
}

/// What the names and values of the files depend on besides the limits themselves.
#[derive(Debug, Clone)]
pub struct KernelFeatures {
    pub version: Version,
    pub all_cpus: CpuList,
    /// Whether groups have the file `cpu.idle`.
    pub has_cpu_idle: bool,
    pub block_weight_file: Option<&'static str>,
    pub page_bytes: u64,
}

const IDLE_FILE: &str = "cpu.idle";

/// One file and the text it should hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub file: &'static str,
    pub value: String,
}

/// The files for `wanted`, in the order in which they should be written.
pub fn settings(on: &KernelFeatures, wanted: &GroupLimits) -> Vec<Setting> {
    let mut out = Vec::with_capacity(8);
    let mut set = |file, value| out.push(Setting { file, value });
    let page = on.page_bytes.max(1);
    if on.has_cpu_idle {
        set(IDLE_FILE, u8::from(wanted.yields).to_string());
    }
    // The kernel takes no weight for a group that yields by `cpu.idle`.
    let has_weight = !(wanted.yields && on.has_cpu_idle);
    let cpu_share = if wanted.yields { Some(0.0) } else { wanted.cpu_share };
    match on.version {
        Version::V1 => {
            if has_weight {
                set("cpu.shares", cpu_share.map_or(DEFAULT_SHARES_V1, shares_v1).to_string());
            }
            set("cpu.cfs_period_us", PERIOD_US.to_string());
            set("cpu.cfs_quota_us", wanted.cpu_cap_cores.map_or("-1".into(), |c| quota_us(c).to_string()));
            set("cpuset.cpus", wanted.cpus.as_ref().unwrap_or(&on.all_cpus).to_string());
            let unlimited = i64::MAX as u64 / page * page;
            let soft = wanted.memory_limit_bytes.map_or(unlimited, |b| b / page * page);
            set("memory.soft_limit_in_bytes", soft.to_string());
        }
        Version::V2 => {
            if has_weight {
                set("cpu.weight", cpu_share.map_or(DEFAULT_WEIGHT_V2, weight_v2).to_string());
            }
            let quota = wanted.cpu_cap_cores.map_or("max".into(), |c| quota_us(c).to_string());
            set("cpu.max", format!("{quota} {PERIOD_US}"));
            set("cpuset.cpus", wanted.cpus.as_ref().map_or(String::new(), CpuList::to_string));
            let bytes = |b: u64| (b / page * page).to_string();
            set("memory.high", wanted.memory_limit_bytes.map_or("max".into(), bytes));
            set("memory.low", bytes(wanted.memory_spared_bytes));
        }
    }
    if let Some(file) = on.block_weight_file {
        set(file, block_weight(file, wanted.block_share));
    }
    set("pids.max", wanted.max_tasks.map_or("max".into(), |n| n.to_string()));
    out
}

/// v1's `cpu.shares` for a share of the node.
pub fn shares_v1(share: f64) -> u64 {
    ((share * WHOLE_SHARES_V1).round() as u64).clamp(MIN_SHARES_V1, MAX_SHARES_V1)
}

/// v2's `cpu.weight` (and `io.weight`) for a share of the node.
pub fn weight_v2(share: f64) -> u64 {
    ((share * MAX_WEIGHT_V2 as f64).round() as u64).clamp(1, MAX_WEIGHT_V2)
}

fn quota_us(cores: f64) -> u64 {
    ((cores * PERIOD_US as f64).round() as u64).max(MIN_QUOTA_US)
}

fn block_weight(file: &str, share: Option<f64>) -> String {
    let bfq = |s: f64| ((s * MAX_BFQ_WEIGHT).round() as u64).clamp(1, MAX_BFQ_WEIGHT as u64);
    match file {
        "io.weight" => format!("default {}", share.map_or(DEFAULT_BLOCK_WEIGHT, weight_v2)),
        "io.bfq.weight" => format!("default {}", share.map_or(DEFAULT_BLOCK_WEIGHT, bfq)),
        "blkio.weight" => share.map_or(500, |s| bfq(s).max(10)).to_string(),
        _ => share.map_or(DEFAULT_BLOCK_WEIGHT, bfq).to_string(),
    }
}

/// The soft memory limit for a job that may have `asked_bytes` and needs `working_set_bytes` now: never below what it
/// needs plus headroom, in steps of 64 MiB, so that small changes of the working set cause no write.
pub fn memory_limit_bytes(asked_bytes: u64, working_set_bytes: u64) -> u64 {
    let needed = working_set_bytes.saturating_add(working_set_bytes / 8).saturating_add(HEADROOM_BYTES);
    match needed.checked_next_multiple_of(HEADROOM_BYTES) {
        Some(needed) if needed > asked_bytes => needed,
        _ => asked_bytes.max(needed),
    }
}

/// Whether a job has grown so near to its soft limit that the limit must be raised before the job is slowed.
pub fn memory_limit_is_near(limit_bytes: u64, working_set_bytes: u64) -> bool {
    working_set_bytes.saturating_add(HEADROOM_BYTES / 2) > limit_bytes
}

/// What was written to the files of one group: the last value of each, and when a foreign value was last overwritten.
#[derive(Debug, Default)]
pub struct WriteRecord {
    written: BTreeMap<&'static str, String>,
    last_overwrite: Option<Instant>,
    /// The last [`enforce`] has read all these files, and no value was foreign.
    is_checked: bool,
}

/// The shortest time between two overwrites of foreign values.
const OVERWRITE_PAUSE: Duration = Duration::from_secs(1);

impl WriteRecord {
    /// Takes the present values as our own: after a restart they cannot be distinguished from foreign ones.
    pub fn adopt(group: &Group, on: &KernelFeatures) -> WriteRecord {
        let written = settings(on, &GroupLimits::default())
            .into_iter()
            .filter_map(|s| Some((s.file, first_line(&group.get(s.file).ok()?))))
            .collect();
        WriteRecord { written, last_overwrite: None, is_checked: false }
    }
}

/// The result of [`enforce`].
#[derive(Debug, Default)]
pub struct EnforcementReport {
    /// File and value, as read back.
    pub in_force: Vec<(String, String)>,
    /// Files this group does not have or that did not take the value, in a sentence each.
    pub notes: Vec<String>,
}

/// Makes the group's files hold `wanted`: reads each, writes where it differs, reads back.
///
/// A value that is neither the wanted one nor the one written last is foreign: it is overwritten at most once
/// a second, and the call returns `ForeignWrite`, even if our value holds now. Only the cpu files are
/// essential; a value that another controller refuses becomes a note.
pub fn enforce(
    group: &Group,
    wanted: &[Setting],
    record: &mut WriteRecord,
    now: Instant,
) -> Result<EnforcementReport, RuntimeError> {
    record.is_checked = false;
    let report = make_hold(group, wanted.iter().collect(), record, now)?;
    record.is_checked = record.written.keys().all(|file| wanted.iter().any(|setting| setting.file == *file));
    Ok(report)
}

/// As [`enforce`], but a file that holds its wanted value by the last check is not read. A foreign value is noticed by
/// the next [`enforce`] only. Every read takes six system calls, and a plan changes few of the files.
pub fn enforce_changes(
    group: &Group,
    wanted: &[Setting],
    record: &mut WriteRecord,
    now: Instant,
) -> Result<EnforcementReport, RuntimeError> {
    if !record.is_checked {
        return enforce(group, wanted, record, now);
    }
    let holds = |setting: &&Setting| record.written.get(setting.file) == Some(&setting.value);
    let (held, changed): (Vec<&Setting>, Vec<&Setting>) = wanted.iter().partition(holds);
    record.is_checked = false;
    let mut report = make_hold(group, changed, record, now)?;
    record.is_checked = true;
    report.in_force.extend(held.into_iter().map(|setting| (setting.file.to_owned(), setting.value.clone())));
    report.in_force.sort_by_key(|(file, _)| wanted.iter().position(|setting| setting.file == file.as_str()));
    Ok(report)
}

/// Reads each of these files, writes where it differs, reads back.
fn make_hold(
    group: &Group,
    wanted: Vec<&Setting>,
    record: &mut WriteRecord,
    now: Instant,
) -> Result<EnforcementReport, RuntimeError> {
    let mut report = EnforcementReport::default();
    let mut foreign_write = None;
    let may_overwrite = record.last_overwrite.is_none_or(|t| now.saturating_duration_since(t) >= OVERWRITE_PAUSE);
    for setting in in_safe_order(group, wanted) {
        let Setting { file, value } = setting;
        let Some(found) = read_now(group, setting, &mut report.notes)? else { continue };
        let means_all = || value.is_empty() && group.parent_cpus().is_some_and(|all| all.to_string() == found);
        if found == *value || (*file == "cpuset.cpus" && means_all()) {
            record.written.insert(file, found.clone());
            report.in_force.push((file.to_string(), found));
            continue;
        }
        if record.written.get(file).is_some_and(|last| *last != found) {
            foreign_write.get_or_insert((*file, value.clone(), found.clone()));
            if !may_overwrite {
                report.in_force.push((file.to_string(), found));
                continue;
            }
            record.last_overwrite = Some(now);
        }
        let Some(written) = write(group, setting, &mut report.notes)? else {
            report.in_force.push((file.to_string(), found));
            continue;
        };
        let back = group.get(file).map(|t| first_line(&t)).map_err(|e| group.error("read", file, e))?;
        if *file == IDLE_FILE {
            // The kernel has changed the weight with it.
            record.written.remove("cpu.weight");
            record.written.remove("cpu.shares");
        }
        if back == written {
            record.written.insert(file, back.clone());
        } else {
            record.last_overwrite = Some(now);
            foreign_write.get_or_insert((*file, written, back.clone()));
        }
        report.in_force.push((file.to_string(), back));
    }
    match foreign_write {
        Some((file, wanted, found)) => {
            Err(RuntimeError::ForeignWrite { key: group.key().to_owned(), setting: file.to_owned(), wanted, found })
        }
        None => Ok(report),
    }
}

/// The groups of jobs cannot do without their CPU files. Any other file may be missing or refuse a value.
fn is_essential(file: &str) -> bool {
    Controller::of_file(file) == Controller::Cpu
}

/// What the file of a setting says; `None` if the kernel does not have the file.
fn read_now(group: &Group, setting: &Setting, notes: &mut Vec<String>) -> Result<Option<String>, RuntimeError> {
    let Setting { file, value } = setting;
    match group.get(file) {
        Ok(text) => Ok(Some(first_line(&text))),
        Err(e) if is_essential(file) => Err(group.error("read", file, e)),
        Err(_) if group.is_gone() => Err(RuntimeError::Gone { key: group.key().to_owned() }),
        // A missing file is worth a note only if a value other than the default was wanted.
        Err(_) => {
            notes.extend(missing_note(file, value));
            Ok(None)
        }
    }
}

/// Writes a setting, and returns what was written; `None` if the file did not take it.
fn write(group: &Group, setting: &Setting, notes: &mut Vec<String>) -> Result<Option<String>, RuntimeError> {
    let Setting { file, value } = setting;
    fail::point("limit-before-write");
    let written = match value.as_str() {
        "" => clear(group, file),
        value => group.put(file, value).map(|()| value.to_owned()),
    };
    fail::point("limit-after-write");
    match written {
        Ok(written) => Ok(Some(written)),
        Err(e) if is_essential(file) || group.is_gone() => Err(group.error("write", file, e)),
        Err(e) => {
            notes.push(format!("{file} did not take {value}: {e}"));
            Ok(None)
        }
    }
}

/// Empties a list. An empty write is no write at all, so it takes a line end; some kernels (6.1 is one) refuse to
/// empty the CPUs of a group with processes, even on v2, and get all CPUs of the group above instead, which means the
/// same. Returns what was written.
fn clear(group: &Group, file: &str) -> std::io::Result<String> {
    match group.put(file, "\n") {
        Err(e) if e.raw_os_error() == Some(libc::ENOSPC) => {
            let all = group.parent_cpus().ok_or(e)?.to_string();
            group.put(file, &all).map(|()| all)
        }
        other => other.map(|()| String::new()),
    }
}

/// v1 checks quota over period against the parent at each single write. A longer period is written before the
/// quota, a shorter one after it: then no state in between exceeds the final one.
fn in_safe_order<'s>(group: &Group, mut wanted: Vec<&'s Setting>) -> Vec<&'s Setting> {
    let place = |file| wanted.iter().position(|setting| setting.file == file);
    if let (Some(period), Some(quota)) = (place("cpu.cfs_period_us"), place("cpu.cfs_quota_us"))
        && period < quota
        && group.get("cpu.cfs_period_us").is_ok_and(|now| now.parse::<u64>().is_ok_and(|now| now > PERIOD_US))
    {
        wanted.swap(period, quota);
    }
    wanted
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().trim_end().to_owned()
}

fn missing_note(file: &str, value: &str) -> Option<String> {
    let default = ["max", "0", "-1", "", "default 100", "100"].contains(&value) || file == "cpuset.cpus";
    (!default).then(|| format!("{file} is not available to this group, so {value} is not enforced"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn on(version: Version) -> KernelFeatures {
        let block_weight_file = Some(if version == Version::V1 { "blkio.bfq.weight" } else { "io.weight" });
        KernelFeatures {
            version,
            all_cpus: CpuList::new(vec![0, 1, 2, 3]),
            has_cpu_idle: false,
            block_weight_file,
            page_bytes: 4096,
        }
    }

    fn value(settings: &[Setting], file: &str) -> String {
        settings.iter().find(|s| s.file == file).unwrap_or_else(|| panic!("{file}")).value.clone()
    }

    #[test]
    fn values_as_worked_out_by_hand() {
        let wanted = GroupLimits {
            cpu_share: Some(0.25),
            cpu_cap_cores: Some(1.5),
            yields: false,
            cpus: Some(CpuList::new(vec![2, 3])),
            memory_limit_bytes: Some(10_000),
            memory_spared_bytes: 4096,
            block_share: Some(0.5),
            max_tasks: Some(4096),
        };
        let v1 = settings(&on(Version::V1), &wanted);
        assert_eq!(value(&v1, "cpu.shares"), "25600");
        assert_eq!(value(&v1, "cpu.cfs_quota_us"), "150000");
        assert_eq!(value(&v1, "cpuset.cpus"), "2-3");
        assert_eq!(value(&v1, "memory.soft_limit_in_bytes"), "8192");
        assert_eq!(value(&v1, "blkio.bfq.weight"), "500");
        let v2 = settings(&on(Version::V2), &wanted);
        assert_eq!(value(&v2, "cpu.weight"), "2500");
        assert_eq!(value(&v2, "cpu.max"), "150000 100000");
        assert_eq!(value(&v2, "memory.high"), "8192");
        assert_eq!(value(&v2, "memory.low"), "4096");
        assert_eq!(value(&v2, "io.weight"), "default 5000");
        assert_eq!(value(&v2, "pids.max"), "4096");
    }

    #[test]
    fn defaults_restore() {
        let texts = |on: KernelFeatures| -> Vec<String> {
            let all = settings(&on, &GroupLimits::default());
            all.into_iter().map(|s| format!("{} {}", s.file, s.value)).collect()
        };
        // As a new group of the kernel has them; v1's files know no "no CPUs of its own" and no "no limit".
        let v1 = KernelFeatures { has_cpu_idle: true, ..on(Version::V1) };
        let expected = [
            "cpu.idle 0",
            "cpu.shares 1024",
            "cpu.cfs_period_us 100000",
            "cpu.cfs_quota_us -1",
            "cpuset.cpus 0-3",
            "memory.soft_limit_in_bytes 9223372036854771712",
            "blkio.bfq.weight 100",
            "pids.max max",
        ];
        assert_eq!(texts(v1), expected);
        let v2 = KernelFeatures { has_cpu_idle: true, ..on(Version::V2) };
        let expected = [
            "cpu.idle 0",
            "cpu.weight 100",
            "cpu.max max 100000",
            "cpuset.cpus ",
            "memory.high max",
            "memory.low 0",
            "io.weight default 100",
            "pids.max max",
        ];
        assert_eq!(texts(v2), expected);
    }

    #[test]
    fn a_group_that_yields_has_no_weight_or_the_smallest() {
        let wanted = GroupLimits { yields: true, cpu_share: Some(0.5), ..GroupLimits::default() };
        assert_eq!(value(&settings(&on(Version::V1), &wanted), "cpu.shares"), "2");
        assert_eq!(value(&settings(&on(Version::V2), &wanted), "cpu.weight"), "1");
        for version in [Version::V1, Version::V2] {
            let on = KernelFeatures { has_cpu_idle: true, ..on(version) };
            let yielding = settings(&on, &wanted);
            assert_eq!(value(&yielding, "cpu.idle"), "1");
            assert!(!yielding.iter().any(|s| matches!(s.file, "cpu.weight" | "cpu.shares")));
            let back = settings(&on, &GroupLimits { yields: false, ..wanted.clone() });
            assert_eq!((back[0].file, back[0].value.as_str()), ("cpu.idle", "0"), "before the weight");
            assert!(back.iter().any(|s| matches!(s.file, "cpu.weight" | "cpu.shares")));
        }
    }

    #[test]
    fn no_quota_is_too_small_for_the_kernel() {
        let tiny = GroupLimits { cpu_cap_cores: Some(0.0), cpu_share: Some(0.0), ..GroupLimits::default() };
        assert_eq!(value(&settings(&on(Version::V1), &tiny), "cpu.cfs_quota_us"), "1000");
        assert_eq!(value(&settings(&on(Version::V1), &tiny), "cpu.shares"), "2");
        assert_eq!(value(&settings(&on(Version::V2), &tiny), "cpu.weight"), "1");
    }

    proptest! {
        #[test]
        fn ratios_kept(a in 0.01f64..=1.0, b in 0.01f64..=1.0) {
            let wanted = a / b;
            let v1 = shares_v1(a) as f64 / shares_v1(b) as f64;
            let v2 = weight_v2(a) as f64 / weight_v2(b) as f64;
            prop_assert!((v1 / wanted - 1.0).abs() < 0.01, "{a} {b}: {v1} for {wanted}");
            prop_assert!((v2 / wanted - 1.0).abs() < 0.01, "{a} {b}: {v2} for {wanted}");
        }

        #[test]
        fn memory_never_below_use(asked in any::<u64>(), used in any::<u64>()) {
            let limit = memory_limit_bytes(asked, used);
            prop_assert!(limit >= asked.min(u64::MAX - HEADROOM_BYTES) || limit >= used);
            prop_assert!(limit == u64::MAX || limit >= used.saturating_add(used / 8));
            prop_assert!(used > u64::MAX / 4 || !memory_limit_is_near(limit, used));
        }
    }
}
