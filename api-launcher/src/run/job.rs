//! The job document of a folder's run: who it belongs to on this machine, and what the options ask for. What
//! Terrakube's API would compose from a workspace (contract 1.2, 1.4).

use std::env::VarError;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use job_contract::job::{NO_COMMIT, REMOTE_CONTENT, Variable};
use job_contract::{Document, Exit, JobData, StepType, Tool};
use uuid::{Uuid, uuid};

use super::args::{Assignment, EnvVariable, InputArgs, PlanArgs};
use crate::failure::Failure;

/// The organization of every folder on this machine.
pub(crate) const ORGANIZATION: Uuid = uuid!("6d617966-6c79-4000-8000-6c6f63616c21");
/// Its name, as scripts see it.
const ORGANIZATION_NAME: &str = "local";
/// Any version will do.
const ANY_VERSION: &str = "*";

/// The workspace of a folder: the same folder, the same state, whenever it is run. `dir` is canonical.
pub(crate) fn workspace_id(dir: &Path) -> Uuid {
    Uuid::new_v5(&ORGANIZATION, dir.as_os_str().as_bytes())
}

/// What a folder's run is made of, beside the options.
#[derive(Debug)]
pub(crate) struct Folder<'a> {
    /// The root module, canonical.
    pub(crate) dir: &'a Path,
    /// It, below the packed root, as job data name it.
    pub(crate) root_module: String,
    pub(crate) tarball: &'a Path,
    pub(crate) job_id: String,
    pub(crate) tool: Tool,
}

/// The first step's document. Later steps of the job differ in type and step id only.
pub(crate) fn build(
    folder: &Folder<'_>,
    plan: &PlanArgs,
    inputs: &InputArgs,
) -> Result<JobData, Failure> {
    let source = url::Url::from_file_path(folder.tarball).map_err(|()| {
        let path = folder.tarball.display();
        let text = format!("the path `{path}` cannot be written as a URL");
        Failure::new(Exit::BadConfiguration, text)
    })?;
    let name = folder
        .dir
        .file_name()
        .map_or_else(|| "root".into(), |name| name.to_string_lossy().into_owned());
    let step_type = if plan.destroy {
        StepType::PlanDestroy
    } else {
        StepType::Plan
    };
    let mut job = JobData {
        step_type: Some(step_type.name().to_owned()),
        organization_id: ORGANIZATION.to_string(),
        workspace_id: workspace_id(folder.dir).to_string(),
        job_id: folder.job_id.clone(),
        step_id: new_step_id(),
        terraform_version: ANY_VERSION.to_owned(),
        source: Some(source.into()),
        branch: REMOTE_CONTENT.to_owned(),
        folder: Some(folder.root_module.clone()),
        vcs_type: Some("PUBLIC".to_owned()),
        refresh: !plan.no_refresh,
        refresh_only: plan.refresh_only,
        show_header: false,
        commit_id: Some(NO_COMMIT.to_owned()),
        tofu: folder.tool == Tool::OpenTofu,
        ..JobData::default()
    };
    for (key, value) in [
        ("TF_IN_AUTOMATION", "1"),
        ("workspaceName", &name),
        ("organizationName", ORGANIZATION_NAME),
    ] {
        job.environment_variables
            .insert(key.to_owned(), value.to_owned());
    }
    apply_inputs(&mut job, inputs, |name| std::env::var(name))?;
    Ok(job)
}

pub(crate) fn new_step_id() -> String {
    Uuid::new_v4().to_string()
}

/// The same job's apply.
pub(crate) fn apply_step(planned: &JobData, step_id: String) -> JobData {
    JobData {
        step_type: Some(StepType::Apply.name().to_owned()),
        step_id,
        ..planned.clone()
    }
}

/// The document with what the options say put over what it says itself. It stays as it is where they say nothing.
pub(crate) fn with_inputs(
    document: Document,
    inputs: &InputArgs,
    own: impl Fn(&str) -> Result<String, VarError>,
) -> Result<Document, Failure> {
    let mut job = JobData::clone(&document);
    apply_inputs(&mut job, inputs, own)?;
    Ok(if job == *document {
        document
    } else {
        Document::written(&job)
    })
}

