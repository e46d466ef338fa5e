//! `tasks`: the processes of a distributed job on this machine.
//!
//! **How.** Every task gets a port of the loopback interface and the addresses of all tasks in `TF_CONFIG`. The task
//! that reports (the chief, or else the first worker) writes to our own streams; the output of the others goes to
//! files, so that the losses of several workers are not taken for those of one job. [`effect_of_end`] decides what the
//! end of a task means. The others end when this process ends, however it ends.
//!
//! As a job of the daemon, each task has a control group of its own below the job's, where that is possible: the daemon
//! divides the job's share among them.

use crate::args::TasksArgs;
use crate::notice::notice;
use crate::supervise::signals::Signals;
use crate::system;
use anyhow::{Context, Result};
use gainshare_daemon::spec::{GROUPS_VARIABLE, ROLES_VARIABLE, RestartPolicy, Role, Roles, Task};
use gainshare_figures::terminal::printable;
use gainshare_limits::RuntimeKind;
use gainshare_limits::cgroup::TaskGroups;
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
    let groups = open_groups();
    let reporter = roles.reporter();
    let mut task_set = TaskSet { args, reporter, roles, logs, groups, running: Vec::new(), restarts: 0 };
    if tasks.len() > 1 {
        notice!("{} tasks; output of all but {} is in {}", tasks.len(), task_set.reporter, task_set.logs.display());
    }
    let code = task_set.start_all().and_then(|()| task_set.watch(&signals));
    task_set.end_all();
    task_set.groups.iter_mut().for_each(TaskGroups::remove);
    code
}

