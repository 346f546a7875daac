//! What a run connects to, apart from its tool: the platform, and the Redis between the two. The settings decide which
//! these are. This module knows nothing of the data that are sent.

use std::sync::Arc;
use std::time::Duration;

use job_contract::{JobData, Records, chain};
use platform::heartbeat::Heartbeat;
use platform::lease::LeaseConfig;
use platform::live::{LiveStream, LiveViewPublisher};
use platform::local::LocalPlatform;
use platform::redis::Redis;
use platform::sinks::{ApiLog, ApiSink, RedisLog, RedisSink};
use platform::terrakube::{Terrakube, TerrakubeError, TokenSource, token};
use platform::{Platform, PlatformError, StepRef};
use run_log::{LimitedSink, Sink};
use runtime::Deadline;
use tracing::warn;

use crate::config::{Config, Folders};
use crate::error::StepError;
use crate::stop::Stop;
use crate::workspace::{ContentToken, Relay};

/// How long the executor retries the report of an outcome to a platform of files.
const LOCAL_REPORT_TIMEOUT: Duration = Duration::from_mins(1);

/// The platform, and its Redis, if there is one.
#[derive(Clone, Debug)]
pub(crate) struct Connections {
    pub(crate) platform: Platform,
    pub(crate) redis: Option<Redis>,
    log_via_api: bool,
    live_log_max_bytes: u64,
}

impl Connections {
    /// The configured connections of a job's step. None of them is open yet.
    pub(crate) fn open(
        config: &Config,
        folders: &Folders,
        job: &JobData,
    ) -> Result<Self, StepError> {
        let (terrakube, redis) = config.network()?;
        if terrakube.is_none() && config.run.records == Some(Records::Pod) {
            warn!(
                "the record of this step is lost with its pod: the step must not start a second time"
            );
        }
        let platform = match terrakube {
            Some(settings) => {
                let settings = settings.for_step(&StepRef::of(job));
                let terrakube = Terrakube::new(settings, redis.clone());
                Platform::Terrakube(terrakube.map_err(PlatformError::from)?)
            }
            None => Platform::Local(LocalPlatform::new(&folders.data)),
        };
        Ok(Self {
            platform,
            redis,
            log_via_api: config.run.log_via_api,
            live_log_max_bytes: config.run.live_log_max_bytes,
        })
    }

    /// The connection to the API alone, to report that the others cannot be opened.
    pub(crate) fn to_api(config: &Config, job: &JobData) -> Option<Self> {
        let settings = config.api()?.for_step(&StepRef::of(job));
        let terrakube = Terrakube::new(settings, None).ok()?;
        Some(Self {
            platform: Platform::Terrakube(terrakube),
            redis: None,
            log_via_api: config.run.log_via_api,
            live_log_max_bytes: config.run.live_log_max_bytes,
        })
    }

    /// Whether the platform is only the records in the data folder. Another pod may not have that folder.
    pub(crate) const fn is_local(&self) -> bool {
        matches!(self.platform, Platform::Local(_))
    }

    const fn terrakube(&self) -> Option<&Terrakube> {
        match &self.platform {
            Platform::Local(_) => None,
            Platform::Terrakube(terrakube) => Some(terrakube),
        }
    }

    /// The lease, if the hub also passes the artifacts of the run on.
    pub(crate) fn relaying_lease(&self) -> Option<&LeaseConfig> {
        self.relayed()?.config().lease.as_ref()
    }

    /// Starts the heartbeats of the job. A run continues without them, because the platform may wait long enough. With a
    /// lease, the hub writes them.
    pub(crate) fn heartbeat(&self, job_id: &str) -> Option<Heartbeat> {
        let redis = self.redis.as_ref().filter(|_| !self.platform.is_leased())?;
        Heartbeat::start(redis, job_id)
            .inspect_err(|error| warn!(error = chain(error), "the run has no heartbeat"))
            .ok()
    }

