//! Which running job should live elsewhere?
//!
//! Two answers beside staying: SpeCon's, and our own by gain. A job is moved by saving it, proving that it stopped and restoring it on another node; that costs
//! seconds, so answers here are rare, and each names its reason.

pub mod gain;
pub mod specon;
