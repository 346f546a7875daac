//! Settings as an operator makes them: by flag here where the name does not matter, since tests share one environment.

use std::path::Path;

use clap::{CommandFactory as _, Parser};
use job_contract::Records;
use rstest::rstest;
use runtime::setting::from_variables;

use super::*;

#[derive(Debug, Parser)]
struct Cli {
    #[command(flatten)]
    deployment: DeploymentArgs,
}

/// Parses flags alone: what the environment of the test holds is not looked at.
fn args(flags: &[&str]) -> DeploymentArgs {
    let mut command = Cli::command();
    for id in command
        .get_arguments()
        .map(|a| a.get_id().clone())
        .collect::<Vec<_>>()
    {
        command = command.mut_arg(id, |argument| argument.env(None::<&str>));
    }
    let pairs = flags.chunks(2).map(|pair| pair.join("="));
    let matches = command
        .try_get_matches_from(std::iter::once("test".to_owned()).chain(pairs))
        .unwrap();
    <Cli as clap::FromArgMatches>::from_arg_matches(&matches)
        .unwrap()
        .deployment
}

fn resolve(flags: &[&str]) -> Deployment {
    args(flags).resolve(None).unwrap()
}

fn errors(flags: &[&str]) -> Vec<String> {
    let errors = args(flags).resolve(None).unwrap_err();
    errors.iter().map(ToString::to_string).collect()
}

