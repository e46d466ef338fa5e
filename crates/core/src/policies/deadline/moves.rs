//! `move`: a job that will miss its deadline on its node moves to one on which it makes it.
//!
//! **Problem.** Deadlines are kept within a node ([`super`]). A crowded node cannot keep all of them, while another
//! node has room, or one has joined because it was asked for ([`super::nodes_needed`]).
//!
//! **Approach.** The driver says of each job with a deadline whether it will be late on its node, and what it has left
//! to do ([`FinishView`]). A job that can be moved and for which a miss has been predicted for [`PATIENCE`] is planned
//! on every other node beside the jobs that are in time there: [`super::fill`] must find room for the deadlines of all
//! of them. Each counts at the far end of the interval of its prediction, and the job has the cost of the move less
//! time. Of the nodes that remain it goes to the one on which it would end first; nodes with late jobs of their own
//! come last. What it will have there is planned before the next job is. If no node remains, the job stays, and a
//! new node may be asked for ([`MoveMemory::needs_node`]).
//!
//! *Once.* A job moves for its deadline at most once in its life, whatever becomes of the move ([`Marks`]), and stays
//! where it makes its deadline: moves by gain leave it there. From a node with several late jobs one moves at a time,
//! the one that is due first. The others are looked at again when that has made room.
//!
//! *Left out.* A job that has been silent for long: what it has left is not known any more. Nodes on which a job
//! has just begun, or is about to: what it needs for a deadline is known only after its first reports.
//!
//! While no deadline needs a move, another rule answers, as if this one were not there.
//!
//! **Properties** (tests of that name in `tests/deadline_moves.rs`):
//! `a_late_job_on_a_full_node_moves_once_to_the_free_node_and_makes_its_deadline`;
//! `a_job_whose_gain_the_cost_of_the_move_eats_stays`; `no_move_breaks_a_promise_of_the_other_node`;
//! `what_floors_keep_is_not_given_to_a_late_job`; `a_job_moves_for_its_deadline_once_also_after_a_restart`;
//! `only_a_lasting_miss_moves_a_job`;
//! `without_a_late_job_the_moves_are_those_by_gain`.

use super::fill::{Task, by_deadline, earliest_s, fill};
use super::nodes::{USABLE_PART, task};
use crate::model::{JobId, NodeId, Span, Time};
use crate::plan::{Move, MoveReason, Plan};
use crate::policies::{Relocate, Share, Silence};
use crate::signal::Category;
use crate::view::{Deadline, Ends, FinishView, JobView, Marks, NodeView, Phase, View};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// A miss counts when it has been predicted for this long: predictions err after a change of the node.
const PATIENCE: Span = Span::from_secs(10);

/// A late job that could not be moved is looked at again after this time.
const LOOK: Span = Span::from_secs(5);

/// More late jobs are not looked at in one run: those that are due first count.
const MOST_LATE: usize = 50;

/// What was done with a job that is out of view is kept for this long: longer than any move or outage.
const ABSENCE: Span = Span::from_secs(24 * 3600);

/// The rule with its memory. It has no numbers of its own.
pub(crate) struct MoveRule<'a> {
    /// What saving, stopping and restoring a job costs.
    pub(crate) cost: Span,
    pub(crate) silence: Silence,
    pub(crate) memory: &'a mut MoveMemory,
    /// What moves jobs while no deadline needs a move.
    pub(crate) otherwise: Box<dyn Relocate + 'a>,
}

/// What the rule remembers between two runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct MoveMemory {
    /// Jobs that will be late, and since when that has been predicted.
    late: BTreeMap<JobId, Time>,
    /// Jobs that were moved, and when.
    moved: BTreeMap<JobId, Time>,
    /// Late jobs for which no node was found in the last run.
    stuck: BTreeSet<JobId>,
    due: Option<Time>,
}

impl MoveMemory {
    pub(crate) fn is_empty(&self) -> bool {
        *self == MoveMemory::default()
    }

    /// What was done with a job and is not done again.
    pub(crate) fn marks(&self, job: JobId) -> Marks {
        Marks { for_deadline: self.moved.get(&job).copied(), ..Marks::default() }
    }

    /// Whether a job will miss its deadline on every node that there is.
    pub(crate) fn needs_node(&self, job: JobId) -> bool {
        self.stuck.contains(&job)
    }
}

