//! What a job sends and receives.
//!
//! No control group counts network use. The kernel's socket diagnostics do, for each TCP connection, and `/proc` says which process
//! has it open. A job's bytes are the sum over the connections of its processes, those that have closed included.
//!
//! **Limits.** A lower bound: a connection that opens and closes between two looks is missed, so is what is not TCP, and so is a
//! process in a network namespace of its own. Bulk transfers (data sets, gradients, checkpoints) are long-lived TCP connections.
//!
//! **Cost.** One dump of all connections for all jobs, and one look at a job's open files, each at most every [`LOOK`].

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::SockDiagMessage;
use netlink_packet_sock_diag::constants::{AF_INET, AF_INET6, IPPROTO_TCP};
use netlink_packet_sock_diag::inet::nlas::Nla;
use netlink_packet_sock_diag::inet::{ExtensionFlags, InetRequest, SocketId, StateFlags};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_SOCK_DIAG;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::time::{Duration, Instant};

const LOOK: Duration = Duration::from_secs(2);

/// Where `struct tcp_info` counts bytes (Linux 4.1 and later). The struct grows with the kernel, so it is not read as a whole.
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;

/// Inode of a socket.
type Inode = u64;

#[derive(Debug, Default)]
pub(super) struct Traffic {
    /// Bytes of every connection of the machine, as of the last dump.
    connections: HashMap<Inode, u64>,
    dumped: Option<Instant>,
    /// Why the kernel does not tell; asked once.
    failed: Option<String>,
    jobs: BTreeMap<String, Seen>,
}

/// One job's connections.
#[derive(Debug, Default)]
struct Seen {
    looked: Option<Instant>,
    open: BTreeMap<Inode, u64>,
    closed_bytes: u64,
}

impl Traffic {
    /// Whether the kernel tells; the error is a sentence for people.
    pub(super) fn probe(&mut self) -> Result<(), String> {
        self.dump(Instant::now());
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Bytes sent and received by the job's processes since they were first looked at; `pids` is asked only when it is time to look.
    pub(super) fn of(&mut self, key: &str, now: Instant, pids: impl FnOnce() -> Vec<i32>) -> Option<u64> {
        let due = |last: Option<Instant>| last.is_none_or(|t| now.saturating_duration_since(t) >= LOOK);
        if self.failed.is_none() && due(self.dumped) {
            self.dump(now);
        }
        if self.failed.is_some() {
            return None;
        }
        if !self.jobs.contains_key(key) {
            self.jobs.insert(key.to_owned(), Seen::default());
        }
        let seen = self.jobs.get_mut(key)?;
        if due(seen.looked) {
            seen.looked = Some(now);
            // Nothing to look for: most machines train without a connection.
            let held = if self.connections.is_empty() { BTreeSet::new() } else { sockets_of(&pids()) };
            let known = held.into_iter().filter_map(|inode| Some((inode, *self.connections.get(&inode)?)));
            seen.take(known.collect());
        }
        Some(seen.total())
    }

    pub(super) fn forget(&mut self, key: &str) {
        self.jobs.remove(key);
    }

    fn dump(&mut self, now: Instant) {
        self.dumped = Some(now);
        match connections() {
            Ok(connections) => self.connections = connections,
            Err(e) => self.failed = Some(format!("network use is not counted: the kernel does not list sockets ({e})")),
        }
    }
}

impl Seen {
    fn take(&mut self, now: BTreeMap<Inode, u64>) {
        for (inode, bytes) in std::mem::take(&mut self.open) {
            // Gone, or another socket with the same inode: what the old one carried stays counted.
            if now.get(&inode).is_none_or(|&later| later < bytes) {
                self.closed_bytes += bytes;
            }
        }
        self.open = now;
    }

