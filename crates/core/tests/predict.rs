//! Forecasts on curves that the forecast was not tuned for: several families, with noise, spikes, learning-rate drops
//! and slow starts.

use gainshare_core::model::Time;
use gainshare_core::signal::blend::{Blend, Clues, Example, PARTS};
use gainshare_core::signal::curve::Curve;
use gainshare_core::signal::forms::Form;
use gainshare_core::signal::predict::{Fit, fit};
use gainshare_core::signal::value::ValueForecaster;
use gainshare_core::signal::{Sample, Tracker};
use proptest::prelude::*;

fn curve(values: &[f64]) -> Curve {
    let mut c = Curve::default();
    for (i, v) in values.iter().enumerate() {
        c.push((i + 1) as f64, *v);
    }
    c
}

fn fitted(values: &[f64], horizon: f64) -> Fit {
    fit(&curve(values), Some(horizon)).expect("there are reports")
}

fn forecaster(values: &[f64], horizon: f64) -> ValueForecaster {
    ValueForecaster::new(&curve(values), horizon).expect("there are reports")
}

/// A small generator of its own (xorshift), so that the curves below are the same on every machine.
struct Random(u64);

impl Random {
    fn uniform(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    fn gaussian(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }

    fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[(self.uniform() * of.len() as f64) as usize]
    }
}

/// One made-up training run: a loss that falls, of a family, length, noise and height that all
/// vary.
fn made_up(seed: u64) -> Vec<f64> {
    made_up_with_family(seed).1
}

/// The same, with the number of its family.
fn made_up_with_family(seed: u64) -> (usize, Vec<f64>) {
    let mut r = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    for _ in 0..10 {
        r.uniform();
    }
    let n = r.pick(&[10usize, 20, 50, 100, 300, 1000]);
    let family = r.pick(&[0, 1, 2, 3, 4, 5usize]);
    let low = 0.05 + r.uniform();
    let span = low * (1.0 + 9.0 * r.uniform());
    let s = (0.03f64.ln() + r.uniform() * (0.6f64 / 0.03).ln()).exp();
    let noise = span * r.pick(&[0.0, 0.005, 0.02, 0.05]);
    let p = 0.4 + 1.6 * r.uniform();
    let drops =
        [(0.3 + 0.3 * r.uniform(), 0.1 + 0.3 * r.uniform()), (0.65 + 0.25 * r.uniform(), 0.05 + 0.15 * r.uniform())];
    let run = (0..n)
        .map(|i| {
            let t = (i + 1) as f64 / n as f64;
            let base = match family {
                0 => (-t / s).exp(),
                1 => (1.0 + t / (s * p)).powf(-p),
                2 => (-(t / s).powf(0.6)).exp(),
                3 => 0.6 * (-t / (s * 0.3)).exp() + 0.4 * (-t / (s * 2.0)).exp(),
                // The learning rate is cut twice; each time the loss drops at once and then a
                // little more.
                4 => {
                    let dropped = drops.iter().filter(|(at, _)| t > *at);
                    0.35 + 0.65 * (-t / s).exp()
                        - dropped.map(|(at, h)| 0.5 * h * (1.0 - 0.3 * (-(t - at) / 0.02).exp())).sum::<f64>()
                }
                // A plateau before anything is learnt.
                _ => 0.7 / (1.0 + ((t - 0.075 * p) / (0.3 * s)).exp()) + 0.3 * (-t / s).exp(),
            };
            let spike = if r.uniform() < 0.01 { span * 3.0 * r.uniform() } else { 0.0 };
            low + span * base + noise * r.gaussian() + spike
        })
        .collect();
    (family, run)
}

/// The level at the end of a run, without its noise.
fn final_level(values: &[f64]) -> f64 {
    let mut last = values[values.len() - (values.len() / 20).max(3)..].to_vec();
    last.sort_by(f64::total_cmp);
    last[last.len() / 2]
}

const RUNS: u64 = 300;

