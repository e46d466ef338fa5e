//! The models of the papers as this simulator knows them: one calibration for every experiment.
//!
//! **Sources.** Only published numbers (see `docs/calibration.md`, which says how each was found and where
//! the model does not agree). Work is in seconds alone on a whole node of the paper's testbed; what the
//! papers do not publish is marked as *fitted*.

use crate::curve::Curve;
use crate::random::Stream;
use crate::world::{AnnouncedTotal, SimJob, Speedup};
use gainshare_core::model::{Span, Time};

/// γ of the testbeds, fitted to the makespans of the thesis's Figure 6.1: sharing costs, and less overlap costs less.
pub const INTERFERENCE: f64 = 0.15;

/// The deviation of one report, as a part of the whole reduction: fitted to the signs and sizes of SpeCon's
/// experiments, whose threshold is 1 % of the first value. At 1 % its jobs never stay converged.
pub const REPORT_NOISE: f64 = 0.003;

/// Cores of one node, in both testbeds.
pub const CORES: f64 = 16.0;

/// One kind of job.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Model {
    pub name: &'static str,
    /// Seconds alone on a node.
    pub work_s: f64,
    /// The part of a node it can use at most.
    pub most: f64,
    /// The part of its loss reduction made in the first fifth of the work.
    pub first_fifth: f64,
    /// Where the loss ends, if it starts at one.
    pub end: f64,
    /// How often it reports in all.
    pub reports: f64,
    /// What the public example script of its kind prints of its length.
    pub prints: AnnouncedTotal,
}

const fn model(
    name: &'static str,
    work_s: f64,
    most: f64,
    first_fifth: f64,
    end: f64,
    reports: f64,
    prints: AnnouncedTotal,
) -> Model {
    Model { name, work_s, most, first_fifth, end, reports, prints }
}

/// Keras prints `Epoch 3/20`.
const KERAS: AnnouncedTotal = AnnouncedTotal::Total;

/// PyTorch's own examples print `Train Epoch: 1 [640/60000 (1%)]`: where in its epoch a job is, and no
/// total. One report an epoch for MNIST; ten for VAE, whose script makes ten epochs; three for the
/// recurrent models, whose number of epochs is nowhere published (20 is our choice).
const fn pytorch(reports: u64) -> AnnouncedTotal {
    AnnouncedTotal::Epochs { reports }
}

/// Work of the three jobs of the fixed schedule, from their completion times under equal sharing (84.7,
/// 240.5 and 394.0 s) and γ. While two jobs share, each does half of `1/(1 + γ/2)`; while three share, a
/// third of `1/(1 + 2γ/3)`.
const MNIST_T_S: f64 = 84.7 / 3.0 / (1.0 + INTERFERENCE * 2.0 / 3.0);
const MNIST_P_S: f64 = (40.0 + 115.8) / 2.0 / (1.0 + INTERFERENCE / 2.0) + MNIST_T_S;
const VAE_P_S: f64 = 40.0 + MNIST_P_S + 113.5;

/// The models of FlowCon's evaluation (thesis, Table 6.1). The first three are calibrated one by one,
/// LSTM-CFC from the part of the node it uses and how long it runs; the work of the others is fitted to the
/// makespans of the experiments with five, ten and fifteen jobs.
pub const FLOWCON: [Model; 8] = [
    model("VAE-P", VAE_P_S, 1.0, 0.65, 0.2, 100.0, pytorch(10)),
    model("MNIST-P", MNIST_P_S, 1.0, 0.90, 0.1, 10.0, pytorch(1)),
    model("MNIST-T", MNIST_T_S, 1.0, 0.50, 0.1, 10.0, KERAS),
    model("LSTM-CFC", 115.0, 0.19, 0.90, 0.1, 60.0, KERAS),
    model("VAE-T", 115.0, 1.0, 0.65, 0.2, 60.0, KERAS),
    model("GRU", 105.0, 1.0, 0.90, 0.1, 60.0, KERAS),
    model("LSTM-CRF", 120.0, 1.0, 0.90, 0.1, 60.0, pytorch(3)),
    model("Bi-RNN", 90.0, 1.0, 0.98, 0.1, 60.0, KERAS),
];

/// Draws a job of this kind. `entity` names its streams; runs of one kind differ a little, as on a real machine.
pub fn job(model: &Model, seed: u64, entity: u64, name: String, arrival_s: f64) -> SimJob {
    let mut draw = Stream::new(seed, entity, "job");
    let work = CORES * model.work_s * (1.0 + 0.01 * draw.normal()).max(0.9);
    // "Under 5 s" in all, with a deviation of 1.43 s, whatever the point in training.
    let move_s = (3.0 + 1.43 * draw.normal()).clamp(0.5, 5.0);
    SimJob {
        name,
        model: model.name.to_owned(),
        arrival: Time::from_secs_f64(arrival_s),
        work_core_s: work,
        speedup: Speedup::Linear,
        max_cores: CORES * model.most,
        memory_bytes: 1 << 30,
        curve: Curve::by_first_fifth(1.0, model.end, model.first_fifth, REPORT_NOISE),
        startup_core_s: 0.0,
        report_every_core_s: work / model.reports,
        report_positions: vec![],
        planned_reports: None,
        claim: model.prints,
        history: vec![],
        program: None,
        start: Span::ZERO,
        save: Span::from_secs_f64(move_s / 2.0),
        restore: Span::from_secs_f64(move_s / 2.0),
        owner: 0,
        priority: 0,
        floor: 0.0,
        deadline: None,
        request: None,
        tells_pace: false,
        shows_pace: false,
    }
}

/// The models of SpeCon's evaluation (thesis, Table 6.3), each on two platforms. The work of VAE is fitted
/// to the mean completion time of the fixed schedule under the default scheduler, that of the others to the
/// means and makespans of 20, 30 and 50 mixed jobs.
pub const SPECON: [Model; 10] = [
    model("VAE-P", 199.0, 1.0, 0.65, 0.2, 100.0, pytorch(10)),
    model("VAE-T", 140.0, 1.0, 0.65, 0.2, 100.0, KERAS),
    model("GRU-P", 110.0, 1.0, 0.90, 0.1, 60.0, pytorch(3)),
    model("GRU-T", 75.0, 1.0, 0.90, 0.1, 60.0, KERAS),
    model("Bi-RNN-P", 240.0, 1.0, 0.98, 0.1, 60.0, pytorch(3)),
    model("Bi-RNN-T", 92.0, 1.0, 0.98, 0.1, 60.0, KERAS),
    model("RNN-P", 65.0, 1.0, 0.95, 0.1, 60.0, pytorch(3)),
    model("RNN-T", 46.0, 1.0, 0.95, 0.1, 60.0, KERAS),
    model("Dynamic-RNN-P", 310.0, 1.0, 0.95, 0.1, 60.0, pytorch(3)),
    model("Dynamic-RNN-T", 205.0, 1.0, 0.95, 0.1, 60.0, KERAS),
];
