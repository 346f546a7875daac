//! Runs transactions on SQLite and PostgreSQL. Each statement is written once for both engines, with `$1` for
//! parameters.

mod postgres;
mod sqlite;
mod wal;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pool_protocol::id::PoolName;
use sqlx::pool::PoolConnection;
use sqlx::{AssertSqlSafe, Postgres, Row as _, Sqlite};
use tokio::time::timeout;

use crate::clock::{Clock, Millis, since_1970};
use crate::error::{Error, OpenError};
use crate::turns::{Line, Turn, Turns};
use crate::waiters::Waiters;

/// The longest wait for a turn, and for a connection. SQLite has only one connection.
const ACQUIRE: Duration = Duration::from_secs(10);

pub(crate) struct Database {
    engine: Engine,
    clock: Box<dyn Clock>,
    waiters: Arc<Waiters>,
    turns: Arc<Turns>,
}

enum Engine {
    Sqlite(sqlite::File),
    Postgres(postgres::Server),
}

impl Database {
    /// Opens the database of a URL, and creates its tables.
    pub(crate) async fn open(url: &str, clock: Box<dyn Clock>) -> Result<Self, OpenError> {
        let waiters = Arc::<Waiters>::default();
        let (engine, connections) = if let Some(path) = url.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            let file = sqlite::File::open(path.as_ref(), clock.elapsed()).await?;
            (Engine::Sqlite(file), 1)
        } else if url.starts_with("postgres:") || url.starts_with("postgresql:") {
            let server = postgres::Server::connect(url, Arc::clone(&waiters)).await?;
            (Engine::Postgres(server), postgres::TRANSACTIONS)
        } else {
            return Err(OpenError::Url);
        };
        Ok(Self {
            engine,
            clock,
            waiters,
            turns: Turns::new(connections),
        })
    }

    /// Returns whether other hubs can use the database too.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.engine, Engine::Postgres(_))
    }

    pub(crate) fn waiters(&self) -> &Waiters {
        &self.waiters
    }

    /// Brings what was committed into the file of SQLite, as far as no reader is in the way. So a copy of the file alone
    /// has all but the last minute.
    pub(crate) async fn checkpoint(&self) -> Result<(), Error> {
        if let Engine::Sqlite(file) = &self.engine {
            let _turn = self.turns.next(&Line::Hub).await?;
            file.checkpoint().await?;
        }
        Ok(())
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.clock.elapsed()
    }

    /// Returns why the disk of the store has too little space, if it has less than a reserve and a document of these bytes
    /// need. So many bytes of the file can be used again.
    pub(crate) fn lack_of_space(&self, reusable: u64, document: u64) -> Option<String> {
        match &self.engine {
            Engine::Sqlite(file) => file.lack_of_space(reusable, document),
            Engine::Postgres(_) => None,
        }
    }

    /// Begins a transaction, when it is the turn of this line. With SQLite, it waits for the end of all others.
    pub(crate) async fn begin(&self, line: &Line) -> Result<Tx, Error> {
        let turn = timeout(ACQUIRE, self.turns.next(line)).await;
        let turn = turn.map_err(|_| {
            let seconds = ACQUIRE.as_secs();
            Error::Unavailable(format!("no connection was free for {seconds} s").into())
        })??;
        let (connection, limit) = match &self.engine {
            Engine::Sqlite(file) => (Connection::Sqlite(file.connection().await?), None),
            Engine::Postgres(server) => {
                let connection = server.connection().await?;
                (Connection::Postgres(connection), Some(postgres::STATEMENT))
            }
        };
        let mut tx = Tx {
            connection: Some(connection),
            has_failed: false,
            limit,
            now: 0,
            wall: 0,
            woken: BTreeMap::new(),
            waiters: Arc::clone(&self.waiters),
            turn: Some(turn),
        };
        match &self.engine {
            Engine::Sqlite(file) => {
                tx.execute("BEGIN IMMEDIATE", &[]).await?;
                tx.now = file.now(self.clock.elapsed());
                tx.wall = since_1970(self.clock.wall());
            }
            Engine::Postgres(_) => {
                let begin = "BEGIN ISOLATION LEVEL READ COMMITTED";
                tx.execute(begin, &[]).await?;
                if let Some(row) = tx.row(postgres::NOW, &[]).await? {
                    tx.wall = row.int("now")?;
                }
                tx.now = self.clock.database(tx.wall);
            }
        }
        Ok(tx)
    }

    /// Returns the number of calls that wait for their turn.
    #[cfg(test)]
    pub(crate) fn calls_waiting(&self) -> usize {
        self.turns.waiting()
    }

    pub(crate) async fn close(&self) {
        self.waiters.close();
        match &self.engine {
            Engine::Sqlite(file) => file.close().await,
            Engine::Postgres(server) => server.close().await,
        }
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let engine = match &self.engine {
            Engine::Sqlite(_) => "SQLite",
            Engine::Postgres(_) => "PostgreSQL",
        };
        f.debug_tuple("Database").field(&engine).finish()
    }
}

