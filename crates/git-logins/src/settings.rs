//! The operator's list of logins. It names the variables that hold passwords, tokens and keys, because code of runs can read files.

use std::net::IpAddr;

use git_address::{Address, Transport};
use job_contract::env;
use secrecy::{ExposeSecret as _, SecretString};
use secret_stores::{Lookup, RunIds};
use serde::Deserialize;

use crate::Credential;
use crate::github::App;

/// The logins of one run.
#[derive(Debug, Default)]
pub struct Settings {
    pub(crate) logins: Vec<Login>,
    pub(crate) secrets: Vec<SecretString>,
}

#[derive(Debug)]
pub(crate) struct Login {
    pub(crate) base: Address,
    pub(crate) means: Means,
}

#[derive(Debug)]
pub(crate) enum Means {
    Basic(Credential),
    Bearer(SecretString),
    App(Box<App>),
}

/// One entry of the list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// A server, or a part of it.
    url: String,
    kind: Kind,
    /// The variable with the secret.
    variable: String,
    /// Id or client id of a GitHub App.
    app: Option<String>,
    /// With one of these, only their runs use the login.
    #[serde(default)]
    organizations: Vec<String>,
    #[serde(default)]
    workspaces: Vec<String>,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    Bitbucket,
    Gitlab,
    GithubApp,
}

impl Settings {
    /// The logins of a run; `own` looks up the executor's variables.
    ///
    /// # Errors
    /// Says what is wrong. No text quotes a secret.
    pub fn read(own: &dyn Fn(&str) -> Option<String>, run: RunIds<'_>) -> Result<Self, String> {
        let lookup = Lookup::new(own);
        let name = env::GIT_LOGINS;
        let Some(text) = lookup.text_or_file(name)? else {
            return Ok(Self::default());
        };
        let entries: Vec<Entry> = serde_json::from_str(&text)
            .map_err(|error| format!("`{name}` is no list of logins: {error}"))?;
        let mut settings = Self::default();
        for entry in entries {
            let wrong = |text| format!("`{name}`: the login for `{}`: {text}", shown(&entry.url));
            let base = entry.check().map_err(wrong)?;
            if !entry.is_for(run) {
                continue;
            }
            let secret = lookup.text_or_file(&entry.variable)?;
            let secret = secret.ok_or_else(|| wrong(format!("`{}` is not set", entry.variable)))?;
            let secret = SecretString::from(secret);
            let means = entry.means(&base, &secret).map_err(wrong)?;
            settings.secrets.extend(secrets_of(&means));
            settings.secrets.push(secret);
            settings.logins.push(Login { base, means });
        }
        // The first one of the list wins among equals.
        settings
            .logins
            .sort_by_key(|login| std::cmp::Reverse(login.base.path().trim_end_matches('/').len()));
        Ok(settings)
    }

    /// Whether there is no login.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.logins.is_empty()
    }

    /// What the log must not show.
    #[must_use]
    pub fn secrets(&self) -> &[SecretString] {
        &self.secrets
    }
}

impl Entry {
    /// The address, if the entry can be used at all.
    fn check(&self) -> Result<Address, String> {
        let base = Address::parse(&self.url).map_err(|error| error.to_string())?;
        let is_here = base.host() == "localhost"
            || base
                .host()
                .trim_matches(['[', ']'])
                .parse()
                .is_ok_and(|ip: IpAddr| ip.is_loopback());
        match base.transport() {
            Transport::Https => {}
            Transport::Http if is_here => {}
            _ => return Err("only `https` is allowed for other machines".to_owned()),
        }
        if !self.variable.starts_with(env::GIT_LOGIN_PREFIX) {
            let prefix = env::GIT_LOGIN_PREFIX;
            return Err(format!(
                "`variable` does not begin with `{prefix}`, so runs could get it"
            ));
        }
        match (self.kind, &self.app) {
            (Kind::GithubApp, None) => Err("`app` is not set: the id of the App".to_owned()),
            (Kind::Bitbucket | Kind::Gitlab, Some(_)) => {
                Err("`app` is only for the kind `github-app`".to_owned())
            }
            _ => Ok(base),
        }
    }

    fn is_for(&self, run: RunIds<'_>) -> bool {
        let is_for_all = self.organizations.is_empty() && self.workspaces.is_empty();
        let has = |ids: &[String], id: &str| ids.iter().any(|known| known == id);
        is_for_all
            || has(&self.organizations, run.organization)
            || has(&self.workspaces, run.workspace)
    }

