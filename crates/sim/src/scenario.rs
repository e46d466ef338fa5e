//! Scenario files: a world that people can read and write.
//!
//! A scenario is TOML: nodes, kinds of jobs, and when jobs of each kind come. Numbers may be fixed or drawn
//! from a range; every seed draws again. Unknown fields are refused. A mistake is reported with its line,
//! its field and a remedy.
//!
//! ```toml
//! title = "two kinds of jobs on one machine"
//!
//! [[node]]
//! name = "box"
//! cores = 8
//!
//! [[job]]
//! name = "vae"
//! seconds_alone = 260            # on a whole node of the first kind
//! loss = { start = 1.0, end = 0.2, shape = { family = "exponential", rate = 5.2 } }
//!
//! [[job]]
//! name = "mnist"
//! count = 3
//! arrives_s = { from = 20, to = 120 }
//! seconds_alone = { from = 30, to = 100 }
//! loss = { start = 2.3, end = 0.1, shape = { family = "exponential", rate = 11.5 }, noise = 0.01 }
//! ```

use crate::curve::Curve;
use crate::random::Stream;
use crate::world::{Actuator, AnnouncedTotal, Law, Node, Roughness, SimJob, Speedup, World};
use gainshare_core::model::{Span, Time};
use gainshare_core::view::Deadline;
use serde::Deserialize;
use std::ops::Range;

