//! Containers described: the one we ask the engine for, the job we make of a container that asked
//! for it, and whose container one of a given name is.

use super::super::runtimes::base_name;
use crate::record::JobRecord;
use crate::spec::{JobSpec, parse_mount};
use gainshare_limits::RuntimeKind;
use gainshare_limits::docker::{Bind, ContainerInfo, ContainerSnapshot, ContainerSpec, labels};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// When the job was submitted: distinguishes jobs of the same number in two journals.
const SUBMITTED: &str = "gainshare.submitted";

/// One container for each attempt of a job of a daemon: the engine refuses a second of the name.
fn container_name(state_dir: &Path, record: &JobRecord) -> String {
    let base = base_name(state_dir);
    format!("{base}-{}-{}", record.id.0, record.attempt)
}

/// `values` are the job's own variables with their values, which the record does not have.
pub(super) fn container_spec(state_dir: &Path, record: &JobRecord, values: BTreeMap<String, String>) -> ContainerSpec {
    let spec = &record.spec;
    let mut env = BTreeMap::new();
    env.extend(record.order.iter().flat_map(|o| &o.env).map(|v| (v.name.clone(), v.value.clone())));
    env.extend(values);
    // The job's directory is where the job file says, inside as outside, so that the same file runs
    // under both runtimes.
    let mut binds: Vec<Bind> = spec
        .cwd
        .iter()
        .filter(|cwd| cwd.parent().is_some())
        .map(|cwd| Bind { host: cwd.clone(), container: cwd.clone(), read_only: false })
        .collect();
    binds.extend(spec.mounts.iter().filter_map(|m| parse_mount(m)).map(|(host, inside, read_only)| Bind {
        host: PathBuf::from(host),
        container: PathBuf::from(inside),
        read_only,
    }));
    let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
    ContainerSpec {
        name: container_name(state_dir, record),
        image: spec.image.clone().unwrap_or_default(),
        command: spec.command.clone(),
        clear_entrypoint: !spec.command.is_empty(),
        env,
        workdir: spec.cwd.clone().filter(|cwd| cwd.parent().is_some()),
        binds,
        labels: own_labels(record),
        // The files that it writes belong to the daemon's user.
        user: (!uid.is_root()).then(|| format!("{uid}:{gid}")),
        init: true,
        ..ContainerSpec::default()
    }
}

/// The labels of the container of a job's present attempt.
fn own_labels(record: &JobRecord) -> BTreeMap<String, String> {
    BTreeMap::from([
        (labels::JOB.to_owned(), record.id.0.to_string()),
        (labels::ATTEMPT.to_owned(), record.attempt.to_string()),
        (labels::NAME.to_owned(), record.name.clone()),
        (SUBMITTED.to_owned(), format!("{:.6}", record.submitted.unix_s)),
    ])
}

/// Whether a container is that of the job's present attempt. A name alone is no proof: it may have been used again.
pub(super) fn is_container_of(info: &ContainerInfo, state_dir: &Path, record: &JobRecord) -> bool {
    container_name(state_dir, record) == info.name && are_ours(&info.labels, &own_labels(record))
}

/// Whether the labels of a container name the job, the attempt and the submission that are wanted.
fn are_ours(found: &BTreeMap<String, String>, wanted: &BTreeMap<String, String>) -> bool {
    [labels::JOB, labels::ATTEMPT, SUBMITTED]
        .into_iter()
        .all(|label| found.contains_key(label) && found.get(label) == wanted.get(label))
}

/// What to do about a container that already has the name of the one we asked for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Recovery {
    /// The container is ours, and it runs or has run: a daemon died before it could record that.
    Take,
    /// The container is ours and was never started.
    StartAgain,
    /// The container is not ours.
    Leave,
}

pub(super) fn recovery(found: &ContainerSnapshot, wanted: &ContainerSpec) -> Recovery {
    match (are_ours(&found.labels, &wanted.labels), found.is_unstarted) {
        (false, _) => Recovery::Leave,
        (true, true) => Recovery::StartAgain,
        (true, false) => Recovery::Take,
    }
}

