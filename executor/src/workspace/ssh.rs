//! How git uses SSH: key files and the value of `GIT_SSH_COMMAND` (contract 8.9). This module runs nothing.

use std::fmt::Write as _;
use std::path::Path;

use job_contract::JobData;
use secrecy::{ExposeSecret as _, SecretString};

use super::credentials::VcsAccess;

/// Timeout in seconds for a connection to a server.
const CONNECT_TIMEOUT_SECONDS: u32 = 30;

/// The private key for fetching modules: the workspace's module key, else the key of its repository.
pub(super) fn module_key(job: &JobData, access: VcsAccess<'_>) -> Option<SecretString> {
    let present = |key: &str| !key.trim().is_empty();
    let module = job.module_ssh_key.as_deref().filter(|key| present(key));
    let clone = access.token.filter(|key| access.is_ssh() && present(key));
    module.or(clone).map(Into::into)
}

/// A private key in the format that OpenSSH requires: Unix line ends, and one at the very end.
pub(super) fn key_file_content(key: &SecretString) -> SecretString {
    let mut text = key
        .expose_secret()
        .replace("\r\n", "\n")
        .replace('\r', "\n");
    text.truncate(text.trim_end().len());
    text.push('\n');
    text.trim_start().into()
}

/// The value of `GIT_SSH_COMMAND`. It excludes the machine's own SSH configuration and interactive prompts.
pub(super) fn ssh_command(key: Option<&Path>, known_hosts: Option<&Path>) -> String {
    let mut command = "ssh -F /dev/null".to_owned();
    if let Some(key) = key {
        let key = shell_quote(&key.to_string_lossy());
        let _ = write!(command, " -i {key} -o IdentitiesOnly=yes");
    }
    let _ = write!(
        command,
        " -o BatchMode=yes -o PreferredAuthentications=publickey -o ConnectTimeout={CONNECT_TIMEOUT_SECONDS} \
         -o ServerAliveInterval=15 -o ServerAliveCountMax=4 -o GlobalKnownHostsFile=/dev/null"
    );
    match known_hosts {
        Some(file) => {
            // It is quoted twice: for ssh, which splits the value at spaces, and for the shell.
            let option = format!("UserKnownHostsFile=\"{}\"", file.to_string_lossy());
            let _ = write!(
                command,
                " -o StrictHostKeyChecking=yes -o {}",
                shell_quote(&option)
            );
        }
        None => command.push_str(
            " -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
        ),
    }
    command
}

/// Quotes any text as one word for a POSIX shell.
pub(super) fn shell_quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[test]
    fn keys_end_in_one_newline_and_hold_no_carriage_return() {
        for text in [
            "-----BEGIN-----\nx\n-----END-----",
            "-----BEGIN-----\r\nx\r\n-----END-----\r\n\r\n",
            "\n-----BEGIN-----\rx\r-----END-----\n\n",
        ] {
            assert_eq!(
                key_file_content(&text.into()).expose_secret(),
                "-----BEGIN-----\nx\n-----END-----\n"
            );
        }
    }

    #[rstest]
    #[case("SSH~id_rsa", Some("clone"), Some("module"), Some("module"))]
    #[case("SSH~id_rsa", Some("clone"), None, Some("clone"))]
    #[case("SSH~id_rsa", Some("clone"), Some(" "), Some("clone"))]
    #[case("GITHUB", Some("token"), Some("module"), Some("module"))]
    #[case("GITHUB", Some("token"), None, None)]
    #[case("PUBLIC", None, None, None)]
    fn the_module_key_wins_over_the_clone_key(
        #[case] vcs_type: &str,
        #[case] token: Option<&str>,
        #[case] module: Option<&str>,
        #[case] expected: Option<&str>,
    ) {
        let job = JobData {
            module_ssh_key: module.map(str::to_owned),
            ..JobData::default()
        };
        let access = VcsAccess {
            vcs_type,
            connection_type: None,
            token,
        };
        let key = module_key(&job, access);
        let key = key.as_ref().map(SecretString::expose_secret);
        assert_eq!(key, expected);
    }

    #[test]
    fn host_keys_are_checked_only_against_a_configured_file() {
        let key = Path::new("/work dir/it's/key");
        let open = ssh_command(Some(key), None);
        assert!(open.starts_with(
            r"ssh -F /dev/null -i '/work dir/it'\''s/key' -o IdentitiesOnly=yes -o BatchMode=yes"
        ));
        assert!(open.contains("StrictHostKeyChecking=no"));
        assert!(open.contains("ConnectTimeout="));
        let checked = ssh_command(None, Some(Path::new("/etc/known hosts")));
        assert!(
            checked.contains(
                r#"StrictHostKeyChecking=yes -o 'UserKnownHostsFile="/etc/known hosts"'"#
            )
        );
        assert!(!checked.contains("StrictHostKeyChecking=no"));
        assert!(!checked.contains("-i "));
    }
}
