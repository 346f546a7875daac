//! A guard in front of git's transports. git starts it for each connection, whatever led to the address: a source, a submodule,
//! a module of a module, or a setting that replaces addresses. It asks the [broker](super::broker), and becomes the real
//! transport if that permits the address.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use super::broker::{CONNECTION, PERMITTED};
use super::program::write_program;
use crate::workspace::ssh::shell_quote;

const PROGRAMS: &str = "git-core";
const SSH: &str = "ssh";
/// The programs of git that connect, apart from ssh.
const TRANSPORTS: [&str; 4] = [
    "git-remote-http",
    "git-remote-https",
    "git-remote-ftp",
    "git-remote-ftps",
];

/// The files of the guard.
#[derive(Debug)]
pub(super) struct Guard {
    /// For `GIT_EXEC_PATH`: git's own programs, with the guard in the place of transports.
    pub(super) programs: PathBuf,
    ssh: PathBuf,
}

impl Guard {
    /// Writes the guard into `folder`. `real` is git's folder of programs.
    pub(super) fn write(folder: &Path, real: &Path, socket: &Path) -> io::Result<Self> {
        let programs = folder.join(PROGRAMS);
        fs::create_dir(&programs)?;
        for entry in fs::read_dir(real)? {
            let name = entry?.file_name();
            if !TRANSPORTS.iter().any(|transport| name == *transport) {
                symlink(real.join(&name), programs.join(&name))?;
            }
        }
        let http = script(
            socket,
            "url=${2-$1}",
            "printf '%s\\0http\\0%s\\0' \"$kind\" \"$url\"; git config --null --get-urlmatch http \"$url\"",
            &format!("{}/\"${{0##*/}}\"", shell_quote(&real.to_string_lossy())),
        );
        for transport in TRANSPORTS {
            write_program(&programs.join(transport), &http)?;
        }
        let ssh = folder.join(SSH);
        let text = script(
            socket,
            "",
            "printf '%s\\0ssh\\0' \"$kind\"; printf '%s\\0' \"$@\"",
            "ssh",
        );
        write_program(&ssh, &text)?;
        Ok(Self { programs, ssh })
    }

    /// The value of `GIT_SSH_COMMAND` with the guard in the place of `ssh`.
    pub(super) fn ssh_command(&self, command: &str) -> String {
        let options = command.strip_prefix("ssh").unwrap_or_default();
        format!("{}{options}", shell_quote(&self.ssh.to_string_lossy()))
    }
}

/// The text of the guard: asks, and becomes `program` with the same arguments.
fn script(socket: &Path, before: &str, question: &str, program: &str) -> String {
    let socket = shell_quote(&socket.to_string_lossy());
    format!(
        "#!/bin/sh\nkind={CONNECTION}\n{before}\n\
         answer=$({{ {question}; }} | git credential-cache --socket {socket} get)\n\
         test \"$answer\" = {PERMITTED} && exec {program} \"$@\"\n\
         printf 'fatal: %s\\n' \"${{answer:-the executor did not permit this connection}}\" >&2\nexit 128\n"
    )
}
