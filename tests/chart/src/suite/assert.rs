//! One assertion: what it looks at, what it says, and how it is spoilt.

use base64::Engine as _;
use regex::Regex;
use serde_json::{Value, json};

use super::{Rendered, only, texts};
use crate::path::Path;
use crate::render::Document;

/// Which documents are looked at.
#[derive(Clone, Debug, Default)]
pub(super) struct Subject {
    templates: Vec<String>,
    index: Option<usize>,
    selector: Option<Selector>,
}

#[derive(Clone, Debug)]
struct Selector {
    path: Path,
    value: Value,
    many: bool,
}

impl Subject {
    pub(super) fn read(value: &Value) -> Result<Self, String> {
        let mut templates = texts(&value["templates"])?;
        if let Some(template) = value["template"].as_str() {
            templates = vec![template.to_owned()];
        }
        for template in &mut templates {
            if template.contains('*') {
                return Err(format!("`{template}`: templates are named one by one"));
            }
            if !template.starts_with("templates/") {
                template.insert_str(0, "templates/");
            }
        }
        let index = match &value["documentIndex"] {
            Value::Null => None,
            index => {
                Some(usize::try_from(index.as_u64().ok_or("no index")?).map_err(|_| "no index")?)
            }
        };
        let selector = match &value["documentSelector"] {
            Value::Null => None,
            selector => {
                only(
                    selector,
                    "documentSelector",
                    &["path", "value", "matchMany", "skipEmptyTemplates"],
                )?;
                Some(Selector {
                    path: Path::parse(selector["path"].as_str().ok_or("a selector has a `path`")?)?,
                    value: selector["value"].clone(),
                    many: selector["matchMany"] == true,
                })
            }
        };
        Ok(Self {
            templates,
            index,
            selector,
        })
    }

    /// With what is said nearer to the assertion over what is said farther off.
    pub(super) fn over(&self, far: &Self) -> Self {
        let near = self.clone();
        let templates = if near.templates.is_empty() {
            far.templates.clone()
        } else {
            near.templates
        };
        Self {
            templates,
            index: near.index.or(far.index),
            selector: near.selector.or_else(|| far.selector.clone()),
        }
    }

    fn in_templates<'d>(&self, all: &'d [Document]) -> Vec<&'d Document> {
        let meant = |document: &&Document| {
            self.templates.is_empty() || self.templates.contains(&document.template)
        };
        all.iter().filter(meant).collect()
    }

    fn documents<'d>(&self, all: &'d [Document]) -> Result<Vec<&'d Document>, String> {
        let mut found = self.in_templates(all);
        if let Some(selector) = &self.selector {
            found.retain(|document| {
                selector
                    .path
                    .find(&document.value)
                    .contains(&&selector.value)
            });
            if found.len() > 1 && !selector.many {
                return Err(format!("{} documents fit the selector", found.len()));
            }
        }
        if let Some(index) = self.index {
            found = found.get(index).copied().into_iter().collect();
        }
        if found.is_empty() {
            return Err(format!("no document to look at: {self:?}"));
        }
        Ok(found)
    }
}

/// What is said of a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    Equal,
    Contains,
    ContainsDocument,
    Exists,
    IsNullOrEmpty,
    IsSubset,
    IsType,
    Kind,
    ApiVersion,
    LengthEqual,
    MatchRegex,
    HasDocuments,
    FailedTemplate,
}

/// Each name, what it means, and whether it says the opposite.
const KINDS: &[(&str, Claim, bool)] = &[
    ("equal", Claim::Equal, false),
    ("notEqual", Claim::Equal, true),
    ("contains", Claim::Contains, false),
    ("notContains", Claim::Contains, true),
    ("containsDocument", Claim::ContainsDocument, false),
    ("exists", Claim::Exists, false),
    ("isNotNull", Claim::Exists, false),
    ("notExists", Claim::Exists, true),
    ("isNull", Claim::Exists, true),
    ("isNullOrEmpty", Claim::IsNullOrEmpty, false),
    ("isEmpty", Claim::IsNullOrEmpty, false),
    ("isNotNullOrEmpty", Claim::IsNullOrEmpty, true),
    ("isNotEmpty", Claim::IsNullOrEmpty, true),
    ("isSubset", Claim::IsSubset, false),
    ("isNotSubset", Claim::IsSubset, true),
    ("isType", Claim::IsType, false),
    ("isKind", Claim::Kind, false),
    ("isAPIVersion", Claim::ApiVersion, false),
    ("lengthEqual", Claim::LengthEqual, false),
    ("notLengthEqual", Claim::LengthEqual, true),
    ("matchRegex", Claim::MatchRegex, false),
    ("notMatchRegex", Claim::MatchRegex, true),
    ("hasDocuments", Claim::HasDocuments, false),
    ("failedTemplate", Claim::FailedTemplate, false),
    ("notFailedTemplate", Claim::FailedTemplate, true),
];