    fn total(&self) -> u64 {
        self.open.values().fold(self.closed_bytes, |sum, bytes| sum.saturating_add(*bytes))
    }
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

/// Bytes of every TCP connection in this network namespace.
fn connections() -> io::Result<HashMap<Inode, u64>> {
    let mut socket = Socket::new(NETLINK_SOCK_DIAG)?;
    socket.bind_auto()?;
    let mut found = HashMap::new();
    for (family, socket_id) in [(AF_INET, SocketId::new_v4()), (AF_INET6, SocketId::new_v6())] {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_DUMP;
        let request = InetRequest {
            family,
            protocol: IPPROTO_TCP,
            extensions: ExtensionFlags::INFO,
            states: StateFlags::ESTABLISHED | StateFlags::FIN_WAIT1 | StateFlags::FIN_WAIT2 | StateFlags::CLOSE_WAIT,
            socket_id,
        };
        let mut packet = NetlinkMessage::new(header, SockDiagMessage::InetRequest(request).into());
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        socket.send(&bytes, 0)?;
        while read_part(&socket, &mut found)? {}
    }
    Ok(found)
}

/// Takes in one datagram of a dump; `false` when it was the last.
fn read_part(socket: &Socket, found: &mut HashMap<Inode, u64>) -> io::Result<bool> {
    let (datagram, _) = socket.recv_from_full()?;
    let mut rest = &datagram[..];
    while !rest.is_empty() {
        let message = NetlinkMessage::<SockDiagMessage>::deserialize(rest).map_err(io::Error::other)?;
        match message.payload {
            NetlinkPayload::Done(_) => return Ok(false),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            NetlinkPayload::InnerMessage(SockDiagMessage::InetResponse(response)) => {
                for attribute in &response.nlas {
                    if let Nla::TcpInfo(info) = attribute {
                        found.insert(response.header.inode.into(), bytes_in(info));
                    }
                }
            }
            _ => {}
        }
        // Messages are aligned to four bytes.
        let length = (message.header.length as usize).next_multiple_of(4);
        rest = rest.get(length.max(16)..).unwrap_or_default();
    }
    Ok(true)
}

/// Received, and sent and acknowledged. An older kernel's shorter answer counts as nothing.
fn bytes_in(info: &[u8]) -> u64 {
    let number = |at: usize| info.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes);
    number(BYTES_ACKED).saturating_add(number(BYTES_RECEIVED))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    /// Moves bytes through a connection of this very process.
    fn send(to: &mut TcpStream, from: &mut TcpStream, bytes: usize) {
        to.write_all(&vec![7; bytes]).unwrap();
        let mut got = vec![0; bytes];
        from.read_exact(&mut got).unwrap();
    }

    #[test]
    fn real_connections_are_counted_while_open_and_after() {
        let mut traffic = Traffic::default();
        traffic.probe().expect("this kernel lists sockets");
        let me = || vec![std::process::id() as i32];
        let mut now = Instant::now();
        let mut look = |traffic: &mut Traffic| {
            now += LOOK;
            traffic.of("me", now, me).unwrap()
        };
        let before = look(&mut traffic);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut other = listener.accept().unwrap().0;
        send(&mut one, &mut other, 300_000);
        let open = look(&mut traffic);
        // Both ends are ours: sent and received.
        assert!(open >= before + 600_000, "{before} {open}");
        send(&mut other, &mut one, 100_000);
        drop((one, other));
        let closed = look(&mut traffic);
        assert!(closed >= open, "a closed connection is not forgotten: {open} {closed}");
        assert_eq!(traffic.of("stranger", now + LOOK, || vec![i32::MAX]), Some(0), "a process that is not there");
    }

    #[test]
    fn counts_never_fall() {
        let mut seen = Seen::default();
        seen.take(BTreeMap::from([(1, 10), (2, 5)]));
        assert_eq!(seen.total(), 15);
        // 1 was closed and its inode given to a new socket; 2 is gone.
        seen.take(BTreeMap::from([(1, 3)]));
        assert_eq!(seen.total(), 10 + 5 + 3);
        seen.take(BTreeMap::new());
        assert_eq!(seen.total(), 18);
    }

    #[test]
    fn short_answers_count_nothing() {
        for length in 0..BYTES_RECEIVED + 8 {
            bytes_in(&vec![0xff; length]);
        }
        assert_eq!(bytes_in(&[0; 40]), 0);
    }
}
