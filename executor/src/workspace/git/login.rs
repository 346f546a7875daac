//! A login of a git server.

use git_address::Address;
use secrecy::SecretString;

/// A user name and a password for the repositories of one server, or of a part of it.
#[derive(Clone, Debug)]
pub(crate) struct Login {
    pub(crate) base: Address,
    pub(crate) username: SecretString,
    pub(crate) password: SecretString,
}
