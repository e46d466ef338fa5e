//! Where a curve is going: its value at a horizon, what is left to gain, when it flattens, when it
//! meets a target.
//!
//! **Problem.** Losses fall and accuracies rise along curves of unknown family, with noise, spikes,
//! plateaus and sudden drops when the learning rate is cut. A single fitted form is confidently
//! wrong as soon as the job does not follow it.
//!
//! **Approach.** One family with two shape numbers, `y(x) = limit + span · (1 + x/(s·p))^−p`,
//! contains the forms people fit: `p = 1` is Optimus's `1/(β₀k + β₁) + β₂`, `p = 2` is close to
//! SLAQ's sublinear form, `p = ½` a slow power law, `p → ∞` the exponential. For a given shape
//! `limit` and `span` follow in closed form (weighted least squares). So a coarse grid over both
//! shape numbers is fitted as a whole and *averaged*, each member weighted by how well it explains
//! the points and by a prior; the spread of the members is the interval. Before that
//! - reports that stray far from their neighbours lose weight;
//! - a sudden change of level that stays (a learning-rate drop) is found and everything before it
//!   is moved by its height, so that the form is fitted to one smooth curve.
//!
//! **Prior.** People stop a run when it has flattened, so a time scale `s` between a twentieth and
//! half of the horizon is likely and one beyond the horizon is not; without a horizon the run so
//! far takes its place. A value that has stayed within 0…1 (or 0…100) is taken for a fraction and
//! does not leave that range.
//!
//! **Value at a horizon.** It rests on more than the family: see [`super::value`]. When the curve is flat, what is left
//! to gain and when a target is met are answered by the family alone.
//!
//! **Cost.** At most 64 points and 48 shapes, no iteration: some 40 µs. A [`super::Tracker`] fits
//! again only when a sixteenth of the reports is new.
//!
//! **Properties** (tests): exact on noiseless members of the family, unmoved by spikes, equivariant
//! under scaling of both axes and under `y → −y`, never NaN, never panics.

use super::blend::Clues;
pub use super::blend::Estimate;
use super::curve::Curve;
use serde::{Deserialize, Serialize};

/// When a target is met.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct TargetPrediction {
    /// How likely it is met at all.
    pub chance: f64,
    /// At which position, if it is.
    pub at: Option<Estimate>,
}

/// A curve counts as flat when this part of its whole change is still to come.
pub const FLAT: f64 = 0.02;

/// The time scale of a curve is about this part of the whole run: people stop when it is flat. Its
/// logarithm deviates by 1.
pub const TYPICAL_SCALE: f64 = 0.15;

/// No form may promise more than this many times the change seen.
pub(super) const LARGEST_CHANGE: f64 = 3.0;

/// The part of the truth an [`Estimate`] leaves out on either side.
const TAIL: f64 = 0.1;

/// Time scales tried, as parts of the run so far: from "flat since long" to "all still to come", a
/// factor of 1.6 apart.
const SCALES: [f64; 12] = [0.02, 0.032, 0.051, 0.082, 0.131, 0.21, 0.336, 0.537, 0.86, 1.374, 2.199, 3.518];

/// A curve whose time scale is longer than this many times the run so far looks like a straight line.
const STRAIGHT: f64 = 2.0;

/// How fast the tail of a curve fades.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tail {
    /// `p = ½`.
    Root,
    /// `p = 1`.
    Inverse,
    /// `p = 2`.
    InverseSquare,
    /// `p → ∞`.
    Exponential,
}

impl Tail {
    pub(super) const ALL: [Tail; 4] = [Tail::Root, Tail::Inverse, Tail::InverseSquare, Tail::Exponential];

    /// The form at `z = x/s`: 1 at the start, falling to 0.
    pub(super) fn at(self, z: f64) -> f64 {
        match self {
            Tail::Root => 1.0 / (1.0 + 2.0 * z).sqrt(),
            Tail::Inverse => 1.0 / (1.0 + z),
            Tail::InverseSquare => {
                let r = 1.0 / (1.0 + 0.5 * z);
                r * r
            }
            Tail::Exponential => (-z).exp(),
        }
    }

    /// The `z` at which the form has fallen to `f` (0 < f ≤ 1).
    fn inverse(self, f: f64) -> f64 {
        match self {
            Tail::Root => 0.5 * (1.0 / (f * f) - 1.0),
            Tail::Inverse => 1.0 / f - 1.0,
            Tail::InverseSquare => 2.0 * (1.0 / f.sqrt() - 1.0),
            Tail::Exponential => -f.ln(),
        }
    }

