//! The files that pods write into their volumes, as the kubelet keeps them.
//!
//! **Problem.** Not every program prints its progress: some write a CSV file or TensorBoard's event files
//! into a volume. On the node, the volumes of a pod are below one folder of the kubelet. Volumes that were
//! mounted from Secrets are there, too.
//!
//! **How.** The administrator who installs the node agent decides whether that folder is mounted. If so, the
//! agent opens only volumes of kinds that programs write into, and only files below them: a link out of a volume
//! is not followed.

use gainshare_progress::Root;
use std::path::{Component, Path, PathBuf};

/// Kinds of volumes by the names of their folders, and the folder below a volume in which its files are.
const KINDS: [(&str, &str); 8] = [
    ("kubernetes.io~empty-dir", ""),
    ("kubernetes.io~csi", "mount"),
    ("kubernetes.io~nfs", ""),
    ("kubernetes.io~local-volume", ""),
    ("kubernetes.io~cephfs", ""),
    ("kubernetes.io~rbd", ""),
    ("kubernetes.io~iscsi", ""),
    ("kubernetes.io~fc", ""),
];

/// The kubelet's folder of pods, if the agent may read it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Volumes(Option<PathBuf>);

impl Volumes {
    pub(crate) fn at(pods: Option<PathBuf>) -> Volumes {
        Volumes(pods)
    }

    /// The folder of the pod's volume that contains `path`, or the reason why there is none, for users.
    pub(crate) fn find(&self, uid: &str, path: &str) -> Result<PathBuf, String> {
        let Some(pods) = &self.0 else {
            let remedy = "set agent.podFiles=true in the chart, or let the job print its progress";
            return Err(format!("node agents here may not read volumes: {remedy}"));
        };
        let mut parts = Path::new(uid).components();
        let (Some(Component::Normal(uid)), None) = (parts.next(), parts.next()) else {
            return Err("its uid is not a name".to_owned());
        };
        let volumes = pods.join(uid).join("volumes");
        let mut folders = KINDS.iter().flat_map(|(kind, below)| {
            let named = std::fs::read_dir(volumes.join(kind)).into_iter().flatten().flatten();
            let mut folders: Vec<PathBuf> = named.map(|volume| volume.path().join(below)).collect();
            folders.sort();
            folders
        });
        let has = |folder: &PathBuf| Root::open(folder).is_ok_and(|root| root.peek(Path::new(path)).is_ok());
        folders.find(has).ok_or_else(|| format!("none of its volumes has {path} yet"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_volumes_that_programs_write_into_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let make = |path: &str| {
            let path = dir.path().join("u1/volumes").join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "loss\n1\n").unwrap();
        };
        make("kubernetes.io~secret/keys/metrics.csv");
        make("kubernetes.io~projected/token/metrics.csv");
        let volumes = Volumes::at(Some(dir.path().to_owned()));
        assert!(volumes.find("u1", "metrics.csv").unwrap_err().contains("none of its volumes"));
        make("kubernetes.io~csi/pvc-1/mount/run/metrics.csv");
        make("kubernetes.io~empty-dir/out/metrics.csv");
        let found = |path: &str| volumes.find("u1", path).unwrap();
        assert!(found("metrics.csv").ends_with("kubernetes.io~empty-dir/out"));
        assert!(found("run/metrics.csv").ends_with("kubernetes.io~csi/pvc-1/mount"));
        // A link out of the volume is not followed, and neither is a name that leads to another pod.
        let out = dir.path().join("u1/volumes/kubernetes.io~empty-dir/out");
        std::os::unix::fs::symlink(dir.path().join("u1/volumes/kubernetes.io~secret/keys"), out.join("keys")).unwrap();
        for (uid, path) in [("u1", "keys/metrics.csv"), ("u1", "../token/metrics.csv"), ("../u1", "metrics.csv")] {
            assert!(volumes.find(uid, path).is_err(), "{uid} {path}");
        }
        assert!(Volumes::default().find("u1", "metrics.csv").unwrap_err().contains("agent.podFiles=true"));
    }
}
