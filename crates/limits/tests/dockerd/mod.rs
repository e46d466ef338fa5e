//! A real Docker engine for one test: started with everything it owns below one temporary directory and one
//! cgroup, and removed without a trace, whatever the test did.
//!
//! It needs root and Debian's `docker.io` and `busybox-static`. Containers have no network. With `systemd` in the
//! variable [`CGROUP_DRIVER`] the engine asks systemd for its containers' groups.

#![allow(unsafe_code, reason = "a step between fork and exec")]
// Each test program uses another part of this.
#![allow(dead_code)]

mod image;

use bollard::Docker;
use bollard::models::{ContainerCreateBody, HostConfig};
use bollard::query_parameters::{CreateContainerOptions, ListContainersOptions, RemoveContainerOptions};
use gainshare_limits::docker::{DockerEvent, Engine};
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::Receiver;
use tokio::sync::mpsc::error::TryRecvError;

/// Far more than anything here takes on an idle machine. Tests share theirs with other tests, and one is emulated.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);
pub(crate) const IMAGE: &str = "busybox:test";
/// The engine takes no smaller soft limit.
pub(crate) const LEAST_RESERVATION_BYTES: u64 = 6 << 20;
/// Names the environment variable with the engine's cgroup driver. The default is `cgroupfs`.
const CGROUP_DRIVER: &str = "GAINSHARE_TEST_CGROUP_DRIVER";

pub(crate) struct Dockerd {
    dir: tempfile::TempDir,
    /// The group of all containers: a folder at the top of the hierarchy.
    cgroup: String,
    /// systemd makes the groups.
    systemd: bool,
    storage: &'static str,
    /// Containers run on while the engine is away.
    live_restore: bool,
    process: Option<Child>,
    client: tokio::runtime::Runtime,
}

impl Dockerd {
    /// Starts an engine that has one image, [`IMAGE`], and whose containers end with it.
    pub(crate) fn start() -> Dockerd {
        Dockerd::start_as(false)
    }

    /// Starts an engine whose containers run on while it restarts.
    pub(crate) fn start_to_restart() -> Dockerd {
        Dockerd::start_as(true)
    }

    fn start_as(live_restore: bool) -> Dockerd {
        assert!(Path::new("/usr/sbin/dockerd").exists(), "this test needs an engine: apt-get install docker.io");
        // The path of containerd's socket goes below it, and a socket's path may have 107 bytes only.
        let dir = tempfile::Builder::new().prefix("gsd").tempdir_in("/tmp").expect("a temporary directory");
        let name = dir.path().file_name().unwrap().to_str().unwrap();
        let systemd = std::env::var(CGROUP_DRIVER).is_ok_and(|driver| driver == "systemd");
        // A hyphen in the name of a slice would name a slice above it.
        let cgroup = if systemd { format!("gainshare{name}.slice") } else { format!("gainshare-test-{name}") };
        let client = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut dockerd = Dockerd { dir, cgroup, systemd, storage: "overlay2", live_restore, process: None, client };
        if let Err(log) = dockerd.launch() {
            // A machine whose own root is an overlay cannot stack another one on it.
            dockerd.storage = "vfs";
            dockerd.launch().unwrap_or_else(|again| panic!("dockerd does not start: {log}\n{again}"));
        }
        dockerd.call(async |docker| image::import(&docker, image::busybox_rootfs(), IMAGE).await);
        dockerd
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("docker.sock")
    }

    pub(crate) fn engine(&self) -> Engine {
        Engine::connect(&self.socket()).expect("the engine answers")
    }

