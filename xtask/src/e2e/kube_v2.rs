//! `cargo xtask e2e kube-v2`: pods are resized in place on a node with cgroup v2, with each cgroup driver.
//!
//! The operator and the API server run on this machine. The node is an emulated machine with Debian's cloud kernel
//! (`testbed::guest_node`), in which a kubelet, a container engine and the node agent run. For each driver:
//!
//! 1. The guest joins the cluster, and a node agent becomes ready on it.
//! 2. Two pods come: one trains a model, one prints the same loss for ever. A SharePolicy in quota mode selects them.
//! 3. Both are resized: requests and limits. In the guest the files `cpu.weight`, `cpu.max` and `memory.max` of both
//!    containers must have the values of the pods' specs.
//! 4. The policy is suspended. Specs and files must have their first values again.
//!
//! Nothing may restart. Processors are emulated, so times say nothing about the product.

use super::StoryArgs;
use super::kube::{Kube, Pod, wait_for};
use super::kube_share::install;
use super::train::IMAGE;
use crate::programs::Programs;
use crate::testbed::image::{Layout, write_programs};
use crate::testbed::{BUSYBOX, CgroupDriver, Spec, Testbed};
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The node of this machine, where the operator runs.
const MAIN: &str = "main";
const NAMESPACE: &str = "v2";
const LABEL: &str = "story=kube-v2";
const REQUEST_MILLI: u64 = 200;
/// How long one step may take in an emulated machine on a busy one.
const PATIENCE: Duration = Duration::from_secs(400);
/// Lines of the console that a failure shows.
const CONSOLE_LINES: usize = 60;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only this cgroup driver; may be given again [default: both].
    #[arg(long, value_enum)]
    driver: Vec<CgroupDriver>,
    /// Leave the cluster up.
    #[arg(long)]
    keep: bool,
    #[command(flatten)]
    story: StoryArgs,
}

/// The files of a container's group, or what they should be.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Files {
    cpu_weight: u64,
    cpu_max: String,
    memory_max: u64,
}

/// A container before the first resize, when both were resized, and after the policy was suspended.
#[derive(Debug, Serialize)]
struct Container {
    pod: String,
    group: String,
    first: Files,
    resized: Files,
    restored: Files,
}

#[derive(Debug, Serialize)]
struct Round {
    driver: CgroupDriver,
    containers: Vec<Container>,
    took_s: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let both = vec![CgroupDriver::Cgroupfs, CgroupDriver::Systemd];
    let drivers = if args.driver.is_empty() { both } else { args.driver.clone() };
    let programs = args.story.programs()?;
    let guests = drivers.iter().map(|driver| node_of(*driver)).collect();
    let testbed = Testbed::up(&Spec { guests, ..Spec::new("kube-v2", &[(MAIN, 1.0)])? })?;
    let mut kube = Kube { testbed };
    let result = run_story(&mut kube, &drivers, &programs);
    kube.end(args.keep)?;
    let rounds = result?;
    args.story.print(&rounds, |rounds| rounds.iter().for_each(print))?;
    Ok(())
}

fn node_of(driver: CgroupDriver) -> String {
    format!("v2-{}", driver.name())
}

fn run_story(kube: &mut Kube, drivers: &[CgroupDriver], programs: &Programs) -> Result<Vec<Round>> {
    kube.testbed.load_image(&programs.files(), IMAGE)?;
    let node = format!("operator.nodeSelector.kubernetes\\.io/hostname={MAIN}");
    install(kube, &["--set", &node, "--set", "operator.replicas=1"])?;
    // The guest needs neither the operator nor the plugin.
    let archive = kube.testbed.shared_folder("images")?.join("gainshare.tar");
    let files = ["gainshare", "gainshare-node-agent"].map(|name| programs.folder().join(name));
    write_programs(&files, IMAGE, Layout::Docker, &archive)?;
    let mut rounds = Vec::new();
    for driver in drivers {
        let node = node_of(*driver);
        eprintln!("e2e: a node with cgroup v2 and the driver {}", driver.name());
        let began = Instant::now();
        kube.testbed.start_guest(&node, *driver, std::slice::from_ref(&archive))?;
        let containers = play(kube, &node, *driver).map_err(|error| {
            let console = kube.testbed.guest_console(&node);
            let lines: Vec<&str> = console.lines().collect();
            let last = lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n");
            error.context(format!("the last lines of the guest's console:\n{last}\n"))
        })?;
        kube.testbed.stop_guest(&node)?;
        kube.kubectl(&["delete", "node", &node])?;
        kube.kubectl(&["delete", "pods", "--all", "-n", NAMESPACE, "--force", "--grace-period=0"])?;
        kube.kubectl(&["delete", "namespace", NAMESPACE])?;
        rounds.push(Round { driver: *driver, containers, took_s: began.elapsed().as_secs_f64() });
    }
    Ok(rounds)
}

