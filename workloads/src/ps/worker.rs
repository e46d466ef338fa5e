//! A worker: reads parameters, computes gradients, sends them; the chief also reports.
//!
//! A worker whose connection to one server fails gives up all its connections and joins again, until
//! `--connect-timeout` passes without success.

use std::io::ErrorKind;
use std::net::{TcpStream, ToSocketAddrs};
use std::ops::Range;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::sys::signal::Signal;

use super::cluster::{Role, Task};
use super::wire::{Hello, Reply, Request, Survey, WireError, write_push};
use super::{Mode, PsArgs, part, settings};
use crate::report::Progress;
use crate::run::{Output, print_message, stopped_code};
use crate::stop;
use crate::trainer::{Setup, TRAINING_STREAM, Trainer, TrainerError};

/// How often a waiting worker looks for a signal.
const POLL: Duration = Duration::from_millis(100);
/// Time between two attempts to connect.
const RETRY: Duration = Duration::from_millis(200);
/// A server that sends nothing for this long is taken for lost. The slowest worker of a step must be faster.
const SILENCE: Duration = Duration::from_secs(600);
/// The chief's number among the workers: after all others.
const CHIEF: u32 = u32::MAX;

/// Why a stay with the servers ended before training was complete.
#[derive(Debug, thiserror::Error)]
enum LinkError {
    #[error("server {server} at {address}: {error}")]
    Lost { server: usize, address: String, error: WireError },
    #[error("server {server} at {address} refuses this worker: {why}")]
    Refused { server: usize, address: String, why: String },
    #[error("stopped by {0}")]
    Stopped(Signal),
    #[error(transparent)]
    Training(#[from] TrainerError),
}

pub(crate) fn run(args: &PsArgs, task: &Task) -> Result<ExitCode> {
    let mut worker = Worker::new(args, task)?;
    let limit = Duration::from_secs(args.connect_timeout_s);
    let mut lost_since: Option<Instant> = None;
    loop {
        let before = worker.session_steps;
        match worker.train(args) {
            Ok(()) => {
                worker.finish();
                return Ok(ExitCode::SUCCESS);
            }
            Err(LinkError::Stopped(signal)) => {
                worker.finish();
                print_message(format_args!("worker {}: stopped by {signal}", worker.name));
                return Ok(stopped_code(signal));
            }
            Err(error @ LinkError::Lost { .. }) => {
                if worker.session_steps > before || lost_since.is_none() {
                    print_message(format_args!("worker {}: {error}; it joins again", worker.name));
                    lost_since = Some(Instant::now());
                }
                if lost_since.is_some_and(|since| since.elapsed() >= limit) {
                    let limit_s = args.connect_timeout_s;
                    bail!("{error}; no server for {limit_s} s: start the servers, or give a longer --connect-timeout");
                }
                if let Some(signal) = stop::received_signal() {
                    return Ok(stopped_code(signal));
                }
                thread::sleep(RETRY);
            }
            Err(error) => return Err(error.into()),
        }
    }
}

struct Worker<'a> {
    task: &'a Task,
    name: String,
    id: u32,
    setup: Setup,
    total_steps: u64,
    mode: Mode,
    replica: Trainer,
    /// The random stream of this worker's part of the data.
    stream: String,
    /// The part of each server.
    ranges: Vec<Range<usize>>,
    row: Vec<f32>,
    output: Option<Output>,
    last_report: Option<Progress>,
    started: Instant,
    /// Steps that this worker took part in.
    session_steps: u64,
    /// The newest step that this worker has seen.
    seen_step: Option<u64>,
}

