//! What the platform entrusts to a run reaches neither its logs, nor its user's processes beyond the contract,
//! nor a file that outlives it.

use std::fs;

use integration_tests::site::files_below;
use integration_tests::{Outcome, Repository, Site, job};
use job_contract::{JobData, StepType, env};

use crate::site;

const TOKEN: &str = "ghs_planted0token1for2the3clone";
const INTERNAL: &str = "cGxhbnRlZC1pbnRlcm5hbC1zZWNyZXQtMTIzNDU2Nzg5MDEyMzQ1Njc4OTA";
const KEY: &str = "-----BEGIN OPENSSH PRIVATE KEY-----\nplantedkeyline0000000000000000000000000000000000000000000000000\nplantedkeyline1111111111111111111111111111111111111111111111111\n-----END OPENSSH PRIVATE KEY-----\n";

fn entrusted(job: JobData) -> JobData {
    JobData {
        access_token: Some(TOKEN.into()),
        module_ssh_key: Some(KEY.into()),
        ..job
    }
}

/// Everything that must never be seen, line by line.
fn secrets() -> Vec<&'static str> {
    [TOKEN, INTERNAL]
        .into_iter()
        .chain(KEY.lines().filter(|line| line.starts_with("planted")))
        .collect()
}

#[track_caller]
fn assert_unseen(site: &Site, outcome: &Outcome, job_data: &str) {
    let mut places = vec![(
        "the executor's streams and report".to_owned(),
        outcome.to_string(),
    )];
    for path in files_below(site.folder()) {
        let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
        places.push((path.display().to_string(), text));
    }
    for (place, text) in &places {
        for secret in secrets() {
            assert!(!text.contains(secret), "{secret} is in {place}\n{text}");
        }
        assert!(!text.contains(job_data), "the job data is in {place}");
    }
}

#[test]
fn a_script_that_prints_everything_gives_nothing_away() {
    let (site, repository) = (site(), Repository::fixture());
    let job = entrusted(job::scripts(
        &repository,
        vec![job::bash(
            1,
            "env; set; echo \"token: $accessToken.\"; printf '%s' \"${accessToken:0:9}\"; echo \"${accessToken:9}\"; printf 'cut %s' \"$accessToken\" | cut -c1-400",
        )],
    ));
    site.queue(&[&job]);
    let data = job_contract::encoding::encode(&job);
    let outcome = site
        .executor(&job)
        .env(env::INTERNAL_SECRET, INTERNAL)
        .env(env::LOG_FILTER, "trace")
        .env("TerrakubeRedisPassword", "planted-redis-password")
        .run()
        .expect_code(0);
    assert!(outcome.log().contains("token: "), "{outcome}");
    assert_unseen(&site, &outcome, &data);
    for name in [
        env::INTERNAL_SECRET,
        env::JOB_DATA,
        "TerrakubeRedisPassword",
        "MAYFLY_",
    ] {
        assert!(
            !outcome.log().contains(name),
            "scripts see {name}\n{outcome}"
        );
    }
}

#[test]
fn the_tool_sees_its_own_variables_and_nothing_of_ours() {
    let (site, repository) = (
        site(),
        Repository::module(
            "resource \"terraform_data\" \"a\" {\n  provisioner \"local-exec\" {\n    command = \"env\"\n  }\n}\n",
        ),
    );
    let mut apply = entrusted(job::step(StepType::Apply, &repository));
    apply
        .environment_variables
        .insert("OWN_VARIABLE".into(), "own".into());
    site.queue(&[&apply]);
    let data = job_contract::encoding::encode(&apply);
    let outcome = site
        .executor(&apply)
        .env(env::INTERNAL_SECRET, INTERNAL)
        .env("UNLISTED", "unlisted-value")
        .env("HTTPS_PROXY", "")
        .env("AWS_ACCESS_KEY_ID", "planted-storage-key")
        .run()
        .expect_code(0);
    assert!(outcome.log().contains("OWN_VARIABLE=own"), "{outcome}");
    assert!(outcome.log().contains("PATH=/"), "{outcome}");
    for text in [
        "UNLISTED",
        "unlisted-value",
        "planted-storage-key",
        env::JOB_DATA,
        env::INTERNAL_SECRET,
    ] {
        assert!(!outcome.log().contains(text), "{text}\n{outcome}");
    }
    assert_unseen(&site, &outcome, &data);
}

