//! The archive of a provider: unpacks it, computes the digest of its files as lock files have it, and tells whether its program is
//! one of this platform.

use std::fs::{self, OpenOptions};
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::encoding::hex;
use runtime::regular_file;
use sha2::{Digest as _, Sha256};
use zip::ZipArchive;

use crate::metered::Metered;

/// More than any provider has.
const LARGEST: u64 = 4 * 1024 * 1024 * 1024;
const MOST_FILES: usize = 10_000;
/// Bytes of the list of its files. All of it is held in memory.
const LARGEST_LIST: u64 = 8 * 1024 * 1024;

/// A call of the system for so many bytes costs little beside their digest.
const BUFFER_BYTES: usize = 256 * 1024;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PackageError {
    #[error("its archive cannot be read")]
    Archive(#[from] zip::result::ZipError),
    #[error("its archive has a file outside its folder")]
    Outside,
    #[error("its archive unpacks to too much")]
    TooLarge,
    #[error("its program is one of another platform")]
    OtherPlatform,
    #[error("the run was stopped")]
    Stopped,
    #[error("it could not be unpacked")]
    Write(#[from] io::Error),
}

/// Unpacks an archive into a new folder, and returns the digest of its files, `h1:…`. After an error there is no folder.
pub(crate) fn unpack(
    archive: impl Read + Seek,
    target: &Path,
    stopped: &AtomicBool,
) -> Result<String, PackageError> {
    fs::create_dir_all(target)?;
    let unpacked = unpack_into(archive, target, stopped);
    if unpacked.is_err() {
        runtime::tree_removal::remove(target)?;
    }
    unpacked
}

fn unpack_into(
    archive: impl Read + Seek,
    target: &Path,
    stopped: &AtomicBool,
) -> Result<String, PackageError> {
    let contents = read_files(archive, stopped, |name, is_program| {
        let path = target.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        // Programs are marked as such. No link is made, and no file is replaced.
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(if is_program { 0o755 } else { 0o644 })
            .open(&path)
    })?;
    Ok(contents.h1)
}

/// What an archive unpacks to.
#[derive(Debug)]
pub(crate) struct Contents {
    /// The digest of the files, `h1:…`.
    pub(crate) h1: String,
    pub(crate) bytes: u64,
}

/// Reads an archive, and writes nothing.
pub(crate) fn contents(archive: impl Read + Seek) -> Result<Contents, PackageError> {
    read_files(archive, &AtomicBool::new(false), |_, _| Ok(io::sink()))
}

/// The digest of the files in an archive, `h1:…`, without unpacking it.
pub fn h1_of_archive(archive: impl Read + Seek) -> io::Result<String> {
    let contents = contents(archive).map_err(io::Error::other)?;
    Ok(contents.h1)
}

/// The same, of an archive at a path.
pub fn digest_of_archive(path: &Path) -> io::Result<String> {
    h1_of_archive(regular_file::open_unlinked(path)?)
}

/// Reads all files of an archive into what `create` makes for a name and whether it is a program.
fn read_files<W: Write>(
    archive: impl Read + Seek,
    stopped: &AtomicBool,
    mut create: impl FnMut(&Path, bool) -> io::Result<W>,
) -> Result<Contents, PackageError> {
    let (archive, allowance) = Metered::new(archive, LARGEST_LIST);
    let mut archive = ZipArchive::new(archive)?;
    allowance.set(u64::MAX);
    if archive.len() > MOST_FILES {
        return Err(PackageError::TooLarge);
    }
    let mut lines = Vec::new();
    let mut left = LARGEST;
    for index in 0..archive.len() {
        let mut entry = archive.by_index(index)?;
        if entry.is_dir() {
            continue;
        }
        let name = entry.enclosed_name().ok_or(PackageError::Outside)?;
        let text = name.to_str().ok_or(PackageError::Outside)?.to_owned();
        let is_program = entry.unix_mode().is_some_and(|mode| mode & 0o100 != 0);
        let mut hashing = Hashing {
            file: create(&name, is_program)?,
            hasher: Sha256::new(),
            stopped,
        };
        let bounded = (&mut entry).take(left + 1);
        let written = io::copy(
            &mut BufReader::with_capacity(BUFFER_BYTES, bounded),
            &mut hashing,
        );
        if stopped.load(Ordering::Relaxed) {
            return Err(PackageError::Stopped);
        }
        let written = written?;
        left = left.checked_sub(written).ok_or(PackageError::TooLarge)?;
        lines.push(format!("{}  {text}\n", hex(&hashing.hasher.finalize())));
    }
    // By name, and the name comes after the digest.
    lines.sort_by(|one, other| one[66..].cmp(&other[66..]));
    let digest = Sha256::digest(lines.concat());
    Ok(Contents {
        h1: format!("h1:{}", STANDARD.encode(digest)),
        bytes: LARGEST - left,
    })
}

/// Checks that the programs of a package run here. The tool starts the file whose name begins with the one of the provider.
pub(crate) fn check_platform(folder: &Path, name: &str) -> Result<(), PackageError> {
    let own = kind_of_program(Path::new("/proc/self/exe"))?;
    let prefix = format!("terraform-provider-{name}");
    let mut is_there = false;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let is_program = entry.file_type()?.is_file()
            && entry
                .file_name()
                .to_str()
                .is_some_and(|name| name.starts_with(&prefix));
        if is_program {
            is_there = true;
            if own.is_none() || kind_of_program(&entry.path())? != own {
                return Err(PackageError::OtherPlatform);
            }
        }
    }
    is_there.then_some(()).ok_or(PackageError::OtherPlatform)
}

/// The class, byte order and machine of an ELF file. `None`: it is no program of Linux.
fn kind_of_program(path: &Path) -> io::Result<Option<[u8; 4]>> {
    let mut header = Vec::new();
    regular_file::open(path)?
        .take(20)
        .read_to_end(&mut header)?;
    // 0 means any system, as most programs of Linux have it.
    Ok(match header[..] {
        [0x7f, b'E', b'L', b'F', class, order, _, 0 | 3, ..] if header.len() == 20 => {
            Some([class, order, header[18], header[19]])
        }
        _ => None,
    })
}

/// A file, with the digest of what was written into it.
struct Hashing<'s, W> {
    file: W,
    hasher: Sha256,
    stopped: &'s AtomicBool,
}

