//! A start that shares well.
//!
//! **Problem.** Numeric libraries assume that the machine is theirs: each makes a thread for every core, and threads
//! that wait for work spin instead of sleeping. Three jobs side by side then use most of the machine to wait for
//! each other: setting passive waiting at the start, and nothing else, made three real PyTorch jobs on two cores
//! three and a half times faster. No limit set later repairs a bad start, because the pools are sized once.
//!
//! **Approach.** [`tuned_env`] is a pure function from what the user has set to variables to add, each with its
//! reason. [`enter`] arranges what happens between fork and exec.
//!
//! What is *not* set, on purpose: oneTBB has no variable for its pool; it counts the CPUs of its affinity mask and
//! its idle threads sleep soon, so that `cores` mode fits it. `XLA_FLAGS` is left alone: XLA ends a program whose
//! flags it does not know, and its pool can be sized without (`PJRT_NPROC`).
//!
//! **Properties.** `never_overrides`: a variable the user has set is never in the answer, nor one that would take
//! precedence over it (`MKL_NUM_THREADS` beats `OMP_NUM_THREADS`). `threads_fit`: all pools have cores divided by
//! jobs threads, at least one.

use crate::cpus::CpuList;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::Command;

/// One variable to add to a job's environment, and the reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartVariable {
    pub name: Cow<'static, str>,
    pub value: String,
    pub why: Cow<'static, str>,
}

/// One rule of the table below: `name` is added unless the user has set it or any of `unless`.
struct Rule {
    name: &'static str,
    value: Value,
    unless: &'static [&'static str],
    why: &'static str,
}

