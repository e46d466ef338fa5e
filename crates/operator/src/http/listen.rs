//! The listeners: they accept connections, and bound what each may cost.
//!
//! **Properties.** The number of connections is bounded, in all and for each peer that has proven nothing
//! ([`super::peers`]). The TLS handshake and the headers have a time limit, and a connection without a request
//! is closed after it. Bodies are read by the handlers, with limits of their own. HTTP/1.1 only: its costs per
//! connection are easy to bound.

use super::peers::Peers;
use crate::state::metrics::Metrics;
use axum::{Extension, Router};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;

const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// For the headers of a request, and for the time between two requests.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// For one request's line and headers; a token has about a kilobyte.
const MOST_HEADER_BYTES: usize = 32 << 10;
/// The pause after an accept failed, most often for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long requests under way may take when the process ends.
const DRAIN: Duration = Duration::from_secs(5);

/// Serves until `ending` turns true; requests under way are then answered.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    tls: Option<TlsAcceptor>,
    peers: Arc<Peers>,
    metrics: Arc<Metrics>,
    mut ending: watch::Receiver<bool>,
) {
    let connections = GracefulShutdown::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = ending.wait_for(|ending| *ending) => break,
        };
        let (stream, address) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Some(slot) = peers.admit(address.ip(), Instant::now()) else {
            metrics.connections_refused.inc();
            continue;
        };
        let router = router.clone().layer(Extension(Arc::new(slot)));
        let (tls, watcher) = (tls.clone(), connections.watcher());
        tokio::spawn(async move {
            match tls {
                None => talk(stream, router, watcher).await,
                Some(tls) => {
                    // A handshake that fails or takes too long is the peer's mistake.
                    if let Ok(Ok(stream)) = tokio::time::timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await {
                        talk(stream, router, watcher).await;
                    }
                }
            }
        });
    }
    let _ = tokio::time::timeout(DRAIN, connections.shutdown()).await;
}

async fn talk(stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, router: Router, watcher: Watcher) {
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(MOST_HEADER_BYTES);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // A connection that breaks is the peer's affair.
    let _ = watcher.watch(connection).await;
}
