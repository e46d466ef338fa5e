//! The jobs and the speed tables of ElasticFlow's experiments, which travel with the project.
//!
//! `crates/sim/data/elasticflow/README.md` names the origin and the licence of each file.

use super::{Cluster, GpuJob, Kind, Level};
use std::collections::BTreeMap;
use std::io::Read;
use std::sync::Arc;

/// What is wrong with a data file.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("{file}, line {line}: column {column} is missing or not a number; restore the file from the repository")]
    BadField { file: &'static str, line: usize, column: usize },
    #[error("{file}, line {line}: no speed table for {model} with batch size {batch}; restore the file")]
    UnknownKind { file: &'static str, line: usize, model: String, batch: u32 },
    #[error("cannot unpack {file}: {source}")]
    Unpack { file: &'static str, source: std::io::Error },
    #[error("there is no ITP cluster {0}; the clusters are 1 to 10")]
    NoCluster(u32),
}

macro_rules! table {
    ($folder:literal, $model:literal) => {
        ($model, include_str!(concat!("../../data/elasticflow/", $folder, "/", $model, ".csv")))
    };
}

/// Speed tables by model, as measured on one kind of GPU.
const T4: [(&str, &str); 6] = [
    table!("t4", "bert"),
    table!("t4", "cifar10"),
    table!("t4", "deepspeech2"),
    table!("t4", "imagenet"),
    table!("t4", "ncf"),
    table!("t4", "yolov3"),
];

const A100: [(&str, &str); 6] = [
    table!("a100", "bert"),
    table!("a100", "deepspeech2"),
    table!("a100", "gpt2"),
    table!("a100", "inception3"),
    table!("a100", "resnet50"),
    table!("a100", "vgg16"),
];

const FIGURE_8A: &str = include_str!("../../data/elasticflow/fig8a.csv");
const ITP: &[u8] = include_bytes!("../../data/elasticflow/itp.csv.gz");

/// The number of ITP clusters.
pub const ITP_CLUSTERS: u32 = 10;

type Tables = BTreeMap<Kind, Arc<[Level]>>;

/// One line of a file, split at commas.
struct Line<'a> {
    file: &'static str,
    number: usize,
    fields: Vec<&'a str>,
}

impl<'a> Line<'a> {
    /// The lines after the header.
    fn all(file: &'static str, text: &'a str) -> impl Iterator<Item = Line<'a>> {
        let lines = text.lines().enumerate().skip(1);
        lines.map(move |(i, line)| Line { file, number: i + 1, fields: line.split(',').collect() })
    }

    /// The lines after the header of a text that has one line for each column: such a text packs better.
    fn of_columns(file: &'static str, text: &'a str) -> impl Iterator<Item = Line<'a>> {
        let columns: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
        let count = columns.iter().map(Vec::len).min().unwrap_or(0);
        (1..count).map(move |i| Line { file, number: i + 1, fields: columns.iter().map(|column| column[i]).collect() })
    }

    fn number<T: std::str::FromStr>(&self, column: usize) -> Result<T, DataError> {
        let parsed = self.fields.get(column).and_then(|f| f.trim().parse().ok());
        parsed.ok_or(DataError::BadField { file: self.file, line: self.number, column: column + 1 })
    }

    fn kind(&self, model: usize, batch: usize) -> Result<Kind, DataError> {
        let name = self.fields.get(model).copied().unwrap_or_default();
        Ok(Kind { model: name.to_owned(), batch: self.number(batch)? })
    }

    fn levels(&self, tables: &Tables, kind: &Kind) -> Result<Arc<[Level]>, DataError> {
        tables.get(kind).cloned().ok_or_else(|| DataError::UnknownKind {
            file: self.file,
            line: self.number,
            model: kind.model.clone(),
            batch: kind.batch,
        })
    }
}

