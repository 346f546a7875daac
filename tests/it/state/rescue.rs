//! A state that the tool could not store: pushed again, kept, or laid aside.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use integration_tests::process::Stream;
use integration_tests::tool::program;
use integration_tests::{Repository, job};
use job_contract::keys::{ObjectKey, errored_folder, local_backend_state};
use job_contract::report::{LockStatus, StateStatus};
use job_contract::{StepType, Tool, env};
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use test_peers::http::{Response, Server, pass_on};

use super::{Bucket, Journey, gated_when, is_lock, is_state, state_key, tool_at_the_gate};
use crate::machine;
use crate::small_disk::SmallDisk;

with_both_tools! {
    a_state_the_backend_refused_is_pushed_again,
    a_state_that_is_kept_is_still_pushed_once_the_backend_takes_it,
    a_state_that_the_backend_keeps_refusing_is_kept_and_named,
    a_state_is_listed_before_its_copy_is_stored,
    a_workspace_with_a_kept_state_does_nothing_until_it_is_stored_or_dropped,
    a_state_that_is_kept_meanwhile_stops_an_apply,
    a_state_with_the_serial_of_the_stored_one_is_stored,
    a_state_that_somebody_has_changed_meanwhile_is_not_replaced,
    a_state_that_would_forget_resources_is_kept_and_not_pushed,
    a_state_that_can_be_put_nowhere_is_tried_until_it_can,
    a_state_that_can_be_put_nowhere_to_the_end_is_laid_aside_and_named,
    a_tool_killed_while_it_could_not_store_its_state_has_it_rescued_past_its_own_lock,
    a_state_that_the_tool_could_only_print_is_stored_and_not_logged,
    a_state_that_no_disk_takes_is_held_until_one_does,
    an_errored_state_in_the_content_is_never_pushed,
}

fn a_state_the_backend_refused_is_pushed_again(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    journey.bucket.endpoint.refuse("PUT", is_state, 1);
    journey.gate.open_blocking();
    let outcome = run.wait().expect_code(1);
    journey.assert_rescued(&outcome);
    let words = "3 of 3 changes were made; the state was rescued and is stored";
    assert!(outcome.error().contains(words), "{outcome}");
}

/// A backend that is away for a while, beside a store that is not.
fn a_state_that_is_kept_is_still_pushed_once_the_backend_takes_it(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    // The tool's own attempt, and two of ours.
    journey.bucket.endpoint.refuse("PUT", is_state, 3);
    journey.gate.open_blocking();
    let outcome = run.wait().expect_code(1);
    assert!(outcome.log().contains("The state is kept in"), "{outcome}");
    journey.assert_rescued(&outcome);
}

fn a_state_that_the_backend_keeps_refusing_is_kept_and_named(tool: Tool) {
    for stopped_before in [false, true] {
        let journey = Journey::planned(tool);
        let executor = journey.executor().env(env::GRACE_PERIOD_SECONDS, "20");
        let run = executor.start();
        tool_at_the_gate(&run);
        let endpoint = &journey.bucket.endpoint;
        endpoint.refuse("PUT", is_state, usize::MAX);
        if stopped_before {
            run.running.signal(Signal::SIGTERM);
        } else {
            journey.gate.open_blocking();
            run.running
                .wait_for(Stream::Stdout, "The executor tries again to store it.");
            run.running.signal(Signal::SIGTERM);
        }
        let outcome = run.wait().expect_code(143);
        let report = outcome.report();
        assert_eq!(report.state, Some(StateStatus::Kept), "{outcome}");
        let name = format!("errored-{}-{}", journey.apply.job_id, journey.apply.step_id);
        let kept = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, &name);
        let state = journey.bucket.read(&kept).expect("the state");
        let first = &state["resources"][0]["instances"][0]["attributes"]["input"];
        assert_eq!(first["value"], "made", "{outcome}");
        assert!(outcome.error().contains(&kept.path), "{outcome}");
        assert!(outcome.log().contains(&kept.path), "{outcome}");
        let command = "`api-launcher state store ";
        assert!(report.hint.as_ref().unwrap().contains(command));
    }
}

