//! What a newcomer waits for: a build of the demo's program from nothing.
//!
//! `cargo build --release` of the default members (the program, and the library inside jobs) goes into a fresh
//! temporary folder, with the sources of
//! all crates already on the machine. Reported are the wall time, the CPU time of all processes of the
//! build, the number of crates compiled, and the size of the program without symbols. Wall time depends on
//! what else the machine does; CPU time and crates do much less.

use crate::sh;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::BufRead;
use std::process::{Command, Stdio};
use std::time::Instant;

/// Goals for two cores.
const LONGEST_WALL_S: f64 = 360.0;
const MOST_CRATES: usize = 260;
const LARGEST_MIB: f64 = 16.0;

pub(crate) fn run() -> Result<Value> {
    sh::run(sh::cargo().args(["fetch", "--locked"]))?;
    let folder = tempfile::Builder::new().prefix("gainshare-build-").tempdir()?;
    let (began, cpu_before) = (Instant::now(), sh::children_cpu_s()?);
    let mut build = sh::cargo();
    build.args(["build", "--release", "--locked", "--message-format", "json"]);
    build.arg("--target-dir").arg(folder.path()).stdout(Stdio::piped());
    let mut child = build.spawn().context("cannot start cargo")?;
    let (mut crates, mut program) = (BTreeSet::new(), None);
    for line in std::io::BufReader::new(child.stdout.take().context("the output is piped")?).lines() {
        let Ok(message) = serde_json::from_str::<Value>(&line?) else { continue };
        if message["reason"] == "compiler-artifact" {
            crates.extend(message["package_id"].as_str().map(str::to_owned));
            let executable = message["executable"].as_str().map(str::to_owned);
            program = executable.filter(|_| message["target"]["kind"][0] == "bin").or(program);
        }
    }
    ensure!(child.wait()?.success(), "the build failed: see above");
    let (wall_s, cpu_s) = (began.elapsed().as_secs_f64(), sh::children_cpu_s()? - cpu_before);
    let stripped = folder.path().join("stripped");
    let program = program.context("cargo names no program")?;
    sh::run(Command::new("strip").arg("-o").arg(&stripped).arg(&program))?;
    let binary_mib = std::fs::metadata(&stripped)?.len() as f64 / f64::from(1 << 20);
    Ok(json!({
        "demo": {
            "cold_wall_s": round(wall_s), "cpu_s": round(cpu_s), "crates": crates.len(), "binary_mib": round(binary_mib),
        },
        "of_what_is_allowed": {
            "cold_wall_s": round(wall_s / LONGEST_WALL_S),
            "crates": round(crates.len() as f64 / MOST_CRATES as f64),
            "binary_mib": round(binary_mib / LARGEST_MIB),
        },
    }))
}

fn round(value: f64) -> f64 {
    (value * 100.0).round() / 100.0
}
