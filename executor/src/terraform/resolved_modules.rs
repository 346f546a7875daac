//! Where the modules are that `init` has resolved.
//!
//! The tool takes a folder without configuration for an empty module, and plans to destroy what the module had made. A source that
//! leads out of the work tree finds such a folder among those of the executor.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use job_contract::Exit;
use runtime::{lexical, regular_file};
use serde::Deserialize;

use crate::error::StepError;

/// The tool's own name of the folder for what it keeps beside the configuration.
const DATA_DIR: &str = ".terraform";
/// Where `init` notes what it has resolved, in that folder.
const MANIFEST: &str = "modules/modules.json";
/// Thousands of modules take a megabyte.
const MAX_MANIFEST_BYTES: u64 = 64 << 20;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Manifest {
    #[serde(default)]
    modules: Vec<Module>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Module {
    /// The names of the calls that lead to it, with dots between them. Empty for the root module.
    key: String,
    #[serde(default)]
    source: String,
    /// Relative to the working directory.
    dir: PathBuf,
}

/// Checks that each module is in the work tree `root`, or among what `init` has installed in its own folder: `data_dir` or
/// `.terraform`.
///
/// # Errors
/// Names the first call whose module is elsewhere.
pub(crate) fn check(
    root: &Path,
    working_dir: &Path,
    data_dir: Option<&OsStr>,
) -> Result<(), StepError> {
    let data_dir = data_dir.unwrap_or(OsStr::new(DATA_DIR));
    let data_dir = lexical(&working_dir.join(data_dir));
    let manifest = data_dir.join(MANIFEST);
    let text = match regular_file::read(&manifest, MAX_MANIFEST_BYTES) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        read => read.map_err(|error| unreadable(&error))?,
    };
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| unreadable(&error))?;
    let is_outside = |module: &&Module| {
        let dir = working_dir.join(&module.dir);
        let place = lexical(&dir);
        let is_in_tree = |place: &Path| place.starts_with(root);
        // A link in the tree may stand where the text of a path leads out of it.
        let is_linked = || dir.canonicalize().is_ok_and(|place| is_in_tree(&place));
        !place.starts_with(&data_dir) && !is_in_tree(&place) && !is_linked()
    };
    match manifest.modules.iter().find(is_outside) {
        None => Ok(()),
        Some(module) => Err(outside(module)),
    }
}

fn outside(module: &Module) -> StepError {
    let (call, source) = (module.key.replace('.', ".module."), &module.source);
    let text = format!(
        "the source `{source}` of `module.{call}` leads out of the work tree, where the tool would take an empty folder for a module \
         without resources"
    );
    StepError::new(Exit::StepFailed, text).with_hint(
        "let the source lead to a folder of the repository; for a run of a folder, name with `--root` the folder that holds both",
    )
}

fn unreadable(error: &(dyn std::error::Error + 'static)) -> StepError {
    let text = "what `init` has noted of its modules cannot be read";
    StepError::new(Exit::StepFailed, text).because(error)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use rstest::rstest;

    use super::*;

    /// The outcome for a module `m` that `init` has found here, seen from the folder `stack/a` of the work tree.
    fn found_in(dir: &str, data_dir: Option<&str>) -> Result<(), String> {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().canonicalize().unwrap().join("tree");
        let working_dir = root.join("stack/a");
        let data_dir = data_dir.map(|name| temp.path().join(name));
        let tools = data_dir.clone().unwrap_or(working_dir.join(DATA_DIR));
        fs::create_dir_all(tools.join("modules")).unwrap();
        fs::create_dir_all(root.join("modules")).unwrap();
        fs::create_dir_all(&working_dir).unwrap();
        symlink(root.join("modules"), temp.path().join("linked")).unwrap();
        let manifest = serde_json::json!({"Modules": [
            {"Key": "", "Source": "", "Dir": "."},
            {"Key": "a.m", "Source": "../../", "Version": "1.0.0", "Dir": dir},
        ]});
        fs::write(tools.join(MANIFEST), manifest.to_string()).unwrap();
        let data_dir = data_dir.as_deref().map(Path::as_os_str);
        check(&root, &working_dir, data_dir).map_err(|error| error.to_string())
    }

    #[rstest]
    #[case::below("m", None)]
    #[case::beside("../b", None)]
    #[case::the_tree_itself("../..", None)]
    #[case::installed(".terraform/modules/a.m", None)]
    #[case::linked("../../../linked", None)]
    #[case::installed_elsewhere("../../../elsewhere/modules/a.m", Some("elsewhere"))]
    fn a_module_may_be_anywhere_in_the_tree_and_among_those_of_init(
        #[case] dir: &str,
        #[case] data_dir: Option<&str>,
    ) {
        assert_eq!(found_in(dir, data_dir), Ok(()));
    }

    #[rstest]
    #[case::above("../../..")]
    #[case::beside_the_tree("../../../tree-of-others")]
    #[case::anywhere("/usr")]
    fn a_module_outside_of_the_tree_ends_the_step_and_is_named(#[case] dir: &str) {
        let error = found_in(dir, None).unwrap_err();
        assert!(error.contains("`../../` of `module.a.module.m`"), "{error}");
    }

    #[test]
    fn a_configuration_without_modules_has_no_manifest() {
        let temp = tempfile::tempdir().unwrap();
        assert!(check(temp.path(), temp.path(), None).is_ok());
    }

    #[test]
    fn a_manifest_that_says_nothing_is_not_taken_for_one_without_modules() {
        let temp = tempfile::tempdir().unwrap();
        fs::create_dir_all(temp.path().join(".terraform/modules")).unwrap();
        fs::write(temp.path().join(DATA_DIR).join(MANIFEST), "[").unwrap();
        let error = check(temp.path(), temp.path(), None).unwrap_err();
        assert!(error.to_string().contains("cannot be read"), "{error}");
    }
}
