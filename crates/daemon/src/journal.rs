//! The journal: jobs, what happened to them, their samples, and the limits that were changed.
//!
//! **Problem.** The daemon may die at any instruction and the disk may fill up; no job, sample or
//! limit that was acknowledged may be lost, and what was not finished must be recognisable.
//!
//! **How.** One SQLite file, synced at every commit, with one writer (the driver). [`Batch`] is
//! everything that becomes true together; [`Journal::commit`] writes it in one transaction. The
//! `journal` table is append-only and holds every [`Change`]; the `jobs` table is the state that
//! those changes lead to, kept so that a start need not replay them. Samples that were read from files are
//! committed together with the position of the collector that read them, so that a restart neither loses nor
//! repeats one. Samples that a job pushed may come after its position ([`Journal::samples_from`]). The file is
//! in WAL mode, except on a network file system (see `medium`).
//!
//! **Secrets.** The journal holds the names of a job's variables, never their values: those are in
//! JOBDIR/spec.json until the job has started. Deleted rows are overwritten with zeros.
//!
//! **Properties.** A batch is there as a whole or not at all, wherever the file was cut. Replaying
//! the `journal` table gives the `jobs` table. A full disk is distinguished from other errors and
//! changes nothing. The file does not grow with the number of jobs that were forgotten, of daemons
//! that ran, or of owners that have no job.

mod medium;
mod migrate;
mod tail;

use crate::clock::{Clock, Moment};
use crate::record::{Change, JobRecord};
use gainshare_core::decider::Decider;
use gainshare_core::model::{JobId, Time};
use gainshare_core::plan::Plan;
use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension, Transaction, params};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const SCHEMA_VERSION: i64 = 2;

/// Plans older than this many are pruned; what concerns one job stays as long as the job.
const PLANS_KEPT: i64 = 2000;

/// Starts and ends of daemons that are kept.
const DAEMONS_KEPT: i64 = 200;

/// Samples of one job beyond this are thinned to every second one.
pub const SAMPLES_KEPT: u64 = 10_000;

/// What can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error(
        "the disk that holds {path} is full: free some space; limits stay as they are and new work is refused until then"
    )]
    Full { path: String },
    #[error("cannot use the journal {path}: {source}")]
    Sqlite { path: String, source: rusqlite::Error },
    #[error(
        "the journal {path} is damaged ({what}): move it away and start again; jobs are found again by their folders, and running ones go on"
    )]
    Damaged { path: String, what: String },
    #[error(
        "the journal {path} was written by a newer version (schema {found}, known {SCHEMA_VERSION}): use that version"
    )]
    Newer { path: String, found: i64 },
}

impl JournalError {
    pub fn is_full(&self) -> bool {
        matches!(self, JournalError::Full { .. })
    }
}

/// What is to become true together.
#[derive(Debug, Default)]
pub struct Batch {
    pub changes: Vec<(Moment, Option<JobId>, Change)>,
    /// Full records after the changes.
    pub records: Vec<JobRecord>,
    /// Jobs whose earlier samples belong to another metric than these.
    pub cleared: Vec<JobId>,
    pub samples: Vec<(JobId, StoredSample)>,
    /// By job: an opaque text with which a later daemon continues reading where this one stopped.
    pub positions: Vec<(JobId, String)>,
    pub thin: Vec<Thinning>,
    pub limits: Vec<LimitRow>,
    pub released: Vec<String>,
    pub control: Option<Decider>,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
            && self.records.is_empty()
            && self.cleared.is_empty()
            && self.samples.is_empty()
            && self.positions.is_empty()
            && self.thin.is_empty()
            && self.limits.is_empty()
            && self.released.is_empty()
            && self.control.is_none()
    }
}

/// Samples of the job from number `from` on are dropped if their number is no multiple of `stride`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Thinning {
    pub job: JobId,
    pub stride: u64,
    pub from: u64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StoredSample {
    pub seq: u64,
    pub time: Time,
    pub step: Option<u64>,
    pub value: f64,
}

/// A job whose limits we changed: enough to put them back without the daemon.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LimitRow {
    /// The runtime's key: a cgroup's name, a container's id.
    pub key: String,
    pub job: JobId,
    /// `process` or `docker`.
    pub runtime: String,
    /// What the runtime needs to find the job and its original limits, as JSON.
    pub original: String,
}