/// One round, from the guest's boot to the return of the first values.
fn play(kube: &Kube, node: &str, driver: CgroupDriver) -> Result<Vec<Container>> {
    let console = || kube.testbed.guest_console(node);
    wait_for("a node agent on the guest", PATIENCE, || {
        let agents = kube.pods("gainshare-system", "app.kubernetes.io/component=agent")?;
        let agent = agents.iter().find(|agent| agent.node() == node).context("the guest has no agent yet")?;
        ensure!(agent.is_ready(), "the agent {} is {}", agent.name(), agent.phase());
        Ok(())
    })?;
    let printed = console();
    let first_process = line(&printed, "FIRST ").unwrap_or_default();
    ensure!(
        (first_process == "systemd") == (driver == CgroupDriver::Systemd),
        "the first process of the guest is {first_process}"
    );
    let controllers = line(&printed, "CONTROLLERS ").unwrap_or_default();
    ensure!(controllers.split(' ').any(|c| c == "cpu"), "the guest's cgroup v2 controllers are {controllers}");

    eprintln!("e2e: the agent is ready; two pods come");
    kube.apply(&json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": NAMESPACE } }))?;
    let flat = "while :; do i=$((i+1)); [ $((i % 2000)) != 0 ] || echo loss: 1.5; done";
    let flat = json!({ "image": BUSYBOX, "command": ["/bin/sh", "-c", flat] });
    let words = "train mlp --lr 0.00005 --seed 7 --steps 100000000 --report-every 1";
    let grows = json!({ "image": IMAGE, "args": words.split(' ').collect::<Vec<_>>() });
    kube.create(&pod("flat", node, flat, "96Mi"))?;
    kube.create(&pod("grows", node, grows, "128Mi"))?;
    let first = wait_for("the files of both containers", PATIENCE, || in_force(kube, node, &console(), driver))?;

    eprintln!("e2e: the files are as asked; a policy comes");
    policy(kube, false)?;
    let resized = wait_for("the resize of both pods", PATIENCE, || {
        let found = in_force(kube, node, &console(), driver)?;
        for (before, after) in first.iter().zip(&found) {
            let (old, new) = (&before.files, &after.files);
            ensure!(old.cpu_weight != new.cpu_weight, "{} has its first weight", after.pod);
            ensure!(old.cpu_max != new.cpu_max, "{} has its first quota", after.pod);
        }
        Ok(found)
    })?;

    eprintln!("e2e: the files are as asked; the policy is suspended");
    policy(kube, true)?;
    let restored = wait_for("the return of the first values", PATIENCE, || {
        let found = in_force(kube, node, &console(), driver)?;
        for (before, after) in first.iter().zip(&found) {
            ensure!(before.files == after.files, "{} has {:?}, not {:?}", after.pod, after.files, before.files);
        }
        Ok(found)
    })?;
    let parts = first.into_iter().zip(resized).zip(restored);
    let container = |((first, resized), restored): ((Found, Found), Found)| Container {
        pod: first.pod,
        group: first.group,
        first: first.files,
        resized: resized.files,
        restored: restored.files,
    };
    Ok(parts.map(container).collect())
}

fn pod(name: &str, node: &str, mut container: Value, memory: &str) -> Value {
    container["name"] = json!("train");
    container["imagePullPolicy"] = json!("Never");
    container["resources"] = json!({
        "requests": { "cpu": format!("{REQUEST_MILLI}m"), "memory": "32Mi" },
        "limits": { "cpu": format!("{}m", REQUEST_MILLI * 2), "memory": memory },
    });
    let (key, value) = LABEL.split_once('=').unwrap_or((LABEL, ""));
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": name, "namespace": NAMESPACE, "labels": { key: value } },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": { "kubernetes.io/hostname": node },
            "containers": [container],
        },
    })
}

fn policy(kube: &Kube, suspend: bool) -> Result<()> {
    let (key, value) = LABEL.split_once('=').context("a label has a value")?;
    kube.apply(&json!({
        "apiVersion": "gainshare.dev/v1alpha1",
        "kind": "SharePolicy",
        "metadata": { "name": "train", "namespace": NAMESPACE },
        "spec": {
            "selector": { "matchLabels": { key: value } },
            "policy": "flowcon", "mode": "quota", "interval": "4s", "alpha": 0.015, "suspend": suspend,
        },
    }))
}

/// What the kernel of the guest has for a container.
#[derive(Debug)]
struct Found {
    pod: String,
    group: String,
    files: Files,
}

