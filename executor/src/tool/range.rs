//! Version ranges of job data, as the platform understands them (contract 9.2).
//!
//! The semantics are npm's, with the quirks of the stock executor's library. `~> 1.9` stays below 1.10, and `> 1.12`
//! starts at 1.13. A pre-release only counts if the range names one of the same x.y.z. There are two corrections: a
//! comma joins comparators, and `[1.5,1.8)` respects both bounds. This module knows nothing of indexes, caches or
//! binaries.

use std::fmt;

use semver::{Prerelease, Version};

/// Longer texts are refused: no real range is longer, and ranges appear in messages.
const MAX_TEXT: usize = 256;

/// Examples of valid ranges, for hints.
pub(crate) const EXAMPLES: &str = "`1.9.8`, `1.9`, `~1.9`, `^1.5`, `>=1.5, <1.8`, `1.5.7 || 1.6.6`, `1.5.0 - 1.8.0`, `[1.5,1.8)` or `latest`";

/// A text that is not a version range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{text}` is not a version range: {reason}")]
pub struct RangeError {
    text: String,
    reason: String,
}

/// A parsed version range. [`Range::matches`] checks versions against it.
#[derive(Debug, Clone)]
pub struct Range {
    text: String,
    alternatives: Vec<Alternative>,
}

impl Range {
    /// Parses a range in the platform's format.
    pub fn parse(text: &str) -> Result<Self, RangeError> {
        let text = text.trim();
        let fail = |reason: String| RangeError {
            text: shown(text),
            reason,
        };
        if text.len() > MAX_TEXT {
            return Err(fail(format!("it is longer than {MAX_TEXT} bytes")));
        }
        let alternatives = if text.is_empty() || text == "*" || text.eq_ignore_ascii_case("latest")
        {
            vec![Alternative::default()]
        } else {
            text.split("||")
                .map(|alternative| Parser::new(alternative).alternative())
                .collect::<Result<_, _>>()
                .map_err(fail)?
        };
        Ok(Self {
            text: text.to_owned(),
            alternatives,
        })
    }

    /// Whether `version` satisfies this range. Build metadata is ignored.
    pub fn matches(&self, version: &Version) -> bool {
        self.alternatives
            .iter()
            .any(|alternative| alternative.matches(version))
    }

    /// The only version that this range accepts, if it is written as one full version.
    pub fn exact(&self) -> Option<&Version> {
        match self.alternatives.as_slice() {
            [only] => match only.comparators.as_slice() {
                [Comparator(Operator::Equal, version)] => Some(version),
                _ => None,
            },
            _ => None,
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.text.is_empty() {
            "latest"
        } else {
            &self.text
        })
    }
}

/// Comparators that must all be true. Without any, every stable version matches.
#[derive(Debug, Clone, Default)]
struct Alternative {
    comparators: Vec<Comparator>,
    /// The x.y.z of the pre-releases in the text. Other pre-releases do not count.
    prereleases: Vec<(u64, u64, u64)>,
}

impl Alternative {
    fn matches(&self, version: &Version) -> bool {
        let considered = version.pre.is_empty()
            || self
                .prereleases
                .contains(&(version.major, version.minor, version.patch));
        considered && self.comparators.iter().all(|c| c.matches(version))
    }
}

#[derive(Debug, Clone)]
struct Comparator(Operator, Version);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Equal,
    Less,
    LessOrEqual,
    Greater,
    GreaterOrEqual,
}

impl Comparator {
    fn matches(&self, version: &Version) -> bool {
        let order = version.cmp_precedence(&self.1);
        match self.0 {
            Operator::Equal => order.is_eq(),
            Operator::Less => order.is_lt(),
            Operator::LessOrEqual => order.is_le(),
            Operator::Greater => order.is_gt(),
            Operator::GreaterOrEqual => order.is_ge(),
        }
    }
}

/// A version in a range: `1`, `1.9`, `1.9.x` or a full one.
#[derive(Debug, Clone)]
enum Partial {
    Major(u64),
    Minor(u64, u64),
    Full(Version),
}

impl Partial {
    /// The smallest version that the text covers.
    fn floor(&self) -> Version {
        match self {
            Self::Major(major) => Version::new(*major, 0, 0),
            Self::Minor(major, minor) => Version::new(*major, *minor, 0),
            Self::Full(version) => version.clone(),
        }
    }