/// One line of the `journal` table.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub seq: i64,
    pub at: Moment,
    pub job: Option<JobId>,
    pub change: Change,
}

/// Everything a starting daemon needs.
#[derive(Debug)]
pub struct JournalContents {
    pub jobs: Vec<(JobRecord, Option<String>)>,
    pub control: Option<Decider>,
    pub plans: Vec<(Moment, Plan)>,
    /// The number of each owner that has a job.
    pub owners: BTreeMap<String, u32>,
    /// The last daemon did not end properly.
    pub unclean: bool,
    /// No daemon has used it yet.
    pub is_new: bool,
}

/// The journal. See the module documentation.
#[derive(Debug)]
pub struct Journal {
    db: Connection,
    path: String,
    clock: Clock,
    epoch: u64,
    dropped: Option<String>,
}

impl Journal {
    /// Opens or makes the file and begins a new epoch.
    pub fn open(path: &Path) -> Result<Journal, JournalError> {
        let name = path.display().to_string();
        let fail = |e: rusqlite::Error| explain(&name, e);
        let existed = path.exists();
        let dropped = tail::find_dropped(path);
        let db = Connection::open(path).map_err(fail)?;
        if !existed {
            use std::os::unix::fs::PermissionsExt;
            // The WAL and its index inherit the mode.
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o600))
                .map_err(|e| JournalError::Damaged { path: name.clone(), what: e.to_string() })?;
        }
        let mut journal = Journal::begin(db, path)?;
        if dropped.is_some() {
            // What is left of the incomplete batch would be found again. It does no harm if it cannot be removed now.
            let _ = journal.db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        }
        journal.dropped = dropped;
        Ok(journal)
    }

    /// Whether the next daemon can read the journal at `path`, which exists and which no daemon uses. The file stays as
    /// it is, and a batch that was cut off stays for that daemon to report.
    pub fn examine(path: &Path) -> Result<(), JournalError> {
        let name = path.display().to_string();
        let fail = |e: rusqlite::Error| explain(&name, e);
        let Some(db) = tail::open_unchanged(path).map_err(fail)? else { return Ok(()) };
        db.busy_timeout(std::time::Duration::from_secs(2)).map_err(fail)?;
        let found = version_of(&db).map_err(fail)?;
        if found > SCHEMA_VERSION {
            return Err(JournalError::Newer { path: name, found });
        }
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map_err(fail)?;
        check_pages(&db, &name)?;
        // A journal of an older version is read in another way, and an empty file is no journal yet.
        if found == SCHEMA_VERSION {
            Journal { db, path: name, clock: Clock::resume(None, Time::ZERO), epoch: 0, dropped: None }.load()?;
        }
        Ok(())
    }

    /// Begins a new epoch on a database that is open.
    pub(crate) fn begin(mut db: Connection, path: &Path) -> Result<Journal, JournalError> {
        let name = path.display().to_string();
        let fail = |e: rusqlite::Error| explain(&name, e);
        db.busy_timeout(std::time::Duration::from_secs(2)).map_err(fail)?;
        let found = version_of(&db).map_err(fail)?;
        if found > SCHEMA_VERSION {
            return Err(JournalError::Newer { path: name, found });
        }
        let dir = path.parent().unwrap_or(Path::new("/"));
        db.pragma_update(None, "journal_mode", medium::JournalMode::for_dir(dir).pragma()).map_err(fail)?;
        db.pragma_update(None, "synchronous", "FULL").map_err(fail)?;
        db.pragma_update(None, "secure_delete", "ON").map_err(fail)?;
        // A megabyte is plenty for what the driver touches; the default would be a good part of the daemon's memory.
        db.pragma_update(None, "cache_size", -1024).map_err(fail)?;
        db.pragma_update(None, "journal_size_limit", 8 << 20).map_err(fail)?;
        // The commit that moves the log into the file syncs three times more. Pushes wait for it, so it is rare: after
        // 2,000 pages, which are just below the limit above.
        db.pragma_update(None, "wal_autocheckpoint", 2000).map_err(fail)?;
        if found == 0 {
            let tx = db.transaction().map_err(fail)?;
            create(&tx).and_then(|()| tx.commit()).map_err(fail)?;
        }
        check_pages(&db, &name)?;
        if found > 0 {
            migrate::migrate(&mut db, &name, found, &dir.join("jobs"))?;
        }
        let kept = get_meta(&db, "clock").map_err(fail)?.and_then(|t| serde_json::from_str(&t).ok());
        let latest: Option<i64> = db.query_row("SELECT MAX(time_us) FROM journal", [], |r| r.get(0)).map_err(fail)?;
        let latest_sample: Option<i64> =
            db.query_row("SELECT MAX(time_us) FROM samples", [], |r| r.get(0)).map_err(fail)?;
        let latest = latest.unwrap_or(0).max(latest_sample.unwrap_or(0));
        let clock = Clock::resume(kept, Time(latest as u64));
        let epoch = get_meta(&db, "epoch").map_err(fail)?.and_then(|t| t.parse::<u64>().ok()).unwrap_or(0);
        let mut journal = Journal { db, path: name, clock, epoch, dropped: None };
        journal.next_epoch()?;
        Ok(journal)
    }

    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// What was dropped when the journal was opened, because it was not a whole batch; in words.
    pub fn dropped(&self) -> Option<&str> {
        self.dropped.as_deref()
    }

    /// Everything decided under an older epoch is stale from now on.
    pub fn next_epoch(&mut self) -> Result<u64, JournalError> {
        let Some(epoch) = self.epoch.checked_add(1) else {
            let what = format!("no epoch follows {}", self.epoch);
            return Err(JournalError::Damaged { path: self.path.clone(), what });
        };
        let clock = json(&self.clock);
        self.transact(|tx| {
            set_meta(tx, "epoch", &epoch.to_string())?;
            set_meta(tx, "clock", &clock)
        })?;
        self.epoch = epoch;
        Ok(epoch)
    }

    /// What earlier daemons left.
    pub fn load(&self) -> Result<JournalContents, JournalError> {
        let fail = |e| explain(&self.path, e);
        let bad = |what: serde_json::Error| JournalError::Damaged { path: self.path.clone(), what: what.to_string() };
        let mut jobs = Vec::new();
        let mut query = self.db.prepare("SELECT record, position FROM jobs ORDER BY id").map_err(fail)?;
        let mut rows = query.query([]).map_err(fail)?;
        while let Some(row) = rows.next().map_err(fail)? {
            let record: String = row.get(0).map_err(fail)?;
            jobs.push((serde_json::from_str(&record).map_err(bad)?, row.get(1).map_err(fail)?));
        }
        let control = get_meta(&self.db, "control").map_err(fail)?;
        let mut plans: Vec<(Moment, Plan)> = self
            .entries_where("kind = 'plan' ORDER BY seq DESC LIMIT 20")?
            .into_iter()
            .filter_map(|e| match e.change {
                Change::Plan { plan } => Some((e.at, plan)),
                _ => None,
            })
            .collect();
        plans.reverse();
        let mut query = self.db.prepare("SELECT name, id FROM owners").map_err(fail)?;
        let owners = query
            .query_map([], |r| Ok((r.get(0)?, r.get(1)?)))
            .map_err(fail)?
            .collect::<Result<_, _>>()
            .map_err(fail)?;
        let last: Option<String> = self
            .db
            .query_row("SELECT kind FROM journal ORDER BY seq DESC LIMIT 1", [], |r| r.get(0))
            .optional()
            .map_err(fail)?;
        let is_new = last.is_none();
        let unclean = last.is_some_and(|kind| kind != "closed");
        // A control of another version is no loss: shares are measured again.
        Ok(JournalContents {
            jobs,
            control: control.and_then(|c| gainshare_record::decider_from_json(&c).ok()),
            plans,
            owners,
            unclean,
            is_new,
        })
    }

    /// Makes the whole batch true, or nothing of it.
    pub fn commit(&mut self, batch: &Batch) -> Result<(), JournalError> {
        if batch.is_empty() {
            return Ok(());
        }
        self.transact(|tx| write(tx, batch))
    }

    /// The smallest id that no job has had yet.
    pub fn next_id(&self) -> Result<JobId, JournalError> {
        let query = "SELECT MAX(COALESCE((SELECT MAX(id) FROM jobs), 0), COALESCE((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'last_id'), 0))";
        let last: i64 = self.db.query_row(query, [], |r| r.get(0)).map_err(|e| explain(&self.path, e))?;
        Ok(JobId(last as u64 + 1))
    }

    /// Gives an owner a number. An owner without a job is pruned with the next job that is forgotten.
    pub fn add_owner(&mut self, name: &str) -> Result<u32, JournalError> {
        self.transact(|tx| tx.execute("INSERT OR IGNORE INTO owners (name) VALUES (?1)", [name]).map(drop))?;
        let number = self.db.query_row("SELECT id FROM owners WHERE name = ?1", [name], |r| r.get(0));
        number.map_err(|e| explain(&self.path, e))
    }

    /// A job's samples later than `after`, oldest first.
    pub fn samples(&self, job: JobId, after: Time) -> Result<Vec<StoredSample>, JournalError> {
        self.samples_where("time_us > ?2", job, after.0)
    }

    /// A job's samples from this number on, oldest first.
    pub fn samples_from(&self, job: JobId, seq: u64) -> Result<Vec<StoredSample>, JournalError> {
        self.samples_where("seq >= ?2", job, seq)
    }

    fn samples_where(&self, condition: &str, job: JobId, bound: u64) -> Result<Vec<StoredSample>, JournalError> {
        let fail = |e| explain(&self.path, e);
        let select =
            format!("SELECT seq, time_us, step, value FROM samples WHERE job = ?1 AND {condition} ORDER BY seq");
        let mut query = self.db.prepare_cached(&select).map_err(fail)?;
        let rows = query
            .query_map(params![job.0 as i64, i64::try_from(bound).unwrap_or(i64::MAX)], |r| {
                Ok(StoredSample {
                    seq: r.get::<_, i64>(0)? as u64,
                    time: Time(r.get::<_, i64>(1)? as u64),
                    step: r.get::<_, Option<i64>>(2)?.map(|s| s as u64),
                    value: r.get(3)?,
                })
            })
            .map_err(fail)?;
        rows.collect::<Result<_, _>>().map_err(fail)
    }

    /// The last plans, newest first.
    pub fn plans(&self, last: usize) -> Result<Vec<(Moment, Plan)>, JournalError> {
        let entries = self.entries_where(&format!("kind = 'plan' ORDER BY seq DESC LIMIT {last}"))?;
        Ok(entries
            .into_iter()
            .filter_map(|e| match e.change {
                Change::Plan { plan } => Some((e.at, plan)),
                _ => None,
            })
            .collect())
    }

    /// Every change that is still kept, oldest first.
    pub fn entries(&self) -> Result<Vec<Entry>, JournalError> {
        self.entries_where("1 ORDER BY seq")
    }

    fn entries_where(&self, condition: &str) -> Result<Vec<Entry>, JournalError> {
        let fail = |e| explain(&self.path, e);
        let mut query = self
            .db
            .prepare(&format!("SELECT seq, time_us, unix_s, job, body FROM journal WHERE {condition}"))
            .map_err(fail)?;
        let mut rows = query.query([]).map_err(fail)?;
        let mut entries = Vec::new();
        while let Some(row) = rows.next().map_err(fail)? {
            let body: String = row.get(4).map_err(fail)?;
            let change = serde_json::from_str(&body)
                .map_err(|e| JournalError::Damaged { path: self.path.clone(), what: e.to_string() })?;
            let at =
                Moment { time: Time(row.get::<_, i64>(1).map_err(fail)? as u64), unix_s: row.get(2).map_err(fail)? };
            let job = row.get::<_, Option<i64>>(3).map_err(fail)?.map(|id| JobId(id as u64));
            entries.push(Entry { seq: row.get(0).map_err(fail)?, at, job, change });
        }
        Ok(entries)
    }

    pub fn limits(&self) -> Result<Vec<LimitRow>, JournalError> {
        read_limits(&self.db).map_err(|e| explain(&self.path, e))
    }

    /// The limits of one job, by the runtime's key.
    pub fn limit(&self, key: &str) -> Result<Option<LimitRow>, JournalError> {
        let read = || {
            let mut query = self.db.prepare_cached(&format!("{SELECT_LIMITS} WHERE key = ?1"))?;
            query.query_row([key], limit_row).optional()
        };
        read().map_err(|e| explain(&self.path, e))
    }

    fn transact(&mut self, work: impl FnOnce(&Transaction) -> rusqlite::Result<()>) -> Result<(), JournalError> {
        let run = || {
            let tx = self.db.transaction()?;
            work(&tx)?;
            crate::fail::slow_commit();
            tx.commit()
        };
        run().map_err(|e| explain(&self.path, e))
    }
}

