//! Kubernetes quantities. All spellings of a number have the value that plain arithmetic gives.

#![no_main]

use libfuzzer_sys::fuzz_target;
use manifest::quantity::Amount;

fuzz_target!(|text: &str| {
    let Ok(amount) = Amount::parse(text) else {
        return;
    };
    assert_eq!(amount.text(), text.trim());
    assert_eq!(Amount::parse(amount.text()).as_ref(), Ok(&amount));
    assert_eq!(amount.to_quantity().0, amount.text());
    assert!(amount >= Amount::parse("0").expect("a quantity"));

    let value = approximate(amount.text());
    // Outside these bounds, nine decimal places or the digits of a double are too few for a comparison.
    if (1e-3..1e15).contains(&value) {
        let near = |factor: f64| {
            Amount::parse(&format!("{:.9}", value * factor)).expect("a number is a quantity")
        };
        assert!(
            near(1.0 - 1e-5) <= amount && amount <= near(1.0 + 1e-5),
            "{text} is {value}"
        );
    }
});

fn approximate(text: &str) -> f64 {
    const UNITS: [(&str, f64); 15] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("Pi", 1_125_899_906_842_624.0),
        ("Ei", 1_152_921_504_606_846_976.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
        ("P", 1e15),
        ("E", 1e18),
    ];
    let (number, factor) = UNITS
        .iter()
        .find_map(|(unit, factor)| Some((text.strip_suffix(unit)?, *factor)))
        .unwrap_or((text, 1.0));
    number.parse::<f64>().expect("what is left is a number") * factor
}
