//! Link options of the library.
//!
//! The part of libgcc that Rust needs is linked in, so that a program without libgcc does not load a second library
//! at its start. The library must never be unloaded, because programs keep addresses of its functions.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in ["-static-libgcc", "-Wl,-z,nodelete", "-Wl,-soname,libgainshare_inside.so"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
