//! All sources of one job: which one counts, what a restart keeps, what a flood costs.

use gainshare_core::model::Time;
use gainshare_progress::{Collector, CollectorState, Goal, MetricReading, MetricSpec, Source, Update};
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::SystemTime;

fn at(seconds: f64) -> Time {
    Time::from_secs_f64(seconds)
}

fn follow(spec: &MetricSpec, folder: &Path) -> Collector {
    Collector::new(spec, Some(folder), SystemTime::UNIX_EPOCH, CollectorState::default()).unwrap()
}

fn append(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(text.as_bytes()).unwrap();
}

fn values(update: &Update) -> Vec<f64> {
    update.readings.iter().map(|r: &MetricReading| r.value).collect()
}

#[test]
fn a_better_source_takes_over_early_but_not_late() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = follow(&MetricSpec::default(), folder.path());
    assert_eq!(values(&job.output(at(1.0), b"loss: 3\nlr: 0.1\n")), [3.0]);
    let update = job.pushed(at(2.0), br#"{"metric": "loss", "value": 2.5, "step": 1}"#).unwrap();
    assert_eq!((values(&update), update.forget, job.source()), (vec![2.5], true, Some(Source::Push)));
    assert_eq!(values(&job.output(at(3.0), b"loss: 2\n")), [] as [f64; 0], "the push counts now");

    let mut job = follow(&MetricSpec::default(), folder.path());
    job.output(at(1.0), b"loss: 3\n");
    let update = job.pushed(at(100.0), br#"{"loss": 2.5}"#).unwrap();
    assert_eq!((values(&update), job.source()), (vec![], Some(Source::Output)));
    let update = job.pushed(at(1000.0), br#"{"loss": 2.5}"#).unwrap();
    assert_eq!((values(&update), update.forget), (vec![2.5], true), "the output was silent for long");
}

#[test]
fn a_named_source_and_metric_is_the_only_one() {
    let folder = tempfile::tempdir().unwrap();
    append(&folder.path().join("out/m.csv"), "epoch,loss,val_acc\n0,3,0.5\n");
    let spec = MetricSpec {
        source: Source::File,
        path: Some("out/m.csv".into()),
        name: Some("val_acc".into()),
        ..MetricSpec::default()
    };
    let mut job = follow(&spec, folder.path());
    let printed = job.output(at(0.0), b"Epoch 1/5 val_acc: 0.9\n");
    assert!(printed.readings.is_empty() && printed.progress.is_some(), "progress is welcome from anywhere");
    assert!(job.pushed(at(0.0), br#"{"val_acc": 0.9}"#).unwrap().readings.is_empty());
    assert_eq!(values(&job.poll(at(1.0))), [0.5]);
    let outside = MetricSpec { path: Some("/etc/passwd".into()), ..spec };
    let error =
        Collector::new(&outside, Some(folder.path()), SystemTime::now(), CollectorState::default()).unwrap_err();
    assert!(error.to_string().contains("/etc/passwd"), "{error}");
}

#[test]
fn a_metrics_file_is_found_when_the_output_says_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("lightning_logs/version_0/metrics.csv");
    append(&file, "epoch,step,train_loss\n0,4,1.5\n");
    let mut job = follow(&MetricSpec::default(), folder.path());
    job.output(at(0.0), b"starting, seed: 7\n");
    let found: Vec<f64> = (0..60).flat_map(|s| values(&job.poll(at(f64::from(s))))).collect();
    assert_eq!((found, job.source()), (vec![1.5], Some(Source::File)));

    let mut job = follow(&MetricSpec::default(), folder.path());
    job.output(at(0.0), b"loss: 7\n");
    assert!((0..60).all(|s| values(&job.poll(at(f64::from(s)))).is_empty()), "its own output speaks already");
}

#[test]
fn a_restart_loses_and_doubles_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("m.jsonl");
    let spec = MetricSpec { source: Source::File, path: Some("m.jsonl".into()), ..MetricSpec::default() };
    let mut state = CollectorState::default();
    let mut got = Vec::new();
    for i in 0..50 {
        append(&file, &format!("{{\"step\": {i}, \"loss\": {}}}\n{{\"st", 100 - i));
        let mut job = Collector::new(&spec, Some(folder.path()), SystemTime::UNIX_EPOCH, state).unwrap();
        got.extend(values(&job.poll(at(f64::from(i)))));
        append(&file, "\n");
        state = serde_json::from_str(&serde_json::to_string(&job.state()).unwrap()).unwrap();
    }
    assert_eq!(got, (0..50).map(|i| f64::from(100 - i)).collect::<Vec<_>>());

    let mut state = CollectorState::default();
    let mut got = Vec::new();
    for byte in b"Epoch 1/2\nloss: 0.5 lr: 1\nloss: 0.25\n" {
        let mut job = Collector::new(&MetricSpec::default(), None, SystemTime::UNIX_EPOCH, state).unwrap();
        got.extend(values(&job.output(at(0.0), &[*byte])));
        state = serde_json::from_str(&serde_json::to_string(&job.state()).unwrap()).unwrap();
    }
    assert_eq!(got, [0.5, 0.25]);
}

#[test]
fn a_flood_is_bounded_and_counted() {
    let mut job =
        Collector::new(&MetricSpec::default(), None, SystemTime::UNIX_EPOCH, CollectorState::default()).unwrap();
    let flood = "loss: 0.5 noise: 1\n".repeat(100_000);
    let mut readings = 0;
    for tenth in 0..20 {
        readings += job.output(at(f64::from(tenth) / 10.0), flood.as_bytes()).readings.len();
    }
    let counters = job.counters();
    assert!(counters.flooded_lines > 1_000_000 && counters.dropped_readings > 100_000, "{counters:?}");
    assert!((20..=5_120).contains(&readings), "{readings}");
    assert!(serde_json::to_string(&job.state()).unwrap().len() < 16 << 10);
    assert_eq!(
        values(&job.output(at(20.0), b"\nloss: 0.25\n")).last(),
        Some(&0.25),
        "it is read again once it is calm"
    );

    // Ten thousand lines a second are no flood.
    let mut job =
        Collector::new(&MetricSpec::default(), None, SystemTime::UNIX_EPOCH, CollectorState::default()).unwrap();
    let second =
        "step=1 loss: 0.5 some more words to make the line as long as usual, which is a hundred bytes\n".repeat(10_000);
    (0..10).for_each(|s| drop(job.output(at(f64::from(s)), second.as_bytes())));
    assert_eq!(job.counters().flooded_lines, 0);
}

#[test]
fn a_job_in_a_folder_that_is_gone_is_still_followed() {
    let mut job = follow(&MetricSpec::default(), Path::new("/nonexistent/folder"));
    assert_eq!(values(&job.poll(at(0.0))), [] as [f64; 0]);
    assert_eq!(values(&job.output(at(0.0), b"loss: 1")), [] as [f64; 0]);
    assert_eq!(values(&job.finish(at(1.0))), [1.0], "the last line counts without its end");
}

/// One record of an event file with the scalar `loss`.
fn event(step: u8, loss: f32) -> Vec<u8> {
    let value = [&[0x0a, 4][..], b"loss", &[0x15], &loss.to_le_bytes()].concat();
    let summary = [&[0x0a, value.len() as u8][..], &value].concat();
    let body = [&[0x10, step, 0x2a, summary.len() as u8][..], &summary].concat();
    let crc = |data: &[u8]| crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
    let length = (body.len() as u64).to_le_bytes();
    [&length[..], &crc(&length), &body, &crc(&body)].concat()
}

#[test]
fn a_file_name_that_is_not_text_survives_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join(OsStr::from_bytes(b"x\xff.tfevents.1"));
    let mut state = CollectorState::default();
    let mut got = Vec::new();
    for i in 0..3u8 {
        OpenOptions::new().append(true).create(true).open(&file).unwrap().write_all(&event(i, f32::from(i))).unwrap();
        let mut job =
            Collector::new(&MetricSpec::default(), Some(folder.path()), SystemTime::UNIX_EPOCH, state).unwrap();
        got.extend(values(&job.poll(at(f64::from(i)))));
        state = serde_json::from_str(&serde_json::to_string(&job.state()).unwrap()).unwrap();
    }
    assert_eq!(got, [0.0, 1.0, 2.0], "each once");
}

#[test]
fn the_goal_decides_which_metric_is_followed() {
    let metric = |goal| {
        let spec = MetricSpec { goal, ..MetricSpec::default() };
        let mut job = Collector::new(&spec, None, SystemTime::UNIX_EPOCH, CollectorState::default()).unwrap();
        let update = job.output(at(0.0), b"loss: 2 lr: 0.1\nval_acc: 0.5\n");
        (values(&update), job.metric().map(str::to_owned))
    };
    assert_eq!(metric(None), (vec![2.0], Some("loss".into())));
    assert_eq!(metric(Some(Goal::Maximize)), (vec![0.5], Some("val_acc".into())));
}

#[test]
fn states_of_earlier_versions_are_readable() {
    let old = r#"{"chooser": {"named": null, "chosen": "loss", "reports": 3}, "source": "output",
        "output": {"terminal": {"line": "lo", "overlong": false, "state": {"Csi": {"seen": 1}}},
            "course": {"epoch": null, "bars": [{"drawn": true, "length": 9, "at": 1, "passes": 0}],
                "last_step": null, "fractional": false},
            "seen": {"loss": [1.0, null]}},
        "events": {"a.tfevents": {"device": 1, "inode": 2, "offset": 3, "mark": 0, "mark_len": 0}},
        "file": ["m.csv", {"position": {"device": 1, "inode": 2, "offset": 3, "mark": 0, "mark_len": 0},
            "decoder": {"form": {"csv": {"delimiter": ","}}, "columns": ["loss"], "skipping": false,
                "given": {"count": 1, "head": [1], "all": 2}, "again": null}}],
        "counters": {"bad_values": 5, "long_lines": 0, "dropped_readings": 0, "flooded_lines": 0,
            "bad_records": 0, "restarts": 0, "failures": 0}}"#;
    let state: CollectorState = serde_json::from_str(old).unwrap();
    let mut job = Collector::new(&MetricSpec::default(), None, SystemTime::UNIX_EPOCH, state).unwrap();
    assert_eq!((job.metric(), job.counters().bad_values), (Some("loss"), 5));
    assert_eq!(values(&job.output(at(0.0), b"mss: 0.5\n")), [0.5], "goes on in the middle of a line");
}
