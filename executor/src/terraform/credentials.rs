//! How `init` reaches the platform's registry of modules and providers (contract 8.7): with a token of the platform, or behind a
//! hub at an address that has a password. It is in a file of its own outside the work tree. The file exists only while `init`
//! runs, so that neither the tool's providers nor scripts find it. The operator's configuration file comes first and stays valid.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use job_contract::Tool;
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};
use tracing::{info, warn};

use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::terraform::hcl::quote;
use crate::workspace::write_private_file;

/// The variable that names the tool's configuration file.
const CONFIG_FILE: &str = "TF_CLI_CONFIG_FILE";
const FILE_NAME: &str = "platform.tfrc";
/// Folders with more files of configuration and tokens, below the home folder. The tool does not read them if a variable names its
/// configuration.
const FOLDERS: [&str; 2] = [".terraform.d", ".config/opentofu"];
const MAX_CONFIGURATION_BYTES: u64 = 1 << 20;

/// The file with a token or password. It is removed on drop.
#[derive(Debug)]
#[must_use = "the token stays on disk until the file is removed"]
pub struct AccessFile(Option<PathBuf>);

/// What `init` is told beside the operator's own configuration.
#[derive(Debug)]
pub struct InitConfig<'t> {
    /// Hosts of the platform, and how the tool reaches them.
    pub access: Option<(&'t [String], AccessBy<'t>)>,
    /// Providers that are there already.
    pub overlay: Option<&'t Overlay>,
    /// Hosts whose services are elsewhere.
    pub forced: Vec<ForcedHost>,
    pub tool: Tool,
    /// The folder of the operator's configuration file.
    pub home: &'t Path,
    /// A folder that no other user can read.
    pub private: &'t Path,
}

/// A folder with the packages of some providers, laid out like a mirror. The tool asks no registry for these.
#[derive(Debug)]
pub struct Overlay {
    pub folder: PathBuf,
    /// Addresses of providers.
    pub providers: Vec<String>,
}

/// A host whose services the tool does not look up itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForcedHost {
    pub name: String,
    /// Names of services, and their addresses.
    pub services: Vec<(String, String)>,
}

/// What is different from other hosts.
#[derive(Clone, Copy, Debug)]
pub enum AccessBy<'t> {
    /// They get this token.
    Token(&'t SecretString),
    /// Their registry is at this address.
    Registry(&'t SecretString),
}

impl AccessBy<'_> {
    /// The name of the block in the configuration.
    const fn block(self) -> &'static str {
        match self {
            Self::Token(_) => "credentials",
            Self::Registry(_) => "host",
        }
    }

    /// What the block says.
    fn settings(self) -> String {
        match self {
            Self::Token(token) => format!("  token = \"{}\"", token.expose_secret()),
            Self::Registry(address) => {
                let address = address.expose_secret();
                format!(
                    "  services = {{\n    \"modules.v1\" = \"{address}/modules/v1/\"\n    \
                     \"providers.v1\" = \"{address}/providers/v1/\"\n  }}"
                )
            }
        }
    }
}

/// Writes the file and sets its path in the environment of `init`, unless the path of another file is set.
pub fn write_init_config(
    config: &InitConfig<'_>,
    env: &mut ChildEnv,
) -> Result<AccessFile, StepError> {
    if env.get(CONFIG_FILE).is_some() {
        info!("`{CONFIG_FILE}` is set: the tool is not told how to reach the platform");
        return Ok(AccessFile::none());
    }
    let mut text = own_configuration(config.home, config.tool);
    if let Some((hosts, by)) = config.access {
        // A token that the run brings itself is for the host itself.
        let hosts: Vec<_> = match by {
            AccessBy::Token(_) => hosts.to_vec(),
            AccessBy::Registry(_) => {
                let hosts = hosts.iter().filter(|host| !brings_token(env, host));
                hosts.cloned().collect()
            }
        };
        text = configuration(&text, &hosts, by);
    }
    for host in &config.forced {
        text = with_services(&text, host);
    }
    if let Some(overlay) = config.overlay {
        text = with_overlay(&text, overlay);
    }
    let path = config.private.join(FILE_NAME);
    // It is created first, so that a partly written file is removed too.
    let file = AccessFile(Some(path.clone()));
    write_private_file(&path, text.as_bytes()).map_err(|source| {
        StepError::work_folder("could not write the credentials file", &path, &source)
    })?;
    env.set(CONFIG_FILE, &path.to_string_lossy())?;
    Ok(file)
}

