//! The built library, loaded into small C programs and into everyday commands.
//!
//! The programs are compiled with the C compiler that links Rust programs too. Each answers one line on its
//! standard output for each line on its standard input, so that a test can change the page in between.
//!
//! `cargo xtask sanitize` runs these tests with programs that check memory and threads. Its variables name a library
//! with such checks (`GAINSHARE_TEST_LIBRARY`), a library that must be loaded before it (`GAINSHARE_TEST_PRELOAD`),
//! flags of the C compiler (`GAINSHARE_TEST_FLAGS`) and what starts each program (`GAINSHARE_TEST_RUNNER`).

use gainshare_page::rhythm::{Place, RHYTHM_SUFFIX, decode_rhythm, empty_rhythm};
use gainshare_page::{
    GPU_ALL, GPU_ON, GPU_VARIABLE, Orders, PAGE_BYTES, PAGE_VARIABLE, REPORT_SUFFIX, Report, SWITCH_VARIABLE,
};
use gainshare_page::{decode_report, empty_report, encode};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// Prints the size of a team for each line that it reads.
const TEAMS: &str = r#"
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
int main(void) {
    char line[100];
    while (fgets(line, sizeof line, stdin)) {
        int given = 0, chosen = 0;
        if (line[0] == 's') omp_set_num_threads(atoi(line + 1));
        #pragma omp parallel reduction(+ : given)
        given += 1;
        #pragma omp parallel num_threads(3) reduction(+ : chosen)
        chosen += 1;
        printf("%d %d %d\n", given, chosen, omp_get_max_threads());
        fflush(stdout);
    }
}
"#;

/// A page and its report in a folder of their own.
struct Page {
    dir: tempfile::TempDir,
}

impl Page {
    fn new(team: u32) -> Page {
        let page = Page { dir: tempfile::tempdir().unwrap() };
        std::fs::write(page.path(), page_bytes(team)).unwrap();
        std::fs::write(page.report_path(), empty_report()).unwrap();
        std::fs::write(page.rhythm_path(), empty_rhythm()).unwrap();
        page
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("page")
    }

    fn report_path(&self) -> PathBuf {
        self.dir.path().join(format!("page{REPORT_SUFFIX}"))
    }

    fn rhythm_path(&self) -> PathBuf {
        self.dir.path().join(format!("page{RHYTHM_SUFFIX}"))
    }

    /// The places that began work, the one with the fewest events first.
    fn places(&self) -> Vec<Place> {
        let mut places = decode_rhythm(&std::fs::read(self.rhythm_path()).unwrap()).unwrap();
        places.retain(|place| place.count > 0);
        places.sort_by_key(|place| place.count);
        places
    }

    /// Writes into the file that is mapped already.
    fn write(&self, bytes: &[u8]) {
        std::fs::OpenOptions::new().write(true).open(self.path()).unwrap().write_all_at(bytes, 0).unwrap();
    }

    fn set_team(&self, team: u32) {
        self.write(&page_bytes(team));
    }

    fn report(&self) -> Report {
        decode_report(&std::fs::read(self.report_path()).unwrap()).unwrap()
    }

