//! Scenario files that are damaged: they are refused with a message, or read. Nothing panics.

use gainshare_sim::scenario::Scenario;
use proptest::prelude::*;

const FILES: [&str; 3] = [
    include_str!("../../../scenarios/cluster.toml"),
    include_str!("../../../scenarios/lab.toml"),
    include_str!("../../../scenarios/thesis.toml"),
];

/// Pieces that lead deep into the parsers.
const PIECES: [&str; 22] = [
    "0",
    "-1",
    "1e308",
    "-1e308",
    "nan",
    "inf",
    "18446744073709551615",
    "9223372036854775808",
    "0.0000001",
    "\n",
    "\"",
    "[",
    "]",
    "{",
    "}",
    "=",
    "[[job]]\n",
    "[[node]]\n",
    " = { from = 5, to = 1 }",
    "true",
    "# ",
    "€",
];

/// A valid text with some bytes taken out and others put in.
fn damaged(texts: &'static [&'static str]) -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        4 => proptest::sample::select(PIECES.to_vec()).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => proptest::collection::vec(any::<u8>(), 0..8),
    ];
    let edits = proptest::collection::vec((any::<proptest::sample::Index>(), 0usize..12, piece), 1..6);
    (proptest::sample::select(texts), edits).prop_map(|(text, edits)| {
        let mut bytes = text.as_bytes().to_vec();
        for (at, removed, piece) in edits {
            let at = at.index(bytes.len() + 1);
            let end = (at + removed).min(bytes.len());
            bytes.splice(at..end, piece);
        }
        bytes
    })
}

#[test]
fn the_files_themselves_are_valid() {
    for text in FILES {
        Scenario::parse("scenario.toml", text).unwrap();
    }
}

proptest! {
    #[test]
    fn no_scenario_file_makes_the_parser_panic(bytes in damaged(&FILES)) {
        if let Err(error) = Scenario::parse_bytes("scenario.toml", &bytes) {
            let text = error.to_string();
            prop_assert!(text.contains("scenario.toml"), "{text}");
        }
    }
}
