//! The training loop: steps, reports, checkpoints and stopping.
//!
//! Progress goes to standard output, or to standard error where the imitated framework prints it there.
//! Messages to the user go to standard error, one line each. A run does not end when its output can no longer
//! be written, because the reader of a job's output may disconnect at any time.

use std::fmt::Display;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::signal::Signal;

use crate::args::{Resume, TrainArgs};
use crate::checkpoint::Store;
use crate::last_step::LastStep;
use crate::metrics_file::{MetricsFile, MetricsFormat};
use crate::report::{Progress, Renderer};
use crate::stop;
use crate::trainer::{Setup, Trainer};

/// Prints a message to the user. An error is ignored: a closed standard error must not end the run.
pub(crate) fn print_message(message: impl Display) {
    let _ = writeln!(io::stderr(), "gainshare train: {message}");
}

/// Trains with these options and returns the exit code: 0 when finished, 143 or 130 when stopped by SIGTERM
/// or SIGINT.
pub fn train(args: &TrainArgs) -> Result<ExitCode> {
    stop::install_handlers().context("cannot listen for signals")?;
    let mut run = Run::begin(args)?;
    while !run.finished && stop::received_signal().is_none() {
        run.step()?;
    }
    run.output.end(run.reported.as_ref());
    run.print_speed();
    run.save_at_end()?;
    match stop::received_signal() {
        Some(signal) if !run.finished => {
            let hint = if run.store.is_some() { "; the same command continues here" } else { "" };
            let (step, total_steps) = (run.trainer.step(), run.total_steps);
            print_message(format_args!("stopped by {signal} after step {step} of {total_steps}{hint}"));
            Ok(stopped_code(signal))
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

/// One run of the training loop.
struct Run<'a> {
    args: &'a TrainArgs,
    setup: Setup,
    total_steps: u64,
    trainer: Trainer,
    store: Option<Store>,
    last_step: Option<LastStep>,
    /// The step after which this run began.
    resumed_at: u64,
    /// The step of the newest checkpoint.
    saved_at: Option<u64>,
    output: Output,
    /// The newest report.
    reported: Option<Progress>,
    finished: bool,
    started: Instant,
    cpu_before_s: f64,
}

impl<'a> Run<'a> {
    fn begin(args: &'a TrainArgs) -> Result<Run<'a>> {
        let setup = args.setup();
        let total_steps = args.total_steps(&setup);
        let mut trainer = Trainer::new(setup.clone(), args.threads as usize);
        let mut store = args.checkpoint.as_deref().map(|dir| Store::claim(dir, args.attempt)).transpose()?;
        let last_step = args.checkpoint.as_deref().map(LastStep::open);
        if let (Some(store), Some(last_step)) = (&mut store, &last_step) {
            resume(args.resume, store, last_step, &mut trainer)?;
        }
        let resumed_at = trainer.step();
        let output = Output::new(args)?;
        let finished = is_finished_before(&trainer, total_steps, args.until_loss)?;
        Ok(Run {
            args,
            setup,
            total_steps,
            trainer,
            store,
            last_step,
            resumed_at,
            saved_at: (resumed_at > 0).then_some(resumed_at),
            output,
            reported: None,
            finished,
            started: Instant::now(),
            cpu_before_s: cpu_seconds(),
        })
    }

    /// Takes a step, reports it and saves it where that is due.
    fn step(&mut self) -> Result<()> {
        let update = self.trainer.advance()?;
        let step = self.trainer.step();
        if let Some(last_step) = &mut self.last_step {
            last_step.record(step);
        }
        self.finished = step >= self.total_steps;
        let epoch_steps = self.setup.epoch_steps();
        if step.is_multiple_of(self.args.report_every) || step.is_multiple_of(epoch_steps) || self.finished {
            let measurement = self.trainer.measure()?;
            let progress = Progress {
                step,
                total_steps: self.total_steps,
                epoch_steps,
                batch: self.setup.batch,
                loss: measurement.loss,
                accuracy: measurement.accuracy,
                learning_rate: update.learning_rate,
                gradient_norm: update.gradient_norm,
                elapsed_s: self.started.elapsed().as_secs_f64(),
                session_steps: step - self.resumed_at,
            };
            self.output.report(&progress);
            self.finished |= self.args.until_loss.is_some_and(|goal| f64::from(progress.loss) <= goal);
            self.reported = Some(progress);
        }
        self.save_if_due(step)
    }

    fn save_if_due(&mut self, step: u64) -> Result<()> {
        if let Some(store) = &mut self.store
            && self.args.checkpoint_every > 0
            && step.is_multiple_of(self.args.checkpoint_every)
        {
            match store.save(&self.trainer.state()) {
                Ok(_) => self.saved_at = Some(step),
                Err(error) if error.is_fenced() => return Err(error.into()),
                Err(error) => print_message(format_args!("no checkpoint at step {step}, training goes on: {error}")),
            }
        }
        Ok(())
    }

    fn print_speed(&self) {
        let wall_s = self.started.elapsed().as_secs_f64();
        let taken = self.trainer.step() - self.resumed_at;
        if taken > 0 {
            let cpu_ms = (cpu_seconds() - self.cpu_before_s) * 1e3 / taken as f64;
            let rate = taken as f64 / wall_s;
            let name = self.setup.kind.name();
            print_message(format_args!(
                "{name}: {taken} steps in {wall_s:.2} s ({rate:.1} steps/s, {cpu_ms:.2} CPU ms per step)"
            ));
        }
    }

    /// Saves the last step, unless that was done before.
    fn save_at_end(&mut self) -> Result<()> {
        let step = self.trainer.step();
        if let Some(store) = &mut self.store
            && self.saved_at != Some(step)
        {
            let path = store
                .save(&self.trainer.state())
                .with_context(|| format!("the work after step {} is lost", self.saved_at.unwrap_or(0)))?;
            print_message(format_args!("step {step} saved as {}", path.display()));
        }
        Ok(())
    }
}

/// The code that a shell reports for a process that the signal itself ended.
pub(crate) fn stopped_code(signal: Signal) -> ExitCode {
    ExitCode::from(if signal == Signal::SIGINT { 130 } else { 143 })
}

/// A resumed run may have taken all its steps, or have reached its loss, before it was interrupted.
fn is_finished_before(trainer: &Trainer, total_steps: u64, until_loss: Option<f64>) -> Result<bool> {
    let resumed_at = trainer.step();
    let mut finished = resumed_at >= total_steps;
    if let (Some(goal), true) = (until_loss, resumed_at > 0) {
        finished |= f64::from(trainer.measure()?.loss) <= goal;
    }
    if finished {
        print_message(format_args!("nothing left to do: step {resumed_at} of {total_steps} was reached before"));
    }
    Ok(finished)
}

fn resume(when: Resume, store: &mut Store, last_step: &LastStep, trainer: &mut Trainer) -> Result<()> {
    if when == Resume::Never {
        return Ok(());
    }
    let newest = store.load_newest(|damaged| print_message(format_args!("skipped: {damaged}")))?;
    match newest {
        Some((path, state)) => {
            trainer.restore(state).with_context(|| format!("cannot continue from {}", path.display()))?;
            let step = trainer.step();
            let lost = match last_step.lost_after(step) {
                0 => String::new(),
                lost => format!("; later steps lost: {lost}"),
            };
            print_message(format_args!("continues after step {step} from {}{lost}", path.display()));
        }
        None if when == Resume::Must => {
            bail!("--resume: there is no whole checkpoint in the --checkpoint directory; start without it")
        }
        None => {
            let lost = last_step.lost_after(0);
            if lost > 0 {
                print_message(format_args!("starts again without a checkpoint; steps lost: {lost}"));
            }
        }
    }
    Ok(())
}

/// CPU time of this process so far: user and system time of all threads.
fn cpu_seconds() -> f64 {
    let seconds = |time: nix::sys::time::TimeVal| time.tv_sec() as f64 + time.tv_usec() as f64 * 1e-6;
    getrusage(UsageWho::RUSAGE_SELF).map_or(0.0, |usage| seconds(usage.user_time()) + seconds(usage.system_time()))
}

/// Where reports go. An output that fails is named in one message and not used again.
pub(crate) struct Output {
    renderer: Renderer,
    open: bool,
    metrics: Option<MetricsFile>,
}

impl Output {
    pub(crate) fn new(args: &TrainArgs) -> Result<Self> {
        let open = |path: &std::path::PathBuf| {
            let format = args.metrics_format.unwrap_or_else(|| MetricsFormat::of(path));
            MetricsFile::open(path, format).with_context(|| {
                format!("cannot open the metrics file {}; give another --metrics-file", path.display())
            })
        };
        let metrics = args.metrics_file.as_ref().map(open).transpose()?;
        Ok(Output { renderer: Renderer::new(args.format), open: true, metrics })
    }

    pub(crate) fn report(&mut self, progress: &Progress) {
        let text = self.renderer.report(progress);
        self.print(&text);
        if let Some(metrics) = &mut self.metrics
            && let Err(error) = metrics.append(progress, SystemTime::now())
        {
            print_message(format_args!("the metrics file is given up, training goes on: {error}"));
            self.metrics = None;
        }
    }

    pub(crate) fn end(&mut self, last: Option<&Progress>) {
        let text = self.renderer.end(last);
        self.print(&text);
    }

    /// One write and one flush per report, so that a reader never waits for a buffer to fill.
    fn print(&mut self, text: &str) {
        if text.is_empty() || !self.open {
            return;
        }
        let written = if self.renderer.on_stderr() {
            io::stderr().write_all(text.as_bytes())
        } else {
            let mut stdout = io::stdout().lock();
            stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
        };
        if let Err(error) = written {
            self.open = false;
            print_message(format_args!("progress can no longer be printed, training goes on: {error}"));
        }
    }
}
