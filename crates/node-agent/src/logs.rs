//! Reads the output of one container from the files that the kubelet keeps:
//! `/var/log/pods/NAMESPACE_POD_UID/CONTAINER/RUN.log`.
//!
//! **How.** `RUN` counts the starts of the container; the highest number is the present run. When a file is
//! full, the kubelet renames it to `RUN.log.DATE`, lets the container runtime begin a new file, and compresses
//! all renamed files but the newest. A node agent keeps nothing on disk. At its start it reads the files that
//! exist (renamed files first, compressed files not at all), so that a job's first loss is known again. Of a
//! long history only the beginning ([`HEAD_BYTES`]) and the end ([`TAIL_BYTES`]) are read: the beginning gives
//! the scale of the curve, the end its present value.
//!
//! **Properties.** While a container is read, a rotation or a restart neither loses nor repeats its output. One
//! call reads at most [`MAX_WINDOWS`] windows, so that no job delays the others. Only regular files below the
//! container's folder are opened.

use super::cri::Decoder;
use gainshare_core::model::{Span, Time};
use gainshare_progress::{Change, FileTail, Position, Root};
use std::collections::VecDeque;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// How much of the beginning and of the end of a long history is read.
const HEAD_BYTES: u64 = 1 << 20;
const TAIL_BYTES: u64 = 4 << 20;

/// How often the folder is listed.
const LIST_PACE: Span = Span::from_secs(1);

/// Windows that one call reads. A window has at most 256 KiB.
const MAX_WINDOWS: usize = 8;

/// An entry has at most 16 KiB and a short header. A longer line is not an entry and is dropped.
const MAX_ENTRY_BYTES: usize = 128 * 1024;

/// A piece of a container's output.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece<'a> {
    /// The container has started: the pieces after this one belong to the new run.
    Started,
    /// Bytes as the container printed them, and their time (nanoseconds since 1970).
    Text { at_ns: u64, text: &'a [u8] },
}

/// The output of one container; see the module documentation.
#[derive(Debug)]
pub(crate) struct ContainerLog {
    folder: PathBuf,
    open: Option<RunLog>,
    next_list: Time,
    dropped: u64,
}

/// The files of one run of the container.
#[derive(Debug)]
struct RunLog {
    root: Arc<Root>,
    run: u64,
    /// Oldest first. The container writes into the last one.
    files: VecDeque<LogFile>,
    decoder: Decoder,
}

#[derive(Debug)]
struct LogFile {
    tail: FileTail,
    /// Bytes consumed so far.
    at: u64,
    /// The part that is not read.
    skipped: std::ops::Range<u64>,
    /// Reading begins within a line: the rest of that line is dropped.
    is_within_line: bool,
}

impl ContainerLog {
    /// `logs` is the place where the host's `/var/log/pods` is mounted. The API server allows no name that could
    /// leave the folder. A name that is not a single part of a path is refused all the same.
    pub(crate) fn new(logs: &Path, namespace: &str, pod: &str, uid: &str, container: &str) -> Option<ContainerLog> {
        let pod_folder = format!("{namespace}_{pod}_{uid}");
        let is_plain = |name: &str| !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\0']);
        if !is_plain(&pod_folder) || !is_plain(container) {
            return None;
        }
        let folder = logs.join(pod_folder).join(container);
        Some(ContainerLog { folder, open: None, next_list: Time::ZERO, dropped: 0 })
    }

