//! Tolerations. A list that was read can be written and read again, and follows the rules of Kubernetes. It tolerates all taints
//! only if the input says so.

#![no_main]

use libfuzzer_sys::fuzz_target;
use manifest::tolerations::parse_tolerations;

fuzz_target!(|text: &str| {
    let tolerations = match parse_tolerations(text) {
        Ok(tolerations) => tolerations,
        Err(errors) => {
            assert!(!errors.is_empty() && errors.len() <= text.split(';').count());
            for message in errors {
                assert!(
                    message.len() <= 1024 && !message.contains('\n'),
                    "{message}"
                );
            }
            return;
        }
    };
    let mut written = Vec::new();
    for toleration in &tolerations {
        let operator = toleration.operator.as_deref().expect("always said");
        let key = toleration.key.as_deref().unwrap_or_default();
        if key.is_empty() {
            assert!(operator == "Exists" && text.to_ascii_lowercase().contains(":exists"));
        }
        assert_eq!(operator == "Equal", toleration.value.is_some());
        let effect = toleration.effect.as_deref().unwrap_or_default();
        let seconds = match toleration.toleration_seconds {
            Some(seconds) => {
                assert!(seconds >= 0 && effect == "NoExecute");
                seconds.to_string()
            }
            None => String::new(),
        };
        let value = toleration
            .value
            .as_ref()
            .map(|value| format!("={value}"))
            .unwrap_or_default();
        written.push(format!("{key}{value}:{operator}:{effect}:{seconds}"));
    }
    assert_eq!(
        parse_tolerations(&written.join(";")).as_ref(),
        Ok(&tolerations),
        "{written:?}"
    );
});
