//! Which waiting jobs would not fit into the memory of a GPU.
//!
//! **Problem.** A job that finds too little memory on a GPU ends with an error, often after minutes of preparation.
//!
//! **How.** What a job needs is what its author says, or else the most that finished runs of the same command had on
//! one GPU. NVML says what is free. Of that, what running jobs need and do not have yet is taken off. A waiting job for
//! which no GPU has room is left out of the decisions until there is room. Of several waiting jobs the one that would
//! start first gets the room. A job that needs more than any GPU has is refused.
//!
//! Without NVML nothing is known, and all jobs start.
//!
//! **Properties.** `a_job_that_does_not_fit_waits_until_there_is_room` (`tests/gpu.rs`).

use super::Driver;
use super::jobs::{Job, JobTable};
use crate::error::Refusal;
use crate::size::gib;
use crate::types::{ErrorCode, JobState};
use gainshare_core::model::{JobId, Time};
use gainshare_limits::gpu::GpuUse;
use gainshare_limits::nvml::GpuReading;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What a job needs on one GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct GpuMemoryNeed {
    bytes: u64,
    /// The job's author says so; else earlier runs do.
    is_stated: bool,
}

impl GpuMemoryNeed {
    pub(super) fn of(job: &Job) -> Option<GpuMemoryNeed> {
        let stated = job.record.spec.gpu_memory_bytes().map(|bytes| GpuMemoryNeed { bytes, is_stated: true });
        let need = stated.or(job.past_gpu_bytes.map(|bytes| GpuMemoryNeed { bytes, is_stated: false }));
        need.filter(|need| need.bytes > 0)
    }

    fn source(self) -> &'static str {
        if self.is_stated { "" } else { ", as its last run did," }
    }
}

/// What `explain` shows of a job's memory. `gpus` are those of this machine.
pub(super) fn memory_note(of: &GpuUse, gpus: &[GpuReading], now: Time) -> Option<String> {
    let measured = of.measured.as_ref()?;
    let mut note = format!("GPU memory: {} of this job", gib(measured.memory_bytes(now)?));
    for gpu in gpus.iter().filter(|gpu| measured.places.contains(&gpu.place)) {
        note += &format!(", {} of {} are free on its GPU", gib(gpu.free_bytes), gib(gpu.total_bytes));
    }
    Some(note)
}

/// What is free on each GPU, without what running jobs will still take.
struct Room(Vec<(u64, u64)>);

impl Room {
    /// Takes off what a job will still take: on the GPU where it has memory, or else where most is free.
    fn reserve(&mut self, need: GpuMemoryNeed, had: &BTreeMap<u64, u64>) {
        let place = had.iter().max_by_key(|(_, bytes)| **bytes);
        let more = need.bytes.saturating_sub(place.map_or(0, |(_, bytes)| *bytes));
        let found = match place {
            Some((place, _)) => self.0.iter_mut().find(|(other, _)| other == place),
            None => self.0.iter_mut().max_by_key(|(_, free)| *free),
        };
        if let Some((_, free)) = found {
            *free = free.saturating_sub(more);
        }
    }

    fn most(&self) -> u64 {
        self.0.iter().map(|(_, free)| *free).max().unwrap_or(0)
    }
}

fn largest(gpus: &[GpuReading]) -> Option<u64> {
    gpus.iter().map(|gpu| gpu.total_bytes).max()
}

/// Why a job can never run on these GPUs; `None` if it can, or if that is not known.
fn why_never(name: &str, stated: Option<u64>, gpus: &[GpuReading]) -> Option<String> {
    let (bytes, largest) = (stated?, largest(gpus)?);
    let (needs, has) = (gib(bytes), gib(largest));
    (bytes > largest).then(|| {
        format!("job {name} needs {needs} on a GPU, and the largest GPU has {has}: ask for less with --gpu-memory")
    })
}

