//! Brings a cluster up and takes it down.
//!
//! The order is the shortest one that works: the engines of the nodes start and take their images while the
//! API server starts; then everything that talks to the API server starts at once. Coming down is one step
//! that does not depend on how far coming up got: kill what is in the test bed's control group, and
//! namespaces, mounts and interfaces go with the processes; then remove the groups and the folder.

use super::build::{self, Lock};
use super::guest_node::{CgroupDriver, GuestNode};
use super::network::Plan;
use super::node::{self, Node, NodeSpec};
use super::plane::{API_PORT, Plane, make};
use super::process::{Place, run_at};
use super::state::{NETWORK, State, default_base, groups_of, mounts_of};
use super::{image, kwok};
use crate::{cache, packages, sh};
use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// How long one step of coming up may take on a machine that is busy with other things.
const PATIENCE: Duration = Duration::from_secs(120);
/// How much longer a step may take for each make-believe node.
const PATIENCE_PER_KWOK_NODE: Duration = Duration::from_millis(60);
const POLL: Duration = Duration::from_millis(250);
/// How long one kubectl waits, in seconds. Between two of them we check that the program that it waits for still runs.
const WAIT_S: u32 = 10;
/// The kernel's limit for the path of a socket, less what comes after a test bed's folder.
const LONGEST_SOCKET: usize = 107;

/// What a test bed should be.
#[derive(Clone)]
pub(crate) struct Spec {
    /// Tells test beds apart that stand beside each other.
    pub(crate) name: String,
    /// The folder of all test beds' state.
    pub(crate) base: PathBuf,
    pub(crate) nodes: Vec<NodeSpec>,
    /// How many make-believe nodes stand beside the real ones.
    pub(crate) kwok_nodes: u32,
    /// Names of nodes that emulated machines may join as, once the cluster is up.
    pub(crate) guests: Vec<String>,
}

impl Spec {
    /// A test bed of that name with these nodes, in the usual folder.
    pub(crate) fn new(name: &str, nodes: &[(&str, f64)]) -> Result<Spec> {
        let parse = |(name, cores): &(&str, f64)| format!("{name}={cores}").parse();
        let nodes = nodes.iter().map(parse).collect::<Result<_>>()?;
        Ok(Spec { name: name.to_owned(), base: default_base()?, nodes, kwok_nodes: 0, guests: Vec::new() })
    }
}

/// A running cluster. It goes down when the value is dropped, unless it is to stay.
pub(crate) struct Testbed {
    state: State,
    stays: bool,
}

impl Testbed {
    /// Brings a cluster up; a running one of the same name and shape is used as it is.
    pub(crate) fn up(spec: &Spec) -> Result<Testbed> {
        let began = Instant::now();
        check(spec)?;
        packages::install_testbed()?;
        let bin = build::programs()?;
        make(&spec.base)?;
        // Held until everything is up, so that two callers never build one test bed together.
        let _lock = lock(&spec.base, &spec.name)?;
        let dir = spec.base.join(&spec.name);
        match State::load(&dir) {
            Ok(Some(state)) if state.ready && state.ended().is_empty() => {
                let same = state.nodes == spec.nodes && state.guests == spec.guests;
                if !same || state.kwok_nodes != spec.kwok_nodes || state.bin != bin {
                    bail!(
                        "a different test bed `{}` is up ({}): `cargo xtask testbed down --name {}` first, or choose another --name",
                        spec.name,
                        shape(&state.nodes, state.kwok_nodes),
                        spec.name,
                    );
                }
                eprintln!("testbed: `{}` is up already", spec.name);
                return Ok(Testbed { state, stays: true });
            }
            Ok(None) if !dir.exists() => {}
            _ => {
                eprintln!("testbed: cleaning up after a test bed `{}` that did not come down", spec.name);
                clean(&dir)?;
            }
        }
        make(&dir)?;
        // An address range is free until its interface is there.
        let numbers = Lock::take(&spec.base.join("network.lock"), "another test bed that comes up")?;
        let mut state = State::new(spec.name.clone(), dir, bin, Plan::free()?);
        state.nodes = spec.nodes.clone();
        state.kwok_nodes = spec.kwok_nodes;
        state.guests = spec.guests.clone();
        state.save()?;
        // From here on a failure takes everything down again.
        let mut testbed = Testbed { state, stays: false };
        testbed.start_network()?;
        drop(numbers);
        if let Err(error) = testbed.start() {
            let kept = spec.base.join(format!("{}.failed", spec.name));
            let _ = std::fs::remove_dir_all(&kept);
            let _ = std::fs::rename(testbed.state.dir.join("log"), &kept);
            return Err(error.context(format!("the test bed did not come up (its logs are in {})", kept.display())));
        }
        testbed.state.ready = true;
        testbed.state.save()?;
        eprintln!("testbed: `{}` is up after {:.0} s", spec.name, began.elapsed().as_secs_f64());
        Ok(testbed)
    }

