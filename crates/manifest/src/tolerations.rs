//! Parses tolerations: `key[=value][:operator[:effect[:seconds]]]`, joined by `;` (contract 3.5). The parser is
//! lenient.
//!
//! An empty text never tolerates every taint. Only an explicit `:Exists` does.

use k8s_openapi::api::core::v1::Toleration;

use super::check;
use super::error::quote;

/// Parses a list, and returns an error for every wrong element, as a phrase that follows the name of the variable.
pub fn parse_tolerations(text: &str) -> Result<Vec<Toleration>, Vec<String>> {
    let mut tolerations = Vec::new();
    let mut errors = Vec::new();
    for element in text.split(';').map(str::trim).filter(|e| !e.is_empty()) {
        match parse_element(element) {
            Ok(toleration) if tolerations.contains(&toleration) => {}
            Ok(toleration) => tolerations.push(toleration),
            Err(rule) => errors.push(format!("has an element {} that {rule}", quote(element))),
        }
    }
    if errors.is_empty() {
        Ok(tolerations)
    } else {
        Err(errors)
    }
}

fn parse_element(element: &str) -> Result<Toleration, &'static str> {
    let fields: Vec<&str> = element.split(':').map(str::trim).collect();
    if fields.len() > 4 {
        return Err("has more than four fields (key, operator, effect, seconds)");
    }
    let field = |index: usize| fields.get(index).copied().filter(|f| !f.is_empty());
    let taint = fields.first().copied().unwrap_or_default();
    let (key, value) = match taint.split_once('=') {
        Some((key, value)) => (key.trim(), Some(value.trim())),
        None => (taint, None),
    };
    let operator = field(1).map(operator).transpose()?;
    match (key, operator) {
        ("", Some("Exists")) => {}
        ("", _) => return Err("names no taint"),
        (key, _) => {
            check::qualified_name(key).map_err(|_| "does not name a taint by a valid label key")?;
        }
    }
    let operator = operator.unwrap_or(if value.is_some() { "Equal" } else { "Exists" });
    let value = value.unwrap_or_default();
    if operator == "Exists" && !value.is_empty() {
        return Err("has a value, which the operator `Exists` does not take");
    }
    check::label_value(value).map_err(|_| "has a value that is no label value")?;
    let effect = field(2).map(effect).transpose()?;
    let seconds = field(3)
        .map(|seconds| {
            seconds
                .parse::<i64>()
                .ok()
                .filter(|seconds| *seconds >= 0)
                .ok_or("has seconds that are no whole number")
        })
        .transpose()?;
    if seconds.is_some() && effect != Some("NoExecute") {
        return Err("has seconds, which only the effect `NoExecute` takes");
    }
    Ok(Toleration {
        key: Some(key.to_owned()).filter(|key| !key.is_empty()),
        operator: Some(operator.to_owned()),
        value: (operator == "Equal").then(|| value.to_owned()),
        effect: effect.map(str::to_owned),
        toleration_seconds: seconds,
    })
}

fn operator(text: &str) -> Result<&'static str, &'static str> {
    one_of(text, &["Exists", "Equal"]).ok_or("has an operator other than `Exists` and `Equal`")
}

fn effect(text: &str) -> Result<&'static str, &'static str> {
    one_of(text, &["NoSchedule", "PreferNoSchedule", "NoExecute"])
        .ok_or("has an effect other than `NoSchedule`, `PreferNoSchedule` and `NoExecute`")
}

