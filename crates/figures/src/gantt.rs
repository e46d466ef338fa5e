//! Where and when each job ran: one row for each machine (or job), bars stacked in lanes where they overlap.

use super::axis::{Axis, label};
use super::{colour, escape, open};
use std::fmt::Write;

const WIDTH: f64 = 980.0;
const LEFT: f64 = 90.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 34.0;
const LANE: f64 = 17.0;

/// One stay of one job.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    pub from: f64,
    pub to: f64,
    pub label: String,
    /// Picks the colour: bars of one job share it.
    pub tone: usize,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    pub label: String,
    pub bars: Vec<Bar>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Gantt {
    pub title: String,
    pub x_label: String,
    pub rows: Vec<Row>,
}

impl Gantt {
    pub fn svg(&self) -> String {
        let laid: Vec<(Vec<usize>, usize)> = self.rows.iter().map(|r| lanes(&r.bars)).collect();
        let body: f64 = laid.iter().map(|(_, lanes)| *lanes as f64 * LANE + 10.0).sum();
        let mut out = open(WIDTH, TOP + body + 44.0, &self.title);
        let ends = self.rows.iter().flat_map(|r| r.bars.iter().flat_map(|b| [b.from, b.to]));
        let x = Axis::over(ends, true, LEFT, WIDTH - RIGHT);
        for tick in x.ticks() {
            let px = x.at(tick);
            let _ = write!(
                out,
                "<line class=\"rule\" x1=\"{px:.1}\" x2=\"{px:.1}\" y1=\"{TOP}\" y2=\"{:.1}\" stroke=\"#dfe3e7\"/>\
                 <text class=\"faint\" x=\"{px:.1}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#5c666f\">{}</text>",
                TOP + body,
                TOP + body + 16.0,
                label(tick)
            );
        }
        let mut top = TOP;
        for (row, (lane_of, lanes)) in self.rows.iter().zip(&laid) {
            let height = *lanes as f64 * LANE + 10.0;
            let _ = write!(
                out,
                "<text class=\"ink\" x=\"8\" y=\"{:.1}\" fill=\"#1d2329\">{}</text>\
                 <line class=\"frame\" x1=\"8\" x2=\"{}\" y1=\"{:.1}\" y2=\"{:.1}\" stroke=\"#5c666f\" stroke-width=\"0.5\"/>",
                top + height / 2.0 + 4.0,
                escape(&row.label),
                WIDTH - RIGHT,
                top + height,
                top + height
            );
            for (bar, lane) in row.bars.iter().zip(lane_of).filter(|(b, _)| b.from.is_finite() && b.to.is_finite()) {
                draw(&mut out, bar, &x, top + 5.0 + *lane as f64 * LANE);
            }
            top += height;
        }
        let _ = write!(
            out,
            "<text class=\"faint\" x=\"{}\" y=\"{:.1}\" text-anchor=\"middle\" fill=\"#5c666f\">{}</text></svg>",
            (LEFT + WIDTH - RIGHT) / 2.0,
            TOP + body + 34.0,
            escape(&self.x_label)
        );
        out
    }
}

fn draw(out: &mut String, bar: &Bar, x: &Axis, y: f64) {
    let (from, to) = (x.at(bar.from), x.at(bar.to.max(bar.from)));
    let name = escape(&bar.label);
    let _ = write!(
        out,
        "<rect x=\"{from:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{}\" rx=\"2\" fill=\"{}\"><title>{name}: {}–{}</title></rect>",
        (to - from).max(1.0),
        LANE - 3.0,
        colour(bar.tone),
        label((bar.from * 10.0).round() / 10.0),
        label((bar.to * 10.0).round() / 10.0)
    );
    if to - from > 6.0 * bar.label.chars().count() as f64 {
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" font-size=\"10\" fill=\"#ffffff\">{name}</text>",
            from + 4.0,
            y + 10.5
        );
    }
}

/// Puts each bar into the first lane that is free at its start. Returns the lane of each bar and how many
/// lanes there are.
fn lanes(bars: &[Bar]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..bars.len()).collect();
    order.sort_by(|&a, &b| bars[a].from.total_cmp(&bars[b].from).then(a.cmp(&b)));
    let mut ends: Vec<f64> = Vec::new();
    let mut lane_of = vec![0; bars.len()];
    for i in order {
        let lane = ends.iter().position(|end| *end <= bars[i].from).unwrap_or_else(|| {
            ends.push(f64::MIN);
            ends.len() - 1
        });
        ends[lane] = bars[i].to;
        lane_of[i] = lane;
    }
    (lane_of, ends.len().max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_bars_take_lanes_of_their_own() {
        let bar = |from, to| Bar { from, to, label: String::new(), tone: 0 };
        let (lane_of, count) = lanes(&[bar(5.0, 9.0), bar(0.0, 6.0), bar(6.0, 8.0)]);
        assert_eq!((lane_of, count), (vec![1, 0, 0], 2));
    }
}
