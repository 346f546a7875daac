//! Where the platform shows the log of a run while it runs: the job's stream in Redis, or the API that adds to it.

mod api;
mod redis;

pub use self::api::{ApiLog, ApiSink};
pub use self::redis::{CopyError, JobStream, RedisLog, RedisSink, Repeated};
