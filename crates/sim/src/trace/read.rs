//! Reading and writing trace files.

use super::TraceJob;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

/// What is wrong with a trace file.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot read {path}: {source}")]
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

/// Reads a trace and puts it in order of submission, from zero. Jobs that took no time or held no device never ran and are left out, as in the
/// studies these traces come from; `skipped` says how many.
pub fn read(path: &Path) -> Result<(Vec<TraceJob>, usize), TraceError> {
    let name = path.display().to_string();
    let io = |source| TraceError::Io { path: name.clone(), source };
    let file = std::fs::File::open(path).map_err(io)?;
    if path.extension().is_some_and(|e| e == "gz") {
        parse(&name, BufReader::new(flate2::read::MultiGzDecoder::new(file)))
    } else {
        parse(&name, BufReader::new(file))
    }
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
    fn philly_and_itp_and_our_own_are_told_by_their_headers() {
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
