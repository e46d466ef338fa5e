//! The speed model on made-up jobs whose true speed is known.

use super::*;
use crate::model::Span;
use crate::signal::past::expected_pace;
use crate::signal::{Sample, Tracker};

/// A job that is read once a second and reports every `per_report` steps.
struct Fixture {
    tracker: Tracker,
    pace: PaceTracker,
    now_s: f64,
    consumed_node_s: f64,
    steps: f64,
    reported: u64,
    total: u64,
    is_disturbed: bool,
}

impl Fixture {
    fn new(total: u64) -> Fixture {
        Fixture {
            tracker: Tracker::default(),
            pace: PaceTracker::default(),
            now_s: 1.0,
            consumed_node_s: 0.0,
            steps: 0.0,
            reported: 0,
            total,
            is_disturbed: false,
        }
    }

    /// Runs for `seconds` at `share`, a step taking `step_s`.
    fn run(&mut self, seconds: usize, share: f64, step_s: f64) {
        for _ in 0..seconds {
            let (from, before) = (self.now_s, self.steps);
            self.now_s += 1.0;
            self.steps += 1.0 / step_s;
            self.consumed_node_s += share;
            while (self.reported + 1) as f64 <= self.steps {
                self.reported += 1;
                let at = from + (self.reported as f64 - before) * step_s;
                let sample =
                    Sample { value: 1.0 / self.reported as f64, step: Some(self.reported), total: Some(self.total) };
                self.tracker.push(Time::from_secs_f64(at), sample);
            }
            let now = Time::from_secs_f64(self.now_s);
            let (consumed_node_s, is_disturbed) = (self.consumed_node_s, self.is_disturbed);
            let reading =
                PaceReading { now, consumed_node_s, granted: share, scarce: false, has_idle: false, is_disturbed };
            self.pace.observe(reading, &self.tracker.signal());
        }
    }

    fn pace(&self) -> Pace {
        self.pace.pace().expect("there are windows")
    }
}

fn amdahl(share: f64) -> f64 {
    0.4 + 0.6 / share
}

#[test]
fn amdahl_is_found() {
    let mut fixture = Fixture::new(1000);
    for share in [0.2, 0.5, 1.0, 0.3] {
        fixture.run(60, share, amdahl(share));
    }
    for share in [0.15, 0.4, 0.8] {
        let (found, truth) = (fixture.pace().step_s(share), amdahl(share));
        assert!((found / truth - 1.0).abs() < 0.05, "{found} is not {truth} at {share}");
    }
}

#[test]
fn one_share_means_linear() {
    let mut fixture = Fixture::new(1000);
    fixture.run(60, 0.25, 2.0);
    let pace = fixture.pace();
    assert!((pace.step_s(0.25) - 2.0).abs() < 0.02, "{pace:?}");
    assert!((pace.step_s(0.5) - 1.0).abs() < 0.02, "{pace:?}");
    let relative = |share: f64| pace.deviation_s(share) / pace.step_s(share);
    assert!(relative(1.0) > 2.0 * relative(0.25), "a share that was never seen is known less well");
}

#[test]
fn a_doubled_cost_is_followed() {
    let mut fixture = Fixture::new(1000);
    fixture.run(60, 0.5, 2.0);
    fixture.run(20, 0.5, 4.0);
    let found = fixture.pace().step_s(0.5);
    assert!((found / 4.0 - 1.0).abs() < 0.1, "{found}");
}

#[test]
fn one_long_pause_is_forgiven() {
    let mut fixture = Fixture::new(1000);
    fixture.run(60, 0.5, 2.0);
    fixture.run(10, 0.5, 8.0);
    fixture.run(20, 0.5, 2.0);
    let found = fixture.pace().step_s(0.5);
    assert!((found / 2.0 - 1.0).abs() < 0.1, "{found}");
}

#[test]
fn a_job_that_cannot_use_its_grant_shows_what_it_can_use() {
    let mut pace = PaceTracker::default();
    for second in 1..30u64 {
        let mut tracker = Tracker::default();
        for step in 1..=second {
            let sample = Sample { value: 1.0, step: Some(step), total: Some(100) };
            tracker.push(Time::from_secs_f64(step as f64), sample);
        }
        let now = Time::from_secs_f64(second as f64 + 0.1);
        let reading = PaceReading {
            now,
            consumed_node_s: 0.2 * second as f64,
            granted: 1.0,
            scarce: false,
            has_idle: false,
            is_disturbed: false,
        };
        pace.observe(reading, &tracker.signal());
    }
    let pace = pace.pace().expect("there are windows");
    assert!((pace.usable - 0.2).abs() < 0.02, "{pace:?}");
    assert!((pace.step_s(0.9) - 1.0).abs() < 0.05, "{pace:?}");
    assert_eq!(pace.step_s(0.9), pace.step_s(pace.usable), "more than it can use makes no step shorter");
}

