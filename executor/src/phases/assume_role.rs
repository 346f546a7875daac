//! Assumes the role that the workspace names for its deployment, and hands its session to the tool and scripts. It comes before the
//! claim, so a role that the run cannot have changes nothing.
//!
//! `deploy_role` decides whether the run may have it, `role_server` renews it.

use std::time::Duration;

use artifact_store::{BackendSettings, S3Login};
use job_contract::identity::{AWS_TOKEN, session_name};
use job_contract::{Exit, env};
use runtime::handover;
use secrecy::{ExposeSecret as _, SecretString};
use secret_stores::Lookup;
use secret_stores::aws::credentials::Source;
use secret_stores::aws::sign::Keys;
use secret_stores::http::{Http, TlsSettings};
use semver::Version;

use crate::context::RunContext;
use crate::deploy_role::{Assumer, DeployRole, RolePolicy, WantedRole, decide};
use crate::error::StepError;
use crate::identity::BROUGHT_FOR_AWS;
use crate::role_server::{RoleServer, mask};
use crate::terraform::backend::has_own_credentials;
use crate::workspace::Workspace;

/// Time after deadline and grace period for storing results.
const AFTER_DEADLINE: Duration = Duration::from_mins(2);
/// How the tool finds the agent of EKS Pod Identity or ECS.
const AGENT: [&str; 3] = [
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
];

/// Adds the session to the variables of the workspace, if the workspace names a role. `tool` is the version of the tool that opens
/// the store of the state.
pub(crate) async fn assume_role(
    run: &RunContext<'_>,
    workspace: &mut Workspace,
    tool: Option<&Version>,
) -> Result<(), StepError> {
    let Some(wanted) = WantedRole::of(&run.job)? else {
        return Ok(());
    };
    let settings = &run.config.deploy_role;
    let policy = RolePolicy {
        allowed: &settings.assumer_allowed_roles,
        external_id: settings.assumer_external_id.as_deref(),
        region: &settings.assumer_region,
        default_seconds: settings.assumer_duration_seconds,
        delivery: settings.assumer_delivery,
    };
    refuse_other_credentials(run, workspace)?;
    let deadline = run.config.run.limits().deadline;
    let after = run.config.run.grace_period(run.step_type) + AFTER_DEADLINE;
    let lasts = deadline.map(|limit| limit + after);
    let role = decide(&wanted, &policy, || assumer(run), &run.job, lasts)?;
    let agent = agent_of_store(run, &role, tool)?;
    workspace.environment.extend(agent);
    let http = Http::new(&TlsSettings::default())
        .map_err(|text| StepError::new(Exit::BadConfiguration, text))?;
    let session = run.unless_stopped(role.session(&http)).await?;
    let log = run.log.writer();
    mask(&log, &session);
    log.line(&role.to_string()).await;
    let mut set = |name: &str, value: &str| {
        let environment = &mut workspace.environment;
        environment.insert(name.to_owned(), value.to_owned());
    };
    if !role.by_endpoint {
        let keys = &session.keys;
        set("AWS_ACCESS_KEY_ID", &keys.access_key_id);
        set(
            "AWS_SECRET_ACCESS_KEY",
            keys.secret_access_key.expose_secret(),
        );
        if let Some(token) = &keys.session_token {
            set("AWS_SESSION_TOKEN", token.expose_secret());
        }
        return Ok(());
    }
    let server = RoleServer::start(role, http, session, log).map_err(|source| {
        StepError::infrastructure("could not serve the session of the role on loopback")
            .because(&source)
    })?;
    let token = server.token().expose_secret();
    run.log.add_secrets([token]);
    set("AWS_CONTAINER_CREDENTIALS_FULL_URI", &server.url());
    set("AWS_CONTAINER_AUTHORIZATION_TOKEN", token);
    run.role_server.get_or_init(|| server);
    Ok(())
}

/// What else leads libraries away from the session of the role.
const BROUGHT_BESIDE: [&str; 4] = [
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
];

