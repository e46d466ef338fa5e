//! The rhythm of a job that prints nothing, with the built library inside a real OpenMP program.

use crate::common::{self, Daemon, read, wait_until};
use gainshare_daemon::api::types::JobState;
use gainshare_daemon::spec::JobSpec;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Steps of six layers, a loss and an optimizer. It prints nothing. The number of its steps is in the file that is its
/// first argument; it ends after as many as its third argument says, and stands still while the file `stop` lies beside
/// the first one.
const SILENT: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static volatile long work;
static void forward(void) {
    #pragma omp parallel
    work += 1;
    for (int layer = 0; layer < 6; layer++) {
        #pragma omp parallel
        work += 2;
        #pragma omp parallel
        work += 3;
    }
    #pragma omp parallel
    work += 4;
}
static void backward(void) {
    for (int layer = 0; layer < 6; layer++) {
        #pragma omp parallel
        work += 5;
        #pragma omp parallel
        work += 6;
        #pragma omp parallel
        work += 7;
    }
    #pragma omp parallel
    work += 8;
}
int main(int count, char **words) {
    char stop[4096];
    snprintf(stop, sizeof stop, "%s.stop", words[1]);
    long most = count > 3 ? atol(words[3]) : 1000000000;
    for (long step = 1; step <= most; step++) {
        forward();
        backward();
        usleep(20000);
        FILE *file = fopen(words[1], "w");
        fprintf(file, "%ld", step);
        fclose(file);
        while (!access(stop, F_OK)) usleep(10000);
    }
}
"#;

/// A daemon whose program has the built library beside it, and a folder for the job.
fn daemon() -> (Daemon, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("gainshare");
    std::os::unix::fs::symlink(common::program(), &program).unwrap();
    std::os::unix::fs::symlink(library(), folder.path().join(gainshare_page::LIBRARY_FILE)).unwrap();
    let (code, silent) = (folder.path().join("silent.c"), folder.path().join("silent"));
    std::fs::write(&code, SILENT).unwrap();
    let built = Command::new("cc").args(["-O1", "-fopenmp", "-o"]).args([&silent, &code]).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    (Daemon::start(&format!("program = {program:?}")), folder)
}

/// The library that was built with these tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let built = folders.map(|folder| folder.join(gainshare_page::LIBRARY_FILE)).filter(|file| file.is_file());
    built
        .max_by_key(|file| file.metadata().unwrap().modified().unwrap())
        .expect("build the library first: cargo build --release -p gainshare-inside")
}

/// How often the known speed is compared with the true one, an odd number.
const COMPARISONS: usize = 5;

fn silent(folder: &Path, name: &str, steps: Option<u64>) -> JobSpec {
    let path = |name: &str| folder.join(name).to_str().unwrap().to_owned();
    let mut command = vec![path("silent"), path(name)];
    command.extend(steps.into_iter().flat_map(|steps| ["--total-steps".to_owned(), steps.to_string()]));
    JobSpec { name: Some(name.into()), ..JobSpec::new(command) }
}

#[test]
fn the_steps_of_a_silent_job_are_known_within_a_fifth() {
    let (d, folder) = daemon();
    d.submit(vec![silent(folder.path(), "job", Some(100_000))]).unwrap();
    let file = folder.path().join("job");
    // The file is empty for a moment while it is written.
    let steps = || std::iter::repeat_with(|| read(&file).parse::<u64>().ok()).find_map(|steps| steps).unwrap();
    wait_until("the job has a rhythm", 30, || d.job("job").rhythm.is_some());
    // A busy machine changes the speed from one moment to the next: the middle one of several comparisons is judged.
    let difference = |_| {
        let (began, first) = (Instant::now(), steps());
        std::thread::sleep(Duration::from_secs(6));
        let true_per_s = (steps() - first) as f64 / began.elapsed().as_secs_f64();
        (d.job("job").rhythm.unwrap().steps_per_s / true_per_s - 1.0).abs()
    };
    let mut differences: Vec<f64> = (0..COMPARISONS).map(difference).collect();
    differences.sort_by(f64::total_cmp);
    assert!(differences[COMPARISONS / 2] < 0.2, "the speeds differ by the parts {differences:?}");
    let (info, last) = (d.job("job"), steps());
    let rhythm = info.rhythm.clone().unwrap();
    assert!((rhythm.steps as f64 / last as f64 - 1.0).abs() < 0.2, "{rhythm:?}, in truth {last} steps");
    assert_eq!((rhythm.total, rhythm.stalled_s), (Some(100_000), None));
    let left_s = (100_000 - rhythm.steps) as f64 / rhythm.steps_per_s;
    assert!(info.eta_s.is_some_and(|eta_s| (eta_s / left_s - 1.0).abs() < 0.05), "{:?}, about {left_s}", info.eta_s);
    assert_eq!(info.metric, None, "nothing is known of the loss");

    std::fs::write(folder.path().join("job.stop"), "").unwrap();
    wait_until("the job stands still", 30, || d.job("job").rhythm.is_some_and(|rhythm| rhythm.stalled_s.is_some()));
    std::fs::remove_file(folder.path().join("job.stop")).unwrap();
    wait_until("the job goes on", 30, || d.job("job").rhythm.is_some_and(|rhythm| rhythm.stalled_s.is_none()));
    d.call(d.client.stop("job", 5.0)).unwrap();
    d.wait_end("job");
}

#[test]
fn the_next_run_of_a_silent_program_is_as_long_as_the_last_one() {
    let (mut d, folder) = daemon();
    let run = |name: &str| {
        // The number of steps stands where no option names it.
        let mut spec = silent(folder.path(), "steps", None);
        spec.command.extend(["x".to_owned(), "600".to_owned()]);
        JobSpec { name: Some(name.into()), ..spec }
    };
    d.submit(vec![run("first")]).unwrap();
    wait_until("the first run is over", 60, || d.job("first").state == JobState::Done);
    d.kill9();
    d.up();
    d.submit(vec![run("second")]).unwrap();
    let total = || d.job("second").rhythm.and_then(|rhythm| rhythm.total);
    wait_until("the length of the second run is known", 30, || total().is_some());
    let total = total().unwrap();
    assert!(total.abs_diff(600) <= 60, "{total}");
    assert!(d.job("second").eta_s.is_some());
    d.call(d.client.stop("second", 5.0)).unwrap();
    d.wait_end("second");
}
