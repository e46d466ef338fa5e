//! Lines of this program on standard error, beside what a job prints there.
//!
//! `eprintln!` panics where standard error takes nothing any more: its disk is full, or its reader is gone. A
//! supervisor that panics takes its job's output and exit code with it. What cannot be printed here is left out.

use nix::sys::termios::{self, OutputFlags};
use std::fmt::Arguments;
use std::io::{self, IsTerminal, Write};

/// Prints one line that begins with the program's name.
macro_rules! notice {
    ($($words:tt)*) => { $crate::notice::line(::std::format_args!($($words)*)) };
}
pub(crate) use notice;

/// [`notice!`] as a function.
pub fn line(words: Arguments) {
    let end = if is_raw() { "\r\n" } else { "\n" };
    print(&format!("gainshare: {words}{end}"));
}

/// Prints `text` as it is.
pub fn print(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// Whether the terminal takes line ends as they are, because the job has the user's terminal in raw mode.
fn is_raw() -> bool {
    let stderr = io::stderr();
    stderr.is_terminal() && termios::tcgetattr(stderr).is_ok_and(|mode| !mode.output_flags.contains(OutputFlags::OPOST))
}
