//! Google Cloud Storage.

mod federated;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use job_contract::env;
use job_contract::keys::ObjectKey;
use object_store::client::{HttpConnector as _, ReqwestConnector};
use object_store::gcp::GoogleCloudStorageBuilder;
use runtime::regular_file;
use secrecy::{ExposeSecret as _, SecretString};
use url::Url;

use self::federated::Federated;

use crate::clouds::answers::Signs;
use crate::clouds::conditional::{Compared, Requests, Writers};
use crate::clouds::reference::{ObjectUrl, address};
use crate::clouds::remote::{BucketInfo, Remote, client_error, found};
use crate::clouds::session::failed;
use crate::clouds::state_object::StateObject;
use crate::digest::Digest;
use crate::error::StoreError;
use crate::object_name::key_of;
use crate::request::{Health, RequestTiming, check_tls};
use crate::service::{ObjectService, ServedService};
use crate::settings::GcsSettings;
use crate::state_backend::{BackendSettings, GcsLogin};
use crate::state_place::StatePlace;
use crate::transfer::{Condition, Content, Upload};

const SERVICE: &str = "Google Cloud Storage";
const MAX_DOCUMENT_BYTES: u64 = 1 << 16;

/// The host in references. People open it in a browser; the API and its executors use only the path.
const REFERENCE_BASE: &str = "https://storage.cloud.google.com";

/// A bucket.
#[derive(Clone, Debug)]
pub(crate) struct Gcs {
    remote: Remote,
    settings: GcsSettings,
    /// A key that opens the bucket.
    key: Option<SecretString>,
    base: Url,
}

impl Gcs {
    pub(crate) fn open(settings: &GcsSettings, timing: &RequestTiming) -> Result<Self, StoreError> {
        check_tls(SERVICE)?;
        let allow_http = settings.endpoint.scheme() == "http";
        let connector = timing.connector(SERVICE, Signs::of_gcs(&settings.endpoint));
        let health = connector.health.clone();
        let (builder, key) = logged_in(settings, timing)?;
        let options = timing.client_options(allow_http);
        let builder = builder
            .with_bucket_name(&settings.bucket)
            .with_base_url(settings.endpoint.as_str().trim_end_matches('/'))
            .with_client_options(options.clone())
            .with_retry(timing.retry_config());
        let client = builder.clone().with_http_connector(connector.clone());
        let client = client
            .build()
            .map_err(|error| client_error(SERVICE, &error))?;
        let builder = builder.with_credentials(client.credentials().clone());
        let requests = Requests::new(connector, options);
        let writers = Writers::new(Compared::Generation, move |manner| {
            let builder = builder.clone();
            let writer = builder.with_http_connector(requests.with(manner)?);
            Ok(Arc::new(writer.build()?))
        });
        let bucket = BucketInfo {
            service: SERVICE,
            name: settings.bucket.clone(),
            setting: env::GCP_BUCKET,
            credential_settings: match settings.login {
                GcsLogin::Key(_) => "`GcpTerraformStateCredentials`",
                GcsLogin::Identity { .. } => {
                    "the identity of the pod or of the node, because `MAYFLY_STORE_GCP_IDENTITY` is `true`"
                }
            },
        };
        let host = Url::parse(REFERENCE_BASE).expect("an address");
        let base = address(&host, &settings.bucket);
        Ok(Self {
            remote: Remote {
                client: Arc::new(client),
                writers,
                bucket,
                health,
            },
            settings: settings.clone(),
            key,
            base: Url::parse(&base).expect("an address below an address"),
        })
    }

    /// The path begins with the bucket for every host.
    fn key_behind(&self, reference: &str) -> Option<ObjectKey> {
        let url = ObjectUrl::parse(reference)?;
        let name = url.path.strip_prefix(&self.settings.bucket)?;
        key_of(name.strip_prefix('/')?)
    }

    fn reference_of(&self, key: &ObjectKey) -> String {
        address(&self.base, &key.in_bucket())
    }
}

/// A builder with the credentials, and the key among them. Variables of the process decide nothing, except that they name the node's
/// metadata server.
fn logged_in(
    settings: &GcsSettings,
    timing: &RequestTiming,
) -> Result<(GoogleCloudStorageBuilder, Option<SecretString>), StoreError> {
    let builder = GoogleCloudStorageBuilder::new();
    let path = match &settings.login {
        GcsLogin::Key(key) => {
            let builder = builder.with_service_account_key(key.expose_secret());
            return Ok((builder, Some(key.clone())));
        }
        GcsLogin::Identity { document: None } => return Ok((builder, None)),
        GcsLogin::Identity {
            document: Some(path),
        } => path,
    };
    let unusable = |problem: String| {
        let text = format!("`{}`: {problem}", path.display());
        client_error(SERVICE, &failed(SERVICE, text))
    };
    let text = regular_file::read_text(path, MAX_DOCUMENT_BYTES);
    let text = text.map_err(|error| unusable(error.to_string()))?;
    if !federated::is_federated(&text) {
        let builder = builder.with_application_credentials(path.to_string_lossy());
        return Ok((builder, Some(text.into())));
    }
    let http = ReqwestConnector::default().connect(&timing.client_options(false));
    let http = http.map_err(|error| client_error(SERVICE, &error))?;
    let federated = Federated::new(&text, http).map_err(unusable)?;
    Ok((builder.with_credentials(Arc::new(federated)), None))
}

#[async_trait]
impl ObjectService for Gcs {
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
        BackendSettings::Gcs {
            bucket: self.settings.bucket.clone(),
            prefix: ObjectKey::backend_state(organization, workspace).in_bucket(),
            login: self.settings.login.clone(),
            handover: self.settings.handover,
        }
    }

    fn secrets(&self) -> Vec<SecretString> {
        self.key.iter().cloned().collect()
    }
}

#[async_trait]
impl ServedService for Gcs {
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
        // The backend appends the name of the tool's workspace to its prefix.
        let prefix = ObjectKey::backend_state(organization, workspace).in_bucket();
        Arc::new(StateObject {
            remote: self.remote.clone(),
            name: format!("{prefix}/default.tfstate"),
            lock: Some(format!("{prefix}/default.tflock")),
        })
    }
}
