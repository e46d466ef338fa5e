//! The journal on its own: whole batches wherever the file is cut, replay gives the state, a full disk
//! changes nothing.

use crate::batches::{self, batch, moment, record, submitted};
use crate::common::assert_replays;
use gainshare_core::model::{JobId, Time};
use gainshare_daemon::api::types::{JobState, MissCause, PredictedMiss, StartOrder};
use gainshare_daemon::journal::{Batch, Journal, LimitRow, Thinning};
use gainshare_daemon::record::{Change, JobRecord};
use gainshare_daemon::spec::JobSpec;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::Path;

fn copy(from: &Path, to: &Path, wal_bytes: usize) {
    std::fs::copy(from.join("journal.db"), to.join("journal.db")).unwrap();
    let wal = std::fs::read(from.join("journal.db-wal")).unwrap();
    std::fs::write(to.join("journal.db-wal"), &wal[..wal_bytes.min(wal.len())]).unwrap();
}

#[test]
fn a_torn_tail_is_dropped_and_what_was_committed_is_whole() {
    let (live, cut) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut journal = Journal::open(&live.path().join("journal.db")).unwrap();
    let mut sizes = Vec::new();
    for id in 1..=8 {
        journal.commit(&batch(id)).unwrap();
        sizes.push(std::fs::metadata(live.path().join("journal.db-wal")).unwrap().len() as usize);
    }
    let last = *sizes.last().unwrap();
    let begin = sizes[0].saturating_sub(5000);
    // Every byte of the last record's neighbourhood, and strides through the rest; in the long form every byte.
    let stride = if std::env::var_os("GAINSHARE_LONG").is_some() { 1 } else { 997 };
    let ends = (begin..last).step_by(stride).chain(last.saturating_sub(30)..=last);
    let (mut cuts, mut longest_s) = (0, 0.0_f64);
    for end in ends {
        copy(live.path(), cut.path(), end);
        let _ = std::fs::remove_file(cut.path().join("journal.db-shm"));
        let began = std::time::Instant::now();
        let reopened = Journal::open(&cut.path().join("journal.db")).unwrap();
        longest_s = longest_s.max(began.elapsed().as_secs_f64());
        cuts += 1;
        assert_dropped(&reopened, end, &sizes);
        let jobs: Vec<JobRecord> = reopened.load().unwrap().jobs.into_iter().map(|(r, _)| r).collect();
        let committed = sizes.iter().filter(|size| **size <= end).count();
        assert!(jobs.len() >= committed, "cut at {end}: {} of {committed} jobs", jobs.len());
        assert!(jobs.iter().zip(1..).all(|(r, id)| r.id == JobId(id)), "a prefix, without holes");
        assert_replays(&jobs, &reopened.entries().unwrap());
        for job in &jobs {
            assert_eq!(reopened.samples(job.id, Time::ZERO).unwrap().len(), batches::SAMPLES, "all samples or no job");
        }
    }
    println!("fault: injected={cuts} violations=0 recovery_s={longest_s:.3}");
}

/// The journal names the bytes behind the last whole batch, and nothing else.
fn assert_dropped(journal: &Journal, end: usize, sizes: &[usize]) {
    // The batches before the first size are those of a new journal.
    let Some(whole) = sizes.iter().rfind(|size| **size <= end) else { return };
    let dropped = journal.dropped().unwrap_or("");
    let named = format!("the last {} of {end} bytes", end - whole);
    assert_eq!(
        (dropped.contains(&named), dropped.is_empty()),
        (end > *whole, end == *whole),
        "cut at {end}: {dropped}"
    );
}

/// A log that begins again has old frames behind its end. They are no batch that was dropped.
#[test]
fn old_frames_of_the_log_are_not_reported() {
    let (live, killed) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let path = live.path().join("journal.db");
    let mut journal = Journal::open(&path).unwrap();
    for id in 1..=8 {
        journal.commit(&batch(id)).unwrap();
    }
    let other = rusqlite::Connection::open(&path).unwrap();
    let busy: i64 = other.query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| row.get(0)).unwrap();
    assert_eq!(busy, 0);
    let length = || std::fs::metadata(live.path().join("journal.db-wal")).unwrap().len();
    let before = length();
    journal.commit(&batch(9)).unwrap();
    assert_eq!(length(), before, "the log begins again in the same file");
    copy(live.path(), killed.path(), usize::MAX);
    let reopened = Journal::open(&killed.path().join("journal.db")).unwrap();
    assert_eq!((reopened.dropped(), reopened.load().unwrap().jobs.len()), (None, 9));
}

