//! Programs that users get have no fail points: the feature `fail-points` is for tests alone.
//!
//! With the feature, a variable of the environment makes the daemon or the operator end or panic at a chosen place.
//! Tests of a crate switch the feature on in `[dev-dependencies]`, which cargo leaves out of a build without tests.
//! The rule refuses every other way to switch it on.

use super::layers::members;
use super::tree::SourceTree;
use serde_json::Value;

const FEATURE: &str = "fail-points";

/// The files that build what users get.
const IMAGE_BUILDS: [&str; 2] = ["Dockerfile", "xtask/src/image.rs"];
/// What switches features on, or builds the programs together with tests, whose features they then have.
const WITH_FEATURES: [&str; 6] = ["features", "--all-targets", "--tests", "--examples", "--benches", "build_with"];
/// Settings of cargo that apply to every build.
const SETTINGS: [&str; 2] = ["Cargo.toml", ".cargo/config.toml"];

/// All ways to switch fail points on outside tests, in the output of `cargo metadata` and in the tree.
pub(super) fn check(metadata: &Value, tree: &SourceTree) -> Vec<String> {
    let mut findings = Vec::new();
    for package in members(metadata).values() {
        let name = package["name"].as_str().unwrap_or_default();
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            if dependency["kind"] != "dev" && strings(&dependency["features"]).any(is_switch) {
                let to = dependency["name"].as_str().unwrap_or_default();
                findings.push(format!(
                    "{name} depends on {to} with the feature {FEATURE}: only [dev-dependencies] may switch it on"
                ));
            }
        }
        for (feature, implied) in package["features"].as_object().into_iter().flatten() {
            if feature != FEATURE && strings(implied).any(is_switch) {
                findings.push(format!("the feature {feature} of {name} switches {FEATURE} on: remove that"));
            }
        }
    }
    for path in IMAGE_BUILDS {
        let text = tree.get(path).unwrap_or_default();
        findings.extend(lines_with(path, text, &WITH_FEATURES).map(|(place, word)| {
            format!("{place}: `{word}` builds programs with features of tests, such as {FEATURE}: leave it out")
        }));
    }
    for path in SETTINGS {
        let text = tree.get(path).unwrap_or_default();
        let found = lines_with(path, text, &[FEATURE, "debug-assertions = true"]);
        findings
            .extend(found.map(|(place, word)| {
                format!("{place}: `{word}` switches fail points on in every build: leave it out")
            }));
    }
    findings
}

/// Whether an entry of a list of features is this feature, of the crate itself or of another one.
fn is_switch(entry: &str) -> bool {
    entry == FEATURE || entry.rsplit_once('/').is_some_and(|(_, feature)| feature == FEATURE)
}

fn strings(list: &Value) -> impl Iterator<Item = &str> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str)
}

/// The places of lines, comments left out, that contain one of the words.
fn lines_with<'a>(path: &'a str, text: &'a str, words: &'a [&str]) -> impl Iterator<Item = (String, &'a str)> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with(['#', '/']));
    lines.flat_map(move |(index, line)| {
        let found = words.iter().filter(move |word| line.contains(**word));
        found.map(move |word| (format!("{path}:{}", index + 1), *word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A workspace of two crates: a program with this dependency on the other one and with these features.
    fn workspace(kind: Option<&str>, switched_on: &[&str], features: Value) -> Value {
        let dependency = json!({"name": "gainshare-daemon", "kind": kind, "features": switched_on});
        json!({
            "packages": [
                {"id": "gainshare", "name": "gainshare", "dependencies": [dependency], "features": features},
                {"id": "gainshare-daemon", "name": "gainshare-daemon", "dependencies": [], "features": {FEATURE: []}},
            ],
            "workspace_members": ["gainshare", "gainshare-daemon"],
        })
    }

    #[test]
    fn tests_may_switch_fail_points_on() {
        let files = [("Dockerfile", "# Without --features.\nRUN cargo build --release --locked --package gainshare\n")];
        let features = json!({FEATURE: ["gainshare-daemon/fail-points"], "default": ["color"], "color": []});
        let metadata = workspace(Some("dev"), &[FEATURE], features);
        assert_eq!(check(&metadata, &SourceTree::of(&files)), Vec::<String>::new());
    }

    #[test]
    fn a_dependency_or_another_feature_may_not() {
        let tree = SourceTree::default();
        for kind in [None, Some("build")] {
            assert_eq!(
                check(&workspace(kind, &["fixtures", FEATURE], json!({})), &tree),
                ["gainshare depends on gainshare-daemon with the feature fail-points: \
                  only [dev-dependencies] may switch it on"]
            );
        }
        for entry in ["fail-points", "gainshare-daemon/fail-points", "gainshare-daemon?/fail-points"] {
            assert_eq!(
                check(&workspace(None, &[], json!({"default": [entry]})), &tree),
                ["the feature default of gainshare switches fail-points on: remove that"]
            );
        }
    }

    #[test]
    fn no_build_of_an_image_switches_features_on() {
        let files = [
            ("Dockerfile", "FROM rust\nRUN cargo build --release --features gainshare-daemon/fail-points\n"),
            ("xtask/src/image.rs", "let programs = Programs::build_with(&[\"--examples\"])?;\n"),
            (".cargo/config.toml", "[alias]\nb = \"build --features fail-points\"\n"),
            ("Cargo.toml", "[profile.release]\ndebug-assertions = true\n"),
            ("docs/faults.md", "with the feature fail-points\n"),
        ];
        let found = check(&workspace(None, &[], json!({})), &SourceTree::of(&files));
        let places: Vec<&str> = found.iter().filter_map(|line| line.split(": ").next()).collect();
        assert_eq!(
            places,
            ["Dockerfile:2", "xtask/src/image.rs:1", "xtask/src/image.rs:1", "Cargo.toml:2", ".cargo/config.toml:2"],
            "{found:?}"
        );
    }
}
