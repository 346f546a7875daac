//! Parses the two kinds of lists in Terrakube's variables: pairs (contract 3.4) and comma lists. Does not know their meaning.

use std::collections::BTreeMap;

/// Reads `key=value;key=value`. Blank segments are skipped. A segment is split at its first `=`, and both sides are trimmed.
/// A key without `=` has an empty value. The last of equal keys wins.
pub fn parse_pairs(text: &str) -> BTreeMap<String, String> {
    text.split(';')
        .map(str::trim)
        .filter(|segment| !segment.is_empty())
        .map(|segment| {
            let (key, value) = segment.split_once('=').unwrap_or((segment, ""));
            (key.trim().to_owned(), value.trim().to_owned())
        })
        .collect()
}

/// Reads `a, b,,c`. Elements are trimmed, and empty and repeated ones are dropped. The order is kept.
pub fn parse_list(text: &str) -> Vec<String> {
    let mut list: Vec<String> = Vec::new();
    for element in text.split(',').map(str::trim).filter(|e| !e.is_empty()) {
        if !list.iter().any(|known| known == element) {
            list.push(element.to_owned());
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case("", &[])]
    #[case("  ", &[])]
    #[case(";;", &[])]
    #[case("a=1;b=2", &[("a", "1"), ("b", "2")])]
    #[case(" a = 1 ;; b ", &[("a", "1"), ("b", "")])]
    #[case("url=x=y", &[("url", "x=y")])]
    #[case("=x", &[("", "x")])]
    #[case("a=1;a=2", &[("a", "2")])]
    #[case("key1=value1;key2=value2;", &[("key1", "value1"), ("key2", "value2")])]
    fn pairs_follow_the_table_of_the_contract(
        #[case] text: &str,
        #[case] expected: &[(&str, &str)],
    ) {
        let expected: BTreeMap<String, String> = expected
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        assert_eq!(parse_pairs(text), expected);
    }

    #[test]
    fn lists_keep_their_order_and_drop_what_is_empty() {
        assert_eq!(parse_list(" b, a,,b ,"), ["b", "a"]);
        assert!(parse_list(" , ").is_empty());
    }

    proptest! {
        #[test]
        fn what_is_read_can_be_written_and_read_again(text in "[ka=;, \\PC]{0,40}") {
            let pairs = parse_pairs(&text);
            let written: Vec<_> = pairs.iter().map(|(key, value)| format!("{key}={value}")).collect();
            prop_assert_eq!(parse_pairs(&written.join(" ; ")), pairs);
            let list = parse_list(&text);
            prop_assert!(list.iter().all(|element| !element.is_empty() && !element.contains(',')));
            prop_assert_eq!(parse_list(&list.join(", ")), list);
        }
    }
}
