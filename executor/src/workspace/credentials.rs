//! Selects the credential for a kind of VCS connection (contract 8.2). This module does not know how git gets it.

use job_contract::env;
use secrecy::{ExposeSecret as _, SecretString};

use super::azure::{AzureEnvironment, is_azure_devops};
use super::http::ProxySettings;
use super::source::Source;
use crate::error::StepError;

/// How git authenticates.
#[derive(Clone, Debug)]
pub(super) enum Credential {
    Anonymous,
    /// User name and password over HTTP. Either may be the secret.
    Basic {
        username: SecretString,
        password: SecretString,
    },
    SshKey(SecretString),
}

/// The fields of the job data, or of the tools repository's settings, that select the credential.
#[derive(Clone, Copy, Default)]
pub(super) struct VcsAccess<'a> {
    pub(super) vcs_type: &'a str,
    pub(super) connection_type: Option<&'a str>,
    pub(super) token: Option<&'a str>,
}

const SSH: &str = "SSH";
/// The executor's own identity, for Azure DevOps.
const AZURE_IDENTITY: &str = "AZURE_SP_MI";

impl VcsAccess<'_> {
    /// Whether the connection uses an SSH key.
    pub(super) fn is_ssh(&self) -> bool {
        self.vcs_type == SSH || self.vcs_type.starts_with("SSH~")
    }

    /// Whether the credential is the executor's own identity.
    pub(super) fn is_own_identity(&self) -> bool {
        self.vcs_type == AZURE_IDENTITY
    }

    /// Refuses to use the executor's own identity for a server that neither Microsoft nor the operator has named: a workspace
    /// chooses its source. `is_judged` says that the operator has a rule, which the source has passed.
    pub(super) fn refuse_foreign_server(
        &self,
        source: &Source,
        is_judged: bool,
    ) -> Result<(), StepError> {
        if !self.is_own_identity() || is_judged || is_azure_devops(source) {
            return Ok(());
        }
        let text = format!(
            "the executor's Azure identity is not used for `{source}`, which is no repository of Azure DevOps by https"
        );
        Err(StepError::user(text).with_hint(format!(
            "use an address of https://dev.azure.com or https://*.visualstudio.com; for another server, the operator has to \
             allow its address in `{}`",
            env::ALLOWED_VCS_URL_REGEX
        )))
    }

    /// Maps the connection to a credential. Only `AZURE_SP_MI` needs a request.
    pub(super) async fn credential(
        &self,
        azure: &AzureEnvironment,
        proxies: &ProxySettings,
    ) -> Result<Credential, StepError> {
        let oauth = self
            .connection_type
            .is_some_and(|kind| kind.eq_ignore_ascii_case("OAUTH"));
        match self.vcs_type {
            "GITHUB" if oauth => Ok(basic(self.token()?, SecretString::default())),
            "GITHUB" => Ok(basic("x-access-token".into(), self.token()?)),
            "GITLAB" => Ok(basic("oauth2".into(), self.token()?)),
            "BITBUCKET" => Ok(basic("x-token-auth".into(), self.token()?)),
            "AZURE_DEVOPS" => Ok(basic("dummy".into(), self.token()?)),
            AZURE_IDENTITY => Ok(basic("dummy".into(), azure.devops_token(proxies).await?)),
            _ if self.is_ssh() => match self.token.filter(|key| !key.trim().is_empty()) {
                Some(key) => Ok(Credential::SshKey(key.into())),
                None => Err(StepError::user(format!(
                    "the job data holds no private key for the SSH connection `{}`",
                    self.vcs_type
                ))
                .with_hint("check the SSH key the workspace is configured with")),
            },
            _ => Ok(Credential::Anonymous),
        }
    }

    fn token(&self) -> Result<SecretString, StepError> {
        let vcs_type = self.vcs_type;
        let token = self.token.map(str::trim).unwrap_or_default();
        if token.is_empty() {
            return Err(StepError::user(format!(
                "the job data holds no access token for the VCS connection of type `{vcs_type}`"
            ))
            .with_hint(
                "reconnect the VCS provider of the workspace; the platform could not issue a token",
            ));
        }
        // It would end the credential early and start another one.
        if token.contains(char::is_control) {
            return Err(StepError::user(format!(
                "the access token for the VCS connection of type `{vcs_type}` holds a line break"
            ))
            .with_hint("enter the token again, as one line"));
        }
        Ok(token.into())
    }
}

fn basic(username: SecretString, password: SecretString) -> Credential {
    Credential::Basic { username, password }
}

