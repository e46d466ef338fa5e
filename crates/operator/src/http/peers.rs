//! What each peer may use before it has proven who it is.
//!
//! **Problem.** Every pod of the cluster can connect to the operator. Connections, bodies and token reviews
//! cost memory and load the API server, and a peer without a token must not be able to spend them all.
//!
//! **How.** A connection is *unproven* until a request on it carried a token that the API server accepted.
//! Unproven connections are counted, in all and for each peer. When their places are taken, a peer that has no
//! unproven connection still gets one: a few addresses with many connections lock no node agent out. Each peer also
//! has a small budget of refused tokens, which fills up again slowly; a peer without budget gets no token review.
//! Admission reviews, which carry no token, have places of their own, some for each peer.
//!
//! **Terms.** *Peer*: an IPv4 address, or the first 64 bits of an IPv6 address. The loopback address is our own
//! pod (or a benchmark on the same machine) and is not limited as a peer.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::Semaphore;

/// How many peers without connections are remembered.
const MOST_PEERS: usize = 4096;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// All connections: more than the largest cluster has nodes.
    pub(crate) connections: usize,
    pub(crate) unproven: usize,
    pub(crate) unproven_per_peer: usize,
    /// Further places for unproven connections of peers that have no other one.
    pub(crate) unproven_first: usize,
    /// Refused tokens that cost a review, at once and each minute.
    pub(crate) refusals: f64,
    pub(crate) refusals_per_minute: f64,
    pub(crate) admissions: usize,
    pub(crate) admissions_per_peer: usize,
    /// For tests: the loopback address is a peer like any other.
    pub(crate) limit_loopback: bool,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 12_000,
            unproven: 1024,
            unproven_per_peer: 128,
            unproven_first: 4096,
            refusals: 10.0,
            refusals_per_minute: 10.0,
            admissions: 16,
            admissions_per_peer: 4,
            limit_loopback: false,
        }
    }
}

pub(crate) struct Peers {
    pub(crate) limits: Limits,
    counts: Mutex<Counts>,
    pub(crate) admissions: Arc<Semaphore>,
}

#[derive(Default)]
struct Counts {
    connections: usize,
    unproven: usize,
    peers: HashMap<IpAddr, Peer>,
}

struct Peer {
    connections: usize,
    unproven: usize,
    /// Refused tokens that may still cost a review, as of `at`.
    budget: f64,
    at: Instant,
    admissions: Arc<Semaphore>,
}

impl Peer {
    fn refill(&mut self, limits: &Limits, now: Instant) {
        let minutes = now.saturating_duration_since(self.at).as_secs_f64() / 60.0;
        self.budget = (self.budget + minutes * limits.refusals_per_minute).min(limits.refusals);
        self.at = now;
    }
}

/// One connection's place; it is free again when the value is dropped.
pub(crate) struct ConnectionSlot {
    peers: Arc<Peers>,
    /// Nothing for peers that are not limited.
    peer: Option<IpAddr>,
    proven: AtomicBool,
}

impl Peers {
    pub(crate) fn new(limits: Limits) -> Arc<Peers> {
        let admissions = Arc::new(Semaphore::new(limits.admissions));
        Arc::new(Peers { limits, counts: Mutex::default(), admissions })
    }

    /// A place for a new connection; nothing if there is none for this peer.
    pub(crate) fn admit(self: &Arc<Self>, address: IpAddr, now: Instant) -> Option<ConnectionSlot> {
        let limits = &self.limits;
        let mut counts = self.counts.lock();
        if counts.connections >= limits.connections {
            return None;
        }
        let peer = self.peer(address);
        if let Some(peer) = peer {
            let has_unproven = counts.peers.get(&peer).is_some_and(|known| known.unproven > 0);
            let first = if has_unproven { 0 } else { limits.unproven_first };
            if counts.unproven >= limits.unproven.saturating_add(first) {
                return None;
            }
            if counts.peers.len() >= MOST_PEERS {
                counts.peers.retain(|_, peer| {
                    peer.refill(limits, now);
                    peer.connections > 0 || peer.budget < limits.refusals
                });
            }
            let entry = counts.peers.entry(peer).or_insert_with(|| Peer {
                connections: 0,
                unproven: 0,
                budget: limits.refusals,
                at: now,
                admissions: Arc::new(Semaphore::new(limits.admissions_per_peer)),
            });
            if entry.unproven >= limits.unproven_per_peer {
                return None;
            }
            entry.connections += 1;
            entry.unproven += 1;
            counts.unproven += 1;
        }
        counts.connections += 1;
        Some(ConnectionSlot { peers: self.clone(), peer, proven: AtomicBool::new(peer.is_none()) })
    }

    fn peer(&self, address: IpAddr) -> Option<IpAddr> {
        let address = address.to_canonical();
        match address {
            _ if address.is_loopback() && !self.limits.limit_loopback => None,
            IpAddr::V4(_) => Some(address),
            IpAddr::V6(address) => {
                let [a, b, c, d, ..] = address.segments();
                Some(IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0)))
            }
        }
    }
}

impl ConnectionSlot {
    /// The API server has accepted a token on this connection.
    pub(crate) fn prove(&self) {
        if !self.proven.swap(true, Ordering::Relaxed) {
            let mut counts = self.peers.counts.lock();
            counts.unproven = counts.unproven.saturating_sub(1);
            if let Some(peer) = self.peer.and_then(|peer| counts.peers.get_mut(&peer)) {
                peer.unproven = peer.unproven.saturating_sub(1);
            }
        }
    }

