//! The identity of a pod at the clouds, as the tool and scripts find it: variables that name files with tokens. Kubernetes renews
//! these files, and the clouds' libraries read them again. Credentials that the run brings itself come first.
//!
//! This module reads no setting and knows nothing of phases.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use job_contract::identity::{
    AWS_TOKEN, AZURE_TOKEN, AzureIdentity, GCP_TOKEN, GcpIdentity, Identities, session_name,
};
use job_contract::{Exit, JobData};
use runtime::regular_file;
use serde::Deserialize;
use serde_json::json;

use crate::error::StepError;

const MAX_TOKEN_BYTES: u64 = 1 << 16;

/// The variables with which a run brings credentials of its own for AWS.
pub(crate) const BROUGHT_FOR_AWS: &[&str] = &[
    "AWS_ACCESS_KEY_ID",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONFIG_FILE",
    "AWS_PROFILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
];
/// The same for the other clouds.
const BROUGHT_FOR_GCP: &[&str] = &[
    "CLOUDSDK_AUTH_ACCESS_TOKEN",
    "GCLOUD_KEYFILE_JSON",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_CLOUD_KEYFILE_JSON",
    "GOOGLE_CREDENTIALS",
    "GOOGLE_OAUTH_ACCESS_TOKEN",
];
const BROUGHT_FOR_AZURE: &[&str] = &[
    "ARM_CLIENT_CERTIFICATE",
    "ARM_CLIENT_CERTIFICATE_PATH",
    "ARM_CLIENT_SECRET",
    "ARM_CLIENT_SECRET_FILE_PATH",
    "ARM_OIDC_REQUEST_TOKEN",
    "ARM_OIDC_TOKEN",
    "ARM_OIDC_TOKEN_FILE_PATH",
    "ARM_USE_AKS_WORKLOAD_IDENTITY",
    "ARM_USE_MSI",
];

/// A cloud.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cloud {
    Aws,
    Gcp,
    Azure,
}

impl Cloud {
    const fn brought(self) -> &'static [&'static str] {
        match self {
            Self::Aws => BROUGHT_FOR_AWS,
            Self::Gcp => BROUGHT_FOR_GCP,
            Self::Azure => BROUGHT_FOR_AZURE,
        }
    }

    const fn token(self) -> &'static str {
        match self {
            Self::Aws => AWS_TOKEN,
            Self::Gcp => GCP_TOKEN,
            Self::Azure => AZURE_TOKEN,
        }
    }
}

impl fmt::Display for Cloud {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Aws => "AWS",
            Self::Gcp => "Google Cloud",
            Self::Azure => "Azure",
        })
    }
}

