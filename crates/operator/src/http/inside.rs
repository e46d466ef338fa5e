//! The admission webhook that adds the library inside jobs to new pods of namespaces that ask for it.
//!
//! **Problem.** A pod's share of a node changes while it runs, and the number of its threads does not. The library that
//! follows the share must be in the pod before its programs start, and the author should not have to change an image.
//!
//! **How.** In namespaces labelled `gainshare.dev/inside=enabled` a new pod gets two small volumes, a container that
//! puts the library and a page into them before the others start ([`crate::inside`]), and in each container the mounts
//! and the variables of the library. The node agent finds the page on its node and writes the size of the teams.
//!
//! Where the namespace has the label `gainshare.dev/gpu=enabled`, too, or the pod the annotation of that name, one more
//! variable lets the library catch GPU work, and the annotation tells the node agent that the work is to be paced.
//!
//! The added container has no rights: it passes the level *restricted* of the Pod Security Standards. It names the
//! resources that the pod's own containers name, so that quotas accept the pod and its class stays, in small amounts: a
//! pod's CPU weight is never below the largest request of a container that runs before the others.
//!
//! **Properties.** `the_authors_preload_stays_in_front`, `authors_can_say_no`, `a_second_review_finds_nothing_to_add`,
//! `restricted_pod_security_holds`, `quotas_and_classes_hold`, `gpu_work_is_caught_where_somebody_asks_for_it`. A
//! container whose variables come from elsewhere (`envFrom`) does not get the library: one of them may be `LD_PRELOAD`.

use crate::inside::{LIBRARY_FOLDER, PAGE_FOLDER, preload};
use gainshare_kube_api::names::{
    GPU_ANNOTATION, INSIDE_ANNOTATION, INSIDE_VOLUME, PAGE_FILE, PAGE_VOLUME, SHARE_LABEL,
};
use gainshare_kube_api::quantity;
use gainshare_page::{GPU_ON, GPU_VARIABLE, PAGE_VARIABLE, SWITCH_VARIABLE};
use k8s_openapi::api::core::v1::{
    Capabilities, Container, EmptyDirVolumeSource, EnvVar, Pod, PodSpec, ResourceRequirements, SeccompProfile,
    SecurityContext, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use std::collections::BTreeMap;

const PRELOAD_VARIABLE: &str = "LD_PRELOAD";

/// On pods that a kubelet made from a file: they cannot be changed.
const MIRROR_ANNOTATION: &str = "kubernetes.io/config.mirror";

/// The program that puts the library in place, in Gainshare's image.
const PROGRAM: &str = "/usr/local/bin/gainshare-operator";

/// The user of the added container, as of the operator.
const USER: i64 = 65532;

/// The amounts that the added container requests, where the pod's own containers name these resources.
const CPU_MILLI: u64 = 20;
const MEMORY: &str = "32Mi";
const MEMORY_BYTES: u64 = 32 << 20;
const STORAGE: &str = "16Mi";

/// No machine has more cores.
const MOST_THREADS: u64 = 100_000;

/// Variables by which authors size the pool of OpenBLAS.
const BLAS_VARIABLES: [&str; 4] =
    ["OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OPENBLAS_DEFAULT_NUM_THREADS", "OMP_NUM_THREADS"];

/// What is needed to add the library to a pod.
pub(crate) struct Addition<'a> {
    /// Gainshare's image.
    pub(crate) image: &'a str,
    /// The least CPU and memory of each container that the namespace accepts (LimitRange).
    pub(crate) least: (u64, u64),
    /// The namespace asks for the pacing of GPU work.
    pub(crate) paces_gpu_work: bool,
}

