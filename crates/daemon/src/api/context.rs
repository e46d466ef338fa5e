//! What the handlers of the API need.

use crate::driver::{Driver, DriverHandle};
use crate::error::Refusal;
use crate::metrics::Metrics;
use crate::paths::Paths;
use crate::pulse::Pulses;
use crate::token::Token;
use crate::types::{ErrorCode, ExitReport, JobInfo, SubmitRequest};
use axum::body::Bytes;
use gainshare_core::model::JobId;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;

/// How long a submission may take. The disk of the journal is slow at times.
const CHECK_PATIENCE: Duration = Duration::from_secs(20);

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
        let push = move |driver: &mut Driver, reply: oneshot::Sender<_>| match driver.picture().find(&job) {
            Ok(id) => driver.follower().push(id, &body, reply),
            Err(e) => drop(reply.send(Err(e))),
        };
        self.driver.ask_later(push).await?
    }

    /// Submits jobs. A file system that does not answer is not waited for.
    pub(super) async fn submit(&self, request: SubmitRequest) -> Result<Vec<JobInfo>, Refusal> {
        let folders: BTreeSet<String> =
            request.jobs.iter().filter_map(|job| Some(job.cwd.as_ref()?.display().to_string())).collect();
        let submitted = self.driver.ask_later(|driver, reply| driver.submit_checked(request, reply));
        match tokio::time::timeout(CHECK_PATIENCE, submitted).await {
            Ok(answer) => answer?,
            Err(_) => {
                let list: Vec<String> = folders.into_iter().take(3).collect();
                let message = format!(
                    "the working directory ({}) or a folder of PATH does not answer: check the server of its file \
                     system, then submit again",
                    list.join(", ")
                );
                Err(Refusal::new(ErrorCode::Timeout, message))
            }
        }
    }

    /// A supervisor reports an end; answered when the end is recorded.
    pub(super) async fn exited(&self, job: String, exited: ExitReport) -> Result<JobInfo, Refusal> {
        let report = move |driver: &mut Driver, reply: oneshot::Sender<_>| match driver.picture().find(&job) {
            Ok(id) => driver.exited(id, &exited, reply),
            Err(e) => drop(reply.send(Err(e))),
        };
        self.driver.ask_later(report).await?
    }

    /// Finds the job and asks about it on the driver's thread.
    pub(super) async fn about<T: Send + 'static>(
        &self,
        job: String,
        question: impl FnOnce(&mut Driver, JobId) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<T, Refusal> {
        self.driver.ask(move |d| d.picture().find(&job).and_then(|id| question(d, id))).await?
    }
}
