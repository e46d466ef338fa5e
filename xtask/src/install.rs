//! `cargo xtask install`: puts all programs and the library inside jobs into one folder.
//!
//! `cargo install` knows the programs of one package only. The daemon looks for the library in the folder of
//! `gainshare`, and `gainshare operator` and `gainshare agent` look there for the programs that they become.

use crate::programs::Programs;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// The files go to FOLDER/bin [default: as `cargo install`, $CARGO_INSTALL_ROOT, $CARGO_HOME or ~/.cargo].
    #[arg(long, value_name = "FOLDER")]
    root: Option<PathBuf>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = match &args.root {
        Some(root) => root.clone(),
        None => default_root().context("there is no $HOME: name a folder with --root")?,
    };
    let programs = Programs::build()?;
    let folder = copy(&programs, &root)?;
    println!("installed into {}; end a running daemon (`gainshare down`) to use the new one", folder.display());
    let is_found = std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|dir| dir == folder));
    if !is_found {
        println!("{} is not in your PATH: add it", folder.display());
    }
    Ok(())
}

fn default_root() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || variable("HOME").map(|home| home.join(".cargo"));
    variable("CARGO_INSTALL_ROOT").or_else(|| variable("CARGO_HOME")).or_else(home)
}

/// Copies the programs and the library to `root`/bin and returns that folder. A file takes the place of an older one
/// by a rename, because a program that runs cannot be overwritten and jobs that run use the older library.
fn copy(programs: &Programs, root: &Path) -> Result<PathBuf> {
    let folder = root.join("bin");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for from in programs.image_files() {
        let name = from.file_name().with_context(|| format!("{} has no name", from.display()))?;
        let (to, aside) = (folder.join(name), folder.join(format!(".{}.new", name.display())));
        std::fs::copy(&from, &aside)
            .and_then(|_| std::fs::rename(&aside, &to))
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        println!("{}", to.display());
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::programs::{LIBRARY, NAMES};
    use std::io::Read;
    use std::os::unix::fs::PermissionsExt;

    /// A build with the content `text` in each file.
    fn built(folder: &Path, text: &str) -> Programs {
        for name in NAMES.iter().chain([&LIBRARY]) {
            std::fs::write(folder.join(name), text).unwrap();
            std::fs::set_permissions(folder.join(name), PermissionsExt::from_mode(0o755)).unwrap();
        }
        Programs::in_folder(folder).unwrap()
    }

    #[test]
    fn programs_and_library_lie_in_one_folder_and_replace_older_ones() {
        let (build, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let folder = copy(&built(build.path(), "old"), root.path()).unwrap();
        assert_eq!(folder, root.path().join("bin"));
        let mut in_use = std::fs::File::open(folder.join(LIBRARY)).unwrap();
        copy(&built(build.path(), "new"), root.path()).unwrap();
        for name in NAMES.iter().chain([&LIBRARY]) {
            let path = folder.join(name);
            assert_eq!(std::fs::read_to_string(&path).unwrap(), "new", "{name}");
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o755, "{name}");
        }
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), NAMES.len() + 1, "nothing else is left there");
        let mut text = String::new();
        in_use.read_to_string(&mut text).unwrap();
        assert_eq!(text, "old", "a library in use is not changed");
    }

    #[test]
    fn a_build_without_the_library_is_refused() {
        let (build, root) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let programs = built(build.path(), "");
        std::fs::remove_file(build.path().join(LIBRARY)).unwrap();
        let error = format!("{:#}", copy(&programs, root.path()).unwrap_err());
        assert!(error.contains(LIBRARY), "{error}");
    }
}
