//! What a user asks for: one job, a file of jobs, a parameter sweep.
//!
//! **Problem.** The same description must reach the daemon from a command line, a TOML file, a YAML
//! file and a program; it must run unchanged as a process and as a container; and a mistake in it
//! must be found before anything is submitted.
//!
//! **How.** [`load`] reads a file (one job, `[[job]]` tables, a YAML list or several documents, TFJobs),
//! [`JobSpec::expand`] turns a sweep into plain jobs, [`JobSpec::validate`] refuses what cannot
//! run. Errors fit on one line and name the file, the line and the field.
//!
//! **Properties.** Unknown fields are refused. Expansion is deterministic: parameters in
//! alphabetical order, the last one fastest. Values of the environment never leave through
//! [`JobSpec::env_names`], which is all that the API shows.

mod file;
mod manifest;
mod roles;

use crate::deadline;
use crate::duration::parse_duration;
use crate::size::parse_size;
pub use file::{Format, load, parse};
use gainshare_limits::RuntimeKind;
pub use gainshare_progress::MetricSpec;
use gainshare_progress::MetricSpecError;
pub use roles::{RestartPolicy, Role, RoleSpec, Roles, Task};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The variable that tells `gainshare tasks` the roles of a job, as JSON.
pub const ROLES_VARIABLE: &str = "GAINSHARE_TASK_ROLES";

/// The variable that tells `gainshare tasks` the files by which processes join the job's control group, with colons
/// between them.
pub const GROUPS_VARIABLE: &str = "GAINSHARE_TASK_GROUPS";

/// How often failed tasks of a job are started again if its author does not say.
pub const DEFAULT_RESTARTS: u32 = 3;

/// More restarts than this are a mistake more often than a wish. A TrainingJob has the same bound.
pub const MAX_RESTARTS: u32 = 1000;

/// A sweep over more jobs than this is a mistake more often than a wish.
pub const MAX_SWEEP: usize = 1000;

/// One job as its owner describes it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct JobSpec {
    /// Letters, digits, `.`, `_`, `-`; default: the program's name and a number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Program and arguments. May be empty for a container whose image knows its command.
    pub command: Vec<String>,
    /// Where the job runs; relative paths in a job file are relative to the file.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub cwd: Option<PathBuf>,
    /// Added to the environment. Values are never shown by the API.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[schema(value_type = String)]
    pub runtime: RuntimeKind,
    /// Docker only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Docker only: `SOURCE:TARGET` or `SOURCE:TARGET:ro`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<String>,
    /// Larger goes first among waiting jobs.
    pub priority: i32,
    /// Names of jobs that must have ended well before this one starts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub after: Vec<String>,
    /// The least share of the CPU, 0…1.
    pub floor: f64,
    /// The most it may have, 0…1.
    pub max: f64,
    pub start: StartKind,
    /// Catch the job's GPU work, so that it follows the job's share.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub gpu: bool,
    /// The memory that the job needs on a GPU, such as `40G`; it waits until one GPU has as much free. `0`: it starts
    /// whatever is free. Default: what earlier runs of the same command had.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_memory: Option<String>,
    /// The owner of the job; default: the Unix user.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Which of the job's numbers says how it does, and where to find it.
    #[schema(value_type = Object)]
    pub metric: MetricSpec,
    /// When the job must have ended: `18:00`, `tomorrow 9:00`, `2h` or RFC 3339. The daemon keeps RFC 3339.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<String>,
    /// Lateness that is tolerated, such as `10m`; without it the deadline is strict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline_tolerance: Option<String>,
    /// The job stops when its metric reaches this value, such as `loss=0.05`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// A job of several tasks: how many processes of each role (`chief`, `ps`, `worker`, `evaluator`).
    #[serde(skip_serializing_if = "Roles::is_empty")]
    #[schema(value_type = Object)]
    pub roles: Roles,
    /// Of a job with roles: how often failed tasks are started again, in all. `None`: [`DEFAULT_RESTARTS`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    /// The longest time that the job may run, such as `2h`. Then it is stopped and has failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_limit: Option<String>,
    /// How long the job is remembered after its end, such as `1h`. Then its record and its output are removed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keep_for: Option<String>,
    /// One job for each combination; `{name}` in command, environment values and job name is replaced.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = Object)]
    pub sweep: BTreeMap<String, Vec<SweepValue>>,
}

