//! The documents say what the programs do: names, options, exit codes and the sections the code refers to.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use job_contract::Exit;

use crate::laptop;

type Names = BTreeSet<String>;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What stands below a heading, up to the next one of any level.
fn section<'t>(text: &'t str, heading: &str) -> &'t str {
    let (_, after) = text
        .split_once(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("no heading `{heading}`"));
    after.split("\n#").next().unwrap()
}

/// First cells of the tables in a text, without their code marks; heads and rules are among them.
fn first_cells(text: &str) -> Names {
    text.lines()
        .filter_map(|line| line.strip_prefix('|')?.split('|').next())
        .map(|cell| cell.trim().replace('`', ""))
        .collect()
}

/// Files below `folder` whose names end so.
fn files(folder: &Path, suffix: &str, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, suffix, found);
        } else if path.to_string_lossy().ends_with(suffix) {
            found.push(path);
        }
    }
}

fn sources() -> Vec<(PathBuf, String)> {
    let mut found = Vec::new();
    let folders = [
        "api-launcher/src",
        "crates",
        "executor/src",
        "tests/chaos",
        "tests/chart",
        "tests/cluster",
        "tests/conformance",
        "tests/it",
        "tests/peers/src",
        "tests/platform/src",
        "tests/src",
        "xtask/src",
    ];
    for folder in folders {
        files(&root().join(folder), ".rs", &mut found);
    }
    // This file speaks of citations without being one.
    found.retain(|path| !path.ends_with("tests/it/docs.rs"));
    let text = |path: PathBuf| {
        let text = fs::read_to_string(&path).unwrap();
        (path, text)
    };
    found.into_iter().map(text).collect()
}

/// The longest run of `allowed` characters behind each `prefix`, without punctuation that ends a sentence.
fn words_after(text: &str, prefix: &str, allowed: fn(char) -> bool) -> Names {
    text.match_indices(prefix)
        .map(|(at, _)| {
            let rest = &text[at + prefix.len()..];
            let end = rest.find(|c| !allowed(c)).unwrap_or(rest.len());
            rest[..end].trim_end_matches('.').to_owned()
        })
        .filter(|word| !word.is_empty())
        .collect()
}

fn environment_names() -> Names {
    // The second file has one name, because its crate does not know the first.
    let files = [
        "crates/job-contract/src/env.rs",
        "crates/runtime/src/handover.rs",
    ];
    let names: Names = files
        .map(read)
        .iter()
        .flat_map(|text| text.lines())
        .filter(|line| line.starts_with("pub const") && line.contains(": &str"))
        .map(|line| line.split('"').nth(1).unwrap().to_owned())
        .collect();
    assert!(names.len() > 30, "{names:?}");
    names
}

#[test]
fn every_environment_name_is_documented() {
    let listed = first_cells(&read("docs/configuration.md"));
    let missing: Vec<_> = environment_names().difference(&listed).cloned().collect();
    assert!(
        missing.is_empty(),
        "not in docs/configuration.md: {missing:?}"
    );
}

#[test]
fn every_name_of_ours_in_the_documents_exists() {
    let mut documents = vec![root().join("README.md"), root().join("CHANGELOG.md")];
    files(&root().join("docs"), ".md", &mut documents);
    files(&root().join("examples"), ".md", &mut documents);
    let known = environment_names();
    let mut named = 0;
    for document in documents {
        let text = fs::read_to_string(&document).unwrap();
        for name in words_after(&text, "MAYFLY_", |c| {
            c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'
        }) {
            let name = format!("MAYFLY_{name}");
            assert!(known.contains(&name), "{}: {name}", document.display());
            named += 1;
        }
    }
    assert!(named > 50, "only {named} names were found");
}

/// The options that the help of a command offers.
fn offered(command: &[&str]) -> Names {
    let help = laptop("").run(&[command, &["--help"]].concat()).stdout;
    // Options are indented; prose is not.
    help.lines()
        .filter(|line| line.starts_with("  ") && line.trim_start().starts_with('-'))
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with("--")))
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_option_of_run_is_documented() {
    let listed: Names = first_cells(section(&read("docs/run.md"), "## Options"))
        .iter()
        .filter_map(|cell| cell.split_whitespace().find(|word| word.starts_with("--")))
        .filter(|word| word.chars().any(char::is_alphabetic))
        .map(str::to_owned)
        .collect();
    assert_eq!(listed, offered(&["run"]));
}

