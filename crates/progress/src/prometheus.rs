//! Readings from a Prometheus endpoint of the job.
//!
//! **Parsing** is by hand: the text format is one sample a line, and what jobs serve in practice
//! (Python's client, hand-written handlers) often breaks the rules that a strict parser insists on:
//! missing types, no end mark, mixed versions. A line that is no sample is skipped; the rest counts.
//! Histogram buckets are left out. A gauge whose name ends with a word for steps gives the step.
//!
//! **Fetching** is one `GET` with a deadline ([`TIMEOUT`]) for everything and a size limit
//! ([`MAX_BODY`]). It blocks and belongs on a thread of its own. Only loopback addresses are asked,
//! and redirects are not followed, so that a job cannot make the daemon connect to other machines.

use crate::number::{self, Number};
use crate::reading::{Batch, Counters, MAX_NAME, MetricReading, Progress, Unit};
use crate::words::STEP_GAUGES;
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// The longest that a fetch may take in all.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// The largest answer in bytes. A busy server's is some 100 kB.
const MAX_BODY: u64 = 2 << 20;

/// Samples taken from one answer.
const MAX_SAMPLES: usize = 4096;

/// An address of this machine and a path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    address: SocketAddr,
    path: String,
}

/// Why an address is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    #[error("metric url {url:?} is not of the form http://localhost:PORT/PATH; correct it")]
    Form { url: String },
    #[error(
        "metric url {url:?} is not on this machine; only loopback addresses are asked (localhost, 127.0.0.1, [::1])"
    )]
    NotLoopback { url: String },
}

/// Why a fetch failed.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("{url} cannot be read: {reason}; does the job serve its metrics there?")]
    Failed { url: String, reason: String },
    #[error("{url} answered with status {status} instead of 200; check the path")]
    Status { url: String, status: u16 },
    #[error("{url} answered with more than {MAX_BODY} bytes; serve fewer metrics")]
    TooLarge { url: String },
}

impl Endpoint {
    pub fn parse(url: &str) -> Result<Endpoint, UrlError> {
        let form = || UrlError::Form { url: url.chars().take(200).collect() };
        let rest = url.strip_prefix("http://").ok_or_else(form)?;
        let (host_port, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
        let (host, port) = match host_port.rsplit_once(':') {
            Some((host, port)) if !port.ends_with(']') => (host, port.parse().map_err(|_| form())?),
            _ => (host_port, 80),
        };
        if path.bytes().any(|b| b <= b' ' || b >= 0x7f) || host.is_empty() {
            return Err(form());
        }
        let ip = match host {
            "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
            "[::1]" => IpAddr::V6(Ipv6Addr::LOCALHOST),
            other => other.parse().map_err(|_| UrlError::NotLoopback { url: url.to_string() })?,
        };
        if !ip.is_loopback() {
            return Err(UrlError::NotLoopback { url: url.to_string() });
        }
        let path = if path.is_empty() { "/metrics".to_string() } else { path.to_string() };
        Ok(Endpoint { address: SocketAddr::new(ip, port), path })
    }

    /// Asks the endpoint; blocks for at most [`TIMEOUT`].
    pub fn fetch(&self) -> Result<Vec<u8>, FetchError> {
        let url = format!("http://{}{}", self.address, self.path);
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .proxy(None)
            .accept("text/plain;version=0.0.4")
            .build()
            .new_agent();
        let failed = |e: ureq::Error, url: &str| match e {
            ureq::Error::BodyExceedsLimit(_) => FetchError::TooLarge { url: url.to_owned() },
            other => FetchError::Failed { url: url.to_owned(), reason: other.to_string() },
        };
        let mut answer = agent.get(&url).call().map_err(|e| failed(e, &url))?;
        let status = answer.status().as_u16();
        if status != 200 {
            return Err(FetchError::Status { url, status });
        }
        answer.body_mut().with_config().limit(MAX_BODY).read_to_vec().map_err(|e| failed(e, &url))
    }
}

/// Reads an answer. A metric with labels is called by its name alone if it is the first of that name,
/// and `name{labels}` otherwise.
pub fn parse(body: &[u8], counters: &mut Counters) -> Batch {
    let mut batch = Batch::default();
    let mut names = BTreeSet::new();
    let mut step = None;
    for line in body.split(|&b| b == b'\n') {
        let Some((name, labels, value)) = std::str::from_utf8(line).ok().and_then(sample) else { continue };
        if batch.readings.len() >= MAX_SAMPLES {
            counters.dropped_readings = counters.dropped_readings.saturating_add(1);
            continue;
        }
        let value = match value {
            Number::Good(value) => value,
            Number::Bad => {
                counters.bad_values = counters.bad_values.saturating_add(1);
                continue;
            }
        };
        let plain = name.strip_suffix("_total").unwrap_or(name);
        if STEP_GAUGES.iter().any(|word| plain.ends_with(word)) && value >= 0.0 && value.fract() == 0.0 && value < 1e15
        {
            step = step.or(Some(value as u64));
            continue;
        }
        let metric = if names.insert(name) || labels.is_empty() { name.to_string() } else { format!("{name}{labels}") };
        batch.readings.push(MetricReading { metric, value, step: None, total: None });
    }
    for reading in &mut batch.readings {
        reading.step = step;
    }
    batch.progress = step.map(|step| Progress { step, total: None, unit: Unit::Step });
    batch
}

/// `name{labels} value [timestamp]`, as name, labels with their braces, value.
fn sample(line: &str) -> Option<(&str, &str, Number)> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let name_end = line.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))?;
    let (name, rest) = line.split_at(name_end);
    let labels_end = if rest.starts_with('{') { labels_end(rest)? } else { 0 };
    let (labels, rest) = rest.split_at(labels_end);
    if name.is_empty() || name.len() + labels.len() > MAX_NAME || name.ends_with("_bucket") {
        return None;
    }
    Some((name, labels, number::whole(rest.split_ascii_whitespace().next()?)?))
}

