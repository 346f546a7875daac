//! Stores that are opened without a key: by the identity of a pod, and by roles. The run has credentials of its own, which open
//! nothing here.

use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use artifact_store::Store;
use axum::http::HeaderName;
use object_store::azure::{AzureAccessKey, AzureAuthorizer, AzureCredential};
use object_store::client::{HttpRequest, HttpRequestBody};
use test_peers::http::{Request, Response, Server, pass_on};

use super::*;
use crate::deploy_roles::agent;

const STORE_ROLE: &str = "arn:aws:iam::123456789012:role/store";
const POD_ROLE: &str = "arn:aws:iam::123456789012:role/pod";
/// The token of the pod, in a file.
const POD_TOKEN: &str = "token-of-the-pod";
/// What the token service of Azure gives for it.
const AZURE_TOKEN: &str = "token-of-azure-for-the-store";

with_both_tools!(
    s3_by_a_role_that_the_pod_assumes,
    s3_by_a_role_that_keys_assume,
    s3_by_the_agent_of_the_pod,
    azure_by_workload_identity,
    google_by_a_federated_identity,
    google_by_a_key_in_a_file,
    google_by_the_node,
);

fn pod_token(folder: &Path) -> String {
    let path = folder.join("token");
    fs::write(&path, POD_TOKEN).unwrap();
    path.display().to_string()
}

/// The bucket at its real address, with the token service of AWS and a role for the store.
fn s3(server: &S3) -> (Fixture, Clouds) {
    let hosts = [
        format!("{}.s3.{}.amazonaws.com", s3::BUCKET, s3::REGION),
        format!("sts.{}.amazonaws.com", s3::REGION),
    ];
    let routes = [
        (&*hosts[0], server.address()),
        (&*hosts[1], server.security_tokens()),
    ];
    let clouds = Clouds::start(&routes).unwrap();
    let mut fixture = s3_with_keys(server);
    fixture
        .environment
        .retain(|(name, _)| *name != env::AWS_ENDPOINT);
    fixture
        .environment
        .push((env::STORE_AWS_ROLE, STORE_ROLE.to_owned()));
    fixture.environment.extend(clouds.environment());
    fixture
        .variables
        .push(("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/of-the-run"));
    fixture.address = format!("https://{}/tfstate/", hosts[0]);
    (fixture, clouds)
}

/// The same without keys.
fn s3_without_keys(server: &S3) -> (Fixture, Clouds) {
    let (mut fixture, clouds) = s3(server);
    let is_key = |name: &str| [env::AWS_ACCESS_KEY, env::AWS_SECRET_KEY].contains(&name);
    fixture.environment.retain(|(name, _)| !is_key(name));
    (fixture, clouds)
}

fn s3_by_a_role_that_the_pod_assumes(tool: Tool) {
    let server = S3::start_open().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (mut fixture, _clouds) = s3_without_keys(&server);
    fixture.environment.extend([
        (env::AWS_ENABLE_ROLE_AUTH, "true".to_owned()),
        ("AWS_ROLE_ARN", POD_ROLE.to_owned()),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", pod_token(folder.path())),
        // Nothing of this reaches the tool by its environment.
        (env::IDENTITY_PASS_THROUGH, "false".to_owned()),
    ]);
    fixture.secrets = vec![POD_TOKEN.to_owned()];
    plans_and_applies_by(tool, &fixture);
    let asked = server.log();
    assert!(asked.contains("POST / HTTP"), "{asked}");
}

fn s3_by_a_role_that_keys_assume(tool: Tool) {
    let server = S3::start_open().unwrap();
    let (fixture, clouds) = s3(&server);
    plans_and_applies_by(tool, &fixture);
    let tokens = format!("sts.{}.amazonaws.com", s3::REGION);
    assert!(clouds.asked().contains(&tokens), "{:?}", clouds.asked());
}

