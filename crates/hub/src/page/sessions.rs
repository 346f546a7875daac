//! Sessions of browsers. A session says when it began and for which token. The hub signs it and stores nothing, except
//! which sessions a logout has ended. That is known to this process only, so a session also ends when the hub restarts.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The lifetime of a session: half a working day.
pub(super) const LIFETIME: Duration = Duration::from_hours(4);
/// The most sessions of one credential that are remembered as ended. With more, all of it that are older end.
const MAX_ENDED: usize = 1000;

/// Which sessions have ended before their time.
#[derive(Debug)]
pub(super) struct Sessions {
    /// When the hub began, in nanoseconds since 1970: older sessions have ended.
    start: u64,
    /// Those of each credential.
    ended: Mutex<HashMap<String, Ended>>,
}

#[derive(Debug, Default)]
struct Ended {
    /// All sessions that began until this moment.
    until: u64,
    /// When single sessions began.
    single: BTreeSet<u64>,
}

impl Sessions {
    pub(super) fn new(now: SystemTime) -> Self {
        Self {
            start: nanoseconds(now),
            ended: Mutex::default(),
        }
    }

    /// Returns a new session for a credential, without its signature.
    pub(super) fn begin(&self, credential: &str, now: SystemTime) -> String {
        let until = self.lock().get(credential).map_or(0, |ended| ended.until);
        // A clock that was set back must not let new sessions count as ended.
        let began = nanoseconds(now).max(until.max(self.start) + 1);
        format!("{began}.{credential}")
    }

    /// Returns the credential of a session whose signature is valid, unless it has ended.
    pub(super) fn credential<'s>(&self, session: &'s str, now: SystemTime) -> Option<&'s str> {
        let (began, credential) = parse(session)?;
        let age = Duration::from_nanos(nanoseconds(now).saturating_sub(began));
        let all = self.lock();
        let has_ended = |ended: &Ended| began <= ended.until || ended.single.contains(&began);
        let is_open =
            age < LIFETIME && began > self.start && !all.get(credential).is_some_and(has_ended);
        is_open.then_some(credential)
    }

    /// Ends a session whose signature is valid.
    pub(super) fn end(&self, session: &str, now: SystemTime) {
        let Some(credential) = self.credential(session, now) else {
            return;
        };
        let Some((began, _)) = parse(session) else {
            return;
        };
        let mut all = self.lock();
        let ended = all.entry(credential.to_owned()).or_default();
        ended.single.insert(began);
        if ended.single.len() > MAX_ENDED
            && let Some(oldest) = ended.single.pop_first()
        {
            ended.until = oldest;
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Ended>> {
        runtime::lock(&self.ended)
    }
}

/// Returns when a session began, and its credential.
fn parse(session: &str) -> Option<(u64, &str)> {
    let (began, credential) = session.split_once('.')?;
    Some((began.parse().ok()?, credential))
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_hours(500_000)
    }

    #[test]
    fn a_session_ends_with_its_lifetime_with_a_logout_and_with_the_hub() {
        let sessions = Sessions::new(now());
        let [first, second] = [1, 2].map(|after| {
            let moment = now() + Duration::from_millis(after);
            sessions.begin("eu.digest", moment)
        });
        let seen = |session: &str, time| sessions.credential(session, time).map(str::to_owned);
        let open = Some("eu.digest".to_owned());
        assert_eq!(seen(&first, now()), open);
        let almost = LIFETIME.checked_sub(Duration::from_secs(1)).unwrap();
        assert_eq!(seen(&first, now() + almost), open);
        let late = now() + LIFETIME + Duration::from_millis(1);
        assert_eq!(seen(&first, late), None);
        sessions.end(&first, now());
        assert_eq!(seen(&first, now()), None);
        assert_eq!(seen(&second, now()), open);
        let restarted = Sessions::new(now() + Duration::from_secs(1));
        assert_eq!(restarted.credential(&second, now()), None);
        for nonsense in ["", ".", "a.b", "-1.b", "99999999999999999999999.b"] {
            assert_eq!(sessions.credential(nonsense, now()), None, "{nonsense}");
            sessions.end(nonsense, now());
        }
    }

    #[test]
    fn a_clock_that_is_set_back_does_not_prevent_logins() {
        let sessions = Sessions::new(now());
        let earlier = now() - Duration::from_hours(1);
        let session = sessions.begin("*.digest", earlier);
        assert_eq!(sessions.credential(&session, earlier), Some("*.digest"));
    }

    #[test]
    fn many_logouts_end_older_sessions_and_never_open_one_again() {
        let sessions = Sessions::new(now());
        let at = |number: usize| now() + Duration::from_millis(number as u64 + 1);
        let all: Vec<_> = (0..MAX_ENDED + 10)
            .map(|number| sessions.begin("eu.digest", at(number)))
            .collect();
        let newest = sessions.begin("eu.digest", at(MAX_ENDED + 10));
        let other = sessions.begin("us.digest", now());
        for session in &all {
            sessions.end(session, now());
        }
        assert_eq!(sessions.lock()["eu.digest"].single.len(), MAX_ENDED);
        assert!(
            all.iter()
                .all(|session| sessions.credential(session, now()).is_none())
        );
        assert!(sessions.credential(&newest, now()).is_some());
        assert!(sessions.credential(&other, now()).is_some(), "{other}");
    }
}
