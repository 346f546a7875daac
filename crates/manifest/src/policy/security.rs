//! Finds settings that a policy forbids: in security contexts, and in the annotations that replace them.

use job_contract::env;
use serde_json::{Value, json};

use super::super::error::{CollectErrors as _, quote};
use super::super::overrides::Overrides;
use super::super::pod_security::{Level, annotation_rule};
use super::{Policy, Refusals};

impl Policy {
    pub(super) fn refuse_security(&self, requested: &Overrides, refusals: &mut Refusals) {
        let level = self.pod_security;
        let contexts = [
            (env::EPHEMERAL_POD_SECURITY, &requested.pod_security),
            (env::EPHEMERAL_SECURITY, &requested.container_security),
        ];
        for (variable, context) in contexts {
            let allowed = &self.security_context_keys;
            refusals.names(variable, context.keys(), allowed, "securityContextKeys");
        }
        for (key, value) in &requested.pod_annotations {
            if let Some(rule) = annotation_rule(key, value, level)
                && self.annotation_keys.allow(key)
            {
                let key = quote(key);
                let rule =
                    format!("asks for {key}, which {rule} by the policy's `podSecurity: {level}`");
                refusals.0.add(env::EPHEMERAL_POD_ANNOTATIONS, rule);
            }
        }
        for (variable, context) in contexts {
            for (key, value, forbidden_from) in loosenings() {
                if level >= forbidden_from && context.get(key) == Some(&value) {
                    let text = spelling(&value);
                    let rule = format!(
                        "asks for {key}={text}, which the policy's `podSecurity: {level}` forbids"
                    );
                    refusals.0.add(variable, rule);
                }
            }
        }
    }
}

/// The settings of security contexts that not every Pod Security Standard allows, with the least strict level that forbids them.
fn loosenings() -> [(&'static str, Value, Level); 5] {
    let unconfined = json!({"type": "Unconfined"});
    [
        ("allowPrivilegeEscalation", json!(true), Level::Restricted),
        ("privileged", json!(true), Level::Baseline),
        ("runAsNonRoot", json!(false), Level::Restricted),
        ("runAsUser", json!(0), Level::Restricted),
        ("seccompProfile", unconfined, Level::Baseline),
    ]
}

/// A value as the variable spells it.
fn spelling(value: &Value) -> String {
    match value.get("type").unwrap_or(value) {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}
