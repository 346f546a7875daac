//! The settings by which a program finds Terrakube's API, under the stock names (contract 10.1). Both programs read
//! them, so they are read in one place.

use std::time::Duration;

use clap::Args;
use job_contract::env;
use reqwest::Url;
use secrecy::{ExposeSecret as _, SecretString};

use super::token::TokenSource;
use runtime::setting::{SettingProblem, present};

const DISPATCH_WAIT: Duration = Duration::from_secs(30);
const STATUS_POLL: Duration = Duration::from_secs(5);
const REPORT_PATIENCE: Duration = Duration::from_mins(10);

/// Where the platform's API is, and how it is spoken to.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Platform")]
pub struct TerrakubeArgs {
    /// Base URL of the platform's API, as this program reaches it; without one, records are kept on this machine.
    #[arg(long, env = env::API_URL, value_name = "URL")]
    pub api_url: Option<String>,
    /// Base URL of the platform's API as users and records know it; scripts get it as `terrakubeApi`.
    #[arg(long, env = env::PUBLIC_API_URL, value_name = "URL")]
    pub public_api_url: Option<String>,
    /// Host of the platform's module registry, with its port where it has one.
    #[arg(long, env = env::REGISTRY_DOMAIN, value_name = "HOST[:PORT]")]
    pub registry_domain: Option<String>,
    /// The secret shared with the platform, base64.
    #[arg(long, env = env::INTERNAL_SECRET, value_name = "BASE64", hide_env_values = true, hide = true)]
    pub internal_secret: Option<SecretString>,
    /// `false` for a platform that checks no tokens [default: true].
    #[arg(long, env = env::ENABLE_SECURITY, value_name = "BOOL")]
    pub enable_security: Option<String>,
    /// How many seconds to wait for the platform to record the dispatch [default: 30].
    #[arg(long, env = env::DISPATCH_WAIT_SECONDS, value_name = "SECONDS")]
    pub dispatch_wait_seconds: Option<String>,
    /// Every how many seconds to ask whether the job was cancelled; up to twice as long [default: 5].
    #[arg(long, env = env::STATUS_POLL_SECONDS, value_name = "SECONDS")]
    pub status_poll_seconds: Option<String>,
    /// How many seconds to try the final report while the platform does not answer [default: 600].
    #[arg(long, env = env::REPORT_PATIENCE_SECONDS, value_name = "SECONDS")]
    pub report_patience_seconds: Option<String>,
}

/// How Terrakube's API is reached.
#[derive(Clone, Debug)]
pub struct TerrakubeConfig {
    /// Base URL of API calls.
    pub api_url: Url,
    /// Base URL of the job context and of the addresses written into records.
    pub public_url: Url,
    /// Host of the module registry.
    pub registry_domain: Option<String>,
    /// What requests are signed with.
    pub tokens: TokenSource,
    /// How long to wait for the platform to record a dispatch.
    pub dispatch_wait: Duration,
    /// The shorter of the pauses between two questions whether a job was cancelled.
    pub status_poll: Duration,
    /// How long the final report is tried.
    pub report_patience: Duration,
}

impl TerrakubeArgs {
    /// The settings, `None` when no API is named, or everything that is wrong with them.
    pub fn resolve(&self) -> Result<Option<TerrakubeConfig>, Vec<SettingProblem>> {
        if present(self.api_url.as_deref()).is_none() {
            return Ok(None);
        }
        let mut reader = Reader::default();
        let api_url = reader.keep(base_url(env::API_URL, self.api_url.as_deref()));
        let public_url = reader.keep(base_url(
            env::PUBLIC_API_URL,
            self.public_api_url.as_deref(),
        ));
        let dispatch_wait = reader.keep(seconds(
            env::DISPATCH_WAIT_SECONDS,
            self.dispatch_wait_seconds.as_deref(),
            DISPATCH_WAIT,
        ));
        let status_poll = reader.keep(seconds(
            env::STATUS_POLL_SECONDS,
            self.status_poll_seconds.as_deref(),
            STATUS_POLL,
        ));
        let report_patience = reader.keep(seconds(
            env::REPORT_PATIENCE_SECONDS,
            self.report_patience_seconds.as_deref(),
            REPORT_PATIENCE,
        ));
        let tokens = reader.keep(self.tokens());
        let config = || {
            Some(TerrakubeConfig {
                api_url: api_url?,
                public_url: public_url?,
                registry_domain: present(self.registry_domain.as_deref()).map(str::to_owned),
                tokens: tokens?,
                dispatch_wait: dispatch_wait?,
                status_poll: status_poll?,
                report_patience: report_patience?,
            })
        };
        config().map(Some).ok_or(reader.problems)
    }

