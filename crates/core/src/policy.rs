//! What a policy is made of, under the names that drivers use: [`Policy`], the rules it chooses from, and
//! their numbers. The definitions are in [`crate::policies`].

pub use crate::plan::Weighting;
pub use crate::policies::deadline::{Admission, Finish};
pub use crate::policies::elastic::affinity::{TaskRequest, place as place_tasks};
pub use crate::policies::elastic::divide::{Division, TaskUse};
pub use crate::policies::elastic::{Elastic, FreeNode};
pub use crate::policies::error::PolicyError;
pub use crate::policies::flowcon::Flowcon;
pub use crate::policies::gain::{Aim, Gain, GainMove, OneNode};
pub use crate::policies::plain::{OrderRule, PlainMove, PlainPlace, PlainScale, PlainShare};
pub use crate::policies::policy::{MoveRule, PlaceRule, Policy, ScaleRule, ShareRule};
pub use crate::policies::rank::Rank;
pub use crate::policies::specon::Specon;
pub use crate::policies::table::Preset;
