//! Tokens: those of dispatches (contract 2.3), and those of requests to the platform (contract 5.2).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

/// Issuer of the tokens that may change jobs.
pub(crate) const INTERNAL: &str = "TerrakubeInternal";

/// Issuer of the tokens of people.
const PERSONAL: &str = "Terrakube";

/// Subject of executors. Newer releases read it.
const EXECUTOR: &str = "TerrakubeInternal (EXECUTOR)";

/// How long the token of a dispatch is valid.
pub(crate) const LIFETIME: Duration = Duration::from_secs(10);

/// The shared secret.
#[derive(Debug, Clone)]
pub struct Secret(Vec<u8>);

/// The claims of a valid token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bearer {
    pub(crate) issuer: String,
    /// None without the time of issue.
    pub(crate) lifetime: Option<Duration>,
    pub(crate) subject: Option<String>,
    pub(crate) organization: Option<String>,
    pub(crate) workspace: Option<String>,
    pub(crate) job: Option<String>,
}

impl Bearer {
    /// Whether it is of an executor, for all jobs. With a workspace, its subject does not matter.
    pub(crate) fn is_of_an_executor(&self) -> bool {
        self.workspace.is_none() && self.subject.as_deref() == Some(EXECUTOR)
    }
}

#[derive(Deserialize)]
struct Claims {
    iss: String,
    aud: Value,
    iat: Option<u64>,
    exp: u64,
    jti: Option<String>,
    sub: Option<String>,
    #[serde(rename = "organizationId")]
    organization: Option<String>,
    #[serde(rename = "workspaceId")]
    workspace: Option<String>,
    #[serde(rename = "jobId")]
    job: Option<String>,
}

impl Secret {
    pub(crate) fn new(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }

    /// A secret of 64 bytes, for tests without a platform. Its text has characters that are special in Base64.
    #[must_use]
    pub fn long() -> Self {
        Self::new(&[0xfb; 64])
    }

    /// As operators set it.
    #[must_use]
    pub fn text(&self) -> String {
        URL_SAFE_NO_PAD.encode(&self.0)
    }

    /// The token of a dispatch, with the algorithm that the length of the secret chooses.
    #[must_use]
    pub fn dispatch_token(&self, lifetime: Duration) -> String {
        let now = seconds();
        let claims = json!({
            "iss": "TERRAKUBE_INTERNAL", "sub": "Terrakube Internal (Token)", "aud": ["TERRAKUBE_INTERNAL"],
            "jti": Uuid::new_v4(), "email": "internal@terrakube.io", "email_verified": true,
            "name": "Terrakube Api", "iat": now, "exp": now + lifetime.as_secs(),
        });
        let algorithm = match self.0.len() {
            ..48 => Algorithm::HS256,
            48..64 => Algorithm::HS384,
            _ => Algorithm::HS512,
        };
        self.sign(algorithm, &claims)
    }

    /// A token with these claims.
    #[must_use]
    pub fn sign(&self, algorithm: Algorithm, claims: &Value) -> String {
        let mut header = Header::new(algorithm);
        header.typ = None;
        jsonwebtoken::encode(&header, claims, &EncodingKey::from_secret(&self.0))
            .expect("a secret signs")
    }

    /// Reads the token of a request. The error says what is wrong with it.
    pub(crate) fn read(&self, authorization: &str) -> Result<Bearer, String> {
        let token = authorization
            .strip_prefix("Bearer ")
            .ok_or("no bearer token")?;
        let mut rules = Validation::new(Algorithm::HS256);
        rules.validate_aud = false;
        rules.leeway = 60;
        let key = DecodingKey::from_secret(&self.0);
        let claims = jsonwebtoken::decode::<Claims>(token, &key, &rules)
            .map_err(|error| error.to_string())?
            .claims;
        if ![INTERNAL, PERSONAL].contains(&claims.iss.as_str()) {
            return Err(format!("the issuer `{}`", claims.iss));
        }
        let named = match &claims.aud {
            Value::String(audience) => audience == INTERNAL,
            Value::Array(audiences) => audiences.iter().any(|audience| audience == INTERNAL),
            _ => false,
        };
        if claims.iss == INTERNAL && !named {
            return Err("an audience that is not ours".to_owned());
        }
        if let Some(id) = claims.jti
            && Uuid::parse_str(&id).is_err()
        {
            return Err(format!("the token id `{id}` is no UUID"));
        }
        let lifetime = claims.iat.and_then(|made| claims.exp.checked_sub(made));
        Ok(Bearer {
            issuer: claims.iss,
            lifetime: lifetime.map(Duration::from_secs),
            subject: claims.sub,
            organization: claims.organization,
            workspace: claims.workspace,
            job: claims.job,
        })
    }
}

