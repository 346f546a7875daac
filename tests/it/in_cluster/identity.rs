//! The tokens of a pod's identities at the clouds, as the API server makes them.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use integration_tests::{Repository, job};
use job_contract::env;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::ServiceAccount;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};
use test_cluster::ADMIN;

use super::{Fixture, name};

#[tokio::test(flavor = "multi_thread")]
async fn pods_of_runs_ask_for_tokens_of_one_audience_that_last_an_hour() {
    let fixture = or_skip!(Fixture::without_pods().await);
    let provider = "projects/42/locations/global/workloadIdentityPools/pool/providers/cluster";
    let launcher = fixture.serve_with(&[
        (
            env::IDENTITY_AWS_ROLE,
            "arn:aws:iam::123456789012:role/deploy",
        ),
        (env::IDENTITY_GCP_PROVIDER, provider),
        (env::IDENTITY_AZURE_CLIENT_ID, "client"),
        (env::IDENTITY_AZURE_TENANT_ID, "tenant"),
    ]);
    let plan = job::plan(&Repository::fixture());
    launcher.endpoint.accept(&plan).await;
    let state = fixture.state().await;
    let spec = json!(state.job(&name(&plan)).unwrap().spec)["template"]["spec"].clone();
    assert_eq!(spec["automountServiceAccountToken"], false);
    let volumes = spec["volumes"].as_array().unwrap();
    let volume = volumes
        .iter()
        .find(|volume| volume["name"] == "mayfly-identity");
    let sources = volume.unwrap()["projected"]["sources"].as_array().unwrap();
    let client = fixture.cluster.client(ADMIN).unwrap();
    let accounts = Api::<ServiceAccount>::namespaced(client, &fixture.runs);
    let mut audiences = Vec::new();
    for source in sources {
        let projection = &source["serviceAccountToken"];
        let request = TokenRequest {
            spec: TokenRequestSpec {
                audiences: vec![projection["audience"].as_str().unwrap().to_owned()],
                expiration_seconds: projection["expirationSeconds"].as_i64(),
                bound_object_ref: None,
            },
            ..TokenRequest::default()
        };
        // What the kubelet asks for.
        let (name, params) = ("default", PostParams::default());
        let made = accounts.create_token_request(name, &params, &request).await;
        let token = made.unwrap().status.unwrap().token;
        let claims = URL_SAFE_NO_PAD
            .decode(token.split('.').nth(1).unwrap())
            .unwrap();
        let claims: Value = serde_json::from_slice(&claims).unwrap();
        let lasts = claims["exp"].as_u64().unwrap() - claims["iat"].as_u64().unwrap();
        assert!(lasts <= 3600, "{claims}");
        let subject = format!("system:serviceaccount:{}:default", fixture.runs);
        assert_eq!(claims["sub"], subject);
        let of_token = claims["aud"].as_array().unwrap();
        audiences.extend(
            of_token
                .iter()
                .map(|audience| audience.as_str().unwrap().to_owned()),
        );
    }
    let google = format!("https://iam.googleapis.com/{provider}");
    assert_eq!(
        audiences,
        ["sts.amazonaws.com", &google, "api://AzureADTokenExchange"]
    );
}
