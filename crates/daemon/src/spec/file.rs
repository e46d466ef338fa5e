//! Reads job files: TOML, YAML and JSON, one job or many, and manifests of distributed jobs for Kubernetes.

use super::{JobSpec, SpecError, manifest, prepare};
use crate::words;
use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A job file larger than this is not a job file.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// Reads a job file (`.toml`, `.yaml`, `.yml`, `.json`), expands sweeps, makes paths absolute and validates
/// every job.
pub fn load(path: &Path) -> Result<Vec<JobSpec>, SpecError> {
    let name = path.display().to_string();
    let read = |why: std::io::Error| SpecError::Read { path: name.clone(), why: why.to_string() };
    let size = std::fs::metadata(path).map_err(read)?.len();
    if size > MAX_FILE_BYTES {
        return Err(SpecError::Read {
            path: name,
            why: format!("it has {size} bytes, and a job file has {MAX_FILE_BYTES} at most"),
        });
    }
    let text = std::fs::read_to_string(path).map_err(read)?;
    let format = match path.extension().and_then(|e| e.to_str()) {
        Some("yaml" | "yml" | "json") => Format::Yaml,
        _ => Format::Toml,
    };
    let here = std::path::absolute(path).map_err(read)?;
    parse(&text, format, &name, here.parent().unwrap_or(Path::new("/")))
}

/// JSON is YAML.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    Toml,
    Yaml,
}

/// [`load`] for text that is already here; `base` is what relative paths are relative to, `name`
/// how errors call the text.
pub fn parse(text: &str, format: Format, name: &str, base: &Path) -> Result<Vec<JobSpec>, SpecError> {
    let specs = match format {
        Format::Toml => parse_toml(text),
        Format::Yaml => parse_yaml(text),
    };
    let mut specs = specs.map_err(|what| SpecError::Syntax { path: name.to_owned(), what })?;
    if specs.is_empty() {
        return Err(SpecError::Empty { path: name.to_owned() });
    }
    for spec in &mut specs {
        let cwd = spec.cwd.take().map_or_else(|| base.to_path_buf(), |c| base.join(c));
        // `base/.` and `base` are the same directory; tables and logs should not show both.
        spec.cwd = Some(cwd.components().collect());
        for mount in &mut spec.mounts {
            if mount.starts_with("./") || mount.starts_with("../") {
                *mount = base.join(mount.as_str()).components().collect::<PathBuf>().display().to_string();
            }
        }
    }
    prepare(specs).map_err(|e| match e {
        e @ (SpecError::Read { .. } | SpecError::Syntax { .. } | SpecError::Empty { .. }) => e,
        other => SpecError::Syntax { path: name.to_owned(), what: other.to_string() },
    })
}

/// Many jobs in one table.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Jobs {
    job: Vec<JobSpec>,
}

fn parse_toml(text: &str) -> Result<Vec<JobSpec>, String> {
    let line = |e: toml::de::Error| words::of_toml(e, text);
    let table: toml::Table = toml::from_str(text).map_err(line)?;
    if table.is_empty() {
        return Ok(Vec::new());
    }
    if table.contains_key("job") {
        toml::from_str::<Jobs>(text).map(|j| j.job).map_err(line)
    } else {
        toml::from_str::<JobSpec>(text).map(|j| vec![j]).map_err(line)
    }
}

fn parse_yaml(text: &str) -> Result<Vec<JobSpec>, String> {
    let line = |e: serde_saphyr::Error| words::of_yaml(&e, text);
    let documents: Vec<serde_json::Value> = serde_saphyr::from_multiple(text).map_err(line)?;
    match documents.as_slice() {
        [] | [serde_json::Value::Null] => Ok(Vec::new()),
        [serde_json::Value::Array(_)] => serde_saphyr::from_str(text).map_err(line),
        [serde_json::Value::Object(o)] if o.contains_key("job") => {
            serde_saphyr::from_str::<Jobs>(text).map(|j| j.job).map_err(line)
        }
        all if all.iter().any(manifest::is_manifest) => all.iter().map(manifest::read).collect(),
        [_] => serde_saphyr::from_str(text).map(|j| vec![j]).map_err(line),
        _ => serde_saphyr::from_multiple(text).map_err(line),
    }
}
