//! `list`: the runs of the namespace.

use clap::Args;
use cluster::{Cluster, RunState, RunView};
use job_contract::Exit;
use k8s_openapi::jiff::Timestamp;
use serde_json::json;

use super::output::Output;
use super::{ClusterArgs, ShowArgs};
use crate::failure::Failure;
use crate::terminal::paint::Paint;
use crate::terminal::table::{Cell, Table, Tone};

/// The number of characters of an id that are shown in a narrow terminal.
const SHORT_ID: usize = 8;

/// Which runs, and how.
#[derive(Args, Debug)]
pub struct ListArgs {
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub show: ShowArgs,
}

pub(super) async fn list(cluster: &Cluster, out: &mut Output) -> Result<Exit, Failure> {
    let runs = cluster.list().await?;
    if out.json {
        out.print_json(&json!({"namespace": cluster.namespace(), "runs": runs}))?;
    } else if runs.is_empty() {
        out.note(&format!(
            "No runs in the namespace `{}`.",
            cluster.namespace()
        ));
    } else {
        let text = render(&runs, cluster.now(), out.paint, out.width);
        out.print(&text);
    }
    Ok(Exit::Done)
}

/// Shortens ids if a terminal is too narrow. It never shortens the name, because other commands take it.
fn render(runs: &[RunView], now: Timestamp, paint: Paint, width: Option<usize>) -> String {
    let whole = table(runs, now, str::to_owned);
    let fits = width.is_none_or(|width| whole.width() <= width);
    let table = if fits { whole } else { table(runs, now, short) };
    table.render(paint)
}

fn table(runs: &[RunView], now: Timestamp, id: fn(&str) -> String) -> Table {
    let mut table = Table::new(&[
        "RUN",
        "JOB/STEP",
        "TYPE",
        "WORKSPACE",
        "STATE",
        "AGE",
        "DURATION",
        "NODE",
    ]);
    for run in runs {
        let place = run
            .organization
            .iter()
            .chain(&run.workspace)
            .map(|text| id(text))
            .collect::<Vec<_>>()
            .join("/");
        let took = run
            .started
            .map(|started| between(started, run.ended.unwrap_or(now)));
        table.row(vec![
            Cell::new(&run.key.name),
            Cell::new(&format!("{}/{}", run.key.job_id, id(&run.key.step_id))),
            Cell::or_dash(run.step_type.as_deref()),
            Cell::or_dash(Some(&place)),
            state(run),
            Cell::or_dash(run.created.map(|at| between(at, now)).as_deref()),
            Cell::or_dash(took.as_deref()),
            Cell::or_dash(run.node.as_deref()),
        ]);
    }
    table
}

fn short(id: &str) -> String {
    match id.char_indices().nth(SHORT_ID + 1) {
        Some(_) => id.chars().take(SHORT_ID).chain(['\u{2026}']).collect(),
        None => id.to_owned(),
    }
}

fn state(run: &RunView) -> Cell {
    let (word, tone) = match run.state {
        RunState::Queued => ("queued", Tone::Dim),
        RunState::Waiting => ("waiting", Tone::Warning),
        RunState::Running => ("running", Tone::Plain),
        RunState::Stopping => ("stopping", Tone::Warning),
        RunState::Completed => ("completed", Tone::Good),
        RunState::Failed => (
            run.verdict.map_or("failed", |verdict| verdict.name()),
            Tone::Bad,
        ),
    };
    Cell::new(word).tone(tone)
}

/// Returns the two largest units, as `kubectl` prints them.
pub(super) fn between(from: Timestamp, to: Timestamp) -> String {
    let seconds = to.duration_since(from).as_secs().max(0);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{}m{}s", seconds / 60, seconds % 60),
        3600..86400 => format!("{}h{}m", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{}d{}h", seconds / 86400, seconds % 86400 / 3600),
    }
}

#[cfg(test)]
pub(super) use tests::{at, run};

#[cfg(test)]
mod tests {
    use super::*;
    use cluster::RunRef;
    use verdict::VerdictKind;

    pub(in crate::kubernetes::commands) fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_767_225_600 + second).unwrap()
    }

    pub(in crate::kubernetes::commands) fn run(job: &str, step: &str) -> RunView {
        RunView {
            key: RunRef {
                job_id: job.into(),
                step_id: step.into(),
                name: format!("job-{job}-{step}"),
                organization_id: "org".into(),
                workspace_id: "ws".into(),
                step_type: "terraformPlan",
                lease: None,
            },
            step_type: Some("plan".into()),
            organization: Some("org".into()),
            workspace: Some("0b5a6ef2-77c1-4b45-9e5e-4dbb35a7e4a1".into()),
            state: RunState::Running,
            sentence: None,
            verdict: None,
            pod: None,
            node: Some("node-1".into()),
            created: Some(at(0)),
            started: Some(at(4)),
            ended: None,
        }
    }

    fn runs() -> Vec<RunView> {
        let waiting = RunView {
            state: RunState::Waiting,
            node: None,
            started: None,
            ..run("2", "x")
        };
        let failed = RunView {
            state: RunState::Failed,
            verdict: Some(VerdictKind::OomKilled),
            ended: Some(at(99)),
            ..run("3", "x")
        };
        vec![run("1", "x"), waiting, failed]
    }

    #[test]
    fn a_list_shows_where_runs_stand() {
        let text = render(&runs(), at(3700), Paint { on: false }, None);
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_narrow_terminal_gets_shorter_ids_and_whole_names() {
        let text = render(&runs(), at(3700), Paint { on: false }, Some(100));
        assert!(
            text.contains("org/0b5a6ef2\u{2026}") && text.contains("job-1-x"),
            "{text}"
        );
    }

    #[test]
    fn ages_are_never_negative() {
        assert_eq!(between(at(5), at(0)), "0s");
        assert_eq!(between(at(0), at(90_000)), "1d1h");
    }
}