fn pairs(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

#[test]
fn every_option_has_a_variable_and_the_line_is_consistent() {
    let command = Cli::command();
    command.clone().debug_assert();
    for argument in command.get_arguments().filter(|a| a.get_id() != "help") {
        assert!(argument.get_env().is_some(), "{}", argument.get_id());
    }
}

#[test]
fn without_options_the_defaults_are_those_of_the_platform() {
    let deployment = resolve(&[]);
    assert_eq!(deployment, Deployment::default());
    assert_eq!(deployment.namespace, "terrakube");
    assert_eq!(deployment.env_secrets, ["terrakube-executor-secrets"]);
    assert_eq!(deployment.active_deadline_seconds, 21_600);
    assert_eq!(deployment.ttl_seconds_after_finished, 600);
    assert_eq!((deployment.backoff_limit, deployment.records), (None, None));
}

#[test]
fn blank_settings_are_not_made_and_blank_lists_are_empty() {
    let deployment = resolve(&["--namespace", " ", "--image", "", "--env-secrets", " , "]);
    assert_eq!(deployment.namespace, "terrakube");
    assert_eq!(deployment.image, DEFAULT_IMAGE);
    assert_eq!(deployment.env_secrets, [""; 0]);
}

#[test]
fn lists_and_annotations_are_read_in_every_form() {
    let deployment = resolve(&[
        "--env-secrets",
        "a, b,,a",
        "--env-config-maps",
        "c",
        "--image-pull-secrets",
        "p",
        "--pod-annotations",
        r#"{"a.example/b": "c", "d": "e;f"}"#,
    ]);
    assert_eq!(deployment.env_secrets, ["a", "b"]);
    assert_eq!(deployment.env_config_maps, ["c"]);
    assert_eq!(deployment.image_pull_secrets, ["p"]);
    assert_eq!(
        deployment.defaults.pod_annotations,
        pairs(&[("a.example/b", "c"), ("d", "e;f")])
    );
    let deployment = resolve(&["--pod-annotations", "a=b;c=d"]);
    assert_eq!(
        deployment.defaults.pod_annotations,
        pairs(&[("a", "b"), ("c", "d")])
    );
}

#[test]
fn the_variable_overrides_node_selectors_in_java_options() {
    let java = "-Xmx1g -Dio.terrakube.executor.ephemeral.nodeSelector[kubernetes.io/os]=linux";
    let deployment = resolve(&["--java-tool-options", java]);
    assert_eq!(
        deployment.defaults.node_selector,
        Some(pairs(&[("kubernetes.io/os", "linux")]))
    );
    let deployment = resolve(&["--java-tool-options", java, "--node-selector", ""]);
    assert_eq!(deployment.defaults.node_selector, Some(BTreeMap::new()));
    let deployment = resolve(&["--java-tool-options", "-Xmx1g"]);
    assert_eq!(deployment.defaults.node_selector, None);
}

#[test]
fn a_grace_period_too_short_for_the_executor_is_raised_with_a_warning() {
    for short in ["0", "5", "29"] {
        let raised = resolve(&["--termination-grace-period-seconds", short]);
        assert_eq!((raised.grace_seconds, raised.apply_grace_seconds), (30, 30));
        let [warning] = raised.warnings.as_slice() else {
            panic!("{:?}", raised.warnings);
        };
        let start = format!(
            "`{}` is {short}, and 30 counts",
            env::TERMINATION_GRACE_PERIOD_SECONDS
        );
        assert!(warning.starts_with(&start), "{warning}");
    }
    let enough = resolve(&["--termination-grace-period-seconds", "30"]);
    assert!(enough.warnings.is_empty(), "{:?}", enough.warnings);
}

#[test]
fn one_grace_period_counts_for_all_unless_apply_has_its_own() {
    let both = resolve(&["--termination-grace-period-seconds", "90"]);
    assert_eq!((both.grace_seconds, both.apply_grace_seconds), (90, 90));
    let own = resolve(&[
        "--termination-grace-period-seconds",
        "90",
        "--apply-grace-period-seconds",
        "900",
    ]);
    assert_eq!((own.grace_seconds, own.apply_grace_seconds), (90, 900));
}

#[test]
fn the_place_of_records_is_configured_or_follows_from_the_platform() {
    let shared = resolve(&["--records", "Shared", "--backoff-limit", "1"]);
    assert_eq!(
        (shared.records, shared.backoff_limit),
        (Some(Records::Shared), Some(1))
    );
    assert_eq!(resolve(&["--records", "auto"]).records, None);
    let reports = |url| args(&[]).resolve(url).unwrap().reports_to_platform;
    assert!(reports(Some("http://api")));
    assert!(!reports(Some(" ")) && !reports(None));
}

/// A typed value knows where it came from.
#[rstest]
#[case(&["--namespace", "Not A Namespace"])]
#[case(&["--image", "Bad Image"])]
#[case(&["--image-registry", "https://x"])]
#[case(&["--executor-kind", "ours"])]
#[case(&["--image-pull-policy", "Sometimes"])]
#[case(&["--job-data-mode", "file"])]
#[case(&["--plugin-cache", "nfs"])]
#[case(&["--active-deadline-seconds", "0"])]
#[case(&["--active-deadline-seconds", "6h"])]
#[case(&["--backoff-limit", "-1"])]
#[case(&["--records", "somewhere"])]
#[case(&["--ttl-seconds-after-finished", "99999999999"])]
#[case(&["--termination-grace-period-seconds", "-1"])]
#[case(&["--apply-grace-period-seconds", "5"])]
#[case(&["--priority-class", "A"])]
#[case(&["--work-size-limit", "10GiB"])]
#[case(&["--tmp-size-limit", "-1"])]
fn a_wrong_value_is_named_by_its_flag(#[case] flags: &[&str]) {
    let errors = errors(flags);
    assert_eq!(errors.len(), 1, "{errors:?}");
    let name = format!("`{}` ", flags[0]);
    assert!(errors[0].starts_with(&name), "{errors:?}");
}

/// Texts, and values that do not fit others.
#[rstest]
#[case(&["--work-size-limit", "10"], env::WORK_SIZE_LIMIT)]
#[case(&["--image-pull-secrets", "a,B"], env::IMAGE_PULL_SECRETS)]
#[case(&["--env-secrets", "_"], env::ENV_SECRETS)]
#[case(&["--env-config-maps", "a/b"], env::ENV_CONFIG_MAPS)]
#[case(&["--pod-annotations", "{broken"], env::POD_ANNOTATIONS)]
#[case(&["--pod-annotations", r#"{"a": 1}"#], env::POD_ANNOTATIONS)]
#[case(&["--pod-annotations", "a b=c"], env::POD_ANNOTATIONS)]
#[case(&["--java-tool-options", "-Dio.terrakube.executor.ephemeral.nodeSelector.=x"], env::JAVA_TOOL_OPTIONS)]
#[case(&["--active-deadline-seconds", "300"], env::ACTIVE_DEADLINE_SECONDS)]
#[case(&["--backoff-limit", "2"], env::BACKOFF_LIMIT)]
#[case(&["--memory-limit", "2048"], env::EPHEMERAL_MEMORY_LIMIT)]
#[case(&["--tolerations", ":"], env::EPHEMERAL_TOLERATIONS)]
#[case(&["--cpu-request", "2", "--cpu-limit", "1"], env::EPHEMERAL_CPU_REQUEST)]
#[case(&["--executor-env", "EphemeralJobData=x"], env::EPHEMERAL_ENV)]
#[case(&["--plugin-cache-dir", "x"], env::DEPLOYMENT_PLUGIN_CACHE_DIR)]
fn a_wrong_setting_is_named_by_its_variable(#[case] flags: &[&str], #[case] variable: &str) {
    let errors = errors(flags);
    assert_eq!(errors.len(), 1, "{errors:?}");
    let name = format!("`{variable}` ");
    assert!(errors[0].starts_with(&name), "{errors:?}");
}

#[test]
fn every_error_is_reported_at_once() {
    let errors = errors(&[
        "--namespace",
        "A",
        "--image",
        "B",
        "--backoff-limit",
        "x",
        "--cpu-limit",
        "y",
        "--job-data-mode",
        "z",
    ]);
    assert_eq!(errors.len(), 5, "{errors:?}");
}

fn file(text: &str) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file.yaml");
    fs::write(&path, text).unwrap();
    let path = Path::to_str(&path).unwrap().to_owned();
    (folder, path)
}

