//! Azure Blob Storage. Each area has its own container, which is created if it is missing (contract 6.2).

mod holder;
mod state;

use std::path::Path;
use std::sync::Arc;

use async_trait::async_trait;
use backon::{ExponentialBuilder, Retryable as _};
use bytes::Bytes;
use job_contract::env;
use job_contract::keys::{Area, ObjectKey};
use object_store::azure::{AzureCredentialProvider, MicrosoftAzure, MicrosoftAzureBuilder};
use object_store::client::{HttpConnector, HttpRequest, HttpRequestBody};
use object_store::{ClientOptions, HeaderMap, HeaderValue};
use secrecy::{ExposeSecret as _, SecretString};
use url::Url;

use crate::clouds::answers::Signs;
use crate::clouds::conditional::{Compared, Writers};
use crate::clouds::reference::{ObjectUrl, address};
use crate::clouds::remote::{BucketInfo, Remote, client_error, found};
use crate::digest::Digest;
use crate::error::{Answer, StoreError};
use crate::object_name::key_of;
use crate::request::{Health, RequestTiming, check_tls};
use crate::service::{ObjectService, ServedService};
use crate::settings::AzureSettings;
use crate::state_backend::{AzureIdentity, AzureLogin, BackendSettings};
use crate::state_place::StatePlace;
use crate::transfer::{Condition, Content, Upload};

use self::holder::{Holder, Signer};
use self::state::StateBlob;

const SERVICE: &str = "Azure Blob Storage";
const CREDENTIAL_SETTINGS: &str =
    "`AzureTerraformStateStorageAccountName` and `AzureTerraformStateStorageAccessKey`";

const IDENTITY_SETTINGS: &str =
    "the identity of the pod or of the node, because `MAYFLY_STORE_AZURE_IDENTITY` is `true`";

/// The error code of a condition that is not true.
const CONDITION_CODE: &str = "ConditionNotMet";

/// A request that the client of `object_store` has no call for.
struct Call<'a> {
    /// For messages.
    action: &'static str,
    method: &'static str,
    /// A container, or a blob with its container.
    object: &'a str,
    query: Option<&'static str>,
    headers: HeaderMap,
}

/// A storage account.
#[derive(Clone, Debug)]
pub(crate) struct Azure {
    state: Remote,
    output: Remote,
    /// The container of backend states.
    backend: Remote,
    settings: AzureSettings,
    signer: Signer,
    timing: RequestTiming,
}

impl Azure {
    pub(crate) fn open(
        settings: &AzureSettings,
        timing: &RequestTiming,
    ) -> Result<Self, StoreError> {
        check_tls(SERVICE)?;
        let connector = timing.connector(SERVICE, Signs::of_azure(&settings.endpoint));
        // One session serves all containers.
        let any = client(
            settings,
            timing,
            &settings.container,
            connector.clone(),
            None,
        )
        .map_err(|error| client_error(SERVICE, &error))?;
        let credentials = any.credentials().clone();
        let http = connector.connect(&client_options(settings, timing));
        let signer = Signer {
            http: http.map_err(|error| client_error(SERVICE, &error))?,
            credentials: credentials.clone(),
            account: settings.account.clone(),
        };
        let container = |name: &str| {
            let health = connector.health.clone();
            let connector = connector.clone();
            let credentials = Some(credentials.clone());
            let client = client(settings, timing, name, connector, credentials);
            let client = client.map_err(|error| client_error(SERVICE, &error))?;
            let writers = writers(settings, timing, name, &signer);
            Ok::<_, StoreError>(container(client, writers, name, settings, health))
        };
        Ok(Self {
            state: container(Area::State.bucket_prefix())?,
            output: container(Area::Output.bucket_prefix())?,
            backend: container(&settings.container)?,
            settings: settings.clone(),
            signer: signer.clone(),
            timing: timing.clone(),
        })
    }

    const fn container(&self, area: Area) -> &Remote {
        match area {
            Area::State => &self.state,
            Area::Output => &self.output,
        }
    }

    /// The stock client writes the slashes of a blob's name as `%2F`. Decoded, both spellings are the same.
    fn key_behind(&self, reference: &str) -> Option<ObjectKey> {
        let url = ObjectUrl::parse(reference)?;
        let account = ObjectUrl::of(&self.settings.endpoint)?;
        [url.below(&account), Some(url.path.as_str())]
            .into_iter()
            .flatten()
            .find_map(key_of)
    }

