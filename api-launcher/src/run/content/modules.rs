//! Where a configuration refers to folders beside it: local module sources, followed from module to module.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use hcl_edit::structure::Body;
use job_contract::Tool;
use runtime::{lexical, regular_file};
use serde_json::Value;

use crate::failure::Failure;

/// The largest configuration file that is read.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Whether the folder holds any configuration.
pub(super) fn has_configuration(dir: &Path) -> Result<bool, Failure> {
    Ok(!configuration_files(dir)?.is_empty())
}

/// Whether the folder holds files only OpenTofu reads.
pub(crate) fn has_opentofu_files(dir: &Path) -> Result<bool, Failure> {
    let files = configuration_files(dir)?;
    Ok(files.iter().any(|path| is_of_opentofu(path)))
}

/// The file in which the root module says itself where its state is, if it does. What does not parse may do so too.
pub(crate) fn own_backend(dir: &Path, tool: Tool) -> Result<Option<PathBuf>, Failure> {
    let mut files = configuration_files(dir)?;
    files.sort();
    files.retain(|path| tool == Tool::OpenTofu || !is_of_opentofu(path));
    let sets_backend = |path: &PathBuf| match regular_file::read_text(path, MAX_FILE_BYTES) {
        Ok(text) if is_json(path) => json_sets_backend(&text),
        Ok(text) => hcl_sets_backend(&text),
        Err(_) => false,
    };
    Ok(files.into_iter().find(sets_backend))
}

/// Blocks in `terraform` that say where the state is.
const BACKENDS: [&str; 3] = ["backend", "cloud", "state_store"];

fn hcl_sets_backend(text: &str) -> bool {
    let Ok(body) = text.trim_start_matches('\u{feff}').parse::<Body>() else {
        return text.lines().any(|line| {
            let word = line.trim_start().split([' ', '\t', '"', '{']).next();
            word.is_some_and(|word| BACKENDS.contains(&word))
        });
    };
    let mut settings = body.get_blocks("terraform");
    settings.any(|block| BACKENDS.iter().any(|name| block.body.has_blocks(name)))
}

fn json_sets_backend(text: &str) -> bool {
    let Ok(document) = serde_json::from_str::<Value>(text) else {
        return BACKENDS
            .iter()
            .any(|name| text.contains(&format!("\"{name}\"")));
    };
    let settings = blocks(&document)
        .iter()
        .filter_map(|body| body.get("terraform"));
    let mut settings = settings.flat_map(blocks);
    settings.any(|settings| BACKENDS.iter().any(|name| settings.get(name).is_some()))
}

fn is_of_opentofu(path: &Path) -> bool {
    let name = path.to_string_lossy();
    name.ends_with(".tofu") || name.ends_with(".tofu.json")
}

fn is_json(path: &Path) -> bool {
    path.extension()
        .is_some_and(|extension| extension == "json")
}

/// In JSON syntax a block may be an object or a list of them, at each level.
fn blocks(value: &Value) -> &[Value] {
    match value {
        Value::Array(list) => list,
        other => std::slice::from_ref(other),
    }
}

/// Folders of all local modules `dir` calls, directly or through others, `dir` not among them. Sources that do
/// not exist are left for the tool to complain about.
pub(super) fn closure(dir: &Path) -> Result<BTreeSet<PathBuf>, Failure> {
    let mut found = BTreeSet::from([dir.to_owned()]);
    let mut waiting = vec![dir.to_owned()];
    while let Some(module) = waiting.pop() {
        for source in local_sources(&module)? {
            let target = lexical(&module.join(source));
            if target.is_dir() && found.insert(target.clone()) {
                waiting.push(target);
            }
        }
    }
    found.remove(dir);
    Ok(found)
}

fn local_sources(module: &Path) -> Result<Vec<String>, Failure> {
    let mut sources = Vec::new();
    for path in configuration_files(module)? {
        let text = regular_file::read_text(&path, MAX_FILE_BYTES);
        let text = text.map_err(Failure::unreadable(&path))?;
        if is_json(&path) {
            json_sources(&text, &mut sources);
        } else {
            hcl_sources(&text, &mut sources);
        }
    }
    sources.retain(|source| source.starts_with("./") || source.starts_with("../"));
    Ok(sources)
}

