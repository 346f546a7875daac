//! The shapes in which a secret can turn up in output: as it is, and in the encodings tools print. What escapes single
//! characters is left to [`Lenient`] wherever that finds it. Pure; which values are secret is decided elsewhere.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fmt::Write as _;

use base64::Engine as _;
use base64::engine::GeneralPurpose;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use icu_normalizer::ComposingNormalizerBorrowed;

use super::echo::SHELLS;
use super::folded::Folded;
use super::lenient::Lenient;

/// Shorter texts are part of ordinary words and numbers; masking them would destroy the log.
const MIN_SECRET_BYTES: usize = 4;
/// The same for one line of a value of several lines, where `key:` or `EOF` are lines too.
const MIN_LINE_BYTES: usize = 6;
/// Larger values are masked piece by piece, which bounds how much of an endless line must be held back, and in
/// fewer encodings, which bounds memory.
const PIECE_BYTES: usize = 4096;
/// Larger values are not looked for in documents that were quoted or encoded once more, which bounds memory: what is
/// larger is a key or a document of its own.
const NESTED_BYTES: usize = 128;

/// What percent-encoders leave as it is beside letters and digits.
const KEPT_IN_URLS: [&str; 7] = [
    // RFC 3986, Go's queries, `jq` and `curl`.
    "-_.~",
    // Python.
    "-_.~/",
    // JavaScript's components of addresses.
    "-_.~!'()*",
    // Go's paths, and its logins.
    "-_.~$&+=:@",
    "-_.~$&+,;=",
    // Lenient writers of paths, and JavaScript's whole addresses.
    "-_.~!'()*$&+,;=:@/",
    "-_.~!'()*$&+,;=:@/?#",
];
/// The same in HTML forms, where a space is `+`: Go and Terraform, PHP, browsers and Java.
const KEPT_IN_FORMS: [&str; 3] = ["-_.~", "-_.", "-_.*"];

/// So many documents in one another are looked into.
const JSON_DEPTH: usize = 3;

const UPPER_HEX: &[u8; 16] = b"0123456789ABCDEF";
const LOWER_HEX: &[u8; 16] = b"0123456789abcdef";

/// What to look for.
#[derive(Clone, Debug, Default)]
pub(super) struct Forms {
    /// Texts that must be masked. None of them contains a newline, so that masking works on single lines.
    pub(super) whole: BTreeSet<String>,
    /// Those among them that are part of a longer text as it is, and are broken with it where that has too long
    /// lines.
    pub(super) wrapped: BTreeSet<String>,
    /// Texts that must be masked with whatever characters of them escaped.
    pub(super) lenient: BTreeSet<Lenient>,
    /// Texts that must be masked where the end of a line is beside them.
    pub(super) folded: BTreeSet<Folded>,
}

impl Forms {
    /// Adds every text that must be masked because of `secret`.
    pub(super) fn add(&mut self, secret: &str) {
        let secret = secret.trim();
        if secret.len() < MIN_SECRET_BYTES {
            return;
        }
        self.add_text(secret);
        // As Terraform has all texts.
        if let Cow::Owned(composed) = ComposingNormalizerBorrowed::new_nfc().normalize(secret) {
            self.add_text(&composed);
        }
    }

    fn add_text(&mut self, secret: &str) {
        if secret.len() <= PIECE_BYTES {
            self.add_common(secret);
            self.add_rare(secret);
            return;
        }
        let mut rest = secret;
        while rest.len() > PIECE_BYTES {
            let (piece, after) = rest.split_at(floor_char_boundary(rest, PIECE_BYTES));
            self.add_common(piece);
            rest = after;
        }
        // The last piece is taken from the end, so that it is never too short to be masked.
        let tail = ceil_char_boundary(secret, secret.len() - PIECE_BYTES);
        self.add_common(&secret[tail..]);
    }

    /// As it is, in JSON, and in base64: what secrets of any size are printed as.
    fn add_common(&mut self, secret: &str) {
        self.add_lines(secret);
        self.add_lenient(secret);
        for json in json_forms(secret) {
            self.add_lines(&json);
        }
        self.add_base64(secret.as_bytes());
    }

    fn add_rare(&mut self, secret: &str) {
        if !lines(secret).chain([secret]).all(Lenient::finds) {
            self.add_escaped(secret);
        }
        for hex in [UPPER_HEX, LOWER_HEX] {
            self.add_encoded(hex_encoded(secret, hex));
        }
        self.add_echoed(secret);
        self.folded.extend(lines(secret).flat_map(Folded::parts));
        if secret.len() <= NESTED_BYTES {
            for json in json_forms(secret) {
                self.add_base64(json.as_bytes());
            }
        }
        // In base64 of a document that holds a login in base64, as a Docker configuration does. No key is part of one.
        let leads = if secret.contains('\n') { 0..0 } else { 0..3 };
        for lead in leads {
            let inner = embedded_base64(&STANDARD_NO_PAD, lead, secret.as_bytes());
            if inner.len() >= 2 * MIN_SECRET_BYTES {
                self.add_embedded_base64(inner.as_bytes());
            }
        }
    }

    /// As it is escaped in most places, for a secret of which no part is left alone wherever it is escaped.
    fn add_escaped(&mut self, secret: &str) {
        self.add_lines(&hcl_escaped(secret));
        for hex in [UPPER_HEX, LOWER_HEX] {
            for kept in KEPT_IN_URLS {
                self.add_lines(&url_encoded(secret, kept, hex));
            }
            for kept in KEPT_IN_FORMS {
                self.add_lines(&url_encoded(secret, kept, hex).replace("%20", "+"));
            }
        }
        for quoted in shell_forms(secret) {
            self.add_lines(&quoted);
        }
        if secret.len() <= NESTED_BYTES {
            for json in json_forms(secret) {
                for quoted in shell_forms(&json) {
                    self.add_lines(&quoted);
                }
            }
        }
    }

