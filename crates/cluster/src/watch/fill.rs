//! What a run lacked in the store of providers that only Jobs of the operator fill. Pure.

use std::collections::BTreeSet;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use verdict::final_report;

use super::message::JobRef;
use super::message::Request;
use super::release::LOOK_AGAIN;
use super::run::TrackedRun;
use super::state::Transition;

/// What a run wanted that ended earlier, before the launcher started, is left to the next run.
const RECENT: Duration = Duration::from_mins(10);

impl Transition<'_> {
    /// Asks once for a Job that fetches what an ended run lacked. Its pods may be seen later than its end.
    pub(super) fn fill_store(&mut self, run: &mut TrackedRun, pods: &[Pod]) {
        let Some(template) = self.state.settings.fill.clone() else {
            return;
        };
        let is_old = run.end.is_some_and(|end| {
            let age = Duration::try_from(self.now.server.duration_since(end.finished));
            age.is_ok_and(|age| age > RECENT)
        });
        if run.is_filling || is_old {
            return;
        }
        let mut packages = BTreeSet::new();
        let mut node = None;
        for pod in pods {
            let wanted = final_report(pod).map(|report| report.wanted);
            let allowed = template.allowed(wanted.iter().flatten());
            if !allowed.is_empty() {
                packages.extend(allowed);
                node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
            }
        }
        if !packages.is_empty() {
            run.is_filling = true;
            let job = Box::new(template.job(&packages, node.as_deref()));
            self.request(&run.job_ref, Request::Fill { job });
        }
    }

    pub(super) fn on_filled(&mut self, job: &JobRef, done: bool) {
        if let Some(run) = self.state.run_of(job).filter(|_| !done) {
            run.is_filling = false;
            self.wake_after(LOOK_AGAIN, &job.run.name);
        }
    }
}
