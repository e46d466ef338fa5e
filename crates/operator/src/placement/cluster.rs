//! Where jobs should run: one picture of the whole cluster, decided by the core, told as orders.
//!
//! **How.** Nodes come from the API server, progress and use from the agents, the jobs and their states from the controller ([`crate::jobs`]). [`Decision::decide`] is
//! pure: it puts them into one core view for every policy that jobs ask for, lets `place` and `move` of that policy answer, and returns
//! [`Order`]s with a sentence each. Shares stay with the agents. [`run`] feeds it and puts the orders on the board.
//!
//! **In doubt, nothing.** A node whose agent is silent is unknown: its jobs are left alone and nobody is sent there. A node that is cordoned, not ready or tainted keeps
//! its jobs and gets no others. A job between two nodes, and one whose order has not been carried out yet, counts where it is going, so that two
//! passes never give the same room away twice; after a while without effect the order is forgotten.
//!
//! **Continuity.** A job's reports and its use go on over its moves: what earlier attempts said is kept here while the manager lives. Times of agents are placed on our clock by
//! the quickest message each has sent.

use crate::jobs::{JobFacts, JobState, Order, OrderKind};
use crate::state::agents::Agents;
use crate::state::lead::Leader;
use crate::state::metrics::OrderLabels;
use crate::state::world::World;
use gainshare_core::control::Control;
use gainshare_core::model::{JobId, NodeId, OwnerId, PerResource, Span, Time};
use gainshare_core::plan::MoveReason;
use gainshare_core::policy::{MoveRule, Policy, Preset, Specon};
use gainshare_core::signal::{Category, Signal};
use gainshare_core::view::{JobView, NodeView, Phase, View};
use gainshare_kube_api::training_job::JobPolicy;
use gainshare_kube_api::wire;
use nix::time::{ClockId, clock_gettime};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How often the cluster is looked at if nothing happens.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// An order that had no effect for so long is forgotten.
const ORDER_STANDS: Span = Span::from_secs(15);
/// A job that is between two nodes for longer (suspended, say) takes no room any more.
const MOVING_COUNTS: Span = Span::from_secs(60);

/// A node as the decision sees it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NodeSeen {
    /// What training jobs can have of it: all but what other pods request.
    pub(crate) cores: f64,
    /// How fast a core is, relative to the others'.
    pub(crate) speed: f64,
    pub(crate) memory_bytes: u64,
    /// What nobody requests.
    pub(crate) free_milli: u64,
    pub(crate) free_bytes: u64,
    /// New pods may come.
    pub(crate) open: bool,
    /// Its agent has been heard of.
    pub(crate) heard: bool,
}

/// What the agents say of a job's present pod, on our clock.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Told {
    pub(crate) signal: Signal,
    /// In node-seconds of its node.
    pub(crate) consumed: PerResource<f64>,
    /// The most of its node it was seen able to use.
    pub(crate) most: Option<f64>,
}

/// Everything a decision is made of.
#[derive(Debug, Clone, Default)]
pub(crate) struct Seen {
    pub(crate) now: Time,
    /// By name.
    pub(crate) nodes: BTreeMap<String, NodeSeen>,
    pub(crate) jobs: Vec<(Arc<JobFacts>, Option<Told>)>,
}

/// What is remembered between two decisions.
#[derive(Debug, Default)]
pub(crate) struct Decision {
    specon: Specon,
    controls: BTreeMap<JobPolicy, Control>,
    // Tens of thousands of jobs are looked at in every pass: their names are hashed, once, and from then on there are numbers.
    jobs: HashMap<String, Known>,
    next_job: u64,
    nodes: Nodes,
    owners: HashMap<String, OwnerId>,
    pass: u64,
    /// What moves were measured to cost, in seconds.
    move_costs: BTreeMap<JobPolicy, Vec<f64>>,
    /// Jobs that SpeCon thinks otherwise of since this was last taken.
    turned: Vec<(String, wire::Category)>,
}

/// The nodes' numbers, and what jobs have to know of those that are there in this pass.
#[derive(Debug, Default)]
struct Nodes {
    ids: HashMap<String, NodeId>,
    there: Vec<Option<There>>,
}

