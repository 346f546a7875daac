//! Whole manifests, as snapshots and by hand where it matters.

use job_contract::Records;
use job_contract::identity::{AzureIdentity, Identities};
use proptest::prelude::*;
use rstest::rstest;
use serde_json::{Value, json};

use super::deployment::PluginCache;
use super::executor_kind::{ExecutorKind, ExecutorKindSetting};
use super::job_data::Mode;
use super::overlay::Overlay;
use super::pod_security::{Level, violations};
use super::policy::Policy;
use super::*;

fn job(step_type: &str, variables: &[(&str, &str)]) -> JobData {
    serde_json::from_value(json!({
        "type": step_type,
        "organizationId": "0b1f6c1e-9d51-4c1f-8b1e-0d6a5f6f2a10",
        "workspaceId": "7c0f2b44-52f3-4a0e-9a5d-3a1d8e7c9b21",
        "jobId": "412",
        "stepId": "5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101",
        "terraformVersion": "1.9.8",
        "source": "https://git.example.test/acme/network.git",
        "branch": "main",
        "folder": "/",
        "vcsType": "PUBLIC",
        "environmentVariables": variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), json!(value)))
            .collect::<serde_json::Map<String, Value>>(),
    }))
    .unwrap()
}

fn build(job: &JobData, deployment: &Deployment) -> Result<Manifest, ManifestErrors> {
    super::build(&Document::written(job), deployment)
}

/// Every variable of contract 3.3.
const ALL_OPTIONS: &[(&str, &str)] = &[
    (env::EPHEMERAL_SWITCH, "1"),
    (
        env::EPHEMERAL_NODE_SELECTOR,
        "kubernetes.io/os=linux;pool=terraform;",
    ),
    (
        env::EPHEMERAL_TOLERATIONS,
        "dedicated=terraform:Equal:NoSchedule;spot:Exists:NoExecute:60",
    ),
    (env::EPHEMERAL_SERVICE_ACCOUNT, "terraform-runner"),
    (env::EPHEMERAL_ANNOTATIONS, "acme.example/owner=platform"),
    (
        env::EPHEMERAL_POD_ANNOTATIONS,
        "sidecar.example/inject=false",
    ),
    (
        env::EPHEMERAL_LABELS,
        "team=platform;terrakube.io/organization=forged",
    ),
    (env::EPHEMERAL_CONFIG_MAP, "terraform-cli-config"),
    (env::EPHEMERAL_CONFIG_MAP_PATH, "/etc/terraform-cli"),
    (
        env::EPHEMERAL_ENV_CONFIG_MAPS,
        "executor-config, extra-config",
    ),
    (
        env::EPHEMERAL_POD_SECURITY,
        "fsGroup=2000;runAsNonRoot=true;runAsUser=1001",
    ),
    (env::EPHEMERAL_SECURITY, "allowPrivilegeEscalation=false"),
    (env::EPHEMERAL_CPU_REQUEST, "300m"),
    (env::EPHEMERAL_CPU_LIMIT, "1"),
    (env::EPHEMERAL_MEMORY_REQUEST, "256Mi"),
    (env::EPHEMERAL_MEMORY_LIMIT, "1Gi"),
    (env::EPHEMERAL_STORAGE_REQUEST, "1Gi"),
    (env::EPHEMERAL_STORAGE_LIMIT, "3Gi"),
    (env::EPHEMERAL_ENV, "TeamFlag=false;GREETING=a=b"),
    (env::PLUGIN_CACHE_DIR, "/var/cache/tf"),
    (env::PLUGIN_CACHE_CLAIM, "plugin-cache"),
];

/// The pod's spec as JSON, from a workspace's variables.
fn pod(deployment: &Deployment, variables: &[(&str, &str)]) -> Value {
    let manifest = build(&job("terraformPlan", variables), deployment).unwrap();
    manifest.to_list()["items"][0]["spec"]["template"]["spec"].clone()
}

fn executor(pod: &Value) -> &Value {
    let containers = pod["containers"].as_array().unwrap();
    containers.iter().find(|c| c["name"] == "executor").unwrap()
}

/// The value of an environment variable, or where it comes from.
fn env_of<'a>(pod: &'a Value, name: &str) -> Option<&'a Value> {
    let variables = executor(pod)["env"].as_array().unwrap();
    let mut found = variables.iter().filter(|v| v["name"] == name);
    let variable = found.next()?;
    assert!(found.next().is_none(), "{name} is set twice");
    Some(variable.get("value").unwrap_or(&variable["valueFrom"]))
}

fn errors(deployment: &Deployment, variables: &[(&str, &str)]) -> Vec<String> {
    let errors = build(&job("terraformPlan", variables), deployment).unwrap_err();
    errors.errors.iter().map(ToString::to_string).collect()
}

fn deployment_with(variables: &[(&str, &str)]) -> Deployment {
    let variables = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    let (defaults, errors) = overrides::read(&variables, Names::DEPLOYMENT);
    assert_eq!(errors, []);
    Deployment {
        defaults,
        ..Deployment::default()
    }
}

/// The list without the encoded document, which is long and tested elsewhere.
fn shown(manifest: &Manifest) -> Value {
    let mut list = manifest.to_list();
    if let Some(data) = list.pointer_mut("/items/1/data/job-data") {
        *data = json!("[job data]");
    }
    if let Some(value) = list.pointer_mut("/items/0/spec/template/spec/containers/0/env/1/value") {
        *value = json!("[job data]");
    }
    list
}

#[test]
fn a_plan_has_the_defaults() {
    let manifest = build(&job("terraformPlan", &[]), &Deployment::default()).unwrap();
    insta::assert_yaml_snapshot!(shown(&manifest));
}

#[test]
fn an_apply_has_more_time_to_stop() {
    let manifest = build(&job("terraformApply", &[]), &Deployment::default()).unwrap();
    insta::assert_yaml_snapshot!(shown(&manifest));
}

#[test]
fn every_variable_has_its_place() {
    let manifest = build(&job("terraformPlan", ALL_OPTIONS), &Deployment::default()).unwrap();
    insta::assert_yaml_snapshot!(shown(&manifest));
}

