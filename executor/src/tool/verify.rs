//! Checks that a release comes from its publisher: checksum lists, and the OpenPGP signatures over them.
//!
//! The input is bytes. This module does not know their source.

#[cfg(feature = "full")]
mod keyring;
#[cfg(not(feature = "full"))]
#[path = "verify/no_keyring.rs"]
mod keyring;

use std::{
    fs,
    io::{self, Seek as _, SeekFrom},
};

use artifact_store::Digest;

pub(crate) use self::keyring::{IS_BUILT, Keyring, SignatureError};

/// Short id of HashiCorp's key. The name of one of its signature files contains it.
pub(crate) const HASHICORP_SHORT_ID: &str = "72D7468F";

/// Sizes in bytes that no list or signature, and no archive of a release has.
pub(super) const MAX_SMALL_FILE: u64 = 1 << 20;
pub(super) const MAX_ARCHIVE: u64 = 512 << 20;

/// The SHA-256 that a `SHA256SUMS` document lists for `file`, in lower case.
pub(crate) fn listed_digest(document: &str, file: &str) -> Option<String> {
    document.lines().find_map(|line| {
        let (digest, name) = line.split_once(char::is_whitespace)?;
        // A `*` marks a file that was hashed in binary mode.
        let name = name.trim();
        let is_digest = digest.len() == 64 && digest.bytes().all(|b| b.is_ascii_hexdigit());
        (is_digest && name.strip_prefix('*').unwrap_or(name) == file)
            .then(|| digest.to_ascii_lowercase())
    })
}

/// The SHA-256 of a whole file, in lower case. Blocks.
pub(crate) fn file_digest(mut file: &fs::File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    Ok(Digest::of_rest(&mut file)?.sha256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksums_are_found_by_whole_name_only() {
        let a = "a".repeat(64);
        let document = format!(
            "{a}  tool.zip\n{}  *other.zip\nshort  bad.zip\n",
            "B".repeat(64)
        );
        assert_eq!(listed_digest(&document, "tool.zip"), Some(a));
        assert_eq!(listed_digest(&document, "other.zip"), Some("b".repeat(64)));
        assert_eq!(listed_digest(&document, "ool.zip"), None);
        assert_eq!(listed_digest(&document, "bad.zip"), None);
        assert_eq!(
            listed_digest(
                include_str!("testdata/tofu_1.8.5_SHA256SUMS"),
                "tofu_1.8.5_linux_amd64.zip"
            )
            .unwrap(),
            "e2951ba6be8ae9427aabbd5c6f243855e8b526cb2ae6bc33a05dae22d7e82632"
        );
    }
}
