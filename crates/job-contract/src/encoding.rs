//! Encodes and decodes job documents: base64 of JSON, or of JSON compressed with zstd, in one or several environment variables.
//!
//! Errors name the problem and its position. They never quote the document, because most of its fields can be secret.

use std::fmt::Write as _;
use std::io;

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use sha2::{Digest as _, Sha256};

use crate::build::BUILD_FULLY;
use crate::document::Document;
use crate::env;
use crate::job::JobData;
use crate::zstd_frame;

/// The largest document that is decoded, compressed or not. It is much larger than any document of a platform (contract 1.6),
/// and small enough that a decompression bomb cannot exhaust a pod.
pub const MAX_DOCUMENT_BYTES: usize = 32 * 1024 * 1024;

/// The largest encoded job data in the environment. It is the largest content of a Secret. It is half of the limit that Linux
/// has for arguments and environment together, if the stack has its usual limit of 8 MiB.
pub const MAX_ENVIRONMENT_BYTES: usize = 1024 * 1024;

const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Why a text cannot be decoded.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("the job data is empty")]
    Empty,
    /// A character outside both base64 alphabets, or an invalid length.
    #[error("the job data is not base64: {reason}")]
    NotBase64 { reason: String },
    #[error("the job data is not a valid zstd frame")]
    NotZstd,
    /// A zstd frame, in a build without zstd.
    #[error("the job data is compressed with zstd, which this build leaves out: {BUILD_FULLY}")]
    ZstdLeftOut,
    /// Larger than [`MAX_DOCUMENT_BYTES`].
    #[error("the job data is larger than {} MiB", MAX_DOCUMENT_BYTES / (1024 * 1024))]
    TooLarge,
    /// Not UTF-8.
    #[error("the job data is not UTF-8 text at byte {offset}")]
    NotText { offset: usize },
    /// Not a JSON document as in the contract.
    #[error("the job data is not a job document: {reason} at line {line} column {column}")]
    NotJobData {
        reason: &'static str,
        line: usize,
        column: usize,
    },
}

/// Encodes a document as every executor release reads it: standard base64 on one line.
pub fn encode(job: &JobData) -> String {
    Document::written(job).encode()
}

/// The variables of encoded job data, in their order. None is longer than Linux accepts (contract 1.6).
pub fn variables(encoded: &str) -> Vec<(String, &str)> {
    let mut variables = Vec::new();
    let mut rest = encoded;
    loop {
        let name = env::job_data_part(variables.len());
        let room = env::MAX_ENV_STRING_BYTES - name.len() - 2;
        let (part, left) = rest.split_at(rest.floor_char_boundary(room));
        variables.push((name, part));
        if left.is_empty() {
            return variables;
        }
        rest = left;
    }
}

/// The digest of encoded job data, from their parts: SHA-256 of the bytes as they travel, so that a reader can check them
/// before it decodes anything.
#[must_use]
pub fn digest<T: AsRef<[u8]>>(parts: &[T]) -> String {
    let mut sum = Sha256::new();
    for part in parts {
        sum.update(part);
    }
    hex(&sum.finalize())
}

/// Hexadecimal digits in lower case.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Whether the environment holds this document, compressed if it must be.
#[must_use]
pub fn fits_environment(json: &[u8]) -> bool {
    let fits = |bytes: usize| bytes.div_ceil(3) * 4 <= MAX_ENVIRONMENT_BYTES;
    fits(json.len()) || zstd_frame::compress(json).is_ok_and(|compressed| fits(compressed.len()))
}

/// Decodes job data: a JSON document, or base64 of a JSON document or of its zstd frame. Base64 may use the standard or the
/// URL-safe alphabet, with or without padding and line breaks.
pub fn decode(text: &[u8]) -> Result<JobData, DecodeError> {
    document(text).map(Document::into_job)
}

