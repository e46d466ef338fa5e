//! Manifests of distributed jobs for Kubernetes, read as jobs of this machine.
//!
//! A TFJob of Kubeflow and a TrainingJob name a container for each role. Here the container's command becomes a
//! process. What only a cluster has (images, volumes, resources, scheduling) has no effect.

use super::roles::{Role, RoleSpec, Roles};
use super::{JobSpec, MAX_NAME};
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
    let mut name = document["metadata"]["name"].as_str().map(str::to_owned);
    if let Some(name) = &mut name {
        name.truncate(MAX_NAME);
    }
    let spec = &document["spec"];
    if let Some(roles) = spec[field].as_object() {
        return of_roles(name, field, roles);
    }
    let container = trainer(&spec["template"]).ok_or(format!("{kind} has no spec.{field} and no container to run"))?;
    let (command, env) = (command(container, "spec.template")?, environment(container, "spec.template")?);
    Ok(JobSpec { name, command, env, ..JobSpec::default() })
}

fn of_roles(name: Option<String>, field: &str, objects: &Map<String, Value>) -> Result<JobSpec, String> {
    let mut roles = Roles::default();
    for (key, object) in objects {
        let place = format!("spec.{field}.{key}");
        let role = Role::try_from(key.clone()).map_err(|why| format!("{place}: {why}"))?;
        let container = trainer(&object["template"])
            .ok_or(format!("{place} has no container named `{TRAINS}`, nor a single other one"))?;
        let replicas = match &object["replicas"] {
            Value::Null => 1,
            number => {
                number.as_u64().and_then(|n| u32::try_from(n).ok()).ok_or(format!("{place}.replicas: no count"))?
            }
        };
        let spec = RoleSpec { replicas, command: command(container, &place)?, env: environment(container, &place)? };
        if roles.0.insert(role, spec).is_some() {
            return Err(format!("{place}: role {} is there twice; remove one", role.name()));
        }
    }
    if roles.is_empty() {
        return Err(format!("spec.{field} is empty: name the roles"));
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
      template: {spec: {containers: [{name: tensorflow, image: x, command: [python, serve.py], env: [{name: A, value: b}]}]}}
    worker:
      template: {spec: {containers: [{name: log, command: [x]}, {name: tensorflow, command: [python], args: [train.py, --epochs, "3"]}]}}
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
        let argv = job.argv(Path::new("/bin/gainshare"));
        assert_eq!((argv[0].as_str(), argv[1].as_str()), ("/bin/gainshare", "tasks"));
        assert!(argv.ends_with(&job.command) && job.start_env()[ROLES_VARIABLE].contains("serve.py"));
    }

    #[test]
    fn a_manifest_that_cannot_run_here_is_refused_with_the_remedy() {
        for (from, to, word) in [
            ("kind: TFJob", "kind: PyTorchJob", "use a TFJob or a TrainingJob"),
            ("    PS:", "    Boss:", "there is no role `Boss`"),
            ("command: [python, serve.py]", "args: [serve.py]", "so add one"),
            ("replicas: 2", "replicas: -2", "no count"),
            ("replicas: 2", "replicas: 2000", "at most 256"),
            ("value: b", "valueFrom: {fieldRef: {fieldPath: x}}", "comes from the cluster"),
            ("name: tensorflow, command: [python], args", "name: other, command: [python], args", "no container named"),
            ("    worker:", "    ps:", "there twice"),
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
            "spec": {"template": {"spec": {"containers": [{"name": "x", "command": ["python", "train.py"]}]}}}}"#;
        let jobs = parse(text, Format::Yaml, "job.json", Path::new("/")).unwrap();
        assert_eq!((jobs[0].command.join(" "), jobs[0].roles.is_empty()), ("python train.py".to_owned(), true));
    }
}
