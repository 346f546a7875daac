//! What Helm itself says of the chart.

use std::collections::BTreeSet;

use test_chart::programs::{helm_with, told};
use test_chart::{chart, files, values_files};

use crate::{documents, releases};

/// The oldest version of Kubernetes that the chart takes, and one that it refuses.
const OLDEST: &str = "1.30.0";
const TOO_OLD: &str = "1.29.0";

#[test]
fn the_chart_is_linted_strictly_with_all_its_values() {
    for (_, file) in values_files() {
        let mut command = helm_with(["lint", "--strict"]);
        let said = told(command.arg(chart()).arg("--values").arg(file));
        assert!(said.contains("0 chart(s) failed"), "{said}");
        assert!(
            !said.contains("[WARNING]") && !said.contains("[INFO]"),
            "{said}"
        );
    }
}

#[test]
fn the_chart_renders_for_the_oldest_version_and_for_none_that_is_older() {
    for (name, release) in releases() {
        let text = release.clone().on(OLDEST).text();
        let text = text.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(text.contains("\nkind: ServiceAccount\n"), "{name}: {text}");
        let error = release.on(TOO_OLD).text().unwrap_err();
        let words = format!("incompatible with Kubernetes v{TOO_OLD}");
        assert!(error.contains(&words), "{error}");
    }
}

#[test]
fn the_chart_renders_twice_the_same() {
    for (name, release) in releases() {
        let [one, other] = [(), ()].map(|()| release.text().unwrap());
        assert!(one == other, "{name} is not the same twice");
    }
}

/// What makes an output depend on more than the values: the cluster, chance, the time, how often it was installed. Those
/// who render without a cluster, as Argo CD does, would apply something else than Helm.
const OF_THE_MOMENT: &[&str] = &[
    "lookup ",
    "rand",
    "uuidv4",
    "shuffle",
    "now",
    "genCA",
    "genSelfSigned",
    "genSigned",
    "genPrivateKey",
    "htpasswd",
    "bcrypt",
    "encryptAES",
    "getHostByName",
    ".Release.Revision",
    ".Release.IsInstall",
    ".Release.IsUpgrade",
];

/// The actions of a template, without its comments.
fn actions(text: &str) -> impl Iterator<Item = &str> {
    let actions = text
        .split("{{")
        .skip(1)
        .filter_map(|rest| rest.split("}}").next());
    actions.filter(|action| !action.trim_start_matches(['-', ' ']).starts_with("/*"))
}

#[test]
fn no_template_asks_the_cluster_chance_or_the_clock() {
    let mut seen = 0;
    for folder in ["templates", "templates/tests"] {
        for end in [".yaml", ".tpl", ".txt"] {
            for file in files(&chart().join(folder), end) {
                let text = std::fs::read_to_string(&file).unwrap();
                for action in actions(&text) {
                    // What stands in quotes is output.
                    let code: String = action.split('"').step_by(2).collect();
                    for word in OF_THE_MOMENT {
                        let asks = code.match_indices(word).any(|(at, _)| {
                            !code[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '.')
                        });
                        assert!(!asks, "{}: {word} in {action}", file.display());
                    }
                    seen += 1;
                }
            }
        }
    }
    assert!(seen > 500, "{seen}");
}

#[test]
fn every_template_is_rendered_by_some_values() {
    let rendered = documents().into_iter().flat_map(|(_, documents)| documents);
    let rendered: BTreeSet<String> = rendered.map(|document| document.template).collect();
    let mut there = BTreeSet::new();
    for folder in ["templates", "templates/tests"] {
        for file in files(&chart().join(folder), ".yaml") {
            there.insert(format!(
                "{folder}/{}",
                file.file_name().unwrap().to_string_lossy()
            ));
        }
    }
    assert!(there.len() > 10, "{there:?}");
    assert_eq!(rendered, there);
}

#[test]
fn every_template_has_a_suite() {
    let all: String = files(&chart().join("tests"), "_test.yaml")
        .iter()
        .map(|file| std::fs::read_to_string(file).unwrap())
        .collect();
    for folder in ["templates", "templates/tests"] {
        for file in files(&chart().join(folder), ".yaml") {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            assert!(all.contains(&name), "no suite looks at {folder}/{name}");
        }
    }
}

/// A second release in the same namespace, or the same one in another cluster-wide scope, takes no object of the first.
#[test]
fn two_releases_share_no_object() {
    for (name, release) in releases() {
        let mut other = release.clone();
        "second".clone_into(&mut other.name);
        "elsewhere".clone_into(&mut other.namespace);
        // Releases whose runs share a namespace share its Lease, which only one of them makes.
        let other =
            other.set(serde_json::json!({"launcher": {"leaderElection": {"createLease": false}}}));
        let names = |release: &test_chart::Release| -> BTreeSet<String> {
            let documents = release.documents().into_iter();
            documents
                .map(|document| {
                    format!(
                        "{}/{}/{}",
                        document.kind(),
                        document.namespace(),
                        document.name()
                    )
                })
                .collect()
        };
        let (one, other) = (names(&release), names(&other));
        let shared: Vec<_> = one.intersection(&other).collect();
        assert!(shared.is_empty(), "{name}: {shared:?}");
    }
}

#[test]
fn every_object_has_a_namespace_and_the_labels_all_charts_have() {
    const CLUSTER: [&str; 5] = [
        "PersistentVolume",
        "StorageClass",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
        "Namespace",
    ];
    for (name, documents) in documents() {
        for document in documents {
            let of_values = document.template.ends_with("extra-objects.yaml");
            let has_namespace = !document.namespace().is_empty();
            assert_ne!(
                has_namespace,
                CLUSTER.contains(&document.kind()),
                "{name}: {document}"
            );
            for label in ["name", "instance", "version", "managed-by"] {
                let label = format!("/metadata/labels/app.kubernetes.io~1{label}");
                assert!(
                    of_values || !document.text_at(&label).is_empty(),
                    "{name}: {document}: {label}"
                );
            }
            assert!(
                !document.kind().starts_with("Cluster"),
                "{name}: {document}"
            );
            assert_ne!(document.kind(), "CustomResourceDefinition");
        }
    }
}

#[test]
fn the_chart_is_packaged_without_its_tests() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = helm_with(["package"]);
    told(command.arg(chart()).arg("--destination").arg(folder.path()));
    let package = files(folder.path(), ".tgz");
    assert_eq!(package.len(), 1);
    let mut list = std::process::Command::new("tar");
    let list = told(list.arg("-tzf").arg(&package[0]));
    for wanted in [
        "Chart.yaml",
        "values.yaml",
        "values.schema.json",
        "README.md",
        "templates/NOTES.txt",
    ] {
        assert!(
            list.contains(&format!("mayfly/{wanted}\n")),
            "{wanted}: {list}"
        );
    }
    for unwanted in ["mayfly/tests/", "mayfly/ci/"] {
        assert!(!list.contains(unwanted), "{list}");
    }
    let shown = told(helm_with(["show", "values"]).arg(&package[0]));
    let values = std::fs::read_to_string(chart().join("values.yaml")).unwrap();
    assert_eq!(shown.trim_end(), values.trim_end());
}