#[test]
fn damage_is_reported_and_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.db");
    std::fs::write(&path, vec![7u8; 10_000]).unwrap();
    let error = Journal::open(&path).unwrap_err().to_string();
    assert!(error.contains("damaged") && error.contains("journal.db"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), vec![7u8; 10_000]);
}

/// All files of a folder with their bytes, but the index of the log, which each reader makes again.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let name = |path: &Path| path.file_name().unwrap().to_string_lossy().into_owned();
    entries
        .map(|path| (name(&path), std::fs::read(&path).unwrap()))
        .filter(|(name, _)| !name.ends_with("-shm"))
        .collect()
}

#[test]
fn a_journal_is_examined_without_a_change() {
    let dir = tempfile::Builder::new().prefix("50 % of it?").tempdir().unwrap();
    let path = dir.path().join("journal.db");
    let examine = || {
        let before = files(dir.path());
        let found = Journal::examine(&path).map_err(|e| e.to_string());
        assert_eq!(files(dir.path()), before, "{found:?}");
        found
    };
    let mut journal = Journal::open(&path).unwrap();
    journal.commit(&batch(1)).unwrap();
    // A daemon that was killed leaves its log, and a batch of it that is not whole.
    let log = std::fs::read(dir.path().join("journal.db-wal")).unwrap();
    let file = std::fs::read(&path).unwrap();
    drop(journal);
    assert_eq!(examine(), Ok(()));
    std::fs::write(&path, &file).unwrap();
    std::fs::write(dir.path().join("journal.db-wal"), [&log[..], &[7; 100]].concat()).unwrap();
    assert_eq!(examine(), Ok(()));
    assert!(Journal::open(&path).unwrap().dropped().is_some(), "the daemon still reports it");
    let whole = std::fs::read(&path).unwrap();
    // Pages that make no sense, a row that is no record, and a file that is no database.
    let mut torn = whole.clone();
    torn[4096..].iter_mut().for_each(|byte| *byte ^= 0x5a);
    std::fs::write(&path, torn).unwrap();
    assert!(examine().unwrap_err().contains("is damaged"));
    std::fs::write(&path, &whole).unwrap();
    rusqlite::Connection::open(&path).unwrap().execute("UPDATE jobs SET record = '{'", []).unwrap();
    assert!(examine().unwrap_err().contains("is damaged"));
    std::fs::write(&path, [7_u8; 10_000]).unwrap();
    assert!(examine().unwrap_err().contains("is damaged"));
    std::fs::write(&path, []).unwrap();
    assert_eq!(examine(), Ok(()), "an empty file becomes a journal");
}

#[test]
fn ids_are_never_given_twice_and_epochs_only_grow() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.db");
    let mut journal = Journal::open(&path).unwrap();
    let first = journal.epoch();
    let opened = (moment(1), None, Change::Opened { epoch: first, pid: 1 });
    journal.commit(&Batch { changes: vec![opened], ..Batch::default() }).unwrap();
    journal.commit(&submitted(1)).unwrap();
    let forgotten = (moment(2), Some(JobId(1)), Change::Forgotten);
    journal.commit(&Batch { changes: vec![forgotten], ..Batch::default() }).unwrap();
    drop(journal);
    let journal = Journal::open(&path).unwrap();
    assert!(journal.epoch() > first && journal.load().unwrap().jobs.is_empty());
    assert_eq!(journal.next_id().unwrap(), JobId(2));
    assert!(journal.load().unwrap().unclean, "it was not closed");
}

/// B10: nothing in the file grows with what is forgotten, with daemons that ran, or with owners without jobs.
#[test]
fn what_is_forgotten_leaves_no_row() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("journal.db")).unwrap();
    let none = |change| Batch { changes: vec![(moment(1), None, change)], ..Batch::default() };
    journal.add_owner("me").unwrap();
    for id in 1..=300 {
        journal.add_owner(&format!("once-{id}")).unwrap();
        journal.commit(&submitted(id)).unwrap();
        journal.commit(&none(Change::Opened { epoch: id, pid: 1 })).unwrap();
        journal.commit(&none(Change::Closed)).unwrap();
        if id > 1 {
            let forgotten = (moment(id), Some(JobId(id)), Change::Forgotten);
            journal.commit(&Batch { changes: vec![forgotten], ..Batch::default() }).unwrap();
        }
    }
    let entries = journal.entries().unwrap();
    let count = |kind: &str| entries.iter().filter(|e| e.change.kind() == kind).count();
    assert_eq!((count("submitted"), count("forgotten")), (1, 0));
    assert!(count("opened") == 200 && count("closed") <= 201, "{} {}", count("opened"), count("closed"));
    let loaded = journal.load().unwrap();
    assert_eq!(loaded.owners.into_keys().collect::<Vec<_>>(), ["me"]);
    assert!(!loaded.unclean, "the newest row is kept");
}

