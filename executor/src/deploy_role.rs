//! The role on AWS that a workspace names for its deployment, and that the operator allows: which session it gets, how long, and
//! how the run gets it.
//!
//! Pure, except for the requests to AWS in [`DeployRole::session`].

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::ValueEnum;
use job_contract::identity::{is_role, session_name};
use job_contract::{Exit, JobData, env};
use secret_stores::aws::credentials::{AwsLogin, Source};
use secret_stores::aws::sign::Keys;
use secret_stores::aws::sts::RoleSession;
use secret_stores::http::Http;
use secret_stores::{AllowList, ReadError, RunIds};

use crate::error::StepError;

/// The limits of AWS for a session.
pub(crate) const SHORTEST_SECONDS: u32 = 900;
pub(crate) const LONGEST_SECONDS: u32 = 43_200;
/// The limit for a session that another session gets.
const LONGEST_CHAINED_SECONDS: u32 = 3_600;

/// How the tool and scripts get the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Delivery {
    /// By variables if the session outlives the run, else by an endpoint.
    Auto,
    /// Keys in variables.
    Env,
    /// A server on loopback that renews the session.
    Endpoint,
}

/// What the operator allows.
#[derive(Debug)]
pub(crate) struct RolePolicy<'a> {
    pub(crate) allowed: &'a AllowList,
    /// `{organizationId}` and `{workspaceId}` are those of the run.
    pub(crate) external_id: Option<&'a str>,
    pub(crate) region: &'a str,
    pub(crate) default_seconds: u32,
    pub(crate) delivery: Delivery,
}

/// With what the role is assumed.
#[derive(Debug)]
pub(crate) enum Assumer {
    Keys(Keys),
    /// A token of the pod, which AWS exchanges for a session.
    Token {
        file: PathBuf,
        /// The role of the pod.
        own_role: Option<String>,
    },
    /// A session, such as that of EKS Pod Identity.
    Session(Source),
}

/// What a workspace asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WantedRole {
    pub(crate) role: String,
    seconds: Option<u32>,
}

/// A role that may be assumed, and how its session is delivered.
#[derive(Debug)]
pub(crate) struct DeployRole {
    login: AwsLogin,
    role: String,
    pub(crate) seconds: u32,
    pub(crate) by_endpoint: bool,
}

/// A session of a role.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) keys: Keys,
    pub(crate) end: SystemTime,
}

fn refused(text: impl Into<String>) -> StepError {
    StepError::new(Exit::StepFailed, text)
}

/// The variable of the workspace, unless it is blank.
fn value<'j>(job: &'j JobData, name: &str) -> Option<&'j str> {
    let text = job.environment_variables.get(name)?.trim();
    (!text.is_empty()).then_some(text)
}

impl WantedRole {
    /// Whether the workspace names a role.
    pub(crate) fn has_role(job: &JobData) -> bool {
        value(job, env::DEPLOY_ROLE).is_some()
    }

    /// `None` if the workspace names no role.
    pub(crate) fn of(job: &JobData) -> Result<Option<Self>, StepError> {
        let Some(role) = value(job, env::DEPLOY_ROLE) else {
            return Ok(None);
        };
        if !is_role(role) {
            let text = format!("`{}` is no ARN of a role", env::DEPLOY_ROLE);
            let hint = "an ARN is like `arn:aws:iam::123456789012:role/deploy`";
            return Err(refused(text).with_hint(hint));
        }
        let seconds = match value(job, env::DEPLOY_ROLE_SECONDS) {
            None => None,
            Some(text) => {
                let seconds = text.parse().ok();
                let allowed = SHORTEST_SECONDS..=LONGEST_SECONDS;
                let seconds = seconds.filter(|seconds| allowed.contains(seconds));
                Some(seconds.ok_or_else(|| {
                    refused(format!(
                        "`{}` is no number of seconds from {SHORTEST_SECONDS} to {LONGEST_SECONDS}",
                        env::DEPLOY_ROLE_SECONDS
                    ))
                })?)
            }
        };
        Ok(Some(Self {
            role: role.to_owned(),
            seconds,
        }))
    }

