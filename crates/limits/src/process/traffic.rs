//! Network bytes of each job. FlowCon's fourth resource.
//!
//! No control group counts network use. The kernel's socket diagnostics do, for each TCP connection, and
//! `/proc` lists the sockets each process has open. A job's bytes are the sum over the connections of its
//! processes, closed ones included. Without the feature `traffic` there are no diagnostics: no bytes are
//! counted, and a note names the reason.
//!
//! **Limits.** A lower bound: connections that open and close between two readings are missed, and so are
//! other protocols than TCP and processes in a network namespace of their own. Bulk transfers (data sets,
//! gradients, checkpoints) are long-lived TCP connections.
//!
//! **Cost.** One dump of all connections for all jobs, every [`REFRESH_AFTER`] while a job has a connection, else every
//! [`SEARCH_AFTER`]: the kernel walks through the table of all sockets, which takes a millisecond. The open files of a
//! job are listed only after a connection has appeared somewhere on the machine, and rarely for a job that has none: a
//! list takes some twenty system calls.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

const REFRESH_AFTER: Duration = Duration::from_secs(2);

/// Time between two searches for the connections of jobs that have none. The kernel counts the bytes of a
/// connection from its beginning, so that one that is found late is counted as a whole.
const SEARCH_AFTER: Duration = Duration::from_secs(10);

/// Inode of a socket.
type Inode = u64;

#[derive(Debug, Default)]
pub(super) struct Traffic {
    /// Bytes of every connection of the machine, as of the last dump.
    connections: HashMap<Inode, u64>,
    dumped: Option<Instant>,
    /// The last dump with a connection that the dump before did not have.
    changed: Option<Instant>,
    /// Why connections cannot be listed; tried once.
    failed: Option<String>,
    jobs: BTreeMap<String, JobConnections>,
}

/// One job's connections.
#[derive(Debug, Default)]
struct JobConnections {
    refreshed: Option<Instant>,
    /// When the open files were last listed.
    listed: Option<Instant>,
    open: BTreeMap<Inode, u64>,
    closed_bytes: u64,
}

impl Traffic {
    /// Whether connections can be listed; the error is a sentence for users.
    pub(super) fn probe(&mut self) -> Result<(), String> {
        self.dump(Instant::now());
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Bytes sent and received by the job's processes since the first call; `pids` is called only when the
    /// list of sockets is due.
    pub(super) fn job_bytes(&mut self, key: &str, now: Instant, pids: impl FnOnce() -> Vec<i32>) -> Option<u64> {
        let due = |last: Option<Instant>, pause| last.is_none_or(|t| now.saturating_duration_since(t) >= pause);
        let has_connections = || self.jobs.values().any(|job| !job.open.is_empty());
        let is_due = due(self.dumped, SEARCH_AFTER) || (due(self.dumped, REFRESH_AFTER) && has_connections());
        if self.failed.is_none() && is_due {
            self.dump(now);
        }
        if self.failed.is_some() {
            return None;
        }
        if !self.jobs.contains_key(key) {
            self.jobs.insert(key.to_owned(), JobConnections::default());
        }
        let job = self.jobs.get_mut(key)?;
        if due(job.refreshed, REFRESH_AFTER) {
            job.refreshed = Some(now);
            let held = if job.is_list_due(self.changed, now) {
                job.listed = Some(now);
                sockets_of(&pids())
            } else {
                job.open.keys().copied().collect()
            };
            let known = held.into_iter().filter_map(|inode| Some((inode, *self.connections.get(&inode)?)));
            job.record(known.collect());
        }
        Some(job.total())
    }

    pub(super) fn forget(&mut self, key: &str) {
        self.jobs.remove(key);
    }

    fn dump(&mut self, now: Instant) {
        self.dumped = Some(now);
        match connections() {
            Ok(connections) => {
                if connections.keys().any(|inode| !self.connections.contains_key(inode)) {
                    self.changed = Some(now);
                }
                self.connections = connections;
            }
            Err(e) => self.failed = Some(format!("network use is not counted: sockets cannot be listed ({e})")),
        }
    }
}

impl JobConnections {
    /// Whether the job may have a connection that is not known as its own. `changed` is when a connection last appeared
    /// on the machine.
    fn is_list_due(&self, changed: Option<Instant>, now: Instant) -> bool {
        let Some(changed) = changed else { return false };
        let pause = if self.open.is_empty() { SEARCH_AFTER } else { REFRESH_AFTER };
        self.listed.is_none_or(|listed| changed >= listed && now.saturating_duration_since(listed) >= pause)
    }

