//! Progress as well-known frameworks print it.
//!
//! Most tools read the progress of a job from its output, and every framework writes it differently. The formats here
//! follow what those frameworks write into a pipe, control characters included. A tool that reads the output of these
//! trainers can therefore read theirs.
//!
//! - `keras`: the bar of Keras 3 with colours; it is redrawn with backspaces and `\r`, and ends with its epoch;
//! - `hf`, `hf5`: dictionaries of Hugging Face, with bare numbers (transformers 4) or quoted ones (transformers 5);
//! - `lightning`, `tqdm`: a tqdm bar, redrawn with `\r`; one bar per epoch or one for the run; tqdm writes
//!   to standard error;
//! - `pytorch`: the line of PyTorch's MNIST example;
//! - `kv`, `colon`, `json`, `csv`: plain lines.
//!
//! Rendering is pure: it turns a [`Progress`] and the small state of a bar into text.

/// How progress is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Format {
    /// Keras 3 progress bar, with colours, backspaces and carriage returns
    Keras,
    /// Hugging Face Trainer dictionary with bare numbers, as transformers 4 prints it
    Hf,
    /// Hugging Face Trainer dictionary with quoted numbers, as transformers 5 prints it
    Hf5,
    /// PyTorch Lightning progress bar
    Lightning,
    /// Line of PyTorch's MNIST example
    Pytorch,
    /// step=10 loss=0.5
    Kv,
    /// step: 10, loss: 0.5
    Colon,
    /// One JSON object per line
    Json,
    /// tqdm progress bar, on standard error as tqdm does
    Tqdm,
    /// Comma-separated values with a header line
    Csv,
    /// Nothing
    Quiet,
}

/// One report. Steps and epochs count from 1.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Progress {
    pub(crate) step: u64,
    pub(crate) total_steps: u64,
    pub(crate) epoch_steps: u64,
    pub(crate) batch: usize,
    pub(crate) loss: f32,
    pub(crate) accuracy: Option<f64>,
    pub(crate) learning_rate: f64,
    pub(crate) gradient_norm: f32,
    /// Seconds since this process started training.
    pub(crate) elapsed_s: f64,
    /// Steps this process has taken; fewer than `step` after a resume.
    pub(crate) session_steps: u64,
}

impl Progress {
    pub(crate) fn epoch(&self) -> u64 {
        self.step.div_ceil(self.epoch_steps)
    }

    fn epochs(&self) -> u64 {
        self.total_steps.div_ceil(self.epoch_steps)
    }

    fn step_in_epoch(&self) -> u64 {
        (self.step - 1) % self.epoch_steps + 1
    }

    fn steps_per_s(&self) -> f64 {
        self.session_steps as f64 / self.elapsed_s.max(1e-9)
    }
}

/// Renders reports one after the other.
#[derive(Debug)]
pub(crate) struct Renderer {
    format: Format,
    /// Epoch of the bar that is being redrawn, if one is.
    open_epoch: Option<u64>,
    /// Visible characters of the last drawing; Keras deletes them with as many backspaces.
    drawn_width: usize,
    started: bool,
}

impl Renderer {
    pub(crate) fn new(format: Format) -> Self {
        Renderer { format, open_epoch: None, drawn_width: 0, started: false }
    }

    /// Whether this format belongs on standard error.
    pub(crate) fn on_stderr(&self) -> bool {
        self.format == Format::Tqdm
    }

