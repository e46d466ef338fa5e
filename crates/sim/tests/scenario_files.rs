//! Scenario files that are damaged: they are refused with a message, or read. Nothing panics.

use gainshare_core::fixtures::damaged;
use gainshare_sim::scenario::Scenario;
use proptest::prelude::*;

const FILES: [&str; 3] = [
    include_str!("../../../scenarios/cluster.toml"),
    include_str!("../../../scenarios/lab.toml"),
    include_str!("../../../scenarios/thesis.toml"),
];

/// Pieces of scenario files that lead deep into the parsers.
const PIECES: [&str; 5] = ["=", "[[job]]\n", "[[node]]\n", " = { from = 5, to = 1 }", "# "];

#[test]
fn the_files_themselves_are_valid() {
    for text in FILES {
        Scenario::parse("scenario.toml", text).unwrap();
    }
}

proptest! {
    #[test]
    fn no_scenario_file_makes_the_parser_panic(seed in any::<u64>()) {
        let bytes = damaged(&FILES, &PIECES, seed);
        if let Err(error) = Scenario::parse_bytes("scenario.toml", &bytes) {
            let text = error.to_string();
            prop_assert!(text.contains("scenario.toml"), "{text}");
        }
    }
}