fn one_of(text: &str, known: &[&'static str]) -> Option<&'static str> {
    known
        .iter()
        .copied()
        .find(|name| name.eq_ignore_ascii_case(text))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rstest::rstest;

    fn toleration(
        key: &str,
        operator: &str,
        value: Option<&str>,
        effect: Option<&str>,
    ) -> Toleration {
        Toleration {
            key: Some(key.to_owned()),
            operator: Some(operator.to_owned()),
            value: value.map(str::to_owned),
            effect: effect.map(str::to_owned),
            toleration_seconds: None,
        }
    }

    #[rstest]
    #[case("dedicated", toleration("dedicated", "Exists", None, None))]
    #[case(
        "dedicated:Exists:NoSchedule",
        toleration("dedicated", "Exists", None, Some("NoSchedule"))
    )]
    #[case(
        "dedicated=terraform:Equal:NoSchedule",
        toleration("dedicated", "Equal", Some("terraform"), Some("NoSchedule"))
    )]
    #[case(
        "dedicated=terraform",
        toleration("dedicated", "Equal", Some("terraform"), None)
    )]
    #[case("dedicated=", toleration("dedicated", "Equal", Some(""), None))]
    #[case("dedicated=:Exists", toleration("dedicated", "Exists", None, None))]
    #[case(";dedicated", toleration("dedicated", "Exists", None, None))]
    #[case("dedicated;", toleration("dedicated", "Exists", None, None))]
    #[case("dedicated; dedicated", toleration("dedicated", "Exists", None, None))]
    #[case("key:exists", toleration("key", "Exists", None, None))]
    #[case(
        "key=v::noschedule",
        toleration("key", "Equal", Some("v"), Some("NoSchedule"))
    )]
    #[case(" key : Exists ", toleration("key", "Exists", None, None))]
    #[case(
        "example.com/k = v : EQUAL : preferNoSchedule",
        toleration("example.com/k", "Equal", Some("v"), Some("PreferNoSchedule"))
    )]
    fn every_form_of_the_contract_is_read(#[case] text: &str, #[case] expected: Toleration) {
        assert_eq!(parse_tolerations(text), Ok(vec![expected]), "{text}");
    }

    #[test]
    fn seconds_are_a_fourth_field() {
        let tolerations = parse_tolerations("spot:Exists:NoExecute:300").unwrap();
        assert_eq!(tolerations[0].toleration_seconds, Some(300));
    }

    #[rstest]
    #[case("")]
    #[case("   ")]
    #[case(";")]
    #[case(" ; ; ")]
    fn nothing_tolerates_nothing(#[case] text: &str) {
        assert_eq!(parse_tolerations(text), Ok(vec![]));
    }

    #[test]
    fn every_taint_is_tolerated_only_when_it_is_asked_for() {
        let tolerations = parse_tolerations(":Exists").unwrap();
        assert_eq!(tolerations[0].key, None);
        assert_eq!(tolerations[0].operator.as_deref(), Some("Exists"));
    }

    #[rstest]
    #[case("a=b=c", "no label value")]
    #[case(":", "names no taint")]
    #[case(":::", "names no taint")]
    #[case("::NoSchedule", "names no taint")]
    #[case("=x", "names no taint")]
    #[case("=x:Equal", "names no taint")]
    #[case("key=v:Exists", "`Exists` does not take")]
    #[case("key:Is", "operator other than")]
    #[case("key:Exists:Never", "effect other than")]
    #[case("key:Exists:NoExecute:soon", "no whole number")]
    #[case("key:Exists:NoExecute:-1", "no whole number")]
    #[case("key:Exists:NoSchedule:5", "only the effect")]
    #[case("key:Exists::5", "only the effect")]
    #[case("key:Exists:NoExecute:5:6", "more than four")]
    #[case("sp ace", "valid label key")]
    fn a_wrong_element_is_named_with_its_rule(#[case] text: &str, #[case] rule: &str) {
        let errors = parse_tolerations(&format!("good;{text};also-good:Exists")).unwrap_err();
        assert_eq!(errors.len(), 1, "{text}");
        let message = &errors[0];
        assert!(message.contains(&format!("`{text}`")), "{message}");
        assert!(message.contains(rule), "{message}");
    }

    #[test]
    fn every_wrong_element_is_reported() {
        assert_eq!(parse_tolerations("a:b;c;d:e").unwrap_err().len(), 2);
    }

    proptest! {
        #[test]
        fn no_input_makes_the_parser_panic_or_tolerate_everything(text in "[ka=:; ]{0,12}") {
            if let Ok(tolerations) = parse_tolerations(&text) {
                prop_assert!(tolerations.iter().all(|t| t.key.is_some()), "{}", text);
            }
        }
    }
}
