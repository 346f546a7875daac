//! Opens and reads files that the user's code can replace at any time, by a FIFO, a link to a device, or a sparse file of
//! terabytes. Neither opening nor reading blocks, and only regular files are read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::libc;

/// Opens a regular file for reading and follows links. For other kinds of files, the error names the kind.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(path, OFlag::empty())
}

/// Opens a regular file for reading, and refuses a link in its place. In the folder of a run, all files are made by this program.
/// A link would come from the code of the run, and can lead to what only this process has open, such as secrets in memory.
pub fn open_unlinked(path: &Path) -> io::Result<File> {
    open_with(path, OFlag::O_NOFOLLOW).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => wrong_kind("a link"),
        _ => error,
    })
}

fn wrong_kind(found: &str) -> io::Error {
    io::Error::other(format!("it is {found}, where a regular file is expected"))
}

fn open_with(path: &Path, flags: OFlag) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        // Otherwise opening a FIFO waits for a writer, and opening a terminal makes it the controlling terminal.
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY | flags).bits())
        .open(path)?;
    let kind = file.metadata()?.file_type();
    let found = if kind.is_file() {
        return Ok(file);
    } else if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_char_device() || kind.is_block_device() {
        "a device"
    } else {
        "something else"
    };
    Err(wrong_kind(found))
}

/// The content of a regular file of at most `limit` bytes.
///
/// Reads at most the file's size, so files of `/proc` are empty here. So user code cannot replace a file with a link to
/// `/proc` to read, through this process, data that only this process may read.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    content(open(path)?, limit)
}

/// Like [`read`], but refuses a link, as [`open_unlinked`] does.
pub fn read_unlinked(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    content(open_unlinked(path)?, limit)
}

fn content(file: File, limit: u64) -> io::Result<Vec<u8>> {
    let size = size_of(&file, limit)?;
    let mut content = Vec::new();
    file.take(size).read_to_end(&mut content)?;
    Ok(content)
}

/// Whether this is a regular file of at most `limit` bytes that can be opened.
pub fn check(path: &Path, limit: u64) -> io::Result<()> {
    size_of(&open(path)?, limit).map(drop)
}

fn size_of(file: &File, limit: u64) -> io::Result<u64> {
    let size = file.metadata()?.len();
    if size > limit {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has {size} bytes, and the limit is {limit}"),
        ));
    }
    Ok(size)
}

/// The content of a regular file of at most `limit` bytes, as text.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    text(read(path, limit)?)
}

/// Like [`read_text`], but refuses a link, as [`open_unlinked`] does.
pub fn read_text_unlinked(path: &Path, limit: u64) -> io::Result<String> {
    text(read_unlinked(path, limit)?)
}

fn text(content: Vec<u8>) -> io::Result<String> {
    String::from_utf8(content)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::fs::symlink;
    use std::sync::mpsc;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use test_peers::wait::DEADLINE;

    use super::*;

    const LIMIT: u64 = 1024;

    /// The error of reading a file. The test fails if the read blocks.
    fn refusal(path: &Path) -> String {
        let (said, hear) = mpsc::channel();
        let path = path.to_owned();
        std::thread::spawn(move || said.send(read(&path, LIMIT).unwrap_err().to_string()));
        hear.recv_timeout(DEADLINE).expect("reading ends by itself")
    }

    #[test]
    fn what_is_no_regular_file_or_too_large_is_refused_without_waiting() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        assert!(refusal(&at("fifo")).starts_with("it is a FIFO"));
        symlink("/dev/zero", at("endless")).unwrap();
        assert!(refusal(&at("endless")).starts_with("it is a device"));
        let sparse = File::create(at("sparse")).unwrap();
        sparse.set_len(10 << 30).unwrap();
        assert_eq!(
            refusal(&at("sparse")),
            "it has 10737418240 bytes, and the limit is 1024"
        );
        let error = read(folder.path(), LIMIT).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
        let error = read(&at("absent"), LIMIT).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn a_file_is_read_whole_also_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "x".repeat(1024)).unwrap();
        symlink(&file, &link).unwrap();
        assert_eq!(read(&link, LIMIT).unwrap().len(), 1024);
        fs::write(&file, b"\xff").unwrap();
        let error = read_text(&link, LIMIT).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_link_to_a_file_in_memory_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        let mut secrets = crate::memory_file::data("secrets").unwrap();
        secrets.write_all(b"secret").unwrap();
        symlink(format!("/proc/self/fd/{}", secrets.as_raw_fd()), &link).unwrap();
        assert_eq!(read(&link, LIMIT).unwrap(), b"secret");
        for error in [
            read_unlinked(&link, LIMIT).unwrap_err(),
            read_text_unlinked(&link, LIMIT).unwrap_err(),
        ] {
            let expected = "it is a link, where a regular file is expected";
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn a_link_shows_nothing_of_this_process() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink("/proc/self/environ", &link).unwrap();
        assert!(!fs::read(&link).unwrap().is_empty());
        assert_eq!(read(&link, LIMIT).unwrap(), b"");
    }
}