    /// The first version above the range of the text; `None` for a full version.
    fn next(&self) -> Option<Version> {
        match self {
            Self::Major(major) => Some(Version::new(major.saturating_add(1), 0, 0)),
            Self::Minor(major, minor) => Some(Version::new(*major, minor.saturating_add(1), 0)),
            Self::Full(_) => None,
        }
    }

    /// The upper bound of `~`.
    fn tilde_end(&self) -> Version {
        self.next().unwrap_or_else(|| {
            let floor = self.floor();
            Version::new(floor.major, floor.minor.saturating_add(1), 0)
        })
    }

    /// The upper bound of `^`: the next version in which the first non-zero part changes.
    fn caret_end(&self) -> Version {
        let floor = self.floor();
        match self {
            _ if floor.major > 0 => Version::new(floor.major.saturating_add(1), 0, 0),
            Self::Major(_) => Version::new(1, 0, 0),
            _ if floor.minor > 0 => Version::new(0, floor.minor.saturating_add(1), 0),
            Self::Minor(..) => Version::new(0, 1, 0),
            Self::Full(_) => Version::new(0, 0, floor.patch.saturating_add(1)),
        }
    }
}

/// The bound "before `version` and before its pre-releases", as npm closes its expanded ranges.
fn before(mut version: Version) -> Comparator {
    version.pre = Prerelease::new("0").expect("`0` is a valid pre-release");
    Comparator(Operator::Less, version)
}

fn at_least(version: Version) -> Comparator {
    Comparator(Operator::GreaterOrEqual, version)
}

/// Longer ones come first. `~>` is npm's `~` here, not Terraform's own pessimistic operator.
const OPERATORS: [&str; 8] = ["~>", "~", "^", ">=", "<=", ">", "<", "="];

