//! The trainer as a real process: signals, kills, damaged and full checkpoint directories, fencing, output.
//!
//! Every resume test compares with the output of an uninterrupted run. CSV prints losses with all their digits,
//! so equal lines mean equal bits. A run that a test interrupts would take a million steps, so that it cannot
//! end before.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const MODELS: [&str; 5] = ["vae", "mlp", "lstm", "gru", "birnn"];
/// Steps of a run that does not end by itself.
const UNBOUNDED: u64 = 1_000_000;

/// A small model that reports every step as CSV; a step takes about a millisecond.
fn trainer(model: &str, steps: u64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gainshare-train"));
    command.args([model, "--hidden", "8", "--batch", "4", "--report-every", "1", "--format", "csv"]);
    command.args(["--steps", &steps.to_string()]);
    command.env_remove("GAINSHARE_ATTEMPT").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn with_checkpoints(mut command: Command, dir: &Path, every: u64) -> Command {
    command.arg("--checkpoint").arg(dir).args(["--checkpoint-every", &every.to_string()]);
    command
}

/// Report lines by step, without the header.
fn reports(output: &Output) -> Vec<String> {
    String::from_utf8(output.stdout.clone()).unwrap().lines().skip(1).map(str::to_owned).collect()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Starts the command, reads `lines` lines of its output, sends the signal and collects the rest.
fn signalled_after(mut command: Command, lines: usize, signal: Signal) -> Output {
    let mut child = command.spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    for _ in 0..lines {
        stdout.read_line(&mut text).unwrap();
    }
    send(&child, signal);
    std::io::Read::read_to_string(&mut stdout, &mut text).unwrap();
    let mut output = child.wait_with_output().unwrap();
    output.stdout = text.into_bytes();
    output
}

fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

fn checkpoints(dir: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<(u64, PathBuf)> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter_map(|path| {
            let name = path.file_name()?.to_str()?.strip_suffix(".safetensors")?;
            Some((name.rsplit_once('-')?.1.parse().ok()?, path))
        })
        .collect();
    paths.sort();
    paths.into_iter().map(|(_, path)| path).collect()
}

#[test]
fn sigterm_saves_and_the_next_run_continues_exactly() {
    for (index, model) in MODELS.into_iter().enumerate() {
        let dir = tempfile::tempdir().unwrap();
        let first = with_checkpoints(trainer(model, UNBOUNDED), dir.path(), 0);
        let first = signalled_after(first, 4 + 3 * index, Signal::SIGTERM);
        assert_eq!(first.status.code(), Some(143), "{model}: {}", stderr(&first));
        assert!(stderr(&first).contains("stopped by SIGTERM"), "{model}: {}", stderr(&first));
        let before = reports(&first);
        let steps = before.len() as u64 + 10;
        let second = with_checkpoints(trainer(model, steps), dir.path(), 0).output().unwrap();
        assert!(second.status.success(), "{model}: {}", stderr(&second));
        assert!(stderr(&second).contains("continues after step"), "{model}: {}", stderr(&second));
        let after = reports(&second);
        assert_eq!(after.len(), 10, "{model}");
        let whole = reports(&trainer(model, steps).output().unwrap());
        assert_eq!([before, after].concat(), whole, "{model}");
    }
}

#[test]
fn killed_while_saving_continues_from_the_newest_whole_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let killed = signalled_after(with_checkpoints(trainer("gru", UNBOUNDED), dir.path(), 5), 40, Signal::SIGKILL);
    assert_eq!(killed.status.code(), None, "SIGKILL leaves no exit code");
    // A power loss during a save can leave a newest file and a temporary file that are incomplete.
    let newest = checkpoints(dir.path()).pop().expect("a checkpoint every five steps");
    let content = fs::read(&newest).unwrap();
    fs::write(&newest, &content[..content.len() / 2]).unwrap();
    fs::write(dir.path().join(".saving"), &content[..10]).unwrap();

    let steps = reports(&killed).len() as u64 + 20;
    let resumed = with_checkpoints(trainer("gru", steps), dir.path(), 5).output().unwrap();
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    let skipped = format!("skipped: {} is damaged", newest.display());
    assert!(stderr(&resumed).contains(&skipped), "{}", stderr(&resumed));
    let lines = reports(&resumed);
    assert!(lines.len() <= 30, "{} steps: the run continues at most two checkpoints before the kill", lines.len());
    let whole = reports(&trainer("gru", steps).output().unwrap());
    assert_eq!(lines, whole[whole.len() - lines.len()..]);
    assert!(!dir.path().join(".saving").exists());
    println!("fault: injected=2 violations=0");
}

/// SplitMix64: the same numbers for the same seed.
struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % end
    }
}

