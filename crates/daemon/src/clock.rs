//! Time for decisions, and time for people.
//!
//! Decisions run on the kernel's boot clock (it counts suspended time and nobody can set it), shifted by an offset that the journal
//! keeps, so that time goes on after a restart of the daemon and never runs backwards after a reboot. The wall clock is only ever shown:
//! setting it by an hour expires nothing.

use gainshare_core::model::Time;
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// One moment on both clocks.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    pub time: Time,
    pub unix_s: f64,
}

/// Where the journal's time is, relative to this boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clock {
    boot_id: String,
    /// Added to the boot clock.
    offset_us: u64,
}

impl Clock {
    /// Goes on from what was kept: the same clock within one boot, later than `latest` after a reboot.
    pub fn resume(kept: Option<Clock>, latest: Time) -> Clock {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned();
        match kept {
            Some(clock) if clock.boot_id == boot_id => clock,
            Some(_) => Clock { boot_id, offset_us: (latest.0 + 1).saturating_sub(boottime_ns() / 1000) },
            // A fresh journal begins at zero or, where the machine is older than the journal, at its uptime.
            None => Clock { boot_id, offset_us: 0 },
        }
    }

    pub fn now(&self) -> Time {
        Time(boottime_ns() / 1000 + self.offset_us)
    }

    pub fn moment(&self) -> Moment {
        Moment { time: self.now(), unix_s: unix_s() }
    }
}

/// Nanoseconds since boot, suspended time included.
pub fn boottime_ns() -> u64 {
    match clock_gettime(ClockId::CLOCK_BOOTTIME) {
        Ok(t) => t.tv_sec() as u64 * 1_000_000_000 + t.tv_nsec() as u64,
        Err(_) => 0,
    }
}

pub fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// RFC 3339 in UTC with milliseconds, e.g. `2026-03-01T12:00:00.250Z`.
pub fn rfc3339(unix_s: f64) -> String {
    let ms = (unix_s.clamp(0.0, 253_402_300_799.0) * 1000.0).round() as u64;
    let (days, of_day) = (ms / 86_400_000, ms % 86_400_000);
    let (year, month, day) = civil(days);
    let (h, m, s) = (of_day / 3_600_000, of_day / 60_000 % 60, of_day / 1000 % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}.{:03}Z", of_day % 1000)
}

/// Year, month and day of a count of days since 1970-01-01. Years are counted from March, so that the leap day comes last and
/// the lengths of the months before it follow one rule.
fn civil(days: u64) -> (u64, u64, u64) {
    const DAYS_TO_1970_FROM_MARCH_0000: u64 = 719_468;
    const DAYS_IN_400_YEARS: u64 = 146_097;
    let days = days + DAYS_TO_1970_FROM_MARCH_0000;
    let (era, of_era) = (days / DAYS_IN_400_YEARS, days % DAYS_IN_400_YEARS);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_dates() {
        for (unix_s, text) in [
            (0.0, "1970-01-01T00:00:00.000Z"),
            (951_782_400.0, "2000-02-29T00:00:00.000Z"),
            (1_709_251_199.999_6, "2024-03-01T00:00:00.000Z"),
            (1_735_689_599.25, "2024-12-31T23:59:59.250Z"),
            (4_107_542_400.0, "2100-03-01T00:00:00.000Z"),
            (f64::NAN, "1970-01-01T00:00:00.000Z"),
        ] {
            assert_eq!(rfc3339(unix_s), text);
        }
    }

    #[test]
    fn time_goes_on_within_a_boot_and_after_one() {
        let first = Clock::resume(None, Time::ZERO);
        let before = first.now();
        let same_boot = Clock::resume(Some(first.clone()), before);
        assert_eq!(same_boot, first);

        let far = Time(before.0 + 3_600_000_000_000);
        let other_boot = Clock { boot_id: "another".into(), offset_us: 0 };
        assert!(Clock::resume(Some(other_boot), far).now() > far);
    }
}
