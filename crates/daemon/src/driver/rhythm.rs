//! Steps a second of a job that reports no steps, from the rhythm of its parallel regions and launches.
//!
//! **Problem.** People want to know how fast a silent job is, whether it stands still and when it will be done. Every
//! step of an optimizer opens the same parallel regions and launches the same kernels in the same order. The library
//! inside the job counts them by the place that begins them (`gainshare_page::rhythm`). Which of these counts is that
//! of the steps is not written anywhere.
//!
//! **How.** Once a second the table is read ([`super::inside`]). A place that occurs `times` times in each step is
//! *regular*: as many occurrences always span the same number of events, its *period*. A layer that occurs often in one
//! part of a step is regular only within that part, so its periods do not *cover* all events of the job. Places with
//! one period form a *pattern*. The pattern of most places wins. Of these places, those that also occur in evaluations
//! are counted too often, so the place with the fewest occurrences counts the steps.
//!
//! **Limits.** A step here is what repeats: where gradients are accumulated, each batch is one. A job whose steps
//! differ much in length, or several programs at once, have no rhythm. On a busy machine a place of the optimizer may
//! be taken for irregular: evaluations then count as steps. PyTorch with a single thread opens no regions. The loss
//! cannot be known, and no decision uses the rhythm: a job could write anything into its table.
//!
//! **Properties.** `steps_of_a_deep_network_are_found`, `evaluations_are_no_steps`, `two_models_in_turn_make_one_step`,
//! `noise_is_tolerated`, `events_without_order_and_garbage_have_no_rhythm`, `a_stall_is_noticed`.

use crate::types::RhythmInfo;
use gainshare_core::model::{Span, Time};
use gainshare_page::rhythm::Place;
use std::ops::RangeInclusive;

/// A place that occurs more often in a step is not tried: its stamps reach over too few steps.
const MOST_TIMES: usize = 4;

/// A place is regular if at least this many periods were measured, and this part of them is alike.
const FEWEST_PERIODS: usize = 6;
const ALIKE_PART: f64 = 0.7;

/// Periods are alike if they differ by at most this part.
const ALIKE: f64 = 0.1;

/// What the periods of a place of the steps cover of all events. More than the whole is an error of measurement.
const COVERAGE: RangeInclusive<f64> = 0.85..=1.15;

/// Coverage is measured over at least this many periods.
const COVERED_PERIODS: f64 = 8.0;

/// Regular places belong to one pattern if their periods differ by less than this part.
const SAME_PERIOD: f64 = 0.05;

/// A pattern counts when it was found this many times in a row: events without order have patterns by chance.
const FINDS: u32 = 3;

/// Counts of this many readings are kept. If there are more, every second one is dropped: the newest ones are the
/// closest, and the oldest ones reach far back.
const MOST_READINGS: usize = 64;

/// The pace is that of the last steps: at least this many, over at least this time.
const STEPS_OF_PACE: f64 = 10.0;
const TIME_OF_PACE: Span = Span::from_secs(5);

/// A slow job has a pace after this many steps.
const FEWEST_STEPS: f64 = 3.0;

/// A job without an event for this many steps, and for this long, stands still.
const STEPS_OF_STALL: f64 = 10.0;
const TIME_OF_STALL: Span = Span::from_secs(5);

/// What is known of one job's rhythm.
#[derive(Debug, Default)]
pub(super) struct Rhythm {
    /// The oldest first. Readings without a new event are not kept.
    readings: Vec<CountReading>,
    /// The period that was found last, and how many times in a row.
    found: Option<(f64, u32)>,
    pattern: Option<Pattern>,
}

/// The counts of all places at one moment.
#[derive(Debug)]
struct CountReading {
    at: Time,
    counts: Vec<u32>,
}

/// Places that occur in every step.
#[derive(Debug, Clone)]
struct Pattern {
    /// Events of one step.
    period: f64,
    members: Vec<Member>,
}

#[derive(Debug, Clone, Copy)]
struct Member {
    place: usize,
    /// Occurrences in one step.
    times: usize,
}

