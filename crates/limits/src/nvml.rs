//! What NVIDIA's management library (NVML) measures: the memory of each GPU, and memory and time of each process on it.
//! Feature `gpu`.
//!
//! **Problem.** Only the driver knows how much memory of a GPU a process has, and how long it computes. The library
//! that says so comes with the driver, and most machines have none.
//!
//! **How.** The library is loaded while the program runs, so that nothing depends on it. The few functions that are
//! needed are found by name. Each call may take as long as the driver likes: call them on a thread of their own.
//!
//! **Properties.** A function that is missing or fails makes a number unknown, never wrong. `tests/nvml.rs` loads a
//! small library that has the same functions.

#![allow(unsafe_code, reason = "calls a library that is loaded at run time")]

use libc::{c_char, c_int, c_uint, c_void};
use std::ffi::{CStr, CString, OsStr};
use std::os::unix::ffi::OsStrExt;

/// The name under which the driver installs the library.
pub const LIBRARY: &str = "libnvidia-ml.so.1";

/// The environment variable that names another file.
pub const LIBRARY_VARIABLE: &str = "GAINSHARE_NVML";

/// There only while the driver is loaded.
const DRIVER_DEVICE: &str = "/dev/nvidiactl";

/// One GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuReading {
    /// The GPU's place on the PCI bus: the number by which the library inside jobs knows it, too.
    pub place: u64,
    pub total_bytes: u64,
    /// What a program can still allocate.
    pub free_bytes: u64,
    pub processes: Vec<GpuProcess>,
}

/// One process on one GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuProcess {
    pub pid: i32,
    pub memory_bytes: Option<u64>,
    /// The part of the GPU's time in which it computed since the last reading, 0…1.
    pub busy: Option<f64>,
}

/// The file to load: the one that the variable names, or the driver's own where a driver is loaded. `None` on a
/// machine without NVIDIA's driver.
pub fn library_file() -> Option<std::ffi::OsString> {
    let named = std::env::var_os(LIBRARY_VARIABLE).filter(|file| !file.is_empty());
    named.or_else(|| std::path::Path::new(DRIVER_DEVICE).exists().then(|| LIBRARY.into()))
}

/// The loaded library. It stays on the thread that loaded it.
pub struct Nvml {
    calls: Calls,
    gpus: Vec<Gpu>,
}

struct Gpu {
    handle: Handle,
    place: u64,
    /// The newest sample of use that was read, by the library's clock.
    sampled_us: u64,
}

type Handle = *mut c_void;

// Results of all functions.
const SUCCESS: c_int = 0;
const INSUFFICIENT_SIZE: c_int = 7;

/// What the library writes for memory that it does not know.
const UNKNOWN_BYTES: u64 = u64::MAX;

/// Room for this many processes at first, and how many times more room is tried.
const FEW_PROCESSES: usize = 32;
const TRIES: usize = 3;

#[repr(C)]
struct PciInfo {
    legacy_id: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    id: [c_char; 32],
}

