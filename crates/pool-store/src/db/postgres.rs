//! Connects to a PostgreSQL database, which several hubs can share.

use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use pool_protocol::id::PoolName;
use sqlx::pool::PoolConnection;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool, Postgres};
use tokio::task::JoinHandle;

use super::{ACQUIRE, Value, migrations};
use crate::error::{Error, OpenError};
use crate::waiters::Waiters;

/// The channel on which hubs announce new tasks.
pub(super) const CHANNEL: &str = "mayfly_pools";
/// Connections of one hub. One of them listens on the channel.
const CONNECTIONS: u32 = 10;
/// Transactions of one hub at a time.
pub(super) const TRANSACTIONS: usize = CONNECTIONS as usize - 1;

/// The longest time of a statement. A connection that was lost silently would keep it waiting for ever. A statement also
/// waits for transactions of other hubs.
pub(super) const STATEMENT: Duration = Duration::from_secs(30);

/// Reads the time of the database at the start of the transaction.
pub(super) const NOW: &str = "SELECT (extract(epoch FROM now()) * 1000)::bigint AS now";

/// Creates a schema of its own, because the platform may use the same database. Concurrent `CREATE SCHEMA` statements
/// can fail, so a lock guards it.
const SCHEMA: &str = "BEGIN; SELECT pg_advisory_xact_lock(hashtextextended('mayfly_pools', 0)); \
    CREATE SCHEMA IF NOT EXISTS mayfly_pools; COMMIT";
/// Makes every commit durable, whatever the default of the database is.
const SESSION: &str = "SET search_path TO mayfly_pools; \
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'";

pub(super) struct Server {
    pool: PgPool,
    listener: JoinHandle<()>,
}

impl Server {
    /// Connects to the database, and listens for new tasks of all hubs.
    pub(super) async fn connect(url: &str, waiters: Arc<Waiters>) -> Result<Self, OpenError> {
        let options = PgConnectOptions::from_str(url)
            .map_err(OpenError::Database)?
            .application_name("mayfly-hub");
        let mut connection = PgConnection::connect_with(&options)
            .await
            .map_err(OpenError::Database)?;
        let made = connection.execute(SCHEMA).await;
        made.map_err(OpenError::Database)?;
        connection.close().await.map_err(OpenError::Database)?;
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .acquire_timeout(ACQUIRE)
            .after_connect(|connection, _| {
                Box::pin(async move { connection.execute(SESSION).await.map(drop) })
            })
            .connect_with(options)
            .await
            .map_err(OpenError::Database)?;
        migrations()
            .run(&pool)
            .await
            .map_err(OpenError::Migration)?;
        let mut listener = PgListener::connect_with(&pool)
            .await
            .map_err(OpenError::Database)?;
        listener
            .listen(CHANNEL)
            .await
            .map_err(OpenError::Database)?;
        Ok(Self {
            pool,
            listener: tokio::spawn(listen(listener, waiters)),
        })
    }

    pub(super) async fn connection(&self) -> Result<PoolConnection<Postgres>, Error> {
        Ok(self.pool.acquire().await?)
    }

    pub(super) async fn close(&self) {
        self.listener.abort();
        self.pool.close().await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

/// Returns the message that tasks of a pool have become available.
pub(super) fn message(pool: &PoolName, count: usize) -> Value {
    Value::text(format!("{pool} {count}"))
}

/// Wakes requests of this hub for tasks that any hub has made available.
async fn listen(mut listener: PgListener, waiters: Arc<Waiters>) {
    loop {
        match listener.try_recv().await {
            Ok(Some(notification)) => {
                let (pool, count) = notification
                    .payload()
                    .split_once(' ')
                    .unwrap_or((notification.payload(), "1"));
                if let Ok(pool) = pool.parse() {
                    waiters.wake(&pool, count.parse().unwrap_or(1));
                }
            }
            // The connection was lost, and messages may be missing. The listener reconnects on its own.
            Ok(None) => waiters.wake_all(),
            Err(sqlx::Error::PoolClosed) => return,
            Err(error) => {
                tracing::warn!(%error, "cannot listen for tasks of other hubs");
                tokio::time::sleep(Duration::from_secs(1)).await;
                waiters.wake_all();
            }
        }
    }
}
