//! What the kernel had in force, and when: a thread that reads the CPU weights of pods again and again.
//!
//! The decision is in the node agent's log, with the engine's time stamp; the effect is in the kernel's
//! file. No program between the two is asked. A kubelet raises the pod's group before the container's. It
//! lowers the pod's group after the container's, when its next check of the runtime (once a second) has
//! confirmed the change. So the two levels are measured apart.

use super::kube::{Kube, Pod, log_lines, unix_s};
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

const PACE: Duration = Duration::from_millis(20);

/// The weights of one pod.
#[derive(Debug, Default)]
struct Weights {
    /// When each was seen for the first time.
    seen: Vec<WeightReading>,
    /// When the pod's group was last there.
    last_s: f64,
}

#[derive(Debug, Clone, Copy)]
struct WeightReading {
    at_s: f64,
    shares: u64,
}

/// Which of a pod's groups is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    Container,
    Pod,
}

type PodWeights = BTreeMap<(String, Level), Weights>;

/// A decision about a pod that ends within this time may come too late; a pod's group outlives its
/// container by some seconds.
const ENDING_S: f64 = 5.0;

/// Effects that take longer are printed, so that they can be investigated.
const SLOW_S: f64 = 0.8;

/// Watches until it is dropped.
pub(super) struct Watch {
    seen: Arc<Mutex<PodWeights>>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Watches every pod of a node.
    pub(super) fn start(kube: &Kube, node: &str) -> Result<Watch> {
        let pods = kube.testbed.node_cgroup(node, "cpu")?.join("kubepods/burstable");
        let (seen, stop) = (Arc::new(Mutex::new(PodWeights::new())), Arc::new(AtomicBool::new(false)));
        let (readings_there, stop_there) = (seen.clone(), stop.clone());
        let thread = std::thread::spawn(move || {
            while !stop_there.load(Ordering::Relaxed) {
                read_weights(&pods, &readings_there);
                std::thread::sleep(PACE);
            }
        });
        Ok(Watch { seen, stop, thread: Some(thread) })
    }

    /// How long each decision of the agent took to be in force; `None` for one that never was. One that was
    /// overtaken by the next, or by the pod's end, is left out.
    pub(super) fn effects(&self, kube: &Kube, agent: &Pod, level: Level) -> Result<Vec<Option<f64>>> {
        let decisions = decisions(&log_lines(&agent.log_file(kube))?);
        let seen = self.seen.lock().map_err(|_| anyhow::anyhow!("the watch has panicked"))?;
        let mut effects = Vec::new();
        for (i, decision) in decisions.iter().enumerate() {
            let next = decisions[i + 1..].iter().find(|d| d.uid == decision.uid).map(|d| d.at_s);
            let Some(weights) = seen.get(&(decision.uid.clone(), level)) else { continue };
            let wanted = (decision.cpu_milli * 1024 / 1000).max(2);
            let in_force = weights.seen.iter().rfind(|s| s.at_s <= decision.at_s).is_some_and(|s| s.shares == wanted);
            let later = weights.seen.iter().find(|s| s.at_s > decision.at_s && s.shares == wanted);
            let effect = if in_force { Some(0.0) } else { later.map(|s| s.at_s - decision.at_s) };
            let overtaken = next.is_some_and(|next| effect.is_none_or(|e| decision.at_s + e > next));
            let ended = effect.is_none() && weights.last_s < decision.at_s + ENDING_S;
            if !overtaken && !ended {
                if level == Level::Container && effect.is_none_or(|e| e > SLOW_S) {
                    let since_first = weights.seen.first().map_or(0.0, |first| decision.at_s - first.at_s);
                    let (uid, milli) = (&decision.uid, decision.cpu_milli);
                    eprintln!(
                        "e2e: slow: {milli}m for the pod {uid}, {since_first:.1} s after its start, at {:.3}: {effect:?} s",
                        decision.at_s
                    );
                }
                effects.push(effect);
            }
        }
        Ok(effects)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn read_weights(pods: &Path, seen: &Mutex<PodWeights>) {
    for entry in std::fs::read_dir(pods).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(uid) = name.to_str().and_then(|n| n.strip_prefix("pod")) else { continue };
        let below = std::fs::read_dir(entry.path()).into_iter().flatten().flatten();
        // The other group below a pod's holds its namespaces and has the least weight there is.
        let container = below.filter(|e| e.path().is_dir()).filter_map(|e| shares(&e.path())).max();
        for (level, shares) in [(Level::Pod, shares(&entry.path())), (Level::Container, container)] {
            let (Some(shares), Ok(mut seen)) = (shares, seen.lock()) else { continue };
            let weights = seen.entry((uid.to_owned(), level)).or_default();
            weights.last_s = unix_s();
            if weights.seen.last().is_none_or(|last| last.shares != shares) {
                weights.seen.push(WeightReading { at_s: weights.last_s, shares });
            }
        }
    }
}

fn shares(group: &Path) -> Option<u64> {
    std::fs::read_to_string(group.join("cpu.shares")).ok()?.trim().parse().ok()
}

#[derive(Debug, PartialEq)]
struct Decision {
    at_s: f64,
    uid: String,
    cpu_milli: u64,
}

/// The node agent logs each resize as `… requesting a resize … uid=… cpu_milli=…`.
fn decisions(lines: &[(f64, String)]) -> Vec<Decision> {
    let parse = |(at_s, text): &(f64, String)| {
        let word = |key: &str| text.split_whitespace().find_map(|w| w.strip_prefix(key));
        let cpu_milli = word("cpu_milli=")?.parse().ok()?;
        Some(Decision { at_s: *at_s, uid: word("uid=")?.trim_matches('"').to_owned(), cpu_milli })
    };
    lines.iter().filter_map(parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decisions_are_found_in_the_agents_log() {
        let line = r#"2026-11-15T12:00:00Z  INFO gainshare_node_agent::state: requesting a resize pod=a/b uid=1-2 cpu_milli=410 share=0.5"#;
        let lines = [(1.0, "hello".to_owned()), (2.0, line.to_owned())];
        assert_eq!(decisions(&lines), [Decision { at_s: 2.0, uid: "1-2".into(), cpu_milli: 410 }]);
    }
}
