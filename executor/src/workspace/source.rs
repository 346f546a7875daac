//! The source of the content: splits the address in the job data into an address without credentials, and the
//! credentials. This module knows neither git nor HTTP clients.

use std::fmt;
use std::path::{Path, PathBuf};

use secrecy::{ExposeSecret as _, SecretString};
use url::Url;

use crate::error::StepError;

/// A git address without credentials, and the credentials from it.
#[derive(Clone, Debug)]
pub(super) struct Source {
    pub(super) address: String,
    pub(super) transport: Transport,
    /// User and password, or a token, from the address.
    pub(super) userinfo: Option<Userinfo>,
}

/// The transport of a git address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Transport {
    File,
    /// The scheme, host and port that may get credentials.
    Http {
        origin: String,
    },
    Ssh,
}

/// Either part may be the secret: a single token is written as the user name.
#[derive(Clone, Debug)]
pub(super) struct Userinfo {
    pub(super) username: SecretString,
    pub(super) password: SecretString,
}

/// The hint for an address that cannot be used.
pub(super) const ACCEPTED: &str =
    "accepted are https://, http://, ssh://, git@host:path, file:// and absolute paths";

/// Null or empty.
pub(super) fn missing() -> StepError {
    StepError::user("the job data has no `source`").with_hint("set the repository of the workspace")
}

/// Not an address of any accepted form.
pub(super) fn malformed(address: &str, reason: &str) -> StepError {
    let address = display_address(address);
    StepError::user(format!(
        "the source `{address}` is not a usable address: {reason}"
    ))
    .with_hint(ACCEPTED)
}

/// A transport that could run programs, or is not supported.
pub(super) fn refused_transport(address: &str, transport: &str) -> StepError {
    let address = display_address(address);
    StepError::user(format!(
        "the source `{address}` uses the transport `{transport}`, which is not accepted"
    ))
    .with_hint(ACCEPTED)
}

impl Source {
    /// Parses an address of any accepted form: URL, scp-like, or absolute path.
    pub(super) fn parse(text: &str) -> Result<Self, StepError> {
        let text = text.trim();
        let malformed = |reason| malformed(text, reason);
        if text.is_empty() {
            return Err(missing());
        }
        if text.starts_with('-') {
            return Err(malformed("it begins with `-`"));
        }
        if text.chars().any(char::is_control) {
            return Err(malformed("it holds control characters"));
        }
        if let Some((scheme, rest)) = text.split_once("://")
            && is_scheme(scheme)
        {
            return Self::from_url(text, scheme, rest);
        }
        if text.starts_with('/') {
            let url = Url::from_file_path(text).map_err(|()| malformed("it is no path"))?;
            return Ok(Self::plain(url.into(), Transport::File));
        }
        if let Some((helper, _)) = text.split_once("::")
            && is_scheme(helper)
        {
            return Err(refused_transport(text, helper));
        }
        if is_scp_like(text) {
            return Ok(Self::plain(text.to_owned(), Transport::Ssh));
        }
        Err(malformed("it is neither a URL nor an absolute path"))
    }

    fn plain(address: String, transport: Transport) -> Self {
        Self {
            address,
            transport,
            userinfo: None,
        }
    }

    fn from_url(text: &str, scheme: &str, rest: &str) -> Result<Self, StepError> {
        let malformed = |reason| malformed(text, reason);
        let scheme = scheme.to_ascii_lowercase();
        let (userinfo, bare) = split_userinfo(rest);
        let url = Url::parse(&format!("{scheme}://{bare}"))
            .map_err(|_| malformed("it is not a valid URL"))?;
        let userinfo_is_text =
            userinfo.is_none_or(|info| !percent_decode(info).contains(char::is_control));
        match scheme.as_str() {
            _ if !userinfo_is_text => Err(malformed("its userinfo holds control characters")),
            "http" | "https" => Ok(Self {
                address: format!("{scheme}://{bare}"),
                transport: Transport::Http {
                    origin: url.origin().ascii_serialization(),
                },
                userinfo: userinfo.map(Userinfo::parse),
            }),
            "ssh" => {
                let user = userinfo.map_or("", |info| info.split(':').next().unwrap_or(info));
                let host = url.host_str().unwrap_or_default();
                if host.is_empty() {
                    return Err(malformed("it names no host"));
                }
                if host.starts_with('-') || user.starts_with('-') {
                    return Err(malformed("its host or user begins with `-`"));
                }
                let at = if user.is_empty() { "" } else { "@" };
                Ok(Self::plain(
                    format!("ssh://{user}{at}{bare}"),
                    Transport::Ssh,
                ))
            }
            "file" if matches!(url.host_str(), None | Some("" | "localhost")) => {
                Ok(Self::plain(format!("file://{bare}"), Transport::File))
            }
            "file" => Err(malformed("a file address has no host")),
            _ => Err(refused_transport(text, &scheme)),
        }
    }
}

