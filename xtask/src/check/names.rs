//! Names that must be those of the code: policies, and labels and annotations of `gainshare.dev`.
//!
//! A name in a page, a chart or a scenario that no program knows is a mistake that stays unnoticed until a
//! user copies it.

use super::tree::SourceTree;
use std::collections::BTreeSet;

/// Where the names of policies are taken from: the table that core writes.
const POLICY_TABLE: &str = "docs/policies.md";

const GROUP: &str = "gainshare.dev/";
/// Where the names of labels and annotations are defined.
const NAME_SOURCES: &str = "crates/kube-api/src/";
/// A name in the group that is not in [`NAME_SOURCES`]: a Go module.
const FURTHER_NAMES: [&str; 1] = ["testbed"];

/// All unknown names.
pub(super) fn check(tree: &SourceTree) -> Vec<String> {
    let mut findings = Vec::new();
    let policies = known_policies(tree);
    if policies.is_empty() {
        findings.push(format!("{POLICY_TABLE} names no policies: run `cargo xtask generate`"));
    }
    let names = known_names(tree);
    for (path, text) in tree.iter() {
        // The checker's tests make names up.
        if path.starts_with("xtask/src/check/") {
            continue;
        }
        for (index, line) in text.lines().enumerate() {
            let place = format!("{path}:{}", index + 1);
            let unknown = group_names(line).filter(|name| !names.contains(name) && !is_version(name));
            findings.extend(unknown.map(|name| {
                format!("{place}: {GROUP}{name} is defined nowhere in {NAME_SOURCES}: define it there, or correct it")
            }));
            if !policies.is_empty() && (has_policies(path)) {
                let unknown = policy_names(line).into_iter().filter(|name| !policies.contains(name));
                findings.extend(unknown.map(|name| format!("{place}: there is no policy `{name}`")));
            }
        }
        if path.starts_with("deploy/") && !policies.is_empty() {
            let unknown = enum_of_policy(text).into_iter().filter(|(_, name)| !policies.contains(name));
            findings.extend(unknown.map(|(line, name)| format!("{path}:{line}: there is no policy `{name}`")));
        }
    }
    findings
}

fn has_policies(path: &str) -> bool {
    // The guide makes up a policy.
    if path == "docs/write-a-policy.md" {
        return false;
    }
    let folder = ["docs/", "deploy/", "scenarios/"].iter().any(|folder| path.starts_with(folder));
    folder || path == "README.md" || path == "ARCHITECTURE.md"
}

/// The names of all policies.
fn known_policies(tree: &SourceTree) -> BTreeSet<String> {
    let page = tree.get(POLICY_TABLE).unwrap_or_default();
    let rows = page.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    rows.map(|(name, _)| name.to_owned()).collect()
}

/// The labels and annotations that the sources define.
fn known_names(tree: &SourceTree) -> BTreeSet<String> {
    let sources = tree.iter().filter(|(path, _)| path.starts_with(NAME_SOURCES) && !path.ends_with("_tests.rs"));
    let defined =
        sources.flat_map(|(_, text)| text.lines().filter(|line| line.contains("const ")).flat_map(group_names));
    defined.chain(FURTHER_NAMES.map(str::to_owned)).collect()
}

/// What follows `gainshare.dev/` in a line.
fn group_names(line: &str) -> impl Iterator<Item = String> + '_ {
    line.split(GROUP).skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && !"-._".contains(c)).unwrap_or(rest.len());
        // kubectl removes what has a dash at its end; a full stop ends a sentence.
        let name = rest[..end].trim_end_matches(['-', '.', '_']);
        (!name.is_empty()).then(|| name.to_owned())
    })
}

