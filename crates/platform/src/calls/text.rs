//! Texts that must fit in columns and fields.

/// Cuts a text to the width of a column.
pub(crate) fn fitting(text: &str, width: usize) -> &str {
    text.char_indices()
        .nth(width)
        .map_or(text, |(end, _)| &text[..end])
}

/// Whether a text fits in a column.
pub(crate) fn fits(text: &str, width: usize) -> bool {
    text.chars().nth(width).is_none()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_to_their_columns_between_characters() {
        assert_eq!(fitting("äöü", 2), "äö");
        assert_eq!(fitting("äöü", 3), "äöü");
        assert!(fits("äöü", 3) && !fits("äöü", 2));
    }
}
