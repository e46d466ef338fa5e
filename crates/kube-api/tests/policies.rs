//! The policies that the custom resources take are the rows of the table in `gainshare-core` that say so: in the
//! definitions, in what is read, and in what the programs do.

use gainshare_core::policies::{Preset, Scope};
use gainshare_kube_api::policy_names::{JobPolicy, PolicyKind, job_policies, share_policies};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::training_job::TrainingJob;
use kube::CustomResourceExt;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// The field `spec.policy`.
fn policy_field(crd: impl serde::Serialize) -> Value {
    let crd = serde_json::to_value(crd).expect("a definition serialises");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["policy"].clone()
}

/// Whether the row says that a SharePolicy and that a TrainingJob takes the policy.
fn says(preset: Preset) -> (bool, bool) {
    match preset.info().scope {
        Scope::Production { share_policy, training_job } => (share_policy, training_job),
        Scope::SimulatorOnly { .. } => (false, false),
    }
}

/// Reads the name; a policy that is not taken must be refused with words that help.
fn is_read<T: DeserializeOwned>(preset: Preset, resource: &str, known: &[&str]) -> bool {
    match serde_json::from_value::<T>(json!(preset.name())) {
        Ok(_) => true,
        Err(error) => {
            let words = error.to_string();
            let list = format!("{resource} takes {}", known.join(", "));
            let why = match preset.info().scope {
                Scope::SimulatorOnly { because } => because,
                Scope::Production { .. } => "is not a policy of",
            };
            let expected = [preset.name(), list.as_str(), why];
            assert!(expected.iter().all(|part| words.contains(part)), "{words}");
            false
        }
    }
}

#[test]
fn every_row_is_in_the_definitions_if_it_says_so_and_refused_otherwise() {
    let (of_share, of_job) = (policy_field(SharePolicy::crd()), policy_field(TrainingJob::crd()));
    let is_in = |field: &Value, preset: Preset| {
        field["enum"].as_array().expect("a list of values").contains(&json!(preset.name()))
    };
    let (mut shares, mut jobs) = (0, 0);
    for preset in Preset::ALL {
        let (share_policy, training_job) = says(preset);
        assert_eq!(is_in(&of_share, preset), share_policy, "{preset:?} in a SharePolicy");
        assert_eq!(is_in(&of_job, preset), training_job, "{preset:?} in a TrainingJob");
        assert_eq!(is_read::<PolicyKind>(preset, "a SharePolicy", &share_policies()), share_policy, "{preset:?}");
        assert_eq!(is_read::<JobPolicy>(preset, "a TrainingJob", &job_policies()), training_job, "{preset:?}");
        shares += usize::from(share_policy);
        jobs += usize::from(training_job);
    }
    // The definitions have no other name.
    assert_eq!(
        (of_share["enum"].as_array().map(Vec::len), of_job["enum"].as_array().map(Vec::len)),
        (Some(shares), Some(jobs))
    );
    for field in [&of_share, &of_job] {
        assert_eq!(field["default"], Preset::default().name());
    }
    let unknown = serde_json::from_value::<JobPolicy>(json!("magic")).unwrap_err().to_string();
    assert!(unknown.contains("unknown policy `magic`: a TrainingJob takes gainshare, na"), "{unknown}");
}

#[test]
fn objects_of_users_keep_their_names() {
    assert_eq!(share_policies()[..4], ["na", "flowcon", "gainshare", "qos"]);
    assert_eq!(job_policies()[..5], ["gainshare", "na", "specon", "flowcon2", "operator"]);
    assert_eq!((PolicyKind::default().name(), JobPolicy::default().name()), ("gainshare", "gainshare"));
    for kind in PolicyKind::all() {
        assert_eq!(serde_json::to_value(kind).expect("it serialises"), kind.name());
    }
    for policy in JobPolicy::all() {
        assert_eq!(serde_json::to_value(policy).expect("it serialises"), policy.name());
    }
}

#[test]
fn what_the_programs_do_for_a_job_follows_from_the_rules_of_its_row() {
    let job = |preset: Preset| JobPolicy::try_from(preset).expect("a TrainingJob takes it");
    let named = |preset: Preset, has_deadline| job(preset).share_kind(has_deadline).map(PolicyKind::name);
    for (preset, share, with_deadline, places, moves) in [
        (Preset::Na, None, None, false, false),
        (Preset::Specon, None, None, true, true),
        (Preset::Flowcon2, Some("flowcon"), Some("flowcon"), true, false),
        (Preset::Gainshare, Some("gainshare"), Some("qos"), true, true),
        (Preset::Operator, None, None, false, false),
    ] {
        assert_eq!((named(preset, false), named(preset, true)), (share, with_deadline), "{preset:?}");
        assert_eq!((job(preset).places_pods(), job(preset).moves_jobs()), (places, moves), "{preset:?}");
        assert_eq!(job(preset).moves_converged_jobs(), preset == Preset::Specon, "{preset:?}");
    }
    let keeps: Vec<&str> = PolicyKind::all().filter(|kind| kind.keeps_deadlines()).map(PolicyKind::name).collect();
    assert_eq!(keeps, ["qos"]);
}

#[test]
fn node_agents_can_share_by_the_rule_of_every_training_job() {
    let equal = Preset::Na.info().answers().share;
    for policy in JobPolicy::all() {
        let share = policy.preset().info().answers().share;
        let kind = policy.share_kind(false).map(|kind| kind.preset().info().answers().share);
        let expected = (share != equal).then_some(share);
        assert_eq!(kind, expected, "`{}`: say `share_policy: true` in a row with its share rule", policy.name());
    }
}
