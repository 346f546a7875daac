//! Input variables as a definitions file. The file keeps values out of the command line and of the work tree. It
//! overrides every `*.tfvars` of the repository, as `-var` would (contract 4.5, W-28).
//!
//! A value is text. As with `-var`, its meaning depends on the declared type: it is literal for primitive types and
//! without a type, and an expression for all other types.
//!
//! Ephemeral variables are in no plan, so an apply needs them again. They have definitions of their own, which are in no
//! file. Only types and ephemerality are read from configurations.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use hcl_edit::expr::Expression;
use hcl_edit::structure::Body;
use job_contract::Tool;
use job_contract::job::Variable;
use runtime::regular_file;
use secrecy::SecretString;
use serde_json::Value;

use super::ephemeral_scan::ephemeral_variables;
use super::hcl::{is_identifier, quote};
use crate::error::StepError;
use crate::workspace::write_private_file;

const FILE_NAME: &str = "variables.tfvars";
/// The largest configuration file that is read. Generated ones have some megabytes.
pub(super) const MAX_FILE_BYTES: u64 = 16 << 20;

/// How the text of a variable is interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Literal,
    /// An expression in the tool's language.
    Expression,
}

/// Variables the root module declares.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Declarations {
    kinds: BTreeMap<String, Kind>,
    /// Variables whose values are in no plan.
    ephemeral: BTreeSet<String>,
    /// Texts of variables where they are expressions, if they differ.
    expressions: BTreeMap<String, String>,
    /// Whether every file could be read. Only then is an unknown name certainly undeclared.
    complete: bool,
}

/// The definitions of input variables, as the tool reads them.
#[derive(Debug, Default)]
pub struct Definitions {
    /// The file of all others.
    pub file: Option<PathBuf>,
    /// Those of ephemeral variables. They are in no file.
    pub ephemeral: Option<SecretString>,
}

impl Declarations {
    /// Reads the declarations of the root module in `dir`.
    pub fn read(dir: &Path, tool: Tool) -> Result<Self, StepError> {
        let mut declarations = Self {
            complete: true,
            ..Self::default()
        };
        let mut files = configuration_files(dir, tool)?;
        // The tool merges override files last, in the order of their names.
        files.sort_by_cached_key(|(path, _)| (is_override(path), path.clone()));
        for (path, syntax) in files {
            let text = match regular_file::read_text(&path, MAX_FILE_BYTES) {
                Ok(text) => Some(text),
                Err(error) if is_for_the_tool(&error) => None,
                Err(source) => return Err(unreadable_file(&path, &source)),
            };
            let added = text.and_then(|text| declarations.add(&text, syntax));
            // The tool reports errors in the file better than the executor could.
            declarations.complete &= added.is_some();
        }
        Ok(declarations)
    }

    /// Takes these texts for variables that turn out to be expressions.
    #[must_use]
    pub fn with_expressions(self, expressions: BTreeMap<String, String>) -> Self {
        Self {
            expressions,
            ..self
        }
    }

    fn add(&mut self, text: &str, syntax: Syntax) -> Option<()> {
        match syntax {
            Syntax::Native => {
                let Ok(body) = text.parse::<Body>() else {
                    let found = ephemeral_variables(text).map(str::to_owned);
                    self.ephemeral.extend(found);
                    return None;
                };
                self.add_native(&body);
            }
            Syntax::Json => self.add_json(&serde_json::from_str(text).ok()?),
        }
        Some(())
    }

    fn add_native(&mut self, body: &Body) {
        for block in body.get_blocks("variable") {
            let Some(label) = block.labels.first() else {
                continue;
            };
            let value_of = |name| {
                let attribute = block.body.get_attribute(name);
                attribute.map(|attribute| &attribute.value)
            };
            let kind = value_of("type").map(|value| match value {
                Expression::Variable(name) => Kind::of_type(name.as_str()),
                // Terraform 0.11 writes the type as a string.
                Expression::String(name) => Kind::of_type(name.as_str()),
                _ => Kind::Expression,
            });
            // The tool converts texts.
            let ephemeral = value_of("ephemeral")
                .map(|value| value.as_bool() == Some(true) || value.as_str() == Some("true"));
            self.declare(label.as_str(), kind, ephemeral);
        }
    }

    /// Adds a declaration, or an override of one. What an override does not set stays.
    fn declare(&mut self, name: &str, kind: Option<Kind>, ephemeral: Option<bool>) {
        let known = self.kinds.entry(name.to_owned());
        let known = known.or_insert(Kind::Literal);
        *known = kind.unwrap_or(*known);
        match ephemeral {
            Some(true) => {
                self.ephemeral.insert(name.to_owned());
            }
            Some(false) => {
                self.ephemeral.remove(name);
            }
            None => {}
        }
    }

