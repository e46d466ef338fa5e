//! Tasks that must not end, and whether each of them still makes progress.
//!
//! **Problem.** A task that panics ends silently, and the process goes on without it: the lease is renewed, the
//! probes answer, and no training job is worked on any more. A task can also hang, in a lock or in a request
//! without an end.
//!
//! **How.** [`Tasks`] spawns tasks under a name and joins them: [`Tasks::ended`] resolves as soon as one has
//! ended, and the process then ends with an error, so that the kubelet restarts it and a standby takes over.
//! Every task is wrapped so that each poll of it leaves two stamps on a [`Pulse`], at its start and at its end.
//! [`Health::stalled`] names the tasks whose poll does not return (a thread is blocked) or that were not polled
//! for long (a request or a wait never ends).
//!
//! **Terms.** *Poll*: one run of a task between two of its waits. Every loop of the operator waits for at most
//! ten seconds, or for a request that the client gives up after [`QUIET_AFTER`] at the latest, so a healthy
//! loop is polled within that time.

use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};
use tokio::task::{Id, JoinSet};

/// A poll takes milliseconds. One that takes this long is blocked.
const BLOCKED_AFTER: Duration = Duration::from_secs(30);

/// The Kubernetes client gives up a silent request after 295 s; a task that waits longer waits in vain.
pub(crate) const QUIET_AFTER: Duration = Duration::from_secs(330);

/// What the tasks of the process leave behind at each poll.
#[derive(Debug)]
pub(crate) struct Health {
    /// Stamps count milliseconds from here.
    origin: Instant,
    tasks: Mutex<Pulses>,
}

#[derive(Debug, Default)]
struct Pulses {
    next: u64,
    by_number: BTreeMap<u64, Arc<Pulse>>,
}

/// The stamps of one task, in milliseconds since the origin.
#[derive(Debug)]
struct Pulse {
    name: String,
    quiet_after: Duration,
    /// When the present poll began, plus one; 0 between two polls.
    poll_began_ms: AtomicU64,
    /// When the last poll ended.
    poll_ended_ms: AtomicU64,
}

impl Health {
    pub(crate) fn new() -> Arc<Health> {
        Arc::new(Health { origin: Instant::now(), tasks: Mutex::default() })
    }

    fn ms(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.origin).as_millis() as u64
    }

    fn register(&self, name: String, quiet_after: Duration, now: Instant) -> (u64, Arc<Pulse>) {
        let pulse = Arc::new(Pulse {
            name,
            quiet_after,
            poll_began_ms: AtomicU64::new(0),
            poll_ended_ms: AtomicU64::new(self.ms(now)),
        });
        let mut tasks = self.tasks.lock();
        tasks.next += 1;
        let number = tasks.next;
        tasks.by_number.insert(number, pulse.clone());
        (number, pulse)
    }

    fn forget(&self, number: u64) {
        self.tasks.lock().by_number.remove(&number);
    }

    /// The names of the tasks that make no progress.
    pub(crate) fn stalled(&self, now: Instant) -> Vec<String> {
        let now_ms = self.ms(now);
        let is_stalled = |pulse: &Pulse| {
            let began_ms = pulse.poll_began_ms.load(Ordering::Relaxed);
            let since_ms = |ms: u64| Duration::from_millis(now_ms.saturating_sub(ms));
            match began_ms {
                0 => since_ms(pulse.poll_ended_ms.load(Ordering::Relaxed)) > pulse.quiet_after,
                began_ms => since_ms(began_ms - 1) > BLOCKED_AFTER,
            }
        };
        let tasks = self.tasks.lock();
        tasks.by_number.values().filter(|pulse| is_stalled(pulse)).map(|pulse| pulse.name.clone()).collect()
    }
}

/// A task that stamps its pulse at each poll.
struct MonitoredTask<F> {
    future: Pin<Box<F>>,
    number: u64,
    pulse: Arc<Pulse>,
    health: Arc<Health>,
}

impl<F: Future<Output = ()>> Future for MonitoredTask<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let began_ms = self.health.ms(Instant::now());
        self.pulse.poll_began_ms.store(began_ms.saturating_add(1), Ordering::Relaxed);
        let result = self.future.as_mut().poll(context);
        self.pulse.poll_ended_ms.store(self.health.ms(Instant::now()), Ordering::Relaxed);
        self.pulse.poll_began_ms.store(0, Ordering::Relaxed);
        result
    }
}

