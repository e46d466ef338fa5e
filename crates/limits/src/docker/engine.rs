//! The connection to a Docker engine: connect, send requests, and turn errors into one line with a remedy.
//!
//! The engine's client library is asynchronous while runtimes are called from a plain thread, so an
//! [`Engine`] owns a tokio runtime with one background thread (for event and log followers) and its methods
//! block. They must not be called from asynchronous code. Clones share the connection and the background
//! thread. A driver that must not wait uses the `request_…` methods, which pass the answer to a callback on
//! the background thread.
//!
//! **Properties.** Every request is its own connection to the socket, so an engine that restarts needs no
//! reconnecting here. No request waits longer than [`REQUEST_TIMEOUT`], so a hung engine cannot hang the
//! caller for longer.

use crate::RuntimeError;
use crate::cpus::MAX_CPUS;
use bollard::Docker;
use bollard::errors::Error;
use bollard::models::{ContainerInspectResponse, SystemInfoCgroupVersionEnum};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long one ordinary request may take. The engine answers in milliseconds; five seconds is a machine under heavy
/// load.
pub(super) const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// A Docker engine on this machine.
#[derive(Clone)]
pub struct Engine {
    pub(super) docker: Docker,
    pub(super) socket: String,
    background: Arc<Background>,
}

/// A tokio runtime that may be dropped anywhere. The plain one panics when dropped inside asynchronous code.
struct Background(Option<tokio::runtime::Runtime>);

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// What the engine reports about its machine.
#[derive(Debug, Clone)]
pub(super) struct EngineInfo {
    pub(super) cores: u32,
    pub(super) memory_bytes: u64,
    pub(super) cgroup_v2: bool,
    /// The engine's clock, in nanoseconds since 1970.
    pub(super) now_ns: u64,
}

/// The socket a Docker user expects: `DOCKER_HOST` if it names a Unix socket, a rootless engine's socket if there is
/// one, else the system's engine.
pub fn default_socket() -> PathBuf {
    if let Some(path) = std::env::var("DOCKER_HOST").ok().as_deref().and_then(|host| host.strip_prefix("unix://")) {
        return PathBuf::from(path);
    }
    let rootless = std::env::var_os("XDG_RUNTIME_DIR").map(|dir| Path::new(&dir).join("docker.sock"));
    match rootless {
        Some(path) if path.exists() => path,
        _ => PathBuf::from("/var/run/docker.sock"),
    }
}

impl Engine {
    /// Connects and agrees on an API version. Fails if no engine answers.
    pub fn connect(socket: &Path) -> Result<Engine, RuntimeError> {
        let socket = socket.display().to_string();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("gainshare-docker")
            .enable_all()
            .build()
            .map_err(|source| RuntimeError::Io {
                action: "start a thread for",
                path: socket.clone(),
                source,
                hint: "",
            })?;
        // The library reports a missing socket, but not a forbidden one or one without a listener: opening it
        // once tells all three apart.
        if let Err(source) = std::os::unix::net::UnixStream::connect(&socket) {
            return Err(no_engine(&socket, source));
        }
        let docker = runtime.block_on(async {
            Docker::connect_with_unix(&socket, REQUEST_TIMEOUT.as_secs(), bollard::API_DEFAULT_VERSION)?
                .negotiate_version()
                .await
        });
        let docker = docker.map_err(|error| failed(&socket, "connect to the engine", error))?;
        Ok(Engine { docker, socket, background: Arc::new(Background(Some(runtime))) })
    }

    fn runtime(&self) -> &tokio::runtime::Runtime {
        self.background.0.as_ref().expect("taken only when the last clone is dropped")
    }

    /// Runs `work` on the calling thread until it is done.
    pub(super) fn wait<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime().block_on(work)
    }

    /// Runs `work` on the background thread.
    pub(super) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime().spawn(work);
    }

    pub(super) async fn info(&self) -> Result<EngineInfo, RuntimeError> {
        let info = self.docker.info().await.map_err(|e| failed(&self.socket, "ask the engine about itself", e))?;
        Ok(EngineInfo {
            cores: info.ncpu.and_then(|n| u32::try_from(n).ok()).unwrap_or(1).clamp(1, MAX_CPUS),
            memory_bytes: info.mem_total.and_then(|n| u64::try_from(n).ok()).unwrap_or(0),
            cgroup_v2: info.cgroup_version == Some(SystemInfoCgroupVersionEnum::_2),
            now_ns: info.system_time.as_deref().and_then(parse_time_ns).unwrap_or(0),
        })
    }

    /// All the engine knows about a container, or `Gone`.
    pub(super) async fn inspect(&self, id: &str) -> Result<ContainerInspectResponse, RuntimeError> {
        // The id becomes part of the request's path, where a slash or a question mark would name another request.
        if !id.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b)) || id.is_empty() || id.starts_with('.')
        {
            return Err(RuntimeError::Gone { key: id.to_owned() });
        }
        match self.docker.inspect_container(id, None).await {
            Ok(found) => Ok(found),
            Err(error) if is_missing(&error) => Err(RuntimeError::Gone { key: id.to_owned() }),
            Err(error) => Err(failed(&self.socket, &format!("inspect container {}", short(id)), error)),
        }
    }
}

/// The first twelve characters of the id, as `docker ps` shows them.
pub(super) fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

