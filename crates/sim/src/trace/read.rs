//! Reading and writing trace files.

use super::TraceJob;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

/// What is wrong with a trace file.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot read {path}")]
    Io { path: String, source: std::io::Error },
    #[error(
        "{path}, line 1: the columns `{found}` are of no format this reader knows; expected the header of Philly \
         (timestamp,duration,num_gpus,gpu_time,cluster), ITP (job_id,submission_time,duration,num_gpu) or our own \
         (job,submitted_s,duration_s,devices,owner)"
    )]
    UnknownFormat { path: String, found: String },
    #[error("{path}, line {line}, column `{column}`: `{value}` is not {expected}; correct or remove the line")]
    BadField { path: String, line: usize, column: &'static str, value: String, expected: &'static str },
    #[error("{path} holds no job; is it the right file?")]
    Empty { path: String },
}

#[derive(Debug, Clone, Copy)]
enum Format {
    Philly,
    Itp,
    Own,
}

const OWN: &str = "job,submitted_s,duration_s,devices,owner";

impl Format {
    fn of(header: &str) -> Option<Format> {
        match header.trim() {
            "timestamp,duration,num_gpus,gpu_time,cluster" => Some(Format::Philly),
            "job_id,submission_time,duration,num_gpu" => Some(Format::Itp),
            OWN => Some(Format::Own),
            _ => None,
        }
    }
}

/// Reads a trace and puts it in order of submission, from zero. Jobs that took no time or held no device
/// never ran and are left out, as in the studies these traces come from; the number beside them says how
/// many. An archive holds one trace for each cluster: all are merged, each from zero, and jobs without an
/// owner get the cluster's name.
pub fn read(path: &Path) -> Result<(Vec<TraceJob>, usize), TraceError> {
    let name = path.display().to_string();
    let io = |source| TraceError::Io { path: name.clone(), source };
    let file = BufReader::new(std::fs::File::open(path).map_err(io)?);
    let plain: Box<dyn Read> = match path.extension().and_then(|e| e.to_str()) {
        Some("gz" | "tgz") => Box::new(flate2::read::MultiGzDecoder::new(file)),
        _ => Box::new(file),
    };
    if [".tar", ".tar.gz", ".tgz"].iter().any(|end| name.ends_with(end)) {
        archive(&name, plain)
    } else {
        parse(&name, BufReader::new(plain))
    }
}

/// All traces of a tar archive.
fn archive(path: &str, input: impl Read) -> Result<(Vec<TraceJob>, usize), TraceError> {
    let io = |source| TraceError::Io { path: path.to_owned(), source };
    let (mut jobs, mut skipped) = (vec![], 0);
    for entry in tar::Archive::new(input).entries().map_err(io)? {
        let entry = entry.map_err(io)?;
        let member = entry.path().map_err(io)?.into_owned();
        if !entry.header().entry_type().is_file() || member.extension().is_none_or(|e| e != "csv") {
            continue;
        }
        let (mut read, never_ran) = parse(&format!("{path}, {}", member.display()), BufReader::new(entry))?;
        let cluster = member.file_stem().unwrap_or_default().to_string_lossy();
        read.iter_mut().filter(|j| j.owner.is_empty()).for_each(|j| j.owner = cluster.to_string());
        jobs.extend(read);
        skipped += never_ran;
    }
    if jobs.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    jobs.sort_by(|a: &TraceJob, b| a.submitted_s.total_cmp(&b.submitted_s));
    Ok((jobs, skipped))
}

pub(super) fn parse(path: &str, mut input: impl BufRead) -> Result<(Vec<TraceJob>, usize), TraceError> {
    let io = |source| TraceError::Io { path: path.to_owned(), source };
    let mut header = String::new();
    // A file without line ends must not be taken in whole for its header.
    input.by_ref().take(4096).read_line(&mut header).map_err(io)?;
    let header = header.trim_start_matches('\u{feff}');
    let Some(format) = Format::of(header) else {
        let found = header.trim().chars().take(80).collect();
        return Err(TraceError::UnknownFormat { path: path.to_owned(), found });
    };
    let (mut jobs, mut skipped) = (vec![], 0);
    for (i, line) in input.lines().enumerate() {
        let line = line.map_err(io)?;
        if line.trim().is_empty() {
            continue;
        }
        match job(format, path, i + 2, &line)? {
            Some(job) => jobs.push(job),
            None => skipped += 1,
        }
    }
    if jobs.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    jobs.sort_by(|a, b| a.submitted_s.total_cmp(&b.submitted_s));
    let first = jobs[0].submitted_s;
    for job in &mut jobs {
        job.submitted_s -= first;
    }
    Ok((jobs, skipped))
}

