//! What users get wrong: each mistake is one line that names the thing and the remedy, the exit code says
//! so, and nothing is lost.

use crate::common::{self, Home, Outcome, wait};
use nix::sys::signal::Signal;
use std::os::unix::fs::PermissionsExt;

#[test]
fn an_unknown_field_in_a_job_file() {
    let home = Home::new();
    std::fs::write(home.path().join("good.toml"), "name = 'good'\ncommand = ['true']\n").unwrap();
    std::fs::write(home.path().join("bad.toml"), "name = 'bad'\ncommand = ['true']\nprioritee = 3\n").unwrap();
    let outcome = home.run(&["submit", "good.toml", "bad.toml"]);
    outcome.fails_with(1, &["bad.toml", "line 3", "prioritee"]);
    assert!(home.job("good").is_none(), "all or nothing: the good file of the same call is not submitted");

    std::fs::write(home.path().join("bad.yaml"), "name: bad\ncommand: ['true']\nprioritee: 3\n").unwrap();
    home.run(&["submit", "bad.yaml"]).fails_with(1, &["bad.yaml", "prioritee"]);
    home.run(&["submit", "none.toml"]).fails_with(1, &["none.toml"]);
}

#[test]
fn a_pattern_that_does_not_compile() {
    let home = Home::new();
    home.run(&["run", "--pattern", "loss=(?P<value>", "--", "true"]).fails_with(1, &["pattern", "(?P<value>"]);
    home.run(&["run", "--pattern", "loss=(.*)", "--", "true"]).fails_with(1, &["pattern", "value"]);
    std::fs::write(home.path().join("job.toml"), "command = ['true']\nmetric = { pattern = '[' }\n").unwrap();
    home.run(&["submit", "job.toml"]).fails_with(1, &["job.toml", "pattern"]);
}

#[test]
fn a_missing_program() {
    let home = Home::new();
    home.run(&["run", "--", "nosuch-program"])
        .fails_with(127, &["cannot start `nosuch-program`: not found in PATH; check the spelling or give a full path"]);
    home.run(&["run", "--", "./nosuch"]).fails_with(127, &["`./nosuch`", "no such file"]);
    let script = home.path().join("script");
    std::fs::write(&script, "#!/no/such/interpreter\n").unwrap();
    home.run(&["run", "--", "./script"]).fails_with(126, &["`./script`", "not executable", "chmod +x"]);
    home.run(&["run", "--detach", "--", "./script"]).fails_with(126, &["`./script`", "not executable"]);
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    home.run(&["run", "--", "./script"]).fails_with(127, &["`./script`", "interpreter"]);
    assert_eq!(home.run(&["run", "--"]).code, 2, "no command at all is wrong usage");
}

