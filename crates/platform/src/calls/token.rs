//! Mints the bearer tokens for the platform (contract 5.2). They are signed with the shared secret and valid for minutes.
//! Behind a hub's relay, requests have the token of the lease instead.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit as _, Mac as _};
use job_contract::jwt::UnsignedToken;
use job_contract::secret::{self, SecretError};
use pool_protocol::version;
use reqwest::RequestBuilder;
use secrecy::{ExposeSecret as _, SecretString};
use serde::Serialize;
use serde_json::json;
use sha2::Sha256;

use super::job_token::JobToken;
use crate::StepRef;

/// The issuer, by which the platform distinguishes these tokens from tokens of people.
const ISSUER: &str = "TerrakubeInternal";
/// The subject of an executor. Newer platforms give no rights to another one. Older ones read only the issuer.
const SUBJECT: &str = "TerrakubeInternal (EXECUTOR)";

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
    Signing(Arc<Signing>),
    Lease(JobToken),
}

struct Signing {
    key: Hmac<Sha256>,
    /// The step that the tokens name. Without it, they are for all jobs.
    step: Option<StepClaims>,
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

/// The ids of a step. A newer platform permits a token with them only what is about this step and its job.
#[derive(Serialize)]
struct StepClaims {
    #[serde(rename = "organizationId")]
    organization: String,
    #[serde(rename = "workspaceId")]
    workspace: String,
    #[serde(rename = "jobId")]
    job: String,
    #[serde(rename = "stepId")]
    step: String,
}

/// Claims in the order of the stock executor's tokens. There is no `jti`: older platforms look it up as a person's token.
#[derive(Serialize)]
struct Claims<'c> {
    iss: &'static str,
    sub: &'static str,
    aud: &'static str,
    email: &'static str,
    email_verified: bool,
    name: &'static str,
    #[serde(flatten)]
    step: Option<&'c StepClaims>,
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
        let key = Hmac::new_from_slice(&key).expect("an HMAC takes keys of any length");
        Ok(Self(Kind::Signing(Arc::new(Signing { key, step: None }))))
    }

    /// The same source, with tokens for one step. A lease is for one step already.
    #[must_use]
    pub fn for_step(&self, step: &StepRef) -> Self {
        self.with_step(Some(StepClaims {
            organization: step.organization_id.clone(),
            workspace: step.workspace_id.clone(),
            job: step.job_id.clone(),
            step: step.step_id.clone(),
        }))
    }

    /// The same source, with tokens that name no step. The platform's uploaded content is fetched with these.
    #[must_use]
    pub fn for_all_jobs(&self) -> Self {
        self.with_step(None)
    }

    fn with_step(&self, step: Option<StepClaims>) -> Self {
        let Kind::Signing(signing) = &self.0 else {
            return self.clone();
        };
        let key = signing.key.clone();
        Self(Kind::Signing(Arc::new(Signing { key, step })))
    }

    /// A token that is valid from now on. `None` if the platform checks none, and behind a hub: the token of a lease stays
    /// in this process.
    pub fn mint(&self, lifetime: Duration) -> Option<SecretString> {
        self.mint_at(SystemTime::now(), lifetime)
    }

    fn mint_at(&self, now: SystemTime, lifetime: Duration) -> Option<SecretString> {
        let Kind::Signing(signing) = &self.0 else {
            return None;
        };
        let iat = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let claims = Claims {
            iss: ISSUER,
            sub: SUBJECT,
            aud: ISSUER,
            email: "no-reply@terrakube.io",
            email_verified: true,
            name: "TerrakubeInternal Client",
            step: signing.step.as_ref(),
            iat,
            exp: iat + lifetime.as_secs(),
        };
        let token = UnsignedToken::new(&json!({"typ": "JWT", "alg": "HS256"}), &claims);
        let code = signing.key.clone().chain_update(token.signing_input());
        Some(token.with_signature(&code.finalize().into_bytes()).into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    /// The token for all jobs, for that secret and time, valid for a minute.
    const OF_ALL_JOBS: &str = "eyJ0eXAiOiJKV1QiLCJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJUZXJyYWt1YmVJbnRlcm5hbCIsInN1YiI6IlRlcnJha3ViZUludGVybmFsIChFWEVDVVRPUikiLCJhdWQiOiJUZXJyYWt1YmVJbnRlcm5hbCIsImVtYWlsIjoibm8tcmVwbHlAdGVycmFrdWJlLmlvIiwiZW1haWxfdmVyaWZpZWQiOnRydWUsIm5hbWUiOiJUZXJyYWt1YmVJbnRlcm5hbCBDbGllbnQiLCJpYXQiOjE3NjcyMjU2MDAsImV4cCI6MTc2NzIyNTY2MH0.3qZFqxzX7t63-bhjDk9G2rht6w3RK_i8Q0aQSZ1XvW8";
    /// The token for one step, with the same secret and times.
    const OF_STEP: &str = "eyJ0eXAiOiJKV1QiLCJhbGciOiJIUzI1NiJ9.eyJpc3MiOiJUZXJyYWt1YmVJbnRlcm5hbCIsInN1YiI6IlRlcnJha3ViZUludGVybmFsIChFWEVDVVRPUikiLCJhdWQiOiJUZXJyYWt1YmVJbnRlcm5hbCIsImVtYWlsIjoibm8tcmVwbHlAdGVycmFrdWJlLmlvIiwiZW1haWxfdmVyaWZpZWQiOnRydWUsIm5hbWUiOiJUZXJyYWt1YmVJbnRlcm5hbCBDbGllbnQiLCJvcmdhbml6YXRpb25JZCI6IjBiMWY2YzFlLTlkNTEtNGMxZi04YjFlLTBkNmE1ZjZmMmExMCIsIndvcmtzcGFjZUlkIjoiN2MwZjJiNDQtNTJmMy00YTBlLTlhNWQtM2ExZDhlN2M5YjIxIiwiam9iSWQiOiI0MTIiLCJzdGVwSWQiOiI1YTVlMWYwYi05YzNmLTRhNTUtOWYwZS0zZDBmM2I4ZjAxMDEiLCJpYXQiOjE3NjcyMjU2MDAsImV4cCI6MTc2NzIyNTY2MH0.XChDk93rmt6pPE1kUnYVb8bTkO2I1YVEW5Je40p12Fs";

    /// Seconds since the epoch.
    const ISSUED: u64 = 1_767_225_600;

    fn issued() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(ISSUED)
    }

    fn step() -> StepRef {
        StepRef {
            organization_id: "0b1f6c1e-9d51-4c1f-8b1e-0d6a5f6f2a10".into(),
            workspace_id: "7c0f2b44-52f3-4a0e-9a5d-3a1d8e7c9b21".into(),
            job_id: "412".into(),
            step_id: "5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101".into(),
            step_type: "terraformPlan".into(),
        }
    }

    #[rstest]
    #[case(SECRET)]
    #[case(" MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY\n")]
    #[case::bits_that_belong_to_no_byte("MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWZ=")]
    fn a_token_equals_the_vectors_of_the_newest_platform_byte_for_byte(#[case] secret: &str) {
        let source = TokenSource::parse(secret).unwrap();
        let minted = |source: &TokenSource| {
            let token = source.mint_at(issued(), BRIEF).unwrap();
            token.expose_secret().to_owned()
        };
        assert_eq!(minted(&source), OF_ALL_JOBS);
        let of_step = source.for_step(&step());
        assert_eq!(minted(&of_step), OF_STEP);
        assert_eq!(minted(&of_step.for_all_jobs()), OF_ALL_JOBS);
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
        let source = source.for_step(&step());
        assert!(source.mint(INIT).is_none());
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