fn step_of(checkpoint: &Path) -> u64 {
    let name = checkpoint.file_stem().unwrap().to_str().unwrap();
    name.rsplit_once('-').unwrap().1.parse().unwrap()
}

/// The step of the newest checkpoint, 0 without one.
fn newest_step(dir: &Path) -> u64 {
    checkpoints(dir).last().map_or(0, |path| step_of(path))
}

/// The steps that the run reported as lost when it resumed.
fn lost_steps(messages: &str) -> u64 {
    let number = |line: &str| line.rsplit_once("steps lost: ").map(|(_, number)| number.parse().unwrap());
    messages.lines().find_map(number).unwrap_or(0)
}

/// Checks the messages of a run that resumes: it continues after `step` and names the lost steps.
fn assert_resumed(messages: &str, step: u64, lost: &RangeInclusive<u64>) {
    let resumed = messages.contains(&format!("continues after step {step} from "));
    assert!(resumed || step == 0, "the last committed checkpoint is that of step {step}: {messages}");
    assert!(lost.contains(&lost_steps(messages)), "{lost:?} steps are lost: {messages}");
}

/// Inode, time of change (seconds and nanoseconds) and length of a file that is being saved, if there is one.
fn unfinished(saving: &Path) -> Option<(u64, i64, i64, u64)> {
    let file = fs::metadata(saving).ok()?;
    Some((file.ino(), file.mtime(), file.mtime_nsec(), file.len()))
}

