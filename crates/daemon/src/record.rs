//! The record of a job, and how it changes.
//!
//! Every change is a value. The journal keeps the changes in order; [`JobRecord::take`] is the only
//! way a record changes, in the running daemon as well as when the journal is replayed, so that
//! both always agree.

use crate::clock::Moment;
use crate::spec::{self, JobSpec};
use crate::types::{JobState, PredictedMiss, StartOrder};
use gainshare_core::model::{JobId, Time};
use gainshare_core::plan::Plan;
use gainshare_limits::process::{Identity, JobGroup};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobRecord {
    pub id: JobId,
    pub name: String,
    pub owner: String,
    /// Without the values of the environment. Fields of other versions are ignored.
    #[serde(deserialize_with = "spec::deserialize_stored")]
    pub spec: JobSpec,
    /// The jobs named by the spec's `after`.
    pub after: Vec<JobId>,
    /// Names of variables that its environment has besides the spec's own.
    pub env_names: Vec<String>,
    /// The job's supervisor asks for admission.
    pub attached: bool,
    /// A container that was not started by Gainshare.
    pub adopted: bool,
    pub state: JobState,
    pub attempt: u32,
    pub submitted: Moment,
    pub started: Option<Moment>,
    pub ended: Option<Moment>,
    pub order: Option<StartOrder>,
    /// How the process runtime finds it again.
    pub group: Option<JobGroup>,
    pub leader: Option<Identity>,
    /// A container's full id.
    pub container: Option<String>,
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
    /// Why it failed, was stopped or lost, if there is more to say than an exit code.
    pub why: Option<String>,
    pub stop_requested: bool,
    /// When the job is killed if the request to stop has not ended it.
    #[serde(default)]
    pub kill_at: Option<Time>,
    /// Why the daemon itself asked for its end. A job that a user stops has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_why: Option<String>,
    /// The miss of its deadline of which its owner was warned. Older journals have the sentence alone, in the notes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub miss: Option<PredictedMiss>,
    pub notes: Vec<String>,
}

impl JobRecord {
    /// A job that has just been submitted and waits. It is named by its spec.
    pub fn queued(id: JobId, spec: JobSpec, owner: String, submitted: Moment) -> JobRecord {
        JobRecord {
            id,
            name: spec.label(),
            owner,
            after: Vec::new(),
            env_names: Vec::new(),
            attached: false,
            adopted: false,
            state: JobState::Queued,
            attempt: 0,
            submitted,
            started: None,
            ended: None,
            order: None,
            group: None,
            leader: None,
            container: None,
            exit_code: None,
            signal: None,
            why: None,
            stop_requested: false,
            kill_at: None,
            stop_why: None,
            miss: None,
            notes: Vec::new(),
            spec,
        }
    }

    /// The notes without the sentence about the predicted miss.
    pub fn notes_without_miss(&self) -> Vec<String> {
        let sentence = self.miss.as_ref().map(PredictedMiss::to_string);
        self.notes.iter().filter(|note| Some(*note) != sentence.as_ref()).cloned().collect()
    }
}

/// What can happen; the tag is the journal's `kind`. It stands outside, because serde loses numeric
/// keys of maps behind an inner tag.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// The record holds names of variables, no values.
    Submitted {
        record: Box<JobRecord>,
    },
    /// May start; `group` or, later, `container` says where it will be found.
    Admitted {
        order: StartOrder,
        group: Option<JobGroup>,
    },
    Started {
        leader: Option<Identity>,
        container: Option<String>,
        notes: Vec<String>,
    },
    /// Something its owner should know, in a sentence. Where it is a predicted miss of its deadline, the value, too.
    Noted {
        note: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        miss: Option<PredictedMiss>,
    },
    /// A user asked for its end, or the daemon, which then says why; after `kill_at` the job is killed.
    StopRequested {
        kill_at: Time,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// As version 1 of the journal recorded a request to stop.
    Stopping,
    /// The job ended, or never began.
    Ended {
        state: JobState,
        exit_code: Option<i32>,
        signal: Option<i32>,
        why: Option<String>,
        /// When it ended by the wall clock, if that was recorded when it happened: the daemon may learn it later.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ended_s: Option<f64>,
    },
    /// The job's limits were put back.
    Released,
    /// Nothing is kept of it.
    Forgotten,
    Plan {
        plan: Plan,
    },
    /// What could not be applied, by job.
    Applied {
        generation: u64,
        errors: BTreeMap<u64, String>,
    },
    /// A daemon began.
    Opened {
        epoch: u64,
        pid: u32,
    },
    /// The guard had put all limits back while the daemon of this epoch stood still.
    Lapsed {
        epoch: u64,
    },
    /// A daemon ended properly.
    Closed,
}

impl Change {
    /// Something its owner should know.
    pub fn note(note: String) -> Change {
        Change::Noted { note, miss: None }
    }

    /// A miss of its deadline is predicted.
    pub fn predicted_miss(miss: PredictedMiss) -> Change {
        Change::Noted { note: miss.to_string(), miss: Some(miss) }
    }

    pub fn kind(&self) -> &'static str {
        match self {
            Change::Submitted { .. } => "submitted",
            Change::Admitted { .. } => "admitted",
            Change::Started { .. } => "started",
            Change::Noted { .. } => "noted",
            Change::StopRequested { .. } => "stop-requested",
            Change::Stopping => "stopping",
            Change::Ended { .. } => "ended",
            Change::Released => "released",
            Change::Forgotten => "forgotten",
            Change::Plan { .. } => "plan",
            Change::Applied { .. } => "applied",
            Change::Opened { .. } => "opened",
            Change::Lapsed { .. } => "lapsed",
            Change::Closed => "closed",
        }
    }
}