    fn record(&mut self, now: BTreeMap<Inode, u64>) {
        for (inode, bytes) in std::mem::take(&mut self.open) {
            // Gone, or another socket with the same inode: what the old one carried stays counted.
            if now.get(&inode).is_none_or(|&later| later < bytes) {
                self.closed_bytes = self.closed_bytes.saturating_add(bytes);
            }
        }
        self.open = now;
    }

    fn total(&self) -> u64 {
        self.open.values().fold(self.closed_bytes, |sum, bytes| sum.saturating_add(*bytes))
    }
}

#[cfg(feature = "traffic")]
use super::sock_diag::connections;

/// Without socket diagnostics.
#[cfg(not(feature = "traffic"))]
fn connections() -> std::io::Result<HashMap<Inode, u64>> {
    Err(std::io::Error::new(std::io::ErrorKind::Unsupported, "built without the feature `traffic`"))
}

/// The sockets these processes have open.
fn sockets_of(pids: &[i32]) -> BTreeSet<Inode> {
    let mut inodes = BTreeSet::new();
    for pid in pids {
        // A process may end, or be another user's, at any time.
        let Ok(files) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
        let targets = files.flatten().filter_map(|file| std::fs::read_link(file.path()).ok());
        inodes.extend(
            targets.filter_map(|target| {
                target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse::<Inode>().ok()
            }),
        );
    }
    inodes
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "traffic")]
    use std::io::{Read, Write};
    #[cfg(feature = "traffic")]
    use std::net::{TcpListener, TcpStream};

    /// Moves bytes through a connection of this very process.
    #[cfg(feature = "traffic")]
    fn send(to: &mut TcpStream, from: &mut TcpStream, bytes: usize) {
        to.write_all(&vec![7; bytes]).unwrap();
        let mut got = vec![0; bytes];
        from.read_exact(&mut got).unwrap();
    }

    #[cfg(feature = "traffic")]
    #[test]
    fn real_connections_are_counted_while_open_and_after() {
        let mut traffic = Traffic::default();
        traffic.probe().expect("this kernel lists sockets");
        let me = || vec![std::process::id() as i32];
        let mut now = Instant::now();
        let mut read = |traffic: &mut Traffic| {
            now += SEARCH_AFTER;
            traffic.job_bytes("me", now, me).unwrap()
        };
        let before = read(&mut traffic);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        send(&mut one, &mut other, 300_000);
        let open = read(&mut traffic);
        // Both ends are ours: sent and received.
        assert!(open >= before + 600_000, "{before} {open}");
        send(&mut other, &mut one, 100_000);
        drop((one, other));
        let closed = read(&mut traffic);
        assert!(closed >= open, "a closed connection is not forgotten: {open} {closed}");
        assert_eq!(
            traffic.job_bytes("stranger", now + REFRESH_AFTER, || vec![i32::MAX]),
            Some(0),
            "a process that is not there"
        );
    }

    #[test]
    fn files_are_listed_after_a_connection_has_appeared() {
        let begin = Instant::now();
        let after = |s: u64| begin + Duration::from_secs(s);
        let mut job = JobConnections::default();
        assert!(!job.is_list_due(None, begin), "no connection was ever there");
        assert!(job.is_list_due(Some(begin), begin), "its files were never listed");
        job.listed = Some(after(5));
        assert!(!job.is_list_due(Some(after(4)), after(100)), "nothing has appeared since");
        assert!(!job.is_list_due(Some(after(6)), after(14)) && job.is_list_due(Some(after(6)), after(15)));
        job.open.insert(1, 10);
        assert!(job.is_list_due(Some(after(6)), after(7)), "a job with connections has further ones soon");
    }

    #[test]
    fn counts_never_fall() {
        let mut job = JobConnections::default();
        job.record(BTreeMap::from([(1, 10), (2, 5)]));
        assert_eq!(job.total(), 15);
        // 1 was closed and its inode given to a new socket; 2 is gone.
        job.record(BTreeMap::from([(1, 3)]));
        assert_eq!(job.total(), 10 + 5 + 3);
        job.record(BTreeMap::new());
        assert_eq!(job.total(), 18);
    }
}
