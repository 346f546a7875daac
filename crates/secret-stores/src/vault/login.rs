//! Logins at Vault, each by one method.

use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::{Method, Url};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::client::{Client, STORE};
use crate::aws::credentials::AwsLogin;
use crate::aws::sign::{Scope, host, sign};
use crate::error::ReadError;
use crate::token_file::token_of_file;

/// Where Vault sends the signed request of a login by AWS, unless its operator has changed that.
const STS: &str = "https://sts.amazonaws.com/";
const STS_REGION: &str = "us-east-1";
const STS_BODY: &str = "Action=GetCallerIdentity&Version=2011-06-15";
const STS_MEDIA_TYPE: &str = "application/x-www-form-urlencoded; charset=utf-8";

/// The method of a login, with what it needs.
#[derive(Clone, Debug)]
pub(crate) enum VaultLogin {
    Token(SecretString),
    Password {
        user: String,
        password: SecretString,
    },
    /// The certificate of the client is in its connections.
    Certificate {
        name: Option<String>,
    },
    /// The methods `kubernetes` and `jwt`.
    Jwt {
        role: String,
        token_file: PathBuf,
    },
    AppRole {
        role_id: SecretString,
        secret_id: SecretString,
    },
    Aws {
        role: Option<String>,
        login: Box<AwsLogin>,
        server_id: Option<String>,
    },
}

/// A token of Vault.
#[derive(Debug)]
pub(super) struct VaultToken {
    pub(super) token: SecretString,
    pub(super) obtained: Instant,
    pub(super) seconds: u64,
    pub(super) is_renewable: bool,
    /// Whether it was obtained for this run, and so ends with it.
    pub(super) is_ours: bool,
}

impl VaultToken {
    /// Whether the time that it was given is over. It may have got more.
    pub(super) fn is_over(&self) -> bool {
        self.seconds > 0 && self.obtained.elapsed() >= Duration::from_secs(self.seconds)
    }
}

#[derive(Deserialize)]
struct LoginAnswer {
    auth: Auth,
}

#[derive(Deserialize)]
struct Auth {
    client_token: SecretString,
    #[serde(default)]
    lease_duration: u64,
    #[serde(default)]
    renewable: bool,
}

/// Obtains a token in a namespace.
pub(super) async fn obtain(
    client: &Client,
    login: &VaultLogin,
    mount: &str,
    namespace: &str,
) -> Result<VaultToken, ReadError> {
    let obtained = Instant::now();
    let mut path = format!("auth/{mount}/login");
    let document = match login {
        VaultLogin::Token(token) => {
            return Ok(VaultToken {
                token: token.clone(),
                obtained,
                seconds: 0,
                is_renewable: false,
                is_ours: false,
            });
        }
        VaultLogin::Password { user, password } => {
            // No user leaves its place in the path.
            path = format!("{path}/{}", user.replace('/', "%2F"));
            json!({ "password": password.expose_secret() })
        }
        VaultLogin::Certificate { name } => match name {
            Some(name) => json!({ "name": name }),
            None => json!({}),
        },
        VaultLogin::Jwt { role, token_file } => {
            let token = token_of_file(token_file, STORE).await?;
            json!({ "role": role, "jwt": token.expose_secret() })
        }
        VaultLogin::AppRole { role_id, secret_id } => json!({
            "role_id": role_id.expose_secret(),
            "secret_id": secret_id.expose_secret(),
        }),
        VaultLogin::Aws {
            role,
            login,
            server_id,
        } => by_aws(client, role.as_deref(), login, server_id.as_deref()).await?,
    };
    let request = client.request(Method::POST, &path, namespace, None)?;
    let answer = client.send(&request.json(&document)).await?;
    if !answer.is_success() {
        let code = if answer.status == 503 { "sealed" } else { "" };
        return Err(answer.login_refused(STORE, code));
    }
    let LoginAnswer { auth } = answer.json(STORE)?;
    Ok(VaultToken {
        token: auth.client_token,
        obtained,
        seconds: auth.lease_duration,
        is_renewable: auth.renewable,
        is_ours: true,
    })
}

/// A signed request that Vault sends to AWS, to learn whose it is.
async fn by_aws(
    client: &Client,
    role: Option<&str>,
    login: &AwsLogin,
    server_id: Option<&str>,
) -> Result<Value, ReadError> {
    let (keys, _) = login
        .obtain(&client.http)
        .await
        .map_err(|error| ReadError {
            store: STORE,
            ..error
        })?;
    let url = Url::parse(STS).expect("an address");
    let mut headers = vec![("content-type", STS_MEDIA_TYPE)];
    headers.extend(server_id.map(|id| ("x-vault-aws-iam-server-id", id)));
    let scope = Scope {
        region: STS_REGION,
        service: "sts",
    };
    let signed = sign(&url, &headers, STS_BODY, &keys, scope, SystemTime::now());
    let mut all: Map<String, Value> = signed
        .into_iter()
        .map(|(name, value)| (name.to_owned(), json!([value])))
        .collect();
    all.insert("host".to_owned(), json!([host(&url)]));
    Ok(json!({
        "role": role,
        "iam_http_request_method": "POST",
        "iam_request_url": STANDARD.encode(STS),
        "iam_request_body": STANDARD.encode(STS_BODY),
        "iam_request_headers": STANDARD.encode(Value::from(all).to_string()),
    }))
}
