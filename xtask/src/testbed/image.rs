//! Container images from single programs, without a registry and without an engine.
//!
//! An image is an archive as `docker save` writes it: one layer (a tar archive of the root file system), a configuration, and a manifest that names both.
//! The layer is the program, the shared libraries it needs (a static one needs none), and the few files that any program expects.

use anyhow::{Context, Result};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::process::Command;

/// The image of busybox that every node has.
pub(crate) const BUSYBOX: &str = "busybox:local";
/// The image that holds a pod's namespaces.
pub(crate) const PAUSE: &str = "pause:local";

/// What is in an image.
pub(crate) struct Image<'a> {
    /// As pods name it, such as `gainshare:local`.
    pub(crate) name: &'a str,
    /// Where the program lies in the image, and its content.
    pub(crate) program: (&'a str, &'a [u8]),
    /// Shared libraries: where they lie, and their content.
    pub(crate) libraries: &'a [(String, Vec<u8>)],
    /// Other names of the program, as links to it.
    pub(crate) links: &'a [String],
    pub(crate) entrypoint: &'a [&'a str],
}

impl Image<'_> {
    fn layer(&self) -> Result<Vec<u8>> {
        let (path, content) = self.program;
        let mut tar = tar::Builder::new(Vec::with_capacity(content.len() + (64 << 10)));
        let passwd = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n";
        folder(&mut tar, "etc/", 0o755)?;
        file(&mut tar, "etc/passwd", 0o644, passwd)?;
        file(&mut tar, "etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n")?;
        folder(&mut tar, "tmp/", 0o1777)?;
        let path = path.trim_start_matches('/');
        let libraries = self.libraries.iter().map(|(path, content)| (path.trim_start_matches('/'), content.as_slice()));
        let files: Vec<(&str, &[u8])> = std::iter::once((path, content)).chain(libraries).collect();
        let folders: BTreeSet<&Path> = files.iter().flat_map(|(path, _)| Path::new(path).ancestors().skip(1)).collect();
        // Sorted, a folder comes before what is in it.
        for parent in folders.into_iter().filter(|p| !p.as_os_str().is_empty()) {
            folder(&mut tar, &format!("{}/", parent.display()), 0o755)?;
        }
        for (path, content) in files {
            file(&mut tar, path, 0o755, content)?;
        }
        for link in self.links {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            tar.append_link(&mut header, link.trim_start_matches('/'), format!("/{path}"))?;
        }
        Ok(tar.into_inner()?)
    }
}

fn file(tar: &mut tar::Builder<impl Write>, path: &str, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_mode(mode);
    header.set_size(content.len() as u64);
    Ok(tar.append_data(&mut header, path, content)?)
}

fn folder(tar: &mut tar::Builder<impl Write>, path: &str, mode: u32) -> Result<()> {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Directory);
    header.set_mode(mode);
    header.set_size(0);
    Ok(tar.append_data(&mut header, path, std::io::empty())?)
}

/// A name as the engine keeps it: with the registry and the tag that a short name leaves out.
pub(crate) fn full_name(name: &str) -> String {
    let (path, last) = name.rsplit_once('/').map_or(("", name), |(path, last)| (path, last));
    let tagged = if last.contains(':') { name.to_owned() } else { format!("{name}:latest") };
    let registry = path.split('/').next().filter(|first| first.contains('.') || first.contains(':'));
    match (registry, path) {
        (Some(_), _) => tagged,
        (None, "") => format!("docker.io/library/{tagged}"),
        (None, _) => format!("docker.io/{tagged}"),
    }
}

/// Writes an archive of images to `to`.
pub(crate) fn write_archive(images: &[Image], to: &Path) -> Result<()> {
    let to_file = File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
    let mut archive = tar::Builder::new(to_file);
    let mut manifest = Vec::new();
    for image in images {
        let layer = image.layer().with_context(|| format!("cannot make a layer for the image {}", image.name))?;
        let digest = hex(&Sha256::digest(&layer));
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": { "Entrypoint": image.entrypoint, "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/"], "WorkingDir": "/" },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{digest}")] },
        });
        let config = serde_json::to_vec(&config)?;
        let config_name = format!("{}.json", hex(&Sha256::digest(&config)));
        let layer_name = format!("{digest}.tar");
        file(&mut archive, &config_name, 0o644, &config)?;
        // Two images of the same program share a layer.
        if !manifest.iter().any(|m: &serde_json::Value| m["Layers"][0] == layer_name.as_str()) {
            file(&mut archive, &layer_name, 0o644, &layer)?;
        }
        manifest.push(json!({ "Config": config_name, "RepoTags": [full_name(image.name)], "Layers": [layer_name] }));
    }
    file(&mut archive, "manifest.json", 0o644, &serde_json::to_vec(&manifest)?)?;
    archive.into_inner()?.flush().with_context(|| format!("cannot write {}", to.display()))
}

