//! `doctor`: what this machine can do for jobs, what it cannot, and the remedy.
//!
//! Each check is one line. *Essential* is what no job can do without (a place for the journal, a journal that can be
//! read, room on its disk, a daemon that answers); without it the exit code is 1. Everything else is a degree of
//! service: jobs run, only with less to share by.

use crate::link::{DaemonState, Link};
use anyhow::Result;
use gainshare_core::teams::jobs_with_whole_cores;
use gainshare_daemon::api::types::RuntimeInfo;
use gainshare_daemon::journal::{Journal, JournalError};
use gainshare_daemon::paths::Paths;
use gainshare_daemon::{LIBRARY_FILE, SWITCH_VARIABLE, library_beside};
use gainshare_figures::terminal::{Colour, Printer, Side, Table, bytes, printable, seconds};
use gainshare_limits::LimitMode;
use gainshare_limits::cgroup::{BaseGroup, Controller, Hierarchy, Version};
use gainshare_limits::docker::{Engine, default_socket};
use gainshare_limits::nvml::{self, GpuReading, Nvml};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Below this the journal still works but logs will soon fill the rest.
const LITTLE_SPACE_BYTES: u64 = 1 << 30;

/// Below this the next job may be refused.
const NO_SPACE_BYTES: u64 = 16 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum CheckResult {
    Ok,
    /// Works, with less.
    Less,
    /// Essential, and missing.
    Fails,
}

#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    #[serde(rename = "verdict")]
    result: CheckResult,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    remedy: Option<String>,
}

impl Check {
    fn ok(what: &'static str, found: impl Into<String>) -> Check {
        Check { what, result: CheckResult::Ok, found: found.into(), remedy: None }
    }

    fn less(what: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { what, result: CheckResult::Less, found: found.into(), remedy: Some(remedy.into()) }
    }

    fn fails(what: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Check {
        Check { what, result: CheckResult::Fails, found: found.into(), remedy: Some(remedy.into()) }
    }
}

pub fn doctor(link: &Link, out: &Printer) -> Result<u8> {
    let mut checks = vec![machine()];
    checks.extend(cgroups());
    let library = own_library();
    checks.push(inside(&library, std::env::var(SWITCH_VARIABLE).ok().as_deref()));
    checks.push(gpu(&library));
    checks.push(docker());
    checks.extend(directories(&link.paths));
    checks.push(space(&link.paths));
    checks.extend(daemon(link, &checks));
    let healthy = checks.iter().all(|check| check.result != CheckResult::Fails);
    if out.is_json() {
        out.json(&serde_json::json!({"healthy": healthy, "checks": checks}))?;
    } else {
        out.text(&render(&checks, out))?;
    }
    Ok(u8::from(!healthy))
}

fn render(checks: &[Check], out: &Printer) -> String {
    let mut table = Table::new(&[("", Side::Left), ("", Side::Left), ("", Side::Left)]);
    for check in checks {
        let (mark, colour) = match check.result {
            CheckResult::Ok => ("ok", Colour::Green),
            CheckResult::Less => ("less", Colour::Yellow),
            CheckResult::Fails => ("FAILS", Colour::Red),
        };
        table.row(vec![
            (mark.into(), colour),
            (check.what.into(), Colour::Bold),
            (printable(&check.found), Colour::Plain),
        ]);
        if let Some(remedy) = &check.remedy {
            table.row(vec![
                (String::new(), Colour::Plain),
                (String::new(), Colour::Plain),
                (format!("→ {}", printable(remedy)), Colour::Dim),
            ]);
        }
    }
    table.render(out, 0)
}

fn machine() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let memory = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    });
    let memory = memory.map_or_else(|| "an unknown amount".to_owned(), |kib| bytes(kib << 10));
    Check::ok("machine", format!("{cores} core(s), {memory} of memory"))
}