/// The executor may be killed in between. Then the next run must not begin.
fn a_state_is_listed_before_its_copy_is_stored(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    let bucket = &journey.bucket;
    bucket.endpoint.refuse("PUT", is_state, usize::MAX);
    let held = bucket
        .endpoint
        .hold("PUT", |path| path.contains("/state/errored-"));
    journey.gate.open_blocking();
    held.wait();
    let list = ObjectKey::kept_states(job::ORGANIZATION, job::WORKSPACE);
    let list = bucket.read(&list).expect("the list");
    let name = format!("errored-{}-{}", journey.apply.job_id, journey.apply.step_id);
    assert!(list["states"][&name].is_object(), "{list}");
    bucket.endpoint.open();
    drop(held);
    let outcome = run.wait().expect_code(1);
    journey.assert_rescued(&outcome);
}

fn a_workspace_with_a_kept_state_does_nothing_until_it_is_stored_or_dropped(tool: Tool) {
    for verb in ["store", "drop"] {
        let journey = Journey::planned(tool);
        let (bucket, machine) = (&journey.bucket, &journey.machine);
        let run = journey.executor().start();
        tool_at_the_gate(&run);
        bucket.endpoint.refuse("PUT", is_state, usize::MAX);
        journey.gate.open_blocking();
        run.running
            .wait_for(Stream::Stdout, "The executor tries again to store it.");
        // The push before has ended, and this one never gets a lock that the signal could make it leave.
        let next_push = bucket.endpoint.hold("PUT", is_lock);
        bucket.endpoint.refuse("PUT", is_lock, usize::MAX);
        next_push.wait();
        run.running.signal(Signal::SIGTERM);
        run.wait().expect_code(143);
        drop(next_push);
        bucket.endpoint.open();

        let plan = |job: &str| {
            let plan = job::in_job(&job::plan_by(tool, &journey.repository), job);
            machine.queue(&[&plan]);
            bucket.executor(machine, &plan).run()
        };
        let refused = plan("413").expect_code(1);
        let words = "a state of this workspace is not stored, and is kept in ";
        assert!(refused.error().contains(words), "{refused}");
        let ids = format!("{}/{}", job::ORGANIZATION, job::WORKSPACE);
        let command = format!("`api-launcher state {verb} {ids}`");
        assert!(refused.report().hint.as_ref().unwrap().contains(&command));
        assert!(refused.log().contains(&command), "{refused}");

        let listed = bucket.state_command(machine, &["list"]);
        let name = format!("errored-{}-{}", journey.apply.job_id, journey.apply.step_id);
        assert!(listed.stdout.starts_with(&name), "{listed}");
        let done = bucket.state_command(machine, &[verb]);
        assert_eq!(done.code(), 0, "{done}");
        assert!(bucket.lock().is_none(), "{done}");
        let (made, words) = match verb {
            "store" => (3, "No changes"),
            _ => (0, "Plan: 3 to add"),
        };
        assert_eq!(bucket.resources().len(), made, "{done}");
        let planned = plan("414").expect_code(0);
        assert!(planned.log().contains(words), "{planned}");
    }
}

