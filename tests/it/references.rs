//! References to secrets in the values of runs: the tool and scripts get the secrets, and nothing else shows them.

mod answers;
mod failures;
mod hostile;
mod machines;
mod printed;
mod tools;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};

use integration_tests::machine::{ExecutorRun, files_below};
use integration_tests::{Machine, Outcome, Repository, job};
use job_contract::{JobData, env};
use serde_json::json;
use tempfile::TempDir;
use test_peers::clouds::Clouds;
use test_peers::google_secrets::{self, GoogleSecrets};
use test_peers::key_vault::{self, KeyVault};
use test_peers::openbao::OpenBao;
use test_peers::secrets_manager::SecretsManager;

use crate::machine;

const REGION: &str = "eu-central-1";
const OTHER_REGION: &str = "us-west-2";
const OLD_VERSION: &str = "ffffffffffffffffffffffffffffffff";

/// All four stores, with the same secrets for all tests that run at a time.
struct Stores {
    aws: SecretsManager,
    google: GoogleSecrets,
    azure: KeyVault,
    bao: OpenBao,
    clouds: Clouds,
    /// ARN of a secret in another region.
    arn: String,
}

impl Stores {
    fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Stores>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap();
        if let Some(stores) = shared.upgrade() {
            return stores;
        }
        let stores = Arc::new(Self::start());
        *shared = Arc::downgrade(&stores);
        stores
    }

    fn start() -> Self {
        let aws = SecretsManager::start().unwrap();
        aws.put(
            REGION,
            "prod/db",
            r#"{"user":"u-aws","password":"aws-canary-1"}"#,
        )
        .unwrap();
        aws.call(
            REGION,
            "PutSecretValue",
            &json!({ "SecretId": "prod/db", "SecretString": "aws-canary-2" }),
        )
        .unwrap();
        let arn = aws.put(OTHER_REGION, "other/db", "aws-canary-3").unwrap();
        aws.check_signatures().unwrap();
        let google = GoogleSecrets::start(&[
            (
                "projects/project-1/secrets/db/versions/latest",
                b"google-canary-1",
            ),
            (
                "projects/project-1/secrets/db/versions/7",
                b"google-canary-7",
            ),
            (
                "projects/project-2/locations/europe-west3/secrets/db/versions/1",
                b"google-canary-3",
            ),
            (
                "projects/project-1/secrets/binary/versions/latest",
                b"\xff\xfe",
            ),
            (
                "projects/project-1/secrets/corrupt/versions/latest",
                b"google-canary-9",
            ),
        ])
        .unwrap();
        let old = format!("db/{OLD_VERSION}");
        let azure = KeyVault::start(&[("db", "azure-canary-1"), (&old, "azure-canary-2")]).unwrap();
        let bao = OpenBao::start().unwrap();
        bao.mount_kv("kv", "", 2).unwrap();
        bao.mount_kv("old", "", 1).unwrap();
        let put =
            |path: &str, namespace: &str, document| bao.write(path, namespace, &document).unwrap();
        put(
            "kv/data/team/app",
            "",
            json!({ "data": { "password": "bao-canary-1", "number": 12, "dotted.key": "bao-canary-5" } }),
        );
        put(
            "kv/data/team/app",
            "",
            json!({ "data": { "password": "bao-canary-2", "number": 12, "dotted.key": "bao-canary-5", "list": [] } }),
        );
        put(
            "kv/data/gone",
            "",
            json!({ "data": { "password": "bao-canary-8" } }),
        );
        assert_eq!(
            bao.call("DELETE", "kv/data/gone", "", &json!(null))
                .unwrap()
                .0,
            204
        );
        // The members of this one look like those of the second version.
        put(
            "old/app",
            "",
            json!({ "data": "bao-canary-3", "metadata": "x" }),
        );
        put("sys/namespaces/team", "", json!({}));
        bao.mount_kv("kv", "team", 2).unwrap();
        put(
            "kv/data/app",
            "team",
            json!({ "data": { "password": "bao-canary-4" } }),
        );
        let mut routes = vec![
            ("secretsmanager.eu-central-1.amazonaws.com", aws.address()),
            ("secretsmanager.us-west-2.amazonaws.com", aws.address()),
            ("sts.eu-central-1.amazonaws.com", aws.address()),
        ];
        routes.extend(google_secrets::HOSTS.map(|host| (host, google.address())));
        routes.extend(key_vault::HOSTS.map(|host| (host, azure.address())));
        Self {
            clouds: Clouds::start(&routes).unwrap(),
            aws,
            google,
            azure,
            bao,
            arn,
        }
    }

    /// The settings of an operator who uses all stores.
    fn environment(&self) -> Vec<(&'static str, String)> {
        let mut environment = self.clouds.environment().to_vec();
        environment.extend([
            (
                env::CUSTOMER_AWS_ACCESS_KEY_ID,
                self.aws.access_key().to_owned(),
            ),
            (
                env::CUSTOMER_AWS_SECRET_ACCESS_KEY,
                self.aws.secret_key().to_owned(),
            ),
            (env::AWS_SECRETS_REGION, REGION.to_owned()),
            (
                env::CUSTOMER_GOOGLE_CREDENTIALS,
                self.google.key_document().to_owned(),
            ),
            (env::CUSTOMER_AZURE_TENANT_ID, key_vault::TENANT.to_owned()),
            (env::CUSTOMER_AZURE_CLIENT_ID, key_vault::CLIENT.to_owned()),
            (
                env::CUSTOMER_AZURE_CLIENT_SECRET,
                key_vault::CLIENT_SECRET.to_owned(),
            ),
            (env::CUSTOMER_VAULT_ADDRESS, self.bao.url()),
            (env::CUSTOMER_VAULT_TOKEN, self.bao.root_token().to_owned()),
        ]);
        environment
    }
}

