//! `explain NAME --dump FILE`: the last decision about a pod or job, for `gainshare replay FILE`.
//!
//! **Problem.** Decisions are kept by the processes that make them: the share of a pod by the node agent of
//! its node, the place of a TrainingJob or an adopted Job and the sizes of a distributed job's tasks by the
//! operator that leads. Neither is reached from outside of the cluster.
//!
//! **How.** Both serve their records on the loopback interface of their own pod
//! ([`gainshare_kube_api::decision_record`]). The plugin finds the right pod in the namespace of the
//! installation and forwards that port through the API server, with the rights of the user. The record is
//! written as it comes, in the format of `gainshare explain JOB --dump FILE`.

use anyhow::{Context, Result, anyhow, bail};
use gainshare_kube_api::decision_record::{AGENT_SELECTOR, JOB_HEADER, OPERATOR_SELECTOR, RECORD_PATH, RECORD_PORT};
use gainshare_kube_api::names::{LEADER_LABEL, NodeName};
use http_body_util::{BodyExt, Empty, Limited};
use hyper::body::Bytes;
use hyper::{Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use k8s_openapi::api::core::v1::Pod;
use kube::Client;
use kube::api::{Api, ListParams};
use kube::client::UpgradeConnectionError;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};

/// A cluster of 50,000 jobs makes about a hundred megabytes.
const MAX_RECORD_BYTES: usize = 1 << 30;

/// In a large cluster the operator records the next decision, which may be half a minute away.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);

/// The kubelet's reason for a broken port-forward comes at once, or not at all.
const REASON_TIMEOUT: Duration = Duration::from_secs(1);

/// The process that made the decision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Decider {
    /// The node agent of this node.
    Agent { node: NodeName },
    /// The operator that leads.
    Operator,
}

/// A recorded decision as it was served.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// The number of the pod or job in the record, such as `job-3`.
    pub(super) job: String,
    pub(super) json: Bytes,
}

/// Fetches the last decision about the pod or job with this uid.
pub(super) async fn fetch(client: &Client, namespace: &str, decider: &Decider, uid: &str) -> Result<Record> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
    let pod = find_pod(&pods, namespace, decider).await?;
    let mut forward =
        pods.portforward(&pod, &[RECORD_PORT]).await.map_err(|error| forward_error(error, namespace, &pod))?;
    let stream = forward.take_stream(RECORD_PORT).context("the port-forward has no stream")?;
    let reason = forward.take_error(RECORD_PORT);
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, ask(stream, uid)).await;
    let answer = answer.map_err(|_| anyhow!("{pod} did not answer within {} s", ANSWER_TIMEOUT.as_secs()))?;
    let Err(error) = answer else { return answer };
    let reason = match reason {
        Some(reason) => tokio::time::timeout(REASON_TIMEOUT, reason).await.ok().flatten(),
        None => None,
    };
    let Some(reason) = reason else { return Err(error) };
    bail!(
        "the pod {pod} in the namespace {namespace} serves no records on port {RECORD_PORT} (is it of an older version, or \
         without --record-listen?): {}",
        reason.trim()
    )
}

/// The name of the pod in which the decider runs.
async fn find_pod(pods: &Api<Pod>, namespace: &str, decider: &Decider) -> Result<String> {
    let list = match decider {
        Decider::Agent { node } => {
            ListParams::default().labels(AGENT_SELECTOR).fields(&format!("spec.nodeName={node}"))
        }
        Decider::Operator => ListParams::default().labels(&format!("{OPERATOR_SELECTOR},{LEADER_LABEL}=true")),
    };
    let found = pods.list(&list).await.map_err(|error| match error {
        kube::Error::Api(status) if status.code == StatusCode::FORBIDDEN.as_u16() => anyhow!(
            "you may not list pods in the namespace {namespace}: this needs the verb `list` on the resource `pods` there"
        ),
        error => anyhow!(error).context(format!("cannot list pods in the namespace {namespace}")),
    })?;
    let is_running = |pod: &&Pod| {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        phase == Some("Running") && pod.metadata.deletion_timestamp.is_none()
    };
    let name = found.iter().find(is_running).and_then(|pod| pod.metadata.name.clone());
    name.ok_or_else(|| {
        let missing = match decider {
            Decider::Agent { node } => format!("no node agent runs on the node {node}"),
            Decider::Operator => "no operator leads".to_owned(),
        };
        anyhow!("{missing} in the namespace {namespace}: if Gainshare is installed in another one, name it with --system-namespace")
    })
}

