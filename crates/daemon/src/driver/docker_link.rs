//! The Docker runtime on a thread of its own.
//!
//! Any request to the engine may take seconds. The driver sends work to this thread and gets the
//! result back as a task, in the order in which the work was sent.

use super::{Driver, DriverHandle};
use crate::pulse::Pulse;
use gainshare_limits::docker::{DockerRuntime, Engine};
use gainshare_limits::{Capacity, Runtime};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

type Work = Box<dyn FnOnce(&mut DockerRuntime) + Send>;

/// How often the thread shows that it is alive while it has nothing to do.
const IDLE_PACE: Duration = Duration::from_secs(1);

pub(super) struct DockerLink {
    engine: Engine,
    capacity: Capacity,
    work: mpsc::Sender<Work>,
    handle: DriverHandle,
    /// Limits are being written; while they are, no more are sent.
    pub(super) is_applying: bool,
    /// The targets changed while limits were being written.
    pub(super) apply_again: bool,
    /// Counters are being read.
    pub(super) is_reading: bool,
}

impl DockerLink {
    pub(super) fn start(mut docker: DockerRuntime, handle: DriverHandle, pulse: Pulse) -> std::io::Result<DockerLink> {
        let (engine, capacity) = (docker.engine().clone(), docker.capacity());
        let (work, inbox) = mpsc::channel::<Work>();
        let sentinel = handle.sentinel("the thread of the Docker runtime");
        let run = move || {
            loop {
                match inbox.recv_timeout(IDLE_PACE) {
                    Ok(work) => work(&mut docker),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                pulse.beat();
            }
            sentinel.disarm();
        };
        std::thread::Builder::new().name("docker".into()).spawn(run)?;
        Ok(DockerLink { engine, capacity, work, handle, is_applying: false, apply_again: false, is_reading: false })
    }

    pub(super) fn capacity(&self) -> Capacity {
        self.capacity
    }

    pub(super) fn engine(&self) -> &Engine {
        &self.engine
    }

    pub(super) fn handle(&self) -> &DriverHandle {
        &self.handle
    }

    /// Does `work` on the runtime's thread; `then` runs on the driver's thread with the result.
    pub(super) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut DockerRuntime) -> T + Send + 'static,
        then: impl FnOnce(&mut Driver, T) + Send + 'static,
    ) {
        let handle = self.handle.clone();
        // A thread that has ended was reported by its sentinel.
        let _ = self.work.send(Box::new(move |docker| {
            let result = work(docker);
            handle.send(move |driver| then(driver, result));
        }));
    }

    /// Does `work` and waits for it; `None` if it took longer than `limit`. Only for the daemon's end.
    pub(super) fn run_within<T: Send + 'static>(
        &self,
        limit: Duration,
        work: impl FnOnce(&mut DockerRuntime) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, result) = mpsc::channel();
        self.work.send(Box::new(move |docker| drop(sender.send(work(docker))))).ok()?;
        result.recv_timeout(limit).ok()
    }
}