/// What is wrong with a scenario file.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ScenarioError {
    /// The text is not TOML, a field is unknown, missing or of the wrong kind.
    #[error("{file}, line {line}{}: {what}; {remedy}", field.as_ref().map_or(String::new(), |f| format!(", {f}")))]
    Syntax { file: String, line: usize, field: Option<String>, what: String, remedy: &'static str },
    /// A number makes no sense.
    #[error("{file}, line {line}, {field}: {what}; {remedy}")]
    Value { file: String, line: usize, field: String, what: String, remedy: &'static str },
}

/// How the message about something that is no [`Number`] begins.
const NUMBER: &str = "a number, or a range";

/// A number that is fixed, or drawn from a range for each job and seed.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(untagged, expecting = "a number, or a range like { from = 10, to = 20 }")] // as NUMBER begins
pub enum Number {
    Fixed(f64),
    Range(Bounds),
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    from: f64,
    to: f64,
}

impl Number {
    fn draw(self, stream: &mut Stream) -> f64 {
        match self {
            Number::Fixed(x) => x,
            Number::Range(Bounds { from, to }) => stream.uniform(from, to),
        }
    }

    fn ends(self) -> [f64; 2] {
        match self {
            Number::Fixed(x) => [x, x],
            Number::Range(Bounds { from, to }) => [from, to],
        }
    }
}

/// A scenario, checked.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    #[serde(default)]
    pub title: String,
    #[serde(default)]
    actuator: Actuator,
    /// γ of the world: by how much neighbours disturb each other.
    #[serde(default)]
    interference: f64,
    /// How neighbours disturb each other.
    #[serde(default)]
    law: Law,
    #[serde(rename = "node")]
    nodes: Vec<toml::Spanned<NodeSpec>>,
    #[serde(rename = "job")]
    jobs: Vec<toml::Spanned<JobSpec>>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeSpec {
    name: String,
    #[serde(default = "one")]
    count: u32,
    cores: f64,
    #[serde(default = "one_f")]
    speed: f64,
    #[serde(default = "memory")]
    memory_gib: f64,
    slots: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct JobSpec {
    name: String,
    #[serde(default = "one")]
    count: u32,
    #[serde(default = "zero")]
    arrives_s: Number,
    /// Jobs of this kind after the first come this much later, each after the one before.
    every_s: Option<Number>,
    /// Alone on a whole node of the first kind.
    seconds_alone: Number,
    /// The most cores it can use; all, unless given.
    max_cores: Option<f64>,
    #[serde(default)]
    speedup: Speedup,
    #[serde(default = "small_memory")]
    memory_gib: f64,
    loss: Curve,
    /// How many reports it makes from start to end.
    #[serde(default = "hundred")]
    reports: Number,
    #[serde(default)]
    tells_total: bool,
    /// What its reports say of its length, where that is more than `tells_total` can express.
    claim: Option<AnnouncedTotal>,
    /// Start-up work, as a part of all work.
    #[serde(default)]
    startup: f64,
    /// The deviation of the logarithm of what a step costs.
    #[serde(default)]
    step_spread: f64,
    /// The job ends when this part of its reports is made: early stopping, or a crash.
    stops_at: Option<Number>,
    #[serde(default = "zero")]
    start_s: Number,
    #[serde(default = "two")]
    save_s: Number,
    #[serde(default = "two")]
    restore_s: Number,
    #[serde(default)]
    owner: u32,
    #[serde(default)]
    priority: i32,
    #[serde(default)]
    floor: f64,
    /// Seconds from arrival to its deadline.
    deadline_s: Option<Number>,
    /// Seconds that the deadline may be exceeded.
    #[serde(default)]
    tolerance_s: f64,
    /// Cores that its owner requests and may not exceed under the policy `requests`.
    request_cores: Option<f64>,
}

fn one() -> u32 {
    1
}
fn one_f() -> f64 {
    1.0
}
fn memory() -> f64 {
    64.0
}
fn small_memory() -> f64 {
    1.0
}
fn zero() -> Number {
    Number::Fixed(0.0)
}
fn two() -> Number {
    Number::Fixed(2.0)
}
fn hundred() -> Number {
    Number::Fixed(100.0)
}

/// More than anybody means: a typing error, not a study.
const MOST_JOBS: u32 = 100_000;
const MOST_NODES: u32 = 100_000;
const MOST_REPORTS: f64 = 1e6;
const MOST_SECONDS: f64 = 1e8;

impl Scenario {
    /// Reads and checks a scenario; `file` is what messages call it.
    pub fn parse(file: &str, text: &str) -> Result<Scenario, ScenarioError> {
        let scenario: Scenario = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |s| line(text, &s));
            let field = text.lines().nth(line - 1).and_then(key).map(str::to_owned);
            let (what, remedy) = explain(e.message());
            ScenarioError::Syntax { file: file.to_owned(), line, field, what, remedy }
        })?;
        scenario.check(file, text)?;
        Ok(scenario)
    }

    /// As [`Scenario::parse`], of bytes that may not even be text.
    pub fn parse_bytes(file: &str, bytes: &[u8]) -> Result<Scenario, ScenarioError> {
        let text = std::str::from_utf8(bytes).map_err(|e| ScenarioError::Syntax {
            file: file.to_owned(),
            line: bytes[..e.valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1,
            field: None,
            what: "this is not text".into(),
            remedy: "a scenario is a TOML file in UTF-8",
        })?;
        Scenario::parse(file, text)
    }

    fn check(&self, file: &str, text: &str) -> Result<(), ScenarioError> {
        let wrong = |span: Range<usize>, field: String, what: String, remedy| {
            let line = field_line(text, &span, &field);
            Err(ScenarioError::Value { file: file.to_owned(), line, field, what, remedy })
        };
        if self.nodes.is_empty() {
            return wrong(0..0, "node".into(), "there is none".into(), "add a [[node]] with a name and cores");
        }
        if self.jobs.is_empty() {
            return wrong(
                0..0,
                "job".into(),
                "there is none".into(),
                "add a [[job]] with a name, seconds_alone and a loss",
            );
        }
        if !(0.0..=10.0).contains(&self.interference) {
            let remedy = "give a number from 0 (none) to 10; 0.15 fits the thesis's machine";
            return wrong(0..0, "interference".into(), format!("{} is out of range", self.interference), remedy);
        }
        for node in &self.nodes {
            let n = node.get_ref();
            let numbers = [("cores", n.cores), ("speed", n.speed), ("memory_gib", n.memory_gib)];
            if let Some((field, value)) = numbers.into_iter().find(|(_, v)| !(*v > 0.0 && v.is_finite())) {
                let field = format!("{field} of node `{}`", n.name);
                return wrong(node.span(), field, format!("{value} is not more than zero"), "give a positive number");
            }
            if n.count == 0 || n.slots == Some(0) {
                let field = format!("{} of node `{}`", if n.count == 0 { "count" } else { "slots" }, n.name);
                return wrong(
                    node.span(),
                    field,
                    "nothing could ever run there".into(),
                    "give 1 or more, or leave it out",
                );
            }
        }
        for job in &self.jobs {
            if let Some((field, what, remedy)) = job.get_ref().complaint() {
                return wrong(job.span(), format!("{field} of job `{}`", job.get_ref().name), what, remedy);
            }
        }
        let jobs: u64 = self.jobs.iter().map(|j| u64::from(j.get_ref().count)).sum();
        if jobs > u64::from(MOST_JOBS) {
            let remedy = "lower the counts; for traces use `gainshare trace replay`";
            return wrong(0..0, "count".into(), format!("{jobs} jobs are too many for shares"), remedy);
        }
        let nodes: u64 = self.nodes.iter().map(|n| u64::from(n.get_ref().count)).sum();
        if nodes > u64::from(MOST_NODES) {
            let what = format!("{nodes} nodes are more than {MOST_NODES}");
            return wrong(0..0, "count".into(), what, "lower the counts");
        }
        Ok(())
    }

    /// The world of one seed.
    pub fn world(&self, seed: u64) -> World {
        let nodes: Vec<Node> = self.nodes.iter().flat_map(|n| n.get_ref().nodes()).collect();
        let mut jobs = vec![];
        for (kind, spec) in self.jobs.iter().enumerate() {
            spec.get_ref().draw(seed, kind as u64, &nodes[0], &mut jobs);
        }
        jobs.sort_by_key(|j: &SimJob| j.arrival);
        World { seed, nodes, jobs, actuator: self.actuator, interference: self.interference, law: self.law }
    }
}

