//! What people write in comments and Markdown: lines of at most 120 columns, no words that hide the
//! subject of a sentence, and no "so many" that names no number. Messages in Rust have none of the words to avoid. The
//! documentation of an item in Rust does not begin with a pronoun.
//!
//! Exempt are generated files, code blocks, tables, and lines with a link, which cannot be broken.

use super::generated::is_generated;
use super::tree::SourceTree;

const WIDEST: usize = 120;

/// Words that begin a sentence without naming its subject, or that few readers know in this sense.
const AT_THE_START: [&str; 7] = ["who", "whoever", "whose", "nobody", "somebody", "whatever", "so long"];
/// Words to avoid anywhere.
const ANYWHERE: [&str; 5] = ["whoever", "deed", "deeds", "anew", "completing"];
/// Amounts that need a "that" or an "as" in the rest of their sentence: without it, no amount is named.
const AMOUNTS: [&str; 4] = ["so many", "so long", "so much", "so often"];
/// The documentation of an item begins with none of these: a reader would have to find out what they stand for.
const PRONOUNS: [&str; 6] = ["It", "Its", "They", "Their", "Theirs", "Those"];

/// One finding of a rule: its place and what is wrong.
struct Finding {
    path: String,
    line: usize,
    what: String,
}

pub(super) fn check(tree: &SourceTree) -> Vec<String> {
    let findings = wide_lines(tree).into_iter().chain(odd_words(tree)).chain(vague_amounts(tree));
    let findings = findings.chain(odd_messages(tree)).chain(lost_subjects(tree));
    findings.map(|finding| format!("{}:{}: {}", finding.path, finding.line, finding.what)).collect()
}

/// How a file marks comments.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Rust,
    /// TOML, YAML, shell, files without an extension (Dockerfile, scripts).
    Hash,
    /// As `Hash`, and texts between three quotation marks.
    Python,
    Markdown,
}

fn kind(path: &str) -> Option<Kind> {
    // The checker's own lists of words and examples in its tests are no prose.
    if is_generated(path) || path.starts_with("xtask/src/check/") {
        return None;
    }
    let name = path.rsplit('/').next().unwrap_or(path);
    match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("rs") => Some(Kind::Rust),
        Some("toml" | "yaml" | "yml" | "sh") | None => Some(Kind::Hash),
        Some("py") => Some(Kind::Python),
        Some("md") => Some(Kind::Markdown),
        Some(_) => None,
    }
}

/// What a text of several lines begins and ends with in Python.
const QUOTES: &str = "\"\"\"";

/// Lines of prose: the number of the line, the whole line, and its text without marks of comments.
fn prose(kind: Kind, text: &str) -> Vec<(usize, &str, &str)> {
    let mut lines = Vec::new();
    let mut in_code = false;
    // Whether the line is within a text of several lines, and whether that text is documentation.
    let mut in_text: Option<bool> = None;
    for (index, line) in text.lines().enumerate() {
        let trimmed = line.trim_start();
        let documentation = in_text.unwrap_or_else(|| trimmed.starts_with(QUOTES));
        if kind == Kind::Python && trimmed.matches(QUOTES).count() % 2 == 1 {
            in_text = if in_text.is_some() { None } else { Some(documentation) };
        }
        let words = match kind {
            Kind::Python if documentation => Some(trimmed.trim_matches('"')),
            Kind::Rust => trimmed.strip_prefix("//").map(|rest| rest.trim_start_matches(['/', '!'])),
            Kind::Hash | Kind::Python => trimmed.strip_prefix('#').filter(|rest| !rest.starts_with('!')),
            Kind::Markdown => Some(trimmed),
        };
        let Some(words) = words.map(str::trim) else {
            in_code = false;
            continue;
        };
        if words.starts_with("```") {
            in_code = !in_code;
            continue;
        }
        if !in_code && !words.starts_with('|') {
            lines.push((index + 1, line, words));
        }
    }
    lines
}

