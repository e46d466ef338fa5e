//! Starts the job's process: in a session of its own, inside its cgroups, on its CPUs, with its streams.
//!
//! Everything that must hold before the program's first instruction is done between fork and exec, so that no thread
//! or child of the job can ever be outside. A cgroup that cannot be joined is no reason not to train: it becomes a
//! note.

use super::terminal::{Pty, Standard, UserTerminal};
use crate::system::{self, CPUS, JobEntry};
use nix::errno::Errno;
use nix::sched::CpuSet;
use nix::unistd::Pid;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};

/// What to start.
pub struct Launch<'a> {
    pub command: &'a [OsString],
    pub cwd: Option<&'a Path>,
    /// What the environment is made from; `None`: our own.
    pub base_env: Option<&'a BTreeMap<String, String>>,
    /// Set in any case.
    pub env: &'a BTreeMap<String, String>,
    /// Set unless the variable is there already.
    pub env_if_absent: Vec<(&'a str, &'a str)>,
    pub procs_files: &'a [String],
    /// In the kernel's list format, such as `0-3,8`.
    pub cpus: Option<&'a str>,
}

/// A started process.
pub struct ChildProcess {
    pub pid: Pid,
    /// The job's output and where each belongs (1 or 2).
    pub pipes: Vec<(OwnedFd, i32)>,
    pub pty: Option<Pty>,
    /// What could not be done for it.
    pub notes: Vec<String>,
}

/// Why there is no process. Shells give 127 for what is not there and 126 for what cannot be run; so do we.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot start `{program}`: not found in PATH; check the spelling or give a full path")]
    NotInPath { program: String },
    #[error("cannot start `{program}`: no such file; check the path")]
    NoFile { program: String },
    #[error("cannot start `{program}`: it is a directory; give the program inside it")]
    Directory { program: String },
    #[error("cannot start `{program}`: not executable; `chmod +x` it, or name its interpreter")]
    NotExecutable { program: String },
    #[error("cannot start `{program}`: the interpreter named in its first line does not exist; correct that line")]
    NoInterpreter { program: String },
    #[error("cannot start `{program}` in {cwd}: no such directory; correct `cwd`")]
    NoDirectory { program: String, cwd: String },
    #[error("cannot start `{program}`: {source}")]
    Other { program: String, source: io::Error },
}

impl StartError {
    pub fn exit_code(&self) -> u8 {
        match self {
            StartError::NotInPath { .. } | StartError::NoFile { .. } | StartError::NoInterpreter { .. } => 127,
            _ => 126,
        }
    }
}

/// Looks for a program as `execvp` would, before anything is promised to anyone.
pub fn find_program(program: &OsString, path: Option<&OsString>, cwd: Option<&Path>) -> Result<(), StartError> {
    let name = || program.to_string_lossy().into_owned();
    let executable = |file: &Path| nix::unistd::access(file, nix::unistd::AccessFlags::X_OK).is_ok();
    if program.as_encoded_bytes().contains(&b'/') {
        let file = cwd.map_or_else(|| program.into(), |cwd| cwd.join(program));
        return match std::fs::metadata(&file) {
            Err(_) => Err(StartError::NoFile { program: name() }),
            Ok(found) if found.is_dir() => Err(StartError::Directory { program: name() }),
            Ok(_) if !executable(&file) => Err(StartError::NotExecutable { program: name() }),
            Ok(_) => Ok(()),
        };
    }
    // What `execvp` takes without a PATH.
    let fallback = OsString::from("/bin:/usr/bin");
    let mut seen = false;
    for dir in std::env::split_paths(path.unwrap_or(&fallback)) {
        let file = dir.join(program);
        if std::fs::metadata(&file).is_ok_and(|found| found.is_file()) {
            if executable(&file) {
                return Ok(());
            }
            seen = true;
        }
    }
    Err(if seen { StartError::NotExecutable { program: name() } } else { StartError::NotInPath { program: name() } })
}

