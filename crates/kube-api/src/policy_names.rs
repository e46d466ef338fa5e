//! The values of the fields `policy` of the custom resources: the rows of the core's table of policies that a cluster
//! takes, under their names in the table.
//!
//! The types [`PolicyKind`] and [`JobPolicy`] are the same values for programs. `tests/policies.rs` shows that they
//! have a variant for each name.

use crate::run_policy::JobPolicy;
use crate::wire::PolicyKind;
use gainshare_core::policies::{Preset, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use std::borrow::Cow;

/// The policies of a SharePolicy, in the order of the table.
pub fn share_policies() -> Vec<&'static str> {
    let is_taken = |preset: &Preset| matches!(preset.info().scope, Scope::Production { share_policy: true, .. });
    Preset::ALL.into_iter().filter(is_taken).map(Preset::name).collect()
}

/// The policies of a TrainingJob: the default, then the others in the order of the table.
pub fn job_policies() -> Vec<&'static str> {
    let is_taken = |preset: &Preset| matches!(preset.info().scope, Scope::Production { training_job: true, .. });
    let mut presets: Vec<Preset> = Preset::ALL.into_iter().filter(is_taken).collect();
    presets.sort_by_key(|preset| *preset != Preset::default());
    presets.into_iter().map(Preset::name).collect()
}

impl JsonSchema for PolicyKind {
    fn schema_name() -> Cow<'static, str> {
        "PolicyKind".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "enum": share_policies()})
    }
}

impl JsonSchema for JobPolicy {
    fn schema_name() -> Cow<'static, str> {
        "JobPolicy".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"type": "string", "enum": job_policies()})
    }
}