enum Value {
    Fixed(&'static str),
    /// As many threads as the job's part of the cores.
    Threads,
}

use Value::{Fixed, Threads};

const RULES: &[Rule] = &[
    Rule {
        name: "OMP_WAIT_POLICY",
        value: Fixed("PASSIVE"),
        unless: &[],
        why: "OpenMP threads that wait sleep instead of spinning on a core another job could use",
    },
    Rule {
        name: "GOMP_SPINCOUNT",
        value: Fixed("0"),
        unless: &["OMP_WAIT_POLICY"],
        why: "GNU OpenMP: no spinning before a waiting thread sleeps",
    },
    Rule {
        name: "KMP_BLOCKTIME",
        value: Fixed("0"),
        unless: &["OMP_WAIT_POLICY", "KMP_LIBRARY"],
        why: "LLVM and Intel OpenMP (also MKL's): a waiting thread sleeps at once, not after 200 ms",
    },
    Rule {
        name: "OPENBLAS_THREAD_TIMEOUT",
        value: Fixed("4"),
        unless: &["GOTO_THREAD_TIMEOUT", "THREAD_TIMEOUT"],
        why: "OpenBLAS: idle threads spin for 2^4 clock ticks, the least it takes, instead of some 0.1 s",
    },
    Rule {
        name: "OMP_NUM_THREADS",
        value: Threads,
        unless: &[],
        why: "OpenMP (PyTorch and most others): as many threads as the job can expect cores",
    },
    Rule {
        name: "MKL_NUM_THREADS",
        value: Threads,
        unless: &["OMP_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS"],
        why: "MKL: as many threads as the job can expect cores",
    },
    Rule {
        name: "OPENBLAS_NUM_THREADS",
        value: Threads,
        unless: &["OMP_NUM_THREADS", "GOTO_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS"],
        why: "OpenBLAS: as many threads as the job can expect cores",
    },
    Rule {
        name: "BLIS_NUM_THREADS",
        value: Threads,
        unless: &["OMP_NUM_THREADS", "BLIS_JC_NT", "BLIS_IC_NT", "BLIS_JR_NT", "BLIS_IR_NT"],
        why: "BLIS: as many threads as the job can expect cores",
    },
    Rule {
        name: "NUMEXPR_NUM_THREADS",
        value: Threads,
        unless: &["OMP_NUM_THREADS", "NUMEXPR_MAX_THREADS"],
        why: "numexpr: as many threads as the job can expect cores",
    },
    Rule {
        name: "NUMBA_NUM_THREADS",
        value: Threads,
        unless: &[],
        why: "Numba (on OpenMP, TBB or its own pool): as many threads as the job can expect cores",
    },
    Rule {
        name: "TF_NUM_INTRAOP_THREADS",
        value: Threads,
        unless: &[],
        why: "TensorFlow: as many threads within one operation as the job can expect cores",
    },
    Rule {
        name: "TF_NUM_INTEROP_THREADS",
        value: Threads,
        unless: &[],
        why: "TensorFlow: as many operations at once as the job can expect cores",
    },
    Rule {
        name: "PJRT_NPROC",
        value: Threads,
        unless: &["NPROC"],
        why: "JAX: XLA's thread pools have as many threads as the job can expect cores",
    },
    Rule {
        name: "RAYON_NUM_THREADS",
        value: Threads,
        unless: &[],
        why: "Rayon (tokenizers, candle): as many threads as the job can expect cores",
    },
    Rule {
        name: "POLARS_MAX_THREADS",
        value: Threads,
        unless: &[],
        why: "Polars: as many threads as the job can expect cores",
    },
    Rule {
        name: "PYTHONUNBUFFERED",
        value: Fixed("1"),
        unless: &[],
        why: "Python writes its output when it is printed, so that a loss is seen at once",
    },
];

/// How many threads a job's pools should have when `expected_jobs` share `cores`.
pub fn fitting_threads(cores: f64, expected_jobs: usize) -> usize {
    ((cores / expected_jobs.max(1) as f64).floor() as usize).max(1)
}

/// The variables to add for a job that shares `cores` with `expected_jobs` jobs (itself counted). `user` answers what
/// the user has set.
pub fn tuned_env(user: impl Fn(&str) -> Option<String>, cores: f64, expected_jobs: usize) -> Vec<StartVariable> {
    let threads = fitting_threads(cores, expected_jobs);
    // Programs that split the CPU into several XLA devices know what they do, and need a thread for each device.
    let several_devices = user("XLA_FLAGS").is_some_and(|flags| flags.contains("host_platform_device_count"));
    RULES
        .iter()
        .filter(|rule| user(rule.name).is_none() && rule.unless.iter().all(|name| user(name).is_none()))
        .filter(|rule| !(rule.name == "PJRT_NPROC" && several_devices))
        .map(|rule| StartVariable {
            name: rule.name.into(),
            value: match rule.value {
                Fixed(value) => value.to_owned(),
                Threads => threads.to_string(),
            },
            why: rule.why.into(),
        })
        .collect()
}

/// Changes the variables of a job whose OpenMP teams follow its share while it runs. OpenMP may use all `cores`,
/// because the team of each parallel region is set before the region. MKL takes the number from OpenMP. All other
/// pools stay as they are: they are sized once.
pub fn let_teams_follow(variables: &mut Vec<StartVariable>, cores: f64) {
    variables.retain(|variable| variable.name != "MKL_NUM_THREADS");
    if let Some(openmp) = variables.iter_mut().find(|variable| variable.name == "OMP_NUM_THREADS") {
        openmp.value = fitting_threads(cores, 1).to_string();
        openmp.why = "OpenMP (PyTorch and most others): the most threads; the team follows the share".into();
    }
}

/// Makes the child start a session of its own, join its cgroup and bind itself to `cpus` (if given), before
/// the job's program runs.
///
/// The session is needed: a process group that is stopped while its session's leader dies gets SIGHUP from
/// the kernel, and a job in the daemon's session would be killed that way if the daemon died at the wrong
/// moment. Must not be combined with `Command::process_group`: a group's leader cannot start a session.
///
/// As the last safeguard of the fallback's duty cycle the child requests SIGCONT for the death of its parent,
/// which does nothing to a process that runs.
pub fn enter(command: &mut Command, procs_files: &[PathBuf], cpus: Option<&CpuList>) -> io::Result<()> {
    let files: Vec<CString> =
        procs_files.iter().map(|path| CString::new(path.as_os_str().as_bytes())).collect::<Result<_, _>>()?;
    let mask = cpus.filter(|list| !list.is_empty()).map(affinity_mask).transpose()?;
    crate::system::enter_before_exec(command, files, mask);
    Ok(())
}

fn affinity_mask(cpus: &CpuList) -> io::Result<nix::sched::CpuSet> {
    let mut mask = nix::sched::CpuSet::new();
    for cpu in cpus.iter() {
        mask.set(cpu as usize)?;
    }
    Ok(mask)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn tuned(user: &[(&str, &str)], cores: f64, jobs: usize) -> BTreeMap<String, String> {
        let user: BTreeMap<_, _> = user.iter().copied().collect();
        tuned_env(|name| user.get(name).map(|v| v.to_string()), cores, jobs)
            .into_iter()
            .map(|t| (t.name.into_owned(), t.value))
            .collect()
    }

    #[test]
    fn threads_fit() {
        for (cores, jobs, threads) in [(2.0, 3, "1"), (2.0, 1, "2"), (16.0, 3, "5"), (1.5, 1, "1"), (8.0, 0, "8")] {
            let env = tuned(&[], cores, jobs);
            for name in
                ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "PJRT_NPROC", "RAYON_NUM_THREADS"]
            {
                assert_eq!(env[name], threads, "{name} with {cores} cores and {jobs} jobs");
            }
        }
        assert_eq!(tuned(&[], 4.0, 2)["OMP_WAIT_POLICY"], "PASSIVE");
        assert_eq!(tuned(&[], 4.0, 2)["PYTHONUNBUFFERED"], "1");
    }