/// EKS Pod Identity. The tool finds it by itself, so the run has no credentials of its own.
fn s3_by_the_agent_of_the_pod(tool: Tool) {
    let server = S3::start_open().unwrap();
    let (agent, _folder, token) = agent();
    let (mut fixture, _clouds) = s3_without_keys(&server);
    fixture
        .environment
        .retain(|(name, _)| *name != env::STORE_AWS_ROLE);
    fixture.environment.extend([
        (env::AWS_ENABLE_ROLE_AUTH, "true".to_owned()),
        ("AWS_CONTAINER_CREDENTIALS_FULL_URI", agent.url()),
        (
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
            token.display().to_string(),
        ),
    ]);
    fixture.variables.clear();
    let token = fs::read_to_string(token).unwrap();
    fixture.secrets = vec![token.clone(), "secret-of-the-pod".to_owned()];
    plans_and_applies_by(tool, &fixture);
    let asked = agent.requests();
    let known = |request: &Request| request.header("authorization") == Some(&*token);
    assert!(asked.len() >= 4 && asked.iter().all(known), "{asked:?}");
}

/// Lets requests through that have the token, and signs them with the key of the account, which the server asks for.
fn azure_front(request: &Request, server: &Azurite) -> Response {
    let token = format!("Bearer {AZURE_TOKEN}");
    if request.header("authorization") != Some(&*token) {
        return Response::new(403, "").with_header("x-ms-error-code", "AuthenticationFailed");
    }
    let host = server.host();
    let mut signed = HttpRequest::new(HttpRequestBody::empty());
    *signed.method_mut() = request.method.parse().unwrap();
    *signed.uri_mut() = format!("https://{host}{}", request.target())
        .parse()
        .unwrap();
    let kept = request
        .headers
        .iter()
        .filter(|(name, _)| name != "authorization");
    for (name, value) in kept.clone() {
        let name: HeaderName = name.parse().unwrap();
        signed.headers_mut().insert(name, value.parse().unwrap());
    }
    let key = AzureAccessKey::try_new(azurite::ACCOUNT_KEY).unwrap();
    let credential = AzureCredential::AccessKey(key);
    let authorizer = AzureAuthorizer::new(&credential, server.account());
    authorizer.try_authorize(&mut signed).unwrap();
    let headers = signed.headers().iter();
    let headers =
        headers.map(|(name, value)| (name.to_string(), value.to_str().unwrap().to_owned()));
    let passed = Request {
        headers: headers.collect(),
        ..request.clone()
    };
    answer(pass_on(&passed, server.address(), &host))
}

fn answer(passed: io::Result<Response>) -> Response {
    passed.unwrap_or_else(|error| Response::new(502, error.to_string()))
}

/// What some clients ask first: where the services of a tenant are.
fn azure_discovery(path: &str) -> Option<Value> {
    let of_tenant = "https://login.microsoftonline.com/tenant";
    match path {
        "/common/discovery/instance" => Some(json!({
            "tenant_discovery_endpoint": format!("{of_tenant}/v2.0/.well-known/openid-configuration"),
            "api-version": "1.1",
            "metadata": [{
                "preferred_network": "login.microsoftonline.com", "preferred_cache": "login.windows.net",
                "aliases": ["login.microsoftonline.com", "login.windows.net", "login.microsoft.com", "sts.windows.net"],
            }],
        })),
        "/tenant/v2.0/.well-known/openid-configuration" => Some(json!({
            "issuer": format!("{of_tenant}/v2.0"),
            "authorization_endpoint": format!("{of_tenant}/oauth2/v2.0/authorize"),
            "token_endpoint": format!("{of_tenant}/oauth2/v2.0/token"),
        })),
        _ => None,
    }
}

/// A token service of Azure: knows one application, and the token that it trusts.
fn azure_tokens(request: &Request) -> Response {
    let form: Vec<(String, String)> = url::form_urlencoded::parse(&request.body)
        .into_owned()
        .collect();
    let is = |name: &str, value: &str| form.iter().any(|(n, v)| n == name && v == value);
    let scope = form
        .iter()
        .find(|(name, _)| name == "scope")
        .map(|(_, value)| &**value);
    let is_known = request.path == "/tenant/oauth2/v2.0/token"
        && is("grant_type", "client_credentials")
        && is("client_id", "client")
        && is("client_assertion", POD_TOKEN)
        && scope.is_some_and(|scope| {
            scope.contains("storage.azure.com") || scope.contains("blob.core.windows.net")
        });
    let json = ("Content-Type", "application/json");
    if let Some(document) = azure_discovery(&request.path) {
        return Response::new(200, document.to_string()).with_header(json.0, json.1);
    }
    if !is_known {
        let refusal = r#"{"error":"invalid_client","error_description":"AADSTS700016"}"#;
        return Response::new(401, refusal).with_header(json.0, json.1);
    }
    let token = json!({"access_token": AZURE_TOKEN, "token_type": "Bearer", "expires_in": 3600, "ext_expires_in": 3600});
    Response::new(200, token.to_string()).with_header(json.0, json.1)
}

