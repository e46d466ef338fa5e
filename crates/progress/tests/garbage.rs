//! Every collector on garbage: arbitrary bytes, torn and huge input, NaN, rotation, and stored states
//! that no version of this crate has written.
//!
//! **Properties checked.** No call panics. Values are finite, and a step never exceeds its total.
//! Memory is bounded: a call returns a bounded number of readings, and the stored state (which holds
//! every buffer that outlives a call, except the window of a file) stays small. Work is bounded: a call
//! moves the position of a file by a bounded number of bytes, whatever the file holds.

use gainshare_core::model::Time;
use gainshare_progress::{
    Batch, Collector, CollectorState, Counters, EventFiles, FileState, MetricSpec, MetricsFile, OutputParser, Pattern,
    Root, Source, Update, prometheus, push,
};
use nix::fcntl::OFlag;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

/// Readings in the update of one call: of event files, of a metrics file and of the output.
const MAX_READINGS: usize = 3 * 256;

/// Largest stored state: 8 KiB of a line, 256 metrics, 512 columns, 64 event files.
const MAX_STATE_BYTES: usize = 256 << 10;

/// Most bytes of a file that one call of `poll` reads.
const MAX_POLL_BYTES: u64 = 4 * (256 << 10);

/// Names of the files in the job's folder. One is found as an event file, one as a metrics file.
const EVENTS: &str = "x.tfevents.1";
const METRICS: &str = "metrics.csv";

/// Pieces that lead deep into the parsers.
const PIECES: [&str; 36] = [
    "loss: ",
    "loss=",
    "val_acc: ",
    "Epoch ",
    "3/10",
    " 37/200 [",
    "| ",
    "%|",
    "\r",
    "\n",
    "\x08\x08",
    "\x1b[1m",
    "\x1b]0;",
    "\x07",
    "0.25",
    "1e999",
    "nan",
    "-inf",
    "{'loss': '",
    "{\"loss\": 1, \"step\": 3}\n",
    "{\"metrics\": [{\"name\": \"loss\", \"value\": \"0.5\"}]}",
    "{\"a\":",
    "}",
    "━━",
    "step",
    " of ",
    ", ",
    "tensor(",
    "99999999999999999999",
    "18446744073709551615/18446744073709551615 ",
    "-",
    "%",
    "step,loss\n1,0.5\n",
    ";a;b\n1;2;3\n",
    "\"",
    "loss{a=\"b\"} 0.5 1\nglobal_step 7\n",
];

fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        3 => proptest::sample::select(PIECES.to_vec()).prop_map(|s| s.as_bytes().to_vec()),
        2 => proptest::collection::vec(any::<u8>(), 0..30),
        1 => Just(record(b"\x10\x03\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x00\x3f")),
        1 => proptest::collection::vec(any::<u8>(), 0..30).prop_map(|body| record(&body)),
        1 => (any::<u8>(), 0usize..40_000).prop_map(|(b, n)| vec![b; n]),
    ];
    proptest::collection::vec(piece, 0..20).prop_map(|pieces| pieces.concat())
}

/// A record of an event file.
fn record(body: &[u8]) -> Vec<u8> {
    let crc = |data: &[u8]| crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes();
    let length = (body.len() as u64).to_le_bytes();
    [&length[..], &crc(&length), body, &crc(body)].concat()
}

/// Numbers at which arithmetic overflows, and ordinary ones.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        0u64..2000,
        Just(u64::from(u32::MAX)),
        Just(i64::MAX as u64),
        Just(i64::MAX as u64 + 1),
        Just(u64::MAX - 1),
        Just(u64::MAX),
        any::<u64>(),
    ]
}

/// A stored position. The identity of the file is filled in by [`with_inode`].
fn position() -> impl Strategy<Value = Value> {
    (number(), any::<u32>(), prop_oneof![Just(0), Just(256), 0u16..300, any::<u16>()], any::<bool>()).prop_map(
        |(offset, mark, mark_len, mine)| {
            json!({"device": 0, "inode": u64::from(mine), "offset": offset, "mark": mark, "mark_len": mark_len})
        },
    )
}