    /// Refuses a role that the operator does not allow.
    fn check(&self, policy: &RolePolicy<'_>, job: &JobData) -> Result<(), StepError> {
        let run = RunIds {
            organization: &job.organization_id,
            workspace: &job.workspace_id,
        };
        if policy.allowed.allows_role(&self.role, run) {
            return Ok(());
        }
        let (role, allowed) = (&self.role, env::ASSUMER_ALLOWED_ROLES);
        Err(refused(format!(
            "no rule of the operator allows the role `{role}` (`{allowed}`)"
        )))
    }
}

/// Decides on the session. `assumer` is asked for once the role is allowed. `lasts` is how long the run may take at most; `None` is
/// without a limit.
pub(crate) fn decide(
    wanted: &WantedRole,
    policy: &RolePolicy<'_>,
    assumer: impl FnOnce() -> Result<Assumer, StepError>,
    job: &JobData,
    lasts: Option<Duration>,
) -> Result<DeployRole, StepError> {
    wanted.check(policy, job)?;
    let assumer = assumer()?;
    let external_id = policy.external_id.map(|text| {
        text.replace("{organizationId}", &job.organization_id)
            .replace("{workspaceId}", &job.workspace_id)
    });
    let name = session_name(&job.job_id, &job.step_id);
    let mut session = RoleSession::new(&*wanted.role, &name);
    session.external_id = external_id;
    let is_chained = match &assumer {
        Assumer::Keys(_) => false,
        // Such a request has no external id, and the operator's must not be left out.
        Assumer::Token { .. } => session.external_id.is_some(),
        Assumer::Session(_) => true,
    };
    let longest = if is_chained {
        LONGEST_CHAINED_SECONDS
    } else {
        LONGEST_SECONDS
    };
    // The operator's default is no wish of the workspace, so it may be too long for a chained session.
    let seconds = wanted
        .seconds
        .unwrap_or_else(|| policy.default_seconds.min(longest));
    if seconds > longest {
        return Err(refused(format!(
            "`{}` is {seconds}, but AWS limits a session that comes from another session to {longest} s",
            env::DEPLOY_ROLE_SECONDS
        ))
        .with_hint(format!("set {longest} or less: the session is renewed while the run lasts")));
    }
    session.duration_seconds = Some(seconds);
    let by_endpoint = is_by_endpoint(policy.delivery, seconds, lasts)?;
    let (source, assume) = match assumer {
        Assumer::Keys(keys) => (Source::Keys(keys), Some(session)),
        Assumer::Session(source) => (source, Some(session)),
        Assumer::Token { file, .. } if !is_chained => {
            let source = Source::WebIdentity {
                role: session,
                token_file: file,
            };
            (source, None)
        }
        Assumer::Token { file, own_role } => {
            let own_role = own_role.ok_or_else(|| {
                let text = format!(
                    "`{}` needs a role of the pod that assumes other roles, and the pod has none",
                    env::ASSUMER_EXTERNAL_ID
                );
                StepError::new(Exit::BadConfiguration, text).with_hint(
                    "AWS takes no external id together with a token: see docs/deploy-roles.md",
                )
            })?;
            let source = Source::WebIdentity {
                role: RoleSession::new(own_role, &name),
                token_file: file,
            };
            (source, Some(session))
        }
    };
    Ok(DeployRole {
        login: AwsLogin {
            source,
            assume,
            region: policy.region.to_owned(),
        },
        role: wanted.role.clone(),
        seconds,
        by_endpoint,
    })
}

fn is_by_endpoint(
    delivery: Delivery,
    seconds: u32,
    lasts: Option<Duration>,
) -> Result<bool, StepError> {
    let is_long_enough = lasts.is_some_and(|lasts| Duration::from_secs(seconds.into()) > lasts);
    match delivery {
        Delivery::Auto => Ok(!is_long_enough),
        Delivery::Endpoint => Ok(true),
        Delivery::Env if is_long_enough => Ok(false),
        Delivery::Env => {
            let needed = lasts.map_or("without a limit".to_owned(), |lasts| {
                format!("after {} s", lasts.as_secs())
            });
            let text = format!(
                "a session of {seconds} s ends before the run must have ended ({needed}), and `{}` is `env`",
                env::ASSUMER_DELIVERY
            );
            let hint = format!(
                "set `{}` to more, or shorten the deadline of the run",
                env::DEPLOY_ROLE_SECONDS
            );
            Err(refused(text).with_hint(hint))
        }
    }
}