/// Whether a file of the journal in `dir` contains `text`.
fn journal_contains(dir: &Path, text: &str) -> bool {
    let files = ["journal.db", "journal.db-wal"].map(|name| std::fs::read(dir.join(name)).unwrap_or_default());
    files.iter().any(|bytes| bytes.windows(text.len()).any(|window| window == text.as_bytes()))
}

/// B10: a job that was forgotten is gone from the bytes of the journal, too, and not only from its tables: small rows,
/// and rows that are longer than a page. The log of a running daemon may have old pages until it begins again; the end
/// of the daemon removes the log.
#[test]
fn what_is_forgotten_leaves_no_byte() {
    const CANARY: &str = "canary-in-a-command";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.db");
    let commit = |batches: Vec<Batch>| {
        let mut journal = Journal::open(&path).unwrap();
        batches.iter().for_each(|batch| journal.commit(batch).unwrap());
    };
    let with_canary = |id: u64, length: usize| {
        let mut record = record(id);
        record.spec.command = vec![CANARY.repeat(length)];
        record.owner = format!("{CANARY}-{id}");
        let change = Change::Submitted { record: Box::new(record.clone()) };
        // The same text is in the row of the change and in that of the job.
        Batch { changes: vec![(moment(id), Some(JobId(id)), change)], records: vec![record], ..Batch::default() }
    };
    commit((1..=20).map(|id| with_canary(id, if id % 2 == 0 { 1 } else { 1000 })).chain([submitted(21)]).collect());
    assert!(journal_contains(dir.path(), CANARY), "it is there as long as the jobs are");
    let forget =
        |id: u64| Batch { changes: vec![(moment(id), Some(JobId(id)), Change::Forgotten)], ..Batch::default() };
    commit((1..=20).map(forget).collect());
    assert!(!journal_contains(dir.path(), CANARY));
    assert_eq!(Journal::open(&path).unwrap().load().unwrap().jobs.len(), 1, "the other job is there");
}

/// The limits of one job are found without those of all others.
#[test]
fn limits_are_found_by_their_key() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("journal.db")).unwrap();
    let row = |id: u64| LimitRow {
        key: format!("key-{id}"),
        job: JobId(id),
        runtime: "docker".into(),
        original: format!("original {id}"),
    };
    journal.commit(&Batch { limits: (1..=3).map(row).collect(), ..Batch::default() }).unwrap();
    assert_eq!(journal.limit("key-2").unwrap(), Some(row(2)));
    assert_eq!(journal.limit("key-4").unwrap(), None);
    assert_eq!(journal.limits().unwrap(), [row(1), row(2), row(3)]);
}

