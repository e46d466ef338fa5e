//! How long a job is to run, from the command that started it.
//!
//! **Problem.** Many scripts print where they are but not how far they have to go: PyTorch's own
//! examples print `Train Epoch: 1 [640/60000 (1%)]`, and the 14 epochs stand only in the command
//! line. **Approach.** Options such as `--epochs 14`, `--max_steps=1000` and
//! `trainer.max_epochs=10` are read from the command, and the same keys from a configuration file
//! that the command names (`--config run.yaml`; YAML, TOML and JSON alike, line by line).
//!
//! **Properties.** The command counts before the file. A name that occurs with two different values
//! is ignored, because it is not known which one holds. The number is a claim: [`crate::steps`]
//! drops it as soon as the job goes beyond it, and what the job itself prints always counts first.

use crate::root::Root;
use crate::words::{LengthWord, is_config_option, length_word};
use gainshare_core::signal::ClaimSource;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::Path;

/// A configuration file is read up to here.
const MAX_CONFIG_BYTES: u64 = 256 << 10;

/// Counts beyond this are no length of a run: `--epochs 1000000000` means "until I stop it".
const MAX_LENGTH: u64 = 100_000_000;

/// The length of a run as the command announces it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunLength {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub epochs: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Only the configuration file that the command names has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_config: bool,
}

impl RunLength {
    /// Reads `command`, and the configuration file that it names if that lies in the job's `folder`.
    pub fn read(command: &[String], folder: Option<&Path>) -> RunLength {
        let options = options(command);
        let mut found = StatedLengths::default();
        for (name, value) in &options {
            found.add(name, value);
        }
        let length = found.length();
        if length != RunLength::default() {
            return length;
        }
        let config = options.iter().find(|(name, _)| is_config_option(name));
        let text = config.zip(folder).and_then(|((_, path), folder)| read_config(folder, Path::new(path)));
        let mut length = text.map_or(length, |text| RunLength::from_config(&text));
        length.in_config = !length.is_empty();
        length
    }

    /// Reads lines such as `max_steps: 1000`, `epochs = 3` and `"num_train_epochs": 3,`.
    pub fn from_config(text: &str) -> RunLength {
        let mut found = StatedLengths::default();
        // A JSON file may stand on one line.
        for line in text.split(['\n', ',', '{', '}']) {
            let line = line.split('#').next().unwrap_or(line);
            if let Some((name, value)) = line.split_once([':', '=']) {
                let clean = |part: &str| part.trim().trim_matches(['"', '\'']).trim().to_owned();
                found.add(&clean(name), &clean(value));
            }
        }
        found.length()
    }

    pub fn is_empty(&self) -> bool {
        *self == RunLength::default()
    }

    /// Where it was read.
    pub(crate) fn source(&self) -> ClaimSource {
        if self.in_config { ClaimSource::Config } else { ClaimSource::Command }
    }
}

/// Every `--name value`, `--name=value` and `name=value` of a command.
fn options(command: &[String]) -> Vec<(String, String)> {
    let mut options = Vec::new();
    for (i, word) in command.iter().enumerate() {
        let name = word.trim_start_matches('-');
        match name.split_once('=') {
            Some((name, value)) => options.push((name.to_owned(), value.to_owned())),
            None if word.starts_with('-') => {
                if let Some(value) = command.get(i + 1) {
                    options.push((name.to_owned(), value.clone()));
                }
            }
            None => {}
        }
    }
    options
}

fn read_config(folder: &Path, path: &Path) -> Option<String> {
    let root = Root::open(folder).ok()?;
    let file = root.file(root.relative(path)?).ok()?;
    let mut bytes = Vec::new();
    file.take(MAX_CONFIG_BYTES).read_to_end(&mut bytes).ok()?;
    String::from_utf8(bytes).ok()
}

/// The values found so far for one unit.
#[derive(Default, Clone, Copy)]
enum StatedLength {
    #[default]
    None,
    One(u64),
    Contradiction,
}

