//! All lists of words: the names of metrics, steps, files and folders that frameworks use.
//!
//! To teach the crate a new name, add it here. Words of metric names are lower-case ASCII and stand
//! in one sorted table ([`ROLES`]), so that a lookup is a binary search without allocation.

/// The role of one word within the name of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// A name with this word is no evaluation function: rates, norms, times, counts, memory.
    Never,
    /// `loss` itself.
    Loss,
    /// Another word for a loss: `losses`, `nllloss`.
    OtherLoss,
    /// Other quantities that should fall.
    Error,
    /// Quantities that should rise.
    Score,
    /// Returns of reinforcement learning, which should rise and are noisy.
    Reward,
    /// Measured on training data.
    Training,
    /// Measured on data that the job does not train on.
    HeldOut,
    /// The best value so far.
    Best,
    /// Says nothing about which loss it is.
    Filler,
}

use Role::*;

/// Sorted by word; each word once.
const ROLES: [(&str, Role); 96] = [
    ("acc", Score),
    ("acc1", Score),
    ("acc5", Score),
    ("accuracy", Score),
    ("auc", Score),
    ("auroc", Score),
    ("average", Filler),
    ("avg", Filler),
    ("batch", Filler),
    ("best", Best),
    ("beta", Never),
    ("bleu", Score),
    ("bpb", Error),
    ("bpc", Error),
    ("cer", Error),
    ("coef", Never),
    ("coeff", Never),
    ("cost", Error),
    ("decay", Never),
    ("dev", HeldOut),
    ("dice", Score),
    ("elbo", Error),
    ("epoch", Filler),
    ("epochs", Never),
    ("err", Error),
    ("error", Error),
    ("eta", Never),
    ("eval", HeldOut),
    ("evaluation", HeldOut),
    ("f1", Score),
    ("fitness", Reward),
    ("gb", Never),
    ("gib", Never),
    ("grad", Never),
    ("gradient", Never),
    ("iou", Score),
    ("kl", Error),
    ("loss", Loss),
    ("losses", OtherLoss),
    ("lr", Never),
    ("mae", Error),
    ("map", Score),
    ("map50", Score),
    ("mape", Error),
    ("max", Best),
    ("mb", Never),
    ("mean", Filler),
    ("mem", Never),
    ("memory", Never),
    ("mib", Never),
    ("min", Best),
    ("miou", Score),
    ("momentum", Never),
    ("mrr", Score),
    ("ms", Never),
    ("mse", Error),
    ("nll", Error),
    ("norm", Never),
    ("perplexity", Error),
    ("ppl", Error),
    ("precision", Score),
    ("psnr", Score),
    ("r2", Score),
    ("rate", Never),
    ("recall", Score),
    ("return", Reward),
    ("reward", Reward),
    ("rmse", Error),
    ("rouge", Score),
    ("runtime", Never),
    ("samples", Never),
    ("scale", Never),
    ("scaler", Never),
    ("score", Reward),
    ("sec", Never),
    ("seconds", Never),
    ("secs", Never),
    ("speed", Never),
    ("ssim", Score),
    ("steps", Never),
    ("temperature", Never),
    ("test", HeldOut),
    ("throughput", Never),
    ("time", Never),
    ("tokens", Never),
    ("top1", Score),
    ("top5", Score),
    ("total", Filler),
    ("train", Training),
    ("training", Training),
    ("val", HeldOut),
    ("valid", HeldOut),
    ("validation", HeldOut),
    ("wd", Never),
    ("weight", Never),
    ("wer", Error),
];

/// The role of `word`, which is in lower case.
pub(crate) fn role(word: &str) -> Option<Role> {
    if let Ok(i) = ROLES.binary_search_by(|(known, _)| (*known).cmp(word)) {
        return Some(ROLES[i].1);
    }
    match word {
        // `nllloss`, `celoss`; a longer word is prose.
        _ if word.ends_with("loss") && word.len() <= 12 => Some(OtherLoss),
        _ if word.ends_with("accuracy") => Some(Score),
        _ => None,
    }
}

/// What a word counts when a number follows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CountWord {
    Step,
    Epoch,
}

/// Whether `word` names a place in the run rather than a metric. Plurals (`epochs=10`, `batch=64`)
/// count only beside a fraction (`in_fraction`), because alone they are settings.
pub(crate) fn count_word(word: &str, in_fraction: bool) -> Option<CountWord> {
    const STEPS: [&str; 10] = [
        "step",
        "global_step",
        "iter",
        "iteration",
        "it",
        "batch_idx",
        "update",
        "num_updates",
        "train_step",
        "training_step",
    ];
    const EPOCHS: [&str; 4] = ["epoch", "ep", "train_epoch", "current_epoch"];
    const STEPS_OF: [&str; 7] = ["steps", "iters", "iterations", "batch", "batches", "updates", "minibatch"];
    let is = |list: &[&str]| list.iter().any(|w| w.eq_ignore_ascii_case(word));
    if is(&EPOCHS) || (in_fraction && is(&["epochs"])) {
        Some(CountWord::Epoch)
    } else if is(&STEPS) || (in_fraction && is(&STEPS_OF)) {
        Some(CountWord::Step)
    } else {
        None
    }
}

