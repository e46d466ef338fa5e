//! The operator against a real API server: rights, refusals, resizes, and the restoration of pods.
//!
//! The chart is applied to a test bed of simulated nodes. The operator runs in this process with the token of
//! its own ServiceAccount, so it has the rights that the chart grants and no others. This test plays the node
//! agents, with tokens bound to the agents' pods. Needs root.

#[path = "cluster/rights.rs"]
mod rights;

use crate::common::{FaultTally, SYSTEM, Scenarios, TestBed, checkout, eventually, text};
use gainshare_kube_api::names::{NodeName, ORIGINAL_ANNOTATION};
use gainshare_kube_api::resize::{Amounts, Resources};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::training_job::TrainingJob;
use gainshare_kube_api::wire::{
    Answer, JobReport, OutcomeState, ReportedCategory, Resize, SYNC_PATH, SyncRequest, TOKEN_AUDIENCE,
};
use gainshare_operator as operator;
use kube::{Client, Config, CustomResourceExt, config};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

impl TestBed {
    fn chart(&self, more: &[&str]) -> String {
        let chart = deploy("chart");
        let args = ["template", "gainshare", &chart, "-n", SYSTEM, "--kube-version", "1.35.0", "--no-hooks"];
        self.run("helm", &[&args, more].concat(), "")
    }
}

/// A training pod on a simulated node.
fn pod(name: &str, node: &str, resources: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": {"role": "training"}},
        "spec": {
            "nodeName": node, "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "main", "image": "none", "resources": resources}],
        },
    })
}

fn policy(name: &str, spec: Value) -> Value {
    json!({
        "apiVersion": "gainshare.dev/v1alpha1", "kind": "SharePolicy",
        "metadata": {"name": name, "namespace": "team"}, "spec": spec,
    })
}

fn condition(policy: &Value, kind: &str) -> Option<(String, String)> {
    let found = policy["status"]["conditions"].as_array()?.iter().find(|c| c["type"] == kind)?.clone();
    Some((found["status"].as_str()?.to_owned(), found["message"].as_str()?.to_owned()))
}

fn cpu(pod: &Value) -> String {
    pod["spec"]["containers"][0]["resources"]["requests"]["cpu"].as_str().unwrap_or_default().to_owned()
}

/// A node agent, played by this test.
struct Agent {
    node: NodeName,
    token: String,
    address: SocketAddr,
    certificate: PathBuf,
    seq: u64,
    seen: u64,
}

impl Agent {
    /// The answer, or the code of the refusal.
    fn ask(&mut self, jobs: Option<Vec<JobReport>>, resizes: Vec<Resize>, wait_ms: u32) -> Result<Answer, String> {
        self.seq += 1;
        let sync = SyncRequest {
            node: self.node.clone(),
            epoch: 1,
            seq: self.seq,
            seen: self.seen,
            wait_ms,
            jobs,
            resizes,
            ..SyncRequest::default()
        };
        let body = serde_json::to_string(&sync).unwrap();
        let url = format!("https://gainshare-operator.{SYSTEM}.svc:{}{SYNC_PATH}", self.address.port());
        let resolve = format!("gainshare-operator.{SYSTEM}.svc:{}:{}", self.address.port(), self.address.ip());
        let output = Command::new("curl")
            .args(["--silent", "--show-error", "--max-time", "40", "--resolve", &resolve, "--cacert"])
            .arg(&self.certificate)
            .args(["--write-out", "\n%{http_code}", "--header", "content-type: application/json"])
            .args(["--header", &format!("authorization: Bearer {}", self.token), "--data", &body, &url])
            .output()
            .expect("curl starts");
        let said = text(&output.stdout);
        let (answer, code) = said.rsplit_once('\n').unwrap_or(("", &said));
        if code != "200" {
            return Err(format!("{code} {answer} {}", text(&output.stderr)));
        }
        let answer: Answer = serde_json::from_str(answer).unwrap();
        self.seen = answer.revision;
        Ok(answer)
    }

    fn list(&mut self) -> Vec<gainshare_kube_api::wire::PodOnNode> {
        self.seen = 0;
        let answer = self.ask(None, Vec::new(), 0).unwrap();
        answer.pods.unwrap_or_default()
    }

