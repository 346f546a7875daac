//! Lists the software in a program: an SBOM in `CycloneDX`, and the licences with their texts.
//!
//! Both lists come from cargo, and have exactly the crates that are linked into the program for this target. Existing tools
//! read the resolution of the whole workspace with its tests, and take longer to install than the programs take to build.
//!
//! The same sources give the same bytes: the lists have no time, no random number and no path of this machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::{Program, output_of, workspace_root};

/// The folder of the lists in an image.
pub const DOC_DIR: &str = "usr/share/doc/mayfly";
/// File name of the SBOM.
pub const SBOM_FILE: &str = "sbom.cdx.json";
/// File name of the list of licences.
pub const LICENCES_FILE: &str = "LICENCES.txt";

/// Prefixes of the names of files with a licence.
const LICENCE_FILES: [&str; 6] = [
    "LICENSE",
    "LICENCE",
    "COPYING",
    "COPYRIGHT",
    "NOTICE",
    "UNLICENSE",
];

/// One crate: name and version.
type Id = (String, String);

/// The crates of a program.
#[derive(Debug)]
pub struct Sbom {
    program: Id,
    crates: BTreeMap<Id, Crate>,
}

/// One crate of a program.
#[derive(Debug, Default)]
struct Crate {
    /// An SPDX expression.
    licence: String,
    description: Option<String>,
    repository: Option<String>,
    /// SHA-256 of the registry's archive; `None` for crates of the workspace.
    checksum: Option<String>,
    needs: BTreeSet<Id>,
    /// The licence texts of the crate.
    texts: Vec<String>,
}

impl Sbom {
    /// Reads the crates of a program from cargo.
    ///
    /// # Errors
    /// Fails if cargo fails, or if a crate has no licence.
    pub fn of(program: Program) -> Result<Self> {
        let (program, edges) = tree(&output_of(cargo("tree").args([
            "--package",
            program.name(),
            "--edges",
            "normal,no-proc-macro",
            "--prefix",
            "depth",
            "--format",
            " {p}",
        ]))?)?;
        let target = host()?;
        let metadata = output_of(cargo("metadata").args([
            "--format-version",
            "1",
            "--filter-platform",
            &target,
        ]))?;
        let metadata: Value =
            serde_json::from_str(&metadata).with_context(|| "cargo's metadata is not JSON")?;
        let lock = fs::read_to_string(workspace_root().join("Cargo.lock"))
            .with_context(|| "could not read `Cargo.lock`")?;
        let checksums = checksums(&lock);
        let mut crates = BTreeMap::new();
        for (id, needs) in edges {
            let package = package(&metadata, &id)
                .with_context(|| format!("cargo does not know {} {}", id.0, id.1))?;
            let found = Crate {
                checksum: checksums.get(&id).cloned(),
                needs,
                ..Crate::from_metadata(package)?
            };
            crates.insert(id, found);
        }
        Ok(Self { program, crates })
    }

    /// Writes the lists and the licence of the program below a folder, in the layout of an image.
    ///
    /// # Errors
    /// Fails if a file cannot be written.
    pub fn write(&self, root: &Path) -> Result<()> {
        let folder = root.join(DOC_DIR);
        fs::create_dir_all(&folder)
            .with_context(|| format!("could not create `{}`", folder.display()))?;
        let sbom = serde_json::to_string_pretty(&self.cyclonedx()).with_context(|| "no JSON")?;
        let licence = fs::read_to_string(workspace_root().join("LICENSE"))
            .with_context(|| "could not read `LICENSE`")?;
        for (name, text) in [
            (SBOM_FILE, sbom + "\n"),
            (LICENCES_FILE, self.licences()),
            ("copyright", licence),
        ] {
            fs::write(folder.join(name), text)
                .with_context(|| format!("could not write `{name}`"))?;
        }
        Ok(())
    }

    /// The SBOM, `CycloneDX` 1.6.
    pub fn cyclonedx(&self) -> Value {
        let others = self.crates.iter().filter(|(id, _)| **id != self.program);
        let components: Vec<_> = others
            .map(|(id, found)| component(id, found, "library"))
            .collect();
        let dependencies: Vec<_> = self
            .crates
            .iter()
            .map(|(id, found)| {
                let needs: Vec<_> = found.needs.iter().map(purl).collect();
                json!({"ref": purl(id), "dependsOn": needs})
            })
            .collect();
        let program = component(&self.program, &self.crates[&self.program], "application");
        let serial = Uuid::new_v5(
            &Uuid::NAMESPACE_URL,
            json!([program, components, dependencies])
                .to_string()
                .as_bytes(),
        );
        json!({
            "bomFormat": "CycloneDX",
            "specVersion": "1.6",
            "serialNumber": format!("urn:uuid:{serial}"),
            "version": 1,
            "metadata": {"component": program},
            "components": components,
            "dependencies": dependencies,
        })
    }

