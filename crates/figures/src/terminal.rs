//! What people see: tables, colours, times and sizes; and JSON for programs.
//!
//! Everything goes through [`Printer`]. Its writes fail with `BrokenPipe` when the reader has gone (`gainshare
//! ps | head`); [`report_error`] turns that into a quiet end.

use serde::Serialize;
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use unicode_width::UnicodeWidthStr;

/// How answers are printed: tables for people, JSON for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    Table,
    Json,
}

/// Prints answers: as tables or JSON, with or without colours.
pub struct Printer {
    pub format: Format,
    pub colour: bool,
}

impl Printer {
    pub fn new(format: Format) -> Printer {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty())
            && std::env::var_os("TERM").is_some_and(|term| term != "dumb");
        Printer { format, colour: wanted && io::stdout().is_terminal() }
    }

    pub fn is_json(&self) -> bool {
        self.format == Format::Json
    }

    pub fn text(&self, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }

    /// One value, indented for a terminal, on one line for everything else.
    pub fn json(&self, value: &impl Serialize) -> io::Result<()> {
        let text = if io::stdout().is_terminal() {
            serde_json::to_string_pretty(value)?
        } else {
            serde_json::to_string(value)?
        };
        self.text(&(text + "\n"))
    }

    /// One value of many: always on a line of its own.
    pub fn json_line(&self, value: &impl Serialize) -> io::Result<()> {
        self.text(&(serde_json::to_string(value)? + "\n"))
    }

    /// Prints an error of the program `gainshare` that does not end it.
    pub fn complain(&self, message: &str) {
        print_error("gainshare", self.format, message, None);
    }

    pub fn paint(&self, text: &str, colour: Colour) -> String {
        match colour.code() {
            Some(code) if self.colour => format!("\x1b[{code}m{text}\x1b[0m"),
            _ => text.to_owned(),
        }
    }
}

/// The exit code that a shell reports for a program that wrote into a closed pipe.
const BROKEN_PIPE: u8 = 128 + libc::SIGPIPE as u8;

/// Prints one line on standard error, or one JSON object there if the caller is a program, and returns the exit code.
/// A reader that has closed the pipe gets no message.
pub fn report_error(program: &str, format: Format, error: &anyhow::Error, code: Option<&str>) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::from(BROKEN_PIPE);
    }
    print_error(program, format, &format!("{error:#}"), code);
    ExitCode::FAILURE
}

/// Prints an error message in one line.
pub fn print_error(program: &str, format: Format, message: &str, code: Option<&str>) {
    let lines: Vec<&str> = message.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let message = lines.join(" | ");
    let line = match format {
        Format::Json => {
            let mut body = serde_json::json!({ "error": message });
            if let Some(code) = code {
                body["code"] = serde_json::json!(code);
            }
            body.to_string()
        }
        Format::Table => format!("{program}: {message}"),
    };
    // A caller that closed standard error does not want the message.
    let _ = writeln!(io::stderr(), "{line}");
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let is_pipe = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    error.chain().any(|cause| cause.downcast_ref::<io::Error>().is_some_and(is_pipe))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Colour {
    #[default]
    Plain,
    Bold,
    Dim,
    Red,
    Green,
    Yellow,
    Blue,
}

impl Colour {
    fn code(self) -> Option<&'static str> {
        match self {
            Colour::Plain => None,
            Colour::Bold => Some("1"),
            Colour::Dim => Some("2"),
            Colour::Red => Some("31"),
            Colour::Green => Some("32"),
            Colour::Yellow => Some("33"),
            Colour::Blue => Some("34"),
        }
    }
}

