//! Job files: one or many, TOML, YAML and JSON, sweeps, and mistakes that are reported in one line.

use gainshare_core::fixtures::damaged;
use gainshare_daemon::api::types::SubmitRequest;
use gainshare_daemon::spec::{Format, JobSpec, SpecError, load, parse, parse_mount, prepare};
use proptest::prelude::*;
use std::path::Path;

fn toml(text: &str) -> Result<Vec<JobSpec>, SpecError> {
    parse(text, Format::Toml, "jobs.toml", Path::new("/base"))
}

fn yaml(text: &str) -> Result<Vec<JobSpec>, SpecError> {
    parse(text, Format::Yaml, "jobs.yaml", Path::new("/base"))
}

#[test]
fn the_same_jobs_in_every_form() {
    let one =
        toml("name = \"a\"\ncommand = [\"x\", \"1\"]\ncwd = \"sub\"\n[env]\nK = \"v\"\n[metric]\nname = \"loss\"")
            .unwrap();
    assert_eq!(one[0].cwd.as_deref(), Some(Path::new("/base/sub")));
    let same = [
        "name: a\ncommand: [x, '1']\ncwd: sub\nenv: {K: v}\nmetric: {name: loss}\n",
        "- name: a\n  command: [x, '1']\n  cwd: sub\n  env: {K: v}\n  metric: {name: loss}\n",
        "job:\n- {name: a, command: [x, '1'], cwd: sub, env: {K: v}, metric: {name: loss}}\n",
        r#"{"name": "a", "command": ["x", "1"], "cwd": "sub", "env": {"K": "v"}, "metric": {"name": "loss"}}"#,
    ];
    for text in same {
        assert_eq!(yaml(text).unwrap(), one, "{text}");
    }
    let two =
        toml("[[job]]\nname = \"a\"\ncommand = [\"x\"]\n[[job]]\nname = \"b\"\ncommand = [\"y\"]\nafter = [\"a\"]")
            .unwrap();
    let documents = "name: a\ncommand: [x]\n---\nname: b\ncommand: [y]\nafter: [a]\n";
    assert_eq!(yaml(documents).unwrap(), two);
    assert_eq!(two[0].max, 1.0);
}

#[test]
fn a_sweep_is_one_job_for_each_combination() {
    let text = "name = \"t\"\ncommand = [\"p\", \"--lr={lr}\", \"{seed}\", \"{other}\"]\n[env]\nLR = \"{lr}\"\n[sweep]\nlr = [0.1, 0.01]\nseed = [1, \"b\", true]";
    let jobs = toml(text).unwrap();
    let shown: Vec<String> =
        jobs.iter().map(|j| format!("{} {}", j.name.clone().unwrap(), j.command[1..].join(" "))).collect();
    assert_eq!(
        shown,
        [
            "t-1 --lr=0.1 1 {other}",
            "t-2 --lr=0.1 b {other}",
            "t-3 --lr=0.1 true {other}",
            "t-4 --lr=0.01 1 {other}",
            "t-5 --lr=0.01 b {other}",
            "t-6 --lr=0.01 true {other}",
        ]
    );
    assert_eq!(jobs[5].env["LR"], "0.01");
    let named = toml("name = \"lr{lr}\"\ncommand = [\"p\", \"{lr}\"]\n[sweep]\nlr = [0.5, \"a/b\"]").unwrap();
    assert_eq!([named[0].label(), named[1].label()], ["lr0.5", "lra-b"]);
}

