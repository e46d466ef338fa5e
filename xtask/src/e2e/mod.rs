//! `cargo xtask e2e`: whole stories on a real cluster or a real machine, with the figures they measured.

mod attempts;
mod deadline;
mod kube;
mod kube_deadline;
mod kube_move;
mod kube_ps;
mod kube_share;
mod kube_v2;
mod local_deadline;
mod ps_job;
mod trace;
mod train;

use crate::programs::Programs;
use anyhow::{Context, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::time::Instant;

#[derive(clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    story: Story,
}

#[derive(clap::Subcommand)]
enum Story {
    /// Pods that people already have are reshaped in place: the last to come ends sooner, nothing restarts,
    /// and everything is put back.
    ///
    /// Brings up a test bed of two nodes, trains three models on one of them without and with a policy,
    /// kills the node agent and the operator, stops the API server, and uninstalls. Prints what was measured;
    /// fails if a promise was broken.
    KubeShare(kube_share::Args),
    /// Training jobs move to where the cluster gains: the same jobs under the cluster's scheduler, `specon`
    /// and `gainshare`.
    ///
    /// Brings up a test bed of three nodes and lets real training jobs arrive at random, once under each
    /// policy, while a watcher sees to it that no job is ever alive twice. Prints what was measured; fails
    /// if a promise was broken.
    KubeMove(kube_move::Args),
    /// Distributed jobs whose tasks are resized and scaled while they run, beside stock pods with fixed requests.
    ///
    /// Brings up a test bed of two nodes and lets real parameter-server jobs arrive over time, as stock pods and
    /// under `operator`. Slows one server down by hand, and lets workers come and go. Prints what was measured;
    /// fails if a task restarted or a step was lost.
    KubePs(kube_ps::Args),
    /// Pods with deadlines on a real cluster: the same mix under the default policy and under `qos`.
    ///
    /// Brings up a test bed of two nodes and runs ten real training pods on one of them, once under each
    /// policy. Prints which deadlines were met and how well ends were predicted; fails if `qos` misses a
    /// feasible deadline.
    KubeDeadline(kube_deadline::Args),
    /// Pods are resized in place on a node with cgroup v2: an emulated machine, with each of the two cgroup drivers.
    ///
    /// Brings up a test bed whose second node is an emulated machine with Debian's cloud kernel, and compares the
    /// files of the kernel there with what operator and node agent asked for. Prints the values; fails if one differs.
    KubeV2(kube_v2::Args),
    /// Jobs with deadlines on this machine, without Kubernetes: the same mix with equal shares and under `qos`.
    ///
    /// Measures how fast the machine trains, derives lengths and deadlines from that, and runs ten real
    /// training jobs on one core, once under each policy. Prints which deadlines were met and how well ends
    /// were predicted; fails if `qos` misses a feasible deadline.
    LocalDeadline(local_deadline::Args),
}

pub(crate) fn run(args: Args) -> Result<()> {
    match args.story {
        Story::KubeShare(args) => kube_share::run(&args),
        Story::KubeMove(args) => kube_move::run(&args),
        Story::KubePs(args) => kube_ps::run(&args),
        Story::KubeDeadline(args) => kube_deadline::run(&args),
        Story::KubeV2(args) => kube_v2::run(&args),
        Story::LocalDeadline(args) => local_deadline::run(&args),
    }
}

/// The shorter stories that belong to `cargo xtask test`, one after the other. The cluster of each comes up while no
/// story measures speed: beside `soak`, which counts, and beside the faults of the story before.
pub(crate) fn short(programs: &Programs, soak: impl FnOnce() -> Result<()>) -> Result<()> {
    let (share, moves) = (kube_share::Args::short(programs), kube_move::Args::short(programs));
    let began = Instant::now();
    let (cluster, soaked) = at_once(|| kube_share::up(programs), soak);
    soaked?;
    let cluster = kube_share::run_on(cluster?, began, &share, programs, || kube_move::up(&moves, programs))?;
    kube_move::run_on(cluster, Instant::now(), &moves, programs)?;
    local_deadline::run(&local_deadline::Args::short(programs))
}

/// Runs both at the same time.
fn at_once<A: Send, B>(first: impl FnOnce() -> A + Send, second: impl FnOnce() -> B) -> (A, B) {
    std::thread::scope(|scope| {
        let first = scope.spawn(first);
        let second = second();
        (first.join().expect("what runs beside a story panicked"), second)
    })
}

/// The options of every story.
#[derive(clap::Args)]
struct StoryArgs {
    /// The programs in this folder instead of newly built ones.
    #[arg(long, value_name = "FOLDER")]
    programs: Option<PathBuf>,
    /// As JSON.
    #[arg(short, long, value_parser = ["json"])]
    output: Option<String>,
}

impl StoryArgs {
    /// With the programs that were built for the tests.
    fn with(programs: &Programs) -> StoryArgs {
        StoryArgs { programs: Some(programs.folder().to_path_buf()), output: None }
    }

    fn programs(&self) -> Result<Programs> {
        let Some(folder) = &self.programs else { return Programs::build() };
        Programs::in_folder(&absolute(folder)?)
    }

    /// Prints what was measured: as JSON, or with `print`.
    fn print<T: Serialize>(&self, figures: &T, print: impl FnOnce(&T)) -> Result<()> {
        match self.output {
            Some(_) => println!("{}", serde_json::to_string_pretty(figures)?),
            None => print(figures),
        }
        Ok(())
    }
}

/// A folder that the user named, for programs that are started from other working folders.
fn absolute(folder: &Path) -> Result<PathBuf> {
    folder.canonicalize().with_context(|| format!("cannot find {}", folder.display()))
}
