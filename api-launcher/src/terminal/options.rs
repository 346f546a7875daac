//! The options that every command with output has.

use clap::ValueEnum;

pub(crate) const COLOR_HELP: &str =
    "When to use colours; NO_COLOR, CLICOLOR and CLICOLOR_FORCE are honoured";

/// For people or for programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    #[default]
    Text,
    Json,
}

/// When to use colours.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum When {
    #[default]
    Auto,
    Always,
    Never,
}
