//! The backend override file (contract 6.1): whatever backend a configuration names, its state is kept where
//! the platform looks for it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file for the local backend; the suffix makes the tool merge it over the configuration.
const LOCAL_FILE: &str = "terrakube_override.tf";

/// Writes the override for the local backend into the working directory.
pub fn write_local(working_dir: &Path, state: &Path) -> io::Result<PathBuf> {
    let file = working_dir.join(LOCAL_FILE);
    // JSON strings are HCL strings but for the two interpolation openers.
    let path = serde_json::to_string(&state.to_string_lossy())
        .expect("a string has no failing serialiser")
        .replace("${", "$${")
        .replace("%{", "%%{");
    fs::write(
        &file,
        format!("terraform {{\n  backend \"local\" {{\n    path = {path}\n  }}\n}}\n"),
    )?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_that_of_the_contract() {
        let folder = tempfile::tempdir().unwrap();
        let file = write_local(folder.path(), Path::new("/d/${x}/terraform.tfstate")).unwrap();
        assert_eq!(file.file_name().unwrap(), "terrakube_override.tf");
        assert_eq!(
            fs::read_to_string(file).unwrap(),
            "terraform {\n  backend \"local\" {\n    path = \"/d/$${x}/terraform.tfstate\"\n  }\n}\n"
        );
    }
}
