//! Deadlines in the simulator: the bars of `gainshare paper qos` on few seeds, and single worlds whose
//! outcome can be worked out by hand.

use gainshare_core::policy::{Policy, Preset};
use gainshare_sim::engine::{Record, run};
use gainshare_sim::outcome::Outcome;
use gainshare_sim::paper::qos::{self, Conditions, Regime};
use gainshare_sim::scenario::Scenario;
use gainshare_sim::study::compare;

/// Worlds in which `qos` is held against ElasticFlow. Each has 48 jobs, so the mean over them is known to some percent.
/// Two of the twelve runs of `gainshare paper qos` are made for each.
const RIVAL_SEEDS: u64 = 8;

#[test]
#[ignore = "needs half a minute of simulation"]
fn deadlines_are_met_as_published_and_not_below_the_rivals() {
    let report = qos::run(Conditions::of(6), &|_, _| ()).expect("a sound run");
    let rate = |regime: &str, policy: &str| report.regimes[regime][policy].completion_rate;
    let (base, ours) = (rate("short", "default"), rate("short", "qos"));
    assert!(ours >= 1.26 * base, "{ours} against {base}: {report:?}");
    for regime in ["short", "enough"] {
        assert!(rate(regime, "qos") >= rate(regime, "edf"), "{regime}: {report:?}");
        // With the same information as ElasticFlow, which knows every length and speed.
        assert!(rate(regime, "qos-told") >= rate(regime, "elasticflow"), "{regime}: {report:?}");
        assert!(rate(regime, "qos") >= rate(regime, "elasticflow-learned"), "{regime}: {report:?}");
        assert!(report.regimes[regime]["qos"].utilisation >= 0.95, "{regime}: {report:?}");
    }
    // Seeds that are not those of the figures. What other jobs of a program have shown is worth something.
    let learning = |remembers| Conditions { first_seed: 100, remembers, ..Conditions::of(6) };
    let [with, without] = [true, false].map(|remembers| {
        let report = qos::run(learning(remembers), &|_, _| ()).expect("a sound run");
        report.regimes["short"]["qos"].met
    });
    assert!(with > without, "{with} and {without} deadlines met");
    assert_eq!(rate("enough", "qos"), 1.0, "{report:?}");
    assert!(rate("enough", "default") < 1.0, "{report:?}");
}

/// ElasticFlow knows the length and the speed of every job when it arrives, and admits by them. `qos` learns both.
#[test]
#[ignore = "needs half a minute of simulation"]
fn as_many_deadlines_are_met_as_by_the_admission_of_elasticflow() {
    let mean_rate = |name: &str| {
        let find = |(known, ..): &(&str, Policy, bool)| *known == name;
        let (_, policy, told) = qos::policies().into_iter().find(find).expect("a policy of the experiment");
        let world = |seed| Regime::Short.world(seed, told);
        let outcomes = compare(&world, &[policy], 0..RIVAL_SEEDS, Record::default(), &|_| ()).expect("a sound run");
        let rates: Vec<f64> = outcomes[0].iter().filter_map(Outcome::deadlines_met).collect();
        assert_eq!(rates.len(), RIVAL_SEEDS as usize, "every world has deadlines");
        rates.iter().sum::<f64>() / rates.len() as f64
    };
    let (ours, theirs) = (mean_rate("qos"), mean_rate("elasticflow"));
    assert!(ours >= theirs, "{ours} of the deadlines are met, and {theirs} by ElasticFlow");
}

fn met(text: &str, preset: Preset) -> Vec<(String, Option<bool>)> {
    let scenario = Scenario::parse("test", text).expect("a sound scenario");
    let outcome = run(&scenario.world(0), &Policy::from(preset), Record::default()).expect("a sound run");
    outcome.jobs.iter().map(|j| (j.name.clone(), j.met())).collect()
}

const LOSS: &str = "loss = { start = 1.0, end = 0.2, shape = { family = \"exponential\", rate = 5.0 } }";

#[test]
fn a_deadline_that_equal_shares_miss_is_met_and_the_other_job_takes_the_rest() {
    let text = format!(
        "[[node]]\nname = \"box\"\ncores = 8\n\n[[job]]\nname = \"urgent\"\nseconds_alone = 60\ndeadline_s = 90\n\
         tells_total = true\n{LOSS}\n\n[[job]]\nname = \"other\"\nseconds_alone = 100\ntells_total = true\n{LOSS}\n"
    );
    // Equal shares: 120 s. Two thirds of the node make it.
    assert_eq!(met(&text, Preset::Na)[0].1, Some(false));
    let ours = met(&text, Preset::Qos);
    assert_eq!(ours, [("urgent".to_owned(), Some(true)), ("other".to_owned(), None)]);
}

#[test]
fn an_impossible_deadline_hurts_no_feasible_one() {
    let text = format!(
        "[[node]]\nname = \"box\"\ncores = 8\n\n[[job]]\nname = \"hopeless\"\nseconds_alone = 100\ndeadline_s = 50\n\
         tells_total = true\n{LOSS}\n\n[[job]]\nname = \"feasible\"\nseconds_alone = 60\ndeadline_s = 75\n\
         tells_total = true\n{LOSS}\n"
    );
    let by_name = |preset, name: &str| met(&text, preset).into_iter().find(|(n, _)| n == name).expect("a job").1;
    assert_eq!(by_name(Preset::Edf, "feasible"), Some(false));
    assert_eq!(by_name(Preset::Qos, "feasible"), Some(true));
    assert_eq!(by_name(Preset::Qos, "hopeless"), Some(false));
}
