//! `api-launcher run`: a folder planned and applied by executors of its own, on a terminal and off it.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use integration_tests::laptop::plain;
use integration_tests::machine::files_below;
use integration_tests::process::Stream;
use integration_tests::repository::ROOT_MODULE;
use integration_tests::{Finished, Gate, Laptop, Repository, job};
use job_contract::env;
use nix::sys::signal::Signal;
use provider_store::{Package, ProviderStore, sha256_of};
use serde_json::Value;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use crate::laptop;
use crate::small_disk::SmallDisk;

#[track_caller]
fn expect(finished: Finished, code: i32) -> Finished {
    assert_eq!(finished.code(), code, "{finished}");
    finished
}

/// A module whose second resource waits at a gate that stays closed.
fn gated() -> Laptop {
    let laptop = laptop("");
    let gate = Gate::new(laptop.home().join("gate"));
    laptop.write(
        "stack/main.tf",
        &format!(
            "resource \"terraform_data\" \"first\" {{}}\nresource \"terraform_data\" \"second\" {{\n  depends_on = [terraform_data.first]\n  provisioner \"local-exec\" {{\n    command = \"echo at-the-gate; exec cat {}\"\n  }}\n}}\n",
            gate.path().display()
        ),
    );
    laptop
}

fn statuses(finished: &Finished) -> Vec<String> {
    finished
        .events()
        .iter()
        .filter_map(|event| Some(event["status"].as_str()?.to_owned()))
        .collect()
}

#[test]
fn a_folder_is_applied_then_unchanged_then_destroyed() {
    let laptop = laptop(ROOT_MODULE);
    let first = expect(
        laptop.run(&["run", "stack", "--auto-approve", "--var", "greeting=hi"]),
        0,
    );
    assert!(first.stdout.contains("Plan: 1 to add"), "{first}");
    assert!(first.stdout.contains("Apply complete!"), "{first}");
    assert!(first.stdout.contains("greeting"), "{first}");
    assert_eq!(laptop.resources(), ["greeting"]);

    let second = expect(
        laptop.run(&["run", "stack", "--auto-approve", "--var", "greeting=hi"]),
        0,
    );
    assert!(second.stdout.contains("No changes"), "{second}");
    assert!(!second.stdout.contains("Apply complete!"), "{second}");

    let removal = expect(
        laptop.run(&["run", "stack", "--destroy", "--auto-approve"]),
        0,
    );
    assert!(removal.stdout.contains("Destroyed"), "{removal}");
    assert_eq!(laptop.resources(), <[String; 0]>::default());
}

#[test]
fn a_folder_with_a_kept_state_does_nothing_until_it_is_dropped() {
    let laptop = laptop(ROOT_MODULE);
    let run = || laptop.run(&["run", "stack", "--auto-approve", "--var", "greeting=hi"]);
    expect(run(), 0);
    let states = files_below(laptop.home()).into_iter();
    let mut states = states.filter(|path| path.ends_with("terraform.tfstate"));
    let state = states.next().unwrap();
    let workspace = state.parent().unwrap();
    // local/backend/ORGANIZATION/WORKSPACE/terraform.tfstate
    let data_dir = state.ancestors().nth(5).unwrap();
    let ids = workspace
        .strip_prefix(data_dir.join("local/backend"))
        .unwrap();
    let ids = ids.to_str().unwrap();
    let copy = data_dir.join("errored").join(ids);
    fs::create_dir_all(&copy).unwrap();
    fs::copy(&state, copy.join("errored-9-apply.tfstate")).unwrap();

    let refused = expect(run(), 1);
    let command = format!(
        "`api-launcher state drop {ids} --data-dir {}`",
        data_dir.display()
    );
    assert!(refused.stdout.contains(&command), "{refused}");
    expect(laptop.run(&["state", "drop", ids]), 0);
    let unchanged = expect(run(), 0);
    assert!(unchanged.stdout.contains("No changes"), "{unchanged}");
}

