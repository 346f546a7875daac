//! The shapes in which a secret can turn up in output: as it is, and in the encodings tools print. Pure; which
//! values are secret is decided elsewhere.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::GeneralPurpose;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};

/// Shorter texts are part of ordinary words and numbers; masking them would destroy the log.
const MIN_SECRET_BYTES: usize = 4;
/// The same for one line of a value of several lines, where `key:` or `EOF` are lines too.
const MIN_LINE_BYTES: usize = 6;
/// Larger values are masked piece by piece, which bounds how much of an endless line must be held back, and in
/// fewer encodings, which bounds memory.
const PIECE_BYTES: usize = 4096;
/// Where `base64` (76) and `openssl` (64) wrap their output.
const BASE64_WRAPS: [usize; 2] = [76, 64];

const UPPER_HEX: &[u8; 16] = b"0123456789ABCDEF";
const LOWER_HEX: &[u8; 16] = b"0123456789abcdef";

/// Adds every text that must be masked because of `secret`. None of them contains a newline, so that masking
/// works on single lines.
pub(super) fn add_forms(secret: &str, forms: &mut BTreeSet<String>) {
    let secret = secret.trim();
    if secret.len() < MIN_SECRET_BYTES {
        return;
    }
    if secret.len() <= PIECE_BYTES {
        add_common_forms(secret, forms);
        add_rare_forms(secret, forms);
        return;
    }
    let mut rest = secret;
    while rest.len() > PIECE_BYTES {
        let (piece, after) = rest.split_at(floor_char_boundary(rest, PIECE_BYTES));
        add_common_forms(piece, forms);
        rest = after;
    }
    // The last piece is taken from the end, so that it is never too short to be masked.
    let tail = ceil_char_boundary(secret, secret.len() - PIECE_BYTES);
    add_common_forms(&secret[tail..], forms);
}

/// As it is, in JSON, and in base64: what secrets of any size are printed as.
fn add_common_forms(secret: &str, forms: &mut BTreeSet<String>) {
    add_lines(secret, forms);
    let json = json_escaped(secret);
    add_lines(&json_ascii(&json), forms);
    add_lines(&json_html_safe(&json), forms);
    // A document inside a document, as in a plan that shows the result of `jsonencode`.
    add_lines(&json_escaped(&json), forms);
    add_lines(&json, forms);
    add_base64(secret.as_bytes(), forms);
}

fn add_rare_forms(secret: &str, forms: &mut BTreeSet<String>) {
    add_lines(&hcl_escaped(secret), forms);
    for hex in [UPPER_HEX, LOWER_HEX] {
        // RFC 3986; what JavaScript keeps beside it; paths and other lenient writers.
        for kept in ["-_.~", "-_.~!'()*", "-_.~!'()*$&+,;=:@/"] {
            add_lines(&url_encoded(secret, kept, hex), forms);
        }
        // HTML forms: Go's `QueryEscape` and Terraform's `urlencode`, browsers.
        for kept in ["-_.~", "-_.*"] {
            add_lines(&url_encoded(secret, kept, hex).replace("%20", "+"), forms);
        }
    }
    add_lines(&secret.replace('\'', r"'\''"), forms);
    add_lines(&secret.replace('\'', r#"'"'"'"#), forms);
    add_lines(
        &escaped(secret, |c| matches!(c, '"' | '\\' | '$' | '`')),
        forms,
    );
    // `printf %q`
    add_lines(
        &escaped(secret, |c| {
            c.is_ascii() && !c.is_ascii_alphanumeric() && !"-_./:=@%+\n".contains(c)
        }),
        forms,
    );
    // `$'…'`
    add_lines(
        &escaped(secret, |c| matches!(c, '\'' | '\\'))
            .replace('\n', r"\n")
            .replace('\t', r"\t"),
        forms,
    );
}

/// One text per line, without indentation, for tools print values of several lines indented.
fn add_lines(text: &str, forms: &mut BTreeSet<String>) {
    if !text.contains('\n') {
        forms.insert(text.to_owned());
        return;
    }
    let lines = text.lines().map(str::trim);
    forms.extend(
        lines
            .filter(|line| line.len() >= MIN_LINE_BYTES)
            .map(str::to_owned),
    );
}

fn json_escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// What Go and Terraform write, which keep their JSON safe to embed in HTML.
fn json_html_safe(json: &str) -> String {
    json.replace('<', r"\u003c")
        .replace('>', r"\u003e")
        .replace('&', r"\u0026")
        .replace('\u{2028}', r"\u2028")
        .replace('\u{2029}', r"\u2029")
}

/// What Python writes: nothing but ASCII.
fn json_ascii(json: &str) -> String {
    let mut ascii = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            ascii.push(c);
            continue;
        }
        for unit in c.encode_utf16(&mut [0; 2]) {
            let _ = write!(ascii, r"\u{unit:04x}");
        }
    }
    ascii
}

/// A quoted string of Terraform's own language.
fn hcl_escaped(text: &str) -> String {
    json_escaped(text).replace("${", "$${").replace("%{", "%%{")
}

fn url_encoded(text: &str, kept: &str, hex: &[u8; 16]) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || kept.as_bytes().contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push('%');
            encoded.push(char::from(hex[usize::from(byte >> 4)]));
            encoded.push(char::from(hex[usize::from(byte & 15)]));
        }
    }
    encoded
}

fn escaped(text: &str, special: impl Fn(char) -> bool) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if special(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

fn add_base64(secret: &[u8], forms: &mut BTreeSet<String>) {
    for engine in [&STANDARD, &URL_SAFE, &STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
        forms.insert(engine.encode(secret));
    }
    for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
        for lead in 0..3 {
            let embedded = embedded_base64(engine, lead, secret);
            if embedded.len() >= MIN_SECRET_BYTES {
                forms.insert(embedded);
            }
        }
        let whole = engine.encode(secret);
        for width in BASE64_WRAPS
            .into_iter()
            .filter(|width| whole.len() > *width)
        {
            let mut rest = whole.as_str();
            while rest.len() >= MIN_LINE_BYTES {
                let (line, after) = rest.split_at(rest.len().min(width));
                forms.insert(line.to_owned());
                rest = after;
            }
        }
    }
}

/// The characters that depend on nothing but the secret when it stands `lead` bytes (modulo 3) into a longer
/// text.
fn embedded_base64(engine: &GeneralPurpose, lead: usize, secret: &[u8]) -> String {
    let mut plain = vec![0; lead];
    plain.extend_from_slice(secret);
    let encoded = engine.encode(&plain);
    let first = (lead * 8).div_ceil(6);
    let end = plain.len() * 8 / 6;
    encoded[first..end].to_owned()
}

fn floor_char_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

fn ceil_char_boundary(text: &str, mut at: usize) -> usize {
    while !text.is_char_boundary(at) {
        at += 1;
    }
    at
}
