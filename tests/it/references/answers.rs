//! What servers answer before they are asked for a secret: challenges and certificates. `crates/secret-stores` tests answers to
//! reads.

use job_contract::env;
use serde_json::json;
use test_peers::clouds::Clouds;
use test_peers::http::{Response, Server};
use test_peers::key_vault::{CLIENT, CLIENT_SECRET, HOSTS, KeyVault, TENANT};

use super::Journey;

/// The token for the vaults of the cloud is for no other resource, whatever a vault asks for.
#[test]
fn a_vault_that_asks_for_a_token_for_another_resource_gets_none() {
    let vault = Server::start(|_| {
        let challenge = "Bearer authorization=\"https://evil.example.test/t\", resource=\"https://evil.example.test\"";
        Response::new(401, "canary").with_header("WWW-Authenticate", challenge)
    })
    .unwrap();
    let tokens = KeyVault::start(&[]).unwrap();
    let [vaults, authority] = HOSTS;
    let clouds = Clouds::start(&[(vaults, vault.address()), (authority, tokens.address())]);
    let clouds = clouds.unwrap();
    let mut environment = clouds.environment().to_vec();
    environment.extend([
        (env::CUSTOMER_AZURE_TENANT_ID, TENANT.to_owned()),
        (env::CUSTOMER_AZURE_CLIENT_ID, CLIENT.to_owned()),
        (env::CUSTOMER_AZURE_CLIENT_SECRET, CLIENT_SECRET.to_owned()),
    ]);
    let journey = Journey::new(environment);
    let error = journey.expect_failure(1, &[("A", "${azure:db@vault-1}")]);
    let refused = "the login was refused in Azure Key Vault (status 401)";
    assert!(error.contains(refused), "{error}");
    let asked = clouds.asked();
    assert!(
        asked.iter().all(|host| HOSTS.contains(&host.as_str())),
        "{asked:?}"
    );
    // Each time with the token for all vaults, which the second login has made anew.
    let given: Vec<_> = vault
        .requests()
        .iter()
        .map(|request| request.header("authorization").map(str::to_owned))
        .collect();
    let usual = Some("Bearer token-of-the-client".to_owned());
    assert_eq!(given, [usual.clone(), usual]);
    let scopes: Vec<_> = tokens
        .requests()
        .iter()
        .map(|request| String::from_utf8_lossy(&request.body).into_owned())
        .collect();
    let scope = "scope=https%3A%2F%2Fvault.azure.net%2F.default";
    assert!(
        scopes.len() == 2 && scopes.iter().all(|form| form.contains(scope)),
        "{scopes:?}"
    );
}

/// The certificate is the same, except for its time.
#[test]
fn a_certificate_that_has_expired_is_not_taken() {
    let answer = |_: &_| {
        Response::new(
            200,
            json!({ "data": { "k": "secret-value-1" } }).to_string(),
        )
    };
    let journey = |server: &Server| {
        let mut journey = Journey::new(Vec::new());
        let authority = journey.machine.scratch("authority");
        std::fs::write(&authority, server.certificate().unwrap()).unwrap();
        journey.environment = vec![
            (env::CUSTOMER_VAULT_ADDRESS, server.url()),
            (env::CUSTOMER_VAULT_TOKEN, "token".to_owned()),
            (env::VAULT_CA_FILE, authority.display().to_string()),
            (env::VAULT_KV_VERSION, "1".to_owned()),
        ];
        journey
    };
    let valid = Server::start_tls(move |request| match &*request.path {
        "/v1/kv/a" => answer(request),
        _ => Response::new(403, ""),
    });
    journey(&valid.unwrap()).expect(&[("A", "${vault:kv/a.k}", "secret-value-1")]);
    let expired = Server::start_tls_expired(answer).unwrap();
    let error = journey(&expired).expect_failure(75, &[("A", "${vault:kv/a.k}")]);
    let expected =
        "the store cannot be reached in Vault (127.0.0.1: no connection, or no valid certificate)";
    assert!(error.contains(expected), "{error}");
    assert!(expired.requests().is_empty());
}
