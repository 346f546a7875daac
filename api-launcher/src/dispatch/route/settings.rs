//! The settings that decide which dispatches the launcher runs.

use clap::Args;
use job_contract::env;
use runtime::setting::present;
use url::Url;

use super::{Fallback, Flag, Routing};
use crate::settings::SettingsReader;

/// The options of routing.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Routing")]
pub struct RoutingArgs {
    /// `all` runs every dispatch, `flag` only those of workspaces with
    /// `TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR` in their environment; the others go to the persistent executor [default: all]
    #[arg(long, value_name = "WHICH", env = env::ROUTE)]
    pub route: Option<String>,

    /// `true` reads a flag of 0, false or off as absent [default: false]
    #[arg(long, value_name = "BOOL", env = env::ROUTE_STRICT, num_args = 0..=1, default_missing_value = "true")]
    pub route_strict: Option<String>,

    /// The persistent executor, its path included: `http://executor:8090/api/v1/terraform-rs`
    #[arg(long, value_name = "URL", env = env::PERSISTENT_EXECUTOR_URL)]
    pub persistent_executor_url: Option<String>,
}

impl RoutingArgs {
    /// Returns the routing, or `None` if one of its settings is invalid.
    pub(crate) fn resolve(&self, reader: &mut SettingsReader) -> Option<Routing> {
        let by_flag = reader.choose(
            env::ROUTE,
            self.route.as_deref(),
            &[("all", false), ("flag", true)],
        );
        let flag = reader.choose(
            env::ROUTE_STRICT,
            self.route_strict.as_deref(),
            &[("false", Flag::Present), ("true", Flag::Strict)],
        );
        let url: Option<Url> = reader.parse(
            env::PERSISTENT_EXECUTOR_URL,
            self.persistent_executor_url.as_deref(),
            "a URL such as `http://executor:8090/api/v1/terraform-rs`",
        );
        let url = url.filter(|url| {
            let fits = matches!(url.scheme(), "http" | "https");
            if !fits {
                reader.reject(
                    env::PERSISTENT_EXECUTOR_URL,
                    "must begin with http:// or https://",
                );
            }
            fits
        });
        if !by_flag {
            return Some(Routing::All);
        }
        let Some(url) = url else {
            if present(self.persistent_executor_url.as_deref()).is_none() {
                reader.reject(
                    env::PERSISTENT_EXECUTOR_URL,
                    format!("is not set, but {} is `flag`", env::ROUTE),
                );
            }
            return None;
        };
        Fallback::new(flag, url)
            .map_err(|error| {
                reader.reject(
                    env::PERSISTENT_EXECUTOR_URL,
                    format!("cannot be used: {error}"),
                );
            })
            .ok()
            .map(Routing::Flag)
    }
}