/// The job that a labelled container becomes, and what its owner should know. Owner and floor
/// decide what *other* jobs get, so labels for them count only if the configuration trusts labels;
/// a container may always limit itself.
pub(super) fn adopted_spec(info: &ContainerInfo, trust_labels: bool) -> (JobSpec, Vec<String>) {
    let mut notes = Vec::new();
    let label = |name: &str| info.labels.get(name).cloned();
    let number = |text: Option<String>| text.and_then(|t| t.parse::<f64>().ok()).filter(|x| (0.0..=1.0).contains(x));
    let mut trusted = |name: &str| {
        let value = label(name);
        if value.is_some() && !trust_labels {
            notes.push(format!("its label {name} is ignored: set `docker_trust_labels = true` to trust such labels"));
        }
        value.filter(|_| trust_labels)
    };
    let mut spec = JobSpec::new(Vec::new());
    spec.runtime = RuntimeKind::Docker;
    spec.image = Some(info.image.clone());
    spec.name = Some(label(labels::NAME).unwrap_or_else(|| info.name.clone()));
    spec.owner = trusted(labels::OWNER);
    spec.floor = number(trusted(labels::FLOOR)).unwrap_or(0.0);
    spec.max = number(label(labels::MAX)).filter(|max| *max > 0.0 && *max >= spec.floor).unwrap_or(1.0);
    spec.metric.name = label(labels::METRIC);
    (spec, notes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(pairs: &[(&str, &str)]) -> ContainerInfo {
        let labels = pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        ContainerInfo { id: "1".into(), name: "c".into(), image: "i".into(), labels, started_ns: 0 }
    }

    #[test]
    fn a_container_cannot_choose_its_owner_or_its_floor() {
        let greedy = info(&[(labels::OWNER, "me"), (labels::FLOOR, "0.9"), (labels::MAX, "0.5"), (labels::NAME, "n")]);
        let (spec, notes) = adopted_spec(&greedy, false);
        assert_eq!((spec.owner, spec.floor, spec.max), (None, 0.0, 0.5));
        assert_eq!(spec.name.as_deref(), Some("n"));
        assert!(notes.len() == 2 && notes[0].contains("docker_trust_labels"), "{notes:?}");
        let (spec, notes) = adopted_spec(&info(&[(labels::OWNER, "me"), (labels::FLOOR, "0.9")]), true);
        assert_eq!((spec.owner.as_deref(), spec.floor, notes.len()), (Some("me"), 0.9, 0));
        let (spec, _) = adopted_spec(&info(&[(labels::FLOOR, "7"), (labels::MAX, "NaN")]), true);
        assert_eq!((spec.floor, spec.max), (0.0, 1.0));
    }

    #[test]
    fn a_container_of_our_name_is_taken_only_if_it_is_this_job() {
        let ours = BTreeMap::from([(labels::JOB, "3"), (labels::ATTEMPT, "1"), (SUBMITTED, "5.0")]);
        let ours: BTreeMap<String, String> = ours.into_iter().map(|(k, v)| (k.into(), v.into())).collect();
        let wanted = ContainerSpec { labels: ours.clone(), ..ContainerSpec::default() };
        let found = |labels: &BTreeMap<String, String>, is_unstarted| ContainerSnapshot {
            id: "x".into(),
            labels: labels.clone(),
            is_unstarted,
        };
        assert_eq!(recovery(&found(&ours, false), &wanted), Recovery::Take);
        assert_eq!(recovery(&found(&ours, true), &wanted), Recovery::StartAgain);
        let mut older = ours.clone();
        older.insert(SUBMITTED.into(), "4.0".into());
        assert_eq!(recovery(&found(&older, false), &wanted), Recovery::Leave, "job 3 of a journal that was moved away");
        assert_eq!(recovery(&found(&BTreeMap::new(), false), &ContainerSpec::default()), Recovery::Leave);
    }
}