/// Puts what the options say into a job.
pub(crate) fn apply_inputs(
    job: &mut JobData,
    inputs: &InputArgs,
    own: impl Fn(&str) -> Result<String, VarError>,
) -> Result<(), Failure> {
    let has_flags = job
        .variables
        .values()
        .any(|variable| variable.hcl.is_some());
    for Assignment { name, value } in &inputs.vars {
        let hcl = match job.variables.get(name) {
            Some(known) => known.hcl,
            // A text, where the other variables of the document say what they are.
            None if has_flags => Some(false),
            None => None,
        };
        let value = value.clone();
        job.variables.insert(name.clone(), Variable { value, hcl });
    }
    for variable in &inputs.envs {
        let (name, value) = match variable {
            EnvVariable::Set(Assignment { name, value }) => (name, value.clone()),
            EnvVariable::Forward(name) => (
                name,
                own(name).map_err(|error| not_forwarded(name, &error))?,
            ),
        };
        job.environment_variables.insert(name.clone(), value);
    }
    if let Some(tool) = inputs.tool {
        job.tofu = Tool::from(tool) == Tool::OpenTofu;
    }
    if let Some(version) = &inputs.tool_version {
        job.terraform_version.clone_from(version);
    }
    Ok(())
}

fn not_forwarded(name: &str, error: &VarError) -> Failure {
    let failed = |text| Failure::new(Exit::BadConfiguration, text);
    match error {
        VarError::NotPresent => failed(format!(
            "`{name}` is to be passed on to the tool, but is not set"
        ))
        .with_hint("set it, or give the value with --env NAME=VALUE"),
        VarError::NotUnicode(_) => failed(format!(
            "the value of `{name}` is not UTF-8 text and cannot be passed on"
        )),
    }
}

/// Names in the root module under which variable files are read after every other one, in their order: the
/// tool loads `*.auto.tfvars` by name. `taken` are the names there already.
pub(crate) fn var_file_names<'a>(
    taken: impl Iterator<Item = &'a str>,
    files: &[PathBuf],
) -> Vec<String> {
    const PREFIX: &str = "zz_mayfly_";
    let last = taken
        .filter(|name| name.ends_with(".auto.tfvars") || name.ends_with(".auto.tfvars.json"))
        .max()
        .unwrap_or("");
    // `~` sorts after every letter, for the folder that has names such as `zzz.auto.tfvars` itself.
    let outrank = if last < PREFIX { "" } else { "~" };
    files
        .iter()
        .enumerate()
        .map(|(n, file)| {
            let json = if file.extension().is_some_and(|end| end == "json") {
                ".json"
            } else {
                ""
            };
            let stem = stem(file);
            format!("{outrank}{PREFIX}{n:04}{stem}.auto.tfvars{json}")
        })
        .collect()
}

