//! The policies that the custom resources take are those of the table in `gainshare-core`, under the same names.

use gainshare_core::policies::{Preset, Scope};
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::training_job::{JobPolicy, TrainingJob};
use kube::CustomResourceExt;
use serde_json::Value;
use std::collections::BTreeSet;

/// The values and the default of the field `spec.policy`.
fn policies(crd: impl serde::Serialize) -> (BTreeSet<String>, Value) {
    let crd = serde_json::to_value(crd).expect("a definition serialises");
    let field = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["policy"];
    let values = field["enum"].as_array().expect("the field has a list of values");
    (values.iter().map(|v| v.as_str().expect("a name").to_owned()).collect(), field["default"].clone())
}

/// The names under which a resource takes policies.
fn table(name: impl Fn(Preset, Option<&'static str>, bool) -> Option<&'static str>) -> BTreeSet<String> {
    let names = Preset::ALL.into_iter().filter_map(|preset| match preset.info().scope {
        Scope::Production { share_policy, training_job } => name(preset, share_policy, training_job),
        Scope::SimulatorOnly { .. } => None,
    });
    names.map(str::to_owned).collect()
}

#[test]
fn a_share_policy_takes_the_policies_of_the_table() {
    let (values, default) = policies(SharePolicy::crd());
    assert_eq!(values, table(|_, share_policy, _| share_policy));
    assert_eq!(default, Preset::default().name());
}

#[test]
fn a_training_job_takes_the_policies_of_the_table() {
    let (values, default) = policies(TrainingJob::crd());
    assert_eq!(values, table(|preset, _, training_job| training_job.then(|| preset.name())));
    assert_eq!(default, Preset::default().name());
    assert_eq!(values, JobPolicy::ALL.map(|policy| policy.name().to_owned()).into());
}
