//! What the simulator costs, as JSON on standard output: `cargo run --release -p gainshare-sim --example bench`.

fn main() {
    println!("{:#}", gainshare_sim::bench::run());
}
