//! The backend override file (contract 6.1). It replaces the backend of the configuration, so that the state is where
//! the platform expects it. The module also provides the backend's credentials. If the tool permits it, they stay out
//! of the work tree and of the plan (docs/decisions/0009-backend-credentials.md).

pub(crate) mod detours;
pub(crate) mod initialised;

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use artifact_store::{
    AzureIdentity, AzureLogin, BackendSettings, GcsLogin, Handover, S3Login, StaticKeys,
};
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
/// The profile with the credentials that assume a role for [`AWS_PROFILE`].
const AWS_SOURCE_PROFILE: &str = "mayfly-state-source";
const AWS_CREDENTIALS: &str = "AWS_SHARED_CREDENTIALS_FILE";
const MAX_CREDENTIALS_BYTES: u64 = 1 << 20;
const AZURE_KEY: &str = "ARM_ACCESS_KEY";
/// The variables of the `http` backend.
const HTTP_ADDRESSES: [&str; 3] = [
    "TF_HTTP_ADDRESS",
    "TF_HTTP_LOCK_ADDRESS",
    "TF_HTTP_UNLOCK_ADDRESS",
];
/// Its other methods, which a run may have set for a backend of its own.
const HTTP_METHODS: [(&str, &str); 3] = [
    ("TF_HTTP_UPDATE_METHOD", "POST"),
    ("TF_HTTP_LOCK_METHOD", "LOCK"),
    ("TF_HTTP_UNLOCK_METHOD", "UNLOCK"),
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
    /// The credentials file of AWS that the run named last.
    user_file: Option<PathBuf>,
}

#[derive(Debug)]
enum Credentials {
    /// The override file holds the credentials, or the tool finds them itself.
    Nothing,
    /// Profiles of the tool.
    Aws(SecretString),
    Azure(SecretString),
    Gcs(SecretString),
    /// A file of the operator.
    GcsFile(PathBuf),
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
        user_file: None,
    })
}

/// The name of the override.
pub(crate) fn override_file(settings: &BackendSettings) -> &'static str {
    match settings {
        BackendSettings::Hub | BackendSettings::Http { .. } => HTTP_FILE,
        BackendSettings::Local { .. } => LOCAL_FILE,
        BackendSettings::S3 { .. } => AWS_FILE,
        BackendSettings::Azurerm { .. } => AZURE_FILE,
        BackendSettings::Gcs { .. } => GCP_FILE,
    }
}

/// Whether the tool opens the store with credentials of the store, whatever the run has for AWS.
pub(crate) fn has_own_credentials(settings: &BackendSettings, version: &Version) -> bool {
    let BackendSettings::S3 {
        login,
        role,
        handover,
        ..
    } = settings
    else {
        return true;
    };
    match s3_handover(*handover, version) {
        Handover::Outside => aws_profiles(login, role.as_deref()).is_some(),
        Handover::InFile => matches!(login, S3Login::Keys(_)),
        Handover::Omitted => false,
    }
}

/// Older backends prefer keys in the environment, which belong to the provider, over any profile.
fn s3_handover(handover: Handover, version: &Version) -> Handover {
    match handover {
        Handover::Outside if *version < NEW_S3 => Handover::InFile,
        handover => handover,
    }
}

impl BackendAccess {
    /// Sets the variables that the tool needs. Scripts that use the tool in the initialised directory need them too.
    /// Scripts may change them, so they are set again after scripts.
    pub fn provide(&mut self, env: &mut ChildEnv) -> Result<(), StepError> {
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
                for (name, method) in HTTP_METHODS {
                    env.set(name, method)?;
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
            Credentials::GcsFile(path) => env.set(GCS_CREDENTIALS, &path.to_string_lossy())?,
            Credentials::Aws(profiles) => {
                let path = self.private.join("backend-aws");
                // A second time, the variable names the file of the first time.
                let named = env.get(AWS_CREDENTIALS).map(PathBuf::from);
                if named.as_ref() != Some(&path) {
                    self.user_file = named;
                }
                let content = aws_credentials(profiles, self.user_file.clone(), env)?;
                write_private(&path, &content)?;
                env.set(AWS_CREDENTIALS, &path.to_string_lossy())?;
            }
        }
        Ok(())
    }
}

/// The user's own credentials file, with the executor's profiles appended. The result replaces that file for the tool.
fn aws_credentials(
    profiles: &SecretString,
    named: Option<PathBuf>,
    env: &ChildEnv,
) -> Result<String, StepError> {
    let default = || Some(Path::new(env.get("HOME")?).join(".aws/credentials"));
    let user_file = named.or_else(default);
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
    Ok(format!("{user_text}\n{}", profiles.expose_secret()))
}