    /// Asks for these CPU requests until it is decided: a pod that has just changed may need a second try.
    fn resize_all(&mut self, generation: u64, wanted: &[(&str, u64)]) -> Vec<OutcomeState> {
        let to = |milli| Resources {
            requests: Amounts { cpu_milli: Some(milli), memory_bytes: None },
            limits: Amounts::default(),
        };
        let resizes: Vec<Resize> = wanted
            .iter()
            .map(|&(uid, milli)| Resize { uid: uid.into(), container: "main".to_owned(), generation, to: to(milli) })
            .collect();
        let mut done = vec![false; wanted.len()];
        eventually("a decision", || {
            let outcomes = self.ask(None, resizes.clone(), 0).unwrap().outcomes;
            let states: Vec<OutcomeState> = outcomes.into_iter().map(|outcome| outcome.state).collect();
            done.iter_mut().zip(&states).for_each(|(done, state)| *done |= *state == OutcomeState::Done);
            let undecided = states.iter().any(|state| matches!(state, OutcomeState::Failed { .. }));
            let outcomes =
                states.into_iter().zip(&done).map(|(state, &done)| if done { OutcomeState::Done } else { state });
            (!undecided).then(|| outcomes.collect())
        })
    }

    fn resize(&mut self, uid: &str, generation: u64, milli: u64) -> OutcomeState {
        self.resize_all(generation, &[(uid, milli)]).remove(0)
    }
}

async fn client(bed: &TestBed, token: &str) -> Client {
    let kubeconfig = config::Kubeconfig::read_from(&bed.kubeconfig).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
    config.auth_info = config::AuthInfo { token: Some(token.to_owned().into()), ..config::AuthInfo::default() };
    config.default_retry = false;
    Client::try_from(config).unwrap()
}

/// A port that is free at the moment.
fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn operator_config(listen: SocketAddr) -> operator::Config {
    operator::Config {
        namespace: SYSTEM.to_owned(),
        pod_name: None,
        listen,
        plain_listen: ([127, 0, 0, 1], free_port()).into(),
        record_listen: None,
        server_names: vec![format!("gainshare-operator.{SYSTEM}.svc"), listen.ip().to_string()],
        agent_account: "gainshare-agent".to_owned(),
        lease: "gainshare-operator".to_owned(),
        config_map: "gainshare-operator".to_owned(),
        webhook: Some("gainshare".to_owned()),
        inside_image: None,
        authority_folders: Vec::new(),
        fail_at: gainshare_operator::FailPoint::default(),
        specon: Default::default(),
        elastic: Default::default(),
        queues: Default::default(),
        tfjobs: false,
        scaler: None,
    }
}

/// A token bound to the agent's pod on a node, as the kubelet would mount it.
fn agent_token(bed: &TestBed, node: &str, audience: &str) -> String {
    let field = format!("spec.nodeName={node}");
    let name = eventually("an agent on every node", || {
        let pods = bed.kubectl(&[
            "get",
            "pods",
            "-n",
            SYSTEM,
            "-l",
            "app.kubernetes.io/component=agent",
            "--field-selector",
            &field,
            "-o",
            "name",
        ]);
        pods.trim().strip_prefix("pod/").map(str::to_owned)
    });
    let made = bed.kubectl(&[
        "create",
        "token",
        "gainshare-agent",
        "-n",
        SYSTEM,
        "--audience",
        audience,
        "--bound-object-kind",
        "Pod",
        "--bound-object-name",
        &name,
    ]);
    made.trim().to_owned()
}

