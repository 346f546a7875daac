//! The values of the chart as their file documents them: a comment that starts with `# --` above each key.

use std::fs;

use serde_json::Value;

/// One documented key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// `launcher.image.tag`
    pub key: String,
    /// As JSON.
    pub default: String,
    pub description: String,
}

/// All of them, in the order of the file, or what is not documented.
pub fn rows() -> Result<Vec<Row>, String> {
    let text = fs::read_to_string(crate::chart().join("values.yaml"))
        .map_err(|error| error.to_string())?;
    read(&text)
}

/// Values over values, as Helm lays them.
pub fn merge(values: &mut Value, over: Value) {
    match (values, over) {
        (Value::Object(values), Value::Object(over)) => {
            for (key, value) in over {
                merge(values.entry(key).or_insert(Value::Null), value);
            }
        }
        (values, over) => *values = over,
    }
}

/// Reads a file of values.
pub fn read(text: &str) -> Result<Vec<Row>, String> {
    let values: Value = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    let (mut rows, mut comment) = (Vec::new(), None::<String>);
    // Names of the maps a line lies in, with their depths.
    let mut above: Vec<(usize, String)> = Vec::new();
    // What lies deeper than a documented key is its default.
    let mut documented = None::<usize>;
    for line in text.lines() {
        let depth = line.len() - line.trim_start().len();
        let line = line.trim();
        if line.is_empty() || documented.is_some_and(|of| depth > of) {
            continue;
        }
        documented = None;
        if let Some(begun) = line.strip_prefix("# -- ") {
            comment = Some(begun.to_owned());
        } else if let Some(more) = line.strip_prefix('#') {
            // Goes on with what was begun; else it is for readers of the file alone.
            comment = comment.map(|begun| format!("{begun} {}", more.trim()));
        } else {
            let (key, rest) = line
                .split_once(':')
                .ok_or_else(|| format!("no key: {line}"))?;
            above.retain(|(of, _)| *of < depth);
            above.push((depth, key.to_owned()));
            let path: Vec<&str> = above.iter().map(|(_, key)| key.as_str()).collect();
            let key = path.join(".");
            match comment.take() {
                Some(description) => {
                    documented = Some(depth);
                    let value = values.pointer(&format!("/{}", path.join("/")));
                    let value =
                        value.ok_or_else(|| format!("{key} is not where it seems to be"))?;
                    let default = value.to_string();
                    rows.push(Row {
                        key,
                        default,
                        description,
                    });
                }
                None if rest.trim().is_empty() => {}
                None => return Err(format!("{key} is not documented")),
            }
        }
    }
    Ok(rows)
}

/// The table of values in a README.
pub fn table(rows: &[Row]) -> String {
    let escaped = |text: &str| text.replace('|', "\\|");
    let lines = rows.iter().map(|row| {
        let (default, description) = (escaped(&row.default), escaped(&row.description));
        format!("| `{}` | `{default}` | {description} |\n", row.key)
    });
    let head = "| Key | Default | Meaning |\n|---|---|---|\n".to_owned();
    std::iter::once(head).chain(lines).collect()
}

#[cfg(test)]
mod tests {
    use super::{Row, read, table};

    const VALUES: &str = "\
# For readers of the file.
# -- Name | other
name: \"\"
group:
  # -- One
  # and more
  one: [1]
  # -- Resources
  resources:
    limits:
      memory: 1Gi
  inner:
    # -- Last
    last: null
";

    #[test]
    fn every_key_has_a_row_with_its_default_and_all_of_its_comment() {
        let row = |key: &str, default: &str, description: &str| Row {
            key: key.into(),
            default: default.into(),
            description: description.into(),
        };
        let rows = read(VALUES).unwrap();
        let expected = [
            row("name", "\"\"", "Name | other"),
            row("group.one", "[1]", "One and more"),
            row(
                "group.resources",
                r#"{"limits":{"memory":"1Gi"}}"#,
                "Resources",
            ),
            row("group.inner.last", "null", "Last"),
        ];
        assert_eq!(rows, expected);
        assert!(table(&rows).contains("| `name` | `\"\"` | Name \\| other |\n"));
    }

    #[test]
    fn a_key_without_a_comment_is_named() {
        let error = read(&VALUES.replace("  # -- One\n  # and more\n", "")).unwrap_err();
        assert_eq!(error, "group.one is not documented");
    }
}
