//! Makes sure that the tool keeps the state where the platform reads it. Before `init`, this phase refuses what would lead the tool
//! elsewhere. After it, the phase compares the backend that the tool has set up with the one of the run.
//!
//! `terraform::backend` knows what leads elsewhere.

use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::operation::OperationContext;
use crate::terraform::backend::detours::{self, Rival};
use crate::terraform::backend::initialised::{self, Initialised};
use crate::terraform::backend::override_file;

/// Refuses variables and files that lead elsewhere, and puts aside what another `init` has left.
pub(crate) async fn refuse_detours(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
) -> Result<(), StepError> {
    let (run, prepared) = (context.run, context.prepared);
    let dir = &prepared.working_dir;
    detours::refuse_variables(&run.backend, env)?;
    let certain: Vec<_> = rivals(context)
        .await?
        .into_iter()
        .filter(|rival| rival.is_certain)
        .collect();
    if !certain.is_empty() {
        return Err(StepError::user(format!(
            "{} of the source would take the place of the backend of this run, and the platform would not find the state",
            named(&certain)
        ))
        .with_hint(
            "remove the blocks `backend` and `cloud` from this file, or do not commit it: the platform decides where the state is",
        ));
    }
    if let Some(file) = detours::own_state(dir) {
        let file = file.strip_prefix(dir).unwrap_or(&file).display();
        return Err(StepError::user(format!(
            "`{file}` of the source is a state, and the state of this workspace is elsewhere"
        ))
        .with_hint(format!(
            "if the state of the workspace lacks these resources, store them there first; then remove `{file}` from the source"
        )));
    }
    let root = &prepared.workspace.root;
    for path in initialised::set_aside(root, dir, env, &run.backend)? {
        let path = path.strip_prefix(dir).unwrap_or(&path).display();
        let text = format!("Not used: `{path}`, which an earlier init has left.");
        run.log.writer().line(&text).await;
    }
    Ok(())
}

/// Refuses any backend but that of the run. Scripts may have changed it since `init`.
pub(crate) async fn check_backend(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
) -> Result<(), StepError> {
    let backend = &context.run.backend;
    detours::refuse_variables(backend, env)?;
    let found = Initialised::read(&context.prepared.working_dir, env)?;
    let Some(difference) = found.difference(backend) else {
        return Ok(());
    };
    let rivals = rivals(context).await?;
    let suspects = if rivals.is_empty() {
        String::new()
    } else {
        format!(". The cause may be {}", named(&rivals))
    };
    Err(StepError::user(format!(
        "the state would not be where the platform reads it: {difference}{suspects}"
    ))
    .with_hint(
        "remove what sets another backend or workspace: a file of the source whose name ends with `override.tf`, a variable of \
         the run, or a script that runs `init` or `workspace`",
    ))
}

async fn rivals(context: &OperationContext<'_, '_>) -> Result<Vec<Rival>, StepError> {
    let (run, dir) = (context.run, context.prepared.working_dir.clone());
    let (tool, ours) = (run.job.tool(), override_file(&run.backend));
    // Large files take a while, and a stop order must not wait for them.
    let looking = tokio::task::spawn_blocking(move || detours::rivals(&dir, tool, ours));
    run.unless_stopped(async { looking.await.map_err(|_| StepError::panicked())? })
        .await
}

fn named(rivals: &[Rival]) -> String {
    let names = rivals.iter().map(|rival| format!("`{}`", rival.name));
    names.collect::<Vec<_>>().join(", ")
}
