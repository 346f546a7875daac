//! `JAVA_TOOL_OPTIONS`: Kubernetes accepts every node selector that is read from them.

#![no_main]

use std::collections::BTreeMap;

use cluster::job_settings::DeploymentArgs;
use job_contract::env;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|options: &str| {
    let Some(selector) = node_selector(options) else {
        return;
    };
    let unquoted: String = options
        .chars()
        .filter(|c| !['"', '\''].contains(c))
        .collect();
    let mut written = vec!["-Xmx64m".to_owned()];
    for (key, value) in &selector {
        let name = key.rsplit('/').next().unwrap_or(key);
        assert!(is_label(name) && !name.is_empty() && (value.is_empty() || is_label(value)));
        assert!(unquoted.contains(key.as_str()) && unquoted.contains(value.as_str()));
        written.push(format!(
            "\"-Dio.terrakube.executor.ephemeral.nodeSelector[{key}]={value}\""
        ));
    }
    assert_eq!(node_selector(&written.join(" ")), Some(selector));
});

/// `None` if the deployment is refused because of the options.
fn node_selector(options: &str) -> Option<BTreeMap<String, String>> {
    let args = DeploymentArgs {
        java_tool_options: Some(options.to_owned()),
        ..DeploymentArgs::default()
    };
    match args.resolve(None) {
        Ok(deployment) => Some(deployment.defaults.node_selector.unwrap_or_default()),
        Err(errors) => {
            assert!(!errors.is_empty());
            for error in errors {
                assert_eq!(error.variable, env::JAVA_TOOL_OPTIONS);
                let message = error.to_string();
                assert!(
                    message.len() <= 1024 && !message.contains('\n'),
                    "{message}"
                );
            }
            None
        }
    }
}

fn is_label(text: &str) -> bool {
    text.len() <= 63
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}
