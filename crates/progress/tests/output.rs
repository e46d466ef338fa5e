//! The output parser on the output of real trainers, and on garbage.
//!
//! The texts have the form in which the frameworks print them, shortened; `real_frameworks.rs` runs
//! the frameworks themselves.

use gainshare_core::signal::ClaimSource;
use gainshare_progress::{Batch, MetricReading, OutputParser, Pattern, Progress, RunLength, Unit};
use proptest::prelude::*;

/// Parses `input` at once and byte by byte, which must not differ, and shows the readings as
/// `metric=value@step/total`.
fn parse_with(pattern: Option<Pattern>, input: &[u8]) -> (Vec<String>, Option<Progress>) {
    let run = |chunk: usize| {
        let mut parser = OutputParser::new(pattern.clone());
        let mut batch = Batch::default();
        input.chunks(chunk).for_each(|c| parser.feed(c, &mut batch));
        parser.finish(&mut batch);
        (batch, parser.counters())
    };
    let whole = run(usize::MAX);
    assert_eq!(whole, run(1), "cut into bytes, the input reads differently");
    let show = |n: Option<u64>, sign: char| n.map_or(String::new(), |n| format!("{sign}{n}"));
    let readings = whole.0.readings.iter();
    (
        readings.map(|r| format!("{}={}{}{}", r.metric, r.value, show(r.step, '@'), show(r.total, '/'))).collect(),
        whole.0.progress,
    )
}

fn check(input: &str, expected: &[&str]) {
    assert_eq!(parse_with(None, input.as_bytes()).0, expected, "{input}");
}

fn check_progress(input: &str, step: u64, total: Option<u64>, unit: Unit) {
    assert_eq!(parse_with(None, input.as_bytes()).1, Some(Progress { step, total, unit }), "{input}");
}

#[test]
fn keras_3_bars_with_colours_and_backspaces() {
    let bar = |at: u32, loss: &str| {
        let colours = "\x1b[32m━━\x1b[0m\x1b[37m━━\x1b[0m \x1b[1m8s\x1b[0m";
        format!("\r\x1b[1m {at}/16\x1b[0m {colours} 546ms/step - loss: {loss} - mae: 4.84{}", "\x08".repeat(60))
    };
    let input = format!("Epoch 1/3\n{}{}\n", bar(1, "24.3"), bar(16, "8.5"));
    check(&input, &["loss=24.3@1/48", "mae=4.84@1/48", "loss=8.5@16/48", "mae=4.84@16/48"]);
    let second = format!("{input}Epoch 2/3\n{}\n", bar(4, "0.4"));
    check_progress(&second, 20, Some(48), Unit::Step);
    // `model.evaluate` draws a bar of another length, which is no part of the run.
    let evaluated = format!("{second}\r 1/20 ━━━ 0s 2ms/step - loss: 0.2\n");
    check_progress(&evaluated, 20, Some(48), Unit::Step);
    assert_eq!(parse_with(None, evaluated.as_bytes()).0.last().unwrap(), "loss=0.2");
}

#[test]
fn keras_2_bars() {
    let input = "Epoch 2/5\n 37/200 [====>.........................] - ETA: 5s - loss: 1.25 - accuracy: 0.5\n";
    check(input, &["loss=1.25@237/1000", "accuracy=0.5@237/1000"]);
}

#[test]
fn hugging_face_dicts_bare_and_quoted() {
    check(
        "{'loss': 0.6931, 'grad_norm': 1.5, 'learning_rate': 5e-05, 'epoch': 0.5}\n",
        &["loss=0.6931", "grad_norm=1.5", "learning_rate=0.00005"],
    );
    check("{'loss': '0.6931', 'learning_rate': '5e-05', 'epoch': '1.0'}\n", &["loss=0.6931", "learning_rate=0.00005"]);
    // The bar beside it counts optimiser steps and lends its place to the dict.
    check(" 17%|█▋        | 50/300 [00:05<00:25,  9.9it/s]\n{'loss': 2.5, 'epoch': 0.17}\n", &["loss=2.5@50/300"]);
}