/// Kills at random moments, many of them while a checkpoint is saved. Each run continues from the last checkpoint that
/// was committed, and reports how many steps the kill has cost.
#[test]
fn killed_at_random_moments_continues_from_the_last_committed_checkpoint() {
    const KILLS: usize = 24;
    const MOST_KILLS: usize = 400;
    const EVERY: u64 = 3;
    let seed = std::env::var("GAINSHARE_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1);
    let mut random = Random(seed);
    let dir = tempfile::tempdir().unwrap();
    let saving = dir.path().join(".saving");
    let mut runs: Vec<(u64, Vec<String>)> = Vec::new();
    let (mut committed, mut lost, mut killed_in_save, mut lost_sum) = (0, 0..=0, 0, 0);
    // What an earlier kill has left stays until the next save.
    let mut left = None;
    while runs.len() < KILLS || killed_in_save == 0 {
        assert!(runs.len() < MOST_KILLS, "seed {seed}: no kill hit a save");
        let mut child = with_checkpoints(trainer("gru", UNBOUNDED), dir.path(), EVERY).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut text = String::new();
        // The header and some reports.
        for _ in 0..2 + random.below(10) {
            stdout.read_line(&mut text).unwrap();
        }
        let began = Instant::now();
        let waits_for_save = random.below(2) == 0;
        let is_saving = || unfinished(&saving).is_some_and(|file| Some(file) != left);
        while waits_for_save && !is_saving() && began.elapsed() < Duration::from_secs(2) {
            std::hint::spin_loop();
        }
        std::thread::sleep(Duration::from_micros(random.below(5000)));
        send(&child, Signal::SIGKILL);
        std::io::Read::read_to_string(&mut stdout, &mut text).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), None, "seed {seed}: {}", stderr(&output));
        assert_resumed(&stderr(&output), committed, &lost);
        lost_sum += lost_steps(&stderr(&output));
        killed_in_save += usize::from(is_saving());
        left = unfinished(&saving);

        let whole_lines = &text[..text.rfind('\n').map_or(0, |end| end + 1)];
        let lines: Vec<String> = whole_lines.lines().skip(1).map(str::to_owned).collect();
        let last = committed + lines.len() as u64;
        runs.push((committed, lines));
        let newest = newest_step(dir.path());
        // A report follows the saves of all steps before it.
        let saved = (last.saturating_sub(1) / EVERY * EVERY).max(committed);
        assert!((saved..=last).contains(&newest), "seed {seed}: {newest}, saved {saved}, reported {last}");
        let kept = checkpoints(dir.path()).len() as u64;
        assert!(kept >= (newest / EVERY).min(2), "seed {seed}: {kept} checkpoints at step {newest}");
        // The run may have been killed between a step and its report.
        (committed, lost) = (newest, last - newest..=last + 1 - newest);
    }
    let steps = committed + 10;
    let finished = with_checkpoints(trainer("gru", steps), dir.path(), EVERY).output().unwrap();
    assert!(finished.status.success(), "seed {seed}: {}", stderr(&finished));
    assert_resumed(&stderr(&finished), committed, &lost);
    lost_sum += lost_steps(&stderr(&finished));
    runs.push((committed, reports(&finished)));
    let longest = runs.iter().map(|(from, lines)| from + lines.len() as u64).max().unwrap();
    let whole = reports(&trainer("gru", longest).output().unwrap());
    for (from, lines) in &runs {
        assert_eq!(lines, &whole[*from as usize..*from as usize + lines.len()], "seed {seed}: from step {from}");
    }
    let kills = runs.len() - 1;
    println!("fault: injected={kills} violations=0 lost_steps={lost_sum} killed_in_save={killed_in_save} seed={seed}");
}

#[test]
fn sigint_ends_with_130_and_needs_no_checkpoint_directory() {
    let output = signalled_after(trainer("mlp", UNBOUNDED), 3, Signal::SIGINT);
    assert_eq!(output.status.code(), Some(130), "{}", stderr(&output));
}