/// `v1alpha1` and the like.
fn is_version(name: &str) -> bool {
    name.strip_prefix('v').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

/// Policies that a line names: `--policy a,b`, `policy: a`, `policy = "a"`, `gainshare.dev/policy=a`.
fn policy_names(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, word) in line.match_indices("policy") {
        let before = &line[..at];
        let whole_word =
            !before.ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '-') || before.ends_with("--");
        if !whole_word {
            continue;
        }
        let after = &line[at + word.len()..];
        let value = if before.ends_with("--") {
            after.strip_prefix([' ', '='])
        } else {
            let after = after.trim_start_matches('"');
            let assigned =
                after.strip_prefix(": ").or_else(|| after.strip_prefix(" = ")).or_else(|| after.strip_prefix('='));
            // In prose a colon is followed by words: only a value that ends the line or its bracket is meant.
            assigned.filter(|value| is_single_value(value))
        };
        let names = value.map(|value| value.split_whitespace().next().unwrap_or_default()).unwrap_or_default();
        let names = names.split(',').map(|name| name.trim_matches(|c: char| !c.is_ascii_alphanumeric()).to_owned());
        found.extend(names.filter(|name| name.chars().next().is_some_and(|c| c.is_ascii_lowercase())));
    }
    found
}

fn is_single_value(value: &str) -> bool {
    let value = value.trim();
    let end = value.find([',', '}', ']', '#', '`', ')']).unwrap_or(value.len());
    let name = value[..end].trim().trim_matches(['"', '\'']);
    !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit())
}

/// The values that a definition of custom resources allows for a field `policy`, with their lines.
fn enum_of_policy(text: &str) -> Vec<(usize, String)> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate().filter(|(_, line)| line.trim() == "policy:") {
        let below = lines.iter().enumerate().skip(at + 1).take_while(|(_, below)| indent(below) > indent(line));
        let mut in_enum = false;
        for (index, below) in below {
            match below.trim() {
                "enum:" if indent(below) == indent(line) + 2 => in_enum = true,
                item if in_enum && item.starts_with("- ") => {
                    found.push((index + 1, item[2..].trim_matches('"').to_owned()))
                }
                _ => in_enum = false,
            }
        }
    }
    found.retain(|(_, name)| name != "null");
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "| policy | what |\n|---|---|\n| `na` | equal |\n| `flowcon` | growth |\n| `srpt` | bound |\n";
    const NAMES: &str = "pub const SHARE_LABEL: &str = \"gainshare.dev/share\";\n";

    fn findings(files: &[(&str, &str)]) -> Vec<String> {
        let known = [("docs/policies.md", TABLE), ("crates/kube-api/src/names.rs", NAMES)];
        check(&SourceTree::of(&[&known, files].concat()))
    }

    #[test]
    fn known_names_pass() {
        let page = "Run `gainshare sim a.toml --policy na,srpt`. The label `gainshare.dev/share`. A policy: something said.\n\
                    kubectl label pod a gainshare.dev/share-\npolicy: flowcon   # a comment\napiVersion: gainshare.dev/v1alpha1\n";
        assert_eq!(findings(&[("docs/a.md", page)]), Vec::<String>::new());
    }

    #[test]
    fn an_unknown_policy_is_refused_wherever_users_copy_from() {
        let found = findings(&[
            ("docs/a.md", "gainshare sim a.toml --policy na,flowcom\n"),
            ("scenarios/a.toml", "policy = \"magic\"\n"),
            ("deploy/a.yaml", "spec: {policy: sorcery}\n"),
            // The rule of `na` is no policy.
            ("docs/b.md", "policy: fair\n"),
        ]);
        let names: Vec<&str> = found.iter().filter_map(|line| line.split('`').nth(1)).collect();
        assert_eq!(names, ["sorcery", "flowcom", "fair", "magic"], "{found:?}");
    }

    #[test]
    fn an_unknown_policy_in_a_definition_is_refused() {
        let definition = "properties:\n  policy:\n    default: na\n    enum:\n    - na\n    - magic\n    type: string\n  level:\n    enum:\n    - odd\n";
        assert_eq!(findings(&[("deploy/crd.yaml", definition)]), ["deploy/crd.yaml:6: there is no policy `magic`"]);
    }

    #[test]
    fn an_unknown_label_is_refused_anywhere() {
        let found = findings(&[("crates/operator/src/a.rs", "let label = \"gainshare.dev/shrae\";\n")]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(
            found[0].starts_with("crates/operator/src/a.rs:1: gainshare.dev/shrae is defined nowhere"),
            "{found:?}"
        );
    }

    #[test]
    fn without_a_table_of_policies_the_rule_says_so() {
        assert!(check(&SourceTree::of(&[]))[0].contains("names no policies"));
    }
}
