use job_contract::{Document, JobData, StepType};
use k8s_openapi::api::core::v1::{PodSpec, VolumeMount};
use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::container::volume_at;
use crate::deployment::{FilledStore, PluginCache};
use crate::executor_kind::{ExecutorKind, ExecutorKindSetting};
use crate::overlay::Overlay;
use crate::overrides::Overrides;
use crate::pod_security::Level;

const STORE: &str = "/var/cache/mayfly";

fn deployment() -> Deployment {
    Deployment {
        filled_store: Some(FilledStore {
            path: STORE.to_owned(),
            registries: vec!["registry.terraform.io".to_owned()],
        }),
        defaults: Overrides {
            plugin_cache_dir: Some(STORE.to_owned()),
            plugin_cache_claim: Some("store".to_owned()),
            ..Overrides::default()
        },
        ..Deployment::default()
    }
}

fn with_overlay(text: &str) -> Deployment {
    let overlay = Overlay::parse(text).unwrap();
    let mut deployment = deployment();
    deployment.overlay = Some(overlay);
    deployment.policy.pod_security = Level::Privileged;
    deployment
}

fn built(
    deployment: &Deployment,
    variables: &[(&str, &str)],
) -> Result<super::super::Manifest, ManifestErrors> {
    let job = JobData {
        step_type: Some(StepType::Plan.name().to_owned()),
        organization_id: "o".to_owned(),
        workspace_id: "w".to_owned(),
        job_id: "7".to_owned(),
        step_id: "s".to_owned(),
        environment_variables: variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect(),
        ..JobData::default()
    };
    crate::build(&Document::written(&job), deployment)
}

fn spec_of(job: Job) -> PodSpec {
    job.spec.unwrap().template.spec.unwrap()
}

fn mounts(spec: &PodSpec) -> Vec<&VolumeMount> {
    container::executor(spec)
        .unwrap()
        .volume_mounts
        .iter()
        .flatten()
        .collect()
}

fn mount_at<'s>(spec: &'s PodSpec, path: &str) -> Option<&'s VolumeMount> {
    mounts(spec)
        .into_iter()
        .find(|mount| mount.mount_path == path)
}

fn variable(spec: &PodSpec, name: &str) -> Option<String> {
    let executor = container::executor(spec).unwrap();
    let mut variables = executor.env.iter().flatten();
    variables
        .find(|variable| variable.name == name)?
        .value
        .clone()
}

fn packages(texts: &[&str]) -> BTreeSet<WantedPackage> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

const AWS: &str = "registry.terraform.io/hashicorp/aws/5.0.0/linux_amd64";
const NULL: &str = "registry.terraform.io/hashicorp/null/3.0.0/linux_amd64";

#[test]
fn runs_read_the_store_and_jobs_write_it() {
    let run = spec_of(built(&deployment(), &[]).unwrap().job);
    let mount = mount_at(&run, STORE).unwrap();
    assert_eq!(mount.read_only, Some(true));
    let claim = volume_at(&run, STORE)
        .unwrap()
        .persistent_volume_claim
        .as_ref();
    assert_eq!(claim.unwrap().claim_name, "store");
    assert_eq!(
        variable(&run, env::PROVIDER_CACHE_DIR).as_deref(),
        Some(STORE)
    );
    assert_eq!(
        variable(&run, env::PROVIDER_CACHE_MODE).as_deref(),
        Some("fill")
    );
    assert_eq!(variable(&run, env::PLUGIN_CACHE_DIR), None);

    // An executor of another kind gets a folder of its own in its place.
    let mut stock = deployment();
    stock.executor_kind = ExecutorKindSetting::Always(ExecutorKind::Stock);
    let run = spec_of(built(&stock, &[]).unwrap().job);
    let volume = volume_at(&run, STORE).unwrap();
    assert!(volume.empty_dir.is_some(), "{volume:?}");

    let template = FillTemplate::of(&deployment()).unwrap().unwrap();
    let job = template.job(&packages(&[NULL, AWS]), Some("node-1"));
    let fill = spec_of(job);
    assert_eq!(mount_at(&fill, STORE).unwrap().read_only, None);
    let executor = container::executor(&fill).unwrap();
    assert_eq!(executor.args.as_deref().unwrap(), ["fill", AWS, NULL]);
    assert_eq!(
        variable(&fill, env::PROVIDER_CACHE_DIR).as_deref(),
        Some(STORE)
    );
    // A claim is wherever its pods are.
    assert_eq!(fill.affinity, None);
}

#[test]
fn a_burst_makes_one_job() {
    let template = FillTemplate::of(&deployment()).unwrap().unwrap();
    let name = |texts: &[&str], node| template.job(&packages(texts), node).metadata.name.unwrap();
    assert_eq!(name(&[AWS, NULL], Some("a")), name(&[NULL, AWS], Some("b")));
    assert_ne!(name(&[AWS], None), name(&[NULL], None));
    assert!(crate::check::dns_label(&name(&[AWS], None)).is_ok());
}

