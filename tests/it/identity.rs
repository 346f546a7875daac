//! The identity of a pod at the clouds: what the tool and scripts find, and which credentials come first.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use integration_tests::machine::ExecutorRun;
use integration_tests::{FakeTool, Machine, Repository, job};
use job_contract::{JobData, env};
use serde_json::Value;

use crate::machine;

const ROLE: &str = "arn:aws:iam::123456789012:role/deploy";
const PROVIDER: &str = "projects/42/locations/global/workloadIdentityPools/pool/providers/cluster";

/// What a launcher sets for a pod with three identities.
const SETTINGS: [(&str, &str); 5] = [
    (env::IDENTITY_AWS_ROLE, ROLE),
    (env::IDENTITY_GCP_PROVIDER, PROVIDER),
    (env::IDENTITY_AZURE_CLIENT_ID, "client"),
    (env::IDENTITY_AZURE_TENANT_ID, "tenant"),
    (env::IDENTITY_AZURE_SUBSCRIPTION_ID, "subscription"),
];

/// Writes a token that is valid for `minutes`.
pub(crate) fn write_token(path: &Path, minutes: u64) -> String {
    let end = SystemTime::now() + Duration::from_secs(60 * minutes);
    let end = end
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let claims = URL_SAFE_NO_PAD.encode(format!("{{\"exp\":{end}}}"));
    let file = path.file_name().unwrap().display();
    let token = format!("e30.{claims}.signature-of-{file}");
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, &token).unwrap();
    token
}

/// Writes such a token of the pod.
fn token(machine: &Machine, file: &str, minutes: u64) -> (PathBuf, String) {
    let path = folder(machine).join(file);
    let token = write_token(&path, minutes);
    (path, token)
}

fn folder(machine: &Machine) -> PathBuf {
    machine.folder().join("tokens")
}

fn tokens(machine: &Machine) -> Vec<String> {
    let files = ["aws-token", "gcp-token", "azure-token"];
    files.map(|file| token(machine, file, 60).1).into()
}

fn executor<'m>(machine: &'m Machine, job: &JobData) -> ExecutorRun<'m> {
    let run = machine
        .executor(job)
        .env(env::IDENTITY_DIR, folder(machine));
    SETTINGS
        .iter()
        .fold(run, |run, (name, value)| run.env(name, value))
}

/// The value of a variable in the output of `env`.
fn value<'l>(log: &'l str, name: &str) -> Option<&'l str> {
    let prefix = format!("{name}=");
    log.lines()
        .find_map(|line| line.trim().strip_prefix(&prefix))
}

