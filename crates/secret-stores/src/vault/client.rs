//! What speaks HTTP to a Vault. It knows neither logins nor secrets.

use reqwest::{Method, Url};
use secrecy::SecretString;

use crate::error::{ErrorClass, ReadError};
use crate::http::{Answer, Http, Request, TlsSettings};
use crate::reference::StoreKind;

pub(super) const STORE: StoreKind = StoreKind::Vault;

/// Requests to one Vault.
#[derive(Clone, Debug)]
pub(super) struct Client {
    pub(super) http: Http,
    address: Url,
}

impl Client {
    /// # Errors
    /// Says which certificates cannot be used.
    pub(super) fn new(address: Url, tls: &TlsSettings) -> Result<Self, String> {
        let http = Http::new(tls).map_err(|error| format!("Vault: {error}"))?;
        Ok(Self { http, address })
    }

    /// A request below `v1`, in a namespace, with a token.
    pub(super) fn request(
        &self,
        method: Method,
        path: &str,
        namespace: &str,
        token: Option<&SecretString>,
    ) -> Result<Request, ReadError> {
        let mut url = self.address.clone();
        let wrong = || {
            ReadError::new(
                STORE,
                ErrorClass::NotConfigured,
                "its address is no address",
            )
        };
        url.path_segments_mut()
            .map_err(|()| wrong())?
            .pop_if_empty()
            .push("v1")
            .extend(path.split('/'));
        let mut request = Request::new(method, url).header("x-vault-request", "true");
        if !namespace.is_empty() {
            request = request.header("x-vault-namespace", namespace);
        }
        if let Some(token) = token {
            request = request.header("x-vault-token", token.clone());
        }
        Ok(request)
    }

    pub(super) async fn send(&self, request: &Request) -> Result<Answer, ReadError> {
        self.http.send(STORE, request).await
    }
}
