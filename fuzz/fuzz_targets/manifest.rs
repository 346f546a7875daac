//! Kubernetes objects from job data. The same data gives the same bytes. Only the Secret has the document, and has all of it.
//! With the default policy, no pod has more rights than the default pod.

#![no_main]

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use job_contract::Document;
use job_contract::encoding::decode;
use libfuzzer_sys::fuzz_target;
use manifest::{Deployment, build};
use serde_json::{Value, json};

const TOKEN: &str = "s3cr3t-access-token";

fuzz_target!(|data: &[u8]| {
    let Ok(mut job) = decode(data) else {
        return;
    };
    job.access_token = Some(TOKEN.to_owned());
    let document = Document::written(&job);
    let deployment = Deployment::default();
    let manifest = match build(&document, &deployment) {
        Ok(manifest) => manifest,
        Err(errors) => {
            assert!(!errors.errors.is_empty());
            for error in errors.errors {
                let message = error.to_string();
                assert!(message.len() <= 2048, "{message}");
                assert!(
                    !message.contains('\n') && !message.contains(TOKEN),
                    "{message}"
                );
            }
            return;
        }
    };
    let list = manifest.to_list();
    assert_eq!(
        build(&document, &deployment)
            .expect("it was built before")
            .to_list(),
        list
    );

    let object = &list["items"][0];
    assert!(!object.to_string().contains(TOKEN));
    let data = list["items"][1]["data"]
        .as_object()
        .expect("a Secret holds it");
    let parts = (0..data.len()).map(|index| match index {
        0 => "job-data".to_owned(),
        index => format!("job-data-{index}"),
    });
    let received: Vec<u8> = parts
        .flat_map(|key| {
            let part = data[&key].as_str().expect("a text");
            STANDARD.decode(part).expect("Kubernetes encodes bytes so")
        })
        .collect();
    assert_eq!(decode(&received).as_ref(), Ok(&job));

    let name = object["metadata"]["name"].as_str().expect("a name");
    assert!(is_dns_label(name), "{name}");
    for metadata in [&object["metadata"], &object["spec"]["template"]["metadata"]] {
        for (key, value) in metadata["labels"].as_object().expect("labels") {
            let key = key.rsplit('/').next().expect("a name");
            let value = value.as_str().expect("a text");
            assert!(
                is_label(key) && !key.is_empty() && is_label(value),
                "{key}={value}"
            );
        }
    }
    harmless(&object["spec"]["template"]["spec"]);
});

fn harmless(pod: &Value) {
    assert_eq!(pod["automountServiceAccountToken"], false);
    for name in ["hostNetwork", "hostPID", "hostIPC", "hostUsers"] {
        assert!(
            pod[name].is_null() || pod[name] == (name == "hostUsers"),
            "{name}"
        );
    }
    for volume in pod["volumes"].as_array().expect("volumes") {
        assert!(volume.get("hostPath").is_none());
    }
    for container in pod["containers"].as_array().expect("containers") {
        let context = &container["securityContext"];
        assert_eq!(context["privileged"], false);
        assert_eq!(context["allowPrivilegeEscalation"], false);
        assert_eq!(context["capabilities"]["drop"], json!(["ALL"]));
        assert_ne!(context["runAsUser"], 0);
        for variable in container["env"].as_array().expect("an environment") {
            let literals = container["env"].as_array().expect("an environment").iter();
            assert_eq!(
                literals
                    .filter(|other| other["name"] == variable["name"])
                    .count(),
                1
            );
        }
    }
}

fn is_dns_label(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        && !text.starts_with('-')
        && !text.ends_with('-')
}

fn is_label(text: &str) -> bool {
    text.len() <= 63
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}
