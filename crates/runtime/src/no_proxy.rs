//! Hosts to which no proxy leads.

use std::ffi::OsString;

/// The names of the variable. Programs differ in which of the two they read.
pub const NAMES: [&str; 2] = ["no_proxy", "NO_PROXY"];

/// Returns the value for both names that adds a host to the one that `own` has.
pub fn with(host: &str, own: impl Fn(&str) -> Option<OsString>) -> OsString {
    let set = |name| own(name).filter(|value| !value.is_empty());
    let mut direct = NAMES.into_iter().find_map(set).unwrap_or_default();
    // This means all, but only alone.
    if direct != "*" {
        if !direct.is_empty() {
            direct.push(",");
        }
        direct.push(host);
    }
    direct
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_added_to_what_is_set() {
        let of = |variables: &[(&str, &str)]| {
            with("here", |name| {
                let mut set = variables.iter();
                set.find(|(known, _)| *known == name)
                    .map(|(_, value)| value.into())
            })
        };
        assert_eq!(of(&[]), "here");
        assert_eq!(of(&[("NO_PROXY", ".internal")]), ".internal,here");
        assert_eq!(of(&[("NO_PROXY", "a"), ("no_proxy", "b")]), "b,here");
        assert_eq!(of(&[("NO_PROXY", "a"), ("no_proxy", "")]), "a,here");
        assert_eq!(of(&[("no_proxy", "*")]), "*");
    }
}