/// Empty cells and `nan` are counts of GPUs on which the model does not run.
fn tables(files: &[(&'static str, &str)]) -> Result<Tables, DataError> {
    let mut out = Tables::new();
    for &(model, text) in files {
        let header =
            Line { file: model, number: 1, fields: text.lines().next().unwrap_or_default().split(',').collect() };
        for line in Line::all(model, text) {
            let mut levels = vec![];
            for column in 1..header.fields.len() {
                let speed = line.number::<f64>(column).unwrap_or(0.0);
                if speed.is_finite() && speed > 0.0 {
                    levels.push(Level { gpus: header.number(column)?, speed });
                }
            }
            out.insert(Kind { model: model.to_owned(), batch: line.number(0)? }, levels.into());
        }
    }
    Ok(out)
}

/// The jobs of figure 8a and their cluster.
pub fn figure_8a() -> Result<(Vec<GpuJob>, Cluster), DataError> {
    let tables = tables(&T4)?;
    let mut jobs = vec![];
    for line in Line::all("fig8a.csv", FIGURE_8A) {
        let kind = line.kind(3, 5)?;
        jobs.push(GpuJob {
            submitted_s: line.number(1)?,
            deadline_s: line.number(4)?,
            iterations: line.number(2)?,
            requested_gpus: line.number(6)?,
            duration_s: line.number(7)?,
            levels: line.levels(&tables, &kind)?,
            kind,
        });
    }
    jobs.sort_by_key(|j| j.submitted_s);
    Ok((jobs, Cluster { nodes: 16, gpus_per_node: 4 }))
}

/// The jobs of one ITP cluster (1 to 10), and the cluster that ElasticFlow's authors run them on.
pub fn itp(cluster: u32) -> Result<(Vec<GpuJob>, Cluster), DataError> {
    const FILE: &str = "itp.csv.gz";
    let nodes = match cluster {
        1 | 2 | 3 | 5 | 6 => 64,
        4 | 7 | 8 | 9 => 128,
        10 => 32,
        _ => return Err(DataError::NoCluster(cluster)),
    };
    let tables = tables(&A100)?;
    let mut text = String::new();
    let unpacked = flate2::read::GzDecoder::new(ITP).read_to_string(&mut text);
    unpacked.map_err(|source| DataError::Unpack { file: FILE, source })?;
    let mut jobs = vec![];
    let mut submitted_s = 0;
    for line in Line::of_columns(FILE, &text) {
        if line.number::<u32>(0)? != cluster {
            continue;
        }
        submitted_s += line.number::<i64>(1)?;
        let kind = line.kind(3, 4)?;
        let (requested_gpus, duration_s): (u32, i64) = (line.number(5)?, line.number(6)?);
        let levels = line.levels(&tables, &kind)?;
        let requested = levels.iter().find(|l| l.gpus == requested_gpus);
        let speed = requested.ok_or(DataError::BadField { file: FILE, line: line.number, column: 6 })?.speed;
        jobs.push(GpuJob {
            submitted_s,
            deadline_s: submitted_s + line.number::<i64>(2)?,
            iterations: (speed * duration_s as f64).floor(),
            kind,
            requested_gpus,
            duration_s,
            levels,
        });
    }
    Ok((jobs, Cluster { nodes, gpus_per_node: 8 }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_hold_the_published_numbers_of_jobs() {
        let (jobs, cluster) = figure_8a().expect("sound data");
        assert_eq!((jobs.len(), cluster.gpus()), (195, 64));
        assert_eq!(jobs.iter().filter(|j| j.is_feasible_alone(64)).count(), 181);
        let count = |c: u32| itp(c).expect("sound data").0.len();
        assert_eq!((1..=ITP_CLUSTERS).map(count).sum::<usize>(), 69_351);
        assert!(matches!(itp(11), Err(DataError::NoCluster(11))));
    }

    #[test]
    fn a_line_without_a_number_is_named() {
        let text = "header\n1,x\n";
        let line = Line::all("some.csv", text).next().expect("one line");
        let error = line.number::<u32>(1).expect_err("not a number").to_string();
        assert!(error.contains("some.csv, line 2: column 2"), "{error}");
    }
}