    /// A program with the library and this page; OpenMP may use four threads.
    fn command(&self, program: impl AsRef<Path>) -> Command {
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
fn words(variable: &str) -> Vec<String> {
    std::env::var(variable).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// How often the library is loaded for this number of programs: valgrind starts itself again for each of them.
fn loads(programs: u64) -> u64 {
    if words("GAINSHARE_TEST_RUNNER").first().is_some_and(|runner| runner == "valgrind") {
        2 * programs
    } else {
        programs
    }
}

fn page_bytes(team: u32) -> [u8; PAGE_BYTES] {
    encode(&Orders { team, ..Orders::default() }, monotonic_ns())
}

fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the argument is a valid timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The library that was built with this test. Cargo puts it beside the test or one folder above.
fn library() -> PathBuf {
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
fn compile(dir: &Path, name: &str, source: &str, flags: &[&str]) -> PathBuf {
    let (code, built) = (dir.join(format!("{name}.c")), dir.join(name));
    std::fs::write(&code, source).unwrap();
    let mut command = Command::new("cc");
    command.args(["-O1", "-o"]).args([&built, &code]).args(flags).args(words("GAINSHARE_TEST_FLAGS"));
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    built
}

/// A program that answers line by line.
struct Dialogue {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Dialogue {
    fn start(command: &mut Command) -> Dialogue {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Dialogue { child, input, output }
    }

    fn ask(&mut self, line: &str) -> String {
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

/// An *elastic* library, as PyTorch is: an operation asks for the number of threads before it opens a region.
const LIBTORCH: &str = r#"
#include <omp.h>
#ifdef WITH_MKL
int mkl_get_max_threads(void);
int MKL_Set_Num_Threads_Local(int);
void begin(void) { omp_get_max_threads(); omp_set_num_threads(mkl_get_max_threads()); }
int third(void) { return mkl_get_max_threads(); }
void choose(int threads) { omp_set_num_threads(threads), MKL_Set_Num_Threads_Local(threads); }
#else
void choose(int threads) { omp_set_num_threads(threads); }
void begin(void) {}
int third(void) { int n = 0;
    #pragma omp parallel num_threads(3) reduction(+ : n)
    n += 1;
    return n; }
#endif
int most(void) { return omp_get_max_threads(); }
int region(void) { int n = 0;
    #pragma omp parallel reduction(+ : n)
    n += 1;
    return n; }
"#;

/// A program with pending calls as the interpreter of Python has them: they run between two operations.
const INTERPRETER: &str = r#"
#include <stdio.h>
#include <stdlib.h>
void begin(void), choose(int);
int most(void), region(void), third(void);
static int (*pending)(void *);
static void *argument;
int Py_IsInitialized(void) { return 1; }
int Py_AddPendingCall(int (*call)(void *), void *data) { pending = call, argument = data; return 0; }
static void between(void) {
    int (*call)(void *) = pending;
    pending = 0;
    if (call) call(argument);
}
int main(void) {
    char line[100];
    begin();
    while (fgets(line, sizeof line, stdin)) {
        if (line[0] == 's') choose(atoi(line + 1));
        if (line[0] == 'b') begin();
        if (line[0] == 'o') {
            // An operation whose second half follows the next line.
            int expected = most();
            printf("%d\n", expected);
            fflush(stdout);
            fgets(line, sizeof line, stdin);
            printf("%d\n", region());
        } else {
            most(), region(), between();
            printf("%d %d %d\n", region(), third(), most());
        }
        fflush(stdout);
        between();
    }
}
"#;

/// The interpreter with the elastic library, ready to be started.
fn interpreter(page: &Page) -> PathBuf {
    let library = compile(page.dir.path(), "libtorch_test.so", LIBTORCH, &["-shared", "-fPIC", "-fopenmp"]);
    compile(page.dir.path(), "interpreter", INTERPRETER, &["-rdynamic", library.to_str().unwrap()])
}

/// The answer for a team of this size: a region with a size of its own has three threads.
fn teams(team: u32) -> String {
    format!("{team} 3 {team}")
}

#[test]
fn the_team_follows_the_page_both_ways_within_the_users_bound() {
    let page = Page::new(2);
    let mut job = Dialogue::start(&mut page.command(interpreter(&page)));
    assert_eq!(job.ask(""), teams(2));
    for (wanted, expected) in [(3, 3), (1, 1), (4, 4), (9, 4), (0, 4), (2, 2)] {
        page.set_team(wanted);
        assert_eq!(job.ask(""), teams(expected), "{wanted} wanted");
    }
    let report = page.report();
    assert_eq!((report.hooks, report.programs, report.team), (vec!["GNU OpenMP"], loads(1), 2));
    assert_eq!(report.regions, 21, "three regions for each line");
    assert_eq!(report.changes, 5, "2, 3, 1, 4 and 2");
}

#[test]
fn the_team_never_changes_within_an_operation() {
    let page = Page::new(1);
    let mut job = Dialogue::start(&mut page.command(interpreter(&page)));
    assert_eq!(job.ask(""), teams(1));
    let mut size = 1;
    for wanted in [4, 2, 3, 1, 4] {
        assert_eq!(job.ask("o"), size.to_string());
        page.set_team(wanted);
        assert_eq!(job.ask(""), size.to_string(), "memory for {size} threads, {wanted} wanted now");
        assert_eq!(job.ask(""), teams(wanted));
        size = wanted;
    }
}

#[test]
fn what_the_program_asks_for_is_a_bound() {
    let page = Page::new(2);
    let mut job = Dialogue::start(&mut page.command(interpreter(&page)));
    assert_eq!(job.ask("s1"), teams(1));
    page.set_team(4);
    assert_eq!(job.ask(""), teams(1), "the program asked for one");
    assert_eq!(job.ask("s3"), teams(3));
    page.set_team(2);
    assert_eq!(job.ask("s8"), teams(2));
}

#[test]
fn programs_that_are_not_elastic_keep_their_first_size() {
    let page = Page::new(2);
    let program = compile(page.dir.path(), "teams", TEAMS, &["-fopenmp"]);
    let mut job = Dialogue::start(&mut page.command(&program));
    assert_eq!(job.ask(""), teams(2));
    for wanted in [4, 1, 0] {
        page.set_team(wanted);
        assert_eq!(job.ask(""), teams(2), "memory for two threads, {wanted} wanted now");
    }
    assert_eq!((job.ask("s1"), job.ask("s8")), (teams(1), teams(2)));
}

/// A program that a launcher starts as one of several ranks, as `torchrun` and `mpirun` do.
fn rank(page: &Page, program: &Path, variable: &str, value: &str) -> Dialogue {
    let mut launcher = page.command("/bin/sh");
    launcher.args(["-c", r#"export "$0=$1"; exec "$2""#, variable, value]).arg(program);
    Dialogue::start(&mut launcher)
}

/// The page has the team of the whole job.
#[test]
fn ranks_on_one_machine_divide_the_team() {
    let page = Page::new(4);
    let program = compile(page.dir.path(), "teams", TEAMS, &["-fopenmp"]);
    let interpreter = interpreter(&page);
    for (variable, value, expected) in [
        ("LOCAL_WORLD_SIZE", "2", 2),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "4", 1),
        ("LOCAL_WORLD_SIZE", "8", 1),
        ("LOCAL_WORLD_SIZE", "1", 4),
        ("LOCAL_WORLD_SIZE", "0", 4),
        ("LOCAL_WORLD_SIZE", "", 4),
        ("LOCAL_WORLD_SIZE", "many", 4),
        ("LOCAL_WORLD_SIZE", "-2", 4),
        ("LOCAL_WORLD_SIZE", "99999999999999999999", 4),
    ] {
        page.set_team(4);
        assert_eq!(rank(&page, &program, variable, value).ask(""), teams(expected), "{variable}={value}");
    }
    let mut rank = rank(&page, &interpreter, "LOCAL_WORLD_SIZE", "2");
    assert_eq!(rank.ask(""), teams(2));
    for (wanted, expected) in [(2, 1), (8, 4), (1, 1), (6, 3), (0, 4)] {
        page.set_team(wanted);
        assert_eq!(rank.ask(""), teams(expected), "{wanted} wanted for two ranks");
    }
}

#[test]
fn a_rank_that_is_a_job_of_its_own_has_the_whole_team() {
    let page = Page::new(4);
    let program = compile(page.dir.path(), "teams", TEAMS, &["-fopenmp"]);
    page.set_team(4);
    let size = ("OMPI_COMM_WORLD_LOCAL_SIZE", "2");
    let mut job = Dialogue::start(page.command(&program).env(size.0, size.1));
    assert_eq!(job.ask(""), teams(4), "the job's first program is a rank already");
    assert_eq!(rank(&page, &program, size.0, size.1).ask(""), teams(4), "and so are the programs that it starts");
    std::fs::write(page.report_path(), "").unwrap();
    let mut job = Dialogue::start(page.command(&program).env(size.0, size.1));
    assert_eq!(job.ask(""), teams(2), "nothing is known of the first program");
}

#[test]
fn bad_pages_and_the_switch_change_nothing() {
    let page = Page::new(2);
    let program = compile(page.dir.path(), "teams", TEAMS, &["-fopenmp"]);
    let full = |command: &mut Command, why: &str| assert_eq!(Dialogue::start(command).ask(""), teams(4), "{why}");
    full(page.command(&program).env(SWITCH_VARIABLE, "0"), "switched off");
    full(page.command(&program).env_remove(PAGE_VARIABLE), "no page is named");
    full(page.command(&program).env(PAGE_VARIABLE, "/nonexistent/page"), "no such page");
    full(page.command(&program).env(PAGE_VARIABLE, "/dev/zero"), "a device");
    full(page.command(&program).env(PAGE_VARIABLE, "/".repeat(5000)), "a path that is too long");
    let mut other_version = page_bytes(2);
    other_version[8] += 1;
    for (bytes, why) in [
        (&[0x55; PAGE_BYTES][..], "garbage"),
        (&page_bytes(2)[..PAGE_BYTES - 1], "truncated"),
        (&[][..], "empty"),
        (&other_version[..], "another version"),
        (&encode(&Orders { team: 2, ..Orders::default() }, 1)[..], "stale"),
    ] {
        std::fs::write(page.path(), bytes).unwrap();
        full(&mut page.command(&program), why);
    }
}

#[test]
fn a_job_whose_daemon_is_gone_uses_what_it_asked_for() {
    let page = Page::new(1);
    let program = interpreter(&page);
    let mut job = Dialogue::start(&mut page.command(&program));
    assert_eq!(job.ask(""), teams(1));
    page.write(&encode(&Orders { team: 1, ..Orders::default() }, 1));
    assert_eq!(job.ask(""), teams(4), "the heartbeat has stopped");
    page.set_team(1);
    assert_eq!(job.ask(""), teams(1), "a new daemon goes on");
    page.write(&[0xab; PAGE_BYTES]);
    assert_eq!(job.ask(""), teams(4), "garbage");
}

#[test]
fn a_page_that_is_truncated_or_removed_does_not_end_the_job() {
    let page = Page::new(1);
    let program = interpreter(&page);
    let mut job = Dialogue::start(&mut page.command(&program));
    let mut other = Dialogue::start(&mut page.command(&program));
    assert_eq!((job.ask(""), other.ask("")), (teams(1), teams(1)));
    std::fs::write(page.report_path(), "").unwrap();
    assert_eq!(job.ask(""), teams(1), "nothing can be reported any more");
    std::fs::write(page.rhythm_path(), "").unwrap();
    assert_eq!(job.ask(""), teams(1), "nothing can be counted any more");
    std::fs::write(page.path(), "").unwrap();
    assert_eq!(job.ask(""), teams(4));
    std::fs::remove_file(page.path()).unwrap();
    assert_eq!(other.ask(""), teams(4));
}

/// A silent program: a step for each line, with three regions at one place and one at each of two others.
const STEPS: &str = r#"
#include <omp.h>
#include <stdio.h>
#include <string.h>
static volatile int work;
int main(void) {
    char line[100];
    while (fgets(line, sizeof line, stdin)) {
        for (int layer = 0; layer < 3; layer++) {
            #pragma omp parallel
            work += 1;
        }
        #pragma omp parallel
        work += 2;
        #pragma omp parallel
        work += 3;
        printf("\n");
        fflush(stdout);
    }
}
"#;

#[test]
fn regions_are_counted_by_the_place_that_opens_them() {
    let page = Page::new(2);
    let program = compile(page.dir.path(), "steps", STEPS, &["-fopenmp"]);
    let mut job = Dialogue::start(&mut page.command(&program));
    (0..20).for_each(|_| drop(job.ask("")));
    let places = page.places();
    // The addresses are not the same in each run: some of the three places may share a line.
    assert_eq!(places.iter().map(|place| place.count).sum::<u32>(), 100);
    assert!(places.len() <= 3, "{places:?}");
    let (rarest, stamps) = (places[0].count as usize, places[0].stamps());
    let times = rarest / 20;
    assert!(stamps.windows(times + 1).all(|w| w[times] - w[0] == 5), "five regions in each step: {places:?}");
}

#[test]
fn regions_of_several_threads_at_once_are_all_counted() {
    const PROGRAM: &str = r#"
#include <pthread.h>
#include <stdio.h>
static int total;
static void *run(void *unused) {
    for (int i = 0; i < 500; i++) {
        #pragma omp parallel num_threads(2)
        __sync_fetch_and_add(&total, 1);
    }
    return unused;
}
int main(void) {
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) pthread_create(threads + i, 0, run, 0);
    for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
    printf("%d\n", total);
}
"#;
    let page = Page::new(2);
    let program = compile(page.dir.path(), "threads", PROGRAM, &["-fopenmp", "-pthread"]);
    let output = page.command(program).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "4000\n");
    assert_eq!(page.report().regions, 2000);
    assert_eq!(page.places().iter().map(|place| place.count).collect::<Vec<u32>>(), [2000]);
}

#[test]
fn only_the_first_rank_counts_and_bad_tables_are_left_alone() {
    let page = Page::new(2);
    let program = compile(page.dir.path(), "steps", STEPS, &["-fopenmp"]);
    let asked = |command: &mut Command| Dialogue::start(command).ask("");
    asked(page.command(&program).env("RANK", "1"));
    asked(page.command(&program).env(SWITCH_VARIABLE, "0"));
    assert_eq!(page.places(), []);
    asked(page.command(&program).env("RANK", "0"));
    assert_eq!(page.places().iter().map(|place| place.count).sum::<u32>(), 5);
    let mut other_version = empty_rhythm();
    other_version[8] += 1;
    for bytes in [&[0x55; PAGE_BYTES][..], &other_version, &empty_rhythm()[..PAGE_BYTES - 1], &[]] {
        std::fs::write(page.rhythm_path(), bytes).unwrap();
        asked(&mut page.command(&program));
        assert_eq!(std::fs::read(page.rhythm_path()).unwrap(), bytes);
    }
    std::fs::write(page.rhythm_path(), empty_rhythm()).unwrap();
    let mut job = Dialogue::start(&mut page.command(&program));
    assert_eq!(job.ask(""), "");
    std::fs::write(page.rhythm_path(), "").unwrap();
    job.ask("");
    assert!(job.child.try_wait().unwrap().is_none(), "a table that is truncated does not end the job");
    assert_eq!(page.report().regions, 40, "regions are counted in the report all the same");
}

#[test]
fn openmp_that_only_one_library_sees_follows_too() {
    const WORK: &str = r#"
int work(void) {
    int team = 0;
    #pragma omp parallel reduction(+ : team)
    team += 1;
    return team;
}
"#;
    const HOST: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) { puts(dlerror()); return 1; }
    printf("%d\n", ((int (*)(void))dlsym(library, "work"))());
}
"#;
    let page = Page::new(2);
    let work = compile(page.dir.path(), "work.so", WORK, &["-shared", "-fPIC", "-fopenmp"]);
    let host = compile(page.dir.path(), "host", HOST, &["-ldl"]);
    let output = page.command(host).arg(work).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2\n");
}

#[test]
fn functions_of_llvm_get_all_their_arguments() {
    // A stand-in for LLVM's runtime: the machine of the tests may have none.
    const RUNTIME: &str = r#"
#include <stdarg.h>
#include <stdio.h>
static int size = 4;
int omp_get_max_threads(void) { return size; }
int omp_in_parallel(void) { return 0; }
void omp_set_num_threads(int n) { size = n; }
void __kmpc_fork_call(void *place, int count, void (*region)(int, long *), ...) {
    long values[10];
    va_list rest;
    va_start(rest, region);
    for (int i = 0; i < count; i++) values[i] = va_arg(rest, long);
    va_end(rest);
    region(size, values);
}
"#;
    const PROGRAM: &str = r#"
#include <stdio.h>
void __kmpc_fork_call(void *, int, void (*)(int, long *), ...);
static void region(int team, long *v) { printf("%d: %ld %ld %ld %ld %ld\n", team, v[0], v[1], v[2], v[3], v[4]); }
int main(void) { __kmpc_fork_call(0, 5, region, 11L, 12L, 13L, 14L, 15L); }
"#;
    let page = Page::new(2);
    let runtime = compile(page.dir.path(), "libfake.so", RUNTIME, &["-shared", "-fPIC"]);
    let program = compile(page.dir.path(), "program", PROGRAM, &[runtime.to_str().unwrap()]);
    let output = page.command(program).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "2: 11 12 13 14 15\n");
    assert_eq!(page.report().hooks, ["LLVM OpenMP"]);
}

#[test]
fn a_bound_that_comes_from_mkl_is_not_the_lowered_one() {
    // PyTorch with MKL sets OpenMP to the number that MKL names, and MKL asks OpenMP.
    const MKL: &str = r#"
#include <omp.h>
static int local;
int MKL_Set_Num_Threads_Local(int n) { int before = local; local = n; return before; }
int mkl_get_max_threads(void) { return local ? local : omp_get_max_threads(); }
"#;
    let page = Page::new(1);
    let build = |name, source, flags: &[&str]| compile(page.dir.path(), name, source, flags);
    let shared = ["-shared", "-fPIC", "-fopenmp", "-DWITH_MKL"];
    let mkl = build("libmkl.so", MKL, &shared);
    let library =
        build("libtorch_test.so", LIBTORCH, &[&shared[..], &["-Wl,--no-as-needed", mkl.to_str().unwrap()]].concat());
    let program = build("interpreter", INTERPRETER, &["-rdynamic", library.to_str().unwrap()]);
    // Compilers may need longer than a page lives without a heartbeat.
    page.set_team(1);
    let mut job = Dialogue::start(&mut page.command(program));
    assert_eq!(job.ask(""), "1 1 1");
    page.set_team(4);
    assert_eq!(job.ask(""), "4 4 4");
    page.set_team(2);
    assert_eq!(job.ask(""), "2 2 2");
    assert_eq!(job.ask("b"), "2 2 2", "another of its libraries begins and asks MKL, too");
    page.set_team(4);
    assert_eq!(job.ask(""), "4 4 4", "the answer of MKL was our own number");
    page.set_team(2);
    assert_eq!((job.ask(""), job.ask("s2")), ("2 2 2".into(), "2 2 2".into()));
    page.set_team(4);
    assert_eq!(job.ask(""), "2 2 2", "the program itself asked for two");
    assert_eq!(page.report().hooks, ["GNU OpenMP", "MKL"]);
}

#[test]
fn a_program_that_asks_weakly_for_openmp_gets_one_thread() {
    const PROGRAM: &str = r#"
#include <stdio.h>
__attribute__((weak)) int omp_get_max_threads(void);
int main(void) { printf("%d\n", omp_get_max_threads ? omp_get_max_threads() : 1); }
"#;
    let page = Page::new(2);
    let program = compile(page.dir.path(), "program", PROGRAM, &[]);
    let output = page.command(program).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "1\n");
}

#[test]
fn ten_thousand_forks_leak_nothing() {
    const PROGRAM: &str = r#"
#include <dirent.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>
static int files(void) { int n = 0; DIR *d = opendir("/proc/self/fd"); while (readdir(d)) n++; closedir(d); return n; }
static int maps(void) { int c, n = 0; FILE *f = fopen("/proc/self/maps", "r"); while ((c = getc(f)) != EOF) n += c == '\n'; fclose(f); return n; }
int main(void) {
    int files_before = (files(), files()), maps_before = (maps(), maps()), bad = 0;
    for (int i = 0; i < 10000; i++) {
        pid_t child = fork();
        if (child == 0) _exit(maps() > maps_before + 1);
        int status;
        waitpid(child, &status, 0);
        bad += status != 0;
    }
    printf("%d %d %d\n", bad, files() - files_before, maps() - maps_before);
}
"#;
    let page = Page::new(2);
    let program = compile(page.dir.path(), "forks", PROGRAM, &[]);
    let output = page.command(program).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "0 0 0\n");
    assert_eq!(page.report().programs, loads(1), "a forked child is the same program");
}

#[test]
fn everyday_programs_are_unharmed() {
    const HELLO: &str = r#"
#include <stdio.h>
int main(void) { puts("compiled and linked"); }
"#;
    let page = Page::new(1);
    std::fs::write(page.dir.path().join("hello.c"), HELLO).unwrap();
    let compile_and_run = "cc -O1 -Wall -o hello hello.c && ./hello && rm hello";
    let keep_history = "rm -rf r && git init -q r && cd r && cp ../hello.c . && git add hello.c && \
        git -c user.name=a -c user.email=a@b commit -qm one && git log --format=%s && git show HEAD:hello.c";
    let commands: [&[&str]; 7] = [
        &["bash", "-c", "x=$(echo a | tr a b); printf '%s %d\\n' $x $((6 * 7)); (exit 3); echo $?"],
        &["git", "--version"],
        &["sh", "-c", keep_history],
        &["cc", "--version"],
        &["sh", "-c", compile_and_run],
        &["sh", "-c", "seq 1000 | sort -r | head -1; kill -TERM $$"],
        &["ls", "/"],
    ];
    for words in commands {
        let alone = Command::new(words[0]).args(&words[1..]).current_dir(page.dir.path()).output().unwrap();
        let inside = page.command(words[0]).args(&words[1..]).current_dir(page.dir.path()).output().unwrap();
        assert_eq!(inside, alone, "{words:?}");
        let is_killed = alone.status.code().is_none();
        assert!(is_killed || alone.status.success(), "{words:?}: {}", String::from_utf8_lossy(&alone.stderr));
    }
    assert!(page.report().programs >= 15, "programs that others start load the library, too");
}

/// Runs a program with the library and without it; both must behave the same, and the library must not be loaded.
fn assert_never_loads(page: &Page, words: &[&str]) {
    let alone = Command::new(words[0]).args(&words[1..]).output().unwrap();
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env("LD_PRELOAD", library()).env(PAGE_VARIABLE, page.path());
    assert_eq!(command.output().unwrap(), alone, "{words:?}");
    assert!(alone.status.success() && !alone.stdout.is_empty(), "{words:?}: {alone:?}");
    assert_eq!(page.report().programs, 0, "{words:?}");
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_static_program_runs_as_without_the_library() {
    const PROGRAM: &str = r#"
static long call(long number, long a, const void *b, long c) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c) : "rcx", "r11", "memory");
    return result;
}
void _start(void) { call(1, 1, "static\n", 7); call(60, 0, 0, 0); }
"#;
    let page = Page::new(1);
    let flags = ["-static", "-nostdlib", "-nostartfiles", "-fno-stack-protector"];
    let (code, program) = (page.dir.path().join("program.c"), page.dir.path().join("program"));
    std::fs::write(&code, PROGRAM).unwrap();
    // Without the flags of `cargo xtask sanitize`: checks need a C library.
    let built = Command::new("cc").args(flags).arg("-o").args([&program, &code]).status().unwrap();
    assert!(built.success());
    assert_never_loads(&page, &[program.to_str().unwrap()]);
}

