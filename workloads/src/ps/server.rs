//! A parameter server: one thread for each connection, one lock around the state.
//!
//! The main thread waits for signals and for the end of training. A connection that fails, in whatever way, removes
//! its worker from the live workers, and nothing else. Checkpoints are written under the lock, between two steps.

use std::collections::BTreeMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::process::ExitCode;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::cluster::Task;
use super::part::Part;
use super::wire::{Hello, Reply, Request, Survey, WireError};
use super::{Mode, PsArgs, settings};
use crate::args::Resume;
use crate::checkpoint::{CheckpointError, Store};
use crate::run::{print_message, stopped_code};
use crate::stop;
use crate::trainer::Setup;

/// How often the main thread looks for a signal.
const POLL: Duration = Duration::from_millis(20);
/// Time that a server waits after the last step for workers that still read the result.
const FAREWELL: Duration = Duration::from_secs(1);
const MAX_CONNECTIONS: usize = 4096;
/// Checkpoints before the newest one that a server keeps. Servers stop at most one step apart, so that the newest
/// regular checkpoint of one of them is always among the newest three of another.
const KEEP_PREVIOUS: usize = 2;

pub(crate) fn run(args: &PsArgs, task: &Task) -> Result<ExitCode> {
    let mut state = ServerState::new(args, task)?;
    if !task.servers.is_empty() {
        state.set_servers(task.servers.len() as u32)?;
    }
    let listener = TcpListener::bind(&task.listen)
        .with_context(|| format!("cannot listen at {}; give another --listen address", task.listen))?;
    let address = listener.local_addr().context("the listening socket has no address")?;
    print_message(format_args!("server {} listens at {address}", task.index));
    let shared = Arc::new(SharedState { state: Mutex::new(state), changed: Condvar::new() });
    let timeout = Duration::from_secs(args.worker_timeout_s);
    {
        let shared = Arc::clone(&shared);
        thread::spawn(move || accept(&listener, &shared, timeout));
    }
    wait_for_end(&shared)
}

fn wait_for_end(shared: &SharedState) -> Result<ExitCode> {
    let mut idle_since = None;
    loop {
        thread::sleep(POLL);
        let mut state = shared.lock();
        if let Some(error) = state.fatal.take() {
            return Err(error);
        }
        let step = state.step();
        if let Some(signal) = stop::received_signal() {
            state.save_if_new().with_context(|| format!("the work after step {:?} is lost", state.saved_at))?;
            print_message(format_args!("server {}: stopped by {signal} after step {step}", state.index));
            return Ok(stopped_code(signal));
        }
        // The wait for absent workers ends with time alone.
        state.advance_if_complete();
        shared.changed.notify_all();
        if !state.finished() || !state.members.is_empty() {
            idle_since = None;
            continue;
        }
        let patience = if state.session_steps > 0 { FAREWELL } else { state.start_timeout };
        if idle_since.get_or_insert_with(Instant::now).elapsed() >= patience {
            print_message(format_args!("server {}: training is complete after step {step}", state.index));
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn accept(listener: &TcpListener, shared: &Arc<SharedState>, timeout: Duration) {
    let mut number = 0;
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            // Usually the process has too many open files; connections that end make room.
            thread::sleep(POLL);
            continue;
        };
        number += 1;
        if shared.lock().connections >= MAX_CONNECTIONS {
            continue;
        }
        shared.lock().connections += 1;
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            let mut connection = Connection { number, stream, worker: None };
            let ended = connection.serve(&shared, timeout);
            let mut state = shared.lock();
            state.connections -= 1;
            if let Some(worker) = connection.worker {
                state.remove(worker, connection.number);
            }
            shared.changed.notify_all();
            if let Err(error) = ended {
                let from = connection.worker.map_or("a connection".to_owned(), |worker| format!("worker {worker}"));
                print_message(format_args!("server {}: {from} is dropped: {error}", state.index));
            }
        });
    }
}

struct SharedState {
    state: Mutex<ServerState>,
    changed: Condvar,
}