/// Formats the address without its query, which may contain a signature.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&display_address(&self.address))
    }
}

impl Userinfo {
    fn parse(text: &str) -> Self {
        let (username, password) = text.split_once(':').unwrap_or((text, ""));
        Self {
            username: percent_decode(username).into(),
            password: percent_decode(password).into(),
        }
    }

    /// The secret parts. Names that are too short for a token are left out, because they occur in any text.
    pub(super) fn secrets(&self) -> Vec<SecretString> {
        const SHORTEST_TOKEN: usize = 8;
        let mut secrets = vec![self.password.clone()];
        if self.username.expose_secret().len() >= SHORTEST_TOKEN {
            secrets.push(self.username.clone());
        }
        secrets
    }

    pub(super) fn is_empty(&self) -> bool {
        self.username.expose_secret().is_empty() && self.password.expose_secret().is_empty()
    }
}

/// An address without userinfo, query and fragment, for messages.
pub(super) fn display_address(address: &str) -> String {
    let shown = address.split(['?', '#']).next().unwrap_or(address);
    mask_userinfo(shown)
}

/// The path of a `file://` URL or of a plain absolute path.
pub(super) fn local_path(text: &str) -> Option<PathBuf> {
    if text.starts_with('/') {
        return Some(Path::new(text).to_path_buf());
    }
    let url = Url::parse(text).ok()?;
    (url.scheme() == "file")
        .then(|| url.to_file_path().ok())
        .flatten()
}

/// Replaces the userinfo of every URL in a text. A user name alone in an SSH address stays.
pub(super) fn mask_userinfo(text: &str) -> String {
    let mut masked = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("://") {
        masked.push_str(before);
        masked.push_str("://");
        let end = after
            .find(|c: char| c == '/' || c == '\'' || c == '"' || c == '`' || c.is_whitespace())
            .unwrap_or(after.len());
        let (authority, tail) = after.split_at(end);
        match authority.rsplit_once('@') {
            Some((user, host)) if before.ends_with("ssh") && !user.contains(':') => {
                masked.push_str(user);
                masked.push('@');
                masked.push_str(host);
            }
            Some((_, host)) => {
                masked.push_str("***@");
                masked.push_str(host);
            }
            None => masked.push_str(authority),
        }
        rest = tail;
    }
    masked.push_str(rest);
    masked
}

/// Splits the text after `://` into the userinfo and the rest.
fn split_userinfo(rest: &str) -> (Option<&str>, String) {
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, tail) = rest.split_at(end);
    match authority.rsplit_once('@') {
        Some((info, host)) => (Some(info), format!("{host}{tail}")),
        None => (None, rest.to_owned()),
    }
}

fn is_scheme(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"+-.".contains(&b))
}

/// `[user@]host:path`, as in ssh and git.
fn is_scp_like(text: &str) -> bool {
    let split = if text.contains('[') {
        text.split_once("]:")
    } else {
        text.split_once(':')
    };
    let Some((target, path)) = split else {
        return false;
    };
    let host = target.rsplit('@').next().unwrap_or(target);
    !path.is_empty() && !host.is_empty() && !target.contains('/') && !host.starts_with('-')
}

