//! An image made of one static program, without a registry.
//!
//! The built-in trainers are part of the `gainshare` program, so a container needs nothing but that program: the image
//! is a handful of files, put into a tar archive in memory and handed to the engine as `docker import` would do it.

use super::engine::{Engine, failed};
use crate::RuntimeError;
use bollard::query_parameters::CreateImageOptions;
use bytes::Bytes;
use futures_util::StreamExt;
use std::fs;
use std::io;
use std::path::Path;
use std::time::Duration;

/// The image that holds this program.
pub const LOCAL_IMAGE: &str = "gainshare:local";

/// Unpacking an image of a hundred megabytes onto a slow disk.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(300);

impl Engine {
    /// Makes the image `name` (as in `repository:tag`) from a statically linked program, which becomes `/gainshare` and
    /// the entry point.
    pub fn image_from_program(&self, program: &Path, name: &str) -> Result<(), RuntimeError> {
        let unreadable = |source| RuntimeError::Io {
            action: "make an image from",
            path: program.display().to_string(),
            source,
            hint: "",
        };
        let bytes = fs::read(program).map_err(unreadable)?;
        if is_dynamic(&bytes) {
            return Err(RuntimeError::Unsupported(format!(
                "{} needs shared libraries and would not run in an image of its own: build it with \
                 RUSTFLAGS=\"-C target-feature=+crt-static\" and --target",
                program.display()
            )));
        }
        let rootfs = rootfs(&bytes).map_err(unreadable)?;
        self.import_image(rootfs, name, &[r#"ENTRYPOINT ["/gainshare"]"#])
    }

    /// Makes the image `name` from a tar archive of a root file system, as `docker import` does; `changes` are lines of
    /// a Dockerfile.
    pub fn import_image(&self, rootfs_tar: Vec<u8>, name: &str, changes: &[&str]) -> Result<(), RuntimeError> {
        let (repo, tag) = name.rsplit_once(':').unwrap_or((name, "latest"));
        let options = CreateImageOptions {
            from_src: Some("-".to_owned()),
            repo: Some(repo.to_owned()),
            tag: Some(tag.to_owned()),
            changes: changes.iter().map(|&line| line.to_owned()).collect(),
            ..Default::default()
        };
        let docker = self.docker.clone().with_timeout(IMPORT_TIMEOUT);
        self.wait(async {
            let body = bollard::body_full(Bytes::from(rootfs_tar));
            let mut progress = std::pin::pin!(docker.create_image(Some(options), Some(body), None));
            while let Some(step) = progress.next().await {
                step.map_err(|error| failed(&self.socket, &format!("import image {name}"), error))?;
            }
            Ok(())
        })
    }

    /// Whether the engine has the image.
    pub fn has_image(&self, name: &str) -> Result<bool, RuntimeError> {
        match self.wait(self.docker.inspect_image(name)) {
            Ok(_) => Ok(true),
            Err(error) if super::engine::is_missing(&error) => Ok(false),
            Err(error) => Err(failed(&self.socket, &format!("look for image {name}"), error)),
        }
    }
}

/// A root file system that holds `program` and what any program expects to find: a place for temporary files, and names
/// for the users.
fn rootfs(program: &[u8]) -> io::Result<Vec<u8>> {
    let mut tar = tar::Builder::new(Vec::with_capacity(program.len() + (64 << 10)));
    let mut add = |path: &str, mode: u32, content: Option<&[u8]>| {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(if content.is_some() { tar::EntryType::Regular } else { tar::EntryType::Directory });
        header.set_mode(mode);
        header.set_size(content.map_or(0, |bytes| bytes.len() as u64));
        tar.append_data(&mut header, path, content.unwrap_or_default())
    };
    add("etc/", 0o755, None)?;
    add("etc/passwd", 0o644, Some(b"root:x:0:0:root:/:/gainshare\nnobody:x:65534:65534:nobody:/:/gainshare\n"))?;
    add("etc/group", 0o644, Some(b"root:x:0:\nnogroup:x:65534:\n"))?;
    add("tmp/", 0o1777, None)?;
    add("gainshare", 0o755, Some(program))?;
    tar.into_inner()
}

/// Whether a 64-bit ELF program asks for a dynamic loader. A static program has no `PT_INTERP` segment.
fn is_dynamic(elf: &[u8]) -> bool {
    const PT_INTERP: u32 = 3;
    let number = |at: usize, bytes: usize| {
        let raw = elf.get(at..at.checked_add(bytes)?)?;
        Some(raw.iter().rev().fold(0usize, |n, &byte| (n << 8) | usize::from(byte)))
    };
    let segments = || Some((number(0x20, 8)?, number(0x36, 2)?, number(0x38, 2)?));
    let Some((start, size, count)) = segments().filter(|_| elf.starts_with(b"\x7fELF\x02\x01")) else { return false };
    (0..count).filter_map(|i| number(start.checked_add(i * size)?, 4)).any(|kind| kind as u32 == PT_INTERP)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_and_dynamic_programs_are_told_apart() {
        assert!(is_dynamic(&fs::read("/proc/self/exe").unwrap()), "tests are linked dynamically");
        for other in
            [b"".as_slice(), b"#!/bin/sh", b"\x7fELF\x02\x01", &[b"\x7fELF\x02\x01".as_slice(), &[0xff; 80]].concat()]
        {
            assert!(!is_dynamic(other));
        }
    }

    #[test]
    fn the_archive_holds_the_program() {
        let archive = rootfs(b"program").unwrap();
        let mut archive = tar::Archive::new(archive.as_slice());
        let found: Vec<(String, u32)> = archive
            .entries()
            .unwrap()
            .map(|e| e.unwrap())
            .map(|e| (e.path().unwrap().display().to_string(), e.header().mode().unwrap()))
            .collect();
        assert!(found.contains(&("gainshare".to_owned(), 0o755)), "{found:?}");
        assert!(found.contains(&("tmp/".to_owned(), 0o1777)), "{found:?}");
    }
}
