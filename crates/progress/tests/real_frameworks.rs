//! The collectors against what real frameworks write and print, while the test runs: PyTorch with
//! TensorBoard and tqdm, Keras on TensorFlow, Lightning, transformers' callbacks, prometheus_client.
//!
//! The scripts are in `frameworks/`. They need a Python environment with the frameworks, so the tests
//! are ignored by default; `cargo xtask test` makes the environment and runs them.
//! `frameworks/make-venv` makes it for a run by hand; `GAINSHARE_TEST_VENV` says where.

use gainshare_core::model::Time;
use gainshare_progress::{
    Batch, Collector, CollectorState, FileState, MetricReading, MetricSpec, MetricsFile, OutputParser, Progress, Root,
    Source, Unit, prometheus,
};
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

fn frameworks() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/frameworks")
}

/// Python with the frameworks.
fn python() -> PathBuf {
    let made = Command::new(frameworks().join("make-venv")).stderr(Stdio::inherit()).output().expect("make-venv runs");
    assert!(
        made.status.success(),
        "frameworks/make-venv failed; it needs /usr/bin/python3 with venv, and the network on its first run"
    );
    PathBuf::from(String::from_utf8(made.stdout).unwrap().trim()).join("bin/python")
}

/// Starts a script in `folder`. `terminal`: on a pseudo-terminal made by `script`, as under
/// `gainshare run` on a terminal.
fn start(name: &str, folder: &Path, terminal: bool) -> Child {
    let (python, script) = (python(), frameworks().join(name));
    let mut command = if terminal {
        let mut c = Command::new("script");
        c.args(["--quiet", "--return", "--flush", "--command"]);
        c.arg(format!("stty rows 50 cols 200; exec {} -u {}", python.display(), script.display())).arg("/dev/null");
        c
    } else {
        let mut c = Command::new(python);
        c.arg("-u").arg(script);
        c
    };
    command.current_dir(folder).env("OMP_NUM_THREADS", "1").env("CUDA_VISIBLE_DEVICES", "-1").env("COLUMNS", "200");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("python starts")
}

/// Runs a script to its end; gives what it printed on both channels.
fn run(name: &str, folder: &Path, terminal: bool) -> Vec<u8> {
    let out = start(name, folder, terminal).wait_with_output().unwrap();
    assert!(out.status.success(), "{name}: {}", String::from_utf8_lossy(&out.stderr));
    [out.stdout, out.stderr].concat()
}

fn parse(output: &[u8]) -> Batch {
    let mut parser = OutputParser::new(None);
    let mut batch = Batch::default();
    output.chunks(1000).for_each(|c| parser.feed(c, &mut batch));
    parser.finish(&mut batch);
    batch
}

fn of<'a>(readings: &'a [MetricReading], metric: &str) -> Vec<&'a MetricReading> {
    readings.iter().filter(|r| r.metric == metric).collect()
}

fn expected(folder: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap()
}

/// A collector that finds its way by itself, polled after the job is over.
fn collect(folder: &Path, started: SystemTime, spec: &MetricSpec) -> (Collector, Vec<MetricReading>) {
    let mut collector = Collector::new(spec, Some(folder), started, CollectorState::default()).unwrap();
    let mut readings = Vec::new();
    for second in 0..40 {
        let update = collector.poll(Time::from_secs_f64(f64::from(second)));
        if update.forget {
            readings.clear();
        }
        readings.extend(update.readings);
    }
    (collector, readings)
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-4 * b.abs().max(1e-3)
}

