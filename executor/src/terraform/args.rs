//! Command lines of the tool, built from data (contract 4.5). They never contain values of variables.

use std::ffi::OsString;
use std::path::Path;

use job_contract::Tool;
use job_contract::keys::PLAN_FILE;
use semver::Version;

/// The options of one plan, apply or destroy.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The resolved version of the tool, not the requested range (W-35).
    pub version: &'a Version,
    /// `false` adds `-refresh=false`.
    pub refresh: bool,
    /// `true` adds `-refresh-only`.
    pub refresh_only: bool,
    pub variables: VariableFiles<'a>,
}

/// The definitions files of input variables.
#[derive(Clone, Copy, Debug, Default)]
pub struct VariableFiles<'a> {
    pub file: Option<&'a Path>,
    /// Whether the tool's input defines ephemeral variables.
    pub ephemeral: bool,
}

/// The tool's input, as a file. It is in memory, and another process cannot read it by a name.
const INPUT: &str = "/dev/stdin";

/// What a plan writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanOutput {
    /// Events in JSON, if the tool can write them.
    Events,
    /// The tool's own rendering of the plan.
    Text { color: bool },
}

/// Whether operations of this version write JSON.
pub fn speaks_json(version: &Version) -> bool {
    *version > Version::new(0, 15, 2)
}

/// Whether `init` evaluates variables. OpenTofu does from 1.8 on, in module sources and backends.
pub fn init_reads_variables(tool: Tool, version: &Version) -> bool {
    tool == Tool::OpenTofu && *version >= Version::new(1, 8, 0)
}

/// `init`.
pub fn init(
    tool: Tool,
    version: &Version,
    color: bool,
    variables: VariableFiles<'_>,
) -> Vec<OsString> {
    let mut args = command("init");
    args.extend(no_color(color));
    args.push("-input=false".into());
    if init_reads_variables(tool, version) {
        args.extend(variables.args());
    }
    args
}

/// `plan`, or `plan -destroy`.
pub fn plan(options: Options<'_>, destroy: bool, output: PlanOutput) -> Vec<OsString> {
    let mut args = command("plan");
    args.extend(no_color(output == PlanOutput::Text { color: true }));
    if output == PlanOutput::Events && speaks_json(options.version) {
        args.push("-json".into());
    }
    if !options.refresh {
        args.push("-refresh=false".into());
    }
    if options.refresh_only {
        args.push("-refresh-only".into());
    }
    args.extend(options.variables.args());
    args.push(format!("-out={PLAN_FILE}").into());
    args.push("-input=false".into());
    if destroy {
        args.push("-destroy".into());
    }
    args.push("-detailed-exitcode".into());
    args
}

/// `apply` of a stored plan. The plan has all variables except the ephemeral ones. The tool refuses others.
pub fn apply_plan(version: &Version, ephemeral: bool) -> Vec<OsString> {
    let mut args = command("apply");
    args.push("-no-color".into());
    if speaks_json(version) {
        args.push("-json".into());
    }
    let variables = VariableFiles {
        file: None,
        ephemeral,
    };
    args.extend(variables.args());
    args.extend([
        "-auto-approve".into(),
        "-input=false".into(),
        PLAN_FILE.into(),
    ]);
    args
}

/// `apply` without a plan, for templates that have no plan step. It prints plain text: without a reviewed plan, there
/// are no entries that structured output could update. So the tool's own rendering is the only one.
pub fn apply_direct(options: Options<'_>, color: bool) -> Vec<OsString> {
    let mut args = command("apply");
    args.extend(no_color(color));
    if !options.refresh {
        args.push("-refresh=false".into());
    }
    if options.refresh_only {
        args.push("-refresh-only".into());
    }
    args.extend(options.variables.args());
    args.extend(["-auto-approve".into(), "-input=false".into()]);
    args
}

/// `destroy`.
pub fn destroy(options: Options<'_>) -> Vec<OsString> {
    let mut args = command("destroy");
    args.push("-no-color".into());
    if speaks_json(options.version) {
        args.push("-json".into());
    }
    // Before 0.15, `-force` was the only spelling.
    let approve = if *options.version < Version::new(0, 15, 0) {
        "-force"
    } else {
        "-auto-approve"
    };
    args.push(approve.into());
    if !options.refresh {
        args.push("-refresh=false".into());
    }
    args.extend(options.variables.args());
    args.push("-input=false".into());
    args
}

/// `show` of the plan for people.
pub fn show_plan(color: bool) -> Vec<OsString> {
    let mut args = command("show");
    args.extend(no_color(color));
    args.push(PLAN_FILE.into());
    args
}

/// A command line whose words are all known.
pub fn words<const N: usize>(words: [&str; N]) -> Vec<OsString> {
    words.map(OsString::from).into()
}

