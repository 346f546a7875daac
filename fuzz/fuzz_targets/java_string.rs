//! Strings in Java's serialisation. Every text can be written and read again. Other bytes are refused, or become a text that
//! can be written and read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use platform::java::{decode, encode};

fuzz_target!(|data: &[u8]| {
    if let Some(text) = decode(data) {
        survives(&text);
    }
    survives(&String::from_utf8_lossy(data));
});

fn survives(text: &str) {
    let bytes = encode(text);
    // At most three bytes for each byte of the text, and a header of thirteen bytes.
    assert!(bytes.len() <= 3 * text.len() + 13);
    assert_eq!(decode(&bytes).as_deref(), Some(text));
    let head = if bytes[4] == 0x74 { 7 } else { 13 };
    assert!(!bytes[head..].contains(&0));
}
