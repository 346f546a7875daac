//! The settings of the store, under the names the stock executor reads (contract 10.1).

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use job_contract::env;
use secrecy::SecretString;
use serde::Deserialize;
use url::Url;

use crate::backend::{Handover, StaticKeys};

/// Which store is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    Local,
    S3,
    Azure,
    Gcs,
}

impl StoreKind {
    const ALL: [Self; 4] = [Self::Local, Self::S3, Self::Azure, Self::Gcs];

    /// How `TerraformStateType` spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "LocalTerraformStateImpl",
            Self::S3 => "AwsTerraformStateImpl",
            Self::Azure => "AzureTerraformStateImpl",
            Self::Gcs => "GcpTerraformStateImpl",
        }
    }

    /// What people call it instead.
    const fn aliases(self) -> &'static [&'static str] {
        match self {
            Self::Local => &["local", "file"],
            Self::S3 => &["aws", "s3", "amazon", "minio"],
            Self::Azure => &["azure", "azurerm", "blob"],
            Self::Gcs => &["gcp", "gcs", "google"],
        }
    }

    /// The kind a wrong spelling most likely means.
    fn guess(text: &str) -> Option<Self> {
        let text = text.to_ascii_lowercase();
        let means = |kind: &Self| kind.aliases().iter().any(|alias| text.starts_with(alias));
        Self::ALL.into_iter().find(means)
    }
}

impl FromStr for StoreKind {
    type Err = Problem;

    fn from_str(text: &str) -> Result<Self, Problem> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| Problem::UnknownKind {
            found: text.to_owned(),
            meant: Self::guess(text),
        })
    }
}

/// Settings of the store, as they are written. [`StoreArgs::resolve`] says what is wrong with them.
#[derive(Args, Clone, Default)]
#[command(next_help_heading = "Storage")]
pub struct StoreArgs {
    /// Where plans, state and logs are kept: `LocalTerraformStateImpl`, `AwsTerraformStateImpl`,
    /// `AzureTerraformStateImpl` or `GcpTerraformStateImpl`.
    #[arg(long, env = env::STATE_TYPE, default_value = StoreKind::Local.name())]
    pub state_type: String,
    /// Bucket on S3.
    #[arg(long, env = env::AWS_BUCKET)]
    pub aws_bucket: Option<String>,
    /// Region of the bucket.
    #[arg(long, env = env::AWS_REGION)]
    pub aws_region: Option<String>,
    /// Access key id.
    #[arg(long, env = env::AWS_ACCESS_KEY, hide_env_values = true, hide = true)]
    pub aws_access_key: Option<String>,
    /// Secret access key.
    #[arg(long, env = env::AWS_SECRET_KEY, hide_env_values = true, hide = true)]
    pub aws_secret_key: Option<String>,
    /// Address of another S3 service than AWS.
    #[arg(long, env = env::AWS_ENDPOINT)]
    pub aws_endpoint: Option<String>,
    /// `true` takes credentials from the environment of the process or the machine instead of keys.
    #[arg(long, env = env::AWS_ENABLE_ROLE_AUTH)]
    pub aws_enable_role_auth: Option<String>,
    /// `true` writes the keys into the backend file, `false` leaves the tool to find credentials itself
    /// [default: as the next setting says].
    #[arg(long, env = env::AWS_INCLUDE_BACKEND_KEYS)]
    pub aws_include_backend_keys: Option<String>,
    /// `true` locks states with objects in the bucket.
    #[arg(long, env = env::AWS_USE_LOCKFILE)]
    pub aws_use_lockfile: Option<String>,
    /// How the tool's backend gets the store's credentials: `outside` the work tree and the plan, or in the
    /// backend `file`, as the stock executor does it.
    #[arg(long, env = env::BACKEND_CREDENTIALS)]
    pub backend_credentials: Option<String>,
    /// Storage account on Azure.
    #[arg(long, env = env::AZURE_ACCOUNT)]
    pub azure_account: Option<String>,
    /// Its resource group.
    #[arg(long, env = env::AZURE_RESOURCE_GROUP)]
    pub azure_resource_group: Option<String>,
    /// Container of the workspaces' current states.
    #[arg(long, env = env::AZURE_CONTAINER)]
    pub azure_container: Option<String>,
    /// Key of the storage account.
    #[arg(long, env = env::AZURE_ACCESS_KEY, hide_env_values = true, hide = true)]
    pub azure_access_key: Option<String>,
    /// Bucket on Google Cloud Storage.
    #[arg(long, env = env::GCP_BUCKET)]
    pub gcp_bucket: Option<String>,
    /// Project of the bucket; accepted, not needed.
    #[arg(long, env = env::GCP_PROJECT)]
    pub gcp_project: Option<String>,
    /// Key of the service account: base64 of its JSON.
    #[arg(long, env = env::GCP_CREDENTIALS, hide_env_values = true, hide = true)]
    pub gcp_credentials: Option<String>,
}