impl JobRecord {
    /// Takes in a change that concerns this job. Changes that do not are ignored.
    pub fn take(&mut self, at: Moment, change: &Change) {
        match change {
            Change::Admitted { order, group } => {
                self.state = JobState::Starting;
                self.attempt = order.attempt;
                self.order = Some(order.clone());
                self.group = group.clone();
                self.leader = None;
            }
            Change::Started { leader, container, notes } => {
                self.state = JobState::Running;
                self.started = Some(at);
                self.leader = *leader;
                self.container = container.clone();
                self.notes.extend(notes.iter().cloned());
            }
            Change::Noted { note, miss } => {
                if miss.is_some() {
                    // A newer prediction replaces the older one.
                    self.notes = self.notes_without_miss();
                    self.miss.clone_from(miss);
                }
                if !self.notes.contains(note) {
                    self.notes.push(note.clone());
                }
            }
            Change::StopRequested { kill_at, why } => {
                // The first request says why.
                if !self.stop_requested {
                    self.stop_why.clone_from(why);
                }
                self.stop_requested = true;
                self.kill_at = Some(self.kill_at.map_or(*kill_at, |earlier| earlier.min(*kill_at)));
            }
            Change::Stopping => self.stop_requested = true,
            Change::Ended { state, exit_code, signal, why, ended_s } => {
                self.state = *state;
                self.ended = Some(Moment { unix_s: ended_s.unwrap_or(at.unix_s), ..at });
                (self.exit_code, self.signal) = (*exit_code, *signal);
                self.why = why.clone().or(self.stop_why.clone());
            }
            Change::Submitted { .. }
            | Change::Released
            | Change::Forgotten
            | Change::Plan { .. }
            | Change::Applied { .. }
            | Change::Opened { .. }
            | Change::Lapsed { .. }
            | Change::Closed => {}
        }
    }

    /// The state of a job that was asked to stop and is over: the daemon stops a job that did not keep its bounds.
    pub fn stopped_state(&self) -> JobState {
        if self.stop_why.is_some() { JobState::Failed } else { JobState::Stopped }
    }

    pub fn is_live(&self) -> bool {
        !self.state.is_final()
    }

    /// Ordered to run, or running: it holds a slot.
    pub fn holds_slot(&self) -> bool {
        matches!(self.state, JobState::Starting | JobState::Running)
    }
}

/// The state that a sequence of changes leads to.
pub fn replay<'a>(
    changes: impl IntoIterator<Item = (Moment, Option<JobId>, &'a Change)>,
) -> BTreeMap<JobId, JobRecord> {
    let mut jobs = BTreeMap::new();
    for (at, job, change) in changes {
        match (job, change) {
            (Some(id), Change::Submitted { record, .. }) => {
                jobs.insert(id, (**record).clone());
            }
            (Some(id), Change::Forgotten) => {
                jobs.remove(&id);
            }
            (Some(id), change) => {
                if let Some(record) = jobs.get_mut(&id) {
                    record.take(at, change);
                }
            }
            (None, _) => {}
        }
    }
    jobs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::MissCause;
    use serde_json::json;

    fn record() -> JobRecord {
        let spec = JobSpec::new(vec!["true".to_owned()]);
        JobRecord::queued(JobId(1), spec, "me".to_owned(), at(1))
    }

    fn at(second: u64) -> Moment {
        Moment { time: Time(second * 1_000_000), unix_s: second as f64 }
    }

    #[test]
    fn a_predicted_miss_is_kept_as_a_value_beside_its_sentence() {
        let miss = PredictedMiss { deadline_s: 100.0, cause: MissCause::Passed };
        let mut record = record();
        record.take(at(2), &Change::predicted_miss(miss.clone()));
        record.take(at(3), &Change::note("another".to_owned()));
        assert_eq!(record.miss.as_ref(), Some(&miss), "another note takes nothing away");
        assert_eq!(record.notes, [miss.to_string(), "another".to_owned()]);
        assert_eq!(record.notes_without_miss(), ["another".to_owned()]);
        let newer = PredictedMiss { deadline_s: 100.0, cause: MissCause::NoTimeLeft };
        record.take(at(4), &Change::predicted_miss(newer.clone()));
        assert_eq!(record.notes, ["another".to_owned(), newer.to_string()], "it replaces the older one");
        assert_eq!(record.miss, Some(newer));
        let stored = serde_json::to_string(&record).expect("it is written");
        assert_eq!(serde_json::from_str::<JobRecord>(&stored).expect("it is read"), record);
    }

    #[test]
    fn what_an_older_version_noted_is_read_and_no_value_is_made_of_it() {
        let sentence = PredictedMiss { deadline_s: 100.0, cause: MissCause::NoTimeLeft }.to_string();
        let change: Change = serde_json::from_value(json!({"noted": {"note": sentence}})).expect("it is read");
        assert_eq!(change, Change::note(sentence.clone()));
        let stored = serde_json::to_value(record()).expect("it is written");
        assert!(stored.get("miss").is_none(), "as older versions wrote it: {stored}");
        let mut record: JobRecord = serde_json::from_value(stored).expect("it is read");
        record.take(at(2), &change);
        assert_eq!((record.miss, record.notes), (None, vec![sentence]));
    }
}
