//! The page of shared memory between the daemon and the library that is loaded into a job.
//!
//! **Problem.** A job must learn its share while it runs, thousands of times a second, without a system call.
//! What the page contains cannot be trusted: the job's owner can write to the file, and a daemon can die at any
//! moment.
//!
//! **How.** Two files of 4,096 bytes lie in the job's folder. The *page* is written by the daemon and mapped
//! read-only by the library. The *report* is written by the library and read by the daemon. Both are arrays of
//! 64-bit words in the machine's byte order. Each word is read and written whole, so no lock is needed. A third file
//! has the job's rhythm ([`rhythm`]).
//!
//! **Terms.** A *team* is the number of threads of one parallel region. A *GPU share* counts millionths of the
//! GPU's time. The *heartbeat* is the monotonic clock of the machine in nanoseconds.
//!
//! **Properties.** `garbage_is_refused`, `short_pages_are_refused`, `other_versions_are_refused`,
//! `a_page_without_heartbeat_is_stale`: [`read`] returns orders only from a page that a living daemon wrote.

pub mod rhythm;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// The environment variable with the path of the page. The path of the report is the same with [`REPORT_SUFFIX`].
pub const PAGE_VARIABLE: &str = "GAINSHARE_INSIDE_PAGE";

/// The environment variable that switches the library off if its value is `0`.
pub const SWITCH_VARIABLE: &str = "GAINSHARE_INSIDE";

/// The environment variable that lets the library catch GPU work: [`GPU_ON`], or [`GPU_ALL`] for jobs on several GPUs,
/// too.
pub const GPU_VARIABLE: &str = "GAINSHARE_INSIDE_GPU";

/// Jobs on one GPU are paced.
pub const GPU_ON: &str = "1";

/// Jobs on several GPUs and of several ranks are paced, too.
pub const GPU_ALL: &str = "all";

/// Variables of launchers with the number of ranks of a job: PyTorch's, those of several kinds of MPI, and Slurm's.
/// Ranks wait for each other, so that a pause of one of them stops all.
pub const RANK_VARIABLES: [&str; 6] =
    ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"];

/// The name of the library's file, which lies beside the program `gainshare`.
pub const LIBRARY_FILE: &str = "libgainshare_inside.so";

pub const REPORT_SUFFIX: &str = ".report";

/// The length of each of the files.
pub const PAGE_BYTES: usize = 4096;

/// The length of a page in words of 64 bits.
pub const PAGE_WORDS: usize = PAGE_BYTES / 8;

/// A whole GPU, in the unit of [`Orders::gpu_share`].
pub const WHOLE_GPU: u32 = 1_000_000;

/// A page whose heartbeat is older than this has no daemon. The daemon writes it every two seconds.
pub const STALE_AFTER: Duration = Duration::from_secs(5);

/// Where the daemon writes the heartbeat between two changes.
pub const HEARTBEAT_OFFSET: u64 = 8 * HEARTBEAT as u64;

const VERSION: u32 = 1;
const PAGE_MAGIC: u64 = u64::from_le_bytes(*b"GAINPAGE");
const REPORT_MAGIC: u64 = u64::from_le_bytes(*b"GAINRPRT");

// Words of both files.
const MAGIC: usize = 0;
const FORMAT: usize = 1;
// Words of the page.
const GENERATION: usize = 2;
const HEARTBEAT: usize = 3;
const SHARES: usize = 4;
const FLAGS: usize = 5;

/// OpenBLAS was started with a small pool by the daemon and not by the user, so its pool may grow.
const FLAG_BLAS_MAY_GROW: u64 = 1;

/// What the daemon wants from the library.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Orders {
    /// The number of the plan that these orders come from.
    pub generation: u64,
    /// The wanted number of threads of a parallel region; 0: as many as the program wants.
    pub team: u32,
    /// The job's part of the GPU's time in millionths; 0: as much as the program wants.
    pub gpu_share: u32,
    /// How many jobs share the GPU, this one included; 0: not known.
    pub gpu_jobs: u32,
    /// Whether the pool of OpenBLAS may become larger than it was at the start of the program.
    pub blas_may_grow: bool,
}

