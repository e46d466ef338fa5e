//! The format in which container runtimes keep a container's output: `2026-11-15T12:00:00.123456789Z stdout F text`.
//!
//! **Problem.** Every line of output has a time stamp, the name of its stream and tags. A line that is longer
//! than the runtime's buffer (16 KiB) comes in parts, all but the last tagged `P`. Parts of standard output and
//! of standard error may be interleaved. A progress bar that prints carriage returns never ends its line, so it
//! consists of parts only.
//!
//! **How.** [`Decoder`] gets whole entries, joins the parts of each stream, and returns the lines as the
//! container printed them, each with its line end and the time of its last part. A part that contains a carriage
//! return or a backspace is a redraw: the text up to the last of them is returned at once.
//!
//! **Properties.** The lines are those that were printed: `parts_make_the_line_whole`, `streams_do_not_mix`.
//! Memory is bounded by [`MAX_LINE_BYTES`] for each stream; a longer line is dropped and counted. No input causes
//! a panic; a line that is not an entry is dropped and counted.

/// The longest line that is joined from parts. No report of a trainer is longer; the output collector has the
/// same bound.
const MAX_LINE_BYTES: usize = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Stdout,
    Stderr,
}

/// One line of the log file.
#[derive(Debug, PartialEq, Eq)]
struct Entry<'a> {
    /// Nanoseconds since 1970, by the clock of the node.
    at_ns: u64,
    stream: Stream,
    is_part: bool,
    text: &'a [u8],
}

/// Joins entries to lines; see the module documentation.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    stdout: PartialLine,
    stderr: PartialLine,
    dropped: u64,
}

/// The parts of a line whose end was not read yet.
#[derive(Debug, Default)]
struct PartialLine {
    text: Vec<u8>,
    /// The line is too long: everything up to its end is dropped.
    is_too_long: bool,
}

impl Decoder {
    /// Decodes one line of the file, without its line end, and passes complete output to `take` with its time.
    pub(crate) fn entry(&mut self, line: &[u8], mut take: impl FnMut(u64, &[u8])) {
        let Some(entry) = parse(line) else {
            self.dropped += u64::from(!line.is_empty());
            return;
        };
        let pending = match entry.stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        };
        if pending.is_too_long || pending.text.len() + entry.text.len() > MAX_LINE_BYTES {
            pending.text = Vec::new();
            pending.is_too_long = entry.is_part;
            self.dropped += u64::from(!entry.is_part);
            return;
        }
        if !entry.is_part && pending.text.is_empty() {
            take_line(entry.at_ns, entry.text, &mut take);
            return;
        }
        pending.text.extend_from_slice(entry.text);
        if !entry.is_part {
            let text = std::mem::take(&mut pending.text);
            take_line(entry.at_ns, &text, &mut take);
        } else if let Some(redrawn) = pending.text.iter().rposition(|b| matches!(b, b'\r' | 0x08)) {
            take(entry.at_ns, &pending.text[..=redrawn]);
            pending.text.drain(..=redrawn);
        }
    }

    /// How many lines were not entries or too long.
    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}

fn take_line(at_ns: u64, text: &[u8], take: &mut impl FnMut(u64, &[u8])) {
    let mut line = Vec::with_capacity(text.len() + 1);
    line.extend_from_slice(text);
    line.push(b'\n');
    take(at_ns, &line);
}

