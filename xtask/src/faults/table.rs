//! The tables of `docs/faults.md`: rows with the tests that inject their fault.
//!
//! The document is the only list. A test is written as `` `path/to/file.rs::name` ``. What a test needs is
//! read from its `#[ignore = "needs …"]` in the source.

use anyhow::{Context, Result, bail};
use std::path::Path;

/// Where the tables are.
pub(super) const DOCUMENT: &str = "docs/faults.md";

/// A test as the document names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct NamedTest {
    /// From the root of the checkout.
    pub(super) file: String,
    pub(super) name: String,
}

/// A fault or an attack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) id: String,
    pub(super) fault: String,
    pub(super) tests: Vec<NamedTest>,
}

/// The rows of all tables that have the columns of a fault: row, fault, what must hold, tests.
pub(super) fn rows(document: &str) -> Vec<Row> {
    let lines = document.lines().filter_map(cells).filter(|cells| cells.len() == 4);
    let is_row = |id: &str| !id.is_empty() && id != "row" && id.chars().all(|c| c.is_ascii_lowercase() || c == '-');
    lines
        .filter(|cells| is_row(&cells[0]) && !cells[0].starts_with('-'))
        .map(|cells| Row { id: cells[0].clone(), fault: cells[1].clone(), tests: tests(&cells[3]) })
        .collect()
}

/// The cells of a line of a table.
fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(inner.split('|').map(|cell| cell.trim().to_owned()).collect())
}

/// Every test that a text names.
pub(super) fn tests(text: &str) -> Vec<NamedTest> {
    let quoted = text.split('`').skip(1).step_by(2);
    quoted
        .filter_map(|words| words.split_once(".rs::"))
        .map(|(file, name)| NamedTest { file: format!("{file}.rs"), name: name.to_owned() })
        .collect()
}

impl NamedTest {
    /// The package and the target that contain the test, as the runner names programs. Unit tests of a
    /// package are in its library, or in its program where it has no library.
    pub(super) fn programs(&self) -> Result<Vec<String>> {
        let mut parts = self.file.split('/').peekable();
        parts.next_if_eq(&"crates");
        let package = parts.next().with_context(|| format!("{} is no path", self.file))?;
        Ok(match (parts.next(), parts.next()) {
            (Some("tests"), Some(file)) => vec![format!("{package} {}", file.trim_end_matches(".rs"))],
            (Some("src"), _) => vec![format!("{package} lib"), format!("{package} bin")],
            _ => bail!("{} is neither in `src` nor in `tests`", self.file),
        })
    }

