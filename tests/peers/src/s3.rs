//! An S3 service: moto's server, with accounts and verified signatures. Its security token service and instance
//! metadata come with it.

use std::io;
use std::net::SocketAddr;

use crate::http::{Request, Response, Server, ask, pass_on};
use crate::moto::Moto;

/// A service with one bucket, and one user with all rights.
#[derive(Debug)]
pub struct S3 {
    address: SocketAddr,
    moto: Moto,
    tokens: Server,
    access_key: String,
    secret_key: String,
}

/// The bucket that is there.
pub const BUCKET: &str = "states";
/// Its region.
pub const REGION: &str = "eu-central-1";

impl S3 {
    /// Starts a service that refuses whatever is not signed with the user's keys.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        let server = Self::start_open()?;
        let (status, answer) = ask(
            server.address,
            "POST",
            "/moto-api/reset-auth",
            &[("Content-Type", "text/plain")],
            b"0",
        )?;
        expect(status == 200, &answer)?;
        Ok(server)
    }

    /// Starts a service that believes every signature, as its security token service needs it.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start_open() -> io::Result<Self> {
        let moto = Moto::start()?;
        let address = moto.address();
        iam(address, "Action=CreateUser&UserName=store")?;
        let key = iam(address, "Action=CreateAccessKey&UserName=store")?;
        iam(
            address,
            "Action=PutUserPolicy&UserName=store&PolicyName=all&PolicyDocument=\
             %7B%22Version%22%3A%222012-10-17%22%2C%22Statement%22%3A%5B%7B%22Effect%22%3A%22Allow\
             %22%2C%22Action%22%3A%22s3%3A%2A%22%2C%22Resource%22%3A%22%2A%22%7D%5D%7D",
        )?;
        let element = |name: &str| {
            let (_, rest) = key.split_once(&format!("<{name}>"))?;
            Some(rest.split_once('<')?.0.to_owned())
        };
        let absent = || io::Error::other(format!("no key in {key}"));
        let server = Self {
            address,
            moto,
            tokens: Server::start(move |request| {
                security_tokens(request, address)
                    .unwrap_or_else(|error| Response::new(502, error.to_string()))
            })?,
            access_key: element("AccessKeyId").ok_or_else(absent)?,
            secret_key: element("SecretAccessKey").ok_or_else(absent)?,
        };
        server.make_bucket(BUCKET)?;
        Ok(server)
    }

    fn make_bucket(&self, name: &str) -> io::Result<()> {
        let body = format!(
            "<CreateBucketConfiguration><LocationConstraint>{REGION}</LocationConstraint></CreateBucketConfiguration>"
        );
        let headers = [("Authorization", &*unsigned("s3"))];
        let path = format!("/{name}");
        let (status, answer) = ask(self.address, "PUT", &path, &headers, body.as_bytes())?;
        expect(status == 200, &answer)
    }

    /// Address of the service.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on the bucket keeps every version of an object.
    ///
    /// # Errors
    /// Fails when the service does not answer.
    pub fn keep_versions(&self) -> io::Result<()> {
        let body = "<VersioningConfiguration xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">\
                    <Status>Enabled</Status></VersioningConfiguration>";
        let path = format!("/{BUCKET}?versioning");
        let (status, answer) = self.ask("PUT", &path, body.as_bytes())?;
        expect(status == 200, &answer)
    }

    /// An object of the bucket, past all clients; only where signatures are believed.
    ///
    /// # Errors
    /// Fails when the service does not answer.
    pub fn object(&self, key: &str) -> io::Result<Option<String>> {
        object_at(self.address, key)
    }

    /// Stores an object, past all clients; only where signatures are believed.
    ///
    /// # Errors
    /// Fails when the service does not answer.
    pub fn put(&self, key: &str, content: &[u8]) -> io::Result<()> {
        let (status, answer) = self.ask("PUT", &format!("/{BUCKET}/{key}"), content)?;
        expect(status == 200, &answer)
    }

    /// Removes an object in the same way.
    ///
    /// # Errors
    /// Fails when the service does not answer.
    pub fn remove(&self, key: &str) -> io::Result<()> {
        let (status, answer) = self.ask("DELETE", &format!("/{BUCKET}/{key}"), b"")?;
        expect(status == 204, &answer)
    }

    /// Every version of an object, the oldest first, and how often it was deleted.
    ///
    /// # Errors
    /// Fails when the service does not answer.
    pub fn versions(&self, key: &str) -> io::Result<(Vec<String>, usize)> {
        let path = format!("/{BUCKET}?versions&prefix={key}");
        let (status, listing) = self.ask("GET", &path, b"")?;
        expect(status == 200, &listing)?;
        let mut versions = Vec::new();
        // They are listed with the newest first.
        for id in ids_of(&listing, "Version", key).into_iter().rev() {
            let path = format!("/{BUCKET}/{key}?versionId={id}");
            let (status, answer) = self.ask("GET", &path, b"")?;
            expect(status == 200, &answer)?;
            versions.push(answer);
        }
        Ok((versions, ids_of(&listing, "DeleteMarker", key).len()))
    }

    fn ask(&self, method: &str, target: &str, body: &[u8]) -> io::Result<(u16, String)> {
        let headers = [("Authorization", &*unsigned("s3"))];
        ask(self.address, method, target, &headers, body)
    }

    /// Where its security token service listens.
    pub fn security_tokens(&self) -> SocketAddr {
        self.tokens.address()
    }

    /// Key id of the user.
    pub fn access_key(&self) -> &str {
        &self.access_key
    }

    /// Secret of the user.
    pub fn secret_key(&self) -> &str {
        &self.secret_key
    }

    /// Everything in the bucket, by key. From here on every signature is believed.
    ///
    /// # Errors
    /// Fails when the service does not answer.
    pub fn objects(&self) -> io::Result<Vec<(String, Vec<u8>)>> {
        let headers = [("Content-Type", "text/plain")];
        let believing = b"1000000";
        let switch = "/moto-api/reset-auth";
        let (status, answer) = ask(self.address, "POST", switch, &headers, believing)?;
        expect(status == 200, &answer)?;
        let list = self.get(&format!("/{BUCKET}"), "list-type=2")?;
        let list = String::from_utf8_lossy(&list).into_owned();
        let keys = list.split("<Key>").skip(1);
        keys.filter_map(|rest| rest.split('<').next())
            .map(|key| Ok((key.to_owned(), self.get(&format!("/{BUCKET}/{key}"), "")?)))
            .collect()
    }

    fn get(&self, path: &str, query: &str) -> io::Result<Vec<u8>> {
        let request = Request {
            method: "GET".to_owned(),
            path: path.to_owned(),
            query: query.to_owned(),
            headers: vec![("Authorization".to_owned(), unsigned("s3"))],
            body: Vec::new(),
        };
        let answer = pass_on(&request, self.address, &self.address.to_string())?;
        expect(answer.status == 200, &String::from_utf8_lossy(&answer.body))?;
        Ok(answer.body)
    }

    /// One line for each request so far, and for what went wrong.
    pub fn log(&self) -> String {
        self.moto.log()
    }
}

