//! What can go wrong with a store, told without what a service sends along: its answers may echo credentials.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use job_contract::chain;

/// An artifact that could not be stored or fetched.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file of the local store could not be written; a full disk ends here.
    #[error("could not store `{}`", path.display())]
    WriteFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file of the local store could not be read.
    #[error("could not fetch `{}`", path.display())]
    ReadFile {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// What is to be stored cannot be read.
    #[error("could not read `{}`, which is to be stored", path.display())]
    Source {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// What was fetched cannot be written.
    #[error("could not write `{}`, which is to hold a fetched object", path.display())]
    Target {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A reference that points outside the store.
    #[error("`{reference}` is not in this store")]
    Foreign { reference: String },
    /// There is no such object.
    #[error("`{object}` does not exist")]
    Missing { object: String },
    /// Larger than what may be held in memory.
    #[error("`{object}` has {bytes} bytes, and at most {limit} are read into memory")]
    TooLarge {
        object: String,
        bytes: u64,
        limit: u64,
    },
    /// There is no such bucket.
    #[error("{service} has no bucket `{bucket}`, which `{setting}` names")]
    NoBucket {
        service: &'static str,
        bucket: String,
        setting: &'static str,
    },
    /// The credentials are wrong, or not enough.
    #[error("{service} refused access to `{object}` with the credentials of {settings}")]
    Refused {
        service: &'static str,
        object: String,
        /// Names of the settings they come from.
        settings: &'static str,
        #[source]
        source: Answer,
    },
    /// The service cannot be reached, fails, or broke off, and went on doing so.
    #[error("{service} could not {action} `{object}`")]
    Unavailable {
        service: &'static str,
        action: &'static str,
        object: String,
        #[source]
        source: Answer,
    },
    /// The settings are well-formed and yet no client can be made of them.
    #[error("could not set up the client of {service}")]
    Client {
        service: &'static str,
        #[source]
        source: Answer,
    },
}

impl StoreError {
    pub(crate) fn write_file(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        Self::WriteFile { path, source }
    }

    pub(crate) fn read_file(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        Self::ReadFile { path, source }
    }

    pub(crate) fn target(path: &Path, source: io::Error) -> Self {
        let path = path.to_owned();
        Self::Target { path, source }
    }

    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::WriteFile { .. } | Self::Target { .. } => {
                "check that the disk is not full and the folder belongs to the executor's user"
                    .to_owned()
            }
            Self::NoBucket { setting, .. } => {
                format!("make the bucket, or correct `{setting}`")
            }
            Self::Refused { settings, .. } => {
                format!("check {settings}, and what they may do in the bucket")
            }
            Self::Unavailable { .. } => {
                "check the address of the store, the network and the proxy settings".to_owned()
            }
            Self::Client { .. } => "check the settings of the store".to_owned(),
            Self::ReadFile { .. }
            | Self::Source { .. }
            | Self::Foreign { .. }
            | Self::TooLarge { .. }
            | Self::Missing { .. } => return None,
        })
    }
}

/// What a service, or the way to it, said: one line, cut short, without the parts that may hold credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Answer(String);

/// Longest text kept of an answer that has no code.
const ANSWER_CHARS: usize = 300;

impl Answer {
    pub(crate) fn of(error: &(dyn Error + 'static)) -> Self {
        let text = chain(error);
        let part = |name: &str| element(&text, name);
        Self(match (part("Code"), part("Message"), status(&text)) {
            (Some(code), Some(message), _) => format!("{code}: {}", line(message)),
            (Some(code), None, _) => code.to_owned(),
            (None, _, Some(answer)) => line(answer),
            (None, _, None) => line(&text),
        })
    }

    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

/// Text of the first XML element of this name: all three services answer in XML.
fn element<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    Some(content.trim()).filter(|content| !content.is_empty())
}

/// Status and what follows it; a page of a proxy says less than its status.
fn status(text: &str) -> Option<&str> {
    let (_, answer) = text.split_once("status code: ")?;
    Some(
        answer
            .split_once(": <")
            .map_or(answer, |(status, _)| status),
    )
}

fn line(text: &str) -> String {
    let words: Vec<_> = text.split_whitespace().collect();
    let text = words.join(" ");
    match text.char_indices().nth(ANSWER_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Codes by which services say that credentials are no good, whatever the status beside them.
const CREDENTIAL_CODES: &[&str] = &[
    "AccessDenied",
    "AuthenticationFailed",
    "AuthorizationFailure",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "SignatureDoesNotMatch",
];

/// Codes by which they say that the bucket itself is not there.
const BUCKET_CODES: &[&str] = &["NoSuchBucket", "ContainerNotFound"];

/// What an error of the client means.
pub(crate) enum Meaning {
    Refused,
    NoBucket,
    Missing,
    Unavailable,
}

pub(crate) fn meaning(error: &object_store::Error) -> Meaning {
    use object_store::Error as E;
    let text = chain(error);
    let said = |codes: &[&str]| {
        let code = element(&text, "Code");
        code.is_some_and(|code| codes.contains(&code))
    };
    match error {
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => Meaning::Refused,
        _ if said(CREDENTIAL_CODES) => Meaning::Refused,
        _ if said(BUCKET_CODES) => Meaning::NoBucket,
        E::NotFound { .. } => Meaning::Missing,
        _ => Meaning::Unavailable,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> String {
        Answer::of(&io::Error::other(text.to_owned())).to_string()
    }

    #[test]
    fn answers_are_one_short_line_without_what_a_service_echoes() {
        let refusal = "Error performing PUT http://x in 2ms - Server returned non-2xx status code: 403 \
                       Forbidden: <?xml version=\"1.0\"?>\n<Error><Code>SignatureDoesNotMatch</Code>\n\
                       <Message>The signature\n does not match</Message>\
                       <StringToSign>hunter2</StringToSign></Error>";
        assert_eq!(
            answer(refusal),
            "SignatureDoesNotMatch: The signature does not match"
        );
        let page = "Server returned non-2xx status code: 502 Bad Gateway: <html>\n<b>no</b></html>";
        assert_eq!(answer(page), "502 Bad Gateway");
        let json = "Server returned non-2xx status code: 400 Bad Request: {\"message\":\n\"no\"}";
        assert_eq!(answer(json), "400 Bad Request: {\"message\": \"no\"}");
        assert_eq!(answer("connection\n refused"), "connection refused");
        assert!(answer(&"x".repeat(10_000)).len() < 1000);
    }
}
