//! The daemon's side of the library inside jobs (`libgainshare_inside.so`): the page that a job's library reads.
//!
//! **How.** A process job with a tuned start gets the library by `LD_PRELOAD` and a page in its folder. Every plan
//! and every beat deals the teams out ([`gainshare_core::teams`]) and writes what changed into the pages. Every other
//! beat renews the pages' heartbeat. If the daemon ends, the heartbeat stops, and the library lets the job use what the
//! program asked for.
//!
//! The page is written with `pwrite` and never mapped here: the job's owner can truncate the file, and a mapping of
//! a truncated file ends the process that reads it.
//!
//! The library also counts the job's regions and launches. Of a job that reports no steps the daemon finds the steps in
//! these counts ([`super::rhythm`]).
//!
//! **Terms.** *Team*: the number of threads of one parallel region.
//!
//! **Properties.** Without the library jobs get fixed pools, and `explain` has a note.

use super::jobs::{Job, JobTable};
use super::page::{JobPage, PAGE_FILE};
use super::rhythm::Rhythm;
use super::runtimes::Runtimes;
use crate::config::DaemonConfig;
use crate::jobdir;
use crate::launch::{library_beside, program};
use crate::paths::Paths;
use crate::record::JobRecord;
use crate::spec::StartKind;
use crate::types::{JobState, RhythmInfo, StartVar};
use gainshare_core::check::CheckedPlan;
use gainshare_core::model::{Span, Time};
use gainshare_core::scaling::busy_cores;
use gainshare_core::teams::{TURN, TeamClaim, TeamUse, deal_teams};
use gainshare_limits::machine::monotonic_ns;
use gainshare_limits::process::start::{StartVariable, fitting_threads, let_teams_follow};
use gainshare_limits::{LimitMode, RuntimeKind};
use gainshare_page::rhythm::{RHYTHM_SUFFIX, decode_rhythm, empty_rhythm};
use gainshare_page::{
    GPU_ON, GPU_VARIABLE, Orders, PAGE_BYTES, PAGE_VARIABLE, REPORT_SUFFIX, Report, SWITCH_VARIABLE, decode_report,
    empty_report, encode,
};
use gainshare_progress::RunLength;
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

/// The teams of all jobs: when they are dealt out, and which jobs work on one core.
pub(super) struct Teams {
    /// The last turn of the teams.
    turn: usize,
    /// Jobs work on one core while others could use their cores.
    pub(super) has_serial_jobs: bool,
    /// When the use of such jobs is read next, while there are any.
    pub(super) next_check: Time,
}

/// What the teams are dealt out by.
pub(super) struct Deal<'a> {
    pub(super) plan: Option<&'a CheckedPlan>,
    pub(super) cores: f64,
    pub(super) mode: LimitMode,
    pub(super) now: Time,
}

/// What the use of teams is read with.
pub(super) struct TeamMeter<'a> {
    pub(super) runtimes: &'a mut Runtimes,
    pub(super) config: &'a DaemonConfig,
    /// The machine has no CPU to spare.
    pub(super) scarce: bool,
    pub(super) now: Time,
}

impl TeamMeter<'_> {
    /// Reads what all jobs with a team use. Once a second.
    pub(super) fn measure_all(&mut self, jobs: &mut JobTable) {
        for job in jobs.values_mut().filter(|job| job.record.state == JobState::Running && job.team > 0) {
            self.measure(job);
        }
    }

    fn measure(&mut self, job: &mut Job) {
        if self.runtimes.mode(self.config) == LimitMode::Quota {
            // Use shows the quota and not the job.
            return;
        }
        self.runtimes.read_cpu(self.config, job, self.now);
        let cores = self.runtimes.cores(self.config);
        let Some(at) = job.progress.meter.read_at() else { return };
        job.team_use.record(at, job.progress.meter.consumed().cpu * cores, job.team, self.scarce);
    }
}

impl Teams {
    pub(super) fn new(now: Time) -> Teams {
        Teams { turn: 0, has_serial_jobs: false, next_check: now }
    }

