//! Finds the real function behind one of ours.
//!
//! **Problem.** A process may contain several copies of an OpenMP library (PyTorch and scikit-learn bring their
//! own), loaded so that only the libraries that depend on them see them. A call must reach the copy that the
//! caller would have reached without this library.
//!
//! **How.** The return address names the object that contains the caller. The object and its dependencies are
//! searched for the function first, then everything that was loaded after this library. The result is kept: a
//! table of objects, and a table from call sites to objects that is read with one load.
//!
//! **Properties.** The fast path is one load and one comparison. No lock is taken: a thread that holds a lock of
//! ours while it waits for the dynamic linker could block a thread that holds the linker's. Objects in the table
//! are never unloaded.

use libc::{c_char, c_int, c_void};
use std::ffi::CStr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};

/// A function that this library defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Function(pub(crate) usize);

/// All functions that this library defines, by number. The last ones open no parallel region.
pub(crate) const NAMES: [&CStr; 25] = [
    c"GOMP_parallel",
    c"GOMP_parallel_reductions",
    c"GOMP_parallel_sections",
    c"GOMP_parallel_loop_static",
    c"GOMP_parallel_loop_dynamic",
    c"GOMP_parallel_loop_guided",
    c"GOMP_parallel_loop_runtime",
    c"GOMP_parallel_loop_nonmonotonic_dynamic",
    c"GOMP_parallel_loop_nonmonotonic_guided",
    c"GOMP_parallel_loop_nonmonotonic_runtime",
    c"GOMP_parallel_loop_maybe_nonmonotonic_runtime",
    c"GOMP_parallel_start",
    c"GOMP_parallel_sections_start",
    c"GOMP_parallel_loop_static_start",
    c"GOMP_parallel_loop_dynamic_start",
    c"GOMP_parallel_loop_guided_start",
    c"GOMP_parallel_loop_runtime_start",
    c"__kmpc_fork_call",
    c"__kmpc_fork_call_if",
    c"omp_get_max_threads",
    c"omp_get_max_threads_",
    c"omp_set_num_threads",
    c"omp_set_num_threads_",
    // Not defined by us, but needed of every runtime.
    c"omp_in_parallel",
    c"MKL_Set_Num_Threads_Local",
];

/// The functions before this one open a parallel region of GNU OpenMP.
pub(crate) const FIRST_LLVM: usize = 17;
/// The functions before this one open a parallel region.
pub(crate) const GET_MAX_THREADS: Function = Function(19);
pub(crate) const SET_NUM_THREADS: Function = Function(21);
pub(crate) const IN_PARALLEL: Function = Function(23);
pub(crate) const MKL_SET_LOCAL: Function = Function(24);

impl Function {
    pub(crate) fn name(self) -> Option<&'static CStr> {
        NAMES.get(self.0).copied()
    }
}

/// A loaded object that calls functions of ours, and the real functions that it reaches.
pub(crate) struct Object {
    /// Where the object is loaded, plus one; 0: this entry is free or being filled.
    key: AtomicUsize,
    handle: AtomicUsize,
    /// Addresses by function; 0: not searched for yet, 1: there is none.
    real: [AtomicUsize; NAMES.len()],
    /// The number of its OpenMP runtime.
    runtime: AtomicUsize,
    /// Whether its file name is one of [`ELASTIC_FILES`].
    is_elastic: AtomicBool,
}

/// Parts of the file names of libraries whose thread number may change between two operations, as their documents
/// say: PyTorch, oneDNN and MKL.
const ELASTIC_FILES: [&[u8]; 3] = [b"libtorch", b"libdnnl", b"libmkl"];

const MOST_OBJECTS: usize = 60;
/// A process has few OpenMP runtimes: one is usual, two are seen.
pub(crate) const MOST_RUNTIMES: usize = 8;
const CALL_SITES: usize = 2048;
const NONE: usize = 1;

// The number of a function and the number of an object have six bits each in a call site.
const _: () = assert!(NAMES.len() <= 64 && MOST_OBJECTS <= 64);

static OBJECTS: [Object; MOST_OBJECTS] = [const {
    Object {
        key: AtomicUsize::new(0),
        handle: AtomicUsize::new(0),
        real: [const { AtomicUsize::new(0) }; NAMES.len()],
        runtime: AtomicUsize::new(0),
        is_elastic: AtomicBool::new(false),
    }
}; MOST_OBJECTS];
static OBJECTS_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// `omp_set_num_threads` of each runtime: what tells runtimes apart.
static RUNTIMES: [AtomicUsize; MOST_RUNTIMES] = [const { AtomicUsize::new(0) }; MOST_RUNTIMES];

/// Return address, function and object in one word; 0: unused.
static SITES: [AtomicU64; CALL_SITES] = [const { AtomicU64::new(0) }; CALL_SITES];

