//! What a test bed remembers about itself between commands.
//!
//! The file is written before anything is made, so a run that was killed in the middle can be cleaned up
//! after: it names the test bed's network, its nodes and every program that was started.

use super::groups::Groups;
use super::image::hex;
use super::network::Plan;
use super::node::NodeSpec;
use super::plane::write;
use super::process::{Place, Process, start};
use crate::cache;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The process that keeps the network.
pub(crate) const NETWORK: &str = "network";
/// The lines of a log that a failure shows.
const LOG_LINES: usize = 12;

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Program {
    argv: Vec<String>,
    /// The node whose mounts it sees, if any.
    node: Option<String>,
    pub(crate) process: Process,
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) name: String,
    /// Whether everything was up once.
    pub(crate) ready: bool,
    /// Folder of the programs.
    pub(crate) bin: PathBuf,
    /// Number of the address plan.
    network: u8,
    pub(crate) nodes: Vec<NodeSpec>,
    pub(crate) kwok_nodes: u32,
    /// Names of nodes that emulated machines may join as.
    #[serde(default)]
    pub(crate) guests: Vec<String>,
    /// Programs by name, such as `kube-apiserver` or `kubelet-NODE`.
    pub(crate) programs: BTreeMap<String, Program>,
    #[serde(skip)]
    pub(crate) dir: PathBuf,
}

/// The process that keeps the mounts of a node.
pub(crate) fn mounts_of(node: &str) -> String {
    format!("mounts-{node}")
}

/// The groups of the test bed in a folder.
pub(crate) fn groups_of(dir: &Path) -> Result<Groups> {
    let name = dir.file_name().and_then(|n| n.to_str()).context("a test bed's folder has a name")?;
    if dir.parent() == Some(&default_base()?) {
        return Groups::of(name);
    }
    // The same name in another folder is another test bed.
    let digest = hex(&Sha256::digest(dir.as_os_str().as_encoded_bytes()));
    Groups::of(&format!("{name}-{}", &digest[..8]))
}

/// Where test beds keep their state unless another place is chosen.
pub(crate) fn default_base() -> Result<PathBuf> {
    Ok(cache::folder()?.join("testbed/run"))
}

impl State {
    pub(crate) fn new(name: String, dir: PathBuf, bin: PathBuf, plan: Plan) -> State {
        let (nodes, guests, programs) = (Vec::new(), Vec::new(), BTreeMap::new());
        State { name, ready: false, bin, network: plan.0, nodes, kwok_nodes: 0, guests, programs, dir }
    }

    /// The state of the test bed in a folder, if there is one.
    pub(crate) fn load(dir: &Path) -> Result<Option<State>> {
        let path = dir.join("state.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        let state: State = serde_json::from_str(&text)
            .with_context(|| format!("{} is damaged: `cargo xtask testbed down` cleans up", path.display()))?;
        Ok(Some(State { dir: dir.to_path_buf(), ..state }))
    }

    pub(crate) fn save(&self) -> Result<()> {
        // Whole or not at all: a reader never sees half a file.
        let partial = self.dir.join("state.json.new");
        write(&partial, &serde_json::to_string_pretty(self)?)?;
        std::fs::rename(&partial, self.dir.join("state.json")).context("cannot rename state.json.new")
    }

    pub(crate) fn plan(&self) -> Plan {
        Plan(self.network)
    }

    pub(crate) fn groups(&self) -> Result<Groups> {
        groups_of(&self.dir)
    }

    pub(crate) fn process(&self, program: &str) -> Result<Process> {
        let found = self.programs.get(program);
        let known = || self.programs.keys().cloned().collect::<Vec<_>>().join(", ");
        Ok(found.with_context(|| format!("the test bed has no program {program}: it has {}", known()))?.process)
    }

    pub(crate) fn log(&self, program: &str) -> PathBuf {
        self.dir.join("log").join(format!("{program}.log"))
    }

    /// Starts a program, in the mounts of a node if one is named, and remembers it.
    pub(crate) fn start(&mut self, name: &str, argv: Vec<String>, node: Option<&str>) -> Result<()> {
        let network = self.process(NETWORK)?;
        let place = match node {
            Some(node) => Place::Node { network, mounts: self.process(&mounts_of(node))? },
            None => Place::Network(network),
        };
        self.start_at(name, argv, node, &place)
    }

    pub(crate) fn start_at(&mut self, name: &str, argv: Vec<String>, node: Option<&str>, place: &Place) -> Result<()> {
        let process = start(&argv, place, &self.groups()?.system_procs(), &self.log(name))?;
        let program = Program { argv, node: node.map(str::to_owned), process };
        self.programs.insert(name.to_owned(), program);
        self.save()
    }

    /// Starts a program that ended again, as it was started before.
    pub(crate) fn start_again(&mut self, name: &str) -> Result<()> {
        if self.process(name)?.alive() {
            bail!("{name} is running");
        }
        let Program { argv, node, .. } = self.programs[name].clone();
        self.start(name, argv, node.as_deref())
    }

    /// Names of the programs that have ended.
    pub(crate) fn ended(&self) -> Vec<&str> {
        self.programs.iter().filter(|(_, p)| !p.process.alive()).map(|(name, _)| name.as_str()).collect()
    }

    /// An error if a program has ended, with the last lines it wrote.
    pub(crate) fn check_alive(&self) -> Result<()> {
        let ended = self.ended();
        let Some(first) = ended.first() else { return Ok(()) };
        bail!("{} ended. The last lines of {}:\n{}", ended.join(", "), self.log(first).display(), self.tail(first))
    }

    /// The last lines that a program wrote.
    pub(crate) fn tail(&self, program: &str) -> String {
        let text = std::fs::read(self.log(program)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }
}