#[test]
#[ignore = "needs busybox"]
fn static_busybox_runs_as_without_the_library() {
    let page = Page::new(1);
    let script = "echo a | busybox tr a b; busybox seq 1000 | busybox sort -r | busybox head -n 1";
    // The shell, too, is busybox's own.
    assert_never_loads(&page, &["busybox", "sh", "-c", script]);
}

#[test]
#[ignore = "needs root"]
fn a_setuid_program_runs_as_without_the_library() {
    use std::os::unix::fs::PermissionsExt;
    const PROGRAM: &str = r#"
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(void) {
    char line[4096];
    int is_loaded = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && fgets(line, sizeof line, maps)) is_loaded |= strstr(line, "gainshare_inside") != 0;
    printf("%d %d\n", geteuid(), is_loaded);
}
"#;
    let page = Page::new(1);
    let folder = page.dir.path();
    let ours = folder.join(gainshare_page::LIBRARY_FILE);
    std::fs::copy(library(), &ours).unwrap();
    let program = compile(folder, "program", PROGRAM, &[]);
    let set_mode = |path: &Path, mode| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    set_mode(folder, 0o755);
    set_mode(&ours, 0o755);
    for (mode, expected) in [(0o755, "65534 1\n"), (0o4755, "0 0\n")] {
        set_mode(&program, mode);
        let mut command = Command::new("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "env"]);
        command.arg(format!("LD_PRELOAD={}", ours.display())).arg(&program);
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "mode {mode:o}");
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "mode {mode:o}");
    }
}

