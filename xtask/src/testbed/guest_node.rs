//! A node in an emulated machine: a kubelet and a container engine on a kernel with cgroup v2.
//!
//! The other nodes of a test bed have the kernel of this machine. A guest has Debian's cloud kernel. Its kubelet and
//! its engine use the cgroup driver that the caller names: with `systemd`, systemd is the guest's first process.
//!
//! The network card of the guest is qemu's user network, and qemu runs in the network of the test bed: what the guest
//! sends comes from qemu's own sockets there, so it reaches the API server, services and names as the other nodes do.
//! The guest's pods are on one bridge with that card and have addresses of the same range. The API server reaches the
//! kubelet by an address of the guest that the test bed's network has too, at which qemu listens.
//!
//! Images are unpacked on this machine, where that takes two seconds, and are part of the guest's disk. The guest's
//! console is the log of the program `guest-NAME`. On it the guest prints a line for each control group of a pod whose
//! values have changed: `GROUP PATH cpu.weight cpu.max memory.max`.

use super::engine::{self, ENGINE_FOLDER, UNUSED_PLUGINS};
use super::network::Plan;
use super::plane::{Argv, DOMAIN, make};
use crate::guest::{Machine, Root, newest_cloud_kernel, write_disk_initramfs};
use crate::sh;
use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The part of a node that makes the control groups of pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CgroupDriver {
    Cgroupfs,
    Systemd,
}

impl CgroupDriver {
    pub(crate) fn name(self) -> &'static str {
        match self {
            CgroupDriver::Cgroupfs => "cgroupfs",
            CgroupDriver::Systemd => "systemd",
        }
    }
}

/// Programs of Debian that the guest needs beside the kubelet.
const PROGRAMS: [&str; 10] = [
    "/bin/mount",
    "/bin/umount",
    "/usr/bin/containerd",
    "/usr/bin/containerd-shim-runc-v2",
    "/usr/bin/ctr",
    "/usr/sbin/runc",
    "/lib/systemd/systemd",
    "/usr/lib/cni/bridge",
    "/usr/lib/cni/host-local",
    "/usr/lib/cni/loopback",
];

const MODULES: [&str; 4] = ["overlay", "virtio_net", "bridge", "veth"];

const DISK_MIB: u32 = 1600;
const MEMORY_MIB: u32 = 2048;

/// How long the engine on this machine may take to start.
const PATIENCE: Duration = Duration::from_secs(60);

const INIT: &str = r#"#!/bin/busybox sh
/bin/busybox --install -s /bin 2> /dev/null
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /run
mount -t tmpfs none /tmp
mkdir -p /dev/pts
mount -t devpts none /dev/pts
mount --make-rshared /
. /etc/guest
hostname $NODE
for m in $(cat /modules/order); do insmod /modules/$m 2> /dev/null; done
ip link set lo up
ip link add br0 type bridge
ip link set eth0 master br0
ip link set eth0 up
ip link set br0 up
ip addr add $ADDRESS/16 dev br0
ip route add default via $GATEWAY
echo; echo "CONTROLLERS $(cat /sys/fs/cgroup/cgroup.controllers)"
if [ $DRIVER = systemd ]; then
    exec /lib/systemd/systemd --unit=node.target --show-status=no --log-target=console --log-level=notice
fi
exec /node
"#;

const NODE: &str = r#"#!/bin/busybox sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
. /etc/guest
echo "FIRST $(cat /proc/1/comm)"
containerd --config /etc/containerd.toml > /run/containerd.log 2>&1 &
until ctr version > /dev/null 2>&1; do sleep 0.5; done
echo "ENGINE after $(cut -d ' ' -f 1 /proc/uptime) s"
kubelet --config=/etc/kubelet.json --kubeconfig=/etc/kubeconfig --hostname-override=$NODE --node-ip=$ADDRESS \
    > /run/kubelet.log 2>&1 &