impl Claim {
    const fn parameters(self) -> &'static [&'static str] {
        match self {
            Self::Equal => &["path", "value", "decodeBase64"],
            Self::Contains => &["path", "content", "count", "any"],
            Self::ContainsDocument => &["kind", "apiVersion", "name", "namespace"],
            Self::Exists | Self::IsNullOrEmpty => &["path"],
            Self::IsSubset => &["path", "content"],
            Self::IsType => &["path", "type"],
            Self::Kind | Self::ApiVersion => &["of"],
            Self::LengthEqual => &["path", "count"],
            Self::MatchRegex => &["path", "pattern", "decodeBase64"],
            Self::HasDocuments => &["count"],
            Self::FailedTemplate => &["errorMessage", "errorPattern"],
        }
    }

    /// What is expected, in the parameter a spoilt assertion changes.
    const fn expectation(self) -> &'static str {
        match self {
            Self::Equal => "value",
            Self::Contains | Self::IsSubset => "content",
            Self::ContainsDocument => "kind",
            Self::Exists | Self::IsNullOrEmpty => "path",
            Self::IsType => "type",
            Self::Kind | Self::ApiVersion => "of",
            Self::LengthEqual | Self::HasDocuments => "count",
            Self::MatchRegex => "pattern",
            Self::FailedTemplate => "errorPattern",
        }
    }
}

/// One assertion.
#[derive(Clone, Debug)]
pub(super) struct Assert {
    kind: Claim,
    /// Whether the opposite is said.
    opposite: bool,
    parameters: Value,
    subject: Subject,
}

impl Assert {
    pub(super) fn read(value: &Value, far: &Subject) -> Result<Self, String> {
        let around = ["not", "template", "documentIndex", "documentSelector"];
        let map = value.as_object().ok_or("an assertion is a map")?;
        let mut named = map
            .iter()
            .filter(|(name, _)| !around.contains(&name.as_str()));
        let (Some((name, parameters)), None) = (named.next(), named.next()) else {
            return Err(format!("an assertion says one thing: {value}"));
        };
        let known = KINDS.iter().find(|(known, ..)| known == name);
        let (_, kind, opposite) = known.ok_or_else(|| format!("no assertion `{name}` is known"))?;
        only(parameters, name, kind.parameters())?;
        let assert = Self {
            kind: *kind,
            opposite: opposite ^ (value["not"] == true),
            parameters: parameters.clone(),
            subject: Subject::read(value)?.over(far),
        };
        assert
            .read_parameters()
            .map_err(|why| format!("{name}: {why}"))?;
        Ok(assert)
    }

    /// What can be wrong with parameters shows before anything is rendered.
    fn read_parameters(&self) -> Result<(), String> {
        let given = |name: &str| self.parameters.get(name).is_some();
        for name in self.kind.parameters() {
            let optional = ["decodeBase64", "count", "any", "name", "namespace"].contains(name)
                && *name != self.kind.expectation()
                || self.kind == Claim::FailedTemplate;
            if !optional && !given(name) {
                return Err(format!("`{name}` is missing"));
            }
        }
        if given("path") {
            self.path()?;
        }
        for name in ["pattern", "errorPattern"] {
            if given(name) {
                self.pattern(name)?;
            }
        }
        Ok(())
    }

    fn path(&self) -> Result<Path, String> {
        Path::parse(self.text("path")?)
    }

    fn text(&self, name: &str) -> Result<&str, String> {
        self.parameters[name]
            .as_str()
            .ok_or_else(|| format!("`{name}` is no text"))
    }

