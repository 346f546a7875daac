//! Names of stored artifacts. The API reads the same objects with its own code, so these names are part of the wire format
//! (contract 6).

/// File name of a stored plan, in the working directory and in every store.
pub const PLAN_FILE: &str = "terraformLibrary.tfPlan";

/// File name of the files that a plan step leaves to its apply, beside its plan.
pub const PLAN_FILES_FILE: &str = "mayflyPlanFiles.tar.gz";

/// File name of a plan step's record about its plan.
const PLAN_RECORD_FILE: &str = "mayflyPlan.json";

/// File name of the list of a workspace's states that are kept and not stored.
const KEPT_STATES_FILE: &str = "mayflyKeptStates.json";

/// File name of a workspace's current state.
const STATE_FILE: &str = "terraform.tfstate";

/// What the hub stores for itself, in the place of an organization. Ids of organizations are UUIDs.
pub const OF_HUB: &str = "mayfly";

/// Top-level area of a store: a key prefix on S3 and GCS, a container on Azure, a folder locally.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Area {
    /// Plans and states: `tfstate`, locally `local/state`.
    State,
    /// Step output and job context: `tfoutput`, locally `local/output`.
    Output,
}

impl Area {
    /// Prefix or container on an object store.
    pub const fn bucket_prefix(self) -> &'static str {
        match self {
            Self::State => "tfstate",
            Self::Output => "tfoutput",
        }
    }

    /// All areas.
    pub const ALL: [Self; 2] = [Self::State, Self::Output];

    /// Folder under the local store's root.
    pub const fn local_folder(self) -> &'static str {
        match self {
            Self::State => "local/state",
            Self::Output => "local/output",
        }
    }
}

/// Name of one stored object within its [`Area`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey {
    pub area: Area,
    /// Path within the area, `/`-separated.
    pub path: String,
}

impl ObjectKey {
    fn state(path: String) -> Self {
        let area = Area::State;
        Self { area, path }
    }

    fn output(path: String) -> Self {
        let area = Area::Output;
        Self { area, path }
    }

    /// Current state of a workspace, in the tool's backend. Contract 6.1.
    pub fn backend_state(organization: &str, workspace: &str) -> Self {
        Self::state(format!("{organization}/{workspace}/{STATE_FILE}"))
    }

    /// The plan of a step. Contract 6.2.
    pub fn plan(organization: &str, workspace: &str, job: &str, step: &str) -> Self {
        Self::state(format!(
            "{organization}/{workspace}/{job}/{step}/{PLAN_FILE}"
        ))
    }

    /// The files that a plan step leaves to the apply of its plan.
    pub fn plan_files(organization: &str, workspace: &str, job: &str, step: &str) -> Self {
        Self::state(format!(
            "{organization}/{workspace}/{job}/{step}/{PLAN_FILES_FILE}"
        ))
    }

    /// The record about the plan that a job's apply uses. Contract 6.2.
    pub fn plan_record(organization: &str, workspace: &str, job: &str) -> Self {
        Self::state(format!(
            "{organization}/{workspace}/{job}/{PLAN_RECORD_FILE}"
        ))
    }

    /// State as `show -json` prints it, under a random name. Contract 6.4.
    pub fn state_json(organization: &str, workspace: &str, name: &str) -> Self {
        Self::state(format!("{organization}/{workspace}/state/{name}.json"))
    }

    /// State as the backend stores it, under the same name. Contract 6.4.
    pub fn state_raw(organization: &str, workspace: &str, name: &str) -> Self {
        Self::state(format!("{organization}/{workspace}/state/{name}.raw.json"))
    }

    /// A state that the tool could not store, until it is stored.
    pub fn errored_state(organization: &str, workspace: &str, job: &str, step: &str) -> Self {
        Self::state_raw(organization, workspace, &errored_state_name(job, step))
    }

    /// The list of a workspace's states that are kept and not stored. Contract 6.4.
    pub fn kept_states(organization: &str, workspace: &str) -> Self {
        Self::state(format!("{organization}/{workspace}/{KEPT_STATES_FILE}"))
    }

    /// Stored log of a step. Contract 6.3.
    pub fn step_output(organization: &str, job: &str, step: &str) -> Self {
        Self::output(format!("{organization}/{job}/{step}.tfoutput"))
    }

    /// Name of the object in a bucket with all areas.
    pub fn in_bucket(&self) -> String {
        format!("{}/{}", self.area.bucket_prefix(), self.path)
    }

