//! References to secrets: any text can be scanned, what is not a reference stays, and no reference leaves its place.

#![no_main]

use libfuzzer_sys::fuzz_target;
use secret_stores::{AllowList, RunIds, SecretId, Template};

fuzz_target!(|text: &str| {
    let Ok(template) = Template::scan(text) else {
        return;
    };
    let references: Vec<_> = template.references().collect();
    assert!(references.len() <= text.len() / 8);
    if !template.changes() {
        assert_eq!(template.render(|_| "unused"), text);
    }
    // A secret that looks like a reference is inserted once.
    let secret = "${ssm:again}";
    let rendered = template.render(|_| secret);
    let inserted = rendered.matches(secret).count();
    assert!(inserted >= references.len());
    let run = RunIds {
        organization: "org",
        workspace: "ws",
    };
    let nothing = AllowList::parse("ssm:{organizationId}{workspaceId}").expect("a rule");
    for reference in references {
        assert!(text.contains(&reference.text));
        let (rule, _) = reference.id.rule_parts();
        assert!(!nothing.allows(&reference.id, run) || rule == "ssm:orgws");
        match &reference.id {
            SecretId::Vault { path, .. } => {
                assert!(path.split('/').all(|part| !["", ".", ".."].contains(&part)));
            }
            SecretId::Azure { vault, name, .. } => {
                assert!(!vault.contains(['.', '/', ':']) && !name.contains(['.', '/', '?']));
            }
            SecretId::Gcp { secret, .. } => assert!(!secret.contains(['.', '/', ':'])),
            SecretId::Aws { region, .. } => {
                assert!(
                    region
                        .iter()
                        .all(|region| !region.contains(['.', '/', ':']))
                );
            }
        }
    }
    if let Ok(input) = template.render_input(|_| "a\"b") {
        assert!(input.literal.len() <= text.len() * 4 + 64);
    }
});
