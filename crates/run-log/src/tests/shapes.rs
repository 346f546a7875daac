//! Property tests: no secret appears in the output, for any secret, encoding, surrounding text and split into pieces. Other
//! code than the code under test makes the encodings.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::super::lines::LineBuffer;
use super::*;

const RFC_3986: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// The output for a text that is written in these pieces.
fn written(secret: &str, text: &str, cuts: &[usize], max_line_bytes: usize) -> String {
    let redactor = Redactor::new([secret]);
    let (mut lines, mut out) = (LineBuffer::new(max_line_bytes), Vec::new());
    let mut rest = text.as_bytes();
    for cut in cuts.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (piece, after) = rest.split_at(rest.len().min(*cut));
        lines.push(piece, &redactor, &mut out);
        rest = after;
    }
    lines.close(&redactor, &mut out);
    String::from_utf8(out).unwrap()
}

fn lower_hex(encoded: &str) -> String {
    let mut parts = encoded.split('%');
    let mut lower = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (code, rest) = part.split_at(2);
        lower.extend(["%", &code.to_lowercase(), rest]);
    }
    lower
}

fn inside(document: &Value) -> String {
    let text = document.to_string();
    text[1..text.len() - 1].to_owned()
}

fn ascii(json: &str) -> String {
    let units = json.chars().map(|c| {
        if c.is_ascii() {
            c.to_string()
        } else {
            format!("\\u{:04x}", u32::from(c))
        }
    });
    units.collect()
}