    /// Passes new output to `take`; `true` if there is more output than one call reads.
    pub(crate) fn read_new(&mut self, now: Time, mut take: impl FnMut(Piece<'_>)) -> bool {
        let mut windows = MAX_WINDOWS;
        if now >= self.next_list || self.next_list == Time::ZERO {
            self.next_list = now + LIST_PACE;
            if let Some((root, run)) = self.newest_run() {
                if self.open.as_ref().is_some_and(|o| o.run < run) {
                    // First the rest of the run before.
                    if self.read(&mut windows, &mut take) {
                        self.next_list = now;
                        return true;
                    }
                }
                if self.open.as_ref().is_none_or(|o| o.run != run) {
                    self.dropped += self.open.take().map_or(0, |o| o.decoder.dropped());
                    self.open = Some(RunLog::open(root, &self.folder, run));
                    take(Piece::Started);
                }
            }
        }
        self.read(&mut windows, &mut take)
    }

    /// Lines that are not entries of a log, and lines that are too long.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped + self.open.as_ref().map_or(0, |o| o.decoder.dropped())
    }

    fn newest_run(&self) -> Option<(Arc<Root>, u64)> {
        let names = std::fs::read_dir(&self.folder).ok()?.flatten();
        let run = names.filter_map(|e| run_of(&e.file_name())).max()?;
        let root = match &self.open {
            Some(open) => open.root.clone(),
            None => Arc::new(Root::open(&self.folder).ok()?),
        };
        Some((root, run))
    }

    fn read(&mut self, windows: &mut usize, take: &mut impl FnMut(Piece<'_>)) -> bool {
        let Some(open) = &mut self.open else { return false };
        while let Some(file) = open.files.front_mut() {
            while file.read_window(&mut open.decoder, take) {
                *windows = windows.saturating_sub(1);
                if *windows == 0 {
                    return true;
                }
            }
            if open.files.len() == 1 {
                break;
            }
            open.files.pop_front();
        }
        false
    }
}

impl RunLog {
    fn open(root: Arc<Root>, folder: &Path, run: u64) -> RunLog {
        let live = format!("{run}.log");
        let mut renamed: Vec<(String, u64)> = std::fs::read_dir(folder)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|e| Some((e.file_name().into_string().ok()?, e.metadata().ok()?.len())))
            .filter(|(name, _)| is_renamed(name, &live))
            .collect();
        // Names sort by the date in them.
        renamed.sort();
        let live_size = std::fs::metadata(folder.join(&live)).map_or(0, |m| m.len());
        let sizes: Vec<u64> = renamed.iter().map(|(_, size)| *size).chain([live_size]).collect();
        let names = renamed.into_iter().map(|(name, _)| (name, false)).chain([(live, true)]);
        let files = names.zip(skipped_parts(&sizes)).map(|((name, hold), skipped)| {
            let mut tail = FileTail::new(root.clone(), Path::new(&name), Position::default(), hold);
            // Opened now: a file that is renamed while older files are read stays the same file.
            let _ = tail.fill();
            LogFile { tail, at: 0, skipped, is_within_line: false }
        });
        let files = files.collect();
        RunLog { root, run, files, decoder: Decoder::default() }
    }
}

