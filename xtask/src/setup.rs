//! Installs what the tests need on a machine that has only Debian and Rust.
//!
//! Everything that takes long and is pinned is kept outside the checkout, in a folder named after what is in it, so that a second
//! clone finds it and a change of version builds it anew.

use crate::{sh, testbed};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What the tests call that Debian provides: real engines, kernels and frameworks.
const PACKAGES: [&str; 13] = [
    "docker.io",
    "qemu-system-x86",
    "linux-image-cloud-amd64",
    "busybox-static",
    "cpio",
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

/// What a test bed is made of that Debian provides: see `docs/testbed.md`.
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

/// Tools from crates.io, pinned.
const TOOLS: [(&str, &str); 2] = [("cargo-nextest", "0.9.151"), ("cargo-deny", CARGO_DENY)];
const CARGO_DENY: &str = "0.20.2";

/// Where pinned things are kept: `$GAINSHARE_CACHE`, or below the user's cache folder.
pub(crate) fn cache() -> Result<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = var("GAINSHARE_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|c| c.join("gainshare")))
        .or_else(|| var("HOME").map(|h| h.join(".cache/gainshare")))
        .context("neither HOME nor GAINSHARE_CACHE is set: nowhere to keep the tools")?;
    std::fs::create_dir_all(&base).with_context(|| format!("cannot create {}", base.display()))?;
    Ok(base)
}

/// What was installed, for the commands that use it.
pub(crate) struct Installed {
    /// Folders to put in front of PATH.
    pub(crate) bin: Vec<PathBuf>,
    /// The Python environment with the frameworks.
    pub(crate) venv: PathBuf,
}

impl Installed {
    /// Lets `command` find the tools and the frameworks.
    pub(crate) fn equip(&self, command: &mut Command) {
        let old = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(self.bin.iter().cloned().chain(std::env::split_paths(&old)));
        command.env("PATH", path.expect("our own folders have no colon")).env("GAINSHARE_TEST_VENV", &self.venv);
    }
}

pub(crate) fn everything() -> Result<Installed> {
    packages()?;
    let bin = tools()?;
    let venv = venv()?;
    testbed::programs()?;
    Ok(Installed { bin, venv })
}

/// Installs the Debian packages that the tests need.
pub(crate) fn packages() -> Result<()> {
    let all: Vec<&str> = PACKAGES.into_iter().chain(TESTBED_PACKAGES).collect();
    install(&all)
}

/// Installs the Debian packages that a test bed needs.
pub(crate) fn testbed_packages() -> Result<()> {
    install(&TESTBED_PACKAGES)
}

fn install(packages: &[&'static str]) -> Result<()> {
    let installed = |package: &str| {
        sh::output(Command::new("dpkg-query").args(["-W", "-f=${db:Status-Status}", package]))
            .is_ok_and(|status| status == "installed")
    };
    let missing: Vec<&str> = packages.iter().copied().filter(|p| !installed(p)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    if !sh::works(Command::new("apt-get").arg("--version")) {
        bail!(
            "the tests need {}, and there is no apt-get to install them: install their like by hand",
            missing.join(", ")
        );
    }
    // SAFETY: geteuid has no preconditions.
    let root = unsafe { libc::geteuid() } == 0;
    let apt = || {
        let mut command = if root { Command::new("env") } else { Command::new("sudo") };
        command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get"]);
        command
    };
    sh::run(apt().args(["update", "-q"]))?;
    sh::run(apt().args(["install", "-q", "-y", "--no-install-recommends"]).args(&missing))
        .with_context(|| format!("the tests need the Debian packages {}", missing.join(", ")))
}

/// Builds the missing tools and returns the folders they are in.
pub(crate) fn tools() -> Result<Vec<PathBuf>> {
    TOOLS
        .iter()
        .map(|(name, version)| {
            let home = cache()?.join(format!("{name}-{version}"));
            let bin = home.join("bin");
            if !bin.join(name).exists() {
                let version = format!("{name}@{version}");
                // Debug information and optimisation of a tool that runs for a second cost minutes here.
                sh::run(
                    sh::cargo()
                        .args(["install", "--locked", "--force", "--root"])
                        .arg(&home)
                        .arg(&version)
                        .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "1")
                        .env("CARGO_PROFILE_RELEASE_LTO", "off")
                        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
                        .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
                        .env_remove("CARGO_TARGET_DIR"),
                )?;
            }
            Ok(bin)
        })
        .collect()
}

/// Makes the Python environment with the frameworks whose output the collectors are held against.
pub(crate) fn venv() -> Result<PathBuf> {
    let script = sh::root().join("crates/progress/tests/frameworks/make-venv");
    let printed = sh::output(Command::new(&script).env("GAINSHARE_CACHE", cache()?))?;
    let path = printed.lines().last().unwrap_or_default().trim().to_owned();
    if !Path::new(&path).join("bin/python3").exists() {
        bail!("{} said `{path}`, which is no Python environment", script.display());
    }
    Ok(PathBuf::from(path))
}