#[test]
fn a_folder_whose_state_would_be_elsewhere_is_not_run() {
    let elsewhere = "terraform {\n  backend \"local\" {\n    path = \"elsewhere\"\n  }\n}\n";
    for (file, variable, code, words) in [
        (None, Some("TF_WORKSPACE=prod"), 1, "`TF_WORKSPACE`"),
        (Some("stack/zz_override.tf"), None, 65, "`zz_override.tf`"),
    ] {
        let laptop = laptop(ROOT_MODULE);
        if let Some(file) = file {
            laptop.write(file, elsewhere);
        }
        let mut args = vec!["run", "stack", "--auto-approve"];
        args.extend(
            variable
                .into_iter()
                .flat_map(|variable| ["--env", variable]),
        );
        let refused = expect(laptop.run(&args), code);
        assert!(refused.to_string().contains(words), "{refused}");
        assert_eq!(laptop.state(), None, "{refused}");
    }
}

/// The disk of the machine is full, and the tool cannot write its last resort.
#[test]
fn a_state_that_the_disk_of_the_machine_does_not_take_is_held_until_it_does() {
    let (laptop, folder) = (laptop(""), tempfile::tempdir().unwrap());
    let gate = Gate::new(folder.path().join("gate"));
    // What is left of a block is too small for it.
    let module = format!(
        "resource \"terraform_data\" \"large\" {{\n  input = format(\"%60000s\", \"x\")\n  provisioner \"local-exec\" {{\n    \
         command = \"mkdir errored.tfstate; exec cat {}\"\n  }}\n}}\n",
        gate.path().display()
    );
    laptop.write("stack/main.tf", &module);
    let disk = or_skip!(SmallDisk::mount(laptop.home().as_os_str(), 64 << 20));
    let stack = laptop.home().join("stack");
    let run = laptop.command(&["run", stack.to_str().unwrap(), "--auto-approve"]);
    let start = || integration_tests::Running::start(&mut disk.with_variables_of(&run));
    let first = start();
    let at_the_gate = gate.reached();
    let filler = laptop.home().join("filler");
    disk.fill(&filler);
    drop(at_the_gate);
    first.wait_for(Stream::Stdout, "only the executor has it, in its memory.");
    fs::remove_file(disk.path(&filler)).unwrap();
    let first = expect(first.wait(), 1);
    assert!(first.stdout.contains("The state is stored."), "{first}");
    assert!(!first.stdout.contains("\"lineage\""), "{first}");
    let second = expect(start().wait(), 0);
    assert!(second.stdout.contains("No changes"), "{second}");
}

#[test]
fn nothing_is_written_into_the_folder() {
    let laptop = laptop(ROOT_MODULE);
    expect(laptop.run(&["run", "stack", "--auto-approve"]), 0);
    let files = files_below(&laptop.home().join("stack"));
    assert_eq!(files, [laptop.home().join("stack/main.tf")]);
}

/// Puts a tool before the real one that notes its commands, and returns the path of the notes.
fn note_calls(laptop: &Laptop) -> (PathBuf, OsString) {
    let (notes, real) = (
        laptop.home().join("calls"),
        which::which("terraform").unwrap(),
    );
    let script = format!(
        "#!/bin/sh\necho \"$1\" >> '{}'\nexec '{}' \"$@\"\n",
        notes.display(),
        real.display()
    );
    let wrapper = laptop.write("bin/terraform", &script);
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let folders = std::env::var_os("PATH").unwrap();
    let folders = std::iter::once(laptop.home().join("bin")).chain(std::env::split_paths(&folders));
    (notes, std::env::join_paths(folders).unwrap())
}

