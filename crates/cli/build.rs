//! Link options that make the program smaller.
//!
//! Generic code is compiled once for each type, and much of the result is the same. Rust's own linker, which is the
//! default on x86-64 Linux, can keep one copy of equal functions. Another linker may not know the option, so
//! nothing is added where one was chosen.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    let usual_linker = env::var_os("RUSTC_LINKER").is_none() && is("CARGO_ENCODED_RUSTFLAGS", "");
    if is("TARGET", "x86_64-unknown-linux-gnu") && is("PROFILE", "release") && usual_linker {
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
    }
}
