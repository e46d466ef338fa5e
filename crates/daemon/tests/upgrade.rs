//! A folder that the daemon of version 0.1 left behind is opened by this version.
//!
//! `fixtures/version-0.1` was written by that daemon: four jobs were submitted, and it was killed with its guard and
//! its supervisors while one job ran and one waited. Afterwards the log of the database was merged into its file, the
//! lock files were removed, and the paths of control groups were shortened.

use crate::common::{Daemon, read};
use gainshare_daemon::api::types::JobState;
use std::path::Path;

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy_folder(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

#[test]
fn a_folder_of_version_0_1_is_continued() {
    let mut daemon = Daemon::new("slots = 1");
    copy_folder(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/version-0.1"), &daemon.state());
    // Git keeps no empty folders.
    std::fs::create_dir_all(daemon.state().join("jobs/4")).unwrap();
    daemon.up();

    // What had ended stays as it was, with its reports.
    let trained = daemon.job("trained");
    assert_eq!((trained.state, trained.exit_code), (JobState::Done, Some(0)), "{trained:#?}");
    let samples = daemon.call(daemon.client.samples("trained", 0.0)).unwrap().samples;
    let reports: Vec<(Option<u64>, f64)> = samples.iter().map(|sample| (sample.step, sample.value)).collect();
    let expected: Vec<(Option<u64>, f64)> = (1..=8).map(|i| (Some(i), 100.0 - 5.0 * i as f64)).collect();
    assert_eq!(reports, expected);
    let broken = daemon.job("broken");
    assert_eq!((broken.state, broken.exit_code), (JobState::Failed, Some(3)), "{broken:#?}");

    // The process of the running job is gone: the job is lost, and its reports are kept.
    let lost = daemon.wait_end("running");
    assert_eq!(lost.state, JobState::Lost, "{lost:#?}");
    assert!(lost.metric.as_ref().is_some_and(|metric| metric.step == Some(30)), "{lost:#?}");

    // The job that waited runs with the environment of its submission.
    let waited = daemon.wait_end("waiting");
    assert_eq!(waited.state, JobState::Done, "{waited:#?}");
    assert_eq!(read(&daemon.job_dir("waiting").join("output.log")), "token=canary-token own=canary-own\n");

    daemon.call(daemon.client.shutdown(false)).unwrap();
    daemon.wait_dead();
    daemon.assert_invariants();
    for name in ["journal.db", "journal.db-wal"] {
        let bytes = std::fs::read(daemon.state().join(name)).unwrap_or_default();
        assert!(!bytes.windows(6).any(|w| w == b"canary"), "{name} still has a value of the environment");
    }
    println!("fault: injected=1 violations=0");
}
