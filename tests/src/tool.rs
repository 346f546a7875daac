//! The real tools: where each one is, and what a journey does if it is missing.

use std::env;
use std::ffi::OsString;
use std::path::PathBuf;

use job_contract::Tool;

/// The program, if it is there; the error says how to get it.
pub fn program(tool: Tool) -> Result<PathBuf, String> {
    let found = match tool {
        Tool::Terraform => which::which(tool.binary()).ok(),
        Tool::OpenTofu => {
            Some(test_peers::installed("tools/tofu")).filter(|program| program.is_file())
        }
    };
    found.ok_or_else(|| match tool {
        Tool::Terraform => "Terraform is not on PATH".to_owned(),
        Tool::OpenTofu => {
            "OpenTofu is not there: `cargo xtask ci tools` downloads it, or builds it with Go"
                .to_owned()
        }
    })
}

/// `PATH` with the tool on it.
pub(crate) fn search_path(tool: Tool) -> OsString {
    let path = env::var_os("PATH").unwrap_or_default();
    match tool {
        Tool::Terraform => path,
        Tool::OpenTofu => {
            let own = test_peers::installed("tools").canonicalize().unwrap();
            env::join_paths([own].into_iter().chain(env::split_paths(&path))).unwrap()
        }
    }
}
