//! Workload identity federation of Google Cloud: the token of a pod is exchanged for one of Google, by which a service account may be
//! used. The document that says how belongs to the operator. Documents that name a program, another source or a service outside of
//! Google are refused.

use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use job_contract::google::is_service_host;
use object_store::CredentialProvider;
use object_store::client::{HttpClient, HttpRequest};
use object_store::gcp::GcpCredential;
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::json;
use std::sync::Arc;
use url::Url;

use super::SERVICE;
use crate::clouds::session::{Kept, ask, failed};

const SCOPE: &str = "https://www.googleapis.com/auth/cloud-platform";
const MAX_TOKEN_BYTES: u64 = 1 << 16;

/// What the document says.
#[derive(Debug, Deserialize)]
struct Document {
    audience: String,
    subject_token_type: String,
    token_url: String,
    credential_source: Source,
    service_account_impersonation_url: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Source {
    file: PathBuf,
    format: Option<Format>,
}

#[derive(Debug, Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
}

/// Exchanges the token whenever the last session ends.
#[derive(Debug)]
pub(super) struct Federated {
    document: Document,
    http: HttpClient,
    session: Kept<GcpCredential>,
}

#[derive(Deserialize)]
struct Exchanged {
    access_token: String,
    expires_in: u64,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Impersonated {
    access_token: String,
    expire_time: String,
}

/// Whether a document describes a federated identity.
pub(super) fn is_federated(document: &str) -> bool {
    #[derive(Deserialize)]
    struct Kind {
        #[serde(rename = "type")]
        kind: String,
    }
    serde_json::from_str::<Kind>(document).is_ok_and(|document| document.kind == "external_account")
}

impl Federated {
    pub(super) fn new(document: &str, http: HttpClient) -> Result<Self, String> {
        let document: Document = serde_json::from_str(document).map_err(|error| {
            format!("the external account cannot be used at line {} (only a token in a file is supported)", error.line())
        })?;
        let is_text = |format: &Format| format.kind == "text";
        if !document
            .credential_source
            .format
            .as_ref()
            .is_none_or(is_text)
        {
            return Err(
                "the token of the external account must be the text of its file".to_owned(),
            );
        }
        let more = document.service_account_impersonation_url.iter();
        if !more.chain([&document.token_url]).all(|url| is_google(url)) {
            return Err(
                "the external account has an address that is not `https` at `googleapis.com`, and would send its token there"
                    .to_owned(),
            );
        }
        Ok(Self {
            document,
            http,
            session: Kept::default(),
        })
    }

    async fn obtain(&self) -> object_store::Result<(GcpCredential, Duration)> {
        let (exchanged, lifetime) = self.exchange().await?;
        let (token, lifetime) = match &self.document.service_account_impersonation_url {
            None => (exchanged, lifetime),
            Some(url) => self.impersonate(url, &exchanged).await?,
        };
        let bearer = token.expose_secret().to_owned();
        Ok((GcpCredential { bearer }, lifetime))
    }

    async fn exchange(&self) -> object_store::Result<(SecretString, Duration)> {
        let document = &self.document;
        let token = token_in(&document.credential_source.file)?;
        let form = url::form_urlencoded::Serializer::new(String::new())
            .append_pair(
                "grant_type",
                "urn:ietf:params:oauth:grant-type:token-exchange",
            )
            .append_pair("audience", &document.audience)
            .append_pair("scope", SCOPE)
            .append_pair(
                "requested_token_type",
                "urn:ietf:params:oauth:token-type:access_token",
            )
            .append_pair("subject_token_type", &document.subject_token_type)
            .append_pair("subject_token", token.expose_secret())
            .finish();
        let make = || {
            request(
                &document.token_url,
                "application/x-www-form-urlencoded",
                &form,
                None,
            )
        };
        let answer = ask(&self.http, SERVICE, "the token service", make).await?;
        let answer: Exchanged = read(&answer)?;
        Ok((
            answer.access_token.into(),
            Duration::from_secs(answer.expires_in),
        ))
    }