#[test]
fn the_tool_renders_only_what_is_read() {
    let failing = "resource \"terraform_data\" \"a\" {\n  provisioner \"local-exec\" {\n    command = \"false\"\n  }\n}\n";
    for (module, code, last) in [
        (ROOT_MODULE, 0, &["apply", "state"][..]),
        // The rendering of the state shows which changes it lacks.
        (failing, 1, &["apply", "show"][..]),
    ] {
        let laptop = laptop(module);
        let (notes, path) = note_calls(&laptop);
        let mut command = laptop.command(&["run", "stack", "--auto-approve"]);
        command.env("PATH", path);
        let finished = expect(integration_tests::Running::start(&mut command).wait(), code);
        let calls = fs::read_to_string(notes).unwrap();
        let calls: Vec<_> = calls.lines().collect();
        let expected = ["version", "init", "plan", "version", "init"];
        assert_eq!(calls, [&expected[..], last].concat(), "{finished}");
    }
}

#[test]
fn plan_only_stops_at_the_plan() {
    let laptop = laptop(ROOT_MODULE);
    let finished = expect(laptop.run(&["run", "stack", "--plan-only"]), 0);
    assert!(finished.stdout.contains("Plan: 1 to add"), "{finished}");
    assert_eq!(laptop.state(), None);
}

#[test]
fn json_output_is_one_event_a_line_from_start_to_end() {
    let laptop = laptop(ROOT_MODULE);
    let finished = expect(
        laptop.run(&["run", "stack", "--auto-approve", "--output", "json"]),
        0,
    );
    let events = finished.events();
    assert_eq!(events.first().unwrap()["type"], "run_started");
    let last = events.last().unwrap();
    assert_eq!(
        (&last["type"], &last["status"], &last["exitCode"]),
        (
            &Value::from("run_finished"),
            &Value::from("applied"),
            &Value::from(0)
        )
    );
    let steps = events
        .iter()
        .filter(|event| event["type"] == "step_finished");
    let changes: Vec<_> = steps.map(|event| event["changes"]["add"].clone()).collect();
    assert_eq!(changes, [1, 1]);
    for (kind, at_least) in [
        ("step_started", 2),
        ("phase_finished", 6),
        ("log", 5),
        ("outputs", 1),
    ] {
        let count = events.iter().filter(|event| event["type"] == kind).count();
        assert!(count >= at_least, "{count} {kind}\n{finished}");
    }
    let started = events
        .iter()
        .filter(|event| event["type"] == "phase_started")
        .count();
    let ended = events
        .iter()
        .filter(|event| event["type"] == "phase_finished")
        .count();
    assert_eq!(started, ended, "{finished}");

    let again = expect(
        laptop.run(&["run", "stack", "--auto-approve", "--output", "json"]),
        0,
    );
    assert_eq!(
        statuses(&again).last().map(String::as_str),
        Some("no_changes")
    );
}

#[test]
fn a_plan_document_and_an_apply_document_are_two_steps_of_one_job() {
    let laptop = laptop("");
    let repository = Repository::fixture();
    let plan = job::plan(&repository);
    let apply = job::apply_after(&plan);
    let document = |name: &str, job| laptop.write(name, &serde_json::to_string(job).unwrap());
    let plan = document("plan.json", &plan);
    let apply = document("apply.json", &apply);

    let planned = expect(laptop.run(&["run", "-f", plan.to_str().unwrap()]), 0);
    assert!(planned.stdout.contains("Plan: 1 to add"), "{planned}");
    assert_eq!(laptop.state(), None);
    let applied = expect(laptop.run(&["run", "-f", apply.to_str().unwrap()]), 0);
    assert!(applied.stdout.contains("Apply complete!"), "{applied}");
    assert_eq!(laptop.resources(), ["greeting"]);
}

#[test]
fn ctrl_c_in_an_apply_saves_the_state_and_exits_130() {
    let laptop = gated();
    let running =
        integration_tests::Running::start(&mut laptop.command(&["run", "stack", "--auto-approve"]));
    running.wait_for(Stream::Stdout, "at-the-gate");
    running.signal(Signal::SIGINT);
    let finished = expect(running.wait(), 130);
    assert!(
        laptop.resources().contains(&"first".to_owned()),
        "{finished}"
    );
    let said = format!("{}{}", finished.stdout, finished.stderr).to_lowercase();
    assert!(
        said.contains("state"),
        "it does not say what became of the state\n{finished}"
    );
}

