//! The daemon's side of the library inside jobs (`libgainshare_inside.so`): the page that a job's library reads.
//!
//! **How.** A process job with a tuned start gets the library by `LD_PRELOAD` and a page in its folder. Every plan
//! and every beat deals the teams out ([`super::teams`]) and writes them into the pages, and every beat renews the
//! pages' heartbeat. If the daemon ends, the heartbeat stops, and the library lets the job use what the program
//! asked for.
//!
//! The page is written with `pwrite` and never mapped here: the job's owner can truncate the file, and a mapping of
//! a truncated file ends the process that reads it.
//!
//! **Terms.** *Team*: the number of threads of one parallel region.
//!
//! **Properties.** Without the library jobs get fixed pools, and `explain` has a note.

use super::page::{JobPage, PAGE_FILE};
use super::teams::{TURN, TeamClaim, deal_teams};
use super::{Driver, Job};
use crate::jobdir;
use crate::launch::program;
use crate::record::JobRecord;
use crate::spec::StartKind;
use crate::types::{JobState, StartVar};
use gainshare_core::model::{JobId, Span};
use gainshare_core::scaling::busy_cores;
use gainshare_limits::process::start::{StartVariable, fitting_threads, let_teams_follow};
use gainshare_limits::{LimitMode, RuntimeKind};
use gainshare_page::{
    GPU_ON, GPU_VARIABLE, HEADER_BYTES, LIBRARY_FILE, Orders, PAGE_BYTES, PAGE_VARIABLE, REPORT_SUFFIX, Report,
    SWITCH_VARIABLE, decode_report, empty_report, encode,
};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Time between two readings of the use of jobs that work on one core. They need their cores at once when they go on.
const SERIAL_PACE: Span = Span::from_millis(250);

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

    /// Reads what all jobs with a team use. Once a second.
    pub(super) fn measure_teams(&mut self) {
        for id in self.jobs.ids(|job| job.record.state == JobState::Running && job.team > 0) {
            self.measure_team(id);
        }
    }

    /// Reads the use of jobs that work on one core. If one of them went on in parallel, it gets its cores back.
    pub(super) fn watch_serial_jobs(&mut self) {
        let now = self.now();
        if now < self.timeline.next_serial_check {
            return;
        }
        self.timeline.next_serial_check = now + SERIAL_PACE;
        let mut went_on = false;
        for id in self.jobs.ids(|job| job.record.state == JobState::Running && job.team_use.is_serial()) {
            self.measure_team(id);
            went_on |= self.jobs.get(&id).is_some_and(|job| !job.team_use.is_serial());
        }
        if went_on {
            self.write_pages();
        }
    }

    fn measure_team(&mut self, id: JobId) {
        if self.runtimes.mode(&self.config) == LimitMode::Quota {
            // Use shows the quota and not the job.
            return;
        }
        self.read_usage(id);
        let (cores, scarce) = (self.cores(), self.forecasts.scarce);
        let Some(job) = self.jobs.get_mut(&id) else { return };
        let Some(at) = job.progress.meter.read_at() else { return };
        job.team_use.record(at, job.progress.meter.consumed().cpu * cores, job.team, scarce);
    }

    /// Deals the teams of all jobs out by the shares of the current plan.
    fn deal_teams(&mut self) {
        let cores = self.cores();
        let turn = (self.now().0 / TURN.0) as usize;
        let Some(plan) = self.plans.current.as_ref() else { return };
        // Whole cores are lent by the runtime.
        let may_lend = self.runtimes.mode(&self.config) == LimitMode::Weight;
        let mut jobs: Vec<&mut Job> = self.jobs.values_mut().filter(|job| job.record.holds_slot()).collect();
        let share = |job: &Job| Some(plan.as_plan().verdicts.get(&job.record.id)?.target?.share.cpu.get());
        jobs.retain(|job| share(job).is_some());
        let claim = |job: &&mut Job| TeamClaim {
            share: share(job).unwrap_or_default(),
            team: job.team,
            is_serial: may_lend && job.team_use.is_serial(),
            is_new: matches!(job.page, JobPage::Open { .. }) && job.team_use.serial().is_none(),
        };
        let claims: Vec<TeamClaim> = jobs.iter().map(claim).collect();
        self.timeline.has_serial_jobs = claims.len() > 1 && claims.iter().any(|claim| claim.is_serial);
        let is_same_turn = std::mem::replace(&mut self.timeline.team_turn, turn) == turn;
        for (job, team) in jobs.into_iter().zip(deal_teams(cores, &claims, turn, is_same_turn)) {
            // A job with cores of its own has a team for exactly these.
            job.team = job.in_force.as_ref().and_then(|limits| limits.team).unwrap_or(team);
        }
    }

    /// Writes the team of every process job into its page, and renews the page's heartbeat.
    pub(super) fn write_pages(&mut self) {
        if self.lease.has_lapsed() {
            return;
        }
        self.deal_teams();
        let generation = self.plans.current.as_ref().map_or(0, |plan| plan.generation);
        let has_page = |j: &&mut Job| j.record.holds_slot() && j.record.spec.runtime == RuntimeKind::Process;
        for job in self.jobs.values_mut().filter(has_page) {
            let id = job.record.id;
            if matches!(job.page, JobPage::Unknown) {
                job.page = JobPage::open(&self.paths.job(id.0));
            }
            let JobPage::Open { file, orders } = &mut job.page else { continue };
            if job.team > 0 {
                *orders = Orders { generation, team: job.team, ..*orders };
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
        let mut note = describe(&read_report(&report)?);
        if job.record.state == JobState::Running && job.team > 0 {
            let is_serial = job.team_use.is_serial();
            note += &describe_team(job.team, is_serial, job.team_use.serial(), self.cores());
        }
        Some(note)
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

/// The rest of the note: the job's team, and what is known of the cores that it can use.
fn describe_team(team: u32, is_serial: bool, serial: Option<f64>, cores: f64) -> String {
    let mut text = format!("; teams of {team} now");
    if let Some(serial) = serial {
        text += &format!(
            ", with all {cores:.0} cores it would keep about {:.1} busy ({:.0} % of its work runs on one thread)",
            busy_cores(serial, cores),
            100.0 * serial
        );
    }
    if is_serial {
        text += "; it works on one core at the moment, and other jobs use its other cores until it needs them";
    }
    text
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
    fn the_note_names_what_was_hooked() {
        let report = Report { hooks: vec!["GNU OpenMP", "OpenBLAS"], programs: 1, regions: 9, ..Report::default() };
        assert_eq!(describe(&report), "threads: GNU OpenMP, OpenBLAS; 9 regions, 0 changes of the team");
        assert!(describe(&Report::default()).contains("was not loaded"));
        let text = describe_team(5, true, Some(0.0625), 16.0);
        assert!(text.starts_with("; teams of 5 now, with all 16 cores it would keep about 8.3 busy (6 %"), "{text}");
        assert!(text.contains("use its other cores"));
        assert_eq!(describe_team(5, false, None, 16.0), "; teams of 5 now");
    }
}