#[test]
fn env_mode_makes_one_object_with_rights_on_jobs_alone() {
    let deployment = Deployment {
        job_data_mode: Mode::Env,
        ..Deployment::default()
    };
    let job = job("terraformPlan", &[]);
    let manifest = build(&job, &deployment).unwrap();
    assert_eq!(manifest.secret, None);
    let spec = manifest.job.spec.clone().unwrap();
    assert_eq!(spec.backoff_limit, Some(0));
    assert_eq!(spec.pod_failure_policy, None);
    let list = manifest.to_list();
    let pod = &list["items"][0]["spec"]["template"]["spec"];
    assert_eq!(
        env_of(pod, env::JOB_DATA).unwrap(),
        &json!(job_contract::encoding::encode(&job)),
        "as the stock launcher writes it"
    );
    insta::assert_yaml_snapshot!(shown(&manifest));
}

#[rstest]
#[case("terraformPlan", 60)]
#[case("terraformPlanDestroy", 60)]
#[case("customScripts", 60)]
#[case("approval", 60)]
#[case("terraformApply", 300)]
#[case("terraformDestroy", 300)]
fn the_executor_gets_the_grace_period_of_its_pod(#[case] step_type: &str, #[case] seconds: i64) {
    let manifest = build(&job(step_type, &[]), &Deployment::default()).unwrap();
    let pod = manifest.to_list()["items"][0]["spec"]["template"]["spec"].clone();
    assert_eq!(pod["terminationGracePeriodSeconds"], seconds);
    assert_eq!(
        env_of(&pod, env::GRACE_PERIOD_SECONDS).unwrap(),
        &json!(seconds.to_string())
    );
}

#[test]
fn every_pod_is_restricted_and_asks_for_resources() {
    for variables in [&[][..], ALL_OPTIONS] {
        let manifest = build(&job("terraformPlan", variables), &Deployment::default()).unwrap();
        let spec = manifest.job.spec.unwrap().template.spec.unwrap();
        assert_eq!(violations(&spec, Level::Restricted), [""; 0]);
    }
    let pod = pod(&Deployment::default(), &[]);
    assert_eq!(pod["automountServiceAccountToken"], false);
    assert_eq!(pod["enableServiceLinks"], false);
    assert_eq!(pod["restartPolicy"], "Never");
    assert_eq!(
        pod["securityContext"],
        json!({
            "fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch", "runAsGroup": 1000,
            "runAsNonRoot": true, "runAsUser": 1000, "seccompProfile": {"type": "RuntimeDefault"},
        })
    );
    assert_eq!(
        executor(&pod)["securityContext"],
        json!({
            "allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}, "privileged": false,
            "readOnlyRootFilesystem": true,
        })
    );
    assert_eq!(
        executor(&pod)["resources"],
        json!({
            "requests": {"cpu": "250m", "memory": "512Mi", "ephemeral-storage": "2Gi"},
            "limits": {"memory": "2Gi"},
        })
    );
}

/// A queue that suspends a Job again ends its pod, and later makes another.
#[rstest]
#[case::claims_outlive_the_pod(Records::Platform, ExecutorKind::Mayfly, true)]
#[case::claims_end_with_the_pod(Records::Pod, ExecutorKind::Mayfly, false)]
#[case::another_executor_claims_nothing(Records::Platform, ExecutorKind::Stock, false)]
fn a_queue_of_the_cluster_needs_claims_that_outlive_the_pod(
    #[case] records: Records,
    #[case] kind: ExecutorKind,
    #[case] is_built: bool,
) {
    let deployment = |variables| Deployment {
        records: Some(records),
        executor_kind: ExecutorKindSetting::Always(kind),
        ..deployment_with(variables)
    };
    let queue = "kueue.x-k8s.io/queue-name=runs";
    let labels = [(env::EPHEMERAL_LABELS, queue)];
    for built in [
        build(&job("terraformApply", &labels), &deployment(&[])),
        build(&job("terraformApply", &[]), &deployment(&labels)),
    ] {
        let error = built.err().map(|errors| errors.to_string());
        assert_eq!(error.is_none(), is_built, "{error:?}");
        assert!(
            error.is_none_or(|text| text.contains("`kueue.x-k8s.io/queue-name` must not be set")),
        );
    }
    assert_eq!(deployment_errors(&deployment(&labels)).is_empty(), is_built);
}

#[test]
fn only_a_step_that_never_began_is_started_again() {
    let deployment = Deployment {
        records: Some(Records::Platform),
        ..Deployment::default()
    };
    let manifest = build(&job("terraformApply", &[]), &deployment).unwrap();
    let spec = manifest.job.spec.unwrap();
    assert_eq!(spec.backoff_limit, Some(2));
    assert_eq!(spec.suspend, Some(true));
    let rules = spec.pod_failure_policy.unwrap().rules;
    let exit_codes = rules[0].on_exit_codes.clone().unwrap();
    assert_eq!(rules[0].action, "FailJob");
    assert_eq!(exit_codes.operator, "NotIn");
    assert_eq!(exit_codes.values, [75, 137]);
    assert_eq!(exit_codes.container_name.as_deref(), Some("executor"));
    assert_eq!(rules[1].action, "Ignore");
    assert_eq!(
        rules[1].on_pod_conditions.clone().unwrap()[0].type_,
        "DisruptionTarget"
    );
    // Killed, and not by a disruption: it would only be killed again.
    let killed = rules[2].on_exit_codes.clone().unwrap();
    assert_eq!(
        (rules[2].action.as_str(), killed.values),
        ("FailJob", vec![137])
    );
}

#[test]
fn settings_are_shown_without_the_values_of_environment() {
    let mut deployment = deployment_with(&[(env::EPHEMERAL_ENV, "TOKEN=hunter2")]);
    deployment.overlay = with_overlay(&OVERLAY.replace("proxy:3128", "hunter2")).overlay;
    let shown = format!("{deployment:?}");
    assert!(
        shown.contains("TOKEN") && !shown.contains("hunter2"),
        "{shown}"
    );
}

#[test]
fn the_secret_holds_the_document_and_shares_the_jobs_name() {
    let job = job("terraformPlan", &[]);
    let manifest = build(&job, &Deployment::default()).unwrap();
    let secret = manifest.secret.unwrap();
    let data = &secret.data.unwrap()["job-data"].0;
    assert_eq!(job_contract::encoding::decode(data).unwrap(), job);
    assert_eq!(secret.metadata.name, manifest.job.metadata.name);
    assert_eq!(secret.metadata.namespace, manifest.job.metadata.namespace);
    assert_eq!(secret.immutable, Some(true));
}

