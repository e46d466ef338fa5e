//! Which journal mode the file system allows.
//!
//! SQLite's write-ahead log needs memory that all readers share. A network file system does not
//! give that to two hosts, and some do not even give it to two processes of one host: the database
//! would be damaged. There we use the rollback journal, which needs only files and locks. It is
//! slower, and a reader (the guard) waits while a commit is under way.

use std::path::Path;

/// How SQLite keeps a commit atomic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JournalMode {
    WriteAhead,
    Rollback,
}

impl JournalMode {
    pub(super) fn pragma(self) -> &'static str {
        match self {
            JournalMode::WriteAhead => "WAL",
            JournalMode::Rollback => "TRUNCATE",
        }
    }

    /// The mode for a database in `dir`; a directory that cannot be examined counts as local.
    pub(super) fn for_dir(dir: &Path) -> JournalMode {
        #[allow(clippy::useless_conversion, reason = "the type differs between targets")]
        let kind = nix::sys::statfs::statfs(dir).map(|fs| i64::from(fs.filesystem_type().0));
        match kind.ok().and_then(network_file_system) {
            Some(name) => {
                tracing::warn!(
                    "{} is on {name}: the journal is slower there; a directory on a local disk is better",
                    dir.display()
                );
                JournalMode::Rollback
            }
            None => JournalMode::WriteAhead,
        }
    }
}

/// The name of a file system that may be shared with other hosts, by the magic number that
/// statfs(2) reports. FUSE is among them, because a file system in user space may be anything.
fn network_file_system(magic: i64) -> Option<&'static str> {
    // Some libraries report the number with its sign extended.
    Some(match magic & 0xffff_ffff {
        0x6969 => "NFS",
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => "SMB",
        0x0102_1997 => "9p",
        0x6573_5546 => "FUSE",
        0x5346_414f | 0x6b41_4653 => "AFS",
        0x00c3_6400 => "Ceph",
        0x7375_7245 => "Coda",
        0x564c => "NCP",
        0x0bd0_0bd0 => "Lustre",
        0x4750_4653 => "GPFS",
        0x786f_4256 => "VirtualBox shared folders",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn network_file_systems_get_no_write_ahead_log() {
        for (magic, name) in [(0x6969, "NFS"), (0x0102_1997, "9p"), (0x6573_5546, "FUSE"), (-11317950, "SMB")] {
            assert_eq!(network_file_system(magic), Some(name), "{magic:#x}");
        }
        // ext4, tmpfs, btrfs, XFS, overlayfs.
        for magic in [0xef53, 0x0102_1994, 0x9123_683e, 0x5846_5342, 0x794c_7630] {
            assert_eq!(network_file_system(magic), None, "{magic:#x}");
        }
    }
}