    /// When the use of jobs that work on one core is read next.
    pub(super) fn check_due(&self) -> Option<Time> {
        self.has_serial_jobs.then_some(self.next_check)
    }

    /// Reads the use of jobs that work on one core. Whether one of them went on in parallel and needs its cores back.
    pub(super) fn watch_serial_jobs(&mut self, jobs: &mut JobTable, mut meter: TeamMeter<'_>) -> bool {
        if self.check_due().is_none_or(|due| meter.now < due) {
            return false;
        }
        self.next_check = meter.now + SERIAL_PACE;
        let mut went_on = false;
        let now = meter.now;
        for job in jobs.values_mut().filter(|job| job.record.state == JobState::Running && is_serial(job, now)) {
            meter.measure(job);
            went_on |= !is_serial(job, now);
        }
        went_on
    }

    /// Deals the teams of all jobs out by the shares of the current plan.
    fn deal(&mut self, jobs: &mut JobTable, by: &Deal<'_>) {
        let turn = (by.now.0 / TURN.0) as usize;
        let Some(plan) = by.plan else { return };
        // Whole cores are lent by the runtime.
        let may_lend = by.mode == LimitMode::Weight;
        let mut jobs: Vec<&mut Job> = jobs.values_mut().filter(|job| job.record.holds_slot()).collect();
        let share = |job: &Job| Some(plan.as_plan().verdicts.get(&job.record.id)?.target?.share.cpu.get());
        jobs.retain(|job| share(job).is_some());
        let claim = |job: &&mut Job| TeamClaim {
            share: share(job).unwrap_or_default(),
            team: job.team,
            is_serial: may_lend && is_serial(job, by.now),
            is_new: matches!(job.page, JobPage::Open { .. }) && job.team_use.serial().is_none(),
        };
        let claims: Vec<TeamClaim> = jobs.iter().map(claim).collect();
        self.has_serial_jobs = claims.len() > 1 && claims.iter().any(|claim| claim.is_serial);
        let is_same_turn = std::mem::replace(&mut self.turn, turn) == turn;
        for (job, team) in jobs.into_iter().zip(deal_teams(by.cores, &claims, turn, is_same_turn)) {
            // A job with cores of its own has a team for exactly these.
            job.team = job.in_force.as_ref().and_then(|limits| limits.team).unwrap_or(team);
        }
    }

    /// Writes the team of every process job into its page, and renews the page's heartbeat.
    pub(super) fn write_pages(&mut self, jobs: &mut JobTable, paths: &Paths, by: &Deal<'_>) {
        self.deal(jobs, by);
        let (generation, now_ns) = (by.plan.map_or(0, |plan| plan.generation), monotonic_ns());
        let has_page = |j: &&mut Job| j.record.holds_slot() && j.record.spec.runtime == RuntimeKind::Process;
        for job in jobs.values_mut().filter(has_page) {
            let id = job.record.id;
            if matches!(job.page, JobPage::Unknown) {
                job.page = JobPage::open(&paths.job(id.0));
            }
            let (team, gpu) = (job.team, job.gpu.order);
            let change = |orders: &mut Orders| {
                if team > 0 {
                    *orders = Orders { generation, team, ..*orders };
                }
                (orders.gpu_share, orders.gpu_jobs) = gpu;
            };
            if let Err(e) = job.page.write(change, now_ns) {
                tracing::warn!(job = %id, "cannot write its page: {e}");
                job.page = JobPage::Absent;
            }
        }
    }
}

/// A job that was not measured within this time after its start is not taken for one that works on one core.
const FIRST_MOMENTS: Span = Span::from_secs(3);

/// Whether a job works on one core.
fn is_serial(job: &Job, now: Time) -> bool {
    works_on_one_core(&job.team_use, job.record.started.map(|started| started.time), now)
}

/// Every program begins on one core: a newcomer must not hold cores that it cannot use yet.
fn works_on_one_core(team_use: &TeamUse, started: Option<Time>, now: Time) -> bool {
    let is_new = !team_use.is_measured() && started.is_none_or(|started| now.since(started) < FIRST_MOMENTS);
    team_use.is_serial() || is_new
}

