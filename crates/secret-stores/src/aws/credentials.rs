//! Credentials for AWS, from a source that the operator has chosen: keys, a web identity, the agent of EKS Pod Identity, or the
//! node. The chain is not that of the vendor's libraries: nothing of a run is looked at. Knows no secrets store.

use std::path::PathBuf;
use std::time::Duration;

use reqwest::{Method, Url};
use secrecy::SecretString;
use serde::Deserialize;

use super::sign::Keys;
use super::sts::{self, RoleSession};
use crate::error::{ErrorClass, ReadError};
use crate::http::{Http, Request};
use crate::login::Obtained;
use crate::lookup::Lookup;
use crate::reference::StoreKind;
use crate::token_file::token_of_file;

const CONTAINER_HOST: &str = "http://169.254.170.2";
const NODE: &str = "http://169.254.169.254";
/// A node answers at once. Elsewhere, nothing may listen at the address.
const NODE_TIMEOUT: Duration = Duration::from_secs(2);

/// Where the first credentials come from.
#[derive(Clone, Debug)]
pub enum Source {
    Keys(Keys),
    /// A token in a file, which AWS exchanges for a session of the role.
    WebIdentity {
        role: RoleSession,
        token_file: PathBuf,
    },
    /// EKS Pod Identity, or the agent of ECS.
    Container {
        url: Url,
        token_file: Option<PathBuf>,
    },
    /// The role of the node, by the second version of its metadata service.
    Node {
        base: Url,
    },
}

/// How to get credentials.
#[derive(Clone, Debug)]
pub struct AwsLogin {
    pub source: Source,
    /// A role that the first credentials may assume.
    pub assume: Option<RoleSession>,
    pub region: String,
}

/// The document of container agents and of nodes.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SessionDocument {
    access_key_id: String,
    secret_access_key: SecretString,
    token: SecretString,
    expiration: Option<String>,
}

impl Source {
    /// What the pod has: Pod Identity, a web identity, or the node if it may be used.
    pub fn of_pod(
        lookup: &Lookup<'_>,
        session_name: &str,
        allow_node: bool,
    ) -> Result<Self, String> {
        let url = match (
            lookup.text("AWS_CONTAINER_CREDENTIALS_FULL_URI"),
            lookup.text("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"),
        ) {
            (Some(url), _) => Some(url),
            (None, Some(path)) => Some(format!("{CONTAINER_HOST}{path}")),
            (None, None) => None,
        };
        if let Some(url) = url {
            let url = Url::parse(&url)
                .map_err(|_| "`AWS_CONTAINER_CREDENTIALS_FULL_URI` is no address".to_owned())?;
            let token_file = lookup.text("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
            return Ok(Self::Container {
                url,
                token_file: token_file.map(PathBuf::from),
            });
        }
        if let (Some(role), Some(file)) = (
            lookup.text("AWS_ROLE_ARN"),
            lookup.text("AWS_WEB_IDENTITY_TOKEN_FILE"),
        ) {
            return Ok(Self::WebIdentity {
                role: RoleSession::new(role, session_name),
                token_file: file.into(),
            });
        }
        if allow_node {
            let base = lookup.text("AWS_EC2_METADATA_SERVICE_ENDPOINT");
            let base = Url::parse(base.as_deref().unwrap_or(NODE));
            let base = base.map_err(|_| "`AWS_EC2_METADATA_SERVICE_ENDPOINT` is no address")?;
            return Ok(Self::Node { base });
        }
        Err("AWS has no login: there are no keys, no Pod Identity and no web identity, and the role of the node is not allowed".to_owned())
    }
}

impl AwsLogin {
    /// Obtains credentials, with the time of their end.
    pub async fn obtain(&self, http: &Http) -> Obtained<Keys> {
        let first = match &self.source {
            Source::Keys(keys) => (keys.clone(), None),
            Source::WebIdentity { role, token_file } => {
                let token = token_of_file(token_file, StoreKind::Aws).await?;
                sts::assume_role_with_web_identity(http, &self.region, role, &token).await?
            }
            Source::Container { url, token_file } => {
                let mut request = Request::new(Method::GET, url.clone());
                if let Some(file) = token_file {
                    let token = token_of_file(file, StoreKind::Aws).await?;
                    request = request.header("authorization", token);
                }
                session(http, &request).await?
            }
            Source::Node { base } => of_node(http, base).await?,
        };
        match &self.assume {
            None => Ok(first),
            Some(role) => sts::assume_role(http, &self.region, role, &first.0).await,
        }
    }
}

async fn session(http: &Http, request: &Request) -> Obtained<Keys> {
    let answer = http
        .send_at_most(StoreKind::Aws, request, NODE_TIMEOUT * 2)
        .await?;
    if !answer.is_success() {
        return Err(answer.login_refused(StoreKind::Aws, ""));
    }
    let document: SessionDocument = answer.json(StoreKind::Aws)?;
    let ends = document
        .expiration
        .and_then(|time| humantime::parse_rfc3339(&time).ok());
    let keys = Keys {
        access_key_id: document.access_key_id,
        secret_access_key: document.secret_access_key,
        session_token: Some(document.token),
    };
    Ok((keys, ends))
}

async fn of_node(http: &Http, base: &Url) -> Obtained<Keys> {
    let at = |path: &str| {
        let mut url = base.clone();
        url.set_path(path);
        url
    };
    let text = async |request: Request| -> Result<String, ReadError> {
        let answer = http
            .send_at_most(StoreKind::Aws, &request, NODE_TIMEOUT)
            .await?;
        let text = answer.text().filter(|_| answer.is_success());
        let refused = || answer.refused(StoreKind::Aws, ErrorClass::CredentialsRejected, "");
        text.map(|text| text.trim().to_owned()).ok_or_else(refused)
    };
    let ask = Request::new(Method::PUT, at("latest/api/token"));
    let token = text(ask.header("x-aws-ec2-metadata-token-ttl-seconds", "300")).await?;
    let with_token = |path: &str| {
        Request::new(Method::GET, at(path)).header("x-aws-ec2-metadata-token", token.clone())
    };
    let folder = "latest/meta-data/iam/security-credentials";
    let role = text(with_token(&format!("{folder}/"))).await?;
    let role = role.lines().next().unwrap_or_default();
    session(http, &with_token(&format!("{folder}/{role}"))).await
}