/// The bytes of a page with these orders. The daemon writes all of them at the start and the first
/// [`HEADER_BYTES`] at a change.
pub fn encode(orders: &Orders, heartbeat_ns: u64) -> [u8; PAGE_BYTES] {
    let mut words = [0_u64; PAGE_WORDS];
    words[MAGIC] = PAGE_MAGIC;
    words[FORMAT] = format_word();
    words[GENERATION] = orders.generation;
    words[HEARTBEAT] = heartbeat_ns;
    words[SHARES] = u64::from(orders.team) | u64::from(orders.gpu_share) << 32;
    let flags = if orders.blas_may_grow { FLAG_BLAS_MAY_GROW } else { 0 };
    words[FLAGS] = flags | u64::from(orders.gpu_jobs) << 32;
    bytes_of(&words)
}

/// How many bytes at the start of a page can change.
pub const HEADER_BYTES: usize = 8 * (FLAGS + 1);

/// The orders in a mapped page; `None` if the page is garbage, too short, of another version or stale.
pub fn read(words: &[AtomicU64], now_ns: u64) -> Option<Orders> {
    let word = |index: usize| words.get(index).map(|word| word.load(Relaxed));
    if words.len() < PAGE_WORDS || word(MAGIC)? != PAGE_MAGIC || word(FORMAT)? != format_word() {
        return None;
    }
    // The clocks of reader and writer differ by some milliseconds, in both directions.
    if now_ns.abs_diff(word(HEARTBEAT)?) > STALE_AFTER.as_nanos() as u64 {
        return None;
    }
    let shares = word(SHARES)?;
    Some(Orders {
        generation: word(GENERATION)?,
        team: shares as u32,
        gpu_share: ((shares >> 32) as u32).min(WHOLE_GPU),
        gpu_jobs: (word(FLAGS)? >> 32) as u32,
        blas_may_grow: word(FLAGS)? & FLAG_BLAS_MAY_GROW != 0,
    })
}

/// The orders in the bytes of a page, whatever its heartbeat; `None` if the bytes are no page.
pub fn decode(bytes: &[u8; PAGE_BYTES]) -> Option<Orders> {
    let words = bytes.as_chunks::<8>().0;
    let words: Vec<AtomicU64> = words.iter().map(|word| AtomicU64::new(u64::from_ne_bytes(*word))).collect();
    let heartbeat_ns = words.get(HEARTBEAT)?.load(Relaxed);
    read(&words, heartbeat_ns)
}

/// Parts of a job's program that the library controls: bits of the report's word [`ReportWord::Hooks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    GnuOpenMp = 1,
    LlvmOpenMp = 2,
    OpenBlas = 4,
    Mkl = 8,
    CudaDriver = 16,
}

impl Hook {
    pub const ALL: [Hook; 5] = [Hook::GnuOpenMp, Hook::LlvmOpenMp, Hook::OpenBlas, Hook::Mkl, Hook::CudaDriver];

    pub fn name(self) -> &'static str {
        match self {
            Hook::GnuOpenMp => "GNU OpenMP",
            Hook::LlvmOpenMp => "LLVM OpenMP",
            Hook::OpenBlas => "OpenBLAS",
            Hook::Mkl => "MKL",
            Hook::CudaDriver => "CUDA driver",
        }
    }
}

/// Words of the report, after the two that both files have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportWord {
    /// A set of [`Hook`]s.
    Hooks = 2,
    /// Programs that loaded the library, those that ended included.
    Programs = 3,
    /// Parallel regions that were opened.
    Regions = 4,
    /// How often the library set another team size.
    Changes = 5,
    /// The team size that was set last.
    Team = 6,
    /// Kernels and graphs that were launched on a GPU.
    Launches = 7,
    /// How often the library waited before a launch.
    Pauses = 8,
    /// The sum of these waits in nanoseconds.
    PausedNs = 9,
    /// The GPU that the job uses: its place on the PCI bus, never 0.
    Gpu = 10,
    /// 0: none is known; 1: one GPU; more: several GPUs or several ranks, which are not to be paced.
    Gpus = 11,
    /// How long the program waited for its own work on the GPU, in nanoseconds.
    WaitedNs = 12,
    /// Of how many ranks on this machine the job's first program is one, at least 1; 0: it has not begun. The other
    /// ranks are other jobs.
    OuterRanks = 13,
    /// When the wait for the GPU that is under way began, by the machine's monotonic clock in nanoseconds; 0: none is.
    WaitBeganNs = 14,
}

