//! Job data in all its encodings. A document that can be decoded is the same in every other encoding. Other input is refused
//! with a short reason that never quotes the document.

#![no_main]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::Document;
use job_contract::encoding::{decode, document, encode, identify};
use libfuzzer_sys::fuzz_target;

/// The secret in the seeds. No message contains this text otherwise.
const SECRET: &[u8] = b"s3cr3t";

fuzz_target!(|data: &[u8]| {
    let as_it_is = decode(data);
    check(data);
    // Input that is no text becomes one in base64.
    let wrapped = STANDARD.encode(data);
    check(wrapped.as_bytes());
    if data.trim_ascii_start().starts_with(b"{") {
        assert_eq!(as_it_is, decode(wrapped.as_bytes()));
    }
});

fn check(text: &[u8]) {
    match decode(text) {
        Ok(job) => {
            let plain = encode(&job);
            let lines: Vec<_> = plain.as_bytes().chunks(76).collect();
            let received = document(text).expect("it was decoded before");
            let again = document(received.encode().as_bytes()).expect("it is what came");
            assert_eq!(again.json(), received.json());
            let compressed = Document::written(&job)
                .encode_compressed()
                .expect("there is memory");
            for form in [
                plain.as_bytes(),
                plain.trim_end_matches('=').as_bytes(),
                plain.replace('+', "-").replace('/', "_").as_bytes(),
                &lines.join(&b"\r\n"[..]),
                compressed.as_bytes(),
            ] {
                assert_eq!(decode(form).as_ref(), Ok(&job));
            }
            if let Err(error) = job.validate() {
                short(&error.to_string());
            }
            if let Some(known) = identify(text) {
                assert_eq!(
                    (&known.job_id, &known.step_id, &known.organization_id),
                    (&job.job_id, &job.step_id, &job.organization_id)
                );
            }
        }
        Err(error) => {
            let message = error.to_string();
            short(&message);
            let quotes_secret = message
                .as_bytes()
                .windows(SECRET.len())
                .any(|w| w == SECRET);
            assert!(!quotes_secret, "{message}");
            let _ = identify(text);
        }
    }
}

fn short(message: &str) {
    assert!(
        message.len() <= 1024 && !message.contains('\n'),
        "{message}"
    );
}
