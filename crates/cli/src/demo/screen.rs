//! The live picture of a round: losses and shares while they move. On a terminal; elsewhere one line when
//! something happens.

use super::outcome::JobOutcome;
use crate::notice;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style, Stylize};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, GraphType, Paragraph};
use ratatui::{DefaultTerminal, Frame, TerminalOptions, Viewport};
use std::io::IsTerminal;

/// Colour-blind-friendly, readable on light and dark.
const COLOURS: [Color; 4] = [Color::Cyan, Color::Yellow, Color::Magenta, Color::Green];

const HEIGHT: u16 = 18;

pub(super) struct Screen {
    title: String,
    length_s: f64,
    terminal: Option<DefaultTerminal>,
    /// How many jobs had arrived and how many had ended when a line was last printed.
    printed: (usize, usize),
}

impl Screen {
    pub(super) fn open(title: &str, length_s: f64) -> Screen {
        // The picture goes where people look and programs do not read.
        let wanted = std::io::stderr().is_terminal() && std::io::stdout().is_terminal();
        let terminal =
            wanted.then(|| ratatui::try_init_with_options(TerminalOptions { viewport: Viewport::Inline(HEIGHT) }).ok());
        let screen = Screen { title: title.to_owned(), length_s, terminal: terminal.flatten(), printed: (0, 0) };
        if screen.terminal.is_some() {
            // We read no keys; in raw mode Ctrl-C would be one.
            let _ = ratatui::crossterm::terminal::disable_raw_mode();
        } else {
            notice::print(&format!("{title}\n"));
        }
        screen
    }

    pub(super) fn draw(&mut self, now: f64, jobs: &[JobOutcome]) {
        match &mut self.terminal {
            Some(terminal) => {
                let (title, length_s) = (&self.title, self.length_s);
                // A terminal that cannot be drawn on must not end the demo.
                let _ = terminal.draw(|frame| paint(frame, title, now, length_s, jobs));
            }
            None => {
                let ended = |j: &&JobOutcome| j.ended_s > 0.0;
                let printed = (jobs.len(), jobs.iter().filter(ended).count());
                if printed != self.printed {
                    let state: Vec<String> = jobs.iter().map(|j| one_line(j, now)).collect();
                    notice::print(&format!("{now:6.1} s  {}\n", state.join("   ")));
                    self.printed = printed;
                }
            }
        }
    }

    pub(super) fn close(&mut self) {
        if let Some(mut terminal) = self.terminal.take() {
            // The cursor is where the last change was drawn; what follows belongs below the picture.
            let below = terminal.get_frame().area().bottom().saturating_sub(1);
            let _ = terminal.set_cursor_position((0, below));
            ratatui::restore();
            notice::print("\n");
        }
    }
}

fn one_line(job: &JobOutcome, now: f64) -> String {
    if job.ended_s > 0.0 {
        format!("{} done after {:.1} s", job.name, job.completion_s())
    } else {
        let share = job.shares.last().map_or("–".into(), |(_, s)| format!("{:.0} %", s * 100.0));
        format!("{} {:.1} s, share {share}", job.name, now - job.arrived_s)
    }
}

/// Losses relative to each job's first, so that they fit one picture.
fn relative(job: &JobOutcome) -> Vec<(f64, f64)> {
    let Some((_, first)) = job.losses.first() else { return vec![] };
    job.losses.iter().map(|(t, v)| (*t, v / first.abs().max(f64::MIN_POSITIVE))).collect()
}

fn paint(frame: &mut Frame, title: &str, now: f64, length_s: f64, jobs: &[JobOutcome]) {
    let [head, charts, legend] =
        Layout::vertical([Constraint::Length(1), Constraint::Min(8), Constraint::Length(3)]).areas(frame.area());
    frame.render_widget(Line::from(vec![title.bold(), format!("   {now:.0} s").dim()]), head);
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(charts);
    let until = length_s.max(now) * 1.05;
    let losses: Vec<_> = jobs.iter().map(relative).collect();
    let shares: Vec<_> = jobs.iter().map(|j| j.shares.clone()).collect();
    frame.render_widget(chart("loss, relative to its first", &losses, until), left);
    frame.render_widget(chart("share of the CPU", &shares, until), right);
    let lines: Vec<Line> = jobs
        .iter()
        .enumerate()
        .map(|(i, job)| {
            let loss = job.losses.last().map_or(String::new(), |(_, v)| format!("   loss {v:.4}"));
            Line::from(vec![
                Span::styled("━━ ", Style::new().fg(COLOURS[i % COLOURS.len()])),
                Span::raw(one_line(job, now)),
                Span::raw(loss).dim(),
            ])
        })
        .collect();
    frame.render_widget(Paragraph::new(lines), legend);
}

fn chart<'a>(title: &'a str, series: &'a [Vec<(f64, f64)>], until: f64) -> Chart<'a> {
    let datasets = series.iter().enumerate().map(|(i, points)| {
        Dataset::default()
            .marker(Marker::Braille)
            .graph_type(GraphType::Line)
            .style(Style::new().fg(COLOURS[i % COLOURS.len()]))
            .data(points)
    });
    Chart::new(datasets.collect())
        .block(Block::bordered().title(title))
        .x_axis(Axis::default().bounds([0.0, until]).labels(["0".to_owned(), format!("{until:.0} s")]).dim())
        .y_axis(Axis::default().bounds([0.0, 1.05]).labels(["0", "½", "1"]).dim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    #[test]
    fn the_picture_names_every_job_and_survives_odd_values() {
        let job = |name: &str, losses| JobOutcome { name: name.into(), losses, ..JobOutcome::default() };
        let mut done = job("late", vec![(1.0, 0.0), (2.0, f64::MAX)]);
        done.ended_s = 9.0;
        let jobs = [job("vae", vec![(0.0, 200.0), (5.0, 100.0)]), done, job("silent", vec![])];
        for (width, height) in [(100, HEIGHT), (20, 6), (1, 1)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|f| paint(f, "round 1 of 2: na", 10.0, 60.0, &jobs)).unwrap();
            if width == 100 {
                let text = terminal.backend().to_string();
                for name in ["round 1 of 2: na", "vae", "late done after 9.0 s", "silent"] {
                    assert!(text.contains(name), "{name} is missing:\n{text}");
                }
            }
        }
    }
}