fn percent_decode(text: &str) -> String {
    percent_encoding::percent_decode_str(text)
        .decode_utf8_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case(
        "https://example.com/a.git",
        "https://example.com/a.git",
        "https://example.com"
    )]
    #[case(
        "HTTPS://Example.com:8443/a",
        "https://Example.com:8443/a",
        "https://example.com:8443"
    )]
    #[case("http://[::1]:80/a", "http://[::1]:80/a", "http://[::1]")]
    fn http_addresses_have_an_origin(
        #[case] text: &str,
        #[case] address: &str,
        #[case] origin: &str,
    ) {
        let source = Source::parse(text).unwrap();
        assert_eq!(source.address, address);
        assert_eq!(
            source.transport,
            Transport::Http {
                origin: origin.to_owned()
            }
        );
        assert!(source.userinfo.is_none());
    }

    #[rstest]
    #[case(
        "git@example.com:org/repo.git",
        "git@example.com:org/repo.git",
        Transport::Ssh
    )]
    #[case("host:repo", "host:repo", Transport::Ssh)]
    #[case("git@[::1]:repo", "git@[::1]:repo", Transport::Ssh)]
    #[case(
        "ssh://git@example.com:2222/repo",
        "ssh://git@example.com:2222/repo",
        Transport::Ssh
    )]
    #[case(
        "ssh://git:hunter2@example.com/r",
        "ssh://git@example.com/r",
        Transport::Ssh
    )]
    #[case("ssh://example.com/repo", "ssh://example.com/repo", Transport::Ssh)]
    #[case("file:///srv/repo", "file:///srv/repo", Transport::File)]
    #[case("/srv/a 100%/repo", "file:///srv/a%20100%25/repo", Transport::File)]
    fn every_other_form_is_read(
        #[case] text: &str,
        #[case] address: &str,
        #[case] transport: Transport,
    ) {
        let source = Source::parse(text).unwrap();
        assert_eq!(
            (source.address.as_str(), source.transport),
            (address, transport)
        );
    }

    #[rstest]
    #[case("https://user:p%40ss@host/r", "user", "p@ss")]
    #[case("https://token@host/r", "token", "")]
    #[case("https://a@b:hunter2@host/r", "a@b", "hunter2")]
    fn userinfo_is_taken_out(#[case] text: &str, #[case] user: &str, #[case] password: &str) {
        let source = Source::parse(text).unwrap();
        assert_eq!(source.address, "https://host/r");
        let info = source.userinfo.as_ref().unwrap();
        assert_eq!(info.username.expose_secret(), user);
        assert_eq!(info.password.expose_secret(), password);
        assert!(!format!("{source:?}").contains(password) || password.is_empty());
    }

    #[rstest]
    #[case("")]
    #[case("  ")]
    #[case("--upload-pack=touch /tmp/x")]
    #[case("ext::sh -c touch% /tmp/x")]
    #[case("fd::17/foo")]
    #[case("ftp://host/x")]
    #[case("ssh://-oProxyCommand=x/y")]
    #[case("-oProxyCommand=x:y")]
    #[case("git@-oProxyCommand=x:y")]
    #[case("file://elsewhere/repo")]
    #[case("relative/path")]
    #[case("./a:b")]
    #[case("https://")]
    #[case("https://host/a\nb")]
    #[case("https://user:a%0ahost=evil@host/r")]
    fn hostile_and_unusable_addresses_are_refused(#[case] text: &str) {
        let error = Source::parse(text).unwrap_err();
        assert!(error.hint().is_some());
    }

    #[test]
    fn refusals_show_no_credentials() {
        let error = Source::parse("ftp://user:hunter2@host/x?sig=hunter3").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the source `ftp://***@host/x` uses the transport `ftp`, which is not accepted"
        );
    }

    #[test]
    fn userinfo_is_masked_anywhere_in_a_text() {
        assert_eq!(
            mask_userinfo("unable to access 'https://u:p@h/x': see http://t@h2 and ssh://git@h3/y"),
            "unable to access 'https://***@h/x': see http://***@h2 and ssh://git@h3/y"
        );
    }

    proptest! {
        #[test]
        fn no_address_panics_or_keeps_a_password(text in ".{0,60}") {
            let _ = Source::parse(&text);
            let _ = mask_userinfo(&text);
            if let Ok(source) = Source::parse(&format!("https://u:hunter2{}@host/", text.replace(['/', '?', '#'], ""))) {
                prop_assert!(!source.address.contains("hunter2"));
            }
        }
    }
}