impl NodeSpec {
    fn nodes(&self) -> impl Iterator<Item = Node> {
        (1..=self.count).map(|i| Node {
            name: if self.count == 1 { self.name.clone() } else { format!("{}-{i}", self.name) },
            cores: self.cores,
            speed: self.speed,
            memory_bytes: gib(self.memory_gib),
            slots: self.slots,
        })
    }
}

fn gib(gib: f64) -> u64 {
    (gib * (1u64 << 30) as f64) as u64
}

/// A field, what is wrong with it, and what to do.
type Complaint = (&'static str, String, &'static str);

impl JobSpec {
    /// The first thing that makes no sense.
    fn complaint(&self) -> Option<Complaint> {
        self.too_small().or_else(|| self.too_large()).or_else(|| self.bad_loss()).or_else(|| self.bad_run())
    }

    fn too_small(&self) -> Option<Complaint> {
        let fixed = Number::Fixed;
        let (seconds, cores) = ("give seconds, 0 or more", "give a positive number of cores");
        let apart = "give seconds between arrivals, 0 or more";
        let due = "give the seconds from arrival to the deadline, more than 0";
        let noise = "give a deviation of 0 or more, as a part of start − end";
        // Field, number, the least that it may be, and what to do.
        let numbers = [
            ("arrives_s", self.arrives_s, 0.0, "give seconds from the start, 0 or more"),
            ("every_s", self.every_s.unwrap_or(fixed(0.0)), 0.0, apart),
            ("seconds_alone", self.seconds_alone, 1e-3, "give the seconds the job takes alone on a node"),
            ("reports", self.reports, 1.0, "give how many reports it makes in all, 1 or more"),
            ("deadline_s", self.deadline_s.unwrap_or(fixed(1.0)), 1e-3, due),
            ("tolerance_s", fixed(self.tolerance_s), 0.0, seconds),
            ("request_cores", fixed(self.request_cores.unwrap_or(1.0)), 1e-3, cores),
            ("start_s", self.start_s, 0.0, seconds),
            ("save_s", self.save_s, 0.0, seconds),
            ("restore_s", self.restore_s, 0.0, seconds),
            ("max_cores", fixed(self.max_cores.unwrap_or(1.0)), 1e-3, cores),
            ("memory_gib", fixed(self.memory_gib), 0.0, "give GiB, 0 or more"),
            ("loss.noise", fixed(self.loss.noise), 0.0, noise),
        ];
        numbers.into_iter().find_map(|(field, number, least, remedy)| {
            let [from, to] = number.ends();
            if from.is_finite() && to.is_finite() && from >= least && to >= from {
                return None;
            }
            let what = match number {
                Number::Fixed(x) => format!("{x} is not a number of at least {least}"),
                Number::Range(_) => format!("{from} to {to} does not lie at or above {least}, lowest first"),
            };
            Some((field, what, remedy))
        })
    }

