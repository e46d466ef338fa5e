//! The named policies: one row each.
//!
//! A row is all there is to a name. The choices of `--policy`, its help, `docs/policies.md` and the
//! values of the field `policy` of the custom resources are made of this table. So are the memory of plain rules and
//! the way from the name of a plain rule in a record to the rule.
//!
//! A row whose rule remembers something says so: `Young remembers young: PolicyInfo {…}` keeps a value of the type
//! `Memory` of the folder `young`.

use super::deadline::{BY_DEADLINE, Finish};
use super::elastic::Elastic;
use super::flowcon::Flowcon;
use super::gain::{Gain, GainMove};
use super::order::REQUESTS;
use super::plain::{MemoryByType, OrderRule, PlainMove, PlainPlace, PlainScale, PlainShare, RuleTag};
use super::policy::{Answers, MoveRule, PlaceRule, Policy, ScaleRule, ShareRule};
use super::rank::Rank;
use super::specon::Specon;
use crate::plan::Weighting;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};
use std::any::{Any, TypeId};
use std::fmt::Write;

/// What is known of a named policy.
#[derive(Debug, Clone, Copy)]
pub struct PolicyInfo {
    /// What people type.
    pub name: &'static str,
    /// One sentence for a list.
    pub summary: &'static str,
    /// Where it comes from.
    pub source: &'static str,
    pub scope: Scope,
    /// The rules and numbers behind the name.
    pub policy: fn() -> Policy,
}

/// Where a policy may decide.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// On real jobs: `gainshare up` takes it, and those of the custom resources that are named here.
    Production { share_policy: bool, training_job: bool },
    /// Only on simulated jobs.
    SimulatorOnly { because: &'static str },
}

/// Makes [`RowMemory`] of the folders that rows name after `remembers`.
macro_rules! row_memory {
    ($($folder:ident)*) => {
        /// What the plain rules of the table remember.
        #[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
        #[serde(default)]
        pub(crate) struct RowMemory {
            $($folder: crate::policies::$folder::Memory,)*
        }

        impl RowMemory {
            pub(crate) fn is_empty(&self) -> bool {
                *self == RowMemory::default()
            }
        }

        impl MemoryByType for RowMemory {
            fn memory(&mut self, of: TypeId) -> Option<&mut dyn Any> {
                let _ = of;
                $(
                    if of == TypeId::of::<crate::policies::$folder::Memory>() {
                        return Some(&mut self.$folder);
                    }
                )*
                None
            }
        }
    };
}

macro_rules! table {
    ($($variant:ident $(remembers $folder:ident)?: $row:expr,)*) => {
        /// A named policy. The first row of the table is the baseline that experiments compare the others with.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub enum Preset {
            $($variant,)*
        }

        const COUNT: usize = [$(Preset::$variant),*].len();

        impl Preset {
            pub const ALL: [Preset; COUNT] = [$(Preset::$variant),*];
        }

        static TABLE: [PolicyInfo; COUNT] = [$($row),*];

        row_memory! { $($($folder)?)* }
    };
}

/// Tiresias leaves its queue limits to be tuned to the workload; for jobs of minutes on one node
/// these sort the short from the long.
const TIRESIAS_LIMITS_S: [f64; 2] = [30.0, 120.0];

/// Why no rule that serves jobs one after the other may decide on real jobs.
const STARVES: Scope = Scope::SimulatorOnly {
    because: "it starves jobs: every job but the first gets next to nothing until the first has ended",
};

/// For one machine, not for a cluster.
const MACHINE: Scope = Scope::Production { share_policy: false, training_job: false };