/// Where the labels end; a brace within a quoted value does not end them.
fn labels_end(rest: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    for (i, b) in rest.bytes().enumerate() {
        match b {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some(i + 1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn exposition_text_of_both_kinds() {
        let body = b"# HELP train_loss Loss.\n# TYPE train_loss gauge\ntrain_loss 0.25\n\
            acc{split=\"val\",odd=\"a}\\\"b\"} 0.5 1700000000000\nacc{split=\"train\"} 0.75\n\
            lat_bucket{le=\"+Inf\"} 7\nweird Nan\nbig +Inf\nglobal_step 120\n no value\ngarbage{ 1\n# EOF\n";
        let mut counters = Counters::default();
        let batch = parse(body, &mut counters);
        let readings: Vec<_> = batch.readings.iter().map(|r| (r.metric.as_str(), r.value, r.step)).collect();
        assert_eq!(
            readings,
            [("train_loss", 0.25, Some(120)), ("acc", 0.5, Some(120)), ("acc{split=\"train\"}", 0.75, Some(120))]
        );
        assert_eq!(counters.bad_values, 2);
    }

    #[test]
    fn only_this_machine_is_asked() {
        assert!(Endpoint::parse("http://localhost:8000").is_ok_and(|e| e.path == "/metrics"));
        assert!(Endpoint::parse("http://[::1]:8000/m?x=1").is_ok());
        assert!(Endpoint::parse("http://127.0.0.1/").is_ok());
        for bad in [
            "https://localhost/",
            "http://10.0.0.1/",
            "http://example.org/",
            "http://localhost:x/",
            "http:///m",
            "http://localhost:1/a b\r\nX: y",
        ] {
            assert!(Endpoint::parse(bad).is_err(), "{bad}");
        }
    }

    /// Serves one answer. `hang`: the connection then stays open until the client closes it.
    fn serve(answer: Vec<u8>, hang: bool) -> Endpoint {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(&answer);
            while hang && stream.read(&mut request).is_ok_and(|n| n > 0) {}
        });
        Endpoint::parse(&format!("http://127.0.0.1:{port}/metrics")).unwrap()
    }

    #[test]
    fn answers_with_a_length_in_chunks_and_until_the_end() {
        for answer in [
            "HTTP/1.0 200 OK\r\nA: b\r\n\r\nloss 1\n",
            "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nloss 1\n",
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nloss \r\n2\r\n1\n\r\n0\r\n\r\n",
        ] {
            assert_eq!(serve(answer.into(), false).fetch().unwrap(), b"loss 1\n", "{answer}");
        }
    }

    #[test]
    fn fetching_ends_whatever_the_server_does() {
        let status = |answer: &str| match serve(answer.into(), false).fetch() {
            Err(FetchError::Status { status, .. }) => status,
            other => panic!("{other:?}"),
        };
        assert_eq!(status("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), 404);
        let redirect = "HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n";
        assert_eq!(status(redirect), 302, "a redirect is not followed");
        assert!(matches!(serve(b"nonsense".to_vec(), false).fetch(), Err(FetchError::Failed { .. })));
        let large = [b"HTTP/1.0 200 OK\r\n\r\n".to_vec(), vec![b'x'; MAX_BODY as usize + 100]].concat();
        assert!(matches!(serve(large, false).fetch(), Err(FetchError::TooLarge { .. })));
        let endless = [b"HTTP/1.0 200 OK\r\nA: ".to_vec(), vec![b'x'; 4 << 20]].concat();
        assert!(matches!(serve(endless, false).fetch(), Err(FetchError::Failed { .. })), "headers are bounded too");
        // Without a deadline this would wait for ever.
        let silent = serve(b"HTTP/1.0 200 OK\r\n\r\nloss".to_vec(), true).fetch();
        assert!(matches!(silent, Err(FetchError::Failed { .. })), "{silent:?}");
    }
}
