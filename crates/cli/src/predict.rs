//! `gainshare predict`: where is this curve going? Reads a curve from a file, fits it as the daemon does,
//! and shows forecast, interval, what other forms say, and a picture.

mod score;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueHint};
use gainshare_core::signal::curve::Curve;
use gainshare_core::signal::forms::Form;
use gainshare_core::signal::predict::{Estimate, FLAT, TargetPrediction};
use gainshare_core::signal::value::ValueForecaster;
use gainshare_figures::file::{self, Drawing};
use gainshare_figures::terminal::Printer;
use gainshare_figures::{LineChart, Series, Shape};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

#[derive(Debug, Args)]
pub struct PredictArgs {
    /// CSV with a header, one JSON object per line, or plain numbers; `-` is the standard input. With
    /// --back-test also a folder of them, or a folder with one sub-folder for each source of runs
    #[arg(value_hint = ValueHint::FilePath)]
    file: PathBuf,

    /// The step at which the run ends; without it, twice as far as the file goes
    #[arg(long)]
    horizon: Option<f64>,

    /// Predict when this value is reached
    #[arg(long, allow_negative_numbers = true)]
    target: Option<f64>,

    /// The column with the value; found by its name if not given
    #[arg(long, value_name = "NAME")]
    column: Option<String>,

    /// The column with the step; found by its name if not given, else lines are counted
    #[arg(long, value_name = "NAME")]
    step_column: Option<String>,

    /// Treat the file as a finished run (a folder as many): forecast its end from the first 20, 40 and 60 %, and
    /// print the errors of our own and of other forms. Each sub-folder is left out in turn: its runs are forecast
    /// with weights learnt from the other sub-folders
    #[arg(long, visible_alias = "score", conflicts_with_all = ["horizon", "target", "figure"])]
    back_test: bool,

    /// Write the picture (.svg)
    #[arg(long, value_hint = ValueHint::FilePath)]
    figure: Option<PathBuf>,
}

/// The answer, as programs get it.
#[derive(Debug, Serialize)]
struct Prediction {
    points: usize,
    at: f64,
    level: f64,
    noise: f64,
    horizon: f64,
    forecast: Estimate,
    /// Where the curve leads, and when it is flat; `None` if it shows no bend from which that follows.
    limit: Option<Estimate>,
    flat_at: Option<Estimate>,
    /// The change still to come until the horizon, in units of the change seen.
    gain_left: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<TargetPrediction>,
    /// What each form says about the value at the horizon.
    forms: BTreeMap<&'static str, f64>,
}

pub fn predict(args: &PredictArgs, out: &Printer) -> Result<u8> {
    file::check(args.figure.as_deref(), false)?;
    let name = args.file.display().to_string();
    if args.file.is_dir() {
        if !args.back_test {
            bail!("{name} is a folder; --back-test judges forecasts on all curves in it, one curve is a file");
        }
        return score::folder(&args.file, args.column.as_deref(), args.step_column.as_deref(), out);
    }
    let points = read(&args.file, args.column.as_deref(), args.step_column.as_deref())?;
    if args.back_test {
        return score::file(&name, &points, out);
    }
    let curve = curve(&points);
    let (Some(at), Some(_)) = (curve.at(), points.first()) else { bail!("{name} has no finite value in it") };
    if let Some(target) = args.target.filter(|target| !target.is_finite()) {
        bail!("the target must be a finite number, not {target}");
    }
    let horizon = args.horizon.unwrap_or(2.0 * at);
    if !horizon.is_finite() || horizon < at {
        bail!("the horizon must lie at or after the last step, {at}, not at {horizon}");
    }
    let forecaster =
        ValueForecaster::new(&curve, horizon).with_context(|| format!("{name} has no finite value in it"))?;
    let (fit, ending) = (forecaster.fit(), Ending::find(&forecaster, at, horizon));
    let prediction = Prediction {
        points: points.len(),
        at,
        level: fit.level(),
        noise: fit.noise(),
        horizon,
        forecast: ending.forecast,
        limit: ending.limit,
        flat_at: ending.flat_at,
        gain_left: ending.gain_left,
        target: args.target.map(|t| fit.reaches(t)),
        forms: Form::ALL.iter().filter_map(|f| Some((f.name(), f.forecast(&curve, horizon)?))).collect(),
    };
    if let Some(path) = &args.figure {
        let svg = chart(&name, &points, &forecaster, at, horizon).svg();
        file::write(path, &Drawing { svg: Some(&svg), page: None })?;
    }
    if out.is_json() {
        out.json(&prediction)?;
    } else {
        out.text(&text(&name, &points, &forecaster, &prediction))?;
    }
    Ok(0)
}

