//! Every recorded decision of the folder `decisions` is made again, bit for bit. See the folder's
//! README.
#![allow(clippy::disallowed_methods, reason = "the recorded decisions are files")]

use gainshare_core::policy::{Policy, Preset};
use gainshare_core::replay::{Difference, RecordedDecision, ReplayError};
use std::path::Path;

fn cases() -> Vec<(String, RecordedDecision)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/decisions");
    let files = std::fs::read_dir(folder).expect("the folder is there").map(|entry| entry.expect("readable").path());
    let mut cases: Vec<_> = files
        .filter(|file| file.extension().is_some_and(|e| e == "json"))
        .map(|file| {
            let name = file.file_name().expect("a file").to_string_lossy().into_owned();
            let text = std::fs::read_to_string(&file).expect("readable");
            let case =
                gainshare_record::from_json(&text).unwrap_or_else(|e| panic!("{name} is no recorded decision: {e}"));
            (name, case)
        })
        .collect();
    cases.sort_by(|a, b| a.0.cmp(&b.0));
    cases
}

#[test]
fn every_recorded_decision_is_made_again() {
    let cases = cases();
    let mut failures = vec![];
    for (name, case) in cases {
        match case.replay() {
            Ok(replay) => failures.extend(replay.differences.iter().map(|d| format!("{name}: {d}"))),
            Err(error) => failures.push(format!("{name}: {error}")),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn every_policy_has_a_recorded_decision() {
    let cases = cases();
    // The numbers of a rule may have changed since the case was recorded.
    let has_rules_of =
        |case: &RecordedDecision, preset: Preset| case.policy.answers() == Policy::from(preset).answers();
    for preset in Preset::ALL {
        let prefix = format!("{}-", preset.name());
        let has_case = cases.iter().any(|(name, case)| name.starts_with(&prefix) && has_rules_of(case, preset));
        assert!(has_case, "no case of `{}`: see the folder's README", preset.name());
    }
}

#[test]
fn a_difference_names_the_job_and_both_values() {
    let (_, mut case) = cases().into_iter().next().expect("there are cases");
    case.plan.generation += 1;
    let (id, verdict) = case.plan.verdicts.iter_mut().next().expect("a job");
    let job = id.to_string();
    // Zero and minus zero are equal numbers, but not the same bits.
    verdict.growth.cpu = Some(-0.0);
    let differences = case.replay().expect("it can be replayed").differences;
    let has = |place: &str| differences.iter().find(|d| d.place == place);
    assert!(has("generation").is_some_and(|d| d.recorded != d.replayed), "{differences:?}");
    let growth = has(&format!("{job} growth")).expect("the growth differs");
    let Difference { recorded, .. } = growth;
    assert!(recorded.contains("-0.0"), "{growth}");
}

#[test]
fn a_record_that_cannot_be_replayed_says_why() {
    let (_, case) = cases().into_iter().next().expect("there are cases");
    let newer = RecordedDecision { format: 99, ..case.clone() };
    assert_eq!(newer.replay(), Err(ReplayError::OtherFormat(99)));
    let mut unsorted = case.clone();
    unsorted.view.jobs.reverse();
    unsorted.view.jobs.push(unsorted.view.jobs[0].clone());
    assert_eq!(unsorted.replay(), Err(ReplayError::Unsorted));
    let mut idle = case;
    (idle.view.jobs, idle.memory) = (vec![], gainshare_core::Memory::default());
    assert_eq!(idle.replay(), Err(ReplayError::NothingDue));
}
