//! Maps the page, the report and the table of the rhythm when a program starts.
//!
//! **How.** A constructor runs before the program's `main`: it reads environment variables and maps three files.
//! A child that is forked keeps the mappings. A program that is executed inherits the variables and maps the files
//! again.
//!
//! A launcher such as `torchrun` starts several ranks of a job on one machine, and each of them loads the library. The
//! page has the team of the whole job, so each rank takes its part of it. If the job's first program is a rank already
//! (`mpirun gainshare run …`), each rank is a job with a team of its own.
//!
//! A mapped file that is truncated raises SIGBUS at the next access. The handler replaces such a page by zeros,
//! which no reader accepts, and the program goes on. A program with a handler of its own keeps it.

use gainshare_page::rhythm::{RHYTHM_NUMBERS, RHYTHM_SUFFIX, is_rhythm};
use gainshare_page::{
    Hook, Orders, PAGE_BYTES, PAGE_VARIABLE, PAGE_WORDS, REPORT_SUFFIX, ReportWord, SWITCH_VARIABLE, is_report, read,
};
use libc::{c_char, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};

type Words = [AtomicU64; PAGE_WORDS];
type Table = [AtomicU32; RHYTHM_NUMBERS];

const _: () = assert!(size_of::<Table>() == size_of::<Words>() && align_of::<Table>() <= align_of::<Words>());

/// The mapped page; null: the library is switched off or found no page.
static PAGE: AtomicPtr<Words> = AtomicPtr::new(null_mut());

/// The mapped report; null: nothing is reported.
static REPORT: AtomicPtr<Words> = AtomicPtr::new(null_mut());

/// The mapped table of the rhythm; null: nothing is noted.
static RHYTHM: AtomicPtr<Table> = AtomicPtr::new(null_mut());

/// How many ranks of the job are on this machine, this one included.
static LOCAL_RANKS: AtomicU32 = AtomicU32::new(1);

/// Variables of launchers with the number of ranks on this machine.
const LOCAL_RANK_VARIABLES: [&str; 4] =
    ["LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"];

/// No machine has more ranks of one job. A larger number means something else.
const MOST_LOCAL_RANKS: u32 = 4096;

/// The longest path that is accepted, with the suffix of the report and a NUL.
const PATH_BYTES: usize = libc::PATH_MAX as usize;

/// Whether a page was found at the start of the program.
pub(crate) fn is_attached() -> bool {
    !PAGE.load(Relaxed).is_null()
}

/// What the daemon wants now; `None`: nothing, because there is no daemon or no valid page.
pub(crate) fn orders() -> Option<Orders> {
    let page = PAGE.load(Acquire);
    // SAFETY: a page that is not null was mapped for the rest of the process's life.
    let page = unsafe { page.as_ref() }?;
    let orders = read(page, coarse_ns())?;
    Some(Orders { team: part_of_rank(orders.team, LOCAL_RANKS.load(Relaxed)), ..orders })
}

/// The team of one of several ranks: the ranks together have as many threads as the job, or one each.
fn part_of_rank(team: u32, ranks: u32) -> u32 {
    match (team, team.checked_div(ranks)) {
        (0, _) | (_, None) => team,
        (_, Some(part)) => part.max(1),
    }
}

/// The number of ranks in a variable of a launcher; `None`: there is none, or it makes no sense.
fn ranks_in(text: &[u8]) -> Option<u32> {
    let ranks = std::str::from_utf8(text).ok()?.parse::<u32>().ok()?;
    (1..=MOST_LOCAL_RANKS).contains(&ranks).then_some(ranks)
}

/// The machine's monotonic clock, a few milliseconds late; a reading costs a few nanoseconds.
pub(crate) fn coarse_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC_COARSE)
}

/// The machine's monotonic clock, exactly.
pub(crate) fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

fn clock_ns(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the argument is a valid timespec.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

fn report_word(word: ReportWord) -> Option<&'static AtomicU64> {
    // SAFETY: a report that is not null was mapped for the rest of the process's life.
    unsafe { REPORT.load(Acquire).as_ref() }?.get(word as usize)
}

pub(crate) fn count(word: ReportWord, by: u64) {
    if let Some(counter) = report_word(word) {
        counter.fetch_add(by, Relaxed);
    }
}

pub(crate) fn report(word: ReportWord, value: u64) {
    if let Some(cell) = report_word(word) {
        cell.store(value, Relaxed);
    }
}

/// Writes a word of the report if it is 0, and returns what it contains then.
pub(crate) fn report_once(word: ReportWord, value: u64) -> u64 {
    let Some(cell) = report_word(word) else { return value };
    match cell.compare_exchange(0, value, Relaxed, Relaxed) {
        Ok(_) => value,
        Err(found) => found,
    }
}

pub(crate) fn report_hook(hook: Hook) {
    if let Some(hooks) = report_word(ReportWord::Hooks) {
        hooks.fetch_or(hook as u64, Relaxed);
    }
}

/// Runs before the program's `main`.
pub(crate) fn attach() {
    if variable(SWITCH_VARIABLE).is_some_and(|value| value == b"0") {
        return;
    }
    let Some(path) = variable(PAGE_VARIABLE) else { return };
    let mut text = [0_u8; PATH_BYTES];
    let Some(page) = map(&mut text, path, b"", libc::PROT_READ) else { return };
    if let Some(report) = map(&mut text, path, REPORT_SUFFIX.as_bytes(), libc::PROT_READ | libc::PROT_WRITE) {
        // SAFETY: `map` returned a whole page, mapped for the rest of the process's life.
        if is_report(unsafe { &*report }) {
            REPORT.store(report, Release);
        }
    }
    survive_truncation();
    let ranks = LOCAL_RANK_VARIABLES.iter().filter_map(|name| variable(name)).find_map(ranks_in).unwrap_or(1);
    let has_report = report_word(ReportWord::OuterRanks).is_some();
    let is_outer = has_report && report_once(ReportWord::OuterRanks, ranks.into()) == u64::from(ranks);
    LOCAL_RANKS.store(if is_outer { 1 } else { ranks }, Relaxed);
    PAGE.store(page, Release);
    count(ReportWord::Programs, 1);
}

