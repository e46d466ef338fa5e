//! Manifests of distributed jobs for Kubernetes, read as jobs of this machine.
//!
//! A TFJob of Kubeflow and a TrainingJob name a container for each role. Here the container's command becomes a
//! process. Success, restarts, `TF_CONFIG` and the bounds of `runPolicy` are those of the cluster. What only a cluster
//! has (images, volumes, resources, scheduling) has no effect.

use super::roles::{RestartPolicy, Role, RoleSpec, Roles};
use super::{JobSpec, MAX_RESTARTS};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The container that trains, if a pod has several.
const TRAINS: &str = "tensorflow";

/// Whether a document of a job file is for Kubernetes.
pub(super) fn is_manifest(document: &Value) -> bool {
    document.get("apiVersion").is_some() && document.get("kind").is_some()
}

/// A manifest as a job. The error is one line with the field and the remedy.
pub(super) fn read(document: &Value) -> Result<JobSpec, String> {
    let kind = document["kind"].as_str().unwrap_or_default();
    let field = match kind {
        "TFJob" => "tfReplicaSpecs",
        "TrainingJob" => "replicaSpecs",
        _ => return Err(format!("kind `{kind}` cannot run on one machine: use a TFJob or a TrainingJob")),
    };
    let name = document["metadata"]["name"].as_str().map(str::to_owned);
    let spec = &document["spec"];
    let bounds = Bounds::read(&spec["runPolicy"])?;
    if let Some(roles) = spec[field].as_object() {
        let job = of_roles(name, (kind, field), spec, roles)?;
        return Ok(JobSpec { restarts: bounds.restarts, ..bounds.put(job) });
    }
    let container = trainer(&spec["template"]).ok_or(format!("{kind} has no spec.{field} and no container to run"))?;
    let (command, env) = (command(container, "spec.template")?, environment(container, "spec.template")?);
    Ok(bounds.put(JobSpec { name, command, env, ..JobSpec::default() }))
}

/// What `runPolicy` says about the length of a run and what remains of it.
struct Bounds {
    restarts: Option<u32>,
    time_limit_s: Option<u64>,
    keep_for_s: Option<u64>,
}

impl Bounds {
    fn read(policy: &Value) -> Result<Bounds, String> {
        let number = |field: &str, least: u64| match &policy[field] {
            Value::Null => Ok(None),
            value => value.as_u64().filter(|number| *number >= least).map(Some).ok_or_else(|| {
                format!("spec.runPolicy.{field} is {value}: write a whole number, {least} or more, or leave it out")
            }),
        };
        let restarts = number("backoffLimit", 0)?;
        Ok(Bounds {
            // A cluster has no bound for TFJobs; more than this is as good as none.
            restarts: restarts.map(|count| u32::try_from(count).unwrap_or(u32::MAX).min(MAX_RESTARTS)),
            time_limit_s: number("activeDeadlineSeconds", 1)?,
            keep_for_s: number("ttlSecondsAfterFinished", 0)?,
        })
    }

    fn put(&self, job: JobSpec) -> JobSpec {
        let text = |seconds: Option<u64>| seconds.map(|seconds| format!("{seconds}s"));
        JobSpec { time_limit: text(self.time_limit_s), keep_for: text(self.keep_for_s), ..job }
    }
}

fn of_roles(
    name: Option<String>,
    (kind, field): (&str, &str),
    job: &Value,
    objects: &Map<String, Value>,
) -> Result<JobSpec, String> {
    let is_tfjob = kind == "TFJob";
    let all = match job["successPolicy"].as_str() {
        None | Some("") => false,
        Some("AllWorkers") => true,
        Some(word) => return Err(format!("spec.successPolicy is `{word}`: write AllWorkers, or leave it out")),
    };
    let dynamic = job["enableDynamicWorker"] == true;
    let mut roles = Roles::default();
    for (key, object) in objects {
        let place = format!("spec.{field}.{key}");
        let role = Role::try_from(key.clone()).map_err(|why| format!("{place}: {why}"))?;
        // As in a cluster: programs write manifests with roles that have no tasks.
        if is_tfjob && object["replicas"] == 0 {
            continue;
        }
        let container = trainer(&object["template"])
            .ok_or(format!("{place} has no container named `{TRAINS}`, nor a single other one"))?;
        let count = |field: &str| match &object[field] {
            Value::Null => Ok(None),
            number => {
                let count = number.as_u64().and_then(|number| u32::try_from(number).ok());
                count.map(Some).ok_or(format!("{place}.{field}: no count"))
            }
        };
        let replicas = count("replicas")?.or(count("minReplicas")?).unwrap_or(1);
        let restart = match object["restartPolicy"].as_str() {
            None | Some("") => is_tfjob.then_some(RestartPolicy::Never),
            Some(word) => Some(
                serde_json::from_value(Value::from(word))
                    .map_err(|_| format!("{place}.restartPolicy: write Always, OnFailure, Never or ExitCode"))?,
            ),
        };
        let is_worker = role == Role::Worker;
        let spec = RoleSpec {
            replicas,
            command: command(container, &place)?,
            env: environment(container, &place)?,
            restart,
            dynamic: dynamic && is_worker,
            all: all && is_worker,
        };
        if roles.0.insert(role, spec).is_some() {
            return Err(format!("{place}: role {} is there twice; remove one", role.name()));
        }
    }
    if roles.is_empty() {
        return Err(format!("spec.{field} has no role with a task: give one role a replica"));
    }
    // The command of the task that reports stands for the job in tables.
    let command = roles.0.get(&roles.reporter().role).map(|role| role.command.clone()).unwrap_or_default();
    Ok(JobSpec { name, command, roles, ..JobSpec::default() })
}