/// B10: a field that another version wrote does not make the journal a damaged one.
#[test]
fn fields_of_other_versions_are_ignored() {
    let mut text = serde_json::to_value(record(1)).unwrap();
    text["spec"]["removed_since"] = serde_json::json!(1);
    text["spec"]["metric"]["removed_too"] = serde_json::json!([2]);
    text["added_since"] = serde_json::json!("x");
    assert_eq!(serde_json::from_value::<JobRecord>(text).unwrap(), record(1));
    let strict = serde_json::from_str::<JobSpec>(r#"{"command":["x"],"comand":["y"]}"#);
    assert!(strict.is_err(), "what people write is read strictly");
}

/// A journal of a later version is refused in clear words. Its file and its write-ahead log keep every byte.
#[test]
fn a_newer_journal_is_refused_and_left_unchanged() {
    const NEWER: i64 = 99;
    let live = tempfile::tempdir().unwrap();
    drop(Journal::open(&live.path().join("journal.db")).unwrap());
    let db = rusqlite::Connection::open(live.path().join("journal.db")).unwrap();
    db.pragma_update(None, "user_version", NEWER).unwrap();
    db.execute_batch("CREATE TABLE unknown_to_us (x)").unwrap();
    // The connection stays open, so that the changes are in the write-ahead log only: as after a kill.
    let in_log = tempfile::tempdir().unwrap();
    copy(live.path(), in_log.path(), usize::MAX);
    // All changes are in the file itself, in the other journal mode.
    db.pragma_update(None, "journal_mode", "DELETE").unwrap();
    drop(db);

    let content = |dir: &Path| -> BTreeMap<String, Vec<u8>> {
        let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
        // Each reader builds the index of the log again; it holds nothing of its own.
        let kept = files.filter(|path| !path.to_str().unwrap().ends_with("-shm"));
        kept.map(|path| (path.display().to_string(), std::fs::read(&path).unwrap())).collect()
    };
    let journals = [(live.path(), 1), (in_log.path(), 2)];
    for (dir, files) in journals {
        let before = content(dir);
        assert_eq!(before.len(), files);
        let error = Journal::open(&dir.join("journal.db")).unwrap_err().to_string();
        assert!(error.contains("newer version (schema 99, known 2)"), "{error}");
        assert_eq!(content(dir), before, "the journal was changed");
    }
    println!("fault: injected={} violations=0", journals.len());
}

/// B10: a journal of version 1, with environments in it, becomes one of this version; waiting jobs
/// keep their environment.
#[test]
fn environments_leave_an_old_journal_for_their_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("journal.db");
    let mut job = record(1);
    job.spec.env = BTreeMap::from([("OWN".into(), "canary-own".into())]);
    std::fs::create_dir_all(dir.path().join("jobs/1")).unwrap();
    let db = rusqlite::Connection::open(&path).unwrap();
    db.execute_batch(
        "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
         CREATE TABLE jobs (id INTEGER PRIMARY KEY, record TEXT NOT NULL, base_env TEXT NOT NULL DEFAULT '{}', position TEXT);
         CREATE TABLE journal (seq INTEGER PRIMARY KEY AUTOINCREMENT, time_us INTEGER NOT NULL, unix_s REAL NOT NULL,
                               job INTEGER, kind TEXT NOT NULL, body TEXT NOT NULL);
         CREATE TABLE samples (job INTEGER NOT NULL, seq INTEGER NOT NULL, time_us INTEGER NOT NULL, step INTEGER,
                               value REAL NOT NULL, PRIMARY KEY (job, seq)) WITHOUT ROWID;
         CREATE TABLE limits (key TEXT PRIMARY KEY, job INTEGER NOT NULL, runtime TEXT NOT NULL, original TEXT NOT NULL)
                              WITHOUT ROWID;
         CREATE TABLE owners (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
         PRAGMA user_version = 1;",
    )
    .unwrap();
    let submitted = serde_json::json!({"submitted": {"record": job, "base_env": {}}}).to_string();
    db.execute("INSERT INTO journal VALUES (1, 1, 1.0, 1, 'submitted', ?1)", [submitted]).unwrap();
    db.execute("INSERT INTO journal VALUES (2, 2, 2.0, 1, 'stopping', '\"stopping\"')", []).unwrap();
    job.stop_requested = true;
    let base = r#"{"BASE":"canary-base"}"#.to_owned();
    db.execute("INSERT INTO jobs VALUES (1, ?1, ?2, NULL)", [serde_json::to_string(&job).unwrap(), base]).unwrap();
    drop(db);

    let journal = Journal::open(&path).unwrap();
    let jobs: Vec<JobRecord> = journal.load().unwrap().jobs.into_iter().map(|(r, _)| r).collect();
    assert_eq!(jobs[0].spec.env, BTreeMap::from([("OWN".into(), String::new())]), "the name is kept");
    assert_replays(&jobs, &journal.entries().unwrap());
    drop(journal);
    let file = std::fs::read_to_string(dir.path().join("jobs/1/spec.json")).unwrap();
    assert!(file.contains("canary-own") && file.contains("canary-base"), "{file}");
    for name in ["journal.db", "journal.db-wal"] {
        let bytes = std::fs::read(dir.path().join(name)).unwrap_or_default();
        assert!(!bytes.windows(6).any(|w| w == b"canary"), "{name} still has a value");
    }
}

#[test]
fn samples_are_thinned_evenly() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("journal.db")).unwrap();
    journal.commit(&batch(1)).unwrap();
    journal.commit(&Batch { thin: vec![Thinning { job: JobId(1), stride: 4, from: 7 }], ..Batch::default() }).unwrap();
    let seqs: Vec<u64> = journal.samples(JobId(1), Time::ZERO).unwrap().iter().map(|s| s.seq).collect();
    assert_eq!(seqs, [0, 1, 2, 3, 4, 5, 6, 8, 12, 16]);
    journal.commit(&Batch { thin: vec![Thinning { job: JobId(1), stride: 4, from: 0 }], ..Batch::default() }).unwrap();
    let seqs: Vec<u64> = journal.samples_from(JobId(1), 4).unwrap().iter().map(|s| s.seq).collect();
    assert_eq!(seqs, [4, 8, 12, 16]);
}

