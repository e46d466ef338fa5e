//! No import cycle between the modules of a crate.
//!
//! *Children* of a module are compared with each other: `a` depends on `b` if anything in or below `a`
//! names anything in or below `b`. A set of children that all reach each other is a cycle. A module and its
//! own children may use each other freely: to others they are one room.
//!
//! Names are followed through re-exports: `use crate::Thing` counts as the module that defines `Thing`.
//! Read are `use` items and paths that begin with `crate`, `super` or `self`, also inside of macros and attributes
//! (`#[arg(value_parser = crate::values::aim())]`). Modules for tests only are left out.

use super::tree::SourceTree;
use std::collections::{BTreeMap, BTreeSet};
use syn::visit::{self, Visit};

/// A module by its names from the root of the crate.
type Module = Vec<String>;

/// Children of one module that all reach each other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Cycle {
    /// The crate's root file and the parent module, such as `crates/core/src/lib.rs crate::decide`.
    place: String,
    members: BTreeSet<String>,
}

impl Cycle {
    fn line(&self) -> String {
        let members: Vec<&str> = self.members.iter().map(String::as_str).collect();
        format!("{}: {}", self.place, members.join(", "))
    }
}

/// All cycles, in the words of a report.
pub(super) fn check(tree: &SourceTree) -> Vec<String> {
    let found = find_all(tree).into_iter();
    found.map(|(cycle, imports)| format!("import cycle in {} ({})", cycle.line(), imports.join("; "))).collect()
}

/// All cycles, each with the imports that close it.
fn find_all(tree: &SourceTree) -> Vec<(Cycle, Vec<String>)> {
    let is_root = |path: &str| path.ends_with("src/lib.rs") || path.ends_with("src/main.rs");
    let roots = tree.iter().map(|(path, _)| path).filter(|path| is_root(path));
    roots.flat_map(|root| CrateModules::read(tree, root).cycles(root)).collect()
}

/// The modules of a crate.
#[derive(Default)]
struct CrateModules {
    modules: BTreeMap<Module, Imports>,
}

/// What a module names of its crate.
#[derive(Default)]
struct Imports {
    /// Names that `use` brings into the module, and the paths behind them.
    names: BTreeMap<String, Vec<String>>,
    /// `use some::module::*`.
    globs: Vec<Vec<String>>,
    /// All paths, those of `use` included.
    paths: BTreeSet<Vec<String>>,
}

impl CrateModules {
    fn read(tree: &SourceTree, root: &str) -> CrateModules {
        let mut all = CrateModules::default();
        let folder = root.rsplit_once('/').map_or("", |(folder, _)| folder);
        all.read_file(tree, root, folder, Vec::new());
        all
    }

    /// Reads a module from its file; `folder` is where files of its children lie.
    fn read_file(&mut self, tree: &SourceTree, file: &str, folder: &str, module: Module) {
        let Some(text) = tree.get(file) else { return };
        // rustc reports what cannot be parsed better than this rule could.
        if let Ok(parsed) = syn::parse_file(text) {
            self.read_items(tree, file, folder, module, &parsed.items);
        }
    }

    fn read_items(&mut self, tree: &SourceTree, file: &str, folder: &str, module: Module, items: &[syn::Item]) {
        let mut reader = Reader::default();
        for item in items {
            match item {
                syn::Item::Mod(child) if is_for_tests(&child.attrs) => {}
                syn::Item::Mod(child) => {
                    let name = child.ident.to_string();
                    let below = format!("{folder}/{name}");
                    let path: Module = module.iter().cloned().chain([name]).collect();
                    match (&child.content, path_attribute(&child.attrs)) {
                        (Some((_, items)), _) => self.read_items(tree, file, &below, path, items),
                        (None, Some(named)) => {
                            let beside = file.rsplit_once('/').map_or("", |(folder, _)| folder);
                            self.read_file(tree, &format!("{beside}/{named}"), &below, path);
                        }
                        (None, None) => {
                            let files = [format!("{below}.rs"), format!("{below}/mod.rs")];
                            if let Some(found) = files.iter().find(|file| tree.get(file).is_some()) {
                                self.read_file(tree, found, &below, path);
                            }
                        }
                    }
                }
                item => reader.visit_item(item),
            }
        }
        let imports = reader.imports;
        self.modules.insert(module, imports);
    }

