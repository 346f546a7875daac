//! The words of `JAVA_TOOL_OPTIONS`, in which Terrakube installations keep settings.

/// Splits as the virtual machine does: at white space outside quotes, which are dropped; no escapes.
pub fn words(options: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in options.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => word.get_or_insert_default().push(c),
            None if c == '"' || c == '\'' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c.is_whitespace() => words.extend(word.take()),
            None => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_keep_white_space_and_are_dropped() {
        assert_eq!(
            words(" -Da=b  '-Dc=d e'\t\"f\"g '' "),
            ["-Da=b", "-Dc=d e", "fg", ""]
        );
    }
}
