//! Lists of known findings that may only shrink.
//!
//! A list counts findings by room: a crate, or a folder of the root. Counting by file would need a change
//! whenever a file is moved. More findings in a room than its list allows are refused; fewer are noted, and
//! `--tighten` lowers the number.

use crate::sh;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// One finding of a rule: its place (`path:line`) and what is wrong.
pub(super) struct Finding {
    pub(super) path: String,
    pub(super) line: usize,
    pub(super) what: String,
}

/// Findings that are shown of a room with too many.
const SHOWN: usize = 8;

/// The room of a file: its crate, its top folder, or `.` for the root.
pub(super) fn room(path: &str) -> String {
    let mut parts = path.split('/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some("crates"), Some(name), Some(_)) => format!("crates/{name}"),
        (Some(top), Some(_), _) => top.to_owned(),
        _ => ".".to_owned(),
    }
}

/// Allowed numbers of findings by room: lines `NUMBER ROOM`; `#` begins a comment.
fn parse(text: &str) -> BTreeMap<String, usize> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines
        .filter_map(|line| line.split_once(' ').and_then(|(n, room)| Some((room.to_owned(), n.parse().ok()?))))
        .collect()
}

/// What is not allowed by the list, in the words of a report.
fn excess(findings: &[Finding], allowed: &BTreeMap<String, usize>, list: &str) -> Vec<String> {
    let mut report = Vec::new();
    for (room, found) in by_room(findings) {
        let most = allowed.get(&room).copied().unwrap_or(0);
        if found.len() <= most {
            continue;
        }
        report
            .push(format!("{room} has {} of {list}, and {most} are allowed (the list may only shrink):", found.len()));
        let shown = found.iter().rev().take(SHOWN);
        report.extend(shown.map(|f| format!("  {}:{}: {}", f.path, f.line, f.what)));
    }
    report
}

fn by_room(findings: &[Finding]) -> BTreeMap<String, Vec<&Finding>> {
    let mut rooms: BTreeMap<String, Vec<&Finding>> = BTreeMap::new();
    findings.iter().for_each(|finding| rooms.entry(room(&finding.path)).or_default().push(finding));
    rooms
}

/// Judges findings by the list `xtask/NAME`, and lowers its numbers to what was found if `tighten`.
pub(super) fn judge(findings: &[Finding], name: &str, tighten: bool) -> Result<Vec<String>> {
    let path = list_path(name);
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let allowed = parse(&text);
    let report = excess(findings, &allowed, name);
    if tighten {
        let lowered = lowered(&allowed, findings);
        let lines: String = lowered.iter().map(|(room, n)| format!("{n} {room}\n")).collect();
        write_list(name, &format!("{}{lines}", comments(&text)))?;
    }
    Ok(report)
}

/// The list with every number lowered to what was found. Numbers never grow, and rooms without findings
/// leave the list.
fn lowered(allowed: &BTreeMap<String, usize>, findings: &[Finding]) -> BTreeMap<String, usize> {
    let found = by_room(findings);
    let lower = |(room, n): (&String, &usize)| Some((room.clone(), (*n).min(found.get(room)?.len())));
    allowed.iter().filter_map(lower).filter(|(_, n)| *n > 0).collect()
}

/// The comment lines at the head of a list.
pub(super) fn comments(text: &str) -> String {
    text.lines().take_while(|line| line.starts_with('#')).map(|line| format!("{line}\n")).collect()
}

pub(super) fn list_path(name: &str) -> PathBuf {
    sh::root().join("xtask").join(name)
}

pub(super) fn write_list(name: &str, text: &str) -> Result<()> {
    let path = list_path(name);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(path: &str) -> Finding {
        Finding { path: path.to_owned(), line: 3, what: "wide".to_owned() }
    }

    #[test]
    fn rooms_are_crates_and_top_folders() {
        assert_eq!(room("crates/core/src/lib.rs"), "crates/core");
        assert_eq!(room("docs/decisions/a.md"), "docs");
        assert_eq!(room("README.md"), ".");
    }

    #[test]
    fn more_than_is_allowed_is_refused_and_less_is_not() {
        let allowed = parse("# Known.\n1 crates/core\n5 docs\n");
        let findings = [finding("crates/core/src/a.rs"), finding("crates/core/src/b.rs"), finding("docs/a.md")];
        let report = excess(&findings, &allowed, "wide-lines.txt");
        assert_eq!(report.len(), 3, "{report:?}");
        assert!(report[0].starts_with("crates/core has 2 of wide-lines.txt, and 1 are allowed"), "{report:?}");
        assert!(report[1].contains("crates/core/src/b.rs:3: wide"), "{report:?}");
        assert!(excess(&findings[1..], &allowed, "wide-lines.txt").is_empty());
        assert!(!excess(&[finding("xtask/a.rs")], &allowed, "wide-lines.txt").is_empty(), "a room not listed has none");
    }

    #[test]
    fn lists_only_shrink() {
        let allowed = parse("1 crates/core\n5 docs\n2 xtask\n");
        let findings = [finding("crates/core/src/a.rs"), finding("crates/core/src/b.rs"), finding("docs/a.md")];
        assert_eq!(lowered(&allowed, &findings), parse("1 crates/core\n1 docs\n"));
    }
}
