//! A text with references: it is scanned once, from left to right, and secrets are inserted once. What a secret contains is
//! never scanned. Pure.

use std::fmt;

use serde_json::Value;

use crate::reference::{Reference, StoreKind};

/// The word of a store that references may name and that is not supported.
const UNSUPPORTED: &str = "oci";

/// Why a text that begins like a reference is none. It does not quote the text, which may be a pasted password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SyntaxError {
    pub store: &'static str,
    /// Where it begins, in bytes.
    pub offset: usize,
    pub problem: &'static str,
}

impl std::error::Error for SyntaxError {}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            store,
            offset,
            problem,
        } = self;
        write!(
            f,
            "the reference `${{{store}:…}}` at byte {offset} cannot be used: {problem}"
        )
    }
}

/// Why secrets cannot be inserted into a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EmbedError {
    #[error(
        "a secret cannot be inserted safely into this expression: use JSON, or put the reference alone in the variable"
    )]
    NotJson,
    #[error("in JSON, a reference must be inside of a string")]
    OutsideOfString,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    Secret(Reference),
}

/// A scanned text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    pieces: Vec<Piece>,
    /// Whether something has to be replaced.
    changes: bool,
}

/// An input of the tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Input {
    /// The text where the tool reads it as it is.
    pub literal: String,
    /// The text where the tool reads it as an expression, if it differs.
    pub expression: Option<String>,
}

impl Template {
    /// Scans a text. Anything that is no reference stays as it is.
    pub fn scan(text: &str) -> Result<Self, SyntaxError> {
        let mut pieces = Vec::new();
        let mut plain = String::new();
        let (mut at, mut changes) = (0, false);
        while let Some(found) = text[at..].find("${") {
            let start = at + found;
            let after = &text[start + 2..];
            let Some((store, kind)) = store_of(after) else {
                plain.push_str(&text[at..start + 2]);
                at = start + 2;
                continue;
            };
            changes = true;
            let body_at = start + 2 + store.len() + 1;
            if text[at..start].ends_with('$') {
                // `$${` means the text `${`.
                plain.push_str(&text[at..start - 1]);
                plain.push_str(&text[start..body_at]);
                at = body_at;
                continue;
            }
            let error = |problem| SyntaxError {
                store,
                offset: start,
                problem,
            };
            let kind = kind.ok_or_else(|| error("this store is not supported"))?;
            // The limit of a reference keeps the search short.
            let rest = &text[body_at..];
            let rest = &rest[..rest.floor_char_boundary(4096)];
            let length = rest.find('}').ok_or_else(|| error("its `}` is missing"))?;
            let reference = Reference::parse(kind, &rest[..length]).map_err(error)?;
            plain.push_str(&text[at..start]);
            if !plain.is_empty() {
                pieces.push(Piece::Text(std::mem::take(&mut plain)));
            }
            pieces.push(Piece::Secret(reference));
            at = body_at + length + 1;
        }
        plain.push_str(&text[at..]);
        if !plain.is_empty() {
            pieces.push(Piece::Text(plain));
        }
        Ok(Self { pieces, changes })
    }

    pub fn references(&self) -> impl Iterator<Item = &Reference> {
        self.pieces.iter().filter_map(|piece| match piece {
            Piece::Secret(reference) => Some(reference),
            Piece::Text(_) => None,
        })
    }

    /// Whether the text differs from what it was scanned from, once the secrets are inserted.
    pub const fn changes(&self) -> bool {
        self.changes
    }

    /// Whether the text has a reference.
    pub fn has_references(&self) -> bool {
        self.references().next().is_some()
    }

    /// Whether the text is a reference, or several of them, and nothing else but blanks.
    pub fn is_only_references(&self) -> bool {
        self.has_references()
            && self.pieces.iter().all(|piece| match piece {
                Piece::Text(text) => text.trim().is_empty(),
                Piece::Secret(_) => true,
            })
    }

