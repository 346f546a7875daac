//! Types of settings, and how their values are written.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use secrecy::SecretString;
use url::Url;

/// A type that a setting can have.
pub trait SettingValue: Clone + Send + Sync + Sized + 'static {
    /// Parses a text that is trimmed and not empty.
    ///
    /// # Errors
    /// The problem, as the end of a sentence that begins with the setting. It does not quote a secret.
    fn parse(text: &str) -> Result<Self, String>;
}

/// The message for a text that is not what is expected.
pub fn unexpected(text: &str, expected: &str) -> String {
    format!("is `{text}`, expected {expected}")
}

impl SettingValue for String {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.to_owned())
    }
}

impl SettingValue for PathBuf {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }
}

impl SettingValue for SecretString {
    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }
}

/// The value of a word, in upper or lower case.
///
/// # Errors
/// The list of valid words.
pub fn choice<T: Copy>(text: &str, choices: &[(&str, T)]) -> Result<T, String> {
    let mut known = choices.iter();
    let chosen = known.find(|(word, _)| text.eq_ignore_ascii_case(word));
    chosen.map(|(_, value)| *value).ok_or_else(|| {
        let words: Vec<String> = choices
            .iter()
            .map(|(word, _)| format!("`{word}`"))
            .collect();
        unexpected(text, &words.join(" or "))
    })
}

impl SettingValue for bool {
    fn parse(text: &str) -> Result<Self, String> {
        choice(text, &[("true", true), ("false", false)])
    }
}

impl SettingValue for SocketAddr {
    fn parse(text: &str) -> Result<Self, String> {
        let expected = "an IP address and a port such as `0.0.0.0:8090`";
        text.parse().map_err(|_| unexpected(text, expected))
    }
}

impl SettingValue for NonZeroUsize {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse()
            .map_err(|_| unexpected(text, "a number from 1"))
    }
}

impl SettingValue for f64 {
    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| unexpected(text, "a number"))
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl SettingValue for $number {
            fn parse(text: &str) -> Result<Self, String> {
                let most = Self::MAX;
                text.parse()
                    .map_err(|_| unexpected(text, &format!("a number from 0 to {most}")))
            }
        }
    )*};
}

numbers!(u16, u32, u64, usize);

/// A whole number of seconds, 1 at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl SettingValue for Seconds {
    fn parse(text: &str) -> Result<Self, String> {
        match text.parse() {
            Ok(seconds @ 1..) => Ok(Self(Duration::from_secs(seconds))),
            _ => Err(unexpected(text, "a number of seconds, 1 at least")),
        }
    }
}

/// A whole number of milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Milliseconds(pub Duration);

impl SettingValue for Milliseconds {
    fn parse(text: &str) -> Result<Self, String> {
        let milliseconds = text.parse().map(Duration::from_millis);
        milliseconds
            .map(Self)
            .map_err(|_| unexpected(text, "a number of milliseconds"))
    }
}

/// An address of a server. It may contain a login, so errors do not quote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpUrl {
    pub url: Url,
    /// The text as the operator wrote it.
    pub text: String,
}

impl SettingValue for HttpUrl {
    fn parse(text: &str) -> Result<Self, String> {
        let url = Url::parse(text).map_err(|error| format!("is not a URL: {error}"))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err("is not an http or https URL".to_owned());
        }
        let text = text.to_owned();
        Ok(Self { url, text })
    }
}
