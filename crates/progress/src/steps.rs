//! From the counts on single lines to a step of the whole run.
//!
//! A bar counts the batches of one epoch and starts over with the next, but a curve needs a step
//! that only grows. So a bar within `Epoch 3/10` becomes a step of the whole run (with 200 batches
//! each, `37/200` is step 437 of 2000), and a bar that starts over without any word about epochs is
//! counted as another pass of unknown number. Bars of other lengths (validation, evaluation) do not
//! disturb it. Where the job prints no number of epochs or steps, the one in its command counts
//! ([`crate::run_length`]), until the job goes beyond it.
//!
//! **Properties.** `step` never exceeds `total`. All arithmetic saturates.

use crate::facts::{Count, Epoch, Facts};
use crate::reading::{Progress, Unit};
use crate::run_length::RunLength;
use gainshare_core::signal::ClaimSource;
use serde::{Deserialize, Serialize};

/// Bars of different lengths that are remembered. A job has one for training, perhaps two for
/// evaluation.
const MAX_BARS: usize = 4;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct RunSteps {
    /// Set by a line such as `Epoch 3/10`; holds for the lines after it.
    epoch: Option<RunningEpoch>,
    /// Bars seen while no epoch is known.
    bars: Vec<Bar>,
    /// The last bar or step, which also holds for a dict printed between two redraws.
    last_step: Option<Progress>,
    /// The job reports epochs such as 0.5, as Hugging Face does. Then its whole epochs too are a
    /// measure of time, not a count.
    fractional: bool,
    /// What the command claims about the length of the run.
    #[serde(default, skip_serializing_if = "RunLength::is_empty")]
    claim: RunLength,
    /// The number of the job's first epoch, 0 or 1, where the claim is needed to place epochs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    first_epoch: Option<u64>,
    /// Where the newest total was read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    claim_source: Option<ClaimSource>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct RunningEpoch {
    over: u64,
    total: u64,
    /// Length of this epoch's bar: the first one seen in it.
    length: Option<u64>,
    /// The highest count in this epoch, and the length and the highest count in the one before.
    at: u64,
    before: Option<(u64, u64)>,
    /// The count goes on from epoch to epoch: it is of the whole run already.
    global: bool,
    /// The number of epochs is from the command.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    by_command: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Bar {
    /// Drawn, as opposed to written in words.
    drawn: bool,
    length: u64,
    at: u64,
    passes: u64,
}

/// The step of the readings on a line, and the job's progress after it.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct LineStep {
    pub(crate) step: Option<u64>,
    pub(crate) total: Option<u64>,
    pub(crate) progress: Option<Progress>,
}

impl RunSteps {
    /// Takes what the command claims about the length of the run. To be called before the first line.
    pub(crate) fn set_claim(&mut self, claim: RunLength) {
        self.claim = claim;
    }

    /// Where the newest total was read.
    pub(crate) fn claim_source(&self) -> Option<ClaimSource> {
        self.claim_source
    }

    pub(crate) fn take_line(&mut self, facts: &Facts) -> LineStep {
        self.fractional |= facts.fractional_epoch;
        let on_line = facts.epoch.map(|e| self.complete_epoch(e));
        let by_command = facts.epoch.is_some_and(|e| e.total.is_none());
        let epoch = on_line.and_then(|e| self.take_epoch(e, by_command));
        let own = match facts.step {
            Some(count) => match count.total {
                // A step that stands alone counts the whole run.
                None => Some(Progress { step: count.at, total: self.claimed_steps(count.at), unit: Unit::Step }),
                Some(length) => self.take_bar(count, length, on_line),
            },
            None => None,
        };
        self.last_step = own.or(self.last_step);
        // Steps say more than epochs. A bar that is not the one of the training has no step.
        let place = if facts.step.is_some() { own } else { self.last_step.or(epoch) };
        if facts.step.is_none() && self.last_step.is_none() && epoch.is_some_and(|e| e.total.is_some()) {
            self.claim_source = Some(self.source_of_epochs(by_command));
        }
        let progress = own.map(|own| self.furthest(own)).or(epoch.filter(|_| self.last_step.is_none()));
        LineStep { step: place.map(|p| p.step), total: place.and_then(|p| p.total), progress }
    }

    /// The number of steps by the command, dropped for good once the job is beyond it.
    fn claimed_steps(&mut self, at: u64) -> Option<u64> {
        self.claim.steps = self.claim.steps.filter(|&steps| at <= steps);
        if self.claim.steps.is_some() {
            self.claim_source = Some(self.claim.source());
        }
        self.claim.steps
    }

    /// Where a number of epochs was read.
    fn source_of_epochs(&self, by_command: bool) -> ClaimSource {
        if by_command { self.claim.source() } else { ClaimSource::Output }
    }