#[derive(Debug, Clone, Copy)]
struct There {
    cores: f64,
    heard: bool,
}

impl Nodes {
    fn learn(&mut self, seen: &BTreeMap<String, NodeSeen>) {
        self.there.fill(None);
        for (name, node) in seen {
            let NodeId(id) = self.id(name);
            self.there[id as usize] = Some(There { cores: node.cores, heard: node.heard });
        }
    }

    fn id(&mut self, name: &str) -> NodeId {
        if let Some(id) = self.ids.get(name) {
            return *id;
        }
        let id = NodeId(self.there.len() as u32);
        self.ids.insert(name.to_owned(), id);
        self.there.push(None);
        id
    }

    fn there(&self, NodeId(id): NodeId) -> Option<There> {
        self.there.get(id as usize).copied().flatten()
    }
}

#[derive(Debug)]
struct Known {
    id: JobId,
    owner: OwnerId,
    /// As they were last seen, and in which pass.
    facts: Arc<JobFacts>,
    pass: u64,
    pod: Option<String>,
    /// Its node while that is known, and the node's cores.
    node: Option<(NodeId, f64)>,
    /// Of the attempts before this one.
    before: Told,
    now: Told,
    /// What was asked of the controller, and when.
    order: Option<(Order, Time)>,
    /// Since when it has been between two nodes.
    moving_since: Option<Time>,
    /// It had moved already when it was first seen here: for SpeCon once is enough.
    has_moved: bool,
    /// What SpeCon makes of it; its agent, which only watches such jobs, has no opinion.
    category: Option<Category>,
}

impl Decision {
    pub(crate) fn new(specon: Specon) -> Decision {
        Decision { specon, ..Decision::default() }
    }

    /// The orders of this moment.
    pub(crate) fn decide(&mut self, seen: &Seen) -> Vec<Order> {
        self.learn(seen);
        let policies = [JobPolicy::Specon, JobPolicy::Flowcon2, JobPolicy::Gainshare];
        policies.into_iter().flat_map(|policy| self.decide_for(policy, seen)).collect()
    }

    /// Takes in which jobs there are, and what they say.
    fn learn(&mut self, seen: &Seen) {
        self.pass += 1;
        self.nodes.learn(&seen.nodes);
        self.move_costs.clear();
        for (facts, told) in &seen.jobs {
            if let Some(cost) = facts.move_cost_s.filter(|cost| cost.is_finite()) {
                self.move_costs.entry(facts.policy).or_default().push(cost);
            }
            if facts.state == JobState::Done {
                continue;
            }
            if let Some(known) = self.jobs.get_mut(&facts.uid) {
                known.learn(facts, &mut self.nodes, *told, seen.now);
                known.pass = self.pass;
                continue;
            }
            self.next_job += 1;
            let next = OwnerId(self.owners.len() as u32);
            let owner = *self.owners.entry(facts.owner.clone()).or_insert(next);
            let mut known = Known::new(JobId(self.next_job), owner, facts);
            known.learn(facts, &mut self.nodes, *told, seen.now);
            known.pass = self.pass;
            self.jobs.insert(facts.uid.clone(), known);
        }
        self.jobs.retain(|_, known| known.pass == self.pass);
    }

