//! Finds what a misspelt name may have meant.

/// Names that differ by more are not a slip.
const MAX_DISTANCE: usize = 3;

/// Returns the known name that is nearest to a misspelt one, if one is near.
pub fn nearest<'k>(name: &str, known: &[&'k str]) -> Option<&'k str> {
    known
        .iter()
        .map(|known| (strsim::damerau_levenshtein(name, known), *known))
        .filter(|(distance, _)| *distance <= MAX_DISTANCE)
        .min()
        .map(|(_, known)| known)
}
