//! Stands in until the daemon lands.
pub struct Daemon;
impl Daemon {
    pub fn run(_c: gainshare_agent::config::DaemonConfig) -> anyhow::Result<()> {
        anyhow::bail!("no daemon in this build")
    }
}
pub fn guard(_s: &std::path::Path, _r: &std::path::Path, _l: std::time::Duration) -> anyhow::Result<()> {
    Ok(())
}