impl StatedLength {
    fn add(&mut self, value: u64) {
        *self = match *self {
            StatedLength::None => StatedLength::One(value),
            StatedLength::One(known) if known == value => StatedLength::One(known),
            _ => StatedLength::Contradiction,
        };
    }

    fn value(self) -> Option<u64> {
        match self {
            StatedLength::One(value) => Some(value),
            StatedLength::None | StatedLength::Contradiction => None,
        }
    }
}

#[derive(Default)]
struct StatedLengths {
    epochs: StatedLength,
    steps: StatedLength,
}

impl StatedLengths {
    fn add(&mut self, name: &str, value: &str) {
        // `trainer.max_epochs=10`: the last part is the name.
        let short = name.rsplit(['.', '/']).next().unwrap_or(name);
        let Some(word) = length_word(short) else { return };
        // Frameworks write -1 or 0 for "no bound".
        let Some(value) = value.parse::<u64>().ok().filter(|v| (1..=MAX_LENGTH).contains(v)) else { return };
        match word {
            LengthWord::Epochs => self.epochs.add(value),
            LengthWord::Steps => self.steps.add(value),
        }
    }

    fn length(&self) -> RunLength {
        RunLength { epochs: self.epochs.value(), steps: self.steps.value(), in_config: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(command: &str) -> (Option<u64>, Option<u64>) {
        let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let length = RunLength::read(&words, None);
        (length.epochs, length.steps)
    }

    #[test]
    fn common_options_are_read() {
        assert_eq!(of("python main.py --epochs 14 --lr 0.1"), (Some(14), None));
        assert_eq!(of("python run.py --num_train_epochs=3 --max_steps -1"), (Some(3), None));
        assert_eq!(of("python train.py trainer.max_epochs=10 trainer.max_steps=500"), (Some(10), Some(500)));
        assert_eq!(of("gainshare train vae --steps 1200 --report-every 5"), (None, Some(1200)));
        assert_eq!(of("python t.py --num-epochs 2"), (Some(2), None));
        assert_eq!(of("fairseq-train data --max-epoch 30"), (Some(30), None));
    }

    #[test]
    fn what_is_not_a_length_is_left_alone() {
        assert_eq!(of("python t.py --epochs many"), (None, None));
        assert_eq!(of("python t.py --epochs 1.5"), (None, None));
        assert_eq!(of("python t.py --steps-per-epoch 100"), (None, None));
        assert_eq!(of("python t.py --save_steps 500 --warmup-epochs 5"), (None, None));
        assert_eq!(of("python t.py --epochs 1000000000"), (None, None));
        assert_eq!(of("python t.py --epochs"), (None, None));
        assert_eq!(of("python t.py --epochs 3 --epochs 5"), (None, None));
    }

    #[test]
    fn a_configuration_file_is_read() {
        assert_eq!(RunLength::from_config("lr: 0.1\ntrainer:\n  max_epochs: 20 # enough\n").epochs, Some(20));
        assert_eq!(RunLength::from_config("[train]\nmax_iters = 5000\n").steps, Some(5000));
        assert_eq!(RunLength::from_config(r#"{"lr": 0.1, "num_train_epochs": 3}"#).epochs, Some(3));
        assert!(RunLength::from_config("a:\n  epochs: 2\nb:\n  epochs: 3\n").is_empty());
        assert!(RunLength::from_config("\u{0}:::=,{{{").is_empty());
    }

    #[test]
    fn the_named_file_is_found_and_the_command_counts_first() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("run.yaml"), "epochs: 7\n").unwrap();
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let read = |text: &str| RunLength::read(&words(text), Some(folder.path())).epochs;
        assert_eq!(read("python t.py --config run.yaml"), Some(7));
        assert_eq!(read("python t.py --config=run.yaml --epochs 2"), Some(2));
        assert_eq!(read("python t.py --config ../run.yaml"), None, "no file outside the job's folder is read");
        assert_eq!(read("python t.py --config missing.yaml"), None);
    }
}
