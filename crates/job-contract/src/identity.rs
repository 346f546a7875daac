//! Identities of pods: with which role, account or application a run speaks to a cloud without a key. Kubernetes gives the pod a
//! token for each cloud. This module knows the settings, the audiences and the files. No I/O.

use crate::env;

/// The folder with the tokens of a pod.
pub const FOLDER: &str = "/var/run/secrets/mayfly.dev";
/// How long a token is valid. Clouds accept it until then, also after the end of its pod.
pub const TOKEN_SECONDS: i64 = 3600;
pub const AWS_TOKEN: &str = "aws-token";
pub const GCP_TOKEN: &str = "gcp-token";
pub const AZURE_TOKEN: &str = "azure-token";
const AWS_AUDIENCE: &str = "sts.amazonaws.com";
const AZURE_AUDIENCE: &str = "api://AzureADTokenExchange";
/// The longest name of a session of a role.
const SESSION_NAME_BYTES: usize = 64;

/// The identities of runs, one for each cloud.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Identities {
    /// The ARN of a role.
    pub aws: Option<String>,
    pub gcp: Option<GcpIdentity>,
    pub azure: Option<AzureIdentity>,
}

/// A federated identity of Google Cloud.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GcpIdentity {
    /// `projects/…/locations/global/workloadIdentityPools/…/providers/…`.
    pub provider: String,
    /// The service account that the identity acts as.
    pub service_account: Option<String>,
}

/// An application or a managed identity of Azure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AzureIdentity {
    pub client_id: String,
    pub tenant_id: String,
    pub subscription_id: Option<String>,
}

/// A token that a pod needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodToken {
    pub file: &'static str,
    pub audience: String,
}

