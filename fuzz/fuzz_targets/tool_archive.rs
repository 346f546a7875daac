//! Archives of tool releases. Only the complete binary is unpacked, at its path.

#![no_main]

use std::fs::{self, File};
use std::io::{Seek as _, Write as _};

use executor::tool::{Tool, install_archive};
use libfuzzer_sys::fuzz_target;
use semver::Version;

fuzz_target!(|data: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    let cache = folder.path().join("cache");
    let mut archive: File = tempfile::tempfile_in(folder.path()).expect("a file");
    archive.write_all(data).expect("there is room");
    archive.rewind().expect("a file");
    let installed = install_archive(&cache, Tool::Terraform, &Version::new(1, 0, 0), &archive);

    let slot = cache.join("terraform").join("1.0.0");
    let found: Vec<_> = fs::read_dir(&slot)
        .expect("the slot is made first")
        .map(|entry| entry.expect("a folder of ours").file_name())
        .collect();
    match installed {
        Ok(path) => {
            assert_eq!(path, slot.join("terraform"));
            assert_eq!(found, ["terraform"]);
            assert!(fs::symlink_metadata(&path).expect("it is there").is_file());
        }
        Err(error) => {
            assert!(found.is_empty(), "{found:?}");
            assert!(!error.to_string().contains('\n'));
        }
    }
    assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 1);
});