/// Like [`decode`], with the bytes of the JSON.
pub fn document(text: &[u8]) -> Result<Document, DecodeError> {
    let json = unwrap_document(text)?;
    std::str::from_utf8(&json).map_err(|e| DecodeError::NotText {
        offset: e.valid_up_to(),
    })?;
    Document::from_json(json).map_err(|e| DecodeError::NotJobData {
        reason: match e.classify() {
            serde_json::error::Category::Eof => "it ends too early",
            serde_json::error::Category::Data => "a property has the wrong type",
            serde_json::error::Category::Syntax | serde_json::error::Category::Io => {
                "it is not valid JSON"
            }
        },
        line: e.line(),
        column: e.column(),
    })
}

/// The ids and the type of a document that cannot be decoded otherwise, if it has them (contract 11.2).
pub fn identify(text: &[u8]) -> Option<JobData> {
    let document = unwrap_document(text).ok()?;
    let document: serde_json::Value = serde_json::from_slice(&document).ok()?;
    let text = |name: &str| match document.get(name)? {
        serde_json::Value::String(text) => Some(text.clone()),
        serde_json::Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    Some(JobData {
        job_id: text("jobId")?,
        step_id: text("stepId")?,
        organization_id: text("organizationId")?,
        workspace_id: text("workspaceId").unwrap_or_default(),
        step_type: text("type"),
        ..JobData::default()
    })
}

fn unwrap_document(text: &[u8]) -> Result<Vec<u8>, DecodeError> {
    match text.iter().find(|byte| !byte.is_ascii_whitespace()) {
        None => return Err(DecodeError::Empty),
        Some(b'{') => return within_limit(text.to_vec()),
        Some(_) => {}
    }
    let bytes = decode_base64(text)?;
    if bytes.starts_with(&ZSTD_MAGIC) {
        // One byte more shows that it is too large.
        let content = zstd_frame::decompress(&bytes, MAX_DOCUMENT_BYTES as u64 + 1);
        within_limit(content.map_err(|error| match error.kind() {
            io::ErrorKind::Unsupported => DecodeError::ZstdLeftOut,
            _ => DecodeError::NotZstd,
        })?)
    } else {
        within_limit(bytes)
    }
}

fn decode_base64(text: &[u8]) -> Result<Vec<u8>, DecodeError> {
    const ANY_PADDING: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    const LENIENT: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, ANY_PADDING);

    let standard: Vec<u8> = text
        .iter()
        .filter(|byte| !byte.is_ascii_whitespace())
        .map(|byte| match byte {
            b'-' => b'+',
            b'_' => b'/',
            other => *other,
        })
        .collect();
    LENIENT
        .decode(standard)
        .map_err(|error| DecodeError::NotBase64 {
            reason: match error {
                base64::DecodeError::InvalidByte(offset, _) => {
                    format!("unexpected character at position {offset}")
                }
                base64::DecodeError::InvalidLength(length) => {
                    format!("{length} characters are not a whole number of bytes")
                }
                base64::DecodeError::InvalidLastSymbol { .. }
                | base64::DecodeError::InvalidPadding => {
                    "the last characters are cut off".to_owned()
                }
            },
        })
}