    /// The list of licences: each crate with its licence, then each text once with its crates.
    pub fn licences(&self) -> String {
        let mut list = format!(
            "Software in {} {}\n\nBeside the crates below it contains the Rust standard library (MIT OR Apache-2.0).\n\n",
            self.program.0, self.program.1
        );
        let mut texts = BTreeMap::<&str, Vec<&Id>>::new();
        for (id, found) in &self.crates {
            let _ = writeln!(list, "{} {}: {}", id.0, id.1, found.licence);
            for text in &found.texts {
                texts.entry(text).or_default().push(id);
            }
        }
        // Sorted by crates, because the order of the texts has no meaning for a reader.
        let mut texts: Vec<_> = texts.into_iter().collect();
        texts.sort_by(|one, other| one.1.cmp(&other.1));
        for (text, holders) in texts {
            let names: Vec<_> = holders.iter().map(|id| id.0.as_str()).collect();
            let rule = "=".repeat(80);
            let _ = write!(list, "\n{rule}\n{}\n{rule}\n\n{text}\n", names.join(", "));
        }
        list
    }
}

impl Crate {
    fn from_metadata(package: &Value) -> Result<Self> {
        let text = |key: &str| package[key].as_str().map(str::to_owned);
        let licence =
            text("license").with_context(|| format!("{} names no licence", package["name"]))?;
        let manifest = text("manifest_path").with_context(|| "a package without a manifest")?;
        let folder = PathBuf::from(manifest);
        let folder = folder
            .parent()
            .with_context(|| "a manifest without a folder")?;
        Ok(Self {
            licence: spdx(&licence),
            description: text("description"),
            repository: text("repository"),
            texts: licence_texts(folder)?,
            ..Self::default()
        })
    }
}

fn cargo(command: &str) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo
        .args([command, "--locked"])
        .current_dir(workspace_root());
    cargo
}

fn host() -> Result<String> {
    let version = output_of(Command::new("rustc").arg("-vV"))?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.with_context(|| "rustc names no host")?.to_owned())
}

/// The root of a tree of crates, and the dependencies of each crate. Cargo lists these only where a crate appears first.
fn tree(text: &str) -> Result<(Id, BTreeMap<Id, BTreeSet<Id>>)> {
    let mut edges = BTreeMap::<Id, BTreeSet<Id>>::new();
    let mut path = Vec::<Id>::new();
    for line in text.lines().filter(|line| !line.is_empty()) {
        let mut words = line.split_whitespace();
        let (Some(Ok(depth)), Some(name), Some(version)) = (
            words.next().map(str::parse::<usize>),
            words.next(),
            words.next().and_then(|word| word.strip_prefix('v')),
        ) else {
            bail!("cargo's tree has a line `{line}`");
        };
        let id = (name.to_owned(), version.to_owned());
        path.truncate(depth);
        edges.entry(id.clone()).or_default();
        if let Some(parent) = path.last() {
            edges.entry(parent.clone()).or_default().insert(id.clone());
        }
        path.push(id);
    }
    let root = path
        .into_iter()
        .next()
        .with_context(|| "cargo's tree is empty")?;
    Ok((root, edges))
}

fn package<'m>(metadata: &'m Value, (name, version): &Id) -> Option<&'m Value> {
    metadata["packages"]
        .as_array()?
        .iter()
        .find(|package| package["name"] == **name && package["version"] == **version)
}

/// The checksums of a lock file. Cargo writes one field on each line, and `[[package]]` before each package.
fn checksums(lock: &str) -> BTreeMap<Id, String> {
    lock.split("[[package]]")
        .filter_map(|entry| {
            let field = |name: &str| {
                entry.lines().find_map(|line| {
                    let value = line.strip_prefix(name)?.strip_prefix(" = \"")?;
                    Some(value.strip_suffix('"')?.to_owned())
                })
            };
            Some(((field("name")?, field("version")?), field("checksum")?))
        })
        .collect()
}

/// Turns an old spelling of licences, such as `MIT/Apache-2.0`, into an SPDX expression.
fn spdx(licence: &str) -> String {
    let parts: Vec<_> = licence.split('/').map(str::trim).collect();
    parts.join(" OR ")
}

