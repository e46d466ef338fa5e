//! What the driver of the GPUs measures of each job: its memory, and its part of a GPU's time.
//!
//! **Problem.** The library inside a job knows how long the job waited, but not how long the GPU computed for it, and
//! nothing of its memory. NVIDIA's management library (NVML) knows both. It may be missing, and a call may take long.
//!
//! **How.** While jobs run, a thread of its own reads NVML once a second and sends what it found as a task. The
//! processes on GPUs are given to jobs by session, parents and control group. Nothing is started on a machine without
//! NVIDIA's driver. A reading that is late is not waited for, and numbers that are old are not used.
//!
//! **Properties.** `memory_and_time_on_a_gpu_are_shown_of_each_job`, `a_driver_that_does_not_answer_delays_nothing`
//! (`tests/gpu.rs`).

use super::Driver;
use super::gpu_memory::GpuMemoryNeed;
use super::handle::DriverHandle;
use super::jobs::Job;
use crate::types::JobState;
use gainshare_core::model::{JobId, Span, Time};
use gainshare_limits::RuntimeKind;
use gainshare_limits::gpu::{FRESH, GpuMeasurement};
use gainshare_limits::nvml::{self, GpuProcess, GpuReading, Nvml};
use gainshare_limits::process::sessions_of;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc;

/// Time between two attempts to load NVML.
const RETRY: Span = Span::from_secs(60);

/// What is free on a GPU is taken for known for this long.
const RECENT: Span = Span::from_secs(10);

/// Jobs that need memory on a GPU wait for a reading for this long.
const PATIENCE: Span = Span::from_secs(30);

/// A process on a GPU, with what its job is recognised by.
struct ProcessOnGpu {
    process: GpuProcess,
    place: u64,
    /// The process's session and those of its ancestors.
    sessions: Vec<i32>,
    /// `/proc/PID/cgroup`.
    groups: String,
}

/// One reading of all GPUs.
pub(super) struct AllGpusReading {
    gpus: Vec<GpuReading>,
    found: Vec<ProcessOnGpu>,
}

/// The thread that reads NVML, and what it read last.
#[derive(Default)]
pub(super) struct GpuMeter {
    requests: Option<mpsc::Sender<()>>,
    /// A reading is under way.
    is_away: bool,
    next_try: Time,
    /// When the reading that is under way was asked for.
    asked_at: Time,
    gpus: Vec<GpuReading>,
    read_at: Option<Time>,
    /// Why there are no readings although there is a driver.
    pub(super) problem: Option<String>,
}

impl GpuMeter {
    /// Asks for the next reading, unless one is under way. Costs nothing on a machine without NVIDIA's driver.
    pub(super) fn ask(&mut self, handle: &DriverHandle, now: Time) {
        if self.is_away || (self.requests.is_none() && now < self.next_try) {
            return;
        }
        if self.requests.is_none() {
            self.next_try = now + RETRY;
            self.requests = start(handle);
        }
        self.asked_at = now;
        self.is_away = self.requests.as_ref().is_some_and(|requests| requests.send(()).is_ok());
        if !self.is_away {
            self.requests = None;
        }
    }

    /// Whether nobody has asked for a reading yet.
    fn is_new(&self) -> bool {
        self.requests.is_none() && self.next_try == Time::default()
    }

    /// The GPUs of this machine, as read last; empty if they were never read.
    pub(super) fn known_gpus(&self) -> &[GpuReading] {
        &self.gpus
    }

    /// The same; empty if that was long ago.
    pub(super) fn recent_gpus(&self, now: Time) -> &[GpuReading] {
        if self.read_at.is_some_and(|at| now.since(at) <= RECENT) { &self.gpus } else { &[] }
    }

    /// Whether a reading is under way and may still come.
    pub(super) fn is_expected(&self, now: Time) -> bool {
        self.is_away && now.since(self.asked_at) <= PATIENCE
    }
}

/// Starts the thread; `None` where there is nothing to read.
fn start(handle: &DriverHandle) -> Option<mpsc::Sender<()>> {
    let file = nvml::library_file()?;
    let (requests, waiting) = mpsc::channel();
    let handle = handle.clone();
    let run = move || {
        let mut nvml = match Nvml::load(&file) {
            Ok(nvml) => nvml,
            Err(why) => return handle.send(move |driver| driver.gpus_measured(Err(why))),
        };
        while waiting.recv().is_ok() {
            let reading = read(&mut nvml);
            handle.send(move |driver| driver.gpus_measured(Ok(reading)));
        }
    };
    let started = std::thread::Builder::new().name("gpu-meter".into()).stack_size(1 << 20).spawn(run);
    started.inspect_err(|e| tracing::warn!("cannot start the thread gpu-meter: {e}")).ok()?;
    Some(requests)
}