/// Only what is no credential is shown.
impl fmt::Debug for StoreArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreArgs")
            .field("state_type", &self.state_type)
            .field("aws_bucket", &self.aws_bucket)
            .field("aws_region", &self.aws_region)
            .field("aws_endpoint", &self.aws_endpoint)
            .field("azure_account", &self.azure_account)
            .field("azure_container", &self.azure_container)
            .field("gcp_bucket", &self.gcp_bucket)
            .finish_non_exhaustive()
    }
}

/// A store that can be opened.
#[derive(Clone, Debug)]
pub enum StoreSettings {
    Local { data_dir: PathBuf },
    S3(S3Settings),
    Azure(AzureSettings),
    Gcs(GcsSettings),
}

/// A bucket of S3 or of a service like it.
#[derive(Clone, Debug)]
pub struct S3Settings {
    pub bucket: String,
    pub region: String,
    pub endpoint: Option<Endpoint>,
    pub credentials: S3Credentials,
    pub handover: Handover,
    pub use_lockfile: bool,
}

/// An address, and how the operator wrote it: the tool's backend gets it as it was written.
#[derive(Clone, Debug)]
pub struct Endpoint {
    pub url: Url,
    pub text: String,
}

/// What opens the bucket.
#[derive(Clone, Debug)]
pub enum S3Credentials {
    Keys(StaticKeys),
    /// Whatever the process finds around it.
    Role,
}

/// A storage account.
#[derive(Clone, Debug)]
pub struct AzureSettings {
    pub account: String,
    pub access_key: SecretString,
    /// Container of backend states.
    pub container: String,
    pub resource_group: Option<String>,
    pub handover: Handover,
    /// Address of the account's blobs.
    pub endpoint: Url,
}

/// A bucket of Google Cloud Storage.
#[derive(Clone, Debug)]
pub struct GcsSettings {
    pub bucket: String,
    /// JSON of the service account.
    pub credentials: SecretString,
    pub handover: Handover,
    /// Address of the service.
    pub endpoint: Url,
}

/// Everything that is wrong with the settings of the store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store cannot be used: {}", list(problems))]
pub struct StoreConfigError {
    pub problems: Vec<Problem>,
}

fn list(problems: &[Problem]) -> String {
    let texts: Vec<_> = problems.iter().map(Problem::to_string).collect();
    texts.join("; ")
}

/// One thing that is wrong. Values of credentials are not repeated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    #[error("`{}` is `{found}`, {}", env::STATE_TYPE, spelling(*meant))]
    UnknownKind {
        found: String,
        meant: Option<StoreKind>,
    },
    #[error("`{name}` is not set")]
    Missing { name: &'static str },
    #[error("`{name}` is neither `true` nor `false`")]
    NotABoolean { name: &'static str },
    #[error("`{name}` is not {expected}")]
    Malformed {
        name: &'static str,
        expected: &'static str,
    },
}

impl Problem {
    /// The setting it is about.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::UnknownKind { .. } => env::STATE_TYPE,
            Self::Missing { name } | Self::NotABoolean { name } | Self::Malformed { name, .. } => {
                name
            }
        }
    }
}

impl StoreConfigError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        let names: Vec<_> = self
            .problems
            .iter()
            .map(|problem| format!("`{}`", problem.name()))
            .collect();
        format!("set in the environment: {}", names.join(", "))
    }
}

fn spelling(meant: Option<StoreKind>) -> String {
    if let Some(kind) = meant {
        return format!("which is spelt `{}`", kind.name());
    }
    let names = StoreKind::ALL.map(|kind| format!("`{}`", kind.name()));
    format!("which is none of {}", names.join(", "))
}

