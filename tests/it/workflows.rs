//! The workflows of the repository, which run nowhere else: what can be said of them without running them.

mod chart;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use integration_tests::Running;
use serde_json::Value;

/// Each workflow: its name, its text, and what the text says.
fn workflows() -> Vec<(PathBuf, String, Value)> {
    let folder = images::workspace_root().join(".github/workflows");
    let mut found: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap();
            let value = serde_saphyr::from_str(&text)
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
            (path, text, value)
        })
        .collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    assert!(found.len() >= 2);
    found
}

fn jobs(workflow: &Value) -> impl Iterator<Item = (&String, &Value)> {
    workflow["jobs"].as_object().unwrap().iter()
}

fn steps(workflow: &Value) -> impl Iterator<Item = &Value> {
    jobs(workflow).flat_map(|(name, job)| {
        // A job is steps, or another workflow of ours.
        let called = job["uses"].as_str();
        assert!(
            called.is_none_or(|path| path.starts_with("./.github/workflows/")),
            "{name}: {called:?}"
        );
        assert_ne!(called.is_some(), job["steps"].is_array(), "{name}");
        job["steps"].as_array().into_iter().flatten()
    })
}

/// The jobs a job waits for, by itself.
fn needs(job: &Value) -> Vec<String> {
    match &job["needs"] {
        Value::String(need) => vec![need.clone()],
        Value::Array(needs) => needs
            .iter()
            .map(|need| need.as_str().unwrap().to_owned())
            .collect(),
        _ => Vec::new(),
    }
}

fn release() -> Value {
    let mut all = workflows().into_iter();
    let found = all.find(|(path, _, _)| path.ends_with("release.yml"));
    found.unwrap().2
}

#[test]
fn every_action_is_named_by_a_commit_and_its_version_stands_beside() {
    for (path, text, workflow) in workflows() {
        let mut uses = 0;
        for step in steps(&workflow).filter_map(|step| step["uses"].as_str()) {
            let (_, commit) = step.split_once('@').unwrap();
            let is_commit = commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit());
            assert!(is_commit, "{}: {step}", path.display());
            uses += 1;
        }
        let commented = text.lines().filter(|line| {
            let line = line.trim_start().trim_start_matches("- ");
            line.starts_with("uses: ") && line.contains(" # v")
        });
        assert_eq!(commented.count(), uses, "{}", path.display());
    }
}

#[test]
fn a_job_has_the_rights_it_names_and_no_others() {
    let mut checkouts = 0;
    for (path, _, workflow) in workflows() {
        let nothing = workflow["permissions"].as_object().unwrap();
        assert!(nothing.is_empty(), "{}", path.display());
        for (name, job) in jobs(&workflow) {
            let rights = job["permissions"]
                .as_object()
                .unwrap_or_else(|| panic!("{}: {name} names no rights", path.display()));
            let writes: Vec<_> = rights
                .iter()
                .filter(|(_, right)| *right == "write")
                .map(|(right, _)| right.as_str())
                .collect();
            let is_release = path.ends_with("release.yml");
            assert!(is_release || writes.is_empty(), "{name}: {writes:?}");
            // One job alone may change the repository, and it runs none of its code.
            if writes.contains(&"contents") {
                let uses = job["steps"].as_array().unwrap().iter();
                let mut uses = uses.filter_map(|step| step["uses"].as_str());
                assert!(
                    !uses.any(|step| step.starts_with("actions/checkout@")),
                    "{name}"
                );
            }
        }
        for step in steps(&workflow) {
            let is_checkout = step["uses"]
                .as_str()
                .is_some_and(|name| name.starts_with("actions/checkout@"));
            if is_checkout {
                assert_eq!(
                    step["with"]["persist-credentials"],
                    false,
                    "{}",
                    path.display()
                );
                checkouts += 1;
            }
        }
    }
    assert!(checkouts > 0, "no job checks anything out");
}

#[test]
fn scripts_are_sound_and_no_expression_is_pasted_into_them() {
    let mut seen = 0;
    for (path, _, workflow) in workflows() {
        for script in steps(&workflow).filter_map(|step| step["run"].as_str()) {
            assert!(!script.contains("${{"), "{}: {script}", path.display());
            let mut bash = Command::new("bash");
            let checked = Running::start(bash.args(["-n", "-c", script])).wait();
            assert_eq!(checked.code(), 0, "{}: {checked}", path.display());
            seen += 1;
        }
    }
    assert!(seen > 0, "no workflow runs a script");
}

