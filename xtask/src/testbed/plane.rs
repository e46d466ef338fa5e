//! The programs of the control plane: their arguments, keys and files.
//!
//! Every program has a user of its own with the rights that Kubernetes gives that user, and shows a random
//! token that lives as long as the test bed. The API server makes its own certificate; all other programs check it.
//! The kubelets know the API server by a client certificate, and ask it whether a caller may do what it
//! asks for, as on a real node.

use super::image::hex;
use super::network::{Plan, SERVICES};
use crate::sh;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The port of the API server.
pub(crate) const API_PORT: u16 = 6443;
/// The domain of services' names.
pub(crate) const DOMAIN: &str = "cluster.local";

/// A program: how it is called, and its arguments.
pub(crate) type Argv = Vec<String>;

/// Files and programs of one test bed's control plane.
pub(crate) struct Plane<'a> {
    pub(crate) dir: &'a Path,
    pub(crate) bin: &'a Path,
    pub(crate) plan: Plan,
}

impl Plane<'_> {
    fn file(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn argv<const N: usize>(&self, program: &str, args: [String; N]) -> Argv {
        std::iter::once(self.bin.join(program).display().to_string()).chain(args).collect()
    }

    /// Writes keys, tokens and settings; `nodes` are the names of the real nodes.
    pub(crate) fn write_files(&self, nodes: &[String]) -> Result<()> {
        for folder in ["keys", "kubeconfig"] {
            make(&self.dir.join(folder))?;
        }
        let openssl = |args: &str| sh::output(Command::new("openssl").args(args.split(' ')).current_dir(self.dir));
        openssl("ecparam -name prime256v1 -genkey -noout -out keys/sa.key")?;
        openssl(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -keyout keys/kubelet-client.key \
             -out keys/kubelet-client.crt -subj /O=system:masters/CN=testbed-api-server -addext extendedKeyUsage=clientAuth",
        )?;
        let mut users = vec![
            ("admin".to_owned(), "testbed:admin".to_owned(), "system:masters"),
            ("controller-manager".to_owned(), "system:kube-controller-manager".to_owned(), ""),
            ("scheduler".to_owned(), "system:kube-scheduler".to_owned(), ""),
            ("proxy".to_owned(), "system:kube-proxy".to_owned(), ""),
        ];
        users.extend(nodes.iter().map(|n| (format!("node-{n}"), format!("system:node:{n}"), "system:nodes")));
        let mut tokens = String::new();
        for (file, user, group) in users {
            let token = random()?;
            tokens.push_str(&format!("{token},{user},{user},\"{group}\"\n"));
            self.write_kubeconfig(&file, &token)?;
        }
        write_secret(&self.dir.join("keys/tokens.csv"), &tokens)?;
        let scheduler = json!({
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": { "leaderElect": false },
            "clientConnection": { "kubeconfig": self.kubeconfig("scheduler"), "qps": 500, "burst": 1000 },
        });
        write_json(&self.dir.join("scheduler.json"), &scheduler)?;
        let proxy = json!({
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": { "kubeconfig": self.kubeconfig("proxy") },
            "hostnameOverride": nodes.first(),
            "clusterCIDR": self.plan.pods(),
            // Pods of all nodes share a bridge. Without this the answer would go straight to the asking
            // pod, past the translation of addresses.
            "nftables": { "masqueradeAll": true, "syncPeriod": "10s", "minSyncPeriod": "0s" },
            // The size of the table is the machine's business.
            "conntrack": { "maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s" },
            "oomScoreAdj": 0,
        });
        write_json(&self.dir.join("proxy.json"), &proxy)?;
        let corefile = format!(
            ".:53 {{\n    bind {}\n    errors\n    cache 5\n    kubernetes {DOMAIN} in-addr.arpa {{\n        kubeconfig {}\n    }}\n}}\n",
            self.plan.dns(),
            self.kubeconfig("admin").display(),
        );
        write(&self.dir.join("Corefile"), &corefile)
    }

    /// The file with which a user reaches the API server.
    pub(crate) fn kubeconfig(&self, user: &str) -> PathBuf {
        self.dir.join("kubeconfig").join(user)
    }

    fn write_kubeconfig(&self, user: &str, token: &str) -> Result<()> {
        let server = format!("https://{}:{API_PORT}", self.plan.api());
        let authority = self.dir.join("keys/api/apiserver.crt");
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{ "name": "testbed", "cluster": { "server": server, "certificate-authority": authority } }],
            "users": [{ "name": user, "user": { "token": token } }],
            "contexts": [{ "name": "testbed", "context": { "cluster": "testbed", "user": user } }],
            "current-context": "testbed",
        });
        write_secret(&self.kubeconfig(user), &format!("{config:#}\n"))
    }

    pub(crate) fn etcd(&self) -> Argv {
        // On loopback inside the test bed's own network: these ports are not reachable from outside.
        let (client, peer) = ("http://127.0.0.1:2379", "http://127.0.0.1:2380");
        let args = [
            format!("--data-dir={}", self.file("etcd")),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--listen-peer-urls={peer}"),
            format!("--initial-advertise-peer-urls={peer}"),
            format!("--initial-cluster=default={peer}"),
            "--quota-backend-bytes=4294967296".to_owned(),
        ];
        std::iter::once("etcd".to_owned()).chain(args).collect()
    }

    pub(crate) fn api_server(&self) -> Argv {
        self.argv(
            "kube-apiserver",
            [
                "--etcd-servers=http://127.0.0.1:2379".to_owned(),
                format!("--advertise-address={}", self.plan.api()),
                format!("--secure-port={API_PORT}"),
                format!("--cert-dir={}", self.file("keys/api")),
                format!("--token-auth-file={}", self.file("keys/tokens.csv")),
                "--authorization-mode=Node,RBAC".to_owned(),
                "--enable-admission-plugins=NodeRestriction".to_owned(),
                format!("--service-account-issuer=https://kubernetes.default.svc.{DOMAIN}"),
                format!("--service-account-key-file={}", self.file("keys/sa.key")),
                format!("--service-account-signing-key-file={}", self.file("keys/sa.key")),
                format!("--service-cluster-ip-range={SERVICES}"),
                "--allow-privileged=true".to_owned(),
                "--kubelet-preferred-address-types=InternalIP".to_owned(),
                format!("--kubelet-client-certificate={}", self.file("keys/kubelet-client.crt")),
                format!("--kubelet-client-key={}", self.file("keys/kubelet-client.key")),
                "--profiling=false".to_owned(),
            ],
        )
    }

    /// With how long a node may be silent before it counts as lost.
    pub(crate) fn controller_manager(&self, grace_s: u32) -> Argv {
        self.argv(
            "kube-controller-manager",
            [
                format!("--kubeconfig={}", self.kubeconfig("controller-manager").display()),
                format!("--authentication-kubeconfig={}", self.kubeconfig("controller-manager").display()),
                format!("--authorization-kubeconfig={}", self.kubeconfig("controller-manager").display()),
                format!("--service-account-private-key-file={}", self.file("keys/sa.key")),
                format!("--root-ca-file={}", self.file("keys/api/apiserver.crt")),
                "--use-service-account-credentials=true".to_owned(),
                "--leader-elect=false".to_owned(),
                format!("--node-monitor-grace-period={grace_s}s"),
                "--kube-api-qps=500".to_owned(),
                "--kube-api-burst=1000".to_owned(),
                "--profiling=false".to_owned(),
            ],
        )
    }

    pub(crate) fn scheduler(&self) -> Argv {
        self.argv(
            "kube-scheduler",
            [
                format!("--config={}", self.file("scheduler.json")),
                format!("--authentication-kubeconfig={}", self.kubeconfig("scheduler").display()),
                format!("--authorization-kubeconfig={}", self.kubeconfig("scheduler").display()),
            ],
        )
    }

    pub(crate) fn proxy(&self) -> Argv {
        self.argv("kube-proxy", [format!("--config={}", self.file("proxy.json"))])
    }

    pub(crate) fn dns(&self) -> Argv {
        self.argv("coredns", [format!("-conf={}", self.file("Corefile"))])
    }
}

fn random() -> Result<String> {
    let mut bytes = [0; 16];
    fs::File::open("/dev/urandom").and_then(|mut f| f.read_exact(&mut bytes)).context("cannot read /dev/urandom")?;
    Ok(hex(&bytes))
}

pub(crate) fn make(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))
}

pub(crate) fn write(path: &Path, content: &str) -> Result<()> {
    fs::write(path, content).with_context(|| format!("cannot write {}", path.display()))
}

pub(crate) fn write_json(path: &Path, content: &Value) -> Result<()> {
    write(path, &format!("{content:#}\n"))
}

/// Writes a file that only its owner may read.
fn write_secret(path: &Path, content: &str) -> Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let file = fs::File::options().create(true).truncate(true).write(true).mode(0o600).open(path);
    file.and_then(|mut f| f.write_all(content.as_bytes())).with_context(|| format!("cannot write {}", path.display()))
}