    /// The text with the secrets as they are.
    pub fn render<'s>(&self, secret: impl Fn(&Reference) -> &'s str) -> String {
        self.filled(|reference| secret(reference).to_owned())
    }

    /// The text for an input variable. In JSON, secrets are escaped in place, and everything else stays as it is.
    pub fn render_input<'s>(
        &self,
        secret: impl Fn(&Reference) -> &'s str,
    ) -> Result<Input, EmbedError> {
        if !self.has_references() || self.is_only_references() {
            return Ok(Input {
                literal: self.render(secret),
                expression: None,
            });
        }
        let begin = match self.pieces.first() {
            Some(Piece::Text(text)) => text.trim_start(),
            _ => "",
        };
        let is_document = begin.starts_with(['{', '[']);
        if !is_document && !begin.starts_with("<<") && !begin.starts_with('"') {
            return Ok(Input {
                literal: self.render(secret),
                // No expression: the tool's variables of other types refuse it.
                expression: Some(String::new()),
            });
        }
        // A letter is JSON only inside of a string.
        if serde_json::from_str::<Value>(&self.filled(|_| "x".to_owned())).is_err() {
            // A number or a word in the place of a reference outside of strings may make it JSON.
            let with_number = self.filled(|_| "0".to_owned());
            return Err(if serde_json::from_str::<Value>(&with_number).is_ok() {
                EmbedError::OutsideOfString
            } else {
                EmbedError::NotJson
            });
        }
        let escaped = |reference: &Reference| {
            let quoted = Value::from(secret(reference)).to_string();
            quoted[1..quoted.len() - 1].to_owned()
        };
        let literal = if is_document {
            self.filled(escaped)
        } else {
            self.render(&secret)
        };
        let expression = self.filled(|reference| {
            let text = escaped(reference);
            text.replace("${", "$${").replace("%{", "%%{")
        });
        let expression = (expression != literal).then_some(expression);
        Ok(Input {
            literal,
            expression,
        })
    }

    /// The parts of a text with secrets that were references in this template. None if it is not such a text.
    pub fn secrets_in<'t>(&self, text: &'t str) -> Vec<&'t str> {
        let (mut rest, mut found, mut in_secret) = (text, Vec::new(), false);
        for (number, piece) in self.pieces.iter().enumerate() {
            let Piece::Text(plain) = piece else {
                in_secret = true;
                continue;
            };
            let is_last = number + 1 == self.pieces.len();
            let at = match (in_secret, is_last) {
                (false, _) => rest.starts_with(plain).then_some(0),
                (true, true) => rest.strip_suffix(plain).map(str::len),
                (true, false) => rest.find(plain),
            };
            let Some(at) = at else {
                return Vec::new();
            };
            if in_secret {
                found.push(&rest[..at]);
            }
            (rest, in_secret) = (&rest[at + plain.len()..], false);
        }
        if in_secret {
            found.push(rest);
        }
        found
    }

    fn filled(&self, secret: impl Fn(&Reference) -> String) -> String {
        let pieces = self.pieces.iter().map(|piece| match piece {
            Piece::Text(text) => text.clone(),
            Piece::Secret(reference) => secret(reference),
        });
        pieces.collect()
    }
}