    async fn impersonate(
        &self,
        url: &str,
        token: &SecretString,
    ) -> object_store::Result<(SecretString, Duration)> {
        let body = json!({"scope": [SCOPE], "lifetime": "3600s"}).to_string();
        let make = || request(url, "application/json", &body, Some(token));
        let answer = ask(
            &self.http,
            SERVICE,
            "the service for accounts' tokens",
            make,
        )
        .await?;
        let answer: Impersonated = read(&answer)?;
        let end = humantime::parse_rfc3339(&answer.expire_time);
        let end = end.map_err(|_| failed(SERVICE, "the account's token has no end"))?;
        let lifetime = end.duration_since(SystemTime::now()).unwrap_or_default();
        Ok((answer.access_token.into(), lifetime))
    }
}

/// Whether an address is one of Google. Nobody else gets tokens.
fn is_google(address: &str) -> bool {
    Url::parse(address).is_ok_and(|url| {
        url.scheme() == "https" && is_service_host(url.host_str().unwrap_or_default())
    })
}

#[async_trait]
impl CredentialProvider for Federated {
    type Credential = GcpCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<GcpCredential>> {
        self.session.get(self.obtain()).await
    }
}

fn token_in(file: &Path) -> object_store::Result<SecretString> {
    let place = file.display();
    let text = regular_file::read_text(file, MAX_TOKEN_BYTES).map_err(|error| {
        failed(
            SERVICE,
            format!("the token in `{place}` cannot be read: {error}"),
        )
    })?;
    match text.trim() {
        "" => Err(failed(SERVICE, format!("the token in `{place}` is empty"))),
        token => Ok(SecretString::from(token)),
    }
}

fn request(
    url: &str,
    media_type: &'static str,
    body: &str,
    token: Option<&SecretString>,
) -> object_store::Result<HttpRequest> {
    let invalid = || {
        failed(
            SERVICE,
            "the external account has an address that cannot be used",
        )
    };
    let mut request = HttpRequest::new(body.to_owned().into());
    *request.method_mut() = "POST".parse().expect("a method");
    *request.uri_mut() = url.parse().map_err(|_| invalid())?;
    let headers = request.headers_mut();
    headers.insert("content-type", media_type.parse().expect("a header"));
    if let Some(token) = token {
        let text = format!("Bearer {}", token.expose_secret());
        headers.insert("authorization", text.parse().map_err(|_| invalid())?);
    }
    Ok(request)
}

fn read<T: for<'d> Deserialize<'d>>(answer: &SecretString) -> object_store::Result<T> {
    serde_json::from_str(answer.expose_secret())
        .map_err(|_| failed(SERVICE, "a token service sent an answer without a token"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::client::{HttpError, HttpResponse, HttpService};
    use rstest::rstest;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Mutex;

    const GOOGLE: &str = "https://sts.googleapis.com/v1/token";

    /// A token service that notes the tokens it is asked with.
    #[derive(Clone, Debug, Default)]
    struct Tokens {
        status: u16,
        expires_in: u64,
        asked: Arc<Mutex<Vec<String>>>,
    }

    #[async_trait]
    impl HttpService for Tokens {
        async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
            let body = request.into_body();
            let form = url::form_urlencoded::parse(body.as_bytes().unwrap()).into_owned();
            let token = form.filter(|(name, _)| name == "subject_token");
            let mut asked = self.asked.lock().unwrap();
            asked.extend(token.map(|(_, token)| token));
            let answer = json!({"access_token": "t", "expires_in": self.expires_in});
            let mut response = HttpResponse::new(answer.to_string().into());
            *response.status_mut() = self.status.try_into().unwrap();
            Ok(response)
        }
    }

    fn open(tokens: Tokens, url: &str, source: &str) -> Result<Federated, String> {
        let document = format!(
            r#"{{"type":"external_account","audience":"//iam","subject_token_type":"t","token_url":"{url}","credential_source":{source}}}"#
        );
        assert!(is_federated(&document));
        Federated::new(&document, HttpClient::new(tokens))
    }

    fn open_with(tokens: Tokens, token: &Path) -> Federated {
        open(tokens, GOOGLE, &json!({"file": token}).to_string()).unwrap()
    }

    #[rstest]
    #[case(r#"{"executable":{"command":"/bin/sh"}}"#)]
    #[case(r#"{"file":"/t","executable":{"command":"/bin/sh"}}"#)]
    #[case(r#"{"url":"http://evil.test/"}"#)]
    #[case(r#"{"file":"/t","format":{"type":"json"}}"#)]
    fn only_a_token_in_a_file_is_used(#[case] source: &str) {
        let problem = open(Tokens::default(), GOOGLE, source).unwrap_err();
        assert!(problem.contains("file"), "{problem}");
    }

    #[rstest]
    #[case("https://evil.test/v1/token")]
    #[case("https://sts.googleapis.com.evil.test/")]
    #[case("https://sts.googleapis.com@evil.test/")]
    #[case("https://evilgoogleapis.com/")]
    #[case("http://sts.googleapis.com/")]
    #[case("sts.googleapis.com")]
    fn nobody_but_google_gets_the_token(#[case] url: &str) {
        let source = r#"{"file":"/t"}"#;
        let problem = open(Tokens::default(), url, source).unwrap_err();
        assert!(problem.contains("googleapis.com"), "{problem}");
        // The same for the account that the identity acts as.
        let more = format!(r#"{source},"service_account_impersonation_url":"{url}""#);
        open(Tokens::default(), GOOGLE, &more).unwrap_err();
    }

    #[rstest]
    #[case(None, "cannot be read")]
    #[case(Some(""), "is empty")]
    #[case(Some("\n"), "is empty")]
    #[tokio::test]
    async fn a_token_that_is_not_there_is_named(
        #[case] content: Option<&str>,
        #[case] problem: &str,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        if let Some(content) = content {
            fs::write(&path, content).unwrap();
        }
        let tokens = Tokens::default();
        let federated = open_with(tokens.clone(), &path);
        let error = federated.get_credential().await.unwrap_err().to_string();
        let place = path.display().to_string();
        assert!(error.contains(&place) && error.contains(problem), "{error}");
        assert!(tokens.asked.lock().unwrap().is_empty());
    }

    /// Kubernetes lets everybody of a pod read its tokens, unless the pod has an `fsGroup`.
    #[rstest]
    #[case(0, &["first", "second"])]
    #[case(3600, &["first"])]
    #[case(10 * 365 * 86_400, &["first"])]
    #[case(u64::MAX, &["first"])]
    #[tokio::test]
    async fn the_file_is_read_for_each_exchange_and_a_session_is_used_for_its_lifetime(
        #[case] expires_in: u64,
        #[case] expected: &[&str],
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let tokens = Tokens {
            status: 200,
            expires_in,
            ..Tokens::default()
        };
        let federated = open_with(tokens.clone(), &path);
        for token in ["first\n", "second"] {
            fs::write(&path, token).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
            let credential = federated.get_credential().await.unwrap();
            assert_eq!(credential.bearer, "t");
        }
        assert_eq!(*tokens.asked.lock().unwrap(), expected);
    }

    /// Such as one that has expired.
    #[rstest]
    #[case(400, 1)]
    #[case(503, 3)]
    #[tokio::test(start_paused = true)]
    async fn a_token_that_is_refused_is_not_sent_again(
        #[case] status: u16,
        #[case] attempts: usize,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "expired").unwrap();
        let tokens = Tokens {
            status,
            ..Tokens::default()
        };
        let federated = open_with(tokens.clone(), &path);
        let error = federated.get_credential().await.unwrap_err().to_string();
        assert!(
            error.contains(&status.to_string()) && !error.contains("expired"),
            "{error}"
        );
        assert_eq!(tokens.asked.lock().unwrap().len(), attempts);
    }
}
