//! Input variables: the text as typed, parsed by the declared type, seen by no process list and no work tree.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use integration_tests::machine::files_below;
use integration_tests::{Machine, Repository, job};
use job_contract::job::Variable;
use job_contract::{JobData, StepType, Tool, env};
use serde_json::{Value, json};

use crate::machine;

with_both_tools! {
    an_apply_gets_ephemeral_variables_again_and_no_file_has_them,
}

const TYPED: &str = r#"
variable "text" { type = string }
variable "count_of" { type = number }
variable "flag" { type = bool }
variable "list" { type = list(string) }
variable "map" { type = map(string) }
variable "object" { type = object({ a = number, b = optional(string, "none") }) }
variable "untyped" {}
output "all" {
  value = {
    text = var.text, count_of = var.count_of, flag = var.flag, list = var.list,
    map = var.map, object = var.object, untyped = var.untyped,
  }
}
"#;

fn apply_with(machine: &Machine, repository: &Repository, variables: &[(&str, &str)]) -> JobData {
    let apply = JobData {
        variables: variables
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).into()))
            .collect(),
        ..job::step(StepType::Apply, repository)
    };
    machine.queue(&[&apply]);
    machine.run(&apply).expect_code(0);
    apply
}

const TOKEN: &str = "canary-0123456789";

/// A module with an ephemeral variable. Its apply leaves the value in the file `given` of a folder, and in `found` the files of
/// the machine that have it then.
fn with_token(machine: &Machine, folder: &Path) -> Repository {
    Repository::module(&format!(
        r#"
variable "token" {{
  type      = string
  ephemeral = true
}}
variable "size" {{
  type = number
}}
resource "terraform_data" "sized" {{
  input = var.size
  provisioner "local-exec" {{
    command     = "printf '%s' \"$TOKEN\" > '{}'; grep -rlF -D skip -e \"$TOKEN\" '{}' > '{}' || true"
    environment = {{ TOKEN = var.token }}
  }}
}}
output "size" {{
  value = terraform_data.sized.output
}}
"#,
        folder.join("given").display(),
        machine.folder().display(),
        folder.join("found").display(),
    ))
}

fn token_and_size(size: &str) -> BTreeMap<String, Variable> {
    [("token", TOKEN), ("size", size)]
        .map(|(name, value)| (name.to_owned(), value.into()))
        .into()
}

/// The tool refuses an apply without them, and one with others. The platform's value of another variable has changed.
fn an_apply_gets_ephemeral_variables_again_and_no_file_has_them(tool: Tool) {
    let (machine, folder) = (machine(), tempfile::tempdir().unwrap());
    let repository = with_token(&machine, folder.path());
    let plan = JobData {
        variables: token_and_size("3"),
        ..job::plan_by(tool, &repository)
    };
    let apply = JobData {
        variables: token_and_size("4"),
        ..job::apply_after(&plan)
    };
    let direct = job::in_job(&job::step_by(tool, StepType::Apply, &repository), "413");
    let direct = JobData {
        variables: token_and_size("5"),
        ..direct
    };
    machine.queue(&[&plan, &apply]);
    machine.queue(&[&direct]);
    for (step, size) in [(&plan, None), (&apply, Some(3)), (&direct, Some(5))] {
        let outcome = machine.run(step).expect_code(0);
        assert!(!outcome.to_string().contains(TOKEN), "{outcome}");
        if let Some(size) = size {
            assert_eq!(machine.output(step, "size"), size, "{outcome}");
            for (name, content) in [("given", TOKEN), ("found", "")] {
                let written = fs::read_to_string(folder.path().join(name)).unwrap();
                assert_eq!(written, content, "{name}\n{outcome}");
            }
        }
    }
    for file in files_below(machine.folder()) {
        let content = fs::read(&file).unwrap();
        let has_token = String::from_utf8_lossy(&content).contains(TOKEN);
        assert!(!has_token, "{}", file.display());
    }
}

#[test]
fn each_type_reads_its_text() {
    let (machine, repository) = (machine(), Repository::module(TYPED));
    let apply = apply_with(
        &machine,
        &repository,
        &[
            ("text", "[\"no list\"]"),
            ("count_of", "3"),
            ("flag", "true"),
            ("list", "[\"a\", \"b\",]"),
            ("map", "{ a = \"1\", \"b c\" = \"2\" }"),
            ("object", "{\"a\": 1}"),
            ("untyped", "[1, 2]"),
        ],
    );
    let all = machine.output(&apply, "all");
    assert_eq!(all["text"], "[\"no list\"]");
    assert_eq!(all["count_of"], 3);
    assert_eq!(all["flag"], true);
    assert_eq!(all["list"], json!(["a", "b"]));
    assert_eq!(all["map"], json!({"a": "1", "b c": "2"}));
    assert_eq!(all["object"], json!({"a": 1, "b": "none"}));
    // The command line would have handed it over as a string, too.
    assert_eq!(all["untyped"], "[1, 2]");
}

#[test]
fn text_arrives_as_typed() {
    let repository = Repository::module(
        "variable \"text\" {\n  type = string\n}\noutput \"text\" {\n  value = var.text\n}\n",
    );
    for text in [
        "plain",
        "",
        " spaces around ",
        "a=b=c",
        "say \"hi\" it's \\n",
        "${not.an.expression} %{ if x } $${y}",
        "two\nlines\r\nand\ttab",
        "-flag --var x=y",
        "@file",
        "null",
        "007",
        "\u{e9}\u{1f600}\u{2028}",
        "<<EOT",
    ] {
        let machine = machine();
        let apply = apply_with(&machine, &repository, &[("text", text)]);
        assert_eq!(machine.output(&apply, "text"), text, "{text:?}");
    }
}

