//! Secrets for a process of this machine. They are not in its environment, which `/proc` shows, and in no file on disk. The
//! process inherits a file in memory, and its environment contains only the number of the descriptor.
//!
//! The receiver looks a secret up like a variable. A process that another program started, such as Kubernetes, has its secrets
//! in the environment, or in a file that the environment names.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::unistd::close;

use crate::secret_file::SecretFile;
use crate::setting_text::SettingError;
use crate::{memory_file, regular_file};

/// The variable with the number of the descriptor.
pub const DESCRIPTOR: &str = "MAYFLY_SECRETS_DESCRIPTOR";

/// More than a job document and all secrets of a platform need.
const MAX_BYTES: u64 = 64 * 1024 * 1024;

static RECEIVED: OnceLock<BTreeMap<OsString, OsString>> = OnceLock::new();
/// The name of a secret, and the file that has it.
static FROM_FILE: OnceLock<(String, SecretFile)> = OnceLock::new();

/// Secrets for one process. They can be handed over with [`crate::reaper::spawn_with`].
#[derive(Debug)]
pub struct Handover(File);

impl Handover {
    /// Writes the secrets, which are pairs of name and value, into memory.
    pub fn of(secrets: &[(OsString, OsString)]) -> io::Result<Self> {
        let mut content = Vec::new();
        for (name, value) in secrets {
            content.extend([name.as_bytes(), b"=", value.as_bytes(), b"\0"].concat());
        }
        let mut file = memory_file::data("secrets")?;
        file.write_all(&content)?;
        // A link of the user's code to this descriptor shows nothing, unless the user is root. The receiver, which owns the file,
        // takes the rights back.
        file.set_permissions(Permissions::from_mode(0o000))?;
        Ok(Self(file))
    }

    /// The value of [`DESCRIPTOR`] for the receiver.
    pub(crate) fn number(&self) -> String {
        self.0.as_raw_fd().to_string()
    }

    /// Lets every child inherit the secrets that is started while this value lives.
    pub(crate) fn share(&self) -> io::Result<()> {
        fcntl(&self.0, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(())
    }
}

/// Takes the secrets that this process was started with. This comes before any code that looks secrets up or starts a process.
///
/// # Errors
/// Returns an error if the descriptor that the environment names holds no secrets.
pub fn receive() -> io::Result<()> {
    let Some(number) = std::env::var_os(DESCRIPTOR) else {
        return Ok(());
    };
    take(&number).map_err(|error| {
        let text = format!("could not read the secrets of `{DESCRIPTOR}`: {error}");
        io::Error::new(error.kind(), text)
    })
}

/// Takes the secret from the file that `variable` names, unless the secret is set: then the file is only to be removed. This comes after [`receive`], and before any other
/// code that looks it up.
///
/// # Errors
/// Returns an error if the file holds no secret.
pub fn receive_file(secret: &str, variable: &str) -> Result<(), SettingError> {
    if let Some(file) = SecretFile::read(secret, variable, var)? {
        let _ = FROM_FILE.set((secret.to_owned(), file));
    }
    Ok(())
}

/// Overwrites and removes the file of [`receive_file`], if one was named. What runs later on this machine cannot read it then.
///
/// # Errors
/// Returns an error if the file stays, as one on a read-only volume does.
pub fn remove_file() -> io::Result<()> {
    FROM_FILE.get().map_or(Ok(()), |(_, file)| file.remove())
}

fn take(number: &OsStr) -> io::Result<()> {
    let number = number.to_str().and_then(|number| number.parse().ok());
    let number: RawFd = number
        .filter(|number| *number > 2)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "it is no descriptor"))?;
    let path = PathBuf::from(format!("/proc/self/fd/{number}"));
    let secrets = parse(&read(&path)?)?;
    // No child inherits it.
    close(number)?;
    let _ = RECEIVED.set(secrets);
    Ok(())
}

