//! Lists of CPUs as the kernel writes them (`0-3,8`).
//!
//! Parsing takes what the kernel, the engine or a container's owner wrote and refuses whatever is no such
//! list, including lists of more CPUs than any kernel supports.

use std::fmt;

/// CPUs by number, sorted, each once. Prints in the kernel's own form, so that a value read back compares equal as
/// text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct CpuList(Vec<u32>);

/// More than any kernel supports; a guard against a list such as `0-4294967295`.
pub(crate) const MAX_CPUS: u32 = 65_536;

impl CpuList {
    pub(crate) const EMPTY: CpuList = CpuList(Vec::new());

    pub fn new(mut cpus: Vec<u32>) -> CpuList {
        cpus.sort_unstable();
        cpus.dedup();
        CpuList(cpus)
    }

    /// `None` if the text is no such list. The empty text is the empty list.
    pub fn parse(text: &str) -> Option<CpuList> {
        let mut cpus = Vec::new();
        for part in text.trim().split(',').filter(|p| !p.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
            if first > last || last >= MAX_CPUS || cpus.len() > MAX_CPUS as usize {
                return None;
            }
            cpus.extend(first..=last);
        }
        Some(CpuList::new(cpus))
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, cpu: u32) -> bool {
        self.0.binary_search(&cpu).is_ok()
    }

    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> CpuList {
        CpuList::new(cpus.into_iter().collect())
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_slice();
        let mut comma = "";
        while let [first, ..] = *rest {
            let run = rest.iter().zip(first..).take_while(|&(&cpu, expected)| cpu == expected).count();
            match run {
                1 => write!(f, "{comma}{first}")?,
                _ => write!(f, "{comma}{first}-{}", rest[run - 1])?,
            }
            rest = &rest[run..];
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prints_as_the_kernel_does() {
        for text in ["", "0", "0-1", "0-3,8", "1,3,5-7"] {
            assert_eq!(CpuList::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(CpuList::parse("3,1,2,2\n").unwrap().to_string(), "1-3");
        assert_eq!(CpuList::parse("3-1"), None);
        assert_eq!(CpuList::parse("0-4294967295"), None);
        assert_eq!(CpuList::parse("x"), None);
        assert_eq!(CpuList::parse(&"0-65535,".repeat(9)), None, "repeated ranges do not fill the memory");
    }

    proptest::proptest! {
        #[test]
        fn what_is_printed_parses_to_the_same(cpus in proptest::collection::vec(0u32..300, 0..40)) {
            let list = CpuList::new(cpus);
            proptest::prop_assert_eq!(CpuList::parse(&list.to_string()), Some(list));
        }
    }
}
