//! The `train-ps` jobs of `kube-ps`: as TrainingJobs, and as the pods and Services that a stock operator would make.

use super::train::IMAGE;
use serde_json::{Value, json};

/// The label of a job's pods, in both rounds.
pub(super) const JOB_LABEL: &str = "story-job";
const TASK_LABEL: &str = "story-task";
const PORT: u16 = 2222;
/// Where the containers of a job that saves itself see the claim.
const CHECKPOINTS: &str = "/checkpoints";

/// One distributed job.
#[derive(Debug, Clone)]
pub(super) struct PsJob {
    pub(super) name: String,
    pub(super) arrives_s: f64,
    pub(super) steps: u64,
    model: &'static str,
    batch: Option<u32>,
    hidden: Option<u32>,
    is_async: bool,
    report_every: u64,
    servers: u32,
    server_milli: u64,
    /// The number that the author asks for, the smallest and the largest.
    workers: (u32, u32, u32),
    worker_milli: u64,
    /// Steps between two checkpoints, for a job that saves itself.
    pub(super) checkpoint_every: Option<u64>,
}

/// How the author of a job guessed: servers and their CPU, workers and their CPU. Two guesses starve the workers,
/// one starves the servers, one wastes CPU on them.
const GUESSES: [(u32, u64, u32, u64); 4] = [(1, 60, 2, 50), (2, 25, 1, 120), (1, 150, 1, 60), (1, 40, 1, 80)];

/// The jobs of one arrival. The number of the arrival moves them in time.
pub(super) fn schedule(number: u64, rate: f64, work_s: f64, short: bool) -> Vec<PsJob> {
    let count = if short { 2 } else { GUESSES.len() };
    let gap_s = if short { 2.0 } else { 8.0 };
    let job = |(at, (servers, server_milli, workers, worker_milli)): (usize, (u32, u64, u32, u64))| {
        // A fixed row of numbers between 0 and 1 for each arrival.
        let moved = ((number * 7 + at as u64 * 5) % 11) as f64 / 11.0;
        PsJob {
            name: format!("job-{at}"),
            arrives_s: gap_s * (at as f64 + if at == 0 { 0.0 } else { moved - 0.5 }),
            steps: ((rate * work_s) as u64).max(100),
            model: "gru",
            batch: None,
            hidden: None,
            is_async: at % 2 == 1,
            report_every: ((rate / 20.0) as u64).max(1),
            servers,
            server_milli,
            // A synchronous step takes one batch of every worker, so more workers do not make a number of steps faster.
            workers: if at % 2 == 1 { (workers, 1, 3) } else { (workers, workers, workers) },
            worker_milli,
            checkpoint_every: None,
        }
    };
    GUESSES.into_iter().enumerate().take(count).map(job).collect()
}

impl PsJob {
    /// A job whose servers have a large part of the work: one example a step. A report measures the loss on many
    /// examples, which is work of the worker, so reports are rare.
    pub(super) fn hot() -> PsJob {
        PsJob {
            name: "hot".to_owned(),
            arrives_s: 0.0,
            steps: 100_000_000,
            model: "mlp",
            batch: Some(1),
            hidden: Some(64),
            is_async: false,
            report_every: 50,
            servers: 2,
            server_milli: 150,
            workers: (1, 1, 1),
            worker_milli: 200,
            checkpoint_every: None,
        }
    }

    /// A job of two servers that saves itself to the claim `checkpoints`. It does not end by itself.
    pub(super) fn saving(rate: f64) -> PsJob {
        PsJob {
            name: "saving".to_owned(),
            model: "gru",
            batch: None,
            hidden: None,
            report_every: ((rate / 50.0) as u64).max(1),
            server_milli: 100,
            checkpoint_every: Some(((rate / 2.0) as u64).max(20)),
            ..PsJob::hot()
        }
    }

    /// A job whose workers may come and go. It does not end by itself.
    pub(super) fn breathing(rate: f64) -> PsJob {
        PsJob {
            name: "breathe".to_owned(),
            arrives_s: 0.0,
            steps: 100_000_000,
            model: "gru",
            batch: None,
            hidden: None,
            is_async: false,
            report_every: ((rate / 50.0) as u64).max(1),
            servers: 1,
            server_milli: 100,
            workers: (1, 1, 3),
            worker_milli: 100,
            checkpoint_every: None,
        }
    }

    fn address(&self, namespace: &str, role: &str, index: u32) -> String {
        format!("{}-{role}-{index}.{namespace}.svc:{PORT}", self.name)
    }

