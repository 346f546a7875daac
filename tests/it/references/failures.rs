//! What is wrong with references, what stores refuse, and what runs must not reach.

use std::sync::mpsc::channel;
use std::sync::{Barrier, Mutex};
use std::time::{Duration, SystemTime};

use integration_tests::job;
use job_contract::env;
use nix::sys::signal::Signal;
use serde_json::json;
use test_peers::clouds::Clouds;
use test_peers::http::{Response, Server};
use test_peers::wait::DEADLINE;

use super::{Journey, REGION, Stores};

pub(super) const TOKEN: &str = "hvs.token-of-the-operator";

/// A Vault whose answers the test decides. Preflights are refused, so paths are read as they are.
pub(super) fn vault(answer: impl Fn(&str) -> Response + Send + Sync + 'static) -> Server {
    Server::start(move |request| {
        assert_eq!(request.header("x-vault-token"), Some(TOKEN));
        if request.path.starts_with("/v1/sys/internal/") {
            return Response::new(403, "");
        }
        answer(&request.path)
    })
    .unwrap()
}

pub(super) fn environment(server: &Server) -> Vec<(&'static str, String)> {
    vec![
        (env::CUSTOMER_VAULT_ADDRESS, server.url()),
        (env::CUSTOMER_VAULT_TOKEN, TOKEN.to_owned()),
    ]
}

pub(super) fn secret(members: &serde_json::Value) -> Response {
    Response::new(200, json!({ "data": members }).to_string())
}

#[test]
fn what_is_wrong_or_not_allowed_ends_the_step_before_anything_is_asked() {
    let server = vault(|_| secret(&json!({ "k": "canary" })));
    let mut environment = environment(&server);
    environment.push((
        env::SECRET_REFERENCES_ALLOW,
        "vault:kv/{organizationId}/**".to_owned(),
    ));
    let journey = Journey::new(environment.clone());
    let own = format!("${{vault:kv/{}/a.k}}", job::ORGANIZATION);
    let error = journey.expect_failure(
        1,
        &[
            ("A", "${vault:kv/other-team/a.k}"),
            ("B", "${vault:../sys/raw.k}"),
            ("C", "${ssm:"),
            ("D", "${azure:x@evil.com/}"),
            ("E", &own),
        ],
    );
    for expected in [
        "variable A: ${vault:kv/other-team/a.k}: no rule",
        "variable B: ",
        "variable C: ",
        "variable D: ",
    ] {
        assert!(error.contains(expected), "{expected}\n{error}");
    }
    assert!(!error.contains("variable E"), "{error}");
    assert!(server.requests().is_empty());
    Journey::new(environment).expect(&[("A", &own, "canary")]);
}

#[test]
fn a_run_cannot_lead_the_executor_elsewhere() {
    let stores = Stores::shared();
    let elsewhere = Server::start(|_| Response::new(500, "")).unwrap();
    let journey = Journey::new(stores.environment());
    let url = elsewhere.url();
    let cases = [
        ("A", "${ssm:prod/db}", "aws-canary-2"),
        ("B", "${gcp:db}", "google-canary-1"),
        ("C", "${azure:db@vault-1}", "azure-canary-1"),
        ("D", "${vault:kv/team/app.password}", "bao-canary-2"),
    ];
    let mut job = journey.script(&cases.map(|(name, reference, _)| (name, reference)));
    let names = [
        "ALL_PROXY",
        "AWS_ACCESS_KEY_ID",
        "AWS_CONFIG_FILE",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_EC2_METADATA_SERVICE_ENDPOINT",
        "AWS_ENDPOINT_URL",
        "AWS_ENDPOINT_URL_SECRETS_MANAGER",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_SECRETS_REGION",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AZURE_AUTHORITY_HOST",
        "AZURE_CLIENT_ID",
        "AZURE_FEDERATED_TOKEN_FILE",
        "AZURE_POD_IDENTITY_AUTHORITY_HOST",
        "CUSTOMER_AWS_ACCESS_KEY_ID",
        "CUSTOMER_GOOGLE_CREDENTIALS",
        "CUSTOMER_VAULT_ADDRESS",
        "CUSTOMER_VAULT_TOKEN",
        "CUSTOMER_VAULT_TOKEN_FILE",
        "GCE_METADATA_HOST",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "HTTPS_PROXY",
        "HTTP_PROXY",
        "MAYFLY_SECRET_LOGINS",
        "MAYFLY_SECRET_REFERENCES",
        "NO_PROXY",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "VAULT_ADDR",
        "VAULT_NAMESPACE",
        "VAULT_TOKEN",
        "https_proxy",
    ];
    let pairs: Vec<String> = names.iter().map(|name| format!("{name}={url}")).collect();
    super::set(&mut job, &names.map(|name| (name, url.as_str())));
    super::set(&mut job, &[("EPHEMERAL_JOB_ENV_VARS", &pairs.join(";"))]);
    let outcome = journey.executor(&job).run().expect_code(0);
    for (name, _, expected) in cases {
        assert_eq!(journey.seen(name).as_deref(), Some(expected), "{outcome}");
    }
    assert!(elsewhere.requests().is_empty(), "{outcome}");
}