    /// What is believed before any point is seen. Slow tails are rarer: a run that ended on one
    /// would have been prolonged.
    fn prior(self) -> f64 {
        match self {
            Tail::Root => 0.5,
            Tail::Inverse => 1.0,
            Tail::InverseSquare => 1.0,
            Tail::Exponential => 1.0,
        }
    }
}

/// One member of the family, fitted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Member {
    pub tail: Tail,
    pub scale: f64,
    pub limit: f64,
    pub span: f64,
    /// Between 0 and 1; the weights of all members sum to 1.
    pub weight: f64,
}

impl Member {
    pub fn at(&self, x: f64) -> f64 {
        self.limit + self.span * self.tail.at(x / self.scale)
    }
}

/// A sudden change of level that stayed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Jump {
    pub x: f64,
    pub height: f64,
}

/// A fitted curve.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    members: Vec<Member>,
    /// Position of the newest report.
    end: f64,
    /// The position at which the job will stop, where that is known: the prior of the members' time scales.
    horizon: Option<f64>,
    /// The smoothed value there, and how far single reports stray from the smooth curve.
    level: f64,
    noise: f64,
    /// The smoothed value at the first report.
    start: f64,
    range: (f64, f64),
    jump: Option<Jump>,
    /// The newest report, unless it is a spike.
    newest: f64,
    /// The slope of ln |y| over ln x along the newest part of the curve.
    power: f64,
}

/// A point as the solver sees it.
#[derive(Debug, Clone, Copy)]
pub(super) struct WeightedPoint {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) w: f64,
}

/// Fits `curve`. `horizon` is the position at which the job will stop, if that is known. `None` for
/// a curve without any report.
pub fn fit(curve: &Curve, horizon: Option<f64>) -> Option<Fit> {
    let end = curve.at()?;
    let mut points: Vec<WeightedPoint> = curve
        .points()
        .map(|p| WeightedPoint { x: p.x, y: p.y, w: f64::from(p.reports).sqrt() * (NEWNESS + p.x / end) })
        .collect();
    let range = natural_range(&points);
    let noise = discount_strays(&mut points);
    let newest = newest_value(&points, noise);
    let jump = align_jump(&mut points, noise);
    let power = recent_power(&points);
    let (low, high) = points.iter().fold((f64::MAX, f64::MIN), |(l, h), p| (l.min(p.y), h.max(p.y)));
    let last = points[points.len() - 1];
    let horizon = horizon.filter(|h| *h > end);
    // Changes at the last digit, or so small that their squares vanish, are none.
    let least = (f64::EPSILON * high.abs().max(low.abs())).max(1e-140);
    if points.len() < 2 || high - low <= least || end <= 0.0 {
        return Some(flat(&points, end, range, jump));
    }
    let members = ensemble(&points, end, horizon, range, noise.max(0.001 * (high - low)));
    if members.is_empty() {
        return Some(flat(&points, end, range, jump));
    }
    let level = recent_level(&points, &members).unwrap_or(last.y);
    let start = members.iter().map(|m| m.weight * m.at(points[0].x)).sum();
    Some(Fit { members, end, horizon, level, noise, start, range, jump, newest, power })
}

/// A curve without a slope: one report, or always the same value.
fn flat(points: &[WeightedPoint], end: f64, range: (f64, f64), jump: Option<Jump>) -> Fit {
    let y = points[points.len() - 1].y;
    // One report says nothing about what is to come; the usual relative change over a run stands in
    // as the spread.
    let noise = if points.len() < 2 { 0.25 * y.abs() } else { 0.0 };
    let member = Member { tail: Tail::Exponential, scale: end.abs().max(1.0), limit: y, span: 0.0, weight: 1.0 };
    Fit { members: vec![member], end, horizon: None, level: y, noise, start: y, range, jump, newest: y, power: 0.0 }
}

/// The newest report. A report that lies far from where the two before it lead (a spike, a torn
/// number) is moved towards them.
fn newest_value(points: &[WeightedPoint], noise: f64) -> f64 {
    let n = points.len();
    let y = points[n - 1].y;
    if n < 4 {
        return y;
    }
    let (a, b) = (points[n - 3], points[n - 2]);
    let ahead = b.y + (b.y - a.y) * (points[n - 1].x - b.x) / (b.x - a.x);
    let slack = 3.0 * noise;
    y.clamp(b.y.min(ahead) - slack, b.y.max(ahead) + slack)
}