    #[test]
    fn never_overrides() {
        for rule in RULES {
            let env = tuned(&[(rule.name, "mine")], 4.0, 2);
            assert!(!env.contains_key(rule.name), "{} is the user's", rule.name);
        }
        let env = tuned(&[("OMP_NUM_THREADS", "3")], 4.0, 2);
        for beats in ["MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS"] {
            assert!(!env.contains_key(beats), "{beats} would take precedence over the user's OMP_NUM_THREADS");
        }
        assert_eq!(env["RAYON_NUM_THREADS"], "2");
        let env = tuned(&[("OMP_WAIT_POLICY", "ACTIVE")], 4.0, 2);
        assert!(!env.contains_key("GOMP_SPINCOUNT") && !env.contains_key("KMP_BLOCKTIME"));
        let env = tuned(&[("XLA_FLAGS", "--xla_force_host_platform_device_count=8")], 4.0, 2);
        assert!(!env.contains_key("PJRT_NPROC") && !env.contains_key("XLA_FLAGS"));
    }

    #[test]
    fn teams_that_follow_may_use_all_cores() {
        let following = |user: &[&str]| {
            let set = |name: &str| user.contains(&name).then(String::new);
            let mut variables = tuned_env(set, 8.0, 4);
            let_teams_follow(&mut variables, 8.0);
            let variables = variables.into_iter().map(|v| (v.name.into_owned(), v.value));
            variables.collect::<BTreeMap<_, _>>()
        };
        let env = following(&[]);
        assert_eq!((env["OMP_NUM_THREADS"].as_str(), env["OPENBLAS_NUM_THREADS"].as_str()), ("8", "2"));
        assert!(!env.contains_key("MKL_NUM_THREADS"), "MKL takes the number from OpenMP");
        assert!(!following(&["OMP_NUM_THREADS"]).contains_key("OMP_NUM_THREADS"), "it is the user's");
    }

    #[test]
    fn a_child_leads_its_own_session_on_its_own_cpu() {
        let cpu = CpuList::new(vec![0]);
        let mut command = Command::new("sh");
        command.args(["-c", "cut -d' ' -f1,5,6 /proc/$$/stat; grep Cpus_allowed_list /proc/$$/status"]);
        enter(&mut command, &[], Some(&cpu)).unwrap();
        let out = String::from_utf8(command.output().unwrap().stdout).unwrap();
        let numbers: Vec<&str> = out.lines().next().unwrap().split(' ').collect();
        assert!(numbers[0] == numbers[1] && numbers[1] == numbers[2], "pid, group and session are the same: {out}");
        assert!(out.lines().nth(1).unwrap().ends_with("\t0"), "{out}");
    }

    #[test]
    fn a_group_that_is_gone_fails_the_start_and_not_silently() {
        let mut command = Command::new("true");
        enter(&mut command, &["/nonexistent/cgroup.procs".into()], None).unwrap();
        assert_eq!(command.spawn().unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
