//! The connection of a node agent to the operator: long polls over TLS.
//!
//! **How.** A request carries the agent's whole present state. There is no queue: while the operator is away
//! decisions go on, and when it returns it gets the newest state only. The operator holds an answer until it
//! has news. When the agent has news meanwhile, it sends a second request at once, and the operator answers
//! the first. After a failure the next try waits, twice as long each time up to [`MAX_PAUSE`]. The pause
//! differs a little by the node's name, so that the agents of a large cluster do not all return at the same
//! moment.
//!
//! **Identity.** The token file is read for every request, because the kubelet renews it. The CA file is
//! read for every request too, because the operator may return with another certificate. The token is sent
//! only to a server whose certificate was signed by that CA.

use gainshare_core::backoff::Backoff;
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::wire::{Answer, SYNC_PATH, SyncRequest};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, Uri};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// All pods have their shares within half a minute of the operator's return, so no pause is longer than a few
/// seconds.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const MAX_PAUSE: Duration = Duration::from_secs(5);

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long an answer may take beyond the time for which the operator may hold it.
const GRACE: Duration = Duration::from_secs(8);

/// A thousand pods with all their settings are a megabyte.
const MAX_ANSWER_BYTES: usize = 16 << 20;

/// Why an exchange with the operator failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error(
        "{url:?} is not the address of an operator: it must look like https://gainshare-operator.gainshare.svc:8443"
    )]
    Address { url: String },
    #[error("cannot read {what} {path}: {source}; is the volume mounted?")]
    File { what: &'static str, path: String, source: std::io::Error },
    #[error(
        "{path} holds no certificate in PEM form: it should be the operator's CA, from the ConfigMap in which the operator publishes it"
    )]
    NoCertificate { path: String },
    #[error("the operator at {url} cannot be reached: {why}")]
    Unreachable { url: String, why: String },
    #[error("the operator at {url} did not answer within {} s", .after.as_secs())]
    TimedOut { url: String, after: Duration },
    #[error("the operator refused: {status}: {message}")]
    Refused { status: u16, message: String },
    #[error("the operator's answer cannot be read: {0}; do node agent and operator have the same version?")]
    Malformed(String),
}

type Https = Client<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// A connection to one operator. Public for benchmarks, which simulate many agents.
#[derive(Clone)]
pub struct Link {
    url: Uri,
    ca_file: PathBuf,
    token_file: PathBuf,
    client: Option<(Vec<u8>, Https)>,
}

impl Link {
    /// For an operator at `https://host:port`. Both files are read for each request.
    pub fn new(operator: &str, ca_file: &Path, token_file: &Path) -> Result<Link, LinkError> {
        let address = || LinkError::Address { url: operator.to_owned() };
        let url: Uri = format!("{}{SYNC_PATH}", operator.trim_end_matches('/')).parse().map_err(|_| address())?;
        if url.scheme_str() != Some("https") || url.host().is_none() || url.path() != SYNC_PATH {
            return Err(address());
        }
        Ok(Link { url, ca_file: ca_file.to_owned(), token_file: token_file.to_owned(), client: None })
    }

    /// A client that trusts the present content of the CA file. While the file does not change, it is the same
    /// client with its open connections.
    fn client(&mut self) -> Result<Https, LinkError> {
        let path = self.ca_file.display().to_string();
        let pem = std::fs::read(&self.ca_file).map_err(|source| LinkError::File {
            what: "the operator's CA",
            path: path.clone(),
            source,
        })?;
        if let Some((trusted_pem, client)) = &self.client
            && *trusted_pem == pem
        {
            return Ok(client.clone());
        }
        let mut roots = rustls::RootCertStore::empty();
        let certificates = CertificateDer::pem_slice_iter(&pem).flatten();
        roots.add_parsable_certificates(certificates);
        if roots.is_empty() {
            return Err(LinkError::NoCertificate { path });
        }
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("the provider supports the versions it names")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        http.set_connect_timeout(Some(CONNECT_TIMEOUT));
        // The kernel notices a connection that was cut off, long before the long poll would time out.
        http.set_keepalive(Some(Duration::from_secs(5)));
        http.set_nodelay(true);
        let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_only().enable_http1().wrap_connector(http);
        // One connection is enough: a connection that is made after its request was given up is not kept beside
        // the next one.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(1).build(https);
        self.client = Some((pem, client.clone()));
        Ok(client)
    }