/// The part of the curve, counted from its start, that is too old to say which power law it follows
/// now.
const OLD: f64 = 0.35;

/// The slope of ln |y| over ln x from [`OLD`] on, over at least the last three points; 0 where
/// there is none.
fn recent_power(points: &[WeightedPoint]) -> f64 {
    let end = points[points.len() - 1].x;
    let old = points.iter().take_while(|p| p.x < OLD * end).count();
    let recent = &points[old.min(points.len().saturating_sub(3))..];
    let sign = recent[0].y.signum();
    if recent.iter().any(|p| p.x <= 0.0 || p.y * sign <= 0.0) {
        return 0.0;
    }
    let logs = recent.iter().map(|p| (p.x.ln(), (p.y * sign).ln(), p.w));
    let (w, wx, wy) = logs.clone().fold((0.0, 0.0, 0.0), |(w, wx, wy), (x, y, v)| (w + v, wx + v * x, wy + v * y));
    let (x0, y0) = (wx / w, wy / w);
    let (xx, xy) =
        logs.fold((0.0, 0.0), |(xx, xy), (x, y, v)| (xx + v * (x - x0) * (x - x0), xy + v * (x - x0) * (y - y0)));
    if xx > 1e-12 { xy / xx } else { 0.0 }
}

/// Values that never left 0…1 or 0…100 are taken for fractions or percentages. A loss may fall into
/// it too; then the bound does no harm, because losses do not become negative.
fn natural_range(points: &[WeightedPoint]) -> (f64, f64) {
    let within = |l: f64, h: f64| points.iter().all(|p| (l..=h).contains(&p.y));
    if within(0.0, 1.0) {
        (0.0, 1.0)
    } else if within(0.0, 100.0) && points.last().is_some_and(|l| points[0].y < l.y) {
        (0.0, 100.0)
    } else if within(0.0, f64::MAX) {
        (0.0, f64::MAX)
    } else {
        (f64::MIN, f64::MAX)
    }
}

/// Lowers the weight of points far from the line between their neighbours; returns how far points
/// usually are.
fn discount_strays(points: &mut [WeightedPoint]) -> f64 {
    let n = points.len();
    if n < 4 {
        return 0.0;
    }
    let stray = |i: usize| {
        let (a, b, c) = (points[i - 1], points[i], points[i + 1]);
        let t = (b.x - a.x) / (c.x - a.x);
        b.y - (a.y + t * (c.y - a.y))
    };
    let strays: Vec<f64> = (1..n - 1).map(stray).collect();
    let mut sorted: Vec<f64> = strays.iter().map(|s| s.abs()).collect();
    sorted.sort_by(f64::total_cmp);
    // For Gaussian noise σ the distance from the middle of two neighbours has standard deviation
    // σ·√1.5, and the median of its magnitude is 0.6745 of that.
    let noise = sorted[sorted.len() / 2] / (0.6745 * 1.5f64.sqrt());
    for (i, s) in strays.iter().enumerate() {
        let far = s.abs() / (4.0 * noise).max(f64::MIN_POSITIVE);
        if far > 1.0 && noise > 0.0 {
            points[i + 1].w /= far;
        }
    }
    noise
}

/// How many points on either side of a jump are compared.
const REACH: usize = 3;

/// Finds the largest change of level that is sudden (much more than the changes right before and
/// after it) and stays, and moves everything before it by its height.
fn align_jump(points: &mut [WeightedPoint], noise: f64) -> Option<Jump> {
    let n = points.len();
    if n < 4 * REACH {
        return None;
    }
    let middle_of = |i: usize| {
        let mut v = [points[i].y, points[i + 1].y, points[i + 2].y];
        v.sort_by(f64::total_cmp);
        v[1]
    };
    // The change across the gap before point i, and the changes over equally many points right
    // before and right after it.
    let (at, height, around) = (2 * REACH..=n - REACH)
        .map(|i| {
            let across = middle_of(i) - middle_of(i - REACH);
            let before = middle_of(i - REACH) - middle_of(i - 2 * REACH);
            let after = if i + 2 * REACH <= n { middle_of(i + REACH) - middle_of(i) } else { 0.0 };
            (i, across, before.abs().max(after.abs()))
        })
        .max_by(|a, b| (a.1.abs() - 2.0 * a.2).total_cmp(&(b.1.abs() - 2.0 * b.2)))?;
    let (low, high) = points.iter().fold((f64::MAX, f64::MIN), |(l, h), p| (l.min(p.y), h.max(p.y)));
    let sudden = height.abs() > 3.0 * around + 4.0 * noise && height.abs() > 0.03 * (high - low);
    if !sudden {
        return None;
    }
    let jump = Jump { x: 0.5 * (points[at - 1].x + points[at].x), height };
    for p in &mut points[..at] {
        p.y += height;
    }
    Some(jump)
}