tail -f /run/kubelet.log | grep '^[EF]' &
while :; do
    for d in $(find /sys/fs/cgroup -type d -path '*pod*' 2> /dev/null); do
        now="$(cat $d/cpu.weight) $(cat $d/cpu.max) $(cat $d/memory.max)"
        seen=/tmp/$(basename $d)
        [ "$(cat $seen 2> /dev/null)" = "$now" ] || { echo "$now" > $seen; echo "GROUP $d $now"; }
    done 2> /dev/null
    sleep 1
done
"#;

/// systemd starts the node's programs and nothing else.
const TARGET: &str = "[Unit]\nDefaultDependencies=no\nRequires=node.service\n";
const SERVICE: &str = "[Unit]\nDefaultDependencies=no\n[Service]\nExecStart=/node\nDelegate=yes\n\
                       StandardOutput=tty\nStandardError=tty\nTTYPath=/dev/console\n";

/// Files of one guest.
pub(crate) struct GuestNode<'a> {
    pub(crate) name: &'a str,
    pub(crate) driver: CgroupDriver,
    /// Which guest of the test bed this is.
    pub(crate) index: usize,
    /// The folder of the test bed.
    pub(crate) testbed: &'a Path,
    pub(crate) bin: &'a Path,
    pub(crate) kubeconfig: PathBuf,
    pub(crate) plan: Plan,
}

