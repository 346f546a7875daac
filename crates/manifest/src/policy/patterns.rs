//! Patterns for names that a policy allows.

use std::path::Path;

use serde::Deserialize;

/// Patterns of allowed names. `*` matches any text. The longest pattern that matches a name decides. A pattern that
/// starts with `!` forbids the name.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Patterns(Vec<String>);

impl Patterns {
    /// The patterns, as a policy file writes them.
    pub fn new<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Self {
        Self(patterns.into_iter().map(str::to_owned).collect())
    }

    /// Whether a name is allowed.
    pub fn allow(&self, name: &str) -> bool {
        self.allow_one_of(&[name])
    }

    /// Whether a folder is allowed. Its own path, or the path of a folder around it, must be allowed.
    pub fn allow_folder(&self, path: &str) -> bool {
        let around = Path::new(path).ancestors().filter_map(Path::to_str);
        self.allow_one_of(&around.collect::<Vec<_>>())
    }

    fn allow_one_of(&self, names: &[&str]) -> bool {
        let decisive = self.0.iter().filter_map(|pattern| {
            let (takes_out, pattern) = match pattern.strip_prefix('!') {
                Some(pattern) => (true, pattern),
                None => (false, pattern.as_str()),
            };
            let length = pattern.bytes().filter(|byte| *byte != b'*').count();
            let is_meant = names.iter().any(|name| matches(pattern, name));
            is_meant.then_some((length, takes_out))
        });
        // Of two patterns of the same length, the one that forbids is greater.
        decisive.max().is_some_and(|(_, takes_out)| !takes_out)
    }
}

fn matches(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = name.strip_prefix(parts.next().unwrap_or_default()) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("*", "", true)]
    #[case("*", "any", true)]
    #[case("a*", "abc", true)]
    #[case("a*c", "abc", true)]
    #[case("a*c", "ab", false)]
    #[case("*b*", "abc", true)]
    #[case("a*b*c", "a-b-b-c", true)]
    #[case("ab*b", "ab", false)]
    #[case("abc", "abc", true)]
    #[case("abc", "abcd", false)]
    #[case("", "a", false)]
    fn patterns_match_whole_names(
        #[case] pattern: &str,
        #[case] name: &str,
        #[case] expected: bool,
    ) {
        assert_eq!(matches(pattern, name), expected, "{pattern} {name}");
    }

    #[rstest]
    #[case(&["*"], "any", true)]
    #[case(&[], "any", false)]
    #[case(&["*", "!secret*"], "secret-a", false)]
    #[case(&["!secret*", "*"], "secret-a", false)]
    #[case(&["*", "!secret*", "secret-but-harmless"], "secret-but-harmless", true)]
    #[case(&["*", "!secret*", "secret-but-harmless"], "secret-a", false)]
    #[case(&["a*", "!*a"], "aa", false)]
    fn the_longest_pattern_that_matches_decides(
        #[case] patterns: &[&str],
        #[case] name: &str,
        #[case] expected: bool,
    ) {
        let patterns = Patterns::new(patterns.iter().copied());
        assert_eq!(patterns.allow(name), expected, "{patterns:?} {name}");
    }
}
