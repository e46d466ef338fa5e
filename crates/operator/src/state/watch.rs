//! Keeps the world up to date: one watch and one cache per kind, for all rooms of the operator.
//!
//! A watch that breaks is started again with growing pauses, of at most some seconds, so that the
//! operator is back soon after the API server is. The first complete list of every kind must have
//! been read before anything is decided: without its policies, every pod would look as if it were
//! to be restored.
//!
//! Objects with values that no cluster can have are found here, too ([`super::invalid_objects`]).
//!
//! An object that makes its reader panic is logged and skipped ([`skip_on_panic`]); the watch and
//! all other objects go on.

use super::lead::{Leader, Lists};
use super::metrics::Metrics;
use super::snapshot::JobSnapshot;
use super::task_job::TaskJobSnapshot;
use super::workload::WorkloadKind;
use super::world::World;
use crate::isolate::skip_on_panic;
use crate::tasks::Tasks;
use futures_util::StreamExt;
use gainshare_kube_api::adopted::BatchJobSnapshot;
use gainshare_kube_api::bounds::{NodeFacts, QuotaFacts, RangeFacts};
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::NamespacedName;
use gainshare_kube_api::select::PolicyFacts;
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::tfjob::TfJob;
use gainshare_kube_api::training_job::TrainingJob;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, LimitRange, Namespace, Node, Pod, ResourceQuota};
use kube::api::Api;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// In the operator's ConfigMap: `off` gives every pod its own values back, whatever the policies
/// say.
pub(crate) const SWITCH_KEY: &str = "sharing";

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A change that a watch delivers, in one shape for all kinds. It carries facts, because whole
/// objects would fill the memory during a list.
enum Change<F> {
    Applied(F),
    Deleted(F),
    /// All objects that exist, after a start of the watch.
    Listed(Vec<F>),
}

/// Namespace and name.
type Key = (String, String);

