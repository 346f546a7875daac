//! Reads an address of a git repository, and writes it in one form. What git, servers and proxies could read in two ways is
//! refused, so that the form which is judged is the form that is used.

use std::fmt;

use percent_encoding::percent_decode_str;

/// Longer than any real address, and short enough for any pattern.
const MAX_BYTES: usize = 4096;

/// How a repository is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    Https,
    Http,
    Ssh,
    File,
}

/// The address of a git repository, without a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    transport: Transport,
    /// The user of SSH. HTTP has none here.
    user: Option<String>,
    /// In lower case; empty for files.
    host: String,
    /// `None` is the default of the transport.
    port: Option<u16>,
    /// Begins with `/`, or is empty. In the short form of SSH it may begin with anything.
    path: String,
    /// `user@host:path`, without a scheme.
    is_short: bool,
}

/// Why an address cannot be used. The end of a sentence; it quotes nothing of the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("it is empty")]
    Empty,
    #[error("it is longer than {MAX_BYTES} bytes")]
    TooLong,
    #[error("it holds a space, a backslash or a control character")]
    BadCharacter,
    #[error("it, its user or its host begins with `-`")]
    Option,
    #[error("its transport is none of https, http, ssh and file")]
    Transport,
    #[error("it is neither a URL nor an absolute path")]
    Relative,
    #[error("its user has characters that no user of SSH has")]
    User,
    #[error(
        "its host is not a name of ASCII letters, digits, `-`, `_` and single dots, nor an IP address"
    )]
    Host,
    #[error("its port is not a number from 1 to 65535")]
    Port,
    #[error(
        "its path has a `.` or `..` segment, or an encoded slash, backslash or control character"
    )]
    Path,
    #[error("it has a query or a fragment")]
    Query,
}

impl Address {
    /// Reads a URL, the short form of SSH, or an absolute path.
    ///
    /// # Errors
    /// If the address is none of these, or could be read in two ways.
    pub fn parse(text: &str) -> Result<Self, AddressError> {
        if text.is_empty() {
            return Err(AddressError::Empty);
        }
        if text.len() > MAX_BYTES {
            return Err(AddressError::TooLong);
        }
        if text.contains(|c: char| c.is_control() || c.is_whitespace() || c == '\\') {
            return Err(AddressError::BadCharacter);
        }
        if text.starts_with('-') {
            return Err(AddressError::Option);
        }
        if text.contains(['?', '#']) {
            return Err(AddressError::Query);
        }
        if let Some((scheme, rest)) = text.split_once("://")
            && !scheme.contains(['/', ':', '@'])
        {
            return Self::from_url(scheme, rest);
        }
        if text.starts_with('/') {
            return Self::file(text);
        }
        let (target, path) = split_short_form(text).ok_or(AddressError::Relative)?;
        // `ext::…` runs a program.
        if path.is_empty() || path.starts_with(':') {
            return Err(AddressError::Transport);
        }
        let (user, host) = split_user(target);
        Self {
            transport: Transport::Ssh,
            user: user.map(str::to_owned),
            host: host.to_ascii_lowercase(),
            port: None,
            path: path.to_owned(),
            is_short: true,
        }
        .checked()
    }

    fn from_url(scheme: &str, rest: &str) -> Result<Self, AddressError> {
        let transport = match scheme.to_ascii_lowercase().as_str() {
            "https" => Transport::Https,
            "http" => Transport::Http,
            "ssh" => Transport::Ssh,
            "file" => Transport::File,
            _ => return Err(AddressError::Transport),
        };
        let end = rest.find('/').unwrap_or(rest.len());
        let (authority, path) = rest.split_at(end);
        if transport == Transport::File {
            return if matches!(authority, "" | "localhost") {
                Self::file(path)
            } else {
                Err(AddressError::Host)
            };
        }
        let (user, host) = split_user(authority);
        let (host, port) = split_port(host)?;
        let user = user
            .map(|user| user.split_once(':').map_or(user, |(user, _)| user))
            .filter(|user| transport == Transport::Ssh && !user.is_empty());
        Self {
            transport,
            user: user.map(str::to_owned),
            host: host.to_ascii_lowercase(),
            port: port.filter(|port| *port != transport.default_port()),
            path: path.to_owned(),
            is_short: false,
        }
        .checked()
    }