/// The container that trains: the one with the contract's name, or the only one.
fn trainer(template: &Value) -> Option<&Value> {
    let containers = template["spec"]["containers"].as_array()?;
    let named = containers.iter().find(|container| container["name"] == TRAINS);
    named.or(if containers.len() == 1 { containers.first() } else { None })
}

fn command(container: &Value, place: &str) -> Result<Vec<String>, String> {
    let words = |field: &str| container[field].as_array().into_iter().flatten();
    let all: Option<Vec<String>> =
        words("command").chain(words("args")).map(|word| word.as_str().map(str::to_owned)).collect();
    let all = all.ok_or(format!("{place}: command and args must be texts"))?;
    if container["command"].as_array().is_none_or(Vec::is_empty) {
        return Err(format!("{place}: the container has no `command`; only its image knows what to run, so add one"));
    }
    Ok(all)
}

fn environment(container: &Value, place: &str) -> Result<BTreeMap<String, String>, String> {
    let mut env = BTreeMap::new();
    for entry in container["env"].as_array().into_iter().flatten() {
        let name = entry["name"].as_str().unwrap_or_default();
        let value = entry["value"].as_str();
        if value.is_none() && entry.get("valueFrom").is_some() {
            return Err(format!("{place}: env {name} comes from the cluster; give it a `value`"));
        }
        env.insert(name.to_owned(), value.unwrap_or_default().to_owned());
    }
    Ok(env)
}

#[cfg(test)]
mod tests {
    use super::super::{Format, ROLES_VARIABLE, parse};
    use super::*;
    use std::path::Path;

    const TFJOB: &str = r#"
apiVersion: kubeflow.org/v1
kind: TFJob
metadata: {name: mnist}
spec:
  runPolicy: {cleanPodPolicy: None}
  tfReplicaSpecs:
    PS:
      replicas: 2
      restartPolicy: Never
      template:
        spec:
          containers:
          - {name: tensorflow, image: x, command: [python, serve.py], env: [{name: A, value: b}]}
    worker:
      template:
        spec:
          containers:
          - {name: log, command: [x]}
          - {name: tensorflow, command: [python], args: [train.py, --epochs, "3"]}
"#;

    #[test]
    fn a_tfjob_is_a_job_with_roles() {
        let jobs = parse(TFJOB, Format::Yaml, "job.yaml", Path::new("/data")).unwrap();
        let [job] = jobs.as_slice() else { panic!("{jobs:?}") };
        assert_eq!((job.name.as_deref(), job.cwd.as_deref()), (Some("mnist"), Some(Path::new("/data"))));
        assert_eq!(job.command, ["python", "train.py", "--epochs", "3"]);
        let ps = &job.roles.0[&Role::Ps];
        assert_eq!((ps.replicas, ps.command.join(" "), ps.env["A"].as_str()), (2, "python serve.py".into(), "b"));
        assert_eq!(job.roles.0[&Role::Worker].replicas, 1);
        assert!(job.start_env()[ROLES_VARIABLE].contains("serve.py"));
    }