#[test]
fn lightning_bars() {
    let input = "\rEpoch 3:  37%|███▋      | 37/100 [00:01<00:02, 25.13it/s, v_num=0, train_loss=0.493]";
    check(input, &["v_num=0@337", "train_loss=0.493@337"]);
    check_progress(input, 337, None, Unit::Step);
    // Before it names the next epoch, Lightning sets the bar back and shows the old values once more.
    let back = "Epoch 0: 100%|███| 20/20 [00:01<00:00, loss=0.5]\rEpoch 0:   0%|   | 0/20 [00:00<?, loss=0.5]\rEpoch 1:   0%|   | 0/20 [00:00<?, loss=0.5]\r";
    check(back, &["loss=0.5@20"]);
    check_progress(back, 20, None, Unit::Step);
    check(
        "Epoch 0/9 ━━━━━━╸━━━ 37/100 0:00:01 • 0:00:02 25.1it/s v_num: 0.000 loss: 0.49\n",
        &["v_num=0@37/900", "loss=0.49@37/900"],
    );
}

#[test]
fn tqdm_bars_and_what_people_put_into_them() {
    check("loss: 0.4321:  18%|█▊        | 36/200 [00:01<00:05, 30.00it/s]\r", &["loss=0.4321@36/200"]);
    check("Epoch 3/10:  18%|█▊        | 36/200 [00:01<00:05, 30.00it/s, loss=0.3]\r", &["loss=0.3@436/2000"]);
    check_progress("Epochs:  30%|███       | 3/10 [00:01<00:05,  1.00it/s]\r", 3, Some(10), Unit::Epoch);
    // A bar that starts over is another pass over the data.
    let twice = "100%|██████| 20/20 [00:01<00:00, 9it/s]\r  5%|▌    | 1/20 [00:01<00:05, 9it/s, loss=1.5]\r";
    check(twice, &["loss=1.5@21"]);
    let glued = "  0%|     | 0/20 [00:00<?, ?it/s, loss=2.1]step 1/20 loss: 2.0625\r\n";
    check(glued, &["loss=2.1@0/20", "loss=2.0625@1/20"]);
    // A bar beside a line that is one ahead of it is not.
    let beside = "step 5/20 loss: 2\n 20%|██   | 4/20 [00:01<00:05, 9it/s]\rstep 6/20 loss: 1\n";
    check(beside, &["loss=2@5/20", "loss=1@6/20"]);
    // Downloads and validation are not training.
    let chores = "model.safetensors:  45%|████ | 1.2G/2.7G [00:01<00:05, 100MB/s]\r\
                  Map:  50%|█████ | 500/1000 [00:01<00:01, 500 examples/s]\r\
                  Validation:  50%|███ | 5/10 [00:01<00:01, 5it/s]\r";
    assert_eq!(parse_with(None, chores.as_bytes()), (vec![], None));
}