/// How the curve ends. The value at the horizon rests on more than the fitted family does, and the family knows no
/// bounds of the value; here both are brought to one answer.
struct Ending {
    forecast: Estimate,
    limit: Option<Estimate>,
    flat_at: Option<Estimate>,
    gain_left: f64,
}

/// Places between now and the horizon at which the forecast is tried.
const PLACES: u32 = 200;

impl Ending {
    fn find(forecaster: &ValueForecaster, at: f64, horizon: f64) -> Ending {
        let fit = forecaster.fit();
        let (forecast, level, start) = (forecaster.value_at(horizon), fit.level(), fit.start());
        let seen = (level - start).abs();
        let gain_left = if seen > f64::MIN_POSITIVE { ((forecast.mid - level).abs() / seen).min(1e6) } else { 0.0 };
        // The end comes after the horizon, so it lies no nearer than the value there.
        let family = fit.limit();
        let is_beyond = (family.mid - forecast.mid) * (forecast.mid - level) >= 0.0;
        let limit = if is_beyond { family } else { join(forecast, family) };
        let is_flat_at = |x: f64| (limit.mid - forecaster.value_at(x).mid).abs() <= FLAT * (limit.mid - start).abs();
        let family_flat = fit.flat_at();
        let flat_at = if is_flat_at(horizon) {
            let mut places = (0..=PLACES).map(|i| at + (horizon - at) * f64::from(i) / f64::from(PLACES));
            let mid = places.find(|x| is_flat_at(*x)).unwrap_or(horizon);
            Estimate { mid, low: family_flat.low.clamp(at, mid), high: family_flat.high.clamp(mid, horizon) }
        } else if fit.is_straight() {
            return Ending { forecast, limit: None, flat_at: None, gain_left };
        } else {
            let mid = family_flat.mid.max(horizon);
            Estimate { mid, low: family_flat.low.clamp(at, mid), high: family_flat.high.max(mid) }
        };
        Ending { forecast, limit: Some(limit), flat_at: Some(flat_at), gain_left }
    }
}

/// The estimate `a` with an interval that also holds that of `b`.
fn join(a: Estimate, b: Estimate) -> Estimate {
    Estimate { mid: a.mid, low: a.low.min(b.low), high: a.high.max(b.high) }
}

fn curve(points: &[(f64, f64)]) -> Curve {
    let mut curve = Curve::default();
    for (x, y) in points {
        curve.push(*x, *y);
    }
    curve
}

fn text(name: &str, points: &[(f64, f64)], forecaster: &ValueForecaster, p: &Prediction) -> String {
    let range = |e: &Estimate| format!("{} ({} to {})", number(e.mid), number(e.low), number(e.high));
    let mut out = format!(
        "{name}: {} points up to step {}, now at {}\n\n{}\n",
        p.points,
        number(p.at),
        number(p.level),
        picture(points, forecaster, p)
    );
    let mut line = |what: &str, said: String| out += &format!("{what:<24}{said}\n");
    line(&format!("at step {}", number(p.horizon)), range(&p.forecast));
    const STRAIGHT: &str = "not known: so far the curve is a straight line";
    line("in the end", p.limit.as_ref().map_or(STRAIGHT.to_owned(), range));
    let flat = |e: &Estimate| if e.mid <= p.at { "now on".to_owned() } else { range(e) };
    line("flat from step", p.flat_at.as_ref().map_or(STRAIGHT.to_owned(), flat));
    line("still to come", format!("{:.0} % of what was gained so far", 100.0 * p.gain_left));
    if let Some(jump) = forecaster.fit().jump() {
        line("sudden change", format!("of {} at step {}", number(jump.height), number(jump.x)));
    }
    if let Some(reach) = &p.target {
        let when = reach.at.as_ref().map_or(String::new(), |e| format!(", at step {}", range(e)));
        line("target met", format!("with a chance of {:.0} %{when}", 100.0 * reach.chance));
    }
    out += "\nOther forms would say:\n";
    for (form, value) in p.forms.iter().filter(|(form, _)| **form != Form::Gainshare.name()) {
        out += &format!("  {form:<22}{}\n", number(*value));
    }
    out
}

