//! `explain --dump` and `replay`: a decision of a running daemon is made again, and a file that cannot be
//! replayed says why.

use crate::common::Home;
use serde_json::Value;

#[test]
fn a_decision_of_a_running_daemon_is_made_again() {
    let home = Home::new();
    home.ok(&["run", "--detach", "--name", "sleeper", "--", "sleep", "300"]);
    home.wait_for_state("sleeper", "running");
    home.ok(&["explain", "sleeper", "--dump", "decision.json"]);
    let shown = home.ok(&["replay", "decision.json"]);
    assert!(shown.contains("the same plan as recorded, bit for bit"), "{shown}");
    let answer: Value = serde_json::from_str(&home.ok(&["replay", "decision.json", "-o", "json"])).unwrap();
    assert_eq!(answer["same"], true);

    let file = home.path().join("decision.json");
    let mut record: Value = serde_json::from_str(&std::fs::read_to_string(&file).unwrap()).unwrap();
    record["plan"]["generation"] = 4711.into();
    std::fs::write(&file, record.to_string()).unwrap();
    let outcome = home.run(&["replay", "decision.json"]);
    assert_eq!(outcome.code, 1);
    assert!(outcome.stdout.contains("generation: recorded 4711, replayed"), "{}", outcome.stdout);
    record["view"]["nodes"][0]["cores"] = 1e16.into();
    std::fs::write(&file, record.to_string()).unwrap();
    home.run(&["replay", "decision.json"]).fails_with(1, &["1e16 cores", "no machine has more"]);
    home.ok(&["stop", "sleeper"]);
}

#[test]
fn a_file_that_is_no_decision_is_named() {
    let home = Home::new();
    for (text, says) in [
        ("{", "make one with `gainshare explain"),
        ("[1, 2]", "make one with `gainshare explain"),
        ("{\"format\": 99}", "this version reads format"),
        ("{\"format\": 1, \"policy\": {}}", "damaged"),
    ] {
        std::fs::write(home.path().join("bad.json"), text).unwrap();
        home.run(&["replay", "bad.json"]).fails_with(1, &["bad.json", says]);
    }
    home.run(&["replay", "none.json"]).fails_with(1, &["cannot read", "none.json"]);
}
