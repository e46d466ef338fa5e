//! A daemon for the tests of this crate: `up CONFIG.toml`, and the small programs that a daemon
//! starts: `supervise`, `guard`, `keep`.
//!
//! The supervisor is the smallest that keeps the agreement with the daemon: lock, starting.json,
//! started.json, output.log, exit.json.

use gainshare_daemon::api::client::Client;
use gainshare_daemon::api::types::{ExitReport, StartReport, SuperviseFile};
use gainshare_daemon::clock::unix_s;
use gainshare_daemon::config::DaemonConfig;
use gainshare_daemon::duration::parse_duration;
use gainshare_daemon::fail;
use gainshare_daemon::jobdir::{self, Intent, write_json};
use gainshare_limits::process::{Identity, start};
use std::fs::OpenOptions;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["up", config] => up(Path::new(config)),
        ["supervise", dir, "--attempt", attempt] => supervise(Path::new(dir), attempt.parse().expect("a number")),
        ["guard", "--state-dir", state, "--runtime-dir", runtime, "--lease", lease] => {
            let lease = parse_duration(lease).expect("a length of time");
            gainshare_daemon::guard::run(PathBuf::from(state), PathBuf::from(runtime), lease).expect("the guard runs");
            ExitCode::SUCCESS
        }
        ["keep"] => {
            gainshare_limits::process::keeper::run().expect("the keeper runs");
            ExitCode::SUCCESS
        }
        _ => {
            eprintln!("usage: test_daemon up CONFIG | supervise DIR --attempt N | guard … | keep");
            ExitCode::from(2)
        }
    }
}

fn up(path: &Path) -> ExitCode {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let result = DaemonConfig::load(path).map_err(|e| e.to_string()).and_then(|config| {
        gainshare_daemon::daemon::run(config, |ready| println!("ready {}", ready.pid)).map_err(|e| e.to_string())
    });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e}");
            ExitCode::FAILURE
        }
    }
}

fn supervise(dir: &Path, attempt: u32) -> ExitCode {
    let lock = OpenOptions::new().create(true).truncate(false).write(true).open(dir.join("supervisor.lock")).unwrap();
    if lock.try_lock().is_err() {
        return ExitCode::from(75);
    }
    if jobdir::may_have_begun(dir, attempt) {
        return ExitCode::from(75);
    }
    let file: SuperviseFile = jobdir::read_spec(dir).unwrap();
    if file.order.attempt != attempt {
        return ExitCode::from(75);
    }
    write_json(dir, jobdir::STARTING, &Intent { attempt }).unwrap();
    fail::point("supervise-before-fork");
    let log = OpenOptions::new().create(true).append(true).open(dir.join("output.log")).unwrap();
    let procs: Vec<PathBuf> = file.order.procs_files.iter().map(PathBuf::from).collect();
    let mut command = Command::new(&file.spec.command[0]);
    command.args(&file.spec.command[1..]).env_clear().envs(&file.base_env).envs(&file.spec.env);
    command.envs(file.order.env.iter().map(|v| (&v.name, &v.value)));
    command.current_dir(file.spec.cwd.clone().unwrap_or_else(|| "/".into()));
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    start::enter(&mut command, &procs, None).unwrap();
    let mut child = command.spawn().unwrap();
    let identity = Identity::of(child.id() as i32).unwrap();
    let started = StartReport { attempt, pid: identity.pid, start_ticks: identity.start_ticks, notes: vec![] };
    fail::point("supervise-before-started");
    write_json(dir, jobdir::STARTED, &started).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let client = Client::new(&file.socket);
    let _ = runtime.block_on(client.started(file.id, &started));
    let status = child.wait().unwrap();
    let (code, signal) = (status.code(), status.signal());
    let exited = ExitReport { attempt, code, signal, error: None, ended_s: unix_s() };
    write_json(dir, jobdir::EXIT, &exited).unwrap();
    let _ = runtime.block_on(client.exited(file.id, &exited));
    ExitCode::SUCCESS
}
