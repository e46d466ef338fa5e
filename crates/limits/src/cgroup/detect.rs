//! Which cgroup hierarchy this machine has, and below which directory we may make groups.
//!
//! **Problem.** Machines differ: v2 alone; v1 with its controllers mounted one by one or together; *hybrid*
//! ones with v1 controllers and a v2 mount that has none of those we need. The daemon may run as root, as a
//! user with a delegated subtree (systemd), or as a user without any right.
//!
//! **Approach.** `/proc/self/mountinfo` lists what is mounted where, `/proc/self/cgroup` the groups of this
//! process. v2 is used if its mount has the `cpu` controller, else v1 if `cpu` is mounted there. On v1 our
//! groups go below the group of this process, hierarchy by hierarchy, so that limits set on the daemon hold
//! for the jobs. On v2 a group with processes cannot have controlled children ("no internal processes"), so
//! our groups go below the nearest group above this process that was delegated to it (systemd marks it with
//! an extended attribute), else below the topmost one it may write to.

use super::hierarchy::{Controller, Hierarchy, Version};
use crate::system::read_attribute;
use crate::{RuntimeError, machine};
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::path::{Path, PathBuf};

/// One line of `/proc/self/mountinfo` that is about cgroups.
#[derive(Debug, PartialEq)]
struct Mount {
    version: Version,
    /// Which part of the hierarchy is visible here; `/` is all of it.
    root: String,
    at: PathBuf,
    /// Super options: v1's controllers are among them.
    options: Vec<String>,
}

impl Hierarchy {
    /// The hierarchy of this machine in which we may make groups.
    pub fn detect() -> Result<Hierarchy, RuntimeError> {
        Hierarchy::detect_at(Path::new(machine::ROOT))
    }

    /// The same for a machine whose `proc` and `sys` lie below `root`.
    pub fn detect_at(root: &Path) -> Result<Hierarchy, RuntimeError> {
        detect(root).map_err(RuntimeError::Unsupported)
    }
}

/// Finds the hierarchy; the error is a sentence that names what is missing and the remedy.
fn detect(root: &Path) -> Result<Hierarchy, String> {
    let mounts = read_mounts(root)?;
    let membership = read_proc(root, "self/cgroup")?;

    if let Some(mount) = mounts.iter().find(|m| m.version == Version::V2) {
        let controllers = std::fs::read_to_string(mount.at.join("cgroup.controllers")).unwrap_or_default();
        if controllers.split_ascii_whitespace().any(|c| c == "cpu") {
            let own = own_dir(mount, membership_of(&membership, None).unwrap_or("/"));
            return find_v2_parent(root, &mount.at, &own);
        }
    }

    let mut parents = BTreeMap::new();
    for controller in Controller::ALL {
        let name = controller.v1_name();
        let Some(mount) = mounts.iter().find(|m| m.version == Version::V1 && m.options.iter().any(|o| o == name))
        else {
            continue;
        };
        let parent = own_dir(mount, membership_of(&membership, Some(name)).unwrap_or("/"));
        if writable(&parent) {
            parents.insert(controller, parent);
        }
    }
    if parents.contains_key(&Controller::Cpu) {
        return Ok(Hierarchy { root: root.to_owned(), version: Version::V1, parents, among_tasks: true });
    }
    if mounts.is_empty() {
        return Err("no cgroup hierarchy is mounted; mount one, e.g. `mount -t cgroup2 none /sys/fs/cgroup`".into());
    }
    Err("no right to make cgroups with the cpu controller here; run as root, or on a systemd machine start with \
         `systemd-run --user --scope -p Delegate=yes gainshare up`"
        .into())
}

/// The group of a process that another program started, if its path names `id` in every hierarchy: a
/// container's group, which carries the container's id. `None` also where its directories cannot be seen from
/// here.
#[cfg(feature = "docker")]
pub(crate) fn group_of(root: &Path, pid: i32, id: &str) -> Option<super::group::Group> {
    use super::file::inode;
    use super::group::{Group, GroupDir};
    let mounts = read_mounts(root).ok()?;
    let membership = read_proc(root, &format!("{pid}/cgroup")).ok()?;
    let locate = |controller: Option<Controller>| -> Option<PathBuf> {
        let name = controller.map(Controller::v1_name);
        let mount = mounts.iter().find(|m| match name {
            Some(name) => m.version == Version::V1 && m.options.iter().any(|o| o == name),
            None => m.version == Version::V2,
        })?;
        let path = membership_of(&membership, name).filter(|path| path.contains(id))?;
        Some(own_dir(mount, path)).filter(|dir| dir != &mount.at)
    };
    // A hybrid machine has a v2 mount as well, but not with the controllers that count.
    let version = if locate(Some(Controller::Cpu)).is_some() { Version::V1 } else { Version::V2 };
    let mut dirs: Vec<GroupDir> = Vec::new();
    for controller in Controller::ALL {
        let Some(path) = locate(Some(controller).filter(|_| version == Version::V1)) else { continue };
        match dirs.iter_mut().find(|dir| dir.path == path) {
            Some(dir) => dir.controllers.push(controller),
            None => dirs.push(GroupDir { inode: inode(&path).ok()?, path, controllers: vec![controller] }),
        }
    }
    let needed = [Controller::Cpu, Controller::CpuAcct, Controller::Memory];
    let complete = needed.iter().all(|needed| dirs.iter().any(|dir| dir.controllers.contains(needed)));
    if complete { Group::reopen(id, version, &dirs).ok() } else { None }
}