impl Pattern {
    /// How often each member completed a step since `before`, the fewest first.
    fn steps_by_member(&self, counts: &[u32], before: Option<&[u32]>) -> Vec<f64> {
        let count = |counts: &[u32], place: usize| counts.get(place).copied().unwrap_or(0);
        let steps = |member: &Member| {
            let earlier = before.map_or(0, |before| count(before, member.place));
            f64::from(count(counts, member.place).wrapping_sub(earlier)) / member.times as f64
        };
        let mut steps: Vec<f64> = self.members.iter().map(steps).collect();
        steps.sort_by(f64::total_cmp);
        steps
    }

    /// Steps between two readings.
    fn steps_since(&self, before: &CountReading, now: &CountReading) -> f64 {
        self.steps_by_member(&now.counts, Some(&before.counts)).first().copied().unwrap_or(0.0)
    }

    /// Steps since the start of the program. Members that began much later than the others do not count.
    fn steps(&self, reading: &CountReading) -> f64 {
        let steps = self.steps_by_member(&reading.counts, None);
        let Some(middle) = steps.get(steps.len() / 2).copied() else { return 0.0 };
        steps.into_iter().find(|steps| *steps >= 0.5 * middle).unwrap_or(0.0)
    }

    /// How much of all that happened the pattern explains.
    fn weight(&self, reading: &CountReading) -> f64 {
        self.steps(reading) * self.period * self.members.len() as f64
    }

    fn is_alike(&self, period: f64) -> bool {
        (self.period / period - 1.0).abs() <= SAME_PERIOD
    }
}

impl Rhythm {
    /// Takes in a table.
    pub(super) fn record(&mut self, places: &[Place], now: Time) {
        let counts: Vec<u32> = places.iter().map(|place| place.count).collect();
        if let Some(last) = self.readings.last() {
            if last.counts == counts {
                return;
            }
            // Counts that fell belong to another attempt, or are garbage.
            if counts.iter().zip(&last.counts).any(|(new, old)| new.wrapping_sub(*old) > u32::MAX / 2) {
                *self = Rhythm::default();
            }
        }
        if self.readings.len() >= MOST_READINGS {
            let mut number = 0;
            self.readings.retain(|_| {
                number += 1;
                number % 2 == 1
            });
        }
        let reading = CountReading { at: now, counts };
        self.readings.push(reading);
        let Some(found) = self.find(places) else { return };
        let finds = match self.found {
            Some((period, finds)) if found.is_alike(period) => finds.saturating_add(1),
            _ => 1,
        };
        self.found = Some((found.period, finds));
        if finds >= FINDS {
            self.pattern = Some(match self.pattern.take() {
                Some(old) => self.better(old, found),
                None => found,
            });
        }
    }

    /// Which of two patterns is that of the steps.
    fn better(&self, old: Pattern, found: Pattern) -> Pattern {
        let Some(last) = self.readings.last() else { return found };
        let is_better = if old.is_alike(found.period) {
            // The newer one has no place that occurs no more.
            2 * found.members.len() >= old.members.len()
        } else {
            // An evaluation has a rhythm of its own.
            found.weight(last) > old.weight(last)
        };
        if is_better { found } else { old }
    }

    /// The pattern of most places; of two that are as good, that with the shorter period.
    fn find(&self, places: &[Place]) -> Option<Pattern> {
        let regular = places.iter().enumerate().filter_map(|(number, place)| self.regular(number, place));
        let regular: Vec<(Member, f64)> = regular.collect();
        let pattern = |(_, period): &(Member, f64)| {
            let mut pattern = Pattern { period: *period, members: Vec::new() };
            let alike = regular.iter().filter(|(_, other)| pattern.is_alike(*other)).map(|(member, _)| *member);
            pattern.members = alike.collect();
            pattern
        };
        let by_places =
            |a: &Pattern, b: &Pattern| a.members.len().cmp(&b.members.len()).then(b.period.total_cmp(&a.period));
        regular.iter().map(pattern).max_by(by_places)
    }

    /// A place as a member of a pattern, with the period; `None` if it is not regular.
    fn regular(&self, number: usize, place: &Place) -> Option<(Member, f64)> {
        let stamps = place.stamps();
        (1..=MOST_TIMES).find_map(|times| {
            let period = period(&stamps, times)?;
            let coverage = self.coverage(number, times, period)?;
            COVERAGE.contains(&coverage).then_some((Member { place: number, times }, period))
        })
    }

