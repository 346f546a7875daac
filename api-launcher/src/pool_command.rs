//! `api-launcher pool`: `token new` makes a token of an agent or an operator, and its line for the file of the pools.

use std::io::{self, Write as _};
use std::time::SystemTime;

use clap::{Args, Subcommand};
use job_contract::Exit;
use pool_protocol::id::PoolName;
use pool_protocol::token::{OperatorToken, PoolToken};

use crate::terminal::sink;

/// Work with pools
#[derive(Args, Clone, Debug)]
pub struct PoolArgs {
    #[command(subcommand)]
    command: PoolCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum PoolCommand {
    /// Tokens of agents
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
}

#[derive(Clone, Debug, Subcommand)]
enum TokenCommand {
    /// Make a token: standard output gets the token, standard error the line for the file of the pools
    #[command(after_help = NOTES)]
    New(NewArgs),
}

#[derive(Args, Clone, Debug)]
struct NewArgs {
    /// Name of the pool
    #[arg(
        long,
        value_name = "NAME",
        required_unless_present = "operator",
        conflicts_with = "operator"
    )]
    pool: Option<PoolName>,

    /// Make a token that sees all pools on the status page, and takes no runs
    #[arg(long)]
    operator: bool,

    /// Whose token it is, for people
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
}

const NOTES: &str = "\
The token is shown once and kept nowhere: the file of the pools has its SHA-256 alone.

Example:
  api-launcher pool token new --pool eu --description Frankfurt > token";

impl PoolArgs {
    pub(crate) fn run(&self) -> Exit {
        match &self.command {
            PoolCommand::Token {
                command: TokenCommand::New(args),
            } => args.run(),
        }
    }
}

impl NewArgs {
    fn run(&self) -> Exit {
        let (place, token, digest) = if let Some(pool) = &self.pool {
            let token = PoolToken::new(pool.clone());
            let place = format!("pools.{pool}.tokens");
            (place, token.reveal().to_owned(), token.digest())
        } else {
            let token = OperatorToken::random();
            let place = "operators.tokens".to_owned();
            (place, token.reveal().to_owned(), token.digest())
        };
        let text = hub::token_line(&digest, self.description.as_deref(), SystemTime::now());
        // The line is written first. A token without its line is useless, and the token may be lost if its reader has
        // ended.
        let written = writeln!(
            io::stderr(),
            "Add this line to `{place}` in the file of the pools:\n      {text}"
        );
        if written.is_err() {
            return Exit::Infrastructure;
        }
        sink::print(format!("{token}\n").as_bytes())
    }
}
