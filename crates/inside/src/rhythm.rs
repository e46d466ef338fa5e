//! Notes parallel regions and launches in the table of the job's rhythm.
//!
//! The address of the call, the kernel or the graph is the signature of a place (`gainshare_page::rhythm`). The daemon
//! reads the table and finds the steps of the optimizer in it. Of several ranks only the first one notes anything: all
//! ranks make the same steps, and their events would be mixed.

use crate::attach::{attach_rhythm, rhythm_table, variable};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;

/// The number of the next event of this program.
static NEXT: AtomicU32 = AtomicU32::new(0);

/// Variables of launchers with the number of a rank.
const RANK_VARIABLES: [&str; 5] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID"];

/// Runs before the program's `main`.
pub(crate) fn start() {
    if RANK_VARIABLES.iter().filter_map(|name| variable(name)).all(|rank| rank == b"0") {
        attach_rhythm();
    }
}

/// Notes that a region or a launch begins at this place.
pub(crate) fn note(signature: usize) {
    if let Some(table) = rhythm_table() {
        gainshare_page::rhythm::note(table, signature as u64, NEXT.fetch_add(1, Relaxed));
    }
}