/// Which streams the job gets.
pub enum Streams<'a> {
    /// Nothing to read, and all output to us.
    Detached,
    /// The streams of our caller; `UserTerminal` if a terminal is among them.
    Attached(Standard, Option<&'a UserTerminal>),
}

/// The variable with libraries that the dynamic linker loads into a program before all others.
const PRELOAD: &str = "LD_PRELOAD";

pub fn spawn(launch: &Launch, streams: &Streams) -> Result<ChildProcess, StartError> {
    let program = launch.command[0].to_string_lossy().into_owned();
    let other = |source: io::Error| StartError::Other { program: program.clone(), source };
    let mut notes = Vec::new();
    let mut command = Command::new(&launch.command[0]);
    command.args(&launch.command[1..]);
    if let Some(cwd) = launch.cwd {
        if !cwd.is_dir() {
            return Err(StartError::NoDirectory { program, cwd: cwd.display().to_string() });
        }
        command.current_dir(cwd);
    }
    set_environment(&mut command, launch);

    let pty = match streams {
        Streams::Attached(_, Some(user)) => Some(Pty::open(user).map_err(other)?),
        _ => None,
    };
    set_streams(&mut command, streams, pty.as_ref().map(|(_, slave)| slave)).map_err(other)?;

    // Opened here, because a child between fork and exec must not allocate.
    let mut groups: Vec<(u8, File)> = Vec::new();
    for (i, path) in launch.procs_files.iter().enumerate().take(usize::from(CPUS)) {
        match OpenOptions::new().write(true).open(path) {
            Ok(file) => groups.push((i as u8, file)),
            Err(error) => notes.push(format!("not in its cgroup: cannot open {path}: {error}")),
        }
    }
    let cpus = launch.cpus.and_then(|list| {
        parse_cpus(list).or_else(|| {
            notes.push(format!("not bound to its CPUs: `{list}` is not a list of CPUs"));
            None
        })
    });
    let (mut troubles, report) = io::pipe().map_err(other)?;
    let terminal = pty.as_ref().map(|(_, slave)| slave.try_clone()).transpose().map_err(other)?;
    system::enter_job(&mut command, JobEntry { groups, cpus, terminal, troubles: report });
    let mut child = command.spawn().map_err(|error| explain(error, launch, &program))?;
    // Ends the pipe on our side; the child's ended with its exec.
    drop(command);
    let mut bytes = Vec::new();
    let _ = troubles.read_to_end(&mut bytes);
    for trouble in bytes.chunks_exact(2) {
        let errno = Errno::from_raw(i32::from(trouble[1]));
        notes.push(if trouble[0] == CPUS {
            format!("not bound to its CPUs {}: {}", launch.cpus.unwrap_or_default(), errno.desc())
        } else {
            let path = &launch.procs_files[usize::from(trouble[0])];
            format!("not in its cgroup: cannot write {path}: {}", errno.desc())
        });
    }
    let mut pipes = Vec::new();
    pipes.extend(child.stdout.take().map(|out| (OwnedFd::from(out), 1)));
    pipes.extend(child.stderr.take().map(|err| (OwnedFd::from(err), 2)));
    Ok(ChildProcess { pid: Pid::from_raw(child.id() as i32), pipes, pty: pty.map(|(pty, _)| pty), notes })
}

fn set_environment(command: &mut Command, launch: &Launch) {
    if let Some(base) = launch.base_env {
        command.env_clear().envs(base);
    }
    command.envs(launch.env);
    let own = |name: &str| match (launch.env.get(name), launch.base_env) {
        (Some(value), _) => Some(OsString::from(value)),
        (None, Some(base)) => base.get(name).map(OsString::from),
        (None, None) => std::env::var_os(name),
    };
    for (name, value) in &launch.env_if_absent {
        match own(name) {
            // The user's libraries come first.
            Some(mut libraries) if *name == PRELOAD => {
                libraries.push(":");
                libraries.push(value);
                command.env(name, libraries);
            }
            Some(_) => {}
            None => {
                command.env(name, value);
            }
        }
    }
}