/// Mean relative error of the final value when only a part of each run has been seen.
fn mean_error(form: Form, seen: f64) -> f64 {
    let errors = (1000..1000 + RUNS).map(|seed| {
        let run = made_up(seed);
        let seen = ((seen * run.len() as f64).round() as usize).max(1);
        let truth = final_level(&run);
        let guess = form.forecast(&curve(&run[..seen]), run.len() as f64).expect("there are reports");
        (guess - truth).abs() / truth
    });
    errors.sum::<f64>() / RUNS as f64
}

#[test]
fn better_than_every_single_form_on_unseen_curves() {
    for seen in [0.2, 0.4, 0.6] {
        let ours = mean_error(Form::Gainshare, seen);
        for other in Form::ALL.into_iter().filter(|f| *f != Form::Gainshare) {
            let theirs = mean_error(other, seen);
            println!("after {seen}: ours {:.1} %, {} {:.1} %", 100.0 * ours, other.name(), 100.0 * theirs);
            assert!(ours < theirs, "after {seen}: {ours:.3} is not below {theirs:.3} of {}", other.name());
        }
    }
}

#[test]
fn the_interval_holds_about_four_in_five() {
    for seen in [0.2, 0.4, 0.6] {
        let held = (1000..1000 + RUNS).filter(|seed| {
            let run = made_up(*seed);
            let seen = ((seen * run.len() as f64).round() as usize).max(1);
            let e = forecaster(&run[..seen], run.len() as f64).value_at(run.len() as f64);
            (e.low..=e.high).contains(&final_level(&run))
        });
        let part = held.count() as f64 / RUNS as f64;
        assert!((0.70..=0.93).contains(&part), "after {seen}: {part}");
    }
}

/// Every family is left out in turn: its runs are forecast with weights and intervals that were
/// learnt from the other families.
#[test]
fn a_source_left_out_is_forecast_well_and_its_interval_is_right() {
    let runs: Vec<(usize, Vec<f64>)> = (1000..1000 + RUNS).map(made_up_with_family).collect();
    let examples = PARTS.map(|part| -> Vec<Example> {
        let example = |(family, run): &(usize, Vec<f64>)| {
            let seen = ((part * run.len() as f64).round() as usize).max(1);
            let clues = forecaster(&run[..seen], run.len() as f64).clues(run.len() as f64);
            Example { source: *family, clues, truth: final_level(run) }
        };
        runs.iter().map(example).collect()
    });
    let (mut errors, mut held) = ([0.0; 3], [0.0; 3]);
    for family in 0..6 {
        let others: Vec<Vec<Example>> =
            examples.iter().map(|all| all.iter().filter(|e| e.source != family).copied().collect()).collect();
        let blend = Blend::learn([&others[0], &others[1], &others[2]]);
        for (i, all) in examples.iter().enumerate() {
            for example in all.iter().filter(|e| e.source == family) {
                let estimate = blend.estimate(&example.clues);
                errors[i] += (estimate.mid - example.truth).abs() / example.truth / RUNS as f64;
                if (estimate.low..=estimate.high).contains(&example.truth) {
                    held[i] += 1.0 / RUNS as f64;
                }
            }
        }
    }
    for (i, part) in PARTS.into_iter().enumerate() {
        let others = Form::ALL.into_iter().filter(|f| *f != Form::Gainshare);
        let best = others.map(|form| mean_error(form, part)).fold(f64::INFINITY, f64::min);
        println!("after {part}: {:.3}, best form {best:.3}, held {:.2}", errors[i], held[i]);
        assert!(errors[i] <= 1.1 * best, "after {part}: {} is above 1.1 times {best}", errors[i]);
        assert!((0.73..=0.87).contains(&held[i]), "after {part}: {}", held[i]);
    }
}