    /// What the test needs beyond Rust, in the words of its `#[ignore]`; an error if the test does not exist.
    pub(super) fn needs(&self, root: &Path) -> Result<Option<String>> {
        let path = root.join(&self.file);
        let source = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let Some(at) = source.find(&format!("fn {}(", self.name)) else {
            bail!("{} has no test `{}`", self.file, self.name);
        };
        // The attributes of a function follow the end of whatever is before it.
        let before = &source[..at];
        let attributes = before.rfind(['}', ';']).map_or(before, |end| &before[end..]);
        if !attributes.contains("test]") && !attributes.contains("test(") {
            bail!("`{}` in {} is a function, but no test", self.name, self.file);
        }
        let reason = attributes.split_once("#[ignore = \"").and_then(|(_, rest)| rest.split_once('"'));
        Ok(reason.map(|(reason, _)| reason.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sh;

    fn document() -> String {
        std::fs::read_to_string(sh::root().join(DOCUMENT)).unwrap()
    }

    #[test]
    fn every_test_that_the_document_names_exists() {
        let named = tests(&document());
        assert!(named.len() > 100, "the document names {} tests", named.len());
        let errors: Vec<String> = named
            .iter()
            .filter_map(|test| test.needs(&sh::root()).and_then(|_| test.programs()).err())
            .map(|e| format!("{e:#}"))
            .collect();
        assert!(errors.is_empty(), "{}", errors.join("\n"));
    }

    #[test]
    fn every_row_has_a_name_of_its_own_and_a_test() {
        let rows = rows(&document());
        let names: std::collections::BTreeSet<&str> = rows.iter().map(|row| row.id.as_str()).collect();
        assert_eq!(names.len(), rows.len(), "two rows have the same name");
        let without: Vec<&str> = rows.iter().filter(|row| row.tests.is_empty()).map(|row| row.id.as_str()).collect();
        assert!(without.is_empty() && rows.len() > 30, "rows without a test: {without:?}");
        let text = document();
        let referred = text.split('`').skip(1).step_by(2).filter(|words| names.contains(words)).count();
        assert!(referred > 5, "the list of defects refers to rows");
    }

    /// What a test of the document does, as text.
    fn body(test: &NamedTest) -> String {
        let source = std::fs::read_to_string(sh::root().join(&test.file)).unwrap();
        let (_, body) = source.split_once(&format!("fn {}(", test.name)).unwrap();
        let end = ["#[test]", "#[tokio::test"].iter().filter_map(|next| body.find(next)).min().unwrap_or(body.len());
        body[..end].to_owned()
    }

    /// The rows that a test names when it prints its numbers.
    fn named_rows(body: &str) -> Vec<&str> {
        body.split("FaultTally::of(\"").skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    /// A row without numbers would count each of its tests as one injection.
    #[test]
    fn every_row_has_a_test_that_prints_what_it_injected() {
        let rows = rows(&document());
        let prints = |row: &Row| {
            let mut bodies = row.tests.iter().map(body);
            bodies.any(|body| body.contains("fault: injected=") || named_rows(&body).contains(&row.id.as_str()))
        };
        let silent: Vec<&str> = rows.iter().filter(|row| !prints(row)).map(|row| row.id.as_str()).collect();
        assert!(silent.is_empty(), "no test of these rows prints `fault: injected=…`: {silent:?}");
    }

    /// Numbers for a row that does not name the test would be lost.
    #[test]
    fn every_row_that_a_test_counts_for_names_the_test() {
        let rows = rows(&document());
        let tests = rows.iter().flat_map(|row| &row.tests);
        let mut lost = Vec::new();
        for test in tests {
            let body = body(test);
            let has = |named: &str| rows.iter().any(|row| row.id == named && row.tests.contains(test));
            lost.extend(
                named_rows(&body).into_iter().filter(|named| !has(named)).map(|row| format!("{row}: {}", test.name)),
            );
        }
        assert!(lost.is_empty(), "no row takes in these numbers: {lost:?}");
    }

    /// A unit test is found by the module of its file. A module may have another name than its file.
    #[test]
    fn every_unit_test_of_a_row_is_found_by_its_module() {
        let rows = rows(&document());
        let files = rows.iter().flat_map(|row| &row.tests).map(|test| test.file.as_str());
        let files: std::collections::BTreeSet<&str> = files.filter(|file| file.contains("/src/")).collect();
        let mut lost = Vec::new();
        for file in files {
            let (folder, name) = file.rsplit_once('/').unwrap();
            let attribute = format!("#[path = \"{name}\"]");
            for entry in std::fs::read_dir(sh::root().join(folder)).unwrap().flatten() {
                let source = std::fs::read_to_string(entry.path()).unwrap_or_default();
                let Some((_, rest)) = source.split_once(&attribute) else { continue };
                let module = rest.split(';').next().and_then(|line| line.rsplit(' ').next()).unwrap();
                let parent = entry.file_name().to_string_lossy().trim_end_matches(".rs").to_owned();
                if !super::super::in_file(&format!("{parent}::{module}::test"), file) {
                    lost.push(format!("{file} is the module {module} of {parent}"));
                }
            }
        }
        assert!(lost.is_empty(), "`cargo xtask faults` does not find tests of these files: {lost:?}");
    }

    #[test]
    fn rows_and_tests_are_read() {
        let text = "| row | fault | what must hold | tests |\n|---|---|---|---|\n\
                    | disk-full | no room | refused | `crates/a/tests/b.rs::c` and `crates/a/src/d/e.rs::f` |\n\
                    | defect | `crates/a/src/x.rs::y` |\n";
        let rows = rows(text);
        assert_eq!((rows.len(), rows[0].id.as_str(), rows[0].tests.len()), (1, "disk-full", 2));
        assert_eq!(rows[0].tests[0].programs().unwrap(), ["a b"]);
        assert_eq!(rows[0].tests[1].programs().unwrap(), ["a lib", "a bin"]);
        assert_eq!(tests(text).len(), 3);
    }
}
