//! The project's programs, built once for everything that uses them: the test bed's image, the stories on a
//! cluster, the benchmarks, the generated reference.
//!
//! All programs are ordinary release binaries. `gainshare operator` and `gainshare agent` replace
//! themselves by the program of that task in the same folder, so the programs are always built and handed
//! on together.

use crate::sh;
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The programs of an installation. The first one is the entry point of the image.
pub(crate) const NAMES: [&str; 4] = ["gainshare", "gainshare-operator", "gainshare-node-agent", "kubectl-gainshare"];

/// The library inside jobs. The daemon looks for it in the folder of `gainshare`.
pub(crate) const LIBRARY: &str = "libgainshare_inside.so";

/// What cargo builds for the tests, beside the programs: the tests, and the one example that tests start. All other
/// examples belong to benchmarks, which build them; the lints compile them without making code.
pub(crate) const TESTS: [&str; 3] = ["--tests", "--example", "test_daemon"];

/// A folder that contains all programs.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    folder: PathBuf,
}

impl Programs {
    /// Builds the programs as users get them.
    pub(crate) fn build() -> Result<Programs> {
        Programs::build_with(&[])
    }

    /// Builds the programs together with all tests. Tests switch on features of some dependencies, so
    /// programs that are built apart from the tests would compile these dependencies a second time.
    pub(crate) fn build_with_tests() -> Result<Programs> {
        Programs::build_with(&TESTS)
    }

    /// Builds the programs and further targets of the workspace, such as `--example NAME`.
    pub(crate) fn build_with(targets: &[&str]) -> Result<Programs> {
        sh::run(sh::cargo().args(["build", "--release", "--workspace", "--bins", "--lib"]).args(targets))?;
        Programs::in_folder(&target_dir()?.join("release"))
    }

    /// The programs that lie in this folder.
    pub(crate) fn in_folder(folder: &Path) -> Result<Programs> {
        let programs = Programs { folder: folder.to_path_buf() };
        for file in programs.files() {
            ensure!(file.is_file(), "{} is missing: `cargo build --release --workspace` builds it", file.display());
        }
        Ok(programs)
    }

    /// Build products of the same profile lie beside the programs.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn files(&self) -> Vec<PathBuf> {
        NAMES.iter().map(|name| self.folder.join(name)).collect()
    }

    /// The library inside jobs, which is a build product of the same workspace.
    pub(crate) fn library(&self) -> PathBuf {
        self.folder.join(LIBRARY)
    }

    /// All files of an image: the programs, the entry point first, and the library that pods load.
    pub(crate) fn image_files(&self) -> Vec<PathBuf> {
        self.files().into_iter().chain([self.library()]).collect()
    }

    /// The program `gainshare`.
    pub(crate) fn gainshare(&self) -> PathBuf {
        self.folder.join(NAMES[0])
    }

    /// A program as a command.
    pub(crate) fn command(&self, name: &str) -> Command {
        Command::new(self.folder.join(name))
    }
}

/// Where cargo puts what it builds.
pub(crate) fn target_dir() -> Result<PathBuf> {
    let metadata = sh::output(sh::cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cargo metadata prints no JSON")?;
    let target = metadata["target_directory"].as_str().context("cargo metadata names no target directory")?;
    Ok(PathBuf::from(target))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_lacks_a_program_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in NAMES.iter().filter(|name| **name != "gainshare-operator") {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        let error = Programs::in_folder(folder.path()).unwrap_err().to_string();
        assert!(error.contains("gainshare-operator is missing"), "{error}");
    }
}
