//! `gainshare sim`, `paper` and `trace`: the simulator from the command line. All numbers come from
//! `gainshare-sim`; here they are only asked for, shown and written.

use crate::progress_bar::ProgressBar;
use anyhow::{Context, Result};
use clap::{Args, Subcommand, ValueHint};
use gainshare_core::model::Span;
use gainshare_core::policy::{Aim, Gain, Policy, Preset};
use gainshare_figures::Table;
use gainshare_figures::file::{self, Drawing};
use gainshare_figures::terminal::Printer;
use gainshare_sim::deadline::data::ITP_CLUSTERS;
use gainshare_sim::deadline::report;
use gainshare_sim::paper::{self, operator, qos};
use gainshare_sim::scenario::Scenario;
use gainshare_sim::simulate;
use gainshare_sim::trace::gang::GangOrder;
use gainshare_sim::trace::{self, Replay, Shape, TraceJob};
use gainshare_sim::world::Law;
use serde::Serialize;
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct SimArgs {
    /// The scenario, a TOML file
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,

    /// The policies to compare; the first is the baseline
    #[arg(long, value_delimiter = ',', value_parser = crate::values::policy(), default_value = "na,flowcon,gainshare,srpt", value_name = "POLICY,…")]
    policy: Vec<Preset>,

    /// How many worlds to draw from the scenario
    #[arg(long, default_value_t = 31, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    seeds: u64,

    /// Write the first figure (.svg), or everything on one page (.html)
    #[arg(long, value_hint = ValueHint::FilePath)]
    figure: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct PaperArgs {
    /// The experiment; `--list` names all
    #[arg(required_unless_present = "list")]
    name: Option<String>,

    /// List the experiments
    #[arg(long, conflicts_with = "name")]
    list: bool,

    /// How many times to draw the experiment
    #[arg(long, default_value_t = paper::SEEDS, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    seeds: u64,

    /// Run only this cluster of elasticflow-itp
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10))]
    cluster: Option<u32>,

    /// The first seed
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    first_seed: u64,

    /// Whether jobs print their total number of steps: all do (`told`), none does (`hidden`), or each model prints
    /// what its public example script prints (`as-printed`)
    #[arg(long, default_value = "as-printed", value_parser = ["told", "hidden", "as-printed"], value_name = "TOTALS")]
    totals: String,

    /// The same as `--totals hidden`
    #[arg(long, conflicts_with = "totals")]
    hide_totals: bool,

    /// How many earlier runs of each program are known
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=100), value_name = "RUNS")]
    history: u32,

    /// Let the end of a job tell nothing of the other jobs of its program
    #[arg(long)]
    forget: bool,

    /// How neighbours slow each other: by turns (the law that our own policy fits), by pairs of
    /// models, or by memory bandwidth
    #[arg(long, default_value = "turns", value_parser = ["turns", "pairs", "bandwidth"], value_name = "LAW")]
    law: String,

    /// Loss curves: the calibrated ones, or recorded from real runs
    #[arg(long, default_value = "analytic", value_parser = ["analytic", "recorded"], value_name = "CURVES")]
    curves: String,

    /// What the gain policy minimises: the time to the end of a job, or to nine tenths of its improvement
    #[arg(long, value_parser = crate::values::aim(), value_name = "AIM")]
    aim: Option<Aim>,

    /// Rough jobs: start-up work, unequal steps, evaluations, early ends, wrong and changed totals
    #[arg(long)]
    rough: bool,

    /// Let the fair world of our own policy break ties with random numbers of its own
    #[arg(long)]
    own_dice: bool,

    /// Run only these policies, and the baseline
    #[arg(long, value_delimiter = ',', value_parser = crate::values::policy(), value_name = "POLICY,…")]
    policy: Vec<Preset>,

    /// Write the first figure (.svg), or everything on one page (.html)
    #[arg(long, value_hint = ValueHint::FilePath)]
    figure: Option<PathBuf>,
}

