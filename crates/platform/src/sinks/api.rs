//! Sends the live log to the platform's API, for executors that cannot reach Redis (contract 7.7), also through the relay of a
//! hub. The API adds the lines to the same stream.
//!
//! Newer platforms delete the stream a moment after they have recorded the dispatch. Lines that are deleted cannot be put back in
//! their place, because the API adds lines only to the end. So the first lines wait for the deletion.

use std::io;
use std::time::{Duration, Instant};

use reqwest::header::{CONTENT_TYPE, HeaderValue};
use reqwest::{Client, RequestBuilder, StatusCode, Url};
use run_log::{Batch, Sink, SinkError, char_boundary, whole_lines_len};
use serde::Serialize;
use tokio::runtime::Runtime;

use crate::calls::address::extended;
use crate::calls::client::USER_AGENT;
use crate::terrakube::{TokenSource, token};

const MEDIA_TYPE: &str = "application/vnd.api+json";
/// The timeout of one request with its connection.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the first lines wait for the platform's deletion of the stream.
const FIRST_WAIT: Duration = Duration::from_secs(1);
/// How long a few lines wait for more. Readers do not notice it, and the API gets fewer requests.
const INTERVAL: Duration = Duration::from_millis(500);
/// A piece of a line has at least one character.
const LONGEST_CHAR: usize = 4;
/// So many bytes are sent without a wait.
const ENOUGH: usize = 16 * 1024;

/// The API, and the step that writes.
#[derive(Clone, Debug)]
pub struct ApiLog {
    /// Base address of the platform's API.
    pub base: Url,
    /// The job; all its steps share the stream.
    pub job_id: u32,
    pub step_id: String,
    pub tokens: TokenSource,
}

/// Posts lines to the API.
#[derive(Debug)]
pub struct ApiSink {
    log: ApiLog,
    /// The thread that uses the driver must also create and drop it.
    driver: Option<Driver>,
    is_set_up: bool,
    /// When the first lines came.
    first_lines: Option<Instant>,
    last_post: Option<Instant>,
    /// The largest request that the API, or a proxy in front of it, accepts.
    most_bytes: usize,
    /// The size of a request that the API is expected to answer in time. It writes line by line, so a busy one may take too
    /// long for many.
    in_time: usize,
    /// How much of the next line has been posted, if the line is too long for one request.
    posted_of_line: usize,
}

#[derive(Debug)]
struct Driver {
    runtime: Runtime,
    client: Client,
}

#[derive(Serialize)]
struct Document<'a> {
    data: Vec<Line<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Line<'a> {
    job_id: u32,
    step_id: &'a str,
    #[serde(rename = "lineNumber")]
    number: u64,
    output: std::borrow::Cow<'a, str>,
}

impl Sink for ApiSink {
    fn name(&self) -> String {
        // The address may contain a user name and a password. Its origin does not.
        format!("api {}", self.log.base.origin().ascii_serialization())
    }

    fn deliver(&mut self, batch: Batch<'_>) -> Result<usize, SinkError> {
        if let Some(time) = self.should_wait(&batch) {
            return Err(SinkError::Early(time));
        }
        let driver = match self.driver.take() {
            Some(driver) => driver,
            None => Driver::new().map_err(SinkError::Unavailable)?,
        };
        let taken = driver.runtime.block_on(self.post(&driver.client, batch));
        self.driver = Some(driver);
        self.last_post = Some(Instant::now());
        taken
    }
}

impl ApiSink {
    /// A sink that sends no request yet.
    pub fn new(log: ApiLog) -> Self {
        Self {
            log,
            driver: None,
            is_set_up: false,
            first_lines: None,
            last_post: None,
            most_bytes: usize::MAX,
            in_time: usize::MAX,
            posted_of_line: 0,
        }
    }

    /// How long the first lines wait, and later a few lines for more.
    fn should_wait(&mut self, batch: &Batch<'_>) -> Option<Duration> {
        if batch.is_over {
            return None;
        }
        let time = match (self.last_post, self.first_lines) {
            (Some(last_post), _) if batch.text.len() < ENOUGH => {
                INTERVAL.checked_sub(last_post.elapsed())?
            }
            (Some(_), _) => return None,
            (None, Some(first_lines)) => FIRST_WAIT.checked_sub(first_lines.elapsed())?,
            (None, None) => {
                self.first_lines = Some(Instant::now());
                FIRST_WAIT
            }
        };
        (!time.is_zero()).then_some(time)
    }

    async fn post(&mut self, client: &Client, batch: Batch<'_>) -> Result<usize, SinkError> {
        if !self.is_set_up {
            let job = self.log.job_id.to_string();
            let path = ["logs", &job, "setup-consumer-groups"];
            let request = client.post(extended(&self.log.base, &path));
            let answer = self.send(request).await;
            self.accepted(answer.map_err(SinkError::Unavailable)?)?;
            self.is_set_up = true;
        }
        let text = self.some_of(batch.text);
        // One request, except for a line that is too long.
        while self.posted_of_line < text.len() {
            let piece = self.piece_of(&text[self.posted_of_line..]);
            let body = self
                .render(piece, batch.first_line)
                .map_err(SinkError::Unavailable)?;
            let request = client.post(extended(&self.log.base, &["logs"])).body(body);
            let answer = self.send(request).await;
            self.note_time(text.len(), answer.as_ref().err());
            let answer = answer.map_err(SinkError::Unavailable)?;
            if answer == StatusCode::PAYLOAD_TOO_LARGE && piece.len() > 1 {
                self.most_bytes = piece.len() / 2;
            }
            self.accepted(answer)?;
            self.posted_of_line += piece.len();
        }
        self.posted_of_line = 0;
        Ok(text.len())
    }

