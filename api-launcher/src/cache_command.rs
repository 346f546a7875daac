//! `api-launcher cache`: the packages of providers, the tools and the modules that runs share. Lists, checks, removes and carries them.

mod carry;

use std::io::{self, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use carry::{Carried, How};
use clap::{Args, Subcommand, ValueHint};
use data_dir::DataDirArgs;
use executor::tool::{CachedTool, check_cached_tool};
use job_contract::{Exit, chain, env};
use provider_store::{Entry, Item, Package, ProviderStore};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::terminal::Terminal;
use crate::terminal::options::{COLOR_HELP, Format, When};
use crate::terminal::paint::Paint;
use crate::terminal::sink;
use crate::terminal::table::{Cell, Table};

/// The same as in executors.
const DEFAULT_MAX_BYTES: u64 = 16 * 1024 * 1024 * 1024;
/// The digits of a digest that a terminal shows.
const SHORT_DIGEST: usize = 12;
const DAY: u64 = 24 * 60 * 60;

/// Work with the packages of providers and the tools that runs share
#[derive(Args, Clone, Debug)]
pub struct CacheArgs {
    #[command(subcommand)]
    command: CacheCommand,
}

#[derive(Clone, Debug, Subcommand)]
enum CacheCommand {
    /// List packages, tools and modules, with their sizes and when they were used last
    List(StoreArgs),
    /// Check that each package is what its name says, and each tool what was downloaded; the exit code is 1 if one is not
    Verify {
        #[command(flatten)]
        store: StoreArgs,
        /// Remove those that are not
        #[arg(long)]
        remove: bool,
        /// OpenPGP public keys that may sign releases of tools, beside those of their publishers
        #[arg(long, value_name = "FILE", env = env::RELEASE_KEYS_FILE, value_hint = ValueHint::FilePath)]
        release_keys: Option<PathBuf>,
    },
    /// Remove the packages that were not used for the longest time
    #[command(
        after_help = "Example:\n  api-launcher cache prune --dir /var/lib/mayfly --unused-days 30"
    )]
    Prune {
        #[command(flatten)]
        store: StoreArgs,
        /// Remove some if all together are larger, until nine tenths are left
        #[arg(long, value_name = "BYTES", env = env::PROVIDER_CACHE_MAX_BYTES, default_value_t = DEFAULT_MAX_BYTES)]
        max_bytes: u64,
        /// Remove those that were not used for so many days
        #[arg(long, value_name = "DAYS")]
        unused_days: Option<u32>,
    },
    /// Copy packages into a folder that the tool accepts as a filesystem mirror; the exit code is 1 if one could not be copied
    #[command(
        after_help = "Example:\n  api-launcher cache export /media/usb/providers --lock-file .terraform.lock.hcl --platform linux_amd64"
    )]
    Export {
        #[command(flatten)]
        store: StoreArgs,
        /// Folder that gets the packages
        #[arg(value_hint = ValueHint::DirPath)]
        folder: PathBuf,
        /// Only those of this provider, as [HOST/]NAMESPACE/TYPE; may be repeated
        #[arg(long = "provider", value_name = "ADDRESS")]
        providers: Vec<String>,
        /// Only those of this platform, such as `linux_amd64`; may be repeated
        #[arg(long = "platform", value_name = "OS_ARCH")]
        platforms: Vec<String>,
        /// Only packages with a digest of this lock file, with lists of their digests. Without one, nothing tells whether they are genuine
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        lock_file: Option<PathBuf>,
    },
    /// Add the packages of a filesystem mirror; the exit code is 1 if one was refused
    #[command(
        after_help = "Example:\n  api-launcher cache import /media/usb/providers --dir /var/lib/mayfly --lock-file .terraform.lock.hcl"
    )]
    Import {
        #[command(flatten)]
        store: StoreArgs,
        /// Folder with HOST/NAMESPACE/TYPE/terraform-provider-TYPE_VERSION_OS_ARCH.zip
        #[arg(value_hint = ValueHint::DirPath)]
        folder: PathBuf,
        /// Only packages with a digest of this lock file. Without one, the lists of digests beside the packages count
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        lock_file: Option<PathBuf>,
    },
}

