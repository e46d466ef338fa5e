//! What can be wrong with the numbers of a policy.

/// What is wrong with a policy's numbers.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    #[error("alpha must be a finite number of at least 0, not {0}; 0.05 is a good start")]
    Alpha(f64),
    #[error("beta must be a finite number of at least 1, not {0}; the paper uses 2")]
    Beta(f64),
    #[error("the interval must be longer than zero; 20s is a good start")]
    Interval,
    #[error("{name} of the gain rule must lie between 0 and {largest}, not {value}")]
    Gain { name: &'static str, value: f64, largest: f64 },
    #[error("the share rule {0} has no aim: leave the aim out, or choose a policy that shares by gain")]
    Aim(&'static str),
    #[error("the time between two decisions of the gain rule must be above zero, and the shortest at most the longest")]
    Looks,
    #[error(
        "SpeCon's alpha must be a finite number of at least 0, not {0}, and its interval longer than zero; 0.01 every 30s is a good start"
    )]
    Specon(f64),
    #[error("{name} of the deadline rule must lie between 0 and {largest}, not {value}")]
    Deadline { name: &'static str, value: f64, largest: f64 },
    #[error(
        "the time between two decisions of the deadline rule must be above zero, and the shortest at most the longest"
    )]
    DeadlineLooks,
    #[error("{name} of the elastic rule must lie above 0 and at most at 1, not {value}")]
    Elastic { name: &'static str, value: f64 },
    #[error("the deadband must lie between 0 and 1, not {0}")]
    Deadband(f64),
}