table! {
    Na: PolicyInfo {
        name: "na",
        summary: "Equal shares: what a plain machine does, and what all others are compared with.",
        source: "The baseline of the FlowCon and SpeCon papers.",
        scope: Scope::Production { share_policy: true, training_job: true },
        policy: Policy::equal,
    },
    Flowcon: PolicyInfo {
        name: "flowcon",
        summary: "Shares follow growth efficiency; jobs that have converged keep a floor.",
        source: "W. Zheng et al., FlowCon, ICPP 2019.",
        scope: Scope::Production { share_policy: true, training_job: false },
        policy: || Policy { share: ShareRule::Flowcon(Flowcon::default()), ..Policy::equal() },
    },
    Specon: PolicyInfo {
        name: "specon",
        summary: "Jobs that have converged move away from jobs that still grow.",
        source: "Y. Mao et al., SpeCon, IEEE Systems Journal 2021.",
        scope: Scope::Production { share_policy: false, training_job: true },
        policy: || Policy { moves: MoveRule::Specon(Specon::default()), ..Policy::equal() },
    },
    Flowcon2: PolicyInfo {
        name: "flowcon2",
        summary: "FlowCon on every node, and new jobs start where they will grow most.",
        source: "V. Sharma, FlowCon 2.0 (thesis).",
        scope: Scope::Production { share_policy: false, training_job: true },
        policy: || Policy {
            share: ShareRule::Flowcon(Flowcon::default()),
            place: PlaceRule::Growth,
            ..Policy::equal()
        },
    },
    Fifo: PolicyInfo {
        name: "fifo",
        summary: "First come, first served: the oldest job has the node to itself.",
        source: "Needs none.",
        scope: STARVES,
        policy: || Policy { share: ShareRule::Rank(Rank::Arrival), ..Policy::equal() },
    },
    Drf: PolicyInfo {
        name: "drf",
        summary: "Dominant resource fairness: equal parts of what each job needs most.",
        source: "A. Ghodsi et al., NSDI 2011.",
        scope: MACHINE,
        policy: || Policy { share: ShareRule::Weigh { by: Weighting::Drf }, ..Policy::equal() },
    },
    Srtf: PolicyInfo {
        name: "srtf",
        summary: "Shortest remaining time first, as the jobs' own reports predict it.",
        source: "L. Schrage, 1968, with this project's prediction.",
        scope: STARVES,
        policy: || Policy { share: ShareRule::Rank(Rank::Predicted), ..Policy::equal() },
    },
    Tiresias: PolicyInfo {
        name: "tiresias",
        summary: "Least attained service first, in queues.",
        source: "J. Gu et al., Tiresias, NSDI 2019.",
        scope: STARVES,
        policy: || Policy {
            share: ShareRule::Rank(Rank::Attained { limits_s: TIRESIAS_LIMITS_S }),
            ..Policy::equal()
        },
    },
    Slaq: PolicyInfo {
        name: "slaq",
        summary: "Shares go where the loss falls most in the next ten seconds.",
        source: "H. Zhang et al., SLAQ, SoCC 2017.",
        scope: MACHINE,
        policy: || Policy { share: ShareRule::Weigh { by: Weighting::Slaq }, ..Policy::equal() },
    },
    Optimus: PolicyInfo {
        name: "optimus",
        summary: "Shares go where the remaining time shrinks most.",
        source: "Y. Peng et al., Optimus, EuroSys 2018.",
        scope: MACHINE,
        policy: || Policy { share: ShareRule::Weigh { by: Weighting::Optimus }, ..Policy::equal() },
    },
    Themis: PolicyInfo {
        name: "themis",
        summary: "All jobs end late by the same factor.",
        source: "K. Mahajan et al., Themis, NSDI 2020.",
        scope: MACHINE,
        policy: || Policy { share: ShareRule::Weigh { by: Weighting::Themis }, ..Policy::equal() },
    },
    Gainshare: PolicyInfo {
        name: "gainshare",
        summary: "The node goes where a unit of it gains most, and jobs seldom end later than with equal shares.",
        source: "This project; docs/gain-policy.md.",
        scope: Scope::Production { share_policy: true, training_job: true },
        policy: || Policy {
            share: ShareRule::Gain(Gain::default()),
            moves: MoveRule::Gain(GainMove::default()),
            ..Policy::equal()
        },
    },
    Qos: PolicyInfo {
        name: "qos",
        summary: "Jobs end by their deadlines with the least that is enough; all others share the rest by gain.",
        source: "A QoS-oriented scheduling and autoscaling framework, IJCNN 2019; docs/deadlines.md.",
        scope: Scope::Production { share_policy: true, training_job: false },
        policy: || Policy {
            order: BY_DEADLINE,
            share: ShareRule::Gain(Gain::default()),
            scale: ScaleRule::Deadline(Finish::default()),
            ..Policy::equal()
        },
    },
    Operator: PolicyInfo {
        name: "operator",
        summary: "Parameter-server jobs: tasks start together, sit together, grow into idle CPU and return it when others wait. Jobs of one task share as under `na`.",
        source: "A dynamic resource adjustment operator for parameter-server training, with Optimus's speed model; docs/elastic.md.",
        scope: Scope::Production { share_policy: false, training_job: true },
        policy: || Policy {
            place: PlaceRule::Affinity,
            scale: ScaleRule::Elastic(Elastic::default()),
            ..Policy::equal()
        },
    },
    Edf: PolicyInfo {
        name: "edf",
        summary: "Earliest deadline first: the job whose deadline comes first has the node to itself.",
        source: "C. Liu and J. Layland, 1973.",
        scope: STARVES,
        policy: || Policy {
            order: BY_DEADLINE,
            share: ShareRule::Rank(Rank::Deadline),
            ..Policy::equal()
        },
    },
    Elasticflow: PolicyInfo {
        name: "elasticflow",
        summary: "Admits a job when it arrives if all deadlines can then be kept, and refuses it for good otherwise.",
        source: "D. Gu et al., ElasticFlow, ASPLOS 2023; its admission, for shares of a node.",
        scope: Scope::SimulatorOnly {
            because: "it must be told every job's length and speed before the job starts, and starves those it refuses",
        },
        policy: || Policy {
            order: BY_DEADLINE,
            share: ShareRule::Gain(Gain::default()),
            scale: ScaleRule::Deadline(Finish::elasticflow()),
            ..Policy::equal()
        },
    },
    Requests: PolicyInfo {
        name: "requests",
        summary: "Each job reserves what its owner requested, and waits until that much is free.",
        source: "What Kubernetes' default scheduler does with requests.",
        scope: Scope::SimulatorOnly { because: "it needs a request of every job, which people guess" },
        policy: || Policy { order: REQUESTS, ..Policy::equal() },
    },
    Srpt: PolicyInfo {
        name: "srpt",
        summary: "Shortest remaining work first, known from the simulation: the bound of what any policy can reach on one node.",
        source: "L. Schrage, 1968.",
        scope: Scope::SimulatorOnly {
            because: "it starves jobs and needs to know the work left, which no real driver knows: every job but the first gets next to \
                      nothing",
        },
        policy: || Policy { share: ShareRule::Rank(Rank::Remaining), ..Policy::equal() },
    },
}

