//! Values of Secrets and of environments stay where their authors put them.
//!
//! A job has one unmistakable value in its environment and another one in a Secret, and pods under a policy have the
//! first one. The job runs, its share is decided, it moves, and it runs again. Then everything is read that the
//! operator and the node agents have written or serve: statuses and metadata of objects, events, recorded decisions,
//! explanations, metrics and logs. Neither value is in any of it.
//!
//! On the same test bed, a pod gets the library inside jobs ([`inside`]).

#[path = "cluster/inside.rs"]
mod inside;

use crate::common::training::{COUNTS, Operator, job};
use crate::common::{self, FaultTally, SYSTEM, Scenarios, TestBed, eventually, program, text};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use gainshare_kube_api::names::{JOB_SECRETS_LABEL, STATUS_ANNOTATION};
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::Duration;

/// The value in the environment of templates.
const IN_ENVIRONMENT: &str = "canary-of-the-environment-7f3a91";

/// The value in the Secret.
const IN_SECRET: &str = "canary-of-the-secret-c04be2";

/// The job's loss falls by a two-hundredth of the first loss every second.
const REPORTS: &str = r#"echo "step=$i loss=$((1000000 - i * 1000))"; sleep 0.2"#;

/// The annotation in which kubectl keeps what it has applied.
const APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// A free address of this machine.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// A successful answer, or why there is none.
fn http_get(address: &str, path: &str) -> Result<String, String> {
    let read = || -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(90)))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        Ok(text(&answer))
    };
    let answer = read().map_err(|error| error.to_string())?;
    let is_good = answer.starts_with("HTTP/1.1 200");
    if is_good { Ok(answer) } else { Err(answer) }
}

fn environment() -> Value {
    json!([{"name": "API_TOKEN", "value": IN_ENVIRONMENT}])
}

