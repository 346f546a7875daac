//! Vault and `OpenBao`: key-value engines of both versions and all other engines that answer to a read.

mod client;
mod lease;
mod login;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::{Method, Url};
use runtime::lock;
use serde::Deserialize;
use serde_json::{Map, Value};
use tracing::warn;

use self::client::{Client, STORE};
use self::lease::{Lease, Leases};
pub(crate) use self::login::VaultLogin;
use self::login::VaultToken;
use crate::error::{ErrorClass, ReadError};
use crate::http::{Answer, TlsSettings};
use crate::login::{Login, Obtained};
use crate::value::SecretValue;

/// How long the end of a run waits for Vault.
const END_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub(crate) struct VaultSettings {
    pub(crate) address: Url,
    /// The namespace of references that name none.
    pub(crate) namespace: Option<String>,
    /// Where the login is; `None`: in the namespace of the reference.
    pub(crate) login_namespace: Option<String>,
    pub(crate) login: VaultLogin,
    /// The mount of the login.
    pub(crate) mount: String,
    /// What is assumed if Vault does not say how a path is mounted.
    pub(crate) kv_version: Option<u8>,
    pub(crate) kv_mount: Option<String>,
    pub(crate) tls: TlsSettings,
}

/// Reads secrets of Vault, and keeps what Vault lends.
#[derive(Debug)]
pub(crate) struct Vault {
    client: Client,
    settings: VaultSettings,
    /// By the namespace of the login.
    tokens: Mutex<BTreeMap<String, Arc<Login<VaultToken>>>>,
    leases: Leases,
}

/// How a path is mounted.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    /// With a slash at its end.
    path: String,
    is_kv2: bool,
}

#[derive(Deserialize)]
struct MountAnswer {
    data: MountData,
}

#[derive(Deserialize)]
struct MountData {
    path: String,
    #[serde(rename = "type")]
    engine: String,
    options: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct SecretAnswer {
    #[serde(default)]
    lease_id: String,
    #[serde(default)]
    lease_duration: u64,
    #[serde(default)]
    renewable: bool,
    data: Option<Map<String, Value>>,
}

impl Vault {
    /// # Errors
    /// Says which certificates cannot be used.
    pub(crate) fn new(settings: VaultSettings) -> Result<Self, String> {
        let client = Client::new(settings.address.clone(), &settings.tls)?;
        Ok(Self {
            leases: Leases::new(client.clone()),
            client,
            settings,
            tokens: Mutex::default(),
        })
    }

    fn login(&self, namespace: &str) -> (String, Arc<Login<VaultToken>>) {
        let place = self.settings.login_namespace.as_deref();
        let place = place.unwrap_or(namespace);
        let mut tokens = lock(&self.tokens);
        let login = Arc::clone(tokens.entry(place.to_owned()).or_default());
        (place.to_owned(), login)
    }

    async fn obtain(&self, place: &str) -> Obtained<VaultToken> {
        let (method, mount) = (&self.settings.login, self.settings.mount.trim_matches('/'));
        let token = login::obtain(&self.client, method, mount, place).await?;
        Ok((token, None))
    }

    /// Whether the token's own time is over. Those that have leases are renewed.
    fn has_ended(&self, token: &Arc<VaultToken>) -> bool {
        token.is_over() && !self.leases.need(token)
    }

    pub(crate) async fn read(
        &self,
        path: &str,
        namespace: Option<&str>,
        version: Option<u32>,
    ) -> Result<SecretValue, ReadError> {
        let namespace = namespace.or(self.settings.namespace.as_deref());
        let namespace = namespace.unwrap_or_default();
        let (place, login) = self.login(namespace);
        let attempt = async |token: &Arc<VaultToken>| {
            let read = self.read_with(path, namespace, version, &place, token);
            // Vault says the same of a token that has ended and of what a policy forbids.
            read.await.map_err(|error| {
                if error.class == ErrorClass::Denied && self.has_ended(token) {
                    let class = ErrorClass::CredentialsRejected;
                    return ReadError { class, ..error };
                }
                error
            })
        };
        login
            .with(async || self.obtain(&place).await, attempt)
            .await
    }

