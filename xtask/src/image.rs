//! `cargo xtask image`: a container image of all programs, without a container engine.
//!
//! The archive is made from the ordinary release binaries and this machine's loader and shared libraries.
//! `docker load`, `podman load`, `ctr images import` and `kind load image-archive` read it. The Dockerfile
//! at the root makes an image of the same programs in the same places for people who build with Docker.

use crate::programs::{Programs, target_dir};
use crate::testbed::image::{Layout, write_programs};
use anyhow::Result;
use std::path::PathBuf;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image is called gainshare:TAG.
    #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
    tag: String,
    /// Where to write the archive [default: gainshare-TAG.tar in the target folder].
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let programs = Programs::build()?;
    let name = format!("gainshare:{}", args.tag);
    let to = match &args.to {
        Some(to) => to.clone(),
        None => target_dir()?.join(format!("gainshare-{}.tar", args.tag)),
    };
    write_programs(&programs.image_files(), &name, Layout::Oci, &to)?;
    let size_mib = std::fs::metadata(&to)?.len() as f64 / f64::from(1 << 20);
    println!("{name} is in {} ({size_mib:.0} MiB): docker load --input {}", to.display(), to.display());
    Ok(())
}
