//! Files in memory. They have no name, and children inherit them only on request.

use std::fs::File;
use std::io;

use nix::errno::Errno;
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// An empty file that can never be executed.
pub fn data(name: &str) -> io::Result<File> {
    create(name, libc::MFD_NOEXEC_SEAL)
}

/// An empty file for a program.
pub(crate) fn executable(name: &str) -> io::Result<File> {
    create(name, libc::MFD_EXEC)
}

/// A kernel with `vm.memfd_noexec=2` accepts no file that may be executed. It has to be told that this one may not.
fn create(name: &str, kind: libc::c_uint) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC;
    let made = match memfd_create(name, flags | MFdFlags::from_bits_retain(kind)) {
        // Kernels before 6.3 do not know these kinds.
        Err(Errno::EINVAL) => memfd_create(name, flags),
        made => made,
    };
    Ok(File::from(made?))
}