#[test]
fn policy_and_template_come_from_files() {
    let (_policy_folder, policy) = file("serviceAccounts: [runner]\nresources: {cpu: 2}\n");
    let (_folder, template) = file("spec: {runtimeClassName: gvisor}\n");
    let deployment = resolve(&["--policy-file", &policy, "--pod-template-file", &template]);
    assert!(!deployment.policy.service_accounts.allow("other"));
    assert!(
        deployment.policy.config_maps.allow("any"),
        "the rest keeps its default"
    );
    assert!(deployment.overlay.is_some());
    let (_empty_folder, empty) = file("# nothing yet\n");
    assert_eq!(
        resolve(&["--policy-file", &empty]).policy,
        Policy::default()
    );
}

/// Missing, and with errors in them.
#[rstest]
#[case("--policy-file", env::POLICY_FILE, "serviceAcounts: []\n", 1)]
#[case(
    "--pod-template-file",
    env::POD_TEMPLATE_FILE,
    "spec: {nodeSelektor: {}, restartPolicy: Always}\n",
    2
)]
fn unusable_files_are_named_by_the_flag_or_the_variable_that_was_given(
    #[case] flag: &str,
    #[case] variable: &str,
    #[case] text: &str,
    #[case] count: usize,
) {
    let (_folder, broken) = file(text);
    for (path, count) in [("/does/not/exist", 1), (&broken, count)] {
        let by_flag = errors(&[flag, path]);
        let by_variable = from_variables::<DeploymentArgs>(&[(variable, path)]);
        let by_variable: Vec<_> = by_variable.resolve(None).unwrap_err();
        let by_variable: Vec<_> = by_variable.iter().map(ToString::to_string).collect();
        for (errors, name) in [(by_flag, flag), (by_variable, variable)] {
            assert_eq!(errors.len(), count, "{errors:?}");
            let name = format!("`{name}` ");
            let named = errors.iter().all(|error| error.starts_with(&name));
            assert!(named, "{errors:?}");
        }
    }
}

