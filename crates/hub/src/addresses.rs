//! Tells addresses that a run may name from those that would run something for a person who opens them.

use url::Url;

/// The schemes of places of plans. Those of the stock executor are among them.
const PLACES: [&str; 5] = ["https", "http", "s3", "gs", "file"];

/// Returns whether a text may be a job's plan: the place of one, or words that no browser takes for an address.
pub(super) fn may_be_plan(text: &str) -> bool {
    !is_address(text) || is_place(text)
}

/// Returns whether a browser takes a text for an address: an absolute one, or one at the host of the page.
pub(super) fn is_address(text: &str) -> bool {
    // Browsers ignore spaces and control characters in front.
    let start = text.trim_start_matches(|char: char| char <= ' ' || char.is_whitespace());
    Url::parse(text).is_ok() || start.starts_with(['/', '\\'])
}

/// Returns whether a text may say where a plan is: a path of this machine, or an address in a store. It runs nothing that
/// somebody opens.
fn is_place(text: &str) -> bool {
    if let Some(path) = text.strip_prefix('/') {
        return !path.contains(|char: char| char.is_control()) && !path.starts_with(['/', '\\']);
    }
    let url = Url::parse(text).ok();
    url.is_some_and(|url| PLACES.contains(&url.scheme()))
}