#[test]
fn a_job_has_nothing_of_a_run() {
    let overlay = "
metadata: {labels: {team: x}}
spec:
  serviceAccountName: clouds
  nodeSelector: {disk: fast}
  tolerations: [{key: spot, operator: Exists}]
  initContainers: [{name: mesh, image: m, restartPolicy: Always}]
  volumes:
  - {name: ca, configMap: {name: ca}}
  - {name: keys, secret: {secretName: keys}}
  containers:
  - name: executor
    env:
    - {name: HTTPS_PROXY, value: 'http://proxy:3128'}
    - {name: SSL_CERT_FILE, value: /opt/ca/ca.crt}
    - {name: AWS_ACCESS_KEY_ID, value: AKIA}
    - {name: NO_PROXY, valueFrom: {secretKeyRef: {name: keys, key: k}}}
    envFrom:
    - secretRef: {name: more}
    - configMapRef: {name: proxies}
    volumeMounts:
    - {name: ca, mountPath: /opt/ca}
    - {name: keys, mountPath: /opt/keys}
";
    let deployment = with_overlay(overlay);
    let run = built(&deployment, &[]).unwrap();
    let template = FillTemplate::of(&deployment).unwrap().unwrap();
    let job = template.job(&packages(&[AWS]), None);
    let text = serde_json::to_string(&job).unwrap();
    for secret in [
        "terrakube-executor-secrets",
        "keys",
        "more",
        "AKIA",
        "clouds",
        "mesh",
        "EphemeralJobData",
        "MAYFLY_POD_UID",
        "step-id",
        "terrakube.io",
    ] {
        assert!(!text.contains(secret), "{secret}: {text}");
    }
    let labels = job.metadata.labels.clone().unwrap();
    assert_eq!(labels[labels::MANAGED_BY], labels::MANAGED_BY_FILL);
    assert_eq!(labels["team"], "x");
    let of_run = spec_of(run.job);
    let spec = job.spec.unwrap();
    assert_eq!(spec.suspend, None);
    assert!(spec.active_deadline_seconds.is_some() && spec.ttl_seconds_after_finished.is_some());
    let fill = spec.template.spec.unwrap();
    assert_eq!(fill.node_selector, of_run.node_selector);
    assert_eq!(fill.tolerations, of_run.tolerations);
    assert_eq!(fill.security_context, of_run.security_context);
    let (fills, runs) = (&fill.containers[0], container::executor(&of_run).unwrap());
    assert_eq!(fills.security_context, runs.security_context);
    assert_eq!(fills.image, runs.image);
    assert_eq!(fills.resources, runs.resources);
    assert!(mount_at(&fill, "/opt/ca").is_some() && mount_at(&fill, "/tmp").is_some());
    assert_eq!(variable(&fill, "HTTPS_PROXY").unwrap(), "http://proxy:3128");
    assert_eq!(
        crate::pod_security::violations(&fill, Level::Restricted),
        [""; 0]
    );
}

#[test]
fn a_job_has_the_proxies_and_authorities_that_terrakube_configures() {
    let overlay = "
spec:
  volumes:
  - {name: ca, secret: {secretName: authorities}}
  - {name: more-ca, configMap: {name: more-authorities}}
  - {name: database, secret: {secretName: login-of-a-database}}
  containers:
  - name: executor
    env:
    - {name: SERVICE_BINDING_ROOT, value: /platform/bindings/}
    - {name: JAVA_TOOL_OPTIONS, value: '-Xmx1g -Dhttps.proxyHost=proxy -Dhttps.proxyPort=3128 \"-Dhttp.nonProxyHosts=a|b c\"
        -Djavax.net.ssl.trustStorePassword=changeit'}
    volumeMounts:
    - {name: ca, mountPath: /platform/bindings/ca-certificates}
    - {name: more-ca, mountPath: /platform/bindings/more}
    - {name: database, mountPath: /platform/bindings/database}
";
    let template = FillTemplate::of(&with_overlay(overlay)).unwrap().unwrap();
    let fill = spec_of(template.job(&packages(&[AWS]), None));
    let root = variable(&fill, env::SERVICE_BINDING_ROOT);
    assert_eq!(root.as_deref(), Some("/platform/bindings/"));
    let options = variable(&fill, env::JAVA_TOOL_OPTIONS).unwrap();
    let expected = [
        "-Dhttps.proxyHost=proxy",
        "-Dhttps.proxyPort=3128",
        "-Dhttp.nonProxyHosts=a|b c",
    ];
    assert_eq!(java_options::words(&options), expected);
    for name in ["ca-certificates", "more"] {
        assert!(
            mount_at(&fill, &format!("/platform/bindings/{name}")).is_some(),
            "{name}"
        );
    }
    let text = serde_json::to_string(&fill).unwrap();
    assert!(
        !text.contains("database") && !text.contains("changeit"),
        "{text}"
    );
}

#[test]
fn a_folder_of_the_node_is_filled_on_the_node_of_the_run() {
    let overlay = "
spec:
  volumes: [{name: cache, hostPath: {path: /var/lib/x, type: DirectoryOrCreate}}]
  containers: [{name: executor, volumeMounts: [{name: cache, mountPath: /var/cache/mayfly/}]}]
";
    let deployment = with_overlay(overlay);
    let run = spec_of(built(&deployment, &[]).unwrap().job);
    assert_eq!(
        mount_at(&run, "/var/cache/mayfly/").unwrap().read_only,
        Some(true)
    );
    assert!(volume_at(&run, STORE).unwrap().host_path.is_some());
    let template = FillTemplate::of(&deployment).unwrap().unwrap();
    let [one, other] = ["a", "b"].map(|node| template.job(&packages(&[AWS]), Some(node)));
    assert_ne!(one.metadata.name, other.metadata.name);
    assert_eq!(node(&one), Some("a"));
    assert_eq!(super::packages(&one), packages(&[AWS]));
    let affinity = serde_json::to_value(spec_of(one).affinity).unwrap();
    let terms = affinity
        .pointer("/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms");
    let expected =
        json!([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}]);
    assert_eq!(terms, Some(&expected));
}

