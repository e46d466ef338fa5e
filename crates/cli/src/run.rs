//! `run`: one command as a job, in this terminal or in the background; and `supervise`, the parent of a detached one.

use crate::args::{RunArgs, RuntimeChoice, SuperviseArgs};
use crate::link::{self, Link};
use crate::notice::{self, notice};
use crate::outlook::{self, Outlook, prediction};
use crate::supervise::child::find_program;
use crate::supervise::signals::Signals;
use crate::supervise::{AttemptLock, DaemonContact, SupervisedJob, supervise};
use anyhow::{Context, Result, anyhow, bail};
use gainshare_daemon::api::client::{Client, ClientError};
use gainshare_daemon::api::types::{Admission, ErrorCode, JobInfo, JobState, StartOrder, SuperviseFile};
use gainshare_daemon::clock::unix_s;
use gainshare_daemon::deadline;
use gainshare_daemon::jobdir;
use gainshare_daemon::paths::Paths;
use gainshare_daemon::spec::{JobSpec, StartKind};
use gainshare_figures::terminal::{Printer, printable};
use gainshare_progress::{MetricSpec, Source};
use nix::sys::signal::Signal;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

/// `supervise` was started for an attempt that is no longer wanted, or that another supervisor has
/// already begun (EX_TEMPFAIL).
const SUPERSEDED: u8 = 75;

/// How often a daemon is looked for before a job is run without one.
const TRIES: usize = 3;

/// Most jobs start within this time. A line about waiting is printed after it.
const FIRST_STATUS: Duration = Duration::from_millis(400);

/// How often the reason for waiting is read again.
const NEXT_STATUS: Duration = Duration::from_secs(2);

/// How often the prediction of a job with a deadline is read until there is one, and for how long: for this time, or
/// for half of the time until the deadline.
const PREDICTION_PACE: Duration = Duration::from_secs(1);
const PREDICTION_TIMEOUT: Duration = Duration::from_secs(55);

/// How often it is read afterwards, for the case that it changes.
const CHANGE_PACE: Duration = Duration::from_secs(5);

pub fn run(args: &RunArgs, out: &Printer) -> Result<u8> {
    if args.runtime == RuntimeChoice::Process {
        let path = std::env::var_os("PATH");
        if let Err(error) = find_program(&args.command[0], path.as_ref(), None) {
            out.complain(&error.to_string());
            return Ok(error.exit_code());
        }
    }
    if args.image.is_some() && args.runtime != RuntimeChoice::Docker {
        bail!("--image names the image of a container: add --runtime docker, or leave --image out");
    }
    let mut spec = spec(args)?;
    spec.validate()?;
    spec.resolve(&deadline::now())?;
    if args.detach {
        return run_detached(args, &spec, out);
    }
    let link = Link::new(Paths::find(None, None))?;
    if args.runtime == RuntimeChoice::Docker {
        link.ensure()?;
        return crate::docker::run(&link, spec);
    }
    let signals = Signals::install().context("cannot catch signals")?;
    match register(&link, &spec) {
        Ok(job) => {
            crate::jobs::print_waits_for_gpu(std::slice::from_ref(&job));
            outlook::print(std::slice::from_ref(&job));
            attached(&link, job, &Start::of(&spec, &args.command), &signals, out, true)
        }
        Err(error) if args.require_daemon || is_refusal(&error) => Err(error),
        Err(error) => {
            notice!("warning: {error:#}; running the job without sharing");
            Ok(plain(&Start::of(&spec, &args.command), &signals, out))
        }
    }
}

/// What the supervisor starts for a job: its own command, or this program, which starts the tasks of its roles.
struct Start {
    command: Vec<OsString>,
    env: BTreeMap<String, String>,
}

impl Start {
    /// `command` is the job's own, whose words need not be text.
    fn of(spec: &JobSpec, command: &[OsString]) -> Start {
        let mut words = Vec::new();
        if !spec.roles.is_empty() {
            let program = std::env::current_exe().unwrap_or_else(|_| "gainshare".into());
            words = vec![program.into_os_string(), "tasks".into()];
            words.extend(spec.restarts.into_iter().flat_map(|count| ["--restarts".into(), count.to_string().into()]));
            words.push("--".into());
        }
        words.extend(command.iter().cloned());
        Start { command: words, env: spec.start_env() }
    }
}

