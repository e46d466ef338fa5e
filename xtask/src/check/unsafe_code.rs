//! `unsafe` code is in a few files, each with a reason, so that a reviewer knows where to read.
//!
//! The compiler checks memory safety everywhere else. A file that is not on the list must do without `unsafe`: it calls
//! a function of the listed file of its crate, or it is added to the list in a change that is reviewed as such.

use super::tree::SourceTree;

/// Files of programs and libraries, and folders whose whole purpose needs it.
const ALLOWED: [(&str, &str); 13] = [
    ("crates/cli/build.rs", "the version of the C library"),
    ("crates/cli/src/system.rs", "between fork and exec, signal handlers"),
    ("crates/daemon/src/faultsim/disk.rs", "tests: a modelled disk below SQLite"),
    ("crates/daemon/src/launch.rs", "between fork and exec"),
    ("crates/inside/", "a library inside other programs"),
    ("crates/limits/src/nvml.rs", "a library that is loaded at run time"),
    ("crates/limits/src/system.rs", "between fork and exec, extended attributes"),
    ("crates/cli/tests/terminal.rs", "tests: between fork and exec"),
    ("crates/daemon/tests/unsynced.rs", "tests: a recording file system below SQLite"),
    ("crates/limits/tests/", "tests: between fork and exec"),
    ("workloads/src/stop.rs", "signal handlers"),
    ("workloads/src/tensor.rs", "a product of matrices by a library"),
    ("xtask/src/testbed/process.rs", "between fork and exec"),
];

/// `unsafe` outside of the list, and entries of the list that no file needs any more.
pub(super) fn check(tree: &SourceTree) -> Vec<String> {
    let (mut findings, mut needed) = (Vec::new(), [false; ALLOWED.len()]);
    for (path, text) in tree.iter().filter(|(path, _)| path.ends_with(".rs")) {
        let Some(line) = text.lines().position(is_unsafe) else { continue };
        match ALLOWED.iter().position(|(allowed, _)| path.starts_with(allowed)) {
            Some(entry) => needed[entry] = true,
            None => findings.push(format!(
                "{path}:{}: `unsafe` is allowed in few files: use a function of the file of this crate in \
                 xtask/src/check/unsafe_code.rs, or add this file to the list with its reason",
                line + 1
            )),
        }
    }
    let unneeded = ALLOWED.iter().zip(needed).filter(|(_, is_needed)| !is_needed);
    findings.extend(unneeded.map(|((path, _), _)| {
        format!("{path} has no `unsafe` any more: remove it from the list in xtask/src/check/unsafe_code.rs")
    }));
    findings
}

/// Whether a line has the keyword: as a word of its own, in no comment and in no text of the program.
fn is_unsafe(line: &str) -> bool {
    let code = line.split("//").next().unwrap_or_default();
    code.match_indices("unsafe").any(|(at, word)| {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let before = &code[..at];
        let is_word = !before.ends_with(is_part) && !code[at + word.len()..].starts_with(is_part);
        is_word && before.matches('"').count().is_multiple_of(2)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree in which every entry of the list is needed, and these files.
    fn with(files: &[(&str, &str)]) -> Vec<String> {
        let listed = ALLOWED.map(|(path, _)| match path.strip_suffix('/') {
            Some(folder) => format!("{folder}/lib.rs"),
            None => path.to_owned(),
        });
        let mut all: Vec<(&str, &str)> =
            listed.iter().map(|path| (path.as_str(), "    unsafe { call() };\n")).collect();
        all.extend_from_slice(files);
        check(&SourceTree::of(&all))
    }

    #[test]
    fn files_of_the_list_may_be_unsafe_and_words_elsewhere_are_no_code() {
        let words = "// An unsafe word.\nlet unsafe_code = \"cache=unsafe\"; // unsafe\n#![allow(unsafe_code)]\n";
        let found = with(&[("crates/core/src/lib.rs", words), ("docs/guide.md", "an unsafe { word }\n")]);
        assert_eq!(found, Vec::<String>::new());
    }

    #[test]
    fn another_file_may_not() {
        for code in ["unsafe { call() };", "unsafe fn call() {}", "unsafe impl Send for T {}", "x = unsafe{ y };"] {
            let found = with(&[("crates/core/src/view.rs", &format!("\n{code}\n"))]);
            assert_eq!(found.len(), 1, "{code}: {found:?}");
            assert!(found[0].starts_with("crates/core/src/view.rs:2: `unsafe` is allowed in few files"), "{found:?}");
        }
    }

    #[test]
    fn an_entry_that_no_file_needs_is_removed() {
        let found = with(&[("workloads/src/stop.rs", "fn stop() {}\n")]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("workloads/src/stop.rs has no `unsafe` any more"), "{found:?}");
    }
}