    /// The text of one report; it may lack a final newline, because bars do.
    pub(crate) fn report(&mut self, p: &Progress) -> String {
        let first = !std::mem::replace(&mut self.started, true);
        let accuracy = |before: &str| p.accuracy.map(|a| format!("{before}{a:.4}")).unwrap_or_default();
        match self.format {
            Format::Quiet => String::new(),
            Format::Keras => self.keras(p),
            Format::Hf => format!(
                "{{'loss': {}, 'grad_norm': {}, 'learning_rate': {}, 'epoch': {}}}\n",
                python_float((f64::from(p.loss) * 1e4).round() / 1e4),
                python_float(f64::from(p.gradient_norm)),
                python_float(p.learning_rate),
                python_float((p.step as f64 / p.epoch_steps as f64 * 100.0).round() / 100.0),
            ),
            Format::Hf5 => format!(
                "{{'loss': '{}', 'grad_norm': '{}', 'learning_rate': '{}', 'epoch': '{}'}}\n",
                four_digits(f64::from(p.loss)),
                four_digits(f64::from(p.gradient_norm)),
                four_digits(p.learning_rate),
                four_digits(p.step as f64 / p.epoch_steps as f64),
            ),
            Format::Lightning => {
                self.open_epoch = Some(p.epoch());
                let train_acc = p.accuracy.map(|a| format!(", train_acc={}", lightning_number(a))).unwrap_or_default();
                let bar = tqdm_bar(
                    p.step_in_epoch(),
                    p.epoch_steps,
                    p.step_in_epoch() as f64 / p.steps_per_s(),
                    p.steps_per_s(),
                    &format!(", v_num=0, train_loss={}{train_acc}", lightning_number(f64::from(p.loss))),
                );
                format!("\rEpoch {}: {bar}", p.epoch() - 1)
            }
            Format::Tqdm => {
                self.open_epoch = Some(p.epoch());
                let postfix = format!(", loss={:.4}{}", p.loss, accuracy(", accuracy="));
                format!("\r{}", tqdm_bar(p.step, p.total_steps, p.elapsed_s, p.steps_per_s(), &postfix))
            }
            Format::Pytorch => {
                let (done, all) = (p.step_in_epoch() * p.batch as u64, p.epoch_steps * p.batch as u64);
                let percent = 100.0 * done as f64 / all as f64;
                format!("Train Epoch: {} [{done}/{all} ({percent:.0}%)]\tLoss: {:.6}\n", p.epoch(), p.loss)
            }
            Format::Kv => format!("epoch={} step={} loss={}{}\n", p.epoch(), p.step, p.loss, accuracy(" accuracy=")),
            Format::Colon => {
                format!("epoch: {}, step: {}, loss: {}{}\n", p.epoch(), p.step, p.loss, accuracy(", accuracy: "))
            }
            Format::Json => json_line(p),
            Format::Csv if first => csv_header(p) + &csv_line(p),
            Format::Csv => csv_line(p),
        }
    }

    /// The text after the last report of the run.
    pub(crate) fn end(&mut self, last: Option<&Progress>) -> String {
        if self.open_epoch.take().is_some() {
            return "\n".to_owned();
        }
        match (self.format, last) {
            (Format::Hf, Some(p)) => format!(
                "{{'train_runtime': {:.4}, 'train_samples_per_second': {:.3}, 'train_steps_per_second': {:.3}, \
                 'train_loss': {}, 'epoch': {:.1}}}\n",
                p.elapsed_s,
                p.steps_per_s() * p.batch as f64,
                p.steps_per_s(),
                python_float(f64::from(p.loss)),
                p.step as f64 / p.epoch_steps as f64,
            ),
            (Format::Hf5, Some(p)) => format!(
                "{{'train_runtime': '{}', 'train_samples_per_second': '{}', 'train_steps_per_second': '{}', \
                 'train_loss': '{}', 'epoch': '{}'}}\n",
                four_digits(p.elapsed_s),
                four_digits(p.steps_per_s() * p.batch as f64),
                four_digits(p.steps_per_s()),
                four_digits(f64::from(p.loss)),
                four_digits(p.step as f64 / p.epoch_steps as f64),
            ),
            _ => String::new(),
        }
    }

