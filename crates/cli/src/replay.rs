//! `replay`: makes the plan of a recorded decision again and says whether it is the same.
//!
//! `explain JOB --dump FILE` records a decision of a running daemon. The exit code is 0 if the plans are
//! the same, bit for bit, and 1 if they differ or the file is not a recorded decision.

use anyhow::{Context, Result, bail};
use gainshare_core::plan::Plan;
use gainshare_core::replay::{Difference, FORMAT, RecordedDecision, Replay};
use gainshare_figures::terminal::{Colour, Printer, Side, Table, optional, percent};
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::io::Read;
use std::path::Path;

/// What a program reads.
#[derive(Serialize)]
struct ReplayResult<'a> {
    same: bool,
    differences: &'a [Difference],
    plan: &'a Plan,
}

pub fn replay(file: &Path, out: &Printer) -> Result<u8> {
    let record = parse(&read(file)?).with_context(|| format!("{} is not a recorded decision", file.display()))?;
    let Replay { plan, differences } = record.replay()?;
    let same = differences.is_empty();
    if out.is_json() {
        out.json(&ReplayResult { same, differences: &differences, plan: &plan })?;
    } else {
        out.text(&render(&plan, &differences, out))?;
    }
    Ok(if same { 0 } else { 1 })
}

fn read(file: &Path) -> Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

fn parse(text: &str) -> Result<RecordedDecision> {
    #[derive(Deserialize)]
    struct Header {
        format: u32,
    }
    // The version first: the rest of a file of another version may look different.
    let Header { format } = serde_json::from_str(text).context("make one with `gainshare explain JOB --dump FILE`")?;
    if format != FORMAT {
        bail!("it is in format {format}, but this version reads format {FORMAT}: use the version that recorded it");
    }
    gainshare_record::from_json(text).context("it is damaged, or another version recorded it")
}

fn render(plan: &Plan, differences: &[Difference], out: &Printer) -> String {
    let mut text = format!("plan {} at {:.3} s\n", plan.generation, plan.at.as_secs_f64());
    for start in &plan.starts {
        let _ = writeln!(text, "start  {} on {}: {}", start.job, start.node, start.why);
    }
    for m in &plan.moves {
        let _ = writeln!(text, "move   {} to {}: {}", m.job, m.to, m.why);
    }
    let mut table = Table::new(&[
        ("JOB", Side::Left),
        ("SHARE", Side::Right),
        ("LIMIT", Side::Right),
        ("CATEGORY", Side::Left),
        ("REASON", Side::Left),
    ]);
    for (job, verdict) in &plan.verdicts {
        table.row(vec![
            (job.to_string(), Colour::Plain),
            (optional(verdict.target, |t| percent(t.share.cpu.get())), Colour::Plain),
            (optional(verdict.target, |t| percent(t.limit.cpu.get())), Colour::Plain),
            (verdict.category.name().to_owned(), Colour::Plain),
            (verdict.reason.to_string(), Colour::Plain),
        ]);
    }
    text.push_str(&table.render(out, 0));
    if differences.is_empty() {
        text.push_str("the same plan as recorded, bit for bit\n");
    } else {
        let _ = writeln!(text, "{}", out.paint("not the recorded plan:", Colour::Red));
        for difference in differences {
            let _ = writeln!(text, "  {difference}");
        }
    }
    text
}
