//! The backend override file (contract 6.1). It replaces the backend of the configuration, so that the state is where
//! the platform expects it. The module also provides the backend's credentials. If the tool permits it, they stay out
//! of the work tree and of the plan (docs/decisions/0009-backend-credentials.md).

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use artifact_store::{BackendSettings, Handover, StaticKeys};
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};
use semver::Version;

use super::hcl::quote;
use crate::child_env::ChildEnv;
use crate::error::{DISK_HINT, StepError};
use crate::workspace::write_private_file;

/// The profile with the keys of the bucket. No other code uses this name.
const HTTP_FILE: &str = "mayfly_backend_override.tf";
const LOCAL_FILE: &str = "terrakube_override.tf";
const AWS_FILE: &str = "aws_backend_override.tf";
const AZURE_FILE: &str = "azure_backend_override.tf";
const GCP_FILE: &str = "gcp_backend_override.tf";
/// The names of all files that this module writes into the working directory. They may hold credentials.
pub(crate) const FILES: [&str; 6] = [
    HTTP_FILE, LOCAL_FILE, AWS_FILE, AZURE_FILE, GCP_FILE, GCS_FILE,
];

const AWS_PROFILE: &str = "mayfly-state";
const AWS_CREDENTIALS: &str = "AWS_SHARED_CREDENTIALS_FILE";
const MAX_CREDENTIALS_BYTES: u64 = 1 << 20;
const AZURE_KEY: &str = "ARM_ACCESS_KEY";
/// The variables of the `http` backend.
const HTTP_ADDRESSES: [&str; 3] = [
    "TF_HTTP_ADDRESS",
    "TF_HTTP_LOCK_ADDRESS",
    "TF_HTTP_UNLOCK_ADDRESS",
];
const HTTP_USER: &str = "TF_HTTP_USERNAME";
const HTTP_PASSWORD: &str = "TF_HTTP_PASSWORD";
const GCS_CREDENTIALS: &str = "GOOGLE_BACKEND_CREDENTIALS";
/// The file of the service account, in the folder where the stock executor puts it.
const GCS_FILE: &str = "GCP_CREDENTIALS_FILE.json";

/// From this version on, the backend prefers its configured profile over keys in the environment, and expects its
/// endpoints as a block.
const NEW_S3: Version = Version::new(1, 6, 0);
/// From this version on, states can be locked with objects in the bucket.
const LOCKFILE: Version = Version::new(1, 10, 0);

/// The credentials that the tool needs in its environment to use the backend.
#[derive(Debug)]
pub struct BackendAccess {
    private: PathBuf,
    credentials: Credentials,
}

#[derive(Debug)]
enum Credentials {
    /// The override file holds the credentials, or the tool finds them itself.
    Nothing,
    Aws(StaticKeys),
    Azure(SecretString),
    Gcs(SecretString),
    Http {
        address: String,
        user: String,
        password: SecretString,
    },
}

/// Writes the override into the working directory. Generated credentials are written below `private`.
pub fn write(
    settings: &BackendSettings,
    version: &Version,
    working_dir: &Path,
    private: &Path,
    env: &ChildEnv,
) -> Result<BackendAccess, StepError> {
    let plan = Override::of(settings, version, env);
    for (name, content) in &plan.files {
        write_private(&working_dir.join(name), content)?;
    }
    Ok(BackendAccess {
        private: private.to_owned(),
        credentials: plan.credentials,
    })
}

