//! Suites in the format of helm-unittest, run over `helm template`. What this runner does not know it refuses, so that
//! no test passes for not being run; the plugin runs the same files.

mod assert;

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value, json};

use crate::path::Path;
use crate::render::{Document, Release, documents};
use assert::{Assert, Subject};

/// A file of tests.
#[derive(Clone, Debug)]
pub struct Suite {
    /// Its file.
    pub file: PathBuf,
    tests: Vec<Test>,
}

#[derive(Clone, Debug)]
struct Test {
    name: String,
    release: Release,
    asserts: Vec<Assert>,
}

/// An assertion that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub test: String,
    /// Which of its assertions, from 1.
    pub number: usize,
    pub why: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, assertion {}: {}", self.test, self.number, self.why)
    }
}

/// One of the ways to spoil an assertion, each of which must make it fail.
#[derive(Clone, Debug)]
pub struct Spoilt {
    test: String,
    release: Release,
    assert: Assert,
}

impl fmt::Display for Spoilt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?}", self.test, self.assert)
    }
}

type Rendered = Result<Vec<Document>, String>;

/// What was rendered before. Many tests share their values.
#[derive(Debug, Default)]
pub struct Kitchen(Mutex<HashMap<String, Arc<Rendered>>>);

impl Kitchen {
    fn serve(&self, release: &Release) -> Arc<Rendered> {
        let key = format!("{release:?}");
        let lock = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rendered) = lock().get(&key) {
            return Arc::clone(rendered);
        }
        let rendered = Arc::new(release.text().map(|text| documents(&text)));
        lock().insert(key, Arc::clone(&rendered));
        rendered
    }
}

impl Suite {
    /// Reads a suite of a chart.
    pub fn read(chart: &FilePath, file: &FilePath) -> Result<Self, String> {
        let text = fs::read_to_string(file).map_err(|error| error.to_string())?;
        // As the plugin reads it, and unlike what Kubernetes does: `y` and `on` are texts.
        let strict = serde_saphyr::options! { strict_booleans: true };
        let value: Value = serde_saphyr::from_str_with_options(&text, strict)
            .map_err(|error| error.to_string())?;
        let said = Said::of(&value, "suite", &["suite", "tests"], &[])?;
        let list = value["tests"]
            .as_array()
            .ok_or("a suite has a list of `tests`")?;
        let tests = list.iter().map(|test| Test::read(chart, file, &said, test));
        let tests = tests.collect::<Result<Vec<_>, _>>()?;
        if tests.is_empty() {
            return Err("a suite without tests".to_owned());
        }
        Ok(Self {
            file: file.to_owned(),
            tests,
        })
    }

    /// How many assertions it makes.
    pub fn asserts(&self) -> usize {
        self.tests.iter().map(|test| test.asserts.len()).sum()
    }

    /// What does not hold.
    pub fn failures(&self, kitchen: &Kitchen) -> Vec<Failure> {
        let mut failures = Vec::new();
        for test in &self.tests {
            let rendered = kitchen.serve(&test.release);
            for (at, assert) in test.asserts.iter().enumerate() {
                if let Err(why) = assert.check(&rendered) {
                    failures.push(Failure {
                        test: test.name.clone(),
                        number: at + 1,
                        why,
                    });
                }
            }
        }
        failures
    }

    /// Every assertion with its opposite, and with another expectation.
    pub fn spoilt(&self) -> Vec<Spoilt> {
        let spoil = |test: &Test| {
            let all = test.asserts.iter().flat_map(Assert::spoilt);
            let (name, release) = (test.name.clone(), test.release.clone());
            let all = all.map(move |assert| Spoilt {
                test: name.clone(),
                release: release.clone(),
                assert,
            });
            all.collect::<Vec<_>>()
        };
        self.tests.iter().flat_map(spoil).collect()
    }
}

impl Spoilt {
    /// Whether it fails, as it must.
    pub fn fails(&self, kitchen: &Kitchen) -> bool {
        self.assert.check(&kitchen.serve(&self.release)).is_err()
    }
}

/// What a suite or one of its tests says of how to render and where to look.
#[derive(Clone, Debug)]
struct Said {
    values: Vec<String>,
    set: Map<String, Value>,
    release: Map<String, Value>,
    capabilities: Map<String, Value>,
    subject: Subject,
}

const RELEASE: &[&str] = &["name", "namespace", "upgrade"];
const CAPABILITIES: &[&str] = &["majorVersion", "minorVersion", "apiVersions"];

