//! `run` on a terminal: the job has one too, keys and sizes reach it, and the user's is left as it was.

#![allow(unsafe_code, reason = "a step between fork and exec")]

use crate::common::{self, Home, PATIENCE, eventually};
use nix::pty::{Winsize, openpty};
use nix::sys::termios::{self, LocalFlags};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// A terminal with `gainshare run` in its foreground.
struct Screen {
    master: File,
    slave: OwnedFd,
    child: Child,
    seen: String,
    pieces: mpsc::Receiver<String>,
}

impl Screen {
    fn run(home: &Home, words: &[&str]) -> Screen {
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        let pty = openpty(Some(&size), None).unwrap();
        let stream = || Stdio::from(pty.slave.try_clone().unwrap());
        let mut command = home.command(words);
        command.stdin(stream()).stdout(stream()).stderr(stream()).env("TERM", "xterm");
        // SAFETY: only system calls between fork and exec.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                rustix::process::ioctl_tiocsctty(rustix::stdio::stdin())?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let master = File::from(pty.master);
        let mut reader = master.try_clone().unwrap();
        let (sender, pieces) = mpsc::channel();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(n) = reader.read(&mut buffer) {
                if n == 0 || sender.send(String::from_utf8_lossy(&buffer[..n]).into_owned()).is_err() {
                    return;
                }
            }
        });
        Screen { master, slave: pty.slave, child, seen: String::new(), pieces }
    }

    fn keys(&mut self, keys: &[u8]) {
        self.master.write_all(keys).unwrap();
    }

    #[track_caller]
    fn shows(&mut self, text: &str) {
        while !self.seen.contains(text) {
            match self.pieces.recv_timeout(PATIENCE) {
                Ok(piece) => self.seen.push_str(&piece),
                Err(_) => panic!("`{text}` is not on the screen: {:?}", self.seen),
            }
        }
        // What was asked for is not found again.
        self.seen = self.seen.split_once(text).unwrap().1.to_owned();
    }

    fn is_raw(&self) -> bool {
        !termios::tcgetattr(self.slave.as_fd()).unwrap().local_flags.contains(LocalFlags::ICANON)
    }

    fn ends_with(mut self, code: i32) {
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), Some(code), "{:?}", self.seen);
        assert!(!self.is_raw(), "the terminal's mode is put back");
    }
}

#[test]
fn the_job_has_a_terminal_of_the_right_size_and_follows_changes() {
    let home = Home::new();
    let script = "test -t 0 && test -t 1 && test -t 2 && echo all three; stty size; \
                  trap 'stty size; exit 6' WINCH; echo ready; while :; do sleep 0.05; done";
    let mut screen = Screen::run(&home, &["run", "--", "sh", "-c", script]);
    screen.shows("all three\r\n24 80\r\n");
    screen.shows("ready");
    assert!(screen.is_raw());
    let size = rustix::termios::Winsize { ws_row: 33, ws_col: 101, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(&screen.master, size).unwrap();
    screen.shows("33 101\r\n");
    screen.ends_with(6);
}

#[test]
fn keys_reach_the_job_and_ctrl_c_interrupts_it() {
    let home = Home::new();
    let script =
        "trap 'echo interrupted; exit 3' INT; echo ask; read line; echo got $line; while :; do sleep 0.05; done";
    let mut screen = Screen::run(&home, &["run", "--", "sh", "-c", script]);
    screen.shows("ask");
    screen.keys(b"hello\r");
    screen.shows("got hello");
    screen.keys(b"\x03");
    screen.shows("interrupted");
    screen.ends_with(3);
}

#[test]
fn repeated_ctrl_c_ends_a_job_that_will_not_hear() {
    let home = Home::new();
    let script = "trap 'echo int' INT; trap 'echo term' TERM; echo ready; while :; do sleep 0.05; done";
    let mut screen = Screen::run(&home, &["run", "--", "sh", "-c", script]);
    screen.shows("ready");
    screen.keys(b"\x03");
    screen.shows("int");
    screen.keys(b"\x03");
    screen.shows("term");
    screen.keys(b"\x03");
    screen.shows("killed");
    screen.ends_with(137);
}

#[test]
fn in_a_repl_ctrl_c_is_a_key_like_others() {
    let home = Home::new();
    // Without line editing, so that the interpreter leaves signals to the terminal.
    let repl = "import sys\nn = 0\nprint('ready', flush=True)\nwhile n < 3:\n  try: input()\n  except KeyboardInterrupt: n += 1; print('again', n, flush=True)\nprint('bye')";
    let mut screen = Screen::run(&home, &["run", "--", "/usr/bin/python3", "-c", repl]);
    screen.shows("ready");
    screen.keys(b"x\r");
    for n in 1..=3 {
        std::thread::sleep(Duration::from_millis(1100));
        screen.keys(b"\x03");
        screen.shows(&format!("again {n}"));
    }
    screen.shows("bye");
    screen.ends_with(0);
}

#[test]
fn a_closed_terminal_hangs_up_the_job() {
    let home = Home::new();
    let mark = home.path().join("mark");
    let script = format!("trap 'echo hup > {}; exit 1' HUP; echo ready; while :; do sleep 0.05; done", mark.display());
    let mut screen = Screen::run(&home, &["run", "--name", "orphan", "--", "sh", "-c", &script]);
    screen.shows("ready");
    home.wait_for_state("orphan", "running");
    let Screen { master, slave, mut child, pieces, .. } = screen;
    drop((master, slave));
    // The reader thread holds the last copy of the master; a signal from the session's end is what a
    // terminal emulator's exit causes.
    common::signal(child.id() as i32, nix::sys::signal::Signal::SIGHUP);
    drop(pieces);
    child.wait().unwrap();
    assert!(eventually(|| std::fs::read_to_string(&mark).is_ok_and(|text| text == "hup\n")));
    home.wait_for_state("orphan", "failed");
}
