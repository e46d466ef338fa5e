//! Job files and what is done with jobs from outside, in tables and in JSON.

use crate::common::{self, Home, Outcome, eventually};
use std::process::Stdio;

#[test]
fn a_sweep_makes_one_job_for_each_combination() {
    let home = Home::new();
    let file = "name = 'mlp-{lr}-{seed}'\ncommand = ['sh', '-c', 'echo lr={lr} $SEED $MINE']\nenv = { SEED = '{seed}' }\n\
                [sweep]\nlr = [0.1, 0.01]\nseed = [1, 2]\n";
    std::fs::write(home.path().join("sweep.toml"), file).unwrap();
    let shown = home.ok(&["submit", "sweep.toml", "--dry-run"]);
    assert_eq!(shown.lines().count(), 5, "{shown}");
    assert_eq!(home.json(&["ps", "-a"])["jobs"].as_array().unwrap().len(), 0, "a dry run submits nothing");

    let outcome = home.command(&["submit", "sweep.toml"]).env("MINE", "kept").output().unwrap();
    assert_eq!(Outcome::from(outcome).code, 0);
    for (lr, seed) in [("0.1", 1), ("0.1", 2), ("0.01", 1), ("0.01", 2)] {
        let name = format!("mlp-{lr}-{seed}");
        home.wait_for_state(&name, "done");
        assert_eq!(home.ok(&["logs", &name]), format!("lr={lr} {seed} kept\n"));
    }
}

#[test]
fn yaml_lists_dependencies_and_all_or_nothing() {
    let home = Home::new();
    let good = "- name: one\n  command: [sh, -c, 'sleep 0.3; echo one']\n- name: two\n  command: [sh, -c, 'echo two']\n  after: [one]\n";
    std::fs::write(home.path().join("jobs.yaml"), good).unwrap();
    home.ok(&["submit", "jobs.yaml"]);
    home.wait_for_state("two", "done");
    let (one, two) = (home.job("one").unwrap(), home.job("two").unwrap());
    assert!(two["started_s"].as_f64() >= one["ended_s"].as_f64(), "{one} {two}");

    std::fs::write(home.path().join("bad.yaml"), "- name: three\n  command: ['true']\n- name: four\n").unwrap();
    home.run(&["submit", "bad.yaml"]).fails_with(1, &["bad.yaml", "four", "command"]);
    assert!(home.job("three").is_none());
}

#[test]
fn a_total_is_believed_by_how_earlier_ones_of_its_kind_fared() {
    let home = Home::new();
    // It announces a hundred steps and ends after one.
    let busy = "end=$(($(date +%s) + 3)); while [ $(date +%s) -lt $end ]; do :; done";
    let early = format!("name = 'early'\ncommand = ['sh', '-c', 'echo step 1/100 loss=0.5; {busy}']\n");
    std::fs::write(home.path().join("early.toml"), early).unwrap();
    home.ok(&["submit", "early.toml"]);
    home.wait_for_state("early", "done");
    let other = "name = 'other'\ncommand = ['sh', '-c', 'echo step 1/50 loss=0.5; sleep 60', 'other']\n";
    std::fs::write(home.path().join("other.toml"), other).unwrap();
    home.ok(&["submit", "other.toml"]);
    home.wait_for_state("other", "running");
    let metric = || home.json(&["explain", "other"])["metric"].clone();
    assert!(eventually(|| metric().is_object()), "its line is not read");
    let metric = metric();
    assert_eq!((&metric["total"], &metric["total_from"]), (&50.into(), &"its output".into()), "{metric}");
    assert_eq!(metric["total_trust"], 0.5, "one claim of one was broken: {metric}");
    let text = home.ok(&["explain", "other"]);
    assert!(text.contains("of 50 (by its output, believed to 50"), "{text}");
}

#[test]
fn explain_names_the_aim() {
    let home = Home::new();
    home.ok(&["up", "--detach", "--aim", "quality"]);
    std::fs::write(home.path().join("job.toml"), "name = 'curve'\ncommand = ['sleep', '60']\n").unwrap();
    home.ok(&["submit", "job.toml"]);
    home.wait_for_state("curve", "running");
    assert_eq!(home.json(&["explain", "curve"])["aim"], "quality");
    let text = home.ok(&["explain", "curve"]);
    assert!(text.contains("under gainshare, aim quality"), "{text}");
}

#[test]
fn json_has_the_wires_names_and_hides_the_environment() {
    let home = Home::new();
    let file = "name = 'secretive'\ncommand = ['sleep', '60']\nenv = { TOKEN = 'canary-3141' }\n";
    std::fs::write(home.path().join("job.toml"), file).unwrap();
    let mut all = home.ok(&["submit", "job.toml", "--dry-run", "-o", "json"]);
    all += &home.ok(&["submit", "job.toml", "-o", "json"]);
    home.wait_for_state("secretive", "running");
    let job = home.job("secretive").unwrap();
    for field in ["id", "name", "state", "attempt", "command", "submitted_at", "share", "category", "metric", "eta_s"] {
        assert!(job.get(field).is_some(), "{field}: {job}");
    }
    let explained = home.json(&["explain", "secretive"]);
    for field in ["job", "policy", "in_force", "growth", "neighbours", "start_env", "decisions"] {
        assert!(explained.get(field).is_some(), "{field}");
    }
    all += &explained.to_string();
    all += &job.to_string();
    all += &home.ok(&["ps"]);
    all += &home.ok(&["explain", "secretive"]);
    all += &std::fs::read_to_string(home.state().join("daemon.log")).unwrap();
    assert!(!all.contains("canary-3141"), "values of the environment are never shown");
    assert!(all.contains("TOKEN"), "their names are");
    let stopped = home.json(&["stop", "secretive"]);
    assert_eq!(stopped["jobs"][0]["state"], "stopped");
}