fn read(nvml: &mut Nvml) -> AllGpusReading {
    let gpus = nvml.read();
    let found = gpus.iter().flat_map(|gpu| gpu.processes.iter().map(move |process| (gpu.place, process)));
    let found = found.map(|(place, process)| ProcessOnGpu {
        process: process.clone(),
        place,
        sessions: sessions_of(process.pid),
        groups: std::fs::read_to_string(format!("/proc/{}/cgroup", process.pid)).unwrap_or_default(),
    });
    let found = found.collect();
    AllGpusReading { gpus, found }
}

/// Whether a process on a GPU belongs to the job.
fn is_of(job: &Job, found: &ProcessOnGpu) -> bool {
    let record = &job.record;
    if record.spec.runtime == RuntimeKind::Docker {
        return record.container.as_ref().is_some_and(|id| found.groups.contains(id));
    }
    let is_in_session = record.leader.is_some_and(|leader| found.sessions.contains(&leader.pid));
    let dir = record.group.as_ref().and_then(|group| group.procs_files.first()?.parent());
    is_in_session || dir.is_some_and(|dir| is_in_group(&found.groups, dir))
}

/// Whether `/proc/PID/cgroup` has this group or one below it. Its paths begin at the root of the hierarchy; the last
/// two names, those of the daemon and of the start, are enough.
fn is_in_group(groups: &str, dir: &Path) -> bool {
    let mut names = dir.iter().rev();
    let (Some(own), Some(base)) = (names.next(), names.next()) else { return false };
    let wanted = format!("/{}/{}", base.to_string_lossy(), own.to_string_lossy());
    groups.lines().any(|line| line.ends_with(&wanted) || line.contains(&format!("{wanted}/")))
}

impl Driver {
    /// Asks for the next reading while jobs run, or wait for memory. Once a second. A new daemon asks for the first
    /// reading at once: loading NVML takes a second, and a job with a need would wait for it.
    pub(super) fn measure_gpus(&mut self) {
        let concerns = |job: &Job| match job.record.state {
            JobState::Running => true,
            JobState::Queued => GpuMemoryNeed::of(job).is_some(),
            _ => false,
        };
        if self.gpus.meter.is_new() || self.jobs.values().any(concerns) {
            self.gpus.meter.ask(&self.handle, self.clock.now());
        }
        // A reading that does not come is not waited for without end.
        if !self.gpus.without_room.is_empty() {
            self.plans.is_wanted |= self.find_gpu_waits();
        }
    }

    /// The thread has read NVML, or could not load it.
    fn gpus_measured(&mut self, read: Result<AllGpusReading, String>) {
        let now = self.now();
        let meter = &mut self.gpus.meter;
        meter.is_away = false;
        let reading = match read {
            Ok(reading) => reading,
            Err(why) => {
                if meter.problem.as_ref() != Some(&why) {
                    tracing::warn!("GPU memory and time are not measured: {why}");
                }
                (meter.requests, meter.problem) = (None, Some(why));
                return self.check_gpu_waits();
            }
        };
        let elapsed_s = meter.read_at.map_or(0.0, |at| now.since(at).min(FRESH).as_secs_f64());
        (meter.gpus, meter.read_at, meter.problem) = (reading.gpus, Some(now), None);
        let mut of_jobs: BTreeMap<JobId, GpuMeasurement> = BTreeMap::new();
        for found in &reading.found {
            let running = self.jobs.values().filter(|job| job.record.state == JobState::Running);
            if let Some(job) = running.into_iter().find(|job| is_of(job, found)) {
                let measurement = of_jobs.entry(job.record.id).or_insert_with(|| GpuMeasurement::at(now));
                measurement.add(found.place, found.process.memory_bytes, found.process.busy);
            }
        }
        for job in self.jobs.values_mut().filter(|job| job.record.state == JobState::Running) {
            let measured = of_jobs.remove(&job.record.id);
            let peak = measured.as_ref().and_then(|measured| measured.memory.values().max().copied());
            if peak > job.progress.gpu_peak_bytes {
                job.progress.gpu_peak_bytes = peak;
                job.unsaved = true;
            }
            job.gpu.measure(measured, elapsed_s);
        }
        self.check_gpu_waits();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_is_known_by_its_last_two_names() {
        let dir = Path::new("/sys/fs/cgroup/cpu/gainshare-0a/job-1-1");
        for groups in ["0::/gainshare-0a/job-1-1\n", "5:cpu:/x/gainshare-0a/job-1-1/worker-0\n4:memory:/\n"] {
            assert!(is_in_group(groups, dir), "{groups}");
        }
        for groups in ["", "0::/gainshare-0a/job-1-10\n", "0::/gainshare-0b/job-1-1\n", "0::/\n"] {
            assert!(!is_in_group(groups, dir), "{groups}");
        }
    }
}
