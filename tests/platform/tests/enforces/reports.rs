//! Reports that are stored, and are against the contract.

use super::*;

/// Each of these is stored as the platform would store it, and noted.
#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::too_many_lines, reason = "a table of mistakes")]
async fn reports_against_the_contract_are_noted() {
    for (mistake, rules) in [
        ("job before step", vec![Rule::JobBeforeStep]),
        ("terminal job", vec![Rule::TerminalJob]),
        ("terminal step", vec![Rule::TerminalStep]),
        ("pending without changes", vec![Rule::PendingWithoutChanges]),
        ("before queue", vec![Rule::BeforeQueue]),
        ("foreign status", vec![Rule::ForeignAttribute]),
        ("foreign attribute", vec![Rule::ForeignAttribute]),
        ("other step", vec![Rule::BeforeQueue]),
        ("no output", vec![Rule::Output]),
        ("foreign output", vec![Rule::Output]),
        ("output not stored", vec![Rule::Output]),
        ("unchanged", vec![]),
    ] {
        let stored =
            Outputs::from_fn(move |_, _, _| (mistake != "output not stored").then(Vec::new));
        let scene = Scene::of(Platform::builder().outputs(stored)).await;
        let job = scene.queued(Flow::plan_approve_apply()).await;
        let (id, step) = (job.id, job.steps[0].id.clone());
        let output = scene.output_url(id, &step);
        let end = json!({"status": "completed", "output": output});
        let mut answers = Vec::new();
        match mistake {
            "job before step" => {
                answers.push(scene.patch_job(id, json!({"status": "failed"})).await);
            }
            "terminal job" => {
                scene.platform.cancel(id).await;
                answers.push(scene.patch_job(id, json!({"status": "running"})).await);
            }
            "terminal step" => {
                scene.platform.cancel(id).await;
                answers.push(
                    scene
                        .patch_step(id, &step, json!({"status": "failed", "output": output}))
                        .await,
                );
            }
            "pending without changes" => {
                answers.push(scene.patch_step(id, &step, end).await);
                answers.push(
                    scene
                        .patch_job(id, json!({"status": "pending", "planChanges": false}))
                        .await,
                );
                scene
                    .platform
                    .until("it is wedged", |records| {
                        records.job(id).wedged.then_some(())
                    })
                    .await;
            }
            "before queue" => {
                scene
                    .carry_out(id, json!({"status": "pending", "planChanges": true}))
                    .await;
                scene.platform.until_job(id, Status::WaitingApproval).await;
                answers.push(scene.patch_job(id, json!({"status": "running"})).await);
            }
            "foreign status" => {
                answers.push(scene.patch_job(id, json!({"status": "cancelled"})).await);
            }
            "foreign attribute" => answers.push(scene.patch_job(id, json!({"tcl": "x"})).await),
            "other step" => {
                let other = &job.steps[2].id;
                let output = scene.output_url(id, other);
                answers.push(
                    scene
                        .patch_step(id, other, json!({"status": "running", "output": output}))
                        .await,
                );
            }
            "no output" => answers.push(
                scene
                    .patch_step(id, &step, json!({"status": "failed"}))
                    .await,
            ),
            "foreign output" => {
                let elsewhere =
                    json!({"status": "running", "output": "https://elsewhere.example.test/"});
                answers.push(scene.patch_step(id, &step, elsewhere).await);
            }
            "output not stored" => answers.push(scene.patch_step(id, &step, end).await),
            _ => {
                scene
                    .carry_out(id, json!({"status": "completed", "planChanges": false}))
                    .await;
                answers.push(scene.patch_job(id, json!({"status": "completed"})).await);
                answers.push(scene.patch_step(id, &step, end).await);
            }
        }
        assert!(
            answers.iter().all(|status| *status == 204),
            "{mistake}: {answers:?}"
        );
        assert_eq!(
            scene.broken(),
            rules,
            "{mistake}\n{}",
            scene.platform.report()
        );
    }
}