/// Reads the inherited file. It has to be opened again, because its descriptor is only a number here.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    match regular_file::read(path, MAX_BYTES) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            let permit = |mode| fs::set_permissions(path, Permissions::from_mode(mode));
            permit(0o400)?;
            let content = regular_file::read(path, MAX_BYTES);
            // The sender may not have closed it yet.
            permit(0o000)?;
            content
        }
        read => read,
    }
}

fn parse(content: &[u8]) -> io::Result<BTreeMap<OsString, OsString>> {
    let incomplete = || io::Error::new(io::ErrorKind::UnexpectedEof, "the secrets are incomplete");
    let Some(content) = content.strip_suffix(b"\0") else {
        return Err(incomplete());
    };
    let pairs = content.split(|byte| *byte == 0).map(|pair| {
        let end = pair.iter().position(|byte| *byte == b'=');
        let end = end.ok_or_else(incomplete)?;
        let text = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        Ok((text(&pair[..end]), text(&pair[end + 1..])))
    });
    pairs.collect()
}

/// The secret with this name, if this process was started with it or has read it from its file.
pub fn received(name: &OsStr) -> Option<&'static OsStr> {
    let handed = RECEIVED.get().and_then(|secrets| secrets.get(name));
    let from_file = || {
        let (known, file) = FROM_FILE.get()?;
        let text = file.text.as_deref()?;
        (name == known.as_str()).then(|| OsStr::new(text))
    };
    handed.map(OsString::as_os_str).or_else(from_file)
}

/// The secret with this name, or else the variable of the environment, whatever its bytes are.
pub fn var_os(name: &str) -> Option<OsString> {
    let secret = received(OsStr::new(name)).map(OsStr::to_owned);
    secret.or_else(|| std::env::var_os(name))
}

/// The secret with this name, or else the variable of the environment.
pub fn var(name: &str) -> Option<String> {
    match received(OsStr::new(name)) {
        Some(secret) => secret.to_str().map(str::to_owned),
        None => std::env::var(name).ok(),
    }
}

/// The secrets and variables whose names begin with `prefix`.
pub fn with_prefix(prefix: &str) -> BTreeMap<OsString, OsString> {
    let is_one = |name: &OsStr| name.as_bytes().starts_with(prefix.as_bytes());
    let received = RECEIVED.get().into_iter().flatten();
    let received = received.map(|(name, value)| (name.clone(), value.clone()));
    std::env::vars_os()
        .chain(received)
        .filter(|(name, _)| is_one(name))
        .collect()
}

#[cfg(test)]
mod tests {
    use nix::unistd::{Uid, chown, geteuid, setfsuid};

    use super::*;

    #[test]
    fn secrets_arrive_as_they_were_and_an_incomplete_file_is_refused() {
        let pair = |name: &str, value: &[u8]| (name.into(), OsString::from_vec(value.to_vec()));
        let secrets = vec![pair("A", b"x=y\n"), pair("B", b""), pair("C", b"\xff")];
        let handover = Handover::of(&secrets).unwrap();
        let path = PathBuf::from(format!("/proc/self/fd/{}", handover.number()));
        // Root may read everything. So a thread without the rights of root, which owns the file, does it.
        let content = std::thread::scope(|scope| {
            let receive = || {
                if geteuid().is_root() {
                    let nobody = Uid::from_raw(65534);
                    chown(&path, Some(nobody), None).unwrap();
                    setfsuid(nobody);
                }
                let refused = regular_file::read(&path, MAX_BYTES).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
                let content = read(&path).unwrap();
                let refused = regular_file::read(&path, MAX_BYTES).unwrap_err();
                assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
                content
            };
            scope.spawn(receive).join().unwrap()
        });
        assert_eq!(parse(&content).unwrap(), secrets.into_iter().collect());
        for wrong in [&b""[..], b"A=x", b"A\0", &content[..content.len() - 1]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
