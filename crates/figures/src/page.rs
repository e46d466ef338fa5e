//! One self-contained HTML page: headings, text, tables and figures in the order they are added.

use super::escape;
use std::fmt::Write;
use unicode_width::UnicodeWidthStr;

const STYLE: &str = ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,Helvetica,Arial,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;\
color:#1d2329;background:#fff}table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}th,td{padding:.25rem .8rem;text-align:right;\
border-bottom:1px solid #dfe3e7}th:first-child,td:first-child{text-align:left}figure{margin:1.5rem 0;overflow-x:auto}svg{max-width:100%;height:auto}\
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(26rem,100%),1fr));gap:0 1.5rem}.beside figure{margin:.5rem 0}\
@media (prefers-color-scheme: dark){body{color:#e4e7ea;background:#14181c}th,td{border-color:#3a4149}}";

/// Rows under a head; the first column names the row.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Table {
    pub head: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    /// For a terminal: columns aligned, the first to the left, the others to the right.
    pub fn text(&self) -> String {
        let columns = self.head.len();
        let width = |c: usize| {
            let cells = self.rows.iter().filter_map(|r| r.get(c)).chain(self.head.get(c));
            cells.map(|s| s.width()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        let mut out = String::new();
        for row in std::iter::once(&self.head).chain(&self.rows) {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate().take(columns) {
                let blanks = " ".repeat(widths[c] - cell.width());
                let _ = match c {
                    0 => write!(line, "{cell}{blanks}"),
                    _ => write!(line, "  {blanks}{cell}"),
                };
            }
            let _ = writeln!(out, "{}", line.trim_end());
        }
        out
    }
}

/// Builds a page; everything handed in as text is escaped, figures are taken as they are.
#[derive(Debug, Clone)]
pub struct Page {
    title: String,
    body: String,
}

impl Page {
    pub fn new(title: &str) -> Page {
        let title = escape(title);
        Page { body: format!("<h1>{title}</h1>"), title }
    }

    pub fn heading(mut self, text: &str) -> Page {
        let _ = write!(self.body, "<h2>{}</h2>", escape(text));
        self
    }

    pub fn text(mut self, text: &str) -> Page {
        let _ = write!(self.body, "<p>{}</p>", escape(text));
        self
    }

    pub fn table(mut self, table: &Table) -> Page {
        let cells = |row: &[String], tag: &str| -> String {
            row.iter().map(|c| format!("<{tag}>{}</{tag}>", escape(c))).collect()
        };
        let _ = write!(self.body, "<table><thead><tr>{}</tr></thead><tbody>", cells(&table.head, "th"));
        for row in &table.rows {
            let _ = write!(self.body, "<tr>{}</tr>", cells(row, "td"));
        }
        self.body.push_str("</tbody></table>");
        self
    }

    /// Adds an SVG made by one of the charts.
    pub fn figure(mut self, svg: &str) -> Page {
        let _ = write!(self.body, "<figure>{svg}</figure>");
        self
    }

    /// Adds figures to compare: beside each other where the window is wide enough.
    pub fn beside(mut self, svgs: &[String]) -> Page {
        let figures: String = svgs.iter().map(|svg| format!("<figure>{svg}</figure>")).collect();
        let _ = write!(self.body, "<div class=\"beside\">{figures}</div>");
        self
    }

    pub fn html(&self) -> String {
        format!(
            "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
             <title>{}</title><style>{STYLE}</style></head><body>{}</body></html>\n",
            self.title, self.body
        )
    }
}
