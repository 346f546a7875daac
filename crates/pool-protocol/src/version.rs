//! The version of the protocol. The hub checks it before everything else, so that an old agent learns that it is old, and not
//! that its token is wrong.

use serde::{Deserialize, Serialize};

use crate::problem::{Code, Problem};

/// The request header with the version of the client.
pub const HEADER: &str = "x-terrakube-executor-protocol";
/// The response header with the lowest version of the server.
pub const MIN_HEADER: &str = "x-terrakube-executor-protocol-min";
/// The response header with the highest version of the server.
pub const MAX_HEADER: &str = "x-terrakube-executor-protocol-max";
/// The only version so far.
pub const VERSION: u32 = 1;

/// The versions that one side supports. The response to a version discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct Versions {
    pub current_version: u32,
    pub min_version: u32,
    pub max_version: u32,
}

impl Versions {
    /// The versions that this crate supports.
    pub const OURS: Self = Self {
        current_version: VERSION,
        min_version: VERSION,
        max_version: VERSION,
    };
}

/// Checks the version header of a request. `None` means that there is no header.
///
/// # Errors
/// A problem with status 400 if the header is missing or not an integer, and with 426 if the version is not supported.
pub fn check(header: Option<&str>) -> Result<(), Problem> {
    match header.and_then(|text| text.trim().parse().ok()) {
        Some(VERSION) => Ok(()),
        Some(version) => Err(unsupported(version)),
        None => Err(Problem::new(
            Code::ExecutorProtocolVersionRequired,
            format!("the header `{HEADER}` must have the version of the protocol, an integer"),
        )
        .with_versions(VERSION..=VERSION, None)),
    }
}

/// Returns the problem of a client that speaks another version.
pub fn unsupported(version: u32) -> Problem {
    let text = format!("version {version} is not supported, but {VERSION} is");
    Problem::new(Code::ExecutorProtocolVersionUnsupported, text)
        .with_versions(VERSION..=VERSION, Some(version))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::missing(None, Err(400))]
    #[case::empty(Some(""), Err(400))]
    #[case::no_number(Some("v1"), Err(400))]
    #[case::negative(Some("-1"), Err(400))]
    #[case::too_large(Some("99999999999999999999"), Err(400))]
    #[case::too_old(Some("0"), Err(426))]
    #[case::ours(Some(" 1 "), Ok(()))]
    #[case::too_new(Some("2"), Err(426))]
    fn a_version_is_known_or_refused(
        #[case] header: Option<&str>,
        #[case] expected: Result<(), u16>,
    ) {
        assert_eq!(check(header).map_err(|problem| problem.status), expected);
    }
}