fn hcl_sources(text: &str, sources: &mut Vec<String>) {
    let Ok(body) = text.parse::<Body>() else {
        return sources.extend(quoted_paths(text));
    };
    sources.extend(
        body.get_blocks("module")
            .filter_map(|module| module.body.get_attribute("source")?.value.as_str())
            .map(str::to_owned),
    );
}

fn json_sources(text: &str, sources: &mut Vec<String>) {
    let Ok(document) = serde_json::from_str::<Value>(text) else {
        return sources.extend(quoted_paths(text));
    };
    let modules = blocks(&document)
        .iter()
        .filter_map(|body| body.get("module"))
        .flat_map(blocks)
        .filter_map(Value::as_object);
    for call in modules
        .flat_map(|modules| modules.values())
        .flat_map(blocks)
    {
        sources.extend(
            call.get("source")
                .and_then(Value::as_str)
                .map(str::to_owned),
        );
    }
}

/// All texts that may be a source, of a file that the tool may read although this program cannot: among them are those of its modules.
fn quoted_paths(text: &str) -> impl Iterator<Item = String> {
    let begins_path = |part: &&str| part.starts_with("./") || part.starts_with("../");
    text.split('"').filter(begins_path).map(str::to_owned)
}

fn configuration_files(dir: &Path) -> Result<Vec<PathBuf>, Failure> {
    let fail = Failure::unreadable(dir);
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(&fail)? {
        let entry = entry.map_err(&fail)?;
        let name = entry.file_name();
        let is_configuration = name.to_str().is_some_and(|name| {
            [".tf", ".tf.json", ".tofu", ".tofu.json"]
                .iter()
                .any(|end| name.ends_with(end))
        });
        if is_configuration && entry.path().is_file() {
            files.push(entry.path());
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_module_that_says_where_its_state_is_is_found() {
        let of = |name: &str, text: &str, tool| {
            let folder = tempfile::tempdir().unwrap();
            fs::write(folder.path().join(name), text).unwrap();
            own_backend(folder.path(), tool).unwrap().is_some()
        };
        for (name, text) in [
            ("main.tf", "terraform {\n  backend \"local\" {}\n}\n"),
            ("main.tf", "\u{feff}terraform {\n  cloud {}\n}\n"),
            (
                "main.tf.json",
                r#"{"terraform": [{"backend": {"s3": {}}}]}"#,
            ),
            // The tool may read what our parser does not.
            (
                "main.tf",
                "terraform {\n  backend \"local\" {}\n}\nx = {{\n",
            ),
            ("main.tf.json", r#"{"terraform": {"backend": {}},}"#),
        ] {
            assert!(of(name, text, Tool::Terraform), "{text}");
        }
        for text in ["terraform {}\nlocals {\n  backend = 1\n}\n", "x = {{\n"] {
            assert!(!of("main.tf", text, Tool::Terraform), "{text}");
        }
        let block = "terraform {\n  backend \"local\" {}\n}\n";
        assert!(of("main.tofu", block, Tool::OpenTofu));
        assert!(!of("main.tofu", block, Tool::Terraform));
    }

    #[test]
    fn sources_are_read_from_both_syntaxes() {
        let mut found = Vec::new();
        hcl_sources(
            "module \"a\" {\n  source = \"./a\"\n  x = { source = \"./no\" }\n}\nresource \"r\" \"x\" { source = \"./no\" }",
            &mut found,
        );
        json_sources(
            r#"{"module":[{"b":{"source":"./b"}},{"c":[{"source":"./c"}]}]}"#,
            &mut found,
        );
        assert_eq!(found, ["./a", "./b", "./c"]);
    }

    #[test]
    fn a_file_that_only_the_tool_reads_brings_each_folder_it_may_mean() {
        let mut found = Vec::new();
        // The tool takes a key twice in an object.
        hcl_sources(
            "module \"a\" {\n  source = \"../../\"\n}\nlocals {\n  a = { b = 1, b = \"./x\" }\n  a = 2\n  c = \"y\"\n}",
            &mut found,
        );
        json_sources(r#"{"module": {"a": {"source": "./a"}},}"#, &mut found);
        assert_eq!(found, ["../../", "./x", "./a"]);
    }
}
