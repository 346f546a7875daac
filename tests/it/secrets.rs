//! What the platform entrusts to a run reaches neither its logs, nor its user's processes beyond the contract,
//! nor a file that outlives it.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use integration_tests::machine::{files_below, give_away};
use integration_tests::process::{Stream, copy_program};
use integration_tests::{Machine, Outcome, Repository, Running, job};
use job_contract::{JobData, StepType, env};
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use test_platform::launcher;

use crate::machine;

const TOKEN: &str = "ghs_planted0token1for2the3clone";
const INTERNAL: &str = "cGxhbnRlZC1pbnRlcm5hbC1zZWNyZXQtMTIzNDU2Nzg5MDEyMzQ1Njc4OTA";
const KEY: &str = "-----BEGIN OPENSSH PRIVATE KEY-----\nplantedkeyline0000000000000000000000000000000000000000000000000\nplantedkeyline1111111111111111111111111111111111111111111111111\n-----END OPENSSH PRIVATE KEY-----\n";

fn entrusted(job: JobData) -> JobData {
    JobData {
        access_token: Some(TOKEN.into()),
        module_ssh_key: Some(KEY.into()),
        ..job
    }
}

/// Everything that must never be seen, line by line.
fn secrets() -> Vec<&'static str> {
    [TOKEN, INTERNAL]
        .into_iter()
        .chain(KEY.lines().filter(|line| line.starts_with("planted")))
        .collect()
}

#[track_caller]
fn assert_unseen(machine: &Machine, outcome: &Outcome, job_data: &str) {
    let mut places = vec![(
        "the executor's streams and report".to_owned(),
        outcome.to_string(),
    )];
    for path in files_below(machine.folder()) {
        let text = String::from_utf8_lossy(&fs::read(&path).unwrap()).into_owned();
        places.push((path.display().to_string(), text));
    }
    for (place, text) in &places {
        for secret in secrets() {
            assert!(!text.contains(secret), "{secret} is in {place}\n{text}");
        }
        assert!(!text.contains(job_data), "the job data is in {place}");
    }
}

#[test]
fn the_tool_sees_its_own_variables_and_nothing_of_ours() {
    let (machine, repository) = (
        machine(),
        Repository::module(
            "resource \"terraform_data\" \"a\" {\n  provisioner \"local-exec\" {\n    command = \"env\"\n  }\n}\n",
        ),
    );
    let mut apply = entrusted(job::step(StepType::Apply, &repository));
    apply
        .environment_variables
        .insert("OWN_VARIABLE".into(), "own".into());
    machine.queue(&[&apply]);
    let data = job_contract::encoding::encode(&apply);
    let outcome = machine
        .executor(&apply)
        .env(env::INTERNAL_SECRET, INTERNAL)
        .env("UNLISTED", "unlisted-value")
        .env("HTTPS_PROXY", "")
        .env("AWS_ACCESS_KEY_ID", "planted-storage-key")
        .run()
        .expect_code(0);
    assert!(outcome.log().contains("OWN_VARIABLE=own"), "{outcome}");
    assert!(outcome.log().contains("PATH=/"), "{outcome}");
    for text in [
        "UNLISTED",
        "unlisted-value",
        "planted-storage-key",
        env::JOB_DATA,
        env::INTERNAL_SECRET,
    ] {
        assert!(!outcome.log().contains(text), "{text}\n{outcome}");
    }
    assert_unseen(&machine, &outcome, &data);
}

#[test]
fn the_file_with_the_platforms_secret_is_gone_before_a_script_runs() {
    // If the variable has the secret too, it is the one that is used.
    for variable in [None, Some(INTERNAL)] {
        let (machine, repository) = (machine(), Repository::fixture());
        let file = machine.scratch("internal-secret");
        fs::write(&file, INTERNAL).unwrap();
        let script = format!(
            "test -e '{}' || echo no-file; cat '{}' || true",
            file.display(),
            file.display()
        );
        let job = job::scripts(&repository, vec![job::bash(1, &script)]);
        machine.queue(&[&job]);
        let data = job_contract::encoding::encode(&job);
        let mut executor = machine.executor(&job).env(env::INTERNAL_SECRET_FILE, &file);
        if let Some(secret) = variable {
            executor = executor.env(env::INTERNAL_SECRET, secret);
        }
        let outcome = executor.run().expect_code(0);
        assert!(outcome.log().contains("no-file"), "{outcome}");
        assert_unseen(&machine, &outcome, &data);
    }
}

