//! The table of contract 9.2, row by row, and properties over all ranges.

use proptest::prelude::*;
use rstest::rstest;

use super::*;

const PUBLISHED: [&str; 26] = [
    "0.9.1",
    "0.12.0",
    "0.12.31",
    "0.13.0",
    "1.0.0",
    "1.4.9",
    "1.5.0",
    "1.5.7",
    "1.6.0-rc1",
    "1.6.0",
    "1.6.6",
    "1.7.5",
    "1.8.0-rc1",
    "1.8.0",
    "1.8.5",
    "1.9.0",
    "1.9.7",
    "1.9.8",
    "1.10.0-alpha1",
    "1.10.0-rc1",
    "1.10.0-rc2",
    "1.12.0",
    "1.12.9",
    "1.13.0-rc1",
    "1.13.0",
    "2.0.0-beta1",
];

fn version(text: &str) -> Version {
    Version::parse(text).unwrap()
}

fn matching(range: &str) -> Vec<&'static str> {
    let range = Range::parse(range).unwrap();
    PUBLISHED
        .into_iter()
        .filter(|candidate| range.matches(&version(candidate)))
        .collect()
}

/// Versions in `from..below`, stable only.
fn stable(from: &str, below: &str) -> Vec<&'static str> {
    PUBLISHED
        .into_iter()
        .filter(|text| {
            let v = version(text);
            v.pre.is_empty() && v >= version(from) && v < version(below)
        })
        .collect()
}

#[rstest]
#[case("1.9.8")]
#[case("v1.9.8")]
#[case("=1.9.8")]
#[case("= v1.9.8")]
#[case("  1.9.8\n")]
fn an_exact_version_accepts_only_itself(#[case] range: &str) {
    assert_eq!(matching(range), ["1.9.8"]);
    assert_eq!(
        Range::parse(range).unwrap().exact(),
        Some(&version("1.9.8"))
    );
}

#[test]
fn an_exact_prerelease_accepts_only_itself() {
    assert_eq!(matching("1.10.0-rc1"), ["1.10.0-rc1"]);
    assert_eq!(matching("v1.10.0-rc1"), ["1.10.0-rc1"]);
}

#[rstest]
#[case("1.6", "1.6.0", "1.7.0")]
#[case("1.6.x", "1.6.0", "1.7.0")]
#[case("1.6.X", "1.6.0", "1.7.0")]
#[case("1.6.*", "1.6.0", "1.7.0")]
#[case("1", "1.0.0", "2.0.0")]
#[case("1.x", "1.0.0", "2.0.0")]
#[case("1.x.x", "1.0.0", "2.0.0")]
#[case("~> 1", "1.0.0", "2.0.0")]
#[case("~> 1.9.0", "1.9.0", "1.10.0")]
#[case("~> 1.9", "1.9.0", "1.10.0")]
#[case("~1.9", "1.9.0", "1.10.0")]
#[case("~>1.9.7", "1.9.7", "1.10.0")]
#[case("^1.5", "1.5.0", "2.0.0")]
#[case("^0.12.0", "0.12.0", "0.13.0")]
#[case("^0.12", "0.12.0", "0.13.0")]
#[case("^0", "0.0.0", "1.0.0")]
#[case("^0.0", "0.0.0", "0.1.0")]
#[case(">=1.5 <1.8", "1.5.0", "1.8.0")]
#[case(">= 1.5.0 < 1.8.0", "1.5.0", "1.8.0")]
#[case("1.5.0 - 1.8.0", "1.5.0", "1.8.1")]
#[case("1.5 - 1.8", "1.5.0", "1.9.0")]
#[case("> 1.12", "1.13.0", "9.0.0")]
#[case("> 1.5.0", "1.5.1", "9.0.0")]
#[case("> 1", "2.0.0", "9.0.0")]
#[case("<= 1.8", "0.0.0", "1.9.0")]
#[case("<= 1.8.0", "0.0.0", "1.8.1")]
#[case("< 1.8", "0.0.0", "1.8.0")]
#[case("*", "0.0.0", "9.0.0")]
#[case("latest", "0.0.0", "9.0.0")]
#[case("", "0.0.0", "9.0.0")]
#[case("  ", "0.0.0", "9.0.0")]
fn a_range_accepts_the_versions_of_the_contract(
    #[case] range: &str,
    #[case] from: &str,
    #[case] below: &str,
) {
    assert_eq!(matching(range), stable(from, below));
    assert_eq!(Range::parse(range).unwrap().exact(), None);
}

