//! Parses Kubernetes quantities by the grammar of `resource.Quantity`. The parser is strict: a message here names the
//! variable, but a message of the API server would not.

use std::cmp::Ordering;
use std::fmt;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// A quantity: its text, and its value in billionths. Kubernetes knows nothing finer.
#[derive(Clone)]
pub struct Amount {
    text: String,
    nano: i128,
}

/// 16 MiB, in billionths of a byte.
const SMALLEST_LIMIT: i128 = 16 * 1024 * 1024 * 1_000_000_000;
/// The error for a smaller limit on memory or storage, as a phrase that follows the amount.
pub const SLIP: &str = "and must be at least `16Mi`: a number without a unit counts bytes, and `Mi` or `Gi` may be missing";

const UNKNOWN_UNIT: &str = "has an unknown unit: use none, `m`, `k`, `M`, `G`, `T`, `P`, `E`, or `Ki`, `Mi`, `Gi`, `Ti`, `Pi`, `Ei`";
/// It is larger than 2^63 - 1, the largest quantity of Kubernetes.
const TOO_LARGE: &str = "is too large";

/// The factor of a suffix: 2 to the first power times 10 to the second.
struct Scale {
    binary: u32,
    decimal: i32,
}

impl Amount {
    /// Parses a quantity that is not negative. White space around it is ignored. The error is a phrase that follows the quantity.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let text = text.trim();
        if text.is_empty() {
            return Err("is empty");
        }
        let negative = text.starts_with('-');
        let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
        let number_end = unsigned
            .find(|c: char| !c.is_ascii_digit() && c != '.')
            .unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(number_end);
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if fraction.contains('.') || (whole.is_empty() && fraction.is_empty()) {
            return Err("does not start with a number");
        }
        let nano = in_billionths(whole, fraction.trim_end_matches('0'), &scale(suffix)?)?;
        if negative && nano != 0 {
            return Err("is negative");
        }
        Ok(Self {
            text: text.to_owned(),
            nano,
        })
    }

    /// The original text, without white space around it.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether it is more than zero, but too small for a container. Usually the unit is missing.
    pub const fn is_a_slip(&self) -> bool {
        self.nano > 0 && self.nano < SMALLEST_LIMIT
    }

    /// The object Kubernetes takes.
    pub fn to_quantity(&self) -> Quantity {
        Quantity(self.text.clone())
    }
}

fn scale(suffix: &str) -> Result<Scale, &'static str> {
    let (binary, decimal) = match suffix {
        "n" => (0, -9),
        "u" => (0, -6),
        "m" => (0, -3),
        "" => (0, 0),
        "k" => (0, 3),
        "M" => (0, 6),
        "G" => (0, 9),
        "T" => (0, 12),
        "P" => (0, 15),
        "E" => (0, 18),
        "Ki" => (10, 0),
        "Mi" => (20, 0),
        "Gi" => (30, 0),
        "Ti" => (40, 0),
        "Pi" => (50, 0),
        "Ei" => (60, 0),
        _ => (0, exponent(suffix)?),
    };
    Ok(Scale { binary, decimal })
}

/// The number after `e` or `E`.
fn exponent(suffix: &str) -> Result<i32, &'static str> {
    let digits = suffix.strip_prefix(['e', 'E']).ok_or(UNKNOWN_UNIT)?;
    let unsigned = digits.strip_prefix(['+', '-']).unwrap_or(digits);
    if unsigned.is_empty() || !unsigned.bytes().all(|b| b.is_ascii_digit()) {
        return Err(UNKNOWN_UNIT);
    }
    // This is far larger than every quantity, and too small to overflow the sums below.
    digits
        .parse()
        .ok()
        .filter(|exponent: &i32| exponent.abs() <= 100)
        .ok_or(TOO_LARGE)
}

/// Rounds values below a billionth up, as Kubernetes does.
fn in_billionths(whole: &str, fraction: &str, scale: &Scale) -> Result<i128, &'static str> {
    const LARGEST: i128 = (i64::MAX as i128) * 1_000_000_000;
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Ok(0);
    }
    let value: i128 = digits.parse().map_err(|_| TOO_LARGE)?;
    let value = value.checked_mul(1 << scale.binary).ok_or(TOO_LARGE)?;
    let places = i32::try_from(fraction.len()).map_err(|_| TOO_LARGE)?;
    let power = 9 + scale.decimal - places;
    let factor = 10_i128.checked_pow(power.unsigned_abs());
    let nano = match (power >= 0, factor) {
        (true, Some(factor)) => value.checked_mul(factor).ok_or(TOO_LARGE)?,
        (true, None) => return Err(TOO_LARGE),
        (false, Some(factor)) => value / factor + i128::from(value % factor != 0),
        (false, None) => 1,
    };
    if nano > LARGEST {
        return Err(TOO_LARGE);
    }
    Ok(nano)
}

impl PartialEq for Amount {
    fn eq(&self, other: &Self) -> bool {
        self.nano == other.nano
    }
}

