//! Checks and installs the programs that the tests use. Cargo builds everything else that the default suite needs.

pub(crate) mod kubernetes;
pub(crate) mod opentofu;
pub(crate) mod operator;
mod program;
mod servers;
pub(crate) mod unittest;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::thread;

use anyhow::{Result, bail};

use crate::terminal::{PAUSES, run_stage, say, with_retries};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only list what is missing; install nothing
    #[arg(long)]
    check: bool,
    /// Only install the Debian packages
    #[arg(long, conflicts_with = "check")]
    packages: bool,
    /// Only provide what stages of `cargo xtask ci` use beside packages and what all tests use: programs of Kubernetes, checkers,
    /// the base of images
    #[arg(long, conflicts_with_all = ["check", "packages"])]
    stages: bool,
}

/// The purpose of a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Unit tests and journeys.
    Tests,
    /// The engine of the fuzz targets.
    Fuzz,
    /// The journeys of pools, which need a browser.
    Pools,
    /// The chart's tests.
    Chart,
    /// Building and starting images.
    Images,
    /// A node with a real kubelet, beside what tests need.
    Node,
    /// The check of dependencies.
    Lint,
}

impl Purpose {
    const ALL: [Self; 7] = [
        Self::Tests,
        Self::Fuzz,
        Self::Pools,
        Self::Chart,
        Self::Images,
        Self::Node,
        Self::Lint,
    ];
}

/// One program and its purpose.
struct Need {
    program: &'static str,
    purpose: Purpose,
    /// Debian packages with the program; empty if there is none.
    packages: &'static [&'static str],
    /// How to get the program without a Debian package.
    elsewhere: &'static str,
    present: fn() -> bool,
}

