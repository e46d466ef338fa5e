//! Which containers start and end.
//!
//! **Problem.** The engine reports starts, ends and memory kills on a stream that breaks when the engine
//! restarts, and events of the meantime are not repeated.
//!
//! **Approach.** One follower keeps the set of containers it has announced. Whenever it (re)connects it notes
//! the engine's time, subscribes from that time on, lists the running containers, and announces the
//! difference to its set; only then does it follow the stream. Events that were already covered by the list
//! are recognised by their time. A container that is restarted is announced as ended and appeared again.
//!
//! **Properties.** Containers that did not opt in are filtered out by the engine itself: they are neither listed nor
//! inspected. For each container `Appeared` and `Died` alternate, beginning with `Appeared`. A container that lived
//! only while the engine was not reachable may be missed altogether; none is ever reported twice.

use super::engine::{Engine, failed, parse_time_ns};
use super::labels;
use bollard::models::{ContainerInspectResponse, EventMessage};
use bollard::query_parameters::{EventsOptions, ListContainersOptions};
use futures_util::StreamExt;
use gainshare_core::backoff::Backoff;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;
use tokio::sync::mpsc;

/// Which containers are followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdoptionRule {
    /// Containers labelled `gainshare.enable=true`.
    #[default]
    OptedIn,
    /// All but those labelled `gainshare.enable=false`.
    All,
}

/// A running container as the engine describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerInfo {
    /// The full id: what a [`crate::JobHandle`]'s key is.
    pub id: String,
    pub name: String,
    pub image: String,
    pub labels: BTreeMap<String, String>,
    /// When it was started last, in nanoseconds since 1970 of the engine's clock.
    pub started_ns: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DockerEvent {
    /// A container runs, either since just now or since before the follower started.
    Appeared(ContainerInfo),
    /// The container ended. `None` if it was removed before its exit code could be read.
    Died { id: String, exit_code: Option<i64>, oom_killed: bool },
    /// The kernel killed one of its processes because memory ran out; the container may live on.
    Oom { id: String },
    /// The engine does not answer; containers may or may not run. Reported once, then the follower keeps trying.
    EngineLost { why: String },
    /// The engine answers again. What changed meanwhile has been reported before this.
    EngineBack,
}

/// More than any burst of starts; when it is full, the follower waits for its reader.
const CHANNEL: usize = 256;
const RETRIES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));
/// The report of a memory kill may trail the end of the container by a moment.
const OOM_GRACE: Duration = Duration::from_millis(200);

impl Engine {
    /// Follows the engine's containers until the receiver is dropped. Those running already are reported first.
    pub fn events(&self, adopt: AdoptionRule) -> mpsc::Receiver<DockerEvent> {
        let (out, events) = mpsc::channel(CHANNEL);
        let follower = Follower { engine: self.clone(), adopt, known: BTreeMap::new(), out };
        self.spawn(follower.run());
        events
    }
}

struct KnownContainer {
    started_ns: u64,
    oom_killed: bool,
}

struct Follower {
    engine: Engine,
    adopt: AdoptionRule,
    known: BTreeMap<String, KnownContainer>,
    out: mpsc::Sender<DockerEvent>,
}

/// Why a session with the engine ended.
enum SessionEnd {
    /// The receiver was dropped.
    ReaderGone,
    Lost(String),
}

impl From<crate::RuntimeError> for SessionEnd {
    fn from(error: crate::RuntimeError) -> SessionEnd {
        SessionEnd::Lost(error.to_string())
    }
}

impl Follower {
    async fn run(mut self) {
        let mut lost = false;
        let mut retries = RETRIES;
        loop {
            let (why, connected) = match self.session(&mut lost).await {
                (SessionEnd::ReaderGone, _) => return,
                (SessionEnd::Lost(why), connected) => (why, connected),
            };
            if connected {
                retries.reset();
            }
            if !lost {
                lost = true;
                tracing::warn!(why, "the event stream of the Docker engine broke; reconnecting");
                if self.report(DockerEvent::EngineLost { why }).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                () = tokio::time::sleep(retries.next_pause()) => {}
                () = self.out.closed() => return,
            }
        }
    }

    /// Catches up, then follows the stream until it breaks. The flag is whether the engine was reached at all.
    async fn session(&mut self, lost: &mut bool) -> (SessionEnd, bool) {
        let since_ns = match self.engine.info().await {
            Ok(info) => info.now_ns,
            Err(error) => return (error.into(), false),
        };
        let mut filters = label_filter(self.adopt);
        filters.insert("type".to_owned(), vec!["container".to_owned()]);
        filters.insert("event".to_owned(), ["start", "die", "oom"].map(str::to_owned).to_vec());
        let since = format!("{}.{:09}", since_ns / 1_000_000_000, since_ns % 1_000_000_000);
        let options = EventsOptions { since: Some(since), until: None, filters: Some(filters) };
        let mut stream = std::pin::pin!(self.engine.docker.events(Some(options)));
        if let Err(end) = self.catch_up().await {
            return (end, true);
        }
        if std::mem::take(lost) && self.report(DockerEvent::EngineBack).await.is_err() {
            return (SessionEnd::ReaderGone, true);
        }
        let out = self.out.clone();
        loop {
            let next = tokio::select! {
                next = stream.next() => next,
                () = out.closed() => return (SessionEnd::ReaderGone, true),
            };
            let result = match next {
                Some(Ok(event)) => self.handle(event).await,
                Some(Err(error)) => Err(SessionEnd::Lost(error.to_string())),
                None => Err(SessionEnd::Lost("the engine closed the event stream".to_owned())),
            };
            if let Err(end) = result {
                return (end, true);
            }
        }
    }

