//! Parameter servers and workers as real processes on the loopback interface.
//!
//! CSV prints losses with all their digits, so equal lines mean equal bits. Runs that a test interrupts take a million
//! steps, so that they cannot end before.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const UNBOUNDED: u64 = 1_000_000;
/// Far longer than anything here takes; only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(60);

/// One task. A task that a test leaves behind is ended with it.
struct Task {
    child: Child,
    stdout: BufReader<ChildStdout>,
    messages: Arc<Mutex<Vec<String>>>,
}

impl Task {
    fn start(mut command: Command) -> Task {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env_remove("GAINSHARE_ATTEMPT");
        let mut child = command.spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        let messages = Arc::new(Mutex::new(vec![]));
        let lines = Arc::clone(&messages);
        thread::spawn(move || stderr.lines().map_while(Result::ok).for_each(|line| lines.lock().unwrap().push(line)));
        Task { stdout: BufReader::new(child.stdout.take().unwrap()), child, messages }
    }

    fn messages(&self) -> String {
        self.messages.lock().unwrap().join("\n")
    }

    /// Waits for a message that contains this text, and returns it.
    fn wait_for(&self, text: &str) -> String {
        let begun = Instant::now();
        loop {
            if let Some(line) = self.messages.lock().unwrap().iter().find(|line| line.contains(text)) {
                return line.clone();
            }
            assert!(begun.elapsed() < PATIENCE, "no `{text}` in: {}", self.messages());
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// The next report line; the header is left out.
    fn report(&mut self) -> String {
        let mut line = String::new();
        self.stdout.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "the output ended: {}", self.messages());
        if line.starts_with("epoch") || line.starts_with("step") { self.report() } else { line.trim_end().to_owned() }
    }

    fn rest(&mut self) -> Vec<String> {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).unwrap();
        text.lines().filter(|l| !l.starts_with("epoch") && !l.starts_with("step")).map(str::to_owned).collect()
    }

    fn send(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
    }

    fn wait(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "it does not end: {}", self.messages());
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn end(&mut self, signal: Signal) {
        self.send(signal);
        self.wait();
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_gainshare-train"))
}

fn small(command: &mut Command, steps: u64) {
    command.args(["gru", "--hidden", "8", "--batch", "4", "--report-every", "1", "--format", "csv"]);
    command.args(["--steps", &steps.to_string()]);
}

/// The report lines of the ordinary trainer.
fn ordinary(steps: u64) -> Vec<String> {
    let mut command = program();
    small(&mut command, steps);
    let mut task = Task::start(command);
    let lines = task.rest();
    assert!(task.wait().success());
    lines
}

/// A job whose tasks all have the same options.
struct TaskedJob<'a> {
    steps: u64,
    mode: &'a str,
    workers: u32,
    checkpoints: Option<&'a Path>,
}

impl TaskedJob<'_> {
    fn command(&self) -> Command {
        let mut command = program();
        command.env_remove("TF_CONFIG").arg("ps");
        small(&mut command, self.steps);
        command.args(["--mode", self.mode, "--workers", &self.workers.to_string()]);
        if let Some(dir) = self.checkpoints {
            command.arg("--checkpoint").arg(dir).args(["--checkpoint-every", "10"]);
        }
        command
    }

    /// Starts a server that knows how many there are, at a port of its own or at `listen`.
    fn server(&self, index: usize, listen: &str) -> (Task, String) {
        let mut command = self.command();
        command.args(["--role", "server", "--index", &index.to_string(), "--listen", listen]);
        let task = Task::start(command);
        let address = task.wait_for("listens at").rsplit(' ').next().unwrap().to_owned();
        (task, address)
    }

    fn servers(&self, count: usize) -> (Vec<Task>, Vec<String>) {
        (0..count).map(|index| self.server(index, "127.0.0.1:0")).unzip()
    }

    fn worker(&self, index: u32, servers: &[String]) -> Task {
        let mut command = self.command();
        command.args(["--role", "worker", "--index", &index.to_string(), "--servers", &servers.join(",")]);
        Task::start(command)
    }
}

fn step_of(report: &str) -> u64 {
    report.split(',').next().unwrap().parse().unwrap_or_else(|_| panic!("{report}"))
}

#[test]
fn one_synchronous_worker_has_the_losses_of_the_ordinary_trainer() {
    for servers in [1, 3] {
        let job = TaskedJob { steps: 30, mode: "sync", workers: 1, checkpoints: None };
        let (mut tasks, addresses) = job.servers(servers);
        let mut worker = job.worker(0, &addresses);
        assert_eq!(worker.rest(), ordinary(30), "{servers} servers: {}", worker.messages());
        assert!(worker.wait().success());
        for task in &mut tasks {
            assert!(task.wait().success(), "a server ends when training is complete: {}", task.messages());
        }
    }
}

