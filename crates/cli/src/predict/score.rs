//! Measures forecasts on finished runs: each run is cut short, every form forecasts its last value, and the
//! relative errors are reported, for one run or as a mean over a folder.
//!
//! A folder with sub-folders is taken for several sources of runs. Then each source is left out in turn: the
//! weights and intervals of our own forecast are learnt from the other sources, and only the source that was
//! left out is forecast with them. So the errors are those on tasks that the forecast has never met.

use super::{curve, number, read};
use anyhow::{Context, Result, bail};
use gainshare_core::signal::blend::{Blend, Example, PARTS};
use gainshare_core::signal::curve::Curve;
use gainshare_core::signal::forms::Form;
use gainshare_core::signal::predict::Estimate;
use gainshare_core::signal::value::ValueForecaster;
use gainshare_figures::Table;
use gainshare_figures::terminal::Printer;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The parts of a run that the forecasts see.
const SEEN: [f64; 3] = PARTS;

/// The fewest sources of which one can be left out.
const FEWEST_SOURCES: usize = 3;

/// A finished run: its positions and values.
struct Run {
    /// The index of its source.
    source: usize,
    file: String,
    points: Vec<(f64, f64)>,
}

/// One curve: relative errors of its final value, one for each part seen.
#[derive(Debug, Serialize)]
struct Score {
    file: String,
    points: usize,
    final_value: f64,
    seen: [f64; 3],
    errors: BTreeMap<&'static str, [f64; 3]>,
    /// Whether the interval held the final value.
    held: [bool; 3],
}

/// The runs of one source, which were forecast with weights learnt from the other sources.
#[derive(Debug, Serialize)]
struct SourceScore {
    curves: usize,
    mean_errors: BTreeMap<&'static str, [f64; 3]>,
    held: [f64; 3],
}

/// A folder of curves.
#[derive(Debug, Serialize)]
struct Scores {
    curves: usize,
    seen: [f64; 3],
    /// The mean over curves of the relative error of the final value.
    mean_errors: BTreeMap<&'static str, [f64; 3]>,
    /// The part of the curves whose final value lay within the interval; four fifths is right.
    held: [f64; 3],
    /// For each part, our error divided by that of the best other form. Below 1 is better.
    to_best_form: [f64; 3],
    /// Each source that was left out; empty for a folder without sub-folders.
    sources: BTreeMap<String, SourceScore>,
    files: Vec<Score>,
    /// Files that are no curves, and why.
    left_out: BTreeMap<String, String>,
}

/// Scores one run. Our own forecast is made with the table `blend`.
fn score(file: String, points: &[(f64, f64)], blend: &Blend) -> Result<Score> {
    let &[_, .., (horizon, final_value)] = points else { bail!("{file} has fewer than two finite values") };
    let error = |guess: f64| (guess - final_value).abs() / final_value.abs().max(f64::MIN_POSITIVE);
    let ours = SEEN.map(|part| estimate(points, part, blend));
    let errors = Form::ALL.map(|form| {
        let forecast = |i: usize| match form {
            Form::Gainshare => ours[i].map(|e| e.mid),
            other => other.forecast(&start_of(points, SEEN[i]), horizon),
        };
        (form.name(), [0, 1, 2].map(|i| forecast(i).map_or(f64::INFINITY, error)))
    });
    let held = ours.map(|e| e.is_some_and(|e| (e.low..=e.high).contains(&final_value)));
    Ok(Score { file, points: points.len(), final_value, seen: SEEN, errors: errors.into_iter().collect(), held })
}

/// The first `part` of the reports of a run, at least one.
fn start_of(points: &[(f64, f64)], part: f64) -> Curve {
    curve(&points[..((part * points.len() as f64).round() as usize).max(1)])
}

/// Our forecast of the last value of a run of which `part` was seen.
fn estimate(points: &[(f64, f64)], part: f64, blend: &Blend) -> Option<Estimate> {
    let (horizon, _) = *points.last()?;
    let seen = start_of(points, part);
    let forecaster = ValueForecaster::new(&seen, horizon)?;
    // Of a run with two or three reports all may have been seen.
    Some(if seen.at()? < horizon { blend.estimate(&forecaster.clues(horizon)) } else { forecaster.value_at(horizon) })
}