    /// The module that defines what a path leads to, as seen from `from`.
    fn resolve(&self, from: &[String], path: &[String], depth: usize) -> Option<Module> {
        // Re-exports that lead in a circle lead nowhere.
        if depth > 12 {
            return None;
        }
        let mut at = from.to_vec();
        for (index, segment) in path.iter().enumerate() {
            match segment.as_str() {
                "crate" => at = Vec::new(),
                "self" => {}
                "super" => {
                    at.pop()?;
                }
                name => {
                    let child: Module = at.iter().cloned().chain([name.to_owned()]).collect();
                    if self.modules.contains_key(&child) {
                        at = child;
                        continue;
                    }
                    let imports = self.modules.get(&at)?;
                    let rest = &path[index + 1..];
                    if let Some(target) = imports.names.get(name).filter(|target| target.as_slice() != path) {
                        let target: Vec<String> = target.iter().chain(rest).cloned().collect();
                        return self.resolve(&at, &target, depth + 1);
                    }
                    // A path that begins with another crate's name is none of ours.
                    return if index == 0 { None } else { Some(self.through_globs(&at, name).unwrap_or(at)) };
                }
            }
        }
        Some(at)
    }

    /// The child that a module re-exports this name from by `use child::*`.
    fn through_globs(&self, module: &[String], name: &str) -> Option<Module> {
        let globs = &self.modules.get(module)?.globs;
        // Where exactly one module is re-exported as a whole, the name is from there.
        let [glob] = globs.as_slice() else { return None };
        let target = self.resolve(module, glob, 10)?;
        (target.len() > module.len() && !name.is_empty()).then_some(target)
    }

    fn cycles(&self, root: &str) -> Vec<(Cycle, Vec<String>)> {
        // Arrows between the children of a parent, each with an import as its example.
        let mut arrows: BTreeMap<Module, BTreeMap<(String, String), String>> = BTreeMap::new();
        for (from, imports) in &self.modules {
            for path in &imports.paths {
                let Some(to) = self.resolve(from, path, 0) else { continue };
                let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
                if let (Some(a), Some(b)) = (from.get(common), to.get(common)) {
                    let example = format!("{} uses {}", from.join("::"), path.join("::"));
                    let parent = arrows.entry(from[..common].to_vec()).or_default();
                    parent.entry((a.clone(), b.clone())).or_insert(example);
                }
            }
        }
        let mut cycles = Vec::new();
        for (parent, arrows) in arrows {
            let names: BTreeSet<&String> = arrows.keys().map(|(from, _)| from).collect();
            let mut done: BTreeSet<String> = BTreeSet::new();
            for name in names {
                let forward = reachable(name, |from| arrows.keys().filter(move |(a, _)| *a == from).map(|(_, b)| b));
                let backward = reachable(name, |to| arrows.keys().filter(move |(_, b)| *b == to).map(|(a, _)| a));
                let members: BTreeSet<String> = forward.intersection(&backward).cloned().collect();
                if members.len() < 2 || !done.is_disjoint(&members) {
                    continue;
                }
                done.extend(members.iter().cloned());
                let inside = arrows.iter().filter(|((a, b), _)| members.contains(a) && members.contains(b));
                let imports = inside.map(|(_, example)| example.clone()).collect();
                let place = std::iter::once("crate".to_owned()).chain(parent.iter().cloned()).collect::<Vec<_>>();
                cycles.push((Cycle { place: format!("{root} {}", place.join("::")), members }, imports));
            }
        }
        cycles
    }
}

/// What is reached from `start`, itself included.
fn reachable<'a, I: Iterator<Item = &'a String>>(start: &str, next: impl Fn(String) -> I) -> BTreeSet<String> {
    let mut found = BTreeSet::from([start.to_owned()]);
    let mut queue = vec![start.to_owned()];
    while let Some(name) = queue.pop() {
        for to in next(name) {
            if found.insert(to.clone()) {
                queue.push(to.clone());
            }
        }
    }
    found
}

/// Whether `#[cfg(…)]` mentions `test`.
fn is_for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().filter(|attribute| attribute.path().is_ident("cfg")).any(|attribute| match &attribute.meta {
        syn::Meta::List(list) => {
            let tokens = list.tokens.to_string();
            tokens.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "test")
        }
        _ => false,
    })
}

/// The file of `#[path = "file"]`.
fn path_attribute(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find(|attribute| attribute.path().is_ident("path")).and_then(|attribute| match &attribute.meta {
        syn::Meta::NameValue(syn::MetaNameValue {
            value: syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }),
            ..
        }) => Some(text.value()),
        _ => None,
    })
}

/// Collects what the items of a module name.
#[derive(Default)]
struct Reader {
    imports: Imports,
}