/// A store answers so for a list that does not exist, if the credentials may not list objects.
#[test]
fn a_run_that_may_not_look_for_kept_states_says_so_and_begins() {
    let (bucket, machine, repository) = (Bucket::new(), machine(), Repository::fixture());
    let apply = job::step(StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let is_list = |path: &str| path.ends_with("/mayflyKeptStates.json");
    bucket.endpoint.refuse("GET", is_list, usize::MAX);
    let outcome = bucket.executor(&machine, &apply).run().expect_code(0);
    let words = "whether a state of this workspace is kept is not known: S3 refused access";
    for words in [words, env::AWS_SECRET_KEY] {
        assert!(outcome.log().contains(words), "{outcome}");
    }
    assert_eq!(bucket.resources(), ["greeting"]);
}

/// A script of the run stands for another run, which keeps a state after this one has looked.
fn a_state_that_is_kept_meanwhile_stops_an_apply(tool: Tool) {
    let machine = machine();
    let repository = Repository::module("resource \"terraform_data\" \"a\" {}\n");
    let folder = errored_folder(job::ORGANIZATION, job::WORKSPACE);
    let folder = machine.data_dir().join(folder);
    let folder = folder.display();
    let script = format!("mkdir -p '{folder}' && echo '{{}}' > '{folder}/errored-1-s.tfstate'");
    let mut apply = job::step_by(tool, StepType::Apply, &repository);
    apply.command_list = vec![job::before(job::bash(1, &script))];
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(1);
    let words = "a state of this workspace is not stored, and is kept in ";
    assert!(outcome.error().contains(words), "{outcome}");
    assert_eq!(machine.state(&apply), None, "{outcome}");
}

/// The tool writes a backup before it counts the serial up. If that fails, it leaves a state with the serial of the stored one.
fn a_state_with_the_serial_of_the_stored_one_is_stored(tool: Tool) {
    let repository = |value: &str| {
        Repository::module(&format!(
            "resource \"terraform_data\" \"a\" {{\n  input = \"{value}\"\n}}\n"
        ))
    };
    let machine = machine();
    let (one, two) = (repository("one"), repository("two"));
    let first = job::step_by(tool, StepType::Apply, &one);
    machine.queue(&[&first]);
    machine.run(&first).expect_code(0);
    let before = machine.state(&first).unwrap();
    let file = local_backend_state(job::ORGANIZATION, job::WORKSPACE);
    let backup = machine.data_dir().join(format!("{file}.backup"));
    fs::create_dir(&backup).unwrap();

    let second = job::in_job(&job::step_by(tool, StepType::Apply, &two), "413");
    machine.queue(&[&second]);
    let outcome = machine.run(&second).expect_code(1);
    let status = outcome.report().state;
    assert_eq!(status, Some(StateStatus::Rescued), "{outcome}");
    let state = machine.state(&second).unwrap();
    assert_eq!(state["lineage"], before["lineage"], "{outcome}");
    let serial = before["serial"].as_u64().unwrap() + 1;
    assert_eq!(state["serial"].as_u64(), Some(serial), "{outcome}");
    let value = &state["resources"][0]["instances"][0]["attributes"]["input"]["value"];
    assert_eq!(value, "two", "{outcome}");

    fs::remove_dir(&backup).unwrap();
    let plan = job::in_job(&job::plan_by(tool, &two), "414");
    machine.queue(&[&plan]);
    let planned = machine.run(&plan).expect_code(0);
    assert!(planned.log().contains("No changes"), "{planned}");
}

/// The stored state has what the run has never read. The serial of what the tool has left is higher, so the tool would replace it.
fn a_state_that_somebody_has_changed_meanwhile_is_not_replaced(tool: Tool) {
    let (bucket, machine) = (Bucket::new(), machine());
    let gate = machine.gate();
    let repository = gated_when(&gate, "when = destroy\n");
    let apply = job::step_by(tool, StepType::Apply, &repository);
    machine.queue(&[&apply]);
    bucket.executor(&machine, &apply).run().expect_code(0);
    let destroy = job::in_job(&job::step_by(tool, StepType::Destroy, &repository), "413");
    machine.queue(&[&destroy]);
    let run = bucket.executor(&machine, &destroy).start();
    tool_at_the_gate(&run);
    let mut other = bucket.state().unwrap();
    let mut resource = other["resources"][0].clone();
    resource["name"] = "of-somebody-else".into();
    resource["instances"][0]["attributes"]["id"] = "another".into();
    other["resources"].as_array_mut().unwrap().push(resource);
    bucket.write(&state_key(), other.to_string());
    bucket.endpoint.refuse("PUT", is_state, 1);
    gate.open_blocking();
    let outcome = run.wait().expect_code(1);
    let report = outcome.report();
    assert_eq!(report.state, Some(StateStatus::Kept), "{outcome}");
    let words = "somebody has changed the stored state";
    assert!(outcome.error().contains(words), "{outcome}");
    assert!(outcome.log().contains(words), "{outcome}");
    let refused = bucket.state_command(&machine, &["store"]);
    assert_eq!(refused.code(), 64, "{refused}");
    assert!(refused.stderr.contains("--force"), "{refused}");
    assert_eq!(bucket.state(), Some(other), "{outcome}");
}

/// `OpenTofu` may leave a part of the state. A wrapper of the tool leaves the part that the test gives it. It also reads a state that the
/// store does not have, which must not take the place of the kept one.
fn a_state_that_would_forget_resources_is_kept_and_not_pushed(tool: Tool) {
    let (bucket, machine) = (Bucket::new(), machine());
    let repository = |value: &str| {
        let resource = |name: &str, value: &str| {
            format!("resource \"terraform_data\" \"{name}\" {{\n  input = \"{value}\"\n}}\n")
        };
        Repository::module(&(resource("stays", "same") + &resource("changes", value)))
    };
    let (one, two) = (repository("one"), repository("two"));
    let first = job::step_by(tool, StepType::Apply, &one);
    machine.queue(&[&first]);
    bucket.executor(&machine, &first).run().expect_code(0);
    let before = bucket.state().unwrap();
    let mut part = before.clone();
    part["serial"] = (before["serial"].as_u64().unwrap() + 1).into();
    let resources = part["resources"].as_array_mut().unwrap();
    resources.retain(|resource| resource["name"] != "stays");
    assert_eq!(resources.len(), 1);
    let mut elsewhere = before.clone();
    elsewhere["lineage"] = "of-another-backend".into();

    let bin = machine.scratch("bin");
    fs::create_dir(&bin).unwrap();
    fs::write(bin.join("part"), part.to_string()).unwrap();
    fs::write(bin.join("elsewhere"), elsewhere.to_string()).unwrap();
    let wrapper = bin.join(tool.binary());
    let script = format!(
        "#!/bin/bash\n[ \"$1 $2\" = 'state pull' ] && exec cat '{bin}/elsewhere'\n'{tool}' \"$@\"\ncode=$?\n\
         [ \"$1\" = apply ] && cp '{bin}/part' errored.tfstate\nexit $code\n",
        tool = program(tool).unwrap().display(),
        bin = bin.display(),
    );
    fs::write(&wrapper, script).unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap());
    let second = job::in_job(&job::step_by(tool, StepType::Apply, &two), "413");
    machine.queue(&[&second]);
    bucket.endpoint.refuse("PUT", is_state, 1);
    let executor = bucket.executor(&machine, &second).env("PATH", path);
    let outcome = executor.run().expect_code(1);

    let report = outcome.report();
    assert_eq!(report.state, Some(StateStatus::Kept), "{outcome}");
    let words = "it lacks resources that the run has not destroyed: terraform_data.stays";
    assert!(outcome.error().contains(words), "{outcome}");
    let name = format!("errored-{}-{}", second.job_id, second.step_id);
    let kept = ObjectKey::state_raw(job::ORGANIZATION, job::WORKSPACE, &name);
    assert_eq!(bucket.read(&kept), Some(part), "{outcome}");
    let refused = bucket.state_command(&machine, &["store"]);
    let words = "it lacks resources of the stored state";
    assert!(refused.stderr.contains(words), "{refused}");
    assert_eq!(bucket.state(), Some(before), "{outcome}");
}

