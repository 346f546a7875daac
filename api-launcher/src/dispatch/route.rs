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
    /// Every dispatch.
    All,
    /// Dispatches of workspaces that carry the flag. The persistent executor gets the others.
    Flag(Fallback),
}

impl Routing {
    /// Returns the executor that runs this job, if it is not the launcher's.
    pub(crate) fn fallback_for(&self, job: &JobData) -> Option<&Fallback> {
        match self {
            Self::All => None,
            Self::Flag(fallback) => (!fallback.flag.is_on(job)).then_some(fallback),
        }
    }
}

/// How the workspace's flag is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Flag {
    /// As upstream: whatever its value (contract 2.1).
    Present,
    /// `0`, `false` and `off` mean no.
    Strict,
}

impl Flag {
    fn is_on(self, job: &JobData) -> bool {
        let Some(value) = job.environment_variables.get(env::EPHEMERAL_SWITCH) else {
            return false;
        };
        let value = value.trim();
        self == Self::Present
            || !["0", "false", "off"]
                .iter()
                .any(|off| value.eq_ignore_ascii_case(off))
    }
}

/// The persistent executor.
#[derive(Debug)]
pub(crate) struct Fallback {
    flag: Flag,
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
    pub(crate) fn new(flag: Flag, url: Url) -> Result<Self, reqwest::Error> {
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(TOTAL_TIMEOUT)
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build()?;
        Ok(Self { flag, url, client })
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
    #[case(None, false, false)]
    #[case(Some("true"), true, true)]
    #[case(Some(""), true, true)]
    #[case(Some("0"), true, false)]
    #[case(Some(" False "), true, false)]
    #[case(Some("OFF"), true, false)]
    #[case(Some("offline"), true, true)]
    fn the_flag_counts_by_presence_or_by_value(
        #[case] value: Option<&str>,
        #[case] present: bool,
        #[case] strict: bool,
    ) {
        let mut job = JobData::default();
        if let Some(value) = value {
            job.environment_variables
                .insert(env::EPHEMERAL_SWITCH.to_owned(), value.to_owned());
        }
        assert_eq!(Flag::Present.is_on(&job), present);
        assert_eq!(Flag::Strict.is_on(&job), strict);
    }
}