/// The pace of a job that makes a step in half a second with this part of the node, while the node has no CPU to spare.
fn pace_on_a_busy_node(used: f64, granted: f64) -> Pace {
    let (mut tracker, mut pace) = (Tracker::default(), PaceTracker::default());
    for step in 1..=40u64 {
        let now_s = 0.5 * step as f64;
        let sample = Sample { value: 1.0 / step as f64, step: Some(step), total: Some(400) };
        tracker.push(Time::from_secs_f64(now_s), sample);
        let now = Time::from_secs_f64(now_s + 0.1);
        let consumed_node_s = used * now.as_secs_f64();
        let reading = PaceReading { now, consumed_node_s, granted, scarce: true, has_idle: false, is_disturbed: false };
        pace.observe(reading, &tracker.signal());
    }
    pace.pace().expect("there are windows")
}

#[test]
fn a_job_that_sleeps_on_a_busy_node_limits_itself() {
    let sleeps = pace_on_a_busy_node(0.004, 0.3);
    assert!((sleeps.step_s(1.0) - 0.5).abs() < 0.05, "no share makes the sleep shorter: {sleeps:?}");
    // Other programs may take most of a grant: such a job is faster with more.
    let kept = pace_on_a_busy_node(0.1, 0.3);
    assert!(kept.usable == 1.0 && kept.step_s(1.0) < 0.2, "{kept:?}");
}

#[test]
fn a_restart_begins_a_new_window() {
    let mut fixture = Fixture::new(1000);
    fixture.run(30, 0.5, 2.0);
    // The counters of the new attempt begin at zero; the job resumes from an earlier step.
    let before = fixture.pace();
    fixture.consumed_node_s = 0.0;
    fixture.run(1, 0.5, 2.0);
    assert_eq!(fixture.pace(), before);
    fixture.run(30, 0.5, 2.0);
    assert!((fixture.pace().step_s(0.5) - 2.0).abs() < 0.05);
}

#[test]
fn the_end_comes_from_the_total_or_from_the_goal() {
    let mut fixture = Fixture::new(100);
    fixture.run(60, 0.5, 2.0);
    let now = Time::from_secs_f64(fixture.now_s);
    let mut signal = fixture.tracker.signal();
    assert_eq!(signal.ends_in_s(now, 0.5), None, "without a pace no end is known");
    signal.pace = Some(fixture.pace());
    let end = signal.ends_in_s(now, 0.5).expect("both are known");
    assert!((end.mid - 140.0).abs() < 5.0 && end.low < end.mid && end.mid < end.high, "{end:?}");
    let faster = signal.ends_in_s(now, 1.0).expect("both are known");
    assert!(faster.mid < 0.6 * end.mid, "{faster:?}");
    // Without a total, the curve says when the value is reached.
    signal.total = None;
    assert_eq!(signal.steps_left(), None);
    let mut tracker = Tracker::default();
    tracker.set_target(Some(0.25));
    for step in 1..=40u64 {
        let value = 0.2 + 0.8 * (-(step as f64) / 20.0).exp();
        tracker.push(Time::ZERO + Span::from_secs(step), Sample { value, step: Some(step), total: None });
    }
    // 0.2 + 0.8·exp(−x/20) is 0.25 at x = 55.5.
    let left = tracker.signal().steps_left().expect("the curve falls to it");
    assert!((left.mid - 15.5).abs() < 8.0 && left.low <= left.mid && left.mid <= left.high, "{left:?}");
}