impl GuestNode<'_> {
    fn dir(&self) -> PathBuf {
        self.testbed.join("guests").join(self.name)
    }

    /// The guest's address, which the test bed's network has too.
    pub(crate) fn address(&self) -> String {
        format!("10.220.0.{}", 15 + self.index)
    }

    /// Makes the disk with these archives of images, and returns how the emulator is called.
    pub(crate) fn prepare(&self, archives: &[PathBuf]) -> Result<Argv> {
        let dir = self.dir();
        make(&dir)?;
        let kernel = newest_cloud_kernel()?;
        let root = Root::new(&dir.join("root"), INIT)?;
        for program in PROGRAMS {
            root.add_program(Path::new(program), program)?;
        }
        root.add_program(&self.bin.join("kubelet"), "/usr/bin/kubelet")?;
        root.add_modules(&kernel, &MODULES)?;
        self.write_files(&root)?;
        self.unpack_images(&root.inside(ENGINE_FOLDER), archives)?;
        let (disk, initramfs) = (dir.join("disk"), dir.join("initramfs"));
        root.into_disk(&disk, DISK_MIB)?;
        fs::remove_dir_all(dir.join("root")).context("cannot remove the guest's files")?;
        write_disk_initramfs(&dir, &kernel, &initramfs)?;
        let address = self.address();
        let network = format!(
            "user,model=virtio-net-pci,net=10.220.0.0/16,host=10.220.0.2,hostfwd=tcp:{address}:10250-{address}:10250"
        );
        let machine = Machine {
            kernel: &kernel,
            initramfs: &initramfs,
            disk: Some(&disk),
            memory_mib: MEMORY_MIB,
            network: &network,
        };
        let command = machine.command();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        Ok(words.map(|word| word.to_string_lossy().into_owned()).collect())
    }

    fn write_files(&self, root: &Root) -> Result<()> {
        fs::create_dir_all(root.inside("/var/log/pods"))?;
        root.link("/var/run", "../run")?;
        root.write("/etc/passwd", "root:x:0:0::/:/bin/sh\n")?;
        root.write("/etc/group", "root:x:0:\n")?;
        root.write("/etc/hosts", "127.0.0.1 localhost\n")?;
        root.write("/etc/resolv.conf", "")?;
        let words = [
            format!("NODE={}", self.name),
            format!("DRIVER={}", self.driver.name()),
            format!("ADDRESS={}", self.address()),
            "GATEWAY=10.220.0.2\n".to_owned(),
        ];
        root.write("/etc/guest", &words.join("\n"))?;
        root.write_script("/node", NODE)?;
        root.write("/etc/systemd/system/node.target", TARGET)?;
        root.write("/etc/systemd/system/node.service", SERVICE)?;
        root.copy(&self.testbed.join("keys/kubelet-client.crt"), "/etc/kubelet-client.crt")?;
        root.copy(&self.testbed.join("keys/api/apiserver.crt"), "/etc/apiserver.crt")?;
        let kubeconfig = fs::read_to_string(&self.kubeconfig).context("the guest has no user at the API server")?;
        let mut kubeconfig: Value = serde_json::from_str(&kubeconfig).context("a kubeconfig is JSON here")?;
        kubeconfig["clusters"][0]["cluster"]["certificate-authority"] = json!("/etc/apiserver.crt");
        root.write("/etc/kubeconfig", &kubeconfig.to_string())?;
        root.write("/etc/kubelet.json", &self.kubelet_config().to_string())?;
        root.write("/etc/containerd.toml", &self.containerd_config())?;
        let network = json!({
            "cniVersion": "1.0.0",
            "name": "guest",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "br0",
                    "ipam": {
                        "type": "host-local",
                        "ranges": [[{
                            "subnet": "10.220.0.0/16", "rangeStart": "10.220.1.1", "rangeEnd": "10.220.1.250",
                            "gateway": "10.220.0.2",
                        }]],
                        "routes": [{ "dst": "0.0.0.0/0" }],
                    },
                },
                { "type": "loopback" },
            ],
        });
        root.write("/etc/cni/10-guest.conflist", &network.to_string())?;
        Ok(())
    }

    fn kubelet_config(&self) -> Value {
        json!({
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "cgroupDriver": self.driver.name(),
            "failSwapOn": false,
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "authentication": {
                "anonymous": { "enabled": false },
                "webhook": { "enabled": true },
                "x509": { "clientCAFile": "/etc/kubelet-client.crt" },
            },
            "authorization": { "mode": "Webhook" },
            "clusterDNS": [self.plan.dns()],
            "clusterDomain": DOMAIN,
            "resolvConf": "/etc/resolv.conf",
            "evictionHard": { "memory.available": "50Mi", "nodefs.available": "1%" },
            "imageGCHighThresholdPercent": 100,
            "nodeLeaseDurationSeconds": 40,
        })
    }

    fn containerd_config(&self) -> String {
        engine::settings(Path::new("/etc/cni"), self.driver == CgroupDriver::Systemd, "")
    }

    /// Fills the folder of the guest's engine with an engine of this machine.
    fn unpack_images(&self, folder: &Path, archives: &[PathBuf]) -> Result<()> {
        let dir = self.dir();
        let socket = dir.join("engine.sock");
        let config = format!(
            "version = 2\nroot = \"{}\"\nstate = \"{}\"\n\
             disabled_plugins = [\"io.containerd.grpc.v1.cri\", {UNUSED_PLUGINS}]\n[grpc]\naddress = \"{}\"\n",
            folder.display(),
            dir.join("engine").display(),
            socket.display(),
        );
        fs::write(dir.join("engine.toml"), config)?;
        let log = File::create(dir.join("engine.log"))?;
        let mut command = Command::new("containerd");
        command.arg("--config").arg(dir.join("engine.toml")).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut engine = Engine(command.spawn().context("cannot start containerd")?);
        let ctr = || {
            let mut ctr = Command::new("ctr");
            ctr.arg("--address").arg(&socket);
            ctr
        };
        let began = Instant::now();
        while !sh::works(ctr().arg("version")) {
            if began.elapsed() > PATIENCE {
                bail!("containerd does not start: {}", fs::read_to_string(dir.join("engine.log")).unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        for archive in archives {
            sh::output(ctr().args(["--namespace", "k8s.io", "images", "import"]).arg(archive))?;
        }
        engine.end();
        Ok(())
    }
}

/// An engine of this machine, which ends with the value.
struct Engine(Child);

impl Engine {
    /// Ends the engine as its owner would, so that everything it knows is written.
    fn end(&mut self) {
        // The child was not waited for yet, so its number is its own.
        let _ = kill(Pid::from_raw(self.0.id() as i32), Signal::SIGTERM);
        let _ = self.0.wait();
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            self.end();
        }
    }
}
