//! Job data in the shapes of contract 1.7.

use job_contract::job::{Command, StepType};
use job_contract::{JobData, Tool};

use crate::Repository;

pub const ORGANIZATION: &str = "2f7b1d7e-6c0f-4c55-8d6b-1b7a4b0f9a01";
pub const WORKSPACE: &str = "91c3a5be-0a61-4f0d-9e35-7f6f2f1f3c02";
pub const JOB: &str = "412";

/// The step of that type on the default branch of a repository. Each type has a step id of its own, so that
/// several steps of one job can be told apart.
pub fn step(step_type: StepType, repository: &Repository) -> JobData {
    JobData {
        step_type: Some(step_type.name().to_owned()),
        organization_id: ORGANIZATION.to_owned(),
        workspace_id: WORKSPACE.to_owned(),
        job_id: JOB.to_owned(),
        step_id: step_id(step_type as usize + 1),
        terraform_version: ">=1.4.0".to_owned(),
        source: Some(repository.url()),
        branch: "main".to_owned(),
        folder: Some("/".to_owned()),
        vcs_type: Some("PUBLIC".to_owned()),
        environment_variables: [
            ("TF_IN_AUTOMATION", "1"),
            ("workspaceName", "network-dev"),
            ("organizationName", "acme"),
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .into(),
        ..JobData::default()
    }
}

/// A `terraformPlan` step.
pub fn plan(repository: &Repository) -> JobData {
    step(StepType::Plan, repository)
}

/// The step of that type, by that tool.
pub fn step_by(tool: Tool, step_type: StepType, repository: &Repository) -> JobData {
    JobData {
        tofu: tool == Tool::OpenTofu,
        ..step(step_type, repository)
    }
}

/// A `terraformPlan` step by that tool.
pub fn plan_by(tool: Tool, repository: &Repository) -> JobData {
    step_by(tool, StepType::Plan, repository)
}

/// The `terraformApply` step that follows a plan of the same job.
pub fn apply_after(plan: &JobData) -> JobData {
    JobData {
        step_type: Some(StepType::Apply.name().to_owned()),
        step_id: step_id(StepType::Apply as usize + 1),
        ..plan.clone()
    }
}

/// A `customScripts` step that runs these commands.
pub fn scripts(repository: &Repository, commands: Vec<Command>) -> JobData {
    JobData {
        command_list: commands,
        ..step(StepType::CustomScripts, repository)
    }
}

/// The same step in another job.
pub fn in_job(job: &JobData, job_id: &str) -> JobData {
    JobData {
        job_id: job_id.to_owned(),
        ..job.clone()
    }
}

/// A BASH command that runs when nothing else is said.
pub fn bash(priority: i64, script: &str) -> Command {
    Command {
        runtime: Some("BASH".to_owned()),
        script: script.to_owned(),
        priority,
        ..Command::default()
    }
}

fn step_id(number: usize) -> String {
    format!("5a5e1f0b-9c3f-4a55-9f0e-3d0f3b8f{number:04}")
}

/// The same command between init and the operation.
pub fn before(command: Command) -> Command {
    Command {
        before: true,
        ..command
    }
}

/// The same command before init.
pub fn before_init(command: Command) -> Command {
    Command {
        before_init: true,
        ..command
    }
}

/// The same command after a successful operation.
pub fn after(command: Command) -> Command {
    Command {
        after: true,
        ..command
    }
}

/// The step with OpenTofu's encryption of state and plan.
pub fn encrypted(step: &JobData) -> JobData {
    let encryption = "key_provider \"pbkdf2\" \"key\" {\n  passphrase = \"a-long-passphrase-of-a-test\"\n}\nmethod \"aes_gcm\" \
         \"method\" {\n  keys = key_provider.pbkdf2.key\n}\nstate {\n  method   = method.aes_gcm.method\n  enforced = \
         true\n}\nplan {\n  method   = method.aes_gcm.method\n  enforced = true\n}\n";
    let mut step = step.clone();
    let variable = ("TF_ENCRYPTION".to_owned(), encryption.to_owned());
    step.environment_variables.extend([variable]);
    step
}