/// Four significant digits: more would claim to know more.
fn number(x: f64) -> String {
    match x.abs() {
        a if a == 0.0 || !a.is_finite() => format!("{x}"),
        a if !(1e-3..1e6).contains(&a) => format!("{x:.3e}"),
        a => format!("{x:.*}", (3 - a.log10().floor() as i32).max(0) as usize),
    }
}

const COLUMNS: usize = 72;
const ROWS: usize = 14;

/// The curve (`·`), the fit (`+`) and the forecast with its interval (`*`, `:`) in characters.
fn picture(points: &[(f64, f64)], forecaster: &ValueForecaster, p: &Prediction) -> String {
    let first = points[0].0.min(p.at);
    let x_at = |column: usize| first + (p.horizon - first) * column as f64 / (COLUMNS - 1) as f64;
    let ahead: Vec<Option<Estimate>> =
        (0..COLUMNS).map(|c| Some(x_at(c)).filter(|x| *x > p.at).map(|x| forecaster.value_at(x))).collect();
    let ys = points.iter().map(|q| q.1).chain(ahead.iter().flatten().flat_map(|e| [e.low, e.high]));
    let (low, high) = ys.filter(|y| y.is_finite()).fold((f64::MAX, f64::MIN), |(l, h), y| (l.min(y), h.max(y)));
    let span = if high > low { high - low } else { 1.0 };
    let row = |y: f64| ((high - y) / span * (ROWS - 1) as f64).round().clamp(0.0, (ROWS - 1) as f64) as usize;
    let column = |x: f64| {
        let part = (x - first) / (p.horizon - first).max(f64::MIN_POSITIVE);
        (part * (COLUMNS - 1) as f64).round().clamp(0.0, (COLUMNS - 1) as f64) as usize
    };
    let mut grid = vec![vec![' '; COLUMNS]; ROWS];
    for (c, e) in ahead.iter().enumerate().filter_map(|(c, e)| Some((c, e.as_ref()?))) {
        (row(e.high)..=row(e.low)).for_each(|r| grid[r][c] = ':');
        grid[row(e.mid)][c] = '*';
    }
    points.iter().for_each(|q| grid[row(q.1)][column(q.0)] = '·');
    for (c, x) in (0..COLUMNS).map(|c| (c, x_at(c))).filter(|(_, x)| *x <= p.at) {
        grid[row(forecaster.fit().at(x))][c] = '+';
    }
    let mut out = String::new();
    for (r, line) in grid.iter().enumerate() {
        let label = if r == 0 {
            number(high)
        } else if r == ROWS - 1 {
            number(low)
        } else {
            String::new()
        };
        out += &format!("{label:>10} |{}\n", line.iter().collect::<String>().trim_end());
    }
    out += &format!("{:>10} +{}\n", "", "-".repeat(COLUMNS));
    let (left, right) = (number(first), number(p.horizon));
    out + &format!("{:>10}  {left}{right:>width$}\n", "", width = COLUMNS.saturating_sub(left.len()))
}

fn chart(name: &str, points: &[(f64, f64)], forecaster: &ValueForecaster, at: f64, horizon: f64) -> LineChart {
    let steps = |from: f64, to: f64| (0..=120).map(move |i| from + (to - from) * f64::from(i) / 120.0);
    let first = points.first().map_or(0.0, |p| p.0);
    let ahead = |pick: fn(&Estimate) -> f64| steps(at, horizon).map(|x| (x, pick(&forecaster.value_at(x)))).collect();
    LineChart {
        title: format!("{name}: what is to come"),
        x_label: "step".into(),
        y_label: "value".into(),
        shape: Shape::Line,
        y_from_zero: false,
        marks: vec![(at, "now".into())],
        series: vec![
            Series::new("reported", points.to_vec()),
            Series::new("fit", steps(first, at).map(|x| (x, forecaster.fit().at(x))).collect()),
            Series::new("forecast", ahead(|e| e.mid)),
            Series::new("one in ten below", ahead(|e| e.low)),
            Series::new("one in ten above", ahead(|e| e.high)),
        ],
    }
}

