//! Container images from programs, without a registry and without a container engine.
//!
//! An image is an archive as `docker save` writes it: one layer (a tar archive of the root file system), a
//! configuration, and a manifest that names both. With [`Layout::Oci`] the archive also has the index of an
//! OCI image layout, so that tools that do not know Docker's format can read it. The layer contains the
//! programs, the dynamic loader and the shared libraries they need (a static program needs none), and the
//! few files that any program expects. The same input gives the same bytes.

use anyhow::{Context, Result, ensure};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The image of busybox that every node has.
pub(crate) const BUSYBOX: &str = "busybox:local";
/// The image that holds a pod's namespaces.
pub(crate) const PAUSE: &str = "pause:local";
/// Where the programs lie in an image; the Dockerfile at the root uses the same folder.
const PROGRAM_FOLDER: &str = "/usr/local/bin";

/// Files of an image by their absolute path.
pub(crate) type Files = BTreeMap<String, Vec<u8>>;

/// The form of an archive.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Layout {
    /// As `docker save` writes it.
    Docker,
    /// The same, and the index of an OCI image layout.
    Oci,
}

/// What is in an image.
pub(crate) struct Image<'a> {
    /// As pods name it, such as `gainshare:local`.
    pub(crate) name: &'a str,
    /// Programs and shared libraries.
    pub(crate) files: &'a Files,
    /// Symbolic links: their paths, and the file that all of them point to.
    pub(crate) links: (&'a [String], &'a str),
    pub(crate) entrypoint: &'a [&'a str],
}

