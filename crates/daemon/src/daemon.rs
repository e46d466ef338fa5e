//! Puts the pieces together: one daemon for each runtime directory, from start to end.

use crate::api::{Api, Token, serve};
use crate::config::{DaemonConfig, Listen};
use crate::driver::{Driver, DriverHandle};
use crate::error::DaemonError;
use crate::journal::Journal;
use crate::metrics::Metrics;
use crate::paths::Paths;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long answers may take once the driver has ended.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// Where a daemon can be reached, once it can.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ready {
    pub socket: PathBuf,
    pub listen: Option<SocketAddr>,
    pub pid: u32,
    pub live_jobs: usize,
}

/// Runs a daemon until it is told to end (`POST /v1/shutdown`, SIGTERM, SIGINT, idleness). `ready` is called as soon as it answers.
pub fn run(config: DaemonConfig, ready: impl FnOnce(&Ready)) -> Result<(), DaemonError> {
    config.validate()?;
    let paths = config.paths();
    paths.create()?;
    let _lock = lock(&paths)?;
    let journal = Journal::open(&paths.journal())?;
    let metrics = Arc::new(Metrics::new());
    let token_path = paths.token();
    let token = Token::load_or_make(&token_path).map_err(|e| io("write", &token_path, e))?;
    let tcp = bind_tcp(&config, &paths)?;
    let listen = tcp.as_ref().and_then(|t| t.local_addr().ok());
    let (driver, handle) = Driver::open(config, paths.clone(), journal, metrics.clone(), listen, token.clone())?;
    let unix = bind_unix(&paths.socket())?;
    let live_jobs = driver.live_jobs();
    let api = Api { driver: handle.clone(), metrics, paths: paths.clone(), token };
    let (stop, stopped) = watch::channel(());
    let (runtime, server) = start_server(api, unix, tcp, stopped)?;
    ready(&Ready { socket: paths.socket(), listen, pid: std::process::id(), live_jobs });
    driver.run();
    drop(stop);
    // Whoever asked for the end shall have an answer; whoever only listens on shall not hold it up.
    let _ = runtime.block_on(async { tokio::time::timeout(LAST_WORDS, server).await });
    runtime.shutdown_background();
    let _ = std::fs::remove_file(paths.socket());
    Ok(())
}

/// How long a killed daemon may take to be gone.
const DYING: std::time::Duration = std::time::Duration::from_secs(2);

/// One daemon for each runtime directory: held until the process ends, however it ends.
fn lock(paths: &Paths) -> Result<File, DaemonError> {
    let path = paths.lock();
    let fail = |e| io("lock", &path, e);
    let mut file =
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path).map_err(fail)?;
    let began = std::time::Instant::now();
    let locked = loop {
        let locked = file.try_lock();
        let held = matches!(locked, Err(std::fs::TryLockError::WouldBlock));
        // A daemon that was killed holds its lock until the kernel has taken it apart, which a busy machine may put off; a daemon
        // that lives answers.
        let lives = || std::os::unix::net::UnixStream::connect(paths.socket()).is_ok();
        if !held || began.elapsed() > DYING || lives() {
            break locked;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    match locked {
        Ok(()) => {
            file.set_len(0).map_err(fail)?;
            writeln!(file, "{}", std::process::id()).map_err(fail)?;
            Ok(file)
        }
        Err(std::fs::TryLockError::WouldBlock) => {
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            let pid = if pid.trim().is_empty() { "unknown".into() } else { pid.trim().to_owned() };
            Err(DaemonError::AlreadyRunning { pid, socket: paths.socket().display().to_string() })
        }
        Err(std::fs::TryLockError::Error(e)) => Err(fail(e)),
    }
}

fn bind_unix(path: &Path) -> Result<UnixListener, DaemonError> {
    // We hold the lock, so whoever left it is gone.
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
    // Jobs of an earlier daemon push to its port: have it again, if it is free.
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
    runtime.spawn(end_on_signals(api.driver.clone()));
    let server = runtime.spawn(serve(api, unix, tcp, stopped));
    Ok((runtime, server))
}

async fn end_on_signals(driver: DriverHandle) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut terminate), Ok(mut interrupt)) = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        return tracing::warn!("signals cannot be caught: end the daemon with `gainshare down`");
    };
    loop {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        driver.tell(|d| d.shut_down(Default::default()));
    }
}

fn io(action: &'static str, path: &Path, source: std::io::Error) -> DaemonError {
    DaemonError::Io { action, path: path.display().to_string(), source }
}
