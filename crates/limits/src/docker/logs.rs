//! The output of a container, complete and once, across restarts of the engine and of the daemon.
//!
//! **Problem.** The engine's log stream breaks when the engine restarts, can be resumed only at a whole
//! second, and has no offsets; a training job's losses must neither be lost nor counted twice.
//!
//! **Approach.** Every entry comes with the engine's time stamp in nanoseconds. A [`LogCursor`] remembers,
//! for standard output and standard error apart, the newest stamp seen and how many entries had it. After a
//! break the stream is asked for from a little before the cursor, and entries the cursor covers are skipped.
//! The two are kept apart because each is stamped by its own writer: within one of them the order of the
//! stamps is the order of the entries, between them it is not. Each delivered chunk carries the cursor after
//! it: a reader that stores the cursor together with the effect of the chunk can resume there.
//!
//! Entries go through a bounded channel. When its reader is slow, the follower stops asking the engine,
//! which keeps the entries in the container's log: nothing is dropped, memory stays bounded, and the
//! container never waits.
//!
//! **Limits, all the engine's.** It hands out an entry at a line end or after 16 KiB, so a progress bar
//! that only ever returns the carriage arrives late. A log rotated away before it was read is lost. If the
//! machine's clock is set back, entries stamped before the cursor are skipped after the next break.

use super::engine::{Engine, is_missing, parse_time_ns};
use bollard::container::LogOutput;
use bollard::query_parameters::LogsOptions;
use futures_util::StreamExt;
use gainshare_core::backoff::Backoff;
use serde::{Deserialize, Serialize};
use std::time::Duration;
use tokio::sync::mpsc;

/// Where in a container's output a reader is. The default is the beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LogCursor {
    stdout: StreamMark,
    stderr: StreamMark,
}

/// The newest stamp seen and how many entries had it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
struct StreamMark {
    ns: u64,
    entries: u32,
}

/// Some bytes a container wrote: a line, or a part of a very long one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogChunk {
    pub is_stderr: bool,
    pub bytes: Vec<u8>,
    /// Where to go on after this chunk.
    pub cursor: LogCursor,
}

/// Chunks are at most 16 KiB, so that fifty containers whose reader stands still take 12 MiB at most.
const CHANNEL: usize = 16;
const RETRIES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
/// How far the stamps of the two outputs may lie apart in the wrong order, with much to spare.
const SKEW_NS: u64 = 10_000_000_000;
/// The length at which the engine cuts an entry, and that of its time stamp.
const ENTRY_BYTES: usize = 16 * 1024;
const STAMP_BYTES: usize = "2026-11-15T16:39:02.044688274Z".len();

impl LogCursor {
    /// Begins with what was written at this time or later.
    pub fn since_ns(ns: u64) -> LogCursor {
        let mark = StreamMark { ns, entries: 0 };
        LogCursor { stdout: mark, stderr: mark }
    }

    /// From when on the engine must be asked again.
    fn ask_from_s(&self) -> i32 {
        let (older, newer) = (self.stdout.ns.min(self.stderr.ns), self.stdout.ns.max(self.stderr.ns));
        let from_ns = older.max(newer.saturating_sub(SKEW_NS));
        i32::try_from(from_ns / 1_000_000_000).unwrap_or(i32::MAX)
    }
}

impl Engine {
    /// Follows a container's output from `from` on. The channel closes when the container has ended and all
    /// of its output was delivered, or the container is gone: `is_closed() && is_empty()` asks that without
    /// waiting. Dropping the receiver ends the follower.
    pub fn follow_logs(&self, id: &str, from: LogCursor) -> mpsc::Receiver<LogChunk> {
        let (out, chunks) = mpsc::channel(CHANNEL);
        let reader = Reader { engine: self.clone(), id: id.to_owned(), cursor: from, out };
        self.spawn(reader.run());
        chunks
    }
}