/// A job with both values, which notes the length of the second one on its volume.
fn moved_job() -> Value {
    let script = COUNTS.replace("sleep 0.1", REPORTS);
    let script = format!("echo ${{#PASSWORD}} > \"$GAINSHARE_CHECKPOINT_DIR/length\"\n{script}");
    let mut moved: Value = serde_json::from_str(&job("moved", &script, json!({}))).unwrap();
    let variables = moved["spec"]["template"]["spec"]["containers"][0]["env"].as_array_mut().unwrap();
    variables.extend(environment().as_array().unwrap().iter().cloned());
    variables.push(json!({"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "credentials", "key": "word"}}}));
    moved
}

fn shared_pod(name: &str, cpu: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": {"role": "training"}},
        "spec": {"containers": [{
            "name": "main", "image": "busybox:local", "imagePullPolicy": "Never", "env": environment(),
            "command": ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.5; done"],
            "resources": {"requests": {"cpu": cpu, "memory": "16Mi"}},
        }]},
    })
}

/// Something that the operator or a node agent has written or serves.
struct Document {
    name: String,
    text: String,
}

fn document(name: impl Into<String>, text: impl Into<String>) -> Document {
    Document { name: name.into(), text: text.into() }
}

/// All objects that the operator writes to. Their specs are their authors' own, and so is what kubectl has applied.
fn objects(bed: &TestBed) -> Vec<Document> {
    let kinds = "trainingjobs,sharepolicies,pods,services,configmaps,leases,nodes,events";
    let found: Value = serde_json::from_str(&bed.kubectl(&["get", kinds, "-A", "-o", "json"])).unwrap();
    let strip = |object: &Value| {
        let mut object = object.clone();
        let name = format!("{} {}", object["kind"], object["metadata"]["name"]);
        if let Some(fields) = object.as_object_mut() {
            fields.remove("spec");
        }
        if let Some(annotations) = object["metadata"]["annotations"].as_object_mut() {
            annotations.remove(APPLIED);
        }
        document(name, object.to_string())
    };
    found["items"].as_array().into_iter().flatten().map(strip).collect()
}

/// `kubectl gainshare explain POD --dump FILE`: what it prints, and the record.
fn dump(bed: &TestBed, pod: &str) -> [Document; 2] {
    let file = bed.folder.path().join("decision.json");
    let (mut printed, mut last) = (String::new(), String::new());
    let is_dumped = common::within_a_minute(|| {
        let mut command = Command::new(program("kubectl-gainshare"));
        command.args(["explain", pod, "-n", "team", "--dump"]).arg(&file).env("KUBECONFIG", &bed.kubeconfig);
        let output = command.output().unwrap();
        (printed, last) = (text(&output.stdout), text(&output.stderr));
        output.status.success().then_some(())
    });
    assert!(is_dumped.is_some(), "no recorded decision about {pod}: {last}\n{}", bed.operator_log());
    [document("explanation of a share", printed), document("record of a share", fs::read_to_string(&file).unwrap())]
}

/// Shares pods and moves a job. Returns everything that was written or is served meanwhile.
fn move_and_share(bed: &TestBed) -> Vec<Document> {
    let (plain, record) = (free_address(), free_address());
    let args = ["--plain-listen", &plain, "--record-listen", &record];
    let operator = Operator::with(bed, None, &args);
    bed.kubectl(&["label", "namespace", "team", &format!("{JOB_SECRETS_LABEL}=enabled")]);
    bed.apply(json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "credentials", "namespace": "team"},
        "stringData": {"word": IN_SECRET},
    }));
    bed.apply(moved_job());
    for (name, cpu) in [("small", "60m"), ("large", "180m")] {
        bed.apply(shared_pod(name, cpu));
    }
    bed.apply(json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
        "metadata": {"name": "training", "namespace": "team"},
        "spec": {"selector": {"matchLabels": {"role": "training"}}, "policy": "na"},
    }));
    let running = bed.until("moved", "Running", Some("left"));
    let pod = running["status"]["attempt"]["pod"].as_str().unwrap().to_owned();
    let spec = bed.get("pod", &pod)["spec"].to_string();
    assert!(spec.contains(IN_ENVIRONMENT), "the job does not have the value that is searched for: {spec}");
    let length = || fs::read_to_string(bed.kept("moved").join("length")).ok().filter(|text| !text.trim().is_empty());
    assert_eq!(eventually("the Secret in the job", length).trim(), IN_SECRET.len().to_string());
    for name in ["small", "large"] {
        let note = || bed.find("pod", name)?["metadata"]["annotations"][STATUS_ANNOTATION].as_str().map(str::to_owned);
        eventually(&format!("a note about the share of {name}"), || {
            note().filter(|note| note.contains("sharePercent"))
        });
    }
    let mut documents = Vec::from(dump(bed, &pod));
    documents.extend(dump(bed, "small"));
    documents.extend(objects(bed));

    let uid = running["metadata"]["uid"].as_str().unwrap();
    bed.send_to("moved", "right");
    bed.until("moved", "Running", Some("right"));
    let decision = eventually("a recorded decision about places", || {
        let answer = http_get(&record, &format!("/decision?uid={uid}"));
        answer.inspect_err(|why| eprintln!("no record yet: {}", why.lines().last().unwrap_or_default())).ok()
    });
    documents.push(document("record of a place", decision));
    documents.push(document("metrics", eventually("metrics", || http_get(&plain, "/metrics").ok())));
    for name in ["moved", "small"] {
        documents.push(document(format!("explanation of {name}"), bed.plugin(&["explain", name])));
    }
    documents.extend(objects(bed));
    let agents = ["logs", "-n", SYSTEM, "-l", "app.kubernetes.io/component=agent", "--tail=-1"];
    documents.push(document("logs of the node agents", bed.kubectl(&agents)));
    drop(operator);
    let log = fs::read_to_string(bed.folder.path().join("operator.log")).unwrap();
    documents.push(document("log of the operator", log));
    documents
}

/// The values, and how a program might write the one of the Secret.
fn forms() -> [String; 4] {
    let encoded = |value: &str| STANDARD.encode(value);
    [IN_ENVIRONMENT.to_owned(), IN_SECRET.to_owned(), encoded(IN_ENVIRONMENT), encoded(IN_SECRET)]
}

#[test]
#[ignore = "needs root and a test bed"]
fn values_of_secrets_and_environments_are_in_nothing_that_is_written() {
    let mut bed = TestBed::with_training("secrettest", &["left", "right"]);
    bed.start_agents();
    let bed = bed;
    let (mut scenarios, mut tally) = (Scenarios::default(), FaultTally::of("secrets"));
    scenarios.run_counted("neither value is in anything that is written", &mut tally, |tally| {
        let documents = move_and_share(&bed);
        tally.inject(2);
        let about = |name: &str| documents.iter().any(|one| one.name.contains(name) && one.text.contains("moved"));
        for name in ["log of the operator", "Event", "TrainingJob"] {
            assert!(about(name), "none of {} documents is a {name} about the job", documents.len());
        }
        println!("{} documents were searched", documents.len());
        for document in &documents {
            for form in forms().iter().filter(|form| document.text.contains(form.as_str())) {
                tally.demand(false, || format!("{form} is in: {}", document.name));
            }
        }
    });
    scenarios.run("the threads of a pod follow its share", || inside::check(&bed));
    tally.print();
    scenarios.finish();
}