#[test]
fn plain_lines_of_all_sorts() {
    check("Epoch [3/5], Step [100/600], Loss: 0.2345\n", &["Loss=0.2345@1300/3000"]);
    check("Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.300039\n", &["Loss=2.300039@60640"]);
    check(
        "| epoch   1 |   200/ 2983 batches | lr 20.00 | ms/batch 12.3 | loss  7.63 | ppl  2068.1\n",
        &["loss=7.63@3183", "ppl=2068.1@3183"],
    );
    check("epoch=3 loss=0.25 acc=93.5%\n", &["loss=0.25@3", "acc=93.5@3"]);
    check("Train Loss: 0.25 | Val Loss: 0.5 | Val Acc: 0.75\n", &["Train_Loss=0.25", "Val_Loss=0.5", "Val_Acc=0.75"]);
    check("step 100/1000 loss: 0.5\n", &["loss=0.5@100/1000"]);
    // Steps that go on from epoch to epoch are of the whole run.
    check(
        "Epoch 1/2\nstep 30/60 loss: 3\nEpoch 2/2\nstep 31/60 loss: 2\nstep 60/60 loss: 1\n",
        &["loss=3@30/120", "loss=2@31/60", "loss=1@60/60"],
    );
    check("iter 100: loss 2.5, time 12.34ms\n", &["loss=2.5@100"]);
    check("loss=tensor(0.25, grad_fn=<NllLossBackward0>)\n", &["loss=0.25"]);
    check("2024-01-02T03:04:05Z loss=0.5\n", &["loss=0.5"]);
    check("INFO train.py:123: starting on localhost:8080 at 12:30:45, 2024/01/02\n", &[]);
    check(
        r#"{"step": 7, "total_steps": 70, "train": {"loss": 0.5}, "lr": "0.1"}"#,
        &["lr=0.1@7/70", "train/loss=0.5@7/70"],
    );
    // An epoch beside them does not make them steps of that epoch.
    check(
        "{\"step\": 7, \"total_steps\": 70, \"epoch\": 3, \"loss\": 0.5}\n{\"step\": 8, \"max_steps\": 70, \"epoch\": 0.4, \"loss\": 0.4}\n",
        &["loss=0.5@7/70", "loss=0.4@8/70"],
    );
    check(r#"{"metric": "loss", "value": 0.5, "step": 7, "total": 70}"#, &["loss=0.5@7/70"]);
    check(r#"{"loss": NaN, "acc": 0.5}"#, &["acc=0.5"]);
    check_progress("Epoch 3 of 10\n", 3, Some(10), Unit::Epoch);
}

#[test]
fn garbage_values_are_refused_and_counted() {
    let mut parser = OutputParser::new(None);
    let mut batch = Batch::default();
    let input = b"loss: nan\nloss: -inf\nloss: 1e308\nloss=Infinity\n{\"loss\": 1e999}\n{'loss': '1e31'}\nloss: 1\n";
    parser.feed(input, &mut batch);
    assert_eq!(batch.readings.iter().map(|r| r.value).collect::<Vec<_>>(), [1.0]);
    assert_eq!(parser.counters().bad_values, 6);
    println!("fault: injected=6 violations=0");
}

#[test]
fn a_pattern_of_the_user() {
    let pattern = Pattern::new(r"^(?P<step>\d+)\s+of\s+(?P<total>\d+)\s+->\s+(?P<value>\S+)", "objective").unwrap();
    let input = b"12 of 80 -> 0.5\nloss: 7\n13 of 80 -> nan\n";
    assert_eq!(parse_with(Some(pattern), input).0, ["objective=0.5@12/80"]);
    let named = Pattern::new(r"(?P<metric>\w+) is (?P<value>[0-9.]+)", "x").unwrap();
    assert_eq!(parse_with(Some(named), b"cost is 3.5 and risk is 4\n").0, ["cost=3.5", "risk=4"]);
}

#[test]
fn bad_patterns_are_one_line_with_a_remedy() {
    for (pattern, about) in [
        ("loss=(?P<value>[0-9", "does not compile"),
        ("(?P<value>\\w{900}){900}", "too large"),
        ("(?<=x)(?P<value>1)", "look-around"),
        ("loss=(\\d+)", "no group named value"),
        ("(?P<value>1)(?P<vlaue>2)", "unknown group"),
    ] {
        let message = Pattern::new(pattern, "loss").unwrap_err().to_string();
        assert!(message.contains(about) && !message.contains('\n'), "{message}");
    }
}

#[test]
fn memory_stays_bounded_whatever_is_printed() {
    let mut parser = OutputParser::new(None);
    let mut batch = Batch::default();
    for i in 0..50_000 {
        parser.feed(format!("made_up_{i}: 1\n").as_bytes(), &mut batch);
        batch.readings.clear();
    }
    parser.feed(&vec![b'['; 5_000_000], &mut batch);
    assert!(serde_json::to_string(parser.state()).unwrap().len() < 64 << 10);
    assert!(parser.counters().dropped_readings > 49_000);
}

#[test]
fn a_kept_state_goes_on_in_the_middle_of_a_line() {
    let input = b"Epoch 2/5\n 37/200 [===>...] - loss: 1.25 - acc: 0.5\nEpoch 3/5\n 1/200 [...] - loss: 1\n";
    let whole = parse_with(None, input).0;
    for cut in 0..input.len() {
        let mut first = OutputParser::new(None);
        let mut batch = Batch::default();
        first.feed(&input[..cut], &mut batch);
        let kept = serde_json::to_string(first.state()).unwrap();
        let mut second = OutputParser::resume(None, serde_json::from_str(&kept).unwrap());
        second.feed(&input[cut..], &mut batch);
        assert_eq!(batch.readings.len(), whole.len(), "cut at {cut}");
    }
}

/// Bytes that look enough like output to get deep into the parser.
fn output() -> impl Strategy<Value = Vec<u8>> {
    let pieces = [
        "loss: ",
        "loss=",
        "Epoch ",
        "3/10",
        " 37/200 [",
        "| ",
        "\r",
        "\n",
        "\x08\x08",
        "\x1b[1m",
        "\x1b]0;",
        "\x07",
        "0.25",
        "1e999",
        "nan",
        "{'loss': '",
        "{\"a\":",
        "}",
        "━━",
        "step",
        " of ",
        ", ",
        "tensor(",
        "99999999999999999999",
        "-",
        "%",
    ];
    let piece = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..20),
        proptest::sample::select(pieces.to_vec()).prop_map(|s| s.as_bytes().to_vec()),
    ];
    proptest::collection::vec(piece, 0..60).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn any_bytes_give_finite_values_wherever_they_are_cut(
        input in output(),
        cuts in proptest::collection::vec(0usize..400, 0..5),
    ) {
        let mut whole = OutputParser::new(None);
        let mut expected = Batch::default();
        whole.feed(&input, &mut expected);
        whole.finish(&mut expected);
        for r in &expected.readings {
            prop_assert!(r.value.is_finite() && r.total.is_none_or(|t| r.step.unwrap() <= t));
        }
        let mut cuts: Vec<_> = cuts.into_iter().map(|c| c.min(input.len())).chain([0, input.len()]).collect();
        cuts.sort_unstable();
        let mut parser = OutputParser::new(None);
        let mut batch = Batch::default();
        cuts.windows(2).for_each(|w| parser.feed(&input[w[0]..w[1]], &mut batch));
        parser.finish(&mut batch);
        prop_assert_eq!(batch, expected);
        prop_assert_eq!(parser.counters(), whole.counters());
    }
}

