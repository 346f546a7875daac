//! Numbers in bytes that need not be text. Pure.

/// How many digits stand at the beginning, at most so many being looked at.
pub(super) fn digits(text: &[u8], radix: u32, most: usize) -> usize {
    let is_digit = |byte: &&u8| char::from(**byte).is_digit(radix);
    text.iter().take(most).take_while(is_digit).count()
}

/// The number at the beginning, of at least and at most so many digits; `None` if it is none, or too large.
pub(super) fn number(text: &[u8], radix: u32, least: usize, most: usize) -> Option<u32> {
    let length = digits(text, radix, most);
    if length < least {
        return None;
    }
    text[..length].iter().try_fold(0_u32, |value, byte| {
        value
            .checked_mul(radix)?
            .checked_add(char::from(*byte).to_digit(radix)?)
    })
}