/// The limits that were changed and not yet put back. The guard reads them beside a daemon that is
/// dead or stands still.
pub fn limits_in(path: &Path) -> Result<Vec<LimitRow>, JournalError> {
    let name = path.display().to_string();
    // Reading a WAL needs its index, which a dead writer may have left to be rebuilt: so not read-only.
    let db = Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_WRITE).map_err(|e| explain(&name, e))?;
    let set_up = || {
        // The next daemon reports how the log ends, so the log stays as it is.
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        db.busy_timeout(std::time::Duration::from_secs(2))
    };
    set_up().and_then(|()| read_limits(&db)).map_err(|e| explain(&name, e))
}

const SELECT_LIMITS: &str = "SELECT key, job, runtime, original FROM limits";

fn read_limits(db: &Connection) -> rusqlite::Result<Vec<LimitRow>> {
    let mut query = db.prepare(&format!("{SELECT_LIMITS} ORDER BY job"))?;
    query.query_map([], limit_row)?.collect()
}

fn limit_row(row: &rusqlite::Row) -> rusqlite::Result<LimitRow> {
    let job = JobId(row.get::<_, i64>(1)? as u64);
    Ok(LimitRow { key: row.get(0)?, job, runtime: row.get(2)?, original: row.get(3)? })
}

/// Refuses a file whose pages SQLite cannot make sense of.
fn check_pages(db: &Connection, name: &str) -> Result<(), JournalError> {
    let check: String = db.pragma_query_value(None, "quick_check", |r| r.get(0)).map_err(|e| explain(name, e))?;
    if check == "ok" {
        return Ok(());
    }
    Err(JournalError::Damaged { path: name.to_owned(), what: check.replace('\n', "; ") })
}