#[test]
fn every_key_of_an_agent_is_documented() {
    // The options of `configure` are the keys, and its own.
    let options = offered(&["agent", "configure"]);
    let own = ["--config", "--force", "--help"];
    let keys = options
        .iter()
        .filter(|option| !own.contains(&option.as_str()));
    let mut keys: Names = keys
        .map(|option| option.trim_start_matches('-').replace('-', "_"))
        .collect();
    keys.insert("token".to_owned());
    let cells = first_cells(section(&read("docs/agents.md"), "## Configuration"));
    let is_key = |cell: &String| cell.starts_with(|c: char| c.is_ascii_lowercase());
    assert_eq!(cells.into_iter().filter(is_key).collect::<Names>(), keys);
}

#[test]
fn every_metric_of_pools_is_documented() {
    let listed = first_cells(&read("docs/http-service.md"));
    let registered = words_after(&read("crates/hub/src/metrics.rs"), "\"pool_", |c| {
        c.is_ascii_lowercase() || c == '_'
    });
    assert!(registered.len() >= 10, "{registered:?}");
    for name in registered {
        let name = format!("mayfly_pool_{name}");
        // The end of a counter's name is not in the code.
        let is_listed = listed.contains(&name) || listed.contains(&format!("{name}_total"));
        assert!(is_listed, "not in docs/http-service.md: {name}");
    }
}

#[test]
fn every_exit_code_is_documented() {
    let mut codes: Names = (0..=128)
        .filter(|code| Exit::from_code(*code).is_some())
        .map(|code| code.to_string())
        .collect();
    codes.insert("128+n".to_owned());
    let listed: Names = first_cells(&read("docs/exit-codes.md"))
        .into_iter()
        .filter(|cell| cell.starts_with(|c: char| c.is_ascii_digit()))
        .collect();
    assert_eq!(listed, codes);
}

#[test]
fn every_section_the_code_refers_to_exists() {
    let contract = read("docs/job-contract.md");
    let sections: Names = contract
        .lines()
        .filter(|line| line.starts_with('#'))
        .filter_map(|line| line.trim_start_matches('#').split_whitespace().next())
        .map(|number| number.trim_end_matches('.').to_owned())
        .collect();
    let mut cited = 0;
    for (path, text) in sources() {
        // A citation may be broken over two lines of a comment.
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let text = text.replace(" /// ", " ").replace(" //! ", " ");
        for prefix in ["contract ", "Contract "] {
            for number in words_after(&text, prefix, |c| c.is_ascii_digit() || c == '.') {
                assert!(sections.contains(&number), "{}: {number}", path.display());
                cited += 1;
            }
        }
        for number in words_after(&text, "W-", |c| c.is_ascii_digit()) {
            let known = contract.contains(&format!("| W-{number} |"));
            assert!(known, "{}: W-{number}", path.display());
        }
        if text.contains("Appendix B") {
            assert!(contract.contains("\n## Appendix B"), "{}", path.display());
        }
    }
    assert!(cited > 30, "only {cited} citations were found");
}

#[test]
fn every_document_the_code_and_the_documents_refer_to_exists() {
    let mut texts = sources();
    for path in ["Cargo.toml", "README.md", "CONTRIBUTING.md"] {
        texts.push((root().join(path), read(path)));
    }
    let mut named = 0;
    for (path, text) in texts {
        for name in words_after(&text, "docs/", |c| {
            c.is_ascii_alphanumeric() || "-_./".contains(c)
        }) {
            let is_example = path.ends_with("api-launcher/src/run/content.rs");
            let exists = root().join("docs").join(&name).exists();
            assert!(is_example || exists, "{}: docs/{name}", path.display());
            named += 1;
        }
    }
    assert!(named > 20, "only {named} references were found");
}

/// Whether `path`, whose parts are separated by `::`, names a module, or something that the text of a module has.
fn names_code(path: &str, sources: &[(PathBuf, String)]) -> bool {
    // The crates below `tests` have this prefix.
    let path = path.replacen("test_", "tests::", usize::from(path.starts_with("test_")));
    let parts: Vec<&str> = path.split("::").collect();
    let is_module = |file: &Path, parts: &[&str]| {
        let file = file.with_extension("").to_string_lossy().replace('-', "_");
        let file = file.trim_end_matches("/lib").trim_end_matches("/src");
        let end = format!("/{}", parts.join("/"));
        file.replace("/src/", "/").ends_with(&end)
    };
    sources.iter().any(|(file, text)| {
        (1..=parts.len()).any(|module| {
            let (module, items) = parts.split_at(module);
            is_module(file, module) && items.iter().all(|item| text.contains(item))
        })
    })
}

