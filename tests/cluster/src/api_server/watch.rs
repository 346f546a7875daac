//! Watches: a stream of changes after a version, as lines of JSON.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{Response, header};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::request::ApiRequest;
use super::selector::Selector;
use super::status::ApiError;
use super::storage::{Change, Store};
use super::view::View;

/// How often a watch that asked for bookmarks gets one.
const BOOKMARK_EVERY: Duration = Duration::from_secs(30);

struct Watcher {
    store: Arc<Store>,
    request: ApiRequest,
    selector: Selector,
    view: View,
    version: u64,
    ready: VecDeque<Bytes>,
    bookmarks: bool,
    next_bookmark: Instant,
    until: Option<Instant>,
    ended: bool,
    stop: CancellationToken,
}

/// Answers a watch.
pub(crate) fn watch(
    store: &Arc<Store>,
    request: ApiRequest,
    selector: Selector,
    view: View,
    stop: CancellationToken,
) -> Result<Response<Body>, ApiError> {
    let query = &request.query;
    let bookmarks = query.flag("allowWatchBookmarks");
    let initial = initial_events(&request)?;
    let asked = query.number("resourceVersion")?;
    let until = query
        .number("timeoutSeconds")?
        .map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let mut watcher = Watcher {
        store: Arc::clone(store),
        selector,
        view,
        version: asked.unwrap_or(0),
        ready: VecDeque::new(),
        bookmarks,
        next_bookmark: Instant::now() + BOOKMARK_EVERY,
        until,
        ended: false,
        stop,
        request,
    };
    if initial.unwrap_or(asked.is_none_or(|version| version == 0)) {
        watcher.snapshot(initial.is_some());
    } else if initial == Some(false) && asked.is_none_or(|version| version == 0) {
        watcher.version = store.version();
    } else if watcher.version > store.version() {
        return Err(ApiError::version_from_the_future(
            watcher.version,
            store.version(),
        ));
    }
    let lines = stream::unfold(watcher, |mut watcher| async move {
        watcher
            .line()
            .await
            .map(|line| (Ok::<_, Infallible>(line), watcher))
    });
    let mut response = Response::new(Body::from_stream(lines));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        header::HeaderValue::from_static("application/json"),
    );
    Ok(response)
}

/// What `sendInitialEvents` says, where the options fit together.
fn initial_events(request: &ApiRequest) -> Result<Option<bool>, ApiError> {
    let query = &request.query;
    let wanted = match query.get("sendInitialEvents") {
        "" => None,
        text => Some(matches!(text, "true" | "1")),
    };
    let matching = query.get("resourceVersionMatch");
    let mut errors = super::validation::Errors::default();
    if wanted.is_none() && !matching.is_empty() {
        errors.forbidden(
            "resourceVersionMatch",
            "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided",
        );
    }
    if wanted.is_some() && matching != "NotOlderThan" {
        errors.forbidden(
            "resourceVersionMatch",
            "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan",
        );
    }
    if errors.is_empty() {
        return Ok(wanted);
    }
    let mut error = ApiError::new(
        422,
        "Invalid",
        format!(
            "ListOptions.meta.k8s.io \"\" is invalid: {}",
            errors.sentence()
        ),
    );
    error.set_details(
        json!({"group": "meta.k8s.io", "kind": "ListOptions", "causes": errors.causes()}),
    );
    Err(error)
}

fn line(kind: &str, object: &Value) -> Bytes {
    let mut text = json!({"type": kind, "object": object}).to_string();
    text.push('\n');
    Bytes::from(text)
}

impl Watcher {
    fn wants(&self, object: &Value) -> bool {
        (self.request.name.is_empty() || object["metadata"]["name"] == self.request.name.as_str())
            && self.selector.matches(object)
    }

    fn shown(&self, object: &Value) -> Value {
        self.view
            .object(&super::convert::out(self.request.resource, object))
    }

    /// Everything there is, as if just added.
    fn snapshot(&mut self, marked: bool) {
        let bucket = self.request.resource.bucket();
        let (objects, version) = self.store.transaction(|state| {
            let objects: Vec<Arc<Value>> = state
                .range(bucket, &self.request.namespace)
                .map(|(_, object)| Arc::clone(object))
                .collect();
            (objects, state.version())
        });
        self.version = version;
        for object in objects {
            if self.wants_out(&object) {
                self.ready.push_back(line("ADDED", &self.shown(&object)));
            }
        }
        if marked && self.bookmarks {
            self.ready.push_back(self.bookmark(true));
        }
    }

    fn wants_out(&self, object: &Value) -> bool {
        self.wants(&super::convert::out(self.request.resource, object))
    }

    fn bookmark(&self, end_of_initial: bool) -> Bytes {
        let resource = self.request.resource;
        let mut object = json!({
            "kind": resource.kind, "apiVersion": resource.api_version(),
            "metadata": {"resourceVersion": self.version.to_string()},
        });
        if end_of_initial {
            object["metadata"]["annotations"] = json!({"k8s.io/initial-events-end": "true"});
        }
        line("BOOKMARK", &self.view.object(&object))
    }

    fn event(&self, change: &Change) -> Option<Bytes> {
        if !self.request.namespace.is_empty() && change.key.namespace != self.request.namespace {
            return None;
        }
        let was = change
            .old
            .as_deref()
            .is_some_and(|object| self.wants_out(object));
        let is = change
            .new
            .as_deref()
            .is_some_and(|object| self.wants_out(object));
        let (kind, object) = match (was, is) {
            (false, false) => return None,
            (false, true) => ("ADDED", change.new.as_deref()?),
            (true, true) => ("MODIFIED", change.new.as_deref()?),
            // The last form the watcher knew, at the version of its going.
            (true, false) => ("DELETED", change.old.as_deref()?),
        };
        let mut shown = self.shown(object);
        shown["metadata"]["resourceVersion"] = change.version.to_string().into();
        Some(line(kind, &shown))
    }

    fn advance(&mut self) {
        match self
            .store
            .changes_after(self.version, self.request.resource.bucket())
        {
            Ok((changes, version)) => {
                for change in &changes {
                    if let Some(event) = self.event(change) {
                        self.ready.push_back(event);
                    }
                }
                self.version = version;
            }
            Err(compacted) => {
                let error = ApiError::expired(format!(
                    "too old resource version: {} ({compacted})",
                    self.version
                ));
                self.ready.push_back(line("ERROR", &error.status()));
                self.ended = true;
            }
        }
    }

    async fn line(&mut self) -> Option<Bytes> {
        let mut head = self.store.follow();
        let stop = self.stop.clone();
        loop {
            if let Some(line) = self.ready.pop_front() {
                return Some(line);
            }
            if self.ended {
                return None;
            }
            head.mark_unchanged();
            self.advance();
            if !self.ready.is_empty() {
                continue;
            }
            let until = self
                .until
                .unwrap_or_else(|| Instant::now() + Duration::from_hours(24));
            tokio::select! {
                changed = head.changed() => if changed.is_err() { return None },
                () = tokio::time::sleep_until(self.next_bookmark), if self.bookmarks => {
                    self.next_bookmark = Instant::now() + BOOKMARK_EVERY;
                    return Some(self.bookmark(false));
                }
                () = tokio::time::sleep_until(until) => {
                    self.ended = true;
                    // The last word, so that a client that comes again starts late.
                    if self.bookmarks {
                        return Some(self.bookmark(false));
                    }
                }
                () = stop.cancelled() => return None,
            }
        }
    }
}