/// The unit in which an option of a command gives the length of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LengthWord {
    Epochs,
    Steps,
}

/// What an option of a training script or a key of its configuration gives, if that is the length of
/// the whole run. Names such as `save_steps` and `steps_per_epoch` are no such options.
pub(crate) fn length_word(name: &str) -> Option<LengthWord> {
    const EPOCHS: [&str; 11] = [
        "epoch",
        "epochs",
        "n_epoch",
        "n_epochs",
        "nb_epochs",
        "num_epoch",
        "num_epochs",
        "max_epoch",
        "max_epochs",
        "total_epochs",
        "num_train_epochs",
    ];
    const STEPS: [&str; 18] = [
        "steps",
        "n_steps",
        "num_steps",
        "max_step",
        "max_steps",
        "total_steps",
        "train_steps",
        "num_train_steps",
        "max_train_steps",
        "training_steps",
        "num_training_steps",
        "iterations",
        "num_iterations",
        "max_iterations",
        "train_iters",
        "max_iters",
        "max_iter",
        "max_update",
    ];
    let name = name.replace('-', "_").to_ascii_lowercase();
    if EPOCHS.contains(&name.as_str()) {
        Some(LengthWord::Epochs)
    } else if STEPS.contains(&name.as_str()) {
        Some(LengthWord::Steps)
    } else {
        None
    }
}

/// Whether an option of a command names a configuration file.
pub(crate) fn is_config_option(name: &str) -> bool {
    let name = name.replace('-', "_");
    ["config", "config_file", "config_path", "cfg", "cfg_file", "hparams"].contains(&name.as_str())
}

/// Endings of the names of Prometheus gauges that count steps.
pub(crate) const STEP_GAUGES: [&str; 4] = ["step", "steps", "iteration", "iterations"];

/// Keys of JSON objects that give the number of steps of the whole run.
pub(crate) const TOTAL_KEYS: [&str; 3] = ["total", "total_steps", "max_steps"];

/// Keys of JSON objects that only wrap the metrics and are no part of their names.
pub(crate) const WRAPPER_KEYS: [&str; 6] = ["metrics", "logs", "log", "data", "values", "scalars"];

/// Words that make `Train Loss: 0.3` a different metric than `Loss: 0.3`.
pub(crate) fn is_qualifier(word: &str) -> bool {
    const QUALIFIERS: [&str; 20] = [
        "train",
        "training",
        "val",
        "valid",
        "validation",
        "eval",
        "evaluation",
        "test",
        "dev",
        "avg",
        "average",
        "mean",
        "running",
        "total",
        "best",
        "batch",
        "epoch",
        "final",
        "g",
        "d",
    ];
    QUALIFIERS.iter().any(|q| q.eq_ignore_ascii_case(word))
}

/// Whether a bar with this title does not measure training: data preparation, checkpoints, validation.
pub(crate) fn is_chore(title: &[u8]) -> bool {
    const CHORES: [&[u8]; 17] = [
        b"valid",
        b"sanity",
        b"test",
        b"predict",
        b"eval",
        b"download",
        b"upload",
        b"loading",
        b"map",
        b"filter",
        b"tokeniz",
        b"generating",
        b"fetch",
        b"saving",
        b"extract",
        b"preprocess",
        b"writing",
    ];
    let title = title.to_ascii_lowercase();
    CHORES.iter().any(|chore| title.windows(chore.len()).any(|w| w == *chore))
}

/// Beginnings of folder names that separate training from validation in event files.
pub(crate) const SPLIT_FOLDERS: [&str; 5] = ["train", "val", "eval", "test", "dev"];

/// Whether a file has a name that trainers give to their metrics: Lightning, YOLO, Keras examples,
/// Katib, plain scripts.
pub(crate) fn is_metrics_file(name: &[u8]) -> bool {
    const NAMES: [&[u8]; 12] = [
        b"metrics.csv",
        b"metrics.jsonl",
        b"metrics.ndjson",
        b"metrics.log",
        b"metrics.txt",
        b"training.csv",
        b"training_log.csv",
        b"train_log.csv",
        b"train_log.jsonl",
        b"log.csv",
        b"history.csv",
        b"results.csv",
    ];
    NAMES.contains(&name)
}

/// Whether a file has the name of a TensorBoard event file.
pub(crate) fn is_event_file(name: &[u8]) -> bool {
    name.windows(9).any(|w| w == b".tfevents")
}

/// Whether a folder of this name holds code, data or caches.
pub(crate) fn is_foreign_folder(name: &[u8]) -> bool {
    const FOREIGN: [&[u8]; 8] =
        [b"node_modules", b"site-packages", b"__pycache__", b"venv", b"data", b"dataset", b"datasets", b"wandb"];
    name.starts_with(b".") || FOREIGN.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_has_each_word_once() {
        let wrong: Vec<_> = ROLES.windows(2).filter(|w| w[0].0 >= w[1].0).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }

    #[test]
    fn endings_count_for_words_that_are_not_in_the_table() {
        assert_eq!(role("nllloss"), Some(OtherLoss));
        assert_eq!(role("balancedaccuracy"), Some(Score));
        assert_eq!((role("lossless"), role("thebiggestoftheloss")), (None, None));
    }
}