/// A variable whose value cannot be used, and why.
pub type Problem = (&'static str, String);

impl GcpIdentity {
    /// What the token service of Google calls the provider.
    #[must_use]
    pub fn audience(&self) -> String {
        format!("//iam.googleapis.com/{}", self.provider)
    }
}

impl Identities {
    /// Reads the settings.
    ///
    /// # Errors
    /// Returns every value that cannot be used.
    pub fn read(value: impl Fn(&'static str) -> Option<String>) -> Result<Self, Vec<Problem>> {
        let mut problems = Vec::new();
        let checked = |name: &'static str,
                       is_valid: fn(&str) -> bool,
                       expected: &str,
                       problems: &mut Vec<Problem>| {
            let text = value(name).map(|text| text.trim().to_owned());
            let text = text.filter(|text| !text.is_empty())?;
            if !is_valid(&text) {
                problems.push((name, format!("is no {expected}")));
            }
            Some(text)
        };
        let aws = checked(
            env::IDENTITY_AWS_ROLE,
            is_role,
            "ARN of a role, such as `arn:aws:iam::123456789012:role/deploy`",
            &mut problems,
        );
        let provider = checked(
            env::IDENTITY_GCP_PROVIDER,
            is_gcp_provider,
            "`projects/NUMBER/locations/global/workloadIdentityPools/POOL/providers/PROVIDER`",
            &mut problems,
        );
        let service_account = checked(
            env::IDENTITY_GCP_SERVICE_ACCOUNT,
            is_account,
            "address of a service account",
            &mut problems,
        );
        let mut id = |name| checked(name, is_id, "id of digits, letters and `-`", &mut problems);
        let client_id = id(env::IDENTITY_AZURE_CLIENT_ID);
        let tenant_id = id(env::IDENTITY_AZURE_TENANT_ID);
        let subscription_id = id(env::IDENTITY_AZURE_SUBSCRIPTION_ID);
        let mut needs = |name: &'static str, other: &'static str| {
            problems.push((name, format!("is required with `{other}`")));
        };
        if provider.is_none() && service_account.is_some() {
            needs(
                env::IDENTITY_GCP_PROVIDER,
                env::IDENTITY_GCP_SERVICE_ACCOUNT,
            );
        }
        if client_id.is_none() && tenant_id.is_some() {
            needs(env::IDENTITY_AZURE_CLIENT_ID, env::IDENTITY_AZURE_TENANT_ID);
        }
        if client_id.is_some() && tenant_id.is_none() {
            needs(env::IDENTITY_AZURE_TENANT_ID, env::IDENTITY_AZURE_CLIENT_ID);
        }
        if client_id.is_none() && tenant_id.is_none() && subscription_id.is_some() {
            let name = env::IDENTITY_AZURE_CLIENT_ID;
            needs(name, env::IDENTITY_AZURE_SUBSCRIPTION_ID);
        }
        if !problems.is_empty() {
            return Err(problems);
        }
        Ok(Self {
            aws,
            gcp: provider.map(|provider| GcpIdentity {
                provider,
                service_account,
            }),
            azure: client_id
                .zip(tenant_id)
                .map(|(client_id, tenant_id)| AzureIdentity {
                    client_id,
                    tenant_id,
                    subscription_id,
                }),
        })
    }

    /// The variables from which [`Self::read`] reads the same.
    #[must_use]
    pub fn variables(&self) -> Vec<(&'static str, &str)> {
        let (gcp, azure) = (self.gcp.as_ref(), self.azure.as_ref());
        let all = [
            (env::IDENTITY_AWS_ROLE, self.aws.as_deref()),
            (env::IDENTITY_GCP_PROVIDER, gcp.map(|gcp| &*gcp.provider)),
            (
                env::IDENTITY_GCP_SERVICE_ACCOUNT,
                gcp.and_then(|gcp| gcp.service_account.as_deref()),
            ),
            (
                env::IDENTITY_AZURE_CLIENT_ID,
                azure.map(|azure| &*azure.client_id),
            ),
            (
                env::IDENTITY_AZURE_TENANT_ID,
                azure.map(|azure| &*azure.tenant_id),
            ),
            (
                env::IDENTITY_AZURE_SUBSCRIPTION_ID,
                azure.and_then(|azure| azure.subscription_id.as_deref()),
            ),
        ];
        let set = all
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)));
        set.collect()
    }

    /// The tokens that a pod needs.
    #[must_use]
    pub fn tokens(&self) -> Vec<PodToken> {
        let aws = self.aws.as_ref().map(|_| PodToken {
            file: AWS_TOKEN,
            audience: AWS_AUDIENCE.to_owned(),
        });
        let gcp = self.gcp.as_ref().map(|gcp| PodToken {
            file: GCP_TOKEN,
            audience: format!("https:{}", gcp.audience()),
        });
        let azure = self.azure.as_ref().map(|_| PodToken {
            file: AZURE_TOKEN,
            audience: AZURE_AUDIENCE.to_owned(),
        });
        [aws, gcp, azure].into_iter().flatten().collect()
    }
}

/// The name under which a cloud logs what a step does. AWS allows neither other characters nor longer names.
#[must_use]
pub fn session_name(job: &str, step: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "_+=,.@-".contains(c);
    let name = format!("mayfly-{job}-{step}");
    name.chars()
        .map(|c| if is_allowed(c) { c } else { '-' })
        .take(SESSION_NAME_BYTES)
        .collect()
}

/// Whether this can be the ARN of a role.
#[must_use]
pub fn is_role(text: &str) -> bool {
    let parts: Vec<&str> = text.splitn(6, ':').collect();
    let [arn, partition, iam, region, account, resource] = parts[..] else {
        return false;
    };
    let is_name = |c: u8| c.is_ascii_alphanumeric() || b"_+=,.@/-".contains(&c);
    let is_partition = |c: u8| c.is_ascii_lowercase() || c == b'-';
    (arn, iam, region) == ("arn", "iam", "")
        && !partition.is_empty()
        && partition.bytes().all(is_partition)
        && account.len() == 12
        && account.bytes().all(|c| c.is_ascii_digit())
        && resource
            .strip_prefix("role/")
            .is_some_and(|name| (1..=576).contains(&name.len()) && name.bytes().all(is_name))
}

fn is_gcp_provider(text: &str) -> bool {
    let parts: Vec<&str> = text.split('/').collect();
    let [
        "projects",
        project,
        "locations",
        "global",
        "workloadIdentityPools",
        pool,
        "providers",
        provider,
    ] = parts[..]
    else {
        return false;
    };
    [project, pool, provider].into_iter().all(is_id)
}

