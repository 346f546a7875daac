//! Configurations as tar archives. For any archive, nothing is written outside the target folder, no link in it leads outside,
//! and the limits hold.
//!
//! The input is a tar archive. The target corrects the checksums of its headers and compresses it. An input that is already
//! compressed with gzip is unpacked without changes.

#![no_main]

use std::collections::HashSet;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use executor::workspace::ArchiveLimits;
use executor::workspace::archive::unpack;
use flate2::Compression;
use flate2::write::GzEncoder;
use libfuzzer_sys::fuzz_target;

const LIMITS: ArchiveLimits = ArchiveLimits {
    max_bytes: 4096,
    max_entries: 16,
};
const BLOCK: usize = 512;

fuzz_target!(|data: &[u8]| {
    if data.starts_with(&[0x1f, 0x8b]) {
        check(data);
    } else {
        let mut tar = data.to_vec();
        mend_headers(&mut tar);
        let mut archive = GzEncoder::new(Vec::new(), Compression::none());
        archive.write_all(&tar).expect("memory takes everything");
        check(&archive.finish().expect("memory takes everything"));
    }
});

fn check(archive: &[u8]) {
    let folder = tempfile::tempdir().expect("a folder");
    let target = folder.path().join("target");
    let neighbour = folder.path().join("neighbour");
    fs::create_dir(&target).expect("a new folder");
    fs::write(&neighbour, "untouched").expect("a new file");

    let outcome = unpack(archive, &target, LIMITS, &AtomicBool::new(false));

    let root = fs::canonicalize(&target).expect("it is still there");
    let mut found = Found::default();
    look(&root, &root, &mut found);
    assert_eq!(
        fs::read(&neighbour).expect("it is still there"),
        b"untouched"
    );
    let beside = fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(beside, 2, "something appeared beside the target");
    match outcome {
        Ok(unpacked) => {
            assert!(unpacked.entries <= LIMITS.max_entries && unpacked.bytes <= LIMITS.max_bytes);
            assert!(found.bytes <= unpacked.bytes);
        }
        Err(error) => assert!(error.to_string().len() <= 4096 && !error.to_string().contains('\n')),
    }
    assert!(found.bytes <= LIMITS.max_bytes);
    assert!(
        found.entries <= LIMITS.max_entries,
        "{} are there",
        found.entries
    );
}

#[derive(Default)]
struct Found {
    /// Files, folders and links.
    entries: u64,
    bytes: u64,
    inodes: HashSet<u64>,
}

fn look(folder: &Path, root: &Path, found: &mut Found) {
    for entry in fs::read_dir(folder).expect("a folder of ours") {
        let path = entry.expect("a folder of ours").path();
        let kind = fs::symlink_metadata(&path).expect("it was listed");
        let name = path.display();
        found.entries += 1;
        if kind.is_dir() {
            look(&path, root, found);
        } else if kind.is_symlink() {
            // A broken or circular link does not lead outside.
            if let Ok(end) = fs::canonicalize(&path) {
                assert!(end.starts_with(root), "{name} leads to {}", end.display());
            }
            let text = fs::read_link(&path).expect("a link");
            assert!(!text.is_absolute(), "{name} is {}", text.display());
        } else {
            assert!(kind.is_file(), "{name} is neither file, folder nor link");
            assert_eq!(kind.permissions().mode() & 0o7022, 0, "{name}");
            // A hard link takes no additional space.
            if found.inodes.insert(kind.ino()) {
                found.bytes += kind.len();
            }
        }
    }
}

/// Sets the checksum of each header in the archive.
fn mend_headers(tar: &mut [u8]) {
    let mut at = 0;
    while let Some(block) = tar.get_mut(at..at + BLOCK) {
        let mut header = tar::Header::new_old();
        header.as_mut_bytes().copy_from_slice(block);
        if block.iter().any(|byte| *byte != 0) {
            header.set_cksum();
            block.copy_from_slice(header.as_bytes());
        }
        let size = usize::try_from(header.entry_size().unwrap_or(0)).unwrap_or(usize::MAX);
        let content = size.checked_next_multiple_of(BLOCK);
        let Some(next) = content.and_then(|content| (at + BLOCK).checked_add(content)) else {
            return;
        };
        at = next;
    }
}