impl Default for JobSpec {
    fn default() -> Self {
        JobSpec {
            name: None,
            command: Vec::new(),
            cwd: None,
            env: BTreeMap::new(),
            runtime: RuntimeKind::Process,
            image: None,
            mounts: Vec::new(),
            priority: 0,
            after: Vec::new(),
            floor: 0.0,
            max: 1.0,
            start: StartKind::Tuned,
            gpu: false,
            gpu_memory: None,
            owner: None,
            metric: MetricSpec::default(),
            deadline: None,
            deadline_tolerance: None,
            target: None,
            roles: Roles::default(),
            restarts: None,
            time_limit: None,
            keep_for: None,
            sweep: BTreeMap::new(),
        }
    }
}

/// How a job's threads are set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, utoipa::ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum StartKind {
    /// Passive waiting and thread pools that fit, unless the user set them.
    #[default]
    Tuned,
    /// Exactly as the user would start it.
    Plain,
}

/// One value of a sweep's parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged, expecting = "each value must be a text, a number, true or false")]
pub enum SweepValue {
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
}

impl std::fmt::Display for SweepValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SweepValue::Bool(v) => v.fmt(f),
            SweepValue::Int(v) => v.fmt(f),
            SweepValue::Float(v) => v.fmt(f),
            SweepValue::Text(v) => v.fmt(f),
        }
    }
}

/// What is wrong with a description. One line each, naming the thing and the remedy.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SpecError {
    #[error("cannot read {path}: {why}")]
    Read { path: String, why: String },
    #[error("{path}: {what}")]
    Syntax { path: String, what: String },
    #[error("{path} describes no job: give it a `command`, or [[job]] tables")]
    Empty { path: String },
    #[error(
        "job name `{0}` is not allowed: use 1 to 63 letters, digits, `.`, `_` or `-`, beginning with a letter or \
         digit, and not digits only"
    )]
    Name(String),
    #[error("job {job} has no command: set `command = [\"program\", \"argument\"]`")]
    NoCommand { job: String },
    #[error("job {job}: {field} contains a NUL byte; remove it")]
    Nul { job: String, field: &'static str },
    #[error("job {job}: `{name}` is not a name for an environment variable: use letters, digits and `_`")]
    EnvName { job: String, name: String },
    #[error("job {job}: {field} must lie between 0 and 1, not {value}")]
    Fraction { job: String, field: &'static str, value: f64 },
    #[error("job {job}: max must be above 0: a job that may use nothing never ends")]
    MaxZero { job: String },
    #[error("job {job}: floor {floor} is larger than max {max}; lower the floor or raise max")]
    FloorAboveMax { job: String, floor: f64, max: f64 },
    #[error("job {job} runs under docker but names no image: set `image = \"name:tag\"`")]
    NoImage { job: String },
    #[error("job {job}: mount `{mount}` is not SOURCE:TARGET or SOURCE:TARGET:ro with an absolute target")]
    Mount { job: String, mount: String },
    #[error("job {job} depends on itself: remove its name from `after`")]
    AfterItself { job: String },
    #[error("job {job}: working directory {cwd} is not absolute; job files make it so, programs must do it themselves")]
    RelativeCwd { job: String, cwd: String },
    #[error("job {job}: metric: {what}")]
    Metric { job: String, what: String },
    #[error("job {job}: {what}")]
    Deadline { job: String, what: String },
    #[error("job {job}: target {target} is about another metric than {metric}; name the same one in both")]
    OtherMetric { job: String, target: String, metric: String },
    #[error("job {job}: {what}")]
    Roles { job: String, what: String },
    #[error(
        "job {job}: restarts are for jobs with roles: a job of one process is not started again; remove `restarts`"
    )]
    RestartsWithoutRoles { job: String },
    #[error("job {job}: {restarts} restarts are too many: at most {MAX_RESTARTS} are possible")]
    TooManyRestarts { job: String, restarts: u32 },
    #[error("job {job}: {field}: {what}")]
    Length { job: String, field: &'static str, what: String },
    #[error("job {job}: sweep.{parameter} has no values; give it at least one")]
    EmptyParameter { job: String, parameter: String },
    #[error(
        "job {job}: sweep.{parameter} is used nowhere: write {{{parameter}}} in the command, the environment or the name"
    )]
    UnusedParameter { job: String, parameter: String },
    #[error("job {job}: the sweep makes more than {MAX_SWEEP} jobs; split it")]
    SweepTooLarge { job: String },
    #[error("job {job}: expand the sweep before submitting it")]
    NotExpanded { job: String },
    #[error(
        "two jobs are called {name}: give one of them another name, or put a parameter such as {{lr}} into a sweep's name"
    )]
    Duplicate { name: String },
}

