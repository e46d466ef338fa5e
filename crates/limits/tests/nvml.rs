//! The readings of NVIDIA's management library, with a small library that has the same functions.

use gainshare_limits::nvml::{GpuProcess, Nvml};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds the library in this folder; it reads `state` there.
fn fake(dir: &Path, options: &[&str]) -> PathBuf {
    let (library, state) = (dir.join("libnvidia-ml.so.1"), dir.join("state"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fake_nvml.c");
    let built = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1"])
        .arg(format!("-DSTATE=\"{}\"", state.display()))
        .args(options)
        .arg("-o")
        .args([&library, &source])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library
}

const GIB: u64 = 1 << 30;

#[test]
fn memory_and_time_of_processes_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let library = fake(dir.path(), &[]);
    let state = |text: String| std::fs::write(dir.path().join("state"), text).unwrap();
    let gpus = format!("gpu 0 27 0 {} {}\ngpu 1 59 0 {} {}\n", 80 * GIB, 60 * GIB, 40 * GIB, 40 * GIB);
    let process = |percent: i32| format!("process 0 4711 {} {percent}\n", 12 * GIB);
    state(gpus.clone() + &process(30) + &format!("process 0 99 {} 0\n", u64::MAX));
    let mut nvml = Nvml::load(library.as_os_str()).unwrap();
    let first = nvml.read();
    assert_eq!(first.len(), 2);
    // The same number as in `crates/inside/src/devices.rs`.
    assert_eq!([first[0].place, first[1].place], [1 << 63 | 27 << 16, 1 << 63 | 1 << 32 | 59 << 16]);
    assert_eq!([first[0].total_bytes, first[0].free_bytes], [80 * GIB, 60 * GIB]);
    let expected = GpuProcess { pid: 4711, memory_bytes: Some(12 * GIB), busy: None };
    assert_eq!(first[0].processes[0], expected, "the time before the first reading is not counted");
    assert_eq!(first[0].processes[1], GpuProcess { pid: 99, memory_bytes: None, busy: None }, "memory is unknown");
    assert_eq!(first[1].processes, []);

    state(gpus.clone() + &process(70) + "process 0 99 1 0\n");
    let second = nvml.read();
    assert_eq!([second[0].processes[0].busy, second[0].processes[1].busy], [Some(0.7), Some(0.0)]);
    state(gpus + &process(-1));
    assert_eq!(nvml.read()[0].processes[0].busy, None, "without any sample nothing is known");
}

#[test]
fn any_number_of_processes_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let library = fake(dir.path(), &[]);
    let processes: String = (1..=300).map(|pid| format!("process 0 {pid} {pid} 1\n")).collect();
    std::fs::write(dir.path().join("state"), format!("gpu 0 1 0 100 50\n{processes}")).unwrap();
    let found = Nvml::load(library.as_os_str()).unwrap().read();
    assert_eq!(found[0].processes.iter().map(|process| process.pid).collect::<Vec<_>>(), (1..=300).collect::<Vec<_>>());
}

#[test]
fn an_old_library_knows_the_memory_of_gpus_only() {
    let dir = tempfile::tempdir().unwrap();
    let library = fake(dir.path(), &["-DOLD"]);
    std::fs::write(dir.path().join("state"), "gpu 0 1 0 100 50\nprocess 0 7 7 7\n").unwrap();
    let found = Nvml::load(library.as_os_str()).unwrap().read();
    assert_eq!((found[0].total_bytes, found[0].free_bytes, found[0].processes.len()), (100, 50, 0));
}

#[test]
fn what_is_no_such_library_is_refused_by_name() {
    let error = |file: &str| Nvml::load(file.as_ref()).err().unwrap();
    assert!(error("/nowhere/libnvidia-ml.so.1").contains("cannot load /nowhere/libnvidia-ml.so.1"));
    assert!(error("libc.so.6").contains("has no function nvmlInit_v2"));
    let dir = tempfile::tempdir().unwrap();
    let library = fake(dir.path(), &[]);
    let text = error(library.to_str().unwrap());
    assert!(text.contains("cannot be started (error 9)"), "without a state it plays a driver that is away: {text}");
}
