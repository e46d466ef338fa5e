//! Running other programs, and saying which one failed.

use anyhow::{Context, Result, bail};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::Pid;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The root of the checkout.
pub(crate) fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the checkout").to_path_buf()
}

/// `cargo`, the one that runs us, in the root of the checkout.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    remove_own_variables(&mut command);
    command
}

/// Removes cargo's variables about xtask itself. They must not reach the next build: build scripts that read them
/// (ring's does) would run again, and everything above them would be compiled again, at each change between `cargo` and
/// `cargo xtask`.
pub(crate) fn remove_own_variables(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let about_us = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_"];
        if name.to_str().is_some_and(|name| about_us.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(name);
        }
    }
}

/// When a command gets processor time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Urgency {
    Normal,
    /// Only the time that all other programs leave unused.
    Idle,
}

impl Urgency {
    pub(crate) fn apply(self, command: Command) -> Command {
        match self {
            Urgency::Normal => command,
            Urgency::Idle => idle(&command),
        }
    }
}

/// The same command in the time that all other programs leave unused.
pub(crate) fn idle(command: &Command) -> Command {
    let mut idle = Command::new("chrt");
    idle.args(["--idle", "0"]).arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => idle.env(name, value),
            None => idle.env_remove(name),
        };
    }
    command.get_current_dir().map(|folder| idle.current_dir(folder));
    idle
}

fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|w| w.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

/// Runs to the end with the terminal's output; an exit code other than 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    eprintln!("$ {}", show(command));
    let status = command.status().with_context(|| format!("cannot start `{}`", show(command)))?;
    if !status.success() {
        bail!("`{}` failed: {status}", show(command));
    }
    Ok(())
}

/// Runs to the end and returns what was printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start `{}`", show(command)))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}\n{errors}", show(command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Whether a program runs and ends with code 0.
pub(crate) fn works(command: &mut Command) -> bool {
    command.output().is_ok_and(|o| o.status.success())
}

/// The fields of `/proc/PID/stat` from the state on, which is the third one in the kernel's documentation.
pub(crate) fn stat_fields(pid: i32) -> Option<Vec<String>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name in parentheses may hold anything, also spaces and parentheses.
    let (_, fields) = text.rsplit_once(')')?;
    Some(fields.split_whitespace().map(str::to_owned).collect())
}

/// Runs to the end and returns the processor time of the process itself, in seconds. Other programs may run at the same
/// time, also children of this process.
pub(crate) fn cpu_s(command: &mut Command) -> Result<f64> {
    let mut child = command.spawn().with_context(|| format!("cannot start `{}`", show(command)))?;
    let pid = Pid::from_raw(child.id() as i32);
    // The kernel still knows the time of a process that has ended and was not waited for.
    waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT)?;
    let time = clock_getcpuclockid(pid).and_then(clock_gettime);
    let status = child.wait()?;
    if !status.success() {
        bail!("`{}` failed: {status}", show(command));
    }
    let time = time.with_context(|| format!("the kernel does not know the time of `{}`", show(command)))?;
    Ok(Duration::from(time).as_secs_f64())
}

/// User and system time of all ended children and their children.
pub(crate) fn children_cpu_s() -> Result<f64> {
    let usage = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN)?;
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6;
    Ok(seconds(usage.user_time()) + seconds(usage.system_time()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    fn script(text: &str) -> Command {
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", text]).stdout(Stdio::null());
        shell
    }

    #[test]
    fn the_time_of_a_program_is_not_that_of_others() {
        let mut other = script("while :; do :; done").spawn().unwrap();
        let waits = cpu_s(&mut script("sleep 1"));
        other.kill().unwrap();
        other.wait().unwrap();
        assert!((0.0..0.5).contains(&waits.unwrap()), "a program that waits takes no time");
        let counts = cpu_s(&mut script("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")).unwrap();
        assert!(counts > 0.02, "{counts}");
        let error = cpu_s(&mut script("exit 3")).unwrap_err().to_string();
        assert!(error.contains("exit 3"), "{error}");
    }
}