impl Addition<'_> {
    /// The pod with the library; nothing if it has the library already, or does not want it.
    pub(crate) fn add(&self, pod: &Pod) -> Option<Pod> {
        if is_unwanted(pod) {
            return None;
        }
        let wanted = pod.metadata.annotations.as_ref().and_then(|notes| notes.get(GPU_ANNOTATION));
        let catches_gpu_work = wanted.map_or(self.paces_gpu_work, |value| value == "enabled");
        let mut changed = pod.clone();
        let spec = changed.spec.as_mut()?;
        if spec.init_containers.iter().flatten().any(is_placing) {
            return self.name_resources(spec).then_some(changed);
        }
        let has_name = |name: &str| [INSIDE_VOLUME, PAGE_VOLUME].contains(&name);
        let volumes = spec.volumes.iter().flatten().map(|volume| volume.name.as_str());
        let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
        if volumes.chain(containers.map(|container| container.name.as_str())).any(has_name) {
            return None;
        }
        let mut blas_may_grow = true;
        let (mut with, mut without) = (Vec::new(), Vec::new());
        for container in &mut spec.containers {
            match obstacle(container) {
                Some(why) => without.push(format!("{}: {why}", container.name)),
                None => {
                    let is_set = |name: &&str| container.env.iter().flatten().any(|variable| variable.name == *name);
                    blas_may_grow &= !BLAS_VARIABLES.iter().any(is_set);
                    load_library(container, catches_gpu_work);
                    with.push(container.name.clone());
                }
            }
        }
        if with.is_empty() {
            return None;
        }
        let placing = self.container(spec, blas_may_grow);
        spec.init_containers.get_or_insert_default().push(placing);
        spec.volumes.get_or_insert_default().extend([volume(INSIDE_VOLUME, "16Mi"), volume(PAGE_VOLUME, "1Mi")]);
        let mut note = format!("library in {}", with.join(", "));
        if !without.is_empty() {
            note += &format!("; not in {}", without.join(", "));
        }
        let notes = changed.metadata.annotations.get_or_insert_default();
        notes.insert(INSIDE_ANNOTATION.to_owned(), note);
        if catches_gpu_work {
            notes.insert(GPU_ANNOTATION.to_owned(), "enabled".to_owned());
        }
        Some(changed)
    }

    /// Adds the resources that another webhook has added to the pod's containers since the library was added. Whether
    /// there are any.
    fn name_resources(&self, spec: &mut PodSpec) -> bool {
        let wanted = self.resources(spec).unwrap_or_default();
        let Some(placing) = spec.init_containers.iter_mut().flatten().find(|container| is_placing(container)) else {
            return false;
        };
        let before = placing.resources.clone().unwrap_or_default();
        let mut after = before.clone();
        for (have, want) in [(&mut after.requests, wanted.requests), (&mut after.limits, wanted.limits)] {
            for (name, amount) in want.into_iter().flatten() {
                have.get_or_insert_default().entry(name).or_insert(amount);
            }
        }
        let has_changed = after != before;
        placing.resources = Some(after);
        has_changed
    }

    /// The container that puts the library in place. It is the last one that runs before the pod's own containers, so
    /// that the page is fresh when they start.
    fn container(&self, spec: &PodSpec, blas_may_grow: bool) -> Container {
        let resources = spec.containers.first().map(|container| quantity::resources(container.resources.as_ref()));
        let request = resources.and_then(|resources| resources.requests.cpu_milli.or(resources.limits.cpu_milli));
        let team = request.map_or(0, |milli| milli.div_ceil(1000).min(MOST_THREADS));
        let mut command = vec![
            PROGRAM.to_owned(),
            "inside".to_owned(),
            format!("--library={LIBRARY_FOLDER}"),
            format!("--page={PAGE_FOLDER}/{PAGE_FILE}"),
            format!("--team={team}"),
        ];
        if blas_may_grow {
            command.push("--blas-may-grow".to_owned());
        }
        Container {
            name: INSIDE_VOLUME.to_owned(),
            image: Some(self.image.to_owned()),
            image_pull_policy: Some("IfNotPresent".to_owned()),
            command: Some(command),
            resources: self.resources(spec),
            security_context: Some(SecurityContext {
                allow_privilege_escalation: Some(false),
                capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
                read_only_root_filesystem: Some(true),
                run_as_non_root: Some(true),
                run_as_user: Some(USER),
                run_as_group: Some(USER),
                seccomp_profile: Some(SeccompProfile {
                    type_: "RuntimeDefault".to_owned(),
                    ..SeccompProfile::default()
                }),
                ..SecurityContext::default()
            }),
            volume_mounts: Some(vec![
                mount(INSIDE_VOLUME, LIBRARY_FOLDER, false),
                mount(PAGE_VOLUME, PAGE_FOLDER, false),
            ]),
            ..Container::default()
        }
    }

    /// A request for each resource that a container of the pod names, and a limit for each that all of them limit.
    /// Requests and limits are equal.
    fn resources(&self, spec: &PodSpec) -> Option<ResourceRequirements> {
        let (least_cpu, least_memory) = self.least;
        let amounts = [
            ("cpu", format!("{}m", CPU_MILLI.max(least_cpu))),
            ("memory", if least_memory > MEMORY_BYTES { least_memory.to_string() } else { MEMORY.to_owned() }),
            ("ephemeral-storage", STORAGE.to_owned()),
        ];
        type Amounts = Option<BTreeMap<String, Quantity>>;
        let names = |map: &Amounts, name: &str| map.as_ref().is_some_and(|map| map.contains_key(name));
        let limits = |container: &Container, name: &str| {
            container.resources.as_ref().is_some_and(|resources| names(&resources.limits, name))
        };
        let requests = |container: &Container, name: &str| {
            container.resources.as_ref().is_some_and(|resources| names(&resources.requests, name))
        };
        let pick = |is_named: &dyn Fn(&str) -> bool| -> Amounts {
            let named = amounts.iter().filter(|(name, _)| is_named(name));
            let picked: BTreeMap<String, Quantity> =
                named.map(|(name, amount)| ((*name).to_owned(), Quantity(amount.clone()))).collect();
            (!picked.is_empty()).then_some(picked)
        };
        let requirements = ResourceRequirements {
            requests: pick(&|name| spec.containers.iter().any(|c| requests(c, name) || limits(c, name))),
            limits: pick(&|name| spec.containers.iter().all(|c| limits(c, name))),
            claims: None,
        };
        requirements.requests.is_some().then_some(requirements)
    }
}