/// Parses one alternative, left to right.
struct Parser<'a> {
    rest: &'a str,
    found: Alternative,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            rest: text.trim(),
            found: Alternative::default(),
        }
    }

    fn alternative(mut self) -> Result<Alternative, String> {
        if self.rest.is_empty() {
            return Err("one side of `||` is empty".into());
        }
        loop {
            if self.rest.starts_with(['[', '(', ']']) {
                self.interval()?;
            } else {
                self.comparator()?;
            }
            // A comma joins like white space. The stock executor ignores everything before the comma.
            self.skip_space();
            let comma = self.eat(",");
            self.skip_space();
            if self.rest.is_empty() {
                return if comma {
                    Err("it ends with a comma".into())
                } else {
                    Ok(self.found)
                };
            }
        }
    }

    fn comparator(&mut self) -> Result<(), String> {
        if self.rest.starts_with("!=") {
            return Err("`!=` is not supported".into());
        }
        let operator = OPERATORS
            .into_iter()
            .find(|operator| self.eat(operator))
            .unwrap_or_default();
        let partial = self.partial()?;
        if operator.is_empty() && self.eat_hyphen() {
            self.push(at_least(partial.floor()));
            let upper = self.partial()?;
            self.push_at_most(upper);
            return Ok(());
        }
        match operator {
            ">" => self.push_above(partial),
            ">=" => self.push(at_least(partial.floor())),
            "<" => self.push_below(partial),
            "<=" => self.push_at_most(partial),
            "^" => self.push_span(&partial, partial.caret_end()),
            "~" | "~>" => self.push_span(&partial, partial.tilde_end()),
            _ => match (partial.next(), partial) {
                (None, Partial::Full(version)) => {
                    self.push(Comparator(Operator::Equal, version));
                }
                (end, partial) => {
                    let end = end.unwrap_or_else(|| partial.tilde_end());
                    self.push_span(&partial, end);
                }
            },
        }
        Ok(())
    }

    /// `[1.5,1.8)`: the same as the comparators `>=1.5 <1.8`. `]` as the first and `[` as the last bracket also mean
    /// open bounds.
    fn interval(&mut self) -> Result<(), String> {
        let closed_below = self.eat("[");
        if !closed_below {
            self.rest = &self.rest[1..];
        }
        self.skip_space();
        let lower = if self.rest.starts_with(',') {
            None
        } else {
            Some(self.partial()?)
        };
        self.skip_space();
        if !self.eat(",") {
            return Err("an interval needs two bounds, as in `[1.5,1.8)`".into());
        }
        self.skip_space();
        let upper = if self.rest.starts_with([']', ')', '[']) {
            None
        } else {
            Some(self.partial()?)
        };
        self.skip_space();
        let closed_above = self.eat("]");
        if !closed_above && !self.eat(")") && !self.eat("[") {
            return Err("the interval is not closed by `]` or `)`".into());
        }
        if lower.is_none() && upper.is_none() {
            return Err("the interval has no bound".into());
        }
        match lower {
            Some(lower) if closed_below => self.push(at_least(lower.floor())),
            Some(lower) => self.push_above(lower),
            None => {}
        }
        match upper {
            Some(upper) if closed_above => self.push_at_most(upper),
            Some(upper) => self.push_below(upper),
            None => {}
        }
        Ok(())
    }

    fn push(&mut self, comparator: Comparator) {
        self.found.comparators.push(comparator);
    }

    fn push_span(&mut self, from: &Partial, end: Version) {
        self.push(at_least(from.floor()));
        self.push(before(end));
    }

    fn push_above(&mut self, partial: Partial) {
        self.push(match (partial.next(), partial) {
            (Some(next), _) => at_least(next),
            (None, partial) => Comparator(Operator::Greater, partial.floor()),
        });
    }

    fn push_below(&mut self, partial: Partial) {
        self.push(match partial {
            Partial::Full(version) => Comparator(Operator::Less, version),
            partial => before(partial.floor()),
        });
    }

    fn push_at_most(&mut self, partial: Partial) {
        self.push(match (partial.next(), partial) {
            (Some(next), _) => before(next),
            (None, partial) => Comparator(Operator::LessOrEqual, partial.floor()),
        });
    }

    fn partial(&mut self) -> Result<Partial, String> {
        self.rest = self
            .rest
            .trim_start_matches(|c: char| c.is_whitespace() || c == 'v' || c == 'V' || c == '=');
        let end = self
            .rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '+' | '*')))
            .unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        if word.is_empty() {
            return Err(match rest.chars().next() {
                Some(c) => format!("a version is expected before `{}`", c.escape_default()),
                None => "a version is missing".into(),
            });
        }
        self.rest = rest;
        let partial = parse_partial(word)?;
        if let Partial::Full(version) = &partial
            && !version.pre.is_empty()
        {
            self.found
                .prereleases
                .push((version.major, version.minor, version.patch));
        }
        Ok(partial)
    }

    fn eat(&mut self, token: &str) -> bool {
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    /// The hyphen of `1.5.0 - 1.8.0` is between spaces. Any other hyphen belongs to a pre-release.
    fn eat_hyphen(&mut self) -> bool {
        let trimmed = self.rest.trim_start();
        let spaced = trimmed.len() < self.rest.len();
        match trimmed.strip_prefix('-') {
            Some(rest) if spaced && rest.starts_with(char::is_whitespace) => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }
}

fn parse_partial(word: &str) -> Result<Partial, String> {
    let (numbers, suffix) = match word.find(['-', '+']) {
        Some(at) => word.split_at(at),
        None => (word, ""),
    };
    let mut parts = Vec::new();
    for part in numbers.split('.') {
        parts.push(parse_number(part, word)?);
    }
    let whole = match parts.as_slice() {
        [Some(major)] | [Some(major), None] | [Some(major), None, _] => Partial::Major(*major),
        [Some(major), Some(minor)] | [Some(major), Some(minor), None] => {
            Partial::Minor(*major, *minor)
        }
        [Some(_), Some(_), Some(_)] => {
            return Version::parse(word)
                .map(Partial::Full)
                .map_err(|error| format!("`{}`: {error}", shown(word)));
        }
        [None, ..] => {
            return Err(format!("`{}` names no major version", shown(word)));
        }
        _ => return Err(format!("`{}` has more than three parts", shown(word))),
    };
    if suffix.is_empty() {
        Ok(whole)
    } else {
        Err(format!(
            "`{}` has a suffix but is not a full version",
            shown(word)
        ))
    }
}

/// A number, or `None` for the wildcards `x`, `X` and `*`.
fn parse_number(part: &str, word: &str) -> Result<Option<u64>, String> {
    if matches!(part, "x" | "X" | "*") {
        return Ok(None);
    }
    if part.len() > 1 && part.starts_with('0') && part.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("`{}` has a leading zero", shown(word)));
    }
    if !part.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("`{}` is not a version", shown(word)));
    }
    part.parse()
        .map(Some)
        .map_err(|_| format!("`{}` is not a version", shown(word)))
}

/// A short text on one line, for messages.
fn shown(text: &str) -> String {
    const LIMIT: usize = 80;
    let mut shown: String = text
        .chars()
        .take(LIMIT)
        .flat_map(char::escape_debug)
        .collect();
    if text.chars().nth(LIMIT).is_some() {
        shown.push('…');
    }
    shown
}

#[cfg(test)]
mod tests;
