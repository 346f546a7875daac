//! Watches the requests to a service. The client of `object_store` repeats failed requests. This module delays a repetition
//! for the time in `Retry-After`, and reports when the service begins and stops to fail.

use std::time::Duration;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};

use crate::request::{Health, asked_pause};

/// Creates HTTP clients that record the state of the service.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    pub(crate) service: &'static str,
    pub(crate) health: Health,
    /// The longest pause, even if `Retry-After` asks for more.
    pub(crate) longest_pause: Duration,
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Watched {
            client: ReqwestConnector::default().connect(options)?,
            connector: self.clone(),
        }))
    }
}

#[derive(Debug)]
struct Watched {
    client: HttpClient,
    connector: Connector,
}

#[async_trait]
impl HttpService for Watched {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let Connector {
            service,
            health,
            longest_pause,
        } = &self.connector;
        let answer = self.client.execute(request).await;
        match &answer {
            Ok(response) => {
                let status = response.status();
                let is_trouble = status.is_server_error() || matches!(status.as_u16(), 408 | 429);
                health.set(is_trouble.then(|| format!("{service} answers {status}")));
                let headers = response.headers();
                if is_trouble && let Some(pause) = headers.get("retry-after") {
                    let pause = pause.to_str().ok().and_then(asked_pause);
                    tokio::time::sleep(pause.unwrap_or_default().min(*longest_pause)).await;
                }
            }
            Err(error) => health.set(Some(match error.kind() {
                HttpErrorKind::Connect => format!("{service} cannot be reached"),
                HttpErrorKind::Timeout => format!("{service} does not answer in time"),
                _ => format!("{service} closed the connection"),
            })),
        }
        answer
    }
}
