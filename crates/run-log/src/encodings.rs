//! The encodings in which tools print a text. Pure. Other modules decide which texts are secret.

use std::borrow::Cow;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::GeneralPurpose;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};

/// Encodes a text. The result is borrowed if the text does not change.
pub(super) type Encoding<T> = fn(&T) -> Cow<'_, str>;

/// Encodings that keep most characters. Single lines of a secret can be found in them.
pub(super) const TEXT_ENCODINGS: &[Encoding<str>] = &[
    as_it_is,
    json,
    json_html_safe,
    json_ascii,
    hcl,
    // A document from `jsonencode`, in a string that Terraform shows, or in another document.
    |text| nested(text, json_html_safe, hcl),
    |text| nested(text, json, json),
    // The same documents as values of variables, as shells show them.
    |text| nested(text, json, single_quoted),
    |text| nested(text, json_html_safe, single_quoted),
    |text| nested(text, json_in_json, single_quoted),
    |text| nested(text, json, double_quoted),
    |text| nested(text, json_html_safe, double_quoted),
    |text| nested(text, json_in_json, double_quoted),
    // RFC 3986: Terraform's and Python's functions, `jq` and `curl`.
    |text| percent(text, "-_.~", UPPER_HEX),
    |text| percent(text, "-_.~", LOWER_HEX),
    // JavaScript's `encodeURIComponent`.
    |text| percent(text, "-_.~!'()*", UPPER_HEX),
    // Forms: Go and Terraform, and then browsers and Java.
    |text| form_urlencoded(text, "-_.~", UPPER_HEX),
    |text| form_urlencoded(text, "-_.~", LOWER_HEX),
    |text| form_urlencoded(text, "-_.*", UPPER_HEX),
    // Shells, in single quotes, in double quotes, as `printf %q` and as `$'…'`, with and without UTF-8.
    single_quoted,
    |text| replaced(text, '\'', r#"'"'"'"#),
    double_quoted,
    |text| {
        escaped(text, |c| {
            c.is_ascii() && !c.is_ascii_alphanumeric() && !"-_./:=@%+".contains(c)
        })
    },
    |text| ansi_quoted(text, |_| false),
    |text| ansi_quoted(text, |c| !c.is_ascii()),
];

/// Encodings of bytes: base64 and hexadecimal. Tools may break their output into lines at any place.
pub(super) const BINARY_ENCODINGS: &[Encoding<[u8]>] = &[
    |bytes| STANDARD.encode(bytes).into(),
    |bytes| STANDARD_NO_PAD.encode(bytes).into(),
    |bytes| embedded_base64(&STANDARD_NO_PAD, 0, bytes),
    |bytes| embedded_base64(&STANDARD_NO_PAD, 1, bytes),
    |bytes| embedded_base64(&STANDARD_NO_PAD, 2, bytes),
    |bytes| URL_SAFE.encode(bytes).into(),
    |bytes| URL_SAFE_NO_PAD.encode(bytes).into(),
    |bytes| embedded_base64(&URL_SAFE_NO_PAD, 0, bytes),
    |bytes| embedded_base64(&URL_SAFE_NO_PAD, 1, bytes),
    |bytes| embedded_base64(&URL_SAFE_NO_PAD, 2, bytes),
    |bytes| hex(bytes, LOWER_HEX),
    |bytes| hex(bytes, UPPER_HEX),
];

/// Whether base64 of either alphabet, or a hexadecimal number, can contain this byte.
pub(super) fn is_base64_or_hex(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+/-_=".contains(&byte)
}

const UPPER_HEX: &[u8; 16] = b"0123456789ABCDEF";
const LOWER_HEX: &[u8; 16] = b"0123456789abcdef";

pub(super) fn as_it_is(text: &str) -> Cow<'_, str> {
    Cow::Borrowed(text)
}

/// The inside of a string in JSON.
fn json(text: &str) -> Cow<'_, str> {
    if !text
        .bytes()
        .any(|byte| byte < b' ' || byte == b'"' || byte == b'\\')
    {
        return text.into();
    }
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned().into()
}

/// JSON as Go and Terraform write it: safe to embed in HTML.
fn json_html_safe(text: &str) -> Cow<'_, str> {
    unicode_escaped(json(text), |c| "<>&\u{2028}\u{2029}".contains(c))
}

/// JSON as Python writes it: only ASCII.
fn json_ascii(text: &str) -> Cow<'_, str> {
    unicode_escaped(json(text), |c| c >= '\u{7f}')
}

fn unicode_escaped(text: Cow<'_, str>, special: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&special) {
        return text;
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if special(c) {
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(escaped, r"\u{unit:04x}");
            }
        } else {
            escaped.push(c);
        }
    }
    escaped.into()
}

/// A quoted string of Terraform's own language, as in the output of a plan.
fn hcl(text: &str) -> Cow<'_, str> {
    let json = json(text);
    if json.contains("${") || json.contains("%{") {
        return json.replace("${", "$${").replace("%{", "%%{").into();
    }
    json
}

fn json_in_json(text: &str) -> Cow<'_, str> {
    nested(text, json_html_safe, json)
}

