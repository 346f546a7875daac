//! Proves that a report is genuine. The tool and the scripts of a run have the executor's user, so they can write the
//! report's file. But they do not have the key.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use super::FinalReport;
use crate::encoding::hex;
use crate::secret::{self, SecretError};

/// Input of the key derivation. With it, the key of reports differs from the platform's secret, which also signs tokens.
const PURPOSE: &[u8] = b"mayfly final report 1";
/// Prefix of a run's name when its key is derived. No report begins like this.
const RUN_PURPOSE: &str = "mayfly run 1 ";
/// The text between the report and its code.
const MARK: &str = ",\"mac\":\"";
const END: &str = "\"}";
const CODE_BYTES: usize = 32;
/// How many bytes the code adds to a report.
pub(super) const SEAL_BYTES: usize = MARK.len() + 2 * CODE_BYTES + END.len() - 1;

type Code = Hmac<Sha256>;

/// The key that the author and the reader of a report share.
#[derive(Clone, PartialEq, Eq)]
pub struct ReportKey([u8; 32]);

impl fmt::Debug for ReportKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReportKey")
    }
}

impl ReportKey {
    /// Derives the key from a secret in the encoding of [`secret::decode`].
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let secret = secret::decode(text)?;
        Ok(Self(code(&secret, PURPOSE).finalize().into_bytes().into()))
    }

    /// The secret for the executor of one run on the launcher's machine. It cannot seal reports of other runs. Executor and
    /// launcher both derive the key from this text.
    pub fn secret_of_run(&self, run: &str) -> String {
        let text = format!("{RUN_PURPOSE}{run}");
        URL_SAFE_NO_PAD.encode(code(&self.0, text.as_bytes()).finalize().into_bytes())
    }

    /// Adds the code to a report. `report` is a JSON object that is not empty.
    pub(super) fn seal(&self, report: &str) -> String {
        let code = code(&self.0, report.as_bytes()).finalize().into_bytes();
        let open = report.strip_suffix('}').unwrap_or(report);
        format!("{open}{MARK}{}{END}", hex(&code))
    }

    /// The report in a message that was sealed with this key; `None` for all other texts. The caller must check its
    /// [`super::Author`].
    pub fn open(&self, message: &str) -> Option<FinalReport> {
        let message = message.trim_end().strip_suffix(END)?;
        let (open, digits) = message.rsplit_once(MARK)?;
        let report = format!("{open}}}");
        code(&self.0, report.as_bytes())
            .verify_slice(&bytes_of(digits)?)
            .ok()?;
        serde_json::from_str(&report).ok()
    }
}

fn code(key: &[u8], text: &[u8]) -> Code {
    let mut code = Code::new_from_slice(key).expect("an HMAC takes keys of any length");
    code.update(text);
    code
}

fn bytes_of(digits: &str) -> Option<Vec<u8>> {
    if digits.len() != 2 * CODE_BYTES || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    (0..CODE_BYTES)
        .map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Author;
    use rstest::rstest;

    const SECRET: &str = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    fn key() -> ReportKey {
        ReportKey::parse(SECRET).unwrap()
    }

    fn report() -> FinalReport {
        FinalReport {
            job_id: "412".into(),
            author: Some(Author {
                run: "u-1".into(),
                exit_code: 0,
            }),
            ..FinalReport::default()
        }
    }

    #[test]
    fn a_report_is_opened_with_the_key_it_was_sealed_with() {
        let message = report().to_termination_message(Some(&key()));
        assert_eq!(key().open(&message), Some(report()));
        assert_eq!(key().open(&format!("{message}\n")), Some(report()));
        // Readers without the key can still read the report.
        let read: FinalReport = serde_json::from_str(&message).unwrap();
        assert_eq!(read, report());
    }

    #[test]
    fn no_change_of_a_message_is_missed() {
        let message = report().to_termination_message(Some(&key()));
        for at in 0..message.len() {
            let mut forged = message.clone().into_bytes();
            forged[at] ^= 1;
            let forged = String::from_utf8(forged).unwrap();
            assert_eq!(key().open(&forged), None, "{forged}");
        }
    }

    #[rstest]
    #[case::nothing("")]
    #[case::words("terminated by signal 15")]
    #[case::another_object("{}")]
    #[case::no_code("{\"outcome\":0}")]
    #[case::an_empty_code("{\"outcome\":0,\"mac\":\"\"}")]
    #[case::a_code_of_signs(
        "{\"outcome\":0,\"mac\":\"++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++++\"}"
    )]
    #[case::a_code_in_another_script(
        "{\"outcome\":0,\"mac\":\"\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\u{e9}\"}"
    )]
    fn what_was_not_sealed_is_not_opened(#[case] message: &str) {
        assert_eq!(key().open(message), None);
        assert_eq!(key().open(&report().to_termination_message(None)), None);
    }

    #[test]
    fn no_run_seals_for_another() {
        let of_run = |run| ReportKey::parse(&key().secret_of_run(run)).unwrap();
        let message = report().to_termination_message(Some(&of_run("/runs/1")));
        assert_eq!(of_run("/runs/1").open(&message), Some(report()));
        assert_eq!(of_run("/runs/2").open(&message), None);
        assert_eq!(key().open(&message), None);
    }

    #[test]
    fn another_secret_is_another_key() {
        let other = ReportKey::parse(&"+/+/".repeat(12)).unwrap();
        let message = report().to_termination_message(Some(&other));
        assert_eq!(key().open(&message), None);
    }

    #[test]
    fn a_key_is_not_shown() {
        assert_eq!(format!("{:?}", key()), "ReportKey");
    }
}
