//! The operator's logins for git servers: which one an address gets, and the tokens of GitHub Apps.
//!
//! [`Settings`] reads what the operator has set, [`Logins`] answers for one run. This crate does not know git, and does not decide
//! which addresses a run may fetch from.

mod github;
mod settings;

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Mutex;

use git_address::Address;
use secrecy::{ExposeSecret as _, SecretString};

pub use self::settings::Settings;
use self::settings::{Login, Means};

/// More problems than anybody reads.
const MAX_PROBLEMS: usize = 20;
/// More than the tokens of a run. It gets no more than are masked.
const MAX_SECRETS: usize = 1000;

/// What a server gets by Basic authentication.
#[derive(Clone, Debug)]
pub struct Credential {
    pub username: SecretString,
    pub password: SecretString,
}

/// The header of requests to a server, or to a part of it.
#[derive(Clone, Debug)]
pub struct Header {
    pub base: Address,
    /// `None` takes the header of a larger part away.
    pub bearer: Option<SecretString>,
}

/// Hides a new secret in the log.
pub type Mask = Box<dyn Fn(&SecretString) + Send + Sync>;

/// The logins of one run.
pub struct Logins {
    /// The most exact ones first.
    entries: Vec<Login>,
    client: reqwest::Client,
    mask: Mask,
    /// What it consists of, with the tokens that were made.
    secrets: Mutex<Vec<SecretString>>,
    problems: Mutex<Vec<String>>,
}

impl fmt::Debug for Logins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list()
            .entries(self.entries.iter().map(|login| &login.base))
            .finish()
    }
}

impl Logins {
    /// `client` must follow no redirect: a token is for one server. `mask` gets every token that is made.
    #[must_use]
    pub fn new(settings: Settings, client: reqwest::Client, mask: Mask) -> Self {
        Self {
            entries: settings.logins,
            client,
            mask,
            secrets: Mutex::new(settings.secrets),
            problems: Mutex::default(),
        }
    }

    /// Scheme, host and port of the servers that there are logins for.
    pub fn origins(&self) -> BTreeSet<String> {
        let origins = self.entries.iter().filter_map(|login| login.base.origin());
        origins.collect()
    }

    /// What git sends to an address if its server asks for a login. A token that cannot be had is a [problem](Self::take_problems).
    pub async fn credential(&self, address: &Address) -> Option<Credential> {
        let login = self
            .entries
            .iter()
            .find(|login| login.base.contains(address))?;
        match &login.means {
            Means::Basic(credential) => Some(credential.clone()),
            // Only a header can have it.
            Means::Bearer(_) => None,
            Means::App(app) => match app.token(&self.client, address.path()).await {
                Ok(token) if self.remember(&token) => Some(Credential {
                    username: "x-access-token".into(),
                    password: token,
                }),
                Ok(_) => self.problem(format!("a run gets at most {MAX_SECRETS} tokens")),
                Err(problem) => self.problem(problem),
            },
        }
    }

    fn problem<T>(&self, problem: String) -> Option<T> {
        let mut problems = runtime::lock(&self.problems);
        if problems.len() < MAX_PROBLEMS && !problems.contains(&problem) {
            problems.push(problem);
        }
        None
    }

    /// Returns whether the token is masked from now on.
    fn remember(&self, token: &SecretString) -> bool {
        let mut secrets = runtime::lock(&self.secrets);
        let is_known = |known: &SecretString| known.expose_secret() == token.expose_secret();
        if secrets.iter().any(is_known) {
            return true;
        }
        let has_room = secrets.len() < MAX_SECRETS;
        if has_room {
            (self.mask)(token);
            secrets.push(token.clone());
        }
        has_room
    }

    /// What logins consist of, and the tokens that were made, for messages.
    pub fn secrets(&self) -> Vec<SecretString> {
        runtime::lock(&self.secrets).clone()
    }

    /// The headers for the servers that take no Basic authentication. A later one is more exact.
    pub fn headers(&self) -> Vec<Header> {
        let bearer = |login: &Login| match &login.means {
            Means::Bearer(token) => Some(token.clone()),
            Means::Basic(_) | Means::App(_) => None,
        };
        let servers: BTreeSet<_> = self
            .entries
            .iter()
            .filter(|login| bearer(login).is_some())
            .filter_map(|login| login.base.origin())
            .collect();
        self.entries
            .iter()
            .rev()
            .filter(|login| {
                login
                    .base
                    .origin()
                    .is_some_and(|origin| servers.contains(&origin))
            })
            .map(|login| Header {
                base: login.base.clone(),
                bearer: bearer(login),
            })
            .collect()
    }

    /// Why there were no tokens, for the log of the run.
    pub fn take_problems(&self) -> Vec<String> {
        std::mem::take(&mut runtime::lock(&self.problems))
    }
}
