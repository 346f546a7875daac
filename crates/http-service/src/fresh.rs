//! A value that is made once a second for all who ask. It limits the work for answers that need no token.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::Instant;

/// How long a value counts.
pub const FRESH: Duration = Duration::from_secs(1);

/// The last value.
#[derive(Debug)]
pub struct Fresh<T>(Mutex<Option<(Instant, T)>>);

impl<T> Default for Fresh<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T: Clone> Fresh<T> {
    /// Returns the last value, or the one that `made` gives if that is too old. Callers wait for one maker.
    pub async fn get(&self, made: impl Future<Output = T>) -> T {
        let mut last = self.0.lock().await;
        match &*last {
            Some((at, value)) if at.elapsed() < FRESH => value.clone(),
            _ => {
                let value = made.await;
                *last = Some((Instant::now(), value.clone()));
                value
            }
        }
    }
}
