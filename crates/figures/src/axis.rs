//! Axes: which values to label, and where they lie on the picture.

/// A range of values and the pixels it is drawn on.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
}

impl Axis {
    /// Covers all finite `values` (and a little above), on pixels `start`…`end`.
    pub(super) fn over(values: impl Iterator<Item = f64>, from_zero: bool, start: f64, end: f64) -> Axis {
        let (mut low, mut high) =
            values.filter(|v| v.is_finite()).fold((f64::MAX, f64::MIN), |(l, h), v| (l.min(v), h.max(v)));
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        if from_zero {
            low = low.min(0.0);
        }
        if high - low < f64::EPSILON * high.abs().max(1.0) {
            high = low + high.abs().max(1.0);
        }
        let step = step(high - low);
        let from = if from_zero && low == 0.0 { 0.0 } else { (low / step).floor() * step };
        Axis { from, to: (high / step).ceil() * step, start, end }
    }

    pub(super) fn at(&self, value: f64) -> f64 {
        let t = (value - self.from) / (self.to - self.from);
        self.start + t.clamp(-0.05, 1.05) * (self.end - self.start)
    }

    /// Round values to label, first to last.
    pub(super) fn ticks(&self) -> Vec<f64> {
        let step = step(self.to - self.from);
        let count = ((self.to - self.from) / step).round() as usize;
        (0..=count).map(|i| self.from + i as f64 * step).collect()
    }
}

/// The round step (1, 2 or 5 times a power of ten) that cuts `range` into about six.
fn step(range: f64) -> f64 {
    let rough = range / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().find(|s| s * power >= rough).unwrap_or(10.0);
    step * power
}

/// A tick's label, without superfluous digits.
pub(super) fn label(value: f64) -> String {
    let value = if value.abs() < 1e-12 { 0.0 } else { value };
    if value != 0.0 && !(1e-3..1e7).contains(&value.abs()) {
        return format!("{value:.1e}");
    }
    let text = format!("{value:.4}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_cover_the_values() {
        let axis = Axis::over([3.0, 394.0].into_iter(), true, 0.0, 100.0);
        assert_eq!(axis.ticks(), [0.0, 100.0, 200.0, 300.0, 400.0]);
        assert_eq!(axis.at(200.0), 50.0);
        assert_eq!(label(0.30000000000000004), "0.3");
        assert_eq!(label(1e9), "1.0e9");
    }
}