/// All tasks are stopped, started again, stopped again; the losses are those of a run that was never stopped.
#[test]
fn a_stopped_job_of_two_workers_resumes_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let whole = {
        let job = TaskedJob { steps: 400, mode: "sync", workers: 2, checkpoints: None };
        let (_tasks, addresses) = job.servers(2);
        let mut first = job.worker(0, &addresses);
        let _second = job.worker(1, &addresses);
        first.rest()
    };
    assert_eq!(whole.len(), 400);
    assert_ne!(whole, ordinary(400), "the second worker's gradients count");
    let job = TaskedJob { steps: 400, mode: "sync", workers: 2, checkpoints: Some(dir.path()) };
    let mut lines = vec![];
    for stop_after in [Some(17), Some(12), None] {
        let (mut tasks, addresses) = job.servers(2);
        let mut workers = [job.worker(0, &addresses), job.worker(1, &addresses)];
        match stop_after {
            Some(count) => {
                lines.extend((0..count).map(|_| workers[0].report()));
                tasks.iter_mut().for_each(|task| task.end(Signal::SIGTERM));
                tasks.iter().for_each(|task| drop(task.wait_for("stopped by SIGTERM")));
                workers.iter_mut().for_each(|task| task.end(Signal::SIGTERM));
                lines.extend(workers[0].rest());
            }
            None => {
                lines.extend(workers[0].rest());
                workers.iter_mut().for_each(|task| assert!(task.wait().success(), "{}", task.messages()));
            }
        }
    }
    // Steps after the newest common checkpoint are taken twice.
    for line in &lines {
        assert!(whole.contains(line), "{line} is not in the uninterrupted run");
    }
    // The report of the last step before a stop may be missing: the servers saved the step, and the worker was stopped
    // before it could read the result.
    let missing = whole.iter().filter(|line| !lines.contains(line)).count();
    assert!(missing <= 2, "{missing} steps are missing");
    assert_eq!(lines.last(), whole.last());
}

/// A worker dies, another one joins: every step is reported once, in order, and the servers are never set back.
#[test]
fn workers_that_die_and_join_cost_no_step() {
    let job = TaskedJob { steps: UNBOUNDED, mode: "sync", workers: 2, checkpoints: None };
    let (servers, addresses) = job.servers(2);
    let mut first = job.worker(0, &addresses);
    let mut second = job.worker(1, &addresses);
    let mut reports: Vec<String> = (0..20).map(|_| first.report()).collect();
    second.end(Signal::SIGKILL);
    reports.extend((0..20).map(|_| first.report()));
    for index in 2..5 {
        let mut other = job.worker(index, &addresses);
        reports.extend((0..20).map(|_| first.report()));
        other.end(if index == 3 { Signal::SIGKILL } else { Signal::SIGTERM });
        if index != 3 {
            other.wait_for("steps in");
        }
    }
    let steps: Vec<u64> = reports.iter().map(|line| step_of(line)).collect();
    assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<_>>());
    for server in &servers {
        assert!(!server.messages().contains("lost"), "{}", server.messages());
    }
    assert!(!first.messages().contains("joins again"), "{}", first.messages());
}

/// A server is killed and comes back from its checkpoint: all servers go back to it, and the loss is reported.
#[test]
fn a_killed_server_costs_the_steps_after_its_checkpoint_and_the_number_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let job = TaskedJob { steps: UNBOUNDED, mode: "sync", workers: 1, checkpoints: Some(dir.path()) };
    let whole = ordinary(80);
    let (mut servers, addresses) = job.servers(2);
    let mut worker = job.worker(0, &addresses);
    let before: Vec<String> = (0..35).map(|_| worker.report()).collect();
    assert_eq!(before, whole[..35]);
    servers[1].end(Signal::SIGKILL);
    let (restarted, _) = job.server(1, &addresses[1]);
    let kept: u64 = restarted
        .wait_for("continues after step")
        .split("after step ")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    assert!(kept >= 30 && kept.is_multiple_of(10), "{kept}");
    let lost = worker.wait_for("steps lost");
    assert!(lost.contains(&format!("continue after step {kept}")), "{lost}");
    // The server that stayed alive went back too, unless both were exactly at the checkpoint.
    let lost: u64 = lost.rsplit(": ").next().unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(lost > 0);
    servers[0].wait_for("went back");
    // The output still has the steps before the kill; those after the checkpoint come again, with the same losses.
    let mut last = 35;
    let again = loop {
        let line = worker.report();
        if step_of(&line) != last + 1 {
            break line;
        }
        last += 1;
    };
    assert_eq!(step_of(&again), kept + 1);
    if let Some(expected) = whole.get(kept as usize) {
        assert_eq!(&again, expected);
    }
}

