//! Places in the code that pages name: files, folders and functions that were renamed or removed since.
//!
//! **What is found.** A path in a Markdown file, written as code and beginning with a folder of the root
//! (`crates/core/src/plan.rs`), must exist. A name after a path (`crates/core/src/plan.rs::Plan`), and each name in
//! brackets behind a file (`plan.rs` (`Plan`, `Reason`)), must be defined there. A file of which only the end of the
//! path is given may be any file that ends so.
//!
//! Exempt are the changelog, which names what was, and files that a guide tells its readers to make.

use super::tree::SourceTree;
use std::collections::BTreeSet;

/// The folders of the root with code and pages.
const ROOTS: [&str; 8] = ["crates", "xtask", "docs", "deploy", "bench", "testbed", "workloads", "scenarios"];
/// What a guide has its readers make: the page and the beginning of the path.
const MADE_BY_READERS: [(&str, &str); 1] = [("docs/write-a-policy.md", "crates/core/src/policies/young")];
/// The words that begin a definition in Rust.
const DEFINITIONS: [&str; 8] = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod"];

pub(super) fn check(tree: &SourceTree) -> Vec<String> {
    let folders = folders(tree);
    let mut findings = Vec::new();
    for (page, text) in tree.iter().filter(|(path, _)| path.ends_with(".md") && *path != "CHANGELOG.md") {
        for (index, line) in text.lines().enumerate() {
            let spans: Vec<&str> = line.split('`').skip(1).step_by(2).collect();
            let missing = spans.iter().filter_map(|span| missing_path(tree, &folders, page, span));
            let missing = missing.chain(missing_names(tree, line));
            findings.extend(missing.map(|what| format!("{page}:{}: {what}", index + 1)));
        }
    }
    findings
}

/// All folders, without a slash at the end.
fn folders(tree: &SourceTree) -> BTreeSet<&str> {
    let mut folders = BTreeSet::new();
    for (path, _) in tree.iter() {
        folders.extend(path.match_indices('/').map(|(at, _)| &path[..at]));
    }
    folders
}

/// What is wrong with a text in code marks, if it is a path from the root.
fn missing_path(tree: &SourceTree, folders: &BTreeSet<&str>, page: &str, span: &str) -> Option<String> {
    let (path, name) = span.split_once("::").map_or((span, None), |(path, name)| (path, Some(name)));
    let path = path.trim_end_matches('/');
    let is_path = path.chars().all(|c| c.is_ascii_alphanumeric() || "/._-".contains(c));
    let root = path.split_once('/').map(|(root, _)| root)?;
    let is_made = MADE_BY_READERS.iter().any(|(by, start)| *by == page && path.starts_with(start));
    if !is_path || !ROOTS.contains(&root) || is_made || folders.contains(path) {
        return None;
    }
    let Some(text) = tree.get(path) else { return Some(format!("there is no `{path}`")) };
    let name = name.filter(|name| !defines(text, name))?;
    Some(format!("`{path}` does not define `{name}`"))
}

/// The names in brackets behind a file that the file does not define.
fn missing_names(tree: &SourceTree, line: &str) -> Vec<String> {
    let mut missing = Vec::new();
    let mut rest = line;
    while let Some((before, after)) = rest.split_once("` (`") {
        rest = after;
        let file = before.rsplit('`').next().unwrap_or_default();
        let Some((names, _)) = after.split_once("`)").filter(|_| file.ends_with(".rs")) else { continue };
        let end = format!("/{file}");
        let texts: Vec<&str> =
            tree.iter().filter(|(path, _)| *path == file || path.ends_with(&end)).map(|(_, text)| text).collect();
        let unknown = names.split("`, `").filter(|name| !texts.iter().any(|text| defines(text, name)));
        missing.extend(unknown.map(|name| format!("no `{file}` defines `{name}`")));
    }
    missing
}

/// Whether a source defines this name.
fn defines(text: &str, name: &str) -> bool {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let mut before = "";
    for word in words {
        if word == name && DEFINITIONS.contains(&before) {
            return true;
        }
        before = word;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const CODE: (&str, &str) = ("crates/a/src/plan.rs", "pub struct Plan;\nimpl Plan {\n    fn decide() {}\n}\n");

    fn findings(page: &str, text: &str) -> Vec<String> {
        check(&SourceTree::of(&[CODE, (page, text)]))
    }

    #[test]
    fn paths_that_do_not_exist_are_found() {
        let text = "See `crates/a/src/plan.rs`, `crates/a/` and `crates/a/src`.\nNot `crates/a/src/gone.rs`.\n";
        assert_eq!(findings("docs/a.md", text), ["docs/a.md:2: there is no `crates/a/src/gone.rs`"]);
        assert_eq!(findings("CHANGELOG.md", text), Vec::<String>::new());
        assert_eq!(findings("docs/a.md", "`jobs/ID/job.json`, `crates/*/src`, `a/b`\n"), Vec::<String>::new());
    }

    #[test]
    fn names_that_a_file_does_not_define_are_found() {
        let text = "| `src/plan.rs` (`decide`, `Plan`) | `plan.rs` (`gone`, `decide`) → `plan.rs` (`impl`) |\n";
        let expected = ["docs/a.md:1: no `plan.rs` defines `gone`", "docs/a.md:1: no `plan.rs` defines `impl`"];
        assert_eq!(findings("docs/a.md", text), expected);
        let text = "`crates/a/src/plan.rs::decide` `crates/a/src/plan.rs::other`\n";
        let expected = ["docs/a.md:1: `crates/a/src/plan.rs` does not define `other`"];
        assert_eq!(findings("docs/a.md", text), expected);
    }

    #[test]
    fn files_that_a_guide_makes_are_left_out() {
        let text = "Make `crates/core/src/policies/young/mod.rs`.\n";
        assert_eq!(findings("docs/write-a-policy.md", text), Vec::<String>::new());
        assert_eq!(findings("docs/a.md", text).len(), 1);
    }
}