fn command(name: &str) -> Vec<OsString> {
    vec![name.into()]
}

fn no_color(color: bool) -> Option<OsString> {
    (!color).then(|| "-no-color".into())
}

impl VariableFiles<'_> {
    fn args(self) -> impl Iterator<Item = OsString> {
        let input = self.ephemeral.then(|| Path::new(INPUT));
        self.file.into_iter().chain(input).map(|path| {
            let mut arg = OsString::from("-var-file=");
            arg.push(path);
            arg
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(args: Vec<OsString>) -> String {
        args.into_iter()
            .map(|arg| arg.into_string().unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    }

    static NEW: Version = Version::new(1, 9, 8);
    static JSON_LIMIT: Version = Version::new(0, 15, 2);
    static OLD: Version = Version::new(0, 14, 11);

    fn options(version: &Version) -> Options<'_> {
        Options {
            version,
            refresh: true,
            refresh_only: false,
            variables: VariableFiles::default(),
        }
    }

    fn file(path: &str) -> VariableFiles<'_> {
        VariableFiles {
            file: Some(Path::new(path)),
            ephemeral: false,
        }
    }

    #[test]
    fn plan_arguments() {
        assert_eq!(
            text(plan(options(&NEW), false, PlanOutput::Events)),
            "plan -no-color -json -out=terraformLibrary.tfPlan -input=false -detailed-exitcode"
        );
        let given = Options {
            refresh: false,
            refresh_only: true,
            variables: file("/p/v.tfvars"),
            ..options(&NEW)
        };
        assert_eq!(
            text(plan(given, true, PlanOutput::Events)),
            "plan -no-color -json -refresh=false -refresh-only -var-file=/p/v.tfvars \
             -out=terraformLibrary.tfPlan -input=false -destroy -detailed-exitcode"
        );
        assert_eq!(
            text(plan(options(&JSON_LIMIT), false, PlanOutput::Events)),
            "plan -no-color -out=terraformLibrary.tfPlan -input=false -detailed-exitcode"
        );
        let for_people = |color| text(plan(options(&NEW), false, PlanOutput::Text { color }));
        assert_eq!(
            for_people(true),
            "plan -out=terraformLibrary.tfPlan -input=false -detailed-exitcode"
        );
        assert_eq!(
            for_people(false),
            "plan -no-color -out=terraformLibrary.tfPlan -input=false -detailed-exitcode"
        );
    }

    #[test]
    fn apply_and_destroy_arguments() {
        assert_eq!(
            text(apply_plan(&NEW, false)),
            "apply -no-color -json -auto-approve -input=false terraformLibrary.tfPlan"
        );
        let given = Options {
            variables: file("/v"),
            ..options(&NEW)
        };
        assert_eq!(
            text(apply_direct(given, true)),
            "apply -var-file=/v -auto-approve -input=false"
        );
        assert_eq!(
            text(apply_direct(given, false)),
            "apply -no-color -var-file=/v -auto-approve -input=false"
        );
        assert_eq!(
            text(destroy(given)),
            "destroy -no-color -json -auto-approve -var-file=/v -input=false"
        );
        assert_eq!(
            text(destroy(options(&OLD))),
            "destroy -no-color -force -input=false"
        );
    }

    /// An apply of a plan gets those alone.
    #[test]
    fn ephemeral_variables_come_by_the_input() {
        let variables = VariableFiles {
            ephemeral: true,
            ..file("/v")
        };
        let given = Options {
            variables,
            ..options(&NEW)
        };
        let both = " -var-file=/v -var-file=/dev/stdin ";
        for args in [
            plan(given, false, PlanOutput::Events),
            apply_direct(given, true),
            destroy(given),
        ] {
            let args = text(args);
            assert!(args.contains(both), "{args}");
        }
        assert_eq!(
            text(init(Tool::OpenTofu, &NEW, true, variables)),
            "init -input=false -var-file=/v -var-file=/dev/stdin"
        );
        assert_eq!(
            text(apply_plan(&NEW, true)),
            "apply -no-color -json -var-file=/dev/stdin -auto-approve -input=false \
             terraformLibrary.tfPlan"
        );
    }

    #[test]
    fn init_and_show_arguments() {
        let file = file("/v");
        assert_eq!(
            text(init(Tool::Terraform, &NEW, true, file)),
            "init -input=false"
        );
        assert_eq!(
            text(init(Tool::OpenTofu, &NEW, false, file)),
            "init -no-color -input=false -var-file=/v"
        );
        assert_eq!(
            text(init(Tool::OpenTofu, &Version::new(1, 7, 0), true, file)),
            "init -input=false"
        );
        assert_eq!(text(show_plan(true)), "show terraformLibrary.tfPlan");
    }
}
