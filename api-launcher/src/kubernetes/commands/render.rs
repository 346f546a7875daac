//! `api-launcher render`: the objects a job document would become, with no cluster at hand.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use cluster::job_settings::DeploymentArgs;
use job_contract::{Exit, env};

use super::build;
use super::output::Output;
use crate::failure::Failure;

/// Stands for what tells one attempt to create a Job from another, so that the same document renders the same.
const ATTEMPT: &str = "0000000000000000";

/// What is rendered, and how.
#[derive(Args, Debug)]
pub struct RenderArgs {
    /// Job document to render, JSON or encoded; `-` reads standard input
    #[arg(short, long, value_name = "JOB")]
    pub file: PathBuf,
    /// Format of the list
    #[arg(short, long, value_enum, default_value_t = Format::Yaml)]
    pub output: Format,
    /// Base URL of the platform's API, as the launcher that serves has it
    #[arg(long, value_name = "URL", env = env::API_URL)]
    pub api_url: Option<String>,
    #[command(flatten)]
    pub deployment: DeploymentArgs,
}

/// Format of the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    Yaml,
    Json,
}

pub(super) fn render(args: &RenderArgs, out: &mut Output) -> Result<Exit, Failure> {
    let (_, manifest) = build(&args.file, &args.deployment, args.api_url.as_deref(), out)?;
    let list = manifest.of_attempt(ATTEMPT).to_list();
    match args.output {
        Format::Json => out.print_json(&list)?,
        Format::Yaml => {
            // Job data is one long line, which must stay one.
            let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
            out.print_text(serde_saphyr::to_string_with_options(&list, options))?;
        }
    }
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::super::output::captured;
    use super::*;
    use std::fs;

    use job_contract::chain;
    use serde_json::Value;

    const JOB: &str = r#"{"type":"terraformPlan","organizationId":"o","workspaceId":"w","jobId":"1","stepId":"s",
        "environmentVariables":{"EPHEMERAL_CONFIG_ANNOTATIONS":"a=yes;b=012;c=1e3;d=null;e=# x;f=~;g=on;h=é\u0007"}}"#;

    fn rendered(
        job: &str,
        output: Format,
        deployment: DeploymentArgs,
    ) -> Result<String, (Exit, String)> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("job.json");
        fs::write(&file, job).unwrap();
        let args = RenderArgs {
            file,
            output,
            api_url: None,
            deployment,
        };
        let (mut out, shown, _) = captured::output(false);
        render(&args, &mut out)
            .map(|_| shown.text())
            .map_err(|failure| (failure.exit, chain(&failure)))
    }

    #[test]
    fn yaml_and_json_have_the_same_content() {
        let yaml = rendered(JOB, Format::Yaml, DeploymentArgs::default()).unwrap();
        let json = rendered(JOB, Format::Json, DeploymentArgs::default()).unwrap();
        let from_yaml: Value = serde_saphyr::from_str(&yaml).unwrap();
        assert_eq!(from_yaml, serde_json::from_str::<Value>(&json).unwrap());
        assert_eq!(from_yaml["kind"], "List");
        assert_eq!(from_yaml["items"].as_array().unwrap().len(), 2);
    }

    /// Readers of Kubernetes follow YAML 1.1, where more words than `true` mean something.
    #[test]
    fn text_that_looks_like_something_else_is_quoted() {
        let yaml = rendered(JOB, Format::Yaml, DeploymentArgs::default()).unwrap();
        for line in [
            r#"a: "yes""#,
            r#"b: "012""#,
            r#"c: "1e3""#,
            r#"d: "null""#,
            r#"g: "on""#,
        ] {
            let single = line.replace('"', "'");
            assert!(
                yaml.contains(line) || yaml.contains(&single),
                "{line} in {yaml}"
            );
        }
    }

    #[test]
    fn faults_of_the_operator_and_of_the_run_have_their_own_codes() {
        let wrong = DeploymentArgs {
            namespace: Some("A".into()),
            image: Some("B".into()),
            ..DeploymentArgs::default()
        };
        let (exit, text) = rendered(JOB, Format::Yaml, wrong).unwrap_err();
        assert_eq!((exit, text.lines().count()), (Exit::BadConfiguration, 2));
        let job = JOB
            .replace("a=yes", "=hunter2")
            .replace("ANNOTATIONS", "LABELS");
        let (exit, text) = rendered(&job, Format::Yaml, DeploymentArgs::default()).unwrap_err();
        assert_eq!(exit, Exit::BadJobData);
        assert!(
            text.lines()
                .all(|line| line.contains("EPHEMERAL_CONFIG_LABELS")),
            "{text}"
        );
        assert!(!text.contains("hunter2"), "{text}");
        let (exit, _) = rendered("{}", Format::Yaml, DeploymentArgs::default()).unwrap_err();
        assert_eq!(exit, Exit::BadJobData);
    }
}
