//! Pictures of digits, drawn by code.
//!
//! Models of images need images, and a trainer on a machine without a network cannot download them. Each digit is a
//! polyline. Every picture changes the polyline a little, as handwriting does: moved corners, rotation, shear, scale,
//! shift and stroke width. It is painted with soft edges into 28 × 28 grey values between 0 and 1, the size and range
//! of MNIST.
//!
//! The pictures depend only on the random stream from which they are drawn.

use crate::rng::Rng;

/// Width and height of a picture in pixels.
pub(crate) const SIDE: usize = 28;
/// Pixels of a picture.
pub(crate) const PIXELS: usize = SIDE * SIDE;
/// Digits 0 to 9.
pub(crate) const CLASSES: usize = 10;

/// The corners of each digit in a unit square, x to the right and y down.
const STROKES: [&[(f32, f32)]; CLASSES] = [
    &[
        (0.50, 0.10),
        (0.34, 0.18),
        (0.27, 0.50),
        (0.34, 0.82),
        (0.50, 0.90),
        (0.66, 0.82),
        (0.73, 0.50),
        (0.66, 0.18),
        (0.50, 0.10),
    ],
    &[(0.36, 0.28), (0.52, 0.11), (0.52, 0.89)],
    &[(0.28, 0.30), (0.38, 0.13), (0.60, 0.13), (0.71, 0.30), (0.62, 0.50), (0.27, 0.87), (0.75, 0.87)],
    &[(0.29, 0.18), (0.50, 0.10), (0.70, 0.26), (0.48, 0.47), (0.72, 0.68), (0.50, 0.90), (0.27, 0.81)],
    &[(0.61, 0.90), (0.61, 0.10), (0.24, 0.62), (0.79, 0.62)],
    &[(0.71, 0.11), (0.34, 0.11), (0.30, 0.46), (0.55, 0.41), (0.72, 0.62), (0.58, 0.87), (0.27, 0.82)],
    &[(0.64, 0.11), (0.40, 0.35), (0.29, 0.65), (0.42, 0.89), (0.65, 0.83), (0.69, 0.61), (0.50, 0.49), (0.31, 0.63)],
    &[(0.25, 0.13), (0.75, 0.13), (0.44, 0.89)],
    &[
        (0.50, 0.48),
        (0.32, 0.30),
        (0.50, 0.11),
        (0.68, 0.30),
        (0.50, 0.48),
        (0.29, 0.69),
        (0.50, 0.89),
        (0.71, 0.69),
        (0.50, 0.48),
    ],
    &[(0.68, 0.37), (0.50, 0.50), (0.31, 0.36), (0.45, 0.13), (0.67, 0.19), (0.69, 0.42), (0.60, 0.89)],
];

/// A set of pictures and the digit each one shows.
#[derive(Debug)]
pub(crate) struct Glyphs {
    pixels: Vec<f32>,
    labels: Vec<u32>,
}

impl Glyphs {
    pub(crate) fn draw(count: usize, rng: &mut Rng) -> Self {
        let mut glyphs = Glyphs { pixels: vec![0.0; count * PIXELS], labels: Vec::with_capacity(count) };
        for picture in glyphs.pixels.chunks_exact_mut(PIXELS) {
            let digit = rng.below(CLASSES);
            glyphs.labels.push(digit as u32);
            draw_digit(digit, rng, picture);
        }
        glyphs
    }

    pub(crate) fn len(&self) -> usize {
        self.labels.len()
    }

    pub(crate) fn picture(&self, index: usize) -> &[f32] {
        &self.pixels[index * PIXELS..(index + 1) * PIXELS]
    }

    pub(crate) fn label(&self, index: usize) -> u32 {
        self.labels[index]
    }
}

fn draw_digit(digit: usize, rng: &mut Rng, picture: &mut [f32]) {
    let (sin, cos) = rng.between(-0.25, 0.25).sin_cos();
    let shear = rng.between(-0.2, 0.2);
    let (scale_x, scale_y) = (rng.between(0.8, 1.05), rng.between(0.8, 1.05));
    let (shift_x, shift_y) = (rng.between(-0.07, 0.07), rng.between(-0.07, 0.07));
    let half_width = rng.between(0.025, 0.05);
    let corners: Vec<(f32, f32)> = STROKES[digit]
        .iter()
        .map(|&(x, y)| {
            let x = (x - 0.5 + rng.normal() * 0.02) * scale_x;
            let y = (y - 0.5 + rng.normal() * 0.02) * scale_y;
            let x = x + shear * y;
            (0.5 + shift_x + cos * x - sin * y, 0.5 + shift_y + sin * x + cos * y)
        })
        .collect();
    for ends in corners.windows(2) {
        draw_segment(ends[0], ends[1], half_width, picture);
    }
}

/// Paints the pixels near one straight stroke; a pixel keeps the darkest stroke that touches it.
fn draw_segment(from: (f32, f32), to: (f32, f32), half_width: f32, picture: &mut [f32]) {
    // The edge fades over about one pixel.
    let fade = 1.0 / SIDE as f32;
    let reach = half_width + fade;
    let pixel_range = |a: f32, b: f32| {
        let low = ((a.min(b) - reach) * SIDE as f32).floor().clamp(0.0, SIDE as f32) as usize;
        let high = ((a.max(b) + reach) * SIDE as f32).ceil().clamp(0.0, SIDE as f32) as usize;
        low..high
    };
    let (dx, dy) = (to.0 - from.0, to.1 - from.1);
    let length_squared = (dx * dx + dy * dy).max(1e-9);
    for row in pixel_range(from.1, to.1) {
        let y = (row as f32 + 0.5) / SIDE as f32 - from.1;
        for column in pixel_range(from.0, to.0) {
            let x = (column as f32 + 0.5) / SIDE as f32 - from.0;
            let along = ((x * dx + y * dy) / length_squared).clamp(0.0, 1.0);
            let distance = (x - along * dx).hypot(y - along * dy);
            let ink = ((half_width - distance) / fade + 0.5).clamp(0.0, 1.0);
            let pixel = &mut picture[row * SIDE + column];
            *pixel = pixel.max(ink);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pictures_are_deterministic_inked_and_labelled() {
        let glyphs = Glyphs::draw(200, &mut Rng::stream(1, "glyphs", 0));
        let again = Glyphs::draw(200, &mut Rng::stream(1, "glyphs", 0));
        assert_eq!(glyphs.pixels, again.pixels);
        let mut counts = [0; CLASSES];
        for index in 0..glyphs.len() {
            counts[glyphs.label(index) as usize] += 1;
            let picture = glyphs.picture(index);
            assert!(picture.iter().all(|p| (0.0..=1.0).contains(p)));
            let ink: f32 = picture.iter().sum();
            assert!((20.0..300.0).contains(&ink), "digit {} has {ink} pixels of ink", glyphs.label(index));
        }
        assert!(counts.iter().all(|&n| n > 0), "every digit occurs: {counts:?}");
    }
}
