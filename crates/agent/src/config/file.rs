//! Finds and parses the configuration file.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use runtime::regular_file;
use runtime::setting::{SettingError, nearest};
use serde_json::Value;

/// The name of the file.
pub(crate) const NAME: &str = "mayfly-agent.yaml";
/// The largest file that is read.
const MAX_BYTES: u64 = 1024 * 1024;

pub(crate) struct FileValues {
    pub(crate) path: PathBuf,
    values: BTreeMap<String, String>,
}

// The output does not contain the values, because one may be the token.
impl fmt::Debug for FileValues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileValues")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// Returns the folders that are searched for the file, in their order.
pub(crate) fn places() -> Vec<PathBuf> {
    let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
    let program = std::env::current_exe().ok();
    let program = program.as_deref().and_then(Path::parent);
    [
        Some(PathBuf::from(".")),
        home.map(PathBuf::from),
        Some(PathBuf::from("/etc")),
        program.map(Path::to_owned),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Reads the given file, or else the first one in these folders.
pub(crate) fn find(
    given: Option<&Path>,
    places: &[PathBuf],
) -> Result<Option<FileValues>, SettingError> {
    if let Some(path) = given {
        return match read(path)? {
            Some(values) => Ok(Some(values)),
            None => Err(setting_error(path, "does not exist")),
        };
    }
    for place in places {
        if let Some(values) = read(&place.join(NAME))? {
            return Ok(Some(values));
        }
    }
    Ok(None)
}

fn setting_error(path: &Path, text: impl Into<String>) -> SettingError {
    SettingError::new(path.display().to_string(), text)
}

/// Reads a file. Returns `None` if it does not exist.
fn read(path: &Path) -> Result<Option<FileValues>, SettingError> {
    let unreadable = |error: io::Error| setting_error(path, format!("cannot be read: {error}"));
    let mode = match path.metadata() {
        Ok(metadata) => metadata.permissions().mode(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    if mode & 0o002 != 0 {
        let text =
            "can be changed by every user of this machine: `chmod o-w` it, and check what it says";
        return Err(setting_error(path, text));
    }
    let text = regular_file::read_text(path, MAX_BYTES).map_err(unreadable)?;
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    FileValues::parse(path, &text).map(Some)
}

/// Returns the text of each value. The words of a list are separated by blanks, as in the environment.
fn parse(text: &str) -> Result<BTreeMap<String, String>, String> {
    // The message of the parser quotes the lines around an error, which may contain the token.
    let parsed = serde_saphyr::from_str::<Option<BTreeMap<String, Value>>>(text);
    let parsed = parsed.map_err(|error| {
        let place = error.location().map_or_else(String::new, |place| {
            format!(" at line {}, column {}", place.line(), place.column())
        });
        format!("is no list of keys and values{place}")
    })?;
    let mut values = BTreeMap::new();
    for (key, value) in parsed.unwrap_or_default() {
        let scalar = |value: &Value| match value {
            Value::String(text) => Some(text.clone()),
            Value::Bool(_) | Value::Number(_) => Some(value.to_string()),
            _ => None,
        };
        let text = match &value {
            Value::Null => continue,
            Value::Array(items) => {
                let words: Option<Vec<String>> = items.iter().map(scalar).collect();
                words.map(|words| words.join(" "))
            }
            value => scalar(value),
        };
        let text = text.ok_or_else(|| format!("has no single value for `{key}`, nor a list"))?;
        values.insert(key, text);
    }
    Ok(values)
}

impl FileValues {
    pub(crate) fn parse(path: PathBuf, text: &str) -> Result<Self, SettingError> {
        let values = parse(text).map_err(|text| setting_error(&path, text))?;
        Ok(Self { path, values })
    }

    pub(crate) fn take(&mut self, key: &str) -> Option<String> {
        self.values.remove(key)
    }

    /// Returns the name of a key for errors.
    pub(crate) fn name_of(&self, key: &str) -> String {
        format!("{key} in {}", self.path.display())
    }

    /// Returns a warning for each key that was not taken.
    pub(crate) fn unknown(&self, known: &[&str]) -> Vec<String> {
        let warning = |key: &String| {
            let hint = nearest(key, known)
                .map_or_else(String::new, |known| format!("; did you mean `{known}`?"));
            format!("`{key}` in {} is not a key{hint}", self.path.display())
        };
        self.values.keys().map(warning).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rstest::rstest;

    use super::*;

    fn write(folder: &Path, text: &str) -> PathBuf {
        let path = folder.join(NAME);
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn the_first_folder_with_the_file_counts() {
        let folders: Vec<_> = (0..4).map(|_| tempfile::tempdir().unwrap()).collect();
        let places: Vec<PathBuf> = folders.iter().map(|f| f.path().to_owned()).collect();
        assert!(find(None, &places).unwrap().is_none());
        for folder in folders.iter().rev() {
            let path = write(folder.path(), "name: a");
            let found = find(None, &places).unwrap().unwrap();
            assert_eq!(found.path, path);
        }
        let given = write(folders[3].path(), "name: given");
        let mut found = find(Some(&given), &places).unwrap().unwrap();
        assert_eq!(found.take("name").as_deref(), Some("given"));
    }

    #[test]
    fn the_search_starts_in_the_current_folder_and_ends_at_the_program() {
        let places = places();
        assert_eq!(places[0], Path::new("."));
        assert!(places.contains(&PathBuf::from("/etc")));
        let program = std::env::current_exe().unwrap();
        assert_eq!(places.last().map(PathBuf::as_path), program.parent());
    }

    #[test]
    fn a_given_file_must_exist() {
        let error = find(Some(Path::new("/nowhere/a.yaml")), &[]).unwrap_err();
        assert_eq!(error.to_string(), "`/nowhere/a.yaml` does not exist");
    }

    #[test]
    fn a_file_that_is_writable_for_all_or_unreadable_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = write(folder.path(), "name: a");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o646)).unwrap();
        let places = [folder.path().to_owned()];
        let error = find(None, &places).unwrap_err();
        assert!(error.text.contains("every user"), "{error}");
        // A folder with this name is an error too, and the search does not continue.
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        let error = find(None, &places).unwrap_err();
        assert!(error.text.contains("cannot be read"), "{error}");
    }

    #[rstest]
    #[case("", &[])]
    #[case("a: 1\nb: true\nc: text\nd:\ne: [x, 2]\nf: []", &[("a", "1"), ("b", "true"), ("c", "text"), ("e", "x 2"), ("f", "")])]
    fn values_are_texts(#[case] text: &str, #[case] expected: &[(&str, &str)]) {
        let values = parse(text).unwrap();
        let values: Vec<_> = values
            .iter()
            .map(|(k, v)| (k.as_str(), v.as_str()))
            .collect();
        assert_eq!(values, expected);
    }

    #[rstest]
    #[case("token: hunter2\n  name: [")]
    #[case("hunter2")]
    #[case("name: {first: hunter2}")]
    #[case("name: [[hunter2]]")]
    fn errors_are_reported_without_values(#[case] text: &str) {
        let error = parse(text).unwrap_err();
        assert!(!error.contains("hunter2"), "{error}");
    }

    #[test]
    fn the_warning_for_an_unknown_key_suggests_the_nearest_one() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), "slot: 3\ndrain_timout: 1\npulumi_home: x");
        let found = find(None, &[folder.path().to_owned()]).unwrap().unwrap();
        let unknown = found.unknown(&["slots", "drain_timeout", "name"]);
        assert!(
            unknown[0].ends_with("did you mean `drain_timeout`?"),
            "{unknown:?}"
        );
        assert!(unknown[1].ends_with("is not a key"), "{unknown:?}");
        assert!(unknown[2].ends_with("did you mean `slots`?"), "{unknown:?}");
    }
}