/// Makes a group of our own, reads what it can do, and removes it again.
fn cgroups() -> Vec<Check> {
    const WITHOUT: &str = "jobs are shared by priority and by stopping and continuing them, which is coarse";
    let base = Hierarchy::detect().and_then(|found| {
        let place = found.parent().display().to_string();
        BaseGroup::open(found, &format!("gainshare-doctor-{}", std::process::id())).map(|base| (base, place))
    });
    let (base, place) = match base {
        Ok(found) => found,
        // The daemon's note says the same in the same words.
        Err(error) => {
            return vec![Check::less("cgroups", format!("no cgroups: {error}"), format!("until then {WITHOUT}"))];
        }
    };
    let version = match base.version() {
        Version::V1 => "v1",
        Version::V2 => "v2",
    };
    let mut checks = vec![Check::ok("cgroups", format!("{version}, groups are made in {place}"))];
    for (controller, what, without) in [
        (Controller::Cpu, "cpu", WITHOUT),
        (Controller::Memory, "memory", "memory is watched but not shared"),
        (Controller::CpuSet, "cpuset", "--mode cores falls back to weights"),
        (Controller::Pids, "pids", "a fork bomb is not contained"),
    ] {
        checks.push(if base.has(controller) {
            Check::ok(what, "may be limited")
        } else {
            let remedy = match base.version() {
                Version::V1 => "mount the controller, or run as root",
                Version::V2 => "have the controller delegated to you (systemd: Delegate=yes), or run as root",
            };
            Check::less(what, format!("no right to this controller: {without}"), remedy)
        });
    }
    let whole_cores = (base.has(Controller::CpuSet), base.has_cpu_idle());
    checks.push(share_mode(LimitMode::default(), base.capacity().cores, whole_cores));
    checks.push(match (base.block_weight_file(), base.block_note()) {
        (Some(file), None) => Check::ok("block I/O", format!("shared by {file}")),
        (_, note) => Check::less(
            "block I/O",
            note.unwrap_or("the kernel has no weight for it: it is watched but not shared"),
            "choose a scheduler with weights for the disk, e.g. `echo bfq > /sys/block/DISK/queue/scheduler`",
        ),
    });
    base.remove();
    checks
}

/// How shares of the CPU become limits on this machine by default. `whole_cores`: whether the kernel can give whole
/// cores, and lend unused ones by `cpu.idle`.
fn share_mode(mode: LimitMode, cores: f64, whole_cores: (bool, bool)) -> Check {
    let whole = match whole_cores {
        (true, true) => "--mode cores gives whole cores, and lends unused ones (cpu.idle)",
        (true, false) => "--mode cores gives whole cores, and lends unused ones (the smallest weight)",
        (false, _) => "whole cores cannot be given: no cpuset controller",
    };
    let teams = match jobs_with_whole_cores(cores) {
        0 | 1 => "thread teams of jobs side by side are as large as their shares, rounded".to_owned(),
        jobs => format!("thread teams of up to {jobs} jobs together fit the cores"),
    };
    Check::ok("CPU shares", format!("by {} on {cores} core(s); {teams}; {whole}", mode.name()))
}

/// The library inside jobs, which lies beside this program; `Err`: why it cannot be used.
fn own_library() -> Result<PathBuf, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program cannot be found: {error}"))?;
    library_beside(&program)
}

/// Whether the thread teams of jobs follow their shares. `switch`: the variable of this shell that jobs inherit.
fn inside(library: &Result<PathBuf, String>, switch: Option<&str>) -> Check {
    const WHAT: &str = "library inside jobs";
    match library {
        Ok(_) if switch == Some("0") => Check::less(
            WHAT,
            format!("switched off by {SWITCH_VARIABLE}=0: thread pools are fixed at the start"),
            format!("unset {SWITCH_VARIABLE}"),
        ),
        Ok(library) if cfg!(not(target_arch = "x86_64")) => Check::less(
            WHAT,
            "it works on x86-64 only: thread pools are fixed at the start",
            format!("remove {}", library.display()),
        ),
        Ok(library) => {
            Check::ok(WHAT, format!("{}: thread teams of PyTorch jobs follow their shares", library.display()))
        }
        Err(why) => Check::less(
            WHAT,
            format!("{why}: thread pools are fixed at the start"),
            format!("install {LIBRARY_FILE} beside gainshare, in a folder without spaces and colons in its path"),
        ),
    }
}