#[test]
fn a_document_too_large_for_one_variable_is_spread_over_several_and_is_never_a_file() {
    let large = "x".repeat(150_000);
    let job = job("terraformPlan", &[("LARGE", &large)]);
    let manifest = build(&job, &Deployment::default()).unwrap();
    let pod = manifest.to_list()["items"][0]["spec"]["template"]["spec"].clone();
    for (variable, key) in [
        (env::JOB_DATA, "job-data"),
        ("EphemeralJobData_1", "job-data-1"),
    ] {
        let name = "job-412-5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f0101";
        let source = json!({"secretKeyRef": {"name": name, "key": key}});
        assert_eq!(env_of(&pod, variable).unwrap(), &source);
    }
    assert_eq!(env_of(&pod, "EphemeralJobData_2"), None);
    assert_eq!(env_of(&pod, env::JOB_DATA_FILE), None);
    let data = manifest.secret.unwrap().data.unwrap();
    let parts: Vec<u8> = data.values().flat_map(|part| part.0.clone()).collect();
    assert_eq!(job_contract::encoding::decode(&parts).unwrap(), job);
    let digest = json!(job_contract::encoding::digest(&[parts]));
    assert_eq!(env_of(&pod, env::JOB_DATA_DIGEST), Some(&digest));
    let of_secrets = |volume: &Value| volume.get("secret").is_some();
    assert!(!pod["volumes"].as_array().unwrap().iter().any(of_secrets));
}

#[test]
fn a_stock_executor_gets_one_variable_or_a_refusal_with_the_sizes() {
    let stock = Deployment {
        image: "azbuilder/executor:2.22.0".to_owned(),
        ..Deployment::default()
    };
    let large = "x".repeat(150_000);
    let errors = errors(&stock, &[("LARGE", &large)]);
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(
        errors[0].contains("a stock executor reads one environment string, which holds 131054"),
        "{errors:?}"
    );
}

/// Byte for byte, whatever is in it.
#[test]
fn the_executor_receives_the_document_as_it_was_posted() {
    let document = concat!(
        " {\n  \"zebra\": {\"b\": 1, \"a\": [null, 1.50]}, \"type\":\"terraformPlan\",\r\n",
        "\t\"organizationId\":\"o\", \"workspaceId\" : \"w\", \"jobId\":412, \"stepId\":\"s\",",
        "\"variables\":[{\"key\":\"list\",\"value\":\"[1]\",\"hcl\":true,\"sensitive\":null}],",
        "\"commandList\":null,\"environmentVariables\":{\"A\":null,\"B\":7},\"policyList\":[{\"p\":1}]} \n"
    );
    let mut modes = Vec::new();
    for job_data_mode in [Mode::Secret, Mode::Env] {
        for image in [
            super::deployment::DEFAULT_IMAGE,
            "azbuilder/executor:2.22.0",
        ] {
            modes.push(Deployment {
                job_data_mode,
                image: image.to_owned(),
                ..Deployment::default()
            });
        }
    }
    for deployment in modes {
        let posted = Document::from_json(document.as_bytes().to_vec()).unwrap();
        let manifest = super::build(&posted, &deployment).unwrap();
        let pod = manifest.to_list()["items"][0]["spec"]["template"]["spec"].clone();
        let encoded = if let Some(secret) = manifest.secret {
            secret.data.unwrap()["job-data"].0.clone()
        } else {
            let literal = env_of(&pod, env::JOB_DATA).unwrap();
            literal.as_str().unwrap().as_bytes().to_vec()
        };
        let received = base64::Engine::decode(&base64::prelude::BASE64_STANDARD, encoded).unwrap();
        assert_eq!(received, document.as_bytes());
    }
}

#[test]
fn a_workspaces_selector_replaces_the_deployments_and_a_blank_one_clears_it() {
    let deployment = deployment_with(&[(env::EPHEMERAL_NODE_SELECTOR, "pool=default;disk=ssd")]);
    assert_eq!(
        pod(&deployment, &[])["nodeSelector"],
        json!({"pool": "default", "disk": "ssd"})
    );
    let own = [(env::EPHEMERAL_NODE_SELECTOR, "pool=own")];
    assert_eq!(
        pod(&deployment, &own)["nodeSelector"],
        json!({"pool": "own"})
    );
    for blank in ["", "  ", ";"] {
        let own = [(env::EPHEMERAL_NODE_SELECTOR, blank)];
        assert_eq!(
            pod(&deployment, &own)["nodeSelector"],
            Value::Null,
            "{blank:?}"
        );
    }
}

#[test]
fn the_workspace_overrides_the_deployment_in_every_variable() {
    let defaults: Vec<(&str, &str)> = [
        (env::EPHEMERAL_TOLERATIONS, "other"),
        (env::EPHEMERAL_SERVICE_ACCOUNT, "other"),
        (env::EPHEMERAL_ANNOTATIONS, "acme.example/owner=other"),
        (
            env::EPHEMERAL_POD_ANNOTATIONS,
            "sidecar.example/inject=other",
        ),
        (env::EPHEMERAL_LABELS, "team=other"),
        (env::EPHEMERAL_NODE_SELECTOR, "other=x"),
        (env::EPHEMERAL_CONFIG_MAP, "other"),
        (env::EPHEMERAL_CONFIG_MAP_PATH, "/other"),
        (env::EPHEMERAL_ENV_CONFIG_MAPS, "other"),
        (env::EPHEMERAL_POD_SECURITY, "fsGroup=9;runAsUser=9"),
        (env::EPHEMERAL_SECURITY, "allowPrivilegeEscalation=true"),
        (env::EPHEMERAL_CPU_REQUEST, "9"),
        (env::EPHEMERAL_CPU_LIMIT, "9"),
        (env::EPHEMERAL_MEMORY_REQUEST, "9Gi"),
        (env::EPHEMERAL_MEMORY_LIMIT, "9Gi"),
        (env::EPHEMERAL_STORAGE_REQUEST, "9Gi"),
        (env::EPHEMERAL_STORAGE_LIMIT, "9Gi"),
        (env::DEPLOYMENT_PLUGIN_CACHE_DIR, "/other-cache"),
        (env::DEPLOYMENT_PLUGIN_CACHE_CLAIM, "other"),
    ]
    .into();
    let job = job("terraformPlan", ALL_OPTIONS);
    let with_defaults = build(&job, &deployment_with(&defaults)).unwrap().to_list();
    let without = build(&job, &Deployment::default()).unwrap().to_list();
    let (mut with_defaults, mut without) = (with_defaults, without);
    for list in [&mut with_defaults, &mut without] {
        let variables = list
            .pointer_mut("/items/0/spec/template/spec/containers/0/env")
            .unwrap();
        variables
            .as_array_mut()
            .unwrap()
            .sort_by_key(|v| v["name"].to_string());
    }
    assert_eq!(with_defaults, without);
}