    fn add_json(&mut self, document: &Value) {
        let blocks = match document.get("variable") {
            Some(Value::Array(list)) => list.iter().collect(),
            Some(object) => vec![object],
            None => vec![],
        };
        for (name, body) in blocks.into_iter().filter_map(Value::as_object).flatten() {
            let body = body
                .as_array()
                .and_then(|list| list.first())
                .unwrap_or(body);
            let kind = body.get("type").and_then(Value::as_str);
            let ephemeral = body
                .get("ephemeral")
                .map(|value| value.as_bool() == Some(true) || value == "true");
            self.declare(name, kind.map(Kind::of_type), ephemeral);
        }
    }

    /// Those of these variables that are in no plan.
    pub fn ephemeral<'v>(
        &self,
        variables: &'v BTreeMap<String, Variable>,
    ) -> impl Iterator<Item = (&'v String, &'v Variable)> {
        variables
            .iter()
            .filter(move |(name, _)| self.ephemeral.contains(*name))
    }

    /// Names among `variables` that the root module certainly does not declare.
    pub fn undeclared<'v>(&self, variables: &'v BTreeMap<String, Variable>) -> Vec<&'v str> {
        let is_undeclared = |name: &&str| self.complete && !self.kinds.contains_key(*name);
        variables
            .keys()
            .map(String::as_str)
            .filter(is_undeclared)
            .collect()
    }

    /// The definitions of `variables`. They leave out undeclared ones, which this module does not use.
    fn definitions<'v>(
        &self,
        variables: impl Iterator<Item = (&'v String, &'v Variable)>,
    ) -> Result<String, StepError> {
        let mut text = String::new();
        for (name, variable) in variables {
            if !is_identifier(name) {
                let name = name.escape_debug();
                let text = format!("variable name `{name}` is not an identifier");
                return Err(StepError::user(text));
            }
            if self.complete && !self.kinds.contains_key(name) {
                continue;
            }
            match variable.hcl.map_or_else(|| self.kind(name), Kind::of_flag) {
                Kind::Literal => writeln!(text, "{name} = {}", quote(&variable.value)),
                Kind::Expression => {
                    let value = self.expressions.get(name).unwrap_or(&variable.value);
                    let value = value.trim();
                    // The whole text is one expression, so it cannot define other variables.
                    if value.parse::<Expression>().is_err() {
                        return Err(StepError::user(format!(
                            "the value of variable `{name}` is not a valid expression, and its declared type is not a plain \
                             string, number or bool"
                        )));
                    }
                    writeln!(text, "{name} = {value}")
                }
            }
            .expect("writing to a string cannot fail");
        }
        Ok(text)
    }

    /// Defines `variables`: ephemeral ones in memory, and all others in a file in `folder`.
    pub fn define(
        &self,
        variables: &BTreeMap<String, Variable>,
        folder: &Path,
    ) -> Result<Definitions, StepError> {
        let path = folder.join(FILE_NAME);
        let (ephemeral, others): (Vec<_>, Vec<_>) = variables
            .iter()
            .partition(|(name, _)| self.ephemeral.contains(*name));
        let definitions = self.definitions(others.into_iter())?;
        let ephemeral = self.definitions(ephemeral.into_iter())?;
        write_private_file(&path, definitions.as_bytes())
            .map_err(|source| StepError::working_dir(&path, &source))?;
        Ok(Definitions {
            file: Some(path),
            ephemeral: (!ephemeral.is_empty()).then(|| ephemeral.into()),
        })
    }

    fn kind(&self, name: &str) -> Kind {
        self.kinds.get(name).copied().unwrap_or(Kind::Literal)
    }
}