/// GPUs of this machine, and whether the work of jobs on them can follow shares and is measured.
fn gpu(library: &Result<PathBuf, String>) -> Check {
    let read = nvml::library_file().map(|file| Nvml::load(&file).map(|mut nvml| nvml.read()));
    let listed = std::fs::read_dir("/proc/driver/nvidia/gpus").map(|entries| entries.count()).unwrap_or(0);
    let memory = |gpu: &GpuReading| format!("{} of {} free", bytes(gpu.free_bytes), bytes(gpu.total_bytes));
    let (count, measured) = match read {
        Some(Ok(gpus)) => (gpus.len(), Ok(gpus.iter().map(memory).collect::<Vec<_>>().join(", "))),
        Some(Err(why)) => (listed.max(1), Err(why)),
        None => (listed, Err(format!("{} is missing", nvml::LIBRARY))),
    };
    match (count, library, measured) {
        (0, ..) => Check::ok("GPU", "no NVIDIA GPU"),
        (_, Ok(_), Ok(memory)) => {
            let found = format!("{count} ({memory}); work on them follows shares with `run --gpu` or `up --gpu`");
            Check::ok("GPU", found)
        }
        (_, Ok(_), Err(why)) => Check::less(
            "GPU",
            format!("{count}; memory and time of jobs on them are not measured: {why}"),
            format!("install {} of the driver's own version", nvml::LIBRARY),
        ),
        (_, Err(why), _) => Check::less(
            "GPU",
            format!("{count}; launches cannot be paced: {why}"),
            "see the line about the library inside jobs",
        ),
    }
}

fn docker() -> Check {
    let socket = default_socket();
    match Engine::connect(&socket) {
        Ok(_) => Check::ok("docker", format!("engine at {}", socket.display())),
        Err(error) => Check::less(
            "docker",
            error.to_string(),
            "only needed for containers: start the engine, or join the group that may use its socket",
        ),
    }
}

fn directories(paths: &Paths) -> Vec<Check> {
    if let Err(error) = paths.create() {
        return vec![Check::fails(
            "directories",
            error.to_string(),
            "set GAINSHARE_STATE_DIR and GAINSHARE_RUNTIME_DIR to directories of your own",
        )];
    }
    let mut checks = Vec::new();
    for (what, dir, variable) in
        [("state dir", &paths.state, "GAINSHARE_STATE_DIR"), ("runtime dir", &paths.runtime, "GAINSHARE_RUNTIME_DIR")]
    {
        let probe = dir.join(format!(".doctor-{}", std::process::id()));
        let written = std::fs::write(&probe, [0u8; 4096]);
        let _ = std::fs::remove_file(&probe);
        checks.push(match written {
            Ok(()) => Check::ok(what, dir.display().to_string()),
            Err(error) => Check::fails(
                what,
                format!("cannot write to {}: {error}", dir.display()),
                format!("free space or correct its rights, or set {variable} to another directory"),
            ),
        });
    }
    checks
}

fn space(paths: &Paths) -> Check {
    match free_bytes(&paths.state) {
        Some(free) if free < NO_SPACE_BYTES => Check::fails(
            "free disk",
            format!("only {} left for journal and logs", bytes(free)),
            format!("free some space on the disk of {}", paths.state.display()),
        ),
        Some(free) if free < LITTLE_SPACE_BYTES => Check::less(
            "free disk",
            format!("{} left for journal and logs", bytes(free)),
            format!("free some space on the disk of {}", paths.state.display()),
        ),
        Some(free) => Check::ok("free disk", format!("{} for journal and logs", bytes(free))),
        None => Check::less("free disk", "cannot be measured", format!("see `df {}`", paths.state.display())),
    }
}

fn free_bytes(dir: &Path) -> Option<u64> {
    let found = nix::sys::statvfs::statvfs(dir).ok()?;
    Some(found.blocks_available() as u64 * found.fragment_size() as u64)
}

/// Whether the next daemon can read the journal; `None` if there is none yet. A daemon that runs says so itself.
fn journal(path: &Path) -> Option<Check> {
    const WHAT: &str = "journal";
    if !path.exists() {
        return None;
    }
    let file = path.display();
    Some(match Journal::examine(path) {
        Ok(()) => Check::ok(WHAT, format!("{file} can be read")),
        Err(JournalError::Damaged { what, .. }) => Check::fails(
            WHAT,
            format!("{file} is damaged: {what}"),
            format!("move it away (mv {file} {file}.damaged): running jobs go on, and what is known of jobs is lost"),
        ),
        Err(error @ JournalError::Newer { .. }) => {
            Check::fails(WHAT, error.to_string(), "install the version that wrote it")
        }
        Err(error) => Check::fails(WHAT, error.to_string(), format!("correct the rights of {file}, or try again")),
    })
}

