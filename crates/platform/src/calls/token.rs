//! Mints the bearer tokens for the platform (contract 5.2). They are signed with the shared secret and valid for minutes.
//! Behind a hub's relay, requests have the token of the lease instead.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use job_contract::secret::{self, SecretError};
use jsonwebtoken::{EncodingKey, Header, encode};
use pool_protocol::version;
use reqwest::RequestBuilder;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;

use super::job_token::JobToken;

/// The issuer, by which the platform distinguishes these tokens from tokens of people.
const ISSUER: &str = "TerrakubeInternal";

/// The lifetime of a token for one call: longer than the call's timeout, because clocks differ a little.
pub const CALL: Duration = Duration::from_mins(2);
/// The lifetime of a token that fetches content, or reads or writes the job context.
pub const BRIEF: Duration = Duration::from_mins(1);
/// The lifetime of the token for scripts (contract 4.4).
pub const SCRIPT: Duration = Duration::from_mins(5);
/// The lifetime of the token with which `init` uses the registry of modules and providers. `init` asks the registry before it
/// downloads large files.
pub const INIT: Duration = Duration::from_mins(10);

/// Authorizes requests to the platform, or to the hub before it. Clones share the key or the token.
#[derive(Clone)]
pub struct TokenSource(Kind);

#[derive(Clone)]
enum Kind {
    Disabled,
    Signing(EncodingKey),
    Lease(JobToken),
}

/// Hides the key, which is a secret of the whole platform.
impl fmt::Debug for TokenSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Disabled => "TokenSource(disabled)",
            Kind::Signing(_) => "TokenSource(signing)",
            Kind::Lease(_) => "TokenSource(lease)",
        })
    }
}

/// Claims in the order of the stock executor's tokens. There is no `jti`: the platform would look it up as a person's token.
#[derive(Serialize)]
struct Claims<'c> {
    iss: &'static str,
    sub: &'static str,
    aud: &'static str,
    email: &'static str,
    email_verified: bool,
    name: &'static str,
    #[serde(rename = "workspaceId", skip_serializing_if = "Option::is_none")]
    workspace_id: Option<&'c str>,
    iat: u64,
    exp: u64,
}

impl TokenSource {
    /// For a platform that checks no tokens: requests have none.
    pub const fn disabled() -> Self {
        Self(Kind::Disabled)
    }

    /// For a hub: requests carry the token of a lease, and the version of the protocol.
    pub const fn of_lease(token: JobToken) -> Self {
        Self(Kind::Lease(token))
    }

    /// Whether requests go to a hub.
    pub(crate) const fn is_of_lease(&self) -> bool {
        matches!(self.0, Kind::Lease(_))
    }

    /// Adds to a request what proves whose it is. A token that is minted for it is valid that long.
    pub fn authorize(&self, request: RequestBuilder, lifetime: Duration) -> RequestBuilder {
        match (&self.0, self.mint(lifetime)) {
            (Kind::Lease(token), _) => request
                .header(version::HEADER, version::VERSION)
                .bearer_auth(token.current().expose_secret()),
            (_, Some(token)) => request.bearer_auth(token.expose_secret()),
            (_, None) => request,
        }
    }