#[test]
fn the_deployment_counts_where_the_workspace_is_silent() {
    let deployment = deployment_with(&[
        (env::EPHEMERAL_SERVICE_ACCOUNT, "runner"),
        (env::EPHEMERAL_ENV, "HTTPS_PROXY=http://proxy"),
        (env::EPHEMERAL_LABELS, "team=platform;stage=dev"),
        (env::DEPLOYMENT_PLUGIN_CACHE_DIR, "/cache"),
    ]);
    let variables = [
        (env::EPHEMERAL_SERVICE_ACCOUNT, " "),
        (env::EPHEMERAL_LABELS, "stage=prod"),
    ];
    let pod = pod(&deployment, &variables);
    assert_eq!(pod["serviceAccountName"], "runner");
    assert_eq!(env_of(&pod, "HTTPS_PROXY").unwrap(), "http://proxy");
    assert_eq!(env_of(&pod, "TF_PLUGIN_CACHE_DIR").unwrap(), "/cache");
    let manifest = build(&job("terraformPlan", &variables), &deployment).unwrap();
    let labels = manifest.job.metadata.labels.unwrap();
    assert_eq!(
        (labels["team"].as_str(), labels["stage"].as_str()),
        ("platform", "prod")
    );
}

#[test]
fn the_lower_level_is_changed_when_a_request_exceeds_a_limit() {
    let lifted = pod(
        &Deployment::default(),
        &[(env::EPHEMERAL_MEMORY_REQUEST, "4Gi")],
    );
    assert_eq!(executor(&lifted)["resources"]["limits"]["memory"], "4Gi");
    let lowered = pod(
        &Deployment::default(),
        &[(env::EPHEMERAL_MEMORY_LIMIT, "256Mi")],
    );
    assert_eq!(
        executor(&lowered)["resources"]["requests"]["memory"],
        "256Mi"
    );
}

#[test]
fn a_workspace_cannot_read_the_platforms_secrets_through_its_own_variables() {
    let variables = [(
        env::EPHEMERAL_ENV,
        "TF_VAR_x=$(InternalSecret);TF_VAR_cost=5$;TF_VAR_two=$$",
    )];
    let pod = pod(&stock(Deployment::default()), &variables);
    assert_eq!(env_of(&pod, "TF_VAR_x").unwrap(), "$$(InternalSecret)");
    assert_eq!(env_of(&pod, "TF_VAR_cost").unwrap(), "5$$");
    assert_eq!(env_of(&pod, "TF_VAR_two").unwrap(), "$$$$");
    let cache = [(env::PLUGIN_CACHE_DIR, "/cache/$(InternalSecret)")];
    let pod = self::pod(&Deployment::default(), &cache);
    assert_eq!(
        env_of(&pod, "TF_PLUGIN_CACHE_DIR").unwrap(),
        "/cache/$$(InternalSecret)"
    );
}

#[rstest]
#[case(env::EPHEMERAL_NODE_SELECTOR, "=x")]
#[case(env::EPHEMERAL_NODE_SELECTOR, "a=b c")]
#[case(env::EPHEMERAL_TOLERATIONS, "key=v:Exists")]
#[case(env::EPHEMERAL_SERVICE_ACCOUNT, "Not A Name")]
#[case(env::EPHEMERAL_ANNOTATIONS, "=x")]
#[case(env::EPHEMERAL_ANNOTATIONS, "mayfly.dev/x=y")]
#[case(env::EPHEMERAL_POD_ANNOTATIONS, "a/b/c=x")]
#[case(env::EPHEMERAL_LABELS, "a=b=c")]
#[case(env::EPHEMERAL_LABELS, "mayfly.dev/job-id=1")]
#[case(env::EPHEMERAL_LABELS, "terrakube.io/other=1")]
#[case(env::EPHEMERAL_LABELS, "app.kubernetes.io/managed-by=me")]
#[case(env::EPHEMERAL_CONFIG_MAP, "a_b")]
#[case(env::EPHEMERAL_CONFIG_MAP_PATH, "relative")]
#[case(env::EPHEMERAL_ENV_CONFIG_MAPS, "ok,NOT")]
#[case(env::EPHEMERAL_POD_SECURITY, "fsGroup=many")]
#[case(env::EPHEMERAL_POD_SECURITY, "fsGroup=-1")]
#[case(env::EPHEMERAL_POD_SECURITY, "runAsNonRoot=yes")]
#[case(env::EPHEMERAL_POD_SECURITY, "hostUsers=true")]
#[case(env::EPHEMERAL_SECURITY, "capabilities=ALL")]
#[case(env::EPHEMERAL_SECURITY, "allowPrivilegeEscalation=")]
#[case(env::EPHEMERAL_CPU_REQUEST, "lots")]
#[case(env::EPHEMERAL_CPU_LIMIT, "-1")]
#[case(env::EPHEMERAL_MEMORY_REQUEST, "1GiB")]
#[case(env::EPHEMERAL_MEMORY_LIMIT, "1 Gi")]
#[case(env::EPHEMERAL_MEMORY_LIMIT, "512")]
#[case(env::EPHEMERAL_MEMORY_LIMIT, "15Mi")]
#[case(env::EPHEMERAL_STORAGE_REQUEST, "1e")]
#[case(env::EPHEMERAL_STORAGE_LIMIT, "99999999999999999999999999")]
#[case(env::EPHEMERAL_STORAGE_LIMIT, "10")]
#[case(env::EPHEMERAL_ENV, "EphemeralJobData=x")]
#[case(env::EPHEMERAL_ENV, "EphemeralFlagBatch=false")]
#[case(env::EPHEMERAL_ENV, "1A=x")]
#[case(env::EPHEMERAL_ENV, "=hunter2")]
#[case(env::EPHEMERAL_IMAGE, "NOT AN IMAGE")]
#[case(env::PLUGIN_CACHE_DIR, "/proc")]
#[case(env::PLUGIN_CACHE_CLAIM, "-")]
fn a_wrong_setting_is_refused_by_its_name(#[case] variable: &str, #[case] value: &str) {
    let errors = errors(&Deployment::default(), &[(variable, value)]);
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(
        errors[0].starts_with(&format!("`{variable}` ")),
        "{errors:?}"
    );
    assert!(!errors[0].contains("hunter2"), "{errors:?}");
}