/// Readings and progress with a length of the run from the command.
fn parse_with_claim(claim: RunLength, text: &str) -> (Vec<String>, Option<Progress>) {
    let mut parser = OutputParser::new(None);
    parser.set_run_length(claim);
    let mut batch = Batch::default();
    parser.feed(text.as_bytes(), &mut batch);
    parser.finish(&mut batch);
    let total = |r: &MetricReading| r.total.map_or(String::new(), |t| format!("/{t}"));
    let readings = batch.readings.iter().map(|r| format!("{}@{}{}", r.value, r.step.unwrap_or(0), total(r)));
    (readings.collect(), batch.progress)
}

#[test]
fn the_command_gives_the_total_that_the_output_lacks() {
    let epochs = |n| RunLength { epochs: Some(n), ..RunLength::default() };
    // PyTorch's own example counts from 1.
    let torch = "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.5\nTrain Epoch: 2 [0/60000 (0%)]\tLoss: 0.5\n";
    let (readings, progress) = parse_with_claim(epochs(14), torch);
    assert_eq!(readings, ["2.5@640/840000", "0.5@60000/840000"]);
    assert_eq!(progress, Some(Progress { step: 60_000, total: Some(840_000), unit: Unit::Step }));
    // Lightning counts from 0, and sets its bar back before it names the next epoch.
    let lightning = "Epoch 0:  99%|█| 99/100 [00:01<00:00, 9it/s, loss=2]\n\
                     Epoch 0:   0%| | 0/100 [00:00<?, ?it/s]\n\
                     Epoch 1:  50%|█| 50/100 [00:01<00:00, 9it/s, loss=1]\n";
    assert_eq!(parse_with_claim(epochs(3), lightning).0, ["2@99/300", "1@150/300"]);
    // Lines that have only an epoch.
    assert_eq!(parse_with_claim(epochs(5), "epoch=3 loss=0.25\n").0, ["0.25@3/5"]);
    let steps = RunLength { steps: Some(1000), ..RunLength::default() };
    assert_eq!(parse_with_claim(steps, "epoch=1 step=5 loss=4\n").0, ["4@5/1000"]);
}