impl Preset {
    pub fn info(self) -> &'static PolicyInfo {
        &TABLE[self as usize]
    }

    pub fn name(self) -> &'static str {
        self.info().name
    }

    /// Whether the policy goes by what only some jobs have: deadlines, requests or tasks. Without them it is
    /// another policy of the table under a second name.
    pub fn needs_deadlines(self) -> bool {
        let (own, equal) = (self.info().answers(), Policy::equal().answers());
        own.order != equal.order || own.scale != equal.scale
    }

    /// Refuses a policy that may not decide on real jobs, with the reason.
    pub fn for_real_jobs(self) -> Result<Preset, String> {
        self.scope().map(|_| self)
    }

    /// Refuses a policy that no SharePolicy takes, with the reason.
    pub fn for_share_policy(self) -> Result<Preset, String> {
        let (is_taken, _) = self.scope()?;
        is_taken.then_some(self).ok_or_else(|| self.refusal("a SharePolicy"))
    }

    /// Refuses a policy that no TrainingJob takes, with the reason.
    pub fn for_training_job(self) -> Result<Preset, String> {
        let (_, is_taken) = self.scope()?;
        is_taken.then_some(self).ok_or_else(|| self.refusal("a TrainingJob"))
    }

    /// Whether a SharePolicy and whether a TrainingJob takes the policy, if it may decide on real jobs at all.
    fn scope(self) -> Result<(bool, bool), String> {
        match self.info().scope {
            Scope::Production { share_policy, training_job } => Ok((share_policy, training_job)),
            Scope::SimulatorOnly { because } => {
                Err(format!("`{}` is for the simulator only: {because}; try it with `gainshare sim`", self.name()))
            }
        }
    }

    fn refusal(self, resource: &str) -> String {
        format!("`{}` is not a policy of {resource}: docs/policies.md lists where each policy may decide", self.name())
    }
}