impl PaperArgs {
    /// Refuses an option that differs from its default and that the experiment does not use.
    fn check(&self, experiment: &str) -> Result<()> {
        let changed = [
            ("--seeds", self.seeds != paper::SEEDS),
            ("--cluster", self.cluster.is_some()),
            ("--first-seed", self.first_seed != 0),
            ("--totals", self.totals != "as-printed"),
            ("--hide-totals", self.hide_totals),
            ("--history", self.history != 0),
            ("--forget", self.forget),
            ("--law", self.law != "turns"),
            ("--curves", self.curves != "analytic"),
            ("--aim", self.aim.is_some()),
            ("--rough", self.rough),
            ("--own-dice", self.own_dice),
            ("--policy", !self.policy.is_empty()),
            ("--figure", self.figure.is_some()),
        ];
        let is_used = |option: &str| match experiment {
            "elasticflow-8a" => false,
            "elasticflow-itp" => option == "--cluster",
            qos::NAME => ["--first-seed", "--seeds", "--forget"].contains(&option),
            operator::NAME => option == "--seeds",
            _ => option != "--cluster",
        };
        let unused = changed.into_iter().find(|(option, is_changed)| *is_changed && !is_used(option));
        match unused {
            Some((option, _)) => anyhow::bail!("`paper {experiment}` does not use {option}: leave it out"),
            None => Ok(()),
        }
    }

    /// The conditions of the experiment.
    fn settings(&self) -> paper::Settings {
        paper::Settings {
            first_seed: self.first_seed,
            seeds: self.seeds,
            totals: match self.totals.as_str() {
                "told" => paper::Totals::Told,
                "hidden" => paper::Totals::Hidden,
                _ if self.hide_totals => paper::Totals::Hidden,
                _ => paper::Totals::AsPrinted,
            },
            history: self.history,
            remembers: !self.forget,
            law: match self.law.as_str() {
                "pairs" => Law::Pairs,
                "bandwidth" => Law::Bandwidth,
                _ => Law::Turns,
            },
            curves: if self.curves == "recorded" { paper::Curves::Recorded } else { paper::Curves::Analytic },
            dice: if self.own_dice { paper::Dice::Own } else { paper::Dice::Shared },
            rough: self.rough,
            gain: self.aim.map(|aim| Gain { aim, ..Gain::default() }),
            only: self.policy.iter().map(|p| p.name().to_owned()).collect(),
        }
    }
}

#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Read traces of any known format and write one of our own
    #[command(after_help = "Example:\n  gainshare trace import philly.csv.gz --to philly-own.csv")]
    Import {
        /// Philly, ITP or our own CSV; .gz and .tar.gz are unpacked. Several are merged
        #[arg(required = true, value_hint = ValueHint::FilePath)]
        files: Vec<PathBuf>,
        /// Where to write it; without it the trace is only described
        #[arg(long, value_hint = ValueHint::FilePath)]
        to: Option<PathBuf>,
    },

    /// Generate a trace
    #[command(after_help = "Example:\n  gainshare trace generate --jobs 10000 --like philly.csv.gz --to made-up.csv")]
    Generate {
        #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
        jobs: u32,
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Fit the distributions to this trace
        #[arg(long, value_hint = ValueHint::FilePath)]
        like: Option<PathBuf>,
        /// Where to write it
        #[arg(long, value_hint = ValueHint::FilePath)]
        to: PathBuf,
    },

    /// Run a trace through a cluster's queue
    #[command(
        after_help = "Example:\n  gainshare trace replay philly.csv.gz --policy fifo,tiresias,srtf --devices 600"
    )]
    Replay {
        #[arg(value_hint = ValueHint::FilePath)]
        file: PathBuf,
        /// Orders of the queue to compare
        #[arg(long, value_delimiter = ',', value_parser = ["fifo", "srtf", "tiresias"], default_value = "fifo,tiresias,srtf", value_name = "POLICY,…")]
        policy: Vec<String>,
        /// Devices of the cluster; without it, as many as make the trace fill 80 % of them
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        devices: Option<u32>,
        /// Seconds to restore a job that was preempted
        #[arg(long, default_value_t = 30)]
        restore: u64,
    },
}

/// A bar on standard error while runs are made, if a person reads it there.
fn bar(out: &Printer) -> ProgressBar {
    let shown = !out.is_json() && std::io::stderr().is_terminal();
    ProgressBar::new("runs", shown)
}

/// Prints a report as JSON, or else its tables under its title.
fn print(out: &Printer, report: &impl Serialize, title: &str, tables: &[(String, Table)]) -> Result<u8> {
    if out.is_json() {
        out.json(report)?;
        return Ok(0);
    }
    let mut text = if title.is_empty() { String::new() } else { format!("{title}\n\n") };
    for (heading, table) in tables {
        text.push_str(&format!("{heading}\n{}\n", table.text()));
    }
    out.text(&text)?;
    Ok(0)
}

