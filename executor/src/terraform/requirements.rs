//! The providers that the root module and the modules of its repository name, in `required_providers` or by the types of resources.
//! Modules that come from elsewhere may need others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use hcl_edit::expr::{Expression, Object};
use hcl_edit::structure::{Attribute, Body};
use job_contract::Tool;
use runtime::regular_file;
use serde_json::{Map, Value};

use super::variables::{MAX_FILE_BYTES, Syntax, configuration_files};

/// Blocks whose first label is a type of the provider.
const OF_TYPES: [&str; 3] = ["resource", "data", "ephemeral"];
/// More than a repository has.
const MOST_MODULES: usize = 1000;
/// It is part of the tool.
const BUILT_IN: &str = "terraform";
const NAMESPACE: &str = "hashicorp";

/// The host of an address without one.
const fn default_host(tool: Tool) -> &'static str {
    match tool {
        Tool::Terraform => "registry.terraform.io",
        Tool::OpenTofu => "registry.opentofu.org",
    }
}

/// The addresses of these providers, with their hosts. What cannot be read is the tool's business.
pub(crate) fn read(root: &Path, tool: Tool) -> BTreeSet<String> {
    let mut providers = BTreeSet::new();
    let mut seen = BTreeSet::new();
    let mut modules = vec![root.to_owned()];
    while let Some(module) = modules.pop() {
        let Ok(folder) = module.canonicalize() else {
            continue;
        };
        if seen.len() >= MOST_MODULES || !seen.insert(folder.clone()) {
            continue;
        }
        let found = Found::read(&folder, tool);
        modules.extend(found.local_modules.iter().map(|source| folder.join(source)));
        providers.extend(found.providers(default_host(tool)));
    }
    providers
}

/// What one module names.
#[derive(Default)]
struct Found {
    /// The sources of local names.
    sources: BTreeMap<String, Option<String>>,
    /// Local names that are used.
    used: BTreeSet<String>,
    /// The paths of modules in this repository.
    local_modules: Vec<String>,
}

impl Found {
    fn read(folder: &Path, tool: Tool) -> Self {
        let mut found = Self::default();
        for (path, syntax) in configuration_files(folder, tool).unwrap_or_default() {
            let Ok(text) = regular_file::read_text(&path, MAX_FILE_BYTES) else {
                continue;
            };
            match syntax {
                Syntax::Native => {
                    if let Ok(body) = text.parse() {
                        found.add_native(&body);
                    }
                }
                Syntax::Json => {
                    if let Ok(document) = serde_json::from_str(&text) {
                        found.add_json(&document);
                    }
                }
            }
        }
        found
    }

    fn add_native(&mut self, body: &Body) {
        let settings = body.get_blocks("terraform");
        let required = settings.flat_map(|block| block.body.get_blocks("required_providers"));
        for attribute in required.flat_map(|block| block.body.attributes()) {
            let source = source_of(attribute);
            self.sources.insert(attribute.key.to_string(), source);
        }
        for block in body.blocks() {
            if let Some(label) = block.labels.first() {
                self.add_block(block.ident.as_str(), label.as_str());
            }
        }
        for module in body.get_blocks("module") {
            let source = module.body.get_attribute("source");
            self.add_module(source.and_then(|source| source.value.as_str()));
        }
    }

    fn add_json(&mut self, document: &Value) {
        for settings in objects(document, "terraform") {
            for required in settings
                .get("required_providers")
                .into_iter()
                .flat_map(objects_of)
            {
                for (name, provider) in required {
                    let source = provider.get("source").and_then(Value::as_str);
                    self.sources.insert(name.clone(), source.map(str::to_owned));
                }
            }
        }
        for kind in OF_TYPES.into_iter().chain(["provider"]) {
            for label in objects(document, kind).flat_map(Map::keys) {
                self.add_block(kind, label);
            }
        }
        for module in objects(document, "module").flat_map(Map::values) {
            let source = objects_of(module).find_map(|module| module.get("source"));
            self.add_module(source.and_then(Value::as_str));
        }
    }

    fn add_block(&mut self, kind: &str, label: &str) {
        if kind == "provider" {
            self.used.insert(label.to_owned());
        } else if OF_TYPES.contains(&kind) {
            // The tool takes the part before the first underscore too.
            let name = label.split('_').next().unwrap_or(label);
            self.used.insert(name.to_owned());
        }
    }

    fn add_module(&mut self, source: Option<&str>) {
        let is_local = |source: &&str| source.starts_with("./") || source.starts_with("../");
        let source = source.filter(is_local);
        self.local_modules.extend(source.map(str::to_owned));
    }