impl LogFile {
    /// Reads one window; `false` if there is no more output at present.
    fn read_window(&mut self, decoder: &mut Decoder, take: &mut impl FnMut(Piece<'_>)) -> bool {
        match self.tail.fill() {
            Ok(Change::More) => {}
            Ok(Change::Rotated | Change::Rewritten) => (self.at, self.skipped, self.is_within_line) = (0, 0..0, false),
            // The file was filled once when it was opened, so there may be data without a change.
            Ok(Change::Same) | Err(_) if self.tail.data().is_empty() => return false,
            Ok(Change::Same) | Err(_) => {}
        }
        if self.at == self.skipped.start && !self.skipped.is_empty() {
            let length = self.skipped.end - self.skipped.start;
            if self.tail.skip(length) {
                self.at += length;
                self.is_within_line = true;
            }
            self.skipped = 0..0;
            return true;
        }
        let data = self.tail.data();
        let before_skipped = usize::try_from(self.skipped.start.saturating_sub(self.at)).unwrap_or(usize::MAX);
        let limit = if self.skipped.is_empty() { data.len() } else { before_skipped.min(data.len()) };
        let mut used = 0;
        while let Some(length) = data[used..limit].iter().position(|b| *b == b'\n') {
            let line = &data[used..used + length];
            used += length + 1;
            if std::mem::take(&mut self.is_within_line) {
                continue;
            }
            decoder.entry(line, |at_ns, text| take(Piece::Text { at_ns, text }));
        }
        if limit < data.len() {
            // The skipped part begins within a line.
            used = limit;
        } else if used == 0 && limit >= MAX_ENTRY_BYTES {
            self.is_within_line = true;
            used = limit;
        }
        self.tail.consume(used);
        self.at += used as u64;
        used > 0
    }
}

/// The part of each file that is not read, so that of all files together the first [`HEAD_BYTES`] and the last
/// [`TAIL_BYTES`] are read.
fn skipped_parts(sizes: &[u64]) -> Vec<std::ops::Range<u64>> {
    let total: u64 = sizes.iter().sum();
    let skipped = HEAD_BYTES..total.saturating_sub(TAIL_BYTES).max(HEAD_BYTES);
    let mut begin = 0;
    let of_file = |size: &u64| {
        let own = skipped.start.clamp(begin, begin + size) - begin..skipped.end.clamp(begin, begin + size) - begin;
        begin += size;
        own
    };
    sizes.iter().map(of_file).collect()
}

/// The number of the run: `3.log` belongs to the third restart.
fn run_of(name: &OsStr) -> Option<u64> {
    let digits = name.to_str()?.strip_suffix(".log")?;
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok())?
}