    fn container(&self, namespace: &str, milli: u64) -> Value {
        let mut words: Vec<String> =
            ["train-ps", self.model, "--format", "json", "--workers", "1"].map(str::to_owned).into();
        words.extend(["--steps".to_owned(), self.steps.to_string()]);
        words.extend(["--report-every".to_owned(), self.report_every.to_string()]);
        words.extend(["--mode".to_owned(), if self.is_async { "async" } else { "sync" }.to_owned()]);
        if let Some(batch) = self.batch {
            words.extend(["--batch".to_owned(), batch.to_string()]);
        }
        if let Some(hidden) = self.hidden {
            words.extend(["--hidden".to_owned(), hidden.to_string()]);
        }
        if let Some(every) = self.checkpoint_every {
            words.extend(["--checkpoint", CHECKPOINTS, "--checkpoint-every"].map(str::to_owned));
            words.push(every.to_string());
        }
        // The role and the number come from TF_CONFIG.
        let servers: Vec<String> = (0..self.servers).map(|index| self.address(namespace, "ps", index)).collect();
        words.extend(["--servers".to_owned(), servers.join(","), "--listen".to_owned(), format!("0.0.0.0:{PORT}")]);
        let cpu = format!("{milli}m");
        json!({
            "name": "tensorflow", "image": IMAGE, "imagePullPolicy": "Never", "args": words,
            "resources": { "requests": { "cpu": cpu, "memory": "40Mi" }, "limits": { "cpu": cpu, "memory": "160Mi" } },
        })
    }

    /// The job under the policy `operator`.
    pub(super) fn training_job(&self, namespace: &str) -> Value {
        let labels = json!({ JOB_LABEL: self.name });
        let template = |milli: u64| json!({ "metadata": { "labels": labels }, "spec": { "containers": [self.container(namespace, milli)] } });
        let (workers, min, max) = self.workers;
        let mut worker_role = json!({ "replicas": workers, "template": template(self.worker_milli) });
        if min < max {
            (worker_role["minReplicas"], worker_role["maxReplicas"]) = (json!(min), json!(max));
        }
        let mode = if self.is_async { "async" } else { "sync" };
        let mut job = json!({
            "apiVersion": "gainshare.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {
                "name": self.name, "namespace": namespace, "annotations": { "gainshare.dev/training-mode": mode },
            },
            "spec": {
                "policy": "operator",
                "runPolicy": { "terminationGracePeriodSeconds": 2 },
                "replicaSpecs": {
                    "PS": { "replicas": self.servers, "template": template(self.server_milli) },
                    "Worker": worker_role,
                },
            },
        });
        if self.checkpoint_every.is_some() {
            job["spec"]["checkpoint"] = json!({ "claimName": "checkpoints", "path": CHECKPOINTS });
        }
        job
    }

    /// The same tasks as one list, so that both rounds make one request to begin a job.
    pub(super) fn stock_list(&self, namespace: &str) -> Value {
        json!({ "apiVersion": "v1", "kind": "List", "items": self.stock_objects(namespace) })
    }

    /// The same tasks as pods with Services, as a stock operator makes them.
    fn stock_objects(&self, namespace: &str) -> Vec<Value> {
        let hosts =
            |role: &str, count: u32| (0..count).map(|index| self.address(namespace, role, index)).collect::<Vec<_>>();
        let cluster = json!({ "ps": hosts("ps", self.servers), "worker": hosts("worker", self.workers.0) });
        let mut objects = Vec::new();
        for (role, count, milli) in
            [("ps", self.servers, self.server_milli), ("worker", self.workers.0, self.worker_milli)]
        {
            for index in 0..count {
                let name = format!("{}-{role}-{index}", self.name);
                let labels = json!({ JOB_LABEL: self.name, TASK_LABEL: name });
                let config = json!({ "cluster": cluster, "task": { "type": role, "index": index } }).to_string();
                let mut container = self.container(namespace, milli);
                container["env"] = json!([{ "name": "TF_CONFIG", "value": config }]);
                objects.push(json!({
                    "apiVersion": "v1", "kind": "Service", "metadata": { "name": name, "namespace": namespace },
                    "spec": {
                        "clusterIP": "None", "publishNotReadyAddresses": true, "selector": { TASK_LABEL: name },
                        "ports": [{ "port": PORT }],
                    },
                }));
                objects.push(json!({
                    "apiVersion": "v1", "kind": "Pod",
                    "metadata": { "name": name, "namespace": namespace, "labels": labels },
                    "spec": {
                        "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": 2, "containers": [container],
                    },
                }));
            }
        }
        objects
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_rounds_have_the_same_tasks_with_the_same_requests() {
        for job in schedule(1, 100.0, 2.0, false) {
            let objects = job.stock_objects("n");
            let stock: Vec<&Value> = objects.iter().filter(|object| object["kind"] == "Pod").collect();
            let ours = job.training_job("n");
            let roles = &ours["spec"]["replicaSpecs"];
            let count = |role: &str| roles[role]["replicas"].as_u64().unwrap() as usize;
            assert_eq!(stock.len(), count("PS") + count("Worker"));
            for pod in stock {
                let role = if pod["metadata"]["name"].as_str().unwrap().contains("-ps-") { "PS" } else { "Worker" };
                let mut container = pod["spec"]["containers"][0].clone();
                container.as_object_mut().unwrap().remove("env");
                assert_eq!(container, roles[role]["template"]["spec"]["containers"][0]);
            }
        }
    }
}
