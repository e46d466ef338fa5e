//! Starts the programs of a cluster in the network and the file system of their own, and knows them again later.
//!
//! A program is started in the background with its output in a file, in a session of its own, inside the
//! test bed's control group. Where it lives is said by two holders, processes that do nothing but keep a
//! namespace: one for the network of the whole test bed, one for the mounts of each node. No namespace is
//! pinned by a mount, so the kernel takes interfaces, rules and mounts back when the processes are gone.
//!
//! A process is named by its number and the time it started, so a number that the kernel has given to another
//! process is never signalled.

use crate::sh;
use anyhow::{Context, Result, bail};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A process, known by more than its number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// Clock ticks between the machine's start and the process's.
    started: u64,
}

impl Process {
    fn of(pid: i32) -> Option<Process> {
        let (_, started) = stat(pid)?;
        Some(Process { pid, started })
    }

    /// Whether it still runs. A dead child that was not waited for yet counts as dead.
    pub(crate) fn alive(self) -> bool {
        self.reap();
        stat(self.pid).is_some_and(|(state, started)| started == self.started && state != 'Z')
    }

    /// Takes note of its end if it was a child of ours.
    pub(crate) fn reap(self) {
        // A process that is no child of ours only gives an error.
        let _ = waitpid(Pid::from_raw(self.pid), Some(WaitPidFlag::WNOHANG));
    }

    pub(crate) fn signal(self, signal: Signal) -> Result<()> {
        if !self.alive() {
            bail!("process {} has ended", self.pid);
        }
        kill(Pid::from_raw(self.pid), signal).with_context(|| format!("cannot signal process {}", self.pid))
    }

    fn namespace(self, kind: &str) -> Result<File> {
        if !self.alive() {
            bail!(
                "the process that keeps the test bed's {kind} namespace has ended: `cargo xtask testbed down`, then up"
            );
        }
        let path = format!("/proc/{}/ns/{kind}", self.pid);
        File::open(&path).with_context(|| format!("cannot open {path}"))
    }
}

/// State letter and start time of a process.
fn stat(pid: i32) -> Option<(char, u64)> {
    let fields = sh::stat_fields(pid)?;
    Some((fields.first()?.chars().next()?, fields.get(19)?.parse().ok()?))
}

/// Which namespaces a process starts in.
pub(crate) enum Place<'a> {
    /// A new network.
    NewNetwork,
    /// In the network of a holder.
    Network(Process),
    /// In the network of a holder, with mounts of its own in which each `(from, to)` is bound.
    NewMounts(Process, &'a [(PathBuf, PathBuf)]),
    /// In the network of one holder and the mounts of another.
    Node { network: Process, mounts: Process },
}

/// Makes `command` start at a place.
fn put(command: &mut Command, place: &Place) -> Result<()> {
    let mut enter = Vec::new();
    let mut new = CloneFlags::empty();
    let mut binds: Vec<(PathBuf, PathBuf)> = Vec::new();
    match place {
        Place::NewNetwork => new = CloneFlags::CLONE_NEWNET,
        Place::Network(network) => enter.push((network.namespace("net")?, CloneFlags::CLONE_NEWNET)),
        Place::NewMounts(network, to_bind) => {
            enter.push((network.namespace("net")?, CloneFlags::CLONE_NEWNET));
            new = CloneFlags::CLONE_NEWNS;
            binds = to_bind.to_vec();
        }
        Place::Node { network, mounts } => {
            enter.push((network.namespace("net")?, CloneFlags::CLONE_NEWNET));
            enter.push((mounts.namespace("mnt")?, CloneFlags::CLONE_NEWNS));
        }
    }
    let prepare = move || -> io::Result<()> {
        for (namespace, kind) in &enter {
            setns(namespace, *kind)?;
        }
        unshare(new)?;
        if new.contains(CloneFlags::CLONE_NEWNS) {
            let none: Option<&Path> = None;
            let all = |kind| mount(none, Path::new("/"), none, MsFlags::MS_REC | kind, none);
            // First nothing of ours reaches the machine, then everything of ours reaches our own containers.
            all(MsFlags::MS_PRIVATE)?;
            for (from, to) in &binds {
                mount(Some(from.as_path()), to.as_path(), none, MsFlags::MS_BIND | MsFlags::MS_REC, none)?;
            }
            all(MsFlags::MS_SHARED)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls; paths were allocated before, and
    // nix copies short ones to the stack.
    unsafe { command.pre_exec(prepare) };
    Ok(())
}

/// Runs a command at a place to its end and returns what it printed.
pub(crate) fn run_at(command: &mut Command, place: &Place) -> Result<String> {
    put(command, place)?;
    crate::sh::output(command)
}

/// Starts a program in the background; its output is appended to `log`, and it enters the group of `procs` first.
pub(crate) fn start(argv: &[String], place: &Place, procs: &Path, log: &Path) -> Result<Process> {
    let (program, args) = argv.split_first().context("a program has a name")?;
    let output = File::options().create(true).append(true).open(log);
    let output = output.with_context(|| format!("cannot write {}", log.display()))?;
    let group = File::options().write(true).open(procs);
    let group = group.with_context(|| format!("cannot open {}", procs.display()))?;
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    // The programs talk to each other only, and a proxy of the user's must not stand between them.
    for proxy in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "KUBECONFIG"] {
        command.env_remove(proxy);
    }
    // The engine looks for its helpers here, whatever the user's own path is.
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{path}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"));
    let join = move || -> io::Result<()> {
        (&group).write_all(b"0")?;
        nix::unistd::setsid()?;
        Ok(())
    };
    // SAFETY: system calls only, see above.
    unsafe { command.pre_exec(join) };
    put(&mut command, place)?;
    let child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    let pid = i32::try_from(child.id()).context("process numbers fit")?;
    Process::of(pid).with_context(|| format!("{program} ended at once: see {}", log.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_more_than_its_number() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let process = Process::of(child.id() as i32).unwrap();
        assert!(process.alive());
        let other = Process { started: process.started + 1, ..process };
        assert!(!other.alive());
        assert!(other.signal(Signal::SIGKILL).is_err());
        assert!(child.try_wait().unwrap().is_none(), "the process with the same number lives");
        process.signal(Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(!process.alive());
    }
}
