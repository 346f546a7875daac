//! Opens and reads files that the user's code can replace at any time, by a FIFO, a link to a device, or a sparse file of
//! terabytes. Neither opening nor reading blocks, and only regular files are read.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::Path;

use nix::fcntl::OFlag;

/// Opens a regular file for reading and follows links. For other kinds of files, the error names the kind.
pub fn open(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        // Otherwise opening a FIFO waits for a writer, and opening a terminal makes it the controlling terminal.
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits())
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
    Err(io::Error::other(format!(
        "it is {found}, where a regular file is expected"
    )))
}

/// The content of a regular file of at most `limit` bytes.
///
/// Reads at most the file's size, so files of `/proc` are empty here. So user code cannot replace a file with a link to
/// `/proc` to read, through this process, data that only this process may read.
pub fn read(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let (file, size) = open_limited(path, limit)?;
    let mut content = Vec::new();
    file.take(size).read_to_end(&mut content)?;
    Ok(content)
}

/// Whether this is a regular file of at most `limit` bytes that can be opened.
pub fn check(path: &Path, limit: u64) -> io::Result<()> {
    open_limited(path, limit).map(drop)
}

fn open_limited(path: &Path, limit: u64) -> io::Result<(File, u64)> {
    let file = open(path)?;
    let size = file.metadata()?.len();
    if size > limit {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has {size} bytes, and the limit is {limit}"),
        ));
    }
    Ok((file, size))
}

/// The content of a regular file of at most `limit` bytes, as text.
pub fn read_text(path: &Path, limit: u64) -> io::Result<String> {
    String::from_utf8(read(path, limit)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::sync::mpsc;
    use std::time::Duration;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    const LIMIT: u64 = 1024;

    /// The error of reading a file. The test fails if the read blocks.
    fn refusal(path: &Path) -> String {
        let (said, hear) = mpsc::channel();
        let path = path.to_owned();
        std::thread::spawn(move || said.send(read(&path, LIMIT).unwrap_err().to_string()));
        hear.recv_timeout(Duration::from_secs(30))
            .expect("reading ends by itself")
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
    fn a_link_shows_nothing_of_this_process() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink("/proc/self/environ", &link).unwrap();
        assert!(!fs::read(&link).unwrap().is_empty());
        assert_eq!(read(&link, LIMIT).unwrap(), b"");
    }
}
