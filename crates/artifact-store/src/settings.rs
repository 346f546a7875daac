//! The settings of the store, under the names that the stock executor reads (contract 10.1).

use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use job_contract::env;
use job_contract::identity::is_role;
use runtime::setting::{HttpUrl, ReadSetting as _, Setting, SettingError, SettingValue, choice};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use url::Url;

use crate::state_backend::{AzureIdentity, AzureLogin, GcsLogin, Handover, StaticKeys};

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

    /// The value of `TerraformStateType`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "LocalTerraformStateImpl",
            Self::S3 => "AwsTerraformStateImpl",
            Self::Azure => "AzureTerraformStateImpl",
            Self::Gcs => "GcpTerraformStateImpl",
        }
    }

    /// Other names that people use.
    const fn aliases(self) -> &'static [&'static str] {
        match self {
            Self::Local => &["local", "file"],
            Self::S3 => &["aws", "s3", "amazon", "minio"],
            Self::Azure => &["azure", "azurerm", "blob"],
            Self::Gcs => &["gcp", "gcs", "google"],
        }
    }

    /// The most likely kind for a wrong spelling.
    fn guess(text: &str) -> Option<Self> {
        let text = text.to_ascii_lowercase();
        let means = |kind: &Self| kind.aliases().iter().any(|alias| text.starts_with(alias));
        Self::ALL.into_iter().find(means)
    }
}

impl SettingValue for StoreKind {
    fn parse(text: &str) -> Result<Self, String> {
        let known = Self::ALL.into_iter().find(|kind| kind.name() == text);
        known.ok_or_else(|| {
            if let Some(kind) = Self::guess(text) {
                return format!("is `{text}`, which is spelt `{}`", kind.name());
            }
            let names = Self::ALL.map(|kind| format!("`{}`", kind.name()));
            format!("is `{text}`, which is none of {}", names.join(", "))
        })
    }
}

impl SettingValue for Handover {
    fn parse(text: &str) -> Result<Self, String> {
        match text {
            "outside" => Ok(Self::Outside),
            "file" => Ok(Self::InFile),
            _ => Err(format!("is `{text}`, expected `outside` or `file`")),
        }
    }
}

/// Defines names of a service that are safe in host names and paths.
macro_rules! service_names {
    ($($(#[$doc:meta])* $name:ident($is_valid:expr);)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct $name(String);

        impl SettingValue for $name {
            fn parse(text: &str) -> Result<Self, String> {
                let is_valid: fn(&str) -> bool = $is_valid;
                if is_valid(text) {
                    Ok(Self(text.to_owned()))
                } else {
                    Err(format!("is `{text}`, which is no valid name"))
                }
            }
        }
    )*};
}

service_names! {
    /// Name of a bucket or a container. Wider than the rules of each service.
    BucketName(|text| {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
        text.len() <= 222 && text.bytes().all(is_allowed) && !matches!(text, "." | "..")
    });
    /// Name of a region.
    Region(|text| {
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
        text.len() <= 63 && text.bytes().all(is_allowed)
    });
    /// Name of a storage account.
    AccountName(|text| {
        let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        (3..=24).contains(&text.len()) && text.bytes().all(is_allowed)
    });
}

/// A value that the platform reads with Spring, which knows more words than others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpringBool(bool);

impl SettingValue for SpringBool {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [("true", "false"), ("yes", "no"), ("on", "off"), ("1", "0")];
        let choices = words.map(|(on, off)| [(on, Self(true)), (off, Self(false))]);
        choice(text, choices.as_flattened())
    }
}

/// ARN of a role.
#[derive(Clone, Debug)]
pub struct RoleArn(String);

impl SettingValue for RoleArn {
    fn parse(text: &str) -> Result<Self, String> {
        if is_role(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!("is `{text}`, which is no ARN of a role"))
        }
    }
}

