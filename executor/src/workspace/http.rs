//! HTTP clients of the workspace. They use the proxies of the executor's own environment, as git gets them. This module
//! knows nothing of the requests.

use std::ffi::OsString;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, NoProxy, Proxy};

use crate::error::StepError;

/// Timeout of a server for accepting a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a server for the next bytes of an answer.
const READ_TIMEOUT: Duration = Duration::from_mins(1);

/// The proxies, from curl's variables.
#[derive(Clone, Debug, Default)]
pub(super) struct ProxySettings {
    http: Option<String>,
    https: Option<String>,
    none_for: Option<String>,
}

impl ProxySettings {
    /// Reads `http_proxy`, `https_proxy`, `all_proxy` and `no_proxy`, in either case; lower case wins.
    pub(super) fn from_environment(environment: &[(OsString, OsString)]) -> Self {
        let exact = |name: &str| {
            environment
                .iter()
                .find(|(key, _)| key == name)
                .and_then(|(_, value)| value.to_str())
                .filter(|value| !value.is_empty())
                .map(str::to_owned)
        };
        let value = |name: &str| exact(name).or_else(|| exact(&name.to_ascii_uppercase()));
        Self {
            http: value("http_proxy").or_else(|| value("all_proxy")),
            https: value("https_proxy").or_else(|| value("all_proxy")),
            none_for: value("no_proxy"),
        }
    }

    /// A client that uses these proxies. It follows no redirects, because the caller decides for each redirect about
    /// the token.
    pub(super) fn client(&self) -> Result<Client, StepError> {
        let exempt = self.none_for.as_deref().and_then(NoProxy::from_string);
        // The error of a proxy has its password in it.
        let unusable = |name: &str| {
            let text = format!("`{name}`, or `all_proxy` in its place, is no address of a proxy");
            StepError::infrastructure(text).with_hint("check the proxy variables of the executor")
        };
        let mut builder = base_client();
        if let Some(proxy) = &self.http {
            let proxy = Proxy::http(proxy).map_err(|_| unusable("http_proxy"))?;
            builder = builder.proxy(proxy.no_proxy(exempt.clone()));
        }
        if let Some(proxy) = &self.https {
            let proxy = Proxy::https(proxy).map_err(|_| unusable("https_proxy"))?;
            builder = builder.proxy(proxy.no_proxy(exempt));
        }
        builder.build().map_err(|error| {
            StepError::infrastructure("could not set up the HTTP client").because(&error)
        })
    }
}

/// A client for addresses on this machine or link, without a proxy.
pub(super) fn direct_client(connect_timeout: Duration) -> reqwest::Result<Client> {
    base_client().connect_timeout(connect_timeout).build()
}

fn base_client() -> ClientBuilder {
    Client::builder()
        .no_proxy()
        .redirect(Policy::none())
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .user_agent(concat!("mayfly-executor/", env!("CARGO_PKG_VERSION")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proxies_are_read_in_either_case() {
        let environment = [
            ("HTTPS_PROXY", "http://upper:1"),
            ("https_proxy", "http://lower:1"),
            ("ALL_PROXY", "http://all:1"),
            ("no_proxy", "localhost,.svc"),
        ]
        .map(|(name, value)| (OsString::from(name), OsString::from(value)));
        let proxies = ProxySettings::from_environment(&environment);
        assert_eq!(proxies.https.as_deref(), Some("http://lower:1"));
        assert_eq!(proxies.http.as_deref(), Some("http://all:1"));
        assert_eq!(proxies.none_for.as_deref(), Some("localhost,.svc"));
    }

    #[test]
    fn a_proxy_that_cannot_be_used_is_named_without_its_password() {
        drop(rustls::crypto::ring::default_provider().install_default());
        for name in ["http_proxy", "HTTPS_PROXY"] {
            let value = OsString::from("user:pl4n/ted@proxy:3128");
            let proxies = ProxySettings::from_environment(&[(OsString::from(name), value)]);
            let error = proxies.client().unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(text.contains(&name.to_lowercase()), "{text}");
            assert!(!text.contains("pl4n") && !text.contains("ted@"), "{text}");
        }
    }
}