struct Reader {
    engine: Engine,
    id: String,
    cursor: LogCursor,
    out: mpsc::Sender<LogChunk>,
}

/// The receiver was dropped.
struct ReaderGone;

impl Reader {
    async fn run(mut self) {
        let mut retries = RETRIES;
        loop {
            let before = self.cursor;
            let Ok(broken) = self.pass(true).await else { return };
            if let Some(error) = broken {
                if is_missing(&error) {
                    return;
                }
                tracing::debug!(container = self.id, %error, "the log stream broke; reconnecting");
            }
            match self.engine.inspect(&self.id).await {
                Err(crate::RuntimeError::Gone { .. }) => return,
                // The stream may have ended before the last entries: one pass over the stored log delivers them.
                Ok(container) if has_ended(&container) => match self.pass(false).await {
                    Ok(None) | Err(ReaderGone) => return,
                    Ok(Some(error)) if is_missing(&error) => return,
                    Ok(Some(_)) => {}
                },
                _ => {}
            }
            if self.cursor != before {
                retries.reset();
            }
            tokio::select! {
                () = tokio::time::sleep(retries.next_pause()) => {}
                () = self.out.closed() => return,
            }
        }
    }

    /// Delivers entries until the stream ends (`None`) or breaks.
    async fn pass(&mut self, follow: bool) -> Result<Option<bollard::errors::Error>, ReaderGone> {
        let options = LogsOptions {
            follow,
            stdout: true,
            stderr: true,
            since: self.cursor.ask_from_s(),
            until: 0,
            timestamps: true,
            tail: "all".to_owned(),
        };
        let docker = self.engine.docker.clone();
        let mut stream = std::pin::pin!(docker.logs(&self.id, Some(options)));
        let mut skip = DuplicateFilter::after(self.cursor);
        let out = self.out.clone();
        loop {
            let next = tokio::select! {
                next = stream.next() => next,
                () = out.closed() => return Err(ReaderGone),
            };
            let output = match next {
                Some(Ok(output)) => output,
                Some(Err(error)) => return Ok(Some(error)),
                None => return Ok(None),
            };
            let is_stderr = matches!(output, LogOutput::StdErr { .. });
            let is_console = matches!(output, LogOutput::Console { .. });
            for (stamp_ns, bytes) in entries(&output.into_bytes(), is_console) {
                let Some(mark) = skip.advance(is_stderr, stamp_ns) else { continue };
                let at = if is_stderr { &mut self.cursor.stderr } else { &mut self.cursor.stdout };
                *at = mark;
                let chunk = LogChunk { is_stderr, bytes: bytes.to_vec(), cursor: self.cursor };
                self.out.send(chunk).await.map_err(|_| ReaderGone)?;
            }
        }
    }
}

fn has_ended(container: &bollard::models::ContainerInspectResponse) -> bool {
    container.state.as_ref().is_some_and(|s| s.running != Some(true) && s.restarting != Some(true))
}

/// The entries of one frame, each without its stamp. A frame of a container without a terminal is one
/// entry. A terminal's output is not framed; it is cut at line ends by the client library, and entries of a
/// line longer than the engine's limit follow each other at exactly that distance.
fn entries(frame: &[u8], is_console: bool) -> Vec<(u64, &[u8])> {
    let mut found = Vec::new();
    let mut rest = frame;
    while let Some((stamp_ns, body)) = split_stamp(rest) {
        let cut = is_console && body.len() > ENTRY_BYTES && split_stamp(&body[ENTRY_BYTES..]).is_some();
        let (entry, after) = body.split_at(if cut { ENTRY_BYTES } else { body.len() });
        found.push((stamp_ns, entry));
        rest = after;
    }
    found
}

fn split_stamp(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (stamp, rest) = bytes.split_at_checked(STAMP_BYTES)?;
    Some((parse_time_ns(std::str::from_utf8(stamp).ok()?)?, rest.strip_prefix(b" ")?))
}