/// Images of pods have older C libraries than the machine on which the library is built.
#[test]
fn the_library_needs_no_newer_c_library_than_2_34() {
    let bytes = std::fs::read(library()).unwrap();
    let text = String::from_utf8_lossy(&bytes);
    let minors = text.split("GLIBC_2.").skip(1).map(|rest| {
        let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
        digits.parse::<u32>().expect("a version has a number")
    });
    let minors: std::collections::BTreeSet<u32> = minors.collect();
    assert!(minors.contains(&2) && minors.iter().all(|minor| *minor <= 34), "{minors:?}");
}

/// The place of the library in pods has a part that only the dynamic linker of GNU understands.
#[test]
fn the_linker_finds_the_library_by_the_name_of_its_folder() {
    let page = Page::new(2);
    for folder in ["lib64", "lib", "lib/x86_64-linux-gnu"] {
        let folder = page.dir.path().join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::copy(library(), folder.join("libgainshare_inside.so")).unwrap();
    }
    let preload = page.dir.path().join("$LIB/libgainshare_inside.so");
    let output = Command::new("cat").arg("/proc/self/maps").env("LD_PRELOAD", preload).output().unwrap();
    let maps = String::from_utf8_lossy(&output.stdout);
    assert!(maps.contains("libgainshare_inside.so") && output.stderr.is_empty(), "{maps}");
}

