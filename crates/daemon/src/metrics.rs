//! What Prometheus reads at `/metrics`.
//!
//! Counters and histograms are kept as things happen; gauges about jobs are set when the page is
//! read. Labels are names of jobs and the same words that the API uses for states and categories.

use crate::types::{JobInfo, JobState};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::AtomicU64;

type Labels = Vec<(&'static str, String)>;
type JobGauge = Family<Labels, Gauge<f64, AtomicU64>>;

pub(crate) struct Metrics {
    registry: Registry,
    jobs: Family<Labels, Gauge>,
    share: JobGauge,
    growth: JobGauge,
    category: JobGauge,
    value: JobGauge,
    cpu_cores: JobGauge,
    memory_bytes: JobGauge,
    predicted_end: JobGauge,
    deadline: JobGauge,
    pub(crate) misses_predicted: Counter,
    pub(crate) deadlines_met: Counter,
    pub(crate) deadlines_missed: Counter,
    pub(crate) samples_accepted: Counter,
    pub(crate) samples_refused: Counter,
    pub(crate) samples_dropped: Counter,
    /// Rounds of the driver's loop.
    pub(crate) rounds: Counter,
    pub(crate) plans: Counter,
    pub(crate) plans_rejected: Counter,
    pub(crate) apply_errors: Counter,
    pub(crate) decision_seconds: Histogram,
    pub(crate) journal_seconds: Histogram,
}

impl Metrics {
    pub(crate) fn new() -> Metrics {
        // From a tenth of a millisecond to some three seconds.
        let seconds = || Histogram::new(exponential_buckets(1e-4, 2.0, 15));
        let mut m = Metrics {
            registry: Registry::with_prefix("gainshare"),
            jobs: Family::default(),
            share: JobGauge::default(),
            growth: JobGauge::default(),
            category: JobGauge::default(),
            value: JobGauge::default(),
            cpu_cores: JobGauge::default(),
            memory_bytes: JobGauge::default(),
            predicted_end: JobGauge::default(),
            deadline: JobGauge::default(),
            misses_predicted: Counter::default(),
            deadlines_met: Counter::default(),
            deadlines_missed: Counter::default(),
            samples_accepted: Counter::default(),
            samples_refused: Counter::default(),
            samples_dropped: Counter::default(),
            rounds: Counter::default(),
            plans: Counter::default(),
            plans_rejected: Counter::default(),
            apply_errors: Counter::default(),
            decision_seconds: seconds(),
            journal_seconds: seconds(),
        };
        let r = &mut m.registry;
        r.register("jobs", "Jobs that are remembered, by state", m.jobs.clone());
        r.register("job_cpu_share_ratio", "Part of the CPU that the last decision gave the job", m.share.clone());
        r.register("job_growth", "Growth efficiency of the CPU as last measured", m.growth.clone());
        r.register("job_category", "1 for the category that the job is in", m.category.clone());
        r.register("job_metric_value", "What the job last reported of its own evaluation function", m.value.clone());
        r.register("job_cpu_cores", "Cores that the job uses", m.cpu_cores.clone());
        r.register_with_unit("job_memory", "Working set of the job", Unit::Bytes, m.memory_bytes.clone());
        r.register(
            "job_predicted_end_timestamp_seconds",
            "When the job will be done, as predicted, in Unix seconds",
            m.predicted_end.clone(),
        );
        r.register("job_deadline_timestamp_seconds", "The job's deadline, in Unix seconds", m.deadline.clone());
        r.register(
            "deadline_misses_predicted",
            "Jobs of which a missed deadline was predicted",
            m.misses_predicted.clone(),
        );
        r.register("deadlines_met", "Jobs that ended well by their deadlines", m.deadlines_met.clone());
        r.register("deadlines_missed", "Jobs that did not", m.deadlines_missed.clone());
        r.register("samples_accepted", "Reports of jobs that were used", m.samples_accepted.clone());
        r.register("samples_refused", "Reports that were not finite", m.samples_refused.clone());
        r.register(
            "samples_dropped",
            "Samples not kept because the disk was full for too long",
            m.samples_dropped.clone(),
        );
        r.register("rounds", "Rounds of the daemon's main loop, which rests between them", m.rounds.clone());
        r.register("plans", "Decisions made", m.plans.clone());
        r.register("plans_rejected", "Plans that failed their check and were not applied", m.plans_rejected.clone());
        r.register("apply_errors", "Limits that could not be set", m.apply_errors.clone());
        r.register_with_unit(
            "decision",
            "Time to decide, reading of counters included",
            Unit::Seconds,
            m.decision_seconds.clone(),
        );
        r.register_with_unit(
            "journal_commit",
            "Time to commit to the journal",
            Unit::Seconds,
            m.journal_seconds.clone(),
        );
        m
    }

    pub(crate) fn set_state(&self, state: JobState, count: usize) {
        self.jobs.get_or_create(&vec![("state", state.name().into())]).set(count as i64);
    }

    /// Replaces all gauges about single jobs, so that those of ended jobs disappear.
    pub(crate) fn set_jobs(&self, jobs: impl Iterator<Item = JobInfo>) {
        let families = [&self.share, &self.growth, &self.category, &self.value, &self.cpu_cores, &self.memory_bytes];
        for family in families.into_iter().chain([&self.predicted_end, &self.deadline]) {
            family.clear();
        }
        for job in jobs {
            let labels: Labels = vec![("job", job.name)];
            let set = |family: &JobGauge, value: Option<f64>| {
                if let Some(value) = value {
                    family.get_or_create(&labels).set(value);
                }
            };
            set(&self.share, job.share);
            set(&self.growth, job.growth);
            set(&self.value, job.metric.map(|m| m.value));
            set(&self.cpu_cores, job.cpu_cores);
            set(&self.predicted_end, job.done.map(|d| d.at_s));
            set(&self.deadline, job.deadline.map(|d| d.at_s));
            set(&self.memory_bytes, job.memory_bytes.map(|b| b as f64));
            if let Some(category) = job.category {
                let labels = vec![labels[0].clone(), ("category", category)];
                self.category.get_or_create(&labels).set(1.0);
            }
        }
    }

    pub(crate) fn text(&self) -> String {
        let mut out = String::new();
        // Writing into a string cannot fail.
        let _ = encode(&mut out, &self.registry);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_in_the_reference() {
        let page = include_str!("../../../docs/reference/metrics.md");
        let text = Metrics::new().text();
        let described = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
        let names: Vec<String> = described
            .map(|(name, kind)| if kind == "counter" { format!("{name}_total") } else { name.to_owned() })
            .collect();
        assert!(names.len() >= 10, "{text}");
        for name in names {
            assert!(page.contains(&format!("| `{name}` |")), "docs/reference/metrics.md has no row for {name}");
        }
    }
}