fn wide_lines(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.iter() {
        let Some(kind) = kind(path) else { continue };
        for (number, line, words) in prose(kind, text) {
            let width = line.chars().count();
            let has_link = words.contains("://") || words.contains("](");
            if width > WIDEST && !has_link {
                let what = format!("{width} columns, at most {WIDEST} are allowed");
                findings.push(Finding { path: path.to_owned(), line: number, what });
            }
        }
    }
    findings
}

fn odd_words(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.iter() {
        let Some(kind) = kind(path) else { continue };
        // Whether the line before ended in the middle of a sentence, and its number.
        let mut unfinished: Option<usize> = None;
        for (number, _, words) in prose(kind, text) {
            let continues = unfinished.is_some_and(|line| line + 1 == number);
            findings.extend(odd(words, continues).map(|word| Finding {
                path: path.to_owned(),
                line: number,
                what: format!("`{word}`: name the subject and use a technical verb (CONTRIBUTING.md, Habits)"),
            }));
            let ended = words.is_empty() || words.ends_with(['.', '!', '?', ':']);
            unfinished = (!ended).then_some(number);
        }
    }
    findings
}

/// Words to avoid in string literals of several words: they are messages. Single words are names, which stay.
fn odd_messages(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.iter().filter(|(path, _)| kind(path) == Some(Kind::Rust)) {
        for (line, literal) in literals(text).into_iter().filter(|(_, literal)| literal.contains(' ')) {
            let found = ANYWHERE.into_iter().filter(|word| has_word(&plain(literal), word));
            findings.extend(found.map(|word| Finding {
                path: path.to_owned(),
                line,
                what: format!("`{word}` in a message: use a word that everybody knows"),
            }));
        }
    }
    findings
}

/// Documentation of items that begins with a pronoun.
fn lost_subjects(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.iter().filter(|(path, _)| kind(path) == Some(Kind::Rust)) {
        let mut continues = false;
        for (index, line) in text.lines().enumerate() {
            let words = line.trim_start().strip_prefix("///");
            let first = words.and_then(|words| words.split_whitespace().next());
            if let Some(word) = first.filter(|word| !continues && PRONOUNS.contains(word)) {
                let what = format!("documentation that begins with `{word}`: name the subject");
                findings.push(Finding { path: path.to_owned(), line: index + 1, what });
            }
            continues = words.is_some();
        }
    }
    findings
}

/// The string literals of a Rust source, each with the line in which it begins.
fn literals(text: &str) -> Vec<(usize, &str)> {
    let bytes = text.as_bytes();
    let end_of =
        |from: usize, mark: &str| text.get(from..).and_then(|rest| rest.find(mark)).map_or(text.len(), |at| from + at);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let rest = &bytes[at..];
        let is_part_of_name = at > 0 && (bytes[at - 1].is_ascii_alphanumeric() || bytes[at - 1] == b'_');
        at = match rest {
            [b'/', b'/', ..] => end_of(at, "\n"),
            [b'/', b'*', ..] => end_of(at, "*/"),
            [b'r', b'"' | b'#', ..] if !is_part_of_name => {
                let hashes = rest[1..].iter().take_while(|byte| **byte == b'#').count();
                if rest.get(1 + hashes) != Some(&b'"') {
                    // A name such as r#type.
                    at + 2
                } else {
                    let start = at + hashes + 2;
                    let end = end_of(start, &format!("\"{}", "#".repeat(hashes)));
                    found.push((start, &text[start..end]));
                    end + 1 + hashes
                }
            }
            [b'"', ..] => {
                let start = at + 1;
                let mut end = start;
                while end < bytes.len() && bytes[end] != b'"' {
                    end += if bytes[end] == b'\\' { 2 } else { 1 };
                }
                found.push((start, text.get(start..end).unwrap_or_default()));
                end + 1
            }
            // A character, and no lifetime.
            [b'\'', b'\\', ..] => end_of(at + 3, "'") + 1,
            [b'\'', b'"', b'\'', ..] => at + 3,
            _ => at + 1,
        };
    }
    let line = |at: usize| text.as_bytes()[..at].iter().filter(|byte| **byte == b'\n').count() + 1;
    found.into_iter().map(|(at, literal)| (line(at), literal)).collect()
}