impl JobSpec {
    pub fn new(command: Vec<String>) -> JobSpec {
        JobSpec { command, ..JobSpec::default() }
    }

    /// How errors and tables call the job before the daemon has named it.
    pub fn label(&self) -> String {
        self.name.clone().unwrap_or_else(|| self.base_name())
    }

    /// The program's file name, reduced to what a name may contain; `job` if nothing is left.
    pub fn base_name(&self) -> String {
        let word = self.command.first().map_or("", |c| c.rsplit('/').next().unwrap_or(""));
        let script =
            self.command.get(1).filter(|a| !a.starts_with('-')).and_then(|a| Path::new(a).file_stem()?.to_str());
        // `python3 train.py` is better called `train` than `python3`.
        let word = if is_interpreter(word) { script.unwrap_or(word) } else { word };
        let mut name: String = word
            .chars()
            .map(|c| if is_name_char(c) { c } else { '-' })
            .skip_while(|c| !c.is_ascii_alphanumeric())
            .collect();
        name.truncate(48);
        if name.is_empty() { "job".into() } else { name }
    }

    /// The variables that the supervisor sets. The roles are among them, because other users can read arguments.
    pub fn start_env(&self) -> BTreeMap<String, String> {
        let mut env = self.env.clone();
        if !self.roles.is_empty() {
            env.insert(ROLES_VARIABLE.to_owned(), serde_json::to_string(&self.roles).unwrap_or_default());
        }
        env
    }

    pub fn env_names(&self) -> Vec<String> {
        self.env.keys().cloned().collect()
    }

    /// Keeps the names of the environment's variables and drops their values.
    pub fn hide_env_values(&mut self) {
        let roles = self.roles.0.values_mut().flat_map(|role| role.env.values_mut());
        self.env.values_mut().chain(roles).for_each(|value| *value = String::new());
    }

