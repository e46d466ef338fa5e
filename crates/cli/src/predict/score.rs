//! How good are the forecasts? Curves of finished runs are cut short, their ends forecast by every form,
//! and the errors told: of one curve, or on average over a folder.

use super::{curve, number, read};
use anyhow::{Context, Result, bail};
use gainshare_core::signal::forms::Form;
use gainshare_core::signal::predict::fit;
use gainshare_figures::Table;
use gainshare_figures::terminal::Out;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The parts of a run that the forecasts see.
const SEEN: [f64; 3] = [0.2, 0.4, 0.6];

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

/// A folder of curves.
#[derive(Debug, Serialize)]
struct Scores {
    curves: usize,
    seen: [f64; 3],
    /// The mean over curves of the relative error of the final value.
    mean_errors: BTreeMap<&'static str, [f64; 3]>,
    /// The part of the curves whose final value lay within the interval; four fifths is right.
    held: [f64; 3],
    files: Vec<Score>,
    /// Files that are no curves, and why.
    left_out: BTreeMap<String, String>,
}

fn score(file: String, points: &[(f64, f64)]) -> Result<Score> {
    let &[_, .., (horizon, final_value)] = points else { bail!("{file} has fewer than two finite values") };
    let seen = SEEN.map(|part| curve(&points[..((part * points.len() as f64).round() as usize).max(1)]));
    let error = |guess: f64| (guess - final_value).abs() / final_value.abs().max(f64::MIN_POSITIVE);
    let errors = Form::ALL.map(|form| {
        (form.name(), [0, 1, 2].map(|i: usize| form.forecast(&seen[i], horizon).map_or(f64::INFINITY, error)))
    });
    let held = [0, 1, 2].map(|i: usize| {
        let e = fit(&seen[i], Some(horizon)).map(|f| f.value_at(horizon));
        e.is_some_and(|e| (e.low..=e.high).contains(&final_value))
    });
    Ok(Score { file, points: points.len(), final_value, seen: SEEN, errors: errors.into_iter().collect(), held })
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
pub(super) fn file(name: &str, points: &[(f64, f64)], out: &Out) -> Result<u8> {
    let score = score(name.to_owned(), points)?;
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

/// Every file of a folder, on average.
pub(super) fn folder(path: &Path, column: Option<&str>, step_column: Option<&str>, out: &Out) -> Result<u8> {
    let name = path.display();
    let listed = std::fs::read_dir(path).with_context(|| format!("cannot read {name}"))?;
    let mut files: Vec<PathBuf> = listed.filter_map(|e| Some(e.ok()?.path())).filter(|p| p.is_file()).collect();
    files.sort();
    let (mut scores, mut left_out) = (vec![], BTreeMap::new());
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match read(&file, column, step_column).and_then(|points| score(name.clone(), &points)) {
            Ok(score) => scores.push(score),
            Err(error) => {
                left_out.insert(name, format!("{error:#}"));
            }
        }
    }
    if scores.is_empty() {
        bail!(
            "{name} holds no file with a curve in it; a CSV with a header, JSON lines or plain numbers are understood"
        );
    }
    let n = scores.len() as f64;
    let mean = |of: &dyn Fn(&Score, usize) -> f64| [0, 1, 2].map(|i| scores.iter().map(|s| of(s, i)).sum::<f64>() / n);
    let all = Scores {
        curves: scores.len(),
        seen: SEEN,
        mean_errors: Form::ALL.iter().map(|f| (f.name(), mean(&|s, i| s.errors[f.name()][i]))).collect(),
        held: mean(&|s, i| f64::from(u8::from(s.held[i]))),
        left_out,
        files: scores,
    };
    if out.is_json() {
        out.json(&all)?;
        return Ok(0);
    }
    let held = all.held.map(|h| format!("{:.0}", 100.0 * h)).join(", ");
    let mut text = format!(
        "{name}: {} curves. Mean error of forecasts of the final value:\n\n{}\nThe interval held it in {held} % of the curves; 80 % is right.\n",
        all.curves,
        table(&all.mean_errors).text()
    );
    for why in all.left_out.values() {
        text += &format!("left out: {why}\n");
    }
    out.text(&text)?;
    Ok(0)
}

#[cfg(test)]
mod tests {

    #[test]
    fn a_curve_that_stays_is_forecast_without_error_and_one_value_is_no_curve() {
        let flat: Vec<(f64, f64)> = (1..=20).map(|i| (f64::from(i), 0.5)).collect();
        let score = super::score("flat".into(), &flat).expect("a curve");
        assert!(score.errors.values().flatten().all(|e| *e < 1e-6), "{score:?}");
        assert_eq!(score.held, [true; 3]);
        assert!(super::score("short".into(), &flat[..1]).is_err());
    }
}
