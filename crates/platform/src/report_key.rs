//! Finds the key of final reports in the environment of both programs.

use job_contract::env;
use job_contract::report::ReportKey;

use runtime::setting::{SettingError, present};

/// Returns the key that is set for reports, or else the key that is derived from the platform's secret. `None` without
/// both. The client of the platform reports a secret that cannot be used, so this function does not.
pub fn from_lookup(
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<Option<ReportKey>, SettingError> {
    let given = lookup(env::REPORT_KEY);
    if let Some(key) = present(given.as_deref()) {
        return match ReportKey::parse(key) {
            Ok(key) => Ok(Some(key)),
            Err(error) => Err(SettingError::new(env::REPORT_KEY, error.to_string())),
        };
    }
    let secret = lookup(env::INTERNAL_SECRET);
    Ok(present(secret.as_deref()).and_then(|secret| ReportKey::parse(secret).ok()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";
    const OTHER: &str = "ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=";

    fn key(pairs: &[(&str, &str)]) -> Result<Option<ReportKey>, SettingError> {
        from_lookup(|name| {
            let known = pairs.iter().find(|(known, _)| *known == name);
            known.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_key_that_was_given_wins_over_the_platforms_secret() {
        let of_secret = ReportKey::parse(SECRET).unwrap();
        let given = ReportKey::parse(OTHER).unwrap();
        let secret = (env::INTERNAL_SECRET, SECRET);
        assert_eq!(key(&[secret]), Ok(Some(of_secret.clone())));
        assert_eq!(key(&[secret, (env::REPORT_KEY, OTHER)]), Ok(Some(given)));
        assert_eq!(key(&[secret, (env::REPORT_KEY, " ")]), Ok(Some(of_secret)));
        assert_eq!(key(&[]), Ok(None));
        assert_eq!(key(&[(env::INTERNAL_SECRET, "no base64!")]), Ok(None));
    }

    #[test]
    fn a_key_that_cannot_be_used_is_named_and_not_quoted() {
        let error = key(&[(env::REPORT_KEY, "c2hvcnQ")]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "`MAYFLY_REPORT_KEY` holds 5 bytes, at least 32 are needed"
        );
    }
}