#[test]
fn a_workspace_changes_nothing_in_the_environment_of_our_executor() {
    let hostile = "LOCALDOMAIN=attacker.example;RES_OPTIONS=x;HOSTALIASES=/tmp/x;LD_PRELOAD=x;InternalSecret=x;\
                   MAYFLY_LOG_FILE=/tmp/x;HTTPS_PROXY=x;TF_LOG=debug;TeamFlag=x";
    let deployment = deployment_with(&[(env::EPHEMERAL_ENV, "HTTPS_PROXY=http://proxy")]);
    let with = pod(&deployment, &[(env::EPHEMERAL_ENV, hostile)]);
    let without_digest = |pod: &Value| {
        let mut executor = executor(pod).clone();
        let variables = executor["env"].as_array_mut().unwrap();
        variables.retain(|variable| variable["name"] != env::JOB_DATA_DIGEST);
        executor
    };
    let unchanged = without_digest(&pod(&deployment, &[]));
    assert_eq!(without_digest(&with), unchanged);
    assert_eq!(env_of(&with, "HTTPS_PROXY").unwrap(), "http://proxy");
}

fn stock(deployment: Deployment) -> Deployment {
    Deployment {
        image: "azbuilder/executor:2.31.0".to_owned(),
        ..deployment
    }
}

#[test]
fn a_stock_executor_gets_harmless_variables_and_the_run_log_names_the_others() {
    let deployment = stock(deployment_with(&[(env::EPHEMERAL_ENV, "TF_LOG=other;B=c")]));
    let requested =
        "TerrakubeEnableColorOutput=false;TerrakubeRedisSSL=false;LOCALDOMAIN=x;TF_LOG=debug";
    let job = job("terraformPlan", &[(env::EPHEMERAL_ENV, requested)]);
    let manifest = build(&job, &deployment).unwrap();
    let pod = manifest.to_list()["items"][0]["spec"]["template"]["spec"].clone();
    assert_eq!(env_of(&pod, "TerrakubeEnableColorOutput").unwrap(), "false");
    assert_eq!(env_of(&pod, "TF_LOG").unwrap(), "debug");
    assert_eq!(env_of(&pod, "B").unwrap(), "c");
    assert_eq!(env_of(&pod, "LOCALDOMAIN"), None);
    assert_eq!(env_of(&pod, "TerrakubeRedisSSL"), None);
    assert_eq!(manifest.notes.len(), 2, "{:?}", manifest.notes);
    assert_eq!(manifest.of_attempt("1").notes, manifest.notes);
}

#[test]
fn the_error_of_a_limit_without_unit_names_the_unit() {
    let limit = [(env::EPHEMERAL_MEMORY_LIMIT, "2048")];
    let errors = errors(&Deployment::default(), &limit);
    assert!(
        errors[0].contains("counts bytes") && errors[0].contains("`Mi`"),
        "{errors:?}"
    );
    for limit in ["16Mi", "0"] {
        let limits = [
            (env::EPHEMERAL_MEMORY_LIMIT, limit),
            (env::EPHEMERAL_MEMORY_REQUEST, "0"),
        ];
        build(&job("terraformPlan", &limits), &Deployment::default()).unwrap();
    }
}

#[test]
fn annotations_of_the_deployment_keep_to_the_standard_too() {
    let key = "container.apparmor.security.beta.kubernetes.io/executor";
    let annotation = format!("{key}=unconfined");
    let defaults = deployment_with(&[(env::EPHEMERAL_POD_ANNOTATIONS, &annotation)]);
    let overlay = with_overlay(&format!("metadata: {{annotations: {{{key}: unconfined}}}}"));
    for (deployment, subject) in [
        (defaults, env::EPHEMERAL_POD_ANNOTATIONS),
        (overlay, env::POD_TEMPLATE_FILE),
    ] {
        let errors = build(&job("terraformPlan", &[]), &deployment).unwrap_err();
        let error = &errors.errors[0];
        assert_eq!(
            (error.variable.as_str(), errors.origin),
            (subject, Origin::Deployment)
        );
        assert!(error.text.contains(key), "{error}");
        let open = Deployment {
            policy: serde_saphyr::from_str("podSecurity: privileged").unwrap(),
            ..deployment
        };
        build(&job("terraformPlan", &[]), &open).unwrap();
    }
}

#[test]
fn each_key_of_the_security_variables_reaches_the_pod() {
    let open = Deployment {
        policy: serde_saphyr::from_str("podSecurity: privileged").unwrap(),
        ..Deployment::default()
    };
    let of_pod = "fsGroup=1;fsGroupChangePolicy=Always;runAsGroup=2;runAsUser=0;seccompProfile=unconfined;supplementalGroups=3,4";
    let of_container = "privileged=true;readOnlyRootFilesystem=true;runAsGroup=5;runAsNonRoot=true;runAsUser=6;\
                        seccompProfile=RuntimeDefault";
    let pod = pod(
        &open,
        &[
            (env::EPHEMERAL_POD_SECURITY, of_pod),
            (env::EPHEMERAL_SECURITY, of_container),
        ],
    );
    assert_eq!(
        pod["securityContext"],
        json!({
            "fsGroup": 1, "fsGroupChangePolicy": "Always", "runAsGroup": 2, "runAsNonRoot": false, "runAsUser": 0,
            "seccompProfile": {"type": "Unconfined"}, "supplementalGroups": [3, 4],
        })
    );
    assert_eq!(
        executor(&pod)["securityContext"],
        json!({
            "allowPrivilegeEscalation": true, "capabilities": {"drop": ["ALL"]}, "privileged": true,
            "readOnlyRootFilesystem": true, "runAsGroup": 5, "runAsNonRoot": true, "runAsUser": 6,
            "seccompProfile": {"type": "RuntimeDefault"},
        })
    );
}

#[test]
fn a_config_map_that_a_workspace_names_is_no_environment_of_our_executor() {
    let sources = |deployment: &Deployment, variables: &[(&str, &str)]| {
        let pod = pod(deployment, variables);
        let sources = executor(&pod)["envFrom"].as_array().unwrap().clone();
        let maps = sources
            .into_iter()
            .filter(|source| !source["configMapRef"].is_null());
        maps.collect::<Vec<_>>()
    };
    let own = |name: &str| json!({"configMapRef": {"name": name}});
    let for_children =
        |name: &str| json!({"configMapRef": {"name": name}, "prefix": "MAYFLY_RUN_ENV_"});
    let requested = [(env::EPHEMERAL_ENV_CONFIG_MAPS, "ours,theirs")];
    let operators = deployment_with(&[(env::EPHEMERAL_ENV_CONFIG_MAPS, "usual")]);
    let operators = Deployment {
        env_config_maps: vec!["ours".to_owned()],
        ..operators
    };
    assert_eq!(sources(&operators, &[]), [own("ours"), own("usual")]);
    assert_eq!(
        sources(&operators, &requested),
        [own("ours"), for_children("ours"), for_children("theirs")]
    );
    let stock = Deployment {
        executor_kind: ExecutorKindSetting::Always(ExecutorKind::Stock),
        ..operators
    };
    assert_eq!(sources(&stock, &requested), [own("ours"), own("theirs")]);
}