fn rows() -> impl Strategy<Value = Value> {
    (number(), proptest::collection::vec(any::<u32>(), 0..100), any::<u32>())
        .prop_map(|(count, head, all)| json!({"count": count, "head": head, "all": all}))
}

fn file_state() -> impl Strategy<Value = Value> {
    let form = prop_oneof![
        Just(Value::Null),
        Just(json!("lines")),
        any::<char>().prop_map(|c| json!({"csv": {"delimiter": c}})),
        Just(json!({"csv": {"delimiter": ","}})),
    ];
    let columns = proptest::collection::vec(prop_oneof![Just("loss".to_owned()), any::<String>()], 0..6);
    (position(), form, columns, any::<bool>(), rows(), proptest::option::of(rows())).prop_map(
        |(position, form, columns, skipping, given, again)| {
            let decoder =
                json!({"form": form, "columns": columns, "skipping": skipping, "given": given, "again": again});
            json!({"position": position, "decoder": decoder})
        },
    )
}

fn output_state() -> impl Strategy<Value = Value> {
    let terminal = prop_oneof![
        Just(json!("Ground")),
        any::<u16>().prop_map(|n| json!({"Csi": {"seen": n}})),
        (any::<u16>(), any::<bool>()).prop_map(|(n, escape)| json!({"Text": {"seen": n, "escape": escape}})),
    ];
    let bar = (any::<bool>(), number(), number(), number())
        .prop_map(|(drawn, length, at, passes)| json!({"drawn": drawn, "length": length, "at": at, "passes": passes}));
    let epoch = (number(), number(), proptest::option::of(number()), number(), any::<bool>()).prop_map(
        |(over, total, length, at, global)| {
            json!({"over": over, "total": total, "length": length, "at": at, "before": [at, over], "global": global})
        },
    );
    let bars = proptest::collection::vec(bar, 0..8);
    ((any::<String>(), any::<bool>(), terminal), proptest::option::of(epoch), bars, any::<bool>()).prop_map(
        |((line, overlong, state), epoch, bars, fractional)| {
            json!({
                "terminal": {"line": line, "overlong": overlong, "state": state},
                "course": {"epoch": epoch, "bars": bars, "last_step": null, "fractional": fractional},
                "seen": {"loss": [1.0, 7]},
            })
        },
    )
}

fn state() -> impl Strategy<Value = Value> {
    let source = prop_oneof![Just(Value::Null), Just(json!("output")), Just(json!("file")), Just(json!("tensorboard"))];
    (output_state(), position(), proptest::option::of(file_state()), number(), any::<u32>(), source).prop_map(
        |(output, events, file, count, reports, source)| {
            json!({
                "chooser": {"named": null, "chosen": "loss", "reports": reports},
                "source": source,
                "output": output,
                "events": {EVENTS: events, "../../etc/passwd": events, "\u{0}x\u{ff}.tfevents": events},
                "file": file.map(|file| json!([METRICS, file])),
                "counters": {"bad_values": count, "failures": count, "restarts": count, "long_lines": count,
                    "dropped_readings": count, "flooded_lines": count, "bad_records": count, "panics": count},
            })
        },
    )
}

/// Puts the identity of the file at `path` into `position`, if it asks for that.
fn with_inode(position: &mut Value, path: &Path) {
    if position["inode"] == 1
        && let Ok(meta) = fs::metadata(path)
    {
        (position["device"], position["inode"]) = (meta.dev().into(), meta.ino().into());
    }
}

/// What happens to a file.
#[derive(Debug, Clone)]
enum Event {
    Append(bool, Vec<u8>),
    Truncate(bool),
    Rotate(bool),
    Remove(bool),
    Fifo(bool),
    Print(Vec<u8>),
    Push(Vec<u8>),
    Restart,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (any::<bool>(), bytes()).prop_map(|(file, bytes)| Event::Append(file, bytes)),
        1 => any::<bool>().prop_map(Event::Truncate),
        1 => any::<bool>().prop_map(Event::Rotate),
        1 => any::<bool>().prop_map(Event::Remove),
        1 => any::<bool>().prop_map(Event::Fifo),
        3 => bytes().prop_map(Event::Print),
        1 => bytes().prop_map(Event::Push),
        1 => Just(Event::Restart),
    ]
}

