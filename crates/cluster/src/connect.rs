//! Makes a client. The configuration is found as `kubectl` finds it, and responses keep their `Retry-After`.

use std::env;
use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_LENGTH, RETRY_AFTER};
use http::{HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Limited};
use job_contract::Exit;
use k8s_openapi::jiff::Timestamp;
use kube::client::{Body, ClientBuilder};
use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::core::response::StatusDetails;
use kube::{Client, Config};
use sha2::{Digest as _, Sha256};
use tower::{BoxError, service_fn};
use uuid::Uuid;

use super::Cluster;
use super::clock::ServerClock;
use super::credential::{CredentialError, again, discreet};

/// Bodies of refusals are short. A longer body is cut.
const REFUSAL_BYTES: usize = 64 * 1024;

/// No client could be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("could not find out how to reach the cluster")]
    Configuration(#[source] Box<InferConfigError>),
    /// No configuration was named, and the default places have none.
    #[error("this is no pod of a cluster, and the kubeconfig `{}` could not be read", path.display())]
    Nowhere {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("could not use the kubeconfig")]
    Kubeconfig(#[source] Box<KubeconfigError>),
    /// This message replaces the library's, which puts the path into two kinds of quotes.
    #[error("could not read the kubeconfig `{}`", path.display())]
    KubeconfigFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Shows the place of the error and never the text: a parser quotes the lines around it, and those contain tokens.
    #[error(
        "the kubeconfig `{}` cannot be understood{}; what stands there may be secret and is not shown",
        path.display(),
        place.map(|(line, column)| format!(" at line {line}, column {column}")).unwrap_or_default()
    )]
    KubeconfigText {
        path: PathBuf,
        place: Option<(u64, u64)>,
    },
    #[error(transparent)]
    Credential(CredentialError),
    #[error("could not set up the connection to the cluster")]
    Client(#[source] Box<kube::Error>),
}

impl ConnectError {
    /// Errors in the configuration are permanent. Errors of the connection are not.
    pub fn exit(&self) -> Exit {
        match self {
            Self::Client(error) => match **error {
                kube::Error::InferKubeconfig(_) | kube::Error::RustlsTls(_) => {
                    Exit::BadConfiguration
                }
                _ => Exit::Infrastructure,
            },
            Self::Credential(error) => error.exit(),
            _ => Exit::BadConfiguration,
        }
    }

    fn of_client(error: kube::Error) -> Self {
        match error {
            kube::Error::Auth(error) => Self::Credential(CredentialError::of(&error)),
            error => Self::Client(Box::new(error)),
        }
    }

    fn of_inference(error: InferConfigError) -> Self {
        match error.source().and_then(<dyn Error>::downcast_ref) {
            Some(KubeconfigError::ReadConfig(source, path)) => Self::Nowhere {
                path: path.clone(),
                source: again(source),
            },
            Some(KubeconfigError::Parse(fault)) => Self::of_text(usual_kubeconfig(), fault),
            _ => Self::Configuration(Box::new(error)),
        }
    }

    fn of_kubeconfig(error: KubeconfigError, named: Option<&PathBuf>) -> Self {
        match error {
            KubeconfigError::ReadConfig(source, path) => Self::KubeconfigFile { path, source },
            KubeconfigError::Parse(fault) => {
                Self::of_text(named.cloned().unwrap_or_else(usual_kubeconfig), &fault)
            }
            error => Self::Kubeconfig(Box::new(error)),
        }
    }

    fn of_text(path: PathBuf, fault: &serde_saphyr::Error) -> Self {
        let place = fault.location().map(|place| (place.line(), place.column()));
        Self::KubeconfigText { path, place }
    }
}

/// Returns the default place of the kubeconfig, for messages. `KUBECONFIG` may name several files.
fn usual_kubeconfig() -> PathBuf {
    env::var_os("KUBECONFIG")
        .filter(|paths| !paths.is_empty())
        .map_or_else(|| "~/.kube/config".into(), PathBuf::from)
}

/// The cluster that an option or a setting names.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Namespace of the runs. Default: the namespace of the configuration.
    pub namespace: Option<String>,
    /// A context other than the current one.
    pub context: Option<String>,
    /// A file other than `kubectl`'s default.
    pub kubeconfig: Option<PathBuf>,
}