/// The engine answered that there is no such thing.
pub(super) fn is_missing(error: &Error) -> bool {
    matches!(error, Error::DockerResponseServerError { status_code: 404, .. })
}

fn no_engine(socket: &str, source: std::io::Error) -> RuntimeError {
    let (what, remedy) = match source.kind() {
        std::io::ErrorKind::PermissionDenied => (
            format!("this user may not open {socket}"),
            "Join the group `docker` (`sudo usermod -aG docker $USER`, then log in again), or use a rootless engine",
        ),
        std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused => (
            format!("no engine answers at {socket}"),
            "Start it (`sudo systemctl start docker`), or name another socket with --docker-socket or DOCKER_HOST",
        ),
        _ => (format!("cannot open {socket}: {source}"), "Check that it is the engine's socket"),
    };
    RuntimeError::Docker { what, remedy }
}

/// The library's error as one line that names what was tried.
pub(super) fn failed(socket: &str, tried: &str, error: Error) -> RuntimeError {
    match error {
        Error::DockerResponseServerError { status_code, message } => RuntimeError::Docker {
            what: format!("cannot {tried}: the engine answered ({status_code}) {}", one_line(&message)),
            remedy: "Read the engine's own log",
        },
        Error::RequestTimeoutError => hung(socket),
        Error::SocketNotFoundError(_) | Error::HyperLegacyError { .. } | Error::HyperResponseError { .. } => {
            RuntimeError::Docker {
                what: format!("cannot {tried}: no engine answers at {socket}"),
                remedy: "Start it (`sudo systemctl start docker`); containers keep their limits meanwhile",
            }
        }
        other => RuntimeError::Docker {
            what: format!("cannot {tried}: {}", one_line(&other.to_string())),
            remedy: "Read the engine's own log",
        },
    }
}

/// The engine accepts requests and does not answer them.
pub(super) fn hung(socket: &str) -> RuntimeError {
    RuntimeError::Docker {
        what: format!("the engine at {socket} did not answer in {} s", REQUEST_TIMEOUT.as_secs()),
        remedy: "The next plan asks again; containers keep their limits meanwhile",
    }
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Nanoseconds since 1970 of a time as the engine writes it (RFC 3339 in UTC, up to nine decimals). `None` for the
/// engine's "never" in the year 1, for any other time before 1970 or after 2554, and for text that is no time: a job
/// can print text in the place of the engine's time stamp.
pub(super) fn parse_time_ns(text: &str) -> Option<u64> {
    let time: jiff::Timestamp = text.parse().ok().filter(|_| text.ends_with('Z'))?;
    u64::try_from(time.as_nanosecond()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_as_the_engine_writes_them() {
        assert_eq!(parse_time_ns("1970-01-01T00:00:00Z"), Some(0));
        assert_eq!(parse_time_ns("2000-02-29T12:00:00.5Z"), Some(951_825_600_500_000_000));
        assert_eq!(parse_time_ns("2026-11-15T16:39:02.044688274Z"), Some(1_794_760_742_044_688_274));
        for bad in [
            "0001-01-01T00:00:00Z",
            "",
            "Z",
            "2026-11-15",
            "2026-13-01T00:00:00Z",
            "2026-02-31T00:00:00Z",
            "2026-11-15T16:39:02.1234567890Z",
            "1970-1-1T9999999999999999:0:0Z",
            "1970-01-01T18446744073709551615:00:00Z",
            "1970-01-01T00:18446744073709551615:00Z",
            "1970-01-01T00:00:18446744073709551615Z",
            "1970-01-01T00:00:00:00Z",
            "9999-12-31T23:59:60.999999999Z",
            "é-ü",
        ] {
            assert_eq!(parse_time_ns(bad), None, "{bad}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "[0-9]{1,20}-[0-9]{1,20}-[0-9]{1,20}T[0-9]{1,20}:[0-9]{1,20}:[0-9]{1,20}(\\.[0-9]{0,12})?Z") {
            let _ = parse_time_ns(&text);
        }
    }

    #[test]
    fn an_engine_that_is_not_there_is_one_line_with_a_remedy() {
        let refuses = |socket: &Path, words: &[&str]| {
            let error = Engine::connect(socket).err().expect("no engine is there").to_string();
            assert!(error.contains(socket.to_str().unwrap()), "{error}");
            assert!(words.iter().all(|word| error.contains(word)) && !error.contains('\n'), "{error}");
        };
        refuses(Path::new("/nonexistent/docker.sock"), &["systemctl start docker", "--docker-socket"]);
        // An engine that was killed leaves its socket behind.
        let dir = tempfile::tempdir().unwrap();
        let stale = dir.path().join("stale.sock");
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        refuses(&stale, &["systemctl start docker"]);
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        refuses(&file, &["no engine answers"]);
        // Something else listens there, and hangs up.
        let other = dir.path().join("other.sock");
        let listener = std::os::unix::net::UnixListener::bind(&other).unwrap();
        std::thread::spawn(move || listener.incoming().for_each(drop));
        refuses(&other, &["no engine answers"]);

        let denied = no_engine("/run/x.sock", std::io::ErrorKind::PermissionDenied.into()).to_string();
        assert!(denied.contains("/run/x.sock") && denied.contains("usermod -aG docker"), "{denied}");
    }
}