#[derive(Args, Clone, Debug)]
struct StoreArgs {
    /// Folder that runs share [default: the data directory]
    #[arg(long, value_name = "DIR", env = env::PROVIDER_CACHE_DIR, value_hint = ValueHint::DirPath)]
    dir: Option<PathBuf>,
    #[command(flatten)]
    data: DataDirArgs,
    /// A table for people, or JSON for programs
    #[arg(
        short = 'o',
        long = "output",
        value_enum,
        value_name = "FORMAT",
        default_value_t
    )]
    format: Format,
    /// When to use colours
    #[arg(long, value_enum, value_name = "WHEN", default_value_t, help = COLOR_HELP)]
    color: When,
}

impl CacheArgs {
    pub(crate) fn run(&self) -> Exit {
        let done = match &self.command {
            CacheCommand::List(store) => store.list(),
            CacheCommand::Verify {
                store,
                remove,
                release_keys,
            } => store.verify(*remove, release_keys.as_deref()),
            CacheCommand::Prune {
                store,
                max_bytes,
                unused_days,
            } => store.prune(*max_bytes, *unused_days),
            CacheCommand::Export {
                store,
                folder,
                providers,
                platforms,
                lock_file,
            } => store.export(folder, providers, platforms, lock_file.as_deref()),
            CacheCommand::Import {
                store,
                folder,
                lock_file,
            } => store.import(folder, lock_file.as_deref()),
        };
        done.unwrap_or_else(|failure| {
            // If that stream is gone, the exit code still tells.
            let _ = writeln!(io::stderr(), "error: {}", chain(&failure));
            if let Some(hint) = failure.hint {
                let _ = writeln!(io::stderr(), "hint: {hint}");
            }
            failure.exit
        })
    }
}

impl StoreArgs {
    fn open(&self) -> Result<ProviderStore, Failure> {
        let root = match &self.dir {
            Some(dir) => dir.clone(),
            None => self.data.locate()?.path().to_owned(),
        };
        Ok(ProviderStore::new(root))
    }

    fn list(&self) -> Result<Exit, Failure> {
        let store = self.open()?;
        let entries = store.list().map_err(|error| unusable(&store, error))?;
        let sizes = entries.iter().map(|entry| entry.size_bytes);
        let total = sizes.fold(0, u64::saturating_add);
        Ok(self.show(&store, &entries, &json!({"totalBytes": total}), ""))
    }

    fn verify(&self, remove: bool, release_keys: Option<&Path>) -> Result<Exit, Failure> {
        let store = self.open()?;
        let failed = |error| unusable(&store, error);
        let (mut altered, mut unknown, mut are_removed) = (Vec::new(), Vec::new(), remove);
        for entry in store.list().map_err(failed)? {
            let is_altered = match &entry.item {
                Item::Tool {
                    name,
                    version,
                    place,
                } => {
                    let cache = store.of_place(place);
                    let checked = check_cached_tool(&cache, name, version, release_keys);
                    let checked = checked.map_err(failed)?;
                    if let CachedTool::Unknown(why) = &checked {
                        // The table is only for what was altered.
                        let _ = writeln!(
                            io::stderr(),
                            "note: `{name}/{version}` is not checked: {why}"
                        );
                        unknown.push(json!({"tool": name, "version": version, "reason": why}));
                    }
                    checked == CachedTool::Altered
                }
                Item::Module { repository, commit } => {
                    let why = "git checks it at each use";
                    unknown.push(json!({"module": repository, "commit": commit, "reason": why}));
                    false
                }
                _ => !store
                    .verify(&entry, executor::h1_of_archive)
                    .unwrap_or(false),
            };
            if is_altered {
                are_removed &= remove && is_removed(&store, &entry);
                altered.push(entry);
            }
        }
        let (exit, note) = match (altered.is_empty(), remove, are_removed) {
            (true, ..) => (
                Exit::Done,
                "Each package is what its name says, and each tool that can be checked what was downloaded.",
            ),
            (false, true, true) => (Exit::StepFailed, "These were altered. They are removed."),
            (false, true, false) => (
                Exit::StepFailed,
                "These were altered. They are removed, except what a run uses now or what cannot be removed: repeat this later.",
            ),
            (false, false, _) => (
                Exit::StepFailed,
                "These were altered. No run uses such a package, but one may use such a program. `--remove` removes them.",
            ),
        };
        let more = json!({"removed": are_removed, "unchecked": unknown});
        let shown = self.show(&store, &altered, &more, note);
        Ok(if shown == Exit::Done { exit } else { shown })
    }