#[test]
fn a_missing_program_in_a_job_file() {
    let home = Home::new();
    std::fs::write(home.path().join("job.toml"), "name = 'typo'\ncommand = ['nosuch-program']\n").unwrap();
    home.run(&["submit", "job.toml"]).fails_with(1, &["typo", "nosuch-program"]);
    std::fs::write(home.path().join("job.toml"), "command = ['/tmp']\n").unwrap();
    home.run(&["submit", "job.toml"]).fails_with(1, &["`/tmp` is a directory"]);
    std::fs::write(home.path().join("job.toml"), "command = ['true']\ncwd = 'job.toml'\n").unwrap();
    home.run(&["submit", "job.toml"]).fails_with(1, &["is not a directory"]);
    assert!(home.job("typo").is_none());
    std::fs::write(home.path().join("script"), "#!/no/such/interpreter\n").unwrap();
    std::fs::set_permissions(home.path().join("script"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::write(home.path().join("job.toml"), "name = 'broken'\ncommand = ['./script']\n").unwrap();
    home.ok(&["submit", "job.toml"]);
    let job = home.wait_for_state("broken", "failed");
    assert_eq!(job["exit_code"], 127);
    assert!(home.ok(&["explain", "broken"]).contains("interpreter"), "the reason is kept");
}

#[test]
fn a_second_job_of_the_same_name() {
    let home = Home::new();
    home.ok(&["run", "--detach", "--name", "twin", "--", "sleep", "60"]);
    home.wait_for_state("twin", "running");
    for words in [&["run", "--name", "twin", "--", "true"][..], &["run", "-d", "--name", "twin", "--", "true"]] {
        home.run(words).fails_with(1, &["twin", "--name"]);
    }
    assert_eq!(home.job("twin").unwrap()["state"], "running", "the first one goes on");
    home.ok(&["stop", "twin"]);
    home.ok(&["run", "--name", "twin", "--", "true"]);
}

#[test]
fn a_daemon_that_is_already_running() {
    let home = Home::new();
    home.ok(&["up", "--detach"]);
    let pid = home.daemon_pid().to_string();
    home.run(&["up"]).fails_with(1, &["already running", &pid, "gainshare down"]);
    home.run(&["up", "--detach"]).fails_with(1, &["already running", &pid, "gainshare down"]);
    home.ok(&["down"]);
    assert_eq!(home.ok(&["down"]), "no daemon is running\n");
}

#[test]
fn a_daemon_that_cannot_start_says_why() {
    let home = Home::new();
    home.run(&["up", "--detach", "--slots", "0"]).fails_with(1, &["slots"]);
    home.run(&["up", "--detach", "--policy", "na", "--aim", "quality"]).fails_with(1, &["--aim", "gainshare", "na"]);
    std::fs::create_dir_all(home.path().join("config/gainshare")).unwrap();
    std::fs::write(home.path().join("config/gainshare/config.toml"), "slotz = 3\n").unwrap();
    home.run(&["up", "--detach"]).fails_with(1, &["config.toml", "slotz"]);
    let outcome = home.run(&["run", "--", "echo", "trains anyway"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "trains anyway\n"));
    assert!(outcome.stderr.contains("warning") && outcome.stderr.contains("slotz"), "{}", outcome.stderr);
    home.run(&["run", "--require-daemon", "--", "true"]).fails_with(1, &["slotz"]);
}

#[test]
#[ignore = "needs root to mount a small disk"]
fn a_full_disk() {
    let disk = SmallDisk::mount(4 << 20);
    let home = Home::with_state(disk.dir.path().join("state"));
    std::fs::write(home.path().join("job.toml"), "name = 'late'\ncommand = ['true']\n").unwrap();
    home.ok(&["run", "--name", "early", "--", "echo", "fits"]);
    let mut running = home.command(&["run", "--name", "running", "--", "sh", "-c", "echo a; read line; echo b"]);
    running.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut running = running.stderr(std::process::Stdio::piped()).spawn().unwrap();
    home.wait_for_state("running", "running");

    disk.fill();
    home.run(&["submit", "job.toml"]).fails_with(1, &["No space", "free some space"]);
    home.run(&["run", "--require-daemon", "--", "true"]).fails_with(1, &["full", "space"]);
    let outcome = home.run(&["run", "--", "echo", "trains anyway"]);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "trains anyway\n"), "{}", outcome.stderr);
    drop(running.stdin.take());
    let outcome = wait(running);
    assert_eq!((outcome.code, outcome.stdout.as_str()), (0, "a\nb\n"), "a job that runs does not notice");

    disk.make_room();
    assert!(common::eventually(|| home.run(&["submit", "job.toml"]).code == 0), "work is taken again");
    home.wait_for_state("late", "done");
    assert_eq!(home.job("early").unwrap()["state"], "done");
    assert!(home.job("running").is_some());
}

/// A tmpfs of its own, unmounted at the end.
struct SmallDisk {
    dir: tempfile::TempDir,
}