pub fn sim(args: &SimArgs, out: &Printer) -> Result<u8> {
    file::check(args.figure.as_deref(), true)?;
    let file = args.file.display().to_string();
    let bytes = std::fs::read(&args.file).with_context(|| format!("cannot read {file}"))?;
    let scenario = Scenario::parse_bytes(&file, &bytes)?;
    let mut policies: Vec<(String, Policy)> = vec![];
    for preset in &args.policy {
        if policies.iter().all(|(name, _)| name != preset.name()) {
            policies.push((preset.name().to_owned(), Policy::from(*preset)));
        }
    }
    let bar = bar(out);
    let tell = |done: usize, total: usize| {
        bar.set(done, total);
    };
    let simulation = simulate::simulate(&scenario, &policies, args.seeds, &tell)?;
    bar.clear();
    if let Some(path) = &args.figure {
        let figures = simulate::figures(&scenario, &policies)?;
        let page = || simulate::page(&simulation, &figures);
        file::write(path, &Drawing { svg: figures.first().map(|f| f.svg.as_str()), page: Some(&page) })?;
    }
    print(out, &simulation, &simulation.title, &simulation.tables())
}

pub fn paper(args: &PaperArgs, out: &Printer) -> Result<u8> {
    let sharing = paper::experiments().into_iter().map(|e| (e.name, e.title));
    let all: Vec<(&str, &str)> = sharing
        .chain([(qos::NAME, qos::TITLE), (operator::NAME, operator::TITLE)])
        .chain(report::EXPERIMENTS)
        .collect();
    let Some(name) = &args.name else {
        if out.is_json() {
            let all: Vec<_> = all.iter().map(|(name, title)| json!({"name": name, "title": title})).collect();
            out.json(&all)?;
        } else {
            let rows = all.iter().map(|(name, title)| format!("{name:<24}{title}\n")).collect::<String>();
            out.text(&rows)?;
        }
        return Ok(0);
    };
    if !all.iter().any(|(known, _)| known == name) {
        let known = all.iter().map(|(known, _)| *known).collect::<Vec<_>>().join(", ");
        anyhow::bail!("no experiment is called `{name}`; known are: {known}");
    }
    args.check(name)?;
    if report::EXPERIMENTS.iter().any(|(known, _)| known == name) {
        return elasticflow(name, args.cluster, out);
    }
    file::check(args.figure.as_deref(), true)?;
    if name == qos::NAME {
        return deadlines(args, out);
    }
    if name == operator::NAME {
        return parameter_servers(args, out);
    }
    let experiment = paper::find(name).map_err(anyhow::Error::msg)?;
    let bar = bar(out);
    let report = experiment.run(&args.settings(), &|done, total| {
        bar.set(done, total);
    })?;
    bar.clear();
    if let Some(path) = &args.figure {
        let figures = experiment.figures(&report)?;
        let whole_page = experiment.page(&report)?;
        let page = || whole_page.clone();
        file::write(path, &Drawing { svg: figures.first().map(|f| f.svg.as_str()), page: Some(&page) })?;
    }
    print(out, &report, &report.title, &report.tables())
}

/// The experiments with ElasticFlow's jobs, which have no seeds and no figures.
fn elasticflow(name: &str, cluster: Option<u32>, out: &Printer) -> Result<u8> {
    if name == "elasticflow-8a" {
        let comparison = report::figure_8a()?;
        return print(out, &comparison, "", &[comparison.table()]);
    }
    let clusters = cluster.map_or(1..=ITP_CLUSTERS, |c| c..=c);
    let bar = bar(out);
    let total = clusters.clone().count();
    let mut comparisons = vec![];
    for (done, number) in clusters.enumerate() {
        bar.set(done, total);
        comparisons.push(report::itp(number)?);
    }
    bar.clear();
    let tables: Vec<_> = comparisons.iter().map(report::Comparison::table).collect();
    print(out, &json!({"clusters": comparisons}), "", &tables)
}

/// The experiment with deadlines has other measures than the rest.
fn deadlines(args: &PaperArgs, out: &Printer) -> Result<u8> {
    let bar = bar(out);
    let conditions = qos::Conditions { first_seed: args.first_seed, seeds: args.seeds, remembers: !args.forget };
    let report = qos::run(conditions, &|done, total| {
        bar.set(done, total);
    })?;
    bar.clear();
    print(out, &report, report.title, &report.tables())
}

