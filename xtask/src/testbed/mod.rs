//! `cargo xtask testbed`: a real Kubernetes on one machine, for trying things and for tests.
//!
//! `docs/testbed.md` says what it is made of and what it cannot do. Inside these chores, [`Testbed::up`]
//! gives a cluster that goes down with the value.

mod build;
mod cluster;
mod engine;
mod groups;
mod guest_node;
pub(crate) mod image;
mod kwok;
mod network;
mod node;
mod plane;
mod process;
mod state;

pub(crate) use build::programs;
pub(crate) use cluster::{Spec, Testbed};
pub(crate) use groups::numbers;
pub(crate) use guest_node::CgroupDriver;
pub(crate) use image::BUSYBOX;

use crate::programs::Programs;
use anyhow::{Context, Result};
use cluster::{down, shape};
use node::{NodeSpec, machine_cores};
use serde_json::json;
use state::default_base;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Tells test beds apart that stand beside each other.
    #[arg(long, global = true, default_value = "default")]
    name: String,
    /// The folder of the test beds' state [default: testbed/run in the cache folder].
    #[arg(long, global = true, env = "GAINSHARE_TESTBED_STATE")]
    state: Option<PathBuf>,
    #[command(subcommand)]
    command: TestbedCommand,
}

#[derive(clap::Subcommand)]
enum TestbedCommand {
    /// Brings a cluster up, and leaves it up.
    Up(UpArgs),
    /// Takes the cluster down and removes everything of it, also after a run that was killed.
    Down,
    /// What is up.
    Status {
        /// As JSON.
        #[arg(short, long, value_parser = ["json"])]
        output: Option<String>,
    },
    /// Gives every node an image: an archive of images, or programs.
    LoadImage {
        /// One archive as `docker save` writes it, or programs, the first of which the image starts
        /// [default: build this project's].
        files: Vec<PathBuf>,
        /// What pods call the image made of programs.
        #[arg(long, default_value = "gainshare:local")]
        image: String,
    },
    /// Runs kubectl as the cluster's administrator.
    Kubectl {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Kills a program of the cluster, for example kube-apiserver or kubelet-NODE.
    Kill { program: String },
    /// Starts a program again that was killed.
    Start { program: String },
    /// Only builds the programs, if they are not built yet, and prints their folder.
    Build,
}

#[derive(clap::Args)]
struct UpArgs {
    /// This many nodes, node-1 and so on, which share the machine's cores evenly [default: 2].
    #[arg(long, value_name = "N", conflicts_with = "node")]
    nodes: Option<u16>,
    /// A node and its cores, such as `big=1.5`; may be given again.
    #[arg(long, value_name = "NAME=CORES")]
    node: Vec<NodeSpec>,
    /// This many make-believe nodes beside the real ones.
    #[arg(long, value_name = "N", default_value_t = 0)]
    kwok: u32,
}

impl UpArgs {
    fn nodes(&self) -> Result<Vec<NodeSpec>> {
        if !self.node.is_empty() {
            return Ok(self.node.clone());
        }
        let count = self.nodes.unwrap_or(2);
        // To hundredths, rounded down, so that the parts never add up to more than the whole.
        let cores = (machine_cores() / f64::from(count.max(1)) * 100.0).floor() / 100.0;
        (1..=count).map(|i| format!("node-{i}={cores}").parse()).collect()
    }
}

pub(crate) fn run(args: Args) -> Result<()> {
    let base = args.state.map_or_else(default_base, Ok)?;
    let open = || Testbed::open(&base, &args.name);
    match args.command {
        TestbedCommand::Up(up) => {
            let spec = Spec { name: args.name, base, nodes: up.nodes()?, kwok_nodes: up.kwok, guests: Vec::new() };
            let testbed = Testbed::up(&spec)?;
            println!("export KUBECONFIG={}", testbed.kubeconfig().display());
            println!("export PATH={}:$PATH", testbed.bin().display());
            testbed.stay();
            Ok(())
        }
        TestbedCommand::Down => {
            if !down(&base, &args.name)? {
                eprintln!("testbed: no test bed `{}` is there", args.name);
            }
            Ok(())
        }
        TestbedCommand::Status { output } => status(&base, &args.name, output.is_some()),
        TestbedCommand::LoadImage { files, image } => {
            let testbed = open()?;
            let files = if files.is_empty() { Programs::build()?.image_files() } else { files };
            testbed.load_image(&files, &image)
        }
        TestbedCommand::Kubectl { args } => Err(open()?.kubectl().args(args).exec()).context("cannot start kubectl"),
        TestbedCommand::Kill { program } => open()?.kill(&program),
        TestbedCommand::Start { program } => open()?.start_again(&program),
        TestbedCommand::Build => {
            println!("{}", programs()?.display());
            Ok(())
        }
    }
}

fn status(base: &std::path::Path, name: &str, as_json: bool) -> Result<()> {
    let found = state::State::load(&base.join(name))?;
    let Some(found) = found else {
        match as_json {
            true => println!("{:#}", json!({ "name": name, "up": false })),
            false => println!("no test bed `{name}` is up"),
        }
        return Ok(());
    };
    let ended = found.ended();
    let (ready, nodes) = (found.ready && ended.is_empty(), shape(&found.nodes, found.kwok_nodes));
    let kubeconfig = base.join(name).join("kubeconfig/admin");
    if as_json {
        let groups = found.groups()?;
        let nodes: Vec<_> = found
            .nodes
            .iter()
            .map(|n| json!({ "name": n.name, "cores": n.cores, "cgroup_root": groups.node_root(&n.name) }))
            .collect();
        let programs: std::collections::BTreeMap<_, _> = found
            .programs
            .iter()
            .map(|(name, p)| (name, json!({ "pid": p.process.pid, "alive": p.process.alive() })))
            .collect();
        let status = json!({
            "name": name, "up": ready, "kubeconfig": kubeconfig, "bin": found.bin, "dir": found.dir, "nodes": nodes,
            "kwok_nodes": found.kwok_nodes, "programs": programs,
        });
        println!("{status:#}");
        return Ok(());
    }
    println!("test bed `{name}`: {} ({nodes})", if ready { "up" } else { "not whole" });
    if !ended.is_empty() {
        println!("ended: {}; logs are in {}", ended.join(", "), found.dir.join("log").display());
    }
    println!("export KUBECONFIG={}\nexport PATH={}:$PATH", kubeconfig.display(), found.bin.display());
    Ok(())
}
