//! The policies that the custom resources take: the definitions have the names of the table in `gainshare-core`, and
//! the programs have a variant for each name and no other.

use gainshare_core::policies::Preset;
use gainshare_kube_api::policy_names::{job_policies, share_policies};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::training_job::{JobPolicy, TrainingJob};
use gainshare_kube_api::wire::PolicyKind;
use kube::CustomResourceExt;
use serde_json::{Value, json};
use std::collections::HashSet;

/// The field `spec.policy`.
fn policy_field(crd: impl serde::Serialize) -> Value {
    let crd = serde_json::to_value(crd).expect("a definition serialises");
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["policy"].clone()
}

/// The serialised names.
fn names<T: serde::Serialize>(variants: &[T]) -> HashSet<Value> {
    variants.iter().map(|variant| serde_json::to_value(variant).expect("it serialises")).collect()
}

#[test]
fn a_share_policy_takes_the_policies_of_the_table() {
    let field = policy_field(SharePolicy::crd());
    assert_eq!(field["enum"], json!(share_policies()));
    assert_eq!(field["default"], Preset::default().name());
    assert_eq!(names(&PolicyKind::ALL), names(&share_policies()));
    assert_eq!(share_policies()[..4], ["na", "flowcon", "gainshare", "qos"], "objects of users have these names");
}

#[test]
fn a_training_job_takes_the_policies_of_the_table() {
    let field = policy_field(TrainingJob::crd());
    assert_eq!(field["enum"], json!(job_policies()));
    assert_eq!(field["default"], Preset::default().name());
    assert_eq!(names(&JobPolicy::ALL), names(&job_policies()));
    assert_eq!(job_policies()[..5], ["gainshare", "na", "specon", "flowcon2", "operator"]);
    assert_eq!(names(&JobPolicy::ALL), names(&JobPolicy::ALL.map(JobPolicy::name)));
}