/// A run that writes some of its variables where the test looks.
struct Journey {
    machine: Machine,
    repository: Repository,
    look: TempDir,
    environment: Vec<(&'static str, String)>,
}

impl Journey {
    fn new(environment: Vec<(&'static str, String)>) -> Self {
        Self {
            machine: machine(),
            repository: Repository::fixture(),
            look: tempfile::tempdir().unwrap(),
            environment,
        }
    }

    /// A step of scripts with these variables. It writes each into a file of its name.
    fn script(&self, variables: &[(&str, &str)]) -> JobData {
        let look = self.look.path().display();
        let lines = variables
            .iter()
            .map(|(name, _)| format!("printf %s \"${name}\" > '{look}/{name}'"))
            .collect::<Vec<_>>()
            .join("\n");
        let mut job = job::scripts(&self.repository, vec![job::bash(1, &lines)]);
        set(&mut job, variables);
        self.machine.queue(&[&job]);
        job
    }

    fn executor(&self, job: &JobData) -> ExecutorRun<'_> {
        let start = self.machine.executor(job);
        self.environment
            .iter()
            .fold(start, |run, (name, value)| run.env(name, value))
    }

    /// What the script has seen.
    fn seen(&self, name: &str) -> Option<String> {
        fs::read_to_string(self.look.path().join(name)).ok()
    }

    /// Runs a script with these variables, and compares what it has seen.
    fn expect(&self, cases: &[(&str, &str, &str)]) -> Outcome {
        let variables: Vec<_> = cases.iter().map(|(name, text, _)| (*name, *text)).collect();
        let outcome = self.executor(&self.script(&variables)).run().expect_code(0);
        for (name, text, expected) in cases {
            assert_eq!(
                self.seen(name).as_deref(),
                Some(*expected),
                "{name}={text}\n{outcome}"
            );
        }
        outcome
    }