#[test]
fn a_bus_error_of_the_program_itself_still_ends_it() {
    use std::os::unix::process::ExitStatusExt;
    let page = Page::new(1);
    let status = page.command("/bin/sh").args(["-c", "kill -BUS $$"]).status().unwrap();
    assert_eq!(status.signal(), Some(libc::SIGBUS));
}

/// The functions of a CUDA driver that a program finds, as far as this library catches them. Device n lies on bus n.
/// The stream at address 16 records a graph: `asked` counts the calls that would break its recording. After `record(1)`
/// some stream records in the usual mode, and every wait in this mode breaks it: `broken` counts such waits, as an H200
/// with driver 580 does. `launched` counts launches, and `last` adds the arguments of the last launch of a kernel up.
const DRIVER: &str = r#"
#include <string.h>
#include <unistd.h>
static int waits, calls, launches, sum, current, recording, breaks;
static __thread int mode;
int cuThreadExchangeStreamCaptureMode(int *other) { int before = mode; mode = *other; *other = before; return 0; }
int record(int now) { recording = now; return 0; }
int broken(void) { return breaks + 1000 * mode; }
static int checked(void) { int is_bad = recording && mode != 2; calls++; breaks += is_bad; return is_bad ? 900 : 0; }
static int launch(long arguments) { launches++; sum = arguments; usleep(200); return 0; }
#define GEOMETRY unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h
#define KERNEL(NAME) int NAME(void *f, GEOMETRY, void *stream, void **parameters, void **extra) { \
    return launch(a + b + c + d + e + g + h + (long)parameters + (long)extra); }
#define COOPERATIVE(NAME) int NAME(void *f, GEOMETRY, void *stream, void **parameters) { \
    return launch(a + b + c + d + e + g + h + (long)parameters); }
#define EX(NAME) int NAME(const unsigned *config, void *f, void **parameters, void **extra) { \
    return launch(config[0] + (long)parameters + (long)extra); }
#define GRAPH(NAME) int NAME(void *graph, void *stream) { return launch(0); }
KERNEL(cuLaunchKernel)
KERNEL(cuLaunchKernel_ptsz)
COOPERATIVE(cuLaunchCooperativeKernel)
COOPERATIVE(cuLaunchCooperativeKernel_ptsz)
EX(cuLaunchKernelEx)
EX(cuLaunchKernelEx_ptsz)
GRAPH(cuGraphLaunch)
GRAPH(cuGraphLaunch_ptsz)
int cuStreamSynchronize(void *stream) { usleep(1000); return checked() | (stream == (void *)16 ? 900 : 0); }
int cuStreamSynchronize_ptsz(void *stream) { return cuStreamSynchronize(stream); }
int cuCtxSynchronize(void) { return checked(); }
int cuEventCreate(void **event, unsigned flags) { calls++; *event = &waits; return 0; }
int cuEventRecord(void *event, void *stream) { calls++; return stream == (void *)16 ? 900 : 0; }
int cuEventRecord_ptsz(void *event, void *stream) { return cuEventRecord(event, stream); }
int cuEventSynchronize(void *event) { waits++; return checked(); }
int waited(void) { return waits; }
int asked(void) { return calls; }
int launched(void) { return launches; }
int last(void) { return sum; }
int cuStreamIsCapturing(void *stream, int *status) { *status = stream == (void *)16; return 0; }
int cuStreamIsCapturing_ptsz(void *stream, int *status) { return cuStreamIsCapturing(stream, status); }
int cuDevicePrimaryCtxRetain(void **context, int device) { current = device; return 0; }
int cuCtxGetDevice(int *device) { *device = current; return 0; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 33 ? device : 0; return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
    *found = !strcmp(name, "cuLaunchKernel") ? (void *)cuLaunchKernel
           : !strcmp(name, "cuGraphLaunch") ? (void *)cuGraphLaunch
           : !strcmp(name, "cuStreamSynchronize") ? (void *)cuStreamSynchronize
           : !strcmp(name, "cuDevicePrimaryCtxRetain") ? (void *)cuDevicePrimaryCtxRetain : 0;
    return *found ? 0 : 500;
}
"#;

