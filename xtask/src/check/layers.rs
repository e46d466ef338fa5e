//! Which of our crates may depend on which, and what they must not reach: the layers of ARCHITECTURE.md.
//!
//! The arrows are an allow-list: a dependency between our crates that is not in the table is refused, and
//! so is a crate that is not in the table. Dependencies of tests have a list of their own. The input is the
//! output of `cargo metadata`.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// One of our crates and the crates of ours that it may depend on.
struct Layer {
    package: &'static str,
    normal: &'static [&'static str],
    /// For tests, beside `normal`.
    dev: &'static [&'static str],
}

const fn layer(package: &'static str, normal: &'static [&'static str], dev: &'static [&'static str]) -> Layer {
    Layer { package, normal, dev }
}

const LAYERS: [Layer; 16] = [
    layer("gainshare-core", &[], &["gainshare-record"]),
    layer("gainshare-record", &["gainshare-core"], &["gainshare-core"]),
    layer("gainshare-figures", &[], &[]),
    layer("gainshare-page", &[], &[]),
    layer("gainshare-inside", &["gainshare-page"], &[]),
    layer("gainshare-workloads", &[], &[]),
    layer("gainshare-progress", &["gainshare-core"], &[]),
    layer("gainshare-limits", &["gainshare-core", "gainshare-page"], &["gainshare-progress"]),
    layer("gainshare-sim", &["gainshare-core", "gainshare-figures"], &["gainshare-record"]),
    // The tests of the daemon and of the operator use their own fail points.
    layer(
        "gainshare-daemon",
        &["gainshare-core", "gainshare-limits", "gainshare-page", "gainshare-progress", "gainshare-record"],
        &["gainshare-daemon"],
    ),
    layer("gainshare-kube-api", &["gainshare-core"], &[]),
    layer(
        "gainshare-node-agent",
        &[
            "gainshare-core",
            "gainshare-kube-api",
            "gainshare-limits",
            "gainshare-page",
            "gainshare-progress",
            "gainshare-record",
        ],
        &[],
    ),
    layer(
        "gainshare-operator",
        &["gainshare-core", "gainshare-kube-api", "gainshare-limits", "gainshare-page", "gainshare-record"],
        &["gainshare-node-agent", "gainshare-operator"],
    ),
    layer("kubectl-gainshare", &["gainshare-figures", "gainshare-kube-api"], &[]),
    layer(
        "gainshare",
        &[
            "gainshare-core",
            "gainshare-daemon",
            "gainshare-figures",
            "gainshare-limits",
            "gainshare-progress",
            "gainshare-record",
            "gainshare-sim",
            "gainshare-workloads",
        ],
        &[],
    ),
    layer("xtask", &[], &[]),
];

/// Crates whose direct dependencies are all listed, ours included.
const ONLY: [(&str, &[&str]); 1] = [("gainshare-core", &["serde", "thiserror"])];

/// Crates that must not be reached, also through other crates: the program for one machine stays quick to
/// build without Kubernetes, rendering and tensor libraries, and TLS is served by rustls alone. `cargo
/// metadata` switches on every feature that any crate of the workspace needs, so a crate that is reached
/// only through a feature of another program counts as reached.
const UNREACHABLE: [(&str, &[&str]); 3] = [
    ("gainshare", &["kube", "k8s-openapi", "resvg", "usvg", "candle-core"]),
    ("gainshare-operator", &["openssl", "openssl-sys"]),
    ("kubectl-gainshare", &["openssl", "openssl-sys"]),
];

/// What breaks the rules in the output of `cargo metadata`.
pub(super) fn check(metadata: &Value) -> Vec<String> {
    let mut findings = Vec::new();
    let members = members(metadata);
    for package in members.values() {
        let name = package["name"].as_str().unwrap_or_default();
        let Some(layer) = LAYERS.iter().find(|layer| layer.package == name) else {
            findings.push(format!(
                "the crate {name} is in no layer: add it to ARCHITECTURE.md and to xtask/src/check/layers.rs"
            ));
            continue;
        };
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let (to, kind) = (dependency["name"].as_str().unwrap_or_default(), &dependency["kind"]);
            let ours = members.values().any(|member| member["name"] == to);
            let allowed = layer.normal.contains(&to) || (*kind == "dev" && layer.dev.contains(&to));
            if ours && !allowed {
                let kind = if *kind == "dev" { "in tests " } else { "" };
                findings.push(format!("{name} depends {kind}on {to}, which its layer forbids: see ARCHITECTURE.md"));
            }
            let only = ONLY.iter().find(|(package, _)| *package == name);
            if kind.is_null() && only.is_some_and(|(_, allowed)| !allowed.contains(&to)) {
                findings.push(format!("{name} depends on {to}: it may depend on serde and thiserror only"));
            }
        }
    }
    for (package, absent) in UNREACHABLE {
        let Some((id, _)) = members.iter().find(|(_, member)| member["name"] == package) else { continue };
        for (reached, path) in reach(metadata, id) {
            if absent.contains(&reached.as_str()) {
                findings.push(format!("{package} reaches {reached}, which it must not: {}", path.join(" → ")));
            }
        }
    }
    findings
}

/// The packages of the workspace by id.
pub(super) fn members(metadata: &Value) -> BTreeMap<&str, &Value> {
    let ids: BTreeSet<&str> =
        metadata["workspace_members"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    packages.filter_map(|package| Some((package["id"].as_str()?, package))).filter(|(id, _)| ids.contains(id)).collect()
}

/// The names of all packages that one reaches without tests' dependencies, each with a way there.
fn reach(metadata: &Value, from: &str) -> BTreeMap<String, Vec<String>> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let names: BTreeMap<&str, &str> =
        packages.filter_map(|package| Some((package["id"].as_str()?, package["name"].as_str()?))).collect();
    let nodes = metadata["resolve"]["nodes"].as_array().into_iter().flatten();
    let nodes: BTreeMap<&str, &Value> = nodes.filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let mut found = BTreeMap::new();
    let mut seen = BTreeSet::from([from]);
    let mut queue = vec![(from, vec![names.get(from).copied().unwrap_or_default().to_owned()])];
    while let Some((id, path)) = queue.pop() {
        for dependency in nodes.get(id).into_iter().flat_map(|node| node["deps"].as_array().into_iter().flatten()) {
            let in_program =
                dependency["dep_kinds"].as_array().into_iter().flatten().any(|kind| kind["kind"].is_null());
            let Some(to) = dependency["pkg"].as_str().filter(|to| in_program && seen.insert(to)) else { continue };
            let name = names.get(to).copied().unwrap_or_default().to_owned();
            let path: Vec<String> = path.iter().cloned().chain([name.clone()]).collect();
            found.insert(name, path.clone());
            queue.push((to, path));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A package's name and its dependencies (name, kind).
    type Package<'a> = (&'a str, &'a [(&'a str, Option<&'a str>)]);

    /// Packages with their dependencies; those that no other package names as members are
    /// outside crates.
    fn metadata(packages: &[Package], outside: &[&str]) -> Value {
        let package = |(name, dependencies): &Package| {
            let dependencies: Vec<Value> =
                dependencies.iter().map(|(name, kind)| json!({"name": name, "kind": kind})).collect();
            json!({"id": name, "name": name, "dependencies": dependencies})
        };
        let node = |(name, dependencies): &(&str, &[(&str, Option<&str>)])| {
            let deps: Vec<Value> =
                dependencies.iter().map(|(name, kind)| json!({"pkg": name, "dep_kinds": [{"kind": kind}]})).collect();
            json!({"id": name, "deps": deps})
        };
        let members: Vec<&str> =
            packages.iter().map(|(name, _)| *name).filter(|name| !outside.contains(name)).collect();
        json!({
            "packages": packages.iter().map(package).collect::<Vec<_>>(),
            "workspace_members": members,
            "resolve": {"nodes": packages.iter().map(node).collect::<Vec<_>>()},
        })
    }

    #[test]
    fn the_arrows_of_the_table_are_allowed() {
        let arrows = metadata(
            &[
                ("gainshare-core", &[("serde", None), ("proptest", Some("dev"))]),
                ("gainshare-progress", &[("gainshare-core", None)]),
                ("gainshare-limits", &[("gainshare-core", None), ("gainshare-progress", Some("dev"))]),
            ],
            &[],
        );
        assert_eq!(check(&arrows), Vec::<String>::new());
    }

    #[test]
    fn a_forbidden_arrow_is_refused() {
        let up = metadata(
            &[("gainshare-core", &[]), ("gainshare-sim", &[("gainshare-limits", None)]), ("gainshare-limits", &[])],
            &[],
        );
        assert_eq!(
            check(&up),
            ["gainshare-sim depends on gainshare-limits, which its layer forbids: see ARCHITECTURE.md"]
        );
        // What tests may use, the program may not.
        let test_only =
            metadata(&[("gainshare-progress", &[]), ("gainshare-limits", &[("gainshare-progress", None)])], &[]);
        assert_eq!(check(&test_only).len(), 1);
    }

    #[test]
    fn core_depends_on_two_crates_only() {
        let broken = metadata(&[("gainshare-core", &[("rand", None)])], &[]);
        assert_eq!(check(&broken), ["gainshare-core depends on rand: it may depend on serde and thiserror only"]);
    }

    #[test]
    fn a_crate_without_a_layer_is_refused() {
        let unknown = metadata(&[("gainshare-new", &[])], &[]);
        assert!(check(&unknown)[0].contains("gainshare-new is in no layer"));
    }

    #[test]
    fn what_must_not_be_reached_is_refused_with_the_way_there() {
        let reached = metadata(
            &[
                ("gainshare", &[("gainshare-sim", None)]),
                ("gainshare-sim", &[("between", None)]),
                ("between", &[("resvg", None), ("kube", Some("dev"))]),
                ("resvg", &[]),
                ("kube", &[]),
            ],
            &["between", "resvg", "kube"],
        );
        assert_eq!(
            check(&reached),
            ["gainshare reaches resvg, which it must not: gainshare → gainshare-sim → between → resvg"]
        );
    }
}