    /// The part of one line, or of several lines, for the next request. All pieces of a line have its number.
    fn piece_of<'t>(&self, text: &'t [u8]) -> &'t [u8] {
        if text.len() <= self.most_bytes {
            return text;
        }
        // The newline is not posted, so it is no piece of its own.
        let end = match text.len() - 1 {
            most if most <= self.most_bytes => text.len(),
            _ => char_boundary(text, self.most_bytes.max(LONGEST_CHAR).min(text.len())),
        };
        &text[..end]
    }

    /// Sends less after a request of this size that was not answered in time, and more after another one.
    fn note_time(&mut self, bytes: usize, error: Option<&io::Error>) {
        self.in_time = match error.map(io::Error::kind) {
            Some(io::ErrorKind::TimedOut) => bytes / 2,
            Some(_) => self.in_time,
            None => self.in_time.saturating_mul(2).max(1),
        };
    }

    /// As many complete lines as fit in a request, at least one.
    fn some_of<'t>(&self, text: &'t [u8]) -> &'t [u8] {
        let most = self.most_bytes.min(self.in_time);
        if text.len() <= most {
            return text;
        }
        let length = match whole_lines_len(&text[..most]) {
            0 => text
                .iter()
                .position(|byte| *byte == b'\n')
                .map_or(text.len(), |end| end + 1),
            length => length,
        };
        &text[..length]
    }

    fn render(&self, text: &[u8], first_line: u64) -> io::Result<Vec<u8>> {
        let lines = text.split_inclusive(|byte| *byte == b'\n');
        let document = Document {
            data: (first_line..)
                .zip(lines)
                .map(|(number, line)| Line {
                    job_id: self.log.job_id,
                    step_id: &self.log.step_id,
                    number,
                    output: String::from_utf8_lossy(line.strip_suffix(b"\n").unwrap_or(line)),
                })
                .collect(),
        };
        serde_json::to_vec(&document).map_err(io::Error::other)
    }

    fn accepted(&self, status: StatusCode) -> Result<(), SinkError> {
        if status.is_success() {
            return Ok(());
        }
        let error = io::Error::other(format!("the API answers {status}"));
        // A hub takes nothing more of a task that is over for it.
        if status == StatusCode::CONFLICT && self.log.tokens.is_of_lease() {
            return Err(SinkError::Gone(error));
        }
        Err(SinkError::Unavailable(error))
    }

    async fn send(&self, request: RequestBuilder) -> io::Result<StatusCode> {
        let request = request.header(CONTENT_TYPE, MEDIA_TYPE);
        let request = self.log.tokens.authorize(request, token::CALL);
        // Addresses may hold credentials.
        let answer = request.send().await.map_err(|error| {
            let kind = if error.is_timeout() {
                io::ErrorKind::TimedOut
            } else {
                io::ErrorKind::Other
            };
            io::Error::new(kind, error.without_url())
        })?;
        let status = answer.status();
        let media_type = answer.headers().get(CONTENT_TYPE);
        if status.is_success() && media_type.is_some_and(is_page) {
            let text = format!("a page with status {status} came, which the API does not send");
            return Err(io::Error::other(text));
        }
        Ok(status)
    }
}

impl Driver {
    fn new() -> io::Result<Self> {
        Ok(Self {
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?,
            client: Client::builder()
                .timeout(TIMEOUT)
                .user_agent(USER_AGENT)
                // A redirect would send the token to another address.
                .redirect(reqwest::redirect::Policy::none())
                .build()
                .map_err(io::Error::other)?,
        })
    }
}

/// Whether it is what proxies send in the place of an API.
fn is_page(media_type: &HeaderValue) -> bool {
    media_type.as_bytes().starts_with(b"text/html")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sink() -> ApiSink {
        ApiSink::new(ApiLog {
            base: Url::parse("http://platform.example.test").unwrap(),
            job_id: 412,
            step_id: "step".to_owned(),
            tokens: TokenSource::disabled(),
        })
    }

    #[test]
    fn first_lines_wait_for_a_late_deletion_of_the_stream_unless_the_log_has_ended() {
        let many = vec![b'\n'; 2 * ENOUGH];
        for text in [b"line\n".as_slice(), many.as_slice()] {
            let batch = |is_over| Batch {
                text,
                first_line: 1,
                is_over,
            };
            // A request would fail, because nothing answers at this address.
            let early = sink().deliver(batch(false));
            assert!(
                matches!(early, Err(SinkError::Early(FIRST_WAIT))),
                "{early:?}"
            );
            assert_eq!(sink().should_wait(&batch(true)), None);
            let mut waited = sink();
            waited.first_lines = Instant::now().checked_sub(FIRST_WAIT);
            assert_eq!(waited.should_wait(&batch(false)), None);
        }
    }

    #[test]
    fn a_slow_api_gets_fewer_lines_at_a_time_and_never_less_than_one() {
        let mut sink = sink();
        let text = b"1 of eight\n2\n3\n4\n5\n6\n7\n8\n";
        let late = io::Error::from(io::ErrorKind::TimedOut);
        let mut sizes = Vec::new();
        for _ in 0..4 {
            let some = sink.some_of(text).len();
            sizes.push(some);
            sink.note_time(some, Some(&late));
        }
        assert_eq!(sizes, [25, 11, 11, 11]);
        // Another failure says nothing about the time.
        sink.note_time(11, Some(&io::Error::other("refused")));
        assert_eq!(sink.some_of(text).len(), 11);
        sink.note_time(11, None);
        sink.note_time(11, None);
        assert_eq!(sink.some_of(text).len(), 19);
        sink.note_time(19, None);
        assert_eq!(sink.some_of(text), text);
    }
}