    /// Context document of a job. Contract 6.6.
    pub fn context(job: &str) -> Self {
        Self::output(format!("context/{job}/context.json"))
    }
}

/// The ids by which the artifacts of a step are named.
#[derive(Clone, Copy, Debug)]
pub struct StepIds<'i> {
    pub organization: &'i str,
    pub workspace: &'i str,
    pub job: &'i str,
    pub step: &'i str,
}

/// What a step writes into the store, besides the state in the tool's backend. Executors of pools name an artifact to their
/// hub, which computes its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Artifact {
    Plan,
    /// The files that a plan step leaves to the apply of its plan.
    PlanFiles,
    PlanRecord,
    /// The published state as JSON.
    State,
    /// The published state as the tool's backend stores it.
    RawState,
    ErroredState,
    /// The log of the step.
    Output,
}

impl Artifact {
    pub const ALL: [Self; 7] = [
        Self::Plan,
        Self::PlanFiles,
        Self::PlanRecord,
        Self::State,
        Self::RawState,
        Self::ErroredState,
        Self::Output,
    ];

    /// The name on the wire.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::PlanFiles => "plan-files",
            Self::PlanRecord => "plan-record",
            Self::State => "state",
            Self::RawState => "raw-state",
            Self::ErroredState => "errored-state",
            Self::Output => "output",
        }
    }

    /// The artifact with this name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|artifact| artifact.name() == name)
    }

    /// The key of a step's artifact. A published state has a name of its own.
    pub fn key(self, ids: StepIds<'_>, state_name: &str) -> ObjectKey {
        let StepIds {
            organization,
            workspace,
            job,
            step,
        } = ids;
        match self {
            Self::Plan => ObjectKey::plan(organization, workspace, job, step),
            Self::PlanFiles => ObjectKey::plan_files(organization, workspace, job, step),
            Self::PlanRecord => ObjectKey::plan_record(organization, workspace, job),
            Self::State => ObjectKey::state_json(organization, workspace, state_name),
            Self::RawState => ObjectKey::state_raw(organization, workspace, state_name),
            Self::ErroredState => ObjectKey::errored_state(organization, workspace, job, step),
            Self::Output => ObjectKey::step_output(organization, job, step),
        }
    }
}

/// The name of a state that the tool could not store.
pub fn errored_state_name(job: &str, step: &str) -> String {
    format!("errored-{job}-{step}")
}

/// Folder of such states that only the disk took, under the data directory.
pub fn errored_folder(organization: &str, workspace: &str) -> String {
    format!("errored/{organization}/{workspace}")
}

/// Path of such a state, under the data directory.
pub fn errored_file(organization: &str, workspace: &str, job: &str, step: &str) -> String {
    let folder = errored_folder(organization, workspace);
    format!("{folder}/{}.tfstate", errored_state_name(job, step))
}

/// Path of the state file of the local backend, under the store's root. Contract 6.1.
pub fn local_backend_state(organization: &str, workspace: &str) -> String {
    format!("local/backend/{organization}/{workspace}/{STATE_FILE}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_contract() {
        let plan = ObjectKey::plan("org", "ws", "412", "step");
        assert_eq!(
            plan.in_bucket(),
            "tfstate/org/ws/412/step/terraformLibrary.tfPlan"
        );
        assert_eq!(
            ObjectKey::plan_record("org", "ws", "412").path,
            "org/ws/412/mayflyPlan.json"
        );
        assert_eq!(
            ObjectKey::state_json("org", "ws", "f").path,
            "org/ws/state/f.json"
        );
        assert_eq!(
            ObjectKey::state_raw("org", "ws", "f").path,
            "org/ws/state/f.raw.json"
        );
        assert_eq!(
            ObjectKey::errored_state("org", "ws", "412", "step").path,
            "org/ws/state/errored-412-step.raw.json"
        );
        assert_eq!(
            ObjectKey::kept_states("org", "ws").path,
            "org/ws/mayflyKeptStates.json"
        );
        let output = ObjectKey::step_output("org", "412", "step");
        assert_eq!(
            format!("{}/{}", output.area.local_folder(), output.path),
            "local/output/org/412/step.tfoutput"
        );
        assert_eq!(ObjectKey::context("412").path, "context/412/context.json");
        let state = ObjectKey::backend_state("org", "ws");
        assert_eq!(state.in_bucket(), "tfstate/org/ws/terraform.tfstate");
        assert_eq!(
            local_backend_state("org", "ws"),
            "local/backend/org/ws/terraform.tfstate"
        );
    }
}