const NEEDS: &[Need] = &[
    Need {
        program: "git",
        purpose: Purpose::Tests,
        packages: &["git"],
        elsewhere: "your package manager",
        present: || works("git", &["--version"]),
    },
    Need {
        program: "git http-backend",
        purpose: Purpose::Tests,
        packages: &["git"],
        elsewhere: "part of a full git installation",
        present: git_serves_http,
    },
    Need {
        program: "bash",
        purpose: Purpose::Tests,
        packages: &["bash"],
        elsewhere: "your package manager",
        present: || works("bash", &["--version"]),
    },
    Need {
        // Builds the engine of the fuzz targets.
        program: "c++",
        purpose: Purpose::Fuzz,
        packages: &["g++"],
        elsewhere: "your package manager (g++ or clang)",
        present: || works("c++", &["--version"]),
    },
    Need {
        program: "ssh",
        purpose: Purpose::Tests,
        packages: &["openssh-client"],
        elsewhere: "your package manager (OpenSSH)",
        present: || works("ssh", &["-V"]),
    },
    Need {
        program: "sshd",
        purpose: Purpose::Tests,
        packages: &["openssh-server"],
        elsewhere: "your package manager (OpenSSH)",
        present: || is_installed("sshd"),
    },
    Need {
        // A network volume that can be paused.
        program: "sshfs",
        purpose: Purpose::Tests,
        packages: &["sshfs"],
        elsewhere: "your package manager (sshfs 3.7 or newer, with fusermount3)",
        present: || is_installed("sshfs"),
    },
    Need {
        program: "redis-server",
        purpose: Purpose::Tests,
        packages: &["redis-server"],
        elsewhere: "your package manager, or redis.io (5 or newer, with TLS)",
        present: || works("redis-server", &["--version"]),
    },
    Need {
        program: "redis-sentinel",
        purpose: Purpose::Tests,
        packages: &["redis-sentinel"],
        elsewhere: "part of a full Redis installation",
        present: || works("redis-sentinel", &["--version"]),
    },
    Need {
        // Tests start servers of their own. The one that Debian sets up is not used.
        program: "postgres",
        purpose: Purpose::Tests,
        packages: &["postgresql"],
        elsewhere: "your package manager, or postgresql.org (14 or newer)",
        present: || is_installed("postgres") || postgres_of_debian(),
    },
    Need {
        // Shows the status page of a hub.
        program: "chromium",
        purpose: Purpose::Pools,
        packages: &["chromium"],
        elsewhere: "your package manager, or chromium.org",
        present: || is_installed("chromium"),
    },
    Need {
        program: "setpriv",
        purpose: Purpose::Tests,
        packages: &["util-linux"],
        elsewhere: "your package manager (util-linux)",
        present: || is_installed("setpriv"),
    },
    Need {
        // Proves that GROOVY scripts reach an external runtime. Debian's wrapper looks for the default JRE.
        program: "groovy",
        purpose: Purpose::Tests,
        packages: &["groovy", "default-jre-headless"],
        elsewhere: "your package manager, or groovy-lang.org",
        present: || works("groovy", &["--version"]),
    },
    Need {
        // Runs an S3 service, and installs a Google Cloud Storage service, Helm and a scanner of manifests.
        program: "python3 with venv",
        purpose: Purpose::Tests,
        packages: &["python3", "python3-venv"],
        elsewhere: "your package manager",
        present: || works("python3", &["-c", "import ensurepip, venv"]),
    },
    Need {
        // Runs Azure's emulator.
        program: "node",
        purpose: Purpose::Tests,
        packages: &["nodejs"],
        elsewhere: "your package manager, or nodejs.org",
        present: || works("node", &["--version"]),
    },
    Need {
        program: "npm",
        purpose: Purpose::Tests,
        packages: &["npm"],
        elsewhere: "your package manager, or nodejs.org",
        present: || works("npm", &["--version"]),
    },
    Need {
        // Builds images without a daemon. The tests build and start both.
        program: "buildah",
        purpose: Purpose::Images,
        packages: &["buildah"],
        elsewhere: "your package manager (1.28 or newer)",
        present: || works("buildah", &["--version"]),
    },
    Need {
        // Starts images as a node would.
        program: "runc",
        purpose: Purpose::Images,
        packages: &["runc"],
        elsewhere: "your package manager",
        present: || works("runc", &["--version"]),
    },
    Need {
        // Imports images as the documentation says.
        program: "containerd",
        purpose: Purpose::Images,
        packages: &["containerd"],
        elsewhere: "your package manager",
        present: || works("containerd", &["--version"]),
    },
    Need {
        // Creates a base image of Debian packages.
        program: "mmdebstrap",
        purpose: Purpose::Images,
        packages: &["mmdebstrap"],
        elsewhere: "your package manager",
        present: || works("mmdebstrap", &["--version"]),
    },
    Need {
        program: "dpkg-scanpackages",
        purpose: Purpose::Images,
        packages: &["dpkg-dev"],
        elsewhere: "your package manager (dpkg)",
        present: || works("dpkg-scanpackages", &["--version"]),
    },
    Need {
        // Gives pods their network.
        program: "CNI plugins",
        purpose: Purpose::Node,
        packages: &["containernetworking-plugins"],
        elsewhere: "your package manager, into /usr/lib/cni",
        present: || Path::new("/usr/lib/cni/bridge").exists(),
    },
    Need {
        // Closes networks of agents, and routes requests to Services to their pods.
        program: "iptables",
        purpose: Purpose::Tests,
        packages: &["iptables"],
        elsewhere: "your package manager",
        present: || is_installed("iptables"),
    },
    Need {
        program: "ip",
        purpose: Purpose::Tests,
        packages: &["iproute2"],
        elsewhere: "your package manager (iproute2)",
        present: || is_installed("ip"),
    },
    Need {
        // Resolves the names of Services for pods.
        program: "dnsmasq",
        purpose: Purpose::Node,
        packages: &["dnsmasq-base"],
        elsewhere: "your package manager",
        present: || is_installed("dnsmasq"),
    },
    Need {
        program: "unshare",
        purpose: Purpose::Tests,
        packages: &["util-linux"],
        elsewhere: "your package manager (util-linux)",
        present: || is_installed("unshare"),
    },
    Need {
        program: "terraform",
        purpose: Purpose::Tests,
        packages: &[],
        elsewhere: "put a terraform 1.x binary on PATH (developer.hashicorp.com/terraform/install)",
        present: || works("terraform", &["version"]),
    },
];

pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    if args.check {
        refuse_missing(&missing(&Purpose::ALL))?;
        if !servers::are_installed() {
            bail!(
                "object stores or chart tools that the tests need are missing: run `cargo xtask setup`"
            );
        }
    } else if args.packages {
        ensure_packages(&Purpose::ALL)?;
        say("setup: all Debian packages that the tests need are installed");
        return Ok(ExitCode::SUCCESS);
    } else if args.stages {
        provide_for_stages()?;
        say("setup: what the stages need is installed or in the cache");
        return Ok(ExitCode::SUCCESS);
    } else {
        ensure(&Purpose::ALL)?;
    }
    say("setup: all programs that the tests need are installed");
    Ok(ExitCode::SUCCESS)
}

/// Installs missing programs if possible. The error lists the programs that are still missing.
pub(crate) fn ensure(purposes: &[Purpose]) -> Result<()> {
    ensure_packages(purposes)?;
    servers::install(purposes)
}