    fn too_large(&self) -> Option<Complaint> {
        let numbers = [
            ("arrives_s", self.arrives_s, MOST_SECONDS),
            ("every_s", self.every_s.unwrap_or(Number::Fixed(0.0)), MOST_SECONDS),
            ("seconds_alone", self.seconds_alone, MOST_SECONDS),
            ("start_s", self.start_s, MOST_SECONDS),
            ("save_s", self.save_s, MOST_SECONDS),
            ("restore_s", self.restore_s, MOST_SECONDS),
            ("reports", self.reports, MOST_REPORTS),
        ];
        let (field, number, most) = numbers.into_iter().find(|(_, number, most)| number.ends()[1] > *most)?;
        Some((field, format!("{} is more than {most}", number.ends()[1]), "give a smaller number"))
    }

    fn bad_loss(&self) -> Option<Complaint> {
        let curve = &self.loss;
        if !(curve.start.is_finite() && curve.end.is_finite()) || curve.start == curve.end {
            let what = format!("a loss from {} to {} says nothing", curve.start, curve.end);
            return Some(("loss", what, "give two different finite numbers"));
        }
        if !curve.shape.is_sound() {
            return Some(("loss.shape", "a rate or power is not more than zero".into(), "give positive numbers"));
        }
        if curve.drops.iter().any(|d| !(0.0..=1.0).contains(&d.at) || !(0.0..=1.0).contains(&d.gains)) {
            return Some(("loss.drops", "at and gains are parts".into(), "give numbers from 0 to 1"));
        }
        None
    }

    /// How the job uses a node and how many of its kind come.
    fn bad_run(&self) -> Option<Complaint> {
        if !self.speedup.is_sound() {
            let remedy = "parallel lies from 0 to 1; table points rise in both cores and rate, from above zero";
            return Some(("speedup", "the law cannot hold".into(), remedy));
        }
        if !(0.0..=0.9).contains(&self.startup) || !(0.0..=3.0).contains(&self.step_spread) {
            let what = "startup is a part of the work up to 0.9, step_spread a deviation up to 3".into();
            return Some(("startup", what, "give numbers within these ranges"));
        }
        if self.stops_at.is_some_and(|n| !n.ends().iter().all(|x| (0.0..=1.0).contains(x))) {
            return Some(("stops_at", "it is a part of the reports".into(), "give numbers from 0 to 1"));
        }
        if !(0.0..=1.0).contains(&self.floor) {
            return Some(("floor", format!("{} is not a part of a node", self.floor), "give a number from 0 to 1"));
        }
        (self.count == 0)
            .then(|| ("count", "no job of this kind would come".into(), "give 1 or more, or remove the kind"))
    }

