//! The login `kubernetes` at Vault: `OpenBao` asks the API server whose a token is.

use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use integration_tests::{Repository, job};
use job_contract::env;
use k8s_openapi::api::authentication::v1::{TokenRequest, TokenRequestSpec};
use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::Api;
use kube::api::{DeleteParams, ObjectMeta, PostParams};
use kube::config::Kubeconfig;
use serde_json::json;
use test_cluster::ADMIN;
use test_peers::openbao::OpenBao;

use super::Fixture;

const SECRET: &str = "${vault:kv/app.password}";
const PASSWORD: &str = "bao-canary-7";

/// What an account needs to ask whose a token is.
const REVIEWER: &str = "system:auth-delegator";

async fn token(accounts: &Api<ServiceAccount>, account: &str, audience: Option<&str>) -> String {
    let request = TokenRequest {
        spec: TokenRequestSpec {
            audiences: audience.into_iter().map(str::to_owned).collect(),
            ..TokenRequestSpec::default()
        },
        ..TokenRequest::default()
    };
    let made = accounts
        .create_token_request(account, &PostParams::default(), &request)
        .await;
    made.unwrap().status.unwrap().token
}

async fn create(accounts: &Api<ServiceAccount>, name: &str) {
    let account = ServiceAccount {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        ..ServiceAccount::default()
    };
    let params = PostParams::default();
    accounts.create(&params, &account).await.unwrap();
}

/// Lets an account of a namespace ask, until the namespace is gone.
async fn grant(client: &kube::Client, namespace: &str, account: &str) {
    let owner: Namespace = Api::all(client.clone()).get(namespace).await.unwrap();
    let binding: ClusterRoleBinding = serde_json::from_value(json!({
        "metadata": {
            "name": format!("{namespace}-{account}"),
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Namespace", "name": namespace, "uid": owner.metadata.uid }],
        },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": REVIEWER },
        "subjects": [{ "kind": "ServiceAccount", "name": account, "namespace": namespace }],
    }))
    .unwrap();
    let bindings = Api::<ClusterRoleBinding>::all(client.clone());
    bindings
        .create(&PostParams::default(), &binding)
        .await
        .unwrap();
}

/// A server that takes accounts `executor` of a namespace with tokens for itself.
fn openbao(namespace: &str, reviewer: &str) -> OpenBao {
    let kubeconfig = Kubeconfig::read_from(test_cluster::kubeconfig().unwrap()).unwrap();
    let cluster = kubeconfig.clusters[0].cluster.clone().unwrap();
    let authority = match (
        cluster.certificate_authority_data,
        cluster.certificate_authority,
    ) {
        (Some(data), _) => String::from_utf8(STANDARD.decode(data).unwrap()).unwrap(),
        (None, file) => fs::read_to_string(file.unwrap()).unwrap(),
    };
    let bao = OpenBao::start().unwrap();
    bao.mount_kv("kv", "", 2).unwrap();
    let put = |path: &str, document| bao.write(path, "", &document).unwrap();
    put("kv/data/app", json!({ "data": { "password": PASSWORD } }));
    let policy = "path \"kv/data/app\" { capabilities = [\"read\"] }";
    put("sys/policies/acl/runs", json!({ "policy": policy }));
    put("sys/auth/kubernetes", json!({ "type": "kubernetes" }));
    let config = json!({
        "kubernetes_host": cluster.server,
        "kubernetes_ca_cert": authority,
        "token_reviewer_jwt": reviewer,
        "disable_local_ca_jwt": true,
    });
    put("auth/kubernetes/config", config);
    let role = json!({
        "bound_service_account_names": "executor",
        "bound_service_account_namespaces": namespace,
        "audience": "vault",
        "token_policies": "runs",
    });
    put("auth/kubernetes/role/runs", role);
    bao
}

#[tokio::test(flavor = "multi_thread")]
async fn vault_asks_the_cluster_whose_a_token_is() {
    let fixture = or_skip!(Fixture::new().await);
    let client = fixture.cluster.client(ADMIN).unwrap();
    let accounts = Api::<ServiceAccount>::namespaced(client.clone(), &fixture.runs);
    for name in ["executor", "other", "reviewer"] {
        create(&accounts, name).await;
    }
    // Its account has another one of this name as its successor. It does not expire before the test ends.
    let old = token(&accounts, "executor", Some("vault")).await;
    let params = DeleteParams::default();
    accounts.delete("executor", &params).await.unwrap();
    create(&accounts, "executor").await;
    grant(&client, &fixture.runs, "reviewer").await;
    let bao = openbao(&fixture.runs, &token(&accounts, "reviewer", None).await);

    let (machine, repository) = (&fixture.machine, Repository::fixture());
    let (url, file) = (bao.url(), machine.data_dir().join("token"));
    let settings = [
        (env::CUSTOMER_VAULT_ADDRESS, &*url),
        (env::VAULT_METHOD, "kubernetes"),
        (env::CUSTOMER_VAULT_ROLE_NAME, "runs"),
        (env::VAULT_JWT_FILE, file.to_str().unwrap()),
    ];
    let look = machine.data_dir().join("look");
    let lines = format!("echo \"it is $A\"; printf %s \"$A\" > '{}'", look.display());
    let mut step = job::scripts(&repository, vec![job::bash(1, &lines)]);
    let variables = &mut step.environment_variables;
    variables.insert("A".to_owned(), SECRET.to_owned());
    let refused = |job_id: &str, token: String| {
        let step = job::in_job(&step, job_id);
        machine.queue(&[&step]);
        fs::write(&file, token).unwrap();
        let run = settings
            .iter()
            .fold(machine.executor(&step), |run, (name, value)| {
                run.env(name, value)
            });
        let outcome = run.run().expect_code(1);
        let text = "the login was refused in Vault (status 403)";
        assert!(outcome.error().contains(text), "{outcome}");
    };
    refused("901", token(&accounts, "other", Some("vault")).await);
    refused(
        "902",
        token(&accounts, "executor", Some("sts.amazonaws.com")).await,
    );

    machine.queue(&[&step]);
    fs::write(&file, token(&accounts, "executor", Some("vault")).await).unwrap();
    let exports = settings.map(|(name, value)| format!("export {name}='{value}'\n"));
    fixture.image_that_first(&exports.concat());
    let launcher = fixture.serve();
    launcher.endpoint.accept(&step).await;
    fixture.until_over(&step, "Complete").await;
    assert_eq!(fs::read_to_string(&look).unwrap(), PASSWORD);
    let state = fixture.state().await;
    let data = state
        .secrets
        .iter()
        .flat_map(|secret| secret.data.iter().flatten());
    let documents: Vec<_> = data.map(|(_, value)| decoded(&value.0)).collect();
    assert!(
        documents.iter().any(|text| text.contains(SECRET)),
        "{documents:?}"
    );
    let shown = json!([
        state.jobs,
        state.pods,
        state.events,
        documents,
        fixture.cluster.container_logs(),
        machine.step_output(&step),
    ]);
    assert!(shown.to_string().contains("it is ***"), "{shown:#}");
    assert!(!shown.to_string().contains(PASSWORD), "{shown:#}");

    // Only the API server knows that this one counts no more.
    refused("903", old);
}

/// What a Secret has, and also what that encodes.
fn decoded(value: &[u8]) -> String {
    let text = String::from_utf8_lossy(value).into_owned();
    let inner = STANDARD.decode(text.trim()).unwrap_or_default();
    format!("{text}\n{}", String::from_utf8_lossy(&inner))
}
