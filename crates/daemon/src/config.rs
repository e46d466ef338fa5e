//! The daemon's settings: the flags of `gainshare up`, and the same names in an optional TOML file.

use crate::duration;
use crate::paths::Paths;
use crate::words;
use gainshare_core::model::Span;
use gainshare_core::policy::{Aim, Flowcon, Policy, PolicyError, Preset, ShareRule};
use gainshare_core::signal::Normalisation;
use gainshare_limits::usage::NodeResources;
use gainshare_limits::{LimitMode, RuntimeKind};
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Everything that can be set. Fields are what the flags are called, with `_` for `-`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DaemonConfig {
    pub policy: Preset,
    /// What policies that share by gain make as early as possible; missing: the end of the jobs.
    pub aim: Option<Aim>,
    /// FlowCon's α; the preset's if missing. So are the next three.
    pub alpha: Option<f64>,
    #[serde(with = "duration::optional_text")]
    pub interval: Option<Duration>,
    pub beta: Option<f64>,
    pub normalise: Option<Normalisation>,
    pub mode: LimitMode,
    /// Catch the GPU work of all jobs, so that it follows their shares; without it only of jobs that ask for it.
    pub gpu: bool,
    /// How many jobs may run at once; missing: as many as come.
    pub slots: Option<usize>,
    /// How many cores the jobs may use; missing: all.
    pub cores: Option<usize>,
    /// How many jobs at once the thread pools of a tuned start should leave room for, at least;
    /// missing: those that are there.
    pub expect: Option<usize>,
    pub runtime: Vec<RuntimeKind>,
    /// Adopt every container, not only labelled ones.
    pub docker_all: bool,
    /// Believe the labels `gainshare.owner` and `gainshare.floor` of adopted containers. Without
    /// this they are ignored, and such containers belong to the daemon's user: a label that a
    /// container gives itself must not take shares from other owners.
    pub docker_trust_labels: bool,
    pub docker_socket: Option<PathBuf>,
    /// `none`, or a loopback address with a port (0: any free one).
    pub listen: Listen,
    pub state_dir: Option<PathBuf>,
    pub runtime_dir: Option<PathBuf>,
    /// End when there was no live job for this long.
    #[serde(with = "duration::optional_text")]
    pub idle_exit: Option<Duration>,
    /// Time without a sign of life from the daemon after which the guard puts all limits back.
    #[serde(with = "duration::text")]
    pub lease: Duration,
    pub react: React,
    /// What counts as the whole of the machine's disks and network, in bytes per second: use is measured against it.
    pub block_bandwidth: u64,
    pub net_bandwidth: u64,
    /// The program that is run as `PROGRAM supervise …` and `PROGRAM guard …`; missing: this one.
    pub program: Option<PathBuf>,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        DaemonConfig {
            policy: Preset::default(),
            aim: None,
            alpha: None,
            interval: None,
            beta: None,
            normalise: None,
            mode: LimitMode::default(),
            gpu: false,
            slots: None,
            cores: None,
            expect: None,
            runtime: vec![RuntimeKind::Process],
            docker_all: false,
            docker_trust_labels: false,
            docker_socket: None,
            listen: Listen::default(),
            state_dir: None,
            runtime_dir: None,
            idle_exit: None,
            lease: Duration::from_secs(15),
            react: React::Tick,
            // One SATA disk, one gigabit link: only the order of magnitude matters, because growth
            // is compared between jobs.
            block_bandwidth: NodeResources::BLOCK_BYTES_S,
            net_bandwidth: NodeResources::NET_BYTES_S,
            program: None,
        }
    }
}

/// When a decision is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum React {
    /// When the interval is over, or a job came or went.
    #[default]
    Tick,
    /// At every report too.
    Sample,
}

/// Where the daemon listens besides its Unix socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Listen {
    None,
    Loopback(SocketAddr),
}

impl Default for Listen {
    fn default() -> Self {
        Listen::Loopback(SocketAddr::from(([127, 0, 0, 1], 0)))
    }
}

