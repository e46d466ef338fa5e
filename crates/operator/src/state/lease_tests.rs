//! Tests of [`super`]: replicas with clocks of their own, and an API server that is a variable.

use super::*;
use proptest::prelude::*;

/// The API server's part: one object, and a version that guards it.
#[derive(Debug, Default)]
struct Store {
    lease: Option<Lease>,
    version: u64,
    away: bool,
}

impl Store {
    /// Stores the lease if nothing was written since its version was read.
    fn put(&mut self, lease: &Lease) -> bool {
        let read = lease.metadata.resource_version.as_ref().map_or(0, |version| version.parse().unwrap());
        if self.away || read != self.version {
            return false;
        }
        self.version += 1;
        let mut lease = lease.clone();
        lease.metadata.resource_version = Some(self.version.to_string());
        self.lease = Some(lease);
        true
    }
}

/// A replica whose wall clock is wrong by this number of seconds.
struct Replica {
    election: Election,
    skew_s: i64,
    /// A write that was sent and has not arrived.
    in_flight: Option<(Lease, Instant)>,
}

impl Replica {
    fn new(name: &str, skew_s: i64) -> Replica {
        Replica { election: Election::new(name.to_owned()), skew_s, in_flight: None }
    }

    fn send(&mut self, store: &Store, now: Instant, wall_s: i64) {
        if store.away {
            return;
        }
        let wall = Timestamp::from_second(wall_s + self.skew_s).unwrap();
        self.in_flight = self.election.claim(store.lease.as_ref(), now, wall).map(|lease| (lease, now));
    }

    fn arrive(&mut self, store: &mut Store) {
        if let Some((lease, sent)) = self.in_flight.take()
            && store.put(&lease)
        {
            self.election.written(&lease, sent);
        }
    }

    fn attempt(&mut self, store: &mut Store, now: Instant) {
        self.send(store, now, 1_800_000_000);
        self.arrive(store);
    }
}

#[test]
fn a_standby_takes_over_after_expiry() {
    let (mut store, start) = (Store::default(), Instant::now());
    let (mut first, mut second) = (Replica::new("a", 0), Replica::new("b", 0));
    first.attempt(&mut store, start);
    second.attempt(&mut store, start);
    assert!(first.election.is_leading(start) && !second.election.is_leading(start));
    let almost = start + EXPIRES_AFTER - Duration::from_millis(1);
    second.attempt(&mut store, almost);
    assert!(!second.election.is_leading(almost), "the lease may still be renewed");
    let expired = start + EXPIRES_AFTER;
    second.attempt(&mut store, expired);
    assert!(second.election.is_leading(expired));
    first.attempt(&mut store, expired);
    assert!(!first.election.is_leading(expired), "the lease names the other replica");
    assert_eq!(store.lease.unwrap().spec.unwrap().lease_transitions, Some(2));
}

#[test]
fn a_released_lease_is_taken_at_once() {
    let (mut store, start) = (Store::default(), Instant::now());
    let (mut first, mut second) = (Replica::new("a", 0), Replica::new("b", 0));
    first.attempt(&mut store, start);
    second.attempt(&mut store, start);
    let free = first.election.release(store.lease.as_ref().unwrap()).unwrap();
    assert!(!first.election.is_leading(start), "it stops before the lease is free");
    assert!(store.put(&free));
    second.attempt(&mut store, start);
    assert!(second.election.is_leading(start));
    assert!(first.election.release(store.lease.as_ref().unwrap()).is_none(), "another replica's lease is not freed");
}

#[test]
fn without_the_api_server_leadership_ends() {
    let (mut store, start) = (Store::default(), Instant::now());
    let mut only = Replica::new("a", 0);
    only.attempt(&mut store, start);
    store.away = true;
    for second in 1..10 {
        only.attempt(&mut store, start + Duration::from_secs(second));
        assert!(only.election.is_leading(start + Duration::from_secs(second)));
    }
    assert!(!only.election.is_leading(start + RENEW_WITHIN));
    store.away = false;
    only.attempt(&mut store, start + RENEW_WITHIN * 3);
    assert!(only.election.is_leading(start + RENEW_WITHIN * 3), "the lease is still its own");
}

#[test]
fn two_writers_at_the_same_moment_are_distinguished() {
    let (mut store, start) = (Store::default(), Instant::now());
    let (mut first, mut second) = (Replica::new("a", 0), Replica::new("b", 0));
    first.send(&store, start, 0);
    second.send(&store, start, 0);
    second.arrive(&mut store);
    first.arrive(&mut store);
    assert!(second.election.is_leading(start) && !first.election.is_leading(start));
}

#[test]
fn identities_differ() {
    assert_ne!(identity(Some("operator-0")), identity(Some("operator-0")));
}

/// One thing that happens to a replica.
#[derive(Debug, Clone, Copy)]
enum ReplicaEvent {
    Send(usize),
    Arrive(usize),
    Wait(u16),
    Away(bool),
}

fn replica_event() -> impl Strategy<Value = ReplicaEvent> {
    prop_oneof![
        4 => (0..3usize).prop_map(ReplicaEvent::Send),
        4 => (0..3usize).prop_map(ReplicaEvent::Arrive),
        4 => (0..4000u16).prop_map(ReplicaEvent::Wait),
        1 => any::<bool>().prop_map(ReplicaEvent::Away),
    ]
}

/// Plays what happens; answers who led after each event. An attempt that takes longer than its time is given
/// up, as the loop does.
fn play(events: &[ReplicaEvent], skews_s: [i64; 3]) -> Vec<Vec<usize>> {
    let mut store = Store::default();
    let mut replicas = ["a", "b", "c"].map(|name| Replica::new(name, 0));
    replicas.iter_mut().zip(skews_s).for_each(|(replica, skew_s)| replica.skew_s = skew_s);
    let start = Instant::now();
    let mut passed = Duration::ZERO;
    let mut led = Vec::new();
    for event in events {
        let now = start + passed;
        let wall_s = 1_800_000_000 + passed.as_secs() as i64;
        match *event {
            ReplicaEvent::Send(i) => replicas[i].send(&store, now, wall_s),
            ReplicaEvent::Arrive(i) => {
                let late = |(_, sent): &(Lease, Instant)| now.duration_since(*sent) > ATTEMPT_TIMEOUT;
                if replicas[i].in_flight.as_ref().is_some_and(late) {
                    // The write takes effect, but its answer is not waited for.
                    let (lease, _) = replicas[i].in_flight.take().unwrap();
                    store.put(&lease);
                }
                replicas[i].arrive(&mut store);
            }
            ReplicaEvent::Wait(ms) => passed += Duration::from_millis(ms.into()),
            ReplicaEvent::Away(away) => store.away = away,
        }
        let now = start + passed;
        led.push((0..3).filter(|i| replicas[*i].election.is_leading(now)).collect());
    }
    led
}

proptest! {
    #[test]
    fn two_replicas_never_lead_together(events in prop::collection::vec(replica_event(), 0..300)) {
        for led in play(&events, [0; 3]) {
            prop_assert!(led.len() <= 1, "{led:?} lead together");
        }
    }

    #[test]
    fn a_wrong_wall_clock_changes_nothing(
        events in prop::collection::vec(replica_event(), 0..200),
        skews_s in prop::array::uniform3(-3600i64..=3600),
    ) {
        prop_assert_eq!(play(&events, skews_s), play(&events, [0; 3]));
    }
}
