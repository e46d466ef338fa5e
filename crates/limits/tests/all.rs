//! The tests of the limits in one program: what they share is compiled and linked once. `cargo xtask test`
//! runs each module as a program of its own.

#[cfg(feature = "docker")]
mod dockerd;
#[path = "../../../xtask/src/guest.rs"]
mod guest;
#[path = "suite/processes.rs"]
mod processes;
mod suite;

mod cgroup_tree;
mod conformance;
#[cfg(feature = "docker")]
mod docker_conformance;
#[cfg(feature = "docker")]
mod docker_events;
#[cfg(feature = "docker")]
mod docker_jobs;
#[cfg(feature = "docker")]
mod docker_limits;
#[cfg(feature = "docker")]
mod docker_logs;
#[cfg(feature = "docker")]
mod docker_v2_qemu;
#[cfg(feature = "fallback")]
mod fallback;
#[cfg(feature = "gpu")]
mod nvml;
mod v2_qemu;
