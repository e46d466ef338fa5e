//! The kernel's counters of network interfaces, as `/proc/PID/net/dev` shows them: those of the network namespace of
//! that process. The reader need not enter the namespace.

/// Bytes since the interfaces were made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetBytes {
    pub received: u64,
    pub sent: u64,
}

impl NetBytes {
    pub fn total(self) -> u64 {
        self.received.saturating_add(self.sent)
    }
}

/// The sum over all interfaces except the loopback. `None` if the text has none of them: it says nothing then.
pub fn parse(text: &str) -> Option<NetBytes> {
    let of_line = |line: &str| {
        let (name, columns) = line.split_once(':')?;
        let columns: Vec<&str> = columns.split_whitespace().collect();
        let column = |n: usize| columns.get(n)?.parse::<u64>().ok();
        let bytes = NetBytes { received: column(0)?, sent: column(8)? };
        (name.trim() != "lo").then_some(bytes)
    };
    text.lines().filter_map(of_line).reduce(|a, b| NetBytes {
        received: a.received.saturating_add(b.received),
        sent: a.sent.saturating_add(b.sent),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEV: &str = "Inter-|   Receive                    |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     999       9    0    0    0     0          0         0      999       9    0    0    0     0       0          0
  eth0:     100       1    0    0    0     0          0         0       23       4    0    0    0     0       0          0
  net1:1000 1 0 0 0 0 0 0 7 4 0 0 0 0 0 0
";

    #[test]
    fn interfaces_are_summed_without_the_loopback() {
        assert_eq!(parse(DEV), Some(NetBytes { received: 1100, sent: 30 }));
        assert_eq!(parse(DEV).map(NetBytes::total), Some(1130));
        let huge = format!("a: {max} 0 0 0 0 0 0 0 {max}\nb: 5 0 0 0 0 0 0 0 5\n", max = u64::MAX);
        assert_eq!(parse(&huge).map(NetBytes::total), Some(u64::MAX));
    }

    #[test]
    fn garbage_says_nothing() {
        for text in ["", "a\nb\nc", "h\nh\neth0: x y z", "::::", "eth0: 1 2 3", "eth0: -1 0 0 0 0 0 0 0 4", "\u{0}eth0"]
        {
            assert_eq!(parse(text), None, "{text:?}");
        }
        assert_eq!(parse("lo: 1 0 0 0 0 0 0 0 1"), None, "a pod without a network");
        assert_eq!(parse("eth0: x\neth1: 1 0 0 0 0 0 0 0 2\n"), Some(NetBytes { received: 1, sent: 2 }));
    }
}
