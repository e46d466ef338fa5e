//! Line, step, stacked-area and grouped-bar charts.

use super::axis::{Axis, label};
use super::{colour, escape, legend, legend_height, open};
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 34.0;
const PLOT: f64 = 280.0;

/// How the points of a series are joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// Straight from point to point.
    Line,
    /// A value holds until the next point.
    Step,
    /// As `Step`, filled, each series on top of the one before: shares of one node.
    Stacked,
}

/// One named curve; points in order of x. Points that are not finite are left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Series {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

impl Series {
    pub fn new(name: impl Into<String>, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), points }
    }

    pub(super) fn finite(&self) -> impl Iterator<Item = (f64, f64)> {
        self.points.iter().copied().filter(|(x, y)| x.is_finite() && y.is_finite())
    }
}

/// Curves over one x axis.
#[derive(Debug, Clone, PartialEq)]
pub struct LineChart {
    pub title: String,
    pub x_label: String,
    pub y_label: String,
    pub shape: Shape,
    pub y_from_zero: bool,
    /// Vertical lines with a word: an arrival, a migration.
    pub marks: Vec<(f64, String)>,
    pub series: Vec<Series>,
}

impl LineChart {
    pub fn svg(&self) -> String {
        let stacked = (self.shape == Shape::Stacked).then(|| stack(&self.series));
        let series = stacked.as_ref().unwrap_or(&self.series);
        let names: Vec<&str> = self.series.iter().map(|s| s.name.as_str()).collect();
        let inner = WIDTH - LEFT - RIGHT;
        let height = TOP + PLOT + 48.0 + legend_height(&names, inner);
        let mut out = open(WIDTH, height, &self.title);
        let xs = series.iter().flat_map(|s| s.finite().map(|p| p.0)).chain(self.marks.iter().map(|m| m.0));
        let x = Axis::over(xs, true, LEFT, WIDTH - RIGHT);
        let ys = series.iter().flat_map(|s| s.finite().map(|p| p.1));
        let y = Axis::over(ys, self.y_from_zero || self.shape == Shape::Stacked, TOP + PLOT, TOP);
        grid_y(&mut out, &y, &self.y_label);
        grid_x(&mut out, &x, &self.x_label);
        match self.shape {
            // The topmost sum first, so that each lower one paints over it.
            Shape::Stacked => series.iter().enumerate().rev().for_each(|(i, s)| area(&mut out, s, i, &x, &y)),
            _ => series.iter().enumerate().for_each(|(i, s)| line(&mut out, s, i, self.shape, &x, &y)),
        }
        for (i, (at, word)) in self.marks.iter().enumerate() {
            let px = x.at(*at);
            // Marks may be close to each other: their words take turns in three lines.
            let line = TOP + 10.0 + 12.0 * (i % 3) as f64;
            let _ = write!(
                out,
                "<line class=\"frame\" x1=\"{px:.1}\" x2=\"{px:.1}\" y1=\"{TOP}\" y2=\"{:.1}\" stroke=\"#5c666f\" stroke-dasharray=\"3 3\"/>\
                 <text class=\"faint\" x=\"{:.1}\" y=\"{:.1}\" font-size=\"10\" fill=\"#5c666f\">{}</text>",
                TOP + PLOT,
                px + 3.0,
                line,
                escape(word)
            );
        }
        legend(&mut out, &names, LEFT, TOP + PLOT + 56.0, inner);
        out + "</svg>"
    }
}

/// Replaces each series by the sum of itself and those before it, at every x where any of them changes.
pub(super) fn stack(series: &[Series]) -> Vec<Series> {
    let mut xs: Vec<f64> = series.iter().flat_map(|s| s.finite().map(|p| p.0)).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let mut sum = vec![0.0; xs.len()];
    let levels = series.iter().map(|s| {
        let mut points = s.finite().peekable();
        let mut value = 0.0;
        for (x, total) in xs.iter().zip(sum.iter_mut()) {
            while let Some((_, y)) = points.next_if(|p| p.0 <= *x) {
                value = y;
            }
            *total += value;
        }
        Series::new(s.name.clone(), xs.iter().copied().zip(sum.iter().copied()).collect())
    });
    levels.collect()
}

fn path(s: &Series, shape: Shape, x: &Axis, y: &Axis) -> String {
    let mut d = String::new();
    for (i, (px, py)) in s.finite().map(|(a, b)| (x.at(a), y.at(b))).enumerate() {
        let _ = match (i, shape) {
            (0, _) => write!(d, "M{px:.1} {py:.1}"),
            (_, Shape::Line) => write!(d, "L{px:.1} {py:.1}"),
            (_, Shape::Step | Shape::Stacked) => write!(d, "H{px:.1}V{py:.1}"),
        };
    }
    d
}