    /// Starts the process and waits until it answers. Fails with the end of its log.
    pub(crate) fn launch(&mut self) -> Result<(), String> {
        let dir = self.dir.path();
        let log = fs::File::create(dir.join("log")).unwrap();
        let mut command = Command::new("/usr/sbin/dockerd");
        command
            .arg(format!("--data-root={}", dir.join("data").display()))
            .arg(format!("--exec-root={}", dir.join("exec").display()))
            .arg(format!("--pidfile={}", dir.join("pid").display()))
            .arg(format!("--host=unix://{}", self.socket().display()))
            .arg(format!("--exec-opt=native.cgroupdriver={}", if self.systemd { "systemd" } else { "cgroupfs" }))
            .arg(format!("--cgroup-parent={}{}", if self.systemd { "" } else { "/" }, self.cgroup))
            .arg(format!("--storage-driver={}", self.storage))
            // The defaults would ask for a better memory score than the tests may give themselves.
            .args(["--oom-score-adjust=0", "--bridge=none", "--iptables=false", "--ip6tables=false"])
            .arg(format!("--live-restore={}", self.live_restore))
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        // SAFETY: prctl is a plain system call and touches no memory of ours. It makes the engine end with
        // a test that was killed.
        unsafe { command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGTERM)?)) };
        let mut process = command.spawn().expect("dockerd can be run");
        let start = Instant::now();
        while Engine::connect(&self.socket()).is_err() {
            let ended = process.try_wait().unwrap().is_some();
            if ended || start.elapsed() > PATIENCE {
                let _ = (process.kill(), process.wait());
                let log = fs::read_to_string(dir.join("log")).unwrap_or_default();
                return Err(log.lines().rev().take(5).collect::<Vec<_>>().join("\n"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        self.process = Some(process);
        Ok(())
    }

    /// Ends the engine.
    pub(crate) fn shut_down(&mut self) {
        let Some(mut process) = self.process.take() else { return };
        signal(process.id() as i32, libc::SIGTERM);
        let start = Instant::now();
        while process.try_wait().unwrap().is_none() {
            if start.elapsed() > Duration::from_secs(10) {
                let _ = process.kill();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn signal_engine(&self, number: i32) {
        signal(self.process.as_ref().expect("the engine runs").id() as i32, number);
    }

    /// Calls the engine directly, as any other user of it would.
    pub(crate) fn call<T>(&self, work: impl AsyncFnOnce(Docker) -> Result<T, bollard::errors::Error>) -> T {
        let socket = self.socket().display().to_string();
        self.client
            .block_on(async {
                let docker = Docker::connect_with_unix(&socket, PATIENCE.as_secs(), bollard::API_DEFAULT_VERSION)?
                    .negotiate_version()
                    .await?;
                work(docker).await
            })
            .expect("the engine carries out the request")
    }

    /// Makes and starts a container of another program: a shell script.
    pub(crate) fn run(&self, name: &str, script: &str, labels: &[(&str, &str)], host: HostConfig) -> String {
        self.run_as(name, script, labels, host, false)
    }

    pub(crate) fn run_as(
        &self,
        name: &str,
        script: &str,
        labels: &[(&str, &str)],
        host: HostConfig,
        tty: bool,
    ) -> String {
        let body = ContainerCreateBody {
            image: Some(IMAGE.to_owned()),
            cmd: Some(["sh", "-c", script].map(str::to_owned).to_vec()),
            tty: Some(tty),
            labels: Some(labels.iter().map(|&(k, v)| (k.to_owned(), v.to_owned())).collect()),
            host_config: Some(HostConfig {
                network_mode: Some("none".to_owned()),
                // No test is about the filter of system calls, and an emulated machine takes a second to make it.
                security_opt: Some(vec!["seccomp=unconfined".to_owned()]),
                ..host
            }),
            ..Default::default()
        };
        let options = CreateContainerOptions { name: Some(name.to_owned()), ..Default::default() };
        self.call(async |docker| {
            let id = docker.create_container(Some(options), body).await?.id;
            docker.start_container(&id, None).await?;
            Ok(id)
        })
    }

    pub(crate) fn host_config(&self, id: &str) -> HostConfig {
        self.call(async |docker| docker.inspect_container(id, None).await).host_config.unwrap()
    }

    pub(crate) fn pid(&self, id: &str) -> i32 {
        self.call(async |docker| docker.inspect_container(id, None).await).state.unwrap().pid.unwrap() as i32
    }

    /// A file of a container's cgroup.
    pub(crate) fn cgroup_file(&self, id: &str, file: &str) -> PathBuf {
        let controller = file.split('.').next().unwrap();
        let group = if self.systemd { format!("docker-{id}.scope") } else { id.to_owned() };
        let v1 = Path::new("/sys/fs/cgroup").join(controller).join(&self.cgroup).join(&group).join(file);
        let v2 = Path::new("/sys/fs/cgroup").join(&self.cgroup).join(&group).join(file);
        if v1.exists() { v1 } else { v2 }
    }

    pub(crate) fn cgroup_text(&self, id: &str, file: &str) -> String {
        let path = self.cgroup_file(id, file);
        fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())).trim().to_owned()
    }

    /// The weight of a container's CPU time in the kernel, in hundredths of the kernel's default.
    pub(crate) fn cpu_weight(&self, id: &str) -> u64 {
        let number = |file: &str| self.cgroup_text(id, file).parse::<f64>().unwrap();
        if is_v2() { number("cpu.weight") as u64 } else { (number("cpu.shares") / 10.24).round() as u64 }
    }

    /// Writes the weight around the engine.
    pub(crate) fn write_cpu_weight(&self, id: &str, hundredths: u64) {
        let (file, value) = if is_v2() { ("cpu.weight", hundredths) } else { ("cpu.shares", hundredths * 1024 / 100) };
        fs::write(self.cgroup_file(id, file), value.to_string()).unwrap();
    }

    /// The quota in the kernel, in microseconds of each tenth of a second; `None` for none.
    pub(crate) fn cpu_quota_us(&self, id: &str) -> Option<u64> {
        match is_v2() {
            true => self.cgroup_text(id, "cpu.max").split(' ').next().unwrap().parse().ok(),
            false => self.cgroup_text(id, "cpu.cfs_quota_us").parse().ok(),
        }
    }

    /// The soft limit (v1) or the protection (v2) of a container's memory in the kernel; `None` for none. The engine
    /// cannot set the protection back to zero: its smallest value is none.
    pub(crate) fn soft_memory_bytes(&self, id: &str) -> Option<u64> {
        let read = |file: &str| self.cgroup_text(id, file).parse::<u64>().unwrap();
        match is_v2() {
            true => Some(read("memory.low")).filter(|&bytes| bytes > LEAST_RESERVATION_BYTES),
            false => Some(read("memory.soft_limit_in_bytes")).filter(|&bytes| bytes < 1 << 60),
        }
    }

    fn remove_containers(&mut self) {
        let socket = self.socket().display().to_string();
        let removal = async {
            let docker = Docker::connect_with_unix(&socket, PATIENCE.as_secs(), bollard::API_DEFAULT_VERSION)?
                .negotiate_version()
                .await?;
            let all = ListContainersOptions { all: true, ..Default::default() };
            for container in docker.list_containers(Some(all)).await? {
                let options = RemoveContainerOptions { force: true, v: true, link: false };
                docker.remove_container(&container.id.unwrap_or_default(), Some(options)).await?;
            }
            Ok::<(), bollard::errors::Error>(())
        };
        if let Err(error) = self.client.block_on(removal) {
            eprintln!("containers could not be removed through the engine: {error}");
        }
    }
}

impl Drop for Dockerd {
    fn drop(&mut self) {
        if self.process.is_some() || self.launch().is_ok() {
            self.remove_containers();
        }
        self.shut_down();
        let dir = self.dir.path().display().to_string();
        // What an engine that was killed could not clean up: its helpers, its containers' processes, its mounts.
        for pid in pids_in(&self.cgroup).into_iter().chain(pids_naming(&dir)) {
            signal(pid, libc::SIGKILL);
        }
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).filter(|point| point.starts_with(&dir));
        for point in points.collect::<Vec<_>>().into_iter().rev() {
            let _ = nix::mount::umount2(point, nix::mount::MntFlags::MNT_DETACH);
        }
        for hierarchy in hierarchies() {
            remove_tree(&hierarchy.join(&self.cgroup));
        }
    }
}

/// Whether the kernel's controllers are those of cgroup v2.
pub(crate) fn is_v2() -> bool {
    Path::new("/sys/fs/cgroup/cgroup.controllers").exists()
}

fn hierarchies() -> Vec<PathBuf> {
    let root = PathBuf::from("/sys/fs/cgroup");
    let below = fs::read_dir(&root).into_iter().flatten().flatten().map(|entry| entry.path()).filter(|p| p.is_dir());
    below.chain([root.clone()]).collect()
}

fn pids_in(cgroup: &str) -> Vec<i32> {
    let is_member =
        |pid: &i32| fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(cgroup));
    pids().filter(is_member).collect()
}

fn pids_naming(dir: &str) -> Vec<i32> {
    let names =
        |pid: &i32| fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|c| String::from_utf8_lossy(&c).contains(dir));
    pids().filter(names).collect()
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let own = std::process::id() as i32;
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(move |&pid| pid > 1 && pid != own)
}

fn remove_tree(dir: &Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.path().is_dir()) {
        remove_tree(&entry.path());
    }
    // A killed process leaves its cgroup a moment later.
    for _ in 0..50 {
        if fs::remove_dir(dir).is_ok() || !dir.exists() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn signal(pid: i32, signal: i32) {
    let signal = nix::sys::signal::Signal::try_from(signal).unwrap();
    let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal);
}

/// The next event, or a panic if none comes.
pub(crate) fn next(events: &mut Receiver<DockerEvent>) -> DockerEvent {
    next_within(events, PATIENCE).expect("an event")
}

/// The next message within `wait`; `None` if none comes or none can come.
pub(crate) fn next_within<T>(channel: &mut Receiver<T>, wait: Duration) -> Option<T> {
    let start = Instant::now();
    loop {
        match channel.try_recv() {
            Ok(message) => return Some(message),
            Err(TryRecvError::Disconnected) => return None,
            Err(TryRecvError::Empty) if start.elapsed() > wait => return None,
            Err(TryRecvError::Empty) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

/// Waits until `holds`.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "in vain: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