/// Noisy windows at two shares: the 80 % interval of a third share holds the truth about four times
/// in five.
#[test]
fn intervals_hold_four_in_five() {
    let mut state = 7u64;
    let mut unit = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let (mut held, runs) = (0, 400);
    for _ in 0..runs {
        let serial = 0.3 * unit();
        let truth = |share: f64| serial + (1.0 - serial) / share;
        // The machine itself is a little faster or slower later on.
        let drift = 1.0 + 0.03 * (unit() + unit() + unit() + unit() - 2.0) * 3f64.sqrt();
        let mut tracker = PaceTracker::default();
        for i in 0..24 {
            let share = if i % 8 < 4 { 0.2 } else { 0.5 };
            let noise = 1.0 + 0.1 * (unit() + unit() + unit() + unit() - 2.0) * 3f64.sqrt();
            tracker.add(1.0, truth(share) * noise, share, false);
        }
        let time = tracker.pace().expect("there are windows").time_s(Interval::exact(100.0), 0.3);
        let ends = 100.0 * truth(0.3) * drift;
        held += usize::from(time.low <= ends && ends <= time.high);
    }
    let part = held as f64 / runs as f64;
    assert!((0.70..=0.90).contains(&part), "{part}");
}

#[test]
fn on_a_busy_node_a_granted_share_is_worth_less() {
    let pace = Pace { variance: [0.01, 0.0, 0.04], ..Pace::from_law(0.5, 1.0, 0.4) };
    let busy = pace.with_available(0.5);
    // Half of the node is granted, a quarter is what the job gets.
    assert!((busy.step_s(0.5) - pace.step_s(0.25)).abs() < 1e-12);
    assert!((busy.deviation_s(0.5) - pace.deviation_s(0.25)).abs() < 1e-12);
    assert!((busy.usable - 0.8).abs() < 1e-12, "it needs twice the grant to use what it can");
    assert_eq!(pace.with_available(1.0), pace);
}

/// Counters are read at 0.3 s of every second, and reports go on until its end.
#[test]
fn old_counters_make_no_window() {
    let (mut tracker, mut pace) = (Tracker::default(), PaceTracker::default());
    for tick in 1..=400u64 {
        let now_s = 0.1 * tick as f64;
        // A step takes 0.2 s with half of the node.
        if tick % 2 == 0 {
            let sample = Sample { value: 1.0 / tick as f64, step: Some(tick / 2), total: Some(1000) };
            tracker.push(Time::from_secs_f64(now_s), sample);
        }
        let read_s = match tick % 10 {
            3 => now_s,
            0 => now_s - 0.7,
            _ => continue,
        };
        let now = Time::from_secs_f64(read_s);
        let reading = PaceReading {
            now,
            consumed_node_s: 0.5 * read_s,
            granted: 0.5,
            scarce: true,
            has_idle: false,
            is_disturbed: false,
        };
        pace.observe(reading, &tracker.signal());
    }
    let pace = pace.pace().expect("there are windows");
    for (share, truth) in [(0.5, 0.2), (1.0, 0.1)] {
        let found = pace.step_s(share);
        assert!((found / truth - 1.0).abs() < 0.05, "{found} is not {truth} at {share}: {pace:?}");
    }
}

/// A driver that reads counters seldom still gets windows: reports that are newer than the counters wait for them.
#[test]
fn reports_that_are_newer_than_all_counters_are_not_lost() {
    let (mut tracker, mut pace) = (Tracker::default(), PaceTracker::default());
    for tick in 1..=300u64 {
        let at = Time::from_secs_f64(0.1 * tick as f64);
        tracker.push(at, Sample { value: 1.0 / tick as f64, step: Some(tick), total: Some(1000) });
        // Counters are half a second old whenever they are shown.
        if tick % 10 == 0 {
            let read_s = 0.1 * tick as f64 - 0.5;
            let now = Time::from_secs_f64(read_s);
            let reading = PaceReading {
                now,
                consumed_node_s: 0.25 * read_s,
                granted: 0.25,
                scarce: true,
                has_idle: false,
                is_disturbed: false,
            };
            pace.observe(reading, &tracker.signal());
        }
    }
    let found = pace.pace().expect("there are windows").step_s(0.25);
    assert!((found / 0.1 - 1.0).abs() < 0.05, "{found}");
}

#[test]
fn a_warm_up_is_forgotten() {
    let mut tracker = PaceTracker::default();
    for step_s in [3.0, 3.0, 1.0] {
        tracker.add(1.0, step_s, 0.5, false);
    }
    let found = tracker.pace().expect("there are windows").step_s(0.5);
    assert!((found - 1.0).abs() < 0.01, "{found}");
}

