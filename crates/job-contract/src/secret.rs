//! Decodes the platform's secret.

use base64::Engine as _;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};

/// The shortest key for HS256. The platform refuses to sign its own tokens with a shorter one.
const MIN_BYTES: usize = 32;

/// Accepts the same texts as the platform's decoder. Java ignores the last character's bits that belong to no byte, and does
/// not require padding.
pub const AS_JAVA: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const BASE64_AS_JAVA: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, AS_JAVA);

/// Why a text is no secret. Never quotes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    #[error("is not base64")]
    NotBase64,
    /// The secret is so short that an attacker could guess it.
    #[error("holds {found} bytes, at least {MIN_BYTES} are needed")]
    TooShort { found: usize },
}

/// The bytes of a secret. The text is base64 in the URL-safe or the standard alphabet, with or without padding: the platform
/// reads the URL-safe one, but its chart writes the standard one.
pub fn decode(text: &str) -> Result<Vec<u8>, SecretError> {
    let url_safe = text
        .trim()
        .trim_end_matches('=')
        .replace('+', "-")
        .replace('/', "_");
    let secret = BASE64_AS_JAVA
        .decode(url_safe)
        .map_err(|_| SecretError::NotBase64)?;
    if secret.len() < MIN_BYTES {
        return Err(SecretError::TooShort {
            found: secret.len(),
        });
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::standard("+/+/", "")]
    #[case::url_safe("-_-_", "")]
    #[case::padded("+/+/", "+w==")]
    #[case::not_padded("-_-_", "-w")]
    #[case::bits_that_belong_to_no_byte("+/+/", "+/==")]
    #[case::with_a_line_break("-_-_", "-w\n")]
    fn a_secret_is_read_however_it_is_written(#[case] text: &str, #[case] end: &str) {
        let mut bytes = [0xfb, 0xff, 0xbf].repeat(12);
        bytes.extend((!end.is_empty()).then_some(0xfb));
        assert_eq!(decode(&format!("{}{end}", text.repeat(12))), Ok(bytes));
    }

    #[rstest]
    #[case("not base64!", SecretError::NotBase64)]
    #[case("c2hvcnQ", SecretError::TooShort { found: 5 })]
    fn an_unusable_secret_is_refused_without_being_quoted(
        #[case] secret: &str,
        #[case] error: SecretError,
    ) {
        assert_eq!(decode(secret), Err(error));
        assert!(!error.to_string().contains(secret));
    }
}