#[test]
#[ignore = "needs the Python environment of tests/frameworks/make-venv"]
fn keras() {
    let folder = tempfile::tempdir().unwrap();
    let started = SystemTime::now();
    let output = run("keras_fit.py", folder.path(), true);
    let history = expected(folder.path());
    let losses: Vec<f64> = history["loss"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();

    let batch = parse(&output);
    let from_bars = of(&batch.readings, "loss");
    for (epoch, loss) in losses.iter().enumerate() {
        let end = 16 * (epoch as u64 + 1);
        let last = from_bars
            .iter()
            .rev()
            .find(|r| r.step == Some(end))
            .unwrap_or_else(|| panic!("no bar at the end of epoch {epoch}"));
        assert!((last.value - loss).abs() < 1e-3, "{} is not {loss}", last.value);
        assert_eq!(last.total, Some(48));
    }
    assert_eq!(of(&batch.readings, "val_loss").len(), 3);
    assert_eq!(
        batch.progress,
        Some(Progress { step: 48, total: Some(48), unit: Unit::Step }),
        "evaluate's bar is no progress"
    );

    let (collector, readings) = collect(folder.path(), started, &MetricSpec::default());
    assert_eq!((collector.source(), collector.metric()), (Some(Source::Tensorboard), Some("train/epoch_loss")));
    assert_eq!(readings.len(), 3, "{readings:?}");
    assert!(readings.iter().zip(&losses).all(|(r, loss)| close(r.value, *loss)), "{readings:?} {losses:?}");
    let named =
        MetricSpec { source: Source::Tensorboard, name: Some("validation/epoch_loss".into()), ..MetricSpec::default() };
    assert_eq!(collect(folder.path(), started, &named).1.len(), 3);

    let root = Arc::new(Root::open(folder.path()).unwrap());
    let mut file = MetricsFile::new(root, Path::new("training_log.csv"), None, FileState::default());
    let mut batch = Batch::default();
    file.poll(usize::MAX, &mut batch).unwrap();
    let from_csv = of(&batch.readings, "loss");
    assert_eq!(from_csv.iter().map(|r| r.value).collect::<Vec<_>>(), losses);
    assert_eq!(from_csv.iter().map(|r| r.step).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
}

#[test]
#[ignore = "needs the Python environment of tests/frameworks/make-venv"]
fn keras_into_a_pipe() {
    let folder = tempfile::tempdir().unwrap();
    let batch = parse(&run("keras_fit.py", folder.path(), false));
    assert_eq!(batch.progress, Some(Progress { step: 48, total: Some(48), unit: Unit::Step }));
    assert_eq!(of(&batch.readings, "val_loss").len(), 3);
}

#[test]
#[ignore = "needs the Python environment of tests/frameworks/make-venv"]
fn pytorch_with_tensorboard_and_tqdm() {
    let folder = tempfile::tempdir().unwrap();
    let started = SystemTime::now();
    let output = run("torch_tensorboard.py", folder.path(), true);
    let losses: Vec<f64> = serde_json::from_value(expected(folder.path())).unwrap();

    let (collector, readings) = collect(folder.path(), started, &MetricSpec::default());
    assert_eq!((collector.source(), collector.metric()), (Some(Source::Tensorboard), Some("Loss/train")));
    assert_eq!(readings.iter().map(|r| r.step.unwrap()).collect::<Vec<_>>(), (0..=20).collect::<Vec<_>>());
    assert!(readings.iter().zip(losses.iter().chain([&0.125])).all(|(r, loss)| close(r.value, *loss)));
    assert_eq!(collector.counters().bad_records, 1, "the large text is stepped over and counted");

    let batch = parse(&output);
    let lines: Vec<_> = of(&batch.readings, "loss").into_iter().filter(|r| r.step.is_some_and(|s| s > 0)).collect();
    assert!(lines.len() >= 20, "{lines:?}");
    assert_eq!(batch.progress, Some(Progress { step: 20, total: Some(20), unit: Unit::Step }));

    // Another job in the same folder must not be given these files.
    let mut neighbour =
        Collector::new(&MetricSpec::default(), Some(folder.path()), started, CollectorState::default()).unwrap();
    neighbour.own_pids([std::process::id()]);
    assert!((0..20).all(|s| neighbour.poll(Time::from_secs_f64(f64::from(s))).readings.is_empty()));
}

#[test]
#[ignore = "needs the Python environment of tests/frameworks/make-venv"]
fn pytorch_while_it_writes_and_the_daemon_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let started = SystemTime::now();
    let mut child = start("torch_tensorboard.py", folder.path(), false);
    // Its output must go somewhere, or it would wait for us.
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let drains = [
        std::thread::spawn(move || std::io::copy(&mut stdout, &mut std::io::sink()).unwrap()),
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()).unwrap()),
    ];
    let spec = MetricSpec { source: Source::Tensorboard, ..MetricSpec::default() };
    let (mut state, mut steps, mut over) = (CollectorState::default(), Vec::new(), false);
    for second in 0.. {
        let last = over;
        // A new collector each time, as after a restart, from what the one before left.
        let mut collector = Collector::new(&spec, Some(folder.path()), started, state).unwrap();
        let update = collector.poll(Time::from_secs_f64(f64::from(second)));
        steps.extend(update.readings.iter().map(|r| r.step.unwrap()));
        state = serde_json::from_str(&serde_json::to_string(&collector.state()).unwrap()).unwrap();
        if last {
            break;
        }
        over = child.try_wait().unwrap().is_some();
        std::thread::sleep(Duration::from_millis(3));
    }
    for drain in drains {
        drain.join().unwrap();
    }
    assert_eq!(steps, (0..=20).collect::<Vec<_>>(), "each step once, in order");
}

