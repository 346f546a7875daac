//! What Helm makes of a chart.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::programs::{helm_with, output};

/// One document of the output.
#[derive(Clone, Debug, PartialEq)]
pub struct Document {
    /// The template it comes from, below the chart's folder.
    pub template: String,
    /// What it says.
    pub value: Value,
}

impl Document {
    /// A text at a pointer, or an empty one.
    pub fn text_at(&self, pointer: &str) -> &str {
        self.value
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
    }

    /// Its kind.
    pub fn kind(&self) -> &str {
        self.text_at("/kind")
    }

    /// Its name.
    pub fn name(&self) -> &str {
        self.text_at("/metadata/name")
    }

    /// Its namespace.
    pub fn namespace(&self) -> &str {
        self.text_at("/metadata/namespace")
    }

    /// Whether it is a pod of `helm test`.
    pub fn is_test(&self) -> bool {
        self.value["metadata"]["annotations"]["helm.sh/hook"] == "test"
    }
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} of {}", self.kind(), self.name(), self.template)
    }
}

/// What a chart is rendered with.
#[derive(Clone, Debug)]
pub struct Release {
    pub chart: PathBuf,
    pub name: String,
    pub namespace: String,
    /// Files of values, later ones over earlier ones.
    pub values: Vec<PathBuf>,
    /// Values over all files.
    pub set: Option<Value>,
    pub kube_version: Option<String>,
    pub api_versions: Vec<String>,
}

impl Release {
    /// The chart of this repository, as most tests install it.
    pub fn new() -> Self {
        Self::of(crate::chart())
    }

    /// Any chart.
    pub fn of(chart: PathBuf) -> Self {
        Self {
            chart,
            name: "mayfly".to_owned(),
            namespace: "terrakube".to_owned(),
            values: Vec::new(),
            set: None,
            kube_version: None,
            api_versions: Vec::new(),
        }
    }

    /// With one more file of values.
    #[must_use]
    pub fn with(mut self, values: &Path) -> Self {
        self.values.push(values.to_owned());
        self
    }

    /// With values over those of all files.
    #[must_use]
    pub fn set(mut self, values: Value) -> Self {
        self.set = Some(values);
        self
    }

    /// For a cluster of this version.
    #[must_use]
    pub fn on(mut self, version: &str) -> Self {
        self.kube_version = Some(version.to_owned());
        self
    }

    /// What `helm template` prints, or what it says is wrong.
    pub fn text(&self) -> Result<String, String> {
        let mut command = helm_with(["template", &self.name]);
        command
            .arg(&self.chart)
            .args(["--namespace", &self.namespace]);
        for file in &self.values {
            command.arg("--values").arg(file);
        }
        let over = self.set.as_ref().map(|set| {
            let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
            std::fs::write(file.path(), set.to_string()).unwrap();
            file
        });
        if let Some(file) = &over {
            command.arg("--values").arg(file.path());
        }
        if let Some(version) = &self.kube_version {
            command.args(["--kube-version", version]);
        }
        for version in &self.api_versions {
            command.args(["--api-versions", version]);
        }
        let output = output(&mut command);
        if output.status.success() {
            Ok(String::from_utf8(output.stdout).unwrap())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// What it prints, document by document.
    #[track_caller]
    pub fn documents(&self) -> Vec<Document> {
        let text = self
            .text()
            .unwrap_or_else(|error| panic!("{self:?}: {error}"));
        documents(&text)
    }
}

impl Default for Release {
    fn default() -> Self {
        Self::new()
    }
}

/// The documents of an output of Helm.
#[track_caller]
pub fn documents(text: &str) -> Vec<Document> {
    let mut found = Vec::new();
    for part in format!("\n{text}").split("\n---\n") {
        let source = part
            .lines()
            .find_map(|line| line.strip_prefix("# Source: "));
        let Some(source) = source else {
            assert!(
                part.trim().is_empty(),
                "a document without a source: {part}"
            );
            continue;
        };
        let value: Value = serde_saphyr::from_str(part)
            .unwrap_or_else(|error| panic!("{source}: {error}\n{part}"));
        if !value.is_null() {
            found.push(Document {
                template: source
                    .split_once('/')
                    .map_or(source, |(_, path)| path)
                    .to_owned(),
                value,
            });
        }
    }
    found
}
