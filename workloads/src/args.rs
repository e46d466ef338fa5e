//! The options of a training run on the command line.

use std::path::PathBuf;

use crate::metrics_file::MetricsFormat;
use crate::models::ModelKind;
use crate::report::Format;
use crate::trainer::Setup;

/// Train a built-in model with real gradients on data made by the program itself.
///
/// The reported loss is measured on a fixed held-out batch, not on the batch of the last step, so that it
/// changes only with the model and not with the data.
///
/// A step with default sizes costs about 6 to 16 ms of one core (vae 9, mlp 6, lstm 13, gru 9, birnn 16, reports
/// included, on a server core of 2.5 GHz). The measured cost is printed on standard error at the end. In a run of 700
/// steps, the first fifth makes 70 to 95 % of the whole loss reduction.
///
/// SIGTERM and SIGINT end the run after the current step, with a last checkpoint if --checkpoint is given; the exit
/// code is then 143 or 130. The same command, run again, continues after that step.
#[derive(Debug, Clone, clap::Args)]
pub struct TrainArgs {
    /// Model to train
    #[arg(value_enum)]
    pub model: ModelKind,

    /// Steps to take in all, those before a resume included
    #[arg(
        long,
        value_name = "N",
        env = "GAINSHARE_TRAIN_STEPS",
        default_value_t = 1000,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub steps: u64,

    /// Epochs to take in all instead of --steps; an epoch is 4096 examples
    #[arg(
        long,
        value_name = "N",
        conflicts_with = "steps",
        value_parser = clap::value_parser!(u64).range(1..1_000_000_000)
    )]
    pub epochs: Option<u64>,

    /// Stop early once the reported loss is at or below this value
    #[arg(long, value_name = "LOSS", value_parser = positive, allow_negative_numbers = true)]
    pub until_loss: Option<f64>,

    /// Examples per step [default: 64; lstm and gru 32]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub batch: Option<u32>,

    /// Width of the hidden layers [default: vae 400, mlp 512, others 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub hidden: Option<u32>,

    /// First learning rate of the Adam optimizer; it falls with the square root of the step [default: vae and mlp
    /// 0.001, birnn 0.002, gru 0.004, lstm 0.006]
    #[arg(long, value_name = "RATE", value_parser = positive, allow_negative_numbers = true)]
    pub lr: Option<f64>,

    /// Seed of the data, the initial weights and the noise; the same seed gives the same losses
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,

    /// Cores the matrix products may use
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: u32,

    /// Report every N steps, and at the end of every epoch and of the run
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    pub report_every: u64,

    /// How progress is printed, after what the named framework prints
    #[arg(long, value_enum, default_value_t = Format::Kv)]
    pub format: Format,

    /// Also append every report to this file; .csv and .jsonl give those formats, other names Katib's text
    #[arg(long, value_name = "PATH")]
    pub metrics_file: Option<PathBuf>,

    /// Format of the metrics file [default: by its name]
    #[arg(long, value_enum, value_name = "FORMAT", requires = "metrics_file")]
    pub metrics_format: Option<MetricsFormat>,

    /// Directory for checkpoints; a run that finds one there continues from it
    #[arg(long, value_name = "DIR")]
    pub checkpoint: Option<PathBuf>,

    /// Steps between two checkpoints; 0 saves only at the end and when asked to stop
    #[arg(long, value_name = "N", default_value_t = 200, requires = "checkpoint")]
    pub checkpoint_every: u64,

    /// What to do with checkpoints in the directory: continue from the newest whole one (auto), insist on one
    /// (must), or start from the first step and replace them (never)
    #[arg(
        long,
        value_enum,
        value_name = "WHEN",
        num_args = 0..=1,
        require_equals = true,
        default_value = "auto",
        default_missing_value = "must",
        requires = "checkpoint"
    )]
    pub resume: Resume,

    /// Number of this attempt at the job; a run of a lower number can no longer write to the checkpoint directory
    #[arg(long, value_name = "N", env = "GAINSHARE_ATTEMPT", default_value_t = 0)]
    pub attempt: u64,
}

/// Whether a run continues from a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Resume {
    Auto,
    Must,
    Never,
}

impl TrainArgs {
    pub(crate) fn setup(&self) -> Setup {
        let defaults = self.model.defaults();
        Setup {
            kind: self.model,
            hidden: self.hidden.map_or(defaults.hidden, |n| n as usize),
            batch: self.batch.map_or(defaults.batch, |n| n as usize),
            learning_rate: self.lr.unwrap_or(defaults.learning_rate),
            seed: self.seed,
        }
    }

    pub(crate) fn total_steps(&self, setup: &Setup) -> u64 {
        self.epochs.map_or(self.steps, |epochs| epochs * setup.epoch_steps())
    }
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if value > 0.0 && value.is_finite() => Ok(value),
        _ => Err("give a number above zero".to_owned()),
    }
}