    fn decide_for(&mut self, policy: JobPolicy, seen: &Seen) -> Vec<Order> {
        let mut jobs: Vec<&Known> = self.jobs.values().filter(|known| known.facts.policy == policy).collect();
        jobs.sort_unstable_by_key(|known| known.id);
        if jobs.is_empty() {
            self.controls.remove(&policy);
            return vec![];
        }
        let view = self.view(&jobs, seen);
        let control = self.controls.entry(policy).or_insert_with(|| Control::new(rules(policy, self.specon)));
        if let Some(cost_s) = self.move_costs.get_mut(&policy).and_then(|costs| median(costs)) {
            control.set_moving_cost(Span::from_secs_f64(cost_s));
        }
        let Some(plan) = control.step(&view) else { return vec![] };
        if policy == JobPolicy::Specon {
            for known in self.jobs.values_mut().filter(|known| known.facts.policy == policy) {
                let category = plan.verdicts.get(&known.id).map(|verdict| verdict.category).or(known.category);
                if let Some(now) = category.filter(|_| category != known.category) {
                    self.turned.push((known.facts.uid.clone(), now.into()));
                }
                known.category = category;
            }
        }
        if plan.starts.is_empty() && plan.moves.is_empty() {
            return vec![];
        }
        let of_policy = self.jobs.values().filter(|known| known.facts.policy == policy);
        let by_id: HashMap<JobId, &JobFacts> = of_policy.map(|known| (known.id, &*known.facts)).collect();
        let names: HashMap<NodeId, &String> = self.nodes.ids.iter().map(|(name, id)| (*id, name)).collect();
        let starts = plan.starts.iter().map(|s| (s.job, s.node, OrderKind::Place, None));
        let moves = plan.moves.iter().map(|m| (m.job, m.to, OrderKind::Move, Some(m.why)));
        let orders: Vec<Order> = starts
            .chain(moves)
            .filter_map(|(job, node, kind, because)| {
                let (facts, node) = (by_id.get(&job)?, names.get(&node)?.to_string());
                let fits = match kind {
                    // Without an order the cluster's own scheduler finds a place.
                    OrderKind::Place => facts.state == JobState::Waiting && !facts.tried.contains(&node),
                    OrderKind::Move => {
                        facts.movable.is_ok()
                            && matches!(&facts.state, JobState::Running { node: from, .. } if *from != node)
                    }
                };
                let why = sentence(policy, because, &node);
                fits.then(|| Order { uid: facts.uid.clone(), node, kind, why })
            })
            .collect();
        for order in &orders {
            if let Some(known) = self.jobs.get_mut(&order.uid) {
                known.order = Some((order.clone(), seen.now));
            }
        }
        orders
    }

    /// What the decision itself now makes of jobs, by uid, where that has changed.
    fn take_turned(&mut self) -> Vec<(String, wire::Category)> {
        std::mem::take(&mut self.turned)
    }

    /// The jobs by their numbers.
    fn view(&self, jobs: &[&Known], seen: &Seen) -> View {
        let mut nodes: Vec<NodeView> = vec![];
        let heard = seen.nodes.iter().filter(|(_, node)| node.heard);
        let views: Vec<JobView> = jobs.iter().filter_map(|known| self.job_view(known, seen.now)).collect();
        let mut running: HashMap<NodeId, usize> = HashMap::new();
        for node in views.iter().filter_map(JobView::node) {
            *running.entry(node).or_default() += 1;
        }
        let mut settled: HashMap<NodeId, usize> = HashMap::new();
        for known in jobs.iter().filter(|known| matches!(known.facts.state, JobState::Running { .. })) {
            let (node, _) = known.node.expect("learnt with the state");
            *settled.entry(node).or_default() += 1;
        }
        // Room is counted in the largest of those who wait, or else of all: what is found must not turn out too small.
        let waiting = || jobs.iter().filter(|known| known.facts.state == JobState::Waiting);
        let largest = |of: fn(&JobFacts) -> u64| {
            let size = |known: &&Known| of(&known.facts);
            waiting().map(size).max().unwrap_or_else(|| jobs.iter().map(size).max().unwrap_or(0))
        };
        let (milli, bytes) = (largest(|f| f.cpu_request_milli), largest(|f| f.memory_request_bytes));
        for (name, node) in heard {
            let id = self.nodes.ids[name];
            let here = running.get(&id).copied().unwrap_or(0);
            let fits = |free: u64, need: u64| free.checked_div(need).map_or(usize::MAX, |n| n as usize);
            let more = fits(node.free_milli, milli).min(fits(node.free_bytes, bytes));
            let slots = match (node.open, more) {
                (false, _) => Some(here),
                (true, usize::MAX) => None,
                // Those who are on their way here have not taken their part of what is free yet.
                (true, more) => Some((settled.get(&id).copied().unwrap_or(0) + more).max(here)),
            };
            let (cores, speed, memory_bytes) = (node.cores, node.speed, node.memory_bytes);
            nodes.push(NodeView { id, cores, speed, memory_bytes, slots, idle: None });
        }
        nodes.sort_by_key(|node| node.id);
        View { now: seen.now, nodes, jobs: views }
    }