fn check_update(update: &Update) -> Result<(), TestCaseError> {
    prop_assert!(update.readings.len() <= MAX_READINGS, "{} readings", update.readings.len());
    for r in &update.readings {
        prop_assert!(r.value.is_finite() && r.total.is_none_or(|t| r.step.is_some_and(|s| s <= t)), "{r:?}");
    }
    prop_assert!(update.progress.is_none_or(|p| p.total.is_none_or(|t| p.step <= t)), "{:?}", update.progress);
    Ok(())
}

fn check_state(job: &Collector) -> Result<CollectorState, TestCaseError> {
    let text = serde_json::to_string(&job.state()).expect("every state can be stored");
    prop_assert!(text.len() <= MAX_STATE_BYTES, "{} bytes", text.len());
    Ok(serde_json::from_str(&text).expect("a stored state can be read"))
}

/// Inputs that are kept: each was written against one parser, and every parser reads all of them, whole and cut
/// off at each of some places.
#[test]
fn the_corpus_makes_nothing_panic() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus");
    let mut files = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let input = fs::read(entry.unwrap().path()).unwrap();
        files += 1;
        for end in (0..8).map(|eighth| input.len() - input.len() * eighth / 8) {
            feed_everything(&input[..end]).unwrap();
        }
    }
    assert!(files > 10, "{files} files");
}