#[test]
#[ignore = "needs root and a test bed"]
fn the_operator_in_a_real_cluster() {
    let bed = TestBed::up("operatortest", &["--nodes", "0", "--kwok", "2"]);
    bed.kubectl(&["create", "namespace", SYSTEM]);
    bed.kubectl(&["create", "namespace", "team"]);
    bed.apply(serde_json::to_value(SharePolicy::crd()).unwrap());
    bed.apply(serde_json::to_value(TrainingJob::crd()).unwrap());
    let chart = bed.chart(&[]);
    bed.run("kubectl", &["apply", "-n", SYSTEM, "-f", "-"], &chart);
    bed.kubectl(&["wait", "--for=condition=Established", "crd/sharepolicies.gainshare.dev", "--timeout=30s"]);

    let mut scenarios = Scenarios::default();
    scenarios.run("the plain manifests are fresh", || plain_manifests_are_fresh(&bed));
    let mut operators_token = FaultTally::of("rights");
    rights::check_operator(&mut scenarios, &bed, &mut operators_token);
    let mut agents_token = FaultTally::of("agent-token");
    scenarios.run_counted("a node agent's token opens nothing at the API server", &mut agents_token, |tally| {
        rights::check_agent(&bed, tally);
    });
    scenarios.run("mistakes are answered with help", || mistakes_are_answered_with_help(&bed));

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let token = bed.kubectl(&["create", "token", "gainshare-operator", "-n", SYSTEM]).trim().to_owned();
    let client = runtime.block_on(client(&bed, &token));
    let address: SocketAddr = format!("{}:{}", bed.machine(), free_port()).parse().unwrap();
    let (end, ended) = tokio::sync::oneshot::channel::<()>();
    let running = runtime.spawn(operator::run(operator_config(address), client.clone(), async {
        let _ = ended.await;
    }));
    let folder = tempfile::tempdir().unwrap();
    let certificate = folder.path().join("ca.crt");
    // The chart made an authority; this operator has no folder with it, makes its own and must publish that.
    let before = chart.lines().find_map(|line| line.trim().strip_prefix("ca.crt: ")).unwrap().to_owned();
    eventually("a published certificate", || {
        let map = bed.kubectl(&["get", "configmap", "gainshare-operator", "-n", SYSTEM, "-o", "json"]);
        let map: Value = serde_json::from_str(&map).unwrap();
        let pem = map["data"]["ca.crt"].as_str()?;
        std::fs::write(&certificate, pem).unwrap();
        (!before.contains(&pem[30..80])).then_some(())
    });
    let agent = |node: &str, audience: &str| Agent {
        node: node.into(),
        token: agent_token(&bed, node, audience),
        address,
        certificate: certificate.clone(),
        seq: 0,
        seen: 0,
    };
    let mut agents = (agent("kwok-0", TOKEN_AUDIENCE), agent("kwok-1", TOKEN_AUDIENCE));
    eventually("an operator that answers", || agents.0.ask(None, Vec::new(), 0).ok());

    share_pods(&bed);
    scenarios.run_counted("only a node agent may ask, and for its own node", &mut agents_token, |tally| {
        strangers_are_refused(&bed, &agent, &mut agents.0, tally);
    });
    scenarios.run("pods are resized within their pool", || resizes(&bed, &mut agents));
    scenarios.run("conditions and notes name what is wrong and what is decided", || conditions(&bed, &mut agents));
    scenarios.run("pods start tuned where the namespace asks for it", || webhook(&bed, address));
    scenarios.run("pods get their own values back", || given_back(&bed, &runtime, &client, &mut agents.0));
    scenarios.run("an operator that ends frees the lease", || {
        end.send(()).unwrap();
        runtime.block_on(running).unwrap().unwrap();
        ended_operator(&bed);
    });
    operators_token.print();
    agents_token.print();
    scenarios.finish();
}

fn deploy(file: &str) -> String {
    checkout().join("deploy").join(file).to_str().unwrap().to_owned()
}

/// The policy and the pods of the scenarios: two pods on the first node, one on the second.
fn share_pods(bed: &TestBed) {
    bed.apply(policy("training", json!({"selector": {"matchLabels": {"role": "training"}}})));
    for (name, node) in [("a", "kwok-0"), ("b", "kwok-0"), ("far", "kwok-1")] {
        bed.apply(pod(name, node, burstable()));
    }
}