/// Each secret arrives as it is, whatever a shell, the tool or another scan could make of it.
#[test]
fn the_content_of_a_secret_is_never_read() {
    const LARGE: usize = 65_536;
    let nasty = "${ssm:other} \" %{ $( `id` \\ 'q' ${vault:kv/b.k}\nline two";
    let server = vault(move |path| match path {
        "/v1/kv/nasty" => secret(&json!({ "k": nasty })),
        "/v1/kv/short" => secret(&json!({ "k": "x", "word": true })),
        "/v1/kv/large" => secret(&json!({ "k": "y".repeat(LARGE) })),
        "/v1/kv/too-large" => secret(&json!({ "k": "y".repeat(LARGE + 1) })),
        "/v1/kv/nul" => secret(&json!({ "k": "canary\0" })),
        "/v1/kv/list" => secret(&json!({ "k": ["canary"] })),
        _ => Response::new(404, ""),
    });
    let journey = Journey::new(environment(&server));
    let large = "y".repeat(LARGE);
    let outcome = journey.expect(&[
        ("NASTY", "${vault:kv/nasty.k}", nasty),
        ("SHORT", "${vault:kv/short.k}", "x"),
        ("WORD", "${vault:kv/short.word}", "true"),
        ("LARGE", "${vault:kv/large.k}", &large),
    ]);
    for name in ["SHORT", "WORD"] {
        let warning = format!("WARNING: a secret in variable {name} has less than 6 bytes");
        assert!(outcome.log().contains(&warning), "{outcome}");
    }
    let journey = Journey::new(environment(&server));
    let error = journey.expect_failure(
        1,
        &[
            ("A", "${vault:kv/too-large.k}"),
            ("B", "${vault:kv/nul.k}"),
            ("C", "${vault:kv/list.k}"),
            ("D", "${vault:kv/absent.k}"),
        ],
    );
    for expected in [
        "4 secret references could not be resolved",
        "variable A: ${vault:kv/too-large.k}: unusable in Vault (it is larger",
        "variable B: ${vault:kv/nul.k}: unusable in Vault (it holds a NUL",
        "variable C: ${vault:kv/list.k}: unusable in Vault (the key holds no text",
        "variable D: ${vault:kv/absent.k}: not found in Vault",
    ] {
        assert!(error.contains(expected), "{expected}\n{error}");
    }
}

#[test]
fn no_answer_of_a_store_is_followed_or_shown() {
    let server = vault(|path| {
        let redirect = |status| {
            Response::new(status, "canary").with_header("Location", "http://evil.example.test/")
        };
        match path {
            "/v1/kv/moved" => redirect(301),
            "/v1/kv/standby" => redirect(307),
            "/v1/kv/html" => Response::new(200, "<html>canary</html>"),
            "/v1/kv/endless" => Response::new(200, vec![b'x'; 2 << 20]),
            "/v1/kv/message" => Response::new(400, json!({ "errors": ["canary"] }).to_string()),
            _ => Response::new(403, json!({ "errors": ["canary"] }).to_string()),
        }
    });
    let journey = Journey::new(environment(&server));
    let error = journey.expect_failure(
        1,
        &[
            ("A", "${vault:kv/moved.k}"),
            ("B", "${vault:kv/standby.k}"),
            ("C", "${vault:kv/html.k}"),
            ("D", "${vault:kv/endless.k}"),
            ("E", "${vault:kv/message.k}"),
            ("F", "${vault:kv/denied.k}"),
            ("G", "${ssm:x}"),
        ],
    );
    for (name, expected) in [
        ("A", "a redirect, which is not followed"),
        ("B", "a redirect, which is not followed"),
        ("C", "with a body that is not of this store"),
        ("D", "larger than 1 MiB"),
        ("E", "status 400"),
        (
            "F",
            "access denied in Vault (status 403): give the token's policy",
        ),
        ("G", "the store is not configured in AWS Secrets Manager"),
    ] {
        let at = error
            .find(&format!("variable {name}: "))
            .unwrap_or_else(|| panic!("{name}\n{error}"));
        assert!(
            error[at..].contains(expected),
            "{name}: {expected}\n{error}"
        );
    }
}