#[test]
fn alternatives_are_a_union() {
    assert_eq!(matching("1.5.7 || 1.6.6"), ["1.5.7", "1.6.6"]);
    assert_eq!(
        matching("~1.5||>=1.13"),
        ["1.5.0", "1.5.7", "1.13.0"],
        "spaces around the bars are optional"
    );
}

#[rstest]
#[case(">= 1.5, < 1.8", "1.5.0", "1.8.0")]
#[case(">=1.5,<1.8", "1.5.0", "1.8.0")]
#[case("[1.5,1.8)", "1.5.0", "1.8.0")]
#[case("[ 1.5 , 1.8 )", "1.5.0", "1.8.0")]
#[case("[1.5,1.8[", "1.5.0", "1.8.0")]
#[case("[1.5,1.8]", "1.5.0", "1.9.0")]
#[case("[1.5.0,1.8.0]", "1.5.0", "1.8.1")]
#[case("(1.5.0,1.8.0)", "1.5.1", "1.8.0")]
#[case("]1.5.0,1.8.0[", "1.5.1", "1.8.0")]
#[case("[1.5,)", "1.5.0", "9.0.0")]
#[case("(,1.8)", "0.0.0", "1.8.0")]
fn text_that_the_stock_executor_ignores_counts(
    #[case] range: &str,
    #[case] from: &str,
    #[case] below: &str,
) {
    assert_eq!(matching(range), stable(from, below));
}

#[test]
fn prereleases_count_only_if_the_range_names_their_release() {
    assert_eq!(
        matching(">=1.10.0-rc1 <1.13.1"),
        ["1.10.0-rc1", "1.10.0-rc2", "1.12.0", "1.12.9", "1.13.0"]
    );
    assert_eq!(
        matching(">=1.5 <1.8.0-rc2"),
        ["1.5.0", "1.5.7", "1.6.0", "1.6.6", "1.7.5", "1.8.0-rc1"]
    );
    assert_eq!(matching("~1.8.0-rc1"), ["1.8.0-rc1", "1.8.0", "1.8.5"]);
    assert!(matching("1.10.x").is_empty());
    assert!(matching("^2").is_empty());
}

#[rstest]
#[case("x")]
#[case("X.1")]
#[case("!= 1.9.8")]
#[case("1.09.8")]
#[case("abc")]
#[case("1.9.8.1")]
#[case("1.9-rc1")]
#[case("1..2")]
#[case("1.9.")]
#[case(">=")]
#[case(">= 1.5,")]
#[case(",1.5")]
#[case("1.5.7 ||")]
#[case("|| 1.5.7")]
#[case("1.5 | 1.6")]
#[case("[1.5,1.8")]
#[case("[1.5]")]
#[case("(,)")]
#[case("<*")]
#[case("99999999999999999999.0.0")]
#[case("1.9.8; rm -rf /")]
#[case("1.9.8 é")]
fn invalid_ranges_are_refused_by_name(#[case] range: &str) {
    let error = Range::parse(range).unwrap_err().to_string();
    assert!(error.starts_with(&format!("`{range}`")), "{error}");
}

#[test]
fn a_refusal_shortens_long_or_broken_text() {
    let error = Range::parse(&"1.x,\n\t\u{7}".repeat(1000))
        .unwrap_err()
        .to_string();
    assert!(error.len() < 400, "{error}");
    assert!(!error.contains('\n'), "{error}");
}

fn number() -> impl Strategy<Value = u64> {
    0..40_u64
}

