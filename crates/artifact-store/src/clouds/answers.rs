//! Tells the answers of a service from those of something in front of it, such as a proxy. Only the service itself knows that an
//! object is missing or empty, so nothing else may say it.

use object_store::HeaderMap;
use object_store::client::{HttpError, HttpErrorKind, HttpRequest, HttpResponse};
use reqwest::{Method, StatusCode};
use serde_json::Value;
use url::Url;

use crate::error::element;

/// What the services call missing.
const MISSING_CODES: &[&str] = &[
    "NoSuchKey",
    "NoSuchBucket",
    "NoSuchUpload",
    "NoSuchVersion",
    "BlobNotFound",
    "ContainerNotFound",
    "ResourceNotFound",
];
/// The entity tag of an empty object: the MD5 of nothing.
const EMPTY_TAG: &str = "d41d8cd98f00b204e9800998ecf8427e";

/// How the answers of a service are recognized.
#[derive(Clone, Debug)]
pub(crate) struct Signs {
    /// Host and port. Other hosts give credentials, and their answers are not looked at.
    authority: String,
    /// The names of the service's own headers begin with it.
    prefix: &'static str,
    /// Every answer of the service has such a header. Some services that are compatible with S3 leave them out.
    has_always: bool,
}

impl Signs {
    pub(crate) fn of_s3(endpoint: &Url) -> Self {
        Self::new(endpoint, "x-amz-", false)
    }

    pub(crate) fn of_gcs(endpoint: &Url) -> Self {
        Self::new(endpoint, "x-goog-", false)
    }

    pub(crate) fn of_azure(endpoint: &Url) -> Self {
        Self::new(endpoint, "x-ms-", true)
    }

    fn new(endpoint: &Url, prefix: &'static str, has_always: bool) -> Self {
        Self {
            authority: endpoint.authority().to_owned(),
            prefix,
            has_always,
        }
    }

    /// Whether a request is for the service.
    pub(crate) fn are_of(&self, request: &HttpRequest) -> bool {
        let authority = request.uri().authority();
        authority.is_some_and(|authority| authority.as_str() == self.authority)
    }

    /// Returns an answer of the service. Another one is an error, as if there was no answer.
    pub(crate) async fn own(
        &self,
        method: &Method,
        answer: HttpResponse,
    ) -> Result<HttpResponse, HttpError> {
        let status = answer.status();
        if status.is_success() && !self.is_success(method, status, answer.headers()) {
            return Err(foreign(status));
        }
        if status != StatusCode::NOT_FOUND {
            return Ok(answer);
        }
        let (head, body) = answer.into_parts();
        let body = body.bytes().await?;
        if !self.is_missing(method, &head.headers, &body) {
            return Err(foreign(status));
        }
        Ok(HttpResponse::from_parts(head, body.into()))
    }

    /// Whether the service says that something is missing.
    fn is_missing(&self, method: &Method, headers: &HeaderMap, body: &[u8]) -> bool {
        let text = std::str::from_utf8(body).unwrap_or_default();
        let code = header(headers, "x-ms-error-code").or_else(|| element(text, "Code"));
        match code {
            Some(code) => MISSING_CODES.contains(&code),
            // Its answer has no body.
            None if *method == Method::HEAD => self.is_signed(headers),
            None => is_not_found(text),
        }
    }

    /// Whether the service says that it did what it was asked for.
    fn is_success(&self, method: &Method, status: StatusCode, headers: &HeaderMap) -> bool {
        let is_read = *method == Method::GET;
        if is_read && !matches!(status.as_u16(), 200 | 206) {
            return false;
        }
        if self.is_signed(headers) {
            return true;
        }
        let tag = header(headers, "etag").unwrap_or_default();
        let media_type = header(headers, "content-type").unwrap_or_default();
        let is_page = media_type.starts_with("text/html") && Self::may_be_page(method, status, tag);
        if self.has_always || *method == Method::HEAD || is_page {
            return false;
        }
        let is_empty = header(headers, "content-length") == Some("0");
        !is_read || !is_empty || tag.contains(EMPTY_TAG)
    }

    /// Whether an answer that calls itself a page may be one. Some services call all of their answers so.
    fn may_be_page(method: &Method, status: StatusCode, tag: &str) -> bool {
        // The client reads the document of an answer to `POST`.
        let is_of_service =
            *method == Method::POST || status == StatusCode::NO_CONTENT || !tag.is_empty();
        *method == Method::GET || !is_of_service
    }

    fn is_signed(&self, headers: &HeaderMap) -> bool {
        let mut names = headers.keys();
        names.any(|name| name.as_str().starts_with(self.prefix))
    }
}

fn header<'h>(headers: &'h HeaderMap, name: &'static str) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

/// Whether an answer in JSON says that an object or a bucket of Google Cloud Storage is missing.
fn is_not_found(text: &str) -> bool {
    let document: Value = serde_json::from_str(text).unwrap_or_default();
    let reason = document.pointer("/error/errors/0/reason");
    reason.and_then(Value::as_str) == Some("notFound")
}