    /// Which part of all events the periods of a place contain; `None` if there were too few of them.
    fn coverage(&self, number: usize, times: usize, period: f64) -> Option<f64> {
        let (last, earlier) = self.readings.split_last()?;
        let periods = |before: &CountReading| {
            let count = last.counts.get(number)?.wrapping_sub(*before.counts.get(number)?);
            Some(f64::from(count) / times as f64)
        };
        let enough = |before: &&CountReading| periods(before).is_some_and(|periods| periods >= COVERED_PERIODS);
        let before = earlier.iter().rev().find(enough)?;
        let events = last.counts.iter().zip(&before.counts).map(|(new, old)| f64::from(new.wrapping_sub(*old)));
        Some(periods(before)? * period / events.sum::<f64>())
    }

    /// Steps a second over the last steps.
    fn steps_per_s(&self) -> Option<f64> {
        let pattern = self.pattern.as_ref()?;
        let (last, earlier) = self.readings.split_last()?;
        let mut pace = None;
        // Before its first step the job imported libraries or loaded data.
        for before in earlier.iter().rev().take_while(|before| pattern.steps(before) >= 1.0) {
            let (elapsed, steps) = (last.at.since(before.at), pattern.steps_since(before, last));
            if steps >= FEWEST_STEPS && elapsed > Span::ZERO {
                pace = Some(steps / elapsed.as_secs_f64());
            }
            if steps >= STEPS_OF_PACE && elapsed >= TIME_OF_PACE {
                break;
            }
        }
        pace
    }

    /// Steps since the start of the program, about.
    pub(super) fn steps(&self) -> Option<u64> {
        Some(self.pattern.as_ref()?.steps(self.readings.last()?) as u64)
    }

    /// What is shown; `total`: how many steps there will be, if that is known.
    pub(super) fn info(&self, total: Option<u64>, now: Time) -> Option<RhythmInfo> {
        let (steps_per_s, steps) = (self.steps_per_s()?, self.steps()?);
        let silent = now.since(self.readings.last()?.at);
        let is_stalled = silent >= TIME_OF_STALL && silent.as_secs_f64() * steps_per_s >= STEPS_OF_STALL;
        let stalled_s = is_stalled.then_some(silent.as_secs_f64());
        Some(RhythmInfo { steps_per_s, steps, total: total.filter(|total| *total >= steps), stalled_s })
    }
}

