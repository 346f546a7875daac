//! Removes variables that change name resolution from the environment. Without them, the C library resolves names as
//! the pod's `/etc/resolv.conf` configures it. With them, a search domain or an alias could send requests, with their
//! tokens, to another host.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// The variables that resolver(5) and host.conf(5) list.
const VARIABLES: [&str; 3] = ["LOCALDOMAIN", "RES_OPTIONS", "HOSTALIASES"];
const PREFIX: &str = "RESOLV_";

/// Restarts this program without such variables, if there are any. This must be the first call, because the C library
/// may read them from then on.
///
/// # Errors
/// Returns an error if this program could not be restarted.
pub(crate) fn ignore_environment() -> io::Result<()> {
    let mut orders = std::env::vars_os()
        .map(|(name, _)| name)
        .filter(|name| steers(name))
        .peekable();
    if orders.peek().is_none() {
        return Ok(());
    }
    let mut args = std::env::args_os();
    let mut again = Command::new("/proc/self/exe");
    if let Some(name) = args.next() {
        again.arg0(name);
    }
    again.args(args);
    for name in orders {
        again.env_remove(name);
    }
    Err(again.exec())
}

fn steers(name: &OsStr) -> bool {
    VARIABLES.iter().any(|known| name == *known)
        || name.as_encoded_bytes().starts_with(PREFIX.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_the_resolver_is_known() {
        for name in ["LOCALDOMAIN", "HOSTALIASES", "RESOLV_HOST_CONF"] {
            assert!(steers(OsStr::new(name)), "{name}");
        }
        for name in ["LOCALDOMAINS", "PATH", "MAYFLY_LOG"] {
            assert!(!steers(OsStr::new(name)), "{name}");
        }
    }
}