/// The waiting jobs for which there is no room, each with a sentence for people. `gpus`: as read last; `is_expected`: a
/// reading is under way.
fn without_room(jobs: &JobTable, gpus: &[GpuReading], is_expected: bool) -> BTreeMap<JobId, String> {
    let mut waiting: Vec<(&Job, GpuMemoryNeed)> = jobs
        .values()
        .filter(|job| job.record.state == JobState::Queued && !job.record.adopted)
        .filter_map(|job| Some((job, GpuMemoryNeed::of(job)?)))
        .collect();
    if waiting.is_empty() {
        return BTreeMap::new();
    }
    let Some(largest) = largest(gpus) else {
        let text = "waits until the driver of the GPUs says how much memory is free";
        let waiting = waiting.into_iter().filter(|_| is_expected);
        return waiting.map(|(job, _)| (job.record.id, text.to_owned())).collect();
    };
    let mut room = Room(gpus.iter().map(|gpu| (gpu.place, gpu.free_bytes)).collect());
    for job in jobs.values().filter(|job| job.record.holds_slot()) {
        if let Some(need) = GpuMemoryNeed::of(job) {
            let none = BTreeMap::new();
            room.reserve(need, job.gpu.measured.as_ref().map_or(&none, |measured| &measured.memory));
        }
    }
    waiting.sort_by_key(|(job, _)| (Reverse(job.record.spec.priority), job.record.id));
    let mut without = BTreeMap::new();
    for (job, need) in waiting {
        let is_blocked = job.record.after.iter().any(|id| jobs.is_live(*id));
        // What an earlier run had may have been on a larger GPU.
        if is_blocked || need.bytes > largest {
            continue;
        }
        let most = room.most();
        if need.bytes <= most {
            room.reserve(need, &BTreeMap::new());
            continue;
        }
        let (needs, source, free) = (gib(need.bytes), need.source(), gib(most));
        let text = format!(
            "it needs{source} {needs} on a GPU, and at most {free} are free for it: it waits until another job ends; \
             to start it all the same, submit it with --gpu-memory 0"
        );
        without.insert(job.record.id, text);
    }
    without
}

impl Driver {
    /// Refuses a job that can never run on the GPUs of this machine, as far as they are known.
    pub(super) fn refuse_without_gpu(&self, name: &str, stated: Option<u64>) -> Result<(), Refusal> {
        let why = why_never(name, stated, self.gpus.meter.known_gpus());
        why.map_or(Ok(()), |why| Err(Refusal::new(ErrorCode::InvalidSpec, why)))
    }

    /// Finds the waiting jobs for which there is no room. Whether they are others than before.
    pub(super) fn find_gpu_waits(&mut self) -> bool {
        let now = self.now();
        let is_waiting = |job: &Job| job.record.state == JobState::Queued && GpuMemoryNeed::of(job).is_some();
        let meter = &mut self.gpus.meter;
        if meter.recent_gpus(now).is_empty() && self.jobs.values().any(is_waiting) {
            meter.ask(&self.handle, now);
        }
        let without = without_room(&self.jobs, meter.recent_gpus(now), meter.is_expected(now));
        let is_changed = !without.keys().eq(self.gpus.without_room.keys());
        self.gpus.without_room = without;
        is_changed
    }

    /// A reading came: ends jobs that can never run, and decides again if another job has room.
    pub(super) fn check_gpu_waits(&mut self) {
        let never: Vec<(JobId, String)> = self
            .jobs
            .values()
            .filter(|job| job.record.state == JobState::Queued)
            .filter_map(|job| {
                let stated = job.record.spec.gpu_memory_bytes();
                Some((job.record.id, why_never(&job.record.name, stated, self.gpus.meter.known_gpus())?))
            })
            .collect();
        for (id, why) in never {
            self.end(id, JobState::Failed, None, None, Some(why));
        }
        self.plans.is_wanted |= self.find_gpu_waits();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_jobs_keep_what_they_do_not_have_yet() {
        let need = |bytes: u64| GpuMemoryNeed { bytes, is_stated: true };
        let mut room = Room(vec![(1, 60), (2, 20)]);
        assert_eq!(room.most(), 60);
        room.reserve(need(35), &BTreeMap::new());
        assert_eq!(room.0, [(1, 25), (2, 20)], "it will most likely be where most is free");
        room.reserve(need(15), &BTreeMap::from([(2, 10)]));
        assert_eq!(room.0, [(1, 25), (2, 15)], "it has the other 10 already");
        room.reserve(need(5), &BTreeMap::from([(2, 10)]));
        room.reserve(need(500), &BTreeMap::from([(7, 10)]));
        assert_eq!(room.0, [(1, 25), (2, 15)], "it has more than it said, or is on an unknown GPU");
        assert_eq!(room.most(), 25);
    }

    #[test]
    fn only_what_is_larger_than_every_gpu_is_refused() {
        let gpu = |total_bytes: u64| GpuReading { place: 1, total_bytes, free_bytes: 0, processes: vec![] };
        let gpus = [gpu(40 << 30), gpu(80 << 30)];
        assert_eq!(why_never("a", Some(80 << 30), &gpus), None);
        assert_eq!(why_never("a", None, &gpus), None);
        assert_eq!(why_never("a", Some(u64::MAX), &[]), None, "nothing is known");
        let why = why_never("a", Some(81 << 30), &gpus).unwrap();
        assert!(
            why.contains("needs 81.0 GiB") && why.contains("has 80.0 GiB") && why.contains("--gpu-memory"),
            "{why}"
        );
    }
}
