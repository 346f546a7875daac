//! Settings of a run that could lead a login of the operator to another machine, or show it to others: proxies, addresses of hosts,
//! weaker TLS, helpers that keep credentials. A server that they concern gets no such login during `init`.
//!
//! An address that a setting replaces (`insteadOf`) needs no look: git asks for the login of the address that it connects to.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use git_address::Address;
use tokio::process::Command;

use super::process;
use crate::child_env::ChildEnv;

/// Variables that git and curl read, for all servers.
const VARIABLES: [&str; 26] = [
    "ALL_PROXY",
    "CURL_CA_BUNDLE",
    // It runs during `init`, and could ask as git does.
    "GIT_ASKPASS",
    // Another file in the place of the image's.
    "GIT_CONFIG_SYSTEM",
    "GIT_EXEC_PATH",
    "GIT_PROXY_SSL_CAINFO",
    "GIT_SSL_CAINFO",
    "GIT_SSL_CAPATH",
    "GIT_SSL_CIPHER_LIST",
    "GIT_SSL_NO_VERIFY",
    "GIT_SSL_VERSION",
    "GIT_TEMPLATE_DIR",
    // Headers are in the configuration that it writes to a file.
    "GIT_TRACE2_CONFIG_PARAMS",
    "GIT_TRACE2_ENV_VARS",
    "GIT_TRACE_REDACT",
    "HTTPS_PROXY",
    "HTTP_PROXY",
    "LD_AUDIT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "SSH_ASKPASS",
    "SSL_CERT_DIR",
    "SSL_CERT_FILE",
    "all_proxy",
    "http_proxy",
    "https_proxy",
];

/// Keys of the section `http`, which may be for one address.
const HTTP: [&str; 12] = [
    // The cookie of a session is as good as the login.
    "cookiefile",
    "curloptresolve",
    "extraheader",
    "proxy",
    "proxysslcainfo",
    "savecookies",
    "sslbackend",
    "sslcainfo",
    "sslcapath",
    "sslcipherlist",
    "sslverify",
    "sslversion",
];

/// What decides which configuration git reads. It gets no other variable of the run.
const OF_CONFIGURATION: [&str; 4] = ["GIT_COMMON_DIR", "GIT_DIR", "HOME", "XDG_CONFIG_HOME"];
/// `GIT_CONFIG` itself would hide all files from `git config`, and from nothing else.
const CONFIGURATION_PREFIX: &str = "GIT_CONFIG_";
/// The scope of what the image has for all users.
const OF_IMAGE: &str = "system";

/// One setting.
#[derive(Debug, PartialEq, Eq)]
struct Setting {
    shown: String,
    /// The address that it is for; `None` is all.
    address: Option<String>,
}

/// The settings that there are.
#[derive(Debug, Default)]
pub(super) struct RunSettings(Vec<Setting>);

impl RunSettings {
    /// Reads variables and configuration as git will have them in `folder`.
    pub(super) async fn read(env: &ChildEnv, path: &OsStr, folder: &Path) -> io::Result<Self> {
        let variables = VARIABLES.iter().filter(|name| env.is_of_run(name));
        let mut settings: Vec<_> = variables.map(|name| everywhere(name)).collect();
        let mut git = Command::new("git");
        git.args(["config", "--list", "--null", "--show-scope"])
            .current_dir(folder)
            .env_clear()
            .envs(env.iter().filter(|(name, _)| {
                name.to_str().is_some_and(|name| {
                    OF_CONFIGURATION.contains(&name) || name.starts_with(CONFIGURATION_PREFIX)
                })
            }))
            .env("PATH", path)
            .env("LC_ALL", "C");
        let finished = process::run(git).await?;
        if finished.success && finished.is_whole {
            settings.extend(read(&finished.stdout));
        } else {
            settings.push(everywhere("a configuration of git that cannot be read"));
        }
        Ok(Self(settings))
    }

    /// The first setting that concerns a server.
    pub(super) fn against(&self, server: &str) -> Option<&str> {
        let host = Address::parse(server).ok()?.host().to_owned();
        let concerns = |setting: &&Setting| {
            setting.address.as_ref().is_none_or(|address| {
                // git accepts a `*` in names of hosts, and more than this can read. `credential./.helper` is for all servers.
                let is_whole = address.starts_with("https://") || address.starts_with("http://");
                let parsed = Address::parse(address).ok().filter(|_| is_whole);
                parsed.is_none_or(|address| address.host() == host)
            })
        };
        self.0
            .iter()
            .find(concerns)
            .map(|setting| setting.shown.as_str())
    }
}

