//! Requests with more headers than the client of `object_store` knows: the lease of a blob, its metadata, and a condition. Each
//! gets a new signature, which covers them.

use async_trait::async_trait;
use object_store::azure::{AzureAuthorizer, AzureCredentialProvider};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService,
};
use object_store::{ClientOptions, HeaderMap};

/// Signs the requests to an account, and sends them.
#[derive(Clone, Debug)]
pub(super) struct Signer {
    pub(super) http: HttpClient,
    pub(super) credentials: AzureCredentialProvider,
    pub(super) account: String,
}

impl Signer {
    pub(super) async fn sign(&self, request: &mut HttpRequest) -> object_store::Result<()> {
        let credential = self.credentials.get_credential().await?;
        AzureAuthorizer::new(&credential, &self.account).try_authorize(request)
    }
}

/// Adds headers to each request of a client that writes one blob.
#[derive(Clone, Debug)]
pub(super) struct Holder {
    pub(super) signer: Signer,
    /// For all requests.
    pub(super) lease: HeaderMap,
    /// For the request by which the blob appears: a part of it has no metadata and no condition.
    pub(super) whole: HeaderMap,
}

impl HttpConnector for Holder {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Holder {
    async fn call(&self, mut request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let query = request.uri().query().unwrap_or_default();
        let is_part = query.split('&').any(|pair| pair == "comp=block");
        let headers = request.headers_mut();
        headers.remove("authorization");
        headers.extend(self.lease.clone());
        if !is_part {
            headers.extend(self.whole.clone());
        }
        let signed = self.signer.sign(&mut request).await;
        signed.map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))?;
        self.signer.http.execute(request).await
    }
}
