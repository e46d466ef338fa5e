//! Deadlines: the experiment of the QoS framework (IJCNN 2019), of which only the abstract is known.
//!
//! **What is published.** With resources that are short, the framework's scheduling raises the
//! completion rate (jobs that end by their deadlines) by 26 %; with enough resources its autoscaling
//! raises it to 100 %; allocated CPUs are used to 100 %. The baseline is Kubernetes' default
//! scheduler, for which users configure resources by hand and usually too many.
//!
//! **The world.** One pool of 48 cores. A job is one of the models of [`crate::models::SPECON`], with
//! Amdahl's law and 92 to 100 % of its work in parallel; it can use up to 16 cores. One job in four
//! waits for its input and can use no more than 2 to 6 cores. Owners request 4, 8 or 12 cores, a guess
//! that has nothing to do with what the job can use. The deadline is drawn as in ElasticFlow's traces,
//! 0.5 to 1.5 times the job's duration on its request, but no tighter than 1.5 times what the job
//! takes with all it can use: every deadline can be met alone. Jobs do not disturb each other, so that
//! announced speeds are true.
//!
//! **The two regimes** differ in how fast jobs come. *Short*: 48 jobs whose work exceeds the pool by
//! half while they come. *Enough*: 48 jobs that use a fifth of the pool.
//!
//! **The policies.** `default`: requests are reserved and not exceeded, jobs wait until theirs is
//! free. `edf`: earliest deadline first. `elasticflow` and `qos-told`: know every job's length and speed when
//! it arrives. `elasticflow-learned` and `qos`: learn both.
//!
//! **What can be learned.** From a job's own reports: how many there will be, and how long each takes at the shares
//! that the job has had. From jobs of the same model that ended before in the same run: the same, as a daemon learns
//! from earlier runs of a program. Jobs of one model have the same length but for 1 %, and differ in how much of
//! their work is parallel and in what they can use.
//!
//! **Allocated CPU** is what is reserved for a job: its request under `default`, what its deadline was
//! promised under `elasticflow` and `qos`. `edf` reserves nothing.

use crate::curve::Curve;
use crate::engine::{Record, SimError};
use crate::models::{self, SPECON};
use crate::outcome::Outcome;
use crate::random::Stream;
use crate::study::{compare, median, quantile};
use crate::world::{Actuator, AnnouncedTotal, Law, Node, SimJob, Speedup, World};
use gainshare_core::model::{Span, Time};
use gainshare_core::policy::{Policy, Preset};
use gainshare_core::view::Deadline;
use gainshare_figures::Table;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

pub const NAME: &str = "qos";
pub const TITLE: &str = "Deadlines: completion rate with resources short and enough (QoS framework, IJCNN 2019)";

const POOL_CORES: f64 = 48.0;
const WORKER_CORES: f64 = 16.0;
const JOBS: u64 = 48;

/// Whether there is enough for all jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Regime {
    Short,
    Enough,
}

impl Regime {
    pub const ALL: [Regime; 2] = [Regime::Short, Regime::Enough];

    pub fn name(self) -> &'static str {
        match self {
            Regime::Short => "short",
            Regime::Enough => "enough",
        }
    }

    /// Work that comes, as a part of what the pool can do while jobs come.
    fn load(self) -> f64 {
        match self {
            Regime::Short => 1.5,
            Regime::Enough => 0.2,
        }
    }

    /// The world of one seed.
    pub fn world(self, seed: u64, tells_pace: bool) -> World {
        let node = Node { name: "pool".into(), cores: POOL_CORES, speed: 1.0, memory_bytes: 1 << 40, slots: None };
        let mut jobs: Vec<SimJob> = (0..JOBS).map(|i| draw(seed, i, &node, tells_pace)).collect();
        let work: f64 = jobs.iter().map(|j| j.work_core_s).sum();
        let gap_s = work / JOBS as f64 / (self.load() * POOL_CORES);
        let mut at_s = 0.0;
        for (i, job) in jobs.iter_mut().enumerate() {
            at_s += gap_s * Stream::new(seed, i as u64, "arrival").exponential();
            let at = Time::from_secs_f64(at_s);
            job.deadline = job.deadline.map(|d| Deadline { at: at + d.at.since(job.arrival), ..d });
            job.arrival = at;
        }
        World { seed, nodes: vec![node], jobs, actuator: Actuator::Weight, interference: 0.0, law: Law::default() }
    }
}

/// One job that arrives at time zero.
fn draw(seed: u64, entity: u64, node: &Node, tells_pace: bool) -> SimJob {
    let mut stream = Stream::new(seed, entity, "qos");
    let model = &SPECON[stream.below(SPECON.len())];
    let mut job = models::job(model, seed, entity, format!("{}-{}", model.name, entity + 1), 0.0);
    let waits_for_input = stream.unit() < 0.25;
    let request_cores = [4.0, 8.0, 12.0][stream.below(3)];
    let input_cores = stream.uniform(2.0, 6.0);
    job.max_cores = if waits_for_input { input_cores } else { WORKER_CORES };
    job.speedup = Speedup::Amdahl { parallel: stream.uniform(0.92, 1.0) };
    job.curve = Curve::by_first_fifth(1.0, model.end, model.first_fifth, 0.01);
    job.claim = AnnouncedTotal::Total;
    job.program = super::conditions::number_of(model.name);
    (job.request, job.tells_pace) = (Some(request_cores / POOL_CORES), tells_pace);
    let on_request_s = job.work_core_s / job.speedup.rate(request_cores.min(job.max_cores));
    let slack_s = on_request_s * stream.uniform(0.5, 1.5);
    let left_s = slack_s.max(1.5 * job.alone_s(node));
    job.deadline = Some(Deadline { at: Time::ZERO + Span::from_secs_f64(left_s), tolerance: Span::ZERO });
    job
}