/// What a variable file is called, for the messages of the tool: those name the copy.
fn stem(file: &Path) -> String {
    const LONGEST: usize = 60;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let name = name.trim_end_matches(".json").trim_end_matches(".tfvars");
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || c == '-' {
            c
        } else {
            '_'
        }
    };
    let plain: String = name.chars().take(LONGEST).map(plain).collect();
    format!("_{plain}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli;

    fn args(line: &str) -> Box<super::super::args::RunArgs> {
        let words = ["api-launcher", "run"]
            .into_iter()
            .chain(line.split_whitespace());
        match cli::parse(words.map(Into::into)).unwrap().command {
            cli::Command::Run(args) => args,
            other => panic!("{other:?}"),
        }
    }

    fn job(line: &str) -> JobData {
        let args = args(line);
        let folder = Folder {
            dir: Path::new("/work/my stack"),
            root_module: "/my stack".into(),
            tarball: Path::new("/data dir/100%/\u{e9}#?.tar.gz"),
            job_id: "7".into(),
            tool: Tool::Terraform,
        };
        build(&folder, &args.plan, &args.inputs).unwrap()
    }

    #[test]
    fn a_folders_job_is_a_valid_cli_driven_document() {
        let job = job("--var a=b=c --env X=1");
        job.validate().unwrap();
        assert!(job.is_remote_content() && !job.show_header && job.refresh && !job.tofu);
        assert_eq!(job.step_type(), Ok(StepType::Plan));
        assert_eq!(job.folder(), "/my stack");
        assert_eq!(job.terraform_version, "*");
        assert_eq!(job.commit(), None);
        assert_eq!(job.variables["a"].value, "b=c");
        assert_eq!(job.environment_variables["X"], "1");
        assert_eq!(job.environment_variables["workspaceName"], "my stack");
        let url = url::Url::parse(job.source.as_deref().unwrap()).unwrap();
        assert_eq!(
            url.to_file_path().unwrap(),
            Path::new("/data dir/100%/\u{e9}#?.tar.gz")
        );
    }

    #[test]
    fn options_choose_what_is_planned() {
        assert_eq!(job("--destroy").step_type(), Ok(StepType::PlanDestroy));
        assert!(job("--refresh-only").refresh_only);
        assert!(!job("--no-refresh").refresh);
        let tofu = job("--tool tofu --tool-version ~>1.9");
        assert!(tofu.tofu);
        assert_eq!(tofu.terraform_version, "~>1.9");
    }

    #[test]
    fn an_apply_belongs_to_the_planned_job() {
        let plan = job("--destroy --var a=1");
        let apply = apply_step(&plan, "other".into());
        assert_eq!(apply.step_type(), Ok(StepType::Apply));
        assert_eq!((apply.job_id, apply.source), (plan.job_id, plan.source));
        assert_ne!(apply.step_id, plan.step_id);
    }

    #[test]
    fn a_forwarded_variable_must_be_set() {
        let args = args("--env PRESENT --env ABSENT");
        let own = |name: &str| match name {
            "PRESENT" => Ok("yes".to_owned()),
            _ => Err(VarError::NotPresent),
        };
        let mut job = JobData::default();
        let error = apply_inputs(&mut job, &args.inputs, own).unwrap_err();
        assert!(error.to_string().contains("`ABSENT`"), "{error}");
        assert!(error.hint.is_some());
        assert_eq!(job.environment_variables["PRESENT"], "yes");
    }

    #[test]
    fn a_document_is_unchanged_without_options() {
        let json = br#"{"unknown": null, "variables": [{"key":"a","value":"[1]","hcl":true}] }"#;
        let document = Document::from_json(json.to_vec()).unwrap();
        let own = |_: &str| Err(VarError::NotPresent);
        let same = with_inputs(document.clone(), &args("").inputs, own).unwrap();
        assert_eq!(same.json(), json);
        let changed = with_inputs(document, &args("--var a=[2] --var b=x").inputs, own).unwrap();
        let changed = Document::from_json(changed.json().to_vec()).unwrap();
        let variable = |name: &str| {
            let variable = &changed.variables[name];
            (variable.value.as_str(), variable.hcl)
        };
        assert_eq!(variable("a"), ("[2]", Some(true)));
        assert_eq!(variable("b"), ("x", Some(false)));
    }

    #[test]
    fn a_folder_keeps_its_workspace_and_shares_it_with_no_other() {
        let id = |path| workspace_id(Path::new(path));
        assert_eq!(id("/a/b"), id("/a/b"));
        assert_ne!(id("/a/b"), id("/a/c"));
    }

    #[test]
    fn variable_files_are_read_last_and_in_order() {
        let files = [
            PathBuf::from("envs/prod.tfvars"),
            PathBuf::from("größe 2.tfvars.json"),
        ];
        assert_eq!(
            var_file_names(["x.auto.tfvars", "zzz.tf"].into_iter(), &files),
            [
                "zz_mayfly_0000_prod.auto.tfvars",
                "zz_mayfly_0001_gr__e_2.auto.tfvars.json"
            ]
        );
        assert_eq!(
            var_file_names(["zzz.auto.tfvars"].into_iter(), &files[..1]),
            ["~zz_mayfly_0000_prod.auto.tfvars"]
        );
    }
}
