//! A volume that may hang. What uses it runs in threads of their own. If nothing moves there for some time, the volume is not used any
//! more in this run. A slow volume on which something moves is one that is waited for.
//!
//! No code waits for a thread that hangs. But the kernel ends a process only when its threads have left the kernel. NFS lets them go when
//! they are killed, FUSE does not before its server has answered or is gone.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use provider_store::Progress;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tracing::warn;

/// How many times progress is looked at until a volume counts as one that hangs.
const LOOKS: u32 = 4;

/// What is known about a volume. Clones know the same.
#[derive(Clone, Debug)]
pub(crate) struct Volume {
    patience: Duration,
    hangs: Arc<AtomicBool>,
    was_reported: Arc<AtomicBool>,
}

impl Volume {
    /// `patience`: how long nothing may move.
    pub(crate) fn new(patience: Duration) -> Self {
        Self {
            patience,
            hangs: Arc::default(),
            was_reported: Arc::default(),
        }
    }

    /// Whether nothing has moved. Then no more work is begun.
    pub(crate) fn hangs(&self) -> bool {
        self.hangs.load(Ordering::Relaxed)
    }

    /// Whether it hangs, and this did not say so before.
    pub(crate) fn hangs_since_last_look(&self) -> bool {
        self.hangs() && !self.was_reported.swap(true, Ordering::Relaxed)
    }

    /// Does work, which counts its progress, in another thread. After an error, it may go on there in its own folder.
    pub(crate) async fn in_time<T: Send + 'static>(
        &self,
        progress: &Progress,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        if self.hangs() {
            return Err(hanging());
        }
        let (done, mut ending) = oneshot::channel();
        thread::Builder::new()
            .name("volume".to_owned())
            .spawn(move || {
                // Nobody may be left who wants it.
                let _ = done.send(work());
            })?;
        let (mut seen, mut looks) = (progress.steps(), 0);
        loop {
            match timeout(self.patience / LOOKS, &mut ending).await {
                Ok(Ok(done)) => return done,
                Ok(Err(_)) => return Err(io::Error::other("its thread ended unexpectedly")),
                Err(_) => {}
            }
            let now = progress.steps();
            looks = if now == seen { looks + 1 } else { 0 };
            seen = now;
            if looks == LOOKS {
                if !self.hangs.swap(true, Ordering::Relaxed) {
                    warn!("a volume hangs; this run goes on without it");
                }
                return Err(hanging());
            }
        }
    }
}

fn hanging() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "its volume hangs")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::time::{Instant, sleep};

    use super::*;
    use test_peers::clock::hold_clock;

    const PATIENCE: Duration = Duration::from_secs(40);

    #[tokio::test(start_paused = true)]
    async fn a_volume_that_hangs_is_given_up_once_for_all_work() {
        let volume = Volume::new(PATIENCE);
        let progress = Progress::default();
        let (resume, paused) = mpsc::channel::<()>();
        let began = Instant::now();
        let done = volume.in_time(&progress, move || Ok(paused.recv().is_ok()));
        assert_eq!(done.await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed().as_secs(), PATIENCE.as_secs());
        let began = Instant::now();
        let next = volume.clone().in_time(&progress, || Ok(())).await;
        assert_eq!(next.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(began.elapsed(), Duration::ZERO);
        drop(resume);
    }

    #[tokio::test(start_paused = true)]
    async fn a_volume_on_which_something_moves_is_waited_for() {
        let volume = Volume::new(PATIENCE);
        let progress = Progress::default();
        let (end, ending) = mpsc::channel();
        let work = move || {
            ending.recv().unwrap();
            Ok("done")
        };
        let movement = async {
            for _ in 0..10 {
                sleep(PATIENCE * 3 / 4).await;
                progress.step();
            }
            // From here on, only threads are waited for.
            let held = hold_clock();
            end.send(()).unwrap();
            held
        };
        let (done, _held) = tokio::join!(volume.in_time(&progress, work), movement);
        assert_eq!(done.unwrap(), "done");
        let failed = volume.in_time(&progress, || Err::<(), _>(io::ErrorKind::NotFound.into()));
        assert_eq!(failed.await.unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(!volume.hangs());
    }
}
