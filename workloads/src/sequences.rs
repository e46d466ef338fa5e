//! Sequences made by code: sentences of a small language, and noisy waves.
//!
//! *Sentences* are the data of the character model. A tiny grammar with its own word lists writes text whose
//! next letter can be guessed well from the letters before it, but not with certainty. The loss falls steeply
//! while the model learns letters and words, and flattens where only the choice of the next word is uncertain.
//!
//! *Waves* are the data of the forecaster. Each channel is a sum of two sine waves of random period, phase and height
//! plus white noise, so the mean squared error cannot fall below the variance of the noise.

use crate::rng::Rng;

/// Letters of the small language: 26 letters, the space and the full stop.
pub(crate) const ALPHABET: usize = 28;

const ARTICLES: [&str; 4] = ["the", "a", "every", "some"];
const ADJECTIVES: [&str; 12] = [
    "quiet", "bright", "early", "hollow", "green", "patient", "narrow", "golden", "gentle", "frozen", "distant",
    "simple",
];
const NOUNS: [&str; 16] = [
    "river", "engine", "garden", "letter", "mountain", "window", "harbour", "teacher", "signal", "market", "forest",
    "lantern", "bridge", "journey", "kitchen", "shadow",
];
const VERBS: [&str; 12] = [
    "follows",
    "carries",
    "answers",
    "crosses",
    "remembers",
    "builds",
    "watches",
    "leaves",
    "measures",
    "opens",
    "finds",
    "keeps",
];

/// Text of exactly `length` letters, as numbers below [`ALPHABET`]; it starts somewhere inside a sentence.
pub(crate) fn sentences(length: usize, rng: &mut Rng) -> Vec<u32> {
    let skip = rng.below(20);
    let mut text = String::with_capacity(length + 80);
    while text.len() < length + skip {
        noun_phrase(&mut text, rng);
        text.push_str(VERBS[rng.below(VERBS.len())]);
        text.push(' ');
        noun_phrase(&mut text, rng);
        text.pop();
        text.push('.');
    }
    text.bytes().skip(skip).take(length).map(letter_number).collect()
}

fn noun_phrase(text: &mut String, rng: &mut Rng) {
    let mut word = |words: &[&str], rng: &mut Rng| {
        text.push_str(words[rng.below(words.len())]);
        text.push(' ');
    };
    word(&ARTICLES, rng);
    if rng.below(2) == 0 {
        word(&ADJECTIVES, rng);
    }
    word(&NOUNS, rng);
}

fn letter_number(letter: u8) -> u32 {
    match letter {
        b' ' => 26,
        b'.' => 27,
        letter => u32::from(letter - b'a'),
    }
}

/// Channels of a wave.
pub(crate) const CHANNELS: usize = 4;
/// Standard deviation of the noise on a wave; its square is the smallest mean squared error a forecaster can reach.
pub(crate) const WAVE_NOISE: f32 = 0.1;

/// `length` moments of [`CHANNELS`] values each, moment after moment.
pub(crate) fn waves(length: usize, rng: &mut Rng) -> Vec<f32> {
    let mut values = vec![0.0; length * CHANNELS];
    for channel in 0..CHANNELS {
        for _ in 0..2 {
            let (period, phase) = (rng.between(6.0, 24.0), rng.between(0.0, std::f32::consts::TAU));
            let height = rng.between(0.3, 1.0);
            for moment in 0..length {
                let angle = std::f32::consts::TAU * moment as f32 / period + phase;
                values[moment * CHANNELS + channel] += height * angle.sin();
            }
        }
    }
    for value in &mut values {
        *value += WAVE_NOISE * rng.normal();
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_have_the_asked_length_and_alphabet() {
        for index in 0..50 {
            let text = sentences(40, &mut Rng::stream(1, "text", index));
            assert_eq!(text.len(), 40);
            assert!(text.iter().all(|&letter| (letter as usize) < ALPHABET));
        }
        assert_ne!(sentences(40, &mut Rng::stream(1, "text", 0)), sentences(40, &mut Rng::stream(1, "text", 1)));
    }

    #[test]
    fn waves_stay_within_their_heights() {
        let values = waves(64, &mut Rng::stream(1, "waves", 0));
        assert_eq!(values.len(), 64 * CHANNELS);
        assert!(values.iter().all(|v| v.abs() < 2.0 + 8.0 * WAVE_NOISE));
    }
}