/// Where the library lies; `Err`: why it cannot be used.
fn inside_library(config: &DaemonConfig) -> Result<PathBuf, String> {
    library_beside(&program(config)).map_err(|why| format!("thread pools are fixed at the start: {why}"))
}

/// Whether a job that has not begun will have a page, as far as that is known before its start.
pub(super) fn expects_page(config: &DaemonConfig, record: &JobRecord) -> bool {
    let spec = &record.spec;
    let may_have_one = spec.runtime == RuntimeKind::Process && spec.start != StartKind::Plain && spec.roles.is_empty();
    let is_switched = || record.env_names.iter().chain(&spec.env_names()).any(|name| name == SWITCH_VARIABLE);
    may_have_one && !is_switched() && inside_library(config).is_ok()
}

/// Makes the page of a job that is about to start and changes the variables of its start accordingly.
pub(super) fn start_inside(
    config: &DaemonConfig,
    paths: &Paths,
    cores: f64,
    record: &JobRecord,
    is_set: impl Fn(&str) -> bool,
    tuned: &mut Vec<StartVariable>,
    expected_jobs: usize,
) -> Vec<StartVar> {
    if record.spec.runtime != RuntimeKind::Process || is_set(SWITCH_VARIABLE) {
        return Vec::new();
    }
    let Ok(library) = inside_library(config) else { return Vec::new() };
    let orders = Orders {
        team: fitting_threads(cores, expected_jobs) as u32,
        blas_may_grow: tuned.iter().any(|variable| variable.name == "OPENBLAS_NUM_THREADS"),
        ..Orders::default()
    };
    let dir = paths.job(record.id.0);
    let page = encode(&orders, monotonic_ns());
    let beside = |suffix: &str| format!("{PAGE_FILE}{suffix}");
    let written = jobdir::write_unsynced(&dir, PAGE_FILE, &page)
        .and_then(|_| jobdir::write_unsynced(&dir, &beside(REPORT_SUFFIX), &empty_report()))
        .and_then(|_| jobdir::write_unsynced(&dir, &beside(RHYTHM_SUFFIX), &empty_rhythm()));
    if let Err(e) = written {
        tracing::warn!(job = %record.id, "cannot write {}: {e}", dir.join(PAGE_FILE).display());
        return Vec::new();
    }
    let_teams_follow(tuned, cores);
    let has_gpu = (record.spec.gpu || config.gpu) && !is_set(GPU_VARIABLE);
    InsideStart { library, page: dir.join(PAGE_FILE), has_gpu }.variables()
}

/// What `explain` shows of the library inside a job that has begun: into a program that never ran nothing is loaded.
pub(super) fn inside_note(config: &DaemonConfig, paths: &Paths, cores: f64, job: &Job) -> Option<String> {
    let is_possible = job.record.spec.runtime == RuntimeKind::Process && job.record.spec.start != StartKind::Plain;
    if !is_possible || job.record.started.is_none() {
        return None;
    }
    let order = job.record.order.as_ref()?;
    if !order.env.iter().any(|variable| variable.name == PAGE_VARIABLE) {
        return inside_library(config).err();
    }
    let report = paths.job(job.record.id.0).join(format!("{PAGE_FILE}{REPORT_SUFFIX}"));
    let mut note = describe(&read_report(&report)?);
    if job.record.state == JobState::Running && job.team > 0 {
        let is_serial = job.team_use.is_serial();
        note += &describe_team(job.team, is_serial, job.team_use.serial(), cores);
    }
    Some(note)
}

/// Why the library catches no launches of a job.
pub(super) fn why_uncaught(config: &DaemonConfig, paths: &Paths, job: &Job) -> &'static str {
    if job.record.spec.start == StartKind::Plain {
        return "it was started with --plain";
    }
    if !job.has_inside() {
        return match inside_library(config) {
            Ok(_) => "the library is switched off by GAINSHARE_INSIDE",
            Err(_) => "the library cannot be used",
        };
    }
    let report = paths.job(job.record.id.0).join(format!("{PAGE_FILE}{REPORT_SUFFIX}"));
    match read_report(&report) {
        Some(report) if report.programs == 0 => "its program is static, setuid or of another architecture",
        _ => "it does not use the CUDA driver in a way that the library knows",
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
    let report = decode_report(&bytes[..length])?;
    Some(Report { waited_ns: report.waited_until(monotonic_ns()), ..report })
}

