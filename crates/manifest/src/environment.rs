//! Decides which of a workspace's `EPHEMERAL_JOB_ENV_VARS` become environment of the executor's container.
//!
//! Mayfly's executor reads them from the job document and gives them only to the tool and to scripts. So none becomes
//! environment. A stock executor does not do that. It gets only those that are known to be harmless. Its libraries read
//! proxies, resolvers, certificate authorities, identities and code from the container's environment.

use std::collections::BTreeMap;

use job_contract::env;

use super::error::quote;
use super::executor_kind::ExecutorKind;
use super::policy::Patterns;

/// Variables that a stock executor gets by default: settings of the tool, and the executor's setting for colours.
const HARMLESS: &[&str] = &[
    "ARM_*",
    "AWS_DEFAULT_REGION",
    "AWS_REGION",
    "LANG",
    "LC_*",
    "TERM",
    "TERRAGRUNT_*",
    "TF_*",
    "TG_*",
    "TOFU_*",
    "TZ",
    env::COLOR_OUTPUT,
];

/// Variables that a stock executor never gets, whatever the policy allows. They load code into the virtual machine or
/// the loader, or change resolvers, certificate authorities and hosts.
const NEVER: &[&str] = &[
    "*_PROXY",
    "*_proxy",
    "BPI_*",
    "BPL_*",
    "CNB_*",
    "GCONV_PATH",
    "GETCONF_DIR",
    "GLIBC_*",
    "HOME",
    "HOSTALIASES",
    "JAVA_*",
    "JDK_*",
    "LD_*",
    "LOCALDOMAIN",
    "LOCPATH",
    "MALLOC_*",
    "NLSPATH",
    "PATH",
    "RESOLV_*",
    "RES_OPTIONS",
    "SERVICE_BINDING_ROOT",
    "SPRING_*",
    "SSL_CERT_*",
    "TMPDIR",
    "_JAVA_*",
];

/// Returns the container's variables, and lines for the run log about variables that have no effect.
pub(super) fn of_container(
    requested: BTreeMap<String, String>,
    kind: ExecutorKind,
    allowed: Option<&Patterns>,
) -> (BTreeMap<String, String>, Vec<String>) {
    if kind == ExecutorKind::Mayfly {
        return (BTreeMap::new(), Vec::new());
    }
    let harmless = Patterns::new(HARMLESS.iter().copied());
    let never = Patterns::new(NEVER.iter().copied());
    let reaches = |name: &str| allowed.unwrap_or(&harmless).allow(name) && !never.allow(name);
    let (kept, left_out): (BTreeMap<_, _>, BTreeMap<_, _>) =
        requested.into_iter().partition(|(name, _)| reaches(name));
    let line = |name: &String| {
        format!(
            "`{}` names {}, which has no effect: the executor's own environment is the operator's.",
            env::EPHEMERAL_ENV,
            quote(name)
        )
    };
    let lines = left_out.keys().map(line).collect();
    (kept, lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(names: &[&str]) -> BTreeMap<String, String> {
        let pair = |name: &&str| ((*name).to_owned(), "x".to_owned());
        names.iter().map(pair).collect()
    }

    fn reaching(names: &[&str], allowed: Option<&Patterns>) -> Vec<String> {
        let (kept, lines) = of_container(all(names), ExecutorKind::Stock, allowed);
        assert_eq!(kept.len() + lines.len(), names.len());
        kept.into_keys().collect()
    }

    /// Every variable of the contract, settings of both programs and of workspaces.
    fn names_of_the_contract() -> Vec<&'static str> {
        let text = include_str!("../../job-contract/src/env.rs");
        let lines = text.lines().filter(|line| line.starts_with("pub const"));
        let names: Vec<_> = lines.filter_map(|line| line.split('"').nth(1)).collect();
        assert!(names.len() > 100, "{names:?}");
        names
    }

    /// What is read by the virtual machine, its launcher, the C library and the clouds' libraries, as their documents
    /// name it.
    const OF_OTHERS: &[&str] = &[
        "ALL_PROXY",
        "AWS_CA_BUNDLE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_ENDPOINT_URL_S3",
        "AWS_ROLE_ARN",
        "AWS_WEB_IDENTITY_TOKEN_FILE",
        "AZURE_AUTHORITY_HOST",
        "BPL_JVM_THREAD_COUNT",
        "GCONV_PATH",
        "GIT_SSL_CAINFO",
        "GLIBC_TUNABLES",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "HOME",
        "HOSTALIASES",
        "HTTPS_PROXY",
        "JAVA_TOOL_OPTIONS",
        "JDK_JAVA_OPTIONS",
        "LD_PRELOAD",
        "LOCALDOMAIN",
        "LOCPATH",
        "PATH",
        "RES_OPTIONS",
        "SERVICE_BINDING_ROOT",
        "SPRING_APPLICATION_JSON",
        "SSL_CERT_FILE",
        "_JAVA_OPTIONS",
        "https_proxy",
        "no_proxy",
    ];

    #[test]
    fn the_document_names_what_a_stock_executor_gets() {
        let document = include_str!("../../../docs/kubernetes-manifest.md");
        for pattern in HARMLESS {
            assert!(document.contains(&format!("`{pattern}`")), "{pattern}");
        }
    }

    #[test]
    fn of_all_that_is_read_there_a_stock_executor_gets_the_colours_and_the_tools_cache() {
        let names = [names_of_the_contract(), OF_OTHERS.to_vec()];
        let reaching: Vec<_> = names
            .iter()
            .flat_map(|names| reaching(names, None))
            .collect();
        assert_eq!(reaching, [env::PLUGIN_CACHE_DIR, env::COLOR_OUTPUT]);
    }

    #[test]
    fn a_policy_allows_more_but_no_code_no_proxy_and_no_resolver() {
        let any = Patterns::new(["*"]);
        let reaching = reaching(OF_OTHERS, Some(&any));
        assert_eq!(
            reaching,
            [
                "AWS_CA_BUNDLE",
                "AWS_CONTAINER_CREDENTIALS_FULL_URI",
                "AWS_ENDPOINT_URL_S3",
                "AWS_ROLE_ARN",
                "AWS_WEB_IDENTITY_TOKEN_FILE",
                "AZURE_AUTHORITY_HOST",
                "GIT_SSL_CAINFO",
                "GOOGLE_APPLICATION_CREDENTIALS",
            ]
        );
    }

    #[test]
    fn variables_that_are_left_out_are_named_without_their_values() {
        let requested = [("TerrakubeRedisSSL".to_owned(), "hunter2".to_owned())].into();
        let (kept, lines) = of_container(requested, ExecutorKind::Stock, None);
        assert_eq!(kept.len(), 0);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains("`TerrakubeRedisSSL`") && !lines[0].contains("hunter2"));
    }

    #[test]
    fn nothing_reaches_the_environment_of_our_executor() {
        let requested = all(&["TF_LOG", "LOCALDOMAIN", "TerrakubeEnableColorOutput"]);
        let any = Patterns::new(["*"]);
        let none = (BTreeMap::new(), Vec::new());
        assert_eq!(
            of_container(requested, ExecutorKind::Mayfly, Some(&any)),
            none
        );
    }
}
