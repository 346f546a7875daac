//! The resolver's own orders from the environment. The C library looks names up as the pod's `/etc/resolv.conf` says, unless
//! one of these variables says otherwise: a search domain or an alias leads requests, with their tokens, to another host.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

/// What resolver(5) and host.conf(5) name.
const VARIABLES: [&str; 3] = ["LOCALDOMAIN", "RES_OPTIONS", "HOSTALIASES"];
const PREFIX: &str = "RESOLV_";

/// Replaces this process by one without such variables, where it has any. It has to come first: the C library may read
/// them from then on.
///
/// # Errors
/// Returns only when this program could not be started anew, or did not have to be.
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
