//! The files of a journey: programs, a repository, scripts and journals.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;

use anyhow::{Context as _, Result};
use job_contract::env;
use test_peers::repository;

use crate::peers::LINES;

/// What the tool's requests to the store say before the number of their run.
pub(crate) const STORE_MARK: &str = "mayfly-run/";

/// Programs, repository and scripts of a journey.
pub(crate) fn write_files(base: &Path, program: &Path) -> Result<()> {
    for folder in [
        "bin",
        "data",
        "exists",
        "held",
        "hold",
        "home",
        "journal",
        "programs",
        "repository",
        "source",
    ] {
        fs::create_dir(base.join(folder))?;
    }
    for name in ["launcher", "executor"] {
        symlink(program, base.join("programs").join(name))?;
    }
    let here = base.display();
    write_script(
        &base.join("image"),
        &format!(
            "export {}='{here}/data' {}=installed {}=1 PATH='{here}/bin':\"$PATH\"\n\
             exec '{here}/programs/executor'\n",
            env::DATA_DIR,
            env::TOOL_SELECTION,
            env::STATUS_POLL_SECONDS,
        ),
    )?;
    // A wrapper of the tool writes the start of every apply and destroy to the journal. Its requests to the store name the run.
    let tool = which::which("terraform").context("`terraform` is missing: cargo xtask setup")?;
    write_script(
        &base.join("bin/terraform"),
        &format!(
            "export TF_APPEND_USER_AGENT=\"{STORE_MARK}$RUN;\"\n\
             case \"$1\" in apply|destroy) echo \"tool $1\" >> '{here}/journal/'\"$RUN\" ;; esac\n\
             exec '{}' \"$@\"\n",
            tool.display()
        ),
    )?;
    let git = which::which("git")?;
    write_script(
        &base.join("bin/git"),
        &format!(
            "for word; do case \"$word\" in file://{here}/source/*) run=\"${{word##*/}}-fetch\" ;; esac; done\n\
             if test -n \"$run\" && test -e '{here}/hold/'\"$run\"; then\n\
             : > '{here}/held/'\"$run\"\n\
             while test -e '{here}/hold/'\"$run\"; do sleep 0.05; done\nfi\n\
             exec '{}' \"$@\"\n",
            git.display()
        ),
    )?;
    fs::write(base.join("work.sh"), work_script(base))?;
    make_repository(base)
}

/// A script that prints lines, stops at the gate, and prints more lines. It writes its begin and end to the journal. What it makes
/// exists from its begin, and what it removes until its end.
fn work_script(base: &Path) -> String {
    let here = base.display();
    format!(
        "phase=$1\n\
         say() {{ n=$1; while test $n -le $2; do echo \"mark/$RUN/$phase/$n;\"; n=$((n+1)); done; }}\n\
         echo \"begin $phase\" >> '{here}/journal/'\"$RUN\"\n\
         case $phase in first|second) : > '{here}/exists/'\"$RUN-$phase\" ;; esac\n\
         say 1 {LINES}\n\
         if test -e '{here}/hold/'\"$RUN-work\"; then case $phase in second|script|gone)\n\
         : > '{here}/held/'\"$RUN-work\"\n\
         while test -e '{here}/hold/'\"$RUN-work\"; do sleep 0.05; done\n;; esac; fi\n\
         say {} {}\n\
         case $phase in gone) rm -f '{here}/exists/'\"$RUN-second\" ;; esac\n\
         echo \"end $phase\" >> '{here}/journal/'\"$RUN\"\n\
         test \"$FAIL\" != \"$phase\"\n",
        LINES + 1,
        2 * LINES
    )
}

fn make_repository(base: &Path) -> Result<()> {
    let folder = base.join("repository");
    let work = |phase: &str| format!("sh {}/work.sh {phase}", base.display());
    let module = format!(
        "resource \"terraform_data\" \"first\" {{\n  provisioner \"local-exec\" {{\n    command = \"{}\"\n  }}\n  \
         provisioner \"local-exec\" {{\n    when    = destroy\n    command = \"rm -f {}/exists/$RUN-first\"\n  }}\n}}\n\
         resource \"terraform_data\" \"second\" {{\n  depends_on = [terraform_data.first]\n  \
         provisioner \"local-exec\" {{\n    command = \"{}\"\n  }}\n  \
         provisioner \"local-exec\" {{\n    when    = destroy\n    command = \"{}\"\n  }}\n}}\n",
        work("first"),
        base.display(),
        work("second"),
        work("gone"),
    );
    let wrong = "resource \"terraform_data\" \"first\" {\n  input = var.missing\n}\n";
    for (name, text) in [("good", module.as_str()), ("wrong", wrong)] {
        fs::create_dir(folder.join(name))?;
        fs::write(folder.join(name).join("main.tf"), text)?;
    }
    repository::init(&folder);
    Ok(())
}

pub(crate) fn write_script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, format!("#!/bin/sh\n{text}"))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
    Ok(())
}
