//! The settings of an executor's lease.

use clap::Args;
use job_contract::env;
use pool_protocol::path::LeaseCall;
use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};

use crate::calls::address::{base_url, extended};
use crate::calls::job_token::JobToken;
use runtime::setting::{HttpUrl, ReadSetting as _, Setting, SettingError};

/// The lease that a hub has granted for the step.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Platform")]
pub struct LeaseArgs {
    /// URL of the lease that a hub has granted for the step. The hub also relays requests to the platform, unless the
    /// URL of the platform's API is set.
    #[arg(long, env = env::LEASE_URL, value_name = "URL")]
    pub lease_url: Option<Setting<HttpUrl>>,
    /// The token of the lease.
    #[arg(long, env = env::LEASE_TOKEN, value_name = "TOKEN", hide_env_values = true, hide = true)]
    pub lease_token: Option<Setting<SecretString>>,
}

/// A lease at a hub.
#[derive(Clone, Debug)]
pub struct LeaseConfig {
    url: Url,
    pub(crate) token: JobToken,
}

impl LeaseConfig {
    /// Returns the lease with this URL and token.
    pub const fn new(url: Url, token: JobToken) -> Self {
        Self { url, token }
    }

    /// Returns the URL of the lease.
    pub const fn url(&self) -> &Url {
        &self.url
    }

    /// Returns the token of the lease.
    pub const fn token(&self) -> &JobToken {
        &self.token
    }

    /// Returns the prefix of the platform's paths behind the hub.
    pub(crate) fn relay(&self) -> Url {
        extended(&self.url, &["platform"])
    }

    pub(super) fn call(&self, call: LeaseCall) -> Url {
        extended(&self.url, &[call.name()])
    }
}

impl LeaseArgs {
    /// Returns whether a lease is set.
    pub fn is_set(&self) -> bool {
        self.lease_url.is_set()
    }

    /// Returns the values that must never be shown.
    pub fn secrets(&self) -> impl Iterator<Item = SecretString> {
        self.lease_token.get().cloned().into_iter()
    }

    /// Returns the lease, or `None` if there is none.
    pub fn resolve(&self) -> Result<Option<LeaseConfig>, Vec<SettingError>> {
        let mut errors = Vec::new();
        if !self.is_set() && !self.lease_token.is_set() {
            return Ok(None);
        }
        let missing = |variable, other| {
            SettingError::new(variable, format!("is not set, and `{other}` needs it"))
        };
        let url = if self.is_set() {
            base_url(env::LEASE_URL, self.lease_url.as_ref(), &mut errors)
        } else {
            errors.push(missing(env::LEASE_URL, env::LEASE_TOKEN));
            None
        };
        let token = self.lease_token.read(&mut errors);
        match &token {
            None if !self.lease_token.is_set() => {
                errors.push(missing(env::LEASE_TOKEN, env::LEASE_URL));
            }
            Some(token)
                if !token
                    .expose_secret()
                    .bytes()
                    .all(|byte| byte.is_ascii_graphic()) =>
            {
                let text = "is no token of a lease: it must be printable ASCII without blanks";
                errors.push(SettingError::new(env::LEASE_TOKEN, text));
            }
            _ => {}
        }
        match (url, token) {
            (Some(url), Some(token)) if errors.is_empty() => {
                Ok(Some(LeaseConfig::new(url, JobToken::new(token))))
            }
            _ => Err(errors),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use runtime::setting::from_variables;

    use super::*;

    const URL: (&str, &str) = (env::LEASE_URL, "https://hub.example.test/x/leases/1");
    const TOKEN: (&str, &str) = (env::LEASE_TOKEN, "mfr_planted");

    fn resolve(variables: &[(&str, &str)]) -> Result<Option<LeaseConfig>, Vec<String>> {
        let lease = from_variables::<LeaseArgs>(variables).resolve();
        lease.map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn a_lease_is_a_url_and_a_token() {
        assert!(resolve(&[]).unwrap().is_none());
        assert!(
            resolve(&[(env::LEASE_URL, " "), (env::LEASE_TOKEN, "")])
                .unwrap()
                .is_none()
        );
        let lease = resolve(&[URL, TOKEN]).unwrap().unwrap();
        let called = lease.call(LeaseCall::Accept);
        assert_eq!(
            called.as_str(),
            "https://hub.example.test/x/leases/1/accept"
        );
        assert!(lease.relay().as_str().ends_with("/leases/1/platform"));
        assert!(!format!("{lease:?}").contains("planted"));
    }

    #[rstest]
    #[case(&[URL], "`MAYFLY_LEASE_TOKEN` is not set, and `MAYFLY_LEASE_URL` needs it")]
    #[case(&[TOKEN], "`MAYFLY_LEASE_URL` is not set, and `MAYFLY_LEASE_TOKEN` needs it")]
    #[case(&[(env::LEASE_URL, "ftp://hub"), TOKEN], "`MAYFLY_LEASE_URL` is not an http or https URL")]
    #[case(&[(env::LEASE_URL, "https://a:hunter2@hub/"), TOKEN], "`MAYFLY_LEASE_URL` contains credentials, which are not allowed here")]
    #[case(&[URL, (env::LEASE_TOKEN, "hunter2 x")], "`MAYFLY_LEASE_TOKEN` is no token of a lease: it must be printable ASCII without blanks")]
    fn an_error_names_the_setting_and_contains_no_secret(
        #[case] variables: &[(&str, &str)],
        #[case] error: &str,
    ) {
        assert_eq!(resolve(variables).unwrap_err(), [error]);
    }
}
