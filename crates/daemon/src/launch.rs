//! Starts the processes that outlive the daemon: supervisors and the guard. Finds the library that jobs load.

use crate::config::DaemonConfig;
use gainshare_page::LIBRARY_FILE;
use nix::sys::resource::{Resource, getrlimit, rlim_t, setrlimit};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// The daemon has about ten files open for each job, and users may usually open 1,024. This is enough for several
/// thousand jobs.
const OPEN_FILES: rlim_t = 1 << 16;

/// The soft and the hard limit of open files that the daemon was started with, if it has raised the soft one.
static USERS_LIMITS: OnceLock<(rlim_t, rlim_t)> = OnceLock::new();

/// Lets this process open as many files as many jobs need. Jobs keep the limit of their user: some programs count on
/// it.
pub(crate) fn raise_open_files() {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return };
    let wanted = OPEN_FILES.min(hard);
    if wanted > soft && setrlimit(Resource::RLIMIT_NOFILE, wanted, hard).is_ok() {
        // Tests run several daemons in one process.
        let _ = USERS_LIMITS.set((soft, hard));
    }
}

/// The program that is run as supervisor and as guard.
pub(crate) fn program(config: &DaemonConfig) -> PathBuf {
    config.program.clone().or_else(|| std::env::current_exe().ok()).unwrap_or_else(|| PathBuf::from("gainshare"))
}

/// The library inside jobs, which lies beside this program; `Err`: why it cannot be used.
pub fn library_beside(program: &Path) -> Result<PathBuf, String> {
    let library = program.with_file_name(LIBRARY_FILE);
    if !library.is_file() {
        return Err(format!("{LIBRARY_FILE} is not beside gainshare"));
    }
    // The dynamic linker separates the names in LD_PRELOAD by these.
    if library.as_os_str().as_encoded_bytes().iter().any(|byte| matches!(byte, b' ' | b':' | b'\n' | b'\t')) {
        return Err(format!("{} contains a space or a colon", library.display()));
    }
    Ok(library)
}

/// Lets a process outlive the daemon: a session of its own, no terminal, and the limits of the user.
pub(crate) fn detach(command: &mut Command) {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/");
    let limits = USERS_LIMITS.get().copied();
    let prepare = move || {
        if let Some((soft, hard)) = limits {
            setrlimit(Resource::RLIMIT_NOFILE, soft, hard)?;
        }
        nix::unistd::setsid()?;
        Ok(())
    };
    // SAFETY: both are plain system calls, allowed between fork and exec.
    unsafe { command.pre_exec(prepare) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_may_open_more_files_than_its_jobs() {
        let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
        setrlimit(Resource::RLIMIT_NOFILE, 900, hard).unwrap();
        raise_open_files();
        assert_eq!(getrlimit(Resource::RLIMIT_NOFILE).unwrap(), (OPEN_FILES.min(hard), hard));
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("limit");
        let mut command = Command::new("/bin/sh");
        command.arg("-c").arg(format!("ulimit -S -n > {}", file.display()));
        detach(&mut command);
        assert!(command.status().unwrap().success());
        // The first one that was raised in this process.
        let (soft, _) = *USERS_LIMITS.get().unwrap();
        assert_eq!(std::fs::read_to_string(file).unwrap().trim(), soft.to_string());
    }

    #[test]
    fn the_library_lies_beside_the_program_in_a_folder_that_the_linker_understands() {
        let dir = tempfile::tempdir().unwrap();
        for (folder, problem) in [("plain", None), ("with space", Some("a space or a colon"))] {
            let program = dir.path().join(folder).join("gainshare");
            std::fs::create_dir(program.parent().unwrap()).unwrap();
            let missing = library_beside(&program).unwrap_err();
            assert_eq!(missing, format!("{LIBRARY_FILE} is not beside gainshare"));
            let library = program.with_file_name(LIBRARY_FILE);
            std::fs::write(&library, "").unwrap();
            match (library_beside(&program), problem) {
                (Ok(found), None) => assert_eq!(found, library),
                (Err(why), Some(part)) => assert!(why.contains(part), "{why}"),
                (found, _) => panic!("{folder}: {found:?}"),
            }
        }
    }
}
