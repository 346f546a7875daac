//! The chart a release publishes, made by the step of its workflow with a real Helm.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use integration_tests::Running;
use serde_json::{Value, json};
use test_chart::programs::{helm, told};
use test_chart::{Release, chart, files};

use super::release;

/// The step that packages the chart, run on a copy: the package installs the images of the release.
#[test]
fn the_published_chart_names_the_images_of_its_release() {
    let (images, version) = ("ghcr.example.com/somebody", "7.8.9");
    let release = release();
    let steps = release["jobs"]["chart"]["steps"].as_array().unwrap();
    let script = steps
        .iter()
        .find(|step| step["name"] == "Package")
        .and_then(|step| step["run"].as_str())
        .unwrap();
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("helm")).unwrap();
    let copied = folder.path().join("helm/mayfly");
    told(Command::new("cp").arg("-r").arg(chart()).arg(&copied));
    // Helm as the tests find it, by the name the workflow has for it.
    let programs = folder.path().join("bin");
    fs::create_dir(&programs).unwrap();
    let found = which::which(helm().get_program()).unwrap();
    symlink(found, programs.join("helm")).unwrap();
    let path = std::env::var("PATH").unwrap();
    let mut bash = Command::new("bash");
    bash.args(["-c", script])
        .current_dir(folder.path())
        .env("IMAGES", images)
        .env("VERSION", version)
        .env("PATH", format!("{}:{path}", programs.display()));
    let packaged = Running::start(&mut bash).wait();
    assert_eq!(packaged.code(), 0, "{packaged}");
    let [package] = &files(&folder.path().join("chart"), ".tgz")[..] else {
        panic!("{packaged}");
    };
    let secret = json!({"auth": {"internalSecret": {"existingSecret": "internal"}}});
    let documents = Release::of(package.clone()).set(secret).documents();
    let launcher = documents
        .iter()
        .find(|document| document.kind() == "Deployment")
        .unwrap();
    let container = &launcher.value["spec"]["template"]["spec"]["containers"][0];
    let (launcher, executor) = (
        format!("{images}/mayfly-launcher:{version}"),
        format!("{images}/mayfly-executor:{version}"),
    );
    assert_eq!(container["image"], launcher);
    let variables = container["env"].as_array().unwrap();
    let of_runs = variables
        .iter()
        .find(|variable| variable["name"] == "ExecutorEphemeralImage")
        .unwrap();
    assert_eq!(of_runs["value"], executor);
    let shown = told(helm().args(["show", "chart"]).arg(package));
    let shown: Value = serde_saphyr::from_str(&shown).unwrap();
    assert_eq!(shown["version"], version);
    let listed = shown["annotations"]["artifacthub.io/images"]
        .as_str()
        .unwrap();
    let listed: Vec<&str> = listed
        .lines()
        .filter_map(|line| line.trim().strip_prefix("image: "))
        .collect();
    assert_eq!(listed, [launcher, executor]);
}