fn everywhere(name: &str) -> Setting {
    Setting {
        shown: name.to_owned(),
        address: None,
    }
}

/// Reads the output of `git config --list --null --show-scope`.
fn read(output: &str) -> impl Iterator<Item = Setting> {
    let mut fields = output.split('\0');
    let pairs = std::iter::from_fn(move || Some((fields.next()?, fields.next()?)));
    pairs
        .filter(|(scope, _)| *scope != OF_IMAGE)
        .filter_map(|(_, setting)| {
            let name = setting.split_once('\n').map_or(setting, |(name, _)| name);
            let (section, rest) = name.split_once('.')?;
            let (address, key) = match rest.rsplit_once('.') {
                Some((address, key)) => (Some(address), key),
                None => (None, rest),
            };
            let (shown, address) = match (section, key) {
                ("http", key) if HTTP.contains(&key) => (format!("http.{key}"), address),
                ("credential", "helper") => ("credential.helper".to_owned(), address),
                ("remote", "proxy") => ("remote.*.proxy".to_owned(), None),
                // It could hold in the folder of a module, and not here.
                ("includeif", _) => ("includeIf".to_owned(), None),
                ("core", "askpass" | "hookspath")
                | ("init", "templatedir")
                | ("trace2", "configparams" | "envvars") => (name.to_owned(), None),
                _ => return None,
            };
            Some(Setting {
                shown,
                address: address.map(str::to_owned),
            })
        })
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case("http.proxy", Some("http.proxy"), Some("http.proxy"))]
    #[case("http.sslverify", Some("http.sslverify"), Some("http.sslverify"))]
    #[case(
        "http.https://h/a.b/.curloptresolve",
        Some("http.curloptresolve"),
        None
    )]
    #[case("http.https://*.b.proxy", Some("http.proxy"), Some("http.proxy"))]
    #[case("http.https://u@H:8443.extraheader", Some("http.extraheader"), None)]
    #[case(
        "credential.helper",
        Some("credential.helper"),
        Some("credential.helper")
    )]
    #[case("credential.https://other.helper", None, Some("credential.helper"))]
    #[case(
        "credential./.helper",
        Some("credential.helper"),
        Some("credential.helper")
    )]
    #[case(
        "credential.x:y@h.helper",
        Some("credential.helper"),
        Some("credential.helper")
    )]
    #[case("http.cookiefile", Some("http.cookiefile"), Some("http.cookiefile"))]
    #[case("http.https://h.savecookies", Some("http.savecookies"), None)]
    #[case(
        "trace2.configparams",
        Some("trace2.configparams"),
        Some("trace2.configparams")
    )]
    #[case("core.askpass", Some("core.askpass"), Some("core.askpass"))]
    #[case("remote.origin.proxy", Some("remote.*.proxy"), Some("remote.*.proxy"))]
    #[case("init.templatedir", Some("init.templatedir"), Some("init.templatedir"))]
    #[case(
        "includeif.gitdir:**/modules/.path",
        Some("includeIf"),
        Some("includeIf")
    )]
    #[case("url.https://evil/.insteadof", None, None)]
    #[case("http.postbuffer", None, None)]
    #[case("user.name", None, None)]
    fn a_setting_concerns_the_servers_that_it_is_for(
        #[case] name: &str,
        #[case] here: Option<&str>,
        #[case] there: Option<&str>,
    ) {
        let output = format!("global\0user.email\nx\0local\0{name}\nv\0");
        let settings = RunSettings(read(&output).collect());
        assert_eq!(settings.against("https://h"), here);
        assert_eq!(settings.against("https://other"), there);
        let of_image = RunSettings(read(&format!("system\0{name}\nv\0")).collect());
        assert_eq!(of_image.against("https://h"), None);
    }

    #[test]
    fn a_setting_without_a_value_counts() {
        let settings = RunSettings(read("command\0http.sslverify\0").collect());
        assert_eq!(settings.against("https://h"), Some("http.sslverify"));
    }
}