#[test]
fn a_closed_pipe_is_no_disaster() {
    let home = Home::new();
    home.ok(&["run", "--", "true"]);
    for words in [&["ps", "-a"][..], &["ps", "-a", "-o", "json"], &["doctor"], &["logs", "true-1"], &["reference"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = home.command(words).stdout(Stdio::from(writer)).stderr(Stdio::piped()).output().unwrap();
        let outcome = Outcome::from(output);
        assert_eq!(outcome.stderr, "", "{words:?}");
        assert!([0, 141].contains(&outcome.code), "{words:?}: {}", outcome.code);
    }
}

#[test]
fn watching_and_events_show_what_happens() {
    let home = Home::new();
    home.ok(&["up", "--detach"]);
    let mut events = home.spawn(&["events", "-o", "json"]);
    let mut watch = home.spawn(&["ps", "--watch"]);
    let mut reader = std::io::BufReader::new(events.stdout.take().unwrap());
    // The stream begins when it begins: jobs are run until one's events are seen.
    let (sender, seen) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        while std::io::BufRead::read_line(&mut reader, &mut line).is_ok_and(|n| n > 0) {
            let event: serde_json::Value = serde_json::from_str(&line).expect("one event for each line");
            if event["event"] == "job" && event["job"]["state"] == "done" {
                let _ = sender.send(());
            }
            line.clear();
        }
    });
    assert!(eventually(|| {
        home.ok(&["run", "--", "true"]);
        seen.try_recv().is_ok()
    }));
    home.ok(&["run", "--detach", "--name", "watched", "--", "sleep", "60"]);
    common::read_until(watch.stdout.as_mut().unwrap(), "watched");
    watch.kill().unwrap();
    events.kill().unwrap();
    watch.wait().unwrap();
    events.wait().unwrap();
}

#[test]
fn commands_that_only_look_start_no_daemon_where_none_has_run() {
    let home = Home::new();
    assert!(home.ok(&["ps"]).contains("no jobs"));
    home.run(&["events"]).fails_with(1, &["nothing was ever run", "up --detach"]);
    let file = home.path().join("night.toml");
    std::fs::write(&file, "name = \"night\"\ncommand = [\"true\"]\n").unwrap();
    let plan = home.ok(&["plan", "night.toml", "--deadline", "2h"]);
    assert!(plan.contains("night: not known: no run of this program"), "{plan}");
    for words in [&["logs", "a"], &["explain", "a"], &["stop", "a"]] {
        home.run(words).fails_with(1, &["nothing was ever run"]);
    }
    assert!(!home.runtime().join("lock").exists() && !home.state().join("journal.db").exists());
}

#[test]
fn jobs_are_listed_after_their_journal_was_moved_away() {
    let home = Home::new();
    home.ok(&["run", "--name", "kept", "--", "true"]);
    home.ok(&["down"]);
    std::fs::rename(home.state().join("journal.db"), home.path().join("moved.db")).unwrap();
    let all = home.ok(&["ps", "--all"]);
    assert!(all.contains("kept") && all.contains("done"), "{all}");
}

#[test]
fn doctor_completions_and_man_pages() {
    let home = Home::new();
    let report = home.json(&["doctor"]);
    assert_eq!(report["healthy"], true, "{report}");
    let checks = report["checks"].as_array().unwrap();
    assert!(checks.len() > 5);
    assert!(checks.iter().any(|check| check["what"] == "library inside jobs"), "on every machine: {report}");
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(home.ok(&["completions", shell]).contains("explain"), "{shell}");
    }
    home.ok(&["man", "pages"]);
    let page = std::fs::read_to_string(home.path().join("pages/gainshare-run.1")).unwrap();
    assert!(page.contains("metrics"), "{page}");
    assert!(home.ok(&["--version"]).starts_with("gainshare "));
    assert!(home.ok(&["help"]).contains("Exit codes"));
}

#[test]
#[ignore = "needs the right to make control groups (root)"]
fn a_job_that_outlives_its_daemon_leaves_no_group_behind() {
    let home = Home::new();
    let stop = home.path().join("stop");
    let script = format!("while [ ! -e {} ]; do sleep 0.05; done", stop.display());
    std::fs::write(home.path().join("job.toml"), format!("name = 'long'\ncommand = ['sh', '-c', '{script}']\n"))
        .unwrap();
    home.ok(&["submit", home.path().join("job.toml").to_str().unwrap()]);
    let pid = home.wait_for_state("long", "running")["pid"].as_i64().unwrap();
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let group = groups.lines().find_map(|line| {
        let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
        let mounted =
            if controllers.is_empty() { String::new() } else { format!("/{}", controllers.split(',').next()?) };
        path.contains("/gainshare-").then(|| std::path::PathBuf::from(format!("/sys/fs/cgroup{mounted}{path}")))
    });
    let group = group.unwrap_or_else(|| panic!("the job has no group of ours: {groups}"));
    assert!(group.is_dir(), "{}", group.display());
    home.ok(&["down"]);
    std::fs::write(&stop, "").unwrap();
    assert!(eventually(|| !group.exists() && !group.parent().unwrap().exists()), "{} is left", group.display());
}
