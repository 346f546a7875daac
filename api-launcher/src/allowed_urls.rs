//! The operator's rule for addresses of repositories, as options of commands. What it permits is decided by `git_address`.

use clap::Args;
use git_address::{AllowList, Match};
use job_contract::env;
use runtime::setting::{ReadSetting as _, Setting, SettingError, SettingValue, choice};

/// The options of the rule.
#[derive(Args, Clone, Debug, Default)]
pub struct AllowedUrlArgs {
    /// Regular expression of addresses of repositories. Dispatches with other sources are refused [default: all are allowed]
    // The text as it is: blanks are a mistake, and must not allow everything.
    #[arg(long, value_name = "REGEX", env = env::ALLOWED_VCS_URL_REGEX)]
    pub allowed_vcs_url_regex: Option<String>,

    /// Whether this expression must match the whole address, `full`, or any part of it, `search` [default: full]
    #[arg(long, value_name = "HOW", env = env::ALLOWED_VCS_URL_MATCH)]
    pub allowed_vcs_url_match: Option<Setting<UrlMatch>>,
}

/// Which part of an address must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UrlMatch(pub Match);

impl SettingValue for UrlMatch {
    fn parse(text: &str) -> Result<Self, String> {
        let words = [("full", Self(Match::Full)), ("search", Self(Match::Search))];
        choice(text, &words)
    }
}

impl AllowedUrlArgs {
    /// Returns the rule. `None` allows every address.
    pub(crate) fn resolve(&self, errors: &mut Vec<SettingError>) -> Option<AllowList> {
        let matching = self.allowed_vcs_url_match.read(errors);
        let matching = matching.map_or(Match::Full, |UrlMatch(matching)| matching);
        let pattern = self.allowed_vcs_url_regex.as_deref();
        match AllowList::new(pattern.filter(|text| !text.is_empty())?, matching) {
            Ok(list) => Some(list),
            Err(error) => {
                let text = format!("cannot be used: {error}");
                errors.push(SettingError::new(env::ALLOWED_VCS_URL_REGEX, text));
                None
            }
        }
    }
}
