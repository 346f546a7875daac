//! `api-launcher pool keygen`: makes a key of a pool, to which a hub seals job documents.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use clap::{Args, ValueHint};
use job_contract::Exit;
use secrecy::ExposeSecret as _;

use crate::sealing::PrivateKey;
use crate::terminal;

#[derive(Args, Clone, Debug)]
pub(super) struct KeygenArgs {
    /// Folder of the files: the private half for agents alone, as `ID.key`, and the public half, as `ID.pub`
    #[arg(long, value_name = "DIR", default_value = ".", value_hint = ValueHint::DirPath)]
    directory: PathBuf,
}

pub(super) const NOTES: &str = "\
Give the private half to the agents, in the folder of their `private_key_dir`. Then put the public half first in `public_keys`
of the pool. Remove an old key when no run is in the queue any more that was sealed to it.

Example:
  api-launcher pool keygen --directory /etc/mayfly/keys";

impl KeygenArgs {
    pub(super) fn run(&self) -> Exit {
        let key = PrivateKey::new();
        match write(&self.directory, &key) {
            Ok(path) => {
                let text = format!(
                    "The private half is in {}. Standard output has the public half, for `public_keys` of the pool:\n",
                    path.display()
                );
                if io::stderr().write_all(text.as_bytes()).is_err() {
                    return Exit::Infrastructure;
                }
                terminal::stdout::print(format!("{}\n", key.public().text()).as_bytes())
            }
            Err(error) => {
                let folder = self.directory.display();
                let text = format!("the key cannot be written to `{folder}`: {error}\n");
                let _ = io::stderr().write_all(text.as_bytes());
                Exit::BadConfiguration
            }
        }
    }
}

/// Writes both halves. Each file appears with its whole content. Only the owner can read the private half.
fn write(folder: &Path, key: &PrivateKey) -> io::Result<PathBuf> {
    let private = folder.join(key.file_name());
    let public = private.with_extension("pub");
    for (path, text) in [
        (&private, key.text().expose_secret()),
        (&public, key.public().text().as_str()),
    ] {
        // The file has mode 0600.
        let mut file = tempfile::NamedTempFile::new_in(folder)?;
        writeln!(file, "{text}")?;
        file.as_file().sync_all()?;
        file.persist_noclobber(path).map_err(|error| error.error)?;
    }
    Ok(private)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::sealing::PublicKey;

    #[test]
    fn both_halves_are_written_and_belong_together() {
        let folder = tempfile::tempdir().unwrap();
        let key = PrivateKey::new();
        let private = write(folder.path(), &key).unwrap();
        let mode = private.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let public = fs::read_to_string(private.with_extension("pub")).unwrap();
        let public = PublicKey::parse(&public).unwrap();
        assert_eq!(private.file_stem().unwrap(), public.id());
        assert!(write(folder.path(), &key).is_err());
    }
}
