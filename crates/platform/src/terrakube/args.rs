//! The settings of the client of Terrakube's API, under the stock names (contract 10.1). Both programs use them.

use std::time::Duration;

use clap::Args;
use job_contract::build::needs;
use job_contract::env;
use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};

use super::template;
use crate::StepRef;
use crate::calls::address::base_url;
use crate::calls::token::TokenSource;
use crate::lease::LeaseConfig;
use runtime::setting::{HttpUrl, ReadSetting as _, Seconds, Setting, SettingError};

const DISPATCH_WAIT: Duration = Duration::from_secs(30);
const STATUS_POLL: Duration = Duration::from_secs(5);
const REPORT_PATIENCE: Duration = Duration::from_mins(10);

/// The options of the platform's API.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Platform")]
pub struct TerrakubeArgs {
    /// Base URL of the platform's API, as this program reaches it; without one, records are kept on this machine.
    #[arg(long, env = env::API_URL, value_name = "URL")]
    pub api_url: Option<Setting<HttpUrl>>,
    /// Base URL of the platform's API as users and records know it; scripts get it as `terrakubeApi`.
    #[arg(long, env = env::PUBLIC_API_URL, value_name = "URL")]
    pub public_api_url: Option<Setting<HttpUrl>>,
    /// Host of the platform's module registry, with its port where it has one.
    #[arg(long, env = env::REGISTRY_DOMAIN, value_name = "HOST[:PORT]")]
    pub registry_domain: Option<Setting<String>>,
    /// The secret shared with the platform, base64.
    #[arg(long, env = env::INTERNAL_SECRET, value_name = "BASE64", hide_env_values = true, hide = true)]
    pub internal_secret: Option<Setting<SecretString>>,
    /// `false` for a platform that checks no tokens [default: true].
    #[arg(long, env = env::ENABLE_SECURITY, value_name = "BOOL")]
    pub enable_security: Option<Setting<bool>>,
    /// How many seconds to wait for the platform to record the dispatch [default: 30].
    #[arg(long, env = env::DISPATCH_WAIT_SECONDS, value_name = "SECONDS")]
    pub dispatch_wait_seconds: Option<Setting<Seconds>>,
    /// Seconds between two checks whether the job was cancelled; up to twice as many [default: 5].
    #[arg(long, env = env::STATUS_POLL_SECONDS, value_name = "SECONDS")]
    pub status_poll_seconds: Option<Setting<Seconds>>,
    /// Seconds for which the final report is repeated while the platform does not answer [default: 600].
    #[arg(long, env = env::REPORT_PATIENCE_SECONDS, value_name = "SECONDS")]
    pub report_patience_seconds: Option<Setting<Seconds>>,
}

/// The checked settings of Terrakube's API.
#[derive(Clone, Debug)]
pub struct TerrakubeConfig {
    pub api_url: Url,
    /// Base URL of the addresses written into records, and of the job context unless a hub relays the calls.
    pub public_url: Url,
    pub registry_domain: Option<String>,
    pub tokens: TokenSource,
    /// How long to wait for the platform to record a dispatch.
    pub dispatch_wait: Duration,
    /// The shortest pause between two checks whether a job was cancelled.
    pub status_poll: Duration,
    /// How long the final report is retried.
    pub report_patience: Duration,
    /// The lease on the step, where a hub has given one.
    pub lease: Option<LeaseConfig>,
}

impl TerrakubeConfig {
    /// Whether a hub relays the calls to the platform.
    pub const fn is_relayed(&self) -> bool {
        self.tokens.is_of_lease()
    }

    /// The same settings, with tokens for one step.
    #[must_use]
    pub fn for_step(self, step: &StepRef) -> Self {
        Self {
            tokens: self.tokens.for_step(step),
            ..self
        }
    }
}

impl TerrakubeArgs {
    /// Whether the address of an API is set.
    pub fn is_set(&self) -> bool {
        self.api_url.is_set()
    }

    /// Whether the platform checks tokens, as far as the settings say.
    pub fn checks_tokens(&self) -> bool {
        self.enable_security.get() != Some(&false)
    }

    /// Base URL of the API, as the operator wrote it.
    pub fn api_url(&self) -> Option<&str> {
        self.api_url.get().map(|url| url.text.as_str())
    }

    /// Public base URL of the API, as the operator wrote it.
    pub fn public_url(&self) -> Option<&str> {
        self.public_api_url.get().map(|url| url.text.as_str())
    }

    /// The values that must never be shown.
    pub fn secrets(&self) -> impl Iterator<Item = SecretString> {
        self.internal_secret.get().cloned().into_iter()
    }

    /// The checked settings, or all their errors. `None` if no API is set.
    pub fn resolve(&self) -> Result<Option<TerrakubeConfig>, Vec<SettingError>> {
        if !self.is_set() {
            return Ok(None);
        }
        self.resolve_with(None).map(Some)
    }

    /// The settings of an executor with a lease. Its calls go to the API if one is set, otherwise through the hub's relay.
    pub fn resolve_leased(&self, lease: LeaseConfig) -> Result<TerrakubeConfig, Vec<SettingError>> {
        self.resolve_with(Some(lease))
    }

