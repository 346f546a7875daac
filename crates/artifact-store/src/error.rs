//! Errors of a store. They leave out what a service echoes, because that may hold credentials.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};

use job_contract::build::BUILD_FULLY;
use job_contract::{chain, env};

/// What a store reads and writes, in messages.
pub(crate) const OBJECT: &str = "the stored object";
pub(crate) const FOLDER: &str = "the folder of the store";
pub(crate) const SOURCE: &str = "the file to store";
pub(crate) const TARGET: &str = "a fetched object to";

/// Why an artifact could not be stored or fetched.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A file of the local store, or the file to store.
    #[error("could not read {what} `{}`", path.display())]
    Read {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A file of the local store, or the target of a fetch.
    #[error("could not write {what} `{}`", path.display())]
    Write {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A reference that points outside the store.
    #[error("`{reference}` is not in this store")]
    Foreign { reference: String },
    #[error("`{object}` does not exist")]
    Missing { object: String },
    #[error("`{object}` has {bytes} bytes; at most {limit} are read")]
    TooLarge {
        object: String,
        bytes: u64,
        limit: u64,
    },
    /// Somebody else has locked the object.
    #[error("another run has locked `{object}`")]
    Locked { object: String },
    /// The object is not what was looked at before. The change may succeed if it is looked at again.
    #[error("somebody has changed `{object}` meanwhile")]
    Changed { object: String },
    #[error("`{object}` is no list of kept states")]
    Unreadable {
        object: String,
        #[source]
        source: serde_json::Error,
    },
    /// The service may still delete the object, or has done so without an answer.
    #[error("whether `{object}` is deleted is not known")]
    Uncertain { object: String },
    /// The hub refused it.
    #[error("the hub refused `{object}`")]
    Rejected {
        object: String,
        #[source]
        source: Answer,
    },
    /// An upload that is not what its sender has declared. Nothing is stored.
    #[error("the content of `{object}` differs from its declared size or digest")]
    Altered { object: String },
    /// An upload that ended early. Nothing is stored.
    #[error("the content broke off")]
    Broken(#[source] io::Error),
    #[error("{service} has no bucket `{bucket}`, the value of `{setting}`")]
    NoBucket {
        service: &'static str,
        bucket: String,
        setting: &'static str,
    },
    #[error("{service} refused access to `{object}` with the credentials of {settings}")]
    Refused {
        service: &'static str,
        object: String,
        /// Names of the settings that hold the credentials.
        settings: &'static str,
        #[source]
        source: Answer,
    },
    /// The service cannot be reached, fails or closes connections, also after retries.
    #[error("{service} could not {action} `{object}`")]
    Unavailable {
        service: &'static str,
        action: &'static str,
        object: String,
        #[source]
        source: Answer,
    },
    /// No client can be built from the settings, although they are well-formed.
    #[error("could not set up the client of {service}")]
    Client {
        service: &'static str,
        #[source]
        source: Answer,
    },
    /// The settings name a store of a cloud, and this build has no client of it.
    #[error(
        "`{}` needs a client of {service}, which this build leaves out",
        env::STATE_TYPE
    )]
    LeftOut { service: &'static str },
}

impl StoreError {
    /// Refuses an object that is larger than its reader takes.
    pub(crate) fn unless_fits(object: &str, bytes: u64, limit: u64) -> Result<(), Self> {
        if bytes <= limit {
            return Ok(());
        }
        let object = object.to_owned();
        Err(Self::TooLarge {
            object,
            bytes,
            limit,
        })
    }

    pub(crate) const fn broken(source: io::Error) -> Self {
        Self::Broken(source)
    }

    /// For `map_err`: `what` could not be read.
    pub(crate) fn read(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Read {
            what,
            path: path.clone(),
            source,
        }
    }

    /// For `map_err`: `what` could not be written.
    pub(crate) fn write(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Write {
            what,
            path: path.clone(),
            source,
        }
    }

    /// Whether the service may have refused because the object does not exist: without the right to list objects, it says no more. A
    /// caller whom it does not know learns nothing of the object.
    pub fn may_be_missing(&self) -> bool {
        matches!(self, Self::Refused { source, .. } if !UNKNOWN_CALLER.contains(&source.code()))
    }

    /// The next step for the operator.
    pub fn hint(&self) -> Option<String> {
        Some(match self {
            Self::Write { .. } => {
                "check that the disk is not full and the folder belongs to the executor's user"
                    .to_owned()
            }
            Self::NoBucket { setting, .. } => {
                format!("create the bucket, or correct `{setting}`")
            }
            Self::Refused { settings, .. } => {
                format!("check {settings}, and their permissions on the bucket")
            }
            Self::Unavailable { .. } => {
                "check the address of the store, the network and the proxy settings".to_owned()
            }
            Self::Unreadable { .. } => {
                "mend that object, or replace it with `state drop`: it names the kept states in the folder `state` beside it".to_owned()
            }
            Self::Client { .. } => "check the settings of the store".to_owned(),
            Self::LeftOut { .. } => BUILD_FULLY.to_owned(),
            Self::Read { .. }
            | Self::Foreign { .. }
            | Self::TooLarge { .. }
            | Self::Altered { .. }
            | Self::Broken(_)
            | Self::Rejected { .. }
            | Self::Locked { .. }
            | Self::Changed { .. }
            | Self::Uncertain { .. }
            | Self::Missing { .. } => return None,
        })
    }
}

/// The error text of a service or of the network: one short line, without the parts that may hold credentials.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Answer(String);

/// Codes of a service that does not take the credentials, or the time, of any request.
const UNKNOWN_CALLER: &[&str] = &[
    "AuthenticationFailed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "InvalidToken",
    "RequestExpired",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
];
/// The longest text that is kept of an answer without a code.
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

    /// The code of the service, if it has given one.
    fn code(&self) -> &str {
        self.0.split(':').next().unwrap_or_default()
    }
}

/// Text of the first XML element of this name. All three services answer in XML.
pub(crate) fn element<'t>(text: &'t str, name: &str) -> Option<&'t str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (content, _) = rest.split_once(&format!("</{name}>"))?;
    Some(content.trim()).filter(|content| !content.is_empty())
}

/// The status and the text after it. An HTML page of a proxy is left out: the status says more.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(text: &str) -> String {
        Answer::of(&io::Error::other(text.to_owned())).to_string()
    }

    /// The clock of the machine may be wrong, which the tool corrects for itself.
    #[test]
    fn a_caller_that_is_not_known_learns_nothing_of_an_object() {
        let refused = |answer: &str| StoreError::Refused {
            service: "S3",
            object: "o".to_owned(),
            settings: "keys",
            source: Answer::new(answer),
        };
        for hidden in [
            "AccessDenied: Access Denied",
            "AccessDenied",
            "403 Forbidden",
        ] {
            assert!(refused(hidden).may_be_missing(), "{hidden}");
        }
        for unknown in ["RequestTimeTooSkewed: too large", "ExpiredToken"] {
            assert!(!refused(unknown).may_be_missing(), "{unknown}");
        }
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