/// Separates entries that were delivered before a break from new ones.
struct DuplicateFilter {
    seen: LogCursor,
    at: LogCursor,
}

impl DuplicateFilter {
    fn after(seen: LogCursor) -> DuplicateFilter {
        DuplicateFilter { seen, at: LogCursor::default() }
    }

    /// The cursor's mark after this entry if it is new, `None` if it was delivered before.
    fn advance(&mut self, is_stderr: bool, stamp_ns: u64) -> Option<StreamMark> {
        let (seen, at) =
            if is_stderr { (self.seen.stderr, &mut self.at.stderr) } else { (self.seen.stdout, &mut self.at.stdout) };
        let entries = if at.ns == stamp_ns { at.entries.saturating_add(1) } else { 1 };
        *at = StreamMark { ns: stamp_ns, entries };
        let is_new = stamp_ns > seen.ns || (stamp_ns == seen.ns && entries > seen.entries);
        is_new.then_some(*at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn entries_of_a_terminal_are_cut_where_the_engine_cut_them() {
        let stamp = b"2026-11-15T16:39:02.044688274Z ".as_slice();
        let long = vec![b'x'; ENTRY_BYTES];
        let frame = [stamp, &long, stamp, b"tail\r\n"].concat();
        let found = entries(&frame, true);
        assert_eq!(found.iter().map(|(_, b)| b.len()).collect::<Vec<_>>(), [ENTRY_BYTES, 6]);
        assert_eq!(entries(&frame, false).len(), 1, "a framed entry is never cut");
        // Something that looks like a stamp elsewhere is the job's own text.
        let quoted = [stamp, b"at ", stamp, b"\n"].concat();
        assert_eq!(entries(&quoted, true).len(), 1);
        for garbage in [b"".as_slice(), b"no stamp", b"2026-11-15T16:39:02.044688274Z", &[0xff; 64]] {
            assert!(entries(garbage, true).is_empty());
        }
    }

    #[test]
    fn asks_again_from_a_little_before_the_cursor() {
        let s = 1_000_000_000;
        let cursor = |stdout: u64, stderr: u64| LogCursor {
            stdout: StreamMark { ns: stdout * s, entries: 1 },
            stderr: StreamMark { ns: stderr * s, entries: 1 },
        };
        assert_eq!(LogCursor::default().ask_from_s(), 0);
        assert_eq!(cursor(1000, 998).ask_from_s(), 998);
        assert_eq!(cursor(1000, 0).ask_from_s(), 990, "an output that never spoke must not cost the whole log");
    }

    proptest! {
        /// However often the stream breaks and wherever it is resumed, every entry arrives exactly once and in order.
        #[test]
        fn nothing_lost_nothing_doubled(
            gaps in prop::collection::vec((0u64..3, any::<bool>()), 1..60),
            breaks in prop::collection::vec(0usize..60, 0..6),
        ) {
            let mut now = 5_000_000_000_000u64;
            let log: Vec<(usize, bool, u64)> = gaps.iter().enumerate().map(|(i, &(gap, is_stderr))| {
                now += gap * 400_000_000;
                (i, is_stderr, now)
            }).collect();
            let (mut cursor, mut got) = (LogCursor::default(), Vec::new());
            for stop in breaks.into_iter().chain([usize::MAX]) {
                let from_ns = cursor.ask_from_s() as u64 * 1_000_000_000;
                let mut skip = DuplicateFilter::after(cursor);
                for &(i, is_stderr, ns) in log.iter().filter(|e| e.2 >= from_ns).take(stop) {
                    if let Some(mark) = skip.advance(is_stderr, ns) {
                        *(if is_stderr { &mut cursor.stderr } else { &mut cursor.stdout }) = mark;
                        got.push(i);
                    }
                }
            }
            prop_assert_eq!(got, (0..log.len()).collect::<Vec<_>>());
        }
    }
}