/// `r N` retains device N, `l N` launches N kernels, `g N` N graphs, `c N` records N kernels, `y` waits; `b 1` begins a
/// recording elsewhere and `b 0` ends it; `w` counts waits for events, `k` calls that would break a recording of the
/// same stream, `x` waits that broke the one elsewhere; each answers by one line.
const LAUNCHES: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **words) {
    void *driver = dlopen(words[1], RTLD_NOW);
    int (*get)(const char *, void **, int, unsigned long long, int *) = dlsym(driver, "cuGetProcAddress_v2");
    int (*launch)(void *, int, int, int, int, int, int, int, void *, void **, void **);
    int (*graph)(void *, void *), (*retain)(void **, int), (*wait)(void *);
    get("cuStreamSynchronize", (void **)&wait, 12000, 0, 0);
    get("cuLaunchKernel", (void **)&launch, 12000, 0, 0);
    get("cuGraphLaunch", (void **)&graph, 12000, 0, 0);
    get("cuDevicePrimaryCtxRetain", (void **)&retain, 12000, 0, 0);
    char line[100];
    while (fgets(line, sizeof line, stdin)) {
        int number = atoi(line + 1), result = 0;
        void *context, *stream = line[0] == 'c' ? (void *)16 : 0;
        if (line[0] == 'r') result = retain(&context, number);
        else if (line[0] == 'y') result = wait(0);
        else if (line[0] == 'w') result = ((int (*)(void))dlsym(driver, "waited"))();
        else if (line[0] == 'k') result = ((int (*)(void))dlsym(driver, "asked"))();
        else if (line[0] == 'b') result = ((int (*)(int))dlsym(driver, "record"))(number);
        else if (line[0] == 'x') result = ((int (*)(void))dlsym(driver, "broken"))();
        else if (line[0] == 'g') for (int i = 0; i < number; i++) result |= graph(driver, 0);
        else for (int i = 0; i < number; i++) result |= launch(0, 1, 1, 1, 1, 1, 1, 0, stream, 0, 0);
        printf("%d\n", result);
        fflush(stdout);
    }
}
"#;

/// A page that grants a tenth of the GPU.
fn tenth_of_gpu() -> [u8; PAGE_BYTES] {
    encode(&Orders { gpu_share: 100_000, gpu_jobs: 1, ..Orders::default() }, monotonic_ns())
}

/// The program above on its driver, with a page that grants a tenth of the GPU.
fn launching(page: &Page, variables: &[(&str, &str)]) -> Dialogue {
    let driver = compile(page.dir.path(), "libdriver.so", DRIVER, &["-shared", "-fPIC"]);
    let program = compile(page.dir.path(), "launches", LAUNCHES, &["-ldl"]);
    page.write(&tenth_of_gpu());
    Dialogue::start(page.command(program).arg(driver).envs(variables.iter().copied()))
}

/// A program that is linked with the driver, as code that a compiler makes is. A letter names the function, `t` a name
/// that `dlsym` is asked for; each line answers with the result, the number of launches in the driver, and the sum of
/// the last launch's arguments.
const LINKED: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
typedef int Launch(void *, int, int, int, int, int, int, int, void *, void *, void *);
typedef int Cooperative(void *, int, int, int, int, int, int, int, void *, void *);
typedef int Ex(const unsigned *, void *, void *, void *);
typedef int Graph(void *, void *);
Launch cuLaunchKernel, cuLaunchKernel_ptsz;
Cooperative cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz;
Ex cuLaunchKernelEx, cuLaunchKernelEx_ptsz;
Graph cuGraphLaunch, cuGraphLaunch_ptsz;
int cuStreamSynchronize(void *), cuCtxSynchronize(void), cuDevicePrimaryCtxRetain(void **, int);
int launched(void), last(void);
static int call(char letter) {
    static const unsigned config[14] = {7};
    void *context, *driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *p = (void *)1000, *e = (void *)2000;
    switch (letter) {
    case 'k': return cuLaunchKernel(p, 1, 2, 3, 4, 5, 6, 7, 0, p, e);
    case 'K': return cuLaunchKernel_ptsz(p, 1, 2, 3, 4, 5, 6, 7, 0, p, e);
    case 'o': return cuLaunchCooperativeKernel(p, 1, 2, 3, 4, 5, 6, 7, 0, p);
    case 'O': return cuLaunchCooperativeKernel_ptsz(p, 1, 2, 3, 4, 5, 6, 7, 0, p);
    case 'x': return cuLaunchKernelEx(config, p, p, e);
    case 'X': return cuLaunchKernelEx_ptsz(config, p, p, e);
    case 'g': return cuGraphLaunch(p, 0);
    case 'G': return cuGraphLaunch_ptsz(p, 0);
    case 'd': return ((Launch *)dlsym(driver, "cuLaunchKernel"))(p, 1, 2, 3, 4, 5, 6, 7, 0, p, e);
    case 't': return ((Launch *)dlsym(RTLD_DEFAULT, "cuLaunchKernel"))(p, 1, 2, 3, 4, 5, 6, 7, 0, p, e);
    case 'r': return cuDevicePrimaryCtxRetain(&context, 3);
    case 'y': return cuStreamSynchronize(0) + cuCtxSynchronize();
    }
    return 1;
}
#ifdef LIBRARY
int work(char letter, int number) {
#else
static int work(char letter, int number) {
#endif
    int result = 0;
    for (int i = 0; i < number; i++) result |= call(letter);
    printf("%d %d %d\n", result, launched(), last());
    fflush(stdout);
    return result;
}
#ifndef LIBRARY
int main(void) {
    char line[100];
    while (fgets(line, sizeof line, stdin)) work(line[0], atoi(line + 1));
}
#endif
"#;

/// The driver under its own name; NVIDIA's calls its own functions, too, and never those of a library before it.
fn linked_driver(page: &Page) -> PathBuf {
    let flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"];
    compile(page.dir.path(), "libcuda.so.1", DRIVER, &flags)
}

/// Links with the driver, which is found where it lies.
fn link_flags(page: &Page, driver: &Path) -> [String; 3] {
    [driver.to_str().unwrap().to_owned(), format!("-Wl,-rpath,{}", page.dir.path().display()), "-ldl".to_owned()]
}

fn linked(page: &Page) -> PathBuf {
    let driver = linked_driver(page);
    compile(page.dir.path(), "linked", LINKED, &link_flags(page, &driver).each_ref().map(String::as_str))
}

#[test]
fn functions_that_a_program_is_linked_with_are_paced_once() {
    let page = Page::new(0);
    let program = linked(&page);
    for letter in ["k", "K", "o", "O", "x", "X", "g", "G", "d", "t"] {
        page.write(&tenth_of_gpu());
        std::fs::write(page.report_path(), empty_report()).unwrap();
        let mut job = Dialogue::start(page.command(&program).env(GPU_VARIABLE, GPU_ON));
        assert_eq!(job.ask("r 1"), "0 0 0");
        let sum = match letter {
            "o" | "O" => 1028,
            "x" | "X" => 3007,
            "g" | "G" => 0,
            _ => 3028,
        };
        assert_eq!(job.ask(&format!("{letter} 60")), format!("0 60 {sum}"), "{letter}");
        let report = page.report();
        assert_eq!((report.launches, report.gpus, report.gpu & 0xffff_0000), (60, 1, 3 << 16), "{letter}");
        assert!(report.pauses > 0 && report.hooks == ["CUDA driver"], "{letter}: {report:?}");
        // The same function, found both ways.
        job.ask("k 2");
        job.ask("d 2");
        job.ask("t 2");
        assert_eq!(page.report().launches, 66, "{letter}: each launch counts once");
        let before_ns = page.report().waited_ns;
        assert!(job.ask("y 1").starts_with("0 66"), "{letter}");
        assert!(page.report().waited_ns >= before_ns + 1_000_000, "the program's own wait counts");
    }
}

#[test]
fn a_program_that_retains_no_context_is_on_the_gpu_of_its_current_one() {
    let page = Page::new(0);
    let program = linked(&page);
    page.write(&tenth_of_gpu());
    let mut job = Dialogue::start(page.command(&program).env(GPU_VARIABLE, GPU_ON));
    assert_eq!(job.ask("k 60"), "0 60 3028");
    let report = page.report();
    assert_eq!((report.launches, report.gpus, report.gpu & 0xffff_0000), (60, 1, 0), "device 0 on bus 0");
    assert!(report.gpu != 0 && report.pauses > 0, "{report:?}");
}

#[test]
fn calls_of_a_library_that_only_its_host_sees_are_paced_too() {
    const HOST: &str = r#"
#include <dlfcn.h>
#include <stdio.h>
int main(int count, char **words) {
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) { puts(dlerror()); return 1; }
    return ((int (*)(char, int))dlsym(library, "work"))('k', 60);
}
"#;
    let page = Page::new(0);
    let driver = linked_driver(&page);
    let flags = link_flags(&page, &driver);
    let mut flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    flags.extend(["-shared", "-fPIC", "-DLIBRARY"]);
    let library = compile(page.dir.path(), "launcher.so", LINKED, &flags);
    let host = compile(page.dir.path(), "host", HOST, &["-ldl"]);
    for (switch, launches) in [("0", 0), (GPU_ON, 60)] {
        page.write(&tenth_of_gpu());
        let output = page.command(&host).arg(&library).env(GPU_VARIABLE, switch).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "0 60 3028\n");
        assert_eq!(page.report().launches, launches, "{switch}");
    }
    assert!(page.report().pauses > 0);
}

