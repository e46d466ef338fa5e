//! The parts of a move that are the same for every kind of job: how long a job gets its own share back before it
//! is stopped, what its end means for the move, and the record of the move.
//!
//! A move is a request to end, a proof of the stop, and a start elsewhere.

use super::snapshot::{Exit, PodSnapshot, Stop};
use gainshare_kube_api::training_job::{MOVES_KEPT, Migration, Move, TrainingJobStatus};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

/// 128 + SIGTERM, 128 + SIGKILL.
pub(super) const TERMINATED: i32 = 143;
const KILLED: i32 = 137;

/// Longest wait for a job's original CPU request to be restored before SIGTERM, so that it can save
/// a checkpoint at full speed (usually 0.2 s).
pub(super) const OWN_SHARE_WAIT: SignedDuration = SignedDuration::from_secs(2);

/// Whether a job that was asked to save itself goes on at its target, and the sentence about it.
/// `time` says how long it had, and by which field.
pub(super) fn verdict(stop: &Stop, migration: &Migration, pod: Option<&PodSnapshot>, time: &str) -> (bool, String) {
    let (from, to) = (&migration.from, &migration.to);
    // Times of pods are whole seconds.
    let before_its_time = |finished: Timestamp| {
        let until = pod.and_then(|pod| pod.deleted).map(|(_, until)| until);
        until.is_some_and(|until| until.duration_since(finished) > SignedDuration::from_secs(1))
    };
    match stop {
        Stop::Exited(exit) if matches!(exit.code, 0 | TERMINATED) => {
            (true, format!("saved itself and ended on {from}; continues on {to}"))
        }
        // The node failed, not the job.
        Stop::Exited(exit) if exit.code == KILLED && exit.reason != "OOMKilled" && before_its_time(exit.finished) => {
            (true, format!("was killed on {from} while it saved itself; continues on {to} from its last checkpoint"))
        }
        Stop::Exited(exit)
            if exit.code == KILLED && exit.reason != "OOMKilled" && exit.reason != "ContainerStatusUnknown" =>
        {
            let sentence = format!(
                "it ignored SIGTERM and was killed when its time was over: it continues on {from} from its last checkpoint and is not moved again; \
                 let it save itself on SIGTERM, or give it more time than {time}"
            );
            (false, sentence)
        }
        Stop::Exited(exit) => {
            let sentence = format!(
                "saving on SIGTERM failed ({}): it continues on {from} from its last checkpoint and is not moved again; \
                 is the claim writable and large enough?",
                exit_text(exit)
            );
            (false, sentence)
        }
        Stop::NodeOff(node) => (true, format!("node {node} is gone: continues on {to} from the last checkpoint")),
        Stop::NeverBegan(_) | Stop::Declared => (true, format!("continues on {to}")),
    }
}

/// Counts and records a move that is over.
pub(super) fn close(status: &mut TrainingJobStatus, migration: &Migration, node: &str, now: Timestamp) {
    status.moves = status.moves.saturating_add(u32::from(node != migration.from));
    record(&mut status.last_moves, migration, node, now);
}

/// Adds a move that ended on this node to the last few.
pub(super) fn record(moves: &mut Vec<Move>, migration: &Migration, node: &str, now: Timestamp) {
    let stopped = migration.stopped.as_ref().map_or(now, |stopped| stopped.0);
    let seconds = |from: Timestamp, to: Timestamp| (to.duration_since(from).as_secs_f64().max(0.0) * 1e3).round() / 1e3;
    moves.push(Move {
        at: MicroTime(now),
        from: migration.from.clone(),
        to: node.to_owned(),
        reason: migration.reason,
        message: migration.message.clone(),
        save_s: seconds(migration.since.0, stopped),
        restore_s: seconds(stopped, now),
    });
    let surplus = moves.len().saturating_sub(MOVES_KEPT);
    moves.drain(..surplus);
}

/// How a container ended, for people.
pub(super) fn exit_text(exit: &Exit) -> String {
    let reason = match exit.reason.as_str() {
        "" | "Error" | "Completed" => String::new(),
        reason => format!(" ({reason})"),
    };
    let message = if exit.message.is_empty() { String::new() } else { format!(": {}", short(&exit.message)) };
    format!("exit code {}{reason}{message}", exit.code)
}

fn short(text: &str) -> String {
    text.chars().take(300).collect()
}