    fn tokens(&self) -> Result<TokenSource, SettingProblem> {
        let secured = match present(self.enable_security.as_deref()) {
            None => true,
            Some(text) if text.eq_ignore_ascii_case("true") => true,
            Some(text) if text.eq_ignore_ascii_case("false") => false,
            Some(text) => {
                return Err(SettingProblem::new(
                    env::ENABLE_SECURITY,
                    format!("is `{text}`, expected `true` or `false`"),
                ));
            }
        };
        if !secured {
            return Ok(TokenSource::disabled());
        }
        let problem = |text: String| SettingProblem::new(env::INTERNAL_SECRET, text);
        let secret = self
            .internal_secret
            .as_ref()
            .map(SecretString::expose_secret);
        let secret = present(secret).ok_or_else(|| {
            problem(format!(
                "is not set; without it the platform answers nobody, unless `{}` is false",
                env::ENABLE_SECURITY
            ))
        })?;
        TokenSource::parse(secret).map_err(|error| problem(error.to_string()))
    }
}

/// Collects problems while settings are read.
#[derive(Default)]
struct Reader {
    problems: Vec<SettingProblem>,
}

impl Reader {
    fn keep<T>(&mut self, read: Result<T, SettingProblem>) -> Option<T> {
        read.map_err(|problem| self.problems.push(problem)).ok()
    }
}

fn base_url(variable: &'static str, text: Option<&str>) -> Result<Url, SettingProblem> {
    let problem = |text: &str| SettingProblem::new(variable, text);
    let text = present(text).ok_or_else(|| problem("is not set"))?;
    let url = Url::parse(text).map_err(|_| problem("is not a URL"))?;
    if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
        return Err(problem("is not an http or https URL"));
    }
    // Addresses are written into records and logs.
    if !url.username().is_empty() || url.password().is_some() {
        return Err(problem("holds credentials, which do not belong there"));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(problem("is a base URL and takes no query"));
    }
    Ok(url)
}

fn seconds(
    variable: &'static str,
    text: Option<&str>,
    default: Duration,
) -> Result<Duration, SettingProblem> {
    let Some(text) = present(text) else {
        return Ok(default);
    };
    match text.parse() {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds)),
        _ => Err(SettingProblem::new(
            variable,
            format!("is `{text}`, expected a number of seconds, 1 at least"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory as _, Parser};

    #[derive(Debug, Parser)]
    struct Program {
        #[command(flatten)]
        platform: TerrakubeArgs,
    }

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    fn resolve(
        change: impl FnOnce(&mut TerrakubeArgs),
    ) -> Result<Option<TerrakubeConfig>, Vec<String>> {
        let mut args = TerrakubeArgs {
            api_url: Some("http://api:8080/".to_owned()),
            public_api_url: Some("https://api.example.test".to_owned()),
            internal_secret: Some(SECRET.into()),
            ..TerrakubeArgs::default()
        };
        change(&mut args);
        args.resolve()
            .map_err(|problems| problems.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_command_line_is_well_formed() {
        Program::command().debug_assert();
    }

    #[test]
    fn without_an_api_there_is_no_platform() {
        for none in [None, Some(" ".to_owned())] {
            assert!(resolve(|args| args.api_url = none).unwrap().is_none());
        }
    }

    #[test]
    fn the_usual_settings_are_enough() {
        let config = resolve(|_| {}).unwrap().unwrap();
        assert_eq!(config.api_url.as_str(), "http://api:8080/");
        assert_eq!(config.dispatch_wait, DISPATCH_WAIT);
        assert_eq!(config.report_patience, REPORT_PATIENCE);
        assert!(config.tokens.mint(Duration::from_secs(1)).is_some());
    }

    #[test]
    fn a_platform_without_security_needs_no_secret() {
        let config = resolve(|args| {
            args.internal_secret = None;
            args.enable_security = Some("FALSE".to_owned());
        });
        let tokens = config.unwrap().unwrap().tokens;
        assert!(tokens.mint(Duration::from_secs(1)).is_none());
    }

    #[test]
    fn everything_that_is_wrong_is_told_at_once_and_no_secret_with_it() {
        let problems = resolve(|args| {
            args.api_url = Some("ftp://api".to_owned());
            args.public_api_url = Some("https://me:hunter2@api.example.test".to_owned());
            args.internal_secret = Some("hunter2 hunter2".into());
            args.status_poll_seconds = Some("0".to_owned());
            args.report_patience_seconds = Some("soon".to_owned());
        })
        .unwrap_err();
        assert_eq!(
            problems,
            [
                "`AzBuilderApiUrl` is not an http or https URL",
                "`TerrakubeApiUrl` holds credentials, which do not belong there",
                "`MAYFLY_STATUS_POLL_SECONDS` is `0`, expected a number of seconds, 1 at least",
                "`MAYFLY_REPORT_PATIENCE_SECONDS` is `soon`, expected a number of seconds, 1 at least",
                "`InternalSecret` is not base64",
            ]
        );
    }

    #[test]
    fn a_forgotten_secret_is_named() {
        let problems = resolve(|args| args.internal_secret = None).unwrap_err();
        assert!(
            problems[0].starts_with("`InternalSecret` is not set"),
            "{problems:?}"
        );
    }

    #[test]
    fn the_secret_is_not_shown() {
        let args = TerrakubeArgs {
            internal_secret: Some(SECRET.into()),
            ..TerrakubeArgs::default()
        };
        assert!(!format!("{args:?}").contains("MDEy"));
    }
}