    /// Adds the number of epochs by the command to an epoch that is written without one.
    fn complete_epoch(&mut self, epoch: Epoch) -> Epoch {
        if epoch.total.is_some() || self.fractional {
            return epoch;
        }
        if self.first_epoch.is_none() {
            if self.claim.epochs.is_none() {
                return epoch;
            }
            self.first_epoch = Some(epoch.at.min(1));
        }
        // An epoch 0 after an epoch 1 is another run in the same output; places stay as they were.
        let over = epoch.at.saturating_sub(self.first_epoch.unwrap_or(0));
        self.claim.epochs = self.claim.epochs.filter(|&epochs| over < epochs);
        match self.claim.epochs {
            Some(epochs) => Epoch { at: over.saturating_add(1), total: Some(epochs), over },
            None => Epoch { over, ..epoch },
        }
    }

    fn take_epoch(&mut self, epoch: Epoch, by_command: bool) -> Option<Progress> {
        match epoch.total {
            Some(total) => {
                let same = self.epoch.as_ref().is_some_and(|e| e.over == epoch.over && e.total == total);
                if !same {
                    let before = self.epoch.take();
                    let global = before.as_ref().is_some_and(|e| e.global);
                    let before = before.and_then(|e| Some((e.length?, e.at)));
                    let (over, length, at) = (epoch.over, None, 0);
                    self.epoch = Some(RunningEpoch { over, total, length, at, before, global, by_command });
                }
            }
            None if self.fractional => return None,
            None => {}
        }
        Some(Progress { step: epoch.at, total: epoch.total, unit: Unit::Epoch })
    }

    /// A bar may lag behind what the job writes about the same steps; the furthest count is right.
    fn furthest(&self, own: Progress) -> Progress {
        let bars = self.bars.iter().filter(|b| self.epoch.is_none() && Some(b.length) == own.total && b.passes == 0);
        let step = bars.map(|b| b.at).fold(own.step, u64::max);
        // A stored bar may be garbage.
        Progress { step: step.min(own.total.unwrap_or(u64::MAX)), ..own }
    }

    fn take_bar(
        &mut self,
        Count { at, bar: drawn, .. }: Count,
        length: u64,
        on_line: Option<Epoch>,
    ) -> Option<Progress> {
        let step_of = |over: u64| over.saturating_mul(length).saturating_add(at);
        let shown_by = if drawn { ClaimSource::Bar } else { ClaimSource::Output };
        let by_command = self.claim.source();
        // Lightning's `Epoch 3: 37/100` does not say how many epochs there will be.
        if let Some(Epoch { over, total: None, .. }) = on_line {
            let here = Progress { step: step_of(over), total: None, unit: Unit::Step };
            // It also sets the bar back to zero before it names the next epoch.
            return Some(self.last_step.filter(|last| at == 0 && last.step > here.step).unwrap_or(here));
        }
        if let Some(epoch) = &mut self.epoch {
            if epoch.length.is_none() {
                epoch.global |= epoch.before.is_some_and(|(len, highest)| len == length && at > highest);
            }
            if *epoch.length.get_or_insert(length) != length {
                return None;
            }
            epoch.at = epoch.at.max(at);
            if epoch.global {
                self.claim_source = Some(shown_by);
                return Some(Progress { step: at, total: Some(length), unit: Unit::Step });
            }
            let step = step_of(epoch.over);
            // Lightning sets the bar back to zero before it names the next epoch.
            if let Some(last) = self.last_step.filter(|last| at == 0 && last.step > step) {
                return Some(last);
            }
            self.claim_source = Some(if epoch.by_command { by_command } else { ClaimSource::Output });
            let total = epoch.total.saturating_mul(length).max(step);
            return Some(Progress { step, total: Some(total), unit: Unit::Step });
        }
        let longest = self.bars.iter().all(|b| b.length <= length);
        let i = match self.bars.iter().position(|b| (b.drawn, b.length) == (drawn, length)) {
            Some(i) => i,
            None => {
                if self.bars.len() >= MAX_BARS {
                    self.bars.remove(0);
                }
                self.bars.push(Bar { drawn, length, at: 0, passes: 0 });
                self.bars.len() - 1
            }
        };
        let bar = &mut self.bars[i];
        // Lines of several processes may come out of order. Only a fall far back is a new pass.
        if at < bar.at / 2 {
            bar.passes = bar.passes.saturating_add(1);
            bar.at = at;
        }
        bar.at = bar.at.max(at);
        let step = bar.passes.saturating_mul(length).saturating_add(at);
        // The first pass may be the whole run; after it the bar is known to be one of an epoch.
        let total = match bar.passes {
            0 => Some(length),
            passes => self.claim.epochs.filter(|&n| passes < n).map(|n| n.saturating_mul(length)),
        };
        if longest && total.is_some() {
            self.claim_source = Some(if bar.passes == 0 { shown_by } else { by_command });
        }
        longest.then_some(Progress { step, total, unit: Unit::Step })
    }
}
