//! The papers' experiments: the published figures beside ours, under every policy.
//!
//! **Problem.** Numbers from another machine say little about a policy. Each published experiment is
//! therefore rebuilt here from what is known of it, run over many seeds under the paper's own policy, ours
//! and the field's, and printed beside the published figures.
//!
//! **Approach.** An [`Experiment`] names its world (drawn again for each seed), the paper's own policy with
//! the paper's settings, and what was published. One calibration ([`crate::models`]) serves all of them.
//!
//! **Conditions.** What a job says of its length decides what a policy can know. By default each model
//! prints what the public example script of its kind prints ([`Totals::AsPrinted`], table in
//! `docs/calibration.md`). [`Settings`] has the other conditions: totals announced or hidden, earlier runs of
//! the same programs, another law of interference, recorded curves, rough jobs, other seeds.

mod conditions;
mod flowcon;
mod flowcon2;
pub mod operator;
pub mod qos;
mod setup;
mod specon;

use crate::bounds::{Bounds, bounds};
use crate::engine::{Record, SimError, run};
use crate::outcome::Outcome;
use crate::picture::{self, Figure};
use crate::study::{compare, median, quantile};
use crate::summary::{Summary, summarise, table};
use crate::world::{Law, World};
use gainshare_core::policy::{Gain, PlaceRule, Policy, Preset};
use gainshare_figures::{BarChart, Group, Page, Table};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// Enough for stable medians; the experiments of the papers are single runs.
pub const SEEDS: u64 = 31;

/// One published experiment.
pub struct Experiment {
    pub name: &'static str,
    pub title: &'static str,
    /// The world of one seed.
    pub world: fn(u64) -> World,
    /// Policies that stand in for a preset in this experiment, with the paper's settings.
    pub own: Vec<(&'static str, Policy)>,
    pub published: Value,
    /// How jobs find their node where a policy has no opinion of its own.
    pub place: PlaceRule,
    /// Where the published figures are percentages of the baseline in several settings, one row for each.
    pub rows: Vec<Setting>,
}

/// What jobs say of how many reports they will make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Totals {
    /// All of them say it, and it is true.
    Told,
    /// None says it.
    Hidden,
    /// Each model prints what the public example script of its kind prints.
    #[default]
    AsPrinted,
}

/// Loss curves of the jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Curves {
    /// The calibrated exponentials.
    #[default]
    Analytic,
    /// Recorded from real runs ([`crate::recorded`]).
    Recorded,
}

/// The dice that place jobs in the fair world of the gain rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dice {
    /// The dice of the baseline.
    #[default]
    Shared,
    /// Other dice, as where another scheduler breaks the ties.
    Own,
}

/// Under which conditions an experiment runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Settings {
    pub first_seed: u64,
    pub seeds: u64,
    pub totals: Totals,
    /// How many runs of each program ended before.
    pub history: u32,
    /// Whether the end of a job tells how long the other jobs of its program are.
    pub remembers: bool,
    pub law: Law,
    pub curves: Curves,
    pub dice: Dice,
    /// Start-up work, steps that cost unlike, evaluations, early ends, wrong and changed totals.
    pub rough: bool,
    /// Numbers of the gain rule in place of its own.
    pub gain: Option<Gain>,
    /// Only these policies; all if empty. The baseline runs in any case.
    #[serde(skip)]
    pub only: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            first_seed: 0,
            seeds: SEEDS,
            totals: Totals::AsPrinted,
            history: 0,
            remembers: true,
            law: Law::Turns,
            curves: Curves::Analytic,
            dice: Dice::Shared,
            rough: false,
            gain: None,
            only: vec![],
        }
    }
}

/// One setting of a paper's policy and the reduction published for it, in percent.
pub struct Setting {
    pub alpha: f64,
    pub interval_s: u64,
    pub policy: Policy,
    pub published: Option<f64>,
    pub measure: Measure,
}

/// What a row's percentage is a reduction of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Measure {
    /// The completion time of one job.
    Job(usize),
    /// The mean completion time of all jobs.
    Mean,
}

/// One line of a table like the thesis's 6.2.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RowResult {
    pub alpha: f64,
    pub interval_s: u64,
    pub published: Option<f64>,
    pub simulated: f64,
    /// The middle 80 % over seeds.
    pub spread: [f64; 2],
}

/// An experiment, run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExperimentResult {
    pub name: String,
    pub title: String,
    #[serde(flatten)]
    pub settings: Settings,
    pub published: Value,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<RowResult>,
    pub policies: BTreeMap<String, Summary>,
    /// What no policy that leaves jobs where the baseline places them can beat; medians.
    pub bounds: Bounds,
    /// The policies in the order of the tables.
    #[serde(skip)]
    pub order: Vec<String>,
}

