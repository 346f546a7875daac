//! Text in Terraform's own language.

use std::fmt::Write as _;

/// Whether this can be the name of a variable.
pub(super) fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    chars
        .next()
        .is_some_and(|first| first.is_alphabetic() || first == '_')
        && chars.all(|c| c.is_alphanumeric() || c == '_' || c == '-')
}

/// Returns a quoted template with exactly the value `text`.
pub(super) fn quote(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\r' => quoted.push_str("\\r"),
            '\t' => quoted.push_str("\\t"),
            // `${` and `%{` begin an expression.
            '$' | '%' if chars.peek() == Some(&'{') => quoted.extend([c, c]),
            c if c.is_control() => {
                write!(quoted, "\\u{:04x}", u32::from(c)).expect("writing to a string cannot fail");
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use hcl_edit::expr::Expression;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn values_cannot_end_their_quotes() {
        assert_eq!(
            quote("a\"b\\c\n\t\u{7f}${x}%{y}$$ %"),
            "\"a\\\"b\\\\c\\n\\t\\u007f$${x}%%{y}$$ %\""
        );
    }

    proptest! {
        #[test]
        fn quoting_is_undone_by_the_parser(text in "(?s).{0,40}") {
            let expression: Expression = quote(&text).parse().unwrap();
            let read = match &expression {
                Expression::String(text) => text.as_str().to_owned(),
                Expression::StringTemplate(template) => template.iter().map(|element| match element {
                    hcl_edit::template::Element::Literal(literal) => literal.to_string(),
                    other => panic!("an interpolation appeared: {other:?}"),
                }).collect(),
                other => panic!("not a string: {other:?}"),
            };
            prop_assert_eq!(read, text);
        }
    }
}