#[test]
#[ignore = "needs the Python environment of tests/frameworks/make-venv"]
fn lightning() {
    let folder = tempfile::tempdir().unwrap();
    let started = SystemTime::now();
    let mut child = start("lightning_fit.py", folder.path(), false);
    let (mut stdout, mut stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        stderr.read_to_end(&mut all).unwrap();
        all
    });
    let printed = std::thread::spawn(move || {
        let mut all = Vec::new();
        stdout.read_to_end(&mut all).unwrap();
        all
    });
    // Follow the CSV file while Lightning writes it, and writes it again when val_loss appears.
    let root = Arc::new(Root::open(folder.path()).unwrap());
    let mut file =
        MetricsFile::new(root, Path::new("lightning_logs/version_0/metrics.csv"), None, FileState::default());
    let mut live = Batch::default();
    while child.try_wait().unwrap().is_none() {
        file.poll(usize::MAX, &mut live).unwrap();
        std::thread::sleep(Duration::from_millis(2));
    }
    file.finish(&mut live).unwrap();
    let (errors, output) = (reader.join().unwrap(), printed.join().unwrap());
    assert!(child.wait().unwrap().success(), "{}", String::from_utf8_lossy(&errors));
    let steps: Vec<_> = of(&live.readings, "train_loss").iter().map(|r| r.step.unwrap()).collect();
    assert_eq!(steps, (0..12).map(|i| 4 + 5 * i).collect::<Vec<_>>(), "each row once, although the file was rewritten");
    assert_eq!(of(&live.readings, "val_loss").len(), 3);

    let batch = parse(&output);
    assert_eq!(batch.progress, Some(Progress { step: 60, total: None, unit: Unit::Step }));
    let steps: Vec<_> = of(&batch.readings, "train_loss").iter().map(|r| r.step.unwrap()).collect();
    assert!(steps.windows(2).all(|w| w[0] <= w[1]) && steps.last() == Some(&60), "{steps:?}");

    let (collector, readings) = collect(folder.path(), started, &MetricSpec::default());
    assert_eq!((collector.source(), collector.metric()), (Some(Source::Tensorboard), Some("train_loss")));
    assert_eq!(readings.len(), 12);
    let by_file = MetricSpec {
        source: Source::File,
        path: Some("lightning_logs/version_0/metrics.csv".into()),
        name: Some("val_loss".into()),
        ..MetricSpec::default()
    };
    assert_eq!(collect(folder.path(), started, &by_file).1.len(), 3);
}

#[test]
#[ignore = "needs the Python environment of tests/frameworks/make-venv"]
fn transformers() {
    let folder = tempfile::tempdir().unwrap();
    // On a terminal, since the dicts go to one channel and the bar to the other.
    let batch = parse(&run("hugging_face_log.py", folder.path(), true));
    let losses: Vec<_> = of(&batch.readings, "loss").iter().map(|r| r.value).collect();
    assert_eq!(losses, [0.1, 0.05, 0.0333]);
    assert!(of(&batch.readings, "loss").iter().all(|r| r.total == Some(30)), "{:?}", batch.readings);
    assert_eq!(of(&batch.readings, "train_loss").len(), 1);
    assert_eq!(batch.progress, Some(Progress { step: 30, total: Some(30), unit: Unit::Step }));
}

#[test]
#[ignore = "needs the Python environment of tests/frameworks/make-venv"]
fn prometheus_client() {
    let mut child = Command::new(python())
        .arg(frameworks().join("prometheus_gauge.py"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let port = lines.next().unwrap().unwrap();
    let mut input = child.stdin.take().unwrap();
    let spec = MetricSpec { url: Some(format!("http://localhost:{port}/metrics")), ..MetricSpec::default() };
    let mut collector = Collector::new(&spec, None, SystemTime::now(), CollectorState::default()).unwrap();
    let mut values = Vec::new();
    for (second, loss) in [(0, "0.5"), (3, "0.5"), (6, "0.25"), (9, "nan")] {
        writeln!(input, "{loss}").unwrap();
        lines.next().unwrap().unwrap();
        let now = Time::from_secs_f64(f64::from(second));
        let endpoint: prometheus::Endpoint = collector.fetch_due(now).expect("it is time");
        assert!(collector.fetch_due(now).is_none());
        let answer = endpoint.fetch();
        values.extend(collector.fetched(now, answer).readings.into_iter().map(|r| (r.value, r.step)));
    }
    drop(input);
    child.wait().unwrap();
    assert_eq!(values, [(0.5, Some(1)), (0.5, Some(2)), (0.25, Some(3))]);
    assert_eq!((collector.source(), collector.metric()), (Some(Source::Prometheus), Some("train_loss")));
    assert_eq!(collector.counters().bad_values, 1);
}
