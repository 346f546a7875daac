//! A state that OpenTofu encrypts.

mod tools {
    use integration_tests::job;
    use integration_tests::tool::program;
    use job_contract::keys::ObjectKey;
    use job_contract::report::StateStatus;
    use job_contract::{Tool, env};
    use nix::sys::signal::Signal;
    use test_peers::skips::needed;

    use super::super::{Journey, is_state, tool_at_the_gate};

    /// `tofu state push` reads its file without a key. The test stores the state as the hint says.
    #[test]
    fn an_encrypted_state_that_the_backend_refuses_is_kept_with_a_restore_command() {
        let tool = Tool::OpenTofu;
        if needed(program(tool)).is_none() {
            return;
        }
        let mut journey = Journey::unplanned(tool);
        journey.apply = job::encrypted(&journey.apply);
        let executor = journey.executor().env(env::GRACE_PERIOD_SECONDS, "40");
        let run = executor.start();
        tool_at_the_gate(&run);
        let (bucket, apply) = (&journey.bucket, &journey.apply);
        bucket.endpoint.refuse("PUT", is_state, usize::MAX);
        run.running.signal(Signal::SIGTERM);
        let outcome = run.wait().expect_code(143);

        let report = outcome.report();
        assert_eq!(report.state, Some(StateStatus::Kept), "{outcome}");
        let name = format!("errored-{}-{}", apply.job_id, apply.step_id);
        let kept = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, &name);
        let state = bucket.read(&kept).expect("the state");
        assert!(state["encrypted_data"].is_string(), "{outcome}");
        assert!(outcome.error().contains(&kept.path), "{outcome}");
        let command = "`api-launcher state store ";
        assert!(report.hint.as_ref().unwrap().contains(command));
        assert!(outcome.log().contains(command), "{outcome}");

        bucket.endpoint.open();
        let stored = bucket.state_command(&journey.machine, &["store"]);
        assert_eq!(stored.code(), 0, "{stored}");
        assert_eq!(bucket.state(), Some(state), "{stored}");
        let plan = job::in_job(&job::plan_by(tool, &journey.repository), "413");
        let plan = job::encrypted(&plan);
        journey.machine.queue(&[&plan]);
        let outcome = bucket
            .executor(&journey.machine, &plan)
            .run()
            .expect_code(0);
        let is_made = |name: &str| {
            let words = format!("terraform_data.{name} will be created");
            outcome.log().contains(&words)
        };
        assert!(!is_made("first") && is_made("third"), "{outcome}");
    }
}
