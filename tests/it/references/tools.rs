//! Journeys with the real stores that take longer: versions, logins, and what Vault lends.

mod vault;

use std::collections::BTreeSet;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Barrier, Mutex};
use std::thread::{sleep, spawn};
use std::time::Duration;

use integration_tests::{Outcome, job};
use job_contract::{JobData, env};
use jsonwebtoken::Algorithm;
use nix::sys::signal::Signal;
use serde_json::json;
use tempfile::TempDir;
use test_peers::clouds::Clouds;
use test_peers::google_secrets::{AUDIENCE, SUBJECT_TOKEN};
use test_peers::http::{Request, Response, Server, pass_on};
use test_peers::key_vault::{ASSERTION, CLIENT, TENANT};
use test_peers::oidc::{Issuer, SigningKey};
use test_peers::openbao::OpenBao;
use test_peers::postgres::PostgresServer;
use test_peers::secrets_manager::SecretsManager;
use test_peers::sshd::Sshd;
use test_peers::wait;

use super::{Journey, OLD_VERSION, REGION, Stores};
use crate::machine;

type Environment = Vec<(&'static str, String)>;

/// The same secret by each of several logins. Each login also works without a secret.
fn works_with_each(reference: &str, expected: &str, logins: Vec<(&str, Environment)>) {
    for (name, environment) in logins {
        let outcome = check(&environment).expect_code(0);
        assert!(
            outcome.log().contains("ok: all runs: "),
            "{name}\n{outcome}"
        );
        Journey::new(environment).expect(&[("A", reference, expected)]);
    }
}

/// `executor check-secret-stores` with these settings.
fn check(environment: &Environment) -> Outcome {
    let machine = machine();
    let executor = machine.executor_with_data(None);
    let executor = environment
        .iter()
        .fold(executor, |run, (name, value)| run.env(name, value));
    executor
        .wrapped_in(&["sh", "-c", "exec \"$0\" check-secret-stores"])
        .run()
}

fn file(folder: &TempDir, name: &str, content: &str) -> String {
    let path: PathBuf = folder.path().join(name);
    fs::write(&path, format!("{content}\n")).unwrap();
    path.display().to_string()
}

#[test]
fn versions_regions_and_resource_names_select_the_right_value() {
    let stores = Stores::shared();
    let arn = format!("${{ssm:{}}}", stores.arn);
    let azure = format!("${{azure:db/{OLD_VERSION}@vault-1}}");
    Journey::new(stores.environment()).expect(&[
        (
            "A",
            "${ssm:prod/db?stage=AWSPREVIOUS#password}",
            "aws-canary-1",
        ),
        ("B", &arn, "aws-canary-3"),
        ("C", "${ssm:other/db?region=us-west-2}", "aws-canary-3"),
        ("D", "${gcp:db/versions/7}", "google-canary-7"),
        (
            "E",
            "${gcp:projects/project-2/locations/europe-west3/secrets/db/versions/1}",
            "google-canary-3",
        ),
        ("F", &azure, "azure-canary-2"),
        (
            "G",
            "${vault:kv/team/app?version=1#password}",
            "bao-canary-1",
        ),
        ("H", "${vault:kv/data/team/app#dotted.key}", "bao-canary-5"),
        ("I", "${vault:kv/team/app.number}", "12"),
        ("J", "${vault:old/app.data}", "bao-canary-3"),
    ]);
}

#[test]
fn all_bad_references_are_reported_at_once_with_what_to_do() {
    let stores = Stores::shared();
    let error = Journey::new(stores.environment()).expect_failure(
        1,
        &[
            ("A", "${ssm:absent}"),
            ("B", "${ssm:prod/db#no}"),
            ("C", "${gcp:absent}"),
            ("D", "${gcp:forbidden}"),
            ("E", "${gcp:disabled}"),
            ("F", "${gcp:corrupt/versions/latest}"),
            ("G", "${gcp:binary}"),
            ("H", "${azure:absent@vault-1}"),
            ("I", "${azure:forbidden@vault-1}"),
            ("J", "${azure:disabled@vault-1}"),
            ("K", "${vault:kv/absent.k}"),
            ("L", "${vault:kv/gone.password}"),
            ("M", "${vault:kv/team/app.no}"),
            ("N", "${vault:kv/team/app.list}"),
            ("O", "${vault:old/app?version=1#data}"),
        ],
    );
    for (name, expected) in [
        (
            "A",
            "not found in AWS Secrets Manager (ResourceNotFoundException",
        ),
        ("A", "not the Parameter Store"),
        ("B", "it is not JSON, so it has no keys"),
        ("C", "not found in Google Secret Manager (NOT_FOUND"),
        ("D", "access denied in Google"),
        ("E", "disabled or deleted in Google"),
        ("F", "its checksum is wrong"),
        ("G", "it is binary"),
        ("H", "not found in Azure Key Vault (SecretNotFound"),
        ("I", "access denied in Azure"),
        ("J", "disabled or deleted in Azure"),
        ("K", "not found in Vault"),
        ("L", "disabled or deleted in Vault"),
        ("M", "not found in Vault (there is no such key)"),
        ("N", "the key holds no text"),
        ("O", "only version 2"),
    ] {
        let at = error
            .find(&format!("variable {name}: "))
            .unwrap_or_else(|| panic!("{name}\n{error}"));
        let end = error[at..]
            .find("; variable")
            .map_or(error.len(), |end| at + end);
        assert!(
            error[at..end].contains(expected),
            "{name}: {expected}\n{error}"
        );
    }
}

#[test]
fn aws_is_read_with_each_login() {
    // It believes every signature, which sessions of its own roles need.
    let aws = SecretsManager::start().unwrap();
    aws.put(REGION, "db", "aws-canary-7").unwrap();
    let clouds = Clouds::start(&[
        ("secretsmanager.eu-central-1.amazonaws.com", aws.address()),
        ("sts.eu-central-1.amazonaws.com", aws.address()),
    ])
    .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let token = file(&folder, "token", "token-of-the-agent");
    let document = json!({ "AccessKeyId": "ASIAPOD", "SecretAccessKey": "secret-of-the-pod", "Token": "t", "Expiration": "2099-01-01T00:00:00Z" });
    let session = document.to_string();
    let agent = Server::start(move |request| {
        match (request.path.as_str(), request.header("authorization")) {
            ("/v1/credentials", Some("token-of-the-agent")) => Response::new(200, session.clone()),
            _ => Response::new(403, ""),
        }
    })
    .unwrap();
    let session = document.to_string();
    let node = Server::start(move |request| {
        let has_token = request.header("x-aws-ec2-metadata-token") == Some("imds");
        match (request.method.as_str(), request.path.as_str()) {
            ("PUT", "/latest/api/token")
                if request
                    .header("x-aws-ec2-metadata-token-ttl-seconds")
                    .is_some() =>
            {
                Response::new(200, "imds")
            }
            ("GET", "/latest/meta-data/iam/security-credentials/") if has_token => {
                Response::new(200, "role-of-the-node")
            }
            ("GET", "/latest/meta-data/iam/security-credentials/role-of-the-node") if has_token => {
                Response::new(200, session.clone())
            }
            _ => Response::new(401, ""),
        }
    })
    .unwrap();
    let with = |settings: &[(&'static str, &str)]| {
        let mut environment = clouds.environment().to_vec();
        environment.push((env::AWS_SECRETS_REGION, REGION.to_owned()));
        environment.extend(
            settings
                .iter()
                .map(|(name, value)| (*name, (*value).to_owned())),
        );
        environment
    };
    let keys = [
        (env::CUSTOMER_AWS_ACCESS_KEY_ID, aws.access_key()),
        (env::CUSTOMER_AWS_SECRET_ACCESS_KEY, aws.secret_key()),
    ];
    let role = "arn:aws:iam::123456789012:role/secrets";
    let credentials = format!("{}/v1/credentials", agent.url());
    let logins = vec![
        ("keys", with(&keys)),
        (
            "a role",
            with(&[
                keys[0],
                keys[1],
                (env::AWS_SECRETS_ROLE_ARN, role),
                (env::AWS_SECRETS_EXTERNAL_ID, "id"),
            ]),
        ),
        (
            "a web identity",
            with(&[
                ("AWS_ROLE_ARN", role),
                ("AWS_WEB_IDENTITY_TOKEN_FILE", &token),
            ]),
        ),
        (
            "a role of the operator by a web identity",
            with(&[
                (env::USE_OIDC_FOR_AWS_SSM, "true"),
                (env::CUSTOM_ROLE_FOR_OIDC_AWS_SSM, role),
                (env::CUSTOM_DURATION_FOR_OIDC_AWS_SSM, "900"),
                ("AWS_WEB_IDENTITY_TOKEN_FILE", &token),
            ]),
        ),
        (
            "Pod Identity",
            with(&[
                ("AWS_CONTAINER_CREDENTIALS_FULL_URI", &credentials),
                ("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", &token),
            ]),
        ),
        (
            "the node",
            with(&[
                (env::SECRETS_NODE_IDENTITY, "true"),
                ("AWS_EC2_METADATA_SERVICE_ENDPOINT", &node.url()),
            ]),
        ),
    ];
    works_with_each("${ssm:db}", "aws-canary-7", logins);
}

/// Before moto, which lets no session end, is a server that says so of sessions. The token of the pod changes meanwhile. Several
/// reads use the first session when it is refused.
#[test]
fn a_session_of_aws_that_has_ended_is_replaced_once_by_the_token_of_that_time() {
    let aws = SecretsManager::start().unwrap();
    let names = ["A", "B", "C", "D"];
    for name in names {
        aws.put(REGION, name, &format!("aws-canary-{name}"))
            .unwrap();
    }
    let folder = tempfile::tempdir().unwrap();
    for (ended, code) in [(1, 0), (9, 1)] {
        let token = file(&folder, "token", "token-0");
        let (path, moto) = (token.clone(), aws.address());
        let sessions = Mutex::<BTreeSet<String>>::default();
        let all_reads = Barrier::new(names.len());
        let server = Server::start(move |request| {
            let host = request.header("host").unwrap_or_default();
            if host.starts_with("secretsmanager.") {
                // The signature begins with the key of the session.
                let signature = request.header("authorization").unwrap_or_default();
                let session = signature.split('/').next().unwrap_or_default();
                let mut sessions = sessions.lock().unwrap();
                sessions.insert(session.to_owned());
                let number = sessions.len();
                drop(sessions);
                if number <= ended {
                    fs::write(&path, format!("token-{number}\n")).unwrap();
                    // None is answered before all have begun.
                    all_reads.wait();
                    let error = json!({ "__type": "ExpiredTokenException" });
                    return Response::new(400, error.to_string());
                }
            }
            pass_on(request, moto, host).unwrap()
        })
        .unwrap();
        let clouds = Clouds::start(&[
            (
                "secretsmanager.eu-central-1.amazonaws.com",
                server.address(),
            ),
            ("sts.eu-central-1.amazonaws.com", server.address()),
        ])
        .unwrap();
        let mut environment = clouds.environment().to_vec();
        let role = "arn:aws:iam::123456789012:role/secrets";
        environment.extend([
            (env::AWS_SECRETS_REGION, REGION.to_owned()),
            ("AWS_ROLE_ARN", role.to_owned()),
            ("AWS_WEB_IDENTITY_TOKEN_FILE", token),
        ]);
        let journey = Journey::new(environment);
        let references = names.map(|name| format!("${{ssm:{name}}}"));
        let variables: Vec<_> = names
            .into_iter()
            .zip(references.iter().map(String::as_str))
            .collect();
        let job = journey.script(&variables);
        let outcome = journey.executor(&job).run().expect_code(code);
        for name in names {
            let seen = journey.seen(name);
            let expected = (code == 0).then(|| format!("aws-canary-{name}"));
            assert_eq!(seen, expected, "{outcome}");
        }
        if code == 1 {
            let expected = "the login was refused in AWS Secrets Manager (ExpiredTokenException";
            assert_eq!(outcome.error().matches(expected).count(), 4, "{outcome}");
        }
        let requests = server.requests();
        let bodies = requests
            .iter()
            .map(|request| String::from_utf8_lossy(&request.body).into_owned());
        let tokens: Vec<_> = bodies
            .filter_map(|body| Some(body.split_once("WebIdentityToken=")?.1.to_owned()))
            .collect();
        assert_eq!(tokens, ["token-0", "token-1"], "{outcome}");
    }
}

#[test]
fn a_login_that_aws_refuses_is_said() {
    let stores = Stores::shared();
    // A key that AWS does not know.
    let mut wrong = stores.environment();
    wrong.push((
        env::CUSTOMER_AWS_SECRET_ACCESS_KEY,
        "wrong-canary-key".to_owned(),
    ));
    wrong.push((env::SECRET_STORES, "ssm".to_owned()));
    let outcome = check(&wrong).expect_code(1);
    assert!(
        outcome
            .log()
            .contains("failed: all runs: the login was refused in AWS"),
        "{outcome}"
    );
    Journey::new(wrong).expect_failure(1, &[("A", "${ssm:prod/db}")]);
}

#[test]
fn google_is_read_with_each_login() {
    let stores = Stores::shared();
    let folder = tempfile::tempdir().unwrap();
    let token = file(&folder, "token", SUBJECT_TOKEN);
    let account = |more: &serde_json::Value| {
        let mut document = json!({
            "type": "external_account",
            "audience": AUDIENCE,
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": "https://sts.googleapis.com/v1/token",
            "credential_source": { "file": token },
        });
        document
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        document.to_string()
    };
    let impersonated = json!({ "service_account_impersonation_url":
        "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/mayfly@project-1.iam.gserviceaccount.com:generateAccessToken" });
    let with = |name: &'static str, value: String| {
        let mut environment = stores.clouds.environment().to_vec();
        environment.push((env::CUSTOMER_GOOGLE_PROJECT, "project-1".to_owned()));
        environment.push((name, value));
        environment
    };
    // The metadata server of a node, which is not ready for the first request.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let (host, server) = (
        listener.local_addr().unwrap().to_string(),
        stores.google.address(),
    );
    spawn(move || {
        drop(listener.accept().unwrap());
        for stream in listener.incoming() {
            let (mut client, mut server) = (
                stream.unwrap(),
                std::net::TcpStream::connect(server).unwrap(),
            );
            let (mut from_client, mut to_server) =
                (client.try_clone().unwrap(), server.try_clone().unwrap());
            spawn(move || std::io::copy(&mut from_client, &mut to_server));
            spawn(move || std::io::copy(&mut server, &mut client));
        }
    });
    let key = file(&folder, "key", stores.google.key_document());
    let logins = vec![
        (
            "a key",
            with(
                env::CUSTOMER_GOOGLE_CREDENTIALS,
                stores.google.key_document().to_owned(),
            ),
        ),
        (
            "a key in a file",
            with("GOOGLE_APPLICATION_CREDENTIALS", key),
        ),
        (
            "a federated account",
            with(env::CUSTOMER_GOOGLE_CREDENTIALS, account(&json!({}))),
        ),
        (
            "an account by a federated account",
            with(env::CUSTOMER_GOOGLE_CREDENTIALS, account(&impersonated)),
        ),
        ("the node", with("GCE_METADATA_HOST", host)),
    ];
    works_with_each("${gcp:db}", "google-canary-1", logins);
}

