//! Installs what the tests need on a machine that has only Debian and Rust.
//!
//! Everything that takes long and is pinned is kept outside the checkout, in a folder named after what is
//! in it: a second clone finds it, and a change of version builds it beside the old one. [`steps`] lists
//! what is there and what is missing, so that a command can say what it is about to do.

use crate::sh::Urgency;
use crate::{cache, packages, sh, testbed};
use anyhow::{Result, bail};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tool from crates.io with its pinned version.
pub(crate) type Tool = (&'static str, &'static str);

pub(crate) const CARGO_DENY: Tool = ("cargo-deny", "0.20.2");

/// Something that is installed or built before tests can run.
pub(crate) struct Step {
    pub(crate) what: String,
    pub(crate) missing: bool,
    /// Minutes that it takes from nothing, on two cores.
    pub(crate) cold_min: u32,
}

/// What the full tests need, in the order in which it is installed.
pub(crate) fn steps() -> Result<Vec<Step>> {
    let packages = packages::missing_for_tests();
    let mut steps = vec![Step {
        what: match packages.as_slice() {
            [] => "Debian packages: Docker, qemu, a kernel, PyTorch, etcd, containerd".to_owned(),
            missing => format!("Debian packages by apt-get, as root: {}", missing.join(", ")),
        },
        missing: !packages.is_empty(),
        cold_min: 5,
    }];
    let what = format!("{} {} from crates.io", CARGO_DENY.0, CARGO_DENY.1);
    let missing = !tool_home(CARGO_DENY)?.join("bin").join(CARGO_DENY.0).exists();
    steps.push(Step { what, missing, cold_min: 3 });
    let any = |prefix: &str, folder: PathBuf| {
        let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.into_iter().any(|name| name.to_string_lossy().starts_with(prefix))
    };
    let what = "a Python environment with the training frameworks".to_owned();
    steps.push(Step { what, missing: !any("venv", cache::folder()?), cold_min: 3 });
    let what = "Kubernetes, CoreDNS, Helm and kwok from the Go module registry".to_owned();
    steps.push(Step { what, missing: !any("bin-", cache::folder()?.join("testbed")), cold_min: 5 });
    Ok(steps)
}

/// What was installed, for the commands that use it.
pub(crate) struct TestTools {
    /// The Python environment with the frameworks.
    pub(crate) venv: PathBuf,
}

impl TestTools {
    /// The variables through which the tests find the frameworks.
    pub(crate) fn environment(&self) -> Vec<(&'static str, OsString)> {
        vec![("GAINSHARE_TEST_VENV", self.venv.clone().into_os_string())]
    }
}

/// Everything that the full tests need.
pub(crate) fn everything() -> Result<()> {
    before_tests()?;
    tool(CARGO_DENY, Urgency::Normal).map(drop)
}

/// What must be there before the tests begin. The check of licences builds its own tool beside them.
pub(crate) fn before_tests() -> Result<TestTools> {
    packages::install_all()?;
    let venv = venv()?;
    testbed::programs()?;
    Ok(TestTools { venv })
}

fn tool_home((name, version): Tool) -> Result<PathBuf> {
    Ok(cache::folder()?.join(format!("{name}-{version}")))
}

/// Builds the tool if it is missing, and returns its program.
pub(crate) fn tool(tool: Tool, urgency: Urgency) -> Result<PathBuf> {
    let ((name, version), home) = (tool, tool_home(tool)?);
    let program = home.join("bin").join(name);
    if !program.exists() {
        let mut install = sh::cargo();
        install.args(["install", "--locked", "--force", "--root"]).arg(&home).arg(format!("{name}@{version}"));
        // The tool runs for seconds. Without optimisation and debug information its build takes half the time.
        install
            .env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0")
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .env("CARGO_PROFILE_RELEASE_DEBUG", "0")
            .env_remove("CARGO_TARGET_DIR");
        sh::run(&mut urgency.apply(install))?;
    }
    Ok(program)
}

/// Makes the Python environment with the frameworks whose output the collectors are held against.
pub(crate) fn venv() -> Result<PathBuf> {
    let script = sh::root().join("crates/progress/tests/frameworks/make-venv");
    let printed = sh::output(Command::new(&script).env("GAINSHARE_CACHE", cache::folder()?))?;
    let path = printed.lines().last().unwrap_or_default().trim().to_owned();
    if !Path::new(&path).join("bin/python3").exists() {
        bail!("{} printed `{path}`, which is no Python environment", script.display());
    }
    Ok(PathBuf::from(path))
}
