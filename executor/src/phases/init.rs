//! Initialises the working directory: the backend override, the input variables and `init` itself.
//!
//! This phase knows nothing of the operation that follows.

use std::path::Path;

use artifact_store::BackendSettings;
use job_contract::progress::Phase;
use job_contract::{Exit, chain};
use platform::terrakube::token;
use runtime::private_file::private_folder;
use secrecy::ExposeSecret;

use crate::child_env::ChildEnv;
use crate::context::RunContext;
use crate::error::StepError;
use crate::operation::{OperationContext, memory_exceeded};
use crate::phases::provide_providers::{
    ProvidedForInit, module_store, provide_providers, prune_store,
};
use crate::process::{Capture, Completion, ToLog};
use crate::references::texts_of_secret;
use crate::stop::MEMORY_HINT;
use crate::terraform::backend::{self, BackendAccess};
use crate::terraform::credentials::{self, AccessBy, AccessFile, InitConfig};
use crate::terraform::resolved_modules;
use crate::terraform::variables::{self, Declarations, Definitions};
use crate::workspace::{ModuleAccess, OpenModuleAccess};

/// How much output of a quiet init is kept, to show it if init fails.
const QUIET_INIT_BYTES: usize = 4 * 1024 * 1024;

/// Writes the backend override into the working directory.
pub(crate) fn write_backend(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
) -> Result<BackendAccess, StepError> {
    let (run, prepared) = (context.run, context.prepared);
    let settings = &run.backend;
    if let BackendSettings::Local { path } = settings {
        let folder = path.parent().expect("a state file has a folder");
        private_folder(folder).map_err(|source| StepError::working_dir(folder, &source))?;
    }
    backend::write(
        settings,
        &prepared.tool.version,
        &prepared.working_dir,
        run.layout.private(),
        env,
    )
}

/// Reads which variables the root module in `dir` declares.
pub(crate) async fn read_declarations(
    run: &RunContext<'_>,
    dir: &Path,
) -> Result<Declarations, StepError> {
    let (dir, tool) = (dir.to_owned(), run.job.tool());
    // Large files take a while, and a stop order must not wait for them.
    let reading = tokio::task::spawn_blocking(move || Declarations::read(&dir, tool));
    tokio::select! {
        biased;
        _ = run.stop.ordered() => Err(StepError::stopped()),
        read = reading => read.map_err(|_| StepError::panicked())?,
    }
}

/// Defines the input variables. Scripts before init may still write configuration, so the declarations are read after
/// them.
pub(crate) async fn define_variables(
    context: &OperationContext<'_, '_>,
) -> Result<Definitions, StepError> {
    let (run, job) = (context.run, context.run.child_job());
    let dir = &context.prepared.working_dir;
    if job.variables.is_empty() {
        variables::check(dir, job.tool())?;
        return Ok(Definitions::default());
    }
    let declarations = read_declarations(run, dir).await?;
    for (_, variable) in declarations.ephemeral(&job.variables) {
        let secrets = texts_of_secret(&variable.value);
        run.log
            .add_secrets(secrets.iter().map(ExposeSecret::expose_secret));
    }
    let undeclared = declarations.undeclared(&job.variables);
    if !undeclared.is_empty() {
        let names = undeclared.join(", ");
        let text = format!("Variables the root module does not declare, not passed on: {names}");
        run.log.writer().line(&text).await;
    }
    let resolved = run.resolved.get();
    let declarations = match resolved.map(|resolved| resolved.expressions.clone()) {
        Some(expressions) => declarations.with_expressions(expressions),
        None => declarations,
    };
    declarations.define(&job.variables, run.layout.private())
}

/// Runs `init`. Only this command is told how to reach the platform's registry. It is taken back afterwards in any case.
pub(crate) async fn init(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
) -> Result<(), StepError> {
    let work = init_with_providers(context, env);
    context.run.phase(Phase::Init, work).await
}

