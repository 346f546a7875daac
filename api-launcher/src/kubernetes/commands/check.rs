//! `check`: whether a run would start in this cluster, and whether a hub can keep its promises.

mod peers;

use clap::Args;
use job_contract::Exit;
use serde_json::json;

pub use self::peers::PeerArgs;
use super::output::Output;
use super::{AccessArgs, ShowArgs, resolve};
use crate::allowed_urls::AllowedUrlArgs;
use crate::failure::Failure;
use crate::serve::config::TargetName;
use crate::terminal::Terminal;
use crate::terminal::options::{Format, When};
use crate::terminal::paint::Paint;
use crate::terminal::sink;
use crate::terminal::table::{Cell, Table, Tone};
use cluster::RetryPolicy;
use cluster::check::{CheckOutcome, CheckResult, Expectations};
use cluster::job_settings::{Deployment, DeploymentArgs};
use cluster::rights::RIGHTS;
use hub::store_check::StoreCheckArgs;
use job_contract::{chain, env};
use manifest::ManifestErrors;
use manifest::job_data::Mode;
use runtime::setting::{ReadSetting as _, Setting, SettingError};

/// What is checked: the configuration `serve` and `launch` would use.
#[derive(Args, Debug)]
pub struct CheckArgs {
    /// Where accepted steps run, as for `serve`. With `none`, nothing of a cluster is checked [default: kubernetes]
    #[arg(long, value_name = "TARGET", env = env::TARGET)]
    pub target: Option<Setting<TargetName>>,
    #[command(flatten)]
    pub allowed_urls: AllowedUrlArgs,
    #[command(flatten)]
    pub peers: PeerArgs,
    #[command(flatten)]
    pub store: StoreCheckArgs,
    #[command(flatten)]
    pub access: AccessArgs,
    #[command(flatten)]
    pub show: ShowArgs,
    #[command(flatten)]
    pub deployment: DeploymentArgs,
}

pub(super) async fn check(args: &CheckArgs, out: &mut Output) -> Result<Exit, Failure> {
    let mut errors = Vec::new();
    let target = args.target.read(&mut errors);
    if !errors.is_empty() {
        return Err(errors.into());
    }
    let (namespace, mut results) = match target {
        Some(TargetName::None) => (None, Vec::new()),
        _ => check_cluster(args, out).await?,
    };
    results.extend(check_allowed_urls(&args.allowed_urls));
    results.extend(peers::check(&args.peers).await);
    results.extend(check_store(&args.store).await);
    let exit = verdict(&results);
    if out.json {
        let ok = exit == Exit::Done;
        out.print_json(&json!({"namespace": namespace, "ok": ok, "checks": results}))?;
    } else {
        let text = render(&results, out.paint);
        out.print(&text);
    }
    Ok(exit)
}

/// What runs need in the cluster. Returns their namespace too.
async fn check_cluster(
    args: &CheckArgs,
    out: &mut Output,
) -> Result<(Option<String>, Vec<CheckResult>), Failure> {
    let deployment = resolve(&args.deployment, args.peers.api_url.as_deref(), out)?;
    let cluster = args.access.connect(&deployment.namespace).await?;
    // A quick answer is more useful here than many retries.
    let cluster = cluster.with_retry_policy(RetryPolicy {
        attempts: 1,
        ..RetryPolicy::default()
    });
    let expected = expectations(&deployment)?;
    let results = cluster.check(&expected).await;
    Ok((Some(deployment.namespace), results))
}

/// Which conditions the artifact store of a hub keeps. The hub works without them, and promises less.
async fn check_store(args: &StoreCheckArgs) -> Option<CheckResult> {
    const SUBJECT: &str = "conditions of the artifact store";
    let asked = args.ask().await?;
    Some(match asked.map(|kept| kept.lacks()) {
        Ok(None) => CheckResult::ok(SUBJECT, "are kept"),
        Ok(Some(changes)) => CheckResult::ok(
            SUBJECT,
            format!(
                "are not kept for these changes: {changes}. A late one can undo a newer one, so use one hub"
            ),
        ),
        Err(error) => CheckResult::failed(SUBJECT, chain(&error), error.hint()),
    })
}

