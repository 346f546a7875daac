//! Waits until a condition holds. A wait has a limit. If it fails, it says what it waited for, and what it saw last. Only the waits
//! for a live Terrakube (`tests/conformance`) are others: they end at the first error.

#![expect(
    clippy::panic,
    reason = "a wait fails its test by panicking, with what it saw last"
)]

use std::convert::Infallible;
use std::fmt::{self, Display};
use std::thread;
use std::time::Duration;

use tokio::time::Instant;

/// No test waits longer for one thing. It only ends a test that would hang, so it is far above what a busy machine needs.
pub const DEADLINE: Duration = Duration::from_mins(5);
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(50);

/// What a look has seen: what is waited for, or what is there instead. An error is seen instead: it may pass.
pub trait Look {
    /// What is waited for.
    type Found;
    /// What is seen instead.
    type Seen: Display;

    /// # Errors
    /// With what is seen instead, if that is known.
    fn found(self) -> Result<Self::Found, Option<Self::Seen>>;
}

impl Look for bool {
    type Found = ();
    type Seen = Infallible;

    fn found(self) -> Result<(), Option<Infallible>> {
        if self { Ok(()) } else { Err(None) }
    }
}

impl<T> Look for Option<T> {
    type Found = T;
    type Seen = Infallible;

    fn found(self) -> Result<T, Option<Infallible>> {
        self.ok_or(None)
    }
}

impl<T, E: Display> Look for Result<T, E> {
    type Found = T;
    type Seen = E;

    fn found(self) -> Result<T, Option<E>> {
        self.map_err(Some)
    }
}

/// A wait that has found nothing.
#[derive(Debug)]
pub struct NotInTime<S> {
    what: String,
    limit: Duration,
    /// What was seen last. Nothing if no look has ended.
    pub seen: Option<S>,
}

impl<S: Display> Display for NotInTime<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: not within {:?}", self.what, self.limit)?;
        match &self.seen {
            Some(seen) => write!(f, ", but {seen}"),
            None => Ok(()),
        }
    }
}

impl<S: Display + fmt::Debug> std::error::Error for NotInTime<S> {}

/// Waits until `look` finds something.
pub async fn until<L: Look>(what: &str, mut look: impl AsyncFnMut() -> L) -> L::Found {
    let mut wait = Wait::new(what, DEADLINE);
    loop {
        if let Some(end) = wait.round(look()).await {
            return end.unwrap_or_else(|late| panic!("{late}"));
        }
    }
}

/// The same with a limit of its own. The future can move to another thread, which that of an async closure cannot.
///
/// # Errors
/// With what was seen last.
pub async fn within<L: Look, F: Future<Output = L>>(
    limit: Duration,
    what: &str,
    mut look: impl FnMut() -> F,
) -> Result<L::Found, NotInTime<L::Seen>> {
    let mut wait = Wait::new(what, limit);
    loop {
        if let Some(end) = wait.round(look()).await {
            return end;
        }
    }
}

/// Waits until `look` finds something, and blocks the thread meanwhile.
pub fn until_blocking<L: Look>(what: &str, look: impl FnMut() -> L) -> L::Found {
    let found = within_blocking(DEADLINE, what, look);
    found.unwrap_or_else(|late| panic!("{late}"))
}

/// The same with a limit of its own.
///
/// # Errors
/// With what was seen last.
pub fn within_blocking<L: Look>(
    limit: Duration,
    what: &str,
    mut look: impl FnMut() -> L,
) -> Result<L::Found, NotInTime<L::Seen>> {
    let mut wait = Wait::new(what, limit);
    loop {
        match look().found() {
            Ok(found) => return Ok(found),
            Err(seen) => wait.seen = seen,
        }
        if wait.began.elapsed() > limit {
            return Err(wait.give_up());
        }
        thread::sleep(wait.next_pause());
    }
}

/// A wait so far.
struct Wait<'a, S> {
    what: &'a str,
    limit: Duration,
    began: Instant,
    pause: Duration,
    seen: Option<S>,
}

impl<'a, S> Wait<'a, S> {
    fn new(what: &'a str, limit: Duration) -> Self {
        Self {
            what,
            limit,
            began: Instant::now(),
            pause: FIRST_PAUSE,
            seen: None,
        }
    }

    /// A look, and a pause if it finds nothing. Returns how the wait ends, if it does. The limit also ends the look itself.
    async fn round<L: Look<Seen = S>>(
        &mut self,
        look: impl Future<Output = L>,
    ) -> Option<Result<L::Found, NotInTime<S>>> {
        let look = tokio::time::timeout_at(self.began + self.limit, look);
        match look.await.map(Look::found) {
            Ok(Ok(found)) => return Some(Ok(found)),
            Ok(Err(seen)) => self.seen = seen,
            Err(_) => return Some(Err(self.give_up())),
        }
        // A look that never waits is not ended by its limit.
        if self.began.elapsed() >= self.limit {
            return Some(Err(self.give_up()));
        }
        tokio::time::sleep(self.next_pause()).await;
        None
    }

    fn next_pause(&mut self) -> Duration {
        let next = LONGEST_PAUSE.min(2 * self.pause);
        std::mem::replace(&mut self.pause, next)
    }

    fn give_up(&mut self) -> NotInTime<S> {
        NotInTime {
            what: self.what.to_owned(),
            limit: self.limit,
            seen: self.seen.take(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    #[tokio::test(start_paused = true)]
    async fn a_wait_that_fails_says_what_was_seen_last() {
        let looks = &AtomicUsize::new(1);
        let late = within(SHORT, "the third look", || async {
            let look = looks.fetch_add(1, Ordering::SeqCst);
            if look == 3 {
                std::future::pending::<()>().await;
            }
            Err::<(), _>(format!("look {look}"))
        });
        let text = "the third look: not within 50ms, but look 2";
        assert_eq!(late.await.unwrap_err().to_string(), text);
    }

    #[tokio::test(start_paused = true)]
    async fn a_look_that_never_waits_has_a_limit_too() {
        let late = within(SHORT, "nothing", || async { false });
        assert_eq!(
            late.await.unwrap_err().to_string(),
            "nothing: not within 50ms"
        );
    }

    #[test]
    fn a_blocking_wait_that_fails_says_so_too() {
        let late = within_blocking(SHORT, "a number", || Err::<(), _>("none"));
        assert_eq!(
            late.unwrap_err().to_string(),
            "a number: not within 50ms, but none"
        );
    }

    #[test]
    fn an_error_passes() {
        let mut looks = 0..3;
        let found = until_blocking("the last look", || looks.next().map_or(Ok(7), Err));
        assert_eq!(found, 7);
    }
}
