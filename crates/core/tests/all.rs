//! The tests of the core in one program: what they share is compiled and linked once. `cargo xtask test`
//! runs each module as a program of its own.

mod play;
mod world;

mod cluster_deadlines;
mod control;
mod deadline;
mod deadline_moves;
mod decisions;
mod flowcon;
mod forecast;
mod gain;
mod gaming;
mod gpu;
mod predict;
mod predicted_ends;
mod specon;
mod teams;