/// The account at its real address, which wants the token.
struct Account {
    fixture: Fixture,
    _front: Server,
    _clouds: Clouds,
}

/// `tokens` is the token service of Azure.
fn azure(tokens: &Server) -> Account {
    let server = Azurite::start().unwrap();
    let (host, account) = (server.host(), server.account().to_owned());
    let endpoint = Url::parse(&server.url()).unwrap();
    let front = Server::start(move |request| azure_front(request, &server)).unwrap();
    let routes = [
        (&*host, front.address()),
        ("login.microsoftonline.com", tokens.address()),
        ("login.microsoft.com", tokens.address()),
    ];
    let clouds = Clouds::start(&routes).unwrap();
    let mut environment = vec![
        (env::STATE_TYPE, "AzureTerraformStateImpl".to_owned()),
        (env::AZURE_ACCOUNT, account.clone()),
        (env::AZURE_CONTAINER, "tfstate".to_owned()),
        (env::STORE_AZURE_IDENTITY, "true".to_owned()),
    ];
    environment.extend(clouds.environment());
    let store = open(&StoreSettings::Azure(AzureSettings {
        account,
        login: AzureLogin::Key(SecretString::from(azurite::ACCOUNT_KEY)),
        container: "tfstate".to_owned(),
        resource_group: None,
        handover: Handover::Outside,
        endpoint,
    }));
    make_container(&store);
    let fixture = Fixture {
        environment,
        variables: Vec::new(),
        secrets: vec![
            azurite::ACCOUNT_KEY.to_owned(),
            AZURE_TOKEN.to_owned(),
            POD_TOKEN.to_owned(),
            HEADER.to_owned(),
        ],
        store,
        address: format!("https://{host}/tfstate/"),
        state: backend_state(),
    };
    Account {
        fixture,
        _front: front,
        _clouds: clouds,
    }
}

fn azure_by_workload_identity(tool: Tool) {
    let tokens = Server::start(azure_tokens).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let mut account = azure(&tokens);
    account.fixture.environment.extend([
        ("AZURE_CLIENT_ID", "client".to_owned()),
        ("AZURE_TENANT_ID", "tenant".to_owned()),
        ("AZURE_FEDERATED_TOKEN_FILE", pod_token(folder.path())),
        (env::IDENTITY_PASS_THROUGH, "false".to_owned()),
    ]);
    plans_and_applies_by(tool, &account.fixture);
    let refused = tokens
        .requests()
        .iter()
        .filter(|request| azure_tokens(request).status != 200)
        .count();
    assert_eq!(refused, 0);
}

/// Where a node hands out tokens.
const NODE_PATH: &str = "/metadata/identity/oauth2/token";
/// What App Service wants to see, beside the address.
const HEADER: &str = "header-of-the-service";

