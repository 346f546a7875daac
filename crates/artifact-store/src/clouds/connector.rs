//! Watches the requests to a service. The client of `object_store` repeats failed requests. This module delays a repetition
//! for the time in `Retry-After`, takes no answer of something else for one of the service, and reports when the service begins
//! and stops to fail.

use std::error::Error as _;
use std::time::Duration;

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
    ReqwestConnector,
};

use crate::clouds::answers::{Foreign, Signs};
use crate::request::{Health, asked_pause};

/// Creates HTTP clients that record the state of the service.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    pub(crate) service: &'static str,
    pub(crate) signs: Signs,
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
            signs,
            health,
            longest_pause,
        } = &self.connector;
        let (method, is_of_service) = (request.method().clone(), signs.are_of(&request));
        let answer = match self.client.execute(request).await {
            Ok(answer) if is_of_service => signs.own(&method, answer).await,
            answer => answer,
        };
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
            Err(error) => health.set(Some(trouble(service, error))),
        }
        answer
    }
}

fn trouble(service: &str, error: &HttpError) -> String {
    let foreign = error
        .source()
        .and_then(|source| source.downcast_ref::<Foreign>());
    match (foreign, error.kind()) {
        (Some(Foreign(status)), _) => {
            format!("something in front of {service} answers {status}")
        }
        (None, HttpErrorKind::Connect) => format!("{service} cannot be reached"),
        (None, HttpErrorKind::Timeout) => format!("{service} does not answer in time"),
        (None, _) => format!("{service} closed the connection"),
    }
}