/// What the library reported.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Report {
    pub hooks: Vec<&'static str>,
    pub programs: u64,
    pub regions: u64,
    pub changes: u64,
    pub team: u64,
    pub launches: u64,
    pub pauses: u64,
    pub paused_ns: u64,
    pub gpu: u64,
    pub gpus: u64,
    pub waited_ns: u64,
    pub wait_began_ns: u64,
}

impl Report {
    /// How long the program waited for its own work on the GPU, the wait that is under way included.
    pub fn waited_until(&self, now_ns: u64) -> u64 {
        let under_way_ns = if self.wait_began_ns > 0 { now_ns.saturating_sub(self.wait_began_ns) } else { 0 };
        self.waited_ns.saturating_add(under_way_ns)
    }
}

/// The bytes of a report that contains nothing yet.
pub fn empty_report() -> [u8; PAGE_BYTES] {
    let mut words = [0_u64; PAGE_WORDS];
    words[MAGIC] = REPORT_MAGIC;
    words[FORMAT] = format_word();
    bytes_of(&words)
}

/// Whether a mapped file is a report that the library may write to.
pub fn is_report(words: &[AtomicU64]) -> bool {
    let is = |index: usize, expected: u64| words.get(index).is_some_and(|word| word.load(Relaxed) == expected);
    words.len() >= PAGE_WORDS && is(MAGIC, REPORT_MAGIC) && is(FORMAT, format_word())
}

/// Decodes a report; `None` if the bytes are not a report.
pub fn decode_report(bytes: &[u8]) -> Option<Report> {
    let (chunks, _) = bytes.as_chunks::<8>();
    let word = |index: usize| chunks.get(index).map(|chunk| u64::from_ne_bytes(*chunk));
    if bytes.len() < PAGE_BYTES || word(MAGIC)? != REPORT_MAGIC || word(FORMAT)? != format_word() {
        return None;
    }
    let hooks = word(ReportWord::Hooks as usize)?;
    let named = |hook: &Hook| (hooks & *hook as u64 != 0).then_some(hook.name());
    Some(Report {
        hooks: Hook::ALL.iter().filter_map(named).collect(),
        programs: word(ReportWord::Programs as usize)?,
        regions: word(ReportWord::Regions as usize)?,
        changes: word(ReportWord::Changes as usize)?,
        team: word(ReportWord::Team as usize)?,
        launches: word(ReportWord::Launches as usize)?,
        pauses: word(ReportWord::Pauses as usize)?,
        paused_ns: word(ReportWord::PausedNs as usize)?,
        gpu: word(ReportWord::Gpu as usize)?,
        gpus: word(ReportWord::Gpus as usize)?,
        waited_ns: word(ReportWord::WaitedNs as usize)?,
        wait_began_ns: word(ReportWord::WaitBeganNs as usize)?,
    })
}

const fn format_word() -> u64 {
    format_of(VERSION)
}

const fn format_of(version: u32) -> u64 {
    version as u64 | (PAGE_BYTES as u64) << 32
}

/// The first two words of a file.
fn bytes_of_format(magic: u64, version: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&magic.to_ne_bytes());
    bytes[8..].copy_from_slice(&format_of(version).to_ne_bytes());
    bytes
}

