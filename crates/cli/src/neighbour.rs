//! Commands that are programs of their own: `gainshare operator` becomes `gainshare-operator`, which lies beside it.
//!
//! The programs of a cluster are built apart, because a user on one machine needs none of Kubernetes. The
//! image and the release contain all of them in one folder.

use anyhow::{Error, anyhow};
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Replaces this process by `program` with `args`. Returns only if that failed, with the reason and the remedy.
pub fn become_program(program: &str, args: &[OsString]) -> Error {
    let beside = std::env::current_exe().ok().and_then(|own| Some(own.parent()?.join(program)));
    let path = beside.filter(|path| path.is_file()).unwrap_or_else(|| program.into());
    let error = Command::new(&path).args(args).exec();
    match error.kind() {
        std::io::ErrorKind::NotFound => anyhow!(
            "{program} is not installed: it must lie beside gainshare or in the PATH. \
             `cargo build --release --workspace` builds it, and the container image contains it"
        ),
        _ => anyhow!("cannot start {}: {error}", path.display()),
    }
}
