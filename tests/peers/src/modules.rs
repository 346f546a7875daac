//! The platform's registry of modules, over TLS, as Terrakube's program answers: it takes tokens of the platform for everything but
//! the archive of a module, names an address of its own for that, and does not send a client elsewhere. Others do: a second kind leads
//! to git.
//!
//! Known differences: there is one module, and it is not fetched from git. It has no providers.

use std::io::{self, Cursor, Write as _};

use serde_json::json;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::http::{Request, Response, Server};

/// The module's name, provider and version.
pub const MODULE: [&str; 3] = ["net", "test", "1.0.0"];

/// A running registry.
#[derive(Debug)]
pub struct ModuleRegistry(Server);

impl ModuleRegistry {
    /// Starts a registry with one module of an organization. `main` is what it says, and `accepts` checks the header of a token.
    pub fn start(
        organization: &str,
        main: &str,
        accepts: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let archive = zipped(main)?;
        let organization = organization.to_owned();
        let server =
            Server::start_tls(move |request| answer(request, &organization, &archive, &accepts))?;
        Ok(Self(server))
    }

    /// Starts a registry that leads to `address`, as one does whose modules are in git. The same address has the module
    /// `https://HOST/plain`, which is in no registry. It takes no token.
    pub fn leading_to(address: &str) -> io::Result<Self> {
        let address = address.to_owned();
        let server = Server::start_tls(move |request| lead(request, &address))?;
        Ok(Self(server))
    }

    /// Address and port, as an address of a module names them. A name needs a dot.
    pub fn host(&self) -> String {
        self.0.host()
    }

    /// The certificate that a client has to trust, in PEM.
    pub fn certificate(&self) -> &str {
        self.0.certificate().unwrap_or_default()
    }

    /// The paths that it was asked for.
    pub fn asked(&self) -> Vec<String> {
        let requests = self.0.requests();
        requests.into_iter().map(|request| request.path).collect()
    }
}

fn answer(
    request: &Request,
    organization: &str,
    archive: &[u8],
    accepts: &dyn Fn(&str) -> bool,
) -> Response {
    let path: Vec<&str> = request.path.split('/').skip(1).collect();
    let ["terraform", "modules", "v1", rest @ ..] = &path[..] else {
        return Response::new(404, "no such path");
    };
    let [name, provider, version] = MODULE;
    if *rest
        == [
            "download",
            organization,
            name,
            provider,
            version,
            "module.zip",
        ]
    {
        return Response::new(200, archive).with_header("Content-Type", "application/octet-stream");
    }
    if !request.header("authorization").is_some_and(accepts) {
        return Response::new(401, "");
    }
    match rest {
        [o, n, p, "versions"] if [*o, *n, *p] == [organization, name, provider] => {
            let document = json!({"modules": [{"versions": [{"version": version}]}]});
            let response = Response::new(200, document.to_string());
            response.with_header("Content-Type", "application/json")
        }
        [o, n, p, v, "download"] if [*o, *n, *p, *v] == [organization, name, provider, version] => {
            let host = request.header("host").unwrap_or_default();
            let archive = format!(
                "https://{host}/terraform/modules/v1/download/{organization}/{name}/{provider}/{version}/module.zip"
            );
            Response::new(204, "").with_header("X-Terraform-Get", &archive)
        }
        _ => Response::new(404, "no such module"),
    }
}

fn lead(request: &Request, address: &str) -> Response {
    let [name, provider, version] = MODULE;
    let json = |document: serde_json::Value| {
        let response = Response::new(200, document.to_string());
        response.with_header("Content-Type", "application/json")
    };
    let path: Vec<&str> = request.path.split('/').skip(1).collect();
    match &path[..] {
        [".well-known", "terraform.json"] => json(json!({"modules.v1": "/v1/"})),
        ["v1", _, n, p, "versions"] if [*n, *p] == [name, provider] => {
            json(json!({"modules": [{"versions": [{"version": version}]}]}))
        }
        ["v1", _, n, p, v, "download"] if [*n, *p, *v] == [name, provider, version] => {
            Response::new(204, "").with_header("X-Terraform-Get", address)
        }
        ["plain"] => Response::new(200, "").with_header("X-Terraform-Get", address),
        _ => Response::new(404, "no such module"),
    }
}

fn zipped(main: &str) -> io::Result<Vec<u8>> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    zip.start_file("main.tf", SimpleFileOptions::default())
        .map_err(io::Error::other)?;
    zip.write_all(main.as_bytes())?;
    Ok(zip.finish().map_err(io::Error::other)?.into_inner())
}