    /// The test bed of that name that is up.
    pub(crate) fn open(base: &Path, name: &str) -> Result<Testbed> {
        let state = State::load(&base.join(name))?;
        let state = state.filter(|s| s.ready);
        let state =
            state.with_context(|| format!("no test bed `{name}` is up: `cargo xtask testbed up --name {name}`"))?;
        Ok(Testbed { state, stays: true })
    }

    /// Leaves the cluster up when this value is gone.
    pub(crate) fn stay(mut self) {
        self.stays = true;
    }

    /// Takes the cluster down and says whether all of it went.
    pub(crate) fn down(mut self) -> Result<()> {
        self.stays = true;
        let base = self.state.dir.parent().context("a test bed lies in a folder")?;
        down(base, &self.state.name).map(drop)
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.plane().kubeconfig("admin")
    }

    /// The folder with kubectl and helm.
    pub(crate) fn bin(&self) -> &Path {
        &self.state.bin
    }

    /// kubectl as the cluster's administrator.
    pub(crate) fn kubectl(&self) -> Command {
        let mut kubectl = Command::new(self.state.bin.join("kubectl"));
        kubectl.arg("--kubeconfig").arg(self.kubeconfig()).env_remove("KUBECONFIG");
        kubectl
    }

    /// The folder of a node's control group files of one controller, such as `cpu`.
    pub(crate) fn node_cgroup(&self, node: &str, controller: &str) -> Result<PathBuf> {
        self.state.groups()?.node_dir(node, controller)
    }

    /// A file of a node, given as the node sees it (such as `/var/log/pods`), as the machine sees it.
    pub(crate) fn node_path(&self, node: &str, path: &str) -> PathBuf {
        node::on_machine(&self.state.dir, node, path)
    }