#[test]
fn linked_calls_pass_where_no_gpu_work_is_caught() {
    let page = Page::new(0);
    let program = linked(&page);
    page.write(&tenth_of_gpu());
    for (variable, value) in [(GPU_VARIABLE, "0"), (SWITCH_VARIABLE, "0"), (PAGE_VARIABLE, "/nonexistent/page")] {
        let mut job = Dialogue::start(page.command(&program).env(GPU_VARIABLE, GPU_ON).env(variable, value));
        let mut launches = 0;
        for (letter, sum) in [("k", 3028), ("O", 1028), ("x", 3007), ("g", 0), ("d", 3028), ("t", 3028)] {
            launches += 5;
            assert_eq!(job.ask(&format!("{letter} 5")), format!("0 {launches} {sum}"), "{variable}={value}: {letter}");
        }
        assert_eq!(job.ask("y 1"), format!("0 {launches} 3028"));
    }
    assert_eq!((page.report().launches, page.report().waited_ns), (0, 0));
}

#[test]
fn without_a_driver_its_functions_fail_and_are_not_found() {
    const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
__attribute__((weak)) int cuLaunchKernel(void *, int, int, int, int, int, int, int, void *, void *, void *);
__attribute__((weak)) int cuGetProcAddress_v2(const char *, void **, int, long, int *);
int main(void) {
    void *found = 0;
    int launched = cuLaunchKernel ? cuLaunchKernel(0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) : 500;
    int asked = cuGetProcAddress_v2 ? cuGetProcAddress_v2("cuInit", &found, 12000, 0, 0) : 500;
    void *all = dlsym(RTLD_DEFAULT, "cuLaunchKernel"), *own = dlsym(dlopen(0, RTLD_NOW), "cuGraphLaunch");
    printf("%d %d %d %d %d\n", launched, asked, all == 0, own == 0, dlsym(RTLD_DEFAULT, "printf") != 0);
}
"#;
    let page = Page::new(0);
    let program = compile(page.dir.path(), "program", PROGRAM, &["-ldl"]);
    for switch in ["0", GPU_ON] {
        let output = page.command(&program).env(GPU_VARIABLE, switch).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "500 500 1 1 1\n", "{switch}");
    }
}

#[test]
fn a_library_between_programs_and_the_driver_still_finds_the_driver() {
    // It passes launches on and adds one to the first argument.
    const BETWEEN: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
int cuLaunchKernel(void *f, int a, int b, int c, int d, int e, int g, int h, void *s, void *p, void *x) {
    int (*next)(void *, int, int, int, int, int, int, int, void *, void *, void *) = dlsym(RTLD_NEXT, "cuLaunchKernel");
    return next(f, a + 1, b, c, d, e, g, h, s, p, x);
}
"#;
    let page = Page::new(0);
    let program = linked(&page);
    let between = compile(page.dir.path(), "between.so", BETWEEN, &["-shared", "-fPIC", "-ldl"]);
    let ours = library();
    for (preload, switch, launches) in [
        ([&between, &ours], "0", 0),
        ([&between, &ours], GPU_ON, 20),
        // Without pacing our library passes the call on to the next one.
        ([&ours, &between], "0", 0),
    ] {
        page.write(&tenth_of_gpu());
        std::fs::write(page.report_path(), empty_report()).unwrap();
        let names: Vec<String> = words("GAINSHARE_TEST_PRELOAD")
            .into_iter()
            .chain(preload.map(|library| library.to_str().unwrap().to_owned()))
            .collect();
        let mut command = Command::new(&program);
        command.env("LD_PRELOAD", names.join(":")).env(PAGE_VARIABLE, page.path()).env(GPU_VARIABLE, switch);
        let mut job = Dialogue::start(&mut command);
        assert_eq!(job.ask("k 20"), "0 20 3029", "{names:?}");
        assert_eq!(page.report().launches, launches, "{names:?}");
    }
}

#[test]
fn a_stream_that_records_is_left_alone_and_graphs_are_paced() {
    let page = Page::new(0);
    let mut job = launching(&page, &[(GPU_VARIABLE, GPU_ON)]);
    job.ask("r 0");
    let shared = |gpu_share, gpu_jobs| encode(&Orders { gpu_share, gpu_jobs, ..Orders::default() }, monotonic_ns());
    for (bytes, why) in [(tenth_of_gpu(), "paced"), (shared(0, 2), "beside another job")] {
        page.write(&bytes);
        let before = (job.ask("k"), page.report().pauses);
        assert_eq!(job.ask("c 100"), "0");
        assert_eq!((job.ask("k"), page.report().pauses), before, "{why}: nothing is asked of a stream that records");
        // Between other launches, too, when a quantum or a segment has ended.
        assert_eq!(job.ask("l 50"), "0");
        let before = (job.ask("k"), page.report().pauses);
        assert_ne!(before.0, "0", "{why}: launches that are not recorded wait");
        assert_eq!(job.ask("c 100"), "0");
        assert_eq!((job.ask("k"), page.report().pauses), before, "{why}");
    }
    page.write(&tenth_of_gpu());
    let before = page.report();
    assert_eq!(job.ask("g 100"), "0");
    let after = page.report();
    assert_eq!(after.launches, before.launches + 100);
    assert!(after.pauses > before.pauses && after.paused_ns > before.paused_ns, "{after:?}");
    let recorded = shared(0, 2);
    page.write(&recorded);
    let before = job.ask("w");
    job.ask("g 100");
    assert_ne!(job.ask("w"), before, "graphs launch only a little ahead");
}