    #[test]
    fn the_rules_of_a_manifest_are_those_of_the_cluster() {
        let read = |text: &str| parse(text, Format::Yaml, "job.yaml", Path::new("/")).unwrap().remove(0).roles;
        let roles = read(TFJOB);
        let worker = &roles.0[&Role::Worker];
        assert_eq!((worker.restart, worker.dynamic, worker.all), (Some(RestartPolicy::Never), false, false));
        let text = TFJOB
            .replace("restartPolicy: Never", "restartPolicy: ExitCode")
            .replace("  runPolicy:", "  successPolicy: AllWorkers\n  enableDynamicWorker: true\n  runPolicy:");
        let roles = read(&text);
        assert_eq!(roles.0[&Role::Ps].restart, Some(RestartPolicy::ExitCode));
        assert!(roles.is_dynamic() && roles.needs_all_workers() && !roles.0[&Role::Ps].dynamic);
        assert!(!read(&TFJOB.replace("replicas: 2", "replicas: 0")).0.contains_key(&Role::Ps));
        let ours = TFJOB
            .replace("kubeflow.org/v1", "gainshare.dev/v1alpha1")
            .replace("TFJob", "TrainingJob")
            .replace("tfReplicaSpecs", "replicaSpecs")
            .replace("    worker:", "    worker:\n      minReplicas: 3");
        let roles = read(&ours);
        assert_eq!((roles.0[&Role::Worker].replicas, roles.0[&Role::Worker].restart), (3, None));
    }

    #[test]
    fn the_bounds_of_a_run_policy_are_the_jobs() {
        let read = |text: &str| parse(text, Format::Yaml, "job.yaml", Path::new("/")).unwrap().remove(0);
        let none = read(TFJOB);
        assert_eq!((none.restarts, none.time_limit(), none.keep_for()), (None, None, None));
        let policy = "backoffLimit: 0, activeDeadlineSeconds: 90, ttlSecondsAfterFinished: 0";
        let bound = read(&TFJOB.replace("cleanPodPolicy: None", policy));
        assert_eq!((bound.restarts, bound.time_limit().unwrap().as_secs()), (Some(0), 90));
        assert!(bound.keep_for().unwrap().is_zero() && bound.validate().is_ok());
        let many = read(&TFJOB.replace("cleanPodPolicy: None", "backoffLimit: 99999999999"));
        assert_eq!((many.restarts, many.validate()), (Some(MAX_RESTARTS), Ok(())));
    }

    #[test]
    fn a_manifest_that_cannot_run_here_is_refused_with_the_remedy() {
        for (from, to, word) in [
            ("kind: TFJob", "kind: PyTorchJob", "use a TFJob or a TrainingJob"),
            ("name: mnist", "name: ääääääääääääääääääääääääääääääääx", "is not allowed"),
            ("    PS:", "    Boss:", "there is no role `Boss`"),
            ("command: [python, serve.py]", "args: [serve.py]", "so add one"),
            ("replicas: 2", "replicas: -2", "no count"),
            ("replicas: 2", "replicas: 2000", "at most 256"),
            ("value: b", "valueFrom: {fieldRef: {fieldPath: x}}", "comes from the cluster"),
            ("name: tensorflow, command: [python], args", "name: other, command: [python], args", "no container named"),
            ("    worker:", "    ps:", "there twice"),
            ("restartPolicy: Never", "restartPolicy: Maybe", "write Always, OnFailure, Never or ExitCode"),
            ("  runPolicy:", "  successPolicy: Half\n  runPolicy:", "AllWorkers"),
            ("cleanPodPolicy: None", "backoffLimit: -1", "runPolicy.backoffLimit is -1"),
            ("cleanPodPolicy: None", "activeDeadlineSeconds: 0", "1 or more"),
            ("cleanPodPolicy: None", "ttlSecondsAfterFinished: soon", "runPolicy.ttlSecondsAfterFinished"),
        ] {
            assert!(TFJOB.contains(from));
            let error = parse(&TFJOB.replace(from, to), Format::Yaml, "job.yaml", Path::new("/")).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(word) && text.starts_with("job.yaml"), "{text}");
        }
    }

    #[test]
    fn a_training_job_of_one_container_is_one_process() {
        let text = r#"{"apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "solo"},
            "spec": {"runPolicy": {"backoffLimit": 2, "activeDeadlineSeconds": 60}, "template": {"spec": {"containers": [{"name": "x", "command": ["python", "train.py"]}]}}}}"#;
        let jobs = parse(text, Format::Yaml, "job.json", Path::new("/")).unwrap();
        assert_eq!((jobs[0].command.join(" "), jobs[0].roles.is_empty()), ("python train.py".to_owned(), true));
        // One process is not started again, so a number of restarts means nothing.
        assert_eq!((jobs[0].restarts, jobs[0].time_limit.as_deref()), (None, Some("60s")));
    }
}
