//! `cargo xtask check`: the rules of the project that a machine can check.

use crate::setup::{self, Installed};
use crate::sh;
use anyhow::{Context, Result, bail};

#[derive(clap::Args)]
pub(crate) struct Args {}

/// The one file that is generated from the program and committed, so that it can be read without building anything.
const CLI_REFERENCE: &str = "docs/reference/cli.md";

/// Which crates may not be reached from which: the layers of ARCHITECTURE.md, and what keeps `core` replayable.
const ABSENT: [(&str, &[&str]); 4] = [
    ("gainshare-core", &["tokio", "kube", "nix", "libc", "rand", "gainshare-runtime", "gainshare-agent"]),
    ("gainshare-runtime", &["gainshare-agent", "gainshare-sim", "gainshare-workloads"]),
    ("gainshare-kube", &["gainshare-agent", "gainshare-sim", "gainshare-workloads", "gainshare", "openssl"]),
    ("gainshare-agent", &["gainshare-sim", "gainshare-workloads", "gainshare"]),
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

fn reference() -> Result<String> {
    sh::output(sh::cargo().args(["run", "--release", "--quiet", "--package", "gainshare", "--", "reference"]))
}

fn fresh() -> Result<()> {
    let committed = std::fs::read_to_string(sh::root().join(CLI_REFERENCE))
        .with_context(|| format!("{CLI_REFERENCE} is missing: run `cargo xtask generate`"))?;
    if committed != reference()? {
        bail!("{CLI_REFERENCE} no longer says what the program does: run `cargo xtask generate` and commit it");
    }
    eprintln!("{CLI_REFERENCE} is fresh");
    Ok(())
}

pub(crate) fn generate() -> Result<()> {
    let path = sh::root().join(CLI_REFERENCE);
    std::fs::create_dir_all(path.parent().expect("the reference lies in a folder"))?;
    std::fs::write(&path, reference()?).with_context(|| format!("cannot write {}", path.display()))
}