#[test]
fn a_workspace_moves_no_config_map_of_the_deployment_over_what_the_deployment_mounts() {
    let mut deployment = deployment_with(&[(env::EPHEMERAL_CONFIG_MAP, "cli-config")]);
    deployment.overlay = with_overlay(OVERLAY).overlay;
    let errors = errors(&deployment, &[(env::EPHEMERAL_CONFIG_MAP_PATH, "/opt/ca")]);
    assert!(
        errors[0].contains(env::EPHEMERAL_CONFIG_MAP_PATH),
        "{errors:?}"
    );
}

#[rstest]
#[case("/data/", "/data")]
#[case("//var/cache/./tf/", "/var/cache/tf")]
fn a_mount_has_the_shortest_spelling_of_its_path(#[case] requested: &str, #[case] mounted: &str) {
    let pod = pod(
        &Deployment::default(),
        &[(env::PLUGIN_CACHE_DIR, requested)],
    );
    assert_eq!(env_of(&pod, "TF_PLUGIN_CACHE_DIR").unwrap(), mounted);
    let mounts = executor(&pod)["volumeMounts"].as_array().unwrap();
    let cache = mounts.iter().find(|m| m["name"] == "tf-plugin-volume");
    assert_eq!(cache.unwrap()["mountPath"], mounted);
}

#[rstest]
#[case("/data", "/data/")]
#[case("/mnt/all", "/mnt/all/plugins")]
fn a_config_map_and_a_plugin_cache_stay_clear_of_each_other(
    #[case] map: &str,
    #[case] cache: &str,
) {
    let variables = [
        (env::EPHEMERAL_CONFIG_MAP, "cli-config"),
        (env::EPHEMERAL_CONFIG_MAP_PATH, map),
        (env::PLUGIN_CACHE_DIR, cache),
    ];
    assert_eq!(errors(&Deployment::default(), &variables).len(), 1);
}

#[test]
fn annotations_larger_than_an_object_may_carry_are_refused() {
    let large = format!("a={}", "x".repeat(256 * 1024));
    let errors = errors(
        &Deployment::default(),
        &[(env::EPHEMERAL_POD_ANNOTATIONS, &large)],
    );
    assert!(
        errors[0].contains(env::EPHEMERAL_POD_ANNOTATIONS),
        "{errors:?}"
    );
    assert!(errors[0].len() < 200, "{errors:?}");
}

#[test]
fn every_error_is_reported_at_once() {
    let variables = [
        (env::EPHEMERAL_CPU_REQUEST, "lots"),
        (env::EPHEMERAL_TOLERATIONS, ":;a:b"),
        (env::EPHEMERAL_SECURITY, "privileged=true"),
        (env::EPHEMERAL_MEMORY_REQUEST, "2Gi"),
        (env::EPHEMERAL_MEMORY_LIMIT, "1Gi"),
    ];
    let errors = build(&job("terraformPlan", &variables), &Deployment::default()).unwrap_err();
    assert_eq!(errors.errors.len(), 5, "{errors}");
    assert_eq!(errors.exit(), job_contract::Exit::BadJobData);
}

#[test]
fn ids_that_cannot_be_labels_are_refused() {
    let mut job = job("terraformPlan", &[]);
    job.workspace_id = "w".repeat(64);
    job.job_id = "-5".to_owned();
    let errors = build(&job, &Deployment::default()).unwrap_err().to_string();
    assert!(
        errors.contains("`workspaceId`") && errors.contains("`jobId`"),
        "{errors}"
    );
    job.step_type = Some("dance".to_owned());
    assert!(build(&job, &Deployment::default()).is_err());
}

#[test]
fn the_claim_a_cache_implies_is_subject_to_the_policy_too() {
    let policy: Policy = serde_saphyr::from_str("persistentVolumeClaims: [other]").unwrap();
    let mut deployment = Deployment {
        policy,
        ..Deployment::default()
    };
    let variables = [(env::PLUGIN_CACHE_DIR, "/cache")];
    let errors = errors(&deployment, &variables);
    assert!(errors[0].contains("terrakube-plugin-pvc"), "{errors:?}");
    deployment.plugin_cache = PluginCache::EmptyDir;
    let pod = pod(&deployment, &variables);
    let volume = pod["volumes"].as_array().unwrap().last().unwrap();
    assert_eq!(volume, &json!({"name": "tf-plugin-volume", "emptyDir": {}}));
}

#[test]
fn an_image_of_the_workspace_needs_a_policy_and_follows_the_registry() {
    let policy: Policy = serde_saphyr::from_str("imageRegistries: [ghcr.io]").unwrap();
    let deployment = Deployment {
        policy,
        image_registry: Some("mirror:5000/all".to_owned()),
        ..Deployment::default()
    };
    let variables = [(env::EPHEMERAL_IMAGE, "ghcr.io/acme/executor:1")];
    assert_eq!(
        executor(&pod(&deployment, &variables))["image"],
        "mirror:5000/all/acme/executor:1"
    );
    let variables = [(env::EPHEMERAL_IMAGE, "quay.io/acme/executor:1")];
    assert_eq!(errors(&deployment, &variables).len(), 1);
}

const OVERLAY: &str = r"
metadata:
  labels: {cost-centre: '42'}
  annotations: {karpenter.sh/do-not-disrupt: 'false'}
