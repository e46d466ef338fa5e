//! Tests of [`super`]: a decision is asked for over a local socket, and its plan is made again.

use super::*;
use crate::http::auth::Reviewer;
use crate::http::record::router;
use crate::http::serve::LeaderContext;
use crate::placement::snapshot::{ClusterSnapshot, NodeSnapshot};
use crate::shares::Shares;
use crate::state::lead::Leader;
use crate::state::metrics::Metrics;
use crate::state::orders::{JobFacts, JobState};
use crate::state::workload::WorkloadKind;
use gainshare_core::model::Time;
use gainshare_core::policy::{Preset, Specon};
use gainshare_core::view::Marks;
use gainshare_kube_api::decision_record::{JOB_HEADER, RECORD_PATH};
use gainshare_kube_api::fixtures::job_policy;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;

fn facts(name: &str, policy: JobPolicy) -> JobFacts {
    JobFacts {
        uid: format!("uid-{name}").into(),
        kind: WorkloadKind::TrainingJob,
        namespace: "team".to_owned(),
        name: name.to_owned(),
        owner: "team".to_owned(),
        arrived: jiff::Timestamp::UNIX_EPOCH,
        policy,
        state: JobState::Waiting,
        movable: Ok(()),
        pod_uid: None,
        cpu_request_milli: 1,
        memory_request_bytes: 1,
        tried: vec![],
        move_cost_s: None,
        marks: Marks::default(),
    }
}

fn snapshot(jobs: Vec<JobFacts>) -> ClusterSnapshot {
    let node = NodeSnapshot {
        cores: 4.0,
        speed: 1.0,
        memory_bytes: 1 << 40,
        free_milli: 1 << 40,
        free_bytes: 1 << 40,
        open: true,
        heard: true,
    };
    let nodes = ["left", "right"].map(|name| (name.into(), node.clone())).into();
    let jobs = jobs.into_iter().map(|facts| (Arc::new(facts), None)).collect();
    ClusterSnapshot { now: Time::from_secs_f64(1e6), nodes, jobs }
}

fn leading_replica() -> Arc<LeaderContext> {
    let nowhere = kube::Config::new("http://127.0.0.1:9".parse().unwrap());
    let client = kube::Client::try_from(nowhere).unwrap();
    let metrics = Arc::new(Metrics::new());
    let leader = Arc::new(Leader::new(metrics.clone(), 1));
    let shares = Arc::new(Shares::new(leader.clone(), client.clone(), metrics));
    Arc::new(LeaderContext { leader, shares, reviewer: Reviewer::new(client, "system", "agent") })
}

async fn get(address: SocketAddr, uid: &str) -> (String, String) {
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {RECORD_PATH}?uid={uid} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).await.unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

#[tokio::test]
async fn a_placement_is_served_on_request_and_replays() {
    let requests = Arc::new(RecordRequests::default());
    let (leading, leading_seen) = watch::channel(None);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let app = router(leading_seen, requests.clone());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let (head, body) = get(address, "uid-vae").await;
    assert!(head.starts_with("HTTP/1.1 503") && body.contains("does not lead"), "{head} {body}");

    leading.send_replace(Some(leading_replica()));
    let mut decision = Placements::new(Specon::default());
    let jobs = vec![
        facts("vae", job_policy(Preset::Gainshare)),
        facts("gru", job_policy(Preset::Specon)),
        facts("own", job_policy(Preset::Na)),
    ];
    assert_eq!(decision.decide(&snapshot(jobs)).len(), 2);
    let passes = requests.clone();
    tokio::spawn(async move {
        loop {
            passes.answer(&mut decision);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    for name in ["vae", "gru"] {
        let (head, body) = get(address, &format!("uid-{name}")).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head} {body}");
        let record = gainshare_record::from_json(&body).unwrap();
        let job = head.lines().find_map(|line| line.strip_prefix(&format!("{JOB_HEADER}: "))).unwrap();
        assert_eq!(record.view.jobs.iter().map(|view| view.id.to_string()).collect::<Vec<_>>(), [job]);
        assert_eq!(record.plan.starts.len(), 1, "{body}");
        assert_eq!(record.replay().unwrap().differences, []);
        // Numbers only: the names of jobs, namespaces and nodes stay in the cluster's objects.
        for name in ["vae", "gru", "uid-vae", "uid-gru", "team", "left", "right"] {
            assert!(!body.contains(&format!("\"{name}\"")), "{name}: {body}");
        }
    }
    let (head, body) = get(address, "uid-own").await;
    assert!(head.starts_with("HTTP/1.1 404") && body.contains("`na`"), "{head} {body}");
    let (head, body) = get(address, "uid-gone").await;
    assert!(head.starts_with("HTTP/1.1 404") && body.contains("uid-gone"), "{head} {body}");
}

#[test]
fn a_large_cluster_records_the_next_decision_after_a_request() {
    let requests = RecordRequests::default();
    let mut decision = Placements::new(Specon::default());
    let mut jobs: Vec<JobFacts> =
        (0..=RECORDED_JOBS).map(|index| facts(&index.to_string(), job_policy(Preset::Gainshare))).collect();
    decision.decide(&snapshot(jobs.clone()));
    assert!(decision.recorded.is_empty(), "a decision that no user asked for is not recorded");
    let mut answer = requests.ask("uid-7".into());
    requests.answer(&mut decision);
    assert!(answer.try_recv().is_err(), "the next decision is awaited");
    // A job that comes makes a decision due.
    jobs.push(facts("late", job_policy(Preset::Gainshare)));
    decision.decide(&snapshot(jobs.clone()));
    requests.answer(&mut decision);
    let JobDecision { decision: found, .. } = answer.try_recv().unwrap().unwrap();
    assert_eq!(found.record().unwrap().replay().unwrap().differences, []);
    // The decision after it is not recorded.
    jobs.push(facts("later", job_policy(Preset::Gainshare)));
    decision.decide(&snapshot(jobs));
    assert!(decision.recorded.is_empty());
}

#[test]
fn a_decision_about_sizes_is_answered_without_a_pass() {
    let requests = RecordRequests::default();
    let mut decision = Placements::new(Specon::default());
    decision.decide(&snapshot(vec![facts("ps", job_policy(Preset::Gainshare))]));
    let (job, recorded) = (JobId(1), decision.recorded[&job_policy(Preset::Gainshare)].clone());
    let sizes = [
        ("uid-ps".into(), Ok(JobDecision { job, decision: recorded })),
        ("uid-many".into(), Err(RecordError::TooManyJobs)),
    ];
    requests.put_sizes(sizes.into());
    assert_eq!(requests.ask("uid-ps".into()).try_recv().unwrap().unwrap().job, job);
    let many = requests.ask("uid-many".into()).try_recv().unwrap().unwrap_err();
    assert!(many.to_string().contains("at most 2000 jobs"), "{many}");
    requests.put_sizes(HashMap::new());
    assert!(requests.ask("uid-ps".into()).try_recv().is_err(), "a pass over places answers");
}