    fn providers(self, default_host: &str) -> Vec<String> {
        let declared = self.sources.iter();
        let declared = declared.map(|(name, source)| (name.as_str(), source.as_deref()));
        let used = self
            .used
            .iter()
            .filter(|name| !self.sources.contains_key(*name))
            .map(|name| (name.as_str(), None));
        let all = declared.chain(used);
        all.filter(|(name, source)| *name != BUILT_IN || source.is_some())
            .filter_map(|(name, source)| address(name, source, default_host))
            .collect()
    }
}

fn source_of(attribute: &Attribute) -> Option<String> {
    let of_object = |object: &Object| {
        let mut entries = object.iter();
        entries.find_map(|(key, value)| {
            let is_source = key
                .as_ident()
                .map(hcl_edit::Ident::as_str)
                .or_else(|| key.as_expr().and_then(Expression::as_str))
                .is_some_and(|key| key == "source");
            is_source.then(|| value.expr().as_str().map(str::to_owned))?
        })
    };
    attribute.value.as_object().and_then(of_object)
}

/// An address with its host. `None` if a source is none, or of the tool itself.
fn address(name: &str, source: Option<&str>, default_host: &str) -> Option<String> {
    let source = source.map(str::to_lowercase);
    let parts: Vec<_> = source.as_deref().unwrap_or(name).split('/').collect();
    let (host, namespace, name) = match parts[..] {
        [name] => (default_host, NAMESPACE, name),
        [namespace, name] => (default_host, namespace, name),
        [host, namespace, name] => (host, namespace, name),
        _ => return None,
    };
    let is_built_in = host == "terraform.io";
    (!is_built_in).then(|| format!("{host}/{namespace}/{name}"))
}

/// The objects of a name: there may be one, or a list of them.
pub(super) fn objects<'v>(
    document: &'v Value,
    name: &str,
) -> impl Iterator<Item = &'v Map<String, Value>> {
    document.get(name).into_iter().flat_map(objects_of)
}

fn objects_of(value: &Value) -> impl Iterator<Item = &Map<String, Value>> {
    let list = value
        .as_array()
        .map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(Value::as_object)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    const NATIVE: &str = r#"
terraform {
  required_providers {
    mycloud = {
      "source" = "Registry.Example.test/acme/mycloud"
      version  = "~> 1.0"
    }
    aws    = { source = "hashicorp/aws" }
    random = "~> 3.0"
    terraform = { source = "terraform.io/builtin/terraform" }
  }
}
resource "mycloud_thing" "one" {}
resource "terraform_data" "two" {}
data "http" "three" {}
provider "tls" {}
"#;
    const JSON: &str = r#"{
  "terraform": [{"required_providers": {"mycloud": {"source": "registry.example.test/acme/mycloud"}}}],
  "resource": {"null_resource": {"one": {}}},
  "module": {"child": {"source": "./child"}}
}"#;

    fn read_one(name: &str, text: &str, tool: Tool) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let child = folder.path().join("child");
        fs::create_dir(&child).unwrap();
        // It calls its parent, as no module may.
        let text_of_child =
            "resource \"child_thing\" \"x\" {}\nmodule \"up\" {\n  source = \"../\"\n}\n";
        fs::write(child.join("main.tf"), text_of_child).unwrap();
        fs::write(folder.path().join(name), text).unwrap();
        read(folder.path(), tool).into_iter().collect()
    }

    #[test]
    fn providers_are_found_in_both_syntaxes() {
        let expected = [
            "registry.example.test/acme/mycloud",
            "registry.terraform.io/hashicorp/aws",
            "registry.terraform.io/hashicorp/http",
            "registry.terraform.io/hashicorp/random",
            "registry.terraform.io/hashicorp/tls",
        ];
        assert_eq!(read_one("main.tf", NATIVE, Tool::Terraform), expected);
        let expected = [
            "registry.example.test/acme/mycloud",
            "registry.opentofu.org/hashicorp/child",
            "registry.opentofu.org/hashicorp/null",
        ];
        assert_eq!(read_one("main.tf.json", JSON, Tool::OpenTofu), expected);
        let calling = "module \"child\" {\n  source = \"./child\"\n}\n";
        let expected = ["registry.terraform.io/hashicorp/child"];
        assert_eq!(read_one("main.tf", calling, Tool::Terraform), expected);
    }

    #[test]
    fn what_is_no_configuration_needs_nothing() {
        let own = "resource \"terraform_data\" \"x\" {}";
        let elsewhere = "module \"x\" {\n  source = \"acme/child/x\"\n}\n";
        for (name, text) in [
            ("main.tf", "{{"),
            ("main.tf.json", "{"),
            ("x.txt", NATIVE),
            ("main.tf", own),
            ("main.tf", elsewhere),
        ] {
            assert!(read_one(name, text, Tool::Terraform).is_empty(), "{text}");
        }
    }
}
