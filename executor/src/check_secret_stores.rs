//! The command `check-secret-stores`: logs in at each store of secrets as a run would, and reads no secret. `helm test` runs it in a
//! pod with the settings of runs.

use std::io::{self, Write as _};

use job_contract::Exit;
use runtime::handover;
use secret_stores::{Lookup, Purpose, RunIds, SecretReader, Settings};

/// The word on the command line.
pub(crate) const COMMAND: &str = "check-secret-stores";

/// Checks the logins, prints a line for each, and returns the exit code.
pub(crate) fn run() -> u8 {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let checked = match runtime {
        Ok(runtime) => runtime.block_on(check()),
        Err(error) => Err((Exit::Infrastructure, error.to_string())),
    };
    let (exit, text) = match checked {
        Ok(lines) => {
            let has_failed = lines.iter().any(|(works, _)| !works);
            let text: Vec<String> = lines.into_iter().map(|(_, line)| line).collect();
            let exit = if has_failed {
                Exit::StepFailed
            } else {
                Exit::Done
            };
            (exit, text.join("\n"))
        }
        Err((exit, error)) => (exit, format!("error: {error}")),
    };
    // A reader that has closed the pipe wants no more lines.
    let _ = writeln!(io::stdout(), "{text}");
    exit.code()
}

/// A line for each login, and whether it works.
async fn check() -> Result<Vec<(bool, String)>, (Exit, String)> {
    let unusable = |errors: Vec<String>| (Exit::BadConfiguration, errors.join("; "));
    let own = |name: &str| handover::var(name);
    let owners = Lookup::new(&own)
        .owners()
        .map_err(|error| unusable(vec![error]))?;
    let mut lines = Vec::new();
    let everybody = (String::new(), String::new(), "all runs".to_owned());
    for (organization, workspace, name) in std::iter::once(everybody).chain(owners) {
        let purpose = Purpose {
            run: RunIds {
                organization: &organization,
                workspace: &workspace,
            },
            session_name: "mayfly-check",
        };
        let Some(settings) = Settings::read(&own, purpose).map_err(unusable)? else {
            continue;
        };
        if settings.allow.is_empty() {
            lines.push((
                true,
                format!("warning: {name}: no rule limits which secrets runs may read"),
            ));
        }
        let reader = SecretReader::open(settings).map_err(|error| unusable(vec![error]))?;
        for (store, result) in reader.check().await {
            lines.push(match result {
                Ok(identity) => (true, format!("ok: {name}: {store} as {identity}")),
                Err(error) => (false, format!("failed: {name}: {error}: {}", error.hint())),
            });
        }
    }
    if lines.is_empty() {
        lines.push((
            true,
            "references to secrets are off: no store is configured".to_owned(),
        ));
    }
    Ok(lines)
}
