//! The API as programs meet it: doors, limits, events, description, metrics, pushes.

use crate::common::{self, Daemon, sh, trainer, wait_until};
use gainshare_daemon::api::types::*;
use std::io::{Read, Write};
use std::net::TcpStream;

/// One raw request over TCP; status and body.
fn tcp(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    let mut request = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
    for (name, value) in headers {
        request.push_str(&format!("{name}: {value}\r\n"));
    }
    // A server that refuses early may close before it has read everything.
    let _ = stream.write_all(format!("{request}\r\n{body}").as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let status = answer.split(' ').nth(1).unwrap_or("0").parse().unwrap();
    (status, answer.split_once("\r\n\r\n").map_or(String::new(), |(_, body)| body.to_owned()))
}

fn address(d: &Daemon) -> String {
    common::read(&d.run_dir().join("address")).trim().to_owned()
}

#[test]
fn every_method_is_guarded_on_loopback() {
    let d = Daemon::start("");
    let at = address(&d);
    let token = common::read(&d.state().join("token")).trim().to_owned();
    let bearer = format!("Bearer {token}");
    let (host, auth) = (("host", at.as_str()), ("authorization", bearer.as_str()));
    let routes = [
        ("GET", "/v1/health"),
        ("POST", "/v1/shutdown"),
        ("DELETE", "/v1/jobs/1"),
        ("GET", "/nothing"),
        ("PUT", "/v1/jobs"),
        ("OPTIONS", "/v1/jobs"),
        ("GET", "/metrics"),
    ];
    for (method, path) in routes {
        let code = |headers: &[_]| tcp(&at, method, path, headers, "").0;
        assert_eq!(code(&[host]), 401, "{method} {path} without a token");
        assert_eq!(code(&[host, ("authorization", "Bearer 00")]), 401, "{method} {path} with a wrong token");
        assert_eq!(code(&[("host", "evil.example"), auth]), 403, "{method} {path} under a foreign name");
        assert_eq!(code(&[host, auth, ("origin", "http://evil.example")]), 403, "{method} {path} from a foreign page");
    }
    assert_eq!(tcp(&at, "GET", "/v1/health", &[host, auth], "").0, 200);
    assert_eq!(tcp(&at, "GET", "/nothing", &[host, auth], "").0, 404);
    println!("fault: injected={} violations=0", 4 * routes.len());
}

#[test]
fn malformed_and_huge_requests_are_refused() {
    let d = Daemon::start("");
    let at = address(&d);
    let bearer = format!("Bearer {}", common::read(&d.state().join("token")).trim());
    let (host, auth) = (("host", at.as_str()), ("authorization", bearer.as_str()));
    assert_eq!(tcp(&at, "POST", "/v1/jobs", &[host, auth], "{not json").0, 400);
    let (status, body) = tcp(&at, "POST", "/v1/jobs", &[host, auth], r#"{"jobs":[{"comand":["x"]}]}"#);
    assert!(status == 422 && body.contains("comand"), "{status} {body}");
    assert_eq!(tcp(&at, "POST", "/v1/jobs", &[host, auth], &"x".repeat(9 << 20)).0, 413);
    let huge = "x".repeat(1 << 20);
    assert!(matches!(tcp(&at, "GET", "/v1/health", &[host, auth, ("x-huge", &huge)], "").0, 400..=499 | 0));
    assert_eq!(tcp(&at, "GET", "/v1/health", &[host, auth], "").0, 200, "the daemon goes on");
}

#[test]
fn an_address_that_others_reach_is_refused() {
    let open = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(open.path(), "listen = \"0.0.0.0:0\"").unwrap();
    let refused = std::process::Command::new(common::program()).arg("up").arg(open.path()).output().unwrap();
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(!refused.status.success() && said.contains("refusing to listen"), "{said}");
}

#[test]
fn events_follow_a_job_to_its_end() {
    let d = Daemon::start("");
    let seen = d.call(async {
        let mut events = d.client.events().await.unwrap();
        let job = trainer("watched", 6, "0.3");
        d.client.submit(vec![job], Default::default()).await.unwrap();
        let mut seen = Vec::new();
        while let Some(event) = events.next().await.unwrap() {
            let over = matches!(&event, Event::Job { job } if job.state.is_final());
            seen.push(event);
            if over {
                break;
            }
        }
        seen
    });
    let states: Vec<JobState> =
        seen.iter().filter_map(|e| if let Event::Job { job } = e { Some(job.state) } else { None }).collect();
    assert_eq!(states, [JobState::Queued, JobState::Starting, JobState::Running, JobState::Done]);
    let samples = seen.iter().filter(|e| e.name() == "sample").count();
    assert!((1..=4).contains(&samples), "at most one a second: {samples}");
    assert!(seen.iter().any(|e| e.name() == "plan"));
}

#[test]
fn metrics_show_the_jobs_that_live() {
    let d = Daemon::start("");
    d.submit(vec![trainer("watched", 6, "0.3")]).unwrap();
    assert_eq!(d.wait_end("watched").state, JobState::Done);
    d.submit(vec![sh("lives", "echo loss=2; sleep 30")]).unwrap();
    d.wait("lives", "reporting", |j| j.metric.is_some());
    let (at, token) = (address(&d), common::read(&d.state().join("token")));
    let bearer = format!("Bearer {}", token.trim());
    let get = |path: &str| tcp(&at, "GET", path, &[("host", &at), ("authorization", &bearer)], "").1;
    let metrics = get("/metrics");
    for line in [
        "gainshare_jobs{state=\"done\"} 1",
        "gainshare_jobs{state=\"running\"} 1",
        "gainshare_job_metric_value{job=\"lives\"} 2.0",
        "gainshare_job_cpu_share_ratio{job=\"lives\"}",
        "gainshare_job_category{job=\"lives\",category=\"growing\"} 1.0",
        "gainshare_samples_accepted_total 7",
        "gainshare_plans_total",
        "gainshare_journal_commit_seconds_bucket",
        "# EOF",
    ] {
        assert!(metrics.contains(line), "{line} is missing in\n{metrics}");
    }
    assert!(!metrics.contains("job=\"watched\""), "ended jobs leave no series behind");
    assert!(get("/v1/openapi.json").contains("/v1/jobs/{job}/explain"));
}

/// The status line and, for what the daemon has no route for, its message; streams are not read to their end.
fn probe(d: &Daemon, at: &str, bearer: &str, method: &str, path: &str) -> (u16, bool) {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
    let body = "{not json";
    let head = format!("{method} {path} HTTP/1.1\r\nhost: {at}\r\nauthorization: {bearer}\r\nconnection: close\r\n");
    stream.write_all(format!("{head}content-length: {}\r\n\r\n{body}", body.len()).as_bytes()).unwrap();
    let mut answer = Vec::new();
    let mut piece = [0; 4096];
    while let Ok(n) = stream.read(&mut piece) {
        answer.extend_from_slice(&piece[..n]);
        let is_stream = path.ends_with("/events") && answer.windows(4).any(|w| w == b"\r\n\r\n");
        if n == 0 || is_stream {
            break;
        }
    }
    let answer = String::from_utf8_lossy(&answer);
    let status = answer.split(' ').nth(1).unwrap_or("0").parse().unwrap_or_else(|_| panic!("{answer}; {}", d.log()));
    (status, answer.contains("there is nothing here"))
}

/// The document and the router agree: what is described is served, and no other method of the same paths is.
#[test]
fn what_is_described_is_what_is_served() {
    let d = Daemon::start("");
    let (at, token) = (address(&d), common::read(&d.state().join("token")));
    let bearer = format!("Bearer {}", token.trim());
    let document = tcp(&at, "GET", "/v1/openapi.json", &[("host", &at), ("authorization", &bearer)], "").1;
    let document: serde_json::Value = serde_json::from_str(&document).unwrap();
    let paths = document["paths"].as_object().unwrap();
    assert!(paths.len() > 15);
    for (path, operations) in paths {
        let place = path.replace("{job}", "no-such-job");
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH"] {
            let is_described = operations.get(method.to_lowercase()).is_some();
            let (status, is_nothing) = probe(&d, &at, &bearer, method, &place);
            assert_eq!(is_described, !is_nothing, "{method} {path}: {status}");
        }
    }
    for path in ["/", "/v1", "/v1/nothing", "/v2/jobs"] {
        assert!(probe(&d, &at, &bearer, "GET", path).1, "{path}");
    }
}

#[test]
fn liveness_names_every_loop() {
    let d = Daemon::start("");
    let (at, token) = (address(&d), common::read(&d.state().join("token")));
    let bearer = format!("Bearer {}", token.trim());
    let (status, body) = tcp(&at, "GET", "/healthz", &[("host", &at), ("authorization", &bearer)], "");
    let liveness: Liveness = serde_json::from_str(&body).unwrap();
    assert!(status == 200 && liveness.alive, "{body}");
    let names: Vec<&str> = liveness.loops.iter().map(|l| l.name.as_str()).collect();
    assert_eq!(names, ["driver", "signals"]);
}

#[test]
fn a_job_reports_by_itself_with_its_own_token() {
    let d = Daemon::start("");
    let file = d.dir.path().join("env");
    d.submit(vec![sh("pushes", &format!("env > {}; sleep 30", file.display()))]).unwrap();
    wait_until("the job's environment", 10, || common::read(&file).contains("GAINSHARE_PUSH_URL"));
    let env = common::read(&file);
    let var = |name: &str| env.lines().find_map(|l| l.strip_prefix(&format!("{name}="))).unwrap().to_owned();
    let url = var("GAINSHARE_PUSH_URL");
    let token = common::read(var("GAINSHARE_PUSH_TOKEN_FILE").as_ref());
    let rest = url.strip_prefix("http://").unwrap();
    let (at, path) = rest.split_at(rest.find('/').unwrap());
    let bearer = format!("Bearer {}", token.trim());
    let push = |path: &str, body: &str| tcp(at, "POST", path, &[("host", at), ("authorization", &bearer)], body).0;
    assert_eq!(push(path, r#"{"metric":"loss","value":0.5,"step":3,"total":9}"#), 200);
    let kubeflow = r#"{"trainerStatus":{"progressPercentage":50,"metrics":[{"name":"loss","value":"0.25"}]}}"#;
    assert_eq!(push(path, kubeflow), 200);
    assert_eq!(push(path, "nonsense"), 400);
    assert_eq!(push("/v1/jobs/pushes/stop", "{}"), 401, "its token opens nothing else");
    let metric = d.job("pushes").metric.unwrap();
    assert_eq!((metric.value, metric.source.as_str()), (0.25, "push"));
    assert_eq!(d.call(d.client.samples("pushes", 0.0)).unwrap().samples.len(), 2);
}

/// Values of a job's environment may be secrets: they reach the job, and nothing that the daemon answers.
#[test]
fn no_event_and_no_metric_shows_a_value_of_the_environment() {
    let d = Daemon::start("");
    let mut job = sh("keeper", "echo loss=2; sleep 1; test ${#SECRET} = 12");
    job.env.insert("SECRET".to_owned(), "canary-value".to_owned());
    let seen = d.call(async {
        let mut events = d.client.events().await.unwrap();
        d.client.submit(vec![job], Default::default()).await.unwrap();
        let mut seen = Vec::new();
        while let Some(event) = events.next().await.unwrap() {
            let over = matches!(&event, Event::Job { job } if job.state.is_final());
            seen.push(format!("{event:?}"));
            if over {
                break;
            }
        }
        seen
    });
    assert_eq!(d.job("keeper").state, JobState::Done, "the job has the value");
    let (at, token) = (address(&d), common::read(&d.state().join("token")));
    let bearer = format!("Bearer {}", token.trim());
    let get = |path: &str| tcp(&at, "GET", path, &[("host", &at), ("authorization", &bearer)], "").1;
    let mut answers = vec![get("/metrics"), get("/v1/jobs?all=true"), get("/v1/jobs/keeper"), d.log()];
    assert!(answers[0].contains("gainshare_jobs") && answers[1].contains("SECRET"), "{answers:?}");
    answers.extend(seen);
    for answer in answers {
        assert!(!answer.contains("canary"), "{answer}");
    }
}