/// The experiment with parameter servers has a world of its own.
fn parameter_servers(args: &PaperArgs, out: &Printer) -> Result<u8> {
    let bar = bar(out);
    let report = operator::run(args.seeds, &|done, total| {
        bar.set(done, total);
    })?;
    bar.clear();
    print(out, &report, report.title, &report.tables())
}

pub fn trace(command: &TraceCommand, out: &Printer) -> Result<u8> {
    match command {
        TraceCommand::Import { files, to } => {
            let (mut jobs, mut skipped) = (vec![], 0);
            for file in files {
                let (read, never_ran) = trace::read(file)?;
                jobs.extend(read);
                skipped += never_ran;
            }
            jobs.sort_by(|a, b| a.submitted_s.total_cmp(&b.submitted_s));
            if let Some(path) = to {
                save(path, &jobs)?;
            }
            describe(&jobs, skipped, out)?;
        }
        TraceCommand::Generate { jobs, seed, like, to } => {
            let shape = match like {
                Some(path) => Shape::fit(&trace::read(path)?.0),
                None => Shape::typical(),
            };
            let made = shape.generate(*jobs as usize, *seed);
            save(to, &made)?;
            describe(&made, 0, out)?;
        }
        TraceCommand::Replay { file, policy, devices, restore } => {
            let (jobs, _) = trace::read(file)?;
            let devices = devices.unwrap_or_else(|| (trace::offered_load(&jobs) / 0.8).ceil().max(1.0) as u32);
            replay(&jobs, policy, devices, Span::from_secs(*restore), out)?;
        }
    }
    Ok(0)
}

fn save(path: &Path, jobs: &[TraceJob]) -> Result<()> {
    let context = || format!("cannot write {}", path.display());
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).with_context(context)?);
    trace::write(&mut file, jobs).and_then(|()| file.flush()).with_context(context)
}

fn describe(jobs: &[TraceJob], skipped: usize, out: &Printer) -> Result<()> {
    let days = jobs.last().map_or(0.0, |j| j.submitted_s) / 86_400.0;
    let load = trace::offered_load(jobs);
    if out.is_json() {
        out.json(&json!({"jobs": jobs.len(), "never_ran": skipped, "days": days, "mean_devices_busy": load}))?;
    } else {
        let skipped = if skipped > 0 { format!(" ({skipped} that never ran are left out)") } else { String::new() };
        out.text(&format!(
            "{} jobs over {days:.1} days{skipped}; they keep {load:.1} devices busy on average\n",
            jobs.len()
        ))?;
    }
    Ok(())
}

fn replay(jobs: &[TraceJob], policies: &[String], devices: u32, restore: Span, out: &Printer) -> Result<()> {
    let order = |name: &str| match name {
        "srtf" => GangOrder::Srtf,
        "tiresias" => GangOrder::tiresias(),
        _ => GangOrder::Fifo,
    };
    let runs: Vec<(&String, Replay)> =
        policies.iter().map(|p| (p, trace::replay(jobs, devices, order(p), restore))).collect();
    if out.is_json() {
        let policies: std::collections::BTreeMap<_, _> = runs.iter().map(|(n, r)| (n, r)).collect();
        out.json(&json!({"devices": devices, "policies": policies}))?;
        return Ok(());
    }
    let head = ["policy", "mean", "median", "95 %", "99 %", "mean wait", "makespan", "used", "preempted"];
    let hours = |s: f64| format!("{:.2} h", s / 3600.0);
    let row = |(name, r): &(&String, Replay)| {
        let times = [
            r.mean_completion_s,
            r.median_completion_s,
            r.p95_completion_s,
            r.p99_completion_s,
            r.mean_wait_s,
            r.makespan_s,
        ];
        let mut cells = vec![(*name).clone()];
        cells.extend(times.map(hours));
        cells.push(format!("{:.0} %", r.utilisation * 100.0));
        cells.push(r.preemptions.to_string());
        cells
    };
    let table = Table { head: head.map(String::from).to_vec(), rows: runs.iter().map(row).collect() };
    let left_out = runs.first().map_or(0, |(_, r)| r.impossible);
    let note = if left_out > 0 {
        format!("{left_out} job(s) ask for more devices than there are and are left out\n")
    } else {
        String::new()
    };
    out.text(&format!("{} jobs on {devices} devices; completion from submission\n{}{note}", jobs.len(), table.text()))?;
    Ok(())
}
