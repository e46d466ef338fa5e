//! An ordinary user without the right to make control groups: jobs are shared all the same, and `explain` says how.

use crate::common::{Home, eventually};
use gainshare_limits::process::ProcessStat;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// The user `nobody`, which owns no control group.
const NOBODY: u32 = 65534;

struct User {
    home: Home,
}

impl User {
    fn new() -> User {
        let home = Home::new();
        // The build folder may be closed to others.
        let program = home.path().join("gainshare");
        // Copied by another process: a program cannot be run while a file that is written to is open, and a test that
        // forks at this moment would keep ours open.
        let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_gainshare")).arg(&program).status().unwrap();
        assert!(copied.success(), "cp: {copied}");
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        for dir in ["state", "run", "config"] {
            let dir = home.path().join(dir);
            std::fs::create_dir(&dir).unwrap();
            chown(&dir, Some(NOBODY), Some(NOBODY)).unwrap();
            std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o700)).unwrap();
        }
        std::fs::set_permissions(home.path(), PermissionsExt::from_mode(0o755)).unwrap();
        User { home }
    }

    fn command(&self, words: &[&str]) -> Command {
        let template = self.home.command(words);
        let mut command = Command::new(self.home.path().join("gainshare"));
        command.args(words).current_dir(self.home.path()).env_clear().env("PATH", "/usr/bin:/bin");
        command.envs(template.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.uid(NOBODY).gid(NOBODY).stdin(Stdio::null());
        command
    }

    fn run(&self, words: &[&str]) -> (i32, String) {
        let done = self.command(words).output().unwrap();
        let text = String::from_utf8_lossy(&[done.stdout, done.stderr].concat()).into_owned();
        (done.status.code().unwrap_or(-1), text)
    }

    fn ok(&self, words: &[&str]) -> String {
        let (code, text) = self.run(words);
        assert_eq!(code, 0, "gainshare {}: {text}", words.join(" "));
        text
    }

    /// CPU time of the job so far, by the kernel's account.
    fn cpu_ticks(&self, name: &str) -> u64 {
        let list: serde_json::Value = serde_json::from_str(&self.ok(&["ps", "-o", "json"])).unwrap();
        let job = list["jobs"].as_array().unwrap().iter().find(|job| job["name"] == name).cloned().unwrap_or_default();
        let pid = job["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
        pid.and_then(ProcessStat::of).map_or(0, |stat| stat.cpu_ticks)
    }
}

impl Drop for User {
    fn drop(&mut self) {
        self.run(&["down", "--stop-jobs"]);
    }
}

/// The first kill reaches processes that left the job's session and ignore SIGTERM. It used to reach the process group
/// of the leader only; a second kill, which made the daemon wait, came only if the job was still there.
#[test]
#[ignore = "needs root to become another user"]
fn a_kill_without_control_groups_reaches_every_process_at_once() {
    let user = User::new();
    user.ok(&["up", "--detach"]);
    let mark = format!("{}.25", 8_000_000 + std::process::id());
    let script = format!("trap '' TERM; setsid sleep {mark} & while :; do sleep 0.1; done");
    user.ok(&["run", "--detach", "--name", "deaf", "--", "sh", "-c", &script]);
    let alive = || {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let lines = all.map(|entry| std::fs::read(entry.path().join("cmdline")).unwrap_or_default());
        let wanted = format!("sleep\0{mark}\0");
        lines.filter(|line| line.ends_with(wanted.as_bytes())).count()
    };
    assert!(eventually(|| alive() == 1), "{}", user.run(&["explain", "deaf"]).1);
    user.ok(&["stop", "deaf", "--grace", "0s"]);
    assert!(eventually(|| user.run(&["ps", "-a"]).1.contains("stopped")), "{}", user.run(&["ps", "-a"]).1);
    assert!(eventually(|| alive() == 0), "a process of the job survived");
}

#[test]
#[ignore = "needs root to become another user"]
fn jobs_are_shared_without_the_right_to_make_groups() {
    let user = User::new();
    assert!(user.ok(&["doctor"]).contains("no right to make cgroups"));
    assert_eq!(user.run(&["run", "--name", "quick", "--", "sh", "-c", "exit 3"]).0, 3);
    user.ok(&["down"]);

    // Both on one core, or they would not compete. One has stopped learning, the other's loss
    // falls by a hundredth with every report for longer than the test takes.
    let mut daemon =
        user.command(&["up", "--policy", "flowcon", "--cores", "1", "--interval", "1s", "--alpha", "0.02"]);
    let mut daemon = daemon.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let ready = user.home.runtime().join("api.sock");
    assert!(eventually(|| ready.exists()), "no daemon: {:?}", daemon.try_wait());
    let busy = |report: &str| {
        format!(
            "i=0 l=1000000000000000; while :; do i=$((i+1)) l=$((l*99/100)); {report}; j=0; while [ $j -lt 20000 ]; do j=$((j+1)); done; done"
        )
    };
    for (name, report) in [("flat", "echo step $i loss=0.5"), ("grows", "echo step $i loss=$l")] {
        let file = user.home.path().join("config").join(format!("{name}.toml"));
        std::fs::write(&file, format!("name = '{name}'\ncommand = ['sh', '-c', '{}']\n", busy(report))).unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o644)).unwrap();
        user.ok(&["submit", file.to_str().unwrap()]);
    }
    let shared = |text: &str| {
        text.contains("shared by scheduling priority") || text.contains("shared by stopping and continuing")
    };
    let text = user.ok(&["explain", "flat"]);
    assert!(text.contains("no cgroups:") && shared(&text), "{text}");

    // The kernel's own account: over a while, the job that grows gets clearly more of the core.
    let mut seen = Vec::new();
    let favoured = eventually(|| {
        let before = (user.cpu_ticks("flat"), user.cpu_ticks("grows"));
        std::thread::sleep(std::time::Duration::from_secs(2));
        let after = (user.cpu_ticks("flat"), user.cpu_ticks("grows"));
        let got = (after.0.saturating_sub(before.0), after.1.saturating_sub(before.1));
        seen.push(got);
        got.1 > 0 && got.1 as f64 > 1.5 * got.0 as f64
    });
    let [flat, grows] = ["flat", "grows"].map(|name| user.run(&["explain", name]).1);
    assert!(favoured, "flat and grows got {seen:?} ticks\n{flat}\n{grows}\n{}", user.run(&["ps", "-a"]).1);
    user.ok(&["down", "--stop-jobs"]);
    let _ = daemon.wait();
}