impl Object {
    /// The real function that this object reaches.
    pub(crate) fn real(&self, function: Function) -> Option<usize> {
        let slot = self.real.get(function.0)?;
        let mut found = slot.load(Relaxed);
        if found == 0 {
            found = find(self.handle.load(Relaxed) as *mut c_void, function).unwrap_or(NONE);
            slot.store(found, Relaxed);
        }
        (found != NONE).then_some(found)
    }

    pub(crate) fn runtime(&self) -> usize {
        self.runtime.load(Relaxed)
    }

    /// Whether the object's operations bear another number of threads than the operations before.
    pub(crate) fn is_elastic(&self) -> bool {
        self.is_elastic.load(Relaxed)
    }
}

/// The object that contains a return address, and whether it was seen for the first time at this call site.
pub(crate) fn caller(return_address: usize, function: Function) -> (Option<&'static Object>, bool) {
    let site = (return_address as u64) << 12 | (function.0 as u64 & 63) << 6;
    let hash = (return_address ^ return_address >> 11).wrapping_add(function.0) % CALL_SITES;
    let Some(slot) = SITES.get(hash) else { return (None, false) };
    let kept = slot.load(Acquire);
    if kept & !63 == site && kept != 0 {
        return (OBJECTS.get((kept & 63) as usize), false);
    }
    let Some(index) = object_at(return_address) else { return (None, false) };
    // Call sites above 48 bits do not fit into a word and are searched for each time.
    if (return_address as u64) >> 48 == 0 {
        slot.store(site | index as u64, Release);
    }
    (OBJECTS.get(index), true)
}

/// The object that contains an address, as the dynamic linker knows it.
fn search(address: usize) -> Search {
    let mut search = Search { address, base: 0, name: std::ptr::null(), found: false };
    // SAFETY: the visitor gets our own structure, which lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search
}

/// A handle of an object that is loaded. An empty name is the program.
///
/// # Safety
/// The name comes from the dynamic linker and is still there.
unsafe fn open_loaded(name: *const c_char) -> *mut c_void {
    // SAFETY: by the contract of this function.
    unsafe {
        let is_program = name.is_null() || *name == 0;
        libc::dlopen(if is_program { std::ptr::null() } else { name }, libc::RTLD_LAZY | libc::RTLD_NOLOAD)
    }
}

/// The number of the object that contains an address, which is added to the table if it is new.
fn object_at(address: usize) -> Option<usize> {
    let search = search(address);
    if !search.found {
        return None;
    }
    let key = search.base.wrapping_add(1);
    let known = |object: &Object| object.key.load(Acquire) == key;
    if let Some(index) = OBJECTS.iter().position(known) {
        return Some(index);
    }
    // SAFETY: the name belongs to the object that is calling us, so it is loaded.
    let handle = unsafe { open_loaded(search.name) };
    let index = OBJECTS_TAKEN.fetch_add(1, Relaxed);
    let Some(object) = OBJECTS.get(index) else {
        OBJECTS_TAKEN.store(MOST_OBJECTS, Relaxed);
        return None;
    };
    object.handle.store(handle as usize, Relaxed);
    let identity = object.real(SET_NUM_THREADS).unwrap_or(NONE);
    object.runtime.store(runtime_of(identity), Relaxed);
    // SAFETY: as above.
    let file = unsafe { file_name(search.name) };
    object.is_elastic.store(ELASTIC_FILES.iter().any(|part| contains(file, part)), Relaxed);
    object.key.store(key, Release);
    Some(index)
}

/// All objects that called functions of ours.
pub(crate) fn objects() -> impl Iterator<Item = &'static Object> {
    OBJECTS.iter().filter(|object| object.key.load(Acquire) != 0)
}

/// The last part of a path; empty for null.
///
/// # Safety
/// A path that is not null ends in NUL and outlives the result.
unsafe fn file_name<'a>(path: *const c_char) -> &'a [u8] {
    if path.is_null() {
        return b"";
    }
    // SAFETY: by the contract of this function.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    path.rsplit(|byte| *byte == b'/').next().unwrap_or(path)
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}

/// The number of the runtime with this `omp_set_num_threads`. Runtimes beyond the table share the last number.
fn runtime_of(identity: usize) -> usize {
    let is_mine = |slot: &AtomicUsize| match slot.compare_exchange(0, identity, Relaxed, Relaxed) {
        Ok(_) => true,
        Err(other) => other == identity,
    };
    RUNTIMES.iter().position(is_mine).unwrap_or(MOST_RUNTIMES - 1)
}

struct Search {
    address: usize,
    base: usize,
    name: *const c_char,
    found: bool,
}

unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker passes a valid description, and `search` is the structure of `object_at`.
    unsafe {
        let (info, search) = (&*info, &mut *search.cast::<Search>());
        let base = info.dlpi_addr as usize;
        for index in 0..usize::from(info.dlpi_phnum) {
            let part = &*info.dlpi_phdr.add(index);
            let start = base.wrapping_add(part.p_vaddr as usize);
            if part.p_type == libc::PT_LOAD && search.address.wrapping_sub(start) < part.p_memsz as usize {
                *search = Search { base, name: info.dlpi_name, found: true, ..*search };
                return 1;
            }
        }
        0
    }
}

/// Searches an object with its dependencies, then all that was loaded after this library.
fn find(handle: *mut c_void, function: Function) -> Option<usize> {
    let name = function.name()?;
    let ours = own_address(name);
    let is_real = |address: &usize| *address != ours;
    let near = if handle.is_null() { None } else { symbol(handle, name).filter(is_real) };
    near.or_else(|| symbol(libc::RTLD_NEXT, name).filter(is_real))
}

type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The dynamic linker's own `dlsym`, which this library defines too; 0: not searched for yet.
static DLSYM: AtomicUsize = AtomicUsize::new(0);

unsafe extern "C" {
    fn dlvsym(handle: *mut c_void, name: *const c_char, version: *const c_char) -> *mut c_void;
}

/// The address of the real `dlsym`; 0 if there is none.
pub(crate) fn real_dlsym() -> usize {
    let known = DLSYM.load(Relaxed);
    if known != 0 {
        return known;
    }
    // The versions of the C library from 2.34 on, and before.
    for version in [c"GLIBC_2.34", c"GLIBC_2.2.5", c"GLIBC_2.17"] {
        // SAFETY: both texts end in NUL.
        let found = unsafe { dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) } as usize;
        if found != 0 {
            DLSYM.store(found, Relaxed);
            return found;
        }
    }
    0
}

/// The address of a function, as `dlsym` would find it.
pub(crate) fn symbol(handle: *mut c_void, name: &CStr) -> Option<usize> {
    let address = real_dlsym();
    if address == 0 {
        return None;
    }
    // SAFETY: the address is that of `dlsym`; the handle comes from dlopen, and the name ends in NUL.
    let found = unsafe { std::mem::transmute::<usize, Dlsym>(address)(handle, name.as_ptr()) } as usize;
    (found != 0).then_some(found)
}

/// The address of this library's own function of this name; 0 if there is none.
fn own_address(name: &CStr) -> usize {
    // The global scope contains this library before all that define the name, too, except the program itself,
    // whose functions are real ones.
    let first = symbol(libc::RTLD_DEFAULT, name).unwrap_or(0);
    if is_own(first) { first } else { 0 }
}

/// Whether an address lies in this library.
pub(crate) fn is_own(address: usize) -> bool {
    let (of_address, of_this) = (search(address), search(is_own as *const () as usize));
    of_address.found && of_this.found && of_address.base == of_this.base
}

/// A handle of the object that contains an address, which is never unloaded from now on; null: there is no object.
pub(crate) fn keep(address: usize) -> *mut c_void {
    let found = search(address);
    if !found.found {
        return std::ptr::null_mut();
    }
    // SAFETY: the object is loaded, because its code is being called or was found a moment ago.
    unsafe { open_loaded(found.name) }
}

/// The real function for a caller in no object, such as code that was compiled at run time.
pub(crate) fn without_object(function: Function) -> Option<usize> {
    objects().filter_map(|object| object.real(function)).next().or_else(|| find(std::ptr::null_mut(), function))
}