fn burstable() -> Value {
    json!({"requests": {"cpu": "500m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}})
}

fn ended_operator(bed: &TestBed) {
    bed.apply(pod("unasked", "kwok-1", json!({})));
    assert!(
        bed.get("pod", "unasked")["spec"]["containers"][0]["env"].is_null(),
        "without an operator, pods start as they are"
    );
    let lease =
        bed.kubectl(&["get", "lease", "gainshare-operator", "-n", SYSTEM, "-o", "jsonpath={.spec.holderIdentity}"]);
    assert_eq!(lease, "", "an operator that ends frees the lease for a standby");
}

fn plain_manifests_are_fresh(bed: &TestBed) {
    let rendered = bed.chart(&["--include-crds", "--set", "authority.create=false"]);
    let committed = std::fs::read_to_string(deploy("gainshare.yaml")).unwrap();
    assert!(
        committed.ends_with(&rendered),
        "the chart has changed: run `cargo xtask generate` and commit deploy/gainshare.yaml"
    );
    assert!(!committed.contains("PRIVATE KEY") && !committed.contains("tls.key:"), "no key may ever be committed");
    let nonsense = bed.output(
        "helm",
        &["template", "x", &deploy("chart"), "--set", "operator.replicas=none", "--kube-version", "1.35.0"],
        "",
    );
    assert!(text(&nonsense.stderr).contains("replicas"), "{}", text(&nonsense.stderr));
    bed.run("kubectl", &["apply", "--dry-run=server", "-f", "-"], &rendered);
}

fn mistakes_are_answered_with_help(bed: &TestBed) {
    for (spec, helps) in [
        (json!({}), "give exactly one of selector"),
        (json!({"selector": {}, "targetRef": {"kind": "Job", "name": "a"}}), "give exactly one of selector"),
        (json!({"selector": {}, "alpha": 2}), "alpha lies between 0 and 1"),
        (json!({"selector": {}, "interval": "10"}), "such as 20s"),
        (json!({"selector": {}, "policy": "magic"}), "supported values: \"na\", \"flowcon\", \"gainshare\""),
        (json!({"selector": {}, "resources": ["memory"]}), "resources must name cpu"),
        (json!({"selector": {}, "floorPercent": 90}), "floorPercent lies between 0 and 50"),
        (json!({"targetRef": {"kind": "", "name": "a"}}), "targetRef needs a kind and a name"),
    ] {
        let output = bed.output("kubectl", &["apply", "-f", "-"], &policy("wrong", spec.clone()).to_string());
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(helps), "{spec}: {said}");
    }
    let typo = policy("typo", json!({"selector": {}, "intervall": "20s"}));
    let said = text(&bed.output("kubectl", &["apply", "-f", "-"], &typo.to_string()).stderr);
    assert!(said.contains("unknown field \"spec.intervall\""), "{said}");
}

/// What the operator answers to false tokens, and to an agent's true token that is used beyond its node.
fn strangers_are_refused(bed: &TestBed, agent: &dyn Fn(&str, &str) -> Agent, good: &mut Agent, tally: &mut FaultTally) {
    let mut refused = |what: &str, mut asks: Agent, code: &str, words: &str| {
        tally.inject(1);
        let answer = asks.ask(None, Vec::new(), 0);
        let is_refused = answer.as_ref().is_err_and(|error| error.starts_with(code) && error.contains(words));
        tally.demand(is_refused, || format!("{what} was not refused with {code} and {words:?}: {answer:?}"));
    };
    let mut stranger = agent("kwok-0", TOKEN_AUDIENCE);
    stranger.token = "nonsense".to_owned();
    refused("a token that was made up", stranger, "401", "");
    refused("a token for the API server", agent("kwok-0", "https://kubernetes.default.svc"), "401", "");
    let mut liar = agent("kwok-0", TOKEN_AUDIENCE);
    liar.node = "kwok-1".into();
    refused("an agent that speaks for another node", liar, "403", "kwok-0");
    let mut other = agent("kwok-0", TOKEN_AUDIENCE);
    other.token =
        bed.kubectl(&["create", "token", "default", "-n", "team", "--audience", TOKEN_AUDIENCE]).trim().to_owned();
    refused("another account", other, "403", "only system:serviceaccount");
    assert!(good.ask(None, Vec::new(), 0).is_ok());

    // A pod of another node is neither resized nor noted for this agent.
    let far = eventually("the pod of the other node", || {
        bed.find("pod", "far")?["metadata"]["uid"].as_str().map(str::to_owned)
    });
    tally.inject(1);
    let answer = good.resize(&far, 1, 100);
    let is_refused = matches!(&answer, OutcomeState::Refused { why } if why.contains("on node kwok-0"));
    tally.demand(is_refused, || format!("an agent resized a pod of another node: {answer:?}"));
    let size = cpu(&bed.get("pod", "far"));
    tally.demand(size == "500m", || format!("an agent changed a pod of another node to {size}"));
}

fn resizes(bed: &TestBed, agents: &mut (Agent, Agent)) {
    let pods = eventually("two pods on the first node's list", || Some(agents.0.list()).filter(|pods| pods.len() == 2));
    assert_eq!((pods[0].policy.as_str(), pods[0].owner.starts_with("Pod/")), ("training", true));
    let uid = |name: &str| bed.get("pod", name)["metadata"]["uid"].as_str().unwrap().to_owned();
    let (a, b, far) = (uid("a"), uid("b"), uid("far"));

    assert!(
        matches!(agents.0.resize(&b, 1, 900), OutcomeState::Refused { why } if why.contains("lower another pod first"))
    );
    assert_eq!(agents.0.resize(&a, 2, 200), OutcomeState::Done);
    assert_eq!(agents.0.resize(&b, 2, 800), OutcomeState::Done);
    assert_eq!((cpu(&bed.get("pod", "a")), cpu(&bed.get("pod", "b"))), ("200m".into(), "800m".into()));
    let originals = bed.get("pod", "a")["metadata"]["annotations"][ORIGINAL_ANNOTATION].as_str().unwrap().to_owned();
    assert!(originals.contains("\"cpu\":\"500m\""), "{originals}");
    assert_eq!(agents.0.resize(&a, 2, 200), OutcomeState::Unchanged, "the same again is harmless");
    assert!(matches!(agents.0.resize(&a, 1, 300), OutcomeState::Refused { why } if why.contains("older than plan 2")));
    assert!(matches!(agents.0.resize(&far, 2, 100), OutcomeState::Refused { why } if why.contains("on node kwok-0")));
    assert_eq!(cpu(&bed.get("pod", "far")), "500m", "an agent has no say over another node's pods");
    assert!(matches!(agents.0.resize(&a, 3, 1), OutcomeState::Refused { .. }));

    // Decreases go first, in whatever order they are asked for: together these two fit, one after the other
    // they would not.
    let states = agents.0.resize_all(4, &[(&a, 700), (&b, 300)]);
    assert_eq!(states, [OutcomeState::Done, OutcomeState::Done]);
    assert_eq!((cpu(&bed.get("pod", "a")), cpu(&bed.get("pod", "b"))), ("700m".into(), "300m".into()));

    // A long poll ends when there is news. An answer that came because the time was over has no list.
    let seen = agents.1.list().len();
    bed.apply(pod("late", "kwok-1", burstable()));
    let mut listed = seen;
    while listed == seen {
        let answer = agents.1.ask(Some(Vec::new()), Vec::new(), 20_000).unwrap();
        listed = answer.pods.expect("the new pod ends the long poll").len();
    }
    assert_eq!(listed, seen + 1);
    bed.kubectl(&["delete", "pod", "late", "-n", "team", "--now", "--wait=false"]);
}

fn conditions(bed: &TestBed, agents: &mut (Agent, Agent)) {
    bed.apply(policy("selects-none", json!({"selector": {"matchLabels": {"role": "absent"}}})));
    bed.apply(policy("orphan", json!({"targetRef": {"kind": "PyTorchJob", "name": "gone"}})));
    let message = |name: &str, kind: &str, wanted: &str| {
        eventually(&format!("{kind} of {name}"), || {
            condition(&bed.get("sharepolicy", name), kind)
                .filter(|(status, _)| status == wanted)
                .map(|(_, message)| message)
        })
    };
    assert!(message("selects-none", "Selected", "False").contains("no pod in team has these labels"));
    assert!(message("orphan", "Selected", "False").contains("was made by a PyTorchJob named gone"));
    bed.apply(pod("loose", "kwok-0", json!({})));
    assert!(message("training", "Resizable", "False").contains("give container main a CPU request"));
    bed.kubectl(&["delete", "pod", "loose", "-n", "team", "--now"]);
    assert!(message("training", "Resizable", "True").contains("every selected pod"));

    let uid = bed.get("pod", "a")["metadata"]["uid"].as_str().unwrap().to_owned();
    let job = |category, value| JobReport {
        uid: uid.as_str().into(),
        container: "main".to_owned(),
        category,
        growth: Some(0.1),
        progress: gainshare_kube_api::wire::Progress { value: Some(value), ..Default::default() },
        share: Some(0.7),
        reason: "it grows".to_owned(),
        ..JobReport::default()
    };
    agents.0.ask(Some(vec![job(ReportedCategory::Growing, 3.0)]), Vec::new(), 0).unwrap();
    let status = || bed.get("pod", "a")["metadata"]["annotations"]["gainshare.dev/status"].as_str().map(str::to_owned);
    let note = eventually("a note on the pod", || status().filter(|note| note.contains("growing")));
    assert!(note.contains("\"sharePercent\":70"), "{note}");
    eventually("a count in the policy", || {
        (bed.get("sharepolicy", "training")["status"]["growing"] == 1).then_some(())
    });

    // Progress alone writes nothing. (The other node's agent must not seem to have fallen silent meanwhile.)
    agents.1.ask(None, Vec::new(), 0).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let version = |kind: &str, name: &str| bed.get(kind, name)["metadata"]["resourceVersion"].clone();
    let before = (version("pod", "a"), version("sharepolicy", "training"));
    for step in 0..10 {
        agents.0.ask(Some(vec![job(ReportedCategory::Growing, 2.0 - f64::from(step) / 10.0)]), Vec::new(), 0).unwrap();
        std::thread::sleep(Duration::from_millis(200));
    }
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!((version("pod", "a"), version("sharepolicy", "training")), before);
    let columns = bed.kubectl(&["get", "sharepolicy", "training", "-n", "team"]);
    assert!(columns.contains("GROWING") && columns.contains("gainshare"), "{columns}");
}

/// The API server sends admission reviews of new pods to the operator. The operator has no pod here that the
/// Service could select, so the configuration names its address.
fn webhook(bed: &TestBed, address: SocketAddr) {
    let patch = json!([
        {"op": "remove", "path": "/webhooks/0/clientConfig/service"},
        {"op": "add", "path": "/webhooks/0/clientConfig/url", "value": format!("https://{address}/mutate")},
    ]);
    bed.kubectl(&["patch", "mutatingwebhookconfiguration", "gainshare", "--type=json", "-p", &patch.to_string()]);
    let env = |name: &str| {
        bed.apply(pod(name, "kwok-1", json!({"requests": {"cpu": "2"}})));
        bed.get("pod", name)["spec"]["containers"][0]["env"].clone()
    };
    assert!(env("plain").is_null(), "a namespace that did not ask for it");
    bed.kubectl(&["label", "namespace", "team", "gainshare.dev/start=tuned"]);
    let mut count = 0;
    let tuned = eventually("a pod with a good start", || {
        count += 1;
        Some(env(&format!("tuned-{count}"))).filter(|env| !env.is_null())
    });
    let value = |name: &str| tuned.as_array().unwrap().iter().find(|var| var["name"] == name).unwrap()["value"].clone();
    assert_eq!((value("OMP_WAIT_POLICY"), value("OMP_NUM_THREADS")), (json!("PASSIVE"), json!("2")));
    let admitted = bed.get("pod", &format!("tuned-{count}"));
    assert!(admitted["metadata"]["annotations"]["gainshare.dev/start"].as_str().unwrap().starts_with("tuned; main: "));
}

fn given_back(bed: &TestBed, runtime: &tokio::runtime::Runtime, client: &Client, agent: &mut Agent) {
    let set_suspend = |suspend: bool| {
        let patch = format!(r#"{{"spec":{{"suspend":{suspend}}}}}"#);
        bed.kubectl(&["patch", "sharepolicy", "training", "-n", "team", "--type=merge", "-p", &patch]);
    };
    let restored = |what: &str, name: &str| {
        eventually(what, || {
            let pod = bed.get("pod", name);
            let clean = pod["metadata"]["annotations"][ORIGINAL_ANNOTATION].is_null();
            (clean && cpu(&pod) == "500m").then_some(())
        });
    };
    set_suspend(true);
    restored("values given back by a suspended policy", "a");
    restored("values given back by a suspended policy", "b");
    assert!(bed.get("pod", "a")["metadata"]["annotations"]["gainshare.dev/status"].is_null());

    set_suspend(false);
    let uid = bed.get("pod", "a")["metadata"]["uid"].as_str().unwrap().to_owned();
    eventually("the pod back on the list", || agent.list().iter().any(|pod| pod.uid.as_str() == uid).then_some(()));
    assert_eq!(agent.resize(&uid, 10, 100), OutcomeState::Done);
    bed.kubectl(&["delete", "sharepolicy", "training", "-n", "team"]);
    restored("values given back when a policy is deleted", "a");

    bed.kubectl(&["label", "namespace", "team", "gainshare.dev/share=enabled"]);
    eventually("the pod on the list by its namespace's label", || {
        agent.list().iter().any(|pod| pod.uid.as_str() == uid).then_some(())
    });
    assert_eq!(agent.resize(&uid, 11, 100), OutcomeState::Done);
    runtime.block_on(operator::release(&operator_config(([127, 0, 0, 1], 0).into()), client)).unwrap();
    for name in ["a", "b"] {
        let pod = bed.get("pod", name);
        assert_eq!(cpu(&pod), "500m", "{name} has its own values when the release returns");
        assert!(pod["metadata"]["annotations"][ORIGINAL_ANNOTATION].is_null(), "{pod:#}");
    }
    let restarts = bed.get("pod", "a")["status"]["containerStatuses"][0]["restartCount"].clone();
    assert_eq!(restarts, 0);
    assert!(agent.list().is_empty(), "switched off, nothing is shared");
}