/// The text as `echo` of dash prints it. Dash is `sh` on Debian, which `local-exec` runs. Its `echo` interprets backslash
/// escapes. The result may have several lines. It is borrowed if the text has no backslash.
pub(super) fn echoed(text: &str) -> Cow<'_, str> {
    if !text.contains('\\') {
        return text.into();
    }
    let mut printed = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        printed.push_str(before);
        let Some(c) = after.chars().next() else {
            rest = "\\";
            break;
        };
        rest = &after[c.len_utf8()..];
        match c {
            'a' => printed.push('\u{7}'),
            'b' => printed.push('\u{8}'),
            // `\c` ends the output.
            'c' => return printed.into(),
            'e' => printed.push('\u{1b}'),
            'f' => printed.push('\u{c}'),
            'n' => printed.push('\n'),
            'r' => printed.push('\r'),
            't' => printed.push('\t'),
            'v' => printed.push('\u{b}'),
            '\\' => printed.push('\\'),
            '0'..='7' => {
                let most = if c == '0' { 4 } else { 3 };
                let digits = after.bytes().take(most);
                let length = digits
                    .take_while(|byte| (b'0'..=b'7').contains(byte))
                    .count();
                let code = u32::from_str_radix(&after[..length], 8).unwrap_or_default();
                let byte = u8::try_from(code & 0xff).unwrap_or_default();
                // The log shows bytes that are not text as replacement characters.
                printed.push(if byte.is_ascii() {
                    char::from(byte)
                } else {
                    char::REPLACEMENT_CHARACTER
                });
                rest = &after[length..];
            }
            other => printed.extend(['\\', other]),
        }
    }
    printed.push_str(rest);
    printed.into()
}

fn single_quoted(text: &str) -> Cow<'_, str> {
    replaced(text, '\'', r"'\''")
}

fn double_quoted(text: &str) -> Cow<'_, str> {
    escaped(text, |c| "\"\\$`".contains(c))
}

fn nested(text: &str, inner: Encoding<str>, outer: Encoding<str>) -> Cow<'_, str> {
    match inner(text) {
        Cow::Borrowed(same) => outer(same),
        Cow::Owned(encoded) => outer(&encoded).into_owned().into(),
    }
}

fn percent<'a>(text: &'a str, kept: &str, digits: &[u8; 16]) -> Cow<'a, str> {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() || kept.as_bytes().contains(&byte);
    if text.bytes().all(is_kept) {
        return text.into();
    }
    let mut encoded = String::with_capacity(text.len() + 16);
    for byte in text.bytes() {
        if is_kept(byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push('%');
            encoded.extend(hex_digits(byte, digits));
        }
    }
    encoded.into()
}

fn form_urlencoded<'a>(text: &'a str, kept: &str, digits: &[u8; 16]) -> Cow<'a, str> {
    match percent(text, kept, digits) {
        Cow::Owned(encoded) if text.contains(' ') => encoded.replace("%20", "+").into(),
        encoded => encoded,
    }
}

fn replaced<'a>(text: &'a str, special: char, by: &str) -> Cow<'a, str> {
    if text.contains(special) {
        text.replace(special, by).into()
    } else {
        text.into()
    }
}

fn escaped(text: &str, special: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(&special) {
        return text.into();
    }
    let mut escaped = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        if special(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped.into()
}

/// The inside of `$'…'` in a shell. Bytes of these characters, and control characters, become octal numbers.
fn ansi_quoted(text: &str, octal: impl Fn(char) -> bool) -> Cow<'_, str> {
    let is_special = |c: char| c.is_ascii_control() || "'\\".contains(c) || octal(c);
    if !text.contains(is_special) {
        return text.into();
    }
    let mut quoted = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\u{7}' => quoted.push_str(r"\a"),
            '\u{8}' => quoted.push_str(r"\b"),
            '\t' => quoted.push_str(r"\t"),
            '\n' => quoted.push_str(r"\n"),
            '\u{b}' => quoted.push_str(r"\v"),
            '\u{c}' => quoted.push_str(r"\f"),
            '\r' => quoted.push_str(r"\r"),
            '\u{1b}' => quoted.push_str(r"\E"),
            '\'' | '\\' => quoted.extend(['\\', c]),
            c if is_special(c) => {
                for byte in c.encode_utf8(&mut [0; 4]).bytes() {
                    let _ = write!(quoted, r"\{byte:03o}");
                }
            }
            c => quoted.push(c),
        }
    }
    quoted.into()
}

fn hex<'a>(bytes: &[u8], digits: &[u8; 16]) -> Cow<'a, str> {
    let mut encoded = String::with_capacity(bytes.len() * 2);
    encoded.extend(bytes.iter().flat_map(|byte| hex_digits(*byte, digits)));
    encoded.into()
}

fn hex_digits(byte: u8, digits: &[u8; 16]) -> [char; 2] {
    [byte >> 4, byte & 15].map(|digit| char::from(digits[usize::from(digit)]))
}

/// The base64 characters that depend only on these bytes, if they begin `lead` bytes (modulo 3) after the start of a longer
/// text.
fn embedded_base64<'a>(engine: &GeneralPurpose, lead: usize, bytes: &[u8]) -> Cow<'a, str> {
    let mut plain = vec![0; lead];
    plain.extend_from_slice(bytes);
    let encoded = engine.encode(&plain);
    encoded[(lead * 8).div_ceil(6)..plain.len() * 8 / 6]
        .to_owned()
        .into()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn escapes_are_interpreted_as_dash_does() {
        let letters = ('!'..='~').map(String::from);
        let numbers = ["04", "041", "0101", "01012", "0377", "23", "234", "2345"];
        for escape in letters.chain(numbers.map(str::to_owned)) {
            for after in ["", "rest"] {
                let secret = format!("hunter\\{escape}{after}");
                let output = Command::new("dash")
                    .args(["-c", "echo \"$0\""])
                    .arg(&secret)
                    .output()
                    .unwrap();
                let shown = String::from_utf8_lossy(&output.stdout);
                let shown = shown.strip_suffix('\n').unwrap_or(&shown);
                assert_eq!(echoed(&secret), shown, "{secret}");
            }
        }
        assert_eq!(echoed("hunter\\"), "hunter\\");
    }
}