/// Whether the rule for addresses of repositories can be used, and what it allows that is hardly meant.
fn check_allowed_urls(args: &AllowedUrlArgs) -> Vec<CheckResult> {
    const SUBJECT: &str = "rule for git URLs";
    const FIX: &str = "correct the variable that is named";
    let mut errors = Vec::new();
    let rule = args.resolve(&mut errors);
    if !errors.is_empty() {
        let failed = |error: &SettingError| CheckResult::failed(SUBJECT, error.to_string(), FIX);
        return errors.iter().map(failed).collect();
    }
    let Some(rule) = rule else {
        return Vec::new();
    };
    let advice = rule.advice();
    if advice.is_empty() {
        return vec![CheckResult::ok(SUBJECT, "can be used")];
    }
    let advised = |text| CheckResult::ok(SUBJECT, format!("can be used, but {text}"));
    advice.into_iter().map(advised).collect()
}

/// Shows what `agent check` has found, and returns how it ended.
pub fn show_agent(results: &[CheckResult]) -> Exit {
    let on = Terminal::detect(Format::Text, When::Auto).color;
    let text = render(results, Paint { on });
    match sink::print(text.as_bytes()) {
        Exit::Done => verdict(results),
        unwritten => unwritten,
    }
}

fn expectations(deployment: &Deployment) -> Result<Expectations, ManifestErrors> {
    Ok(Expectations {
        rights: RIGHTS.iter().collect(),
        job_data_in_secret: deployment.job_data_mode == Mode::Secret,
        references: manifest::references(deployment)?,
    })
}

/// If no right could be checked, the cluster cannot be reached, which may be temporary. All other failures must be fixed.
fn verdict(results: &[CheckResult]) -> Exit {
    let any = |outcome| results.iter().any(|result| result.outcome == outcome);
    let of_rights = || {
        results
            .iter()
            .filter(|result| result.subject.starts_with("right to "))
    };
    let is_unknown = |result: &CheckResult| result.outcome == CheckOutcome::Unknown;
    // An agent of target `process` has none.
    if of_rights().next().is_some() && of_rights().all(is_unknown) {
        Exit::Infrastructure
    } else if any(CheckOutcome::Failed) {
        Exit::BadConfiguration
    } else {
        Exit::Done
    }
}

fn render(results: &[CheckResult], paint: Paint) -> String {
    let mut table = Table::default();
    for result in results {
        let (mark, tone) = match result.outcome {
            CheckOutcome::Ok => ("\u{2713}", Tone::Good),
            CheckOutcome::Failed => ("\u{2717}", Tone::Bad),
            CheckOutcome::Unknown => ("?", Tone::Warning),
        };
        table.row(vec![
            Cell::new(mark).tone(tone),
            Cell::new(&result.subject),
            Cell::new(&result.finding),
        ]);
        if let Some(fix) = &result.fix {
            let fix = format!("fix: {fix}");
            table.row(vec![Cell::new(""), Cell::new(""), Cell::new(&fix)]);
        }
    }
    let count = |outcome| {
        results
            .iter()
            .filter(|result| result.outcome == outcome)
            .count()
    };
    let summary = match (count(CheckOutcome::Failed), count(CheckOutcome::Unknown)) {
        (0, 0) => "Everything is in place.".to_owned(),
        (0, unknown) => format!("Nothing is missing; {unknown} could not be checked."),
        (failed, 0) => format!("{failed} to be mended."),
        (failed, unknown) => format!("{failed} to be mended, {unknown} could not be checked."),
    };
    format!("{}\n{}\n", table.render(paint), paint.bold(&summary))
}

#[cfg(test)]
mod tests {
    use super::*;
    use manifest::overlay::Overlay;
    use rstest::rstest;
    use runtime::setting::from_variables;

    fn result(subject: &str, outcome: CheckOutcome, fix: Option<&str>) -> CheckResult {
        CheckResult {
            subject: subject.into(),
            outcome,
            finding: "what was found".into(),
            fix: fix.map(str::to_owned),
        }
    }

    #[test]
    fn each_missing_object_is_listed_with_its_fix() {
        let results = [
            result("namespace runs", CheckOutcome::Ok, None),
            result(
                "right to create jobs.batch",
                CheckOutcome::Failed,
                Some("grant it"),
            ),
            result("ConfigMap ca", CheckOutcome::Unknown, None),
        ];
        insta::assert_snapshot!(render(&results, Paint { on: false }));
        assert_eq!(verdict(&results), Exit::BadConfiguration);
    }