#[test]
fn tool_and_scripts_get_the_paths_of_tokens_and_no_token() {
    let (machine, repository) = (machine(), Repository::fixture());
    let tokens = tokens(&machine);
    let tool = FakeTool::new().on(
        "plan",
        "echo tool-has=$AWS_WEB_IDENTITY_TOKEN_FILE,$ARM_OIDC_TOKEN_FILE_PATH; exit 0",
    );
    let look = "env; echo document=$(cat \"$GOOGLE_APPLICATION_CREDENTIALS\")";
    let plan = JobData {
        command_list: vec![job::before(job::bash(1, look))],
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = executor(&machine, &plan).env("PATH", tool.path()).run();
    let (log, folder) = (outcome.log(), folder(&machine));
    let file = |name: &str| folder.join(name).display().to_string();
    for (name, expected) in [
        ("AWS_ROLE_ARN", ROLE),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", &file("aws-token")),
        ("AWS_STS_REGIONAL_ENDPOINTS", "regional"),
        ("ARM_CLIENT_ID", "client"),
        ("ARM_OIDC_TOKEN_FILE_PATH", &file("azure-token")),
        ("ARM_SUBSCRIPTION_ID", "subscription"),
        ("ARM_TENANT_ID", "tenant"),
        ("ARM_USE_OIDC", "true"),
    ] {
        assert_eq!(value(log, name), Some(expected), "{name}: {outcome}");
    }
    let session = value(log, "AWS_ROLE_SESSION_NAME").unwrap();
    assert!(
        session.starts_with(&format!("mayfly-{}-", plan.job_id)),
        "{session}"
    );
    let of_tool = format!("{},{}", file("aws-token"), file("azure-token"));
    assert_eq!(value(log, "tool-has"), Some(&*of_tool), "{outcome}");
    let document: Value = serde_json::from_str(value(log, "document").unwrap()).unwrap();
    assert_eq!(document["type"], "external_account");
    assert_eq!(
        document["audience"],
        format!("//iam.googleapis.com/{PROVIDER}")
    );
    assert_eq!(document["credential_source"]["file"], file("gcp-token"));
    for token in tokens {
        assert!(!outcome.to_string().contains(&token), "{outcome}");
    }
    assert!(!log.contains("mayfly.dev"), "{outcome}");
}

#[test]
fn credentials_of_the_job_come_first_and_the_log_says_which() {
    let (machine, repository) = (machine(), Repository::fixture());
    tokens(&machine);
    let mut scripts = job::scripts(&repository, vec![job::bash(1, "env")]);
    for (name, value) in [
        // As the platform hands over its dynamic credentials.
        ("TERRAKUBE_AWS_CREDENTIALS_FILE", "token-of-the-platform"),
        ("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/of-the-run"),
        ("ARM_CLIENT_SECRET", "secret-of-the-run"),
        ("ARM_CLIENT_ID", "client-of-the-run"),
    ] {
        scripts
            .environment_variables
            .insert(name.to_owned(), value.to_owned());
    }
    machine.queue(&[&scripts]);
    let outcome = executor(&machine, &scripts).run().expect_code(0);
    let log = outcome.log();
    let file = value(log, "AWS_WEB_IDENTITY_TOKEN_FILE").unwrap();
    assert!(
        !file.starts_with(&*folder(&machine).to_string_lossy()),
        "{file}"
    );
    let role = value(log, "AWS_ROLE_ARN");
    assert_eq!(role, Some("arn:aws:iam::123456789012:role/of-the-run"));
    assert_eq!(value(log, "ARM_CLIENT_ID"), Some("client-of-the-run"));
    assert_eq!(value(log, "ARM_USE_OIDC"), None, "{outcome}");
    for line in [
        "AWS: the run brings credentials (`AWS_WEB_IDENTITY_TOKEN_FILE`)",
        "Azure: the run brings credentials (`ARM_CLIENT_SECRET`)",
    ] {
        assert_eq!(log.matches(line).count(), 1, "{outcome}");
    }
    // The third cloud is not concerned.
    assert!(
        value(log, "GOOGLE_APPLICATION_CREDENTIALS").is_some(),
        "{outcome}"
    );
}

#[test]
fn a_token_that_is_missing_or_has_expired_ends_the_step_before_it_starts() {
    let (machine, repository) = (machine(), Repository::fixture());
    let scripts = job::scripts(&repository, vec![job::bash(1, "echo it-ran")]);
    machine.queue(&[&scripts]);
    let (path, _) = token(&machine, "aws-token", 0);
    let role = |run: ExecutorRun<'_>| {
        run.env(env::IDENTITY_DIR, folder(&machine))
            .env(env::IDENTITY_AWS_ROLE, ROLE)
            .run()
    };
    let expired = role(machine.executor(&scripts)).expect_code(75);
    assert!(
        expired.to_string().contains("is invalid since"),
        "{expired}"
    );
    fs::remove_file(&path).unwrap();
    let missing = role(machine.executor(&scripts)).expect_code(64);
    assert!(
        missing.error().contains(&path.display().to_string()),
        "{missing}"
    );
    assert!(
        !missing.log().contains("it-ran") && !expired.log().contains("it-ran"),
        "{missing}"
    );
}

#[test]
fn what_a_cloud_injects_into_the_pod_is_passed_on_unless_the_operator_keeps_it() {
    let (machine, repository) = (machine(), Repository::fixture());
    let scripts = job::scripts(&repository, vec![job::bash(1, "env")]);
    let agent = "AWS_CONTAINER_CREDENTIALS_FULL_URI";
    for (passed, expected) in [
        ("true", Some("http://169.254.170.23/v1/credentials")),
        ("false", None),
    ] {
        // A step runs once.
        let scripts = job::in_job(&scripts, if passed == "true" { "51" } else { "52" });
        machine.queue(&[&scripts]);
        let run = machine
            .executor(&scripts)
            .env(agent, "http://169.254.170.23/v1/credentials");
        let outcome = run
            .env(env::IDENTITY_PASS_THROUGH, passed)
            .run()
            .expect_code(0);
        assert_eq!(value(outcome.log(), agent), expected, "{outcome}");
    }
}
