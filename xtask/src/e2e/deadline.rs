//! The mix of jobs that the deadline stories run, and how a story is judged.
//!
//! **Problem.** A story that holds on any machine cannot name seconds: it must know how fast the machine
//! trains, and how much of a core other programs leave.
//!
//! **How.** [`Machine::measure`] trains for a few seconds. [`mix`] derives from that the steps of each job and
//! its deadline. Times in the mix are parts of one *horizon*. All feasible deadlines need at most 60 % of the
//! jobs' cores when the most urgent job runs first. With equal shares, eight jobs at once are too slow for
//! every deadline that is not loose.
//!
//! **Use.** CPU that was allocated and not used counts as wasted only as far as the machine was idle: what other
//! programs of the machine take is no fault of a policy.
//!
//! **Prediction.** A [`Sample`] is what Gainshare published about one job at one moment. [`Prediction`]
//! compares the sample after a tenth of each run with the actual end. Jobs that arrive later and take
//! precedence cannot be predicted: after a tenth of the first runs, half of the work of the mix has not been
//! submitted. So the stories also run the mix with [`all_at_once`]. The figures of those rounds together are judged
//! ([`JudgedPrediction`]); those of the other rounds are printed beside them.
//!
//! **Terms and units.** Seconds (`_s`). *Work* is in seconds of one core. Errors are parts of the run's length.

use super::train::steps_per_second;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::path::Path;

/// A job whose deadline cannot be met must learn that within this time.
const REPORTED_WITHIN_S: f64 = 60.0;

/// The goal of the prediction after a tenth of each run. Errors are parts of the run's length; 80 % of the ends should
/// lie inside the interval.
const MEDIAN_ERROR_BELOW: f64 = 0.10;
const NINETIETH_ERROR_BELOW: f64 = 0.25;
const INSIDE: std::ops::RangeInclusive<f64> = 0.73..=0.87;

/// The part of what was allocated that must be used.
const LEAST_USED: f64 = 0.9;

/// A machine that gives less than this part of a core is too busy for the story.
const LEAST_CORE: f64 = 0.1;

/// The work of the run that measures how much of a core is free.
const CALIBRATION_S: f64 = 5.0;

/// On a cluster this many pods of each model are measured beside each other: about as many as the story has at once.
const COPIES: usize = 3;

/// Reports a second on an idle core: a job that shares with ten others still reports twice a second.
const REPORTS_PER_S: f64 = 20.0;

/// One job of the mix.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct MixJob {
    pub(super) name: &'static str,
    pub(super) model: &'static str,
    pub(super) arrives_s: f64,
    pub(super) work_s: f64,
    pub(super) steps: u64,
    pub(super) report_every: u64,
    /// Seconds from the arrival.
    pub(super) deadline_s: Option<f64>,
    /// The deadline can be met.
    pub(super) feasible: bool,
}

impl MixJob {
    /// The words after `gainshare`, with the format of the reports.
    pub(super) fn words(&self, format: &str) -> Vec<String> {
        let (steps, every) = (self.steps.to_string(), self.report_every.to_string());
        let words = ["train", self.model, "--steps", &steps, "--report-every", &every, "--format", format];
        words.map(str::to_owned).to_vec()
    }
}

/// What the machine does in a second.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Machine {
    /// The part of a core that one busy program gets beside all other programs.
    pub(super) core: f64,
    pub(super) models: Vec<ModelSpeed>,
}

/// How fast one model trains.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct ModelSpeed {
    model: &'static str,
    /// Steps per second of CPU time.
    steps_per_s: f64,
    /// Steps between two reports. A report costs as much as some steps, because the loss is measured for it.
    report_every: u64,
}

impl Machine {
    /// `run` lets `gainshare` with these words run where the jobs of the story will run, and returns how many
    /// seconds that took.
    pub(super) fn measure(program: &Path, run: impl FnOnce(&[String]) -> Result<f64>) -> Result<Machine> {
        let models = speeds_alone(program)?;
        let core = (CALIBRATION_S / run(&calibration(&models[1]))?.max(1e-3)).min(1.0);
        Machine { core, models }.large_enough()
    }

