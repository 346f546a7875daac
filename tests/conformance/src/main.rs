//! `conformance`: journeys of jobs through a live Terrakube, by its public API alone, whichever executor it uses. Makes
//! what they need, checks what they leave, and removes it, also after a failure or a signal.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for a terminal"
)]

mod api;
mod report;
mod scenarios;
mod stage;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use std::{env, fs};

use anyhow::{Context as _, Result, bail};
use clap::{Parser, ValueEnum};
use reqwest::Url;
use tokio::signal::unix::{SignalKind, signal};

use api::Api;
use report::Record;
use scenarios::Scenario;
use stage::Stage;

const TOKEN: &str = "TERRAKUBE_TOKEN";

/// Runs jobs on a live Terrakube, checks what becomes of them, and removes them.
///
/// Without `--source` it makes an organization of its own, for which the token needs an administrator's rights, and uploads a
/// module as the tool's own command line would.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask conformance", bin_name = "cargo xtask conformance")]
struct Args {
    /// Address of Terrakube's API, such as `https://terrakube-api.example.com`
    #[arg(long, value_name = "URL", value_parser = http_url)]
    api: String,
    /// File with a personal or team token; without it, the variable `TERRAKUBE_TOKEN` holds the token
    #[arg(long, value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// Use this organization instead of making one
    #[arg(long, value_name = "NAME", requires = "source")]
    organization: Option<String>,
    /// Team that may use the organization that is made [default: the token's first]
    #[arg(long, conflicts_with = "organization")]
    team: Option<String>,
    /// Environment variable of every job in the organization that is made, such as
    /// `TERRAKUBE_DEFAULT_EXECUTOR=http://mayfly:8090`
    #[arg(long, value_name = "NAME=VALUE", value_parser = pair, conflicts_with = "organization")]
    global: Vec<(String, String)>,
    /// Git repository with the module, which the installation can clone: a copy of this one
    #[arg(long, value_name = "URL")]
    source: Option<String>,
    /// Branch of that repository
    #[arg(long, default_value = "main")]
    branch: String,
    /// Folder of the module in that repository
    #[arg(long, default_value = "/tests/conformance/module")]
    folder: String,
    /// Version of the tool
    #[arg(long, value_name = "VERSION", default_value = "1.11.4")]
    tool_version: String,
    /// Use OpenTofu instead of Terraform
    #[arg(long)]
    tofu: bool,
    /// Longest wait for a step of a scenario
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    timeout: u64,
    /// Only these scenarios
    #[arg(long, value_enum, value_name = "SCENARIO")]
    only: Vec<Scenario>,
    /// How to print what was found
    #[arg(long, value_enum, default_value = "text")]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    Text,
    Json,
}