impl std::str::FromStr for Listen {
    type Err = String;
    fn from_str(text: &str) -> Result<Listen, String> {
        if text == "none" {
            return Ok(Listen::None);
        }
        let address: SocketAddr = text.parse().map_err(|_| {
            format!("`{text}` is not an address to listen on: write 127.0.0.1:PORT, [::1]:PORT or none")
        })?;
        let loopback = match address.ip() {
            IpAddr::V4(ip) => ip.is_loopback(),
            IpAddr::V6(ip) => ip.is_loopback(),
        };
        if !loopback {
            return Err(format!(
                "refusing to listen on {address}: the API has no TLS; listen on 127.0.0.1 and forward the port with ssh"
            ));
        }
        Ok(Listen::Loopback(address))
    }
}

impl TryFrom<String> for Listen {
    type Error = String;
    fn try_from(text: String) -> Result<Listen, String> {
        text.parse()
    }
}

impl std::fmt::Display for Listen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Listen::None => f.write_str("none"),
            Listen::Loopback(address) => address.fmt(f),
        }
    }
}

impl From<Listen> for String {
    fn from(listen: Listen) -> String {
        listen.to_string()
    }
}

/// What is wrong with the settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {path}: {source}")]
    Read { path: String, source: std::io::Error },
    #[error("{path}: {what}")]
    Syntax { path: String, what: String },
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error("{0}")]
    NotForRealJobs(String),
    #[error("--{flag} belongs to the policy {of} and means nothing to {policy}: add --policy {of} or leave it out")]
    NotForPolicy { flag: &'static str, of: &'static str, policy: &'static str },
    #[error("--{flag} must be at least {least}, not {value}")]
    TooSmall { flag: &'static str, least: String, value: String },
    #[error("--runtime is empty: name process, docker or both")]
    NoRuntime,
}

impl DaemonConfig {
    /// The user's own file, whether it is there or not.
    pub fn default_file() -> Option<PathBuf> {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let base = var("XDG_CONFIG_HOME").or_else(|| var("HOME").map(|h| h.join(".config")))?;
        Some(base.join("gainshare/config.toml"))
    }

    pub fn load(path: &Path) -> Result<DaemonConfig, ConfigError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: name.clone(), source })?;
        toml::from_str(&text).map_err(|e| ConfigError::Syntax { path: name, what: words::of_toml(e, &text) })
    }

    pub fn paths(&self) -> Paths {
        Paths::find(self.state_dir.clone(), self.runtime_dir.clone())
    }

    /// What control will run.
    pub fn policy(&self) -> Result<Policy, ConfigError> {
        let mut policy = Policy::from(self.policy.for_real_jobs().map_err(ConfigError::NotForRealJobs)?);
        policy.react_to_reports = self.react == React::Sample;
        match &mut policy.share {
            ShareRule::Flowcon(flowcon) => self.fill(flowcon),
            _ => {
                let given = [
                    ("alpha", self.alpha.is_some()),
                    ("beta", self.beta.is_some()),
                    ("interval", self.interval.is_some()),
                    ("normalise", self.normalise.is_some()),
                ];
                if let Some((flag, _)) = given.into_iter().find(|(_, set)| *set) {
                    return Err(ConfigError::NotForPolicy { flag, of: "flowcon", policy: self.policy.name() });
                }
            }
        }
        if let Some(aim) = self.aim {
            policy.set_aim(aim).map_err(|_| ConfigError::NotForPolicy {
                flag: "aim",
                of: Preset::Gainshare.name(),
                policy: self.policy.name(),
            })?;
        }
        policy.validate()?;
        Ok(policy)
    }

    /// The name of the aim that is in force, of policies that have one.
    pub(crate) fn aim_name(&self) -> Option<String> {
        let aim = self.policy().ok()?.aim()?;
        Some(aim.name().to_owned())
    }

    fn fill(&self, flowcon: &mut Flowcon) {
        flowcon.alpha = self.alpha.unwrap_or(flowcon.alpha);
        flowcon.beta = self.beta.unwrap_or(flowcon.beta);
        flowcon.normalisation = self.normalise.unwrap_or(flowcon.normalisation);
        if let Some(interval) = self.interval {
            let factor = flowcon.longest_interval.0 / flowcon.interval.0.max(1);
            flowcon.interval = Span(u64::try_from(interval.as_micros()).unwrap_or(u64::MAX));
            flowcon.longest_interval = Span(flowcon.interval.0.saturating_mul(factor));
        }
    }

    pub fn validate(&self) -> Result<(), ConfigError> {
        self.policy()?;
        let small = |flag, least: &str, value: String| Err(ConfigError::TooSmall { flag, least: least.into(), value });
        if self.slots == Some(0) {
            return small("slots", "1", "0".into());
        }
        if self.cores == Some(0) {
            return small("cores", "1", "0".into());
        }
        if self.lease < Duration::from_secs(3) {
            // The lease is renewed once a second; less than three chances would lapse on a busy machine.
            return small("lease", "3s", duration::format_duration(self.lease));
        }
        if self.runtime.is_empty() {
            return Err(ConfigError::NoRuntime);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_is_listened_on() {
        assert_eq!("none".parse(), Ok(Listen::None));
        for good in ["127.0.0.1:0", "[::1]:8080", "127.9.9.9:1"] {
            assert!(good.parse::<Listen>().is_ok(), "{good}");
        }
        for bad in ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "localhost", "80", ""] {
            let error = bad.parse::<Listen>().unwrap_err();
            assert!(error.contains("127.0.0.1"), "{bad}: {error}");
        }
    }

    #[test]
    fn flags_reach_the_policy_or_are_refused() {
        let text = "policy = \"flowcon\"\nalpha = 0.1\ninterval = \"8s\"\nreact = \"sample\"";
        let config: DaemonConfig = toml::from_str(text).unwrap();
        let policy = config.policy().unwrap();
        assert!(policy.react_to_reports);
        let ShareRule::Flowcon(flowcon) = policy.share else { panic!("not what was asked for") };
        assert_eq!((flowcon.alpha, flowcon.interval), (0.1, Span::from_secs(8)));

        let wrong: DaemonConfig = toml::from_str("policy = \"na\"\nalpha = 0.1").unwrap();
        assert_eq!(
            wrong.validate().unwrap_err().to_string(),
            "--alpha belongs to the policy flowcon and means nothing to na: add --policy flowcon or leave it out"
        );
        assert!(toml::from_str::<DaemonConfig>("slot = 3").unwrap_err().message().contains("slot"));
    }

    #[test]
    fn the_aim_reaches_the_policy_or_is_refused() {
        let read = |text: &str| toml::from_str::<DaemonConfig>(text).unwrap();
        assert_eq!(read("").policy().unwrap().aim(), Some(Aim::Finish));
        for policy in ["gainshare", "qos"] {
            let config = read(&format!("policy = \"{policy}\"\naim = \"quality\""));
            assert_eq!(config.policy().unwrap().aim(), Some(Aim::Quality), "{policy}");
        }
        assert_eq!(
            read("policy = \"flowcon\"\naim = \"quality\"").validate().unwrap_err().to_string(),
            "--aim belongs to the policy gainshare and means nothing to flowcon: add --policy gainshare or leave it out"
        );
        assert!(toml::from_str::<DaemonConfig>("aim = \"fast\"").unwrap_err().message().contains("finish"));
    }

    #[test]
    fn the_default_is_our_own_and_what_starves_jobs_is_refused() {
        assert_eq!(DaemonConfig::default().policy, Preset::Gainshare);
        assert!(DaemonConfig::default().validate().is_ok());
        let starves: DaemonConfig = toml::from_str("policy = \"srpt\"").unwrap();
        let error = starves.validate().unwrap_err().to_string();
        assert!(error.contains("srpt") && error.contains("starves"), "{error}");
        assert!(toml::from_str::<DaemonConfig>("policy = \"none\"").unwrap_err().message().contains("known are"));
    }

    #[test]
    fn a_config_survives_its_own_file() {
        let config =
            DaemonConfig { slots: Some(3), idle_exit: Some(Duration::from_secs(600)), ..DaemonConfig::default() };
        assert_eq!(toml::from_str::<DaemonConfig>(&toml::to_string(&config).unwrap()).unwrap(), config);
    }
}
