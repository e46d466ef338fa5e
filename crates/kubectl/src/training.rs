//! `kubectl gainshare explain JOB` and `gantt`: where jobs ran, and why there.
//!
//! Everything is read from the status of TrainingJobs and from the annotation of adopted Jobs,
//! which the operator writes before it acts. A job keeps its last few moves. For a job that moved
//! more often, the first bar of the picture still begins at its first start.

use anyhow::{Context, Result};
use gainshare_figures::file::{self, Drawing};
use gainshare_figures::terminal::{Colour, Printer, Side, Table};
use gainshare_figures::{Bar, Gantt, Row};
use gainshare_kube_api::adopted::AdoptedJob;
use gainshare_kube_api::aim::AimKind;
use gainshare_kube_api::deadline::FinishStatus;
use gainshare_kube_api::deadline_input;
use gainshare_kube_api::names::NodeName;
use gainshare_kube_api::tasks::TaskTraffic;
use gainshare_kube_api::training_job::{JobPolicy, Move, TrainingJob};
use jiff::Timestamp;
use k8s_openapi::api::batch::v1::Job;
use kube::Client;
use kube::api::{Api, ListParams};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One stay of a job on a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Stay {
    job: String,
    node: NodeName,
    from: Timestamp,
    /// Absent while it runs.
    to: Option<Timestamp>,
    /// `-M`: moved there; `-R`: moved there to even things out, or home.
    mark: &'static str,
    /// Why it came there.
    why: String,
}

/// What is printed about a job.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct JobReport {
    kind: &'static str,
    namespace: String,
    job: String,
    policy: JobPolicy,
    /// What the policy makes as early as possible, where that can be chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    aim: Option<AimKind>,
    state: String,
    message: String,
    node: Option<NodeName>,
    attempt: u32,
    category: Option<String>,
    share_percent: Option<u32>,
    /// How much of the training is done, and how long the rest takes.
    progress: Option<String>,
    time_left: Option<String>,
    last_decision: Option<String>,
    /// Why it is not moved, if so.
    unmovable: Option<String>,
    /// The job's deadline, the predicted end, and the nodes that are needed, for a job with a deadline.
    finish: Option<FinishStatus>,
    /// How the deadline stands, in words.
    #[serde(skip)]
    prospect: String,
    /// What each task sends and receives, in bytes per second, as far as it was measured.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    traffic: TaskTraffic,
    moves: u32,
    last_moves: Vec<Move>,
    /// When it first ran, and when it ended.
    began: Option<Timestamp>,
    ended: Option<Timestamp>,
}

/// Explains the job of that name, if there is one.
pub(super) async fn explain(client: &Client, namespace: &str, name: &str, out: &Printer) -> Result<bool> {
    let ours: Api<TrainingJob> = Api::namespaced(client.clone(), namespace);
    let adopted: Api<Job> = Api::namespaced(client.clone(), namespace);
    // Where the kind is not installed there is no such job either.
    let report = match ours.get_opt(name).await {
        Ok(Some(job)) => Some(report_of(&job)),
        _ => adopted.get_opt(name).await.ok().flatten().and_then(|job| AdoptedJob::of(&job)).map(report_of_adopted),
    };
    let Some(report) = report else { return Ok(false) };
    if out.is_json() {
        out.json(&report)?;
    } else {
        out.text(&sentences(&report, out))?;
    }
    Ok(true)
}

/// The uid of the TrainingJob or adopted Job of that name, if there is one.
pub(super) async fn uid(client: &Client, namespace: &str, name: &str) -> Option<String> {
    let ours: Api<TrainingJob> = Api::namespaced(client.clone(), namespace);
    if let Ok(Some(job)) = ours.get_opt(name).await {
        return job.metadata.uid;
    }
    let adopted: Api<Job> = Api::namespaced(client.clone(), namespace);
    let job = adopted.get_opt(name).await.ok().flatten()?;
    AdoptedJob::of(&job)?;
    job.metadata.uid
}