enum Connection {
    Sqlite(PoolConnection<Sqlite>),
    Postgres(PoolConnection<Postgres>),
}

/// A value of a parameter.
#[derive(Clone, Debug)]
pub(crate) enum Value {
    Int(Option<i64>),
    Text(Option<String>),
    Bytes(Vec<u8>),
}

impl Value {
    pub(crate) fn text(value: impl fmt::Display) -> Self {
        Self::Text(Some(value.to_string()))
    }

    /// Returns a text or NULL.
    pub(crate) fn maybe(value: Option<impl fmt::Display>) -> Self {
        Self::Text(value.map(|value| value.to_string()))
    }
}

impl<N: Into<i64>> From<N> for Value {
    fn from(number: N) -> Self {
        Self::Int(Some(number.into()))
    }
}

/// Runs a statement on the connection of a transaction.
macro_rules! run {
    ($tx:expr, $sql:expr, $values:expr, |$query:ident, $connection:ident| $then:expr) => {{
        $tx.before_statement();
        let (sql, limit) = ($sql, $tx.limit);
        let Some(connection) = $tx.connection.as_mut() else {
            return Err(Error::from(sqlx::Error::PoolClosed));
        };
        let done = within(limit, async {
            match connection {
                Connection::Sqlite($connection) => {
                    let mut $query = sqlx::query::<Sqlite>(sql);
                    for value in $values {
                        $query = match value {
                            Value::Int(number) => $query.bind(*number),
                            Value::Text(text) => $query.bind(text.clone()),
                            Value::Bytes(bytes) => $query.bind(bytes.clone()),
                        };
                    }
                    $then
                }
                Connection::Postgres($connection) => {
                    let mut $query = sqlx::query::<Postgres>(sql);
                    for value in $values {
                        $query = match value {
                            Value::Int(number) => $query.bind(*number),
                            Value::Text(text) => $query.bind(text.clone()),
                            Value::Bytes(bytes) => $query.bind(bytes.clone()),
                        };
                    }
                    $then
                }
            }
        });
        let done = done.await;
        $tx.has_failed |= done.is_err();
        done
    }};
}

/// Runs a statement for at most this time. After an error, the transaction must be dropped.
async fn within<T>(
    limit: Option<Duration>,
    statement: impl Future<Output = Result<T, Error>>,
) -> Result<T, Error> {
    let Some(limit) = limit else {
        return statement.await;
    };
    timeout(limit, statement).await.unwrap_or_else(|_| {
        let text = format!("the database did not answer a statement for {limit:?}");
        Err(Error::Unavailable(text.into()))
    })
}

/// A transaction. If it is dropped, it changes nothing that was not committed.
pub(crate) struct Tx {
    connection: Option<Connection>,
    /// Whether a statement has failed.
    has_failed: bool,
    /// The longest time of a statement.
    pub(crate) limit: Option<Duration>,
    /// The store's time at the start of the transaction.
    pub(crate) now: Millis,
    /// Wall time.
    pub(crate) wall: Millis,
    woken: BTreeMap<PoolName, usize>,
    waiters: Arc<Waiters>,
    turn: Option<Turn>,
}

impl Tx {
    /// Runs a statement, and returns the number of changed rows.
    pub(crate) async fn execute(
        &mut self,
        sql: &'static str,
        values: &[Value],
    ) -> Result<u64, Error> {
        run!(self, sql, values, |query, connection| {
            let done = query.execute(&mut **connection).await?;
            Ok(done.rows_affected())
        })
    }

    pub(crate) async fn rows(
        &mut self,
        sql: &'static str,
        values: &[Value],
    ) -> Result<Vec<Row>, Error> {
        run!(self, sql, values, |query, connection| {
            let rows = query.fetch_all(&mut **connection).await?;
            Ok(rows.into_iter().map(Row::from).collect())
        })
    }

    /// Returns the rows of a query, and locks them until the transaction ends. Skips rows that another transaction has
    /// locked.
    pub(crate) async fn rows_to_change(
        &mut self,
        sql: &'static str,
        values: &[Value],
    ) -> Result<Vec<Row>, Error> {
        self.locked(sql, "FOR UPDATE SKIP LOCKED", values).await
    }

