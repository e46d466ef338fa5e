//! Work on GPUs of programs into which the built library is loaded, with a driver that only counts what it is asked.

mod common;

use common::{Dialogue, Page, compile, library, monotonic_ns, page_bytes, words};
use gainshare_page::{
    GPU_ALL, GPU_ON, GPU_VARIABLE, Orders, PAGE_BYTES, PAGE_VARIABLE, SWITCH_VARIABLE, empty_report, encode,
};
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A CUDA driver that only counts.
const DRIVER: &str = include_str!("fake_cuda.c");

/// A program that launches work on that driver, as it is told line by line.
const LAUNCHES: &str = include_str!("launches.c");

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