#[test]
fn every_module_and_file_the_documents_name_exists() {
    let mut sources = sources();
    let mut more = Vec::new();
    for folder in ["api-launcher/tests", "fuzz", "tests"] {
        files(&root().join(folder), ".rs", &mut more);
    }
    sources.extend(more.into_iter().map(|path| (path, String::new())));
    let (mut named, mut missing) = (0, Vec::new());
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        for code in text.split('`').skip(1).step_by(2) {
            let is_file = |c: char| c.is_ascii_alphanumeric() || "_/.-".contains(c);
            let is_module = |c: char| c.is_ascii_alphanumeric() || "_:".contains(c);
            let is_lowercase = code.starts_with(|c: char| c.is_ascii_lowercase());
            let end = Path::new(code);
            let is_source = end.extension().is_some_and(|extension| extension == "rs");
            let exists = if is_source && code.chars().all(is_file) {
                // A map of the code has places, others have names.
                let is_map = document.ends_with("docs/code.md");
                let is_named = |(file, _): &(PathBuf, String)| file.ends_with(end);
                root().join(end).is_file() || !is_map && sources.iter().any(is_named)
            } else if code.contains("::") && code.chars().all(is_module) && is_lowercase {
                names_code(code.trim_end_matches("::"), &sources)
            } else {
                continue;
            };
            if !exists {
                missing.push(format!("{}: {code}", document.display()));
            }
            named += 1;
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(named > 200, "only {named} were found");
}

/// Every Markdown file of the repository.
fn documents() -> Vec<PathBuf> {
    let mut found: Vec<_> = [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ]
    .map(|name| root().join(name))
    .into();
    for folder in ["docs", "examples", "helm", "rbac"] {
        files(&root().join(folder), ".md", &mut found);
    }
    found
}

/// What stands between the brackets of Markdown links, without what is shown as code.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        if fenced || line.starts_with("    ") {
            continue;
        }
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            found.extend(rest.split_once(')').map(|(link, _)| link.to_owned()));
        }
    }
    found
}

/// The anchors GitHub gives the headings of a text.
fn anchors(text: &str) -> Names {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let words = heading.trim_start_matches('#').trim().to_lowercase();
        words
            .chars()
            .filter(|c| c.is_alphanumeric() || "-_ ".contains(*c))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn every_link_between_documents_leads_somewhere() {
    let mut followed = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        for link in links(&text) {
            if link.contains("://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = match file {
                "" => document.clone(),
                file => document.parent().unwrap().join(file),
            };
            let context = format!("{}: {link}", document.display());
            assert!(target.exists(), "{context}");
            if !anchor.is_empty() {
                let known = anchors(&fs::read_to_string(&target).expect(&context));
                assert!(known.contains(anchor), "{context}: {known:?}");
            }
            followed += 1;
        }
    }
    assert!(followed > 100, "only {followed} links were found");
}

/// Names of tests in a table cell, as file and function.
fn tests_in(cell: &str) -> Vec<(&str, &str)> {
    let words = cell.split('`').filter(|word| word.contains(".rs::"));
    words.filter_map(|word| word.split_once("::")).collect()
}

#[test]
fn every_line_of_the_conformance_list_names_tests_that_exist() {
    let list = read("docs/conformance.md");
    for (heading, letter) in [("## Launcher", 'L'), ("## Executor", 'E')] {
        let rows = section(&list, heading).lines();
        let rows: Vec<&str> = rows
            .filter(|row| row.starts_with(&format!("| {letter}")))
            .collect();
        let numbers = first_cells(&rows.join("\n"));
        // The first nine are the contract's own.
        let expected: Names = (1..=rows.len().max(9))
            .map(|number| format!("{letter}{number}"))
            .collect();
        assert_eq!(numbers, expected);
        for row in rows {
            let tests = tests_in(row);
            assert!(!tests.is_empty(), "no test proves {row}");
            for (file, name) in tests {
                let text = read(file);
                let (before, _) = text
                    .split_once(&format!("fn {name}("))
                    .unwrap_or_else(|| panic!("{file} has no {name}"));
                // A function alone is no proof: one of its attributes makes it a test, or the macro of both tools.
                let attributes = before.rsplit("\n\n").next().unwrap_or_default();
                let marks = ["#[test]", "#[tokio::test", "#[rstest]"];
                let by_both = text
                    .split_once("with_both_tools! {")
                    .and_then(|(_, rest)| rest.split_once('}'))
                    .is_some_and(|(cases, _)| cases.contains(&format!(" {name},")));
                let is_test = by_both || marks.iter().any(|mark| attributes.contains(mark));
                assert!(is_test, "{file}: {name} is no test");
            }
        }
    }
}
