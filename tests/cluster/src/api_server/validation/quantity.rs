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

/// Powers of ten by suffix.
const DECIMAL: [(&str, i32); 10] = [
    ("n", -9),
    ("u", -6),
    ("m", -3),
    ("", 0),
    ("k", 3),
    ("M", 6),
    ("G", 9),
    ("T", 12),
    ("P", 15),
    ("E", 18),
];
/// Powers of 1024, from the first on.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];

/// A quantity as servers write it: a whole number with the largest suffix of its kind, `1Gi` for `1024Mi`. What is no
/// quantity, or too large for here, stays as it is.
pub(crate) fn canonical(text: &str) -> String {
    rewritten(text).unwrap_or_else(|| text.to_owned())
}

fn rewritten(text: &str) -> Option<String> {
    parse(text)?;
    let digits = text
        .find(|c: char| !(c.is_ascii_digit() || matches!(c, '.' | '+' | '-')))
        .unwrap_or(text.len());
    let (number, suffix) = text.split_at(digits);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let mantissa: i128 = format!("{whole}{fraction}").parse().ok()?;
    let scale = i32::try_from(fraction.len()).ok()?;
    if let Some(power) = BINARY.iter().position(|known| *known == suffix) {
        let factor = 1024_i128.checked_pow(u32::try_from(power).ok()? + 1)?;
        let value = over(mantissa.checked_mul(factor)?, scale)?;
        if value.abs() >= 1024 {
            return Some(in_binary(value));
        }
        return Some(in_decimal(value.checked_mul(1_000_000_000)?, ""));
    }
    let (power, mark) = match suffix
        .strip_prefix(['e', 'E'])
        .filter(|rest| !rest.is_empty())
    {
        Some(exponent) => (exponent.parse().ok()?, "e"),
        None => (DECIMAL.iter().find(|(known, _)| *known == suffix)?.1, ""),
    };
    // In billionths, of which less is not kept.
    let nano = over(mantissa, scale - power - 9)?;
    Some(in_decimal(nano, mark))
}

/// Divided by a power of ten, away from zero.
fn over(value: i128, power: i32) -> Option<i128> {
    let factor = 10_i128.checked_pow(power.unsigned_abs())?;
    if power <= 0 {
        return value.checked_mul(factor);
    }
    let rest = value % factor;
    Some(value / factor + rest.signum())
}

fn in_binary(mut value: i128) -> String {
    let mut suffix = "";
    for next in BINARY {
        if value % 1024 != 0 {
            break;
        }
        value /= 1024;
        suffix = next;
    }
    format!("{value}{suffix}")
}

fn in_decimal(mut nano: i128, mark: &str) -> String {
    let mut at = 0;
    while nano % 1000 == 0 && nano != 0 && at + 1 < DECIMAL.len() {
        nano /= 1000;
        at += 1;
    }
    let (suffix, power) = DECIMAL[at];
    match (nano, mark) {
        (0, _) => "0".to_owned(),
        (_, "e") if power != 0 => format!("{nano}e{power}"),
        _ => format!("{nano}{suffix}"),
    }
}

#[cfg(test)]
mod tests {
    use super::{canonical, parse};

    #[test]
    fn a_quantity_is_written_with_its_largest_suffix() {
        for (given, written) in [
            ("1024Mi", "1Gi"),
            ("1.5Gi", "1536Mi"),
            ("512", "512"),
            ("1024", "1024"),
            ("0.5", "500m"),
            ("1000m", "1"),
            ("1500M", "1500M"),
            ("2000M", "2G"),
            ("2e3", "2e3"),
            ("0.1Ki", "103"),
            ("0Gi", "0"),
            ("none", "none"),
        ] {
            assert_eq!(canonical(given), written, "{given}");
        }
    }

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