#[rstest]
#[case::named(&[(env::PLUGIN_CACHE_CLAIM, "store")])]
#[case::at_another_path(&[(env::PLUGIN_CACHE_CLAIM, "store"), (env::PLUGIN_CACHE_DIR, "/cache")])]
fn a_workspace_cannot_mount_the_claim_of_the_store(#[case] variables: &[(&str, &str)]) {
    let refused = built(&deployment(), variables).unwrap_err();
    let text = refused.errors[0].to_string();
    assert!(
        text.contains("`PVC_CLAIM_NAME` asks for the claim `store`"),
        "{text}"
    );
    let overlay = "
spec:
  volumes: [{name: cache, persistentVolumeClaim: {claimName: store}}]
  containers: [{name: executor, volumeMounts: [{name: cache, mountPath: /var/cache/mayfly}]}]
";
    let mut deployment = with_overlay(overlay);
    deployment.defaults = Overrides::default();
    assert!(built(&deployment, variables).is_err());
}

#[test]
fn the_path_of_a_workspace_has_no_effect_and_its_own_claim_does() {
    let manifest = built(&deployment(), &[(env::PLUGIN_CACHE_DIR, "/cache")]).unwrap();
    assert!(manifest.notes[0].contains("`TF_PLUGIN_CACHE_DIR` has no effect"));
    let run = spec_of(manifest.job);
    assert!(mount_at(&run, "/cache").is_none());
    assert_eq!(mount_at(&run, STORE).unwrap().read_only, Some(true));

    let own = [(env::PLUGIN_CACHE_CLAIM, "own")];
    let run = spec_of(built(&deployment(), &own).unwrap().job);
    let claim = volume_at(&run, STORE)
        .unwrap()
        .persistent_volume_claim
        .as_ref();
    assert_eq!(claim.unwrap().claim_name, "own");
    assert_eq!(mount_at(&run, STORE).unwrap().read_only, None);
    assert_eq!(variable(&run, env::PROVIDER_CACHE_MODE), None);
    assert_eq!(
        variable(&run, env::PLUGIN_CACHE_DIR).as_deref(),
        Some(STORE)
    );
}

#[test]
fn other_registries_paths_and_too_many_packages_are_left_out() {
    let template = FillTemplate::of(&deployment()).unwrap().unwrap();
    let wanted: Vec<_> = (0..200)
        .map(|number| format!("registry.terraform.io/a/b/1.0.{number}/linux_amd64"))
        .collect();
    assert_eq!(template.allowed(wanted.iter()).len(), MOST_WANTED);
    let wanted = [
        AWS,
        "registry.example.test/a/b/1.0.0/linux_amd64",
        "registry.terraform.io.evil.test/a/b/1.0.0/linux_amd64",
        "../../etc/a/b/linux_amd64",
        "--store",
    ];
    let wanted = wanted.map(str::to_owned);
    assert_eq!(template.allowed(wanted.iter()), packages(&[AWS]));
}

#[rstest]
#[case(json!({"emptyDir": {}}))]
#[case(json!({"ephemeral": {"volumeClaimTemplate": {"spec": {}}}}))]
#[case(json!({"configMap": {"name": "x"}}))]
fn a_volume_that_pods_do_not_share_is_refused(#[case] mut volume: Value) {
    volume["name"] = "cache".into();
    let overlay = json!({"spec": {
        "volumes": [volume],
        "containers": [{"name": "executor", "volumeMounts": [{"name": "cache", "mountPath": STORE}]}],
    }});
    let deployment = with_overlay(&overlay.to_string());
    let errors = crate::deployment_errors(&deployment);
    assert!(
        errors[0].to_string().contains("a volume that they share"),
        "{errors:?}"
    );
}

#[test]
fn neither_an_empty_folder_nor_another_executor_can_be_filled() {
    assert_eq!(crate::deployment_errors(&deployment()), []);
    assert!(FillTemplate::of(&Deployment::default()).unwrap().is_none());
    let mut stock = deployment();
    stock.executor_kind = ExecutorKindSetting::Always(ExecutorKind::Stock);
    assert!(FillTemplate::of(&stock).is_err());
    let mut empty = deployment();
    empty.plugin_cache = PluginCache::EmptyDir;
    assert!(FillTemplate::of(&empty).is_err());
}
