//! A whole life of a test bed: up, used, and gone without a trace.
//!
//! Two unequal nodes run a pod each; the pods reach each other, a service, and the API server; one is
//! resized in place and its control group follows without a restart. Then everything comes down, and the
//! machine is compared with what it was before.

mod common;

use common::{Scenarios, eventually, testbed, text};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const NAME: &str = "selftest";

fn xtask(args: &[&str]) -> Output {
    testbed(NAME, args)
}

fn ok(args: &[&str]) -> String {
    let output = xtask(args);
    assert!(output.status.success(), "{args:?}: {}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

fn kubectl(args: &[&str]) -> String {
    ok(&[&["kubectl"], args].concat())
}

/// Takes the test bed down, also after a failed test.
struct Down;

impl Drop for Down {
    fn drop(&mut self) {
        xtask(&["down"]);
    }
}

/// Interfaces of test beds are named so, with a number.
const INTERFACE: &str = "gstb";

/// What a test bed could leave on the machine: interfaces, mounts, control groups, packet filter rules,
/// kernel settings. The networks of test beds are left out, because other tests may have some meanwhile.
fn traces() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let names = |dir: &str| fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path().display().to_string());
    found.extend(names("/sys/class/net").filter(|n| !n.contains(INTERFACE)).map(|n| format!("interface {n}")));
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    // Other tests have mounts of their own meanwhile.
    let ours = |m: &&str| [NAME, "kubelet", "containerd", "netns"].iter().any(|part| m.contains(part));
    found.extend(mounts.lines().filter(ours).map(|m| format!("mount {m}")));
    found.extend(groups(Path::new("/sys/fs/cgroup"), 3).into_iter().map(|g| format!("group {}", g.display())));
    let rules = Command::new("nft").args(["list", "tables"]).output().expect("nft is installed");
    found.extend(String::from_utf8_lossy(&rules.stdout).lines().map(|t| format!("rules {t}")));
    let routes = Command::new("ip").args(["route"]).output().expect("ip is installed");
    let routes = String::from_utf8_lossy(&routes.stdout).into_owned();
    found.extend(routes.lines().filter(|r| !r.contains(INTERFACE)).map(|r| format!("route {r}")));
    for setting in ["vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys"] {
        let value = fs::read_to_string(Path::new("/proc/sys").join(setting)).unwrap_or_default();
        found.insert(format!("setting {setting} {}", value.trim()));
    }
    found.extend(
        ["/var/lib/kubelet", "/var/log/pods", "/run/netns"]
            .iter()
            .filter(|p| Path::new(p).exists())
            .map(|p| format!("folder {p}")),
    );
    found
}

/// Test beds' groups down to a depth.
fn groups(dir: &Path, depth: u32) -> Vec<PathBuf> {
    let below = fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir()));
    let mut found = Vec::new();
    for path in below.map(|e| e.path()) {
        if path.file_name().is_some_and(|n| n.to_string_lossy().starts_with(&format!("gainshare-testbed-{NAME}"))) {
            found.push(path.clone());
        }
        if depth > 0 {
            found.extend(groups(&path, depth - 1));
        }
    }
    found
}

/// Processes whose command line names the test bed's folder.
fn processes(dir: &str) -> Vec<String> {
    let all = fs::read_dir("/proc").unwrap().flatten();
    let line = |e: fs::DirEntry| fs::read_to_string(e.path().join("cmdline")).ok().map(|c| c.replace('\0', " "));
    all.filter_map(line).filter(|c| c.contains(dir)).collect()
}

/// The only file of that name below a folder whose path contains `part`.
fn find(dir: &Path, part: &str, name: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            if let Some(found) = find(&path, part, name) {
                return Some(found);
            }
        } else if path.ends_with(name) && path.display().to_string().contains(part) {
            return Some(path);
        }
    }
    None
}