    #[test]
    fn a_silent_cluster_is_no_fault_of_the_configuration() {
        let right = |outcome| result("right to create jobs.batch", outcome, None);
        let lost = result("namespace runs", CheckOutcome::Failed, Some("look"));
        assert_eq!(
            verdict(&[lost, right(CheckOutcome::Unknown)]),
            Exit::Infrastructure
        );
        assert_eq!(verdict(&[right(CheckOutcome::Ok)]), Exit::Done);
        // An agent of target `process` has no rights.
        let hub = |outcome| result("hub", outcome, None);
        assert_eq!(verdict(&[hub(CheckOutcome::Ok)]), Exit::Done);
        let refused = hub(CheckOutcome::Failed);
        assert_eq!(verdict(&[refused]), Exit::BadConfiguration);
    }

    #[rstest]
    #[case("", CheckOutcome::Ok, &[])]
    #[case("https://github.com/acme/.*", CheckOutcome::Ok, &["can be used"])]
    #[case("https://github.com/acme.*", CheckOutcome::Ok, &["longer names match too", "`https://github.com/acme/.*`"])]
    #[case("^https://github.com/acme/", CheckOutcome::Ok, &["must match the whole address"])]
    #[case("  ", CheckOutcome::Failed, &[env::ALLOWED_VCS_URL_REGEX, "nothing but blanks"])]
    #[case("https://(?!evil)", CheckOutcome::Failed, &[env::ALLOWED_VCS_URL_REGEX, "look-around"])]
    fn the_rule_for_git_urls_is_explained(
        #[case] pattern: &str,
        #[case] outcome: CheckOutcome,
        #[case] expected: &[&str],
    ) {
        let args: AllowedUrlArgs = from_variables(&[(env::ALLOWED_VCS_URL_REGEX, pattern)]);
        let results = check_allowed_urls(&args);
        assert_eq!(results.len(), usize::from(!expected.is_empty()));
        for text in expected {
            assert_eq!(results[0].outcome, outcome);
            assert!(results[0].finding.contains(text), "{results:?}");
        }
    }

    #[tokio::test]
    async fn the_store_of_a_hub_is_asked_and_that_of_another_launcher_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let local = (env::DATA_DIR, folder.path().to_str().unwrap());
        let hub = (env::POOLS_FILE, "pools.yaml");
        let asked = async |variables: &[(&str, &str)]| {
            let args: StoreCheckArgs = from_variables(variables);
            check_store(&args).await
        };
        assert_eq!(asked(&[local]).await, None);
        assert_eq!(asked(&[hub]).await, None);
        let kept = asked(&[hub, local]).await.unwrap();
        assert_eq!(kept.outcome, CheckOutcome::Ok);
        assert_eq!(kept.finding, "are kept");
        let wrong = (env::STATE_TYPE, "AwsTerraformStateImpl");
        let wrong = asked(&[hub, wrong]).await.unwrap();
        assert_eq!(wrong.outcome, CheckOutcome::Failed);
        let text = format!("{} {}", wrong.finding, wrong.fix.unwrap());
        assert!(text.contains(env::AWS_BUCKET), "{text}");
    }

    #[test]
    fn everything_the_pods_will_name_is_looked_for() {
        let deployment = Deployment {
            image_pull_secrets: vec!["pull".into()],
            env_config_maps: vec!["ca".into()],
            overlay: Some(
                Overlay::parse(
                    "spec: {volumes: [{name: tls, secret: {secretName: tls}}], serviceAccountName: runner}",
                )
                .unwrap(),
            ),
            priority_class: Some("batch".into()),
            ..Deployment::default()
        };
        let expected = expectations(&deployment).unwrap();
        assert!(expected.job_data_in_secret);
        let names = expected.references;
        for secret in ["pull", "terrakube-executor-secrets", "tls"] {
            assert!(names.secrets.contains(secret), "{secret}: {names:?}");
        }
        assert_eq!(names.secrets.len(), 3, "its own is made with it");
        assert!(names.config_maps.contains("ca"));
        assert!(names.service_accounts.contains("runner"));
        assert!(names.priority_classes.contains("batch"));
    }
}