    /// The same with many pods beside each other that report as the jobs of the story will: on a node, steps cost more
    /// CPU time than alone on a machine. `run` returns the last line of each program.
    pub(super) fn measure_together(
        program: &Path,
        run: impl FnOnce(&[Vec<String>]) -> Result<Vec<String>>,
    ) -> Result<Machine> {
        let alone = speeds_alone(program)?;
        let words = std::iter::repeat_n(&alone, COPIES).flatten().map(calibration).collect::<Vec<_>>();
        let lines = run(&words)?;
        let costs: Vec<StepCost> = lines.iter().map(|line| StepCost::read(line)).collect::<Result<_>>()?;
        let cpu_s: f64 = costs.iter().map(|cost| cost.steps * cost.cpu_s).sum();
        let wall_s = costs.iter().map(|cost| cost.wall_s).fold(1e-3, f64::max);
        let together = |(place, speed): (usize, &ModelSpeed)| {
            let of_model = costs.iter().skip(place).step_by(alone.len());
            let cpu_s = of_model.clone().map(|cost| cost.cpu_s).sum::<f64>() / of_model.count().max(1) as f64;
            ModelSpeed { steps_per_s: 1.0 / cpu_s.max(1e-9), ..*speed }
        };
        let models = alone.iter().enumerate().map(together).collect();
        Machine { core: (cpu_s / wall_s).min(1.0), models }.large_enough()
    }

    fn large_enough(self) -> Result<Machine> {
        let core = self.core;
        ensure!(core >= LEAST_CORE, "other programs leave only {core:.2} of a core: try again on a quieter machine");
        Ok(self)
    }

    fn speed(&self, model: &'static str) -> ModelSpeed {
        let known = self.models.iter().find(|speed| speed.model == model);
        known.copied().unwrap_or(ModelSpeed { model, steps_per_s: 1.0, report_every: 1 })
    }
}

fn speeds_alone(program: &Path) -> Result<Vec<ModelSpeed>> {
    let speed = |model| -> Result<ModelSpeed> {
        let steps_per_s = steps_per_second(program, model)?;
        Ok(ModelSpeed { model, steps_per_s, report_every: ((steps_per_s / REPORTS_PER_S) as u64).max(1) })
    };
    ["vae", "mlp", "gru"].into_iter().map(speed).collect()
}

/// The words of a program that trains for about [`CALIBRATION_S`] at this speed.
fn calibration(speed: &ModelSpeed) -> Vec<String> {
    let steps = ((speed.steps_per_s * CALIBRATION_S) as u64).max(1).to_string();
    let every = speed.report_every.to_string();
    ["train", speed.model, "--steps", &steps, "--report-every", &every, "--format", "quiet"].map(str::to_owned).to_vec()
}

/// What the steps of a program cost.
#[derive(Debug, PartialEq)]
struct StepCost {
    steps: f64,
    wall_s: f64,
    /// Of one step.
    cpu_s: f64,
}

impl StepCost {
    /// Reads the last line of a trainer, `mlp: 900 steps in 5.04 s (178.6 steps/s, 5.55 CPU ms per step)`.
    fn read(line: &str) -> Result<StepCost> {
        let before = |mark: &str| -> Result<f64> {
            let text = line.split_once(mark).and_then(|(text, _)| text.rsplit(' ').next());
            let number = text.and_then(|text| text.parse().ok()).filter(|number| *number > 0.0);
            number.with_context(|| format!("`{line}` has no number before `{mark}`"))
        };
        let (steps, wall_s) = (before(" steps in ")?, before(" s (")?);
        Ok(StepCost { steps, wall_s, cpu_s: before(" CPU ms per step")? / 1e3 })
    }
}

