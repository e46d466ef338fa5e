//! Time for decisions, and time for people.
//!
//! Decisions run on the kernel's boot clock (it counts suspended time and cannot be set), shifted
//! by an offset that the journal keeps, so that time goes on after a restart of the daemon and
//! never runs backwards after a reboot. The wall clock is only ever shown: setting it by an hour
//! expires nothing.

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
            Some(_) => Clock { boot_id, offset_us: latest.0.saturating_add(1).saturating_sub(boottime_ns() / 1000) },
            // A fresh journal begins at zero or, where the machine is older than the journal, at its uptime.
            None => Clock { boot_id, offset_us: 0 },
        }
    }

    pub fn now(&self) -> Time {
        Time((boottime_ns() / 1000).saturating_add(self.offset_us))
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
    // The last second that four digits of a year can name; NaN becomes 0.
    let ms = (unix_s.clamp(0.0, 253_402_300_799.0) * 1000.0).round() as i64;
    format!("{:.3}", jiff::Timestamp::from_millisecond(ms).unwrap_or_default())
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
    fn a_damaged_offset_does_not_overflow() {
        let clock = Clock { boot_id: "x".into(), offset_us: u64::MAX };
        assert_eq!(clock.now(), Time(u64::MAX));
        assert!(Clock::resume(Some(clock), Time(u64::MAX)).now() >= Time(u64::MAX - 1));
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
