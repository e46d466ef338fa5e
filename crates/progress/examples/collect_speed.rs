//! The cost of following jobs: lines a second for several kinds of output, and the part of a core that
//! 50 jobs take which are polled once a second. Run with `--release`; prints one line for each.

use gainshare_core::model::Time;
use gainshare_progress::{Batch, Collector, CollectorState, MetricSpec, OutputParser, Pattern};
use std::time::{Instant, SystemTime};

fn main() {
    print_speed_of_output();
    print_speed_of_patterns();
    print_cost_of_folders();
}

fn print_speed_of_output() {
    let bar = "\r\x1b[1m37/200\x1b[0m \x1b[32m━━━━\x1b[0m\x1b[37m━━━━━━━━\x1b[0m \x1b[1m5s\x1b[0m 30ms/step - accuracy: 0.5 - loss: 1.25\n";
    let kinds: [(&str, String); 10] = [
        ("Keras bar", format!("Epoch 2/5\n{bar}")),
        ("tqdm bar", "\rEpoch 3:  37%|███▋      | 37/100 [00:01<00:02, 25.13it/s, v_num=0, train_loss=0.493]".into()),
        ("dict", "{'loss': '0.6931', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '0.5'}\n".into()),
        ("JSON", "{\"step\": 7, \"loss\": 0.25, \"acc\": 0.75, \"lr\": 0.001}\n".into()),
        ("name=value", "2026-01-02T03:04:05Z step=12 loss=0.25 acc=0.5\n".into()),
        (
            "prose with digits",
            "[2026-01-02 03:04:05,678] INFO worker 3 loaded 512 files from shard 17 in 0.3 seconds\n".into(),
        ),
        ("binary", (0..100u8).map(|b| char::from(b.wrapping_mul(37) | 0x21)).chain(['\n']).collect()),
        ("long: pairs", "loss:1 ".repeat(1150) + "\n"),
        ("long: bars", "x".repeat(4000) + &"| 1/2 [".repeat(500) + "\n"),
        ("long: words", "a 1 ".repeat(2000) + "\n"),
    ];
    for (kind, text) in &kinds {
        let lines = if text.len() > 1000 { 10_000 } else { 200_000 };
        let input = text.repeat(1000);
        let mut parser = OutputParser::new(None);
        let start = Instant::now();
        let mut readings = 0;
        for _ in 0..lines / 1000 {
            let mut batch = Batch::default();
            parser.feed(input.as_bytes(), &mut batch);
            readings += batch.readings.len();
        }
        let ns = start.elapsed().as_nanos() as f64 / f64::from(lines);
        let core = ns * 10_000.0 / 1e9 * 100.0;
        let per_byte = ns / text.len() as f64;
        println!(
            "{kind:18} {:8.0} lines/s, {ns:7.0} ns/line, {per_byte:4.1} ns/byte, \
             {core:5.2} % of a core at 10,000 lines/s, {readings} readings",
            1e9 / ns
        );
    }
}

fn print_speed_of_patterns() {
    for (kind, pattern, line) in [
        ("usual pattern", r"step (?P<step>\d+) loss (?P<value>[0-9.]+)", "epoch 1 step 12 loss 0.25\n".to_owned()),
        ("costly pattern", r"(\w+\s?){1,8}(?P<value>[0-9.]+)x", "ab 1 ".repeat(200) + "\n"),
    ] {
        let pattern = Pattern::new(pattern, "loss").expect("a legal pattern");
        let mut parser = OutputParser::new(Some(pattern));
        let input = line.repeat(1000);
        let start = Instant::now();
        let rounds = 20u32;
        for second in 0..rounds {
            parser.begin_round(Time::from_secs_f64(f64::from(second)));
            parser.feed(input.as_bytes(), &mut Batch::default());
        }
        let matched = u64::from(rounds) * 1000 - parser.counters().rested_lines;
        println!(
            "{kind:18} {:8.0} ns for each line of {} bytes that was matched, {matched} of {} lines",
            start.elapsed().as_nanos() as f64 / matched as f64,
            line.len(),
            rounds * 1000
        );
    }
}

/// 50 jobs in a folder with many files.
fn print_cost_of_folders() {
    let folder = std::env::temp_dir().join(format!("gainshare-collect-speed-{}", std::process::id()));
    for i in 0..2000 {
        let dir = folder.join(format!("d{}", i % 40));
        std::fs::create_dir_all(&dir).expect("a folder in the temporary directory");
        std::fs::write(dir.join(format!("{i}.txt")), "").expect("a file in it");
    }
    for run in 0..3 {
        let name = format!("d{run}/events.out.tfevents.1.host.{run}.0");
        std::fs::write(folder.join(name), "").expect("a file in it");
    }
    let new =
        || Collector::new(&MetricSpec::default(), Some(&folder), SystemTime::UNIX_EPOCH, CollectorState::default());
    let mut jobs: Vec<_> = (0..50).map(|_| new().expect("a default is valid")).collect();
    let seconds = 300;
    let start = Instant::now();
    for second in 0..seconds {
        for job in &mut jobs {
            job.poll(Time::from_secs_f64(f64::from(second)));
        }
    }
    let part = start.elapsed().as_secs_f64() / f64::from(seconds) * 100.0;
    println!(
        "50 jobs, each with 2,000 files in its folder and 3 event files, polled once a second: {part:.2} % of a core"
    );
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
}
