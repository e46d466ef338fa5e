//! Link options of the library.
//!
//! The library must never be unloaded, because programs keep addresses of its functions.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    for argument in ["-Wl,-z,nodelete", "-Wl,-soname,libgainshare_inside.so"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}
