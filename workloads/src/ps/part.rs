//! One server's part of the parameters, and the state that a step changes.
//!
//! Pure: no sockets, no files, no clock. The part of server `i` of `n` is the `i`-th of `n` nearly equal ranges of
//! the row of all parameters. The optimizer works on each number alone once gradients are clipped, which the workers
//! do, so that parts give the same bits as the whole.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::adam::Adam;
use crate::checkpoint::{Array, State};
use crate::tensor::Tensor;
use crate::trainer::{Setup, Trainer, TrainerError};

/// The range of server `index` of `servers` in a row of `total` parameters.
pub(crate) fn range(total: usize, index: u32, servers: u32) -> Range<usize> {
    let at = |i: u32| (total as u128 * u128::from(i) / u128::from(servers.max(1))) as usize;
    at(index)..at(index + 1)
}

pub(crate) struct Part {
    /// Identify the part in a checkpoint: the settings of the run and the server's place.
    settings: BTreeMap<String, String>,
    setup: Setup,
    range: Range<usize>,
    values: Tensor,
    adam: Adam,
    step: u64,
}

impl Part {
    /// The part before the first step.
    pub(crate) fn new(setup: &Setup, settings: BTreeMap<String, String>, index: u32, servers: u32) -> Part {
        let all = Trainer::new(setup.clone(), 1).flat_parameters();
        let range = range(all.len(), index, servers);
        let values = Tensor::new(1, range.len(), all[range.clone()].to_vec());
        let adam = Adam::new(std::slice::from_ref(&values), setup.learning_rate, None);
        let mut settings = settings;
        // The length of a run may differ from that of the run which a checkpoint comes from.
        settings.remove("steps");
        settings.insert("servers".to_owned(), servers.to_string());
        settings.insert("server".to_owned(), index.to_string());
        Part { settings, setup: setup.clone(), range, values, adam, step: 0 }
    }

    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    pub(crate) fn values(&self) -> &[f32] {
        self.values.values()
    }

    /// Takes one step with the average of these gradients, which all have the length of the part.
    pub(crate) fn apply<'a>(&mut self, gradients: impl IntoIterator<Item = &'a [f32]>) {
        let mut sum = vec![0.0f32; self.len()];
        let mut count = 0.0f32;
        for gradient in gradients {
            // A sum that starts with the first gradient keeps its bits, also the sign of a zero.
            if count == 0.0 {
                sum.copy_from_slice(gradient);
            } else {
                sum.iter_mut().zip(gradient).for_each(|(sum, value)| *sum += value);
            }
            count += 1.0;
        }
        sum.iter_mut().for_each(|value| *value /= count.max(1.0));
        self.step += 1;
        let gradient = Tensor::new(1, sum.len(), sum);
        self.adam.update(std::slice::from_mut(&mut self.values), &[gradient], self.step);
    }

    pub(crate) fn state(&self) -> State {
        let moments = &self.adam.moments[0];
        let groups = [("param", self.values()), ("adam.first", &moments.first), ("adam.second", &moments.second)];
        let array = |values: &[f32]| Array { shape: vec![values.len()], values: values.to_vec() };
        let arrays = groups.map(|(name, values)| (format!("{name}.part"), array(values)));
        State { step: self.step, settings: self.settings.clone(), arrays: arrays.into() }
    }

    /// Continues from a saved state. After an error the part is unchanged.
    pub(crate) fn restore(&mut self, mut state: State) -> Result<(), TrainerError> {
        for (name, mine) in &self.settings {
            let theirs = state.settings.remove(name).unwrap_or_default();
            if theirs != *mine {
                return Err(TrainerError::OtherPart { name: name.clone(), theirs, mine: mine.clone() });
            }
        }
        let mut take = |group: &str| {
            let name = format!("{group}.part");
            match state.arrays.remove(&name) {
                Some(array) if array.values.len() == self.range.len() => Ok(array.values),
                _ => Err(TrainerError::Incomplete { name }),
            }
        };
        let (values, first, second) = (take("param")?, take("adam.first")?, take("adam.second")?);
        self.values.values_mut().copy_from_slice(&values);
        (self.adam.moments[0].first, self.adam.moments[0].second) = (first, second);
        self.step = state.step;
        Ok(())
    }

    /// Goes back to the state before the first step.
    pub(crate) fn restart(&mut self) {
        let all = Trainer::new(self.setup.clone(), 1).flat_parameters();
        self.values.values_mut().copy_from_slice(&all[self.range.clone()]);
        self.adam = Adam::new(std::slice::from_ref(&self.values), self.setup.learning_rate, None);
        self.step = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::ModelKind;
    use crate::trainer::TRAINING_STREAM;

    fn setup(kind: ModelKind) -> Setup {
        Setup { kind, hidden: 7, batch: 4, learning_rate: 0.004, seed: 3 }
    }

    #[test]
    fn ranges_cover_all_parameters_once() {
        for (total, servers) in [(10, 3), (7, 7), (3, 5), (0, 2), (1_000_003, 64)] {
            let ranges: Vec<_> = (0..servers).map(|i| range(total, i, servers)).collect();
            assert_eq!((ranges[0].start, ranges[ranges.len() - 1].end), (0, total));
            assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
            let sizes = || ranges.iter().map(|r| r.len());
            assert!(sizes().max().unwrap() - sizes().min().unwrap() <= 1, "{ranges:?}");
        }
    }

    /// Three parts with one worker's gradients equal the ordinary trainer, with and without clipping.
    #[test]
    fn parts_give_the_bits_of_the_whole() {
        for kind in [ModelKind::Gru, ModelKind::Mlp] {
            let mut whole = Trainer::new(setup(kind), 1);
            let mut replica = Trainer::new(setup(kind), 1);
            let mut parts: Vec<_> = (0..3).map(|i| Part::new(&setup(kind), BTreeMap::new(), i, 3)).collect();
            for step in 0..8 {
                let row: Vec<f32> = parts.iter().flat_map(|part| part.values().to_vec()).collect();
                replica.set_flat_parameters(step, &row);
                let (gradient, norm) = replica.flat_gradient(TRAINING_STREAM).unwrap();
                for part in &mut parts {
                    let own = part.range.clone();
                    part.apply([&gradient[own]]);
                }
                assert_eq!(whole.advance().unwrap().gradient_norm, norm);
                let row: Vec<f32> = parts.iter().flat_map(|part| part.values().to_vec()).collect();
                assert_eq!(row, whole.flat_parameters(), "{kind:?} after step {step}");
            }
        }
    }

    #[test]
    fn a_part_resumes_exactly_and_refuses_the_checkpoint_of_another_server() {
        let mut part = Part::new(&setup(ModelKind::Gru), BTreeMap::new(), 0, 2);
        let fresh = part.state();
        let gradient = vec![0.25; part.len()];
        part.apply([gradient.as_slice(), &gradient]);
        let saved = part.state();
        part.apply([gradient.as_slice()]);
        let after = part.state();
        part.restore(saved.clone()).unwrap();
        part.apply([gradient.as_slice()]);
        assert_eq!(part.state(), after);
        part.restart();
        assert_eq!(part.state(), fresh);
        let mut other = Part::new(&setup(ModelKind::Gru), BTreeMap::new(), 1, 2);
        let error = other.restore(saved).unwrap_err().to_string();
        assert!(error.contains("server 0") && error.contains("server 1"), "{error}");
    }
}