impl BackendAccess {
    /// Sets the variables that the tool needs. Scripts that use the tool in the initialised directory need them too.
    /// Scripts may change them, so they are set again after scripts.
    pub fn provide(&self, env: &mut ChildEnv) -> Result<(), StepError> {
        match &self.credentials {
            Credentials::Nothing => {}
            Credentials::Http {
                address,
                user,
                password,
            } => {
                for name in HTTP_ADDRESSES {
                    env.set(name, address)?;
                }
                env.set(HTTP_USER, user)?;
                env.set(HTTP_PASSWORD, password.expose_secret())?;
            }
            Credentials::Azure(key) => env.set(AZURE_KEY, key.expose_secret())?,
            Credentials::Gcs(json) => {
                let path = self.private.join("backend-gcs.json");
                write_private(&path, json.expose_secret())?;
                env.set(GCS_CREDENTIALS, &path.to_string_lossy())?;
            }
            Credentials::Aws(keys) => {
                let path = self.private.join("backend-aws");
                let content = aws_credentials(keys, env, &path)?;
                write_private(&path, &content)?;
                env.set(AWS_CREDENTIALS, &path.to_string_lossy())?;
            }
        }
        Ok(())
    }
}

/// The user's own credentials file, with the executor's profile appended. The result replaces that file for the tool.
fn aws_credentials(
    keys: &StaticKeys,
    env: &ChildEnv,
    executor_file: &Path,
) -> Result<String, StepError> {
    let named = env.get(AWS_CREDENTIALS).map(PathBuf::from);
    let default = || Some(Path::new(env.get("HOME")?).join(".aws/credentials"));
    let user_file = named.filter(|path| path != executor_file).or_else(default);
    let user_text =
        match user_file.map(|path| (regular_file::read_text(&path, MAX_CREDENTIALS_BYTES), path)) {
            None => String::new(),
            Some((Ok(text), _)) => text,
            Some((Err(error), _)) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Some((Err(source), path)) => {
                let text = format!("could not read the credentials file `{}`", path.display());
                return Err(unusable(text, &source));
            }
        };
    Ok(format!(
        "{user_text}\n[{AWS_PROFILE}]\naws_access_key_id = {}\naws_secret_access_key = {}\n",
        keys.access_key.expose_secret(),
        keys.secret_key.expose_secret()
    ))
}