fn plain(start: &Start, signals: &Signals, out: &Printer) -> u8 {
    let job = SupervisedJob { command: &start.command, cwd: None, base_env: None, env: &start.env, contact: None };
    supervise(&job, signals, true).unwrap_or_else(|error| {
        out.complain(&error.to_string());
        error.exit_code()
    })
}

fn spec(args: &RunArgs) -> Result<JobSpec> {
    let metric = MetricSpec {
        source: if args.metrics_file.is_some() { Source::File } else { Source::Auto },
        name: args.metric.clone(),
        pattern: args.pattern.clone(),
        path: args.metrics_file.as_ref().map(|path| path.display().to_string()),
        ..MetricSpec::default()
    };
    let mut spec = JobSpec {
        name: args.name.clone(),
        command: args.command.iter().map(|a| a.to_string_lossy().into_owned()).collect(),
        cwd: Some(std::env::current_dir().context("the current directory is gone; change to another one")?),
        runtime: args.runtime.into(),
        image: args.image.clone(),
        priority: args.priority,
        after: args.after.clone(),
        floor: args.floor,
        max: args.max,
        gpu: args.gpu,
        gpu_memory: args.gpu_memory.clone(),
        start: if args.plain { StartKind::Plain } else { StartKind::Tuned },
        metric,
        roles: args.roles()?,
        ..JobSpec::default()
    };
    args.finish.apply(&mut spec);
    Ok(spec)
}

/// Whether the daemon refused the job. To run it without the daemon would then be against what the user asked for.
fn is_refusal(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(ClientError::Refused { code, .. }) if !matches!(
        code,
        Some(ErrorCode::DiskFull | ErrorCode::Internal | ErrorCode::ShuttingDown | ErrorCode::Timeout)
    ))
}

/// Registers the job. If the daemon ends at this moment (idle, replaced), the next one is asked.
fn register(link: &Link, spec: &JobSpec) -> Result<JobInfo> {
    let mut last = anyhow!("no daemon");
    // Names only: with them the daemon leaves alone what the user has set.
    let names: Vec<String> = std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect();
    for _ in 0..TRIES {
        link.ensure()?;
        match link.call(link.client.submit_attached(spec.clone(), names.clone())) {
            Err(
                error @ (ClientError::NoDaemon { .. }
                | ClientError::Refused { code: Some(ErrorCode::ShuttingDown), .. }),
            ) => {
                last = error.into();
                std::thread::sleep(Duration::from_millis(100));
            }
            other => return Ok(other?),
        }
    }
    Err(last)
}

/// How the wait for admission ended.
enum Turn {
    Start(StartOrder),
    /// The job will never start: the exit code, and the message.
    Never(u8, String),
    /// The daemon is gone for good.
    Alone(anyhow::Error),
}

/// Waits for admission, then runs the registered job to its end.
fn attached(link: &Link, job: JobInfo, start: &Start, signals: &Signals, out: &Printer, terminal: bool) -> Result<u8> {
    let order = match wait_for_turn(link, &job, signals, terminal) {
        Turn::Start(order) => order,
        Turn::Never(code, why) => {
            out.complain(&why);
            return Ok(code);
        }
        Turn::Alone(error) if terminal => {
            notice!("warning: {error:#}; running the job without sharing");
            return Ok(plain(start, signals, out));
        }
        Turn::Alone(error) => return Err(error),
    };
    let lock = AttemptLock::take(Path::new(&order.dir));
    if let Err(error) = &lock {
        notice!("warning: {error}");
    }
    for note in &order.notes {
        notice!("note: {}", printable(note));
    }
    let (id, deadline, at_first) = (job.id, job.deadline.as_ref().map(|due| due.at_s), Outlook::at_submission(&job));
    let contact = DaemonContact { client: link.client.clone(), id, order };
    if let Some(deadline_s) = deadline.filter(|_| terminal) {
        let client = contact.client.clone();
        let timeout = Duration::from_secs_f64((0.5 * (deadline_s - unix_s())).max(0.0)).min(PREDICTION_TIMEOUT);
        // Not waited for: it ends with this process at the latest.
        std::thread::spawn(move || print_predictions(client, id, at_first, timeout));
    }
    let job =
        SupervisedJob { command: &start.command, cwd: None, base_env: None, env: &start.env, contact: Some(&contact) };
    let code = supervise(&job, signals, terminal).unwrap_or_else(|error| {
        out.complain(&error.to_string());
        error.exit_code()
    });
    if deadline.is_some() && terminal {
        print_deadline(link, id);
    }
    Ok(code)
}

