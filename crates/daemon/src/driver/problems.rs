//! What is wrong at the moment, for `health`.

use crate::error::Refusal;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};

/// Problems by their subject. A problem is removed when it is over.
#[derive(Debug, Default)]
pub(super) struct Problems(BTreeMap<&'static str, String>);

impl Deref for Problems {
    type Target = BTreeMap<&'static str, String>;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Problems {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Problems {
    /// Takes in whether the journal could be written.
    pub(super) fn note_disk<T>(&mut self, result: &Result<T, Refusal>) {
        match result {
            Ok(_) => {
                if self.remove("journal").is_some() {
                    tracing::info!("the journal can be written again");
                }
            }
            Err(e) => {
                if self.insert("journal", e.message.clone()).is_none() {
                    tracing::error!("{e}");
                }
            }
        }
    }
}
