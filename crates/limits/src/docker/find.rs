//! Finds a container by the name it was given.
//!
//! A caller that died between asking the engine for a container and recording its id knows only the name.
//! The labels say whether the container of that name is the one that was asked for.

use super::engine::Engine;
use crate::RuntimeError;
use bollard::models::ContainerStateStatusEnum;
use std::collections::BTreeMap;

/// A container as the engine knows it, in whatever state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContainerSnapshot {
    /// The full id.
    pub id: String,
    pub labels: BTreeMap<String, String>,
    /// The container was made but never started.
    pub is_unstarted: bool,
}

impl Engine {
    /// The container of this name or id, `None` if there is none.
    pub fn find(&self, name: &str) -> Result<Option<ContainerSnapshot>, RuntimeError> {
        let found = match self.wait(self.inspect(name)) {
            Ok(found) => found,
            Err(RuntimeError::Gone { .. }) => return Ok(None),
            Err(error) => return Err(error),
        };
        let labels = found.config.and_then(|config| config.labels).unwrap_or_default();
        let status = found.state.and_then(|state| state.status);
        Ok(Some(ContainerSnapshot {
            id: found.id.unwrap_or_default(),
            labels: labels.into_iter().collect(),
            is_unstarted: status == Some(ContainerStateStatusEnum::CREATED),
        }))
    }
}
