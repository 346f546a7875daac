//! Dynamic credentials of cloud providers (contract 8.8): their files outside the work tree, and the environment
//! variables that name these files. This module does not depend on any cloud.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::layout::write_private_file;

const FOLDER: &str = "dynamic-credentials";

const AWS_TOKEN: &str = "TERRAKUBE_AWS_CREDENTIALS_FILE";
const AWS_TOKEN_FILE: &str = "terrakube_config_dynamic_credentials_aws.txt";
const AWS_VARIABLE: &str = "AWS_WEB_IDENTITY_TOKEN_FILE";

const GCP_TOKEN: &str = "TERRAKUBE_GCP_CREDENTIALS_FILE";
const GCP_TOKEN_FILE: &str = "terrakube_dynamic_credentials.json";
const GCP_CONFIG: &str = "TERRAKUBE_GCP_CREDENTIALS_CONFIG_FILE";
const GCP_CONFIG_FILE: &str = "terrakube_config_dynamic_credentials.json";
const GCP_VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
/// The platform's placeholder for the folder of the token in the configuration.
const FOLDER_PLACEHOLDER: &str = "${WORKSPACE_DIRECTORY}";

/// Writes the credential files from a run's environment, and returns the variables that name them. These override the
/// user's values.
pub(super) fn write_credentials(
    environment: &BTreeMap<String, String>,
    private: &Path,
) -> io::Result<BTreeMap<String, String>> {
    let folder = private.join(FOLDER);
    let given = |name: &str| environment.get(name).filter(|text| !text.trim().is_empty());
    let mut variables = BTreeMap::new();
    let mut announce = |variable: &str, file: &Path| {
        variables.insert(variable.to_owned(), file.to_string_lossy().into_owned());
    };
    if let Some(token) = given(AWS_TOKEN) {
        let file = folder.join(AWS_TOKEN_FILE);
        write_private_file(&file, token.as_bytes())?;
        announce(AWS_VARIABLE, &file);
    }
    if let Some(token) = given(GCP_TOKEN) {
        write_private_file(&folder.join(GCP_TOKEN_FILE), token.as_bytes())?;
    }
    if let Some(config) = given(GCP_CONFIG) {
        let file = folder.join(GCP_CONFIG_FILE);
        let config = config.replace(FOLDER_PLACEHOLDER, &within_json(&folder));
        write_private_file(&file, config.as_bytes())?;
        announce(GCP_VARIABLE, &file);
    }
    Ok(variables)
}

/// The path, escaped for the inside of a JSON string, where the placeholder is.
fn within_json(path: &Path) -> String {
    let quoted = serde_json::Value::from(path.to_string_lossy()).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    fn environment(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect()
    }

    #[test]
    fn files_are_private_and_the_environment_names_them() {
        let private = tempfile::tempdir().unwrap();
        let variables = write_credentials(
            &environment(&[
                (AWS_TOKEN, "aws-jwt"),
                (GCP_TOKEN, "{\"token\":1}"),
                (
                    GCP_CONFIG,
                    r#"{"file":"${WORKSPACE_DIRECTORY}/terrakube_dynamic_credentials.json"}"#,
                ),
                (AWS_VARIABLE, "/of/the/user"),
            ]),
            private.path(),
        )
        .unwrap();
        let aws = Path::new(&variables[AWS_VARIABLE]);
        assert_eq!(fs::read_to_string(aws).unwrap(), "aws-jwt");
        let gcp = fs::read(&variables[GCP_VARIABLE]).unwrap();
        let gcp: serde_json::Value = serde_json::from_slice(&gcp).unwrap();
        let token = gcp["file"].as_str().unwrap();
        assert_eq!(fs::read_to_string(token).unwrap(), "{\"token\":1}");
        for file in [aws, Path::new(token)] {
            assert!(file.starts_with(private.path()));
            assert_eq!(
                fs::metadata(file).unwrap().permissions().mode() & 0o777,
                0o600
            );
        }
    }

    #[test]
    fn without_credentials_nothing_is_written() {
        let private = tempfile::tempdir().unwrap();
        let given = environment(&[(AWS_TOKEN, ""), ("ARM_OIDC_TOKEN", "x")]);
        assert!(
            write_credentials(&given, private.path())
                .unwrap()
                .is_empty()
        );
        assert_eq!(fs::read_dir(private.path()).unwrap().count(), 0);
    }
}