    fn keras(&mut self, p: &Progress) -> String {
        const WIDTH: u64 = 20;
        let (current, target) = (p.step_in_epoch(), p.epoch_steps);
        let mut text = String::new();
        if self.open_epoch != Some(p.epoch()) {
            if self.open_epoch.is_some() {
                text.push('\n');
            }
            text.push_str(&format!("Epoch {}/{}\n", p.epoch(), p.epochs()));
            self.drawn_width = 0;
        }
        text.push_str(&"\u{8}".repeat(self.drawn_width));
        text.push('\r');

        let digits = target.to_string().len();
        let count = format!("{current:digits$}/{target}");
        let done = WIDTH * current / target;
        let finished = current == target;
        let seconds =
            if finished { current as f64 / p.steps_per_s() } else { (target - current) as f64 / p.steps_per_s() };
        // Keras truncates the time left to whole seconds, but rounds the time that an epoch took.
        let clock = keras_clock(if finished { seconds.round() } else { seconds });
        let per_step_ms = 1e3 / p.steps_per_s();
        let per_step = if per_step_ms >= 1e3 {
            format!("{:.0}s/step", per_step_ms / 1e3)
        } else if per_step_ms >= 1.0 {
            format!("{per_step_ms:.0}ms/step")
        } else {
            format!("{:.0}us/step", per_step_ms * 1e3)
        };
        let mut metrics = String::new();
        let named = p.accuracy.map(|a| ("accuracy", a)).into_iter().chain([("loss", f64::from(p.loss))]);
        for (name, value) in named {
            let value = if value.abs() > 1e-3 { format!("{value:.4}") } else { python_exponent(value, 4) };
            metrics.push_str(&format!(" - {name}: {value}"));
        }
        text.push_str(&format!("\x1b[1m{count}\x1b[0m "));
        if done > 0 {
            text.push_str(&format!("\x1b[32m{}\x1b[0m", "━".repeat(done as usize)));
        }
        text.push_str(&format!(
            "\x1b[37m{}\x1b[0m \x1b[1m{clock}\x1b[0m {per_step}{metrics}",
            "━".repeat((WIDTH - done) as usize)
        ));
        let width = count.len() + 1 + WIDTH as usize + 1 + clock.len() + 1 + per_step.len() + metrics.len();
        // Blanks cover the rest of a longer drawing before this one.
        text.push_str(&" ".repeat(self.drawn_width.saturating_sub(width)));
        self.drawn_width = width;
        self.open_epoch = Some(p.epoch());
        if finished {
            text.push('\n');
            // The next epoch starts on a line of its own.
            self.open_epoch = None;
        }
        text
    }
}

/// The names of the columns. Models that do not classify have no accuracy.
pub(crate) fn csv_header(p: &Progress) -> String {
    if p.accuracy.is_some() { "step,epoch,loss,accuracy\n" } else { "step,epoch,loss\n" }.to_owned()
}

pub(crate) fn csv_line(p: &Progress) -> String {
    let accuracy = p.accuracy.map(|a| format!(",{a}")).unwrap_or_default();
    format!("{},{},{}{accuracy}\n", p.step, p.epoch(), p.loss)
}

pub(crate) fn json_line(p: &Progress) -> String {
    let accuracy = p.accuracy.map(|a| format!(",\"accuracy\":{a}")).unwrap_or_default();
    format!(
        "{{\"step\":{},\"total_steps\":{},\"epoch\":{},\"loss\":{}{accuracy}}}\n",
        p.step,
        p.total_steps,
        p.epoch(),
        p.loss
    )
}

/// A bar as tqdm draws it when it does not know the width of the terminal: ten cells, each with eight parts.
fn tqdm_bar(done: u64, total: u64, elapsed_s: f64, per_s: f64, postfix: &str) -> String {
    const CELLS: u64 = 10;
    const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let eighths = (CELLS * 8 * done / total.max(1)).min(CELLS * 8);
    let full = (eighths / 8) as usize;
    let part = PARTS[(eighths % 8) as usize];
    let blanks = CELLS as usize - full - usize::from(!part.is_empty());
    let percent = 100.0 * done as f64 / total.max(1) as f64;
    let rate = if per_s >= 1.0 { format!("{per_s:.2}it/s") } else { format!("{:.2}s/it", 1.0 / per_s.max(1e-9)) };
    let left_s = total.saturating_sub(done) as f64 / per_s.max(1e-9);
    format!(
        "{percent:3.0}%|{}{part}{}| {done}/{total} [{}<{}, {rate}{postfix}]",
        "█".repeat(full),
        " ".repeat(blanks),
        tqdm_clock(elapsed_s),
        tqdm_clock(left_s),
    )
}