fn line(out: &mut String, s: &Series, i: usize, shape: Shape, x: &Axis, y: &Axis) {
    let d = path(s, shape, x, y);
    let _ = write!(
        out,
        "<path d=\"{d}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.8\" stroke-linejoin=\"round\"/>",
        colour(i)
    );
}

pub(super) fn area(out: &mut String, s: &Series, i: usize, x: &Axis, y: &Axis) {
    let Some((first, _)) = s.finite().next() else { return };
    let d = path(s, Shape::Stacked, x, y);
    let _ = write!(out, "<path d=\"{d}V{:.1}H{:.1}Z\" fill=\"{}\"/>", y.at(0.0), x.at(first), colour(i));
}

fn grid_y(out: &mut String, y: &Axis, name: &str) {
    for tick in y.ticks() {
        let py = y.at(tick);
        let _ = write!(
            out,
            "<line class=\"rule\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{py:.1}\" y2=\"{py:.1}\" stroke=\"#dfe3e7\"/>\
             <text class=\"faint\" x=\"{}\" y=\"{:.1}\" text-anchor=\"end\" fill=\"#5c666f\">{}</text>",
            WIDTH - RIGHT,
            LEFT - 6.0,
            py + 4.0,
            label(tick)
        );
    }
    let middle = TOP + PLOT / 2.0;
    let _ = write!(
        out,
        "<text class=\"faint\" x=\"14\" y=\"{middle}\" transform=\"rotate(-90 14 {middle})\" text-anchor=\"middle\" fill=\"#5c666f\">{}</text>",
        escape(name)
    );
}

fn grid_x(out: &mut String, x: &Axis, name: &str) {
    let base = TOP + PLOT;
    let _ = write!(
        out,
        "<line class=\"frame\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{base}\" y2=\"{base}\" stroke=\"#5c666f\"/>",
        WIDTH - RIGHT
    );
    for tick in x.ticks() {
        let _ = write!(
            out,
            "<text class=\"faint\" x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#5c666f\">{}</text>",
            x.at(tick),
            base + 16.0,
            label(tick)
        );
    }
    let _ = write!(
        out,
        "<text class=\"faint\" x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"#5c666f\">{}</text>",
        (LEFT + WIDTH - RIGHT) / 2.0,
        base + 34.0,
        escape(name)
    );
}

/// Several values side by side for each of several things: completion times of each job under each policy.
#[derive(Debug, Clone, PartialEq)]
pub struct BarChart {
    pub title: String,
    pub y_label: String,
    /// What the values of a group stand for, in their order.
    pub names: Vec<String>,
    pub groups: Vec<Group>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub label: String,
    pub values: Vec<f64>,
}

impl BarChart {
    pub fn svg(&self) -> String {
        let names: Vec<&str> = self.names.iter().map(String::as_str).collect();
        let inner = WIDTH - LEFT - RIGHT;
        let height = TOP + PLOT + 34.0 + legend_height(&names, inner);
        let mut out = open(WIDTH, height, &self.title);
        let y = Axis::over(self.groups.iter().flat_map(|g| g.values.iter().copied()), true, TOP + PLOT, TOP);
        grid_y(&mut out, &y, &self.y_label);
        let slot = inner / self.groups.len().max(1) as f64;
        let bar = slot * 0.8 / self.names.len().max(1) as f64;
        for (g, group) in self.groups.iter().enumerate() {
            let left = LEFT + g as f64 * slot + slot * 0.1;
            for (i, value) in group.values.iter().enumerate().filter(|(_, v)| v.is_finite()) {
                let (a, b) = (y.at(*value), y.at(0.0));
                let _ = write!(
                    out,
                    "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"><title>{}: {}</title></rect>",
                    left + i as f64 * bar,
                    a.min(b),
                    (bar - 0.6).max(0.4),
                    (a - b).abs(),
                    colour(i),
                    escape(names.get(i).unwrap_or(&"")),
                    label(*value)
                );
            }
            let _ = write!(
                out,
                "<text class=\"faint\" x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\" font-size=\"{}\" fill=\"#5c666f\">{}</text>",
                left + slot * 0.4,
                TOP + PLOT + 16.0,
                if self.groups.len() > 16 { 8 } else { 11 },
                escape(&group.label)
            );
        }
        legend(&mut out, &names, LEFT, TOP + PLOT + 40.0, inner);
        out + "</svg>"
    }
}