impl DeployRole {
    /// Assumes the role.
    pub(crate) async fn session(&self, http: &Http) -> Result<Session, StepError> {
        let obtained = self.login.obtain(http).await;
        let (keys, end) = obtained.map_err(|error| self.error(&error))?;
        let lasts = Duration::from_secs(self.seconds.into());
        let end = end.unwrap_or_else(|| SystemTime::now() + lasts);
        Ok(Session { keys, end })
    }

    fn error(&self, error: &ReadError) -> StepError {
        let (role, seconds, detail) = (&self.role, self.seconds, &error.detail);
        if error.class.is_transient() {
            let text = format!("AWS cannot be asked for a session of the role `{role}`: {detail}");
            return StepError::infrastructure(text).with_hint(
                "start the run again when the token service of AWS can be reached from the executor",
            );
        }
        let text = format!("AWS gives no session of {seconds} s of the role `{role}`: {detail}");
        let hint = if detail.contains("ValidationError") {
            format!(
                "raise the maximum session duration of the role to {seconds} s, or set `{}` to that maximum",
                env::DEPLOY_ROLE_SECONDS
            )
        } else {
            "check that the trust policy of the role names who assumes it and has the same external id, and that this user or \
             role may call `sts:AssumeRole`"
                .to_owned()
        };
        refused(text).with_hint(hint)
    }
}