    async fn read_with(
        &self,
        path: &str,
        namespace: &str,
        version: Option<u32>,
        place: &str,
        token: &Arc<VaultToken>,
    ) -> Result<SecretValue, ReadError> {
        let mount = self.mount_of(path, namespace, token).await?;
        let is_kv2 = mount.as_ref().is_some_and(|mount| mount.is_kv2);
        let mut request = self.client.request(
            Method::GET,
            &data_path(path, mount.as_ref()),
            namespace,
            Some(&token.token),
        )?;
        match version {
            Some(version) if is_kv2 => {
                request
                    .url
                    .query_pairs_mut()
                    .append_pair("version", &version.to_string());
            }
            Some(_) => {
                let detail = "only version 2 of the key-value engine has versions";
                return Err(ReadError::new(STORE, ErrorClass::Unusable, detail));
            }
            None => {}
        }
        let answer = self.client.send(&request).await?;
        if !answer.is_success() {
            return Err(refused(&answer, is_kv2));
        }
        let answer_is_foreign = || answer.foreign(STORE);
        let secret: SecretAnswer = answer.json(STORE)?;
        if !secret.lease_id.is_empty() {
            self.leases.add(Lease {
                id: secret.lease_id,
                namespace: namespace.to_owned(),
                seconds: secret.lease_duration,
                is_renewable: secret.renewable,
                token: Arc::clone(token),
                token_namespace: place.to_owned(),
            });
        }
        let mut members = secret.data.ok_or_else(answer_is_foreign)?;
        if is_kv2 {
            members = match members.remove("data") {
                Some(Value::Object(members)) => members,
                _ => return Err(answer_is_foreign()),
            };
        }
        Ok(SecretValue::Members(members))
    }

    /// How the path is mounted; `None` if it is to be read as it is. Vault's answer carries no promise, so it may be missing.
    async fn mount_of(
        &self,
        path: &str,
        namespace: &str,
        token: &VaultToken,
    ) -> Result<Option<Mount>, ReadError> {
        let ask = format!("sys/internal/ui/mounts/{path}");
        let request = self
            .client
            .request(Method::GET, &ask, namespace, Some(&token.token))?;
        let answer = self.client.send(&request).await?;
        if answer.is_success() {
            let mount: MountAnswer = answer.json(STORE)?;
            if !path.starts_with(&mount.data.path) {
                refuse_system(path)?;
            }
            let version = mount
                .data
                .options
                .and_then(|mut options| options.remove("version"));
            let is_kv = ["kv", "generic"].contains(&&*mount.data.engine);
            return Ok(Some(Mount {
                path: mount.data.path,
                is_kv2: is_kv && version.as_deref() == Some("2"),
            }));
        }
        match answer.status {
            400..=499 if answer.status != 429 => {
                refuse_system(path)?;
                let settings = &self.settings;
                Ok(settings.kv_version.map(|version| {
                    let first = || path.split('/').next().unwrap_or_default().to_owned();
                    let mount = settings.kv_mount.clone().unwrap_or_else(first);
                    let mount = format!("{}/", mount.trim_matches('/'));
                    Mount {
                        is_kv2: version == 2 && path.starts_with(&mount),
                        path: mount,
                    }
                }))
            }
            _ => Err(refused(&answer, false)),
        }
    }

    /// Ends the reads of one stage: what is lent is kept until the end, and what is not needed any more is given back.
    pub(crate) async fn end_reads(&self) {
        if !self.leases.keep() {
            self.give_back().await;
        }
    }

    /// Gives everything back.
    pub(crate) async fn finish(&self) {
        self.leases.stop();
        self.give_back().await;
    }