impl Access {
    async fn config(&self) -> Result<Config, ConnectError> {
        if self.context.is_none() && self.kubeconfig.is_none() {
            return Config::infer().await.map_err(ConnectError::of_inference);
        }
        let options = KubeConfigOptions {
            context: self.context.clone(),
            ..KubeConfigOptions::default()
        };
        let config = match &self.kubeconfig {
            Some(path) => match Kubeconfig::read_from(path) {
                Ok(file) => Config::from_custom_kubeconfig(file, &options).await,
                Err(error) => Err(error),
            },
            None => Config::from_kubeconfig(&options).await,
        };
        config.map_err(|error| ConnectError::of_kubeconfig(error, self.kubeconfig.as_ref()))
    }
}

/// Whether the token in the kubeconfig, if there is one, fits into a header.
fn has_usable_token(config: &Config) -> bool {
    let user = serde_json::to_value(&config.auth_info).unwrap_or_default();
    user["token"]
        .as_str()
        .is_none_or(|token| HeaderValue::from_str(token).is_ok())
}

impl Cluster {
    /// Connects as `kubectl` would: with `KUBECONFIG`, or with the service account of the pod. The default of
    /// `namespace` is in that configuration.
    pub async fn connect(namespace: Option<String>) -> Result<Self, ConnectError> {
        Self::connect_with(Access {
            namespace,
            ..Access::default()
        })
        .await
    }

    /// Connects to the named cluster.
    pub async fn connect_with(access: Access) -> Result<Self, ConnectError> {
        let mut config = access.config().await?;
        // Retries are limited and classified in this module, not in the library.
        config.default_retry = false;
        let namespace = access
            .namespace
            .unwrap_or_else(|| config.default_namespace.clone());
        if !has_usable_token(&config) {
            return Err(ConnectError::Credential(CredentialError::Token));
        }
        let identity = identity_of(&config, &namespace);
        let client = ClientBuilder::try_from(config)
            .map_err(ConnectError::of_client)?
            .build();
        let client = discreet(client, &namespace);
        let mut cluster = Self::from_client(client, namespace);
        cluster.identity = identity;
        Ok(cluster)
    }
}

/// Clusters have addresses in common, but hardly ever an authority.
fn identity_of(config: &Config, namespace: &str) -> String {
    let mut hash = Sha256::new();
    hash.update(config.cluster_url.to_string());
    for certificate in config.root_cert.iter().flatten() {
        hash.update(certificate);
    }
    hash.update([0]);
    hash.update(namespace);
    let digest = hash.finalize();
    let mut id = [0; 16];
    id.copy_from_slice(&digest[..16]);
    Uuid::from_bytes(id).to_string()
}

/// Builds a client with a timeout for responses. It moves `Retry-After` into the body, because the library drops the
/// headers of refusals. The date of each response goes to the clock.
pub(super) fn answering(
    client: Client,
    namespace: &str,
    clock: Arc<ServerClock>,
    retry_policy: Duration,
) -> Client {
    let service = service_fn(move |request: Request<Body>| {
        let (client, clock) = (client.clone(), Arc::clone(&clock));
        async move {
            let length = Length::of(request.uri());
            let answer = async {
                let sent = Timestamp::now();
                let response = client.send(request).await?;
                clock.hear(response.headers(), sent, Timestamp::now());
                let response = keep_retry_after(response).await?;
                match length {
                    Length::Short => whole(response).await,
                    Length::Long | Length::Endless => Ok(response),
                }
            };
            if length == Length::Endless {
                return answer.await;
            }
            tokio::time::timeout(retry_policy, answer)
                .await
                .unwrap_or_else(|_| Err(format!("no answer within {retry_policy:?}").into()))
        }
    });
    Client::new(service, namespace)
}

/// The kind of a response. It decides which part of the response has a deadline.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Length {
    /// One object. All of it has a deadline.
    Short,
    /// A page of objects, which may be large. Its beginning has a deadline.
    Long,
    /// A watch or a log. It has no deadline.
    Endless,
}

impl Length {
    fn of(uri: &Uri) -> Self {
        let mut asked = uri.query().unwrap_or_default().split('&');
        if uri.path().ends_with("/log") || asked.clone().any(|pair| pair == "watch=true") {
            Self::Endless
        } else if asked.any(|pair| pair.starts_with("limit=")) {
            Self::Long
        } else {
            Self::Short
        }
    }
}