impl Relocate for MoveRule<'_> {
    fn moves(&mut self, view: &View, plan: &Plan, share: &dyn Share) -> Vec<Move> {
        let moves = if self.must_run(view) { self.run(view, plan) } else { vec![] };
        if moves.is_empty() { self.otherwise.moves(view, plan, share) } else { moves }
    }

    fn is_due(&self, view: &View) -> bool {
        self.must_run(view) || self.otherwise.is_due(view)
    }

    fn due(&self) -> Option<Time> {
        self.memory.due.into_iter().chain(self.otherwise.due()).min()
    }

    fn category(&self, job: JobId) -> Option<Category> {
        self.otherwise.category(job)
    }
}

/// A job that will be late and may be moved.
struct Mover<'a> {
    job: &'a JobView,
    from: NodeId,
    deadline: Deadline,
    finish: FinishView,
}

impl MoveRule<'_> {
    fn must_run(&self, view: &View) -> bool {
        let has_changed = !self.late(view).map(|late| late.job.id).eq(self.memory.late.keys().copied());
        has_changed || self.memory.due.is_some_and(|due| view.now >= due)
    }

    /// Jobs that will be late and may be moved, in the order of their numbers.
    fn late<'v>(&self, view: &'v View) -> impl Iterator<Item = Mover<'v>> {
        view.jobs.iter().filter_map(move |job| {
            let finish = job.finish.filter(|finish| finish.ends == Ends::Late)?;
            let (from, deadline) = (job.node()?, job.deadline?);
            let has_moved = job.marks.for_deadline.is_some() || self.memory.moved.contains_key(&job.id);
            let may_move = !job.pinned && !has_moved && job.tasks.is_none() && !is_silent(self.silence, view.now, job);
            may_move.then_some(Mover { job, from, deadline, finish })
        })
    }

    fn run(&mut self, view: &View, plan: &Plan) -> Vec<Move> {
        let now = view.now;
        let mut late: Vec<Mover<'_>> = self.late(view).collect();
        let before = std::mem::take(&mut self.memory.late);
        let since = |late: &Mover<'_>| (late.job.id, before.get(&late.job.id).copied().unwrap_or(now));
        self.memory.late = late.iter().map(since).collect();
        self.memory.moved.retain(|id, at| view.job(*id).is_some() || now.since(*at) < ABSENCE);
        self.memory.stuck.clear();
        self.memory.due = (!late.is_empty()).then(|| now + LOOK);
        late.retain(|late| now.since(self.memory.late[&late.job.id]) >= PATIENCE);
        if late.is_empty() {
            return vec![];
        }
        late.sort_by_key(|late| (late.deadline.latest(), late.job.id));
        late.truncate(MOST_LATE);
        let mut rooms = self.rooms(view, plan);
        let (mut left, mut taken) = (BTreeSet::new(), BTreeSet::new());
        let mut moves = vec![];
        for Mover { job, from, deadline, finish } in late {
            if left.contains(&from) || taken.contains(&from) {
                continue;
            }
            let left_s = seconds_until(now, deadline.latest()) - self.cost.as_secs_f64();
            let others = rooms.iter().filter(|(to, _)| **to != from && !left.contains(*to));
            let ends = others.filter_map(|(to, room)| {
                let task = task(&finish.left, room.node.cores, room.node.speed, left_s);
                Some((room.has_late, room.ends_s(&task, job.floor.get())?, *to, task))
            });
            let best = ends.min_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2)));
            let Some((_, _, to, task)) = best else {
                self.memory.stuck.insert(job.id);
                continue;
            };
            if let Some(room) = rooms.get_mut(&to) {
                room.add(task, job.floor.get());
            }
            left.insert(from);
            taken.insert(to);
            self.memory.late.remove(&job.id);
            self.memory.moved.insert(job.id, now);
            moves.push(Move { job: job.id, to, why: MoveReason::Deadline });
        }
        // The others of these nodes have more room as soon as their neighbour is saved.
        let stays_beside = |id: &JobId| view.job(*id).and_then(JobView::node).is_some_and(|node| left.contains(&node));
        for (_, since) in self.memory.late.iter_mut().filter(|(id, _)| stays_beside(id)) {
            *since = now + self.cost;
        }
        moves
    }

    /// The nodes that may take a job, with what is promised there.
    fn rooms<'v>(&self, view: &'v View, plan: &Plan) -> BTreeMap<NodeId, Room<'v>> {
        let starts: BTreeSet<NodeId> = plan.starts.iter().map(|start| start.node).collect();
        let mut jobs: BTreeMap<NodeId, Vec<&JobView>> = BTreeMap::new();
        for job in &view.jobs {
            if let Some(node) = job.node() {
                jobs.entry(node).or_default().push(job);
            }
        }
        let open = view.nodes.iter().filter(|node| !starts.contains(&node.id));
        open.filter_map(|node| {
            let here = jobs.get(&node.id).map_or(&[][..], Vec::as_slice);
            let is_unknown = here.iter().any(|job| needs_unknown(self.silence, view.now, job));
            let room = if is_unknown { None } else { Room::new(view.now, node, here) };
            room.map(|room| (node.id, room))
        })
        .collect()
    }
}

