//! The tests of the collectors in one program: what they share is compiled and linked once. `cargo xtask test`
//! runs each module as a program of its own.

mod collector;
mod files;
mod garbage;
mod output;
mod real_frameworks;