/// Accepts `3.log.20261115-120000`, but neither `….gz` nor the kubelet's `….tmp`.
fn is_renamed(name: &str, live: &str) -> bool {
    let date = name.strip_prefix(live).and_then(|rest| rest.strip_prefix('.'));
    date.is_some_and(|d| !d.is_empty() && d.bytes().all(|b| b.is_ascii_digit() || b == b'-'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::OpenOptions;
    use std::io::Write;

    struct LogFolder {
        logs: tempfile::TempDir,
        log: ContainerLog,
        clock: u64,
    }

    impl LogFolder {
        fn new() -> LogFolder {
            let logs = tempfile::tempdir().unwrap();
            std::fs::create_dir_all(logs.path().join("ns_pod_uid/main")).unwrap();
            let log = ContainerLog::new(logs.path(), "ns", "pod", "uid", "main").unwrap();
            LogFolder { logs, log, clock: 0 }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.logs.path().join("ns_pod_uid/main").join(name)
        }

        fn write(&self, name: &str, text: &str) {
            let mut file = OpenOptions::new().append(true).create(true).open(self.path(name)).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        }

        /// Writes each word as a line of its own.
        fn print(&self, name: &str, words: &str) {
            for word in words.split(' ') {
                self.write(name, &format!("2026-11-15T12:00:00Z stdout F {word}\n"));
            }
        }

        fn read(&mut self) -> String {
            let mut out = String::new();
            loop {
                self.clock += 2_000_000;
                let more = self.log.read_new(Time(self.clock), |piece| match piece {
                    Piece::Started => out.push('|'),
                    Piece::Text { text, .. } => out.push_str(std::str::from_utf8(text).unwrap()),
                });
                if !more {
                    return out.replace('\n', " ").trim_end().to_owned();
                }
            }
        }
    }

    #[test]
    fn a_rotation_neither_loses_nor_repeats_output() {
        let mut b = LogFolder::new();
        assert_eq!(b.read(), "");
        b.print("0.log", "a b");
        assert_eq!(b.read(), "|a b");
        b.print("0.log", "c");
        std::fs::rename(b.path("0.log"), b.path("0.log.20261115-120000")).unwrap();
        b.print("0.log.20261115-120000", "d");
        b.print("0.log", "e f");
        assert_eq!(b.read(), "c d e f");
        std::fs::rename(b.path("0.log"), b.path("0.log.20261115-120100")).unwrap();
        assert_eq!(b.read(), "");
        b.print("0.log", "g");
        assert_eq!(b.read(), "g");
    }

    #[test]
    fn a_restart_comes_after_the_rest_of_the_run_before_it() {
        let mut b = LogFolder::new();
        b.print("0.log", "a");
        assert_eq!(b.read(), "|a");
        b.print("0.log", "b");
        b.print("1.log", "c");
        assert_eq!(b.read(), "b |c");
        std::fs::remove_file(b.path("0.log")).unwrap();
        b.print("10.log", "d");
        b.print("9.log", "never");
        assert_eq!(b.read(), "|d");
    }

    #[test]
    fn history_is_read_oldest_first_and_without_compressed_files() {
        let mut b = LogFolder::new();
        b.print("2.log", "d");
        b.print("2.log.20261115-120000", "b");
        b.print("2.log.20261115-130000", "c");
        b.print("2.log.20261115-110000.gz", "no");
        b.print("2.log.20261115-110000.tmp", "no");
        b.print("1.log", "no");
        b.print("x.log", "no");
        assert_eq!(b.read(), "|b c d");
    }

    #[test]
    fn half_a_line_waits_for_its_other_half() {
        let mut b = LogFolder::new();
        b.write("0.log", "2026-11-15T12:00:00Z stdout F lo");
        assert_eq!(b.read(), "|");
        b.write("0.log", "ss\n");
        assert_eq!(b.read(), "loss");
    }

    #[test]
    fn of_a_long_history_the_beginning_and_the_end_are_read() {
        let mut b = LogFolder::new();
        let filler = "2026-11-15T12:00:00Z stdout F noise noise noise noise noise noise\n".repeat(8 << 20 >> 6);
        b.print("0.log.20261115-120000", "first");
        b.write("0.log.20261115-120000", &filler);
        b.write("0.log", &filler);
        b.print("0.log", "last");
        let read = b.read();
        assert!(read.starts_with("|first noise") && read.ends_with("noise last"), "{}", &read[..40]);
        let lines = read.split("noise noise noise noise noise noise").count() as u64;
        let expected = (HEAD_BYTES + TAIL_BYTES) / 66;
        assert!(lines.abs_diff(expected) < 10, "{lines} lines for {expected}");
        // Both ends of the skipped part are within a line; neither half is read as an entry.
        assert_eq!(b.log.dropped(), 0);
        b.print("0.log", "live");
        assert_eq!(b.read(), "live");
    }

    #[test]
    fn a_file_without_any_line_end_does_not_stop_the_rest() {
        let mut b = LogFolder::new();
        b.write("0.log", &"x".repeat(3 << 20));
        assert_eq!(b.read(), "|");
        b.write("0.log", "\n");
        b.print("0.log", "a");
        assert_eq!(b.read(), "a");
    }

    #[test]
    fn names_cannot_leave_the_folder() {
        assert!(ContainerLog::new(Path::new("/l"), "../x", "p", "u", "c").is_none());
        assert!(ContainerLog::new(Path::new("/l"), "n", "p", "u", "..").is_none());
        assert!(ContainerLog::new(Path::new("/l"), "n", "p", "u", "a/b").is_none());
        assert!(ContainerLog::new(Path::new("/l"), "n", "p", "u", "main").is_some());
    }

    proptest! {
        #[test]
        fn what_is_left_out_is_one_piece(sizes in prop::collection::vec(0u64..(8 << 20), 1..6)) {
            let total: u64 = sizes.iter().sum();
            let parts = skipped_parts(&sizes);
            let left_out: u64 = parts.iter().map(|part| part.end - part.start).sum();
            prop_assert_eq!(left_out, total.saturating_sub(HEAD_BYTES + TAIL_BYTES));
            for (part, size) in parts.iter().zip(&sizes) {
                prop_assert!(part.start <= part.end && part.end <= *size);
            }
        }
    }
}
