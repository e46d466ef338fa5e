//! Keeps the world up to date: one watch and one cache per kind, for all rooms of the operator.
//!
//! A watch that breaks is started again with growing pauses, of at most some seconds, so that the
//! operator is back soon after the API server is. The first complete list of every kind must have
//! been read before anything is decided: without its policies, every pod would look as if it were
//! to be restored.
//!
//! Objects with values that no cluster can have are found here, too ([`super::invalid_objects`]).
//!
//! An object that makes its reader panic is logged and skipped ([`skip_on_panic`]), alone or in a list; the watch and
//! all other objects go on.

use super::invalid_objects::InvalidObjects;
use super::lead::{Leader, Lists};
use super::snapshot::JobSnapshot;
use super::task_job::TaskJobSnapshot;
use super::workload::WorkloadKind;
use super::world::World;
use crate::isolate::skip_on_panic;
use crate::tasks::Tasks;
use futures_util::{Stream, StreamExt};
use gainshare_core::backoff::Backoff;
use gainshare_kube_api::adopted::BatchJobSnapshot;
use gainshare_kube_api::bounds::{NodeFacts, QuotaFacts, RangeFacts};
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::names::{NamespacedName, NodeName};
use gainshare_kube_api::select::PolicyFacts;
use gainshare_kube_api::share_policy::SharePolicy;
use gainshare_kube_api::training_job::TrainingJob;
use k8s_openapi::api::core::v1::{ConfigMap, LimitRange, Namespace, Node, ResourceQuota};
use kube::api::Api;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// In the operator's ConfigMap: `off` gives every pod its own values back, whatever the policies
/// say.
pub(crate) const SWITCH_KEY: &str = "sharing";

const RETRIES: Backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(5));

/// What the watch of a kind does to the world. It carries facts, because whole objects would fill the memory during a
/// list.
struct Cache<F> {
    /// After a start of the watch: takes out what is not among the objects that exist.
    keep: fn(&mut World, &[F]),
    put: fn(&mut World, F),
    remove: fn(&mut World, F),
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
    let mut watches = Watches { tasks, leader, client, lists: |leader| &leader.lists };
    watches.spawn_checked(InvalidObjects::check_pod, PodFacts::of, PODS);
    watches.spawn_all(|policy: SharePolicy| PolicyFacts::of(&policy), POLICIES);
    watches.spawn_all(|namespace: Namespace| Some(name_and_labels(namespace)), NAMESPACES);
    watches.spawn_all(|node: Node| Some((node.name_any().into(), NodeFacts::of(&node))), NODES);
    watches.spawn_all(|range: LimitRange| Some((key(&range), RangeFacts::of(&range))), RANGES);
    watches.spawn_all(|quota: ResourceQuota| Some((key(&quota), QuotaFacts::of(&quota))), QUOTAS);
    let switch = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let only = watcher::Config::default().fields(&format!("metadata.name={config_map}"));
    watches.spawn(switch, only, |map| Some(is_off(&map)), SWITCH);

    watches.lists = |leader| &leader.job_lists;
    watches.spawn_checked(InvalidObjects::check_training_job, AnyTrainingJob::of, TRAINING_JOBS);
    // The kind may not exist, or Kubeflow may own it.
    if with_tfjobs {
        watches.spawn_checked(InvalidObjects::check_tfjob, TaskJobSnapshot::of_tfjob, TFJOBS);
    }
    watches.spawn_checked(InvalidObjects::check_job, BatchJobSnapshot::of, BATCH_JOBS);
}

const PODS: Cache<PodFacts> = Cache {
    keep: |world, pods| world.keep_pods(&pods.iter().map(|pod| pod.uid.clone()).collect()),
    put: |world, pod| world.put_pod(pod),
    remove: |world, pod| world.remove_pod(&pod.uid),
};

const POLICIES: Cache<PolicyFacts> = Cache {
    keep: |world, policies| world.keep_policies(&policies.iter().map(policy_key).collect()),
    put: |world, policy| world.put_policy(policy),
    remove: |world, policy| world.remove_policy(&policy_key(&policy)),
};

