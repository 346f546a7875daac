//! The operator's rule: a regular expression of addresses that runs may fetch from. It is matched in linear time, and a
//! pattern that cannot be used is an error, never a rule that allows everything.

use std::fmt;
use std::str::FromStr;

use job_contract::env;
use regex::{Regex, RegexBuilder};

use crate::address::{Address, AddressError};

const MAX_PATTERN_BYTES: usize = 4096;
const MAX_COMPILED_BYTES: usize = 1024 * 1024;

/// Which part of an address a pattern must match.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Match {
    /// The whole address.
    #[default]
    Full,
    /// Any part of it.
    Search,
}

impl FromStr for Match {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim() {
            "full" => Ok(Self::Full),
            "search" => Ok(Self::Search),
            _ => Err("expected `full` or `search`"),
        }
    }
}

/// The addresses that runs may fetch from.
#[derive(Clone)]
pub struct AllowList {
    pattern: String,
    matching: Match,
    regex: Regex,
}

impl fmt::Debug for AllowList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AllowList").field(&self.pattern).finish()
    }
}

/// Why a pattern cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pattern {0}")]
pub struct RuleError(String);

/// The hint for a refused address.
const HINT: &str =
    "use a repository that the operator allows, or ask the operator to allow this one";

/// An address that runs may not fetch from. The text shows neither userinfo nor query.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the git URL `{shown}` is not allowed by `{}`{}", env::ALLOWED_VCS_URL_REGEX, reason(*.problem))]
pub struct Refusal {
    shown: String,
    problem: Option<AddressError>,
}

fn reason(problem: Option<AddressError>) -> String {
    problem.map_or_else(String::new, |problem| format!(": {problem}"))
}

impl Refusal {
    /// What to do.
    #[must_use]
    pub const fn hint(&self) -> &'static str {
        HINT
    }
}

impl AllowList {
    /// The rule of a pattern.
    ///
    /// # Errors
    /// If the pattern is blank, too large, or not a regular expression that is matched in linear time.
    pub fn new(pattern: &str, matching: Match) -> Result<Self, RuleError> {
        if pattern.trim().is_empty() {
            return Err(RuleError("holds nothing but blanks".to_owned()));
        }
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(RuleError(format!(
                "is longer than {MAX_PATTERN_BYTES} bytes"
            )));
        }
        // The pattern must be valid by itself: the parentheses around it could close one of its own.
        let regex = compile(pattern)?;
        let regex = match matching {
            Match::Full => compile(&format!(r"\A(?:{pattern})\z"))?,
            Match::Search => regex,
        };
        Ok(Self {
            pattern: pattern.to_owned(),
            matching,
            regex,
        })
    }

    /// Reads an address, if runs may fetch from it.
    ///
    /// # Errors
    /// If the rule does not permit it, or it is no address that can be judged.
    pub fn judge(&self, text: &str) -> Result<Address, Refusal> {
        let refuse = |problem| Refusal {
            shown: shown(text),
            problem,
        };
        let address = Address::parse(text).map_err(|problem| refuse(Some(problem)))?;
        if self.permits(&address) {
            Ok(address)
        } else {
            Err(refuse(None))
        }
    }

    /// Whether runs may fetch from this address.
    #[must_use]
    pub fn permits(&self, address: &Address) -> bool {
        address.forms().any(|form| self.regex.is_match(&form))
    }

    /// What is probably not meant by the pattern, and how to write it.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        let pattern = &self.pattern;
        let is_prefix = self.matching == Match::Full
            && pattern.starts_with('^')
            && !pattern.ends_with('$')
            && !pattern.ends_with(".*");
        is_prefix.then(|| {
            format!(
                "the pattern `{pattern}` begins with `^` and does not end with `$`, but it must match the whole address: \
                 write `{pattern}.*` if all addresses are meant that begin so"
            )
        })
    }
}

/// An address of any kind, for messages: without userinfo and query, in one short line.
fn shown(text: &str) -> String {
    const MAX_CHARACTERS: usize = 200;
    let text = text.split(['?', '#']).next().unwrap_or(text);
    let text = match text.split_once("://") {
        Some((scheme, rest)) => {
            let end = rest.find('/').unwrap_or(rest.len());
            let (authority, path) = rest.split_at(end);
            let host = authority.rsplit('@').next().unwrap_or(authority);
            format!("{scheme}://{host}{path}")
        }
        None => text.to_owned(),
    };
    let short: String = text.chars().take(MAX_CHARACTERS).collect();
    short.escape_debug().to_string()
}

