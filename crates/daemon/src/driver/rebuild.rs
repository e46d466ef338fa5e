//! Jobs that the journal does not know are found again by their folders.
//!
//! **Problem.** A user moves a damaged journal away, and the next daemon begins a new one. Jobs of the old journal may
//! still run, and their logs are wanted. A job of the new journal must not get the number of an old one.
//!
//! **How.** The daemon writes the record of a job to JOBDIR/job.json when the job starts and when it ends
//! ([`super::start`]). A daemon that starts looks for folders with a number that its journal never gave. Their jobs
//! enter the journal as their folders record them: job.json, and what supervisors wrote ([`crate::jobdir`]). A job that
//! waited is found by its spec.json, and only if the journal is new: a folder beside a journal that was in use belongs
//! to a submission that was never acknowledged. New numbers follow the largest number of a folder.
//!
//! The limits that a container had are in JOBDIR/limits.json as long as they are changed.
//!
//! **Properties.** A folder that no job is made of stays as it is, and its number is not given again. No job is started
//! that may have begun. What a folder records is read as any file that a job can replace: bounded, and through no link.

use super::intake::new_record;
use super::observe::{bounded_end_s, earliest_end_s, is_supervised, state_after};
use crate::clock::Moment;
use crate::jobdir::{self, read_json};
use crate::journal::{Batch, Journal, JournalContents, JournalError, LimitRow};
use crate::paths::Paths;
use crate::record::{Change, JobRecord};
use crate::types::{ExitReport, JobState, StartReport, StopRequest, SuperviseFile};
use gainshare_core::model::{JobId, Span, Time};
use gainshare_limits::RuntimeKind;
use gainshare_limits::process::Identity;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::UNIX_EPOCH;

/// A folder with a larger number is not of a job: no daemon counts so far.
const MAX_NUMBER: u64 = 1 << 53;

/// Folders without a job that the log names.
const MAX_NAMED: usize = 5;

const NOTE: &str = "it was found again by its folder, because the journal did not know it: earlier decisions are lost";

/// Enters the jobs that the journal does not know. Returns the smallest number that no folder has.
pub(super) fn find_lost_jobs(
    paths: &Paths,
    journal: &mut Journal,
    loaded: &mut JournalContents,
) -> Result<JobId, JournalError> {
    let numbers = folder_numbers(&paths.jobs());
    let first_free = JobId(numbers.last().map_or(1, |largest| largest + 1));
    let next = journal.next_id()?;
    let search = Search { paths, now: journal.clock().moment(), is_lost: loaded.is_new };
    let mut found = Vec::new();
    let mut waiting = Vec::new();
    let mut left = Vec::new();
    // A folder with a smaller number is of a job that was forgotten.
    for id in numbers.into_iter().map(JobId).filter(|id| *id >= next) {
        if let Some(record) = search.kept(id) {
            found.push(record);
        } else if let Some(record) = search.waiting(id) {
            waiting.push(record);
        } else {
            left.push(paths.job(id.0).display().to_string());
        }
    }
    let mut by_name: BTreeMap<String, JobId> = BTreeMap::new();
    let named = loaded.jobs.iter().map(|(record, _)| record).chain(&found).chain(&waiting);
    by_name.extend(named.map(|record| (record.name.clone(), record.id)));
    for mut record in waiting {
        let awaited = record.spec.after.iter().filter_map(|name| by_name.get(name).copied());
        record.after = awaited.filter(|id| *id != record.id).collect();
        found.push(record);
    }
    if !left.is_empty() {
        let (count, named) = (left.len(), left[..left.len().min(MAX_NAMED)].join(", "));
        tracing::warn!("{count} folder(s) belong to no job that is known and stay as they are, among them {named}");
    }
    if found.is_empty() {
        return Ok(first_free);
    }
    found.sort_by_key(|record| record.id);
    let live = found.iter().filter(|record| record.is_live()).count();
    let submitted =
        |record: &JobRecord| (search.now, Some(record.id), Change::Submitted { record: Box::new(record.clone()) });
    let limits = found.iter().filter(|record| record.is_live()).filter_map(|record| search.limits(record)).collect();
    journal.commit(&Batch { changes: found.iter().map(submitted).collect(), limits, ..Batch::default() })?;
    for record in &found {
        if !loaded.owners.contains_key(&record.owner) {
            loaded.owners.insert(record.owner.clone(), journal.add_owner(&record.owner)?);
        }
    }
    let count = found.len();
    tracing::warn!("the journal did not know {count} job(s), {live} of them live: found again by their folders");
    loaded.jobs.extend(found.into_iter().map(|record| (record, None)));
    Ok(first_free)
}