/// The largest number of threads of a run with `--threads`, over many moments after its first report. The model has
/// its full size, so that products are worth several threads and take most of the time.
fn most_threads(threads: &str) -> usize {
    let mut command = Command::new(env!("CARGO_BIN_EXE_gainshare-train"));
    command.args(["mlp", "--steps", &UNBOUNDED.to_string(), "--report-every", "1", "--threads", threads]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    let count_threads = || fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().count();
    let mut most = count_threads();
    for _ in 0..200 {
        std::thread::sleep(std::time::Duration::from_millis(5));
        most = most.max(count_threads());
    }
    send(&child, Signal::SIGTERM);
    std::io::copy(&mut stdout, &mut std::io::sink()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    most
}

#[test]
fn one_thread_means_one_thread() {
    assert_eq!(most_threads("1"), 1);
    // There may be more than two tasks at a moment, because a joined thread can still be about to exit.
    assert!(most_threads("2") > 1, "no product was divided, so the test of one thread shows nothing");
}

#[test]
fn a_closed_output_does_not_end_the_run() {
    let mut child = trainer("mlp", 60).spawn().unwrap();
    drop(child.stdout.take());
    drop(child.stderr.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_full_disk_costs_checkpoints_but_not_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = with_checkpoints(trainer("gru", 400), dir.path(), 100).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    lines.next().unwrap().unwrap();
    // The next save goes to a device that is always full. The run removes the link after the failed save.
    std::os::unix::fs::symlink("/dev/full", dir.path().join(".saving")).unwrap();
    lines.for_each(drop);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
    let message = stderr(&output).lines().find(|line| line.contains("no checkpoint at step")).map(str::to_owned);
    let message = message.unwrap_or_else(|| panic!("no message about the failed save in: {}", stderr(&output)));
    assert!(message.contains(dir.path().to_str().unwrap()) && message.contains("free some space"), "{message}");
    assert!(checkpoints(dir.path()).pop().unwrap().ends_with("attempt-0.step-400.safetensors"));
}

/// Mounted for one test, gone afterwards.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn new(bytes: u64) -> Tmpfs {
        use nix::mount::{MsFlags, mount};
        let dir = tempfile::tempdir().unwrap();
        let options = format!("size={bytes}");
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

/// A file system that becomes full while a run saves to it: the run goes on, the previous checkpoint is kept, and a
/// later run continues from it and reports what was lost.
#[test]
#[ignore = "needs root: it mounts a tmpfs"]
fn a_full_file_system_keeps_the_previous_checkpoint() {
    const PAGE: u64 = 4096;
    const EVERY: u64 = 20;
    let probe = tempfile::tempdir().unwrap();
    assert!(with_checkpoints(trainer("gru", 2), probe.path(), 0).status().unwrap().success());
    let pages = fs::metadata(&checkpoints(probe.path())[0]).unwrap().len().div_ceil(PAGE);
    let disk = Tmpfs::new((3 * pages + 8) * PAGE);
    let (dir, filler) = (disk.0.path().join("checkpoints"), disk.0.path().join("filler"));
    let fill = || {
        let mut file = fs::File::options().create(true).append(true).open(&filler).unwrap();
        while file.write_all(&[0; PAGE as usize]).is_ok() {}
    };
    let mut child = with_checkpoints(trainer("gru", UNBOUNDED), &dir, EVERY).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut text = String::new();
    // The header and the reports until the second checkpoint is complete.
    for _ in 0..2 + 2 * EVERY {
        stdout.read_line(&mut text).unwrap();
    }
    // A save that was under way may still leave some room, which is taken, too.
    for _ in 0..4 * EVERY {
        fill();
        stdout.read_line(&mut text).unwrap();
    }
    send(&child, Signal::SIGKILL);
    std::io::Read::read_to_string(&mut stdout, &mut text).unwrap();
    let killed = child.wait_with_output().unwrap();
    let failures = stderr(&killed).lines().filter(|line| line.contains("no checkpoint at step")).count();
    assert!(failures > 0 && stderr(&killed).contains("free some space"), "{}", stderr(&killed));
    let last = text[..text.rfind('\n').unwrap()].lines().skip(1).count() as u64;
    let kept = newest_step(&dir);
    assert!((2 * EVERY..last).contains(&kept), "{kept} of {last} steps: {}", stderr(&killed));

    fill();
    let refused = with_checkpoints(trainer("gru", last), &dir, EVERY).output().unwrap();
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("free some space"), "{}", stderr(&refused));
    assert_eq!(newest_step(&dir), kept);

    fs::remove_file(&filler).unwrap();
    let resumed = with_checkpoints(trainer("gru", last + 10), &dir, EVERY).output().unwrap();
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    assert_resumed(&stderr(&resumed), kept, &(last - kept..=last + 1 - kept));
    let whole = reports(&trainer("gru", last + 10).output().unwrap());
    assert_eq!(reports(&resumed), whole[kept as usize..]);
    println!("fault: injected={failures} violations=0 lost_steps={}", lost_steps(&stderr(&resumed)));
}

#[test]
fn a_last_save_that_fails_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = with_checkpoints(trainer("gru", UNBOUNDED), dir.path(), 0).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    std::os::unix::fs::symlink("/dev/full", dir.path().join(".saving")).unwrap();
    send(&child, Signal::SIGTERM);
    std::io::copy(&mut stdout, &mut std::io::sink()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("is lost"), "{}", stderr(&output));
}

#[test]
fn an_older_attempt_can_neither_save_nor_start() {
    let dir = tempfile::tempdir().unwrap();
    let attempt = |number: &str, steps| {
        let mut command = with_checkpoints(trainer("gru", steps), dir.path(), 10);
        command.env("GAINSHARE_ATTEMPT", number);
        command
    };
    let mut old = attempt("1", UNBOUNDED).spawn().unwrap();
    let mut stdout = BufReader::new(old.stdout.take().unwrap());
    stdout.read_line(&mut String::new()).unwrap();
    let drain = std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()));
    let new = attempt("2", 1).output().unwrap();
    assert!(new.status.success(), "{}", stderr(&new));
    // The old run detects the new one at its next save.
    let old = old.wait_with_output().unwrap();
    drain.join().unwrap().unwrap();
    assert_eq!(old.status.code(), Some(1));
    assert!(stderr(&old).contains("attempt 2 owns it"), "{}", stderr(&old));
    let late = attempt("1", 5).output().unwrap();
    assert_eq!(late.status.code(), Some(1));
    assert!(late.stdout.is_empty() && stderr(&late).contains("attempt 1 may not write"), "{}", stderr(&late));
}