fn has_word(plain: &str, word: &str) -> bool {
    plain.split(|c: char| !c.is_alphanumeric()).any(|found| found == word)
}

fn vague_amounts(tree: &SourceTree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.iter() {
        let Some(kind) = kind(path) else { continue };
        let lines = prose(kind, text);
        for (at, (number, _, words)) in lines.iter().enumerate() {
            // The lines that continue this one belong to its last sentence.
            let next = lines[at + 1..].iter().zip(number + 1..);
            let next = next.take_while(|((line, _, words), wanted)| line == wanted && !words.is_empty());
            let following: Vec<String> = next.map(|((_, _, words), _)| plain(words)).collect();
            findings.extend(vague(&plain(words), &following.join(" ")).map(|amount| Finding {
                path: path.to_owned(),
                line: *number,
                what: format!("`{amount}` without `that` or `as`: name the number or the constant"),
            }));
        }
    }
    findings
}

/// The amounts in a line that are not named in the rest of their sentence, which may go on in the `following` text.
fn vague(line: &str, following: &str) -> impl Iterator<Item = &'static str> {
    let mut found = Vec::new();
    for amount in AMOUNTS {
        for (at, _) in line.match_indices(amount) {
            let rest = &line[at + amount.len()..];
            let is_whole =
                !line[..at].ends_with(char::is_alphanumeric) && !rest.starts_with(|c: char| c.is_alphanumeric());
            let rest = format!("{rest} {following}");
            let end = [".", "!", "?"].iter().filter_map(|mark| rest.find(&format!("{mark} "))).min();
            let sentence = &rest[..end.unwrap_or(rest.len())];
            let is_named = sentence.split(|c: char| !c.is_alphanumeric()).any(|word| word == "that" || word == "as");
            if is_whole && !is_named {
                found.push(amount);
            }
        }
    }
    found.into_iter()
}

