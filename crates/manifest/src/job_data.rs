//! Chooses how the pod gets the job document: by its size, the executor and the operator's mode.

use job_contract::{Document, encoding, env};
use runtime::setting::SettingError;

use super::error::{ManifestErrors, Origin};
use super::executor_kind::ExecutorKind;

/// Where the document is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// In a Secret of its own, which the Job owns.
    #[default]
    Secret,
    /// In the Job itself, as the stock launcher does it. This needs only rights on Jobs.
    Env,
}

/// The encoded document and where the pod reads it from. It has as many parts as it needs variables.
#[derive(Clone, PartialEq, Eq)]
pub enum Transport {
    /// Literals in the pod's environment.
    Literal(Vec<String>),
    /// Keys of a Secret, read into the environment.
    Secret(Vec<String>),
}

/// Shows the transport and never the document.
impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (way, parts) = match self {
            Self::Literal(parts) => ("Literal", parts),
            Self::Secret(parts) => ("Secret", parts),
        };
        let sizes: Vec<usize> = parts.iter().map(String::len).collect();
        write!(f, "{way}({sizes:?} bytes)")
    }
}

impl Transport {
    /// Chooses the first transport that fits. An uncompressed document comes first, because every executor can read it.
    /// Only Mayfly's executor reads a compressed one.
    pub fn choose(
        document: &Document,
        kind: ExecutorKind,
        mode: Mode,
    ) -> Result<Self, ManifestErrors> {
        let plain = document.encode();
        if let Some(parts) = fit(&plain, kind) {
            return Ok(Self::of(parts, mode));
        }
        let size = plain.len();
        drop(plain);
        if kind != ExecutorKind::Mayfly {
            return Err(too_large(size, None, kind));
        }
        let compressed = document.encode_compressed().map_err(|_| {
            let rule = "could not be compressed for want of memory".to_owned();
            refused(Origin::Deployment, rule)
        })?;
        let parts = fit(&compressed, kind);
        parts
            .map(|parts| Self::of(parts, mode))
            .ok_or_else(|| too_large(size, Some(compressed.len()), kind))
    }

    const fn of(parts: Vec<String>, mode: Mode) -> Self {
        match mode {
            Mode::Secret => Self::Secret(parts),
            Mode::Env => Self::Literal(parts),
        }
    }
}

/// Splits the text into variables. `None`: it does not fit, or the executor does not read so many.
fn fit(encoded: &str, kind: ExecutorKind) -> Option<Vec<String>> {
    if encoded.len() > encoding::MAX_ENVIRONMENT_BYTES {
        return None;
    }
    let variables = encoding::variables(encoded);
    let is_read = kind == ExecutorKind::Mayfly || variables.len() == 1;
    is_read.then(|| {
        let parts = variables.into_iter();
        parts.map(|(_, part)| part.to_owned()).collect()
    })
}

fn too_large(size: usize, compressed: Option<usize>, kind: ExecutorKind) -> ManifestErrors {
    let compressed = compressed
        .map(|bytes| format!(" ({bytes} compressed)"))
        .unwrap_or_default();
    let limit = match kind {
        ExecutorKind::Mayfly => format!("a Secret holds {}", encoding::MAX_ENVIRONMENT_BYTES),
        ExecutorKind::Stock => format!(
            "a stock executor reads one environment string, which holds {}",
            env::MAX_ENV_STRING_BYTES - env::JOB_DATA.len() - 2
        ),
    };
    let rule = format!("is too large: {size} bytes encoded{compressed}, and {limit}");
    refused(Origin::Run, rule)
}

fn refused(origin: Origin, rule: String) -> ManifestErrors {
    let errors = vec![SettingError::new(env::JOB_DATA, rule)];
    ManifestErrors { origin, errors }
}

#[cfg(test)]
mod tests {
    use super::*;
    use job_contract::JobData;

    /// A document whose encoding has about this size, and which compresses well or not at all.
    fn document(encoded: usize, compressible: bool) -> Document {
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
        Document::written(&JobData {
            access_token: Some(text),
            ..JobData::default()
        })
    }

    fn choose(document: &Document, kind: ExecutorKind, mode: Mode) -> String {
        match Transport::choose(document, kind, mode) {
            Ok(transport) => {
                let (way, parts) = match &transport {
                    Transport::Literal(parts) => ("literal", parts),
                    Transport::Secret(parts) => ("secret", parts),
                };
                for (index, part) in parts.iter().enumerate() {
                    let string = env::job_data_part(index).len() + part.len() + 2;
                    assert!(string <= env::MAX_ENV_STRING_BYTES, "{string}");
                }
                let whole = parts.concat();
                let received = encoding::document(whole.as_bytes()).unwrap();
                assert_eq!(received.json(), document.json());
                let form = if whole == document.encode() {
                    "plain"
                } else {
                    "compressed"
                };
                format!("{way} {form} {}", parts.len())
            }
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn a_document_travels_plain_while_it_fits() {
        for (mode, way) in [(Mode::Secret, "secret"), (Mode::Env, "literal")] {
            for kind in [ExecutorKind::Mayfly, ExecutorKind::Stock] {
                let small = choose(&document(1000, true), kind, mode);
                assert_eq!(small, format!("{way} plain 1"));
            }
            let large = document(500_000, true);
            let large = choose(&large, ExecutorKind::Mayfly, mode);
            assert_eq!(large, format!("{way} plain 4"));
        }
    }

    #[test]
    fn the_limit_of_an_environment_string_is_met_to_the_byte() {
        let most = env::MAX_ENV_STRING_BYTES - env::JOB_DATA.len() - 2;
        let parts = |length: usize, kind| fit(&"x".repeat(length), kind).map(|parts| parts.len());
        for kind in [ExecutorKind::Stock, ExecutorKind::Mayfly] {
            assert_eq!(parts(most, kind), Some(1));
        }
        assert_eq!(parts(most + 1, ExecutorKind::Stock), None);
        assert_eq!(parts(most + 1, ExecutorKind::Mayfly), Some(2));
        assert_eq!(
            parts(encoding::MAX_ENVIRONMENT_BYTES + 1, ExecutorKind::Mayfly),
            None
        );
    }

    #[test]
    fn compression_is_the_last_resort_and_not_for_stock_executors() {
        let (ours, stock) = (ExecutorKind::Mayfly, ExecutorKind::Stock);
        let huge = document(2_000_000, true);
        for (mode, way) in [(Mode::Secret, "secret"), (Mode::Env, "literal")] {
            assert_eq!(choose(&huge, ours, mode), format!("{way} compressed 1"));
            let refused = choose(&huge, stock, mode);
            assert!(refused.contains("a stock executor reads one"), "{refused}");
        }
    }

    #[test]
    fn what_cannot_fit_is_refused_with_its_sizes() {
        let message = choose(
            &document(4_000_000, false),
            ExecutorKind::Mayfly,
            Mode::Secret,
        );
        assert!(message.contains("bytes encoded"), "{message}");
        assert!(message.contains("compressed"), "{message}");
        assert!(message.contains("1048576"), "{message}");
        assert!(message.len() < 200, "{message}");
    }

    #[test]
    fn the_document_is_not_shown() {
        let transport = Transport::Literal(vec!["hunter2".into()]);
        assert!(!format!("{transport:?}").contains("hunter2"));
    }
}