impl Reader {
    fn add_use(&mut self, prefix: &[String], tree: &syn::UseTree) {
        let with = |name: String| prefix.iter().cloned().chain([name]).collect::<Vec<_>>();
        match tree {
            syn::UseTree::Path(path) => self.add_use(&with(path.ident.to_string()), &path.tree),
            syn::UseTree::Group(group) => group.items.iter().for_each(|tree| self.add_use(prefix, tree)),
            syn::UseTree::Glob(_) => {
                self.imports.paths.insert(prefix.to_vec());
                self.imports.globs.push(prefix.to_vec());
            }
            syn::UseTree::Name(name) if name.ident == "self" => self.add_name(prefix.last().cloned(), prefix.to_vec()),
            syn::UseTree::Name(name) => self.add_name(Some(name.ident.to_string()), with(name.ident.to_string())),
            syn::UseTree::Rename(rename) if rename.ident == "self" => {
                self.add_name(Some(rename.rename.to_string()), prefix.to_vec());
            }
            syn::UseTree::Rename(rename) => {
                self.add_name(Some(rename.rename.to_string()), with(rename.ident.to_string()));
            }
        }
    }

    fn add_name(&mut self, name: Option<String>, path: Vec<String>) {
        self.imports.paths.insert(path.clone());
        if let Some(name) = name {
            self.imports.names.insert(name, path);
        }
    }

    /// Tokens of macros and attributes are no tree. Their text has `::` between the names of a path.
    fn add_tokens(&mut self, tokens: &impl ToString) {
        let text = tokens.to_string().replace(' ', "");
        let words = text.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':');
        for word in words {
            let names: Vec<String> = word.split("::").map(str::to_owned).collect();
            if names.len() > 1 && begins_inside(&names[0]) && names.iter().all(|name| !name.is_empty()) {
                self.imports.paths.insert(names);
            }
        }
    }
}

fn begins_inside(first: &str) -> bool {
    matches!(first, "crate" | "super" | "self")
}

impl<'ast> Visit<'ast> for Reader {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Impl(item) => &item.attrs,
            syn::Item::Use(item) => &item.attrs,
            _ => return visit::visit_item(self, item),
        };
        if !is_for_tests(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_use(&[], &item.tree);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        if names.len() > 1 && begins_inside(&names[0]) {
            self.imports.paths.insert(names);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.add_tokens(&mac.tokens);
        visit::visit_macro(self, mac);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if let syn::Meta::List(list) = &attribute.meta {
            self.add_tokens(&list.tokens);
        }
        visit::visit_attribute(self, attribute);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cycles(files: &[(&str, &str)]) -> Vec<String> {
        find_all(&SourceTree::of(files)).into_iter().map(|(cycle, _)| cycle.line()).collect()
    }

    #[test]
    fn two_modules_that_use_each_other_are_a_cycle() {
        let files = [
            ("a/src/lib.rs", "mod one; mod two; mod three;"),
            ("a/src/one.rs", "use crate::two::Two; pub struct One;"),
            ("a/src/two.rs", "pub struct Two; fn f() -> super::one::One { todo!() }"),
            ("a/src/three.rs", "use crate::one::One;"),
        ];
        assert_eq!(cycles(&files), ["a/src/lib.rs crate: one, two"]);
    }

    #[test]
    fn a_cycle_through_a_re_export_a_deeper_module_and_a_macro_is_found() {
        let files = [
            ("a/src/lib.rs", "mod one; mod two; pub use two::Two;"),
            ("a/src/one/mod.rs", "pub mod inner;"),
            ("a/src/one/inner.rs", "use crate::Two;"),
            ("a/src/two.rs", "pub struct Two; fn f() { println!(\"{}\", crate::one::inner::NAME) }"),
        ];
        assert_eq!(cycles(&files), ["a/src/lib.rs crate: one, two"]);
    }

    #[test]
    fn a_cycle_through_attributes_is_found() {
        let files = [
            ("a/src/lib.rs", "mod one; mod two;"),
            ("a/src/one.rs", "enum One { #[arg(value_parser = crate::two::parser())] A(u8) }"),
            ("a/src/two.rs", "struct Two { #[serde(with = \"crate::one::text\")] one: u8 }"),
        ];
        assert_eq!(cycles(&files), ["a/src/lib.rs crate: one, two"]);
    }

    #[test]
    fn parents_children_tests_and_other_crates_make_no_cycle() {
        let files = [
            ("a/src/lib.rs", "mod one; mod two; use one::One;"),
            ("a/src/one.rs", "use super::Shared; use two::Other; #[cfg(test)] mod tests { use crate::two::Two; }"),
            ("a/src/two.rs", "use crate::one::One; #[cfg(test)] #[path = \"two_tests.rs\"] mod tests;"),
            ("a/src/two_tests.rs", "use crate::one::One;"),
        ];
        assert_eq!(cycles(&files), Vec::<String>::new());
    }
}
