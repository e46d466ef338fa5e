//! How other threads reach the driver: tasks, answers, events.
//!
//! A *task* is a closure over the driver. The [`Inbox`] hands tasks out in rounds that are bounded
//! in number and time, so that no number of clients keeps the driver from its lease, its decisions
//! and its files.

use super::Driver;
use crate::error::Refusal;
use crate::pulse::Sentinel;
use crate::types::{ErrorCode, Event};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tokio::sync::{broadcast, oneshot, watch as tokio_watch};

/// Tasks of one round. The time is a small part of the shortest lease (3 s), and long beside one commit.
const MAX_TASKS_PER_ROUND: usize = 256;
const MAX_ROUND: Duration = Duration::from_millis(20);

/// Events that a slow reader may lag behind before it misses some.
const EVENT_BACKLOG: usize = 1024;

type Task = Box<dyn FnOnce(&mut Driver) + Send>;

/// The other threads' side.
#[derive(Clone)]
pub(crate) struct DriverHandle {
    tasks: mpsc::Sender<Task>,
    wake: Arc<EventFd>,
    events: broadcast::Sender<Arc<Event>>,
    changes: tokio_watch::Receiver<u64>,
}

impl DriverHandle {
    /// Runs `question` on the driver's thread and waits for its answer.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Driver) -> T + Send + 'static,
    ) -> Result<T, Refusal> {
        self.ask_later(move |driver, reply| drop(reply.send(question(driver)))).await
    }

    /// [`DriverHandle::ask`] for a question whose answer is sent later than its task ends.
    pub(crate) async fn ask_later<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Driver, oneshot::Sender<T>) + Send + 'static,
    ) -> Result<T, Refusal> {
        let (reply, answer) = oneshot::channel();
        let ended = || Refusal::new(ErrorCode::ShuttingDown, "the daemon is shutting down: try again when it is back");
        self.tasks.send(Box::new(move |driver| question(driver, reply))).map_err(|_| ended())?;
        let _ = self.wake.write(1);
        answer.await.map_err(|_| ended())
    }

    /// Sends a task without waiting for it.
    pub(crate) fn send(&self, task: impl FnOnce(&mut Driver) + Send + 'static) {
        if self.tasks.send(Box::new(task)).is_ok() {
            let _ = self.wake.write(1);
        }
    }

    /// Does `work`, which may block, on a thread of its own; `then` runs on the driver's thread
    /// with the result. A panic in `work` ends the daemon, because the driver would wait for the
    /// result for ever. A machine without threads to spare is a failure of the daemon, too.
    pub(crate) fn off_thread<T: Send + 'static>(
        &self,
        name: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
        then: impl FnOnce(&mut Driver, T) + Send + 'static,
    ) {
        let handle = self.clone();
        let run = move || {
            let sentinel = handle.sentinel(name);
            let result = work();
            handle.send(move |driver| then(driver, result));
            sentinel.disarm();
        };
        if let Err(e) = std::thread::Builder::new().name(name.into()).stack_size(512 << 10).spawn(run) {
            tracing::error!("cannot start the thread {name}: {e}");
            self.send(move |driver| driver.part_ended(name));
        }
    }

    /// Ends the daemon with an error when it is dropped armed.
    pub(crate) fn sentinel(&self, part: &'static str) -> Sentinel<impl FnOnce() + Send + use<>> {
        let handle = self.clone();
        Sentinel::new(move || handle.send(move |driver| driver.part_ended(part)))
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<Arc<Event>> {
        self.events.subscribe()
    }

    /// Counts changes of the jobs' states, for long polls.
    pub(crate) fn changes(&self) -> tokio_watch::Receiver<u64> {
        self.changes.clone()
    }
}

/// The driver's side.
pub(super) struct Inbox {
    tasks: mpsc::Receiver<Task>,
    wake: Arc<EventFd>,
    events: broadcast::Sender<Arc<Event>>,
    changes: tokio_watch::Sender<u64>,
    /// The last round left tasks behind.
    has_more: bool,
}

/// The tasks of one round.
pub(super) struct Round {
    begun: Instant,
    left: usize,
}

impl Inbox {
    pub(super) fn new() -> std::io::Result<(Inbox, DriverHandle)> {
        let wake = EventFd::from_value_and_flags(0, EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC)?;
        let wake = Arc::new(wake);
        let (sender, tasks) = mpsc::channel();
        let (events, _) = broadcast::channel(EVENT_BACKLOG);
        let (changes, changed) = tokio_watch::channel(0);
        let handle = DriverHandle { tasks: sender, wake: wake.clone(), events: events.clone(), changes: changed };
        Ok((Inbox { tasks, wake, events, changes, has_more: false }, handle))
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    pub(super) fn clear_wake(&self) {
        let _ = self.wake.read();
    }

    pub(super) fn has_more(&self) -> bool {
        self.has_more
    }

    pub(super) fn begin_round(&mut self) -> Round {
        self.has_more = false;
        Round { begun: Instant::now(), left: MAX_TASKS_PER_ROUND }
    }

    /// The next task of the round; at least one task runs in each round.
    pub(super) fn next(&mut self, round: &mut Round) -> Option<Task> {
        let is_first = round.left == MAX_TASKS_PER_ROUND;
        if !is_first && (round.left == 0 || round.begun.elapsed() >= MAX_ROUND) {
            self.has_more = true;
            return None;
        }
        round.left -= 1;
        self.tasks.try_recv().ok()
    }

    pub(super) fn has_listeners(&self) -> bool {
        self.events.receiver_count() > 0
    }

    pub(super) fn emit(&self, event: Event) {
        // An event without a listener is dropped.
        let _ = self.events.send(Arc::new(event));
    }

    pub(super) fn count_change(&self) {
        self.changes.send_modify(|n| *n += 1);
    }
}