impl Args {
    fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    fn token(&self) -> Result<String> {
        let token = match &self.token_file {
            Some(file) => fs::read_to_string(file)
                .with_context(|| format!("--token-file {}", file.display()))?,
            None => env::var(TOKEN)
                .ok()
                .with_context(|| format!("no token: give --token-file, or set {TOKEN}"))?,
        };
        let token = token.trim();
        if token.is_empty() {
            bail!("the token is empty");
        }
        Ok(token.to_owned())
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("not NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Accepts the text of an `http` or `https` URL with a host, without query and fragment, to which paths can be added.
fn http_url(text: &str) -> Result<String, String> {
    let example = "give an address such as `https://terrakube-api.example.com`";
    let url = Url::parse(text).map_err(|error| format!("no URL ({error}): {example}"))?;
    if !["http", "https"].contains(&url.scheme()) {
        let scheme = url.scheme();
        return Err(format!(
            "the scheme is `{scheme}`, not `http` or `https`: {example}"
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(format!("a query or fragment is not allowed: {example}"));
    }
    Ok(text.to_owned())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    match conform(&args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Whether everything holds.
async fn conform(args: &Args) -> Result<bool> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let token = args.token()?;
    let api = Api::new(&args.api, &token)?;
    let id = uuid::Uuid::new_v4().simple().to_string();
    let name = format!("conformance-{}", &id[..8]);
    let mut records = Vec::new();
    let mut trouble = Vec::new();

    let outcome = tokio::select! {
        outcome = travel(args, &api, &name, &token, &mut records) => outcome,
        () = told_to_end() => Err(anyhow::anyhow!("interrupted")),
    };
    if let Err(error) = outcome {
        trouble.push(format!("{error:#}"));
    }
    let cleared = tokio::select! {
        cleared = stage::clear(&api, args, &name) => cleared,
        () = told_to_end() => Err(anyhow::anyhow!("interrupted while removing what `{name}` has made")),
    };
    if let Err(error) = cleared {
        trouble.push(format!("{error:#}"));
    }
    trouble.dedup();
    let passed = trouble.is_empty() && records.iter().all(Record::passed);
    match args.output {
        Output::Json => println!("{:#}", report::as_json(&records, &trouble)),
        Output::Text => println!("\n{}", report::summary(&records)),
    }
    for line in &trouble {
        eprintln!("error: {line}");
    }
    Ok(passed)
}

async fn travel(
    args: &Args,
    api: &Api,
    name: &str,
    token: &str,
    records: &mut Vec<Record>,
) -> Result<()> {
    let stage = Stage::set(api, args, name, token).await?;
    let chosen = Scenario::value_variants().iter();
    for scenario in chosen.filter(|scenario| args.only.is_empty() || args.only.contains(scenario)) {
        let mut record = Record::new(&scenario.name(), args.output);
        let outcome = scenario.run(&stage, &mut record).await;
        record.end(outcome);
        records.push(record);
    }
    Ok(())
}

async fn told_to_end() {
    let (Ok(mut interrupt), Ok(mut terminate)) = (
        signal(SignalKind::interrupt()),
        signal(SignalKind::terminate()),
    ) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = interrupt.recv() => (),
        _ = terminate.recv() => (),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    fn parse(options: &[&str]) -> Result<Args, clap::Error> {
        let start = ["conformance", "--api", "http://localhost"];
        Args::try_parse_from(start.iter().chain(options))
    }

    #[test]
    fn the_command_line_is_sound() {
        Args::command().debug_assert();
    }

    #[test]
    fn an_existing_organization_needs_a_repository_and_gets_no_rights() {
        assert!(parse(&["--organization", "acme"]).is_err());
        let both = [
            "--organization",
            "acme",
            "--source",
            "https://git.example/m.git",
        ];
        assert!(parse(&both).is_ok());
        for extra in [["--team", "devs"], ["--global", "A=b"]] {
            assert!(
                parse(&[&both[..], &extra[..]].concat()).is_err(),
                "{extra:?}"
            );
        }
    }

    #[test]
    fn scenarios_and_variables_are_read() {
        let args = parse(&["--only", "plan", "--only", "large", "--global", "A=b=c"]).unwrap();
        assert_eq!(args.only, [Scenario::Plan, Scenario::Large]);
        assert_eq!(args.global, [("A".to_owned(), "b=c".to_owned())]);
        assert!(parse(&["--only", "nothing"]).is_err());
        assert!(parse(&["--global", "A"]).is_err());
    }

    #[test]
    fn an_address_that_is_no_http_url_is_refused_with_an_example() {
        for (address, cause) in [
            ("foo", "relative URL without a base"),
            ("ftp://x", "the scheme is `ftp`"),
            ("localhost:8080", "the scheme is `localhost`"),
            ("http://", "empty host"),
            ("https://t.example/?page=1", "a query or fragment"),
        ] {
            let error = Args::try_parse_from(["conformance", "--api", address]).unwrap_err();
            let text = error.to_string();
            assert!(text.contains("--api <URL>"), "{text}");
            assert!(text.contains(cause), "{text}");
            assert!(
                text.contains("`https://terrakube-api.example.com`"),
                "{text}"
            );
        }
        for address in ["http://localhost:8080", "https://t.example/api/"] {
            let args = Args::try_parse_from(["conformance", "--api", address]).unwrap();
            assert_eq!(args.api, address);
        }
    }

    #[test]
    fn the_token_comes_from_a_file_and_never_from_the_command_line() {
        assert!(parse(&["--token", "x"]).is_err());
        let file = format!("{}/Cargo.toml", env!("CARGO_MANIFEST_DIR"));
        let token = parse(&["--token-file", &file]).unwrap().token().unwrap();
        assert!(token.starts_with("[package]") && !token.ends_with('\n'));
        let error = parse(&["--token-file", "/nonexistent"])
            .unwrap()
            .token()
            .unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent"));
    }
}