impl Image<'_> {
    fn layer(&self) -> Result<Vec<u8>> {
        let size: usize = self.files.values().map(Vec::len).sum();
        let mut tar = tar::Builder::new(Vec::with_capacity(size + (64 << 10)));
        let passwd = b"root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n";
        folder(&mut tar, "etc/", 0o755)?;
        file(&mut tar, "etc/passwd", 0o644, passwd)?;
        file(&mut tar, "etc/group", 0o644, b"root:x:0:\nnogroup:x:65534:\n")?;
        folder(&mut tar, "tmp/", 0o1777)?;
        let inside = |path: &'_ str| path.trim_start_matches('/').to_owned();
        let paths: Vec<String> = self.files.keys().map(|path| inside(path)).collect();
        let folders: BTreeSet<&Path> = paths.iter().flat_map(|path| Path::new(path).ancestors().skip(1)).collect();
        // Sorted, a folder comes before what is in it.
        for parent in folders.into_iter().filter(|p| !p.as_os_str().is_empty()) {
            folder(&mut tar, &format!("{}/", parent.display()), 0o755)?;
        }
        for (path, content) in self.files {
            file(&mut tar, &inside(path), 0o755, content)?;
        }
        let (links, target) = self.links;
        for link in links {
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_mode(0o777);
            header.set_size(0);
            tar.append_link(&mut header, inside(link), target)?;
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
pub(crate) fn write_archive(images: &[Image], layout: Layout, to: &Path) -> Result<()> {
    let to_file = File::create(to).with_context(|| format!("cannot write {}", to.display()))?;
    let mut archive = Blobs { tar: tar::Builder::new(to_file), written: BTreeSet::new() };
    let (mut docker_manifest, mut oci_manifests) = (Vec::new(), Vec::new());
    for image in images {
        let layer = image.layer().with_context(|| format!("cannot make a layer for the image {}", image.name))?;
        let layer_digest = archive.add(&layer)?;
        let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/";
        let config = json!({
            "architecture": if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            "os": "linux",
            "config": { "Entrypoint": image.entrypoint, "Env": [path], "WorkingDir": "/" },
            "rootfs": { "type": "layers", "diff_ids": [format!("sha256:{layer_digest}")] },
        });
        let config = serde_json::to_vec(&config)?;
        let config_digest = archive.add(&config)?;
        let name = full_name(image.name);
        if layout == Layout::Oci {
            let manifest = json!({
                "schemaVersion": 2,
                "mediaType": OCI_MANIFEST,
                "config": descriptor("application/vnd.oci.image.config.v1+json", &config_digest, config.len()),
                "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer_digest, layer.len())],
            });
            let manifest = serde_json::to_vec(&manifest)?;
            let mut entry = descriptor(OCI_MANIFEST, &archive.add(&manifest)?, manifest.len());
            let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
            entry["annotations"] =
                json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
            oci_manifests.push(entry);
        }
        let (config, layer) = (blob_path(&config_digest), blob_path(&layer_digest));
        docker_manifest.push(json!({ "Config": config, "RepoTags": [name], "Layers": [layer] }));
    }
    let mut tar = archive.tar;
    file(&mut tar, "manifest.json", 0o644, &serde_json::to_vec(&docker_manifest)?)?;
    if layout == Layout::Oci {
        let index = json!({ "schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": oci_manifests });
        file(&mut tar, "index.json", 0o644, &serde_json::to_vec(&index)?)?;
        file(&mut tar, "oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    }
    tar.into_inner()?.flush().with_context(|| format!("cannot write {}", to.display()))
}

const OCI_MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const OCI_INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn descriptor(media_type: &str, digest: &str, size: usize) -> serde_json::Value {
    json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": size })
}

fn blob_path(digest: &str) -> String {
    format!("blobs/sha256/{digest}")
}

/// An archive whose files are named by the hash of their content. Equal content is written once.
struct Blobs {
    tar: tar::Builder<File>,
    written: BTreeSet<String>,
}

impl Blobs {
    /// Writes the content, unless it is there already, and returns its hash.
    fn add(&mut self, content: &[u8]) -> Result<String> {
        let digest = hex(&Sha256::digest(content));
        if self.written.insert(digest.clone()) {
            file(&mut self.tar, &blob_path(&digest), 0o644, content)?;
        }
        Ok(digest)
    }
}

/// Writes the archive of the two images that every node starts with, from Debian's static busybox.
pub(crate) fn write_base(to: &Path) -> Result<()> {
    let path = "/bin/busybox";
    let busybox = fs::read(path).with_context(|| format!("cannot read {path}: apt-get install busybox-static"))?;
    let applets = crate::sh::output(Command::new(path).arg("--list-full"))?;
    let links: Vec<String> = applets.lines().filter(|a| *a != "bin/busybox").map(str::to_owned).collect();
    let files = Files::from([(path.to_owned(), busybox)]);
    // The first process of a pod only waits until it gets a signal to end.
    let stay = ["/bin/sh", "-c", "trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done"];
    let busybox = Image { name: BUSYBOX, files: &files, links: (&links, path), entrypoint: &[] };
    let pause = Image { name: PAUSE, files: &files, links: (&links, path), entrypoint: &stay };
    write_archive(&[busybox, pause], Layout::Docker, to)
}

/// Writes an archive of the image `name` that contains these programs and the shared libraries of this
/// machine that they need. The first program is the entry point.
pub(crate) fn write_programs(programs: &[PathBuf], name: &str, layout: Layout, to: &Path) -> Result<()> {
    let mut files = Files::new();
    let mut inside = Vec::new();
    for path in programs {
        let content = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        let file = path.file_name().and_then(|n| n.to_str()).context("a program has a name in UTF-8")?;
        let place = format!("{PROGRAM_FOLDER}/{file}");
        ensure!(files.insert(place.clone(), content).is_none(), "two programs are called {file}");
        inside.push(place);
        files.extend(libraries(path)?);
    }
    let entrypoint = inside.first().context("an image needs a program")?;
    write_archive(&[Image { name, files: &files, links: (&[], ""), entrypoint: &[entrypoint] }], layout, to)
}

/// The shared libraries that the dynamic loader would load, and the loader itself. `ldd` prints each library as
/// `libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x…)` and the loader as `/lib64/ld-linux… (0x…)`.
fn libraries(program: &Path) -> Result<Files> {
    // For a static program ldd fails; such a program needs no libraries.
    let printed = crate::sh::output(Command::new("ldd").arg(program)).unwrap_or_default();
    ensure!(
        !printed.contains("not found"),
        "a shared library that {} needs is not on this machine:\n{printed}",
        program.display()
    );
    let paths = printed.lines().filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
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

    fn read_archive(path: &Path) -> BTreeMap<String, Vec<u8>> {
        let mut files = BTreeMap::new();
        for entry in tar::Archive::new(File::open(path).unwrap()).entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            entry.read_to_end(&mut content).unwrap();
            files.insert(entry.path().unwrap().display().to_string(), content);
        }
        files
    }

    fn parse(bytes: &[u8]) -> serde_json::Value {
        serde_json::from_slice(bytes).unwrap()
    }

    #[test]
    fn the_manifests_name_what_is_in_the_archive() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("images.tar");
        let content = Files::from([("/bin/tool".to_owned(), b"content".to_vec())]);
        let image = |name| Image { name, files: &content, links: (&[], ""), entrypoint: &["/bin/tool"] };
        write_archive(&[image("one:local"), image("two:1.5")], Layout::Oci, &to).unwrap();
        let files = read_archive(&to);
        let manifest = parse(&files["manifest.json"]);
        assert_eq!(manifest.as_array().unwrap().len(), 2);
        for image in manifest.as_array().unwrap() {
            let config = parse(&files[image["Config"].as_str().unwrap()]);
            let layer = &files[image["Layers"][0].as_str().unwrap()];
            assert_eq!(config["rootfs"]["diff_ids"][0], format!("sha256:{}", hex(&Sha256::digest(layer))));
        }
        let index = parse(&files["index.json"]);
        let tag = |i: usize| index["manifests"][i]["annotations"]["org.opencontainers.image.ref.name"].clone();
        assert_eq!((tag(0), tag(1)), (json!("local"), json!("1.5")));
        for entry in index["manifests"].as_array().unwrap() {
            let blob = |d: &serde_json::Value| {
                let bytes = &files[&blob_path(d["digest"].as_str().unwrap().trim_start_matches("sha256:"))];
                assert_eq!(d["size"], bytes.len());
                bytes.clone()
            };
            let manifest = parse(&blob(entry));
            blob(&manifest["config"]);
            blob(&manifest["layers"][0]);
        }
        assert!(files.contains_key("oci-layout"));
    }

    #[test]
    fn an_image_of_several_programs_contains_each_library_once_and_starts_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let own = std::env::current_exe().unwrap();
        let programs = ["one", "two"].map(|name| dir.path().join(name));
        for to in &programs {
            fs::copy(&own, to).unwrap();
        }
        let (to, again) = (dir.path().join("image.tar"), dir.path().join("again.tar"));
        write_programs(&programs, "both:local", Layout::Docker, &to).unwrap();
        write_programs(&programs, "both:local", Layout::Docker, &again).unwrap();
        assert!(fs::read(&to).unwrap() == fs::read(&again).unwrap(), "the same input gives the same bytes");
        let files = read_archive(&to);
        let image = parse(&files["manifest.json"])[0].clone();
        let config = parse(&files[image["Config"].as_str().unwrap()]);
        assert_eq!(config["config"]["Entrypoint"], json!(["/usr/local/bin/one"]));
        let layer = &files[image["Layers"][0].as_str().unwrap()];
        let mut layer = tar::Archive::new(layer.as_slice());
        let paths: Vec<String> =
            layer.entries().unwrap().map(|e| e.unwrap().path().unwrap().display().to_string()).collect();
        for expected in ["usr/local/bin/one", "usr/local/bin/two"] {
            assert!(paths.iter().any(|path| path == expected), "{paths:?}");
        }
        assert_eq!(paths.iter().filter(|path| path.contains("libc.so")).count(), 1, "{paths:?}");
        let missing = write_programs(&[dir.path().join("three")], "x", Layout::Docker, &to).unwrap_err();
        assert!(format!("{missing:#}").contains("three"), "{missing:#}");
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