/// Whether this is the container that puts the library in place.
fn is_placing(container: &Container) -> bool {
    let program = container.command.iter().flatten().next();
    container.name == INSIDE_VOLUME && program.is_some_and(|program| program == PROGRAM)
}

fn is_unwanted(pod: &Pod) -> bool {
    let has = |map: &Option<BTreeMap<String, String>>, key: &str, value: &str| {
        map.as_ref().and_then(|map| map.get(key)).is_some_and(|found| found == value)
    };
    let is_mirror = pod.metadata.annotations.as_ref().is_some_and(|notes| notes.contains_key(MIRROR_ANNOTATION));
    let is_windows = pod.spec.as_ref().and_then(|spec| spec.os.as_ref()).is_some_and(|os| os.name == "windows");
    has(&pod.metadata.labels, SHARE_LABEL, "disabled")
        || has(&pod.metadata.annotations, INSIDE_ANNOTATION, "disabled")
        || is_mirror
        || is_windows
}

/// Why a container cannot load the library, or does not want to.
fn obstacle(container: &Container) -> Option<&'static str> {
    if container.env_from.as_ref().is_some_and(|from| !from.is_empty()) {
        return Some("its variables come from elsewhere");
    }
    let set = |name: &str| container.env.iter().flatten().find(|variable| variable.name == name);
    if set(SWITCH_VARIABLE).is_some_and(|variable| variable.value.as_deref() == Some("0")) {
        return Some("GAINSHARE_INSIDE is 0");
    }
    if set(PRELOAD_VARIABLE).is_some_and(|variable| variable.value_from.is_some()) {
        return Some("its LD_PRELOAD comes from elsewhere");
    }
    let folders = [LIBRARY_FOLDER, PAGE_FOLDER];
    let is_taken = |mount: &VolumeMount| folders.contains(&mount.mount_path.trim_end_matches('/'));
    container.volume_mounts.iter().flatten().any(is_taken).then_some("the library's folder is taken")
}

/// Adds mounts and variables. The library comes after what the author preloads, and what the author says about GPU work
/// stays.
fn load_library(container: &mut Container, catches_gpu_work: bool) {
    container
        .volume_mounts
        .get_or_insert_default()
        .extend([mount(INSIDE_VOLUME, LIBRARY_FOLDER, true), mount(PAGE_VOLUME, PAGE_FOLDER, false)]);
    let env = container.env.get_or_insert_default();
    // Of two variables with one name the last one counts.
    match env.iter_mut().rev().find(|variable| variable.name == PRELOAD_VARIABLE) {
        Some(variable) => {
            let own = variable.value.take().filter(|value| !value.trim().is_empty());
            variable.value = Some(own.map_or_else(preload, |own| format!("{own}:{}", preload())));
        }
        None => env.push(variable(PRELOAD_VARIABLE, preload())),
    }
    env.retain(|variable| variable.name != PAGE_VARIABLE);
    env.push(variable(PAGE_VARIABLE, format!("{PAGE_FOLDER}/{PAGE_FILE}")));
    if catches_gpu_work && !env.iter().any(|variable| variable.name == GPU_VARIABLE) {
        env.push(variable(GPU_VARIABLE, GPU_ON.to_owned()));
    }
}

fn variable(name: &str, value: String) -> EnvVar {
    EnvVar { name: name.to_owned(), value: Some(value), value_from: None }
}

fn mount(volume: &str, folder: &str, is_read_only: bool) -> VolumeMount {
    VolumeMount {
        name: volume.to_owned(),
        mount_path: folder.to_owned(),
        read_only: is_read_only.then_some(true),
        ..VolumeMount::default()
    }
}

fn volume(name: &str, size: &str) -> Volume {
    let size_limit = Some(Quantity(size.to_owned()));
    let empty_dir = EmptyDirVolumeSource { size_limit, ..EmptyDirVolumeSource::default() };
    Volume { name: name.to_owned(), empty_dir: Some(empty_dir), ..Volume::default() }
}

#[cfg(test)]
#[path = "inside_tests.rs"]
mod tests;