fn tqdm_clock(seconds: f64) -> String {
    let s = seconds as u64;
    match s / 3600 {
        0 => format!("{:02}:{:02}", s / 60, s % 60),
        hours => format!("{hours}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

fn keras_clock(seconds: f64) -> String {
    let s = seconds as u64;
    match s {
        0..=60 => format!("{s}s"),
        61..=3600 => format!("{}:{:02}", s / 60, s % 60),
        _ => format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60),
    }
}

/// A number as Python's `repr` writes it: shortest, with an exponent below 1e-4 and from 1e16.
fn python_float(value: f64) -> String {
    if value != 0.0 && !(1e-4..1e16).contains(&value.abs()) {
        let text = format!("{value:e}");
        return python_sign(&text);
    }
    if value.fract() == 0.0 { format!("{value:.1}") } else { value.to_string() }
}

/// A number as Python's `%.4g` writes it.
fn four_digits(value: f64) -> String {
    significant(value, 4)
}

/// A number as the bar of Lightning shows it: three digits, padded to five characters to keep the width of the bar.
fn lightning_number(value: f64) -> String {
    let mut text = significant(value, 3);
    if !text.contains('e') {
        if !text.contains('.') && text.len() < 5 {
            text.push('.');
        }
        while text.len() < 5 {
            text.push('0');
        }
    }
    text
}

/// A number as Python's `%.{digits}g` writes it.
fn significant(value: f64, digits: usize) -> String {
    if value == 0.0 {
        return "0".to_owned();
    }
    let text = format!("{value:.*e}", digits - 1);
    let exponent: i32 = text.split_once('e').and_then(|(_, e)| e.parse().ok()).unwrap_or(0);
    let trim = |text: &str| {
        if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text.to_owned() }
    };
    if (-4..digits as i32).contains(&exponent) {
        return trim(&format!("{value:.*}", (digits as i32 - 1 - exponent) as usize));
    }
    let (digits, exponent) = text.split_once('e').expect("Rust's exponent form has an e");
    python_sign(&format!("{}e{exponent}", trim(digits)))
}

fn python_exponent(value: f64, decimals: usize) -> String {
    python_sign(&format!("{value:.decimals$e}"))
}

/// Rust writes `5e-5` where Python writes `5e-05`.
fn python_sign(text: &str) -> String {
    let (digits, exponent) = text.split_once('e').expect("an exponent form has an e");
    let (sign, size) = match exponent.strip_prefix('-') {
        Some(size) => ('-', size),
        None => ('+', exponent),
    };
    format!("{digits}e{sign}{size:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress(step: u64) -> Progress {
        Progress {
            step,
            total_steps: 100,
            epoch_steps: 50,
            batch: 64,
            loss: 0.5123457,
            accuracy: Some(0.875),
            learning_rate: 5e-5,
            gradient_norm: 1.25,
            elapsed_s: step as f64 * 0.008,
            session_steps: step,
        }
    }

    /// Two reports within an epoch, one at its end, one in the next, and the end of the run.
    fn whole(format: Format) -> String {
        let mut renderer = Renderer::new(format);
        let mut text: String = [10, 25, 50, 60].map(|step| renderer.report(&progress(step))).concat();
        text.push_str(&renderer.end(Some(&progress(60))));
        text
    }

    #[test]
    fn keras() {
        // One backspace per visible character of the drawing before.
        let back = "\u{8}".repeat("10/50 0s 8ms/step - accuracy: 0.8750 - loss: 0.5123".len() + 21);
        let (on, off, green, grey) = ("\x1b[1m", "\x1b[0m", "\x1b[32m", "\x1b[37m");
        let bar = |done: usize| {
            let left = if done > 0 { format!("{green}{}{off}", "━".repeat(done)) } else { String::new() };
            format!("{left}{grey}{}{off}", "━".repeat(20 - done))
        };
        let tail = "8ms/step - accuracy: 0.8750 - loss: 0.5123";
        let expected = format!(
            "Epoch 1/2\n\r{on}10/50{off} {} {on}0s{off} {tail}{back}\r{on}25/50{off} {} {on}0s{off} {tail}\
             {back}\r{on}50/50{off} {} {on}0s{off} {tail}\nEpoch 2/2\n\r{on}10/50{off} {} {on}0s{off} {tail}\n",
            bar(4),
            bar(10),
            bar(20),
            bar(4)
        );
        assert_eq!(whole(Format::Keras), expected);
    }

    #[test]
    fn bars_of_tqdm() {
        assert_eq!(
            whole(Format::Tqdm),
            "\r 10%|█         | 10/100 [00:00<00:00, 125.00it/s, loss=0.5123, accuracy=0.8750]\
             \r 25%|██▌       | 25/100 [00:00<00:00, 125.00it/s, loss=0.5123, accuracy=0.8750]\
             \r 50%|█████     | 50/100 [00:00<00:00, 125.00it/s, loss=0.5123, accuracy=0.8750]\
             \r 60%|██████    | 60/100 [00:00<00:00, 125.00it/s, loss=0.5123, accuracy=0.8750]\n"
        );
        assert!(
            whole(Format::Lightning).ends_with(
                "\rEpoch 0: 100%|██████████| 50/50 [00:00<00:00, 125.00it/s, v_num=0, train_loss=0.512, train_acc=0.875]\
                 \rEpoch 1:  20%|██        | 10/50 [00:00<00:00, 125.00it/s, v_num=0, train_loss=0.512, train_acc=0.875]\n"
            ),
            "{}",
            whole(Format::Lightning)
        );
    }

    #[test]
    fn lines() {
        let first = |format| whole(format).lines().next().unwrap_or_default().to_owned();
        assert_eq!(first(Format::Hf), "{'loss': 0.5123, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.2}");
        assert_eq!(
            first(Format::Hf5),
            "{'loss': '0.5123', 'grad_norm': '1.25', 'learning_rate': '5e-05', 'epoch': '0.2'}"
        );
        assert_eq!(first(Format::Pytorch), "Train Epoch: 1 [640/3200 (20%)]\tLoss: 0.512346");
        assert_eq!(first(Format::Kv), "epoch=1 step=10 loss=0.5123457 accuracy=0.8750");
        assert_eq!(first(Format::Colon), "epoch: 1, step: 10, loss: 0.5123457, accuracy: 0.8750");
        assert_eq!(
            whole(Format::Csv).lines().take(2).collect::<Vec<_>>(),
            ["step,epoch,loss,accuracy", "10,1,0.5123457,0.875"]
        );
        let without_accuracy = Progress { accuracy: None, ..progress(10) };
        assert_eq!(Renderer::new(Format::Csv).report(&without_accuracy), "step,epoch,loss\n10,1,0.5123457\n");
        assert_eq!(whole(Format::Quiet), "");
        let json: serde_json::Value = serde_json::from_str(&first(Format::Json)).unwrap();
        assert_eq!((&json["step"], &json["epoch"], &json["accuracy"]), (&10.into(), &1.into(), &0.875.into()));
        let last = whole(Format::Hf).lines().last().unwrap().to_owned();
        assert!(last.starts_with("{'train_runtime': 0.48") && last.ends_with("'epoch': 1.2}"), "{last}");
    }

    #[test]
    fn numbers_look_like_pythons() {
        assert_eq!(
            [1.0, 0.5, 5e-5, 1e16, 0.0001, 0.0].map(python_float),
            ["1.0", "0.5", "5e-05", "1e+16", "0.0001", "0.0"]
        );
        assert_eq!([2.0, 123.4, 0.5126, 1234.0].map(lightning_number), ["2.000", "123.0", "0.513", "1.23e+03"]);
        let four = [98.1234, 0.5123457, 0.00001234, 12345.6, 1.0, 0.0, 1234.0, 9999.9];
        assert_eq!(four.map(four_digits), ["98.12", "0.5123", "1.234e-05", "1.235e+04", "1", "0", "1234", "1e+04"]);
    }
}