/// One line for the log.
impl fmt::Display for DeployRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { role, seconds, .. } = self;
        let way = if self.by_endpoint {
            "which the executor renews"
        } else {
            "in variables"
        };
        write!(
            f,
            "AWS: the run has the role `{role}`, by sessions of {seconds} s, {way}."
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    const ROLE: &str = "arn:aws:iam::123456789012:role/team/deploy";
    const POD_ROLE: &str = "arn:aws:iam::123456789012:role/pod";

    fn job(variables: &[(&str, &str)]) -> JobData {
        let variables = variables.iter();
        JobData {
            organization_id: "acme".to_owned(),
            workspace_id: "net".to_owned(),
            job_id: "41".to_owned(),
            step_id: "s".to_owned(),
            environment_variables: variables
                .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
                .collect(),
            ..JobData::default()
        }
    }

    fn policy(allowed: &AllowList) -> RolePolicy<'_> {
        RolePolicy {
            allowed,
            external_id: Some("{organizationId}/{workspaceId}"),
            region: "eu-central-1",
            default_seconds: 18_000,
            delivery: Delivery::Auto,
        }
    }

    fn keys() -> Assumer {
        Assumer::Keys(Keys {
            access_key_id: "AKIA".to_owned(),
            secret_access_key: "secret".into(),
            session_token: None,
        })
    }

    fn agent() -> Assumer {
        Assumer::Session(Source::Container {
            url: "http://169.254.170.23/v1/credentials".parse().unwrap(),
            token_file: None,
        })
    }

    fn token(own_role: Option<&str>) -> Assumer {
        Assumer::Token {
            file: "/token".into(),
            own_role: own_role.map(str::to_owned),
        }
    }

    fn decided(
        more: &[(&str, &str)],
        change: impl FnOnce(&mut RolePolicy<'_>),
        assumer: Assumer,
        minutes: Option<u64>,
    ) -> Result<DeployRole, StepError> {
        let job = job(&[&[(env::DEPLOY_ROLE, ROLE)], more].concat());
        let wanted = WantedRole::of(&job)?.unwrap();
        let allowed = AllowList::parse_roles("arn:aws:iam::*:role/team/*").unwrap();
        let mut policy = policy(&allowed);
        change(&mut policy);
        let lasts = minutes.map(Duration::from_mins);
        decide(&wanted, &policy, || Ok(assumer), &job, lasts)
    }

    #[test]
    fn without_a_rule_no_role_is_allowed() {
        let none = AllowList::parse_roles("").unwrap();
        let job = job(&[(env::DEPLOY_ROLE, ROLE)]);
        let wanted = WantedRole::of(&job).unwrap().unwrap();
        let asked = || unreachable!("the role is not allowed");
        let error = decide(&wanted, &policy(&none), asked, &job, None).unwrap_err();
        assert!(
            error.to_string().contains(env::ASSUMER_ALLOWED_ROLES),
            "{error}"
        );
    }

    #[test]
    fn a_session_that_outlives_the_run_comes_in_variables_and_any_other_by_an_endpoint() {
        let by_endpoint = |assumer, minutes| {
            let decided = decided(&[], |_| {}, assumer, minutes).unwrap();
            (decided.by_endpoint, decided.seconds)
        };
        assert_eq!(by_endpoint(keys(), Some(180)), (false, 18_000));
        assert_eq!(by_endpoint(keys(), Some(300)), (true, 18_000));
        assert_eq!(by_endpoint(keys(), None), (true, 18_000));
        assert_eq!(by_endpoint(agent(), Some(180)), (true, 3_600));
        assert_eq!(by_endpoint(agent(), Some(59)), (false, 3_600));
    }

    #[test]
    fn external_id_and_session_are_those_of_the_run() {
        let decided = decided(&[], |_| {}, keys(), None).unwrap();
        let session = decided.login.assume.unwrap();
        assert_eq!(session.external_id.as_deref(), Some("acme/net"));
        assert_eq!(session.session_name, "mayfly-41-s");
        assert_eq!(session.duration_seconds, Some(18_000));
    }

    #[test]
    fn a_token_is_exchanged_for_the_role_itself_unless_there_is_an_external_id() {
        let without = |policy: &mut RolePolicy<'_>| policy.external_id = None;
        let direct = decided(&[], without, token(Some(POD_ROLE)), Some(180)).unwrap();
        assert!(!direct.by_endpoint && direct.login.assume.is_none());
        let Source::WebIdentity { role, .. } = direct.login.source else {
            panic!("no web identity");
        };
        assert_eq!(
            (&*role.role_arn, role.duration_seconds),
            (ROLE, Some(18_000))
        );

        let chained = decided(&[], |_| {}, token(Some(POD_ROLE)), Some(180)).unwrap();
        let Source::WebIdentity { role, .. } = chained.login.source else {
            panic!("no web identity");
        };
        assert_eq!((&*role.role_arn, chained.seconds), (POD_ROLE, 3_600));
        assert!(chained.by_endpoint);
        let assumed = chained.login.assume.unwrap();
        assert_eq!(assumed.external_id.as_deref(), Some("acme/net"));

        let error = decided(&[], |_| {}, token(None), None).unwrap_err();
        assert_eq!(error.exit(), Exit::BadConfiguration);
        assert!(
            error.to_string().contains(env::ASSUMER_EXTERNAL_ID),
            "{error}"
        );
    }

    #[rstest]
    #[case(env::DEPLOY_ROLE_SECONDS, "899")]
    #[case(env::DEPLOY_ROLE_SECONDS, "43201")]
    #[case(env::DEPLOY_ROLE_SECONDS, "an hour")]
    #[case(env::DEPLOY_ROLE, "arn:aws:iam::123456789012:role/x\ny")]
    #[case(env::DEPLOY_ROLE, "deploy")]
    fn what_aws_cannot_give_is_refused_with_the_name_of_the_variable(
        #[case] name: &str,
        #[case] value: &str,
    ) {
        let error = decided(&[(name, value)], |_| {}, keys(), None).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }

    #[test]
    fn a_session_is_never_shortened_in_secret() {
        let long = [(env::DEPLOY_ROLE_SECONDS, "7200")];
        let error = decided(&long, |_| {}, agent(), None).unwrap_err();
        assert!(
            error.to_string().contains("from another session to 3600 s"),
            "{error}"
        );
        let by_env = |policy: &mut RolePolicy<'_>| policy.delivery = Delivery::Env;
        let error = decided(&long, by_env, keys(), Some(180)).unwrap_err();
        assert!(error.to_string().contains("(after 10800 s)"), "{error}");
        assert!(
            !decided(&long, by_env, keys(), Some(119))
                .unwrap()
                .by_endpoint
        );
    }

    #[test]
    fn a_blank_role_is_none() {
        let blank = job(&[(env::DEPLOY_ROLE, " ")]);
        assert!(!WantedRole::has_role(&blank));
        assert_eq!(WantedRole::of(&blank).unwrap(), None);
    }
}
