//! Finds or installs the tool of the step.
//!
//! This phase turns the settings into a request. `tool` knows how a tool is found.

use std::fs::File;
use std::io;
use std::time::{Duration, SystemTime};

use provider_store::{Progress, is_on_writable_volume};
use runtime::lock;
use tracing::{info, warn};

use crate::context::RunContext;
use crate::error::StepError;
use crate::tool::{self, Origin, ResolvedTool, SharedCache, ToolConfig};
use crate::volume::Volume;

/// The tool of that version, from the image, the cache or a download.
pub(crate) async fn resolve_tool(
    run: &RunContext<'_>,
    range: &str,
) -> Result<ResolvedTool, StepError> {
    let (terraform_index, tofu_index) = run.config.release_indexes();
    let tools = &run.config.tools;
    let config = ToolConfig {
        cache_dir: run.folders.tool_cache.clone(),
        shared: shared_cache(run).await,
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
    if config.shared.is_none() && resolved.origin != Origin::Path {
        hold(run, &resolved).map_err(|source| {
            let text = format!("could not open `{}`", resolved.path.display());
            StepError::infrastructure(text).because(&source)
        })?;
    }
    info!(version = %resolved.version, path = %resolved.path.display(), "using {}", resolved.tool);
    Ok(resolved)
}

/// In a pod, a volume that can be written is one that other runs can write.
async fn shared_cache(run: &RunContext<'_>) -> Option<SharedCache> {
    let is_set = run.config.tools.tool_cache_dir.is_some() || run.config.store.data_dir.is_some();
    if !is_set || !run.config.is_in_pod() {
        return None;
    }
    let cache = run.folders.tool_cache.clone();
    let volume = Volume::new(Duration::from_secs(run.config.tools.cache_timeout_seconds));
    let looked_at = cache.clone();
    let looking = move || is_on_writable_volume(&looked_at);
    let is_writable = volume.in_time(&Progress::default(), looking).await;
    let is_shared = is_writable.unwrap_or_else(|error| {
        warn!(%error, "nothing is known about the volume of the tool cache");
        true
    });
    is_shared.then(|| SharedCache::new(cache, volume, run.layout.private().join("tools")))
}

/// A tool that is used where it is must not be removed before the run ends.
fn hold(run: &RunContext<'_>, resolved: &ResolvedTool) -> io::Result<()> {
    let file = File::open(&resolved.path)?;
    // A cache may be one that cannot be written.
    let _ = file.set_modified(SystemTime::now());
    // If somebody is about to remove it, this is as if it had come a moment later.
    let _ = file.try_lock_shared();
    lock(&run.held_tools).push(file);
    Ok(())
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