/// A namespace's name and its labels.
const NAMESPACES: Cache<(String, BTreeMap<String, String>)> = Cache {
    keep: |world, namespaces| world.keep_namespaces(&first_of(namespaces)),
    put: |world, (name, labels)| world.put_namespace(&name, labels),
    remove: |world, (name, _)| world.remove_namespace(&name),
};

const NODES: Cache<(NodeName, NodeFacts)> = Cache {
    keep: |world, nodes| world.keep_nodes(&first_of(nodes), Instant::now()),
    put: |world, (name, facts)| world.put_node(&name, facts),
    remove: |world, (name, _)| world.remove_node(&name, Instant::now()),
};

const RANGES: Cache<(Key, RangeFacts)> = Cache {
    keep: |world, ranges| world.keep_ranges(&first_of(ranges)),
    put: |world, (key, facts)| world.put_range(&key.0, &key.1, Some(facts)),
    remove: |world, (key, _)| world.put_range(&key.0, &key.1, None),
};

const QUOTAS: Cache<(Key, QuotaFacts)> = Cache {
    keep: |world, quotas| world.keep_quotas(&first_of(quotas)),
    put: |world, (key, facts)| world.put_quota(&key.0, &key.1, Some(facts)),
    remove: |world, (key, _)| world.put_quota(&key.0, &key.1, None),
};

/// Whether the operator's ConfigMap switches sharing off. Without the ConfigMap, sharing is on.
const SWITCH: Cache<bool> = Cache {
    keep: |world, maps| {
        if maps.is_empty() {
            world.set_off(false);
        }
    },
    put: |world, off| world.set_off(off),
    remove: |world, _| world.set_off(false),
};

const TRAINING_JOBS: Cache<AnyTrainingJob> =
    Cache { keep: AnyTrainingJob::keep, put: AnyTrainingJob::put, remove: AnyTrainingJob::remove };

const TFJOBS: Cache<TaskJobSnapshot> = Cache {
    keep: |world, jobs| {
        world.jobs.keep_task_jobs(WorkloadKind::TfJob, &jobs.iter().map(|job| job.key.clone()).collect());
    },
    put: |world, job| world.jobs.put_task_job(job),
    remove: |world, job| world.jobs.remove_task_job(&job.key),
};

const BATCH_JOBS: Cache<BatchJobSnapshot> = Cache {
    keep: |world, jobs| world.keep_batch_jobs(&jobs.iter().map(batch_job_name).collect()),
    put: |world, job| world.put_batch_job(&job),
    remove: |world, job| world.remove_batch_job(&batch_job_name(&job)),
};

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

    fn keep(world: &mut World, jobs: &[AnyTrainingJob]) {
        let (mut of_one_pod, mut of_tasks) = (BTreeSet::new(), BTreeSet::new());
        for job in jobs {
            match job {
                AnyTrainingJob::OnePod(job) => of_one_pod.insert(job.key()),
                AnyTrainingJob::Tasks(job) => of_tasks.insert(job.key.clone()),
            };
        }
        world.jobs.keep_training_jobs(&of_one_pod);
        world.jobs.keep_task_jobs(WorkloadKind::TaskJob, &of_tasks);
    }

    fn put(world: &mut World, job: AnyTrainingJob) {
        match job {
            AnyTrainingJob::OnePod(job) => world.jobs.put_training_job(*job),
            AnyTrainingJob::Tasks(job) => world.jobs.put_task_job(*job),
        }
    }

    fn remove(world: &mut World, job: AnyTrainingJob) {
        match job {
            AnyTrainingJob::OnePod(job) => world.jobs.remove_training_job(&job.key()),
            AnyTrainingJob::Tasks(job) => world.jobs.remove_task_job(&job.key),
        }
    }
}

fn name_and_labels(namespace: Namespace) -> (String, BTreeMap<String, String>) {
    (namespace.name_any(), namespace.metadata.labels.unwrap_or_default())
}