impl<W: Write> Write for Hashing<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.stopped.load(Ordering::Relaxed) {
            return Err(io::Error::other("stopped"));
        }
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt as _;

    use zip::ZipWriter;
    use zip::write::SimpleFileOptions;

    use super::*;

    static NEVER: AtomicBool = AtomicBool::new(false);

    fn archive(path: &Path, files: &[(&str, u32, &str)]) {
        let mut zip = ZipWriter::new(fs::File::create(path).unwrap());
        for (name, mode, content) in files {
            let options = SimpleFileOptions::default().unix_permissions(*mode);
            zip.start_file(*name, options).unwrap();
            zip.write_all(content.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
    }

    /// The digest was computed by Terraform for these files.
    #[test]
    fn the_digest_of_the_files_is_the_one_of_the_tool() {
        let folder = tempfile::tempdir().unwrap();
        let (zip, target) = (folder.path().join("p.zip"), folder.path().join("a/b"));
        archive(
            &zip,
            &[
                ("terraform-provider-x_v1.0.0", 0o755, "binary\n"),
                ("LICENSE.txt", 0o644, "hello\n"),
            ],
        );
        let h1 = unpack(File::open(&zip).unwrap(), &target, &NEVER).unwrap();
        assert_eq!(h1, "h1:cuAYBzn6IKPHKJs3M/HcpkzTtSYaT+z1m6UlPiPEYmI=");
        assert_eq!(digest_of_archive(&zip).unwrap(), h1);
        let read = contents(File::open(&zip).unwrap()).unwrap();
        assert_eq!((read.h1, read.bytes), (h1, 13));
        let program = target.join("terraform-provider-x_v1.0.0");
        assert_eq!(
            fs::metadata(&program).unwrap().permissions().mode() & 0o777,
            0o755
        );
        assert_eq!(
            fs::read_to_string(target.join("LICENSE.txt")).unwrap(),
            "hello\n"
        );
    }

    #[test]
    fn a_list_of_files_that_fills_the_memory_is_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let (zip, target) = (folder.path().join("p.zip"), folder.path().join("target"));
        let long = "n".repeat(60_000);
        let names: Vec<_> = (0..150).map(|number| format!("{number}{long}")).collect();
        let files: Vec<_> = names.iter().map(|name| (&**name, 0o644, "")).collect();
        archive(&zip, &files);
        let unpacked = unpack(File::open(&zip).unwrap(), &target, &NEVER);
        assert!(
            matches!(&unpacked, Err(PackageError::Archive(zip::result::ZipError::Io(error)))
                if crate::metered::is_too_much(error)),
            "{unpacked:?}"
        );
    }

    #[test]
    fn an_archive_that_leads_out_or_is_none_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (zip, target) = (folder.path().join("p.zip"), folder.path().join("target"));
        archive(&zip, &[("one", 0o644, "x"), ("../out", 0o644, "x")]);
        assert!(matches!(
            unpack(File::open(&zip).unwrap(), &target, &NEVER),
            Err(PackageError::Outside)
        ));
        assert!(!target.exists() && !folder.path().join("out").exists());
        fs::write(&zip, "no archive").unwrap();
        assert!(matches!(
            unpack(File::open(&zip).unwrap(), &target, &NEVER),
            Err(PackageError::Archive(_))
        ));
        archive(&zip, &[("one", 0o644, "x")]);
        let unpacked = unpack(File::open(&zip).unwrap(), &target, &AtomicBool::new(true));
        assert!(matches!(unpacked, Err(PackageError::Stopped)));
        assert!(!target.exists());
    }

    #[test]
    fn only_programs_of_this_machine_count() {
        let folder = tempfile::tempdir().unwrap();
        let own = fs::read("/proc/self/exe").unwrap()[..64].to_vec();
        let changed = |index: usize, byte: u8| {
            let mut program = own.clone();
            program[index] = byte;
            program
        };
        let path = folder.path().join("terraform-provider-x_v1.0.0");
        let check = |program: &[u8]| {
            fs::write(&path, program).unwrap();
            check_platform(folder.path(), "x").is_ok()
        };
        assert!(check(&own));
        assert!(check(&changed(7, 3)));
        // Another class, byte order, system and machine.
        let others = [(4, 9), (5, 9), (7, 9), (18, 0xff)];
        for (index, byte) in others {
            assert!(!check(&changed(index, byte)), "{index}");
        }
        assert!(!check(b"MZ") && !check(b"") && !check(&own[..19]));
        assert!(check(&own));
        assert!(check_platform(folder.path(), "y").is_err());
        fs::write(folder.path().join("terraform-provider-x_v1.0.0.exe"), "MZ").unwrap();
        assert!(check_platform(folder.path(), "x").is_err());
    }
}
