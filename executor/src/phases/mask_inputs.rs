//! Makes the log mask secrets among the inputs of a stored plan, which the tool, its providers and hooks may show. An apply of that plan
//! does not read them from their stores, or a store gives others by now.
//!
//! `references` knows which inputs these are.

use job_contract::Exit;
use job_contract::keys::PLAN_FILE;
use secrecy::ExposeSecret;

use crate::child_env::ChildEnv;
use crate::error::StepError;
use crate::operation::{Operation, OperationContext};
use crate::references::{has_secret_inputs, secrets_of_plan};

/// Takes the secrets from the plan.
pub(crate) async fn mask_inputs(
    context: &OperationContext<'_, '_>,
    env: &ChildEnv,
) -> Result<(), StepError> {
    let (run, prepared) = (context.run, context.prepared);
    let plan = prepared.plan.as_ref();
    let plan = plan.filter(|_| prepared.operation == Operation::Apply);
    let Some(plan) = plan.filter(|_| run.references.is_some() && has_secret_inputs(&run.job))
    else {
        return Ok(());
    };
    let file = prepared.working_dir.join(PLAN_FILE);
    plan.copy_to(&file)?;
    let env = env.without_prefix("TF_CLI_ARGS");
    let shown = context.terraform.show_plan_file_json(&env, &file).await?;
    let Some(shown) = shown.and_then(|text| serde_json::from_slice(&text).ok()) else {
        if run.stop.given().is_some() {
            return Ok(());
        }
        let text = "the inputs of the plan cannot be read, so the log could not mask their secrets";
        return Err(StepError::new(Exit::StepFailed, text)
            .with_hint("the tool must be able to show the plan as JSON"));
    };
    let secrets = secrets_of_plan(&run.job, &shown);
    run.log
        .add_secrets(secrets.iter().map(ExposeSecret::expose_secret));
    Ok(())
}
