//! What is published of a state, whatever fails or is killed meanwhile.

use std::fs;

use integration_tests::process::Stream;
use integration_tests::{Repository, job};
use job_contract::keys::{Area, ObjectKey};
use job_contract::{StepType, Tool, env};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::Signal;
use test_peers::wait::until_blocking;

use super::{Bucket, Journey, is_state, tool_at_the_gate};
use crate::machine;

with_both_tools! {
    a_store_that_fails_for_a_while_costs_time_and_nothing_else,
    plans_and_states_are_complete_though_the_tool_logs_in_between,
    an_executor_killed_while_it_saves_leaves_whole_objects_and_its_step_is_not_repeated,
    an_executor_killed_before_its_report_has_stored_everything_and_is_not_repeated,
    an_address_that_contains_a_secret_is_shown_without_it,
}

fn a_store_that_fails_for_a_while_costs_time_and_nothing_else(tool: Tool) {
    const FAILS: &str = "S3 answers 503";
    const WORKS: &str = "The artifact store works again.";
    let (bucket, machine, repository) = (Bucket::new(), machine(), Repository::fixture());
    let plan = job::plan_by(tool, &repository);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    let endpoint = &bucket.endpoint;
    let is_plan = |path: &str| path.ends_with(job_contract::keys::PLAN_FILE);

    let failing = endpoint.fail("PUT", is_plan);
    let run = bucket.executor(&machine, &plan).start();
    run.running.wait_for(Stream::Stdout, FAILS);
    drop(failing);
    let outcome = run.wait().expect_code(0);
    let said = [FAILS, WORKS].map(|words| outcome.log().matches(words).count());
    assert_eq!(said, [1, 1], "{outcome}");

    let failing = endpoint.fail("GET", is_plan);
    let of_tail = [".raw.json", ".tfoutput"];
    let copies = endpoint.fail("PUT", |path| path.ends_with(".raw.json"));
    let log = endpoint.fail("PUT", |path| path.ends_with(".tfoutput"));
    let asked = |end: &str| {
        let asked = endpoint.asked("PUT").into_iter();
        asked.filter(|path| path.ends_with(end)).count()
    };
    let earlier = of_tail.map(asked);
    let run = bucket.executor(&machine, &apply).start();
    run.running.wait_for(Stream::Stdout, FAILS);
    drop(failing);
    for ((end, earlier), failing) in of_tail.into_iter().zip(earlier).zip([copies, log]) {
        until_blocking(end, || asked(end) >= earlier + 3);
        drop(failing);
    }
    let outcome = run.wait().expect_code(0);
    let record = machine.record(&apply);
    assert_eq!(record.history.len(), 1, "{outcome}");
    assert_eq!(
        machine.statuses(&apply),
        ("completed".into(), "completed".into())
    );
    let output = ObjectKey::step_output(job::ORGANIZATION, &apply.job_id, &apply.step_id);
    let output = String::from_utf8(bucket.bytes(&output).unwrap()).unwrap();
    assert_eq!(output, outcome.log());
}

/// What it has to say of itself comes beside its documents, and is no part of them.
fn plans_and_states_are_complete_though_the_tool_logs_in_between(tool: Tool) {
    let (bucket, machine, repository) = (Bucket::new(), machine(), Repository::fixture());
    let mut plan = job::plan_by(tool, &repository);
    plan.environment_variables
        .extend([("TF_LOG".to_owned(), "DEBUG".to_owned())]);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    let outcome = bucket.executor(&machine, &plan).run().expect_code(0);
    assert!(outcome.log().contains("[DEBUG]"), "{outcome}");
    let change = &machine.context(&plan)["planStructuredOutput"][&plan.step_id][0];
    assert!(change["after"].is_object(), "{change}");
    let outcome = bucket.executor(&machine, &apply).run().expect_code(0);
    let history = machine.record(&apply).history;
    let state = bucket.state().unwrap();
    assert_eq!(history[0].serial, state["serial"].as_u64().unwrap());
    assert_eq!(history[0].lineage, state["lineage"], "{outcome}");
    let (_, name) = history[0].output.rsplit_once('/').unwrap();
    let name = name.strip_suffix(".json").unwrap();
    let raw = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, name);
    assert_eq!(bucket.read(&raw), Some(state), "{outcome}");
}