impl AccessFile {
    /// No file.
    pub const fn none() -> Self {
        Self(None)
    }

    /// Removes the file. No other part of the step may run before that.
    pub fn remove(mut self) -> Result<(), StepError> {
        let Some(path) = self.0.take() else {
            return Ok(());
        };
        fs::remove_file(&path).map_err(|source| {
            StepError::work_folder("could not remove the credentials file", &path, &source)
        })
    }
}

/// Removes the file after an `init` that panicked or was cancelled.
impl Drop for AccessFile {
    fn drop(&mut self) {
        let Some(path) = &self.0 else { return };
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                warn!(%error, path = %path.display(), "could not remove the token of `init`");
            }
            _ => {}
        }
    }
}

/// The configuration that the tool would read without the variable.
fn own_configuration(home: &Path, tool: Tool) -> String {
    let names: &[&str] = match tool {
        Tool::Terraform => &[".terraformrc"],
        Tool::OpenTofu => &[".tofurc", ".terraformrc"],
    };
    for name in names {
        let path = home.join(name);
        match regular_file::read_text(&path, MAX_CONFIGURATION_BYTES) {
            Ok(text) => return text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(%error, path = %path.display(), "a configuration file of the tool cannot be read");
            }
        }
    }
    String::new()
}

/// `own`, plus a block for those hosts that it has none for.
fn configuration(own: &str, hosts: &[String], by: AccessBy<'_>) -> String {
    let mut text = own.to_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    for host in hosts {
        if !is_host(host) {
            warn!(
                host,
                "the tool is not told how to reach this name, because it is not a host"
            );
            continue;
        }
        let block = format!("{} \"{host}\"", by.block());
        if own.contains(&block) {
            continue;
        }
        writeln!(text, "{block} {{\n{}\n}}", by.settings())
            .expect("writing to a string cannot fail");
    }
    text
}

/// The variables in which a tool looks for the token of a host.
fn token_variables(host: &str) -> [String; 2] {
    let name = format!("TF_TOKEN_{}", host.replace('.', "_"));
    [name.replace('-', "__"), name]
}

/// Whether a run brings a token of its own for a host.
pub(crate) fn brings_token(env: &ChildEnv, host: &str) -> bool {
    let names = token_variables(host);
    names.iter().any(|name| env.get(name).is_some())
}

/// Whether something of the tool's configuration decides where packages of providers come from, or would be lost if a variable
/// named another file.
pub(crate) fn decides_on_providers(home: &Path, tool: Tool) -> bool {
    let own = own_configuration(home, tool);
    let words = ["provider_installation", "plugin_cache_dir"];
    let is_configuration = |entry: &fs::DirEntry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.ends_with(".tfrc") || name.ends_with(".tfrc.json")
    };
    let mut entries = FOLDERS
        .iter()
        .filter_map(|folder| fs::read_dir(home.join(folder)).ok())
        .flatten()
        .flatten();
    words.iter().any(|word| own.contains(word)) || entries.any(|entry| is_configuration(&entry))
}

/// Whether the tool might send a token to a host, or has settings of its own for it.
pub(crate) fn has_settings_of(env: &ChildEnv, home: &Path, tool: Tool, host: &str) -> bool {
    let own = own_configuration(home, tool);
    brings_token(env, host) || own.contains(host) || own.contains("credentials_helper")
}

/// `own`, plus the services of a host. `own` says nothing about it.
fn with_services(own: &str, host: &ForcedHost) -> String {
    let mut text = own.to_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    let services = host.services.iter();
    let services: Vec<_> = services
        .map(|(name, address)| format!("    {} = {}", quote(name), quote(address)))
        .collect();
    let (name, services) = (quote(&host.name), services.join("\n"));
    writeln!(
        text,
        "host {name} {{\n  services = {{\n{services}\n  }}\n}}"
    )
    .expect("writing to a string cannot fail");
    text
}

