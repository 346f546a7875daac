//! S3 and compatible services.

mod assumed_role;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use job_contract::aws::service_host;
use job_contract::env;
use job_contract::keys::{Area, ObjectKey};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::client::{HttpConnector as _, ReqwestConnector};
use secrecy::{ExposeSecret as _, SecretString};
use url::{Host, Url};

use self::assumed_role::AssumedRole;

use crate::clouds::answers::Signs;
use crate::clouds::conditional::{Compared, Requests, Writers};
use crate::clouds::reference::{ObjectUrl, address};
use crate::clouds::remote::{BucketInfo, Remote, client_error, found};
use crate::clouds::session::Kept;
use crate::clouds::state_object::StateObject;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::object_name::key_of;
use crate::request::{Health, RequestTiming, check_tls};
use crate::service::{ObjectService, ServedService};
use crate::settings::{S3Credentials, S3Settings};
use crate::state_backend::{BackendSettings, S3Login};
use crate::state_place::StatePlace;
use crate::transfer::{Condition, Content, Upload};

const SERVICE: &str = "S3";

/// The region in the signature of requests to a service other than AWS, unless a setting names another one (contract 6.5).
const ANY_REGION: &str = "auto";

/// A bucket.
#[derive(Clone, Debug)]
pub(crate) struct S3 {
    remote: Remote,
    settings: S3Settings,
    base: Url,
}

impl S3 {
    pub(crate) fn open(settings: &S3Settings, timing: &RequestTiming) -> Result<Self, StoreError> {
        check_tls(SERVICE)?;
        let BucketAddress {
            service,
            base,
            is_host,
        } = BucketAddress::of(settings);
        let endpoint = if is_host { &base } else { &service };
        let connector = timing.connector(SERVICE, Signs::of_s3(endpoint));
        let health = connector.health.clone();
        let options = timing.client_options(endpoint.scheme() == "http");
        let requests = Requests::new(connector.clone(), options.clone());
        let builder = AmazonS3Builder::new()
            .with_bucket_name(&settings.bucket)
            .with_region(signing_region(settings))
            .with_endpoint(endpoint.as_str().trim_end_matches('/'))
            .with_virtual_hosted_style_request(is_host)
            .with_client_options(options)
            .with_retry(timing.retry_config())
            .with_http_connector(connector);
        let builder = match &settings.credentials {
            S3Credentials::Keys(keys) => builder
                .with_access_key_id(keys.access_key.expose_secret())
                .with_secret_access_key(keys.secret_key.expose_secret()),
            S3Credentials::Role => ambient_credentials(builder, |name| std::env::var(name).ok()),
        };
        let build = |builder: AmazonS3Builder| {
            let built = builder.build();
            built.map_err(|error| client_error(SERVICE, &error))
        };
        let client = match &settings.role {
            None => build(builder.clone())?,
            Some(role) => {
                let base = build(builder.clone())?.credentials().clone();
                let http = ReqwestConnector::default().connect(&timing.client_options(false));
                build(builder.clone().with_credentials(Arc::new(AssumedRole {
                    role: role.clone(),
                    region: settings.region.clone(),
                    base,
                    http: http.map_err(|error| client_error(SERVICE, &error))?,
                    session: Kept::default(),
                })))?
            }
        };
        let builder = builder
            .with_credentials(client.credentials().clone())
            // The request that deletes many objects has no condition.
            .with_disable_bulk_delete(true);
        let writers = Writers::new(Compared::Tag, move |manner| {
            let builder = builder.clone();
            let writer = builder.with_http_connector(requests.with(manner)?);
            Ok(Arc::new(writer.build()?))
        });
        let bucket = BucketInfo {
            service: SERVICE,
            name: settings.bucket.clone(),
            setting: env::AWS_BUCKET,
            credential_settings: match settings.credentials {
                S3Credentials::Keys(_) => {
                    "`AwsTerraformStateAccessKey` and `AwsTerraformStateSecretKey`"
                }
                S3Credentials::Role => "the role, because `AwsEnableRoleAuth` is `true`",
            },
        };
        Ok(Self {
            remote: Remote {
                client: Arc::new(client),
                writers,
                bucket,
                health,
            },
            settings: settings.clone(),
            base,
        })
    }

    /// A reference is an address in any style: the stock executor's client chooses its own, and a service may have
    /// several hosts. If a bucket is named like an area, the same text has several meanings. So the readings are
    /// tried from the most certain one to the stock one, which looks for an area anywhere.
    fn key_behind(&self, reference: &str) -> Option<ObjectKey> {
        let url = ObjectUrl::parse(reference)?;
        let base = ObjectUrl::of(&self.base)?;
        let bucket = &self.settings.bucket;
        let of_host = url.host.starts_with(&format!("{bucket}."));
        let in_path = || url.path.strip_prefix(bucket)?.strip_prefix('/');
        let anywhere = || {
            let marker = format!("/{}/", Area::State.bucket_prefix());
            url.path.find(&marker).map(|at| &url.path[at + 1..])
        };
        [
            url.below(&base),
            of_host.then_some(url.path.as_str()),
            in_path(),
            Some(url.path.as_str()),
            anywhere(),
        ]
        .into_iter()
        .flatten()
        .find_map(key_of)
    }

