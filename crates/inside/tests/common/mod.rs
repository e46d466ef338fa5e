//! What the tests of the built library share: a page, programs that answer line by line, and the C compiler.
//!
//! The programs are compiled with the C compiler that links Rust programs too. Each answers one line on its
//! standard output for each line on its standard input, so that a test can change the page in between.
//!
//! `cargo xtask sanitize` runs these tests with programs that check memory and threads. Its variables name a library
//! with such checks (`GAINSHARE_TEST_LIBRARY`), a library that must be loaded before it (`GAINSHARE_TEST_PRELOAD`),
//! flags of the C compiler (`GAINSHARE_TEST_FLAGS`) and what starts each program (`GAINSHARE_TEST_RUNNER`).

#![allow(dead_code, unreachable_pub, reason = "each test file uses another part")]

use gainshare_page::rhythm::{Place, RHYTHM_SUFFIX, decode_rhythm, empty_rhythm};
use gainshare_page::{Orders, PAGE_BYTES, PAGE_VARIABLE, REPORT_SUFFIX, Report, SWITCH_VARIABLE};
use gainshare_page::{decode_report, empty_report, encode};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A page and its report in a folder of their own.
pub struct Page {
    pub dir: tempfile::TempDir,
}

impl Page {
    pub fn new(team: u32) -> Page {
        let page = Page { dir: tempfile::tempdir().unwrap() };
        std::fs::write(page.path(), page_bytes(team)).unwrap();
        std::fs::write(page.report_path(), empty_report()).unwrap();
        std::fs::write(page.rhythm_path(), empty_rhythm()).unwrap();
        page
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("page")
    }

    pub fn report_path(&self) -> PathBuf {
        self.dir.path().join(format!("page{REPORT_SUFFIX}"))
    }

    pub fn rhythm_path(&self) -> PathBuf {
        self.dir.path().join(format!("page{RHYTHM_SUFFIX}"))
    }

    /// The places that began work, the one with the fewest events first.
    pub fn places(&self) -> Vec<Place> {
        let mut places = decode_rhythm(&std::fs::read(self.rhythm_path()).unwrap()).unwrap();
        places.retain(|place| place.count > 0);
        places.sort_by_key(|place| place.count);
        places
    }

    /// Writes into the file that is mapped already.
    pub fn write(&self, bytes: &[u8]) {
        std::fs::OpenOptions::new().write(true).open(self.path()).unwrap().write_all_at(bytes, 0).unwrap();
    }

    pub fn set_team(&self, team: u32) {
        self.write(&page_bytes(team));
    }

    pub fn report(&self) -> Report {
        decode_report(&std::fs::read(self.report_path()).unwrap()).unwrap()
    }

    /// A program with the library and this page; OpenMP may use four threads.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let preload: Vec<String> =
            words("GAINSHARE_TEST_PRELOAD").into_iter().chain([library().to_str().unwrap().to_owned()]).collect();
        let runner = words("GAINSHARE_TEST_RUNNER");
        let mut command = match runner.split_first() {
            None => Command::new(program.as_ref()),
            Some((first, rest)) => {
                let mut command = Command::new(first);
                // The runner itself is not to load the library.
                command.args(rest).args(["env", &format!("LD_PRELOAD={}", preload.join(":"))]).arg(program.as_ref());
                command
            }
        };
        if runner.is_empty() {
            command.env("LD_PRELOAD", preload.join(":"));
        }
        command.env(PAGE_VARIABLE, self.path()).env("OMP_NUM_THREADS", "4").env_remove(SWITCH_VARIABLE);
        command
    }
}

/// The words in a variable of `cargo xtask sanitize`; none in an ordinary run.
pub fn words(variable: &str) -> Vec<String> {
    std::env::var(variable).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// How often the library is loaded for this number of programs: valgrind starts itself again for each of them.
pub fn loads(programs: u64) -> u64 {
    if words("GAINSHARE_TEST_RUNNER").first().is_some_and(|runner| runner == "valgrind") {
        2 * programs
    } else {
        programs
    }
}

pub fn page_bytes(team: u32) -> [u8; PAGE_BYTES] {
    encode(&Orders { team, ..Orders::default() }, monotonic_ns())
}

pub fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the argument is a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The library that was built with this test. Cargo puts it beside the test or one folder above.
pub fn library() -> PathBuf {
    if let [library] = words("GAINSHARE_TEST_LIBRARY").as_slice() {
        return library.into();
    }
    let test = std::env::current_exe().unwrap();
    let folders = test.ancestors().skip(1).take(2);
    let built = folders.map(|folder| folder.join(gainshare_page::LIBRARY_FILE)).filter(|file| file.is_file());
    built
        .max_by_key(|file| file.metadata().unwrap().modified().unwrap())
        .expect("build the library first: cargo build --release -p gainshare-inside")
}

/// Compiles a C program or library.
pub fn compile(dir: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (code, built) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&code, source).unwrap();
    let mut command = Command::new("cc");
    command.args(["-O1", "-o"]).args([&built, &code]).args(flags).args(words("GAINSHARE_TEST_FLAGS"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    built
}

/// A program that answers line by line.
pub struct Dialogue {
    pub child: Child,
    pub input: ChildStdin,
    pub output: BufReader<ChildStdout>,
}

impl Dialogue {
    pub fn start(command: &mut Command) -> Dialogue {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Dialogue { child, input, output }
    }

    pub fn ask(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }
}

impl Drop for Dialogue {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