#[test]
fn waits_do_not_break_a_recording_elsewhere() {
    let page = Page::new(0);
    let mut job = launching(&page, &[(GPU_VARIABLE, GPU_ON)]);
    job.ask("r 0");
    job.ask("b 1");
    assert_eq!(job.ask("l 60"), "0");
    let paced = page.report();
    assert!(paced.pauses > 0, "{paced:?}");
    page.write(&encode(&Orders { gpu_share: 0, gpu_jobs: 2, ..Orders::default() }, monotonic_ns()));
    assert_eq!(job.ask("l 100"), "0");
    assert_ne!(job.ask("w"), "0", "the job launches only a little ahead");
    assert_eq!(job.ask("x"), "0", "no wait was a mistake, and the thread has its own mode back");
    // What the program itself does wrong stays wrong.
    assert_eq!((job.ask("y"), job.ask("x")), ("900".into(), "1".into()));
    job.ask("b 0");
    assert_eq!(job.ask("y"), "0");
}

/// The longest pause: see `LONGEST_PAUSE_NS` in `gpu.rs`.
const LONGEST_PAUSE_NS: u64 = 500_000_000;

#[test]
fn a_pause_ends_when_its_page_goes_bad() {
    let orders = Orders { gpu_share: 1, gpu_jobs: 1, ..Orders::default() };
    let whole = Orders { gpu_share: 0, ..orders };
    type Change<'a> = (&'a str, &'a dyn Fn(&Page));
    let changes: [Change<'_>; 6] = [
        ("stale", &|page| page.write(&encode(&orders, 1))),
        ("garbage", &|page| page.write(&[0xab; PAGE_BYTES])),
        ("truncated", &|page| std::fs::write(page.path(), "").unwrap()),
        ("another version", &|page| page.write(&[&encode(&orders, monotonic_ns())[..8], &[9; 8]].concat())),
        ("no share any more", &|page| page.write(&encode(&whole, monotonic_ns()))),
        ("unchanged", &|_| ()),
    ];
    for (why, change) in changes {
        let page = Page::new(0);
        let mut job = launching(&page, &[(GPU_VARIABLE, GPU_ON)]);
        job.ask("r 0");
        page.write(&encode(&orders, monotonic_ns()));
        writeln!(job.input, "l 1").unwrap();
        while page.report().pauses == 0 {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        change(&page);
        let mut answer = String::new();
        job.output.read_line(&mut answer).unwrap();
        assert_eq!(answer, "0\n", "{why}");
        let report = page.report();
        assert_eq!(report.pauses, 1, "{why}");
        let is_whole = report.paused_ns >= LONGEST_PAUSE_NS;
        assert_eq!(is_whole, why == "unchanged", "{why}: paused for {} ms", report.paused_ns / 1_000_000);
        if !is_whole {
            assert_eq!(job.ask("l 50"), "0", "{why}");
            assert_eq!(page.report().pauses, 1, "{why}: the job goes on at full speed");
        }
    }
}

#[test]
fn launches_on_one_gpu_are_paced_and_on_a_second_one_not() {
    let page = Page::new(0);
    let mut job = launching(&page, &[(GPU_VARIABLE, GPU_ON)]);
    assert_eq!(job.ask("r 7"), "0");
    assert_eq!(job.ask("l 100"), "0");
    let paced = page.report();
    assert_eq!((paced.launches, paced.gpus, paced.gpu & 0xffff_0000), (100, 1, 7 << 16));
    assert!(paced.pauses > 0 && paced.paused_ns > 0, "{paced:?}");
    assert_eq!(job.ask("r 8"), "0");
    job.ask("l 100");
    let several = page.report();
    assert_eq!((several.launches, several.gpus, several.gpu), (200, 2, paced.gpu));
    assert_eq!(page.places().iter().map(|place| place.count).collect::<Vec<u32>>(), [200], "one kernel");
    assert_eq!(several.pauses, paced.pauses, "a job on several GPUs does not wait");
}

#[test]
fn ranks_are_paced_only_if_the_user_asks_for_it() {
    let two = ("WORLD_SIZE", "2");
    let mut cases = vec![(GPU_ALL, two, 1, true), ("0", two, 0, false), (GPU_ON, ("SLURM_NTASKS", "1"), 1, true)];
    cases.extend(gainshare_page::RANK_VARIABLES.map(|variable| (GPU_ON, (variable, "2"), 2, false)));
    for (switch, variable, gpus, is_paced) in cases {
        let page = Page::new(0);
        let mut job = launching(&page, &[(GPU_VARIABLE, switch), variable]);
        assert_eq!((job.ask("r 0"), job.ask("l 100")), ("0".into(), "0".into()));
        let report = page.report();
        assert_eq!((report.gpus, report.pauses > 0), (gpus, is_paced), "{switch}, {variable:?}");
    }
}

#[test]
fn a_share_of_the_whole_and_a_page_without_a_daemon_cause_no_pause() {
    let page = Page::new(0);
    let mut job = launching(&page, &[(GPU_VARIABLE, GPU_ON)]);
    job.ask("r 0");
    for bytes in [page_bytes(0), encode(&Orders { gpu_share: 100_000, gpu_jobs: 1, ..Orders::default() }, 1)] {
        page.write(&bytes);
        job.ask("l 50");
        assert_eq!(page.report().pauses, 0);
    }
    assert_eq!(page.report().launches, 100);
}

#[test]
fn only_a_job_that_shares_its_gpu_waits_for_events() {
    let page = Page::new(0);
    let mut job = launching(&page, &[(GPU_VARIABLE, GPU_ON)]);
    job.ask("r 0");
    for (gpu_jobs, has_waited) in [(1, false), (2, true)] {
        page.write(&encode(&Orders { gpu_share: 0, gpu_jobs, ..Orders::default() }, monotonic_ns()));
        assert_eq!(job.ask("l 100"), "0");
        assert_eq!(job.ask("w") != "0", has_waited, "{gpu_jobs} jobs");
    }
    assert_eq!(page.report().pauses, 0, "waiting for events is no pause");
    let before_ns = page.report().waited_ns;
    assert_eq!(job.ask("y"), "0");
    assert!(page.report().waited_ns >= before_ns + 1_000_000, "the program's own wait counts");
}

#[test]
#[ignore = "needs PyTorch"]
fn teams_that_change_every_few_milliseconds_damage_no_memory() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stress.py");
    let output = Command::new("/usr/bin/python3").arg(script).arg(library()).arg("30").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