/// The licence texts in a crate's folder, in the order of their file names.
fn licence_texts(folder: &Path) -> Result<Vec<String>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("could not read `{}`", folder.display()))?;
    let mut paths: Vec<_> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.is_file() && holds_licence(path))
        .collect();
    paths.sort();
    let mut texts = Vec::new();
    for path in paths {
        let content =
            fs::read(&path).with_context(|| format!("could not read `{}`", path.display()))?;
        let text = String::from_utf8_lossy(&content);
        // The same text has different line ends and blanks in different crates.
        let lines: Vec<_> = text.trim().lines().map(str::trim_end).collect();
        texts.push(lines.join("\n"));
    }
    Ok(texts)
}

fn holds_licence(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let name = name.to_uppercase();
    LICENCE_FILES.iter().any(|prefix| name.starts_with(prefix))
}

fn purl((name, version): &Id) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

fn component(id: &Id, found: &Crate, kind: &str) -> Value {
    let mut component = json!({
        "type": kind,
        "bom-ref": purl(id),
        "name": id.0,
        "version": id.1,
        "licenses": [{"expression": found.licence}],
        "purl": purl(id),
    });
    if let Some(description) = &found.description {
        component["description"] = json!(description.trim());
    }
    if let Some(checksum) = &found.checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    if let Some(repository) = &found.repository {
        component["externalReferences"] = json!([{"type": "vcs", "url": repository}]);
    }
    component
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "these are tests")]

    use super::*;

    fn id(name: &str, version: &str) -> Id {
        (name.to_owned(), version.to_owned())
    }

    #[test]
    fn a_dependency_tree_is_parsed() {
        let text = "0 top v1.0.0 (/src/top)\n1 left v0.1.0\n2 deep v2.0.0+meta\n1 right v0.2.0\n2 deep v2.0.0+meta (*)\n";
        let (root, edges) = tree(text).unwrap();
        assert_eq!(root, id("top", "1.0.0"));
        let needs = |name: &str, version: &str| Vec::from_iter(edges[&id(name, version)].clone());
        assert_eq!(
            needs("top", "1.0.0"),
            [id("left", "0.1.0"), id("right", "0.2.0")]
        );
        assert_eq!(needs("right", "0.2.0"), [id("deep", "2.0.0+meta")]);
        assert_eq!(needs("deep", "2.0.0+meta"), []);
    }

    #[test]
    fn checksums_belong_to_a_version() {
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nchecksum = \"aa\"\n\n[[package]]\nname = \"a\"\nversion = \"2.0.0\"\nchecksum = \"bb\"\n\n[[package]]\nname = \"own\"\nversion = \"0.1.0\"\n";
        let found = checksums(lock);
        assert_eq!(found[&id("a", "2.0.0")], "bb");
        assert!(!found.contains_key(&id("own", "0.1.0")));
    }

    #[test]
    fn slashes_of_old_become_an_expression() {
        assert_eq!(spdx("MIT/Apache-2.0"), "MIT OR Apache-2.0");
        assert_eq!(spdx("Apache-2.0 / MIT"), "Apache-2.0 OR MIT");
        assert_eq!(spdx("MIT AND BSD-3-Clause"), "MIT AND BSD-3-Clause");
    }

    #[test]
    fn what_is_linked_is_listed_and_what_only_builds_or_tests_is_not() {
        let list = Sbom::of(Program::Executor).unwrap();
        let document = list.cyclonedx();
        let names: Vec<_> = document["components"]
            .as_array()
            .unwrap()
            .iter()
            .map(|component| component["name"].as_str().unwrap())
            .collect();
        assert!(names.contains(&"ring") && names.contains(&"job-contract"));
        for absent in ["cc", "serde_derive", "proptest", "kube", "executor"] {
            assert!(!names.contains(&absent), "{absent}");
        }
        let ring = document["components"]
            .as_array()
            .unwrap()
            .iter()
            .find(|component| component["name"] == "ring")
            .unwrap();
        assert_eq!(ring["hashes"][0]["content"].as_str().unwrap().len(), 64);
        let licences = list.licences();
        assert!(licences.contains("\nring "));
        assert!(licences.contains("Permission is hereby granted, free of charge"));
        assert!(!licences.contains(&workspace_root().display().to_string()));
    }

    #[test]
    fn the_same_sources_make_the_same_lists() {
        let [one, other] = [(); 2].map(|()| Sbom::of(Program::Launcher).unwrap());
        assert_eq!(one.cyclonedx(), other.cyclonedx());
        assert_eq!(one.licences(), other.licences());
    }
}