#[test]
fn names_may_be_forwarded_by_configuration_but_never_secrets() {
    let (site, repository) = (site(), Repository::fixture());
    let job = job::scripts(&repository, vec![job::bash(1, "env")]);
    site.queue(&[&job]);
    let outcome = site
        .executor(&job)
        .env("CORPORATE_CA", "/etc/ca.pem")
        .env(env::INTERNAL_SECRET, INTERNAL)
        .env(env::ENV_FORWARD, "CORPORATE_CA,ABSENT")
        .run()
        .expect_code(0);
    assert!(
        outcome.log().contains("CORPORATE_CA=/etc/ca.pem"),
        "{outcome}"
    );
}

#[test]
fn a_user_process_cannot_read_the_executors_environment() {
    let (site, repository) = (site(), Repository::fixture());
    let job = entrusted(job::scripts(
        &repository,
        vec![job::bash(
            1,
            "for file in environ mem maps; do head -c1 /proc/$PPID/$file >/dev/null 2>&1 && echo \"readable: $file\"; done; echo tried $(id -u)",
        )],
    ));
    site.queue(&[&job]);
    let run = site.executor(&job).env(env::INTERNAL_SECRET, INTERNAL);
    let outcome = if nix::unistd::geteuid().is_root() {
        // Root may read anything; a pod's user may not.
        repository.give_to(65534);
        run.as_user(65534).run()
    } else {
        run.run()
    };
    let outcome = outcome.expect_code(0);
    assert!(outcome.log().contains("tried "), "{outcome}");
    assert!(!outcome.log().contains("readable: "), "{outcome}");
}

#[test]
fn sensitive_values_stay_out_of_what_is_kept_beside_the_state() {
    let (site, repository) = (
        site(),
        Repository::module(
            "variable \"password\" {\n  type      = string\n  sensitive = true\n}\nresource \"terraform_data\" \"a\" {\n  input = var.password\n}\noutput \"password\" {\n  value     = var.password\n  sensitive = true\n}\n",
        ),
    );
    let plan = JobData {
        variables: [("password".to_owned(), "planted-variable-value".into())].into(),
        ..job::plan(&repository)
    };
    let apply = job::apply_after(&plan);
    site.queue(&[&plan, &apply]);
    for step in [&plan, &apply] {
        let outcome = site.run(step).expect_code(0);
        assert!(
            !outcome.to_string().contains("planted-variable-value"),
            "{outcome}"
        );
        assert!(!site.step_output(step).contains("planted-variable-value"));
    }
    let context = serde_json::to_string(&site.context(&plan)).unwrap();
    assert!(context.contains("terraform_data.a"), "{context}");
    assert!(!context.contains("planted-variable-value"), "{context}");
}

#[test]
fn stored_files_belong_to_their_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let (site, repository) = (site(), Repository::fixture());
    let plan = job::plan(&repository);
    let apply = job::apply_after(&plan);
    site.queue(&[&plan, &apply]);
    site.run(&plan).expect_code(0);
    site.run(&apply).expect_code(0);
    let files = files_below(&site.data_dir());
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        let exposed = (1..)
            .map_while(|depth| file.ancestors().nth(depth))
            .take_while(|folder| folder.starts_with(site.data_dir()))
            .chain([file.as_path()])
            .all(|path| path.metadata().unwrap().permissions().mode() & 0o007 != 0);
        assert!(!exposed, "{} can be read by anyone", file.display());
    }
}
