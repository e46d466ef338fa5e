//! The daemon's side of the library inside jobs (`libgainshare_inside.so`): the page that a job's library reads.
//!
//! **How.** A process job with a tuned start gets the library by `LD_PRELOAD` and a page in its folder. Every plan
//! writes the team size that the job's share stands for, and every beat renews the page's heartbeat. If the daemon
//! ends, the heartbeat stops, and the library lets the job use what the program asked for.
//!
//! The page is written with `pwrite` and never mapped here: the job's owner can truncate the file, and a mapping of
//! a truncated file ends the process that reads it.
//!
//! **Terms.** *Team*: the number of threads of one parallel region.
//!
//! **Properties.** `teams_change_only_when_the_share_does`: a share that moves by less than three quarters of a
//! core changes no team. Without the library jobs get fixed pools, and `explain` has a note.

use super::page::{JobPage, PAGE_FILE};
use super::{Driver, Job};
use crate::jobdir;
use crate::launch::program;
use crate::record::JobRecord;
use crate::spec::StartKind;
use crate::types::StartVar;
use gainshare_core::model::JobId;
use gainshare_limits::RuntimeKind;
use gainshare_limits::process::start::{StartVariable, fitting_threads, let_teams_follow};
use gainshare_page::{
    GPU_ON, GPU_VARIABLE, HEADER_BYTES, LIBRARY_FILE, Orders, PAGE_BYTES, PAGE_VARIABLE, REPORT_SUFFIX, Report,
    SWITCH_VARIABLE, decode_report, empty_report, encode,
};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A team changes when the share is so many cores away from it.
const TEAM_DEADBAND_CORES: f64 = 0.75;

/// Large teams change when the share is such a part of the team away from it.
const TEAM_DEADBAND_PART: f64 = 0.1;

/// What the library needs at the start of a job.
struct InsideStart {
    library: PathBuf,
    page: PathBuf,
    /// Whether launches on a GPU are caught.
    has_gpu: bool,
}

impl Driver {
    /// Where the library lies; `Err`: why it cannot be used.
    fn inside_library(&self) -> Result<PathBuf, String> {
        let library = program(&self.config).with_file_name(LIBRARY_FILE);
        if !library.is_file() {
            return Err(format!("thread pools are fixed at the start: {LIBRARY_FILE} is not beside gainshare"));
        }
        // The dynamic linker separates the names in LD_PRELOAD by these.
        if library.as_os_str().as_encoded_bytes().iter().any(|byte| matches!(byte, b' ' | b':' | b'\n' | b'\t')) {
            let folder = library.display();
            return Err(format!("thread pools are fixed at the start: {folder} contains a space or a colon"));
        }
        Ok(library)
    }

    /// Makes the page of a job that is about to start and changes the variables of its start accordingly.
    pub(super) fn start_inside(
        &self,
        record: &JobRecord,
        is_set: impl Fn(&str) -> bool,
        tuned: &mut Vec<StartVariable>,
        expected_jobs: usize,
    ) -> Vec<StartVar> {
        if record.spec.runtime != RuntimeKind::Process || is_set(SWITCH_VARIABLE) {
            return Vec::new();
        }
        let Ok(library) = self.inside_library() else { return Vec::new() };
        let orders = Orders {
            team: fitting_threads(self.cores(), expected_jobs) as u32,
            blas_may_grow: tuned.iter().any(|variable| variable.name == "OPENBLAS_NUM_THREADS"),
            ..Orders::default()
        };
        let dir = self.paths.job(record.id.0);
        let page = encode(&orders, monotonic_ns());
        let report = format!("{PAGE_FILE}{REPORT_SUFFIX}");
        let written = jobdir::write_unsynced(&dir, PAGE_FILE, &page)
            .and_then(|_| jobdir::write_unsynced(&dir, &report, &empty_report()));
        if let Err(e) = written {
            tracing::warn!(job = %record.id, "cannot write {}: {e}", dir.join(PAGE_FILE).display());
            return Vec::new();
        }
        let_teams_follow(tuned, self.cores());
        let has_gpu = (record.spec.gpu || self.config.gpu) && !is_set(GPU_VARIABLE);
        InsideStart { library, page: dir.join(PAGE_FILE), has_gpu }.variables()
    }