/// Names by which the value is known, the best first, and those of the step.
const VALUES: [&str; 10] =
    ["metric", "val_loss", "eval_loss", "loss", "train_loss", "val_accuracy", "accuracy", "acc", "value", "objective"];
const STEPS: [&str; 7] = ["epoch", "step", "global_step", "iteration", "iter", "batch", "progress"];

/// Reads (step, value) from a file. Lines whose value is no finite number are left out.
fn read(path: &Path, column: Option<&str>, step_column: Option<&str>) -> Result<Vec<(f64, f64)>> {
    let name = path.display().to_string();
    let mut bytes = vec![];
    if path == Path::new("-") {
        std::io::stdin().read_to_end(&mut bytes).context("cannot read the standard input")?;
    } else {
        bytes = std::fs::read(path).with_context(|| format!("cannot read {name}"))?;
    }
    let text = String::from_utf8_lossy(&bytes);
    let rows = rows(&text);
    let names: Vec<&str> = rows.iter().flat_map(|r| r.keys().map(String::as_str)).collect();
    let known = |wanted: &[&str]| wanted.iter().find(|w| names.contains(w)).map(|w| (*w).to_owned());
    let pick = |asked: Option<&str>| match asked {
        Some(asked) if !names.contains(&asked) => {
            let mut all = names.clone();
            all.sort_unstable();
            all.dedup();
            bail!("{name} has no column `{asked}`; it has: {}", all.join(", "))
        }
        asked => Ok(asked.map(str::to_owned)),
    };
    let step = pick(step_column)?.or_else(|| known(&STEPS));
    let like = || names.iter().find(|n| n.contains("loss") || n.contains("acc")).map(|n| (*n).to_owned());
    let other = || names.iter().find(|n| Some(**n) != step.as_deref()).map(|n| (*n).to_owned());
    let Some(value) = pick(column)?.or_else(|| known(&VALUES)).or_else(like).or_else(other) else {
        bail!("{name} has no numbers in it; a CSV with a header, JSON lines or plain numbers are understood");
    };
    let mut points: Vec<(f64, f64)> = vec![];
    for row in &rows {
        let Some(y) = row.get(&value).copied().filter(|y| y.is_finite()) else { continue };
        let x = step.as_ref().and_then(|s| row.get(s)).copied().unwrap_or(points.len() as f64 + 1.0);
        points.push((x, y));
    }
    // Several values of one step, or a counter that starts over: then the place in the file is the better clock.
    if points.windows(2).any(|w| w[1].0 <= w[0].0) || points.first().is_some_and(|p| p.0 < 0.0) {
        points.iter_mut().enumerate().for_each(|(i, p)| p.0 = (i + 1) as f64);
    }
    if points.is_empty() {
        bail!("{name} has no finite value in column `{value}`");
    }
    Ok(points)
}

