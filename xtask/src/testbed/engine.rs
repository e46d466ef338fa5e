//! The settings of a node's container engine, containerd: the same for nodes on this machine and for emulated ones.

use super::image;
use std::path::Path;

/// Where the engine keeps images and containers, as seen from its node.
pub(super) const ENGINE_FOLDER: &str = "/var/lib/containerd";

/// Parts of the engine that need file systems that are not here.
pub(super) const UNUSED_PLUGINS: &str = r#""io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper""#;

/// The engine's settings file. `cni` is the folder with the settings of the pods' network, `of_node` has further lines
/// about the node's pods.
pub(super) fn settings(cni: &Path, systemd_cgroup: bool, of_node: &str) -> String {
    format!(
        r#"version = 2
root = "{ENGINE_FOLDER}"
state = "/run/containerd"
disabled_plugins = [{UNUSED_PLUGINS}]

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
disable_apparmor = true
{of_node}
[plugins."io.containerd.grpc.v1.cri".cni]
conf_dir = "{cni}"
bin_dir = "/usr/lib/cni"

[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = {systemd_cgroup}
"#,
        pause = image::full_name(image::PAUSE),
        cni = cni.display(),
    )
}
