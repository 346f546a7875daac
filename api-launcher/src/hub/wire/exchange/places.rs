//! Limits the exchanges in progress, whose forms are in memory. Their senders have shown no token yet. So a new exchange
//! never waits for the form of another one: if there are too many, it ends the one whose form has been read longest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// The most exchanges in progress.
const MAX_EXCHANGES: usize = 512;

/// The exchanges in progress.
#[derive(Debug, Default)]
pub(crate) struct Exchanges {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    in_progress: usize,
    /// Those whose form is not read completely, the oldest first.
    reading: BTreeMap<u64, CancellationToken>,
}

/// The place of an exchange, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    exchanges: Arc<Exchanges>,
    id: u64,
    ended: CancellationToken,
}

impl Exchanges {
    /// Returns a place, or `None` if all exchanges have their form and are checked.
    pub(super) fn enter(self: &Arc<Self>) -> Option<Place> {
        let mut state = self.lock();
        if state.in_progress >= MAX_EXCHANGES {
            let (_, oldest) = state.reading.pop_first()?;
            // Its place is dropped later. Until then, there is one more.
            oldest.cancel();
        }
        let (id, ended) = (state.next, CancellationToken::new());
        state.next += 1;
        state.in_progress += 1;
        state.reading.insert(id, ended.clone());
        Some(Place {
            exchanges: Arc::clone(self),
            id,
            ended,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    /// Completes the reading of the form. Returns `None` if a newer exchange has ended this one.
    pub(super) async fn read<T>(&self, reading: impl Future<Output = T>) -> Option<T> {
        let form = tokio::select! {
            biased;
            () = self.ended.cancelled() => None,
            form = reading => Some(form),
        };
        self.exchanges.lock().reading.remove(&self.id);
        form
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.exchanges.lock();
        state.reading.remove(&self.id);
        state.in_progress -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_new_exchange_ends_the_oldest_form_and_never_a_check() {
        let exchanges = Arc::<Exchanges>::default();
        let mut places: Vec<_> = (0..MAX_EXCHANGES)
            .map(|_| exchanges.enter().unwrap())
            .collect();
        assert_eq!(places[0].read(ready(())).await, Some(()));
        let new = exchanges.enter().unwrap();
        assert_eq!(places[1].read(pending::<()>()).await, None);
        assert_eq!(places[2].read(pending::<()>()).now_or_never(), None);
        drop(places.remove(1));
        places.push(new);
        for place in &places {
            place.read(ready(())).await;
        }
        assert!(exchanges.enter().is_none(), "all are checked");
        drop(places);
        let state = exchanges.lock();
        assert_eq!((state.in_progress, state.reading.len()), (0, 0));
    }
}