#[test]
fn awkward_text_inside_collections_arrives_too() {
    let repository = Repository::module(
        "variable \"map\" {\n  type = map(string)\n}\noutput \"map\" {\n  value = var.map\n}\n",
    );
    let machine = machine();
    let apply = apply_with(
        &machine,
        &repository,
        &[("map", r#"{ "a=b" = "x=\"y\"", c = "$${z}\n" }"#)],
    );
    assert_eq!(
        machine.output(&apply, "map"),
        json!({"a=b": "x=\"y\"", "c": "${z}\n"})
    );
}

#[test]
fn the_runs_variables_win_over_files_in_the_repository() {
    let repository = Repository::with(&[
        (
            "main.tf",
            "variable \"a\" {}\nvariable \"b\" {}\nvariable \"c\" {}\noutput \"all\" {\n  value = [var.a, var.b, var.c]\n}\n",
        ),
        (
            "terraform.tfvars",
            "a = \"file\"\nb = \"file\"\nc = \"file\"\n",
        ),
        ("zzzz.auto.tfvars", "b = \"auto\"\n"),
        ("zzzz.auto.tfvars.json", "{\"b\": \"auto-json\"}"),
    ]);
    let machine = machine();
    let apply = apply_with(&machine, &repository, &[("a", "run"), ("b", "run")]);
    assert_eq!(machine.output(&apply, "all"), json!(["run", "run", "file"]));
}

#[test]
fn a_variable_the_module_does_not_declare_stops_nothing() {
    // A platform hands organization-wide variables to every workspace.
    let (machine, repository) = (machine(), Repository::fixture());
    let apply = apply_with(
        &machine,
        &repository,
        &[("undeclared", "x"), ("greeting", "hey")],
    );
    assert_eq!(machine.output(&apply, "greeting"), "hey");
}

#[test]
fn executor_settings_of_a_workspace_have_no_effect_and_are_named_in_the_log() {
    let repository =
        Repository::module("variable \"seen\" {}\noutput \"seen\" {\n  value = var.seen\n}\n");
    let machine = machine();
    let elsewhere = machine.scratch("elsewhere");
    let extra = format!(
        "{}={};{}=true;TF_VAR_seen=by-the-tool",
        env::DATA_DIR,
        elsewhere.display(),
        env::COLOR_OUTPUT
    );
    let mut apply = job::step(StepType::Apply, &repository);
    let variables = &mut apply.environment_variables;
    variables.insert(env::EPHEMERAL_ENV.to_owned(), extra);
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(0);
    let output = machine.step_output(&apply);
    for name in [env::DATA_DIR, env::COLOR_OUTPUT] {
        let line = format!(
            "`{}` names `{name}`, a setting of the executor, where it has no effect",
            env::EPHEMERAL_ENV
        );
        assert_eq!(output.matches(&line).count(), 1, "{outcome}");
    }
    assert_eq!(output.matches("where it has no effect").count(), 2);
    assert!(
        !elsewhere.exists() && !output.contains('\u{1b}'),
        "{outcome}"
    );
    assert_eq!(machine.output(&apply, "seen"), "by-the-tool");
}

#[test]
fn a_variable_of_the_wrong_type_fails_the_plan_with_the_tools_message() {
    let (machine, repository) = (machine(), Repository::fixture());
    let plan = JobData {
        variables: [("replicas".to_owned(), "many".into())].into(),
        ..job::plan(&repository)
    };
    machine.queue(&[&plan]);
    let outcome = machine.run(&plan).expect_code(1);
    assert!(outcome.log().contains("replicas"), "{outcome}");
    assert_eq!(machine.statuses(&plan), ("failed".into(), "failed".into()));
}

#[test]
fn variables_are_in_no_command_line_and_in_no_file_of_the_work_tree() {
    let (machine, repository) = (
        machine(),
        Repository::module(
            "variable \"secret\" {\n  type      = string\n  sensitive = true\n}\nresource \"terraform_data\" \"a\" {\n  provisioner \"local-exec\" {\n    command = \"cat /proc/$PPID/cmdline | tr '\\\\0' ' '; grep -rl --exclude-dir=.git hunter[2]000 . && echo FOUND; true\"\n  }\n}\n",
        ),
    );
    let apply = JobData {
        variables: [("secret".to_owned(), "hunter2000".into())].into(),
        ..job::step(StepType::Apply, &repository)
    };
    machine.queue(&[&apply]);
    let outcome = machine.run(&apply).expect_code(0);
    assert!(
        outcome.log().contains("-auto-approve"),
        "the command line was not shown\n{outcome}"
    );
    assert!(!outcome.log().contains("hunter2000"), "{outcome}");
    assert!(!outcome.log().contains("(local-exec): FOUND"), "{outcome}");
}

#[test]
fn the_array_form_marks_values_that_are_expressions() {
    let (machine, repository) = (
        machine(),
        Repository::module(
            "variable \"a\" {}\nvariable \"b\" {}\noutput \"all\" {\n  value = [var.a, var.b]\n}\n",
        ),
    );
    let apply = job::step(StepType::Apply, &repository);
    let mut document = serde_json::to_value(&apply).unwrap();
    document["variables"] = json!([
        {"key": "a", "value": "[1]", "hcl": true},
        {"key": "b", "value": "[1]", "hcl": false},
        {"key": "undeclared", "value": Value::Null},
    ]);
    machine.queue(&[&apply]);
    machine
        .executor_with_data(Some(&document.to_string()))
        .run()
        .expect_code(0);
    assert_eq!(machine.output(&apply, "all"), json!([[1], "[1]"]));
}
