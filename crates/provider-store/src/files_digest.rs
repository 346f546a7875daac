//! The digest of a package's files that lock files have, `h1:…`.

use std::io;
use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha2::{Digest as _, Sha256};

use crate::folder::Folder;
use crate::{Archive, Progress, copy_hashed};

/// More levels than any package has.
pub(crate) const LEVELS: usize = 16;

/// Reads all files below a folder. Whatever is neither a file nor a folder is an error.
pub(crate) fn of(folder: &Folder, progress: &Progress) -> io::Result<String> {
    let mut lines = Vec::new();
    collect(folder, "", LEVELS, progress, &mut lines)?;
    lines.sort();
    let mut hasher = Sha256::new();
    for (name, digest) in lines {
        hasher.update(format!("{digest}  {name}\n"));
    }
    Ok(format!("h1:{}", STANDARD.encode(hasher.finalize())))
}

fn collect(
    folder: &Folder,
    prefix: &str,
    levels: usize,
    progress: &Progress,
    lines: &mut Vec<(String, String)>,
) -> io::Result<()> {
    for (name, kind) in folder.entries()? {
        let full = format!("{prefix}{name}");
        if kind.is_dir() && levels > 0 {
            let inner = folder.below(Path::new(&name))?;
            collect(&inner, &format!("{full}/"), levels - 1, progress, lines)?;
        } else {
            let mut file = Archive {
                file: runtime::regular_file::open_unlinked(&folder.at(&name))?,
                progress: progress.clone(),
            };
            let digest: String = copy_hashed(&mut file, &mut io::sink())?;
            lines.push((full, digest));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Terraform computed it for these files.
    #[test]
    fn it_is_the_digest_of_the_tool() {
        let files = tempfile::tempdir().unwrap();
        fs::write(files.path().join("terraform-provider-x_v1.0.0"), "binary\n").unwrap();
        fs::write(files.path().join("LICENSE.txt"), "hello\n").unwrap();
        let open = || Folder::open(files.path()).unwrap();
        let digest = of(&open(), &Progress::default()).unwrap();
        assert_eq!(digest, "h1:cuAYBzn6IKPHKJs3M/HcpkzTtSYaT+z1m6UlPiPEYmI=");
        fs::create_dir(files.path().join("inner")).unwrap();
        fs::write(files.path().join("inner/a"), "").unwrap();
        assert_ne!(of(&open(), &Progress::default()).unwrap(), digest);
        std::os::unix::fs::symlink("/etc/passwd", files.path().join("link")).unwrap();
        assert!(of(&open(), &Progress::default()).is_err());
    }
}
