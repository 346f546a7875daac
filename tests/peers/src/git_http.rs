//! Real git over HTTP: `git http-backend` behind the small HTTP server, with or without TLS and basic
//! authentication.

use std::io::{self, Write as _};
use std::net::IpAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use super::http::{Request, Response, Server};

/// What the server demands and allows.
#[derive(Clone, Debug, Default)]
pub struct GitHttpOptions {
    /// `user:password` every request must bring.
    pub credentials: Option<String>,
    /// The token of the header that every request must bring.
    pub bearer: Option<String>,
    /// Protocol version 0, in which only advertised commits are given out.
    pub old_protocol: bool,
    /// Speaks TLS.
    pub tls: bool,
    /// Listens there, without TLS, and not on this machine alone.
    pub address: Option<IpAddr>,
}

/// Serves every repository below a folder.
///
/// # Errors
/// Fails when no port can be listened on.
pub fn serve(repositories: &Path, options: GitHttpOptions) -> io::Result<Server> {
    let (tls, address) = (options.tls, options.address);
    let repositories = repositories.to_path_buf();
    let handler = move |request: &Request| answer(&repositories, &options, request);
    match address {
        Some(address) => Server::start_at((address, 0).into(), handler),
        None if tls => Server::start_tls(handler),
        None => Server::start(handler),
    }
}

/// Answers one request, as [`serve`] does.
pub fn answer(repositories: &Path, options: &GitHttpOptions, request: &Request) -> Response {
    if let Some(wanted) = &options.credentials
        && request.basic_auth().as_ref() != Some(wanted)
    {
        return Response::new(401, "who are you?")
            .with_header("WWW-Authenticate", "Basic realm=\"git\"");
    }
    if let Some(wanted) = &options.bearer
        && request.header("authorization") != Some(&format!("Bearer {wanted}"))
    {
        return Response::new(401, "who are you?");
    }
    http_backend(repositories, options, request)
        .unwrap_or_else(|error| Response::new(500, error.to_string()))
}

/// One CGI call.
fn http_backend(
    repositories: &Path,
    options: &GitHttpOptions,
    request: &Request,
) -> io::Result<Response> {
    let mut backend = Command::new("git");
    backend
        .arg("http-backend")
        .env("GIT_PROJECT_ROOT", repositories)
        .env("GIT_HTTP_EXPORT_ALL", "1")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("REQUEST_METHOD", &request.method)
        .env("PATH_INFO", &request.path)
        .env("QUERY_STRING", &request.query)
        .env("CONTENT_LENGTH", request.body.len().to_string())
        .env("REMOTE_ADDR", "127.0.0.1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    for (header, variable) in [
        ("content-type", "CONTENT_TYPE"),
        ("content-encoding", "HTTP_CONTENT_ENCODING"),
        ("accept", "HTTP_ACCEPT"),
    ] {
        if let Some(value) = request.header(header) {
            backend.env(variable, value);
        }
    }
    if let Some(version) = request.header("git-protocol")
        && !options.old_protocol
    {
        backend.env("HTTP_GIT_PROTOCOL", version);
    }
    let mut backend = backend.spawn()?;
    if let Some(mut stdin) = backend.stdin.take() {
        stdin.write_all(&request.body)?;
    }
    parse_cgi(&backend.wait_with_output()?.stdout)
}

fn parse_cgi(output: &[u8]) -> io::Result<Response> {
    const BLANK_LINE: &[u8] = b"\r\n\r\n";
    let end = output
        .windows(BLANK_LINE.len())
        .position(|window| window == BLANK_LINE)
        .ok_or_else(|| io::Error::other("git http-backend sent no header"))?;
    let mut response = Response::new(200, &output[end + BLANK_LINE.len()..]);
    for line in String::from_utf8_lossy(&output[..end]).lines() {
        match line.split_once(':') {
            Some(("Status", status)) => {
                let code = status.trim().split(' ').next().unwrap_or_default();
                response.status = code.parse().map_err(io::Error::other)?;
            }
            Some((name, value)) => response
                .headers
                .push((name.to_owned(), value.trim().to_owned())),
            None => {}
        }
    }
    Ok(response)
}