/// What the tool and scripts get.
#[derive(Debug, Default)]
pub(crate) struct Given {
    pub(crate) variables: Vec<(&'static str, String)>,
    /// The content of the file to which `GOOGLE_APPLICATION_CREDENTIALS` has to lead.
    pub(crate) google: Option<String>,
    /// The clouds for which the run brings credentials, and the variable that shows it.
    pub(crate) brought: Vec<(Cloud, &'static str)>,
    /// The files that have to hold tokens.
    pub(crate) tokens: Vec<PathBuf>,
}

/// The variables for a run. `is_set` says whether the run itself sets a variable: it may choose another role or application for
/// its token, because the cloud's own rules decide on that.
pub(crate) fn give(
    identities: &Identities,
    folder: &Path,
    job: &JobData,
    is_set: impl Fn(&str) -> bool,
) -> Given {
    let mut given = Given::default();
    let clouds = [
        (Cloud::Aws, identities.aws.is_some()),
        (Cloud::Gcp, identities.gcp.is_some()),
        (Cloud::Azure, identities.azure.is_some()),
    ];
    for (cloud, _) in clouds.into_iter().filter(|(_, is_there)| *is_there) {
        if let Some(name) = cloud.brought().iter().find(|name| is_set(name)) {
            given.brought.push((cloud, name));
            continue;
        }
        let token = folder.join(cloud.token());
        let path = token.to_string_lossy().into_owned();
        match cloud {
            Cloud::Aws => given.variables.extend([
                ("AWS_ROLE_ARN", identities.aws.clone().unwrap_or_default()),
                (
                    "AWS_ROLE_SESSION_NAME",
                    session_name(&job.job_id, &job.step_id),
                ),
                ("AWS_STS_REGIONAL_ENDPOINTS", "regional".to_owned()),
                ("AWS_WEB_IDENTITY_TOKEN_FILE", path),
            ]),
            Cloud::Gcp => {
                let document = identities
                    .gcp
                    .as_ref()
                    .map(|gcp| external_account(gcp, &path));
                given.google = document;
            }
            Cloud::Azure => {
                let azure = identities.azure.iter();
                given
                    .variables
                    .extend(azure.flat_map(|azure| of_azure(azure, &path)));
            }
        }
        given.tokens.push(token);
    }
    // The token's own variables have been checked above.
    given.variables.retain(|(name, _)| !is_set(name));
    given
}

fn of_azure(azure: &AzureIdentity, token: &str) -> Vec<(&'static str, String)> {
    let mut variables = vec![
        ("ARM_CLIENT_ID", azure.client_id.clone()),
        ("ARM_OIDC_TOKEN_FILE_PATH", token.to_owned()),
        ("ARM_TENANT_ID", azure.tenant_id.clone()),
        ("ARM_USE_OIDC", "true".to_owned()),
    ];
    let subscription = azure.subscription_id.clone();
    variables.extend(subscription.map(|id| ("ARM_SUBSCRIPTION_ID", id)));
    variables
}

/// The document by which Google's libraries exchange the token.
fn external_account(gcp: &GcpIdentity, token: &str) -> String {
    let mut document = json!({
        "type": "external_account",
        "audience": gcp.audience(),
        "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
        "token_url": "https://sts.googleapis.com/v1/token",
        "credential_source": {"file": token},
    });
    if let Some(account) = &gcp.service_account {
        document["service_account_impersonation_url"] = format!(
            "https://iamcredentials.googleapis.com/v1/projects/-/serviceAccounts/{account}:generateAccessToken"
        )
        .into();
    }
    document.to_string()
}

/// Checks that a file holds a token that is still valid. Otherwise each provider would fail with a message of its own.
pub(crate) fn check_token(path: &Path, now: SystemTime) -> Result<(), StepError> {
    let place = path.display();
    let wrong = |problem: &str| {
        StepError::new(
            Exit::BadConfiguration,
            format!("the token of the pod's identity in `{place}` {problem}"),
        )
        .with_hint(
            "Kubernetes mounts it from the settings of launcher or agent: see docs/identity.md",
        )
    };
    let text = regular_file::read_text(path, MAX_TOKEN_BYTES)
        .map_err(|source| wrong("cannot be read").because(&source))?;
    // An editor leaves a newline at the end. Kubernetes does not, and libraries send it to the cloud.
    let token = text.trim();
    if token.is_empty() {
        return Err(wrong("is empty"));
    }
    if token.len() != text.len() {
        return Err(wrong(
            "has blanks or a newline around it, which clouds refuse",
        ));
    }
    let end = end_of(token).ok_or_else(|| wrong("is no JSON Web Token with an end"))?;
    match now.duration_since(end) {
        Err(_) => Ok(()),
        Ok(ago) => {
            let ago = humantime::format_duration(Duration::from_secs(ago.as_secs()));
            let text =
                format!("the token of the pod's identity in `{place}` is invalid since {ago}");
            Err(StepError::infrastructure(text).with_hint(
                "the kubelet renews it: look at the kubelet, and at the clock of the node",
            ))
        }
    }
}

/// The end of a token, which only the cloud verifies.
fn end_of(token: &str) -> Option<SystemTime> {
    #[derive(Deserialize)]
    struct Claims {
        exp: u64,
    }
    let mut parts = token.split('.');
    let (_, claims, _) = (parts.next()?, parts.next()?, parts.next()?);
    let claims = URL_SAFE_NO_PAD.decode(claims).ok()?;
    let claims: Claims = serde_json::from_slice(&claims).ok()?;
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(claims.exp))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;
    use std::fs;

    const PROVIDER: &str =
        "projects/42/locations/global/workloadIdentityPools/pool/providers/cluster";

    fn all() -> Identities {
        Identities {
            aws: Some("arn:aws:iam::123456789012:role/deploy".to_owned()),
            gcp: Some(GcpIdentity {
                provider: PROVIDER.to_owned(),
                service_account: Some("deploy@acme.iam.gserviceaccount.com".to_owned()),
            }),
            azure: Some(AzureIdentity {
                client_id: "client".to_owned(),
                tenant_id: "tenant".to_owned(),
                subscription_id: None,
            }),
        }
    }

    fn given(set: &[&str]) -> Given {
        let job = JobData {
            job_id: "41".to_owned(),
            step_id: "s".to_owned(),
            ..JobData::default()
        };
        give(&all(), Path::new("/tokens"), &job, |name| {
            set.contains(&name)
        })
    }

    #[test]
    fn the_tool_gets_paths_of_tokens_and_no_token() {
        let given = given(&[]);
        let variables: Vec<_> = given
            .variables
            .iter()
            .map(|(name, value)| (*name, &**value))
            .collect();
        assert_eq!(
            variables,
            [
                ("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/deploy"),
                ("AWS_ROLE_SESSION_NAME", "mayfly-41-s"),
                ("AWS_STS_REGIONAL_ENDPOINTS", "regional"),
                ("AWS_WEB_IDENTITY_TOKEN_FILE", "/tokens/aws-token"),
                ("ARM_CLIENT_ID", "client"),
                ("ARM_OIDC_TOKEN_FILE_PATH", "/tokens/azure-token"),
                ("ARM_TENANT_ID", "tenant"),
                ("ARM_USE_OIDC", "true"),
            ]
        );
        let google: serde_json::Value = serde_json::from_str(&given.google.unwrap()).unwrap();
        assert_eq!(
            google["audience"],
            format!("//iam.googleapis.com/{PROVIDER}")
        );
        assert_eq!(
            google["credential_source"],
            json!({"file": "/tokens/gcp-token"})
        );
        assert_eq!(google["token_url"], "https://sts.googleapis.com/v1/token");
        let acts_as = google["service_account_impersonation_url"]
            .as_str()
            .unwrap();
        assert!(acts_as.contains("/deploy@acme.iam.gserviceaccount.com:generateAccessToken"));
        assert_eq!(given.tokens.len(), 3);
    }

    #[rstest]
    #[case("AWS_ACCESS_KEY_ID", Cloud::Aws)]
    #[case("AWS_WEB_IDENTITY_TOKEN_FILE", Cloud::Aws)]
    #[case("GOOGLE_CREDENTIALS", Cloud::Gcp)]
    #[case("GOOGLE_APPLICATION_CREDENTIALS", Cloud::Gcp)]
    #[case("ARM_CLIENT_SECRET", Cloud::Azure)]
    #[case("ARM_OIDC_TOKEN", Cloud::Azure)]
    fn credentials_that_the_run_brings_come_first(
        #[case] name: &'static str,
        #[case] cloud: Cloud,
    ) {
        let given = given(&[name]);
        assert_eq!(given.brought, [(cloud, name)]);
        assert_eq!(given.tokens.len(), 2);
        let prefix = if cloud == Cloud::Aws { "AWS_" } else { "ARM_" };
        let has = given
            .variables
            .iter()
            .any(|(name, _)| name.starts_with(prefix));
        assert_eq!(has, cloud == Cloud::Gcp, "{:?}", given.variables);
        assert_eq!(given.google.is_some(), cloud != Cloud::Gcp);
    }

    #[test]
    fn a_run_may_choose_another_role_and_subscription_for_its_token() {
        let given = given(&["AWS_ROLE_ARN", "ARM_SUBSCRIPTION_ID"]);
        let names: Vec<_> = given.variables.iter().map(|(name, _)| *name).collect();
        assert!(!names.contains(&"AWS_ROLE_ARN") && names.contains(&"AWS_WEB_IDENTITY_TOKEN_FILE"));
        assert_eq!(given.brought, []);
    }

    fn token(claims: &str) -> String {
        format!("e30.{}.c2ln", URL_SAFE_NO_PAD.encode(claims))
    }

    #[rstest]
    #[case(None, "cannot be read", Exit::BadConfiguration)]
    #[case(Some(String::new()), "is empty", Exit::BadConfiguration)]
    #[case(Some(format!("{}\n", token(r#"{"exp":2000}"#))), "newline", Exit::BadConfiguration)]
    #[case(Some("opaque".to_owned()), "no JSON Web Token", Exit::BadConfiguration)]
    #[case(Some(token("{}")), "no JSON Web Token", Exit::BadConfiguration)]
    #[case(
        Some(token(r#"{"exp":940}"#)),
        "invalid since 1m",
        Exit::Infrastructure
    )]
    fn a_token_that_no_cloud_accepts_is_named(
        #[case] content: Option<String>,
        #[case] problem: &str,
        #[case] exit: Exit,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("aws-token");
        if let Some(content) = content {
            fs::write(&path, content).unwrap();
        }
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let error = check_token(&path, now).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
        assert!(
            error.to_string().contains(&path.display().to_string()),
            "{error}"
        );
        assert_eq!(error.exit(), exit);
    }

    #[test]
    fn a_token_is_good_until_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("aws-token");
        fs::write(&path, token(r#"{"exp":1001}"#)).unwrap();
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        check_token(&path, at(1000)).unwrap();
        check_token(&path, at(1001)).unwrap_err();
    }
}