/// The files of both containers, if they are what the pods' specs ask for.
fn in_force(kube: &Kube, node: &str, console: &str, driver: CgroupDriver) -> Result<Vec<Found>> {
    let mut pods = kube.pods(NAMESPACE, LABEL)?;
    pods.sort_by(|a, b| a.name().cmp(b.name()));
    ensure!(pods.len() == 2, "{} of 2 pods are there", pods.len());
    let mut all = Vec::new();
    for pod in &pods {
        ensure!(pod.node() == node && pod.phase() == "Running", "{} is {}", pod.name(), pod.phase());
        ensure!(pod.restarts() == 0, "{} was restarted", pod.name());
        let id = pod.0.pointer("/status/containerStatuses/0/containerID").and_then(Value::as_str);
        let id = id.and_then(|id| id.strip_prefix("containerd://")).context("the container has no id yet")?;
        let (group, files) = files_of(console, id).with_context(|| format!("{} has no group yet", pod.name()))?;
        let by_systemd = group.contains("kubepods.slice/") && group.ends_with(".scope");
        ensure!(by_systemd == (driver == CgroupDriver::Systemd), "the group of {} is {group}", pod.name());
        let asked = expected_files(pod)?;
        ensure!(asked.contains(&files), "{} has {files:?} and should have {asked:?}", pod.name());
        all.push(Found { pod: pod.name().to_owned(), group, files });
    }
    Ok(all)
}

/// The last line of a console that begins with a word.
fn line<'c>(console: &'c str, start: &str) -> Option<&'c str> {
    console.lines().rev().find_map(|line| line.trim().strip_prefix(start))
}

/// The group of a container and the values that its files had last: `GROUP PATH WEIGHT QUOTA PERIOD MEMORY`.
fn files_of(console: &str, id: &str) -> Option<(String, Files)> {
    let groups = console.lines().rev().filter_map(|line| line.trim().strip_prefix("GROUP "));
    let mut found = groups.filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [path, weight, quota, period, memory] = words[..] else { return None };
        let files = Files {
            cpu_weight: weight.parse().ok()?,
            cpu_max: format!("{quota} {period}"),
            memory_max: memory.parse().ok()?,
        };
        path.rsplit('/').next()?.contains(id).then(|| (path.to_owned(), files))
    });
    found.next()
}

/// What the kernel should have for a pod's container. Container runtimes compute the weight from the request in one of
/// two ways.
fn expected_files(pod: &Pod) -> Result<[Files; 2]> {
    let text = |pointer: &str| pod.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let limit_milli = milli(text("/spec/containers/0/resources/limits/cpu")).context("a pod has a limit")?;
    let memory_max = bytes(text("/spec/containers/0/resources/limits/memory")).context("a pod has a memory limit")?;
    let request_milli = pod.request_milli().context("a pod has a request")?;
    let cpu_max = format!("{} 100000", limit_milli * 100);
    Ok(weights(request_milli).map(|cpu_weight| Files { cpu_weight, cpu_max: cpu_max.clone(), memory_max }))
}

/// The weight of a request up to runc 1.3.1 (a straight line from shares to weights), and since (a curve).
fn weights(request_milli: u64) -> [u64; 2] {
    let shares = (request_milli * 1024 / 1000).max(2);
    let log = (shares as f64).log2();
    let curve = 10f64.powf((log * log + 125.0 * log) / 612.0 - 7.0 / 34.0).ceil();
    [1 + (shares - 2) * 9999 / 262_142, curve as u64]
}

fn milli(text: &str) -> Option<u64> {
    match text.strip_suffix('m') {
        Some(milli) => milli.parse().ok(),
        None => text.parse::<u64>().ok().map(|cores| cores * 1000),
    }
}

fn bytes(text: &str) -> Option<u64> {
    let units = [("Ki", 10), ("Mi", 20), ("Gi", 30)];
    let found = units.iter().find_map(|(unit, shift)| Some((text.strip_suffix(unit)?, shift)));
    let (number, shift) = found.unwrap_or((text, &0));
    number.parse::<u64>().ok().map(|number| number << shift)
}

fn print(round: &Round) {
    println!("driver {}, {:.0} s:", round.driver.name(), round.took_s);
    for container in &round.containers {
        println!("  {} in {}", container.pod, container.group);
        let states = [("first", &container.first), ("resized", &container.resized), ("restored", &container.restored)];
        for (state, files) in states {
            println!(
                "    {state:<9} cpu.weight {:>3}   cpu.max {:>13}   memory.max {}",
                files.cpu_weight, files.cpu_max, files.memory_max
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_about_a_group_counts() {
        let console = "GROUP /a/pod1/77aa 8 40000 100000 1024\nnoise\nGROUP /a/pod1/88bb 1 max 100000 max\n\
                       GROUP /a/pod1/cri-containerd-77aa.scope 4 20000 100000 2048\n";
        let (group, files) = files_of(console, "77aa").unwrap();
        assert_eq!(group, "/a/pod1/cri-containerd-77aa.scope");
        assert_eq!(files, Files { cpu_weight: 4, cpu_max: "20000 100000".to_owned(), memory_max: 2048 });
        assert!(files_of(console, "99").is_none());
    }

    #[test]
    fn requests_become_weights_as_container_runtimes_compute_them() {
        assert_eq!(weights(1000), [39, 100]);
        assert_eq!(weights(100)[0], 4);
        assert_eq!(weights(300)[0], 12);
        assert_eq!((milli("250m"), milli("2"), milli("x")), (Some(250), Some(2000), None));
        assert_eq!((bytes("96Mi"), bytes("1024"), bytes("")), (Some(96 << 20), Some(1024), None));
    }
}
