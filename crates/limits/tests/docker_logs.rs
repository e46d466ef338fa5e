//! Output of real containers, read to the last line and once, though readers and the engine come and go.

use crate::dockerd::{Dockerd, PATIENCE, next_within};
use bollard::models::HostConfig;
use gainshare_limits::docker::{Engine, LogChunk, LogCursor};
use std::time::Duration;

/// Counts on both outputs, in bursts, so that entries share seconds but not always nanoseconds.
const COUNT: &str = "i=0; while [ $i -lt 600 ]; do echo out $i; [ $((i % 3)) = 0 ] && echo err $i >&2; i=$((i + 1)); \
                     [ $((i % 20)) = 0 ] && sleep 0.1; done; printf 'no line end'";

/// Reads up to `most` chunks; returns them and where to go on.
fn read(engine: &Engine, id: &str, from: LogCursor, most: usize) -> (Vec<LogChunk>, LogCursor) {
    let mut channel = engine.follow_logs(id, from);
    let mut chunks = Vec::new();
    while chunks.len() < most {
        match next_within(&mut channel, PATIENCE) {
            Some(chunk) => chunks.push(chunk),
            None => break,
        }
    }
    let cursor = chunks.last().map_or(from, |chunk| chunk.cursor);
    (chunks, cursor)
}

fn text(chunks: &[LogChunk], is_stderr: bool) -> String {
    let bytes: Vec<u8> = chunks.iter().filter(|c| c.is_stderr == is_stderr).flat_map(|c| c.bytes.clone()).collect();
    String::from_utf8(bytes).unwrap()
}

fn expected(word: &str, every: usize) -> String {
    (0..600).step_by(every).map(|i| format!("{word} {i}\n")).collect()
}

#[test]
#[ignore = "needs Docker"]
fn output_arrives_once_across_breaks_of_reader_and_engine() {
    let mut docker = Dockerd::start_to_restart();
    let id = docker.run("counts", COUNT, &[], HostConfig::default());
    let terminal =
        docker.run_as("terminal", "echo one; echo two >&2; printf 'three'", &[], HostConfig::default(), true);
    let long =
        docker.run("long", "head -c 40000 /dev/zero | tail -c 40000; echo; echo end", &[], HostConfig::default());
    let engine = docker.engine();

    // A daemon that is restarted again and again, each time going on from its journal.
    let (mut all, mut cursor) = (Vec::new(), LogCursor::default());
    for most in [1, 7, 100, 53] {
        let (chunks, after) = read(&engine, &id, cursor, most);
        assert_eq!(chunks.len(), most);
        all.extend(chunks);
        let journal = serde_json::to_string(&after).unwrap();
        cursor = serde_json::from_str(&journal).unwrap();
    }

    // One reader that stays while the engine restarts.
    let mut channel = engine.follow_logs(&id, cursor);
    all.push(next_within(&mut channel, PATIENCE).unwrap());
    docker.shut_down();
    std::thread::sleep(Duration::from_millis(200));
    docker.launch().unwrap();
    while let Some(chunk) = next_within(&mut channel, PATIENCE) {
        all.push(chunk);
    }
    assert_eq!(text(&all, false), expected("out", 1) + "no line end");
    assert_eq!(text(&all, true), expected("err", 3));

    // From the end there is nothing more; from a time there is only what came after it.
    let end = all.last().unwrap().cursor;
    assert_eq!(read(&engine, &id, end, 1).0, []);
    let future = LogCursor::since_ns(4_000_000_000_000_000_000);
    assert_eq!(read(&engine, &id, future, 1).0, []);

    let (chunks, _) = read(&engine, &terminal, LogCursor::default(), 100);
    assert_eq!(text(&chunks, false), "one\r\ntwo\r\nthree");
    let (chunks, _) = read(&engine, &long, LogCursor::default(), 100);
    let expected = [vec![0u8; 40_000], b"\nend\n".to_vec()].concat();
    assert_eq!(chunks.iter().flat_map(|c| c.bytes.clone()).collect::<Vec<u8>>(), expected);
    assert!(chunks.len() >= 3 && chunks.iter().all(|c| c.bytes.len() <= 16 << 10), "in bounded pieces");

    // A container that is not there is no reason to wait for ever.
    assert_eq!(read(&engine, "0123456789ab", LogCursor::default(), 1).0, []);
}
