//! Containers of our own on a real engine: from the job file's words to the exit code.

use crate::dockerd::{self, Dockerd, IMAGE, PATIENCE, eventually, next_within};
use gainshare_limits::docker::{AdoptionRule, Bind, ContainerSpec, DockerEvent, Engine, LogCursor, Network, labels};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

fn spec(name: &str, script: &str) -> ContainerSpec {
    ContainerSpec {
        name: name.to_owned(),
        image: IMAGE.to_owned(),
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        network: Network::None,
        ..Default::default()
    }
}

fn output(engine: &Engine, id: &str) -> String {
    let mut channel = engine.follow_logs(id, LogCursor::default());
    let mut bytes = Vec::new();
    while let Some(chunk) = next_within(&mut channel, PATIENCE) {
        bytes.extend(chunk.bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[test]
#[ignore = "needs Docker"]
fn a_job_runs_as_its_file_says_and_ends_on_request() {
    let docker = Dockerd::start();
    let engine = docker.engine();
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("given"), "from outside\n").unwrap();
    std::os::unix::fs::chown(data.path(), Some(1234), Some(1234)).unwrap();
    let mut job = spec("job", "id -u; echo $SEED; cat given; echo made > made; exit 5");
    job.env = BTreeMap::from([("SEED".to_owned(), "a b=c".to_owned())]);
    job.workdir = Some(PathBuf::from("/job"));
    job.binds = vec![Bind { host: data.path().to_owned(), container: "/job".into(), read_only: false }];
    job.user = Some("1234:1234".to_owned());
    job.labels = BTreeMap::from([(labels::JOB.to_owned(), "17".to_owned())]);
    job.init = true;
    let mut events = engine.events(AdoptionRule::OptedIn);
    let id = engine.create_and_start(&job).unwrap();
    match dockerd::next(&mut events) {
        DockerEvent::Appeared(info) => assert_eq!(info.labels[labels::JOB], "17"),
        other => panic!("{other:?}"),
    }
    assert_eq!(output(&engine, &id), "1234\na b=c\nfrom outside\n");
    assert_eq!(engine.exit_code(&id).unwrap(), Some(5));
    let age_s =
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64() - engine.ended_s(&id).unwrap().unwrap();
    assert!((0.0..60.0).contains(&age_s), "{age_s}");
    let (reply, replies) = std::sync::mpsc::channel();
    engine.request_exit_code(&id, move |answer| reply.send(answer.unwrap()).unwrap());
    assert_eq!(replies.recv_timeout(PATIENCE).unwrap(), Some(5));
    assert_eq!(std::fs::read_to_string(data.path().join("made")).unwrap(), "made\n");

    // The name is taken until the container is removed.
    let error = engine.create_and_start(&job).unwrap_err().to_string();
    assert!(error.contains("container named job exists") && error.contains("docker rm"), "{error}");
    engine.remove(&id).unwrap();
    engine.remove(&id).expect("does nothing");
    assert!(engine.exit_code(&id).is_err());

    // A job that gets SIGTERM may finish its work; a job that ignores it is killed.
    let polite = engine
        .create_and_start(&spec("polite", "trap 'echo saved; exit 4' TERM; while :; do sleep 0.1; done"))
        .unwrap();
    let deaf = engine.create_and_start(&spec("deaf", "trap '' TERM; while :; do sleep 0.1; done")).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!((engine.exit_code(&polite).unwrap(), engine.ended_s(&polite).unwrap()), (None, None));
    engine.stop(&polite, Duration::from_secs(60)).unwrap();
    engine.stop(&deaf, Duration::from_secs(1)).unwrap();
    eventually("the polite one ends by itself", || engine.exit_code(&polite).unwrap() == Some(4));
    eventually("the deaf one is killed", || engine.exit_code(&deaf).unwrap() == Some(137));
    assert_eq!(output(&engine, &polite), "saved\n");
}

#[test]
#[ignore = "needs Docker"]
fn bad_jobs_are_refused_in_one_line_and_leave_nothing_behind() {
    let docker = Dockerd::start();
    let engine = docker.engine();
    let refused = |spec: ContainerSpec, words: &[&str]| {
        let error = engine.create_and_start(&spec).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{error}");
    };
    let missing = ContainerSpec { image: "no/such:image".to_owned(), ..spec("a1", "true") };
    refused(missing, &["no/such:image", "docker pull no/such:image"]);
    let mut no_program = spec("a2", "");
    no_program.command = vec!["/no/such/program".to_owned()];
    refused(no_program, &["a2", "/no/such/program"]);
    let mut no_dir = spec("a3", "true");
    no_dir.binds = vec![Bind { host: "/no/such/dir".into(), container: "/job".into(), read_only: true }];
    refused(no_dir, &["a3", "/no/such/dir"]);
    assert!(!Path::new("/no/such/dir").exists(), "the engine did not make it up");
    refused(spec("bad name!", "true"), &["bad name!"]);
    let left = docker.call(async |engine| {
        let all = bollard::query_parameters::ListContainersOptions { all: true, ..Default::default() };
        engine.list_containers(Some(all)).await
    });
    assert_eq!(left.len(), 0, "{left:?}");
}
