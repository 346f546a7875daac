//! `pods/log`: what containers wrote, from the files the pod runner fills.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Response, header};
use futures_util::stream;
use serde_json::Value;

use crate::api_server::request::Query;
use crate::api_server::status::ApiError;
use crate::api_server::validation::items;

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

    fn find(&self, uid: &str, container: &str) -> Option<LogFile> {
        let all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(&(uid.to_owned(), container.to_owned())).cloned()
    }
}

fn container_of(query: &Query, pod: &Value) -> Result<String, ApiError> {
    let names: Vec<&str> = ["containers", "initContainers"]
        .iter()
        .flat_map(|list| items(&pod["spec"][*list]))
        .filter_map(|container| container["name"].as_str())
        .collect();
    let pod = pod["metadata"]["name"].as_str().unwrap_or("");
    match (query.get("container"), names.as_slice()) {
        ("", [only]) => Ok((*only).to_owned()),
        ("", names) => Err(ApiError::bad_request(format!(
            "a container name must be specified for pod {pod}, choose one of: {names:?}"
        ))),
        (wanted, names) if names.contains(&wanted) => Ok(wanted.to_owned()),
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
    let lines = query
        .number("tailLines")?
        .and_then(|lines| usize::try_from(lines).ok());
    let limit = query
        .number("limitBytes")?
        .and_then(|bytes| usize::try_from(bytes).ok());
    let start = (Arc::clone(logs), 0_u64, lines, false);
    let chunks = stream::unfold(start, move |(logs, mut offset, mut lines, done)| {
        let (uid, container) = (uid.clone(), container.clone());
        async move {
            if done {
                return None;
            }
            loop {
                let log = logs.find(&uid, &container)?;
                let text = read_from(&log.path, offset);
                offset += text.len() as u64;
                let shown = lines
                    .take()
                    .map_or(text.as_slice(), |lines| tail(&text, lines));
                let shown = &shown[..shown.len().min(limit.unwrap_or(usize::MAX))];
                let done = !follow || log.complete;
                if !shown.is_empty() || done {
                    let chunk = Bytes::copy_from_slice(shown);
                    return Some((Ok::<_, Infallible>(chunk), (logs, offset, None, done)));
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
    use super::tail;

    #[test]
    fn the_tail_is_whole_lines() {
        assert_eq!(tail(b"a\nb\nc\n", 2), b"b\nc\n");
        assert_eq!(tail(b"a\nb\nc\n", 9), b"a\nb\nc\n");
        assert_eq!(tail(b"a\nb", 1), b"b");
        assert_eq!(tail(b"a\n", 0), b"");
    }
}
