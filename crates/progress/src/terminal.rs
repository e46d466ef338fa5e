//! From the raw bytes of a terminal to plain lines.
//!
//! Progress bars redraw themselves with carriage returns, backspaces and cursor movements; each redraw is one *line* to us. Colours, titles and
//! other escape sequences vanish. The machine takes one byte at a time, so where the input is cut does not matter, and keeps
//! at most [`MAX_LINE`] bytes: a longer line is thrown away whole and counted, since its end (and thus its last number) is not known.

use serde::{Deserialize, Serialize};

/// The longest line that is looked at. Trainer bars and dicts are a few hundred bytes.
pub(super) const MAX_LINE: usize = 8 * 1024;

/// An escape sequence that is still open after this many bytes is taken for garbage; the longest honest ones are hyperlinks.
const MAX_ESCAPE: u16 = 2048;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Terminal {
    #[serde(with = "bytes_as_text")]
    line: Vec<u8>,
    overlong: bool,
    state: State,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
enum State {
    #[default]
    Ground,
    Escape,
    /// Within `ESC [ …`.
    Csi {
        seen: u16,
    },
    /// Within a string sequence (title, hyperlink), which ends with BEL or `ESC \`.
    Text {
        seen: u16,
        escape: bool,
    },
    /// One more byte belongs to the sequence (`ESC ( B`).
    One,
}

impl Terminal {
    /// Feeds bytes; hands every finished line that is not empty to `take`. Gives the number of lines that were too long.
    pub(super) fn feed(&mut self, mut bytes: &[u8], mut take: impl FnMut(&[u8])) -> u64 {
        let mut overlong = 0;
        while let Some((&b, rest)) = bytes.split_first() {
            if self.state == State::Ground {
                let plain = bytes.iter().position(|&b| b < 0x20 || b == 0x7f).unwrap_or(bytes.len());
                if plain > 0 {
                    self.push(&bytes[..plain]);
                    bytes = &bytes[plain..];
                    continue;
                }
            }
            bytes = rest;
            if self.step(b) {
                overlong += self.end(&mut take);
            }
        }
        overlong
    }

    /// Hands over what is left after the last line end.
    pub(super) fn finish(&mut self, mut take: impl FnMut(&[u8])) -> u64 {
        self.end(&mut take)
    }

    /// Forgets the line begun and everything up to its end.
    pub(super) fn skip_line(&mut self) {
        self.line.clear();
        self.overlong = true;
    }

    fn end(&mut self, take: &mut impl FnMut(&[u8])) -> u64 {
        let overlong = std::mem::take(&mut self.overlong);
        if !overlong && !self.line.is_empty() {
            take(&self.line);
        }
        self.line.clear();
        u64::from(overlong)
    }

    fn push(&mut self, text: &[u8]) {
        if self.overlong {
            return;
        }
        if self.line.len() + text.len() > MAX_LINE {
            self.skip_line();
        } else {
            self.line.extend_from_slice(text);
        }
    }

    /// Takes a control byte or a byte of an escape sequence; `true` if it ends the line.
    fn step(&mut self, b: u8) -> bool {
        // A line end inside an escape sequence means that the sequence was cut off.
        if b == b'\n' {
            self.state = State::Ground;
            return true;
        }
        let (next, ends) = match self.state {
            State::Ground => match b {
                b'\r' | 0x08 | 0x0b | 0x0c => (State::Ground, true),
                b'\t' => {
                    self.push(b" ");
                    (State::Ground, false)
                }
                0x1b => (State::Escape, false),
                _ => (State::Ground, false),
            },
            State::Escape => match b {
                b'[' => (State::Csi { seen: 0 }, false),
                b']' | b'P' | b'X' | b'^' | b'_' => (State::Text { seen: 0, escape: false }, false),
                b'(' | b')' | b'*' | b'+' | b'#' | b' ' | b'%' => (State::One, false),
                0x1b => (State::Escape, false),
                _ => (State::Ground, false),
            },
            State::One => (State::Ground, false),
            State::Csi { seen } => match b {
                // Cursor movements and the clearing of the screen leave the line; colours and erasing to its end do not.
                b'A'..=b'H' | b'J' | b'd' | b'f' => (State::Ground, true),
                0x40..=0x7e => (State::Ground, false),
                0x1b => (State::Escape, false),
                _ if seen >= MAX_ESCAPE => (State::Ground, false),
                _ => (State::Csi { seen: seen + 1 }, false),
            },
            State::Text { escape: true, .. } if b == b'\\' => (State::Ground, false),
            State::Text { .. } if b == 0x07 => (State::Ground, false),
            State::Text { seen, .. } if seen >= MAX_ESCAPE => (State::Ground, false),
            State::Text { seen, .. } => (State::Text { seen: seen + 1, escape: b == 0x1b }, false),
        };
        self.state = next;
        ends
    }
}

/// Lines are bytes of any kind; kept as Latin-1 text they survive JSON unchanged and stay readable.
mod bytes_as_text {
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(bytes: &[u8], s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&bytes.iter().map(|&b| char::from(b)).collect::<String>())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<u8>, D::Error> {
        let text = String::deserialize(d)?;
        Ok(text.chars().map(|c| u8::try_from(u32::from(c)).unwrap_or(b'?')).take(super::MAX_LINE).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(input: &[u8]) -> (Vec<String>, u64) {
        let mut out = Vec::new();
        let mut terminal = Terminal::default();
        let mut long = terminal.feed(input, |l| out.push(String::from_utf8_lossy(l).into_owned()));
        long += terminal.finish(|l| out.push(String::from_utf8_lossy(l).into_owned()));
        (out, long)
    }

    #[test]
    fn redraws_are_lines_and_colours_vanish() {
        let (got, _) =
            lines(b"\r\x1b[1m 1/16\x1b[0m loss: 2\x08\x08\x08\r\x1b[1m 2/16\x1b[0m loss: 1\x1b[K\nnext\tline");
        assert_eq!(got, [" 1/16 loss: 2", " 2/16 loss: 1", "next line"]);
        let (got, _) = lines(b"a\x1b[1A\x1b[2Kb\x1b]0;title loss=3\x07c\x1b]8;;http://x\x1b\\d\x1b(Be\r\n");
        assert_eq!(got, ["a", "bcde"]);
    }

    #[test]
    fn a_huge_line_is_dropped_whole_and_the_next_one_read() {
        let mut input = vec![b'x'; 10_000_000];
        input.extend_from_slice(b"\nloss: 1\n");
        assert_eq!(lines(&input), (vec!["loss: 1".to_string()], 1));
    }

    #[test]
    fn an_open_escape_sequence_ends_with_the_line() {
        assert_eq!(lines(b"\x1b]0;never closed\nloss: 1\n").0, ["loss: 1"]);
        let mut input = b"\x1b[".to_vec();
        input.extend(std::iter::repeat_n(b'1', 100_000));
        input.extend_from_slice(b"\rx\nloss: 1\n");
        assert_eq!(lines(&input).0.last().map(String::as_str), Some("loss: 1"));
    }

    #[test]
    fn state_survives_json() {
        let mut a = Terminal::default();
        a.feed(b"\xff\xfe loss\x1b[1", |_| ());
        let b: Terminal = serde_json::from_str(&serde_json::to_string(&a).unwrap()).unwrap();
        assert_eq!(a, b);
    }
}
