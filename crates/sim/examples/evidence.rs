//! Makes the tables of `docs/measurements/gain-policy.md`: every experiment under the policies that matter.
//!
//! `cargo run --release -p gainshare-sim --example evidence -- [NAME…] [--totals told|hidden|as-printed]
//! [--history N] [--law turns|pairs|bandwidth] [--recorded] [--rough] [--own-dice] [--forget]
//! [--first-seed N] [--seeds N] [--policies a,b,…] [--gain JSON]`. "Captured" is the part of the gap between equal
//! shares and clairvoyant SRPT.

use gainshare_sim::paper::{Curves, Dice, Settings, Totals, experiments, find};
use gainshare_sim::world::Law;

fn main() -> Result<(), String> {
    let mut settings = Settings::default();
    let mut names: Vec<String> = vec![];
    let mut policies = vec!["srtf".to_owned(), "gainshare".to_owned(), "srpt".to_owned()];
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        let number = |text: String| text.parse::<u64>().map_err(|e| format!("{text}: {e}"));
        match arg.as_str() {
            "--totals" => {
                settings.totals = match value()?.as_str() {
                    "told" => Totals::Told,
                    "hidden" => Totals::Hidden,
                    _ => Totals::AsPrinted,
                }
            }
            "--history" => settings.history = number(value()?)? as u32,
            "--law" => {
                settings.law = match value()?.as_str() {
                    "pairs" => Law::Pairs,
                    "bandwidth" => Law::Bandwidth,
                    _ => Law::Turns,
                }
            }
            "--recorded" => settings.curves = Curves::Recorded,
            "--forget" => settings.remembers = false,
            "--rough" => settings.rough = true,
            "--own-dice" => settings.dice = Dice::Own,
            "--first-seed" => settings.first_seed = number(value()?)?,
            "--seeds" => settings.seeds = number(value()?)?,
            // Numbers of the gain rule as JSON: {"guard":0.5}.
            "--gain" => settings.gain = Some(serde_json::from_str(&value()?).map_err(|e| e.to_string())?),
            "--policies" => policies = value()?.split(',').map(str::to_owned).collect(),
            _ => names.push(arg),
        }
    }
    if names.is_empty() {
        names = experiments().iter().map(|e| e.name.to_owned()).filter(|n| n != "table-6.2").collect();
    }
    settings.only = policies.clone();
    settings.only.push("srpt".to_owned());
    println!(
        "| experiment | policy | mean s | makespan s | captured | faster | worst job | p90 | max | to 90 % | moves |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for name in names {
        let report = find(&name)?.run(&settings, &|_, _| ()).map_err(|e| e.to_string())?;
        let (na, srpt) = (&report.policies["na"], &report.policies["srpt"]);
        for policy in std::iter::once("na").chain(policies.iter().map(String::as_str)) {
            let s = &report.policies[policy];
            let gap = na.mean_completion_s - srpt.mean_completion_s;
            println!(
                "| {name} | {policy} | {:.0} | {:.0} | {:.1} % | {:.0} % | {:+.1} % | {:+.1} % | {:+.1} % | {:.0} | {:.0} |",
                s.mean_completion_s,
                s.makespan_s,
                100.0 * (na.mean_completion_s - s.mean_completion_s) / gap,
                100.0 * s.faster_share,
                100.0 * s.worst_slowdown,
                100.0 * s.worst_slowdown_p90,
                100.0 * s.worst_slowdown_max,
                s.time_to_90,
                s.migrations,
            );
        }
    }
    Ok(())
}