impl Credential {
    /// The secret values.
    pub(super) fn secrets(&self) -> Vec<SecretString> {
        match self {
            Self::Anonymous => Vec::new(),
            Self::Basic { username, password } if password.expose_secret().is_empty() => {
                vec![username.clone()]
            }
            Self::Basic { password, .. } => vec![password.clone()],
            Self::SshKey(key) => vec![key.clone()],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use job_contract::Exit;
    use rstest::rstest;

    async fn credential(
        vcs_type: &str,
        connection_type: Option<&str>,
        token: Option<&str>,
    ) -> Result<Credential, StepError> {
        VcsAccess {
            vcs_type,
            connection_type,
            token,
        }
        .credential(&AzureEnvironment::default(), &ProxySettings::default())
        .await
    }

    #[rstest]
    #[case("GITHUB", Some("OAUTH"), "t0k", "")]
    #[case("GITHUB", Some("STANDALONE"), "x-access-token", "t0k")]
    #[case("GITHUB", None, "x-access-token", "t0k")]
    #[case("GITLAB", Some("OAUTH"), "oauth2", "t0k")]
    #[case("BITBUCKET", None, "x-token-auth", "t0k")]
    #[case("AZURE_DEVOPS", None, "dummy", "t0k")]
    #[tokio::test]
    async fn each_connection_has_its_user_name(
        #[case] vcs_type: &str,
        #[case] connection_type: Option<&str>,
        #[case] user: &str,
        #[case] secret: &str,
    ) {
        let Credential::Basic { username, password } =
            credential(vcs_type, connection_type, Some(" t0k\n"))
                .await
                .unwrap()
        else {
            panic!("a token makes a basic credential");
        };
        assert_eq!(username.expose_secret(), user);
        assert_eq!(password.expose_secret(), secret);
    }

    #[rstest]
    #[case("GITHUB")]
    #[case("GITLAB")]
    #[case("BITBUCKET")]
    #[case("AZURE_DEVOPS")]
    #[case("SSH~id_rsa")]
    #[tokio::test]
    async fn a_missing_token_is_an_error_that_names_the_connection(#[case] vcs_type: &str) {
        for token in [None, Some(""), Some(" \n")] {
            let error = credential(vcs_type, None, token).await.unwrap_err();
            assert!(error.to_string().contains(vcs_type), "{error}");
            assert_eq!(error.exit(), Exit::BadJobData);
            assert!(error.hint().is_some());
        }
    }

    #[tokio::test]
    async fn a_token_of_two_lines_cannot_add_a_second_credential() {
        let error = credential("GITLAB", None, Some("a\nhost=evil"))
            .await
            .unwrap_err();
        assert!(error.to_string().ends_with("holds a line break"));
        assert!(!error.to_string().contains("evil"));
    }

    #[rstest]
    #[case("https://dev.azure.com/o/p/_git/r", true)]
    #[case("https://me@DEV.azure.com:443/o/p/_git/r", true)]
    #[case("https://o.visualstudio.com/p/_git/r", true)]
    #[case("http://dev.azure.com/o/p/_git/r", false)]
    #[case("https://dev.azure.com:8443/o/p/_git/r", false)]
    #[case("https://dev.azure.com.evil.test/o", false)]
    #[case("https://dev.azure.com@evil.test/o", false)]
    #[case("https://evilvisualstudio.com/o", false)]
    #[case("https://evil.test/.visualstudio.com", false)]
    #[case("git@ssh.dev.azure.com:v3/o/p/r", false)]
    fn the_azure_identity_is_for_azure_devops_and_what_the_operator_names(
        #[case] source: &str,
        #[case] accepted: bool,
    ) {
        let source = Source::parse(source).unwrap();
        let access = |vcs_type| VcsAccess {
            vcs_type,
            ..VcsAccess::default()
        };
        let refused = access("AZURE_SP_MI").refuse_foreign_server(&source, false);
        assert_eq!(refused.is_ok(), accepted);
        let of_rule = access("AZURE_SP_MI").refuse_foreign_server(&source, true);
        let of_token = access("AZURE_DEVOPS").refuse_foreign_server(&source, false);
        assert!(of_rule.is_ok() && of_token.is_ok());
    }

    #[tokio::test]
    async fn public_and_unknown_connections_are_anonymous() {
        for vcs_type in ["PUBLIC", "", "SOMETHING_NEW"] {
            let found = credential(vcs_type, None, Some("ignored")).await.unwrap();
            assert!(matches!(found, Credential::Anonymous));
        }
    }
}
