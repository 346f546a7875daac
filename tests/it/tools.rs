//! Journeys with real providers, each with Terraform and with OpenTofu.

mod broken_volume;
mod carried;
mod changes;
mod filled_store;
mod installation;
mod outputs;
mod provider_store;

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use integration_tests::machine::ExecutorRun;
use integration_tests::{Machine, Outcome, Repository, job};
use job_contract::{JobData, StepType, Tool};
use test_peers::{providers, skips};

use crate::machine;

/// A registry of these tests is never too slow by chance: neither for the tool nor for the executor that answers in its place.
const PATIENT: (&str, &str) = ("TF_REGISTRY_CLIENT_TIMEOUT", "300");

/// No such host is ever asked: its providers are in the mirror.
const HOST: &str = "providers.example.test";

/// A machine whose tool installs providers from a filesystem mirror.
struct Mirrored {
    machine: Machine,
    tool: Tool,
}

impl Mirrored {
    /// `None` if the test is skipped.
    #[track_caller]
    fn new(tool: Tool) -> Option<Self> {
        skips::needed(providers::present())?;
        let machine = machine();
        let mirror = machine.scratch("mirror");
        providers::mirror(&mirror, HOST).unwrap();
        let config = format!(
            "provider_installation {{\n  filesystem_mirror {{\n    path = \"{}\"\n  }}\n}}\n",
            mirror.display()
        );
        fs::write(machine.scratch("config.tfrc"), config).unwrap();
        Some(Self { machine, tool })
    }

    /// Plan and apply of a new job.
    fn steps(&self, repository: &Repository, job_id: &str) -> (JobData, JobData) {
        let plan = job::in_job(&job::plan_by(self.tool, repository), job_id);
        let apply = job::apply_after(&plan);
        self.machine.queue(&[&plan, &apply]);
        (plan, apply)
    }

    fn executor(&self, step: &JobData) -> ExecutorRun<'_> {
        let config = self.machine.scratch("config.tfrc");
        self.machine
            .executor(step)
            .env("TF_CLI_CONFIG_FILE", config)
    }

    #[track_caller]
    fn run(&self, step: &JobData) -> Outcome {
        self.executor(step).run().expect_code(0)
    }

    /// Plans and applies in a new job.
    #[track_caller]
    fn apply(&self, repository: &Repository, job_id: &str) -> (Outcome, Outcome, JobData) {
        let (plan, apply) = self.steps(repository, job_id);
        let (planned, applied) = (self.run(&plan), self.run(&apply));
        (planned, applied, apply)
    }

    /// A file that a resource may write.
    fn file(&self, name: &str) -> PathBuf {
        self.machine.scratch(name)
    }
}

/// A module that may use all providers of the mirror.
fn module(text: &str) -> Repository {
    Repository::with(&[("main.tf", text), ("versions.tf", &requirements(HOST))])
}

/// The providers, as a module asks for them.
fn requirements(host: &str) -> String {
    let mut text = "terraform {\n  required_providers {\n".to_owned();
    for (name, version) in providers::PROVIDERS {
        let source = format!("{host}/{}/{name}", providers::NAMESPACE);
        writeln!(
            text,
            "    {name} = {{\n      source  = \"{source}\"\n      version = \"{version}\"\n    }}"
        )
        .unwrap();
    }
    text.push_str("  }\n}\n");
    text
}

/// A job that destroys.
fn destroy_by(tool: Tool, repository: &Repository, job_id: &str) -> JobData {
    job::in_job(&job::step_by(tool, StepType::Destroy, repository), job_id)
}
