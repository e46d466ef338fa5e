//! One scenario under several policies: what `gainshare sim` does.

use crate::bounds::Bounds;
use crate::engine::{Record, SimError, run};
use crate::outcome::Outcome;
use crate::paper::median_bounds;
use crate::picture::{self, Figure};
use crate::scenario::Scenario;
use crate::study::compare;
use crate::summary::{Summary, summarise, table};
use gainshare_core::policy::Policy;
use gainshare_figures::{Page, Table};
use serde::Serialize;
use std::collections::BTreeMap;

/// A scenario, run. The first policy is the baseline of `faster_share` and its kin.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Simulation {
    pub title: String,
    pub seeds: u64,
    pub baseline: String,
    pub policies: BTreeMap<String, Summary>,
    pub bounds: Bounds,
    #[serde(skip)]
    pub order: Vec<String>,
}

/// Runs `scenario` under each policy for seeds 0…`seeds`. `tell` hears (done, total).
pub fn simulate(
    scenario: &Scenario,
    policies: &[(String, Policy)],
    seeds: u64,
    tell: &(impl Fn(usize, usize) + Sync),
) -> Result<Simulation, SimError> {
    let world = |seed| scenario.world(seed);
    let total = policies.len() * seeds as usize;
    let plain: Vec<Policy> = policies.iter().map(|(_, p)| p.clone()).collect();
    let outcomes = compare(&world, &plain, 0..seeds, Record::default(), &|done| tell(done, total))?;
    let order: Vec<String> = policies.iter().map(|(n, _)| n.clone()).collect();
    Ok(Simulation {
        title: scenario.title.clone(),
        seeds,
        baseline: order.first().cloned().unwrap_or_default(),
        policies: summarise(&order, &outcomes),
        bounds: median_bounds(&world, 0, &outcomes[0]),
        order,
    })
}

impl Simulation {
    pub fn tables(&self) -> Vec<(String, Table)> {
        let seeds = if self.seeds == 1 { "one seed".to_owned() } else { format!("median of {} seeds", self.seeds) };
        vec![
            (format!("{seeds}; faster, worst and best against {}", self.baseline), table(&self.order, &self.policies)),
            ("SRPT, jobs placed as the baseline places them".to_owned(), self.bounds.table()),
        ]
    }
}

/// More jobs than this make a figure unreadable.
const MOST_DRAWN: usize = 60;

/// Figures of one run (seed 0) under each policy.
pub fn figures(scenario: &Scenario, policies: &[(String, Policy)]) -> Result<Vec<Figure>, SimError> {
    let world = scenario.world(0);
    let runs: Vec<(String, Outcome)> = policies
        .iter()
        .map(|(name, policy)| run(&world, policy, Record { courses: true }).map(|o| (name.clone(), o)))
        .collect::<Result<_, _>>()?;
    let named: Vec<(&str, &Outcome)> = runs.iter().map(|(n, o)| (n.as_str(), o)).collect();
    let mut figures = vec![picture::completions("Completion time of each job", &named)];
    if world.jobs.len() > MOST_DRAWN {
        return Ok(figures);
    }
    for (name, outcome) in &runs {
        if world.nodes.len() == 1 {
            figures.push(picture::shares(&format!("CPU usage, {name}"), &world, outcome, 0));
        } else {
            figures.push(picture::gantt(&format!("Where each job ran, {name}"), &world, outcome));
        }
        figures.push(picture::losses(&format!("Losses, {name}"), &world, outcome));
    }
    Ok(figures)
}

/// Everything about a simulation on one page.
pub fn page(simulation: &Simulation, figures: &[Figure]) -> String {
    let title = if simulation.title.is_empty() { "Simulation" } else { &simulation.title };
    let mut page = Page::new(title);
    for (heading, table) in simulation.tables() {
        page = page.heading(&heading).table(&table);
    }
    page = page.heading("Figures");
    for figure in figures {
        page = page.figure(&figure.svg).text(&figure.caption);
    }
    page.html()
}
