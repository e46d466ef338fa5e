//! Debian packages that the tests and the test bed need, installed with apt-get.

use crate::sh;
use anyhow::{Context, Result, bail};
use std::path::Path;
use std::process::Command;

/// Debian packages that the tests use: real engines, kernels and frameworks.
const PACKAGES: [&str; 15] = [
    "docker.io",
    "qemu-system-x86",
    "linux-image-cloud-amd64",
    "busybox-static",
    "cpio",
    "e2fsprogs",
    "systemd",
    "python3",
    "python3-venv",
    "python3-numpy",
    "python3-torch",
    // The reference BLAS that python3-torch pulls otherwise is ten times slower.
    "libopenblas0-pthread",
    "procps",
    "util-linux",
    "tmux",
];

/// Debian packages that a test bed uses: see `docs/testbed.md`.
const TESTBED_PACKAGES: [&str; 8] = [
    "etcd-server",
    "containerd",
    "runc",
    "containernetworking-plugins",
    "busybox-static",
    "nftables",
    "iproute2",
    "openssl",
];

/// Debian packages that `cargo xtask sanitize` uses; the sanitizers are part of gcc.
const SANITIZER_PACKAGES: [&str; 3] = ["valgrind", "gcc", "util-linux"];

/// The packages that the tests need and that are not installed.
pub(crate) fn missing_for_tests() -> Vec<&'static str> {
    missing(&all())
}

fn all() -> Vec<&'static str> {
    PACKAGES.into_iter().chain(TESTBED_PACKAGES).collect()
}

/// Installs the Debian packages that the tests need.
pub(crate) fn install_all() -> Result<()> {
    install(&all())
}

/// Installs the Debian packages that a test bed needs.
pub(crate) fn install_testbed() -> Result<()> {
    install(&TESTBED_PACKAGES)
}

/// Installs the Debian packages that `cargo xtask sanitize` needs.
pub(crate) fn install_sanitizers() -> Result<()> {
    install(&SANITIZER_PACKAGES)
}

fn missing(packages: &[&'static str]) -> Vec<&'static str> {
    let installed = |package: &str| {
        sh::output(Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", package]))
            .is_ok_and(|status| status == "installed")
    };
    packages.iter().copied().filter(|package| !installed(package)).collect()
}

fn install(packages: &[&'static str]) -> Result<()> {
    let missing = missing(packages);
    if missing.is_empty() {
        return Ok(());
    }
    if !sh::works(Command::new("apt-get").arg("--version")) {
        bail!(
            "the tests need {}, and there is no apt-get to install them: install the same by hand",
            missing.join(", ")
        );
    }
    let root = nix::unistd::geteuid().is_root();
    // A machine without a kernel of its own, such as a container, never boots the one that emulated machines use.
    // Debian makes its initial file system twice during the installation, and nothing would read it.
    let never_boots = !has_kernel(Path::new("/boot"));
    let apt = || {
        let mut command = if root { Command::new("env") } else { Command::new("sudo") };
        command.arg("DEBIAN_FRONTEND=noninteractive").args(never_boots.then_some("INITRD=No")).arg("apt-get");
        command
    };
    sh::run(apt().args(["update", "-q"]))?;
    sh::run(apt().args(["install", "-q", "-y", "--no-install-recommends"]).args(&missing))
        .with_context(|| format!("the tests need the Debian packages {}", missing.join(", ")))
}

/// Whether a kernel is installed that the machine could boot.
fn has_kernel(boot: &Path) -> bool {
    let mut names = std::fs::read_dir(boot).into_iter().flatten().flatten().map(|entry| entry.file_name());
    names.any(|name| name.to_string_lossy().starts_with("vmlinuz"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_known_by_its_file() {
        let boot = tempfile::tempdir().unwrap();
        assert!(!has_kernel(boot.path()) && !has_kernel(&boot.path().join("missing")));
        std::fs::write(boot.path().join("vmlinuz-6.1.0-cloud-amd64"), "").unwrap();
        assert!(has_kernel(boot.path()));
    }
}
