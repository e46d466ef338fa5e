//! The functions of OpenMP and of the CUDA driver, and `dlsym`, that this library defines.
//!
//! Each function of OpenMP keeps its arguments, calls [`prepare`], puts the arguments back and jumps to the real
//! function. The real function runs as if the program had called it: all arguments are in place, also those of
//! functions with a variable number, and the return address is the caller's. Functions of the driver ask
//! [`direct::target`] for the address in the same way.

use crate::cuda::driver_symbol;
use crate::direct;
use crate::gpu;
use crate::resolve::{self, Function, GET_MAX_THREADS, SET_NUM_THREADS};
use crate::rhythm;
use crate::teams;
use libc::{c_char, c_int, c_void};
use std::arch::naked_asm;
use std::ffi::CStr;

/// Called before the real function; returns its address.
extern "C" fn prepare(return_address: usize, number: usize) -> usize {
    let function = Function(number);
    rhythm::note(return_address);
    let (object, is_new) = resolve::caller(return_address, function);
    let real = match object {
        Some(object) => {
            teams::prepare_region(object, function, is_new);
            object.real(function)
        }
        None => None,
    };
    real.or_else(|| resolve::without_object(function)).unwrap_or_else(|| stand_in(function))
}

/// What is called if the process contains no OpenMP: programs may ask for a function that they link weakly.
fn stand_in(function: Function) -> usize {
    match function {
        Function(0) => serial_region as *const () as usize,
        _ => missing as *const () as usize,
    }
}

/// A parallel region of one thread.
extern "C" fn serial_region(region: Option<extern "C" fn(*mut c_void)>, data: *mut c_void) {
    if let Some(region) = region {
        region(data);
    }
}

/// Without this library the dynamic linker would have ended the program for the same reason.
extern "C" fn missing() {
    let text = b"gainshare: a function of OpenMP was called, but no OpenMP library is loaded\n";
    // SAFETY: the text is as long as is said.
    unsafe {
        libc::write(2, text.as_ptr().cast(), text.len());
        libc::abort();
    }
}

macro_rules! entries {
    ($target:path, $count:expr; $($name:ident = $number:literal,)*) => {$(
        const _: () = assert!($number < $count);

        /// Asks for the address of the function that is to run, and jumps there.
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        #[allow(non_snake_case)]
        unsafe extern "C" fn $name() {
            // Seven words on the stack keep it aligned for the call; the eighth is the return address.
            naked_asm!(
                "push rdi", "push rsi", "push rdx", "push rcx", "push r8", "push r9", "push rax",
                "mov rdi, [rsp + 56]",
                "mov esi, {number}",
                "call {target}",
                "mov r11, rax",
                "pop rax", "pop r9", "pop r8", "pop rcx", "pop rdx", "pop rsi", "pop rdi",
                "jmp r11",
                number = const $number,
                target = sym $target,
            )
        }
    )*};
}

entries! {
    prepare, GET_MAX_THREADS.0;
    GOMP_parallel = 0,
    GOMP_parallel_reductions = 1,
    GOMP_parallel_sections = 2,
    GOMP_parallel_loop_static = 3,
    GOMP_parallel_loop_dynamic = 4,
    GOMP_parallel_loop_guided = 5,
    GOMP_parallel_loop_runtime = 6,
    GOMP_parallel_loop_nonmonotonic_dynamic = 7,
    GOMP_parallel_loop_nonmonotonic_guided = 8,
    GOMP_parallel_loop_nonmonotonic_runtime = 9,
    GOMP_parallel_loop_maybe_nonmonotonic_runtime = 10,
    GOMP_parallel_start = 11,
    GOMP_parallel_sections_start = 12,
    GOMP_parallel_loop_static_start = 13,
    GOMP_parallel_loop_dynamic_start = 14,
    GOMP_parallel_loop_guided_start = 15,
    GOMP_parallel_loop_runtime_start = 16,
    __kmpc_fork_call = 17,
    __kmpc_fork_call_if = 18,
}

