//! Which running job should live elsewhere?
//!
//! One answer so far beside staying: SpeCon. A job is moved by saving it, proving that it stopped and restoring it on another node; that costs
//! seconds, so answers here are rare, and each names its reason.

pub mod specon;
