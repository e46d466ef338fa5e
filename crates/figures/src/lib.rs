//! Pictures from numbers: SVG charts and one self-contained HTML page, for studies and for live demonstrations alike.
//!
//! **Problem.** Results must be seen without installing anything, on paper, in a browser with a light or a
//! dark background, and they must be the same bytes for the same numbers.
//!
//! **Approach.** Pure functions from data to text. Colours are written as plain attributes for a light
//! background, so that any renderer draws them; a small style sheet inside the SVG swaps them where the
//! reader prefers dark. No script, no font, no address outside the file.
//!
//! **Terms.** All x values share one unit (mostly seconds); every chart names its axes.

mod axis;
mod chart;
pub mod file;
mod gantt;
mod page;
mod panels;
pub mod terminal;

pub use chart::{BarChart, Group, LineChart, Series, Shape};
pub use gantt::{Bar, Gantt, Row};
pub use page::{Page, Table};
pub use panels::{Panel, Panels};

use std::fmt::Write;

/// Ten hues that stay apart in print, on white and on near-black; more series start over.
const COLOURS: [&str; 10] =
    ["#3266b8", "#d9660f", "#2f8f46", "#b8323c", "#7d54b0", "#8a6d3b", "#c3579b", "#5f6b76", "#9a9a1f", "#1591a8"];

pub(crate) fn colour(i: usize) -> &'static str {
    COLOURS[i % COLOURS.len()]
}

/// Text as it may stand between tags and in attributes.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // Control characters are not allowed in XML at all, not even escaped.
            c if c.is_control() && !matches!(c, '\n' | '\t') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}

const DARK: &str = "@media (prefers-color-scheme: dark){.ink{fill:#e4e7ea}.faint{fill:#aeb6bd}.rule{stroke:#3a4149}.frame{stroke:#7b858e}.paper{fill:#14181c}}";

/// Opens an SVG of the given size with a title on top.
fn open(width: f64, height: f64, title: &str) -> String {
    let title = escape(title);
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"system-ui, Helvetica, Arial, sans-serif\" font-size=\"12\" role=\"img\" aria-label=\"{title}\">\
         <style>{DARK}</style>\
         <rect class=\"paper\" width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\
         <text class=\"ink\" x=\"{}\" y=\"20\" text-anchor=\"middle\" font-size=\"14\" font-weight=\"600\" fill=\"#1d2329\">{title}</text>",
        width / 2.0
    )
}

/// Names of series with their colours, in rows below the chart. Returns the height it took.
fn legend(out: &mut String, names: &[&str], x: f64, y: f64, width: f64) -> f64 {
    let (mut at, mut row) = (x, y);
    for (i, name) in names.iter().enumerate() {
        let needs = 26.0 + 7.0 * name.chars().count() as f64;
        if at > x && at + needs > x + width {
            at = x;
            row += 18.0;
        }
        let _ = write!(
            out,
            "<rect x=\"{at:.1}\" y=\"{:.1}\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{}\"/>\
             <text class=\"ink\" x=\"{:.1}\" y=\"{:.1}\" fill=\"#1d2329\">{}</text>",
            row - 10.0,
            colour(i),
            at + 17.0,
            row,
            escape(name)
        );
        at += needs;
    }
    row + 18.0 - y
}

/// How many rows [`legend`] will need, to size the picture before it is drawn.
fn legend_height(names: &[&str], width: f64) -> f64 {
    legend(&mut String::new(), names, 0.0, 0.0, width)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(shape: Shape) -> LineChart {
        LineChart {
            title: "loss <of> \"two\" & more".into(),
            x_label: "seconds".into(),
            y_label: "loss".into(),
            shape,
            y_from_zero: true,
            marks: vec![(12.0, "Job-2 arrives".into())],
            series: vec![
                Series::new("one", vec![(0.0, 1.0), (10.0, 0.5), (20.0, 0.4)]),
                Series::new("two", vec![(5.0, 2.0), (20.0, f64::NAN), (25.0, 0.1)]),
            ],
        }
    }

    #[test]
    fn every_chart_is_well_formed_and_draws_no_nan() {
        let gantt = Gantt {
            title: "where each job ran".into(),
            x_label: "s".into(),
            rows: vec![Row {
                label: "Worker-1".into(),
                bars: vec![Bar { from: 0.0, to: 9.0, label: "Job-1-M".into(), tone: 3 }],
            }],
        };
        let bars = BarChart {
            title: "t".into(),
            y_label: "s".into(),
            names: vec!["na".into(), "flowcon".into()],
            groups: vec![Group { label: "Job-1".into(), values: vec![10.0, f64::INFINITY] }],
        };
        let svgs =
            [chart(Shape::Line).svg(), chart(Shape::Step).svg(), chart(Shape::Stacked).svg(), gantt.svg(), bars.svg()];
        for svg in svgs {
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>"), "{svg}");
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
        }
        assert!(chart(Shape::Line).svg().contains("loss &lt;of&gt; &quot;two&quot; &amp; more"));
    }

    #[test]
    fn empty_charts_are_drawn_too() {
        let empty = LineChart { series: vec![], marks: vec![], ..chart(Shape::Step) };
        assert!(empty.svg().ends_with("</svg>"));
        let none = Gantt { title: "t".into(), x_label: "s".into(), rows: vec![] };
        assert!(none.svg().ends_with("</svg>"));
    }

    #[test]
    fn a_page_refers_to_nothing_outside_itself() {
        let table = Table { head: vec!["policy".into()], rows: vec![vec!["na <b>".into()]] };
        let html = Page::new("study").text("one & two").table(&table).figure(&chart(Shape::Line).svg()).html();
        assert!(html.contains("na &lt;b&gt;") && html.contains("one &amp; two"));
        let outside = html.replace("http://www.w3.org/2000/svg", "");
        assert!(!outside.contains("http") && !outside.contains("<script"), "{html}");
    }
}