impl SmallDisk {
    fn mount(bytes: usize) -> SmallDisk {
        let dir = tempfile::Builder::new().prefix("gsdisk").tempdir().unwrap();
        let options = format!("size={bytes},mode=700");
        nix::mount::mount(
            Some("tmpfs"),
            dir.path(),
            Some("tmpfs"),
            nix::mount::MsFlags::empty(),
            Some(options.as_str()),
        )
        .expect("root can mount a tmpfs");
        SmallDisk { dir }
    }

    fn fill(&self) {
        use std::io::Write;
        let mut file = std::fs::File::create(self.dir.path().join("filler")).unwrap();
        for size in [64 << 10, 4096, 1] {
            while file.write_all(&vec![b'x'; size]).is_ok() {}
        }
    }

    fn make_room(&self) {
        std::fs::remove_file(self.dir.path().join("filler")).unwrap();
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // The guard and the last supervisors may take a moment to let go.
        let _ = nix::mount::umount2(self.dir.path(), nix::mount::MntFlags::MNT_DETACH);
    }
}

#[test]
fn words_that_mean_nothing() {
    let home = Home::new();
    for (words, part) in [
        (&["ps", "--nonsense"][..], "--nonsense"),
        (&["stop", "--grace", "soon", "x"], "soon"),
        (&["up", "--policy", "magic"], "magic"),
        (&["up", "--aim", "fast"], "fast"),
        (&["up", "--listen", "0.0.0.0:80"], "refusing to listen"),
        (&["run", "--runtime", "docker", "--", "true"], "--image"),
    ] {
        let outcome = home.run(words);
        assert_eq!(outcome.code, 2, "{words:?}: {outcome:?}");
        assert!(outcome.stderr.contains(part), "{words:?}: {}", outcome.stderr);
        let outcome = home.run(&[words, &["-o", "json"]].concat());
        if !words.contains(&"--") {
            let error: serde_json::Value = serde_json::from_str(&outcome.stderr).unwrap();
            assert!(outcome.code == 2 && error["error"].as_str().unwrap().contains(part), "{error}");
        }
    }
    home.run(&["logs", "absent"]).fails_with(1, &["absent"]);
    home.run(&["stop", "absent"]).fails_with(1, &["absent"]);
    home.run(&["run", "--floor", "0.8", "--max", "0.2", "--", "true"]).fails_with(1, &["floor", "max"]);
    home.run(&["run", "--name", "../x", "--", "true"]).fails_with(1, &["../x"]);
    home.run(&["run", "--image", "x", "--", "true"]).fails_with(1, &["--image", "--runtime docker"]);
    home.run(&["run", "--metrics-file", "/etc/passwd", "--", "true"]).fails_with(1, &["/etc/passwd", "folder"]);
    home.run(&["paper", "nosuch"]).fails_with(1, &["nosuch", "table-6.2", "qos", "operator", "elasticflow-8a"]);
    home.run(&["paper", "table-6.2", "--cluster", "3"]).fails_with(1, &["--cluster"]);
    home.run(&["paper", "elasticflow-8a", "--cluster", "3"]).fails_with(1, &["elasticflow-8a", "--cluster"]);
    home.run(&["paper", "qos", "--figure", "x.svg"]).fails_with(1, &["qos", "--figure"]);
    home.run(&["paper", "operator", "--first-seed", "9"]).fails_with(1, &["operator", "--first-seed"]);
    home.ok(&["run", "--", "true"]);
    for words in [&["logs", "absent"], &["explain", "absent"], &["stop", "absent"], &["explain", "../x"]] {
        home.run(words).fails_with(1, &[words[1]]);
    }
    let outcome = home.run(&["explain", "absent", "-o", "json"]);
    let error: serde_json::Value = serde_json::from_str(&outcome.stderr).unwrap();
    assert_eq!((outcome.code, &error["code"]), (1, &"not-found".into()), "{error}");
    assert!(error["error"].as_str().unwrap().contains("absent"));
}