fn seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.expect("the clock is past 1970").as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &[u8; 32] = b"0123456789abcdef0123456789abcdef";

    fn signed(algorithm: Algorithm, claims: &Value) -> String {
        let key = EncodingKey::from_secret(SECRET);
        let token = jsonwebtoken::encode(&Header::new(algorithm), claims, &key).unwrap();
        format!("Bearer {token}")
    }

    fn claims() -> Value {
        let now = seconds();
        json!({"iss": INTERNAL, "sub": "x", "aud": INTERNAL, "iat": now, "exp": now + 60})
    }

    #[test]
    fn a_token_of_a_program_is_read_with_either_form_of_audience() {
        let mut claims = claims();
        for audience in [json!(INTERNAL), json!([INTERNAL])] {
            claims["aud"] = audience;
            let bearer = Secret::new(SECRET).read(&signed(Algorithm::HS256, &claims));
            let bearer = bearer.unwrap();
            assert_eq!(bearer.issuer, INTERNAL);
            assert_eq!(bearer.lifetime, Some(Duration::from_mins(1)));
            assert!(!bearer.is_of_an_executor());
        }
    }

    #[test]
    fn a_token_is_of_an_executor_by_its_subject_unless_it_names_a_workspace() {
        let mut claims = claims();
        let read = |claims: &Value| {
            let token = signed(Algorithm::HS256, claims);
            Secret::new(SECRET).read(&token).unwrap()
        };
        for (subject, is_one) in [
            ("TerrakubeInternal (EXECUTOR)", true),
            ("TerrakubeInternal (TOKEN)", false),
        ] {
            claims["sub"] = json!(subject);
            assert_eq!(read(&claims).is_of_an_executor(), is_one, "{subject}");
        }
        claims["sub"] = json!(EXECUTOR);
        claims["workspaceId"] = json!("w");
        claims["jobId"] = json!("412");
        let bearer = read(&claims);
        assert!(!bearer.is_of_an_executor());
        let named = (bearer.workspace.as_deref(), bearer.job.as_deref());
        assert_eq!(named, (Some("w"), Some("412")));
    }

    #[test]
    fn what_the_platform_would_not_read_is_refused() {
        let secret = Secret::new(SECRET);
        let with = |name: &str, value: Value| {
            let mut claims = claims();
            claims[name] = value;
            signed(Algorithm::HS256, &claims)
        };
        let unsigned = "Bearer eyJhbGciOiJub25lIn0.eyJpc3MiOiJUZXJyYWt1YmVJbnRlcm5hbCJ9.";
        for bad in [
            String::new(),
            "Basic eDp5".to_owned(),
            unsigned.to_owned(),
            signed(Algorithm::HS512, &claims()),
            with("exp", json!(seconds() - 120)),
            with("iss", json!("TERRAKUBE_INTERNAL")),
            with("aud", json!("somebody")),
            with("jti", json!("run-412")),
        ] {
            assert!(secret.read(&bad).is_err(), "{bad}");
        }
        assert!(
            Secret::new(&[7; 32])
                .read(&signed(Algorithm::HS256, &claims()))
                .is_err()
        );
    }

    #[test]
    fn the_length_of_the_secret_chooses_the_algorithm_of_a_dispatch() {
        for (length, algorithm) in [
            (32, Algorithm::HS256),
            (48, Algorithm::HS384),
            (64, Algorithm::HS512),
        ] {
            let token = Secret::new(&vec![1; length]).dispatch_token(LIFETIME);
            assert_eq!(jsonwebtoken::decode_header(token).unwrap().alg, algorithm);
        }
    }
}