/// The numbers of the folders of jobs, the smallest first.
fn folder_numbers(jobs: &Path) -> Vec<u64> {
    let number = |entry: std::fs::DirEntry| {
        let name = entry.file_name();
        let number = name.to_str()?.parse::<u64>().ok().filter(|number| (1..=MAX_NUMBER).contains(number))?;
        (name.to_str() == Some(&number.to_string())).then_some(number)
    };
    let mut numbers: Vec<u64> = std::fs::read_dir(jobs).into_iter().flatten().flatten().filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

struct Search<'a> {
    paths: &'a Paths,
    now: Moment,
    /// The journal is new: what folders record was in another one.
    is_lost: bool,
}

impl Search<'_> {
    /// A moment of the wall clock by the clock of the present journal. The lost journal had another one.
    fn moment(&self, unix_s: f64) -> Moment {
        let ago = Span::from_secs_f64(self.now.unix_s - unix_s);
        Moment { time: Time(self.now.time.0.saturating_sub(ago.0)), unix_s }
    }

    /// When a file was written.
    fn written(&self, path: &Path) -> Moment {
        let modified = path.symlink_metadata().and_then(|meta| meta.modified()).ok();
        let unix_s = modified.and_then(|at| at.duration_since(UNIX_EPOCH).ok()).map(|since| since.as_secs_f64());
        self.moment(unix_s.unwrap_or(self.now.unix_s).min(self.now.unix_s))
    }

    /// The job of job.json, with its start and its end if supervisors recorded them.
    fn kept(&self, id: JobId) -> Option<JobRecord> {
        let dir = self.paths.job(id.0);
        let mut record: JobRecord = read_json(&dir.join(jobdir::RECORD))?;
        if record.id != id || (!record.adopted && record.spec.validate().is_err()) {
            return None;
        }
        let has_waited = record.state == JobState::Queued;
        if has_waited && (!self.is_lost || jobdir::may_have_begun(&dir, record.attempt + 1)) {
            return None;
        }
        record.submitted = self.moment(record.submitted.unix_s);
        record.started = record.started.map(|at| self.moment(at.unix_s));
        record.ended = record.ended.map(|at| self.moment(at.unix_s));
        if !record.is_live() {
            return Some(record);
        }
        record.kill_at = record.stop_requested.then(|| {
            let grace = Span::from_secs_f64(StopRequest::default().grace_s);
            self.now.time + grace
        });
        if !has_waited {
            self.take_start(&mut record, &dir);
            self.take_end(&mut record, &dir);
        }
        if record.is_live() {
            record.take(self.now, &Change::Noted { note: NOTE.to_owned(), miss: None });
        }
        Some(record)
    }

    fn take_start(&self, record: &mut JobRecord, dir: &Path) {
        let path = dir.join(jobdir::STARTED);
        let started = read_json::<StartReport>(&path).filter(|started| started.attempt == record.attempt);
        if let Some(started) = started.filter(|_| record.state == JobState::Starting) {
            let leader = Some(Identity { pid: started.pid, start_ticks: started.start_ticks });
            record.take(self.written(&path), &Change::Started { leader, container: None, notes: started.notes });
        }
    }

    fn take_end(&self, record: &mut JobRecord, dir: &Path) {
        let path = dir.join(jobdir::EXIT);
        let exited = read_json::<ExitReport>(&path).filter(|exited| exited.attempt == record.attempt);
        let Some(exited) = exited else { return };
        let state = state_after(record, &exited);
        let ended_s = bounded_end_s(exited.ended_s, earliest_end_s(record), self.now.unix_s);
        let at = ended_s.map_or_else(|| self.written(&path), |unix_s| self.moment(unix_s));
        let (exit_code, signal, why) = (exited.code, exited.signal, exited.error);
        record.take(at, &Change::Ended { state, exit_code, signal, why, ended_s });
    }

    /// The limits that the job's container had. Those of a process are in its group.
    fn limits(&self, record: &JobRecord) -> Option<LimitRow> {
        let row: LimitRow = read_json(&self.paths.job(record.id.0).join(jobdir::LIMITS))?;
        (row.job == record.id && Some(&row.key) == record.container.as_ref()).then_some(row)
    }

    /// The job of spec.json, if it never began.
    fn waiting(&self, id: JobId) -> Option<JobRecord> {
        let dir = self.paths.job(id.0);
        if !self.is_lost || jobdir::may_have_begun(&dir, 1) || is_supervised(self.paths, id) {
            return None;
        }
        let file: SuperviseFile = jobdir::read_spec(&dir).ok()?;
        if file.id != id.0 || file.spec.validate().is_err() {
            return None;
        }
        let mut spec = file.spec;
        spec.name = Some(file.name);
        spec.hide_env_values();
        let mut record = new_record(id, spec, false, self.written(&dir.join(jobdir::SPEC)));
        if record.spec.runtime == RuntimeKind::Process {
            record.env_names = file.base_env.into_keys().collect();
        }
        record.notes.push(NOTE.to_owned());
        Some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::start::{keep_limits, keep_record};
    use crate::spec::JobSpec;
    use crate::types::StartOrder;

    fn state() -> (tempfile::TempDir, Paths) {
        let dir = tempfile::tempdir().unwrap();
        let paths = Paths::find(Some(dir.path().join("state")), Some(dir.path().join("run")));
        paths.create().unwrap();
        (dir, paths)
    }

    /// As an earlier daemon kept it, whose clock was far ahead of the next one's.
    fn record(id: u64, state: JobState) -> JobRecord {
        let spec = JobSpec { name: Some(format!("job-{id}")), ..JobSpec::new(vec!["true".into()]) };
        let submitted = Moment { time: Time(u64::MAX / 2), unix_s: crate::clock::unix_s() - 60.0 };
        let queued = JobRecord::queued(JobId(id), spec, "me".into(), submitted);
        JobRecord { state, attempt: u32::from(state != JobState::Queued), ..queued }
    }

    fn keep(paths: &Paths, record: &JobRecord) {
        std::fs::create_dir_all(paths.job(record.id.0)).unwrap();
        keep_record(paths, record);
    }

    fn wait(paths: &Paths, id: u64, after: &[&str]) {
        let dir = paths.job(id);
        std::fs::create_dir_all(&dir).unwrap();
        let mut spec = record(id, JobState::Queued).spec;
        spec.after = after.iter().map(|name| (*name).to_owned()).collect();
        spec.env.insert("TOKEN".into(), "secret".into());
        let base_env = BTreeMap::from([("HOME".to_owned(), "/root".to_owned())]);
        let (name, order) = (format!("job-{id}"), StartOrder::default());
        let file = SuperviseFile { id, name, spec, base_env, order, socket: String::new() };
        jobdir::write_json(&dir, jobdir::SPEC, &file).unwrap();
    }

    fn begin(paths: &Paths) -> (Vec<JobRecord>, JobId) {
        let mut journal = Journal::open(&paths.journal()).unwrap();
        let mut loaded = journal.load().unwrap();
        let first_free = find_lost_jobs(paths, &mut journal, &mut loaded).unwrap();
        let stored: Vec<JobRecord> = journal.load().unwrap().jobs.into_iter().map(|(record, _)| record).collect();
        let records: Vec<JobRecord> = loaded.jobs.into_iter().map(|(record, _)| record).collect();
        assert_eq!(stored, records, "what was found is in the journal");
        assert!(records.iter().all(|record| loaded.owners.contains_key(&record.owner)));
        (records, first_free)
    }

    #[test]
    fn jobs_of_a_lost_journal_are_as_their_folders_record_them() {
        let (_dir, paths) = state();
        for (id, state) in [(2, JobState::Starting), (3, JobState::Starting), (5, JobState::Stopped)] {
            keep(&paths, &record(id, state));
        }
        let me = std::process::id() as i32;
        let started = StartReport { attempt: 1, pid: me, start_ticks: 7, notes: Vec::new() };
        jobdir::write_json(&paths.job(2), jobdir::STARTED, &started).unwrap();
        jobdir::write_json(&paths.job(3), jobdir::STARTED, &started).unwrap();
        let ended_s = crate::clock::unix_s();
        let exited = ExitReport { attempt: 1, code: Some(4), ended_s, ..ExitReport::default() };
        jobdir::write_json(&paths.job(3), jobdir::EXIT, &exited).unwrap();
        wait(&paths, 7, &["job-2", "gone"]);
        std::fs::create_dir(paths.job(11)).unwrap();
        std::fs::create_dir(paths.jobs().join("012")).unwrap();

        let (records, first_free) = begin(&paths);
        assert_eq!(first_free, JobId(12), "the number of a folder without a job is not given again");
        let states: Vec<(u64, JobState)> = records.iter().map(|record| (record.id.0, record.state)).collect();
        let (running, failed, queued) = (JobState::Running, JobState::Failed, JobState::Queued);
        assert_eq!(states, [(2, running), (3, failed), (5, JobState::Stopped), (7, queued)]);
        assert_eq!(records[0].leader, Some(Identity { pid: me, start_ticks: 7 }));
        assert!(records[0].notes.iter().any(|note| note == NOTE), "{:?}", records[0].notes);
        assert_eq!((records[1].exit_code, records[1].ended.map(|at| at.unix_s)), (Some(4), Some(ended_s)));
        assert_eq!((records[3].after.as_slice(), records[3].name.as_str()), ([JobId(2)].as_slice(), "job-7"));
        assert_eq!((records[3].env_names.join(","), records[3].spec.env["TOKEN"].as_str()), ("HOME".to_owned(), ""));
        let now = Journal::open(&paths.journal()).unwrap().clock().now();
        assert!(records.iter().all(|record| record.submitted.time <= now), "moments are those of the new clock");
        assert!(paths.job(11).is_dir() && paths.jobs().join("012").is_dir());
        assert_eq!(begin(&paths), (records, JobId(12)), "the next daemon reads them from its journal");
    }

    #[test]
    fn a_submission_that_was_not_acknowledged_is_no_job_of_a_journal_in_use() {
        let (_dir, paths) = state();
        let mut journal = Journal::open(&paths.journal()).unwrap();
        let opened = Change::Opened { epoch: 1, pid: 1 };
        journal.commit(&Batch { changes: vec![(journal.clock().moment(), None, opened)], ..Batch::default() }).unwrap();
        drop(journal);
        wait(&paths, 1, &[]);
        keep(&paths, &record(2, JobState::Queued));
        // A job that began is found in any case: the journal may be an older copy.
        keep(&paths, &record(3, JobState::Starting));
        let (records, first_free) = begin(&paths);
        assert_eq!(records.iter().map(|record| record.id.0).collect::<Vec<_>>(), [3]);
        assert_eq!(first_free, JobId(4));
        assert!(paths.job(1).join(jobdir::SPEC).exists(), "its folder stays as it is");
    }

    #[test]
    fn a_job_that_may_have_begun_is_not_started_again() {
        let (_dir, paths) = state();
        wait(&paths, 1, &[]);
        jobdir::write_json(&paths.job(1), jobdir::STARTING, &jobdir::Intent { attempt: 1 }).unwrap();
        keep(&paths, &record(2, JobState::Queued));
        jobdir::write_json(&paths.job(2), jobdir::STARTING, &jobdir::Intent { attempt: 1 }).unwrap();
        assert_eq!(begin(&paths), (Vec::new(), JobId(3)));
    }

    #[test]
    fn the_limits_of_a_container_that_runs_can_still_be_put_back() {
        let (_dir, paths) = state();
        let row = |id: u64, key: &str| LimitRow {
            key: key.to_owned(),
            job: JobId(id),
            runtime: "docker".to_owned(),
            original: "{}".to_owned(),
        };
        for (id, state) in [(1, JobState::Running), (2, JobState::Running), (3, JobState::Done)] {
            let container = Some(format!("c{id}"));
            keep(&paths, &JobRecord { container, ..record(id, state) });
        }
        for row in [row(1, "c1"), row(2, "of-another"), row(3, "c3")] {
            keep_limits(&paths, &row);
        }
        begin(&paths);
        assert_eq!(Journal::open(&paths.journal()).unwrap().limits().unwrap(), [row(1, "c1")]);
    }

    #[test]
    fn a_record_of_another_job_or_behind_a_link_is_none() {
        let (dir, paths) = state();
        keep(&paths, &record(1, JobState::Running));
        for id in [2, 3] {
            std::fs::create_dir(paths.job(id)).unwrap();
        }
        let own = paths.job(1).join(jobdir::RECORD);
        std::fs::copy(&own, paths.job(2).join(jobdir::RECORD)).unwrap();
        let outside = dir.path().join("outside");
        std::fs::write(&outside, serde_json::to_vec(&record(3, JobState::Running)).unwrap()).unwrap();
        std::os::unix::fs::symlink(&outside, paths.job(3).join(jobdir::RECORD)).unwrap();
        let (records, first_free) = begin(&paths);
        assert_eq!((records.len(), records[0].id, first_free), (1, JobId(1), JobId(4)));
    }
}