async fn init_with_providers(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
) -> Result<(), StepError> {
    let (run, mut env) = (context.run, env.clone());
    let hosts = platform_hosts(run).await?;
    let mut provided = provide_providers(context, &mut env, &hosts).await?;
    let workspace = &context.prepared.workspace;
    let (private, path) = (run.layout.private(), run.child_env().path());
    let folder = &context.prepared.working_dir;
    let modules = ModuleAccess {
        store: module_store(run),
        ..workspace.modules.clone()
    };
    let opening = modules.open(private, &path, folder, &mut env);
    let git = opening.await?;
    for text in git.iter().flat_map(|git| &git.withheld) {
        run.log.writer().line(text).await;
    }
    let guarded = git.as_ref().and_then(|git| git.ssh_command.as_deref());
    let ssh = guarded.or(workspace.init_ssh_command.as_deref());
    let mut done = init_with_access(context, &hosts, &provided, &env, ssh).await;
    if done.is_err() {
        let looking = async { Ok(provided.leave_out_damaged(run).await) };
        // After a stop order, the error says so already.
        if run.unless_stopped(looking).await.unwrap_or(false) {
            done = init_with_access(context, &hosts, &provided, &env, ssh).await;
        }
    }
    for text in git.iter().flat_map(OpenModuleAccess::take_problems) {
        run.log.writer().line(&text).await;
    }
    if let (Ok(()), Some(git)) = (&done, &git) {
        let keeping = async {
            let shared = git.keep_objects().await;
            if shared.kept > 0 {
                prune_store(run).await;
            }
            Ok(shared)
        };
        let shared = Box::pin(run.unless_stopped(keeping)).await?;
        if shared.stored + shared.kept > 0 {
            let text = format!(
                "Repositories of modules: {} in the store, {} kept for later runs.",
                shared.stored, shared.kept
            );
            run.log.writer().line(&text).await;
        }
    }
    drop(git);
    let finished = provided.finish(run).await;
    done.and(finished)?;
    let data_dir = env.get("TF_DATA_DIR");
    resolved_modules::check(&workspace.root, folder, data_dir)
}

async fn init_with_access(
    context: &OperationContext<'_, '_>,
    hosts: &[String],
    provided: &ProvidedForInit,
    env: &ChildEnv,
    ssh: Option<&str>,
) -> Result<(), StepError> {
    let mut env = env.clone();
    let access = write_access(context, hosts, provided, &mut env)?;
    let done = run_init(context, &env, ssh).await;
    access.remove()?;
    done
}

/// The hosts of the platform that the tool may ask.
async fn platform_hosts(run: &RunContext<'_>) -> Result<Vec<String>, StepError> {
    if run.platform_server.is_none() {
        return Ok(run.connections.tool_hosts());
    }
    run.unless_stopped(async { Ok(registry_hosts(run).await) })
        .await
}

fn write_access(
    context: &OperationContext<'_, '_>,
    hosts: &[String],
    provided: &ProvidedForInit,
    env: &mut ChildEnv,
) -> Result<AccessFile, StepError> {
    let run = context.run;
    let (token, registry);
    let by = if let Some(server) = &run.platform_server {
        registry = server.registry();
        Some(AccessBy::Registry(&registry))
    } else {
        let minted = run
            .connections
            .tokens()
            .and_then(|tokens| tokens.mint(token::INIT));
        match minted {
            Some(minted) => {
                token = minted;
                run.log.add_secrets([token.expose_secret()]);
                Some(AccessBy::Token(&token))
            }
            None => None,
        }
    };
    let access = by.filter(|_| !hosts.is_empty());
    let (overlay, forced) = (provided.overlay.as_ref(), provided.forced_hosts());
    if access.is_none() && overlay.is_none() && forced.is_empty() {
        return Ok(AccessFile::none());
    }
    let config = InitConfig {
        access: access.map(|by| (hosts, by)),
        overlay,
        forced,
        tool: run.job.tool(),
        home: &run.folders.home,
        private: run.layout.private(),
    };
    credentials::write_init_config(&config, env)
}

/// The hosts whose modules and providers the hub passes on. A run that needs none of them continues without.
async fn registry_hosts(run: &RunContext<'_>) -> Vec<String> {
    match run.connections.registry_hosts().await {
        Ok(hosts) => hosts,
        Err(error) => {
            let text = format!(
                "Private modules of the platform are not found: the hub does not say where they are: {}.",
                chain(&error)
            );
            run.log.writer().line(&text).await;
            Vec::new()
        }
    }
}

/// git uses the command line `ssh` for modules over ssh.
async fn run_init(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
    ssh: Option<&str>,
) -> Result<(), StepError> {
    let (run, job) = (context.run, &context.run.job);
    if job.show_header {
        let banner = run.palette().init(job);
        run.log.writer().line(banner.trim_end_matches('\n')).await;
        let mut consumer = ToLog(run.log.writer());
        let done = context.terraform.init(env, ssh, &mut consumer).await;
        consumer.0.close().await;
        return init_end(context, done?);
    }
    let mut capture = Capture::up_to(QUIET_INIT_BYTES);
    let done = context.terraform.init(env, ssh, &mut capture).await?;
    if !done.ended.is_success() {
        run.log_output(&capture.bytes).await;
    }
    init_end(context, done)
}

fn init_end(context: &OperationContext<'_, '_>, done: Completion) -> Result<(), StepError> {
    match memory_exceeded(done, &context.run.oom_kills) {
        Some(text) => Err(StepError::new(Exit::StepFailed, text).with_hint(MEMORY_HINT)),
        None if done.ended.is_success() => Ok(()),
        None => {
            let text = format!("init ended with {}", done.ended);
            Err(StepError::new(Exit::StepFailed, text))
        }
    }
}