impl<F> Drop for MonitoredTask<F> {
    fn drop(&mut self) {
        self.health.forget(self.number);
    }
}

/// Named tasks that run until the set is dropped.
pub(crate) struct Tasks {
    set: JoinSet<()>,
    names: HashMap<Id, String>,
    health: Arc<Health>,
}

impl Tasks {
    pub(crate) fn new(health: Arc<Health>) -> Tasks {
        Tasks { set: JoinSet::new(), names: HashMap::new(), health }
    }

    /// Spawns a task that is polled at least every [`QUIET_AFTER`].
    pub(crate) fn spawn(&mut self, name: impl Into<String>, task: impl Future<Output = ()> + Send + 'static) {
        self.spawn_within(name, QUIET_AFTER, task);
    }

    /// Spawns a task that counts as stalled when it was not polled for `quiet_after`.
    pub(crate) fn spawn_within(
        &mut self,
        name: impl Into<String>,
        quiet_after: Duration,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let name = name.into();
        let (number, pulse) = self.health.register(name.clone(), quiet_after, Instant::now());
        let stamped = MonitoredTask { future: Box::pin(task), number, pulse, health: self.health.clone() };
        let id = self.set.spawn(stamped).id();
        self.names.insert(id, name);
    }

    /// Resolves when a task has ended, with its name and how it ended. Without tasks it never resolves.
    pub(crate) async fn ended(&mut self) -> String {
        let (id, how) = match self.set.join_next_with_id().await {
            None => return std::future::pending().await,
            Some(Ok((id, ()))) => (id, "returned".to_owned()),
            Some(Err(error)) => (error.id(), describe(error)),
        };
        let name = self.names.remove(&id).unwrap_or_else(|| "an unnamed task".to_owned());
        format!("{name} {how}")
    }

    /// Waits until every task has ended by itself, for at most `longest`; tasks that are left are stopped.
    pub(crate) async fn finish(mut self, longest: Duration) {
        let all = async { while self.set.join_next().await.is_some() {} };
        let _ = tokio::time::timeout(longest, all).await;
    }
}

fn describe(error: tokio::task::JoinError) -> String {
    let Ok(panic) = error.try_into_panic() else { return "was stopped".to_owned() };
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.map_or_else(|| "panicked".to_owned(), |text| format!("panicked: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_task_that_panics_or_returns_is_named() {
        let mut tasks = Tasks::new(Health::new());
        tasks.spawn("the loop that waits", std::future::pending());
        tasks.spawn("the watch of pods", async { panic!("overflow") });
        assert_eq!(tasks.ended().await, "the watch of pods panicked: overflow");
        tasks.spawn("the decision", async {});
        assert_eq!(tasks.ended().await, "the decision returned");
    }

    #[tokio::test]
    async fn a_task_that_is_not_polled_is_stalled_until_it_is_dropped() {
        let health = Health::new();
        let mut tasks = Tasks::new(health.clone());
        tasks.spawn("patient", std::future::pending());
        tasks.spawn_within("strict", Duration::from_secs(60), std::future::pending());
        tokio::task::yield_now().await;
        let now = Instant::now();
        assert!(health.stalled(now).is_empty());
        assert_eq!(health.stalled(now + Duration::from_secs(100)), ["strict"]);
        assert_eq!(health.stalled(now + QUIET_AFTER * 2), ["patient", "strict"]);
        drop(tasks);
        tokio::task::yield_now().await;
        assert!(health.stalled(now + QUIET_AFTER * 2).is_empty(), "tasks that were stopped are not missed");
    }

    #[test]
    fn a_poll_that_does_not_return_is_stalled_soon() {
        let health = Health::new();
        let mut now = Instant::now() + Duration::from_secs(5);
        let (number, pulse) = health.register("blocked".to_owned(), QUIET_AFTER, now);
        pulse.poll_began_ms.store(health.ms(now) + 1, Ordering::Relaxed);
        now += BLOCKED_AFTER / 2;
        assert!(health.stalled(now).is_empty());
        now += BLOCKED_AFTER;
        assert_eq!(health.stalled(now), ["blocked"]);
        health.forget(number);
        assert!(health.stalled(now).is_empty());
    }
}
