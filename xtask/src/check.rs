//! `cargo xtask check`: the rules of the project that a machine can check.

use crate::setup::{self, Installed};
use crate::sh;
use anyhow::{Context, Result, bail};

#[derive(clap::Args)]
pub(crate) struct Args {}

/// The files that the program itself writes and that are committed, so that they can be read and applied without building anything, each with its command.
const GENERATED: [(&str, &str); 3] = [
    ("docs/reference/cli.md", "reference"),
    ("docs/policies.md", "policies"),
    ("deploy/chart/crds/gainshare.yaml", "crd"),
];

/// The chart as plain YAML, for those without Helm. Its freshness is looked at where Helm is there: in the manager's test.
const MANIFESTS: &str = "deploy/gainshare.yaml";

/// Which crates may not be reached from which: the layers of ARCHITECTURE.md, and what keeps `core` replayable.
const ABSENT: [(&str, &[&str]); 4] = [
    ("gainshare-core", &["tokio", "kube", "nix", "libc", "rand", "gainshare-limits", "gainshare-daemon"]),
    ("gainshare-limits", &["gainshare-daemon", "gainshare-sim", "gainshare-workloads"]),
    ("gainshare-operator", &["gainshare-daemon", "gainshare-sim", "gainshare-workloads", "gainshare", "openssl"]),
    ("gainshare-daemon", &["gainshare-sim", "gainshare-workloads", "gainshare"]),
];

pub(crate) fn run(_: Args) -> Result<()> {
    setup::packages()?;
    let installed = Installed { bin: setup::tools()?, venv: Default::default() };
    run_with(&installed)
}

pub(crate) fn run_with(installed: &Installed) -> Result<()> {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    sh::run(sh::cargo().args(["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"]))?;
    layers()?;
    let mut deny = sh::cargo();
    // Advisories need a database of their own from the network; licences, bans and sources come with the crates.
    deny.args(["deny", "--locked", "check", "bans", "licenses", "sources"]);
    installed.equip(&mut deny);
    sh::run(&mut deny)?;
    fresh()
}

fn layers() -> Result<()> {
    for (package, absent) in ABSENT {
        let tree =
            sh::output(sh::cargo().args(["tree", "--package", package, "--edges", "normal", "--prefix", "none"]))?;
        for crate_name in absent {
            let found = tree.lines().skip(1).find(|line| line.split(' ').next() == Some(crate_name));
            if let Some(line) = found {
                bail!(
                    "{package} reaches {line}, which its layer forbids: see ARCHITECTURE.md; `cargo tree -p {package} -i {crate_name}` shows how"
                );
            }
        }
    }
    eprintln!("layers hold");
    Ok(())
}

fn written_by(command: &str) -> Result<String> {
    sh::output(sh::cargo().args(["run", "--release", "--quiet", "--package", "gainshare", "--", command]))
}

fn fresh() -> Result<()> {
    for (file, command) in GENERATED {
        let committed = std::fs::read_to_string(sh::root().join(file))
            .with_context(|| format!("{file} is missing: run `cargo xtask generate`"))?;
        if committed != written_by(command)? {
            bail!("{file} no longer says what the program does: run `cargo xtask generate` and commit it");
        }
        eprintln!("{file} is fresh");
    }
    Ok(())
}

pub(crate) fn generate() -> Result<()> {
    for (file, command) in GENERATED {
        write(file, &written_by(command)?)?;
    }
    let helm = crate::testbed::programs()?.join("helm");
    let chart = sh::root().join("deploy/chart");
    let rendered = sh::output(
        std::process::Command::new(helm)
            .args(["template", "gainshare"])
            .arg(chart)
            .args(["--namespace", "gainshare-system", "--kube-version", "1.35.0", "--include-crds", "--no-hooks"])
            .args(["--set", "authority.create=false"]),
    )?;
    let namespace = "apiVersion: v1\nkind: Namespace\nmetadata:\n  name: gainshare-system\n";
    write(
        MANIFESTS,
        &format!("# The chart in deploy/chart as plain YAML, by `cargo xtask generate`.\n{namespace}{rendered}"),
    )
}

fn write(file: &str, text: &str) -> Result<()> {
    let path = sh::root().join(file);
    std::fs::create_dir_all(path.parent().expect("generated files lie in folders"))?;
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}
