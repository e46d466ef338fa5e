//! Link options that make the program smaller.
//!
//! Generic code is compiled once for each type, and much of the result is the same. Rust's own linker, which is the
//! default on x86-64 Linux, can keep one copy of equal functions, and can write the table of addresses that are set at
//! the start in a form of a twentieth of its size. Another linker may not know these options, so nothing is added
//! where one was chosen. An older C library cannot read the second form.

#![allow(unsafe_code, reason = "a function of the C library")]

use std::env;

/// The first version of the GNU C library that reads packed addresses.
const PACKED_SINCE: (u32, u32) = (2, 36);

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=RUSTC_LINKER");
    let is = |name: &str, value: &str| env::var(name).is_ok_and(|found| found == value);
    let is_here = is("HOST", "x86_64-unknown-linux-gnu") && is("TARGET", "x86_64-unknown-linux-gnu");
    let usual_linker = env::var_os("RUSTC_LINKER").is_none() && is("CARGO_ENCODED_RUSTFLAGS", "");
    if is_here && is("PROFILE", "release") && usual_linker {
        println!("cargo::rustc-link-arg-bins=-Wl,--icf=all");
        if c_library().is_some_and(|version| version >= PACKED_SINCE) {
            println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
        }
    }
}

/// The version of this machine's C library.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
fn c_library() -> Option<(u32, u32)> {
    unsafe extern "C" {
        safe fn gnu_get_libc_version() -> *const std::ffi::c_char;
    }
    // SAFETY: the function returns a constant text that ends with a zero.
    let version = unsafe { std::ffi::CStr::from_ptr(gnu_get_libc_version()) };
    let (major, minor) = version.to_str().ok()?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
fn c_library() -> Option<(u32, u32)> {
    None
}