prop_compose! {
    fn release()(major in 0..3_u64, minor in number(), patch in number()) -> Version {
        Version::new(major, minor, patch)
    }
}

prop_compose! {
    fn any_version()(mut version in release(), pre in prop::option::of("(alpha|beta|rc)[1-9]"))
        -> Version {
        if let Some(pre) = pre {
            version.pre = Prerelease::new(&pre).unwrap();
        }
        version
    }
}

fn comparator() -> impl Strategy<Value = String> {
    let operator = prop::sample::select(vec!["", "=", "~", "~> ", "^", ">", ">= ", "<", "<="]);
    let text = prop_oneof![
        any_version().prop_map(|v| v.to_string()),
        release().prop_map(|v| format!("{}.{}", v.major, v.minor)),
        release().prop_map(|v| format!("{}.x", v.major)),
    ];
    (operator, text).prop_map(|(operator, text)| format!("{operator}{text}"))
}

proptest! {
    #[test]
    fn no_text_makes_the_parser_panic(text in ".{0,40}") {
        let _ = Range::parse(&text);
    }

    #[test]
    fn no_range_like_text_makes_the_parser_panic(text in "[\\[\\]()<>=~^|!,. v*x0-9a-z+-]{0,30}") {
        let _ = Range::parse(&text);
    }

    #[test]
    fn a_full_version_accepts_exactly_itself(wanted in any_version(), other in any_version()) {
        let range = Range::parse(&format!("v{wanted}")).unwrap();
        prop_assert!(range.matches(&wanted));
        prop_assert_eq!(range.matches(&other), other == wanted);
        prop_assert_eq!(range.exact(), Some(&wanted));
    }

    #[test]
    fn comma_and_space_are_equivalent(a in comparator(), b in comparator(), v in any_version()) {
        let comma = Range::parse(&format!("{a}, {b}")).unwrap();
        let space = Range::parse(&format!("{a} {b}")).unwrap();
        prop_assert_eq!(comma.matches(&v), space.matches(&v));
    }

    #[test]
    fn joined_comparators_are_an_intersection_of_stable_versions(
        a in comparator(), b in comparator(), v in release(),
    ) {
        let both = Range::parse(&format!("{a}, {b}")).unwrap();
        let (a, b) = (Range::parse(&a).unwrap(), Range::parse(&b).unwrap());
        prop_assert_eq!(both.matches(&v), a.matches(&v) && b.matches(&v));
    }

    #[test]
    fn bars_are_a_union(a in comparator(), b in comparator(), v in any_version()) {
        let either = Range::parse(&format!("{a} || {b}")).unwrap();
        let (a, b) = (Range::parse(&a).unwrap(), Range::parse(&b).unwrap());
        prop_assert_eq!(either.matches(&v), a.matches(&v) || b.matches(&v));
    }

    #[test]
    fn an_interval_is_its_two_comparators(low in release(), high in release(), v in any_version()) {
        for (open, close, comparators) in [
            ('[', ')', format!(">={low} <{high}")),
            ('(', ']', format!(">{low} <={high}")),
        ] {
            let interval = Range::parse(&format!("{open}{low},{high}{close}")).unwrap();
            let spelled = Range::parse(&comparators).unwrap();
            prop_assert_eq!(interval.matches(&v), spelled.matches(&v));
        }
    }

    #[test]
    fn tilde_keeps_the_minor_and_caret_the_major(base in release(), v in release()) {
        let tilde = Range::parse(&format!("~{base}")).unwrap();
        let caret = Range::parse(&format!("^{base}")).unwrap();
        prop_assert_eq!(
            tilde.matches(&v),
            v >= base && (v.major, v.minor) == (base.major, base.minor)
        );
        if base.major > 0 {
            prop_assert_eq!(caret.matches(&v), v >= base && v.major == base.major);
        }
    }

    #[test]
    fn unnamed_prereleases_never_match(range in comparator(), v in any_version()) {
        prop_assume!(!v.pre.is_empty() && !range.contains('-'));
        prop_assert!(!Range::parse(&range).unwrap().matches(&v));
    }
}
