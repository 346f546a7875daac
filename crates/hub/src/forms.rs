//! Limits the forms in progress, which are in memory: of exchanges, and of logins. Their senders have shown no token yet. So
//! a new form never waits for another one: if there are too many, it ends the one that has been read longest.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio_util::sync::CancellationToken;

/// The forms in progress.
#[derive(Debug)]
pub(crate) struct Forms {
    limit: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    in_progress: usize,
    /// Those that are not read completely, the oldest first.
    reading: BTreeMap<u64, CancellationToken>,
}

/// The place of a form, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    forms: Arc<Forms>,
    id: u64,
    ended: CancellationToken,
}

impl Forms {
    /// Limits forms to this number in progress.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            state: Mutex::default(),
        })
    }

    /// Returns a place, or `None` if all forms are read and are checked.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<Place> {
        let mut state = self.lock();
        if state.in_progress >= self.limit {
            let (_, oldest) = state.reading.pop_first()?;
            // Its place is dropped later. Until then, there is one more.
            oldest.cancel();
        }
        let (id, ended) = (state.next, CancellationToken::new());
        state.next += 1;
        state.in_progress += 1;
        state.reading.insert(id, ended.clone());
        Some(Place {
            forms: Arc::clone(self),
            id,
            ended,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        runtime::lock(&self.state)
    }
}

impl Place {
    /// Completes the reading of the form. Returns `None` if a newer form has ended this one.
    pub(crate) async fn read<T>(&self, reading: impl Future<Output = T>) -> Option<T> {
        let form = tokio::select! {
            biased;
            () = self.ended.cancelled() => None,
            form = reading => Some(form),
        };
        self.forms.lock().reading.remove(&self.id);
        form
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut state = self.forms.lock();
        state.reading.remove(&self.id);
        state.in_progress -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};

    use futures_util::FutureExt as _;

    use super::*;

    const LIMIT: usize = 4;

    #[tokio::test]
    async fn a_new_form_ends_the_oldest_one_and_never_a_check() {
        let forms = Forms::new(LIMIT);
        let mut places: Vec<_> = (0..LIMIT).map(|_| forms.enter().unwrap()).collect();
        assert_eq!(places[0].read(ready(())).await, Some(()));
        let new = forms.enter().unwrap();
        assert_eq!(places[1].read(pending::<()>()).await, None);
        assert_eq!(places[2].read(pending::<()>()).now_or_never(), None);
        drop(places.remove(1));
        places.push(new);
        for place in &places {
            place.read(ready(())).await;
        }
        assert!(forms.enter().is_none(), "all are checked");
        drop(places);
        let state = forms.lock();
        assert_eq!((state.in_progress, state.reading.len()), (0, 0));
    }
}