    /// Refuses what cannot run. Does not look at the machine (that the program exists is checked where it
    /// is started).
    pub fn validate(&self) -> Result<(), SpecError> {
        let job = self.label();
        if let Some(name) = &self.name {
            check_name(name)?;
        }
        if !self.sweep.is_empty() {
            return Err(SpecError::NotExpanded { job });
        }
        if self.command.first().is_none_or(|c| c.is_empty()) && self.runtime == RuntimeKind::Process {
            return Err(SpecError::NoCommand { job });
        }
        self.roles.validate(self.runtime).map_err(|what| SpecError::Roles { job: job.clone(), what })?;
        self.validate_bounds(&job)?;
        self.validate_environment(&job)?;
        for (field, value) in [("floor", self.floor), ("max", self.max)] {
            if !(0.0..=1.0).contains(&value) {
                return Err(SpecError::Fraction { job, field, value });
            }
        }
        if self.max == 0.0 {
            return Err(SpecError::MaxZero { job });
        }
        if self.floor > self.max {
            return Err(SpecError::FloorAboveMax { job, floor: self.floor, max: self.max });
        }
        if let Some(cwd) = self.cwd.as_ref().filter(|c| !c.is_absolute()) {
            return Err(SpecError::RelativeCwd { job, cwd: cwd.display().to_string() });
        }
        if let (Some(path), Some(cwd)) = (&self.metric.path, &self.cwd)
            && Path::new(path).is_absolute()
            && !Path::new(path).starts_with(cwd)
        {
            let what = MetricSpecError::PathEscapes { path: path.clone() }.to_string();
            return Err(SpecError::Metric { job, what });
        }
        if self.runtime == RuntimeKind::Docker && self.image.as_deref().is_none_or(str::is_empty) {
            return Err(SpecError::NoImage { job });
        }
        if let Some(mount) = self.mounts.iter().find(|m| parse_mount(m).is_none()) {
            return Err(SpecError::Mount { job, mount: mount.clone() });
        }
        for name in &self.after {
            check_name(name)?;
            if Some(name) == self.name.as_ref() {
                return Err(SpecError::AfterItself { job });
            }
        }
        self.validate_deadline(&job)?;
        self.metric.validate().map_err(|what| SpecError::Metric { job, what: what.to_string() })
    }

    /// The command and the variables can be passed to a program.
    fn validate_environment(&self, job: &str) -> Result<(), SpecError> {
        if self.command.iter().any(|a| a.contains('\0')) {
            return Err(SpecError::Nul { job: job.to_owned(), field: "command" });
        }
        for (name, value) in &self.env {
            let ok = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_') && !name.is_empty();
            if !ok || name.starts_with(|c: char| c.is_ascii_digit()) {
                return Err(SpecError::EnvName { job: job.to_owned(), name: name.clone() });
            }
            if value.contains('\0') {
                return Err(SpecError::Nul { job: job.to_owned(), field: "env" });
            }
        }
        Ok(())
    }

    fn validate_deadline(&self, job: &str) -> Result<(), SpecError> {
        if self.deadline.is_none() && self.deadline_tolerance.is_some() {
            let what = "deadline_tolerance without a deadline: give a deadline, or remove it".to_owned();
            return Err(SpecError::Deadline { job: job.to_owned(), what });
        }
        if let Some(text) = &self.deadline_tolerance {
            parse_duration(text).map_err(|what| SpecError::Deadline { job: job.to_owned(), what })?;
        }
        if let Some(text) = &self.target {
            let wrong = |e: deadline::DeadlineError| SpecError::Deadline { job: job.to_owned(), what: e.to_string() };
            let (name, _) = deadline::parse_target(text).map_err(wrong)?;
            if let Some(metric) = self.metric.name.as_ref().filter(|m| **m != name) {
                return Err(SpecError::OtherMetric {
                    job: job.to_owned(),
                    target: text.clone(),
                    metric: metric.clone(),
                });
            }
        }
        Ok(())
    }

    /// Bounds on the run, what it needs of a GPU, and how long it is remembered.
    fn validate_bounds(&self, job: &str) -> Result<(), SpecError> {
        let job = job.to_owned();
        if let Some(Err(what)) = self.gpu_memory.as_ref().map(|text| parse_size(text)) {
            return Err(SpecError::Length { job, field: "gpu_memory", what });
        }
        match self.restarts {
            Some(_) if self.roles.is_empty() => return Err(SpecError::RestartsWithoutRoles { job }),
            Some(restarts) if restarts > MAX_RESTARTS => return Err(SpecError::TooManyRestarts { job, restarts }),
            _ => {}
        }
        for (field, text) in [("time_limit", &self.time_limit), ("keep_for", &self.keep_for)] {
            let length = text.as_ref().map(|text| parse_duration(text)).transpose();
            let length = length.map_err(|what| SpecError::Length { job: job.clone(), field, what })?;
            if field == "time_limit" && length.is_some_and(|length| length.is_zero()) {
                let what = "a job that may run for no time never begins: give it a length of time".to_owned();
                return Err(SpecError::Length { job, field, what });
            }
        }
        Ok(())
    }