/// The half of the forecast that is tested on the curve's own past is what makes it good on curves without drops.
#[test]
fn on_curves_without_drops_the_tested_change_helps() {
    let runs: Vec<Vec<f64>> = (1000..1000 + RUNS).map(made_up_with_family).filter(|r| r.0 < 4).map(|r| r.1).collect();
    let mut totals = (0.0, 0.0);
    for part in PARTS {
        let median = |change_clues: fn(Clues) -> Clues| {
            let error = |run: &Vec<f64>| {
                let seen = ((part * run.len() as f64).round() as usize).max(1);
                let clues = forecaster(&run[..seen], run.len() as f64).clues(run.len() as f64);
                let truth = final_level(run);
                (Blend::LEARNT.estimate(&change_clues(clues)).mid - truth).abs() / truth
            };
            let mut errors: Vec<f64> = runs.iter().map(error).collect();
            errors.sort_by(f64::total_cmp);
            errors[errors.len() / 2]
        };
        let (both, sum_alone) = (median(|clues| clues), median(|clues| Clues { trust: 0.0, ..clues }));
        println!("after {part}: {both:.3}, the learnt sum alone {sum_alone:.3}");
        totals = (totals.0 + both, totals.1 + sum_alone);
    }
    assert!(totals.0 < 0.95 * totals.1, "{} is not below {}", totals.0, totals.1);
}

#[test]
fn what_follows_the_form_is_forecast_closely() {
    let run: Vec<f64> = (1..=100).map(|i| 0.5 + 2.0 * (-f64::from(i) / 20.0).exp()).collect();
    let f = fitted(&run[..50], 100.0);
    assert!((f.at(100.0) - run[99]).abs() < 0.05 * run[99], "{} is not {}", f.at(100.0), run[99]);
    // The forecast rests on other forms too, which go on falling.
    let e = forecaster(&run[..50], 100.0).value_at(100.0);
    assert!(
        (e.mid - run[99]).abs() < 0.15 * run[99] && (e.low..=e.high).contains(&run[99]),
        "{e:?} is not {}",
        run[99]
    );
    assert!((f.limit().mid - 0.5).abs() < 0.05, "{:?}", f.limit());
    // All but 2 % of the change is made at 20·ln 50 = 78.
    let flat = f.flat_at();
    assert!(flat.low <= 80.0 && 75.0 <= flat.high && (60.0..120.0).contains(&flat.mid), "{flat:?}");
    // 0.6 is met at 20·ln 20 = 60; 0.4 never.
    let reach = f.reaches(0.6);
    assert!(reach.chance > 0.9 && (reach.at.unwrap().mid - 60.0).abs() < 6.0, "{reach:?}");
    assert!(f.reaches(0.4).chance < 0.2, "{:?}", f.reaches(0.4));
    assert_eq!(f.reaches(2.0).at.unwrap().mid, 50.0);
}

#[test]
fn spikes_hardly_move_the_forecast() {
    let clean: Vec<f64> = (1..=60).map(|i| 1.0 + 3.0 / (1.0 + f64::from(i) / 5.0)).collect();
    let mut spiked = clean.clone();
    for i in [7, 23, 41] {
        spiked[i] = 1e6;
    }
    let (a, b) = (forecaster(&clean, 200.0).value_at(200.0).mid, forecaster(&spiked, 200.0).value_at(200.0).mid);
    assert!((a - b).abs() < 0.03 * a, "{a} and {b}");
}

#[test]
fn a_drop_of_the_learning_rate_is_found_and_does_not_bend_the_curve() {
    let run: Vec<f64> = (1..=100).map(|i| 1.0 + (-f64::from(i) / 8.0).exp() - if i > 50 { 0.4 } else { 0.0 }).collect();
    let f = fitted(&run[..70], 100.0);
    let jump = f.jump().expect("a drop of 0.4 is seen");
    assert!((jump.x - 50.5).abs() < 2.0 && (jump.height + 0.4).abs() < 0.05, "{jump:?}");
    let e = forecaster(&run[..70], 100.0).value_at(100.0);
    assert!((e.mid - 0.6).abs() < 0.05, "{e:?}");
    // A curve that merely falls fast has no jump.
    assert_eq!(fitted(&(1..=70).map(|i| 9.0 * (-f64::from(i) / 2.0).exp()).collect::<Vec<_>>(), 100.0).jump(), None);
}

