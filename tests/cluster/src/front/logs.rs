//! `pods/log`: what containers wrote, from the files the pod runner fills. As a container runtime does, it keeps the time
//! with each line.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{self, BufRead as _, BufReader, Read, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Response, header};
use futures_util::stream;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::request::Query;
use super::status::ApiError;

const POLL: Duration = Duration::from_millis(20);

/// One container's log.
#[derive(Debug, Clone)]
struct LogFile {
    path: PathBuf,
    complete: bool,
}

/// Logs by pod UID and container.
#[derive(Debug, Default)]
pub(crate) struct Logs(Mutex<HashMap<(String, String), LogFile>>);

impl Logs {
    pub(crate) fn begin(&self, uid: &str, container: &str, path: &Path) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.insert(
            (uid.to_owned(), container.to_owned()),
            LogFile {
                path: path.to_owned(),
                complete: false,
            },
        );
    }

    pub(crate) fn complete(&self, uid: &str, container: &str) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(log) = all.get_mut(&(uid.to_owned(), container.to_owned())) {
            log.complete = true;
        }
    }

    /// Text of every log so far, by pod UID and container.
    pub(crate) fn texts(&self) -> Vec<((String, String), String)> {
        let all = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        all.into_iter()
            .map(|(whose, log)| {
                let text = plain_text(&log.path);
                (whose, String::from_utf8_lossy(&text).into_owned())
            })
            .collect()
    }

    /// Text of the log of this container so far.
    pub(crate) fn text(&self, uid: &str, container: &str) -> Option<String> {
        let text = plain_text(&self.find(uid, container)?.path);
        Some(String::from_utf8_lossy(&text).into_owned())
    }

    fn find(&self, uid: &str, container: &str) -> Option<LogFile> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&(uid.to_owned(), container.to_owned())).cloned()
    }
}

fn items(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

/// Whose log is meant. Beside init containers, one container is meant without its name.
fn container_of(query: &Query, pod: &Value) -> Result<String, ApiError> {
    let names = |list: &str| -> Vec<&str> {
        let containers = items(&pod["spec"][list]).iter();
        let names = containers.filter_map(|container| container["name"].as_str());
        names.collect()
    };
    let (plain, init) = (names("containers"), names("initContainers"));
    let pod = pod["metadata"]["name"].as_str().unwrap_or("");
    match (query.get("container"), plain.as_slice()) {
        ("", [only]) => Ok((*only).to_owned()),
        ("", names) => Err(ApiError::bad_request(format!(
            "a container name must be specified for pod {pod}, choose one of: {names:?}"
        ))),
        (wanted, names) if names.contains(&wanted) || init.contains(&wanted) => {
            Ok(wanted.to_owned())
        }
        (wanted, _) => Err(ApiError::bad_request(format!(
            "container {wanted} is not valid for pod {pod}"
        ))),
    }
}

fn waiting_reason<'a>(pod: &'a Value, container: &str) -> &'a str {
    items(&pod["status"]["containerStatuses"])
        .iter()
        .find(|status| status["name"] == container)
        .and_then(|status| status["state"]["waiting"]["reason"].as_str())
        .unwrap_or("ContainerCreating")
}

/// The last `lines` lines.
fn tail(text: &[u8], lines: usize) -> &[u8] {
    let end = text.len() - usize::from(text.last() == Some(&b'\n'));
    let mut seen = 0;
    for at in (0..end).rev() {
        if text[at] == b'\n' {
            seen += 1;
            if seen == lines {
                return &text[at + 1..];
            }
        }
    }
    if lines == 0 { &[] } else { text }
}

/// How much of a text is lines that have ended.
fn whole_lines(text: &[u8]) -> usize {
    let last = text.iter().rposition(|byte| *byte == b'\n');
    last.map_or(0, |at| at + 1)
}

/// Writes what comes, each line with the time at which it began to be read.
pub(crate) fn stamp(from: impl Read, mut to: impl Write) -> io::Result<()> {
    let mut from = BufReader::new(from);
    loop {
        let mut line = Vec::new();
        if from.read_until(b'\n', &mut line)? == 0 {
            return Ok(());
        }
        let mut stamped = format!("{:.9} ", Timestamp::now()).into_bytes();
        stamped.append(&mut line);
        to.write_all(&stamped)?;
    }
}

/// A stamped line's time and text.
fn parts(line: &[u8]) -> (&[u8], &[u8]) {
    let at = line.iter().position(|byte| *byte == b' ');
    at.map_or((&[], line), |at| (&line[..at], &line[at + 1..]))
}

/// What a stamped file holds, without the times.
pub(crate) fn plain_text(path: &Path) -> Vec<u8> {
    let text = read_from(path, 0);
    let lines = text.split_inclusive(|byte| *byte == b'\n');
    lines.flat_map(|line| parts(line).1).copied().collect()
}

/// The form in which a log is asked for.
#[derive(Debug)]
struct Form {
    timestamps: bool,
    since: Option<Timestamp>,
    /// Of what is there when the log is first looked at.
    lines: Option<usize>,
    /// Bytes still to be shown.
    left: Option<usize>,
}