/// All experiments, in the order of the papers.
pub fn experiments() -> Vec<Experiment> {
    let papers = [flowcon::experiments(), specon::experiments(), flowcon2::experiments()];
    papers.into_iter().flatten().collect()
}

/// The experiment of that name.
pub fn find(name: &str) -> Result<Experiment, String> {
    let all = experiments();
    let deadlines = crate::deadline::report::EXPERIMENTS.iter().map(|(name, _)| *name);
    let known = all.iter().map(|e| e.name).chain(deadlines).collect::<Vec<_>>().join(", ");
    all.into_iter().find(|e| e.name == name).ok_or(format!("no experiment is called `{name}`; known are: {known}"))
}

impl Experiment {
    /// Every preset, the paper's own settings in place of a preset's.
    pub fn policies(&self) -> Vec<(String, Policy)> {
        let own = |name: &str| self.own.iter().find(|(n, _)| *n == name).map(|(_, p)| p.clone());
        let policy = |preset: &Preset| {
            let mut policy = own(preset.name()).unwrap_or_else(|| Policy::from(*preset));
            // What the default scheduler decides in the testbed is decided so for every policy that leaves it alone.
            if policy.place == Policy::equal().place {
                policy.place = self.place;
            }
            (preset.name().to_owned(), policy)
        };
        // The jobs of these experiments have no deadlines.
        Preset::ALL.iter().filter(|p| !p.needs_deadlines()).map(policy).collect()
    }

    /// The world of one seed under these conditions.
    pub fn drawn(&self, seed: u64, settings: &Settings) -> World {
        let mut world = (self.world)(seed);
        world.law = settings.law;
        conditions::apply(&mut world, settings);
        world
    }

    /// Runs it under every policy. `tell` hears (done, total).
    pub fn run(
        &self,
        settings: &Settings,
        tell: &(impl Fn(usize, usize) + Sync),
    ) -> Result<ExperimentResult, SimError> {
        let world = |seed| self.drawn(seed, settings);
        let mut named = self.policies();
        let chosen = |name: &str| settings.only.is_empty() || settings.only.iter().any(|o| o == name);
        let base = named.remove(0);
        named.retain(|(name, _)| chosen(name));
        named.insert(0, base);
        if let Some(numbers) = settings.gain {
            named.iter_mut().for_each(|(_, policy)| conditions::replace_gain(policy, numbers));
        }
        if settings.dice == Dice::Own {
            named.iter_mut().for_each(|(_, policy)| conditions::own_dice(policy));
        }
        let mut policies: Vec<Policy> = named.iter().map(|(_, p)| p.clone()).collect();
        policies.extend(self.rows.iter().map(|r| r.policy.clone()));
        let total = policies.len() * settings.seeds as usize;
        let seeds = settings.first_seed..settings.first_seed + settings.seeds;
        let outcomes = compare(&world, &policies, seeds, Record::default(), &|done| tell(done, total))?;
        let order: Vec<String> = named.into_iter().map(|(n, _)| n).collect();
        let rows = self.rows.iter().zip(&outcomes[order.len()..]);
        let rows = rows.map(|(setting, of)| setting.result(of, &outcomes[0])).collect();
        Ok(ExperimentResult {
            name: self.name.to_owned(),
            title: self.title.to_owned(),
            settings: settings.clone(),
            published: self.published.clone(),
            rows,
            policies: summarise(&order, &outcomes[..order.len()]),
            bounds: median_bounds(&world, settings.first_seed, &outcomes[0]),
            order,
        })
    }
}

/// The median of each bound over seeds.
pub(crate) fn median_bounds(world: &impl Fn(u64) -> World, first_seed: u64, base: &[Outcome]) -> Bounds {
    let all: Vec<Bounds> = (first_seed..).zip(base).map(|(seed, o)| bounds(&world(seed), o)).collect();
    let of = |f: fn(&Bounds) -> f64| median(&all.iter().map(f).collect::<Vec<_>>());
    Bounds {
        mean_completion_s: of(|b| b.mean_completion_s),
        makespan_s: of(|b| b.makespan_s),
        mean_to_90_percent_s: of(|b| b.mean_to_90_percent_s),
    }
}

/// The policies a figure shows: more would hide what matters.
const SHOWN: [&str; 4] = ["na", "flowcon", "gainshare", "srpt"];

