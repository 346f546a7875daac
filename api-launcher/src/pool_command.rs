//! `api-launcher pool`: `token new` makes a token of an agent or an operator, and its line for the file of the pools.

use std::io::{self, Write as _};
use std::time::SystemTime;

use clap::{Args, Subcommand, ValueHint};
use job_contract::{Exit, env};
use pool_protocol::id::PoolName;
use pool_protocol::token::{OperatorToken, PoolToken};

use serde_json::json;
use url::Url;

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

    /// Print the values of the chart for an agent with the token, instead of the token alone
    #[arg(long, requires = "service_url", conflicts_with = "operator")]
    values: bool,

    /// Address of the hub, for the values
    #[arg(long, value_name = "URL", value_hint = ValueHint::Url)]
    service_url: Option<Url>,

    /// Address of the platform as users know it, for the values
    #[arg(long, value_name = "URL", env = env::PUBLIC_API_URL, value_hint = ValueHint::Url)]
    public_api_url: Option<Url>,
}

const NOTES: &str = "\
The token is shown once and kept nowhere: the file of the pools has its SHA-256 alone.

Example:
  api-launcher pool token new --pool eu --description Frankfurt > token

An agent in a cluster, with nothing else to write:
  api-launcher pool token new --pool eu --values --service-url https://hub.example.com \\
    --public-api-url https://terrakube.example.com > values.yaml
  helm install agent helm/mayfly --namespace runs --create-namespace -f values.yaml";

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
        match &self.service_url {
            Some(hub) if self.values => sink::print(self.values_of(hub, &token).as_bytes()),
            _ => sink::print(format!("{token}\n").as_bytes()),
        }
    }

    /// The values of the chart for an agent with this token, as YAML.
    fn values_of(&self, hub: &Url, token: &str) -> String {
        let pool = self.pool.as_ref().map_or("", PoolName::as_str);
        let secret = format!("mayfly-pool-{pool}");
        let mut values = json!({
            "launcher": {"enabled": false},
            "agent": {"enabled": true, "serviceUrl": plain(hub), "token": {"existingSecret": secret}},
            "extraObjects": [{
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": secret},
                "stringData": {"token": token},
            }],
        });
        if let Some(platform) = &self.public_api_url {
            values["platform"] = json!({"publicApiUrl": plain(platform)});
        }
        serde_saphyr::to_string(&values).expect("a document without numbers is one of YAML")
    }
}

/// An address as people write it.
fn plain(url: &Url) -> &str {
    url.as_str().trim_end_matches('/')
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::Value;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: NewArgs,
    }

    #[test]
    fn the_values_are_those_of_an_agent_with_the_token() {
        let args = [
            "new",
            "--pool",
            "eu",
            "--values",
            "--service-url",
            "https://hub.example.test",
        ];
        let args = Program::parse_from(args).args;
        let hub = args.service_url.clone().unwrap();
        let values: Value = serde_saphyr::from_str(&args.values_of(&hub, "mfp_eu_x")).unwrap();
        let secret = &values["extraObjects"][0];
        assert_eq!(
            values["agent"]["token"]["existingSecret"],
            secret["metadata"]["name"]
        );
        assert_eq!(secret["stringData"]["token"], "mfp_eu_x");
        assert_eq!(values["agent"]["serviceUrl"], "https://hub.example.test");
        let without = ["new", "--pool", "eu", "--values"];
        assert!(Program::try_parse_from(without).is_err());
    }
}
