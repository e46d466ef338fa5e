//! Plain rules: rules without numbers that a driver sets.
//!
//! **Problem.** A rule that is a variant of an enum is named in several files: where it is defined, where it is bound,
//! where its name is printed. A new policy should need its own folder and one row of the table.
//!
//! **Approach.** A plain rule is a value: the name that stands for it in records and documents, and the function that
//! makes the object which decides. A row of [`super::table`] contains the value; no other file names the rule. A record
//! contains the name alone, and the table finds the rule of that name again.
//!
//! **Memory.** Rules of the decisions share, move and scale may remember something between two runs. The row says in
//! which folder the type of the memory is (`remembers`), and the function gets the memory from its [`Binding`].

use super::{Order, Place, Relocate, Scale, Share, Silence};
use serde::{Deserialize, Serialize};
use std::any::{Any, TypeId};
use std::fmt;

/// What the function of a plain rule may use.
pub(crate) struct Binding<'a> {
    #[allow(dead_code, reason = "for the rule of a new row: no plain rule needs it today")]
    pub(crate) silence: Silence,
    pub(crate) memory: &'a mut dyn MemoryByType,
}

/// Memories of plain rules, found by their types.
pub(crate) trait MemoryByType {
    fn memory(&mut self, of: TypeId) -> Option<&mut dyn Any>;
}

impl<'a> Binding<'a> {
    /// The memory of type `M`, which a row declares with `remembers`.
    #[allow(dead_code, reason = "for the rule of a new row: no plain rule remembers anything today")]
    pub(crate) fn memory<M: Any>(self) -> &'a mut M {
        let memory = self.memory.memory(TypeId::of::<M>()).and_then(<dyn Any>::downcast_mut);
        memory.expect("the row of the policy `remembers` the folder of this type")
    }
}

/// How a plain rule is written where rules with numbers are written beside it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RuleTag {
    pub(crate) rule: String,
}

impl From<&'static str> for RuleTag {
    fn from(name: &'static str) -> RuleTag {
        RuleTag { rule: name.to_owned() }
    }
}

impl AsRef<str> for RuleTag {
    fn as_ref(&self) -> &str {
        &self.rule
    }
}

macro_rules! plain_rule {
    ($(#[$doc:meta])* $type:ident, written as $written:literal $form:ty, made by $make:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Serialize)]
        #[serde(into = $written)]
        pub struct $type {
            name: &'static str,
            pub(crate) make: $make,
        }

        impl $type {
            pub(crate) const fn new(name: &'static str, make: $make) -> $type {
                $type { name, make }
            }

            pub fn name(&self) -> &'static str {
                self.name
            }
        }

        impl From<$type> for $form {
            fn from(rule: $type) -> $form {
                rule.name.into()
            }
        }

        // A name belongs to one rule of a decision.
        impl PartialEq for $type {
            fn eq(&self, other: &$type) -> bool {
                self.name == other.name
            }
        }

        impl Eq for $type {}

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name)
            }
        }
    };
}

plain_rule! {
    /// Which waiting job next. All rules of this decision are plain.
    OrderRule, written as "String" String, made by fn() -> Box<dyn Order>
}

plain_rule! {
    /// On which node a waiting job starts.
    PlainPlace, written as "RuleTag" RuleTag, made by fn() -> Box<dyn Place>
}

plain_rule! {
    /// How the jobs of one node split it.
    PlainShare, written as "RuleTag" RuleTag, made by for<'a> fn(Binding<'a>) -> Box<dyn Share + 'a>
}

plain_rule! {
    /// Which running job should live elsewhere.
    PlainMove, written as "RuleTag" RuleTag, made by for<'a> fn(Binding<'a>) -> Box<dyn Relocate + 'a>
}

plain_rule! {
    /// How large a job must be.
    PlainScale, written as "String" String, made by for<'a> fn(Binding<'a>) -> Box<dyn Scale + 'a>
}