    /// Takes the cost of one refused token out of the peer's budget; false if it is spent.
    pub(crate) fn spend_refusal(&self, now: Instant) -> bool {
        let limits = &self.peers.limits;
        let mut counts = self.peers.counts.lock();
        let Some(peer) = self.peer.and_then(|peer| counts.peers.get_mut(&peer)) else { return true };
        peer.refill(limits, now);
        let has_budget = peer.budget >= 1.0;
        if has_budget {
            peer.budget -= 1.0;
        }
        has_budget
    }

    /// The token was accepted, or could not be reviewed: the cost goes back.
    pub(crate) fn refund_refusal(&self) {
        let limits = &self.peers.limits;
        let mut counts = self.peers.counts.lock();
        if let Some(peer) = self.peer.and_then(|peer| counts.peers.get_mut(&peer)) {
            peer.budget = (peer.budget + 1.0).min(limits.refusals);
        }
    }

    /// The peer's own places for admission reviews, and everybody's.
    pub(crate) fn admissions(&self) -> (Option<Arc<Semaphore>>, Arc<Semaphore>) {
        let counts = self.peers.counts.lock();
        let own = self.peer.and_then(|peer| counts.peers.get(&peer)).map(|peer| peer.admissions.clone());
        (own, self.peers.admissions.clone())
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.prove();
        let mut counts = self.peers.counts.lock();
        counts.connections = counts.connections.saturating_sub(1);
        if let Some(peer) = self.peer.and_then(|peer| counts.peers.get_mut(&peer)) {
            peer.connections = peer.connections.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn limits() -> Limits {
        let small = Limits { connections: 5, unproven: 4, unproven_per_peer: 2, ..Limits::default() };
        Limits { unproven_first: 0, refusals: 2.0, ..small }
    }

    #[test]
    fn a_peer_has_few_places_until_it_is_proven() {
        let (peers, now) = (Peers::new(limits()), Instant::now());
        let (one, other) = (IpAddr::from([10, 0, 0, 1]), IpAddr::from([10, 0, 0, 2]));
        let first = peers.admit(one, now).unwrap();
        let _second = peers.admit(one, now).unwrap();
        assert!(peers.admit(one, now).is_none());
        let _elsewhere = peers.admit(other, now).unwrap();
        first.prove();
        let _third = peers.admit(one, now).unwrap();
        let _fourth = peers.admit(other, now).unwrap();
        assert!(peers.admit(IpAddr::from([10, 0, 0, 3]), now).is_none(), "all places are taken");
        drop(first);
        assert!(peers.admit(IpAddr::from([10, 0, 0, 3]), now).is_none(), "the unproven have no more places");
        drop(_third);
        assert!(peers.admit(IpAddr::from([10, 0, 0, 3]), now).is_some());
    }

    #[test]
    fn eight_addresses_lock_no_peer_out() {
        let limits = Limits { unproven: 16, unproven_per_peer: 2, unproven_first: 3, ..Limits::default() };
        let (peers, now) = (Peers::new(limits), Instant::now());
        let hostile = |last: u8| IpAddr::from([10, 0, 0, last]);
        let agent = |last: u8| IpAddr::from([10, 0, 1, last]);
        let taken: Vec<ConnectionSlot> = (0..16).map(|i| peers.admit(hostile(i / 2), now).unwrap()).collect();
        assert!(peers.admit(hostile(0), now).is_none());
        let first = peers.admit(agent(1), now).expect("a peer without a connection gets one");
        assert!(peers.admit(agent(1), now).is_none(), "one until it is proven");
        first.prove();
        let _again = peers.admit(agent(1), now).expect("its connection is proven");
        let _others = (peers.admit(agent(2), now).unwrap(), peers.admit(agent(3), now).unwrap());
        assert!(peers.admit(agent(4), now).is_none(), "these places are bounded, too");
        drop(taken);
        assert!(peers.admit(agent(4), now).is_some());
    }

    #[test]
    fn addresses_of_one_network_prefix_are_one_peer() {
        let (peers, now) = (Peers::new(limits()), Instant::now());
        let at = |last: u16| IpAddr::V6(Ipv6Addr::new(0xfd00, 1, 2, 3, 0, 0, 0, last));
        let _two = (peers.admit(at(1), now).unwrap(), peers.admit(at(2), now).unwrap());
        assert!(peers.admit(at(3), now).is_none());
        let mapped = "::ffff:10.0.0.1".parse().unwrap();
        assert_eq!(peers.peer(mapped), Some(IpAddr::from([10, 0, 0, 1])));
    }

    #[test]
    fn refusals_are_few_and_come_back_slowly() {
        let (peers, now) = (Peers::new(limits()), Instant::now());
        let slot = peers.admit(IpAddr::from([10, 0, 0, 1]), now).unwrap();
        assert!(slot.spend_refusal(now) && slot.spend_refusal(now) && !slot.spend_refusal(now));
        slot.refund_refusal();
        assert!(slot.spend_refusal(now) && !slot.spend_refusal(now));
        let again = now + Duration::from_secs(7);
        assert!(slot.spend_refusal(again) && !slot.spend_refusal(again));
        let reconnected = peers.admit(IpAddr::from([10, 0, 0, 1]), again).unwrap();
        assert!(!reconnected.spend_refusal(again), "a new connection has no new budget");
    }
}
