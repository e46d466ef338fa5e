//! Records decisions of simulated runs as test cases: `cargo run -p gainshare-sim --example decisions --
//! crates/core/tests/decisions`.
//!
//! Each policy runs two small scenarios, or one with deadlines or tasks where it goes by these. The largest decision of
//! each run is written, so that the cases stay few and small but cover every rule. A case that is there already is
//! kept: delete its file to record it again. `-- --hash` instead prints one hash of all plans for each policy and seed:
//! two versions of the code that print the same hashes make the same plans.

use gainshare_core::decider::Decision;
use gainshare_core::policy::{Admission, Finish, Policy, Preset, ScaleRule};
use gainshare_core::replay::RecordedDecision;
use gainshare_sim::engine::{SimError, run_observed};
use gainshare_sim::paper::{operator, qos};
use gainshare_sim::scenario::Scenario;
use gainshare_sim::tasks::{self, Scheduler};
use gainshare_sim::world::World;
use std::path::Path;

const SCENARIOS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios");

fn main() {
    let target = std::env::args().nth(1).expect("a folder to write to, or --hash");
    if target == "--hash" {
        print_hashes();
    } else {
        write_cases(Path::new(&target));
    }
}

/// The scenarios of the folder, sorted by name.
fn scenarios() -> Vec<(String, Scenario)> {
    let entries = std::fs::read_dir(SCENARIOS).expect("the scenarios are there");
    let mut files: Vec<_> = entries.map(|entry| entry.expect("readable").path()).collect();
    files.sort();
    let read = |file: &std::path::PathBuf| {
        let name = file.file_stem().expect("a file").to_string_lossy().into_owned();
        let text = std::fs::read_to_string(file).expect("readable");
        (name.clone(), Scenario::parse(&name, &text).expect("a sound scenario"))
    };
    files.iter().map(read).collect()
}

fn write_cases(folder: &Path) {
    for (name, scenario) in scenarios() {
        if !["cluster", "thesis"].contains(&name.as_str()) {
            continue;
        }
        let world = scenario.world(1);
        for preset in Preset::ALL.into_iter().filter(|preset| !preset.needs_deadlines()) {
            write_case(&folder.join(format!("{}-{name}.json", preset.name())), |largest| {
                run_observed(&world, &Policy::from(preset), &mut |decision| largest.observe(decision)).map(drop)
            });
        }
    }
    for preset in Preset::ALL.into_iter().filter(|preset| preset.needs_deadlines()) {
        let policy = Policy::from(preset);
        if matches!(policy.scale, ScaleRule::Elastic(_)) {
            write_case_with_tasks(&folder.join(format!("{}-tasks.json", preset.name())), policy);
            continue;
        }
        let tells_pace = matches!(policy.scale, ScaleRule::Deadline(Finish { admission: Admission::Final, .. }));
        let mut world = qos::Regime::Short.world(1, tells_pace);
        world.jobs.truncate(JOBS);
        write_case(&folder.join(format!("{}-deadlines.json", preset.name())), |largest| {
            run_observed(&world, &policy, &mut |decision| largest.observe(decision)).map(drop)
        });
    }
}

fn write_case_with_tasks(file: &Path, policy: Policy) {
    let mut world = operator::Regime::Misconfigured.world(1);
    world.jobs.truncate(JOBS);
    let scheduler = Scheduler::Core(Box::new(policy));
    write_case(file, |largest| {
        tasks::run_observed(&world, &scheduler, &mut |decision| largest.observe(decision)).map(drop)
    });
}

/// Jobs of the cases with deadlines or tasks: few, because the files stay in the repository.
const JOBS: usize = 8;

/// Writes the largest decision of a run, unless the file is there.
fn write_case(file: &Path, run: impl FnOnce(&mut LargestDecision) -> Result<(), SimError>) {
    if file.exists() {
        return;
    }
    let mut largest = LargestDecision::default();
    run(&mut largest).expect("a sound run");
    let Some((_, case)) = largest.0 else { return };
    assert_eq!(case.replay().expect("a record can be replayed").differences, vec![]);
    std::fs::write(file, gainshare_record::to_json(&case).expect("a record serialises")).expect("writable");
}

/// The decision that moves most jobs, then the one over most jobs; the last of equals, so that something is
/// remembered.
#[derive(Default)]
struct LargestDecision(Option<((usize, usize), RecordedDecision)>);

impl LargestDecision {
    fn observe(&mut self, decision: &Decision) {
        let plan = &decision.plan;
        let targets = plan.verdicts.values().filter(|v| v.target.is_some()).count();
        let size = (plan.moves.len(), targets + plan.tasks.len());
        if self.0.as_ref().is_none_or(|(largest, _)| size >= *largest) {
            self.0 = decision.record().map(|record| (size, record));
        }
    }
}

fn print_hashes() {
    let specon = gainshare_sim::paper::find("specon-30").expect("it exists");
    let mut worlds: Vec<(String, World)> = vec![];
    for seed in 1..=3 {
        worlds.extend(scenarios().into_iter().map(|(name, scenario)| (format!("{name} {seed}"), scenario.world(seed))));
        worlds.push((format!("specon-30 {seed}"), (specon.world)(seed)));
    }
    for (name, world) in worlds {
        for preset in Preset::ALL {
            let mut policy = Policy::from(preset);
            for reacts in [false, true] {
                policy.react_to_reports = reacts;
                let (mut hash, mut plans) = (0xcbf2_9ce4_8422_2325u64, 0u64);
                let mut observe = |decision: &Decision| {
                    plans += 1;
                    let text = format!("{:?}", decision.plan.as_plan());
                    for byte in text.bytes() {
                        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
                    }
                };
                run_observed(&world, &policy, &mut observe).expect("a sound run");
                println!("{name} {} {reacts} {plans} {hash:016x}", preset.name());
            }
        }
    }
}
