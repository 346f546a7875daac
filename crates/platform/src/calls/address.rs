//! Addresses that calls go to.

use reqwest::Url;
use runtime::setting::{HttpUrl, ReadSetting as _, Setting, SettingError};

/// The address, unless it holds what does not belong there.
pub(crate) fn base_url(
    variable: &'static str,
    setting: Option<&Setting<HttpUrl>>,
    errors: &mut Vec<SettingError>,
) -> Option<Url> {
    let HttpUrl { url, .. } = setting.cloned().require(variable, errors)?;
    // Addresses are written into records and logs.
    let text = if !url.username().is_empty() || url.password().is_some() {
        "contains credentials, which are not allowed here"
    } else if url.query().is_some() || url.fragment().is_some() {
        "has a query or a fragment, which a base URL must not have"
    } else {
        return Some(url);
    };
    errors.push(SettingError::new(variable, text));
    None
}

/// Appends encoded path segments to an address, so that no id can change the path.
pub fn extended(base: &Url, path: &[&str]) -> Url {
    let mut url = base.clone();
    url.path_segments_mut()
        .expect("base addresses are http or https")
        .pop_if_empty()
        .extend(path);
    url
}
