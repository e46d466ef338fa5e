//! What NVML shows of one job: its memory and its time on GPUs.

use gainshare_core::model::{Span, Time};
use std::collections::BTreeMap;

/// Numbers that are older than this are not used.
pub const FRESH: Span = Span::from_secs(4);

/// What NVML shows of one job.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GpuMeasurement {
    at: Time,
    /// Memory on each GPU, as far as the driver says.
    pub memory: BTreeMap<u64, u64>,
    /// The part of one GPU's time in which the job computed since the reading before, over all GPUs.
    busy: Option<f64>,
    /// The GPUs on which it has processes.
    pub places: Vec<u64>,
}

impl GpuMeasurement {
    pub fn at(at: Time) -> GpuMeasurement {
        GpuMeasurement { at, ..GpuMeasurement::default() }
    }

    /// Adds a process of the job on the GPU at `place`: its memory, and the part of the time in which it computed.
    pub fn add(&mut self, place: u64, memory_bytes: Option<u64>, busy: Option<f64>) {
        if let Some(bytes) = memory_bytes {
            *self.memory.entry(place).or_default() += bytes;
        }
        if let Some(busy) = busy {
            self.busy = Some(self.busy.unwrap_or(0.0) + busy);
        }
        if !self.places.contains(&place) {
            self.places.push(place);
        }
    }

    /// A job on these GPUs.
    #[cfg(test)]
    pub(super) fn on(places: &[u64], at: Time, busy: Option<f64>) -> GpuMeasurement {
        GpuMeasurement { at, memory: BTreeMap::new(), busy, places: places.to_vec() }
    }

    pub fn is_fresh(&self, now: Time) -> bool {
        now.since(self.at) <= FRESH
    }

    pub fn memory_bytes(&self, now: Time) -> Option<u64> {
        let is_known = self.is_fresh(now) && !self.memory.is_empty();
        is_known.then(|| self.memory.values().sum())
    }

    pub fn busy(&self, now: Time) -> Option<f64> {
        self.busy.filter(|_| self.is_fresh(now))
    }

    /// The same, at the reading.
    pub fn busy_then(&self) -> Option<f64> {
        self.busy
    }

    /// The only GPU on which the job has processes.
    pub fn only_place(&self, now: Time) -> Option<u64> {
        let [place] = self.places[..] else { return None };
        Some(place).filter(|_| self.is_fresh(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_of_a_job_are_summed_and_old_numbers_are_not_used() {
        let now = Time::from_secs_f64(100.0);
        let mut measured = GpuMeasurement::at(now);
        measured.add(7, None, None);
        assert_eq!((measured.memory_bytes(now), measured.busy(now), measured.only_place(now)), (None, None, Some(7)));
        measured.add(7, Some(5), Some(0.25));
        measured.add(8, Some(6), Some(0.5));
        assert_eq!(
            (measured.memory_bytes(now), measured.busy(now), measured.only_place(now)),
            (Some(11), Some(0.75), None)
        );
        let later = now + FRESH + Span::from_secs(1);
        assert_eq!((measured.memory_bytes(later), measured.busy(later)), (None, None));
    }
}