impl Said {
    fn of(value: &Value, what: &str, own: &[&str], subject: &[&str]) -> Result<Self, String> {
        let shared = [
            "values",
            "set",
            "release",
            "capabilities",
            "templates",
            "documentSelector",
        ];
        only(value, what, &[&shared, own, subject].concat())?;
        let map = |name: &str| match &value[name] {
            Value::Null => Ok(Map::new()),
            Value::Object(map) => Ok(map.clone()),
            _ => Err(format!("`{name}` of a {what} is no map")),
        };
        only(&value["release"], "release", RELEASE)?;
        only(&value["capabilities"], "capabilities", CAPABILITIES)?;
        Ok(Self {
            values: texts(&value["values"])?,
            set: map("set")?,
            release: map("release")?,
            capabilities: map("capabilities")?,
            subject: Subject::read(value)?,
        })
    }

    /// With what a test says over what its suite says.
    fn over(&self, suite: &Self) -> Self {
        let both = |one: &Map<String, Value>, other: &Map<String, Value>| {
            let mut all = one.clone();
            all.extend(other.clone());
            all
        };
        Self {
            values: [&suite.values[..], &self.values].concat(),
            set: both(&suite.set, &self.set),
            release: both(&suite.release, &self.release),
            capabilities: both(&suite.capabilities, &self.capabilities),
            subject: self.subject.over(&suite.subject),
        }
    }

    fn release(&self, chart: &FilePath, file: &FilePath) -> Result<Release, String> {
        let mut release = Release::of(chart.to_owned());
        let text = |map: &Map<String, Value>, name: &str| {
            let value = map.get(name).filter(|value| !value.is_null())?;
            Some(
                value
                    .as_str()
                    .map_or_else(|| value.to_string(), str::to_owned),
            )
        };
        // The plugin's own names are no names Helm takes.
        let unnamed = || "a suite names its release and its namespace".to_owned();
        release.name = text(&self.release, "name").ok_or_else(unnamed)?;
        release.namespace = text(&self.release, "namespace").ok_or_else(unnamed)?;
        release.is_upgrade = self.release.get("upgrade") == Some(&json!(true));
        let folder = file.parent().expect("a file lies in a folder");
        release.values = self.values.iter().map(|path| folder.join(path)).collect();
        let mut set = json!({});
        for (path, value) in &self.set {
            Path::parse(path)?.set(&mut set, value.clone())?;
        }
        release.set = Some(set);
        let version = ["majorVersion", "minorVersion"].map(|name| text(&self.capabilities, name));
        release.kube_version = match version {
            [Some(major), Some(minor)] => Some(format!("{major}.{minor}.0")),
            [None, None] => None,
            _ => return Err("a version has a major and a minor part".to_owned()),
        };
        let versions = self.capabilities.get("apiVersions");
        release.api_versions = texts(versions.unwrap_or(&Value::Null))?;
        Ok(release)
    }
}

impl Test {
    fn read(
        chart: &FilePath,
        file: &FilePath,
        suite: &Said,
        value: &Value,
    ) -> Result<Self, String> {
        let name = value["it"].as_str().ok_or("a test says what `it` does")?;
        let context = |error: String| format!("{name}: {error}");
        let said = Said::of(
            value,
            "test",
            &["it", "asserts"],
            &["template", "documentIndex"],
        );
        let said = said.map_err(context)?.over(suite);
        let list = value["asserts"].as_array().filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| context("a test has `asserts`".to_owned()))?;
        let asserts = list
            .iter()
            .map(|assert| Assert::read(assert, &said.subject));
        Ok(Self {
            name: name.to_owned(),
            release: said.release(chart, file).map_err(context)?,
            asserts: asserts.collect::<Result<_, _>>().map_err(context)?,
        })
    }
}

/// Refuses what is not known.
fn only(value: &Value, what: &str, known: &[&str]) -> Result<(), String> {
    let unknown = value.as_object().into_iter().flatten();
    let unknown: Vec<_> = unknown
        .map(|(name, _)| name.as_str())
        .filter(|name| !known.contains(name))
        .collect();
    if unknown.is_empty() {
        Ok(())
    } else {
        Err(format!("a {what} has no {unknown:?} here"))
    }
}

/// A list of texts, or nothing.
fn texts(value: &Value) -> Result<Vec<String>, String> {
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let list = match value {
        Value::Null => return Ok(Vec::new()),
        Value::Array(list) => list.iter().map(text).collect(),
        _ => None,
    };
    list.ok_or_else(|| format!("{value} is no list of texts"))
}