    fn resolve_with(
        &self,
        lease: Option<LeaseConfig>,
    ) -> Result<TerrakubeConfig, Vec<SettingError>> {
        if !template::IS_BUILT {
            let name = lease.map_or(env::API_URL, |_| env::LEASE_URL);
            let text = needs("a client of the platform");
            return Err(vec![SettingError::new(name, text)]);
        }
        let errors = &mut Vec::new();
        let seconds = |setting: &Option<Setting<Seconds>>, default, errors: &mut _| {
            setting.read(errors).map_or(default, |Seconds(time)| time)
        };
        let relay = lease.as_ref().filter(|_| !self.is_set());
        let api_url = match relay {
            Some(lease) => Some(lease.relay()),
            None => base_url(env::API_URL, self.api_url.as_ref(), errors),
        };
        let public_url = base_url(env::PUBLIC_API_URL, self.public_api_url.as_ref(), errors);
        let registry_domain = self.registry_domain.read(errors);
        let dispatch_wait = seconds(&self.dispatch_wait_seconds, DISPATCH_WAIT, errors);
        let status_poll = seconds(&self.status_poll_seconds, STATUS_POLL, errors);
        let report_patience = seconds(&self.report_patience_seconds, REPORT_PATIENCE, errors);
        let tokens = match relay {
            Some(lease) => Some(TokenSource::of_lease(lease.token.clone())),
            None => self.tokens(errors),
        };
        let config = || {
            Some(TerrakubeConfig {
                api_url: api_url?,
                public_url: public_url?,
                registry_domain,
                tokens: tokens?,
                dispatch_wait,
                status_poll,
                report_patience,
                lease,
            })
        };
        match config() {
            Some(config) if errors.is_empty() => Ok(config),
            _ => Err(std::mem::take(errors)),
        }
    }

    fn tokens(&self, errors: &mut Vec<SettingError>) -> Option<TokenSource> {
        if self.enable_security.read(errors) == Some(false) {
            return Some(TokenSource::disabled());
        }
        let mut reject = |text: String| {
            errors.push(SettingError::new(env::INTERNAL_SECRET, text));
            None
        };
        let Some(secret) = self.internal_secret.get() else {
            return reject(format!(
                "is not set; without it the platform rejects every request, unless `{}` is false",
                env::ENABLE_SECURITY
            ));
        };
        TokenSource::parse(secret.expose_secret())
            .map_or_else(|error| reject(error.to_string()), Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser};
    use runtime::setting::from_variables;

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        platform: TerrakubeArgs,
    }

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    const USUAL: &[(&str, &str)] = &[
        (env::API_URL, "http://api:8080/"),
        (env::PUBLIC_API_URL, "https://api.example.test"),
        (env::INTERNAL_SECRET, SECRET),
    ];

    fn resolve(more: &[(&str, &str)]) -> Result<Option<TerrakubeConfig>, Vec<String>> {
        from_variables::<TerrakubeArgs>(&[USUAL, more].concat())
            .resolve()
            .map_err(|errors| errors.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Program::command().debug_assert();
    }

    #[test]
    fn without_an_api_there_is_no_platform() {
        assert!(TerrakubeArgs::default().resolve().unwrap().is_none());
        assert!(resolve(&[(env::API_URL, " ")]).unwrap().is_none());
    }

    #[test]
    fn the_usual_settings_are_enough() {
        let config = resolve(&[]).unwrap().unwrap();
        assert_eq!(config.api_url.as_str(), "http://api:8080/");
        assert_eq!(config.dispatch_wait, DISPATCH_WAIT);
        assert_eq!(config.report_patience, REPORT_PATIENCE);
        assert!(config.tokens.mint(Duration::from_secs(1)).is_some());
    }

    #[test]
    fn a_platform_without_security_needs_no_secret() {
        let config = resolve(&[(env::INTERNAL_SECRET, ""), (env::ENABLE_SECURITY, "FALSE")]);
        let tokens = config.unwrap().unwrap().tokens;
        assert!(tokens.mint(Duration::from_secs(1)).is_none());
    }

    #[test]
    fn a_platform_checks_tokens_unless_the_settings_say_that_it_does_not() {
        let checks = |value| {
            from_variables::<TerrakubeArgs>(&[(env::ENABLE_SECURITY, value)]).checks_tokens()
        };
        assert!(!checks("False"));
        for value in ["true", "perhaps", ""] {
            assert!(checks(value), "{value:?}");
        }
    }

    #[test]
    fn all_errors_are_reported_at_once_and_without_secrets() {
        let errors = resolve(&[
            (env::API_URL, "ftp://api"),
            (env::PUBLIC_API_URL, "https://me:hunter2@api.example.test"),
            (env::INTERNAL_SECRET, "hunter2 hunter2"),
            (env::STATUS_POLL_SECONDS, "0"),
            (env::REPORT_PATIENCE_SECONDS, "soon"),
        ])
        .unwrap_err();
        assert_eq!(
            errors,
            [
                "`AzBuilderApiUrl` is not an http or https URL",
                "`TerrakubeApiUrl` contains credentials, which are not allowed here",
                "`MAYFLY_STATUS_POLL_SECONDS` is `0`, expected a number of seconds, 1 at least",
                "`MAYFLY_REPORT_PATIENCE_SECONDS` is `soon`, expected a number of seconds, 1 at least",
                "`InternalSecret` is not base64",
            ]
        );
    }

    #[test]
    fn a_missing_secret_is_named() {
        let errors = resolve(&[(env::INTERNAL_SECRET, "")]).unwrap_err();
        assert!(
            errors[0].starts_with("`InternalSecret` is not set"),
            "{errors:?}"
        );
    }

    #[test]
    fn the_secret_is_not_shown() {
        let args = from_variables::<TerrakubeArgs>(USUAL);
        assert!(!format!("{args:?}").contains("MDEy"));
    }
}