/// Settings of the store as text. [`StoreArgs::resolve`] checks them.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Storage")]
pub struct StoreArgs {
    /// Where plans, state and logs are kept: `LocalTerraformStateImpl`, `AwsTerraformStateImpl`,
    /// `AzureTerraformStateImpl` or `GcpTerraformStateImpl` [default: the store of the hub that relays the requests of the run,
    /// without one `LocalTerraformStateImpl`].
    #[arg(long, env = env::STATE_TYPE)]
    pub state_type: Option<Setting<StoreKind>>,
    /// Bucket on S3.
    #[arg(long, env = env::AWS_BUCKET)]
    pub aws_bucket: Option<Setting<BucketName>>,
    /// Region of the bucket.
    #[arg(long, env = env::AWS_REGION)]
    pub aws_region: Option<Setting<Region>>,
    /// Access key id.
    #[arg(long, env = env::AWS_ACCESS_KEY, hide_env_values = true, hide = true)]
    pub aws_access_key: Option<Setting<SecretString>>,
    /// Secret access key.
    #[arg(long, env = env::AWS_SECRET_KEY, hide_env_values = true, hide = true)]
    pub aws_secret_key: Option<Setting<SecretString>>,
    /// Address of an S3 service other than AWS.
    #[arg(long, env = env::AWS_ENDPOINT)]
    pub aws_endpoint: Option<Setting<HttpUrl>>,
    /// Region in the signatures of requests to --aws-endpoint [default: auto].
    #[arg(long, env = env::AWS_ENDPOINT_REGION)]
    pub aws_endpoint_region: Option<Setting<Region>>,
    /// `false` puts the name of the bucket into the host of --aws-endpoint, and not into its path [default: true].
    #[arg(long, env = env::AWS_PATH_STYLE)]
    pub aws_path_style_access: Option<Setting<SpringBool>>,
    /// Accepted, not needed: bodies are never sent in signed chunks.
    #[arg(long, env = env::AWS_CHUNKED_ENCODING)]
    pub aws_chunked_encoding_enabled: Option<Setting<String>>,
    /// Accepted, not needed: checksums of the service are never asked for.
    #[arg(long, env = env::AWS_CHECKSUM_VALIDATION)]
    pub aws_checksum_validation_enabled: Option<Setting<String>>,
    /// `true` takes credentials from the environment of the process or the machine instead of keys.
    #[arg(long, env = env::AWS_ENABLE_ROLE_AUTH)]
    pub aws_enable_role_auth: Option<Setting<bool>>,
    /// `true` writes the keys into the backend file, `false` leaves the tool to find credentials itself
    /// [default: follows from --backend-credentials].
    #[arg(long, env = env::AWS_INCLUDE_BACKEND_KEYS)]
    pub aws_include_backend_keys: Option<Setting<bool>>,
    /// ARN of a role that the keys or the credentials of the environment assume to use the bucket.
    #[arg(long, env = env::STORE_AWS_ROLE)]
    pub store_aws_role_arn: Option<Setting<RoleArn>>,
    /// `true` locks states with objects in the bucket.
    #[arg(long, env = env::AWS_USE_LOCKFILE)]
    pub aws_use_lockfile: Option<Setting<bool>>,
    /// How the tool's backend gets the store's credentials: `outside` the work tree and the plan, or in the
    /// backend `file`, as the stock executor does it.
    #[arg(long, env = env::BACKEND_CREDENTIALS)]
    pub backend_credentials: Option<Setting<Handover>>,
    /// Storage account on Azure.
    #[arg(long, env = env::AZURE_ACCOUNT)]
    pub azure_account: Option<Setting<AccountName>>,
    /// Resource group of the storage account.
    #[arg(long, env = env::AZURE_RESOURCE_GROUP)]
    pub azure_resource_group: Option<Setting<String>>,
    /// Container of the workspaces' current states.
    #[arg(long, env = env::AZURE_CONTAINER)]
    pub azure_container: Option<Setting<BucketName>>,
    /// Key of the storage account.
    #[arg(long, env = env::AZURE_ACCESS_KEY, hide_env_values = true, hide = true)]
    pub azure_access_key: Option<Setting<SecretString>>,
    /// `true` takes the identity of the pod or of the node instead of the account's key.
    #[arg(long, env = env::STORE_AZURE_IDENTITY)]
    pub store_azure_identity: Option<Setting<bool>>,
    /// Bucket on Google Cloud Storage.
    #[arg(long, env = env::GCP_BUCKET)]
    pub gcp_bucket: Option<Setting<BucketName>>,
    /// Project of the bucket; accepted, not needed.
    #[arg(long, env = env::GCP_PROJECT)]
    pub gcp_project: Option<Setting<String>>,
    /// Key of the service account: base64 of its JSON.
    #[arg(long, env = env::GCP_CREDENTIALS, hide_env_values = true, hide = true)]
    pub gcp_credentials: Option<Setting<SecretString>>,
    /// `true` takes application default credentials, or the identity of the node, instead of a key.
    #[arg(long, env = env::STORE_GCP_IDENTITY)]
    pub store_gcp_identity: Option<Setting<bool>>,
}

