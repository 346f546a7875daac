//! The settings that decide which dispatches the launcher runs.

use clap::Args;
use job_contract::env;
use runtime::setting::{HttpUrl, ReadSetting as _, Setting, SettingError, SettingValue, choice};

use super::{Fallback, Routing};

/// The options of routing.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Routing")]
pub struct RoutingArgs {
    /// `all` runs every dispatch, `flag` only those of workspaces with
    /// `TERRAKUBE_ENABLE_EPHEMERAL_EXECUTOR` in their environment; the others go to the persistent executor [default: all]
    #[arg(long, value_name = "WHICH", env = env::ROUTE)]
    pub route: Option<Setting<Route>>,

    /// The persistent executor, its path included: `http://executor:8090/api/v1/terraform-rs`
    #[arg(long, value_name = "URL", env = env::PERSISTENT_EXECUTOR_URL)]
    pub persistent_executor_url: Option<Setting<HttpUrl>>,
}

/// Which dispatches the launcher runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    All,
    Flag,
}

impl SettingValue for Route {
    fn parse(text: &str) -> Result<Self, String> {
        choice(text, &[("all", Self::All), ("flag", Self::Flag)])
    }
}

impl RoutingArgs {
    /// Returns the routing, or `None` if one of its settings is invalid.
    pub(crate) fn resolve(&self, errors: &mut Vec<SettingError>) -> Option<Routing> {
        let route = self.route.read(errors).unwrap_or(Route::All);
        let url = self.persistent_executor_url.read(errors);
        if route == Route::All {
            return Some(Routing::All);
        }
        let mut reject = |text: String| {
            errors.push(SettingError::new(env::PERSISTENT_EXECUTOR_URL, text));
        };
        let Some(HttpUrl { url, .. }) = url else {
            if !self.persistent_executor_url.is_set() {
                reject(format!("is not set, but {} is `flag`", env::ROUTE));
            }
            return None;
        };
        Fallback::new(url)
            .map_err(|error| reject(format!("cannot be used: {error}")))
            .ok()
            .map(Routing::Flag)
    }
}
