//! The run of a folder: pack it, plan it, ask, apply that plan.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use job_contract::status::JobStatus;
use job_contract::{Document, Exit, JobData, Tool};
use platform::local::JobRecord;
use processes::executor::{self, Program};
use uuid::Uuid;

use super::Conclusion;
use super::args::RunArgs;
use super::content::{self, Extra};
use super::event::{Event, Level, RunStatus};
use super::job::{self, Folder, ORGANIZATION};
use super::prompt::{self, Answer};
use super::session::{JobIds, Session, StepOutcome, pending};
use super::signals::Signals;
use super::view::View;
use crate::failure::Failure;
use crate::terminal::Terminal;

const TARBALL: &str = "content.tar.gz";
const STATE_FILE: &str = "terraform.tfstate";

/// What happens to a plan with changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Approval {
    /// It stays a plan; how an apply could be had.
    Never(&'static str),
    /// It was given on the command line.
    Given,
    /// A person at a terminal decides.
    Asked,
}

impl Approval {
    fn of(args: &RunArgs, terminal: Terminal) -> Self {
        if args.plan.plan_only {
            Self::Never("run the same command without --plan-only to apply")
        } else if args.plan.auto_approve {
            Self::Given
        } else if terminal.can_ask(args.output.format) {
            Self::Asked
        } else {
            Self::Never("run the same command with --auto-approve, or on a terminal, to apply")
        }
    }
}

/// Runs the folder from packing to its last step. Until everything the caller named has been looked at,
/// nothing is created.
pub(crate) async fn run(
    args: &RunArgs,
    terminal: Terminal,
    view: &mut View,
    signals: &mut Signals,
) -> Result<Conclusion, Failure> {
    let named = args.dir.clone().unwrap_or_else(|| PathBuf::from("."));
    let dir = content::root_module(&named)?;
    let extras = variable_files(&dir, &args.inputs.var_files)?;
    job::apply_inputs(&mut JobData::default(), &args.inputs, |name| {
        std::env::var(name)
    })?;
    let tool = choose_tool(args, &dir)?;
    refuse_own_backend(&dir, tool)?;
    let program = Program::choose(args.local.executor.as_deref())?;

    let data = args.local.data.locate()?.create()?;
    let workspace = job::workspace_id(&dir);
    let job_id = data.allocate_job_id()?.to_string();
    let ids = JobIds {
        organization: &ORGANIZATION.to_string(),
        workspace: &workspace.to_string(),
        job: &job_id,
    };
    let mut session = Session::open(view, signals, program, data, ids, terminal.color)?;
    announce(&mut session, args, &named, tool, workspace);
    warn_about_state(&mut session, &dir);

    let tarball = session.work.join(TARBALL);
    let root_module = pack(&mut session, args, &dir, extras, &tarball).await?;
    let folder = Folder {
        dir: &dir,
        root_module,
        tarball: &tarball,
        job_id,
        tool,
    };
    let plan = job::build(&folder, &args.plan, &args.inputs)?;
    plan_and_apply(&mut session, &plan, Approval::of(args, terminal)).await
}

fn announce(session: &mut Session<'_>, args: &RunArgs, named: &Path, tool: Tool, workspace: Uuid) {
    let event = Event::RunStarted {
        source: named.display().to_string(),
        organization_id: ORGANIZATION.to_string(),
        workspace_id: workspace.to_string(),
        tool: tool.binary(),
        tool_version: args
            .inputs
            .tool_version
            .clone()
            .unwrap_or_else(|| "*".to_owned()),
        data_dir: session.data.path().to_owned(),
    };
    session.view.show(event);
}

fn warn_about_state(session: &mut Session<'_>, dir: &Path) {
    if dir.join(STATE_FILE).is_file() {
        let kept = session
            .data
            .path()
            .join(job_contract::keys::local_backend_state(
                &ORGANIZATION.to_string(),
                &job::workspace_id(dir).to_string(),
            ));
        session.view.show(Event::warning(format!(
            "`{STATE_FILE}` in this folder is not used: Mayfly keeps the state of this folder in `{}`",
            kept.display()
        )));
    }
}

/// A folder with a backend of its own has its state there. A plan from another state would create everything again.
fn refuse_own_backend(dir: &Path, tool: Tool) -> Result<(), Failure> {
    let Some(file) = content::own_backend(dir, tool)? else {
        return Ok(());
    };
    let text = format!(
        "`{}` sets a backend or `cloud`, and `run` keeps the state of a folder in the data directory",
        file.strip_prefix(dir).unwrap_or(&file).display()
    );
    Err(Failure::new(Exit::BadJobData, text)
        .with_hint("use the tool itself for this folder, or run a copy of it without the backend"))
}

/// Asked for; else OpenTofu for folders written for it, and where it alone is installed.
fn choose_tool(args: &RunArgs, dir: &Path) -> Result<Tool, Failure> {
    let installed = |tool: Tool| which::which(tool.binary()).is_ok();
    Ok(match args.inputs.tool {
        Some(tool) => tool.into(),
        None if content::has_opentofu_files(dir)? => Tool::OpenTofu,
        None if !installed(Tool::Terraform) && installed(Tool::OpenTofu) => Tool::OpenTofu,
        None => Tool::Terraform,
    })
}