const PODS: &str = r#"
apiVersion: v1
kind: Pod
metadata: { name: on-big, labels: { app: on-big } }
spec:
  nodeSelector: { kubernetes.io/hostname: big }
  containers:
  - name: main
    image: busybox:local
    command: [sh, -c, "trap 'exit 0' TERM; echo hello from big > /tmp/index.html; httpd -p 8080 -h /tmp; while :; do sleep 1 & wait; done"]
    resources: { requests: { cpu: 400m, memory: 64Mi }, limits: { cpu: 400m, memory: 64Mi } }
---
apiVersion: v1
kind: Pod
metadata: { name: on-small }
spec:
  nodeSelector: { kubernetes.io/hostname: small }
  containers:
  - { name: main, image: "busybox:local", command: [sleep, "3600"], resources: { requests: { cpu: 100m } } }
---
apiVersion: v1
kind: Service
metadata: { name: big }
spec: { selector: { app: on-big }, ports: [{ port: 80, targetPort: 8080 }] }
"#;

#[test]
#[ignore = "needs root and a test bed"]
fn up_used_and_gone() {
    ok(&["down"]);
    let before = traces();
    let guard = Down;
    ok(&["up", "--node", "big=1.2", "--node", "small=0.6"]);
    let status: Value = serde_json::from_str(&ok(&["status", "--output", "json"])).unwrap();
    assert_eq!(status["up"], true);
    let manifest = tempfile::NamedTempFile::new().unwrap();
    fs::write(manifest.path(), PODS).unwrap();
    kubectl(&["apply", "--filename", manifest.path().to_str().unwrap()]);
    kubectl(&["wait", "--for=condition=Ready", "pod/on-big", "pod/on-small", "--timeout=60s"]);

    let mut scenarios = Scenarios::default();
    scenarios.run("up again reuses the same and refuses another shape", up_again);
    scenarios.run("the scheduler sees the sizes", sizes);
    scenarios.run("pods reach each other by address and by a service's name", pods_reach_each_other);
    let bin = Path::new(status["bin"].as_str().unwrap());
    scenarios.run("a program becomes an image, and its pod has the rights of its account", || image_and_rights(bin));
    scenarios.run("a pod is resized in place", resized_in_place);
    scenarios.run("a program that was killed starts again", killed_and_started);
    let (dir, index) = (status["dir"].as_str().unwrap(), interface_index(status["kubeconfig"].as_str().unwrap()));
    scenarios.run("down leaves nothing behind", || gone(dir, index, &before));
    drop(guard);
    scenarios.finish();
}

fn up_again() {
    ok(&["up", "--node", "big=1.2", "--node", "small=0.6"]);
    let other = xtask(&["up", "--nodes", "1"]);
    assert!(!other.status.success());
    assert!(String::from_utf8_lossy(&other.stderr).contains("testbed down"), "the remedy is named");
}

fn sizes() {
    for (node, milli) in [("big", "1200m"), ("small", "600m")] {
        let cpu = kubectl(&["get", "node", node, "--output=jsonpath={.status.allocatable.cpu}"]);
        assert_eq!(cpu, milli, "{node}");
    }
}

/// A field of the pod on the big node.
fn on_big(path: &str) -> String {
    kubectl(&["get", "pod", "on-big", &format!("--output=jsonpath={{{path}}}")])
}

fn pods_reach_each_other() {
    let fetch = |url: &str| xtask(&["kubectl", "exec", "on-small", "--", "timeout", "5", "wget", "-q", "-O", "-", url]);
    assert_eq!(fetch(&format!("http://{}:8080/", on_big(".status.podIP"))).stdout, b"hello from big\n");
    let by_name = eventually("the service", || Some(fetch("http://big/")).filter(|o| o.status.success()));
    assert_eq!(by_name.stdout, b"hello from big\n");
}