/// The policies, and whether each knows lengths and speeds in advance.
pub fn policies() -> Vec<(&'static str, Policy, bool)> {
    vec![
        ("default", Policy::from(Preset::Requests), false),
        ("edf", Policy::from(Preset::Edf), false),
        ("elasticflow", Policy::from(Preset::Elasticflow), true),
        ("elasticflow-learned", Policy::from(Preset::Elasticflow), false),
        ("qos", Policy::from(Preset::Qos), false),
        ("qos-told", Policy::from(Preset::Qos), true),
    ]
}

/// One policy in one regime.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Score {
    /// Deadlines met, of all jobs of all seeds.
    pub completion_rate: f64,
    /// The middle 80 % over seeds.
    pub completion_rate_spread: [f64; 2],
    pub met: usize,
    pub jobs: usize,
    /// The part of the reserved CPU that was used; the median over seeds.
    pub utilisation: f64,
    pub mean_completion_s: f64,
}

/// Under which conditions the experiment runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Conditions {
    pub first_seed: u64,
    pub seeds: u64,
    /// Whether the end of a job tells how long the other jobs of its model are, and how fast.
    pub remembers: bool,
}

impl Conditions {
    /// The conditions of the reported result, for this many seeds.
    pub fn of(seeds: u64) -> Conditions {
        Conditions { first_seed: 0, seeds, remembers: true }
    }
}

/// The experiment, run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct QosReport {
    pub name: &'static str,
    pub title: &'static str,
    #[serde(flatten)]
    pub conditions: Conditions,
    pub published: Value,
    pub regimes: BTreeMap<&'static str, BTreeMap<&'static str, Score>>,
}

/// Runs both regimes under every policy. `tell` gets (done, total).
pub fn run(conditions: Conditions, tell: &(impl Fn(usize, usize) + Sync)) -> Result<QosReport, SimError> {
    let Conditions { first_seed, seeds, remembers } = conditions;
    let policies = policies();
    let total = Regime::ALL.len() * policies.len() * seeds as usize;
    let mut done_before = 0;
    let mut regimes = BTreeMap::new();
    for regime in Regime::ALL {
        let mut scores = BTreeMap::new();
        for (name, policy, told) in &policies {
            let world = |seed| match remembers {
                true => regime.world(seed, *told),
                false => regime.world(seed, *told).forgetful(),
            };
            let progress = |done: usize| tell(done_before + done, total);
            let range = first_seed..first_seed + seeds;
            let outcomes = compare(&world, std::slice::from_ref(policy), range, Record::default(), &progress)?;
            done_before += seeds as usize;
            scores.insert(*name, score(&outcomes[0]));
        }
        regimes.insert(regime.name(), scores);
    }
    let published = json!({
        "short": "completion rate 26 % above the default scheduler",
        "enough": "completion rate 100 %",
        "utilisation": "allocated CPUs 100 % used",
    });
    Ok(QosReport { name: NAME, title: TITLE, conditions, published, regimes })
}

fn score(outcomes: &[Outcome]) -> Score {
    let rates: Vec<f64> = outcomes.iter().filter_map(Outcome::deadlines_met).collect();
    let met: Vec<bool> = outcomes.iter().flat_map(|o| o.jobs.iter().filter_map(|j| j.met())).collect();
    let count = met.iter().filter(|m| **m).count();
    let each = |f: fn(&Outcome) -> f64| median(&outcomes.iter().map(f).collect::<Vec<_>>());
    Score {
        completion_rate: count as f64 / met.len().max(1) as f64,
        completion_rate_spread: [quantile(&rates, 0.1), quantile(&rates, 0.9)],
        met: count,
        jobs: met.len(),
        utilisation: each(Outcome::utilisation),
        mean_completion_s: each(Outcome::mean_completion_s),
    }
}

impl QosReport {
    /// For people: one table for each regime.
    pub fn tables(&self) -> Vec<(String, Table)> {
        let order = policies();
        let table = |scores: &BTreeMap<&'static str, Score>| {
            let base = scores["default"].completion_rate;
            let rows = order.iter().map(|(name, ..)| {
                let s = &scores[name];
                vec![
                    (*name).to_owned(),
                    format!("{:.1} %", s.completion_rate * 100.0),
                    format!("{:+.0} %", (s.completion_rate / base - 1.0) * 100.0),
                    format!("{:.1} %", s.utilisation * 100.0),
                    format!("{:.0} s", s.mean_completion_s),
                ]
            });
            let head = ["policy", "deadlines met", "against default", "allocated CPU used", "mean completion"];
            Table { head: head.map(String::from).to_vec(), rows: rows.collect() }
        };
        let title = |regime: &Regime| match regime {
            Regime::Short => "resources short; published: 26 % above the default scheduler",
            Regime::Enough => "resources enough; published: 100 %, allocated CPUs fully used",
        };
        Regime::ALL.iter().map(|r| (title(r).to_owned(), table(&self.regimes[r.name()]))).collect()
    }
}
