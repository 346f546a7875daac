//! `provider_registry CERTIFICATE BALLAST BYTES_PER_SECOND`: a registry of providers for benchmarks. Their packages have `BALLAST`
//! more bytes, and each connection gets archives at this rate. It writes its certificate into a file and prints its host. It ends
//! when its input does.

use std::error::Error;
use std::io::{self, Read as _, Write as _};

use test_peers::providers::{PROVIDERS, Registry, present};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [certificate, ballast, rate] = &arguments[..] else {
        return Err("usage: provider_registry CERTIFICATE BALLAST BYTES_PER_SECOND".into());
    };
    present()?;
    let registry = Registry::start_with(ballast.parse()?, Some(rate.parse()?))?;
    for (name, version) in PROVIDERS {
        registry.archives(name, version)?;
    }
    std::fs::write(certificate, registry.certificate())?;
    writeln!(io::stdout(), "{}", registry.host())?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
