//! The text files of the project, as the rules read them.

use crate::sh;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Text files by their path from the root.
#[derive(Debug, Default)]
pub(super) struct SourceTree {
    files: BTreeMap<String, String>,
}

impl SourceTree {
    /// Reads what git tracks and what it would track.
    pub(super) fn read(root: &Path) -> Result<SourceTree> {
        let mut git = Command::new("git");
        git.current_dir(root).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
        let listed = sh::output(&mut git).context("the rules apply to the files that git knows")?;
        let mut files = BTreeMap::new();
        for path in listed.split('\0').filter(|path| !path.is_empty()) {
            // Pictures are not text, and a file that was removed is still listed.
            if let Ok(text) = std::fs::read_to_string(root.join(path)) {
                files.insert(path.to_owned(), text);
            }
        }
        Ok(SourceTree { files })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    pub(super) fn get(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// A made-up tree.
    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> SourceTree {
        SourceTree { files: files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect() }
    }
}