/// Whether this process is in the topmost group of the cpu controller, and that group is visibly the topmost one.
#[cfg(feature = "fallback")]
pub(crate) fn in_topmost_cpu_group(root: &Path) -> bool {
    let (Ok(mounts), Ok(membership)) = (read_mounts(root), read_proc(root, "self/cgroup")) else { return false };
    mounts.iter().any(|mount| match mount.version {
        // Only the topmost v1 group has a release agent, only the topmost v2 group has no type.
        Version::V1 => {
            mount.options.iter().any(|o| o == "cpu")
                && membership_of(&membership, Some("cpu")) == Some("/")
                && mount.at.join("release_agent").exists()
        }
        Version::V2 => {
            let controllers = std::fs::read_to_string(mount.at.join("cgroup.controllers")).unwrap_or_default();
            controllers.split_ascii_whitespace().any(|c| c == "cpu")
                && membership_of(&membership, None) == Some("/")
                && !mount.at.join("cgroup.type").exists()
        }
    })
}

fn read_proc(root: &Path, name: &str) -> Result<String, String> {
    let path = root.join("proc").join(name);
    std::fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}; is /proc mounted?", path.display()))
}

/// The cgroup mounts of this process, as paths below `root`.
fn read_mounts(root: &Path) -> Result<Vec<Mount>, String> {
    let mut mounts = parse_mounts(&read_proc(root, "self/mountinfo")?);
    for mount in &mut mounts {
        mount.at = root.join(mount.at.strip_prefix("/").unwrap_or(&mount.at));
    }
    Ok(mounts)
}

fn parse_mounts(mountinfo: &str) -> Vec<Mount> {
    mountinfo.lines().filter_map(parse_mount).collect()
}

/// `ID PARENT MAJ:MIN ROOT AT OPTIONS [TAGS…] - TYPE SOURCE SUPEROPTIONS`
fn parse_mount(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut right = right.split(' ');
    let version = match right.next()? {
        "cgroup2" => Version::V2,
        "cgroup" => Version::V1,
        _ => return None,
    };
    let options = right.nth(1).unwrap_or_default().split(',').map(str::to_owned).collect();
    let mut left = left.split(' ').skip(3);
    Some(Mount { version, root: unescape(left.next()?), at: PathBuf::from(unescape(left.next()?)), options })
}

/// mountinfo writes blanks and backslashes as octal numbers.
fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

/// The path in `/proc/self/cgroup` for a v1 controller, or for v2 (`None`).
fn membership_of<'t>(text: &'t str, controller: Option<&str>) -> Option<&'t str> {
    text.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':');
        let (id, names, path) = (fields.next()?, fields.next()?, fields.next()?);
        let ours = match controller {
            None => id == "0" && names.is_empty(),
            Some(name) => names.split(',').any(|n| n == name),
        };
        ours.then_some(path)
    })
}

/// The directory of the group `path` below `mount`. In a container the mount may show only a part of the
/// hierarchy while `/proc/self/cgroup` still holds the whole path, or the path may lie outside of the visible
/// part: then the result is the mount itself.
fn own_dir(mount: &Mount, path: &str) -> PathBuf {
    let relative = match mount.root.as_str() {
        "/" => path,
        root => path.strip_prefix(root).unwrap_or(""),
    };
    let relative = relative.trim_start_matches('/');
    if relative.split('/').any(|part| part == "..") {
        return mount.at.clone();
    }
    let dir = mount.at.join(relative);
    if dir.is_dir() { dir } else { mount.at.clone() }
}

fn find_v2_parent(root: &Path, mounted_at: &Path, own: &Path) -> Result<Hierarchy, String> {
    let above = || own.ancestors().take_while(|dir| dir.starts_with(mounted_at));
    let delegated = above().find(|dir| is_delegated(dir) && writable(dir));
    let topmost = above().take_while(|dir| writable(dir)).last();
    let candidates = delegated.into_iter().chain(topmost);
    let mut trouble = None;
    for parent in candidates {
        match make_room(mounted_at, own, parent) {
            Ok(()) => {
                let parents = Controller::ALL.iter().map(|&c| (c, parent.to_owned())).collect();
                let among_tasks = parent == own;
                return Ok(Hierarchy { root: root.to_owned(), version: Version::V2, parents, among_tasks });
            }
            Err(why) => trouble = Some(why),
        }
    }
    Err(trouble.unwrap_or_else(|| {
        format!(
            "no right to make cgroups below {}; run as root, or on a systemd machine start with \
             `systemd-run --user --scope -p Delegate=yes gainshare up`",
            own.display()
        )
    }))
}