    /// As shells print it that take backslashes for escapes. Whoever shows that may leave out control characters, or end
    /// lines there.
    fn add_echoed(&mut self, secret: &str) {
        for printed in SHELLS.map(|shell| shell.prints(secret)) {
            if printed == secret || printed.len() < MIN_SECRET_BYTES {
                continue;
            }
            self.add_common(&printed);
            let is_lost = |c: char| c.is_control() || c == char::REPLACEMENT_CHARACTER;
            for piece in printed.split(is_lost) {
                if piece.len() >= MIN_LINE_BYTES {
                    self.add_common(piece);
                }
            }
        }
    }

    /// The text if it has one line, and otherwise its lines.
    fn add_lines(&mut self, text: &str) {
        if !text.contains('\n') {
            self.whole.insert(text.to_owned());
        }
        if text.contains(ends_line) {
            self.whole.extend(lines(text).map(str::to_owned));
        }
    }

    /// The whole, which takes one line where the ends of its lines are escaped, and each line.
    fn add_lenient(&mut self, secret: &str) {
        let texts = lines(secret).chain([secret]);
        self.lenient.extend(texts.filter_map(Lenient::new));
    }

    fn add_base64(&mut self, secret: &[u8]) {
        for engine in [&STANDARD, &URL_SAFE] {
            self.whole.insert(engine.encode(secret));
        }
        self.add_embedded_base64(secret);
    }

    /// Wherever it stands in a longer text. At the beginning, this is also what is encoded without padding.
    fn add_embedded_base64(&mut self, secret: &[u8]) {
        for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
            self.whole.insert(engine.encode(secret));
            for lead in 0..3 {
                self.add_encoded(embedded_base64(engine, lead, secret));
            }
        }
    }

    fn add_encoded(&mut self, text: String) {
        if text.len() >= MIN_SECRET_BYTES {
            self.wrapped.insert(text.clone());
            self.whole.insert(text);
        }
    }
}

/// For somebody a line ends here.
fn ends_line(c: char) -> bool {
    matches!(c, '\n'..='\r' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// The lines worth masking, without indentation, for tools print values of several lines indented.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    let lines = text.split(ends_line).map(str::trim);
    lines.filter(|line| line.len() >= MIN_LINE_BYTES)
}

/// The inside of a string in JSON, as different writers have it, and of strings in documents in strings, as in a plan
/// that shows the result of `jsonencode`.
fn json_forms(text: &str) -> BTreeSet<String> {
    let mut forms = BTreeSet::new();
    let mut inner = BTreeSet::from([text.to_owned()]);
    for _ in 0..JSON_DEPTH {
        let mut outer = BTreeSet::new();
        for text in &inner {
            let json = json_escaped(text);
            outer.insert(json_html_safe(&json));
            outer.insert(json_ascii(&json));
            outer.insert(json);
        }
        forms.extend(outer.iter().cloned());
        inner = outer;
    }
    let json = json_escaped(text);
    // PHP.
    forms.insert(json.replace('/', r"\/"));
    forms.insert(json_cautious(text, LOWER_HEX));
    forms.insert(json_cautious(text, UPPER_HEX));
    forms
}

/// What shells print that they can read again, and what people write with quotes.
fn shell_forms(text: &str) -> Vec<String> {
    let ansi = escaped(text, |c| matches!(c, '\'' | '\\'))
        .replace('\n', r"\n")
        .replace('\t', r"\t")
        .replace('\r', r"\r");
    vec![
        text.replace('\'', r"'\''"),
        text.replace('\'', r#"'"'"'"#),
        // YAML and PowerShell; tables.
        text.replace('\'', "''"),
        text.replace('"', r#""""#),
        escaped(text, |c| matches!(c, '"' | '\\' | '$' | '`')),
        // `printf %q`
        escaped(text, |c| {
            c.is_ascii() && !c.is_ascii_alphanumeric() && !"-_./:=@%+\n".contains(c)
        }),
        // `$'…'`, as it is where the locale is UTF-8, and where it is not.
        octal_escaped(&ansi),
        ansi,
    ]
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

/// What .NET and Gson write: no character that means something to anybody.
fn json_cautious(text: &str, hex: &[u8; 16]) -> String {
    let mut cautious = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => cautious.push_str(r"\\"),
            '\n' => cautious.push_str(r"\n"),
            '\r' => cautious.push_str(r"\r"),
            '\t' => cautious.push_str(r"\t"),
            c if c.is_ascii_graphic() && !"\"'&<>+`=".contains(c) || c == ' ' => cautious.push(c),
            c => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    cautious.push_str(r"\u");
                    for byte in unit.to_be_bytes() {
                        cautious.extend(hex_digits(byte, hex));
                    }
                }
            }
        }
    }
    cautious
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
            encoded.extend(hex_digits(byte, hex));
        }
    }
    encoded
}

fn hex_encoded(text: &str, hex: &[u8; 16]) -> String {
    text.bytes()
        .flat_map(|byte| hex_digits(byte, hex))
        .collect()
}

fn hex_digits(byte: u8, hex: &[u8; 16]) -> [char; 2] {
    [byte >> 4, byte & 15].map(|digit| char::from(hex[usize::from(digit)]))
}

/// Bytes that are no ASCII as a shell names them.
fn octal_escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii() {
            escaped.push(char::from(byte));
        } else {
            let _ = write!(escaped, r"\{byte:03o}");
        }
    }
    escaped
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
