//! The command line: every command, option and help text. The reference in `docs/reference/cli.md` and the
//! man pages are made of it.

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand, ValueEnum, ValueHint};
use gainshare_core::policy::{Aim, Preset};
use gainshare_daemon::config::Listen;
use gainshare_daemon::duration::parse_duration;
use gainshare_daemon::spec::{DEFAULT_RESTARTS, ROLES_VARIABLE, Role, RoleSpec, Roles};
use gainshare_figures::terminal::Format;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

const EXIT_CODES: &str = "\
Exit codes: `run` ends with the code of its job (128 + n if signal n ended it; 126 if the program cannot be run, 127 if it is not \
found). All other commands: 0 done, 1 failed, 2 wrong usage.

Environment: GAINSHARE_STATE_DIR and GAINSHARE_RUNTIME_DIR name the daemon's directories, GAINSHARE_SOCKET the socket of a running \
daemon, GAINSHARE_LOG how much the daemon logs (such as `debug`); NO_COLOR switches colours off.";

/// Shares a machine among training jobs by what each job gains from its share.
///
/// Put `gainshare run --` in front of each training command. Gainshare watches the loss or accuracy that
/// the job prints anyway and gives the machine to the jobs that still improve.
#[derive(Debug, Parser)]
#[command(name = "gainshare", version, after_help = EXIT_CODES, after_long_help = EXIT_CODES, max_term_width = 110)]
pub struct Cli {
    /// Print tables for people, or JSON for programs (errors too, on standard error)
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table, value_name = "FORMAT")]
    pub output: Format,

    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a command as a job of this machine's daemon, in this terminal
    ///
    /// The job sees your terminal, environment and directory as if it had been started without gainshare,
    /// and its output is passed on untouched. The first Ctrl-C interrupts the job, the second terminates
    /// it, the third kills it. A daemon is started if none is running; should that fail, the job runs all
    /// the same, without sharing.
    #[command(after_help = "Example:\n  gainshare run --name vae -- python train.py --epochs 30")]
    Run(RunArgs),

    /// Run the daemon that watches the jobs and shares the machine
    ///
    /// `run` and `submit` start one by themselves, which ends when there has been no job for ten minutes.
    /// Start it yourself to choose the policy, the number of slots and so on. Every option can also be set
    /// in ~/.config/gainshare/config.toml under the same name.
    #[command(after_help = "Example:\n  gainshare up --detach --slots 4 --policy gainshare")]
    Up(Box<UpArgs>),

    /// End the daemon; its jobs go on without limits, unless --stop-jobs is given
    #[command(after_help = "Example:\n  gainshare down --stop-jobs")]
    Down {
        /// Stop all jobs first
        #[arg(long)]
        stop_jobs: bool,
    },

    /// Submit the jobs of one or more job files (TOML, YAML or JSON) to run in the background
    ///
    /// All jobs of all files are checked before any is submitted. A [sweep] makes one job for each
    /// combination of its values.
    #[command(after_help = "Example:\n  gainshare submit sweep.toml --dry-run")]
    Submit(SubmitArgs),

    /// Predict whether jobs would make their deadlines if they were submitted now, and which jobs they would delay
    ///
    /// The answer rests on earlier runs of the same program that ended well on this machine. Without one,
    /// nothing is known before the job's first steps. Nothing is submitted. No daemon is started where none has
    /// run; elsewhere one is started if none runs, and ends by itself after ten minutes without a job.
    #[command(after_help = "Example:\n  gainshare plan night.toml --deadline \"tomorrow 9:00\"")]
    Plan(PlanArgs),

    /// List jobs
    #[command(after_help = "Example:\n  gainshare ps --watch")]
    Ps {
        /// Also list jobs that have ended
        #[arg(short, long)]
        all: bool,
        /// Print the list again every second
        #[arg(short, long)]
        watch: bool,
    },

    /// Print the output of a job
    #[command(after_help = "Example:\n  gainshare logs -f --tail 20 vae")]
    Logs {
        /// Name or number of the job
        job: String,
        /// Print what the job prints from now on, too, until it ends
        #[arg(short, long)]
        follow: bool,
        /// Begin with the last N lines
        #[arg(short = 'n', long, value_name = "N")]
        tail: Option<usize>,
    },

    /// Stop jobs: SIGTERM first, and SIGKILL for those that still run after --grace
    #[command(after_help = "Example:\n  gainshare stop --grace 30s vae mlp-2")]
    Stop {
        /// Names or numbers of the jobs
        #[arg(required = true)]
        jobs: Vec<String>,
        /// How long a job may take to save its work
        #[arg(long, value_name = "TIME", default_value = "10s", value_parser = parse_duration)]
        grace: Duration,
        /// Do not wait until the jobs have ended
        #[arg(long)]
        no_wait: bool,
    },

    /// Explain why a job has the share it has
    #[command(after_help = "Example:\n  gainshare explain vae\n  gainshare explain vae --dump decision.json")]
    Explain {
        /// Name or number of the job
        job: String,
        /// Write the last decision about the job, with all it depended on, to this file (`-` for standard
        /// output), for `replay`
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        dump: Option<PathBuf>,
        /// Write the last decision about the job's share of its GPU instead
        #[arg(long, requires = "dump")]
        gpu: bool,
    },

    /// Make a recorded decision again, and check that the plan is the same
    ///
    /// Ends with code 1 and prints the differences if it is not.
    #[command(after_help = "Example:\n  gainshare explain vae --dump decision.json\n  gainshare replay decision.json")]
    Replay {
        /// A file of `explain --dump`, or `-` for standard input
        #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },

    /// Print events as they happen: jobs that start, end and report, and decisions
    #[command(after_help = "Example:\n  gainshare events -o json")]
    Events,

    /// Check what this machine can do for jobs, and how to get what is missing
    #[command(after_help = "Example:\n  gainshare doctor")]
    Doctor,

    /// Train a built-in model with real gradients, to try things out
    #[command(after_help = "Example:\n  gainshare run -- gainshare train vae --steps 500")]
    Train(Box<gainshare_workloads::TrainArgs>),

    /// Run one server, worker or chief of a training job with parameter servers
    #[command(
        after_help = "Example:\n  gainshare train-ps gru --role server --listen 127.0.0.1:2222 &\n  gainshare train-ps gru --role worker --servers 127.0.0.1:2222"
    )]
    TrainPs(Box<gainshare_workloads::PsArgs>),

    /// Run the tasks of a distributed job as processes of this machine, each with TF_CONFIG
    ///
    /// The output of the chief, or of the first worker, is the job's output, and its end is the job's end. A worker
    /// that fails is started again alone. A parameter server that fails loses its state, so all tasks are started
    /// again. `gainshare run --role` does the same as a job that shares the machine with others.
    #[command(after_help = "Example:\n  gainshare tasks --role ps=1 --role worker=2 -- python3 train.py")]
    Tasks(TasksArgs),

    /// Watch three training jobs share this machine, once under each policy
    #[command(after_help = "Example:\n  gainshare demo\n  gainshare demo --seconds 120 --policy na,gainshare -o json")]
    Demo(crate::demo::DemoArgs),

    /// Simulate a scenario under several policies: would they help my jobs?
    ///
    /// Every seed makes its own draw of the scenario's jobs, and all policies face the same draws. Times are
    /// medians over seeds. The policies are the code that the daemon runs. `srpt` alone knows how much work is
    /// left, which no real policy can know: it shows how much there is to gain.
    #[command(
        after_help = "Example:\n  gainshare sim lab.toml --policy na,flowcon,gainshare,srpt --seeds 100 --figure lab.html"
    )]
    Sim(crate::simulate::SimArgs),

    /// Repeat an experiment of the papers and print it beside the published figures
    #[command(
        after_help = "Example:\n  gainshare paper --list\n  gainshare paper table-6.2\n  gainshare paper specon-30 --figure nodes.svg"
    )]
    Paper(crate::simulate::PaperArgs),

    /// Forecast a loss or an accuracy: fit a curve to its values, and draw it
    ///
    /// The fit is the one that the daemon uses: an average over many shapes, so that noise, spikes and drops of
    /// the learning rate mislead less. The interval contains the true value about four times out of five.
    #[command(
        after_help = "Example:\n  gainshare predict metrics.csv --horizon 100 --figure forecast.svg\n  gainshare predict losses.txt --target 0.1\n  gainshare predict finished-run.csv --back-test\n  gainshare predict finished-runs/ --back-test -o json"
    )]
    Predict(crate::predict::PredictArgs),

    /// Read, generate and replay traces of clusters
    #[command(after_help = "Example:\n  gainshare trace replay philly.csv.gz --policy fifo,tiresias")]
    Trace {
        #[command(subcommand)]
        command: crate::simulate::TraceCommand,
    },

    /// Run the operator of a Kubernetes cluster: executes the program gainshare-operator
    ///
    /// `gainshare operator --help` prints that program's own help.
    #[command(disable_help_flag = true)]
    #[command(after_help = "Example:\n  gainshare operator --namespace gainshare-system --authority /run/gainshare")]
    Operator {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION")]
        args: Vec<OsString>,
    },

    /// Print the custom resource definitions for a cluster
    #[command(after_help = "Example:\n  gainshare crd | kubectl apply -f -")]
    Crd,

    /// Print Kubeflow's TFJobs as TrainingJobs, for clusters where Kubeflow owns the kind TFJob
    #[command(after_help = "Example:\n  gainshare convert tfjob.yaml | kubectl apply -f -")]
    Convert {
        /// A file with one or several TFJobs in YAML (`-` for standard input)
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
    },

    /// Run the node agent of one node of a cluster: executes the program gainshare-node-agent
    ///
    /// `gainshare agent --help` prints that program's own help.
    #[command(disable_help_flag = true)]
    #[command(
        after_help = "Example:\n  gainshare agent --operator https://gainshare-operator:8443 --ca ca.crt --node worker-1"
    )]
    Agent {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTION")]
        args: Vec<OsString>,
    },

    /// Print the completion script for a shell
    #[command(
        after_help = "Example:\n  gainshare completions bash > ~/.local/share/bash-completion/completions/gainshare"
    )]
    Completions {
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },

    /// Write the man pages into a directory
    #[command(hide = true)]
    Man {
        #[arg(value_hint = ValueHint::DirPath)]
        dir: PathBuf,
    },

    /// Print this command line's reference in Markdown
    #[command(hide = true)]
    Reference,

    /// Print the reference of the policies in Markdown
    #[command(hide = true)]
    Policies,

    /// Run as the parent of one detached job
    #[command(hide = true)]
    Supervise(SuperviseArgs),

    /// Put limits back if the daemon dies
    #[command(hide = true)]
    Guard {
        #[arg(long)]
        state_dir: PathBuf,
        #[arg(long)]
        runtime_dir: PathBuf,
        #[arg(long, value_parser = parse_duration)]
        lease: Duration,
    },

    /// Stop and continue jobs on a machine without cgroups, and continue all if the daemon dies
    #[command(hide = true)]
    Keep,
}

