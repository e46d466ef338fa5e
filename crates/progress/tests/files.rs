//! Metrics files and event files on a real file system: growth in pieces, rotation, truncation,
//! rewriting, restarts of the reader.

use gainshare_progress::{Batch, Change, EventFiles, FileState, FileTail, MetricsFile, Position, Root};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

struct Fixture {
    dir: tempfile::TempDir,
    root: Arc<Root>,
}

impl Fixture {
    fn new() -> Fixture {
        let dir = tempfile::tempdir().unwrap();
        let root = Arc::new(Root::open(dir.path()).unwrap());
        Fixture { dir, root }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn append(&self, name: &str, bytes: impl AsRef<[u8]>) {
        let mut file = OpenOptions::new().append(true).create(true).open(self.at(name)).unwrap();
        file.write_all(bytes.as_ref()).unwrap();
    }

    fn follow(&self, name: &str, state: FileState) -> MetricsFile {
        MetricsFile::new(self.root.clone(), Path::new(name), None, state)
    }
}

/// New readings as `metric=value@step`, read by a daemon that restarts after each call.
fn news(fixture: &Fixture, name: &str, file: &mut MetricsFile) -> Vec<String> {
    let mut batch = Batch::default();
    file.poll(usize::MAX, &mut batch).unwrap();
    let kept: FileState = serde_json::from_str(&serde_json::to_string(&file.state()).unwrap()).unwrap();
    *file = fixture.follow(name, kept);
    batch
        .readings
        .iter()
        .map(|r| format!("{}={}{}", r.metric, r.value, r.step.map_or(String::new(), |s| format!("@{s}"))))
        .collect()
}

#[test]
fn csv_as_lightning_rewrites_it() {
    let fixture = Fixture::new();
    let mut file = fixture.follow("m.csv", FileState::default());
    assert!(news(&fixture, "m.csv", &mut file).is_empty(), "not there yet");
    fixture.append("m.csv", "epoch,step,train_loss\n0,9,0.5\n0,19,0.4");
    assert_eq!(news(&fixture, "m.csv", &mut file), ["train_loss=0.5@9"]);
    fixture.append("m.csv", "\n");
    assert_eq!(news(&fixture, "m.csv", &mut file), ["train_loss=0.4@19"]);
    // A column appears: the whole file is rewritten, here read in the middle of that.
    fs::write(fixture.at("m.csv"), "epoch,step,train_loss,val_loss\n0,9,0.5,\n").unwrap();
    assert!(news(&fixture, "m.csv", &mut file).is_empty());
    fixture.append("m.csv", "0,19,0.4,\n0,19,,0.45\n1,29,0.3,\n");
    assert_eq!(news(&fixture, "m.csv", &mut file), ["val_loss=0.45@19", "train_loss=0.3@29"]);
    // Another run overwrites it, with the same first row.
    fs::write(fixture.at("m.csv"), "epoch,step,train_loss\n0,9,0.5\n0,19,0.41\n").unwrap();
    assert_eq!(news(&fixture, "m.csv", &mut file), ["train_loss=0.5@9", "train_loss=0.41@19"]);
}

#[test]
fn csv_as_pandas_replaces_it() {
    let fixture = Fixture::new();
    let mut file = fixture.follow("m.csv", FileState::default());
    let mut text = String::from(",epoch,loss\n");
    let mut seen = Vec::new();
    for i in 0..100 {
        text += &format!("{i},{i},{}\n", 1.0 / f64::from(i + 1));
        fs::write(fixture.at("m.tmp"), &text).unwrap();
        fs::rename(fixture.at("m.tmp"), fixture.at("m.csv")).unwrap();
        seen.extend(news(&fixture, "m.csv", &mut file));
    }
    assert_eq!(seen.len(), 100);
    assert_eq!(seen[99], "loss=0.01@99");
}

#[test]
fn ndjson_and_katib_text() {
    let fixture = Fixture::new();
    fixture.append("a.jsonl", "{\"step\": 1, \"loss\": 0.5}\n{\"step\": 2, \"loss\": NaN}\n\n{\"step\": 3, \"los");
    let mut file = fixture.follow("a.jsonl", FileState::default());
    assert_eq!(news(&fixture, "a.jsonl", &mut file), ["loss=0.5@1"]);
    fixture.append("a.jsonl", "s\": 0.25}\n");
    assert_eq!(news(&fixture, "a.jsonl", &mut file), ["loss=0.25@3"]);
    fixture.append("k.log", "2026-01-02T03:04:05.678Z loss=0.5\nepoch=2 accuracy = 0.75\n");
    let mut file = fixture.follow("k.log", FileState::default());
    assert_eq!(news(&fixture, "k.log", &mut file), ["loss=0.5", "accuracy=0.75@2"]);
}

#[test]
fn rotation_reads_the_old_file_to_its_end() {
    let fixture = Fixture::new();
    let mut file = fixture.follow("l", FileState::default());
    let read = |file: &mut MetricsFile| {
        let mut batch = Batch::default();
        file.poll(usize::MAX, &mut batch).unwrap();
        batch.readings.iter().map(|r| r.value).collect::<Vec<_>>()
    };
    fixture.append("l", "loss=1\n");
    assert_eq!(read(&mut file), [1.0]);
    fixture.append("l", "loss=2\n");
    fs::rename(fixture.at("l"), fixture.at("l.1")).unwrap();
    fixture.append("l", "loss=1\nloss=3\n");
    assert_eq!([read(&mut file), read(&mut file)].concat(), [2.0, 1.0, 3.0], "an equal first line is a new report");
    // The same while the daemon is down.
    fixture.append("l", "loss=4\n");
    let kept = file.state();
    fs::rename(fixture.at("l"), fixture.at("l.2")).unwrap();
    fixture.append("l", "loss=5\n");
    let mut file = fixture.follow("l", kept);
    assert_eq!([read(&mut file), read(&mut file)].concat(), [4.0, 5.0]);
}

#[test]
fn a_metrics_file_that_is_gone_after_a_restart_ends_quietly() {
    let fixture = Fixture::new();
    let mut file = fixture.follow("m.csv", FileState::default());
    fixture.append("m.csv", format!("step,loss\n{}", "1,0.5\n".repeat(100)));
    file.poll(usize::MAX, &mut Batch::default()).unwrap();
    let stored: FileState = serde_json::from_str(&serde_json::to_string(&file.state()).unwrap()).unwrap();
    fs::remove_file(fixture.at("m.csv")).unwrap();
    let mut file = fixture.follow("m.csv", stored.clone());
    let mut batch = Batch::default();
    file.finish(&mut batch).unwrap();
    assert_eq!((batch, file.state()), (Batch::default(), stored));
}

#[test]
fn the_end_of_a_job_reads_a_bounded_piece() {
    let fixture = Fixture::new();
    let rows: String = (0..200_000).map(|i| format!("{i},{}\n", 2_000_000 - i)).collect();
    fixture.append("m.csv", format!("step,loss\n{rows}200000,0.5"));
    let mut file = fixture.follow("m.csv", FileState::default());
    let mut batch = Batch::default();
    file.finish(&mut batch).unwrap();
    assert!((1..=4097).contains(&batch.readings.len()), "{}", batch.readings.len());
    let last = batch.readings.last().unwrap();
    assert_eq!((last.metric.as_str(), last.value, last.step), ("loss", 0.5, Some(200_000)));
    let steps: Vec<_> = batch.readings.iter().map(|r| r.step.unwrap()).collect();
    assert!(steps.windows(2).all(|w| w[0] + 1 == w[1]), "the newest rows, without a gap");
    assert!(file.counters().flooded_lines > 0 && file.counters().dropped_readings > 0);
}

/// A writer appends faster than the rows can be read while the end of the job is read. The end comes all the same:
/// what counts is how much was read, however slow the machine is.
#[test]
fn the_end_of_a_job_comes_while_a_writer_appends() {
    const MOST_BYTES: usize = 512 << 20;
    const MOST_BYTES_READ: u64 = 2 << 20;
    const SHORTEST_ROW: u64 = "0,0.5\n".len() as u64;
    let fixture = Fixture::new();
    let block: String = (0..8000).map(|i| format!("{i},0.5\n")).collect();
    fixture.append("m.csv", format!("step,loss\n{block}"));
    let is_over = AtomicBool::new(false);
    let append = || {
        let mut written = 0;
        while !is_over.load(Ordering::Relaxed) && written < MOST_BYTES {
            fixture.append("m.csv", &block);
            written += block.len();
            std::thread::sleep(Duration::from_micros(100));
        }
        written
    };
    let (written, ended) = std::thread::scope(|scope| {
        let writer = scope.spawn(append);
        let ended = std::panic::catch_unwind(|| {
            let mut file = fixture.follow("m.csv", FileState::default());
            let mut batch = Batch::default();
            file.finish(&mut batch).unwrap();
            (batch.readings.len(), file.counters().dropped_readings)
        });
        is_over.store(true, Ordering::Relaxed);
        (writer.join().unwrap(), ended)
    });
    let (kept, dropped) = ended.unwrap();
    assert!((1..=4097).contains(&kept), "{kept}");
    let rows = kept as u64 + dropped;
    assert!(rows * SHORTEST_ROW <= MOST_BYTES_READ, "{rows} rows were read of {written} bytes");
    println!("fault: injected=1 violations=0 appended_bytes={written}");
}

#[test]
fn a_huge_line_is_passed_over() {
    let fixture = Fixture::new();
    fixture.append("m", "loss=1\n");
    fixture.append("m", vec![b'x'; 10 << 20]);
    fixture.append("m", "\nloss=2\n");
    let mut file = fixture.follow("m", FileState::default());
    let mut batch = Batch::default();
    for _ in 0..30 {
        file.poll(usize::MAX, &mut batch).unwrap();
    }
    assert_eq!(batch.readings.iter().map(|r| r.value).collect::<Vec<_>>(), [1.0, 2.0]);
    assert_eq!(file.counters().long_lines, 1);
    println!("fault: injected=1 violations=0");
}

#[test]
fn a_fifo_or_a_link_out_of_the_folder_is_an_error_and_does_not_block() {
    let fixture = Fixture::new();
    nix::unistd::mkfifo(&fixture.at("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", fixture.at("link")).unwrap();
    for name in ["fifo", "link"] {
        assert!(fixture.follow(name, FileState::default()).poll(9, &mut Batch::default()).is_err(), "{name}");
    }
}

#[derive(Debug, Clone)]
enum Act {
    Append(u8),
    Torn,
    Rotate,
    Truncate,
    Replace,
    Restart,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1u8..5).prop_map(Act::Append),
        2 => Just(Act::Torn),
        1 => Just(Act::Rotate),
        1 => Just(Act::Truncate),
        1 => Just(Act::Replace),
        2 => Just(Act::Restart),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Numbered lines through any sequence of events, read after each: every line is given exactly
    /// once.
    #[test]
    fn no_line_is_lost_or_doubled(acts in proptest::collection::vec(act(), 1..40)) {
        let fixture = Fixture::new();
        let mut file = fixture.follow("l", FileState::default());
        let (mut next, mut torn, mut rotations) = (0u32, false, 0);
        let mut got = Vec::new();
        for act in &acts {
            match act {
                Act::Append(n) => for _ in 0..*n {
                    let line = if std::mem::take(&mut torn) { format!("{next}\n") } else { format!("loss={next}\n") };
                    fixture.append("l", line);
                    next += 1;
                },
                // The line is begun; the next append ends it.
                Act::Torn => if !std::mem::replace(&mut torn, true) { fixture.append("l", "loss=") },
                Act::Rotate => if !torn && fixture.at("l").exists() {
                    rotations += 1;
                    fs::rename(fixture.at("l"), fixture.at(&format!("l.{rotations}"))).unwrap();
                },
                Act::Truncate => if !torn && fixture.at("l").exists() { fs::write(fixture.at("l"), "").unwrap() },
                Act::Replace => if !torn && fixture.at("l").exists() {
                    let text = fs::read(fixture.at("l")).unwrap();
                    fs::write(fixture.at("new"), text).unwrap();
                    fs::rename(fixture.at("new"), fixture.at("l")).unwrap();
                },
                Act::Restart => {
                    let kept = serde_json::to_string(&file.state()).unwrap();
                    file = fixture.follow("l", serde_json::from_str(&kept).unwrap());
                }
            }
            for _ in 0..2 {
                let mut batch = Batch::default();
                file.poll(3, &mut batch).unwrap();
                got.extend(batch.readings.iter().map(|r| r.value as u32));
            }
        }
        for _ in 0..100 {
            let mut batch = Batch::default();
            file.poll(3, &mut batch).unwrap();
            got.extend(batch.readings.iter().map(|r| r.value as u32));
        }
        prop_assert_eq!(got, (0..next).collect::<Vec<_>>());
    }

    #[test]
    fn any_file_is_survived(chunks in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..6)) {
        let fixture = Fixture::new();
        let mut file = fixture.follow("m.csv", FileState::default());
        let mut events = EventFiles::new(fixture.root.clone(), BTreeMap::new());
        events.follow(Path::new("m.csv"));
        let mut batch = Batch::default();
        for chunk in chunks {
            fixture.append("m.csv", chunk);
            file.poll(100, &mut batch).unwrap();
            events.poll(100, &mut batch);
        }
        file.finish(&mut batch).unwrap();
        prop_assert!(batch.readings.iter().all(|r| r.value.is_finite()));
    }
}

#[test]
fn a_tail_shows_again_what_was_not_consumed() {
    let fixture = Fixture::new();
    fixture.append("f", "abc");
    let mut tail = FileTail::new(fixture.root.clone(), Path::new("f"), Position::default(), true);
    assert_eq!((tail.fill().unwrap(), tail.data()), (Change::More, &b"abc"[..]));
    tail.consume(1);
    assert_eq!((tail.fill().unwrap(), tail.data()), (Change::More, &b"bc"[..]));
    assert_eq!(tail.fill().unwrap(), Change::Same);
    fixture.append("f", "d");
    assert_eq!((tail.fill().unwrap(), tail.data()), (Change::More, &b"bcd"[..]));
    tail.consume(3);
    fs::write(fixture.at("f"), "xyzuvw").unwrap();
    assert_eq!((tail.fill().unwrap(), tail.data()), (Change::Rewritten, &b"xyzuvw"[..]));
}
