//! Known answers from real releases: Terraform 1.9.8 and OpenTofu 1.8.5, as published.

use super::*;
use crate::tool::verify::HASHICORP_SHORT_ID;

const TERRAFORM_SUMS: &[u8] = include_bytes!("../../testdata/terraform_1.9.8_SHA256SUMS");
const TERRAFORM_SIGNATURE: &[u8] = include_bytes!("../../testdata/terraform_1.9.8_SHA256SUMS.sig");
const TOFU_SUMS: &[u8] = include_bytes!("../../testdata/tofu_1.8.5_SHA256SUMS");
const TOFU_SIGNATURE: &[u8] = include_bytes!("../../testdata/tofu_1.8.5_SHA256SUMS.gpgsig");

fn fingerprints(tool: Tool) -> Vec<String> {
    Keyring::publisher(tool)
        .unwrap()
        .certificates
        .iter()
        .map(|certificate| format!("{:X}", certificate.fingerprint()))
        .collect()
}

#[test]
fn built_in_keys_are_the_published_ones() {
    assert_eq!(
        fingerprints(Tool::Terraform),
        ["C874011F0AB405110D02105534365D9472D7468F"]
    );
    assert_eq!(
        fingerprints(Tool::OpenTofu),
        ["E3E6E43D84CB852EADB0051D0C0AF313E5FD9F80"]
    );
    assert!("C874011F0AB405110D02105534365D9472D7468F".ends_with(HASHICORP_SHORT_ID));
}

#[test]
fn real_releases_verify() {
    Keyring::publisher(Tool::Terraform)
        .unwrap()
        .check(TERRAFORM_SUMS, TERRAFORM_SIGNATURE)
        .unwrap();
    Keyring::publisher(Tool::OpenTofu)
        .unwrap()
        .check(TOFU_SUMS, TOFU_SIGNATURE)
        .unwrap();
}

#[test]
fn one_changed_byte_is_a_bad_signature() {
    let mut changed = TERRAFORM_SUMS.to_vec();
    changed[0] ^= 1;
    let mut longer = TERRAFORM_SUMS.to_vec();
    longer.push(b'\n');
    for document in [changed, longer] {
        let verdict = Keyring::publisher(Tool::Terraform)
            .unwrap()
            .check(&document, TERRAFORM_SIGNATURE);
        assert!(
            matches!(verdict, Err(SignatureError::Bad(_))),
            "{verdict:?}"
        );
    }
}

#[test]
fn a_publisher_is_not_trusted_for_the_other_tool() {
    let verdict = Keyring::publisher(Tool::OpenTofu)
        .unwrap()
        .check(TERRAFORM_SUMS, TERRAFORM_SIGNATURE);
    let Err(SignatureError::UnknownSigner { signer }) = verdict else {
        panic!("{verdict:?}");
    };
    assert_eq!(signer, "key 374EC75B485913604A831CC7C820C6D5CD27AB87");
}

#[test]
fn damaged_signatures_are_errors() {
    let keyring = Keyring::publisher(Tool::Terraform).unwrap();
    let half = &TERRAFORM_SIGNATURE[..TERRAFORM_SIGNATURE.len() / 2];
    for damaged in [half, b"", b"<html>not found</html>", HASHICORP.as_bytes()] {
        keyring.check(TERRAFORM_SUMS, damaged).unwrap_err();
    }
}

#[test]
fn a_subkey_signs_only_with_a_binding() {
    let mut keyring = Keyring::publisher(Tool::Terraform).unwrap();
    for subkey in &mut keyring.certificates[0].public_subkeys {
        subkey.signatures.clear();
    }
    let verdict = keyring.check(TERRAFORM_SUMS, TERRAFORM_SIGNATURE);
    assert!(
        matches!(verdict, Err(SignatureError::UnknownSigner { .. })),
        "{verdict:?}"
    );
}
