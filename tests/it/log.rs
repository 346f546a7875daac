//! The run's log: complete, in order, whatever its size and shape.

use std::fs;

use integration_tests::{FakeTool, Repository, job};
use job_contract::keys::ObjectKey;

use crate::machine;

#[test]
fn lines_written_before_the_executor_stay_at_the_start() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::scripts(&repository, vec![job::bash(1, "echo from the script")]);
    let key = ObjectKey::step_output(&job.organization_id, &job.job_id, &job.step_id);
    let path = machine
        .data_dir()
        .join(key.area.local_folder())
        .join(&key.path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, "waiting for a node").unwrap();
    machine.queue(&[&job]);
    machine.run(&job).expect_code(0);
    let stored = machine.step_output(&job);
    assert!(stored.starts_with("waiting for a node\n"), "{stored}");
    assert!(stored.contains("from the script"), "{stored}");
}

#[test]
fn output_of_odd_shapes_passes_through() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::scripts(
        &repository,
        vec![job::bash(
            1,
            "printf 'no newline at the end'; printf '\\xff\\xfe not utf-8\\n' >&2; head -c 300000 /dev/zero | tr '\\0' x; echo; printf 'carriage\\rreturn\\n'; printf 'last words'",
        )],
    );
    machine.queue(&[&job]);
    let outcome = machine.run(&job).expect_code(0);
    // Names of folders in other lines are random.
    let endless = "x".repeat(300_000);
    let shapes = format!(
        "\nno newline at the end\u{fffd}\u{fffd} not utf-8\n{endless}\ncarriage\rreturn\nlast words\n"
    );
    for log in [outcome.log(), &machine.step_output(&job)] {
        // The stored output begins with the first shape.
        let log = format!("\n{log}");
        assert!(log.contains(&shapes), "{}", log.replace(&endless, "x…"));
    }
}

#[test]
fn events_become_their_messages_and_other_lines_stay() {
    let (machine, repository) = (machine(), Repository::fixture());
    let tool = FakeTool::new().on(
        "plan",
        r#"echo '{"@level":"info","@message":"from an event","type":"version"}'; echo 'not json {'; echo '{"@message":42}'; echo '{"type":"log"}'; echo plan > "$out"; exit 2"#,
    );
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let outcome = machine
        .executor(&plan)
        .env("PATH", tool.path())
        .run()
        .expect_code(0);
    let lines: Vec<_> = outcome.log().lines().collect();
    assert!(lines.contains(&"from an event"), "{outcome}");
    assert!(lines.contains(&"not json {"), "{outcome}");
    assert!(!outcome.log().contains("@message"), "{outcome}");
}

#[test]
fn the_log_is_written_to_a_file_too_if_configured() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    machine.queue(&[&plan]);
    let file = machine.scratch("copy.log");
    let outcome = machine
        .executor(&plan)
        .env(job_contract::env::LOG_FILE, &file)
        .run()
        .expect_code(0);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), outcome.log());
}

/// With a limit on file sizes, writes fail as on a full disk. The kernel's signal for that must not end the executor.
#[test]
fn a_run_with_a_full_disk_is_shown_to_its_end_and_its_stored_log_names_the_gap() {
    const LINES: usize = 60_000;
    let (machine, repository) = (machine(), Repository::fixture());
    let script = format!("seq -f 'line %.0f of many' 1 {LINES}; echo last words");
    let job = job::scripts(&repository, vec![job::bash(1, &script)]);
    machine.queue(&[&job]);
    let outcome = machine
        .executor(&job)
        .wrapped_in(&["bash", "-c", "ulimit -f 400; exec \"$0\""])
        .run()
        .expect_code(0);
    let shown: Vec<_> = outcome.log().lines().collect();
    let numbered = shown.iter().filter(|line| line.starts_with("line "));
    let expected = (1..=LINES).map(|number| format!("line {number} of many"));
    assert!(numbered.map(|line| (*line).to_owned()).eq(expected));
    assert!(outcome.log().contains("last words"));

    let stored = machine.step_output(&job);
    let (before, after) = stored
        .split_once("[mayfly] log lines missing here: ")
        .unwrap_or_else(|| panic!("nothing is missing in {} bytes", stored.len()));
    assert!(outcome.log().starts_with(before) && before.len() > 100_000);
    let (notice, after) = after.split_once('\n').unwrap();
    assert!(outcome.log().ends_with(after));
    let missing: usize = notice.split(' ').next().unwrap().parse().unwrap();
    let stored = before.lines().count() + after.lines().count();
    assert_eq!(stored + missing, shown.len(), "{notice}");
}