    /// The job as the core should see it; nothing if it is to be left alone altogether.
    fn job_view(&self, known: &Known, now: Time) -> Option<JobView> {
        let facts = &known.facts;
        let once = facts.policy == JobPolicy::Specon && known.has_moved;
        let mut pinned = facts.movable.is_err() || once;
        let going = known.order.as_ref().filter(|(_, at)| now.since(*at) <= ORDER_STANDS).map(|(order, _)| order);
        let on = |node: NodeId, since: Time, attempt: u32| {
            self.nodes.there(node)?.heard.then_some(Phase::Running { node, since, attempt })
        };
        let ordered_to = |order: &Order| self.nodes.ids.get(&order.node).copied();
        let here = known.node.map(|(node, _)| node);
        let phase = match (&facts.state, going) {
            (JobState::Done, _) => return None,
            (JobState::Waiting, None) => Phase::Waiting,
            (JobState::Waiting, Some(order)) => {
                pinned = true;
                on(ordered_to(order)?, now, 1)?
            }
            (JobState::Running { node, epoch, since }, order) => {
                let moving = order.filter(|order| order.kind == OrderKind::Move && order.node != *node);
                pinned |= moving.is_some();
                on(moving.map_or(here, ordered_to)?, time(*since), *epoch)?
            }
            (JobState::Moving, _) => {
                pinned = true;
                let since = known.moving_since.unwrap_or(now);
                if now.since(since) > MOVING_COUNTS {
                    return None;
                }
                on(known.order.as_ref().map_or(here, |(order, _)| ordered_to(order))?, since, 2)?
            }
        };
        let all = known.all();
        Some(JobView {
            id: known.id,
            owner: known.owner,
            arrived: time(facts.arrived),
            phase,
            signal: all.signal,
            consumed: all.consumed,
            most: all.most,
            pinned,
            ..JobView::default()
        })
    }
}

impl Known {
    fn new(id: JobId, owner: OwnerId, facts: &Arc<JobFacts>) -> Known {
        Known {
            id,
            owner,
            facts: facts.clone(),
            pass: 0,
            pod: None,
            node: None,
            before: Told::default(),
            now: Told::default(),
            order: None,
            moving_since: None,
            has_moved: facts.move_cost_s.is_some(),
            category: None,
        }
    }

    fn learn(&mut self, facts: &Arc<JobFacts>, nodes: &mut Nodes, told: Option<Told>, now: Time) {
        // Most jobs are what they were: their node need not be looked up by its name.
        let same = Arc::ptr_eq(&self.facts, facts).then_some(self.node).flatten();
        let node = match (&facts.state, same) {
            (JobState::Running { .. }, Some((node, _))) => Some(node),
            (JobState::Running { node, .. }, None) => Some(nodes.id(node)),
            _ => None,
        };
        self.facts = facts.clone();
        match &facts.state {
            JobState::Moving => self.moving_since = self.moving_since.or(Some(now)),
            _ => self.moving_since = None,
        }
        // An order is done when the job is where it should be, and void when it has had no effect for long.
        let arrived = |order: &Order| matches!(&facts.state, JobState::Running { node, .. } if *node == order.node);
        let is_over = |order: &Order, at: Time| {
            arrived(order) || (facts.state != JobState::Moving && now.since(at) > ORDER_STANDS)
        };
        if self.order.as_ref().is_some_and(|(order, at)| is_over(order, *at)) {
            self.order = None;
        }
        if facts.pod_uid.is_some() && facts.pod_uid != self.pod {
            // The next attempt: what came before stays its past.
            self.before = self.all();
            self.now = Told::default();
            self.pod = facts.pod_uid.clone();
        }
        if let Some(node) = node {
            let cores = nodes.there(node).map_or(1.0, |there| there.cores);
            if let Some((_, old)) = self.node.filter(|(before, _)| *before != node) {
                // Use is counted in parts of the node it happens on.
                let factor = old / cores.max(f64::MIN_POSITIVE);
                self.before.consumed.cpu *= factor;
            }
            self.node = Some((node, cores));
        }
        // What is said of an attempt only grows; an agent that has just begun may know less for a moment.
        if let Some(told) = told.filter(|told| told.signal.reports >= self.now.signal.reports) {
            self.now = told;
        }
    }

