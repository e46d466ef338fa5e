//! Which of a job's metrics is its evaluation function.
//!
//! **Problem.** Jobs report losses, accuracies, learning rates, gradient norms, speeds and memory side by side. Growth is measured on one of them, and
//! changing it in the middle would look like a leap.
//!
//! **How.** A metric that the job names is taken and nothing else. Otherwise names are split into words and ranked: training loss before
//! validation loss before other losses, then other errors, then accuracies, then rewards. Everything about rates, norms, times, counts and
//! memory has no rank. The first metric with a rank is chosen; during the first [`TRIAL_REPORTS`] readings a better one may still replace it.
//!
//! **Properties.** *sticky*: after the trial the choice never changes. *named wins*: a named metric is never replaced.

use serde::{Deserialize, Serialize};

/// Readings after the first choice during which a better-ranked metric may replace it. One line or one summary of any framework has fewer.
const TRIAL_REPORTS: u32 = 20;

/// Whether the job wants its metric to fall or to rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    Minimise,
    Maximise,
}

/// Picks the metric; see the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Chooser {
    named: Option<String>,
    chosen: Option<String>,
    reports: u32,
}

/// What [`Chooser::offer`] thinks of a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It belongs to the chosen metric.
    Take,
    /// It is the first of a newly chosen metric: earlier ones belong to another and should be forgotten.
    TakeAndForget,
    /// It belongs to some other metric.
    Ignore,
}

impl Chooser {
    /// `named`: what the job calls its evaluation function, if it says.
    pub fn new(named: Option<&str>) -> Chooser {
        Chooser { named: named.map(canonical), ..Chooser::default() }
    }

    /// The metric chosen, as the job writes it.
    pub fn metric(&self) -> Option<&str> {
        self.chosen.as_deref()
    }

    /// Whether the chosen metric should fall or rise, as far as its name tells; what is unknown is taken for a loss.
    pub fn goal(&self) -> Goal {
        match self.chosen.as_deref().and_then(rank) {
            Some(rank) if rank >= RISING => Goal::Maximise,
            _ => Goal::Minimise,
        }
    }

    /// Looks at the name of a reading.
    pub fn offer(&mut self, metric: &str) -> Verdict {
        if let Some(chosen) = &self.chosen {
            self.reports = self.reports.saturating_add(1);
            if chosen == metric {
                return Verdict::Take;
            }
            let better = self.named.is_none() && self.reports <= TRIAL_REPORTS && {
                let (new, old) = (rank(metric), rank(chosen));
                new.is_some_and(|new| old.is_none_or(|old| new < old))
            };
            if !better {
                return Verdict::Ignore;
            }
            self.chosen = Some(metric.to_string());
            return Verdict::TakeAndForget;
        }
        let fits = match &self.named {
            Some(name) => canonical(metric) == *name,
            None => rank(metric).is_some(),
        };
        if !fits {
            return Verdict::Ignore;
        }
        self.chosen = Some(metric.to_string());
        Verdict::Take
    }

    /// Whether a metric of this name could be the job's evaluation function.
    pub fn would_take(&self, metric: &str) -> bool {
        match &self.named {
            Some(name) => canonical(metric) == *name,
            None => rank(metric).is_some(),
        }
    }
}

/// Names that differ only in case or in what joins their words are the same name.
fn canonical(name: &str) -> String {
    words(name).join("_")
}

/// Splits `trainLoss`, `train/loss`, `Train Loss` alike into lower-case words.
fn words(name: &str) -> Vec<String> {
    let mut out: Vec<String> = Vec::new();
    let mut word = String::new();
    let mut lower_before = false;
    for c in name.chars() {
        if !c.is_alphanumeric() || (c.is_uppercase() && lower_before) {
            if !word.is_empty() {
                out.push(std::mem::take(&mut word));
            }
            if !c.is_alphanumeric() {
                lower_before = false;
                continue;
            }
        }
        lower_before = c.is_lowercase() || c.is_ascii_digit();
        word.extend(c.to_lowercase());
    }
    if !word.is_empty() {
        out.push(word);
    }
    out
}

/// Ranks from here on should rise.
const RISING: u32 = 100;

