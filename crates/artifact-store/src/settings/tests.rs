use super::*;
use clap::Parser;
use runtime::setting::from_variables;

#[derive(Debug, Parser)]
struct Program {
    #[command(flatten)]
    store: StoreArgs,
}

fn args(settings: &[(&str, &str)]) -> StoreArgs {
    from_variables(settings)
}

fn resolve(settings: &[(&str, &str)]) -> Result<StoreSettings, StoreConfigError> {
    args(settings).resolve(Path::new("/data"))
}

fn errors(settings: &[(&str, &str)]) -> String {
    resolve(settings).unwrap_err().to_string()
}

const S3: &[(&str, &str)] = &[
    (env::STATE_TYPE, "AwsTerraformStateImpl"),
    (env::AWS_BUCKET, "b"),
    (env::AWS_REGION, "eu-central-1"),
    (env::AWS_ACCESS_KEY, "AKIA"),
    (env::AWS_SECRET_KEY, "hunter2"),
];

fn s3(more: &[(&str, &str)]) -> S3Settings {
    match resolve(&[S3, more].concat()).unwrap() {
        StoreSettings::S3(settings) => settings,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_local_store_needs_nothing() {
    let StoreSettings::Local { data_dir } = resolve(&[]).unwrap() else {
        panic!("not local");
    };
    assert_eq!(data_dir, Path::new("/data"));
}

#[test]
fn all_missing_and_wrong_settings_are_reported_at_once() {
    let told = errors(&[
        (env::STATE_TYPE, "AwsTerraformStateImpl"),
        (env::AWS_BUCKET, "no/bucket"),
        (env::AWS_USE_LOCKFILE, "perhaps"),
        (env::AWS_ENDPOINT, "minio:9000"),
        (env::AWS_SECRET_KEY, "hunter2"),
    ]);
    for name in [
        "`AwsTerraformStateBucketName` is `no/bucket`",
        "`AwsTerraformStateRegion` is not set",
        "`AwsUseLockfile` is `perhaps`, expected",
        "`AwsEndpoint` is not an http or https URL",
        "`AwsTerraformStateAccessKey` is not set",
    ] {
        assert!(told.contains(name), "{told}");
    }
    assert!(!told.contains("SecretKey"), "{told}");
    let azure = errors(&[
        (env::STATE_TYPE, "AzureTerraformStateImpl"),
        (env::AZURE_ACCESS_KEY, "!hunter2!"),
    ]);
    assert!(azure.contains("`AzureTerraformStateStorageAccountName` is not set"));
    assert!(azure.contains("`AzureTerraformStateStorageContainerName` is not set"));
    assert!(azure.contains("`AzureTerraformStateStorageAccessKey` is not base64"));
    assert!(!azure.contains("hunter2"), "{azure}");
    let gcs = errors(&[
        (env::STATE_TYPE, "GcpTerraformStateImpl"),
        (env::GCP_CREDENTIALS, &STANDARD.encode("{}")),
    ]);
    assert!(gcs.contains("`GcpTerraformStateCredentials` is not base64 of"));
    assert!(gcs.contains("`GcpTerraformStateBucketName` is not set"));
}

#[test]
fn the_error_of_an_unknown_type_has_the_correct_spelling() {
    let told = errors(&[(env::STATE_TYPE, "AwsTerraformState")]);
    assert!(told.contains("spelt `AwsTerraformStateImpl`"), "{told}");
    let told = errors(&[(env::STATE_TYPE, "GCP")]);
    assert!(told.contains("spelt `GcpTerraformStateImpl`"), "{told}");
    let told = errors(&[(env::STATE_TYPE, "nfs")]);
    for kind in StoreKind::ALL {
        assert!(told.contains(kind.name()), "{told}");
    }
}

#[test]
fn placeholders_and_blanks_are_not_set() {
    let settings = s3(&[
        (env::AWS_ENDPOINT, "${AwsEndpoint}"),
        (env::AWS_INCLUDE_BACKEND_KEYS, ""),
        (env::AWS_ENABLE_ROLE_AUTH, " "),
    ]);
    assert!(settings.endpoint.is_none());
    assert_eq!(settings.handover, Handover::Outside);
    let told = errors(&[S3, &[(env::AWS_REGION, "${AwsTerraformStateRegion}")]].concat());
    assert!(told.contains("`AwsTerraformStateRegion` is not set"));
}

#[test]
fn keys_go_into_the_backend_file_only_when_they_are_asked_for_there() {
    let handover = |settings: &[(&str, &str)]| s3(settings).handover;
    let (include, own) = (env::AWS_INCLUDE_BACKEND_KEYS, env::BACKEND_CREDENTIALS);
    assert_eq!(handover(&[]), Handover::Outside);
    assert_eq!(handover(&[(own, "file")]), Handover::InFile);
    assert_eq!(handover(&[(include, "TRUE")]), Handover::InFile);
    assert_eq!(
        handover(&[(include, "false"), (own, "file")]),
        Handover::Omitted
    );
    let role = (env::AWS_ENABLE_ROLE_AUTH, "true");
    assert_eq!(handover(&[role, (include, "true")]), Handover::Outside);
    assert_eq!(handover(&[role, (include, "false")]), Handover::Omitted);
    let told = errors(&[S3, &[(own, "inside")]].concat());
    assert!(
        told.contains("`MAYFLY_BACKEND_CREDENTIALS` is `inside`, expected `outside` or `file`")
    );
}

#[test]
fn settings_of_services_like_s3_are_read_or_refused() {
    let settings = s3(&[(env::AWS_ENDPOINT, "https://minio.test")]);
    assert_eq!(
        (settings.endpoint_region, settings.path_style),
        (None, true)
    );
    let settings = s3(&[
        (env::AWS_ENDPOINT_REGION, "us-east-1"),
        (env::AWS_PATH_STYLE, "false"),
        (env::AWS_CHUNKED_ENCODING, "perhaps"),
        (
            env::AWS_CHECKSUM_VALIDATION,
            "${AwsChecksumValidationEnabled}",
        ),
    ]);
    let region = settings.endpoint_region.as_deref();
    assert_eq!((region, settings.path_style), (Some("us-east-1"), false));
    let wrong = [
        (env::AWS_ENDPOINT_REGION, "no/region"),
        (env::AWS_PATH_STYLE, "perhaps"),
    ];
    let told = errors(&[S3, &wrong].concat());
    for (name, value) in wrong {
        assert!(told.contains(&format!("`{name}` is `{value}`")), "{told}");
    }
}

#[test]
fn path_style_takes_the_words_of_spring() {
    let words = [("True", "FALSE"), ("yes", "No"), ("ON", "off"), ("1", "0")];
    for (on, off) in words {
        assert!(s3(&[(env::AWS_PATH_STYLE, on)]).path_style, "{on}");
        assert!(!s3(&[(env::AWS_PATH_STYLE, off)]).path_style, "{off}");
    }
}

#[test]
fn role_authentication_needs_no_keys() {
    let settings = s3(&[
        (env::AWS_ENABLE_ROLE_AUTH, "true"),
        (env::AWS_ACCESS_KEY, ""),
        (env::AWS_SECRET_KEY, ""),
    ]);
    assert!(matches!(settings.credentials, S3Credentials::Role));
}

#[test]
fn a_service_account_may_be_broken_over_lines() {
    let json = r#"{"client_email":"a@b","private_key":"hunter2","token_uri":"http://x"}"#;
    let encoded = STANDARD.encode(json);
    let (front, back) = encoded.split_at(20);
    let resolved = resolve(&[
        (env::STATE_TYPE, "GcpTerraformStateImpl"),
        (env::GCP_BUCKET, "b"),
        (env::GCP_CREDENTIALS, &format!("{front}\n{back}\n")),
    ]);
    let StoreSettings::Gcs(settings) = resolved.unwrap() else {
        panic!("not GCS");
    };
    let GcsLogin::Key(key) = settings.login else {
        panic!("no key");
    };
    assert_eq!(key.expose_secret(), json);
}

#[test]
fn credentials_are_shown_nowhere() {
    let shown = format!("{:?} {:?}", args(S3), resolve(S3));
    assert!(
        !shown.contains("hunter2") && !shown.contains("AKIA"),
        "{shown}"
    );
    let program = Program::parse_from(["x", "--aws-secret-key", "hunter2"]);
    assert!(!format!("{program:?}").contains("hunter2"));
}

#[test]
fn an_identity_needs_no_key() {
    let azure = [
        (env::STATE_TYPE, "AzureTerraformStateImpl"),
        (env::AZURE_ACCOUNT, "account"),
        (env::AZURE_CONTAINER, "states"),
        (env::STORE_AZURE_IDENTITY, "true"),
    ];
    let StoreSettings::Azure(settings) = resolve(&azure).unwrap() else {
        panic!("not Azure");
    };
    assert!(matches!(settings.login, AzureLogin::Identity(_)));
    let gcs = [
        (env::STATE_TYPE, "GcpTerraformStateImpl"),
        (env::GCP_BUCKET, "b"),
        (env::STORE_GCP_IDENTITY, "true"),
    ];
    let StoreSettings::Gcs(settings) = resolve(&gcs).unwrap() else {
        panic!("not GCS");
    };
    assert!(matches!(settings.login, GcsLogin::Identity { .. }));
    let role = "arn:aws:iam::123456789012:role/store";
    assert_eq!(
        s3(&[(env::STORE_AWS_ROLE, role)]).role.as_deref(),
        Some(role)
    );
    let told = errors(&[S3, &[(env::STORE_AWS_ROLE, "store")]].concat());
    assert!(
        told.contains("`MAYFLY_STORE_AWS_ROLE_ARN` is `store`, which is no ARN"),
        "{told}"
    );
}

fn own<'a>(pairs: &'a [(&str, &str)]) -> impl Fn(&str) -> Option<String> + 'a {
    |name| {
        let mut found = pairs.iter().filter(|(known, _)| *known == name);
        found.next().map(|(_, value)| (*value).to_owned())
    }
}

#[test]
fn azure_has_an_application_only_with_all_that_it_needs() {
    let all = [
        ("AZURE_CLIENT_ID", "c"),
        ("AZURE_TENANT_ID", "t"),
        ("AZURE_FEDERATED_TOKEN_FILE", "/f"),
    ];
    assert!(matches!(
        azure_identity(own(&all)),
        AzureIdentity::Workload { .. }
    ));
    let managed = |more: &[(&str, &str)], endpoint: Option<&str>| {
        let found = azure_identity(own(&[&all[..2], more].concat()));
        let expected = AzureIdentity::Managed {
            client_id: Some("c".to_owned()),
            endpoint: endpoint.map(str::to_owned),
        };
        assert_eq!(found, expected);
    };
    let service = [
        ("IDENTITY_ENDPOINT", "http://127.0.0.1:41/msi/token"),
        ("IDENTITY_HEADER", "h"),
    ];
    managed(&[], None);
    managed(&service, Some(service[0].1));
    managed(&service[..1], None);
}