impl SharedState {
    /// A thread that panicked has changed the state only between whole steps, so the state is still sound.
    fn lock(&self) -> MutexGuard<'_, ServerState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the server has an answer to a pull.
    fn wait_for_parameters(&self, generation: u64, above: Option<u64>) -> Reply {
        let mut state = self.lock();
        loop {
            if state.generation != generation {
                return Reply::Stale;
            }
            if above.is_none_or(|above| state.step() > above) || state.finished() {
                return state.parameters();
            }
            if state.all_skipped() {
                return Reply::AllSkipped { step: state.step() };
            }
            // The timeout only bounds the damage of a missed wake-up.
            let waited = self.changed.wait_timeout(state, Duration::from_secs(1));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

struct Connection {
    number: u64,
    stream: TcpStream,
    worker: Option<u32>,
}

impl Connection {
    fn serve(&mut self, shared: &SharedState, timeout: Duration) -> Result<(), WireError> {
        self.stream.set_nodelay(true)?;
        self.stream.set_read_timeout(Some(timeout))?;
        self.stream.set_write_timeout(Some(timeout))?;
        let mut values = 0;
        loop {
            let Some(request) = Request::read(&mut self.stream, values)? else { return Ok(()) };
            let reply = match (request, self.worker) {
                (Request::Hello(hello), None) => {
                    let mut state = shared.lock();
                    match state.join(&hello, self.number) {
                        Ok(reply) => {
                            self.worker = Some(hello.worker);
                            values = state.part.as_ref().map_or(0, Part::len);
                            Some(reply)
                        }
                        Err(error) => {
                            drop(state);
                            Reply::Refused(format!("{error:#}")).write(&mut self.stream)?;
                            return Err(io::Error::other(format!("{error:#}")).into());
                        }
                    }
                }
                (Request::Survey, Some(_)) => {
                    let survey = shared.lock().survey().map_err(|error| io::Error::other(error.to_string()))?;
                    Some(Reply::Survey(survey))
                }
                (Request::Pull { generation, above }, Some(_)) => Some(shared.wait_for_parameters(generation, above)),
                (Request::Push { generation, step, gradient }, Some(worker)) => {
                    if gradient.len() != values || gradient.iter().any(|value| !value.is_finite()) {
                        return Err(io::Error::other("its gradient has the wrong length or is not finite").into());
                    }
                    shared.lock().answer(worker, self.number, generation, step, Answer::Gradient(gradient))?;
                    None
                }
                (Request::Skip { generation, step }, Some(worker)) => {
                    shared.lock().answer(worker, self.number, generation, step, Answer::Skip)?;
                    None
                }
                (Request::Rollback { generation, step }, Some(_)) => {
                    let reply = shared.lock().begin_generation(generation, step);
                    Some(reply.map_err(|error| io::Error::other(format!("{error:#}")))?)
                }
                _ => return Err(WireError::NoMessage),
            };
            shared.changed.notify_all();
            if let Some(reply) = reply {
                reply.write(&mut self.stream)?;
            }
        }
    }
}

/// A live worker.
struct Member {
    connection: u64,
    /// The worker's answer for the step that the server is about to take.
    answer: Option<Answer>,
}

enum Answer {
    Gradient(Vec<f32>),
    Skip,
}

struct ServerState {
    index: u32,
    mode: Mode,
    setup: Setup,
    settings: BTreeMap<String, String>,
    total_steps: u64,
    /// None until the number of servers is known.
    part: Option<Part>,
    servers: u32,
    store: Option<Store>,
    resume: Resume,
    checkpoint_every: u64,
    saved_at: Option<u64>,
    members: BTreeMap<u32, Member>,
    /// How often the servers have gone back to a common step, and the step after which this generation began.
    generation: u64,
    generation_began_at: u64,
    connections: usize,
    /// The first step waits for this many workers, but not longer than the timeout after the first has come.
    expected_workers: usize,
    start_timeout: Duration,
    first_join: Option<Instant>,
    /// Steps taken by this process.
    session_steps: u64,
    /// Ends the process: another run owns the checkpoints.
    fatal: Option<anyhow::Error>,
}

impl ServerState {
    fn new(args: &PsArgs, task: &Task) -> Result<ServerState> {
        let setup = args.train.setup();
        let store = match &args.train.checkpoint {
            Some(dir) => {
                let mut store = Store::claim(&dir.join(format!("server-{}", task.index)), args.train.attempt)?;
                store.keep_previous(KEEP_PREVIOUS)?;
                Some(store)
            }
            None => None,
        };
        Ok(ServerState {
            index: task.index,
            mode: args.mode,
            total_steps: args.train.total_steps(&setup),
            settings: settings(args),
            setup,
            part: None,
            servers: 0,
            store,
            resume: args.train.resume,
            checkpoint_every: args.train.checkpoint_every,
            saved_at: None,
            members: BTreeMap::new(),
            generation: 0,
            generation_began_at: 0,
            connections: 0,
            expected_workers: task.expected_workers as usize,
            start_timeout: Duration::from_secs(args.worker_timeout_s),
            first_join: None,
            session_steps: 0,
            fatal: None,
        })
    }

    /// The number of servers is known: creates this server's part, or loads it.
    fn set_servers(&mut self, servers: u32) -> Result<()> {
        let mut part = Part::new(&self.setup, self.settings.clone(), self.index, servers);
        if let Some(store) = &mut self.store
            && self.resume != Resume::Never
        {
            let newest = store.load_newest(|damaged| print_message(format_args!("skipped: {damaged}")))?;
            match newest {
                Some((path, saved)) => {
                    part.restore(saved).with_context(|| format!("cannot continue from {}", path.display()))?;
                    let step = part.step();
                    print_message(format_args!(
                        "server {} continues after step {step} from {}",
                        self.index,
                        path.display()
                    ));
                    self.saved_at = Some(step);
                }
                None if self.resume == Resume::Must => {
                    bail!("--resume: there is no whole checkpoint in the --checkpoint directory; start without it")
                }
                None => {}
            }
            store.keep_previous(KEEP_PREVIOUS)?;
        }
        (self.part, self.servers) = (Some(part), servers);
        Ok(())
    }

    fn step(&self) -> u64 {
        self.part.as_ref().map_or(0, Part::step)
    }

    fn finished(&self) -> bool {
        self.step() >= self.total_steps
    }

    fn parameters(&self) -> Reply {
        let values = self.part.as_ref().map_or(vec![], |part| part.values().to_vec());
        Reply::Parameters { step: self.step(), finished: self.finished(), values }
    }

    /// Makes a worker live. A newer connection of the same worker replaces the older one.
    fn join(&mut self, hello: &Hello, connection: u64) -> Result<Reply> {
        if let Some((name, mine)) = self.settings.iter().find(|(name, mine)| hello.settings.get(*name) != Some(mine)) {
            let theirs = hello.settings.get(name).map_or("nothing", String::as_str);
            bail!("this server runs with {name} {mine}, the worker with {theirs}; give both the same options");
        }
        if hello.server != self.index {
            bail!("this is server {}, not {}; give --servers in the order of their numbers", self.index, hello.server);
        }
        if self.part.is_none() {
            if hello.servers <= hello.server || hello.servers > 1024 {
                bail!("server {} cannot be one of {} servers", hello.server, hello.servers);
            }
            self.set_servers(hello.servers)?;
        }
        if hello.servers != self.servers {
            bail!("this job has {} servers, the worker lists {}; give both the same", self.servers, hello.servers);
        }
        self.first_join.get_or_insert_with(Instant::now);
        self.members.insert(hello.worker, Member { connection, answer: None });
        Ok(Reply::Survey(self.survey()?))
    }

    fn survey(&self) -> Result<Survey, CheckpointError> {
        let mut restorable = vec![0, self.step()];
        if let Some(store) = &self.store {
            restorable.extend(store.steps()?);
        }
        restorable.sort_unstable();
        restorable.dedup();
        Ok(Survey { generation: self.generation, restorable })
    }

    fn remove(&mut self, worker: u32, connection: u64) {
        if self.members.get(&worker).is_some_and(|member| member.connection == connection) {
            self.members.remove(&worker);
            self.advance_if_complete();
        }
    }

    /// Takes a worker's answer for the step after `step`. An answer of another generation has no effect; the reply to
    /// the worker's next pull tells the worker.
    fn answer(&mut self, worker: u32, connection: u64, generation: u64, step: u64, answer: Answer) -> io::Result<()> {
        if self.finished() || generation != self.generation {
            return Ok(());
        }
        if self.mode == Mode::Async {
            if let Answer::Gradient(gradient) = answer {
                self.take_step(&[gradient]);
            }
            return Ok(());
        }
        if step != self.step() {
            return Err(io::Error::other(format!("it answers for step {step}, the server is at {}", self.step())));
        }
        match self.members.get_mut(&worker) {
            Some(member) if member.connection == connection => member.answer = Some(answer),
            _ => return Err(io::Error::other("a newer connection of this worker has replaced it")),
        }
        self.advance_if_complete();
        Ok(())
    }

    /// Whether the workers that the first step waits for are here, or were waited for long enough.
    fn may_start(&self) -> bool {
        self.session_steps > 0
            || self.members.len() >= self.expected_workers
            || self.first_join.is_some_and(|first| first.elapsed() >= self.start_timeout)
    }

    /// Takes a step if every live worker has answered and there is a gradient.
    fn advance_if_complete(&mut self) {
        let is_complete = self.members.values().all(|member| member.answer.is_some());
        if self.finished() || !is_complete || !self.may_start() {
            return;
        }
        let has_gradient = |member: &Member| matches!(member.answer, Some(Answer::Gradient(_)));
        if !self.members.values().any(has_gradient) {
            return;
        }
        // In the order of the workers' numbers, so that the same gradients give the same sum.
        let answers = self.members.values_mut().filter_map(|member| member.answer.take());
        let gradients: Vec<Vec<f32>> = answers
            .filter_map(|answer| match answer {
                Answer::Gradient(gradient) => Some(gradient),
                Answer::Skip => None,
            })
            .collect();
        self.take_step(&gradients);
    }

    fn all_skipped(&self) -> bool {
        self.mode == Mode::Sync
            && self.may_start()
            && !self.members.is_empty()
            && self.members.values().all(|member| matches!(member.answer, Some(Answer::Skip)))
    }

    fn take_step(&mut self, gradients: &[Vec<f32>]) {
        let Some(part) = &mut self.part else { return };
        part.apply(gradients.iter().map(Vec::as_slice));
        self.session_steps += 1;
        let step = part.step();
        let is_regular = self.checkpoint_every > 0 && step.is_multiple_of(self.checkpoint_every);
        if is_regular || step >= self.total_steps {
            match self.save_if_new() {
                Ok(()) => {}
                Err(error) if error.is_fenced() => self.fatal = Some(error.into()),
                Err(error) => print_message(format_args!("no checkpoint at step {step}, training goes on: {error}")),
            }
        }
    }

    fn save_if_new(&mut self) -> Result<(), CheckpointError> {
        if let (Some(store), Some(part)) = (&mut self.store, &self.part)
            && self.saved_at != Some(part.step())
        {
            store.save(&part.state())?;
            self.saved_at = Some(part.step());
        }
        Ok(())
    }

    /// Begins a newer generation with the state after `step`. Several workers may ask for the same generation: the
    /// first request counts. A worker that asks for another state, or for an older generation, is stale.
    fn begin_generation(&mut self, generation: u64, step: u64) -> Result<Reply> {
        if generation <= self.generation {
            let is_same = (generation, step) == (self.generation, self.generation_began_at);
            return Ok(if is_same { Reply::RolledBack } else { Reply::Stale });
        }
        self.go_back(step)?;
        (self.generation, self.generation_began_at) = (generation, step);
        self.members.values_mut().for_each(|member| member.answer = None);
        Ok(Reply::RolledBack)
    }

    /// Goes back to the state after `step`.
    fn go_back(&mut self, step: u64) -> Result<()> {
        let before = self.step();
        if step == before {
            return Ok(());
        }
        let saved = match &mut self.store {
            Some(store) => store.go_back(step)?,
            None => None,
        };
        let Some(part) = &mut self.part else { bail!("no worker has greeted this server yet") };
        match saved {
            Some(saved) => part.restore(saved)?,
            None if step == 0 => part.restart(),
            None => bail!("server {} has no checkpoint of step {step}", self.index),
        }
        self.saved_at = Some(step);
        let (index, lost) = (self.index, before.saturating_sub(step));
        print_message(format_args!("server {index} went back from step {before} to {step}: {lost} steps lost"));
        Ok(())
    }
}
