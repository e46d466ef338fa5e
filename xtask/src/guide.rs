//! `cargo xtask guide`: follows `docs/write-a-policy.md` on a clean clone.
//!
//! **Problem.** The page names files, lines and commands. A change of the code makes the page wrong, and a reader is
//! the first to notice.
//!
//! **How.** The line above each block of the page is an instruction: a file to make, a line of a file and on which side
//! of it the block belongs, or commands to run. The program clones the last commit into a temporary folder, carries out
//! every instruction in the order of the page, and looks for the policy's name in what the commands print. Programs are
//! built in a target folder of their own, which is kept, so that a second run is quicker.
//!
//! A test of this module makes the page's edits on the text of this checkout, without a build.

use crate::programs::target_dir;
use crate::sh;
use anyhow::{Context, Result, bail, ensure};
use std::path::Path;
use std::process::{Command, Stdio};

const PAGE: &str = "docs/write-a-policy.md";
/// The policy that the page adds.
const POLICY: &str = "young";

/// What a command of the page must print: a part of the command, the text, and how often at least.
const PRINTED: [(&str, &str, usize); 3] = [(" sim ", POLICY, 1), ("help sim", POLICY, 1), ("-- crd", "- young", 2)];
/// What the page's commands must have written: the file, the text, and how often at least.
const WRITTEN: [(&str, &str, usize); 1] = [("docs/policies.md", "| `young` |", 2)];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Leaves out the commands that run tests.
    #[arg(long)]
    no_tests: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let folder = tempfile::Builder::new().prefix("gainshare-guide-").tempdir()?;
    let clone = folder.path().join("gainshare");
    eprintln!(
        "The guide is followed on a clone of the last commit; changes that are not committed are not part of it."
    );
    sh::run(Command::new("git").args(["clone", "--quiet"]).arg(sh::root()).arg(&clone))?;
    let target = target_dir()?.join("guide");
    let page = std::fs::read_to_string(clone.join(PAGE)).with_context(|| format!("cannot read {PAGE}"))?;
    let (mut edits, mut commands) = (0, Vec::new());
    for step in steps(&page)? {
        match step {
            Step::Edit(edit) => {
                edit.carry_out(&clone)?;
                edits += 1;
            }
            Step::Run(lines) => {
                for line in lines.iter().filter(|line| !(args.no_tests && line.starts_with("cargo test"))) {
                    run_line(line, &clone, &target)?;
                    commands.push(line.clone());
                }
            }
        }
    }
    for (part, text, _) in PRINTED {
        ensure!(commands.iter().any(|line| line.contains(part)), "{PAGE} has no command `{part}` that shows `{text}`");
    }
    for (path, text, times) in WRITTEN {
        let written = std::fs::read_to_string(clone.join(path)).with_context(|| format!("cannot read {path}"))?;
        ensure!(written.matches(text).count() >= times, "`{text}` is not in {path} after the commands of {PAGE}");
    }
    println!("{PAGE} holds: {edits} edits, {} commands, and `{POLICY}` is where the page says", commands.len());
    Ok(())
}

/// Runs one command line of the page, and checks what it prints.
fn run_line(line: &str, clone: &Path, target: &Path) -> Result<()> {
    eprintln!("$ {line}");
    let mut shell = Command::new("bash");
    shell.args(["-c", line]).current_dir(clone).env("CARGO_TARGET_DIR", target).stderr(Stdio::inherit());
    sh::remove_own_variables(&mut shell);
    let output = shell.output().with_context(|| format!("cannot start `{line}`"))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "`{line}` of {PAGE} failed: {}\n{printed}", output.status);
    for (_, text, times) in PRINTED.iter().filter(|(part, _, _)| line.contains(part)) {
        let found = printed.matches(text).count();
        ensure!(found >= *times, "`{line}` shows `{text}` {found} times instead of {times}:\n{printed}");
    }
    Ok(())
}

/// One instruction of the page with its block.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    Edit(Edit),
    /// Command lines, one after the other.
    Run(Vec<String>),
}

/// A change of one file.
#[derive(Debug, PartialEq, Eq)]
struct Edit {
    /// From the root of the checkout.
    path: String,
    place: Place,
    block: String,
}

/// Where a block belongs. A line is named without the spaces at its ends.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    NewFile,
    Above(String),
    Below(String),
    InPlaceOf(String),
}

impl Edit {
    fn carry_out(&self, root: &Path) -> Result<()> {
        let file = root.join(&self.path);
        let before = std::fs::read_to_string(&file).ok();
        let after = self.apply(before.as_deref())?;
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::write(&file, after).with_context(|| format!("cannot write {}", self.path))?;
        eprintln!("{}: {:?}", self.path, self.place);
        Ok(())
    }

    /// The file's text with the block, from its text before.
    fn apply(&self, before: Option<&str>) -> Result<String> {
        let (line, before) = match (&self.place, before) {
            (Place::NewFile, None) => return Ok(self.block.clone()),
            (Place::NewFile, Some(_)) => bail!("{} exists: {PAGE} is to make it", self.path),
            (_, None) => bail!("{}, which {PAGE} changes, does not exist", self.path),
            (Place::Above(line) | Place::Below(line) | Place::InPlaceOf(line), Some(before)) => (line, before),
        };
        let found = before.lines().filter(|text| text.trim() == line).count();
        ensure!(found == 1, "the line `{line}`, which {PAGE} names, is in {} {found} times", self.path);
        let mut after = String::new();
        for text in before.lines() {
            let (is_place, text) = (text.trim() == line, format!("{text}\n"));
            match &self.place {
                Place::Above(_) if is_place => after.extend([self.block.as_str(), text.as_str()]),
                Place::Below(_) if is_place => after.extend([text.as_str(), self.block.as_str()]),
                Place::InPlaceOf(_) if is_place => after.push_str(&self.block),
                _ => after.push_str(&text),
            }
        }
        Ok(after)
    }
}

