//! Groovy scripts, which an external `groovy` runs if it is installed. The platform runs them inside its JVM, with
//! variables bound. A small driver script binds the same variables here, except the Java API client.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::path::{Path, PathBuf};

use job_contract::Command;
use serde_json::json;

use super::{Scripts, TOOLS_REPOSITORY, not_prepared};
use crate::error::StepError;
use crate::process::Invocation;
use crate::workspace::write_private_file;

/// Binds every variable, runs the script, and prints the text that the script wrote to `terrakubeOutput`.
const DRIVER: &str = r#"
def bindings = new groovy.json.JsonSlurper().parse(new File(args[0]))
def output = new ByteArrayOutputStream()
def binding = new Binding(bindings + [terrakubeOutput: output])
if (bindings.terraformOutput) {
    binding.setVariable("terraformOutputJson", new groovy.json.JsonSlurper().parseText(bindings.terraformOutput))
}
try {
    new GroovyShell(this.class.classLoader, binding).evaluate(new File(args[1]))
} finally {
    System.out.write(output.toByteArray())
    System.out.flush()
}
"#;

/// Finds `groovy` on `path`, for this script.
pub(super) fn find(path: &OsStr, command: &Command) -> Result<PathBuf, StepError> {
    which::which_in("groovy", Some(path), "/").map_err(|_| {
        let text = format!(
            "a script with priority {} needs Groovy, and no `groovy` is on PATH",
            command.priority
        );
        StepError::user(text)
            .with_hint("use an executor image with Groovy, or rewrite the script in Bash")
    })
}

pub(super) fn invocation(
    scripts: &Scripts<'_>,
    command: &Command,
    script: &Path,
    variables: &BTreeMap<String, OsString>,
) -> Result<Invocation, StepError> {
    let path = variables
        .get("PATH")
        .map(OsString::as_os_str)
        .unwrap_or_default();
    let groovy = find(path, command)?;
    let (driver, bindings) = (
        scripts.private.join("driver.groovy"),
        scripts.private.join("bindings.json"),
    );
    let values: BTreeMap<&str, _> = variables
        .iter()
        .map(|(name, value)| (name.as_str(), json!(value.to_string_lossy())))
        .collect();
    let write = || {
        write_private_file(&driver, DRIVER.as_bytes())?;
        write_private_file(&bindings, &serde_json::to_vec(&values)?)
    };
    write().map_err(|source: std::io::Error| not_prepared(scripts.private, &source))?;
    let mut args: Vec<OsString> = Vec::new();
    let classes = scripts.dir.join(TOOLS_REPOSITORY);
    if fs::metadata(&classes).is_ok_and(|metadata| metadata.is_dir()) {
        args.extend(["-cp".into(), classes.into()]);
    }
    args.extend([driver.into(), bindings.into(), script.into()]);
    Ok(scripts.invocation(groovy, args, variables))
}
