//! Journeys with `OpenBao`: logins by a certificate and by AWS, and paths however they are mounted.

use job_contract::env;
use serde_json::json;
use test_peers::http::{Response, Server, pass_on};
use test_peers::openbao::{Certified, OpenBao};
use test_peers::secrets_manager::SecretsManager;
use test_peers::vault_aws::{self, ROLE, SERVER_ID};

use super::{Environment, Journey, check, works_with_each};

const PASSWORD: &str = "${vault:kv/app.password}";

/// A server with a secret, and the policy `runs`, which may read it.
fn with_a_secret() -> OpenBao {
    let bao = OpenBao::start().unwrap();
    bao.mount_kv("kv", "", 2).unwrap();
    put(&bao, "kv/data/app", "bao-canary-7");
    let policy = "path \"kv/data/app\" { capabilities = [\"read\"] }";
    bao.write("sys/policies/acl/runs", "", &json!({ "policy": policy }))
        .unwrap();
    bao
}

/// Writes a password. Paths of the second version have a folder `data`.
fn put(bao: &OpenBao, path: &str, password: &str) {
    let mut document = json!({ "password": password });
    if path.contains("/data/") {
        document = json!({ "data": document });
    }
    bao.write(path, "", &document).unwrap();
}

fn settings(pairs: &[(&'static str, &str)]) -> Environment {
    let pairs = pairs.iter();
    pairs
        .map(|(name, value)| (*name, (*value).to_owned()))
        .collect()
}

/// Fails unless the login is refused, with nothing of what the server said.
fn is_refused(environment: Environment) {
    let outcome = check(&environment).expect_code(1);
    let refused = "failed: all runs: the login was refused in Vault";
    assert!(outcome.log().contains(refused), "{outcome}");
    let error = Journey::new(environment).expect_failure(1, &[("A", PASSWORD)]);
    assert!(
        error.contains("the login was refused in Vault (status 4"),
        "{error}"
    );
}

#[test]
fn a_certificate_is_a_login() {
    let bao = with_a_secret();
    let [known, unknown] = ["executor", "somebody"].map(|name| Certified::new(name).unwrap());
    bao.write("sys/auth/cert", "", &json!({ "type": "cert" }))
        .unwrap();
    let role = json!({ "certificate": known.certificate, "token_policies": "runs" });
    bao.write("auth/cert/certs/runs", "", &role).unwrap();
    let (url, authority) = (bao.tls_url(), bao.authority().display().to_string());
    let with = |client: &Certified, more: &[(&'static str, &str)]| {
        let mut all = settings(&[
            (env::CUSTOMER_VAULT_ADDRESS, &url),
            (env::VAULT_CA_FILE, &authority),
            (env::VAULT_CLIENT_CERT, &client.certificate),
            (env::VAULT_CLIENT_KEY, &client.key),
        ]);
        all.extend(settings(more));
        all
    };
    let named = [
        (env::VAULT_METHOD, "certificate"),
        (env::CUSTOMER_VAULT_ROLE_NAME, "runs"),
    ];
    let logins = vec![
        ("any role of the certificate", with(&known, &[])),
        ("a role by its name", with(&known, &named)),
    ];
    works_with_each(PASSWORD, "bao-canary-7", logins);
    is_refused(with(&unknown, &[]));
    let other = [(env::CUSTOMER_VAULT_ROLE_NAME, "other")];
    is_refused(with(&known, &other));
}

#[test]
fn a_signed_request_to_aws_is_a_login() {
    let bao = with_a_secret();
    let aws = SecretsManager::start().unwrap();
    aws.check_signatures().unwrap();
    let user = "arn:aws:iam::123456789012:user/mayfly";
    let vault = vault_aws::start(&bao, aws.address(), user, "runs").unwrap();
    let url = vault.url();
    let with = |changed: &[(&'static str, &str)]| {
        let mut all = settings(&[
            (env::CUSTOMER_VAULT_ADDRESS, &url),
            (env::VAULT_METHOD, "aws"),
            (env::CUSTOMER_VAULT_ROLE_NAME, ROLE),
            (env::VAULT_AWS_SERVER_ID, SERVER_ID),
            (env::CUSTOMER_AWS_ACCESS_KEY_ID, aws.access_key()),
            (env::CUSTOMER_AWS_SECRET_ACCESS_KEY, aws.secret_key()),
            // The keys are for the login alone.
            (env::SECRET_STORES, "vault"),
        ]);
        all.extend(settings(changed));
        all
    };
    works_with_each(PASSWORD, "bao-canary-7", vec![("keys", with(&[]))]);
    is_refused(with(&[(env::CUSTOMER_AWS_SECRET_ACCESS_KEY, "canary-key")]));
    is_refused(with(&[(env::VAULT_AWS_SERVER_ID, "other.example.test")]));
    is_refused(with(&[(env::CUSTOMER_VAULT_ROLE_NAME, "other")]));
}

/// Both versions of the key-value engine, below mounts of one and of two segments, with and without the folder of the second
/// version; also if nobody says how a path is mounted.
#[test]
fn a_path_is_read_however_it_is_mounted() {
    let bao = OpenBao::start().unwrap();
    for (path, version) in [("kv", 2), ("old", 1), ("a/b", 2), ("a/bc", 1)] {
        bao.mount_kv(path, "", version).unwrap();
    }
    // The server has no mount within another one.
    let nested = json!({ "type": "kv" });
    let (status, _) = bao.call("POST", "sys/mounts/a", "", &nested).unwrap();
    assert_eq!(status, 400);
    put(&bao, "kv/data/app", "bao-canary-1");
    put(&bao, "old/app", "bao-canary-2");
    put(&bao, "a/b/data/c", "bao-canary-3");
    put(&bao, "a/bc/c", "bao-canary-4");
    let token = bao.root_token();
    let address = bao.address();
    let front = Server::start(move |request| {
        if request.path.starts_with("/v1/sys/") {
            return Response::new(403, "{\"errors\":[\"canary\"]}");
        }
        pass_on(request, address, "vault").unwrap_or_else(|_| Response::new(502, ""))
    })
    .unwrap();
    let (url, fronted) = (bao.url(), front.url());
    let with = |url: &str, more: &[(&'static str, &str)]| {
        let mut all = settings(&[
            (env::CUSTOMER_VAULT_ADDRESS, url),
            (env::CUSTOMER_VAULT_TOKEN, token),
        ]);
        all.extend(settings(more));
        Journey::new(all)
    };
    let [kv, data, old, nested, nested_data, beside] = [
        ("A", "${vault:kv/app.password}", "bao-canary-1"),
        ("B", "${vault:kv/data/app.password}", "bao-canary-1"),
        ("C", "${vault:old/app.password}", "bao-canary-2"),
        ("D", "${vault:a/b/c.password}", "bao-canary-3"),
        ("E", "${vault:a/b/data/c.password}", "bao-canary-3"),
        ("F", "${vault:a/bc/c.password}", "bao-canary-4"),
    ];
    with(&url, &[]).expect(&[kv, data, old, nested, nested_data, beside]);
    // Nobody says how paths are mounted: they are read as they are, or as the operator says.
    with(&fronted, &[]).expect(&[old, beside]);
    with(&fronted, &[(env::VAULT_KV_VERSION, "1")]).expect(&[old, beside]);
    with(&fronted, &[(env::VAULT_KV_VERSION, "2")]).expect(&[kv, data]);
    let mount = [(env::VAULT_KV_VERSION, "2"), (env::VAULT_KV_MOUNT, "a/b")];
    with(&fronted, &mount).expect(&[nested, nested_data, beside, old]);
    let (_, reference, _) = kv;
    let error = with(&fronted, &mount).expect_failure(1, &[("A", reference)]);
    assert!(
        error.contains("variable A: ${vault:kv/app.password}: not found in Vault"),
        "{error}"
    );
}