#[test]
fn a_stopped_daemon_and_a_missing_one_have_different_messages() {
    let home = Home::new();
    home.ok(&["up", "--detach"]);
    let pid = home.daemon_pid();
    common::signal(pid, Signal::SIGSTOP);
    let doctor = home.run(&["doctor"]);
    common::signal(pid, Signal::SIGCONT);
    assert_eq!(doctor.code, 1, "{}", doctor.stdout);
    assert!(doctor.stdout.contains("does not answer"), "{}", doctor.stdout);
    assert!(common::eventually(|| home.run(&["doctor"]).code == 0));
}

#[test]
fn doctor_names_a_damaged_journal_and_leaves_it_as_it_is() {
    let home = Home::new();
    home.ok(&["run", "--", "true"]);
    home.ok(&["down"]);
    assert!(home.ok(&["doctor"]).contains("journal.db can be read"));
    let path = home.state().join("journal.db");
    std::fs::write(&path, [7_u8; 10_000]).unwrap();
    let doctor = home.run(&["doctor"]);
    assert_eq!(doctor.code, 1, "{}", doctor.stdout);
    assert!(doctor.stdout.contains("is damaged") && doctor.stdout.contains("move it away"), "{}", doctor.stdout);
    assert!(!doctor.stdout.contains("start it"), "{}", doctor.stdout);
    assert_eq!(std::fs::read(&path).unwrap(), [7_u8; 10_000]);
    assert!(!home.runtime().join("api.sock").exists(), "no daemon was started");
}

#[test]
fn a_policy_that_starves_jobs() {
    let home = Home::new();
    let outcome = home.run(&["up", "--policy", "srpt"]);
    assert_eq!(outcome.code, 2, "{}", outcome.stderr);
    assert!(outcome.stderr.contains("starves jobs") && outcome.stderr.contains("gainshare sim"), "{}", outcome.stderr);
    let help = home.ok(&["up", "--help"]);
    assert!(help.contains("gainshare") && !help.contains("srpt"), "{help}");
    std::fs::write(home.path().join("starves.toml"), "policy = 'fifo'\n").unwrap();
    home.run(&["up", "--config", "starves.toml"]).fails_with(1, &["fifo", "starves jobs"]);
}

#[test]
fn a_deadline_that_names_no_moment() {
    let home = Home::new();
    for (text, words) in [
        ("2020-01-01 12:00", &["in the past", "2020-01-01"][..]),
        ("18", &["18:00", "18s"]),
        ("tomorrow", &["no time", "tomorrow 9:00"]),
        ("whenever", &["`whenever`", "2h"]),
    ] {
        home.run(&["run", "--deadline", text, "--", "true"]).fails_with(1, words);
    }
    // A zone that nobody knows is a typing error, and no name for UTC.
    let outcome =
        home.command(&["run", "--deadline", "18:00", "--", "true"]).env("TZ", "Europe/Belin").output().unwrap();
    Outcome::from(outcome).fails_with(1, &["18:00", "time zone", "TZ"]);
    let outcome = home.command(&["run", "--deadline", "2h", "--", "true"]).env("TZ", "Europe/Belin").output().unwrap();
    assert!(outcome.status.success(), "a length of time needs no zone: {outcome:?}");
    let tolerance = ["run", "--deadline-tolerance", "10m", "--", "true"];
    home.run(&tolerance).fails_with(1, &["deadline_tolerance without a deadline"]);
    home.run(&["run", "--target", "loss", "--", "true"]).fails_with(1, &["`loss`", "loss=0.05"]);
    home.run(&["run", "--target", "loss=1", "--metric", "accuracy", "--", "true"]).fails_with(1, &["accuracy"]);
    std::fs::write(home.path().join("job.toml"), "command = ['true']\ndeadline = 'never'\n").unwrap();
    home.run(&["submit", "job.toml"]).fails_with(1, &["`never`"]);
}
