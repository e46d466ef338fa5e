//! Keeps the world up to date: one watch per kind.
//!
//! A watch that breaks is started anew with growing pauses (at most some seconds, so that we are back soon after the API server is). The first
//! complete list of every kind must have been seen before anything is decided: without policies in view, every pod would look as if it were to
//! be let go.

use super::lead::Leader;
use super::metrics::Metrics;
use super::world::World;
use crate::tasks::Tasks;
use futures_util::StreamExt;
use gainshare_kube_api::bounds::{NodeFacts, QuotaFacts, RangeFacts};
use gainshare_kube_api::crd::SharePolicy;
use gainshare_kube_api::facts::PodFacts;
use gainshare_kube_api::select::PolicyFacts;
use k8s_openapi::api::core::v1::{ConfigMap, LimitRange, Namespace, Node, Pod, ResourceQuota};
use kube::api::Api;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// The kinds whose first list must be complete before we act.
pub(crate) const KINDS: usize = 7;

/// In the manager's ConfigMap: `off` gives every pod its own values back, whatever the policies say.
pub(crate) const SWITCH_KEY: &str = "sharing";

const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// What a watch tells, in one shape for all kinds: facts, because whole objects would fill the memory during a list.
pub(crate) enum News<F> {
    Here(F),
    Gone(F),
    /// All that exist, after a start.
    All(Vec<F>),
}

/// Namespace and name.
type Key = (String, String);

/// Starts all watches; they end with the set.
pub(crate) fn start(tasks: &mut Tasks, leader: &Arc<Leader>, client: &Client, namespace: &str, config_map: &str) {
    let mut watch = Watches { tasks, leader };
    let all = watcher::Config::default;
    watch.spawn(
        Api::<Pod>::all(client.clone()),
        all(),
        |pod| PodFacts::of(&pod),
        |world, news| match news {
            News::Here(pod) => world.put_pod(pod),
            News::Gone(pod) => world.remove_pod(&pod.uid),
            News::All(pods) => {
                world.keep_pods(&pods.iter().map(|pod| pod.uid.clone()).collect());
                pods.into_iter().for_each(|pod| world.put_pod(pod));
            }
        },
    );
    watch.spawn(
        Api::<SharePolicy>::all(client.clone()),
        all(),
        |policy| PolicyFacts::of(&policy),
        |world, news| {
            let key = |policy: &PolicyFacts| (policy.namespace.clone(), policy.name.clone());
            match news {
                News::Here(policy) => world.put_policy(policy),
                News::Gone(policy) => world.remove_policy(&key(&policy)),
                News::All(policies) => {
                    world.keep_policies(&policies.iter().map(key).collect());
                    policies.into_iter().for_each(|policy| world.put_policy(policy));
                }
            }
        },
    );
    let labels = |namespace: Namespace| Some((namespace.name_any(), namespace.metadata.labels.unwrap_or_default()));
    watch.spawn(Api::<Namespace>::all(client.clone()), all(), labels, |world, news| match news {
        News::Here((name, labels)) => world.put_namespace(&name, labels),
        News::Gone((name, _)) => world.remove_namespace(&name),
        News::All(all) => all.into_iter().for_each(|(name, labels)| world.put_namespace(&name, labels)),
    });
    let size = |node: Node| Some((node.name_any(), NodeFacts::of(&node)));
    watch.spawn(Api::<Node>::all(client.clone()), all(), size, |world, news| match news {
        News::Here((name, facts)) => world.put_node(&name, facts),
        News::Gone((name, _)) => world.remove_node(&name),
        News::All(all) => all.into_iter().for_each(|(name, facts)| world.put_node(&name, facts)),
    });
    let range = |range: LimitRange| Some((key(&range), RangeFacts::of(&range)));
    watch.spawn(Api::<LimitRange>::all(client.clone()), all(), range, |world, news| match news {
        News::Here((key, facts)) => world.put_range(&key.0, &key.1, Some(facts)),
        News::Gone((key, _)) => world.put_range(&key.0, &key.1, None),
        News::All(all) => {
            world.keep_ranges(&names(&all));
            all.into_iter().for_each(|(key, facts)| world.put_range(&key.0, &key.1, Some(facts)));
        }
    });
    let quota = |quota: ResourceQuota| Some((key(&quota), QuotaFacts::of(&quota)));
    watch.spawn(Api::<ResourceQuota>::all(client.clone()), all(), quota, |world, news| match news {
        News::Here((key, facts)) => world.put_quota(&key.0, &key.1, Some(facts)),
        News::Gone((key, _)) => world.put_quota(&key.0, &key.1, None),
        News::All(all) => {
            world.keep_quotas(&names(&all));
            all.into_iter().for_each(|(key, facts)| world.put_quota(&key.0, &key.1, Some(facts)));
        }
    });
    let switch = Api::<ConfigMap>::namespaced(client.clone(), namespace);
    let only = watcher::Config::default().fields(&format!("metadata.name={config_map}"));
    let is_off =
        |map: ConfigMap| Some(map.data.is_some_and(|data| data.get(SWITCH_KEY).is_some_and(|word| word == "off")));
    watch.spawn(switch, only, is_off, |world, news| {
        world.set_off(match news {
            News::Here(off) => off,
            News::Gone(_) => false,
            News::All(maps) => maps.contains(&true),
        });
    });
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
}

impl Watches<'_> {
    fn spawn<K, F: Send + 'static>(
        &mut self,
        api: Api<K>,
        config: watcher::Config,
        read: impl Fn(K) -> Option<F> + Send + 'static,
        put: impl Fn(&mut World, News<F>) + Send + Sync + 'static,
    ) where
        K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
    {
        let leader = self.leader.clone();
        let kind = std::any::type_name::<K>().rsplit("::").next().unwrap_or_default();
        let name = format!("the watch of {kind} objects");
        self.tasks.spawn(name, async move {
            let put = |news: News<F>| {
                leader.change(|world| put(world, news));
            };
            follow(api, config, &leader.metrics.clone(), read, put, || leader.seen_all_of_one_kind()).await;
        });
    }
}

/// Follows one kind for ever. `complete` is called once, when all that exist have been seen.
pub(crate) async fn follow<K, F>(
    api: Api<K>,
    config: watcher::Config,
    metrics: &Metrics,
    read: impl Fn(K) -> Option<F>,
    put: impl Fn(News<F>),
    complete: impl Fn(),
) where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let mut pause = FIRST_PAUSE;
    let mut seen_all = false;
    let mut listing: Vec<F> = Vec::new();
    let mut stream = watcher(api, config).boxed();
    while let Some(event) = stream.next().await {
        match event {
            Ok(Event::Init) => listing.clear(),
            Ok(Event::InitApply(object)) => listing.extend(read(object)),
            Ok(Event::InitDone) => {
                put(News::All(std::mem::take(&mut listing)));
                pause = FIRST_PAUSE;
                if !std::mem::replace(&mut seen_all, true) {
                    complete();
                }
            }
            Ok(Event::Apply(object)) => read(object).into_iter().for_each(|facts| put(News::Here(facts))),
            Ok(Event::Delete(object)) => read(object).into_iter().for_each(|facts| put(News::Gone(facts))),
            Err(error) => {
                metrics.watch_errors.inc();
                tracing::warn!(%error, kind = std::any::type_name::<K>(), "watch broken; starting it anew");
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}
