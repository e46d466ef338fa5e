//! What the handlers of the API need.

use crate::driver::{Driver, DriverHandle};
use crate::error::Refusal;
use crate::metrics::Metrics;
use crate::paths::Paths;
use crate::pulse::Pulses;
use crate::token::Token;
use axum::body::Bytes;
use gainshare_core::model::JobId;
use std::sync::Arc;
use tokio::sync::oneshot;

#[derive(Clone)]
pub(crate) struct Api {
    pub(crate) driver: DriverHandle,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) pulses: Pulses,
    pub(crate) paths: Paths,
    pub(crate) token: Token,
}

impl Api {
    /// A job reports by itself; answered when the report is on disk.
    pub(super) async fn push(&self, job: String, body: Bytes) -> Result<(), Refusal> {
        let push = move |driver: &mut Driver, reply: oneshot::Sender<_>| match driver.find(&job) {
            Ok(id) => driver.push(id, &body, reply),
            Err(e) => drop(reply.send(Err(e))),
        };
        self.driver.ask_later(push).await?
    }

    /// Finds the job and asks about it on the driver's thread.
    pub(super) async fn about<T: Send + 'static>(
        &self,
        job: String,
        question: impl FnOnce(&mut Driver, JobId) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.driver.ask(move |d| d.find(&job).and_then(|id| question(d, id))).await?
    }
}
