//! Identifiers. The other side treats them as opaque texts.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// The longest name of a pool or an agent. Both become labels of Kubernetes objects, so the limit is that of a DNS
/// label.
const MAX_NAME: usize = 63;

/// Why a text is not a valid name of a pool or an agent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a valid name: use 1 to {MAX_NAME} lower-case letters, digits and `-`, and begin and end with a letter or digit"
)]
pub struct NameError(String);

macro_rules! name {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// Returns the name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = NameError;

            fn from_str(text: &str) -> Result<Self, NameError> {
                is_label(text).then(|| Self(text.to_owned())).ok_or_else(|| {
                    NameError(text.chars().take(2 * MAX_NAME).collect())
                })
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

name! {
    /// A named queue. One agent entity of the platform points at it.
    PoolName
}
name! {
    /// The name of an agent. It is unique in its pool.
    AgentName
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[cfg_attr(test, derive(schemars::JsonSchema))]
        #[serde(transparent)]
        pub struct $name(Uuid);

        impl $name {
            /// Returns a new id. Later ids sort after earlier ones.
            pub fn new() -> Self {
                Self(Uuid::now_v7())
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        }

        impl FromStr for $name {
            type Err = uuid::Error;

            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// The id of a task: one run in the queue of a pool.
    TaskId
}
id! {
    /// The id of a lease: the right of one instance to one task, for a time.
    LeaseId
}
id! {
    /// The id of an instance: one registered process of an agent.
    InstanceId
}

fn is_label(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= MAX_NAME
        && text.bytes().all(|byte| plain(byte) || byte == b'-')
        && text.bytes().next().is_some_and(plain)
        && text.bytes().next_back().is_some_and(plain)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("eu", true)]
    #[case("eu-west-1", true)]
    #[case("1", true)]
    #[case("", false)]
    #[case("-eu", false)]
    #[case("eu-", false)]
    #[case("EU", false)]
    #[case("e u", false)]
    #[case("../eu", false)]
    #[case("eü", false)]
    fn names_are_labels(#[case] text: &str, #[case] valid: bool) {
        assert_eq!(text.parse::<PoolName>().is_ok(), valid);
        let json = serde_json::to_string(text).unwrap();
        assert_eq!(serde_json::from_str::<AgentName>(&json).is_ok(), valid);
    }

    #[test]
    fn a_name_has_at_most_63_characters() {
        assert!("a".repeat(63).parse::<PoolName>().is_ok());
        let error = "a".repeat(4096).parse::<PoolName>().unwrap_err();
        assert!(error.to_string().len() < 400, "{error}");
    }

    #[test]
    fn later_ids_sort_after_earlier_ones() {
        let [first, second] = [TaskId::new(), TaskId::new()];
        assert!(first < second && first.to_string() < second.to_string());
    }
}