fn bytes_of(words: &[u64; PAGE_WORDS]) -> [u8; PAGE_BYTES] {
    let mut bytes = [0; PAGE_BYTES];
    for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *chunk = word.to_ne_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;
    const NOW_NS: u64 = 100 * SECOND_NS;
    const ORDERS: Orders = Orders { generation: 7, team: 3, gpu_share: 250_000, gpu_jobs: 2, blas_may_grow: true };

    fn words(bytes: &[u8]) -> Vec<AtomicU64> {
        let (chunks, _) = bytes.as_chunks::<8>();
        chunks.iter().map(|chunk| AtomicU64::new(u64::from_ne_bytes(*chunk))).collect()
    }

    #[test]
    fn orders_survive_the_page() {
        for orders in [ORDERS, Orders::default(), Orders { team: u32::MAX, gpu_share: WHOLE_GPU, ..ORDERS }] {
            assert_eq!(read(&words(&encode(&orders, NOW_NS)), NOW_NS), Some(orders));
            assert_eq!(decode(&encode(&orders, NOW_NS)), Some(orders));
        }
        let greedy = Orders { gpu_share: u32::MAX, ..ORDERS };
        assert_eq!(read(&words(&encode(&greedy, NOW_NS)), NOW_NS).map(|o| o.gpu_share), Some(WHOLE_GPU));
    }

    #[test]
    fn only_the_header_of_a_page_changes() {
        let other = Orders { generation: 8, team: 1, gpu_share: 0, gpu_jobs: 0, blas_may_grow: false };
        let (a, b) = (encode(&ORDERS, NOW_NS), encode(&other, 5));
        assert_eq!(a[HEADER_BYTES..], b[HEADER_BYTES..]);
        let mut changed = a;
        changed[..HEADER_BYTES].copy_from_slice(&b[..HEADER_BYTES]);
        assert_eq!(changed, b);
        let offset = HEARTBEAT_OFFSET as usize;
        changed[offset..offset + 8].copy_from_slice(&NOW_NS.to_ne_bytes());
        assert_eq!(read(&words(&changed), NOW_NS), Some(other));
    }

    #[test]
    fn garbage_is_refused() {
        for filler in [0, 1, 0x47, 0xff] {
            assert_eq!(read(&words(&[filler; PAGE_BYTES]), NOW_NS), None, "{filler}");
            assert_eq!(decode_report(&[filler; PAGE_BYTES]), None, "{filler}");
        }
        assert_eq!(read(&words(&empty_report()), NOW_NS), None, "a report is no page");
        assert!(!is_report(&words(&encode(&ORDERS, NOW_NS))), "a page is no report");
    }

    #[test]
    fn short_pages_are_refused() {
        let page = encode(&ORDERS, NOW_NS);
        for length in [0, 8, HEADER_BYTES, PAGE_BYTES - 8] {
            assert_eq!(read(&words(&page[..length]), NOW_NS), None, "{length} bytes");
            assert_eq!(decode_report(&empty_report()[..length]), None, "{length} bytes");
        }
    }

    #[test]
    fn other_versions_are_refused() {
        for byte in [8, 12] {
            let (mut page, mut report) = (encode(&ORDERS, NOW_NS), empty_report());
            page[byte] += 1;
            report[byte] += 1;
            assert_eq!(read(&words(&page), NOW_NS), None, "byte {byte}");
            assert!(!is_report(&words(&report)), "byte {byte}");
            assert_eq!(decode_report(&report), None, "byte {byte}");
        }
    }

    #[test]
    fn a_page_without_heartbeat_is_stale() {
        let page = words(&encode(&ORDERS, NOW_NS));
        assert_eq!(read(&page, NOW_NS + 4 * SECOND_NS), Some(ORDERS));
        assert_eq!(read(&page, NOW_NS - SECOND_NS / 100), Some(ORDERS), "the reader's clock is coarse");
        for now_ns in [NOW_NS + 6 * SECOND_NS, NOW_NS - 6 * SECOND_NS, 0, u64::MAX] {
            assert_eq!(read(&page, now_ns), None, "{now_ns}");
        }
    }

    #[test]
    fn reports_are_read_back() {
        let report = words(&empty_report());
        assert!(is_report(&report));
        report[ReportWord::Hooks as usize].fetch_or(Hook::GnuOpenMp as u64 | Hook::OpenBlas as u64, Relaxed);
        report[ReportWord::Regions as usize].fetch_add(12, Relaxed);
        report[ReportWord::Team as usize].store(2, Relaxed);
        let bytes: Vec<u8> = report.iter().flat_map(|word| word.load(Relaxed).to_ne_bytes()).collect();
        let expected = Report { hooks: vec!["GNU OpenMP", "OpenBLAS"], regions: 12, team: 2, ..Report::default() };
        assert_eq!(decode_report(&bytes), Some(expected));
    }

    #[test]
    fn a_wait_that_is_under_way_counts() {
        let report = |waited_ns, wait_began_ns| Report { waited_ns, wait_began_ns, ..Report::default() };
        assert_eq!(report(500, 0).waited_until(NOW_NS), 500);
        assert_eq!(report(500, NOW_NS - 70).waited_until(NOW_NS), 570);
        assert_eq!(report(500, NOW_NS + 1).waited_until(NOW_NS), 500, "the clocks differ a little");
        assert_eq!(report(u64::MAX, 1).waited_until(NOW_NS), u64::MAX, "a report may contain anything");
    }
}