/// `earlier`: the lines above.
fn daemon(link: &Link, earlier: &[Check]) -> Vec<Check> {
    match link.probe() {
        DaemonState::Running => match link.call(link.client.health()) {
            Ok(health) => {
                let found = format!(
                    "pid {}, policy {}, mode {}, {} live job(s), up for {}",
                    health.pid,
                    health.policy,
                    health.mode,
                    health.live_jobs,
                    seconds(health.uptime_s)
                );
                let mut checks = vec![Check::ok("daemon", found)];
                checks.extend(health.problems.iter().map(|problem| {
                    Check::less("daemon", problem.clone(), format!("see {}", link.paths.daemon_log().display()))
                }));
                checks.extend(health.runtimes.iter().flat_map(|runtime| runtime_notes(runtime, earlier)));
                checks
            }
            Err(error) => vec![Check::fails("daemon", error.to_string(), "try again")],
        },
        DaemonState::Silent => vec![Check::fails(
            "daemon",
            format!("it has {} but does not answer", link.client.socket().display()),
            format!(
                "continue it (kill -CONT) if it is stopped, else end it; its pid is in {}",
                link.paths.lock().display()
            ),
        )],
        DaemonState::Absent => {
            let mut checks: Vec<Check> = journal(&link.paths.journal()).into_iter().collect();
            checks.push(if checks.iter().all(|check| check.result == CheckResult::Ok) {
                Check::ok("daemon", "not running; `run` and `submit` start it")
            } else {
                Check::less("daemon", "not running, and none can start", "see the line about the journal")
            });
            if link.paths.socket().exists() {
                let text = "a daemon ended without cleaning up; the next one does it and takes its jobs over";
                checks.push(Check::less("leftovers", text, "start one with `gainshare up --detach`"));
            }
            checks
        }
    }
}

/// What the daemon says of a runtime. It runs on the same machine, so a note that is a line above is not repeated.
fn runtime_notes(runtime: &RuntimeInfo, earlier: &[Check]) -> Vec<Check> {
    let is_new = |note: &&String| !earlier.iter().any(|check| check.found == **note);
    let line = |note: &String| Check::less("daemon", format!("{}: {note}", runtime.kind), "see the lines above");
    runtime.notes.iter().filter(is_new).map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_about_teams_follows_the_number_of_cores() {
        let found = |cores| share_mode(LimitMode::default(), cores, (true, true)).found;
        assert!(found(2.0).starts_with("by weight on 2 core(s); thread teams of jobs side by side are as large as"));
        assert!(found(4.0).contains("up to 2 jobs"), "{}", found(4.0));
        assert!(found(16.0).contains("up to 8 jobs"), "{}", found(16.0));
        assert!(found(128.0).contains("up to 64 jobs"), "{}", found(128.0));
        let found = share_mode(LimitMode::default(), 2.0, (false, false)).found;
        assert!(found.ends_with("whole cores cannot be given: no cpuset controller"), "{found}");
    }

    #[test]
    fn a_note_of_the_daemon_is_left_out_if_it_is_a_line_already_and_only_then() {
        let earlier = [Check::less("block I/O", "no weight", "choose another scheduler")];
        let notes = ["no weight", "memory has no weight"].map(str::to_owned).to_vec();
        let shown = runtime_notes(&RuntimeInfo { kind: "process".to_owned(), notes }, &earlier);
        assert_eq!(
            shown.iter().map(|check| check.found.as_str()).collect::<Vec<_>>(),
            ["process: memory has no weight"]
        );
    }

    #[test]
    fn the_library_has_a_line_on_every_machine() {
        let library = Ok(PathBuf::from("/opt/libgainshare_inside.so"));
        let is_usable = cfg!(target_arch = "x86_64");
        assert_eq!(inside(&library, None).result == CheckResult::Ok, is_usable);
        assert_eq!(inside(&library, Some("1")).result == CheckResult::Ok, is_usable);
        let off = inside(&library, Some("0"));
        assert!(off.result == CheckResult::Less && off.found.contains("GAINSHARE_INSIDE=0"), "{off:?}");
        let missing = inside(&Err("it is missing".to_owned()), None);
        assert!(missing.result == CheckResult::Less && missing.remedy.is_some(), "{missing:?}");
    }
}