async fn whole(response: Response<Body>) -> Result<Response<Body>, BoxError> {
    let (parts, body) = response.into_parts();
    let body = body.collect().await?.to_bytes();
    Ok(Response::from_parts(parts, Body::from(body.to_vec())))
}

async fn keep_retry_after(response: Response<Body>) -> Result<Response<Body>, BoxError> {
    let busy = matches!(
        response.status(),
        StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
    );
    let seconds: Option<u32> = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let Some(seconds) = seconds.filter(|_| busy) else {
        return Ok(response);
    };
    let (mut parts, body) = response.into_parts();
    let text = Limited::new(body, REFUSAL_BYTES)
        .collect()
        .await?
        .to_bytes();
    let mut status: Status = serde_json::from_slice(&text).unwrap_or_else(|_| {
        Status::failure(String::from_utf8_lossy(&text).trim(), "TooManyRequests")
    });
    status.code = parts.status.as_u16();
    let details = status.details.get_or_insert_with(|| StatusDetails {
        name: String::new(),
        group: String::new(),
        kind: String::new(),
        uid: String::new(),
        causes: Vec::new(),
        retry_after_seconds: 0,
    });
    details.retry_after_seconds = seconds;
    let text = serde_json::to_vec(&status)?;
    parts.headers.remove(CONTENT_LENGTH);
    Ok(Response::from_parts(parts, Body::from(text)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn a_kubeconfig_that_is_not_there_is_named_once_and_plainly() {
        let access = Access {
            kubeconfig: Some("/nowhere/config".into()),
            ..Access::default()
        };
        let error = access.config().await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "could not read the kubeconfig `/nowhere/config`"
        );
        let cause = error.source().unwrap().to_string();
        assert_eq!(cause, "No such file or directory (os error 2)");
    }

    #[tokio::test]
    async fn the_error_of_a_broken_kubeconfig_names_the_position_and_quotes_no_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        for broken in [
            "users:\n- name: a\n  user:\n    token: hunter2\n     password: [x\n",
            "users:\n- name: a\n  user: hunter2\n",
        ] {
            fs::write(&path, broken).unwrap();
            let access = Access {
                kubeconfig: Some(path.clone()),
                ..Access::default()
            };
            let error = access.config().await.unwrap_err();
            let told = format!("{} {error:?}", job_contract::chain(&error));
            assert!(!told.contains("hunter2"), "{told}");
            assert!(told.contains(&path.display().to_string()), "{told}");
            assert!(told.contains(" at line "), "{told}");
            assert_eq!(error.exit(), Exit::BadConfiguration);
        }
    }

    #[tokio::test]
    async fn the_error_of_an_unusable_credential_does_not_contain_it() {
        let plugin = |script: &str| {
            format!(
                "exec: {{apiVersion: client.authentication.k8s.io/v1, interactiveMode: Never, command: sh, \
                 args: [-c, '{script}']}}"
            )
        };
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config");
        for (user, words, exit) in [
            (
                "token: \"hunter2\\n\"".to_owned(),
                "line break",
                Exit::BadConfiguration,
            ),
            (
                plugin("echo hunter2; exit 3"),
                "exit status: 3",
                Exit::Infrastructure,
            ),
            (
                plugin("echo hunter2"),
                "`ExecCredential`",
                Exit::Infrastructure,
            ),
            (
                "client-certificate-data: \"hunter2!\", client-key-data: \"hunter2!\"".to_owned(),
                "client certificate",
                Exit::BadConfiguration,
            ),
        ] {
            let config = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: a\n\
                 clusters: [{{name: a, cluster: {{server: 'https://127.0.0.1:1'}}}}]\n\
                 contexts: [{{name: a, context: {{cluster: a, user: a}}}}]\n\
                 users: [{{name: a, user: {{{user}}}}}]\n"
            );
            fs::write(&path, config).unwrap();
            // Another test may have installed it before.
            let _ = rustls::crypto::ring::default_provider().install_default();
            let error = Cluster::connect_with(Access {
                kubeconfig: Some(path.clone()),
                ..Access::default()
            })
            .await
            .unwrap_err();
            let told = format!("{} {error:?}", job_contract::chain(&error));
            assert!(told.contains(words), "{told}");
            assert!(!told.contains("hunter2"), "{told}");
            assert_eq!(error.exit(), exit, "{told}");
        }
    }
}