#[test]
fn the_time_scale_is_that_of_the_points_whatever_length_was_announced() {
    // Three points that hardly bend tell little of the time scale.
    let scale = |horizon| fit(&curve(&[1.0, 0.9, 0.81]), horizon).expect("there are reports").scale().0;
    let without = scale(None);
    for horizon in [6.0, 30.0, 150.0] {
        let with = scale(Some(horizon));
        assert!((with / without - 1.0).abs() < 0.03, "{horizon} reports announced: {with} and {without}");
    }
}

#[test]
fn fractions_stay_fractions() {
    let rising: Vec<f64> = (1..=10).map(|i| 0.4 + 0.05 * f64::from(i)).collect();
    let e = forecaster(&rising, 100.0).value_at(100.0);
    assert!(e.mid <= 1.0 && e.high <= 1.0 && e.mid > 0.9, "{e:?}");
    let falling: Vec<f64> = (1..=10).map(|i| 20.0 - 1.9 * f64::from(i)).collect();
    assert!(forecaster(&falling, 100.0).value_at(100.0).low >= 0.0);
}

#[test]
fn a_tracker_says_where_the_job_is_going() {
    let mut t = Tracker::default();
    for i in 1..=40u64 {
        let value = 1.0 + 4.0 * (-(i as f64) / 10.0).exp();
        t.push(Time(i), Sample { value, step: Some(10 * i), total: Some(1000) });
    }
    let o = t.signal().outlook.expect("forty reports are enough");
    assert_eq!(o.at, 400.0);
    // 100·ln 50 = 391: it is flat now, and little is left.
    assert!((400.0..480.0).contains(&o.flat_at), "{o:?}");
    assert!(o.gain_left < 0.05, "{o:?}");
    // A flood is fitted now and then only, and an early forecast sees more to gain.
    let mut young = Tracker::default();
    for i in 1..=5u64 {
        young.push(Time(i), Sample { value: 1.0 + 4.0 * (-(i as f64) / 10.0).exp(), step: None, total: None });
    }
    assert!(young.signal().outlook.unwrap().gain_left > 0.5, "{:?}", young.signal().outlook);
}

proptest! {
    #[test]
    fn never_nan(values in prop::collection::vec(prop::num::f64::ANY, 1..80), horizon in prop::num::f64::ANY) {
        let c = curve(&values);
        for h in [Some(horizon), None] {
            let Some(f) = fit(&c, h) else { continue };
            let x = if horizon.is_finite() { horizon.abs() } else { 1e9 };
            let value = ValueForecaster::new(&c, h.unwrap_or(x)).expect("there are reports").value_at(x);
            for e in [value, f.limit(), f.flat_at()] {
                prop_assert!(!e.mid.is_nan() && e.low <= e.mid && e.mid <= e.high, "{e:?}");
            }
            prop_assert!(f.gain_left(x) >= 0.0);
            let r = f.reaches(values[0]);
            prop_assert!((0.0..=1.0).contains(&r.chance));
        }
        for form in Form::ALL {
            prop_assert!(form.forecast(&c, 100.0).is_none_or(|y| !y.is_nan()));
        }
    }

    /// Units do not matter: neither those of the loss nor those of the steps.
    #[test]
    fn scale_free(seed in 0u64..1000, y_factor in 1e-3f64..1e3, x_factor in 0.1f64..1e4) {
        // Above 100 throughout, so that no value is taken for a fraction.
        let run: Vec<f64> = made_up(seed).iter().map(|y| 1e6 + 1e3 * y).collect();
        let n = run.len();
        let plain = forecaster(&run[..n / 2], n as f64).value_at(n as f64);
        let mut scaled = Curve::default();
        for (i, y) in run[..n / 2].iter().enumerate() {
            scaled.push((i + 1) as f64 * x_factor, -y * y_factor);
        }
        let h = n as f64 * x_factor;
        let s = ValueForecaster::new(&scaled, h).unwrap().value_at(h);
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs();
        prop_assert!(near(plain.mid, -s.mid / y_factor), "{plain:?} and {s:?}");
    }
}
