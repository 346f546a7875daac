//! Paths into documents, as suites write them: `spec.ports[0].name`, `data["a.b"]`, `env[?(@.name == "A")].value`.

use serde_json::{Map, Value};

#[derive(Clone, Debug, PartialEq)]
enum Step {
    Key(String),
    Index(usize),
    All,
    /// Elements with this text (or other scalar) at this path.
    Where(Vec<Self>, String),
}

/// A path.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Path(Vec<Step>);

impl Path {
    /// Reads a path; an empty one is the document itself.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("`{text}` is no path this runner knows: {why}");
        let mut rest = text.strip_prefix('$').unwrap_or(text);
        let mut steps = Vec::new();
        while !rest.is_empty() {
            if let Some(inner) = rest.strip_prefix('[') {
                let (step, after) = bracket(inner).ok_or_else(|| wrong(rest))?;
                steps.push(step);
                rest = after;
                continue;
            }
            rest = rest.strip_prefix('.').unwrap_or(rest);
            let (key, after) = key(rest);
            if key.is_empty() {
                return Err(wrong("an empty key"));
            }
            steps.push(if key == "*" {
                Step::All
            } else {
                Step::Key(key)
            });
            rest = after;
        }
        Ok(Self(steps))
    }

    /// All values it leads to.
    pub(crate) fn find<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        let mut found = vec![value];
        for step in &self.0 {
            found = found
                .into_iter()
                .flat_map(|value| step.find(value))
                .collect();
        }
        found
    }

    /// Puts a value where it leads to.
    pub(crate) fn set(&self, root: &mut Value, value: Value) -> Result<(), String> {
        let mut at = root;
        for step in &self.0 {
            at = match step {
                Step::Key(key) => {
                    if !at.is_object() {
                        *at = Value::Object(Map::new());
                    }
                    let map = at.as_object_mut().expect("made one");
                    map.entry(key.clone()).or_insert(Value::Null)
                }
                Step::Index(index) => {
                    if !at.is_array() {
                        *at = Value::Array(Vec::new());
                    }
                    let list = at.as_array_mut().expect("made one");
                    if list.len() <= *index {
                        list.resize(index + 1, Value::Null);
                    }
                    &mut list[*index]
                }
                Step::All | Step::Where(..) => {
                    return Err("one value cannot be set in many places".to_owned());
                }
            };
        }
        *at = value;
        Ok(())
    }
}

impl Step {
    fn find<'v>(&self, value: &'v Value) -> Vec<&'v Value> {
        match self {
            Self::Key(key) => value.get(key).into_iter().collect(),
            Self::Index(index) => value.get(index).into_iter().collect(),
            Self::All => match value {
                Value::Array(list) => list.iter().collect(),
                Value::Object(map) => map.values().collect(),
                _ => Vec::new(),
            },
            Self::Where(path, text) => {
                let path = Path(path.clone());
                let fits = |element: &&Value| {
                    path.find(element).into_iter().any(|found| match found {
                        Value::String(found) => found == text,
                        other => {
                            serde_json::from_str(text).is_ok_and(|wanted: Value| wanted == *other)
                        }
                    })
                };
                value
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter(fits)
                    .collect()
            }
        }
    }
}

/// A key up to the next step; `\.` is a dot in it.
fn key(text: &str) -> (String, &str) {
    let mut key = String::new();
    let mut chars = text.char_indices();
    while let Some((at, char)) = chars.next() {
        match char {
            '.' | '[' => return (key, &text[at..]),
            '\\' => key.extend(chars.next().map(|(_, escaped)| escaped)),
            other => key.push(other),
        }
    }
    (key, "")
}

/// What stands in brackets, the first of which is gone.
fn bracket(text: &str) -> Option<(Step, &str)> {
    for quote in ['"', '\''] {
        if let Some(inner) = text.strip_prefix(quote) {
            let (key, after) = inner.split_once(quote)?;
            return Some((Step::Key(key.to_owned()), after.strip_prefix(']')?));
        }
    }
    if let Some(inner) = text.strip_prefix("?(@") {
        let (condition, after) = inner.split_once(")]")?;
        let (path, wanted) = condition.split_once("==")?;
        let wanted = wanted.trim().trim_matches(['"', '\'']);
        let path = Path::parse(path.trim()).ok()?;
        return Some((Step::Where(path.0, wanted.to_owned()), after));
    }
    let (inner, after) = text.split_once(']')?;
    let step = match inner.trim() {
        "*" => Step::All,
        number => Step::Index(number.parse().ok()?),
    };
    Some((step, after))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn found(path: &str) -> Vec<Value> {
        let document = json!({
            "a": {"b.c": 1, "d": [{"name": "x", "value": 2}, {"name": "y", "value": 3}]},
            "n": null,
        });
        let path = Path::parse(path).unwrap();
        path.find(&document).into_iter().cloned().collect()
    }

    #[test]
    fn every_way_to_write_a_path_leads_to_its_values() {
        for path in [r#"a["b.c"]"#, "a['b.c']", r"a.b\.c", "$.a['b.c']"] {
            assert_eq!(found(path), [json!(1)], "{path}");
        }
        assert_eq!(found("a.d[1].value"), [json!(3)]);
        assert_eq!(found("a.d[*].value"), [json!(2), json!(3)]);
        assert_eq!(found(r#"a.d[?(@.name == "y")].value"#), [json!(3)]);
        assert_eq!(found("a.d[?(@.name=='z')].value"), Vec::<Value>::new());
        assert_eq!(found("n"), [json!(null)]);
        assert_eq!(found("a.e"), Vec::<Value>::new());
    }

    #[test]
    fn what_is_no_path_is_refused() {
        for path in ["a..b", "a[", "a[x]", "a[?(@.b > 1)]"] {
            assert!(Path::parse(path).is_err(), "{path}");
        }
    }

    #[test]
    fn values_are_set_where_a_path_leads() {
        let mut root = json!({"a": {"b": 1}});
        for (path, value) in [
            ("a.c", json!([])),
            ("a.d[1].e", json!(2)),
            ("f", json!(null)),
        ] {
            Path::parse(path).unwrap().set(&mut root, value).unwrap();
        }
        assert_eq!(
            root,
            json!({"a": {"b": 1, "c": [], "d": [null, {"e": 2}]}, "f": null})
        );
    }
}
