//! Finds or installs the tool of the step.
//!
//! This phase turns the settings into a request. `tool` knows how a tool is found.

use tracing::{info, warn};

use crate::context::RunContext;
use crate::error::StepError;
use crate::tool::{self, ResolvedTool, ToolConfig};

/// The tool of that version, from the image, the cache or a download.
pub(crate) async fn resolve_tool(
    run: &RunContext<'_>,
    range: &str,
) -> Result<ResolvedTool, StepError> {
    let (terraform_index, tofu_index) = run.config.release_indexes();
    let tools = &run.config.tools;
    let config = ToolConfig {
        cache_dir: run.folders.tool_cache.clone(),
        terraform_index,
        tofu_index,
        mirror: tools.release_mirror_url.clone(),
        selection: tools.tool_selection,
        signatures: tools.release_signatures,
        extra_keys: tools.release_keys_file.clone(),
        path: run.child_env().path(),
        retry_for: tool::RETRY_FOR,
    };
    let notify = |text: &str| info!("{text}");
    let resolved = tool::resolve(run.job.tool(), range, &config, &notify).await?;
    info!(version = %resolved.version, path = %resolved.path.display(), "using {}", resolved.tool);
    Ok(resolved)
}

/// Script steps get the tool on their `PATH` if it is available (W-25). Many do not need it.
pub(crate) async fn resolve_optional_tool(run: &RunContext<'_>) -> Option<ResolvedTool> {
    let resolved = Box::pin(resolve_tool(run, &run.job.terraform_version));
    match run.unless_stopped(resolved).await {
        Ok(tool) => Some(tool),
        Err(error) => {
            warn!(%error, "scripts run without the tool on PATH");
            None
        }
    }
}
