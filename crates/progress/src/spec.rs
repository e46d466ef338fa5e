//! A job's settings for its progress, and the mistakes in them.
//!
//! Everything is optional: without `[metric]` the collector finds the job's progress by itself. The
//! settings must fit together; each mistake is one line that names the field and the remedy.

use crate::pattern::{Pattern, PatternError};
use crate::prometheus;
use crate::ranking::Goal;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Component, Path};

/// A source of progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Source {
    /// The first of the others that reports something, in the order of this list.
    #[default]
    Auto,
    Tensorboard,
    Push,
    Prometheus,
    File,
    Output,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Source::Auto => "auto",
            Source::Tensorboard => "tensorboard",
            Source::Push => "push",
            Source::Prometheus => "prometheus",
            Source::File => "file",
            Source::Output => "output",
        })
    }
}

/// Where a job's progress is found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MetricSpec {
    #[serde(skip_serializing_if = "is_auto")]
    pub source: Source,
    /// The metric that is the job's evaluation function, e.g. `val_loss`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Whether the metric is to rise or to fall. Without a name, only metrics of that kind are chosen:
    /// accuracies and rewards, or losses and errors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub goal: Option<Goal>,
    /// A regular expression with a group named `value`, for output that the grammar does not cover.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// A metrics file, or a folder of TensorBoard's, below the job's folder.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// A Prometheus endpoint on this machine, e.g. `http://localhost:8000/metrics`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

fn is_auto(source: &Source) -> bool {
    *source == Source::Auto
}

/// What is wrong with a [`MetricSpec`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetricSpecError {
    #[error(transparent)]
    Pattern(#[from] PatternError),
    #[error(transparent)]
    Url(#[from] prometheus::UrlError),
    #[error("metric source {from} does not use {field}; leave {field} out, or set source to {instead}")]
    Unused { from: Source, field: &'static str, instead: Source },
    #[error("metric source {from} needs {field}; add it, or set source to auto")]
    Missing { from: Source, field: &'static str },
    #[error(
        "metric path needs a source; set source to file for a metrics file, \
         or to tensorboard for a folder of event files"
    )]
    PathOfWhat,
    #[error("metric path {path:?} may leave the job's folder; give a path below it, without .. in it")]
    PathEscapes { path: String },
    #[error("metric {field} is empty; leave it out, or say what it is")]
    Empty { field: &'static str },
}

impl MetricSpec {
    /// Finds the first mistake.
    pub fn validate(&self) -> Result<(), MetricSpecError> {
        let fields = [("name", &self.name), ("pattern", &self.pattern), ("path", &self.path), ("url", &self.url)];
        for (field, value) in fields {
            if value.as_ref().is_some_and(|v| v.trim().is_empty()) {
                return Err(MetricSpecError::Empty { field });
            }
        }
        self.compiled_pattern()?;
        if let Some(url) = &self.url {
            prometheus::Endpoint::parse(url)?;
        }
        if let Some(path) = &self.path
            && Path::new(path).components().any(|c| c == Component::ParentDir)
        {
            return Err(MetricSpecError::PathEscapes { path: path.clone() });
        }
        let from = self.source;
        let unused = |field, instead| Err(MetricSpecError::Unused { from, field, instead });
        if self.pattern.is_some() && !matches!(from, Source::Auto | Source::Output | Source::File) {
            return unused("pattern", Source::Output);
        }
        if self.path.is_some() && from == Source::Auto {
            return Err(MetricSpecError::PathOfWhat);
        }
        if self.path.is_some() && !matches!(from, Source::File | Source::Tensorboard) {
            return unused("path", Source::File);
        }
        if self.url.is_some() && !matches!(from, Source::Auto | Source::Prometheus) {
            return unused("url", Source::Prometheus);
        }
        match from {
            Source::File if self.path.is_none() => Err(MetricSpecError::Missing { from, field: "path" }),
            Source::Prometheus if self.url.is_none() => Err(MetricSpecError::Missing { from, field: "url" }),
            _ => Ok(()),
        }
    }

    pub(crate) fn compiled_pattern(&self) -> Result<Option<Pattern>, PatternError> {
        let name = self.name.as_deref().unwrap_or("loss");
        self.pattern.as_deref().map(|p| Pattern::new(p, name)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(json: &str) -> MetricSpec {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn mistakes_name_the_field_and_the_remedy() {
        for (json, about) in [
            (r#"{"pattern": "("}"#, "does not compile"),
            (r#"{"name": " "}"#, "name is empty"),
            (r#"{"source": "file"}"#, "needs path"),
            (r#"{"source": "prometheus"}"#, "needs url"),
            (r#"{"source": "push", "path": "x"}"#, "does not use path"),
            (r#"{"source": "output", "url": "http://localhost:1/"}"#, "does not use url"),
            (r#"{"path": "metrics.csv"}"#, "needs a source"),
            (r#"{"source": "file", "path": "../../etc/passwd"}"#, "leave the job's folder"),
            (r#"{"url": "https://localhost/"}"#, "http://"),
            (r#"{"url": "http://169.254.169.254/"}"#, "loopback"),
        ] {
            let message = spec(json).validate().unwrap_err().to_string();
            assert!(message.contains(about) && !message.contains('\n'), "{json}: {message}");
        }
        assert!(serde_json::from_str::<MetricSpec>(r#"{"nmae": "loss"}"#).is_err());
        assert_eq!(spec("{}").validate(), Ok(()));
        assert_eq!(spec(r#"{"goal": "maximize"}"#).goal, Some(Goal::Maximize));
        assert_eq!(serde_json::to_string(&spec("{}")).unwrap(), "{}");
    }
}