/// Mounted for one test, gone afterwards.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new(size: &str) -> Tmpfs {
        use nix::mount::{MsFlags, mount};
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={size}");
        mount(Some("tmpfs"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str()))
            .expect("the tests of a full disk mount a tmpfs and need root");
        Tmpfs(dir)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(self.0.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[test]
#[ignore = "needs root: it mounts a tmpfs"]
fn a_full_disk_has_an_error_of_its_own_changes_nothing_and_passes() {
    let disk = Tmpfs::new("1m");
    let mut journal = Journal::open(&disk.0.path().join("journal.db")).unwrap();
    let mut taken = 0;
    let error = loop {
        match journal.commit(&batch(taken + 1)) {
            Ok(()) => taken += 1,
            Err(e) => break e,
        }
        assert!(taken < 5000, "a megabyte must fill up");
    };
    assert!(error.is_full(), "{error}");
    let jobs: Vec<JobRecord> = journal.load().unwrap().jobs.into_iter().map(|(r, _)| r).collect();
    assert_eq!(jobs.len() as u64, taken);
    assert_replays(&jobs, &journal.entries().unwrap());

    use nix::mount::{MsFlags, mount};
    mount(None::<&str>, disk.0.path(), None::<&str>, MsFlags::MS_REMOUNT, Some("size=8m")).unwrap();
    journal.commit(&batch(taken + 1)).unwrap();
    assert_eq!(journal.load().unwrap().jobs.len() as u64, taken + 1);
    println!("fault: injected=1 violations=0");
}

fn change() -> impl Strategy<Value = Change> {
    let end = |state, code| Change::Ended { state, exit_code: code, signal: None, why: None, ended_s: None };
    prop_oneof![
        (1u32..4).prop_map(|attempt| Change::Admitted {
            order: StartOrder { attempt, ..StartOrder::default() },
            group: None
        }),
        Just(Change::Started { leader: None, container: None, notes: vec!["n".into()] }),
        Just(Change::note("something".into())),
        (0u64..9).prop_map(|end| {
            let cause = MissCause::EarliestEnd { earliest_s: end as f64 / 7.0, basis: None };
            Change::predicted_miss(PredictedMiss { deadline_s: 0.1, cause })
        }),
        Just(Change::Stopping),
        (0u64..9)
            .prop_map(|t| Change::StopRequested { kill_at: Time(t), why: (t % 2 == 0).then(|| "over".to_owned()) }),
        Just(end(JobState::Done, Some(0))),
        Just(end(JobState::Failed, Some(1))),
        Just(Change::Released),
        Just(Change::Forgotten),
    ]
}

/// Texts and numbers that no version has written.
fn stored_text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just(String::new()),
        Just("null".to_owned()),
        Just("-1".to_owned()),
        Just(u64::MAX.to_string()),
        Just(r#"{"boot_id":"x","offset_us":18446744073709551615}"#.to_owned()),
        Just("{\"submitted\":{}}".to_owned()),
        Just("[".repeat(300)),
        "\\PC{0,20}",
    ]
}

fn stored_number() -> impl Strategy<Value = i64> {
    prop_oneof![Just(0), Just(-1), Just(i64::MIN), Just(i64::MAX), any::<i64>()]
}