fn is_off(map: &ConfigMap) -> bool {
    map.data.as_ref().is_some_and(|data| data.get(SWITCH_KEY).is_some_and(|word| word == "off"))
}

fn key<K: ResourceExt>(object: &K) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

fn policy_key(policy: &PolicyFacts) -> Key {
    (policy.namespace.clone(), policy.name.clone())
}

fn batch_job_name(job: &BatchJobSnapshot) -> NamespacedName {
    NamespacedName::new(&job.namespace, &job.name)
}

fn first_of<K: Ord + Clone, T>(pairs: &[(K, T)]) -> BTreeSet<K> {
    pairs.iter().map(|(key, _)| key.clone()).collect()
}

struct Watches<'a> {
    tasks: &'a mut Tasks,
    leader: &'a Arc<Leader>,
    client: &'a Client,
    /// Which first lists the next watches belong to.
    lists: fn(&Leader) -> &Lists,
}

impl Watches<'_> {
    /// Watches a kind in the whole cluster, and reports objects with values that no cluster can have.
    fn spawn_checked<K, F: Send + 'static>(
        &mut self,
        check: fn(&InvalidObjects, &K),
        read: fn(&K) -> Option<F>,
        cache: Cache<F>,
    ) where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let invalid = self.leader.invalid.clone();
        let check_and_read = move |object: K| {
            check(&invalid, &object);
            read(&object)
        };
        self.spawn_all(check_and_read, cache);
    }

    /// Watches a kind in the whole cluster.
    fn spawn_all<K, F: Send + 'static>(
        &mut self,
        read: impl Fn(K) -> Option<F> + Send + Sync + 'static,
        cache: Cache<F>,
    ) where
        K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        self.spawn(Api::all(self.client.clone()), watcher::Config::default(), read, cache);
    }

    fn spawn<K, F: Send + 'static>(
        &mut self,
        api: Api<K>,
        config: watcher::Config,
        read: impl Fn(K) -> Option<F> + Send + Sync + 'static,
        cache: Cache<F>,
    ) where
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let leader = self.leader.clone();
        let lists = self.lists;
        lists(&leader).await_one();
        let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
        let name = format!("the watch of {kind} objects");
        self.tasks.spawn(name, async move {
            let complete = || {
                lists(&leader).complete_one();
                leader.work.notify_one();
                leader.jobs_changed.notify_one();
            };
            follow(watcher(api, config), &leader, read, cache, complete).await;
        });
    }
}