fn parse(line: &[u8]) -> Option<Entry<'_>> {
    let mut fields = line.splitn(4, |b| *b == b' ');
    let at: jiff::Timestamp = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
    let stream = match fields.next()? {
        b"stdout" => Stream::Stdout,
        b"stderr" => Stream::Stderr,
        _ => return None,
    };
    // More tags may follow after colons; none is defined so far.
    let is_part = match fields.next()?.split(|b| *b == b':').next()? {
        b"P" => true,
        b"F" => false,
        _ => return None,
    };
    let at_ns = u64::try_from(at.as_nanosecond()).ok()?;
    Some(Entry { at_ns, stream, is_part, text: fields.next().unwrap_or_default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(lines: &[&[u8]]) -> Vec<String> {
        let mut decoder = Decoder::default();
        let mut out = Vec::new();
        for line in lines {
            decoder.entry(line, |_, text| out.push(String::from_utf8_lossy(text).into_owned()));
        }
        out
    }

    #[test]
    fn entries_as_runtimes_write_them() {
        let entry = parse(b"2016-10-06T00:17:09.669794202Z stdout F loss: 0.5 of 2").unwrap();
        assert_eq!((entry.stream, entry.is_part, entry.text), (Stream::Stdout, false, &b"loss: 0.5 of 2"[..]));
        assert_eq!(entry.at_ns, 1_475_713_029_669_794_202);
        // containerd writes the node's own time zone.
        let there = parse(b"2016-10-06T02:17:09.669794202+02:00 stderr P x").unwrap();
        assert_eq!((there.at_ns, there.is_part, there.stream), (entry.at_ns, true, Stream::Stderr));
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdout F ").unwrap().text, b"");
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdout F").unwrap().text, b"");
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdout P:later-tag a b").unwrap().text, b"a b");
        for bad in ["", "x", "2016-10-06T00:17:09Z", "2016-10-06T00:17:09Z stdout", "yesterday stdout F x"] {
            assert_eq!(parse(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdlog F x"), None);
        assert_eq!(parse(b"2016-10-06T00:17:09Z stdout X x"), None);
        assert_eq!(parse(b"1812-10-06T00:17:09Z stdout F x"), None);
        assert_eq!(parse(br#"{"log":"docker's own format\n","stream":"stdout"}"#), None);
    }

    #[test]
    fn streams_do_not_mix() {
        let lines = decode(&[
            b"2016-10-06T00:17:09Z stdout P loss: 0.",
            b"2016-10-06T00:17:09Z stderr F warning",
            b"2016-10-06T00:17:10Z stdout F 25",
        ]);
        assert_eq!(lines, ["warning\n", "loss: 0.25\n"]);
    }

    #[test]
    fn a_progress_bar_is_returned_before_its_line_ends() {
        let lines = decode(&[
            b"2016-10-06T00:17:09Z stderr P \r1/9 loss: 3\r2/9 loss: 2\r3/9",
            b"2016-10-06T00:17:10Z stderr P  loss: 1\r",
            b"2016-10-06T00:17:10Z stderr F done",
        ]);
        assert_eq!(lines, ["\r1/9 loss: 3\r2/9 loss: 2\r", "3/9 loss: 1\r", "done\n"]);
    }

    #[test]
    fn a_line_without_end_is_dropped_and_counted_once() {
        let mut decoder = Decoder::default();
        let part = [&b"2016-10-06T00:17:09Z stdout P "[..], &vec![b'x'; 16 * 1024]].concat();
        for _ in 0..1000 {
            decoder.entry(&part, |_, _| panic!("nothing is complete"));
            assert!(decoder.stdout.text.capacity() <= 2 * MAX_LINE_BYTES);
        }
        decoder.entry(b"2016-10-06T00:17:09Z stdout F end", |_, _| panic!("the line is too long"));
        assert_eq!(decoder.dropped(), 1);
        let mut lines = 0;
        decoder.entry(b"2016-10-06T00:17:09Z stdout F next", |_, _| lines += 1);
        assert_eq!(lines, 1);
    }

    proptest! {
        /// Any way of cutting lines into parts and of interleaving the streams gives each stream as it was printed.
        #[test]
        fn parts_make_the_line_whole(
            printed in prop::collection::vec((any::<bool>(), prop::collection::vec("[ -~é]{0,12}", 1..5)), 0..20),
            order in prop::collection::vec(any::<bool>(), 200),
        ) {
            let mut queues = [Vec::new(), Vec::new()];
            let mut expected = [String::new(), String::new()];
            for (is_err, parts) in &printed {
                let side = usize::from(*is_err);
                for (i, part) in parts.iter().enumerate() {
                    let tag = if i + 1 == parts.len() { "F" } else { "P" };
                    let stream = ["stdout", "stderr"][side];
                    queues[side].push(format!("2026-11-15T12:00:00.5Z {stream} {tag} {part}"));
                    expected[side].push_str(part);
                }
                expected[side].push('\n');
            }
            let mut queues = queues.map(|q| q.into_iter().peekable());
            let mut decoder = Decoder::default();
            let mut got = [Vec::new(), Vec::new()];
            let mut order = order.into_iter().cycle();
            while queues[0].peek().is_some() || queues[1].peek().is_some() {
                let side = usize::from(order.next() == Some(true) && queues[1].peek().is_some() || queues[0].peek().is_none());
                let line = queues[side].next().unwrap();
                decoder.entry(line.as_bytes(), |_, text| got[side].extend_from_slice(text));
            }
            prop_assert_eq!(&got[0], expected[0].as_bytes());
            prop_assert_eq!(&got[1], expected[1].as_bytes());
            prop_assert_eq!(decoder.dropped(), 0);
        }

        #[test]
        fn random_bytes_cause_no_panic_and_no_long_output(lines in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 0..20)) {
            let mut decoder = Decoder::default();
            for line in &lines {
                decoder.entry(line, |_, text| assert!(text.len() <= MAX_LINE_BYTES + 1));
            }
        }
    }
}
