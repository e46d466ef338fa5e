//! Progress of training jobs, read from their output, files and pushes without changing their code.
//!
//! **Problem.** Every framework reports progress in its own way: a progress bar full of escape
//! sequences, a Python dict, a CSV file that is rewritten whenever a column appears, TensorBoard
//! event files, a Prometheus endpoint, a push. The input may be torn, rotated, flooded or garbage,
//! and none of it may stop the daemon or the node agent.
//!
//! **How.** One parser per source turns bytes into [`MetricReading`]s and [`Progress`]. A [`Chooser`]
//! picks the one metric that is the job's evaluation function. A [`Collector`] combines all sources
//! of one job. A [`GuardedCollector`] is the entry for drivers: a panic inside the collector of one
//! job switches that collector off and goes no further. This crate starts no thread; drivers pass
//! the time in. The only clock read here is the thread's CPU time, in [`pattern`](Pattern).
//!
//! **Map of the crate**, lowest layer first:
//!
//! | file | contents | change it for |
//! |---|---|---|
//! | `reading` | [`MetricReading`], [`Progress`], [`Batch`], [`Counters`] | a new kind of count |
//! | `words` | all lists of names and words | a metric, step or file name that is not recognised |
//! | `number` | numbers as scripts print them | |
//! | `ranking` | rank of a metric by its name | the order of preference between metrics |
//! | `facts` | what one line or record reports | |
//! | `json`, `pattern`, `line` | from a line to facts | **the output of a new framework** (`line`) |
//! | `root`, `stored_path`, `tail` | safe opening and following of files | |
//! | `run_length` | how long a job is to run, from its command | an option that names the number of steps or epochs (see `words`) |
//! | `terminal`, `steps`, `output` | from raw output to lines, run-wide steps, readings | escape sequences, bars |
//! | `row`, `metrics_file` | CSV, NDJSON and text files | **a new line-based file format** |
//! | `tensorboard` | event files | **a new binary format** takes this file as its model |
//! | `prometheus`, `push` | an endpoint's answer, the body of a push | another protocol |
//! | `discover` | search for files in the job's folder | the file name of a new framework (see `words`) |
//! | `chooser`, `spec` | choice of the metric, the job's settings | a new setting |
//! | `files` | the files of one job, which another thread can read | |
//! | `collector`, `guard` | all sources of one job, and the wall around them | a new source |
//!
//! Imports go upwards in this table only, so there is no cycle between files.
//!
//! **Terms.** A *reading* is one value of one metric. *Progress* is how far the job is, in steps,
//! epochs or per cent. A *position* is the state that a restarted daemon needs to continue at the
//! same byte. A *round* is one visit of a driver to one job.
//!
//! **Properties.** No value that leaves is NaN, infinite or larger than [`MAX_MAGNITUDE`]. Memory
//! and work per round are bounded for every input. The places where the input is cut into pieces do
//! not matter. Input that is refused or dropped is counted in [`Counters`]. A position that is garbage
//! costs a second reading of a file, never a panic (`tests/garbage.rs`).

mod chooser;
mod collector;
mod discover;
mod facts;
mod files;
mod guard;
mod json;
mod line;
mod metrics_file;
mod number;
mod output;
mod pattern;
pub mod prometheus;
pub mod push;
mod ranking;
mod reading;
mod root;
mod row;
mod run_length;
mod spec;
mod steps;
mod stored_path;
mod tail;
mod tensorboard;
mod terminal;
mod words;

pub use chooser::{Chooser, Selection};
pub use collector::{Collector, CollectorState, Update};
pub use discover::FolderListings;
pub use files::{FileTask, FilesReading};
pub use guard::{GuardedCollector, contain_panic};
pub use metrics_file::{FileState, MetricsFile};
pub use output::{OutputParser, OutputState};
pub use pattern::{Pattern, PatternError};
pub use ranking::Goal;
pub use reading::{Batch, Counters, MAX_MAGNITUDE, MetricReading, Progress, Unit};
pub use root::Root;
pub use run_length::RunLength;
pub use spec::{MetricSpec, MetricSpecError, Source};
pub use tail::{Change, FileTail, Position};
pub use tensorboard::EventFiles;