/// Columns that line up, by the columns of the terminal that each text occupies. Numbers belong to the right, words to
/// the left.
pub struct Table {
    columns: Vec<(&'static str, Side)>,
    rows: Vec<Vec<(String, Colour)>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    Left,
    Right,
}

impl Table {
    pub fn new(columns: &[(&'static str, Side)]) -> Table {
        Table { columns: columns.to_vec(), rows: Vec::new() }
    }

    pub fn row(&mut self, cells: Vec<(String, Colour)>) {
        debug_assert_eq!(cells.len(), self.columns.len());
        self.rows.push(cells);
    }

    /// The table as lines, indented by `indent` blanks.
    pub fn render(&self, out: &Printer, indent: usize) -> String {
        let width = |i: usize| {
            let cells = self.rows.iter().map(|row| printable(&row[i].0).width());
            cells.chain([self.columns[i].0.width()]).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        let mut text = String::new();
        let mut line = |cells: &mut dyn Iterator<Item = (String, Colour)>| {
            let mut gap = " ".repeat(indent);
            for (i, (cell, colour)) in cells.enumerate() {
                let cell = printable(&cell);
                let blanks = " ".repeat(widths[i].saturating_sub(cell.width()));
                let painted = out.paint(&cell, colour);
                match self.columns[i].1 {
                    Side::Right => write!(text, "{gap}{blanks}{painted}"),
                    // No blanks at the end of a line.
                    Side::Left if i + 1 == self.columns.len() => write!(text, "{gap}{painted}"),
                    Side::Left => write!(text, "{gap}{painted}{blanks}"),
                }
                .expect("a string takes all");
                gap = "  ".into();
            }
            text.push('\n');
        };
        if self.columns.iter().any(|(title, _)| !title.is_empty()) {
            line(&mut self.columns.iter().map(|(title, _)| ((*title).to_owned(), Colour::Bold)));
        }
        for row in &self.rows {
            line(&mut row.iter().cloned());
        }
        text
    }
}

/// Names of metrics and the like come from jobs: no control character of theirs reaches the terminal.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// What is not known.
pub const NOTHING: &str = "-";

pub fn optional<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| NOTHING.to_owned(), show)
}

/// `42s`, `3m05s`, `2h07m`, `5d03h`.
pub fn seconds(s: f64) -> String {
    let s = s.max(0.0).round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m{:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// `512 B`, `1.5 KiB`, `20 MiB`.
pub fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"].iter();
    let mut unit = units.next().expect("seven units");
    while value >= 1023.5 {
        value /= 1024.0;
        unit = units.next().expect("2^64 bytes are 16 EiB");
    }
    let decimals = usize::from(value < 9.95 && *unit != "B");
    format!("{value:.decimals$} {unit}")
}

pub fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// Four significant digits, without a needless exponent.
pub fn number(x: f64) -> String {
    let magnitude = x.abs();
    if x == 0.0 {
        "0".into()
    } else if !(1e-3..1e6).contains(&magnitude) {
        format!("{x:.2e}")
    } else {
        let decimals = (3 - magnitude.log10().floor() as i32).max(0) as usize;
        let text = format!("{x:.decimals$}");
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_sizes_and_numbers_are_short_and_right() {
        assert_eq!(
            [0.4, 59.4, 59.6, 3599.6, 7620.0, 90_000.0].map(seconds),
            ["0s", "59s", "1m00s", "1h00m", "2h07m", "1d01h"]
        );
        assert_eq!(
            [0, 1023, 1024, 1536, 20 << 20, u64::MAX].map(bytes),
            ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "20 MiB", "16 EiB"]
        );
        assert_eq!(
            [0.0, 0.5, 123.456, 1234.56, 2e-5, -0.25, 1e7, f64::NAN].map(number),
            ["0", "0.5", "123.5", "1235", "2.00e-5", "-0.25", "1.00e7", "NaN"]
        );
    }

    #[test]
    fn columns_line_up_and_nothing_dangerous_is_printed() {
        let out = Printer { format: Format::Table, colour: false };
        let mut table = Table::new(&[("NAME", Side::Left), ("CPU", Side::Right), ("WHY", Side::Left)]);
        let cell = |text: &str| (text.to_owned(), Colour::Red);
        table.row(vec![cell("a"), cell("12.5"), cell("x")]);
        table.row(vec![cell("long-name"), cell("1"), cell("\x1b[31mbad")]);
        assert_eq!(
            table.render(&out, 0),
            "NAME        CPU  WHY\na          12.5  x\nlong-name     1  \u{fffd}[31mbad\n"
        );
        let mut wide = Table::new(&[("NAME", Side::Left), ("CPU", Side::Right)]);
        wide.row(vec![cell("数据"), cell("1")]);
        wide.row(vec![cell("e\u{301}"), cell("2")]);
        assert_eq!(wide.render(&out, 0), "NAME  CPU\n数据    1\ne\u{301}       2\n");
        let painted = table.render(&Printer { format: Format::Table, colour: true }, 1);
        assert!(painted.contains("\x1b[1mNAME\x1b[0m"), "{painted:?}");
    }
}