    /// A folder of the machine that every node sees under the same path, made if it is not there.
    pub(crate) fn shared_folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.state.dir.join("shared").join(name);
        make(&folder)?;
        Ok(folder)
    }

    /// Sends a signal (to stop it or to continue it, for example) to a program, such as `kube-apiserver` or
    /// `kubelet-NODE`.
    pub(crate) fn signal(&self, program: &str, signal: Signal) -> Result<()> {
        self.state.process(program)?.signal(signal)
    }

    /// Kills a program and waits until it is gone.
    pub(crate) fn kill(&self, program: &str) -> Result<()> {
        let process = self.state.process(program)?;
        process.signal(Signal::SIGKILL)?;
        let began = Instant::now();
        while process.alive() {
            if began.elapsed() > PATIENCE {
                bail!("{program} does not end after SIGKILL");
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// Starts a program again that was killed. These programs have no supervisor, and most of them give up
    /// when a program that they need is not there. So this waits for the programs that it needs before the
    /// start, and until others can use it after the start.
    pub(crate) fn start_again(&mut self, program: &str) -> Result<()> {
        let foundation = ["etcd", "kube-apiserver"];
        let engine_of = program.strip_prefix("containerd-");
        if !foundation.contains(&program) && engine_of.is_none() {
            self.wait_for_api_server()?;
        }
        self.state.start_again(program)?;
        if let Some(node) = engine_of {
            self.wait_for_engine(node)?;
        }
        let both = foundation.iter().all(|p| self.state.process(p).is_ok_and(|p| p.alive()));
        if foundation.contains(&program) && both { self.wait_for_api_server() } else { Ok(()) }
    }

    /// Gives every node an image: an archive as it is, or an image `name` made of programs and the
    /// libraries they need. The first program is the entry point.
    pub(crate) fn load_image(&self, files: &[PathBuf], name: &str) -> Result<()> {
        if let [archive] = files
            && !image::is_program(archive)?
        {
            return self.import(archive);
        }
        let archive = tempfile::NamedTempFile::new_in(&self.state.dir).context("cannot make a temporary file")?;
        image::write_programs(files, name, image::Layout::Docker, archive.path())?;
        self.import(archive.path())
    }

    fn import(&self, archive: &Path) -> Result<()> {
        self.state.nodes.iter().try_for_each(|n| node::import(&self.state.dir, &n.name, archive))
    }

    /// Boots an emulated machine that joins as the node `name`, one of the guests of the test bed. It has the images
    /// in these archives beside those that every node has.
    pub(crate) fn start_guest(&mut self, name: &str, driver: CgroupDriver, archives: &[PathBuf]) -> Result<()> {
        let index = self.state.guests.iter().position(|guest| guest == name);
        let guest = GuestNode {
            name,
            driver,
            index: index.with_context(|| format!("{name} is no guest of this test bed"))?,
            testbed: &self.state.dir,
            bin: &self.state.bin,
            kubeconfig: self.plane().kubeconfig(&format!("node-{name}")),
            plan: self.state.plan(),
        };
        let archives: Vec<PathBuf> = [&[self.state.dir.join("base-images.tar")], archives].concat();
        let (argv, address) = (guest.prepare(&archives)?, guest.address());
        let network = Place::Network(self.state.process(NETWORK)?);
        run_at(Command::new("ip").args(["addr", "add", &format!("{address}/32"), "dev", "lo"]), &network)?;
        self.state.start(&guest_program(name), argv, None)
    }

    /// What a guest has written on its console.
    pub(crate) fn guest_console(&self, name: &str) -> String {
        let text = std::fs::read(self.state.log(&guest_program(name))).unwrap_or_default();
        String::from_utf8_lossy(&text).replace('\r', "")
    }

    /// Switches a guest off.
    pub(crate) fn stop_guest(&mut self, name: &str) -> Result<()> {
        self.kill(&guest_program(name))?;
        self.state.programs.remove(&guest_program(name));
        self.state.save()
    }

    fn plane(&self) -> Plane<'_> {
        Plane { dir: &self.state.dir, bin: &self.state.bin, plan: self.state.plan() }
    }

    fn start_network(&mut self) -> Result<()> {
        self.state.groups()?.create()?;
        make(&self.state.dir.join("log"))?;
        self.state.start_at(NETWORK, holder(), None, &Place::NewNetwork)?;
        self.state.plan().connect(self.state.process(NETWORK)?, self.state.nodes.len())
    }

    fn start(&mut self) -> Result<()> {
        let plan = self.state.plan();
        let groups = self.state.groups()?;
        let specs = self.state.nodes.clone();
        let names: Vec<String> = specs.iter().map(|n| n.name.clone()).collect();
        // Guests come after the nodes: the first name is that of a node of this machine.
        self.plane().write_files(&[names.clone(), self.state.guests.clone()].concat())?;
        let (etcd, api) = (self.plane().etcd(), self.plane().api_server());
        self.state.start("etcd", etcd, None)?;
        self.state.start("kube-apiserver", api, None)?;

        let mut kubelets = Vec::new();
        for (index, spec) in specs.iter().enumerate() {
            groups.create_node(&spec.name, spec.cores)?;
            let node = Node {
                spec,
                testbed: &self.state.dir,
                bin: &self.state.bin,
                kubeconfig: self.plane().kubeconfig(&format!("node-{}", spec.name)),
                cgroup_root: groups.node_root(&spec.name),
                address: plan.node(index)?,
                plan,
            };
            node.write_files()?;
            let (binds, containerd, kubelet) = (node.binds(), node.containerd(), node.kubelet());
            let place = Place::NewMounts(self.state.process(NETWORK)?, &binds);
            self.state.start_at(&mounts_of(&spec.name), holder(), None, &place)?;
            self.state.start(&format!("containerd-{}", spec.name), containerd, Some(&spec.name))?;
            kubelets.push((spec.name.clone(), kubelet));
        }
        if !specs.is_empty() {
            self.give_base_images()?;
        }
        self.wait_for_api_server()?;
        let (controllers, scheduler, dns) = (
            self.plane().controller_manager(kwok::grace_s(self.state.kwok_nodes)),
            self.plane().scheduler(),
            self.plane().dns(),
        );
        self.state.start("kube-controller-manager", controllers, None)?;
        for (node, kubelet) in kubelets {
            self.state.start(&format!("kubelet-{node}"), kubelet, Some(&node))?;
        }
        self.state.start("kube-scheduler", scheduler, None)?;
        if let Some(first) = names.first() {
            self.state.start("coredns", dns, None)?;
            // kube-proxy gives up when the node it speaks for is not there yet.
            self.wait("the first node to register", &format!("kubelet-{first}"), |t| {
                Ok(t.comes_about("create", &format!("node/{first}")))
            })?;
            let proxy = self.plane().proxy();
            self.state.start("kube-proxy", proxy, None)?;
        }
        if self.state.kwok_nodes > 0 {
            let argv = kwok::prepare(&self.plane(), self.state.kwok_nodes)?;
            self.state.start("kwok", argv, None)?;
            let tainted = !self.state.nodes.is_empty();
            kwok::create_nodes(|| self.kubectl(), &self.state.dir, self.state.kwok_nodes, tainted)?;
        }
        for name in &names {
            self.wait(&format!("node {name} to be ready"), &format!("kubelet-{name}"), |t| {
                Ok(groups.has_pod_groups(name) && t.comes_about("condition=Ready", &format!("node/{name}")))
            })?;
        }
        groups.deal_processors(&specs.iter().map(|n| (n.name.as_str(), n.cores)).collect::<Vec<_>>())?;
        if self.state.kwok_nodes > 0 {
            self.wait("the make-believe nodes to be ready", "kwok", |t| {
                Ok(kwok::ready_nodes(t.kubectl())? == t.state.kwok_nodes as usize)
            })?;
        }
        self.wait("the default service account", "kube-controller-manager", |t| {
            Ok(t.comes_about("create", "serviceaccount/default"))
        })?;
        self.state.check_alive()
    }

    fn give_base_images(&mut self) -> Result<()> {
        let archive = self.state.dir.join("base-images.tar");
        image::write_base(&archive)?;
        for spec in self.state.nodes.clone() {
            self.wait_for_engine(&spec.name)?;
        }
        self.import(&archive)
    }

    fn wait_for_api_server(&self) -> Result<()> {
        let address = SocketAddr::new(self.state.plan().api().parse().context("the plan has addresses")?, API_PORT);
        self.wait("the API server to be ready", "kube-apiserver", |t| {
            // kubectl takes a third of a second of processor time, whether anybody listens or not.
            let listens = TcpStream::connect_timeout(&address, POLL).is_ok();
            Ok(listens && sh::works(t.kubectl().args(["get", "--raw", "/readyz"])))
        })
    }

    fn wait_for_engine(&self, node: &str) -> Result<()> {
        let socket = self.node_path(node, "/run/containerd/containerd.sock");
        self.wait(&format!("the engine of {node}"), &format!("containerd-{node}"), |_| {
            Ok(socket.exists() && sh::works(Command::new("ctr").arg("--address").arg(&socket).arg("version")))
        })
    }

    /// Whether an object has a condition of `kubectl wait`, or gets it within some seconds. One kubectl that waits
    /// takes less processor time than several that ask.
    fn comes_about(&self, condition: &str, object: &str) -> bool {
        let words = ["wait", &format!("--for={condition}"), object, &format!("--timeout={WAIT_S}s")];
        sh::works(self.kubectl().args(words))
    }

    /// Waits until `done`; if `program` ends meanwhile, or the wait is too long, the error shows what it wrote last.
    fn wait(&self, what: &str, program: &str, done: impl Fn(&Testbed) -> Result<bool>) -> Result<()> {
        let began = Instant::now();
        let patience = PATIENCE + PATIENCE_PER_KWOK_NODE * self.state.kwok_nodes;
        while !done(self)? {
            if self.state.ended().contains(&program) {
                bail!("{program} ended. The last lines it wrote:\n{}", self.state.tail(program));
            }
            if began.elapsed() > patience {
                bail!(
                    "waited {} s for {what}. The last lines of {}:\n{}",
                    patience.as_secs(),
                    self.state.log(program).display(),
                    self.state.tail(program)
                );
            }
            // To ask after thousands of nodes is work for the API server, too.
            std::thread::sleep(POLL.max(began.elapsed() / 20));
        }
        Ok(())
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        if !self.stays
            && let Err(error) = clean(&self.state.dir)
        {
            eprintln!("testbed: {error:#}");
        }
    }
}

/// The emulator of a guest.
fn guest_program(guest: &str) -> String {
    format!("guest-{guest}")
}

/// A program that does nothing but keep the namespaces it was started in.
fn holder() -> Vec<String> {
    vec!["sleep".to_owned(), "infinity".to_owned()]
}

/// Takes a test bed down, whatever state it is in; says whether there was one.
pub(crate) fn down(base: &Path, name: &str) -> Result<bool> {
    check_name(name)?;
    let dir = base.join(name);
    let lock = if base.exists() { Some(lock(base, name)?) } else { None };
    let there = dir.exists() || !groups_of(&dir)?.existing().is_empty();
    if there {
        clean(&dir)?;
    }
    drop(lock);
    Ok(there)
}

fn lock(base: &Path, name: &str) -> Result<Lock> {
    Lock::take(&base.join(format!("{name}.lock")), &format!("another command on the test bed `{name}`"))
}

fn clean(dir: &Path) -> Result<()> {
    let state = State::load(dir).ok().flatten();
    let processes: Vec<_> = state.iter().flat_map(|s| s.programs.values()).map(|p| p.process).collect();
    groups_of(dir)?.destroy(|| processes.iter().for_each(|p| p.reap()))?;
    if let Some(state) = state {
        state.plan().disconnect()?;
    }
    match std::fs::remove_dir_all(dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", dir.display()))
        }
        _ => Ok(()),
    }
}