/// Nothing has begun, so another executor may run the step later.
#[test]
fn a_store_that_is_away_leaves_the_step_to_another_executor() {
    let server = vault(|_| Response::new(503, "").with_header("Retry-After", "600"));
    let journey = Journey::new(environment(&server));
    let job = journey.script(&[("A", "${vault:kv/a.k}")]);
    let outcome = journey.executor(&job).run().expect_code(75);
    assert!(
        outcome
            .error()
            .contains("the store is unavailable in Vault (sealed, status 503)"),
        "{outcome}"
    );
    assert_eq!(journey.machine.statuses(&job).1, "pending", "{outcome}");
    assert_eq!(journey.seen("A"), None);
}

#[test]
fn a_signal_ends_the_wait_for_a_store() {
    let (asked, reads) = channel();
    let (open, held) = channel::<()>();
    let held = Mutex::new(held);
    let server = vault(move |_| {
        asked.send(()).unwrap();
        // It is not answered before the executor has ended.
        let _ = held.lock().unwrap().recv();
        Response::new(200, "")
    });
    let journey = Journey::new(environment(&server));
    let job = journey.script(&[("A", "${vault:kv/a.k}")]);
    let run = journey.executor(&job).start();
    reads.recv_timeout(DEADLINE).unwrap();
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait();
    // A read that gets no answer is repeated.
    assert!(reads.try_recv().is_err(), "{outcome}");
    let expected = "stopped by signal 15 before anything was started";
    assert_eq!(outcome.error(), expected, "{outcome}");
    assert_eq!(journey.machine.statuses(&job).1, "pending", "{outcome}");
    drop(open);
}

/// The store answers when so many reads have arrived, and not before.
#[test]
fn forty_secrets_are_read_eight_at_a_time_and_each_once() {
    let together = Barrier::new(8);
    let server = vault(move |path| {
        together.wait();
        secret(&json!({ "a": format!("first-of-{path}"), "b": format!("second-of-{path}") }))
    });
    let journey = Journey::new(environment(&server));
    let mut job = journey.script(&[]);
    for n in 0..40 {
        for key in ["a", "b"] {
            super::set(
                &mut job,
                &[(&format!("N{n}{key}"), &format!("${{vault:kv/{n}.{key}}}"))],
            );
        }
    }
    journey.executor(&job).run().expect_code(0);
    let requests = server.requests().into_iter();
    let reads = requests.filter(|request| request.path.starts_with("/v1/kv/"));
    assert_eq!(reads.count(), 40);
}

#[test]
fn an_operator_can_refuse_sensitive_values_that_are_no_references() {
    let server = vault(|_| secret(&json!({ "k": "secret-value-1" })));
    let mut environment = environment(&server);
    environment.push((env::ONLY_SECRET_REFERENCES, "true".to_owned()));
    let journey = Journey::new(environment.clone());
    let error = journey.expect_failure(1, &[("DB_PASSWORD", "literal-canary")]);
    assert!(
        error.contains("variable DB_PASSWORD: it is sensitive, and no reference"),
        "{error}"
    );
    Journey::new(environment).expect(&[("DB_PASSWORD", "${vault:kv/a.k}", "secret-value-1")]);
}

#[test]
fn settings_that_cannot_be_used_end_the_executor() {
    let journey = Journey::new(vec![(env::CUSTOMER_VAULT_ADDRESS, "nonsense".to_owned())]);
    let error = journey.expect_failure(64, &[("A", "x")]);
    assert!(
        error.contains("`CUSTOMER_VAULT_ADDRESS` is not set to an address"),
        "{error}"
    );
}

/// A wrong clock is the usual reason why a good signature is refused.
#[test]
fn a_refused_login_names_the_clock_if_the_clocks_differ() {
    for (minutes, is_named) in [(10, true), (2, false)] {
        let server = Server::start(move |_| {
            let theirs = SystemTime::now() + Duration::from_mins(minutes);
            let error = json!({ "__type": "InvalidSignatureException", "message": "canary" });
            Response::new(400, error.to_string())
                .with_header("Date", &httpdate::fmt_http_date(theirs))
        })
        .unwrap();
        let host = "secretsmanager.eu-central-1.amazonaws.com";
        let clouds = Clouds::start(&[(host, server.address())]).unwrap();
        let mut environment = clouds.environment().to_vec();
        environment.extend([
            (env::CUSTOMER_AWS_ACCESS_KEY_ID, "AKIAEXAMPLE".to_owned()),
            (env::CUSTOMER_AWS_SECRET_ACCESS_KEY, "key-of-aws".to_owned()),
            (env::AWS_SECRETS_REGION, REGION.to_owned()),
        ]);
        let error = Journey::new(environment).expect_failure(1, &[("A", "${ssm:db}")]);
        let clock = "the clocks differ by more than five minutes";
        assert_eq!(error.contains(clock), is_named, "{minutes}: {error}");
        assert!(
            error.contains("InvalidSignatureException") && error.contains("and its clock"),
            "{error}"
        );
    }
}