/// Encodings of the secret that take one line and depend only on the secret.
fn shapes(secret: &str) -> Vec<(&'static str, String)> {
    let percent = utf8_percent_encode(secret, RFC_3986).to_string();
    let mut address = url::Url::parse("http://x.example.test").unwrap();
    address.query_pairs_mut().append_pair("s", secret);
    let form = address.query().unwrap()["s=".len()..].to_owned();
    let hex = |upper: bool| -> String {
        let digits = secret.bytes().map(|byte| format!("{byte:02x}"));
        let digits: String = digits.collect();
        if upper { digits.to_uppercase() } else { digits }
    };
    let json = inside(&json!(secret));
    let for_html = |text: &str| {
        text.replace('&', r"\u0026")
            .replace('<', r"\u003c")
            .replace('>', r"\u003e")
    };
    let double_quoted: String = secret
        .chars()
        .flat_map(|c| {
            let special = "\"\\$`".contains(c);
            special.then_some('\\').into_iter().chain([c])
        })
        .collect();
    vec![
        ("as it is", secret.to_owned()),
        ("percent-encoded", percent.clone()),
        ("percent-encoded in lower case", lower_hex(&percent)),
        ("in a form", form),
        ("in a form, by RFC 3986", percent.replace("%20", "+")),
        ("in lower hexadecimal", hex(false)),
        ("in upper hexadecimal", hex(true)),
        ("in JSON", json.clone()),
        ("in JSON safe in HTML", for_html(&json)),
        ("in JSON in JSON", inside(&json!(json))),
        (
            "in JSON of Terraform in HCL",
            inside(&json!(for_html(&json)))
                .replace("${", "$${")
                .replace("%{", "%%{"),
        ),
        ("in JSON of ASCII", ascii(&json)),
        ("in HCL", json.replace("${", "$${").replace("%{", "%%{")),
        ("in single quotes", secret.replace('\'', r"'\''")),
        (
            "in single quotes of Python",
            secret.replace('\'', r#"'"'"'"#),
        ),
        ("in double quotes", double_quoted),
        ("in base64", STANDARD.encode(secret)),
        ("in base64 without padding", STANDARD_NO_PAD.encode(secret)),
        ("in base64 of addresses", URL_SAFE.encode(secret)),
        (
            "in base64 of addresses without padding",
            URL_SAFE_NO_PAD.encode(secret),
        ),
    ]
}

/// All parts of an encoded text that would reveal something.
fn parts(text: &str, length: usize) -> impl Iterator<Item = &str> {
    let starts = 0..(text.len() + 1).saturating_sub(length);
    starts.map(move |start| &text[start..start + length])
}

/// The part of an encoded text that encodes only the secret.
fn core(encoded: &str, before: usize, secret: usize) -> &str {
    &encoded[(before * 8).div_ceil(6)..(before + secret) * 8 / 6]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_shape_of_a_secret_is_printed_however_it_is_written(
        secret in "[!-~\u{e4}\u{20ac}][ -~\u{e4}\u{20ac}]{6,40}[!-~]",
        which in any::<prop::sample::Index>(),
        around in proptest::collection::vec("[\u{3b1}-\u{3c9} ]{0,30}", 2..5),
        newlines in any::<bool>(),
        cuts in proptest::collection::vec(1usize..40, 1..20),
        max_line_bytes in 400usize..2000,
    ) {
        let shapes = shapes(&secret);
        let (name, shape) = which.get(&shapes);
        let glue = if newlines { format!("{shape}\n") } else { shape.clone() };
        let out = written(&secret, &around.join(&glue), &cuts, max_line_bytes);
        prop_assert!(!out.contains(shape), "{name}: {out}");
        prop_assert_eq!(
            out.replace(MASK, "").replace('\n', ""),
            around.concat(),
            "{}", name
        );
    }

    #[test]
    fn a_secret_in_encoded_text_is_not_printed_wherever_its_lines_are_broken(
        secret in "[!-~][ -~]{8,250}[!-~]",
        before in proptest::collection::vec(any::<u8>(), 0..100),
        after in proptest::collection::vec(any::<u8>(), 0..60),
        engine in select(vec![&STANDARD, &STANDARD_NO_PAD, &URL_SAFE, &URL_SAFE_NO_PAD]),
        width in select(vec![60usize, 64, 72, 76, usize::MAX]),
        prefix in select(vec!["", "  ", "\u{2502}   ", "+ key: "]),
        cuts in proptest::collection::vec(1usize..90, 1..20),
    ) {
        let plain = [before.as_slice(), secret.as_bytes(), after.as_slice()].concat();
        let encoded = engine.encode(&plain);
        let lines = encoded.as_bytes().chunks(width).map(|line| std::str::from_utf8(line).unwrap());
        let text: String = lines.flat_map(|line| [prefix, line, "\n"]).collect();
        let out = written(&secret, &text, &cuts, 1024);
        // Five bytes of the secret may stay at the end of a line, and five at the beginning of the next.
        let told = parts(core(&encoded, before.len(), secret.len()), 8).find(|part| out.contains(*part));
        prop_assert_eq!(told, None, "{}", out);
    }

    /// Also if a part is shorter than the shortest part that is masked before the rest is known.
    #[test]
    fn a_secret_in_encoded_text_is_not_printed_in_lines_of_any_width(
        secret in "[!-~][ -~]{8,250}[!-~]",
        hexadecimal in any::<bool>(),
        width in 1usize..40,
        cuts in proptest::collection::vec(1usize..90, 1..20),
    ) {
        let shapes = shapes(&secret);
        let name = if hexadecimal { "in lower hexadecimal" } else { "in base64" };
        let (_, encoded) = shapes.iter().find(|(known, _)| *known == name).unwrap();
        let lines = encoded.as_bytes().chunks(width).map(|line| std::str::from_utf8(line).unwrap());
        let text: String = lines.flat_map(|line| [line, "\n"]).collect();
        let out = written(&secret, &text, &cuts, 1024);
        let left: String = out.split(['\n', '*']).collect();
        prop_assert!(left.len() < 8, "{}", out);
        prop_assert!(encoded.starts_with(&left), "{}", out);
    }

    #[test]
    fn no_line_of_a_key_is_printed_whatever_precedes_it(
        lines in proptest::collection::vec("[A-Za-z0-9+/]{24,64}", 2..8),
        ending in select(vec!["\n", "\r\n"]),
        prefix in select(vec!["", "    ", "\u{2502}   ", "\u{2577} ", "  + ", "> "]),
        cuts in proptest::collection::vec(1usize..90, 1..20),
    ) {
        let key = format!(
            "-----BEGIN PRIVATE KEY-----{ending}{}{ending}-----END PRIVATE KEY-----{ending}",
            lines.join(ending)
        );
        let shown: String = key.lines().flat_map(|line| [prefix, line, ending]).collect();
        let out = written(&key, &shown, &cuts, 1024);
        for line in &lines {
            prop_assert!(!out.contains(line), "{out}");
        }
    }
}
