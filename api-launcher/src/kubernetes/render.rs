//! `api-launcher render`: the objects a job document would become, with no cluster at hand.

use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use cluster::job_settings::DeploymentArgs;
use job_contract::{Exit, chain, env};
use serde_json::Value;

use crate::document;
use crate::terminal::stdout;

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

/// Prints the list, or on standard error everything that is wrong, and returns the exit code.
pub fn run(args: &RenderArgs) -> Exit {
    match render(args) {
        Ok(text) => stdout::print(text.as_bytes()),
        Err((exit, lines)) => {
            let mut stderr = io::stderr().lock();
            for line in lines {
                // Where the terminal is gone, the exit code still tells.
                let _ = writeln!(stderr, "error: {line}");
            }
            exit
        }
    }
}

fn render(args: &RenderArgs) -> Result<String, (Exit, Vec<String>)> {
    let deployment = args.deployment.resolve(args.api_url.as_deref());
    let deployment = deployment.map_err(|errors| {
        let lines = errors.iter().map(ToString::to_string).collect();
        (Exit::BadConfiguration, lines)
    })?;
    for warning in &deployment.warnings {
        // Where the terminal is gone, the list still comes.
        let _ = writeln!(io::stderr(), "warning: {warning}");
    }
    let job = document::read(&args.file).map_err(|error| (error.exit(), vec![chain(&error)]))?;
    let manifest = manifest::build(&job, &deployment).map_err(|errors| {
        let lines = errors.errors().iter().map(ToString::to_string);
        (errors.exit(), lines.collect())
    })?;
    for note in &manifest.notes {
        // Likewise.
        let _ = writeln!(io::stderr(), "warning: {note}");
    }
    to_text(&manifest.of_attempt(ATTEMPT).to_list(), args.output).map_err(|error| {
        (
            Exit::Defect,
            vec![format!("could not write the list: {error}")],
        )
    })
}

/// The list as text, ending with one line break.
fn to_text(list: &Value, format: Format) -> Result<String, String> {
    let mut text = match format {
        Format::Json => serde_json::to_string_pretty(list).map_err(|e| e.to_string())?,
        Format::Yaml => {
            // Job data is one long line, which must stay one.
            let options = serde_saphyr::ser_options! { prefer_block_scalars: false };
            serde_saphyr::to_string_with_options(list, options).map_err(|e| e.to_string())?
        }
    };
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    use cluster::job_settings::DeploymentArgs;

    const JOB: &str = r#"{"type":"terraformPlan","organizationId":"o","workspaceId":"w","jobId":"1","stepId":"s",
        "environmentVariables":{"EPHEMERAL_CONFIG_ANNOTATIONS":"a=yes;b=012;c=1e3;d=null;e=# x;f=~;g=on;h=é\u0007"}}"#;

    fn rendered(
        job: &str,
        output: Format,
        deployment: DeploymentArgs,
    ) -> Result<String, (Exit, Vec<String>)> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("job.json");
        fs::write(&file, job).unwrap();
        render(&RenderArgs {
            file,
            output,
            api_url: None,
            deployment,
        })
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
        let (exit, lines) = rendered(JOB, Format::Yaml, wrong).unwrap_err();
        assert_eq!((exit, lines.len()), (Exit::BadConfiguration, 2));
        let job = JOB
            .replace("a=yes", "=hunter2")
            .replace("ANNOTATIONS", "LABELS");
        let (exit, lines) = rendered(&job, Format::Yaml, DeploymentArgs::default()).unwrap_err();
        assert_eq!(exit, Exit::BadJobData);
        assert!(
            lines
                .iter()
                .all(|line| line.contains("EPHEMERAL_CONFIG_LABELS")),
            "{lines:?}"
        );
        assert!(!lines.concat().contains("hunter2"), "{lines:?}");
        let (exit, _) = rendered("{}", Format::Yaml, DeploymentArgs::default()).unwrap_err();
        assert_eq!(exit, Exit::BadJobData);
    }
}