#[test]
fn ctrl_c_on_a_terminal_reaches_the_launcher_once() {
    let laptop = gated();
    let mut running = laptop.on_terminal(&["run", "stack", "--auto-approve"]);
    running.wait_for(Stream::Stdout, "at-the-gate");
    running.write("\x03");
    let finished = expect(running.wait(), 130);
    assert!(!finished.stdout.contains("Two interrupts"), "{finished}");
    assert!(
        laptop.resources().contains(&"first".to_owned()),
        "{finished}"
    );
}

#[test]
fn a_terminal_is_asked_before_anything_is_applied() {
    for (answer, made, words) in [
        ("yes\n", Some("greeting"), "Applied"),
        ("no\n", None, "Not applied"),
    ] {
        let laptop = laptop(ROOT_MODULE);
        let mut running = laptop.on_terminal(&["run", "stack"]);
        running.wait_for(Stream::Stdout, "Apply");
        running.write(answer);
        let finished = expect(running.wait(), 0);
        assert!(plain(&finished.stdout).contains(words), "{finished}");
        assert!(
            finished.stdout.contains("\u{1b}["),
            "colours on a terminal\n{finished}"
        );
        match made {
            Some(name) => assert_eq!(laptop.resources(), [name], "{finished}"),
            None => assert_eq!(laptop.state(), None, "{finished}"),
        }
    }
}