/// The programs that only stages use, and that are no packages. Kubernetes may have to be built, so the others do not wait for it.
fn provide_for_stages() -> Result<()> {
    thread::scope(|scope| {
        let kubernetes = scope.spawn(kubernetes::ensure);
        let others = servers::install(&[Purpose::Chart, Purpose::Lint, Purpose::Images]);
        let kubernetes = kubernetes.join();
        others.and(kubernetes.unwrap_or_else(|_| bail!("a thread panicked")))
    })
}

fn ensure_packages(purposes: &[Purpose]) -> Result<()> {
    let absent = missing(purposes);
    let packages = packages_for(&absent);
    if !packages.is_empty() && nix::unistd::geteuid().is_root() && is_installed("apt-get") {
        install(&packages)?;
        refuse_missing(&missing(purposes))
    } else {
        refuse_missing(&absent)
    }
}

/// cargo-deny: that of `PATH`, or else the installed one.
pub(crate) fn cargo_deny() -> Result<PathBuf> {
    servers::install(&[Purpose::Lint])?;
    servers::cargo_deny()
}

/// Creates the base image if it does not exist.
pub(crate) fn ensure_base() -> Result<()> {
    servers::install_base()
}

fn missing(purposes: &[Purpose]) -> Vec<&'static Need> {
    let wanted = NEEDS.iter().filter(|need| purposes.contains(&need.purpose));
    wanted.filter(|need| !(need.present)()).collect()
}

fn packages_for(needs: &[&Need]) -> Vec<&'static str> {
    let mut packages: Vec<_> = needs
        .iter()
        .flat_map(|need| need.packages)
        .copied()
        .collect();
    packages.sort_unstable();
    packages.dedup();
    packages
}

fn refuse_missing(absent: &[&Need]) -> Result<()> {
    if absent.is_empty() {
        return Ok(());
    }
    let list: Vec<_> = absent
        .iter()
        .map(|need| {
            let debian = match need.packages {
                [] => String::new(),
                packages => format!("Debian: {}; ", packages.join(" ")),
            };
            format!("{} ({debian}{})", need.program, need.elsewhere)
        })
        .collect();
    bail!(
        "the tests need programs that are missing: {}",
        list.join(", ")
    )
}

/// Installs Debian packages. The package index is refreshed only if the installation fails with the current one.
fn install(packages: &[&str]) -> Result<()> {
    // `apt-get` fails while another one runs, and stages may run beside each other.
    let _turn = program::turn(&program::cache("packages")?)?;
    let apt = |args: &[&str]| {
        let mut command = Command::new("apt-get");
        command
            .args(["-q", "-y"])
            .args(args)
            .env("DEBIAN_FRONTEND", "noninteractive")
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command
    };
    let arguments = [&["install", "--no-install-recommends"], packages].concat();
    if run_stage("packages", apt(&arguments).stderr(Stdio::null())).is_ok() {
        return Ok(());
    }
    with_retries(&PAUSES, || {
        run_stage("package index", &mut apt(&["update"]))?;
        run_stage("packages", &mut apt(&arguments))
    })
}

fn works(program: &str, args: &[&str]) -> bool {
    Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether a program is on `PATH`, or in a folder of system daemons, which a user's `PATH` often lacks.
fn is_installed(program: &str) -> bool {
    which::which(program).is_ok()
        || ["/usr/sbin", "/usr/local/sbin", "/sbin"]
            .iter()
            .any(|folder| Path::new(folder).join(program).exists())
}

/// Debian keeps the server of each version in a folder that is not on `PATH`.
fn postgres_of_debian() -> bool {
    let versions = std::fs::read_dir("/usr/lib/postgresql");
    let mut versions = versions.into_iter().flatten().flatten();
    versions.any(|version| version.path().join("bin/postgres").exists())
}

fn git_serves_http() -> bool {
    Command::new("git")
        .arg("--exec-path")
        .output()
        .is_ok_and(|output| {
            let folder = String::from_utf8_lossy(&output.stdout);
            Path::new(folder.trim()).join("git-http-backend").exists()
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_programs_are_named_in_one_line_with_the_command_to_install_them() {
        let needs: Vec<_> = NEEDS
            .iter()
            .filter(|need| ["terraform", "sshd"].contains(&need.program))
            .collect();
        let message = refuse_missing(&needs).unwrap_err().to_string();
        assert!(!message.contains('\n'));
        assert!(
            message.contains("sshd (Debian: openssh-server;"),
            "{message}"
        );
        assert!(message.contains("terraform (put a terraform"), "{message}");
    }

    #[test]
    fn packages_are_asked_for_once() {
        let needs: Vec<_> = NEEDS.iter().collect();
        let packages = packages_for(&needs);
        assert_eq!(packages.iter().filter(|name| **name == "git").count(), 1);
    }
}