/// Maps the table of the rhythm, after [`attach`].
pub(crate) fn attach_rhythm() {
    let Some(path) = variable(PAGE_VARIABLE).filter(|_| is_attached()) else { return };
    let mut text = [0_u8; PATH_BYTES];
    let mapped = map(&mut text, path, RHYTHM_SUFFIX.as_bytes(), libc::PROT_READ | libc::PROT_WRITE);
    if let Some(table) = mapped.map(|page| page.cast::<Table>()) {
        // SAFETY: `map` returned a whole page, mapped for the rest of the process's life.
        if is_rhythm(unsafe { &*table }) {
            RHYTHM.store(table, Release);
        }
    }
}

/// The table of the rhythm; `None`: nothing is noted.
pub(crate) fn rhythm_table() -> Option<&'static [AtomicU32]> {
    // SAFETY: a table that is not null was mapped for the rest of the process's life.
    unsafe { RHYTHM.load(Acquire).as_ref() }.map(|table| &table[..])
}

/// The value of an environment variable.
pub(crate) fn variable(name: &str) -> Option<&'static [u8]> {
    let mut text = [0_u8; 64];
    text.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
    // SAFETY: the name ends in NUL, because the array is longer than every name. The value is not kept beyond the
    // constructor, in which no other thread changes the environment.
    unsafe {
        let value = libc::getenv(text.as_ptr().cast());
        if value.is_null() { None } else { Some(std::ffi::CStr::from_ptr(value).to_bytes()) }
    }
}

/// Maps a regular file of at least one page; `None` if there is none.
fn map(text: &mut [u8; PATH_BYTES], path: &[u8], suffix: &[u8], protection: c_int) -> Option<*mut Words> {
    let length = path.len().checked_add(suffix.len())?;
    text.get_mut(..path.len())?.copy_from_slice(path);
    text.get_mut(path.len()..length)?.copy_from_slice(suffix);
    *text.get_mut(length)? = 0;
    let access = if protection & libc::PROT_WRITE != 0 { libc::O_RDWR } else { libc::O_RDONLY };
    let flags = access | libc::O_CLOEXEC | libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: the path ends in NUL; the descriptor is ours and closed again; the mapping is at least as long as
    // what is read of it, and truncation is survived.
    unsafe {
        let fd = libc::open(text.as_ptr().cast::<c_char>(), flags);
        if fd < 0 {
            return None;
        }
        let mut status: libc::stat = std::mem::zeroed();
        let is_page = libc::fstat(fd, &raw mut status) == 0
            && status.st_mode & libc::S_IFMT == libc::S_IFREG
            && status.st_size >= PAGE_BYTES as libc::off_t;
        let mapped = if is_page {
            libc::mmap(null_mut(), PAGE_BYTES, protection, libc::MAP_SHARED, fd, 0)
        } else {
            libc::MAP_FAILED
        };
        libc::close(fd);
        if mapped == libc::MAP_FAILED { None } else { Some(mapped.cast()) }
    }
}

/// Installs the handler of SIGBUS, unless the program was started with another disposition.
fn survive_truncation() {
    // SAFETY: both structures are valid, and zero is a valid value of them.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        if libc::sigaction(libc::SIGBUS, null(), &raw mut old) != 0 || old.sa_sigaction != libc::SIG_DFL {
            return;
        }
        let mut new: libc::sigaction = std::mem::zeroed();
        new.sa_sigaction = replace_page as *const () as usize;
        new.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART | libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const new, null_mut());
    }
}

/// Replaces a page of ours that lost its file by zeros. Every other SIGBUS has its default effect.
extern "C" fn replace_page(signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel passes a valid siginfo; sigaction, raise and mmap are safe in a signal handler, and the
    // replaced mapping is ours.
    unsafe {
        let address = if info.is_null() || (*info).si_code <= 0 { 0 } else { (*info).si_addr() as usize };
        for page in [PAGE.load(Relaxed), REPORT.load(Relaxed), RHYTHM.load(Relaxed).cast()] {
            let start = page as usize;
            if start != 0 && (start..start.wrapping_add(PAGE_BYTES)).contains(&address) {
                let protection = libc::PROT_READ | libc::PROT_WRITE;
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
                libc::mmap(page.cast(), PAGE_BYTES, protection, flags, -1, 0);
                return;
            }
        }
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        libc::sigaction(signal, &raw const default, null_mut());
        libc::raise(signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_on_one_machine_divide_the_team() {
        for (team, ranks, expected) in [(16, 1, 16), (16, 4, 4), (5, 2, 2), (2, 4, 1), (0, 4, 0), (3, 0, 3)] {
            assert_eq!(part_of_rank(team, ranks), expected, "{team} threads for {ranks} ranks");
        }
    }

    #[test]
    fn numbers_of_ranks_that_make_no_sense_are_ignored() {
        for (text, expected) in [("1", Some(1)), ("8", Some(8)), ("4096", Some(4096))] {
            assert_eq!(ranks_in(text.as_bytes()), expected, "{text}");
        }
        for text in ["", "0", "-2", "two", "2.5", "4097", "99999999999999999999"] {
            assert_eq!(ranks_in(text.as_bytes()), None, "{text}");
        }
        assert_eq!(ranks_in(&[0xff, b'2']), None);
    }
}