/// Refuses credentials that libraries try before those of the role.
fn refuse_other_credentials(run: &RunContext<'_>, workspace: &Workspace) -> Result<(), StepError> {
    let is_set = |name: &&&str| {
        run.child_env().is_of_run(name) || workspace.environment.contains_key(**name)
    };
    match BROUGHT_FOR_AWS.iter().chain(&BROUGHT_BESIDE).find(is_set) {
        None => Ok(()),
        Some(name) => {
            let role = env::DEPLOY_ROLE;
            let text = format!("the run has both `{role}` and credentials of its own (`{name}`)");
            let hint = format!("remove `{role}` or `{name}`");
            Err(StepError::new(Exit::StepFailed, text).with_hint(hint))
        }
    }
}

/// The variables by which the tool opens the store of its state, if it needs some beside those of the role. Refuses a store that the
/// tool would open with the role.
fn agent_of_store(
    run: &RunContext<'_>,
    role: &DeployRole,
    tool: Option<&Version>,
) -> Result<Vec<(String, String)>, StepError> {
    let Some(version) = tool else {
        return Ok(Vec::new());
    };
    let uses_agent = matches!(
        &run.backend,
        BackendSettings::S3 {
            login: S3Login::Container,
            ..
        }
    );
    if has_own_credentials(&run.backend, version) && !(uses_agent && role.by_endpoint) {
        let names = AGENT.into_iter().filter(|_| uses_agent);
        let found = names.filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?)));
        return Ok(found.collect());
    }
    let text = format!(
        "with `{}`, the tool would open the store of its state as the role, and not as the executor does",
        env::DEPLOY_ROLE
    );
    let hint = "let the executor open the store with keys or with a web identity: see docs/deploy-roles.md";
    Err(StepError::new(Exit::BadConfiguration, text).with_hint(hint))
}

/// Who assumes the role: keys, or the first identity that the pod has.
fn assumer(run: &RunContext<'_>) -> Result<Assumer, StepError> {
    let bad = |text: String| StepError::new(Exit::BadConfiguration, text);
    let own = |name: &str| handover::var(name);
    let lookup = Lookup::new(&own);
    let secret = |name| lookup.text_or_file(name).map_err(bad);
    match env::ASSUMER_SECRETS.map(secret) {
        [Err(error), _] | [_, Err(error)] => return Err(error),
        [Ok(Some(id)), Ok(Some(secret))] => {
            run.log.add_secrets([&secret]);
            return Ok(Assumer::Keys(Keys {
                access_key_id: id,
                secret_access_key: SecretString::from(secret),
                session_token: None,
            }));
        }
        [Ok(None), Ok(None)] => {}
        _ => {
            let [id, secret] = env::ASSUMER_SECRETS;
            return Err(bad(format!("`{id}` and `{secret}` are required together")));
        }
    }
    if !run.config.deploy_role.assumer_pod_identity {
        let [id, secret] = env::ASSUMER_SECRETS;
        let text = format!(
            "the run has `{}`, and the executor has no keys that assume roles (`{id}`)",
            env::DEPLOY_ROLE
        );
        let hint = format!(
            "set `{id}` and `{secret}`; or `{}=true`, if code of runs may use all that the identity of the pod may: see \
             docs/deploy-roles.md",
            env::ASSUMER_POD_IDENTITY
        );
        return Err(bad(text).with_hint(hint));
    }
    if let Some(file) = lookup.text("AWS_WEB_IDENTITY_TOKEN_FILE") {
        return Ok(Assumer::Token {
            file: file.into(),
            own_role: lookup.text("AWS_ROLE_ARN"),
        });
    }
    let identity = &run.config.identity;
    if let Some(own_role) = identity.identities().ok().and_then(|all| all.aws) {
        return Ok(Assumer::Token {
            file: identity.identity_dir.join(AWS_TOKEN),
            own_role: Some(own_role),
        });
    }
    let name = session_name(&run.job.job_id, &run.job.step_id);
    let source = Source::of_pod(&lookup, &name, true);
    source.map(Assumer::Session).map_err(bad)
}
