//! The folder outside the checkout that keeps what takes long to build.

use anyhow::{Context, Result};
use std::path::PathBuf;

/// `$GAINSHARE_CACHE`, or a folder below the user's cache folder. It exists after the call.
pub(crate) fn folder() -> Result<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = var("GAINSHARE_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|c| c.join("gainshare")))
        .or_else(|| var("HOME").map(|h| h.join(".cache/gainshare")))
        .context("neither HOME nor GAINSHARE_CACHE is set: nowhere to keep the tools")?;
    std::fs::create_dir_all(&base).with_context(|| format!("cannot create {}", base.display()))?;
    Ok(base)
}
