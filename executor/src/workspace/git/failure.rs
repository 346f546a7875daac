//! Classifies git's stderr, and extracts a line for users. It does no I/O. git must have run under `LC_ALL=C`.

use super::super::NETWORK_HINT;
use super::super::source::{ACCEPTED, mask_userinfo};
use crate::error::StepError;

/// The kinds of failure, each with its own hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GitFailure {
    Unreachable,
    Certificate,
    NotAllowed,
    Redirect,
    HostKey,
    PrivateKey,
    AuthRefused,
    NoRepository,
    NoReference,
    BadAddress,
    DiskFull,
    Other,
}

/// Phrases of git, curl and ssh. Order matters, because the first matching kind wins. A phrase that also accompanies
/// other failures, such as "could not read from remote repository", comes late or is left out.
const PHRASES: [(GitFailure, &[&str]); 11] = [
    (
        GitFailure::NotAllowed,
        &["is not allowed by `ALLOWED_VCS_URL_REGEX`"],
    ),
    (
        GitFailure::Redirect,
        &[
            "returned error: 301",
            "returned error: 302",
            "returned error: 307",
            "returned error: 308",
        ],
    ),
    (
        GitFailure::DiskFull,
        &["No space left on device", "Disk quota exceeded"],
    ),
    (
        GitFailure::HostKey,
        &[
            "Host key verification failed",
            "REMOTE HOST IDENTIFICATION HAS CHANGED",
            "host key is known for",
        ],
    ),
    (
        GitFailure::Certificate,
        &[
            "SSL certificate problem",
            "server certificate verification failed",
            "certificate subject name",
            "no alternative certificate subject name matches",
        ],
    ),
    (
        GitFailure::PrivateKey,
        &["error in libcrypto", "invalid format", "bad permissions"],
    ),
    (
        GitFailure::AuthRefused,
        &[
            "Authentication failed for",
            "could not read Username",
            "could not read Password",
            "HTTP Basic: Access denied",
            "Permission denied (",
            "returned error: 401",
            "returned error: 403",
            "Too many authentication failures",
            "You are not allowed",
        ],
    ),
    (
        GitFailure::NoReference,
        &[
            "Remote branch",
            "couldn't find remote ref",
            "not our ref",
            "unadvertised object",
            "Direct fetching of that commit failed",
        ],
    ),
    (
        GitFailure::NoRepository,
        &[
            "Repository not found",
            "repository not found",
            "does not appear to be a git repository",
            "returned error: 404",
            "' not found",
            "could not be found",
            "not a git repository",
        ],
    ),
    (
        GitFailure::Unreachable,
        &[
            "Could not resolve host",
            "Could not resolve proxy",
            "Failed to connect",
            "Couldn't connect to server",
            "Connection refused",
            "Connection timed out",
            "Connection reset",
            "Connection closed by",
            "Operation timed out",
            "Operation too slow",
            "Network is unreachable",
            "No route to host",
            "Name or service not known",
            "Temporary failure in name resolution",
            "early EOF",
            "unexpected disconnect",
            "the remote end hung up unexpectedly",
            "Empty reply from server",
            "returned error: 429",
            "returned error: 5",
        ],
    ),
    (
        GitFailure::BadAddress,
        &[
            "transport '",
            "bad/illegal format",
            "Malformed input to a URL function",
            "is not supported",
            "unable to find remote helper",
            "strange hostname",
            "no path specified",
            "unable to parse",
        ],
    ),
];

impl GitFailure {
    pub(super) fn classify(stderr: &str) -> Self {
        PHRASES
            .iter()
            .find(|(_, phrases)| phrases.iter().any(|phrase| stderr.contains(phrase)))
            .map_or(Self::Other, |(kind, _)| *kind)
    }

    /// The error of a step with this failure. Only failures that may disappear are worth another start.
    pub(super) fn error(self, text: String) -> StepError {
        let error = match self {
            Self::Unreachable | Self::DiskFull | Self::Other => StepError::infrastructure(text),
            _ => StepError::user(text),
        };
        match self.hint() {
            Some(hint) => error.with_hint(hint),
            None => error,
        }
    }

    /// A description of the failure, which precedes git's own message.
    pub(crate) fn summary(self) -> &'static str {
        match self {
            Self::Unreachable => "the server could not be reached",
            Self::Certificate => "the server's certificate is not trusted",
            Self::NotAllowed => "the operator does not allow it",
            Self::Redirect => "the server redirects to another address",
            Self::HostKey => "the server's SSH host key was not accepted",
            Self::PrivateKey => "the SSH private key cannot be used",
            Self::AuthRefused => "the server refused the credentials",
            Self::NoRepository => "there is no such repository",
            Self::NoReference => "there is no such reference",
            Self::BadAddress => "the address cannot be used",
            Self::DiskFull => "the disk is full",
            Self::Other => "git failed",
        }
    }

    fn hint(self) -> Option<&'static str> {
        match self {
            Self::Unreachable => Some(NETWORK_HINT),
            Self::Certificate => {
                Some("set SSL_CERT_FILE to a CA bundle that contains the server's issuer")
            }
            Self::NotAllowed => Some(
                "use repositories that the operator allows, also for submodules, or ask the operator to allow this one",
            ),
            Self::Redirect => Some(
                "use the final address of the repository; with `ALLOWED_VCS_URL_REGEX`, git follows no redirect",
            ),
            Self::HostKey => Some(
                "compare the server's key with the configured known_hosts file, and add it there if it is right",
            ),
            Self::PrivateKey => {
                Some("the key must be an unencrypted private key in PEM or OpenSSH format")
            }
            Self::AuthRefused => {
                Some("check the VCS connection of the workspace and its access to this repository")
            }
            Self::NoRepository => Some(
                "check the address; servers also give this answer if the credentials have no access to it",
            ),
            Self::NoReference => Some("check the branch or tag of the workspace"),
            Self::BadAddress => Some(ACCEPTED),
            Self::DiskFull => Some("give the work directory more space"),
            Self::Other => None,
        }
    }
}

