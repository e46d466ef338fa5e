//! The deadline experiments of ElasticFlow's paper: published results beside ours.

use super::replay::{JobKnowledge, Outcome, replay};
use super::{Cluster, GpuJob, baseline, data, elasticflow};
use gainshare_figures::Table;
use serde::Serialize;
use std::collections::BTreeMap;

/// Name and title of each experiment.
pub const EXPERIMENTS: [(&str, &str); 2] = [
    ("elasticflow-8a", "ElasticFlow, figure 8a: 195 jobs with deadlines on 16 nodes of 4 GPUs"),
    ("elasticflow-itp", "ElasticFlow, figure 8b: ten ITP clusters with deadlines"),
];

/// A scheduler of the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheduler {
    Edf,
    Tiresias,
    ElasticFlow,
    /// Our rule; speed tables and lengths are given.
    Qos,
    /// Our rule; speeds and lengths are learned.
    QosLearned,
}

impl Scheduler {
    pub const ALL: [Scheduler; 5] =
        [Scheduler::Edf, Scheduler::Tiresias, Scheduler::ElasticFlow, Scheduler::Qos, Scheduler::QosLearned];

    pub fn name(self) -> &'static str {
        match self {
            Scheduler::Edf => "edf",
            Scheduler::Tiresias => "tiresias",
            Scheduler::ElasticFlow => "elasticflow",
            Scheduler::Qos => "qos",
            Scheduler::QosLearned => "qos-learned",
        }
    }

    pub fn run(self, jobs: &[GpuJob], cluster: Cluster) -> Outcome {
        match self {
            Scheduler::Edf => baseline::edf(jobs, cluster),
            Scheduler::Tiresias => baseline::tiresias(jobs, cluster),
            Scheduler::ElasticFlow => elasticflow::elasticflow(jobs, cluster),
            Scheduler::Qos => replay(jobs, cluster, JobKnowledge::Tables),
            Scheduler::QosLearned => replay(jobs, cluster, JobKnowledge::Nothing),
        }
    }
}

/// One trace under several schedulers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster: Option<u32>,
    pub jobs: usize,
    /// Jobs that would make their deadline with the whole cluster to themselves.
    pub feasible: usize,
    pub gpus: u32,
    /// Published ratios of deadlines met.
    pub published: BTreeMap<&'static str, f64>,
    pub policies: BTreeMap<&'static str, Outcome>,
}

/// The comparison on figure 8a's trace.
pub fn figure_8a() -> Result<Comparison, data::DataError> {
    let (jobs, cluster) = data::figure_8a()?;
    let published = BTreeMap::from([("edf", 0.118), ("tiresias", 0.287), ("elasticflow", 0.728)]);
    Ok(compare(None, &jobs, cluster, published, &Scheduler::ALL))
}

/// The comparison on one ITP cluster. ElasticFlow's result is the published one: its growth tries the next
/// level of every job for every level that it gives, which is slow on traces of this size.
pub fn itp(cluster: u32) -> Result<Comparison, data::DataError> {
    const ELASTICFLOW: [f64; 10] = [0.788, 0.822, 0.455, 0.631, 0.832, 0.607, 0.665, 0.896, 0.938, 0.981];
    const EDF: [f64; 10] = [0.182, 0.228, 0.095, 0.007, 0.375, 0.105, 0.046, 0.252, 0.800, 0.769];
    let (jobs, size) = data::itp(cluster)?;
    let of = |ratios: [f64; 10]| ratios[cluster as usize - 1];
    let published = BTreeMap::from([("edf", of(EDF)), ("elasticflow", of(ELASTICFLOW))]);
    let schedulers = [Scheduler::Edf, Scheduler::Tiresias, Scheduler::Qos, Scheduler::QosLearned];
    Ok(compare(Some(cluster), &jobs, size, published, &schedulers))
}

fn compare(
    number: Option<u32>,
    jobs: &[GpuJob],
    cluster: Cluster,
    published: BTreeMap<&'static str, f64>,
    schedulers: &[Scheduler],
) -> Comparison {
    Comparison {
        cluster: number,
        jobs: jobs.len(),
        feasible: jobs.iter().filter(|j| j.is_feasible_alone(cluster.gpus())).count(),
        gpus: cluster.gpus(),
        published,
        policies: schedulers.iter().map(|s| (s.name(), s.run(jobs, cluster))).collect(),
    }
}

impl Comparison {
    /// The comparison for people, with its heading.
    pub fn table(&self) -> (String, Table) {
        let head = ["policy", "published", "met", "of all", "admitted", "refused", "admitted, missed", "by prediction"];
        let row = |name: &'static str| {
            let mut cells = vec![name.to_owned()];
            cells.push(self.published.get(name).map_or("–".into(), |p| format!("{p:.3}")));
            match self.policies.get(name) {
                Some(o) => {
                    cells.extend([o.met.to_string(), format!("{:.3}", o.met_ratio)]);
                    let counts = [o.admitted, o.refused, o.admitted_missed, o.missed_by_prediction];
                    cells.extend(counts.map(|n| n.to_string()));
                }
                None => cells.extend(["–"; 6].map(String::from)),
            }
            cells
        };
        let shown = |s: &Scheduler| self.policies.contains_key(s.name()) || self.published.contains_key(s.name());
        let rows = Scheduler::ALL.iter().filter(|s| shown(s)).map(|s| row(s.name())).collect();
        let cluster = self.cluster.map_or(String::new(), |c| format!("ITP cluster {c}: "));
        let heading = format!(
            "{cluster}{} jobs on {} GPUs; {} of them could make their deadline alone",
            self.jobs, self.gpus, self.feasible
        );
        (heading, Table { head: head.map(String::from).to_vec(), rows })
    }
}
