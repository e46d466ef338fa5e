//! The `gainshare` command.

fn main() {}