/// The pod of an image made of kubectl reaches the API server as its service account, and may do what that
/// account may do.
fn image_and_rights(bin: &Path) {
    ok(&["load-image", bin.join("kubectl").to_str().unwrap(), "--image", "kubectl:local"]);
    kubectl(&["run", "inside", "--image=kubectl:local", "--restart=Never", "--", "auth", "whoami", "--output=json"]);
    kubectl(&["run", "curious", "--image=kubectl:local", "--restart=Never", "--", "get", "secrets"]);
    let ended = |pod: &str| {
        kubectl(&["wait", "--for=jsonpath={.status.containerStatuses[0].state.terminated}", pod, "--timeout=60s"])
    };
    ended("pod/inside");
    let account: Value = serde_json::from_str(&kubectl(&["logs", "inside"])).unwrap();
    assert_eq!(account["status"]["userInfo"]["username"], "system:serviceaccount:default:default");
    assert!(
        account["status"]["userInfo"]["extra"]["authentication.kubernetes.io/node-name"].is_array(),
        "the token is bound: {account}"
    );
    ended("pod/curious");
    assert!(kubectl(&["logs", "curious"]).contains("forbidden"));
}

/// The control group follows the resize, and nothing restarts.
fn resized_in_place() {
    let uid = on_big(".metadata.uid");
    let container = on_big(".status.containerStatuses[0].containerID").replace("containerd://", "");
    let (file, quota, resized) = match find(Path::new("/sys/fs/cgroup"), &container, "cpu.cfs_quota_us") {
        Some(file) => (file, "40000", "90000"),
        None => (find(Path::new("/sys/fs/cgroup"), &container, "cpu.max").unwrap(), "40000 100000", "90000 100000"),
    };
    let place = file.display().to_string();
    assert!(place.contains(&format!("/gainshare-testbed-{NAME}/big/")) && place.contains(&uid), "{place}");
    let read = || fs::read_to_string(&file).unwrap().trim().to_owned();
    assert_eq!(read(), quota);
    let patch =
        r#"{"spec":{"containers":[{"name":"main","resources":{"requests":{"cpu":"900m"},"limits":{"cpu":"900m"}}}]}}"#;
    kubectl(&["patch", "pod", "on-big", "--subresource=resize", "--patch", patch]);
    eventually("the new quota", || (read() == resized).then_some(()));
    let limit = || on_big(".status.containerStatuses[0].resources.limits.cpu");
    eventually("the new status", || (limit() == "900m").then_some(()));
    assert_eq!(on_big(".status.containerStatuses[0].restartCount"), "0");
    assert_eq!(on_big(".status.containerStatuses[0].containerID"), format!("containerd://{container}"));
}

fn killed_and_started() {
    ok(&["kill", "kube-scheduler"]);
    assert!(ok(&["status"]).contains("ended: kube-scheduler"));
    ok(&["start", "kube-scheduler"]);
    assert!(!ok(&["status"]).contains("ended"));
}

/// The kernel's number of the interface that is the machine's end of the test bed's network. The API server has the
/// address 10.201.NUMBER.2. Another test bed may get this number later, and the name of the interface with it.
fn interface_index(kubeconfig: &str) -> u32 {
    let text = fs::read_to_string(kubeconfig).unwrap();
    let number = text.split("10.201.").nth(1).and_then(|rest| rest.split('.').next()).expect("an address");
    let name = format!("{INTERFACE}{number}");
    interfaces().into_iter().find(|(link, _)| *link == name).expect("the interface is there").1
}

/// All interfaces with their numbers.
fn interfaces() -> Vec<(String, u32)> {
    let links = fs::read_dir("/sys/class/net").unwrap().flatten();
    let number = |e: &fs::DirEntry| fs::read_to_string(e.path().join("ifindex")).ok()?.trim().parse().ok();
    links.filter_map(|e| Some((e.file_name().to_string_lossy().into_owned(), number(&e)?))).collect()
}

fn gone(dir: &str, index: u32, before: &BTreeSet<String>) {
    ok(&["down"]);
    assert!(!Path::new(dir).exists(), "{dir} is left");
    // The routes go with the interface.
    let left: Vec<_> = interfaces().into_iter().filter(|(_, number)| *number == index).collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    assert_eq!(processes(dir), Vec::<String>::new());
    let after = traces();
    let left: Vec<_> = after.symmetric_difference(before).collect();
    assert!(left.is_empty(), "left behind or changed: {left:#?}");
    assert!(ok(&["status"]).contains("no test bed"));
}