    fn prune(&self, max_bytes: u64, unused_days: Option<u32>) -> Result<Exit, Failure> {
        let store = self.open()?;
        let unused = unused_days.map(|days| Duration::from_secs(u64::from(days) * DAY));
        let pruned = store.prune(max_bytes, unused);
        let pruned = pruned.map_err(|error| unusable(&store, error))?;
        let note = format!(
            "Removed: {}. The rest has {}.",
            pruned.removed.len(),
            size(pruned.kept_bytes)
        );
        let more = json!({"keptBytes": pruned.kept_bytes});
        Ok(self.show(&store, &pruned.removed, &more, &note))
    }

    fn export(
        &self,
        folder: &Path,
        providers: &[String],
        platforms: &[String],
        lock_file: Option<&Path>,
    ) -> Result<Exit, Failure> {
        let store = self.open()?;
        let carried = carry::export(&store, folder, providers, platforms, lock_file)?;
        Ok(self.show_carried(&store, "Exported", &carried))
    }

    fn import(&self, folder: &Path, lock_file: Option<&Path>) -> Result<Exit, Failure> {
        let store = self.open()?;
        let carried = carry::import(&store, folder, lock_file)?;
        Ok(self.show_carried(&store, "Imported", &carried))
    }

    fn show_carried(&self, store: &ProviderStore, verb: &str, carried: &[Carried]) -> Exit {
        let done = carried.iter().filter(|one| one.result.is_ok()).count();
        let shown = if self.format == Format::Json {
            let packages: Vec<_> = carried.iter().map(Carried::document).collect();
            let answer = json!({"directory": store.root(), "packages": packages});
            sink::print(format!("{answer:#}\n").as_bytes())
        } else {
            for one in carried {
                let said = match &one.result {
                    Ok(How::Unverified) => {
                        format!(
                            "note: `{}` is there, but nothing said what it must be; `--lock-file` does",
                            one.file
                        )
                    }
                    Ok(_) => continue,
                    Err(why) => format!("error: `{}` is left out: {why}", one.file),
                };
                // The exit code tells too.
                let _ = writeln!(io::stderr(), "{said}");
            }
            sink::print(format!("{verb}: {done} of {} packages.\n", carried.len()).as_bytes())
        };
        match shown {
            Exit::Done if done < carried.len() => Exit::StepFailed,
            shown => shown,
        }
    }

