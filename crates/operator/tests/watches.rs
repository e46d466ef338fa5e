//! An operator whose connections to a real API server are delayed, muted and cut: the cluster ends in the same state as
//! without these faults.
//!
//! A proxy stands between the operator and the API server. It passes bytes on as they are, because they are encrypted.
//! A seeded die decides for each piece of an answer or of a watch whether it is late, whether the connection is cut, or
//! whether it is *muted*: everything on it is lost from then on, and it is cut some seconds later. A watch that was
//! muted has lost events; a request that was cut may have been executed.
//!
//! The same story is played twice, first without and then with faults: jobs are started, moved, suspended, resumed,
//! adopted and deleted. Gates, nodes, attempts and statuses at the end are compared. `GAINSHARE_SEED` chooses the die.

use crate::common::training::{COUNTS, Operator, batch_job, job};
use crate::common::{FaultTally, Scenarios, TestBed, eventually, within_a_minute};
use crate::invariants::Watch;
use serde_json::{Value, json};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Without `GAINSHARE_SEED`.
const SEED: u64 = 14;

/// The first pieces of a connection are passed on: they set up the encryption.
const SPARED: u32 = 3;

/// How long nothing arrives on a muted connection; then it is cut.
const MUTED: Duration = Duration::from_secs(3);

const LONGEST_DELAY_MS: u64 = 600;

/// How many of a thousand pieces are late, cut and muted.
const LATE: u64 = 150;
const CUT: u64 = 30;
const MUTE: u64 = 20;

/// A generator of numbers that repeats itself for the same seed (xorshift).
struct Die(u64);

impl Die {
    fn new(seed: u64, connection: u64) -> Die {
        Die((seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ connection.wrapping_mul(0xbf58_476d_1ce4_e5b9)) | 1)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % end
    }
}

/// What the proxy does, shared with its threads.
#[derive(Default)]
struct Faults {
    is_on: AtomicBool,
    late: AtomicU32,
    cut: AtomicU32,
    muted: AtomicU32,
}

impl Faults {
    fn injected(&self) -> u32 {
        [&self.late, &self.cut, &self.muted].iter().map(|count| count.load(Ordering::Relaxed)).sum()
    }
}

/// Passes connections on to `server` for as long as the test runs, and returns where it listens.
fn start_proxy(server: SocketAddr, seed: u64, faults: &Arc<Faults>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let faults = faults.clone();
    std::thread::spawn(move || {
        for (number, client) in listener.incoming().flatten().enumerate() {
            let Ok(upstream) = TcpStream::connect(server) else { continue };
            let (mut from_client, mut to_server) = (client.try_clone().unwrap(), upstream.try_clone().unwrap());
            std::thread::spawn(move || {
                let _ = std::io::copy(&mut from_client, &mut to_server);
                let _ = to_server.shutdown(Shutdown::Both);
            });
            let (faults, die) = (faults.clone(), Die::new(seed, number as u64));
            std::thread::spawn(move || {
                let _ = pass_on(&upstream, &client, die, &faults);
                let _ = (upstream.shutdown(Shutdown::Both), client.shutdown(Shutdown::Both));
            });
        }
    });
    address
}

/// Passes what the server sends on to the client, with faults, until one of them closes the connection or it is cut.
fn pass_on(mut server: &TcpStream, mut client: &TcpStream, mut die: Die, faults: &Faults) -> std::io::Result<()> {
    let mut piece = [0; 16 << 10];
    for number in 0u32.. {
        let length = server.read(&mut piece)?;
        if length == 0 {
            break;
        }
        if number >= SPARED && faults.is_on.load(Ordering::Relaxed) {
            let rolled = die.below(1000);
            if rolled < CUT {
                faults.cut.fetch_add(1, Ordering::Relaxed);
                break;
            }
            if rolled < CUT + MUTE {
                faults.muted.fetch_add(1, Ordering::Relaxed);
                let until = Instant::now() + MUTED;
                server.set_read_timeout(Some(MUTED))?;
                while Instant::now() < until && server.read(&mut piece).is_ok_and(|length| length > 0) {}
                break;
            }
            if rolled < CUT + MUTE + LATE {
                faults.late.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(die.below(LONGEST_DELAY_MS)));
            }
        }
        client.write_all(&piece[..length])?;
    }
    Ok(())
}