    fn file(path: &str) -> Result<Self, AddressError> {
        Self {
            transport: Transport::File,
            user: None,
            host: String::new(),
            port: None,
            path: path.to_owned(),
            is_short: false,
        }
        .checked()
    }

    fn checked(self) -> Result<Self, AddressError> {
        if let Some(user) = &self.user {
            if user.starts_with('-') {
                return Err(AddressError::Option);
            }
            if !user
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"._+-~".contains(&b))
            {
                return Err(AddressError::User);
            }
        }
        if self.transport == Transport::File {
            if !self.path.starts_with('/') {
                return Err(AddressError::Relative);
            }
        } else {
            check_host(&self.host)?;
        }
        check_path(&self.path)?;
        Ok(self)
    }

    /// How the repository is reached.
    #[must_use]
    pub const fn transport(&self) -> Transport {
        self.transport
    }

    /// The host, in lower case; empty for files.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The path, as it was given.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Scheme, host and port, as in `https://host:8443`. `None` for SSH and files.
    #[must_use]
    pub fn origin(&self) -> Option<String> {
        let scheme = match self.transport {
            Transport::Https => "https",
            Transport::Http => "http",
            Transport::Ssh | Transport::File => return None,
        };
        let port = self.port.map(|port| format!(":{port}"));
        Some(format!(
            "{scheme}://{}{}",
            self.host,
            port.unwrap_or_default()
        ))
    }

    /// Whether a repository is this one or below it, by scheme, host, port and whole segments of the path.
    #[must_use]
    pub fn contains(&self, other: &Self) -> bool {
        let base = self.path.trim_end_matches('/');
        (self.transport, &self.host, self.port) == (other.transport, &other.host, other.port)
            && other
                .path
                .strip_prefix(base)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// The forms in which patterns may name this address. The first one is shown.
    pub(crate) fn forms(&self) -> impl Iterator<Item = String> {
        let short = self.is_short.then(|| {
            let at = self.user.as_ref().map(|user| format!("{user}@"));
            format!("{}{}:{}", at.unwrap_or_default(), self.host, self.path)
        });
        short.into_iter().chain([self.long_form()])
    }

    fn long_form(&self) -> String {
        let scheme = match self.transport {
            Transport::Https => "https",
            Transport::Http => "http",
            Transport::Ssh => "ssh",
            Transport::File => "file",
        };
        let user = self.user.as_ref().map(|user| format!("{user}@"));
        let port = self.port.map(|port| format!(":{port}"));
        let slash = if self.is_short && !self.path.starts_with('/') {
            "/"
        } else {
            ""
        };
        format!(
            "{scheme}://{}{}{}{slash}{}",
            user.unwrap_or_default(),
            self.host,
            port.unwrap_or_default(),
            self.path
        )
    }
}

/// Formats the canonical form.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.forms().next().unwrap_or_default())
    }
}

impl Transport {
    const fn default_port(self) -> u16 {
        match self {
            Self::Https => 443,
            Self::Http => 80,
            Self::Ssh => 22,
            Self::File => 0,
        }
    }
}

/// `[user@]host` and path, split where git does: at the first colon, which comes before any slash.
fn split_short_form(text: &str) -> Option<(&str, &str)> {
    let (target, path) = match text.find('[') {
        Some(_) => {
            let end = text.find("]:")? + 1;
            (&text[..end], &text[end + 1..])
        }
        None => text.split_once(':')?,
    };
    (!target.contains('/')).then_some((target, path))
}

/// As curl and ssh do, at the last `@`.
fn split_user(authority: &str) -> (Option<&str>, &str) {
    match authority.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, authority),
    }
}

fn split_port(authority: &str) -> Result<(&str, Option<u16>), AddressError> {
    let after_brackets = authority.rfind(']').map_or(0, |end| end + 1);
    let Some(colon) = authority[after_brackets..].find(':') else {
        return Ok((authority, None));
    };
    let (host, port) = authority.split_at(after_brackets + colon);
    let port = &port[1..];
    if port.is_empty() {
        return Ok((host, None));
    }
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return Err(AddressError::Port);
    }
    match port.parse() {
        Ok(0) | Err(_) => Err(AddressError::Port),
        Ok(port) => Ok((host, Some(port))),
    }
}