#[test]
fn an_executor_that_misses_the_file_of_the_secret_says_what_to_do_and_its_help_needs_none() {
    let (machine, repository) = (machine(), Repository::fixture());
    let file = machine.scratch("internal-secret");
    fs::write(&file, INTERNAL).unwrap();
    let first = job::scripts(&repository, vec![job::bash(1, "true")]);
    let second = job::in_job(&first, "413");
    for step in [&first, &second] {
        machine.queue(&[step]);
    }
    let executor = |step: &JobData| machine.executor(step).env(env::INTERNAL_SECRET_FILE, &file);
    executor(&first).run().expect_code(0);

    // The first start has removed the file.
    let outcome = executor(&second).run().expect_code(64);
    let expected = format!(
        "`InternalSecretFile` names `{}`, which does not exist: an earlier start may have removed it. \
         Write the secret into it before each start, or set `InternalSecret`",
        file.display()
    );
    assert_eq!(outcome.error(), expected);
    let printed = format!("error: {expected}\n");
    assert!(outcome.finished.stderr.contains(&printed), "{outcome}");
    // It is not missed where nothing needs it.
    let unchecked = executor(&second).env(env::ENABLE_SECURITY, "false");
    unchecked.run().expect_code(0);
    let mut help = Command::new(crate::EXECUTOR);
    help.arg("--help")
        .env_clear()
        .env(env::INTERNAL_SECRET_FILE, &file);
    let help = Running::start(&mut help).wait();
    assert_eq!(help.code(), 0, "{help}");
    assert!(help.stdout.contains(env::INTERNAL_SECRET_FILE), "{help}");
}

#[test]
fn a_mounted_file_of_the_secret_serves_each_start_and_a_warning_says_that_it_stays() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "only root may mount a folder read-only: run this test as root"
    );
    let (machine, repository) = (machine(), Repository::fixture());
    let folder = machine.scratch("mounted");
    fs::create_dir(&folder).unwrap();
    let file = folder.join("internal-secret");
    fs::write(&file, INTERNAL).unwrap();
    let first = job::scripts(&repository, vec![job::bash(1, "true")]);
    for step in [&first, &job::in_job(&first, "413")] {
        machine.queue(&[step]);
        let run = machine
            .executor(step)
            .env(env::INTERNAL_SECRET_FILE, &file)
            .with_read_only(&folder);
        let outcome = run.run().expect_code(0);
        let why = format!(
            "could not remove the secret in `{}`: Read-only file system",
            file.display()
        );
        let warned = outcome.finished.stderr.lines().any(|line| {
            line.contains("scripts and tools can read the platform's secret") && line.contains(&why)
        });
        assert!(warned, "{outcome}");
        assert!(!outcome.to_string().contains(INTERNAL), "{outcome}");
    }
}

#[test]
fn names_may_be_forwarded_by_configuration_but_never_secrets() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = job::scripts(&repository, vec![job::bash(1, "env")]);
    machine.queue(&[&job]);
    let secrets = [
        env::INTERNAL_SECRET,
        env::REPORT_KEY,
        env::AWS_ACCESS_KEY,
        env::AWS_SECRET_KEY,
        env::AZURE_ACCESS_KEY,
        env::GCP_CREDENTIALS,
        env::REDIS_PASSWORD,
        env::REDIS_SENTINEL_PASSWORD,
        env::REDIS_TRUSTSTORE_PASSWORD,
    ];
    let forwarded = [
        &["CORPORATE_CA", "ABSENT", env::JOB_DATA],
        secrets.as_slice(),
    ];
    let executor = machine
        .executor(&job)
        .env("CORPORATE_CA", "/etc/ca.pem")
        .env(env::ENV_FORWARD, forwarded.concat().join(","));
    let executor = secrets
        .iter()
        .fold(executor, |run, name| run.env(name, INTERNAL));
    let outcome = executor.run().expect_code(0);
    assert!(
        outcome.log().contains("CORPORATE_CA=/etc/ca.pem"),
        "{outcome}"
    );
    // The log masks values, so a secret that was passed on shows by its name.
    for name in secrets.iter().chain([&env::JOB_DATA]) {
        assert!(!outcome.log().contains(name), "{name}: {outcome}");
    }
}