    /// Returns the only row of a query, and locks it until the transaction ends. Waits for other transactions.
    pub(crate) async fn row_to_change(
        &mut self,
        sql: &'static str,
        values: &[Value],
    ) -> Result<Option<Row>, Error> {
        let rows = self.locked(sql, "FOR UPDATE", values).await?;
        Ok(rows.into_iter().next())
    }

    async fn locked(
        &mut self,
        sql: &'static str,
        lock: &str,
        values: &[Value],
    ) -> Result<Vec<Row>, Error> {
        if matches!(self.connection, Some(Connection::Sqlite(_))) {
            // SQLite has one writer at a time.
            return self.rows(sql, values).await;
        }
        run!(
            self,
            AssertSqlSafe(format!("{sql} {lock}")),
            values,
            |query, connection| {
                let rows = query.fetch_all(&mut **connection).await?;
                Ok(rows.into_iter().map(Row::from).collect())
            }
        )
    }

    pub(crate) async fn row(
        &mut self,
        sql: &'static str,
        values: &[Value],
    ) -> Result<Option<Row>, Error> {
        Ok(self.rows(sql, values).await?.into_iter().next())
    }

    /// Takes the lock of this name until the transaction ends. Waits if another transaction has it.
    pub(crate) async fn lock(&mut self, name: &str) -> Result<(), Error> {
        if let Some(Connection::Postgres(_)) = &self.connection {
            let sql = "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))";
            self.rows(sql, &[Value::text(name)]).await?;
        }
        Ok(())
    }

    /// Takes the lock of this name. Returns `false` at once if another transaction has it.
    pub(crate) async fn try_lock(&mut self, name: &str) -> Result<bool, Error> {
        let Some(Connection::Postgres(_)) = &self.connection else {
            return Ok(true);
        };
        let sql = "SELECT pg_try_advisory_xact_lock(hashtextextended($1, 0))::int::bigint AS got";
        let row = self.row(sql, &[Value::text(name)]).await?;
        row.map_or(Ok(false), |row| Ok(row.int("got")? == 1))
    }

    /// Returns how many bytes of SQLite's file are free, and are used again before the file grows.
    pub(crate) async fn reusable(&mut self) -> Result<u64, Error> {
        let Some(Connection::Sqlite(_)) = &self.connection else {
            return Ok(0);
        };
        let sql = "SELECT freelist_count * page_size AS bytes FROM pragma_freelist_count, pragma_page_size";
        let row = self.row(sql, &[]).await?;
        let bytes = row.map_or(Ok(0), |row| row.int("bytes"))?;
        Ok(u64::try_from(bytes).unwrap_or_default())
    }

    /// Wakes this many requests that wait for a task of a pool, after the commit.
    pub(crate) fn wake(&mut self, pool: &PoolName, count: usize) {
        *self.woken.entry(pool.clone()).or_default() += count;
    }

    pub(crate) async fn commit(mut self) -> Result<(), Error> {
        let woken = std::mem::take(&mut self.woken);
        let wakes_here = matches!(self.connection, Some(Connection::Sqlite(_)));
        if !wakes_here {
            for (pool, count) in &woken {
                let values = [
                    Value::text(postgres::CHANNEL),
                    postgres::message(pool, *count),
                ];
                self.rows("SELECT pg_notify($1, $2)", &values).await?;
            }
        }
        self.finish("COMMIT").await?;
        if wakes_here {
            for (pool, count) in woken {
                self.waiters.wake(&pool, count);
            }
        }
        Ok(())
    }

    pub(crate) async fn rollback(mut self) -> Result<(), Error> {
        self.finish("ROLLBACK").await
    }

    /// Returns the result of a part of the transaction. If the part was refused, discards all changes: a transaction that is
    /// dropped costs its connection to PostgreSQL.
    pub(crate) async fn unless_refused<T>(
        self,
        result: Result<T, Error>,
    ) -> Result<(Self, T), Error> {
        match result {
            Ok(value) => Ok((self, value)),
            Err(refusal @ Error::Refused(_)) => {
                self.rollback().await?;
                Err(refusal)
            }
            Err(error) => Err(error),
        }
    }

    async fn finish(&mut self, sql: &'static str) -> Result<(), Error> {
        self.execute(sql, &[]).await?;
        self.before_statement();
        // This returns the connection to its pool.
        drop(self.connection.take());
        Ok(())
    }

