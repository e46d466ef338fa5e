//! What makes the world of an experiment another one: totals, history, curves, rough jobs.

use super::{Curves, Settings, Totals};
use crate::curve::{Curve, Family};
use crate::models::{FLOWCON, SPECON};
use crate::random::Stream;
use crate::world::{AnnouncedTotal, Roughness, SimJob, World};
use gainshare_core::policy::{Gain, PlaceRule, Policy, ShareRule};
use gainshare_core::view::FinishedRun;

/// Changes `world` to these conditions.
pub(super) fn apply(world: &mut World, settings: &Settings) {
    let seed = world.seed;
    for (i, job) in world.jobs.iter_mut().enumerate() {
        let stream = |purpose| Stream::new(seed, i as u64, purpose);
        match settings.totals {
            Totals::Told => job.claim = AnnouncedTotal::Total,
            Totals::Hidden => job.claim = AnnouncedTotal::Nothing,
            Totals::AsPrinted => {}
        }
        if settings.curves == Curves::Recorded {
            job.curve = recorded(&job.model);
        }
        job.program = number_of(&job.model).filter(|_| settings.remembers);
        job.history = (0..settings.history).map(|n| earlier(job, &mut stream("history"), n)).collect();
        if settings.rough {
            roughen(job, &mut stream("rough"));
        }
    }
}

/// The recorded curve of a model: each model has one.
fn recorded(model: &str) -> Curve {
    let run = number_of(model).unwrap_or(0) as u16;
    Curve { start: 1.0, end: 0.0, shape: Family::Recorded { run }, drops: vec![], noise: 0.0 }
}

/// The number of a model among all of them. All jobs of a model run the same program.
pub(super) fn number_of(model: &str) -> Option<u32> {
    let place = FLOWCON.iter().chain(&SPECON).position(|m| m.name == model)?;
    Some(place as u32)
}

/// An earlier run of the same program: as many steps, and work that differs as that of two runs does.
fn earlier(job: &SimJob, draw: &mut Stream, skip: u32) -> FinishedRun {
    for _ in 0..skip {
        draw.normal();
    }
    let core_s = job.work_core_s * (1.0 + 0.014 * draw.normal());
    let claimed = if job.claim == AnnouncedTotal::Total { Some(job.planned()) } else { None };
    FinishedRun { steps: Some(job.planned()), claimed, claimed_by: None, core_s }
}

/// A tenth of the work before the first step, steps that cost unlike by a third, an evaluation of two
/// steps after every tenth; three in twenty jobs end early, and of those that name a total as many name
/// a wrong one or change it on the way.
fn roughen(job: &mut SimJob, draw: &mut Stream) {
    let chance = draw.unit();
    let stops_at = (chance < 0.15).then(|| draw.uniform(0.3, 0.9));
    let factor = draw.uniform(0.5, 2.0);
    if job.claim == AnnouncedTotal::Total {
        job.claim = match chance {
            c if (0.15..0.25).contains(&c) => AnnouncedTotal::Wrong { factor },
            c if (0.25..0.35).contains(&c) => AnnouncedTotal::Changed { factor, at: 0.4 },
            _ => AnnouncedTotal::Total,
        };
    }
    let rough = Roughness { startup: 0.1, step_spread: 0.3, evaluation: (10, 2.0), stops_at };
    job.roughen(&rough, draw);
}

/// Gives the gain rule these numbers, if it is the rule of `policy`.
pub(super) fn replace_gain(policy: &mut Policy, numbers: Gain) {
    if let ShareRule::Gain(own) = &mut policy.share {
        *own = numbers;
    }
}

/// Lets the fair world of the gain rule break ties by other dice than the baseline.
pub(super) fn own_dice(policy: &mut Policy) {
    if let (ShareRule::Gain(_), PlaceRule::Kubernetes { seed }) = (&policy.share, &mut policy.place) {
        *seed ^= 0x005e_ed0f_6a19;
    }
}
