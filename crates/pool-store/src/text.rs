//! Limits the lengths of texts and lists in requests.

use crate::error::Refusal;

/// The longest note in the history of a task, in bytes.
pub(crate) const NOTE: usize = 1000;
/// The longest text about the end of a task, in bytes.
pub(crate) const DIAGNOSTIC: usize = 8000;
/// The longest name, version or identifier, in bytes.
const IDENTIFIER: usize = 256;

/// Shortens a text for people.
pub(crate) fn cut(mut text: String, longest: usize) -> String {
    if text.len() > longest {
        let end = (0..=longest - '…'.len_utf8())
            .rev()
            .find(|&end| text.is_char_boundary(end));
        text.truncate(end.unwrap_or_default());
        text.push('…');
    }
    // PostgreSQL cannot store NUL.
    text.retain(|character| character != '\0');
    text
}

/// Refuses an identifier that is too long, or that contains NUL, which PostgreSQL cannot store.
pub(crate) fn identifier(what: &str, text: &str) -> Result<(), Refusal> {
    if text.len() > IDENTIFIER || text.contains('\0') {
        return Err(Refusal::RequestInvalid(format!(
            "{what} has {} bytes: at most {IDENTIFIER} are allowed, and no NUL",
            text.len()
        )));
    }
    Ok(())
}

/// Refuses a list that is too long.
pub(crate) fn limited(what: &str, length: usize, most: usize) -> Result<(), Refusal> {
    if length > most {
        return Err(Refusal::RequestInvalid(format!(
            "{what} has {length} entries: at most {most} are allowed"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_shortened_between_characters_and_have_no_nul() {
        assert_eq!(cut("short\0".to_owned(), 10), "short");
        let cut = cut("ü".repeat(600), NOTE);
        assert!(cut.len() <= NOTE && cut.ends_with("ü…"), "{}", cut.len());
    }

    #[test]
    fn long_identifiers_and_lists_are_refused() {
        assert_eq!(identifier("the job", &"a".repeat(256)), Ok(()));
        let refusal = identifier("the job", &"a".repeat(257)).unwrap_err();
        assert!(refusal.to_string().contains("the job has 257 bytes"));
        assert!(identifier("the job", "a\0").is_err());
        assert!(limited("`holding`", 3, 2).is_err());
    }
}