#[test]
fn every_need_of_a_workflow_job_names_a_job_and_its_outputs() {
    let mut seen = 0;
    for (path, text, workflow) in workflows() {
        let names: BTreeSet<_> = jobs(&workflow).map(|(name, _)| name.clone()).collect();
        for (name, job) in jobs(&workflow) {
            let needs = needs(job);
            for need in &needs {
                assert!(
                    names.contains(need),
                    "{}: {name} needs {need}",
                    path.display()
                );
            }
            for (reference, _) in job.to_string().match_indices("needs.") {
                let job = job.to_string();
                let mut parts = job[reference..].split(['.', ' ', '}']);
                let (needed, output) = (parts.nth(1).unwrap(), parts.nth(1).unwrap());
                assert!(needs.iter().any(|need| need == needed), "{name}: {needed}");
                let outputs = &workflow["jobs"][needed]["outputs"];
                assert!(outputs[output].is_string(), "{name}: {needed}.{output}");
                seen += 1;
            }
        }
        assert!(!text.contains('\t'), "{}", path.display());
    }
    assert!(seen > 0, "no job uses an output of another");
}

/// What has a name or a signature was tested: the release calls the tests of its own commit, and waits for them.
#[test]
fn nothing_is_published_before_the_tests_have_passed() {
    let release = release();
    let tests = &release["jobs"]["tests"];
    let called = tests["uses"].as_str().unwrap();
    let (_, _, ci) = workflows()
        .into_iter()
        .find(|(path, _, _)| called.ends_with(path.file_name().unwrap().to_str().unwrap()))
        .unwrap();
    assert!(ci["on"].as_object().unwrap().contains_key("workflow_call"));
    // A called workflow has no rights its caller lacks.
    for (name, job) in jobs(&ci) {
        assert_eq!(job["permissions"], tests["permissions"], "{name}");
    }
    let mut published = 0;
    for (name, job) in jobs(&release) {
        let rights = job["permissions"].as_object().unwrap();
        if !["id-token", "contents"]
            .iter()
            .any(|right| rights.get(*right).is_some_and(|right| right == "write"))
        {
            continue;
        }
        let (mut waits_for, mut next) = (BTreeSet::new(), vec![name.clone()]);
        while let Some(name) = next.pop() {
            let more = needs(&release["jobs"][&name]);
            next.extend(
                more.into_iter()
                    .filter(|need| waits_for.insert(need.clone())),
            );
        }
        assert!(
            waits_for.contains("tests"),
            "{name} waits for {waits_for:?}"
        );
        assert!(job["if"].is_null(), "{name}");
        published += 1;
    }
    assert_eq!(published, 3);
}

/// What the release hands to the build exists there, and the build is of the toolchain everybody uses.
#[test]
fn the_release_builds_the_targets_of_the_dockerfile_with_its_arguments() {
    let root = images::workspace_root();
    let dockerfile = fs::read_to_string(root.join("images/Dockerfile")).unwrap();
    let words = |prefix: &str, end: &[char]| -> BTreeSet<String> {
        dockerfile
            .lines()
            .filter_map(|line| line.strip_prefix(prefix)?.split(end).next())
            .map(str::to_owned)
            .collect()
    };
    let arguments = words("ARG ", &['=']);
    let targets: BTreeSet<String> = dockerfile
        .lines()
        .filter_map(|line| Some(line.strip_prefix("FROM ")?.split_once(" AS ")?.1.to_owned()))
        .collect();
    let release = release();
    let mut builds = 0;
    for step in steps(&release).filter(|step| step["with"]["build-args"].is_string()) {
        for line in step["with"]["build-args"].as_str().unwrap().lines() {
            let (name, _) = line.split_once('=').unwrap();
            assert!(arguments.contains(name), "{name}");
        }
        let target = step["with"]["target"].as_str().unwrap();
        assert!(
            target.contains("${{") || targets.contains(target),
            "{target}"
        );
        builds += 1;
    }
    assert_eq!(builds, 2);
    for image in release["jobs"]["images"]["strategy"]["matrix"]["image"]
        .as_array()
        .unwrap()
    {
        assert!(
            targets.contains(image["target"].as_str().unwrap()),
            "{image}"
        );
    }

    let toolchain = fs::read_to_string(root.join("rust-toolchain.toml")).unwrap();
    let channel = toolchain
        .lines()
        .find_map(|line| line.strip_prefix("channel = \"")?.strip_suffix('"'))
        .unwrap();
    let image = format!("ARG RUST_IMAGE=docker.io/library/rust:{channel}-slim-trixie");
    assert!(dockerfile.contains(&image), "the toolchain is {channel}");
}