fn feed_everything(input: &[u8]) -> Result<(), TestCaseError> {
    let mut counters = Counters::default();
    let answered = prometheus::parse(input, &mut counters);
    let pushed = push::parse(input, &mut counters).unwrap_or_default();
    prop_assert!(answered.readings.iter().chain(&pushed.readings).all(|r| r.value.is_finite()));
    let folder = tempfile::tempdir().unwrap();
    for name in [METRICS, EVENTS] {
        fs::write(folder.path().join(name), input).unwrap();
    }
    for source in [Source::Auto, Source::File, Source::Tensorboard, Source::Output] {
        let path = (source == Source::File).then(|| METRICS.to_owned());
        let spec = MetricSpec { source, path, ..MetricSpec::default() };
        let state = CollectorState::default();
        let mut job = Collector::new(&spec, Some(folder.path()), SystemTime::UNIX_EPOCH, state).unwrap();
        for second in [0.0, 20.0] {
            let now = Time::from_secs_f64(second);
            job.begin_round(now);
            check_update(&job.output(now, input))?;
            check_update(&job.poll(now))?;
            check_state(&job)?;
        }
        check_update(&job.finish(Time::from_secs_f64(40.0)))?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any stored state meets any files and output.
    #[test]
    fn no_state_and_no_input_makes_a_collector_panic(
        mut state in state(),
        source in proptest::sample::select(vec![Source::Auto, Source::File, Source::Tensorboard, Source::Output]),
        before in bytes(),
        events in proptest::collection::vec(event(), 0..12),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = |metrics: bool| folder.path().join(if metrics { METRICS } else { EVENTS });
        for metrics in [true, false] {
            fs::write(path(metrics), &before).unwrap();
        }
        for key in [EVENTS, "../../etc/passwd", "\u{0}x\u{ff}.tfevents"] {
            with_inode(&mut state["events"][key], &path(false));
        }
        if !state["file"].is_null() {
            with_inode(&mut state["file"][1]["position"], &path(true));
        }
        let metrics_path = (source == Source::File).then(|| METRICS.to_owned());
        let spec = MetricSpec { source, path: metrics_path, ..MetricSpec::default() };
        let follow = |state| Collector::new(&spec, Some(folder.path()), SystemTime::UNIX_EPOCH, state).unwrap();
        let state: CollectorState = serde_json::from_value(state).expect("only values are garbage, not the form");
        let mut job = follow(state);
        for (second, event) in events.into_iter().enumerate() {
            let now = Time::from_secs_f64(second as f64 * 20.0);
            job.begin_round(now);
            match event {
                // Writing into a FIFO without a reader fails, which is fine.
                Event::Append(metrics, bytes) => {
                    let mut options = OpenOptions::new();
                    options.append(true).create(true).custom_flags(OFlag::O_NONBLOCK.bits());
                    let _ = options.open(path(metrics)).and_then(|mut file| file.write_all(&bytes));
                }
                Event::Truncate(metrics) => {
                    let mut options = OpenOptions::new();
                    options.write(true).truncate(true).custom_flags(OFlag::O_NONBLOCK.bits());
                    let _ = options.open(path(metrics));
                }
                Event::Rotate(metrics) => drop(fs::rename(path(metrics), folder.path().join(format!("old{second}")))),
                Event::Remove(metrics) => drop(fs::remove_file(path(metrics))),
                Event::Fifo(metrics) => {
                    let _ = fs::remove_file(path(metrics));
                    nix::unistd::mkfifo(&path(metrics), nix::sys::stat::Mode::S_IRWXU).unwrap();
                }
                Event::Print(bytes) => check_update(&job.output(now, &bytes))?,
                Event::Push(bytes) => {
                    if let Ok(update) = job.pushed(now, &bytes) {
                        check_update(&update)?;
                    }
                }
                Event::Restart => job = follow(check_state(&job)?),
            }
            check_update(&job.poll(now))?;
            check_state(&job)?;
        }
        check_update(&job.finish(Time::from_secs_f64(1e6)))?;
        check_state(&job)?;
    }

    #[test]
    fn no_answer_and_no_push_makes_a_parser_panic(body in bytes()) {
        let mut counters = Counters::default();
        let answered = prometheus::parse(&body, &mut counters);
        let pushed = push::parse(&body, &mut counters).unwrap_or_default();
        for r in answered.readings.iter().chain(&pushed.readings) {
            prop_assert!(r.value.is_finite() && r.metric.len() <= 96, "{r:?}");
        }
    }

    #[test]
    fn no_pattern_and_no_output_makes_the_parser_panic(
        pattern in "[a-z0-9.*+?()|\\[\\]{},\\\\]{0,20}",
        input in bytes(),
    ) {
        if let Ok(pattern) = Pattern::new(&format!("(?P<value>{pattern})"), "loss") {
            let mut parser = OutputParser::new(Some(pattern));
            let mut batch = Batch::default();
            parser.feed(&input, &mut batch);
            parser.finish(&mut batch);
            prop_assert!(batch.readings.iter().all(|r| r.value.is_finite()));
        }
    }

}

proptest! {
    // Each case parses megabytes three times.
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Large files of any repeated piece: each call advances by a bounded number of bytes.
    #[test]
    fn work_is_bounded_for_any_large_file(piece in bytes().prop_filter("not empty", |b| !b.is_empty())) {
        let folder = tempfile::tempdir().unwrap();
        let root = Arc::new(Root::open(folder.path()).unwrap());
        let text = piece.repeat((3 << 20) / piece.len() + 1);
        fs::write(folder.path().join("f"), &text).unwrap();

        let mut file = MetricsFile::new(root.clone(), Path::new("f"), None, FileState::default());
        let offset = |file: &MetricsFile| {
            let state = serde_json::to_value(file.state()).unwrap();
            state["position"]["offset"].as_u64().unwrap()
        };
        let mut before = 0;
        for _ in 0..2 {
            let mut batch = Batch::default();
            file.poll(100, &mut batch).unwrap();
            prop_assert!(batch.readings.len() <= 100 + 64, "{}", batch.readings.len());
            let now = offset(&file);
            prop_assert!(now - before <= MAX_POLL_BYTES, "{before} to {now}");
            before = now;
        }
        let mut batch = Batch::default();
        file.finish(&mut batch).unwrap();
        prop_assert!(batch.readings.len() <= 4096 + 64, "{}", batch.readings.len());

        let mut events = EventFiles::new(root, BTreeMap::new());
        events.follow(Path::new("f"));
        let mut batch = Batch::default();
        events.poll(100, &mut batch);
        prop_assert!(batch.readings.len() <= 100 + 64, "{}", batch.readings.len());
        let position = serde_json::to_value(events.positions()).unwrap();
        prop_assert!(position["f"]["offset"].as_u64().unwrap() <= MAX_POLL_BYTES);
    }
}