impl Form {
    fn of(query: &Query) -> Result<Self, ApiError> {
        let number = |key| -> Result<Option<usize>, ApiError> {
            let number = query.number(key)?;
            Ok(number.and_then(|number| usize::try_from(number).ok()))
        };
        let since = match query.get("sinceTime") {
            "" => None,
            time => Some(time.parse::<Timestamp>().map_err(|_| {
                ApiError::bad_request(format!("invalid value for `sinceTime`: \"{time}\""))
            })?),
        };
        Ok(Self {
            timestamps: query.flag("timestamps"),
            // Servers know whole seconds only.
            since: since.and_then(|since| Timestamp::from_second(since.as_second()).ok()),
            lines: number("tailLines")?,
            left: number("limitBytes")?,
        })
    }

    fn is_old(&self, stamp: &[u8]) -> bool {
        let at = std::str::from_utf8(stamp).ok();
        let at = at.and_then(|at| at.parse::<Timestamp>().ok());
        at.is_some_and(|at| self.since.is_some_and(|since| at < since))
    }

    /// What of these stamped lines is to be shown.
    fn shown(&mut self, text: &[u8]) -> Vec<u8> {
        let text = self.lines.take().map_or(text, |lines| tail(text, lines));
        let mut shown = Vec::new();
        for line in text.split_inclusive(|byte| *byte == b'\n') {
            let (stamp, rest) = parts(line);
            if !self.is_old(stamp) {
                shown.extend_from_slice(if self.timestamps { line } else { rest });
            }
        }
        if let Some(left) = &mut self.left {
            shown.truncate(*left);
            *left -= shown.len();
        }
        shown
    }
}

fn read_from(path: &Path, offset: u64) -> Vec<u8> {
    let mut text = Vec::new();
    if let Ok(mut file) = std::fs::File::open(path)
        && file.seek(SeekFrom::Start(offset)).is_ok()
    {
        // What cannot be read is not there yet.
        let _ = file.read_to_end(&mut text);
    }
    text
}

/// Answers `pods/log`.
pub(crate) fn answer(
    logs: &Arc<Logs>,
    query: &Query,
    pod: &Value,
) -> Result<Response<Body>, ApiError> {
    let container = container_of(query, pod)?;
    let uid = pod["metadata"]["uid"].as_str().unwrap_or("").to_owned();
    if logs.find(&uid, &container).is_none() {
        return Err(ApiError::bad_request(format!(
            "container \"{container}\" in pod \"{}\" is waiting to start: {}",
            pod["metadata"]["name"].as_str().unwrap_or(""),
            waiting_reason(pod, &container)
        )));
    }
    let follow = query.flag("follow");
    let form = Form::of(query)?;
    let start = (Arc::clone(logs), 0_u64, form, false);
    let chunks = stream::unfold(start, move |(logs, mut offset, mut form, done)| {
        let (uid, container) = (uid.clone(), container.clone());
        async move {
            if done {
                return None;
            }
            loop {
                let log = logs.find(&uid, &container)?;
                let mut text = read_from(&log.path, offset);
                if !log.complete {
                    text.truncate(whole_lines(&text));
                }
                offset += text.len() as u64;
                let shown = form.shown(&text);
                let done = !follow || log.complete || form.left == Some(0);
                if !shown.is_empty() || done {
                    let chunk = Bytes::from(shown);
                    return Some((Ok::<_, Infallible>(chunk), (logs, offset, form, done)));
                }
                tokio::time::sleep(POLL).await;
            }
        }
    });
    let mut response = Response::new(Body::from_stream(chunks));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("text/plain"),
    );
    Ok(response)
}

#[cfg(test)]
mod tests {
    use super::{Form, Query, stamp, tail};

    fn shown(query: &str, text: &[u8]) -> String {
        let shown = Form::of(&Query::parse(query)).unwrap().shown(text);
        String::from_utf8(shown).unwrap()
    }

    #[test]
    fn the_tail_is_whole_lines() {
        assert_eq!(tail(b"a\nb\nc\n", 2), b"b\nc\n");
        assert_eq!(tail(b"a\nb\nc\n", 9), b"a\nb\nc\n");
        assert_eq!(tail(b"a\nb", 1), b"b");
        assert_eq!(tail(b"a\n", 0), b"");
    }

    #[test]
    fn a_line_is_shown_with_its_time_or_without_and_from_a_time_on() {
        let text = b"2026-01-01T00:00:01.900000000Z one\n2026-01-01T00:00:02.100000000Z two";
        assert_eq!(shown("", text), "one\ntwo");
        let stamped = shown("timestamps=true&tailLines=1", text);
        assert_eq!(stamped, "2026-01-01T00:00:02.100000000Z two");
        // Rounded down to its second.
        assert_eq!(shown("sinceTime=2026-01-01T00:00:02.5Z", text), "two");
        assert_eq!(shown("limitBytes=2", text), "on");
        assert!(Form::of(&Query::parse("sinceTime=soon")).is_err());
    }

    #[test]
    fn every_line_is_stamped_even_the_last_one_that_does_not_end() {
        let mut stamped = Vec::new();
        stamp(&b"a b\n\nc"[..], &mut stamped).unwrap();
        assert_eq!(shown("", &stamped), "a b\n\nc");
        assert!(shown("sinceTime=2999-01-01T00:00:00Z", &stamped).is_empty());
    }
}
