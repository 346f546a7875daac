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
    pub fn advice(&self) -> Vec<String> {
        let pattern = &self.pattern;
        let text = without_flags(pattern);
        let begins = text.starts_with('^') || text.starts_with(r"\A");
        let mut advice = Vec::new();
        match self.matching {
            Match::Full if begins && !pattern.ends_with('$') && !pattern.ends_with(".*") => {
                let slash = if ends_in_name(pattern) { "/" } else { "" };
                advice.push(format!(
                    "the pattern `{pattern}` begins with `^` and does not end with `$`, but it must match the whole address: \
                     write `{pattern}{slash}.*` if all addresses are meant that begin so"
                ));
            }
            Match::Search if !begins => advice.push(format!(
                "the pattern `{pattern}` may match inside of the address of another server: write `^{pattern}` if addresses \
                 are meant that begin so"
            )),
            Match::Full | Match::Search => {}
        }
        if let Some(begin) = self.open_begin().filter(|begin| ends_in_name(begin)) {
            let rest = match self.matching {
                Match::Full => "/.*",
                Match::Search => "/",
            };
            advice.push(format!(
                "the pattern `{pattern}` ends in the middle of an address, so longer names match too, as `acme-evil` for `acme`: \
                 write `{begin}{rest}` if all addresses below this name are meant"
            ));
        }
        advice
    }

    /// What comes before the part that matches anything, if that is the end of the pattern.
    fn open_begin(&self) -> Option<&str> {
        let pattern = self.pattern.as_str();
        let pattern = match self.matching {
            Match::Full => pattern.trim_end_matches('$'),
            Match::Search if pattern.ends_with('$') => return None,
            Match::Search => pattern,
        };
        let begin = pattern.strip_suffix(".*").or(pattern.strip_suffix(".+"));
        match self.matching {
            Match::Full => begin,
            Match::Search => begin.or(Some(pattern)),
        }
    }
}

/// A pattern without flags for all of it, such as `(?i)`.
fn without_flags(pattern: &str) -> &str {
    let flags = pattern
        .strip_prefix("(?")
        .and_then(|rest| rest.split_once(')'));
    match flags {
        Some((flags, rest)) if flags.chars().all(|c| c.is_ascii_alphabetic() || c == '-') => rest,
        _ => pattern,
    }
}

/// Whether the last part of a pattern is a character of a name, and not a class or an escape such as `\w`.
fn ends_in_name(pattern: &str) -> bool {
    let is_escape = pattern
        .rsplit('\\')
        .next()
        .is_some_and(|end| end.len() == 1)
        && pattern.contains('\\');
    pattern.ends_with(|c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_') && !is_escape
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

    /// An engine that goes back needs 2^4000 steps. It never ends.
    #[test]
    fn a_catastrophic_pattern_is_matched_without_going_back() {
        let rule = AllowList::new("https://h/(a+)+$", Match::Full).unwrap();
        let address = format!("https://h/{}!", "a".repeat(4000));
        assert!(rule.judge(&address).is_err());
    }

    #[rstest]
    #[case("^https://h/acme/", Match::Full, &["begins with `^`", "write `^https://h/acme/.*`"])]
    #[case("^https://h/acme", Match::Full, &["write `^https://h/acme/.*`"])]
    #[case("^https://h/acme/", Match::Search, &[])]
    #[case("^https://h/.*", Match::Full, &[])]
    #[case("^https://h/x$", Match::Full, &[])]
    #[case("https://h/x", Match::Full, &[])]
    #[case("https://github.com/acme.*", Match::Full, &["longer names match too", "write `https://github.com/acme/.*`"])]
    #[case("^https://github.com/acme.*$", Match::Full, &["write `^https://github.com/acme/.*`"])]
    #[case(r"https://github\.com.+", Match::Full, &[r"write `https://github\.com/.*`"])]
    #[case("^https://github.com/acme", Match::Search, &["longer names match too", "write `^https://github.com/acme/`"])]
    #[case("^https://github.com/acme.*", Match::Search, &["write `^https://github.com/acme/`"])]
    #[case("^https://github.com/acme$", Match::Search, &[])]
    #[case("https://github.com/acme/", Match::Search, &["inside of the address of another server", "write `^https://"])]
    #[case("(?i)^https://h/", Match::Search, &[])]
    #[case(r"\Ahttps://h/", Match::Search, &[])]
    #[case(r"https://h/\w.*", Match::Full, &[])]
    #[case(r"https://h/(a|b).*", Match::Full, &[])]
    fn a_pattern_that_allows_more_or_less_than_it_seems_gets_advice(
        #[case] pattern: &str,
        #[case] matching: Match,
        #[case] expected: &[&str],
    ) {
        let advice = AllowList::new(pattern, matching).unwrap().advice();
        assert_eq!(
            advice.len(),
            usize::from(!expected.is_empty()),
            "{advice:?}"
        );
        for text in expected {
            assert!(advice[0].contains(text), "{advice:?}");
        }
    }

    /// What the advice says is true of the pattern, and of the one that it proposes.
    #[rstest]
    #[case("https://github.com/acme.*", "https://github.com/acme/.*", Match::Full)]
    #[case("^https://github.com/acme", "^https://github.com/acme/", Match::Search)]
    fn the_advice_excludes_names_that_only_begin_so(
        #[case] pattern: &str,
        #[case] better: &str,
        #[case] matching: Match,
    ) {
        let advice = AllowList::new(pattern, matching).unwrap().advice();
        assert!(advice[0].contains(&format!("write `{better}`")));
        let (good, evil) = (
            "https://github.com/acme/x",
            "https://github.com/acme-evil/x",
        );
        assert!(permits(pattern, matching, good) && permits(pattern, matching, evil));
        assert!(permits(better, matching, good) && !permits(better, matching, evil));
    }

    #[test]
    fn a_search_may_need_both_kinds_of_advice() {
        let advice = AllowList::new("github.com/acme", Match::Search);
        assert_eq!(advice.unwrap().advice().len(), 2);
    }
}
