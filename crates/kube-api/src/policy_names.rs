//! The values of the fields `policy` of the custom resources: the rows of the core's table of policies that say so,
//! under their names in the table.
//!
//! A row of the table says whether a SharePolicy and whether a TrainingJob takes its policy. [`PolicyKind`] and
//! [`JobPolicy`] hold such a row, and no other: the schemas of the resources, what is read from objects and
//! annotations, and what the programs do all follow from it.

use gainshare_core::policies::Preset;
use gainshare_core::policy::{MoveRule, PlaceRule, Policy};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// A former name of a policy, and its name now.
type FormerName = Option<(&'static str, Preset)>;

macro_rules! named_policy {
    ($(#[$doc:meta])* $type:ident, $title:literal, of $resource:literal, where $is_taken:path, listed by $names:path,
     formerly $former:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $type(Preset);

        impl $type {
            /// All of them, in the order of the table.
            pub fn all() -> impl Iterator<Item = $type> {
                Preset::ALL.into_iter().filter_map(|preset| $type::try_from(preset).ok())
            }

            /// The row of the table.
            pub fn preset(self) -> Preset {
                self.0
            }

            pub fn name(self) -> &'static str {
                self.0.name()
            }
        }

        impl TryFrom<Preset> for $type {
            type Error = String;

            fn try_from(preset: Preset) -> Result<$type, String> {
                $is_taken(preset).map($type)
            }
        }

        impl TryFrom<String> for $type {
            type Error = String;

            fn try_from(name: String) -> Result<$type, String> {
                let taken = || format!("{} takes {}", $resource, $names().join(", "));
                let former: FormerName = $former;
                let former = former.filter(|(former, _)| *former == name).map(|(_, preset)| preset);
                let preset = former.or_else(|| name.parse().ok());
                let preset = preset.ok_or_else(|| format!("unknown policy `{name}`: {}", taken()))?;
                $type::try_from(preset).map_err(|why| format!("{why}; {}", taken()))
            }
        }

        impl From<$type> for String {
            fn from(policy: $type) -> String {
                policy.name().to_owned()
            }
        }

        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                $title.into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string", "enum": $names()})
            }
        }
    };
}

named_policy! {
    /// The policy of a SharePolicy. Objects of version 0.1 call `na` `fair`.
    PolicyKind, "PolicyKind", of "a SharePolicy", where Preset::for_share_policy, listed by share_policies,
    formerly Some(("fair", Preset::Na))
}

named_policy! {
    /// The policy that decides where a job runs and whether it moves.
    JobPolicy, "JobPolicy", of "a TrainingJob", where Preset::for_training_job, listed by job_policies,
    formerly None
}

/// The policies of a SharePolicy, in the order of the table.
pub fn share_policies() -> Vec<&'static str> {
    PolicyKind::all().map(PolicyKind::name).collect()
}

/// The policies of a TrainingJob: the default, then the others in the order of the table.
pub fn job_policies() -> Vec<&'static str> {
    let mut policies: Vec<JobPolicy> = JobPolicy::all().collect();
    policies.sort_by_key(|policy| *policy != JobPolicy::default());
    policies.into_iter().map(JobPolicy::name).collect()
}

impl PolicyKind {
    /// Equal shares.
    pub fn equal() -> PolicyKind {
        PolicyKind(Preset::Na)
    }

    /// Whether the policy decides how large a job must be: then it keeps deadlines.
    pub fn keeps_deadlines(self) -> bool {
        Policy::from(self.0).scale != Policy::equal().scale
    }
}

impl JobPolicy {
    /// The rules and numbers of the row.
    pub fn policy(self) -> Policy {
        Policy::from(self.0)
    }

    /// Whether the policy decides where jobs of one pod run: it places or moves them otherwise than the baseline. The
    /// cluster's scheduler places all others.
    pub fn places_pods(self) -> bool {
        let place = self.policy().place;
        // This rule places the tasks of distributed jobs.
        let places = place != Policy::equal().place && place != PlaceRule::Affinity;
        places || self.moves_jobs()
    }

    /// Whether the policy moves running jobs.
    pub fn moves_jobs(self) -> bool {
        self.policy().moves != Policy::equal().moves
    }

    /// Whether the policy moves jobs that have converged, each once.
    pub fn moves_converged_jobs(self) -> bool {
        matches!(self.policy().moves, MoveRule::Specon(_))
    }

    /// Whether the policy moves a job that will miss its deadline to a node on which it makes it.
    pub fn moves_for_deadlines(self) -> bool {
        matches!(self.policy().moves, MoveRule::Gain(_))
    }

    /// Whether what the policy makes as early as possible can be chosen.
    pub fn has_aim(self) -> bool {
        self.policy().aim().is_some()
    }

    /// The policy by which node agents share a node among pods of such jobs; `None`: the policy has no answer to how a
    /// node is shared. Among policies with the same share rule, one that keeps deadlines is for jobs with a deadline.
    /// Without deadlines on its node, such a policy shares as the others do.
    pub fn share_kind(self, has_deadline: bool) -> Option<PolicyKind> {
        let share = |preset: Preset| preset.info().answers().share;
        if share(self.0) == share(Preset::Na) {
            return None;
        }
        let alike = PolicyKind::all().filter(|kind| share(kind.0) == share(self.0));
        alike.min_by_key(|kind| (kind.keeps_deadlines() != has_deadline, kind.0 != self.0))
    }
}
