//! How the job document travels to the pod, by its size and the operator's mode.

use job_contract::{JobData, encoding, env};

use super::problem::{Fault, Problem};

/// Largest data of a Secret, keys not counted (Kubernetes' `MaxSecretSize`).
pub const MAX_SECRET_BYTES: usize = 1024 * 1024;

/// Where the document is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// In a Secret of its own, which the Job owns.
    #[default]
    Secret,
    /// In the Job itself, as the stock launcher does it; needs no rights but those on Jobs.
    Env,
}

/// Whether a document that is too large as it is may be compressed. Only Mayfly's executor reads the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// In secret mode only: env mode exists for stock executors.
    #[default]
    Auto,
    /// In both modes.
    On,
    /// Never.
    Off,
}

/// The encoded document, and how the pod gets it.
#[derive(Clone, PartialEq, Eq)]
pub enum Transport {
    /// A literal in the pod's environment.
    Literal(String),
    /// A Secret, read into the environment.
    SecretEnv(String),
    /// A Secret, mounted as a file: larger than one environment string may be.
    SecretFile(String),
}

/// Which way, and never what.
impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (way, data) = match self {
            Self::Literal(data) => ("Literal", data),
            Self::SecretEnv(data) => ("SecretEnv", data),
            Self::SecretFile(data) => ("SecretFile", data),
        };
        write!(f, "{way}({} bytes)", data.len())
    }
}

impl Transport {
    /// The first way that fits: as it is where possible, so that any executor can read it, and compressed only
    /// when nothing else is small enough.
    pub fn choose(job: &JobData, mode: Mode, compression: Compression) -> Result<Self, Problem> {
        let plain = encoding::encode(job);
        let may_compress = match mode {
            Mode::Secret => compression != Compression::Off,
            Mode::Env => compression == Compression::On,
        };
        let size = plain.len();
        let plain = match fit(plain, mode) {
            Ok(transport) => return Ok(transport),
            Err(plain) => plain,
        };
        drop(plain);
        if !may_compress {
            return Err(too_large(size, None, mode));
        }
        let compressed = encoding::encode_compressed(job).map_err(|_| Problem {
            subject: env::JOB_DATA.to_owned(),
            rule: "could not be compressed for want of memory".to_owned(),
            fault: Fault::Deployment,
        })?;
        let compressed_size = compressed.len();
        fit(compressed, mode).map_err(|_| too_large(size, Some(compressed_size), mode))
    }
}

fn fit(encoded: String, mode: Mode) -> Result<Transport, String> {
    let env_string = env::JOB_DATA.len() + encoded.len() + 2;
    match mode {
        Mode::Env if env_string <= env::MAX_ENV_STRING_BYTES => Ok(Transport::Literal(encoded)),
        Mode::Env => Err(encoded),
        Mode::Secret if env_string <= env::MAX_ENV_STRING_BYTES => {
            Ok(Transport::SecretEnv(encoded))
        }
        Mode::Secret if encoded.len() <= MAX_SECRET_BYTES => Ok(Transport::SecretFile(encoded)),
        Mode::Secret => Err(encoded),
    }
}

fn too_large(size: usize, compressed: Option<usize>, mode: Mode) -> Problem {
    let compressed = compressed
        .map(|bytes| format!(" ({bytes} compressed)"))
        .unwrap_or_default();
    let limit = match mode {
        Mode::Secret => format!("a Secret holds {MAX_SECRET_BYTES}"),
        Mode::Env => format!(
            "one environment string holds {}; `{}=secret` takes more",
            env::MAX_ENV_STRING_BYTES - env::JOB_DATA.len() - 2,
            env::JOB_DATA_MODE
        ),
    };
    Problem {
        subject: env::JOB_DATA.to_owned(),
        rule: format!("is too large: {size} bytes encoded{compressed}, and {limit}"),
        fault: Fault::Run,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A document whose encoding has about this size, and which compresses well or not at all.
    fn job(encoded: usize, compressible: bool) -> JobData {
        let mut seed = 88_172_645_463_325_252_u64;
        let text: String = (0..encoded * 3 / 4)
            .map(|_| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                if compressible {
                    'a'
                } else {
                    char::from(b'!' + u8::try_from(seed % 90).unwrap())
                }
            })
            .filter(|c| !matches!(c, '"' | '\\'))
            .collect();
        JobData {
            access_token: Some(text),
            ..JobData::default()
        }
    }

    fn choose(job: &JobData, mode: Mode, compression: Compression) -> String {
        match Transport::choose(job, mode, compression) {
            Ok(transport) => {
                let (way, data) = match &transport {
                    Transport::Literal(data) => ("literal", data),
                    Transport::SecretEnv(data) => ("secret env", data),
                    Transport::SecretFile(data) => ("secret file", data),
                };
                assert_eq!(encoding::decode(data.as_bytes()).as_ref(), Ok(job));
                let form = if *data == encoding::encode(job) {
                    "plain"
                } else {
                    "compressed"
                };
                format!("{way} {form}")
            }
            Err(problem) => problem.to_string(),
        }
    }

    #[test]
    fn a_document_travels_plain_while_it_fits() {
        for mode in [
            (Mode::Secret, "secret env plain"),
            (Mode::Env, "literal plain"),
        ] {
            assert_eq!(choose(&job(1000, true), mode.0, Compression::On), mode.1);
        }
        let large = job(200_000, true);
        assert_eq!(
            choose(&large, Mode::Secret, Compression::Auto),
            "secret file plain"
        );
    }

    #[test]
    fn the_limit_of_an_environment_string_is_met_to_the_byte() {
        let most = env::MAX_ENV_STRING_BYTES - env::JOB_DATA.len() - 2;
        assert!(matches!(
            fit("x".repeat(most), Mode::Env),
            Ok(Transport::Literal(_))
        ));
        assert!(fit("x".repeat(most + 1), Mode::Env).is_err());
        assert!(matches!(
            fit("x".repeat(most + 1), Mode::Secret),
            Ok(Transport::SecretFile(_))
        ));
    }

    #[test]
    fn compression_is_the_last_resort_and_not_for_stock_executors() {
        let huge = job(2_000_000, true);
        assert_eq!(
            choose(&huge, Mode::Secret, Compression::Auto),
            "secret env compressed"
        );
        assert!(choose(&huge, Mode::Secret, Compression::Off).contains("too large"));
        assert!(choose(&huge, Mode::Env, Compression::Auto).contains("too large"));
        assert_eq!(
            choose(&huge, Mode::Env, Compression::On),
            "literal compressed"
        );
    }

    #[test]
    fn what_cannot_fit_is_refused_with_its_sizes() {
        let message = choose(&job(4_000_000, false), Mode::Secret, Compression::Auto);
        assert!(message.contains("bytes encoded"), "{message}");
        assert!(message.contains("compressed"), "{message}");
        assert!(message.contains("1048576"), "{message}");
        assert!(message.len() < 200, "{message}");
    }

    #[test]
    fn the_document_is_not_shown() {
        let transport = Transport::Literal("hunter2".into());
        assert!(!format!("{transport:?}").contains("hunter2"));
    }
}
