//! Puts the parts of one daemon together, from start to end.
//!
//! Every long-lived thread and task is watched: if one ends that was not asked to, the driver puts
//! the limits back and the daemon ends with an error. The next command, or a service manager,
//! starts it again.

use crate::api::{Api, serve};
use crate::config::{DaemonConfig, Listen};
use crate::driver::{Driver, DriverHandle};
use crate::error::DaemonError;
use crate::fail;
use crate::instance::Instance;
use crate::journal::Journal;
use crate::launch::raise_open_files;
use crate::metrics::Metrics;
use crate::paths::Paths;
use crate::pulse::{Pulse, Pulses};
use crate::token::Token;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long answers may take once the driver has ended.
const LAST_ANSWERS: Duration = Duration::from_millis(500);

/// Where a daemon can be reached, once it can.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    pub socket: PathBuf,
    pub listen: Option<SocketAddr>,
    pub pid: u32,
    pub live_jobs: usize,
}

/// Runs a daemon until it is asked to end (`POST /v1/shutdown`, SIGTERM, SIGINT, idleness). `ready`
/// is called as soon as it answers.
pub fn run(config: DaemonConfig, ready: impl FnOnce(&Ready)) -> Result<(), DaemonError> {
    config.validate()?;
    fail::watch_limits();
    raise_open_files();
    let paths = config.paths();
    paths.create()?;
    let _instance = Instance::acquire(&paths)?;
    let journal = Journal::open(&paths.journal())?;
    let (metrics, pulses) = (Arc::new(Metrics::new()), Pulses::default());
    let token_path = paths.token();
    let token = Token::load_or_make(&token_path).map_err(|e| io("write", &token_path, e))?;
    let tcp = bind_tcp(&config, &paths)?;
    let listen = tcp.as_ref().and_then(|t| t.local_addr().ok());
    let (driver, handle) =
        Driver::open(config, paths.clone(), journal, metrics.clone(), pulses.clone(), listen, token.clone())?;
    let unix = bind_unix(&paths.socket())?;
    let live_jobs = driver.picture().live_jobs();
    let api = Api { driver: handle, metrics, pulses, paths: paths.clone(), token };
    let (stop, stopped) = watch::channel(());
    let (runtime, server) = start_server(api, unix, tcp, stopped)?;
    ready(&Ready { socket: paths.socket(), listen, pid: std::process::id(), live_jobs });
    let ended = driver.run();
    drop(stop);
    // The client that asked for the end gets an answer; a client that only reads events does not delay the end.
    let _ = runtime.block_on(async { tokio::time::timeout(LAST_ANSWERS, server).await });
    runtime.shutdown_background();
    let _ = std::fs::remove_file(paths.socket());
    ended
}

fn bind_unix(path: &Path) -> Result<UnixListener, DaemonError> {
    // This daemon holds the lock, so the daemon that left the socket is gone.
    let _ = std::fs::remove_file(path);
    let fail = |e| io("listen on", path, e);
    let listener = UnixListener::bind(path).map_err(fail)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    Ok(listener)
}

fn bind_tcp(config: &DaemonConfig, paths: &Paths) -> Result<Option<std::net::TcpListener>, DaemonError> {
    let path = paths.address();
    let Listen::Loopback(address) = config.listen else {
        let _ = std::fs::remove_file(&path);
        return Ok(None);
    };
    // Jobs of an earlier daemon push to its port: it is used again, if it is free.
    let earlier = std::fs::read_to_string(&path).ok().and_then(|t| t.trim().parse::<SocketAddr>().ok());
    let earlier = earlier.filter(|e| address.port() == 0 && e.ip() == address.ip());
    let listener = earlier.and_then(|e| std::net::TcpListener::bind(e).ok());
    let fail = |e| DaemonError::Io { action: "listen on", path: address.to_string(), source: e };
    let listener = listener.map_or_else(|| std::net::TcpListener::bind(address), Ok).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    let bound = listener.local_addr().map_err(fail)?;
    std::fs::write(&path, format!("{bound}\n")).map_err(|e| io("write", &path, e))?;
    Ok(Some(listener))
}

/// HTTP needs little: one thread beside the driver's.
fn start_server(
    api: Api,
    unix: UnixListener,
    tcp: Option<std::net::TcpListener>,
    stopped: watch::Receiver<()>,
) -> Result<(Runtime, JoinHandle<()>), DaemonError> {
    let fail = |e| DaemonError::Io { action: "start", path: "the HTTP server".into(), source: e };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(4)
        .thread_name("api")
        .enable_all()
        .build()
        .map_err(fail)?;
    let (unix, tcp) = {
        let _inside = runtime.enter();
        let unix = tokio::net::UnixListener::from_std(unix).map_err(fail)?;
        (unix, tcp.map(tokio::net::TcpListener::from_std).transpose().map_err(fail)?)
    };
    let (driver, pulse) = (api.driver.clone(), api.pulses.register("signals"));
    let sentinel = driver.sentinel("the handler of signals");
    runtime.spawn(async move {
        end_on_signals(driver, pulse).await;
        drop(sentinel);
    });
    let sentinel = api.driver.sentinel("the HTTP server");
    let server = runtime.spawn(async move {
        let is_stopping = stopped.clone();
        serve(api, unix, tcp, stopped).await;
        // The sender is dropped when the driver has ended.
        if is_stopping.has_changed().is_err() { sentinel.disarm() } else { drop(sentinel) }
    });
    Ok((runtime, server))
}

/// Also shows once a second that tasks of the server's thread are run.
async fn end_on_signals(driver: DriverHandle, pulse: Pulse) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return tracing::error!("signals cannot be caught");
    };
    let mut pace = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            _ = pace.tick() => {
                pulse.beat();
                if fail::ends_part("signals") {
                    return;
                }
                continue;
            }
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        driver.send(|d| d.shut_down(Default::default()));
    }
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> DaemonError {
    DaemonError::Io { action, path: path.display().to_string(), source }
}