/// Starts all watches; they end with the set.
pub(crate) fn start(
    tasks: &mut Tasks,
    leader: &Arc<Leader>,
    client: &Client,
    (namespace, config_map): (&str, &str),
    with_tfjobs: bool,
) {
    let mut watch = Watches { tasks, leader, lists: |leader| &leader.lists };
    let all = watcher::Config::default;
    let invalid = leader.invalid.clone();
    watch.spawn(
        Api::<Pod>::all(client.clone()),
        all(),
        move |pod| {
            invalid.check_pod(&pod);
            PodFacts::of(&pod)
        },
        |world, change| match change {
            Change::Applied(pod) => world.put_pod(pod),
            Change::Deleted(pod) => world.remove_pod(&pod.uid),
            Change::Listed(pods) => {
                world.keep_pods(&pods.iter().map(|pod| pod.uid.clone()).collect());
                for pod in pods {
                    let name = format!("{}/{}", pod.namespace, pod.name);
                    skip_on_panic("Pod", &name, || world.put_pod(pod));
                }
            }
        },
    );
    watch.spawn(
        Api::<SharePolicy>::all(client.clone()),
        all(),
        |policy| PolicyFacts::of(&policy),
        |world, change| {
            let key = |policy: &PolicyFacts| (policy.namespace.clone(), policy.name.clone());
            match change {
                Change::Applied(policy) => world.put_policy(policy),
                Change::Deleted(policy) => world.remove_policy(&key(&policy)),
                Change::Listed(policies) => {
                    world.keep_policies(&policies.iter().map(key).collect());
                    policies.into_iter().for_each(|policy| world.put_policy(policy));
                }
            }
        },
    );
    let labels = |namespace: Namespace| Some((namespace.name_any(), namespace.metadata.labels.unwrap_or_default()));
    watch.spawn(Api::<Namespace>::all(client.clone()), all(), labels, |world, change| match change {
        Change::Applied((name, labels)) => world.put_namespace(&name, labels),
        Change::Deleted((name, _)) => world.remove_namespace(&name),
        Change::Listed(all) => all.into_iter().for_each(|(name, labels)| world.put_namespace(&name, labels)),
    });
    let size = |node: Node| Some((node.name_any(), NodeFacts::of(&node)));
    watch.spawn(Api::<Node>::all(client.clone()), all(), size, |world, change| match change {
        Change::Applied((name, facts)) => world.put_node(&name, facts),
        Change::Deleted((name, _)) => world.remove_node(&name, Instant::now()),
        Change::Listed(all) => {
            world.keep_nodes(&all.iter().map(|(name, _)| name.clone()).collect(), Instant::now());
            all.into_iter().for_each(|(name, facts)| world.put_node(&name, facts));
        }
    });
    let range = |range: LimitRange| Some((key(&range), RangeFacts::of(&range)));
    watch.spawn(Api::<LimitRange>::all(client.clone()), all(), range, |world, change| match change {
        Change::Applied((key, facts)) => world.put_range(&key.0, &key.1, Some(facts)),
        Change::Deleted((key, _)) => world.put_range(&key.0, &key.1, None),
        Change::Listed(all) => {
            world.keep_ranges(&names(&all));
            all.into_iter().for_each(|(key, facts)| world.put_range(&key.0, &key.1, Some(facts)));
        }
    });
    let quota = |quota: ResourceQuota| Some((key(&quota), QuotaFacts::of(&quota)));
    watch.spawn(Api::<ResourceQuota>::all(client.clone()), all(), quota, |world, change| match change {
        Change::Applied((key, facts)) => world.put_quota(&key.0, &key.1, Some(facts)),
        Change::Deleted((key, _)) => world.put_quota(&key.0, &key.1, None),
        Change::Listed(all) => {
            world.keep_quotas(&names(&all));
            all.into_iter().for_each(|(key, facts)| world.put_quota(&key.0, &key.1, Some(facts)));
        }
    });
    let switch = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let only = watcher::Config::default().fields(&format!("metadata.name={config_map}"));
    let is_off =
        |map: ConfigMap| Some(map.data.is_some_and(|data| data.get(SWITCH_KEY).is_some_and(|word| word == "off")));
    watch.spawn(switch, only, is_off, |world, change| {
        world.set_off(match change {
            Change::Applied(off) => off,
            Change::Deleted(_) => false,
            Change::Listed(maps) => maps.contains(&true),
        });
    });
    watch.lists = |leader| &leader.job_lists;
    let invalid = leader.invalid.clone();
    watch.spawn(
        Api::<TrainingJob>::all(client.clone()),
        all(),
        move |job| {
            invalid.check_training_job(&job);
            AnyTrainingJob::of(&job)
        },
        |world, change| match change {
            Change::Applied(AnyTrainingJob::OnePod(job)) => world.jobs.put_training_job(*job),
            Change::Applied(AnyTrainingJob::Tasks(job)) => world.jobs.put_task_job(*job),
            Change::Deleted(AnyTrainingJob::OnePod(job)) => world.jobs.remove_training_job(&job.key()),
            Change::Deleted(AnyTrainingJob::Tasks(job)) => world.jobs.remove_task_job(&job.key),
            Change::Listed(jobs) => {
                let (mut plain, mut of_tasks) = (Vec::new(), Vec::new());
                for job in jobs {
                    match job {
                        AnyTrainingJob::OnePod(job) => plain.push(*job),
                        AnyTrainingJob::Tasks(job) => of_tasks.push(*job),
                    }
                }
                world.jobs.list_training_jobs(plain);
                world.jobs.list_task_jobs(WorkloadKind::TaskJob, of_tasks);
            }
        },
    );
    // The kind may not exist, or Kubeflow may own it.
    if with_tfjobs {
        watch.spawn(
            Api::<TfJob>::all(client.clone()),
            all(),
            |job| TaskJobSnapshot::of_tfjob(&job),
            |world, change| match change {
                Change::Applied(job) => world.jobs.put_task_job(job),
                Change::Deleted(job) => world.jobs.remove_task_job(&job.key),
                Change::Listed(jobs) => world.jobs.list_task_jobs(WorkloadKind::TfJob, jobs),
            },
        );
    }
    let invalid = leader.invalid.clone();
    watch.spawn(
        Api::<Job>::all(client.clone()),
        all(),
        move |job| {
            invalid.check_job(&job);
            BatchJobSnapshot::of(&job)
        },
        |world, change| match change {
            Change::Applied(job) => world.jobs.put_batch_job(&job),
            Change::Deleted(job) => world.jobs.remove_batch_job(&NamespacedName::new(&job.namespace, &job.name)),
            Change::Listed(jobs) => world.jobs.list_batch_jobs(&jobs),
        },
    );
}

