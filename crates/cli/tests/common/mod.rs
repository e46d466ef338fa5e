//! A place of its own for each test: directories, the real program, and the daemon it starts, all gone afterwards.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde_json::Value;
use std::io::Read;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Generous: the machine may be busy with other tests.
pub const PATIENCE: Duration = Duration::from_secs(30);

pub struct Home {
    pub dir: tempfile::TempDir,
    state: PathBuf,
}

impl Home {
    pub fn new() -> Home {
        let dir = tempfile::Builder::new().prefix("gs").tempdir().unwrap();
        let state = dir.path().join("state");
        Home { dir, state }
    }

    /// With the state somewhere else, such as on a disk of its own.
    pub fn with_state(state: PathBuf) -> Home {
        let mut home = Home::new();
        home.state = state;
        home
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn state(&self) -> &Path {
        &self.state
    }

    pub fn runtime(&self) -> PathBuf {
        self.path().join("run")
    }

    /// `gainshare` with these words, in this place.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gainshare"));
        command.args(words).current_dir(self.path());
        command.env("GAINSHARE_STATE_DIR", &self.state).env("GAINSHARE_RUNTIME_DIR", self.runtime());
        command.env("XDG_CONFIG_HOME", self.path().join("config")).env_remove("GAINSHARE_SOCKET");
        command.stdin(Stdio::null());
        command
    }

    pub fn run(&self, words: &[&str]) -> Outcome {
        Outcome::from(self.command(words).output().unwrap())
    }

    /// Runs and insists on success; returns what was printed.
    pub fn ok(&self, words: &[&str]) -> String {
        let outcome = self.run(words);
        assert_eq!(outcome.code, 0, "gainshare {}: {}", words.join(" "), outcome.stderr);
        outcome.stdout
    }

    pub fn json(&self, words: &[&str]) -> Value {
        let mut words = words.to_vec();
        words.extend(["-o", "json"]);
        serde_json::from_str(&self.ok(&words)).unwrap()
    }

    /// Starts without waiting, with pipes for everything.
    pub fn spawn(&self, words: &[&str]) -> Child {
        self.command(words).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// The named job as `ps -a -o json` shows it, the newest of that name.
    pub fn job(&self, name: &str) -> Option<Value> {
        let list = self.json(&["ps", "-a"]);
        list["jobs"].as_array().unwrap().iter().rfind(|job| job["name"] == name).cloned()
    }

    pub fn wait_for_state(&self, name: &str, state: &str) -> Value {
        let mut last = Value::Null;
        let found = eventually(|| {
            last = self.job(name).unwrap_or_default();
            last["state"] == state
        });
        assert!(found, "{name} is not {state}: {last}");
        last
    }

    pub fn daemon_pid(&self) -> i32 {
        std::fs::read_to_string(self.runtime().join("lock")).unwrap().trim().parse().unwrap()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if self.runtime().join("lock").exists() {
            let _ = self.command(&["down", "--stop-jobs"]).output();
        }
    }
}

#[derive(Debug)]
pub struct Outcome {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Outcome {
        Outcome {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Outcome {
    /// A failure as users should see it: the code, one line, and in it all of `parts`.
    #[track_caller]
    pub fn fails_with(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        assert_eq!(self.stderr.trim_end().lines().count(), 1, "{}", self.stderr);
        assert!(self.stderr.starts_with("gainshare: "), "{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "`{part}` is not in: {}", self.stderr);
        }
    }
}

/// Looks again and again until `true` or out of patience.
pub fn eventually(mut is_so: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        if is_so() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    false
}

/// What came of a program. One that does not end in time is killed, and the test fails.
pub fn wait(child: Child) -> Outcome {
    let pid = child.id() as i32;
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(child.wait_with_output()));
    let Ok(output) = receiver.recv_timeout(PATIENCE) else {
        signal(pid, nix::sys::signal::Signal::SIGKILL);
        let output = receiver.recv_timeout(PATIENCE).map(|output| Outcome::from(output.unwrap()));
        panic!("it did not end within {} s: {output:?}", PATIENCE.as_secs());
    };
    Outcome::from(output.unwrap())
}

/// Reads until `text` was seen; returns everything read. The test fails if it does not come in time.
pub fn read_until(from: &mut (impl Read + AsFd), text: &str) -> String {
    let mut seen = Vec::new();
    let mut buffer = [0; 4096];
    let start = Instant::now();
    while !String::from_utf8_lossy(&seen).contains(text) {
        let left = PATIENCE.saturating_sub(start.elapsed());
        let mut ready = [PollFd::new(from.as_fd(), PollFlags::POLLIN)];
        let count = poll(&mut ready, PollTimeout::try_from(left).unwrap()).unwrap();
        assert!(count > 0, "`{text}` did not come within {PATIENCE:?}: {}", String::from_utf8_lossy(&seen));
        match from.read(&mut buffer) {
            Ok(n) if n > 0 => seen.extend_from_slice(&buffer[..n]),
            end => panic!("ended ({end:?}) before `{text}`: {}", String::from_utf8_lossy(&seen)),
        }
    }
    String::from_utf8_lossy(&seen).into_owned()
}

pub fn signal(pid: i32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}