/// Who hands out the tokens of a managed identity: a node at its own address, or App Service at another one.
fn managed_identity(request: &Request) -> Response {
    let path = request.path.strip_prefix("http://169.254.169.254");
    let query: Vec<(String, String)> = url::form_urlencoded::parse(request.query.as_bytes())
        .into_owned()
        .collect();
    let of = |name: &str| {
        let mut found = query.iter().filter(|(known, _)| known == name);
        found.next().map(|(_, value)| &**value)
    };
    let is_known = match path.unwrap_or(&request.path) {
        NODE_PATH => request.header("metadata") == Some("true"),
        "/msi/token" => {
            request.header("x-identity-header") == Some(HEADER)
                && of("api-version") == Some("2019-08-01")
        }
        _ => false,
    };
    let is_for_storage = of("resource").is_some_and(|resource| {
        resource.contains("storage.azure.com") || resource.contains("blob.core.windows.net")
    });
    if !is_known || !is_for_storage || of("client_id").is_some_and(|id| id != "client") {
        return Response::new(400, r#"{"error":"invalid_request"}"#);
    }
    let ends = SystemTime::now() + Duration::from_hours(1);
    let ends = ends.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let token = json!({
        "access_token": AZURE_TOKEN, "token_type": "Bearer", "resource": of("resource"),
        "expires_in": "3600", "expires_on": ends.as_secs().to_string(),
    });
    Response::new(200, token.to_string()).with_header("Content-Type", "application/json")
}

/// The way to the metadata service of a node, which is at an address of its own.
fn to_node(node: &Server) -> [(&'static str, String); 2] {
    [
        ("HTTP_PROXY", node.url()),
        ("NO_PROXY", "127.0.0.1,localhost".to_owned()),
    ]
}

/// Terraform alone: a variable leads its requests for tokens to this test.
#[test]
fn azure_by_the_node() {
    const NODE: &str = "ARM_MSI_ENDPOINT";
    let tokens = Server::start(azure_tokens).unwrap();
    let node = Server::start(managed_identity).unwrap();
    let mut account = azure(&tokens);
    account.fixture.environment.extend(to_node(&node));
    // The tool takes no proxy to the node.
    account.fixture.environment.extend([
        (NODE, format!("{}{NODE_PATH}", node.url())),
        (env::ENV_FORWARD, NODE.to_owned()),
    ]);
    plans_and_applies(&account.fixture);
    assert!(node.requests().len() >= 4, "{:?}", node.requests());
}

/// The artifacts alone, without the tool.
#[test]
fn azure_is_opened_with_each_managed_identity() {
    let tokens = Server::start(azure_tokens).unwrap();
    let node = Server::start(managed_identity).unwrap();
    let account = azure(&tokens);
    let (machine, repository) = (machine(), Repository::fixture());
    let with = |more: &[(&'static str, String)]| {
        let given = account.fixture.environment.iter().chain(more);
        given.cloned().collect::<Vec<_>>()
    };
    let client = ("AZURE_CLIENT_ID", "client".to_owned());
    let service = |header: &str| {
        [
            ("IDENTITY_ENDPOINT", format!("{}/msi/token", node.url())),
            ("IDENTITY_HEADER", header.to_owned()),
            client.clone(),
        ]
    };
    let of_node = [&to_node(&node)[..], std::slice::from_ref(&client)].concat();
    let environments = [
        (0, with(&of_node)),
        (0, with(&service(HEADER))),
        (1, with(&service("wrong"))),
    ];
    for (number, (code, environment)) in environments.into_iter().enumerate() {
        let script = job::bash(1, "env; echo it-ran");
        let scripts = job::scripts(&repository, vec![script]);
        let scripts = job::in_job(&scripts, &(51 + number).to_string());
        machine.queue(&[&scripts]);
        let start = machine.executor(&scripts);
        let run = environment
            .into_iter()
            .fold(start, |run, (name, value)| run.env(name, value));
        let outcome = run.run();
        assert_eq!(outcome.code() == 0, code == 0, "{outcome}");
        assert!(!outcome.to_string().contains(HEADER), "{outcome}");
    }
}

/// The operator makes the container of states.
fn make_container(store: &Store) {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let key = ObjectKey::state_raw("o", "w", "made");
    runtime.block_on(store.put(&key, "x")).unwrap();
}

/// The token service of Google: exchanges the token of the pod.
fn google_tokens(request: &Request) -> Response {
    let form: Vec<(String, String)> = url::form_urlencoded::parse(&request.body)
        .into_owned()
        .collect();
    let is = |name: &str, value: &str| form.iter().any(|(n, v)| n == name && v == value);
    let is_known = request.path == "/v1/token"
        && is(
            "grant_type",
            "urn:ietf:params:oauth:grant-type:token-exchange",
        )
        && is("audience", "//iam.googleapis.com/provider")
        && is("subject_token", POD_TOKEN)
        && is("subject_token_type", "urn:ietf:params:oauth:token-type:jwt");
    let json = ("Content-Type", "application/json");
    if !is_known {
        return Response::new(400, r#"{"error":"invalid_grant"}"#).with_header(json.0, json.1);
    }
    let token = json!({
        "access_token": gcs::TOKEN, "expires_in": 3600, "token_type": "Bearer",
        "issued_token_type": "urn:ietf:params:oauth:token-type:access_token",
    });
    Response::new(200, token.to_string()).with_header(json.0, json.1)
}

/// The bucket at its real address, without a login.
fn google(server: &Gcs, clouds: &Clouds) -> Fixture {
    let mut environment = vec![
        (env::STATE_TYPE, "GcpTerraformStateImpl".to_owned()),
        (env::GCP_BUCKET, gcs::BUCKET.to_owned()),
        (env::STORE_GCP_IDENTITY, "true".to_owned()),
    ];
    environment.extend(clouds.environment());
    Fixture {
        environment,
        variables: Vec::new(),
        secrets: vec![gcs::TOKEN.to_owned(), POD_TOKEN.to_owned()],
        store: open(&StoreSettings::Gcs(GcsSettings {
            bucket: gcs::BUCKET.to_owned(),
            login: GcsLogin::Key(SecretString::from(server.service_account())),
            handover: Handover::Outside,
            endpoint: Url::parse(&server.url()).unwrap(),
        })),
        address: format!("https://storage.cloud.google.com/{}/tfstate/", gcs::BUCKET),
        state: ObjectKey {
            path: format!("{}/default.tfstate", backend_state().path),
            ..backend_state()
        },
    }
}

fn google_by_a_key_in_a_file(tool: Tool) {
    let server = Gcs::start().unwrap();
    let clouds = Clouds::start(&[("storage.googleapis.com", server.address())]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("google.json");
    let key = server.service_account();
    fs::write(&path, &key).unwrap();
    let mut fixture = google(&server, &clouds);
    fixture
        .environment
        .push(("GOOGLE_APPLICATION_CREDENTIALS", path.display().to_string()));
    // Documents of a run are for its providers.
    fixture.variables = vec![("GOOGLE_APPLICATION_CREDENTIALS", "/of/the/run.json")];
    let key: Value = serde_json::from_str(&key).unwrap();
    let private_key = key["private_key"].as_str().unwrap();
    fixture.secrets = vec![private_key.lines().nth(1).unwrap().to_owned()];
    plans_and_applies_by(tool, &fixture);
}

/// The metadata server of a node.
fn google_node(request: &Request) -> Response {
    let content = match request.path.strip_prefix("/computeMetadata/v1/") {
        Some("instance/service-accounts/default/token") => {
            json!({"access_token": gcs::TOKEN, "expires_in": 3600, "token_type": "Bearer"})
                .to_string()
        }
        Some("universe/universe-domain") => "googleapis.com".to_owned(),
        Some("project/project-id") => "p".to_owned(),
        _ => return Response::new(404, ""),
    };
    if request.header("metadata-flavor") != Some("Google") {
        return Response::new(403, "");
    }
    Response::new(200, content)
        .with_header("Metadata-Flavor", "Google")
        .with_header("Content-Type", "application/json")
}

fn google_by_the_node(tool: Tool) {
    const NODE: &str = "GCE_METADATA_HOST";
    let server = Gcs::start().unwrap();
    let node = Server::start(google_node).unwrap();
    let clouds = Clouds::start(&[("storage.googleapis.com", server.address())]).unwrap();
    let mut fixture = google(&server, &clouds);
    fixture.environment.extend([
        (NODE, node.address().to_string()),
        // On a node, the tool finds it without a variable.
        (env::ENV_FORWARD, NODE.to_owned()),
    ]);
    plans_and_applies_by(tool, &fixture);
    let tokens = node.requests();
    let tokens = tokens
        .iter()
        .filter(|request| request.path.ends_with("/token"));
    assert!(tokens.count() >= 4, "{:?}", node.requests());
}

fn google_by_a_federated_identity(tool: Tool) {
    let server = Gcs::start().unwrap();
    let tokens = Server::start(google_tokens).unwrap();
    let routes = [
        ("storage.googleapis.com", server.address()),
        ("sts.googleapis.com", tokens.address()),
    ];
    let clouds = Clouds::start(&routes).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let document = json!({
        "type": "external_account", "audience": "//iam.googleapis.com/provider",
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": pod_token(folder.path())},
    });
    let path = folder.path().join("google.json");
    fs::write(&path, document.to_string()).unwrap();
    let mut fixture = google(&server, &clouds);
    fixture.environment.extend([
        ("GOOGLE_APPLICATION_CREDENTIALS", path.display().to_string()),
        (env::IDENTITY_PASS_THROUGH, "false".to_owned()),
    ]);
    // Documents of a run are for its providers.
    fixture.variables = vec![("GOOGLE_APPLICATION_CREDENTIALS", "/of/the/run.json")];
    plans_and_applies_by(tool, &fixture);
    assert!(
        tokens.requests().len() >= 2,
        "{:?}",
        tokens.requests().len()
    );
}