fn within_limit(document: Vec<u8>) -> Result<Vec<u8>, DecodeError> {
    if document.len() > MAX_DOCUMENT_BYTES {
        Err(DecodeError::TooLarge)
    } else {
        Ok(document)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::Variable;
    use base64::engine::general_purpose::STANDARD;
    use proptest::prelude::*;

    fn sample() -> JobData {
        JobData {
            job_id: "412".into(),
            step_type: Some("terraformPlan".into()),
            access_token: Some("ghs_hunter2?>~".into()),
            variables: [("region".to_owned(), "eu-west-1 \u{e9}\u{1f600}".into())].into(),
            ..JobData::default()
        }
    }

    #[test]
    fn every_transport_form_decodes_to_the_same_document() {
        let job = sample();
        let standard = encode(&job);
        let url_safe = standard.replace('+', "-").replace('/', "_");
        let wrapped = standard
            .as_bytes()
            .chunks(76)
            .map(|c| str::from_utf8(c).unwrap())
            .collect::<Vec<_>>()
            .join("\r\n");
        let json = serde_json::to_string_pretty(&job).unwrap();
        for form in [
            &standard,
            &url_safe,
            &wrapped,
            standard.trim_end_matches('='),
            &Document::written(&job).encode_compressed().unwrap(),
            &json,
        ] {
            assert_eq!(decode(form.as_bytes()).as_ref(), Ok(&job), "{form}");
        }
    }

    #[test]
    fn errors_name_the_fault_and_never_the_data() {
        assert_eq!(decode(b" \n"), Err(DecodeError::Empty));
        assert!(matches!(
            decode(b"abc$efgh"),
            Err(DecodeError::NotBase64 { .. })
        ));
        let broken = STANDARD.encode(br#"{"accessToken":"hunter2","refresh":"hunter2"}"#);
        let error = decode(broken.as_bytes()).unwrap_err();
        assert_eq!(
            error,
            DecodeError::NotJobData {
                reason: "a property has the wrong type",
                line: 1,
                column: 44
            }
        );
        assert!(!error.to_string().contains("hunter2"));
        assert!(matches!(
            decode(
                STANDARD
                    .encode([0x28, 0xb5, 0x2f, 0xfd, 1, 2, 3])
                    .as_bytes()
            ),
            Err(DecodeError::NotZstd)
        ));
    }

    #[test]
    fn the_bytes_of_a_document_are_kept_in_every_form() {
        let json = " {\n \"zebra\": {\"b\": 1, \"a\": [null, 1.50]},\r\n\t\"jobId\" :412, \"variables\":\
                    [{\"key\":\"list\",\"value\":\"[1]\",\"hcl\":true,\"sensitive\":null}], \"commandList\":null} \n";
        let document = document(json.as_bytes()).unwrap();
        assert_eq!(document.job_id, "412");
        assert_eq!(document.variables["list"].hcl, Some(true));
        let compressed = document.encode_compressed().unwrap();
        for form in [document.encode(), compressed] {
            let received = super::document(form.as_bytes()).unwrap();
            assert_eq!(received.json(), json.as_bytes());
        }
    }

    #[test]
    fn job_data_are_spread_over_variables_that_linux_takes() {
        let room = env::MAX_ENV_STRING_BYTES - env::JOB_DATA.len() - 2;
        for (length, variables_needed) in [(0, 1), (room, 1), (room + 1, 2), (1024 * 1024, 9)] {
            let text = "x".repeat(length);
            let found = variables(&text);
            assert_eq!(found.len(), variables_needed);
            let whole: String = found.iter().map(|(_, part)| *part).collect();
            assert_eq!(whole, text);
            for (name, part) in found {
                assert!(name.len() + part.len() + 2 <= env::MAX_ENV_STRING_BYTES);
                assert!(env::is_job_data(&name));
            }
        }
    }

    #[test]
    fn a_decompression_bomb_is_refused() {
        let bomb = zstd::bulk::compress(&vec![b' '; MAX_DOCUMENT_BYTES + 1], 3).unwrap();
        assert_eq!(
            decode(STANDARD.encode(bomb).as_bytes()),
            Err(DecodeError::TooLarge)
        );
    }

    proptest! {
        #[test]
        fn arbitrary_input_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = decode(&bytes);
            let _ = decode(STANDARD.encode(&bytes).as_bytes());
        }

        /// With the flags of newer releases on all variables, or on none.
        #[test]
        fn documents_round_trip(
            values in proptest::collection::btree_map(".{0,12}", ".{0,40}", 0..6),
            flags in proptest::option::of(proptest::collection::vec(any::<bool>(), 6)),
        ) {
            let flag = |at: usize| flags.as_ref().map(|flags| flags[at]);
            let variables = values.iter().enumerate().map(|(at, (name, value))| {
                (name.clone(), Variable { value: value.clone(), hcl: flag(at) })
            });
            let job = JobData { variables: variables.collect(), environment_variables: values, ..sample() };
            prop_assert_eq!(decode(encode(&job).as_bytes()), Ok(job));
        }
    }
}
