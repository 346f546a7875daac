//! `explain`: how a run stands or ended, on what that rests, what to do, and where its time went.

use std::fmt::Write as _;

use clap::Args;
use job_contract::Exit;

use super::output::Output;
use super::problem::CommandError;
use super::{ClusterArgs, ShowArgs, select, timeline};
use crate::cluster::Cluster;
use crate::cluster::explain::Explanation;
use crate::run::view::Paint;
use crate::table::{Cell, Table, Tone};
use crate::verdict::VerdictKind;

/// Which run, and how.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// Job id, `job/step`, or the name of the run's Job
    pub run: String,
    #[command(flatten)]
    pub cluster: ClusterArgs,
    #[command(flatten)]
    pub show: ShowArgs,
}

pub(super) async fn explain(
    word: &str,
    cluster: &Cluster,
    out: &mut Output,
) -> Result<Exit, CommandError> {
    let explanation = match select::find(cluster, word).await {
        Ok(run) => cluster.explain(&run.key.name).await?,
        // Its Job is gone; what is left may still tell.
        Err(unknown @ CommandError::NotFound { .. }) => match cluster.explain_gone(word).await {
            Ok(Some(explanation)) => explanation,
            Ok(None) => return Err(unknown),
            // It may be there; what kept it from being told is more than that its Job is gone.
            Err(error) => return Err(error.into()),
        },
        Err(error) => return Err(error),
    };
    if out.json {
        out.print_json(&explanation)?;
    } else {
        let text = render(&explanation, out.paint);
        out.print(&text);
    }
    Ok(Exit::Done)
}

fn render(explanation: &Explanation, paint: Paint) -> String {
    let key = &explanation.key;
    let title = format!("Run {}, step {}", key.job_id, key.step_id);
    let mut text = format!("{} ({})\n\n", paint.bold(&title), key.name);
    text += &facts(explanation).render(paint);
    let drawn = timeline::draw(&explanation.timeline, paint);
    if !drawn.is_empty() {
        let _ = write!(text, "\n{}\n{drawn}", paint.bold("Timeline (UTC)"));
    }
    text
}

fn facts(explanation: &Explanation) -> Table {
    let mut table = Table::default();
    let mut fact = |name: &str, cell: Cell| {
        table.row(vec![Cell::new(name).tone(Tone::Dim), cell]);
    };
    if explanation.running {
        fact("state", Cell::new("running"));
    }
    if let Some(wait) = &explanation.wait {
        fact("state", Cell::new("waiting").tone(Tone::Warning));
        fact("reason", Cell::new(&wait.sentence));
        fact(
            "since",
            Cell::new(&wait.since.strftime("%F %H:%M:%S UTC").to_string()),
        );
    }
    if let Some(verdict) = &explanation.verdict {
        let tone = match verdict.kind {
            VerdictKind::Completed => Tone::Good,
            _ => Tone::Bad,
        };
        fact("verdict", Cell::new(verdict.kind.name()).tone(tone));
        fact("cause", Cell::new(&verdict.sentence));
        for (index, evidence) in verdict.evidence.iter().enumerate() {
            let name = if index == 0 { "evidence" } else { "" };
            fact(
                name,
                Cell::new(&format!("{}: {}", evidence.source, evidence.text)),
            );
        }
        if let Some(advice) = &verdict.advice {
            fact("advice", Cell::new(advice));
        }
        let outcome = format!("{} ({})", verdict.outcome.code(), verdict.outcome);
        fact("exit code", Cell::new(&outcome));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::super::list::tests::{at, run};
    use super::super::timeline::tests::timeline;
    use super::*;
    use crate::verdict::{Evidence, Verdict, Wait, WaitReason};

    fn explanation(verdict: Option<Verdict>, wait: Option<Wait>) -> Explanation {
        Explanation {
            key: run("42", "plan").key,
            running: false,
            timeline: timeline(),
            wait,
            verdict,
        }
    }

    #[test]
    fn an_ended_run_is_explained_with_evidence_and_advice() {
        let verdict = Verdict {
            kind: VerdictKind::OomKilled,
            sentence: "The executor was killed because it used more than 2Gi of memory.".into(),
            evidence: vec![
                Evidence::new("container executor", "OOMKilled, exit code 137"),
                Evidence::new("node", "node-1"),
            ],
            advice: Some("Raise EPHEMERAL_CONFIG_MEMORY_LIMIT.".into()),
            outcome: Exit::Signal(9),
            started: true,
            job_over: true,
            report: None,
        };
        let text = render(&explanation(Some(verdict), None), Paint { on: false });
        insta::assert_snapshot!(text);
    }

    #[test]
    fn a_waiting_run_says_what_for() {
        let wait = Wait {
            reason: WaitReason::Node,
            sentence: "No node takes the pod: insufficient cpu.".into(),
            since: at(2),
            until: None,
        };
        let mut waiting = explanation(None, Some(wait));
        waiting.timeline.truncate(2);
        insta::assert_snapshot!(render(&waiting, Paint { on: false }));
    }
}