#[test]
fn azure_is_read_with_each_login() {
    let stores = Stores::shared();
    let folder = tempfile::tempdir().unwrap();
    let assertion = file(&folder, "assertion", ASSERTION);
    let metadata = format!("http://{}", stores.azure.address());
    let with = |settings: &[(&'static str, &str)]| {
        let mut environment = stores.clouds.environment().to_vec();
        environment.extend(
            settings
                .iter()
                .map(|(name, value)| (*name, (*value).to_owned())),
        );
        environment
    };
    let client = [
        (env::CUSTOMER_AZURE_TENANT_ID, TENANT),
        (env::CUSTOMER_AZURE_CLIENT_ID, CLIENT),
    ];
    let logins = vec![
        (
            "a secret",
            with(&[
                client[0],
                client[1],
                (
                    env::CUSTOMER_AZURE_CLIENT_SECRET,
                    test_peers::key_vault::CLIENT_SECRET,
                ),
            ]),
        ),
        (
            "a workload identity",
            with(&[
                (env::SECRET_STORES, "azure"),
                ("AZURE_TENANT_ID", TENANT),
                ("AZURE_CLIENT_ID", CLIENT),
                ("AZURE_FEDERATED_TOKEN_FILE", &assertion),
            ]),
        ),
        (
            "the node",
            with(&[
                (env::SECRET_STORES, "azure"),
                (env::SECRETS_NODE_IDENTITY, "true"),
                ("AZURE_POD_IDENTITY_AUTHORITY_HOST", &metadata),
            ]),
        ),
    ];
    works_with_each("${azure:db@vault-1}", "azure-canary-1", logins);
    let wrong = with(&[
        client[0],
        client[1],
        (env::CUSTOMER_AZURE_CLIENT_SECRET, "wrong"),
    ]);
    let error = Journey::new(wrong).expect_failure(1, &[("A", "${azure:db@vault-1}")]);
    assert!(
        error.contains("the login was refused in Azure Key Vault (AADSTS7000215, status 401)"),
        "{error}"
    );
}

const POLICY: &str = "path \"kv/*\" { capabilities = [\"read\"] }\npath \"database/creds/app\" { capabilities = [\"read\"] }\n";

/// A login by `AppRole` whose tokens may read, and may not ask how paths are mounted.
fn app_role(bao: &OpenBao) -> Environment {
    bao.write("sys/auth/approle", "", &json!({ "type": "approle" }))
        .unwrap();
    bao.write("sys/policies/acl/runs", "", &json!({ "policy": POLICY }))
        .unwrap();
    let role = json!({ "token_policies": "runs", "token_ttl": "1h" });
    bao.write("auth/approle/role/runs", "", &role).unwrap();
    let id = bao
        .call("GET", "auth/approle/role/runs/role-id", "", &json!(null))
        .unwrap()
        .1;
    let secret = bao
        .write("auth/approle/role/runs/secret-id", "", &json!({}))
        .unwrap();
    vec![
        (env::CUSTOMER_VAULT_ADDRESS, bao.url()),
        (
            env::VAULT_ROLE_ID,
            id["data"]["role_id"].as_str().unwrap().to_owned(),
        ),
        (
            env::VAULT_SECRET_ID,
            secret["data"]["secret_id"].as_str().unwrap().to_owned(),
        ),
    ]
}

/// The tokens that a login has given and that are still valid.
fn tokens_of(bao: &OpenBao, display_name: &str) -> usize {
    let (_, list) = bao
        .call("LIST", "auth/token/accessors", "", &json!(null))
        .unwrap();
    let accessors = list["data"]["keys"].as_array().cloned().unwrap_or_default();
    let names = accessors.iter().map(|accessor| {
        let (_, token) = bao
            .call(
                "POST",
                "auth/token/lookup-accessor",
                "",
                &json!({ "accessor": accessor }),
            )
            .unwrap();
        token["data"]["display_name"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    });
    names.filter(|name| name == display_name).count()
}

#[test]
fn vault_is_read_with_each_login_and_gets_its_tokens_back() {
    let bao = OpenBao::start().unwrap();
    bao.mount_kv("kv", "", 2).unwrap();
    bao.write(
        "kv/data/app",
        "",
        &json!({ "data": { "password": "bao-canary-7" } }),
    )
    .unwrap();
    let mut by_role = app_role(&bao);
    let folder = tempfile::tempdir().unwrap();
    bao.write("sys/auth/userpass", "", &json!({ "type": "userpass" }))
        .unwrap();
    let user = json!({ "password": "pass word", "token_policies": "runs" });
    bao.write("auth/userpass/users/mayfly", "", &user).unwrap();
    let key = SigningKey::new("k1", Algorithm::ES256);
    let issuer = Issuer::start(&[&key]).unwrap();
    bao.write("sys/auth/cluster", "", &json!({ "type": "jwt" }))
        .unwrap();
    let config = json!({ "oidc_discovery_url": issuer.url(), "oidc_discovery_ca_pem": issuer.certificate() });
    bao.write("auth/cluster/config", "", &config).unwrap();
    let role = json!({ "role_type": "jwt", "bound_audiences": ["vault"], "user_claim": "sub", "token_policies": "runs" });
    bao.write("auth/cluster/role/runs", "", &role).unwrap();
    let jwt = file(
        &folder,
        "jwt",
        &key.sign(&issuer.claims("vault", "system:serviceaccount:runs:executor")),
    );
    let with = |settings: &[(&'static str, &str)]| {
        let mut environment = vec![(env::CUSTOMER_VAULT_ADDRESS, bao.url())];
        environment.extend(
            settings
                .iter()
                .map(|(name, value)| (*name, (*value).to_owned())),
        );
        environment
    };
    by_role.push((env::VAULT_METHOD, "approle".to_owned()));
    let logins = vec![
        (
            "token",
            with(&[(env::CUSTOMER_VAULT_TOKEN, bao.root_token())]),
        ),
        ("approle", by_role),
        (
            "password",
            with(&[
                (env::CUSTOMER_VAULT_USERNAME, "mayfly"),
                (env::CUSTOMER_VAULT_PASSWORD, "pass word"),
            ]),
        ),
        (
            "jwt",
            with(&[
                (env::VAULT_METHOD, "jwt"),
                (env::CUSTOMER_VAULT_LOGIN_PATH, "cluster"),
                (env::CUSTOMER_VAULT_ROLE_NAME, "runs"),
                (env::VAULT_JWT_FILE, &jwt),
            ]),
        ),
    ];
    works_with_each("${vault:kv/app.password}", "bao-canary-7", logins);
    let (_, list) = bao
        .call("LIST", "auth/token/accessors", "", &json!(null))
        .unwrap();
    assert_eq!(list["data"]["keys"].as_array().unwrap().len(), 1, "{list}");
    let wrong = with(&[
        (env::CUSTOMER_VAULT_USERNAME, "mayfly"),
        (env::CUSTOMER_VAULT_PASSWORD, "canary"),
    ]);
    let error = Journey::new(wrong).expect_failure(1, &[("A", "${vault:kv/app.password}")]);
    assert!(
        error.contains("the login was refused in Vault (status 400)"),
        "{error}"
    );
}

#[test]
fn a_token_that_only_read_is_revoked_before_the_run_begins() {
    let bao = OpenBao::start().unwrap();
    bao.mount_kv("kv", "", 2).unwrap();
    let document = json!({ "data": { "password": "bao-canary-7" } });
    bao.write("kv/data/app", "", &document).unwrap();
    let journey = Journey::new(app_role(&bao));
    let gate = journey.machine.gate();
    let mut step = journey.script(&[("A", "${vault:kv/app.password}")]);
    step.command_list.push(job::bash(2, &gate.words()));
    let run = journey.executor(&step).start();
    let reached = gate.reached();
    assert_eq!(journey.seen("A").as_deref(), Some("bao-canary-7"));
    assert_eq!(tokens_of(&bao, "approle"), 0);
    drop(reached);
    run.wait().expect_code(0);
}

/// Between executor and Vault is a server that never answers to the read of a secret.
#[test]
fn a_signal_during_the_reads_ends_the_executor_and_gives_the_token_back() {
    const READ: &str = "/v1/kv/data/app";
    let (open, held) = channel::<()>();
    let held = Mutex::new(held);
    let bao = OpenBao::start().unwrap();
    bao.mount_kv("kv", "", 2).unwrap();
    let vault: SocketAddr = bao.url().trim_start_matches("http://").parse().unwrap();
    let server = Server::start(move |request| {
        if request.path == READ {
            // It is not answered before the executor has ended.
            let _ = held.lock().unwrap().recv();
        }
        pass_on(request, vault, "vault").unwrap()
    })
    .unwrap();
    let mut environment = app_role(&bao);
    environment.push((env::CUSTOMER_VAULT_ADDRESS, server.url()));
    let journey = Journey::new(environment);
    let step = journey.script(&[("A", "${vault:kv/app.password}")]);
    let run = journey.executor(&step).start();
    let reads = || {
        let requests = server.requests().into_iter();
        requests.filter(|request| request.path == READ).count()
    };
    wait::until_blocking("the read of the secret", || reads() > 0);
    assert_eq!(tokens_of(&bao, "approle"), 1);
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait();
    // A read that gets no answer is repeated.
    assert_eq!(reads(), 1, "{outcome}");
    assert_eq!(tokens_of(&bao, "approle"), 0, "{outcome}");
    assert_eq!(outcome.left_behind, Vec::<PathBuf>::new(), "{outcome}");
    assert_eq!(journey.machine.statuses(&step).1, "pending", "{outcome}");
    assert_eq!(journey.seen("A"), None);
    drop(open);
}

/// The answer of Vault to a login, a read of credentials or a renewal, as if what it lends lasted a second.
fn lasting_a_second(mut answer: Response) -> Response {
    let mut document: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    match document.get_mut("auth") {
        Some(auth) if !auth.is_null() => auth["lease_duration"] = json!(1),
        _ => document["lease_duration"] = json!(1),
    }
    answer.body = document.to_string().into_bytes();
    answer
}

/// Between executor and Vault is a server that revokes tokens, and says at their login that they last a second. Vault answers as if
/// a policy denied the read.
#[test]
fn a_token_of_vault_that_has_ended_is_replaced_once() {
    let bao = OpenBao::start().unwrap();
    bao.mount_kv("kv", "", 2).unwrap();
    let document = json!({ "data": { "password": "bao-canary-7" } });
    bao.write("kv/data/app", "", &document).unwrap();
    let vault: SocketAddr = bao.url().trim_start_matches("http://").parse().unwrap();
    let role = app_role(&bao);
    for (slow, reference, code, logins) in [
        (1, "${vault:kv/app.password}", 0, 2),
        (9, "${vault:kv/app.password}", 1, 2),
        (0, "${vault:kv-of-others/app.password}", 1, 1),
    ] {
        let (logins_so_far, asked) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let server = Server::start(move |request| {
            let asks = request.path.starts_with("/v1/sys/internal/");
            if asks && asked.fetch_add(1, Ordering::SeqCst) < slow {
                let revoke = Request {
                    method: "POST".to_owned(),
                    path: "/v1/auth/token/revoke-self".to_owned(),
                    ..request.clone()
                };
                let revoked = pass_on(&revoke, vault, "vault").unwrap();
                assert_eq!(revoked.status, 204);
                // Until the executor knows by its own clock that it has ended.
                sleep(Duration::from_millis(1200));
            }
            let answer = pass_on(request, vault, "vault").unwrap();
            let logs_in = request.path.ends_with("/approle/login");
            if logs_in && logins_so_far.fetch_add(1, Ordering::SeqCst) < slow {
                return lasting_a_second(answer);
            }
            answer
        })
        .unwrap();
        let mut environment = role.clone();
        environment.push((env::CUSTOMER_VAULT_ADDRESS, server.url()));
        let journey = Journey::new(environment);
        let job = journey.script(&[("A", reference)]);
        let outcome = journey.executor(&job).run().expect_code(code);
        let seen = journey.seen("A");
        if code == 0 {
            assert_eq!(seen.as_deref(), Some("bao-canary-7"), "{outcome}");
        } else {
            let class = match logins {
                1 => "access denied in Vault",
                _ => "the login was refused in Vault",
            };
            assert!(outcome.error().contains(class), "{outcome}");
        }
        let requests = server.requests();
        let of_login = requests
            .iter()
            .filter(|request| request.path.ends_with("/approle/login"));
        assert_eq!(of_login.count(), logins, "{reference}\n{outcome}");
    }
    wait::until_blocking("the end of the tokens", || tokens_of(&bao, "approle") == 0);
}

/// Between executor and Vault is a server that shortens the times which Vault says.
#[test]
fn what_vault_lends_lasts_as_long_as_the_run_and_ends_with_it() {
    let bao = OpenBao::start().unwrap();
    let postgres = PostgresServer::shared().unwrap();
    let url = postgres.database().unwrap();
    let (_, place) = url.split_once('@').unwrap();
    bao.write("sys/mounts/database", "", &json!({ "type": "database" }))
        .unwrap();
    let config = json!({
        "plugin_name": "postgresql-database-plugin",
        "connection_url": format!("postgresql://{{{{username}}}}:{{{{password}}}}@{place}?sslmode=disable"),
        "username": "postgres",
        "password": "x",
        "allowed_roles": "*",
    });
    bao.write("database/config/pg", "", &config).unwrap();
    let create =
        "CREATE ROLE \"{{name}}\" WITH LOGIN PASSWORD '{{password}}' VALID UNTIL '{{expiration}}';";
    let role = json!({ "db_name": "pg", "creation_statements": [create], "default_ttl": "1h", "max_ttl": "2h" });
    bao.write("database/roles/app", "", &role).unwrap();
    let vault: SocketAddr = bao.url().trim_start_matches("http://").parse().unwrap();
    let renewals = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
    let count = Arc::clone(&renewals);
    let server = Server::start(move |request| {
        let answer = pass_on(request, vault, "vault").unwrap();
        let is = |end: &str| request.path.ends_with(end);
        let renewed = ["/auth/token/renew-self", "/sys/leases/renew"].map(is);
        for (counter, _) in count.iter().zip(renewed).filter(|(_, renewed)| *renewed) {
            counter.fetch_add(usize::from(answer.status == 200), Ordering::SeqCst);
        }
        let lends = is("/approle/login") || is("/database/creds/app") || renewed.contains(&true);
        if lends && answer.status == 200 {
            return lasting_a_second(answer);
        }
        answer
    })
    .unwrap();
    let mut environment = app_role(&bao);
    environment.push((env::CUSTOMER_VAULT_ADDRESS, server.url()));
    let journey = Journey::new(environment);
    let gate = journey.machine.gate();
    let mut step = journey.script(&[
        ("DB_USER", "${vault:database/creds/app.username}"),
        ("DB_PASSWORD", "${vault:database/creds/app.password}"),
    ]);
    step.command_list.push(job::bash(2, &gate.words()));
    let run = journey.executor(&step).start();
    let reached = gate.reached();
    // Longer than they last by what the executor was told.
    wait::until_blocking("two renewals of the token and of the lease", || {
        renewals
            .iter()
            .all(|count| count.load(Ordering::SeqCst) >= 2)
    });
    let leases = || {
        bao.call(
            "LIST",
            "sys/leases/lookup/database/creds/app",
            "",
            &json!(null),
        )
        .unwrap()
    };
    let (status, list) = leases();
    assert_eq!(
        (status, list["data"]["keys"].as_array().map(Vec::len)),
        (200, Some(1)),
        "{list}"
    );
    assert_eq!(tokens_of(&bao, "approle"), 1);
    let user = journey.seen("DB_USER").unwrap();
    assert!(user.starts_with("v-approle"), "{user}");
    drop(reached);
    run.wait().expect_code(0);
    assert_eq!(tokens_of(&bao, "approle"), 0);
    // The token is gone. Its leases follow.
    wait::until_blocking("the end of the lease", || leases().0 == 404);
}

#[test]
fn the_key_of_a_source_may_be_a_reference() {
    let server = Sshd::start().unwrap();
    let bao = OpenBao::start().unwrap();
    bao.mount_kv("kv", "", 2).unwrap();
    // Some stores take the last newline away.
    let key = server.client_key().unwrap();
    let document = json!({ "data": { "key": key.trim_end() } });
    bao.write("kv/data/git", "", &document).unwrap();
    let journey = Journey::new(vec![
        (env::CUSTOMER_VAULT_ADDRESS, bao.url()),
        (env::CUSTOMER_VAULT_TOKEN, bao.root_token().to_owned()),
    ]);
    let known_hosts = journey.machine.scratch("known_hosts");
    fs::write(&known_hosts, server.known_hosts_line().unwrap()).unwrap();
    let plan = JobData {
        source: Some(server.url(journey.repository.path())),
        vcs_type: Some("SSH~id_ed25519".into()),
        access_token: Some("${vault:kv/git.key}".into()),
        module_ssh_key: Some("${vault:kv/git.key}".into()),
        ..job::plan(&journey.repository)
    };
    journey.machine.queue(&[&plan]);
    let outcome = journey
        .executor(&plan)
        .env(env::SSH_KNOWN_HOSTS, &known_hosts)
        .run()
        .expect_code(0);
    assert_eq!(
        journey.machine.record(&plan).commit_id,
        Some(journey.repository.head()),
        "{outcome}"
    );
}
