//! One daemon of its own for a benchmark or a story: the released program, in temporary folders, ended when the
//! benchmark ends.

use crate::programs::target_dir;
use crate::sh;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) struct Lab {
    program: PathBuf,
    dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Lab {
    /// Builds the program as users get it.
    pub(crate) fn new() -> Result<Lab> {
        Lab::build()?;
        Lab::with_program(target_dir()?.join("release/gainshare"))
    }

    /// Builds the program and the library that lies beside it.
    pub(crate) fn build() -> Result<()> {
        sh::run(sh::cargo().args(["build", "--release", "--package", "gainshare", "--package", "gainshare-inside"]))
    }

    /// Uses a program that is built already. Jobs have working folders of their own, so its path becomes absolute.
    pub(crate) fn with_program(program: PathBuf) -> Result<Lab> {
        let program = std::path::absolute(program)?;
        Ok(Lab { program, dir: tempfile::Builder::new().prefix("gainshare-bench-").tempdir()?, daemon: None })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The program with this lab's folders.
    pub(crate) fn gainshare(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env("GAINSHARE_STATE_DIR", self.path("state"))
            .env("GAINSHARE_RUNTIME_DIR", self.path("run"))
            .env("XDG_CONFIG_HOME", self.path("config"));
        command
    }

    /// Starts a daemon and waits until it answers; returns how long that took.
    pub(crate) fn up(&mut self, flags: &[&str]) -> Result<Duration> {
        self.up_with(flags, &[])
    }

    /// The same with more variables in its environment.
    pub(crate) fn up_with(&mut self, flags: &[&str], variables: &[(&str, String)]) -> Result<Duration> {
        let started = Instant::now();
        let log = std::fs::OpenOptions::new().create(true).append(true).open(self.path("daemon.log"))?;
        let mut command = self.gainshare();
        command.arg("up").args(flags).envs(variables.iter().map(|(name, value)| (name, value)));
        self.daemon = Some(command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()?);
        // Not by a command: those start a daemon of their own where none answers.
        while std::os::unix::net::UnixStream::connect(self.path("run/api.sock")).is_err() {
            if started.elapsed() > Duration::from_secs(20) {
                bail!("the daemon did not come up:\n{}", std::fs::read_to_string(self.path("daemon.log"))?);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(started.elapsed())
    }

    pub(crate) fn pid(&self) -> Result<u32> {
        Ok(self.daemon.as_ref().context("no daemon runs")?.id())
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self) -> Result<()> {
        let mut daemon = self.daemon.take().context("no daemon runs")?;
        daemon.kill()?;
        daemon.wait()?;
        Ok(())
    }

    /// Ends the daemon, and its jobs if there are any.
    pub(crate) fn down(&mut self) -> Result<()> {
        if let Some(mut daemon) = self.daemon.take() {
            let asked = sh::output(self.gainshare().args(["down", "--stop-jobs"]));
            if asked.is_err() {
                daemon.kill()?;
            }
            daemon.wait()?;
            asked?;
        }
        Ok(())
    }

    /// Runs a command that prints JSON.
    pub(crate) fn ask(&self, words: &[&str]) -> Result<Value> {
        let text = sh::output(self.gainshare().args(words).args(["-o", "json"]))?;
        serde_json::from_str(&text).with_context(|| format!("`gainshare {}` printed no JSON: {text}", words.join(" ")))
    }

    /// The live jobs.
    pub(crate) fn jobs(&self) -> Result<Vec<Value>> {
        let answer = self.ask(&["ps"])?;
        let jobs = answer.get("jobs").unwrap_or(&answer).as_array().context("`ps` printed no list")?;
        Ok(jobs.clone())
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if let Err(e) = self.down() {
            eprintln!("the benchmark's daemon did not end well: {e:#}");
        }
    }
}
