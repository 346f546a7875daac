//! Azure Key Vault with the token services of its cloud, as their references describe them. Unknown paths, tokens and methods are
//! refused.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;

use serde_json::json;

use crate::google_secrets::{document, form};
use crate::http::{Request, Response, Server};

/// The tenant, the client and its secret.
pub const TENANT: &str = "11111111-2222-3333-4444-555555555555";
/// See [`TENANT`].
pub const CLIENT: &str = "66666666-7777-8888-9999-000000000000";
/// See [`TENANT`].
pub const CLIENT_SECRET: &str = "secret~of+the&client=1";
/// The token of a federated client.
pub const ASSERTION: &str = "header.assertion-of-the-pod.signature";
/// The hosts that lead here.
pub const HOSTS: [&str; 2] = ["vault-1.vault.azure.net", "login.microsoftonline.com"];

const SCOPE: &str = "https://vault.azure.net/.default";

/// A running service.
#[derive(Debug)]
pub struct KeyVault {
    server: Server,
}

impl KeyVault {
    /// Starts a service with these secrets, by `NAME` or `NAME/VERSION`.
    ///
    /// # Errors
    /// Fails when no port can be had.
    pub fn start(secrets: &[(&str, &str)]) -> io::Result<Self> {
        let secrets: BTreeMap<String, String> = secrets
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        let server = Server::start(move |request| answer(request, &secrets))?;
        Ok(Self { server })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<Request> {
        self.server.requests()
    }
}

fn answer(request: &Request, secrets: &BTreeMap<String, String>) -> Response {
    let host = request.header("host").unwrap_or_default();
    let token = |text: &str| {
        document(
            200,
            &json!({ "access_token": text, "expires_in": 3599, "token_type": "Bearer" }),
        )
    };
    let tokens = format!("/{TENANT}/oauth2/v2.0/token");
    match (request.method.as_str(), host, request.path.as_str()) {
        ("POST", "login.microsoftonline.com", path) if path == tokens => {
            let form = form(&request.body);
            let field = |name: &str| form.get(name).map(String::as_str).unwrap_or_default();
            let is_client = field("grant_type") == "client_credentials"
                && field("client_id") == CLIENT
                && field("scope") == SCOPE;
            let is_federated = field("client_assertion") == ASSERTION
                && field("client_assertion_type")
                    == "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
            if is_client && (field("client_secret") == CLIENT_SECRET || is_federated) {
                return token("token-of-the-client");
            }
            let text = "AADSTS7000215: Invalid client secret provided: canary-in-a-message";
            document(
                401,
                &json!({ "error": "invalid_client", "error_description": text }),
            )
        }
        ("GET", _, "/metadata/identity/oauth2/token") => {
            let is_query = request
                .query
                .contains("resource=https%3A%2F%2Fvault.azure.net")
                && request.query.contains("api-version=2018-02-01");
            if request.header("metadata") != Some("true") || !is_query {
                return Response::new(400, "");
            }
            // This service has numbers as texts.
            document(
                200,
                &json!({ "access_token": "token-of-the-node", "expires_in": "3599" }),
            )
        }
        ("GET", "vault-1.vault.azure.net", path) => {
            let bearer = request.header("authorization").unwrap_or_default();
            if !["Bearer token-of-the-client", "Bearer token-of-the-node"].contains(&bearer) {
                let challenge = "Bearer authorization=\"https://login.microsoftonline.com/t\", resource=\"https://vault.azure.net\"";
                return Response::new(401, "").with_header("WWW-Authenticate", challenge);
            }
            if request.query != "api-version=2025-07-01" {
                return Response::new(400, "");
            }
            let name = path.strip_prefix("/secrets/").unwrap_or_default();
            let error = |status, code: &str| {
                let error = json!({ "code": "Forbidden", "message": "canary-in-a-message", "innererror": { "code": code } });
                document(status, &json!({ "error": error }))
            };
            match (name, secrets.get(name)) {
                ("forbidden", _) => error(403, "ForbiddenByPolicy"),
                ("disabled", _) => error(403, "SecretDisabled"),
                (_, Some(value)) => document(
                    200,
                    &json!({ "value": value, "id": name, "attributes": { "enabled": true } }),
                ),
                (_, None) => document(
                    404,
                    &json!({ "error": { "code": "SecretNotFound", "message": "" } }),
                ),
            }
        }
        _ => Response::new(404, ""),
    }
}
