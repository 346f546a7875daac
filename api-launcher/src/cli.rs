//! The subcommands. Options of one subcommand live beside the code that reads them.

#[cfg(feature = "kubernetes")]
mod kubernetes;

use std::any::TypeId;
use std::ffi::OsString;

use clap::{Parser, Subcommand};
use runtime::setting::parse_over_environment;

#[cfg(feature = "kubernetes")]
pub use self::kubernetes::KubernetesCommand;
use crate::run::args::RunArgs;
use crate::state_command::StateArgs;

/// Launches Terraform and OpenTofu runs, one step per executor process.
#[derive(Debug, Parser)]
#[command(name = "api-launcher", version, disable_help_subcommand = true)]
#[command(after_help = EXIT_CODES)]
pub struct Args {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Plan and apply a folder on this machine, or run one job document
    Run(Box<RunArgs>),
    /// Show, store or drop a state that a run could not store
    State(Box<StateArgs>),
    #[cfg(feature = "kubernetes")]
    #[command(flatten)]
    Kubernetes(KubernetesCommand),
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  \
        api-launcher completions bash > ~/.local/share/bash-completion/completions/api-launcher")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },
}

impl Command {
    /// Whether the command needs the platform's secret, if one is configured.
    pub(crate) const fn needs_secret(&self) -> bool {
        match self {
            #[cfg(feature = "kubernetes")]
            Self::Kubernetes(command) => command.needs_secret(),
            Self::Run(_) | Self::State(_) | Self::Completions { .. } => false,
        }
    }
}

const EXIT_CODES: &str = "\
Exit codes:
    0  done
    1  the tool or a script failed
    2  a defect of Mayfly
   64  the command line or the configuration cannot be used
   65  the job document or the folder cannot be used
   75  infrastructure failed before anything was changed: try again
   76  another executor holds the step
128+n  ended by signal n (130: Ctrl-C)";

/// Parses a command line, the program's name included, over the environment. Where the blank text of a variable can be no
/// value, as of a path, it counts as not set; of texts, their readers know better.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Args, clap::Error> {
    parse_over_environment(args, |argument| {
        argument.get_value_parser().type_id() != TypeId::of::<String>()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;
    use rstest::rstest;

    fn parse_words(line: &str) -> Result<Args, clap::Error> {
        parse(
            ["api-launcher"]
                .into_iter()
                .chain(line.split_whitespace())
                .map(OsString::from),
        )
    }

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[rstest]
    #[case("run a b")]
    #[case("run -f job.json dir")]
    #[case("run -f job.json --destroy")]
    #[case("run -f job.json --plan-only")]
    #[case("run -f job.json --refresh-only")]
    #[case("run -f job.json --auto-approve")]
    #[case("run -f job.json --root .")]
    #[case("run -f job.json --var-file a.tfvars")]
    #[case("run --plan-only --auto-approve")]
    #[case("run --destroy --refresh-only")]
    #[case("run --refresh-only --no-refresh")]
    #[case("run --var region")]
    #[case("run --var =x")]
    #[case("run --env =x")]
    #[case("run --tool pulumi")]
    #[case("run --output yaml")]
    #[case("render")]
    #[case("render -f a -o xml")]
    #[case("launch")]
    #[case("cancel 42 --grace soon")]
    #[case("logs")]
    #[case("launch-all")]
    #[case("pool token new")]
    #[case("pool token new --pool EU")]
    #[case("pool token list")]
    #[case("pool")]
    #[case("cache")]
    #[case("cache prune --unused-days soon")]
    #[case("state")]
    #[case("state store")]
    #[case("state store workspace")]
    #[case("state drop o/../w")]
    #[case("state drop o/w --force")]
    fn contradictions_are_refused(#[case] line: &str) {
        assert!(parse_words(line).is_err(), "{line}");
    }

    #[rstest]
    #[case("run")]
    #[case("run dir --destroy --auto-approve")]
    #[case("run -f - --var a=b --env HOME --env X=1=2 --tool tofu --tool-version ~>1.9")]
    #[case("run --var a= --output json --color never -v")]
    #[case("render -f - -o json --job-data-mode env")]
    #[case("render --file job.json")]
    #[case("completions zsh")]
    #[case("state list o/w --data-dir /tmp")]
    #[case("state store o/w --name errored-1-s --force")]
    #[case("launch -f job.json --follow --namespace runs")]
    #[case("list -n runs -o json --context prod")]
    #[case("logs 42/plan -f --raw")]
    #[case("explain job-42-plan --kubeconfig file")]
    #[case("cancel 42 --grace 2m")]
    #[case("check --namespace runs")]
    #[case("serve")]
    #[case("serve --target none --pools pools.yaml")]
    #[case("pool token new --pool eu --description Frankfurt")]
    #[case("serve --allow-unauthenticated --listen 127.0.0.1:0 --target process --concurrency 4")]
    fn sensible_lines_are_accepted(#[case] line: &str) {
        assert!(parse_words(line).is_ok(), "{line}");
    }

    #[rstest]
    #[case("serve", true)]
    #[case("check", true)]
    #[case("run", false)]
    #[case("list", false)]
    #[case("pool token new --pool eu", false)]
    fn only_some_commands_need_the_secret(#[case] line: &str, #[case] needs: bool) {
        let command = parse_words(line).unwrap().command;
        assert_eq!(command.needs_secret(), needs, "{line}");
    }

    #[test]
    fn secrets_are_not_offered_as_options() {
        let mut command = Args::command();
        command.build();
        let mut seen = 0;
        for program in command.get_subcommands() {
            let secrets = program
                .get_arguments()
                .filter(|argument| argument.is_hide_env_values_set());
            for argument in secrets {
                assert!(
                    argument.is_hide_set(),
                    "{argument} of {}",
                    program.get_name()
                );
                seen += 1;
            }
        }
        assert!(seen > 0, "no option holds a secret");
        let serve = command.find_subcommand_mut("serve").unwrap();
        let help = serve.render_long_help().to_string();
        for option in [
            "--internal-secret",
            "redis-password",
            "secret-key",
            "access-key",
        ] {
            assert!(!help.contains(option), "{option} in {help}");
        }
        for variable in ["InternalSecret", "TerrakubeRedisPassword"] {
            assert!(help.contains(variable), "{variable} in {help}");
        }
    }
}
