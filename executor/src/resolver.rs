//! Restarts the executor with the environment that it needs. It removes variables that change name resolution. Without them, the C library resolves names as
//! the pod's `/etc/resolv.conf` configures it. With them, a search domain or an alias could send requests, with their
//! tokens, to another host.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The variables that resolver(5) and host.conf(5) list.
const VARIABLES: [&str; 3] = ["LOCALDOMAIN", "RES_OPTIONS", "HOSTALIASES"];
const PREFIX: &str = "RESOLV_";

/// Restarts this program without such variables and with `more`, if there are any. This comes before any name is resolved, because
/// the C library may read them from then on.
///
/// # Errors
/// Returns an error if this program could not be restarted.
pub(crate) fn restart_if_needed(more: &BTreeMap<&'static str, OsString>) -> io::Result<()> {
    let mut variables = std::env::vars_os()
        .map(|(name, _)| name)
        .filter(|name| affects_resolver(name))
        .peekable();
    if variables.peek().is_none() && more.is_empty() {
        return Ok(());
    }
    let mut args = std::env::args_os();
    let mut restarted = Command::new("/proc/self/exe");
    if let Some(name) = args.next() {
        restarted.arg0(name);
    }
    restarted.args(args);
    for name in variables {
        restarted.env_remove(name);
    }
    restarted.envs(more);
    Err(restarted.exec())
}

fn affects_resolver(name: &OsStr) -> bool {
    VARIABLES.iter().any(|known| name == *known)
        || name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_that_affect_the_resolver_are_recognised() {
        for name in ["LOCALDOMAIN", "HOSTALIASES", "RESOLV_HOST_CONF"] {
            assert!(affects_resolver(OsStr::new(name)), "{name}");
        }
        for name in ["LOCALDOMAINS", "PATH", "MAYFLY_LOG"] {
            assert!(!affects_resolver(OsStr::new(name)), "{name}");
        }
    }
}
