//! `tasks`: the processes of a distributed job on this machine.
//!
//! **How.** Every task gets a port of the loopback interface and the addresses of all tasks in `TF_CONFIG`. The task
//! that reports (the chief, or else the first worker) writes to our own streams; the output of the others goes to
//! files, so that the losses of several workers are not taken for those of one job. [`effect_of_end`] decides what the
//! end of a task means. The others end when this process ends, however it ends.

use crate::args::TasksArgs;
use crate::supervise::signals::Signals;
use crate::system;
use anyhow::{Context, Result};
use gainshare_daemon::spec::{ROLES_VARIABLE, Role, Roles, Task};
use gainshare_figures::terminal::printable;
use gainshare_limits::RuntimeKind;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The longest time between two checks of the tasks; signals end the wait sooner.
const POLL_MS: u16 = 1000;
/// How much of a failed task's output is shown.
const SHOWN_BYTES: u64 = 2000;

pub fn run(args: &TasksArgs) -> Result<u8> {
    let roles = args.roles()?;
    roles.validate(RuntimeKind::Process).map_err(anyhow::Error::msg)?;
    if roles.is_empty() {
        anyhow::bail!("no roles: give --role worker=2, for example");
    }
    let signals = Signals::install().context("cannot catch signals")?;
    let logs = match &args.logs {
        Some(folder) => {
            std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
            folder.clone()
        }
        None => tempfile::Builder::new().prefix("gainshare-tasks-").tempdir().context("no folder for output")?.keep(),
    };
    let tasks = roles.tasks();
    let mut task_set = TaskSet { args, reporter: roles.reporter(), roles, logs, running: Vec::new(), restarts: 0 };
    if tasks.len() > 1 {
        eprintln!(
            "gainshare: {} tasks; output of all but {} is in {}",
            tasks.len(),
            task_set.reporter,
            task_set.logs.display()
        );
    }
    let code = task_set.start_all().and_then(|()| task_set.watch(&signals));
    task_set.end_all();
    code
}

/// What the end of a task means.
#[derive(Debug, PartialEq, Eq)]
enum EndEffect {
    /// The others go on.
    None,
    /// The task is started again.
    Replace,
    /// All tasks are started again: what the servers held is lost.
    RestartAll,
    /// The job ends with this code.
    End(u8),
}

/// `code` is that of the task; `may_restart`: failed tasks may still be started again.
fn effect_of_end(task: Task, reporter: Task, code: u8, may_restart: bool) -> EndEffect {
    let failed = |otherwise| if may_restart { otherwise } else { EndEffect::End(code.max(1)) };
    match (task.role, code) {
        _ if task == reporter && code == 0 => EndEffect::End(0),
        (Role::Chief, _) => EndEffect::End(code),
        // A server never ends by itself, so also an end without an error is one.
        (Role::Ps, _) => failed(EndEffect::RestartAll),
        (Role::Worker | Role::Evaluator, 0) => EndEffect::None,
        (Role::Worker | Role::Evaluator, _) => failed(EndEffect::Replace),
    }
}

/// A task and its process; `None`: it has ended and stays so.
struct TaskProcess {
    task: Task,
    address: String,
    child: Option<Child>,
}

struct TaskSet<'a> {
    args: &'a TasksArgs,
    roles: Roles,
    reporter: Task,
    logs: PathBuf,
    running: Vec<TaskProcess>,
    /// Starts after the first.
    restarts: u32,
}