    fn pattern(&self, name: &str) -> Result<Regex, String> {
        Regex::new(self.text(name)?).map_err(|error| error.to_string())
    }

    /// Whether it holds, and else why not.
    pub(super) fn check(&self, rendered: &Rendered) -> Result<(), String> {
        let all = match (self.kind, rendered) {
            (Claim::FailedTemplate, rendered) => {
                let failed = self.failed(rendered)?;
                return self.judge(failed, || format!("{:?}", rendered.as_ref().err()));
            }
            (_, Err(error)) => return Err(format!("it is not rendered: {error}")),
            (_, Ok(all)) => all,
        };
        if self.kind == Claim::HasDocuments {
            let mut found = self.subject.in_templates(all);
            if let Some(selector) = &self.subject.selector {
                found.retain(|document| {
                    selector
                        .path
                        .find(&document.value)
                        .contains(&&selector.value)
                });
            }
            let is = json!(found.len()) == self.parameters["count"];
            return self.judge(is, || format!("{} documents", found.len()));
        }
        for document in self.subject.documents(all)? {
            let holds = self
                .holds(&document.value)
                .map_err(|why| format!("{document}: {why}"))?;
            self.judge(holds, || {
                format!("{document} says {}", self.shown(document))
            })?;
        }
        Ok(())
    }

    /// What an assertion looked at: what is at its path, or all.
    fn shown(&self, document: &Document) -> String {
        match self.path() {
            Ok(path) => json!(path.find(&document.value)).to_string(),
            Err(_) => document.text.clone(),
        }
    }

    fn judge(&self, holds: bool, found: impl Fn() -> String) -> Result<(), String> {
        if holds == self.opposite {
            let not = if self.opposite { "not " } else { "" };
            Err(format!(
                "{not}{:?} {} is expected, but {}",
                self.kind,
                self.parameters,
                found()
            ))
        } else {
            Ok(())
        }
    }

    fn failed(&self, rendered: &Rendered) -> Result<bool, String> {
        let Err(error) = rendered else {
            return Ok(false);
        };
        // What a template says comes behind the place where it says it.
        let message = error
            .split("\n\nUse --debug flag")
            .next()
            .unwrap_or_default()
            .trim();
        let message = message.strip_prefix("Error: ").unwrap_or(message);
        let message = message
            .strip_prefix("execution error at ")
            .and_then(|rest| rest.split_once("): "))
            .map_or(message, |(_, message)| message);
        if self.parameters.get("errorPattern").is_some() {
            return Ok(self.pattern("errorPattern")?.is_match(message));
        }
        Ok(self.parameters.get("errorMessage").is_none() || self.text("errorMessage")? == message)
    }