/// One line, or nothing for a job that never ran.
fn job(format: Format, path: &str, line: usize, text: &str) -> Result<Option<TraceJob>, TraceError> {
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let bad = |column, value: &str, expected| TraceError::BadField {
        path: path.to_owned(),
        line,
        column,
        value: value.chars().take(60).collect(),
        expected,
    };
    let field = |i: usize, column| fields.get(i).copied().ok_or_else(|| bad(column, "", "there"));
    let seconds = |i: usize, column| -> Result<f64, TraceError> {
        let value = field(i, column)?;
        let parsed = value.parse::<f64>().ok().filter(|v| v.is_finite());
        parsed.ok_or_else(|| bad(column, value, "a number of seconds"))
    };
    let count = |i: usize, column| -> Result<u32, TraceError> {
        let value = field(i, column)?;
        // Some exports write whole numbers as 4.0; a job that never got devices has none written.
        let parsed = if value.is_empty() { Some(0.0) } else { value.parse::<f64>().ok() };
        let whole = parsed.filter(|v| *v >= 0.0 && *v <= 1e6 && v.fract() == 0.0);
        whole.map(|v| v as u32).ok_or_else(|| bad(column, value, "a whole number of devices"))
    };
    let job = match format {
        Format::Philly => {
            let value = field(0, "timestamp")?;
            let submitted_s =
                timestamp(value).ok_or_else(|| bad("timestamp", value, "a time like 2017-10-09 07:01:55"))?;
            TraceJob {
                name: format!("line-{line}"),
                submitted_s,
                duration_s: seconds(1, "duration")?,
                devices: count(2, "num_gpus")?,
                owner: field(4, "cluster")?.to_owned(),
            }
        }
        Format::Itp => TraceJob {
            name: field(0, "job_id")?.to_owned(),
            submitted_s: seconds(1, "submission_time")?,
            duration_s: seconds(2, "duration")?,
            devices: count(3, "num_gpu")?,
            owner: String::new(),
        },
        Format::Own => TraceJob {
            name: field(0, "job")?.to_owned(),
            submitted_s: seconds(1, "submitted_s")?,
            duration_s: seconds(2, "duration_s")?,
            devices: count(3, "devices")?,
            owner: field(4, "owner")?.to_owned(),
        },
    };
    Ok((job.duration_s > 0.0 && job.devices > 0).then_some(job))
}

/// Seconds since 1970 of `2017-10-09 07:01:55`, without time zones: only differences matter.
fn timestamp(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let numbers = |s: &str, by: char| -> Option<Vec<f64>> { s.split(by).map(|p| p.parse().ok()).collect() };
    let (date, time) = (numbers(date, '-')?, numbers(time, ':')?);
    let ([year, month, day], [hour, minute, second]) = (date.as_slice(), time.as_slice()) else { return None };
    let sound = (1970.0..=9999.0).contains(year) && (1.0..=12.0).contains(month) && (1.0..=31.0).contains(day);
    if !sound || !(0.0..24.0).contains(hour) || !(0.0..60.0).contains(minute) || !(0.0..61.0).contains(second) {
        return None;
    }
    // Days of a proleptic calendar whose year starts in March, so that a leap day is the last of its year.
    let (y, m) = if *month > 2.0 { (*year, month - 3.0) } else { (year - 1.0, month + 9.0) };
    let days = 365.0 * y + (y / 4.0).floor() - (y / 100.0).floor()
        + (y / 400.0).floor()
        + ((153.0 * m + 2.0) / 5.0).floor()
        + day;
    Some((days - 719_469.0) * 86_400.0 + hour * 3600.0 + minute * 60.0 + second)
}