/// `own`, plus where these providers are. `own` says nothing about that.
fn with_overlay(own: &str, overlay: &Overlay) -> String {
    let mut text = own.to_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    let names: Vec<_> = overlay.providers.iter().map(|name| quote(name)).collect();
    let (names, folder) = (names.join(", "), quote(&overlay.folder.to_string_lossy()));
    writeln!(
        text,
        "provider_installation {{\n  filesystem_mirror {{\n    path    = {folder}\n    include = [{names}]\n  }}\n  \
         direct {{\n    exclude = [{names}]\n  }}\n}}"
    )
    .expect("writing to a string cannot fail");
    text
}

/// Whether a text can be a host with or without a port, and needs no quoting.
fn is_host(text: &str) -> bool {
    !text.is_empty()
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_removed_once_it_is_withdrawn_or_dropped() {
        let private = tempfile::tempdir().unwrap();
        let path = private.path().join(FILE_NAME);
        fs::write(&path, "token").unwrap();
        AccessFile(Some(path.clone())).remove().unwrap();
        assert!(!path.exists());
        fs::write(&path, "token").unwrap();
        drop(AccessFile(Some(path.clone())));
        assert!(!path.exists());
        // If the file cannot be removed, the step must not continue.
        fs::create_dir(&path).unwrap();
        assert!(AccessFile(Some(path)).remove().is_err());
    }

    #[test]
    fn each_host_gets_the_token_once() {
        let hosts = [
            "registry.example.test:8443".to_owned(),
            "api.example.test".to_owned(),
        ];
        assert_eq!(
            configuration("", &hosts, AccessBy::Token(&"t.o.k".into())),
            "credentials \"registry.example.test:8443\" {\n  token = \"t.o.k\"\n}\n\
             credentials \"api.example.test\" {\n  token = \"t.o.k\"\n}\n"
        );
    }

    #[test]
    fn a_registry_behind_a_hub_has_another_address() {
        let hosts = ["registry.example.test".to_owned()];
        let address = "http://127.0.0.1:1/registry/p".into();
        assert_eq!(
            configuration("", &hosts, AccessBy::Registry(&address)),
            "host \"registry.example.test\" {\n  services = {\n    \
             \"modules.v1\" = \"http://127.0.0.1:1/registry/p/modules/v1/\"\n    \
             \"providers.v1\" = \"http://127.0.0.1:1/registry/p/providers/v1/\"\n  }\n}\n"
        );
    }

    #[test]
    fn a_host_with_a_token_of_the_run_itself_keeps_its_address() {
        let folder = tempfile::tempdir().unwrap();
        let hosts = [
            "a-b.example.test".to_owned(),
            "registry.example.test".to_owned(),
        ];
        let address = "http://127.0.0.1:1/registry/p".into();
        let config = InitConfig {
            access: Some((&hosts, AccessBy::Registry(&address))),
            overlay: None,
            forced: Vec::new(),
            tool: Tool::Terraform,
            home: folder.path(),
            private: folder.path(),
        };
        let job = job_contract::JobData::default();
        let mut env = ChildEnv::new(std::iter::empty(), &[], &job).unwrap();
        env.set("TF_TOKEN_a__b_example_test", "own").unwrap();
        let file = write_init_config(&config, &mut env).unwrap();
        let text = fs::read_to_string(folder.path().join(FILE_NAME)).unwrap();
        assert!(
            text.contains("registry.example.test") && !text.contains("a-b"),
            "{text}"
        );
        file.remove().unwrap();
    }

    #[test]
    fn providers_that_are_there_are_asked_for_nowhere_else() {
        let overlay = Overlay {
            folder: "/run/a \"b\"".into(),
            providers: vec!["registry.example.test/acme/null".into()],
        };
        let text = with_overlay("disable_checkpoint = true", &overlay);
        let body: hcl_edit::structure::Body = text.parse().unwrap();
        let block = body.get_blocks("provider_installation").next().unwrap();
        let of = |kind: &str, name: &str| {
            let method = block.body.get_blocks(kind).next().unwrap();
            let value = &method.body.get_attribute(name).unwrap().value;
            value.to_string().trim().to_owned()
        };
        assert_eq!(of("filesystem_mirror", "path"), r#""/run/a \"b\"""#);
        let names = r#"["registry.example.test/acme/null"]"#;
        assert_eq!(of("filesystem_mirror", "include"), names);
        assert_eq!(of("direct", "exclude"), names);
    }

    #[test]
    fn services_of_a_host_are_named() {
        let host = ForcedHost {
            name: "registry.example.test:8443".to_owned(),
            services: vec![
                (
                    "modules.v1".to_owned(),
                    "https://m.example.test/".to_owned(),
                ),
                (
                    "providers.v1".to_owned(),
                    "http://127.0.0.1:1/p/".to_owned(),
                ),
            ],
        };
        let text = with_services("disable_checkpoint = true", &host);
        assert_eq!(
            text,
            "disable_checkpoint = true\nhost \"registry.example.test:8443\" {\n  services = {\n    \
             \"modules.v1\" = \"https://m.example.test/\"\n    \
             \"providers.v1\" = \"http://127.0.0.1:1/p/\"\n  }\n}\n"
        );
    }

    #[test]
    fn a_host_with_settings_or_a_token_is_found() {
        let home = tempfile::tempdir().unwrap();
        let job = job_contract::JobData::default();
        let mut env = ChildEnv::new(std::iter::empty(), &[], &job).unwrap();
        let host = "registry.example.test";
        let has = |env: &ChildEnv| has_settings_of(env, home.path(), Tool::OpenTofu, host);
        assert!(!has(&env));
        let path = home.path().join(".tofurc");
        for text in [
            "credentials \"registry.example.test\" {}",
            "credentials_helper \"x\" {}",
        ] {
            fs::write(&path, text).unwrap();
            assert!(has(&env), "{text}");
            fs::write(&path, "credentials \"other.example.test\" {}").unwrap();
            assert!(!has(&env), "{text}");
        }
        env.set("TF_TOKEN_registry_example_test", "own").unwrap();
        assert!(has(&env));
    }

    /// Otherwise tokens of `login` would not reach the tool.
    #[test]
    fn more_files_of_configuration_are_not_hidden() {
        let home = tempfile::tempdir().unwrap();
        let decides = || decides_on_providers(home.path(), Tool::Terraform);
        for folder in FOLDERS {
            let folder = home.path().join(folder);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("checkpoint_signature"), "").unwrap();
            assert!(!decides());
            for name in ["credentials.tfrc.json", "more.tfrc"] {
                fs::write(folder.join(name), "").unwrap();
                assert!(decides(), "{name}");
                fs::remove_file(folder.join(name)).unwrap();
            }
        }
        fs::write(
            home.path().join(".terraformrc"),
            "plugin_cache_dir = \"/c\"",
        )
        .unwrap();
        assert!(decides());
    }

    #[test]
    fn the_configuration_of_the_operator_stays() {
        let own = "plugin_cache_dir = \"/cache\"\ncredentials \"api.example.test\" {\n  token = \"own\"\n}";
        let hosts = [
            "registry.example.test".to_owned(),
            "api.example.test".to_owned(),
        ];
        let text = configuration(own, &hosts, AccessBy::Token(&"t".into()));
        assert!(text.starts_with(own), "{text}");
        assert_eq!(text.matches("credentials").count(), 2, "{text}");
    }

    #[test]
    fn a_host_cannot_end_its_quotes() {
        let hosts = ["evil\" {}".to_owned(), String::new()];
        assert_eq!(configuration("", &hosts, AccessBy::Token(&"t".into())), "");
    }

    #[test]
    fn opentofu_has_its_own_file() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join(".terraformrc"), "terraform").unwrap();
        assert_eq!(own_configuration(home.path(), Tool::OpenTofu), "terraform");
        fs::write(home.path().join(".tofurc"), "tofu").unwrap();
        assert_eq!(own_configuration(home.path(), Tool::OpenTofu), "tofu");
        assert_eq!(own_configuration(home.path(), Tool::Terraform), "terraform");
    }
}
