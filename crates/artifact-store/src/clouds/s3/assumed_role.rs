//! A role that the executor assumes to use the bucket, with its keys or with the identity of its pod.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use job_contract::aws::service_host;
use object_store::CredentialProvider;
use object_store::aws::{AwsAuthorizer, AwsCredential, AwsCredentialProvider};
use object_store::client::{HttpClient, HttpRequest};
use secrecy::ExposeSecret as _;
use url::Url;

use super::SERVICE;
use crate::clouds::session::{Kept, ask, failed};

const SESSION_NAME: &str = "mayfly-store";
const SECONDS: u64 = 3600;

/// Assumes the role whenever the last session ends.
#[derive(Debug)]
pub(super) struct AssumedRole {
    pub(super) role: String,
    pub(super) region: String,
    pub(super) base: AwsCredentialProvider,
    pub(super) http: HttpClient,
    pub(super) session: Kept<AwsCredential>,
}

impl AssumedRole {
    async fn obtain(&self) -> object_store::Result<(AwsCredential, Duration)> {
        let base = self.base.get_credential().await?;
        let url = security_tokens(&self.region);
        let body = url::form_urlencoded::Serializer::new(String::new())
            .append_pair("Action", "AssumeRole")
            .append_pair("Version", "2011-06-15")
            .append_pair("RoleArn", &self.role)
            .append_pair("RoleSessionName", SESSION_NAME)
            .append_pair("DurationSeconds", &SECONDS.to_string())
            .finish();
        let make = || {
            let mut request = HttpRequest::new(body.clone().into());
            *request.method_mut() = "POST".parse().expect("a method");
            *request.uri_mut() = url.as_str().parse().expect("an address");
            let form = "application/x-www-form-urlencoded"
                .parse()
                .expect("a header");
            request.headers_mut().insert("content-type", form);
            AwsAuthorizer::new(&base, "sts", &self.region).try_authorize(&mut request, None)?;
            Ok(request)
        };
        let answer = ask(
            &self.http,
            SERVICE,
            &format!("STS, asked for `{}`,", self.role),
            make,
        )
        .await?;
        session(answer.expose_secret())
            .ok_or_else(|| failed(SERVICE, "STS sent an answer without a session"))
    }
}

#[async_trait]
impl CredentialProvider for AssumedRole {
    type Credential = AwsCredential;

    async fn get_credential(&self) -> object_store::Result<Arc<AwsCredential>> {
        self.session.get(self.obtain()).await
    }
}

/// The service for a region.
fn security_tokens(region: &str) -> Url {
    let text = format!("https://{}/", service_host("sts", region));
    Url::parse(&text).expect("regions were checked")
}

/// The session in an answer. Its values need no escapes in XML.
fn session(answer: &str) -> Option<(AwsCredential, Duration)> {
    let value = |name: &str| {
        let (_, rest) = answer.split_once(&format!("<{name}>"))?;
        let (value, _) = rest.split_once(&format!("</{name}>"))?;
        Some(value.trim().to_owned())
    };
    let end = humantime::parse_rfc3339_weak(&value("Expiration")?).ok()?;
    let credential = AwsCredential {
        key_id: value("AccessKeyId")?,
        secret_key: value("SecretAccessKey")?,
        token: Some(value("SessionToken")?),
    };
    Some((
        credential,
        end.duration_since(SystemTime::now()).unwrap_or_default(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_read_from_the_answer() {
        let end = humantime::format_rfc3339(SystemTime::now() + Duration::from_hours(1));
        let answer = format!(
            "<AssumeRoleResponse><Credentials><AccessKeyId>ASIA</AccessKeyId><SecretAccessKey>s/+=</SecretAccessKey>\
             <SessionToken>t</SessionToken><Expiration>{end}</Expiration></Credentials></AssumeRoleResponse>"
        );
        let (credential, lifetime) = session(&answer).unwrap();
        assert_eq!(
            (&*credential.key_id, &*credential.secret_key),
            ("ASIA", "s/+=")
        );
        assert_eq!(credential.token.as_deref(), Some("t"));
        assert!(lifetime > Duration::from_secs(3500), "{lifetime:?}");
        assert!(session(&answer.replace("SessionToken", "Other")).is_none());
    }
}
