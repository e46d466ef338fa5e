//! `explain`: why a job has the share it has, in the order in which a person would ask.

use crate::jobs::{category_colour, state_colour};
use crate::link::Link;
use anyhow::{Context, Result, bail};
use gainshare_daemon::api::types::{DecisionInfo, Explanation, Resources};
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
    let job = &e.job;
    let mut text = String::new();
    let mut say = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    let heading = |title: &str| out.paint(title, Colour::Bold);
    let reason = job.reason.as_ref().map_or_else(String::new, |why| format!(": {}", printable(&why.text)));
    let aim = e.aim.as_ref().map_or_else(String::new, |aim| format!(", aim {aim}"));
    say(format!(
        "{} (job {}) is {}, share {} under {}{aim}{reason}",
        out.paint(&job.name, Colour::Bold),
        job.id,
        out.paint(job.state.name(), state_colour(job.state)),
        optional(job.share, percent),
        e.policy,
    ));
    if let Some(category) = &e.category {
        say(format!("category  {}", out.paint(category, category_colour(Some(category)))));
    }
    match &e.metric {
        Some(m) => {
            let step = optional(m.step, |s| s.to_string());
            let believed = m.total_trust.filter(|trust| *trust < 1.0);
            let believed = believed.map_or_else(String::new, |trust| format!(", believed to {}", percent(trust)));
            let from = m.total_from.as_ref().map_or_else(String::new, |from| format!(" (by {from}{believed})"));
            let total = m.total.map_or_else(String::new, |t| format!(" of {t}{from}"));
            say(format!(
                "metric    {} = {} at step {step}{total}, from {}",
                printable(&m.name),
                number(m.value),
                m.source
            ));
        }
        None => say("metric    none found yet; name it with --metric, --pattern or --metrics-file".into()),
    }
    if let Some(found) = &job.rhythm {
        let (step, total) = (found.steps, found.total.map_or_else(String::new, |total| format!(" of {total}")));
        say(format!(
            "rhythm    {} steps a second at about step {step}{total}, from its parallel regions and launches",
            number(found.steps_per_s)
        ));
        if let Some(stalled_s) = found.stalled_s {
            say(format!("stall     no region and no launch for {stalled_s:.0} s"));
        }
    }
    if let Some(done) = &job.done {
        let (from, to) = (deadline::local(done.earliest_s), deadline::local(done.latest_s));
        let basis = done.basis.as_ref().map_or_else(String::new, |basis| format!(", by {}", printable(basis)));
        say(format!("done      at {}, four times in five between {from} and {to}{basis}", deadline::local(done.at_s)));
    }
    if let Some(due) = &job.deadline {
        let tolerance =
            if due.tolerance_s > 0.0 { format!(", {:.0} s late is tolerated", due.tolerance_s) } else { String::new() };
        let prospect = due.prospect(job.done.as_ref());
        say(format!("deadline  {}{tolerance}: {prospect}", deadline::local(due.at_s)));
    }
    for note in e.metric_notes.iter().chain(&e.notes) {
        say(format!("note      {}", printable(note)));
    }

    say(String::new());
    text.push_str(&resources(e, out));

    if !e.in_force.is_empty() {
        let _ = writeln!(text, "\n{}", heading("limits in force"));
        for setting in &e.in_force {
            let _ = writeln!(text, "  {}={}", setting.name, setting.value);
        }
    }
    let _ = writeln!(text, "\n{}", heading("neighbours"));
    if e.neighbours.is_empty() {
        text.push_str("  none: it has the machine to itself\n");
    } else {
        let mut table = Table::new(&[("", Side::Left), ("", Side::Right), ("", Side::Left), ("", Side::Left)]);
        for n in &e.neighbours {
            table.row(vec![
                (n.name.clone(), Colour::Plain),
                (optional(n.share, percent), Colour::Plain),
                (optional(n.category.clone(), |c| c), category_colour(n.category.as_deref())),
                (optional(n.growth, |g| format!("growth {}", number(g))), Colour::Plain),
            ]);
        }
        text.push_str(&table.render(out, 2));
    }
    if !e.decisions.is_empty() {
        let _ = writeln!(text, "\n{}", heading("last decisions, newest first"));
        text.push_str(&decisions(&e.decisions, out));
    }
    if !e.start_env.is_empty() {
        let _ = writeln!(text, "\n{}", heading("set at its start (switch off with --plain)"));
        for variable in &e.start_env {
            let _ = writeln!(text, "  {}={}  {}", variable.name, variable.value, out.paint(&variable.why, Colour::Dim));
        }
    }
    text
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
