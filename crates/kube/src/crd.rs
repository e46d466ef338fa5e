//! The custom resources.