/// The instructions of a page, in their order. Every block must have one.
fn steps(page: &str) -> Result<Vec<Step>> {
    let mut steps = Vec::new();
    let mut paragraph: Vec<&str> = Vec::new();
    let mut is_ended = true;
    let mut lines = page.lines().enumerate();
    while let Some((index, line)) = lines.next() {
        if line.starts_with("```") {
            let block: Vec<&str> = lines.by_ref().map(|(_, line)| line).take_while(|line| *line != "```").collect();
            let instruction = paragraph.join(" ");
            let step = step(&instruction, &block).with_context(|| {
                format!("{PAGE}:{}: the line above the block names no file and place: `{instruction}`", index + 1)
            })?;
            steps.push(step);
            paragraph.clear();
        } else if line.trim().is_empty() {
            is_ended = true;
        } else {
            if std::mem::take(&mut is_ended) {
                paragraph.clear();
            }
            paragraph.push(line.trim());
        }
    }
    Ok(steps)
}

fn step(instruction: &str, block: &[&str]) -> Option<Step> {
    if instruction == "Run:" {
        return Some(Step::Run(block.iter().map(|line| (*line).to_owned()).collect()));
    }
    let (path, place) = match instruction.split('`').collect::<Vec<_>>()[..] {
        ["Make the file ", path, ":"] => (path, Place::NewFile),
        ["In ", path, ", above the line ", line, ":"] => (path, Place::Above(line.to_owned())),
        ["In ", path, ", below the line ", line, ":"] => (path, Place::Below(line.to_owned())),
        ["In ", path, ", in place of the line ", line, ":"] => (path, Place::InPlaceOf(line.to_owned())),
        _ => return None,
    };
    let block: String = block.iter().flat_map(|line| [*line, "\n"]).collect();
    Some(Step::Edit(Edit { path: path.to_owned(), place, block }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const SMALL: &str = "# A page\n\nSome words.\n\nMake the file `a/b.rs`:\n\n```rust\nfn b() {}\n\n```\n\n\
                         In `c.rs`, below the line\n`mod a;`:\n\n```text\nmod b;\n```\n\nRun:\n\n```text\ntrue\nfalse\n```\n";

    #[test]
    fn a_page_is_read_as_instructions() {
        let edit = |path: &str, place, block: &str| Step::Edit(Edit { path: path.into(), place, block: block.into() });
        assert_eq!(
            steps(SMALL).unwrap(),
            [
                edit("a/b.rs", Place::NewFile, "fn b() {}\n\n"),
                edit("c.rs", Place::Below("mod a;".to_owned()), "mod b;\n"),
                Step::Run(vec!["true".to_owned(), "false".to_owned()]),
            ]
        );
        let vague = steps("In `c.rs`, somewhere:\n\n```text\nmod b;\n```\n").unwrap_err().to_string();
        assert!(vague.contains("write-a-policy.md:3") && vague.contains("somewhere"), "{vague}");
    }

    #[test]
    fn a_block_goes_to_its_place_and_a_line_must_be_there_once() {
        let apply = |place, before| Edit { path: "c.rs".into(), place, block: "new\n".into() }.apply(before);
        let before = Some("one\n    two\n");
        assert_eq!(apply(Place::Above("two".into()), before).unwrap(), "one\nnew\n    two\n");
        assert_eq!(apply(Place::Below("two".into()), before).unwrap(), "one\n    two\nnew\n");
        assert_eq!(apply(Place::InPlaceOf("one".into()), before).unwrap(), "new\n    two\n");
        assert_eq!(apply(Place::NewFile, None).unwrap(), "new\n");
        for (place, before) in [
            (Place::Above("three".into()), before),
            (Place::Below("one".into()), Some("one\none\n")),
            (Place::Below("one".into()), None),
            (Place::NewFile, before),
        ] {
            assert!(apply(place, before).is_err());
        }
    }

    #[test]
    fn the_edits_of_the_page_fit_this_checkout() {
        let page = std::fs::read_to_string(sh::root().join(PAGE)).unwrap();
        let mut changed: BTreeMap<String, String> = BTreeMap::new();
        let mut commands = Vec::new();
        for step in steps(&page).unwrap() {
            match step {
                Step::Edit(edit) => {
                    let read = || std::fs::read_to_string(sh::root().join(&edit.path)).ok();
                    let before = changed.get(&edit.path).cloned().or_else(read);
                    let after = edit.apply(before.as_deref()).unwrap();
                    changed.insert(edit.path, after);
                }
                Step::Run(lines) => commands.extend(lines),
            }
        }
        assert!(changed["crates/core/src/policies/table.rs"].contains("name: \"young\""));
        // A policy is one folder, its line in the list of modules, and one row.
        let files: Vec<&str> = changed.keys().map(String::as_str).collect();
        assert_eq!(
            files,
            ["mod.rs", "table.rs", "young/mod.rs"].map(|file| format!("crates/core/src/policies/{file}"))
        );
        for (part, _, _) in PRINTED {
            assert!(commands.iter().any(|line| line.contains(part)), "no command with `{part}`");
        }
    }
}