    /// Tests kill the process here.
    #[cfg_attr(
        not(test),
        expect(clippy::unused_self, reason = "only tests do something here")
    )]
    fn before_statement(&self) {
        #[cfg(test)]
        if self.connection.is_some() {
            crate::tests::failpoint::reached();
        }
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        match self.connection.take() {
            Some(Connection::Sqlite(mut connection)) => {
                let runtime = tokio::runtime::Handle::try_current().ok();
                let Some(runtime) = runtime.filter(|_| !self.has_failed) else {
                    return connection.close_on_drop();
                };
                // The caller has left. To open the file again takes long, and all pools would wait. Their next turn begins after
                // this.
                let turn = self.turn.take();
                runtime.spawn(async move {
                    if sqlite::discard(&mut connection).await.is_err() {
                        connection.close_on_drop();
                    }
                    drop((connection, turn));
                });
            }
            // Its state is unknown.
            Some(Connection::Postgres(mut connection)) => connection.close_on_drop(),
            None => {}
        }
    }
}

pub(crate) enum Row {
    Sqlite(sqlx::sqlite::SqliteRow),
    Postgres(sqlx::postgres::PgRow),
}

impl From<sqlx::sqlite::SqliteRow> for Row {
    fn from(row: sqlx::sqlite::SqliteRow) -> Self {
        Self::Sqlite(row)
    }
}

impl From<sqlx::postgres::PgRow> for Row {
    fn from(row: sqlx::postgres::PgRow) -> Self {
        Self::Postgres(row)
    }
}

macro_rules! get {
    ($($(#[$doc:meta])* $name:ident: $kind:ty;)*) => {
        impl Row {
            $(
                $(#[$doc])*
                pub(crate) fn $name(&self, column: &str) -> Result<$kind, Error> {
                    Ok(match self {
                        Self::Sqlite(row) => row.try_get(column)?,
                        Self::Postgres(row) => row.try_get(column)?,
                    })
                }
            )*
        }
    };
}

get! {
    /// Returns a number.
    int: i64;
    /// Returns a number or `None`.
    maybe_int: Option<i64>;
    text: String;
    /// Returns a text or `None`.
    maybe_text: Option<String>;
    /// Returns bytes.
    bytes: Vec<u8>;
}

impl Row {
    /// Returns a small number that is never negative.
    pub(crate) fn count(&self, column: &str) -> Result<u32, Error> {
        Ok(u32::try_from(self.int(column)?).unwrap_or_default())
    }

    /// Returns a number as a truth value.
    pub(crate) fn flag(&self, column: &str) -> Result<bool, Error> {
        Ok(self.int(column)? != 0)
    }

    pub(crate) fn parsed<T>(&self, column: &str) -> Result<T, Error>
    where
        T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
    {
        self.text(column)?
            .parse()
            .map_err(|error| unreadable(column, error))
    }

    /// Parses a text. Returns `None` for NULL.
    pub(crate) fn maybe_parsed<T>(&self, column: &str) -> Result<Option<T>, Error>
    where
        T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static>,
    {
        let text = self.maybe_text(column)?;
        let parsed = text.map(|text| text.parse()).transpose();
        parsed.map_err(|error| unreadable(column, error))
    }
}

/// Returns the error for a value that no version of this program has written.
pub(crate) fn unreadable(
    column: &str,
    error: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> Error {
    Error::from(sqlx::Error::ColumnDecode {
        index: column.to_owned(),
        source: error.into(),
    })
}

/// Returns the migrations of the schema, from the first version on.
fn migrations() -> sqlx::migrate::Migrator {
    use sqlx::SqlSafeStr as _;
    use sqlx::migrate::{Migration, MigrationType, Migrator};
    let migration = |version, name: &'static str, sql: &'static str| {
        let (kind, sql) = (MigrationType::Simple, sql.into_sql_str());
        Migration::new(version, name.into(), kind, sql, false)
    };
    Migrator::with_migrations(vec![
        migration(1, "queue", include_str!("../migrations/0001_queue.sql")),
        migration(2, "custody", include_str!("../migrations/0002_custody.sql")),
        migration(3, "leases", include_str!("../migrations/0003_leases.sql")),
        migration(
            4,
            "state locks",
            include_str!("../migrations/0004_state_locks.sql"),
        ),
        migration(
            5,
            "workspaces",
            include_str!("../migrations/0005_workspaces.sql"),
        ),
        migration(
            6,
            "seen states",
            include_str!("../migrations/0006_seen_states.sql"),
        ),
        migration(
            7,
            "lock removals",
            include_str!("../migrations/0007_lock_removals.sql"),
        ),
    ])
}
