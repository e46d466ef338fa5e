//! Several runs beside each other: one panel of stacked shares for each run, all over one time axis.
//!
//! **Problem.** Charts that stand one below the other with axes of their own cannot be compared: the reader
//! has to measure.
//!
//! **Approach.** Every panel has the same width and the same seconds, so that an earlier end is further to
//! the left. A job's end is a line through the panel, with the job's completion time below it. Words never
//! overlap: words that would touch their neighbour move to the next of three lines, and are left out where
//! all three are taken.
//!
//! **Terms.** x in seconds; shares from 0 to 1 of the node.

use super::axis::{Axis, label};
use super::chart::{area, stack};
use super::{Series, colour, escape, legend, legend_height, open};
use std::fmt::Write;

const WIDTH: f64 = 860.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 34.0;
/// Height of the stacked shares of one panel.
const STACK: f64 = 92.0;
/// How many lines of words stand below a panel.
const LINES: usize = 3;
/// Room below the stack of a panel for them.
const BELOW: f64 = 48.0;
/// How wide a character of the small font is, at most.
const CHARACTER: f64 = 6.2;

/// Panels over one time axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Panels {
    pub title: String,
    pub x_label: String,
    pub panels: Vec<Panel>,
}

/// One run.
#[derive(Debug, Clone, PartialEq)]
pub struct Panel {
    /// What the run is called: a policy.
    pub name: String,
    /// The share of each job over time. Jobs stand in the same order in every panel.
    pub shares: Vec<Series>,
    /// When each job ended, and the words for it, in the order of `shares`.
    pub ends: Vec<(f64, String)>,
}

impl Panels {
    pub fn svg(&self) -> String {
        let names: Vec<&str> =
            self.panels.first().map_or(vec![], |p| p.shares.iter().map(|s| s.name.as_str()).collect());
        let inner = WIDTH - LEFT - RIGHT;
        let bottom = TOP + self.panels.len() as f64 * (STACK + BELOW);
        let mut out = open(WIDTH, bottom + 34.0 + legend_height(&names, inner), &self.title);
        let xs = self.panels.iter().flat_map(|p| {
            p.shares.iter().flat_map(|s| s.finite().map(|point| point.0)).chain(p.ends.iter().map(|end| end.0))
        });
        let x = Axis::over(xs, true, LEFT, WIDTH - RIGHT);
        for (i, panel) in self.panels.iter().enumerate() {
            panel.draw(&mut out, TOP + i as f64 * (STACK + BELOW), &x);
        }
        for tick in x.ticks() {
            text(&mut out, "faint", x.at(tick), bottom + 8.0, "middle", &label(tick));
        }
        text(&mut out, "faint", LEFT + inner / 2.0, bottom + 24.0, "middle", &self.x_label);
        legend(&mut out, &names, LEFT, bottom + 46.0, inner);
        out + "</svg>"
    }
}

impl Panel {
    fn draw(&self, out: &mut String, top: f64, x: &Axis) {
        let base = top + STACK;
        let y = Axis::over([0.0, 1.0].into_iter(), true, base, top);
        for (i, sum) in stack(&self.shares).iter().enumerate().rev() {
            area(out, sum, i, x, &y);
        }
        text(out, "ink", LEFT - 10.0, top + STACK / 2.0 + 4.0, "end", &self.name);
        let _ = write!(
            out,
            "<line class=\"frame\" x1=\"{LEFT}\" x2=\"{}\" y1=\"{base}\" y2=\"{base}\" stroke=\"#5c666f\"/>",
            WIDTH - RIGHT
        );
        let mut ends: Vec<(usize, f64, &str)> =
            self.ends.iter().enumerate().map(|(i, (at, words))| (i, x.at(*at), words.as_str())).collect();
        ends.sort_by(|a, b| a.1.total_cmp(&b.1));
        // Up to which x each line of words is taken.
        let mut taken = [LEFT - 2.0 * CHARACTER; LINES];
        for (i, at, words) in ends {
            let _ = write!(
                out,
                "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{top}\" y2=\"{:.1}\" stroke=\"{}\" stroke-width=\"1.5\"/>",
                base + 5.0,
                colour(i)
            );
            let width = CHARACTER * words.chars().count() as f64;
            let from = (at - width / 2.0).clamp(LEFT - CHARACTER, WIDTH - width);
            let Some(line) = taken.iter().position(|x| from >= x + CHARACTER) else { continue };
            taken[line] = from + width;
            text(out, "faint", from + width / 2.0, base + 15.0 + 12.0 * line as f64, "middle", words);
        }
    }
}

fn text(out: &mut String, class: &str, x: f64, y: f64, anchor: &str, words: &str) {
    let fill = if class == "ink" { "#1d2329" } else { "#5c666f" };
    let size = if class == "ink" { 13 } else { 11 };
    let _ = write!(
        out,
        "<text class=\"{class}\" x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{fill}\">{}</text>",
        escape(words)
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panels(ends: &[f64]) -> Panels {
        let shares =
            ends.iter().enumerate().map(|(i, end)| Series::new(format!("job {i}"), vec![(0.0, 0.5), (*end, 0.0)]));
        let ends = ends.iter().enumerate().map(|(i, end)| (*end, format!("job {i}: {end:.1} s")));
        let panel = Panel { name: "na".into(), shares: shares.collect(), ends: ends.collect() };
        Panels { title: "t".into(), x_label: "seconds".into(), panels: vec![panel.clone(), panel] }
    }

    /// The x positions and widths of the words below a panel, by line.
    fn words(svg: &str) -> Vec<(f64, f64, f64)> {
        let attribute = |tag: &str, name: &str| -> f64 {
            let from = tag.split_once(&format!(" {name}=\"")).expect("the attribute is there").1;
            from.split_once('"').expect("a closing quote").0.parse().expect("a number")
        };
        svg.split("<text")
            .skip(1)
            .filter(|tag| tag.contains(": "))
            .map(|tag| {
                let words = tag.split_once('>').expect("a tag").1.split_once("</text>").expect("an end").0;
                (attribute(tag, "x"), attribute(tag, "y"), CHARACTER * words.chars().count() as f64)
            })
            .collect()
    }

    #[test]
    fn words_of_jobs_that_end_together_do_not_overlap() {
        for ends in [vec![50.0, 50.5, 51.0], vec![1.0, 1.0], vec![99.0, 100.0, 100.0]] {
            let words = words(&panels(&ends).svg());
            assert_eq!(words.len(), 2 * ends.len(), "three jobs always have their words");
            for (i, a) in words.iter().enumerate() {
                for b in &words[i + 1..] {
                    let apart = a.1 != b.1 || (a.0 - b.0).abs() >= (a.2 + b.2) / 2.0 - 0.2;
                    assert!(apart, "{a:?} and {b:?} overlap for ends at {ends:?}");
                }
            }
        }
    }

    #[test]
    fn an_earlier_end_is_further_to_the_left_in_every_panel() {
        let svg = panels(&[20.0, 80.0]).svg();
        let words = words(&svg);
        assert!(words[0].0 < words[1].0 && words[2].0 < words[3].0, "{words:?}");
        assert!(!svg.contains("NaN"), "{svg}");
        assert!(Panels { title: "t".into(), x_label: "s".into(), panels: vec![] }.svg().ends_with("</svg>"));
    }
}