impl StoreArgs {
    /// The store these settings describe, or all that is wrong with them.
    pub fn resolve(&self, data_dir: &Path) -> Result<StoreSettings, StoreConfigError> {
        let mut reader = Reader::default();
        let settings = match self.state_type.trim().parse() {
            Ok(StoreKind::Local) => Some(StoreSettings::Local {
                data_dir: data_dir.to_owned(),
            }),
            Ok(StoreKind::S3) => self.s3(&mut reader).map(StoreSettings::S3),
            Ok(StoreKind::Azure) => self.azure(&mut reader).map(StoreSettings::Azure),
            Ok(StoreKind::Gcs) => self.gcs(&mut reader).map(StoreSettings::Gcs),
            Err(problem) => reader.none(problem),
        };
        let problems = reader.problems;
        settings
            .filter(|_| problems.is_empty())
            .ok_or(StoreConfigError { problems })
    }

    /// Every setting is looked at before the first absence ends it, here and below: all problems are told at once.
    fn s3(&self, reader: &mut Reader) -> Option<S3Settings> {
        let role = reader.switch(
            env::AWS_ENABLE_ROLE_AUTH,
            self.aws_enable_role_auth.as_ref(),
        );
        let include_keys = reader.switch(
            env::AWS_INCLUDE_BACKEND_KEYS,
            self.aws_include_backend_keys.as_ref(),
        );
        let handover = self.handover(reader);
        let use_lockfile = reader.switch(env::AWS_USE_LOCKFILE, self.aws_use_lockfile.as_ref());
        let bucket = reader.name(env::AWS_BUCKET, self.aws_bucket.as_ref(), is_bucket_name);
        let region = reader.name(env::AWS_REGION, self.aws_region.as_ref(), is_region);
        let endpoint = reader.endpoint(env::AWS_ENDPOINT, self.aws_endpoint.as_ref());
        let credentials = if role == Some(true) {
            Some(S3Credentials::Role)
        } else {
            let access = reader.secret(env::AWS_ACCESS_KEY, self.aws_access_key.as_ref());
            let secret = reader.secret(env::AWS_SECRET_KEY, self.aws_secret_key.as_ref());
            access.zip(secret).map(|(access_key, secret_key)| {
                S3Credentials::Keys(StaticKeys {
                    access_key,
                    secret_key,
                })
            })
        };
        Some(S3Settings {
            bucket: bucket?,
            region: region?,
            endpoint,
            credentials: credentials?,
            handover: match (role, include_keys) {
                (Some(true), _) | (_, Some(false)) => Handover::Omitted,
                (_, Some(true)) => Handover::InFile,
                (_, None) => handover,
            },
            use_lockfile: use_lockfile.unwrap_or(false),
        })
    }

    fn handover(&self, reader: &mut Reader) -> Handover {
        let name = env::BACKEND_CREDENTIALS;
        match given(self.backend_credentials.as_ref(), name) {
            None | Some("outside") => Handover::Outside,
            Some("file") => Handover::InFile,
            Some(_) => reader
                .malformed(name, "`outside` or `file`")
                .unwrap_or(Handover::Outside),
        }
    }

    fn azure(&self, reader: &mut Reader) -> Option<AzureSettings> {
        let handover = self.handover(reader);
        let account = reader.name(
            env::AZURE_ACCOUNT,
            self.azure_account.as_ref(),
            is_account_name,
        );
        let container = reader.name(
            env::AZURE_CONTAINER,
            self.azure_container.as_ref(),
            is_bucket_name,
        );
        let key = reader.required(env::AZURE_ACCESS_KEY, self.azure_access_key.as_ref());
        let key = key.and_then(|key| match STANDARD.decode(key) {
            Ok(_) => Some(SecretString::from(key)),
            Err(_) => reader.malformed(env::AZURE_ACCESS_KEY, "base64, as account keys are"),
        });
        let account = account?;
        let endpoint = format!("https://{account}.blob.core.windows.net");
        Some(AzureSettings {
            access_key: key?,
            container: container?,
            handover,
            resource_group: given(
                self.azure_resource_group.as_ref(),
                env::AZURE_RESOURCE_GROUP,
            )
            .map(str::to_owned),
            endpoint: Url::parse(&endpoint).expect("names of accounts fit in a host"),
            account,
        })
    }

