//! The two listeners, and what holds for every request on them: limits on size, time and number,
//! and the check of [`auth`].

use super::auth::{self, ApiListener};
use super::context::Api;
use super::routes;
use crate::error::Refusal;
use crate::token::Token;
use crate::types::ErrorCode;
use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::serve::Listener;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Semaphore, watch};

/// A body larger than this is no request of ours; the largest is a thousand jobs with their environments.
const MAX_BODY_BYTES: usize = 8 << 20;

/// Longer than any long poll.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(35);

const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections at once on each listener.
const MAX_CONNECTIONS: usize = 512;

/// Serves until `stop` is sent or dropped, then lets answers that are under way finish.
pub(crate) async fn serve(api: Api, unix: UnixListener, tcp: Option<TcpListener>, stop: watch::Receiver<()>) {
    let router = |listener| {
        let guarded = middleware::from_fn_with_state((listener, api.token.clone()), guard);
        routes::router(api.clone()).layer(DefaultBodyLimit::max(MAX_BODY_BYTES)).layer(guarded)
    };
    let on_unix = accept(router(ApiListener::Unix), unix, stop.clone());
    match tcp.as_ref().map(TcpListener::local_addr) {
        Some(Ok(address)) => {
            let router = router(ApiListener::Tcp { address });
            let on_tcp = async {
                if let Some(tcp) = tcp {
                    accept(router, tcp, stop).await;
                }
            };
            tokio::join!(on_unix, on_tcp);
        }
        _ => on_unix.await,
    }
}

async fn accept<L: Listener>(router: Router, mut listener: L, mut stop: watch::Receiver<()>) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let connections = GracefulShutdown::new();
    while let Ok(permit) = room.clone().acquire_owned().await {
        // A listener that runs out of descriptors waits a moment by itself.
        let (stream, _) = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.changed() => break,
        };
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).max_buf_size(64 << 10);
        let service = TowerToHyperService::new(router.clone());
        let connection = connections.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            // A connection that breaks concerns the client only.
            let _ = connection.await;
            drop(permit);
        });
    }
    connections.shutdown().await;
}

async fn guard(State((listener, token)): State<(ApiListener, Token)>, request: Request, next: Next) -> Response {
    if let Err(refusal) = auth::check(listener, &token, request.uri().path(), request.headers()) {
        return refusal.into_response();
    }
    match tokio::time::timeout(REQUEST_TIMEOUT, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Refusal::new(ErrorCode::Timeout, "the daemon took too long: try again").into_response(),
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = axum::http::StatusCode::from_u16(self.code.status())
            .unwrap_or(axum::http::StatusCode::INTERNAL_SERVER_ERROR);
        (status, axum::Json(self.body())).into_response()
    }
}