    fn reference_of(&self, key: &ObjectKey) -> String {
        address(&self.base, &key.in_bucket())
    }
}

#[async_trait]
impl ObjectService for S3 {
    fn health(&self) -> Option<&Health> {
        Some(&self.remote.health)
    }

    async fn reference(&self, key: &ObjectKey) -> Result<String, StoreError> {
        Ok(self.reference_of(key))
    }

    async fn unchanged(&self, key: &ObjectKey) -> Result<Condition, StoreError> {
        self.remote.unchanged(&key.in_bucket()).await
    }

    async fn put(
        &self,
        key: &ObjectKey,
        bytes: Bytes,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        self.remote.put(&key.in_bucket(), bytes, condition).await
    }

    async fn put_file(
        &self,
        key: &ObjectKey,
        source: &Path,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let remote = &self.remote;
        remote.put_file(&key.in_bucket(), source, condition).await
    }

    async fn fetch(
        &self,
        reference: &str,
        target: &Path,
        limit: u64,
    ) -> Result<Digest, StoreError> {
        let key = found(self.key_behind(reference), reference)?;
        self.remote.fetch(&key.in_bucket(), target, limit).await
    }

    async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError> {
        self.remote.read(&key.in_bucket()).await
    }

    fn backend(&self, organization: &str, workspace: &str) -> BackendSettings {
        let settings = &self.settings;
        BackendSettings::S3 {
            bucket: settings.bucket.clone(),
            region: settings.region.clone(),
            key: ObjectKey::backend_state(organization, workspace).in_bucket(),
            login: match &settings.credentials {
                S3Credentials::Keys(keys) => S3Login::Keys(keys.clone()),
                S3Credentials::Role => ambient_s3(|name| std::env::var(name).ok()),
            },
            role: settings.role.clone(),
            handover: settings.handover,
            use_lockfile: settings.use_lockfile,
            endpoint: settings.endpoint.as_ref().map(|given| given.text.clone()),
            path_style: settings.path_style,
        }
    }

    fn secrets(&self) -> Vec<SecretString> {
        match &self.settings.credentials {
            S3Credentials::Keys(keys) => vec![keys.secret_key.clone()],
            S3Credentials::Role => Vec::new(),
        }
    }
}

#[async_trait]
impl ServedService for S3 {
    fn reference_of(&self, key: &ObjectKey) -> String {
        self.reference_of(key)
    }

    fn key_behind(&self, reference: &str) -> Option<ObjectKey> {
        self.key_behind(reference)
    }

    async fn open(&self, key: &ObjectKey) -> Result<Option<Content>, StoreError> {
        self.remote.open(&key.in_bucket()).await
    }

    async fn put_upload(
        &self,
        key: &ObjectKey,
        upload: Upload,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let remote = &self.remote;
        remote.put_upload(&key.in_bucket(), upload, condition).await
    }

    fn state(&self, organization: &str, workspace: &str) -> Arc<dyn StatePlace> {
        let name = ObjectKey::backend_state(organization, workspace).in_bucket();
        let lock = self.settings.use_lockfile;
        Arc::new(StateObject {
            remote: self.remote.clone(),
            lock: lock.then(|| format!("{name}.tflock")),
            name,
        })
    }
}

/// The address of a bucket.
struct BucketAddress {
    service: Url,
    base: Url,
    /// Whether the bucket's name is part of the host's.
    is_host: bool,
}

impl BucketAddress {
    fn of(settings: &S3Settings) -> Self {
        let bucket = &settings.bucket;
        // With role authentication the stock client knows no endpoint (contract 6.5).
        let endpoint = match (&settings.endpoint, &settings.credentials) {
            (Some(endpoint), S3Credentials::Keys(_)) => Some(&endpoint.url),
            _ => None,
        };
        let aws = || service_host("s3", &settings.region);
        let url = |text: &str| Url::parse(text).expect("regions and buckets were checked");
        let service = endpoint.map_or_else(|| url(&format!("https://{}", aws())), Url::clone);
        let in_path = endpoint.is_some() && settings.path_style;
        if let Some(base) = with_bucket(&service, bucket).filter(|_| !in_path) {
            return Self {
                service,
                base,
                is_host: true,
            };
        }
        let base = url(&address(&service, bucket));
        Self {
            service,
            base,
            is_host: false,
        }
    }
}