    /// Signs with the platform's secret, in the encoding that [`secret::decode`] reads.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let key = secret::decode(text)?;
        Ok(Self(Kind::Signing(EncodingKey::from_secret(&key))))
    }

    /// A token that is valid from now on. `None` if the platform checks none, and behind a hub: the token of a lease stays
    /// in this process.
    pub fn mint(&self, lifetime: Duration) -> Option<SecretString> {
        self.mint_at(SystemTime::now(), lifetime, None)
    }

    /// A token that names its workspace. With it the platform decides which remote states the token may read.
    pub fn mint_for_workspace(
        &self,
        lifetime: Duration,
        workspace_id: &str,
    ) -> Option<SecretString> {
        self.mint_at(SystemTime::now(), lifetime, Some(workspace_id))
    }

    fn mint_at(
        &self,
        now: SystemTime,
        lifetime: Duration,
        workspace_id: Option<&str>,
    ) -> Option<SecretString> {
        let Kind::Signing(key) = &self.0 else {
            return None;
        };
        let iat = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let claims = Claims {
            iss: ISSUER,
            sub: "TerrakubeInternal (TOKEN)",
            aud: ISSUER,
            email: "no-reply@terrakube.io",
            email_verified: true,
            name: "TerrakubeInternal Client",
            workspace_id,
            iat,
            exp: iat + lifetime.as_secs(),
        };
        let token = encode(&Header::default(), &claims, key)
            .expect("strings and numbers are JSON, and any key makes an HMAC");
        Some(token.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use rstest::rstest;
    use serde_json::Value;

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    /// A token of the stock executor for that secret and time, valid for a minute.
    const TOKEN: &str = "eyJ0eXAiOiJKV1QiLCJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJUZXJyYWt1YmVJbnRlcm5hbCIsInN1YiI6IlRlcnJha3ViZUludGVybmFsIChUT0tFTikiLCJhdWQiOiJUZXJyYWt1YmVJbnRlcm5hbCIsImVtYWlsIjoibm8tcmVwbHlAdGVycmFrdWJlLmlvIiwiZW1haWxfdmVyaWZpZWQiOnRydWUsIm5hbWUiOiJUZXJyYWt1YmVJbnRlcm5hbCBDbGllbnQiLCJpYXQiOjE3NjcyMjU2MDAsImV4cCI6MTc2NzIyNTY2MH0.UpBfXtjUA3-PS6f9PVLXOmcK1qBrKtfX0BKLNQrBsBE";

    /// Seconds since the epoch.
    const ISSUED: u64 = 1_767_225_600;

    fn issued() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(ISSUED)
    }

    #[rstest]
    #[case(SECRET)]
    #[case(" MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY\n")]
    #[case::bits_that_belong_to_no_byte("MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWZ=")]
    fn a_token_equals_the_stock_executors_byte_for_byte(#[case] secret: &str) {
        let token = TokenSource::parse(secret)
            .unwrap()
            .mint_at(issued(), BRIEF, None)
            .unwrap();
        assert_eq!(token.expose_secret(), TOKEN);
    }

    #[test]
    fn a_workspace_is_claimed_only_where_it_is_named() {
        let source = TokenSource::parse(SECRET).unwrap();
        let claims = |token: Option<SecretString>| -> Value {
            let token = token.unwrap();
            let body = token.expose_secret().split('.').nth(1).unwrap();
            serde_json::from_slice(&URL_SAFE_NO_PAD.decode(body).unwrap()).unwrap()
        };
        let claimed = claims(source.mint_for_workspace(SCRIPT, "7c0f2b44"));
        assert_eq!(claimed["workspaceId"], "7c0f2b44");
        assert_eq!(
            claimed["exp"].as_u64().unwrap() - claimed["iat"].as_u64().unwrap(),
            300
        );
        assert!(claims(source.mint(SCRIPT)).get("workspaceId").is_none());
    }

    #[test]
    fn without_security_there_is_no_token() {
        assert!(TokenSource::disabled().mint(CALL).is_none());
    }

    #[test]
    fn the_token_of_a_lease_is_for_requests_alone() {
        // Each client does this. An earlier provider stays.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let token = JobToken::new("mfr_planted".to_owned().into());
        let source = TokenSource::of_lease(token.clone());
        assert!(source.mint(CALL).is_none());
        assert!(source.mint_for_workspace(INIT, "7c0f2b44").is_none());
        let authorization = || {
            let request = reqwest::Client::new().get("http://hub.example.test");
            let request = source.authorize(request, CALL).build().unwrap();
            assert_eq!(request.headers()[version::HEADER], "1");
            request.headers()["authorization"]
                .to_str()
                .unwrap()
                .to_owned()
        };
        assert_eq!(authorization(), "Bearer mfr_planted");
        token.replace("mfr_next");
        assert_eq!(authorization(), "Bearer mfr_next");
    }

    #[test]
    fn no_key_and_no_token_is_shown() {
        let shown = format!("{:?}", TokenSource::parse(SECRET).unwrap());
        assert_eq!(shown, "TokenSource(signing)");
        let token = JobToken::new("mfr_planted".to_owned().into());
        let shown = format!("{token:?} {:?}", TokenSource::of_lease(token.clone()));
        assert!(!shown.contains("planted"), "{shown}");
    }
}