fn a_state_that_can_be_put_nowhere_is_tried_until_it_can(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    tool_at_the_gate(&run);
    journey.bucket.endpoint.refuse("PUT", |_| true, usize::MAX);
    journey.gate.open_blocking();
    run.running.wait_for(
        Stream::Stdout,
        "could neither be stored nor kept: trying again",
    );
    journey.bucket.endpoint.open();
    let outcome = run.wait().expect_code(1);
    assert_eq!(
        outcome.report().state,
        Some(StateStatus::Rescued),
        "{outcome}"
    );
    assert_eq!(journey.bucket.resources().len(), 3, "{outcome}");
}

fn a_state_that_can_be_put_nowhere_to_the_end_is_laid_aside_and_named(tool: Tool) {
    let journey = Journey::planned(tool);
    let executor = journey.executor().env(env::GRACE_PERIOD_SECONDS, "20");
    let run = executor.start();
    tool_at_the_gate(&run);
    journey.bucket.endpoint.refuse("PUT", |_| true, usize::MAX);
    journey.gate.open_blocking();
    run.running.wait_for(
        Stream::Stdout,
        "could neither be stored nor kept: trying again",
    );
    run.running.signal(Signal::SIGTERM);
    let outcome = run.wait();
    assert_eq!(
        outcome.report().state,
        Some(StateStatus::Unknown),
        "{outcome}"
    );
    // The launcher removes what the executor leaves in its work folder.
    assert!(outcome.left_behind.is_empty(), "{outcome}");
    let Journey { machine, apply, .. } = &journey;
    let name = format!("errored-{}-{}.tfstate", apply.job_id, apply.step_id);
    let folder = errored_folder(job::ORGANIZATION, job::WORKSPACE);
    let aside = machine.data_dir().join(folder).join(name);
    let state: Value = serde_json::from_slice(&fs::read(&aside).unwrap()).unwrap();
    assert_eq!(state["resources"].as_array().unwrap().len(), 3, "{outcome}");
    let aside = aside.to_str().unwrap();
    assert!(outcome.error().contains(aside), "{outcome}");
    // The next run finds it, though it uses another store than the disk.
    journey.bucket.endpoint.open();
    let plan = job::in_job(&job::plan_by(tool, &journey.repository), "413");
    machine.queue(&[&plan]);
    let refused = journey.bucket.executor(machine, &plan).run().expect_code(1);
    assert!(refused.error().contains(aside), "{refused}");
    let stored = journey.bucket.state_command(machine, &["store"]);
    assert_eq!(stored.code(), 0, "{stored}");
    assert_eq!(journey.bucket.resources().len(), 3, "{stored}");
}