/// Follows one kind for ever. `complete` is called once, when all objects that exist have been
/// read.
///
/// Every object is read and put on its own, also those of a list, so that one that panics takes no other with it.
async fn follow<K, F>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
    leader: &Leader,
    read: impl Fn(K) -> Option<F>,
    cache: Cache<F>,
    complete: impl Fn(),
) where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut retries = RETRIES;
    let mut is_complete = false;
    let kind = std::any::type_name::<K>();
    let read = |object: K| {
        let name = format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
        let facts = skip_on_panic(kind, &name, || read(object)).flatten();
        facts.map(|facts| (name, facts))
    };
    let put = |name: &str, facts: F| {
        skip_on_panic(kind, name, || leader.change(|world| (cache.put)(world, facts)));
    };
    // The names are for the log.
    let (mut names, mut listing) = (Vec::new(), Vec::new());
    let mut events = pin!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init) => {
                names.clear();
                listing.clear();
            }
            Ok(Event::InitApply(object)) => {
                if let Some((name, facts)) = read(object) {
                    names.push(name);
                    listing.push(facts);
                }
            }
            Ok(Event::InitDone) => {
                let (names, listing) = (std::mem::take(&mut names), std::mem::take(&mut listing));
                skip_on_panic(kind, "the names of all", || leader.change(|world| (cache.keep)(world, &listing)));
                for (name, facts) in names.iter().zip(listing) {
                    put(name, facts);
                }
                retries.reset();
                if !std::mem::replace(&mut is_complete, true) {
                    complete();
                }
            }
            Ok(Event::Apply(object)) => {
                if let Some((name, facts)) = read(object) {
                    put(&name, facts);
                }
            }
            Ok(Event::Delete(object)) => {
                if let Some((name, facts)) = read(object) {
                    skip_on_panic(kind, &name, || leader.change(|world| (cache.remove)(world, facts)));
                }
            }
            Err(error) => {
                leader.metrics.watch_errors.inc();
                tracing::warn!(%error, kind, "watch broken; starting it again");
                tokio::time::sleep(retries.next_pause()).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::metrics::Metrics;
    use serde_json::json;

    fn leader() -> Leader {
        Leader::new(Arc::new(Metrics::new()), 1)
    }

    fn object<K: Resource<DynamicType = ()> + DeserializeOwned>(name: &str) -> K {
        let metadata = json!({
            "namespace": "team", "name": name, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z",
        });
        let spec = json!({"selector": {}});
        let (version, kind) = (K::api_version(&()), K::kind(&()));
        let object = json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec});
        serde_json::from_value(object).unwrap()
    }

    /// The events of one list of these objects.
    fn list<K: Resource<DynamicType = ()> + DeserializeOwned>(names: &[&str]) -> Vec<watcher::Result<Event<K>>> {
        let objects = names.iter().map(|name| Event::InitApply(object(name)));
        let events = std::iter::once(Event::Init).chain(objects).chain([Event::InitDone]);
        events.map(Ok).collect()
    }

    async fn follow_policies(
        leader: &Leader,
        names: &[&str],
        read: impl Fn(SharePolicy) -> Option<PolicyFacts>,
        cache: Cache<PolicyFacts>,
    ) -> bool {
        let is_complete = std::cell::Cell::new(false);
        let events = futures_util::stream::iter(list(names));
        follow(events, leader, read, cache, || is_complete.set(true)).await;
        is_complete.get()
    }

    fn policies(leader: &Leader) -> Vec<String> {
        leader.read(|world| world.policies.keys().map(|(_, name)| name.clone()).collect())
    }

    #[tokio::test]
    async fn an_object_of_a_list_that_panics_takes_no_other_with_it() {
        let read = |policy: SharePolicy| PolicyFacts::of(&policy);
        let put: fn(&mut World, PolicyFacts) = |world, policy| {
            assert!(policy.name != "bad", "this object makes its reader panic");
            world.put_policy(policy);
        };
        let leader = leader();
        assert!(follow_policies(&leader, &["a", "bad", "c"], read, Cache { put, ..POLICIES }).await);
        assert_eq!(policies(&leader), ["a", "c"]);
        let read = |policy: SharePolicy| {
            assert!(policy.name_any() != "c", "this object makes its reader panic");
            PolicyFacts::of(&policy)
        };
        assert!(follow_policies(&leader, &["c", "d", "e"], read, POLICIES).await);
        assert_eq!(policies(&leader), ["d", "e"], "after a restart of the watch, too");
    }

    #[tokio::test]
    async fn a_list_whose_names_panic_is_read_all_the_same() {
        let keep: fn(&mut World, &[PolicyFacts]) = |_, _| panic!("the list makes its reader panic");
        let leader = leader();
        let read = |policy: SharePolicy| PolicyFacts::of(&policy);
        assert!(follow_policies(&leader, &["a", "b"], read, Cache { keep, ..POLICIES }).await);
        assert_eq!(policies(&leader), ["a", "b"]);
    }

    #[tokio::test]
    async fn namespaces_that_went_while_the_watch_was_broken_are_forgotten() {
        let leader = leader();
        let labels = |namespace: Namespace| Some(name_and_labels(namespace));
        let mut events = list(&["stays", "goes"]);
        events.extend(list(&["stays", "comes"]));
        follow(futures_util::stream::iter(events), &leader, labels, NAMESPACES, || {}).await;
        assert_eq!(leader.read(|world| world.namespaces().cloned().collect::<Vec<_>>()), ["comes", "stays"]);
    }
}