impl Experiment {
    /// Figures of one run (the first seed), the one that stands for the experiment first.
    pub fn figures(&self, report: &ExperimentResult) -> Result<Vec<Figure>, SimError> {
        let world = self.drawn(report.settings.first_seed, &report.settings);
        let shown = self
            .policies()
            .into_iter()
            .filter(|(n, _)| SHOWN.contains(&n.as_str()) || self.own.iter().any(|(own, _)| own == n));
        let runs: Vec<(String, Outcome)> = shown
            .map(|(name, policy)| run(&world, &policy, Record { courses: true }).map(|o| (name, o)))
            .collect::<Result<_, _>>()?;
        let mut figures = vec![];
        if !report.rows.is_empty() {
            figures.push(rows_figure(report));
        }
        if world.nodes.len() == 1 {
            let named: Vec<(&str, &Outcome)> = runs.iter().map(|(n, o)| (n.as_str(), o)).collect();
            figures.push(picture::completions(self.title, &named));
            figures.extend(runs.iter().map(|(n, o)| picture::shares(&format!("CPU usage, {n}"), &world, o, 0)));
            figures.extend(runs.iter().map(|(n, o)| picture::losses(&format!("Losses, {n}"), &world, o)));
        } else {
            // The paper's own policy first: its Gantt is what the paper shows.
            let own = |name: &str| self.own.iter().any(|(n, _)| *n == name);
            let (first, others): (Vec<_>, Vec<_>) = runs.iter().partition(|(n, _)| own(n));
            let gantt = |(n, o): &&(String, Outcome)| picture::gantt(&format!("{}: {n}", self.title), &world, o);
            figures.extend(first.iter().map(gantt));
            let named: Vec<(&str, &Outcome)> = runs.iter().map(|(n, o)| (n.as_str(), o)).collect();
            figures.push(picture::completions(self.title, &named));
            figures.extend(others.iter().map(gantt));
        }
        Ok(figures)
    }

    /// Everything about the experiment on one page.
    pub fn page(&self, report: &ExperimentResult) -> Result<String, SimError> {
        let mut page = Page::new(self.title);
        for (title, table) in report.tables() {
            page = page.heading(&title).table(&table);
        }
        page = page.heading("Figures");
        for figure in self.figures(report)? {
            page = page.figure(&figure.svg).text(&figure.caption);
        }
        Ok(page.html())
    }
}

fn rows_figure(report: &ExperimentResult) -> Figure {
    let group = |r: &RowResult| Group {
        label: format!("{} %, {} s", r.alpha * 100.0, r.interval_s),
        values: vec![r.published.unwrap_or(f64::NAN), r.simulated],
    };
    let chart = BarChart {
        title: report.title.clone(),
        y_label: "reduction against na, %".into(),
        names: vec!["published".into(), "simulated (median)".into()],
        groups: report.rows.iter().map(group).collect(),
    };
    Figure { caption: "Published and simulated reductions, by α and interval.".into(), svg: chart.svg() }
}

impl Setting {
    fn result(&self, of: &[Outcome], base: &[Outcome]) -> RowResult {
        let value = |o: &Outcome| match self.measure {
            Measure::Job(j) => o.jobs[j].completion_s(),
            Measure::Mean => o.mean_completion_s(),
        };
        let reductions: Vec<f64> = of.iter().zip(base).map(|(o, b)| 100.0 * (1.0 - value(o) / value(b))).collect();
        RowResult {
            alpha: self.alpha,
            interval_s: self.interval_s,
            published: self.published,
            simulated: median(&reductions),
            spread: [quantile(&reductions, 0.1), quantile(&reductions, 0.9)],
        }
    }
}

impl ExperimentResult {
    /// For people: what was published, the rows if there are any, and all policies.
    pub fn tables(&self) -> Vec<(String, Table)> {
        let mut out = vec![];
        if let Value::Object(published) = &self.published {
            let rows = published.iter().map(|(k, v)| vec![k.clone(), plain(v)]).collect();
            out.push(("published".to_owned(), Table { head: vec!["figure".into(), "value".into()], rows }));
        }
        if !self.rows.is_empty() {
            let head = ["α", "interval", "published", "simulated", "80 % of seeds"].map(String::from).to_vec();
            let row = |r: &RowResult| {
                vec![
                    format!("{} %", r.alpha * 100.0),
                    format!("{} s", r.interval_s),
                    r.published.map_or("–".into(), |p| format!("{p:.1} %")),
                    format!("{:.1} %", r.simulated),
                    format!("{:.0}–{:.0}", r.spread[0], r.spread[1]),
                ]
            };
            out.push(("reduction against na".to_owned(), Table { head, rows: self.rows.iter().map(row).collect() }));
        }
        let said = match self.settings.totals {
            Totals::Told => "all jobs say how many reports they will make",
            Totals::Hidden => "no job says how many reports it will make",
            Totals::AsPrinted => "jobs say of their length what public example scripts print",
        };
        let heading = format!("simulated, median of {} seeds; {said}", self.settings.seeds);
        out.push((heading, table(&self.order, &self.policies)));
        out.push(("SRPT, jobs placed as the baseline places them".to_owned(), self.bounds.table()));
        out
    }
}

fn plain(v: &Value) -> String {
    match v {
        Value::String(s) => s.clone(),
        other => other.to_string(),
    }
}