/// The profiles by which the tool opens the bucket, whatever credentials the run has for its providers. `None` if the tool finds
/// the credentials itself.
fn aws_profiles(login: &S3Login, role: Option<&str>) -> Option<SecretString> {
    let own = match login {
        S3Login::Keys(keys) => Some(format!(
            "aws_access_key_id = {}\naws_secret_access_key = {}\n",
            keys.access_key.expose_secret(),
            keys.secret_key.expose_secret()
        )),
        S3Login::WebIdentity { role, token_file } => Some(format!(
            "role_arn = {role}\nweb_identity_token_file = {}\nrole_session_name = {AWS_PROFILE}\n",
            token_file.display()
        )),
        S3Login::Container | S3Login::Ambient => None,
    };
    let text = match (own, role) {
        (Some(own), None) => format!("[{AWS_PROFILE}]\n{own}"),
        (Some(own), Some(role)) => format!(
            "[{AWS_SOURCE_PROFILE}]\n{own}\n[{AWS_PROFILE}]\nrole_arn = {role}\nsource_profile = {AWS_SOURCE_PROFILE}\n\
             role_session_name = {AWS_PROFILE}\n"
        ),
        (None, Some(role)) => {
            let source = match login {
                S3Login::Container => "EcsContainer",
                _ => "Ec2InstanceMetadata",
            };
            format!(
                "[{AWS_PROFILE}]\nrole_arn = {role}\ncredential_source = {source}\nrole_session_name = {AWS_PROFILE}\n"
            )
        }
        (None, None) => return None,
    };
    Some(SecretString::from(text))
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
            BackendSettings::S3 {
                login,
                role,
                handover,
                ..
            } => {
                let handover = s3_handover(*handover, version);
                let profiles = aws_profiles(login, role.as_deref());
                let profiles = profiles.filter(|_| handover == Handover::Outside);
                Self {
                    files: vec![(
                        AWS_FILE,
                        s3(settings, version, handover, profiles.is_some()),
                    )],
                    credentials: profiles.map_or(Credentials::Nothing, Credentials::Aws),
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

/// With `outside`, the tool gets the key from its environment. An identity has no key: the tool gets a token with it.
fn azure(settings: &BackendSettings, outside: bool) -> Override {
    let BackendSettings::Azurerm {
        resource_group,
        account,
        container,
        key,
        login,
        ..
    } = settings
    else {
        unreachable!("called for Azure alone");
    };
    let block = Block::new("azurerm")
        .optional("resource_group_name", resource_group.as_deref())
        .text("storage_account_name", account)
        .text("container_name", container)
        .text("key", key);
    let (block, credentials) = match login {
        AzureLogin::Key(key) if outside => (block, Credentials::Azure(key.clone())),
        AzureLogin::Key(key) => (
            block.text("access_key", key.expose_secret()),
            Credentials::Nothing,
        ),
        AzureLogin::Identity(identity) => (with_identity(block, identity), Credentials::Nothing),
    };
    Override {
        files: vec![(AZURE_FILE, block.finish())],
        credentials,
    }
}

/// Ids and a path are no secrets. As arguments, they are not confused with the credentials of providers.
fn with_identity(block: Block, identity: &AzureIdentity) -> Block {
    let block = block.truth("use_azuread_auth");
    match identity {
        AzureIdentity::Workload {
            client_id,
            tenant_id,
            token_file,
            ..
        } => block
            .truth("use_oidc")
            .text("client_id", client_id)
            .text("tenant_id", tenant_id)
            .text("oidc_token_file_path", &token_file.to_string_lossy()),
        AzureIdentity::Managed { client_id, .. } => block
            .truth("use_msi")
            .optional("client_id", client_id.as_deref()),
    }
}

/// With `outside`, the tool gets the service account from its environment.
fn gcs(settings: &BackendSettings, outside: bool) -> Override {
    let BackendSettings::Gcs {
        bucket,
        prefix,
        login,
        ..
    } = settings
    else {
        unreachable!("called for Google Cloud Storage alone");
    };
    let in_file = matches!(login, GcsLogin::Key(_)) && !outside;
    let block = Block::new("gcs")
        .text("bucket", bucket)
        .text("prefix", prefix)
        .optional("credentials", in_file.then_some(GCS_FILE));
    let mut files = vec![(GCP_FILE, block.finish())];
    let credentials = match login {
        GcsLogin::Key(key) if outside => Credentials::Gcs(key.clone()),
        GcsLogin::Key(key) => {
            files.push((GCS_FILE, key.expose_secret().to_owned()));
            Credentials::Nothing
        }
        // The run may have set the variable, but only the operator's file opens the store.
        GcsLogin::Identity {
            document: Some(path),
        } => Credentials::GcsFile(path.clone()),
        GcsLogin::Identity { document: None } => Credentials::Nothing,
    };
    Override { files, credentials }
}

fn s3(
    settings: &BackendSettings,
    version: &Version,
    handover: Handover,
    with_profile: bool,
) -> String {
    let BackendSettings::S3 {
        bucket,
        region,
        key,
        login,
        role,
        use_lockfile,
        endpoint,
        path_style,
        ..
    } = settings
    else {
        unreachable!("called for S3 alone");
    };
    let mut block = Block::new("s3")
        .text("bucket", bucket)
        .text("region", region)
        .text("key", key);
    block = match (login, handover) {
        _ if with_profile => block.text("profile", AWS_PROFILE),
        (
            S3Login::Keys(StaticKeys {
                access_key,
                secret_key,
            }),
            Handover::InFile,
        ) => block
            .text("access_key", access_key.expose_secret())
            .text("secret_key", secret_key.expose_secret()),
        _ => block,
    };
    if let Some(role) = role.as_deref().filter(|_| !with_profile) {
        block = if *version < NEW_S3 {
            block.text("role_arn", role)
        } else {
            block.raw("assume_role", &format!("{{ role_arn = {} }}", quote(role)))
        };
    }
    if *use_lockfile && *version >= LOCKFILE {
        block = block.truth("use_lockfile");
    }
    let Some(endpoint) = endpoint else {
        return block.finish();
    };
    let (block, in_path) = if *version < NEW_S3 {
        (block.text("endpoint", endpoint), "force_path_style")
    } else {
        let block = block
            .raw("endpoints", &format!("{{ s3 = {} }}", quote(endpoint)))
            .truth("skip_requesting_account_id")
            .truth("skip_s3_checksum");
        (block, "use_path_style")
    };
    let block = if *path_style {
        block.truth(in_path)
    } else {
        block
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