spec:
  priorityClassName: batch
  terminationGracePeriodSeconds: 120
  nodeSelector: {pool: overlay}
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms: [{matchExpressions: [{key: arch, operator: In, values: [arm64]}]}]
  topologySpreadConstraints: [{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: ScheduleAnyway}]
  initContainers: [{name: ca, image: 'ca:1', restartPolicy: Always}]
  containers:
  - name: executor
    env:
    - {name: HTTPS_PROXY, value: 'http://proxy:3128'}
    - {name: TMPDIR, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
    envFrom: [{configMapRef: {name: extra}}]
    resources: {limits: {memory: 3Gi, example.com/fpga: 1}}
    volumeMounts: [{name: ca, mountPath: /opt/ca, readOnly: true}]
  volumes:
  - {name: ca, configMap: {name: company-ca}}
  - {name: work, ephemeral: {volumeClaimTemplate: {spec: {accessModes: [ReadWriteOnce]}}}}
";

fn with_overlay(text: &str) -> Deployment {
    Deployment {
        overlay: Some(Overlay::parse(text).unwrap()),
        ..Deployment::default()
    }
}

#[test]
fn an_overlay_is_laid_over_by_name() {
    let deployment = with_overlay(OVERLAY);
    let manifest = build(&job("terraformApply", &[]), &deployment).unwrap();
    insta::assert_yaml_snapshot!(shown(&manifest));
    let pod = pod(
        &deployment,
        &[
            (env::EPHEMERAL_NODE_SELECTOR, "pool=own"),
            (env::EPHEMERAL_MEMORY_LIMIT, "1Gi"),
        ],
    );
    assert_eq!(
        pod["nodeSelector"],
        json!({"pool": "own"}),
        "the workspace comes last"
    );
    assert_eq!(
        executor(&pod)["resources"]["limits"],
        json!({"memory": "1Gi", "example.com/fpga": "1"})
    );
    assert_eq!(env_of(&pod, env::GRACE_PERIOD_SECONDS).unwrap(), "120");
    assert!(
        executor(&pod)["envFrom"]
            .to_string()
            .contains("terrakube-executor-secrets")
    );
}

#[test]
fn an_overlays_amounts_override_the_defaults() {
    let overlay = "spec: {containers: [{name: executor, resources: {limits: {memory: 256Mi}}}]}";
    let pod = pod(&with_overlay(overlay), &[]);
    assert_eq!(executor(&pod)["resources"]["requests"]["memory"], "256Mi");
    assert_eq!(executor(&pod)["resources"]["limits"]["memory"], "256Mi");
}

#[rstest]
#[case("spec: {hostNetwork: true}", "hostNetwork")]
#[case("spec: {securityContext: {runAsNonRoot: false}}", "runAsNonRoot")]
#[case(
    "spec: {containers: [{name: executor, securityContext: {privileged: true}}]}",
    "privileged"
)]
#[case(
    "spec: {initContainers: [{name: helper, securityContext: {runAsUser: 0}}]}",
    "`helper`"
)]
#[case("spec: {volumes: [{name: v, hostPath: {path: /}}]}", "`v`")]
#[case(
    "spec: {terminationGracePeriodSeconds: 5}",
    "leaves 5 s of grace, less than the 30 s"
)]
#[case(
    "spec: {containers: [{name: executor, lifecycle: {preStop: {sleep: {seconds: 45}}}}]}",
    "leaves 15 s of grace (60 s, less 45 s of its `preStop` hook), less than the 30 s"
)]
#[case(
    "spec: {containers: [{name: executor, lifecycle: {preStop: {exec: {command: [drain]}}}}]}",
    "unknown part of the 60 s"
)]
#[case(
    "spec: {containers: [{name: executor, livenessProbe: {terminationGracePeriodSeconds: 20}}]}",
    "20 s of grace when its `livenessProbe` fails, less than the 60 s"
)]
fn an_overlay_cannot_go_below_the_policy(#[case] overlay: &str, #[case] named: &str) {
    let deployment = with_overlay(overlay);
    let errors = build(&job("terraformPlan", &[]), &deployment).unwrap_err();
    assert!(errors.to_string().contains(named), "{errors}");
    assert!(
        errors.to_string().contains(env::POD_TEMPLATE_FILE),
        "{errors}"
    );
    assert_eq!(errors.exit(), job_contract::Exit::BadConfiguration);
}

/// The grace period of the executor, also if an overlay sets the pod's: stopping, saving and a hook before them end in time.
#[rstest]
#[case("spec: {terminationGracePeriodSeconds: 90}", 90, 90)]
#[case(
    "spec: {terminationGracePeriodSeconds: 120, containers: [{name: executor, lifecycle: {preStop: {sleep: {seconds: 20}}}}]}",
    120,
    100
)]
fn the_executor_gets_the_grace_period_that_an_overlay_sets(
    #[case] overlay: &str,
    #[case] pods: i64,
    #[case] executors: i64,
) {
    for step_type in ["terraformPlan", "terraformApply"] {
        let manifest = build(&job(step_type, &[]), &with_overlay(overlay)).unwrap();
        let spec = manifest.to_list()["items"][0]["spec"].clone();
        let pod = &spec["template"]["spec"];
        assert_eq!(pod["terminationGracePeriodSeconds"], pods);
        let told = |name: &str| -> i64 {
            let value = env_of(pod, name).unwrap();
            value.as_str().unwrap().parse().unwrap()
        };
        assert_eq!(told(env::GRACE_PERIOD_SECONDS), executors);
        let over = told(env::DEADLINE_SECONDS) + pods;
        assert!(over <= spec["activeDeadlineSeconds"].as_i64().unwrap());
    }
}

#[test]
fn a_grace_period_as_long_as_the_jobs_deadline_is_refused_with_both() {
    let mut deployment = with_overlay("spec: {terminationGracePeriodSeconds: 600}");
    deployment.active_deadline_seconds = 600;
    let errors = build(&job("terraformPlan", &[]), &deployment).unwrap_err();
    let words = "is 600 s and must be longer than the grace period of 600 s";
    assert!(errors.to_string().contains(words), "{errors}");
    assert!(errors.to_string().contains(env::ACTIVE_DEADLINE_SECONDS));
}

#[rstest]
#[case(env::PLUGIN_CACHE_DIR, "/opt/ca")]
#[case(env::PLUGIN_CACHE_DIR, "/opt/ca/inner")]
#[case(env::PLUGIN_CACHE_DIR, "/opt")]
fn a_workspace_cannot_mount_over_what_the_operator_mounted(
    #[case] variable: &str,
    #[case] path: &str,
) {
    let errors = errors(&with_overlay(OVERLAY), &[(variable, path)]);
    assert!(errors[0].contains("/opt/ca"), "{errors:?}");
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    let bytes = |job: &JobData| {
        let manifest = build(job, &with_overlay(OVERLAY)).unwrap();
        serde_json::to_vec(&manifest.to_list()).unwrap()
    };
    let mut reversed = ALL_OPTIONS.to_vec();
    reversed.reverse();
    assert_eq!(
        bytes(&job("terraformPlan", ALL_OPTIONS)),
        bytes(&job("terraformPlan", &reversed))
    );
}