/// Ten jobs for one core. `horizon_s` is about how long a round takes on an idle machine.
pub(super) fn mix(machine: &Machine, horizon_s: f64) -> Vec<MixJob> {
    // Name, model, arrival, work and deadline (both as parts of the horizon), feasible.
    let rows = [
        ("loose-1", "vae", 0.00, 0.14, Some(1.30), true),
        ("loose-2", "mlp", 0.00, 0.12, Some(1.25), true),
        ("rest", "gru", 0.00, 0.10, None, true),
        ("loose-3", "gru", 0.03, 0.10, Some(1.20), true),
        ("middle-1", "mlp", 0.06, 0.08, Some(0.55), true),
        ("middle-2", "vae", 0.10, 0.07, Some(0.60), true),
        ("tight-1", "mlp", 0.15, 0.08, Some(0.38), true),
        ("impossible", "vae", 0.20, 0.20, Some(0.28), false),
        ("tight-2", "gru", 0.30, 0.07, Some(0.60), true),
        ("tight-3", "vae", 0.50, 0.07, Some(0.80), true),
    ];
    // On a busy machine everything takes longer, but the jobs stay as large as they are.
    let wall_s = horizon_s / machine.core;
    let job = |(name, model, arrives, work, deadline, feasible): (_, _, f64, f64, Option<f64>, _)| {
        let ModelSpeed { steps_per_s, report_every, .. } = machine.speed(model);
        let work_s = work * horizon_s;
        MixJob {
            name,
            model,
            arrives_s: arrives * wall_s,
            work_s,
            steps: ((steps_per_s * work_s) as u64).max(20),
            report_every,
            deadline_s: deadline.map(|d| (d - arrives) * wall_s),
            feasible,
        }
    };
    rows.map(job).to_vec()
}

/// The same jobs, all at the start. Deadlines stay the same moments.
pub(super) fn all_at_once(jobs: &[MixJob]) -> Vec<MixJob> {
    let at_start =
        |job: &MixJob| MixJob { arrives_s: 0.0, deadline_s: job.deadline_s.map(|d| d + job.arrives_s), ..job.clone() };
    jobs.iter().map(at_start).collect()
}

/// Sums up how much of the allocated CPU was used.
#[derive(Debug, Default)]
pub(super) struct Use {
    used_s: f64,
    wasted_s: f64,
}

impl Use {
    /// Adds an interval, in core-seconds: what was allocated, what was used of it, and how long cores were idle.
    pub(super) fn add(&mut self, allocated_s: f64, used_s: f64, idle_s: f64) {
        let used_s = used_s.clamp(0.0, allocated_s);
        self.used_s += used_s;
        self.wasted_s += idle_s.clamp(0.0, allocated_s - used_s);
    }

    /// The part that was used.
    pub(super) fn part(&self) -> f64 {
        self.used_s / (self.used_s + self.wasted_s).max(1e-9)
    }
}

/// What was published about a job at one moment, in seconds since 1970.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample {
    pub(super) at_s: f64,
    pub(super) done_s: f64,
    pub(super) earliest_s: f64,
    pub(super) latest_s: f64,
}

/// How one job fared. Times are seconds since the job's arrival.
#[derive(Debug, Clone, Serialize)]
pub(super) struct JobResult {
    pub(super) name: &'static str,
    pub(super) work_s: f64,
    pub(super) deadline_s: Option<f64>,
    pub(super) feasible: bool,
    pub(super) ended_s: f64,
    pub(super) met: Option<bool>,
    pub(super) restarts: u64,
    /// When the job was warned of a miss.
    pub(super) warned_s: Option<f64>,
    /// What was predicted after a tenth of the run, less the actual end, as a part of the run.
    pub(super) error: Option<f64>,
    pub(super) inside: Option<bool>,
}