fn is_account(text: &str) -> bool {
    let is_allowed = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"-.@".contains(&c);
    text.len() <= 254 && text.matches('@').count() == 1 && text.bytes().all(is_allowed)
}

fn is_id(text: &str) -> bool {
    let is_allowed = |c: u8| c.is_ascii_alphanumeric() || c == b'-';
    (1..=100).contains(&text.len()) && text.bytes().all(is_allowed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const ROLE: &str = "arn:aws:iam::123456789012:role/team/deploy";
    const PROVIDER: &str =
        "projects/42/locations/global/workloadIdentityPools/pool/providers/cluster";

    fn read(pairs: &[(&str, &str)]) -> Result<Identities, Vec<Problem>> {
        Identities::read(|name| {
            let mut found = pairs.iter().filter(|(given, _)| *given == name);
            found.next().map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn each_identity_has_a_token_with_the_audience_of_its_cloud() {
        let all = [
            (env::IDENTITY_AWS_ROLE, ROLE),
            (env::IDENTITY_GCP_PROVIDER, PROVIDER),
            (
                env::IDENTITY_GCP_SERVICE_ACCOUNT,
                "deploy@acme.iam.gserviceaccount.com",
            ),
            (env::IDENTITY_AZURE_CLIENT_ID, "client-1"),
            (env::IDENTITY_AZURE_TENANT_ID, "tenant-1"),
            (env::IDENTITY_AZURE_SUBSCRIPTION_ID, "subscription-1"),
        ];
        let identities = read(&all).unwrap();
        assert_eq!(identities.variables(), all);
        let tokens = identities.tokens();
        let tokens: Vec<_> = tokens
            .iter()
            .map(|token| (token.file, &*token.audience))
            .collect();
        let google = format!("https://iam.googleapis.com/{PROVIDER}");
        let expected = [
            (AWS_TOKEN, "sts.amazonaws.com"),
            (GCP_TOKEN, &*google),
            (AZURE_TOKEN, "api://AzureADTokenExchange"),
        ];
        assert_eq!(tokens, expected);
    }

    #[test]
    fn blank_settings_are_none() {
        assert_eq!(
            read(&[(env::IDENTITY_AWS_ROLE, " ")]).unwrap(),
            Identities::default()
        );
    }

    #[rstest]
    #[case(
        env::IDENTITY_AWS_ROLE,
        "arn:aws:iam::1:role/x",
        env::IDENTITY_AWS_ROLE
    )]
    #[case(
        env::IDENTITY_AWS_ROLE,
        "arn:aws:iam::123456789012:user/x",
        env::IDENTITY_AWS_ROLE
    )]
    #[case(
        env::IDENTITY_AWS_ROLE,
        "arn:aws:iam::123456789012:role/x\ny",
        env::IDENTITY_AWS_ROLE
    )]
    #[case(
        env::IDENTITY_GCP_PROVIDER,
        "//iam.googleapis.com/projects/1",
        env::IDENTITY_GCP_PROVIDER
    )]
    #[case(
        env::IDENTITY_GCP_SERVICE_ACCOUNT,
        "a@b.test",
        env::IDENTITY_GCP_PROVIDER
    )]
    #[case(env::IDENTITY_AZURE_CLIENT_ID, "c", env::IDENTITY_AZURE_TENANT_ID)]
    #[case(env::IDENTITY_AZURE_TENANT_ID, "t", env::IDENTITY_AZURE_CLIENT_ID)]
    #[case(
        env::IDENTITY_AZURE_SUBSCRIPTION_ID,
        "s",
        env::IDENTITY_AZURE_CLIENT_ID
    )]
    fn what_cannot_be_used_is_named(#[case] name: &str, #[case] value: &str, #[case] blamed: &str) {
        let problems = read(&[(name, value)]).unwrap_err();
        let blamed_names: Vec<_> = problems.iter().map(|(name, _)| *name).collect();
        assert_eq!(blamed_names, [blamed]);
    }

    #[test]
    fn names_of_sessions_fit_in_the_rules_of_aws() {
        assert_eq!(session_name("41", "a b\n"), "mayfly-41-a-b-");
        assert_eq!(session_name("41", &"ä".repeat(80)).len(), 64);
    }
}