#[repr(C)]
#[derive(Default)]
struct Memory {
    total_bytes: u64,
    free_bytes: u64,
    used_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    memory_bytes: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Sample {
    pid: c_uint,
    at_us: u64,
    /// Percent of the time.
    computing: c_uint,
    memory: c_uint,
    encoder: c_uint,
    decoder: c_uint,
}

type Plain = unsafe extern "C" fn() -> c_int;
type GetCount = unsafe extern "C" fn(*mut c_uint) -> c_int;
type GetHandle = unsafe extern "C" fn(c_uint, *mut Handle) -> c_int;
type GetPciInfo = unsafe extern "C" fn(Handle, *mut PciInfo) -> c_int;
type GetMemory = unsafe extern "C" fn(Handle, *mut Memory) -> c_int;
type GetProcesses = unsafe extern "C" fn(Handle, *mut c_uint, *mut Process) -> c_int;
type GetUse = unsafe extern "C" fn(Handle, *mut Sample, *mut c_uint, u64) -> c_int;

struct Calls {
    shutdown: Plain,
    get_memory: GetMemory,
    get_processes: Option<GetProcesses>,
    get_use: Option<GetUse>,
}

impl Nvml {
    /// Loads and starts the library; the error says why there is none.
    pub fn load(file: &OsStr) -> Result<Nvml, String> {
        let name = file.to_string_lossy().into_owned();
        let path = CString::new(file.as_bytes()).map_err(|_| format!("{name:?} is not a file name"))?;
        // SAFETY: the path ends in NUL. The user's own account decides which library this is.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if library.is_null() {
            return Err(format!("cannot load {name}: {}", load_error()));
        }
        let missing = |what: &str| format!("{name} has no function {what}: it is too old, or not NVIDIA's library");
        // SAFETY: each function of NVML has the type that is given here.
        let (init, shutdown, get_count, get_handle, get_pci, get_memory) = unsafe {
            (
                function::<Plain>(library, &[c"nvmlInit_v2"]).ok_or_else(|| missing("nvmlInit_v2"))?,
                function::<Plain>(library, &[c"nvmlShutdown"]).ok_or_else(|| missing("nvmlShutdown"))?,
                function::<GetCount>(library, &[c"nvmlDeviceGetCount_v2"])
                    .ok_or_else(|| missing("nvmlDeviceGetCount_v2"))?,
                function::<GetHandle>(library, &[c"nvmlDeviceGetHandleByIndex_v2"])
                    .ok_or_else(|| missing("nvmlDeviceGetHandleByIndex_v2"))?,
                function::<GetPciInfo>(library, &[c"nvmlDeviceGetPciInfo_v3"])
                    .ok_or_else(|| missing("nvmlDeviceGetPciInfo_v3"))?,
                function::<GetMemory>(library, &[c"nvmlDeviceGetMemoryInfo"])
                    .ok_or_else(|| missing("nvmlDeviceGetMemoryInfo"))?,
            )
        };
        // The structure of the function without a number is shorter.
        let names = [c"nvmlDeviceGetComputeRunningProcesses_v3", c"nvmlDeviceGetComputeRunningProcesses_v2"];
        // SAFETY: as above.
        let (get_processes, get_use) =
            unsafe { (function(library, &names), function(library, &[c"nvmlDeviceGetProcessUtilization"])) };
        // SAFETY: the function takes no arguments.
        let result = unsafe { init() };
        if result != SUCCESS {
            return Err(format!(
                "{name} cannot be started (error {result}): is the driver of the same version loaded?"
            ));
        }
        let mut nvml = Nvml { calls: Calls { shutdown, get_memory, get_processes, get_use }, gpus: Vec::new() };
        let mut count = 0;
        // SAFETY: the pointer is that of a number that lives.
        if unsafe { get_count(&raw mut count) } == SUCCESS {
            nvml.gpus = (0..count).filter_map(|index| Gpu::open(index, get_handle, get_pci)).collect();
        }
        Ok(nvml)
    }

    /// Reads all GPUs.
    pub fn read(&mut self) -> Vec<GpuReading> {
        let calls = &self.calls;
        self.gpus.iter_mut().filter_map(|gpu| gpu.read(calls)).collect()
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: the library was started and takes no arguments. It stays mapped.
        unsafe { (self.calls.shutdown)() };
    }
}

impl Gpu {
    fn open(index: c_uint, get_handle: GetHandle, get_pci: GetPciInfo) -> Option<Gpu> {
        let mut handle: Handle = std::ptr::null_mut();
        // SAFETY: the pointer is that of a handle that lives.
        if unsafe { get_handle(index, &raw mut handle) } != SUCCESS {
            return None;
        }
        let mut pci =
            PciInfo { legacy_id: [0; 16], domain: 0, bus: 0, device: 0, device_id: 0, subsystem_id: 0, id: [0; 32] };
        // SAFETY: the handle is the library's, and the structure is the one that it expects.
        if unsafe { get_pci(handle, &raw mut pci) } != SUCCESS {
            return None;
        }
        let (domain, bus, device) = (u64::from(pci.domain), u64::from(pci.bus), u64::from(pci.device));
        let place = 1 << 63 | domain << 32 | (bus & 0xffff) << 16 | (device & 0xffff);
        Some(Gpu { handle, place, sampled_us: 0 })
    }

