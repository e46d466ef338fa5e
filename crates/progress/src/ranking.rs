//! Ranks a metric by its name: how well it serves as a job's evaluation function.
//!
//! A name is split into lower-case words (`trainLoss`, `train/loss` and `Train Loss` alike), each
//! word has a role ([`crate::words`]), and the roles give the rank: training loss before validation
//! loss before other losses, then other errors, then accuracies, then rewards. Names about rates,
//! norms, times, counts and memory have no rank.
//!
//! **Properties.** Ranking a name allocates nothing: the words lie in a buffer on the stack. A name
//! too long for the buffer has no rank.

use crate::reading::MAX_NAME;
use crate::words::{Role, role};
use serde::{Deserialize, Serialize};

/// Whether a job wants its metric to fall or to rise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    Minimize,
    Maximize,
}

/// The lower, the better suited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank(u32);

impl Rank {
    const LOSS: u32 = 0;
    const HELD_OUT_LOSS: u32 = 10;
    const OTHER_LOSS: u32 = 20;
    const ERROR: u32 = 40;
    const SCORE: u32 = 100;
    const REWARD: u32 = 140;

    /// The direction in which a metric of this rank improves.
    pub(crate) fn goal(self) -> Goal {
        if self.0 >= Rank::SCORE { Goal::Maximize } else { Goal::Minimize }
    }
}

/// The rank of a metric; `None` if it is no evaluation function.
pub(crate) fn rank(name: &str) -> Option<Rank> {
    let mut buffer = [0; 2 * MAX_NAME];
    let name = canonical_text(name, &mut buffer)?;
    let (mut held_out, mut best, mut plain) = (false, false, true);
    let (mut loss, mut error, mut score, mut reward) = (false, false, false, false);
    for word in name.split('_') {
        let role = role(word);
        plain &= matches!(role, Some(Role::Loss | Role::Training | Role::Filler));
        match role {
            Some(Role::Never) => return None,
            Some(Role::Loss | Role::OtherLoss) => loss = true,
            Some(Role::Error) => error = true,
            Some(Role::Score) => score = true,
            Some(Role::Reward) => reward = true,
            Some(Role::HeldOut) => held_out = true,
            Some(Role::Best) => best = true,
            Some(Role::Training | Role::Filler) | None => {}
        }
    }
    let base = if loss {
        match name {
            "loss" => Rank::LOSS,
            "train_loss" | "training_loss" => Rank::LOSS + 1,
            "loss_train" | "loss_training" => Rank::LOSS + 2,
            _ if plain => Rank::LOSS + 3,
            _ if held_out => Rank::HELD_OUT_LOSS,
            _ => Rank::OTHER_LOSS,
        }
    } else if error {
        Rank::ERROR
    } else if score {
        Rank::SCORE
    } else if reward {
        Rank::REWARD
    } else {
        return None;
    };
    let after_training = if held_out && base != Rank::HELD_OUT_LOSS { 5 } else { 0 };
    // The best value so far is a staircase. It is used only when the job reports nothing else.
    let after_current = if best { 15 } else { 0 };
    Some(Rank(base + after_training + after_current))
}

/// Whether a name is certainly a metric, whatever stands around it.
pub(crate) fn is_metric_word(name: &str) -> bool {
    rank(name).is_some()
}

/// `name` in canonical form: names that differ only in case or in what joins their words are equal.
pub(crate) fn canonical(name: &str) -> String {
    canonical_chars(name).collect()
}

/// Whether the canonical form of `name` is `canonical`. Allocates nothing.
pub(crate) fn is_canonical_of(canonical: &str, name: &str) -> bool {
    canonical_chars(name).eq(canonical.chars())
}

/// The characters of the canonical form: lower case, one underscore between two words.
fn canonical_chars(name: &str) -> impl Iterator<Item = char> + '_ {
    let (mut lower_before, mut in_word, mut any) = (false, false, false);
    name.chars().flat_map(move |c| {
        let part_of_word = c.is_alphanumeric();
        if !part_of_word || (c.is_uppercase() && lower_before) {
            in_word = false;
        }
        let begins = part_of_word && !in_word;
        let separator = begins && any;
        if part_of_word {
            (in_word, any) = (true, true);
            lower_before = c.is_lowercase() || c.is_ascii_digit();
        } else {
            lower_before = false;
        }
        let word = part_of_word.then(|| c.to_lowercase()).into_iter().flatten();
        separator.then_some('_').into_iter().chain(word)
    })
}

/// Writes the canonical form into `buffer`; `None` if it does not fit.
fn canonical_text<'a>(name: &str, buffer: &'a mut [u8]) -> Option<&'a str> {
    let mut length = 0;
    // Most names are one plain word already, and a flood has thousands of them.
    if !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase()) {
        let word = buffer.get_mut(..name.len())?;
        word.copy_from_slice(name.as_bytes());
        return std::str::from_utf8(word).ok();
    }
    for c in canonical_chars(name) {
        let end = length + c.len_utf8();
        c.encode_utf8(buffer.get_mut(length..end)?);
        length = end;
    }
    std::str::from_utf8(&buffer[..length]).ok()
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
            "",
            "___",
        ] {
            assert_eq!(rank(ignored), None, "{ignored}");
        }
        assert_eq!(rank("trainLoss"), rank("train_loss"));
        assert_eq!(rank("Train Loss"), rank("train-loss"));
        assert_eq!(rank(&"loss_".repeat(200)), None, "too long for any name");
        assert_eq!(rank(&"loss".repeat(200)), None, "too long for any name");
    }

    #[test]
    fn names_that_differ_in_joints_or_case_are_equal() {
        for name in ["val_acc", "Val Acc", "valAcc", "VAL/ACC", "__val--acc__"] {
            assert_eq!(canonical(name), "val_acc", "{name}");
            assert!(is_canonical_of("val_acc", name), "{name}");
        }
        assert!(!is_canonical_of("val_acc", "val_accuracy") && !is_canonical_of("val_acc", "val"));
        assert_eq!(canonical("ÄrgerÜber"), "ärger_über");
        assert_eq!(canonical("top5acc"), "top5acc");
    }

    #[test]
    fn the_rank_tells_the_direction() {
        let goal = |name| rank(name).map(Rank::goal);
        assert_eq!((goal("val_loss"), goal("ppl")), (Some(Goal::Minimize), Some(Goal::Minimize)));
        assert_eq!((goal("val_acc"), goal("mean_return")), (Some(Goal::Maximize), Some(Goal::Maximize)));
    }
}