/// The service does not say whether it has removed the lock. A repeated request could remove the lock of the next run.
#[test]
fn the_lock_of_the_command_is_removed_once_and_named_if_it_stays() {
    let (bucket, machine) = (Bucket::new(), machine());
    let folder = errored_folder(job::ORGANIZATION, job::WORKSPACE);
    let folder = machine.data_dir().join(folder);
    fs::create_dir_all(&folder).unwrap();
    let state = r#"{"version":4,"serial":1,"lineage":"l","resources":[]}"#;
    fs::write(folder.join("errored-1-s.tfstate"), state).unwrap();
    let url = bucket.endpoint.url();
    let host = url.strip_prefix("http://").unwrap().to_owned();
    let address = host.parse().unwrap();
    let silent = Server::start(move |request| {
        if request.method == "DELETE" {
            return Response::new(500, "");
        }
        pass_on(request, address, &host).unwrap()
    });
    let silent = silent.unwrap();
    let url = format!("http://{}", silent.address());
    // Nothing says which store its run had.
    let stored = bucket.state_command_at(&machine, &["store", "--force"], &url);
    assert_ne!(stored.code(), 0, "{stored}");
    let requests = silent.requests().into_iter();
    let removals = requests.filter(|request| request.method == "DELETE");
    assert_eq!(removals.count(), 1, "{stored}");
    assert_eq!(bucket.state().unwrap()["lineage"], "l", "{stored}");
    let lock = bucket.lock().expect("the lock");
    let id = lock["ID"].as_str().unwrap();
    assert!(stored.stderr.contains(id), "{stored}");

    fs::write(folder.join("errored-2-s.tfstate"), state).unwrap();
    let refused = bucket.state_command(&machine, &["store"]);
    assert_eq!(refused.code(), 64, "{refused}");
    assert!(
        refused.stderr.contains(&format!("`force-unlock {id}`")),
        "{refused}"
    );
}

/// It had written its last resort, and was about to give its lock back.
fn a_tool_killed_while_it_could_not_store_its_state_has_it_rescued_past_its_own_lock(tool: Tool) {
    let journey = Journey::planned(tool);
    let run = journey.executor().start();
    let process = tool_at_the_gate(&run);
    journey.bucket.endpoint.refuse("PUT", is_state, 1);
    let held = journey.bucket.endpoint.hold("DELETE", is_lock);
    journey.gate.open_blocking();
    held.wait();
    kill(process, Signal::SIGKILL).unwrap();
    let outcome = run.wait().expect_code(1);
    drop(held);
    let report = outcome.report();
    let status = report.lock.as_ref().map(|lock| lock.status);
    assert_eq!(status, Some(LockStatus::Released), "{outcome}");
    journey.assert_rescued(&outcome);
}