fn forward_error(error: kube::Error, namespace: &str, pod: &str) -> anyhow::Error {
    let is_forbidden = match &error {
        kube::Error::Api(status) => status.code == StatusCode::FORBIDDEN.as_u16(),
        kube::Error::UpgradeConnection(UpgradeConnectionError::ProtocolSwitch(code)) => {
            code.as_u16() == StatusCode::FORBIDDEN.as_u16()
        }
        _ => false,
    };
    if is_forbidden {
        return anyhow!(
            "you may not forward ports in the namespace {namespace}: this needs the verbs `get` and `create` on the resource \
             `pods/portforward` there"
        );
    }
    anyhow!(error).context(format!("cannot forward a port to the pod {pod} in the namespace {namespace}"))
}

/// Asks for the record over a connection to the process that has it.
async fn ask(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, uid: &str) -> Result<Record> {
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get(format!("{RECORD_PATH}?uid={uid}"))
        .header(header::HOST, "localhost")
        .header(header::CONNECTION, "close")
        .body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await.context("the connection broke")?;
    let (status, headers) = (response.status(), response.headers().clone());
    let body = Limited::new(response.into_body(), MAX_RECORD_BYTES).collect().await;
    let json = body.map_err(|error| anyhow!("the record did not arrive: {error}"))?.to_bytes();
    if status != StatusCode::OK {
        bail!("{}", String::from_utf8_lossy(&json).trim());
    }
    let job = headers.get(JOB_HEADER).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned();
    Ok(Record { job, json })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// What a process makes of this answer, and the first line of the request that it got.
    async fn ask_server(answer: String) -> (Result<Record>, String) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = vec![0; 4096];
            let length = stream.read(&mut request).await.unwrap();
            stream.write_all(answer.as_bytes()).await.unwrap();
            String::from_utf8_lossy(&request[..length]).lines().next().unwrap_or_default().to_owned()
        });
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        (ask(stream, "uid-1").await, server.await.unwrap())
    }

    #[tokio::test]
    async fn a_record_comes_with_the_number_of_its_job() {
        let answer = "HTTP/1.1 200 OK\r\ngainshare-job: job-3\r\ncontent-length: 2\r\n\r\n{}".to_owned();
        let (record, request) = ask_server(answer).await;
        assert_eq!(request, "GET /decision?uid=uid-1 HTTP/1.1");
        assert_eq!(record.unwrap(), Record { job: "job-3".into(), json: Bytes::from_static(b"{}") });
    }

    #[tokio::test]
    async fn a_refusal_is_passed_on_in_its_own_words() {
        let answer = "HTTP/1.1 404 Not Found\r\ncontent-length: 22\r\n\r\nnothing decided yet..\n".to_owned();
        assert_eq!(ask_server(answer).await.0.unwrap_err().to_string(), "nothing decided yet..");
    }

    /// A stand-in for the API server that answers every request with this.
    async fn api_server(code: &str, body: &str) -> Client {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let config = kube::Config::new(format!("http://{}", listener.local_addr().unwrap()).parse().unwrap());
        let length = body.len();
        let head = format!("HTTP/1.1 {code}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n");
        let answer = format!("{head}connection: close\r\n\r\n{body}");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.read(&mut [0; 8192]).await;
                let _ = stream.write_all(answer.as_bytes()).await;
            }
        });
        Client::try_from(config).unwrap()
    }

    #[tokio::test]
    async fn missing_rights_are_named() {
        let forbidden = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}"#;
        let client = api_server("403 Forbidden", forbidden).await;
        let error = fetch(&client, "sys", &Decider::Operator, "u").await.unwrap_err().to_string();
        assert!(error.contains("`list` on the resource `pods`") && error.contains("sys"), "{error}");
        let pods: Api<Pod> = Api::namespaced(client, "sys");
        let refused = pods.portforward("agent-1", &[RECORD_PORT]).await.err().unwrap();
        let error = forward_error(refused, "sys", "agent-1").to_string();
        assert!(error.contains("`pods/portforward`") && error.contains("`create`"), "{error}");
    }

    #[tokio::test]
    async fn a_node_without_an_agent_is_named() {
        let empty = r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}"#;
        let client = api_server("200 OK", empty).await;
        let agent = Decider::Agent { node: "n1".into() };
        let error = fetch(&client, "sys", &agent, "u").await.unwrap_err().to_string();
        assert!(error.contains("no node agent runs on the node n1") && error.contains("--system-namespace"), "{error}");
        let error = fetch(&client, "sys", &Decider::Operator, "u").await.unwrap_err().to_string();
        assert!(error.contains("no operator leads"), "{error}");
    }
}
