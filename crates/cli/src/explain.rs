//! `explain`: why a job has the share it has, in the order in which a person would ask.

use crate::jobs::{category_colour, state_colour};
use crate::link::Link;
use anyhow::{Context, Result, bail};
use gainshare_daemon::api::types::{DecisionInfo, Explanation, Resources, StartVar};
use gainshare_daemon::deadline;
use gainshare_figures::terminal::{Colour, NOTHING, Printer, Side, Table, number, optional, percent, printable};
use std::fmt::Write;
use std::path::Path;

pub fn explain(job: &str, link: &Link, out: &Printer) -> Result<u8> {
    if !link.ensure_if_used()? {
        bail!("there is no job `{job}`: nothing was ever run here");
    }
    let explanation = link.call(link.client.explain(job))?;
    if out.is_json() {
        out.json(&explanation)?;
    } else {
        out.text(&render(&explanation, out))?;
    }
    Ok(0)
}

/// Writes the last decision about a job or about its share of a GPU, with all it depended on, for `replay`.
pub fn dump(job: &str, gpu: bool, file: &Path, link: &Link, out: &Printer) -> Result<u8> {
    if !link.ensure_if_used()? {
        bail!("there is no job `{job}`: nothing was ever run here");
    }
    let record = if gpu { link.call(link.client.gpu_view(job))? } else { link.call(link.client.view(Some(job)))? };
    let record = gainshare_record::to_json(&record)?;
    if file == Path::new("-") {
        out.text(&format!("{record}\n"))?;
    } else {
        std::fs::write(file, record).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(0)
}

fn render(e: &Explanation, out: &Printer) -> String {
    let mut sections = vec![summary(e, out), resources(e, out)];
    if !e.in_force.is_empty() {
        let settings = e.in_force.iter().map(|setting| format!("  {}={}\n", setting.name, setting.value)).collect();
        sections.push(titled("limits in force", settings, out));
    }
    sections.push(titled("neighbours", neighbours(e, out), out));
    if !e.decisions.is_empty() {
        sections.push(titled("last decisions, newest first", decisions(&e.decisions, out), out));
    }
    if !e.start_env.is_empty() {
        sections.push(titled("set at its start (switch off with --plain)", start_env(e, out), out));
    }
    // An empty line between two sections.
    sections.join("\n")
}

fn titled(title: &str, section: String, out: &Printer) -> String {
    format!("{}\n{section}", out.paint(title, Colour::Bold))
}

/// The job's state, and one line for each thing that is known of it.
fn summary(e: &Explanation, out: &Printer) -> String {
    let job = &e.job;
    let reason = optional_text(job.reason.as_ref(), |why| format!(": {}", printable(&why.text)));
    let aim = optional_text(e.aim.as_ref(), |aim| format!(", aim {aim}"));
    let mut text = format!(
        "{} (job {}) is {}, share {} under {}{aim}{reason}\n",
        out.paint(&job.name, Colour::Bold),
        job.id,
        out.paint(job.state.name(), state_colour(job.state)),
        optional(job.share, percent),
        e.policy,
    );
    let mut say = |title: &str, line: String| {
        let _ = writeln!(text, "{title:<10}{line}");
    };
    if let Some(category) = &e.category {
        say("category", out.paint(category, category_colour(Some(category))));
    }
    say("metric", metric(e));
    if let Some(rhythm) = &job.rhythm {
        let total = optional_text(rhythm.total, |total| format!(" of {total}"));
        let (speed, step) = (number(rhythm.steps_per_s), rhythm.steps);
        say(
            "rhythm",
            format!("{speed} steps a second at about step {step}{total}, from its parallel regions and launches"),
        );
        if let Some(stalled_s) = rhythm.stalled_s {
            say("stall", format!("no region and no launch for {stalled_s:.0} s"));
        }
    }
    if let Some(done) = &job.done {
        let [at, from, to] = [done.at_s, done.earliest_s, done.latest_s].map(deadline::local);
        let basis = optional_text(done.basis.as_ref(), |basis| format!(", by {}", printable(basis)));
        say("done", format!("at {at}, four times in five between {from} and {to}{basis}"));
    }
    if let Some(due) = &job.deadline {
        let tolerance = Some(due.tolerance_s).filter(|tolerance_s| *tolerance_s > 0.0);
        let tolerance =
            optional_text(tolerance, |tolerance_s| format!(", {} late is tolerated", deadline::length(tolerance_s)));
        let prospect = due.prospect(job.done.as_ref());
        say("deadline", format!("{}{tolerance}: {prospect}", deadline::local(due.at_s)));
    }
    for note in e.metric_notes.iter().chain(&e.notes) {
        say("note", printable(note));
    }
    text
}

/// The value that was read last, and how the job's total is known.
fn metric(e: &Explanation) -> String {
    let Some(metric) = &e.metric else {
        return "none found yet; name it with --metric, --pattern or --metrics-file".to_owned();
    };
    let step = optional(metric.step, |step| step.to_string());
    let believed = metric.total_trust.filter(|trust| *trust < 1.0);
    let believed = optional_text(believed, |trust| format!(", believed to {}", percent(trust)));
    let from = optional_text(metric.total_from.as_ref(), |from| format!(" (by {from}{believed})"));
    let total = optional_text(metric.total, |total| format!(" of {total}{from}"));
    let (name, value) = (printable(&metric.name), number(metric.value));
    format!("{name} = {value} at step {step}{total}, from {}", metric.source)
}

/// A part of a sentence that is left out where nothing is known.
fn optional_text<T>(value: Option<T>, text: impl FnOnce(T) -> String) -> String {
    value.map_or_else(String::new, text)
}

fn neighbours(e: &Explanation, out: &Printer) -> String {
    if e.neighbours.is_empty() {
        return "  none: it has the machine to itself\n".to_owned();
    }
    let mut table = Table::new(&[("", Side::Left), ("", Side::Right), ("", Side::Left), ("", Side::Left)]);
    for neighbour in &e.neighbours {
        let category = neighbour.category.as_deref();
        table.row(vec![
            (neighbour.name.clone(), Colour::Plain),
            (optional(neighbour.share, percent), Colour::Plain),
            (optional(category, str::to_owned), category_colour(category)),
            (optional(neighbour.growth, |growth| format!("growth {}", number(growth))), Colour::Plain),
        ]);
    }
    table.render(out, 2)
}

fn start_env(e: &Explanation, out: &Printer) -> String {
    let line = |variable: &StartVar| {
        format!("  {}={}  {}\n", variable.name, variable.value, out.paint(&variable.why, Colour::Dim))
    };
    e.start_env.iter().map(line).collect()
}

fn resources(e: &Explanation, out: &Printer) -> String {
    let columns = [("RESOURCE", Side::Left), ("SHARE", Side::Right), ("LIMIT", Side::Right), ("GROWTH", Side::Right)];
    let mut table = Table::new(&columns);
    fn pick<T: Copy>(r: &Resources<T>) -> [T; 4] {
        [r.cpu, r.memory, r.block_io, r.net_io]
    }
    let growth = pick(&e.growth);
    for (i, name) in ["cpu", "memory", "block I/O", "network I/O"].into_iter().enumerate() {
        table.row(vec![
            (name.into(), Colour::Plain),
            (optional(e.share.as_ref(), |share| percent(pick(share)[i])), Colour::Plain),
            (optional(e.limit.as_ref(), |limit| percent(pick(limit)[i])), Colour::Plain),
            (optional(growth[i], number), Colour::Plain),
        ]);
    }
    if let Some(share) = e.job.gpu_share {
        let none = || (NOTHING.to_owned(), Colour::Plain);
        table.row(vec![("GPU".into(), Colour::Plain), (percent(share), Colour::Plain), none(), none()]);
    }
    table.render(out, 0)
}

fn decisions(decisions: &[DecisionInfo], out: &Printer) -> String {
    let left = Side::Left;
    let mut table = Table::new(&[("", left), ("", Side::Right), ("", left), ("", left)]);
    for decision in decisions {
        let trouble = decision.error.as_ref().map_or_else(String::new, |e| format!(" (not applied: {e})"));
        table.row(vec![
            (decision.at.clone(), Colour::Dim),
            (optional(decision.share, percent), Colour::Plain),
            (
                decision.category.clone().unwrap_or_else(|| NOTHING.into()),
                category_colour(decision.category.as_deref()),
            ),
            (format!("{}{trouble}", decision.reason.text), Colour::Plain),
        ]);
    }
    table.render(out, 2)
}