/// It has no room for its last resort, and says it instead.
fn a_state_that_the_tool_could_only_print_is_stored_and_not_logged(tool: Tool) {
    for journey in [Journey::planned(tool), Journey::unplanned(tool)] {
        let run = journey.executor().start();
        let process = tool_at_the_gate(&run);
        fs::create_dir(format!("/proc/{process}/cwd/errored.tfstate")).unwrap();
        // The tool's own attempt, and one of ours.
        journey.bucket.endpoint.refuse("PUT", is_state, 2);
        journey.gate.open_blocking();
        let outcome = run.wait().expect_code(1);
        assert!(outcome.log().contains("Failed to create local state file"));
        journey.assert_rescued(&outcome);
        assert!(!outcome.log().contains("\"lineage\""), "{outcome}");
    }
}

/// The tool's backend, the store and the data directory are on one disk, and the tool cannot write its last resort. It has left a part
/// of a state in its file, or failed at the backup of an earlier one, before it counts the serial up.
fn a_state_that_no_disk_takes_is_held_until_one_does(tool: Tool) {
    for has_before in [false, true] {
        let machine = machine();
        let gate = machine.gate();
        let first = "resource \"terraform_data\" \"first\" {}\n";
        if has_before {
            let repository = Repository::module(first);
            let apply = job::step_by(tool, StepType::Apply, &repository);
            machine.queue(&[&apply]);
            machine.run(&apply).expect_code(0);
        }
        let second = format!(
            "{first}resource \"terraform_data\" \"second\" {{\n  depends_on = [terraform_data.first]\n  \
             input = format(\"%60000s\", \"x\")\n  provisioner \"local-exec\" {{\n    \
             command = \"echo at-the-gate' 'tool-$PPID.; exec cat {}\"\n  }}\n}}\n",
            gate.path().display()
        );
        let repository = Repository::module(&second);
        let apply = job::step_by(tool, StepType::Apply, &repository);
        let apply = job::in_job(&apply, "413");
        machine.queue(&[&apply]);
        let data_dir = machine.data_dir();
        let disk = or_skip!(SmallDisk::mount(data_dir.as_os_str(), 8 << 20));
        let words = disk.words();
        let words = words.each_ref().map(String::as_str);
        let run = machine.executor(&apply).wrapped_in(&words).start();
        let process = tool_at_the_gate(&run);
        fs::create_dir(format!("/proc/{process}/cwd/errored.tfstate")).unwrap();
        let filler = data_dir.join("filler");
        disk.fill(&filler);
        gate.open_blocking();
        let words = "trying again. Until then, only the executor has it, in its memory.";
        run.running.wait_for(Stream::Stdout, words);
        fs::remove_file(disk.path(&filler)).unwrap();
        let outcome = run.wait().expect_code(1);
        let status = outcome.report().state;
        assert_eq!(status, Some(StateStatus::Rescued), "{outcome}");
        assert!(!outcome.log().contains("\"lineage\""), "{outcome}");
        let state = data_dir.join(local_backend_state(job::ORGANIZATION, job::WORKSPACE));
        let state = fs::read(disk.path(&state)).unwrap();
        let state: Value = serde_json::from_slice(&state).unwrap();
        assert_eq!(state["resources"].as_array().unwrap().len(), 2, "{outcome}");
    }
}

fn an_errored_state_in_the_content_is_never_pushed(tool: Tool) {
    let machine = machine();
    let fails = "resource \"terraform_data\" \"a\" {\n  provisioner \"local-exec\" {\n    command = \"exit 9\"\n  }\n}\n";
    let errored = "{\"version\":4,\"serial\":99,\"lineage\":\"x\"}";
    let repository = Repository::with(&[("main.tf", fails), ("errored.tfstate", errored)]);
    let apply = job::step_by(tool, StepType::Apply, &repository);
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(1);
    assert_eq!(outcome.report().state, Some(StateStatus::Stored));
    assert_ne!(machine.state(&apply).unwrap()["lineage"], "x", "{outcome}");
}