#[allow(clippy::derivable_impls, reason = "the macro makes the enum of the table's rows; no row is marked")]
impl Default for Preset {
    fn default() -> Preset {
        Preset::Gainshare
    }
}

impl std::str::FromStr for Preset {
    type Err = String;
    fn from_str(s: &str) -> Result<Preset, String> {
        Preset::ALL.into_iter().find(|p| p.name() == s).ok_or_else(|| {
            let known: Vec<_> = Preset::ALL.iter().map(|p| p.name()).collect();
            format!("unknown policy `{s}`; known are: {}", known.join(", "))
        })
    }
}

impl TryFrom<String> for Preset {
    type Error = String;
    fn try_from(name: String) -> Result<Preset, String> {
        name.parse()
    }
}

impl From<Preset> for String {
    fn from(preset: Preset) -> String {
        preset.name().to_owned()
    }
}

impl PolicyInfo {
    pub fn answers(&self) -> Answers {
        (self.policy)().answers()
    }
}

/// The policies among whose rules the name of a plain rule is looked for.
fn policies() -> impl Iterator<Item = Policy> {
    TABLE.iter().map(|info| info.policy).chain(EXAMPLES.iter().copied()).map(|policy| policy())
}

/// Policies of tests, which are in no table: that of docs/write-a-policy.md.
#[cfg(test)]
const EXAMPLES: &[fn() -> Policy] = &[example];
#[cfg(not(test))]
const EXAMPLES: &[fn() -> Policy] = &[];

#[cfg(test)]
fn example() -> Policy {
    Policy { share: ShareRule::Plain(super::example::RULE), ..Policy::equal() }
}

/// Finds a plain rule of this name for one decision.
macro_rules! find_by_name {
    ($type:ident, $form:ident, $decision:literal, $rule:expr) => {
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$type, D::Error> {
                let written = $form::deserialize(deserializer)?;
                let name: &str = written.as_ref();
                let rule: fn(Policy) -> Option<$type> = $rule;
                let found = policies().filter_map(rule).find(|rule| rule.name() == name);
                let problem = || format!("no policy of this version has the {} rule `{name}`", $decision);
                found.ok_or_else(|| D::Error::custom(problem()))
            }
        }
    };
}

find_by_name!(OrderRule, String, "order", |policy| Some(policy.order));
find_by_name!(PlainPlace, RuleTag, "place", |policy| match policy.place {
    PlaceRule::Plain(rule) => Some(rule),
    _ => None,
});
find_by_name!(PlainShare, RuleTag, "share", |policy| match policy.share {
    ShareRule::Plain(rule) => Some(rule),
    _ => None,
});
find_by_name!(PlainMove, RuleTag, "move", |policy| match policy.moves {
    MoveRule::Plain(rule) => Some(rule),
    _ => None,
});
find_by_name!(PlainScale, String, "scale", |policy| match policy.scale {
    ScaleRule::Plain(rule) => Some(rule),
    _ => None,
});