    fn read(&mut self, calls: &Calls) -> Option<GpuReading> {
        let mut memory = Memory::default();
        // SAFETY: the handle is the library's, and the structure is the one that it expects.
        if unsafe { (calls.get_memory)(self.handle, &raw mut memory) } != SUCCESS {
            return None;
        }
        let found = calls.get_processes.map(|get| {
            // SAFETY: there is room for `count` processes.
            listed(|count, to| unsafe { get(self.handle, count, to) })
        });
        let since = self.sampled_us;
        let samples: Option<Vec<Sample>> = calls.get_use.and_then(|get| {
            // SAFETY: there is room for `count` samples.
            listed(|count, to| unsafe { get(self.handle, to, count, since) })
        });
        self.sampled_us = samples.iter().flatten().map(|sample| sample.at_us).max().unwrap_or(since).max(since);
        let busy = |pid: c_uint| {
            // Of the first reading the library would answer for a time before it.
            let samples = samples.as_ref().filter(|samples| since > 0 && !samples.is_empty())?;
            let of = samples.iter().filter(|sample| sample.pid == pid && sample.at_us > since);
            let parts: Vec<f64> = of.map(|sample| f64::from(sample.computing.min(100)) / 100.0).collect();
            // A process without a sample did nothing.
            Some(parts.iter().sum::<f64>() / parts.len().max(1) as f64)
        };
        let process = |process: &Process| {
            let memory_bytes = Some(process.memory_bytes).filter(|bytes| *bytes != UNKNOWN_BYTES);
            Some(GpuProcess { pid: i32::try_from(process.pid).ok()?, memory_bytes, busy: busy(process.pid) })
        };
        let processes = found.flatten().unwrap_or_default().iter().filter_map(process).collect();
        Some(GpuReading {
            place: self.place,
            total_bytes: memory.total_bytes,
            free_bytes: memory.free_bytes,
            processes,
        })
    }
}

/// What a function writes into an array whose length it also says if the array is too short. `None` if it fails, also
/// where it has nothing to write.
fn listed<T: Copy + Default>(fill: impl Fn(*mut c_uint, *mut T) -> c_int) -> Option<Vec<T>> {
    let mut room = FEW_PROCESSES;
    for _ in 0..TRIES {
        let mut list = vec![T::default(); room];
        let mut count = room as c_uint;
        match fill(&raw mut count, list.as_mut_ptr()) {
            SUCCESS => {
                list.truncate(count as usize);
                return Some(list);
            }
            // Some may come meanwhile.
            INSUFFICIENT_SIZE => room = (count as usize).clamp(room, 1 << 16) + FEW_PROCESSES,
            _ => return None,
        }
    }
    None
}

/// The first of these functions that the library has.
///
/// # Safety
/// `T` must be the type of a pointer to these functions.
unsafe fn function<T: Copy>(library: *mut c_void, names: &[&CStr]) -> Option<T> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    // SAFETY: the handle is that of a library that is never closed, and the names end in NUL.
    let found = names.iter().map(|name| unsafe { libc::dlsym(library, name.as_ptr()) });
    // SAFETY: the caller vouches for the type, and the sizes are the same.
    found.into_iter().find(|address| !address.is_null()).map(|address| unsafe { std::mem::transmute_copy(&address) })
}

fn load_error() -> String {
    // SAFETY: the text is the C library's own and is copied at once.
    let text = unsafe { libc::dlerror() };
    if text.is_null() {
        return "no reason is given".into();
    }
    // SAFETY: as above; the text ends in NUL.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
