//! Progress from a Prometheus endpoint of the job.
//!
//! **Parsing** is by hand: the text format is one sample a line, and what jobs serve in practice (Python's client, hand-written handlers) often
//! breaks the rules that a strict parser insists on: missing types, no end mark, mixed versions. A line that is no sample is passed over; the
//! rest counts. Histogram buckets are left out. A gauge whose name says step gives the step.
//!
//! **Fetching** is a plain `GET` over the standard library's socket, one version of HTTP that never answers in chunks, with a
//! deadline and a size limit: an HTTP library would bring more code than this whole module for one request to this very machine. It
//! blocks for at most [`TIMEOUT`] and belongs on a thread of the driver's. Only loopback addresses are spoken to, so that a job file cannot
//! make the daemon knock at other machines.

use super::number::{self, Number};
use super::{Batch, Counters, MAX_NAME, Progress, Reading, Unit};
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// The longest a fetch may take in all.
pub const TIMEOUT: Duration = Duration::from_secs(1);

/// The largest answer read; a busy server's is some 100 kB.
const MAX_BODY: usize = 2 << 20;

/// Samples taken from one answer.
const MAX_SAMPLES: usize = 4096;

/// Where to ask: an address of this machine and a path.
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

/// Why nothing came.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    #[error("http://{address}{path} cannot be read: {source}; does the job serve its metrics there?")]
    Io { address: SocketAddr, path: String, source: std::io::Error },
    #[error("http://{address}{path} answered {status:?} instead of 200; check the path")]
    Status { address: SocketAddr, path: String, status: String },
    #[error("http://{address}{path} answered with more than {MAX_BODY} bytes; serve fewer metrics")]
    TooLarge { address: SocketAddr, path: String },
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
        let (address, path) = (self.address, || self.path.clone());
        let answer = self.exchange().map_err(|source| FetchError::Io { address, path: path(), source })?;
        if answer.len() > MAX_BODY {
            return Err(FetchError::TooLarge { address, path: path() });
        }
        let head = answer.windows(4).position(|w| w == b"\r\n\r\n");
        let status =
            answer.split(|&b| b == b'\r').next().map(|l| String::from_utf8_lossy(&l[..l.len().min(80)]).into_owned());
        let status = status.unwrap_or_default();
        match head {
            Some(head) if status.starts_with("HTTP/1.") && status.split(' ').nth(1) == Some("200") => {
                Ok(answer[head + 4..].to_vec())
            }
            _ => Err(FetchError::Status { address, path: path(), status }),
        }
    }

    fn exchange(&self) -> std::io::Result<Vec<u8>> {
        let until = Instant::now() + TIMEOUT;
        let left = || -> std::io::Result<Duration> {
            let left = until.saturating_duration_since(Instant::now());
            // A timeout of zero would mean none at all.
            if left.is_zero() { Err(std::io::ErrorKind::TimedOut.into()) } else { Ok(left) }
        };
        let mut stream = TcpStream::connect_timeout(&self.address, TIMEOUT)?;
        stream.set_write_timeout(Some(left()?))?;
        let accept = "text/plain;version=0.0.4";
        let request = format!(
            "GET {} HTTP/1.0\r\nHost: {}\r\nAccept: {accept}\r\nConnection: close\r\n\r\n",
            self.path, self.address
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        let mut buffer = vec![0; 64 << 10];
        loop {
            stream.set_read_timeout(Some(left()?))?;
            match stream.read(&mut buffer)? {
                0 => return Ok(answer),
                n => answer.extend_from_slice(&buffer[..n]),
            }
            if answer.len() > MAX_BODY {
                return Ok(answer);
            }
        }
    }
}

/// Reads an answer. A metric with labels is called by its name alone if it is the first of that name, and `name{labels}` otherwise.
pub fn parse(body: &[u8], counters: &mut Counters) -> Batch {
    let mut batch = Batch::default();
    let mut names = std::collections::BTreeSet::new();
    let mut step = None;
    for line in body.split(|&b| b == b'\n') {
        let Some((name, labels, value)) = std::str::from_utf8(line).ok().and_then(sample) else { continue };
        if batch.readings.len() >= MAX_SAMPLES {
            counters.dropped_readings += 1;
            continue;
        }
        let value = match value {
            Number::Good(value) => value,
            Number::Bad => {
                counters.bad_values += 1;
                continue;
            }
        };
        let place = ["step", "steps", "iteration", "iterations"]
            .iter()
            .any(|w| name.strip_suffix("_total").unwrap_or(name).ends_with(w));
        if place && value >= 0.0 && value.fract() == 0.0 && value < 1e15 {
            step = step.or(Some(value as u64));
            continue;
        }
        let metric = if names.insert(name) || labels.is_empty() { name.to_string() } else { format!("{name}{labels}") };
        batch.readings.push(Reading { metric, value, step: None, total: None });
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

    /// Serves one answer and then whatever `tail` does with the connection.
    fn serve(answer: Vec<u8>, hang: bool) -> Endpoint {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = stream.read(&mut request);
            let _ = stream.write_all(&answer);
            if hang {
                let _ = stream.read(&mut request);
                std::thread::sleep(TIMEOUT * 3);
            }
        });
        Endpoint::parse(&format!("http://127.0.0.1:{port}/metrics")).unwrap()
    }

    #[test]
    fn fetching_ends_whatever_the_server_does() {
        assert_eq!(serve(b"HTTP/1.0 200 OK\r\nA: b\r\n\r\nloss 1\n".to_vec(), false).fetch().unwrap(), b"loss 1\n");
        assert!(matches!(
            serve(b"HTTP/1.1 404 Not Found\r\n\r\n".to_vec(), false).fetch(),
            Err(FetchError::Status { .. })
        ));
        assert!(matches!(serve(b"nonsense".to_vec(), false).fetch(), Err(FetchError::Status { .. })));
        assert!(matches!(serve(vec![b'x'; MAX_BODY + 100], false).fetch(), Err(FetchError::TooLarge { .. })));
        let start = Instant::now();
        assert!(matches!(serve(b"HTTP/1.0 200 OK\r\n\r\nloss".to_vec(), true).fetch(), Err(FetchError::Io { .. })));
        assert!(start.elapsed() < TIMEOUT * 3);
    }
}