/// Makes the operators that start from now on use the proxy. The certificate names the server itself.
fn use_proxy(bed: &TestBed, seed: u64, faults: &Arc<Faults>) {
    let path = bed.folder.path().join("operator.kubeconfig");
    let mut config: Value = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    let cluster = &mut config["clusters"][0]["cluster"];
    let server = cluster["server"].as_str().unwrap().trim_start_matches("https://").to_owned();
    let address: SocketAddr = server.parse().expect("the test bed's API server has an address and a port");
    cluster["tls-server-name"] = json!(address.ip().to_string());
    cluster["server"] = json!(format!("https://{}", start_proxy(address, seed, faults)));
    fs::write(&path, config.to_string()).unwrap();
}

/// The jobs of one story, with these letters before their names.
struct Story<'a> {
    bed: &'a TestBed,
    prefix: &'static str,
}

impl Story<'_> {
    fn name(&self, role: &str) -> String {
        format!("{}-{role}", self.prefix)
    }

    fn patch(&self, role: &str, spec: Value) {
        let patch = json!({"spec": spec}).to_string();
        let name = self.name(role);
        self.bed.kubectl(&["patch", "trainingjob", &name, "-n", "team", "--type", "merge", "-p", &patch]);
    }

    fn until(&self, role: &str, state: &str, node: Option<&str>) {
        self.bed.until(&self.name(role), state, node);
    }

    /// Starts, moves, suspends, resumes, adopts and deletes jobs.
    fn play(&self) {
        let (bed, batch) = (self.bed, self.name("batch"));
        for role in ["moved", "resumed", "gone"] {
            bed.apply(job(&self.name(role), COUNTS, json!({})));
        }
        bed.apply(job(&self.name("brief"), "sleep 1", json!({})));
        bed.apply(batch_job(&batch, COUNTS, "Failed"));
        for role in ["moved", "resumed", "gone"] {
            self.until(role, "Running", Some("left"));
        }
        self.patch("resumed", json!({"suspend": true}));
        bed.send_to(&self.name("moved"), "right");
        self.until("moved", "Running", Some("right"));
        self.until("resumed", "Suspended", None);
        self.patch("resumed", json!({"suspend": false}));
        bed.send_to(&self.name("moved"), "left");
        self.until("moved", "Running", Some("left"));
        self.until("resumed", "Running", None);
        let first = eventually("the Job's first node", || bed.adopted(&batch)["node"].as_str().map(str::to_owned));
        let target = if first == "left" { "right" } else { "left" };
        bed.send(&format!("job/{batch}"), target);
        let is_moved = || {
            let journal = bed.adopted(&batch);
            (journal["node"] == target && journal["migration"].is_null()).then_some(())
        };
        eventually("the Job on its target", is_moved);
        bed.kubectl(&["delete", "trainingjob", &self.name("gone"), "-n", "team", "--wait=false"]);
        eventually("the end of a deleted job", || bed.find("trainingjob", &self.name("gone")).is_none().then_some(()));
        self.until("brief", "Succeeded", None);
    }

    /// What must be the same with and without faults.
    fn state(&self) -> Value {
        let job = |role: &str| {
            let job = self.bed.job(&self.name(role));
            let status = &job["status"];
            // A job that is resumed may start on any node.
            let node = if role == "resumed" { Value::Null } else { status["attempt"]["node"].clone() };
            json!({
                "state": status["state"], "node": node, "epoch": status["attempt"]["epoch"],
                "moves": status["moves"], "failures": status["failures"], "finalizers": job["metadata"]["finalizers"],
            })
        };
        let pods: Value =
            serde_json::from_str(&self.bed.kubectl(&["get", "pods", "-n", "team", "-o", "json"])).unwrap();
        let is_ours = |pod: &&Value| pod["metadata"]["name"].as_str().is_some_and(|name| name.starts_with(self.prefix));
        let mut pods: Vec<String> = pods["items"].as_array().unwrap().iter().filter(is_ours).map(pod_state).collect();
        pods.sort();
        let batch = self.bed.adopted(&self.name("batch"));
        json!({
            "moved": job("moved"), "resumed": job("resumed"), "brief": job("brief"), "gone": job("gone"),
            "batch": {"moves": batch["moves"], "migration": batch["migration"]}, "pods": pods,
        })
    }

    /// The state once nothing changes any more.
    fn settled_state(&self) -> Value {
        eventually("a state that stays", || {
            let before = self.state();
            std::thread::sleep(Duration::from_secs(5));
            (self.state() == before).then_some(before)
        })
    }
}

