//! The tests of the simulator in one program: what they share is compiled and linked once. `cargo xtask test`
//! runs each module as a program of its own.

mod deadlines;
mod papers;
mod qos;
mod scenario_files;
mod worlds;
