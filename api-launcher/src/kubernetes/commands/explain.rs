//! `explain`: the state or end of a run, the evidence, what to do, and its timeline.

use std::fmt::Write as _;

use clap::Args;
use cluster::Cluster;
use cluster::RunState;
use cluster::explain::{Explanation, FillJobView, RunPod};
use job_contract::Exit;
use serde::Serialize;
use verdict::{Started, VerdictKind};

use super::output::Output;
use super::{ClusterArgs, ShowArgs, select, timeline};
use crate::failure::Failure;
use crate::terminal::paint::Paint;
use crate::terminal::table::{Cell, Table, Tone};

/// Which run, and how.
#[derive(Args, Debug)]
pub struct ExplainArgs {
    /// Job id (all of its steps, the newest first), `job/step`, or the name of the run's Job
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
) -> Result<Exit, Failure> {
    let mut explained = Vec::new();
    for run in select::find_all(cluster, word).await? {
        explained.push(cluster.explain(&run.key.name).await?);
    }
    if explained.is_empty() {
        // The Job is gone. Its events may still explain the run. If they cannot be read, the Job may exist.
        explained = cluster.explain_gone(word).await?;
    }
    if explained.is_empty() {
        return Err(select::not_found(word, cluster.namespace()));
    }
    if out.json {
        out.print_json(&Explained::of(&explained))?;
    } else {
        let texts: Vec<String> = explained
            .iter()
            .map(|explanation| render(explanation, out.paint))
            .collect();
        out.print(&texts.join("\n"));
    }
    Ok(Exit::Done)
}

/// The JSON output: the newest step, and the other steps of its job.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Explained<'a> {
    #[serde(flatten)]
    newest: Option<&'a Explanation>,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    earlier_steps: &'a [Explanation],
}

impl<'a> Explained<'a> {
    fn of(explained: &'a [Explanation]) -> Self {
        let (newest, earlier_steps) = match explained.split_first() {
            Some((newest, others)) => (Some(newest), others),
            None => (None, &[][..]),
        };
        Self {
            newest,
            earlier_steps,
        }
    }
}

fn render(explanation: &Explanation, paint: Paint) -> String {
    let key = &explanation.key;
    let step_type = explanation.step_type.as_deref();
    // The type of a run whose Job is gone is not known.
    let step = step_type.map_or_else(|| "step".to_owned(), |name| format!("{name} step"));
    let title = format!("Run {}, {step} {}", key.job_id, key.step_id);
    let mut text = format!("{} ({})\n\n", paint.bold(&title), key.name);
    text += &facts(explanation).render(paint);
    let drawn = timeline::draw(&explanation.timeline, paint);
    if !drawn.is_empty() {
        let _ = write!(text, "\n{}\n{drawn}", paint.bold("Timeline (UTC)"));
    }
    text
}

fn pod_words(pod: &RunPod) -> String {
    let node = pod
        .node
        .as_ref()
        .map_or_else(String::new, |node| format!(" on {node}"));
    let started = match pod.started {
        Started::Yes => "began the step",
        Started::Unknown => "it is not known whether it began the step",
        Started::No => "did not begin the step",
    };
    let end = pod
        .end
        .as_ref()
        .map_or_else(String::new, |end| format!("; {end}"));
    format!("{}{node}: {started}{end}", pod.name)
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
    for (index, pod) in explanation.pods.iter().enumerate() {
        let name = if index == 0 { "pods" } else { "" };
        fact(name, Cell::new(&pod_words(pod)));
    }
    if let Some(filling) = &explanation.store_filling {
        for (index, package) in filling.lacked.iter().enumerate() {
            fact(if index == 0 { "lacked" } else { "" }, Cell::new(package));
        }
        for job in &filling.jobs {
            let (words, tone) = fill_words(job);
            fact("fill job", Cell::new(&words).tone(tone));
        }
        if let Some(advice) = &filling.advice {
            fact("advice", Cell::new(advice));
        }
    }
    table
}

fn fill_words(job: &FillJobView) -> (String, Tone) {
    let (state, tone) = match job.state {
        RunState::Completed => ("completed", Tone::Good),
        RunState::Failed => ("failed", Tone::Bad),
        RunState::Running => ("running", Tone::Plain),
        _ => ("waiting", Tone::Warning),
    };
    let node = job.node.as_ref();
    let node = node.map_or_else(String::new, |node| format!(" on {node}"));
    let reason = job.reason.as_ref();
    let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
    (format!("{}{node}, {state}{reason}", job.name), tone)
}

#[cfg(test)]
mod tests {
    use super::super::list::{at, run};
    use super::super::timeline::timeline;
    use super::*;
    use cluster::explain::StoreFilling;
    use verdict::{Evidence, Verdict, Wait, WaitReason};

    fn explanation(verdict: Option<Verdict>, wait: Option<Wait>) -> Explanation {
        Explanation {
            key: run("42", "plan").key,
            step_type: Some("plan".into()),
            running: false,
            pods: vec![RunPod {
                name: "job-42-plan-x9k2p".into(),
                node: Some("node-1".into()),
                started: Started::Yes,
                end: None,
            }],
            store_filling: None,
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
            started: Started::Yes,
            may_change: true,
            job_over: true,
            pod: None,
            report: None,
        };
        let text = render(&explanation(Some(verdict), None), Paint { on: false });
        insta::assert_snapshot!(text);
    }

    #[test]
    fn what_a_run_lacked_is_explained_with_the_jobs_that_fetch_it() {
        let package =
            |name: &str| format!("registry.terraform.io/hashicorp/{name}/1.0.0/linux_amd64");
        let job = |name: &str, state, reason: Option<&str>| FillJobView {
            name: format!("fill-{name}"),
            packages: vec![package(name)],
            node: None,
            state,
            reason: reason.map(str::to_owned),
        };
        let mut run = explanation(None, None);
        run.timeline.truncate(2);
        let failure = format!("{}: the registry answered 503\n", package("aws"));
        run.store_filling = Some(StoreFilling {
            lacked: vec![package("aws"), package("null")],
            jobs: vec![
                job("aws", RunState::Failed, Some(&failure)),
                FillJobView {
                    node: Some("node-1".into()),
                    ..job("null", RunState::Completed, None)
                },
            ],
            advice: Some("correct the cause".into()),
        });
        insta::assert_snapshot!(render(&run, Paint { on: false }));
    }

    #[test]
    fn a_waiting_run_is_explained_with_what_it_waits_for() {
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