    /// The memory that the job needs on a GPU, if its author says.
    pub fn gpu_memory_bytes(&self) -> Option<u64> {
        parse_size(self.gpu_memory.as_ref()?).ok()
    }

    /// The longest time that the job may run.
    pub fn time_limit(&self) -> Option<Duration> {
        parse_duration(self.time_limit.as_ref()?).ok()
    }

    /// How long the job is remembered after its end, if its author says.
    pub fn keep_for(&self) -> Option<Duration> {
        parse_duration(self.keep_for.as_ref()?).ok()
    }

    /// Turns the deadline into a moment (RFC 3339), and a target into the metric's name. `now` is the
    /// present in the time zone of the user who wrote the deadline.
    pub fn resolve(&mut self, now: &jiff::Zoned) -> Result<(), SpecError> {
        if let Some(text) = &self.deadline {
            let moment = deadline::parse(text, now)
                .map_err(|e| SpecError::Deadline { job: self.label(), what: e.to_string() })?;
            self.deadline = Some(moment.to_string());
        }
        if let Some((name, _)) = self.target.as_ref().and_then(|t| deadline::parse_target(t).ok()) {
            self.metric.name.get_or_insert(name);
        }
        Ok(())
    }

    /// The resolved deadline in Unix seconds.
    pub fn deadline_s(&self) -> Option<f64> {
        let moment: jiff::Timestamp = self.deadline.as_ref()?.parse().ok()?;
        Some(moment.as_millisecond() as f64 / 1e3)
    }

    /// Tolerated lateness in seconds.
    pub fn tolerance_s(&self) -> f64 {
        let tolerance = self.deadline_tolerance.as_ref().and_then(|t| parse_duration(t).ok());
        tolerance.map_or(0.0, |t| t.as_secs_f64())
    }

    /// The value at which the job stops.
    pub fn target_value(&self) -> Option<f64> {
        deadline::parse_target(self.target.as_ref()?).ok().map(|(_, value)| value)
    }

    /// One plain job for each combination of the sweep's values; the job itself if there is no sweep.
    pub fn expand(self) -> Result<Vec<JobSpec>, SpecError> {
        if self.sweep.is_empty() {
            return Ok(vec![self]);
        }
        let job = self.label();
        let mut count = 1usize;
        for (parameter, values) in &self.sweep {
            if values.is_empty() {
                return Err(SpecError::EmptyParameter { job, parameter: parameter.clone() });
            }
            let mark = format!("{{{parameter}}}");
            let used = self.command.iter().chain(self.env.values()).chain(&self.name).any(|s| s.contains(&mark));
            if !used {
                return Err(SpecError::UnusedParameter { job, parameter: parameter.clone() });
            }
            count = count.saturating_mul(values.len());
            if count > MAX_SWEEP {
                return Err(SpecError::SweepTooLarge { job });
            }
        }
        let parameters: Vec<(&String, &Vec<SweepValue>)> = self.sweep.iter().collect();
        let named_apart =
            self.name.as_ref().is_some_and(|n| parameters.iter().any(|(p, _)| n.contains(&format!("{{{p}}}"))));
        let mut jobs = Vec::with_capacity(count);
        for index in 0..count {
            let mut rest = index;
            let mut values = BTreeMap::new();
            for (parameter, choices) in parameters.iter().rev() {
                values.insert(parameter.as_str(), choices[rest % choices.len()].to_string());
                rest /= choices.len();
            }
            let fill = |text: &str| replace_marks(text, &values);
            let mut one = JobSpec { sweep: BTreeMap::new(), ..self.clone() };
            one.command.iter_mut().for_each(|a| *a = fill(a));
            one.env.values_mut().for_each(|v| *v = fill(v));
            one.name = match &self.name {
                // A value may hold what a name may not (a path, a plus sign).
                Some(name) if named_apart => {
                    Some(fill(name).chars().map(|c| if is_name_char(c) { c } else { '-' }).collect())
                }
                Some(name) => Some(format!("{name}-{}", index + 1)),
                None => None,
            };
            jobs.push(one);
        }
        Ok(jobs)
    }
}