/// Read now and once, so that plan and apply get the same, and so that a pipe serves as well as a file.
fn variable_files(dir: &Path, files: &[PathBuf]) -> Result<Vec<Extra>, Failure> {
    let texts = files.iter().map(|path| {
        read_limited(path).map_err(|error| {
            let text = format!("the variable file `{}` is no readable file", path.display());
            Failure::new(Exit::BadConfiguration, text).because(error)
        })
    });
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let present: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect();
    let names = job::var_file_names(present.iter().map(String::as_str), files);
    let extras = names.into_iter().zip(texts);
    Ok(extras.map(|(name, text)| Extra { name, text }).collect())
}

/// The largest file of variables that is taken.
const MAX_VARIABLE_FILE_BYTES: u64 = 16 << 20;

/// What is cut at the limit could pass for the whole.
fn read_limited(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?
        .take(MAX_VARIABLE_FILE_BYTES + 1)
        .read_to_end(&mut text)?;
    if text.len() as u64 > MAX_VARIABLE_FILE_BYTES {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("it has more than {MAX_VARIABLE_FILE_BYTES} bytes, the limit"),
        ));
    }
    Ok(text)
}

/// Packs the folder aside, so that a signal ends the run even while a large tree is read. Returns where in
/// the packed root the root module lies.
async fn pack(
    session: &mut Session<'_>,
    args: &RunArgs,
    dir: &Path,
    extras: Vec<Extra>,
    tarball: &Path,
) -> Result<String, Failure> {
    let (dir, root, tarball) = (dir.to_owned(), args.inputs.root.clone(), tarball.to_owned());
    let left_out = vec![session.data.path().to_owned()];
    let packing = tokio::task::spawn_blocking(move || {
        let content = content::survey(&dir, root.as_deref(), &left_out)?;
        content::write(&content, &extras, &tarball)?;
        Ok::<_, Failure>(content)
    });
    let content = tokio::select! {
        packed = packing => packed.map_err(|error| {
            Failure::new(Exit::Defect, "packing the folder ended unexpectedly").because(error)
        })??,
        signal = session.signals.next() => {
            let text = format!("stopped by {} before anything was started", signal.as_str());
            return Err(Failure::new(executor::stop_exit(signal), text));
        }
    };
    let folder = content.job_folder();
    session.view.show(Event::Diagnostic {
        level: Level::Info,
        message: format!(
            "packed {} entries below `{}`",
            content.entries.len(),
            content.root.display()
        ),
    });
    for note in content.notes {
        session.view.show(Event::warning(note));
    }
    Ok(folder)
}

async fn plan_and_apply(
    session: &mut Session<'_>,
    plan: &JobData,
    approval: Approval,
) -> Result<Conclusion, Failure> {
    let apply = job::apply_step(plan, job::new_step_id());
    let mut steps = vec![pending(plan)];
    if !matches!(approval, Approval::Never(_)) {
        steps.push(pending(&apply));
    }
    let record = JobRecord::queued(&plan.organization_id, &plan.workspace_id, steps);
    session.platform.put_job(&plan.job_id, &record)?;

    let planned = session.run_step(&Document::written(plan)).await?;
    if planned.exit != Exit::Done {
        return Ok(failed(planned, "nothing was applied"));
    }
    if !planned.record.plan_changes {
        return Ok(Conclusion::success(RunStatus::NoChanges));
    }
    if let Some(signal) = planned.stopped_by {
        session.close(plan, JobStatus::Cancelled)?;
        return Ok(Conclusion::stopped(
            signal,
            "the plan is done, nothing was applied",
        ));
    }
    match approval {
        Approval::Never(how) => {
            return Ok(Conclusion {
                hint: Some(how.to_owned()),
                ..Conclusion::success(RunStatus::Planned)
            });
        }
        Approval::Given => {}
        Approval::Asked => {
            let question = "Apply these changes? [y/N]";
            match prompt::ask(session.view, session.signals, question).await {
                Answer::Yes => {}
                Answer::No => {
                    session.close(plan, JobStatus::Rejected)?;
                    return Ok(Conclusion::success(RunStatus::Declined));
                }
                Answer::Signal(signal) => {
                    session.close(plan, JobStatus::Cancelled)?;
                    return Ok(Conclusion::stopped(signal, "nothing was applied"));
                }
            }
        }
    }
    let applied = session.run_step(&Document::written(&apply)).await?;
    Ok(if applied.exit == Exit::Done {
        Conclusion::success(RunStatus::Applied)
    } else {
        failed(applied, "plan again to see what is left to do")
    })
}

fn failed(outcome: StepOutcome, hint: &str) -> Conclusion {
    let mut conclusion = Conclusion::of_failure(outcome);
    conclusion.hint.get_or_insert_with(|| hint.to_owned());
    conclusion
}