fn compile(pattern: &str) -> Result<Regex, RuleError> {
    RegexBuilder::new(pattern)
        .size_limit(MAX_COMPILED_BYTES)
        .build()
        .map_err(|error| {
            RuleError(match error {
                regex::Error::CompiledTooBig(limit) => {
                    format!("needs more than {limit} bytes of memory")
                }
                // The last line says what is wrong, the others show where.
                other => {
                    let text = other.to_string();
                    let reason = text.lines().last().unwrap_or_default();
                    let reason = reason.trim_start_matches("error: ");
                    format!("`{pattern}` is not a regular expression that can be used: {reason}")
                }
            })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn permits(pattern: &str, matching: Match, address: &str) -> bool {
        let address = Address::parse(address).unwrap();
        AllowList::new(pattern, matching).unwrap().permits(&address)
    }

    #[rstest]
    #[case("https://git.acme.com/.*", "https://git.acme.com/a/b", true)]
    #[case("https://git.acme.com/.*", "https://u:p@GIT.acme.com:443/a/b", true)]
    #[case("https://git.acme.com/.*", "https://git.acme.com:8443/a/b", false)]
    #[case("https://git.acme.com/.*", "http://git.acme.com/a/b", false)]
    #[case(r"https://git\.acme\.com/.*", "https://gitxacme.com/a", false)]
    #[case(r"https://git\.acme\.com/.*", "https://git.acme.com@evil.com/a", false)]
    #[case("https://git.acme.com", "https://git.acme.com/a", false)]
    #[case("^https://git.acme.com/.*$", "https://git.acme.com/a", true)]
    #[case("a|https://h/x", "https://h/xy", false)]
    #[case("git@h:a/.*", "git@h:a/b.git", true)]
    #[case("ssh://git@h/a/.*", "git@h:a/b.git", true)]
    #[case("ssh://git@h/a/.*", "ssh://git@h:22/a/b.git", true)]
    #[case("git@h:a/.*", "ssh://git@h/a/b.git", false)]
    #[case("file:///srv/.*", "/srv/x", true)]
    #[case("(?i)https://h/ACME/.*", "https://h/acme/x", true)]
    #[case(r"https://h/\w+/\d+", "https://h/acme/1", true)]
    fn a_pattern_matches_the_whole_canonical_form(
        #[case] pattern: &str,
        #[case] address: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(permits(pattern, Match::Full, address), expected);
    }

    #[test]
    fn a_search_matches_any_part() {
        let address = "https://git.acme.com/a";
        assert!(permits("^https://git.acme.com", Match::Search, address));
        assert!(!permits("^https://git.acme.org", Match::Search, address));
    }

    #[rstest]
    #[case("  ", "holds nothing but blanks")]
    #[case("https://(?!evil)", "look-around")]
    #[case("(?<=x)https", "look-around")]
    #[case(r"(a)\1", "backreferences")]
    #[case("https://(h", "unclosed group")]
    #[case("a)|(?:b", "unopened group")]
    #[case("(a{1000}){1000}", "bytes of memory")]
    fn a_pattern_that_cannot_be_used_is_an_error(#[case] pattern: &str, #[case] reason: &str) {
        let error = AllowList::new(pattern, Match::Full).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }

    #[test]
    fn a_long_pattern_is_an_error() {
        let error = AllowList::new(&"a".repeat(4097), Match::Full).unwrap_err();
        assert_eq!(error.to_string(), "the pattern is longer than 4096 bytes");
    }

    #[rstest]
    #[case(
        "https://bob:hunter2@evil.com/x?sig=hunter2",
        "the git URL `https://evil.com/x` is not allowed by `ALLOWED_VCS_URL_REGEX`: it has a query or a fragment"
    )]
    #[case(
        "https://bob:hunter2@evil.com/x",
        "the git URL `https://evil.com/x` is not allowed by `ALLOWED_VCS_URL_REGEX`"
    )]
    fn a_refusal_names_address_and_setting_and_no_password(
        #[case] address: &str,
        #[case] text: &str,
    ) {
        let rule = AllowList::new("https://good.com/.*", Match::Full).unwrap();
        assert_eq!(rule.judge(address).unwrap_err().to_string(), text);
        assert!(rule.judge("https://u@good.com/x").is_ok());
    }

    /// Only an engine that goes back needs more than a moment: 2^4000 steps.
    #[test]
    fn a_catastrophic_pattern_is_matched_in_linear_time() {
        let address = format!("https://h/{}!", "a".repeat(4000));
        assert!(!permits("https://h/(a+)+$", Match::Full, &address));
    }

    #[rstest]
    #[case("^https://git.acme.com/myorg/", Match::Full, true)]
    #[case("^https://git.acme.com/myorg/", Match::Search, false)]
    #[case("^https://git.acme.com/.*", Match::Full, false)]
    #[case("^https://git.acme.com/x$", Match::Full, false)]
    #[case("https://git.acme.com/x", Match::Full, false)]
    fn a_prefix_gets_advice(
        #[case] pattern: &str,
        #[case] matching: Match,
        #[case] expected: bool,
    ) {
        let advice = AllowList::new(pattern, matching).unwrap().advice();
        assert_eq!(advice.is_some(), expected);
        assert!(advice.is_none_or(|text| text.contains(&format!("`{pattern}.*`"))));
    }
}