/// The description of a job on the command line. A detached supervisor gets it, too.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// Name of the job [default: the program's name and a number]
    #[arg(short, long)]
    pub name: Option<String>,
    /// Waiting jobs with a larger number start first
    #[arg(short, long, value_name = "P", default_value_t = 0, allow_negative_numbers = true)]
    pub priority: i32,
    /// Start only after this job has ended with exit code 0 (may be repeated)
    #[arg(long, value_name = "JOB")]
    pub after: Vec<String>,
    /// The metric that shows progress, by the name under which it is printed [default: chosen from the output]
    #[arg(short, long, value_name = "NAME")]
    pub metric: Option<String>,
    /// A regular expression for output that nothing else understands; its group named `value` is the metric
    #[arg(long, value_name = "REGEX")]
    pub pattern: Option<String>,
    /// The file (CSV, JSON lines or text) below the current directory into which the job writes its metrics
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub metrics_file: Option<PathBuf>,
    /// The least share of the CPU that the job gets while other jobs want it too, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub floor: f64,
    /// The largest share of the CPU that the job may have, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 1.0)]
    pub max: f64,
    #[command(flatten)]
    pub finish: FinishArgs,
    /// Start the job exactly as the shell would: no fitted thread pools, no passive waiting
    #[arg(long)]
    pub plain: bool,
    /// Let the job's work on a GPU follow its share, too (NVIDIA); with --plain by stopping and continuing the job
    #[arg(long)]
    pub gpu: bool,
    /// The memory that the job needs on a GPU, such as 40G: it waits until one has as much free; 0: it never waits
    /// [default: what earlier runs of the same command had]
    #[arg(long, value_name = "SIZE")]
    pub gpu_memory: Option<String>,
    /// Run in the background; follow with `gainshare logs -f`
    #[arg(short, long)]
    pub detach: bool,
    /// Fail if there is no daemon and none can be started, rather than run without sharing
    #[arg(long)]
    pub require_daemon: bool,
    /// Run COUNT processes of a role (chief, ps, worker, evaluator), each with the addresses of all in TF_CONFIG
    /// (may be repeated)
    #[arg(long, value_name = "ROLE=COUNT")]
    pub role: Vec<String>,
    /// What runs the job
    #[arg(long, value_enum, default_value_t = RuntimeChoice::Process, value_name = "RUNTIME")]
    pub runtime: RuntimeChoice,
    /// The image of the container, with --runtime docker
    #[arg(long, required_if_eq("runtime", "docker"))]
    pub image: Option<String>,
    /// The command and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