/// The files to write, and the credentials for the environment.
struct Override {
    files: Vec<(&'static str, String)>,
    credentials: Credentials,
}

impl Override {
    fn of(settings: &BackendSettings, version: &Version, env: &ChildEnv) -> Self {
        // The run may need its own value of the variable for something else, so it keeps that value.
        let outside = |handover: Handover, name: &str| {
            handover == Handover::Outside && env.get(name).is_none()
        };
        match settings {
            BackendSettings::Hub => unreachable!("the run serves the state of its hub"),
            // A plan keeps the arguments of its backend, and the next run has another port.
            BackendSettings::Http {
                address,
                user,
                password,
            } => Self {
                files: vec![(HTTP_FILE, Block::new("http").finish())],
                credentials: Credentials::Http {
                    address: address.clone(),
                    user: user.clone(),
                    password: password.clone(),
                },
            },
            BackendSettings::Local { path } => Self {
                files: vec![(
                    LOCAL_FILE,
                    Block::new("local")
                        .text("path", &path.to_string_lossy())
                        .finish(),
                )],
                credentials: Credentials::Nothing,
            },
            BackendSettings::S3 { keys, handover, .. } => {
                // Older backends prefer keys in the environment, which belong to the provider, over any profile.
                let handover = match handover {
                    Handover::Outside if *version < NEW_S3 => Handover::InFile,
                    handover => *handover,
                };
                Self {
                    files: vec![(AWS_FILE, s3(settings, version, handover))],
                    credentials: match keys {
                        Some(keys) if handover == Handover::Outside => {
                            Credentials::Aws(keys.clone())
                        }
                        _ => Credentials::Nothing,
                    },
                }
            }
            BackendSettings::Azurerm { handover, .. } => {
                azure(settings, outside(*handover, AZURE_KEY))
            }
            BackendSettings::Gcs { handover, .. } => {
                gcs(settings, outside(*handover, GCS_CREDENTIALS))
            }
        }
    }
}

/// With `outside`, the tool gets the key from its environment.
fn azure(settings: &BackendSettings, outside: bool) -> Override {
    let BackendSettings::Azurerm {
        resource_group,
        account,
        container,
        key,
        access_key,
        ..
    } = settings
    else {
        unreachable!("called for Azure alone");
    };
    let in_file = (!outside).then_some(access_key.expose_secret());
    let block = Block::new("azurerm")
        .optional("resource_group_name", resource_group.as_deref())
        .text("storage_account_name", account)
        .text("container_name", container)
        .text("key", key)
        .optional("access_key", in_file);
    Override {
        files: vec![(AZURE_FILE, block.finish())],
        credentials: if outside {
            Credentials::Azure(access_key.clone())
        } else {
            Credentials::Nothing
        },
    }
}

/// With `outside`, the tool gets the service account from its environment.
fn gcs(settings: &BackendSettings, outside: bool) -> Override {
    let BackendSettings::Gcs {
        bucket,
        prefix,
        credentials,
        ..
    } = settings
    else {
        unreachable!("called for Google Cloud Storage alone");
    };
    let block = Block::new("gcs")
        .text("bucket", bucket)
        .text("prefix", prefix)
        .optional("credentials", (!outside).then_some(GCS_FILE));
    let file = (GCP_FILE, block.finish());
    if outside {
        return Override {
            files: vec![file],
            credentials: Credentials::Gcs(credentials.clone()),
        };
    }
    Override {
        files: vec![file, (GCS_FILE, credentials.expose_secret().to_owned())],
        credentials: Credentials::Nothing,
    }
}

fn s3(settings: &BackendSettings, version: &Version, handover: Handover) -> String {
    let BackendSettings::S3 {
        bucket,
        region,
        key,
        keys,
        use_lockfile,
        endpoint,
        ..
    } = settings
    else {
        unreachable!("called for S3 alone");
    };
    let mut block = Block::new("s3")
        .text("bucket", bucket)
        .text("region", region)
        .text("key", key);
    block = match (keys, handover) {
        (Some(keys), Handover::InFile) => block
            .text("access_key", keys.access_key.expose_secret())
            .text("secret_key", keys.secret_key.expose_secret()),
        (Some(_), Handover::Outside) => block.text("profile", AWS_PROFILE),
        _ => block,
    };
    if *use_lockfile && *version >= LOCKFILE {
        block = block.truth("use_lockfile");
    }
    let Some(endpoint) = endpoint else {
        return block.finish();
    };
    let block = if *version < NEW_S3 {
        block.text("endpoint", endpoint).truth("force_path_style")
    } else {
        block
            .raw("endpoints", &format!("{{ s3 = {} }}", quote(endpoint)))
            .truth("skip_requesting_account_id")
            .truth("skip_s3_checksum")
            .truth("use_path_style")
    };
    block
        .truth("skip_credentials_validation")
        .truth("skip_metadata_api_check")
        .truth("skip_region_validation")
        .finish()
}

/// One `terraform { backend … }` block.
struct Block(String);

impl Block {
    fn new(backend: &str) -> Self {
        Self(format!("terraform {{\n  backend \"{backend}\" {{\n"))
    }

    fn raw(mut self, name: &str, value: &str) -> Self {
        writeln!(self.0, "    {name} = {value}").expect("writing to a string cannot fail");
        self
    }

    fn text(self, name: &str, value: &str) -> Self {
        self.raw(name, &quote(value))
    }

    fn optional(self, name: &str, value: Option<&str>) -> Self {
        match value {
            Some(value) => self.text(name, value),
            None => self,
        }
    }

    fn truth(self, name: &str) -> Self {
        self.raw(name, "true")
    }

    fn finish(self) -> String {
        self.0 + "  }\n}\n"
    }
}

/// Replaces any file or link of that name by a file that only this user can read.
fn write_private(path: &Path, content: &str) -> Result<(), StepError> {
    write_private_file(path, content.as_bytes()).map_err(|source| {
        let path = path.display();
        unusable(format!("could not write `{path}` for the backend"), &source)
    })
}

fn unusable(text: String, source: &io::Error) -> StepError {
    StepError::infrastructure(text)
        .because(source)
        .with_hint(DISK_HINT)
}

#[cfg(test)]
mod tests;