/// An answer that something else than the service has given.
#[derive(Debug, thiserror::Error)]
#[error("status code: {0}, which is no answer of the service")]
pub(crate) struct Foreign(pub(crate) StatusCode);

fn foreign(status: StatusCode) -> HttpError {
    // Requests that may be repeated are. Whether the service has got this one is not known.
    HttpError::new(HttpErrorKind::Interrupted, Foreign(status))
}

#[cfg(test)]
mod tests {
    use object_store::HeaderValue;
    use rstest::rstest;

    use super::*;

    fn signs(prefix: &'static str) -> Signs {
        let endpoint = Url::parse("https://store.test").unwrap();
        Signs::new(&endpoint, prefix, prefix == "x-ms-")
    }

    fn headers(pairs: &[(&'static str, &'static str)]) -> HeaderMap {
        let pairs = pairs.iter();
        pairs
            .map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
            .collect()
    }

    const NO_KEY: &str = "<?xml version=\"1.0\"?><Error><Code>NoSuchKey</Code></Error>";
    const OTHER: &str = "<Error><Code>NoSuchConfiguration</Code></Error>";
    const PAGE: &str = "<html><body>default backend - 404</body></html>";
    const JSON: &str =
        r#"{"error":{"code":404,"errors":[{"domain":"global","reason":"notFound"}]}}"#;

    #[rstest]
    #[case::s3("x-amz-", "GET", &[], NO_KEY, true)]
    #[case::another_code("x-amz-", "GET", &[], OTHER, false)]
    #[case::page("x-amz-", "GET", &[("content-type", "text/html")], PAGE, false)]
    #[case::nothing("x-amz-", "GET", &[], "", false)]
    #[case::nothing_signed("x-amz-", "GET", &[("x-amz-request-id", "1")], "", false)]
    #[case::head("x-amz-", "HEAD", &[("x-amz-request-id", "1")], "", true)]
    #[case::head_of_a_proxy("x-amz-", "HEAD", &[("server", "nginx")], "", false)]
    #[case::json("x-goog-", "GET", &[], JSON, true)]
    #[case::other_json("x-goog-", "GET", &[], r#"{"error":"not found"}"#, false)]
    #[case::azure("x-ms-", "HEAD", &[("x-ms-error-code", "BlobNotFound")], "", true)]
    #[case::azure_without_a_code("x-ms-", "GET", &[("x-ms-request-id", "1")], "", false)]
    fn missing_is_what_the_service_calls_missing(
        #[case] prefix: &'static str,
        #[case] method: &str,
        #[case] pairs: &[(&'static str, &'static str)],
        #[case] body: &str,
        #[case] expected: bool,
    ) {
        let method = method.parse().unwrap();
        let found = signs(prefix).is_missing(&method, &headers(pairs), body.as_bytes());
        assert_eq!(found, expected);
    }

    #[rstest]
    #[case::content("x-amz-", "GET", 200, &[("content-length", "7"), ("etag", "\"e\"")], true)]
    #[case::no_content("x-amz-", "GET", 204, &[("x-amz-request-id", "1")], false)]
    #[case::empty("x-amz-", "GET", 200, &[("content-length", "0"), ("etag", "\"e\"")], false)]
    #[case::empty_object(
        "x-amz-", "GET", 200,
        &[("content-length", "0"), ("etag", "\"d41d8cd98f00b204e9800998ecf8427e\"")], true
    )]
    #[case::empty_and_signed(
        "x-goog-", "GET", 200, &[("content-length", "0"), ("x-goog-generation", "1")], true
    )]
    #[case::page("x-amz-", "GET", 200, &[("content-type", "text/html; charset=utf-8")], false)]
    #[case::stored("x-amz-", "PUT", 200, &[("content-length", "0")], true)]
    #[case::stored_by_a_page("x-amz-", "PUT", 200, &[("content-type", "text/html")], false)]
    #[case::stored_as_a_page(
        "x-amz-", "PUT", 200, &[("content-type", "text/html"), ("etag", "\"e\"")], true
    )]
    #[case::begun("x-amz-", "POST", 200, &[("content-type", "text/html")], true)]
    #[case::deleted("x-amz-", "DELETE", 204, &[("content-type", "text/html")], true)]
    #[case::deleted_by_a_page("x-goog-", "DELETE", 200, &[("content-type", "text/html")], false)]
    #[case::azure("x-ms-", "HEAD", 200, &[("x-ms-request-id", "1")], true)]
    #[case::azure_of_a_proxy("x-ms-", "HEAD", 200, &[("content-length", "0")], false)]
    fn success_is_what_only_the_service_can_say(
        #[case] prefix: &'static str,
        #[case] method: &str,
        #[case] status: u16,
        #[case] pairs: &[(&'static str, &'static str)],
        #[case] expected: bool,
    ) {
        let method = method.parse().unwrap();
        let status = StatusCode::from_u16(status).unwrap();
        let found = signs(prefix).is_success(&method, status, &headers(pairs));
        assert_eq!(found, expected);
    }
}
