//! Negotiates the version of the protocol. The hub checks it before everything else, so that an old agent learns that
//! it is old, and not that its token is wrong.

use std::ops::RangeInclusive;

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

    /// Returns the supported versions.
    #[must_use]
    pub const fn supported(self) -> RangeInclusive<u32> {
        self.min_version..=self.max_version
    }

    /// Returns the highest version that both sides support.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u32> {
        let highest = self.max_version.min(other.max_version);
        (highest >= self.min_version.max(other.min_version)).then_some(highest)
    }

    /// Checks the version header of a request. `None` means that there is no header.
    ///
    /// # Errors
    /// A problem with status 400 if the header is missing or not an integer, and with 426 if the version is not
    /// supported.
    pub fn check(self, header: Option<&str>) -> Result<u32, Problem> {
        let Some(version) = header.and_then(|text| text.trim().parse().ok()) else {
            return Err(Problem::new(
                Code::ExecutorProtocolVersionRequired,
                format!("the header `{HEADER}` must have the version of the protocol, an integer"),
            )
            .with_versions(self.supported(), None));
        };
        if self.supported().contains(&version) {
            return Ok(version);
        }
        let text = format!(
            "version {version} is not supported, but {} to {} are",
            self.min_version, self.max_version
        );
        Err(Problem::new(Code::ExecutorProtocolVersionUnsupported, text)
            .with_versions(self.supported(), Some(version)))
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const TWO_TO_FOUR: Versions = Versions {
        current_version: 4,
        min_version: 2,
        max_version: 4,
    };

    #[rstest]
    #[case::missing(None, Err(400))]
    #[case::empty(Some(""), Err(400))]
    #[case::no_number(Some("v2"), Err(400))]
    #[case::negative(Some("-2"), Err(400))]
    #[case::too_large(Some("99999999999999999999"), Err(400))]
    #[case::too_old(Some("1"), Err(426))]
    #[case::oldest(Some("2"), Ok(2))]
    #[case::newest(Some(" 4 "), Ok(4))]
    #[case::too_new(Some("5"), Err(426))]
    fn a_version_is_known_or_refused(
        #[case] header: Option<&str>,
        #[case] expected: Result<u32, u16>,
    ) {
        let checked = TWO_TO_FOUR.check(header);
        assert_eq!(checked.map_err(|problem| problem.status), expected);
    }

    #[rstest]
    #[case(1, 1, None)]
    #[case(1, 2, Some(2))]
    #[case(3, 9, Some(4))]
    #[case(5, 9, None)]
    fn the_highest_common_version_is_chosen(
        #[case] min_version: u32,
        #[case] max_version: u32,
        #[case] expected: Option<u32>,
    ) {
        let other = Versions {
            current_version: max_version,
            min_version,
            max_version,
        };
        assert_eq!(TWO_TO_FOUR.common(other), expected);
        assert_eq!(other.common(TWO_TO_FOUR), expected);
    }
}