/// The number of events that `times` occurrences span, if that number is nearly always the same.
fn period(stamps: &[u32], times: usize) -> Option<f64> {
    let mut spans: Vec<u32> =
        stamps.windows(times + 1).filter_map(|w| Some(w.last()?.wrapping_sub(*w.first()?))).collect();
    if spans.len() < FEWEST_PERIODS {
        return None;
    }
    spans.sort_unstable();
    let middle = spans[spans.len() / 2];
    let most = ALIKE * f64::from(middle);
    let alike: Vec<f64> =
        spans.iter().filter(|span| f64::from(span.abs_diff(middle)) <= most).map(|span| f64::from(*span)).collect();
    let is_regular = alike.len() as f64 >= ALIKE_PART * spans.len() as f64;
    is_regular.then(|| alike.iter().sum::<f64>() / alike.len() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gainshare_page::PAGE_BYTES;
    use gainshare_page::rhythm::{PLACES, decode_rhythm};

    /// A number from 0 to below `below`, the same in each run.
    struct Dice(u64);

    impl Dice {
        fn roll(&mut self, below: u64) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) % below
        }
    }

    /// A job: the places of its events, with their times.
    #[derive(Default)]
    struct Story {
        events: Vec<(f64, usize)>,
        now_s: f64,
    }

    impl Story {
        /// Events at these places, evenly within this time.
        fn add(&mut self, places: &[usize], takes_s: f64) {
            let spacing_s = takes_s / places.len() as f64;
            self.events.extend(places.iter().enumerate().map(|(i, place)| (self.now_s + spacing_s * i as f64, *place)));
            self.now_s += takes_s;
        }

        /// What the daemon knows at the end: it has read the table once a second.
        fn rhythm(&self) -> Rhythm {
            let (mut rhythm, mut places) = (Rhythm::default(), [Place::default(); PLACES]);
            let mut events = self.events.iter().enumerate().peekable();
            // Readings are not in step with the job.
            for at_s in (0..).map(|second| f64::from(second) + 0.37).take_while(|at_s| *at_s <= self.now_s) {
                while let Some((number, (_, place))) = events.next_if(|(_, (at, _))| *at <= at_s) {
                    places[place % PLACES].note(number as u32);
                }
                rhythm.record(&places, Time::from_secs_f64(at_s));
            }
            rhythm
        }

        fn info(&self) -> Option<RhythmInfo> {
            self.rhythm().info(None, Time::from_secs_f64(self.now_s))
        }

        fn assert_pace(&self, expected: f64, why: &str) -> RhythmInfo {
            let info = self.info().unwrap_or_else(|| panic!("{why}: no rhythm"));
            assert!((info.steps_per_s / expected - 1.0).abs() < 0.1, "{why}: {info:?}, {expected} expected");
            info
        }
    }

    /// A step of a network with equal layers: an input, a forward and a backward part, a loss and an optimizer.
    /// Different places are numbered from `first`.
    fn step(layers: usize, first: usize) -> Vec<usize> {
        let part = |places: &[usize]| -> Vec<usize> { places.iter().map(|place| first + place).collect() };
        let mut events = part(&[0, 1]);
        (0..layers).for_each(|_| events.extend(part(&[2, 3, 4, 3])));
        events.extend(part(&[5, 6, 7]));
        (0..layers).for_each(|_| events.extend(part(&[8, 9, 10, 9, 11, 8, 12])));
        events.extend(part(&[13, 14, 14, 15]));
        events
    }

    /// The forward part of the same.
    fn evaluation(layers: usize, first: usize) -> Vec<usize> {
        let events = step(layers, first);
        events[..2 + 4 * layers + 2].to_vec()
    }

    #[test]
    fn steps_of_a_deep_network_are_found() {
        for (layers, per_s) in [(1, 30.0), (3, 12.0), (12, 4.3), (24, 9.7), (96, 2.1)] {
            let mut story = Story::default();
            for _ in 0..(40.0 * per_s) as usize {
                story.add(&step(layers, 0), 1.0 / per_s);
            }
            let info = story.assert_pace(per_s, &format!("{layers} layers"));
            assert!(info.steps.abs_diff((40.0 * per_s) as u64) <= 2 + per_s as u64, "{layers} layers: {info:?}");
            assert_eq!(info.stalled_s, None);
        }
    }

    #[test]
    fn a_job_with_one_kind_of_region_makes_a_step_with_each() {
        let mut story = Story::default();
        (0..400).for_each(|_| story.add(&[5], 0.05));
        story.assert_pace(20.0, "one place");
    }

    #[test]
    fn rare_events_and_the_start_of_a_job_are_no_steps() {
        let mut story = Story { now_s: 20.0, ..Story::default() };
        (0..300).for_each(|i| story.add(&[40 + i % 5], 0.01));
        for i in 0..300 {
            story.add(&step(4, 0), 0.1);
            if i % 10 == 9 {
                story.add(&[30, 31], 0.01);
            }
        }
        let info = story.assert_pace(10.0 / 1.01, "every tenth step is followed by a report");
        assert!(info.steps.abs_diff(300) <= 12, "{info:?}");
    }

    #[test]
    fn evaluations_are_no_steps() {
        let mut story = Story::default();
        for _ in 0..4 {
            (0..120).for_each(|_| story.add(&step(6, 0), 0.1));
            (0..100).for_each(|_| story.add(&evaluation(6, 0), 0.04));
        }
        let in_evaluation = story.info().unwrap();
        assert!(in_evaluation.steps.abs_diff(480) <= 12, "{in_evaluation:?}");
        (0..120).for_each(|_| story.add(&step(6, 0), 0.1));
        let info = story.assert_pace(10.0, "the fifth epoch");
        assert!(info.steps.abs_diff(600) <= 15, "{info:?}");
    }

    #[test]
    fn two_models_in_turn_make_one_step() {
        let mut story = Story::default();
        for _ in 0..200 {
            story.add(&step(2, 0), 0.08);
            story.add(&step(5, 20), 0.12);
        }
        story.assert_pace(5.0, "a generator and its opponent");
    }

    #[test]
    fn more_places_than_the_table_has_are_tolerated() {
        let mut story = Story::default();
        for _ in 0..300 {
            let events: Vec<usize> = (0..6).flat_map(|part| step(3, 17 * part)).collect();
            story.add(&events, 0.1);
        }
        story.assert_pace(10.0, "96 places share 63 lines");
    }

    #[test]
    fn noise_is_tolerated() {
        let (mut story, mut dice) = (Story::default(), Dice(7));
        for _ in 0..300 {
            let mut events = step(4, 0);
            for _ in 0..dice.roll(4) {
                events.insert(dice.roll(events.len() as u64) as usize, 30 + dice.roll(20) as usize);
            }
            story.add(&events, 0.08 + 0.001 * dice.roll(40) as f64);
        }
        story.assert_pace(10.0, "up to three of 54 events are noise");
    }

    #[test]
    fn slow_steps_are_found() {
        let mut story = Story { now_s: 30.0, ..Story::default() };
        (0..30).for_each(|_| story.add(&step(12, 0), 6.0));
        story.assert_pace(1.0 / 6.0, "a step of six seconds");
    }

    #[test]
    fn a_change_of_pace_is_followed() {
        let mut story = Story::default();
        (0..600).for_each(|_| story.add(&step(3, 0), 0.05));
        story.assert_pace(20.0, "alone");
        (0..100).for_each(|_| story.add(&step(3, 0), 0.2));
        story.assert_pace(5.0, "beside other jobs");
    }

    #[test]
    fn events_without_order_and_garbage_have_no_rhythm() {
        let mut dice = Dice(3);
        for places in [3, 5, 10, 20, 40, 60] {
            let mut story = Story::default();
            for _ in 0..500 {
                let events: Vec<usize> = (0..50).map(|_| dice.roll(places) as usize).collect();
                story.add(&events, 0.1);
            }
            assert_eq!(story.info(), None, "{places} places without order");
        }
        assert_eq!(Story { now_s: 50.0, ..Story::default() }.info(), None, "no event");
        let mut rhythm = Rhythm::default();
        for second in 0..200 {
            let bytes: Vec<u8> = (0..PAGE_BYTES).map(|_| dice.roll(256) as u8).collect();
            let mut table = gainshare_page::rhythm::empty_rhythm();
            table[16..].copy_from_slice(&bytes[16..]);
            rhythm.record(&decode_rhythm(&table).unwrap(), Time::from_secs_f64(f64::from(second)));
            assert_eq!(rhythm.info(None, Time::from_secs_f64(f64::from(second))), None, "garbage");
        }
    }

    #[test]
    fn a_stall_is_noticed() {
        let mut story = Story::default();
        (0..300).for_each(|_| story.add(&step(3, 0), 0.1));
        assert_eq!(story.info().unwrap().stalled_s, None);
        story.now_s += 40.0;
        let info = story.assert_pace(10.0, "the pace before the stall");
        assert!(info.stalled_s.is_some_and(|stalled_s| (38.0..=41.0).contains(&stalled_s)), "{info:?}");
    }

    #[test]
    fn another_attempt_begins_without_a_rhythm() {
        let mut story = Story::default();
        (0..300).for_each(|_| story.add(&step(3, 0), 0.1));
        let mut rhythm = story.rhythm();
        assert!(rhythm.pattern.is_some());
        rhythm.record(&[Place::default(); PLACES], Time::from_secs_f64(50.0));
        assert!(rhythm.pattern.is_none() && rhythm.readings.len() == 1);
    }

    #[test]
    fn a_total_that_was_passed_is_not_shown() {
        let mut story = Story::default();
        (0..300).for_each(|_| story.add(&step(3, 0), 0.1));
        let (rhythm, now) = (story.rhythm(), Time::from_secs_f64(story.now_s));
        assert_eq!(rhythm.info(Some(1000), now).unwrap().total, Some(1000));
        assert_eq!(rhythm.info(Some(100), now).unwrap().total, None);
    }

    #[test]
    fn many_readings_reach_far_back_in_little_memory() {
        let mut story = Story::default();
        (0..2000).for_each(|_| story.add(&[3], 0.5));
        let rhythm = story.rhythm();
        assert!(rhythm.readings.len() <= MOST_READINGS);
        let age = |reading: &CountReading| story.now_s - reading.at.as_secs_f64();
        assert!(age(&rhythm.readings[0]) > 500.0 && age(&rhythm.readings[rhythm.readings.len() - 2]) < 5.0);
    }
}