/// Prints, as soon as it can be predicted, whether the job will meet its deadline, and again whenever the answer
/// changes. After `timeout` without an answer it prints that there is none yet. Ends with this process. `last` is what
/// was printed when the job was submitted.
fn print_predictions(client: Client, id: u64, mut last: Option<Outlook>, timeout: Duration) {
    let Ok(runtime) = link::runtime() else { return };
    let began = std::time::Instant::now();
    loop {
        std::thread::sleep(if last.is_none() { PREDICTION_PACE } else { CHANGE_PACE });
        let Ok(job) = runtime.block_on(client.job(&id.to_string())) else { continue };
        if job.state.is_final() {
            return;
        }
        let is_overdue = began.elapsed() >= timeout;
        if let Some((outlook, text)) = prediction(&job, last, is_overdue) {
            last = Some(outlook);
            notice!("{}: {}", job.name, printable(&text));
        }
    }
}

/// After the job's own output: how its deadline turned out.
fn print_deadline(link: &Link, id: u64) {
    let Ok(job) = link.call_within(Duration::from_secs(3), link.client.job(&id.to_string())) else { return };
    if let Some(outcome) = job.deadline.and_then(|deadline| deadline.outcome) {
        notice!("{}: {outcome}", job.name);
    }
}

fn wait_for_turn(link: &Link, job: &JobInfo, signals: &Signals, terminal: bool) -> Turn {
    let mut status = Status { shown: false, last: String::new(), on: terminal };
    let mut failures = 0;
    loop {
        let answer = link.call(async {
            let asked = link.client.admission(job.id);
            tokio::pin!(asked);
            let mut status_due = tokio::time::interval_at(tokio::time::Instant::now() + FIRST_STATUS, NEXT_STATUS);
            loop {
                tokio::select! {
                    answer = &mut asked => return answer.map(Some),
                    _ = signals.arrived() => return Ok(None),
                    _ = status_due.tick() => {
                        let now = link.client.job(&job.id.to_string()).await.ok();
                        if let Some(now) = now.filter(|now| now.state == JobState::Queued) {
                            status.show(&job.name, now.reason.as_ref().map_or("for its turn", |why| &why.text));
                        }
                    }
                }
            }
        });
        match answer {
            Ok(Some(Admission::Start { start })) => {
                status.clear();
                return Turn::Start(start);
            }
            Ok(Some(Admission::Waiting { .. })) => failures = 0,
            Ok(Some(Admission::Refused { state_now, reason })) => {
                status.clear();
                let why = reason.map_or_else(String::new, |why| format!(": {}", why.text));
                let code = if state_now == JobState::Stopped { 128 + Signal::SIGTERM as u8 } else { 1 };
                return Turn::Never(code, format!("{} did not start, it is {}{why}", job.name, state_now.name()));
            }
            Ok(None) => {
                while let Some(signal) = signals.next() {
                    if matches!(signal, Signal::SIGINT | Signal::SIGTERM | Signal::SIGHUP | Signal::SIGQUIT) {
                        status.clear();
                        let _ = link.call_within(Duration::from_secs(3), link.client.stop(&job.id.to_string(), 0.0));
                        return Turn::Never(
                            128 + signal as u8,
                            format!("{} was still waiting; it is withdrawn", job.name),
                        );
                    }
                    if signal == Signal::SIGTSTP {
                        signals.stop_own_group();
                    }
                }
            }
            Err(error) if error.is_unreachable() && (failures < TRIES || !terminal) => {
                // The next daemon finds the job in the journal, at its place in the queue. In a
                // terminal a job without sharing is better than no job; a detached job was promised
                // to run, so its supervisor keeps trying.
                failures += 1;
                std::thread::sleep(Duration::from_millis(200) * failures.min(25) as u32);
                let _ = link.ensure();
            }
            Err(error) => {
                status.clear();
                return Turn::Alone(error.into());
            }
        }
    }
}

/// One line on the user's terminal while the job waits, replaced as the reason changes.
struct Status {
    shown: bool,
    last: String,
    on: bool,
}

