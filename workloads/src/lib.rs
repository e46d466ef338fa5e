//! Built-in trainers: five small models that learn for real.
//!
//! **Problem.** A scheduler of training jobs cannot be shown or tested without training jobs. They need real
//! losses that fall steeply and then flatten, real use of memory and CPU, output in the formats that frameworks
//! print, and checkpoints that can be trusted.
//!
//! **How.** This crate has such jobs without Python, downloads or data sets, so that they are part of one
//! static program. Its modules, from pure ones to those with side effects:
//!
//! - `rng`, `glyphs` and `sequences` make the data;
//! - `tensor`, `tape`, `nn`, `models` and `adam` are the mathematics;
//! - `trainer` is a run as a value, exact to the bit;
//! - `checkpoint`, `report`, `metrics_file` and `stop` read and write files, output and signals;
//! - `run` is the training loop of one process;
//! - `ps` trains in several processes, with parameter servers.
//!
//! **Properties.** The same options give the same losses. A run that was stopped or killed and is started
//! again prints the losses that it would have printed without the interruption. A run with one thread uses
//! one core.

mod adam;
mod args;
mod checkpoint;
mod glyphs;
mod last_step;
mod metrics_file;
mod models;
mod nn;
mod ps;
mod report;
mod rng;
mod run;
mod sequences;
mod stop;
mod tape;
mod tensor;
mod trainer;

pub use args::{Resume, TrainArgs};
pub use metrics_file::MetricsFormat;
pub use models::ModelKind;
pub use ps::{Mode, PsArgs, Role, train_ps};
pub use report::Format;
pub use run::train;