/// Reads a spec that another version of this program may have written: unknown fields are ignored.
/// Job files and requests, which people write, are read strictly instead, so that a misspelt field
/// is found.
pub(crate) fn deserialize_stored<'de, D: Deserializer<'de>>(deserializer: D) -> Result<JobSpec, D::Error> {
    use serde::de::Error;
    let mut map = serde_json::Map::deserialize(deserializer)?;
    map.retain(|key, _| field_names::<JobSpec>().contains(&key.as_str()));
    if let Some(serde_json::Value::Object(metric)) = map.get_mut("metric") {
        metric.retain(|key, _| field_names::<MetricSpec>().contains(&key.as_str()));
    }
    JobSpec::deserialize(serde_json::Value::Object(map)).map_err(D::Error::custom)
}

/// The names of a struct's fields, as its derived `Deserialize` asks for them.
fn field_names<T: serde::de::DeserializeOwned>() -> &'static [&'static str] {
    struct Probe<'a>(&'a mut &'static [&'static str]);

    impl<'de> Deserializer<'de> for Probe<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_any<V: serde::de::Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(serde::de::Error::custom("only a struct has fields"))
        }

        fn deserialize_struct<V: serde::de::Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            _: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            Err(serde::de::Error::custom("the names are all that is wanted"))
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }

    let mut names: &[&str] = &[];
    let _ = T::deserialize(Probe(&mut names));
    names
}

/// Replaces each `{parameter}` once, from left to right, so that a value which looks like a mark is not
/// replaced again.
fn replace_marks(text: &str, values: &BTreeMap<&str, String>) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(open) = rest.find('{') {
        out.push_str(&rest[..open]);
        let tail = &rest[open + 1..];
        match tail.find('}').and_then(|close| Some((close, values.get(&tail[..close])?))) {
            Some((close, value)) => {
                out.push_str(value);
                rest = &tail[close + 1..];
            }
            None => {
                out.push('{');
                rest = tail;
            }
        }
    }
    out.push_str(rest);
    out
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

fn is_interpreter(program: &str) -> bool {
    program.starts_with("python") || matches!(program, "sh" | "bash" | "torchrun" | "accelerate")
}

fn check_name(name: &str) -> Result<(), SpecError> {
    let ok = (1..=63).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_name_char)
        // A number names a job by its id; a name made of digits would be ambiguous.
        && !name.chars().all(|c| c.is_ascii_digit());
    if ok { Ok(()) } else { Err(SpecError::Name(name.to_owned())) }
}

/// Source, target and whether it is read-only.
pub fn parse_mount(mount: &str) -> Option<(&str, &str, bool)> {
    let mut parts = mount.split(':');
    let (source, target) = (parts.next()?, parts.next()?);
    let read_only = match (parts.next(), parts.next()) {
        (None, _) | (Some("rw"), None) => false,
        (Some("ro"), None) => true,
        _ => return None,
    };
    (!source.is_empty() && target.starts_with('/')).then_some((source, target, read_only))
}

/// Expands and validates all specs together: either every job can be submitted or none.
pub fn prepare(specs: Vec<JobSpec>) -> Result<Vec<JobSpec>, SpecError> {
    let mut jobs = Vec::new();
    for spec in specs {
        jobs.extend(spec.expand()?);
    }
    let mut names = BTreeSet::new();
    for job in &jobs {
        job.validate()?;
        if let Some(name) = &job.name
            && !names.insert(name)
        {
            return Err(SpecError::Duplicate { name: name.clone() });
        }
    }
    Ok(jobs)
}