#[test]
fn a_user_process_cannot_read_the_executors_environment() {
    let (machine, repository) = (machine(), Repository::fixture());
    let job = entrusted(job::scripts(
        &repository,
        vec![job::bash(
            1,
            "for file in environ mem maps auxv stack syscall; do head -c1 /proc/$PPID/$file >/dev/null 2>&1 && echo \"readable: $file\"; done; \
             ls /proc/$PPID/fd /proc/$PPID/map_files >/dev/null 2>&1 && echo readable: files; \
             ls /proc/$$/fd >/dev/null || echo readable: nothing at all; echo tried $(id -u)",
        )],
    ));
    machine.queue(&[&job]);
    let run = machine.executor(&job).env(env::INTERNAL_SECRET, INTERNAL);
    let outcome = if nix::unistd::geteuid().is_root() {
        // Root may read anything; a pod's user may not.
        give_away(repository.path(), 65534);
        run.as_user(65534).run()
    } else {
        run.run()
    };
    let outcome = outcome.expect_code(0);
    assert!(outcome.log().contains("tried "), "{outcome}");
    assert!(!outcome.log().contains("readable: "), "{outcome}");
}

/// The C library's resolver reads these in whatever process has them: at work there must be none that has.
#[test]
fn no_workspace_variable_changes_where_the_executor_sends_its_requests() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "only root may look into an executor: run this test as root"
    );
    let (machine, repository) = (machine(), Repository::fixture());
    let script = "echo at-the-gate; read -r < /dev/tcp/127.0.0.1/9 || sleep 600";
    let job = job::scripts(&repository, vec![job::bash(1, script)]);
    machine.queue(&[&job]);
    let executor = machine
        .executor(&job)
        .env("LOCALDOMAIN", "attacker.example")
        .env("RES_OPTIONS", "ndots:15")
        .env("HOSTALIASES", "/work/aliases")
        .env("RESOLV_HOST_CONF", "/work/host.conf")
        .start();
    executor.running.wait_for(Stream::Stdout, "at-the-gate");
    let environment = fs::read(format!("/proc/{}/environ", executor.running.pid())).unwrap();
    let environment = String::from_utf8_lossy(&environment);
    let names: Vec<_> = environment
        .split('\0')
        .filter_map(|variable| variable.split_once('='))
        .map(|(name, _)| name)
        .collect();
    for name in [
        "LOCALDOMAIN",
        "RES_OPTIONS",
        "HOSTALIASES",
        "RESOLV_HOST_CONF",
    ] {
        assert!(!names.contains(&name), "{name}");
    }
    assert!(names.contains(&env::DATA_DIR), "{names:?}");
    executor.running.signal(Signal::SIGTERM);
    executor.wait();
}

/// Allows a program, whose path comes after it, memory dumps of any size.
const DUMPING: [&str; 3] = ["bash", "-c", "ulimit -c unlimited; exec \"$0\" \"$@\""];

fn most_of_a_dump(pid: Pid) -> String {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = limits.lines().find(|line| line.starts_with("Max core"));
    let words = line.unwrap().split_whitespace().skip(4);
    words.take(2).collect::<Vec<_>>().join(" ")
}

#[test]
fn a_crash_of_the_executor_or_of_what_it_starts_leaves_no_memory_on_disk() {
    let (machine, repository) = (machine(), Repository::fixture());
    let script =
        "ulimit -Sc; ulimit -Hc; echo at-the-gate; read -r < /dev/tcp/127.0.0.1/9 || sleep 600";
    let job = entrusted(job::scripts(&repository, vec![job::bash(1, script)]));
    machine.queue(&[&job]);
    let executor = machine.executor(&job).wrapped_in(&DUMPING).start();
    executor.running.wait_for(Stream::Stdout, "at-the-gate");
    assert_eq!(most_of_a_dump(executor.running.pid()), "0 0");
    executor.running.signal(Signal::SIGABRT);
    let outcome = executor.wait();
    let status = outcome.finished.status;
    assert_eq!(status.signal(), Some(Signal::SIGABRT as i32), "{outcome}");
    assert!(!status.core_dumped());
    assert!(outcome.log().contains("0\n0\nat-the-gate"), "{outcome}");
    assert_unseen(&machine, &outcome, &job_contract::encoding::encode(&job));
}