/// The lower, the better suited; `None` for what is no evaluation function.
fn rank(name: &str) -> Option<u32> {
    // Most names of a flood are short and plain; nothing is built for those that cannot match.
    const NEVER: [&str; 34] = [
        "lr",
        "rate",
        "grad",
        "gradient",
        "norm",
        "time",
        "eta",
        "sec",
        "secs",
        "seconds",
        "ms",
        "mem",
        "memory",
        "gb",
        "mb",
        "mib",
        "gib",
        "speed",
        "throughput",
        "samples",
        "tokens",
        "scale",
        "scaler",
        "weight",
        "coef",
        "coeff",
        "runtime",
        "momentum",
        "wd",
        "decay",
        "steps",
        "epochs",
        "temperature",
        "beta",
    ];
    let words = words(name);
    let has = |list: &[&str]| words.iter().any(|w| list.contains(&w.as_str()));
    if has(&NEVER) {
        return None;
    }
    let held_out = has(&["val", "valid", "validation", "eval", "evaluation", "test", "dev"]);
    let plain = words.iter().all(|w| {
        ["loss", "train", "training", "epoch", "batch", "avg", "mean", "average", "total"].contains(&w.as_str())
    });
    let best = has(&["best", "min", "max"]);
    let is_loss = words.iter().any(|w| w == "loss" || w == "losses" || (w.ends_with("loss") && w.len() <= 12));
    const ERRORS: [&str; 16] = [
        "nll",
        "perplexity",
        "ppl",
        "mse",
        "rmse",
        "mae",
        "mape",
        "cost",
        "elbo",
        "error",
        "err",
        "bpc",
        "bpb",
        "wer",
        "cer",
        "kl",
    ];
    const SCORES: [&str; 22] = [
        "accuracy",
        "acc",
        "acc1",
        "acc5",
        "top1",
        "top5",
        "f1",
        "auc",
        "auroc",
        "bleu",
        "rouge",
        "iou",
        "miou",
        "map",
        "map50",
        "mrr",
        "precision",
        "recall",
        "r2",
        "dice",
        "psnr",
        "ssim",
    ];
    const REWARDS: [&str; 4] = ["reward", "return", "score", "fitness"];
    let base = if is_loss {
        match words.as_slice() {
            [only] if only == "loss" => 0,
            [a, b] if (a == "train" || a == "training") && b == "loss" => 1,
            [a, b] if a == "loss" && (b == "train" || b == "training") => 2,
            _ if plain => 3,
            _ if held_out => 10,
            _ => 20,
        }
    } else if has(&ERRORS) {
        40
    } else if words.iter().any(|w| SCORES.contains(&w.as_str()) || w.ends_with("accuracy")) {
        RISING
    } else if has(&REWARDS) {
        RISING + 40
    } else {
        return None;
    };
    let held_out_later = if held_out && base != 10 { 5 } else { 0 };
    // A best value so far is a staircase: usable, but only when there is nothing else.
    Some(base + held_out_later + if best { 15 } else { 0 })
}

/// Whether a name is a metric beyond doubt, whatever stands around it.
pub(super) fn is_metric_word(name: &str) -> bool {
    rank(name).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranking_follows_what_trainers_print() {
        let order = [
            "loss",
            "train/loss",
            "Loss/train",
            "epoch_loss",
            "val_loss",
            "cls_loss",
            "best_val_loss",
            "mse",
            "val_mse",
            "accuracy",
            "val_accuracy",
            "episode_reward",
        ];
        let ranks: Vec<_> = order.iter().map(|n| rank(n).unwrap_or_else(|| panic!("{n} has no rank"))).collect();
        assert!(ranks.windows(2).all(|w| w[0] < w[1]), "{ranks:?}");
        for ignored in [
            "lr",
            "learning_rate",
            "grad_norm",
            "epoch",
            "step",
            "it/s",
            "eta",
            "train_runtime",
            "loss_scale",
            "gpu_mem",
            "time",
            "v_num",
            "train_samples_per_second",
            "seed",
            "lossless",
            "localhost",
        ] {
            assert_eq!(rank(ignored), None, "{ignored}");
        }
        assert_eq!(rank("trainLoss"), rank("train_loss"));
        assert_eq!(rank("Train Loss"), rank("train-loss"));
    }

    #[test]
    fn sticky() {
        let mut c = Chooser::new(None);
        assert_eq!(c.offer("lr"), Verdict::Ignore);
        assert_eq!(c.offer("val_loss"), Verdict::Take);
        assert_eq!(c.offer("accuracy"), Verdict::Ignore);
        assert_eq!(c.offer("loss"), Verdict::TakeAndForget);
        for _ in 0..TRIAL_REPORTS {
            assert_eq!(c.offer("loss"), Verdict::Take);
        }
        let mut c = Chooser::new(None);
        c.offer("val_loss");
        for _ in 0..TRIAL_REPORTS {
            c.offer("val_loss");
        }
        assert_eq!(c.offer("loss"), Verdict::Ignore, "too late");
    }

    #[test]
    fn named_wins() {
        let mut c = Chooser::new(Some("Val Acc"));
        assert_eq!(c.offer("loss"), Verdict::Ignore);
        assert_eq!(c.offer("val_acc"), Verdict::Take);
        assert_eq!(c.offer("loss"), Verdict::Ignore);
        assert_eq!((c.metric(), c.goal()), (Some("val_acc"), Goal::Maximise));
    }
}