    fn draw(&self, seed: u64, kind: u64, reference: &Node, out: &mut Vec<SimJob>) {
        let max_cores = self.max_cores.unwrap_or(f64::INFINITY);
        let mut after_s = 0.0;
        for i in 0..self.count {
            let entity = (kind << 32) | u64::from(i);
            let stream = |purpose| Stream::new(seed, entity, purpose);
            let arrives_s = match self.every_s {
                Some(every) if i > 0 => {
                    after_s += every.draw(&mut stream("gap"));
                    after_s
                }
                _ => {
                    let at = self.arrives_s.draw(&mut stream("arrival"));
                    after_s = at;
                    at
                }
            };
            let rate = reference.speed * self.speedup.rate(reference.cores.min(max_cores));
            let work = self.seconds_alone.draw(&mut stream("work")) * rate;
            let arrival = Time::from_secs_f64(arrives_s);
            let deadline = self.deadline_s.map(|number| Deadline {
                at: arrival + Span::from_secs_f64(number.draw(&mut stream("deadline"))),
                tolerance: Span::from_secs_f64(self.tolerance_s),
            });
            let seconds = |number: Number, purpose| Span::from_secs_f64(number.draw(&mut stream(purpose)));
            let mut job = SimJob {
                name: if self.count == 1 { self.name.clone() } else { format!("{}-{}", self.name, i + 1) },
                model: self.name.clone(),
                arrival,
                work_core_s: work,
                speedup: self.speedup.clone(),
                max_cores,
                memory_bytes: gib(self.memory_gib),
                curve: self.loss.clone(),
                startup_core_s: 0.0,
                report_every_core_s: work / self.reports.draw(&mut stream("reports")).max(1.0),
                report_positions: vec![],
                planned_reports: None,
                claim: self.claim.unwrap_or(if self.tells_total {
                    AnnouncedTotal::Total
                } else {
                    AnnouncedTotal::Nothing
                }),
                history: vec![],
                program: None,
                start: seconds(self.start_s, "start"),
                save: seconds(self.save_s, "save"),
                restore: seconds(self.restore_s, "restore"),
                owner: self.owner,
                priority: self.priority,
                floor: self.floor,
                deadline,
                request: self.request_cores.map(|cores| (cores / reference.cores).min(1.0)),
                tells_pace: false,
                shows_pace: false,
            };
            if self.startup > 0.0 || self.step_spread > 0.0 || self.stops_at.is_some() {
                let stops_at = self.stops_at.map(|n| n.draw(&mut stream("stop")));
                let (startup, step_spread) = (self.startup, self.step_spread);
                let rough = Roughness { startup, step_spread, evaluation: (0, 0.0), stops_at };
                job.roughen(&rough, &mut stream("steps"));
            }
            out.push(job);
        }
    }
}

/// What the TOML reader says, in our words where its own need them, and what to do about it.
fn explain(message: &str) -> (String, &'static str) {
    let starts = |with: &str| message.starts_with(with);
    let remedy = match () {
        () if starts("unknown field") => "correct the name or remove the line",
        () if starts("missing field") => "add a line for it here",
        () if starts("unknown variant") => "choose one of these",
        () if starts("duplicate key") => "remove one of the two",
        () if starts("invalid") || starts(NUMBER) => "correct the value",
        () => {
            "correct the line: texts stand in quotes, [[node]] and [[job]] in two brackets, each field on a line of its own"
        }
    };
    let what = if starts(NUMBER) { format!("this must be {message}") } else { message.to_owned() };
    (what, remedy)
}

/// The name before the equals sign of a line.
fn key(line: &str) -> Option<&str> {
    let (name, _) = line.split_once('=')?;
    let name = name.trim().trim_matches('"');
    let sound = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '-' | '.'));
    sound.then_some(name)
}

/// The line of `field` (of which only the first name counts: `loss.shape of job x` is `loss`) in the table
/// that begins at `span`; that of the table if it cannot be found.
fn field_line(text: &str, span: &Range<usize>, field: &str) -> usize {
    let first = line(text, span);
    let name = field.split([' ', '.']).next().unwrap_or(field);
    let table = |l: &str| l.trim_start().starts_with('[');
    // The head of the file is a table without a header.
    let own = usize::from(text.lines().nth(first - 1).is_some_and(table));
    let body = text.lines().enumerate().skip(first - 1 + own).take_while(|(_, l)| !table(l));
    body.into_iter().find(|(_, l)| key(l) == Some(name)).map_or(first, |(i, _)| i + 1)
}