/// Refuses a root module with a file that would block the tool or fill its memory.
pub fn check(dir: &Path, tool: Tool) -> Result<(), StepError> {
    for (path, _) in configuration_files(dir, tool)? {
        match regular_file::check(&path, MAX_FILE_BYTES) {
            Err(source) if !is_for_the_tool(&source) => {
                return Err(unreadable_file(&path, &source));
            }
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// A configuration file that the tool could not read either, or not in reasonable time.
fn unreadable_file(path: &Path, source: &io::Error) -> StepError {
    let path = path.display();
    StepError::user(format!("could not read the configuration file `{path}`")).because(source)
}

/// Whether the tool itself reports the error at once, and better than the executor could.
fn is_for_the_tool(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied | io::ErrorKind::InvalidData
    )
}

/// The files of the root module, without folders. The tool leaves out folders too.
pub(super) fn configuration_files(
    dir: &Path,
    tool: Tool,
) -> Result<Vec<(PathBuf, Syntax)>, StepError> {
    let unreadable = |source| {
        let dir = dir.display();
        StepError::user(format!("could not read the root module in `{dir}`")).because(&source)
    };
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().and_then(|name| name.to_str());
        let syntax = name.and_then(|name| Syntax::of(name, tool));
        if let Some(syntax) = syntax
            && !path.is_dir()
        {
            files.push((path, syntax));
        }
    }
    Ok(files)
}

impl Kind {
    fn of_type(name: &str) -> Self {
        if matches!(name, "string" | "number" | "bool") {
            Self::Literal
        } else {
            Self::Expression
        }
    }

    const fn of_flag(hcl: bool) -> Self {
        if hcl { Self::Expression } else { Self::Literal }
    }
}

/// The syntax of a configuration file.
#[derive(Clone, Copy)]
pub(super) enum Syntax {
    Native,
    Json,
}

impl Syntax {
    /// The syntax of a configuration file; `None` for any other file.
    fn of(name: &str, tool: Tool) -> Option<Self> {
        if name.starts_with('.') || name.ends_with('~') {
            return None;
        }
        // The suffix starts at the first dot, because `.tf.json` has two parts.
        let suffix = name.split_once('.')?.1;
        let (suffix, syntax) = match suffix.strip_suffix(".json") {
            Some(suffix) => (suffix, Self::Json),
            None => (suffix, Self::Native),
        };
        let last = suffix.rsplit('.').next()?;
        (last == "tf" || (last == "tofu" && tool == Tool::OpenTofu)).then_some(syntax)
    }
}

/// Whether the tool merges a configuration file into the others.
fn is_override(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.unwrap_or_default().trim_end_matches(".json");
    name.rsplit_once('.')
        .is_some_and(|(stem, _)| stem == "override" || stem.ends_with("_override"))
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;

    const MODULE: &str = r#"
        variable "plain" {}
        variable "text"  { type = string }
        variable "count_" { type = number }
        variable "tags"  { type = map(string) }
        variable "any"   { type = any }
        variable "old"   { type = "list" }
    "#;

    fn declarations(text: &str) -> Declarations {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("main.tf"), text).unwrap();
        Declarations::read(folder.path(), Tool::Terraform).unwrap()
    }

    fn variables(pairs: &[(&str, &str)]) -> BTreeMap<String, Variable> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Variable::from(*value)))
            .collect()
    }

    #[test]
    fn a_file_that_would_block_the_tool_is_refused_by_name() {
        use nix::sys::stat::Mode;
        let folder = tempfile::tempdir().unwrap();
        let bad = folder.path().join("bad.tf");
        let refuse = || {
            for error in [
                check(folder.path(), Tool::Terraform).unwrap_err(),
                Declarations::read(folder.path(), Tool::Terraform).unwrap_err(),
            ] {
                let error = error.to_string();
                assert!(error.contains("/bad.tf`: it "), "{error}");
            }
            fs::remove_file(&bad).unwrap();
        };
        nix::unistd::mkfifo(&bad, Mode::S_IRWXU).unwrap();
        refuse();
        std::os::unix::fs::symlink("/dev/zero", &bad).unwrap();
        refuse();
        fs::File::create(&bad).unwrap().set_len(10 << 30).unwrap();
        refuse();
        // The tool leaves these out, or reports them itself.
        fs::create_dir(&bad).unwrap();
        std::os::unix::fs::symlink("absent", folder.path().join("dangling.tf")).unwrap();
        check(folder.path(), Tool::Terraform).unwrap();
        let declarations = Declarations::read(folder.path(), Tool::Terraform).unwrap();
        assert!(!declarations.complete);
    }

    #[test]
    fn the_declared_type_decides_how_a_text_is_read() {
        let given = variables(&[
            ("plain", "[1]"),
            ("text", "a \"b\" ${c} %{d} $e \\ \n="),
            ("count_", "3"),
            ("tags", "{ a = \"b\" }"),
            ("any", "[1, 2]"),
            ("old", "[]"),
        ]);
        let definitions = declarations(MODULE).definitions(given.iter()).unwrap();
        assert_eq!(
            definitions,
            "any = [1, 2]\ncount_ = \"3\"\nold = []\nplain = \"[1]\"\ntags = { a = \"b\" }\n\
             text = \"a \\\"b\\\" $${c} %%{d} $e \\\\ \\n=\"\n"
        );
    }

    #[test]
    fn an_expression_cannot_define_other_variables() {
        let declared = declarations(MODULE);
        for value in ["[]\ntext = 1", "[", "", "{} # x\nplain = 2"] {
            let error = declared.definitions(variables(&[("tags", value)]).iter());
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with("the value of variable `tags` is not"));
        }
        let error = declared.definitions(variables(&[("a b", "x")]).iter());
        let error = error.unwrap_err().to_string();
        assert_eq!(error, "variable name `a b` is not an identifier");
    }

    #[test]
    fn the_hcl_flag_of_newer_releases_takes_precedence() {
        let one = |hcl| {
            BTreeMap::from([(
                "tags".to_owned(),
                Variable {
                    value: "{}".into(),
                    hcl,
                },
            )])
        };
        let declared = declarations(MODULE);
        assert_eq!(
            declared.definitions(one(Some(false)).iter()).unwrap(),
            "tags = \"{}\"\n"
        );
        assert_eq!(
            declared.definitions(one(Some(true)).iter()).unwrap(),
            "tags = {}\n"
        );
    }

    #[test]
    fn undeclared_variables_are_left_out_if_all_files_could_be_read() {
        let given = variables(&[("elsewhere", "x"), ("text", "y")]);
        let declared = declarations(MODULE);
        assert_eq!(declared.undeclared(&given), ["elsewhere"]);
        assert_eq!(
            declared.definitions(given.iter()).unwrap(),
            "text = \"y\"\n"
        );

        let broken = declarations("variable \"text\" {");
        assert!(broken.undeclared(&given).is_empty());
        assert_eq!(
            broken.definitions(given.iter()).unwrap(),
            "elsewhere = \"x\"\ntext = \"y\"\n"
        );
        let broken = declarations("variable \"text\" {\nephemeral = true\n}\nlocals {");
        assert_eq!(ephemeral(&broken, &["elsewhere", "text"]), ["text"]);
    }

    #[test]
    fn json_syntax_is_read_too() {
        let folder = tempfile::tempdir().unwrap();
        let text =
            r#"{"variable": {"a": {"type": "list(string)"}, "b": [{"type": "string"}], "c": {}}}"#;
        fs::write(folder.path().join("main.tf.json"), text).unwrap();
        let declared = Declarations::read(folder.path(), Tool::Terraform).unwrap();
        let given = variables(&[("a", "[]"), ("b", "[]"), ("c", "[]")]);
        assert_eq!(
            declared.definitions(given.iter()).unwrap(),
            "a = []\nb = \"[]\"\nc = \"[]\"\n"
        );
    }

    /// The names of these variables that `declared` calls ephemeral.
    fn ephemeral(declared: &Declarations, names: &[&str]) -> Vec<String> {
        let given: Vec<_> = names.iter().map(|name| (*name, "x")).collect();
        let given = variables(&given);
        let found = declared.ephemeral(&given);
        found.map(|(name, _)| name.clone()).collect()
    }

    #[test]
    fn ephemeral_variables_are_defined_in_no_file() {
        let declared = declarations(
            "variable \"token\" {\n  type = string\n  ephemeral = true\n}\n\
             variable \"size\" {\n  type = number\n  ephemeral = false\n}\n",
        );
        let folder = tempfile::tempdir().unwrap();
        let given = variables(&[("token", "hunter2"), ("size", "3")]);
        let defined = declared.define(&given, folder.path()).unwrap();
        assert!(!format!("{defined:?}").contains("hunter2"));
        let text = fs::read_to_string(defined.file.unwrap()).unwrap();
        assert_eq!(text, "size = \"3\"\n");
        let text = defined.ephemeral.unwrap();
        assert_eq!(text.expose_secret(), "token = \"hunter2\"\n");
        let others = variables(&[("size", "3")]);
        let defined = declared.define(&others, folder.path()).unwrap();
        assert!(defined.ephemeral.is_none());
    }

    #[test]
    fn an_override_changes_only_what_it_sets() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
        let block = |name: &str, body: &str| format!("variable \"{name}\" {{\n{body}\n}}\n");
        let main = ["a", "b", "c"].map(|name| block(name, "type = list(string)\nephemeral = true"));
        write("main.tf", &main.concat());
        write("a_override.tf", &block("a", "default = []"));
        write(
            "override.tf.json",
            r#"{"variable": {"b": {"ephemeral": false}}}"#,
        );
        let declared = Declarations::read(folder.path(), Tool::Terraform).unwrap();
        assert_eq!(ephemeral(&declared, &["a", "b", "c"]), ["a", "c"]);
        assert_eq!(declared.kind("a"), Kind::Expression);
        assert_eq!(declared.kind("b"), Kind::Expression);
    }
}
