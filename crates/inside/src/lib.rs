//! The library that `gainshare run` loads into a job, so that the job follows its share while it runs.
//!
//! **Problem.** A thread pool is sized when a program starts, and a GPU has no weights. Both can be changed later
//! only from inside the process, and no user should have to change a program for it.
//!
//! **How.** The dynamic linker loads this library before all others (`LD_PRELOAD`). The library defines some
//! functions of OpenMP ([`entry`]). Each of them first sets the team size that is in force ([`teams`]), as if the
//! program had called `omp_set_num_threads` itself, and then jumps to the real function ([`resolve`]). The wanted
//! numbers come from a page of shared memory ([`attach`], `gainshare-page`), without a system call. The size in force
//! changes only between two operations of a Python program ([`interpreter`]): libraries allocate memory for the
//! threads that they were asked for, and a larger team in the midst of an operation would write beyond it.
//!
//! In the same way the library answers for functions of the CUDA driver that launch work ([`gpu`]) or wait for it
//! ([`waits`]), if the user allows it. Programs ask `dlsym` for these functions or are linked with them ([`direct`]).
//!
//! Regions and launches are counted by the place that begins them ([`rhythm`]), so that the daemon can tell how fast a
//! job that prints nothing makes its steps.
//!
//! **Terms.** The *real* function is the one that the program would have called without this library. An *object*
//! is a loaded program or shared library.
//!
//! **Properties.** Without a page, with a page that is damaged or whose daemon is gone, and with
//! `GAINSHARE_INSIDE=0` the library changes nothing. It starts no thread, allocates no memory between two regions
//! and does not panic. Programs that are setuid, static or of another architecture never load it.

#![cfg_attr(any(test, not(target_arch = "x86_64")), allow(dead_code))]

mod attach;
mod backlog;
mod cuda;
mod devices;
mod direct;
#[cfg(all(target_arch = "x86_64", not(test)))]
mod entry;
mod gpu;
mod interpreter;
mod resolve;
mod rhythm;
mod teams;
mod waits;

#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = start;

/// Runs before the program's `main`.
extern "C" fn start() {
    attach::attach();
    gpu::read_switch();
    rhythm::start();
}