#[test]
fn variables_come_from_files_and_the_command_line() {
    let laptop = laptop(ROOT_MODULE);
    laptop.write("first.tfvars", "greeting = \"from a file\"\nreplicas = 2\n");
    laptop.write("second.tfvars.json", r#"{"tags": {"a=b": "c"}}"#);
    let finished = expect(
        laptop.run(&[
            "run",
            "stack",
            "--auto-approve",
            "--output",
            "json",
            "--var-file",
            "first.tfvars",
            "--var-file",
            "second.tfvars.json",
            "--var",
            "greeting=from = the line",
        ]),
        0,
    );
    let outputs = finished
        .events()
        .into_iter()
        .rfind(|event| event["type"] == "outputs")
        .unwrap();
    let value = |name: &str| {
        let outputs = outputs["outputs"].as_array().unwrap();
        outputs
            .iter()
            .find(|output| output["name"] == name)
            .unwrap()["value"]
            .clone()
    };
    assert_eq!(value("greeting"), "from = the line");
    assert_eq!(value("tags"), serde_json::json!({"a=b": "c"}));
}

#[test]
fn only_named_variables_of_the_callers_environment_reach_the_tool() {
    let laptop = laptop(
        "resource \"terraform_data\" \"a\" {\n  provisioner \"local-exec\" {\n    command = \"env\"\n  }\n}\n",
    );
    let mut command = laptop.command(&[
        "run",
        "stack",
        "--auto-approve",
        "--env",
        "PASSED_ON",
        "--env",
        "SET=a=b",
    ]);
    command
        .env("PASSED_ON", "yes")
        .env("KEPT_BACK", "kept-back-value");
    let finished = expect(integration_tests::Running::start(&mut command).wait(), 0);
    assert!(finished.stdout.contains("PASSED_ON=yes"), "{finished}");
    assert!(finished.stdout.contains("SET=a=b"), "{finished}");
    assert!(!finished.stdout.contains("kept-back-value"), "{finished}");
}

#[test]
fn modules_beside_the_folder_are_packed_too() {
    let laptop = laptop("module \"m\" {\n  source = \"../shared/m\"\n}\n");
    laptop.write(
        "shared/m/main.tf",
        "resource \"terraform_data\" \"inner\" {}\n",
    );
    expect(laptop.run(&["run", "stack", "--auto-approve"]), 0);
    assert_eq!(laptop.resources(), ["inner"]);
}

/// The tool takes a key twice in an object; the launcher's reader does not.
#[test]
fn modules_of_a_file_that_the_tool_alone_can_read_are_packed_too() {
    const CALL: &str = "module \"m\" {\n  source = \"../../\"\n}\n";
    let laptop = laptop("");
    laptop.write("main.tf", "resource \"terraform_data\" \"db\" {}\n");
    laptop.write("examples/a/main.tf", CALL);
    expect(laptop.run(&["run", "examples/a", "--auto-approve"]), 0);
    assert_eq!(laptop.resources(), ["db"]);
    let twice = "locals {\n  tags = {\n    Name = \"a\"\n    Name = \"b\"\n  }\n}\n";
    laptop.write("examples/a/main.tf", &[CALL, twice].concat());
    let second = expect(laptop.run(&["run", "examples/a", "--auto-approve"]), 0);
    assert!(second.stdout.contains("No changes"), "{second}");
    assert_eq!(laptop.resources(), ["db"]);
}

#[test]
fn a_failing_plan_has_its_exit_code() {
    let laptop = laptop("resource {\n");
    let finished = expect(laptop.run(&["run", "stack", "--auto-approve"]), 1);
    assert!(finished.stdout.contains("main.tf"), "{finished}");
}

#[test]
fn a_second_run_of_a_folder_in_use_is_refused() {
    let laptop = gated();
    let first =
        integration_tests::Running::start(&mut laptop.command(&["run", "stack", "--auto-approve"]));
    first.wait_for(Stream::Stdout, "at-the-gate");
    let second = expect(laptop.run(&["run", "stack", "--plan-only"]), 75);
    let refusal = "another run of this workspace is in progress";
    assert!(second.stderr.contains(refusal), "{second}");
    assert!(!second.stdout.contains("Plan: "), "{second}");
    first.signal(Signal::SIGINT);
    expect(first.wait(), 130);
}

#[test]
fn help_and_completions_are_there() {
    let laptop = laptop("");
    let help = expect(laptop.run(&["run", "--help"]), 0);
    for option in [
        "--destroy",
        "--plan-only",
        "--auto-approve",
        "--var",
        "--var-file",
        "--env",
        "--tool",
        "--tool-version",
        "--refresh-only",
        "--no-refresh",
        "--data-dir",
        "--output",
    ] {
        assert!(help.stdout.contains(option), "{option}\n{help}");
    }
    for shell in ["bash", "zsh", "fish"] {
        let script = expect(laptop.run(&["completions", shell]), 0);
        assert!(script.stdout.contains("auto-approve"), "{shell}");
    }
}

#[test]
fn a_variable_that_is_blank_is_one_that_is_not_set() {
    let laptop = laptop(ROOT_MODULE);
    let mut command = laptop.command(&["run", "stack", "--plan-only"]);
    for name in [
        env::DATA_DIR,
        env::EXECUTOR,
        env::RELEASE_MIRROR_URL,
        env::GRACE_PERIOD_SECONDS,
        env::LOG_FILTER,
    ] {
        command.env(name, "");
    }
    let finished = expect(integration_tests::Running::start(&mut command).wait(), 0);
    assert!(finished.stdout.contains("Plan:"), "{finished}");
    // It is still an option that help tells of.
    let mut help = laptop.command(&["run", "--help"]);
    let help = integration_tests::Running::start(help.env(env::EXECUTOR, "")).wait();
    assert!(help.stdout.contains(env::EXECUTOR), "{help}");
}

#[test]
fn output_to_a_full_disk_is_an_error_and_a_closed_pipe_is_not() {
    let laptop = laptop("");
    let completions = || laptop.command(&["completions", "bash"]);
    let full = File::options().write(true).open("/dev/full").unwrap();
    let lost = completions().stdout(full).output().unwrap();
    assert_eq!(lost.status.code(), Some(75), "{lost:?}");
    let said = String::from_utf8(lost.stderr).unwrap();
    assert!(said.contains("standard output: No space left"), "{said}");

    let (reader, unread) = std::io::pipe().unwrap();
    drop(reader);
    let unread = completions().stdout(unread).output().unwrap();
    assert_eq!(unread.status.code(), Some(0), "{unread:?}");
    assert!(unread.stderr.is_empty(), "{unread:?}");
}

/// Packages go to another store, and what is wrong on the way is said. `archive` is one of two packages.
fn are_carried(laptop: &Laptop, place: &str, archive: &Path) {
    let cache = |command: &str, more: &[&str]| {
        let words = ["cache", command, "--dir", place];
        laptop.run(&[&words, more].concat())
    };
    let document = |finished: &Finished| -> Value {
        serde_json::from_str(&finished.stdout).unwrap_or_else(|_| panic!("{finished}"))
    };
    let carried = laptop.home().join("carried");
    let (mirror, other) = (carried.to_str().unwrap(), laptop.home().join("other"));
    let exported = expect(cache("export", &[mirror, "--provider", "acme/null"]), 0);
    assert_eq!(exported.stdout, "Exported: 2 of 2 packages.\n");
    let none = expect(cache("export", &[mirror, "--provider", "acme/other"]), 65);
    assert!(
        none.stderr.contains("has no package of `acme/other`"),
        "{none}"
    );
    let import = |more: &[&str]| {
        let words = ["cache", "import", mirror, "--dir", other.to_str().unwrap()];
        laptop.run(&[&words, more].concat())
    };
    // Nothing said that they are genuine, so nothing says so to the next one.
    assert!(exported.stderr.contains("nothing said"), "{exported}");
    let imported = document(&expect(import(&["-o", "json"]), 0));
    assert_eq!(imported["packages"][1]["verifiedBy"], "nothing");
    assert_eq!(ProviderStore::new(&other).list().unwrap().len(), 2);
    let lock = laptop.home().join("lock.hcl");
    let digest = archive.file_stem().unwrap().to_str().unwrap();
    let text = format!(
        "provider \"registry.example.test/acme/null\" {{\n  version = \"1.0.0\"\n  hashes = [\"zh:{digest}\"]\n}}\n"
    );
    fs::write(&lock, text).unwrap();
    let locked = expect(import(&["--lock-file", lock.to_str().unwrap()]), 1);
    assert_eq!(locked.stdout, "Imported: 1 of 2 packages.\n");
    assert!(
        locked.stderr.contains("does not have this version"),
        "{locked}"
    );
    let folder_of_provider = carried.join("registry.example.test/acme/null");
    let zip = folder_of_provider.join("terraform-provider-null_1.0.0_linux_amd64.zip");
    exports_what_a_lock_file_tells(cache, mirror, &zip, archive, &lock);
    let listed = document(&expect(import(&["-o", "json"]), 0));
    assert_eq!(listed["packages"][0]["verifiedBy"], "list");
    imports_by_the_digest_of_files(import, &zip, &lock);
    fs::write(&zip, "other").unwrap();
    fs::write(carried.join("stray.zip"), "").unwrap();
    let wrong = expect(import(&[]), 1);
    assert_eq!(wrong.stdout, "Imported: 1 of 3 packages.\n");
    assert!(wrong.stderr.contains("but its list says"), "{wrong}");
    assert!(wrong.stderr.contains("`stray.zip` is left out"), "{wrong}");
    fs::write(&lock, "{{").unwrap();
    let no_lock = expect(import(&["--lock-file", lock.to_str().unwrap()]), 65);
    assert!(
        no_lock.stderr.contains("is no lock file of providers"),
        "{no_lock}"
    );
    fs::remove_dir_all(&carried).unwrap();
    let missing = expect(import(&[]), 65);
    assert!(missing.stderr.contains("could not read"), "{missing}");
}

/// Another run has put an archive beside the genuine one, whose name is what it is.
fn exports_what_a_lock_file_tells(
    cache: impl Fn(&str, &[&str]) -> Finished,
    mirror: &str,
    exported: &Path,
    archive: &Path,
    lock: &Path,
) {
    let content = fs::read(archive).unwrap();
    let unnamed = archive.with_file_name("unnamed");
    fs::write(&unnamed, "planted").unwrap();
    let planted = sha256_of(&unnamed).unwrap();
    let planted = archive.with_file_name(format!("{planted}.zip"));
    fs::rename(unnamed, &planted).unwrap();
    let several = expect(cache("export", &[mirror]), 1);
    assert_eq!(several.stdout, "Exported: 1 of 2 packages.\n");
    assert!(several.stderr.contains("`--lock-file` tells"), "{several}");
    let with_lock = ["-o", "json", "--lock-file", lock.to_str().unwrap(), mirror];
    let chosen = expect(cache("export", &with_lock), 0);
    let chosen: Value = serde_json::from_str(&chosen.stdout).unwrap();
    assert_eq!(chosen["packages"].as_array().unwrap().len(), 1);
    assert_eq!(chosen["packages"][0]["verifiedBy"], "lock-file");
    assert_eq!(fs::read(exported).unwrap(), content);
    // Alone, it looks genuine to whoever has no lock file.
    let aside = archive.with_extension("aside");
    fs::rename(archive, &aside).unwrap();
    let forged = expect(cache("export", &with_lock), 1);
    assert!(forged.stdout.contains("none of the digests"), "{forged}");
    assert_eq!(fs::read(exported).unwrap(), content);
    fs::rename(aside, archive).unwrap();
    fs::remove_file(planted).unwrap();
}

fn tools_are_checked(store: &Path, verify: impl Fn(&[&str]) -> Finished) {
    let slot = store.join("terraform/1.9.8");
    fs::create_dir_all(&slot).unwrap();
    let (program, note) = (slot.join("terraform"), slot.join("terraform.sha256"));
    fs::write(&program, "program").unwrap();
    let unknown = expect(verify(&[]), 0);
    assert!(
        unknown.stderr.contains("`terraform/1.9.8` is not checked"),
        "{unknown}"
    );
    fs::write(
        &note,
        format!("{}  terraform\n", sha256_of(&program).unwrap()),
    )
    .unwrap();
    let checked = expect(verify(&[]), 0);
    assert!(!checked.stderr.contains("not checked"), "{checked}");
    fs::write(&program, "another program").unwrap();
    let altered = expect(verify(&["-o", "json"]), 1);
    let altered: Value = serde_json::from_str(&altered.stdout).unwrap();
    assert_eq!(altered["packages"][0]["tool"], "terraform");
    expect(verify(&["--remove"]), 1);
    assert!(!program.exists() && !note.exists());
    expect(verify(&[]), 0);
}

/// A lock file that was written from a mirror has only digests of files.
fn imports_by_the_digest_of_files(
    import: impl Fn(&[&str]) -> Finished,
    archive: &Path,
    lock: &Path,
) {
    let pack = |content: &str| {
        let mut zip = ZipWriter::new(File::create(archive).unwrap());
        for (name, content) in [
            ("terraform-provider-x_v1.0.0", content),
            ("LICENSE.txt", "hello\n"),
        ] {
            zip.start_file(name, SimpleFileOptions::default()).unwrap();
            zip.write_all(content.as_bytes()).unwrap();
        }
        zip.finish().unwrap();
    };
    // Terraform computed the first digest of these files. The second one is of another platform.
    let text = "provider \"registry.example.test/acme/null\" {\n  version = \"1.0.0\"\n  hashes = [\n    \
        \"h1:cuAYBzn6IKPHKJs3M/HcpkzTtSYaT+z1m6UlPiPEYmI=\",\n    \
        \"zh:0000000000000000000000000000000000000000000000000000000000000000\",\n  ]\n}\n";
    fs::write(lock, text).unwrap();
    pack("binary\n");
    let locked = expect(import(&["--lock-file", lock.to_str().unwrap()]), 1);
    assert_eq!(locked.stdout, "Imported: 1 of 2 packages.\n");
    pack("other\n");
    let refused = expect(import(&["--lock-file", lock.to_str().unwrap()]), 1);
    assert_eq!(refused.stdout, "Imported: 0 of 2 packages.\n");
    assert!(refused.stderr.contains("none of the digests"), "{refused}");
}

#[test]
fn packages_of_providers_are_listed_checked_and_removed() {
    let laptop = laptop("");
    let folder = laptop.home().join("shared");
    let store = ProviderStore::new(&folder);
    let place = folder.to_str().unwrap();
    let cache = |command: &str, more: &[&str]| {
        let words = ["cache", command, "--dir", place];
        laptop.run(&[&words, more].concat())
    };
    let document = |finished: &Finished| -> Value {
        serde_json::from_str(&finished.stdout).unwrap_or_else(|_| panic!("{finished}"))
    };
    let none = expect(cache("list", &[]), 0);
    assert!(none.stderr.contains("No packages in"), "{none}");

    let archive = laptop.home().join("archive");
    let paths: Vec<_> = ["1.0.0", "1.1.0"]
        .into_iter()
        .map(|version| {
            fs::write(&archive, version).unwrap();
            let sha256 = sha256_of(&archive).unwrap();
            let address = "registry.example.test/acme/null";
            let package = Package::new(address, version, "linux_amd64").unwrap();
            store.publish(&package, &archive, &sha256).unwrap();
            store.path(&package, &sha256)
        })
        .collect();
    let listed = expect(cache("list", &[]), 0);
    assert_eq!(listed.stdout.lines().count(), 3, "{listed}");
    let listed = document(&expect(cache("list", &["-o", "json"]), 0));
    assert_eq!(listed["totalBytes"], 10);
    assert_eq!(listed["packages"][1]["version"], "1.1.0");
    expect(cache("verify", &[]), 0);

    are_carried(&laptop, place, &paths[0]);
    tools_are_checked(&folder, |more| cache("verify", more));

    fs::remove_file(&paths[0]).unwrap();
    fs::write(&paths[0], "other").unwrap();
    let altered = expect(cache("verify", &["-o", "json"]), 1);
    let altered = document(&altered);
    assert_eq!(altered["packages"].as_array().unwrap().len(), 1);
    assert_eq!(altered["packages"][0]["version"], "1.0.0");
    expect(cache("verify", &["--remove"]), 1);
    expect(cache("verify", &[]), 0);
    assert!(!paths[0].exists() && paths[1].exists());

    let early = SystemTime::UNIX_EPOCH - Duration::from_hours(1);
    File::open(&paths[1]).unwrap().set_modified(early).unwrap();
    let listed = document(&expect(cache("list", &["-o", "json"]), 0));
    assert_eq!(listed["packages"][0]["lastUsed"], "1970-01-01T00:00:00Z");
    let old = SystemTime::now() - Duration::from_hours(49);
    File::open(&paths[1]).unwrap().set_modified(old).unwrap();
    expect(cache("prune", &["--unused-days", "3"]), 0);
    assert!(paths[1].exists());
    let pruned = expect(cache("prune", &["--unused-days", "2"]), 0);
    assert!(pruned.stderr.contains("Removed: 1."), "{pruned}");
    assert!(!paths[1].exists());
    fs::write(folder.join("file"), "").unwrap();
    let wrong = laptop.run(&[
        "cache",
        "list",
        "--dir",
        folder.join("file").to_str().unwrap(),
    ]);
    assert!(
        expect(wrong, 75)
            .stderr
            .contains("could not use the packages")
    );
}
