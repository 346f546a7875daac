//! What the tool shows to the platform's module registry and for its remote states (contract 8.7): a token that lasts
//! as long as one command, in a file of its own beside the work tree. A configuration file of whoever set up the run
//! comes first and stays in force.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use control_plane::terrakube::token;
use job_contract::Tool;
use secrecy::ExposeSecret as _;
use tracing::{info, warn};

use crate::child_env::ChildEnv;
use crate::run::{Run, StageError};
use crate::workspace::write_private_file;

/// By which the tool finds its configuration file.
const CONFIG_FILE: &str = "TF_CLI_CONFIG_FILE";
const FILE_NAME: &str = "platform.tfrc";

/// Writes the file anew and names it in `env`, unless somebody else's is named there.
pub fn offer(run: &Run<'_>, env: &mut ChildEnv) -> Result<(), StageError> {
    let hosts = run.link.tool_hosts();
    let tokens = run.link.tokens();
    let token =
        tokens.and_then(|tokens| tokens.mint_for_workspace(token::TOOL, &run.job.workspace_id));
    let Some(token) = token.filter(|_| !hosts.is_empty()) else {
        return Ok(());
    };
    let path = run.layout.private().join(FILE_NAME);
    if env
        .get(CONFIG_FILE)
        .is_some_and(|named| named != path.as_os_str())
    {
        info!("`{CONFIG_FILE}` is set: the tool gets no token for the platform");
        return Ok(());
    }
    run.log.add_secrets([token.expose_secret()]);
    let own = own_configuration(&run.folders.home, run.job.tool());
    let text = configuration(&own, &hosts, token.expose_secret());
    write_private_file(&path, text.as_bytes()).map_err(|source| StageError::WorkDir {
        path: path.display().to_string(),
        source,
    })?;
    env.set(CONFIG_FILE, &path.to_string_lossy())?;
    Ok(())
}

/// What the tool would have read, had its file not been named.
fn own_configuration(home: &Path, tool: Tool) -> String {
    let names: &[&str] = match tool {
        Tool::Terraform => &[".terraformrc"],
        Tool::OpenTofu => &[".tofurc", ".terraformrc"],
    };
    for name in names {
        let path = home.join(name);
        match fs::read_to_string(&path) {
            Ok(text) => return text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                warn!(%error, path = %path.display(), "a configuration file of the tool cannot be read");
            }
        }
    }
    String::new()
}

/// `own`, and the credentials for those hosts that it has none for.
fn configuration(own: &str, hosts: &[String], token: &str) -> String {
    let mut text = own.to_owned();
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    for host in hosts {
        if !is_host(host) {
            warn!(host, "the tool gets no token for what is not a host");
            continue;
        }
        if own.contains(&format!("credentials \"{host}\"")) {
            continue;
        }
        writeln!(text, "credentials \"{host}\" {{\n  token = \"{token}\"\n}}")
            .expect("writing to a string cannot fail");
    }
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
    fn each_host_gets_the_token_once() {
        let hosts = [
            "registry.example.test:8443".to_owned(),
            "api.example.test".to_owned(),
        ];
        assert_eq!(
            configuration("", &hosts, "t.o.k"),
            "credentials \"registry.example.test:8443\" {\n  token = \"t.o.k\"\n}\n\
             credentials \"api.example.test\" {\n  token = \"t.o.k\"\n}\n"
        );
    }

    #[test]
    fn what_the_operator_configured_stays() {
        let own = "plugin_cache_dir = \"/cache\"\ncredentials \"api.example.test\" {\n  token = \"own\"\n}";
        let hosts = [
            "registry.example.test".to_owned(),
            "api.example.test".to_owned(),
        ];
        let text = configuration(own, &hosts, "t");
        assert!(text.starts_with(own), "{text}");
        assert_eq!(text.matches("credentials").count(), 2, "{text}");
    }

    #[test]
    fn a_host_cannot_break_out_of_its_quotes() {
        let hosts = ["evil\" {}".to_owned(), String::new()];
        assert_eq!(configuration("", &hosts, "t"), "");
    }

    #[test]
    fn opentofu_has_a_file_of_its_own() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join(".terraformrc"), "terraform").unwrap();
        assert_eq!(own_configuration(home.path(), Tool::OpenTofu), "terraform");
        fs::write(home.path().join(".tofurc"), "tofu").unwrap();
        assert_eq!(own_configuration(home.path(), Tool::OpenTofu), "tofu");
        assert_eq!(own_configuration(home.path(), Tool::Terraform), "terraform");
    }
}