    /// Runs a script with these variables, which must fail before anything is started. Returns the error.
    fn expect_failure(&self, code: i32, variables: &[(&str, &str)]) -> String {
        let outcome = self
            .executor(&self.script(variables))
            .run()
            .expect_code(code);
        assert_eq!(
            files_below(self.look.path()),
            Vec::<PathBuf>::new(),
            "{outcome}"
        );
        assert!(!outcome.to_string().contains("canary"), "{outcome}");
        outcome.error().to_owned()
    }
}

fn set(job: &mut JobData, variables: &[(&str, &str)]) {
    for (name, value) in variables {
        job.environment_variables
            .insert((*name).to_owned(), (*value).to_owned());
    }
}

/// Fails if a text is in the outcome or in a file.
fn assert_nowhere(texts: &[&str], outcome: &Outcome, folder: &Path) {
    let mut places = vec![("the outcome".to_owned(), outcome.to_string())];
    for path in files_below(folder) {
        let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
        places.push((path.display().to_string(), text));
    }
    for (place, content) in &places {
        for text in texts {
            assert!(!content.contains(text), "{text} is in {place}\n{content}");
        }
    }
}

const MODULE: &str = "variable \"plain\" {}\nvariable \"list\" {\n  type = list(string)\n}\nvariable \"map\" {\n  type = map(string)\n}\n\
                      resource \"terraform_data\" \"kept\" {\n  input = sha256(join(\",\", concat([var.plain], var.list, values(var.map))))\n}\n";

/// Inputs and variables, whole and embedded, for a plan and its apply. An apply of a stored plan reads no inputs.
#[test]
fn values_of_every_store_arrive_whole_and_embedded_and_nowhere_else() {
    let stores = Stores::shared();
    let mut journey = Journey::new(stores.environment());
    journey.repository = Repository::module(MODULE);
    let mut plan = job::plan(&journey.repository);
    set(
        &mut plan,
        &[
            ("A", "${ssm:prod/db}"),
            ("B", "postgres://u:${gcp:db}@h/${azure:db@vault-1}"),
            ("C", "${vault:kv/team/app.password}"),
            ("D", "${vault:kv/app.password@team}"),
            ("E", "$${ssm:prod/db} ${HOME} %{if}"),
            ("LOOK", journey.look.path().to_str().unwrap()),
        ],
    );
    plan.variables
        .insert("plain".into(), "x-${ssm:prod/db}".into());
    plan.variables
        .insert("list".into(), "[\"${gcp:db}\", \"b\"]".into());
    plan.variables
        .insert("map".into(), "{\"k\": \"${azure:db@vault-1}\"}".into());
    let mut with_script = plan.clone();
    // What a script prints is masked, in each encoding.
    let script = "for n in A B C D E plain list; do printf %s \"${!n}\" > \"$LOOK/$n\"; echo \"$n=${!n}\"; \
                  printf %s \"${!n}\" | base64; done; tr '\\0' ' ' < /proc/$PPID/cmdline";
    with_script.command_list = vec![job::after(job::bash(1, script))];
    let apply = job::apply_after(&plan);
    journey.machine.queue(&[&with_script, &apply]);
    let outcome = journey.executor(&with_script).run().expect_code(0);
    for (name, expected) in [
        ("A", "aws-canary-2"),
        ("B", "postgres://u:google-canary-1@h/azure-canary-1"),
        ("C", "bao-canary-2"),
        ("D", "bao-canary-4"),
        ("E", "${ssm:prod/db} ${HOME} %{if}"),
        ("plain", "x-aws-canary-2"),
        ("list", "[\"google-canary-1\", \"b\"]"),
    ] {
        assert_eq!(
            journey.seen(name).as_deref(),
            Some(expected),
            "{name}\n{outcome}"
        );
    }
    let summary = "Resolving 8 secret references (ssm 2, gcp 2, azure 2, vault 2).";
    assert!(outcome.log().contains(summary), "{outcome}");
    let canaries = [
        "aws-canary",
        "google-canary",
        "azure-canary",
        "bao-canary",
        "YXdzLWNhbmFye",
    ];
    // Plans hold the inputs, as always.
    let plan_file = journey.machine.plan_file(&plan);
    let kept = fs::read(&plan_file).unwrap();
    fs::remove_file(&plan_file).unwrap();
    assert_nowhere(&canaries, &outcome, journey.machine.folder());
    fs::write(&plan_file, kept).unwrap();

    let outcome = journey.executor(&apply).run().expect_code(0);
    // Those of variables. The inputs are in the plan.
    assert!(
        outcome
            .log()
            .contains("Resolving 5 secret references (ssm 1, gcp 1, azure 1, vault 2)."),
        "{outcome}"
    );
    assert_eq!(journey.machine.resources(&apply), ["terraform_data.kept"]);
}

#[test]
fn without_a_store_nothing_changes() {
    let text = "${ssm:prod/db} $${ssm:x} ${vault:";
    Journey::new(Vec::new()).expect(&[("A", text, text)]);
}