/// A line in lower case without what is quoted as code, which is not prose.
fn plain(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`").to_lowercase()
}

/// The words to avoid in one line; `continues` says that it begins in the middle of a sentence.
fn odd(line: &str, continues: bool) -> impl Iterator<Item = &'static str> {
    let plain = plain(line);
    let mut starts: Vec<&str> =
        plain.split(". ").flat_map(|part| part.split("! ")).flat_map(|part| part.split("? ")).collect();
    if continues {
        starts.remove(0);
    }
    let begins_with = |start: &str, word: &str| {
        let start = start.trim_start_matches(['-', '*', '#', '>', ' ', '(']);
        start.strip_prefix(word).is_some_and(|rest| rest.chars().next().is_none_or(|c| !c.is_alphanumeric()))
    };
    let at_start: Vec<&str> = AT_THE_START
        .into_iter()
        .filter(|word| !ANYWHERE.contains(word) && starts.iter().any(|start| begins_with(start, word)))
        .collect();
    let anywhere: Vec<&str> = ANYWHERE.into_iter().filter(|word| has_word(&plain, word)).collect();
    at_start.into_iter().chain(anywhere)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(findings: Vec<Finding>) -> Vec<String> {
        findings.into_iter().map(|finding| format!("{}:{}", finding.path, finding.line)).collect()
    }

    #[test]
    fn a_wide_comment_or_paragraph_is_found_and_code_is_not() {
        let long = "word ".repeat(30);
        let rust = format!("//! {long}\nlet x = \"{long}\";\n// short\n    /// {long}\n");
        let toml = format!("# {long}\nkey = \"{long}\"\n");
        let tree = SourceTree::of(&[("crates/a/src/a.rs", &rust), ("Cargo.toml", &toml)]);
        assert_eq!(places(wide_lines(&tree)), ["Cargo.toml:1", "crates/a/src/a.rs:1", "crates/a/src/a.rs:4"]);
    }

    #[test]
    fn tables_links_code_blocks_and_generated_files_may_be_wide() {
        let long = "word ".repeat(30);
        let page =
            format!("{long}\n| {long} |\n[a]({long})\nsee https://a.example/ {long}\n```\n{long}\n```\n{long}\n");
        let tree = SourceTree::of(&[("docs/a.md", &page), ("docs/reference/cli.md", &page)]);
        assert_eq!(places(wide_lines(&tree)), ["docs/a.md:1", "docs/a.md:8"]);
    }

    #[test]
    fn scripts_are_read_too() {
        let long = "word ".repeat(30);
        let other = format!("x = \"{long}\"\ny = \"\"\"\n{long}\n\"\"\"\n");
        let python = format!("\"\"\"{long}\"\"\"\n\"\"\"Short.\n{long}\n\"\"\"\n# {long}\n{other}");
        let shell = format!("#!/bin/sh {long}\n# {long}\necho {long}\n");
        let tree = SourceTree::of(&[("Dockerfile", &shell), ("a/make-venv", &shell), ("bench/a.py", &python)]);
        let expected = ["Dockerfile:2", "a/make-venv:2", "bench/a.py:1", "bench/a.py:3", "bench/a.py:5"];
        assert_eq!(places(wide_lines(&tree)), expected);
    }

    #[test]
    fn columns_are_counted_in_characters() {
        let line = format!("// {}\n", "ä".repeat(117));
        assert!(wide_lines(&SourceTree::of(&[("a/b.rs", &line)])).is_empty());
    }

    #[test]
    fn odd_words_are_found_where_they_count() {
        let text = "// Who comes first is served.\n// It ends. Nobody knows.\n// The deed\n// who did it is done, anew.\n\
                    // It is indeed the node that `whoever` names, and so long as it holds.\nlet deed = who;\n";
        let tree = SourceTree::of(&[("a/b.rs", text)]);
        assert_eq!(places(odd_words(&tree)), ["a/b.rs:1", "a/b.rs:2", "a/b.rs:3", "a/b.rs:4"]);
    }

    #[test]
    fn odd_words_in_messages_are_found_and_names_are_not() {
        let text = "let a = \"create the job anew\";\n// a \"quoted deed\"\nlet b = ('\"', \"anew\", r#\"a \"deed\" of it\"#);\n\
                    let c = \"it says \\\"so\\\" \\\n    anew\"; let d: &'static str = \"all is well\";\nlet e = '\\''; f(\"one deed\")\n";
        let tree = SourceTree::of(&[("a/b.rs", text), ("docs/a.md", "a \"deed\"\n")]);
        assert_eq!(places(odd_messages(&tree)), ["a/b.rs:1", "a/b.rs:3", "a/b.rs:4", "a/b.rs:6"]);
    }

    #[test]
    fn documentation_of_an_item_begins_with_its_subject() {
        let text = "/// It ends.\nfn a() {}\n/// The job ends.\n/// It has a node.\nstruct B {\n    /// Its node.\n    c: u32,\n}\n\
                    // It is no documentation.\n/// Items.\n";
        let tree = SourceTree::of(&[("a/b.rs", text), ("docs/a.md", "It ends.\n")]);
        assert_eq!(places(lost_subjects(&tree)), ["a/b.rs:1", "a/b.rs:6"]);
    }

    #[test]
    fn an_amount_must_be_named_in_its_sentence() {
        let text = "// So many jobs run. That is all.\n\n// It waits so long\n// that it ends.\n\n// A job that ran so often\n                    // ends. It holds so long as it runs.\n// It takes `so much` and is also much.\nlet so_much = 1;\n";
        let tree = SourceTree::of(&[("a/b.rs", text)]);
        assert_eq!(places(vague_amounts(&tree)), ["a/b.rs:1", "a/b.rs:6"]);
    }
}