/// Learns the table from the runs of all sources but one.
fn learn_without(source: usize, runs: &[Run]) -> Blend {
    let examples = SEEN.map(|part| -> Vec<Example> {
        let example = |run: &Run| {
            let (horizon, truth) = *run.points.last()?;
            let seen = start_of(&run.points, part);
            let forecaster = ValueForecaster::new(&seen, horizon).filter(|_| seen.at() < Some(horizon))?;
            let clues = forecaster.clues(horizon);
            Some(Example { source: run.source, clues, truth })
        };
        runs.iter().filter(|run| run.source != source).filter_map(example).collect()
    });
    Blend::learn([&examples[0], &examples[1], &examples[2]])
}

fn table(errors: &BTreeMap<&'static str, [f64; 3]>) -> Table {
    let head = ["form", "after 20 %", "after 40 %", "after 60 %"].map(String::from).to_vec();
    let row = |form: &Form| {
        let cells = errors[form.name()].iter().map(|e| format!("{:.2} %", 100.0 * e));
        std::iter::once(form.name().to_owned()).chain(cells).collect()
    };
    Table { head, rows: Form::ALL.iter().map(row).collect() }
}

/// One finished run.
pub(super) fn file(name: &str, points: &[(f64, f64)], out: &Printer) -> Result<u8> {
    let score = score(name.to_owned(), points, &Blend::LEARNT)?;
    if out.is_json() {
        out.json(&score)?;
        return Ok(0);
    }
    let held = score.held.iter().filter(|h| **h).count();
    out.text(&format!(
        "{name}: {} points, the last {}. How wrong forecasts of it were:\n\n{}\nThe interval held it {held} times of 3.\n",
        score.points,
        number(score.final_value),
        table(&score.errors).text()
    ))?;
    Ok(0)
}

/// Every file of a folder, on average; with sub-folders every source, left out in turn.
pub(super) fn folder(path: &Path, column: Option<&str>, step_column: Option<&str>, out: &Printer) -> Result<u8> {
    let name = path.display();
    let names = list(path, Path::is_dir)?;
    if (1..FEWEST_SOURCES).contains(&names.len()) {
        bail!(
            "{name} has {} sub-folder(s); to leave a source out, {FEWEST_SOURCES} or more are needed, one for each source",
            names.len()
        );
    }
    let mut left_out = BTreeMap::new();
    let mut runs = vec![];
    let folders = if names.is_empty() { vec![path.to_owned()] } else { names.clone() };
    for (source, folder) in folders.iter().enumerate() {
        for file in list(folder, Path::is_file)? {
            let shown = file.strip_prefix(path).unwrap_or(&file).display().to_string();
            match read(&file, column, step_column) {
                Ok(points) if points.len() > 1 => runs.push(Run { source, file: shown, points }),
                Ok(_) => {
                    left_out.insert(shown.clone(), format!("{shown} has fewer than two finite values"));
                }
                Err(error) => {
                    left_out.insert(shown, format!("{error:#}"));
                }
            }
        }
    }
    if runs.is_empty() {
        bail!(
            "{name} holds no file with a curve in it; a CSV with a header, JSON lines or plain numbers are understood"
        );
    }
    let (mut files, mut sources) = (vec![], BTreeMap::new());
    for (source, folder) in folders.iter().enumerate() {
        let blend = if names.is_empty() { Blend::LEARNT } else { learn_without(source, &runs) };
        let of_source = runs.iter().filter(|run| run.source == source);
        let scores = of_source.map(|run| score(run.file.clone(), &run.points, &blend)).collect::<Result<Vec<_>>>()?;
        if !names.is_empty() && !scores.is_empty() {
            let shown = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let (mean_errors, held) = means(&scores);
            sources.insert(shown, SourceScore { curves: scores.len(), mean_errors, held });
        }
        files.extend(scores);
    }
    let (mean_errors, held) = means(&files);
    let others = |i: usize| Form::ALL.iter().filter(|f| **f != Form::Gainshare).map(move |f| (f.name(), i));
    let best = [0, 1, 2].map(|i| others(i).map(|(f, i)| mean_errors[f][i]).fold(f64::INFINITY, f64::min));
    let to_best_form =
        [0, 1, 2].map(|i: usize| mean_errors[Form::Gainshare.name()][i] / best[i].max(f64::MIN_POSITIVE));
    let all = Scores { curves: files.len(), seen: SEEN, mean_errors, held, to_best_form, sources, files, left_out };
    if out.is_json() {
        out.json(&all)?;
    } else {
        out.text(&text(&name.to_string(), &all))?;
    }
    Ok(0)
}