#[test]
fn reaching_the_loss_ends_the_run_and_the_next_one_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let metrics = dir.path().join("metrics.csv");
    let run = || {
        let mut command = with_checkpoints(trainer("vae", 100_000), &dir.path().join("checkpoints"), 1000);
        command.args(["--until-loss", "400", "--metrics-file"]).arg(&metrics);
        command.output().unwrap()
    };
    let first = run();
    assert!(first.status.success(), "{}", stderr(&first));
    let losses: Vec<f32> =
        reports(&first).iter().map(|line| line.split(',').nth(2).unwrap().parse().unwrap()).collect();
    let (last, before) = losses.split_last().unwrap();
    assert!(*last <= 400.0 && before.iter().all(|&loss| loss > 400.0));
    assert_eq!(fs::read(&metrics).unwrap(), first.stdout, "the metrics file has what was printed");
    let again = run();
    assert!(again.status.success() && reports(&again).is_empty(), "{}", stderr(&again));
    assert!(stderr(&again).contains("nothing left to do"), "{}", stderr(&again));
}

#[test]
fn bad_input_is_named_with_its_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let file = file.to_str().unwrap();
    let saved = dir.path().join("saved");
    assert!(with_checkpoints(trainer("gru", 2), &saved, 0).status().unwrap().success());
    let saved = saved.to_str().unwrap();
    for (arguments, code, expected) in [
        (&["transformer"][..], 2, "birnn"),
        (&["vae", "--steps", "0"], 2, "--steps"),
        (&["vae", "--steps", "5", "--epochs", "5"], 2, "--epochs"),
        (&["vae", "--lr", "-1"], 2, "above zero"),
        (&["vae", "--lr", "nan"], 2, "above zero"),
        (&["vae", "--until-loss", "-3"], 2, "above zero"),
        (&["vae", "--hidden", "99999999"], 2, "--hidden"),
        (&["vae", "--checkpoint", file], 1, "that is a directory"),
        (&["vae", "--checkpoint", dir.path().to_str().unwrap(), "--resume"], 1, "no whole checkpoint"),
        (&["gru", "--batch", "5", "--hidden", "8", "--checkpoint", saved], 1, "batch 4"),
        (&["vae", "--metrics-file", "/nowhere/metrics.csv"], 1, "/nowhere/metrics.csv"),
        (&["mlp", "--hidden", "8", "--lr", "1e30"], 1, "--lr"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_gainshare-train")).args(arguments).output().unwrap();
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {message}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
        let one_line = message.trim_end().lines().count() == 1;
        assert!(one_line || code == 2, "{arguments:?}: {message}");
    }
}
