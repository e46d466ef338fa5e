//! Copies one container's output into its job's output.log, so that reports, `logs` and restarts work as
//! for a process.

use crate::jobdir::{self, OLDER_OUTPUT, OUTPUT};
use gainshare_limits::docker::{Engine, LogCursor};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// As a supervisor does it.
const ROTATE_AT_BYTES: u64 = 64 << 20;

/// How many bytes earlier files held, in decimal digits.
const BASE: &str = "output.base";

/// How far a container's output was copied: the engine's cursor and the number of bytes written before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CopyPosition {
    pub(super) cursor: LogCursor,
    bytes: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Pump {
    copied: Arc<Mutex<CopyPosition>>,
    has_ended: Arc<AtomicBool>,
}

impl Pump {
    /// Continues after `from`. Bytes that the file has beyond it were copied by a daemon that died
    /// before it could record so; the engine hands out the same bytes again, and they are skipped.
    pub(super) fn start(engine: &Engine, container: &str, dir: &Path, from: CopyPosition) -> std::io::Result<Pump> {
        let mut file = jobdir::append_regular(&dir.join(OUTPUT))?;
        let mut length = file.metadata()?.len();
        let mut total = total_bytes(dir, length);
        let mut skip = total.saturating_sub(from.bytes);
        let mut chunks = engine.follow_logs(container, from.cursor);
        let pump = Pump { copied: Arc::new(Mutex::new(from)), has_ended: Arc::default() };
        let (shared, dir) = (pump.clone(), dir.to_path_buf());
        let work = move || {
            while let Some(chunk) = chunks.blocking_recv() {
                let known = skip.min(chunk.bytes.len() as u64) as usize;
                skip -= known as u64;
                let fresh = &chunk.bytes[known..];
                if length >= ROTATE_AT_BYTES
                    && let Ok(next) = rotate(&dir, total)
                {
                    file = next;
                    length = 0;
                }
                // A full disk loses log, not the job.
                if file.write_all(fresh).is_ok() {
                    length = length.saturating_add(fresh.len() as u64);
                    total = total.saturating_add(fresh.len() as u64);
                }
                if skip == 0 {
                    *shared.copied.lock().unwrap_or_else(PoisonError::into_inner) =
                        CopyPosition { cursor: chunk.cursor, bytes: total };
                }
            }
            shared.has_ended.store(true, Ordering::Release);
        };
        std::thread::Builder::new().name("container-log".into()).stack_size(256 << 10).spawn(work)?;
        Ok(pump)
    }

    pub(super) fn copied(&self) -> CopyPosition {
        *self.copied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until all output was copied, at most for `limit`.
    pub(super) fn wait_for_end(&self, limit: Duration) {
        let begun = Instant::now();
        while !self.has_ended.load(Ordering::Acquire) && begun.elapsed() < limit {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// How many bytes all output has so far: what earlier files held, and `length` bytes of the newest one.
fn total_bytes(dir: &Path, length: u64) -> u64 {
    read_base(dir).saturating_add(length)
}

fn read_base(dir: &Path) -> u64 {
    let mut text = String::new();
    let read = jobdir::open_regular(&dir.join(BASE)).and_then(|file| file.take(32).read_to_string(&mut text));
    read.ok().and_then(|_| text.trim().parse().ok()).unwrap_or(0)
}

fn rotate(dir: &Path, total: u64) -> std::io::Result<File> {
    jobdir::write_unsynced(dir, BASE, total.to_string().as_bytes())?;
    std::fs::rename(dir.join(OUTPUT), dir.join(OLDER_OUTPUT))?;
    jobdir::append_regular(&dir.join(OUTPUT))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forged_base_is_harmless() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(total_bytes(dir.path(), 7), 7);
        std::fs::write(dir.path().join(BASE), "18446744073709551615").unwrap();
        assert_eq!(total_bytes(dir.path(), 7), u64::MAX);
        std::fs::write(dir.path().join(BASE), "99999999999999999999999").unwrap();
        assert_eq!(total_bytes(dir.path(), 7), 7);
    }
}