#[test]
fn a_manifest_does_not_show_its_data() {
    let manifest = build(
        &job("terraformPlan", &[("TOKEN", "hunter2")]),
        &Deployment::default(),
    )
    .unwrap();
    let encoded = job_contract::encoding::encode(&job("terraformPlan", &[("TOKEN", "hunter2")]));
    assert!(!format!("{manifest:?}").contains(&encoded));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whatever a workspace writes, the result is an object or a list of errors.
    #[test]
    fn no_variable_makes_the_builder_panic(
        index in 1..ALL_OPTIONS.len(),
        value in "[a-zA-Z0-9=:;,./$_ -]{0,24}",
    ) {
        let name = ALL_OPTIONS[index].0;
        let result = build(&job("terraformPlan", &[(name, &value)]), &Deployment::default());
        if let Ok(manifest) = result {
            let spec = manifest.job.spec.unwrap().template.spec.unwrap();
            prop_assert_eq!(violations(&spec, Level::Restricted), [""; 0]);
        }
    }
}

#[rstest]
#[case::in_the_environment("")]
#[case::in_several_variables(&"x".repeat(200_000))]
fn each_attempt_reads_its_job_data_from_a_secret_of_its_own(#[case] token: &str) {
    let mut job = job("terraformPlan", &[]);
    job.access_token = Some(token.to_owned());
    let manifest = build(&job, &Deployment::default()).unwrap();
    let [one, other] = ["1", "2"].map(|attempt| manifest.of_attempt(attempt));
    for (objects, attempt) in [(&one, "1"), (&other, "2")] {
        let pod = objects.job.spec.as_ref().unwrap().template.spec.as_ref();
        let secret = objects.secret.as_ref().unwrap();
        assert_eq!(
            pod::job_data_secret(pod.unwrap()),
            secret.metadata.name.as_deref()
        );
        let name = manifest.job.metadata.name.as_deref().unwrap();
        assert_eq!(
            secret.metadata.name,
            Some(names::secret_name(name, attempt))
        );
    }
    assert_eq!(one.job.metadata, other.job.metadata);
}

fn with_identities() -> Deployment {
    Deployment {
        identities: Identities {
            aws: Some("arn:aws:iam::123456789012:role/deploy".to_owned()),
            azure: Some(AzureIdentity {
                client_id: "client".to_owned(),
                tenant_id: "tenant".to_owned(),
                subscription_id: None,
            }),
            ..Identities::default()
        },
        image: "mayfly-executor:1".to_owned(),
        ..Deployment::default()
    }
}

#[test]
fn a_pod_has_a_token_with_one_audience_for_each_cloud_and_none_for_the_cluster() {
    let pod = pod(&with_identities(), &[]);
    assert_eq!(pod["automountServiceAccountToken"], false);
    let volumes = pod["volumes"].as_array().unwrap();
    let token = |audience: &str, path: &str| json!({"serviceAccountToken": {"audience": audience, "expirationSeconds": 3600, "path": path}});
    let expected = json!({
        "name": "mayfly-identity",
        "projected": {"sources": [
            token("sts.amazonaws.com", "aws-token"),
            token("api://AzureADTokenExchange", "azure-token"),
        ]},
    });
    assert_eq!(volumes.last(), Some(&expected));
    let mounts = executor(&pod)["volumeMounts"].as_array().unwrap();
    let expected = json!({
        "mountPath": "/var/run/secrets/mayfly.dev", "name": "mayfly-identity", "readOnly": true,
    });
    assert_eq!(mounts.last(), Some(&expected));
    let role = env_of(&pod, env::IDENTITY_AWS_ROLE).unwrap();
    assert_eq!(role, "arn:aws:iam::123456789012:role/deploy");
    // Its user can read them.
    assert_eq!(pod["securityContext"]["fsGroup"], 1000);
}

#[test]
fn neither_a_workspace_nor_a_pod_template_takes_the_place_of_the_tokens() {
    let refused = errors(
        &with_identities(),
        &[
            (env::EPHEMERAL_CONFIG_MAP, "tokens"),
            (
                env::EPHEMERAL_CONFIG_MAP_PATH,
                "/var/run/secrets/mayfly.dev",
            ),
        ],
    );
    assert!(
        refused[0].contains("must not be a folder of the system"),
        "{refused:?}"
    );
    let overlay = r#"{"spec": {"containers": [{"name": "executor",
        "env": [{"name": "MAYFLY_IDENTITY_AWS_ROLE_ARN", "value": "arn:aws:iam::123456789012:role/other"}],
        "volumeMounts": [{"name": "tmp", "mountPath": "/var/run/secrets/mayfly.dev/"}]}]}}"#;
    let deployment = Deployment {
        overlay: Some(Overlay::parse(overlay).unwrap()),
        ..with_identities()
    };
    let pod = pod(&deployment, &[]);
    let mounts = executor(&pod)["volumeMounts"].to_string();
    assert_eq!(mounts.matches("/var/run/secrets").count(), 1, "{mounts}");
    let role = env_of(&pod, env::IDENTITY_AWS_ROLE).unwrap();
    assert_eq!(role, "arn:aws:iam::123456789012:role/deploy");
}

#[test]
fn a_stock_executor_gets_no_token() {
    let deployment = Deployment {
        image: "azbuilder/executor:2".to_owned(),
        ..with_identities()
    };
    let pod = pod(&deployment, &[]).to_string();
    assert!(
        !pod.contains("mayfly-identity") && !pod.contains("MAYFLY_IDENTITY"),
        "{pod}"
    );
}

#[test]
fn a_plugin_cache_whose_claim_does_not_exist_is_an_empty_folder() {
    let variables = [
        (env::PLUGIN_CACHE_DIR, "/cache"),
        (env::PLUGIN_CACHE_CLAIM, "gone"),
    ];
    let built = build(&job("terraformPlan", &variables), &Deployment::default()).unwrap();
    assert_eq!(built.cache_claim(), Some("gone"));
    let without = built.without_cache_claim();
    assert_eq!(without.cache_claim(), None);
    assert!(without.notes[0].contains("`gone` of the plugin cache does not exist"));
    let pod = without.to_list()["items"][0]["spec"]["template"]["spec"].clone();
    let volumes = pod["volumes"].as_array().unwrap();
    let cache = volumes
        .iter()
        .find(|volume| volume["name"] == "tf-plugin-volume");
    assert_eq!(cache.unwrap()["emptyDir"], json!({}));
    assert_eq!(env_of(&pod, "TF_PLUGIN_CACHE_DIR").unwrap(), "/cache");
    let none = build(&job("terraformPlan", &[]), &Deployment::default()).unwrap();
    assert_eq!(none.cache_claim(), None);
    assert_eq!(none.clone().without_cache_claim(), none);
}
