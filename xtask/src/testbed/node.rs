//! A real node: a kubelet and a container engine of its own, in mounts of their own.
//!
//! Inside its mounts a node looks like any other node: logs of pods are in `/var/log/pods`, the kubelet's
//! files in `/var/lib/kubelet`, the engine's socket in `/run/containerd`. On the machine these are folders
//! below the test bed's own, so nodes do not see each other's and nothing of them stays.
//!
//! A node's size is the quota of its control group, and the rest of the machine's cores is reserved in the
//! kubelet's settings, so the scheduler sees the same size. All nodes put their pods on one bridge with one store of
//! addresses: pods of different nodes reach each other.

use super::engine;
use super::network::Plan;
use super::plane::{Argv, DOMAIN, make, write, write_json};
use crate::sh;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

/// A name and a size, written `NAME=CORES`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct NodeSpec {
    pub(crate) name: String,
    pub(crate) cores: f64,
}

/// Less than this and the kubelet's own work on pods starves.
const LEAST_CORES: f64 = 0.1;

impl FromStr for NodeSpec {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<NodeSpec> {
        let (name, cores) = text.split_once('=').context("a node is written NAME=CORES, for example big=1.5")?;
        let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if name.is_empty() || name.len() > 40 || !name.chars().all(fits) || name.starts_with('-') || name.ends_with('-')
        {
            bail!("`{name}` is no name for a node: up to 40 small letters, digits and dashes inside");
        }
        if name == "system" {
            bail!("the name `system` is taken by the cluster's own programs: call the node something else");
        }
        let machine = machine_cores();
        match cores.parse::<f64>() {
            Ok(cores) if (LEAST_CORES..=machine).contains(&cores) => Ok(NodeSpec { name: name.to_owned(), cores }),
            _ => bail!("`{cores}` is no number of cores for {name}: between {LEAST_CORES} and the machine's {machine}"),
        }
    }
}

/// The processors of this machine.
pub(crate) fn machine_cores() -> f64 {
    // The kubelet counts every processor that is online, also where this process may use fewer.
    // `/proc/stat` has a line for each of them after the line of all together.
    let statistics = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let online = statistics.lines().filter(|line| line.starts_with("cpu")).count();
    online.saturating_sub(1).max(1) as f64
}

/// The folders of a machine that a node has for itself.
const OWN: [&str; 3] = ["/run", "/var/lib", "/var/log"];

/// Settings of the kernel that a kubelet writes for the whole machine. A node gets files of its own in their place.
const KERNEL_SETTINGS: [&str; 6] = [
    "vm/overcommit_memory",
    "vm/panic_on_oom",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
];

/// Files and programs of one node.
pub(crate) struct Node<'a> {
    pub(crate) spec: &'a NodeSpec,
    /// The folder of the test bed.
    pub(crate) testbed: &'a Path,
    pub(crate) bin: &'a Path,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) cgroup_root: String,
    pub(crate) address: String,
    pub(crate) plan: Plan,
}