impl JobResult {
    /// Judges a job from the moments (since 1970) of its arrival, its start and its end.
    pub(super) fn new(job: &MixJob, moments_s: [f64; 3], due_s: Option<f64>, samples: &[Sample]) -> JobResult {
        let [arrived_s, started_s, ended_s] = moments_s;
        let run_s = (ended_s - started_s).max(1e-3);
        let tenth = samples.iter().find(|s| s.at_s >= started_s + 0.1 * run_s && s.at_s < ended_s);
        JobResult {
            name: job.name,
            work_s: job.work_s,
            deadline_s: job.deadline_s,
            feasible: job.feasible,
            ended_s: ended_s - arrived_s,
            met: due_s.map(|due_s| ended_s <= due_s),
            restarts: 0,
            warned_s: None,
            error: tenth.map(|s| (s.done_s - ended_s) / run_s),
            inside: tenth.map(|s| (s.earliest_s..=s.latest_s).contains(&ended_s)),
        }
    }
}

/// How well ends were predicted after a tenth of each run.
#[derive(Debug, Default, Clone, Serialize)]
pub(super) struct Prediction {
    pub(super) jobs: usize,
    pub(super) median_error: f64,
    pub(super) ninetieth_error: f64,
    /// The part of the ends that lay inside the predicted 80 %.
    pub(super) inside: f64,
}

impl Prediction {
    fn of(jobs: &[JobResult]) -> Prediction {
        Prediction::of_all(&jobs.iter().collect::<Vec<_>>())
    }

    fn of_all(jobs: &[&JobResult]) -> Prediction {
        let mut errors: Vec<f64> = jobs.iter().filter_map(|j| j.error).map(f64::abs).collect();
        errors.sort_by(f64::total_cmp);
        let inside = jobs.iter().filter(|j| j.inside == Some(true)).count();
        Prediction {
            jobs: errors.len(),
            median_error: quantile(&errors, 0.5),
            ninetieth_error: quantile(&errors, 0.9),
            inside: inside as f64 / errors.len().max(1) as f64,
        }
    }

    fn text(&self) -> String {
        format!(
            "after 10 % of {} runs: median error {:.0} %, 90th percentile {:.0} %, {:.0} % inside the interval",
            self.jobs,
            100.0 * self.median_error,
            100.0 * self.ninetieth_error,
            100.0 * self.inside
        )
    }
}

/// The predictions of several rounds together, against the goal.
#[derive(Debug, Clone, Serialize)]
pub(super) struct JudgedPrediction {
    #[serde(flatten)]
    prediction: Prediction,
    /// What of the goal was missed; empty if it was kept.
    missed: Vec<String>,
}

impl JudgedPrediction {
    /// Nothing without rounds.
    fn of(rounds: &[Round]) -> Option<JudgedPrediction> {
        let jobs: Vec<&JobResult> = rounds.iter().flat_map(|round| &round.jobs).collect();
        (!rounds.is_empty()).then(|| JudgedPrediction::new(Prediction::of_all(&jobs)))
    }

    fn new(prediction: Prediction) -> JudgedPrediction {
        let mut missed = Vec::new();
        let mut judge = |what: &str, part: f64, is_kept: bool, goal: &str| {
            if !is_kept {
                missed.push(format!("{what} {:.1} %, not {goal}", 100.0 * part));
            }
        };
        let Prediction { jobs, median_error, ninetieth_error, inside } = prediction;
        if jobs == 0 {
            return JudgedPrediction { prediction, missed: vec!["no end was predicted".to_owned()] };
        }
        judge("median error", median_error, median_error < MEDIAN_ERROR_BELOW, "below 10 %");
        judge("90th percentile", ninetieth_error, ninetieth_error < NINETIETH_ERROR_BELOW, "below 25 %");
        judge("inside the interval", inside, INSIDE.contains(&inside), "73 to 87 %");
        JudgedPrediction { prediction, missed }
    }

    fn text(&self) -> String {
        let verdict =
            if self.missed.is_empty() { "kept".to_owned() } else { format!("missed: {}", self.missed.join(", ")) };
        format!("{}; the goal is {verdict}", self.prediction.text())
    }
}

/// The value that the part `part` of `sorted` does not exceed, between its neighbours; 0 of nothing.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let at = part * last as f64;
    let (low, high) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    low + at.fract() * (high - low)
}