fn check_host(host: &str) -> Result<(), AddressError> {
    if host.starts_with('-') {
        return Err(AddressError::Option);
    }
    if let Some(inner) = host
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'))
    {
        return match inner.parse::<std::net::Ipv6Addr>() {
            Ok(_) => Ok(()),
            Err(_) => Err(AddressError::Host),
        };
    }
    let is_name = host.split('.').all(|label| {
        !label.is_empty()
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    });
    if is_name {
        Ok(())
    } else {
        Err(AddressError::Host)
    }
}

/// Servers decode paths, some of them twice, and some drop what follows a `;` in a segment.
fn check_path(path: &str) -> Result<(), AddressError> {
    let once = decode(path)?;
    let twice = percent_decode_str(&once).decode_utf8_lossy().into_owned();
    for decoded in [&once, &twice] {
        let leaves = decoded.split('/').any(|segment| {
            let segment = segment.split_once(';').map_or(segment, |(name, _)| name);
            matches!(segment, "." | "..")
        });
        if leaves || decoded.contains(|c: char| c.is_control() || c == '\\') {
            return Err(AddressError::Path);
        }
    }
    // An encoded slash makes two segments of one.
    let slashes = |text: &str| text.matches('/').count();
    if slashes(path) == slashes(&twice) {
        Ok(())
    } else {
        Err(AddressError::Path)
    }
}