    /// Writes the team of the current plan into the page of every process job, and renews its heartbeat.
    pub(super) fn write_pages(&mut self) {
        if self.lease.has_lapsed() {
            return;
        }
        let cores = self.cores();
        let plan = self.plans.current.as_ref();
        let generation = plan.map_or(0, |plan| plan.generation);
        let has_page = |j: &&mut Job| j.record.holds_slot() && j.record.spec.runtime == RuntimeKind::Process;
        for job in self.jobs.values_mut().filter(has_page) {
            let id = job.record.id;
            if matches!(job.page, JobPage::Unknown) {
                job.page = JobPage::open(&self.paths.job(id.0));
            }
            let JobPage::Open { file, orders } = &mut job.page else { continue };
            let share = plan.and_then(|plan| plan.as_plan().verdicts.get(&id)?.target).map(|t| t.share.cpu.get());
            if let Some(share) = share {
                // A job with cores of its own has a team for exactly these.
                let own = job.in_force.as_ref().and_then(|limits| limits.team);
                let team = own.unwrap_or_else(|| team_for(share * cores, orders.team));
                *orders = Orders { generation, team, ..*orders };
            }
            (orders.gpu_share, orders.gpu_jobs) = job.gpu.order;
            let bytes = encode(orders, monotonic_ns());
            if let Err(e) = file.write_all_at(&bytes[..HEADER_BYTES], 0) {
                tracing::warn!(job = %id, "cannot write its page: {e}");
                job.page = JobPage::Absent;
            }
        }
    }

    /// What `explain` shows of the library inside a job.
    pub(super) fn inside_note(&self, id: JobId) -> Option<String> {
        let job = self.jobs.get(&id)?;
        if job.record.spec.runtime != RuntimeKind::Process || job.record.spec.start == StartKind::Plain {
            return None;
        }
        let order = job.record.order.as_ref()?;
        if !order.env.iter().any(|variable| variable.name == PAGE_VARIABLE) {
            let unpaced = if job.record.spec.gpu || self.config.gpu { "; GPU work is not paced" } else { "" };
            return self.inside_library().err().map(|why| why + unpaced);
        }
        let report = self.paths.job(id.0).join(format!("{PAGE_FILE}{REPORT_SUFFIX}"));
        Some(describe(&read_report(&report)?))
    }
}

impl InsideStart {
    fn variables(&self) -> Vec<StartVar> {
        let variable = |name: &str, value: &Path, why: &str| StartVar {
            name: name.into(),
            value: value.display().to_string(),
            why: why.into(),
        };
        let mut variables = vec![
            variable("LD_PRELOAD", &self.library, "thread teams follow the share while the job runs"),
            variable(PAGE_VARIABLE, &self.page, "where the library reads the wanted team size"),
        ];
        if self.has_gpu {
            variables.push(variable(GPU_VARIABLE, Path::new(GPU_ON), "launches on a GPU follow the share"));
        }
        variables
    }
}

/// The team for so many cores. The team of before stays unless the share is clearly another one.
fn team_for(cores: f64, before: u32) -> u32 {
    let deadband = TEAM_DEADBAND_CORES.max(TEAM_DEADBAND_PART * f64::from(before));
    if before > 0 && (cores - f64::from(before)).abs() < deadband {
        return before;
    }
    (cores.round() as u32).max(1)
}

pub(super) fn read_report(path: &Path) -> Option<Report> {
    let mut bytes = [0; PAGE_BYTES];
    let length = jobdir::open_regular(path).ok()?.read_at(&mut bytes, 0).ok()?;
    decode_report(&bytes[..length])
}

fn describe(report: &Report) -> String {
    if report.programs == 0 {
        return "the library inside the job was not loaded: its program is static, setuid or of another architecture"
            .into();
    }
    if report.hooks.is_empty() {
        return "threads: no OpenMP library was used yet".into();
    }
    let Report { regions, changes, .. } = report;
    format!("threads: {}; {regions} regions, {changes} changes of the team", report.hooks.join(", "))
}

/// The machine's monotonic clock, which the library reads too.
fn monotonic_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC);
    now.map_or(0, |time| time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn teams_change_only_when_the_share_does() {
        for (cores, before, expected) in [
            (0.5, 0, 1),
            (2.0, 1, 2),
            (1.4, 1, 1),
            (1.4, 2, 2),
            (1.2, 2, 1),
            (0.5, 2, 1),
            (16.0, 5, 16),
            (15.0, 16, 16),
            (13.0, 16, 13),
            (0.01, 1, 1),
        ] {
            assert_eq!(team_for(cores, before), expected, "{cores} cores, {before} before");
        }
    }

    #[test]
    fn the_note_names_what_was_hooked() {
        let report = Report { hooks: vec!["GNU OpenMP", "OpenBLAS"], programs: 1, regions: 9, ..Report::default() };
        assert_eq!(describe(&report), "threads: GNU OpenMP, OpenBLAS; 9 regions, 0 changes of the team");
        assert!(describe(&Report::default()).contains("was not loaded"));
    }
}