    fn means(&self, base: &Address, secret: &SecretString) -> Result<Means, String> {
        let text = secret.expose_secret();
        if let (Kind::GithubApp, Some(app)) = (self.kind, &self.app) {
            return Ok(Means::App(Box::new(App::new(app, secret, base)?)));
        }
        // A line break would begin another line of git's protocol.
        if text.contains(char::is_control) {
            return Err(format!("`{}` has control characters", self.variable));
        }
        Ok(match text.split_once(':') {
            Some((username, password)) => Means::Basic(Credential {
                username: username.into(),
                password: password.into(),
            }),
            None if self.kind == Kind::Gitlab => Means::Basic(Credential {
                username: "oauth2".into(),
                password: secret.clone(),
            }),
            // Tokens of projects and repositories have no user.
            None => Means::Bearer(secret.clone()),
        })
    }
}

fn secrets_of(means: &Means) -> Option<SecretString> {
    match means {
        Means::Basic(credential) => Some(credential.password.clone()),
        Means::Bearer(_) | Means::App(_) => None,
    }
}

/// An address without what may be a password in it.
fn shown(url: &str) -> &str {
    url.rsplit('@').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn read(list: &str, workspace: &str) -> Result<Settings, String> {
        let own = |name: &str| match name {
            env::GIT_LOGINS => Some(list.to_owned()),
            "MAYFLY_GIT_LOGIN_A" => Some("bob:s3cr3t-a".to_owned()),
            "MAYFLY_GIT_LOGIN_B" => Some("s3cr3t-b".to_owned()),
            "MAYFLY_GIT_LOGIN_LINES" => Some("s3cr3t\nhost=evil".to_owned()),
            _ => None,
        };
        let run = RunIds {
            organization: "org",
            workspace,
        };
        Settings::read(&own, run)
    }

    #[rstest]
    #[case("{}", "no list")]
    #[case(
        r#"[{"url":"https://h","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_A","token":"x"}]"#,
        "unknown field"
    )]
    #[case(
        r#"[{"url":"http://h","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_A"}]"#,
        "only `https`"
    )]
    #[case(
        r#"[{"url":"git@h:x","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_A"}]"#,
        "only `https`"
    )]
    #[case(
        r#"[{"url":"https://u:hunter2@h/a/../b","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_A"}]"#,
        "`h/a/../b`: its path"
    )]
    #[case(
        r#"[{"url":"https://h","kind":"gitlab","variable":"HOME"}]"#,
        "does not begin"
    )]
    #[case(
        r#"[{"url":"https://h","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_C"}]"#,
        "`MAYFLY_GIT_LOGIN_C` is not set"
    )]
    #[case(
        r#"[{"url":"https://h","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_A","app":"1"}]"#,
        "`app` is only"
    )]
    #[case(
        r#"[{"url":"https://h","kind":"github-app","variable":"MAYFLY_GIT_LOGIN_A"}]"#,
        "`app` is not set"
    )]
    #[case(
        r#"[{"url":"https://h","kind":"github-app","app":"1","variable":"MAYFLY_GIT_LOGIN_A"}]"#,
        "no RSA key"
    )]
    #[case(
        r#"[{"url":"https://h","kind":"bitbucket","variable":"MAYFLY_GIT_LOGIN_LINES"}]"#,
        "control characters"
    )]
    fn what_is_wrong_is_said_without_a_secret(#[case] list: &str, #[case] expected: &str) {
        let error = read(list, "w").unwrap_err();
        assert!(error.contains(expected), "{error}");
        assert!(!error.contains("s3cr3t") && !error.contains("hunter2"));
    }

    #[test]
    fn a_login_can_be_for_some_runs() {
        let list = r#"[
            {"url":"https://h/all","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_A"},
            {"url":"https://h/w","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_B","workspaces":["w"]},
            {"url":"https://h/o","kind":"gitlab","variable":"MAYFLY_GIT_LOGIN_B","organizations":["other"]}]"#;
        let bases = |workspace| -> Vec<String> {
            let settings = read(list, workspace).unwrap();
            let bases = settings.logins.iter().map(|login| login.base.to_string());
            bases.collect()
        };
        assert_eq!(bases("w"), ["https://h/all", "https://h/w"]);
        assert_eq!(bases("v"), ["https://h/all"]);
    }

    #[test]
    fn without_a_list_there_is_no_login() {
        let none = RunIds {
            organization: "",
            workspace: "",
        };
        assert!(Settings::read(&|_| None, none).unwrap().is_empty());
    }
}
