//! The settings with which the tool keeps a workspace's state in the same store. The executor passes them to the tool
//! (contract 6.1).

use std::path::PathBuf;

use secrecy::SecretString;

/// The name of the tool's backend for the state of a hub.
pub const HTTP: &str = "http";

/// Keys of an S3 account.
#[derive(Clone, Debug)]
pub struct StaticKeys {
    pub access_key: SecretString,
    pub secret_key: SecretString,
}

/// How a bucket of S3 is opened.
#[derive(Clone, Debug)]
pub enum S3Login {
    Keys(StaticKeys),
    /// A token in a file, for a role.
    WebIdentity {
        role: String,
        token_file: PathBuf,
    },
    /// The agent of EKS Pod Identity or ECS, which variables name.
    Container,
    /// What the tool finds itself.
    Ambient,
}

/// How a storage account of Azure is opened.
#[derive(Clone, Debug)]
pub enum AzureLogin {
    Key(SecretString),
    Identity(AzureIdentity),
}

/// An identity of Azure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AzureIdentity {
    /// An application that trusts the token in a file.
    Workload {
        client_id: String,
        tenant_id: String,
        token_file: PathBuf,
        authority: Option<String>,
    },
    /// The identity of the node, or the one of this id.
    Managed {
        client_id: Option<String>,
        /// Who hands tokens out instead of the node, as App Service and Container Apps do.
        endpoint: Option<String>,
    },
}

/// How a bucket of Google Cloud Storage is opened.
#[derive(Clone, Debug)]
pub enum GcsLogin {
    /// JSON of the service account.
    Key(SecretString),
    /// The file of application default credentials; without one, the metadata server of the node.
    Identity { document: Option<PathBuf> },
}

/// How the backend gets the store's credentials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Handover {
    /// Outside the work tree. A plan keeps a copy of the backend's arguments, so this also keeps them out of the plan.
    Outside,
    /// In the backend file, as the stock executor does it.
    InFile,
    /// The backend gets none: the tool finds credentials itself.
    Omitted,
}

/// Where the tool's own backend keeps one workspace's state.
#[derive(Clone, Debug)]
pub enum BackendSettings {
    /// The hub has the state. The executor serves it to the tool as [`Self::Http`].
    Hub,
    /// A server on loopback for this run alone.
    Http {
        address: String,
        user: String,
        password: SecretString,
    },
    /// A file.
    Local { path: PathBuf },
    /// An object in a bucket.
    S3 {
        bucket: String,
        region: String,
        key: String,
        login: S3Login,
        /// ARN of a role that this login assumes.
        role: Option<String>,
        handover: Handover,
        use_lockfile: bool,
        endpoint: Option<String>,
        /// Whether the bucket is in the path at the endpoint.
        path_style: bool,
    },
    /// A blob in the configured container for states.
    Azurerm {
        resource_group: Option<String>,
        account: String,
        container: String,
        key: String,
        login: AzureLogin,
        handover: Handover,
    },
    /// An object below a prefix; the backend appends the name of the tool's workspace.
    Gcs {
        bucket: String,
        prefix: String,
        login: GcsLogin,
        handover: Handover,
    },
}

impl BackendSettings {
    /// The name of the tool's backend.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Hub | Self::Http { .. } => HTTP,
            Self::Local { .. } => "local",
            Self::S3 { .. } => "s3",
            Self::Azurerm { .. } => "azurerm",
            Self::Gcs { .. } => "gcs",
        }
    }
}