#[test]
fn pauses_that_come_again_are_counted() {
    // Eighteen steps of a second, then one that takes six: an evaluation follows it.
    let round = |fixture: &mut Fixture| {
        fixture.run(18, 0.5, 1.0);
        fixture.run(6, 0.5, 6.0);
    };
    let mut once = Fixture::new(1000);
    round(&mut once);
    once.run(5, 0.5, 1.0);
    let found = once.pace().step_s(0.5);
    assert!((1.0..1.15).contains(&found), "a first pause may be the only one: {found}");
    assert!(once.pace().error > 2.0 * LEAST_ERROR, "but it makes the end less certain: {:?}", once.pace());
    let mut often = Fixture::new(1000);
    (0..6).for_each(|_| round(&mut often));
    often.run(5, 0.5, 1.0);
    let (found, truth) = (often.pace().step_s(0.5), 24.0 / 19.0);
    assert!((found / truth - 1.0).abs() < 0.08, "{found} is not {truth}");
    let mut epochs = Fixture::new(1000);
    epochs.tracker.set_epoch_steps(19);
    round(&mut epochs);
    epochs.run(5, 0.5, 1.0);
    let found = epochs.pace().step_s(0.5);
    assert!(found > 1.16, "a pause at the end of an epoch comes again: {found}");
}

/// Windows of `window_s`, each as many steps of one CPU-second as the share allows at `cost` CPU-seconds a step, until
/// `seconds` have passed. The boundary of a window is known to some milliseconds of CPU time only.
fn windows(tracker: &mut PaceTracker, seconds: f64, window_s: f64, share: f64, cost: f64) -> usize {
    let count = (seconds / window_s).ceil() as usize;
    for i in 0..count {
        let wobble = if i % 2 == 0 { 1.04 } else { 0.96 };
        tracker.add(window_s * share / cost, window_s * wobble, share, false);
    }
    count
}

fn cost(tracker: &PaceTracker, share: f64) -> f64 {
    tracker.pace().map_or(f64::NAN, |pace| pace.step_s(share) * share)
}

/// The steps of the others cost up to twice as much while a pod starts, which takes two to four seconds.
#[test]
fn the_start_of_a_neighbour_is_no_change_of_the_cost() {
    for (window_s, share) in [(0.5, 0.5), (1.0, 0.2), (1.0, 0.05), (2.0, 0.03)] {
        for dearer in [1.5, 1.8, 2.0] {
            let mut tracker = PaceTracker::default();
            windows(&mut tracker, 30.0, window_s, share, 1.0);
            for start in 0..3 {
                let count = (4.0f64 / window_s) as usize;
                for i in 0..count {
                    windows(&mut tracker, window_s, window_s, share, dearer);
                    let found = cost(&tracker, share);
                    assert!((0.9..1.1).contains(&found), "start {start}, window {i} of {window_s} s: {found}");
                }
                windows(&mut tracker, 6.0, window_s, share, 1.0);
                let found = cost(&tracker, share);
                assert!((0.9..1.1).contains(&found), "after start {start}, windows of {window_s} s: {found}");
            }
        }
    }
}

#[test]
fn a_lasting_change_is_believed_after_two_windows_and_some_seconds() {
    for (window_s, share) in [(0.5, 0.5), (1.0, 0.1), (4.0, 0.02), (60.0, 0.5)] {
        for change in [0.5, 1.6, 2.0, 3.0] {
            let mut tracker = PaceTracker::default();
            windows(&mut tracker, 40.0 * window_s, window_s, share, 1.0);
            windows(&mut tracker, (LASTING_S + window_s).max(2.0 * window_s), window_s, share, change);
            let found = cost(&tracker, share) / change;
            assert!((0.9..1.1).contains(&found), "{change} times, windows of {window_s} s: {found}");
        }
    }
}

/// A disturbance that lasts is taken for a change of the cost. At any share, and at any cost afterwards, the law is
/// right again after a few windows.
#[test]
fn a_wrong_belief_is_corrected_within_a_few_windows() {
    for (window_s, share) in [(0.5, 0.5), (1.0, 0.1), (3.0, 0.02), (20.0, 0.02)] {
        for believed in [1.5, 1.8, 2.5] {
            for truth in [0.8, 1.0, 1.15, 1.3] {
                let mut tracker = PaceTracker::default();
                windows(&mut tracker, 40.0 * window_s, window_s, share, 1.0);
                windows(&mut tracker, 2.0 * LASTING_S.max(window_s), window_s, share, believed);
                windows(&mut tracker, 10.0 * window_s, window_s, share, truth);
                let found = cost(&tracker, share) / truth;
                assert!((0.87..1.15).contains(&found), "{believed}, {truth}, {window_s} s, {share}: {found}");
            }
        }
    }
}