/// The mix under one policy.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Round {
    pub(super) policy: &'static str,
    /// Feasible deadlines, and those of them that were met.
    pub(super) feasible: usize,
    pub(super) met: usize,
    /// The part of what was allocated that was used.
    pub(super) used: f64,
    pub(super) restarts: u64,
    pub(super) prediction: Prediction,
    pub(super) jobs: Vec<JobResult>,
}

impl Round {
    pub(super) fn new(policy: &'static str, used: f64, jobs: Vec<JobResult>) -> Round {
        let is_feasible = |j: &&JobResult| j.feasible && j.deadline_s.is_some();
        Round {
            policy,
            feasible: jobs.iter().filter(is_feasible).count(),
            met: jobs.iter().filter(is_feasible).filter(|j| j.met == Some(true)).count(),
            used,
            restarts: jobs.iter().map(|j| j.restarts).sum(),
            prediction: Prediction::of(&jobs),
            jobs,
        }
    }
}

/// What a story measured.
#[derive(Debug, Serialize)]
pub(super) struct DeadlineFigures {
    pub(super) machine: Machine,
    pub(super) default: Round,
    pub(super) qos: Round,
    /// Rounds in which all jobs arrived at the start; in the short form only that under `qos`, or none.
    pub(super) all_at_once: Vec<Round>,
    /// The predictions of those rounds together.
    pub(super) judged: Option<JudgedPrediction>,
    pub(super) took_s: f64,
}

impl DeadlineFigures {
    /// `default` and `qos`: the rounds in which jobs arrive one after the other.
    pub(super) fn new(
        machine: Machine,
        [default, qos]: [Round; 2],
        all_at_once: Vec<Round>,
        took_s: f64,
    ) -> DeadlineFigures {
        let judged = JudgedPrediction::of(&all_at_once);
        DeadlineFigures { machine, default, qos, all_at_once, judged, took_s }
    }

    pub(super) fn print(&self) {
        println!("{:<11} {:>7} {:>9} {:>16} {:>16}", "job", "work", "deadline", self.default.policy, self.qos.policy);
        for (a, b) in self.default.jobs.iter().zip(&self.qos.jobs) {
            let cell = |j: &JobResult| {
                let word = match j.met {
                    Some(true) => "met",
                    Some(false) => "missed",
                    None => "",
                };
                format!("{:>6.1} s {word:<7}", j.ended_s)
            };
            let due = a.deadline_s.map_or("none".to_owned(), |d| format!("{d:.1} s"));
            println!("{:<11} {:>5.1} s {due:>9} {:>16} {:>16}", a.name, a.work_s, cell(a), cell(b));
        }
        for r in [&self.default, &self.qos] {
            println!(
                "{}: {} of {} feasible deadlines met, {} restarts, {:.0} % of the allocated CPU used",
                r.policy,
                r.met,
                r.feasible,
                r.restarts,
                100.0 * r.used
            );
            if r.prediction.jobs > 0 {
                println!("  ends predicted, before most jobs had come, {}", r.prediction.text());
            }
        }
        for r in &self.all_at_once {
            println!("{}, all jobs at once: ends predicted {}", r.policy, r.prediction.text());
        }
        if let Some(judged) = &self.judged {
            println!("all jobs at once, all policies: ends predicted {}", judged.text());
        }
        println!("other programs left {:.2} of a core; {:.0} s in all", self.machine.core, self.took_s);
    }

