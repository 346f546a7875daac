//! A login that all requests to a store share: obtained once, again if it has expired or was refused, and not again if the
//! store refused to give it.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::Mutex;

use crate::error::{ErrorClass, ReadError};

/// A login is replaced so long before its end.
const MARGIN: Duration = Duration::from_mins(1);

/// The end of a login that the store has refused.
const REFUSED: SystemTime = SystemTime::UNIX_EPOCH;

/// Something that a login gives, with its end.
pub type Obtained<T> = Result<(T, Option<SystemTime>), ReadError>;

#[derive(Debug)]
struct Held<T> {
    value: Result<Arc<T>, ReadError>,
    ends: Option<SystemTime>,
    /// How often it was replaced after a refusal.
    refusals: u32,
}

/// Seconds from now, as an end.
pub(crate) fn in_seconds(seconds: u64) -> Option<SystemTime> {
    SystemTime::now().checked_add(Duration::from_secs(seconds))
}

/// The shared login of one store and identity.
#[derive(Debug)]
pub struct Login<T>(Mutex<Option<Held<T>>>);

impl<T> Default for Login<T> {
    fn default() -> Self {
        Self(Mutex::new(None))
    }
}

impl<T> Login<T> {
    /// The login. The first caller obtains it, and all others wait for it.
    pub async fn get(
        &self,
        obtain: impl Future<Output = Obtained<T>>,
    ) -> Result<Arc<T>, ReadError> {
        let mut held = self.0.lock().await;
        if let Some(held) = &*held
            && held
                .ends
                .is_none_or(|ends| SystemTime::now() + MARGIN < ends)
        {
            return held.value.clone();
        }
        let refusals = held.as_ref().map_or(0, |held| held.refusals);
        let (value, ends) = match obtain.await {
            Ok((value, ends)) => (Ok(Arc::new(value)), ends),
            // An attempt that may succeed later is not remembered.
            Err(error) if error.class.is_transient() => return Err(error),
            Err(error) => (Err(error), None),
        };
        *held = Some(Held {
            value: value.clone(),
            // A service that gives too little time is asked each time.
            ends,
            refusals,
        });
        value
    }

    /// Makes an attempt with the login, and another one with a new login if the store has refused this one.
    pub async fn with<V>(
        &self,
        obtain: impl AsyncFn() -> Obtained<T>,
        attempt: impl AsyncFn(&Arc<T>) -> Result<V, ReadError>,
    ) -> Result<V, ReadError> {
        loop {
            let login = self.get(obtain()).await?;
            match attempt(&login).await {
                Err(error) if self.is_refused(&login, &error).await => {}
                done => return done,
            }
        }
    }

    /// Forgets a login that the store has refused. Returns whether another one may be obtained.
    async fn is_refused(&self, refused: &Arc<T>, error: &ReadError) -> bool {
        if error.class != ErrorClass::CredentialsRejected {
            return false;
        }
        let mut held = self.0.lock().await;
        let Some(known) = &mut *held else {
            return true;
        };
        match &known.value {
            Ok(value) if Arc::ptr_eq(value, refused) => {
                // Others may have used the same one meanwhile.
                if known.ends == Some(REFUSED) {
                    return true;
                }
                known.refusals += 1;
                if known.refusals == 1 {
                    known.ends = Some(REFUSED);
                    return true;
                }
                (known.value, known.ends) = (Err(error.clone()), None);
                false
            }
            // Another request has replaced it.
            Ok(_) => true,
            Err(_) => false,
        }
    }

    /// The login, if there is one.
    pub async fn take(&self) -> Option<Arc<T>> {
        self.0.lock().await.take()?.value.ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(0, "second")]
    #[case(59, "second")]
    #[case(3600, "first")]
    #[case(10 * 365 * 86_400, "first")]
    #[case(u64::MAX, "first")]
    #[tokio::test]
    async fn a_login_is_used_while_its_service_says_so(
        #[case] seconds: u64,
        #[case] expected: &str,
    ) {
        let login = Login::default();
        let get = async |name: &'static str| {
            let obtained = async { Ok((name, in_seconds(seconds))) };
            *login.get(obtained).await.unwrap()
        };
        assert_eq!(get("first").await, "first");
        assert_eq!(get("second").await, expected);
    }
}