fn report_of(job: &TrainingJob) -> JobReport {
    let status = job.status.clone().unwrap_or_default();
    let unmovable = status.unmovable.or_else(|| {
        let missing = "it names no checkpoint (spec.checkpoint), so it could not be resumed elsewhere";
        job.spec.checkpoint.is_none().then(|| missing.to_owned())
    });
    let finish = status.finish.filter(|finish| finish.deadline.is_some());
    let tolerance = deadline_input::tolerance(&job.spec);
    JobReport {
        kind: "TrainingJob",
        namespace: job.metadata.namespace.clone().unwrap_or_default(),
        job: job.metadata.name.clone().unwrap_or_default(),
        policy: job.spec.policy,
        aim: job.spec.policy.has_aim().then(|| job.spec.aim.unwrap_or_default()),
        state: format!("{:?}", status.state),
        message: status.message,
        node: status.attempt.as_ref().and_then(|attempt| attempt.node.clone()),
        attempt: status.attempt.map_or(0, |attempt| attempt.epoch),
        category: status.category,
        share_percent: status.share_percent,
        progress: status.progress,
        time_left: status.time_left,
        last_decision: status.last_decision,
        unmovable,
        prospect: finish.as_ref().map_or_else(String::new, |finish| finish.prospect(tolerance).to_string()),
        finish,
        traffic: status.tasks.map(|tasks| tasks.traffic).unwrap_or_default(),
        moves: status.moves,
        last_moves: status.last_moves,
        began: status.start_time.map(|time| time.0),
        ended: status.completion_time.map(|time| time.0),
    }
}

fn report_of_adopted(job: AdoptedJob) -> JobReport {
    JobReport {
        kind: "Job",
        namespace: job.namespace,
        job: job.name,
        policy: job.policy,
        // It is on the pods of the Job.
        aim: None,
        state: job.state.to_owned(),
        message: job.message,
        node: job.node,
        attempt: job.moves.saturating_add(1),
        category: None,
        share_percent: None,
        progress: None,
        time_left: None,
        last_decision: job.last_moves.last().map(|made| made.message.clone()),
        unmovable: job.unmovable,
        finish: None,
        prospect: String::new(),
        traffic: TaskTraffic::new(),
        moves: job.moves,
        last_moves: job.last_moves,
        began: job.began,
        ended: job.ended,
    }
}

fn sentences(report: &JobReport, out: &Printer) -> String {
    let title = format!("{} {}/{}", report.kind, report.namespace, report.job);
    let mut text = format!("{}\n", out.paint(&title, Colour::Bold));
    let mut line = |name: &str, value: &str| text.push_str(&format!("  {name:<11} {value}\n"));
    let and = if report.message.is_empty() { String::new() } else { format!(": {}", report.message) };
    line("state", &format!("{}{and}", report.state));
    line("policy", report.policy.name());
    if let Some(aim) = report.aim {
        line("aim", &aim.text());
    }
    line("node", &format!("{} (attempt {})", report.node.as_deref().unwrap_or("-"), report.attempt));
    if let Some(category) = &report.category {
        let share =
            report.share_percent.map_or(String::new(), |s| format!(", {s}% of what the jobs of its node share"));
        line("category", &format!("{category}{share}"));
    }
    if let Some(progress) = &report.progress {
        let left = report.time_left.as_ref().map_or(String::new(), |left| format!(", {left} left"));
        line("progress", &format!("{progress}{left}"));
    }
    if let Some(finish) = &report.finish {
        let end = finish.predicted.as_ref().map(|end| format!(", done at {end} as predicted")).unwrap_or_default();
        let deadline = finish.deadline.as_deref().unwrap_or_default();
        line("deadline", &format!("{deadline} ({}{end})", report.prospect));
        if let Some(needed) = &finish.nodes_needed {
            line("needs", &format!("{needed} to finish in time"));
        }
    }
    if !report.traffic.is_empty() {
        line("traffic", &traffic_text(&report.traffic));
    }
    line("decided", report.last_decision.as_deref().unwrap_or("nothing yet about where it runs"));
    for made in &report.last_moves {
        let cost = format!("saved in {:.1} s, running again {:.1} s later", made.save_s, made.restore_s);
        let at = made.at.0.strftime("%H:%M:%S");
        if made.from == made.to {
            line("stayed", &format!("{at} on {}: {} ({cost})", made.from, made.message));
        } else {
            line("moved", &format!("{at} {} → {}: {} ({cost})", made.from, made.to, made.message));
        }
    }
    let moves_converged_jobs = report.policy.moves_converged_jobs();
    match &report.unmovable {
        _ if !report.policy.moves_jobs() => line("stays", "its policy moves no job"),
        Some(why) => line("stays", why),
        None if !report.last_moves.is_empty() => {}
        None if moves_converged_jobs && report.category.as_deref() != Some("converged") => {
            line("stays", "it has not converged yet: only jobs that have make room for others");
        }
        None if moves_converged_jobs => {
            line("stays", "at most one job beside it still grows, or no other node has a lower score");
        }
        None => line("stays", "no other node has offered more than a move costs, so far"),
    }
    text
}