#[test]
fn asynchronous_workers_reach_the_end_and_learn() {
    let job = TaskedJob { steps: 300, mode: "async", workers: 1, checkpoints: None };
    let (mut servers, addresses) = job.servers(2);
    let mut workers = [job.worker(0, &addresses), job.worker(1, &addresses), job.worker(2, &addresses)];
    let lines = workers[0].rest();
    let loss = |line: &String| line.split(',').nth(2).unwrap().parse::<f64>().unwrap();
    let (first, last) = (lines.first().unwrap(), lines.last().unwrap());
    assert!(loss(last) < 0.9 * loss(first), "{first} … {last}");
    assert_eq!(step_of(last), 300);
    for task in workers.iter_mut().chain(&mut servers) {
        assert!(task.wait().success(), "{}", task.messages());
    }
}

/// Bytes that are no message, a message that ends too early, and lengths out of bounds cost only their connection.
#[test]
fn bad_bytes_cost_only_their_connection() {
    let job = TaskedJob { steps: 400, mode: "sync", workers: 1, checkpoints: None };
    let (mut servers, addresses) = job.servers(1);
    let mut worker = job.worker(0, &addresses);
    worker.report();
    let hello = br#"{"worker":7,"server":0,"servers":1,"settings":{}}"#;
    let mut greeting = b"GSP1\x01".to_vec();
    greeting.extend((hello.len() as u32).to_le_bytes());
    greeting.extend(hello);
    for bytes in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        b"GSP1",
        b"GSP1\x03\xff\xff\xff\xff",
        b"GSP1\x02\x08\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff",
        b"GSP1\x01\x05\0\0\0hello",
        &greeting[..30],
        &greeting,
        &[0; 4096],
    ] {
        let mut stream = TcpStream::connect(&addresses[0]).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // The server closes the connection; unread bytes may turn the end into a reset, also before all is written.
        let _ = stream.write_all(bytes).and_then(|()| stream.shutdown(std::net::Shutdown::Write));
        let _ = stream.read_to_end(&mut vec![]);
    }
    assert_eq!(worker.rest().len(), 399, "{}", worker.messages());
    assert!(worker.wait().success() && servers[0].wait().success());
    servers[0].wait_for("give both the same options");
}

/// Tasks that get everything from TF_CONFIG, in the full and in the sparse form.
#[test]
fn tf_config_is_enough() {
    for sparse in [false, true] {
        let ports: Vec<u16> =
            (0..2).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()).collect();
        let ps: Vec<String> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let start = |kind: &str, index: usize| {
            let listed = ps.iter().map(|a| format!("{a:?}")).collect::<Vec<_>>().join(",");
            let cluster = match (sparse, kind) {
                (false, _) => format!(r#"{{"chief":["c:1"],"ps":[{listed}],"worker":["w:1"]}}"#),
                (true, "ps") => format!(r#"{{"worker":{{}},"ps":[{:?}]}}"#, ps[index]),
                (true, "chief") => format!(r#"{{"chief":["c:1"],"worker":{{}},"ps":[{listed}]}}"#),
                (true, _) => format!(r#"{{"worker":{{"{index}":"w:1"}},"ps":[{listed}]}}"#),
            };
            let mut command = program();
            command.arg("ps");
            // Many steps: a task that found no server tries again after a fifth of a second, and must still find work.
            small(&mut command, 400);
            command.args(["--worker-timeout", "20"]);
            command.env("TF_CONFIG", format!(r#"{{"cluster":{cluster},"task":{{"type":"{kind}","index":{index}}}}}"#));
            Task::start(command)
        };
        // Workers come first and wait for the servers.
        let mut tasks = vec![start("chief", 0), start("worker", 0), start("ps", 0), start("ps", 1)];
        let last = tasks[0].rest().pop().unwrap_or_else(|| panic!("no report: {}", tasks[0].messages()));
        assert_eq!(step_of(&last), 400);
        for task in &mut tasks {
            assert!(task.wait().success() || sparse, "{}", task.messages());
        }
        assert!(sparse || tasks[1].rest().is_empty(), "the chief reports, worker 0 does not");
    }
}

#[test]
fn a_worker_with_other_options_is_refused_with_the_reason() {
    let job = TaskedJob { steps: 50, mode: "sync", workers: 1, checkpoints: None };
    let (_servers, addresses) = job.servers(1);
    let mut other = TaskedJob { steps: 51, ..job }.worker(0, &addresses);
    assert_eq!(other.wait().code(), Some(1));
    other.wait_for("steps 50");
}

/// A server that cannot be reached is an error after the time that the user gave, not a hang.
#[test]
fn no_server_is_an_error() {
    let mut command = program();
    command.arg("ps");
    small(&mut command, 5);
    command.args(["--role", "worker", "--servers", "127.0.0.1:1", "--connect-timeout", "1"]);
    let mut worker = Task::start(command);
    assert_eq!(worker.wait().code(), Some(1));
    worker.wait_for("--connect-timeout");
}
