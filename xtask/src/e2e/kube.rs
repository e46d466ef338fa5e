//! The cluster as an administrator with kubectl sees it, and the kernel's files behind its pods.

use crate::programs::Programs;
use crate::sh;
use crate::testbed::Testbed;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A test bed in use.
pub(super) struct Kube {
    pub(super) testbed: Testbed,
}

impl Kube {
    /// Ends the story: takes the cluster down, or prints how to reach it.
    pub(super) fn end(self, keep: bool) -> Result<()> {
        if !keep {
            return self.testbed.down();
        }
        eprintln!("e2e: the cluster stays: KUBECONFIG={}", self.testbed.kubeconfig().display());
        self.testbed.stay();
        Ok(())
    }

    /// Creates or changes objects.
    pub(super) fn apply(&self, object: &Value) -> Result<()> {
        self.send(&["apply", "--server-side", "--force-conflicts", "-f", "-"], object).map(drop)
    }

    /// Creates an object, or the objects of a list, and returns the first one as the API server has it.
    pub(super) fn create(&self, object: &Value) -> Result<Value> {
        let created = self.send(&["create", "-o", "json", "-f", "-"], object)?;
        // One document for each object.
        let first = serde_json::Deserializer::from_str(&created).into_iter().next();
        first.context("kubectl prints what it has created")?.context("kubectl prints JSON")
    }

    fn send(&self, words: &[&str], object: &Value) -> Result<String> {
        let mut command = self.testbed.kubectl();
        command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start kubectl")?;
        child.stdin.take().context("the input is piped")?.write_all(object.to_string().as_bytes())?;
        let output = child.wait_with_output()?;
        if !output.status.success() {
            bail!("kubectl {} failed: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    pub(super) fn kubectl(&self, words: &[&str]) -> Result<String> {
        sh::output(self.testbed.kubectl().args(words))
    }

    pub(super) fn get(&self, words: &[&str]) -> Result<Value> {
        let text = self.kubectl(&[&["get", "-o", "json", "--request-timeout", "5s"], words].concat())?;
        serde_json::from_str(&text).context("kubectl prints JSON")
    }

    /// The pods of a namespace, perhaps only those with a label.
    pub(super) fn pods(&self, namespace: &str, selector: &str) -> Result<Vec<Pod>> {
        let list = self.get(&["pods", "-n", namespace, "-l", selector])?;
        Ok(list["items"].as_array().into_iter().flatten().map(|pod| Pod(pod.clone())).collect())
    }

    /// Writes the last decision about a pod or job with the plugin, and makes its plan again with `gainshare
    /// replay`, which fails if the plan differs.
    pub(super) fn replay(&self, programs: &Programs, namespace: &str, name: &str) -> Result<()> {
        let file = self.testbed.shared_folder("decisions")?.join(format!("{namespace}-{name}.json"));
        let mut dump = programs.command("kubectl-gainshare");
        dump.args(["explain", name, "-n", namespace, "--dump"]).arg(&file);
        sh::output(dump.env("KUBECONFIG", self.testbed.kubeconfig()))?;
        let printed = sh::output(programs.command("gainshare").arg("replay").arg(&file))?;
        ensure!(printed.contains("bit for bit"), "`gainshare replay` prints: {printed}");
        Ok(())
    }

    /// The folder of a pod's group in the cpu hierarchy.
    pub(super) fn pod_group(&self, node: &str, uid: &str) -> Result<PathBuf> {
        self.pod_group_of(node, uid, "cpu")
    }

    /// The folder of a pod's group in a hierarchy.
    pub(super) fn pod_group_of(&self, node: &str, uid: &str, controller: &str) -> Result<PathBuf> {
        let pods = self.testbed.node_cgroup(node, controller)?.join("kubepods");
        let classes = ["burstable", "", "besteffort"];
        let found = classes.iter().map(|class| pods.join(class).join(format!("pod{uid}"))).find(|dir| dir.is_dir());
        found.with_context(|| format!("node {node} has no control group for the pod {uid}"))
    }

    /// Kills the program of a pod's container as a fault of the machine would.
    pub(super) fn kill_pod(&self, node: &str, uid: &str) -> Result<()> {
        let mut killed = 0;
        for entry in std::fs::read_dir(self.pod_group(node, uid)?)?.flatten() {
            let procs = std::fs::read_to_string(entry.path().join("cgroup.procs")).unwrap_or_default();
            for pid in procs.lines().filter_map(|line| line.parse::<i32>().ok()) {
                let command = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                if command.contains("gainshare") {
                    killed += usize::from(kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok());
                }
            }
        }
        if killed == 0 {
            bail!("the pod {uid} on {node} has no process of ours to kill");
        }
        Ok(())
    }
}

/// CPU use of the machine outside the nodes of the story: the control plane and all other programs. Rounds
/// can be compared only where this is small and about equal.
pub(super) struct Bystanders {
    began: Instant,
    groups: Vec<PathBuf>,
    used_s: f64,
    inside_s: f64,
}

impl Bystanders {
    pub(super) fn watch(kube: &Kube, nodes: &[&str]) -> Result<Bystanders> {
        let groups: Result<Vec<PathBuf>> = nodes.iter().map(|node| kube.testbed.node_cgroup(node, "cpuacct")).collect();
        let groups = groups?;
        Ok(Bystanders { began: Instant::now(), used_s: beside_s(&groups)?, inside_s: inside_s(&groups)?, groups })
    }

    /// Cores they used in the mean.
    pub(super) fn cores(&self) -> Result<f64> {
        Ok((beside_s(&self.groups)? - self.used_s) / self.began.elapsed().as_secs_f64())
    }

    /// Seconds of CPU that the nodes themselves had meanwhile.
    pub(super) fn nodes_s(&self) -> Result<f64> {
        Ok(inside_s(&self.groups)? - self.inside_s)
    }
}

/// Seconds of CPU spent outside of these groups since the machine started.
fn beside_s(groups: &[PathBuf]) -> Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    let ticks: Vec<f64> = stat.lines().next().unwrap_or_default().split_whitespace().flat_map(str::parse).collect();
    // user, nice, system, idle, iowait, irq, softirq; a tick is a hundredth of a second in the kernel's files.
    let busy_s = ticks.iter().take(7).sum::<f64>() - ticks.iter().skip(3).take(2).sum::<f64>();
    Ok(busy_s / 100.0 - inside_s(groups)?)
}

fn inside_s(groups: &[PathBuf]) -> Result<f64> {
    let mut sum_s = 0.0;
    for group in groups {
        let text = std::fs::read_to_string(group.join("cpuacct.usage"))?;
        sum_s += text.trim().parse::<f64>()? / 1e9;
    }
    Ok(sum_s)
}

/// A pod as the API server shows it.
pub(super) struct Pod(pub(super) Value);

impl Pod {
    fn text(&self, pointer: &str) -> &str {
        self.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }

    pub(super) fn name(&self) -> &str {
        self.text("/metadata/name")
    }

    pub(super) fn uid(&self) -> &str {
        self.text("/metadata/uid")
    }

    pub(super) fn node(&self) -> &str {
        self.text("/spec/nodeName")
    }

    pub(super) fn phase(&self) -> &str {
        self.text("/status/phase")
    }

    pub(super) fn container(&self) -> &str {
        self.text("/spec/containers/0/name")
    }

    pub(super) fn restarts(&self) -> u64 {
        self.0.pointer("/status/containerStatuses/0/restartCount").and_then(Value::as_u64).unwrap_or(0)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.0.pointer("/status/containerStatuses/0/ready").and_then(Value::as_bool).unwrap_or(false)
    }

    pub(super) fn annotation(&self, key: &str) -> Option<&str> {
        self.0.pointer("/metadata/annotations")?.get(key)?.as_str()
    }

    /// The CPU request in thousandths of a core.
    pub(super) fn request_milli(&self) -> Option<u64> {
        let text = self.0.pointer("/spec/containers/0/resources/requests/cpu")?.as_str()?;
        match text.strip_suffix('m') {
            Some(milli) => milli.parse().ok(),
            None => text.parse::<f64>().ok().map(|cores| (cores * 1000.0).round() as u64),
        }
    }

    /// The pod's log on the machine.
    pub(super) fn log_file(&self, kube: &Kube) -> PathBuf {
        let folder = format!("{}_{}_{}", self.text("/metadata/namespace"), self.name(), self.uid());
        let logs = kube.testbed.node_path(self.node(), "/var/log/pods").join(folder).join(self.container());
        let runs = std::fs::read_dir(&logs).into_iter().flatten().flatten().map(|e| e.path());
        let newest = runs.filter(|p| p.extension().is_some_and(|e| e == "log")).max();
        newest.unwrap_or_else(|| logs.join("0.log"))
    }
}

/// Lines of a log as the engine writes it: when, in seconds since 1970, and what.
pub(super) fn log_lines(path: &Path) -> Result<Vec<(f64, String)>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(entries(&text).collect())
}

pub(super) fn entries(text: &str) -> impl Iterator<Item = (f64, String)> + '_ {
    text.lines().filter_map(|line| {
        let mut fields = line.splitn(4, ' ');
        let at: jiff::Timestamp = fields.next()?.parse().ok()?;
        Some((at.as_nanosecond() as f64 / 1e9, fields.nth(2)?.to_owned()))
    })
}

pub(super) fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Between two readings of a cluster while a story measures: kubectl takes a third of a second of processor time.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// Repeats `ask` until it succeeds; the error of the last try names what was missing.
pub(super) fn wait_for<T>(what: &str, patience: Duration, ask: impl FnMut() -> Result<T>) -> Result<T> {
    wait_every(Duration::from_millis(200), what, patience, ask)
}

/// The same with another pause between two tries: kubectl takes CPU that a measurement may need.
pub(super) fn wait_every<T>(
    pause: Duration,
    what: &str,
    patience: Duration,
    mut ask: impl FnMut() -> Result<T>,
) -> Result<T> {
    let began = Instant::now();
    loop {
        match ask() {
            Ok(answer) => return Ok(answer),
            Err(error) if began.elapsed() > patience => {
                return Err(error.context(format!("{what} did not come about within {} s", patience.as_secs())));
            }
            Err(_) => std::thread::sleep(pause),
        }
    }
}