/// The service's address with the bucket in its host. `None` if the bucket has to be in the path, as at an IP address.
fn with_bucket(service: &Url, bucket: &str) -> Option<Url> {
    let Some(Host::Domain(host)) = service.host() else {
        return None;
    };
    let host = format!("{bucket}.{host}");
    let mut address = service.clone();
    address.set_host(Some(&host)).ok()?;
    Some(address).filter(|_| fits_in_host(bucket))
}

/// Whether certificates of AWS and of other services cover the host name of this bucket.
fn fits_in_host(bucket: &str) -> bool {
    bucket
        .bytes()
        .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}

fn signing_region(settings: &S3Settings) -> &str {
    match (&settings.endpoint, &settings.credentials) {
        (Some(_), S3Credentials::Keys(_)) => {
            settings.endpoint_region.as_deref().unwrap_or(ANY_REGION)
        }
        _ => &settings.region,
    }
}

/// Adds the credentials that the environment offers: keys, a web identity (IRSA), the credentials endpoint of ECS, or the
/// pod identity of EKS. Without any of them the client asks the machine's metadata service.
fn ambient_credentials(
    builder: AmazonS3Builder,
    own: impl Fn(&str) -> Option<String>,
) -> AmazonS3Builder {
    use AmazonS3ConfigKey as K;
    [
        ("AWS_ACCESS_KEY_ID", K::AccessKeyId),
        ("AWS_SECRET_ACCESS_KEY", K::SecretAccessKey),
        ("AWS_SESSION_TOKEN", K::Token),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", K::WebIdentityTokenFile),
        ("AWS_ROLE_ARN", K::RoleArn),
        ("AWS_ROLE_SESSION_NAME", K::RoleSessionName),
        (
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            K::ContainerCredentialsRelativeUri,
        ),
        (
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            K::ContainerCredentialsFullUri,
        ),
        (
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
            K::ContainerAuthorizationTokenFile,
        ),
        ("AWS_EC2_METADATA_SERVICE_ENDPOINT", K::MetadataEndpoint),
    ]
    .into_iter()
    .filter_map(|(name, key)| Some((key, own(name).filter(|value| !value.is_empty())?)))
    .fold(builder, |builder, (key, value)| {
        builder.with_config(key, value)
    })
}

