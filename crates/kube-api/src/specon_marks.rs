//! What SpeCon and moves for deadlines have done with a job, as it is stored on the job: each of it happens at most
//! once in the job's life. The name is that of the rule that came first; objects of earlier versions have it.
//!
//! The operator forgets everything when it restarts, and a job may be out of its view for minutes (a long move, a node
//! agent that is silent). The marks are in the status of a TrainingJob and in the journal of an adopted Job. They are
//! written together with the beginning of the move that they are about.

use crate::placement_reason::PlacementReason;
use gainshare_core::model::Time;
use gainshare_core::view::Marks;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What move rules have done with the job and do not do again.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SpeconMarks {
    /// When the job, having converged, was moved away from jobs that still grew, or was found to stay. It is not
    /// moved for that again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settled: Option<MicroTime>,
    /// The job was moved to even the nodes out, and is not moved for that again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rebalanced: bool,
    /// When it was moved because it would have missed its deadline where it was. It is not moved for that again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub for_deadline: Option<MicroTime>,
}

impl SpeconMarks {
    /// What is stored, and what follows from the job's moves (why and when): versions without marks have recorded
    /// moves, too.
    pub fn read<'a>(
        stored: Option<&SpeconMarks>,
        moves: impl Iterator<Item = (Option<PlacementReason>, &'a MicroTime)>,
    ) -> Marks {
        let of_stored = stored.map(|stored| Marks {
            settled: stored.settled.as_ref().map(|at| time(at.0)),
            rebalanced: stored.rebalanced,
            for_deadline: stored.for_deadline.as_ref().map(|at| time(at.0)),
        });
        moves.fold(of_stored.unwrap_or_default(), |marks, (reason, at)| match reason {
            // The first versions recorded no reason; under SpeCon it was this one, unless a person asked for the move.
            None | Some(PlacementReason::SlowGrowth) => {
                marks.with(Marks { settled: Some(time(at.0)), ..Marks::default() })
            }
            Some(PlacementReason::Rebalance) => marks.with(Marks { rebalanced: true, ..Marks::default() }),
            Some(PlacementReason::Deadline) => marks.with(Marks { for_deadline: Some(time(at.0)), ..Marks::default() }),
            _ => marks,
        })
    }

    /// What is stored once these marks are known, too. A mark that is stored stays.
    pub fn add(stored: Option<SpeconMarks>, marks: Marks) -> Option<SpeconMarks> {
        if marks.is_empty() {
            return stored;
        }
        let stored = stored.unwrap_or_default();
        Some(SpeconMarks {
            settled: stored.settled.or_else(|| moment(marks.settled?)),
            rebalanced: stored.rebalanced || marks.rebalanced,
            for_deadline: stored.for_deadline.or_else(|| moment(marks.for_deadline?)),
        })
    }
}

/// `None` for a time that no calendar has.
fn moment(at: Time) -> Option<MicroTime> {
    Timestamp::from_microsecond(i64::try_from(at.0).ok()?).ok().map(MicroTime)
}

fn time(at: Timestamp) -> Time {
    Time(u64::try_from(at.as_microsecond()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> MicroTime {
        MicroTime(Timestamp::from_second(second).unwrap())
    }

    fn read(stored: Option<&SpeconMarks>, moves: &[(PlacementReason, MicroTime)]) -> Marks {
        SpeconMarks::read(stored, moves.iter().map(|(reason, at)| (Some(*reason), at)))
    }

    #[test]
    fn marks_are_stored_and_read_back() {
        let marks = Marks { settled: Some(Time(7_000_000)), ..Marks::default() };
        assert_eq!(SpeconMarks::add(None, Marks::default()), None, "a job without marks has no field");
        let stored = SpeconMarks::add(None, marks).unwrap();
        assert_eq!(serde_json::to_string(&stored).unwrap(), r#"{"settled":"1970-01-01T00:00:07.000000Z"}"#);
        assert_eq!(read(Some(&stored), &[]), marks);
        let later = Marks { settled: Some(Time(9_000_000)), rebalanced: true, for_deadline: Some(Time(8_000_000)) };
        let both = SpeconMarks::add(Some(stored.clone()), later).unwrap();
        assert_eq!((&both.settled, both.rebalanced), (&stored.settled, true), "the first time stays");
        assert_eq!(read(Some(&both), &[]).for_deadline, later.for_deadline);
        assert_eq!(SpeconMarks::add(Some(both.clone()), Marks::default()), Some(both), "no mark is taken away");
        let beyond = Marks { settled: Some(Time(u64::MAX)), rebalanced: true, for_deadline: None };
        assert_eq!(SpeconMarks::add(None, beyond).unwrap().settled, None, "no calendar has this time");
    }

    #[test]
    fn marks_follow_from_moves_of_versions_without_marks() {
        for reason in [PlacementReason::Requested, PlacementReason::Gain, PlacementReason::Unknown] {
            assert!(read(None, &[(reason, at(5))]).is_empty(), "{reason:?}");
        }
        let moves = [
            (PlacementReason::SlowGrowth, at(5)),
            (PlacementReason::Rebalance, at(9)),
            (PlacementReason::Deadline, at(11)),
        ];
        let made = Marks { settled: Some(Time(5_000_000)), rebalanced: true, for_deadline: Some(Time(11_000_000)) };
        assert_eq!(read(None, &moves), made);
        let oldest = SpeconMarks::read(None, [(None, &at(5))].into_iter());
        assert_eq!(oldest.settled, Some(Time(5_000_000)), "versions that recorded no reason");
        let stored = SpeconMarks { settled: Some(at(3)), ..SpeconMarks::default() };
        assert_eq!(read(Some(&stored), &moves), Marks { settled: Some(Time(3_000_000)), ..made });
    }
}