/// A TrainingJob, by the adapter that runs it.
enum AnyTrainingJob {
    OnePod(Box<JobSnapshot>),
    Tasks(Box<TaskJobSnapshot>),
}

impl AnyTrainingJob {
    fn of(job: &TrainingJob) -> Option<AnyTrainingJob> {
        if job.spec.has_tasks() {
            return TaskJobSnapshot::of_training_job(job).map(Box::new).map(AnyTrainingJob::Tasks);
        }
        JobSnapshot::of(job).map(Box::new).map(AnyTrainingJob::OnePod)
    }
}

fn key<K: ResourceExt>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn names<T>(all: &[(Key, T)]) -> BTreeSet<Key> {
    all.iter().map(|(key, _)| key.clone()).collect()
}

struct Watches<'a> {
    tasks: &'a mut Tasks,
    leader: &'a Arc<Leader>,
    /// Which first lists the next watches belong to.
    lists: fn(&Leader) -> &Lists,
}

impl Watches<'_> {
    fn spawn<K, F: Send + 'static>(
        &mut self,
        api: Api<K>,
        config: watcher::Config,
        read: impl Fn(K) -> Option<F> + Send + Sync + 'static,
        put: impl Fn(&mut World, Change<F>) + Send + Sync + 'static,
    ) where
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let leader = self.leader.clone();
        let lists = self.lists;
        lists(&leader).await_one();
        let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
        let name = format!("the watch of {kind} objects");
        self.tasks.spawn(name, async move {
            let put = |change: Change<F>| {
                leader.change(|world| put(world, change));
            };
            let complete = || {
                lists(&leader).complete_one();
                leader.work.notify_one();
                leader.jobs_changed.notify_one();
            };
            follow(api, config, &leader.metrics.clone(), read, put, complete).await;
        });
    }
}

/// Follows one kind for ever. `complete` is called once, when all objects that exist have been
/// read.
async fn follow<K, F>(
    api: Api<K>,
    config: watcher::Config,
    metrics: &Metrics,
    read: impl Fn(K) -> Option<F>,
    put: impl Fn(Change<F>),
    complete: impl Fn(),
) where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut pause = FIRST_PAUSE;
    let mut is_complete = false;
    let kind = std::any::type_name::<K>();
    let read = |object: K| {
        let name = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
        let facts = skip_on_panic(kind, &name, || read(object)).flatten();
        facts.map(|facts| (name, facts))
    };
    let put = |name: &str, change: Change<F>| skip_on_panic(kind, name, || put(change));
    let mut listing: Vec<F> = Vec::new();
    let mut stream = watcher(api, config).boxed();
    while let Some(event) = stream.next().await {
        match event {
            Ok(Event::Init) => listing.clear(),
            Ok(Event::InitApply(object)) => listing.extend(read(object).map(|(_, facts)| facts)),
            Ok(Event::InitDone) => {
                put("the whole list", Change::Listed(std::mem::take(&mut listing)));
                pause = FIRST_PAUSE;
                if !std::mem::replace(&mut is_complete, true) {
                    complete();
                }
            }
            Ok(Event::Apply(object)) => {
                if let Some((name, facts)) = read(object) {
                    put(&name, Change::Applied(facts));
                }
            }
            Ok(Event::Delete(object)) => {
                if let Some((name, facts)) = read(object) {
                    put(&name, Change::Deleted(facts));
                }
            }
            Err(error) => {
                metrics.watch_errors.inc();
                tracing::warn!(%error, kind, "watch broken; starting it again");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}