/// The version of the file, read before anything is written. A connection to a newer file is closed as soon as the
/// version is known: it must not move the file's write-ahead log into the file, as the last connection does by default.
fn version_of(db: &Connection) -> rusqlite::Result<i64> {
    db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    let found: i64 = db.pragma_query_value(None, "user_version", |r| r.get(0))?;
    if found <= SCHEMA_VERSION {
        db.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, false)?;
    }
    Ok(found)
}

fn create(tx: &Transaction) -> rusqlite::Result<()> {
    tx.execute_batch(
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
         CREATE TABLE jobs (id INTEGER PRIMARY KEY, record TEXT NOT NULL, position TEXT);
         CREATE TABLE journal (seq INTEGER PRIMARY KEY AUTOINCREMENT, time_us INTEGER NOT NULL, unix_s REAL NOT NULL,
                               job INTEGER, kind TEXT NOT NULL, body TEXT NOT NULL);
         CREATE INDEX journal_kind ON journal (kind, seq);
         CREATE INDEX journal_job ON journal (job);
         CREATE TABLE samples (job INTEGER NOT NULL, seq INTEGER NOT NULL, time_us INTEGER NOT NULL, step INTEGER,
                               value REAL NOT NULL, PRIMARY KEY (job, seq)) WITHOUT ROWID;
         CREATE TABLE limits (key TEXT PRIMARY KEY, job INTEGER NOT NULL, runtime TEXT NOT NULL, original TEXT NOT NULL)
                              WITHOUT ROWID;
         CREATE TABLE owners (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);",
    )?;
    tx.pragma_update(None, "user_version", SCHEMA_VERSION)
}