/// Lines that git prints after its actual error message.
const BOILERPLATE: [&str; 8] = [
    "Failed to recurse into submodule path",
    "and the repository exists.",
    "Please make sure you have the correct access rights",
    "Could not read from remote repository",
    "the remote end hung up unexpectedly",
    "hint:",
    "clone of '",
    "Failed to clone '",
];

/// The last line with information, without credentials.
pub(super) fn meaningful_line(stderr: &str, secrets: &[&str]) -> String {
    let lines = || {
        stderr
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
    };
    let line = lines()
        .rev()
        .find(|line| !BOILERPLATE.iter().any(|phrase| line.contains(phrase)))
        .or_else(|| lines().next_back())
        .unwrap_or("git printed no message");
    let line = line
        .strip_prefix("fatal: ")
        .or_else(|| line.strip_prefix("error: "))
        .unwrap_or(line);
    let line: String = line.chars().filter(|c| !c.is_control()).take(500).collect();
    mask(&line, secrets)
}

/// Removes the userinfo of URLs and each line of each secret from a text.
pub(super) fn mask(text: &str, secrets: &[&str]) -> String {
    let mut masked = mask_userinfo(text);
    for secret in secrets.iter().flat_map(|secret| secret.lines()) {
        if !secret.trim().is_empty() {
            masked = masked.replace(secret, "***");
        }
    }
    masked
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(
        "fatal: unable to access 'https://h/x/': Could not resolve host: h",
        GitFailure::Unreachable
    )]
    #[case(
        "ssh: connect to host h port 22: Connection refused\nfatal: Could not read from remote repository.",
        GitFailure::Unreachable
    )]
    #[case(
        "fatal: unable to access 'https://h/x/': The requested URL returned error: 503",
        GitFailure::Unreachable
    )]
    #[case(
        "fatal: unable to access 'https://h/x/': The requested URL returned error: 403",
        GitFailure::AuthRefused
    )]
    #[case(
        "remote: Invalid username or token.\nfatal: Authentication failed for 'https://h/x/'",
        GitFailure::AuthRefused
    )]
    #[case(
        "fatal: could not read Username for 'https://h': terminal prompts disabled",
        GitFailure::AuthRefused
    )]
    #[case(
        "git@h: Permission denied (publickey).\nfatal: Could not read from remote repository.",
        GitFailure::AuthRefused
    )]
    #[case(
        "remote: Repository not found.\nfatal: repository 'https://h/x/' not found",
        GitFailure::NoRepository
    )]
    #[case(
        "fatal: '/srv/x' does not appear to be a git repository",
        GitFailure::NoRepository
    )]
    #[case(
        "warning: Could not find remote branch x to clone.\nfatal: Remote branch x not found in upstream origin",
        GitFailure::NoReference
    )]
    #[case(
        "No ED25519 host key is known for h and you have requested strict checking.\nHost key verification failed.",
        GitFailure::HostKey
    )]
    #[case(
        "Load key \"/k\": error in libcrypto\ngit@h: Permission denied (publickey).",
        GitFailure::PrivateKey
    )]
    #[case(
        "fatal: unable to access 'https://h/': SSL certificate problem: self-signed certificate",
        GitFailure::Certificate
    )]
    #[case("fatal: transport 'ext' not allowed", GitFailure::BadAddress)]
    #[case(
        "fatal: the git URL `https://h/x` is not allowed by `ALLOWED_VCS_URL_REGEX`\nfatal: Could not read from remote repository.",
        GitFailure::NotAllowed
    )]
    #[case(
        "fatal: unable to access 'https://h/x/': The requested URL returned error: 301",
        GitFailure::Redirect
    )]
    #[case("fatal: write error: No space left on device", GitFailure::DiskFull)]
    #[case("fatal: something new", GitFailure::Other)]
    fn stderr_is_classified(#[case] stderr: &str, #[case] expected: GitFailure) {
        assert_eq!(GitFailure::classify(stderr), expected);
        assert_eq!(expected.hint().is_none(), expected == GitFailure::Other);
    }

    #[test]
    fn the_line_shown_names_the_failure_and_no_secret() {
        let stderr = "Cloning into 'x'...\nfatal: Authentication failed for 'https://u:hunter2@h/x/?t=hunter3'\n\
                      fatal: Could not read from remote repository.\n\nPlease make sure you have the correct \
                      access rights\nand the repository exists.\n";
        assert_eq!(
            meaningful_line(stderr, &["hunter3"]),
            "Authentication failed for 'https://***@h/x/?t=***'"
        );
        assert_eq!(meaningful_line("", &[]), "git printed no message");
    }
}