/// Writes our own format. Commas and line ends in names become underscores.
pub fn write(out: &mut impl Write, jobs: &[TraceJob]) -> std::io::Result<()> {
    let clean = |s: &str| s.replace([',', '\n', '\r'], "_");
    writeln!(out, "{OWN}")?;
    for j in jobs {
        writeln!(out, "{},{:.3},{:.3},{},{}", clean(&j.name), j.submitted_s, j.duration_s, j.devices, clean(&j.owner))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(Vec<TraceJob>, usize), String> {
        parse("t.csv", text.as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn philly_and_itp_and_our_own_are_recognised_by_their_headers() {
        let (philly, skipped) = parsed(
            "timestamp,duration,num_gpus,gpu_time,cluster\n2017-10-09 07:01:55,66.0,1,66.0,11cb48\n2017-10-09 06:59:55,0.0,8,0,x\n2017-10-08 07:01:55,5,2,10,x\n",
        )
        .unwrap();
        assert_eq!((philly.len(), skipped), (2, 1));
        assert_eq!((philly[0].submitted_s, philly[1].submitted_s, philly[1].devices), (0.0, 86_400.0, 1));
        let (itp, _) = parsed("job_id,submission_time,duration,num_gpu\na,100,5,64\nb,90,7,1\n").unwrap();
        assert_eq!((itp[0].name.as_str(), itp[1].submitted_s), ("b", 10.0));
        let mut text = vec![];
        write(&mut text, &itp).unwrap();
        assert_eq!(parse("own", text.as_slice()).unwrap().0, itp);
    }

    #[test]
    fn an_archive_is_one_trace_and_names_the_bad_member() {
        let tar = |last: &str| {
            let mut tar = tar::Builder::new(vec![]);
            let head = "job_id,submission_time,duration,num_gpu\n";
            for (name, text) in [("c1.csv", "a,100,5,64\nb,90,7,1\n"), ("LICENSE", "not a trace"), ("c2.csv", last)] {
                let text = format!("{head}{text}");
                let mut header = tar::Header::new_gnu();
                header.set_size(text.len() as u64);
                header.set_mode(0o644);
                tar.append_data(&mut header, name, text.as_bytes()).unwrap();
            }
            tar.into_inner().unwrap()
        };
        let (jobs, skipped) = archive("t.tar", tar("c,5,3,2\nd,6,0,2\n").as_slice()).unwrap();
        let owners: Vec<_> = jobs.iter().map(|j| (j.name.as_str(), j.owner.as_str(), j.submitted_s)).collect();
        assert_eq!((owners, skipped), (vec![("b", "c1", 0.0), ("c", "c2", 0.0), ("a", "c1", 10.0)], 1));
        let error = archive("t.tar", tar("c,5,x,2\n").as_slice()).unwrap_err().to_string();
        assert!(error.contains("t.tar, c2.csv, line 2") && error.contains("`duration`"), "{error}");
    }

    #[test]
    fn leap_days_count() {
        let day = |t: &str| timestamp(t).unwrap() / 86_400.0;
        assert_eq!(day("1970-01-01 00:00:00"), 0.0);
        assert_eq!(day("2000-03-01 00:00:00") - day("2000-02-28 00:00:00"), 2.0);
        assert_eq!(day("2017-03-01 00:00:00") - day("2017-02-28 00:00:00"), 1.0);
        assert_eq!(day("2017-10-09 00:00:00"), 17_448.0);
    }

    #[test]
    fn errors_name_line_column_and_what_was_expected() {
        let error = parsed("job_id,submission_time,duration,num_gpu\na,100,5,64\nb,soon,7,1\n").unwrap_err();
        assert!(error.contains("line 3") && error.contains("`submission_time`") && error.contains("`soon`"), "{error}");
        let error = parsed("a,b,c\n").unwrap_err();
        assert!(error.contains("Philly") && error.contains("a,b,c"), "{error}");
        assert!(parsed("job_id,submission_time,duration,num_gpu\na,100\n").unwrap_err().contains("`duration`"));
        assert!(
            parsed("").is_err() && parsed("job_id,submission_time,duration,num_gpu\n").unwrap_err().contains("no job")
        );
        assert!(
            parsed("job_id,submission_time,duration,num_gpu\na,1,nan,2\n").unwrap_err().contains("number of seconds")
        );
        assert!(parsed("job_id,submission_time,duration,num_gpu\na,1,3,2.5\n").unwrap_err().contains("whole number"));
    }
}