    /// Whether it holds for a document; an error when there is nothing to look at.
    fn holds(&self, document: &Value) -> Result<bool, String> {
        let is = |pointer: &str, parameter: &str| {
            let wanted = &self.parameters[parameter];
            wanted.is_null() || document.pointer(pointer) == Some(wanted)
        };
        match self.kind {
            Claim::Kind => return Ok(is("/kind", "of")),
            Claim::ApiVersion => return Ok(is("/apiVersion", "of")),
            Claim::ContainsDocument => {
                let pairs = [
                    ("/kind", "kind"),
                    ("/apiVersion", "apiVersion"),
                    ("/metadata/name", "name"),
                    ("/metadata/namespace", "namespace"),
                ];
                return Ok(pairs
                    .iter()
                    .all(|(pointer, parameter)| is(pointer, parameter)));
            }
            _ => {}
        }
        let path = self.path()?;
        let found = path.find(document);
        match self.kind {
            Claim::Exists => return Ok(found.iter().any(|value| !value.is_null())),
            Claim::IsNullOrEmpty => {
                let empty = [
                    json!(null),
                    json!(""),
                    json!(0),
                    json!([]),
                    json!({}),
                    json!(false),
                ];
                return Ok(found.iter().all(|value| empty.contains(value)));
            }
            _ if found.is_empty() => {
                return Err(format!("nothing is at `{}`", self.parameters["path"]));
            }
            _ => {}
        }
        for value in found {
            if !self.fits(value)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether one value is as it is expected to be.
    fn fits(&self, value: &Value) -> Result<bool, String> {
        let decoded = self.decoded(value)?;
        let value = decoded.as_ref().unwrap_or(value);
        Ok(match self.kind {
            Claim::Equal => *value == self.parameters["value"],
            Claim::IsSubset => is_within(&self.parameters["content"], value),
            Claim::IsType => {
                let kind = match value {
                    Value::Null => "nil",
                    Value::Bool(_) => "bool",
                    Value::Number(number) if number.is_f64() => "float64",
                    Value::Number(_) => "int",
                    Value::String(_) => "string",
                    Value::Array(_) => "[]interface {}",
                    Value::Object(_) => "map[string]interface {}",
                };
                kind == self.text("type")?
            }
            Claim::LengthEqual => {
                let length = match value {
                    Value::Array(list) => list.len(),
                    Value::Object(map) => map.len(),
                    other => return Err(format!("{other} has no length")),
                };
                json!(length) == self.parameters["count"]
            }
            Claim::MatchRegex => {
                let text = value
                    .as_str()
                    .ok_or_else(|| format!("{value} is no text"))?;
                self.pattern("pattern")?.is_match(text)
            }
            Claim::Contains => self.is_contained(value)?,
            other => return Err(format!("{other:?} looks at no value")),
        })
    }

    fn is_contained(&self, value: &Value) -> Result<bool, String> {
        let content = &self.parameters["content"];
        let list = value
            .as_array()
            .ok_or_else(|| format!("{value} is no list"))?;
        let fits = |element: &&Value| {
            *element == content || (self.parameters["any"] == true && is_within(content, element))
        };
        let count = list.iter().filter(fits).count();
        Ok(match self.parameters.get("count") {
            Some(wanted) => json!(count) == *wanted,
            None => count > 0,
        })
    }

    fn decoded(&self, value: &Value) -> Result<Option<Value>, String> {
        if self.parameters["decodeBase64"] != true {
            return Ok(None);
        }
        let text = value
            .as_str()
            .ok_or_else(|| format!("{value} is no text"))?;
        let bytes = base64::prelude::BASE64_STANDARD
            .decode(text)
            .map_err(|error| error.to_string())?;
        Ok(Some(String::from_utf8_lossy(&bytes).into_owned().into()))
    }

    /// Its opposite, and itself with another expectation where that must fail.
    pub(super) fn spoilt(&self) -> Vec<Self> {
        let mut opposite = self.clone();
        opposite.opposite = !self.opposite;
        let mut all = vec![opposite];
        let expectation = self.kind.expectation();
        if !self.opposite && self.kind != Claim::IsNullOrEmpty {
            let mut other = self.clone();
            let value = &other.parameters[expectation];
            let changed = match (self.kind, value) {
                // No text holds it, and it breaks no pattern.
                (Claim::MatchRegex | Claim::FailedTemplate, _) => json!("\u{1}never"),
                (_, value) => another(value),
            };
            if !other.parameters.is_object() {
                other.parameters = json!({});
            }
            other.parameters[expectation] = changed;
            all.push(other);
        }
        all
    }
}

/// Whether all of a map, and of the maps in it, is in another one; other values are the same.
fn is_within(part: &Value, whole: &Value) -> bool {
    match (part, whole) {
        (Value::Object(part), Value::Object(whole)) => part
            .iter()
            .all(|(key, value)| whole.get(key).is_some_and(|other| is_within(value, other))),
        (part, whole) => part == whole,
    }
}

/// A value that is another one in every scalar.
fn another(value: &Value) -> Value {
    match value {
        Value::Null => json!("something"),
        Value::Bool(value) => json!(!value),
        Value::Number(number) => json!(number.as_f64().unwrap_or_default() + 1.5),
        Value::String(text) => json!(format!("{text}x")),
        Value::Array(list) if list.is_empty() => json!(["something"]),
        Value::Object(map) if map.is_empty() => json!({"something": "x"}),
        Value::Array(list) => list.iter().map(another).collect(),
        Value::Object(map) => map
            .iter()
            .map(|(key, value)| (key.clone(), another(value)))
            .collect(),
    }
}
