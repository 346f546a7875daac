use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use job_contract::JobData;
use tempfile::TempDir;

use super::*;

const NEW: Version = Version::new(1, 11, 4);
const OLD: Version = Version::new(1, 5, 7);

struct Fixture {
    folder: TempDir,
    env: ChildEnv,
}

impl Fixture {
    fn new(environment: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for name in ["tree", "private", "home"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        let mut env = ChildEnv::new(Vec::new(), &[], &JobData::default()).unwrap();
        env.set("HOME", folder.path().join("home").to_str().unwrap())
            .unwrap();
        for (name, value) in environment {
            env.set(name, value).unwrap();
        }
        Self { folder, env }
    }

    fn tree(&self) -> PathBuf {
        self.folder.path().join("tree")
    }

    fn write(&mut self, settings: &BackendSettings, version: &Version) -> BackendAccess {
        let private = self.folder.path().join("private");
        let mut access = write(settings, version, &self.tree(), &private, &self.env).unwrap();
        access.provide(&mut self.env).unwrap();
        access
    }

    fn file(&self, name: &str) -> String {
        fs::read_to_string(self.tree().join(name)).unwrap()
    }

    /// Names of the files in the tree.
    fn files(&self) -> Vec<String> {
        let mut names: Vec<_> = fs::read_dir(self.tree())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn variable(&self, name: &str) -> Option<String> {
        Some(self.env.get(name)?.to_str().unwrap().to_owned())
    }
}

fn block(backend: &str, lines: &[&str]) -> String {
    let lines = lines.join("\n    ");
    format!("terraform {{\n  backend \"{backend}\" {{\n    {lines}\n  }}\n}}\n")
}

pub(super) fn s3_settings(handover: Handover, endpoint: Option<&str>) -> BackendSettings {
    BackendSettings::S3 {
        bucket: "b".into(),
        region: "eu-central-1".into(),
        key: "tfstate/o/w/terraform.tfstate".into(),
        login: S3Login::Keys(StaticKeys {
            access_key: SecretString::from("AKIA"),
            secret_key: SecretString::from("hunter2"),
        }),
        role: None,
        handover,
        use_lockfile: true,
        endpoint: endpoint.map(str::to_owned),
        path_style: true,
    }
}

const S3_PLACE: [&str; 3] = [
    r#"bucket = "b""#,
    r#"region = "eu-central-1""#,
    r#"key = "tfstate/o/w/terraform.tfstate""#,
];
const S3_KEYS: [&str; 2] = [r#"access_key = "AKIA""#, r#"secret_key = "hunter2""#];

#[test]
fn the_local_file_is_that_of_the_contract() {
    let mut fixture = Fixture::new(&[]);
    let path = "/d/${x}/%{y}/terraform.tfstate".into();
    fixture.write(&BackendSettings::Local { path }, &NEW);
    assert_eq!(
        fixture.file("terrakube_override.tf"),
        block("local", &[r#"path = "/d/$${x}/%%{y}/terraform.tfstate""#])
    );
}

#[test]
fn s3_with_keys_in_the_file_is_that_of_the_contract() {
    let mut fixture = Fixture::new(&[]);
    fixture.write(&s3_settings(Handover::InFile, None), &NEW);
    let lines = [&S3_PLACE[..], &S3_KEYS, &["use_lockfile = true"]].concat();
    assert_eq!(fixture.file("aws_backend_override.tf"), block("s3", &lines));
    assert_eq!(fixture.variable(AWS_CREDENTIALS), None);
    let mode = fs::metadata(fixture.tree().join("aws_backend_override.tf"));
    assert_eq!(mode.unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn s3_at_another_service_is_spelt_as_the_version_wants_it() {
    let end = [
        "skip_credentials_validation = true",
        "skip_metadata_api_check = true",
        "skip_region_validation = true",
    ];
    let settings = s3_settings(Handover::InFile, Some("http://minio:9000"));
    let mut fixture = Fixture::new(&[]);
    fixture.write(&settings, &NEW);
    let new = [
        "use_lockfile = true",
        r#"endpoints = { s3 = "http://minio:9000" }"#,
        "skip_requesting_account_id = true",
        "skip_s3_checksum = true",
        "use_path_style = true",
    ];
    assert_eq!(
        fixture.file("aws_backend_override.tf"),
        block("s3", &[&S3_PLACE[..], &S3_KEYS, &new, &end].concat())
    );
    fixture.write(&settings, &OLD);
    let old = [
        r#"endpoint = "http://minio:9000""#,
        "force_path_style = true",
    ];
    assert_eq!(
        fixture.file("aws_backend_override.tf"),
        block("s3", &[&S3_PLACE[..], &S3_KEYS, &old, &end].concat())
    );
    let mut in_host = settings.clone();
    if let BackendSettings::S3 { path_style, .. } = &mut in_host {
        *path_style = false;
    }
    for (version, without) in [(&NEW, &new[..4]), (&OLD, &old[..1])] {
        fixture.write(&in_host, version);
        assert_eq!(
            fixture.file("aws_backend_override.tf"),
            block("s3", &[&S3_PLACE[..], &S3_KEYS, without, &end].concat())
        );
    }
}

#[test]
fn s3_keys_stay_outside_where_the_version_allows_it() {
    let mut fixture = Fixture::new(&[]);
    let own = fixture.folder.path().join("home/.aws/credentials");
    fs::create_dir_all(own.parent().unwrap()).unwrap();
    fs::write(&own, "[default]\naws_access_key_id = MINE").unwrap();
    let mut access = fixture.write(&s3_settings(Handover::Outside, None), &NEW);
    let lines = [
        &S3_PLACE[..],
        &[r#"profile = "mayfly-state""#, "use_lockfile = true"],
    ];
    assert_eq!(
        fixture.file("aws_backend_override.tf"),
        block("s3", &lines.concat())
    );
    let expected = "[default]\naws_access_key_id = MINE\n[mayfly-state]\naws_access_key_id = AKIA\n\
                    aws_secret_access_key = hunter2\n";
    let file = fixture.variable(AWS_CREDENTIALS).unwrap();
    assert!(!Path::new(&file).starts_with(fixture.tree()));
    assert_eq!(fs::read_to_string(&file).unwrap(), expected);
    // The second offer, as after scripts, adds nothing.
    access.provide(&mut fixture.env).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), expected);
    // A file that the run names itself is included too.
    let user_file = fixture.folder.path().join("user_file");
    fs::write(&user_file, "[other]\n").unwrap();
    fixture
        .env
        .set(AWS_CREDENTIALS, user_file.to_str().unwrap())
        .unwrap();
    access.provide(&mut fixture.env).unwrap();
    assert_eq!(fixture.variable(AWS_CREDENTIALS).unwrap(), file);
    let merged = fs::read_to_string(&file).unwrap();
    assert!(
        merged.starts_with("[other]\n\n[mayfly-state]\n"),
        "{merged}"
    );
    // It stays included the next time.
    access.provide(&mut fixture.env).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), merged);

    fixture.write(&s3_settings(Handover::Outside, None), &OLD);
    assert!(fixture.file("aws_backend_override.tf").contains("hunter2"));
}

#[test]
fn s3_without_keys_provides_no_credentials() {
    let mut fixture = Fixture::new(&[]);
    fixture.write(&s3_settings(Handover::Omitted, None), &NEW);
    let lines = [&S3_PLACE[..], &["use_lockfile = true"]].concat();
    assert_eq!(fixture.file("aws_backend_override.tf"), block("s3", &lines));
    assert_eq!(fixture.variable(AWS_CREDENTIALS), None);
}

fn azure_settings(handover: Handover) -> BackendSettings {
    BackendSettings::Azurerm {
        resource_group: Some("g".into()),
        account: "account".into(),
        container: "c".into(),
        key: "o/w/terraform.tfstate".into(),
        login: AzureLogin::Key(SecretString::from("aHVudGVyMg==")),
        handover,
    }
}

#[test]
fn azure_is_that_of_the_contract_with_its_key_inside_or_outside() {
    let settings_block = [
        r#"resource_group_name = "g""#,
        r#"storage_account_name = "account""#,
        r#"container_name = "c""#,
        r#"key = "o/w/terraform.tfstate""#,
    ];
    let with_key = [&settings_block[..], &[r#"access_key = "aHVudGVyMg==""#]].concat();
    let mut fixture = Fixture::new(&[]);
    fixture.write(&azure_settings(Handover::InFile), &NEW);
    let file = "azure_backend_override.tf";
    assert_eq!(fixture.file(file), block("azurerm", &with_key));
    assert_eq!(fixture.variable(AZURE_KEY), None);
    fixture.write(&azure_settings(Handover::Outside), &NEW);
    assert_eq!(fixture.file(file), block("azurerm", &settings_block));
    assert_eq!(fixture.variable(AZURE_KEY).unwrap(), "aHVudGVyMg==");

    let mut fixture = Fixture::new(&[(AZURE_KEY, "bWluZQ==")]);
    fixture.write(&azure_settings(Handover::Outside), &NEW);
    assert_eq!(fixture.file(file), block("azurerm", &with_key));
    assert_eq!(fixture.variable(AZURE_KEY).unwrap(), "bWluZQ==");
}

fn gcs_settings(handover: Handover) -> BackendSettings {
    BackendSettings::Gcs {
        bucket: "b".into(),
        prefix: "tfstate/o/w/terraform.tfstate".into(),
        login: GcsLogin::Key(SecretString::from("{}")),
        handover,
    }
}

#[test]
fn gcs_is_that_of_the_contract_with_its_account_inside_or_outside() {
    let settings_block = [
        r#"bucket = "b""#,
        r#"prefix = "tfstate/o/w/terraform.tfstate""#,
    ];
    let mut fixture = Fixture::new(&[]);
    fixture.write(&gcs_settings(Handover::Outside), &NEW);
    assert_eq!(fixture.files(), ["gcp_backend_override.tf"]);
    assert_eq!(
        fixture.file("gcp_backend_override.tf"),
        block("gcs", &settings_block)
    );
    let file = fixture.variable(GCS_CREDENTIALS).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), "{}");
    assert!(!Path::new(&file).starts_with(fixture.tree()));

    let mut fixture = Fixture::new(&[]);
    fixture.write(&gcs_settings(Handover::InFile), &NEW);
    let line = r#"credentials = "GCP_CREDENTIALS_FILE.json""#;
    assert_eq!(
        fixture.file("gcp_backend_override.tf"),
        block("gcs", &[&settings_block[..], &[line]].concat())
    );
    assert_eq!(fixture.file("GCP_CREDENTIALS_FILE.json"), "{}");
    assert_eq!(fixture.variable(GCS_CREDENTIALS), None);
}

#[test]
fn a_link_in_the_repository_does_not_redirect_the_file() {
    let mut fixture = Fixture::new(&[]);
    let elsewhere = fixture.folder.path().join("elsewhere");
    fs::write(&elsewhere, "untouched").unwrap();
    let name = "aws_backend_override.tf";
    std::os::unix::fs::symlink(&elsewhere, fixture.tree().join(name)).unwrap();
    fixture.write(&s3_settings(Handover::InFile, None), &NEW);
    assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "untouched");
    assert!(fixture.file(name).contains("hunter2"));
}

const STORE_ROLE: &str = "arn:aws:iam::123456789012:role/store";

fn s3_by(login: S3Login, role: Option<&str>) -> BackendSettings {
    let BackendSettings::S3 {
        bucket,
        region,
        key,
        endpoint,
        path_style,
        ..
    } = s3_settings(Handover::Outside, None)
    else {
        unreachable!("it is S3");
    };
    BackendSettings::S3 {
        bucket,
        region,
        key,
        login,
        role: role.map(str::to_owned),
        handover: Handover::Outside,
        use_lockfile: false,
        endpoint,
        path_style,
    }
}

#[test]
fn s3_by_an_identity_has_a_profile_that_the_run_does_not_decide() {
    let identity = || S3Login::WebIdentity {
        role: "arn:aws:iam::123456789012:role/pod".into(),
        token_file: "/tokens/aws".into(),
    };
    let of_pod = "role_arn = arn:aws:iam::123456789012:role/pod\nweb_identity_token_file = /tokens/aws\n\
                  role_session_name = mayfly-state\n";
    let end = format!(
        "[mayfly-state]\nrole_arn = {STORE_ROLE}\nsource_profile = mayfly-state-source\nrole_session_name = mayfly-state\n"
    );
    for (login, role, expected) in [
        (identity(), None, format!("[mayfly-state]\n{of_pod}")),
        (
            identity(),
            Some(STORE_ROLE),
            format!("[mayfly-state-source]\n{of_pod}\n{end}"),
        ),
        (
            S3Login::Container,
            Some(STORE_ROLE),
            format!(
                "[mayfly-state]\nrole_arn = {STORE_ROLE}\ncredential_source = EcsContainer\nrole_session_name = mayfly-state\n"
            ),
        ),
    ] {
        let mut fixture = Fixture::new(&[
            ("AWS_ACCESS_KEY_ID", "of-the-run"),
            ("AWS_ROLE_ARN", "of-the-run"),
        ]);
        fixture.write(&s3_by(login, role), &NEW);
        let lines = [&S3_PLACE[..], &[r#"profile = "mayfly-state""#]].concat();
        assert_eq!(fixture.file("aws_backend_override.tf"), block("s3", &lines));
        let file = fs::read_to_string(fixture.variable(AWS_CREDENTIALS).unwrap()).unwrap();
        assert_eq!(file.trim_start(), expected);
    }
}

#[test]
fn s3_by_a_role_of_the_environment_leaves_the_login_to_the_tool() {
    let mut fixture = Fixture::new(&[]);
    fixture.write(&s3_by(S3Login::Container, None), &NEW);
    assert_eq!(
        fixture.file("aws_backend_override.tf"),
        block("s3", &S3_PLACE)
    );
    assert_eq!(fixture.variable(AWS_CREDENTIALS), None);
    // An old tool reads no such profile.
    let mut fixture = Fixture::new(&[]);
    fixture.write(&s3_by(S3Login::Container, Some(STORE_ROLE)), &OLD);
    let role = format!("role_arn = \"{STORE_ROLE}\"");
    let lines = [&S3_PLACE[..], &[&*role]].concat();
    assert_eq!(fixture.file("aws_backend_override.tf"), block("s3", &lines));
}

#[test]
fn credentials_of_the_run_do_not_open_a_store_that_has_its_own() {
    let keys = |handover| s3_settings(handover, None);
    let by_token = || S3Login::WebIdentity {
        role: "arn:aws:iam::123456789012:role/pod".into(),
        token_file: "/tokens/aws".into(),
    };
    for (settings, with_new, with_old) in [
        (keys(Handover::Outside), true, true),
        (keys(Handover::InFile), true, true),
        (keys(Handover::Omitted), false, false),
        (s3_by(by_token(), None), true, false),
        (s3_by(S3Login::Container, None), false, false),
        (s3_by(S3Login::Container, Some(STORE_ROLE)), true, false),
        (s3_by(S3Login::Ambient, None), false, false),
        (s3_by(S3Login::Ambient, Some(STORE_ROLE)), true, false),
        (BackendSettings::Local { path: "/s".into() }, true, true),
    ] {
        assert_eq!(
            has_own_credentials(&settings, &NEW),
            with_new,
            "{settings:?}"
        );
        assert_eq!(
            has_own_credentials(&settings, &OLD),
            with_old,
            "{settings:?}"
        );
    }
}

#[test]
fn azure_by_an_identity_has_ids_and_no_key() {
    let place = [
        r#"storage_account_name = "account""#,
        r#"container_name = "c""#,
        r#"key = "k""#,
        "use_azuread_auth = true",
    ];
    let settings = |identity| BackendSettings::Azurerm {
        resource_group: None,
        account: "account".into(),
        container: "c".into(),
        key: "k".into(),
        login: AzureLogin::Identity(identity),
        handover: Handover::Outside,
    };
    let mut fixture = Fixture::new(&[]);
    fixture.write(
        &settings(AzureIdentity::Workload {
            client_id: "client".into(),
            tenant_id: "tenant".into(),
            token_file: "/tokens/azure".into(),
            authority: None,
        }),
        &NEW,
    );
    let identity = [
        "use_oidc = true",
        r#"client_id = "client""#,
        r#"tenant_id = "tenant""#,
        r#"oidc_token_file_path = "/tokens/azure""#,
    ];
    let expected = block("azurerm", &[&place[..], &identity].concat());
    assert_eq!(fixture.file("azure_backend_override.tf"), expected);
    assert_eq!(fixture.variable(AZURE_KEY), None);
    let mut fixture = Fixture::new(&[]);
    let node = AzureIdentity::Managed {
        client_id: None,
        endpoint: None,
    };
    fixture.write(&settings(node), &NEW);
    let expected = block("azurerm", &[&place[..], &["use_msi = true"]].concat());
    assert_eq!(fixture.file("azure_backend_override.tf"), expected);
}

#[test]
fn gcs_by_an_identity_uses_the_document_of_the_operator() {
    let settings = |document: Option<&str>| BackendSettings::Gcs {
        bucket: "b".into(),
        prefix: "p".into(),
        login: GcsLogin::Identity {
            document: document.map(Into::into),
        },
        handover: Handover::Outside,
    };
    let mut fixture = Fixture::new(&[(GCS_CREDENTIALS, "/of/the/run")]);
    fixture.write(&settings(Some("/of/the/operator.json")), &NEW);
    assert_eq!(fixture.files(), ["gcp_backend_override.tf"]);
    assert_eq!(
        fixture.variable(GCS_CREDENTIALS).unwrap(),
        "/of/the/operator.json"
    );
    let mut fixture = Fixture::new(&[]);
    fixture.write(&settings(None), &NEW);
    assert_eq!(fixture.variable(GCS_CREDENTIALS), None);
}

/// With another method, the tool would take an answer for a stored state.
#[test]
fn the_run_does_not_choose_the_methods_of_the_http_backend() {
    let mut fixture = Fixture::new(&[("TF_HTTP_UPDATE_METHOD", "GET")]);
    let settings = BackendSettings::Http {
        address: "http://127.0.0.1:1/state".into(),
        user: "u".into(),
        password: SecretString::from("p"),
    };
    fixture.write(&settings, &NEW);
    assert_eq!(fixture.files(), [override_file(&settings)]);
    let methods = HTTP_METHODS.map(|(name, _)| fixture.variable(name).unwrap());
    assert_eq!(methods, ["POST", "LOCK", "UNLOCK"]);
}