impl<'a> Worker<'a> {
    fn new(args: &PsArgs, task: &'a Task) -> Result<Worker<'a>> {
        let setup = args.train.setup();
        let replica = Trainer::new(setup.clone(), args.train.threads as usize);
        let row = replica.flat_parameters();
        let servers = task.servers.len() as u32;
        let id = if task.role == Role::Chief { CHIEF } else { task.index };
        Ok(Worker {
            task,
            name: if id == CHIEF { "chief".to_owned() } else { id.to_string() },
            id,
            total_steps: args.train.total_steps(&setup),
            mode: args.mode,
            setup,
            replica,
            // The first worker has the data of the ordinary trainer, so that its losses can be compared.
            stream: if id == 0 { TRAINING_STREAM.to_owned() } else { format!("{TRAINING_STREAM} of worker {id}") },
            ranges: (0..servers).map(|i| part::range(row.len(), i, servers)).collect(),
            row,
            output: if task.reports { Some(Output::new(&args.train)?) } else { None },
            last_report: None,
            started: Instant::now(),
            session_steps: 0,
            seen_step: None,
        })
    }

    fn finish(&mut self) {
        if let Some(output) = &mut self.output {
            output.end(self.last_report.as_ref());
        }
        let (name, steps, wall_s) = (&self.name, self.session_steps, self.started.elapsed().as_secs_f64());
        let rate = steps as f64 / wall_s.max(1e-9);
        print_message(format_args!("worker {name}: {steps} steps in {wall_s:.2} s ({rate:.1} steps/s)"));
    }

    /// Joins the servers and trains until all steps are taken.
    fn train(&mut self, args: &PsArgs) -> Result<(), LinkError> {
        let (mut links, surveys) = self.join(args)?;
        let (mut generation, mut heads) = self.agree(&mut links, surveys)?;
        let mut step = lowest(&heads);
        self.print_lost_steps(step);
        let mut reported = step;
        loop {
            self.seen_step = Some(step);
            if heads.iter().all(|head| head.finished) {
                return Ok(());
            }
            if let Some(signal) = stop::received_signal() {
                return Err(LinkError::Stopped(signal));
            }
            self.replica.set_flat_parameters(step, &self.row);
            let (gradient, norm) = self.replica.flat_gradient(&self.stream)?;
            for ((link, range), head) in links.iter_mut().zip(&self.ranges).zip(&heads) {
                link.send(|stream| write_push(stream, generation, head.step, &gradient[range.clone()]))?;
            }
            let above = (self.mode == Mode::Sync).then_some(step);
            heads = self.pull_all(&mut links, generation, above)?;
            if !self.align(&mut links, &mut heads, generation)? {
                let surveys = ask_surveys(&mut links)?;
                (generation, heads) = self.agree(&mut links, surveys)?;
                self.print_lost_steps(lowest(&heads));
                reported = reported.min(lowest(&heads));
            }
            step = lowest(&heads);
            self.session_steps += 1;
            let finished = heads.iter().all(|head| head.finished);
            let passed = |period: u64| step / period > reported / period;
            if step > reported && (passed(args.train.report_every) || passed(self.setup.epoch_steps()) || finished) {
                self.report(step, norm)?;
                reported = step;
            }
        }
    }

    /// The reporting worker prints how far the servers went back behind the newest step that it has seen.
    fn print_lost_steps(&self, step: u64) {
        if let (Some(seen), Some(_)) = (self.seen_step, &self.output)
            && step < seen
        {
            let lost = seen - step;
            print_message(format_args!(
                "the servers were at step {seen} and continue after step {step}: {lost} steps lost"
            ));
        }
    }

    fn report(&mut self, step: u64, gradient_norm: f32) -> Result<(), LinkError> {
        let Some(output) = &mut self.output else { return Ok(()) };
        self.replica.set_flat_parameters(step, &self.row);
        let measurement = self.replica.measure()?;
        let progress = Progress {
            step,
            total_steps: self.total_steps,
            epoch_steps: self.setup.epoch_steps(),
            batch: self.setup.batch,
            loss: measurement.loss,
            accuracy: measurement.accuracy,
            learning_rate: self.replica.learning_rate(step),
            gradient_norm,
            elapsed_s: self.started.elapsed().as_secs_f64(),
            session_steps: self.session_steps,
        };
        output.report(&progress);
        self.last_report = Some(progress);
        Ok(())
    }

    /// Connects to all servers and greets them; this worker is live on all of them afterwards.
    fn join(&self, args: &PsArgs) -> Result<(Vec<Link>, Vec<Survey>), LinkError> {
        let servers = &self.task.servers;
        let mut links = Vec::new();
        let mut surveys = Vec::new();
        for (index, address) in servers.iter().enumerate() {
            let mut link = Link::connect(index, address, self.ranges[index].len())?;
            let (worker, settings) = (self.id, settings(args));
            let hello = Hello { worker, server: index as u32, servers: servers.len() as u32, settings };
            link.send(|stream| Request::Hello(hello).write(stream))?;
            surveys.push(link.receive_survey()?);
            links.push(link);
        }
        Ok((links, surveys))
    }

    /// Reads all parts into the row, and returns where each server is.
    fn pull_all(&mut self, links: &mut [Link], generation: u64, above: Option<u64>) -> Result<Vec<Head>, LinkError> {
        for link in &mut *links {
            link.send(|stream| Request::Pull { generation, above }.write(stream))?;
        }
        (0..links.len()).map(|index| self.receive_part(&mut links[index], index)).collect()
    }

    fn receive_part(&mut self, link: &mut Link, index: usize) -> Result<Head, LinkError> {
        match link.receive()? {
            Reply::Parameters { step, finished, values } if values.len() == self.ranges[index].len() => {
                self.row[self.ranges[index].clone()].copy_from_slice(&values);
                Ok(Head { step, finished, is_lost: false })
            }
            Reply::AllSkipped { step } => Ok(Head { step, finished: false, is_lost: true }),
            Reply::Stale => Ok(Head { step: 0, finished: false, is_lost: true }),
            _ => Err(link.lost(WireError::NoMessage)),
        }
    }

    /// Brings all servers to the same generation and the same step; see the module documentation of [`super`].
    /// This worker stays live on all servers meanwhile, so that no server takes a step without it.
    fn agree(&mut self, links: &mut [Link], mut surveys: Vec<Survey>) -> Result<(u64, Vec<Head>), LinkError> {
        loop {
            let generation = surveys.iter().map(|survey| survey.generation).max().unwrap_or(0);
            let is_common = surveys.iter().all(|survey| survey.generation == generation);
            if is_common || self.mode == Mode::Async {
                let mut heads = self.pull_all(links, generation, None)?;
                if self.align(links, &mut heads, generation)? {
                    return Ok((generation, heads));
                }
                surveys = ask_surveys(links)?;
                if surveys.iter().any(|survey| survey.generation != generation) {
                    // Another worker begins a new generation.
                    continue;
                }
            }
            self.roll_back(links, &surveys, generation + 1)?;
            surveys = ask_surveys(links)?;
        }
    }

    /// Begins a new generation on all servers, with the newest step that all of them can restore. The first server
    /// decides between workers that do this at the same time: the worker that comes late stops here.
    fn roll_back(&mut self, links: &mut [Link], surveys: &[Survey], generation: u64) -> Result<(), LinkError> {
        let is_common = |step: &&u64| surveys.iter().all(|survey| survey.restorable.contains(step));
        let first = surveys.first().map_or(&[][..], |survey| &survey.restorable);
        let step = first.iter().rev().find(is_common).copied().unwrap_or(0);
        for link in links {
            link.send(|stream| Request::Rollback { generation, step }.write(stream))?;
            match link.receive()? {
                Reply::RolledBack => {}
                Reply::Stale => return Ok(()),
                _ => return Err(link.lost(WireError::NoMessage)),
            }
        }
        Ok(())
    }

    /// Skips steps on the servers behind until all servers are at the same step. Returns false if that cannot be:
    /// every live worker skips a step, or another worker has begun a new generation.
    fn align(&mut self, links: &mut [Link], heads: &mut [Head], generation: u64) -> Result<bool, LinkError> {
        if self.mode == Mode::Async {
            return Ok(true);
        }
        loop {
            if heads.iter().any(|head| head.is_lost) {
                return Ok(false);
            }
            let newest = heads.iter().map(|head| head.step).max().unwrap_or(0);
            if heads.iter().all(|head| head.step == newest) {
                return Ok(true);
            }
            for index in 0..links.len() {
                let step = heads[index].step;
                if step < newest {
                    links[index].send(|stream| {
                        Request::Skip { generation, step }.write(stream)?;
                        Request::Pull { generation, above: Some(step) }.write(stream)
                    })?;
                    heads[index] = self.receive_part(&mut links[index], index)?;
                }
            }
        }
    }
}

/// Asks all servers for their surveys.
fn ask_surveys(links: &mut [Link]) -> Result<Vec<Survey>, LinkError> {
    for link in &mut *links {
        link.send(|stream| Request::Survey.write(stream))?;
    }
    links.iter_mut().map(Link::receive_survey).collect()
}

/// Where a server is.
#[derive(Debug, Clone, Copy)]
struct Head {
    step: u64,
    finished: bool,
    /// The next step of this server cannot come: every live worker skipped it, or the server is of another
    /// generation.
    is_lost: bool,
}

fn lowest(heads: &[Head]) -> u64 {
    heads.iter().map(|head| head.step).min().unwrap_or(0)
}

/// The connection to one server.
struct Link {
    server: usize,
    address: String,
    stream: TcpStream,
    values: usize,
}

impl Link {
    fn connect(server: usize, address: &str, values: usize) -> Result<Link, LinkError> {
        let lost = |error: std::io::Error| LinkError::Lost { server, address: address.to_owned(), error: error.into() };
        let mut found = Err(std::io::Error::new(ErrorKind::NotFound, "the name has no address"));
        for socket in address.to_socket_addrs().map_err(lost)? {
            found = TcpStream::connect_timeout(&socket, Duration::from_secs(5));
            if found.is_ok() {
                break;
            }
        }
        let stream = found.map_err(lost)?;
        stream.set_nodelay(true).map_err(lost)?;
        stream.set_write_timeout(Some(SILENCE)).map_err(lost)?;
        Ok(Link { server, address: address.to_owned(), stream, values })
    }