impl Status {
    fn show(&mut self, job: &str, reason: &str) {
        if !self.on || self.last == reason {
            return;
        }
        self.last = reason.to_owned();
        let reason = printable(reason);
        if std::io::stderr().is_terminal() {
            notice::print(&format!("\r\x1b[Kgainshare: {job} is queued: {reason}"));
            self.shown = true;
        } else {
            notice!("{job} is queued: {reason}");
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            notice::print("\r\x1b[K");
        }
    }
}

/// Starts a supervisor of its own for the job, which keeps this environment, directory and limits,
/// and reports whether the daemon took the job. The supervisor's standard output carries that one
/// answer.
fn run_detached(args: &RunArgs, spec: &JobSpec, out: &Printer) -> Result<u8> {
    let link = Link::new(Paths::find(None, None))?;
    link.ensure()?;
    if args.runtime == RuntimeChoice::Docker {
        let jobs = link.call(link.client.submit(vec![spec.clone()], BTreeMap::new()))?;
        return announce(&jobs[0], out);
    }
    let mut command = link::own_program()?;
    command.args(["supervise", "--attached", "--"]).args(&args.command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = link::detach(&mut command).spawn().context("cannot start a supervisor")?;
    let description = serde_json::to_vec(spec)?;
    child.stdin.take().context("no pipe to the supervisor")?.write_all(&description)?;
    let mut answer = String::new();
    child.stdout.take().context("no pipe from the supervisor")?.read_to_string(&mut answer)?;
    match serde_json::from_str::<JobInfo>(&answer) {
        Ok(job) => announce(&job, out),
        Err(_) => {
            let mut words = String::new();
            child.stderr.take().context("no pipe from the supervisor")?.read_to_string(&mut words)?;
            bail!("{}", words.trim().trim_start_matches("gainshare: "))
        }
    }
}

fn announce(job: &JobInfo, out: &Printer) -> Result<u8> {
    crate::jobs::print_waits_for_gpu(std::slice::from_ref(job));
    outlook::print(std::slice::from_ref(job));
    if out.is_json() {
        out.json(job)?;
    } else {
        out.text(&format!("{}\n", job.name))?;
    }
    Ok(0)
}

pub fn supervise_detached(args: &SuperviseArgs, out: &Printer) -> Result<u8> {
    let signals = Signals::install().context("cannot catch signals")?;
    match &args.dir {
        Some(dir) => supervise_for_daemon(dir, args.attempt, &signals),
        None => supervise_attached(&args.command, &signals, out),
    }
}

/// The second half of `run --detach`.
fn supervise_attached(command: &[OsString], signals: &Signals, out: &Printer) -> Result<u8> {
    let spec: JobSpec =
        serde_json::from_reader(std::io::stdin().lock()).context("cannot read the job's description")?;
    let link = Link::new(Paths::find(None, None))?;
    let job = register(&link, &spec)?;
    serde_json::to_writer(std::io::stdout().lock(), &job)?;
    std::io::stdout().flush()?;
    // From here on nothing reads these streams; the command that started this process must not wait for their end.
    let nowhere = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
    nix::unistd::dup2_stdin(&nowhere)?;
    nix::unistd::dup2_stdout(&nowhere)?;
    nix::unistd::dup2_stderr(&nowhere)?;
    attached(&link, job, &Start::of(&spec, command), signals, out, false)
}

/// A job of `submit`, started by the daemon.
fn supervise_for_daemon(dir: &Path, attempt: u32, signals: &Signals) -> Result<u8> {
    let Ok(_lock) = AttemptLock::take(dir) else { return Ok(SUPERSEDED) };
    if jobdir::may_have_begun(dir, attempt) {
        return Ok(SUPERSEDED);
    }
    let read = jobdir::read_spec(dir);
    let file: SuperviseFile = read.with_context(|| format!("cannot use {}", dir.join(jobdir::SPEC).display()))?;
    if file.order.attempt != attempt {
        return Ok(SUPERSEDED);
    }
    let command: Vec<OsString> = file.spec.command.iter().map(OsString::from).collect();
    let start = Start::of(&file.spec, &command);
    let contact = DaemonContact { client: Client::new(file.socket), id: file.id, order: file.order };
    let job = SupervisedJob {
        command: &start.command,
        cwd: file.spec.cwd.as_deref(),
        base_env: (!file.base_env.is_empty()).then_some(&file.base_env),
        env: &start.env,
        contact: Some(&contact),
    };
    // The reason why it could not start is in exit.json; there is no terminal to print it on.
    Ok(supervise(&job, signals, false).unwrap_or_else(|error| error.exit_code()))
}
