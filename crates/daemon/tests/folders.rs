//! A file system that does not answer, below the folder of one job. The mount is a FUSE file system without a server:
//! every access to it waits until the descriptor of `/dev/fuse` is closed.

use crate::common::{Daemon, read, sh, trainer, wait_until};
use gainshare_daemon::api::types::{ErrorCode, JobState};
use gainshare_daemon::spec::JobSpec;
use gainshare_progress::Source;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// A mounted file system that does not answer.
struct HungMount {
    dir: PathBuf,
    fuse: Option<File>,
}

impl HungMount {
    fn new(dir: &Path) -> HungMount {
        let fuse = File::options().read(true).write(true).open("/dev/fuse");
        let fuse = fuse.unwrap_or_else(|e| panic!("cannot open /dev/fuse: {e}"));
        let data = format!("fd={},rootmode=40000,user_id=0,group_id=0", fuse.as_raw_fd());
        let mounted = mount(Some("hung"), dir, Some("fuse"), MsFlags::empty(), Some(data.as_str()));
        mounted.unwrap_or_else(|e| panic!("cannot mount a FUSE file system on {}: {e}", dir.display()));
        HungMount { dir: dir.to_path_buf(), fuse: Some(fuse) }
    }
}

impl Drop for HungMount {
    /// Every access that waits returns with an error, and the folder below is there again.
    fn drop(&mut self) {
        self.fuse = None;
        if let Err(e) = umount2(&self.dir, MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {}: {e}", self.dir.display());
        }
    }
}

/// A job that writes a row into logs/NAME.csv every tenth of a second until the file `stop` appears. It opens its file
/// at the start, so it goes on while a file system is mounted over `logs`.
fn writer(name: &str, folder: &Path) -> JobSpec {
    let rows = "i=0; while [ ! -e ../stop ]; do i=$((i+1)); echo $i,$((100000-i)).5 >&3; sleep 0.1; done";
    let mut job = sh(name, &format!("exec 3>>logs/{name}.csv; echo step,loss >&3; {rows}"));
    job.cwd = Some(folder.to_path_buf());
    (job.metric.source, job.metric.path) = (Source::File, Some(format!("logs/{name}.csv")));
    job
}

fn steps(d: &Daemon, job: &str) -> Vec<u64> {
    let samples = d.call(d.client.samples(job, 0.0)).unwrap().samples;
    samples.iter().filter_map(|sample| sample.step).collect()
}

fn has_note(d: &Daemon, job: &str, text: &str) -> bool {
    d.job(job).notes.iter().any(|note| note.contains(text))
}

/// The lease, the API, decisions and the reports of other jobs go on. Jobs of the folder end. A daemon starts. When the
/// file system answers, every row of the job's file is counted once.
#[test]
#[ignore = "needs root: it mounts a FUSE file system"]
fn a_folder_that_does_not_answer_holds_up_no_other_job() {
    let mut d = Daemon::start("slots = 10\nlease = \"5s\"");
    let folder = d.dir.path().join("work");
    let fine = d.dir.path().join("fine");
    for folder in [&folder, &fine] {
        std::fs::create_dir_all(folder.join("logs")).unwrap();
    }
    d.submit(vec![writer("hung", &folder)]).unwrap();
    wait_until("rows are read before the fault", 60, || steps(&d, "hung").len() > 5);

    let mounted = HungMount::new(&folder.join("logs"));
    wait_until("the job has a note about its folder", 60, || has_note(&d, "hung", "does not answer"));
    assert!(has_note(&d, "hung", &folder.display().to_string()), "{:#?}", d.job("hung").notes);
    let before = steps(&d, "hung").len();

    // Other jobs are decided about, their files are read, and they end.
    let generation = || d.call(d.client.plans(1)).unwrap()[0].generation;
    let decided = generation();
    d.submit(vec![writer("other", &fine), trainer("short", 5, "0.2")]).unwrap();
    wait_until("the file of another job is read", 60, || steps(&d, "other").len() > 5);
    assert_eq!(d.wait_end("short").state, JobState::Done);
    assert!(generation() > decided, "no decision since the fault");
    let lease = d.run_dir().join("lease");
    let mut renewals = BTreeSet::new();
    wait_until("the lease is renewed", 60, || {
        renewals.insert(read(&lease));
        renewals.len() > 5
    });
    assert_eq!(d.call(d.client.health()).unwrap().status, "ok");

    // A job in the hung folder ends, and what it printed counts.
    let mut ends = sh("ends", "echo step 1/2 loss=1.5; sleep 2; echo step 2/2 loss=1.25");
    ends.cwd = Some(folder.clone());
    d.submit(vec![ends]).unwrap();
    let ended = d.wait_end("ends");
    assert_eq!((ended.state, steps(&d, "ends").len()), (JobState::Done, 2), "{ended:#?}");
    assert!(has_note(&d, "ends", "were not read"), "{ended:#?}");

    // A job whose working directory does not answer is refused, and the daemon goes on.
    let mut never = sh("never", "true");
    never.cwd = Some(folder.join("logs"));
    let refused = d.submit(vec![never]).unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::Timeout), "{refused}");
    assert!(!d.run_dir().join("lapsed").exists(), "the lease lapsed; log:\n{}", d.log());

    // The next daemon starts although the folder still hangs.
    d.kill9();
    d.up();
    wait_until("the next daemon notices the folder", 60, || has_note(&d, "hung", "does not answer"));
    assert_eq!(steps(&d, "hung").len(), before, "nothing was read meanwhile");
    assert_eq!(d.job("hung").state, JobState::Running);

    let returned = Instant::now();
    drop(mounted);
    wait_until("the note is gone", 60, || !has_note(&d, "hung", "does not answer"));
    let rows = || read(&folder.join("logs/hung.csv")).lines().count() - 1;
    wait_until("what was missed is read", 120, || steps(&d, "hung").len() + 20 > rows());
    let recovery_s = returned.elapsed().as_secs_f64();
    std::fs::write(d.dir.path().join("stop"), "").unwrap();
    for job in ["hung", "other"] {
        let ended = d.wait_end(job);
        assert_eq!(ended.state, JobState::Done, "{ended:#?}");
        let steps = steps(&d, job);
        assert_eq!(steps, (1..=steps.len() as u64).collect::<Vec<u64>>(), "{job}: each row counts once, in order");
    }
    assert_eq!(steps(&d, "hung").len(), rows(), "every row counts; log:\n{}", d.log());
    println!("fault: injected=1 violations=0 recovery_s={recovery_s:.1}");
}