impl RunArgs {
    /// The roles of `--role`.
    pub fn roles(&self) -> anyhow::Result<Roles> {
        parse_roles(&self.role)
    }
}

/// Reads `ROLE=COUNT` words.
fn parse_roles(words: &[String]) -> anyhow::Result<Roles> {
    let mut roles = Roles::default();
    for word in words {
        let (name, count) = word.split_once('=').unwrap_or((word, "1"));
        let role = Role::try_from(name.to_owned()).map_err(anyhow::Error::msg)?;
        let replicas: u32 =
            count.parse().with_context(|| format!("--role {word}: `{count}` is not a number of tasks"))?;
        if roles.0.insert(role, RoleSpec::of_count(replicas)).is_some() {
            bail!("--role {} is given twice; give one number", role.name());
        }
    }
    Ok(roles)
}

/// The tasks of a distributed job.
#[derive(Debug, Args)]
pub struct TasksArgs {
    /// Run COUNT tasks of a role: chief, ps, worker, evaluator (may be repeated)
    #[arg(long, value_name = "ROLE=COUNT")]
    pub role: Vec<String>,
    /// How often failed tasks are started again, in all
    #[arg(long, value_name = "N", default_value_t = DEFAULT_RESTARTS)]
    pub restarts: u32,
    /// How long tasks have to end after SIGTERM
    #[arg(long, value_name = "TIME", default_value = "20s", value_parser = parse_duration)]
    pub grace: Duration,
    /// The folder for the output of all tasks but the one that reports [default: a new one for temporary files]
    #[arg(long, value_name = "FOLDER", value_hint = ValueHint::DirPath)]
    pub logs: Option<PathBuf>,
    /// The command of every task and its arguments
    #[arg(trailing_var_arg = true, required = true, value_name = "CMD", value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
}