entries! {
    direct::target, direct::COUNT;
    cuLaunchKernel = 0,
    cuLaunchKernel_ptsz = 1,
    cuLaunchKernelEx = 2,
    cuLaunchKernelEx_ptsz = 3,
    cuLaunchCooperativeKernel = 4,
    cuLaunchCooperativeKernel_ptsz = 5,
    cuGraphLaunch = 6,
    cuGraphLaunch_ptsz = 7,
    cuStreamSynchronize = 8,
    cuStreamSynchronize_ptsz = 9,
    cuEventSynchronize = 10,
    cuCtxSynchronize = 11,
    cuDevicePrimaryCtxRetain = 12,
    cuGetProcAddress = 13,
    cuGetProcAddress_v2 = 14,
}

/// `omp_get_max_threads` with the caller's return address as argument.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn omp_get_max_threads() -> c_int {
    naked_asm!("mov rdi, [rsp]", "jmp {answer}", answer = sym answer)
}

/// The same in Fortran.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn omp_get_max_threads_() -> c_int {
    naked_asm!("mov rdi, [rsp]", "jmp {answer}", answer = sym answer)
}

extern "C" fn answer(return_address: usize) -> c_int {
    let (object, is_new) = resolve::caller(return_address, GET_MAX_THREADS);
    if let Some(threads) = object.and_then(|object| teams::max_threads(object, is_new)) {
        return threads;
    }
    let real = object.and_then(|object| object.real(GET_MAX_THREADS));
    let Some(address) = real.or_else(|| resolve::without_object(GET_MAX_THREADS)) else {
        // Programs may ask for a function that they link weakly, in a process without OpenMP.
        return 1;
    };
    // SAFETY: the address is that of OpenMP's function of this type.
    unsafe { std::mem::transmute::<usize, extern "C" fn() -> c_int>(address)() }
}

/// `omp_set_num_threads` with the caller's return address as second argument.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn omp_set_num_threads(_threads: c_int) {
    naked_asm!("mov rsi, [rsp]", "jmp {ask}", ask = sym ask)
}

/// The same in Fortran, where the argument is an address.
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn omp_set_num_threads_(_threads: *const c_int) {
    naked_asm!("mov edi, [rdi]", "mov rsi, [rsp]", "jmp {ask}", ask = sym ask)
}

extern "C" fn ask(threads: c_int, return_address: usize) {
    if let (Some(object), _) = resolve::caller(return_address, SET_NUM_THREADS) {
        teams::ask(object, threads);
    } else if let Some(address) = resolve::without_object(SET_NUM_THREADS) {
        // SAFETY: the address is that of OpenMP's function of this type.
        unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(address)(threads) };
    }
}

/// `dlsym`: jumps to the real one, which needs the caller's return address, or to [`find_driver_function`].
#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    naked_asm!(
        "push rdi", "push rsi", "sub rsp, 8",
        "call {choose}",
        "add rsp, 8", "pop rsi", "pop rdi",
        "jmp rax",
        choose = sym choose_dlsym,
    )
}

extern "C" fn choose_dlsym(handle: *mut c_void, name: *const c_char) -> usize {
    let is_driver = |name: &[u8]| gpu::is_driver_function(name) || direct::is_defined(name);
    // A library that stands between programs and the driver asks for the function after its own.
    let is_relative = handle == libc::RTLD_NEXT;
    // SAFETY: a name that is not null ends in NUL, by the contract of `dlsym`.
    let is_ours = !is_relative && !name.is_null() && is_driver(unsafe { CStr::from_ptr(name) }.to_bytes());
    let real = if is_ours { 0 } else { resolve::real_dlsym() };
    if real == 0 { find_driver_function as *const () as usize } else { real }
}

/// Answers for functions of the CUDA driver. They are searched for in a library, never relative to the caller.
extern "C" fn find_driver_function(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    if name.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: the name ends in NUL, by the contract of `dlsym`.
    let name = unsafe { CStr::from_ptr(name) };
    let real = driver_symbol(handle, name).unwrap_or(0);
    gpu::answer(handle, name, real) as *mut c_void
}