    /// Shows packages as a table, with a note on standard error, or as one document with `more` in it.
    fn show(&self, store: &ProviderStore, entries: &[Entry], more: &Value, note: &str) -> Exit {
        if self.format == Format::Json {
            let packages: Vec<_> = entries.iter().map(document).collect();
            let mut answer = json!({"directory": store.root(), "packages": packages});
            if let (Some(answer), Some(more)) = (answer.as_object_mut(), more.as_object()) {
                answer.extend(more.clone());
            }
            return sink::print(format!("{answer:#}\n").as_bytes());
        }
        let is_empty_list = note.is_empty() && entries.is_empty();
        let empty = format!("No packages in `{}`.", store.root().display());
        let note = if is_empty_list { &empty } else { note };
        if !note.is_empty() {
            // Tables are for programs too, notes are not.
            let _ = writeln!(io::stderr(), "{note}");
        }
        if entries.is_empty() {
            return Exit::Done;
        }
        let mut table = Table::new(&[
            "NAME", "VERSION", "PLATFORM", "FORM", "SIZE", "USED", "SHA256",
        ]);
        for entry in entries {
            let named = Named::of(entry);
            let digits = if io::stdout().is_terminal() {
                SHORT_DIGEST.min(named.sha256.len())
            } else {
                named.sha256.len()
            };
            let sha256 = &named.sha256[..digits];
            table.row(vec![
                Cell::new(&named.name),
                Cell::new(named.version),
                Cell::new(named.platform),
                Cell::new(named.form),
                Cell::new(&size(entry.size_bytes)),
                Cell::new(&ago(entry.used)),
                Cell::new(sha256),
            ]);
        }
        let terminal = Terminal::detect(self.format, self.color);
        let text = table.render(Paint { on: terminal.color });
        sink::print(text.as_bytes())
    }
}

/// An entry as people see it. Tools and modules have neither platform nor digest.
struct Named<'e> {
    name: String,
    version: &'e str,
    platform: &'e str,
    form: &'static str,
    sha256: &'e str,
}

impl<'e> Named<'e> {
    fn of(entry: &'e Entry) -> Self {
        let of_package = |package: &'e Package, sha256, form| Self {
            name: package.address(),
            version: &package.version,
            platform: &package.platform,
            form,
            sha256,
        };
        match &entry.item {
            Item::Archive { package, sha256 } => of_package(package, sha256, "archive"),
            Item::Unpacked { package, sha256 } => of_package(package, sha256, "unpacked"),
            Item::Tool { name, version, .. } => Self {
                name: name.clone(),
                version: version.trim_start_matches('v'),
                platform: "",
                form: "tool",
                sha256: "",
            },
            Item::Module { repository, commit } => Self {
                name: repository.clone(),
                version: &commit[..SHORT_DIGEST],
                platform: "",
                form: "module",
                sha256: "",
            },
        }
    }
}

fn document(entry: &Entry) -> Value {
    let named = Named::of(entry);
    let mut document = json!({
        "form": named.form,
        "version": named.version,
        "sizeBytes": entry.size_bytes,
        "lastUsed": humantime::format_rfc3339_seconds(entry.used).to_string(),
    });
    if let Item::Module { commit, .. } = &entry.item {
        document["module"] = json!(named.name);
        document["version"] = json!(commit);
    } else if named.form == "tool" {
        document["tool"] = json!(named.name);
    } else {
        document["provider"] = json!(named.name);
        document["platform"] = json!(named.platform);
        document["sha256"] = json!(named.sha256);
    }
    document
}

/// One that cannot be removed does not keep the others from being checked.
fn is_removed(store: &ProviderStore, entry: &Entry) -> bool {
    store.remove(entry).unwrap_or_else(|error| {
        let Named { name, version, .. } = Named::of(entry);
        let _ = writeln!(
            io::stderr(),
            "error: `{name}` {version} is not removed: {error}"
        );
        false
    })
}

fn unusable(store: &ProviderStore, error: io::Error) -> Failure {
    let text = format!("could not use the packages in `{}`", store.root().display());
    Failure::new(Exit::Infrastructure, text).because(error)
}

fn size(bytes: u64) -> String {
    const MIB: u64 = 1024 * 1024;
    match bytes {
        0..MIB => format!("{} KiB", bytes.div_ceil(1024)),
        _ => format!("{} MiB", bytes / MIB),
    }
}

fn ago(time: SystemTime) -> String {
    let seconds = time.elapsed().unwrap_or_default().as_secs();
    match seconds {
        0..60 => "now".to_owned(),
        60..3600 => format!("{} min ago", seconds / 60),
        3600..DAY => format!("{} h ago", seconds / 3600),
        _ => format!("{} d ago", seconds / DAY),
    }
}