impl TaskSet<'_> {
    /// Gives every task a free port and starts it.
    fn start_all(&mut self) -> Result<()> {
        let tasks = self.roles.tasks();
        // All ports are held until all are known, so that no two tasks get the same one.
        let held: Vec<TcpListener> =
            tasks.iter().map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>().context("no free port")?;
        let addresses: Vec<String> =
            held.iter().map(|port| port.local_addr().map(|a| a.to_string())).collect::<Result<_, _>>()?;
        drop(held);
        self.running = tasks
            .iter()
            .zip(&addresses)
            .map(|(&task, a)| TaskProcess { task, address: a.clone(), child: None })
            .collect();
        for index in 0..self.running.len() {
            self.start(index)?;
        }
        Ok(())
    }

    fn start(&mut self, index: usize) -> Result<()> {
        let addresses: Vec<String> = self.running.iter().map(|one| one.address.clone()).collect();
        let task = self.running[index].task;
        let spec = &self.roles.0[&task.role];
        let mut command = match spec.command.split_first() {
            Some((program, rest)) => {
                let mut command = Command::new(program);
                command.args(rest);
                command
            }
            None => {
                let mut command = Command::new(&self.args.command[0]);
                command.args(&self.args.command[1..]);
                command
            }
        };
        command.envs(&spec.env).env("TF_CONFIG", self.roles.tf_config(task, &addresses)).env_remove(ROLES_VARIABLE);
        if task != self.reporter {
            let path = self.log(task);
            let log = File::options().create(true).append(true).open(&path);
            let log = log.with_context(|| format!("cannot write {}", path.display()))?;
            command.stderr(log.try_clone()?).stdout(log);
        }
        // A group of its own, so that a signal also reaches the processes that the task has started.
        command.stdin(Stdio::null()).process_group(0);
        system::end_with_parent(&mut command, Signal::SIGKILL);
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("cannot start `{}` as {task}", printable(&program)))?;
        self.running[index].child = Some(child);
        Ok(())
    }

    fn log(&self, task: Task) -> PathBuf {
        self.logs.join(format!("{}-{}.log", task.role.name(), task.index))
    }

    /// Waits until the job ends; the code is that of the task that reports, or of a signal.
    fn watch(&mut self, signals: &Signals) -> Result<u8> {
        loop {
            let mut waits = [PollFd::new(signals.as_fd(), PollFlags::POLLIN)];
            let _ = poll(&mut waits, PollTimeout::from(POLL_MS));
            while let Some(signal) = signals.next() {
                match signal {
                    Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT => {
                        return Ok(128 + signal as u8);
                    }
                    Signal::SIGUSR1 | Signal::SIGUSR2 => self.signal_all(signal),
                    _ => {}
                }
            }
            for index in 0..self.running.len() {
                let one = &mut self.running[index];
                let Some(status) = one.child.as_mut().and_then(|child| child.try_wait().transpose()).transpose()?
                else {
                    continue;
                };
                one.child = None;
                let task = one.task;
                match effect_of_end(task, self.reporter, exit_code(status), self.restarts < self.args.restarts) {
                    EndEffect::None => {}
                    EndEffect::End(code) => {
                        if code != 0 {
                            self.print_failure(task, status);
                        }
                        return Ok(code);
                    }
                    EndEffect::Replace => {
                        self.print_failure(task, status);
                        self.restarts += 1;
                        self.start(index)?;
                    }
                    EndEffect::RestartAll => {
                        self.print_failure(task, status);
                        eprintln!("gainshare: {task} held parameters; all tasks are started again");
                        self.restarts += 1;
                        self.end_all();
                        self.start_all()?;
                        break;
                    }
                }
            }
        }
    }

    fn print_failure(&self, task: Task, status: ExitStatus) {
        eprintln!("gainshare: {task} ended: {status}");
        if task != self.reporter {
            let text = tail(&self.log(task)).unwrap_or_default();
            text.lines().for_each(|line| eprintln!("gainshare: {task}: {}", printable(line)));
        }
    }

    fn signal_all(&mut self, signal: Signal) {
        for child in self.running.iter().filter_map(|one| one.child.as_ref()) {
            let _ = killpg(Pid::from_raw(child.id() as i32), signal);
        }
    }

    /// Asks all tasks to end, then forces them and all that they have started.
    fn end_all(&mut self) {
        self.signal_all(Signal::SIGTERM);
        let until = Instant::now() + Duration::from_secs(self.args.grace);
        let is_alive =
            |one: &mut TaskProcess| one.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        while self.running.iter_mut().any(is_alive) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.signal_all(Signal::SIGKILL);
        for child in self.running.iter_mut().filter_map(|one| one.child.as_mut()) {
            let _ = child.wait();
        }
        self.running.clear();
    }
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(u8::MAX)
}

/// The end of a file, from a whole line on.
fn tail(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(SHOWN_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(SHOWN_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let whole = if length > SHOWN_BYTES { text.split_once('\n').map_or("", |(_, rest)| rest) } else { &text };
    Ok(whole.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_task_means_what_its_role_says() {
        let task = |role, index| Task { role, index };
        let (chief, first) = (task(Role::Chief, 0), task(Role::Worker, 0));
        for (one, reporter, code, may_restart, expected) in [
            (chief, chief, 0, true, EndEffect::End(0)),
            (chief, chief, 3, true, EndEffect::End(3)),
            (first, first, 0, true, EndEffect::End(0)),
            (first, chief, 0, true, EndEffect::None),
            (first, first, 1, true, EndEffect::Replace),
            (task(Role::Worker, 1), first, 137, false, EndEffect::End(137)),
            (task(Role::Evaluator, 0), first, 1, true, EndEffect::Replace),
            (task(Role::Ps, 1), chief, 0, true, EndEffect::RestartAll),
            (task(Role::Ps, 1), chief, 0, false, EndEffect::End(1)),
            (task(Role::Ps, 0), chief, 139, true, EndEffect::RestartAll),
        ] {
            assert_eq!(effect_of_end(one, reporter, code, may_restart), expected, "{one} with code {code}");
        }
    }
}
