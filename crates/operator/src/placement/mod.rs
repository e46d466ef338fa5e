//! Where jobs run: one view of the whole cluster, one decision, orders for the jobs.

pub(crate) mod cluster;