/// The line of a place in the text, from 1.
fn line(text: &str, span: &Range<usize>) -> usize {
    text[..span.start.min(text.len())].bytes().filter(|b| *b == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
title = "t"
[[node]]
name = "box"
count = 2
cores = 8
[[job]]
name = "vae"
seconds_alone = 260
loss = { start = 1.0, end = 0.2, shape = { family = "exponential", rate = 5.2 } }
[[job]]
name = "mnist"
count = 3
arrives_s = { from = 20, to = 120 }
every_s = 10
seconds_alone = { from = 30, to = 100 }
max_cores = 4
loss = { start = 2.3, end = 0.1, shape = { family = "power-law", rate = 11.5, power = 1.0 }, noise = 0.01 }
"#;

    #[test]
    fn a_scenario_becomes_a_world_and_every_seed_another_one() {
        let scenario = Scenario::parse("good.toml", GOOD).unwrap();
        let world = scenario.world(1);
        assert_eq!((world.nodes.len(), world.jobs.len()), (2, 4));
        assert!((world.jobs[0].alone_s(&world.nodes[0]) - 260.0).abs() < 1e-9);
        let mnist: Vec<_> = world.jobs.iter().filter(|j| j.model == "mnist").collect();
        assert!(mnist.iter().all(|j| (30.0..100.0).contains(&j.alone_s(&world.nodes[0]))));
        assert_eq!(mnist[1].arrival.since(mnist[0].arrival), Span::from_secs(10));
        assert_eq!(scenario.world(1), world);
        assert_ne!(scenario.world(2), world);
    }

    #[test]
    fn mistakes_are_reported_with_line_field_and_remedy() {
        let cases: [(&str, &str, &str, &[&str]); 17] = [
            ("cores = 8", "cores = 0", "line 6", &["cores of node `box`", "positive"]),
            ("cores = 8", "corse = 8", "line 6", &["corse", "cores"]),
            ("seconds_alone = 260", "seconds_alone = -1", "line 9", &["seconds_alone of job `vae`", "alone on a node"]),
            (
                "seconds_alone = 260",
                "seconds_alone = \"long\"",
                "line 9",
                &["seconds_alone", "a number, or a range", "correct the value"],
            ),
            ("seconds_alone = 260", "", "line 7", &["seconds_alone", "add a line"]),
            ("from = 20, to = 120", "from = 120, to = 20", "line 14", &["arrives_s of job `mnist`", "lowest first"]),
            ("end = 0.2", "end = 1.0", "line 10", &["loss of job `vae`", "different"]),
            ("rate = 5.2", "rate = -5.2", "line 10", &["loss.shape", "positive"]),
            ("family = \"exponential\"", "family = \"magic\"", "line 10", &["magic", "exponential"]),
            ("count = 3", "count = 0", "line 13", &["count of job `mnist`"]),
            ("count = 3", "count = 99999999999", "line 13", &["count", "correct the value"]),
            ("count = 2", "cores = 2", "line 6", &["cores", "duplicate", "remove"]),
            ("title = \"t\"", "interference = -1", "line 2", &["interference", "from 0"]),
            ("title = \"t\"", "title = ", "line 2", &["title", "correct the line"]),
            ("seconds_alone = 260", "seconds_alone = 1e300", "line 9", &["seconds_alone of job `vae`", "smaller"]),
            ("count = 2", "count = 1000000000", "line 1", &["count", "nodes"]),
            ("max_cores = 4", "max_cores = nan", "line 17", &["max_cores of job `mnist`"]),
        ];
        for (old, new, at, words) in cases {
            assert!(GOOD.contains(old), "{old}");
            let error = Scenario::parse("bad.toml", &GOOD.replacen(old, new, 1)).unwrap_err().to_string();
            assert!(error.starts_with("bad.toml, ") && error.contains(at), "{new}: {error}");
            assert!(words.iter().all(|w| error.contains(w)), "{new}: {error}");
        }
        let error = Scenario::parse_bytes("bad.toml", b"title = 'a'\n\xff\xfe").unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("not text"), "{error}");
        for (text, word) in [("", "node"), ("[[node]]\nname = \"a\"\ncores = 1\n", "job")] {
            assert!(Scenario::parse("x", text).unwrap_err().to_string().contains(word));
        }
    }

    #[test]
    fn the_example_in_the_module_text_is_sound() {
        let text: String = include_str!("scenario.rs")
            .lines()
            .skip_while(|l| *l != "//! ```toml")
            .skip(1)
            .take_while(|l| *l != "//! ```")
            .map(|l| l.trim_start_matches("//!").trim_start_matches(' ').to_owned() + "\n")
            .collect();
        assert_eq!(Scenario::parse("example", &text).unwrap().world(0).jobs.len(), 4);
    }
}