/// The tasks that send and receive most, and how many others there are.
fn traffic_text(traffic: &TaskTraffic) -> String {
    const SHOWN: usize = 6;
    let mut tasks: Vec<(&String, &u64)> = traffic.iter().collect();
    tasks.sort_by_key(|(name, bytes_s)| (std::cmp::Reverse(**bytes_s), *name));
    let text = |(name, bytes_s): &(&String, &u64)| format!("{name} {:.1} MB/s", **bytes_s as f64 / 1e6);
    let shown: Vec<String> = tasks.iter().take(SHOWN).map(text).collect();
    let rest = match tasks.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!(", and {more} others"),
    };
    format!("{}{rest}", shown.join(", "))
}

/// Prints where jobs ran, or draws it.
pub(super) async fn gantt(
    client: &Client,
    namespace: Option<&str>,
    figure: Option<&Path>,
    out: &Printer,
) -> Result<()> {
    file::check(figure, false)?;
    let (ours, adopted): (Api<TrainingJob>, Api<Job>) = match namespace {
        Some(namespace) => (Api::namespaced(client.clone(), namespace), Api::namespaced(client.clone(), namespace)),
        None => (Api::all(client.clone()), Api::all(client.clone())),
    };
    let all = ListParams::default();
    let ours = ours.list(&all).await;
    let ours = ours.context("cannot list TrainingJobs: is Gainshare installed, and may you read them?")?;
    // A user who may not read Jobs still gets the TrainingJobs.
    let adopted = adopted.list(&all).await.map(|list| list.items).unwrap_or_default();
    let adopted = adopted.iter().filter_map(AdoptedJob::of).map(report_of_adopted);
    let jobs: Vec<JobReport> = ours.items.iter().map(report_of).chain(adopted).collect();
    let stays: Vec<Stay> = jobs.iter().flat_map(stays).collect();
    if let Some(path) = figure {
        let svg = picture(&stays, Timestamp::now()).svg();
        file::write(path, &Drawing { svg: Some(&svg), page: None })?;
        if !out.is_json() {
            return Ok(out.text(&format!("{} stays of {} jobs: {}\n", stays.len(), jobs.len(), path.display()))?);
        }
    }
    if out.is_json() {
        return Ok(out.json(&stays)?);
    }
    if stays.is_empty() {
        return Ok(out.text("No TrainingJob or adopted Job has run here yet.\n")?);
    }
    let columns =
        [("JOB", Side::Left), ("NODE", Side::Left), ("FROM", Side::Left), ("TO", Side::Left), ("WHY", Side::Left)];
    let mut table = Table::new(&columns);
    let clock = |at: Timestamp| at.strftime("%H:%M:%S").to_string();
    for stay in &stays {
        let plain = |text: &str| (text.to_owned(), Colour::Plain);
        table.row(vec![
            (format!("{}{}", stay.job, stay.mark), Colour::Bold),
            plain(&stay.node),
            plain(&clock(stay.from)),
            plain(&stay.to.map_or("-".to_owned(), clock)),
            (stay.why.clone(), Colour::Dim),
        ]);
    }
    Ok(out.text(&table.render(out, 0))?)
}

/// Where a job was, in order.
fn stays(job: &JobReport) -> Vec<Stay> {
    let Some(began) = job.began else { return vec![] };
    let mut stays: Vec<Stay> = vec![];
    let mut next = Stay {
        job: job.job.clone(),
        node: job.node.clone().unwrap_or_default(),
        from: began,
        to: job.ended,
        mark: "",
        why: String::new(),
    };
    if let Some(first) = job.last_moves.first() {
        next.node = first.from.clone();
    }
    for made in &job.last_moves {
        let stopped = ago(made.at.0, made.restore_s);
        stays.push(Stay { to: Some(stopped), ..next.clone() });
        next = Stay { node: made.to.clone(), from: made.at.0, mark: "", why: made.message.clone(), ..next };
        if made.from != made.to {
            // Older versions did not record the reason.
            next.mark = made.reason.unwrap_or_default().mark();
        }
    }
    stays.push(next);
    stays
}

