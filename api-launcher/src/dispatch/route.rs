//! Decides which dispatches the launcher runs, and forwards the others to the persistent executor. The body and the token
//! stay as they came.

pub(crate) mod settings;

use std::time::Duration;

use job_contract::{JobData, env};
use reqwest::header::{self, HeaderMap};
use url::Url;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Less than the 60 s after which the platform hears nothing any more.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(55);

/// Which dispatches the launcher runs.
#[derive(Debug)]
pub(crate) enum Routing {
    All,
    /// Dispatches of workspaces that carry the flag. The persistent executor gets the others.
    Flag(Fallback),
}

impl Routing {
    /// Returns the executor that runs this job, if it is not the launcher's.
    pub(crate) fn fallback_for(&self, job: &JobData) -> Option<&Fallback> {
        match self {
            Self::All => None,
            // As upstream: the flag counts by its presence, whatever its value (contract 2.1).
            Self::Flag(fallback) => (!job
                .environment_variables
                .contains_key(env::EPHEMERAL_SWITCH))
            .then_some(fallback),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Fallback {
    url: Url,
    client: reqwest::Client,
}

/// Why the persistent executor gave no answer.
#[derive(Debug, thiserror::Error)]
#[error("the persistent executor {reason}")]
pub(crate) struct ForwardError {
    reason: &'static str,
}

impl Fallback {
    /// The executor at `url`. Proxies of the environment are for the outside; this executor is a neighbour.
    pub(crate) fn new(url: Url) -> Result<Self, reqwest::Error> {
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(TOTAL_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()?;
        Ok(Self { url, client })
    }

    /// Forwards the dispatch. The body of the response is still on its way when this returns.
    pub(crate) async fn forward(
        &self,
        headers: &HeaderMap,
        body: Vec<u8>,
    ) -> Result<reqwest::Response, ForwardError> {
        let mut request = self.client.post(self.url.clone()).body(body);
        for name in [header::AUTHORIZATION, header::CONTENT_TYPE] {
            if let Some(value) = headers.get(&name) {
                request = request.header(name, value.clone());
            }
        }
        request.send().await.map_err(|error| ForwardError {
            reason: if error.is_connect() {
                "cannot be reached"
            } else if error.is_timeout() {
                "did not answer in time"
            } else {
                "broke off before it answered"
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(None, false)]
    #[case(Some("true"), true)]
    #[case(Some(""), true)]
    #[case(Some("false"), true)]
    fn the_flag_counts_by_its_presence(#[case] value: Option<&str>, #[case] is_ours: bool) {
        let mut job = JobData::default();
        if let Some(value) = value {
            job.environment_variables
                .insert(env::EPHEMERAL_SWITCH.to_owned(), value.to_owned());
        }
        let _ = rustls::crypto::ring::default_provider().install_default();
        let url = Url::parse("http://executor.test/").unwrap();
        let routing = Routing::Flag(Fallback::new(url).unwrap());
        assert_eq!(routing.fallback_for(&job).is_none(), is_ours);
    }
}