fn write(tx: &Transaction, batch: &Batch) -> rusqlite::Result<()> {
    for (at, job, change) in &batch.changes {
        tx.prepare_cached("INSERT INTO journal (time_us, unix_s, job, kind, body) VALUES (?1, ?2, ?3, ?4, ?5)")?
            .execute(params![at.time.0 as i64, at.unix_s, job.map(|j| j.0 as i64), change.kind(), json(change)])?;
        match (job, change) {
            (Some(id), Change::Submitted { record }) => {
                tx.prepare_cached("INSERT INTO jobs (id, record) VALUES (?1, ?2)")?
                    .execute(params![id.0 as i64, json(record)])?;
                set_meta(tx, "last_id", &id.0.to_string())?;
            }
            (Some(id), Change::Forgotten) => {
                for table in ["jobs WHERE id", "samples WHERE job", "journal WHERE job"] {
                    tx.execute(&format!("DELETE FROM {table} = ?1"), [id.0 as i64])?;
                }
                tx.execute("DELETE FROM owners WHERE name NOT IN (SELECT record ->> '$.owner' FROM jobs)", [])?;
            }
            (None, Change::Plan { plan }) if plan.generation % 64 == 0 => {
                for kind in ["plan", "applied"] {
                    keep_newest(tx, kind, PLANS_KEPT)?;
                }
            }
            (None, Change::Opened { .. }) => {
                for kind in ["opened", "lapsed", "closed"] {
                    keep_newest(tx, kind, DAEMONS_KEPT)?;
                }
            }
            _ => {}
        }
    }
    for record in &batch.records {
        tx.prepare_cached("UPDATE jobs SET record = ?2 WHERE id = ?1")?
            .execute(params![record.id.0 as i64, json(record)])?;
    }
    for job in &batch.cleared {
        tx.execute("DELETE FROM samples WHERE job = ?1", [job.0 as i64])?;
    }
    for (job, s) in &batch.samples {
        tx.prepare_cached(
            "INSERT OR REPLACE INTO samples (job, seq, time_us, step, value) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![job.0 as i64, s.seq as i64, s.time.0 as i64, s.step.map(|x| x as i64), s.value])?;
    }
    for (job, position) in &batch.positions {
        tx.prepare_cached("UPDATE jobs SET position = ?2 WHERE id = ?1")?.execute(params![job.0 as i64, position])?;
    }
    for Thinning { job, stride, from } in &batch.thin {
        tx.prepare_cached("DELETE FROM samples WHERE job = ?1 AND seq >= ?2 AND seq % ?3 != 0")?.execute(params![
            job.0 as i64,
            *from as i64,
            *stride as i64
        ])?;
    }
    for l in &batch.limits {
        tx.prepare_cached("INSERT OR REPLACE INTO limits (key, job, runtime, original) VALUES (?1, ?2, ?3, ?4)")?
            .execute(params![l.key, l.job.0 as i64, l.runtime, l.original])?;
    }
    for key in &batch.released {
        tx.prepare_cached("DELETE FROM limits WHERE key = ?1")?.execute([key])?;
    }
    if let Some(control) = &batch.control {
        set_meta(
            tx,
            "control",
            &gainshare_record::decider_to_json(control).expect("it has string keys and finite numbers"),
        )?;
    }
    Ok(())
}

/// Deletes all but the newest rows of a kind.
fn keep_newest(tx: &Transaction, kind: &str, count: i64) -> rusqlite::Result<()> {
    tx.execute(
        "DELETE FROM journal WHERE kind = ?1 AND seq <
         (SELECT seq FROM journal WHERE kind = ?1 ORDER BY seq DESC LIMIT 1 OFFSET ?2)",
        params![kind, count - 1],
    )
    .map(drop)
}

fn get_meta(db: &Connection, key: &str) -> rusqlite::Result<Option<String>> {
    db.query_row("SELECT value FROM meta WHERE key = ?1", [key], |r| r.get(0)).optional()
}

fn set_meta(tx: &Transaction, key: &str, value: &str) -> rusqlite::Result<()> {
    tx.prepare_cached("INSERT OR REPLACE INTO meta (key, value) VALUES (?1, ?2)")?.execute([key, value]).map(drop)
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our own types have string keys and finite numbers")
}

fn explain(path: &str, source: rusqlite::Error) -> JournalError {
    use rusqlite::ErrorCode;
    let path = path.to_owned();
    match source.sqlite_error_code() {
        Some(ErrorCode::DiskFull) => JournalError::Full { path },
        // SQLite reports some writes on a full disk as input/output errors; the free space decides.
        Some(ErrorCode::SystemIoFailure) if is_full(Path::new(&path)) => JournalError::Full { path },
        Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase) => {
            JournalError::Damaged { path, what: source.to_string() }
        }
        _ => JournalError::Sqlite { path, source },
    }
}

fn is_full(path: &Path) -> bool {
    let dir = path.parent().unwrap_or(Path::new("/"));
    nix::sys::statvfs::statvfs(dir).is_ok_and(|s| s.blocks_available() * s.fragment_size() < 256 << 10)
}