    /// The sink that shows the run's log to users during the run.
    pub(crate) fn live_log(&self, job: &JobData, stop: &Stop) -> Option<Box<dyn Sink>> {
        let whole = self.whole_live_log(job, stop)?;
        Some(Box::new(LimitedSink::new(whole, self.live_log_max_bytes)))
    }

    fn whole_live_log(&self, job: &JobData, stop: &Stop) -> Option<Box<dyn Sink>> {
        let api = self.terrakube().map(Terrakube::config);
        if let Some(api) = api.filter(|api| self.log_via_api || api.is_relayed()) {
            return Some(Box::new(ApiSink::new(ApiLog {
                base: api.api_url.clone(),
                job_id: job.job_id.parse().ok()?,
                step_id: job.step_id.clone(),
                tokens: api.tokens.clone(),
            })));
        }
        let redis = self.redis.clone()?;
        Some(Box::new(RedisSink::new(&RedisLog {
            redis,
            job_id: job.job_id.clone(),
            step_id: job.step_id.clone(),
            stop: stop.token(),
        })))
    }

    /// The live view of an operation.
    pub(crate) fn live_view_publisher(&self, job: &JobData) -> Option<LiveViewPublisher> {
        if let Some(terrakube) = self.relayed() {
            return Some(LiveViewPublisher::relayed(terrakube.clone()));
        }
        let stream = LiveStream::new(self.redis.clone()?, &job.job_id, &job.step_id);
        Some(LiveViewPublisher::start(stream))
    }

    /// The platform behind the relay of a hub.
    pub(crate) fn relayed(&self) -> Option<&Terrakube> {
        self.terrakube().filter(|api| api.config().is_relayed())
    }

    /// The hosts of modules and providers that a hub passes on.
    pub(crate) async fn registry_hosts(&self) -> Result<Vec<String>, TerrakubeError> {
        match self.relayed() {
            Some(terrakube) => terrakube.registry_hosts().await,
            None => Ok(Vec::new()),
        }
    }

    /// The source of the platform's tokens.
    pub(crate) fn tokens(&self) -> Option<&TokenSource> {
        Some(&self.terrakube()?.config().tokens)
    }

    /// The token for the content of a CLI-driven run. It is sent only to the platform's own addresses.
    pub(crate) fn content_token(&self) -> Option<ContentToken> {
        let config = self.terrakube()?.config();
        // The stock executor fetches content with such a token too.
        let tokens = config.tokens.for_all_jobs();
        Some(ContentToken {
            origins: vec![config.public_url.origin(), config.api_url.origin()],
            relay: config.is_relayed().then(|| Relay {
                public: config.public_url.clone(),
                base: config.api_url.clone(),
            }),
            authorize: Arc::new(move |request| tokens.authorize(request, token::BRIEF)),
        })
    }

    /// Hosts that the tool may send a token to: the module registry, and the API itself (contract 8.7).
    pub(crate) fn tool_hosts(&self) -> Vec<String> {
        let Some(config) = self.terrakube().map(Terrakube::config) else {
            return Vec::new();
        };
        let api = config
            .public_url
            .host_str()
            .map(|host| match config.public_url.port() {
                Some(port) => format!("{host}:{port}"),
                None => host.to_owned(),
            });
        let mut hosts: Vec<String> = config.registry_domain.clone().into_iter().collect();
        hosts.extend(api.filter(|api| config.registry_domain.as_ref() != Some(api)));
        hosts
    }

    /// How long the executor retries reports at the end of a run: minutes, or after a stop order, until `until` after
    /// the order.
    pub(crate) fn deadline(&self, stop: &Stop, until: Duration) -> Deadline {
        let deadline = self.terrakube().map_or(LOCAL_REPORT_TIMEOUT, |terrakube| {
            terrakube.config().report_patience
        });
        stop.deadline(deadline, until)
    }
}