    /// Sends one request and waits for its answer.
    pub async fn sync(&mut self, sync: &SyncRequest) -> Result<Answer, LinkError> {
        let client = self.client()?;
        let token = std::fs::read_to_string(&self.token_file).map_err(|source| LinkError::File {
            what: "the agent's token",
            path: self.token_file.display().to_string(),
            source,
        })?;
        let body = serde_json::to_vec(sync).map_err(|e| LinkError::Malformed(e.to_string()))?;
        let request = Request::builder()
            .method(Method::POST)
            .uri(self.url.clone())
            .header(CONTENT_TYPE, "application/json")
            .header(AUTHORIZATION, format!("Bearer {}", token.trim()))
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| LinkError::File {
                what: "the agent's token",
                path: self.token_file.display().to_string(),
                source: std::io::Error::new(std::io::ErrorKind::InvalidData, "it is not a token"),
            })?;
        let url = self.url.authority().map(|a| a.to_string()).unwrap_or_default();
        let after = Duration::from_millis(sync.wait_ms.into()) + GRACE;
        let exchange = async {
            let response = client.request(request).await.map_err(|e| unreachable(&url, &e))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER_BYTES).collect().await;
            let body = body.map_err(|e| LinkError::Unreachable { url: url.clone(), why: e.to_string() })?.to_bytes();
            if !status.is_success() {
                let text = String::from_utf8_lossy(&body);
                let message = text.lines().next().unwrap_or_default().chars().take(300).collect();
                return Err(LinkError::Refused { status: status.as_u16(), message });
            }
            serde_json::from_slice(&body).map_err(|e| LinkError::Malformed(e.to_string()))
        };
        match tokio::time::timeout(after, exchange).await {
            Ok(result) => result,
            Err(_) => Err(LinkError::TimedOut { url: url.clone(), after }),
        }
    }
}

/// The innermost cause has the reason. The outer ones say only that the client could not connect.
fn unreachable(url: &str, error: &dyn std::error::Error) -> LinkError {
    let mut cause = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    LinkError::Unreachable { url: url.to_owned(), why: cause.to_string() }
}

/// How long to wait before the next try. The pauses differ by a factor of 0.75 to 1.25, always the same for a node.
pub(crate) fn retries(node: &NodeName) -> Backoff {
    let hash = node.bytes().fold(0x811c_9dc5u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193));
    let factor = 0.75 + f64::from(hash % 1024) / 2048.0;
    Backoff::new(FIRST_PAUSE.mul_f64(factor), MAX_PAUSE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_https_addresses_are_accepted() {
        let link = |url: &str| Link::new(url, Path::new("ca"), Path::new("token"));
        assert!(link("https://operator.gainshare.svc:8443").is_ok());
        assert!(link("https://[::1]:8443/").is_ok());
        for bad in ["http://operator:8443", "operator:8443", "https://", "https://a b", "https://m/elsewhere", ""] {
            assert!(link(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pauses_grow_and_end_at_five_seconds() {
        for node in ["a", "worker-17", ""] {
            let mut retries = retries(&node.into());
            let pauses: Vec<Duration> = (0..50).map(|_| retries.next_pause()).collect();
            assert!(pauses.is_sorted() && pauses[0] >= Duration::from_millis(100), "{pauses:?}");
            assert!(*pauses.last().unwrap() <= MAX_PAUSE);
            retries.reset();
            assert_eq!(retries.next_pause(), pauses[0]);
        }
    }

    #[tokio::test]
    async fn files_that_are_missing_or_wrong_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let (ca, token) = (dir.path().join("ca.crt"), dir.path().join("token"));
        let mut link = Link::new("https://127.0.0.1:1", &ca, &token).unwrap();
        let sync = SyncRequest { node: "n".into(), epoch: 1, seq: 1, ..SyncRequest::default() };
        let message = link.sync(&sync).await.unwrap_err().to_string();
        assert!(message.contains("the operator's CA") && message.contains("ca.crt"), "{message}");
        std::fs::write(&ca, "hello").unwrap();
        let message = link.sync(&sync).await.unwrap_err().to_string();
        assert!(message.contains("holds no certificate"), "{message}");
        let authority = rcgen::generate_simple_self_signed(vec!["localhost".into()]).unwrap();
        std::fs::write(&ca, authority.cert.pem()).unwrap();
        let message = link.sync(&sync).await.unwrap_err().to_string();
        assert!(message.contains("token"), "{message}");
        std::fs::write(&token, "abc\n").unwrap();
        let message = link.sync(&sync).await.unwrap_err().to_string();
        assert!(message.contains("cannot be reached"), "{message}");
    }
}