/// The checked settings of a store.
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
    /// The tool's backend gets the text as the operator wrote it.
    pub endpoint: Option<HttpUrl>,
    /// The region in signatures for the endpoint.
    pub endpoint_region: Option<String>,
    /// Whether the bucket is in the path at the endpoint, and not in its host.
    pub path_style: bool,
    pub credentials: S3Credentials,
    /// ARN of a role that these credentials assume.
    pub role: Option<String>,
    pub handover: Handover,
    pub use_lockfile: bool,
}

/// The credentials for a bucket.
#[derive(Clone, Debug)]
pub enum S3Credentials {
    Keys(StaticKeys),
    /// The process finds credentials in its environment.
    Role,
}

/// A storage account.
#[derive(Clone, Debug)]
pub struct AzureSettings {
    pub account: String,
    pub login: AzureLogin,
    /// Container of backend states.
    pub container: String,
    pub resource_group: Option<String>,
    pub handover: Handover,
    pub endpoint: Url,
}

/// A bucket of Google Cloud Storage.
#[derive(Clone, Debug)]
pub struct GcsSettings {
    pub bucket: String,
    pub login: GcsLogin,
    pub handover: Handover,
    pub endpoint: Url,
}

/// The identity that a pod or the environment offers for Azure.
fn azure_identity(own: impl Fn(&str) -> Option<String>) -> AzureIdentity {
    let own = |name: &str| own(name).filter(|value| !value.is_empty());
    let client_id = own("AZURE_CLIENT_ID");
    match (
        client_id,
        own("AZURE_TENANT_ID"),
        own("AZURE_FEDERATED_TOKEN_FILE"),
    ) {
        (Some(client_id), Some(tenant_id), Some(file)) => AzureIdentity::Workload {
            client_id,
            tenant_id,
            token_file: file.into(),
            authority: own("AZURE_AUTHORITY_HOST"),
        },
        (client_id, _, _) => AzureIdentity::Managed {
            client_id,
            // The client reads the header itself. Azure Arc has no header, and asks for something else.
            endpoint: own("IDENTITY_ENDPOINT").filter(|_| own("IDENTITY_HEADER").is_some()),
        },
    }
}

/// All problems of the store's settings. Values of credentials are left out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the store cannot be used: {}", list(errors))]
pub struct StoreConfigError {
    pub errors: Vec<SettingError>,
}

fn list(errors: &[SettingError]) -> String {
    let texts: Vec<_> = errors.iter().map(SettingError::to_string).collect();
    texts.join("; ")
}

impl StoreConfigError {
    /// The next step for the operator.
    pub fn hint(&self) -> String {
        let errors = self.errors.iter();
        let names: Vec<_> = errors
            .map(|error| format!("`{}`", error.variable))
            .collect();
        format!("set in the environment: {}", names.join(", "))
    }
}

impl StoreArgs {
    /// Whether the store is on this machine.
    pub fn is_local(&self) -> bool {
        match self.state_type.get() {
            Some(kind) => *kind == StoreKind::Local,
            None => !self.state_type.is_set(),
        }
    }

    /// The checked settings, or all their problems.
    pub fn resolve(&self, data_dir: &Path) -> Result<StoreSettings, StoreConfigError> {
        let mut errors = Vec::new();
        let kind = self.state_type.read(&mut errors);
        let settings = match kind.unwrap_or(StoreKind::Local) {
            StoreKind::Local => Some(StoreSettings::Local {
                data_dir: data_dir.to_owned(),
            }),
            StoreKind::S3 => self.s3(&mut errors).map(StoreSettings::S3),
            StoreKind::Azure => self.azure(&mut errors).map(StoreSettings::Azure),
            StoreKind::Gcs => self.gcs(&mut errors).map(StoreSettings::Gcs),
        };
        settings
            .filter(|_| errors.is_empty())
            .ok_or(StoreConfigError { errors })
    }