/// Every object of the tail is held in turn, so that the executor is killed before it.
fn an_executor_killed_while_it_saves_leaves_whole_objects_and_its_step_is_not_repeated(tool: Tool) {
    type Path = fn(&str) -> bool;
    // And how many copies of the state are stored by then.
    let moments: [(&str, &str, Path, usize); 4] = [
        ("reading the state", "GET", is_state, 0),
        ("the copy", "PUT", |path| path.ends_with(".raw.json"), 0),
        (
            "the rendering",
            "PUT",
            |path| path.contains("/state/") && !path.contains(".raw."),
            1,
        ),
        ("the log", "PUT", |path| path.ends_with(".tfoutput"), 2),
    ];
    for (held, method, path, copies) in moments {
        let journey = Journey::planned(tool);
        let run = journey.executor().start();
        tool_at_the_gate(&run);
        let request = journey.bucket.endpoint.hold(method, path);
        journey.gate.open_blocking();
        request.wait();
        run.running.signal(Signal::SIGKILL);
        run.wait();
        drop(request);
        journey.bucket.endpoint.open();

        assert_eq!(journey.bucket.resources().len(), 3, "{held}");
        assert!(journey.bucket.lock().is_none(), "{held}");
        let banner = format!("Running {}", tool.banner());
        let serial = journey.bucket.state().unwrap()["serial"].clone();
        // Under our launcher, and under one that starts whatever ended.
        let again = journey.executor().run().expect_code(76);
        let stock = journey.executor().without(env::OUTCOME_EXIT_CODE).run();
        for second in [again, stock] {
            assert!(second.error().contains("already taken"), "{second}");
            assert!(!second.log().contains(&banner), "{second}");
        }
        assert_eq!(journey.bucket.state().unwrap()["serial"], serial, "{held}");
        let asked = journey.bucket.endpoint.asked("PUT");
        let paths = asked
            .iter()
            .filter_map(|path| Some(path.split_once("/tfstate/")?.1.to_owned()));
        let keys = paths
            .filter(|path| path.contains("/state/"))
            .map(|path| ObjectKey {
                area: Area::State,
                path,
            });
        // What is stored is a whole document.
        let stored = keys.filter_map(|key| journey.bucket.read(&key));
        assert_eq!(stored.count(), copies, "{held}: {asked:?}");
    }
}

fn an_executor_killed_before_its_report_has_stored_everything_and_is_not_repeated(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    // History and outcome are written under this lock, which is all that is left to do once the log is stored.
    let record = format!("platform/jobs/{}.lock", journey.apply.job_id);
    let record = fs::File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(journey.machine.data_dir().join(record));
    let record = Flock::lock(record.unwrap(), FlockArg::LockExclusive).unwrap();
    journey.gate.open_blocking();
    let output = ObjectKey::step_output(
        &journey.apply.organization_id,
        &journey.apply.job_id,
        &journey.apply.step_id,
    );
    until_blocking("the log is stored", || journey.bucket.bytes(&output));
    run.running.signal(Signal::SIGKILL);
    run.wait();
    drop(record);

    assert_eq!(journey.bucket.resources().len(), 3);
    let log = String::from_utf8(journey.bucket.bytes(&output).unwrap()).unwrap();
    assert!(log.contains("Apply complete! Resources: 3 added"), "{log}");
    assert!(journey.machine.record(&journey.apply).history.is_empty());
    let again = journey.executor().run().expect_code(76);
    let banner = format!("Running {}", tool.banner());
    assert!(!again.log().contains(&banner), "{again}");
}

fn an_address_that_contains_a_secret_is_shown_without_it(tool: Tool) {
    let machine = machine();
    let repository = Repository::module(
        "resource \"terraform_data\" \"x\" {\n  for_each = toset([\"hunter2000\"])\n  provisioner \"local-exec\" \
         {\n    command = \"exit 9\"\n  }\n}\n",
    );
    let mut apply = job::step_by(tool, StepType::Apply, &repository);
    let password = ("DB_PASSWORD".to_owned(), "hunter2000".to_owned());
    apply.environment_variables.extend([password]);
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(1);
    let failed = &outcome.report().progress.as_ref().unwrap().failed;
    assert_eq!(failed.len(), 1, "{outcome}");
    assert!(failed[0].starts_with("terraform_data.x["), "{outcome}");
    assert!(outcome.error().contains("1 failed"), "{outcome}");
    assert!(!outcome.to_string().contains("hunter2000"), "{outcome}");
}