#[test]
fn mistakes_are_reported_in_one_line_with_their_place() {
    for (text, about) in [
        ("", "describes no job"),
        ("name = \"a\"\ncomand = [\"x\"]", "line 2: unknown field `comand`"),
        ("command = \"x\"", "line 1: command must be a list, not \"x\""),
        ("command = [\"x\"]\npriority = \"high\"", "line 2: priority must be a whole number, not \"high\""),
        ("command = [\"x\"]\npriority = 10000000000", "priority must be a whole number from -2147483648 to 2147483647"),
        ("command = [\"x\"]\nfloor = \"much\"", "line 2: floor must be a number, not \"much\""),
        ("[[job]]\ncommand = [\"x\", 3]", "line 2: each value of command must be a text, not `3`"),
        ("command = [\"x\"]\n[env]\nSEED = 7", "line 3: env.SEED must be a text, not `7`"),
        ("command = [\"x\"]\ngpu = 1", "gpu must be true or false, not `1`"),
        ("command = [\"x\"]\nmetric = \"loss\"", "metric must be a table, not \"loss\""),
        ("command = [\"x\"]\nroles = { worker = \"two\" }", "roles.worker: write the number of its tasks"),
        ("command = [\"{a}\"]\nsweep = { a = [[1]] }", "sweep.a: each value must be a text, a number, true or false"),
        ("command = [\"x\"", "line 1"),
        ("command = []", "has no command"),
        ("name = \"-a\"\ncommand = [\"x\"]", "`-a` is not allowed"),
        ("name = \"17\"\ncommand = [\"x\"]", "not digits only"),
        (
            "command = [\"x\"]\nmetric = { source = \"file\", path = \"/elsewhere/m.csv\" }",
            "may leave the job's folder",
        ),
        ("command = [\"x\"]\nfloor = 2.0", "floor must lie between 0 and 1"),
        ("command = [\"x\"]\nfloor = 0.5\nmax = 0.2", "larger than max"),
        ("command = [\"x\"]\nmax = 0.0", "never ends"),
        ("command = [\"x\"]\nrestarts = 1", "restarts are for jobs with roles"),
        ("command = [\"x\"]\nrestarts = 2000\nroles = { worker = 2 }", "at most 1000"),
        ("command = [\"x\"]\ntime_limit = \"soon\"", "time_limit: `soon` is not a length of time"),
        ("command = [\"x\"]\ntime_limit = \"0s\"", "never begins"),
        ("command = [\"x\"]\nkeep_for = \"-1\"", "keep_for"),
        ("command = [\"x\"]\n[env]\n\"A B\" = \"1\"", "`A B` is not a name"),
        ("command = [\"x\"]\nruntime = \"docker\"", "names no image"),
        ("command = [\"x\"]\nruntime = \"podman\"", "line 2: runtime must be `process` or `docker`, not `podman`"),
        ("command = [\"x\"]\nmounts = [\"a:b\"]", "mount `a:b`"),
        ("command = [\"x\"]\n[metric]\npattern = \"(\"", "metric"),
        ("name = \"a\"\ncommand = [\"x\"]\nafter = [\"a\"]", "depends on itself"),
        ("command = [\"x\"]\n[sweep]\nlr = [1]", "sweep.lr is used nowhere"),
        ("command = [\"{lr}\"]\n[sweep]\nlr = []", "has no values"),
        (
            "command = [\"{a}{b}\"]\n[sweep]\na = [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32]\nb = [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31,32]",
            "more than 1000",
        ),
        ("[[job]]\nname = \"a\"\ncommand = [\"x\"]\n[[job]]\nname = \"a\"\ncommand = [\"x\"]", "two jobs are called a"),
    ] {
        let message = toml(text).unwrap_err().to_string();
        assert!(message.contains(about), "{text}: {message}");
        assert!(message.starts_with("jobs.toml") && !message.contains('\n'), "{message}");
    }
    for (text, about) in [
        ("command: [x]\nprio: 3", "line 2: unknown field `prio`"),
        ("command: {", "jobs.yaml"),
        ("a: &a [*a]", "jobs.yaml"),
        ("", "no job"),
        ("command: [x]\npriority: high", "line 2: priority must be a whole number"),
        ("- name: a\n  command: [x]\n  floor: much", "line 3: floor must be a number"),
        ("command: x", "line 1: command must be a list"),
        ("{\"command\": [\"x\"], \"gpu\": 3}", "gpu must be true or false"),
    ] {
        let message = yaml(text).unwrap_err().to_string();
        assert!(message.contains(about) && !message.contains('\n'), "{text}: {message}");
    }
    let bomb = "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\nd: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\ng: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]\nh: &h [*g,*g,*g,*g,*g,*g,*g,*g,*g]\n";
    assert!(yaml(bomb).is_err(), "a file of aliases does not take the machine");
    let missing = load(Path::new("/nonexistent/jobs.toml")).unwrap_err().to_string();
    assert!(missing.contains("/nonexistent/jobs.toml"), "{missing}");
}

#[test]
fn names_come_from_the_program() {
    let name = |words: &[&str]| JobSpec::new(words.iter().map(|w| w.to_string()).collect()).base_name();
    assert_eq!(name(&["python3", "/x/train_vae.py", "--lr"]), "train_vae");
    assert_eq!(name(&["python3", "-m", "pkg"]), "python3");
    assert_eq!(name(&["/usr/bin/my tool"]), "my-tool");
    assert_eq!(name(&["..."]), "job");
    assert_eq!(parse_mount("./d:/data:ro"), Some(("./d", "/data", true)));
    assert_eq!(parse_mount("/d:/data:rx"), None);
}

/// Valid job files.
const TOML_FILES: [&str; 3] = [
    "name = \"a\"\ncommand = [\"x\", \"1\"]\ncwd = \"sub\"\nfloor = 0.1\nmax = 0.5\n[env]\nK = \"v\"\n[metric]\nname = \"loss\"\n",
    "name = \"t\"\ncommand = [\"p\", \"--lr={lr}\", \"{seed}\"]\n[sweep]\nlr = [0.1, 0.01]\nseed = [1, \"b\", true]\n",
    "[[job]]\nname = \"a\"\ncommand = [\"x\"]\n[[job]]\nname = \"b\"\ncommand = [\"y\"]\nafter = [\"a\"]\n",
];
const YAML_FILES: [&str; 3] = [
    "name: a\ncommand: [x, '1']\ncwd: sub\nenv: {K: v}\nmetric: {name: loss}\n",
    "job:\n- {name: a, command: [x, '1'], env: {K: v}}\n- name: b\n  command: [y]\n  after: [a]\n",
    "- name: a\n  command: &c [x]\n- name: b\n  command: *c\n  floor: 0.2\n",
];