impl TasksArgs {
    /// The roles of `--role`, or those that a supervisor left in the environment.
    pub fn roles(&self) -> anyhow::Result<Roles> {
        match std::env::var(ROLES_VARIABLE) {
            Ok(text) if self.role.is_empty() => {
                serde_json::from_str(&text).with_context(|| format!("{ROLES_VARIABLE} names no roles; unset it"))
            }
            _ => parse_roles(&self.role),
        }
    }
}

/// When a job must be done.
#[derive(Debug, Args)]
pub struct FinishArgs {
    /// When the job must be done: `18:00`, `tomorrow 9:00`, `friday noon`, `2h`, or RFC 3339. The policy `qos` keeps
    /// deadlines; under every policy the end is predicted and a predicted miss is announced
    #[arg(long, value_name = "WHEN")]
    pub deadline: Option<String>,
    /// How late the job may be, such as 10m; without it the deadline is strict
    #[arg(long, value_name = "TIME")]
    pub deadline_tolerance: Option<String>,
    /// The job stops when its metric reaches this value, such as loss=0.05: for jobs that do not print how many
    /// steps they will make
    #[arg(long, value_name = "METRIC=VALUE")]
    pub target: Option<String>,
}

impl FinishArgs {
    /// Puts what was given on the command line into a job's description.
    pub fn apply(&self, spec: &mut gainshare_daemon::spec::JobSpec) {
        spec.deadline = self.deadline.clone().or(spec.deadline.take());
        spec.deadline_tolerance = self.deadline_tolerance.clone().or(spec.deadline_tolerance.take());
        spec.target = self.target.clone().or(spec.target.take());
    }
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Job files
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub files: Vec<PathBuf>,
    #[command(flatten)]
    pub finish: FinishArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RuntimeChoice {
    Process,
    Docker,
}

impl From<RuntimeChoice> for gainshare_limits::RuntimeKind {
    fn from(choice: RuntimeChoice) -> Self {
        match choice {
            RuntimeChoice::Process => gainshare_limits::RuntimeKind::Process,
            RuntimeChoice::Docker => gainshare_limits::RuntimeKind::Docker,
        }
    }
}

#[derive(Debug, Args)]
pub struct SubmitArgs {
    /// Job files
    #[arg(required = true, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub files: Vec<PathBuf>,
    /// Run all jobs under this runtime instead of the one that the files name
    #[arg(long, value_enum, value_name = "RUNTIME")]
    pub runtime: Option<RuntimeChoice>,
    #[command(flatten)]
    pub finish: FinishArgs,
    /// Check the files and show the jobs they make, but submit nothing
    #[arg(long)]
    pub dry_run: bool,
}

#[derive(Debug, Args)]
pub struct UpArgs {
    /// Settings file [default: ~/.config/gainshare/config.toml]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Which job gets how much [default: gainshare]
    #[arg(long, value_parser = crate::values::policy_for_real_jobs())]
    pub policy: Option<Preset>,
    /// gainshare and qos: what comes as early as possible, in the mean over jobs [default: finish]
    #[arg(long, value_parser = crate::values::aim())]
    pub aim: Option<Aim>,
    /// FlowCon: growth efficiency below this counts as "no longer growing" [default: 0.05]
    #[arg(long)]
    pub alpha: Option<f64>,
    /// FlowCon: time between two decisions [default: 20s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub interval: Option<Duration>,
    /// FlowCon: a job that no longer grows keeps at least 1/(BETA n) of a machine with n jobs [default: 2]
    #[arg(long)]
    pub beta: Option<f64>,
    /// FlowCon: compare changes of the metric relative to its first value, or as they are [default: relative]
    #[arg(long, value_enum, value_name = "HOW")]
    pub normalise: Option<NormaliseChoice>,
    /// How a share becomes a limit: relative weight, hard cap, or whole cores [default: weight]
    #[arg(long, value_enum)]
    pub mode: Option<ModeChoice>,
    /// Let the work of all jobs on GPUs follow their shares, too (NVIDIA)
    #[arg(long)]
    pub gpu: bool,
    /// How many jobs may run at once; others wait [default: no limit]
    #[arg(long, value_name = "N")]
    pub slots: Option<usize>,
    /// How many cores the jobs may use [default: all]
    #[arg(long, value_name = "N")]
    pub cores: Option<usize>,
    /// How many jobs at once the thread pools of a tuned start leave room for [default: the jobs that run now]
    #[arg(long, value_name = "N")]
    pub expect: Option<usize>,
    /// What runs jobs; `docker` also adopts containers with the label gainshare.enable=true [default: process]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "RUNTIME")]
    pub runtime: Option<Vec<RuntimeChoice>>,
    /// Adopt every container, not only labelled ones
    #[arg(long)]
    pub docker_all: bool,
    /// The Docker engine's socket [default: that of DOCKER_HOST, of a rootless engine, or /var/run/docker.sock]
    #[arg(long, value_name = "PATH")]
    pub docker_socket: Option<PathBuf>,
    /// Loopback address for programs and the push protocol, or `none` [default: 127.0.0.1:0, any free port]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<Listen>,
    /// Where journal, logs and job records are kept
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub state_dir: Option<PathBuf>,
    /// Where socket, lock and lease of the running daemon are
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub runtime_dir: Option<PathBuf>,
    /// End after this long without a job [default: never, unless started on demand]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub idle_exit: Option<Duration>,
    /// Limits are put back this long after the daemon's last sign of life [default: 15s]
    #[arg(long, value_name = "TIME", value_parser = parse_duration)]
    pub lease: Option<Duration>,
    /// Decide when the interval is over (`tick`), or at every report too (`sample`) [default: tick]
    #[arg(long, value_enum)]
    pub react: Option<ReactChoice>,
    /// Run in the background; return when it is ready
    #[arg(short, long)]
    pub detach: bool,
    /// Started by another command: succeed if a daemon runs already, and end when idle
    #[arg(long, hide = true)]
    pub on_demand: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum NormaliseChoice {
    Relative,
    Raw,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModeChoice {
    Weight,
    Quota,
    Cores,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ReactChoice {
    Tick,
    Sample,
}

#[derive(Debug, Args)]
pub struct SuperviseArgs {
    /// The job's directory, for a job that the daemon starts
    #[arg(required_unless_present = "attached")]
    pub dir: Option<PathBuf>,
    /// The number of the attempt
    #[arg(long, default_value_t = 0)]
    pub attempt: u32,
    /// Register the job itself; its description comes on standard input
    #[arg(long, conflicts_with = "dir", requires = "command")]
    pub attached: bool,
    #[arg(last = true, value_name = "CMD")]
    pub command: Vec<OsString>,
}