fn check_name(name: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if name.is_empty() || name.len() > 20 || !name.chars().all(fits) {
        bail!("`{name}` is no name for a test bed: up to 20 small letters, digits and dashes");
    }
    Ok(())
}

fn check(spec: &Spec) -> Result<()> {
    check_name(&spec.name)?;
    if !nix::unistd::geteuid().is_root() {
        bail!("a test bed makes control groups, mounts and interfaces: run it as root");
    }
    if !spec.base.is_absolute() {
        bail!("{} is no absolute path", spec.base.display());
    }
    for path in [&spec.base, &cache::folder()?] {
        if let Some(own) = node::hidden(path) {
            bail!("every node has a {own} of its own, so {} cannot be below it: choose another folder", path.display());
        }
    }
    let mut names: Vec<&str> = spec.nodes.iter().map(|n| n.name.as_str()).collect();
    names.sort_unstable();
    if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        bail!("two nodes are called {}", pair[0]);
    }
    if spec.nodes.is_empty() && spec.kwok_nodes == 0 {
        bail!("a test bed needs a node: --nodes, --node or --kwok");
    }
    for name in names {
        let socket = node::on_machine(&spec.base.join(&spec.name), name, "/run/containerd/containerd.sock");
        if socket.as_os_str().len() > LONGEST_SOCKET {
            bail!("{} is too long for a socket: choose a shorter --state or a shorter name", socket.display());
        }
    }
    Ok(())
}

/// Nodes in words.
pub(crate) fn shape(nodes: &[NodeSpec], kwok_nodes: u32) -> String {
    let real = nodes.iter().map(|n| format!("{}={}", n.name, n.cores));
    let fake = (kwok_nodes > 0).then(|| format!("{kwok_nodes} make-believe nodes"));
    real.chain(fake).collect::<Vec<_>>().join(", ")
}
