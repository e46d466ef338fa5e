//! The commands that run in a cluster, or talk to one.

pub mod agent;
pub mod crd;
pub mod operator;
pub mod plugin;
mod training;

use tracing_subscriber::EnvFilter;

/// Programs of a cluster log to standard error, which the cluster keeps. `GAINSHARE_LOG` says how much.
fn log(usual: &str) {
    let filter = EnvFilter::try_from_env("GAINSHARE_LOG").unwrap_or_else(|_| EnvFilter::new(usual));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(false).init();
}