    /// Every promise that was broken, in one error. The short form belongs to the tests and runs on busy
    /// machines: figures of speed are printed there, and not judged.
    pub(super) fn check(&self, short: bool) -> Result<()> {
        let mut broken = Vec::new();
        let (default, qos) = (&self.default, &self.qos);
        if default.restarts + qos.restarts > 0 {
            broken.push(format!("{} restarts", default.restarts + qos.restarts));
        }
        if qos.met < default.met {
            broken.push(format!("`qos` met {} deadlines, `{}` met {}", qos.met, default.policy, default.met));
        }
        for job in qos.jobs.iter().filter(|j| !j.feasible) {
            match job.warned_s {
                Some(s) if s <= REPORTED_WITHIN_S => {}
                Some(s) => broken.push(format!("{} was warned after {s:.0} s", job.name)),
                None => broken.push(format!("{} was never warned", job.name)),
            }
        }
        if !short {
            if qos.met < qos.feasible {
                broken.push(format!("{} of {} feasible deadlines met under `qos`", qos.met, qos.feasible));
            }
            if default.met >= qos.met {
                broken.push(format!("`{}` met as many deadlines as `qos`", default.policy));
            }
            if qos.used < LEAST_USED {
                broken.push(format!("only {:.0} % of the allocated CPU was used", 100.0 * qos.used));
            }
            let missed = self.judged.iter().flat_map(|judged| &judged.missed);
            broken.extend(missed.map(|missed| format!("predicted ends, all jobs at once: {missed}")));
        }
        ensure!(broken.is_empty(), "promises were broken: {}", broken.join("; "));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cost_of_a_step_is_read_from_the_last_line() {
        let cost = StepCost::read("mlp: 900 steps in 5.04 s (178.6 steps/s, 5.50 CPU ms per step)").unwrap();
        assert_eq!(cost, StepCost { steps: 900.0, wall_s: 5.04, cpu_s: 0.0055 });
        assert!(StepCost::read("mlp: 900 steps").is_err());
    }

    fn machine() -> Machine {
        let speeds = [("vae", 10.0), ("mlp", 100.0), ("gru", 1000.0)];
        let models = speeds.map(|(model, steps_per_s)| ModelSpeed { model, steps_per_s, report_every: 5 });
        Machine { core: 0.5, models: models.to_vec() }
    }

    #[test]
    fn the_most_urgent_first_meets_every_feasible_deadline_with_room_to_spare() {
        let jobs = mix(&machine(), 100.0);
        assert!(jobs.iter().filter(|j| j.deadline_s.is_some()).count() >= 8);
        let due = |j: &MixJob| j.deadline_s.map(|d| j.arrives_s + d);
        let mut feasible: Vec<&MixJob> = jobs.iter().filter(|j| j.feasible && j.deadline_s.is_some()).collect();
        feasible.sort_by(|a, b| due(a).partial_cmp(&due(b)).unwrap());
        // What must be done between any arrival and any deadline fits into 60 % of half a core.
        for from in &feasible {
            for to in &feasible {
                let inside = feasible.iter().filter(|j| j.arrives_s >= from.arrives_s && due(j) <= due(to));
                let work_s: f64 = inside.map(|j| j.work_s).sum();
                let room_s = 0.5 * (due(to).unwrap() - from.arrives_s);
                assert!(room_s < 0.0 || work_s == 0.0 || work_s <= 0.6 * room_s, "{from:?} to {to:?}: {work_s}");
            }
        }
        let impossible = jobs.iter().find(|j| !j.feasible).unwrap();
        assert!(impossible.work_s > 2.0 * 0.5 * impossible.deadline_s.unwrap());
    }

    #[test]
    fn equal_shares_miss_some_deadlines() {
        let jobs = mix(&machine(), 100.0);
        let mut left: Vec<f64> = jobs.iter().map(|j| j.work_s).collect();
        let mut ended = vec![f64::INFINITY; jobs.len()];
        let (step_s, mut now_s) = (0.1, 0.0);
        while left.iter().any(|l| *l > 0.0) {
            let live: Vec<usize> = (0..jobs.len()).filter(|&i| jobs[i].arrives_s <= now_s && left[i] > 0.0).collect();
            now_s += step_s;
            for &i in &live {
                left[i] -= 0.5 * step_s / live.len() as f64;
                if left[i] <= 0.0 {
                    ended[i] = now_s;
                }
            }
        }
        let missed = jobs
            .iter()
            .zip(&ended)
            .filter(|(j, end)| j.feasible && j.deadline_s.is_some_and(|d| **end > j.arrives_s + d));
        assert!(missed.count() >= 4, "{ended:?}");
    }

    #[test]
    fn cpu_that_other_programs_take_is_not_wasted() {
        let mut all = Use::default();
        all.add(1.0, 0.4, 0.0);
        assert!((all.part() - 1.0).abs() < 1e-9);
        all.add(1.0, 0.5, 2.0);
        assert!((all.part() - 0.9 / 1.4).abs() < 1e-9);
    }

    #[test]
    fn the_long_form_judges_predictions_of_the_rounds_at_once() {
        let round = |errors: &[(f64, bool)]| {
            let of_mix = &mix(&machine(), 100.0)[2];
            let job = |&(error, is_inside): &(f64, bool)| {
                let result = JobResult::new(of_mix, [0.0, 0.0, 100.0], None, &[]);
                JobResult { error: Some(error), inside: Some(is_inside), ..result }
            };
            Round::new("qos", 1.0, errors.iter().map(job).collect())
        };
        let figures = |at_once: Vec<Round>| {
            let mut due = round(&[(0.0, true)]);
            (due.feasible, due.met) = (1, 1);
            let default = Round { policy: "na", met: 0, ..due.clone() };
            DeadlineFigures::new(machine(), [default, due], at_once, 1.0)
        };
        let with = |inside: usize, error: f64| -> Vec<(f64, bool)> { (0..10).map(|i| (error, i < inside)).collect() };
        // The rounds count together: 7 and 9 of 10 are 80 %.
        let good = figures(vec![round(&with(7, 0.02)), round(&with(9, -0.05))]);
        good.check(false).unwrap();
        assert!(good.judged.as_ref().unwrap().text().ends_with("the goal is kept"));
        let error = |figures: &DeadlineFigures| figures.check(false).unwrap_err().to_string();
        let wide = figures(vec![round(&with(10, 0.02))]);
        assert!(error(&wide).contains("inside the interval 100.0 %, not 73 to 87 %"), "{}", error(&wide));
        let far = figures(vec![round(&with(8, 0.3))]);
        assert!(error(&far).contains("median error 30.0 %") && error(&far).contains("90th percentile 30.0 %"));
        far.check(true).unwrap();
        let json = serde_json::to_value(&far).unwrap();
        assert_eq!(
            (json["judged"]["jobs"].as_u64(), json["judged"]["missed"].as_array().unwrap().len()),
            (Some(10), 2)
        );
        assert!(error(&figures(vec![round(&[])])).contains("no end was predicted"));
        figures(Vec::new()).check(false).unwrap();
    }

    #[test]
    fn quantiles_lie_between_the_values_and_the_ninetieth_of_ten_is_not_the_largest() {
        let errors: Vec<f64> = (1..=10).map(f64::from).collect();
        assert!((quantile(&errors, 0.5) - 5.5).abs() < 1e-9 && (quantile(&errors, 0.9) - 9.1).abs() < 1e-9);
        assert_eq!((quantile(&[], 0.5), quantile(&[3.0], 0.9)), (0.0, 3.0));
    }

    #[test]
    fn the_sample_after_a_tenth_of_the_run_counts() {
        let job = &mix(&machine(), 100.0)[0];
        let sample = |at_s, done_s| Sample { at_s, done_s, earliest_s: done_s - 5.0, latest_s: done_s + 5.0 };
        let samples = [sample(10.0, 500.0), sample(30.0, 120.0), sample(60.0, 110.0)];
        let result = JobResult::new(job, [5.0, 10.0, 110.0], Some(100.0), &samples);
        assert_eq!((result.met, result.inside), (Some(false), Some(false)));
        assert!((result.error.unwrap() - 0.1).abs() < 1e-9);
        let round = Round::new("qos", 1.0, vec![result]);
        assert_eq!((round.met, round.feasible, round.prediction.jobs), (0, 1, 1));
        assert!((round.prediction.median_error - 0.1).abs() < 1e-9);
    }
}
