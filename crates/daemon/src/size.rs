//! Amounts of memory as people write them: `40G`, `512MiB`, `1.5T`.

/// The units, each 1,024 times the one before.
const UNITS: [&str; 5] = ["", "K", "M", "G", "T"];

/// Reads a number with a unit (`K`, `M`, `G`, `T`, with or without `iB` or `B`); a bare number counts bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is not an amount of memory: write something like 512M or 40G");
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.trim().to_ascii_uppercase();
    let unit = unit.strip_suffix("IB").or(unit.strip_suffix('B')).unwrap_or(&unit);
    let power = UNITS.iter().position(|known| *known == unit).ok_or_else(wrong)?;
    let bytes = number.parse::<f64>().map_err(|_| wrong())? * 1024_f64.powi(power as i32);
    // Beyond this there is no exact number, and no memory either.
    if bytes > 2_f64.powi(53) { Err(wrong()) } else { Ok(bytes.round() as u64) }
}

/// `1.5 GiB`.
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_or_refused_with_an_example() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("512M", 512 << 20),
            ("40G", 40 << 30),
            ("40 GiB", 40 << 30),
            ("40gb", 40 << 30),
            ("1.5T", 3 << 39),
            ("1KiB", 1024),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "G", "-1G", "4X", "1..5G", "40 G iB", "inf", "99999999T"] {
            assert!(parse_size(text).is_err_and(|why| why.contains("like 512M or 40G")), "{text}");
        }
    }
}
