//! Calls to a Terrakube: its JSON:API, and the plain endpoints for outputs, states, contexts and uploads. The token is
//! sent to the address of `--api` alone, whatever addresses the answers hold.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::redirect::Policy;
use reqwest::{Client, Method};
use serde_json::{Value, json};

const JSON_API: &str = "application/vnd.api+json";
/// The platform may hold an answer until an executor took a dispatch, for a minute at most.
const CALL_TIMEOUT: Duration = Duration::from_secs(90);

#[derive(Debug)]
pub(crate) struct Api {
    http: Client,
    base: String,
}

impl Api {
    pub(crate) fn new(base: &str, token: &str) -> Result<Self> {
        let mut bearer = HeaderValue::from_str(&format!("Bearer {token}"))
            .ok()
            .context("the token holds characters that no token has; is it the right file?")?;
        bearer.set_sensitive(true);
        let headers = HeaderMap::from_iter([(reqwest::header::AUTHORIZATION, bearer)]);
        let http = Client::builder()
            .default_headers(headers)
            .redirect(Policy::none())
            .timeout(CALL_TIMEOUT)
            .build()?;
        let base = base.trim_end_matches('/').to_owned();
        Ok(Self { http, base })
    }

    /// What lies at a path, as it is.
    pub(crate) async fn bytes(&self, path: &str) -> Result<Vec<u8>> {
        self.call(Method::GET, path, None).await
    }

    pub(crate) async fn get(&self, path: &str) -> Result<Value> {
        let body = self.bytes(path).await?;
        serde_json::from_slice(&body).with_context(|| format!("GET {path}: not JSON"))
    }

    pub(crate) async fn upload(&self, path: &str, content: Vec<u8>) -> Result<()> {
        let body = (content, "application/octet-stream");
        self.call(Method::PUT, path, Some(body)).await.map(drop)
    }

    pub(crate) async fn post(&self, path: &str, document: &Value) -> Result<Value> {
        let body = (document.to_string().into_bytes(), JSON_API);
        let answer = self.call(Method::POST, path, Some(body)).await?;
        serde_json::from_slice(&answer).with_context(|| format!("POST {path}: not JSON"))
    }

    /// Makes a record of the JSON:API, and gives its id.
    pub(crate) async fn create(&self, path: &str, kind: &str, attributes: Value) -> Result<String> {
        let document = json!({"data": {"type": kind, "attributes": attributes}});
        id_of(&self.post(path, &document).await?)
    }

    /// Changes attributes of a record of the JSON:API.
    pub(crate) async fn change(&self, path: &str, kind: &str, attributes: Value) -> Result<()> {
        let id = path.rsplit('/').next().unwrap_or_default();
        let document = json!({"data": {"type": kind, "id": id, "attributes": attributes}});
        let body = (document.to_string().into_bytes(), JSON_API);
        self.call(Method::PATCH, path, Some(body)).await.map(drop)
    }

    pub(crate) async fn remove(&self, path: &str) -> Result<()> {
        self.call(Method::DELETE, path, None).await.map(drop)
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<(Vec<u8>, &'static str)>,
    ) -> Result<Vec<u8>> {
        let name = format!("{method} {path}");
        let mut request = self.http.request(method, format!("{}{path}", self.base));
        if let Some((body, media_type)) = body {
            request = request.header(CONTENT_TYPE, media_type).body(body);
        }
        let answer = request.send().await.with_context(|| name.clone())?;
        let status = answer.status();
        let body = answer.bytes().await.with_context(|| name.clone())?;
        if !status.is_success() {
            let hint = match status.as_u16() {
                401 => "; the token is wrong or has expired",
                403 => "; the token's team lacks this right",
                _ => "",
            };
            bail!("{name}: {status}: {}{hint}", explanation(&body));
        }
        Ok(body.into())
    }
}

/// Id of the record in an answer.
pub(crate) fn id_of(answer: &Value) -> Result<String> {
    let id = answer["data"]["id"].as_str();
    Ok(id.context("an answer without an id")?.to_owned())
}

/// The records in an answer.
pub(crate) fn records(answer: &Value) -> &[Value] {
    answer["data"].as_array().map_or(&[], Vec::as_slice)
}

/// What an answer says of a refusal, shortly.
fn explanation(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let parsed: Value = serde_json::from_slice(body).unwrap_or_default();
    let detail = parsed["errors"][0]["detail"].as_str();
    let said = detail.or(parsed["message"].as_str()).unwrap_or(&text);
    said.chars().take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_the_platforms_message() {
        let body = br#"{"errors":[{"detail":"CreatePermission Denied"}]}"#;
        assert_eq!(explanation(body), "CreatePermission Denied");
        assert_eq!(explanation(b"<html>no</html>"), "<html>no</html>");
        assert_eq!(explanation(&[b'x'; 1000]).len(), 300);
    }
}
