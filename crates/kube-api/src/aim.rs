//! The field `aim` of the custom resources: what a policy that shares by gain makes as early as possible.

use gainshare_core::policy::Aim;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `finish`: the end of the jobs. `quality`: nine tenths of their improvement. In the mean over jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AimKind {
    #[default]
    Finish,
    Quality,
}

impl AimKind {
    pub fn name(self) -> &'static str {
        Aim::from(self).name()
    }

    /// The aim's name and what it means, for people.
    pub fn text(self) -> String {
        format!("{}: {}", self.name(), Aim::from(self).summary())
    }
}

impl From<AimKind> for Aim {
    fn from(aim: AimKind) -> Aim {
        match aim {
            AimKind::Finish => Aim::Finish,
            AimKind::Quality => Aim::Quality,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_are_those_of_the_core() {
        for (kind, aim) in [(AimKind::Finish, Aim::Finish), (AimKind::Quality, Aim::Quality)] {
            assert_eq!(Aim::from(kind), aim);
            assert_eq!(serde_json::to_value(kind).unwrap(), aim.name());
        }
        assert_eq!(Aim::from(AimKind::default()), Aim::default());
    }
}