    fn gcs(&self, reader: &mut Reader) -> Option<GcsSettings> {
        let handover = self.handover(reader);
        let bucket = reader.name(env::GCP_BUCKET, self.gcp_bucket.as_ref(), is_bucket_name);
        let credentials = reader.required(env::GCP_CREDENTIALS, self.gcp_credentials.as_ref());
        let credentials = credentials.and_then(|text| match service_account(text) {
            Some(json) => Some(SecretString::from(json)),
            None => reader.malformed(
                env::GCP_CREDENTIALS,
                "base64 of a service account's JSON key",
            ),
        });
        Some(GcsSettings {
            bucket: bucket?,
            credentials: credentials?,
            handover,
            endpoint: Url::parse("https://storage.googleapis.com").expect("an address"),
        })
    }
}

/// The value of a setting, unless it is blank, or the placeholder a stock deployment leaves where nothing is set
/// (contract 10.1).
fn given<'v>(value: Option<&'v String>, name: &str) -> Option<&'v str> {
    let value = value?.trim();
    let is_placeholder = value
        .strip_prefix("${")
        .and_then(|rest| rest.strip_suffix('}'))
        .is_some_and(|inner| inner == name);
    (!value.is_empty() && !is_placeholder).then_some(value)
}

/// Reads settings and keeps what is wrong with them.
#[derive(Default)]
struct Reader {
    problems: Vec<Problem>,
}

impl Reader {
    fn none<T>(&mut self, problem: Problem) -> Option<T> {
        self.problems.push(problem);
        None
    }

    fn malformed<T>(&mut self, name: &'static str, expected: &'static str) -> Option<T> {
        self.none(Problem::Malformed { name, expected })
    }

    fn required<'v>(&mut self, name: &'static str, value: Option<&'v String>) -> Option<&'v str> {
        given(value, name).or_else(|| self.none(Problem::Missing { name }))
    }

    fn secret(&mut self, name: &'static str, value: Option<&String>) -> Option<SecretString> {
        self.required(name, value).map(SecretString::from)
    }

    fn name(
        &mut self,
        name: &'static str,
        value: Option<&String>,
        is_sound: fn(&str) -> bool,
    ) -> Option<String> {
        let value = self.required(name, value)?;
        if is_sound(value) {
            Some(value.to_owned())
        } else {
            self.malformed(name, "a name the service could have given")
        }
    }

    fn switch(&mut self, name: &'static str, value: Option<&String>) -> Option<bool> {
        match given(value, name)?.to_ascii_lowercase().as_str() {
            "true" => Some(true),
            "false" => Some(false),
            _ => self.none(Problem::NotABoolean { name }),
        }
    }

    fn endpoint(&mut self, name: &'static str, value: Option<&String>) -> Option<Endpoint> {
        let text = given(value, name)?;
        match Url::parse(text) {
            Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => {
                Some(Endpoint {
                    url,
                    text: text.to_owned(),
                })
            }
            _ => self.malformed(name, "an http or https address"),
        }
    }
}

/// Wider than any service's own rules, and narrow enough for hosts and paths.
fn is_bucket_name(text: &str) -> bool {
    let sound = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    text.len() <= 222 && text.bytes().all(sound) && !matches!(text, "." | "..")
}

fn is_region(text: &str) -> bool {
    text.len() <= 63
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
}

fn is_account_name(text: &str) -> bool {
    (3..=24).contains(&text.len())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

/// The parts without which a key signs nothing.
#[derive(Deserialize)]
struct ServiceAccount {
    #[serde(rename = "client_email")]
    _client_email: String,
    #[serde(rename = "private_key")]
    _private_key: String,
}

/// The JSON in a setting that may be broken over lines.
fn service_account(text: &str) -> Option<String> {
    let compact: String = text.split_whitespace().collect();
    let json = String::from_utf8(STANDARD.decode(compact).ok()?).ok()?;
    serde_json::from_str::<ServiceAccount>(&json).ok()?;
    Some(json)
}

#[cfg(test)]
mod tests;