/// An object of the bucket of the service at an address, where signatures are believed.
///
/// # Errors
/// Fails when the service does not answer.
pub fn object_at(address: SocketAddr, key: &str) -> io::Result<Option<String>> {
    let headers = [("Authorization", &*unsigned("s3"))];
    let (status, answer) = ask(address, "GET", &format!("/{BUCKET}/{key}"), &headers, b"")?;
    match status {
        404 => Ok(None),
        _ => expect(status == 200, &answer).map(|()| Some(answer)),
    }
}

/// The service reads region and service from the header even while it checks no signature.
fn unsigned(service: &str) -> String {
    format!(
        "AWS4-HMAC-SHA256 Credential=x/20260101/{REGION}/{service}/aws4_request, SignedHeaders=host, Signature=x"
    )
}

/// Versions of this key among the entries of a kind in a listing, in its order.
fn ids_of<'a>(listing: &'a str, kind: &str, key: &str) -> Vec<&'a str> {
    let text = |entry: &'a str, name: &str| {
        let (_, rest) = entry.split_once(&format!("<{name}>"))?;
        Some(rest.split_once('<')?.0)
    };
    let begin = format!("<{kind}>");
    listing
        .split(&begin)
        .skip(1)
        .filter(|entry| text(entry, "Key") == Some(key))
        .filter_map(|entry| text(entry, "VersionId"))
        .collect()
}

fn iam(address: SocketAddr, query: &str) -> io::Result<String> {
    let headers = [
        ("Authorization", &*unsigned("iam")),
        ("Content-Type", "application/x-www-form-urlencoded"),
    ];
    let body = format!("{query}&Version=2010-05-08");
    let (status, answer) = ask(address, "POST", "/", &headers, body.as_bytes())?;
    expect(status == 200, &answer)?;
    Ok(answer)
}

/// The service reads parameters from the body alone, where AWS reads them from the address too.
fn security_tokens(request: &Request, server: SocketAddr) -> io::Result<Response> {
    let host = format!("sts.{REGION}.amazonaws.com");
    if request.query.is_empty() {
        return pass_on(request, server, &host);
    }
    let form = ("content-type", "application/x-www-form-urlencoded");
    let moved = Request {
        query: String::new(),
        headers: vec![(form.0.to_owned(), form.1.to_owned())],
        body: request.query.clone().into_bytes(),
        ..request.clone()
    };
    pass_on(&moved, server, &host)
}

fn expect(done: bool, answer: &str) -> io::Result<()> {
    if done {
        Ok(())
    } else {
        Err(io::Error::other(answer.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_of_an_object_is_there_in_the_order_it_was_written() {
        let server = S3::start_open().unwrap();
        server.keep_versions().unwrap();
        for text in ["one", "two"] {
            let (status, answer) = server.ask("PUT", "/states/a/b", text.as_bytes()).unwrap();
            assert_eq!(status, 200, "{answer}");
        }
        server.ask("PUT", "/states/a/bc", b"another").unwrap();
        assert_eq!(server.object("a/b").unwrap().as_deref(), Some("two"));
        server.ask("DELETE", "/states/a/b", b"").unwrap();
        assert_eq!(server.object("a/b").unwrap(), None);
        let (versions, deletions) = server.versions("a/b").unwrap();
        assert_eq!((versions, deletions), (vec!["one".into(), "two".into()], 1));
    }
}