/// Writes the archive of the two images that every node starts with, from Debian's static busybox.
pub(crate) fn write_base(to: &Path) -> Result<()> {
    let path = "/bin/busybox";
    let busybox = fs::read(path).with_context(|| format!("cannot read {path}: apt-get install busybox-static"))?;
    let applets = crate::sh::output(Command::new(path).arg("--list-full"))?;
    let links: Vec<String> = applets.lines().filter(|a| *a != "bin/busybox").map(str::to_owned).collect();
    let program = (path, busybox.as_slice());
    // A pod's first process has nothing to do but to stay, and to go when it is told to.
    let stay = ["/bin/sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"];
    let busybox = Image { name: BUSYBOX, program, libraries: &[], links: &links, entrypoint: &[] };
    let pause = Image { name: PAUSE, program, libraries: &[], links: &links, entrypoint: &stay };
    write_archive(&[busybox, pause], to)
}

/// Writes an archive of the image `name` whose only program is the one at `path`, with the shared libraries of this machine that it needs.
pub(crate) fn write_program(path: &Path, name: &str, to: &Path) -> Result<()> {
    let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let libraries = libraries(path)?;
    let file = path.file_name().and_then(|n| n.to_str()).context("a program has a name in UTF-8")?;
    let inside = format!("/{file}");
    let program = (inside.as_str(), content.as_slice());
    write_archive(&[Image { name, program, libraries: &libraries, links: &[], entrypoint: &[&inside] }], to)
}

/// What the loader would load. Its own words are `libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x…)` and, for itself, `/lib64/ld-linux… (0x…)`.
fn libraries(program: &Path) -> Result<Vec<(String, Vec<u8>)>> {
    // A static program is not an error to us, but it is to ldd.
    let said = crate::sh::output(Command::new("ldd").arg(program)).unwrap_or_default();
    let paths = said.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    let read = |path: &str| {
        let content =
            fs::read(path).with_context(|| format!("cannot read {path}, which {} needs", program.display()))?;
        Ok((path.to_owned(), content))
    };
    paths.map(read).collect()
}

/// Whether a file is a program rather than an archive.
pub(crate) fn is_program(path: &Path) -> Result<bool> {
    use std::io::Read;
    let mut magic = [0; 4];
    let mut file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    let read = file.read(&mut magic).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(&magic[..read] == b"\x7fELF")
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn short_names_mean_what_the_engine_means() {
        assert_eq!(full_name("gainshare:local"), "docker.io/library/gainshare:local");
        assert_eq!(full_name("team/trainer"), "docker.io/team/trainer:latest");
        assert_eq!(full_name("localhost:5000/trainer:2"), "localhost:5000/trainer:2");
        assert_eq!(full_name("ghcr.io/a/b"), "ghcr.io/a/b:latest");
    }

    #[test]
    fn the_manifest_names_what_is_in_the_archive() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("images.tar");
        let program = ("/bin/tool", &b"content"[..]);
        let image = |name| Image { name, program, libraries: &[], links: &[], entrypoint: &["/bin/tool"] };
        write_archive(&[image("one:local"), image("two:local")], &to).unwrap();
        let mut files = std::collections::BTreeMap::new();
        for entry in tar::Archive::new(File::open(&to).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(entry.path().unwrap().display().to_string(), content);
        }
        let manifest: serde_json::Value = serde_json::from_slice(&files["manifest.json"]).unwrap();
        assert_eq!(manifest.as_array().unwrap().len(), 2);
        for image in manifest.as_array().unwrap() {
            let config: serde_json::Value = serde_json::from_slice(&files[image["Config"].as_str().unwrap()]).unwrap();
            let layer = &files[image["Layers"][0].as_str().unwrap()];
            assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", hex(&Sha256::digest(layer))));
        }
    }

    #[test]
    fn a_program_brings_the_libraries_it_needs() {
        let own = std::env::current_exe().unwrap();
        let found = libraries(&own).unwrap();
        assert!(found.iter().any(|(path, content)| path.contains("libc.so") && content.starts_with(b"\x7fELF")));
        assert!(found.iter().any(|(path, _)| path.contains("/ld-")));
        assert!(libraries(Path::new("/bin/busybox")).unwrap().is_empty());
    }
}