fn ago(at: Timestamp, seconds: f64) -> Timestamp {
    let micros = (seconds.clamp(0.0, 1e9) * 1e6) as i64;
    Timestamp::from_microsecond(at.as_microsecond().saturating_sub(micros)).unwrap_or(at)
}

/// The same picture as the simulator's.
fn picture(stays: &[Stay], now: Timestamp) -> Gantt {
    let origin = stays.iter().map(|stay| stay.from).min().unwrap_or(now);
    let seconds = |at: Timestamp| at.as_microsecond().saturating_sub(origin.as_microsecond()) as f64 / 1e6;
    let mut nodes: Vec<&str> = stays.iter().map(|stay| stay.node.as_str()).collect();
    nodes.sort_unstable();
    nodes.dedup();
    let mut jobs: Vec<&str> = stays.iter().map(|stay| stay.job.as_str()).collect();
    jobs.sort_unstable();
    jobs.dedup();
    let bar = |stay: &Stay| Bar {
        from: seconds(stay.from),
        to: seconds(stay.to.unwrap_or(now)),
        label: format!("{}{}", stay.job, stay.mark),
        tone: jobs.binary_search(&stay.job.as_str()).unwrap_or(0),
    };
    let row = |node: &&str| Row {
        label: (*node).to_owned(),
        bars: stays.iter().filter(|stay| stay.node == *node).map(bar).collect(),
    };
    Gantt {
        title: "Where each job ran (-M: moved, -R: moved to even things out or home)".to_owned(),
        x_label: format!("seconds since {origin:.0}"),
        rows: nodes.iter().map(row).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn job(status: serde_json::Value) -> TrainingJob {
        serde_json::from_value(json!({
            "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": "vae", "namespace": "team"}, "spec": {"template": {}}, "status": status,
        }))
        .unwrap()
    }

    fn moved() -> TrainingJob {
        job(json!({
            "state": "Succeeded", "message": "it ended with code 0", "moves": 1,
            "startTime": "2026-01-01T10:00:00.000000Z", "completionTime": "2026-01-01T10:01:40.000000Z",
            "attempt": {"epoch": 2, "pod": "vae-2", "node": "b", "since": "2026-01-01T10:00:40.000000Z"},
            "lastMoves": [{
                "at": "2026-01-01T10:00:43.000000Z", "from": "a", "to": "b", "saveS": 1.0, "restoreS": 2.0,
                "message": "has converged beside jobs that still grow, and b has the lowest score: moves there",
            }],
        }))
    }

    #[test]
    fn a_move_makes_two_stays_with_a_gap_and_a_mark() {
        let stays = stays(&report_of(&moved()));
        let seconds = |at: Timestamp| at.as_second() - "2026-01-01T10:00:00Z".parse::<Timestamp>().unwrap().as_second();
        let bars: Vec<_> =
            stays.iter().map(|s| (s.node.as_str(), seconds(s.from), s.to.map(seconds), s.mark)).collect();
        assert_eq!(bars, [("a", 0, Some(41), ""), ("b", 43, Some(100), "-M")]);
        let svg = picture(&stays, Timestamp::now()).svg();
        assert!(svg.contains("vae-M") && svg.contains(">a<") && svg.contains(">b<"), "{svg}");
    }

    #[test]
    fn the_aim_is_explained_where_there_is_one() {
        let mut job = moved();
        let mut said = |policy: &str, aim: Option<AimKind>| {
            (job.spec.policy, job.spec.aim) = (JobPolicy::try_from(policy.to_owned()).unwrap(), aim);
            sentences(&report_of(&job), &Printer::new(gainshare_figures::terminal::Format::Table))
        };
        let text = said("gainshare", None);
        assert!(text.contains("finish: jobs end as early as possible"), "{text}");
        let text = said("gainshare", Some(AimKind::Quality));
        assert!(text.contains("quality: jobs make nine tenths of their improvement"), "{text}");
        let text = said("specon", None);
        assert!(!text.contains("  aim "), "{text}");
    }

    #[test]
    fn a_deadline_is_explained_with_the_nodes_that_it_needs() {
        let needed = json!({"count": 2, "cpu": "3920m", "memory": "16384Mi", "instanceType": "m5.xlarge"});
        let finish = json!({
            "deadline": "2026-03-01T17:00:00Z", "standing": "AtRisk", "predicted": "2026-03-01T18:10:00Z",
            "nodesNeeded": needed,
        });
        let status = json!({"state": "Running", "finish": finish, "progress": "40%", "timeLeft": "1h20m"});
        let report = report_of(&job(status));
        let text = sentences(&report, &Printer::new(gainshare_figures::terminal::Format::Table));
        assert!(
            text.contains("2026-03-01T17:00:00Z (will be missed, done at 2026-03-01T18:10:00Z as predicted)"),
            "{text}"
        );
        assert!(text.contains("40%, 1h20m left"), "{text}");
        assert!(text.contains("2 more nodes of 3.9 cores / 16 GiB (m5.xlarge) to finish in time"), "{text}");
        assert!(
            !sentences(&report_of(&moved()), &Printer::new(gainshare_figures::terminal::Format::Table))
                .contains("deadline")
        );
    }

    #[test]
    fn an_adopted_job_is_explained_like_a_training_job() {
        let journal = json!({
            "message": "runs on b as run-2", "node": "b", "began": "2026-01-01T10:00:00.000000Z", "moves": 1,
            "lastMoves": [{
                "at": "2026-01-01T10:00:43.000000Z", "from": "a", "to": "b", "saveS": 1.0, "restoreS": 2.0,
                "reason": "Rebalance", "message": "every job has converged and b has less to do: moves there",
            }],
        });
        let mut job: Job = serde_json::from_value(json!({
            "metadata": {
                "name": "run", "namespace": "team", "uid": "u",
                "annotations": {"gainshare.dev/adopt": "true", "gainshare.dev/adopted": journal.to_string()},
            },
            "spec": {"template": {"spec": {"containers": []}}},
            "status": {"conditions": [
                {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T10:01:40Z"},
            ]},
        }))
        .unwrap();
        let report = report_of_adopted(AdoptedJob::of(&job).unwrap());
        let stays = stays(&report);
        assert_eq!(stays.iter().map(|s| (s.node.as_str(), s.mark)).collect::<Vec<_>>(), [("a", ""), ("b", "-R")]);
        assert_eq!(stays[1].to, Some("2026-01-01T10:01:40Z".parse().unwrap()));
        let text = sentences(&report, &Printer::new(gainshare_figures::terminal::Format::Table));
        assert!(text.contains("Job team/run") && text.contains("Complete") && text.contains("a → b"), "{text}");
        assert!(text.contains("podReplacementPolicy"), "{text}");
        job.metadata.annotations = None;
        assert_eq!(AdoptedJob::of(&job), None);
    }

    #[test]
    fn a_job_that_never_ran_has_no_bar() {
        assert_eq!(stays(&report_of(&job(json!({})))), []);
    }

    #[test]
    fn explanations_say_why_a_job_moved_or_stays() {
        let out = Printer::new(gainshare_figures::terminal::Format::Table);
        let text = sentences(&report_of(&moved()), &out);
        assert!(text.contains("a → b") && text.contains("has converged") && text.contains("saved in 1.0 s"), "{text}");
        assert!(text.contains("names no checkpoint"), "{text}");
        let mut still = moved();
        still.spec.checkpoint = Some(Default::default());
        still.status.as_mut().unwrap().last_moves.clear();
        let text = sentences(&report_of(&still), &out);
        assert!(text.contains("no other node has offered more"), "{text}");
    }

    #[test]
    fn the_traffic_of_tasks_is_shown_the_largest_first() {
        let traffic = json!({"ps-0": 1_200_000, "ps-1": 90_000_000, "worker-0": 40_000_000});
        let report = report_of(&job(json!({"tasks": {"traffic": traffic}})));
        assert_eq!(traffic_text(&report.traffic), "ps-1 90.0 MB/s, worker-0 40.0 MB/s, ps-0 1.2 MB/s");
        let many: TaskTraffic = (0..9).map(|index| (format!("worker-{index}"), 1)).collect();
        assert!(traffic_text(&many).ends_with(", and 3 others"), "{}", traffic_text(&many));
        assert!(report_of(&job(json!({}))).traffic.is_empty());
    }
}