    /// Over all attempts.
    fn all(&self) -> Told {
        let (before, now) = (&self.before, &self.now);
        let signal = Signal {
            reports: before.signal.reports + now.signal.reports,
            first: before.signal.first.or(now.signal.first),
            last: now.signal.last.or(before.signal.last),
            longest_gap: now.signal.longest_gap.max(before.signal.longest_gap),
            step: now.signal.step.or(before.signal.step),
            total: now.signal.total.or(before.signal.total),
            outlook: now.signal.outlook.or(before.signal.outlook),
        };
        let consumed = PerResource::from_fn(|r| before.consumed.get(r) + now.consumed.get(r));
        Told { signal, consumed, most: now.most.or(before.most) }
    }
}

fn rules(policy: JobPolicy, specon: Specon) -> Policy {
    let preset = match policy {
        JobPolicy::Na => Preset::Na,
        JobPolicy::Specon => Preset::Specon,
        JobPolicy::Flowcon2 => Preset::Flowcon2,
        JobPolicy::Gainshare => Preset::Gainshare,
    };
    let mut rules = Policy::from(preset);
    if let MoveRule::Specon(numbers) = &mut rules.moves {
        *numbers = specon;
    }
    rules
}

fn median(values: &mut [f64]) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied()
}

/// How a picture marks a stay that began with this move, as the thesis's Figure 6.22 does: `-M` moved, `-R` moved to even things out, or home.
pub fn move_mark(why: &str) -> &'static str {
    if why.contains(EVENS_OUT) || why.contains(GOES_HOME) { "-R" } else { "-M" }
}

const EVENS_OUT: &str = "has less to do";
const GOES_HOME: &str = "moves home to";

fn sentence(policy: JobPolicy, because: Option<MoveReason>, node: &str) -> String {
    match (because, policy) {
        (None, JobPolicy::Flowcon2) => format!("starts on {node}: there it and its neighbours would grow most"),
        (None, JobPolicy::Gainshare) => format!("starts on {node}: it has the fewest jobs for its cores, or none"),
        (None, _) => format!("starts on {node}: it has the fewest jobs for its cores"),
        (Some(MoveReason::SlowGrowth), _) => {
            format!("has converged beside jobs that still grow, and {node} has the lowest score: moves there")
        }
        (Some(MoveReason::Rebalance), _) => {
            format!("every job has converged and {node} {EVENS_OUT}: moves there")
        }
        (Some(MoveReason::Gain), _) => {
            format!("{node} has run empty, and the move ends jobs sooner by far more than it costs: moves there")
        }
        (Some(MoveReason::Owed), _) => {
            format!("it, or one it runs beside, would end later than with equal shares: {GOES_HOME} {node}")
        }
    }
}

/// Microseconds since 1970.
fn time(at: jiff::Timestamp) -> Time {
    Time(at.as_microsecond().max(0) as u64)
}

/// Looks at the cluster for as long as this manager leads.
pub(crate) async fn run(leader: Arc<Leader>, specon: Specon) {
    let board = leader.jobs.clone();
    let origin = Instant::now();
    let unix_us = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as u64;
    let clock = Clock { origin, unix_us };
    let mut decision = Decision::new(specon);
    loop {
        let _ = tokio::time::timeout(LOOK_EVERY, board.changed.notified()).await;
        if !leader.is_synced() || board.is_empty() {
            continue;
        }
        // A large cluster takes a good part of a second: agents and watches are served meanwhile.
        let looker = leader.clone();
        let pass = tokio::task::spawn_blocking(move || {
            let (began, spent_before) = (Instant::now(), thread_time());
            let seen = look(&looker, looker.jobs.facts(), &clock);
            let looked = began.elapsed();
            let orders = decision.decide(&seen);
            looker.jobs.judge(decision.take_turned());
            let (jobs, nodes, took) = (seen.jobs.len(), seen.nodes.len(), began.elapsed());
            // On a busy machine a pass takes longer than it costs.
            let spent = thread_time().saturating_sub(spent_before);
            tracing::debug!(jobs, nodes, orders = orders.len(), ?looked, ?took, ?spent, "pass");
            (decision, orders, took)
        });
        let Ok((decided, orders, took)) = pass.await else { return };
        decision = decided;
        leader.metrics.pass_seconds.observe(took.as_secs_f64());
        for order in orders {
            tracing::info!(job = order.uid, node = order.node, kind = ?order.kind, why = order.why, "order");
            let kind = if order.kind == OrderKind::Move { "move" } else { "place" };
            leader.metrics.orders.get_or_create(&OrderLabels { kind }).inc();
            board.put(order);
        }
        // When everything changes at once, passes take half of a core and no more.
        tokio::time::sleep(took).await;
    }
}