/// Calls `each` with a handle of every loaded object whose file name contains `part`.
pub(crate) fn for_objects(part: &[u8], mut each: impl FnMut(*mut c_void)) {
    let mut names = Names { part, found: [std::ptr::null(); 8], count: 0 };
    // SAFETY: the visitor gets our own structure, which lives until the call returns.
    unsafe { libc::dl_iterate_phdr(Some(visit_names), (&raw mut names).cast()) };
    for name in names.found.iter().take(names.count) {
        // SAFETY: the name was the dynamic linker's a moment ago. An object that is unloaded meanwhile takes its
        // name with it: libraries of BLAS are not unloaded.
        let handle = unsafe { libc::dlopen(*name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        if !handle.is_null() {
            each(handle);
        }
    }
}

/// Asks `find` about one loaded object after the other, until it has an answer.
pub(crate) fn find_in_objects(find: impl Fn(*mut c_void) -> Option<usize>) -> Option<usize> {
    let mut nth = Nth { left: 0, name: [0; PATH_BYTES], is_found: false };
    for index in 0.. {
        (nth.left, nth.is_found) = (index, false);
        // SAFETY: the visitor gets our own structure, which lives until the call returns.
        unsafe { libc::dl_iterate_phdr(Some(visit_nth), (&raw mut nth).cast()) };
        if !nth.is_found {
            break;
        }
        // SAFETY: the name is a copy that ends in NUL.
        let handle = unsafe { open_loaded(nth.name.as_ptr()) };
        if let Some(address) = Some(handle).filter(|handle| !handle.is_null()).and_then(&find) {
            return Some(address);
        }
    }
    None
}

/// The longest name of an object that is copied, with its NUL.
const PATH_BYTES: usize = libc::PATH_MAX as usize;

/// How many objects are left before the wanted one, and a copy of its name: another thread may unload the object.
struct Nth {
    left: usize,
    name: [c_char; PATH_BYTES],
    is_found: bool,
}

unsafe extern "C" fn visit_nth(info: *mut libc::dl_phdr_info, _size: usize, nth: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker passes a valid description with a name that ends in NUL, and `nth` is the structure of
    // `find_in_objects`. At most one byte less than the copy has is written, so that it ends in NUL.
    unsafe {
        let nth = &mut *nth.cast::<Nth>();
        if nth.left > 0 {
            nth.left = nth.left.wrapping_sub(1);
            return 0;
        }
        nth.name = [0; PATH_BYTES];
        let name = (*info).dlpi_name;
        if !name.is_null() {
            libc::strncpy(nth.name.as_mut_ptr(), name, PATH_BYTES - 1);
        }
        nth.is_found = true;
        1
    }
}

struct Names<'a> {
    part: &'a [u8],
    found: [*const c_char; 8],
    count: usize,
}

unsafe extern "C" fn visit_names(info: *mut libc::dl_phdr_info, _size: usize, names: *mut c_void) -> c_int {
    // SAFETY: the dynamic linker passes a valid description, and `names` is the structure of `for_objects`.
    unsafe {
        let (info, names) = (&*info, &mut *names.cast::<Names>());
        if contains(file_name(info.dlpi_name), names.part)
            && let Some(slot) = names.found.get_mut(names.count)
        {
            *slot = info.dlpi_name;
            names.count = names.count.wrapping_add(1);
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_is_found_once_and_kept() {
        let here = the_caller_is_found_once_and_kept as *const () as usize;
        let (first, is_new) = caller(here, GET_MAX_THREADS);
        assert!(is_new);
        let (second, is_new) = caller(here, GET_MAX_THREADS);
        assert!(!is_new && std::ptr::eq(first.unwrap(), second.unwrap()));
        let libc_function = libc::getpid as *const () as usize;
        let (other, _) = caller(libc_function, GET_MAX_THREADS);
        assert!(!std::ptr::eq(first.unwrap(), other.unwrap()), "another object");
        assert_eq!(first.unwrap().real(GET_MAX_THREADS), None, "this program has no OpenMP");
    }

    #[test]
    fn every_loaded_object_is_asked_once() {
        let asked = std::cell::Cell::new(0);
        let has_getpid = |handle: *mut c_void| {
            asked.set(asked.get() + 1);
            symbol(handle, c"getpid")
        };
        assert_eq!(find_in_objects(has_getpid), symbol(libc::RTLD_DEFAULT, c"getpid"));
        assert!((1..50).contains(&asked.get()));
        assert_eq!(find_in_objects(|handle| symbol(handle, c"no_such_function")), None);
    }

    #[test]
    fn own_addresses_are_told_from_others() {
        assert!(is_own(keep as *const () as usize));
        for other in [0, 1, usize::MAX, libc::getpid as *const () as usize] {
            assert!(!is_own(other), "{other}");
        }
        assert!(keep(0).is_null());
        assert!(!keep(libc::getpid as *const () as usize).is_null());
    }

    #[test]
    fn an_address_in_no_object_has_no_caller() {
        assert!(caller(0, GET_MAX_THREADS).0.is_none());
        assert!(caller(usize::MAX, GET_MAX_THREADS).0.is_none());
    }

    #[test]
    fn the_table_of_names_has_the_order_that_the_constants_promise() {
        assert_eq!(GET_MAX_THREADS.name(), Some(c"omp_get_max_threads"));
        assert_eq!(SET_NUM_THREADS.name(), Some(c"omp_set_num_threads"));
        assert_eq!(IN_PARALLEL.name(), Some(c"omp_in_parallel"));
        assert_eq!(MKL_SET_LOCAL.name(), Some(c"MKL_Set_Num_Threads_Local"));
        assert_eq!(NAMES[FIRST_LLVM], c"__kmpc_fork_call");
    }

    #[test]
    fn objects_are_found_by_a_part_of_their_file_name() {
        let mut count = 0;
        for_objects(b"libc.so", |_| count += 1);
        assert_eq!(count, 1);
        for_objects(b"no such library", |_| count += 1);
        assert_eq!(count, 1);
    }
}
