//! Programs whose processes no other process of the same user can look into, from their first instruction on.
//!
//! `execve` makes a process dumpable again, and [`crate::hardening`] comes later. In between, other processes of the user can
//! read its environment and memory, take its open files, or attach to it and stay. The kernel makes an exception for a program
//! that its user may execute and not read. Therefore the program is copied into memory, and nobody may read the copy. Nobody
//! can change that, because this process is hardened itself, and the copy has no name that others can open.
//!
//! This does not keep out root, who may read every file.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::geteuid;

use crate::memory_file;

const ELF: &[u8; 4] = b"\x7fELF";

/// The copy of a program.
#[derive(Debug)]
pub struct UnreadableProgram(File);

impl UnreadableProgram {
    /// Copies a program. Returns `None` if a copy is of no use: the program is unreadable itself, or this process is root's.
    ///
    /// # Errors
    /// Returns an error if the program is a script, because its interpreter has to read it.
    pub fn copy(path: &Path) -> io::Result<Option<Self>> {
        let mut program = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Ok(None),
            opened => opened?,
        };
        let mut start = Vec::new();
        Read::by_ref(&mut program).take(4).read_to_end(&mut start)?;
        if start != ELF {
            return Err(io::Error::other(
                "it is a script, which its interpreter has to read",
            ));
        }
        if geteuid().is_root() {
            return Ok(None);
        }
        program.rewind()?;
        let mut copy = memory_file::executable("program")?;
        io::copy(&mut program, &mut copy)?;
        // A program that is open for writing cannot be executed.
        let unreadable = OpenOptions::new()
            .read(true)
            .custom_flags(OFlag::O_PATH.bits())
            .open(path_of(&copy))?;
        copy.set_permissions(Permissions::from_mode(0o111))?;
        Ok(Some(Self(unreadable)))
    }

    /// The path for children of this process. Others cannot use it.
    pub fn path(&self) -> PathBuf {
        path_of(&self.0)
    }
}

fn path_of(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::{env, fs};

    use super::*;

    #[test]
    fn a_script_cannot_be_protected_and_that_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let script = folder.path().join("script");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        let error = UnreadableProgram::copy(&script).unwrap_err();
        assert!(error.to_string().starts_with("it is a script"), "{error}");
        UnreadableProgram::copy(&env::current_exe().unwrap()).unwrap();
    }
}
