//! Gives the tool and scripts the identity of the pod at the clouds.
//!
//! `identity` knows what that is.

use std::time::SystemTime;

use job_contract::Exit;

use crate::context::RunContext;
use crate::deploy_role::WantedRole;
use crate::error::StepError;
use crate::identity::{check_token, give};
use crate::workspace::{Workspace, write_private_file};

const GOOGLE_VARIABLE: &str = "GOOGLE_APPLICATION_CREDENTIALS";
const GOOGLE_FILE: &str = "identity-google.json";

/// Adds the variables of the identity to those of the workspace. Credentials that the run brings come first.
pub(crate) async fn give_identity(
    run: &RunContext<'_>,
    workspace: &mut Workspace,
) -> Result<(), StepError> {
    let settings = &run.config.identity;
    let mut identities = settings.identities().map_err(|problems| {
        let texts: Vec<_> = problems
            .iter()
            .map(|(name, problem)| format!("`{name}` {problem}"))
            .collect();
        StepError::new(Exit::BadConfiguration, texts.join("; "))
    })?;
    if WantedRole::has_role(&run.job) {
        // The token of the pod may serve to get that role, and is not for the tool.
        identities.aws = None;
    }
    let given = give(&identities, &settings.identity_dir, &run.job, |name| {
        run.child_env().is_of_run(name) || workspace.environment.contains_key(name)
    });
    for (cloud, variable) in &given.brought {
        let text = format!(
            "{cloud}: the run brings credentials (`{variable}`), which are used instead of the pod's identity."
        );
        run.log.writer().line(&text).await;
    }
    for token in &given.tokens {
        check_token(token, SystemTime::now())?;
    }
    for (name, value) in given.variables {
        workspace.environment.insert(name.to_owned(), value);
    }
    if let Some(document) = given.google {
        let path = run.layout.private().join(GOOGLE_FILE);
        write_private_file(&path, document.as_bytes()).map_err(|source| {
            StepError::work_folder("could not write the credentials file", &path, &source)
        })?;
        let path = path.to_string_lossy().into_owned();
        workspace
            .environment
            .insert(GOOGLE_VARIABLE.to_owned(), path);
    }
    Ok(())
}