    /// Reports how the running containers differ from those reported before.
    async fn catch_up(&mut self) -> Result<(), SessionEnd> {
        let running = running(&self.engine, self.adopt).await?;
        let vanished: Vec<String> = self.known.keys().filter(|id| !running.contains(id)).cloned().collect();
        for id in vanished {
            self.died(&id, None).await?;
        }
        for id in running {
            self.started(&id).await?;
        }
        Ok(())
    }

    async fn handle(&mut self, event: EventMessage) -> Result<(), SessionEnd> {
        let at_ns = event.time_nano.and_then(|ns| u64::try_from(ns).ok()).unwrap_or(u64::MAX);
        let (Some(action), Some(actor)) = (event.action, event.actor) else { return Ok(()) };
        let (Some(id), attributes) = (actor.id, actor.attributes.unwrap_or_default()) else { return Ok(()) };
        if opted_out(self.adopt, &attributes) {
            return Ok(());
        }
        match action.as_str() {
            "start" => self.started(&id).await,
            // An end from before the known start belongs to an earlier life of the container.
            "die" if self.known.get(&id).is_some_and(|known| known.started_ns <= at_ns) => {
                self.died(&id, attributes.get("exitCode").and_then(|code| code.parse().ok())).await
            }
            "oom" => {
                let Some(known) = self.known.get_mut(&id) else { return Ok(()) };
                known.oom_killed = true;
                self.report(DockerEvent::Oom { id }).await
            }
            _ => Ok(()),
        }
    }

    async fn started(&mut self, id: &str) -> Result<(), SessionEnd> {
        let container = match self.engine.inspect(id).await {
            Ok(container) => container,
            Err(crate::RuntimeError::Gone { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let info = describe(id, &container);
        if opted_out(self.adopt, &info.labels) {
            return Ok(());
        }
        match self.known.get(id) {
            Some(known) if known.started_ns == info.started_ns => return Ok(()),
            // It ended and started again while the stream was broken; the first life's exit code is lost.
            Some(known) => {
                let died = DockerEvent::Died { id: id.to_owned(), exit_code: None, oom_killed: known.oom_killed };
                self.report(died).await?;
            }
            None => {}
        }
        self.known.insert(id.to_owned(), KnownContainer { started_ns: info.started_ns, oom_killed: false });
        self.report(DockerEvent::Appeared(info)).await
    }

    async fn died(&mut self, id: &str, exit_code: Option<i64>) -> Result<(), SessionEnd> {
        let Some(known) = self.known.remove(id) else { return Ok(()) };
        let (mut exit_code, mut oom_killed) = (exit_code, known.oom_killed);
        for attempt in 0..2 {
            let Ok(state) = self.engine.inspect(id).await.map(|c| c.state.unwrap_or_default()) else { break };
            if state.started_at.as_deref().and_then(parse_time_ns) != Some(known.started_ns) {
                break;
            }
            exit_code = exit_code.or(state.exit_code);
            oom_killed |= state.oom_killed == Some(true);
            if attempt > 0 || oom_killed || exit_code != Some(137) {
                break;
            }
            tokio::time::sleep(OOM_GRACE).await;
        }
        self.report(DockerEvent::Died { id: id.to_owned(), exit_code, oom_killed }).await
    }

    async fn report(&self, event: DockerEvent) -> Result<(), SessionEnd> {
        self.out.send(event).await.map_err(|_| SessionEnd::ReaderGone)
    }
}

fn label_filter(adopt: AdoptionRule) -> HashMap<String, Vec<String>> {
    match adopt {
        AdoptionRule::OptedIn => HashMap::from([("label".to_owned(), vec![format!("{}=true", labels::ENABLE)])]),
        AdoptionRule::All => HashMap::new(),
    }
}

/// The ids of the containers that run.
async fn running(engine: &Engine, adopt: AdoptionRule) -> Result<Vec<String>, crate::RuntimeError> {
    let options = ListContainersOptions { filters: Some(label_filter(adopt)), ..Default::default() };
    let listed = engine.docker.list_containers(Some(options)).await;
    let listed = listed.map_err(|error| failed(&engine.socket, "list containers", error))?;
    let wanted = listed.into_iter().filter(|c| !opted_out(adopt, c.labels.iter().flatten()));
    Ok(wanted.filter_map(|c| c.id).collect())
}

/// Whether its labels keep a container out.
fn opted_out<'a>(adopt: AdoptionRule, labels: impl IntoIterator<Item = (&'a String, &'a String)>) -> bool {
    let enable = labels.into_iter().find(|(key, _)| *key == labels::ENABLE).map(|(_, value)| value.as_str());
    match adopt {
        AdoptionRule::OptedIn => enable != Some("true"),
        AdoptionRule::All => enable == Some("false"),
    }
}

fn describe(id: &str, container: &ContainerInspectResponse) -> ContainerInfo {
    let config = container.config.as_ref();
    let started_at = container.state.as_ref().and_then(|state| state.started_at.as_deref());
    ContainerInfo {
        id: container.id.clone().unwrap_or_else(|| id.to_owned()),
        name: container.name.as_deref().unwrap_or(id).trim_start_matches('/').to_owned(),
        image: config.and_then(|config| config.image.clone()).unwrap_or_default(),
        labels: config.and_then(|config| config.labels.clone()).unwrap_or_default().into_iter().collect(),
        started_ns: started_at.and_then(parse_time_ns).unwrap_or(0),
    }
}
