//! The operator's logins for git servers, as one piece of work may use them: for which servers, and how git is told.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::sync::Arc;

use git_address::{Address, AllowList};
use git_logins::{Credential, Logins};
use secrecy::{ExposeSecret as _, SecretString};

use super::config_quote;
use super::login::Login;

/// Logins for some servers.
#[derive(Clone, Debug)]
pub(super) struct OperatorLogins {
    logins: Arc<Logins>,
    /// Scheme, host and port of each.
    servers: BTreeSet<String>,
}

impl OperatorLogins {
    /// The logins for all servers except that of the run's own login, which wins, and those that are `withheld`.
    pub(super) fn new(
        logins: &Arc<Logins>,
        own: Option<&Login>,
        withheld: impl Fn(&str) -> bool,
    ) -> Self {
        let own = own.and_then(|login| login.base.origin());
        let mut servers = logins.origins();
        servers.retain(|server| Some(server) != own.as_ref() && !withheld(server));
        Self {
            logins: Arc::clone(logins),
            servers,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.servers.is_empty()
    }

    fn serves(&self, address: &Address) -> bool {
        address
            .origin()
            .is_some_and(|origin| self.servers.contains(&origin))
    }

    /// The login for an address that the run may fetch from.
    pub(super) async fn credential(
        &self,
        address: &Address,
        allowed: Option<&AllowList>,
    ) -> Option<Credential> {
        let is_allowed = allowed.is_none_or(|list| list.judge(&address.to_string()).is_ok());
        if !is_allowed || !self.serves(address) {
            return None;
        }
        self.logins.credential(address).await
    }

    /// Settings of git, with which it asks `helper` for credentials and says for which repository.
    pub(super) fn settings(&self, helper: &str) -> Vec<(String, String)> {
        let settings = self.servers.iter().flat_map(|server| {
            [
                (format!("credential.{server}.helper"), helper.to_owned()),
                (
                    format!("credential.{server}.useHttpPath"),
                    "true".to_owned(),
                ),
            ]
        });
        settings.collect()
    }

    /// A configuration of git with the headers for servers that take no other login. They go nowhere else: git sends a header also
    /// where a redirect leads.
    pub(super) fn headers(&self) -> Option<SecretString> {
        let headers = self.logins.headers();
        let headers = headers.iter().filter(|header| self.serves(&header.base));
        let text = headers.fold(String::new(), |mut text, header| {
            let _ = write!(
                text,
                "[http \"{}\"]\n\tfollowRedirects = false\n\textraHeader =\n",
                config_quote(&header.base.to_string())
            );
            if let Some(token) = &header.bearer {
                let _ = writeln!(
                    text,
                    "\textraHeader = \"Authorization: Bearer {}\"",
                    config_quote(token.expose_secret())
                );
            }
            text
        });
        (!text.is_empty()).then(|| text.into())
    }

    /// What the operator's logins consist of, as far as this run has used them.
    pub(super) fn secrets(&self) -> Vec<SecretString> {
        self.logins.secrets()
    }

    /// Why there were no tokens.
    pub(super) fn take_problems(&self) -> Vec<String> {
        self.logins.take_problems()
    }
}