fn set_streams(command: &mut Command, streams: &Streams, slave: Option<&OwnedFd>) -> io::Result<()> {
    let Streams::Attached(standard, user) = streams else {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        return Ok(());
    };
    let stream = |is_terminal: bool| match slave.filter(|_| is_terminal) {
        Some(slave) => slave.try_clone().map(Stdio::from),
        None => Ok(Stdio::piped()),
    };
    command.stdout(stream(standard.output)?).stderr(stream(standard.error)?);
    command.stdin(match (standard.input, slave, user) {
        (true, Some(slave), _) => Stdio::from(slave.try_clone()?),
        // In a session of its own the job would not be stopped for reading a terminal that belongs to the shell now.
        (true, None, _) if !UserTerminal::new(*standard).in_foreground() => Stdio::null(),
        _ => Stdio::inherit(),
    });
    Ok(())
}

fn explain(error: io::Error, launch: &Launch, program: &str) -> StartError {
    let program = program.to_owned();
    match error.kind() {
        io::ErrorKind::NotFound => {
            let path = launch.env.get("PATH").or_else(|| launch.base_env.and_then(|base| base.get("PATH")));
            let path = path.map(OsString::from).or_else(|| std::env::var_os("PATH"));
            match find_program(&launch.command[0], path.as_ref(), launch.cwd) {
                Err(found) => found,
                // The file is there: what is missing is what its first line asks for.
                Ok(()) => StartError::NoInterpreter { program },
            }
        }
        io::ErrorKind::PermissionDenied => StartError::NotExecutable { program },
        _ => StartError::Other { program, source: error },
    }
}