    fn lost(&self, error: impl Into<WireError>) -> LinkError {
        LinkError::Lost { server: self.server, address: self.address.clone(), error: error.into() }
    }

    fn send(&mut self, write: impl FnOnce(&mut TcpStream) -> std::io::Result<()>) -> Result<(), LinkError> {
        let sent = write(&mut self.stream);
        sent.map_err(|error| self.lost(error))
    }

    fn receive_survey(&mut self) -> Result<Survey, LinkError> {
        match self.receive()? {
            Reply::Survey(survey) => Ok(survey),
            _ => Err(self.lost(WireError::NoMessage)),
        }
    }

    /// The next reply. A signal ends the wait.
    fn receive(&mut self) -> Result<Reply, LinkError> {
        let begun = Instant::now();
        self.stream.set_read_timeout(Some(POLL)).map_err(|error| self.lost(error))?;
        loop {
            match self.stream.peek(&mut [0]) {
                Ok(_) => break,
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(error)),
            }
            if let Some(signal) = stop::received_signal() {
                return Err(LinkError::Stopped(signal));
            }
            if begun.elapsed() >= SILENCE {
                return Err(self.lost(std::io::Error::from(ErrorKind::TimedOut)));
            }
        }
        self.stream.set_read_timeout(Some(SILENCE)).map_err(|error| self.lost(error))?;
        match Reply::read(&mut self.stream, self.values) {
            Ok(Some(Reply::Refused(why))) => {
                Err(LinkError::Refused { server: self.server, address: self.address.clone(), why })
            }
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(self.lost(std::io::Error::from(ErrorKind::UnexpectedEof))),
            Err(error) => Err(self.lost(error)),
        }
    }
}