/// The entries of a folder of one kind, in order of their names.
fn list(path: &Path, kind: fn(&Path) -> bool) -> Result<Vec<PathBuf>> {
    let listed = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut entries: Vec<PathBuf> = listed.filter_map(|e| Some(e.ok()?.path())).filter(|p| kind(p)).collect();
    entries.sort();
    Ok(entries)
}

/// The mean error of every form over `scores`, and the part of the intervals that held the final value.
fn means(scores: &[Score]) -> (BTreeMap<&'static str, [f64; 3]>, [f64; 3]) {
    let n = scores.len() as f64;
    let mean = |of: &dyn Fn(&Score, usize) -> f64| [0, 1, 2].map(|i| scores.iter().map(|s| of(s, i)).sum::<f64>() / n);
    let errors = Form::ALL.iter().map(|f| (f.name(), mean(&|s, i| s.errors[f.name()][i]))).collect();
    (errors, mean(&|s, i| f64::from(u8::from(s.held[i]))))
}

fn text(name: &str, all: &Scores) -> String {
    let percent = |parts: &[f64; 3], digits: usize| parts.map(|p| format!("{:.digits$}", 100.0 * p)).join(", ");
    let mut text = format!(
        "{name}: {} curves. Mean error of forecasts of the final value:\n\n{}\nThe interval held it in {} % of the curves; 80 % is right.\n",
        all.curves,
        table(&all.mean_errors).text(),
        percent(&all.held, 0)
    );
    if !all.sources.is_empty() {
        text += "\nEach source was left out when the weights of `gainshare` were learnt:\n";
    }
    for (source, s) in &all.sources {
        let ours = percent(&s.mean_errors[Form::Gainshare.name()], 1);
        text += &format!("  {source}: {} curves, error {ours} %, held {} %\n", s.curves, percent(&s.held, 0));
    }
    for why in all.left_out.values() {
        text += &format!("left out: {why}\n");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_that_stays_is_forecast_without_error_and_one_value_is_no_curve() {
        let flat: Vec<(f64, f64)> = (1..=20).map(|i| (f64::from(i), 0.5)).collect();
        let score = super::score("flat".into(), &flat, &Blend::LEARNT).expect("a curve");
        assert!(score.errors.values().flatten().all(|e| *e < 1e-6), "{score:?}");
        assert_eq!(score.held, [true; 3]);
        assert!(super::score("short".into(), &flat[..1], &Blend::LEARNT).is_err());
    }

    /// What is learnt about a source depends on the others only.
    #[test]
    fn a_source_is_forecast_without_its_own_runs() {
        let run = |source: usize, scale: f64| Run {
            source,
            file: String::new(),
            points: (1..=40).map(|i| (f64::from(i), 1.0 + 2.0 * (-f64::from(i) / scale).exp())).collect(),
        };
        let mut runs: Vec<Run> = (0..12).map(|i| run(i % 3, 4.0 + i as f64)).collect();
        let before = learn_without(0, &runs);
        runs.iter_mut().filter(|r| r.source == 0).for_each(|r| r.points.iter_mut().for_each(|p| p.1 = 9.0 - p.1));
        assert_eq!(learn_without(0, &runs), before);
        assert_ne!(learn_without(1, &runs), before);
    }
}