/// The gates, the phase and the attempt of a pod, and whether it is being deleted.
fn pod_state(pod: &Value) -> String {
    let (meta, spec) = (&pod["metadata"], &pod["spec"]);
    let role = meta["name"].as_str().unwrap_or_default().split('-').nth(1).unwrap_or_default();
    let is_going = !meta["deletionTimestamp"].is_null();
    let (epoch, gates) = (&meta["labels"]["gainshare.dev/epoch"], &spec["schedulingGates"]);
    format!("{role} {} epoch {epoch} gates {gates} going {is_going}", pod["status"]["phase"])
}

#[test]
#[ignore = "needs root and a test bed"]
fn watches_that_are_late_muted_and_cut_change_nothing_in_the_end() {
    let bed = TestBed::with_training("watches", &["left=1.5", "right=1.5"]);
    let seed = std::env::var("GAINSHARE_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(SEED);
    let watch = Watch::begin(&bed);
    let mut scenarios = Scenarios::default();
    let (plain, faulty) = (Story { bed: &bed, prefix: "plain" }, Story { bed: &bed, prefix: "faulty" });
    let mut expected = Value::Null;
    scenarios.run("without faults", || {
        let _operator = Operator::start(&bed, None);
        plain.play();
        expected = plain.settled_state();
    });
    println!("without faults: {expected:#}");
    let faults = Arc::new(Faults::default());
    let mut tally = FaultTally::of("watch-lost");
    scenarios.run_counted("with faults", &mut tally, |tally| {
        use_proxy(&bed, seed, &faults);
        faults.is_on.store(true, Ordering::Relaxed);
        let _operator = Operator::start(&bed, None);
        faulty.play();
        faults.is_on.store(false, Ordering::Relaxed);
        let began = Instant::now();
        let is_same = within_a_minute(|| (faulty.state() == expected).then_some(())).is_some();
        tally.recover(began.elapsed().as_secs_f64());
        tally.demand(is_same, || format!("seed {seed}: with faults the end is another one: {:#}", faulty.state()));
    });
    let made =
        ["plain", "faulty"].map(|story| ["moved", "resumed", "brief", "batch"].map(|role| format!("{story}-{role}")));
    let made: Vec<&str> = made.iter().flatten().map(String::as_str).collect();
    let watched = watch.end(&bed, &made);
    tally.inject(faults.injected());
    scenarios.run_counted("the invariants held all the time", &mut tally, |tally| watched.report(tally));
    let count = |count: &AtomicU32| count.load(Ordering::Relaxed);
    println!("seed {seed}: {} late, {} cut, {} muted", count(&faults.late), count(&faults.cut), count(&faults.muted));
    scenarios.run("each fault was injected", || {
        let all = [&faults.late, &faults.cut, &faults.muted].map(count);
        assert!(all.iter().all(|count| *count > 0), "{all:?}");
    });
    tally.print();
    scenarios.finish();
}