/// What clients send to submit jobs.
const SUBMISSIONS: [&str; 2] = [
    r#"{"jobs": [{"name": "a", "command": ["x", "1"], "cwd": "/tmp", "env": {"K": "v"}, "metric": {"name": "loss"}}]}"#,
    r#"{"jobs": [{"command": ["{lr}"], "floor": 0.2, "max": 0.5, "sweep": {"lr": [0.1, "b"]}}], "base_env": {"A": "b"}}"#,
];

/// Pieces of job files that lead deep into the parsers.
const PIECES: [&str; 10] =
    [" = ", ": ", "[[job]]\n", "[sweep]\nx = [1, 2]\n", "{lr}", "- ", "---\n", "&a ", "*a", "<<: "];

#[test]
fn the_files_that_are_damaged_are_valid() {
    for text in TOML_FILES {
        toml(text).unwrap();
    }
    for text in YAML_FILES {
        yaml(text).unwrap();
    }
    for text in SUBMISSIONS {
        prepare(serde_json::from_str::<SubmitRequest>(text).unwrap().jobs).unwrap();
    }
}

proptest! {
    #[test]
    fn garbage_never_panics(text in "\\PC{0,200}") {
        let _ = (toml(&text), yaml(&text));
    }

    #[test]
    fn no_damaged_job_file_makes_a_parser_panic(seed in any::<u64>()) {
        let (in_toml, in_yaml) = (damaged(&TOML_FILES, &PIECES, seed), damaged(&YAML_FILES, &PIECES, seed));
        let (in_toml, in_yaml) = (String::from_utf8_lossy(&in_toml), String::from_utf8_lossy(&in_yaml));
        for error in [toml(&in_toml).err(), yaml(&in_yaml).err()].into_iter().flatten() {
            prop_assert!(!error.to_string().is_empty());
        }
    }

    #[test]
    fn no_submission_makes_the_parser_panic(seed in any::<u64>()) {
        let body = damaged(&SUBMISSIONS, &PIECES, seed);
        if let Ok(request) = serde_json::from_slice::<SubmitRequest>(&body) {
            for job in prepare(request.jobs).unwrap_or_default() {
                prop_assert!((0.0..=1.0).contains(&job.floor) && job.floor <= job.max, "{job:?}");
            }
        }
    }

    /// Each job has the values as they are, and nothing is replaced twice.
    #[test]
    fn values_arrive_as_they_are(a in "[{}a-z]{0,8}", b in "[{}a-z]{0,8}") {
        let mut spec = JobSpec::new(vec!["p".into(), "{x}|{y}".into()]);
        spec.sweep = [("x".to_string(), a.clone()), ("y".to_string(), b.clone())]
            .into_iter()
            .map(|(k, v)| (k, vec![gainshare_daemon::spec::SweepValue::Text(v)]))
            .collect();
        let jobs = prepare(vec![spec]).unwrap();
        prop_assert_eq!(&jobs[0].command[1], &format!("{a}|{b}"));
    }
}

/// Files below the largest size that is read which become huge or deep.
#[test]
fn bombs_are_refused() {
    let mut aliases = String::from("a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]\n");
    for i in 1..12 {
        let before = vec![format!("*a{}", i - 1); 9].join(", ");
        aliases += &format!("a{i}: &a{i} [{before}]\n");
    }
    let command = format!("{aliases}command: *a11\n");
    let deep = format!("command: {}x{}\n", "[".repeat(20_000), "]".repeat(20_000));
    let braces = format!("command: {}", "{a: ".repeat(20_000));
    let merge = "base: &b {x: *b}\ncommand: [x]\n<<: *b\n".to_owned();
    let anchors: String = (0..60_000).map(|i| format!("k{i}: &n{i} x\n")).collect();
    let wide = format!("command: [{}]\n", "x, ".repeat(300_000));
    let bombs = [aliases, command, deep, braces, merge, anchors, wide];
    for (i, bomb) in bombs.iter().enumerate() {
        let error = yaml(bomb).err();
        assert!(error.is_some(), "bomb {i} was accepted");
        let text = error.unwrap().to_string();
        assert!(text.len() < 2_000, "bomb {i}: {} bytes of text", text.len());
    }
    let nested = format!("command = {}1{}", "[".repeat(20_000), "]".repeat(20_000));
    assert!(toml(&nested).is_err());
    let sweep: String = (0..12).map(|i| format!("s{i} = [{}]\n", "1, ".repeat(10))).collect();
    assert!(toml(&format!("command = [\"x\"]\n[sweep]\n{sweep}")).is_err(), "a sweep of 10^12 jobs");
    println!("fault: injected={} violations=0", bombs.len() + 2);
}