    /// Creates a container. It is no error if another run created it first.
    async fn create_container(&self, container: &str) -> Result<(), StoreError> {
        let call = Call {
            action: "create the container",
            method: "PUT",
            object: container,
            query: Some("restype=container"),
            headers: HeaderMap::new(),
        };
        match self.send(&call).await {
            Ok(_) | Err(StoreError::Locked { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Sends a request that the client of `object_store` has no call for. Returns the headers of the answer.
    async fn send(&self, call: &Call<'_>) -> Result<HeaderMap, StoreError> {
        let backoff = ExponentialBuilder::default()
            .with_jitter()
            .with_min_delay(self.timing.first_pause)
            .with_max_delay(self.timing.longest_pause)
            .without_max_times()
            .with_total_delay(Some(self.timing.retry_for));
        (|| self.try_send(call))
            .retry(backoff)
            .when(|error| matches!(error, StoreError::Unavailable { .. }))
            .await
    }

    async fn try_send(&self, call: &Call<'_>) -> Result<HeaderMap, StoreError> {
        let object = call.object.to_owned();
        let unavailable = |object, source| StoreError::Unavailable {
            service: SERVICE,
            action: call.action,
            object,
            source,
        };
        let request = self.request(call).await?;
        let response = match self.signer.http.execute(request).await {
            Ok(response) => response,
            Err(error) => return Err(unavailable(object, Answer::of(&error))),
        };
        let status = response.status();
        let code = response.headers().get("x-ms-error-code");
        let code = code.and_then(|code| code.to_str().ok()).unwrap_or_default();
        let source = Answer::new(format!("{status} {code}").trim_end());
        match status.as_u16() {
            200..300 => Ok(response.headers().clone()),
            401 | 403 => Err(StoreError::Refused {
                service: SERVICE,
                object,
                settings: CREDENTIAL_SETTINGS,
                source,
            }),
            404 => Err(StoreError::Missing { object }),
            409 | 412 if code == CONDITION_CODE => Err(StoreError::Changed { object }),
            409 | 412 => Err(StoreError::Locked { object }),
            _ => Err(unavailable(object, source)),
        }
    }

    async fn request(&self, call: &Call<'_>) -> Result<HttpRequest, StoreError> {
        let address = address(&self.settings.endpoint, call.object);
        let mut url = Url::parse(&address).expect("an address below an address");
        url.set_query(call.query);
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = call.method.parse().expect("a method");
        *request.uri_mut() = url
            .as_str()
            .parse()
            .expect("an address is one for HTTP too");
        let headers = request.headers_mut();
        headers.insert("content-length", HeaderValue::from_static("0"));
        headers.extend(call.headers.clone());
        let signed = self.signer.sign(&mut request).await;
        signed.map_err(|error| client_error(SERVICE, &error))?;
        Ok(request)
    }

    fn reference_of(&self, key: &ObjectKey) -> String {
        address(&self.settings.endpoint, &key.in_bucket())
    }
}

#[async_trait]
impl ObjectService for Azure {
    fn health(&self) -> Option<&Health> {
        Some(&self.state.health)
    }

    async fn reference(&self, key: &ObjectKey) -> Result<String, StoreError> {
        Ok(self.reference_of(key))
    }

    async fn unchanged(&self, key: &ObjectKey) -> Result<Condition, StoreError> {
        let found = ServedService::open(self, key).await?;
        Ok(Condition::unchanged(found.as_ref()))
    }

    async fn put(
        &self,
        key: &ObjectKey,
        bytes: Bytes,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let container = self.container(key.area);
        let (name, again) = (&key.path, bytes.clone());
        match container.put(name, bytes, condition).await {
            Err(StoreError::NoBucket { .. }) => {
                self.create_container(key.area.bucket_prefix()).await?;
                container.put(name, again, condition).await
            }
            stored => stored,
        }
    }

    async fn put_file(
        &self,
        key: &ObjectKey,
        source: &Path,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        let container = self.container(key.area);
        match container.put_file(&key.path, source, condition).await {
            Err(StoreError::NoBucket { .. }) => {
                self.create_container(key.area.bucket_prefix()).await?;
                container.put_file(&key.path, source, condition).await
            }
            stored => stored,
        }
    }

    async fn fetch(
        &self,
        reference: &str,
        target: &Path,
        limit: u64,
    ) -> Result<Digest, StoreError> {
        let key = found(self.key_behind(reference), reference)?;
        let fetched = self
            .container(key.area)
            .fetch(&key.path, target, limit)
            .await;
        fetched.map_err(|error| missing_container_is_missing_object(error, &key))
    }

    async fn read(&self, key: &ObjectKey) -> Result<Option<Bytes>, StoreError> {
        none_without_container(self.container(key.area).read(&key.path).await)
    }

    fn backend(&self, organization: &str, workspace: &str) -> BackendSettings {
        let settings = &self.settings;
        BackendSettings::Azurerm {
            resource_group: settings.resource_group.clone(),
            account: settings.account.clone(),
            container: settings.container.clone(),
            key: ObjectKey::backend_state(organization, workspace).path,
            login: settings.login.clone(),
            handover: settings.handover,
        }
    }

    fn secrets(&self) -> Vec<SecretString> {
        match &self.settings.login {
            AzureLogin::Key(key) => vec![key.clone()],
            AzureLogin::Identity(_) => Vec::new(),
        }
    }
}

#[async_trait]
impl ServedService for Azure {
    fn reference_of(&self, key: &ObjectKey) -> String {
        self.reference_of(key)
    }

    fn key_behind(&self, reference: &str) -> Option<ObjectKey> {
        self.key_behind(reference)
    }

    async fn open(&self, key: &ObjectKey) -> Result<Option<Content>, StoreError> {
        none_without_container(self.container(key.area).open(&key.path).await)
    }

    async fn put_upload(
        &self,
        key: &ObjectKey,
        upload: Upload,
        condition: &Condition,
    ) -> Result<(), StoreError> {
        // An upload cannot be repeated here, so its container has to be there first.
        self.create_container(key.area.bucket_prefix()).await?;
        let container = self.container(key.area);
        container.put_upload(&key.path, upload, condition).await
    }

    fn state(&self, organization: &str, workspace: &str) -> Arc<dyn StatePlace> {
        Arc::new(StateBlob {
            azure: self.clone(),
            name: ObjectKey::backend_state(organization, workspace).path,
        })
    }
}

fn client_options(settings: &AzureSettings, timing: &RequestTiming) -> ClientOptions {
    timing.client_options(settings.endpoint.scheme() == "http")
}

/// Returns the client of a container, with credentials of its own or these.
fn client(
    settings: &AzureSettings,
    timing: &RequestTiming,
    name: &str,
    connector: impl HttpConnector,
    credentials: Option<AzureCredentialProvider>,
) -> object_store::Result<MicrosoftAzure> {
    let builder = MicrosoftAzureBuilder::new()
        .with_account(&settings.account)
        .with_container_name(name)
        .with_endpoint(settings.endpoint.as_str().trim_end_matches('/').to_owned())
        .with_client_options(client_options(settings, timing))
        .with_retry(timing.retry_config())
        .with_http_connector(connector);
    let builder = match (credentials, &settings.login) {
        (Some(credentials), _) => builder.with_credentials(credentials),
        (None, AzureLogin::Key(key)) => builder.with_access_key(key.expose_secret()),
        (None, AzureLogin::Identity(identity)) => with_identity(builder, identity),
    };
    builder.build()
}

/// What writes the blobs of a container under conditions.
fn writers(
    settings: &AzureSettings,
    timing: &RequestTiming,
    name: &str,
    signer: &Signer,
) -> Writers {
    let (settings, timing, name) = (settings.clone(), timing.clone(), name.to_owned());
    let signer = signer.clone();
    // Its locks are leases, so nothing is deleted once only.
    Writers::new(Compared::Tag, move |manner| {
        let mut whole = HeaderMap::new();
        if let Some((header, value)) = manner.header {
            whole.insert(header, value);
        }
        let holder = Holder {
            signer: signer.clone(),
            lease: HeaderMap::new(),
            whole,
        };
        let credentials = Some(signer.credentials.clone());
        let client = client(&settings, &timing, &name, holder, credentials)?;
        Ok(Arc::new(client))
    })
}

fn with_identity(
    builder: MicrosoftAzureBuilder,
    identity: &AzureIdentity,
) -> MicrosoftAzureBuilder {
    match identity {
        AzureIdentity::Workload {
            client_id,
            tenant_id,
            token_file,
            authority,
        } => {
            let builder = builder
                .with_credential_type("workload_identity")
                .with_client_id(client_id)
                .with_tenant_id(tenant_id)
                .with_federated_token_file(token_file.to_string_lossy());
            match authority {
                Some(authority) => builder.with_authority_host(authority.trim_end_matches('/')),
                None => builder,
            }
        }
        AzureIdentity::Managed {
            client_id,
            endpoint,
        } => {
            let builder = builder.with_credential_type("managed_identity");
            let builder = match client_id {
                Some(client_id) => builder.with_client_id(client_id),
                None => builder,
            };
            match endpoint {
                Some(endpoint) => builder.with_msi_endpoint(endpoint),
                None => builder,
            }
        }
    }
}

fn container(
    client: MicrosoftAzure,
    writers: Writers,
    name: &str,
    settings: &AzureSettings,
    health: Health,
) -> Remote {
    Remote {
        client: Arc::new(client),
        writers,
        bucket: BucketInfo {
            service: SERVICE,
            name: name.to_owned(),
            setting: env::AZURE_ACCOUNT,
            credential_settings: match settings.login {
                AzureLogin::Key(_) => CREDENTIAL_SETTINGS,
                AzureLogin::Identity(_) => IDENTITY_SETTINGS,
            },
        },
        health,
    }
}

/// Without its container, there is no object.
fn none_without_container<T>(
    found: Result<Option<T>, StoreError>,
) -> Result<Option<T>, StoreError> {
    match found {
        Err(StoreError::NoBucket { .. }) => Ok(None),
        found => found,
    }
}

/// An object of a missing container is a missing object.
fn missing_container_is_missing_object(error: StoreError, key: &ObjectKey) -> StoreError {
    match error {
        StoreError::NoBucket { .. } => StoreError::Missing {
            object: key.in_bucket(),
        },
        error => error,
    }
}