impl Node<'_> {
    pub(crate) fn dir(&self) -> PathBuf {
        dir(self.testbed, &self.spec.name)
    }

    /// What is bound where in the node's mounts.
    pub(crate) fn binds(&self) -> Vec<(PathBuf, PathBuf)> {
        let folders = OWN.iter().map(|own| (inside(&self.dir(), own), PathBuf::from(own)));
        let settings = kernel_settings().map(|path| (inside(&self.dir(), &path), PathBuf::from(&path)));
        folders.chain(settings).collect()
    }

    pub(crate) fn write_files(&self) -> Result<()> {
        let dir = self.dir();
        for own in OWN {
            make(&inside(&dir, own))?;
        }
        for path in kernel_settings() {
            let copy = inside(&dir, &path);
            make(copy.parent().context("a setting lies in a folder")?)?;
            write(&copy, &std::fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?)?;
        }
        make(&dir.join("cni"))?;
        write(&dir.join("containerd.toml"), &self.containerd_config())?;
        let network = json!({
            "cniVersion": "1.0.0",
            "name": "testbed",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "cni0",
                    "isGateway": true,
                    "hairpinMode": true,
                    "ipam": {
                        "type": "host-local",
                        "dataDir": self.testbed.join("addresses"),
                        "ranges": [[{ "subnet": self.plan.pods(), "gateway": self.plan.gateway() }]],
                        "routes": [{ "dst": "0.0.0.0/0" }],
                    },
                },
                { "type": "loopback" },
            ],
        });
        write_json(&dir.join("cni/10-testbed.conflist"), &network)?;
        write(&dir.join("resolv.conf"), "")?;
        write_json(&dir.join("kubelet.json"), &self.kubelet_config())
    }

    fn kubelet_config(&self) -> serde_json::Value {
        let reserved_milli = ((machine_cores() - self.spec.cores) * 1000.0).round() as u64;
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzBindAddress": self.address,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": self.cgroup_root,
            "failCgroupV1": false,
            "failSwapOn": false,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": true },
                "x509": { "clientCAFile": self.testbed.join("keys/kubelet-client.crt") },
            },
            "authorization": { "mode": "Webhook" },
            "clusterDNS": [self.plan.dns()],
            "clusterDomain": DOMAIN,
            "resolvConf": self.dir().join("resolv.conf"),
            "systemReserved": { "cpu": format!("{reserved_milli}m") },
            // The machine's disk is shared with whatever else is on it: a test must not fail because of that.
            "evictionHard": {
                "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%", "nodefs.inodesFree": "1%",
            },
            // There is no registry: an image once removed would not come back.
            "imageGCHighThresholdPercent": 100,
            "oomScoreAdj": 0,
            "nodeLeaseDurationSeconds": 20,
            "nodeStatusUpdateFrequency": "5s",
            "syncFrequency": "10s",
        })
    }

    fn containerd_config(&self) -> String {
        // restrict_oom_score_adj: machines without CAP_SYS_RESOURCE could not start a single sandbox otherwise.
        let of_node = format!(
            "stream_server_address = \"{}\"\nstream_server_port = \"0\"\n\
             restrict_oom_score_adj = true\nnetns_mounts_under_state_dir = true\n",
            self.address
        );
        engine::settings(&self.dir().join("cni"), false, &of_node)
    }

    pub(crate) fn containerd(&self) -> Argv {
        vec!["containerd".to_owned(), "--config".to_owned(), self.dir().join("containerd.toml").display().to_string()]
    }

    pub(crate) fn kubelet(&self) -> Argv {
        vec![
            self.bin.join("kubelet").display().to_string(),
            format!("--config={}", self.dir().join("kubelet.json").display()),
            format!("--kubeconfig={}", self.kubeconfig.display()),
            format!("--hostname-override={}", self.spec.name),
            format!("--node-ip={}", self.address),
        ]
    }
}

/// The files of the kernel's settings that this machine has.
fn kernel_settings() -> impl Iterator<Item = String> {
    KERNEL_SETTINGS.iter().map(|name| format!("/proc/sys/{name}")).filter(|path| Path::new(path).exists())
}

fn dir(testbed: &Path, node: &str) -> PathBuf {
    testbed.join("nodes").join(node)
}

/// Where a folder of the node lies on the machine.
fn inside(node_dir: &Path, path: &str) -> PathBuf {
    node_dir.join("root").join(path.trim_start_matches('/'))
}

/// A file of the node as the machine sees it, for a path as the node sees it.
pub(crate) fn on_machine(testbed: &Path, node: &str, path: &str) -> PathBuf {
    inside(&dir(testbed, node), path)
}

/// Whether a folder would be hidden from the nodes by folders of their own.
pub(crate) fn hidden(path: &Path) -> Option<&'static str> {
    OWN.into_iter().find(|own| path.starts_with(own))
}

/// Gives an archive of images to a node's engine.
pub(crate) fn import(testbed: &Path, node: &str, archive: &Path) -> Result<()> {
    let socket = on_machine(testbed, node, "/run/containerd/containerd.sock");
    let mut ctr = Command::new("ctr");
    ctr.arg("--address").arg(socket).args(["--namespace", "k8s.io", "images", "import"]).arg(archive);
    sh::output(&mut ctr).map(drop).with_context(|| format!("node {node} does not take {}", archive.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_read_and_nonsense_is_refused() {
        let node: NodeSpec = "big-1=0.5".parse().unwrap();
        assert_eq!(node, NodeSpec { name: "big-1".to_owned(), cores: 0.5 });
        for nonsense in
            ["big", "=1", "Big=1", "-a=1", "a=", "a=0", "a=-1", "a=NaN", "a=inf", "a=100000", "system=1", "../x=1"]
        {
            assert!(nonsense.parse::<NodeSpec>().is_err(), "{nonsense}");
        }
    }
}
