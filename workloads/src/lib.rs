//! Built-in trainers.
