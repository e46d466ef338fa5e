//! The built library, loaded into small C programs and into everyday commands.

mod common;

use common::{Dialogue, Page, compile, library, loads, page_bytes};
use gainshare_page::rhythm::empty_rhythm;
use gainshare_page::{Orders, PAGE_BYTES, PAGE_VARIABLE, SWITCH_VARIABLE, encode};
use std::path::{Path, PathBuf};
use std::process::Command;

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

#[test]
#[ignore = "needs PyTorch"]
fn teams_that_change_every_few_milliseconds_damage_no_memory() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stress.py");
    let output = Command::new("/usr/bin/python3").arg(script).arg(library()).arg("30").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
