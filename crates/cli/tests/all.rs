//! The tests of the command line in one program: what they share is compiled and linked once. `cargo xtask test`
//! runs each module as a program of its own.

mod common;

mod bad_input;
mod instance;
mod jobs;
mod ordinary_user;
mod replay;
mod run;
mod tasks;
mod terminal;