#[test]
fn a_claim_of_the_command_never_beats_the_output() {
    let claim = RunLength { epochs: Some(2), steps: Some(10), ..RunLength::default() };
    assert_eq!(parse_with_claim(claim, "Epoch 3/10\nloss: 1\n").1.unwrap().total, Some(10));
    assert_eq!(parse_with_claim(claim, "step 30/60 loss: 3\n").0, ["3@30/60"]);
    // A job that goes beyond the claim is one without a total, and its places stay as they were.
    assert_eq!(parse_with_claim(claim, "step=10 loss=2\nstep=11 loss=1\n").0, ["2@10/10", "1@11"]);
    let beyond = "Epoch: 2 [5/10 (50%)] loss: 2\nEpoch: 3 [5/10 (50%)] loss: 1\nEpoch: 2 [9/10 (90%)] loss: 0.5\n";
    assert_eq!(parse_with_claim(claim, beyond).0, ["2@15/20", "1@25", "0.5@19"]);
    // A bar without a word about epochs may be the whole run; its second pass shows that it is not.
    let bar = "10%|█ | 1/10 [00:01<00:05, 9it/s, loss=2]\r90%|█ | 9/10 [00:01<00:05, 9it/s, loss=1.5]\r\
               10%|█ | 1/10 [00:01<00:05, 9it/s, loss=1]\r";
    assert_eq!(parse_with_claim(claim, bar).0, ["2@1/10", "1.5@9/10", "1@11/20"]);
}

#[test]
fn the_source_of_a_total_is_known() {
    let source = |claim: RunLength, text: &str| {
        let mut parser = OutputParser::new(None);
        parser.set_run_length(claim);
        let mut batch = Batch::default();
        parser.feed(text.as_bytes(), &mut batch);
        parser.finish(&mut batch);
        (batch.readings.last().and_then(|reading| reading.total), parser.claim_source())
    };
    let none = RunLength::default();
    let epochs = RunLength { epochs: Some(4), ..none };
    let in_config = RunLength { in_config: true, ..epochs };
    assert_eq!(source(none, "Epoch 1/20 loss: 0.5\n"), (Some(20), Some(ClaimSource::Output)));
    assert_eq!(source(none, "step 3/50 loss: 0.5\n"), (Some(50), Some(ClaimSource::Output)));
    let bar = " 10%|█         | 5/50 [00:01<00:09, 5.00it/s, loss=0.5]\n";
    assert_eq!(source(none, bar), (Some(50), Some(ClaimSource::Bar)));
    let torch = "Train Epoch: 1 [640/60000 (1%)]\tLoss: 0.5\n";
    assert_eq!(source(epochs, torch), (Some(240_000), Some(ClaimSource::Command)));
    assert_eq!(source(in_config, torch), (Some(240_000), Some(ClaimSource::Config)));
    let steps = RunLength { steps: Some(1000), ..none };
    assert_eq!(source(steps, "step=10 loss=0.5\n"), (Some(1000), Some(ClaimSource::Command)));
    assert_eq!(source(none, "loss=0.5\n"), (None, None));
}