/// What this thread has had of a processor.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// From moments of this process to microseconds since 1970 that never jump.
#[derive(Clone, Copy)]
struct Clock {
    origin: Instant,
    unix_us: u64,
}

impl Clock {
    fn at(&self, moment: Instant) -> Time {
        let after = moment.saturating_duration_since(self.origin).as_micros() as u64;
        let before = self.origin.saturating_duration_since(moment).as_micros() as u64;
        Time((self.unix_us + after).saturating_sub(before))
    }
}

fn look(leader: &Leader, jobs: Vec<Arc<JobFacts>>, clock: &Clock) -> Seen {
    let now = Instant::now();
    leader.look(|world| {
        let agents = leader.agents.lock();
        let with_words = |facts: Arc<JobFacts>| {
            let said = told(world, &agents, &facts, clock);
            (facts, said)
        };
        let jobs = jobs.into_iter().map(with_words).collect();
        Seen { now: clock.at(now), nodes: nodes(world, &agents, now), jobs }
    })
}

fn nodes(world: &World, agents: &Agents, now: Instant) -> BTreeMap<String, NodeSeen> {
    let seen = world.nodes().map(|(name, facts)| {
        let asked = world.requested(name);
        let (milli, bytes) = (facts.cpu_milli.unwrap_or(0), facts.memory_bytes.unwrap_or(0));
        let node = NodeSeen {
            cores: milli.saturating_sub(asked.others.0) as f64 / 1000.0,
            speed: f64::from(facts.speed_percent) / 100.0,
            memory_bytes: bytes.saturating_sub(asked.others.1),
            free_milli: milli.saturating_sub(asked.others.0 + asked.jobs.0),
            free_bytes: bytes.saturating_sub(asked.others.1 + asked.jobs.1),
            open: facts.open,
            heard: agents.is_heard(name, now),
        };
        (name.clone(), node)
    });
    seen.filter(|(_, node)| node.cores > 0.0).collect()
}

fn told(world: &World, agents: &Agents, facts: &JobFacts, clock: &Clock) -> Option<Told> {
    let pod = facts.pod_uid.as_deref()?;
    let said = agents.job(pod)?.signal.as_ref()?;
    let node = match &facts.state {
        JobState::Running { node, .. } => node,
        _ => world.node_of(pod)?,
    };
    let agent = agents.clock(node)?;
    Some(Told { signal: said.signal(|us| clock.at(agent.at(us))), consumed: said.consumed(), most: said.most })
}

/// An agent's clock on ours.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AgentClock {
    heard: Instant,
    at_us: u64,
}

impl AgentClock {
    /// A message that the agent sent when its clock said `at_us` came now.
    pub(crate) fn of(at_us: u64, heard: Instant) -> AgentClock {
        AgentClock { heard, at_us }
    }

    /// The better of two: the one whose message was under way for less time.
    pub(crate) fn quicker(self, other: AgentClock) -> AgentClock {
        let ours = other.heard.saturating_duration_since(self.heard).as_micros() as u64;
        let theirs = other.at_us.saturating_sub(self.at_us);
        if theirs > ours { other } else { self }
    }

    fn at(&self, us: u64) -> Instant {
        let (after, before) = (us.saturating_sub(self.at_us), self.at_us.saturating_sub(us));
        let moment = self.heard + Duration::from_micros(after);
        moment.checked_sub(Duration::from_micros(before)).unwrap_or(moment)
    }
}

#[cfg(test)]
#[path = "cluster_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "pass_tests.rs"]
mod pass_tests;
