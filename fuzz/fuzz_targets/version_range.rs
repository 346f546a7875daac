//! Version ranges. The text of a range has the same meaning again, alternatives extend a range, and an exact version contains
//! only itself.

#![no_main]

use executor::tool::Range;
use libfuzzer_sys::fuzz_target;
use semver::Version;

fuzz_target!(|text: &str| {
    let range = match Range::parse(text) {
        Ok(range) => range,
        Err(error) => {
            let message = error.to_string();
            assert!(
                message.len() <= 2048 && !message.contains('\n'),
                "{message}"
            );
            return;
        }
    };
    let again = Range::parse(&range.to_string()).expect("a range is shown as it is written");
    let wider = Range::parse(&format!("{range} || 7.7.7"));
    for version in candidates(text) {
        let accepted = range.matches(&version);
        assert_eq!(accepted, again.matches(&version), "{version}");
        // Words for any version have no alternatives.
        if let Ok(wider) = &wider {
            let seven = version == Version::new(7, 7, 7);
            assert_eq!(accepted || seven, wider.matches(&version), "{version}");
        }
        if let Some(exact) = range.exact() {
            assert_eq!(
                accepted,
                exact.cmp_precedence(&version).is_eq(),
                "{version}"
            );
        }
    }
});

/// Versions at and around the numbers of the text.
fn candidates(text: &str) -> Vec<Version> {
    let mut numbers: Vec<u64> = text
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .take(4)
        .collect();
    numbers.extend([0, 1]);
    let mut versions = vec![Version::new(7, 7, 7)];
    for window in numbers.windows(3) {
        let [major, minor, patch] = *window else {
            continue;
        };
        versions.push(Version::new(major, minor, patch));
        versions.push(Version::new(major, minor.saturating_add(1), 0));
        versions.push(Version::new(major.saturating_add(1), 0, 0));
        versions.push(Version::new(major, minor, patch.saturating_sub(1)));
    }
    let prereleases: Vec<_> = versions
        .iter()
        .map(|version| Version {
            pre: "rc1".parse().expect("a pre-release"),
            ..version.clone()
        })
        .collect();
    versions.extend(prereleases);
    versions.extend(
        text.split([' ', ',', '|', '='])
            .filter_map(|word| word.parse().ok()),
    );
    versions
}
