//! HTTP clients of the workspace. They use the proxies of the run's environment, not those of the process. This module
//! knows nothing of the requests.

use std::ffi::OsString;
use std::time::Duration;

use reqwest::redirect::Policy;
use reqwest::{Client, ClientBuilder, NoProxy, Proxy};

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
    pub(super) fn client(&self) -> reqwest::Result<Client> {
        let exempt = self.none_for.as_deref().and_then(NoProxy::from_string);
        let mut builder = base_client();
        if let Some(proxy) = &self.http {
            builder = builder.proxy(Proxy::http(proxy)?.no_proxy(exempt.clone()));
        }
        if let Some(proxy) = &self.https {
            builder = builder.proxy(Proxy::https(proxy)?.no_proxy(exempt));
        }
        builder.build()
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
}
