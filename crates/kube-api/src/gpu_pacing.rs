//! Whether the GPU work of a pod is paced, and if not, why, as a value.
//!
//! **How.** The node agent makes the value for pods that ask for it and reports it; the operator publishes it in the
//! pod's note ([`crate::pod_note`]). Its sentence is made in one place (`Display`).

use crate::names::{GPU_ANNOTATION, INSIDE_LABEL};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Whether the GPU work of a pod is paced. The names of states (`state`) are part of the annotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum GpuPacing {
    /// Launches of the pod are paced, or were a moment ago.
    Paced {
        /// In hundredths of the time that the pods of its policy have on its GPU.
        percent: u32,
    },
    /// Launches of the pod are caught, and no other pod of its policy has a larger share of its GPU.
    Unpaced,
    /// The pod uses several GPUs, or is one of several ranks.
    SeveralGpus,
    /// The library is loaded and has caught no launch.
    NoLaunches,
    /// The pod has the library, and no program of it has loaded it.
    NotLoaded,
    /// The pod was started without the library.
    NoLibrary,
    /// What lies in the place of its page is no page, or cannot be written.
    PageRefused,
    /// The node agents may not write pages.
    PagesOff,
}

impl GpuPacing {
    /// The state without its number, which changes all the time.
    pub fn kind(self) -> GpuPacing {
        match self {
            GpuPacing::Paced { .. } => GpuPacing::Paced { percent: 0 },
            other => other,
        }
    }

    /// The state with its number in its range.
    pub fn clamped(self) -> GpuPacing {
        match self {
            GpuPacing::Paced { percent } => GpuPacing::Paced { percent: percent.min(100) },
            other => other,
        }
    }
}

/// For people who use a cluster: a remedy is one that they have there.
impl fmt::Display for GpuPacing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuPacing::Paced { percent } => {
                write!(f, "its launches are paced: {percent}% of what the pods of its policy have of this GPU")
            }
            GpuPacing::Unpaced => {
                write!(f, "not paced: no other pod of its policy with work on its GPU has a larger share")
            }
            GpuPacing::SeveralGpus => write!(
                f,
                "not paced: it uses several GPUs or is one of several ranks; GAINSHARE_INSIDE_GPU=all in its \
                 environment paces it all the same"
            ),
            GpuPacing::NoLaunches => write!(f, "not paced: no launch of its programs was caught so far"),
            GpuPacing::NotLoaded => write!(
                f,
                "not paced: the library is not loaded, because its program is static, setuid or of another C library"
            ),
            GpuPacing::NoLibrary => write!(
                f,
                "not paced: the pod was started without the library; label its namespace with {INSIDE_LABEL}=enabled \
                 and create it again, or set its annotation {GPU_ANNOTATION} to disabled"
            ),
            GpuPacing::PageRefused => write!(f, "not paced: its page cannot be written, its node agent's log says why"),
            GpuPacing::PagesOff => {
                write!(f, "not paced: node agents here may not write pages; set inside.enabled=true in the chart")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_state_is_written_as_its_name_and_read_again() {
        for (state, expected) in [
            (GpuPacing::Paced { percent: 30 }, json!({"state": "paced", "percent": 30})),
            (GpuPacing::Unpaced, json!({"state": "unpaced"})),
            (GpuPacing::SeveralGpus, json!({"state": "several-gpus"})),
            (GpuPacing::NotLoaded, json!({"state": "not-loaded"})),
        ] {
            assert_eq!(serde_json::to_value(state).unwrap(), expected);
            assert_eq!(serde_json::from_value::<GpuPacing>(expected).unwrap(), state);
        }
        assert_eq!(GpuPacing::Paced { percent: 30 }.kind(), GpuPacing::Paced { percent: 70 }.kind());
        assert_eq!(GpuPacing::Paced { percent: u32::MAX }.clamped(), GpuPacing::Paced { percent: 100 });
    }
}
