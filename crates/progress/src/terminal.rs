//! From the raw bytes of a terminal to plain lines.
//!
//! Progress bars redraw themselves with carriage returns, backspaces and cursor movements; each
//! redraw becomes one *line*. Colours, titles and other escape sequences are removed. The state
//! machine takes one byte at a time, so the places where the input is cut do not matter. It keeps at
//! most [`MAX_LINE`] bytes: a longer line is dropped whole and counted, because its end, and thus its
//! last number, is unknown.

use serde::{Deserialize, Serialize};

/// The longest line that is parsed, in bytes. Bars and dicts of trainers are a few hundred bytes.
pub(crate) const MAX_LINE: usize = 8 * 1024;

/// An escape sequence that is still open after this many bytes is garbage. The longest honest ones
/// are hyperlinks.
const MAX_ESCAPE: u16 = 2048;

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Terminal {
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
        #[serde(rename = "seen")]
        length: u16,
    },
    /// Within a string sequence (title, hyperlink), which ends with BEL or `ESC \`.
    Text {
        #[serde(rename = "seen")]
        length: u16,
        escape: bool,
    },
    /// One more byte belongs to the sequence (`ESC ( B`).
    One,
}

impl Terminal {
    /// Passes every finished line of `bytes` that is not empty to `take`. Returns the number of lines
    /// that were too long.
    pub(crate) fn feed(&mut self, mut bytes: &[u8], mut take: impl FnMut(&[u8])) -> u64 {
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

    /// Passes the text after the last line end to `take`.
    pub(crate) fn finish(&mut self, mut take: impl FnMut(&[u8])) -> u64 {
        self.end(&mut take)
    }

    /// Drops the current line up to its end.
    pub(crate) fn skip_line(&mut self) {
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
                b'[' => (State::Csi { length: 0 }, false),
                b']' | b'P' | b'X' | b'^' | b'_' => (State::Text { length: 0, escape: false }, false),
                b'(' | b')' | b'*' | b'+' | b'#' | b' ' | b'%' => (State::One, false),
                0x1b => (State::Escape, false),
                _ => (State::Ground, false),
            },
            State::One => (State::Ground, false),
            State::Csi { length } => match b {
                // Cursor movements and the clearing of the screen leave the line. Colours and erasing
                // to the end of the line do not.
                b'A'..=b'H' | b'J' | b'd' | b'f' => (State::Ground, true),
                0x40..=0x7e => (State::Ground, false),
                0x1b => (State::Escape, false),
                _ if length >= MAX_ESCAPE => (State::Ground, false),
                _ => (State::Csi { length: length + 1 }, false),
            },
            State::Text { escape: true, .. } if b == b'\\' => (State::Ground, false),
            State::Text { .. } if b == 0x07 => (State::Ground, false),
            State::Text { length, .. } if length >= MAX_ESCAPE => (State::Ground, false),
            State::Text { length, .. } => (State::Text { length: length + 1, escape: b == 0x1b }, false),
        };
        self.state = next;
        ends
    }
}

/// A line may hold any bytes. Stored as Latin-1 text it survives JSON unchanged and stays readable.
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
