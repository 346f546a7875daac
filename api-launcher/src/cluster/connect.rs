//! Getting a client: configuration as `kubectl` finds it, and answers that keep what the server asked for.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use axum::body::Body as AnyBody;
use axum::http::header::RETRY_AFTER;
use axum::http::{Request, Response, StatusCode};
use kube::client::{Body, ClientBuilder};
use kube::config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError};
use kube::core::Status;
use kube::core::response::StatusDetails;
use kube::{Client, Config};
use tower::{BoxError, service_fn};

use super::Cluster;
use super::limit::{Limiter, RateLimit};

/// Bodies of refusals are short; more is not read.
const REFUSAL_BYTES: usize = 64 * 1024;

/// No client could be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    #[error("could not find out how to reach the cluster")]
    Configuration(#[source] Box<InferConfigError>),
    /// Nothing was named, and there is nothing where it usually is.
    #[error("this is no pod of a cluster, and the kubeconfig `{}` could not be read", path.display())]
    Nowhere {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("could not use the kubeconfig")]
    Kubeconfig(#[source] Box<KubeconfigError>),
    /// Said here: the library puts the path into two kinds of quotes.
    #[error("could not read the kubeconfig `{}`", path.display())]
    KubeconfigFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("could not set up the connection to the cluster")]
    Client(#[source] Box<kube::Error>),
}

impl ConnectError {
    fn of_inference(error: InferConfigError) -> Self {
        let cause = error.source().and_then(<dyn Error>::downcast_ref);
        if let Some(KubeconfigError::ReadConfig(source, path)) = cause {
            let again = source.raw_os_error().map(io::Error::from_raw_os_error);
            return Self::Nowhere {
                path: path.clone(),
                source: again.unwrap_or_else(|| source.kind().into()),
            };
        }
        Self::Configuration(Box::new(error))
    }
}

/// Which cluster is meant, where somebody says so.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// Namespace of the runs; falls back to the one of the configuration.
    pub namespace: Option<String>,
    /// A context other than the current one.
    pub context: Option<String>,
    /// A file other than those `kubectl` would look for.
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
        config.map_err(|error| match error {
            KubeconfigError::ReadConfig(source, path) => {
                ConnectError::KubeconfigFile { path, source }
            }
            error => ConnectError::Kubeconfig(Box::new(error)),
        })
    }
}

impl Cluster {
    /// Connects as `kubectl` would: `KUBECONFIG`, else the service account of the pod this runs in. `namespace`
    /// falls back to the one of that configuration.
    pub async fn connect(namespace: Option<String>) -> Result<Self, ConnectError> {
        Self::connect_with(Access {
            namespace,
            ..Access::default()
        })
        .await
    }

    /// Connects to the cluster that is meant.
    pub async fn connect_with(access: Access) -> Result<Self, ConnectError> {
        let mut config = access.config().await?;
        // Retries are bounded and classified here, not hidden in the stack.
        config.default_retry = false;
        let namespace = access
            .namespace
            .unwrap_or_else(|| config.default_namespace.clone());
        let client = ClientBuilder::try_from(config)
            .map_err(|source| ConnectError::Client(Box::new(source)))?
            .build();
        Ok(Self::from_client(client, namespace))
    }
}

/// The client drops the headers of refusals. `Retry-After` is moved into the body, where it is kept.
pub(super) fn keeping_retry_after(client: Client, namespace: &str) -> Client {
    let service = service_fn(move |request: Request<Body>| {
        let client = client.clone();
        async move {
            let response = client.send(request).await?;
            keep_retry_after(response).await
        }
    });
    Client::new(service, namespace)
}

/// A client whose requests wait for their turn.
pub(super) fn limited(client: Client, namespace: &str, limit: RateLimit) -> Client {
    let limiter = Arc::new(Limiter::new(limit));
    let service = service_fn(move |request: Request<Body>| {
        let (client, limiter) = (client.clone(), Arc::clone(&limiter));
        async move {
            limiter.turn().await;
            client.send(request).await
        }
    });
    Client::new(service, namespace)
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
    let text = axum::body::to_bytes(AnyBody::new(body), REFUSAL_BYTES).await?;
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
    parts.headers.remove(axum::http::header::CONTENT_LENGTH);
    Ok(Response::from_parts(parts, Body::from(text)))
}

#[cfg(test)]
mod tests {
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
}