/// A node that may take a job.
struct Room<'v> {
    node: &'v NodeView,
    /// How many more jobs may come; `None`: as many as come.
    slots: Option<usize>,
    /// What is kept for jobs whatever they need ([`JobView::floor`]).
    floors: f64,
    /// What the jobs need that are in time there.
    tasks: Vec<Task>,
    /// A job will be late there.
    has_late: bool,
}

impl<'v> Room<'v> {
    /// `None` if what is promised leaves nothing: on the slow side of the predictions it fills the node already.
    fn new(now: Time, node: &'v NodeView, jobs: &[&JobView]) -> Option<Room<'v>> {
        if !(node.cores > 0.0 && node.speed > 0.0) {
            return None;
        }
        let floors: f64 = jobs.iter().map(|job| job.floor.get()).sum();
        let capacity = capacity(floors);
        let promised = |due: fn(&Deadline) -> Time| -> Vec<Task> {
            let of_job = |job: &&JobView| {
                let (deadline, finish) = (job.deadline?, job.finish.filter(|finish| finish.ends == Ends::InTime)?);
                Some(task(&finish.left, node.cores, node.speed, seconds_until(now, due(&deadline))))
            };
            jobs.iter().filter_map(of_job).collect()
        };
        let slots = node.slots.map(|slots| slots.saturating_sub(jobs.len()));
        // Promises may rest on the tolerated lateness.
        let attempts = [promised(|deadline| deadline.at), promised(Deadline::latest)];
        let kept =
            attempts.into_iter().find(|tasks| fill(tasks, &by_deadline(tasks, 0..tasks.len()), capacity).is_some());
        let has_late = jobs.iter().any(|job| job.finish.is_some_and(|finish| finish.ends == Ends::Late));
        kept.map(|tasks| Room { node, slots, floors, tasks, has_late })
    }

    /// When a job with this floor would end here at the earliest, if it makes its deadline and no other job loses its
    /// own.
    fn ends_s(&self, task: &Task, floor: f64) -> Option<f64> {
        if self.slots == Some(0) || task.left_s <= 0.0 {
            return None;
        }
        let capacity = capacity(self.floors + floor);
        let mut tasks = self.tasks.clone();
        let order = by_deadline(&tasks, 0..tasks.len());
        tasks.push(*task);
        fill(&tasks, &by_deadline(&tasks, 0..tasks.len()), capacity)?;
        Some(earliest_s(&tasks, &order, capacity, task))
    }

    fn add(&mut self, task: Task, floor: f64) {
        self.tasks.push(task);
        self.floors += floor;
        self.slots = self.slots.map(|slots| slots.saturating_sub(1));
    }
}

/// The part of a node that deadlines may take.
fn capacity(floors: f64) -> f64 {
    (1.0 - floors).clamp(0.0, USABLE_PART)
}

fn seconds_until(now: Time, moment: Time) -> f64 {
    moment.as_secs_f64() - now.as_secs_f64()
}

/// Whether a job has not reported for so long that its last report says nothing any more.
fn is_silent(silence: Silence, now: Time, job: &JobView) -> bool {
    job.signal.last.is_none_or(|last| {
        let silent = now.since(last.at);
        silent > silence.patience && silent.as_secs_f64() > silence.factor * job.signal.longest_gap.as_secs_f64()
    })
}

/// Whether a job has begun so recently that what it needs is not known yet. Of one that is on its way to its node it
/// may not even be known that it has a deadline.
fn needs_unknown(silence: Silence, now: Time, job: &JobView) -> bool {
    let Phase::Running { since, .. } = job.phase else { return false };
    let has_deadline = job.deadline.is_some() || job.marks.for_deadline.is_some();
    let patience = if has_deadline { silence.patience } else { PATIENCE };
    let begun = job.marks.for_deadline.filter(|at| *at <= now).map_or(since, |at| since.max(at));
    job.finish.is_none() && now.since(begun) < patience
}