    async fn give_back(&self) {
        let ending = async {
            self.leases.revoke_those_of_others().await;
            let tokens = std::mem::take(&mut *lock(&self.tokens));
            for (place, login) in tokens {
                let Some(token) = login.take().await.filter(|token| token.is_ours) else {
                    continue;
                };
                // It takes its leases with it.
                let path = "auth/token/revoke-self";
                let Ok(request) =
                    self.client
                        .request(Method::POST, path, &place, Some(&token.token))
                else {
                    continue;
                };
                match self.client.send(&request).await {
                    // Batch tokens cannot be revoked.
                    Ok(answer) if answer.is_success() || answer.status == 400 => {}
                    Ok(answer) => warn!(
                        status = answer.status,
                        "Vault did not revoke the token of the run"
                    ),
                    Err(error) => warn!(%error, "the token of the run could not be revoked"),
                }
            }
        };
        if tokio::time::timeout(END_TIMEOUT, ending).await.is_err() {
            warn!("Vault did not revoke the token of the run in time");
        }
    }

    /// Proves the login without reading a secret.
    pub(crate) async fn check(&self) -> Result<String, ReadError> {
        let namespace = self.settings.namespace.clone().unwrap_or_default();
        let (place, login) = self.login(&namespace);
        let token = login.get(self.obtain(&place)).await?;
        let path = "auth/token/lookup-self";
        let request = self
            .client
            .request(Method::GET, path, &place, Some(&token.token))?;
        let answer = self.client.send(&request).await?;
        if !answer.is_success() {
            return Err(answer.login_refused(STORE, ""));
        }
        let name = answer.document().unwrap_or_default()["data"]["display_name"]
            .as_str()
            .map(str::to_owned);
        Ok(name.unwrap_or_else(|| "a token".to_owned()))
    }
}

/// Refuses a path that may lead to Vault itself: it may begin with a namespace, so that `auth/token/lookup-self`, which shows the
/// token, is behind it.
fn refuse_system(path: &str) -> Result<(), ReadError> {
    if path.split('/').any(|part| ["sys", "auth"].contains(&part)) {
        let detail = "a path with `sys` or `auth` of which Vault does not say how it is mounted";
        return Err(ReadError::new(STORE, ErrorClass::Denied, detail));
    }
    Ok(())
}

/// Where the secret is, below `v1`.
fn data_path(path: &str, mount: Option<&Mount>) -> String {
    let Some(mount) = mount.filter(|mount| mount.is_kv2) else {
        return path.to_owned();
    };
    let place = &mount.path;
    match path.strip_prefix(place.as_str()) {
        Some(rest) if !rest.starts_with("data/") => format!("{place}data/{rest}"),
        _ => path.to_owned(),
    }
}

fn refused(answer: &Answer, is_kv2: bool) -> ReadError {
    let class = match answer.status {
        404 if is_kv2 => {
            let document = answer.document().unwrap_or_default();
            let deleted = document["data"]["metadata"]["deletion_time"].as_str();
            if deleted.is_some_and(|time| !time.is_empty()) {
                ErrorClass::Disabled
            } else {
                ErrorClass::NotFound
            }
        }
        412 => ErrorClass::Unavailable,
        _ => answer.usual_class(),
    };
    let code = if answer.status == 503 { "sealed" } else { "" };
    answer.refused(STORE, class, code)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("kv/team/app", "kv/", true, "kv/data/team/app")]
    #[case("kv/data/team/app", "kv/", true, "kv/data/team/app")]
    #[case("kv/data", "kv/", true, "kv/data/data")]
    #[case("a/b/c", "a/b/", true, "a/b/data/c")]
    #[case("kv/team/app", "kv/", false, "kv/team/app")]
    fn the_second_version_has_a_folder_of_data(
        #[case] path: &str,
        #[case] mount: &str,
        #[case] is_kv2: bool,
        #[case] expected: &str,
    ) {
        let mount = Mount {
            path: mount.to_owned(),
            is_kv2,
        };
        assert_eq!(data_path(path, Some(&mount)), expected);
        assert_eq!(data_path(path, None), path);
    }
}
