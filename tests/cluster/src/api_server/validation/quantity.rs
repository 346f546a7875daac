//! Quantities such as `500m`, `1.5Gi` and `1e3`.

/// The value of a quantity, or nothing where it is none.
pub(crate) fn parse(text: &str) -> Option<f64> {
    let digits = text
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-')))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    if !number.bytes().any(|byte| byte.is_ascii_digit()) || number.matches('.').count() > 1 {
        return None;
    }
    let number: f64 = number.parse().ok()?;
    let factor = match suffix {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024.0 * 1024.0,
        "Gi" => 1024.0 * 1024.0 * 1024.0,
        "Ti" => 1024.0_f64.powi(4),
        "Pi" => 1024.0_f64.powi(5),
        "Ei" => 1024.0_f64.powi(6),
        exponent if exponent.starts_with(['e', 'E']) => 10.0_f64.powi(exponent[1..].parse().ok()?),
        _ => return None,
    };
    Some(number * factor)
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn quantities_have_decimal_binary_and_exponent_suffixes() {
        assert_eq!(parse("500m"), Some(0.5));
        assert_eq!(parse("1.5Gi"), Some(1.5 * 1024.0 * 1024.0 * 1024.0));
        assert_eq!(parse("2e3"), Some(2000.0));
        for wrong in ["", "Gi", "1GB", "1 Gi", "abc", "1.2.3", "--1"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