fn parse_cpus(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        for cpu in first.trim().parse::<usize>().ok()?..=last.trim().parse::<usize>().ok()? {
            set.set(cpu).ok()?;
        }
    }
    Some(set)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn launch<'a>(command: &'a [OsString], env: &'a BTreeMap<String, String>, files: &'a [String]) -> Launch<'a> {
        Launch { command, cwd: None, base_env: None, env, env_if_absent: vec![], procs_files: files, cpus: None }
    }

    fn output(spawned: &mut ChildProcess) -> String {
        let mut text = String::new();
        File::from(spawned.pipes.remove(0).0).read_to_string(&mut text).unwrap();
        nix::sys::wait::waitpid(spawned.pid, None).unwrap();
        text
    }

    #[test]
    fn lists_of_cpus() {
        let set = parse_cpus("0-2,5").unwrap();
        let is_set: Vec<bool> = (0..7).map(|i| set.is_set(i).unwrap()).collect();
        assert_eq!(is_set, [true, true, true, false, false, true, false]);
        for bad in ["", "a", "1-", "3,,4", "100000"] {
            assert!(parse_cpus(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn the_child_leads_a_session_and_writes_itself_into_the_given_files() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("cgroup.procs").display().to_string();
        std::fs::write(&file, "").unwrap();
        let command: Vec<OsString> = ["sh", "-c", "ps -o sid= -p $$; echo $$"].map(OsString::from).into();
        let files = [file.clone(), "/nonexistent/cgroup.procs".to_owned()];
        let mut spawned = spawn(&launch(&command, &BTreeMap::new(), &files), &Streams::Detached).unwrap();
        let pid = spawned.pid.to_string();
        assert_eq!(output(&mut spawned).split_whitespace().collect::<Vec<_>>(), [&pid, &pid]);
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "0");
        assert_eq!(spawned.notes.len(), 1, "{:?}", spawned.notes);
        assert!(spawned.notes[0].contains("/nonexistent/cgroup.procs"));
    }

    #[test]
    fn a_cgroup_that_refuses_is_a_note_not_a_failure() {
        let command: Vec<OsString> = ["echo", "runs"].map(OsString::from).into();
        // A write to /dev/full fails with ENOSPC, as one to a cgroup does when it is not allowed to take the process.
        let files = ["/dev/full".to_owned()];
        let mut spawned = spawn(&launch(&command, &BTreeMap::new(), &files), &Streams::Detached).unwrap();
        assert_eq!(output(&mut spawned), "runs\n");
        assert!(spawned.notes[0].contains("/dev/full"), "{:?}", spawned.notes);
    }

    #[test]
    fn a_tuned_variable_never_replaces_the_users() {
        let base =
            BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned()), ("A".to_owned(), "user".to_owned())]);
        let env = BTreeMap::from([("B".to_owned(), "spec".to_owned())]);
        let command: Vec<OsString> = ["sh", "-c", "echo $A $B $C ${HOME-none}"].map(OsString::from).into();
        let mut launch = launch(&command, &env, &[]);
        launch.base_env = Some(&base);
        launch.env_if_absent = vec![("A", "tuned"), ("B", "tuned"), ("C", "tuned")];
        let mut spawned = spawn(&launch, &Streams::Detached).unwrap();
        assert_eq!(output(&mut spawned), "user spec tuned none\n");
    }

    #[test]
    fn a_library_to_load_comes_after_the_users() {
        let base = BTreeMap::from([("PATH".to_owned(), "/usr/bin:/bin".to_owned())]);
        let command: Vec<OsString> = ["sh", "-c", "echo $LD_PRELOAD 2>/dev/null"].map(OsString::from).into();
        for (users, expected) in [(None, "/no/ours.so\n"), (Some("/no/users.so"), "/no/users.so:/no/ours.so\n")] {
            let env: BTreeMap<_, _> =
                users.map(|users| ("LD_PRELOAD".to_owned(), users.to_owned())).into_iter().collect();
            let mut launch = launch(&command, &env, &[]);
            launch.base_env = Some(&base);
            launch.env_if_absent = vec![("LD_PRELOAD", "/no/ours.so")];
            assert_eq!(output(&mut spawn(&launch, &Streams::Detached).unwrap()), expected);
        }
    }

    #[test]
    fn each_reason_not_to_start_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name).into_os_string();
        std::fs::write(at("plain"), "data").unwrap();
        std::fs::write(at("script"), "#!/no/such/interpreter\n").unwrap();
        std::fs::set_permissions(at("script"), std::fs::Permissions::from_mode(0o755)).unwrap();
        let path = Some(dir.path().as_os_str().to_owned());
        let find = |program: OsString| find_program(&program, path.as_ref(), None);
        let message = |result: Result<(), StartError>| result.unwrap_err();

        let missing = message(find("nosuch".into()));
        assert_eq!(
            missing.to_string(),
            "cannot start `nosuch`: not found in PATH; check the spelling or give a full path"
        );
        assert_eq!(missing.exit_code(), 127);
        assert!(matches!(message(find("plain".into())), StartError::NotExecutable { .. }));
        assert!(matches!(message(find(at("plain"))), StartError::NotExecutable { .. }));
        assert_eq!(message(find(at("plain"))).exit_code(), 126);
        assert!(matches!(message(find(at("none"))), StartError::NoFile { .. }));
        assert!(matches!(message(find(dir.path().into())), StartError::Directory { .. }));
        assert!(find(at("script")).is_ok());

        let command = [at("script")];
        let env = BTreeMap::new();
        let error = spawn(&launch(&command, &env, &[]), &Streams::Detached).err().unwrap();
        assert!(matches!(error, StartError::NoInterpreter { .. }), "{error}");
        let mut elsewhere = launch(&command, &env, &[]);
        elsewhere.cwd = Some(Path::new("/no/such/dir"));
        let error = spawn(&elsewhere, &Streams::Detached).err().unwrap();
        assert!(matches!(error, StartError::NoDirectory { .. }), "{error}");
    }
}
