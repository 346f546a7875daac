//! Vault's login by AWS, before a real `OpenBao` whose package lacks the plugin for it. It checks a signed request as the plugin
//! does, and moto's token service answers it. All other requests go to `OpenBao`.

use std::io;
use std::net::SocketAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::http::{Request, Response, Server, pass_on};
use crate::openbao::OpenBao;

/// The name of the only role.
pub const ROLE: &str = "runs";
/// What the header `X-Vault-AWS-IAM-Server-ID` must have.
pub const SERVER_ID: &str = "vault.example.test";
const LOGIN: &str = "/v1/auth/aws/login";
/// What the plugin lets through to AWS, beside the headers of signatures.
const HEADERS: [&str; 9] = [
    "authorization",
    "content-type",
    "content-length",
    "host",
    "user-agent",
    "x-amz-date",
    "x-amz-security-token",
    "x-amz-content-sha256",
    "x-vault-aws-iam-server-id",
];

/// Starts the login. Users of AWS whose ARN is `principal` get tokens with a policy.
///
/// # Errors
/// Fails when there is no port.
pub fn start(bao: &OpenBao, aws: SocketAddr, principal: &str, policy: &str) -> io::Result<Server> {
    let (server, root) = (bao.address(), bao.root_token());
    let (principal, policy) = (principal.to_owned(), policy.to_owned());
    Server::start(move |request| {
        if request.path != LOGIN {
            return pass_on(request, server, "vault").unwrap_or_else(|_| refusal("no OpenBao"));
        }
        match caller(request, aws) {
            Ok(arn) if arn == principal => {
                let document =
                    json!({ "policies": [policy], "display_name": "aws", "no_parent": true });
                let mut create = Request {
                    method: "POST".to_owned(),
                    path: "/v1/auth/token/create".to_owned(),
                    body: document.to_string().into_bytes(),
                    ..Request::default()
                };
                create.headers = vec![("x-vault-token".to_owned(), root.to_owned())];
                pass_on(&create, server, "vault").unwrap_or_else(|_| refusal("no OpenBao"))
            }
            Ok(_) => refusal("the principal is not bound to the role"),
            Err(reason) => refusal(&reason),
        }
    })
}

fn refusal(reason: &str) -> Response {
    Response::new(400, json!({ "errors": [reason] }).to_string())
}

/// Whose request it is, as AWS says.
fn caller(request: &Request, aws: SocketAddr) -> Result<String, String> {
    let document: Value = serde_json::from_slice(&request.body).map_err(|_| "no document")?;
    let text = |name: &str| document[name].as_str().unwrap_or_default().to_owned();
    let decoded = |name: &str| {
        let bytes = STANDARD.decode(text(name)).map_err(|_| "no base64")?;
        String::from_utf8(bytes).map_err(|_| "no text")
    };
    let body = decoded("iam_request_body")?;
    let url = decoded("iam_request_url")?;
    if (&*text("role"), &*text("iam_http_request_method")) != (ROLE, "POST") {
        return Err("no such role or method".to_owned());
    }
    if url != "https://sts.amazonaws.com/" || body != "Action=GetCallerIdentity&Version=2011-06-15"
    {
        return Err("it is no request for the identity of the caller".to_owned());
    }
    let headers: Value =
        serde_json::from_str(&decoded("iam_request_headers")?).map_err(|_| "no headers")?;
    let mut signed = Request {
        method: "POST".to_owned(),
        path: "/".to_owned(),
        body: body.into_bytes(),
        ..Request::default()
    };
    for (name, values) in headers.as_object().ok_or("no headers")? {
        let name = name.to_ascii_lowercase();
        let [Value::String(value)] = values.as_array().map_or(&[][..], Vec::as_slice) else {
            return Err(format!("the header {name} has not one value"));
        };
        if !HEADERS.contains(&&*name) {
            return Err(format!("the header {name} is not allowed"));
        }
        signed.headers.push((name, value.clone()));
    }
    let authorization = signed.header("authorization").unwrap_or_default();
    let covered = authorization
        .split_once("SignedHeaders=")
        .and_then(|(_, rest)| rest.split(',').next())
        .unwrap_or_default();
    let is_covered = covered
        .split(';')
        .any(|name| name == "x-vault-aws-iam-server-id");
    if signed.header("x-vault-aws-iam-server-id") != Some(SERVER_ID) || !is_covered {
        return Err("the id of the server is not that of this one, or not signed".to_owned());
    }
    let answer = pass_on(&signed, aws, "sts.amazonaws.com").map_err(|error| error.to_string())?;
    let text = String::from_utf8_lossy(&answer.body);
    let arn = text
        .split_once("<Arn>")
        .and_then(|(_, rest)| rest.split_once("</Arn>"));
    match arn {
        Some((arn, _)) if answer.status == 200 => Ok(arn.to_owned()),
        _ => Err(format!("AWS answers {}: {text}", answer.status)),
    }
}