/// Every line as numbers by column name. Plain numbers are one column, `value`.
fn rows(text: &str) -> Vec<BTreeMap<String, f64>> {
    let lines = || text.lines().map(str::trim).filter(|l| !l.is_empty());
    let Some(first) = lines().next() else { return vec![] };
    if first.starts_with('{') {
        let object = |line: &str| -> Option<BTreeMap<String, f64>> {
            let object: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).ok()?;
            Some(object.into_iter().filter_map(|(k, v)| Some((k, v.as_f64()?))).collect())
        };
        return lines().filter_map(object).collect();
    }
    let cells =
        |line: &str| -> Vec<String> { line.split(',').map(|c| c.trim().trim_matches('"').to_owned()).collect() };
    let head = cells(first);
    let plain = head.iter().all(|c| c.parse::<f64>().is_ok());
    if plain {
        let last = |line: &str| Some(BTreeMap::from([("value".to_owned(), cells(line).last()?.parse().ok()?)]));
        return lines().filter_map(last).collect();
    }
    let row = |line: &str| -> BTreeMap<String, f64> {
        head.iter().cloned().zip(cells(line)).filter_map(|(k, v)| Some((k, v.parse().ok()?))).collect()
    };
    lines().skip(1).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn csv_json_lines_and_plain_numbers_are_understood() {
        let csv = rows("epoch,loss\n1,3.0\n2,\"2.5\"\n");
        assert_eq!(csv[1]["loss"], 2.5);
        let json = rows("{\"step\": 5, \"loss\": 1.5, \"note\": \"x\"}\nnot json\n{\"step\": 6, \"loss\": 1.4}\n");
        assert_eq!((json.len(), json[1]["step"]), (2, 6.0));
        assert_eq!(rows("3\n2.5\noops\n2\n").len(), 3);
        assert!(rows("").is_empty());
    }

    fn ending(values: impl Iterator<Item = f64>) -> (Ending, f64) {
        let points: Vec<(f64, f64)> = (1_u32..).map(f64::from).zip(values).collect();
        let at = points.last().expect("there are points").0;
        let forecaster = ValueForecaster::new(&curve(&points), 2.0 * at).expect("they can be fitted");
        (Ending::find(&forecaster, at, 2.0 * at), at)
    }

    /// Each line agrees with the others.
    fn check(name: &str, values: impl Iterator<Item = f64> + Clone) -> Ending {
        let (ending, at) = ending(values.clone());
        let (first, last) = (values.clone().next().expect("a value"), values.last().expect("a value"));
        let (limit, flat_at) = match (ending.limit, ending.flat_at) {
            (Some(limit), Some(flat_at)) => (limit, flat_at),
            (limit, flat_at) => {
                assert_eq!((limit, flat_at), (None, None), "{name}: either follows from the other");
                return ending;
            }
        };
        let (horizon, forecast) = (2.0 * at, ending.forecast);
        let (whole, left) = ((limit.mid - first).abs(), (limit.mid - forecast.mid).abs());
        let direction = (last - first).signum();
        assert!(direction * (limit.mid - forecast.mid) >= -1e-9, "{name}: it turns back: {forecast:?}, {limit:?}");
        assert_eq!(flat_at.mid <= horizon, left <= 1.2 * FLAT * whole, "{name}: {forecast:?}, {limit:?}, {flat_at:?}");
        for e in [limit, flat_at, forecast] {
            assert!(e.low <= e.mid && e.mid <= e.high, "{name}: {e:?}");
        }
        if flat_at.mid <= at {
            assert!(ending.gain_left <= 2.0 * FLAT, "{name}: flat now, and {} is still to come", ending.gain_left);
        }
        ending
    }

    #[test]
    fn the_lines_of_an_answer_agree() {
        let line = |first: f64, step: f64, count: u32| (0..count).map(move |i| first + step * f64::from(i));
        let rising = check("a line", line(1.0, 1.0, 20));
        assert_eq!(rising.limit, None, "nothing says where it ends");
        assert_eq!(check("a slow line", line(3.0, -0.01, 40)).limit, None);
        // The bounds of a value end it.
        let to_zero = check("a line to zero", line(20.0, -1.0, 20));
        let flat_at = to_zero.flat_at.expect("it cannot fall below zero");
        assert!((20.0..=40.0).contains(&flat_at.mid), "{flat_at:?}");
        let accuracy = check("a line to all", line(0.05, 0.05, 20));
        assert!(accuracy.flat_at.expect("no more than all").mid <= 40.0 && accuracy.gain_left < 0.05);
        let falls = |scale: f64, count: u32| (0..count).map(move |i| 0.5 + 2.0 * (-f64::from(i) / scale).exp());
        for (scale, count) in [(5.0, 40), (10.0, 30), (30.0, 30), (60.0, 30)] {
            check("an exponential", falls(scale, count));
        }
        check("an inverse", (0..30).map(|i| 0.5 + 2.0 / (1.0 + f64::from(i) / 5.0)));
        check("an accuracy", (0..40).map(|i| 0.9 - 0.6 * (-f64::from(i) / 8.0).exp()));
        assert_eq!(check("no change", line(2.0, 0.0, 10)).gain_left, 0.0);
    }

    #[test]
    fn numbers_have_four_digits() {
        assert_eq!([number(0.94331), number(1234.5), number(2.0e9), number(0.0)], ["0.9433", "1234", "2.000e9", "0"]);
    }
}