    /// Reads every setting before the first missing one ends the function, so that all errors are reported at once. The
    /// other kinds do the same.
    fn s3(&self, errors: &mut Vec<SettingError>) -> Option<S3Settings> {
        let role = self.aws_enable_role_auth.read(errors);
        let include_keys = self.aws_include_backend_keys.read(errors);
        let handover = self.handover(errors);
        let use_lockfile = self.aws_use_lockfile.read(errors);
        let bucket = self.aws_bucket.require(env::AWS_BUCKET, errors);
        let region = self.aws_region.require(env::AWS_REGION, errors);
        let endpoint = self.aws_endpoint.read(errors);
        let endpoint_region = self.aws_endpoint_region.read(errors);
        let path_style = self.aws_path_style_access.read(errors);
        let assumed = self.store_aws_role_arn.read(errors);
        let credentials = if role == Some(true) {
            Some(S3Credentials::Role)
        } else {
            let access = self.aws_access_key.require(env::AWS_ACCESS_KEY, errors);
            let secret = self.aws_secret_key.require(env::AWS_SECRET_KEY, errors);
            access.zip(secret).map(|(access_key, secret_key)| {
                S3Credentials::Keys(StaticKeys {
                    access_key,
                    secret_key,
                })
            })
        };
        Some(S3Settings {
            bucket: bucket?.0,
            region: region?.0,
            endpoint,
            endpoint_region: endpoint_region.map(|region| region.0),
            path_style: path_style.is_none_or(|SpringBool(is_on)| is_on),
            credentials: credentials?,
            role: assumed.map(|role| role.0),
            handover: match (role, include_keys) {
                (_, Some(false)) => Handover::Omitted,
                (Some(true), _) => Handover::Outside,
                (_, Some(true)) => Handover::InFile,
                (_, None) => handover,
            },
            use_lockfile: use_lockfile.unwrap_or(false),
        })
    }

    fn handover(&self, errors: &mut Vec<SettingError>) -> Handover {
        let handover = self.backend_credentials.read(errors);
        handover.unwrap_or(Handover::Outside)
    }

    fn azure(&self, errors: &mut Vec<SettingError>) -> Option<AzureSettings> {
        let handover = self.handover(errors);
        let account = self.azure_account.require(env::AZURE_ACCOUNT, errors);
        let container = self.azure_container.require(env::AZURE_CONTAINER, errors);
        let login = if self.store_azure_identity.read(errors) == Some(true) {
            let identity = azure_identity(|name| std::env::var(name).ok());
            Some(AzureLogin::Identity(identity))
        } else {
            let key = self.azure_access_key.require(env::AZURE_ACCESS_KEY, errors);
            let is_base64 = |key: &SecretString| STANDARD.decode(key.expose_secret()).is_ok();
            if key.as_ref().is_some_and(|key| !is_base64(key)) {
                let text = "is not base64, as account keys are";
                errors.push(SettingError::new(env::AZURE_ACCESS_KEY, text));
            }
            key.map(AzureLogin::Key)
        };
        let resource_group = self.azure_resource_group.read(errors);
        let AccountName(account) = account?;
        let endpoint = format!("https://{account}.blob.core.windows.net");
        Some(AzureSettings {
            login: login?,
            container: container?.0,
            handover,
            resource_group,
            endpoint: Url::parse(&endpoint).expect("names of accounts fit in a host"),
            account,
        })
    }

    fn gcs(&self, errors: &mut Vec<SettingError>) -> Option<GcsSettings> {
        let handover = self.handover(errors);
        let bucket = self.gcp_bucket.require(env::GCP_BUCKET, errors);
        let login = if self.store_gcp_identity.read(errors) == Some(true) {
            let named = std::env::var_os("GOOGLE_APPLICATION_CREDENTIALS");
            let document = named.filter(|path| !path.is_empty()).map(PathBuf::from);
            GcsLogin::Identity { document }
        } else {
            let credentials = self.gcp_credentials.require(env::GCP_CREDENTIALS, errors)?;
            let Some(credentials) = service_account(credentials.expose_secret()) else {
                let text = "is not base64 of a service account's JSON key";
                errors.push(SettingError::new(env::GCP_CREDENTIALS, text));
                return None;
            };
            GcsLogin::Key(SecretString::from(credentials))
        };
        Some(GcsSettings {
            bucket: bucket?.0,
            login,
            handover,
            endpoint: Url::parse("https://storage.googleapis.com").expect("an address"),
        })
    }
}

/// The fields that a service account's key needs for signing.
#[derive(Deserialize)]
struct ServiceAccount {
    #[serde(rename = "client_email")]
    _client_email: String,
    #[serde(rename = "private_key")]
    _private_key: String,
}

/// Decodes the JSON of a service account. Its base64 text may have line breaks.
fn service_account(text: &str) -> Option<String> {
    let compact: String = text.split_whitespace().collect();
    let json = String::from_utf8(STANDARD.decode(compact).ok()?).ok()?;
    serde_json::from_str::<ServiceAccount>(&json).ok()?;
    Some(json)
}

#[cfg(test)]
mod tests;