/// Groups for the tasks, if the daemon has given the job a group that allows them.
fn open_groups() -> Option<TaskGroups> {
    let files = std::env::var_os(GROUPS_VARIABLE)?;
    let files: Vec<PathBuf> = std::env::split_paths(&files).collect();
    match TaskGroups::open(&files) {
        Ok(groups) => Some(groups),
        Err(error) => {
            notice!("the tasks share the job's control group: it allows no groups below it ({error})");
            None
        }
    }
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

/// `code` is that of the task; `may_restart`: failed tasks may still be started again. `others_done`: all other
/// workers have ended well.
fn effect_of_end(roles: &Roles, task: Task, code: u8, may_restart: bool, others_done: bool) -> EndEffect {
    let restart = roles.0.get(&task.role).and_then(|spec| spec.restart);
    let is_final = code != 0 && restart.is_some_and(|restart| restart.is_final(code));
    let failed = |otherwise| if may_restart && !is_final { otherwise } else { EndEffect::End(code.max(1)) };
    // A job whose workers may come and go runs on without a failed one, unless the author wants it replaced.
    let is_ignored = roles.is_dynamic() && matches!(restart, None | Some(RestartPolicy::Never));
    match (task.role, code) {
        (Role::Worker, 0) if roles.needs_all_workers() => {
            if others_done {
                EndEffect::End(0)
            } else {
                EndEffect::None
            }
        }
        _ if task == roles.reporter() && code == 0 => EndEffect::End(0),
        (Role::Chief, _) if restart.is_none() => EndEffect::End(code),
        (Role::Chief, _) => failed(EndEffect::Replace),
        // A server never ends by itself, so also an end without an error is one.
        (Role::Ps, _) => failed(EndEffect::RestartAll),
        (Role::Worker | Role::Evaluator, 0) => EndEffect::None,
        (Role::Worker, _) if is_ignored => EndEffect::None,
        (Role::Worker | Role::Evaluator, _) => failed(EndEffect::Replace),
    }
}

/// A task and its process; `None`: it has ended and stays so.
struct TaskProcess {
    task: Task,
    address: String,
    child: Option<Child>,
    /// The task has ended well.
    is_done: bool,
}

struct TaskSet<'a> {
    args: &'a TasksArgs,
    roles: Roles,
    reporter: Task,
    logs: PathBuf,
    groups: Option<TaskGroups>,
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
            .map(|(&task, a)| TaskProcess { task, address: a.clone(), child: None, is_done: false })
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
        // What the author sets stays, as in a cluster.
        command
            .envs(self.roles.variables(task, &addresses))
            .envs(&spec.env)
            .env_remove(ROLES_VARIABLE)
            .env_remove(GROUPS_VARIABLE);
        if task != self.reporter {
            let path = self.log(task);
            let log = File::options().create(true).append(true).open(&path);
            let log = log.with_context(|| format!("cannot write {}", path.display()))?;
            command.stderr(log.try_clone()?).stdout(log);
        }
        // A group of its own, so that a signal also reaches the processes that the task has started.
        command.stdin(Stdio::null()).process_group(0);
        system::end_with_parent(&mut command, Signal::SIGKILL);
        // A task without a group of its own is in the job's: it runs all the same.
        if let Some(Ok(files)) = self.groups.as_mut().map(|groups| groups.make(&task.group_name())) {
            let lists = files.iter().filter_map(|file| File::options().write(true).open(file).ok());
            system::join_groups(&mut command, lists.collect());
        }
        let program = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().with_context(|| format!("cannot start `{}` as {task}", printable(&program)))?;
        self.running[index].child = Some(child);
        Ok(())
    }

    fn log(&self, task: Task) -> PathBuf {
        self.logs.join(format!("{}.log", task.group_name()))
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
                let (task, code) = (one.task, exit_code(status));
                one.is_done = code == 0;
                let others_done = self.others_done(task);
                let may_restart = self.restarts < self.args.restarts;
                let effect = effect_of_end(&self.roles, task, code, may_restart, others_done);
                let is_limit = effect != effect_of_end(&self.roles, task, code, true, others_done);
                match effect {
                    EndEffect::None => {
                        if code != 0 {
                            self.print_failure(task, status);
                        }
                        if !self.trains() {
                            notice!("no chief and no worker is left");
                            return Ok(code);
                        }
                    }
                    EndEffect::End(code) => {
                        if code != 0 {
                            self.print_failure(task, status);
                        }
                        if is_limit {
                            let (failures, limit) = (self.restarts.saturating_add(1), self.args.restarts);
                            notice!("failure {failures}: the limit of restarts is {limit}, so the job fails");
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
                        notice!("{task} held parameters; all tasks are started again");
                        self.restarts += 1;
                        self.end_all();
                        self.start_all()?;
                        break;
                    }
                }
            }
        }
    }

    /// Whether all workers but this one have ended well.
    fn others_done(&self, task: Task) -> bool {
        self.running.iter().filter(|one| one.task.role == Role::Worker && one.task != task).all(|one| one.is_done)
    }

    /// Whether a chief or a worker still runs.
    fn trains(&self) -> bool {
        let trains = |one: &TaskProcess| matches!(one.task.role, Role::Chief | Role::Worker) && one.child.is_some();
        self.running.iter().any(trains)
    }

    fn print_failure(&self, task: Task, status: ExitStatus) {
        notice!("{task} ended: {status}");
        if task != self.reporter {
            let text = tail(&self.log(task)).unwrap_or_default();
            text.lines().for_each(|line| notice!("{task}: {}", printable(line)));
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
        let begun = Instant::now();
        let is_alive =
            |one: &mut TaskProcess| one.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)));
        while self.running.iter_mut().any(is_alive) && begun.elapsed() < self.args.grace {
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
        let (chief, first, second) = (task(Role::Chief, 0), task(Role::Worker, 0), task(Role::Worker, 1));
        let server = task(Role::Ps, 1);
        let roles = |words: &str| -> Roles { serde_json::from_str(words).unwrap() };
        let led = roles(r#"{"chief": 1, "ps": 2, "worker": 2}"#);
        let flat = roles(r#"{"ps": 2, "worker": 2, "evaluator": 1}"#);
        let strict = roles(r#"{"ps": {"restart": "ExitCode"}, "worker": {"replicas": 2, "restart": "Never"}}"#);
        let codes = roles(r#"{"chief": {"restart": "ExitCode"}, "worker": {"replicas": 2, "restart": "ExitCode"}}"#);
        let dynamic = roles(r#"{"ps": 2, "worker": {"replicas": 2, "restart": "Never", "dynamic": true}}"#);
        let all = roles(r#"{"ps": 2, "worker": {"replicas": 2, "all": true}}"#);
        for (roles, one, code, may_restart, others_done, expected) in [
            (&led, chief, 0, true, false, EndEffect::End(0)),
            (&led, chief, 3, true, false, EndEffect::End(3)),
            (&led, first, 0, true, false, EndEffect::None),
            (&led, server, 0, true, false, EndEffect::RestartAll),
            (&led, server, 0, false, false, EndEffect::End(1)),
            (&led, server, 139, true, false, EndEffect::RestartAll),
            (&flat, first, 0, true, false, EndEffect::End(0)),
            (&flat, first, 1, true, false, EndEffect::Replace),
            (&flat, second, 137, false, false, EndEffect::End(137)),
            (&flat, task(Role::Evaluator, 0), 1, true, false, EndEffect::Replace),
            (&strict, second, 1, true, false, EndEffect::End(1)),
            (&strict, task(Role::Ps, 0), 127, true, false, EndEffect::End(127)),
            (&strict, task(Role::Ps, 0), 137, true, false, EndEffect::RestartAll),
            (&codes, chief, 130, true, false, EndEffect::Replace),
            (&codes, chief, 2, true, false, EndEffect::End(2)),
            (&codes, second, 128, true, false, EndEffect::Replace),
            (&dynamic, second, 9, true, false, EndEffect::None),
            (&dynamic, first, 0, true, false, EndEffect::End(0)),
            (&all, first, 0, true, false, EndEffect::None),
            (&all, first, 0, true, true, EndEffect::End(0)),
            (&all, second, 9, true, true, EndEffect::Replace),
        ] {
            let effect = effect_of_end(roles, one, code, may_restart, others_done);
            assert_eq!(effect, expected, "{one} with code {code} of {roles:?}");
        }
    }
}