/// The login that a pod or the environment offers for S3. It reads the variables in the order of the client for artifacts.
fn ambient_s3(own: impl Fn(&str) -> Option<String>) -> S3Login {
    let own = |name: &str| own(name).filter(|value| !value.is_empty());
    if own("AWS_ACCESS_KEY_ID").is_some() {
        return S3Login::Ambient;
    }
    if let (Some(role), Some(file)) = (own("AWS_ROLE_ARN"), own("AWS_WEB_IDENTITY_TOKEN_FILE")) {
        let token_file = file.into();
        return S3Login::WebIdentity { role, token_file };
    }
    let agent = [
        "AWS_CONTAINER_CREDENTIALS_FULL_URI",
        "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    ];
    if agent.into_iter().any(|name| own(name).is_some()) {
        S3Login::Container
    } else {
        S3Login::Ambient
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    use crate::state_backend::{Handover, StaticKeys};
    use runtime::setting::HttpUrl;

    fn store(bucket: &str, endpoint: Option<&str>) -> S3 {
        // A second installation leaves the first in force.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let settings = S3Settings {
            bucket: bucket.to_owned(),
            region: "eu-central-1".to_owned(),
            endpoint: endpoint.map(|text| HttpUrl {
                url: Url::parse(text).unwrap(),
                text: text.to_owned(),
            }),
            endpoint_region: None,
            path_style: true,
            credentials: S3Credentials::Keys(StaticKeys {
                access_key: SecretString::from("AKIA"),
                secret_key: SecretString::from("hunter2"),
            }),
            role: None,
            handover: Handover::Outside,
            use_lockfile: false,
        };
        S3::open(&settings, &RequestTiming::default()).unwrap()
    }

    fn plan() -> ObjectKey {
        ObjectKey::plan("o", "w", "1", "s")
    }

    const PLAN: &str = "tfstate/o/w/1/s/terraformLibrary.tfPlan";
    const MINIO: Option<&str> = Some("http://minio:9000");

    #[rstest]
    #[case("states", None, "https://states.s3.eu-central-1.amazonaws.com/")]
    #[case("my.states", None, "https://s3.eu-central-1.amazonaws.com/my.states/")]
    #[case("States", None, "https://s3.eu-central-1.amazonaws.com/States/")]
    #[case("states", MINIO, "http://minio:9000/states/")]
    #[case("states", Some("https://gate/s3/"), "https://gate/s3/states/")]
    fn an_object_has_the_address_its_bucket_calls_for(
        #[case] bucket: &str,
        #[case] endpoint: Option<&str>,
        #[case] base: &str,
    ) {
        let store = store(bucket, endpoint);
        let reference = store.reference_of(&plan());
        assert_eq!(reference, format!("{base}{PLAN}"));
        assert_eq!(store.key_behind(&reference), Some(plan()));
    }

    #[rstest]
    // Every style and host the stock executor's client may have chosen.
    #[case("states", None, "https://states.s3.amazonaws.com/")]
    #[case("states", None, "https://s3.eu-central-1.amazonaws.com/states/")]
    #[case("states", MINIO, "https://minio.public.test/states/")]
    #[case("states", MINIO, "http://states.minio:9000/")]
    #[case("states", MINIO, "https://gate.test/some/folder/states/")]
    // A bucket that is named like the area, which the stock rule gets wrong.
    #[case("tfstate", None, "https://tfstate.s3.eu-central-1.amazonaws.com/")]
    #[case("tfstate", None, "https://s3.eu-central-1.amazonaws.com/tfstate/")]
    #[case("tfstate", MINIO, "http://minio:9000/tfstate/")]
    #[case("tfstate", MINIO, "https://tfstate.s3.eu-central-1.amazonaws.com/")]
    #[case("tfstate", MINIO, "https://minio.public.test/tfstate/")]
    #[case("tfstate", MINIO, "https://cname.test/")]
    fn references_of_the_stock_executor_lead_to_their_object(
        #[case] bucket: &str,
        #[case] endpoint: Option<&str>,
        #[case] base: &str,
    ) {
        let store = store(bucket, endpoint);
        let found = store.key_behind(&format!("{base}{PLAN}"));
        assert_eq!(found, Some(plan()), "{base}");
        let encoded = PLAN.replace("/terraform", "/%74erraform");
        assert_eq!(store.key_behind(&format!("{base}{encoded}")), Some(plan()));
    }

    #[rstest]
    #[case("/data/local/state/o/w/1/s/terraformLibrary.tfPlan")]
    #[case("http://minio:9000/states/elsewhere/o")]
    #[case("http://minio:9000/states/tfstate/../o")]
    #[case("http://minio:9000/states/tfstate/a/%2e%2e/%2e%2e/b")]
    #[case("not an address")]
    fn what_names_no_object_is_refused(#[case] reference: &str) {
        assert_eq!(store("states", MINIO).key_behind(reference), None);
    }

    #[rstest]
    #[case("states", "https://s3.test:9000/", "https://states.s3.test:9000/")]
    #[case("states", "https://gate/s3/", "https://states.gate/s3/")]
    // These have no host of their own.
    #[case("my.states", "https://s3.test/", "https://s3.test/my.states/")]
    #[case("states", "http://127.0.0.1:9000", "http://127.0.0.1:9000/states/")]
    fn a_bucket_is_in_the_host_of_a_service_that_wants_it_there(
        #[case] bucket: &str,
        #[case] endpoint: &str,
        #[case] base: &str,
    ) {
        let mut settings = store(bucket, Some(endpoint)).settings;
        settings.path_style = false;
        settings.endpoint_region = Some("local".to_owned());
        assert_eq!(signing_region(&settings), "local");
        let store = S3::open(&settings, &RequestTiming::default()).unwrap();
        let reference = store.reference_of(&plan());
        assert_eq!(reference, format!("{base}{PLAN}"));
        assert_eq!(store.key_behind(&reference), Some(plan()));
    }

    #[test]
    fn another_service_is_signed_for_without_a_region() {
        assert_eq!(signing_region(&store("b", MINIO).settings), "auto");
        assert_eq!(signing_region(&store("b", None).settings), "eu-central-1");
        let mut settings = store("b", MINIO).settings;
        settings.credentials = S3Credentials::Role;
        assert_eq!(signing_region(&settings), "eu-central-1");
        let store = S3::open(&settings, &RequestTiming::default()).unwrap();
        assert!(
            store
                .reference_of(&plan())
                .contains("b.s3.eu-central-1.amazonaws.com")
        );
    }

    #[test]
    fn the_login_of_a_pod_is_the_one_of_the_client() {
        let web = [("AWS_ROLE_ARN", "r"), ("AWS_WEB_IDENTITY_TOKEN_FILE", "/t")];
        let agent = [(
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "http://169.254.170.23/",
        )];
        let keys = [("AWS_ACCESS_KEY_ID", "AKIA")];
        let of = |pairs: &[(&str, &str)]| {
            ambient_s3(|name| {
                let mut found = pairs.iter().filter(|(known, _)| *known == name);
                found.next().map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(matches!(
            of(&[web, [agent[0], ("A", "b")]].concat()),
            S3Login::WebIdentity { .. }
        ));
        assert!(matches!(of(&agent), S3Login::Container));
        assert!(matches!(of(&[&keys[..], &web].concat()), S3Login::Ambient));
        assert!(matches!(of(&[]), S3Login::Ambient));
    }
}