/// Makes sure `parent` can have controlled children. A process that is alone in it moves into a leaf of its own.
fn make_room(mounted_at: &Path, own: &Path, parent: &Path) -> Result<(), String> {
    let has_cpu = |file: &str| {
        let text = std::fs::read_to_string(parent.join(file)).unwrap_or_default();
        text.split_ascii_whitespace().any(|c| c == "cpu")
    };
    if !has_cpu("cgroup.controllers") {
        return Err(format!("the cpu controller is not handed down to {}; enable it in its parent", parent.display()));
    }
    // Only the topmost group of all, the one without a type, may hold processes and controlled children. Elsewhere
    // the kernel would take `+cpu` and turn the group into the root of a threaded tree, in which no other controller
    // works.
    let procs = std::fs::read_to_string(parent.join("cgroup.procs")).unwrap_or_default();
    if procs.trim().is_empty() || !parent.join("cgroup.type").exists() {
        return match has_cpu("cgroup.subtree_control") {
            true => Ok(()),
            false => std::fs::write(parent.join("cgroup.subtree_control"), "+cpu")
                .map_err(|e| format!("cannot enable the cpu controller below {}: {e}", parent.display())),
        };
    }
    let alone = procs.split_ascii_whitespace().eq([std::process::id().to_string().as_str()]);
    if parent != own || !alone {
        return Err(format!(
            "{} holds processes, so that it cannot have controlled groups below it; start in a scope of its own: \
             `systemd-run --scope -p Delegate=yes gainshare up`{}",
            parent.display(),
            if parent == mounted_at { " (in a container: move its processes into a group below first)" } else { "" },
        ));
    }
    let aside = parent.join("gainshare-self");
    std::fs::create_dir_all(&aside)
        .and_then(|()| std::fs::write(aside.join("cgroup.procs"), "0"))
        .and_then(|()| std::fs::write(parent.join("cgroup.subtree_control"), "+cpu"))
        .map_err(|e| format!("cannot make {} a group for jobs: {e}", parent.display()))
}

/// systemd marks the groups it delegates (`Delegate=yes`, user managers) with an extended attribute.
fn is_delegated(dir: &Path) -> bool {
    let marked = |name: &CStr| {
        let mut value = [0u8; 8];
        read_attribute(dir, name, &mut value).is_ok_and(|length| value[..length] == *b"1")
    };
    marked(c"user.delegate") || marked(c"trusted.delegate")
}

/// Whether this process may make groups in `dir` and move processes into them.
fn writable(dir: &Path) -> bool {
    let allowed = |path: &Path| {
        // The effective user counts, not the real one, and a file system mounted read-only answers no.
        nix::unistd::faccessat(
            nix::fcntl::AT_FDCWD,
            path,
            nix::unistd::AccessFlags::W_OK,
            nix::fcntl::AtFlags::AT_EACCESS,
        )
        .is_ok()
    };
    // cgroup roots are `r-x` even for root, which may write there nevertheless; faccessat accounts for that.
    allowed(dir) && allowed(&dir.join("cgroup.procs"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
";

    #[test]
    fn mounts_are_found_among_others() {
        let mounts = parse_mounts(HYBRID);
        assert_eq!(mounts.len(), 2);
        assert_eq!(mounts[0].at, Path::new("/sys/fs/cgroup/cpu,cpuacct"));
        assert!(mounts[0].options.contains(&"cpuacct".into()));
        assert_eq!(mounts[1].version, Version::V2);
    }

    #[test]
    fn membership_is_found_by_controller() {
        let text = "4:memory:/a:b\n2:cpu,cpuacct:/x\n1:name=systemd:/s\n0::/u\n";
        assert_eq!(membership_of(text, Some("cpuacct")), Some("/x"));
        assert_eq!(membership_of(text, Some("memory")), Some("/a:b"));
        assert_eq!(membership_of(text, None), Some("/u"));
        assert_eq!(membership_of(text, Some("pids")), None);
    }

    #[test]
    fn a_container_that_sees_only_its_part_stays_in_it() {
        let at = tempfile::tempdir().unwrap();
        std::fs::create_dir(at.path().join("inner")).unwrap();
        let mount =
            |root: &str| Mount { version: Version::V1, root: root.into(), at: at.path().into(), options: vec![] };
        assert_eq!(own_dir(&mount("/docker/abc"), "/docker/abc/inner"), at.path().join("inner"));
        assert_eq!(own_dir(&mount("/docker/abc"), "/elsewhere"), at.path());
        assert_eq!(own_dir(&mount("/"), "/../../inner"), at.path());
        assert_eq!(own_dir(&mount("/"), "/missing"), at.path());
        assert_eq!(own_dir(&mount("/"), "/"), at.path());
    }
}