impl From<Preset> for Policy {
    fn from(preset: Preset) -> Policy {
        (preset.info().policy)()
    }
}

/// The text of `docs/policies.md`.
pub fn reference() -> String {
    let mut text = String::from(
        "# Policies\n\n\
         Made of the table in `crates/core/src/policies/table.rs`; do not edit. [Write your own](write-a-policy.md).\n\n\
         A policy answers five questions: which waiting job next (order), on which node (place), how the jobs of one node split it\n\
         (share), which running job should live elsewhere (move), how large a job must be (scale).\n\n\
         | policy | what it does | order | place | share | move | scale |\n|---|---|---|---|---|---|---|\n",
    );
    for info in &TABLE {
        let Answers { order, place, share, moves, scale } = info.answers();
        let _ =
            writeln!(text, "| `{}` | {} | {order} | {place} | {share} | {moves} | {scale} |", info.name, info.summary);
    }
    text.push_str(
        "\n## Where each may decide\n\n\
         `gainshare sim` takes all of them. `gainshare up` refuses those that are for the simulator only.\n\n\
         | policy | one machine (`gainshare up`) | SharePolicy | TrainingJob | source |\n|---|---|---|---|---|\n",
    );
    for info in &TABLE {
        let (up, share_policy, training_job) = match info.scope {
            Scope::Production { share_policy, training_job } => {
                let named = |is_taken| if is_taken { format!("`{}`", info.name) } else { "–".to_owned() };
                ("yes".to_owned(), named(share_policy), named(training_job))
            }
            Scope::SimulatorOnly { because } => (format!("no: {because}"), "–".to_owned(), "–".to_owned()),
        };
        let _ = writeln!(text, "| `{}` | {up} | {share_policy} | {training_job} | {} |", info.name, info.source);
    }
    let _ = writeln!(text, "\nThe default is `{}`, everywhere.", Preset::default().name());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_sound_and_names_are_unique() {
        let names: std::collections::BTreeSet<_> = TABLE.iter().map(|info| info.name).collect();
        assert_eq!(names.len(), TABLE.len());
        for preset in Preset::ALL {
            assert_eq!(preset.name().parse(), Ok(preset));
            Policy::from(preset).validate().expect("the numbers of a row are sound");
            assert!(preset.info().summary.ends_with('.') && preset.info().source.ends_with('.'), "{preset:?}");
        }
        assert!("no-such".parse::<Preset>().unwrap_err().contains("na, flowcon, specon"));
    }

    #[test]
    fn the_first_row_is_the_baseline_and_the_default_is_ours() {
        assert_eq!(Preset::ALL[0], Preset::Na);
        assert_eq!(Preset::default(), Preset::Gainshare);
        assert_eq!(Preset::default().for_real_jobs(), Ok(Preset::Gainshare));
    }

    #[test]
    fn the_rules_of_every_row_are_read_as_they_are_written() {
        for policy in policies() {
            let text = serde_json::to_string(&policy).expect("a policy serialises");
            let read: Policy = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert_eq!(read, policy);
        }
        let equal = serde_json::to_value(Policy::equal()).expect("a policy serialises");
        let written = ["order", "place", "share", "moves", "scale"].map(|decision| equal[decision].to_string());
        assert_eq!(
            written,
            [r#""fifo""#, r#"{"rule":"spread"}"#, r#"{"rule":"fair"}"#, r#"{"rule":"stay"}"#, r#""fixed""#]
        );
    }

    #[test]
    fn an_unknown_rule_is_refused_with_its_decision() {
        let refusal = |text: &str| serde_json::from_str::<Policy>(text).expect_err("refused").to_string();
        for (text, words) in [
            (r#"{"order": "lottery"}"#, "no policy of this version has the order rule `lottery`"),
            (r#"{"share": {"rule": "lottery"}}"#, "this version has no such share rule"),
            (r#"{"share": {"rule": "flowcon", "alpha": "x"}}"#, "this version has no such share rule"),
            (r#"{"moves": {"rule": "lottery"}}"#, "this version has no such move rule"),
            (r#"{"place": {"rule": "lottery"}}"#, "this version has no such place rule"),
            (r#"{"scale": "lottery"}"#, "this version has no such scale rule"),
        ] {
            assert!(refusal(text).contains(words), "{text}: {}", refusal(text));
        }
    }

    #[test]
    fn a_row_without_an_enum_decides_and_its_decision_is_made_again() {
        let mut decider = crate::decider::Decider::new(example());
        let jobs = vec![crate::fixtures::running(1, 0), crate::fixtures::running(2, 0)];
        let view = crate::view::View { nodes: vec![crate::fixtures::node(0)], jobs, ..crate::view::View::default() };
        let record = decider.decide_recorded(view).decision().expect("a plan").record().expect("it was recorded");
        let text = serde_json::to_string(&record).expect("a record serialises");
        let read: crate::replay::RecordedDecision = serde_json::from_str(&text).expect("a record is read");
        assert_eq!(read.policy.answers().share, "young");
        assert_eq!(read.replay().expect("it can be replayed").differences, vec![]);
    }

    /// The memories of two folders, as two rows would declare them.
    mod two_memories {
        use super::*;
        use crate::policies::plain::Binding;
        use crate::policies::{flowcon, specon};

        row_memory! { flowcon specon }

        #[test]
        fn a_plain_rule_gets_the_memory_of_its_folder_and_what_it_writes_is_kept() {
            let (mut memory, silence) = (RowMemory::default(), Policy::equal().silence());
            assert!(memory.is_empty());
            let later: specon::Memory =
                serde_json::from_str(r#"{"due": 7, "ran": null, "jobs": {}}"#).expect("a memory is read");
            let bound: &mut specon::Memory = Binding { silence, memory: &mut memory }.memory();
            *bound = later.clone();
            assert_eq!((&memory.specon, &memory.flowcon), (&later, &flowcon::Memory::default()));
            let text = serde_json::to_string(&memory).expect("a memory serialises");
            assert_eq!(serde_json::from_str::<RowMemory>(&text).expect("a memory is read"), memory);
            assert!(!memory.is_empty() && memory.memory(TypeId::of::<u32>()).is_none());
        }
    }

    #[test]
    fn every_resource_takes_the_policies_whose_rows_say_so_and_refuses_the_others_with_words() {
        for preset in Preset::ALL {
            let (share_policy, training_job) = match preset.info().scope {
                Scope::Production { share_policy, training_job } => (share_policy, training_job),
                Scope::SimulatorOnly { .. } => (false, false),
            };
            for (answer, is_taken, resource) in [
                (preset.for_share_policy(), share_policy, "SharePolicy"),
                (preset.for_training_job(), training_job, "TrainingJob"),
            ] {
                assert_eq!(answer.is_ok(), is_taken, "{preset:?}");
                let words = [preset.name(), if preset.for_real_jobs().is_ok() { resource } else { "simulator only" }];
                assert!(answer.err().is_none_or(|why| words.iter().all(|word| why.contains(word))), "{preset:?}");
            }
        }
    }

    #[test]
    fn what_serves_jobs_one_after_the_other_is_for_the_simulator_only() {
        for preset in Preset::ALL {
            let ranks = matches!(Policy::from(preset).share, ShareRule::Rank(_));
            let lacks = matches!(preset, Preset::Elasticflow | Preset::Requests);
            assert_eq!(preset.for_real_jobs().is_err(), ranks || lacks, "{preset:?}");
        }
        let refused = Preset::Srpt.for_real_jobs().unwrap_err();
        assert!(refused.contains("starves") && refused.contains("gainshare sim"), "{refused}");
    }

    #[test]
    fn the_reference_has_every_policy_twice() {
        let text = reference();
        for preset in Preset::ALL {
            assert_eq!(text.matches(&format!("\n| `{}` |", preset.name())).count(), 2, "{preset:?}");
        }
    }
}