/// Newer points weigh more: the weight grows from this at the start by one over the run, because
/// what a curve did last says most about what it does next.
const NEWNESS: f64 = 0.25;

/// Members are judged as if at most this many points were independent: neighbours share their noise and no form is
/// exactly true.
const MOST_INDEPENDENT: f64 = 24.0;

/// What a member's weight is multiplied with if it tends to a value that cannot be, such as a
/// negative loss. Not zero: sometimes all do.
const IMPOSSIBLE: f64 = 0.01;

fn ensemble(points: &[WeightedPoint], end: f64, horizon: Option<f64>, range: (f64, f64), noise: f64) -> Vec<Member> {
    let n = points.len() as f64;
    let independent = n.min(MOST_INDEPENDENT);
    let mut members = Vec::with_capacity((SCALES.len() + 1) * Tail::ALL.len());
    let mut misfits = Vec::with_capacity(members.capacity());
    let mut add = |tail: Tail, scale: f64| {
        let (limit, span, misfit) = solve(points, |x| tail.at(x / scale))?;
        let possible = if (range.0..=range.1).contains(&limit) { 1.0 } else { IMPOSSIBLE };
        let weight = prior(scale, end, horizon) * tail.prior() * possible;
        members.push(Member { tail, scale, limit, span, weight });
        misfits.push(misfit);
        Some(misfit)
    };
    for tail in Tail::ALL {
        let on_grid = SCALES.map(|relative| add(tail, relative * end).unwrap_or(f64::INFINITY));
        // Between the grid's best scale and its neighbours there may be a better one: the lowest
        // point of the parabola through the three.
        let best = (1..SCALES.len() - 1).min_by(|&i, &j| on_grid[i].total_cmp(&on_grid[j])).unwrap_or(1);
        let [l, m, r] = [best - 1, best, best + 1].map(|i| on_grid[i].max(f64::MIN_POSITIVE).sqrt());
        let shift = 0.5 * (l - r) / (l - 2.0 * m + r);
        if shift.abs() < 1.0 {
            add(tail, SCALES[best] * end * (SCALES[best + 1] / SCALES[best]).powf(shift));
        }
    }
    let floor = noise * noise;
    let best = misfits.iter().copied().fold(f64::MAX, f64::min) + floor;
    for (m, misfit) in members.iter_mut().zip(&misfits) {
        m.weight *= (best / (misfit + floor)).powf(0.5 * independent);
    }
    let total: f64 = members.iter().map(|m| m.weight).sum();
    for m in &mut members {
        m.weight /= total;
    }
    members.retain(|m| m.weight > 1e-4);
    let total: f64 = members.iter().map(|m| m.weight).sum();
    members.iter_mut().for_each(|m| m.weight /= total);
    members
}

/// The deviation of the logarithm of a time scale of which the points tell nothing.
const UNKNOWN_SCALE: f64 = 3.0;

/// How likely a time scale is before any point is seen: log-normal around a seventh of the run.
fn prior(scale: f64, end: f64, horizon: Option<f64>) -> f64 {
    let (typical, spread) = match horizon {
        Some(h) => (TYPICAL_SCALE * h, 1.0),
        None => (0.3 * end, 1.0),
    };
    // Nothing is impossible, however absurd the horizon.
    let z = ((scale / typical).ln() / spread).clamp(-4.0, 4.0);
    (-0.5 * z * z).exp()
}

/// Weighted least squares for `y = limit + span · form(x)`: limit, span, and the mean squared
/// misfit.
pub(super) fn solve(points: &[WeightedPoint], form: impl Fn(f64) -> f64) -> Option<(f64, f64, f64)> {
    let (mut w, mut wf, mut wy) = (0.0, 0.0, 0.0);
    let (mut wff, mut wfy, mut wyy) = (0.0, 0.0, 0.0);
    // Sums relative to the last point, so that nothing is lost when a large value changes little.
    let (y0, f0) = points.last().map(|p| (p.y, form(p.x)))?;
    for p in points {
        let (f, y) = (form(p.x) - f0, p.y - y0);
        w += p.w;
        wf += p.w * f;
        wy += p.w * y;
        wff += p.w * f * f;
        wfy += p.w * f * y;
        wyy += p.w * y * y;
    }
    let det = w * wff - wf * wf;
    if det.is_nan() || det <= 1e-12 * w * wff {
        return None;
    }
    let span = (w * wfy - wf * wy) / det;
    let offset = (wy - span * wf) / w;
    let misfit = ((wyy - offset * wy - span * wfy) / w).max(0.0);
    let limit = y0 + offset - span * f0;
    (limit.is_finite() && span.is_finite()).then_some((limit, span, misfit))
}

