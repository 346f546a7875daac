//! Redaction. An input has secrets, one on each line, then `--`, then a text. After redaction, the text has no secret, also not
//! in the most common encodings.

#![no_main]

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use libfuzzer_sys::fuzz_target;
use run_log::{MASK, Redactor};
use serde_json::Value;

fuzz_target!(|input: &str| {
    let (secrets, text) = input.split_once("\n--\n").unwrap_or((input, input));
    let secrets: Vec<_> = secrets
        .lines()
        .map(str::trim)
        // A secret that is like the mask cannot disappear completely.
        .filter(|secret| secret.len() >= 4 && !secret.contains('*'))
        .collect();
    let redactor = Redactor::new(&secrets);
    clean(&secrets, &redactor.redact(text));
    assert_eq!(
        redactor.redact(&redactor.redact(text)),
        redactor.redact(text)
    );
    if secrets.is_empty() {
        assert_eq!(redactor.redact(text), text);
    }

    if let Ok(mut document) = serde_json::from_str::<Value>(text) {
        redactor.redact_json(&mut document);
        clean_document(&secrets, &document);
    }
    for secret in &secrets {
        let json = Value::from(*secret).to_string();
        for printed in [
            (*secret).to_owned(),
            json[1..json.len() - 1].to_owned(),
            STANDARD.encode(secret),
            URL_SAFE_NO_PAD.encode(secret),
        ] {
            assert_eq!(redactor.redact(&printed), MASK, "{printed}");
        }
    }
});

fn clean(secrets: &[&str], text: &str) {
    for secret in secrets {
        assert!(!text.contains(secret), "{secret:?} is in {text:?}");
    }
}

fn clean_document(secrets: &[&str], document: &Value) {
    match document {
        Value::String(text) => clean(secrets, text),
        Value::Array(items) => items.iter().for_each(|item| clean_document(secrets, item)),
        Value::Object(members) => {
            for (name, value) in members {
                clean(secrets, name);
                clean_document(secrets, value);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}