impl Eq for Amount {}

impl PartialOrd for Amount {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Amount {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nano.cmp(&other.nano)
    }
}

impl fmt::Debug for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Amount").field(&self.text).finish()
    }
}

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl<'de> serde::Deserialize<'de> for Amount {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Quantity::deserialize(deserializer)?.0;
        Self::parse(&text)
            .map_err(|error| serde::de::Error::custom(format!("quantity `{text}` {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn nano(text: &str) -> i128 {
        Amount::parse(text).unwrap().nano
    }

    #[rstest]
    #[case("1", 1_000_000_000)]
    #[case("+1", 1_000_000_000)]
    #[case(" 250m ", 250_000_000)]
    #[case("0.5", 500_000_000)]
    #[case(".5", 500_000_000)]
    #[case("1.", 1_000_000_000)]
    #[case("1.50", 1_500_000_000)]
    #[case("2Gi", 2_147_483_648_000_000_000)]
    #[case("1e3", 1_000_000_000_000)]
    #[case("1E-3", 1_000_000)]
    #[case("1E", 1_000_000_000_000_000_000_000_000_000)]
    #[case("5n", 5)]
    #[case("0.1n", 1)]
    #[case("1e-100", 1)]
    #[case("0", 0)]
    #[case("-0", 0)]
    #[case("0Ki", 0)]
    fn quantities_have_the_value_kubernetes_gives_them(#[case] text: &str, #[case] expected: i128) {
        assert_eq!(nano(text), expected, "{text}");
    }

    #[rstest]
    #[case("", "is empty")]
    #[case("  ", "is empty")]
    #[case(".", "does not start with a number")]
    #[case("Gi", "does not start with a number")]
    #[case("1.2.3", "does not start with a number")]
    #[case("one", "does not start with a number")]
    #[case("1 Gi", UNKNOWN_UNIT)]
    #[case("1K", UNKNOWN_UNIT)]
    #[case("1gb", UNKNOWN_UNIT)]
    #[case("1GiB", UNKNOWN_UNIT)]
    #[case("1e", UNKNOWN_UNIT)]
    #[case("1e+", UNKNOWN_UNIT)]
    #[case("1e1.5", UNKNOWN_UNIT)]
    #[case("1,5", UNKNOWN_UNIT)]
    #[case("-1", "is negative")]
    #[case("1e99", TOO_LARGE)]
    #[case("1e99999999999", TOO_LARGE)]
    #[case("16Ei", TOO_LARGE)]
    #[case("99999999999999999999999999999999999999999", TOO_LARGE)]
    fn anything_else_is_refused_with_the_reason(#[case] text: &str, #[case] expected: &str) {
        assert_eq!(Amount::parse(text).unwrap_err(), expected, "{text}");
    }

    proptest! {
        /// Held against the expression by which the API server reads quantities.
        #[test]
        fn what_is_read_is_what_kubernetes_reads(
            text in prop_oneof![
                "\\PC{0,24}",
                "[-+]{0,2}[0-9.]{0,45}[eEinumkKMGTP]{0,3}[-+]?[0-9]{0,12}",
                "[-+]?[0-9]{1,3}[.]?[0-9]{0,3}([numkMGTPE]|[KMGTPE]i|[eE][-+]?[0-9]{1,2})?",
            ],
        ) {
            let grammar = regex::Regex::new(
                r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?$",
            ).unwrap();
            let read = Amount::parse(&text);
            let is_quantity = match &read {
                Ok(_) | Err("is negative" | TOO_LARGE) => true,
                Err(_) => false,
            };
            prop_assert_eq!(is_quantity, grammar.is_match(text.trim()), "{:?}: {:?}", text, read);
            if let Ok(amount) = read {
                prop_assert_eq!(amount.text(), text.trim());
                prop_assert!(amount.nano >= 0);
                prop_assert_eq!(Amount::parse(amount.text()), Ok(amount));
            }
        }

        #[test]
        fn values_agree_with_plain_arithmetic(
            number in 0_i128..1_000_000,
            (unit, factor) in prop::sample::select(vec![
                ("n", 1_i128), ("u", 1_000), ("m", 1_000_000), ("", 1_000_000_000), ("k", 1_000_000_000_000),
                ("M", 1_000_000_000_000_000), ("Ki", 1_024_000_000_000), ("Mi", 1_048_576_000_000_000),
                ("e3", 1_000_000_000_000), ("E-3", 1_000_000),
            ]),
        ) {
            prop_assert_eq!(nano(&format!("{number}{unit}")), number * factor);
        }

        #[test]
        fn order_is_the_order_of_values(a in 0_u32..1500, b in 0_u32..1000) {
            let amount = |text: String| Amount::parse(&text).unwrap();
            let (milli_a, milli_b) = (amount(format!("{a}m")), amount(format!("0.{b:03}")));
            prop_assert_eq!(milli_a.cmp(&milli_b), a.cmp(&b));
        }
    }
}