/// Where the curve is now: the members' value corrected by the mean of the last residuals.
fn recent_level(points: &[WeightedPoint], members: &[Member]) -> Option<f64> {
    let end = points.last()?.x;
    let value = |x: f64| members.iter().map(|m| m.weight * m.at(x)).sum::<f64>();
    let recent = &points[points.len() - points.len().min(2 + points.len() / 8)..];
    let weight: f64 = recent.iter().map(|p| p.w).sum();
    let residual: f64 = recent.iter().map(|p| p.w * (p.y - value(p.x))).sum::<f64>() / weight;
    Some(value(end) + residual).filter(|v| v.is_finite())
}

impl Fit {
    /// The smoothed value at the newest report.
    pub fn level(&self) -> f64 {
        self.level
    }

    /// The smoothed value at the first report.
    pub fn start(&self) -> f64 {
        self.start
    }

    /// Whether the reports show no bend, so that nothing but the bounds of the value says where the curve ends: most of
    /// the weight has members whose change is nearly all still to come.
    pub fn is_straight(&self) -> bool {
        let is_straight = |m: &&Member| m.span != 0.0 && m.scale > STRAIGHT * self.end;
        self.members.iter().filter(is_straight).map(|m| m.weight).sum::<f64>() > 0.5
    }

    /// The standard deviation of single reports around the smooth curve.
    pub fn noise(&self) -> f64 {
        self.noise
    }