/// One change of the file behind the daemon's back.
#[derive(Debug, Clone)]
enum Damage {
    /// The given bytes in place of others.
    Bytes(prop::sample::Index, Vec<u8>),
    /// The file is cut off.
    Cut(prop::sample::Index),
    /// This text in a column of all rows.
    Text(&'static str, String),
    Number(&'static str, i64),
}

fn damage() -> impl Strategy<Value = Damage> {
    let texts = ["jobs SET record", "jobs SET position", "journal SET body", "meta SET value", "limits SET original"];
    let numbers = ["journal SET time_us", "journal SET job", "samples SET time_us", "samples SET step"];
    prop_oneof![
        (any::<prop::sample::Index>(), prop::collection::vec(any::<u8>(), 1..64))
            .prop_map(|(at, b)| Damage::Bytes(at, b)),
        any::<prop::sample::Index>().prop_map(Damage::Cut),
        (prop::sample::select(texts.to_vec()), stored_text()).prop_map(|(column, text)| Damage::Text(column, text)),
        (prop::sample::select(numbers.to_vec()), stored_number()).prop_map(|(column, n)| Damage::Number(column, n)),
    ]
}

/// A journal of three jobs whose file no process has open.
fn closed_journal(path: &Path) {
    let mut journal = Journal::open(path).unwrap();
    for id in 1..=3 {
        journal.add_owner("me").unwrap();
        let limit = LimitRow { key: id.to_string(), job: JobId(id), runtime: "process".into(), original: "{}".into() };
        journal.commit(&Batch { limits: vec![limit], positions: vec![(JobId(id), "{}".into())], ..batch(id) }).unwrap();
    }
}

fn inflict(path: &Path, damage: &Damage) {
    let change = |bytes: &mut Vec<u8>| match damage {
        Damage::Bytes(at, new) => {
            let at = at.index(bytes.len());
            let end = (at + new.len()).min(bytes.len());
            bytes.splice(at..end, new.iter().copied());
        }
        Damage::Cut(at) => bytes.truncate(at.index(bytes.len())),
        Damage::Text(..) | Damage::Number(..) => {}
    };
    let set = |column: &str, value: &dyn rusqlite::ToSql| {
        let db = rusqlite::Connection::open(path).unwrap();
        db.execute(&format!("UPDATE {column} = ?1"), [value]).unwrap();
    };
    match damage {
        Damage::Text(column, text) => set(column, text),
        Damage::Number(column, number) => set(column, number),
        Damage::Bytes(..) | Damage::Cut(..) => {
            let mut bytes = std::fs::read(path).unwrap();
            change(&mut bytes);
            std::fs::write(path, bytes).unwrap();
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Damaged bytes and rows are an error with the journal's name, or are read. Nothing panics.
    #[test]
    fn no_damage_makes_the_journal_panic(damage in damage()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("journal.db");
        closed_journal(&path);
        inflict(&path, &damage);
        let journal = match Journal::open(&path) {
            Ok(journal) => journal,
            Err(error) => {
                prop_assert!(error.to_string().contains("journal.db"), "{error}");
                return Ok(());
            }
        };
        let _ = (journal.load(), journal.plans(9), journal.limits(), journal.next_id(), journal.clock().now());
        if let Ok(entries) = journal.entries() {
            let _ = gainshare_daemon::record::replay(entries.iter().map(|e| (e.at, e.job, &e.change)));
        }
        for id in 0..4 {
            let _ = journal.samples(JobId(id), Time::ZERO);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// I5, for any sequence of changes in any grouping into batches.
    #[test]
    fn replaying_the_journal_gives_the_state(steps in prop::collection::vec((1u64..5, change(), any::<bool>()), 1..40)) {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal.db")).unwrap();
        let mut records = BTreeMap::new();
        for id in 1..5 {
            journal.commit(&submitted(id)).unwrap();
            records.insert(JobId(id), record(id));
        }
        let mut pending = Batch::default();
        for (n, (id, change, commit)) in steps.into_iter().enumerate() {
            let (id, at) = (JobId(id), moment(100 + n as u64));
            let Some(record) = records.get_mut(&id) else { continue };
            record.take(at, &change);
            pending.records.retain(|r| r.id != id);
            if change == Change::Forgotten {
                records.remove(&id);
            } else {
                pending.records.push(record.clone());
            }
            pending.changes.push((at, Some(id), change));
            if commit {
                journal.commit(&std::mem::take(&mut pending)).unwrap();
            }
        }
        journal.commit(&pending).unwrap();
        let jobs: Vec<JobRecord> = journal.load().unwrap().jobs.into_iter().map(|(r, _)| r).collect();
        prop_assert_eq!(&jobs, &records.into_values().collect::<Vec<_>>());
        assert_replays(&jobs, &journal.entries().unwrap());
    }
}