/// What is shown of a job's rhythm.
pub(super) fn rhythm_info(job: &Job, now: Time) -> Option<RhythmInfo> {
    let by_command = RunLength::read(&job.record.spec.command, None).steps;
    job.rhythm.info(by_command.or(job.past_steps), now)
}

/// Reads the rhythms of all jobs. Once a second.
pub(super) fn read_rhythms(jobs: &mut JobTable, paths: &Paths, now: Time) {
    jobs.values_mut().for_each(|job| read_rhythm(job, paths, now));
}

/// Reads the rhythm of a job that has the library inside and reports no steps itself.
pub(super) fn read_rhythm(job: &mut Job, paths: &Paths, now: Time) {
    let is_process = job.record.spec.runtime == RuntimeKind::Process && job.has_inside();
    if job.record.state != JobState::Running || !is_process {
        return;
    }
    if job.progress.course.is_some() || job.progress.tracker.signal().step.is_some() {
        (job.rhythm, job.progress.rhythm_steps) = (Rhythm::default(), None);
        return;
    }
    let path = paths.job(job.record.id.0).join(format!("{PAGE_FILE}{RHYTHM_SUFFIX}"));
    let mut bytes = [0; PAGE_BYTES];
    let length = jobdir::open_regular(&path).and_then(|file| file.read_at(&mut bytes, 0));
    if let Some(places) = length.ok().and_then(|length| decode_rhythm(&bytes[..length])) {
        job.rhythm.record(&places, now);
        job.progress.rhythm_steps = job.rhythm.steps().or(job.progress.rhythm_steps);
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use crate::spec::JobSpec;
    use crate::types::StartOrder;
    use gainshare_core::model::JobId;

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

    #[test]
    fn a_job_that_never_started_has_no_note_about_the_library() {
        let dir = tempfile::tempdir().expect("a folder");
        let config = DaemonConfig {
            state_dir: Some(dir.path().to_owned()),
            runtime_dir: Some(dir.path().to_owned()),
            ..DaemonConfig::default()
        };
        let paths = config.paths();
        std::fs::create_dir_all(paths.job(1)).expect("a folder");
        let report = paths.job(1).join(format!("{PAGE_FILE}{REPORT_SUFFIX}"));
        std::fs::write(report, empty_report()).expect("a report");
        let (at, spec) = (Clock::resume(None, Time::ZERO).moment(), JobSpec::new(vec!["train".into()]));
        let mut record = JobRecord::queued(JobId(1), spec, "me".into(), at);
        let page = StartVar { name: PAGE_VARIABLE.into(), value: "page".into(), why: "a page".into() };
        record.order = Some(StartOrder { env: vec![page], ..StartOrder::default() });
        let mut job = Job::new(record, Time::ZERO);
        assert_eq!(inside_note(&config, &paths, 4.0, &job), None, "its program was not found");
        job.record.started = Some(at);
        let note = inside_note(&config, &paths, 4.0, &job).expect("it has begun");
        assert!(note.contains("was not loaded"), "{note}");
    }

    #[test]
    fn a_newcomer_lends_its_cores_until_it_is_measured() {
        let at = |seconds: f64| Time::from_secs_f64(seconds);
        let mut team_use = TeamUse::default();
        assert!(works_on_one_core(&team_use, None, at(9.0)), "it has not begun");
        assert!(works_on_one_core(&team_use, Some(at(10.0)), at(11.0)));
        assert!(!works_on_one_core(&team_use, Some(at(10.0)), at(14.0)), "its use cannot be measured");
        // It keeps four cores busy.
        team_use.record(at(10.0), 0.0, 5, false);
        team_use.record(at(11.0), 4.0, 5, false);
        assert!(!works_on_one_core(&team_use, Some(at(10.0)), at(11.0)));
    }
}