    pub fn jump(&self) -> Option<Jump> {
        self.jump
    }

    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The smooth curve at `x`, also within what was seen (after a jump: moved to the level behind
    /// it).
    pub fn at(&self, x: f64) -> f64 {
        self.members.iter().map(|m| m.weight * m.at(x)).sum()
    }

    /// What the family knows about the value at `x`, which lies beyond the newest report.
    pub(super) fn clues(&self, x: f64) -> Clues {
        // Beyond a million times the run so far every clue has reached its limit.
        let x = x.min(1e6 * self.end.max(f64::MIN_POSITIVE));
        let part = if self.end > 0.0 { (self.end / x).min(1.0) } else { 0.0 };
        let change = |m: &Member| m.span * (m.tail.at(x / m.scale) - m.tail.at(self.end / m.scale));
        let mean: f64 = self.members.iter().map(|m| m.weight * change(m)).sum();
        let variance: f64 = self.members.iter().map(|m| m.weight * (change(m) - mean).powi(2)).sum();
        let seen = self.level - self.start;
        let direction = if seen > 0.0 { 1.0 } else { -1.0 };
        let bound = if seen > 0.0 { self.range.1 } else { self.range.0 };
        let room = if bound.abs() < f64::MAX { (bound - self.level).abs() } else { self.level.abs() };
        let most = LARGEST_CHANGE * seen.abs();
        let doublings = if part > 0.0 { -part.ln() } else { 0.0 };
        let power = self.level * (self.power * doublings).clamp(-3.0, 3.0).exp_m1();
        Clues {
            level: self.level,
            part,
            changes: [
                self.newest - self.level,
                self.family_at(x).mid - self.level,
                power.clamp(-most, most),
                direction * room.min(seen.abs()) * (1.0 - part),
            ],
            tested: 0.0,
            trust: 0.0,
            direction,
            noise: self.noise,
            disagreement: variance.sqrt(),
            seen: seen.abs(),
            range: self.range,
        }
    }

    /// The family's forecast at `x`.
    pub(super) fn family_at(&self, x: f64) -> Estimate {
        self.estimate(|m| m.tail.at(x / m.scale))
    }

    /// The value the curve tends to.
    pub fn limit(&self) -> Estimate {
        self.estimate(|_| 0.0)
    }

    /// The change still to come until `x`, in units of the change seen so far: 0 when flat, 1 when
    /// half the way is left. Never negative.
    pub fn gain_left(&self, x: f64) -> f64 {
        let seen = (self.level - self.start).abs();
        let left = (self.family_at(x).mid - self.level).abs();
        if seen > f64::MIN_POSITIVE { (left / seen).min(1e6) } else { 0.0 }
    }

    /// The position at which all but [`FLAT`] of the change is made; not before the newest report.
    pub fn flat_at(&self) -> Estimate {
        self.quantiles(|m| {
            let x = if m.span == 0.0 { self.end } else { m.scale * m.tail.inverse(FLAT) };
            (x.max(self.end), 0.0)
        })
    }

    /// The time scale on which the curve falls, and the deviation of its logarithm, as the points
    /// alone tell them. The prior of a fit is taken out: with a horizon it repeats what is said of the length of the
    /// run, and without one it grows with the age of the run, which says nothing of its length.
    pub fn scale(&self) -> (f64, f64) {
        let (mut sum, mut first, mut second) = (0.0, 0.0, 0.0);
        for m in &self.members {
            let (weight, ln) = (m.weight / prior(m.scale, self.end, self.horizon), m.scale.ln());
            sum += weight;
            first += weight * ln;
            second += weight * ln * ln;
        }
        let known = self.members.iter().any(|m| m.span != 0.0);
        if !(known && sum > 0.0) {
            return (0.3 * self.end, UNKNOWN_SCALE);
        }
        let mean = first / sum;
        (mean.exp(), (second / sum - mean * mean).max(0.0).sqrt())
    }

    /// Where the curve meets `target`.
    pub fn reaches(&self, target: f64) -> TargetPrediction {
        let rising = self.limit().mid >= self.level;
        if (rising && target <= self.level) || (!rising && target >= self.level) {
            return TargetPrediction {
                chance: 1.0,
                at: Some(Estimate { mid: self.end, low: self.end, high: self.end }),
            };
        }
        let meets = |m: &Member| {
            let f = m.tail.at(self.end / m.scale) + (target - self.level) / m.span;
            (f > 0.0 && f <= 1.0).then(|| (m.scale * m.tail.inverse(f)).max(self.end))
        };
        let chance: f64 = self.members.iter().filter(|m| meets(m).is_some()).map(|m| m.weight).sum();
        let found: Vec<(f64, f64)> = self.members.iter().filter_map(|m| Some((meets(m)?, m.weight / chance))).collect();
        let at = (!found.is_empty()).then(|| weighted_quantiles(found));
        TargetPrediction { chance: chance.min(1.0), at }
    }

    /// The estimate of `level + span · (form − form now)` over all members.
    fn estimate(&self, form: impl Fn(&Member) -> f64) -> Estimate {
        let (low, high) = self.range;
        let e = self.quantiles(|m| {
            let change = m.span * (form(m) - m.tail.at(self.end / m.scale));
            // A member is no better known than its forecast is long, and training may yet do what
            // no smooth curve tells. Both numbers are set so that four in five of the generated
            // curves of the tests end within the interval.
            (
                self.level + change,
                (self.noise * self.noise + 0.36 * change * change + 0.0025 * (self.level - self.start).powi(2)).sqrt(),
            )
        });
        Estimate { mid: e.mid.clamp(low, high), low: e.low.clamp(low, high), high: e.high.clamp(low, high) }
    }

    /// Quantiles over the members, each spread out to three equally likely values around its own.
    fn quantiles(&self, value_and_spread: impl Fn(&Member) -> (f64, f64)) -> Estimate {
        // The mean of the upper, middle and lower third of a Gaussian lie 1.09, 0 and −1.09
        // standard deviations from its middle.
        let values = self.members.iter().flat_map(|m| {
            let (v, s) = value_and_spread(m);
            [-1.09, 0.0, 1.09].map(|t| (v + t * s, m.weight / 3.0))
        });
        weighted_quantiles(values.collect())
    }
}

/// Middle and tails of weighted values, which are not empty.
fn weighted_quantiles(mut values: Vec<(f64, f64)>) -> Estimate {
    values.sort_by(|a, b| a.0.total_cmp(&b.0));
    let total: f64 = values.iter().map(|v| v.1).sum();
    let at = |q: f64| {
        let mut sum = 0.0;
        for (v, w) in &values {
            sum += w;
            if sum >= q * total {
                return *v;
            }
        }
        values[values.len() - 1].0
    };
    Estimate { mid: at(0.5), low: at(TAIL), high: at(1.0 - TAIL) }
}
