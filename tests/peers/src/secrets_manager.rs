//! AWS Secrets Manager, its security token service and the metadata of instances: moto's server. It checks signatures.

use std::io;
use std::net::SocketAddr;

use serde_json::{Value, json};

use crate::http::ask;
use crate::moto::Moto;

/// A running service.
#[derive(Debug)]
pub struct SecretsManager {
    address: SocketAddr,
    moto: Moto,
    access_key: String,
    secret_key: String,
}

impl SecretsManager {
    /// Starts a service. Until [`Self::check_signatures`] it believes every signature.
    ///
    /// # Errors
    /// Fails with one line that names what is missing.
    pub fn start() -> io::Result<Self> {
        let moto = Moto::start()?;
        let address = moto.address();
        let mut server = Self {
            address,
            moto,
            access_key: String::new(),
            secret_key: String::new(),
        };
        server.iam("Action=CreateUser&UserName=mayfly")?;
        let key = server.iam("Action=CreateAccessKey&UserName=mayfly")?;
        server.iam(
            "Action=PutUserPolicy&UserName=mayfly&PolicyName=read&PolicyDocument=\
             %7B%22Version%22%3A%222012-10-17%22%2C%22Statement%22%3A%5B%7B%22Effect%22%3A%22Allow\
             %22%2C%22Action%22%3A%22secretsmanager%3AGetSecretValue%22%2C%22Resource%22%3A%22%2A%22%7D%5D%7D",
        )?;
        let element = |name: &str| {
            let (_, rest) = key.split_once(&format!("<{name}>"))?;
            Some(rest.split_once('<')?.0.to_owned())
        };
        let absent = || io::Error::other(format!("no key in {key}"));
        server.access_key = element("AccessKeyId").ok_or_else(absent)?;
        server.secret_key = element("SecretAccessKey").ok_or_else(absent)?;
        Ok(server)
    }

    /// From now on, a wrong signature is refused, and so is what the user has no right for.
    ///
    /// # Errors
    /// Fails when the service does not answer.
    pub fn check_signatures(&self) -> io::Result<()> {
        let headers = [("Content-Type", "text/plain")];
        let (status, answer) = ask(self.address, "POST", "/moto-api/reset-auth", &headers, b"0")?;
        expect(status == 200, &answer)
    }

    /// Stores a secret, and returns its ARN.
    ///
    /// # Errors
    /// Fails when the service does not take it.
    pub fn put(&self, region: &str, name: &str, text: &str) -> io::Result<String> {
        let answer = self.call(
            region,
            "CreateSecret",
            &json!({ "Name": name, "SecretString": text }),
        )?;
        let arn = answer["ARN"].as_str();
        arn.map(str::to_owned)
            .ok_or_else(|| io::Error::other(answer.to_string()))
    }

    /// Calls an action, past all clients.
    ///
    /// # Errors
    /// Fails when the service does not take it.
    pub fn call(&self, region: &str, action: &str, document: &Value) -> io::Result<Value> {
        let target = format!("secretsmanager.{action}");
        let headers = [
            ("Content-Type", "application/x-amz-json-1.1"),
            ("X-Amz-Target", &*target),
            ("Authorization", &*unsigned(region, "secretsmanager")),
        ];
        let (status, answer) = ask(
            self.address,
            "POST",
            "/",
            &headers,
            document.to_string().as_bytes(),
        )?;
        expect(status == 200, &answer)?;
        serde_json::from_str(&answer).map_err(io::Error::other)
    }

    fn iam(&self, form: &str) -> io::Result<String> {
        let headers = [
            ("Authorization", &*unsigned("us-east-1", "iam")),
            ("Content-Type", "application/x-www-form-urlencoded"),
        ];
        let (status, answer) = ask(self.address, "POST", "/", &headers, form.as_bytes())?;
        expect(status == 200, &answer)?;
        Ok(answer)
    }

    /// Where it listens.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Key id of a user who may read.
    pub fn access_key(&self) -> &str {
        &self.access_key
    }

    /// Secret of that user.
    pub fn secret_key(&self) -> &str {
        &self.secret_key
    }

    /// One line for each request so far, and for what went wrong.
    pub fn log(&self) -> String {
        self.moto.log()
    }
}

/// The service reads region and service from the header even while it checks no signature.
fn unsigned(region: &str, service: &str) -> String {
    format!(
        "AWS4-HMAC-SHA256 Credential=x/20260101/{region}/{service}/aws4_request, SignedHeaders=host, Signature=x"
    )
}

fn expect(done: bool, answer: &str) -> io::Result<()> {
    if done {
        Ok(())
    } else {
        Err(io::Error::other(answer.to_owned()))
    }
}