fn decode(path: &str) -> Result<String, AddressError> {
    let decoded = percent_decode_str(path).decode_utf8();
    decoded
        .map(std::borrow::Cow::into_owned)
        .map_err(|_| AddressError::Path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    #[rstest]
    #[case("https://git.acme.com/a/b.git", "https://git.acme.com/a/b.git")]
    #[case(
        "https://user:tok@Git.Acme.com:443/a/b.git",
        "https://git.acme.com/a/b.git"
    )]
    #[case("HTTPS://GOOD.COM", "https://good.com")]
    #[case("https://good.com@evil.com/x", "https://evil.com/x")]
    #[case("https://a@good.com:x@evil.com/x", "https://evil.com/x")]
    #[case("http://h:80/a", "http://h/a")]
    #[case("http://h:0443/a", "http://h:443/a")]
    #[case("https://h:/a", "https://h/a")]
    #[case("https://[::1]:8443/A", "https://[::1]:8443/A")]
    #[case("https://xn--bcher-kva.example/x", "https://xn--bcher-kva.example/x")]
    #[case("ssh://git@git.acme.com:22/a/b.git", "ssh://git@git.acme.com/a/b.git")]
    #[case("ssh://git:pw@h:7999/P/r.git", "ssh://git@h:7999/P/r.git")]
    #[case("ssh://h/r", "ssh://h/r")]
    #[case("git@Git.acme.com:a/b.git", "git@git.acme.com:a/b.git")]
    #[case("host:repo", "host:repo")]
    #[case("git@[::1]:repo", "git@[::1]:repo")]
    #[case("/srv/repo", "file:///srv/repo")]
    #[case("file:///srv/repo", "file:///srv/repo")]
    #[case("file://localhost/srv/repo", "file:///srv/repo")]
    #[case("https://h/R%26D/x", "https://h/R%26D/x")]
    fn every_form_has_one_canonical_form(#[case] text: &str, #[case] expected: &str) {
        assert_eq!(Address::parse(text).unwrap().to_string(), expected);
    }

    #[rstest]
    #[case("", AddressError::Empty)]
    #[case("https://good.com%2eevil.com", AddressError::Host)]
    #[case("https://good.com./x", AddressError::Host)]
    #[case("https://good..com/x", AddressError::Host)]
    #[case("https:///x", AddressError::Host)]
    #[case("https://user@/x", AddressError::Host)]
    #[case("https://gооd.com/x", AddressError::Host)]
    #[case("https://[::1/x", AddressError::Port)]
    #[case("file://elsewhere/x", AddressError::Host)]
    #[case("git@good.com:../../x", AddressError::Path)]
    #[case("https://h/a/../b", AddressError::Path)]
    #[case("https://h/a/./b", AddressError::Path)]
    #[case("https://h/a/%2E%2e/b", AddressError::Path)]
    #[case("https://h/a/%252e%252e/b", AddressError::Path)]
    #[case("https://h/a/..;x=1/b", AddressError::Path)]
    #[case("https://h/a%2fb", AddressError::Path)]
    #[case("https://h/a%252fb", AddressError::Path)]
    #[case("https://h/a%5cb", AddressError::Path)]
    #[case("https://h/a%0ab", AddressError::Path)]
    #[case("https://h/a%00b", AddressError::Path)]
    #[case("https://h/%ff", AddressError::Path)]
    #[case("/srv/../etc", AddressError::Path)]
    #[case("ext::sh -c x", AddressError::BadCharacter)]
    #[case("ext::sh", AddressError::Transport)]
    #[case("git::https://h/x", AddressError::Transport)]
    #[case("git://h/x", AddressError::Transport)]
    #[case("ftp://h/x", AddressError::Transport)]
    #[case("-oProxyCommand=x:y", AddressError::Option)]
    #[case("ssh://-oX@h/", AddressError::Option)]
    #[case("ssh://-oX/y", AddressError::Option)]
    #[case("git@-oX:y", AddressError::Option)]
    #[case("ssh://a%0ab@h/y", AddressError::User)]
    #[case("https://h:port/x", AddressError::Port)]
    #[case("https://h:0/x", AddressError::Port)]
    #[case("https://h:65536/x", AddressError::Port)]
    #[case("https://good.com\\@evil.com/x", AddressError::BadCharacter)]
    #[case("https://h/a\rb", AddressError::BadCharacter)]
    #[case("https://h/a b", AddressError::BadCharacter)]
    #[case("https://evil/?https://good.com", AddressError::Query)]
    #[case("https://good.com/evil#/allowed", AddressError::Query)]
    #[case("../x.git", AddressError::Relative)]
    #[case("a/b", AddressError::Relative)]
    #[case("./a:b", AddressError::Relative)]
    fn what_can_be_read_in_two_ways_is_refused(#[case] text: &str, #[case] expected: AddressError) {
        assert_eq!(Address::parse(text), Err(expected));
    }

    #[test]
    fn an_address_of_a_megabyte_is_refused() {
        let text = format!("https://h/{}", "a".repeat(1 << 20));
        assert_eq!(Address::parse(&text), Err(AddressError::TooLong));
    }

    #[rstest]
    #[case("https://h/prod", "https://h/prod/a/b.git", true)]
    #[case("https://h/prod/", "https://h/prod", true)]
    #[case("https://h", "https://h:443/a", true)]
    #[case("https://h/prod", "https://h/production/a", false)]
    #[case("https://h", "http://h/a", false)]
    #[case("https://h", "https://h:8443/a", false)]
    #[case("https://h", "https://h2/a", false)]
    fn a_base_contains_whole_segments_of_its_own_server(
        #[case] base: &str,
        #[case] address: &str,
        #[case] expected: bool,
    ) {
        let [base, address] = [base, address].map(|text| Address::parse(text).unwrap());
        assert_eq!(base.contains(&address), expected);
    }

    #[test]
    fn only_http_has_an_origin() {
        let origin = |text: &str| Address::parse(text).unwrap().origin();
        assert_eq!(origin("https://u@H:8443/x").unwrap(), "https://h:8443");
        assert_eq!(origin("http://h:80").unwrap(), "http://h");
        assert_eq!(origin("git@h:x"), None);
        assert_eq!(origin("/x"), None);
    }

    proptest! {
        #[test]
        fn the_canonical_form_is_its_own_and_holds_no_password(text in "(https|ssh|http|file)://[a-z:@.%/-]{0,20}|[a-z@:/.%;-]{0,20}|.{0,40}") {
            if let Ok(address) = Address::parse(&text) {
                let again = Address::parse(&address.to_string()).unwrap();
                prop_assert_eq!(&again, &address);
                prop_assert!(!address.long_form().contains("/../"));
            }
            if let Ok(address) = Address::parse(&format!("https://u:hunter2@h/{text}")) {
                let shown = format!("{address:?}");
                prop_assert!(!shown.contains("hunter2") || text.contains("hunter2"));
            }
        }
    }
}