#[test]
fn a_launcher_that_serves_keeps_its_memory_and_its_environment_to_itself() {
    // Of the client there is in the handle of a launcher.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let machine = machine();
    let program = machine.scratch("launcher");
    copy_program(crate::LAUNCHER.as_ref(), &program);
    let mut command = launcher::command(DUMPING[0], &machine.scratch("home"));
    command.args(&DUMPING[1..]);
    if nix::unistd::geteuid().is_root() {
        // What root's processes show belongs to root in any case.
        give_away(machine.folder(), 65534);
        command.args([
            "setpriv",
            "--reuid=65534",
            "--regid=65534",
            "--clear-groups",
        ]);
    }
    launcher::serve(command.arg(program), "process")
        .env(env::DATA_DIR, machine.data_dir())
        .env(env::INTERNAL_SECRET, INTERNAL);
    let launcher = launcher::Launcher::start(&mut command);
    let pid = launcher.running.pid();
    assert_eq!(most_of_a_dump(pid), "0 0");
    // The kernel gives what others may not look into to root.
    let owner = |file: &str| fs::metadata(format!("/proc/{pid}/{file}")).unwrap().uid();
    assert_eq!((owner("environ"), owner("mem")), (0, 0));
    launcher.running.signal(Signal::SIGABRT);
    let ended = launcher.running.wait();
    assert_eq!(
        ended.status.signal(),
        Some(Signal::SIGABRT as i32),
        "{ended}"
    );
    assert!(!ended.status.core_dumped());
}

#[test]
fn scripts_and_tools_inherit_no_open_file_of_the_executor() {
    let show = "ls -l /proc/self/fd | sed -n 's/.* -> /open: /p'";
    // Which an executor in a pod does not inherit itself.
    let alone = "for fd in /proc/$$/fd/*; do fd=${fd##*/}; if [ $fd -gt 2 ]; then eval \"exec $fd>&-\"; fi; done; exec \"$0\"";
    let (machine, repository) = (
        machine(),
        Repository::module(&format!(
            "resource \"terraform_data\" \"a\" {{\n  provisioner \"local-exec\" {{\n    command = \"{show}\"\n  }}\n}}\n",
        )),
    );
    let apply = JobData {
        command_list: vec![job::after(job::bash(1, show))],
        ..job::step(StepType::Apply, &repository)
    };
    machine.queue(&[&apply]);
    let executor = machine.executor(&apply).wrapped_in(&["bash", "-c", alone]);
    let outcome = executor.run().expect_code(0);
    let lines = outcome.log().lines().filter(|line| !line.contains("sed "));
    let open = lines.filter_map(|line| line.split_once("open: "));
    let open: Vec<_> = open.map(|(_, file)| file).collect();
    // Three streams and the folder that is listed, twice.
    assert_eq!(open.len(), 8, "{open:?}");
    for file in open {
        let harmless = ["pipe:", "/dev/null", "/proc/"];
        assert!(
            harmless.iter().any(|known| file.starts_with(known)),
            "{file} is open\n{outcome}"
        );
    }
}

#[test]
fn sensitive_values_stay_out_of_what_is_kept_beside_the_state() {
    let (machine, repository) = (
        machine(),
        Repository::module(
            "variable \"password\" {\n  type      = string\n  sensitive = true\n}\nresource \"terraform_data\" \"a\" {\n  input = var.password\n}\noutput \"password\" {\n  value     = var.password\n  sensitive = true\n}\n",
        ),
    );
    let plan = JobData {
        variables: [("password".to_owned(), "planted-variable-value".into())].into(),
        ..job::plan(&repository)
    };
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    for step in [&plan, &apply] {
        let outcome = machine.run(step).expect_code(0);
        assert!(
            !outcome.to_string().contains("planted-variable-value"),
            "{outcome}"
        );
        assert!(!machine.step_output(step).contains("planted-variable-value"));
    }
    let context = serde_json::to_string(&machine.context(&plan)).unwrap();
    assert!(context.contains("terraform_data.a"), "{context}");
    assert!(!context.contains("planted-variable-value"), "{context}");
}

#[test]
fn stored_files_belong_to_their_owner_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = job::plan(&repository);
    let apply = job::apply_after(&plan);
    machine.queue(&[&plan, &apply]);
    machine.run(&plan).expect_code(0);
    machine.run(&apply).expect_code(0);
    let files = files_below(&machine.data_dir());
    assert!(files.len() > 5, "{files:?}");
    for file in files {
        let exposed = (1..)
            .map_while(|depth| file.ancestors().nth(depth))
            .take_while(|folder| folder.starts_with(machine.data_dir()))
            .chain([file.as_path()])
            .all(|path| path.metadata().unwrap().permissions().mode() & 0o077 != 0);
        assert!(!exposed, "{} can be read by others", file.display());
    }
}