/// The store whose word and colon the text begins with. `None` instead of its kind if it is not supported.
fn store_of(text: &str) -> Option<(&'static str, Option<StoreKind>)> {
    let begins = |word: &str| {
        text.strip_prefix(word)
            .is_some_and(|rest| rest.starts_with(':'))
    };
    let known = StoreKind::ALL
        .into_iter()
        .find(|kind| begins(kind.prefix()));
    match known {
        Some(kind) => Some((kind.prefix(), Some(kind))),
        None => begins(UNSUPPORTED).then_some((UNSUPPORTED, None)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn filled(text: &str) -> String {
        Template::scan(text).unwrap().render(|_| "S}${ssm:b}")
    }

    #[rstest]
    #[case("${HOME} ${var.x} ${foo:x} ${SSM:x} ${ssm} %{if} $${HOME} $$", None)]
    #[case("", None)]
    #[case("$${ssm:x}", Some("${ssm:x}"))]
    #[case("$$${ssm:x}", Some("$${ssm:x}"))]
    #[case("$${oci:x}", Some("${oci:x}"))]
    #[case("${ssm:x}", Some("S}${ssm:b}"))]
    #[case("a${ssm:x}b$${gcp:y}", Some("aS}${ssm:b}b${gcp:y}"))]
    #[case("${ssm:x}${vault:p.k}", Some("S}${ssm:b}S}${ssm:b}"))]
    #[case("${${ssm:x}}", Some("${S}${ssm:b}}"))]
    fn references_are_replaced_once_and_everything_else_stays(
        #[case] text: &str,
        #[case] expected: Option<&str>,
    ) {
        assert_eq!(filled(text), expected.unwrap_or(text));
        assert_eq!(Template::scan(text).unwrap().changes(), expected.is_some());
    }

    #[rstest]
    #[case("${ssm:x}", "s-1", &["s-1"])]
    #[case("a-${ssm:x}", "a-s-1", &["s-1"])]
    #[case("u:${ssm:x}@h/@h/", "u:s@h/1@h/@h/", &["s@h/1"])]
    #[case("${ssm:x}/${gcp:y}${gcp:z}/", "s-1/s-2s-3/", &["s-1", "s-2s-3"])]
    #[case("$${ssm:x}${ssm:x}", "${ssm:x}s", &["s"])]
    #[case("a-${ssm:x}", "b-s-1", &[])]
    #[case("no reference", "no reference", &[])]
    fn secrets_are_found_again_in_a_text(
        #[case] template: &str,
        #[case] text: &str,
        #[case] expected: &[&str],
    ) {
        assert_eq!(Template::scan(template).unwrap().secrets_in(text), expected);
    }

    #[rstest]
    #[case("a ${ssm:", 2, "its `}` is missing")]
    #[case("${ssm:}", 0, "the reference names no secret")]
    #[case("${oci:x}", 0, "this store is not supported")]
    #[case(
        "${ssm:hunter2 x}",
        0,
        "a reference has no blanks, no control characters and no `${`"
    )]
    fn what_begins_like_a_reference_is_an_error(
        #[case] text: &str,
        #[case] offset: usize,
        #[case] problem: &str,
    ) {
        let error = Template::scan(text).unwrap_err();
        assert_eq!((error.offset, error.problem), (offset, problem));
        assert!(!error.to_string().contains("hunter2"));
    }

    /// A scan that begins anew at each `$` takes half an hour at least, and the runner ends it.
    #[test]
    fn a_large_text_takes_linear_time() {
        let large = "${".repeat(2 << 20);
        assert!(!Template::scan(&large).unwrap().changes());
        let many = "${ssm:x}".repeat(100_000);
        assert_eq!(Template::scan(&many).unwrap().references().count(), 100_000);
    }

    #[rstest]
    #[case("${ssm:x}", "a\"${b}%{c}", None)]
    #[case("u:${ssm:x}@h", "u:a\"${b}%{c}@h", Some(""))]
    #[case(
        r#"{"p": "x${ssm:x}", "n":1}"#,
        r#"{"p": "xa\"${b}%{c}", "n":1}"#,
        Some(r#"{"p": "xa\"$${b}%%{c}", "n":1}"#)
    )]
    #[case(r#""${ssm:x}""#, r#""a"${b}%{c}""#, Some(r#""a\"$${b}%%{c}""#))]
    fn a_secret_in_an_input_is_escaped_as_the_tool_reads_it(
        #[case] text: &str,
        #[case] literal: &str,
        #[case] expression: Option<&str>,
    ) {
        let template = Template::scan(text).unwrap();
        let input = template.render_input(|_| "a\"${b}%{c}").unwrap();
        assert_eq!(input.literal, literal);
        assert_eq!(input.expression.as_deref(), expression);
    }

    #[rstest]
    #[case("[${ssm:x}]", EmbedError::OutsideOfString)]
    #[case("{ a = \"${ssm:x}\" }", EmbedError::NotJson)]
    #[case("<<E\n${ssm:x}\nE\n", EmbedError::NotJson)]
    fn a_secret_is_not_inserted_into_code(#[case] text: &str, #[case] expected: EmbedError) {
        let template = Template::scan(text).unwrap();
        assert_eq!(template.render_input(|_| "x"), Err(expected));
    }

    proptest! {
        #[test]
        fn a_text_without_the_words_of_stores_is_unchanged(text in "[${}:a-z%\n]{0,60}") {
            prop_assume!(!text.contains(':') || !["ssm:", "gcp:", "azure:", "vault:", "oci:"].iter().any(|w| text.contains(w)));
            prop_assert_eq!(filled(&text), text);
        }

        #[test]
        fn any_text_can_be_scanned(text in "(\\$|\\{|\\}|ssm:|vault:|a|\\.|é|\n){0,40}") {
            if let Ok(template) = Template::scan(&text) {
                prop_assert_eq!(template.changes(), template.render(|reference| &reference.text.clone().leak()[..]) != text || template.has_references());
            }
        }

        #[test]
        fn json_with_an_inserted_secret_is_json_and_holds_it(secret in "\\PC{0,20}|[\"\\\\\n${}%]{0,10}") {
            let template = Template::scan(r#"{"a":["x-${ssm:x}"]}"#).unwrap();
            let input = template.render_input(|_| &secret).unwrap();
            let value: Value = serde_json::from_str(&input.literal).unwrap();
            prop_assert_eq!(&value["a"][0], &Value::from(format!("x-{secret}")));
        }
    }
}
