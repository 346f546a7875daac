//! Writes the tarball: names relative to the root, mode bits and links kept, owners not.

use std::fs::OpenOptions;
use std::io::{self, Read as _, Write};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;
use job_contract::Exit;
use runtime::regular_file;
use tar::{Builder, EntryType, Header};

use super::{Content, Entry, Kind};
use crate::failure::Failure;

/// A file that is not in the tree but goes along.
pub(crate) struct Extra {
    /// Its name in the root module.
    pub(crate) name: String,
    /// What it holds. May be secret.
    pub(crate) text: Vec<u8>,
}

impl std::fmt::Debug for Extra {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Extra").field(&self.name).finish()
    }
}

/// Writes `content` and `extras` to a new file at `target`, readable by its owner alone: variable files hold
/// secrets.
pub(crate) fn write(content: &Content, extras: &[Extra], target: &Path) -> Result<(), Failure> {
    let fail = |error| unwritable(target, error);
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(target)
        .map_err(fail)?;
    // The tarball is read once, on this machine: speed counts, size does not.
    let mut archive = Archive {
        tar: Builder::new(GzEncoder::new(
            io::BufWriter::new(file),
            Compression::fast(),
        )),
        target,
    };
    for entry in &content.entries {
        archive.append(entry)?;
    }
    for extra in extras {
        archive.append_extra(extra, &content.folder)?;
    }
    let gzip = archive.tar.into_inner().map_err(fail)?;
    gzip.finish()
        .and_then(|mut buffer| buffer.flush())
        .map_err(fail)
}

struct Archive<'a, W: Write> {
    tar: Builder<W>,
    target: &'a Path,
}

impl<W: Write> Archive<'_, W> {
    fn append(&mut self, entry: &Entry) -> Result<(), Failure> {
        match &entry.kind {
            Kind::File => self.append_file(&entry.path, &entry.name),
            Kind::Folder => {
                let mut header = header(EntryType::Directory, 0o755, 0);
                let appended = self.tar.append_data(&mut header, &entry.name, io::empty());
                self.written(appended)
            }
            Kind::Link(text) => {
                let mut header = header(EntryType::Symlink, 0o777, 0);
                let appended = self.tar.append_link(&mut header, &entry.name, text);
                self.written(appended)
            }
        }
    }

    /// A file keeps the size it had when it was opened: one that grows is cut there, one that shrinks is
    /// refused, and neither spoils the archive.
    fn append_file(&mut self, path: &Path, name: &Path) -> Result<(), Failure> {
        let read = Failure::unreadable(path);
        let file = regular_file::open(path).map_err(&read)?;
        let metadata = file.metadata().map_err(read)?;
        let mut header = header(
            EntryType::Regular,
            metadata.permissions().mode() & 0o777,
            u64::try_from(metadata.mtime()).unwrap_or(0),
        );
        header.set_size(metadata.len());
        let mut source = Counted {
            inner: file.take(metadata.len()),
            count: 0,
        };
        let appended = self.tar.append_data(&mut header, name, &mut source);
        if appended.is_ok() && source.count < metadata.len() {
            let text = format!("`{}` changed while it was packed", path.display());
            return Err(Failure::new(Exit::Infrastructure, text)
                .with_hint("run it again once nothing writes there"));
        }
        self.written(appended)
    }

    fn append_extra(&mut self, extra: &Extra, folder: &Path) -> Result<(), Failure> {
        let mut header = header(EntryType::Regular, 0o600, 0);
        header.set_size(extra.text.len() as u64);
        let name = folder.join(&extra.name);
        let appended = self.tar.append_data(&mut header, name, &*extra.text);
        self.written(appended)
    }

    fn written(&self, result: io::Result<()>) -> Result<(), Failure> {
        result.map_err(|error| unwritable(self.target, error))
    }
}

fn unwritable(path: &Path, error: io::Error) -> Failure {
    let text = format!("could not write `{}`", path.display());
    Failure::new(Exit::Infrastructure, text).because(error)
}

fn header(kind: EntryType, mode: u32, mtime: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_mtime(mtime);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header
}

struct Counted<R> {
    inner: R,
    count: u64,
}

impl<R: io::Read> io::Read for Counted<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(buffer)?;
        self.count += n as u64;
        Ok(n)
    }
}

#[cfg(test)]
mod tests {
    use super::super::survey;
    use super::super::tests::folder;
    use super::*;
    use flate2::read::GzDecoder;
    use std::fs;
    use std::fs::File;
    use std::os::unix::fs::symlink;

    #[test]
    fn modes_links_and_extras_arrive_as_they_were() {
        let (_temp, root) = folder(&[("stack/main.tf", "x"), ("stack/run.sh", "#!/bin/sh")]);
        let stack = root.join("stack");
        fs::set_permissions(stack.join("run.sh"), fs::Permissions::from_mode(0o755)).unwrap();
        symlink("run.sh", stack.join("link.sh")).unwrap();
        let long = "deep/".repeat(40) + "main.tf";
        fs::create_dir_all(stack.join(&long).parent().unwrap()).unwrap();
        fs::write(stack.join(&long), "").unwrap();

        let content = survey(&stack, None, &[]).unwrap();
        let target = root.join("content.tar.gz");
        let extras = [Extra {
            name: "zz.auto.tfvars".into(),
            text: b"a = 1".to_vec(),
        }];
        write(&content, &extras, &target).unwrap();
        assert_eq!(fs::metadata(&target).unwrap().mode() & 0o777, 0o600);

        let out = root.join("out");
        tar::Archive::new(GzDecoder::new(File::open(&target).unwrap()))
            .unpack(&out)
            .unwrap();
        assert_eq!(
            fs::metadata(out.join("run.sh")).unwrap().mode() & 0o777,
            0o755
        );
        assert_eq!(
            fs::read_link(out.join("link.sh")).unwrap(),
            Path::new("run.sh")
        );
        assert_eq!(
            fs::read_to_string(out.join("zz.auto.tfvars")).unwrap(),
            "a = 1"
        );
        assert!(out.join(long).is_file());
    }

    #[test]
    fn an_archive_never_overwrites() {
        let (_temp, root) = folder(&[("stack/main.tf", ""), ("content.tar.gz", "precious")]);
        let content = survey(&root.join("stack"), None, &[]).unwrap();
        assert!(write(&content, &[], &root.join("content.tar.gz")).is_err());
        assert_eq!(
            fs::read_to_string(root.join("content.tar.gz")).unwrap(),
            "precious"
        );
    }
}