#[test]
fn settings_that_every_run_would_reject_are_found_at_start() {
    let (_folder, template) = file("spec: {hostNetwork: true, terminationGracePeriodSeconds: 5}\n");
    let errors = errors(&["--pod-template-file", &template]);
    assert_eq!(errors.len(), 2, "{errors:?}");
    let errors = self::errors(&["--pod-security-context", "runAsUser=0"]);
    assert!(
        errors[0].contains(env::EPHEMERAL_POD_SECURITY),
        "{errors:?}"
    );
}

#[test]
fn environment_of_executors_is_not_shown() {
    let args = args(&["--executor-env", "TOKEN=hunter2"]);
    assert!(!format!("{args:?}").contains("hunter2"));
}

#[test]
fn the_examples_of_the_manual_are_read() {
    let manual = include_str!("../../../../docs/kubernetes-manifest.md");
    let examples: Vec<&str> = manual
        .split("```yaml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next())
        .collect();
    let [template, policy] = examples[..] else {
        panic!("the manual has one template and one policy: {examples:?}");
    };
    let ((_a, template), (_b, policy)) = (file(template), file(policy));
    resolve(&["--pod-template-file", &template, "--policy-file", &policy]);
}

#[test]
fn identities_are_read_together_and_each_error_names_its_variable() {
    let role = "arn:aws:iam::123456789012:role/deploy";
    let resolved = resolve(&["--identity-aws-role-arn", role]);
    assert_eq!(resolved.identities.aws.as_deref(), Some(role));
    let found = errors(&[
        "--identity-aws-role-arn",
        "deploy",
        "--identity-azure-client-id",
        "c",
    ]);
    let named = |name: &str| found.iter().any(|error| error.contains(name));
    assert!(
        named(env::IDENTITY_AWS_ROLE) && named(env::IDENTITY_AZURE_TENANT_ID),
        "{found:?}"
    );
}

#[test]
fn a_store_that_jobs_fill_needs_a_path_and_has_registries() {
    let deployment = resolve(&[
        "--provider-cache-mode",
        "fill",
        "--plugin-cache-dir",
        "/store/",
    ]);
    let store = deployment.filled_store.unwrap();
    assert_eq!(store.path, "/store");
    assert_eq!(
        store.registries,
        ["registry.terraform.io", "registry.opentofu.org"]
    );
    let own = [
        "--provider-cache-registries",
        "Registry.Example.test, localhost:8443",
    ];
    let flags = [
        "--provider-cache-mode",
        "fill",
        "--plugin-cache-dir",
        "/store",
    ];
    let deployment = resolve(&[&flags[..], &own].concat());
    let registries = deployment.filled_store.unwrap().registries;
    assert_eq!(registries, ["registry.example.test", "localhost:8443"]);
    assert_eq!(
        resolve(&["--plugin-cache-dir", "/store"]).filled_store,
        None
    );
    let wrong = errors(&["--provider-cache-mode", "fill"]);
    assert!(
        wrong[0].contains("needs `MAYFLY_PLUGIN_CACHE_DIR`"),
        "{wrong:?}"
    );
    let wrong = errors(&[
        "--provider-cache-registries",
        "https://registry.terraform.io",
    ]);
    assert!(wrong[0].contains("is no host"), "{wrong:?}");
    let wrong = errors(&[&flags[..], &["--plugin-cache", "empty-dir"]].concat());
    assert!(
        wrong[0].contains("excludes `MAYFLY_PLUGIN_CACHE=empty-dir`"),
        "{wrong:?}"
    );
}