/// While other jobs start, longer steps are no pause, and are believed only when they have lasted for long.
#[test]
fn steps_that_are_longer_while_others_start_count_for_nothing_at_first() {
    let mut tracker = PaceTracker::default();
    windows(&mut tracker, 30.0, 1.0, 0.2, 1.0);
    let before = cost(&tracker, 0.2);
    for _ in 0..(LASTING_DISTURBED_S as usize - 1) {
        assert!(tracker.add(0.2 / 1.6, 1.0, 0.2, true), "left out");
    }
    assert_eq!(cost(&tracker, 0.2), before);
    assert!(!tracker.add(0.2 / 1.6, 1.0, 0.2, true));
    let found = cost(&tracker, 0.2);
    assert!((found / 1.6 - 1.0).abs() < 0.05, "{found}");
    // The same through readings: the pause that follows no start counts, the other does not.
    let found = |is_disturbed: bool| {
        let mut fixture = Fixture::new(1000);
        fixture.run(30, 0.5, 0.5);
        fixture.is_disturbed = is_disturbed;
        fixture.run(4, 0.5, 1.0);
        fixture.is_disturbed = false;
        fixture.run(6, 0.5, 0.5);
        fixture.pace().step_s(0.5)
    };
    assert!((found(true) - 0.5).abs() < 0.005 && found(false) > 0.51, "{} {}", found(true), found(false));
}

/// What earlier runs say of a job with the law [`amdahl`], if they took `factor` times as long.
fn past(factor: f64) -> Pace {
    let mut earlier = Fixture::new(1000);
    for share in [0.2, 0.5, 1.0, 0.3] {
        earlier.run(60, share, amdahl(share));
    }
    let pace = earlier.pace();
    let [serial_s, parallel_s] = [pace.serial_s, pace.parallel_s].map(|s| s * factor);
    let slower = Pace { serial_s, parallel_s, variance: pace.variance.map(|v| v * factor * factor), ..pace };
    expected_pace(&[slower]).expect("there is a run")
}

#[test]
fn before_its_first_window_a_job_is_expected_to_go_as_earlier_runs_went() {
    let mut fixture = Fixture::new(1000);
    assert_eq!(fixture.pace.pace(), None);
    fixture.pace.expect(Some(past(1.0)));
    let pace = fixture.pace();
    assert!(pace.is_guess && !fixture.pace.is_measured() && fixture.pace.own_pace().is_none());
    assert!((pace.step_s(0.4) / amdahl(0.4) - 1.0).abs() < 0.05, "{pace:?}");
}

#[test]
fn earlier_runs_say_how_the_law_goes_on_to_other_shares_and_their_speed_is_forgotten() {
    for factor in [1.0, 0.5, 2.0] {
        let mut fixture = Fixture::new(1000);
        fixture.pace.expect(Some(past(factor)));
        fixture.run(30, 0.1, amdahl(0.1));
        let (pace, own) = (fixture.pace(), fixture.pace.own_pace().expect("there are windows"));
        assert!(!pace.is_guess && pace.windows > 0);
        let error = |pace: &Pace, share: f64| (pace.step_s(share) / amdahl(share) - 1.0).abs();
        assert!(error(&pace, 0.1) < 0.02 && error(&pace, 1.0) < 0.15, "{factor}: {pace:?}");
        assert!(error(&own, 1.0) > 0.3, "without them the law is linear: {own:?}");
        assert!(pace.deviation_s(1.0) < own.deviation_s(1.0), "{pace:?} {own:?}");
    }
}

#[test]
fn a_wrong_shape_of_earlier_runs_gives_way_to_the_own_windows() {
    let mut fixture = Fixture::new(1000);
    fixture.pace.expect(Some(past(1.0)));
    for share in [0.2, 0.5, 1.0, 0.3] {
        fixture.run(60, share, 1.0 / share);
    }
    let pace = fixture.pace();
    assert!((pace.step_s(0.8) - 1.25).abs() < 0.1, "{pace:?}");
}
